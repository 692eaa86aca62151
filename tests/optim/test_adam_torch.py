"""The optimizers beside torch.optim.Adam and AdamW: trajectories, and states that travel both ways."""

import io

import pytest
import torch

from shardcore.optim import CPUAdam, FusedAdam

pytestmark = pytest.mark.filterwarnings("error")  # "silent" means silent
OURS = [FusedAdam, CPUAdam]
SHAPES = [(7, 5), (33,), (), (0, 4), (2, 3, 4)]


def make_params(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def run(optimizer, params, first, last):
    for step in range(first, last):
        for p, g in zip(params, gradients(params, step), strict=True):
            p.grad = g
        optimizer.step()


def theirs(adam_w_mode):
    return torch.optim.AdamW if adam_w_mode else torch.optim.Adam


OPTIONS = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.1, "maximize": True},
    {"betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.01, "amsgrad": True, "maximize": True},
    {"betas": (0.0, 0.0), "weight_decay": 0.0},
]


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
def test_100_steps_stay_with_torch(make, adam_w_mode, options):
    """Beside torch in float64: 100 steps of 0.01 move a weight by up to 1: 2e-5 is far above rounding, far below any term."""
    ours, reference = make_params(), [torch.nn.Parameter(p.detach().double()) for p in make_params()]
    run(make(ours, lr=0.01, adam_w_mode=adam_w_mode, **options), ours, 0, 100)
    torch_optimizer = theirs(adam_w_mode)(reference, lr=0.01, **options)
    for step in range(100):
        for p, g in zip(reference, gradients(ours, step), strict=True):
            p.grad = g.double()
        torch_optimizer.step()
    for p, q in zip(ours, reference, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=2e-5, atol=2e-5)


def test_a_wrong_trajectory_is_rejected():
    """The twin of the test above: a step count that starts one too late leaves the tolerance."""
    ours, reference = make_params(), make_params()
    optimizer = FusedAdam(ours, lr=0.01)
    run(optimizer, ours, 0, 1)
    for p, q in zip(ours, reference, strict=True):
        optimizer.state[p]["step"] = 0
        q.grad = None
    torch_optimizer = torch.optim.AdamW(reference, lr=0.01, weight_decay=0.0)
    run(torch_optimizer, reference, 0, 1)
    run(optimizer, ours, 1, 100)
    run(torch_optimizer, reference, 1, 100)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours[0], reference[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("through_file", [False, True])
def test_state_goes_to_torch_and_continues(make, adam_w_mode, amsgrad, through_file):
    options = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": amsgrad}
    ours = make_params()
    optimizer = make(ours, adam_w_mode=adam_w_mode, **options)
    run(optimizer, ours, 0, 5)
    state_dict = optimizer.state_dict()
    if through_file:
        file = io.BytesIO()
        torch.save(state_dict, file)
        file.seek(0)
        state_dict = torch.load(file, weights_only=True)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    torch_optimizer = theirs(adam_w_mode)(copies, lr=1.0)
    torch_optimizer.load_state_dict(state_dict)
    assert torch_optimizer.param_groups[0]["lr"] == 0.01
    assert torch_optimizer.param_groups[0]["decoupled_weight_decay"] is adam_w_mode
    if not through_file:  # torch keeps the tensors of a state dict; ours must not share them from here on
        for state in torch_optimizer.state.values():
            for key, value in state.items():
                state[key] = value.clone()
    run(optimizer, ours, 5, 15)
    run(torch_optimizer, copies, 5, 15)
    for p, q in zip(ours, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert torch_optimizer.state[q]["step"].item() == 15


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("how", [{}, {"fused": True}, {"foreach": True}], ids=["plain", "fused", "foreach"])
def test_state_comes_from_torch_and_continues(make, adam_w_mode, how):
    options = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}
    reference = make_params()
    torch_optimizer = theirs(adam_w_mode)(reference, **how, **options)
    run(torch_optimizer, reference, 0, 5)
    ours = [torch.nn.Parameter(p.detach().clone()) for p in reference]
    optimizer = make(ours, lr=1.0, adam_w_mode=not adam_w_mode)
    optimizer.load_state_dict(torch_optimizer.state_dict())
    assert optimizer.param_groups[0]["adam_w_mode"] is adam_w_mode
    assert optimizer.param_groups[0]["amsgrad"] is True
    run(torch_optimizer, reference, 5, 15)
    run(optimizer, ours, 5, 15)
    for p, q in zip(ours, reference, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert optimizer.state[p]["step"].item() == 15


@pytest.mark.parametrize("master", [None, "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_keep_float32_moments(dtype, master):
    """Loaded by ours the moments are the very float32 numbers; torch's own loading would have cut them to 16 bits."""
    ours = make_params(dtype)
    optimizer = FusedAdam(ours, lr=0.01, master=master)
    run(optimizer, ours, 0, 3)
    other = make_params(dtype, seed=1)
    again = FusedAdam(other, master=master)
    again.load_state_dict(optimizer.state_dict())
    for p, q in zip(ours, other, strict=True):
        assert optimizer.state[p].keys() == again.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert again.state[q][key].dtype == torch.float32
            assert torch.equal(again.state[q][key], value)
            assert value.numel() == 0 or again.state[q][key].data_ptr() != value.data_ptr()
    assert any((optimizer.state[p]["exp_avg"] != optimizer.state[p]["exp_avg"].to(dtype)).any() for p in ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_exchange_with_torch(dtype):
    reference = make_params(dtype)
    torch_optimizer = torch.optim.AdamW(reference, lr=0.01, eps=1e-4)
    run(torch_optimizer, reference, 0, 3)
    ours = [torch.nn.Parameter(p.detach().clone()) for p in reference]
    optimizer = FusedAdam(ours)
    optimizer.load_state_dict(torch_optimizer.state_dict())  # upcasts are silent: warnings are errors here
    for p, q in zip(ours, reference, strict=True):
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(optimizer.state[p]["exp_avg"], torch_optimizer.state[q]["exp_avg"].float())
    back = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in ours])
    back.load_state_dict(optimizer.state_dict())
    params = back.param_groups[0]["params"]
    run(back, params, 3, 6)
    run(torch_optimizer, reference, 3, 6)
    for p, q in zip(params, reference, strict=True):
        assert torch.equal(p, q)


def test_a_master_that_went_through_torch_is_stale():
    ours = make_params(torch.bfloat16)
    optimizer = FusedAdam(ours, lr=0.01, master="fp32")
    run(optimizer, ours, 0, 3)
    torch_optimizer = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in ours])
    torch_optimizer.load_state_dict(optimizer.state_dict())
    params = torch_optimizer.param_groups[0]["params"]
    run(torch_optimizer, params, 3, 10)
    again = FusedAdam(params, lr=0.01, master="fp32")
    with pytest.warns(UserWarning, match="stale"):
        again.load_state_dict(torch_optimizer.state_dict())
    assert all("master" not in again.state[p] for p in params)
    before = [p.detach().float() for p in params]
    again.param_groups[0]["lr"] = 0.0
    run(again, params, 10, 11)
    assert all(torch.equal(again.state[p]["master"], b) for p, b in zip(params, before, strict=True))


def test_downcasts_warn():
    reference = [torch.nn.Parameter(p.detach().double()) for p in make_params()]
    torch_optimizer = torch.optim.Adam(reference)
    run(torch_optimizer, reference, 0, 2)
    optimizer = FusedAdam(make_params())
    with pytest.warns(UserWarning, match=r"state\[0\].exp_avg is rounded from float64 to float32 \(and \d+ more"):
        optimizer.load_state_dict(torch_optimizer.state_dict())


def test_a_master_that_nobody_keeps_warns():
    ours = make_params(torch.bfloat16)
    optimizer = FusedAdam(ours, master="fp32")
    run(optimizer, ours, 0, 2)
    again = FusedAdam(make_params(torch.bfloat16))
    with pytest.warns(UserWarning, match="master is left out"):
        again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["master"] is None
    again.load_state_dict(FusedAdam(make_params(torch.bfloat16)).state_dict())


def test_loading_keeps_the_groups_and_their_order():
    params = make_params()
    optimizer = FusedAdam([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "name": "rest"}])
    groups = list(optimizer.param_groups)
    other = make_params()
    source = torch.optim.AdamW([{"params": other[:2], "lr": 0.3}, {"params": other[2:], "betas": (0.5, 0.6)}])
    run(source, other, 0, 1)
    optimizer.load_state_dict(source.state_dict())
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    assert [g["lr"] for g in optimizer.param_groups] == [0.3, 1e-3]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    assert optimizer.param_groups[1]["name"] == "rest"
    assert torch.equal(optimizer.state[params[3]]["exp_avg"], source.state[other[3]]["exp_avg"])


