"""Copies of a HostTier: events, what they keep alive, simulated links, and what is pinned."""

import mmap
from typing import Any

import pytest
import torch

from shardcore._native import _C

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE


def late_tier(numel: int = 1000, **options: Any) -> tuple[_C.HostTier, torch.Tensor]:
    """A tier that makes a copy only when someone waits for it, and a buffer of it."""
    tier = _C.HostTier(CPU, late=True, **options)
    return tier, tier.empty(numel, torch.float32)


def test_an_event_tells_of_its_own_copy():
    tier, buffer = late_tier()
    first = tier.to_tier(buffer[:10], torch.full((10,), 1.0))
    second = tier.to_tier(buffer[10:20], torch.full((10,), 2.0))
    back = torch.zeros(10)
    assert not first.query()
    assert not second.query()
    assert tier.bytes_to_tier == 80  # counted when queued
    first.synchronize()
    assert first.query()
    assert not second.query()
    assert buffer[:20].tolist() == [1.0] * 10 + [0.0] * 10
    second.wait()
    assert second.query()
    tier.from_tier(back, buffer[10:20]).synchronize()
    assert back.tolist() == [2.0] * 10
    assert tier.to_tier(buffer[:0], back[:0]).query()  # nothing to do


def test_synchronize_waits_for_both_directions():
    tier, buffer = late_tier()
    back = torch.zeros(5)
    tier.to_tier(buffer[:5], torch.ones(5))
    tier.from_tier(back, buffer[5:10])
    tier.synchronize()
    assert (buffer[:5].sum(), back.sum()) == (5.0, 0.0)


def test_tensors_of_a_copy_in_flight_are_kept_alive():
    tier, buffer = late_tier(100_000)
    event = tier.to_tier(buffer, torch.full((100_000,), 7.0))
    others = [torch.full((100_000,), -1.0) for _ in range(20)]  # takes the memory of a source that was freed
    event.synchronize()
    assert buffer.eq(7.0).all()
    del others
    back = tier.from_tier(torch.zeros(100_000), buffer)
    del buffer
    assert tier.bytes_allocated == 400_000
    back.synchronize()
    assert tier.bytes_allocated == 0


def test_an_event_outlives_its_tier_and_its_tensors():
    tier, buffer = late_tier()
    target = torch.zeros(1000)
    event = tier.to_tier(buffer, torch.ones(1000))
    later = tier.from_tier(target, buffer)
    del tier
    event.synchronize()
    assert buffer.eq(1.0).all()
    del buffer
    later.synchronize()
    assert target.eq(1.0).all()


def test_the_end_of_a_tier_makes_what_is_in_flight():
    for options in ({"late": True}, {"gigabytes_per_second": 1e-15}):
        tier = _C.HostTier(CPU, **options)
        buffer = tier.empty(10, torch.float32)
        tier.to_tier(buffer, torch.ones(10))
        del tier
        assert buffer.eq(1.0).all()


def test_a_failed_copy_surfaces_at_the_next_wait_with_its_origin():
    tier = _C.HostTier(CPU, failing_copy=2)
    buffer, back = tier.empty(8, torch.float32), torch.zeros(8)
    tier.to_tier(buffer, torch.ones(8)).synchronize()
    event = tier.from_tier(back, buffer)
    message = r"HostTier.from_tier: copy 1 of 32 bytes failed \(a planted fault\); no later copy in this direction is made"
    tier.drain()  # waits, and says nothing
    for wait in (event.synchronize, event.wait, event.query, tier.synchronize, lambda: tier.from_tier(back, buffer)):
        with pytest.raises(RuntimeError, match=message):
            wait()
    assert not back.any()
    tier.to_tier(buffer, torch.zeros(8)).synchronize()  # the other direction


def test_pinned_bytes_are_whole_pages_and_stay_below_the_limit():
    tier = _C.HostTier(CPU, True, 8 * PAGE, pinnable_bytes=100 * PAGE)
    first = tier.empty(5 * PAGE + 1, torch.uint8)
    assert (tier.bytes_pinned, tier.bytes_allocated) == (6 * PAGE, 5 * PAGE + 1)
    tier.empty(PAGE, torch.uint8, pinned=False)
    second = tier.empty(3 * PAGE, torch.uint8)
    assert (tier.bytes_pinned, tier.bytes_refused) == (6 * PAGE, 3 * PAGE)
    assert tier.pin_refusal == f"pin_memory_limit is {8 * PAGE} bytes, of which {6 * PAGE} are pinned"
    tier.to_tier(second, torch.ones(3 * PAGE, dtype=torch.uint8)).synchronize()
    assert second.all()
    del first, second
    assert (tier.bytes_pinned, tier.bytes_refused) == (0, 0)


def test_a_system_that_refuses_to_pin_gives_pageable_memory():
    tier = _C.HostTier(CPU, True, pinnable_bytes=PAGE)
    buffer = tier.empty(PAGE, torch.float32)
    assert (tier.bytes_pinned, tier.bytes_refused) == (0, 4 * PAGE)
    assert tier.pin_refusal == "the simulated system locks no more pages"
    tier.to_tier(buffer, torch.ones(PAGE)).synchronize()
    assert buffer.all()
    unpinned = _C.HostTier(CPU, False, pinnable_bytes=PAGE)
    unpinned.empty(8 * PAGE, torch.uint8)
    assert (unpinned.bytes_refused, unpinned.pin_refusal) == (0, "")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pin_memory_limit": -1}, ValueError, "pin_memory_limit has -1; expected 0 or more, or None"),
        ({"pin_memory_limit": 1.5}, TypeError, "pin_memory_limit has type float; expected an int"),
        ({"gigabytes_per_second": 0}, ValueError, "gigabytes_per_second has 0; expected a number above 0, or None"),
        ({"gigabytes_per_second": float("nan")}, ValueError, "gigabytes_per_second has nan; expected a number above 0"),
        ({"failing_copy": "2"}, TypeError, "failing_copy has type str; expected an int"),
        ({"late": 1}, TypeError, "late has type int; expected a bool"),
        ({"pinnable_bytes": -5}, ValueError, "pinnable_bytes has -5; expected 0 or more"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        _C.HostTier(CPU, True, **options)
