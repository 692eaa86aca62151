"""HostTier and empty_huge: exact bytes, counted copies, ownership, lifetime."""

import gc
from typing import Any

import pytest
import torch

from shardcore._native import _C
from tests.native.helpers import make_hyper, nothing_written

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
    with pytest.raises(TypeError, match=r"from_tier: dst has type list; expected a tensor"):
        tier.from_tier([1.0], buffer)


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


def passing(kind: str = "fp32", numel: int = 100_000) -> tuple[Any, dict[str, Any]]:
    """A tier, and arguments of a step whose gradients and weights pass through places in it."""
    tier = _C.HostTier(CPU)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    homes = {"grad_homes": [torch.randn(numel).to(dtype)], "param_homes": [torch.randn(numel).to(dtype)]}
    places = {name: [tier.empty(numel, dtype)] for name in ("params", "grads")}
    lists = {name: [torch.rand(numel)] for name in ("exp_avgs", "exp_avg_sqs")}
    if kind != "fp32":
        lists["masters"] = [homes["param_homes"][0].float()]
    return tier, places | lists | homes | {"tier": tier, "hypers": [make_hyper()], "hyper_index": [0]}


@pytest.mark.parametrize("kind", ["fp32", "bf16 with a master"])
def test_a_step_through_places_has_the_same_bits_and_counts_its_copies(kind: str) -> None:
    tier, step = passing(kind)
    plain = {name: [t.clone() for t in step[name]] for name in ("exp_avgs", "exp_avg_sqs", "masters") if name in step}
    plain["params"], plain["grads"] = [[t.clone() for t in step[name]] for name in ("param_homes", "grad_homes")]
    version = step["param_homes"][0]._version
    _C.AdamStepper().step(**plain, hypers=step["hypers"], hyper_index=[0])
    _C.AdamStepper().step(**step)
    for name, values in plain.items():
        assert torch.equal(step[{"params": "param_homes", "grads": "grad_homes"}.get(name, name)][0], values[0]), name
    nbytes = step["params"][0].nbytes
    assert (tier.bytes_to_tier, tier.bytes_from_tier) == (nbytes * (2 if kind == "fp32" else 1), nbytes)
    assert step["param_homes"][0]._version == version + 1


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda s: {"tier": 3}, TypeError, "tier has type int; expected HostTier or None"),
    (
        lambda s: {"tier": _C.HostTier(CPU, late=True)},
        ValueError,
        "tier has caller_copies False; expected a tier for the CPU that simulates nothing",
    ),
    (lambda s: {"tier": _C.HostTier(CPU)}, ValueError, r"grads\[0\] has memory that this tier did not make; expected"),
    (lambda s: {"params": [torch.zeros(1000)]}, ValueError, r"params\[0\] has memory that this tier did not make; expected"),
    (lambda s: {"grad_homes": []}, ValueError, r"grad_homes has 0 items; expected 1 \(one for each of params\)"),
    (lambda s: {"grad_homes": s["grads"]}, ValueError, r"grad_homes\[0\] has memory that grads has too; expected two"),
    (
        lambda s: {"param_homes": [torch.zeros(1000).half()]},
        TypeError,
        r"params\[0\] has dtype Float; expected Half \(as param_homes: copies do not cast\)",
    ),
    (lambda s: {"param_homes": [torch.zeros(999)]}, ValueError, r"params\[0\] has 1000 elements; expected 999 "),
    (lambda s: {"tier": None}, ValueError, "grad_homes has a value; expected None without tier"),
    (lambda s: {"tier": None, "grad_homes": None}, ValueError, "param_homes has a value; expected None without tier"),
    (
        lambda s: {name: [] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "hyper_index")},
        ValueError,
        r"grad_homes has 1 items; expected 0 \(one for each of params\)",
    ),
])  # fmt: skip
def test_bad_places_and_homes_are_refused(change: Any, error: type[Exception], message: str) -> None:
    tier, step = passing(numel=1000)
    before = [step[name][0].clone() for name in ("exp_avgs", "param_homes")]
    with pytest.raises(error, match="AdamStepper.step: " + message):
        _C.AdamStepper().step(**step | change(step))
    assert all(map(torch.equal, before, [step[name][0] for name in ("exp_avgs", "param_homes")]))
    assert tier.bytes_to_tier == tier.bytes_from_tier == 0


# Two segments a step: whose memory another argument has.
SHARED = {
    "one home for two": ("param_homes", 1, "param_homes", 0),
    "a state is a home": ("param_homes", 0, "exp_avgs", 1),
    "a home is another's place": ("param_homes", 0, "params", 1),
    "weights and gradients have one home": ("param_homes", 1, "grad_homes", 0),
    "a gradient's home is a state": ("grad_homes", 1, "exp_avg_sqs", 0),
    "one place for two gradients": ("grads", 1, "grads", 0),
}


def passing_two() -> tuple[Any, dict[str, Any]]:
    """The same with two parameters."""
    tier, step = passing(numel=1024)
    halves = {name: [step[name][0][:512], step[name][0][512:]] for name in step.keys() - {"tier", "hypers", "hyper_index"}}
    return tier, step | halves | {"hyper_index": [0, 0]}


@pytest.mark.parametrize("which", SHARED)
def test_memory_that_a_step_through_places_writes_is_nobody_else_s(which: str) -> None:
    name, index, other, its_index = SHARED[which]
    tier, step = passing_two()
    stepper = _C.AdamStepper()
    stepper.step(**step)  # what was found good then does not stand for other homes
    moved = tier.bytes_to_tier, tier.bytes_from_tier
    written = [*step["param_homes"], *step["exp_avgs"], *step["exp_avg_sqs"]]
    step[name] = [step[other][its_index] if i == index else home for i, home in enumerate(step[name])]
    with nothing_written(*written), pytest.raises(ValueError) as raised:
        stepper.step(**step)
    pair = f"{name}[{index}]", f"{other}[{its_index}]"
    assert any(f"{a} has memory that {b} has too; expected" in str(raised.value) for a, b in (pair, pair[::-1]))
    assert (tier.bytes_to_tier, tier.bytes_from_tier) == moved


def test_a_refused_step_counts_no_write_of_the_homes_before_the_bad_one() -> None:
    _, step = passing_two()
    first, second = step["param_homes"]
    with nothing_written(first), pytest.raises(TypeError, match=r"params\[1\] has dtype Float; expected Half"):
        _C.AdamStepper().step(**step | {"param_homes": [first, second.half()]})
