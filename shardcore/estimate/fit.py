"""The choice of offload that fits a machine and takes the fewest milliseconds, for
`offload="auto"`.

A step's milliseconds are those of its messages, of its copies between device and host memory and of
Adam on the CPU, one after the other. This is an upper bound: forward and backward hide a part of it
that depends on the number of tokens. Adam on the device counts as nothing. If the CPU has states,
the device keeps the greatest share of them that fits. Files are the last choice, whatever their
time.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcore.estimate.predict import Prediction
from shardcore.offload.split_store import STEPS_OF_ONE

_CPU, _NVME = {"optimizer": "cpu"}, {"optimizer": "nvme", "path": "DIR"}
_GRADIENTS, _PARAMS = {"gradients": "cpu"}, {"params": "cpu"}
TIME = "transfers and Adam, ms"  # the title of a column, which says that compute is not in it

Predict = Callable[[int, Mapping[str, Any] | None], Prediction]  # of a stage and an offload


@dataclass(frozen=True)
class Machine:
    """Bytes: of a rank's device, of which `activations` are left for these; of host memory and
    disk that `ranks` share.
    """

    device: int
    activations: int
    host: int
    disk: int
    ranks: int


@dataclass(frozen=True)
class Rates:
    """Per second and rank: bytes from the device to host memory and back, elements of Adam on
    the CPU, bytes sent to ranks.
    """

    to_host: float
    from_host: float
    adam: float
    network: float = math.inf

    def milliseconds(self, prediction: Prediction) -> float:
        """Return the time of those parts of a step that depend on the placement."""
        copies = prediction.copies
        of_host = (
            copies.to_host / self.to_host
            + copies.from_host / self.from_host
            + copies.updated / self.adam
        )
        return 1e3 * (of_host + prediction.sent_bytes / self.network)


@dataclass(frozen=True)
class Candidate:
    """Arguments of shard, their prediction, and the reason why they do not fit ("": they do).

    ratio: the least share of states on the CPU that fits; 1.0 if none does, or if states are in
    files or on the device.
    measures: host memory has room for all states at first, so that the ratio may be "auto".
    """

    stage: int
    offload: Mapping[str, str] | None
    ratio: float
    measures: bool
    prediction: Prediction
    milliseconds: float
    lacks: str

    @property
    def on_disk(self) -> bool:
        """Whether it uses a disk."""
        return self.offload is not None and self.offload["optimizer"] == "nvme"

    @property
    def named_offload(self) -> str:
        """The tiers in words."""
        offload = self.offload or {}
        words = " + ".join(f"{key} {tier}" for key, tier in offload.items() if key != "path")
        return words or "none"

    @property
    def argument(self) -> dict[str, Any] | None:
        """The `offload` of shard."""
        if self.offload is None or self.on_disk:
            return None if self.offload is None else dict(self.offload)
        return {**self.offload, "ratio": "auto" if self.measures else self.ratio}


def candidates(
    world_size: int, stage: int | None
) -> Iterator[tuple[int, Mapping[str, str] | None]]:
    """Yield stages and offloads of a stage, None: of 2 and 3. One rank shards nothing, so there
    2 is like 3.
    """
    stages = [2, 3] if world_size > 1 else [2]
    if stage is not None:
        stages = [stage]
    for offload in (None, _CPU, _CPU | _GRADIENTS):
        for allowed in stages:
            if allowed > 0 or "gradients" not in (offload or {}):
                yield allowed, offload
    if stage in (None, 3):
        yield 3, _CPU | _GRADIENTS | _PARAMS
    yield stages[-1], _NVME
    if stages[-1] > 0:
        yield stages[-1], _NVME | _GRADIENTS
    if stage in (None, 3):
        yield 3, _NVME | _GRADIENTS | _PARAMS
        yield 3, _NVME | _GRADIENTS | {"params": "nvme"}


def fit(
    machine: Machine,
    rates: Rates,
    world_size: int,
    predict: Predict,
    stage: int | None = None,
    host_gradients: bool = True,
) -> list[Candidate]:
    """Return all candidates, in order. stage: the only one, None for 2 and 3; see `chosen_of`.

    host_gradients: whether the optimizer takes gradients in host memory.
    """
    considered: list[Candidate] = []
    for of_stage, offload in candidates(world_size, stage):
        in_files = offload is not None and offload["optimizer"] == "nvme"
        if in_files and (not machine.disk or chosen_of(considered) is not None):
            break
        fits_on_device = any(
            candidate.offload is None and candidate.stage <= of_stage and not candidate.lacks
            for candidate in considered
        )
        if fits_on_device:
            continue  # this one moves more
        if not host_gradients and "gradients" in (offload or {}):
            continue
        ratio, measures = 1.0, False
        if offload is None or in_files:
            prediction = predict(of_stage, offload)
        else:
            ratio, measures, prediction = _least_ratio(machine, predict, of_stage, offload)
        lacks = _shortage_of(machine, prediction)
        ms = rates.milliseconds(prediction)
        considered.append(Candidate(of_stage, offload, ratio, measures, prediction, ms, lacks))
    return considered


def chosen_of(considered: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest candidate that fits, the earlier one of equals; None if nothing fits."""
    fitting = [candidate for candidate in considered if not candidate.lacks]
    return min(fitting, key=lambda candidate: candidate.milliseconds, default=None)


