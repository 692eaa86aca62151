"""HostTier and empty_huge: exact bytes, counted copies, ownership, lifetime."""

import gc

import pytest
import torch

from shardcore._native import _C
from tests.native.helpers import nothing_written

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
        (lambda t, b: t.to_tier(b, torch.ones(7)), r"HostTier.to_tier: src has 7 elements; expected 8 \(as dst\)"),
        (lambda t, b: t.to_tier(b[::2], torch.ones(4)), r"to_tier: dst has shape .* strides .*; expected a contiguous tensor"),
        (lambda t, b: t.to_tier(b[:4], b[2:6]), r"to_tier: src has memory that dst has too; expected two distinct buffers"),
        (lambda t, b: t.to_tier(b, torch.ones(8, device="meta")), r"to_tier: src has device meta; expected cpu"),
        (lambda t, b: t.empty(-1, torch.float32), r"HostTier.empty: numel has -1; expected 0 or more"),
        (lambda t, b: t.empty(2**62, torch.float32), r"HostTier.empty: numel has 4611686018427387904; expected at most"),
        (lambda t, b: _C.HostTier(torch.device("meta")), r"HostTier: device has device meta; expected cpu or cuda"),
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
    with pytest.raises(TypeError, match=r"to_tier: src has dtype Half; expected Float \(as dst: copies do not cast\)"):
        tier.to_tier(buffer, torch.ones(8, dtype=torch.float16))


@pytest.mark.skipif(_C.build_info()["cuda"] != "", reason="this build has CUDA")
def test_cuda_without_a_cuda_build():
    with pytest.raises(ValueError, match=r"HostTier: device has device cuda; expected cpu \(this build has no CUDA: "):
        _C.HostTier(torch.device("cuda"))


def test_no_memory_is_a_memory_error():
    with pytest.raises(MemoryError, match=r"empty_huge: numel has \d+ bytes; expected what this machine can give"):
        _C.empty_huge(2**55, torch.float32)
    with pytest.raises(MemoryError, match=r"HostTier.empty: numel has \d+ bytes"):
        _C.HostTier(CPU).empty(2**55, torch.float32)


def test_empty_huge():
    for numel, dtype in [(0, torch.float32), (1, torch.int8), (1000, torch.bfloat16), (3_000_000, torch.float32)]:
        t = _C.empty_huge(numel, dtype)
        assert (t.shape, t.dtype) == ((numel,), dtype)
        assert not t.any()
        t.fill_(1)
    assert t.data_ptr() % (2 << 20) == 0  # large ones start where a huge page can
    with pytest.raises(ValueError, match="empty_huge: numel has -3; expected 0 or more"):
        _C.empty_huge(-3, torch.float32)
