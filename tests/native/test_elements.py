"""The kernel of SGD, Adagrad and Lion: float64 oracles, every dtype and size, the same bits at
every place.
"""

import itertools
from functools import partial

import pytest
import torch

from shardcore._native import _C
from tests.support.choice import few
from tests.support.kernels import DTYPES, SIZES, UNIT, tensor
from tests.support.placement import (
    device_of,
    each_place,
    first_difference,
    moved,
    running_at,
    storage_of,
)

OPTIONS = {
    "grad_scale": 0.6,
    "l2": 0.3,
    "decay": 0.99,
    "lr": 0.05,
    "of_direction": (0.8, 0.2),
    "of_state": (0.9, 0.3),
    "eps": 1e-3,
}
FORMULAS = ("sgd", "momentum", "nesterov", "adagrad", "lion")
# A formula, dtypes of weight, gradient and state, and whether there is a float32 master: any two of
# these values are together.
MIXES = few([*itertools.product(FORMULAS, DTYPES, DTYPES, DTYPES, (False, True))])


def _lists(mix, sizes, seed=0):
    """Parameters, gradients, states and masters of these sizes, not aligned, with room around
    them.
    """
    formula, param, grad, state, master = mix
    rng = torch.Generator().manual_seed(seed)
    lists = [
        [tensor(n, dtype, rng, misalign=n % 4) for n in sizes] for dtype in (param, grad, state)
    ]
    for one in lists[2]:
        one.abs_()  # Adagrad's root
    lists[2] = [None] * len(sizes) if formula == "sgd" else lists[2]
    return [
        *lists,
        [tensor(n, torch.float32, rng, misalign=n % 3) if master else None for n in sizes],
    ]


def _flat(lists):
    return [t for items in lists for t in items if t is not None]


def _moved(lists, device="cpu"):
    return [
        [None if t is None else moved(t, torch.device(device)) for t in items] for items in lists
    ]


def _step(formula, lists, **changes):
    _C.element_step(*lists, _C.ElementScalars(formula, **(OPTIONS | changes)))


@each_place
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_every_place_gives_the_same_bits_and_writes_nothing_else(place, mix):
    lists = _lists(mix, [0, *SIZES, 70_001, 0])
    before, there = _moved(lists), _moved(lists, device_of(place))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        _step(mix[0], lists)
        with running_at(place):
            torch.set_num_threads(3)
            _step(mix[0], there)
    finally:
        torch.set_num_threads(threads)
    # whole storages: what lies around the tensors, too
    assert first_difference(_flat(there), _flat(lists)) is None
    for new, old in zip(_flat(lists), _flat(before), strict=True):
        inside = slice(new.storage_offset(), new.storage_offset() + new.numel())
        whole, was = storage_of(new), storage_of(old).clone()
        was[inside] = whole[inside]
        assert torch.equal(whole, was)
    _step(mix[0], before, grad_scale=0.61)  # a twin
    assert first_difference(_flat(before), _flat(lists)) is not None


