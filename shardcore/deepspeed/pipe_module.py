"""DeepSpeed's PipelineModule: a sequence of layers, of which each rank makes those of its stage;
LayerSpec, TiedLayerSpec.

`initialize` makes a PipelineEngine (pipe_engine.py) of it, which trains it. Source: the names and
behaviour documented at https://deepspeed.readthedocs.io/en/latest/pipeline.html, 0.19.8.
"""

import logging
import math
import re
from bisect import bisect_right
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardcore.deepspeed.checkpointing import checkpoint

logger = logging.getLogger("shardcore")


class ProcessTopology:
    """Ranks on a grid: the last axis varies fastest. The ranks of a DeviceMesh of these
    dimensions.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        """axes: names, such as pipe and data. dims: how many ranks each has."""
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self._ranks = torch.arange(math.prod(dims)).view(*dims)

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._ranks.numel()

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks of an axis, or 0 for an unknown axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coords: int) -> int:
        """Return the rank at the given coordinates, one for each axis by name."""
        return int(self._ranks[tuple(coords[axis] for axis in self.axes)])

    def get_coord(self, rank: int) -> Any:
        """Return the place of a rank: a named tuple."""
        return self.ProcessCoord(
            *(int(index) for index in torch.unravel_index(torch.tensor(rank), self.dims))
        )

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return a rank's place in words, for names of files: "model_01"; without omit_axes
        "pipe_00-data_00-model_01".
        """
        place = zip(self.axes, self.get_coord(rank), strict=True)
        return outer_sep.join(
            f"{axis}{inner_sep}{index:02d}" for axis, index in place if axis not in omit_axes
        )

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks with the same coordinates on all other axes."""
        if axis not in self.axes:
            return []
        return self._ranks.movedim(self.axes.index(axis), -1).flatten(0, -2).tolist()

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks whose coordinate along an axis is `idx`."""
        return self._ranks.select(self.axes.index(axis), idx).flatten().tolist()

    def filter_match(self, **coords: int) -> list[int]:
        """Return the ranks with these coordinates."""
        index = tuple(coords.get(axis, slice(None)) for axis in self.axes)
        return self._ranks[index].flatten().tolist()


