"""How parameters and optimizers refer to the sharded engine (shardcore.engine.engine.Engine).

Invariant: no reference cycle leads through an engine. The model's hooks and the optimizer keep it.
It keeps parameters, buffers and states, and refers to the model, its modules and the optimizer
weakly; parameters refer to it by `EngineRef`. So its memory, threads and process group are freed
with the last reference (tests/engine/test_engine_lifetime.py). Parameters stay the user's objects,
and their data are views of buffers (`Bucket.weight`). The optimizer keeps its param_groups.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

import torch

Gradients = Sequence[torch.Tensor | None]


class EngineRef(weakref.ref[Any]):
    """A parameter's weak reference to its engine. A copy of the parameter refers to nothing.

    It is pickled as an empty dict of a kind that torch.load reads with weights_only, which None's
    type is not.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


class Superseded:
    """What an engine becomes whose model `initialize` has sharded again: everything that is
    asked of it raises ValueError.
    """

    def refuse(self, op: str) -> NoReturn:
        """Raise the error of a call."""
        raise ValueError(
            f"{op}: initialize was called a second time with this model. Use the engine and the "
            "optimizer from the second call"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and its libraries ask of any object
            raise AttributeError(name)
        self.refuse(name)

    def __repr__(self) -> str:
        """Say what became of it."""
        return "<superseded: initialize was called a second time with this model>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a forward."""
        self.refuse("forward")

    def destroy(self) -> None:
        """Do nothing: all is freed."""


def engine_of(owner: object) -> Any:
    """Return the engine of a sharded model, or of a parameter of it; None if it has none, or if
    that was freed.
    """
    engine = getattr(owner, "_shardcore_engine", None)
    return engine() if isinstance(engine, EngineRef) else engine or None


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a bound method that refers to its object weakly; after that is freed it
    returns None.
    """
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        function = weak()
        return None if function is None else function(*arguments)

    return call


@cache  # once per class
def keep_uncompiled(kind: type, *names: str, reason: str | None = None) -> None:
    """Make torch.compile call these methods of a class without tracing them. Imports torch._dynamo.

    reason: what torch.compile's logs show. (A disabled bound method, kept on its object, would be a
    reference cycle.)
    """
    for name in names:
        setattr(kind, name, torch.compiler.disable(vars(kind)[name], reason=reason))  # type: ignore[no-untyped-call]
