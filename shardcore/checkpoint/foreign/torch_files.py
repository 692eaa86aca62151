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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
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
    box_of,
    is_stored,
    open_regular,
    sizes_of,
    step_of,
)
from shardcore.checkpoint.foreign.unpickle import StandIn, load_file, load_pickle, load_torch, plain
from shardcore.checkpoint.format import plain_name
from shardcore.checkpoint.safetensors import INDEX, SINGLE, indexed, is_file_name, open_file
from shardcore.checkpoint.source import reporting

logger = logging.getLogger("shardcore")

METADATA = ".metadata"  # of torch.distributed.checkpoint
_USUAL = {  # names of files in a folder
    "model": ("model.pt", "model.pth", "model.bin", "pytorch_model.bin"),
    "optimizer": ("optimizer.pt", "optimizer.pth", "optimizer.bin", "optim.pt"),
    "scheduler": ("scheduler.pt", "scheduler.bin", "lr_scheduler.pt"),
}
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


def source_of(path: Path, tree: Mapping[str, Any], names: Collection[str]) -> ForeignSource:
    """Return the checkpoint that a tree holds. Raises OSError or ValueError, also for a tree
    without the model's names.

    names: see deepspeed_files.open_foreign.
    """
    at, prefix, state_dict = _find_model(path, tree, names)
    model = {plain_name(key).removeprefix(prefix): value for key, value in state_dict.items()}
    weights = {key: value for key, value in model.items() if is_stored(value) and not is_extra(key)}
    if isinstance(names, Mapping):  # the name of several that is there
        names = [
            next((one for one in (name, *others) if one in weights), name)
            for name, others in names.items()
        ]
    tensors = {name: {"weight": weight} for name, weight in weights.items()}
    optimizer_at, optimizer = _find_optimizer(path, tree, at)
    states: tuple[Any, ...] = ({}, None, False)
    if optimizer is not None:
        states = _add_adam(optimizer, tensors, names, prefix, f"{path}: {_dotted(optimizer_at)}")
    source = ForeignSource(path, tensors)
    source.tied = _tied(tensors)
    source.steps, source.groups, source.numbered = states
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
    source.scheduler = _pop_state(path, beside, _SCHEDULER_KEYS)
    scaler = _pop_state(path, beside, _SCALER_KEYS, _SCALER_STATE)
    source.loss_scale = scaler and {  # as of a loss scale here (engine/loss_scale.py)
        "scale": float(scaler["scale"]),
        "stable_steps": int(scaler["_growth_tracker"]),
        "hysteresis_left": 1,
    }
    large = [key for key, value in rest.items() if _nbytes(value) > _MAX_BESIDE_BYTES]
    if large:  # each rank would read all of it
        logger.warning(
            "load: %s: the tensors of %s are unused, and left out of client_state",
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
    first: dict[Any, str] = {}
    tied = {}
    for name, of_name in tensors.items():
        weight = of_name["weight"]
        if isinstance(weight, FileTensor) and prod(weight.shape) > 0:
            view = (weight.window, weight.dtype, weight.offset, weight.shape, weight.stride)
            if first.setdefault(view, name) != name:
                tied[name] = first[view]
    return tied


def _nbytes(value: Any) -> int:
    """Return the bytes of the tensors in a part of a tree."""
    if is_stored(value):
        return int(prod(value.shape) * value.dtype.itemsize)
    inside = value.values() if isinstance(value, Mapping) else value
    return sum(map(_nbytes, inside)) if isinstance(value, Mapping | list | tuple) else 0


def _pop_state(
    path: Path,
    beside: Sequence[dict[str, Any]],
    keys: Sequence[str],
    entries: set[str] | None = None,
) -> Mapping[str, Any] | None:
    """Take a dict of one of the names (with these entries) out of the first of `beside` that has
    one; None if none does.
    """
    for branch in beside:
        for key in keys:
            state = branch.get(key)
            if isinstance(state, list) and len(state) == 1:  # as of Lightning
                state = state[0]
            if isinstance(state, Mapping) and entries in (None, set(state)):
                del branch[key]
                return plain(state, f"{path}: {key}")  # type: ignore[no-any-return]
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
    branch = dict(enumerate(tree)) if isinstance(tree, list) else tree
    if not isinstance(branch, Mapping) or id(tree) in seen:
        return
    seen.add(id(tree))
    if branch is tree:
        yield at, branch
    if len(at) < _DEEP and not (at and _is_optimizer(branch)):
        for key, value in branch.items():
            yield from _branches(value, (*at, key), seen)


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
    known = set(names).union(*(names.values() if isinstance(names, Mapping) else ()))
    candidates = [
        (at, prefix, branch, count)
        for at, branch in _branches(tree)
        if not _is_optimizer(branch) and all(isinstance(key, str) for key in branch)
        for prefix, count in _prefixes(branch, known).items()
        if count > 0
    ]
    most = max((count for *_, count in candidates), default=0)

    def fit(at: tuple[Any, ...], prefix: str, _: Any, count: int) -> tuple[int, ...]:
        is_usual = bool(at) and at[-1] in _MODEL_KEYS
        if not names:  # sizes tell no model from its average, or from another model
            return is_usual, not at and count == most, bool(at)
        in_usual = prefix.rstrip(".").rpartition(".")[2] in _MODEL_KEYS
        return count, is_usual or not at, not prefix, in_usual

    best = max((fit(*each) for each in candidates), default=())
    models = [each[:3] for each in candidates if fit(*each) == best]
    if len(models) != 1:
        places = ", ".join(
            _dotted((*at, *filter(None, [prefix.rstrip(".")]))) for at, prefix, _ in models
        )
        found = f"contains the model's names in {len(models)} places ({places})"
        if not models:
            keys = ", ".join(map(repr, list(tree)[:5]))
            found = (
                f"contains no name of the model (its keys are {keys})"
                if keys
                else "contains an empty dict"
            )
        expected = f"under {', '.join(_MODEL_KEYS)}, or alone"
        if names:
            expected = f"containing names like {', '.join(list(names)[:3])}"
        raise ValueError(f"load: {path} {found}; expected one state dict {expected}")
    return models[0]


def _is_optimizer(branch: Mapping[Any, Any]) -> bool:
    if isinstance(branch.get("state"), Mapping) and isinstance(branch.get("param_groups"), list):
        return True
    return any(isinstance(key, str) and key.startswith("param_groups.") for key in branch)


def _find_optimizer(
    path: Path, tree: Mapping[str, Any], model_at: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, Mapping[str, Any] | None]:
    optimizers = [
        (at, branch) for at, branch in _branches(tree) if at != model_at and _is_optimizer(branch)
    ]
    if len(optimizers) > 1:
        raise ValueError(
            f"load: {path} contains optimizers in {len(optimizers)} places "
            f"({', '.join(_dotted(at) for at, _ in optimizers)}); expected one"
        )
    return optimizers[0] if optimizers else (None, None)


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


# --- optimizers -----------------------------------------------------------------------------------


def _add_adam(
    optimizer: Mapping[str, Any],
    tensors: Mapping[str, dict[str, Stored]],
    names: Collection[str],
    prefix: str,
    where: str,
) -> tuple[dict[str, int], list[dict[str, Any]] | None, bool]:
    """Add the states of torch's Adam or AdamW to weights. Return steps, param_groups by name, and
    whether parameters were numbers. Raises OSError or ValueError.

    A parameter that it has by number is named by "param_names" of its group, else by the order of
    `names`, which then has the optimizer's parameters in the order of its groups.
    """
    if "param_groups" not in optimizer:
        optimizer = _unflattened(optimizer, where)
    groups, states = optimizer["param_groups"], optimizer["state"]
    name_of, numbered = _names_of(groups, names, where)
    if numbered and not names:  # weights alone are wanted
        if any(isinstance(state, Mapping) and "master" in state for state in states.values()):
            logger.warning(
                "load: %s numbers its float32 masters, so they are left out and the weights are "
                "used",
                where,
            )
        return {}, None, False
    name_of = {key: plain_name(name).removeprefix(prefix) for key, name in name_of.items()}
    steps: dict[str, int] = {}
    named: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        options = _without(group, ("params", "param_names"))
        params = [name_of[key] for key in group["params"]]
        named.append(plain(options, f"{where}.param_groups[{index}]") | {"params": params})
    for key, state in states.items():
        if isinstance(key, str) and key.isdecimal() and key not in name_of:
            key = int(key)  # torch.distributed.checkpoint makes texts of numbers
        if key not in name_of or not isinstance(state, Mapping):
            raise ValueError(
                f"load: {where}.state contains {short(key)}, which is in no group; expected a "
                "parameter of param_groups"
            )
        name = name_of[key]
        if name not in tensors:
            raise ValueError(
                f"load: {where} contains a state of {name}, but the model beside it lacks this name"
            )
        if not state:
            continue
        of_name = tensors[name]
        shape, described = tuple(of_name["weight"].shape), f"{where}.state[{key!r}] ({name})"
        parts = adam_parts(state, described, ("step", *STATES[:2]), ("master",))
        steps[name] = step_of(state["step"], f"{described}.step")
        for part, tensor in parts.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"load: {where}: {part} number {key!r} has shape {tensor.shape}, and {name} "
                    f"has {shape}; expected one shape. Pass names in the order of the optimizer's "
                    "parameters, or save param_names"
                )
        of_name["weight"] = parts.pop("master", of_name["weight"])
        of_name.update(parts)
    return steps, named, numbered


