"""The optimizers beside torch.optim.Adam and AdamW: trajectories, and groups that mean the same."""

import pytest
import torch

from shardcore.optim import CPUAdam, FusedAdam
from tests.support.params import make_params, run_steps, step_grads, torch_adam

pytestmark = pytest.mark.filterwarnings("error")  # "silent" means silent
OURS = [FusedAdam, CPUAdam]
OPTIONS = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.1, "maximize": True},
    {"betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.01, "amsgrad": True, "maximize": True},
    {"betas": (0.0, 0.0), "weight_decay": 0.0},
]


@pytest.mark.cases(13)
@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
def test_100_steps_stay_with_torch(make, adam_w_mode, options):
    """Beside torch in float64: 100 steps of 0.01 move a weight by up to 1: 2e-5 is far above rounding, far below any term."""
    ours, reference = make_params(), [torch.nn.Parameter(p.detach().double()) for p in make_params()]
    run_steps(make(ours, lr=0.01, adam_w_mode=adam_w_mode, **options), ours, 0, 100)
    torch_optimizer = torch_adam(adam_w_mode)(reference, lr=0.01, **options)
    for step in range(100):
        for p, g in zip(reference, step_grads(ours, step), strict=True):
            p.grad = g.double()
        torch_optimizer.step()
    for p, q in zip(ours, reference, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=2e-5, atol=2e-5)


def test_a_wrong_trajectory_is_rejected():
    """The twin of the test above: a step count that starts one too late leaves the tolerance."""
    ours, reference = make_params(), make_params()
    optimizer = FusedAdam(ours, lr=0.01)
    run_steps(optimizer, ours, 0, 1)
    for p, q in zip(ours, reference, strict=True):
        optimizer.state[p]["step"] = 0
        q.grad = None
    torch_optimizer = torch.optim.AdamW(reference, lr=0.01, weight_decay=0.0)
    run_steps(torch_optimizer, reference, 0, 1)
    run_steps(optimizer, ours, 1, 100)
    run_steps(torch_optimizer, reference, 1, 100)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours[0], reference[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
def test_param_groups_of_torch_mean_what_they_meant(make, adam_w_mode):
    ours, reference = make_params(), make_params()
    optimizer = make(torch_adam(adam_w_mode)(ours, lr=0.01, weight_decay=0.5).param_groups)
    run_steps(optimizer, ours, 0, 3)
    run_steps(make(reference, lr=0.01, weight_decay=0.5, adam_w_mode=adam_w_mode), reference, 0, 3)
    assert all(torch.equal(p, q) for p, q in zip(ours, reference, strict=True))
    assert optimizer.state_dict()["param_groups"][0]["decoupled_weight_decay"] is adam_w_mode