def test_state_dict_hooks_run():
    params = make_params()
    optimizer = FusedAdam(params)
    run(optimizer, params, 0, 1)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda opt, sd: {**sd, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda opt, sd: {k: v for k, v in sd.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    state_dict = optimizer.state_dict()
    assert state_dict["extra"] == 1
    optimizer.load_state_dict(state_dict)
    assert seen == ["pre", "loaded"]


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
def test_param_groups_of_torch_mean_what_they_meant(make, adam_w_mode):
    ours, reference = make_params(), make_params()
    optimizer = make(theirs(adam_w_mode)(ours, lr=0.01, weight_decay=0.5).param_groups)
    run(optimizer, ours, 0, 3)
    run(make(reference, lr=0.01, weight_decay=0.5, adam_w_mode=adam_w_mode), reference, 0, 3)
    assert all(torch.equal(p, q) for p, q in zip(ours, reference, strict=True))
    assert optimizer.state_dict()["param_groups"][0]["decoupled_weight_decay"] is adam_w_mode


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
    run(optimizer, params, 0, 1)
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
        run(other, others, 1, 2)
        assert other.state_dict()["state"]["ema"] == {"decay": torch.tensor(0.5)}
        assert set(other.state) == {*others, "tokens", "ema"}


@pytest.mark.parametrize("key, value", [("9.weight", {"step": torch.tensor(1.0)}), (7, 1)])
def test_a_state_of_a_parameter_that_is_not_there_is_no_such_entry(key, value):
    optimizer = FusedAdam(make_params())
    saved = optimizer.state_dict()
    saved["state"][key] = value
    with pytest.raises(ValueError, match=rf"has the key {key!r}; expected one of the ids"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("make", OURS)
def test_a_group_that_is_listed_twice_has_the_same_parameters(make):
    first, second = make_params(), make_params(seed=1)
    ours = make([{"params": first}, {"params": second}], lr=0.01)
    reference = torch.optim.AdamW([{"params": first}, {"params": second}], lr=0.01)
    run(ours, first, 0, 1)
    run(reference, first, 0, 1)
    for optimizer in (ours, reference):
        optimizer.param_groups.extend(optimizer.param_groups[:1])
    saved, expected = ours.state_dict(), reference.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [group["params"] for group in expected["param_groups"]]
    assert list(saved["state"]) == list(expected["state"])
    for source in (saved, expected):
        ours.load_state_dict(source)
        assert ours.state_dict()["state"][0]["step"] == 1
