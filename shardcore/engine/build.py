"""From a model to buckets with weights in place: the checks, the signature that ranks compare,
the layout, the filling.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardcore._native import _C
from shardcore.distributed.comm import Comm
from shardcore.distributed.compare import Entry
from shardcore.distributed.everyone import Everyone
from shardcore.engine.agreement import together
from shardcore.engine.bucket import (
    Bucket,
    Lifetimes,
    Managed,
    WeightFiles,
    allocate,
    closed_message,
)
from shardcore.engine.quantized import (
    SUPPORTED,
    bias_dtypes,
    described,
    is_int8,
    parts_of,
    with_parts,
)
from shardcore.engine.slices import held_by, refuse_slices, slice_of
from shardcore.engine.states import StateStore
from shardcore.engine.units import Unit, UnitSpec
from shardcore.layout import FlatLayout, plan_flat
from shardcore.optim.base import Kind, ShardableOptimizer
from shardcore.optim.dtensor import is_dtensor
from shardcore.optim.float8 import (
    Float8Format,
    float8_formats,
    is_float8_weight,
    plain_part,
    ungathered_float8,
    unwrap,
)
from shardcore.optim.group_options import PARAM_DTYPES, check_dtype, dtype_name, json_value
from shardcore.optim.interface import engine_of
from shardcore.optim.state_dict import export_state
from shardcore.optim.state_format import NO_STATES
from shardcore.torch_private import (
    can_assign_data,
    is_traceable_wrapper_subclass,
    replicated_type,
    restore_hooks,
    storage_id,
)

PARTLY_FILLED = "weights are partly filled: build model and optimizer anew"

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def check_unwrapped(op: str, model: nn.Module) -> None:
    """Raise ValueError if `model`, or a module of it, is wrapped in what averages gradients over
    ranks by itself.
    """
    wrappers: tuple[type, ...] = (nn.parallel.DistributedDataParallel,)
    composable = replicated_type()
    if composable is not None:
        wrappers += (composable,)
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            inside = (
                "replicate()"
                if composable is not None and isinstance(module, composable)
                else type(module).__name__
            )
            plain = "" if inside == "replicate()" else f" (pass {name or 'model'}.module)"
            raise ValueError(
                f"{op}: {name or 'the model'} is wrapped in {inside}, and both would average "
                f"gradients; expected the plain module{plain}"
            )


def check_placement(op: str, model: nn.Module) -> None:
    """Raise ValueError for a model that Accelerate's device_map spread over devices, or whose
    weights its hooks move (cpu_offload, disk_offload).
    """
    for name, module in model.named_modules():
        places = set(map(str, (getattr(module, "hf_device_map", None) or {}).values()))
        spread = len(places) > 1 or "disk" in places
        if spread or hasattr(module, "_hf_hook"):
            over = f" over {', '.join(sorted(places))}" if places else ""
            raise ValueError(
                f"{op}: {name or 'the model'} was placed by device_map{over}, and Accelerate's "
                "hooks move its weights. Load it without device_map, cpu_offload or disk_offload: "
                "shard() places the weights"
            )


def check_model(model: nn.Module, alone: bool) -> None:
    """Raise unless `model` can be sharded. alone: over one rank."""
    before = engine_of(model)
    if before is not None and not before.gives_way:
        raise ValueError("shard: the model is already sharded; call shard() once")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"shard: model has type {type(model).__name__}; expected a torch.nn.Module. Call "
            "shard(model, optimizer)"
        )
    check_unwrapped("shard", model)
    check_placement("shard", model)
    for name, module in model.named_modules():
        if (
            isinstance(module, torch.jit.ScriptModule)
            and next(module.parameters(), None) is not None
        ):
            where = name or "the model"
            raise TypeError(
                f"shard: {where} is a ScriptModule. It supports no hooks; expected an ordinary "
                "module"
            )
        if engine_of(module) not in (None, before):
            raise ValueError(
                f"shard: the module {name} is already sharded; expected to shard the whole model "
                f"once"
            )
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
            and not alone
        ):
            raise ValueError(
                f"shard: {name or 'the model'} has max_norm={module.max_norm}. Each rank's forward "
                "would change other rows, and ranks would differ; expected None over several "
                "ranks (normalize the output instead)"
            )
    float8 = float8_formats(model)
    for name, param in model.named_parameters():
        if engine_of(param) not in (None, before):
            raise ValueError(
                f"shard: {name} belongs to another sharded model; expected a parameter of this "
                f"model alone"
            )
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"shard: {name} is uninitialized; expected its shape to be known (run a forward "
                f"first)"
            )
        if param.is_inference():
            raise ValueError(
                f"shard: {name} was created in torch.inference_mode(), and autograd cannot use it; "
                "expected a parameter created outside of it"
            )
        if param not in float8 or is_dtensor(param):
            _refuse_own_gathers(name, param, param in float8)
        other = (
            is_traceable_wrapper_subclass(plain_part(param.data))
            and slice_of(name, param) is None
            and not is_int8(param)
        )
        flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FlatParameter", ())  # FSDP1's
        if other or isinstance(param, flat):
            kind = type(param.data)
            raise ValueError(
                f"shard: {name} is a {kind.__name__} of {kind.__module__.partition('.')[0]}: it is "
                f"already sharded, or quantized. Use an ordinary parameter, {SUPPORTED}"
            )
        if param.layout != torch.strided:
            raise ValueError(f"shard: {name} has layout {param.layout}; expected a dense parameter")
        if param.requires_grad and param.dtype not in PARAM_DTYPES:
            raise TypeError(
                f"shard: {name} has dtype {dtype_name(param.dtype)}; expected float32, bfloat16 or "
                f"float16"
            )
        if param.requires_grad and not param.is_contiguous():
            channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(param.dim())
            is_last = channels_last and param.is_contiguous(memory_format=channels_last)
            raise ValueError(
                f"shard: {name} has strides {param.stride()} for shape {tuple(param.shape)}"
                f"{f' ({channels_last})' if is_last else ''}, and weights are cut into shards in "
                "contiguous memory. Before shard(), run p.data = p.data.contiguous() for each "
                "parameter"
                + (
                    ": the weights give up channels_last, the inputs may keep it."
                    if is_last
                    else "."
                )
            )
        if param.grad is not None and before is None:
            raise ValueError(
                f"shard: {name} already has a gradient; expected None (call optimizer.zero_grad() "
                f"first)"
            )
    for name, buffer in model.named_buffers():
        refuse_slices(
            f"shard: the buffer {name} as a DTensor", is_dtensor(buffer), "an ordinary tensor"
        )
    _check_apart(model)


def _refuse_own_gathers(name: str, param: nn.Parameter, is_float8: bool) -> None:
    """Raise ValueError for a parameter that FSDP2 lets gather itself, but shardcore does not.
    is_float8: its layer asks for a float8 all-gather.
    """
    held = held_by(param)
    if not is_float8 and not hasattr(held, "fsdp_pre_all_gather"):
        return
    if is_float8 or is_float8_weight(held):
        reason = (
            "is sliced by tensor parallelism"
            if is_dtensor(param)
            else "is used by other modules than torchao's Float8Linear, or cast in two ways"
        )
        raise ValueError(
            f"shard: {name} is a float8 weight and {reason}. Convert the layer with "
            "enable_fsdp_float8_all_gather=False, or leave it out by module_filter_fn"
        )
    kind = type(held)
    raise ValueError(
        f"shard: {name} is a {kind.__module__}.{kind.__qualname__}, which shardcore does not "
        "gather. Use an ordinary parameter, one of torchao.float8's convert_to_float8_training, "
        f"{SUPPORTED}"
    )


def _check_apart(model: nn.Module) -> None:
    """Raise ValueError if a trainable parameter has memory that another parameter or a buffer has,
    too.

    A change of one would change the other, and `shard` gives each its own. (Views with gaps, as
    columns, are not looked at.)
    """
    memory: list[tuple[int, int, int, str, bool]] = []
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        tensor = plain_part(value)
        if (
            tensor.layout != torch.strided
            or is_traceable_wrapper_subclass(tensor)
            or not tensor.numel()
        ):
            continue
        reach = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if reach == tensor.numel():  # in whatever order, transposed, channels last
            start = int(tensor.storage_offset()) * tensor.itemsize
            memory.append(
                (
                    storage_id(tensor.untyped_storage()),
                    start,
                    start + tensor.nbytes,
                    name,
                    value.requires_grad,
                )
            )
    last = trained = (0, 0, "")  # of all so far, and of those that train: the one that ends last
    for storage, start, end, name, trains in sorted(memory):
        before = last if trains else trained
        if storage == before[0] and start < before[1]:
            raise ValueError(
                f"shard: {name} shares its memory with {before[2]}; expected memory of its own, or "
                "one Parameter in both places: module.weight = other.weight, not "
                "module.weight.data = other.weight.data. Tie weights again after "
                "load_state_dict(assign=True)"
            )
        last = max(last, (storage, end, name))
        trained = max(trained, (storage, end, name)) if trains else trained


def check_norms(model: nn.Module, builder: "Builder") -> None:
    """Raise ValueError for batch norms that torch cannot run on the CPU: weights of another
    dtype than their statistics.
    """
    for name, module in model.named_modules() if builder.device.type == "cpu" else ():
        if isinstance(module, _BATCH_NORMS) and module.weight is not None:
            dtype, statistics = builder.dtype_of(module.weight), module.running_mean
            if (
                statistics is not None
                and statistics.dtype != dtype
                and torch.float32 in (statistics.dtype, dtype)
            ):
                remedy = "both in one dtype (module.float() before shard)"
                if dtype != torch.float32:
                    remedy = (
                        f"keep_fp32=[torch.nn.{type(module).__name__}] (initialize has no such "
                        f"option: shard, or train in fp32)"
                    )
                raise ValueError(
                    f"shard: {name or 'the model'} would use {dtype_name(dtype)} weights with "
                    f"{dtype_name(statistics.dtype)} running statistics. torch's batch norm does "
                    f"not support this on a CPU; expected {remedy}"
                )


def refuse_backward(name: str, param: torch.Tensor) -> RemovableHandle:
    """Let a backward that gives `param` a gradient raise RuntimeError: no optimizer was given
    for it.
    """

    def refuse(grad: torch.Tensor) -> None:
        raise RuntimeError(
            f"backward: {name} requires a gradient, but its model was sharded without an "
            f"optimizer, to run forward only; "
            "expected model.requires_grad_(False), or shard(model, optimizer) to train it"
        )

    return param.register_hook(refuse)  # type: ignore[no-untyped-call, no-any-return]


def check_ownership(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise unless every parameter of `optimizer` is one of the model's."""
    own_params = set(model.parameters())
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in own_params:
                raise ValueError(
                    f"shard: parameter {position} of param_groups[{index}], of shape "
                    f"{tuple(param.shape)}, is not in the model; expected an optimizer over the "
                    "model's parameters (create it after the last change of the model)"
                )


