"""The engine behind a sharded model: what `shard` attaches and the optimizer hands its work to.

It composes the reducer (gradients), the updater (step) and a state store (where states live). It
has no knowledge of stages beyond the lifetimes table, nor of tiers beyond the store that it is
given.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardcore._native import _C
from shardcore.distributed.compare import Entry, uneven_backwards
from shardcore.distributed.everyone import Everyone
from shardcore.engine.agreement import agree, attempt, difference, value_read
from shardcore.engine.bucket import Bucket, Managed, note_written
from shardcore.engine.device_step import (
    DeviceOutcomes,
    DeviceStep,
    PendingResult,
    decides_on_device,
)
from shardcore.engine.full_tensors import (
    FullTensors,
    Gathered,
    OwnGrads,
)
from shardcore.engine.mistakes import GRAD_SYNC, Mistakes
from shardcore.engine.optimizer_state import OptimizerStateIO
from shardcore.engine.plan import BackgroundSave, Membership, Plan, StepCommits
from shardcore.engine.reducer import Reducer
from shardcore.engine.states import DeviceStore
from shardcore.engine.step import Outcomes, Updater, interrupts_held_back
from shardcore.engine.unshard import Unsharder, tensors_in
from shardcore.optim.group_options import capturing
from shardcore.optim.interface import EngineRef, Superseded, engine_of
from shardcore.optim.tensor_lists import DeviceScale, DeviceState
from shardcore.torch_private import IS_REPLICA, active_ddp

WEIGHTS_AWAY = (
    "are in host memory since shardcore.offload_states(model); expected "
    "shardcore.reload_states(model) before they are used"
)


class Engine:
    """Runs gradients, steps and state dicts of one sharded model. Not copied or pickled with the
    model.
    """

    def __init__(self, plan: Plan) -> None:
        """Take over the model of `plan`, whose weights are in place."""
        self.comm, self.device, self.lifetimes = plan.comm, plan.device, plan.builder.lifetimes
        self.everyone = Everyone(plan.comm)
        self.plan = plan.without_owners()
        self.buckets, self.unmanaged, self.store = list(plan.buckets), plan.frozen, plan.store
        self.scaler, self.options = plan.scaler, plan.options
        self.max_norm: float | None = self.options["clip_grad_norm"]
        # both keep the engine
        self._model, self._optimizer = weakref.ref(plan.model), weakref.ref(plan.optimizer)
        groups = self.groups = plan.optimizer.param_groups
        # None: steps are complete when they return, or in the order of the device's stream, and
        # nothing is gathered after them
        self.overlap_step = plan.make_overlap_step(plan)
        self.unsharder: Unsharder | None = None  # None: weights are never sharded
        if not self.lifetimes.full_weight_resident:
            keeps, prefetch = self.options["reshard_after_forward"], self.options["prefetch"]
            self.unsharder = Unsharder(
                plan.units, self.comm, self.device, keeps, prefetch, self.overlap_step
            )
        self.ratio_tuner = plan.make_ratio_tuner(plan)
        self.reducer = Reducer(
            [bucket for bucket in self.buckets if bucket.trainable],
            self.comm,
            self.lifetimes,
            plan.policy,
            self.device,
            self.unsharder,
            self.scaler,
            self.overlap_step,
            plan.make_host_grads(plan),
        )
        self.bucket_of: dict[nn.Parameter, Bucket] = {
            m.param: b for b in self.buckets for m in b.params
        }
        self.managed: dict[nn.Parameter, Managed] = {
            m.param: m for b in self.buckets for m in b.params
        }
        # updated by no step
        self.constant = {m.param: m for b in self.buckets for m in b.params if b.group is None}
        for name, param in self.unmanaged:
            self.constant.setdefault(param, Managed(name, param, 0, None))
        self.outcomes = Outcomes(plan.optimizer, self.scaler if self.scaler.active else None)
        # None: the host decides on steps
        self.device_step: DeviceStep | None = None
        self.device_outcomes: DeviceOutcomes | None = None
        capturable, kind = any(group.get("capturable") for group in groups), plan.optimizer.kind
        late = self.overlap_step is not None and self.overlap_step.has_worker
        if kind.on_device and decides_on_device(
            self.device, self.store.tier, self.comm, late, capturable
        ):
            counts = [m for bucket in plan.updated for m in bucket.params]
            self.device_step = DeviceStep(self.device, self.comm.world_size, self.scaler, counts)
            self.device_outcomes = DeviceOutcomes(
                self.device_step, self.outcomes.record, self.outcomes.count_skips
            )
        float8 = None if self.unsharder is None else self.unsharder.float8
        self.updater = Updater(
            self.buckets,
            self.store,
            self.comm,
            self.lifetimes,
            kind,
            groups,
            [*self.constant.values()],
            self.device_step,
            None if float8 is None else float8.measure,
        )
        for param in [*self.managed, *(param for _, param in self.unmanaged)]:
            param.__dict__["_shardcore_engine"] = EngineRef(self)
        self.changes: Any = None  # what a stream of weights reads, if any (engine/changes.py)
        self.loads = 0  # of checkpoints, so far
        self.mistakes = Mistakes(plan.policy.accumulate, self.comm.rank)
        self.mistakes.warn_of_frozen(plan.optimizer)
        self.membership: Membership  # hooks.attach makes it
        # of the model's modules, which keep them
        self.hooks: weakref.WeakSet[Any] = weakref.WeakSet()
        # of these hooks, and of those of frozen parameters
        self.handles: list[RemovableHandle] = []
        self.gives_way = False  # the model is about to be sharded again (engine/relay.py)
        # the module (name, prefix) whose state_dict is being made
        self.state_dict_of: tuple[str, str] | None = None
        # a state_dict of the model has the weights that this rank has, not masters: below stage 3
        self.own_weights = False
        self.reads_own = False  # so does the one that is being made
        self.gathered = Gathered()
        self.names_only = False  # state dicts are made for their keys
        self.full_tensors = FullTensors(self.comm, self.device)
        self.saving: BackgroundSave | None = None
        self.commits: StepCommits | None = None
        # host memory, kept from one save in the background to the next
        self.save_staging: torch.Tensor | None = None
        # where states of the device are, between offload_states and reload_states
        self._aside: _C.HostTier | None = None
        # the weights in host memory (engine/away.py), if they are there
        self.weights_away: object | None = None
        self.state_io = OptimizerStateIO(self.updater, groups, self.full_tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a sharded model is an ordinary model: it has no engine."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None, for the same reason."""
        return type(None), ()

    @property
    def model(self) -> nn.Module:
        """The sharded model. RuntimeError where only its optimizer, or modules of it, are left."""
        model = self._model()
        if model is None:
            raise RuntimeError(
                "the sharded model is gone; expected it to be kept as long as its state is read or "
                "loaded"
            )
        return model

    def synchronize(self) -> None:
        """Wait until the last step is complete, and committed where steps are; on CUDA in the order
        of the current stream.

        StepError if one has failed.
        """
        if self.overlap_step is not None:
            self.overlap_step.finish()
        self.updater.raise_failure()
        if self.commits is not None:
            self.commits.finish()

    def settle_audits(self) -> None:
        """Compare what audits have left. Collective. SilentCorruption if that is to be raised."""
        if self.updater.audit is not None:
            self.updater.audit.settle()

    def _settle_commits(self) -> None:
        """Synchronize; where steps are committed wait until every rank has the last one. Then
        collective.
        """
        try:
            self.synchronize()
        finally:
            if self.commits is not None:
                self.commits.wait_for_all()

    def settle(self, counts: bool = False) -> None:
        """Read the outcomes of the steps so far: norms, loss scale, and if `counts`, how many each
        parameter made.

        Waits for the device if that decides on them.
        """
        if self.device_outcomes is not None:
            self.device_outcomes.settle(counts)

    @property
    def skipped_steps(self) -> int:
        """How many steps the optimizer has skipped, as long as it is there."""
        optimizer: Any = self._optimizer()
        return 0 if optimizer is None else int(optimizer.skipped_steps)

    @property
    def device_state(self) -> DeviceState:
        """What capturable steps leave on the device."""
        assert self.device_step is not None
        return self.device_step.state

    def refuse_held(self, op: str) -> None:
        """Raise ValueError inside full_params, whose weights `op` would leave as they were."""
        if self.unsharder is not None and any(unit.pins for unit in self.unsharder.units):
            raise ValueError(f"{op}: called inside full_params; expected it after the block")

    def refuse_away(self, op: str) -> None:
        """Raise ValueError between offload_states(model) and reload_states(model)."""
        if self.weights_away is not None:
            raise ValueError(f"{op}: the weights {WEIGHTS_AWAY}")

    # --- what hooks of the model call (engine/hooks.py) -------------------------------------------

    @property
    def active_unsharder(self) -> Unsharder | None:
        """What gathers weights around their use; None if none has to be (inside `full_params`,
        unless backward follows). ValueError where nothing can be.
        """
        self.refuse_away("forward")
        unsharder = self.unsharder
        return (
            None
            if unsharder is None or (unsharder.all_pinned and not torch.is_grad_enabled())
            else unsharder
        )

    def begin_forward(self, module: nn.Module) -> None:
        """Begin a forward of the whole model."""
        self.refuse_away("forward")
        if torch.is_grad_enabled():
            self._refuse_wrappers(module)
            self.reducer.settle()
        if (unsharder := self.active_unsharder) is not None:
            unsharder.begin_forward()
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            self.mistakes.warn_of_compiling()
        if (
            self.commits is not None
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            self.commits.before_forward(begin=self.overlap_step is None)
        if self.ratio_tuner is not None and torch.is_grad_enabled():
            if self.ratio_tuner.measures:
                self.synchronize()
            self.ratio_tuner.begin_forward()

    def end_forward(self, module: nn.Module, output: Any) -> None:
        """End a forward of the whole model: watch for the backward of `output`."""
        if self.ratio_tuner is not None:
            self.ratio_tuner.end_forward()
        if (unsharder := self.active_unsharder) is not None:
            unsharder.end_forward()
        if self.overlap_step is not None:
            self.overlap_step.end_forward()
        if not torch.is_grad_enabled():
            return
        self._refuse_wrappers(module)  # again, for hooks that were put around this module later
        begin = self.reducer.begin_backward
        for value in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            if value.grad_fn is not None:
                value.register_hook(lambda grad: begin())  # type: ignore[no-untyped-call]

    def _refuse_wrappers(self, module: nn.Module) -> None:
        """Raise RuntimeError in the forward of what would average or collect gradients a second
        time, in p.grad.

        torch's replicate() has a DistributedDataParallel, too, over a list of the parameters.
        """
        ddp = active_ddp()
        inside_ddp = ddp is not None and any(param in self.managed for param in ddp.parameters())
        if inside_ddp or getattr(module, IS_REPLICA, False):
            wrapper = "DistributedDataParallel or replicate()" if inside_ddp else "DataParallel"
            raise RuntimeError(
                f"forward: the sharded model runs inside {wrapper}; expected it on its own, as "
                f"shardcore.shard already averages gradients over ranks (call the model itself)"
            )

    def trains(self, param: nn.Parameter) -> bool:
        """Whether the parameter was trainable when the model was sharded."""
        return param in self.bucket_of and self.bucket_of[param].trainable

    def knows(self, param: nn.Parameter) -> bool:
        """Whether the parameter was in the model when it was sharded."""
        return param in self.managed or param in self.constant

    # --- what the optimizer delegates -------------------------------------------------------------

    def step(
        self,
        closure: Callable[[], Any] | None,
        grads: Any,
        grad_scale: float | DeviceScale,
        max_norm: float | None,
        problems: list[BaseException],
    ) -> Any:
        """Run one optimizer step. Collective. See FusedAdam.step; `grads` is refused, since
        gradients are sharded.

        grad_scale: has a GradScaler's scale in it; its found_inf is not used, since non-finite
        gradients are found here.
        problems: why the optimizer refuses its arguments on this rank, if it does; an error of the
        closure, or of anything before the first write, joins them. The first is taken out and
        raised once it is known on all ranks: an error that a frame on its way held would hold the
        frame, and the model, in a cycle.
        """
        if grads is not None:
            problems.append(
                ValueError(
                    "step: grads was given; expected None after shard() (backward makes the "
                    "gradients)"
                )
            )
        losses: list[Any] = []
        if closure is not None:
            with torch.enable_grad():
                attempt(problems, lambda: losses.append(closure()))
        try:
            with (
                self.comm.scope("shardcore::step"),
                self.comm.clock.part("optimizer"),
                interrupts_held_back() as let_in,
            ):
                # an interrupt must not end it halfway on one rank
                self._step(grad_scale, max_norm, problems, let_in)
                if self.commits is not None:
                    self.settle_audits()  # before the step is committed
                    self.commits.note_step()
        finally:
            problems.clear()
        return losses[0] if losses else None

    def _step(
        self,
        grad_scale: float | DeviceScale,
        max_norm: float | None,
        problems: list[BaseException],
        let_in: Callable[[], None],
    ) -> None:
        """See `step`. let_in: raises what an interrupt has raised so far."""
        # Before anything is sent: see offload/overlap_step.py, Note [Who gathers].
        attempt(problems, self.reducer.settle, self.synchronize)
        attempt(
            problems,
            self._wait_for_commits,
            self._reshard_all,
            self.reducer.reduce_pending,
        )
        if self.device_outcomes is not None:
            attempt(problems, self._poll_outcomes)
            if not problems:
                attempt(problems, self.device_outcomes.raise_late)
        attempt(problems, self._check_step)  # while the last gradients travel to host memory
        if (host_grads := self.reducer.host_grads) is not None:
            waits = self.updater.compares_slices
            attempt(problems, host_grads.synchronize if waits else host_grads.settle)
        if self.ratio_tuner is not None:
            attempt(problems, self.ratio_tuner.begin_step)
        attempt(problems, let_in)
        limit = self.max_norm if max_norm is None else max_norm
        order = self.overlap_step.order if self.overlap_step is not None else ()
        started = self.comm.take_order()
        refuses = bool(problems)
        try:
            backwards = self.reducer.count
            loss_scale = self.scaler.host_scale if self.scaler.active else 1.0
            outcome, plan = self.updater.decide(
                grad_scale, limit, problems, loss_scale, backwards, order, started
            )
        except Exception as error:  # on every rank
            # perhaps another rank knew earlier of a late error
            if self.device_outcomes is not None and isinstance(error, ValueError) and not refuses:
                self.device_outcomes.settle()
                self.device_outcomes.raise_late()
            raise
        model, mistakes, backwards = self._model(), self.mistakes, self.reducer.backwards
        unusual = backwards != mistakes.accumulate or mistakes.watches
        if unusual or (model is not None and GRAD_SYNC in model.__dict__):
            mistakes.check_step(backwards, outcome is not None, self.reducer.repeats, model)
        self.reducer.end_step()
        if plan is not None:
            gathers = None
            if self.overlap_step is None or not self.overlap_step.has_worker:
                gathers = self.updater.apply(plan, wait=self.overlap_step is None)
            note_written(plan.updated)
            if self.ratio_tuner is not None:
                self.ratio_tuner.updated = True
        if isinstance(outcome, PendingResult):
            assert self.device_outcomes is not None
            self.device_outcomes.add(outcome)
        elif outcome is not None:
            self.outcomes.add(outcome, () if plan is None else plan.updated)
        # last: it waits until the worker begins
        if plan is not None and self.overlap_step is not None:
            if gathers is None:
                self.overlap_step.start(
                    plan.spans, plan.hypers, plan.same_order, self.updater.audit
                )
            else:
                self.overlap_step.defer(gathers)
        if plan is not None and self.unsharder is not None:
            self.unsharder.renew()

    def _wait_for_commits(self) -> None:
        # of masters, which the checks of a step write
        if self.commits is not None and self.updater.has_edits:
            self.commits.wait_for_all()

    def _reshard_all(self) -> None:
        if self.unsharder is not None:
            self.unsharder.reshard_all()

    def _poll_outcomes(self) -> None:
        # while a graph is captured, events cannot be asked
        if self.device_outcomes is not None and not capturing(self.device):
            self.device_outcomes.poll()

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by, and the reduction divides by. Waits for the last step's
        norm.
        """
        self.settle()
        return self.scaler.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to run backward on. See FusedAdam.scale_loss."""
        return self.scaler.multiply(loss)

    def _check_step(self) -> None:
        on_gpu = self.device.type == "cuda" or self.device_step is not None
        several = self.comm.world_size > 1 or self.comm.across
        if on_gpu and several and capturing(self.device):
            raise ValueError(
                "step: several ranks run a step while a CUDA graph is captured. Ranks compare "
                "their arguments on the host before each step, and a replay would not; expected "
                "one rank"
            )
        if self.reducer.dropped:
            raise ValueError(
                "step: the last backward raised an error; expected a backward without one, or "
                "zero_grad()"
            )
        if self.scaler.unscaled:
            raise ValueError(
                f"step: a backward ran on a loss without the scale {self.loss_scale:g}; expected "
                "optimizer.scale_loss(loss).backward(). zero_grad() forgets these gradients. With "
                "shard(loss_scale=1.0) you scale the loss yourself"
            )
        for name, param in self.unmanaged:
            if param.grad is not None:
                raise ValueError(
                    f"step: {name} was frozen when shard() was called, and now requires a "
                    "gradient; expected shardcore.unfreeze(module)"
                )
        optimizer = self._optimizer()
        if self.grads_in_shards and getattr(optimizer, "found_inf", None) is not None:
            # GradScaler does not take them back if the step raises
            for left in ("found_inf", "grad_scale"):
                vars(optimizer).pop(left, None)
            raise ValueError(
                "step: a GradScaler called it. GradScaler looks for gradients in p.grad, and from "
                "stage 1 on they are sharded. Use shard(loss_scale=) and optimizer.scale_loss "
                "with float16, and no scaler with bfloat16; steps with a non-finite gradient are "
                "skipped"
            )
        self.refuse_away("step")
        if self._on_device is not None and self._on_device.away:
            raise ValueError(
                "step: the optimizer's states are in host memory since offload_states(); expected "
                "optimizer.reload_states()"
            )
        self.membership.check("step")
        touched = [bucket for bucket in self.buckets if not bucket.untouched()]
        for bucket in touched:
            if bucket.group is None:  # the updater checks the others
                bucket.check_in_place("step")
        # at stage 0 a removed p.grad is an edit, which `untouched` does not see
        if touched or self.reducer.param_grads is not None:
            self.reducer.accept_user_grads("step")
        self.updater.check(touched)
        if self.updater.checks_masters and not capturing(self.device):
            self.updater.checks_masters = False
            if lost := self.updater.lost_edits(in_files=False):
                self.mistakes.warn_of_lost_edits(lost)

    @property
    def last_grad_norm(self) -> float | None:
        """Global norm of the averaged gradients at the last step, before clipping; None before
        the first. Waits for it.
        """
        self.settle()
        return self.outcomes.last_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients (or fill them with zeros), as torch.optim.Optimizer.zero_grad."""
        self.reducer.zero(set_to_none)
        if set_to_none and self.ratio_tuner is not None and self.ratio_tuner.chosen is not None:
            self.synchronize()
            self.ratio_tuner.resplit()
            if self.reducer.host_grads is not None:
                self.reducer.host_grads.shrink()
        for _, param in self.unmanaged:
            param.grad = None

    @property
    def _on_device(self) -> DeviceStore | None:
        """What keeps states on the device, if any are there."""
        return self.store.on_device

    def offload_states(self, states: bool, buffers: bool, pin_memory: bool) -> None:
        """Move the device's states to host memory, and free the buffers of gradients and of
        gathered weights, until a step.
        """
        self.reducer.settle()
        self.synchronize()
        if buffers and self.reducer.holds_grads:
            raise ValueError(
                "offload_states: gradients of backwards since the last zero_grad() exist; expected "
                "step() and zero_grad() (set_to_none=True) before"
            )
        on_device = self._on_device
        if states and on_device is not None and not on_device.away:
            self._aside = _C.HostTier(self.device, pin_memory)
            on_device.to_host(self._aside)
        if buffers:
            self.reducer.free_buffers()
            if self.unsharder is not None:
                self.unsharder.pool.shrink(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload_states(self) -> None:
        """Move back to the device what `offload_states` moved."""
        self.synchronize()
        on_device = self._on_device
        if on_device is not None and on_device.away:
            assert self._aside is not None
            on_device.to_device(self._aside)
            self._aside = None

    def state_dict(self) -> dict[str, Any]:
        """Return the full optimizer state in torch.optim form, which ignores our "loss_scale".
        Collective.
        """
        self.read_all("optimizer.state_dict", "the optimizer")
        scale = self.scaler.state()
        state_dict = self.state_io.state_dict()
        optimizer: Any = self._optimizer()  # it makes this call
        state_dict["state"] |= optimizer.state.others
        return state_dict | ({} if scale is None else {"loss_scale": scale})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full optimizer state in torch.optim form; every rank passes all of it."""
        scale = state_dict.get("loss_scale")
        self._settle_commits()
        self.settle()
        self.scaler.check_state("load_state_dict", scale)
        optimizer: Any = self._optimizer()  # it makes this call
        optimizer.state.others = self.state_io.load_state_dict(state_dict)
        self.go_on_from(scale)
        self.updater.loaded += self.scaler.compared

    def go_on_from(self, scale: Mapping[str, Any] | None, skipped_steps: int | None = None) -> None:
        """Go on from the counts that parameters were given, and a loss scale that
        LossScaler.check_state accepts, or None.

        skipped_steps: None leaves their count. Errors of earlier steps are logged.
        """
        optimizer: Any = self._optimizer()
        if skipped_steps is not None and optimizer is not None:
            optimizer._count_skip(skipped_steps - self.skipped_steps)
        self.scaler.load_state(scale)
        if self.device_step is not None:
            self.device_step.load()
        if self.device_outcomes is not None:
            self.device_outcomes.forget_late()

    # --- gradients --------------------------------------------------------------------------------

    def sum_gradients(self) -> None:
        """Let gradients be the sums over ranks, not the means. Called before the first backward."""
        self.reducer.divisor = 1
        if self.device_step is not None:
            self.device_step.ranks = 1
            self.device_step.load()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add the gradients of backwards inside locally, in float32, without reduction; the next
        one reduces the sum.
        """
        self.mistakes.no_sync = True
        old, self.reducer.sync = self.reducer.sync, False
        try:
            yield
        finally:
            self.reducer.sync = old

    @property
    def grads_in_shards(self) -> bool:
        """Whether a norm of all `param.grad` is not that of the model: from stage 1 on, and
        where others have parts of it.
        """
        return not self.lifetimes.owns_everything or bool(self.comm.across)

    @property
    def has_unused_grads(self) -> bool:
        """Whether gradients that are in no `param.grad` wait for a step."""
        return self.reducer.param_grads is None and self.reducer.backwards > 0

    @torch.no_grad()
    def own_grads(
        self,
        op: str,
        params: Sequence[torch.Tensor] | None,
        arguments: Callable[[], Sequence[Entry]],
        norm_type: Callable[[], float] | None = None,
    ) -> OwnGrads:
        """Return this rank's parts of the averaged gradients, to clip them in place. Collective.

        params: of which ones; all that the optimizer updates if None. arguments: returns those
        of `op`, the same on every rank, or raises, which is an error on all. norm_type: of the norm
        to take, asked after that; None for no norm.
        """
        buckets = (
            self.updater.buckets
            if params is None
            else [bucket for bucket in self.buckets if bucket.trainable]
        )
        chosen = None if params is None else set(params)
        managed = [
            m for bucket in buckets for m in bucket.params if chosen is None or m.param in chosen
        ]
        self.begin_grad_read(op, lambda: [*arguments(), *(("parameter", m.name) for m in managed)])
        order = None if norm_type is None else norm_type()
        return OwnGrads(
            buckets, chosen, order, self.comm, self.lifetimes, self.device, self.reducer.show_grads
        )

    def begin_grad_read(self, op: str, which: Callable[[], str | Sequence[Entry]]) -> None:
        """Begin a read of gradients, as every rank does; `which` is the check of `agree`. Reduces
        gradients that are not.
        """

        host_grads = self.reducer.host_grads

        def check() -> str | Sequence[Entry]:
            self.reducer.accept_user_grads(op)
            if host_grads is not None:
                host_grads.synchronize()
            return which()

        self.agree(op, check, of_grads=True)
        self.reducer.reduce_pending()
        if host_grads is not None:
            host_grads.synchronize()

    def agree(
        self,
        op: str,
        check: Callable[[], str | Sequence[Entry]],
        of_grads: bool = False,
        then: str = "nothing was changed",
    ) -> None:
        """Run `check`; if it raises here, or other ranks are in another collective call than `op`,
        raise on every rank.

        `check` returns what has to be the same on every rank: entries, or the words for the value
        that is read. of_grads: so has the number of backwards. then: see agreement.agree.
        """
        problems: list[BaseException] = []
        entries: list[Entry] = []

        def collect() -> None:
            value = check()
            entries.extend([value_read(value)] if isinstance(value, str) else value)

        # Commits are waited for before anything is sent, as in a step.
        attempt(
            problems, self.reducer.settle, partial(self.settle, counts=True), self._settle_commits
        )
        attempt(problems, partial(self.refuse_away, op), partial(self.updater.refuse_swapped, op))
        if not problems:
            attempt(problems, collect)
        count = self.reducer.count if of_grads else 0

        def explain() -> Exception | None:
            counts = self.comm.gather_json(count)
            if len(set(counts)) > 1:
                return uneven_backwards(counts)
            return difference(self.comm, op, entries, then, over)

        # A norm is that of all parts, which have parameters of their own; full tensors are those
        # of all slices.
        of_parts = op == "clip_grad_norm_"
        over = self.comm.across if of_parts else self.comm.slices
        try:
            entries.append(("backwards", "", str(count)))
            agree(
                self.comm,
                op,
                problems,
                entries,
                over=over,
                entries_of_model=() if of_parts else entries,
                explain=explain,
                then=then,
            )
        finally:
            problems.clear()  # as in step

    def read_all(self, op: str, what: str, refuse: Callable[[], None] | None = None) -> None:
        """Begin a read of all weights or states of `what`, as every rank does (see `agree`).

        refuse: raises if this rank refuses.
        """

        def check() -> str:
            if refuse is not None:
                refuse()
            self.updater.accept_weight_edits()
            return f"that of {what}{self.updater.changed()}"

        self.agree(op, check)
        self.settle_audits()

    # --- full values of one parameter -------------------------------------------------------------

    def part_of(self, op: str, param: nn.Parameter) -> tuple[Bucket, Managed]:
        """Return where a trainable parameter is; ValueError or TypeError, in the name of `op`,
        for any other.
        """
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"{op}: got a {type(param).__name__}; expected a parameter of the sharded model"
            )
        if param not in self.managed or not self.bucket_of[param].trainable:
            raise ValueError(
                f"{op}: the parameter was frozen when shard() was called; expected a trainable one"
            )
        return self.bucket_of[param], self.managed[param]

    def master_or_weight(self, bucket: Bucket) -> torch.Tensor:
        """Return the owned range of the bucket's weights as the optimizer sees them: the masters
        where there are any.

        Without masters: the full weights where they are resident, else the shard.
        """
        if bucket.state_format.master is not None:
            return self.store.read(bucket, "master")
        return (
            bucket.weight
            if self.lifetimes.full_weight_resident
            else bucket.owned_values(0, bucket.owned_numel)
        )


def engine_behind(op: str, owner: Any) -> Engine:
    """Return the engine of a sharded model, a parameter of it, or its optimizer; ValueError, in
    the name of `op`, if none.
    """
    engine = engine_of(owner) or getattr(owner, "_engine", None)
    if isinstance(engine, Superseded):
        engine.refuse(op)
    if not isinstance(engine, Engine):
        engine_is_gone = isinstance(getattr(owner, "_shardcore_engine", None), EngineRef)
        state = (
            "is left of a sharded model that is gone, as is its optimizer"
            if engine_is_gone
            else "is not sharded"
        )
        raise ValueError(
            f"{op}: {type(owner).__name__} {state}; expected the model that shardcore.shard "
            "returned, or one of its parameters"
        )
    return engine
