"""Checkpoints of DeepSpeed's: ZeRO 1, 2 and 3 as each rank wrote its part, and universal ones.

Files of a tag's folder, for ranks of data parallelism r (written by DeepSpeed 0.19.8):

- [bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt: rank r's part of each group's masters and
  states, flattened.
- mp_rank_00_model_states.pt (ZeRO 1 and 2), zero_pp_rank_<r>_mp_rank_00_model_states.pt (ZeRO 3):
  names and shapes in the order in which groups were flattened, buffers, frozen parameters,
  schedulers, client_state.
- zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt and zero/optimizer_state.pt: universal
  checkpoints.

ZeRO 1 and 2 cut a flat group into equal parts, one per rank; ZeRO 3 cuts each parameter, padded, so
that rank r's part of a group has rank r's part of each parameter, one after the other.

The layout is read from `param_shapes` and paddings, as DeepSpeed's zero_to_fp32 does, not from
`param_slice_mappings`, which `round_robin_gradients` makes wrong.
"""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any

from shardcore.checkpoint.file_tensors import (
    BoxTensor,
    FileTensor,
    ForeignSource,
    Stored,
    are_counts,
    box_of,
    is_stored,
    joined,
    step_of,
)
from shardcore.checkpoint.foreign.torch_files import (
    STATES,
    adam_parts,
    extra_states,
    is_extra,
    open_torch,
    source_of,
    usual_file,
)
from shardcore.checkpoint.foreign.unpickle import StandIn, load_file, plain
from shardcore.checkpoint.format import MANIFEST
from shardcore.checkpoint.source import Source, reporting

logger = logging.getLogger("shardcore")

