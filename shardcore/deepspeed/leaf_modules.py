"""DeepSpeed's marks on modules that stage 3 gathers as a whole: `set_z3_leaf_modules` and its
siblings.

Modules are marked before `initialize` or `shard`, or by the configuration. engine/units.py, Note
[Whole modules], says what the marks do.
Source: the functions of deepspeed.utils of these names, 0.19.8.
"""

import logging
from collections.abc import Callable, Sequence

from torch import nn

from shardcore.deepspeed.config import ZERO, Config
from shardcore.engine.units import is_leaf

logger = logging.getLogger("shardcore")


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Mark the modules of these classes and their subclasses, and return them, children first.

    A string is a class name, with or without its module, and matches only this class. With
    raise_if_not_found, raises ValueError if no module matches. Raises TypeError for a value other
    than a class or string.
    """
    return _mark("set_z3_leaf_modules", model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Remove the mark of the modules of these classes, and return them: see set_z3_leaf_modules."""
    return _mark("unset_z3_leaf_modules", model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names (of `named_modules()`). Return them, and the unknown names.

    flag: False removes the mark.

    With raise_if_not_found, raises ValueError for an unknown name.
    """
    op = "set_z3_leaf_modules_by_name"
    return _mark_named(
        op, model, module_names, lambda name, asked: name == asked, flag, raise_if_not_found
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these endings of their names: see set_z3_leaf_modules_by_name."""
    return _mark_named(
        "set_z3_leaf_modules_by_suffix",
        model,
        module_name_suffixes,
        str.endswith,
        flag,
        raise_if_not_found,
    )


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark."""
    model._z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module itself is marked."""
    return is_leaf(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _mark(
    op: str,
    model: nn.Module,
    classes: Sequence[type[nn.Module] | str],
    flag: bool,
    raise_if_not_found: bool,
) -> list[nn.Module]:
    for index, kind in enumerate(classes):
        if not isinstance(kind, type | str):
            raise TypeError(
                f"{op}: leaf_module_classes[{index}] is {kind!r}; expected a class, or the name "
                f"of one"
            )
    derived = tuple(kind for kind in classes if isinstance(kind, type))
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        kind = type(module)
        names = {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
        if isinstance(module, derived) or not names.isdisjoint(classes):
            chosen.append(module)

    model.apply(visit)
    if not chosen and raise_if_not_found:
        raise ValueError(f"{op}: the model has no module of {list(classes)}; expected one or more")
    for module in chosen:
        set_z3_leaf_module(module, flag)
    return chosen


def _mark_named(
    op: str,
    model: nn.Module,
    asked: Sequence[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    named = list(model.named_modules())
    by_asked = {one: [module for name, module in named if fits(name, one)] for one in asked}
    missing = [one for one, modules in by_asked.items() if not modules]
    if missing and raise_if_not_found:
        raise ValueError(
            f"{op}: the model has no module for {missing}; expected names of named_modules()"
        )
    chosen = list(dict.fromkeys(module for modules in by_asked.values() for module in modules))
    for module in chosen:
        set_z3_leaf_module(module, flag)
    return chosen, missing


def mark_configured(model: nn.Module, settings: Config, log: bool) -> None:
    """Mark the modules that the configuration names. log: warn of names that the model does not
    have.
    """
    _, names = set_z3_leaf_modules_by_name(model, settings.leaf_names, raise_if_not_found=False)
    _, suffixes = set_z3_leaf_modules_by_suffix(
        model, settings.leaf_suffixes, raise_if_not_found=False
    )
    classes = [
        one
        for one in settings.leaf_classes
        if not set_z3_leaf_modules(model, [one], raise_if_not_found=False)
    ]
    for key, absent in {"names": names, "name_suffixes": suffixes, "classes": classes}.items():
        path = f"{ZERO}.leaf_module.{key}"
        if log and absent and path in settings.explicit:
            logger.warning(
                "initialize: config %s names %s, but the model contains no such module; expected "
                "modules of the model",
                path,
                absent,
            )


NAMES = {
    function.__name__: function
    for function in (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )
}
