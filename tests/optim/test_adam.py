"""torch.optim's manners: closures, schedulers, groups, counts, copies, masters."""

import copy
import io
import math
import pickle

import pytest
import torch

from shardcore._native import _C
from shardcore.optim import CPUAdam, FusedAdam
from tests.support.params import (
    grads_of,
    make_params,
    params_of,
    run_steps,
    same,
    snapshot,
    torch_adam,
)

pytestmark = pytest.mark.parametrize("make", [CPUAdam, FusedAdam])


def test_closure(make):
    (p,) = params_of(4)
    optimizer = make([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = (p * p).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    with torch.no_grad():
        optimizer.step(closure)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_schedulers_drive_it(make, tensor_lr):
    (p,), (q,) = params_of(5), params_of(5)
    lr = (lambda: torch.tensor(0.1)) if tensor_lr else (lambda: 0.1)
    ours, theirs = make([p], lr=lr()), torch.optim.AdamW([q], lr=lr(), weight_decay=0.0)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20)
        if not tensor_lr
        else torch.optim.lr_scheduler.StepLR(o, 3)
        for o in (ours, theirs)
    ]
    for step in range(15):
        p.grad, q.grad = grads_of([p], step)[0], grads_of([p], step)[0]
        for optimizer, scheduler in zip((ours, theirs), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        assert float(ours.param_groups[0]["lr"]) == float(theirs.param_groups[0]["lr"])
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    again = make([params_of(5)[0]])
    again.load_state_dict(ours.state_dict())  # with what schedulers write into groups
    assert float(again.param_groups[0]["lr"]) == float(ours.param_groups[0]["lr"])


def test_groups_have_their_own_options(make):
    a, b, c = params_of(6, 7, 8)
    d, e, f = params_of(6, 7, 8)
    one = make(
        [
            {"params": [a], "lr": 0.1},
            {"params": iter([b]), "weight_decay": 0.5, "adam_w_mode": False, "amsgrad": True},
        ]
    )
    one.add_param_group({"params": c, "betas": (0.5, 0.5), "maximize": True})
    others = [
        make([d], lr=0.1),
        make([e], weight_decay=0.5, adam_w_mode=False, amsgrad=True),
        make([f], betas=(0.5, 0.5), maximize=True),
    ]
    for step in range(3):
        for p, q in zip((a, b, c), (d, e, f), strict=True):
            p.grad = q.grad = grads_of([p], step)[0]
        one.step()
        for optimizer in others:
            optimizer.step()
    assert same((a, b, c), (d, e, f))
    assert "max_exp_avg_sq" in one.state[b]
    assert "max_exp_avg_sq" not in one.state[a]


def test_named_parameters(make):
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(torch.optim.AdamW(model.named_parameters()).state_dict())


def test_parameters_without_gradient_keep_their_own_count(make):
    params, reference = params_of(3, 3, 3), params_of(3, 3, 3)
    ours, theirs = make(params, weight_decay=0.1), torch.optim.AdamW(reference, weight_decay=0.1)
    for step, used in enumerate([(0, 1, 2), (0, 2), (2,), (0, 1), (0, 1, 2), (1,)]):
        for i, (p, q) in enumerate(zip(params, reference, strict=True)):
            p.grad = q.grad = grads_of([p], step)[0] if i in used else None
        ours.step()
        theirs.step()
    for p, q in zip(params, reference, strict=True):
        assert ours.state[p]["step"] == theirs.state[q]["step"]
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    before = params[0].detach().clone()
    ours.zero_grad()
    ours.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_continue_alike(make, how):
    params = params_of(5, 6, dtype=torch.bfloat16)
    optimizer = make(params, master="fp32", lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps optimizer.step
    optimizer.step(grads=grads_of(params))
    if how == "deepcopy":
        twin = copy.deepcopy(optimizer)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(optimizer))
    else:
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    optimizer.step(grads=grads_of(params, 2))
    assert not same(params, twin.param_groups[0]["params"])
    twin.step(grads=grads_of(params, 2))
    assert same(snapshot(optimizer), snapshot(twin))


def test_graph_hears_of_the_write(make):
    """A weight saved for backward and then stepped: autograd must refuse, as with torch.optim."""
    (p,) = params_of(4)
    optimizer = make([p])
    loss = (p * p).sum()
    optimizer.step(grads=grads_of([p]))
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_stochastic_rounding(make):
    """Unbiased; the same for the same seed, another for another seed, step or parameter."""
    n = 40_000

    def rounded(seed=0, steps=1, params=1, **options):
        ps = [torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for _ in range(params)]
        optimizer = make(ps, lr=2.0**-10, eps=0.0, stochastic_rounding=True, seed=seed, **options)
        for _ in range(steps):
            optimizer.step(grads=[torch.ones(n)] * params)
        return [p.detach().double() for p in ps]

    (w,) = rounded()
    # lr is a quarter of the step from 1 down to the next bfloat16, 1 - 2^-8: one in four goes
    # there.
    assert set(w.tolist()) == {1.0, 1.0 - 2.0**-8}
    share = (w != 1.0).double().mean().item()
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / n)
    assert torch.equal(w, rounded()[0])
    assert not torch.equal(w, rounded(seed=1)[0])
    two = rounded(params=2)
    assert torch.equal(two[0], w)
    assert not torch.equal(two[1], w)
    mean = rounded(steps=20)[0].mean().item()
    assert abs(mean - (1 - 20 * 2.0**-10)) < 1e-4  # rounded to nearest it would have stayed at 1
    (p,) = params_of(100)  # float32 weights are not touched by it
    (q,) = params_of(100)
    make([p], stochastic_rounding=True).step(grads=grads_of([p]))
    make([q]).step(grads=grads_of([q]))
    assert torch.equal(p, q)


