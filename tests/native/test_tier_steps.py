"""TierSteps: steps whose gradients and weights go through places in a tier, in queues or passed by Adam's own threads."""

from typing import Any

import pytest
import torch

from shardcore._native import _C
from tests.native.helpers import make_hyper, nothing_written

CPU = torch.device("cpu")
KINDS = {"fp32": torch.float32, "bf16 with a master": torch.bfloat16}


class Case:
    """A tier, a chunk's arguments and what a step brings: two parameters of `numel` elements."""

    def __init__(self, kind: str = "fp32", numel: int = 512, passes: bool = True, **simulated: Any) -> None:
        self.tier = _C.HostTier(CPU, **simulated)
        self.steps = _C.TierSteps(self.tier, 3, passes=passes)
        dtype = KINDS[kind]
        self.grads = [torch.randn(10 + numel).to(dtype) for _ in range(2)]  # of which the last elements are meant
        values = [torch.randn(numel) for _ in range(2)]
        self.chunk = {
            "params": list(self.tier.empty(2 * numel, dtype).split(numel)),
            "grads": list(self.tier.empty(2 * numel, dtype).split(numel)),
            "weights": [value.to(dtype) for value in values],
            "exp_avgs": [torch.rand(numel) for _ in range(2)],
            "exp_avg_sqs": [torch.rand(numel) for _ in range(2)],
            "hyper_index": [0, 0],
            "masters": None if kind == "fp32" else values,
            "max_exp_avg_sqs": None,
            "keys": [(0, 0), (1, 0)],
            "exp_avg_scales": None,
            "exp_avg_sq_scales": None,
            "grad_starts": [10, 10],
            "grads_come": True,
            "place": 0,
        }
        self.hypers = [make_hyper()]

    @property
    def written(self) -> list[torch.Tensor]:
        return [*self.chunk["weights"], *self.chunk["exp_avgs"], *self.chunk["exp_avg_sqs"]]

    def step(self, num_threads: int = 0, **changes: Any) -> None:
        self.steps.begin([self.steps.chunk(**self.chunk | changes)], self.grads, self.hypers, num_threads)
        left = self.steps.wait_updated(0, 1)
        if left is not None:
            left.wait()
        self.steps.end()


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_through_places_has_the_same_bits_and_counts_its_copies(kind: str, passes: bool, num_threads: int) -> None:
    case = Case(kind, 50_000, passes)
    plain = {name: [t.clone() for t in case.chunk[name]] for name in ("exp_avgs", "exp_avg_sqs", "masters") if case.chunk[name]}
    plain["params"] = [weight.clone() for weight in case.chunk["weights"]]
    versions = [weight._version for weight in case.chunk["weights"]]
    _C.AdamStepper().step(**plain, grads=[grad[10:] for grad in case.grads], hypers=case.hypers, hyper_index=[0, 0])
    case.step(num_threads)
    for name, values in plain.items():
        assert all(map(torch.equal, case.chunk["weights" if name == "params" else name], values)), name
    nbytes = sum(param.nbytes for param in case.chunk["params"])
    assert (case.tier.bytes_to_tier, case.tier.bytes_from_tier) == (nbytes * (2 if kind == "fp32" else 1), nbytes)
    assert [weight._version for weight in case.chunk["weights"]] == [version + 1 for version in versions]


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"grads": list(torch.zeros(2, 512))}, ValueError, r"grads\[0\] has memory that this tier did not make; expected a place"),
    ({"params": list(torch.zeros(2, 512))}, ValueError, r"params\[0\] has memory that this tier did not make; expected"),
    ({"weights": []}, ValueError, r"weights has 0 items; expected 2 \(one for each of params\)"),
    ({"grads": []}, ValueError, r"grads has 0 items; expected 2 \(one for each of params\)"),
    ({"keys": None}, ValueError, r"keys has 0 items; expected 2 \(one for each of params\)"),
    ({"grad_starts": [0]}, ValueError, r"grad_starts has 1 items; expected 2 \(one for each of params\)"),
    ({"grad_starts": [0, -1]}, ValueError, r"grad_starts\[1\] has -1; expected 0 or more"),
    ({"hyper_index": [0, -1]}, ValueError, r"hyper_index\[1\] has -1; expected an index of hypers"),
    ({"place": 3}, ValueError, "place has 3; expected one of 3 places"),
    (
        {"weights": list(torch.zeros(2, 512).half())},
        TypeError,
        r"params\[0\] has dtype Float; expected Half \(as weights: copies do not cast\)",
    ),
    ({"weights": list(torch.zeros(2, 511))}, ValueError, r"params\[0\] has 512 elements; expected 511 "),
])  # fmt: skip
def test_bad_chunks_are_refused(change: Any, error: type[Exception], message: str) -> None:
    case = Case()
    with nothing_written(*case.written), pytest.raises(error, match="TierSteps.chunk: " + message):
        case.step(**change)


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda c: {"chunks": 3}, TypeError, "chunks has type int; expected a list of TierChunk"),
    (lambda c: {"chunks": [3]}, TypeError, r"chunks\[0\] has type int; expected TierChunk"),
    (lambda c: {"grads": c.grads[:1]}, ValueError, r"grads has 1 items; expected 2 \(one for each of spans\)"),
    (lambda c: {"grads": [*c.grads, c.grads[0]]}, ValueError, r"grads has 3 items; expected 2 \(one for each of spans\)"),
    (lambda c: {"grads": [c.grads[0], c.grads[1][:500]]}, ValueError, r"grads\[1\] has 500 elements; expected 522 or more"),
    (lambda c: {"grads": [c.grads[0].half()] * 2}, TypeError, r"grads\[0\] has dtype Half; expected that of the chunk's grads"),
    (lambda c: {"grads": [c.grads[0][::2]] * 2}, ValueError, r"grads\[0\] has shape .* expected a contiguous tensor"),
    (lambda c: {"hypers": []}, ValueError, "hypers has 0 items; expected 1 or more"),
    (lambda c: {"num_threads": -1}, ValueError, "num_threads has -1; expected 0 to 4096"),
])  # fmt: skip
def test_a_step_that_brings_something_else_is_refused(change: Any, error: type[Exception], message: str) -> None:
    case = Case()
    good = {"chunks": [case.steps.chunk(**case.chunk)], "grads": case.grads, "hypers": case.hypers}
    with nothing_written(*case.written), pytest.raises(error, match="TierSteps.begin: " + message):
        case.steps.begin(**good | change(case))
    assert case.tier.bytes_to_tier == case.tier.bytes_from_tier == 0
    case.steps.begin(**good)
    case.steps.wait_updated(0, 1)
    assert case.tier.bytes_from_tier > 0


