"""OffloadPipeline: steps whose gradients and weights go through places in a tier."""

from typing import Any

import pytest
import torch

from shardcore._native import _C
from tests.native.helpers import make_hyper, nothing_written
from tests.support.copies import simulated_tier

CPU = torch.device("cpu")
KINDS = {"fp32": torch.float32, "bf16 with a master": torch.bfloat16}


class Case:
    """A tier, a chunk's arguments and what a step brings: two parameters of `numel` elements."""

    def __init__(self, kind: str = "fp32", numel: int = 512, tier: Any = None) -> None:
        self.tier = _C.HostTier(CPU) if tier is None else tier
        self.pipeline = _C.OffloadPipeline(self.tier, 3)
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
        self.pipeline.begin([self.pipeline.chunk(**self.chunk | changes)], self.grads, self.hypers, num_threads)
        left = self.pipeline.wait_updated(0, 1)
        if left is not None:
            left.wait()
        self.pipeline.end()


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_through_places_has_the_same_bits_and_counts_its_copies(kind: str, num_threads: int) -> None:
    case = Case(kind, 50_000)
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
    ({"weights": []}, ValueError, r"has 0 items; expected 2 \(one for each of params\)"),
    ({"grad_starts": [0]}, ValueError, r"has 1 items; expected 2 \(one for each of params\)"),
    (
        {"weights": list(torch.zeros(2, 512).half())},
        TypeError,
        r"params\[0\] has dtype Float; expected Half \(as weights: copies do not cast\)",
    ),
    ({"weights": list(torch.zeros(2, 511))}, ValueError, r"params\[0\] has 512 elements; expected 511 "),
])  # fmt: skip
def test_chunks_that_no_copy_could_serve_are_refused(change: Any, error: type[Exception], message: str) -> None:
    case = Case()
    with nothing_written(*case.written), pytest.raises(error, match="OffloadPipeline.chunk: .*" + message):
        case.step(**change)


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda c: {"grads": c.grads[:1]}, ValueError, r"grads has 1 items; expected 2 \(one for each of spans\)"),
    (lambda c: {"grads": [c.grads[0], c.grads[1][:500]]}, ValueError, r"grads\[1\] has 500 elements; expected 522 or more"),
    (lambda c: {"grads": [c.grads[0].half()] * 2}, TypeError, r"grads\[0\] has dtype Half; expected that of the chunk's grads"),
    (lambda c: {"hypers": []}, ValueError, "hypers has 0 items; expected 1 or more"),
])  # fmt: skip
def test_a_step_that_brings_something_else_is_refused(change: Any, error: type[Exception], message: str) -> None:
    case = Case()
    good = {"chunks": [case.pipeline.chunk(**case.chunk)], "grads": case.grads, "hypers": case.hypers}
    with nothing_written(*case.written), pytest.raises(error, match="OffloadPipeline.begin: " + message):
        case.pipeline.begin(**good | change(case))
    assert case.tier.bytes_to_tier == case.tier.bytes_from_tier == 0
    case.pipeline.begin(**good)
    case.pipeline.wait_updated(0, 1)
    assert case.tier.bytes_from_tier > 0


def test_copies_in_flight_outlive_their_chunk() -> None:
    """A chunk that is let go waits for what still travels to its weights."""
    case = Case(tier=simulated_tier(gigabytes_per_second=1e-4))  # 40 ms each way
    chunk = case.pipeline.chunk(**case.chunk)
    case.pipeline.begin([chunk], case.grads, case.hypers)
    left = case.pipeline.wait_updated(0, 1)
    case.pipeline.end()
    assert not left.query()
    del chunk
    assert left.query()
