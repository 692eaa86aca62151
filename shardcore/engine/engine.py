"""The engine behind a sharded model: what `shard` attaches and the optimizer hands its work to.

It composes the reducer (gradients), the updater (step) and a state store (where states live). It has no knowledge of
stages beyond the lifetimes table, nor of tiers beyond the store that it is given.
"""

import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardcore.distributed.comm import Comm
from shardcore.engine.bucket import Bucket, Lifetimes, Managed, ReducePolicy
from shardcore.engine.build import Membership
from shardcore.engine.device_step import DeviceStep, Outcomes, decides_on_device
from shardcore.engine.full_tensors import FullTensors, agree_on_read
from shardcore.engine.host_gradients import GradHome
from shardcore.engine.loss_scale import LossScaler
from shardcore.engine.optimizer_state import OptimizerStateIO
from shardcore.engine.overlap_step import OverlapStep
from shardcore.engine.reducer import Reducer
from shardcore.engine.split_store import RatioTuner
from shardcore.engine.state_store import StateStore, StepError
from shardcore.engine.step import OwnGrads, Updater
from shardcore.engine.trace import scope
from shardcore.engine.unshard import Unsharder
from shardcore.optim import DeviceScale, DeviceState, EngineRef, capturing, step_tensor


class Engine:
    """Runs gradients, steps and state dicts of one sharded model. Not copied or pickled with the model."""

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        unmanaged: Sequence[tuple[str, nn.Parameter]],
        store: StateStore,
        comm: Comm,
        lifetimes: Lifetimes,
        policy: ReducePolicy,
        max_norm: float | None,
        optimizer: Any,
        device: torch.device,
        unsharder: Unsharder | None,
        scaler: LossScaler,
        overlap_step: OverlapStep | None,
        home: GradHome | None,
        ratio_tuner: RatioTuner | None,
        resplit: Callable[[float], Mapping[Bucket, int]] | None,
    ) -> None:
        """Take over `buckets`, whose weights are in place; `unmanaged` are the frozen parameters; `max_norm` clips.

        unsharder: gathers weights around their use, None where they always are whole. overlap_step: runs a step after it has
        returned, None where steps are complete then. home: see Reducer. ratio_tuner: chooses the share of the states that is
        in host memory, which `resplit` moves; it returns where in each owned range that begins.
        """
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)  # both keep the engine
        self.buckets, self.unmanaged, self.store = list(buckets), list(unmanaged), store
        self.unsharder, self.scaler, self.overlap_step, self.ratio_tuner, self._resplit = (
            unsharder,
            scaler,
            overlap_step,
            ratio_tuner,
            resplit,
        )
        self.comm, self.lifetimes, self.max_norm, self.device = comm, lifetimes, max_norm, device
        trainable = [bucket for bucket in self.buckets if bucket.trainable]
        self.reducer = Reducer(trainable, comm, lifetimes, policy, device, unsharder, scaler, overlap_step, home)
        self.bucket_of: dict[nn.Parameter, Bucket] = {m.param: b for b in self.buckets for m in b.params}
        self.managed: dict[nn.Parameter, Managed] = {m.param: m for b in self.buckets for m in b.params}
        # The weights that no step updates; frozen ones are in a bucket at stage 3 alone.
        self.constant = {m.param: m for b in self.buckets for m in b.params if b.group is None}
        for name, param in self.unmanaged:
            self.constant.setdefault(param, Managed(name, param, 0, None, version=param._version))
        groups = optimizer.param_groups
        capturable = any(group["capturable"] for group in groups)
        self.device_step: DeviceStep | None = None
        if decides_on_device(device, store.tier, comm, overlap_step is not None, capturable):
            counted = [managed for bucket in self.buckets if bucket.group is not None for managed in bucket.params]
            self.device_step = DeviceStep(device, comm.world_size, scaler, counted)
        self.outcomes = Outcomes(optimizer, scaler, self.device_step)
        constant = [*self.constant.values()]
        self.updater = Updater(self.buckets, store, comm, lifetimes, groups, constant, self.device_step)
        for param in [*self.managed, *(param for _, param in self.unmanaged)]:
            param.__dict__["_shardcore_engine"] = EngineRef(self)
        self._membership = Membership(model)
        self.state_dict_of: tuple[str, str] | None = None  # the module (name, prefix) whose state_dict is being made
        self.full_tensors = FullTensors(comm, device)
        self.state_io = OptimizerStateIO(self.updater, groups, self.full_tensors.of_buckets)

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
            raise RuntimeError("the sharded model is gone; expected it to be kept as long as its state is read or loaded")
        return model

    def synchronize(self) -> None:
        """Wait until the last step is complete; on CUDA in the order of the current stream. StepError if one has failed."""
        if self.overlap_step is not None:
            self.overlap_step.finish()
        self.updater.raise_failure()

    def settle(self, counts: bool = False) -> None:
        """Learn what became of the steps so far: norms, loss scale, and if `counts`, how many each parameter made.

        Waits for the device if that decides on them.
        """
        self.outcomes.settle(counts)

    @property
    def device_state(self) -> DeviceState:
        """What capturable steps leave on the device."""
        assert self.device_step is not None
        return self.device_step.state

    # --- what the optimizer delegates ---------------------------------------------------------------------------------

    def step(
        self,
        closure: Callable[[], Any] | None,
        grads: Any,
        grad_scale: float | DeviceScale,
        max_norm: float | None,
        problems: list[Exception],
    ) -> Any:
        """Run one optimizer step. Collective. See FusedAdam.step; `grads` is refused, since gradients live in shards.

        problems: why the optimizer refuses its arguments on this rank, if it does. The first is taken out and raised where all
        ranks learn of it: an error that frames on its way held would hold them, and the model, in a cycle.
        """
        if grads is not None:
            problems.append(ValueError("step: grads was given; expected None after shard() (gradients come from backward)"))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with scope("step"):
            self._step(grad_scale, max_norm, problems)
        return loss

    def _step(self, grad_scale: float | DeviceScale, max_norm: float | None, problems: list[Exception]) -> None:
        self.reducer.settle()
        try:
            self.synchronize()  # before anything is sent: see engine/overlap_step.py, Note [Who gathers]
        except StepError as error:
            problems.append(error)
        with _interrupts_held_back():  # a step is whole on every rank
            self._step_together(grad_scale, max_norm, problems)

    def _step_together(self, grad_scale: float | DeviceScale, max_norm: float | None, problems: list[Exception]) -> None:
        if self.unsharder is not None:
            self.unsharder.close_all()
        self.reducer.reduce_pending()
        if not capturing(self.device):  # which allows no question about events
            self.outcomes.poll()
        late = () if problems else (self.outcomes.raise_late,)
        for get_ready in (*late, self._check_step, self.reducer.host_grads.arrive):  # checks, while the last gradients travel
            try:
                get_ready()
            except (ValueError, TypeError, RuntimeError) as error:
                problems.append(error)
        if self.ratio_tuner is not None:
            self.ratio_tuner.begin_step()
        limit = self.max_norm if max_norm is None else max_norm
        order, ways = self.overlap_step.order if self.overlap_step is not None else (), self.comm.take_order()
        refuses = bool(problems)
        del problems[1:]
        try:
            backwards = self.reducer.count
            outcome, plan = self.updater.decide(grad_scale, limit, problems, self.scaler.host_scale, backwards, order, ways)
        except Exception as error:  # on every rank
            if isinstance(error, ValueError) and not refuses:  # perhaps another rank knew before of what comes late
                self.settle()
                self.outcomes.raise_late()
            raise
        self.reducer.end_step()
        if plan is not None:
            if self.overlap_step is None:
                self.updater.apply(plan)
            self.updater.count(plan)
            if self.ratio_tuner is not None:
                self.ratio_tuner.updated = True
        if outcome is not None:
            self.outcomes.add(outcome, () if plan is None else plan.updated)
        if plan is not None and self.overlap_step is not None:  # last: a signal handler may raise while it waits for the worker
            self.overlap_step.hand_over(plan.spans, plan.hypers, plan.same_order)
        if plan is not None and self.unsharder is not None:
            self.unsharder.renew()

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by, and the reduction divides by. Waits for the last step's norm."""
        self.settle()
        return self.scaler.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to run backward on. See ScalesLoss.scale_loss."""
        return self.scaler.multiply(loss)

    def _check_step(self) -> None:
        if self.comm.world_size > 1 and capturing(self.device):
            raise ValueError(
                f"step: runs on {self.comm.world_size} ranks while a CUDA graph is captured; expected one rank (what ranks "
                "compare before a step goes over the host, which a replay does not run)"
            )
        if self.reducer.dropped:
            raise ValueError("step: the last backward ended in an error; expected one that succeeds, or zero_grad()")
        if self.scaler.unscaled:
            raise ValueError(
                f"step: a backward ran on a loss that was not scaled by {self.loss_scale:g}; expected "
                "optimizer.scale_loss(loss).backward() (zero_grad() forgets these gradients; "
                "shard(loss_scale=1.0) leaves scaling to you)"
            )
        for name, param in self.unmanaged:
            if param.grad is not None:
                raise ValueError(
                    f"step: {name} has a gradient but was frozen when shard() was called; expected requires_grad as it was then"
                )
        optimizer = self._optimizer()
        if not self.lifetimes.owns_everything and getattr(optimizer, "found_inf", None) is not None:
            for left in ("found_inf", "grad_scale"):  # GradScaler does not take them back if the step raises
                vars(optimizer).pop(left, None)
            raise ValueError(
                "step: called by a GradScaler, which looks for gradients in p.grad; from stage 1 on they live in shards "
                "(float16 has shard(loss_scale=) and optimizer.scale_loss, bfloat16 needs none; non-finite steps are skipped)"
            )
        self._membership.check("step")
        for bucket in self.buckets:
            if bucket.group is None:  # the updater checks the others
                bucket.check_in_place("step")
        self.reducer.accept_user_grads("step")
        self.updater.check()

    @property
    def last_grad_norm(self) -> float | None:
        """Global norm of the averaged gradients at the last step, before clipping; None before the first. Waits for it."""
        self.settle()
        return self.outcomes.last_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients (or fill them with zeros), as torch.optim.Optimizer.zero_grad."""
        self.reducer.zero(set_to_none)
        if (
            set_to_none
            and self.ratio_tuner is not None
            and self._resplit is not None
            and (ratio := self.ratio_tuner.take()) is not None
        ):
            self.synchronize()
            self.reducer.host_grads.recut(self._resplit(ratio))
        for _, param in self.unmanaged:
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer state in torch.optim form, which ignores our "loss_scale". Collective."""
        self.read_all("optimizer.state_dict", "the optimizer")
        scale = self.scaler.state()
        whole = self.state_io.state_dict()
        optimizer: Any = self._optimizer()  # it makes this call
        whole["state"] |= optimizer.state.others
        return whole | ({} if scale is None else {"loss_scale": scale})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole optimizer state in torch.optim form; every rank passes all of it."""
        scale = state_dict.get("loss_scale")
        self.synchronize()
        self.settle()
        self.scaler.check_state("load_state_dict", scale)
        optimizer: Any = self._optimizer()  # it makes this call
        optimizer.state.others = self.state_io.load_state_dict(state_dict)
        self.go_on_from(scale)
        self.updater.loaded += self.scaler.told

    def go_on_from(self, scale: Mapping[str, Any] | None) -> None:
        """Go on from the counts that parameters were given, and a loss scale that LossScaler.check_state accepts, or None.

        Errors of earlier steps are logged.
        """
        self.scaler.load_state(scale)
        if self.device_step is not None:
            self.device_step.load()
        self.outcomes.forget_late()

    # --- gradients ----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add the gradients of backwards inside locally, in float32, without reduction; the next one reduces the sum."""
        old, self.reducer.sync = self.reducer.sync, False
        try:
            yield
        finally:
            self.reducer.sync = old

    @property
    def grads_in_shards(self) -> bool:
        """Whether no rank has gradients whole, so that there is no `param.grad`: from stage 1 on."""
        return not self.lifetimes.owns_everything

    @torch.no_grad()
    def own_grads(
        self,
        op: str,
        params: Sequence[torch.Tensor] | None,
        what: str,
        norm_type: float | None = None,
    ) -> OwnGrads:
        """Return this rank's parts of the averaged gradients, to clip them in place. Collective.

        params: of which ones; all that the optimizer updates if None. what: says what `op` does with them, the same on every
        rank. norm_type: of the norm to take, None for no norm.
        """
        buckets = self.updater.buckets if params is None else [bucket for bucket in self.buckets if bucket.trainable]
        chosen = None if params is None else set(params)

        def check() -> str:
            self.reducer.accept_user_grads(op)
            self.reducer.host_grads.arrive()
            return f"{what} over {', '.join(m.name for b in buckets for m in b.params if chosen is None or m.param in chosen)}"

        self.together(op, check, self.reducer.count)
        self.reducer.reduce_pending()
        self.reducer.host_grads.arrive()
        return OwnGrads(buckets, chosen, norm_type, self.comm, self.lifetimes, self.device, self.reducer.show_grads)

    def together(self, op: str, check: Callable[[], str], backwards: int = 0) -> None:
        """Run `check`; if it raises here, or other ranks are in another collective read than `op`, raise on every rank.

        What `check` returns says which value is read, where there are several: it has to be the same on every rank, as the
        number of `backwards` is.
        """
        self.reducer.settle()
        self.settle(counts=True)
        problem: Exception | None = None
        what = ""
        try:
            self.synchronize()  # before anything is sent, as in a step
        except StepError as error:
            problem = error
        try:
            what = "" if problem is not None else check()
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            problem = error
        try:
            agree_on_read(self.comm, op, what, backwards, problem)
        finally:
            problem = None  # as in step

    def read_all(self, op: str, what: str) -> None:
        """Begin a read of all weights or states of `what`, as every rank does (see `together`)."""

        def check() -> str:
            self.updater.accept_weight_edits()
            return f"that of {what}{self.updater.changed()}"

        self.together(op, check)

    # --- whole values of one parameter --------------------------------------------------------------------------------

    @torch.no_grad()
    def full_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return the averaged gradient of one parameter, whole, or None if it has none. Collective."""

        def check() -> str:
            self.reducer.accept_user_grads("full_grad")
            self.reducer.host_grads.arrive()
            return self._of("full_grad", param)[1].name

        self.together("full_grad", check, self.reducer.count)
        bucket, managed = self._of("full_grad", param)
        self.reducer.reduce_pending()
        self.reducer.host_grads.arrive()
        grad = bucket.owned_grad()
        if not managed.has_grad or grad is None:
            return None
        return self.full_tensors.of_param(bucket, managed, lambda start, numel: grad[start : start + numel]).to(self.device)

    @torch.no_grad()
    def full_state(self, param: nn.Parameter, key: str) -> torch.Tensor:
        """Return one optimizer state ("step", "exp_avg", ...; "master") of one parameter, whole. Collective."""

        def check() -> str:
            bucket, managed = self._of("full_state", param)
            known = ["step", *(bucket.state_format.keys if bucket.group is not None else ())]
            if key not in known:
                raise KeyError(f"full_state: {managed.name} has no state {key!r}; expected one of {', '.join(known)}")
            self.updater.accept_weight_edits()
            return f"{key} of {managed.name}"

        self.together("full_state", check)
        bucket, managed = self._of("full_state", param)
        if key == "step":
            return step_tensor(managed.step)
        return self.full_tensors.of_param(bucket, managed, partial(self.store.read, bucket, key))

    def _of(self, op: str, param: nn.Parameter) -> tuple[Bucket, Managed]:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"{op}: got a {type(param).__name__}; expected a parameter of the sharded model")
        if param not in self.managed or not self.bucket_of[param].trainable:
            raise ValueError(f"{op}: the parameter was frozen when shard() was called; expected a trainable one")
        return self.bucket_of[param], self.managed[param]

    def master_or_weight(self, bucket: Bucket) -> torch.Tensor:
        """Return the owned range of the bucket's weights as the optimizer sees them: the masters where there are any.

        Or the whole weights, where they are here and there is no master.
        """
        if bucket.state_format.master is not None:
            return self.store.read(bucket, "master")
        return bucket.weight if self.lifetimes.full_weight_resident else bucket.owned_weight


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C take effect at the end. (Only the main thread is interrupted.)"""
    old = signal.getsignal(signal.SIGINT)
    if not callable(old) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
        if came:
            old(*came[0])
