"""Committing each step of states on disk, and going on from the last committed one. The files:
checkpoint/slots.py.

Note [When]. What a step needs to be repeated is read where it is as the next step will find it:
random states and positions in data when `step()` ends; learning rates, the loss scale, the
scheduler, edited weights and buffers when the next training forward begins, since schedulers step
in between. From then on a thread commits beside forward and backward; the next step, or whatever
else reads or changes states, waits for it. An overlapped step is committed when the next one waits
for it. So a crash costs the step that is not complete, and the one before it if it comes before its
commit.
"""

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint import plain
from shardcore.checkpoint.format import names_of
from shardcore.checkpoint.load import (
    LoadOptions,
    check_scheduler,
    check_stateful,
    load_from,
    options_of,
    restore_rank,
)
from shardcore.checkpoint.save import (
    CheckpointMetadata,
    Content,
    buffers_of,
    describe,
    items_of,
    numerics_of,
    parts_of,
    ranges_of,
    rank_state,
    weight_of,
)
from shardcore.checkpoint.slots import COMMIT_THREAD, Committed, Slots
from shardcore.checkpoint.write import Item, LinkedFiles, manifest_of, write_ranges
from shardcore.engine.agreement import together
from shardcore.engine.bucket import Bucket
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.states import StepError
from shardcore.offload.nvme_states import NvmeStates

logger = logging.getLogger("shardcore")


