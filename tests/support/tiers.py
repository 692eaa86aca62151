"""Host tiers that tests look into or replace, and runs over all that may lie on them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.offload import cpu_store
from tests.support.copies import simulated_tier
from tests.support.models import Net, Run, batch_of, hash_of, hash_of_training, loss_of, train

CPU_TIER = {"optimizer": "cpu"}

# States on disk: precisions and options of FusedAdam; options of shard.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {"amsgrad": True}),
    "masters": ("bf16", {"master": "fp32"}),
    "split 8-bit": ("bf16", {"master": "split", "state_dtype": "8bit"}),
    "bf16 states": ("fp16", {"state_dtype": "bf16"}),
    "stochastic": ("bf16", {"stochastic_rounding": True, "state_dtype": "8bit", "seed": 3}),
}
WAYS: dict[str, dict[str, Any]] = {
    "states": {},
    "overlapped": {"overlap_step": True},
    "a share": {"offload": {"ratio": 0.37}},
    "gradients, too": {"offload": {"gradients": "cpu"}},
    "weights, too": {"offload": {"gradients": "cpu", "params": "cpu"}, "overlap_step": True},
    "all on disk": {"offload": {"gradients": "cpu", "params": "nvme"}},
    "added up": {"accumulate": 3, "clip_grad_norm": 0.01},
}


def run_on_disk(
    path: Any, stage: int = 2, form: str = "masters", way: str = "states", **offload: Any
) -> Run:
    """Return a training with states in files at `path`, of a form and in a way, without what its
    stage cannot offload.
    """
    precision, adam = FORMS[form]
    shard: dict[str, Any] = {**WAYS[way]}
    tiers = {"optimizer": "nvme", "path": path, **shard.pop("offload", {}), **offload}
    shard["offload"] = {
        key: value
        for key, value in tiers.items()
        if (key != "params" or stage == 3) and (key != "gradients" or stage > 0)
    }
    return Run(
        stage,
        0,
        accumulate=shard.pop("accumulate", 1),
        precision=precision,
        shard=shard,
        adam={"lr": 1e-2, **adam},
    )


def in_memory(run: Run, **changes: Any) -> Run:
    """Return the same training with its states in memory, and with other changes."""
    shard = {
        key: value for key, value in run.shard.items() if key not in ("offload", "overlap_step")
    }
    return Run(**{**run.__dict__, "shard": shard, **changes})


class Wrapped:
    """A tier that tests look into, or change."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def pipeline(self, pipeline: Any) -> Any:
        """What is to take the place of the OffloadPipeline of this tier."""
        return pipeline


def tier_with(
    patch: pytest.MonkeyPatch, wrap: Callable[[Any], Any] = lambda tier: tier, **simulated: Any
) -> None:
    """Let every CpuStore made from now on have a tier of the CPU, simulated if asked; what
    `wrap` returns may be Wrapped.
    """
    tier_of, pipeline_of = _C.HostTier, _C.OffloadPipeline

    def make(device: torch.device, *arguments: Any, **named: Any) -> Any:
        return wrap(
            simulated_tier(*arguments, **named, **simulated)
            if simulated
            else tier_of(device, *arguments, **named)
        )

    def make_pipeline(tier: Any, places: int) -> Any:
        return (
            tier.pipeline(pipeline_of(tier._tier, places))
            if isinstance(tier, Wrapped)
            else pipeline_of(tier, places)
        )

    patch.setattr(_C, "HostTier", make)
    patch.setattr(_C, "OffloadPipeline", make_pipeline)


def small_chunks(patch: pytest.MonkeyPatch) -> None:
    """Let each bucket have several chunks, so that they are on their way at once."""
    patch.setattr(cpu_store, "CHUNK_NUMEL", 256)


