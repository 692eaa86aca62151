"""Ranks of the CPU that take their process group for NCCL, or decide on steps as on a GPU, with
norms as late as may be.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

import shardcore
from shardcore.distributed.comm import Comm
from shardcore.engine import engine as engine_module
from shardcore.engine.device_step import PendingResult, StepResult
from tests.support.models import Run, hash_of_training


@dataclass
class Waits:
    """How often the host waited for a norm."""

    count: int = 0


@contextmanager
def device_decides(late: bool | None = True, forced: bool = True) -> Iterator[Waits]:
    """Let models that are sharded inside decide on the device; forced=False: as they would.

    late: no norm is here before someone waits for it; False: each is at once; None: as it comes.
    """
    waits, wait = Waits(), PendingResult.result

    def counted(pending: PendingResult) -> StepResult:
        waits.count += 1
        return wait(pending)

    with pytest.MonkeyPatch.context() as patch:
        if forced:
            decides = lambda device, tier, comm, overlap, capturable: (  # noqa: E731
                tier == "device" and not overlap
            )
            patch.setattr(engine_module, "decides_on_device", decides)
        patch.setattr(PendingResult, "result", counted)
        if late is not None:
            patch.setattr(PendingResult, "done", property(lambda pending: not late))
        yield waits


@contextmanager
def as_on_nccl() -> Iterator[pytest.MonkeyPatch]:
    """Let models that are sharded inside take their group for one of NCCL; yields a patch that
    ends with it.
    """
    init = Comm.__init__

    def as_on_gpus(comm: Comm, *given: Any) -> None:
        init(comm, *given)
        comm.uses_nccl = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "__init__", as_on_gpus)
        yield patch


@contextmanager
def lines_logged() -> Iterator[list[str]]:
    """Collect what shardcore logs on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardcore").addHandler(handler)
    yield lines
    logging.getLogger("shardcore").removeHandler(handler)


# Overflows at the start, then halves, trains, doubles, overflows and trains again within a few
# steps.
LIVELY = shardcore.LossScale(initial_power=19, window=1, hysteresis=1)
PATIENT = shardcore.LossScale(initial_power=18, window=2, hysteresis=2)
RUNS = {
    "fp16": Run(
        precision="fp16",
        steps=7,
        shard={"loss_scale": LIVELY, "keep_fp32": [nn.LayerNorm], "clip_grad_norm": 0.5},
    ),
    "hysteresis": Run(precision="fp16", steps=9, shard={"loss_scale": PATIENT}),
    "fixed": Run(precision="fp16", steps=3, shard={"loss_scale": 1000.0, "clip_grad_norm": 0.5}),
    "fp32": Run(steps=3, shard={"clip_grad_norm": 0.3}),
    # The step's number keys random bits.
    "8bit": Run(
        precision="bf16",
        steps=3,
        adam={"lr": 1e-2, "state_dtype": "8bit", "stochastic_rounding": True},
    ),
}


def said_of(model: Any, optimizer: Any, whole: bool = True) -> tuple[Any, ...]:
    """All that a run leaves; whole: and on the way, that the device's loss scale is the one that
    the host shows.
    """
    state = optimizer.state_dict()  # first: it has to ask what became of the steps
    steps = [entry["step"].item() for entry in state["state"].values()]
    scaler = optimizer._engine.scaler
    if whole and scaler.live is not None:
        assert optimizer._engine.device_state.words[1:3].tolist() == [
            scaler.stable_steps,
            scaler.hysteresis_left,
        ]
        assert scaler.live.item() == scaler.scale
        assert scaler.live_unscale.item() == 1.0 / (
            optimizer._engine.comm.world_size * scaler.scale
        )
    said = (
        optimizer._engine.last_grad_norm,
        optimizer.skipped_steps,
        optimizer.loss_scale,
        str(state.get("loss_scale")),
    )
    return hash_of_training(model, optimizer), *said, str(steps)
