"""Checkpoints of torch's: files of torch.save's, folders with a model and an optimizer, and torch.distributed.checkpoint.

Each becomes one tree of plain data and tensors on disk, in which the model and its optimizer are found by what they have: the
model is the dict with the model's names, the optimizer the dict with "state" and "param_groups" (or, flattened,
"state.<name>.exp_avg" and "param_groups.<name>.lr"). What else there is becomes client_state.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch

from shardcore.checkpoint.file_tensors import Box, BoxTensor, FileTensor, ForeignSource, Stored, Window, is_stored, step_of
from shardcore.checkpoint.safetensors import DTYPES
from shardcore.checkpoint.unpickle import StandIn, load_file, load_pickle, load_torch, plain

METADATA = ".metadata"  # of torch.distributed.checkpoint
_MODELS = ("model.pt", "model.pth", "model.bin", "pytorch_model.bin")
_OPTIMIZERS = ("optimizer.pt", "optimizer.pth", "optimizer.bin", "optim.pt")
_SCHEDULERS = ("scheduler.pt", "scheduler.bin", "lr_scheduler.pt")
_INDEX, _BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
_ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")  # folders of torch.distributed.checkpoint, for FSDP

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")
_SCHEDULER_KEYS = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
_SCALER_KEYS = ("scaler", "grad_scaler", "scaler_state_dict")
_SCALER_STATE = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel, and of torch.compile
_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_DEEP = 4  # levels of a tree in which a model is looked for
_MAX_HEADER_BYTES = 100 << 20


# --- from a tree to a source ------------------------------------------------------------------------------------------------


@dataclass
class Adam:
    """What an optimizer's state dict has, by name."""

    states: dict[str, dict[str, Stored]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    numbered: bool = False


def source_of(path: Path, tree: Mapping[str, Any], names: Collection[str]) -> ForeignSource:
    """Return the checkpoint that a tree holds. Raises OSError or ValueError, also for a tree without the model's names."""
    at, model = _find_model(path, tree, names)
    prefix = _prefix(model, names)
    extra = {key for key in model if key.rpartition(".")[2] == "_extra_state"}  # of modules, in any form
    weights = {key.removeprefix(prefix): value for key, value in model.items() if is_stored(value) and key not in extra}
    optimizer_at, optimizer = _find_optimizer(path, tree, at)
    adam = Adam() if optimizer is None else adam_of(optimizer, weights, names, prefix, f"{path}: {_dotted(optimizer_at)}")
    tensors = {name: {"weight": weight} for name, weight in weights.items()}
    for name, states in adam.states.items():
        tensors[name].update({"weight": states.get("master", weights[name]), **_without(states, ("master",))})
    source = ForeignSource(path, tensors)
    source.steps, source.groups, source.numbered = adam.steps, adam.groups, adam.numbered
    source.extra_state = {
        key.removeprefix(prefix).rpartition(".")[0]: plain(model[key], f"{path}: {key}") for key in sorted(extra)
    }
    rest = _without_paths(tree, [at, optimizer_at])
    if not at:
        rest = {key: value for key, value in rest.items() if not is_stored(value) and key not in extra}
    beside = [rest]  # and the dicts in which the model was
    for key in at[:-1]:
        if isinstance(beside[-1].get(key), dict):
            beside.append(beside[-1][key])
    source.scheduler = _taken(path, beside, _SCHEDULER_KEYS, lambda found: True)
    scaler = _taken(path, beside, _SCALER_KEYS, lambda found: set(found) == _SCALER_STATE)
    source.loss_scale = None if scaler is None else _loss_scale(scaler, f"{path}: {_SCALER_KEYS[0]}")
    source.client_state = plain(rest, str(path)) or None
    return source


def _taken(
    path: Path, beside: Sequence[dict[str, Any]], keys: Sequence[str], fits: Callable[[Mapping[str, Any]], bool]
) -> Mapping[str, Any] | None:
    """Take a dict of one of the names out of the first of `beside` that has one; None if none does."""
    for within in beside:
        for key in keys:
            if isinstance(within.get(key), Mapping) and fits(within[key]):
                return plain(within.pop(key), f"{path}: {key}")  # type: ignore[no-any-return]
    return None


def _without(values: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in left_out}


def _dotted(at: Sequence[Any] | None) -> str:
    return ".".join(map(str, at or ())) or "the top level"


def _branches(
    tree: Any, at: tuple[Any, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[tuple[Any, ...], Mapping[Any, Any]]]:
    """Yield the dicts of a tree, each once, with the keys that lead to it. seen: ids of those before."""
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
    elif isinstance(tree, list) and len(at) < _DEEP and any(isinstance(item, Mapping) for item in tree):
        for index, item in enumerate(tree):
            yield from _branches(item, (*at, index), seen)


def _prefix(model: Mapping[Any, Any], names: Collection[str]) -> str:
    """Return what a wrapper put before each name of the model; "" if nothing."""
    keys = [key for key, value in model.items() if is_stored(value)]
    for prefix in _PREFIXES:
        if keys and all(key.startswith(prefix) for key in keys) and not any(name in model for name in names):
            return prefix + _prefix({key.removeprefix(prefix): model[key] for key in keys}, names)
    return ""


def _find_model(path: Path, tree: Mapping[str, Any], names: Collection[str]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    found: list[tuple[int, tuple[Any, ...], Mapping[str, Any]]] = []
    for at, branch in _branches(tree):
        if _is_optimizer(branch) or not all(isinstance(key, str) for key in branch):
            continue
        prefix = _prefix(branch, names)
        here = sum(is_stored(branch.get(prefix + name)) for name in names)
        if here:
            found.append((here, at, branch))
    most = max((here for here, _, _ in found), default=0)
    found = [item for item in found if item[0] == most]
    usual = [item for item in found if not item[1] or item[1][-1] in _MODEL_KEYS]
    found = usual if len(found) > 1 and usual else found
    if len(found) != 1:
        there = ", ".join(_dotted(at) for _, at, _ in found) or f"none in {', '.join(map(repr, list(tree)[:5])) or 'nothing'}"
        raise ValueError(
            f"load: {path} has the model's names in {len(found)} places ({there}); expected one state dict with names such as "
            f"{', '.join(list(names)[:3])}"
        )
    return found[0][1], found[0][2]


def _is_optimizer(branch: Mapping[Any, Any]) -> bool:
    if isinstance(branch.get("state"), Mapping) and isinstance(branch.get("param_groups"), list):
        return True
    return any(isinstance(key, str) and key.startswith("param_groups.") for key in branch)


def _find_optimizer(
    path: Path, tree: Mapping[str, Any], model_at: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, Mapping[str, Any] | None]:
    found = [(at, branch) for at, branch in _branches(tree) if at != model_at and _is_optimizer(branch)]
    if len(found) > 1:
        raise ValueError(
            f"load: {path} has optimizers in {len(found)} places ({', '.join(_dotted(at) for at, _ in found)}); expected one"
        )
    return found[0] if found else (None, None)


def _without_paths(tree: Any, paths: Sequence[tuple[Any, ...] | None]) -> Any:
    """Return a tree without some branches, and without the dicts and lists that had nothing else."""
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


def _loss_scale(state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the state of torch's GradScaler as that of a loss scale here (engine/loss_scale.py)."""
    scale, tracker = state["scale"], state["_growth_tracker"]
    if not isinstance(scale, int | float) or not isinstance(tracker, int):
        raise ValueError(f"load: {where} has scale {short(scale)} and _growth_tracker {short(tracker)}; expected numbers")
    return {"scale": float(scale), "stable_steps": tracker, "hysteresis_left": 1}


# --- optimizers -------------------------------------------------------------------------------------------------------------


def adam_of(found: Mapping[str, Any], weights: Mapping[str, Stored], names: Collection[str], prefix: str, where: str) -> Adam:
    """Return the state dict of torch's Adam or AdamW by name. Raises OSError or ValueError.

    A parameter that it has by number is named by "param_names" of its group, else by the order of `names`, which then has
    the optimizer's parameters in the order of its groups.
    """
    if "param_groups" not in found:
        found = _unflattened(found, where)
    groups = [dict(group) for group in found["param_groups"] if isinstance(group, Mapping)]
    if len(groups) != len(found["param_groups"]) or not all(isinstance(group.get("params"), list | tuple) for group in groups):
        raise ValueError(f'load: {where}.param_groups is no list of dicts with a list "params"; expected torch.optim\'s')
    name_of, numbered = _names_of(groups, names, where)
    named: list[dict[str, Any]] = []
    adam = Adam(groups=named, numbered=numbered)
    for index, group in enumerate(groups):
        options = plain(_without(group, ("params", "param_names")), f"{where}.param_groups[{index}]")
        named.append({**options, "params": [name_of[key].removeprefix(prefix) for key in group["params"]]})
    for key, state in found["state"].items():
        if key not in name_of or not isinstance(state, Mapping):
            raise ValueError(
                f"load: {where}.state has {short(key)}, which is in no group; expected a parameter of param_groups"
            )
        name = name_of[key].removeprefix(prefix)
        if name not in weights:
            raise ValueError(f"load: {where} has a state of {name}, and the model beside it does not; expected it there")
        if state:
            adam.steps[name], adam.states[name] = _state_of(state, f"{where}.state[{key!r}] ({name})")
            for part, tensor in adam.states[name].items():
                if tuple(tensor.shape) != tuple(weights[name].shape):
                    raise ValueError(
                        f"load: {where}: {part} number {key!r} has shape {tensor.shape}, and {name} has {weights[name].shape}; "
                        "expected one shape: give names in the order in which the optimizer has its parameters, or save "
                        "param_names"
                    )
    return adam


def _state_of(state: Mapping[str, Any], where: str) -> tuple[int, dict[str, Stored]]:
    unknown = [key for key in state if key not in (*_STATES, "step", "master")]
    tensors = {key: value for key, value in state.items() if key != "step"}
    if (
        unknown
        or "step" not in state
        or not {"exp_avg", "exp_avg_sq"} <= set(state)
        or not all(map(is_stored, tensors.values()))
    ):
        raise ValueError(f"load: {where} has {', '.join(map(str, state))}; expected Adam's step, exp_avg and exp_avg_sq")
    return step_of(state["step"], f"{where}.step"), tensors


def _names_of(groups: Sequence[Mapping[str, Any]], names: Collection[str], where: str) -> tuple[dict[Any, str], bool]:
    """Return the name of each parameter that groups have, by what they call it; and whether those are numbers alone."""
    found: dict[Any, str] = {}
    numbers: list[int] = []
    for group in groups:
        given = group.get("param_names")
        given = given if isinstance(given, list | tuple) and len(given) == len(group["params"]) else None
        for index, key in enumerate(group["params"]):
            if type(key) not in (int, str) or key in found or key in numbers:
                raise ValueError(f"load: {where}.param_groups has the parameter {short(key)} twice, or it is no number or name")
            if given is not None and isinstance(given[index], str):
                found[key] = given[index]
            elif isinstance(key, str):
                found[key] = key
            else:
                numbers.append(key)
    if numbers and (found or len(numbers) != len(names)):
        raise ValueError(
            f"load: {where} has {len(numbers)} parameters by number, and {len(names)} names are given; expected as many: "
            "those of the optimizer's parameters, in the order of its param_groups (or save param_names in each group)"
        )
    return found | dict(zip(numbers, names, strict=bool(numbers))), bool(numbers)


def _unflattened(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a state dict that get_optimizer_state_dict flattened; names with equal options form a group."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if kind not in ("state", "param_groups") or not name:
            raise ValueError(f"load: {where} has {short(key)}; expected state.<name>.<key> and param_groups.<name>.<option>")
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
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return bool(left == right)


# --- files and folders ------------------------------------------------------------------------------------------------------


def open_torch(path: Path, names: Collection[str]) -> ForeignSource | None:
    """Return the checkpoint of torch's at `path`; None if it is none. See deepspeed_files.open_foreign."""
    if path.is_dir():
        if (path / METADATA).is_file():
            return source_of(path, _distributed_tree(path), names)
        tree = _folder_tree(path)
        return None if tree is None else source_of(path, tree, names)
    if path.suffix == ".safetensors":
        return source_of(path, {"model": safetensors_tree([path])}, names)
    with open(path, "rb") as file:
        magic = file.read(4)
    if not magic.startswith((b"PK\x03\x04", b"\x80")):
        return None
    tree = load_file(path)
    if not isinstance(tree, Mapping):
        raise ValueError(f"load: {path} has a {type(tree).__name__}; expected a dict with a model's state dict")
    return source_of(path, tree, names)


def _folder_tree(path: Path) -> dict[str, Any] | None:
    """Return what a folder has in files of the usual names (as Trainer and Accelerate write them); None without a model."""

    def first(files: Sequence[str]) -> Path | None:
        return next((path / file for file in files if (path / file).is_file()), None)

    if (path / _ACCELERATE[0] / METADATA).is_file():
        return {name: _distributed_tree(path / name) for name in _ACCELERATE if (path / name / METADATA).is_file()}
    model, parts = first(_MODELS), sorted(path.glob("*.safetensors"))
    if (path / _INDEX).is_file():
        parts = sorted(path / name for name in _indexed(path / _INDEX))
    if (path / _BIN_INDEX).is_file():
        found: Any = {
            key: value for name in sorted(_indexed(path / _BIN_INDEX)) for key, value in load_file(path / name).items()
        }
    elif model is None and not parts:
        return None
    else:
        found = safetensors_tree(parts) if model is None else load_file(model)
    tree: dict[str, Any] = {"model": found}
    for key, files in (("optimizer", _OPTIMIZERS), ("scheduler", _SCHEDULERS)):
        file = first(files)
        if file is not None:
            tree[key] = load_file(file)
    return tree


def _indexed(path: Path) -> set[str]:
    try:
        found = json.loads(Window.of(path).read().decode())["weight_map"]
        names = set(found.values())
        if not all(_is_file_name(name) for name in names):
            raise ValueError("it names files elsewhere")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f'load: {path} is torn or no index ({error!r}); expected JSON with a "weight_map"') from error
    return names


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name


def safetensors_tree(paths: Sequence[Path]) -> dict[str, Stored]:
    """Return the tensors of safetensors files; those that HuggingFaceStorageWriter cut into boxes are whole."""
    boxes: dict[str, list[tuple[Box, FileTensor]]] = {}
    for path in paths:
        for name, box, tensor in _safetensors(path):
            boxes.setdefault(name, []).append((box, tensor))
    found: dict[str, Stored] = {}
    for name, parts in boxes.items():
        if len(parts) == 1 and not any(parts[0][0].offsets):
            found[name] = parts[0][1]
            continue
        first = parts[0][1]
        if len({box for box, _ in parts}) != len(parts) or len({len(box.sizes) for box, _ in parts}) != 1:
            raise ValueError(f"load: {name} is in {parts[0][1].window.path} and elsewhere, in the same place; expected it once")
        ends = ([offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)] for box, _ in parts)
        shape = tuple(map(max, zip(*ends, strict=True)))
        of_name = {box: partial(_itself, tensor) for box, tensor in parts}
        found[name] = BoxTensor(f"{first.window.path.parent}: {name}", shape, first.dtype, of_name)
    return found


def _itself(tensor: FileTensor) -> Stored:
    return tensor


def _safetensors(path: Path) -> Iterator[tuple[str, Box, FileTensor]]:
    """Yield the tensors that the header of a file describes, each with where it is in the whole tensor."""
    window = Window.of(path)
    try:
        head_size = int.from_bytes(window.read(0, 8), "little")
        if head_size > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has {head_size} bytes")
        header = json.loads(bytes(window.read(8, head_size)))
        data = window.part(8 + head_size, window.size - 8 - head_size)
        sharded = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
        for name, entry in header.items():
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            dtype = DTYPES[entry["dtype"]]
            stride = tuple(prod(shape[index + 1 :]) for index in range(len(shape)))
            if prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(f"{name} has {end - begin} bytes; expected {prod(shape) * dtype.itemsize}")
            offsets = tuple(sharded[name]["saved_offsets"]) if name in sharded else (0,) * len(shape)
            if len(offsets) != len(shape) or any(type(value) is not int or value < 0 for value in offsets):
                raise ValueError(f"{name} is at {offsets} of a tensor")
            yield name, Box(offsets, shape), FileTensor(data.part(begin, end - begin), dtype, 0, shape, stride)
    except OSError:
        raise
    except Exception as error:  # of whatever kind damaged bytes cause
        raise ValueError(
            f"load: {path} is torn or no safetensors file ({error!r}); expected a complete one: copy it again"
        ) from error


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------------


def _distributed_tree(path: Path) -> dict[str, Any]:
    """Return the tree that torch.distributed.checkpoint saved in a folder. Raises OSError or ValueError."""
    metadata = load_pickle(Window.of(path / METADATA))
    try:
        return _tree_of(path, metadata)
    except OSError:
        raise
    except Exception as error:  # of whatever kind damaged metadata cause
        if isinstance(error, ValueError) and str(error).startswith("load: "):
            raise
        raise ValueError(
            f"load: {path / METADATA} is damaged or of another form ({error!r}); expected metadata of "
            "torch.distributed.checkpoint's"
        ) from error


def _tree_of(path: Path, metadata: StandIn) -> dict[str, Any]:
    places: dict[str, dict[tuple[int, ...], Window]] = {}
    sizes: dict[str, int] = {}
    for index, info in metadata.state["storage_data"].items():
        places.setdefault(index.state["fqn"], {})[tuple(index.get("offset") or ())] = _place(path, info, sizes)
    tree = _Branch()
    ways = metadata.get("planner_data") or {}
    for name, entry in metadata.state["state_dict_metadata"].items():
        way = ways.get(name, (name,)) if isinstance(ways, Mapping) else (name,)
        here = places.get(name, {})
        if entry.name.endswith(".TensorStorageMetadata"):
            value: Any = _boxes(f"{path}: {name}", entry, here)
        else:
            ((_, window),) = here.items()
            value = load_torch(window)
        _put(tree, way, value)
    listed = _listed(tree)
    if not isinstance(listed, dict):
        raise ValueError("its names are numbers")
    return listed


def _place(path: Path, info: StandIn, sizes: dict[str, int]) -> Window:
    """Return where an item is. sizes: of the files that were seen before."""
    file = info.state["relative_path"]
    if not _is_file_name(file):
        raise ValueError(f"it names the file {short(file)}")
    if info.get("transform_descriptors"):
        raise ValueError(
            f"load: {path / file} is transformed by {short(info.get('transform_descriptors'))}; expected a checkpoint "
            "that was saved without extensions of the storage"
        )
    if file not in sizes:
        sizes[file] = os.stat(path / file).st_size
    whole_file = Window(path / file, 0, sizes[file], sizes[file])
    return whole_file.part(info.state["offset"], info.state["length"])


def _boxes(where: str, entry: StandIn, places: Mapping[tuple[int, ...], Window]) -> BoxTensor:
    boxes: dict[Box, Callable[[], Stored]] = {}
    dtype = entry.state["properties"].state["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{where} has no dtype")
    for chunk in entry.state["chunks"]:
        box = Box(chunk.state["offsets"], chunk.state["sizes"])
        if box.offsets not in places:
            raise ValueError(f"load: {where} has no file for the part at {box.offsets}; expected one")
        boxes[box] = partial(_tensor_at, places[box.offsets])
        if prod(box.sizes) * dtype.itemsize > places[box.offsets].size:
            raise ValueError(
                f"load: {places[box.offsets]} has {places[box.offsets].size} bytes; expected {where} at {box} in it"
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
    """Return a tree in which dicts of the keys 0, 1, 2 and on, which lists were saved as, are lists again."""
    if not isinstance(tree, _Branch):
        return tree
    made = {key: _listed(value) for key, value in tree.items()}
    if made and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        return [made[index] for index in range(len(made))]
    return made
