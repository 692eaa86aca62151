"""State dicts of the optimizers: exchanged with torch.optim, loaded whole or not at all."""

import copy
import io
import math
import warnings

import pytest
import torch

from shardcore.optim import CPUAdam, FusedAdam
from tests.support.params import (
    Snapshot,
    digest,
    each_kind,
    made,
    make_params,
    param,
    release,
    run_steps,
    torch_adam,
)

pytestmark = pytest.mark.filterwarnings("error")  # "silent" means silent
OURS = [FusedAdam, CPUAdam]


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("through_file", [False, True])
def test_state_goes_to_torch_and_continues(make, adam_w_mode, amsgrad, through_file):
    options = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": amsgrad}
    ours = make_params()
    optimizer = make(ours, adam_w_mode=adam_w_mode, **options)
    run_steps(optimizer, ours, 0, 5)
    state_dict = optimizer.state_dict()
    if through_file:
        file = io.BytesIO()
        torch.save(state_dict, file)
        file.seek(0)
        state_dict = torch.load(file, weights_only=True)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    torch_optimizer = torch_adam(adam_w_mode)(copies, lr=1.0)
    torch_optimizer.load_state_dict(state_dict)
    assert torch_optimizer.param_groups[0]["lr"] == 0.01
    assert torch_optimizer.param_groups[0]["decoupled_weight_decay"] is adam_w_mode
    # torch keeps the tensors of a state dict; ours must not share them from here on
    if not through_file:
        for state in torch_optimizer.state.values():
            for key, value in state.items():
                state[key] = value.clone()
    run_steps(optimizer, ours, 5, 15)
    run_steps(torch_optimizer, copies, 5, 15)
    for p, q in zip(ours, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert torch_optimizer.state[q]["step"].item() == 15


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize(
    "how", [{}, {"fused": True}, {"foreach": True}], ids=["plain", "fused", "foreach"]
)
def test_state_comes_from_torch_and_continues(make, adam_w_mode, how):
    options = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}
    reference = make_params()
    torch_optimizer = torch_adam(adam_w_mode)(reference, **how, **options)
    run_steps(torch_optimizer, reference, 0, 5)
    ours = [torch.nn.Parameter(p.detach().clone()) for p in reference]
    optimizer = make(ours, lr=1.0, adam_w_mode=not adam_w_mode)
    optimizer.load_state_dict(torch_optimizer.state_dict())
    assert optimizer.param_groups[0]["adam_w_mode"] is adam_w_mode
    assert optimizer.param_groups[0]["amsgrad"] is True
    run_steps(torch_optimizer, reference, 5, 15)
    run_steps(optimizer, ours, 5, 15)
    for p, q in zip(ours, reference, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert optimizer.state[p]["step"].item() == 15


@pytest.mark.parametrize("master", [None, "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_keep_float32_moments(dtype, master):
    """Loaded by ours the moments are the very float32 numbers; torch's own loading would have
    cut them to 16 bits.
    """
    ours = make_params(dtype)
    optimizer = FusedAdam(ours, lr=0.01, master=master)
    run_steps(optimizer, ours, 0, 3)
    other = make_params(dtype, seed=1)
    again = FusedAdam(other, master=master)
    again.load_state_dict(optimizer.state_dict())
    for p, q in zip(ours, other, strict=True):
        assert optimizer.state[p].keys() == again.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert again.state[q][key].dtype == torch.float32
            assert torch.equal(again.state[q][key], value)
            assert value.numel() == 0 or again.state[q][key].data_ptr() != value.data_ptr()
    assert any(
        (optimizer.state[p]["exp_avg"] != optimizer.state[p]["exp_avg"].to(dtype)).any()
        for p in ours
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_exchange_with_torch(dtype):
    reference = make_params(dtype)
    torch_optimizer = torch.optim.AdamW(reference, lr=0.01, eps=1e-4)
    run_steps(torch_optimizer, reference, 0, 3)
    ours = [torch.nn.Parameter(p.detach().clone()) for p in reference]
    optimizer = FusedAdam(ours)
    # upcasts are silent: warnings are errors here
    optimizer.load_state_dict(torch_optimizer.state_dict())
    for p, q in zip(ours, reference, strict=True):
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(
            optimizer.state[p]["exp_avg"], torch_optimizer.state[q]["exp_avg"].float()
        )
    back = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in ours])
    back.load_state_dict(optimizer.state_dict())
    params = back.param_groups[0]["params"]
    run_steps(back, params, 3, 6)
    run_steps(torch_optimizer, reference, 3, 6)
    for p, q in zip(params, reference, strict=True):
        assert torch.equal(p, q)


def test_a_master_that_went_through_torch_is_stale():
    ours = make_params(torch.bfloat16)
    optimizer = FusedAdam(ours, lr=0.01, master="fp32")
    run_steps(optimizer, ours, 0, 3)
    torch_optimizer = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in ours])
    torch_optimizer.load_state_dict(optimizer.state_dict())
    params = torch_optimizer.param_groups[0]["params"]
    run_steps(torch_optimizer, params, 3, 10)
    again = FusedAdam(params, lr=0.01, master="fp32")
    with pytest.warns(UserWarning, match="stale"):
        again.load_state_dict(torch_optimizer.state_dict())
    assert all("master" not in again.state[p] for p in params)
    before = [p.detach().float() for p in params]
    again.param_groups[0]["lr"] = 0.0
    run_steps(again, params, 10, 11)
    assert all(
        torch.equal(again.state[p]["master"], b) for p, b in zip(params, before, strict=True)
    )


