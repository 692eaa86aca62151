"""Timetables of pipelines are those of DeepSpeed, instruction by instruction."""

from typing import Any

import pytest
from shardcore.runtime.pipe import schedule as ours  # type: ignore[import-not-found]

KINDS = ("TrainSchedule", "InferenceSchedule", "DataParallelSchedule")


def steps_of(schedules: Any, kind: str, *sizes: int) -> tuple[int, list[str]]:
    schedule = getattr(schedules, kind)(*sizes)
    return schedule.num_pipe_buffers(), [repr(step) for step in schedule]


def test_every_step_is_deepspeeds() -> None:
    theirs = pytest.importorskip(
        "deepspeed.runtime.pipe.schedule", reason="DeepSpeed is not installed"
    )
    for kind in KINDS:
        for stages in (1, 2, 3, 4):
            for micro_batches in (1, 2, 3, 8):
                for stage in range(stages):
                    sizes = micro_batches, stages, stage
                    assert steps_of(ours, kind, *sizes) == steps_of(theirs, kind, *sizes), (
                        kind,
                        sizes,
                    )


def test_forward_and_backward_follow_the_formula() -> None:
    stages, micro_batches = 4, 6
    for stage in range(stages):
        steps = list(ours.TrainSchedule(micro_batches, stages, stage))
        for micro in range(micro_batches):
            assert any(isinstance(one, ours.ForwardPass) for one in steps[2 * micro + stage])
            assert any(
                isinstance(one, ours.BackwardPass)
                for one in steps[2 * micro + 2 * stages - stage - 1]
            )
        assert [one.name for one in steps[-1]][-3:] == [
            "ReduceTiedGrads",
            "ReduceGrads",
            "OptimizerStep",
        ]
    again = ours.TrainSchedule(2, 2, 0)
    assert [repr(next(again)), repr(next(again))] == [repr(step) for step in list(again)[:2]]
    assert (again.stage, again.num_stages, again.num_micro_batches) == (0, 2, 2)
    assert again.is_first_stage
    assert not again.is_last_stage
