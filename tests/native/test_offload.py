"""HostTier, its copies and events, and OffloadPipeline."""

import gc
from typing import Any

import pytest
import torch

from shardcore._native import _C
from tests.support.copies import simulated_tier
from tests.support.kernels import make_hyper, nothing_written

CPU = torch.device("cpu")


def test_buffers_are_zero_and_counted_exactly():
    tier = _C.HostTier(CPU)
    a = tier.empty(1001, torch.float32)
    b = tier.empty(3, torch.bfloat16)
    assert (a.shape, a.dtype) == ((1001,), torch.float32)
    assert not a.any()
    assert tier.bytes_allocated == 4004 + 6
    del a
    gc.collect()
    assert tier.bytes_allocated == 6
    assert b.dtype == torch.bfloat16
    assert tier.empty(0, torch.float32).shape == (0,)
    assert tier.bytes_allocated == 6


def test_copies_move_and_count_exact_bytes():
    tier = _C.HostTier(CPU, pin_memory=True)
    buffer = tier.empty(300_000, torch.float32)
    x = torch.randn(300_000)
    tier.to_tier(buffer, x)
    tier.synchronize()
    assert torch.equal(buffer, x)
    assert (tier.bytes_to_tier, tier.bytes_from_tier) == (1_200_000, 0)
    back = torch.zeros(1000)
    tier.from_tier(back, buffer[500:1500]).synchronize()
    assert torch.equal(back, x[500:1500])
    assert (tier.bytes_to_tier, tier.bytes_from_tier) == (1_200_000, 4000)
    tier.from_tier(back[:0], buffer[:0])
    assert tier.bytes_from_tier == 4000


def test_a_copy_counts_as_a_write_for_autograd():
    """So that a backward through values that a copy replaced raises."""
    tier = _C.HostTier(torch.device("cpu"))
    buffer, there = tier.empty(4, torch.float32), torch.zeros(4)
    for copy, dst, src in ((tier.to_tier, buffer, there), (tier.from_tier, there, buffer)):
        versions = dst._version, src._version
        copy(dst, src)
        assert (dst._version, src._version) == (versions[0] + 1, versions[1])


@pytest.mark.more
def test_a_buffer_outlives_its_tier():
    tier = _C.HostTier(CPU)
    buffer = tier.empty(1000, torch.float64)
    del tier
    gc.collect()
    buffer.fill_(3.0)
    assert buffer.sum() == 3000


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda t, b: t.to_tier(torch.zeros(8), torch.ones(8)),
            r"HostTier.to_tier: dst has memory that this tier did not make; expected",
        ),
        (
            lambda t, b: t.from_tier(torch.zeros(8), torch.ones(8)),
            r"HostTier.from_tier: src has memory that this tier did not make",
        ),
        (
            lambda t, b: t.to_tier(b, torch.ones(7)),
            r"HostTier.to_tier: src has 7 elements; expected 8 \(as dst\)",
        ),
        (
            lambda t, b: t.to_tier(b[::2], torch.ones(4)),
            r"to_tier: dst has shape .* strides .*; expected a contiguous tensor",
        ),
        (
            lambda t, b: t.to_tier(b[:4], b[2:6]),
            r"to_tier: src has memory that dst has too; expected two distinct buffers",
        ),
        (
            lambda t, b: t.to_tier(b, torch.ones(8, device="meta")),
            r"to_tier: src has device meta; expected cpu",
        ),
        (
            lambda t, b: t.empty(-1, torch.float32),
            r"HostTier.empty: numel has -1; expected 0 or more",
        ),
        (
            lambda t, b: t.empty(2**62, torch.float32),
            r"HostTier.empty: numel has 4611686018427387904; expected at most",
        ),
        (
            lambda t, b: _C.HostTier(torch.device("meta")),
            r"HostTier: device has device meta; expected cpu or cuda",
        ),
    ],
)
def test_refusals(make, message):
    tier = _C.HostTier(CPU)
    buffer = tier.empty(8, torch.float32)
    with nothing_written(buffer), pytest.raises(ValueError, match=message):
        make(tier, buffer)
    assert (tier.bytes_to_tier, tier.bytes_from_tier, tier.bytes_allocated) == (0, 0, 32)


def test_type_refusals():
    tier = _C.HostTier(CPU)
    buffer = tier.empty(8, torch.float32)
    with pytest.raises(
        TypeError,
        match=r"to_tier: src has dtype Half; expected Float \(as dst: copies do not cast\)",
    ):
        tier.to_tier(buffer, torch.ones(8, dtype=torch.float16))


@pytest.mark.skipif(_C.build_info()["cuda"] != "", reason="this build has CUDA")
def test_cuda_without_a_cuda_build():
    with pytest.raises(
        ValueError,
        match=r"HostTier: device has device cuda; expected cpu \(this build has no CUDA: ",
    ):
        _C.HostTier(torch.device("cuda"))


def test_no_memory_is_a_memory_error():
    with pytest.raises(
        MemoryError, match=r"empty_huge: numel has \d+ bytes; expected what this machine can give"
    ):
        _C.empty_huge(2**55, torch.float32)
    with pytest.raises(MemoryError, match=r"HostTier.empty: numel has \d+ bytes"):
        _C.HostTier(CPU).empty(2**55, torch.float32)


