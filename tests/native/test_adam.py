"""AdamStepper: keys of random bits, and steps that repeat the last one. Its bits and oracle:
tests/cpp, tests/optim.
"""

import gc
import itertools
import weakref

import pytest
import torch

from shardcore._native import _C
from tests.support.kernels import DTYPES, Lists, bits, make_hyper, nothing_written

# param, grad, master, amsgrad
MIXES = list(itertools.product(DTYPES, DTYPES, (False, True), (False, True)))


def test_stochastic_rounding_is_keyed_by_the_whole_parameter():
    def stepped(cut, **changes):
        lists = Lists()
        lists.add(3000, torch.bfloat16, torch.float32, False, False, seed=5)
        index, first = changes.pop("index", 0), changes.pop("first", 0)
        names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
        pieces = Lists(
            *([t for t in getattr(lists, name)[0].split([cut, 3000 - cut])] for name in names),
            [None] * 2,
            [None] * 2,
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


def test_empty_lists():
    _C.AdamStepper().step([], [], [], [], [], [])


STATES = ("exp_avgs", "exp_avg_sqs", "masters", "max_exp_avg_sqs")


def some_lists():
    lists = Lists()
    for i, master in enumerate((True, False, True)):
        lists.add(
            100 * i + 3, torch.bfloat16, torch.float32, master, amsgrad=i > 0, seed=i, misalign=i
        )
    return lists


def read(lists, index=(0, 1, 0)):
    keys = [(i, 0) for i in range(len(lists.params))]
    return _C.AdamLists(
        lists.params,
        hyper_index=list(index),
        keys=keys,
        **{key: getattr(lists, key) for key in STATES},
    )


HYPERS = {"lr": 0.1, "stochastic_rounding": True}


def hypers_at(step, **changes):
    return [
        make_hyper(**{**HYPERS, **changes, "step": step}),
        make_hyper(**{**HYPERS, **changes, "step": step + 3}),
    ]


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
        with (
            nothing_written(*rest),
            pytest.raises((ValueError, TypeError), match=rf"^AdamStepper.step: {CHANGED[change]}"),
        ):
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
    "negative": lambda params, idle: setattr(
        params[1], "grad", torch.ones(3, 4, dtype=torch.complex64).conj().imag
    ),
    "negative, contiguous": lambda params, idle: setattr(
        params[1], "grad", torch._neg_view(torch.ones(3, 4))
    ),
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
