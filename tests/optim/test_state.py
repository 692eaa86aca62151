"""ParamState behaves as the plain dict that torch.optim keeps, whatever way it is read, written
or copied.
"""

import copy
import pickle

import pytest
import torch

from shardcore.optim.state import ParamState, StepCount


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


def test_it_is_a_dict(state):
    assert isinstance(state, dict)
    assert list(state) == list(state.keys()) == ["step", "exp_avg", "exp_avg_sq"]
    assert len(state) == 3
    assert "step" in state
    assert "master" not in state
    assert state.get("master") is None
    assert state.get("master", 1) == 1
    with pytest.raises(KeyError):
        state["master"]
    with pytest.raises(KeyError):
        state.pop("master")
    assert state.pop("master", 5) == 5
    del state["exp_avg"]
    state.update({"step": 9}, exp_avg=torch.ones(1))
    state |= {"master": torch.ones(1)}
    assert state["step"] == 9
    assert state.popitem()[0] == "master"
    assert state.setdefault("new", 4) == 4
    assert "tensor(9.)" in repr(state)
    state.clear()
    assert not state


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