_LATEST = ("latest", "latest_universal")
_OPTIM = re.compile(r"(bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_COUNTERS = ("global_steps", "skipped_steps", "global_samples")
_OWN_KEYS = {  # of a model file; the rest is client_state
    *_COUNTERS,
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "shared_params",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "sparse_tensor_module_names",
    "universal_checkpoint_info",
    "pipeline_metadata",
}


def open_foreign(path: Path, names: Collection[str]) -> Source | None:
    """Return the checkpoint at `path` that DeepSpeed or torch wrote; None if it is none that is
    known.

    path: a folder of DeepSpeed's (with "latest", or a tag's), of torch.distributed.checkpoint, or
    with files of the usual names (model.safetensors, optimizer.pt); or a file of torch.save's.
    names: the optimizer's parameters in the order of its groups, as in model.state_dict() (if a
    mapping, each with its other names). They tell which dict is the model, and name what an
    optimizer has by number. Empty: weights alone are read, of the one model that there is. No code
    of a file is run. Raises OSError, or ValueError for files that are damaged, incomplete or
    refused.
    """
    with reporting(
        f"{path} is damaged or in another format", "a checkpoint that DeepSpeed or torch wrote"
    ):
        if not path.exists():
            return None
        folder = _folder(path)
        if folder is not None:
            source = None if (folder / MANIFEST).exists() else _open_folder(folder, names)
            # Trainer has it beside the tag's folder
            if source is not None and source.scheduler is None:
                beside = usual_file(folder.parent, "scheduler").get("scheduler")
                source.scheduler = plain(beside, f"{folder.parent}: scheduler")
            return source
        return None if (path / MANIFEST).exists() else open_torch(path, names)


def _folder(path: Path) -> Path | None:
    """Return the folder of the tag that is meant, if `path` is one of DeepSpeed's, or has its
    "latest".
    """
    if not path.is_dir():
        return None
    if any(_OPTIM.fullmatch(file.name) or _MODEL.fullmatch(file.name) for file in path.iterdir()):
        return path
    for name in _LATEST:
        if (path / name).is_file():
            with open(path / name, "rb") as file:
                tag = file.read(1025).decode("utf-8", "replace").strip()
            if (
                not tag
                or len(tag) > 255
                or tag in (".", "..")
                or not tag.isprintable()
                or "/" in tag
                or "\\" in tag
            ):
                raise ValueError(
                    f"load: {path / name} contains {tag[:50]!r}; expected the name of a folder "
                    "beside it"
                )
            if (path / tag).is_dir():
                return path / tag
            raise FileNotFoundError(
                f"load: {path / name} names {tag}, but the folder {path / tag} does not exist"
            )
    return None


# --- the files of a folder ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """The files of a folder, of ranks in order. model: of rank 0, loaded."""

    folder: Path
    optims: Sequence[Path]
    models: Sequence[Path]
    model: Mapping[str, Any]

    @property
    def model_path(self) -> Path:
        return self.models[0]


def _open_folder(folder: Path, names: Collection[str]) -> Source | None:
    optims: dict[tuple[str, int], Path] = {}
    models: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        optim, model = _OPTIM.fullmatch(file.name), _MODEL.fullmatch(file.name)
        if re.match(r"layer_\d+_expert_|layer_-?\d+_expert|expert_\d+_|expp_rank_", file.name):
            raise _refused(file, "of a mixture of experts")
        if re.match(r"layer_\d+-", file.name):
            raise _refused(file, "of a pipeline")
        if (optim and int(optim[3]) > 0) or (model and int(model[2]) > 0):
            raise _refused(file, "of model parallelism above 1")
        if optim:
            optims[optim[1] or "", int(optim[2])] = file
        elif model:
            models[int(model[1] or 0)] = file
    if not optims and not models:
        return None
    if len({prefix for prefix, _ in optims}) > 1:
        raise ValueError(
            f"load: {folder} contains optimizer files with and without bf16_; expected the files "
            "of one save"
        )
    ranks = sorted(rank for _, rank in optims)
    if ranks != list(range(len(ranks))) or sorted(models) != list(range(len(models))) or not models:
        raise ValueError(
            f"load: {folder} contains optimizer files of the ranks {ranks}, and model files of "
            f"{sorted(models)}; expected one of each rank, from 0 on. Copy the missing files"
        )
    loaded = _mapping(load_file(models[0]), models[0], "module")
    files = _Files(
        folder,
        [optims[key] for key in sorted(optims)],
        [models[rank] for rank in sorted(models)],
        loaded,
    )
    _check_parallelism(files)
    if (folder / "zero").is_dir() and not optims:
        return _open_universal(files)
    if not optims:
        return _open_unsharded(files, names)
    return _open_zero(files)


def _refused(path: Path, what: str) -> ValueError:
    return ValueError(
        f"load: {path} is {what}, which is not supported; expected ZeRO 1, 2 or 3 over data "
        "parallelism alone. To keep the weights, consolidate it with DeepSpeed's zero_to_fp32 "
        "first"
    )


def _mapping(value: Any, path: Path, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or key not in value:
        raise ValueError(
            f"load: {path} contains no {key!r}, which DeepSpeed writes. Use a complete checkpoint"
        )
    return value


def _check_parallelism(files: _Files) -> None:
    model, path = files.model, files.model_path
    dimensions = model.get("checkpoint_parallel_dimensions") or {}
    if model.get("mp_world_size", 1) != 1 or dimensions.get("tp_degree", 1) != 1:
        raise _refused(path, "of model parallelism above 1")
    if dimensions.get("pp_degree", 1) != 1 or not isinstance(model["module"], dict):
        raise _refused(path, "of a pipeline")
    if any(
        model.get(key) is not None for key in ("ds_autoep_layers", "autoep_layers", "num_experts")
    ):
        raise _refused(path, "of a mixture of experts")
    for key in ("data_sampler", "random_ltd"):
        if model.get(key) is not None:
            logger.warning("load: %s contains %s of DeepSpeed, which is left out", path, key)


# --- what is the same in all of them --------------------------------------------------------------


def _shape_groups(files: _Files) -> list[dict[str, tuple[int, ...]]]:
    """Return names and shapes of the parameters of each flat group, in the order in which it was
    flattened.
    """
    groups = files.model.get("param_shapes")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError(
            f"load: {files.model_path} contains no param_shapes; expected a checkpoint of ZeRO 1, "
            "2 or 3 (stage 0 in 16 bits saves no names for its masters)"
        )
    return groups


def _source(
    files: _Files,
    tensors: dict[str, dict[str, Stored]],
    steps: Mapping[str, int],
    groups: Sequence[Mapping[str, Any]] | None,
    scaler: Any,
) -> ForeignSource:
    """Add what is not in the optimizer's files: frozen parameters, buffers, names that share a
    tensor, and plain data.
    """
    model, path = files.model, files.model_path
    shared = model.get("shared_params") or {}
    extra = set(filter(is_extra, model["module"]))
    for name, tensor in model["module"].items():
        if name not in tensors and name not in shared and name not in extra and is_stored(tensor):
            tensors[name] = {"weight": tensor}
    for alias, name in shared.items():
        if name in tensors:
            tensors[alias] = tensors[name]
    in_order = [name for name in model["module"] if name in tensors]
    source = ForeignSource(
        files.folder, {name: tensors[name] for name in dict.fromkeys([*in_order, *tensors])}
    )
    source.steps = {
        **steps,
        **{alias: steps[name] for alias, name in shared.items() if name in steps},
    }
    source.groups = groups
    trained = (name for group in _shape_groups(files) for name in group)
    source.frozen = set(model["module"]).difference(
        trained, shared, extra, model.get("buffer_names") or ()
    )
    source.tied = {alias: name for alias, name in shared.items() if name in tensors}
    source.world_size = len(files.optims)
    source.loss_scale = _loss_scale(scaler)
    source.scheduler, source.client_state, source.counters = _beside(files)
    source.extra_state = extra_states(model["module"], path)
    return source


def _beside(files: _Files) -> tuple[Any, dict[str, Any] | None, dict[str, int]]:
    """Return the scheduler's state, what the user gave, and the counters of the training loop."""
    model, path = files.model, files.model_path
    client_state = {
        key: plain(value, f"{path}: {key}") for key, value in model.items() if key not in _OWN_KEYS
    }
    counters = {
        key: step_of(model[key], f"{path}: {key}")
        for key in _COUNTERS
        if model.get(key) is not None
    }
    scheduler = plain(model.get("lr_scheduler"), f"{path}: lr_scheduler")
    return scheduler, client_state or None, counters


def _loss_scale(scaler: Any) -> dict[str, Any] | None:
    """Return DeepSpeed's dynamic loss scale as that of a loss scale here (engine/loss_scale.py);
    None if it never moves.
    """
    if not isinstance(scaler, StandIn) or not scaler.get("dynamic"):
        return None
    state = scaler.state
    # counted from 0, before which is an overflow
    stable = int(state["cur_iter"] - state["last_overflow_iter"] - 1)
    return {
        "scale": float(state["cur_scale"]),
        "stable_steps": stable,
        "hysteresis_left": int(state["cur_hysteresis"]),
    }


def _named_groups(
    groups: Sequence[Mapping[str, Any]], flat: Sequence[Mapping[str, Any]], path: Path
) -> list[dict[str, Any]]:
    """Return param_groups with the names of parameters; "params" there are numbers of flat
    groups.
    """
    named = []
    for group in groups:
        options = {
            key: plain(value, f"{path}: {key}")
            for key, value in group.items()
            if key != "step"  # old FusedAdam counts in its groups
        }
        named.append(options | {"params": [name for n in group["params"] for name in flat[n]]})
    return named


# --- ZeRO 1, 2 and 3 ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rank:
    """A rank's part of each flat group. states: of each group, Adam's; {} without any. steps: of
    each group; None: unknown.

    groups: param_groups, with numbers of flat groups. paddings: of each group, what follows each
    parameter; None: nothing.
    """

    path: Path
    stage: int
    masters: Sequence[FileTensor]
    states: Sequence[Mapping[str, FileTensor]]
    steps: Sequence[int | None]
    groups: Sequence[Mapping[str, Any]] | None
    paddings: Any
    scaler: Any


def _open_zero(files: _Files) -> Source:
    flat = _shape_groups(files)
    ranks = [_rank_of(path, files, len(flat)) for path in files.optims]
    first = ranks[0]
    if any(rank.stage != first.stage for rank in ranks):
        raise ValueError(
            f"load: {files.folder} contains files of ZeRO "
            f"{sorted({rank.stage for rank in ranks})}; expected one stage"
        )
    tensors: dict[str, dict[str, Stored]] = {}
    steps: dict[str, int] = {}
    for index, shapes in enumerate(flat):
        where = f"{files.folder}: group {index}"
        gaps = [0] * len(shapes) if first.paddings is None else first.paddings[index]
        if not are_counts(tuple(gaps)) or len(gaps) != len(shapes):
            raise ValueError(
                f"load: {first.path}: the paddings of group {index} are {short(gaps)}; expected "
                f"{len(shapes)} counts"
            )
        keys = {key for rank in ranks for key in rank.states[index]}
        for key in ("weight", *(key for key in STATES if key in keys)):
            pieces = []
            for rank in ranks:
                (length,) = rank.masters[index].shape
                piece = rank.masters[index] if key == "weight" else rank.states[index].get(key)
                # States may have padding that masters lack.
                if piece is None or len(piece.shape) != 1 or piece.shape[0] < length:
                    content = "missing" if piece is None else f"of shape {piece.shape}"
                    raise ValueError(
                        f"load: {where}: {key} is {content} on a rank; expected {length} elements, "
                        "as the masters"
                    )
                pieces.append(piece.narrow(0, length))
            if first.stage == 3:
                of_key = _cut_by_param(f"{where}: {key}", shapes, pieces)
            else:
                of_key = _cut_by_group(f"{where}: {key}", shapes, gaps, pieces)
            for name, tensor in of_key.items():
                tensors.setdefault(name, {})[key] = tensor
        if not keys:
            continue
        counts = {rank.steps[index] for rank in ranks}
        if len(counts) != 1 or None in counts:
            raise ValueError(
                f"load: {where}: the step counts of the ranks are {counts}; expected one"
            )
        steps |= {name: step for name in shapes for step in counts if step is not None}
    if first.stage == 3:
        _add_frozen(files, tensors, len(ranks))
    if first.groups is None:
        logger.warning(
            "load: %s is elastic and contains no options of groups: this optimizer keeps its own",
            files.folder,
        )
    groups = None if first.groups is None else _named_groups(first.groups, flat, first.path)
    return _source(files, tensors, steps, groups, first.scaler)


def _check_count(count: Any, files: _Files, path: Path) -> None:
    counts = set(count) if isinstance(count, list) else {count}
    if len(counts) > 1:
        raise _refused(path, f"of a mixture of experts (groups over {sorted(counts)} ranks)")
    if counts != {len(files.optims)}:
        raise ValueError(
            f"load: {path} was written by {', '.join(map(str, counts))} ranks, and {files.folder} "
            f"contains {len(files.optims)} optimizer files; expected one of each rank. Copy the "
            "missing files, or remove the files of another save"
        )


def _rank_of(path: Path, files: _Files, count: int) -> _Rank:
    """Return what a rank's file has of `count` flat groups."""
    file = _mapping(load_file(path), path, "optimizer_state_dict")
    zero = _mapping(file["optimizer_state_dict"], path, "partition_count")
    stage = zero.get("zero_stage", 1)  # BF16_Optimizer's files, which are of stage 1, have none
    if stage not in (1, 2, 3):
        raise ValueError(f"load: {path} is of ZeRO stage {short(stage)}; expected 1, 2 or 3")
    _check_count(zero["partition_count"], files, path)
    if zero.get("ds_zero_partition_groups") is not None:
        raise _refused(path, "of a mixture of experts")
    masters = zero.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    base = zero.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if not isinstance(masters, list) or not all(
        isinstance(master, FileTensor) and len(master.shape) == 1 for master in masters
    ):
        raise ValueError(
            f"load: {path} contains no flat float32 masters (DeepSpeed's checkpoints lack states "
            "on NVMe)"
        )
    if len(masters) != count:
        raise ValueError(
            f"load: {path} contains {len(masters)} flat groups; expected {count}, as "
            f"{files.model_path}"
        )
    states: Any
    if isinstance(base, list):  # elastic checkpoints have states only
        states, groups = dict(enumerate(base)), None
    else:
        adam = _mapping(_mapping(base, path, "state"), path, "param_groups")
        states, groups = adam["state"], adam["param_groups"]
    parts: list[Mapping[str, FileTensor]] = []
    steps: list[int | None] = []
    for index in range(count):
        state = states.get(index, {})
        where = f"{path}: state {index}"
        if not isinstance(state, dict):
            raise ValueError(f"load: {where} is not a dict; expected Adam's states")
        parts.append(adam_parts(state, where, STATES[:2]) if set(state) - {"step"} else {})
        of_group: Mapping[str, Any] = next(
            (group for group in groups or () if index in group["params"]), {}
        )
        step = state.get("step", of_group.get("step", zero.get("base_optimizer_state_step")))
        steps.append(None if step is None else step_of(step, f"{path}: step of group {index}"))
    return _Rank(
        path,
        stage,
        masters,
        parts,
        steps,
        groups,
        zero.get("param_alignment_paddings"),
        zero.get("loss_scaler"),
    )


def _cut_by_group(
    where: str,
    shapes: Mapping[str, tuple[int, ...]],
    gaps: Sequence[int],
    pieces: Sequence[FileTensor],
) -> dict[str, Stored]:
    """ZeRO 1 and 2: the ranks' pieces in order are the flat group, in which parameters follow
    each other, each before a gap.
    """
    tensors: dict[str, Stored] = {}
    total = sum(piece.shape[0] for piece in pieces)
    at = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        numel = prod(shape)
        if at + numel > total:
            raise ValueError(
                f"load: {where} holds {total} elements over all ranks; expected {at + numel} or "
                f"more, for {name}"
            )
        parts = _range_of(pieces, at, numel)
        tensors[name] = joined(f"{where} of {name}", shape, pieces[0].dtype, parts)
        at += numel + gap
    unit = 2 * len(pieces)  # what DeepSpeed pads a group to, in some files
    if -(-at // unit) != -(-total // unit):
        raise ValueError(
            f"load: {where} holds {total} elements over all ranks; expected {at}, according to its "
            "names and shapes"
        )
    return tensors


def _range_of(pieces: Sequence[FileTensor], start: int, numel: int) -> Iterator[FileTensor]:
    """Yield elements [start, start + numel) of pieces that follow each other."""
    for piece in pieces:
        (length,) = piece.shape
        first, end = max(start, 0), min(start + numel, length)
        if first < end:
            yield piece.narrow(first, end - first)
        start -= length


def _cut_by_param(
    where: str,
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Sequence[FileTensor],
) -> dict[str, Stored]:
    """ZeRO 3: each rank's piece has its part of each parameter, which is padded to as many
    elements for each rank.
    """
    tensors: dict[str, Stored] = {}
    lengths = [piece.shape[0] for piece in pieces]
    at = 0
    for name, shape in shapes.items():
        part = -(-prod(shape) // len(pieces))
        if any(at + part > length for length in lengths):
            raise ValueError(
                f"load: {where} holds {min(lengths)} elements on a rank; expected {at + part} or "
                f"more, for {name}"
            )
        tensors[name] = _joined_parts(f"{where} of {name}", shape, pieces, at)
        at += part
    if any(length != at for length in lengths):
        raise ValueError(
            f"load: {where} holds {lengths} elements on its ranks; expected {at}: parameters are "
            "missing from its names"
        )
    return tensors


def _joined_parts(
    where: str, shape: tuple[int, ...], pieces: Sequence[FileTensor], at: int
) -> Stored:
    """Return a parameter of ZeRO 3, of which each rank's piece has a part from `at` on."""
    numel = prod(shape)
    part = -(-numel // len(pieces))
    parts = [
        piece.narrow(at, max(0, min(part, numel - rank * part)))
        for rank, piece in enumerate(pieces)
    ]
    return joined(where, shape, pieces[0].dtype, parts)


def _add_frozen(files: _Files, tensors: dict[str, dict[str, Stored]], ranks: int) -> None:
    """Add frozen parameters of ZeRO 3, of which each rank's model file has a part; and drop the
    empty ones of the rest.
    """
    shapes = files.model.get("frozen_param_shapes") or {}
    if len(files.models) != ranks:
        raise ValueError(
            f"load: {files.folder} contains {len(files.models)} model files; expected {ranks}, one "
            "per rank"
        )
    fragments = [files.model.get("frozen_param_fragments") or {}]
    if shapes:
        fragments += [
            _mapping(load_file(path), path, "module").get("frozen_param_fragments") or {}
            for path in files.models[1:]
        ]
    for name, shape in shapes.items():
        pieces = [of_rank.get(name) for of_rank in fragments]
        if not isinstance(shape, tuple) or not all(
            isinstance(piece, FileTensor) and len(piece.shape) == 1 for piece in pieces
        ):
            raise ValueError(
                f"load: {files.folder} lacks parts of the frozen {name}; expected one of each rank"
            )
        tensors[name] = {"weight": _joined_parts(f"{files.folder}: {name}", shape, pieces, 0)}  # type: ignore[arg-type]
    shared, buffers = files.model.get("shared_params") or {}, files.model.get("buffer_names") or []
    for name, tensor in files.model["module"].items():
        empty = is_stored(tensor) and prod(tensor.shape) == 0
        if empty and name not in tensors and name not in shared and name not in buffers:
            raise ValueError(
                f"load: {files.folder} contains no values of {name}. Use a checkpoint with frozen "
                "parameters"
            )


# --- stage 0 and universal checkpoints ------------------------------------------------------------


def _open_unsharded(files: _Files, names: Collection[str]) -> Source:
    """Stage 0 in float32: torch's own state dicts."""
    optimizer = files.model.get("optimizer")
    if files.model.get("param_shapes") is not None:
        raise FileNotFoundError(
            f"load: {files.folder} contains no *_optim_states.pt. Copy the file of each rank"
        )
    if optimizer is not None and (
        not isinstance(optimizer, dict) or "param_groups" not in optimizer
    ):
        raise ValueError(
            f"load: {files.model_path} is of an optimizer of stage 0 in 16 bits, without names; "
            "expected ZeRO 1, 2 or 3, or float32"
        )
    tree = {"module": files.model["module"]} | (
        {} if optimizer is None else {"optimizer": optimizer}
    )
    source = source_of(files.model_path, tree, names)
    source.path = files.folder
    source.scheduler, source.client_state, source.counters = _beside(files)
    return source


def _open_universal(files: _Files) -> Source:
    folder = files.folder / "zero"
    path = folder / "optimizer_state.pt"
    zero = _mapping(load_file(path), path, "param_groups")
    flat = _shape_groups(files)
    state = zero.get("optimizer_state_dict") or {}  # of ZeRO 3, whose parameters have no step.pt
    tensors: dict[str, dict[str, Stored]] = {}
    steps: dict[str, int] = {}
    names = {entry.name for entry in folder.iterdir() if entry.is_dir()}
    for index, shapes in enumerate(flat):
        for name, shape in shapes.items():
            if name not in names:
                raise FileNotFoundError(
                    f"load: {folder} contains no {name}; expected a folder for each parameter"
                )
            tensors[name] = {"weight": _universal(folder / name / "fp32.pt", shape)}
            for key in STATES:
                if (folder / name / f"{key}.pt").is_file():
                    tensors[name][key] = _universal(folder / name / f"{key}.pt", shape)
            if "exp_avg" in tensors[name]:
                steps[name] = _universal_step(
                    folder / name / "step.pt", state.get("state", {}).get(index, {}), path
                )
    if zero.get("zero_stage") == 3:
        _add_frozen(files, tensors, len(files.models))
    else:
        for name in sorted(names - set(tensors)):
            in_module = files.model["module"].get(name)
            if is_stored(in_module) and (folder / name / "fp32.pt").is_file():
                tensors[name] = {"weight": _universal(folder / name / "fp32.pt", in_module.shape)}
    groups = _named_groups(zero["param_groups"], flat, path)
    return _source(files, tensors, steps, groups, zero.get("loss_scaler"))


def _universal(path: Path, shape: tuple[int, ...]) -> Stored:
    content = load_file(path)
    tensor = content
    if isinstance(content, dict):
        tensor = content.get("param")
    if tensor is not content and (content.get("is_expert_param") or content.get("vocab_tensor")):
        raise _refused(path, "of a mixture of experts or of model parallelism")
    if not isinstance(tensor, FileTensor):
        raise ValueError(f"load: {path} contains no tensor; expected one of shape {shape}")
    box = box_of([0] * len(tensor.shape), tensor.shape)
    return BoxTensor(str(path), shape, tensor.dtype, [box], lambda _: tensor, tensor.shape)


def _universal_step(path: Path, state: Mapping[str, Any], optimizer_path: Path) -> int:
    if path.is_file():
        return step_of(load_file(path), str(path))
    if "step" not in state:
        raise ValueError(
            f"load: found neither {path} nor a step in {optimizer_path}; expected the number of "
            "steps"
        )
    return step_of(state["step"], f"{optimizer_path}: step")
