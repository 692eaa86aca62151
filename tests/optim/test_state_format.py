"""Reduced states: the split master, bfloat16 and 8-bit moments, against float32 ones and through
state dicts.
"""

import copy
import io
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardcore._native import _C
from shardcore.optim import CPUAdam, FusedAdam
from shardcore.optim.state_format import StateFormat, range_of, values_of
from tests.support.params import grads_of, params_of, same, snapshot

KINDS = [
    {"master": "split"},
    {"state_dtype": "bf16"},
    {"state_dtype": "8bit"},
    {"state_dtype": "bf16", "master": "split"},
    {"state_dtype": "8bit", "master": "split"},
    {"state_dtype": "8bit", "stochastic_rounding": True},
]
SIZES = (1, 255, 256, 257, 0, 3000)
each_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values()))
)


def made(kind, dtype=torch.bfloat16, **options):
    params = params_of(*SIZES, dtype=dtype)
    return params, CPUAdam(params, lr=0.01, weight_decay=0.1, **kind, **options)


def train(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        optimizer.step(grads=grads_of(params, seed=step), grad_scale=0.5, max_norm=20.0)


def test_split_and_float32_masters_are_the_same_bits():
    results = []
    for master in ("fp32", "split"):
        params, optimizer = made({"master": master})
        train(optimizer, params, 60)
        masters = [entry["master"] for entry in optimizer.state_dict()["state"].values()]
        results.append([p.detach() for p in params] + masters)
    assert same(*results)
    assert all(t.dtype == torch.float32 for t in results[1][len(SIZES) :])
    # The twin: a remainder that is lost once.
    params, optimizer = made({"master": "split"})
    train(optimizer, params, 30)
    optimizer.state[params[5]]["remainder"].zero_()
    train(optimizer, params, 30, start=30)
    assert not same(results[0][: len(SIZES)], [p.detach() for p in params])


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def flat_state(source, target):
    """Load source's state in torch.distributed.checkpoint's flattened form, which knows each
    optimizer's own keys only.
    """
    models = [
        torch.nn.ParameterList(optimizer.param_groups[0]["params"])
        for optimizer in (source, target)
    ]
    set_optimizer_state_dict(
        models[1], target, get_optimizer_state_dict(models[0], source, options=FLAT), options=FLAT
    )


@pytest.mark.parametrize(
    "kind",
    [{"state_dtype": "8bit"}, {"state_dtype": "bf16"}, {"state_dtype": "8bit", "master": "fp32"}],
)
def test_flattened_states_are_restored(kind):
    params, optimizer = made(kind)
    train(optimizer, params, 3)
    _, other = made(kind)
    flat_state(optimizer, other)
    saved = [
        [entry[key] for entry in o.state_dict()["state"].values() for key in sorted(entry)]
        for o in (optimizer, other)
    ]
    assert same(*saved)


def test_a_flattened_state_without_its_master_is_refused():
    (params, split), (_, float32) = made({"master": "split"}), made({"master": "fp32"})
    train(split, params, 3)
    flat_state(split, float32)
    masters = [
        [entry["master"] for entry in optimizer.state_dict()["state"].values()]
        for optimizer in (split, float32)
    ]
    assert same(*masters)
    other_params, other = made({"master": "split"})
    before = [p.detach().clone() for p in other_params]
    with pytest.raises(ValueError, match="unknown key 'remainder'"):
        flat_state(split, other)
    assert same(before, [p.detach() for p in other_params])


def test_a_step_count_that_no_float32_holds_is_restored():
    """It keys the random bits."""
    params, optimizer = made({"state_dtype": "8bit"})
    train(optimizer, params, 1)
    for state in optimizer.state.values():
        state["step"] = 2**24 + 2
    train(optimizer, params, 1)
    other_params, other = made({"state_dtype": "8bit"})
    with torch.no_grad():
        for p, q in zip(params, other_params, strict=True):
            q.copy_(p)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state[other_params[0]].count.value == 2**24 + 3
    train(optimizer, params, 2)
    train(other, other_params, 2)
    assert same([p.detach() for p in params], [p.detach() for p in other_params])
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.state[params[0]]["step"] == 2**24 + 5


def test_a_range_of_8_bit_states_has_the_scales_of_its_blocks():
    whole = StateFormat(state_dtype="8bit").new(1000, lambda n, dtype: torch.zeros(n, dtype=dtype))
    codes, scales = _C.encode_moment(torch.linspace(-7.0, 3.0, 1000), torch.int8)
    whole["exp_avg"].copy_(codes)
    whole["exp_avg_scale"].copy_(scales)
    weight = torch.zeros(1000)
    for start, numel in ((0, 1000), (0, 256), (256, 512), (768, 232), (256, 10)):
        part = values_of(range_of(whole, start, numel), "exp_avg", weight[start : start + numel])
        assert torch.equal(part, values_of(whole, "exp_avg", weight)[start : start + numel])


def test_what_states_keep():
    params, optimizer = made({"state_dtype": "8bit", "master": "split"})
    train(optimizer, params, 1)
    state = optimizer.state[params[3]]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in state.items()} == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.int8, (257,)),
        "exp_avg_sq": (torch.uint8, (257,)),
        "exp_avg_scale": (torch.float32, (2,)),
        "exp_avg_sq_scale": (torch.float32, (2,)),
        "remainder": (torch.int16, (257,)),
    }
    params, optimizer = made({"state_dtype": "bf16", "master": "split"}, dtype=torch.float32)
    train(optimizer, params, 1)
    # a float32 weight is its own master
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[params[0]]["exp_avg_sq"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_reduced_moments_are_the_float32_ones_within_one_step_of_their_map(state_dtype, dtype):
    results = {}
    for kept in ("fp32", state_dtype):
        params, optimizer = made({"state_dtype": kept}, dtype=dtype)
        train(optimizer, params, 1)
        results[kept] = [
            [entry[key] for entry in optimizer.state_dict()["state"].values()]
            for key in ("exp_avg", "exp_avg_sq")
        ]
        results[kept, "params"] = [p.detach() for p in params]
    # The weights of the first step come from unrounded moments.
    assert same(results["fp32", "params"], results[state_dtype, "params"])
    for lowest, exact_list, kept_list in zip(
        (2.0**-17, 2.0**-33), results["fp32"], results[state_dtype], strict=True
    ):
        for exact, kept in zip(exact_list, kept_list, strict=True):
            exact, kept = exact.double(), kept.double()
            if state_dtype == "bf16":
                limit = exact.abs() * 2.0**-7
            else:
                largest = (
                    torch.cat([b.abs().max().expand_as(b) for b in exact.split(256)])
                    if exact.numel()
                    else exact
                )
                # 3 bits of mantissa, then equal steps
                limit = torch.maximum(exact.abs() * 2.0**-3, 2 * largest * lowest)
            assert ((kept - exact).abs() <= limit).all()
            assert exact.numel() < 100 or not torch.equal(kept, exact)


@each_kind
def test_training_goes_on_from_a_state_dict_with_the_same_bits(kind):
    params, optimizer = made(kind, seed=9)
    train(optimizer, params, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other_params = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = CPUAdam(other_params, lr=0.5, **kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(saved)
    for entry, again in zip(
        optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
    ):
        assert entry.keys() == again.keys()
        assert all(torch.equal(entry[key], again[key]) for key in entry)
    train(optimizer, params, 5, start=5)
    train(other, other_params, 5, start=5)
    assert same(snapshot(optimizer), snapshot(other))


@each_kind
def test_deepcopy_keeps_every_state(kind):
    params, optimizer = made(kind)
    train(optimizer, params, 3)
    copied_params, copied = copy.deepcopy((params, optimizer))
    train(optimizer, params, 3, start=3)
    train(copied, copied_params, 3, start=3)
    assert same(snapshot(optimizer), snapshot(copied))


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_exchange_with_torch_both_ways(state_dtype):
    params, optimizer = made({"state_dtype": state_dtype}, dtype=torch.float32)
    train(optimizer, params, 4)
    theirs = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in params])
    theirs.load_state_dict(optimizer.state_dict())
    for number, entry in optimizer.state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(theirs.state_dict()["state"][number][key], entry[key].float())
    for p, grad in zip(theirs.param_groups[0]["params"], grads_of(params), strict=True):
        p.grad = grad
    theirs.step()
    kept = "bfloat16|8-bit codes"
    with pytest.warns(
        UserWarning,
        match=rf"state\[[01]\].exp_avg.* is rounded from float32 to ({kept}) \(and \d+ more",
    ) as caught:
        optimizer.load_state_dict(theirs.state_dict())
    assert caught[0].filename == __file__
    train(optimizer, params, 1)


def test_split_weights_that_are_set_to_zero_are_zero():
    """Half of them have remainders below zero, which would make NaN with the bits of a zero."""
    param = params_of(1000, dtype=torch.bfloat16)[0]
    optimizer = CPUAdam([param], lr=0.01, master="split")
    param.grad = torch.randn(1000).bfloat16()
    optimizer.step()
    assert (optimizer.state[param]["remainder"] < 0).any()
    with torch.no_grad():
        param.mul_(torch.tensor([0.0, -0.0]).repeat(500))
    param.grad = torch.zeros(1000, dtype=torch.bfloat16)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert (param == 0).all()


def test_a_split_master_that_is_loaded_sets_the_weights():
    params, optimizer = made({"master": "fp32"})
    train(optimizer, params, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    others = params_of(*SIZES, dtype=torch.bfloat16)
    other = CPUAdam(others, master="split")
    other.load_state_dict(saved)
    assert same([p.detach() for p in params], [p.detach() for p in others])
    assert torch.equal(other.state_dict()["state"][5]["master"], saved["state"][5]["master"])


def test_bits_of_reduced_moments_depend_on_the_seed_only():
    def run(threads=1, **options):
        old = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            params = params_of(70_000, 300)
            optimizer = FusedAdam(params, state_dtype="8bit", **options)
            train(optimizer, params, 3)
        finally:
            torch.set_num_threads(old)
        return snapshot(optimizer)

    base = run()
    assert same(base, run(threads=2))
    isa = _C.cpu_isa()
    try:
        for other in _C.cpu_isas():
            _C.set_cpu_isa(other)
            assert same(base, run())
    finally:
        _C.set_cpu_isa(isa)
    assert not same(base, run(seed=1))


def test_a_nan_stays_in_its_block():
    params = params_of(1024)
    optimizer = CPUAdam(params, state_dtype="8bit")
    (grad,) = grads_of(params)
    optimizer.step(grads=[grad])
    grad[300] = float("nan")
    optimizer.step(grads=[grad])
    assert params[0].isnan().nonzero().flatten().tolist() == [300]
    optimizer.step(grads=[grad])
    assert params[0].isnan().nonzero().flatten().tolist() == list(range(256, 512))


def test_bad_combinations_are_refused():
    half = params_of(4, dtype=torch.float16)
    with pytest.raises(
        ValueError, match=r"params\[0\] has dtype float16 with master='split'; expected bfloat16"
    ):
        CPUAdam(half, master="split")
    params, optimizer = made({})
    train(optimizer, params, 1)
    optimizer.param_groups[0]["state_dtype"] = "8bit"
    before = snapshot(optimizer)
    with pytest.raises(
        TypeError, match=r"exp_avg has dtype float32; expected int8 for state_dtype='8bit'"
    ):
        train(optimizer, params, 1)
    assert same(before, snapshot(optimizer))
