"""Arguments that share memory which the call writes are refused, and those that may share are not."""

import pytest
import torch

from shardcore._native import _C
from tests.native.helpers import make_hyper, nothing_written

BUFFER = torch.ones(64)


def step_on(**changes):
    lists = {key: [torch.ones(8)] for key in ("params", "grads", "exp_avgs", "exp_avg_sqs")} | changes
    count = len(lists["params"])
    for key in ("grads", "exp_avgs", "exp_avg_sqs"):
        lists[key] = lists[key] + [torch.ones(8) for _ in range(count - len(lists[key]))]
    _C.AdamStepper().step(**lists, hypers=[make_hyper()], hyper_index=[0] * count)


SHARED = [
    ({"exp_avgs": [BUFFER[:8]], "exp_avg_sqs": [BUFFER[:8]]}, "exp_avg_sqs[0]", "exp_avgs[0]"),
    ({"params": [BUFFER[:8]], "exp_avgs": [BUFFER[1:9]]}, "exp_avgs[0]", "params[0]"),
    ({"params": [BUFFER[:8]], "grads": [BUFFER[7:15]]}, "grads[0]", "params[0]"),
    ({"params": [BUFFER[:8]], "grads": [BUFFER[:8]]}, "grads[0]", "params[0]"),
    ({"params": [BUFFER[20:28], BUFFER[:8], BUFFER[7:15]]}, "params[2]", "params[1]"),
    ({"params": [torch.ones(8), BUFFER[:8]], "masters": [BUFFER[:8], None]}, "masters[0]", "params[1]"),
    ({"params": [BUFFER[:8]], "masters": [BUFFER[4:12]]}, "masters[0]", "params[0]"),
    ({"params": [BUFFER[7:15]], "masters": [BUFFER[:8]]}, "masters[0]", "params[0]"),
    ({"params": [BUFFER.view(torch.bfloat16)[:8]], "masters": [BUFFER[:8]]}, "masters[0]", "params[0]"),
    ({"max_exp_avg_sqs": [BUFFER[:8]], "exp_avg_sqs": [BUFFER[:8]]}, "max_exp_avg_sqs[0]", "exp_avg_sqs[0]"),
    (
        {
            "params": [BUFFER[:8]],
            "exp_avgs": [torch.zeros(8, dtype=torch.int8)],
            "exp_avg_sqs": [torch.zeros(8, dtype=torch.uint8)],
            "exp_avg_scales": [torch.ones(1)],
            "exp_avg_sq_scales": [BUFFER[7:8]],
            "keys": [(0, 0)],
        },
        "exp_avg_sq_scales[0]",
        "params[0]",
    ),
]  # fmt: skip


@pytest.mark.parametrize("changes, where, other", SHARED, ids=[f"{w}-{o}" for _, w, o in SHARED])
def test_a_step_refuses_to_write_what_two_arguments_hold(changes, where, other):
    with nothing_written(BUFFER), pytest.raises(ValueError) as error:
        step_on(**changes)
    expected = "expected memory of its own (this call writes there)"
    assert str(error.value) == f"AdamStepper.step: {where} has memory that {other} has too; {expected}"


def test_a_step_accepts_neighbours_a_gradient_read_twice_and_a_parameter_as_its_master():
    buffer, grad = torch.ones(32), torch.ones(12)
    step_on(
        params=[buffer[:8], buffer[8:16]], exp_avgs=[buffer[16:24], buffer[24:]], grads=[grad[:8], grad[4:]],
        masters=[buffer[:8], None],
    )  # fmt: skip
    assert (buffer != 1).all()


def test_a_stepper_looks_again_when_memory_moves():
    stepper, hypers = _C.AdamStepper(), [make_hyper()]
    params, grads = [torch.ones(8), torch.ones(8)], [torch.ones(8), torch.ones(8)]
    averages, squares = [torch.zeros(8), torch.zeros(8)], [torch.zeros(8), torch.zeros(8)]

    def step(params=params, grads=grads, averages=averages):
        stepper.step(params, grads, averages, squares, hypers, [0, 0])

    step()
    for bad in ({"grads": [grads[0], squares[1]]}, {"params": [params[0], params[0]]}, {"averages": [grads[0], averages[1]]}):
        for _ in range(2):  # a refusal is not remembered as good
            with nothing_written(*params, *grads, *averages, *squares), pytest.raises(ValueError, match="has too; expected"):
                step(**bad)
        step()