class Watched(Wrapped):
    """A tier whose copies and waits are written down; `unwaited` events, of copies outside of
    steps, wait for nothing.
    """

    def __init__(
        self, tier: Any, log: list[str], leave_out: Callable[[str], bool] = lambda _: False
    ) -> None:
        super().__init__(tier)
        self._log, self._leave_out, self._count = log, leave_out, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tier, name)
        if name not in ("to_tier", "from_tier"):
            return method

        def copy(dst: torch.Tensor, src: torch.Tensor) -> Any:
            self._log.append(name)
            return self.event(method(dst, src), name)

        return copy

    def event(self, event: Any, which: str) -> Any:
        return WatchedEvent(event, which, self._log, self._leave_out)

    def pipeline(self, pipeline: Any) -> Any:
        return WatchedPipeline(pipeline, self, self._log)


class WatchedPipeline:
    """A pipeline whose events are written down when someone has waited for them."""

    def __init__(self, pipeline: Any, tier: Watched, log: list[str]) -> None:
        self._pipeline, self._tier, self._log, self._told = pipeline, tier, log, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def begin(self, *arguments: Any, arrivals: Any = (), **options: Any) -> None:
        arrivals = [
            event._event if isinstance(event, WatchedEvent) else event for event in arrivals
        ]
        self._pipeline.begin(*arguments, arrivals=arrivals, **options)
        self._told = 0

    def _tell(self) -> None:
        events = self._pipeline.events
        self._log += [what for what, *_ in events[self._told :]]
        self._told = len(events)

    def wait_fetched(self, count: int) -> None:
        self._pipeline.wait_fetched(count)
        self._tell()

    def wait_updated(self, first: int, last: int) -> Any:
        left = self._pipeline.wait_updated(first, last)
        self._tell()
        return None if left is None else self._tier.event(left, "from_tier")


class WatchedEvent:
    def __init__(
        self, event: Any, which: str, log: list[str], leave_out: Callable[[str], bool]
    ) -> None:
        self._event, self._which, self._log, self._leave_out = event, which, log, leave_out

    def _wait(self, how: str) -> None:
        call = f"{self._which}.{how}"
        self._log.append(call)
        if not self._leave_out(call):
            getattr(self._event, how)()

    def synchronize(self) -> None:
        self._wait("synchronize")

    def wait(self) -> None:
        self._wait("wait")

    def query(self) -> bool:
        return bool(self._event.query())


GRADS = CPU_TIER | {"gradients": "cpu"}
PARAMS = CPU_TIER | {"params": "cpu"}
TIERS: list[dict[str, Any]] = [CPU_TIER, GRADS, PARAMS, PARAMS | GRADS]
SPLITS = [
    tiers | {"ratio": ratio}
    for tiers in TIERS
    for ratio in (0, 0.37, 1)
    if ratio or "gradients" not in tiers
]


def fits(stage: int, offload: dict[str, Any]) -> bool:
    """Whether `shard` takes it."""
    return ("params" not in offload or stage == 3) and ("gradients" not in offload or stage > 0)


def partly_frozen() -> Any:
    torch.manual_seed(0)
    model = Net(depth=4)
    model.blocks[1].requires_grad_(False)
    return model


def hashes_of(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    """Of each training: weights and states after a step that was skipped, a clipping, edited
    weights and loaded states.
    """
    found = []
    for run in runs:
        model, optimizer, _ = train(rank, run)
        backward(model, optimizer, (torch.full((4, 10), torch.inf), torch.zeros(4, 5)))
        optimizer.step()
        assert optimizer.skipped_steps == 1
        optimizer.zero_grad()
        backward(model, optimizer, batch_of(8, 0, rank))
        shardcore.clip_grad_norm_(model, 0.1)
        optimizer.step()
        with shardcore.full_params(model), torch.no_grad():
            model.blocks[1].up.weight[3:20].mul_(1.5)
            model.gain.add_(0.25)
        # added to the gradients that the last step used
        backward(model, optimizer, batch_of(9, 0, rank))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        # float32 sums, where the last gradients may have been bfloat16 as they were
        with shardcore.no_sync(model):
            backward(model, optimizer, batch_of(10, 0, rank))
        backward(model, optimizer, batch_of(10, 1, rank))
        grad = shardcore.full_grad(model.blocks[0].down.weight)
        assert grad is not None
        optimizer.step()
        found.append(hash_of_training(model, optimizer) + hash_of([grad]))
    return found


def backward(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.scale_loss(loss_of(model, batch)).backward()