def test_downcasts_warn():
    reference = [torch.nn.Parameter(p.detach().double()) for p in make_params()]
    torch_optimizer = torch.optim.Adam(reference)
    run_steps(torch_optimizer, reference, 0, 2)
    optimizer = FusedAdam(make_params())
    with pytest.warns(
        UserWarning, match=r"state\[0\].exp_avg is rounded from float64 to float32 \(and \d+ more"
    ):
        optimizer.load_state_dict(torch_optimizer.state_dict())


def test_a_master_that_nobody_keeps_warns():
    ours = make_params(torch.bfloat16)
    optimizer = FusedAdam(ours, master="fp32")
    run_steps(optimizer, ours, 0, 2)
    again = FusedAdam(make_params(torch.bfloat16))
    with pytest.warns(UserWarning, match="master is left out"):
        again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["master"] is None
    again.load_state_dict(FusedAdam(make_params(torch.bfloat16)).state_dict())


def test_loading_keeps_the_groups_and_their_order():
    params = make_params()
    optimizer = FusedAdam(
        [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "name": "rest"}]
    )
    groups = list(optimizer.param_groups)
    other = make_params()
    source = torch.optim.AdamW(
        [{"params": other[:2], "lr": 0.3}, {"params": other[2:], "betas": (0.5, 0.6)}]
    )
    run_steps(source, other, 0, 1)
    optimizer.load_state_dict(source.state_dict())
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    assert [g["lr"] for g in optimizer.param_groups] == [0.3, 1e-3]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    assert optimizer.param_groups[1]["name"] == "rest"
    assert torch.equal(optimizer.state[params[3]]["exp_avg"], source.state[other[3]]["exp_avg"])


def test_state_dict_hooks_run():
    params = make_params()
    optimizer = FusedAdam(params)
    run_steps(optimizer, params, 0, 1)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda opt, sd: {**sd, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda opt, sd: {k: v for k, v in sd.items() if k != "extra"}
    )
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    state_dict = optimizer.state_dict()
    assert state_dict["extra"] == 1
    optimizer.load_state_dict(state_dict)
    assert seen == ["pre", "loaded"]


@pytest.mark.parametrize("make", OURS)
def test_groups_that_share_a_learning_rate_tensor_share_one_after_loading(make):
    params = make_params()
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = make(groups, lr=torch.tensor(0.01))
    optimizer.load_state_dict(optimizer.state_dict())
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert first is second


@pytest.mark.parametrize("make", [*OURS, torch.optim.AdamW])
def test_entries_of_state_that_are_no_parameters_travel(make):
    params = make_params()
    optimizer = make(params, lr=0.01)
    run_steps(optimizer, params, 0, 1)
    optimizer.state["tokens"], optimizer.state["ema"] = 17, {"decay": torch.tensor(0.5)}
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0, 1, 2, 3, 4, "tokens", "ema"]
    for make_other in (*OURS, torch.optim.AdamW):
        others = make_params()
        other = make_other(others, lr=0.01)
        other.state["mine"] = 3
        other.load_state_dict(saved)
        assert "mine" not in other.state
        assert other.state["tokens"] == 17
        run_steps(other, others, 1, 2)
        assert other.state_dict()["state"]["ema"] == {"decay": torch.tensor(0.5)}
        assert set(other.state) == {*others, "tokens", "ema"}