@pytest.mark.parametrize("num_threads", [0, 2])
def test_only_chunks_of_the_step_under_way_are_waited_for(num_threads: int) -> None:
    case = Case()
    for count, message in ((1, "last has 2; expected at most 1,"), (0, "last has 2; expected at most 0,")):
        if count:
            case.steps.begin([case.steps.chunk(**case.chunk)], case.grads, case.hypers, num_threads)
        with pytest.raises(ValueError, match="TierSteps.wait_updated: " + message):
            case.steps.wait_updated(0, 2)
        with pytest.raises(ValueError, match=r"TierSteps.wait_updated: first has 1; expected 0 to 0 .last."):
            case.steps.wait_updated(1, 0)
        case.steps.end()


def test_chunks_of_other_steps_are_refused() -> None:
    """Their places, or the tier that counts and waits, are not there."""
    case, other = Case(), Case()
    fewer = _C.TierSteps(case.tier, 1, passes=True)
    for chunk in (other.steps.chunk(**other.chunk), case.steps.chunk(**case.chunk | {"place": 2})):
        with (
            nothing_written(*case.written, *other.written),
            pytest.raises(ValueError, match=r"chunks\[0\] has a chunk of another"),
        ):
            fewer.begin([chunk], case.grads, case.hypers)


def test_who_makes_copies_is_checked() -> None:
    with pytest.raises(TypeError, match="TierSteps: tier has type int; expected HostTier"):
        _C.TierSteps(3, 3, passes=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"TierSteps: passes has True; expected False .this tier's caller_copies is False"):
        _C.TierSteps(_C.HostTier(CPU, late=True), 3, passes=True)
    with pytest.raises(ValueError, match="TierSteps: places has -1; expected 0 or more"):
        _C.TierSteps(_C.HostTier(CPU), -1, passes=True)


