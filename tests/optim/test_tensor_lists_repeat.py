"""The short way of a step that repeats the last one: taken when it may be, and never when
anything but values changed.
"""

import collections
import copy
import gc
import weakref
from unittest import mock

import pytest
import torch

from shardcore.optim import CPUAdam, FusedAdam, adam
from tests.support.params import grads_of, params_of, same, snapshot


class LongWay(FusedAdam):
    """The twin that forgets the last step."""

    _repeat = property(lambda self: None, lambda self, value: None)


def refuse_the_long_way(patch):
    patch.setattr(adam, "Update", mock.Mock(side_effect=AssertionError("the long way")))


def check_both_ways(trained):
    """Assert that `trained(make)`, an optimizer and its parameters, has the same bits with
    FusedAdam and with LongWay.
    """
    short, long = (trained(make) for make in (FusedAdam, LongWay))
    assert same(
        *(snapshot(optimizer) + [p.detach() for p in params] for optimizer, params in (short, long))
    )


def give(params, step):
    for i, (p, grad) in enumerate(zip(params, grads_of(params, seed=step), strict=True)):
        p.grad = grad if (i + step // 3) % 4 else None  # another one is left out now and then


def replace_data(optimizer, params):
    params[1].data = params[1].detach().clone()


def other_dtype(optimizer, params):
    params[2].grad = None
    params[2].data = params[2].detach().bfloat16()
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[params[2]][key] = optimizer.state[params[2]][key].clone()


def not_contiguous(optimizer, params):
    params[4].grad = torch.stack([params[4].grad, params[4].grad * 2], dim=1)[:, 1]


def load(optimizer, params):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def add_group(optimizer, params):
    extra = torch.nn.Parameter(torch.full((9,), 0.5))
    extra.grad = torch.ones(9)
    optimizer.add_param_group({"params": [extra], "lr": 0.3})


def swap(optimizer, one, other):
    """As two states of one shape, each in its place of the dict."""
    states = optimizer.state
    states[one], states[other] = states[other], states[one]


CHANGES = {
    "nothing": lambda optimizer, params: None,
    "lr": lambda optimizer, params: optimizer.param_groups[0].update(lr=0.5),
    "amsgrad": lambda optimizer, params: optimizer.param_groups[0].update(amsgrad=True),
    "master": lambda optimizer, params: optimizer.param_groups[0].update(master="fp32"),
    "group dict": lambda optimizer, params: optimizer.param_groups.__setitem__(
        0, dict(optimizer.param_groups[0], lr=0.2)
    ),
    "params list": lambda optimizer, params: optimizer.param_groups[0]["params"].reverse(),
    "fewer params": lambda optimizer, params: optimizer.param_groups[0]["params"].pop(),
    "step": lambda optimizer, params: optimizer.state[params[3]].update(step=7),
    "moment": lambda optimizer, params: optimizer.state[params[3]].update(
        exp_avg=torch.ones_like(params[3])
    ),
    "moments of the other": lambda optimizer, params: swap(optimizer, params[3], params[6]),
    "other order": lambda optimizer, params: optimizer.state.update(
        {params[1]: optimizer.state.pop(params[1])}
    ),
    "other order of entries": lambda optimizer, params: optimizer.state[params[3]].update(
        exp_avg=optimizer.state[params[3]].pop("exp_avg")
    ),
    "more entries": lambda optimizer, params: optimizer.state[params[3]].update(mine=torch.ones(2)),
    "another key": lambda optimizer, params: optimizer.state.update(mine={"mine": torch.ones(3)}),
    "moment in place": lambda optimizer, params: optimizer.state[params[3]]["exp_avg"].fill_(0.25),
    "plain state": lambda optimizer, params: optimizer.state.update(
        {params[3]: dict(optimizer.state[params[3]], step=2)}
    ),
    "state cleared": lambda optimizer, params: optimizer.state[params[3]].clear(),
    "state gone": lambda optimizer, params: optimizer.state.pop(params[3]),
    "all states gone": lambda optimizer, params: optimizer.state.clear(),
    "data": replace_data,
    "dtype": other_dtype,
    "not contiguous": not_contiguous,
    "load": load,
    "load nothing": lambda optimizer, params: optimizer.load_state_dict(
        {**optimizer.state_dict(), "state": {}}
    ),
    "other states": lambda optimizer, params: setattr(optimizer, "state", type(optimizer.state)()),
    "add group": add_group,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_steps_has_the_bits_of_the_long_way(change):
    def trained(make):
        params = params_of(3, 300, 5, 1000, 17, 2, 1000)
        optimizer = make(params, lr=0.1, weight_decay=0.1)
        for step in range(9):
            give(params, step)
            if step in (5, 7):
                params[3].grad = grads_of(params, seed=step)[3]
                params[4].grad = grads_of(params, seed=step)[4]
                change(optimizer, params)
            optimizer.step(max_norm=3.0 if step % 2 else None, grad_scale=0.5)
        return optimizer, params

    check_both_ways(trained)


def test_copies_that_share_their_states_count_together():
    """A shallow copy, as of torch's optimizers, has the same states: each sees what steps of the
    other did to the counts.
    """

    def trained(make):
        params = params_of(3, 300)
        optimizer = make(params, lr=0.1)
        other, grads = copy.copy(optimizer), grads_of(params)
        for step in range(8):
            (other if step in (3, 5) else optimizer).step(
                grads=[None, grads[1]] if step == 3 else grads
            )
        assert [optimizer.state[p]["step"].item() for p in params] == [7.0, 8.0]
        return optimizer, params

    check_both_ways(trained)


def test_a_replaced_moment_is_read_on_the_short_way(monkeypatch):
    """What a step reads of a state it reads each time."""
    params = params_of(3, 300)
    optimizer = FusedAdam(params, lr=0.0)
    for _ in range(2):
        optimizer.step(grads=grads_of(params))
    moment = torch.full((300,), 2.0)
    optimizer.state[params[1]]["exp_avg"] = moment
    refuse_the_long_way(monkeypatch)
    optimizer.step(grads=[torch.zeros(3), torch.zeros(300)])
    assert torch.equal(moment, torch.full((300,), 0.9) * 2.0)


@pytest.mark.parametrize(
    ("options", "dtype"), [({}, torch.bfloat16), ({"state_dtype": "bf16"}, torch.float32)]
)
def test_moments_of_another_dtype_are_refused(options, dtype):
    """Both of them: alone, one would be refused by the kernel's binding."""
    params = params_of(3, 300)
    optimizer = FusedAdam(params, **options)
    for _ in range(2):
        optimizer.step(grads=grads_of(params))
    state = optimizer.state[params[1]]
    state.update({key: state[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")})
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=r"state\[params\[1\]\].exp_avg has dtype"):
        optimizer.step(grads=grads_of(params))
    assert same(before, snapshot(optimizer))


@pytest.mark.parametrize(
    "take", [lambda state: state.__delitem__("exp_avg_sq"), lambda state: state.pop("exp_avg_sq")]
)
def test_a_moment_that_was_taken_away_is_missed(take):
    params = params_of(3, 300)
    optimizer = FusedAdam(params)
    for _ in range(2):
        optimizer.step(grads=grads_of(params))
    take(optimizer.state[params[1]])
    with pytest.raises(ValueError, match=r"state\[params\[1\]\] contains no 'exp_avg_sq'"):
        optimizer.step(grads=grads_of(params))


@pytest.mark.parametrize("states", [collections.defaultdict(dict), collections.UserDict()])
def test_another_mapping_in_place_of_the_states_is_read_at_each_step(states):
    """As torch.optim's users start anew."""

    def trained(make):
        params = params_of(3, 300)
        optimizer = make(params, lr=0.1)
        optimizer.state = copy.copy(states)
        for step in range(4):
            for p, grad in zip(params, grads_of(params, seed=step), strict=True):
                p.grad = grad
            if step == 2:
                optimizer.state.clear()
            if step == 3:
                optimizer.state[params[1]] = {}
            optimizer.step()
        assert [float(optimizer.state[p]["step"]) for p in params] == [2.0, 1.0]
        return optimizer, params

    check_both_ways(trained)


def test_the_short_way_is_taken(monkeypatch):
    params = params_of(3, 300)
    optimizer = CPUAdam(params)
    for step in range(2):
        for p, grad in zip(params, grads_of(params, seed=step), strict=True):
            p.grad = grad
        optimizer.step()
    refuse_the_long_way(monkeypatch)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3
    params[0].grad = None
    with pytest.raises(AssertionError, match="the long way"):
        optimizer.step()


def test_given_gradients_take_the_short_way():
    """In turns with those of the parameters."""

    def trained(make):
        params = params_of(3, 300, 5)
        optimizer = make(params, lr=0.1)
        for step in range(8):
            grads = grads_of(params, seed=step)
            grads[step // 4] = None
            if step % 4 == 3:
                grads[2] = torch.stack([grads[2], grads[2]], dim=1)[:, 0]  # not contiguous
            if step % 2:
                for p, grad in zip(params, grads, strict=True):
                    p.grad = grad
            optimizer.step(grads=None if step % 2 else grads, max_norm=1.0)
        return optimizer, params

    check_both_ways(trained)


def test_given_gradients_that_are_not_as_they_were_go_the_long_way(monkeypatch):
    params = params_of(3, 300, 5)
    idle = [None, *grads_of(params)[1:]]
    wrong = (
        [None, torch.ones(300), torch.ones(5, dtype=torch.float64)],
        [None, 1.0, torch.ones(5)],
        [None, None, torch.ones(5)],
        [None, *[torch.ones(299)] * 2],
        [torch.ones(3), None, torch.ones(5)],
        grads_of(params),
    )
    for grads in wrong:
        optimizer = FusedAdam(params, lr=0.1)
        for _ in range(2):
            optimizer.step(grads=idle)
        with monkeypatch.context() as patch:
            refuse_the_long_way(patch)
            optimizer.step(grads=tuple(idle))
            assert optimizer.state[params[1]]["step"] == 3
            with pytest.raises(AssertionError, match="the long way"):
                optimizer.step(grads=grads)


def test_optimizers_that_take_turns_take_the_short_way(monkeypatch):
    optimizers = [CPUAdam(params_of(3, 300)) for _ in range(3)]
    for optimizer in optimizers:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)

    # the others' first steps make states; the second round notices that nothing changes any more
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
    refuse_the_long_way(monkeypatch)
    for optimizer in optimizers:
        optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_a_change_of_a_state_concerns_its_optimizer_alone(monkeypatch):
    optimizers = [CPUAdam(params_of(3, 300)) for _ in range(2)]
    for optimizer in optimizers:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
    changed, other = optimizers
    changed.state[changed.param_groups[0]["params"][1]]["step"] = 4
    refuse_the_long_way(monkeypatch)
    other.step()
    with pytest.raises(AssertionError, match="the long way"):
        changed.step()


def test_gradients_with_a_graph_of_their_own_take_the_short_way():
    def trained(make):
        params = params_of(3, 300)
        optimizer = make(params, lr=0.1)
        for _ in range(4):
            grads = torch.autograd.grad(
                sum((p**4).sum() for p in params), params, create_graph=True
            )
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            assert params[0].grad.requires_grad
            optimizer.step(max_norm=1.0, grad_scale=torch.tensor(2.0, requires_grad=True))
            assert all(p.is_leaf for p in params)
        assert not any(t.requires_grad for t in snapshot(optimizer) if isinstance(t, torch.Tensor))
        return optimizer, params

    check_both_ways(trained)


def test_an_error_on_the_short_way_changes_nothing():
    params = params_of(3, 300)
    optimizer = CPUAdam(params)
    for step in range(3):
        for p, grad in zip(params, grads_of(params, seed=step), strict=True):
            p.grad = grad
        optimizer.step()
    before = snapshot(optimizer)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"param_groups\[0\].lr is -1.0"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    params[1].grad = None
    params[1].grad_dtype = None
    params[1].grad = torch.ones(300, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"grads\[1\] has dtype float64"):
        optimizer.step()
    params[1].grad = grads_of(params)[1]
    optimizer.step(max_norm=1.0)
    assert optimizer.state[params[0]]["step"] == 4
    assert not same(before, snapshot(optimizer))


@pytest.mark.more
def test_gradients_are_free_after_the_step():
    params = params_of(1000)
    optimizer = CPUAdam(params)
    for _ in range(3):
        params[0].grad = torch.ones(1000)
        grad = weakref.ref(params[0].grad.untyped_storage())
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert grad() is None


def to_elsewhere(optimizer, params):
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()


LETS_GO = {
    "all gone": lambda optimizer, params: optimizer.state.clear(),
    "one gone": lambda optimizer, params: optimizer.state.pop(params[0]),
    "moved": to_elsewhere,
    "loaded": load,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("let_go", LETS_GO.values(), ids=LETS_GO)
def test_states_are_freed_with_their_last_reference(let_go):
    """As when states leave the device between steps to make room."""
    params = params_of(1000, 300)
    optimizer = CPUAdam(params)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer._repeat is not None
    exp_avg = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    let_go(optimizer, params)
    gc.collect()
    assert exp_avg() is None
    optimizer.step()
    assert optimizer._repeat is not None


def tensor_lr(group):
    group["lr"] = torch.tensor(0.1)
    return lambda: group["lr"].fill_(-1.0)


def list_of_betas(group):
    group["betas"] = [0.9, 0.99]
    return lambda: group["betas"].__setitem__(1, 1.5)


SPOILED = {
    "lr": (lambda group: lambda: group.update(lr=-1.0), "lr"),
    "seed": (lambda group: lambda: group.update(seed="one"), "seed"),
    "lr in place": (tensor_lr, "lr"),
    "betas in place": (list_of_betas, "betas"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_options_are_checked_at_every_step(name):
    prepare, option = SPOILED[name]
    params = params_of(5, 300, 1)
    optimizer = CPUAdam(params)
    spoil = prepare(optimizer.param_groups[0])
    for step in range(3):
        give(params, 0)
        optimizer.step()
        assert step == 0 or optimizer._repeat is not None
    spoil()
    before = snapshot(optimizer)
    with pytest.raises((ValueError, TypeError), match=option):
        optimizer.step()
    assert same(before, snapshot(optimizer))