def _oracle(formula, weight, grad, state):
    """Return weight and state after a step, and bounds of a float32 step's errors of both, from
    float64 inputs.

    A bound: each rounded operation has UNIT of its result, options have UNIT each.
    """
    o = OPTIONS
    g = o["grad_scale"] * grad
    scale = g.abs()
    if o["l2"]:
        g = g + o["l2"] * weight
        scale = scale + (o["l2"] * weight).abs()
    (a1, b1), (a2, b2), lr = o["of_direction"], o["of_state"], o["lr"]
    off_g = 3 * UNIT * scale
    if formula == "lion":
        direction = a1 * state + b1 * g
        unclear = direction.abs() <= 4 * UNIT * ((a1 * state).abs() + b1 * scale) + b1 * off_g
        new = o["decay"] * weight - lr * direction.sign()
        off = UNIT * (3 * (o["decay"] * weight).abs() + 2 * lr)
        after = a2 * state + b2 * g
        return (
            new,
            after,
            torch.where(unclear, torch.inf, off),
            4 * UNIT * ((a2 * state).abs() + b2 * scale) + b2 * off_g,
        )
    if formula == "adagrad":
        after = state + g * g
        off_after = 2 * UNIT * after + 2 * g.abs() * off_g
        new = weight - lr * g / (after.sqrt() + o["eps"])
        move = lr * scale / (after.sqrt() + o["eps"])
        return new, after, UNIT * new.abs() + 16 * UNIT * move + off_after / after * move, off_after
    if formula == "sgd":
        return (
            weight - lr * g,
            state,
            UNIT * (2 * weight.abs() + 3 * lr * scale) + lr * off_g,
            torch.zeros_like(state),
        )
    after = a2 * state + b2 * g
    off_after = 4 * UNIT * ((a2 * state).abs() + b2 * scale) + b2 * off_g
    move, off = (
        (g + a1 * after, off_g + off_after + 3 * UNIT * (scale + after.abs()))
        if formula == "nesterov"
        else (after, off_after)
    )
    return (
        weight - lr * move,
        after,
        UNIT * (2 * weight.abs() + 3 * lr * move.abs()) + lr * off,
        off_after,
    )


def _broken(formula, lists, inputs):
    """Whether float32 results are further from the formula than their roundings explain."""
    weight, state, off_weight, off_state = _oracle(formula, *inputs)
    wrong = (lists[0][0].double() - weight).abs() > off_weight
    if formula != "sgd":
        wrong |= (lists[2][0].double() - state).abs() > off_state
    return bool(wrong.any())


@pytest.mark.parametrize("formula", FORMULAS)
def test_an_element_is_as_near_to_float64_as_its_roundings_allow(formula):
    lists = _lists((formula, torch.float32, torch.float32, torch.float32, False), [70_001])
    inputs = [(torch.zeros(70_001) if one[0] is None else one[0]).double() for one in lists[:3]]
    step = partial(_step, formula)
    twins = {"lr": 0.0500002, "grad_scale": 0.600001, "l2": 0.30001}
    twins |= {"of_state": (0.9, 0.300002)} if formula not in ("sgd", "adagrad") else {}
    twins |= {"of_direction": (0.80001, 0.2)} if formula == "nesterov" else {}
    twins |= {"of_direction": (0.81, 0.2), "decay": 0.990001} if formula == "lion" else {}
    twins |= {"eps": 1.001e-3} if formula == "adagrad" else {}
    for name, value in twins.items():
        twin = _moved(lists)
        step(twin, **{name: value})
        assert _broken(formula, twin, inputs), name
    step(lists)
    assert not _broken(formula, lists, inputs)


def test_a_master_is_what_is_stepped_and_the_weight_its_rounding():
    for formula in FORMULAS:
        lists = _lists((formula, torch.bfloat16, torch.bfloat16, torch.float32, True), [70_001])
        alone = [
            [lists[3][0].clone()],
            [lists[1][0].float()],
            [one if one is None else one.clone() for one in lists[2]],
            [None],
        ]
        _step(formula, lists)
        _step(formula, alone)
        assert torch.equal(lists[3][0], alone[0][0])
        rounded = torch.empty_like(lists[0][0])
        _C.cast([rounded], [alone[0][0]])
        assert torch.equal(lists[0][0], rounded)


def test_a_nan_stays_and_the_sign_of_nothing_is_nothing():
    for formula, expected in (
        ("lion", [1.0, 0.5]),
        ("momentum", [1.0, 0.5]),
        ("sgd", [1.0, 0.5]),
        ("adagrad", [1.0, 0.5]),
    ):
        weight, state = torch.ones(3), torch.zeros(3)
        scalars = _C.ElementScalars(
            formula, lr=0.5, of_direction=(0.9, 0.1), of_state=(0.9, 1.0), eps=1e-30
        )
        grad = torch.tensor([float("nan"), 0.0, 1.0])
        _C.element_step([weight], [grad], [None if formula == "sgd" else state], [None], scalars)
        assert weight[0].isnan()
        assert weight[1:].tolist() == expected, formula
