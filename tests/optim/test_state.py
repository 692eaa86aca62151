"""`optimizer.state` behaves as the dict of plain dicts that torch.optim keeps, whatever way it is
read, written or copied.
"""

import copy
import pickle

import pytest
import torch

from shardcore.optim import FusedAdam
from shardcore.optim.state import ParamState, StepCount
from tests.support.params import params_of

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture
def state():
    s = ParamState(step=3, exp_avg=torch.ones(2), exp_avg_sq=torch.zeros(2))
    assert type(dict.__getitem__(s, "step")) is StepCount
    return s


READS = {
    "getitem": lambda s: s["step"],
    "get": lambda s: s.get("step"),
    "items": lambda s: dict(s.items())["step"],
    "values": lambda s: next(iter(s.values())),
    "dict": lambda s: dict(s)["step"],
    "unpacked": lambda s: {**s}["step"],
    "keywords": lambda s: (lambda **kw: kw)(**s)["step"],
    "copy": lambda s: s.copy()["step"],
    "copy.copy": lambda s: copy.copy(s)["step"],
    "deepcopy": lambda s: copy.deepcopy(s)["step"],
    "pickle": lambda s: pickle.loads(pickle.dumps(s))["step"],
    "or": lambda s: (s | {})["step"],
    "ror": lambda s: ({} | s)["step"],
    "update of a dict": lambda s: [d := {}, d.update(s), d["step"]][-1],
    "setdefault": lambda s: s.setdefault("step", 9),
    "pop": lambda s: s.pop("step"),
    "comprehension": lambda s: {k: v for k, v in s.items()}["step"],
}


@pytest.mark.parametrize("how", READS)
def test_every_way_to_read_step_gives_a_tensor(state, how):
    step = READS[how](state)
    assert isinstance(step, torch.Tensor)
    assert step.dtype == torch.float32
    assert step.shape == ()
    assert step.item() == 3


def test_reads_are_independent(state):
    state["step"].add_(1)
    assert state["step"] == 3
    before = state["step"]
    state.count.value += 1
    assert before == 3
    assert state["step"] == 4


@pytest.mark.parametrize("value", [7, 7.0, torch.tensor(7.0), torch.tensor([7])])
def test_step_takes_numbers_and_tensors(state, value):
    other = ParamState()
    other.count = state.count
    state["step"] = value
    assert state["step"].item() == 7
    assert other["step"].item() == 3


@pytest.mark.parametrize("value", [-1, 0.5, float("nan"), float("inf"), torch.ones(2), "3", True])
def test_step_refuses_what_is_no_count(state, value):
    with pytest.raises((ValueError, TypeError), match="step"):
        state["step"] = value
    assert state["step"] == 3


# What a dict can do, to `optimizer.state` (with parameters for keys) and to the dicts in it.
OPERATIONS = {
    "[]": lambda d, key, new: d[key],
    "[] =": lambda d, key, new: d.__setitem__(key, new),
    "del": lambda d, key, new: d.__delitem__(key),
    "in": lambda d, key, new: (key in d, len(d), bool(d), list(d), list(reversed(d))),
    "get": lambda d, key, new: (d.get(key), d.get(key, new)),
    "setdefault": lambda d, key, new: d.setdefault(key, new),
    "pop": lambda d, key, new: d.pop(key),
    "pop with a default": lambda d, key, new: d.pop(key, new),
    "popitem": lambda d, key, new: d.popitem(),
    "clear": lambda d, key, new: d.clear(),
    "update": lambda d, key, new: d.update({key: new}),
    "views": lambda d, key, new: (list(d.keys()), list(d.items()), list(d.values())),
    "copy": lambda d, key, new: d.copy(),
    "copy.copy": lambda d, key, new: copy.copy(d),
    "dict": lambda d, key, new: (dict(d), {**d}, d == d.copy(), d != d.copy()),
    "|": lambda d, key, new: (d | {key: new}, {key: new} | d),
    "|=": lambda d, key, new: d.__ior__({key: new}),
    "repr": lambda d, key, new: repr(d) if "exp_avg" in d else type(d.copy()),
}


def seen(value):
    """What a user sees of a result, to be compared."""
    if isinstance(value, torch.nn.Parameter):
        return f"the parameter of {value.numel()}"
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, dict):
        return [(seen(key), seen(entry)) for key, entry in value.items()]
    return [seen(item) for item in value] if isinstance(value, list | tuple) else value


def result(operation, state, param, key, inside):
    try:
        if inside:
            return seen(operation(state[param], key, torch.tensor(2.0)))
        return seen(operation(state, param, {}))
    except KeyError as error:
        return type(error)


NAMES = st.sampled_from(["step", "exp_avg", "mine"])


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*OPERATIONS]), st.integers(0, 2), NAMES, st.booleans())))
def test_the_states_behave_as_torchs(operations):
    optimizers = [kind(params_of(1, 2, 3)) for kind in (FusedAdam, torch.optim.Adam)]
    for optimizer in optimizers:
        for param in optimizer.param_groups[0]["params"][:2]:
            param.grad = torch.ones_like(param)
        optimizer.step()
    for name, index, key, inside in operations:
        ours, theirs = (
            result(
                OPERATIONS[name],
                optimizer.state,
                optimizer.param_groups[0]["params"][index],
                key,
                inside,
            )
            for optimizer in optimizers
        )
        assert ours == theirs, name
        assert seen(optimizers[0].state) == seen(optimizers[1].state), name
    assert type(optimizers[0].state) is type(optimizers[1].state)


def test_copies_share_as_their_originals(state):
    other = ParamState(exp_avg=torch.ones(1))
    other.count = state.count
    for a, b in (copy.deepcopy([state, other]), pickle.loads(pickle.dumps([state, other]))):
        assert type(a) is ParamState
        assert a.count is b.count
        assert a.count is not state.count
        assert a["exp_avg"].data_ptr() != state["exp_avg"].data_ptr()
    assert type(state.copy()) is dict
    assert state.copy()["exp_avg"] is state["exp_avg"]
