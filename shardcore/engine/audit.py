"""Audits: whether this rank computes the bits that it should (`shard(audit=)`).

Every K-th step is audited in three ways. None needs a second run.

- Update: a chunk of the rank's shard. Gradient, weights and states are copied before and after the
  update. The CPU kernel computes the update again from the first copy, to the same bits.
- Reduction: a piece of one bucket. Each rank also adds up the piece of the rank before it, from
  copies of the local gradients, and the two sums are compared.
- Replicas: digests of the weights and states that several ranks have.

The copies are queued with the update; the results are compared at the start of the next step, where
all ranks agree anyway (at the end of the same step where steps are committed to files, and at a
save). So every rank learns of a difference before anything else is written.
"""

import logging
import socket
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from shardcore._native import _C
from shardcore.distributed.everyone import Everyone
from shardcore.engine.agreement import together
from shardcore.engine.bucket import Bucket
from shardcore.engine.digests import (
    Digests,
    key_of,
    ranges_on_one_tier,
    stored_states,
    stored_weight,
    unsigned,
)
from shardcore.engine.engine import Engine
from shardcore.engine.reduce_scatter import Parts
from shardcore.engine.states import Scalars, Span, StateStore, lists_of, update_elements
from shardcore.layout import BLOCK, round_up
from shardcore.optim.elementwise import ElementFormat
from shardcore.optim.state_format import SCALES, StateTensors

logger = logging.getLogger("shardcore")

_SUMMED = 1 << 22  # elements of local gradients that a rank copies for an audit of the reduction
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SilentCorruption(RuntimeError):  # noqa: N818 - it is about hardware, not the program
    """An audit found bits that differ from the bits that the same inputs give
    (`shard(audit={"on_corruption": "raise"})`). Raised on every rank.
    """


@dataclass(frozen=True)
class AuditOptions:
    """Every how many steps, over how many audits the whole shard, and whether a difference raises
    SilentCorruption.
    """

    every: int
    on_corruption: str = "log"
    sweep: int = 100


@dataclass(frozen=True)
class _Copy:
    """A part of the audited chunk, on the CPU: its tensors before the update, and after.

    device: where the optimizer ran.
    """

    span: Span
    before: StateTensors
    device: torch.device
    scalars: Scalars
    after: StateTensors


@dataclass(frozen=True)
class _Sent:
    """A range of the local gradient of a bucket, by the rank that adds it up: (ranks, numel)."""

    bucket: Bucket
    start: int
    pieces: torch.Tensor