def adam_parts(
    state: Mapping[str, Any], where: str, needed: Collection[str], more: Collection[str] = ()
) -> dict[str, Any]:
    """Return the tensors of a state of Adam's. more: what it may have beside STATES and its step.
    Raises ValueError for another optimizer's.
    """
    parts = _without(state, ("step",))
    known = set(needed) <= set(state) <= {"step", *STATES, *more}
    if not known or not all(map(is_stored, parts.values())):
        raise ValueError(
            f"load: {where} contains {', '.join(map(str, state))}; expected Adam's step, exp_avg "
            "and exp_avg_sq"
        )
    return parts


def _names_of(
    groups: Sequence[Mapping[str, Any]], names: Collection[str], where: str
) -> tuple[dict[Any, str], bool]:
    """Return the name of each parameter that groups have, by what they call it; and whether
    those are numbers alone.
    """
    name_of: dict[Any, str] = {}
    numbers: list[int] = []
    for group in groups:
        params, param_names = group["params"], group.get("param_names")
        if not isinstance(param_names, list | tuple) or len(param_names) != len(params):
            param_names = params
        for key, param_name in zip(params, param_names, strict=True):
            name = param_name if isinstance(param_name, str) else key
            if isinstance(name, str):
                name_of[key] = name
            else:
                numbers.append(key)
    if numbers and names and (name_of or len(numbers) != len(names)):
        raise ValueError(
            f"load: {where} numbers {len(numbers)} parameters, but {len(names)} names are given. "
            "Pass the names of the optimizer's parameters, in the order of its param_groups, or "
            "save param_names in each group"
        )
    return name_of | dict(zip(numbers, names, strict=False)), bool(numbers)