@pytest.mark.parametrize("key, value", [("9.weight", {"step": torch.tensor(1.0)}), (7, 1)])
def test_a_state_of_a_parameter_that_is_not_there_is_no_such_entry(key, value):
    optimizer = FusedAdam(make_params())
    saved = optimizer.state_dict()
    saved["state"][key] = value
    with pytest.raises(ValueError, match=rf"contains the key {key!r}; expected one of the ids"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("make", OURS)
def test_a_group_that_is_listed_twice_has_the_same_parameters(make):
    first, second = make_params(), make_params(seed=1)
    ours = make([{"params": first}, {"params": second}], lr=0.01)
    reference = torch.optim.AdamW([{"params": first}, {"params": second}], lr=0.01)
    run_steps(ours, first, 0, 1)
    run_steps(reference, first, 0, 1)
    for optimizer in (ours, reference):
        optimizer.param_groups.extend(optimizer.param_groups[:1])
    saved, expected = ours.state_dict(), reference.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [
        group["params"] for group in expected["param_groups"]
    ]
    assert list(saved["state"]) == list(expected["state"])
    for source in (saved, expected):
        ours.load_state_dict(source)
        assert ours.state_dict()["state"][0]["step"] == 1


def broken_state_dicts():
    """(what is wrong, how to make it so, error, message)"""
    return [
        (
            "groups",
            lambda sd: sd["param_groups"].append(sd["param_groups"][0]),
            ValueError,
            "contains 2 parameter groups; expected 1",
        ),
        (
            "params",
            lambda sd: sd["param_groups"][0]["params"].pop(),
            ValueError,
            r"param_groups\[0\] contains 1 parameters; expected 2",
        ),
        (
            "nested",
            lambda sd: sd["param_groups"][0].update(params=[[0], [1]]),
            TypeError,
            r'params"\] contains \[0\]; expected a number',
        ),
        (
            "twice",
            lambda sd: sd["param_groups"][0].update(params=[0, 0]),
            ValueError,
            "names a parameter twice",
        ),
        (
            "group key",
            lambda sd: sd["param_groups"][0].update(momentum_x=1),
            ValueError,
            "'momentum_x' is an unknown key; expected lr, betas",
        ),
        (
            "state key",
            lambda sd: sd["state"][1].update(momentum=torch.ones(4)),
            ValueError,
            r"state\[1\] contains the unknown key",
        ),
        (
            "missing",
            lambda sd: sd["state"][1].pop("exp_avg"),
            ValueError,
            r"state\[1\] contains no 'exp_avg'",
        ),
        (
            "no step",
            lambda sd: sd["state"][1].pop("step"),
            ValueError,
            r"state\[1\] contains no 'step'",
        ),
        (
            "id",
            lambda sd: sd["state"].update({7: sd["state"][0]}),
            ValueError,
            "contains the key 7",
        ),
        (
            "shape",
            lambda sd: sd["state"][1].update(exp_avg=torch.ones(5)),
            ValueError,
            r"state\[1\].exp_avg has shape \(5,\)",
        ),
        (
            "dtype",
            lambda sd: sd["state"][1].update(exp_avg=torch.ones(4).int()),
            TypeError,
            r"state\[1\].exp_avg has dtype int32",
        ),
        (
            "memory",
            lambda sd: sd["state"][1]["exp_avg"].untyped_storage().resize_(15),
            ValueError,
            "exp_avg has no memory",
        ),
        (
            "type",
            lambda sd: sd["state"][1].update(exp_avg=[1.0] * 4),
            TypeError,
            r"state\[1\].exp_avg is of type list",
        ),
        (
            "step",
            lambda sd: sd["state"][1].update(step=1.5),
            ValueError,
            r"state\[1\].step is 1.5",
        ),
        (
            "step 2**60",
            lambda sd: sd["state"][1].update(step=2**60),
            ValueError,
            r"state\[1\].step is 1.15.*at most 2\*\*53",
        ),
        (
            "step nan",
            lambda sd: sd["state"][1].update(step=torch.tensor(math.nan)),
            ValueError,
            r"state\[1\].step is nan",
        ),
        (
            "lr",
            lambda sd: sd["param_groups"][0].update(lr=-1.0),
            ValueError,
            r"param_groups\[0\].lr is -1.0",
        ),
        (
            "betas",
            lambda sd: sd["param_groups"][0].update(betas=(2.0, 0.9)),
            ValueError,
            r"betas\[0\] is 2.0",
        ),
        ("no groups", lambda sd: sd.pop("param_groups"), ValueError, "contains no 'param_groups'"),
        ("no state", lambda sd: sd.pop("state"), ValueError, "contains no 'state'"),
        (
            "params type",
            lambda sd: sd["param_groups"][0].update(params=None),
            TypeError,
            'with a list "params"',
        ),
        ("groups type", lambda sd: sd.update(param_groups=3), TypeError, "not a list of dicts"),
        ("state type", lambda sd: sd.update(state=[]), TypeError, "is of type list"),
        (
            "param type",
            lambda sd: sd["state"].update({1: 5}),
            TypeError,
            r"state\[1\] is of type int",
        ),
    ]


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize(
    "what, damage, error, match",
    broken_state_dicts(),
    ids=[case[0] for case in broken_state_dicts()],
)
def test_loading_is_all_or_nothing(make, what, damage, error, match):
    source = make([param(), param()], lr=0.5, betas=(0.1, 0.2))
    source.step(grads=[torch.ones(4)] * 2)
    state_dict = copy.deepcopy(source.state_dict())
    damage(state_dict)
    optimizer = make([param(), param()])
    optimizer.step(grads=[torch.full((4,), 2.0)] * 2)
    snapshot = Snapshot(optimizer)
    with pytest.raises(error, match=match):
        optimizer.load_state_dict(state_dict)
    snapshot.check()
    with pytest.raises(TypeError, match="state_dict is of type list"):
        optimizer.load_state_dict([state_dict])
    optimizer.load_state_dict(source.state_dict())  # the undamaged one loads
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_states_of_other_optimizers_are_refused():
    q = param()
    other = torch.optim.SGD([q], momentum=0.9)
    q.grad = torch.ones(4)
    other.step()
    with pytest.raises(ValueError, match="unknown key"):
        FusedAdam([param()]).load_state_dict(other.state_dict())


def released_copy(t):
    copy = t.clone()
    release(copy)
    return copy


BAD_VALUES = {
    "shape": (
        lambda t: t.reshape(6, 4),
        ValueError,
        r"has shape \(6, 4\); expected \(4, 6\), as its parameter",
    ),
    "flat": (lambda t: t.reshape(-1), ValueError, r"has shape \(24,\)"),
    "int64": (lambda t: t.long(), TypeError, "has dtype int64; expected a floating dtype"),
    "int8": (lambda t: t.to(torch.int8), TypeError, "has dtype int8; expected a floating dtype"),
    "bool": (lambda t: t.bool(), TypeError, "has dtype bool; expected a floating dtype"),
    "complex64": (lambda t: t + 0j, TypeError, "has dtype complex64; expected a floating dtype"),
    "sparse": (
        lambda t: t.to_sparse(),
        ValueError,
        "has layout torch.sparse_coo; expected a dense tensor",
    ),
    "meta": (lambda t: t.to("meta"), ValueError, "has no memory"),
    "released": (released_copy, ValueError, "has no memory"),
    "a list": (lambda t: t.tolist(), TypeError, "is of type list; expected a tensor"),
}


@pytest.mark.cases(43)
@each_kind
@pytest.mark.parametrize("bad", BAD_VALUES)
def test_state_dicts_that_do_not_fit(kind, bad):
    """Every tensor of the first parameter's entry in turn; the entry of the last one is good and
    must not arrive either.
    """
    make, error, match = BAD_VALUES[bad]
    good = made(kind, steps=3)[1].state_dict()
    for key in [key for key in good["state"][0] if key != "step"]:
        params, optimizer = made(kind)
        before = digest(params, optimizer)
        entry = {**good["state"][0], key: make(good["state"][0][key].float())}
        with pytest.raises(error, match=rf"^FusedAdam: state\[0\].{key} {match}"):
            optimizer.load_state_dict({**good, "state": {**good["state"], 0: entry}})
        assert digest(params, optimizer) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_floating_dtypes_are_converted_and_losses_are_named(dtype):
    """DESIGN section 3: upcasts are silent, downcasts warn."""
    params, optimizer = made("fp32")
    saved = optimizer.state_dict()
    exact = saved["state"][0]["exp_avg"].double() + (2.0**-40 if dtype is torch.float64 else 0)
    saved["state"][0]["exp_avg"] = exact.to(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(saved)
    assert [str(w.message).split(";")[0] for w in caught] == (
        ["FusedAdam: state[0].exp_avg is rounded from float64 to float32"]
        if dtype is torch.float64
        else []
    )
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], exact.to(dtype).float())
