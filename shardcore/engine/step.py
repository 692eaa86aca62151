"""The step: global norm, the decision to clip or skip, Adam over the owned ranges, and the new
weights to every rank.

At stages 1 and 2 the step goes bucket by bucket: the new weights of one bucket are gathered while
Adam updates the next one. Without communication and with states on the device, one kernel call
updates everything. Ctrl-C that arrives before the ranks agree on a step raises on all of them, and
no rank is updated. After the agreement it is delayed to the end of the step
(`interrupts_held_back`).
"""

import logging
import math
import signal
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Started, Traffic, wait_all
from shardcore.distributed.compare import Entry
from shardcore.engine.agreement import HEADER_BYTES, Payload, agree, attempt
from shardcore.engine.bucket import Bucket, Lifetimes, Managed
from shardcore.engine.device_step import DeviceStep, PendingResult
from shardcore.engine.loss_scale import LossScaler
from shardcore.engine.orthogonalize import orthogonalized
from shardcore.engine.states import (
    Audited,
    Scalars,
    Span,
    StateStore,
    StepError,
    part_of,
    set_weights,
)
from shardcore.optim.base import Kind
from shardcore.optim.group_options import json_value, read_once
from shardcore.optim.muon import MuonKind
from shardcore.optim.tensor_lists import DeviceScale

logger = logging.getLogger("shardcore")


# of what a rank proposes in a step: the order of units and its squared norm
STEP_ROW_BYTES = HEADER_BYTES + 8 * 3


_COMPARED_NUMEL = 1 << 22  # elements of a weight that are compared with its master at once


def _zeros(numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.float64, device="cpu")


def _option(name: str, value: object) -> Entry:
    return "option", name, str(value)


@dataclass(frozen=True)
class StepPlan:
    """A step that all ranks take: which ranges of each bucket get which scalars, as the groups'
    options were.

    updated: the parameters. same_order: the order of units that was passed to `decide` is the same
    on every rank.
    """

    spans: Mapping[Bucket, Sequence[Span]]
    hypers: Scalars
    updated: Sequence[Managed]
    same_order: bool


class Outcomes:
    """What became of the steps: the last norm, how many steps each parameter made, the loss scale,
    and the log line of a step that was skipped.

    last_norm: before clipping; None before the first step.
    """

    def __init__(self, optimizer: Any, scaler: LossScaler | None) -> None:
        """Count skipped steps in `optimizer`. scaler: None if losses are not scaled."""
        self._optimizer = weakref.ref(optimizer)
        self._scaler = scaler
        self.last_norm: float | None = None

    def add(self, norm: float, updated: Sequence[Managed]) -> None:
        """Note a step that updates `updated`, unless the norm is not finite. RuntimeError if the
        loss scale would fall below its minimum.
        """
        finite = math.isfinite(norm)
        for managed in updated if finite else ():
            managed.step += 1
        self.record(norm, 0 if finite else 1, None)

    def record(self, norm: float, skips: int, scale: tuple[float, int, int] | None) -> None:
        """Note a step's norm and whether it was skipped. scale: as the device updated it; None:
        the host updates it.
        """
        self.last_norm = norm
        if not skips:
            if self._scaler is not None:
                self._scaler.after_update(scale)
            return
        skipped = self.count_skips(skips)
        logger.warning(
            "step: the global gradient norm is %s; nothing was updated on any rank (skipped steps "
            "so far: %s)%s",
            norm,
            "not counted, as the optimizer is gone" if skipped is None else skipped,
            "" if self._scaler is None else self._scaler.after_overflow(scale),
        )

    def count_skips(self, new: int) -> int | None:
        """Count skipped steps in the optimizer; returns how many there are, None if it is gone."""
        optimizer: Any = self._optimizer()
        return None if optimizer is None else int(optimizer._count_skip(new))


def run_steps(
    store: StateStore,
    audit: Audited | None,
    parts: Sequence[Sequence[Span]],
    hypers: Scalars,
) -> Iterator[_C.CopyEvent | None]:
    """Run StateStore.steps, audited where steps are."""
    return store.steps(parts, hypers) if audit is None else audit.steps(store, parts, hypers)