def fixed_dtypes_of(model: nn.Module, keep_fp32: Sequence[Any]) -> dict[nn.Parameter, torch.dtype]:
    """Return the dtypes of parameters that have them whatever `precision` is: float32 of those in
    `keep_fp32` (module classes, parameter names, parameters) and of scales; and `bias_dtypes`.
    """
    if isinstance(keep_fp32, str | type):
        keep_fp32 = (keep_fp32,)
    if not isinstance(keep_fp32, Iterable):
        raise TypeError(
            f"shard: keep_fp32 is {keep_fp32!r}; expected a list of module classes, names or "
            f"parameters"
        )
    by_name = dict(model.named_parameters(remove_duplicate=False))
    params = [scale for param in by_name.values() for _, scale in parts_of(param)]
    for item in keep_fp32:
        if isinstance(item, type) and issubclass(item, nn.Module):
            matches = [
                p
                for module in model.modules()
                if isinstance(module, item)
                for p in module.parameters()
            ]
        elif isinstance(item, str):
            matches = [
                param
                for name, param in by_name.items()
                if name == item or name.startswith(item + ".")
            ]
        elif isinstance(item, nn.Parameter):
            matches = [param for param in by_name.values() if param is item]
        else:
            raise TypeError(
                f"shard: keep_fp32 has {item!r}; expected module classes, names or parameters of "
                f"the model"
            )
        if not matches:
            raise ValueError(
                f"shard: keep_fp32 has {item!r}, but it matches no parameter; expected names or "
                "classes of the model's"
            )
        params += matches
    return {**bias_dtypes(model), **dict.fromkeys(params, torch.float32)}