def test_master_starts_from_the_weights_as_given(make):
    params = params_of(50, dtype=torch.bfloat16)
    start = params[0].detach().float()
    optimizer = make(params, master="fp32", lr=1e-4)
    full = torch.nn.Parameter(start.clone())
    reference = make([full], lr=1e-4)
    for step in range(20):
        optimizer.step(grads=grads_of(params, step))
        reference.step(grads=grads_of(params, step))
    master = optimizer.state[params[0]]["master"]
    assert torch.equal(master, full)  # the same bits as a float32 weight
    expected = torch.empty_like(params[0])
    _C.cast([expected], [master])
    assert torch.equal(params[0], expected)
    assert "master" not in reference.state[full]


def test_large_states_have_their_own_pages(make):
    """States from 4 MiB on are allocated apart; the bits, copies and state dicts are those of
    small ones.
    """
    n = (1 << 20) + 3
    (large,) = params_of(n, dtype=torch.bfloat16)
    small = [torch.nn.Parameter(x.clone()) for x in large.detach().split(100_000)]
    grads = grads_of([large])
    optimizer = make([large], master="fp32", amsgrad=True)
    optimizer.step(grads=grads)
    make(small, master="fp32", amsgrad=True).step(grads=grads[0].split(100_000))
    assert torch.equal(large, torch.cat([p.detach() for p in small]))
    twin = copy.deepcopy(optimizer)
    twin.load_state_dict(optimizer.state_dict())
    for o in (optimizer, twin):
        o.step(grads=grads)
    assert same(snapshot(optimizer), snapshot(twin))


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_every_seed_works(make, seed):
    (p,) = params_of(9, dtype=torch.bfloat16)
    make([p], stochastic_rounding=True, seed=seed).step(grads=grads_of([p]))
    assert p.isfinite().all()


def test_zero_grad(make):
    (p,) = params_of(3)
    optimizer = make([p])
    p.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(p.grad, torch.zeros(3))
    optimizer.zero_grad()
    assert p.grad is None


def test_states_that_the_user_puts_there(make):
    (p,), (q,) = params_of(4), params_of(4)
    optimizer, reference = make([p]), make([q])
    optimizer.state[p] = {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros(4),
        "exp_avg_sq": torch.zeros(4),
    }
    mine = optimizer.state[p]["exp_avg"]
    optimizer.step(grads=grads_of([p]))
    reference.step(grads=grads_of([p]))
    assert torch.equal(p, q)
    assert optimizer.state[p]["exp_avg"] is mine
    assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
def test_param_groups_of_torch_mean_what_they_meant(make, adam_w_mode):
    ours, reference = make_params(), make_params()
    optimizer = make(torch_adam(adam_w_mode)(ours, lr=0.01, weight_decay=0.5).param_groups)
    run_steps(optimizer, ours, 0, 3)
    run_steps(make(reference, lr=0.01, weight_decay=0.5, adam_w_mode=adam_w_mode), reference, 0, 3)
    assert all(torch.equal(p, q) for p, q in zip(ours, reference, strict=True))
    assert optimizer.state_dict()["param_groups"][0]["decoupled_weight_decay"] is adam_w_mode


def test_a_module_in_place_of_its_parameters(make):
    for model in (torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(3, 2))):
        text = rf"Adam: params is a {type(model).__name__}; pass model\.parameters\(\)$"
        with pytest.raises(TypeError, match=text):
            make(model)