def gather_new_weights(comm: Comm, buckets: Sequence[Bucket]) -> list[Started]:
    """Start to gather the new weights of some buckets of a unit."""
    unit = buckets[0].unit
    with comm.scope(f"shardcore::gather({buckets[0].label})"):
        name = f"the new weights of {unit or 'the root'}"
        return comm.all_gather(
            [bucket.weight for bucket in buckets], Traffic.STEP, name, comm.shard_ranks
        )


class _WeightGathers:
    """The gathers of new weights in one step; those of a unit start at once, when its last bucket
    is updated.

    started: the gathers of each bucket's weights.
    """

    def __init__(self, comm: Comm, buckets: Iterable[Bucket]) -> None:
        """Gather `buckets`, which are updated in this order."""
        self._comm = comm
        units = [list(of_unit) for _, of_unit in groupby(buckets, key=lambda bucket: bucket.unit)]
        self._units = {of_unit[-1]: of_unit for of_unit in units}
        self.started: dict[Bucket, list[Started]] = {}

    def start(self, updated: Bucket) -> None:
        """Note that a bucket is updated, or never will be."""
        buckets = self._units.pop(updated, None)
        if buckets is not None:
            self.started.update(dict.fromkeys(buckets, gather_new_weights(self._comm, buckets)))


