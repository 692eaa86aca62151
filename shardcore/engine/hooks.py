"""What a sharded model's own methods do (forward, state_dict, load_state_dict, zero_grad), and
whether the model still is the one that was sharded.

All are hooks and one instance attribute on the user's module: its class stays. The hooks know how
to be copied: a deepcopy of a sharded model is an ordinary model with ordinary weights.
"""

import operator
import weakref
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn

from shardcore.engine.build import become, check_unwrapped
from shardcore.engine.compiled import take_off_compiled
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.float8 import SHOWN
from shardcore.engine.model_state import begin_load, begin_read, end_load, end_read
from shardcore.engine.quantized import (
    entry_of,
    keep_as_packed,
    keep_class,
    parts_of,
    warn_of_unquantized,
    with_parts,
)
from shardcore.engine.slices import slice_of
from shardcore.engine.units import callable_parts
from shardcore.engine.unshard import in_backward
from shardcore.optim.float8 import float8_linears
from shardcore.torch_private import forward_hooks, forward_pre_hooks, pytree, state_dict_pre_hooks


def attach(model: nn.Module, engine: Engine, casts: Mapping[str, torch.dtype]) -> None:
    """Install the hooks of `engine` on its model. casts: to which dtypes inputs of units are
    cast, by name ("": the root).
    """
    engine.membership = Membership(model)
    model.__dict__["_shardcore_engine"] = engine
    model.__dict__["zero_grad"] = _ZeroGrad(model, engine)
    keep = engine.handles.append
    keep(model.register_forward_pre_hook(_BeforeForward(engine, casts.get("")), with_kwargs=True))
    for name, dtype in casts.items():
        if name:  # before the unit's own hook, which watches the inputs that forward is given
            keep(
                model.get_submodule(name).register_forward_pre_hook(
                    _CastInputs(engine, dtype), with_kwargs=True
                )
            )
    if engine.unsharder is not None:
        for index, unit in enumerate(engine.unsharder.units):
            module = model.get_submodule(unit.name)
            # the user's, which may read weights (weight_norm's do)
            if forward_pre_hooks(module) and module is not model:
                keep(
                    module.register_forward_pre_hook(
                        _UnitHook(engine, index, "before_hooks"), prepend=True
                    )
                )
            keep(
                module.register_forward_pre_hook(
                    _UnitHook(engine, index, "before_forward"), with_kwargs=True
                )
            )
            keep(module.register_forward_hook(_UnitHook(engine, index, "after_forward")))
            for part in callable_parts(model, unit, engine.unsharder.units):
                keep(part.register_forward_pre_hook(_UnitHook(engine, index, "before_part")))
                keep(part.register_forward_hook(_UnitHook(engine, index, "after_part")))
    if engine.overlap_step is not None:
        model.__dict__["train"] = _Train(model, engine)
        # before the user's own hooks, which may read weights, too
        for index, unit in enumerate(engine.overlap_step.units):
            keep(
                model.get_submodule(unit.name).register_forward_pre_hook(
                    _BeforeWeights(engine, index), prepend=True
                )
            )
    if engine.unsharder is not None and engine.unsharder.float8 is not None:
        for linear in float8_linears(model).values():  # after the hooks that gather its unit
            keep(linear.register_forward_pre_hook(_Float8Weight(engine, True)))
            # not always_call: torch.compile compares the number of the hook, and so each block
            keep(linear.register_forward_hook(_Float8Weight(engine, False)))
    keep(model.register_forward_hook(_AfterForward(engine)))
    keep_as_packed(model, engine.device)
    if engine.comm.rank == 0:
        warn_of_unquantized(model)
    attach_state_dicts(model, engine)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.__dict__["flatten_parameters"] = _FlattenParameters(module, engine)
        for name in _FOR_NAMES:
            if hasattr(type(module), name):
                module.__dict__[name] = _ForNames(module, engine, name)
        if any(param is not None for param in module._parameters.values()):
            load = _LoadHooks(engine)
            keep(module.register_load_state_dict_pre_hook(load.before))  # type: ignore[no-untyped-call]
            keep(module.register_load_state_dict_post_hook(load.after))  # type: ignore[no-untyped-call]


def attach_state_dicts(model: nn.Module, engine: Engine) -> None:
    """Install the hooks of state dicts where the engine has parameters, unless they are there."""
    keep = engine.handles.append
    for name, module in model.named_modules():
        hooks = [
            hook for hook in state_dict_pre_hooks(module) if isinstance(hook, _BeforeStateDict)
        ]
        there = any(hook.engine is engine for hook in hooks)
        params = with_parts(module.named_parameters())
        if not there and any(param in engine.managed for _, param in params):
            keep(module.register_state_dict_pre_hook(_BeforeStateDict(engine, name)))
            keep(module.register_state_dict_post_hook(_AfterStateDict(engine, name)))


