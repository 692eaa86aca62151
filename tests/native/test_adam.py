"""AdamStepper against a float64 oracle over all dtype mixes; the same bits for every instruction set, thread count and size."""

import itertools

import pytest
import torch

from shardcore._native import _C
from tests.native.helpers import DTYPES, SIZES, UNIT, Lists, bits, each_isa, make_hyper, round_bf16_away

MIXES = list(itertools.product(DTYPES, DTYPES, (False, True), (False, True)))  # param, grad, master, amsgrad


def oracle_errors(before, after, i, *, lr=0.05, beta1=0.8, beta2=0.97, eps=1e-6, weight_decay=0.2, step=3, grad_scale=0.6,
                  adam_w_mode=True, bias_correction=True, maximize=False):  # fmt: skip
    """Largest errors (m, v, weight) of tensor i, in units of 2^-24 of the magnitudes of each element's terms."""
    weight = before.masters[i] if before.masters[i] is not None else before.params[i]
    new_weight = after.masters[i] if after.masters[i] is not None else after.params[i]
    p, g = weight.double(), before.grads[i].double() * grad_scale * (-1 if maximize else 1)
    g_terms = g.abs()
    if not adam_w_mode:
        g, g_terms = g + weight_decay * p, g_terms + weight_decay * p.abs()
    m = beta1 * before.exp_avgs[i].double() + (1 - beta1) * g
    m_terms = beta1 * before.exp_avgs[i].double().abs() + (1 - beta1) * g_terms
    v = beta2 * before.exp_avg_sqs[i].double() + (1 - beta2) * g * g
    v_terms = beta2 * before.exp_avg_sqs[i].double() + (1 - beta2) * g_terms**2
    second = v if before.max_exp_avg_sqs[i] is None else torch.maximum(before.max_exp_avg_sqs[i].double(), v)
    bc1, bc2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    denominator = (second / bc2).sqrt() + eps
    decayed = p * (1 - lr * weight_decay if adam_w_mode else 1.0)
    p_terms = decayed.abs() + lr / bc1 * m_terms / denominator * (v_terms / v)
    p = decayed - lr / bc1 * m / denominator
    # A weight without a master is rounded to its dtype: one more error, of that dtype.
    storage_unit = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[new_weight.dtype]
    p_error = ((new_weight.double() - p).abs() - p.abs() * storage_unit - (2.0**-25 if storage_unit else 0)).clamp(
        min=0
    ) / p_terms

    def worst(error):
        return (error.nan_to_num(float("inf")).max() / UNIT).item()

    return (
        worst((after.exp_avgs[i].double() - m).abs() / m_terms),
        worst((after.exp_avg_sqs[i].double() - v).abs() / v_terms),
        worst(p_error),
    )


def accepted(errors):
    return errors[0] <= 5 and errors[1] <= 8 and errors[2] <= 16


