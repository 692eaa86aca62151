"""What `offload="auto"` chooses by: free memory and rates, measured on each rank within a
second, and what all ranks have.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardcore._native import _C
from shardcore.distributed.machine import free_bytes, machine_id
from shardcore.estimate.fit import Machine, Rates
from shardcore.offload.split_store import HEADROOM_PARTS
from shardcore.optim import CPUAdam

LINK_BYTES, ADAM_NUMEL = 256 << 20, 1 << 24  # at most: more than caches have
_FIRST = 1 << 20
_PART_S = 0.3  # for each of the three rates


def measure(device: torch.device) -> dict[str, Any]:
    """Return the figures of this rank, of plain values; `device` is a GPU (a CPU, in tests).

    Takes at most about a second. Waits for the device.
    """
    free, total = free_and_total(device)
    host = free_bytes()
    tier, most = _C.HostTier(device, True), min(LINK_BYTES, free // 8)

    def link(back: bool, count: int) -> Callable[[], object]:
        on_host = tier.empty(count, torch.uint8)
        on_device = torch.zeros(count, dtype=torch.uint8, device=device)
        if back:
            return lambda: tier.from_tier(on_device, on_host).synchronize()
        return lambda: tier.to_tier(on_host, on_device).synchronize()

    def adam(count: int) -> Callable[[], object]:
        param = torch.zeros(count, dtype=torch.float32, device="cpu", requires_grad=True)
        param.grad = torch.zeros_like(param)
        return CPUAdam([param]).step

    return {
        "place": machine_id(),
        "device": free,
        "headroom": total // HEADROOM_PARTS,
        "host": sys.maxsize if host is None else host,
        "to_host": _rate(partial(link, False), most),
        "from_host": _rate(partial(link, True), most),
        "adam": _rate(adam, ADAM_NUMEL),
    }


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Return the bytes that this process can still allocate on a device (torch's idle blocks
    included), and the device's total.
    """
    if device.type != "cuda":
        return (free_bytes() or sys.maxsize,) * 2
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def _rate(prepare: Callable[[int], Callable[[], object]], most: int) -> float:
    """Return how much `prepare(count)()` does in a second, of the largest count (at most `most`)
    that there is time for.

    The second run counts: the first one takes memory.
    """
    begun_s, count = time.perf_counter(), _FIRST
    while True:
        work = prepare(count)
        work()
        last_s = time.perf_counter()
        work()
        now_s = time.perf_counter()
        if 4 * count > most or 5 * (now_s - begun_s) > _PART_S:
            return count / (now_s - last_s)
        count *= 4


def agreed(figures: Sequence[Mapping[str, Any]]) -> tuple[Machine, Rates]:
    """Return what every rank has at least, of the figures of all ranks: the same on each of
    them.
    """

    def least(name: str) -> Any:
        return min(of_rank[name] for of_rank in figures)

    places = [of_rank["place"] for of_rank in figures]
    host = min(of_rank["host"] // places.count(of_rank["place"]) for of_rank in figures)
    headroom = max(of_rank["headroom"] for of_rank in figures)
    return Machine(least("device"), headroom, host, 0, 1), Rates(
        least("to_host"), least("from_host"), least("adam")
    )