_PARAMETERS, _MODULES = attrgetter("_parameters"), attrgetter("_modules")
_VALUES = methodcaller("values")


class Membership:
    """The names and Parameters of a model, as they were when this was made. Others would silently
    not be trained.

    While nothing was registered, replaced or removed a check compares what each module holds and
    is, by identity: less than a microsecond per module.
    """

    def __init__(self, model: nn.Module) -> None:
        """Remember what `model` has now."""
        self._model = weakref.ref(model)  # it keeps this, by its hooks
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._modules: list[weakref.ref[nn.Module]] = []
        self._remember(model)

    def _remember(self, model: nn.Module) -> None:
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._at_shard = self._look()

    def _look(self) -> list[int]:
        """Return what the modules hold. (Where only its place among them changed, names did, and
        no Parameter.) Without a frame of Python for each module, as every step does this.
        """
        modules = [module for ref in self._modules if (module := ref()) is not None]
        params = chain.from_iterable(map(_VALUES, map(_PARAMETERS, modules)))
        children = chain.from_iterable(map(_VALUES, map(_MODULES, modules)))
        return [*map(id, chain(params, children, map(type, modules)))]

    def check(self, op: str) -> None:
        """Raise ValueError, with names, if a Parameter was added, replaced, removed or tied to
        another one.

        Modules that were put around others (activation checkpointing, torch.compile) only change
        names; those that average gradients by themselves are refused as well.
        """
        model = self._model()
        # only modules of it are left, which the user trains on
        if model is None or self._look() == self._at_shard:
            return
        check_unwrapped(op, model)
        changes = list(self._changes(model))
        if changes:
            more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
            raise ValueError(
                f"{op}: the model's parameters changed after shard(): "
                f"{'; '.join(changes[:3])}{more}; expected the same Parameter objects. Add "
                "adapters, tie and replace weights before shard(); set values in place or with "
                "load_state_dict"
            )
        self._remember(model)

    def names(self) -> dict[torch.Tensor, str]:
        """Return the first name of each Parameter, and of its scales, as the model has it now; of
        a model that is gone, as it had it.
        """
        model = self._model()
        named = self._params.items() if model is None else model.named_parameters()
        names: dict[torch.Tensor, str] = {}
        for name, param in with_parts(named):
            names.setdefault(param, name)
        return names

    def _changes(self, model: nn.Module) -> Iterator[str]:
        first_names: dict[nn.Parameter, str] = {}
        for name, param in self._params.items():
            first_names.setdefault(param, name)
        now = dict(model.named_parameters(remove_duplicate=False))
        for name, param in now.items():
            before = self._params.get(name)
            if param not in first_names:
                yield (
                    f"{name} was {'added' if before is None else 'replaced'} and would not be "
                    f"trained"
                )
            elif before is not None and before is not param:
                yield f"{name} is {first_names[param]} now"
        present = set(now.values())
        replaced = {self._params[name] for name in now if name in self._params}
        for param, name in first_names.items():
            if param not in present and param not in replaced:
                yield f"{name} was removed"


@torch.no_grad()
def detach(model: nn.Module) -> None:
    """Make a sharded model an ordinary one, which can be sharded anew. Collective; the optimizer is
    of no use afterwards.

    Its modules get new Parameters with full weights, from the masters (in float32 where `precision`
    made the masters, else in the dtype that they train in): in host memory if they were sharded,
    else on the device. `engine_of(model)` is None then. Tensor-parallel ones are DTensors, with
    this rank's slices, always on the device.
    """
    engine = engine_behind("detach", model)
    engine.read_all("detach", "the model")
    new_params: dict[nn.Parameter, nn.Parameter] = {}
    for _, param in engine.unmanaged:
        new_params[param] = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
    fulls = engine.full_tensors.of_buckets(
        (bucket, engine.master_or_weight(bucket)) for bucket in engine.buckets
    )
    scales = {scale for param in model.parameters() for _, scale in parts_of(param)}
    for bucket, full in zip(engine.buckets, fulls, strict=True):
        for managed in bucket.params:
            dtype = full.dtype if engine.options["precision"] is not None else managed.param.dtype
            device = engine.device if engine.unsharder is None else torch.device("cpu")
            value = managed.slice_of(full).to(device, dtype, copy=True)
            if managed.param in scales:
                become(managed.param, value)
                continue
            new_params[managed.param] = nn.Parameter(
                managed.as_param(value), requires_grad=managed.param.requires_grad
            )
    for module in model.modules():
        for name, old in module._parameters.items():
            if old in new_params:
                module._parameters[name] = keep_class(new_params[old], old)
    take_off(model, engine)