class Audit:
    """The audits of one engine. What `Updater.audit` and `Reducer.audit` are."""

    def __init__(self, engine: Engine, options: AuditOptions) -> None:
        """Begin with none."""
        self._engine_ref = weakref.ref(engine)  # the engine keeps this object
        self._options = options
        self._everyone = Everyone(engine.comm, engine.comm.across)
        # else there is nothing to add up, or the backend adds, in an order of its own
        self._adds = engine.comm.world_size > 1 and engine.options["reduction"] == "ordered"
        self._steps = self._audits = 0
        self._on = self._pending = self._begun = False
        self._copies: list[_Copy] = []
        self._copied: torch.cuda.Event | None = None
        self._sent: _Sent | None = None
        self._sum: torch.Tensor | None = None  # the digest of what this rank added up
        # both, of the audited step: the next backward begins before they are compared
        self._reduced: tuple[_Sent | None, torch.Tensor | None] = None, None
        self._found = False
        self._corruption: str | None = None
        self._saved: str | None = None

    @property
    def _engine(self) -> Engine:
        engine = self._engine_ref()
        assert engine is not None, "it makes these calls"
        return engine

    def next_step(self) -> None:
        """Begin a step, on which all ranks have agreed. Collective, as `settle`."""
        self.settle()
        self._begin_at_once()
        self._steps += 1
        self._on = self._pending = self._steps % self._options.every == 0
        self._audits += self._on
        self._reduced, self._sent, self._sum = (self._sent, self._sum), None, None

    def _begin_at_once(self) -> None:
        """Begin where a loaded run was, so that its sweep continues."""
        if not self._begun:
            self._begun = True
            params = (m for bucket in self._engine.updater.buckets for m in bucket.params)
            self._steps = max((managed.step for managed in params), default=0)
            self._audits = self._steps // self._options.every

    def saved(self, path: str) -> None:
        """Note a complete checkpoint, which `settle` came before."""
        if not self._found:
            self._saved = path

    # --- the update -------------------------------------------------------------------------------

    def steps(
        self, store: StateStore, parts: Sequence[Sequence[Span]], hypers: Scalars
    ) -> Iterator[_C.CopyEvent | None]:
        """Run StateStore.steps, and copy this step's chunk before and after it."""
        if not self._on:
            yield from store.steps(parts, hypers)
            return
        chunk = self._chunk()
        begun = [
            [self._begin(store, part, hypers) for span in spans for part in _cut(span, chunk)]
            for spans in parts
        ]
        for copies, event in zip(begun, store.steps(parts, hypers), strict=False):
            if copies and event is not None:
                event.wait()
            for copy in copies:
                copy.after["weight"] = self._to_host(_weights_of(copy.span))
            yield event
        # States in files are complete at the end of the store's step.
        for copy in (copy for copies in begun for copy in copies):
            self._copy_states(store, copy.span, copy.after)
            self._copies.append(copy)
        if self._engine.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._engine.device))

    def _chunk(self) -> dict[Bucket, tuple[int, int]]:
        """Return this audit's chunk, as (start, end) in each bucket's owned range; it may end
        before that range or begin behind it. The chunks of a sweep come in a random order.
        """
        buckets = self._engine.updater.buckets
        total = sum(bucket.owned_numel for bucket in buckets)
        numel = max(BLOCK, round_up(-(-total // self._options.sweep), BLOCK))
        count = -(-total // numel)
        sweep, number = divmod(self._audits - 1, count)
        generator = torch.Generator().manual_seed(sweep)
        low = int(torch.randperm(count, generator=generator, device="cpu")[number]) * numel
        chunk: dict[Bucket, tuple[int, int]] = {}
        for bucket in buckets:
            chunk[bucket] = low, low + numel
            low -= bucket.owned_numel
        return chunk

    def _begin(self, store: StateStore, span: Span, hypers: Scalars) -> _Copy:
        before: StateTensors = {"weight": self._to_host(_weights_of(span))}
        device = self._copy_states(store, span, before)
        if span.bucket.arrival is not None:
            span.bucket.arrival.synchronize()
        grads = [
            part[max(0, span.start - first) : max(0, span.start + span.numel - first)]
            for first, part in span.bucket.grads()
        ]
        before["grad"] = torch.cat([self._to_host(grad) for grad in grads if grad.numel()])
        if isinstance(hypers, _C.DeviceScalars):
            hypers = _C.DeviceScalars(self._to_host(hypers.bytes))
        return _Copy(span, before, device, hypers, {})

    def _copy_states(self, store: StateStore, span: Span, to: StateTensors) -> torch.device:
        """Copy the states of a span, and return where they are."""
        states = store.states_of(span.bucket, span.start, span.numel)
        to |= {key: self._to_host(flat) for key, flat in states.items()}
        return next((flat.device for flat in states.values()), self._engine.device)

    def _to_host(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory; of CUDA memory, it is complete in stream order."""
        host = torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda)
        return host.copy_(flat, non_blocking=True)

    def _check_update(self) -> str | None:
        """Return what an update wrote that differs from what the CPU computes, if anything."""
        copies, self._copies = self._copies, []
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        for copy in copies:
            expected = _updated(copy, torch.device("cpu"))
            for key, flat in expected.items():
                differs = _differing(flat, copy.after[key])
                if not len(differs):
                    continue
                again = _updated(copy, copy.device)[key].cpu()
                lasts = len(_differing(flat, again)) > 0
                at = int(differs[0])
                return (
                    f"{self._here()}: the update of step {self._steps} wrote "
                    f"{_bits(copy.after[key][at])} to {_place(copy.span, key, at)}; the CPU "
                    f"computes {_bits(flat[at])} from the same inputs ({len(differs)} of "
                    f"{len(flat)} elements differ; computed once more on {copy.device}, "
                    f"{'they differ again' if lasts else 'they are equal: transient'})"
                )
        return None

    # --- the reduction ----------------------------------------------------------------------------

    def sending(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Copy a range of each rank's piece of a local gradient, if its bucket's turn comes."""
        comm = self._engine.comm
        self._begin_at_once()
        if (self._steps + 1) % self._options.every or not self._adds:
            return
        buckets = [each for each in self._engine.buckets if each.trainable]
        if buckets[self._audits % len(buckets)] is not bucket or not flat.numel():
            return
        pieces = flat.view(comm.world_size, -1)
        size = pieces.size(1)
        numel = min(size, max(BLOCK, round_up(_SUMMED // comm.world_size, BLOCK)))
        parts = -(-size // numel)
        start = self._audits // len(buckets) % parts * numel
        self._sent = _Sent(bucket, start, pieces[:, start : start + numel].clone())
        self._sum = None

    def summing(self, bucket: Bucket, parts: Parts) -> None:
        """Add up the same range of this rank's piece, as it arrived."""
        sent = self._sent
        if sent is None or sent.bucket is not bucket:
            return
        columns = slice(sent.start, sent.start + sent.pieces.size(1))
        rows = parts.received.view(parts.count, -1)[:, columns].flatten()
        one = Parts(rows, parts.count, parts.own[columns], parts.number, parts.divided)
        self._sum = _digest(_sum_of(one))

    def _check_sum(self) -> dict[str, Any] | None:
        """Add up the piece of another rank. Collective; returns both digests, for all ranks to
        compare.
        """
        sent, own = self._reduced
        self._reduced = None, None
        if sent is None or own is None:
            return None
        comm = self._engine.comm
        whose, parts = self._engine.reducer.exchange.parts_of_other(sent.pieces)
        return {
            "unit": sent.bucket.unit,
            "part": self._part,
            "own": [comm.rank, unsigned(int(own))],
            "other": [whose, unsigned(int(_digest(_sum_of(parts))))],
        }

    @property
    def _part(self) -> list[int]:
        """Which part of the model this rank has, among slices and stages."""
        return [comm.rank for comm in self._engine.comm.across]

    # --- replicas ---------------------------------------------------------------------------------

    def _replicas(self) -> dict[str, int]:
        """Return digests of what other ranks have, too, by unit and range. States in files do not
        count: a step would have to read them all.
        """
        engine, digests = self._engine, Digests()
        slices = engine.comm.slices
        for bucket in engine.updater.buckets:
            copied = bucket.repeated and slices
            if not copied and bucket.reduces == (0, bucket.owned_numel):
                continue  # this rank alone has it
            part = [c.rank for c in engine.comm.across if not (copied and c in slices)]
            name = f"{bucket.unit}|{bucket.owned}|{part}"
            stored = {"weight": stored_weight(engine, bucket)[1]}
            if engine.store.tier != "nvme":
                states = stored_states(engine, bucket)
                stored |= {key: read for key, (_, read) in states.items()}
            for key, read in stored.items():
                number = key_of(f"{key} {bucket.params[0].name}", "", ())
                for start, end in ranges_on_one_tier(bucket, 0, bucket.owned_numel):
                    values, rest = read(start, end - start)
                    digests.add(name, number, values, start, rest)
                digests.flush()
        totals = digests.totals(torch.device("cpu")).tolist()
        return dict(zip(digests.names, map(unsigned, totals), strict=True))

    # --- what is found ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Compare what the last audited step has left. Collective, between steps. Raises
        SilentCorruption for a difference found now or before, if the options say so.
        """
        self._raise()
        if not self._pending:
            return
        self._pending = self._on = False
        engine = self._engine
        if engine.overlap_step is not None:
            engine.overlap_step.finish()
        row: dict[str, Any] = {}
        with together(self._everyone, "step: an audit", "nothing was updated"):
            row = {"update": self._check_update(), "replicas": self._replicas()}
        row["sum"] = self._check_sum()
        rows = self._everyone.gather_json(row)
        found = [row["update"] for row in rows if row["update"]]
        found += [*_unequal_sums(rows), *_unequal_replicas(rows)]
        if not found:
            return
        self._found = True
        text = "; ".join(found) + (
            f". The last checkpoint whose audits had all passed: {self._saved or 'none yet'}"
        )
        if engine.commits is not None:
            text += f"; committed to files: step {engine.commits.step}"
        if self._everyone.rank == 0 or row["update"]:
            logger.error("audit: %s", text)
        if self._options.on_corruption == "raise":
            self._corruption = text
            self._raise()

    def _raise(self) -> None:
        if self._corruption is not None:
            raise SilentCorruption(
                f"step: {self._corruption}. Nothing is updated or saved from now on: continue "
                "from there without this rank's hardware"
            )

    def _here(self) -> str:
        return f"rank {self._everyone.rank} ({_hardware(self._engine.device)})"


def _cut(span: Span, chunk: Mapping[Bucket, tuple[int, int]]) -> Iterator[Span]:
    """Yield the part of a span that is in the chunk, if there is one."""
    low, high = chunk[span.bucket]
    start, end = max(0, low - span.start), min(span.numel, high - span.start)
    if start < end:
        yield span.part(start, end - start)


def _weights_of(span: Span) -> torch.Tensor:
    return span.bucket.owned_values(span.start, span.numel)


def _sum_of(parts: Parts) -> torch.Tensor:
    out = torch.empty(parts.own.numel(), dtype=torch.float32, device=parts.own.device)
    parts.add_up(1.0, out)
    return out


def _digest(flat: torch.Tensor) -> torch.Tensor:
    return _C.digest([flat], [1], [0], [None])


def _updated(copy: _Copy, device: torch.device) -> StateTensors:
    """Return weights and states of a copy after the update, as `device` computes them."""
    new = {key: flat.to(device, copy=True) for key, flat in copy.before.items()}
    weight, grad = new.pop("weight"), new.pop("grad")
    scalars = copy.scalars
    if isinstance(copy.span.bucket.state_format, ElementFormat):
        update_elements([copy.span], [weight], [grad], [new], scalars)
    else:
        if isinstance(scalars, _C.DeviceScalars):
            scalars = _C.DeviceScalars(scalars.bytes.to(device))
        arguments = lists_of([copy.span], [new]) | {"changed": None}
        _C.AdamStepper().step([weight], [grad], hypers=scalars, **arguments)
    return {"weight": weight, **new}


def _differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the indices of elements whose bits differ. All NaNs are equal."""
    words = _WORDS[one.itemsize]
    differs = one.view(words) != other.view(words)
    if one.is_floating_point():
        differs &= ~(one.isnan() & other.isnan())
    return differs.nonzero().flatten()


def _bits(value: torch.Tensor) -> str:
    bits = int(value.view(_WORDS[value.itemsize])) % (1 << 8 * value.itemsize)
    return f"{value.item()!r} (0x{bits:0{2 * value.itemsize}x})"


def _place(span: Span, key: str, at: int) -> str:
    """Name an element: of which state, parameter and unit."""
    element = span.start + at * (BLOCK if key in SCALES.values() else 1)
    bucket = span.bucket
    unit = f" (unit {bucket.unit or 'the root'})"
    for piece in bucket.pieces:
        if piece.start <= element < piece.start + piece.numel:
            managed = bucket.params[piece.slot]
            index = piece.param_start + element - piece.start
            return f"{key} of {managed.name}, element {index}{unit}"
    return f"{key}, in padding{unit}"


def _hardware(device: torch.device) -> str:
    """Name the host and the device; of a GPU its UUID, and its serial number where NVML has it."""
    names = [socket.gethostname(), str(device)]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        uuid = f"GPU-{properties.uuid}"
        names += [properties.name, uuid]
        with suppress(Exception):  # pynvml is optional, and so is a serial number
            pynvml = import_module("pynvml")
            pynvml.nvmlInit()
            serial = pynvml.nvmlDeviceGetSerial(pynvml.nvmlDeviceGetHandleByUUID(uuid))
            names.append(f"serial {serial}")
    return ", ".join(names)


def _unequal_sums(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say which reduced pieces two ranks added up to other bits."""
    sums = [row["sum"] for row in rows if row["sum"] is not None]
    own = {(*each["part"], each["own"][0]): each["own"][1] for each in sums}
    for each in sums:
        whose, digest = each["other"]
        if own.get((*each["part"], whose), digest) != digest:
            yield (
                f"the gradient of {each['unit'] or 'the root'} that rank {whose} added up differs "
                f"from what rank {each['own'][0]} added up from the same local gradients (on the "
                "way to one of them, or in one of them)"
            )


def _unequal_replicas(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say which ranks have other bits than the ranks that have the same part."""
    by_name: dict[str, dict[int, int]] = {}
    for rank, row in enumerate(rows):
        for name, digest in row["replicas"].items():
            by_name.setdefault(name, {})[rank] = digest
    for name, digests in by_name.items():
        values = list(digests.values())
        most = max(values, key=values.count)
        odd = [rank for rank, digest in digests.items() if digest != most]
        if not odd:
            continue
        if 2 * values.count(most) <= len(values):
            odd = list(digests)  # no majority
        ranks = ", ".join(map(str, digests))
        unit = name.split("|")[0] or "the root"
        yield (
            f"weights or states of {unit} differ between the replicas of ranks {ranks}: "
            + (f"odd are {', '.join(map(str, odd))}" if odd != [*digests] else "no majority agrees")
        )