class Updater:
    """Turns reduced gradients into new weights on every rank, or skips the step on every rank."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        store: StateStore,
        comm: Comm,
        lifetimes: Lifetimes,
        kind: Kind,
        groups: Sequence[Mapping[str, Any]],
        constant: Sequence[Managed],
        device_step: DeviceStep | None,
        measure: Callable[[Bucket], None] | None,
    ) -> None:
        """Serve the buckets that the optimizer's `groups` (live param_groups) update; `kind`: what
        it is.

        constant: the weights that no step updates; ranks compare how these were loaded and edited,
        too. device_step: what decides in place of the host, which then waits for nothing
        (engine/device_step.py). measure: reads the new weights of each bucket right after its
        update (engine/float8.py); None: nothing does.
        """
        self._device_step, self._measure = device_step, measure
        self.audit: Audited | None = None
        self._constant = constant
        self.buckets = [bucket for bucket in buckets if bucket.group is not None]
        self.store = store
        self.comm = comm
        self.lifetimes = lifetimes
        self.kind = kind
        self.groups = groups
        # Their numbers key random bits, as in an unsharded optimizer.
        self._number = {
            param: number
            for number, param in enumerate(p for group in groups for p in group["params"])
        }
        self.loaded = ""  # says that an optimizer state was loaded since the last step
        self._failure: Exception | None = None  # of a step that was under way
        self._lost_edits: set[Managed] = set()  # that a warning named
        # The next step looks for them: the first one after shard or a load. (A pass over masters.)
        self.checks_masters = True
        # Compare the gradients of what all tensor-parallel ranks have, until a step has some that
        # are finite.
        self.compares_slices = bool(comm.slices)
        self.swapped = False  # the weights are those of an average (ema.py), not of the masters
        self._fixed = [kind.fixed(group) for group in groups]
        # What `_read_options` made of the groups' options. These were `_options` then; None: some
        # were tensors, whose values may change in place.
        self._options: Sequence[Any] | None = None
        self._read: Sequence[Mapping[str, Any]] = groups  # without tensors on a device
        self._hypers: Sequence[Callable[..., Any]] = ()  # make the scalars of each group's steps
        self._terms: Sequence[Entry] = ()  # the options in words, for other ranks
        self._gathers = lifetimes.gathers_new_weights and len(comm.shard_ranks) > 1
        # each bucket, so that only one has an orthogonalized gradient
        self._alone = isinstance(kind, MuonKind)
        # one call of the kernel
        self._at_once = lifetimes.owns_everything or (store.tier == "device" and not self._gathers)
        # as they were cut last, and by which scalars
        self._spans: dict[Bucket, tuple[tuple[int | None, ...], list[Span]]] = {}

    @torch.no_grad()
    def decide(
        self,
        grad_scale: float | DeviceScale,
        max_norm: float | None,
        problems: list[BaseException],
        loss_scale: float | None = 1.0,
        backwards: int = 0,
        order: Sequence[str] = (),
        started: Sequence[Entry] = (),
    ) -> tuple[float | PendingResult | None, StepPlan | None]:
        """Plan an update of every parameter that has a gradient; returns the global norm, None if
        there is no gradient at all.

        Where the norm is not finite there is no plan, or (where the device decides) one that writes
        nothing. The gradients are multiplied by `grad_scale` and, if `max_norm` is given, by the
        clip coefficient of their global norm; `loss_scale` is what they were divided by, None if
        only the device knows. Collective. `problems` has this rank's reason to refuse, if any: the
        first is taken out and raised, and every other rank raises an error that names it. So do all
        ranks if these numbers, the options of a group, the parameters that have gradients, the
        `backwards` (Reducer.count), or the collectives `started` (Comm.take_order) differ between
        ranks. `order` may differ.
        """
        active = [
            bucket
            for bucket in self.buckets
            if bucket.reduced and any(m.has_grad for m in bucket.params)
        ]
        compared_scale = (
            (grad_scale.grad_scale, grad_scale.loss_scale)
            if isinstance(grad_scale, DeviceScale)
            else grad_scale
        )
        terms = {
            "grad_scale": compared_scale,
            "max_norm": max_norm,
            "loss_scale": loss_scale,
            "backwards": backwards // 2,
        }
        squares, same_order, any_grad = self._agreed(
            active, problems, terms, zlib.crc32("\n".join(order).encode()), started
        )
        if self.audit is not None:
            self.audit.next_step()
        if not any_grad:
            return None, None
        if self._device_step is not None:
            return self._decide_on_device(
                self._device_step, active, squares, grad_scale, max_norm, same_order
            )
        assert isinstance(grad_scale, float)
        norm = _C.norm_from_sq(_C.sq_norm_add(squares))
        scale = _C.clipped_scale(grad_scale, norm, math.inf if max_norm is None else max_norm)
        norm *= abs(grad_scale)
        if scale is None or not active:
            return norm, None
        updated = self._with_grad(active)
        with self._after_agreement():
            keys = [(managed.group, managed.step) for managed in updated]
            hyper_index = {key: index for index, key in enumerate(dict.fromkeys(keys))}
            hypers = [
                self._hypers[group](step=step + 1, grad_scale=scale)
                for group, step in hyper_index
                if group is not None  # which is in no active bucket
            ]
            if len(hypers) == 1:  # nearly always, and there may be thousands of parameters
                index_of = dict.fromkeys(updated, 0)
            else:
                index_of = dict(zip(updated, map(hyper_index.__getitem__, keys), strict=True))
            return norm, StepPlan(self._spans_of(active, index_of), hypers, updated, same_order)

    def _decide_on_device(
        self,
        device_step: DeviceStep,
        active: Sequence[Bucket],
        squares: torch.Tensor,
        grad_scale: float | DeviceScale,
        max_norm: float | None,
        same_order: bool,
    ) -> tuple[PendingResult | None, StepPlan | None]:
        """See `decide`. squares: of this rank's buckets."""
        updated = self._with_grad(active)
        first: dict[tuple[int | None, int], int] = {}  # of each group and cohort
        index_of = {
            m: first.setdefault((m.group, m.cohort), number) for number, m in enumerate(updated)
        }
        # from the CPU if there are none here
        squares = squares.to(device_step.state.words.device)
        if self.comm.world_size > 1:
            squares = self.comm.gather_rows(_C.sq_norm_add(squares), Traffic.STEP, "a step")
        if self.comm.across:
            squares = self.comm.of_parts(_C.sq_norm_add(squares), Traffic.STEP, "a step")
        with self._after_agreement():
            scalars, outcome = device_step.decide(
                squares, updated, self._read, grad_scale, max_norm
            )
            if not active:
                return outcome, None
            spans = self._spans_of(active, index_of)
            return outcome, StepPlan(spans, scalars, updated, same_order)

    @torch.no_grad()
    def apply(self, plan: StepPlan, wait: bool = True) -> dict[Bucket, list[Started]]:
        """Update weights and states. Bucket by bucket where something of one travels while the next
        is computed.

        Returns what gathers the new weights of each bucket, unless it is waited for here.
        """
        gathers = _WeightGathers(self.comm, plan.spans if self._gathers else ())
        with self.comm.clock.part(None if self.store.tier == "device" else "exposed_offload"):
            # a call of the kernel for each bucket: its weights are in the cache when they are read
            singly = self._alone or (self._at_once and self._measure is not None)
            runs = [[bucket] for bucket in plan.spans] if singly else [[*plan.spans]]
            for run in runs:
                try:
                    with self._prepared(plan, run[0]):
                        if self._at_once:
                            self._update_at_once(run, plan)
                        else:
                            self._update_in_turn(run, plan, gathers)
                except Exception as error:
                    self._failure = self._failure or error
                # after an error other ranks wait for them; at the next step this one refuses
                for bucket in run if self._gathers else ():
                    gathers.start(bucket)
        started = gathers.started
        if wait or self._failure is not None:
            with self.comm.clock.part("exposed_gather" if started else None):
                wait_all(chain.from_iterable(started.values()))
        self.raise_failure()
        return started

    def _update_at_once(self, buckets: Sequence[Bucket], plan: StepPlan) -> None:
        """Update buckets by one call of the kernel: nothing of them travels beside it."""
        spans = [span for bucket in buckets for span in plan.spans[bucket]]
        steps = run_steps(self.store, self.audit, [spans], plan.hypers)
        with self.comm.scope("shardcore::adam"):
            copied = next(steps)
        next(
            steps, None
        )  # the store ends its step; dropped before, it would wait as after an error
        self._arrive(buckets, copied)

    def _update_in_turn(
        self, buckets: Sequence[Bucket], plan: StepPlan, gathers: "_WeightGathers"
    ) -> None:
        """Update one bucket after the other. While the next one is updated, the new weights of each
        are copied, and then gathered.
        """
        parts = [plan.spans[bucket] for bucket in buckets]
        steps = run_steps(self.store, self.audit, parts, plan.hypers)
        before: Bucket | None = None
        copied: _C.CopyEvent | None = None  # of the new weights of `before`
        for bucket in buckets:
            with self.comm.scope(f"shardcore::adam({bucket.label})"):
                copying = next(steps)
            if before is not None:
                self._arrive([before], copied)
                gathers.start(before)
            before, copied = bucket, copying
        next(steps, None)  # as above
        if before is not None:
            self._arrive([before], copied)

    def _arrive(self, buckets: Sequence[Bucket], copied: _C.CopyEvent | None) -> None:
        """Wait for the copy of buckets' new weights, if there is one, and measure them."""
        if copied is not None:
            copied.wait()
        if self._measure is not None:
            for bucket in buckets:
                self._measure(bucket)

    def _prepared(self, plan: StepPlan, bucket: Bucket) -> AbstractContextManager[None]:
        """Let the bucket's gradient be what the kind of optimizer updates with, inside the
        context.
        """
        if not self._alone:
            return nullcontext()
        spans = plan.spans[bucket]
        return orthogonalized(
            bucket,
            spans,
            plan.hypers,
            self.groups,
            self.store,
            self.comm,
            self.lifetimes,
            self.raise_failure,
        )

    @contextmanager
    def _after_agreement(self) -> Iterator[None]:
        """Let what fails on this rank, after all have agreed on the step, be a step that failed
        on its way.
        """
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise StepError if `apply` has failed on its way, this time and from then on."""
        if self._failure is not None:
            raise StepError(
                f"step: updating the weights failed on its way ({type(self._failure).__name__}: "
                f"{self._failure}); expected it "
                "to succeed (some weights are new, some are not: make the model anew and load its "
                "last saved state)"
            ) from self._failure

    def check(self, touched: Sequence[Bucket]) -> None:
        """Raise ValueError or TypeError for group options or parameters that no step can use.

        touched: see accept_weight_edits.
        """
        options = _plain_options(self.groups)
        if options is None or options != self._options:
            self._read_options()
            self._options = options
        self.accept_weight_edits(touched)

    def _read_options(self) -> None:
        """Check the groups' options, and make what a step needs of them."""
        self._options = None
        self._read = read_once(self.groups, self.kind.read)
        for index, group in enumerate(self._read):
            self.kind.check_options("step", group, f"param_groups[{index}].")
        self.check_fixed("step", self._read)
        self._hypers = [self.kind.hypers(group) for group in self._read]
        self._terms = [
            ("group option", f"param_groups[{index}].{key}", str(json_value(value)))
            for index, group in enumerate(self._read)
            for key, value in self.kind.terms(group).items()
        ]

    def check_fixed(self, op: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError for an option that decides which states there are and is not as it
        was when they were made.
        """
        if len(groups) != len(self._fixed):
            raise ValueError(
                f"{op}: param_groups has {len(groups)} groups; expected {len(self._fixed)}, as "
                f"shard() found them"
            )
        for index, (group, fixed) in enumerate(zip(groups, self._fixed, strict=True)):
            now = self.kind.fixed(group)
            for key, value in fixed.items():
                if now[key] != value:
                    raise ValueError(
                        f"{op}: param_groups[{index}].{key} is {now[key]!r}; expected {value!r}, "
                        f"as when shard() was called "
                        "(states are laid out once: set it before shard)"
                    )

    def _agreed(
        self,
        active: Sequence[Bucket],
        problems: list[BaseException],
        terms: Mapping[str, object],
        order: int,
        started: Sequence[Entry],
    ) -> tuple[torch.Tensor, bool, bool]:
        """Return squared norms of the averaged gradients (n, 2), whether ranks passed one `order`,
        and if any part is active.

        The squares are those of each part of the model; where the device decides those of this
        rank's buckets, and nothing waits for them. Raises on all ranks, of all parts, if one
        refuses or differs in its terms. (Parts have buckets of their own, and only compare how
        gradients are scaled and clipped.)
        """
        compared: list[Entry] = []
        own_squares: list[torch.Tensor] = []
        traces: list[torch.Tensor] = []
        if self.comm.world_size > 1:
            attempt(problems, lambda: compared.extend([*started, *self._compared(terms)]))
        attempt(problems, lambda: own_squares.append(self._own_squares(active)))
        if self.compares_slices:
            attempt(problems, lambda: traces.append(self._traces()))
        squares = own_squares[0] if own_squares else _zeros(2)
        tensors = {"order": torch.tensor([order], device="cpu")}
        if self.compares_slices:
            tensors["traces"] = traces[0] if traces else _zeros(2 * len(self._whole()))
        on_host = self._device_step is None
        if on_host:  # the device gathers its own, and nothing waits for them
            tensors["squares"] = squares

        def of_part(ranks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            part = {"active": torch.tensor([bool(active)], device="cpu")}
            return part | ({"squares": _C.sq_norm_add(ranks["squares"])} if on_host else {})

        scaling = [_option(key, terms[key]) for key in ("grad_scale", "max_norm", "loss_scale")]
        ranks, parts = agree(
            self.comm,
            "step",
            problems,
            compared,
            payload=Payload(tensors, Traffic.STEP, "a step", of_part),
            over=self.comm.across,
            entries_of_model=scaling if self.comm.across else (),
            then="no rank was updated",
        )
        if self.compares_slices and (unlike := self._unlike(ranks["traces"])):
            raise ValueError(unlike)
        self.loaded = ""
        self.forget_changes()
        same_order = bool((ranks["order"] == order).all())
        return parts["squares"] if on_host else squares, same_order, bool(parts["active"].any())

    def _own_squares(self, active: Sequence[Bucket]) -> torch.Tensor:
        squares = _squares_of(active)
        return squares if self._device_step is not None else _C.sq_norm_add(squares.cpu())

    def _whole(self) -> list[Managed]:
        """Return the parameters that all tensor-parallel ranks have."""
        return [managed for bucket in self.buckets if bucket.repeated for managed in bucket.params]

    def _traces(self) -> torch.Tensor:
        """Return two numbers of this rank's part of each of their gradients.

        These are its squared norm, and its product with a fixed vector.
        """
        index_of = {managed: index for index, managed in enumerate(self._whole())}
        traces = torch.zeros(len(index_of), 2, dtype=torch.float64, device="cpu")
        for bucket in (bucket for bucket in self.buckets if bucket.repeated and bucket.reduced):
            for start, part in bucket.grads():
                for managed, piece, view in bucket.owned_views(part, start):
                    first = piece.param_start + max(0, start - piece.start)
                    for part_of_view in torch.split(view, 1 << 20) if managed.has_grad else ():
                        values, end = part_of_view.double(), first + len(part_of_view)
                        fixed = torch.arange(
                            first, end, dtype=torch.float64, device=values.device
                        ).cos_()
                        traces[index_of[managed]] += torch.stack(
                            [values.dot(values), values.dot(fixed)]
                        ).cpu()
                        first = end
        return traces.flatten()

    def _unlike(self, rows: torch.Tensor) -> str:
        """Say what is wrong if tensor-parallel ranks have different gradients of a whole parameter.

        Collective over these ranks. rows: the traces of the ranks that share their slices.
        Differences below a sixteenth of the norm are ignored, as some kernels add in any order; so
        are gradients that are noise beside the largest one.
        """
        own = [self.comm.rank] if self.lifetimes.owns_everything else sorted(self.comm.shard_ranks)
        traces = self.comm.of_parts(
            rows[own].sum(0), Traffic.STEP, "a step", self.comm.slices
        ).view(-1, rows.size(1) // 2, 2)
        # A step with other gradients is skipped, or has none.
        self.compares_slices = not traces.isfinite().all() or (
            traces.numel() > 0 and not traces.any()
        )
        norms, products = traces[..., 0].sqrt(), traces[..., 1]
        spread = torch.maximum(norms.amax(0) - norms.amin(0), products.amax(0) - products.amin(0))
        largest = norms.amax(0)
        differing = (
            ((spread > largest / 16) & (largest > 1e-6 * norms.amax())).nonzero().flatten().tolist()
        )
        if not differing:
            return ""
        self.compares_slices = True
        last = differing[-1]  # what comes before it in a forward gets its wrong gradients
        return (
            f"step: the gradient of {self._whole()[last].name}, which every tensor-parallel rank "
            f"has in full, differs between these ranks (norms "
            f"{', '.join(f'{norm:.4g}' for norm in norms[:, last].tolist())}); "
            "expected the same batch and random seed on these ranks, and a plan that slices the "
            "parameter, or marks "
            'its module "replicated_with_grad_allreduce" if each rank sees other features (none '
            "was updated)"
        )

    def _compared(self, terms: Mapping[str, object]) -> list[Entry]:
        """Return what has to be the same on every rank for a step to give the same weights."""
        on_host = self._device_step is None
        entries: list[Entry] = [_option(name, value) for name, value in terms.items()]
        entries += self._terms
        for bucket in self.buckets:
            for managed in bucket.params:
                has_grad = bucket.reduced and managed.has_grad
                entries.append(
                    (
                        "parameter",
                        managed.name,
                        "with a gradient" if has_grad else "without a gradient",
                        f"at step {managed.step if on_host else managed.tried}",
                        managed.changes.removeprefix(", ") or "unchanged",
                    )
                )
        entries += [
            ("changed frozen weight", managed.name, managed.changes.removeprefix(", "))
            for managed in self._constant
            if managed.changes
        ]
        return [*entries, ("optimizer state", "", self.loaded or "not loaded")]

    def _every(self) -> Iterable[Managed]:
        return chain(*(bucket.params for bucket in self.buckets), self._constant)

    def forget_changes(self) -> None:
        """Hold no load or edit of weights so far against any rank: they have been compared, or
        all weights are new.
        """
        for managed in self._every():
            managed.changes = ""

    def changed(self) -> str:
        """Say how many weights were loaded or edited since the last step; "" for none."""
        count = sum(bool(managed.changes) for managed in self._every())
        return f" after {count} of its weights were loaded or edited" if count else ""

    def _spans_of(
        self, active: Sequence[Bucket], index_of: Mapping[Managed, int]
    ) -> dict[Bucket, list[Span]]:
        """Cut the owned ranges into spans of equal scalars, `index_of` each parameter; padding
        between rides along (all zeros).

        Where random bits are drawn each parameter has spans of its own: they are keyed by it.
        """
        plan: dict[Bucket, list[Span]] = {}
        for bucket in active:
            indices = tuple(map(index_of.get, bucket.params))
            if bucket not in self._spans or self._spans[bucket][0] != indices:
                self._spans[bucket] = indices, self._cut(bucket, indices)
            plan[bucket] = self._spans[bucket][1]
        return plan

    def _cut(self, bucket: Bucket, indices: Sequence[int | None]) -> list[Span]:
        """Cut a bucket's owned range; `indices` says which scalars update each of its
        parameters, None: it stays.
        """
        spans: list[Span] = []
        previous = None
        for piece in bucket.pieces:
            managed, index, end = (
                bucket.params[piece.slot],
                indices[piece.slot],
                piece.start + piece.numel,
            )
            if index is not None and index == previous:
                spans[-1] = Span(bucket, spans[-1].start, end - spans[-1].start, index)
            elif index is not None:
                spans.append(
                    Span(
                        bucket,
                        piece.start,
                        piece.numel,
                        index,
                        (self._number[managed.param], piece.param_start),
                    )
                )
            previous = None if bucket.state_format.random else index
        return spans

    @staticmethod
    def _with_grad(buckets: Iterable[Bucket]) -> list[Managed]:
        return [managed for bucket in buckets for managed in bucket.params if managed.has_grad]

    # --- weights and masters ----------------------------------------------------------------------

    @property
    def has_edits(self) -> bool:
        """Whether parameters that a step updates were edited in place, which
        `accept_weight_edits` has not seen.
        """
        return any(bucket.changed or bucket.edited_params() for bucket in self.buckets)

    @torch.no_grad()
    def accept_weight_edits(self, touched: Sequence[Bucket] | None = None) -> None:
        """Bring masters in line with parameters that were edited in place since the engine last
        wrote them.

        Elements that still equal their rounded master keep its full precision. Raises ValueError if
        a parameter no longer uses the engine's memory (`.data` re-assigned, model moved or cast),
        or weights are swapped. touched: the buckets that are not `untouched`, None for all.
        """
        self.refuse_swapped("step")
        for bucket in self.buckets:
            if touched is not None and bucket not in touched and not bucket.changed:
                continue
            bucket.check_in_place("step")
            edited = bucket.edited_params()
            if edited or bucket.changed:
                self._refresh_masters(bucket, edited)
        for managed in self._constant:
            if managed.edited:
                managed.note_edit()

    def refuse_swapped(self, op: str) -> None:
        """Raise ValueError if the weights are those of an average."""
        if self.swapped and not op.startswith("EMA."):
            raise ValueError(
                f"{op}: the model holds averaged weights inside `with ema.swap():`; leave that "
                "block first (ema.state_dict() returns the averages)"
            )

    def _refresh_masters(self, bucket: Bucket, edited: set[Managed]) -> None:
        bucket.take_edits()
        behind, bucket.changed = bucket.changed, False
        bucket.rewritten = True
        for managed, piece, values in bucket.owned_views(
            bucket.owned_values(0, bucket.owned_numel)
        ):
            if (behind or managed in edited) and bucket.state_format.master is not None:
                old = self.store.read(bucket, "master", piece.start, piece.numel).to(values.device)
                rounded = torch.empty_like(values)
                _C.cast([rounded], [old])
                self.store.write(
                    bucket,
                    "master",
                    piece.start,
                    torch.where(rounded == values, old, values.float()),
                )
        for managed in edited:
            managed.note_edit()

    @torch.no_grad()
    def lost_edits(self, in_files: bool = True) -> list[str]:
        """Return the names of weights that no longer are their masters rounded, the first time that
        each is found.

        Accepted edits are in the masters. What was written through `.data`, which no version
        counter shows, is not. Only this rank's part is looked at; weights in files if `in_files`.
        """
        lost: dict[Managed, None] = {}
        for bucket in self.buckets:
            # a split master changes with its weight
            if bucket.state_format.master != "fp32" or (bucket.files is not None and not in_files):
                continue
            for managed, piece, values in bucket.owned_views(
                bucket.owned_values(0, bucket.owned_numel)
            ):
                start = piece.start
                for part in torch.split(values, _COMPARED_NUMEL):
                    master = self.store.read(bucket, "master", start, part.numel())
                    start += part.numel()
                    rounded = torch.empty_like(part, device=master.device)
                    _C.cast([rounded], [master])
                    weight = part.to(master.device)
                    same = torch.equal(rounded, weight) or torch.equal(
                        rounded.nan_to_num(), weight.nan_to_num()
                    )
                    if not same and managed not in self._lost_edits:
                        lost[managed] = None
        self._lost_edits.update(lost)
        return [managed.name for managed in lost]

    def warn_of_lost_edits(self, op: str) -> None:
        """Give one UserWarning for `lost_edits`."""
        if lost := self.lost_edits():
            warnings.warn(
                f"{op}: the weights of {', '.join(lost)} were edited behind autograd (p.data, or a "
                "view of it). The float32 masters lack the edit, and the next step and "
                "checkpoints use the masters. Edit the parameter itself: with torch.no_grad(): "
                "p.clamp_(-1, 1)",
                UserWarning,
                stacklevel=5,
            )

    def undo_of_load(self, bucket: Bucket, managed: Managed) -> Callable[[], None]:
        """Return what brings a parameter's owned weights and master back as they are now."""
        changes, old = managed.changes, []
        for piece in bucket.pieces_of(managed):
            has_master = bucket.state_format.master is not None
            master = (
                self.store.read(bucket, "master", piece.start, piece.numel).clone()
                if has_master
                else None
            )
            old.append((piece.start, bucket.owned_values(piece.start, piece.numel).clone(), master))

        def undo() -> None:
            for start, weights, master in old:
                bucket.assign(start, weights)
                if master is not None:
                    self.store.write(bucket, "master", start, master)
            managed.changes = changes

        return undo

    def set_weights(self, bucket: Bucket, managed: Managed, values: torch.Tensor) -> None:
        """Set a parameter, and this rank's part of its master, from `values` (of what is
        managed; any float dtype).
        """
        set_weights(self.store, bucket, managed, part_of(values))
        managed.note_load()


_PLAIN = {bool, float, int, str, type(None)}


def _plain_options(groups: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """Return all options of the groups, to compare with those of the last step; None if some are
    not plain values.

    With the types of the values, as True == 1 == 1.0.
    """
    options: list[Any] = []
    for group in groups:
        options.append(len(group))
        for name in group:
            if name == "params":
                continue
            value = group[name]
            values = value if isinstance(value, tuple | list) else (value,)
            types = [*map(type, values)]
            if not _PLAIN.issuperset(types):
                return None
            options += [name, type(value), *types, *values]
    return options


def _squares_of(buckets: Sequence[Bucket]) -> torch.Tensor:
    """Return the squared norms of the buckets' gradients (n, 2), where they lie; those not taken
    yet in one call.
    """
    squares, grads = [], []
    for bucket in (bucket for bucket in buckets if bucket.counted):
        if bucket.sq_norm is not None:
            squares.append(bucket.sq_norm)
        else:
            assert bucket.grad is not None
            grads.append(bucket.grad)
    if grads:
        squares.append(_C.sq_norm(grads))
    return torch.stack(squares) if squares else torch.zeros(0, 2, dtype=torch.float64, device="cpu")


# handlers of these may raise
_ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@contextmanager
def interrupts_held_back() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C, and signals by which jobs are ended, take effect at the end. (Handlers run on the
    main thread alone.)

    Yields a function by which those that have come so far take effect at once.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    handlers: dict[int, Any] = {
        number: signal.getsignal(number) for number in _ENDING if on_main_thread
    }
    with ExitStack() as calls, ExitStack() as old:  # which makes every call, though one raises
        for number, handler in handlers.items():  # SIGINT's is put back last
            if callable(handler):
                old.callback(signal.signal, number, handler)
                signal.signal(
                    number, lambda number, frame: calls.callback(handlers[number], number, frame)
                )
        yield calls.close