def take_off(model: nn.Module, engine: Engine) -> None:
    """Remove the hooks of `engine` and its stand-ins for methods. Parameters still are in its
    buckets.
    """
    for hook in [*engine.hooks]:
        hook.engine = None
    for handle in (*engine.handles, *engine.reducer.handles):
        handle.remove()
    for name in ("_shardcore_engine", "zero_grad", "train"):
        model.__dict__.pop(name, None)
    if isinstance(model.__dict__.get("save_pretrained"), Method):
        del model.__dict__["save_pretrained"]
    for module in model.modules():
        take_off_compiled(module)


class _EngineHook:
    """A hook that a copy of the model keeps without the engine: `self.engine` is None there, and
    the hook does nothing.
    """

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine
        if engine is not None:
            engine.hooks.add(self)


class Method(_EngineHook):
    """What stands in for a method of the model, which has it in its `__dict__` and so is not
    kept by it.
    """

    def __init__(self, model: nn.Module, engine: Engine | None) -> None:
        super().__init__(engine)
        self._model = weakref.ref(model)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this method is gone; expected it to be kept")
        return model

    def __reduce__(self) -> tuple[Any, ...]:
        """Be copied and pickled with the model, as a method of the copy."""
        return type(self), (self.model, None)


class _ZeroGrad(Method):
    """`model.zero_grad`: gradients are sharded, where nn.Module.zero_grad does not look."""

    def __call__(self, set_to_none: bool = True) -> None:
        if self.engine is not None:
            self.engine.zero_grad(set_to_none)
        else:
            type(self.model).zero_grad(self.model, set_to_none)


class _Train(Method):
    """`model.train`, and so `model.eval`: they wait for the step, so that references held before
    show the new weights.
    """

    def __call__(self, mode: bool = True) -> nn.Module:
        if self.engine is not None and mode != self.model.training:
            self.engine.synchronize()
        return type(self.model).train(self.model, mode)


class _FlattenParameters(Method):
    """`flatten_parameters` of torch's RNNs, by which cuDNN takes weights into memory of its own,
    out of the engine's.
    """

    def __call__(self) -> None:
        if self.engine is None:
            type(self.model).flatten_parameters(self.model)  # type: ignore[attr-defined]


# Methods of PEFT's modules around weights that train beside adapters. The rank that saves calls
# them alone.
_FOR_NAMES = "adapter_state_dict", "adapter_state_dict_load_map"


class _ForNames(Method):
    """A method that makes a state dict of a part of the module, for its keys."""

    def __init__(self, model: nn.Module, engine: Engine | None, name: str) -> None:
        super().__init__(model, engine)
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = getattr(type(self.model), self._name)
        if self.engine is None:
            return method(self.model, *args, **kwargs)
        self.engine.names_only = True
        try:
            return method(self.model, *args, **kwargs)
        finally:
            self.engine.names_only = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model, None, self._name)


