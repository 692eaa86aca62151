"""torch.compile of a sharded model: the forward of each unit except the root.

Invariants: The hooks of a unit (its gather, the wait for its update) run outside of the compiled
forward, so a graph ends only where a unit ends. Modules keep their class, names and state dicts. A
copy or a pickle has the ordinary forward.

`module.compile()` compiles the hooks, too, and each of them cuts the graph. Hence an attribute
`forward` of the module takes the place of the method. nn.Module calls it between the hooks.
Activation checkpointing is a part of the forward (extras/activations.py, transformers), and so of
the graph, as torch recommends. Only where inputs are offloaded or partitioned is the compiled code
inside of the checkpoint.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from shardcore.engine.agreement import agree, attempt
from shardcore.engine.engine import Engine
from shardcore.engine.unshard import tracer
from shardcore.optim.interface import keep_uncompiled

logger = logging.getLogger("shardcore")

ARGUMENTS = ("backend", "mode", "dynamic", "fullgraph", "options", "disable")
# An attribute of modules whose forward cannot be a part of a graph, and calls `compiled_inside`.
COMPILES_INSIDE = "_shardcore_compiles_inside"
_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def compile_arguments(
    op: str, compile: bool | Mapping[str, Any], sharded: bool
) -> dict[str, Any] | None:
    """Return the keyword arguments of torch.compile, or None if `compile` is False.

    sharded: Whether weights are sharded (stage 3).

    Raises TypeError or ValueError, with the reason of torch, for arguments that torch.compile does
    not accept. Does not compile.
    """
    if compile is False:
        return None
    if compile is not True and not isinstance(compile, Mapping):
        raise TypeError(
            f"{op}: compile is {compile!r}; expected True, False or a dict of arguments of "
            "torch.compile"
        )
    arguments = {} if compile is True else dict(compile)
    for name in arguments:
        if name not in ARGUMENTS:
            raise TypeError(
                f"{op}: compile has the unknown key {name!r}; expected {', '.join(ARGUMENTS)}"
            )
    # by torch, before all ranks have agreed, and without a first call
    try:
        torch.compile(_nothing, **arguments)
    except Exception as error:  # torch has no common type for them
        cause = str(error)[:300]
        raise ValueError(
            f"{op}: torch.compile does not accept {in_words(arguments)}: {cause}"
        ) from error
    options = arguments.get("options") or {}
    if sharded and (arguments.get("mode") in _CUDA_GRAPHS or options.get("triton.cudagraphs")):
        raise ValueError(
            f"{op}: compile is {in_words(arguments)} at stage 3. It records CUDA graphs, but "
            'gathered weights change their addresses. Use mode="max-autotune-no-cudagraphs", or a '
            "stage from 0 to 2"
        )
    return arguments


def _nothing() -> None:
    """Stand for a forward where only the arguments of torch.compile matter."""


def in_words(value: Any) -> str:
    """Return the option compile as a text that is equal on all ranks: functions by their names."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {in_words(value[key])}' for key in sorted(value))}}}"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def compile_units(engine: Engine, arguments: Mapping[str, Any] | None) -> None:
    """Let the units of a sharded model except the root run compiled forwards. Each class is
    compiled by its first call; a unit that is compiled already is compiled anew.

    arguments: Of torch.compile; None does nothing.
    """
    if arguments is None:
        return
    names = [name for name in engine.plan.members if name]
    if not names and engine.comm.rank == 0:
        logger.warning(
            "shard: compile has no effect. The root is not compiled, and the model has no other "
            "unit. Name the blocks in units="
        )
    # A unit inside of another one is a graph of its own at every stage, so stages have equal bits.
    keep_uncompiled(CompiledForward, "__call__", reason="a unit is compiled on its own")
    # units of one class share one compiled forward
    compiled = cache(partial(torch.compile, **arguments))
    for name in names:
        module = engine.model.get_submodule(name)
        take_off_compiled(module)
        module.__dict__["forward"] = CompiledForward(module, compiled, engine, name)


def compile_together(
    op: str, engine: Engine, compile: Mapping[str, Any], problems: list[BaseException]
) -> None:
    """Compile the units of a sharded model as `shard(compile=...)` does. Collective.

    problems: Why this rank refuses.

    Raises TypeError or ValueError, on every rank and with nothing changed, for bad arguments and if
    ranks disagree.
    """
    arguments: list[dict[str, Any] | None] = []
    sharded = engine.unsharder is not None
    attempt(problems, lambda: arguments.append(compile_arguments(op, compile, sharded)))
    agree(engine.comm, op, problems, [("option", "compile", in_words(compile))])
    compile_units(engine, arguments[0])


def compiled_inside(module: nn.Module, method: Any) -> Callable[..., Any]:
    """Return a method of `module`, compiled if the module is a compiled unit. For a forward that
    calls it and has COMPILES_INSIDE.
    """
    forward = module.__dict__.get("forward")
    if not isinstance(forward, CompiledForward):
        return method  # type: ignore[no-any-return]
    return partial(forward.run, method.__func__, module)


def take_off_compiled(module: nn.Module) -> None:
    """Give a module the forward that it had before `compile_units`."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, UnitForward):
        forward.remove()


class UnitForward:
    """The forward of a module, in the module's `__dict__`. Copies of a compiled unit have it.

    before: A forward that the module had in its `__dict__`.
    """

    def __init__(self, module: nn.Module, before: Callable[..., Any] | None) -> None:
        self._module, self._before = weakref.ref(module), before

    @property
    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("forward: its module is gone. Keep the module to call its forward")
        return module

    def _function(self, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function to call, and its arguments by position."""
        if self._before is not None:
            return self._before, args
        # looked up at each call, because checkpoint_wrapper changes the class
        return type(self._owner).forward, (self._owner, *args)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward as it is."""
        function, arguments = self._function(args)
        return function(*arguments, **kwargs)

    def remove(self) -> None:
        """Give the module the forward that it had before."""
        attributes = self._owner.__dict__
        if self._before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = self._before

    def __reduce__(self) -> tuple[Any, ...]:
        """Be copied and pickled with the module."""
        return UnitForward, (self._owner, self._before)


class CompiledForward(UnitForward):
    """The compiled forward of a unit. compiled: Compiles a function, once. unit: Its name."""

    def __init__(
        self, module: nn.Module, compiled: Callable[[Any], Any], engine: Engine, unit: str
    ) -> None:
        super().__init__(module, module.__dict__.get("forward"))
        self._compiled, self._engine, self._unit = compiled, engine, unit

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compile a function, and call it where float8 layers find their bytes."""
        unsharder = self._engine.unsharder
        float8 = None if unsharder is None else unsharder.float8
        with nullcontext() if float8 is None else float8.shown(self._owner, self._unit):
            return self._compiled(function)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward."""
        compiles_inside = getattr(self._owner, COMPILES_INSIDE, False)
        if compiles_inside or tracer() is not None:
            return super().__call__(*args, **kwargs)
        function, arguments = self._function(args)
        return self.run(function, *arguments, **kwargs)
