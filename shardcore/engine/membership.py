"""Whether the model still has the Parameters that it had when it was sharded: others would silently not be trained.

A step asks (`Membership.check`). While nothing was registered, replaced or removed that is a comparison of what each module
holds and is, by identity, a microsecond a module; names are looked at only if something was.
"""

import sys
import weakref
from collections.abc import Iterator
from itertools import chain

from torch import nn


def check_unwrapped(op: str, model: nn.Module) -> None:
    """Raise ValueError if `model`, or a module of it, is wrapped in what averages gradients over ranks by itself."""
    wrappers: tuple[type, ...] = (nn.parallel.DistributedDataParallel,)
    # torch's replicate() makes the module's class one of these; where nobody has imported it, there is none.
    composable = getattr(sys.modules.get("torch.distributed._composable.replicate"), "DDP", None)
    if composable is not None:
        wrappers += (composable,)
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            inside = "replicate()" if composable is not None and isinstance(module, composable) else type(module).__name__
            plain = "" if inside == "replicate()" else f" (pass {name or 'model'}.module)"
            raise ValueError(
                f"{op}: {name or 'the model'} is wrapped in {inside}, which would average gradients a second time; expected "
                f"the plain module{plain}"
            )


class Membership:
    """The names and Parameters of a model, as they were when this was made."""

    def __init__(self, model: nn.Module) -> None:
        """Remember what `model` has now."""
        self._model = weakref.ref(model)  # it keeps this, by its hooks
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._modules: list[weakref.ref[nn.Module]] = []
        self._remember(model)

    def _remember(self, model: nn.Module) -> None:
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._held = self._look()

    def _look(self) -> list[int]:
        """Return what the modules hold. (Where only its place among them changed, names did, and no Parameter.)"""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        params = chain.from_iterable(module._parameters.values() for module in modules)
        children = chain.from_iterable(module._modules.values() for module in modules)
        return [*map(id, chain(params, children, map(type, modules)))]

    def check(self, op: str) -> None:
        """Raise ValueError, with names, if a Parameter was added, replaced, removed or tied to another one.

        Modules that were put around others (activation checkpointing, torch.compile) only change names; those that average
        gradients by themselves are refused as well.
        """
        model = self._model()
        if model is None or self._look() == self._held:  # only modules of it are left, which the user trains on
            return
        check_unwrapped(op, model)
        changes = list(self._changes(model))
        if changes:
            more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
            raise ValueError(
                f"{op}: the model's parameters are not those that shard() was given: {'; '.join(changes[:3])}{more}; "
                "expected the same Parameter objects (add adapters, tie and replace weights before shard(); set values in "
                "place or with load_state_dict)"
            )
        self._remember(model)

    def _changes(self, model: nn.Module) -> Iterator[str]:
        first_names: dict[nn.Parameter, str] = {}
        for name, param in self._params.items():
            first_names.setdefault(param, name)
        now = dict(model.named_parameters(remove_duplicate=False))
        for name, param in now.items():
            before = self._params.get(name)
            if param not in first_names:
                yield f"{name} was {'added' if before is None else 'replaced'} and would not be trained"
            elif before is not None and before is not param:
                yield f"{name} is {first_names[param]} now"
        present = set(now.values())
        replaced = {self._params[name] for name in now if name in self._params}
        for param, name in first_names.items():
            if param not in present and param not in replaced:
                yield f"{name} was removed"