def _unflattened(flat: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a state dict that get_optimizer_state_dict flattened; names with equal options form
    a group.
    """
    of_kind: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if kind not in of_kind or not name:
            raise ValueError(
                f"load: {where} contains {short(key)}; expected state.<name>.<key> and "
                "param_groups.<name>.<option>"
            )
        of_kind[kind].setdefault(name, {})[last] = value
    groups: list[dict[str, Any]] = []
    for name, stored_options in of_kind["param_groups"].items():
        options = plain(stored_options, f"{where}.param_groups.{name}")
        equal = [group for group in groups if _without(group, ("params",)) == options]
        if not equal:
            groups.append({**options, "params": []})
        (equal or groups)[-1]["params"].append(name)
    return {"state": of_kind["state"], "param_groups": groups}


# --- files and folders ----------------------------------------------------------------------------


def open_torch(path: Path, names: Collection[str]) -> ForeignSource | None:
    """Return the checkpoint of torch's at `path`; None if it is none. See
    deepspeed_files.open_foreign.
    """
    tree = _folder_tree(path) if path.is_dir() else _file_tree(path)
    return None if tree is None else source_of(path, tree, names)


def _file_tree(path: Path) -> Mapping[str, Any] | None:
    if path.suffix == ".safetensors":
        return {"model": safetensors_tree([path])}
    with open_regular(path) as file:
        magic = file.read(4)
    if not magic.startswith((b"PK\x03\x04", b"\x80")):
        return None
    tree = load_file(path)
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"load: {path} contains a {type(tree).__name__}; expected a dict with a model's state "
            "dict"
        )
    return tree


def _folder_tree(path: Path) -> dict[str, Any] | None:
    """Return what a folder of torch.distributed.checkpoint has, or one with files of the usual
    names (as Trainer and Accelerate write them); None without a model.
    """
    if (path / METADATA).is_file():
        return _distributed_tree(path)
    if (path / _ACCELERATE[0] / METADATA).is_file():
        folders = [name for name in _ACCELERATE if (path / name / METADATA).is_file()]
        tree = {name: _distributed_tree(path / name) for name in folders}
        return tree | usual_file(path, "scheduler")
    if (path / _BIN_INDEX).is_file():
        parts = map(load_file, indexed("load", path / _BIN_INDEX))
        tree = {"model": {key: value for part in parts for key, value in part.items()}}
    else:
        tree = usual_file(path, "model") or _safetensors_in(path)
    if not tree:
        return None
    return tree | usual_file(path, "optimizer") | usual_file(path, "scheduler")


def usual_file(path: Path, role: str) -> dict[str, Any]:
    """Return what the file of a usual name in the folder `path` has, by its role ("model",
    "optimizer", "scheduler"); {} if there is none.
    """
    files = (path / name for name in _USUAL[role] if (path / name).is_file())
    return next(({role: load_file(file)} for file in files), {})


def _safetensors_in(path: Path) -> dict[str, Any]:
    parts = sorted(path.glob("*.safetensors"))
    if (path / SINGLE).is_file():
        parts = [path / SINGLE]  # others are an adapter's, or another form of it
    elif (path / INDEX).is_file():
        parts = indexed("load", path / INDEX)
    return {"model": safetensors_tree(parts)} if parts else {}


def safetensors_tree(paths: Sequence[Path]) -> dict[str, Stored]:
    """Return the tensors of safetensors files; those that HuggingFaceStorageWriter cut into
    boxes are whole.
    """
    boxes: dict[str, dict[Box, FileTensor]] = {}
    for path in paths:
        tensors, metadata = open_file("load", path)
        sharded = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
        for name, tensor in tensors.items():
            info = sharded.get(name, {"saved_offsets": [0] * len(tensor.shape)})
            box = box_of(info["saved_offsets"], tensor.shape)
            of_name = boxes.setdefault(name, {})
            if box in of_name and all(box):  # empty ones are equal
                raise ValueError(
                    f"load: {name} is in {next(iter(of_name.values())).window.path} and elsewhere, "
                    f"in the same place; expected it once"
                )
            of_name[box] = tensor
    return {name: _of_boxes(name, of_name) for name, of_name in boxes.items()}


def _of_boxes(name: str, boxes: Mapping[Box, FileTensor]) -> Stored:
    box, tensor = next(iter(boxes.items()))
    if len(boxes) == 1 and not any(indices.start for indices in box):
        return tensor
    shape = tuple(max(indices.stop for indices in of_dim) for of_dim in zip(*boxes, strict=True))
    where = f"{tensor.window.path.parent}: {name}"
    return BoxTensor(where, shape, tensor.dtype, boxes, boxes.__getitem__)


# --- torch.distributed.checkpoint -----------------------------------------------------------------


def _distributed_tree(path: Path) -> dict[str, Any]:
    """Return the tree that torch.distributed.checkpoint saved in a folder. Raises OSError or
    ValueError.
    """
    with reporting(
        f"{path / METADATA} is damaged or in another format",
        "metadata of torch.distributed.checkpoint's",
    ):
        return tree_of(_items_of(path, load_pickle(Window.of(path / METADATA))))


def tree_of(items: Iterable[tuple[Sequence[Any], Any]]) -> dict[str, Any]:
    """Return the tree that a planner has cut into items, each with the keys that led to it.
    ValueError if it is no tree.
    """
    tree = _nested(items)
    if not isinstance(tree, dict):
        raise ValueError("its names are numbers")
    return tree


def _nested(items: Iterable[tuple[Sequence[Any], Any]]) -> Any:
    below: dict[Any, list[tuple[Sequence[Any], Any]]] = {}
    for (key, *keys), value in items:
        below.setdefault(key, []).append((keys, value))
    tree: dict[Any, Any] = {}
    for key, parts in below.items():
        ends = [value for keys, value in parts if not keys]
        if ends and len(parts) > 1:
            raise ValueError(f"an item is below another one, {short(key)}")
        tree[key] = ends[0] if ends else _nested(parts)
    if tree and tree.keys() == set(range(len(tree))):  # a list was saved as
        return [tree[index] for index in range(len(tree))]
    return tree


def _items_of(path: Path, metadata: StandIn) -> Iterator[tuple[Sequence[Any], Any]]:
    window_of = cache(Window.of)
    places: dict[tuple[str, tuple[int, ...]], Window] = {}
    for index, info in metadata.state["storage_data"].items():
        file = info.state["relative_path"]
        if not is_file_name(file):
            raise ValueError(f"it names the file {short(file)}")
        if info.get("transform_descriptors"):
            raise ValueError(
                f"load: {path / file} is transformed by "
                f"{short(info.get('transform_descriptors'))}. Save the checkpoint without "
                "extensions of the storage"
            )
        place = window_of(path / file).part(info.state["offset"], info.state["length"])
        places[index.state["fqn"], tuple(index.get("offset") or ())] = place
    keys_of = metadata.get("planner_data") or {}
    for name, entry in metadata.state["state_dict_metadata"].items():
        keys = keys_of.get(name, (name,)) if isinstance(keys_of, Mapping) else (name,)
        if entry.name.endswith(".TensorStorageMetadata"):
            yield keys, _boxes(path, name, entry, places)
        else:
            yield keys, load_torch(places[name, ()])


def _boxes(
    path: Path, name: str, entry: StandIn, places: Mapping[tuple[str, tuple[int, ...]], Window]
) -> BoxTensor:
    """places: of parts, by the tensor's name and each offset."""
    where, dtype = f"{path}: {name}", entry.state["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{where} has no dtype")
    window_of: dict[Box, Window] = {}
    for chunk in entry.state["chunks"]:
        offsets = chunk.state["offsets"]
        box, window = box_of(offsets, chunk.state["sizes"]), places.get((name, offsets))
        if window is None:
            raise ValueError(f"load: {where} names no file for the part at {offsets}")
        if prod(sizes_of(box)) * dtype.itemsize > window.size:
            raise ValueError(
                f"load: {window} is {window.size} bytes long; expected {where} at {box} in it"
            )
        window_of[box] = window

    def open_box(box: Box) -> FileTensor:
        tensor = load_torch(window_of[box])
        if not isinstance(tensor, FileTensor):
            raise ValueError(
                f"load: {window_of[box]} contains a {type(tensor).__name__}; expected a tensor"
            )
        return tensor

    return BoxTensor(where, entry.state["size"], dtype, window_of, open_box)