OPTIONS = [
    {},
    {"adam_w_mode": False},
    {"maximize": True},
    {"bias_correction": False},
    {"step": 1},
    {"step": 1000, "adam_w_mode": False, "maximize": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_dtype_mix_is_within_a_few_units_of_float64(options):
    lists = Lists()
    for n, (param, grad, master, amsgrad) in enumerate(MIXES):
        lists.add(1000, param, grad, master, amsgrad, seed=n)
    after = lists.clone()
    after.step([make_hyper(**options)])
    for i, mix in enumerate(MIXES):
        errors = oracle_errors(lists, after, i, **options)
        assert accepted(errors), (mix, errors)


@pytest.mark.parametrize(
    "broken",
    [
        {"weight_decay": 0.0},
        {"adam_w_mode": False},
        {"step": 4},
        {"bias_correction": False},
        {"beta1": 0.79},
        {"beta2": 0.96},
        {"eps": 1e-2},
        {"grad_scale": 0.61},
        {"maximize": True},
        {"lr": 0.0501},
    ],
    ids=str,
)
def test_oracle_rejects_a_wrong_step(broken):
    lists = Lists()
    lists.add(1000, torch.float32, torch.float32, False, False, seed=1)
    after = lists.clone()
    after.step([make_hyper(**broken)])
    assert not accepted(oracle_errors(lists, after, 0))


def test_oracle_rejects_a_dropped_tail_and_no_step():
    lists = Lists()
    lists.add(257, torch.float32, torch.float32, False, False, seed=1)
    after = lists.clone()
    assert not accepted(oracle_errors(lists, after, 0))
    after.step([make_hyper()])
    after.params[0][256:] = lists.params[0][256:]
    assert not accepted(oracle_errors(lists, after, 0))


def list_of_every_size(misalign):
    lists = Lists()
    for numel in SIZES:
        for n in range(3):  # a changing third of the mixes for each size
            param, grad, master, amsgrad = MIXES[(numel + 12 * n) % len(MIXES)]
            lists.add(numel, param, grad, master, amsgrad, seed=numel, misalign=misalign)
    return lists


@pytest.mark.parametrize("misalign", [0, 1, 3])
def test_isas_and_threads_give_the_same_bits_and_write_nothing_else(misalign):
    lists = list_of_every_size(misalign)
    hypers = [make_hyper(), make_hyper(adam_w_mode=False), make_hyper(stochastic_rounding=True, seed=11)]
    index = [i % 3 for i in range(len(lists.params))]
    keys = [(i, 1000 * i) for i in range(len(lists.params))]
    seen = []
    threads = torch.get_num_threads()
    try:
        with each_isa() as isas:
            for _isa in isas():
                for count in (1, 2, 3):
                    torch.set_num_threads(count)
                    after = lists.clone()
                    after.step(hypers, index, keys=keys)
                    seen.append(bits(after))
    finally:
        torch.set_num_threads(threads)
    assert all(result == seen[0] for result in seen)
    # What lies around each tensor in its storage is still there.
    for t in after.all():
        whole = torch.tensor([], dtype=t.dtype).set_(t.untyped_storage())
        around = torch.cat([whole[: t.storage_offset()], whole[t.storage_offset() + t.numel() :]])
        assert torch.all(around == 7.0)


def test_large_list_over_threads_equals_each_tensor_alone():
    lists = Lists()
    for n, numel in enumerate([0, 100_000, 1, 0, 70_001, 256, 0]):
        param, grad, master, amsgrad = MIXES[(5 * n) % len(MIXES)]
        lists.add(numel, param, grad, master, amsgrad, seed=n)
    together, alone = lists.clone(), lists.clone()
    together.step([make_hyper()])
    for i in range(len(alone.params)):
        names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "max_exp_avg_sqs")
        Lists(*([getattr(alone, name)[i]] for name in names)).step([make_hyper()])
    assert bits(together) == bits(alone)


def test_master_is_the_float32_step_and_the_weight_its_rounding():
    lists = Lists()
    lists.add(5000, torch.float32, torch.bfloat16, False, False, seed=1)
    lists.add(5000, torch.bfloat16, torch.bfloat16, True, False, seed=2)
    lists.add(5000, torch.float16, torch.bfloat16, True, False, seed=3)
    for i in (1, 2):  # the same problem, once as a float32 weight and twice as a master
        for name in ("grads", "exp_avgs", "exp_avg_sqs"):
            getattr(lists, name)[i].copy_(getattr(lists, name)[0])
        lists.masters[i].copy_(lists.params[0])
    lists.step([make_hyper()])
    assert torch.equal(lists.masters[1], lists.params[0])
    assert torch.equal(lists.masters[2], lists.params[0])
    assert torch.equal(lists.params[1], round_bf16_away(lists.params[0]))
    assert torch.equal(lists.params[2], lists.params[0].half())


def test_amsgrad_propagates_nan():
    lists = Lists()
    lists.add(4, torch.float32, torch.float32, False, True, seed=1)
    lists.grads[0][1] = float("nan")
    lists.max_exp_avg_sqs[0][2] = float("nan")
    lists.step([make_hyper()])
    assert lists.max_exp_avg_sqs[0].isnan().tolist() == [False, True, True, False]
    assert lists.params[0].isnan().tolist() == [False, True, True, False]


def test_stochastic_rounding_is_keyed_by_the_whole_parameter():
    def stepped(cut, **changes):
        lists = Lists()
        lists.add(3000, torch.bfloat16, torch.float32, False, False, seed=5)
        index, first = changes.pop("index", 0), changes.pop("first", 0)
        names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
        pieces = Lists(
            *([t for t in getattr(lists, name)[0].split([cut, 3000 - cut])] for name in names), [None] * 2, [None] * 2
        )
        keys = [(index, first), (index, first + cut)]
        pieces.step([make_hyper(stochastic_rounding=True, **({"seed": 3} | changes))], keys=keys)
        return lists.params[0].clone()

    base = stepped(0)
    assert all(torch.equal(stepped(cut), base) for cut in (1, 256, 1000, 3000))
    large = 2**32  # keys go to the kernel in all their bits
    for other in (
        stepped(0, seed=4),
        stepped(0, seed=3 + large),
        stepped(0, index=1),
        stepped(0, index=large),
        stepped(0, first=large),
        stepped(0, first=256 * large),
    ):
        assert 0.1 < (other != base).float().mean() < 0.9


def test_stochastic_rounding_is_unbiased():
    numel = 1 << 18
    lists = Lists()
    lists.add(numel, torch.bfloat16, torch.float32, False, False, seed=6)
    lists.params[0].fill_(1.0)
    for name in ("exp_avgs", "exp_avg_sqs"):
        getattr(lists, name)[0].zero_()
    lists.grads[0].fill_(1.0)
    options = {"weight_decay": 0.0, "step": 1, "lr": 2.0**-9 * 0.3, "eps": 0.0, "grad_scale": 1.0}  # 0.3 of the way below 1
    nearest = lists.clone()
    nearest.step([make_hyper(**options)])
    assert torch.all(nearest.params[0] == 1.0)
    lists.step([make_hyper(**options, stochastic_rounding=True)], keys=[(0, 0)])
    down = (lists.params[0] == 1.0 - 2.0**-8).double().mean().item()
    assert torch.all((lists.params[0] == 1.0) | (lists.params[0] == 1.0 - 2.0**-8))
    assert abs(down - 0.15) < 5 * (0.15 * 0.85 / numel) ** 0.5


def test_flush_denormal_of_the_caller_changes_nothing():
    lists = Lists()
    lists.add(1000, torch.float32, torch.float32, False, False, seed=7)
    lists.exp_avg_sqs[0].fill_(1e-40)
    lists.exp_avgs[0].fill_(-1e-41)
    lists.grads[0].fill_(1e-39)
    want, got = lists.clone(), lists.clone()
    want.step([make_hyper(eps=1e-40)])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        got.step([make_hyper(eps=1e-40)])
    finally:
        torch.set_flush_denormal(False)
    assert bits(got) == bits(want)
    assert want.exp_avgs[0].abs().max() > 0


def test_autograd_hears_of_the_write():
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad():
        _C.AdamStepper().step([weight], [torch.ones(4)], [torch.zeros(4)], [torch.zeros(4)], [make_hyper()], [0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_empty_lists():
    stepper = _C.AdamStepper()
    stepper.step([], [], [], [], [], [])
    assert stepper.table_builds == 0
