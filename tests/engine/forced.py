"""Ranks of the CPU that take their process group for NCCL, or decide on steps as on a GPU, with norms as late as may be."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from shardcore.distributed.comm import Comm
from shardcore.engine import engine as engine_module
from shardcore.engine.device_step import Arrival, StepResult


@dataclass
class Waits:
    """How often the host waited for a norm."""

    count: int = 0


@contextmanager
def device_decides(late: bool | None = True, forced: bool = True) -> Iterator[Waits]:
    """Let models that are sharded inside decide on the device; forced=False: as they would.

    late: no norm is here before someone waits for it; False: each is at once; None: as it comes.
    """
    waits, wait = Waits(), Arrival.wait

    def counted(arrival: Arrival) -> StepResult:
        waits.count += 1
        return wait(arrival)

    with pytest.MonkeyPatch.context() as patch:
        if forced:
            decides = lambda device, tier, comm, lazy, capturable: tier == "device" and not lazy  # noqa: E731
            patch.setattr(engine_module, "decides_on_device", decides)
        patch.setattr(Arrival, "wait", counted)
        if late is not None:
            patch.setattr(Arrival, "here", property(lambda arrival: not late))
        yield waits


@contextmanager
def as_on_nccl() -> Iterator[pytest.MonkeyPatch]:
    """Let models that are sharded inside take their group for one of NCCL; yields a patch that ends with it."""
    init = Comm.__init__

    def as_on_gpus(comm: Comm, *given: Any) -> None:
        init(comm, *given)
        comm.uses_nccl = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "__init__", as_on_gpus)
        yield patch
