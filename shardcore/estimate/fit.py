"""Which stage and offload fit a machine: the first, in the order of the bytes that a step moves, whose memory is there.

Nothing offloaded moves least, then states in host memory, then gradients and weights, too; then states on NVMe, and last
weights. A lower stage sends less between ranks. How long a step takes is not predicted: links, cores and tokens decide that.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardcore.estimate.predict import Prediction

_CPU, _NVME = {"optimizer": "cpu"}, {"optimizer": "nvme", "path": "DIR"}
_GRADIENTS, _PARAMS = {"gradients": "cpu"}, {"params": "cpu"}


@dataclass(frozen=True)
class Machine:
    """Bytes: of a rank's device, of which `activations` are left for these; of host memory and disk that `ranks` share."""

    device: int
    activations: int
    host: int
    disk: int
    ranks: int


@dataclass(frozen=True)
class Candidate:
    """Arguments of shard, what they take, and why that does not fit ("": it does)."""

    stage: int
    offload: Mapping[str, str] | None
    prediction: Prediction
    lacks: str


def candidates(world_size: int) -> Iterator[tuple[int, Mapping[str, str] | None]]:
    """Yield stages and offloads, those that move least first. One rank shards nothing, so there stages 2 and 3 are equal."""
    for offload in (None, _CPU, _CPU | _GRADIENTS):
        yield 2, offload
        if world_size > 1:
            yield 3, offload
    yield 3, _CPU | _GRADIENTS | _PARAMS
    for offload in (_NVME, _NVME | _GRADIENTS):
        yield (3 if world_size > 1 else 2), offload
    yield 3, _NVME | _GRADIENTS | _PARAMS
    yield 3, _NVME | _GRADIENTS | {"params": "nvme"}


def fit(machine: Machine, world_size: int, predict: Callable[[int, Mapping[str, str] | None], Prediction]) -> list[Candidate]:
    """Return what was considered, in order; the last one fits, if any does. predict: of a stage and an offload."""
    found = []
    for stage, offload in candidates(world_size):
        if offload is not None and offload["optimizer"] == "nvme" and not machine.disk:
            break
        prediction = predict(stage, offload)
        lacks = _lacks(machine, prediction)
        found.append(Candidate(stage, offload, prediction, lacks))
        if not lacks:
            break
    return found


def _lacks(machine: Machine, prediction: Prediction) -> str:
    tiers = prediction.resting.by_tier
    wanted = {
        "device": (tiers.get("device", 0) + machine.activations, machine.device),
        "host": (tiers.get("cpu", 0) * machine.ranks, machine.host),
        "disk": (0 if prediction.disk is None else prediction.disk.space * machine.ranks, machine.disk),
    }
    over = [f"{name} {need / 2**30:.1f} of {there / 2**30:.1f} GiB" for name, (need, there) in wanted.items() if need > there]
    return ", ".join(over)


def call_of(candidate: Candidate, options: Mapping[str, Any]) -> str:
    """Return how shard is called for it."""
    given = {"stage": candidate.stage, **options}
    if candidate.offload is not None:
        given |= {"offload": dict(candidate.offload), "overlap_step": True}
    return f"shardcore.shard(model, optimizer, {', '.join(f'{name}={value!r}' for name, value in given.items())})"