def group_indices(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """Return the index of the param_group that each parameter is in."""
    return {
        param: index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }


def check_states(optimizer: torch.optim.Optimizer, kind: Kind, builder: "Builder") -> None:
    """Raise ValueError or TypeError for a state of `optimizer` that cannot be carried into
    shards.
    """
    for index, group in enumerate(optimizer.param_groups):
        for number, param in enumerate(group["params"]):
            state = optimizer.state.get(param)
            if state and param.requires_grad:
                # Adagrad makes its states before the first step
                has_steps = is_dtensor(param) and bool(state.get("step", 1))
                refuse_slices(
                    "shard: the state that the optimizer has",
                    has_steps,
                    "one without (no step yet)",
                )
                state_format = kind.format_of(group, builder.dtype_of(param))
                where = f"the optimizer's state of param_groups[{index}] params[{number}]"
                kind.import_state("shard", where, export_state(state, param), param, state_format)


def signature(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    optimizer: torch.optim.Optimizer,
    sharded: ShardableOptimizer,
    builder: "Builder",
    options: Mapping[str, Any],
) -> list[Entry]:
    """Return what has to be the same on every rank, the most telling first.

    optimizer: the user's; sharded: what takes its place.
    """
    positions = {
        param: f"in param_groups[{index}] at {number}"
        for index, group in enumerate(optimizer.param_groups)
        for number, param in enumerate(group["params"])
    }
    entries: list[Entry] = []
    for key, value in options.items():
        if is_dataclass(value):
            each = {f"{key}.{f.name}": getattr(value, f.name) for f in fields(value)}
        else:
            each = {key: value}
        entries += [("option", name, str(single)) for name, single in each.items()]
    entries.append(("optimizer", "", type(optimizer).__name__ if builder.trains else "None"))
    entries += [
        ("parameter group", f"param_groups[{index}]", f"of {len(group['params'])} parameters")
        for index, group in enumerate(sharded.param_groups)
    ]
    entries += [
        (
            "parameter",
            name,
            str(tuple(param.shape)),
            dtype_name(param.dtype),
            "trainable" if builder.updates(param) else "frozen",
            f"in unit {spec.name or 'of the root'}",
            positions.get(param, "in no group"),
            f"stored as {builder.storage_of(param)}",
            described(param),
            f"with the states: {_state_of(optimizer, param)}",
        )
        for spec in specs
        for name, param in spec.params
    ]
    first_names = {param: name for name, param in model.named_parameters()}
    entries += [
        ("shared parameter", name, f"(the same as {first_names[param]})")
        for name, param in model.named_parameters(remove_duplicate=False)
        if first_names[param] != name
    ]
    entries += [
        ("buffer", name, str(tuple(buffer.shape)), dtype_name(buffer.dtype))
        for name, buffer in model.named_buffers()
    ]
    entries += [
        ("group option", f"param_groups[{index}].{key}", str(value))
        for index, group in enumerate(sharded.param_groups)
        for key, value in known_options(sharded.kind, group).items()
    ]
    return entries


def known_options(kind: Kind, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that its optimizer reads, as JSON values: the user's own
    keys may differ by rank.
    """
    return {key: json_value(group[key]) for key in {**kind.terms(group), **kind.fixed(group)}}


def _state_of(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> str:
    state = optimizer.state.get(param) or {}
    return (
        " ".join(
            f"{key}={json_value(state[key])}" if key == "step" else key for key in sorted(state)
        )
        or "none"
    )


def units_of(specs: Sequence[UnitSpec], buckets: Sequence[Bucket]) -> list[Unit]:
    """Return the units at run time; the root, and units with others inside, have to stay
    unsharded through a backward.
    """
    modules = {spec.module for spec in specs}
    buckets_of: dict[str, list[Bucket]] = {spec.name: [] for spec in specs}
    for bucket in buckets:
        buckets_of[bucket.unit].append(bucket)
    return [
        Unit(
            spec.name,
            buckets_of[spec.name],
            stays=spec.name == "" or len(modules.intersection(spec.module.modules())) > 1,
        )
        for spec in specs
    ]


def _own_values(params: Sequence[Managed]) -> Iterable[tuple[Managed, torch.Tensor]]:
    return ((managed, plain_part(managed.local).data) for managed in params)


class Builder:
    """Makes the buckets of a model and puts its weights into them."""

    def __init__(
        self,
        comm: Comm,
        lifetimes: Lifetimes,
        dtype: torch.dtype | None,
        fixed_dtypes: Mapping[nn.Parameter, torch.dtype],
        device: torch.device,
        trains: bool = True,
    ) -> None:
        """Weights become `dtype` (None: stay as they are), but for `fixed_dtypes`. Buffers move to
        `device`.

        trains: if not, the model only runs forward, and every parameter is treated as frozen.
        """
        self.comm = comm
        self.lifetimes = lifetimes
        self.dtype = dtype
        self.fixed_dtypes = fixed_dtypes
        self.device = device
        self.trains = trains
        # the weights that are cast to float8 from float32, and so are kept in float32
        self.float8: Mapping[nn.Parameter, Float8Format] = {}
        # parameters that get their values after `fill`, beside the ones on the meta device
        self.late: Collection[torch.Tensor] = ()
        # what parameters have now
        self.values_of_params: Callable[
            [Sequence[Managed]], Iterable[tuple[Managed, torch.Tensor]]
        ] = _own_values

    def updates(self, param: torch.Tensor) -> bool:
        """Whether the parameter is trainable."""
        return self.trains and param.requires_grad

    def dtype_of(self, param: torch.Tensor) -> torch.dtype:
        """Return the dtype that a parameter is to have; frozen integers and the like stay as
        they are.
        """
        if not param.is_floating_point() or param.dtype not in PARAM_DTYPES:
            return param.dtype
        return torch.float32 if param in self.float8 else self.compute_dtype_of(param)

    def compute_dtype_of(self, param: torch.Tensor) -> torch.dtype:
        """Return the dtype of a floating parameter's products and gradients: the one that it is to
        have, whether or not float8 weights are kept in float32.
        """
        return self.fixed_dtypes.get(param, self.dtype or param.dtype)  # type: ignore[call-overload,no-any-return]

    def storage_of(self, param: torch.Tensor) -> str:
        """Return in words how a parameter is to be stored and gathered."""
        stored, float8 = dtype_name(self.dtype_of(param)), self.float8.get(param)  # type: ignore[call-overload]
        return stored if float8 is None else f"{stored}, cast as {float8}"

    def notes(self, model: nn.Module, precision: object) -> list[str]:
        """Return lines for the log about conversions and float8 weights. Before weights are
        filled.
        """
        converted, ungathered = self._conversions(model), ungathered_float8(model, self.float8)
        if converted and self.float8:
            converted += " (float8 weights are stored in float32)"
        notes = [f"precision={precision!r} converts parameters: {converted}"] if converted else []
        return [*notes, *filter(None, [ungathered])]

    def _conversions(self, model: nn.Module) -> str:
        """Return in words how many parameters change their dtype; nothing if none does."""
        params = (param for _, param in with_parts(model.named_parameters()))
        pairs = [(dtype_name(p.dtype), dtype_name(self.dtype_of(p))) for p in params]
        changed = Counter(pair for pair in pairs if pair[0] != pair[1])
        return ", ".join(f"{count} from {old} to {new}" for (old, new), count in changed.items())

    def plan(
        self, model: nn.Module, specs: Sequence[UnitSpec], optimizer: ShardableOptimizer
    ) -> list[Bucket]:
        """Return the empty buckets, in unit order; frozen parameters have buckets where weights
        are sharded.
        """
        groups = group_indices(optimizer)
        order = {
            each: index
            for index, param in enumerate(model.parameters())
            for _, each in with_parts([("", param)])
        }
        buckets = []
        for spec in specs:
            members: dict[tuple[Any, ...], list[Managed]] = {}
            for name, param in spec.params:
                trainable = self.updates(param)
                if trainable or not self.lifetimes.full_weight_resident:
                    group = groups.get(param) if trainable else None
                    managed = Managed(name, param, order[param], group)
                    repeated = bool(self.comm.slices) and (
                        managed.sliced is None or managed.sliced.dim is None
                    )
                    float8 = self.float8.get(param)
                    dtype = self.dtype_of(param)
                    grad_dtype = dtype if float8 is None else self.compute_dtype_of(param)
                    key = dtype, group, trainable, repeated, grad_dtype, float8
                    members.setdefault(key, []).append(managed)
            for (dtype, group, trainable, repeated, grad_dtype, float8), params in members.items():
                layout = plan_flat(
                    [managed.local.numel() for managed in params], self.comm.world_size
                )
                owned, reduces = (
                    self._owned(layout),
                    layout.shard_range(self.comm.topology.piece_index(self.comm.rank)),
                )
                state_format = NO_STATES
                if group is not None:
                    options = optimizer.param_groups[group]
                    check_dtype("shard", f"the sharded weight {params[0].name}", dtype, options)
                    state_format = optimizer.kind.format_of(options, dtype)
                bucket = Bucket(
                    spec.name,
                    dtype,
                    group,
                    params,
                    layout,
                    owned,
                    reduces,
                    trainable,
                    state_format,
                    grad_dtype,
                    float8,
                )
                bucket.repeated = repeated
                bucket.counted = not repeated or all(comm.rank == 0 for comm in self.comm.slices)
                buckets.append(bucket)
        return buckets

    def _owned(self, layout: FlatLayout) -> tuple[int, int]:
        if self.lifetimes.owns_everything:
            return 0, layout.numel
        first, last = self.comm.topology.owned_pieces(self.comm.rank)
        return first * layout.shard_numel, last * layout.shard_numel

    def allocate(
        self, bucket: Bucket, tier: _C.HostTier | None = None, files: WeightFiles | None = None
    ) -> None:
        """Give the bucket memory for its weights; for its shard of them in `tier`, if that is
        given, or a place in `files`.
        """
        if self.lifetimes.full_weight_resident:
            bucket.keep_unsharded(allocate(bucket.layout.numel, bucket.dtype, self.device))
        elif tier is None:
            bucket.owned_weight = allocate(bucket.owned_numel, bucket.dtype, self.device)
        elif files is None:
            bucket.owned_weight, bucket.tier, bucket.weight_tier = (
                tier.empty(bucket.owned_numel, bucket.dtype),
                tier,
                "cpu",
            )
        else:
            bucket.owned_weight, bucket.tier, bucket.weight_tier = (
                tier.empty(0, bucket.dtype),
                tier,
                "nvme",
            )
            bucket.files = files

    def together(self, doing: str) -> together:
        """Return a block of work on weights that succeeds on every rank of the model, or raises
        on every rank.
        """
        return together(Everyone(self.comm), f"shard: {doing}", PARTLY_FILLED)

    @torch.no_grad()
    def fill(self, bucket: Bucket, store: StateStore, broadcast: bool) -> None:
        """Move the parameters' values into the bucket (rank 0's if `broadcast`), in float32 first:
        masters lose nothing.

        Parameters on the meta device, and `late` ones, have none: their slots stay zero, and they
        are attached when they get values. Collective. Raises on every rank if it fails on one.
        """
        real = [
            managed
            for managed in bucket.params
            if not managed.param.is_meta and managed.param not in self.late
        ]
        if not real:
            return
        with self.together(f"placing the weights of {bucket.unit or 'the root'}"):
            values = self._values_of(bucket, real)
        if broadcast:
            self.broadcast(values, bucket.repeated)
        with self.together(f"placing the weights of {bucket.unit or 'the root'}"):
            self.keep(bucket, real, values, store)

    def broadcast(self, values: torch.Tensor, repeated: bool) -> None:
        """Overwrite `values` with rank 0's; repeated: with those of the first tensor-parallel
        rank, too. Collective.
        """
        for comm in (self.comm, *(self.comm.slices if repeated else ())):
            comm.broadcast(values)

    def _values_of(self, bucket: Bucket, real: Sequence[Managed]) -> torch.Tensor:
        exact = torch.float32 if bucket.dtype in PARAM_DTYPES else bucket.dtype
        values = allocate(bucket.layout.numel, exact, self.device)
        for managed, value in self.values_of_params(real):
            managed.slice_of(values).copy_(value)
        return values

    def keep(
        self, bucket: Bucket, real: Sequence[Managed], values: torch.Tensor, store: StateStore
    ) -> None:
        """Let the bucket have these values (layout.numel,) of its weights, and the parameters
        `real` be in it.
        """
        resident = self.lifetimes.full_weight_resident
        target, source = (
            (bucket.weight, values)
            if resident
            else (bucket.owned_weight, bucket.owned_slice(values))
        )
        if bucket.dtype != values.dtype:
            rounded = (
                target if bucket.tier is None else torch.empty_like(source, dtype=bucket.dtype)
            )
            _C.cast([rounded], [source])
            source = rounded
        if bucket.files is not None:
            bucket.files.assign(bucket, 0, source)
        elif bucket.tier is not None:
            bucket.tier.to_tier(target, source).synchronize()
        elif source is not target:
            target.copy_(source)
        for managed in real:
            self.attach(bucket, managed)
        if bucket.state_format.master is not None:
            store.write(bucket, "master", 0, bucket.owned_slice(values))

    def attach(self, bucket: Bucket, managed: Managed) -> None:
        """Make the parameter a view of its slot in the bucket, or sharded where full weights
        exist only around their use.
        """
        if self.lifetimes.full_weight_resident:
            become(managed.param, managed.as_param(managed.slice_of(bucket.weight)))
        else:
            message = closed_message(managed.name, bucket.unit)
            like = torch.empty(0, dtype=bucket.dtype, device=self.device)
            become(managed.param, managed.as_param(_C.closed(managed.local.shape, like, message)))
        managed.storage, managed.version = managed.storage_now(), managed.version_now

    @torch.no_grad()
    def move_rest(self, tensors: Iterable[torch.Tensor], broadcast: bool) -> None:
        """Move and broadcast buffers and frozen parameters that have no bucket; cast the latter.
        Collective.

        Raises on every rank if it fails on one.
        """
        tensors = list(tensors)
        with self.together("placing buffers and frozen weights"):
            for tensor in tensors:
                cut, values = (
                    slice_of("a frozen weight", tensor),
                    plain_part(held_by(tensor)).data.to(self.device).contiguous(),
                )
                dtype = self.dtype_of(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype
                if dtype != tensor.dtype:
                    values, exact = torch.empty_like(values, dtype=dtype), values
                    _C.cast([values], [exact])
                become(tensor, values if cut is None else cut.wrap(values))
        for tensor in tensors if broadcast else ():
            cut = slice_of("a frozen weight", tensor)
            self.broadcast(held_by(tensor).data, cut is None or cut.dim is None)


def become(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Give `tensor` (a Parameter, a buffer) the data; by swapping what it is where torch has no
    other way: on the meta device and others unlike the data's, and for DTensors. Its hooks stay.
    A float8 weight becomes a plain Parameter.
    """
    if is_float8_weight(tensor):
        unwrap(tensor)
        restore_hooks(tensor)
    if is_dtensor(tensor) or not can_assign_data(tensor, data):
        twin = data if is_dtensor(data) else torch.empty(0, dtype=data.dtype, device=data.device)
        twin = (
            nn.Parameter(twin, tensor.requires_grad)
            if is_dtensor(data)
            else twin.requires_grad_(tensor.requires_grad)
        )
        twin.__class__ = tensor.__class__
        torch.utils.swap_tensors(tensor, twin)  # type: ignore[no-untyped-call]
        tensor.__dict__.update(twin.__dict__)  # the attributes were swapped, too
        restore_hooks(tensor)  # which were not, and which autograd has lost
    if not is_dtensor(tensor):
        tensor.data = data
