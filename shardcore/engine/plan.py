"""What `shard` has found out of a model, and the engine is made from; what works on checkpoints
for the engine.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from shardcore.distributed.comm import Comm
from shardcore.distributed.machine import WorkerThreads
from shardcore.engine.bucket import Bucket, ReducePolicy
from shardcore.engine.build import Builder
from shardcore.engine.loss_scale import LossScaler
from shardcore.engine.quantized import with_parts
from shardcore.engine.reduce_scatter import ReduceScatter
from shardcore.engine.reducer import HostGradients
from shardcore.engine.states import HostStore, OverlappedStep, StateStore
from shardcore.engine.units import Unit
from shardcore.optim import ShardableOptimizer

MakeHostGrads: TypeAlias = Callable[[ReduceScatter, ReducePolicy, bool], HostGradients]


@dataclass
class Plan:
    """How one model is sharded: what `shard` has checked on every rank, and the memory that it has
    taken for it.

    builder: knows device, lifetimes and dtypes. units, buckets: empty until they are filled.
    policy, scaler: how gradients are reduced and losses scaled. options: shard's, by name, equal on
    all ranks. members: the names of the parameters of each unit.
    host: what offload keeps in host memory, if anything; store: what the step works on. threads: of
    the workers.
    make_overlap_step, make_host_grads, make_ratio_tuner: make what an option opens (shardcore's
    offload, which the engine does not import) for a plan, which is filled then; None without it.
    """

    model: nn.Module
    optimizer: ShardableOptimizer
    comm: Comm
    builder: Builder
    units: Sequence[Unit]
    buckets: Sequence[Bucket]
    policy: ReducePolicy
    scaler: LossScaler
    options: Mapping[str, Any]
    members: Mapping[str, Sequence[str]]
    make_overlap_step: "Callable[[Plan], OverlappedStep | None]"
    make_host_grads: "Callable[[Plan], MakeHostGrads | None]"
    make_ratio_tuner: "Callable[[Plan], RatioTuner | None]"
    host: HostStore | None = None
    store: StateStore = field(init=False)
    threads: WorkerThreads = field(init=False)

    def without_owners(self) -> Any:
        """Return a copy that does not keep model and optimizer, which keep the engine."""
        other: Any = copy.copy(self)
        other.model = other.optimizer = None
        return other

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.builder.device

    @property
    def updated(self) -> list[Bucket]:
        """The buckets that the optimizer updates."""
        return [bucket for bucket in self.buckets if bucket.group is not None]

    @property
    def frozen(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that do not train, and scales of them, with their names."""
        return [
            (name, param)
            for name, param in with_parts(self.model.named_parameters())
            if not self.builder.updates(param)
        ]


class RatioTuner(Protocol):
    """What the engine needs of whatever chooses the share of states that the CPU updates
    (offload/split_store.py, which has the contracts).
    """

    chosen: float | None
    updated: bool

    @property
    def measures(self) -> bool: ...

    def begin_forward(self) -> None: ...

    def end_forward(self) -> None: ...

    def begin_step(self) -> None: ...

    def resplit(self) -> None: ...


class Membership(Protocol):
    """Whether the model still has the Parameters that it was sharded with (engine/hooks.py)."""

    def check(self, op: str) -> None: ...

    def names(self) -> dict[torch.Tensor, str]: ...


class BackgroundSave(Protocol):
    """A save that goes on (checkpoint/background.py)."""

    raised: bool
    path: Path

    def wait(self) -> Any: ...


class StepCommits(Protocol):
    """What commits steps to disk (checkpoint/commits.py). step: how many steps were noted."""

    @property
    def step(self) -> int: ...

    def note_step(self) -> None: ...

    def before_forward(self, begin: bool) -> None: ...

    def finish(self) -> None: ...

    def wait_for_all(self) -> None: ...

    def link_into(self, folder: Path, names: Mapping[torch.Tensor, str]) -> Any: ...


def input_casts(plan: Plan, cast_inputs: bool | str) -> dict[str, torch.dtype]:
    """Return the dtype that the floating inputs of each unit are cast to, by its name."""
    dtype = plan.builder.dtype
    if cast_inputs != "units":
        return {"": dtype} if cast_inputs and dtype in (torch.bfloat16, torch.float16) else {}
    casts = {}
    for name in {"", *(unit.name for unit in plan.units)}:
        dtypes = {
            plan.builder.compute_dtype_of(param) if param in plan.builder.float8 else param.dtype
            for param in plan.model.get_submodule(name).parameters()
            if param.is_floating_point()
        }
        if dtype in dtypes or len(dtypes) == 1:
            casts[name] = dtype if dtype in dtypes else dtypes.pop()
    return casts