def _least_ratio(
    machine: Machine, predict: Predict, stage: int, offload: Mapping[str, str]
) -> tuple[float, bool, Prediction]:
    """Return the least share on the CPU that the device's memory allows (else 1), whether 1 fits,
    and the prediction for it.

    The bytes are nearly linear in the share, so that few predictions find it. (Shares of 0 put no
    gradients in host memory.)
    """

    def predicted(steps: int) -> Prediction:
        return predict(stage, {**offload, "ratio": steps / STEPS_OF_ONE})

    prediction = predicted(STEPS_OF_ONE)
    fits = not _shortage_of(machine, prediction)
    low = _on_device(machine, prediction)
    high = _on_device(machine, predicted(1))
    if low > machine.device or low >= high:
        return 1.0, fits, prediction
    steps = max(1, int((high - machine.device) / (high - low) * STEPS_OF_ONE))
    while _on_device(machine, prediction := predicted(steps)) > machine.device:
        steps += 1
    return steps / STEPS_OF_ONE, fits, prediction


def _on_device(machine: Machine, prediction: Prediction) -> int:
    return prediction.resting.by_tier.get("device", 0) + machine.activations


def _shortage_of(machine: Machine, prediction: Prediction) -> str:
    host_bytes = prediction.resting.by_tier.get("cpu", 0)
    disk_bytes = 0 if prediction.disk is None else prediction.disk.space
    needs = {
        "device": (_on_device(machine, prediction), machine.device),
        "host": (host_bytes * machine.ranks, machine.host),
        "disk": (disk_bytes * machine.ranks, machine.disk),
    }
    over = [
        f"{name} {needed / 2**30:.1f} of {available / 2**30:.1f} GiB"
        for name, (needed, available) in needs.items()
        if needed > available
    ]
    return ", ".join(over)


def table(considered: Sequence[Candidate]) -> str:
    """Return the candidates as a table, in GiB of one rank and milliseconds per step."""
    chosen = chosen_of(considered)
    rows = [["stage", "offload", "ratio", "GiB on device", "on cpu", "on nvme", TIME, "fits"]]
    for candidate in considered:
        tiers, disk = candidate.prediction.resting.by_tier, candidate.prediction.disk
        sizes = [tiers.get("device", 0), tiers.get("cpu", 0), 0 if disk is None else disk.space]
        ratio = "-" if candidate.offload is None else f"{candidate.ratio:.2f}"
        spent = f"{candidate.milliseconds:.0f}" + " and the disk" * candidate.on_disk
        fits = candidate.lacks or ("yes, chosen" if candidate is chosen else "yes")
        gib = [f"{size / 2**30:.2f}" for size in sizes]
        rows.append([str(candidate.stage), candidate.named_offload, ratio, *gib, spent, fits])
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align all columns to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def call_of(candidate: Candidate, options: Mapping[str, Any]) -> str:
    """Return the call of shard for a candidate."""
    arguments = {"stage": candidate.stage, **options}
    if candidate.offload is not None:
        arguments |= {"offload": candidate.argument, "overlap_step": True}
    words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"shardcore.shard(model, optimizer, {words})"
