"""AdamStepper.step with a DeviceStep on CPU tensors: wrong arguments are refused before anything is written."""

import math

import pytest
import torch

from shardcore._native import _C
from tests.native.helpers import Lists, bits, make_hyper, nothing_written


def lists():
    made = Lists()
    for i, numel in enumerate((300, 0, 7)):
        made.add(numel, torch.float32, torch.bfloat16, i == 0, i == 2, seed=i)
    return made


def counters(*values):
    return [torch.tensor(value) for value in values]


def number(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


@pytest.mark.parametrize("scaled", [False, True])
def test_one_step_is_the_step_with_the_hosts_numbers(scaled):
    got, want = lists(), lists()
    counts, skipped = counters(4, 4, 2**24), torch.tensor(0)
    scale = {"grad_scale": number(0.75, torch.float64), "loss_scale": number(8.0), "max_norm": 0.3} if scaled else {}
    factor = 1.0
    if scaled:
        factor = _C.clipped_scale(0.75 / 8.0, _C.norm_from_sq(_C.sq_norm(want.grads)), 0.3)
    hypers = [make_hyper(lr=number(0.05, torch.float64), step=1, grad_scale=7.0), make_hyper(lr=0.2, beta1=0.5)]
    got.step(hypers, [0, 0, 1], device_step=_C.DeviceStep(counts, skipped, **scale))
    same = {"grad_scale": factor}
    want.step([make_hyper(step=5, **same), make_hyper(lr=0.2, beta1=0.5, step=2**24 + 1, **same)], [0, 0, 1])
    assert bits(got) == bits(want)
    assert [count.item() for count in counts] == [5, 5, 2**24 + 1]
    assert skipped.item() == 0


def test_a_skipped_step_only_counts():
    made, counts, skipped = lists(), counters(4, 4, 4), torch.tensor(2)
    with nothing_written(*counts):
        before = bits(made)
        made.step([make_hyper()], device_step=_C.DeviceStep(counts, skipped, found_inf=number(1.0)))
        made.grads[2][3] = math.inf
        made.step([make_hyper()], device_step=_C.DeviceStep(counts, skipped, max_norm=1.0))
        made.grads[2][3] = lists().grads[2][3]
        assert bits(made) == before
    assert skipped.item() == 4


ONE = torch.tensor(1)
BAD_PARTS = [
    (lambda: ([1, 2, 3], ONE), {}, TypeError, "DeviceStep: counts[0] has type int; expected a tensor"),
    (lambda: (counters(1, 1, 1), 0), {}, TypeError, "DeviceStep: skipped has type int; expected a tensor"),
    (lambda: (counters(1, 1, 1), ONE), {"max_norm": -1.0}, ValueError, "DeviceStep: max_norm has -1; expected a number of at"),
    (lambda: (counters(1, 1, 1), ONE), {"max_norm": math.nan}, ValueError, "DeviceStep: max_norm has nan; expected a number"),
    (
        lambda: (counters(1, 1, 1), ONE),
        {"grad_scale": "1"},
        TypeError,
        "DeviceStep: grad_scale has type str; expected a number",
    ),
    (
        lambda: (counters(1, 1, 1), ONE),
        {"found_inf": ONE},
        TypeError,
        "DeviceStep: found_inf has dtype Long; expected Float or",
    ),
    (lambda: (counters(1, 1, 1), ONE), {"loss_scale": torch.ones(2)}, ValueError, "DeviceStep: loss_scale has 2 elements"),
]
BAD_STEPS = [
    (
        lambda: (counters(1, 1), ONE),
        {},
        ValueError,
        "AdamStepper.step: device_step.counts has 2 items; expected 3 (one for each",
    ),
    (
        lambda: ([torch.ones(1)] * 3, ONE),
        {},
        TypeError,
        "AdamStepper.step: device_step.counts[0] has dtype Float; expected Long",
    ),
    (
        lambda: ([torch.ones(2).long()] * 3, ONE),
        {},
        ValueError,
        "device_step.counts[0] has 2 elements; expected 1 (as a counter)",
    ),
    (lambda: (counters(1, 1, 1), torch.ones(())), {}, TypeError, "device_step.skipped has dtype Float; expected Long"),
    (lambda: ([ONE.clone()] * 3, ONE), {}, ValueError, "device_step.counts[1] has memory that device_step.counts[0] has too"),
    (
        lambda: (c := counters(1, 1, 1), c[2]),
        {},
        ValueError,
        "device_step.skipped has memory that device_step.counts[2] has too",
    ),
    (
        lambda: (counters(1, 1, 1), ONE),
        {"grad_scale": torch.ones((), device="meta")},
        ValueError,
        "device_step.grad_scale has device meta; expected cpu",
    ),
]


@pytest.mark.parametrize("parts, more, error, message", BAD_PARTS + BAD_STEPS, ids=[m[:60] for *_, m in BAD_PARTS + BAD_STEPS])
def test_wrong_arguments_are_refused(parts, more, error, message):
    made = lists()
    counts, skipped = parts()
    tensors = [t for t in [*counts, skipped] if isinstance(t, torch.Tensor)]
    with nothing_written(*made.all(), *tensors), pytest.raises(error) as raised:
        made.step([make_hyper()], device_step=_C.DeviceStep(counts, skipped, **more))
    assert message in str(raised.value)


def test_the_rest_of_a_call_is_checked_as_always():
    made = lists()
    good = _C.DeviceStep(counters(1, 1, 1), torch.tensor(0))
    for hypers, device_step, error, message in [
        ([make_hyper()], "yes", TypeError, "AdamStepper.step: device_step has type str; expected DeviceStep or None"),
        (
            [make_hyper(lr=number(0.1))],
            None,
            ValueError,
            "hypers[0] has a tensor as lr; expected a number (without device_step)",
        ),
        ([make_hyper(lr=torch.ones((), device="meta"))], good, ValueError, "hypers.lr[0] has device meta; expected cpu"),
    ]:
        with nothing_written(*made.all()), pytest.raises(error) as raised:
            made.step(hypers, device_step=device_step)
        assert message in str(raised.value)
    inside = made.params[0].view(torch.int64)[0]
    with pytest.raises(ValueError, match=r"counts\[2\] has memory that params\[0\] has too"):
        made.step([make_hyper()], device_step=_C.DeviceStep([*counters(1, 1), inside], torch.tensor(0)))
    with pytest.raises(TypeError, match="lr has dtype BFloat16"):
        make_hyper(lr=torch.ones((), dtype=torch.bfloat16))


def test_a_stepper_looks_again_when_counters_move():
    made, stepper = lists(), _C.AdamStepper()
    counts, skipped = counters(1, 1, 1), torch.tensor(0)

    def step(counts, skipped):
        stepper.step(
            made.params, made.grads, made.exp_avgs, made.exp_avg_sqs, [make_hyper()], [0] * 3, masters=made.masters,
            max_exp_avg_sqs=made.max_exp_avg_sqs, device_step=_C.DeviceStep(counts, skipped),
        )  # fmt: skip

    inside = made.params[0].view(torch.int64)[0]
    for bad in ((counts, inside), (counts, counts[1]), ([*counts[:2], inside], skipped)):
        step(counts, skipped)
        with nothing_written(*made.all(), *counts, skipped), pytest.raises(ValueError, match="has too; expected memory"):
            step(*bad)
    step(counts, skipped)
