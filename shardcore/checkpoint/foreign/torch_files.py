"""Checkpoints of torch's: files of torch.save's, folders with a model and an optimizer, and
torch.distributed.checkpoint.

Each becomes one tree of plain data and tensors on disk, in which the model and its optimizer are
found by what they have: the model is the dict with the model's names, the optimizer the dict with
"state" and "param_groups" (or, flattened, "state.<name>.exp_avg" and "param_groups.<name>.lr").
What else there is becomes client_state.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch

from shardcore.checkpoint.file_tensors import (
    Box,
    BoxTensor,
    FileTensor,
    ForeignSource,
    Stored,
    Window,
    is_stored,
    open_regular,
    step_of,
)
from shardcore.checkpoint.foreign.unpickle import StandIn, load_file, load_pickle, load_torch, plain
from shardcore.checkpoint.format import plain_name
from shardcore.checkpoint.safetensors import INDEX, SINGLE, indexed, is_file_name, open_file
from shardcore.checkpoint.source import reporting

logger = logging.getLogger("shardcore")

METADATA = ".metadata"  # of torch.distributed.checkpoint
_MODELS = ("model.pt", "model.pth", "model.bin", "pytorch_model.bin")
_OPTIMIZERS = ("optimizer.pt", "optimizer.pth", "optimizer.bin", "optim.pt")
_SCHEDULERS = ("scheduler.pt", "scheduler.bin", "lr_scheduler.pt")
_BIN_INDEX = "pytorch_model.bin.index.json"
# folders of torch.distributed.checkpoint, for FSDP
_ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")
_SCHEDULER_KEYS = (
    "scheduler",
    "lr_scheduler",
    "scheduler_state_dict",
    "lr_scheduler_state_dict",
    "lr_schedulers",
)
_SCALER_KEYS = ("scaler", "grad_scaler", "scaler_state_dict")
_SCALER_STATE = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
_DDP = "module."  # what DistributedDataParallel puts before each name
STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_DEEP = 4  # levels of a tree in which a model is looked for
_MAX_BESIDE_BYTES = 16 << 20  # of tensors in an entry of client_state


# --- from a tree to a source ----------------------------------------------------------------------


@dataclass
class Adam:
    """What an optimizer's state dict has, by name."""

    states: dict[str, dict[str, Stored]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    numbered: bool = False


def source_of(path: Path, tree: Mapping[str, Any], names: Collection[str]) -> ForeignSource:
    """Return the checkpoint that a tree holds. Raises OSError or ValueError, also for a tree
    without the model's names.

    names: see deepspeed_files.open_foreign.
    """
    at, prefix, found = _find_model(path, tree, names)
    model = {plain_name(key).removeprefix(prefix): value for key, value in found.items()}
    weights = {key: value for key, value in model.items() if is_stored(value) and not is_extra(key)}
    if isinstance(names, Mapping):  # the name of several that is there
        names = [
            next((one for one in (name, *others) if one in weights), name)
            for name, others in names.items()
        ]
    optimizer_at, optimizer = _find_optimizer(path, tree, at)
    adam = (
        Adam()
        if optimizer is None
        else adam_of(optimizer, weights, names, prefix, f"{path}: {_dotted(optimizer_at)}")
    )
    tensors = {name: {"weight": weight} for name, weight in weights.items()}
    for name, states in adam.states.items():
        tensors[name].update(
            {"weight": states.get("master", weights[name]), **_without(states, ("master",))}
        )
    source = ForeignSource(path, tensors)
    source.tied = _tied(tensors)
    source.steps, source.groups, source.numbered = adam.steps, adam.groups, adam.numbered
    source.extra_state = extra_states(model, path)
    rest = _without_paths(tree, [at, optimizer_at])
    if not at:
        rest = {
            key: value for key, value in rest.items() if not is_stored(value) and not is_extra(key)
        }
    beside = [rest]  # and the dicts in which the model was
    for key in at[:-1]:
        if isinstance(beside[-1].get(key), dict):
            beside.append(beside[-1][key])
    source.scheduler = _taken(path, beside, _SCHEDULER_KEYS, lambda found: True)
    scaler = _taken(path, beside, _SCALER_KEYS, lambda found: set(found) == _SCALER_STATE)
    source.loss_scale = None if scaler is None else _loss_scale(scaler)
    large = [key for key, value in rest.items() if _nbytes(value) > _MAX_BESIDE_BYTES]
    if large:  # each rank would read all of it
        logger.warning(
            "load: %s: the tensors of %s are not used, and left out of client_state",
            path,
            ", ".join(map(str, large)),
        )
    source.client_state = plain(_without(rest, large), str(path)) or None
    return source


def is_extra(key: object) -> bool:
    """Whether a key of a state dict is of what a module keeps, in any form."""
    return isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def extra_states(model: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return what modules keep in a state dict, by their names. Raises OSError or ValueError."""
    return {
        key.rpartition(".")[0]: plain(value, f"{path}: {key}")
        for key, value in model.items()
        if is_extra(key)
    }


def _tied(tensors: Mapping[str, Mapping[str, Stored]]) -> dict[str, str]:
    """Return names whose weight is the memory of an earlier one's, by which."""
    weights = {
        name: of_name["weight"]
        for name, of_name in tensors.items()
        if prod(of_name["weight"].shape) > 0
    }
    places = {
        name: tuple(vars(weight).values())
        for name, weight in weights.items()
        if isinstance(weight, FileTensor)
    }
    first = {place: name for name, place in reversed(places.items())}
    return {name: first[place] for name, place in places.items() if first[place] != name}


def _nbytes(entry: Any) -> int:
    """Return the bytes of the tensors in an entry of a tree."""
    values = (value for _, branch in _branches({"": entry}) for value in branch.values())
    tensors = (
        item
        for value in values
        for item in (value if isinstance(value, list | tuple) else (value,))
    )
    return sum(
        prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors if is_stored(tensor)
    )


def _taken(
    path: Path,
    beside: Sequence[dict[str, Any]],
    keys: Sequence[str],
    fits: Callable[[Mapping[str, Any]], bool],
) -> Mapping[str, Any] | None:
    """Take a dict of one of the names out of the first of `beside` that has one; None if none
    does.
    """
    for within in beside:
        for key in keys:
            found = within.get(key)
            # Lightning has lists
            found = found[0] if isinstance(found, list) and len(found) == 1 else found
            if isinstance(found, Mapping) and fits(found):
                del within[key]
                return plain(found, f"{path}: {key}")  # type: ignore[no-any-return]
    return None


def _without(values: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in left_out}


def _dotted(at: Sequence[Any] | None) -> str:
    return ".".join(map(str, at or ())) or "the top level"


def _branches(
    tree: Any, at: tuple[Any, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[tuple[Any, ...], Mapping[Any, Any]]]:
    """Yield the dicts of a tree, each once, with the keys that lead to it. seen: ids of those
    before.
    """
    seen = set() if seen is None else seen
    if isinstance(tree, dict | list):
        if id(tree) in seen:
            return
        seen.add(id(tree))
    if isinstance(tree, Mapping):
        yield at, tree
        if len(at) < _DEEP and not (at and _is_optimizer(tree)):
            for key, value in tree.items():
                yield from _branches(value, (*at, key), seen)
    elif (
        isinstance(tree, list)
        and len(at) < _DEEP
        and any(isinstance(item, Mapping) for item in tree)
    ):
        for index, item in enumerate(tree):
            yield from _branches(item, (*at, index), seen)


def _prefixes(branch: Mapping[str, Any], names: Collection[str]) -> Counter[str]:
    """Count the tensors that each prefix (of a wrapper, or of a module that has the model) makes
    one of `names`.
    """
    keys = [plain_name(key) for key, value in branch.items() if is_stored(value)]
    if not names:
        return Counter({_DDP if all(key.startswith(_DDP) for key in keys) else "": len(keys)})
    counts: Counter[str] = Counter()
    for key in keys:
        cuts = (0, *(dot.end() for dot in re.finditer(r"\.", key)))
        counts.update(key[:at] for at in cuts if key[at:] in names)
    return counts


def _find_model(
    path: Path, tree: Mapping[str, Any], names: Collection[str]
) -> tuple[tuple[Any, ...], str, Mapping[str, Any]]:
    """Return where the model's state dict is, what is before each of its names, and the dict."""
    wanted = set(names).union(*(names.values() if isinstance(names, Mapping) else ()))
    found: list[tuple[int, tuple[Any, ...], str, Mapping[str, Any]]] = []
    for at, branch in _branches(tree):
        if not _is_optimizer(branch) and all(isinstance(key, str) for key in branch):
            found += [
                (count, at, prefix, branch)
                for prefix, count in _prefixes(branch, wanted).items()
                if count > 0
            ]
    most = max((item[0] for item in found), default=0)

    def fit(item: tuple[int, tuple[Any, ...], str, Any]) -> tuple[int, ...]:
        count, at, prefix, _ = item
        usual = bool(at) and at[-1] in _MODEL_KEYS
        if names:
            return (
                count,
                usual or not at,
                not prefix,
                prefix.rstrip(".").rpartition(".")[2] in _MODEL_KEYS,
            )
        # sizes tell no model from its average, or from another model
        return usual, not at and count == most, bool(at)

    best = max(map(fit, found), default=())
    found = [item for item in found if fit(item) == best]
    if len(found) != 1:
        there = ", ".join(
            _dotted((*item[1], *filter(None, [item[2].rstrip(".")]))) for item in found
        )
        there = there or f"none in {', '.join(map(repr, list(tree)[:5])) or 'nothing'}"
        such = (
            f"with names such as {', '.join(list(names)[:3])}"
            if names
            else f"under {', '.join(_MODEL_KEYS)}, or alone"
        )
        raise ValueError(
            f"load: {path} has the model's names in {len(found)} places ({there}); expected one "
            f"state dict {such}"
        )
    return found[0][1:]


def _is_optimizer(branch: Mapping[Any, Any]) -> bool:
    if isinstance(branch.get("state"), Mapping) and isinstance(branch.get("param_groups"), list):
        return True
    return any(isinstance(key, str) and key.startswith("param_groups.") for key in branch)


def _find_optimizer(
    path: Path, tree: Mapping[str, Any], model_at: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, Mapping[str, Any] | None]:
    found = [
        (at, branch) for at, branch in _branches(tree) if at != model_at and _is_optimizer(branch)
    ]
    if len(found) > 1:
        raise ValueError(
            f"load: {path} has optimizers in {len(found)} places "
            f"({', '.join(_dotted(at) for at, _ in found)}); expected one"
        )
    return found[0] if found else (None, None)


def _without_paths(tree: Any, paths: Sequence[tuple[Any, ...] | None]) -> Any:
    """Return a tree without some branches, and without the dicts and lists that had nothing
    else.
    """
    rest: dict[Any, Any] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        below = [path[1:] for path in paths if path and path[0] == key]
        if not below:
            rest[key] = value
        elif () not in below:
            inner = _without_paths(value, below)
            if inner:
                rest[key] = inner
    return rest if isinstance(tree, Mapping) else list(rest.values())


def _loss_scale(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of torch's GradScaler as that of a loss scale here
    (engine/loss_scale.py).
    """
    return {
        "scale": float(state["scale"]),
        "stable_steps": int(state["_growth_tracker"]),
        "hysteresis_left": 1,
    }


# --- optimizers -----------------------------------------------------------------------------------


def adam_of(
    found: Mapping[str, Any],
    weights: Mapping[str, Stored],
    names: Collection[str],
    prefix: str,
    where: str,
) -> Adam:
    """Return the state dict of torch's Adam or AdamW by name. Raises OSError or ValueError.

    A parameter that it has by number is named by "param_names" of its group, else by the order of
    `names`, which then has the optimizer's parameters in the order of its groups.
    """
    if "param_groups" not in found:
        found = _unflattened(found, where)
    groups = found["param_groups"]
    name_of, numbered = _names_of(groups, names, where)
    if numbered and not names:  # weights alone are wanted
        if any(
            isinstance(state, Mapping) and "master" in state for state in found["state"].values()
        ):
            logger.warning(
                "load: %s has float32 masters by number, which are left out: the weights are used",
                where,
            )
        return Adam()
    name_of = {key: plain_name(name).removeprefix(prefix) for key, name in name_of.items()}
    named: list[dict[str, Any]] = []
    adam = Adam(groups=named, numbered=numbered)
    for index, group in enumerate(groups):
        options = plain(
            _without(group, ("params", "param_names")), f"{where}.param_groups[{index}]"
        )
        named.append({**options, "params": [name_of[key] for key in group["params"]]})
    for key, state in found["state"].items():
        if isinstance(key, str) and key.isdecimal() and key not in name_of:
            key = int(key)  # torch.distributed.checkpoint makes texts of numbers
        if key not in name_of or not isinstance(state, Mapping):
            raise ValueError(
                f"load: {where}.state has {short(key)}, which is in no group; expected a parameter "
                f"of param_groups"
            )
        name = name_of[key]
        if name not in weights:
            raise ValueError(
                f"load: {where} has a state of {name}, and the model beside it does not; expected "
                f"it there"
            )
        if state:
            adam.steps[name], adam.states[name] = _state_of(
                state, f"{where}.state[{key!r}] ({name})"
            )
            for part, tensor in adam.states[name].items():
                if tuple(tensor.shape) != tuple(weights[name].shape):
                    raise ValueError(
                        f"load: {where}: {part} number {key!r} has shape {tensor.shape}, and "
                        f"{name} has {weights[name].shape}; "
                        "expected one shape: give names in the order in which the optimizer has "
                        "its parameters, or save param_names"
                    )
    return adam


def _state_of(state: Mapping[str, Any], where: str) -> tuple[int, dict[str, Stored]]:
    unknown = [key for key in state if key not in (*STATES, "step", "master")]
    tensors = {key: value for key, value in state.items() if key != "step"}
    if (
        unknown
        or "step" not in state
        or not {"exp_avg", "exp_avg_sq"} <= set(state)
        or not all(map(is_stored, tensors.values()))
    ):
        raise ValueError(
            f"load: {where} has {', '.join(map(str, state))}; expected Adam's step, exp_avg and "
            f"exp_avg_sq"
        )
    return step_of(state["step"], f"{where}.step"), tensors


def _names_of(
    groups: Sequence[Mapping[str, Any]], names: Collection[str], where: str
) -> tuple[dict[Any, str], bool]:
    """Return the name of each parameter that groups have, by what they call it; and whether
    those are numbers alone.
    """
    found: dict[Any, str] = {}
    numbers: list[int] = []
    for group in groups:
        given = group.get("param_names")
        given = (
            given
            if isinstance(given, list | tuple) and len(given) == len(group["params"])
            else None
        )
        for index, key in enumerate(group["params"]):
            if given is not None and isinstance(given[index], str):
                found[key] = given[index]
            elif isinstance(key, str):
                found[key] = key
            else:
                numbers.append(key)
    if numbers and names and (found or len(numbers) != len(names)):
        raise ValueError(
            f"load: {where} has {len(numbers)} parameters by number, and {len(names)} names are "
            f"given; expected as many: "
            "those of the optimizer's parameters, in the order of its param_groups (or save "
            "param_names in each group)"
        )
    return found | dict(zip(numbers, names, strict=False)), bool(numbers)


def _unflattened(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a state dict that get_optimizer_state_dict flattened; names with equal options form
    a group.
    """
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if kind not in ("state", "param_groups") or not name:
            raise ValueError(
                f"load: {where} has {short(key)}; expected state.<name>.<key> and "
                f"param_groups.<name>.<option>"
            )
        (state if kind == "state" else options).setdefault(name, {})[last] = value
    groups: list[dict[str, Any]] = []
    for name, given in options.items():
        of_name = plain(given, f"{where}.param_groups.{name}")
        for group in groups:
            if _equal(_without(group, ("params",)), of_name):
                group["params"].append(name)
                break
        else:
            groups.append({**of_name, "params": [name]})
    return {"state": state, "param_groups": groups}


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return (
            isinstance(left, torch.Tensor)
            and isinstance(right, torch.Tensor)
            and torch.equal(left, right)
        )
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return bool(left == right)


# --- files and folders ----------------------------------------------------------------------------


def open_torch(path: Path, names: Collection[str]) -> ForeignSource | None:
    """Return the checkpoint of torch's at `path`; None if it is none. See
    deepspeed_files.open_foreign.
    """
    if path.is_dir():
        if (path / METADATA).is_file():
            return source_of(path, _distributed_tree(path), names)
        tree = _folder_tree(path)
        return None if tree is None else source_of(path, tree, names)
    if path.suffix == ".safetensors":
        return source_of(path, {"model": safetensors_tree([path])}, names)
    with open_regular(path) as file:
        magic = file.read(4)
    if not magic.startswith((b"PK\x03\x04", b"\x80")):
        return None
    tree = load_file(path)
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"load: {path} has a {type(tree).__name__}; expected a dict with a model's state dict"
        )
    return source_of(path, tree, names)


def _folder_tree(path: Path) -> dict[str, Any] | None:
    """Return what a folder has in files of the usual names (as Trainer and Accelerate write
    them); None without a model.
    """

    def first(files: Sequence[str]) -> Path | None:
        return next((path / file for file in files if (path / file).is_file()), None)

    if (path / _ACCELERATE[0] / METADATA).is_file():
        tree = {
            name: _distributed_tree(path / name)
            for name in _ACCELERATE
            if (path / name / METADATA).is_file()
        }
        return tree | scheduler_tree(path)
    model, parts = first(_MODELS), sorted(path.glob("*.safetensors"))
    if (path / SINGLE).is_file():
        parts = [path / SINGLE]  # others are an adapter's, or another form of it
    elif (path / INDEX).is_file():
        parts = indexed("load", path / INDEX)
    if (path / _BIN_INDEX).is_file():
        found: Any = {
            key: value
            for file in indexed("load", path / _BIN_INDEX)
            for key, value in load_file(file).items()
        }
    elif model is None and not parts:
        return None
    else:
        found = safetensors_tree(parts) if model is None else load_file(model)
    optimizer = first(_OPTIMIZERS)
    return (
        {"model": found}
        | ({} if optimizer is None else {"optimizer": load_file(optimizer)})
        | scheduler_tree(path)
    )


def scheduler_tree(path: Path) -> dict[str, Any]:
    """Return the scheduler's state in a file of a usual name in the folder `path`, under
    "scheduler"; {} if there is none.
    """
    return next(
        ({"scheduler": load_file(path / name)} for name in _SCHEDULERS if (path / name).is_file()),
        {},
    )


def safetensors_tree(paths: Sequence[Path]) -> dict[str, Stored]:
    """Return the tensors of safetensors files; those that HuggingFaceStorageWriter cut into
    boxes are whole.
    """
    boxes: dict[str, list[tuple[Box, FileTensor]]] = {}
    for path in paths:
        for name, box, tensor in _boxes_in(path):
            boxes.setdefault(name, []).append((box, tensor))
    found: dict[str, Stored] = {}
    for name, parts in boxes.items():
        if len(parts) == 1 and not any(parts[0][0].offsets):
            found[name] = parts[0][1]
            continue
        first = parts[0][1]
        if (
            len({box for box, _ in parts}) != len(parts)
            or len({len(box.sizes) for box, _ in parts}) != 1
        ):
            raise ValueError(
                f"load: {name} is in {parts[0][1].window.path} and elsewhere, in the same place; "
                f"expected it once"
            )
        ends = (
            [offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)]
            for box, _ in parts
        )
        shape = tuple(map(max, zip(*ends, strict=True)))
        of_name = {box: partial(_itself, tensor) for box, tensor in parts}
        found[name] = BoxTensor(f"{first.window.path.parent}: {name}", shape, first.dtype, of_name)
    return found


def _itself(tensor: FileTensor) -> Stored:
    return tensor


def _boxes_in(path: Path) -> Iterator[tuple[str, Box, FileTensor]]:
    """Yield the tensors of a file, each with where it is in the whole tensor."""
    tensors, metadata = open_file("load", path)
    sharded = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
    for name, tensor in tensors.items():
        offsets = (
            tuple(sharded[name]["saved_offsets"]) if name in sharded else (0,) * len(tensor.shape)
        )
        if len(offsets) != len(tensor.shape) or any(
            type(value) is not int or value < 0 for value in offsets
        ):
            raise ValueError(f"{path} has {name} at {offsets} of a tensor")
        yield name, Box(offsets, tensor.shape), tensor


# --- torch.distributed.checkpoint -----------------------------------------------------------------


def _distributed_tree(path: Path) -> dict[str, Any]:
    """Return the tree that torch.distributed.checkpoint saved in a folder. Raises OSError or
    ValueError.
    """
    with reporting(
        f"{path / METADATA} is damaged or of another form",
        "metadata of torch.distributed.checkpoint's",
    ):
        return tree_of(_items_of(path, load_pickle(Window.of(path / METADATA))))


def tree_of(items: Iterable[tuple[Sequence[Any], Any]]) -> dict[str, Any]:
    """Return the tree that a planner has cut into items, each with the keys that led to it.
    ValueError if it is no tree.
    """
    tree = _Branch()
    for way, value in items:
        _put(tree, way, value)
    listed = _listed(tree)
    if not isinstance(listed, dict):
        raise ValueError("its names are numbers")
    return listed


def _items_of(path: Path, metadata: StandIn) -> Iterator[tuple[Sequence[Any], Any]]:
    places: dict[str, dict[tuple[int, ...], Window]] = {}
    files: dict[str, Window] = {}
    for index, info in metadata.state["storage_data"].items():
        places.setdefault(index.state["fqn"], {})[tuple(index.get("offset") or ())] = _place(
            path, info, files
        )
    ways = metadata.get("planner_data") or {}
    for name, entry in metadata.state["state_dict_metadata"].items():
        way = ways.get(name, (name,)) if isinstance(ways, Mapping) else (name,)
        here = places.get(name, {})
        if entry.name.endswith(".TensorStorageMetadata"):
            value: Any = _boxes(f"{path}: {name}", entry, here)
        else:
            ((_, window),) = here.items()
            value = load_torch(window)
        yield way, value


def _place(path: Path, info: StandIn, files: dict[str, Window]) -> Window:
    """Return where an item is. files: those that were seen before, by name."""
    file = info.state["relative_path"]
    if not is_file_name(file):
        raise ValueError(f"it names the file {short(file)}")
    if info.get("transform_descriptors"):
        raise ValueError(
            f"load: {path / file} is transformed by {short(info.get('transform_descriptors'))}; "
            f"expected a checkpoint that was saved without extensions of the storage"
        )
    if file not in files:
        files[file] = Window.of(path / file)
    return files[file].part(info.state["offset"], info.state["length"])


def _boxes(where: str, entry: StandIn, places: Mapping[tuple[int, ...], Window]) -> BoxTensor:
    boxes: dict[Box, Callable[[], Stored]] = {}
    dtype = entry.state["properties"].state["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{where} has no dtype")
    for chunk in entry.state["chunks"]:
        box = Box(chunk.state["offsets"], chunk.state["sizes"])
        if box.offsets not in places:
            raise ValueError(
                f"load: {where} has no file for the part at {box.offsets}; expected one"
            )
        boxes[box] = partial(_tensor_at, places[box.offsets])
        if prod(box.sizes) * dtype.itemsize > places[box.offsets].size:
            raise ValueError(
                f"load: {places[box.offsets]} has {places[box.offsets].size} bytes; expected "
                f"{where} at {box} in it"
            )
    return BoxTensor(where, entry.state["size"], dtype, boxes)


def _tensor_at(window: Window) -> Stored:
    found = load_torch(window)
    if not isinstance(found, FileTensor):
        raise ValueError(f"load: {window} has a {type(found).__name__}; expected a tensor")
    return found


class _Branch(dict[Any, Any]):
    """A dict that is no item itself: items are below it."""


def _put(tree: _Branch, way: Sequence[Any], value: Any) -> None:
    for key in way[:-1]:
        tree = tree.setdefault(key, _Branch())
        if not isinstance(tree, _Branch):
            raise ValueError(f"an item is below another one, {short(key)}")
    tree[way[-1]] = value


def _listed(tree: Any) -> Any:
    """Return a tree in which dicts of the keys 0, 1, 2 and on, which lists were saved as, are
    lists again.
    """
    if not isinstance(tree, _Branch):
        return tree
    made = {key: _listed(value) for key, value in tree.items()}
    if made and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        return [made[index] for index in range(len(made))]
    return made
