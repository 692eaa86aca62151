"""AdamStepper: the same bits everywhere, and steps that repeat the last one. Its oracle: tests/optim/test_adam_oracle.py."""

import gc
import itertools
import weakref

import pytest
import torch

from shardcore._native import _C
from tests.support.kernels import DTYPES, SIZES, Lists, bits, each_isa, make_hyper, nothing_written, round_bf16_away

MIXES = list(itertools.product(DTYPES, DTYPES, (False, True), (False, True)))  # param, grad, master, amsgrad


def list_of_every_size(misalign):
    lists = Lists()
    for numel in SIZES:
        for n in range(3):  # a changing third of the mixes for each size
            param, grad, master, amsgrad = MIXES[(numel + 12 * n) % len(MIXES)]
            lists.add(numel, param, grad, master, amsgrad, seed=numel, misalign=misalign)
    return lists


@pytest.mark.cases(2)
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
    _C.AdamStepper().step([], [], [], [], [], [])


STATES = ("exp_avgs", "exp_avg_sqs", "masters", "max_exp_avg_sqs")


def some_lists():
    lists = Lists()
    for i, master in enumerate((True, False, True)):
        lists.add(100 * i + 3, torch.bfloat16, torch.float32, master, amsgrad=i > 0, seed=i, misalign=i)
    return lists


def read(lists, index=(0, 1, 0)):
    keys = [(i, 0) for i in range(len(lists.params))]
    return _C.AdamLists(lists.params, hyper_index=list(index), keys=keys, **{key: getattr(lists, key) for key in STATES})


HYPERS = {"lr": 0.1, "stochastic_rounding": True}


def hypers_at(step, **changes):
    return [make_hyper(**{**HYPERS, **changes, "step": step}), make_hyper(**{**HYPERS, **changes, "step": step + 3})]


@pytest.mark.parametrize("twin", [None, "step", "lists"])
def test_a_repeated_step_has_the_bits_of_a_step(twin):
    ours, other = some_lists(), some_lists()
    stepper, kept = _C.AdamStepper(), read(ours, (0, 0, 0) if twin == "lists" else (0, 1, 0))
    for step in range(1, 4):
        for lists in (ours, other):
            for grad in lists.grads:
                grad.fill_(step / 3)
        stepper.repeat(kept, ours.grads, hypers_at(step + (twin == "step"), grad_scale=0.5))
        other.step(hypers_at(step, grad_scale=0.5), [0, 1, 0], keys=[(i, 0) for i in range(3)])
    assert (bits(ours) == bits(other)) == (twin is None)


def release(lists):
    lists.params[1].untyped_storage().resize_(0)


def other_shape(lists):
    lists.exp_avgs[2].set_(torch.zeros(7))


def shared(lists):
    lists.exp_avg_sqs[1].set_(lists.max_exp_avg_sqs[1])


def other_dtype(lists):
    lists.masters[0].data = lists.masters[0].double()


CHANGED = {
    release: r"params\[1\] has a storage of 0 bytes",
    other_shape: r"exp_avgs\[2\] has shape \[7\]; expected \[203\]",
    shared: r"max_exp_avg_sqs\[1\] has memory that exp_avg_sqs\[1\] has too",
    other_dtype: r"masters\[0\] has dtype Double",
}


@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
def test_tensors_that_changed_since_are_refused(change):
    lists = some_lists()
    stepper, kept = _C.AdamStepper(), read(lists)
    for step in (1, 2):
        stepper.repeat(kept, lists.grads, hypers_at(step))
    change(lists)
    rest = [t for t in lists.all() if t.untyped_storage().nbytes()]
    for _ in range(2):  # a refusal is not remembered as good
        with nothing_written(*rest), pytest.raises((ValueError, TypeError), match=rf"^AdamStepper.step: {CHANGED[change]}"):
            stepper.repeat(kept, lists.grads, hypers_at(3))


def other_weights(params, idle):
    params[0].grad = None
    params[0].data = params[0].detach().half()
    params[0].grad_dtype = None
    params[0].grad = torch.ones(3)


def transposed(params, idle):
    params[1].grad = None
    params[1].data = torch.ones(4, 3).t()
    params[1].grad = torch.ones(4, 3).t()


NOT_PLAIN = {
    "nothing": lambda params, idle: None,
    "missing": lambda params, idle: setattr(params[1], "grad", None),
    "not contiguous": lambda params, idle: setattr(params[1], "grad", torch.ones(3, 4, 2)[..., 0]),
    "transposed": lambda params, idle: setattr(params[1], "grad", torch.ones(4, 3).t()),
    "params transposed": transposed,
    "negative": lambda params, idle: setattr(params[1], "grad", torch.ones(3, 4, dtype=torch.complex64).conj().imag),
    "negative, contiguous": lambda params, idle: setattr(params[1], "grad", torch._neg_view(torch.ones(3, 4))),
    "idle": lambda params, idle: setattr(idle[0], "grad", torch.ones(1)),
    "weights' dtype": other_weights,
}


@pytest.mark.parametrize("change", NOT_PLAIN)
def test_gradients_are_given_only_if_all_are_plain(change):
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, 4))]
    idle = (torch.nn.Parameter(torch.ones(1)),)
    for p in params:
        p.grad = torch.ones_like(p)
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    kept = _C.AdamLists(params, *states, [0, 0])
    NOT_PLAIN[change](params, idle)
    found = kept.plain_grads(idle)
    if change == "nothing":
        assert all(grad is p.grad for grad, p in zip(found, params, strict=True))
    else:
        assert found is None


def test_gradients_may_be_given():
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, 4))]
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    kept = _C.AdamLists(params, *states, [0, 0])
    given = [torch.ones(3, dtype=torch.bfloat16), torch.ones(3, 4)]
    assert kept.plain_grads((), given) == tuple(given)
    for unusual in (
        None,
        1.0,
        torch.ones(4, 3).t(),
        torch.ones(3, 4, dtype=torch.float64),
        torch.ones(12),
        torch.ones(3, 4).to("meta"),
    ):
        assert kept.plain_grads((), [given[0], unusual]) is None


def test_same_objects():
    a, b = torch.ones(1), torch.ones(1)
    assert _C.same_objects([a, b], (a, b))
    assert not _C.same_objects([a, b], [a, a])
    assert not _C.same_objects([a, b], [a])
    assert not _C.same_objects([], 3)
    assert not _C.same_objects({}, [])


@pytest.mark.more
def test_a_cycle_through_the_lists_is_collected():
    class Owner:
        pass

    owner, lists = Owner(), some_lists()
    owner.kept, lists.params[0].owner = read(lists), owner
    gone = weakref.ref(owner)
    del owner, lists
    gc.collect()
    assert gone() is None
    gc.collect()
    _C.AdamLists.__new__(_C.AdamLists)  # without content
    gc.collect()