# Whose memory another argument has.
SHARED = {
    "one home for two": ("weights", 1, "weights", 0),
    "a state is a home": ("weights", 0, "exp_avgs", 1),
    "a home is another's place": ("weights", 0, "params", 1),
    "weights and gradients have one home": ("step's grads", 0, "weights", 1),
    "a gradient's home is a state": ("step's grads", 1, "exp_avg_sqs", 0),
    "one place for two gradients": ("grads", 1, "grads", 0),
}
SAID = {"weights": "param_homes", "step's grads": "grad_homes"}


@pytest.mark.parametrize("which", SHARED)
def test_memory_that_a_step_through_places_writes_is_nobody_else_s(which: str) -> None:
    name, index, other, its_index = SHARED[which]
    case = Case()
    case.step()  # what was found good then does not stand for other homes
    moved = case.tier.bytes_to_tier, case.tier.bytes_from_tier
    written = case.written
    lists = {**case.chunk, "step's grads": case.grads}
    lists[name][index] = lists[other][its_index]
    if "step's grads" in (name, other):
        case.chunk["grad_starts"] = [0, 0]
    with nothing_written(*written), pytest.raises(ValueError) as raised:
        case.step()
    pair = f"{SAID.get(name, name)}[{index}]", f"{SAID.get(other, other)}[{its_index}]"
    assert any(f"{a} has memory that {b} has too; expected" in str(raised.value) for a, b in (pair, pair[::-1]))
    assert (case.tier.bytes_to_tier, case.tier.bytes_from_tier) == moved


def test_gradients_of_a_later_step_that_lie_in_what_it_writes_are_refused() -> None:
    """A chunk that is kept was checked with the gradients of its first step."""
    case = Case()
    memory = torch.rand(522)
    case.chunk["exp_avgs"][0] = memory[10:]
    chunk = case.steps.chunk(**case.chunk)
    case.steps.begin([chunk], case.grads, case.hypers)
    case.steps.wait_updated(0, 1)
    case.steps.end()
    message = r"grad_homes\[0\] has memory that exp_avgs\[0\] has too|exp_avgs\[0\] has memory that grad_homes\[0\] has too"
    with nothing_written(*case.written), pytest.raises(ValueError, match=message):
        case.steps.begin([chunk], [memory, case.grads[1]], case.hypers)


def test_a_refused_chunk_counts_no_write_of_the_weights_before_the_bad_one() -> None:
    case = Case()
    first, second = case.chunk["weights"]
    with nothing_written(first), pytest.raises(TypeError, match=r"params\[1\] has dtype Float; expected Half"):
        case.step(weights=[first, second.half()])


def test_copies_in_flight_outlive_their_chunk() -> None:
    """A chunk that is let go waits for what still travels to its weights."""
    case = Case(passes=False, gigabytes_per_second=1e-4)  # 40 ms each way
    chunk = case.steps.chunk(**case.chunk)
    case.steps.begin([chunk], case.grads, case.hypers)
    left = case.steps.wait_updated(0, 1)
    case.steps.end()
    assert not left.query()
    del chunk
    assert left.query()
