"""Units: what is gathered and reduced together, and how a model is cut into them.

A unit is a module of the model that is called, since weights are gathered for its forward: never a
ModuleList or ModuleDict, nor what lies inside a module of torch's that reads the weights of its
parts (`_READERS`). The root (the model itself) holds whatever no other unit holds. Each parameter
belongs to one unit: the innermost one that contains every module which uses it, so a weight tied
across units belongs to their parent.

Note [Whole modules]: "auto" and a number choose nothing inside a module that is marked as a leaf
(deepspeed/leaf_modules.py) or listed after them. Outside of other units it is a unit itself. So
ranks may use other parts of it, as of a mixture of experts.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import nn

from shardcore.engine.bucket import Bucket
from shardcore.engine.quantized import with_parts

UnitPolicy: TypeAlias = (
    str | int | type[nn.Module] | Sequence[str | int | type[nn.Module] | nn.Module]
)

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# They read weights of modules inside them without calling these: out_proj always, others in
# evaluation (torch's fast path).
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass
class UnitSpec:
    """A unit before it has buffers: its module, that module's name in the model ("" for the
    root), and its parameters with their scales (engine/quantized.py).
    """

    name: str
    module: nn.Module
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)


def plan_units(model: nn.Module, policy: UnitPolicy = "auto") -> list[UnitSpec]:
    """Split `model` into units by `policy`; returns them in module order, the root first, empty
    ones left out.

    policy: "auto" (the children of every outermost container that repeats a class: the blocks of a
    transformer; of lists in a list, their children); a module class or several; a list of modules
    of the model; or an integer n (the innermost modules with at least n parameters of their own or
    of smaller modules below them). Or a list of "auto" or n, then classes or modules that stay
    whole: see Note [Whole modules]. Raises ValueError or TypeError for anything else.
    """
    chosen = set(_choose(model, policy))
    chosen.discard(model)
    units = {model: UnitSpec("", model)}
    units.update(
        {
            module: UnitSpec(name, module)
            for name, module in model.named_modules()
            if module in chosen
        }
    )
    for param_name, param, chain in _owner_chains(model, chosen):
        units[chain[-1]].params.append((param_name, param))
    return [unit for unit in units.values() if unit.params]


def _owner_chains(
    model: nn.Module, chosen: set[nn.Module]
) -> Iterator[tuple[str, nn.Parameter, list[nn.Module]]]:
    """Yield each distinct parameter with the units that contain all of its uses, outermost
    first.
    """
    first_name: dict[nn.Parameter, str] = {}
    common: dict[nn.Parameter, list[nn.Module]] = {}
    for name, param, chain in _uses(model, chosen, "", [model]):
        first_name.setdefault(param, name)
        so_far = common.get(param, chain)
        common[param] = [a for a, b in zip(so_far, chain, strict=False) if a is b]
    for param, name in first_name.items():
        yield name, param, common[param]


def _uses(
    module: nn.Module, chosen: set[nn.Module], prefix: str, chain: list[nn.Module]
) -> Iterator[tuple[str, nn.Parameter, list[nn.Module]]]:
    """Yield each use of a parameter in `module`, which is called `prefix`, with the units around
    it, outermost first.
    """
    if module in chosen:
        chain = [*chain, module]
    own = [(prefix + key, param) for key, param in module._parameters.items() if param is not None]
    for name, param in with_parts(own):
        yield name, param, chain
    for name, child in module._modules.items():
        if child is not None:
            yield from _uses(child, chosen, f"{prefix}{name}.", chain)


def _choose(model: nn.Module, policy: UnitPolicy) -> Collection[nn.Module]:
    if isinstance(policy, str | int):
        return _choose_by_rule(model, policy, [])
    if not isinstance(policy, type | Iterable):
        raise TypeError(
            f'shard: units is {policy!r}; expected "auto", module classes, a list of modules, or a '
            f"number"
        )
    items = [policy] if isinstance(policy, type) else list(policy)
    if items and (items[0] == "auto" or isinstance(items[0], int)):
        return _choose_by_rule(model, items[0], _named(model, items[1:]))
    return _named(model, items)


def _choose_by_rule(
    model: nn.Module, rule: str | int, listed: Sequence[nn.Module]
) -> list[nn.Module]:
    """Return what "auto" or a number chooses. listed: modules that stay whole, beside those that
    are marked.
    """
    whole = {*listed, *filter(is_leaf, model.modules())}
    if isinstance(rule, str):
        if rule != "auto":
            raise ValueError(
                f'shard: units is "{rule}"; expected "auto", module classes, a list of modules, or '
                f"a number"
            )
        return list(_repeated_blocks(model, whole))
    if isinstance(rule, bool):
        raise TypeError(f"shard: units is {rule}; expected a number of parameters, not a bool")
    if rule < 1:
        raise ValueError(f"shard: units is {rule}; expected at least 1 parameter a unit")
    return _by_size(model, rule, whole)


def _named(model: nn.Module, items: Sequence[Any]) -> list[nn.Module]:
    """Return the modules of a list of classes and modules."""
    classes = tuple(
        item for item in items if isinstance(item, type) and issubclass(item, nn.Module)
    )
    modules = [item for item in items if isinstance(item, nn.Module)]
    if len(classes) + len(modules) != len(items):
        strange = next(
            i
            for i in items
            if not (isinstance(i, nn.Module) or (isinstance(i, type) and issubclass(i, nn.Module)))
        )
        raise TypeError(
            f"shard: units has {strange!r}; expected module classes or modules of the model"
        )
    inside = set(model.modules())
    for module in modules:
        if module not in inside:
            raise ValueError(
                f"shard: units includes a {type(module).__name__} from outside the model; expected "
                "one of its modules()"
            )
    readers = [module for module in inside if isinstance(module, _READERS)]
    read = {part for reader in readers for part in reader.modules() if part is not reader}
    candidates = [
        module
        for module in model.modules()
        if classes and isinstance(module, classes) and module not in read
    ]
    if classes and not candidates:
        names = ", ".join(c.__name__ for c in classes)
        raise ValueError(
            f"shard: units names {names}, but no module of the model is one; expected classes of "
            "modules that the model calls"
        )
    for module in [*candidates, *modules]:
        if module is not model and not _is_called(module):
            raise ValueError(
                f"shard: units includes a {type(module).__name__} without a forward; expected "
                "modules that are called (perhaps its children)"
            )
        if module in read:
            raise ValueError(
                f"shard: units includes a {type(module).__name__} inside a torch module that reads "
                "its weights without calling it; expected the outer module (MultiheadAttention, "
                "TransformerEncoderLayer)"
            )
    return candidates + modules


def _is_called(module: nn.Module) -> bool:
    """Whether the module has a forward; containers have none, their children are called one by
    one.
    """
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _called_children(module: nn.Module, whole: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the children, and in place of those that are never called, such as lists in a list,
    theirs.
    """
    for child in module.children():
        if _is_called(child):
            yield child
        elif child not in whole:
            yield from _called_children(child, whole)


