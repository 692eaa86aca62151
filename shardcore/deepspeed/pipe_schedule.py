"""Timetables of a pipeline's stages, by DeepSpeed's names: the instructions of each step.

They describe a schedule, such as for plots and simulations. PipelineEngine has its own
(pipe_engine.py), and runs no other.
Source: https://deepspeed.readthedocs.io/en/latest/pipeline.html, 0.19.8.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self


class PipeInstruction:
    """What a stage is to do. Its arguments are its attributes."""

    def __init__(self, **kwargs: Any) -> None:
        """Keep the arguments."""
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Step the optimizer, and zero gradients."""


class ReduceGrads(PipeInstruction):
    """Average gradients over the ranks that have the same stage."""


class ReduceTiedGrads(PipeInstruction):
    """Add the gradients of tied weights over their stages."""


class BufferOpInstruction(PipeInstruction):
    """An instruction about a buffer, which has a micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        """buffer_id: the number of the buffer."""
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load a micro-batch into a buffer."""


class ForwardPass(BufferOpInstruction):
    """Run the stage's layers."""


class BackwardPass(BufferOpInstruction):
    """Run their backward."""


class SendActivation(BufferOpInstruction):
    """Send outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive inputs from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the inputs' gradients to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the outputs' gradients from the next stage."""


class PipeSchedule(ABC):
    """The steps of one stage for one batch. An iteration yields what `steps` does."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        """Take the numbers of micro-batches and stages, and which stage (from 0) this one is."""
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self._steps: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Return how many buffers the stage needs."""
        return self.micro_batches

    stage = property(lambda self: self.stage_id)
    num_stages = property(lambda self: self.stages)
    num_micro_batches = property(lambda self: self.micro_batches)
    is_first_stage = property(lambda self: self.stage_id == 0)
    is_last_stage = property(lambda self: self.stage_id == self.stages - 1)

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> Self:
        """Begin anew."""
        self._steps = self.steps()
        return self

    def __next__(self) -> list[PipeInstruction]:
        """Return the instructions of the next step."""
        self._steps = self._steps or self.steps()
        return next(self._steps)


class InferenceSchedule(PipeSchedule):
    """Forwards alone: stage s runs micro-batch m at step m + s. Two buffers take turns."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        for step in range(self.micro_batches + self.stages - 1):
            micro = step - self.stage_id
            buffer, other = (step + self.stage_id) % 2, (step + self.stage_id + 1) % 2
            runs = self._valid_micro_batch(micro)
            exchange: list[PipeInstruction] = []
            if self._valid_stage(self.next_stage) and self._valid_micro_batch(micro - 1):
                exchange.append(SendActivation(other))
            if self._valid_stage(self.prev_stage) and runs:
                exchange.append(RecvActivation(buffer))
            load = (
                [LoadMicroBatch(buffer)]
                if runs and (self.is_first_stage or self.is_last_stage)
                else []
            )
            # Neighbours do the opposite: one sends while the other receives.
            yield [
                *load,
                *exchange[:: -1 if self.stage_id % 2 else 1],
                *([ForwardPass(buffer)] if runs else []),
            ]

    def num_pipe_buffers(self) -> int:
        """Return 2."""
        return 2


class TrainSchedule(PipeSchedule):
    """One forward, one backward.

    Of n stages, stage s runs forward m at step 2m + s, and backward m at step 2m + 2n - s - 1.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        before = -1
        for step in range(last + 1):
            forward = (step - self.stage_id) % 2 == 0
            micro = (
                step - self.stage_id if forward else step - 2 * self.stages + self.stage_id + 1
            ) // 2
            beside = self.prev_stage if forward else self.next_stage
            received: list[PipeInstruction] = []
            sent: list[PipeInstruction] = []
            if self._valid_stage(beside):
                if self._valid_micro_batch(micro):
                    received.append(
                        (RecvActivation if forward else RecvGrad)(self._buffer_idx(micro))
                    )
                if self._valid_micro_batch(before):
                    sent.append((SendGrad if forward else SendActivation)(self._buffer_idx(before)))
            instructions = [*sent, *received] if forward else [*received, *sent]
            if self._valid_micro_batch(micro):
                buffer = self._buffer_idx(micro)
                if forward and (self.is_first_stage or self.is_last_stage):
                    instructions.append(LoadMicroBatch(buffer))
                instructions.append((ForwardPass if forward else BackwardPass)(buffer))
            if step == last:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = micro
            yield instructions

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches wait for their backward at most; at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class DataParallelSchedule(PipeSchedule):
    """Without a pipeline: forward and backward of each micro-batch, then the step."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        for micro in range(self.micro_batches):
            ends = [ReduceGrads(), OptimizerStep()] if micro == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *ends]

    def num_pipe_buffers(self) -> int:
        """Return 1."""
        return 1