class Commits:
    """Commits the steps of one engine: see Note [When]. What `Engine.commits` is."""

    def __init__(self, engine: Engine, slots: Slots, states: NvmeStates) -> None:
        """Begin, from the step that `slots` has chosen if there is one. Collective."""
        self._engine_ref = weakref.ref(engine)  # the engine keeps this object
        self._slots, self._states = slots, states
        self.scheduler: Any = None
        self.stateful: Mapping[str, Any] = {}
        self._numerics = numerics_of(engine)
        self._rank_state: Mapping[str, Any] | None = None  # of the step that is not committed yet
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._record: dict[str, Any] | None = None  # of what the thread has written
        self._all_have_it = True  # the last commit
        self.source: Committed | None = None  # until the first step
        self.restored = False  # `resume` was called
        if slots.record is not None:
            self.source = Committed(slots.folder, [slots.record], whole=False)
            slots.adopt(states)
            load_from(self.source, engine, LoadOptions(in_place=True))

    @property
    def _engine(self) -> Engine:
        engine = self._engine_ref()
        assert engine is not None, "it makes these calls"
        return engine

    @property
    def step(self) -> int:
        """How many steps have been made since the run began, those of skipped updates among
        them.
        """
        return self._slots.step + (self._rank_state is not None)

    def note_step(self) -> None:
        """Note that a step ends. What is wrong with a state is raised by `finish`, so that every
        rank counts the step.
        """
        if self.source is not None:
            if not self.restored and self._engine.comm.rank == 0:
                logger.warning(
                    "step: training continues from step %d, but shardcore.resume was not called. "
                    "The scheduler, the position in the data and the random states are therefore "
                    "as in a new run. Call shardcore.resume(model, ...) before the first step; it "
                    "returns the number of this step",
                    self._slots.step,
                )
            self.source.close()
            self.source = None
        self._rank_state, self._all_have_it = {}, False
        try:
            self._rank_state = rank_state(self._engine.device, self.stateful)
        except Exception as error:
            self._error = error
        self._copy_buffers()

    def before_forward(self, begin: bool) -> None:
        """Note that a forward begins, before which users edit weights and buffers. begin: commit
        from now on.
        """
        if self._rank_state is not None and self._thread is None:
            self._copy_buffers()
            if begin:
                self._start_commit()

    def _copy_buffers(self) -> None:
        self._buffers = {
            name: buffer.detach().clone() for name, buffer in buffers_of(self._engine.model).items()
        }

    def _start_commit(self) -> None:
        if self._rank_state is None or self._thread is not None or self._error is not None:
            return
        engine = self._engine
        engine.updater.accept_weight_edits()
        engine.membership.check("step")
        content = Content(states=True, exclude_frozen=True, scheduler=self.scheduler)
        metadata = CheckpointMetadata(engine, content, self._rank_state)
        entries = metadata.entries(describe(engine, content), {}, self._numerics)
        names = names_of(engine)
        stream = torch.cuda.Stream(engine.device) if engine.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(engine.device))

        def commit() -> None:
            try:
                with (
                    nullcontext() if stream is None else torch.cuda.stream(stream),
                    torch.no_grad(),
                ):
                    self._write_files(engine, names, *entries)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=commit, name=COMMIT_THREAD)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last step is committed. StepError if it cannot be; then the next call
        tries again.
        """
        if self._rank_state is None:
            return
        self._start_commit()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is None:
            try:
                self._write_record()
            except Exception as problem:
                self._error = problem
        error = self._error
        if self._rank_state:  # else it has no states of this rank, and never will
            self._error = None
        if error is not None:
            try:
                raise StepError(
                    f"step: step {self.step} is made, but cannot be committed "
                    f"({type(error).__name__}: {error}). Step {self._slots.step} stays the last "
                    f"committed step in {self._slots.folder}. Make room on the disk, then repeat "
                    "this call"
                ) from error
            finally:
                error = None  # else a cycle
        self._rank_state, self._record, self._buffers = None, None, {}

    def _write_record(self) -> None:
        """Write the record, if the thread did not."""
        if self._record is None:
            return
        for bucket in _buckets_with_weights(self._engine):
            for managed in bucket.params:
                if managed.edited:  # perhaps while the thread wrote it
                    raise ValueError(
                        f"{managed.name} was edited after a forward began and before the step. "
                        "Edit weights after a step and before the next forward, or use float32 "
                        'masters, or "durable": False'
                    )
        self._slots.write_record(self._record, self.step, self._states)
        self._record = None

    def wait_for_all(self) -> None:
        """Wait until every rank has committed the last step: only then may states be written
        outside of a step. Collective.

        StepError if a rank could not.
        """
        if self._all_have_it:
            return
        have = self._engine.comm.gather_json(self._rank_state is None)
        self._all_have_it = all(have)
        if not self._all_have_it:
            raise StepError(
                f"rank {have.index(False)} could not commit step {self.step}; see its error"
            )

    def link_into(self, folder: Path, names: Mapping[torch.Tensor, str]) -> LinkedFiles:
        """Link the files of committed states into a checkpoint that is written to `folder`, where
        they can be linked: see `Slots.link_into`.
        """
        return self._slots.link_into(self._states, folder, names)

    def _write_files(
        self,
        engine: Engine,
        names: Mapping[torch.Tensor, str],
        tensors: dict[str, Any],
        rest: Mapping[str, Any],
    ) -> None:
        self._states.flush()
        items = list(self._rest_items(engine, names))
        rest_written = write_ranges(
            self._slots.folder, self._slots.rest_name, items, len(self._slots.paths)
        )
        written = self._slots.written(self._states, rest_written, names)
        self._record = manifest_of([written], tensors, rest)
        self._record |= {"world_size": engine.comm.world_size, "rank_state": self._rank_state}
        # Weights that are written live may be edited meanwhile: `finish` writes the record, if none
        # was.
        if not _buckets_with_weights(engine):
            self._write_record()

    def _rest_items(self, engine: Engine, names: Mapping[torch.Tensor, str]) -> Iterator[Item]:
        """Yield what is not in the slots."""
        for bucket in engine.buckets:
            if not bucket.trainable:  # frozen parameters are as the program makes them
                continue
            # states on the device (`ratio`)
            for span in ranges_of(bucket, 0, bucket.device_numel):
                yield from parts_of(engine, bucket, span, names[span.managed.param], True)
            # weights that no float32 master makes again
            for span in ranges_of(bucket, bucket.device_numel, bucket.owned_numel):
                yield from weight_of(bucket, span, names[span.managed.param])
        for name, buffer in self._buffers.items():
            yield from items_of(name, buffer.reshape(-1))


def _buckets_with_weights(engine: Engine) -> list[Bucket]:
    """Return the buckets whose weights a commit writes, which users may edit meanwhile."""
    return [
        bucket
        for bucket in engine.buckets
        if bucket.trainable and bucket.state_format.reads_weights
    ]


def resume(
    model: nn.Module, *, scheduler: Any = None, stateful: Mapping[str, Any] | None = None
) -> int:
    """Restore the state that `shard` could not restore when it continued from a commit. Later
    commits include it. Collective.

    For a model of `shard(offload={"optimizer": "nvme", "path": ..., "resume": True})`. `shard`
    itself restores weights, optimizer states, options of groups and the loss scale. Call `resume`
    once, before the first step. It restores options of groups and random states a second time,
    because code in between (such as creating a scheduler) may change them.

    Args:
        model: The model returned by shard.
        scheduler: Any object with `state_dict()` and `load_state_dict()`. A commit saves its state
            from the begin of the next forward.
        stateful: A dict of such objects by name, such as a StatefulDataLoader; each rank passes its
            own. A commit saves their states from the end of `optimizer.step()`.

    Returns the number of committed steps: how often `optimizer.step()` was called since the run
    began, and 0 for a new run.

    Raises ValueError or TypeError, on every rank, if the model commits no steps, or the last commit
    lacks one of these states.
    """
    engine = engine_behind("resume", model)
    options = LoadOptions(scheduler=scheduler, stateful=stateful or {})

    def check() -> "Commits":
        commits = engine.commits
        if isinstance(commits, Commits) and commits.step and commits.source is None:
            raise ValueError(
                f"resume: step {commits.step} is already made. Call resume before the first step"
            )
        if scheduler is not None:
            plain.to_json(scheduler.state_dict(), "resume: scheduler.state_dict()")
        if not isinstance(commits, Commits):
            raise ValueError(
                'resume: the model commits no steps. Use shard(offload={"optimizer": "nvme", '
                '"path": ..., "resume": True}), or read a checkpoint with shardcore.load'
            )
        rank_state(engine.device, options.stateful)
        if commits.source is not None:
            if scheduler is not None:
                check_scheduler("resume", commits.source, scheduler)
            check_stateful("resume", commits.source, engine.everyone, options.stateful)
        return commits

    with together(engine.comm, "resume", "nothing was restored"):
        commits = check()
    if commits.source is not None:
        source = commits.source
        for group, saved in zip(engine.groups, options_of(source, engine) or (), strict=True):
            # again: a scheduler that was made meanwhile has set learning rates
            group.update(saved)

        def restore_scheduler() -> None:
            if scheduler is not None:
                scheduler.load_state_dict(source.scheduler)

        restore_rank("resume", source, engine, options, restore_scheduler)
    commits.scheduler, commits.stateful, commits.restored = scheduler, options.stateful, True
    return int(commits.step)