def is_leaf(module: nn.Module) -> bool:
    """Whether the module itself is marked to be gathered as a whole, by DeepSpeed's attribute."""
    return bool(getattr(module, "_z3_leaf", False))


def _repeated_blocks(module: nn.Module, whole: Collection[nn.Module]) -> Iterator[nn.Module]:
    if module in whole:
        if _is_called(module):
            yield module
        return
    container = isinstance(module, _CONTAINERS)
    candidates = dict.fromkeys(_called_children(module, whole) if container else module.children())
    children = [child for child in candidates if next(child.parameters(), None) is not None]
    if container:
        kinds = [type(child) for child in children]
        blocks = [child for child in children if kinds.count(type(child)) > 1]
        yield from blocks
        children = [child for child in children if child not in blocks]
    for child in children:
        yield from _repeated_blocks(child, whole)


def _by_size(model: nn.Module, min_numel: int, whole: Collection[nn.Module]) -> list[nn.Module]:
    chosen: list[nn.Module] = []
    _choose_by_size(model, min_numel, whole, chosen, set())
    return chosen


def _choose_by_size(
    module: nn.Module,
    min_numel: int,
    whole: Collection[nn.Module],
    chosen: list[nn.Module],
    seen: set[nn.Parameter],
) -> int:
    """Add to `chosen`; returns how many parameters of the module, none of them in `seen`, are
    left for who holds it.
    """
    if module in whole or isinstance(module, _READERS):
        own = set(module.parameters()) - seen
        children: list[nn.Module] = []
    else:
        own = {p for p in module._parameters.values() if p is not None} - seen
        children = list(module.children())
    seen.update(own)
    rest = sum(p.numel() for p in own) + sum(
        _choose_by_size(child, min_numel, whole, chosen, seen) for child in children
    )
    if rest >= min_numel and _is_called(module):
        chosen.append(module)
        return 0
    return rest


class UnitState(Enum):
    """Where the weights of a unit are: in shards, on their way together, or in their Parameters."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


@dataclass(eq=False)
class Unit:
    """A unit at run time.

    state: the Unsharder changes it, nothing else.
    stays: it is the root or holds other units, so it stays unsharded through a backward
        (unshard.py, Note [Resharding in backward]).
    pins: how many `full_params` keep it unsharded. guest: id of the inner module, called on its
        own, for which alone it is unsharded; 0 for none.
    gathers: the collectives that have not been waited for. Those of a pinned unit gather new
        weights while it is unsharded.
    kept_parts: this rank's parts, one per bucket, of the weights that a few ranks keep from forward
        to backward; None if nothing is kept.
    calls: how many backwards of it have begun and not ended. incomplete: its buckets whose
    gradients are not all there.
    began: the sequence number of autograd's next node when the forward under way began.
    leaf_hook: of the input, a leaf, whose gradient ends the unit's latest call.
    streams: those of a GPU that use its unsharded weights; the first one waited for their gather.
    """

    name: str
    buckets: list[Bucket]
    stays: bool
    pins: int = 0
    gathers: list[Any] = field(default_factory=list)
    state: UnitState = UnitState.SHARDED
    calls: int = 0
    incomplete: set[Bucket] = field(default_factory=set)
    kept_parts: list[torch.Tensor] | None = None
    guest: int = 0
    began: int = 0
    leaf_hook: Any = None
    streams: list[torch.cuda.Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Note whether some of its parameters are frozen."""
        self.has_frozen = any(not bucket.trainable for bucket in self.buckets)


def callable_parts(model: nn.Module, unit: Unit, units: Sequence[Unit]) -> list[nn.Module]:
    """Return the modules inside a unit that holds others which use its weights and are in no other
    unit, but may be one.

    Only these unshard their unit when they are called on their own: hooks on every layer would cost
    time and would split what torch.compile makes of a block.
    """
    if not unit.stays:
        return []
    modules = {model.get_submodule(other.name) for other in units}
    own = {managed.param for bucket in unit.buckets for managed in bucket.params}
    return list(dict.fromkeys(_users_in(model.get_submodule(unit.name), own, modules)))


def _users_in(
    module: nn.Module, own: set[nn.Parameter], units: Collection[nn.Module]
) -> Iterator[nn.Module]:
    for child in module.children():
        if not own.isdisjoint(param for _, param in with_parts(child.named_parameters())):
            yield child
            if child not in units:
                yield from _users_in(child, own, units)