class _CastInputs(_EngineHook):
    """Casts floating inputs, in a copy of the model, too."""

    def __init__(self, engine: Engine | None, input_dtype: torch.dtype | None) -> None:
        super().__init__(engine)
        self.input_dtype = input_dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if self.input_dtype is None:
            return None
        return tuple(map(self._cast, args)), {
            name: self._cast(value) for name, value in kwargs.items()
        }

    def _cast(self, value: Any) -> Any:
        """Cast an argument. One in which nothing is cast stays the same object, to which forward
        may write (a cache).
        """
        leaves, spec = pytree.tree_flatten(value)
        cast = [
            x.to(self.input_dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in leaves
        ]
        return value if all(map(operator.is_, leaves, cast)) else pytree.tree_unflatten(cast, spec)


class _BeforeForward(_CastInputs):
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if self.engine is not None:
            clock = self.engine.comm.clock
            if clock.on and _trains():
                clock.begin("forward")
            self.engine.begin_forward(module)
        return super().__call__(module, args, kwargs)


def _trains() -> bool:
    """Whether this forward is a step's: none without gradients, or repeated in backward.
    Compiled ones are not timed.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and not in_backward()


class _AfterForward(_EngineHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.engine is not None:
            self.engine.end_forward(module, output)
            clock = self.engine.comm.clock
            if clock.on and _trains():
                clock.end("forward")


class _UnitHook(_EngineHook):
    """Calls a method of the unsharder with a unit's number and what the hook is given."""

    def __init__(self, engine: Engine | None, index: int, method: str) -> None:
        super().__init__(engine)
        self.index, self.method = index, method

    def __call__(self, *arguments: Any) -> None:
        if self.engine is not None and (unsharder := self.engine.active_unsharder) is not None:
            getattr(unsharder, self.method)(self.index, *arguments)


class _BeforeWeights(_EngineHook):
    def __init__(self, engine: Engine | None, index: int) -> None:
        super().__init__(engine)
        self.index = index

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.engine is not None and self.engine.overlap_step is not None:
            self.engine.overlap_step.before_forward(self.index)


class _Float8Weight(_EngineHook):
    """Lets the forward of torchao's Float8Linear see its weight as the float8 bytes that were
    gathered.
    """

    def __init__(self, engine: Engine | None, begins: bool) -> None:
        super().__init__(engine)
        self.begins = begins

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if vars(module).get(SHOWN) is not None:  # its compiled unit does this (engine/compiled.py)
            return
        vars(module).pop("weight", None)
        if not self.begins or self.engine is None or self.engine.unsharder is None:
            return
        if (float8 := self.engine.unsharder.float8) is not None:
            float8.show(module)


class _ForwardMethod:
    """A method of a module that uses weights as its forward does. Found in the module's
    `__dict__`, which a copy has, too.
    """

    def __init__(self, module: nn.Module, name: str, method: Any) -> None:
        self._module, self._name, self._method = weakref.ref(module), name, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError(f"the module of {self._name} is gone; expected it to be kept")
        before, after = forward_pre_hooks(module), forward_hooks(module)
        ours: list[Any] = [
            hook
            for hook in (*(hook for hook, _ in before), *after)
            if isinstance(hook, _EngineHook) and hook.engine is not None
        ]
        engines = [hook.engine for hook in ours]
        for hook, with_kwargs in before:
            if hook in ours:
                changed = hook(module, args, kwargs) if with_kwargs else hook(module, args)
                args, kwargs = changed or (args, kwargs)
        try:
            for hook in ours:  # inside, forward and other such methods find all done
                hook.engine = None
            output = self._method(module, *args, **kwargs)
        finally:
            for hook, engine in zip(ours, engines, strict=True):
                hook.engine = engine
        for hook in after:
            if hook in ours:
                hook(module, args, output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        """Be copied and pickled with the module, as a method of the copy."""
        return type(self), (self._module(), self._name, self._method)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method of `module`, such as `encode` or `generate`, use weights as forward does, at
    every stage.

    At stage 3 a call unshards the module if it is a unit, in backward, too. Outside of repeated
    blocks it unshards the unit around a module. With overlap_step=True the call waits for the
    update of the unit. A method of the whole model casts inputs as forward does.

    Call it before or after `shard`. For a module outside of a sharded model nothing changes. As
    with forward, every rank must make the same calls in the same order (or all calls inside
    `full_params`).

    Raises ValueError if the module's class has no method of this name.
    """
    method = getattr(type(module), name, None)
    if not callable(method):
        raise ValueError(
            f"register_forward_method: {type(module).__name__} has no method {name!r}; expected "
            f"the name of one of its methods"
        )
    module.__dict__[name] = _ForwardMethod(module, name, method)


class _StateDictHook(_EngineHook):
    """A hook of a module's state_dict, by the module's name: a part may also lie in a module
    that is not sharded.
    """

    def __init__(self, engine: Engine | None, name: str) -> None:
        super().__init__(engine)
        self.name = name


class _BeforeStateDict(_StateDictHook):
    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.engine is not None and not self.engine.names_only:
            begin_read(self.engine, module, self.name, prefix)


class _AfterStateDict(_StateDictHook):
    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        if self.engine is not None and not self.engine.names_only:
            end_read(self.engine, self.name, prefix, state_dict)


class _LoadHooks(_EngineHook):
    """The hooks of one module's part of a load_state_dict."""

    def __init__(self, engine: Engine | None) -> None:
        super().__init__(engine)
        self._values: list[tuple[nn.Parameter, torch.Tensor]] = []

    def before(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        if self.engine is None:
            return
        self._values = []
        if local_metadata.get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict: assign is True for a sharded model; expected False (its "
                "parameters are views into buffers)"
            )
        own = [(prefix + name, p) for name, p in module._parameters.items() if p is not None]
        params = {name: p for name, p in with_parts(own) if self.engine.knows(p)}
        begin_load(self.engine, [*params.values()])
        for key, param in params.items():
            value = entry_of(state_dict, key)
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                self._values.append((param, value))
                # torch copies no plain tensor to a DTensor
                if (cut := slice_of(key, param)) is not None:
                    state_dict[key] = cut.wrap(cut.cut(value).contiguous().to(param.device))

    def after(self, module: nn.Module, incompatible_keys: Any) -> None:
        if self.engine is not None:
            end_load(self.engine, self._values)
        self._values = []