def test_empty_huge():
    for numel, dtype in [
        (0, torch.float32),
        (1, torch.int8),
        (1000, torch.bfloat16),
        (3_000_000, torch.float32),
    ]:
        t = _C.empty_huge(numel, dtype)
        assert (t.shape, t.dtype) == ((numel,), dtype)
        assert not t.any()
        t.fill_(1)
    assert t.data_ptr() % (2 << 20) == 0  # large ones start where a huge page can
    with pytest.raises(ValueError, match="empty_huge: numel has -3; expected 0 or more"):
        _C.empty_huge(-3, torch.float32)


def late_tier(numel: int = 1000) -> tuple[_C.HostTier, torch.Tensor]:
    """A tier that makes a copy only when someone waits for it, and a buffer of it."""
    tier = simulated_tier(late=True)
    return tier, tier.empty(numel, torch.float32)


def test_an_event_is_about_its_own_copy():
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
    # takes the memory of a source that was freed
    others = [torch.full((100_000,), -1.0) for _ in range(20)]
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
        tier = simulated_tier(**options)
        buffer = tier.empty(10, torch.float32)
        tier.to_tier(buffer, torch.ones(10))
        del tier
        assert buffer.eq(1.0).all()


def test_a_failed_copy_surfaces_at_the_next_wait_with_its_origin():
    tier = simulated_tier(failing_copy=2)
    buffer, back = tier.empty(8, torch.float32), torch.zeros(8)
    tier.to_tier(buffer, torch.ones(8)).synchronize()
    event = tier.from_tier(back, buffer)
    message = (
        r"HostTier.from_tier: copy 1 of 32 bytes failed \(a planted fault\); no later copy "
        r"in this direction is made"
    )
    tier.drain()  # waits, and says nothing
    for wait in (
        event.synchronize,
        event.wait,
        event.query,
        tier.synchronize,
        lambda: tier.from_tier(back, buffer),
    ):
        with pytest.raises(RuntimeError, match=message):
            wait()
    assert not back.any()
    tier.to_tier(buffer, torch.zeros(8)).synchronize()  # the other direction


def test_another_backend_is_handed_over_in_a_capsule():
    with pytest.raises(
        ValueError, match="PyCapsule_GetPointer called with invalid PyCapsule object"
    ):
        _C.HostTier(torch.device("cpu"), backend="late")


KINDS = {"fp32": torch.float32, "bf16 with a master": torch.bfloat16}


class Case:
    """A tier, a chunk's arguments and what a step brings: two parameters of `numel` elements."""

    def __init__(self, kind: str = "fp32", numel: int = 512, tier: Any = None) -> None:
        self.tier = _C.HostTier(CPU) if tier is None else tier
        self.pipeline = _C.OffloadPipeline(self.tier, 3)
        dtype = KINDS[kind]
        # of which the last elements are meant
        self.grads = [torch.randn(10 + numel).to(dtype) for _ in range(2)]
        values = [torch.randn(numel) for _ in range(2)]
        self.chunk = {
            "params": list(self.tier.empty(2 * numel, dtype).split(numel)),
            "grads": list(self.tier.empty(2 * numel, dtype).split(numel)),
            "weights": [value.to(dtype) for value in values],
            "exp_avgs": [torch.rand(numel) for _ in range(2)],
            "exp_avg_sqs": [torch.rand(numel) for _ in range(2)],
            "hyper_index": [0, 0],
            "masters": None if kind == "fp32" else values,
            "max_exp_avg_sqs": None,
            "keys": [(0, 0), (1, 0)],
            "exp_avg_scales": None,
            "exp_avg_sq_scales": None,
            "grad_starts": [10, 10],
            "grads_come": True,
            "place": 0,
        }
        self.hypers = [make_hyper()]

    def step(self, num_threads: int) -> None:
        self.pipeline.begin(
            [self.pipeline.chunk(**self.chunk)], self.grads, self.hypers, num_threads
        )
        left = self.pipeline.wait_updated(0, 1)
        if left is not None:
            left.wait()
        self.pipeline.end()


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_through_places_has_the_same_bits_and_counts_its_copies(
    kind: str, num_threads: int
) -> None:
    case = Case(kind, 50_000)
    plain = {
        name: [t.clone() for t in case.chunk[name]]
        for name in ("exp_avgs", "exp_avg_sqs", "masters")
        if case.chunk[name]
    }
    plain["params"] = [weight.clone() for weight in case.chunk["weights"]]
    versions = [weight._version for weight in case.chunk["weights"]]
    _C.AdamStepper().step(
        **plain, grads=[grad[10:] for grad in case.grads], hypers=case.hypers, hyper_index=[0, 0]
    )
    case.step(num_threads)
    for name, values in plain.items():
        assert all(map(torch.equal, case.chunk["weights" if name == "params" else name], values)), (
            name
        )
    nbytes = sum(param.nbytes for param in case.chunk["params"])
    assert (case.tier.bytes_to_tier, case.tier.bytes_from_tier) == (
        nbytes * (2 if kind == "fp32" else 1),
        nbytes,
    )
    assert [weight._version for weight in case.chunk["weights"]] == [
        version + 1 for version in versions
    ]


def test_copies_in_flight_outlive_their_chunk() -> None:
    """A chunk that is freed waits for copies that are still on their way to its weights."""
    case = Case(tier=simulated_tier(gigabytes_per_second=1e-4))  # 40 ms each way
    chunk = case.pipeline.chunk(**case.chunk)
    case.pipeline.begin([chunk], case.grads, case.hypers)
    left = case.pipeline.wait_updated(0, 1)
    case.pipeline.end()
    assert not left.query()
    del chunk
    assert left.query()