class PipeDataParallelTopology(ProcessTopology):
    """A topology of stages, with neighbouring ranks in the same stage."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        """num_pp: stages; num_dp: ranks of each."""
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A PipeDataParallelTopology with tensor parallelism. PipelineModule requires num_mp=1."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        """num_pp: stages; num_mp: tensor-parallel ranks; num_dp: data-parallel ranks."""
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """The process groups of a topology: `engine.grid`, `module.mpu()`."""

    def __init__(self, topology: ProcessTopology) -> None:
        """Make the groups. Collective over all ranks."""
        self._topo = topology
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.stage_id: int = topology.get_coord(self.global_rank).pipe
        self.data_parallel_id: int = topology.get_coord(self.global_rank).data
        self.pipe_parallel_size = topology.get_dim("pipe")
        self.data_parallel_size = topology.get_dim("data")
        self.pp_group, self.pp_proc_group = self.own(topology.get_axis_comm_lists("pipe"))
        self.dp_group, self.dp_proc_group = self.own(topology.get_axis_comm_lists("data"))

    def own(self, lists: Sequence[Sequence[int]]) -> tuple[list[int], Any]:
        """Make a group of each list; returns this rank's, and its ranks ([], None if it is in
        none). Collective.
        """
        own: tuple[list[int], Any] = [], None
        for ranks in lists:
            group = dist.new_group(list(ranks)) if dist.is_initialized() else None
            if self.global_rank in ranks:
                own = list(ranks), group
        return own

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, data: int | None = None) -> int:
        """Return the rank of a stage of this rank's pipeline, or of another one."""
        if data is None:
            return self.pp_group[stage_id]
        return self._topo.filter_match(pipe=stage_id, data=data)[0]

    def get_global_rank(self) -> int:
        """Return this rank."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_model_parallel_rank = (
        get_stage_id
    )

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_model_parallel_world_size = (
        get_pipe_parallel_world_size
    )

    def get_pipe_parallel_group(self) -> Any:
        """Return the group of this rank's pipeline."""
        return self.pp_proc_group

    get_model_parallel_group = get_pipe_parallel_group

    def get_data_parallel_id(self) -> int:
        """Return the number of this rank's pipeline."""
        return self.data_parallel_id

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of pipelines."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Return the group of the ranks of this rank's stage."""
        return self.dp_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Return 0: there is no tensor parallelism."""
        return 0

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """Return 1: there is no tensor parallelism."""
        return 1

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size


class LayerSpec:
    """A layer to build on the ranks of its stage only, as `typename(*module_args,
    **module_kwargs)`.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        """typename: a class of modules. TypeError for anything else."""
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise TypeError(
                f"LayerSpec: typename is {typename!r}; expected a class of torch.nn.Module"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Return the layer. log: means nothing here."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its weights with all layers of the same key, also in other stages."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        """forward_fn: what the layer computes, given the module and its input. tied_weight_attr:
        paths of the tied weights.
        """
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


class PipelineModule(nn.Module):
    """A model as a sequence of layers. Each layer gets the output of the layer before: a tensor, or
    a tuple of tensors.

    Each rank holds the layers of its stage. Parameters keep their names of the whole model:
    "3.weight", "tied_modules.embed.weight". Tied weights belong to the first stage with their key.
    In the other stages `module.weight` is a copy and not a parameter. The copy is updated after
    every step, and the first stage adds its gradients to its own.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        """Make the layers of this rank's stage. Collective over all ranks; torch.distributed has to
        be started.

        layers: modules, LayerSpecs, TiedLayerSpecs and functions, or an nn.Sequential.
        num_stages: neighbouring ranks have the same stage. topology: instead, or as well.
        loss_fn: takes the last layer's output and the labels; None: that output is the loss.
        seed_layers: seed each layer when it is made, and in every forward, by seed_fn
        (torch.manual_seed), from base_seed on.
        partition_method: "parameters" (equally many trainable elements), "uniform" (layers), or
            "type:REGEX" (layers whose class has such a name). A subclass may override
            `_partition_layers`, which sets `parts` and calls `_set_bounds`.
        activation_checkpoint_interval: so many layers are recomputed in backward together; 0: none.
        activation_checkpoint_func: takes a function and its inputs. checkpointable_layers: names of
        classes; others are kept.
        dynamic_shape: micro-batches of one batch may have different shapes. (Those of different
        batches always may.)

        Raises ValueError, TypeError for what does not fit.
        """
        super().__init__()
        self._layer_specs = list(layers)
        world = dist.get_world_size() if dist.is_initialized() else 1
        topology = _topology_of(num_stages, topology, world)
        self.num_stages = topology.get_dim("pipe")
        if len(self._layer_specs) < self.num_stages:
            raise ValueError(
                f"PipelineModule: layers has {len(self._layer_specs)} for {self.num_stages} "
                f"stages; expected at least one each"
            )
        self._topo, self._grid = topology, PipelineParallelGrid(topology)
        self.global_rank, self.stage_id = self._grid.global_rank, self._grid.stage_id
        self.world_size = world
        self.loss_fn, self.dynamic_shape = loss_fn, dynamic_shape
        self.seed_layers = seed_layers
        self.seed_fn = seed_fn or torch.manual_seed
        self.base_seed = base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self._micro_batches = 0  # how many forwards there were, for seed_layers
        self.parts: list[int] = []  # the first layer of each stage, and the end
        self._partition_layers(method=partition_method)
        if self.global_rank == 0:
            logger.info(
                "PipelineModule: stages begin at layers %s of %d",
                self.parts[:-1],
                len(self._layer_specs),
            )
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs = [
            self._build_layer(index) for index in range(self._local_start, self._local_stop)
        ]
        self.tied = self._find_tied()
        if not any(param.requires_grad for param in self.parameters()):
            self.of_no_layer = nn.Parameter(torch.zeros(1))  # an optimizer needs one

    # --- stages -----------------------------------------------------------------------------------

    def _partition_layers(self, method: str = "parameters") -> None:
        """Set `parts`, and the bounds of this stage."""
        specs, method = self._layer_specs, method.lower()
        if method == "uniform":
            whole, rest = divmod(len(specs), self.num_stages)
            self.parts = [stage * whole + min(stage, rest) for stage in range(self.num_stages + 1)]
        elif method == "parameters":
            self.parts = partition([_trainable_numel(spec) for spec in specs], self.num_stages)
        elif method.startswith("type:"):
            pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
            matches = [int(pattern.search(_name(spec)) is not None) for spec in specs]
            if not any(matches):
                raise ValueError(
                    f"PipelineModule: no layer's class name matches {pattern.pattern!r}; expected "
                    "at least one"
                )
            self.parts = partition(matches, self.num_stages)
        else:
            raise ValueError(
                f'PipelineModule: partition_method is {method!r}; expected "parameters", "uniform" '
                f'or "type:REGEX" (or a '
                "subclass with its own _partition_layers)"
            )
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def _set_bounds(self, start: int, stop: int) -> None:
        """Let this stage have the layers from `start` to before `stop`."""
        self._local_start, self._local_stop = start, stop

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of a layer."""
        return bisect_right(self.parts, layer_idx) - 1

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Return the groups of ranks."""
        return self._grid

    def partitions(self) -> list[int]:
        """Return the first layer of each stage, and the end."""
        return self.parts

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute so many layers in backward together; 0: none."""
        self.activation_checkpoint_interval = interval

    def num_pipeline_stages(self) -> int:
        """Return the number of stages."""
        return self.num_stages

    # --- layers -----------------------------------------------------------------------------------

    def _build_layer(self, index: int) -> Callable[[Any], Any]:
        """Make a layer, and register it; returns what computes it."""
        spec = self._layer_specs[index]
        if self.seed_layers:
            self.seed_fn(self.base_seed + index)
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.tied_modules:
                self.tied_modules[spec.key] = spec.build()
            module = self.tied_modules[spec.key]
            if not isinstance(module, spec.typename):
                raise ValueError(
                    f"PipelineModule: layers[{index}] is a {spec.typename.__name__} tied to a "
                    f"{type(module).__name__} of its stage by the key {spec.key!r}; expected one "
                    "class (forward_fn may differ)"
                )
            return module if spec.forward_fn is None else partial(spec.forward_fn, module)
        layer = spec.build() if isinstance(spec, LayerSpec) else spec
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
        elif not callable(layer):
            raise TypeError(
                f"PipelineModule: layers[{index}] is {layer!r}; expected a module, a LayerSpec or "
                f"a function"
            )
        return layer

    def _find_tied(self) -> list["TiedWeight"]:
        """Return the tied weights of this stage that other stages have, too. Collective over all
        ranks.
        """
        self._refuse_shared()
        stages_of: dict[str, dict[int, TiedLayerSpec]] = {}  # by key, the first layer of each stage
        for index, spec in enumerate(self._layer_specs):
            if isinstance(spec, TiedLayerSpec):
                stages_of.setdefault(spec.key, {}).setdefault(self.stage_owner(index), spec)
        pipes = self._topo.get_axis_comm_lists("pipe")
        tied = []
        for key, specs in stages_of.items():
            stages = sorted(specs)
            if len(stages) == 1:
                continue
            ranks, group = self._grid.own([[pipe[stage] for stage in stages] for pipe in pipes])
            if self.stage_id in stages:
                module, is_owner = self.tied_modules[key], self.stage_id == stages[0]
                for path in specs[self.stage_id].tied_weight_attr:
                    tied.append(TiedWeight(module, path, ranks[0], is_owner, group))
        return tied

    def _refuse_shared(self) -> None:
        """Raise ValueError for a parameter in modules of several stages, which would train
        apart.
        """
        seen: dict[nn.Parameter, int] = {}
        for index, layer in enumerate(self._layer_specs):
            for name, param in layer.named_parameters() if isinstance(layer, nn.Module) else ():
                first = seen.setdefault(param, index)
                if self.stage_owner(first) != self.stage_owner(index):
                    raise ValueError(
                        f"PipelineModule: layers[{index}] shares its parameter {name} with "
                        f"layers[{first}], of another stage; "
                        "expected a TiedLayerSpec of one key for both, or parameters of its own"
                    )

    def forward(self, *inputs: Any) -> Any:
        """Return the output of this stage's layers.

        inputs: one tensor, or several tensors, passed to the first layer as a tuple.
        """
        self._micro_batches += 1
        seed = self.base_seed * (self._micro_batches + 1)
        every = self.activation_checkpoint_interval

        def run(start: int, stop: int, *inputs: Any) -> Any:
            value = inputs[0] if len(inputs) == 1 else inputs
            for index in range(start, stop):
                if self.seed_layers:
                    self.seed_fn(seed + self._local_start + index)
                value = self.forward_funcs[index](value)
            return value

        count = len(self.forward_funcs)
        if every == 0:
            return run(0, count, *inputs)
        value: Any = inputs
        for start in range(0, count, every):
            stop = min(start + every, count)
            values = value if isinstance(value, tuple) else (value,)
            part = partial(run, start, stop)
            if self._is_checkpointable(self.forward_funcs[start:stop]):
                value = self.activation_checkpoint_func(part, *values)
            else:
                value = part(*values)
        return value

    def _is_checkpointable(self, layers: Sequence[Any]) -> bool:
        """Whether the activations of these layers are recomputed."""
        modules = [layer for layer in layers if isinstance(layer, nn.Module)]
        if self.checkpointable_layers is not None:
            return all(type(layer).__name__ in self.checkpointable_layers for layer in layers)
        return any(True for module in modules for _ in module.parameters())


class TiedWeight:
    """A weight that several stages have: a parameter of the first; in the others a copy, whose
    gradient goes to the first.
    """

    def __init__(
        self, module: nn.Module, path: str, source: int, is_owner: bool, group: Any
    ) -> None:
        """source: the rank that owns it, in `group`. Elsewhere the module's parameter becomes a
        plain tensor.
        """
        where, _, name = path.rpartition(".")
        weight = getattr(module.get_submodule(where), name, None)
        if not isinstance(weight, nn.Parameter):
            raise ValueError(
                f"PipelineModule: tied_weight_attr is {path!r}, but {type(module).__name__} does "
                'not contain this parameter; expected a path like "weight" or '
                '"word_embeddings.weight"'
            )
        self.weight: torch.Tensor = weight
        self._source, self._group, self._is_owner = source, group, is_owner
        self._places = [
            (part, name)
            for part in module.modules()
            for name, param in part.named_parameters(recurse=False, remove_duplicate=False)
            if param is weight and not is_owner
        ]
        for part, name in self._places:
            delattr(part, name)
        self._set(weight.detach())

    def _set(self, weight: torch.Tensor) -> None:
        for part, name in self._places:
            setattr(part, name, weight)
            self.weight = weight

    def make_copy(self, device: torch.device) -> None:
        """Make the copies like the owner's weight as it trains. Collective over the group."""
        owners = [(self.weight.dtype, self.weight.requires_grad)]
        dist.broadcast_object_list(owners, self._source, self._group, device)
        if not self._is_owner:
            dtype, trains = owners[0]
            self._set(
                torch.empty(self.weight.shape, dtype=dtype, device=device, requires_grad=trains)
            )
            if trains:
                # in which the gradients of micro-batches add up
                self.weight.grad_dtype = torch.float32
        self.update()

    def update(self) -> None:
        """Give the copies the owner's values. Collective over the group."""
        dist.broadcast(self.weight.detach(), self._source, self._group)

    def forget_gradients(self) -> None:
        """Drop what backwards gave a copy; the owner's is the optimizer's."""
        if not self._is_owner:
            self.weight.grad = None

    def add_gradients(self) -> None:
        """Add the gradients of the copies to the owner's, as one more backward. Collective over
        the group.
        """
        weight = self.weight
        if not weight.requires_grad:
            return
        own = None if self._is_owner else weight.grad
        total = torch.zeros_like(weight, dtype=torch.float32) if own is None else own
        dist.reduce(total, self._source, group=self._group)
        if self._is_owner:
            weight.backward(total.to(weight.dtype))  # type: ignore[no-untyped-call]
        self.forget_gradients()


def partition(weights: Sequence[int], parts: int) -> list[int]:
    """Return the bounds of contiguous parts, none empty: DeepSpeed's, by its dynamic programming
    over the parts.

    For each number of weights, at least as many as parts, it keeps one cut of them: where the
    heaviest and the lightest part differ least, and of equal ones the latest. (So the end is near
    the least difference, but may miss it.)
    """
    sums = [0, *accumulate(weights)]
    best = {0: (0.0, math.inf)}  # for each end of the parts so far: the heaviest and the lightest
    starts = []  # for each part, the start that goes with each end
    for _ in range(parts):
        cuts = {}
        for end in range(1, len(sums)):
            options = []
            for start, (heaviest, lightest) in best.items():
                weight = sums[end] - sums[start]
                if start < end:
                    options.append((max(heaviest, weight), min(lightest, weight), start))
            if options:
                cuts[end] = min(options, key=lambda option: (option[0] - option[1], -option[2]))
        best = {end: cut[:2] for end, cut in cuts.items()}
        starts.append({end: cut[2] for end, cut in cuts.items()})
    bounds = [len(weights)]
    for start_of in reversed(starts):
        bounds.append(start_of[bounds[-1]])
    return bounds[::-1]


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, the least first. Raises ValueError for one below 1."""
    if number < 1:
        raise ValueError(f"prime_factors: number is {number}; expected at least 1")
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


def _topology_of(
    num_stages: int | None, topology: ProcessTopology | None, world: int
) -> ProcessTopology:
    """Return the topology; ValueError if it does not fit the ranks."""
    if topology is None:
        if num_stages is None:
            raise ValueError(
                "PipelineModule: num_stages and topology are both None; expected one of them"
            )
        if num_stages < 1 or world % num_stages:
            raise ValueError(
                f"PipelineModule: num_stages is {num_stages}; expected a divisor of the {world} "
                f"ranks (started by deepspeed.init_distributed())"
            )
        return PipeDataParallelTopology(num_stages, world // num_stages)
    if topology.get_dim("model") > 1:
        raise ValueError(
            f"PipelineModule: topology has {topology.get_dim('model')} tensor-parallel ranks; "
            f"expected 1 (shardcore.shard_pipeline takes sliced stages)"
        )
    if topology.world_size() != world or 0 in (topology.get_dim("pipe"), topology.get_dim("data")):
        raise ValueError(
            f"PipelineModule: topology uses the axes {topology.axes} of {topology.dims} ranks; "
            f"expected pipe and data, for {world} ranks"
        )
    return topology


def _name(spec: Any) -> str:
    kind = spec
    if isinstance(spec, LayerSpec):
        kind = spec.typename
    elif isinstance(spec, nn.Module):
        kind = type(spec)
    return getattr(kind, "__name__", "")


def _trainable_numel(spec: Any) -> int:
    """Return the trainable elements of a layer; one that is not made yet is made without
    weights, where its class can be.
    """
    if isinstance(spec, LayerSpec):
        try:
            with torch.device("meta"):
                spec = spec.build()
        except Exception:  # of any kind: the class is the user's
            spec = spec.build()
    params = spec.parameters() if isinstance(spec, nn.Module) else ()
    return sum(param.numel() for param in params if param.requires_grad)
