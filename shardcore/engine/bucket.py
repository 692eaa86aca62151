"""The run-time form of a unit: flat buffers that its parameters are views into.

A unit has one bucket for each (dtype, optimizer group). What a rank keeps of it, and for how long,
is the lifetimes table (`Lifetimes`), the only place where ZeRO stages differ.

    buffer                          stage 0    stage 1    stage 2         stage 3
    full weights of a unit          resident   resident   resident        around their use
    full local gradient             resident   resident   until reduced   until reduced
    reduced gradient, master,
    states                          full       shard      shard           shard
    frozen weights                  resident   resident   resident        shard

Offload changes where the shard's tensors are stored, never a lifetime. At stage 0 and in a world of
one the reduced gradient uses the memory of the local gradient where dtypes allow it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

import torch
from torch import nn

from shardcore._native import _C
from shardcore.distributed.comm import as_bytes
from shardcore.engine.slices import Slice, held_by, slice_of
from shardcore.layout import Columns, FlatLayout, Piece
from shardcore.optim.float8 import Float8Format
from shardcore.optim.group_options import PARAM_DTYPES
from shardcore.optim.state_format import NO_STATES, StateFormat
from shardcore.torch_private import storage_id

# CPU buffers of this size or more (one huge page) ask for huge pages; smaller ones would waste the
# rest of theirs.
_HUGE_BUFFER_BYTES = 1 << 21


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zero-filled flat tensor; large ones on the CPU ask for huge pages."""
    if device.type == "cpu" and numel * dtype.itemsize >= _HUGE_BUFFER_BYTES:
        return _C.empty_huge(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


def stream_now(device: torch.device) -> torch.cuda.Stream | None:
    """Return the current stream of a GPU; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def follow(stream: torch.cuda.Stream | None, device: torch.device) -> None:
    """Let the current stream wait for the work that is queued on another one. None: there is
    nothing to wait for.

    While a graph is captured, only for work of the same graph: a capture begins after all other
    work has ended.
    """
    if stream is None or stream == (current := torch.cuda.current_stream(device)):
        return
    if torch.cuda.is_current_stream_capturing():
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return
    current.wait_stream(stream)


class BufferPool:
    """Lends a few buffers to many buckets, whatever their sizes, and counts their bytes.

    The smallest free buffer that is large enough is lent; where there is none, the largest free one
    is replaced by a larger one. So there are as many as are in use at once, and none is larger than
    the largest use.

    On CUDA a buffer is given in the order of the current stream: the stream that takes it next
    waits for that one.
    """

    def __init__(
        self, device: torch.device, dropped: Callable[[torch.Tensor], None] = lambda memory: None
    ) -> None:
        """Make an empty pool of buffers on `device`. `dropped` is called with memory that is
        given up: views keep it alive.
        """
        self.device, self._dropped = device, dropped
        self._free: list[torch.Tensor] = []  # bytes
        # all of the memory, by storage (on meta there are no addresses)
        self._lent: dict[int, torch.Tensor] = {}
        self._released_on: dict[int, torch.cuda.Stream] = {}  # by storage
        self.allocated_bytes = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer (numel,) with undefined content, for a short time."""
        size = numel * dtype.itemsize
        if size == 0:  # `release` ignores it
            return allocate(0, dtype, self.device)
        fitting = [
            (memory.numel(), index)
            for index, memory in enumerate(self._free)
            if memory.numel() >= size
        ]
        if fitting:
            memory = self._pop(min(fitting)[1])
        else:
            if self._free:
                self._drop(
                    max((memory.numel(), index) for index, memory in enumerate(self._free))[1]
                )
            memory = as_bytes(self.keep(numel, dtype))
        self._lent[storage_id(memory.untyped_storage())] = memory
        return memory[:size].view(dtype)

    def keep(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of exactly this size with undefined content, for a long time; it may
        be given to the pool later.
        """
        for index, memory in enumerate(self._free):
            if memory.numel() == numel * dtype.itemsize:
                return self._pop(index).view(dtype)
        self.allocated_bytes += numel * dtype.itemsize
        return allocate(numel, dtype, self.device)

    def release(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; the caller must not touch it again."""
        if buffer.numel():
            storage = storage_id(buffer.untyped_storage())
            self._free.append(self._lent.pop(storage, as_bytes(buffer)))
            if (stream := stream_now(self.device)) is not None:
                self._released_on[storage] = stream

    def shrink(self, limit_bytes: int) -> None:
        """Give up free buffers while there are more than `limit_bytes` in all."""
        while self._free and self.allocated_bytes > limit_bytes:
            self._drop(-1)

    def _pop(self, index: int) -> torch.Tensor:
        memory = self._free.pop(index)
        follow(self._released_on.pop(storage_id(memory.untyped_storage()), None), self.device)
        return memory

    def _drop(self, index: int) -> None:
        memory = self._free.pop(index)
        if (
            stream := self._released_on.pop(storage_id(memory.untyped_storage()), None)
        ) is not None:
            # torch's allocator knows the stream that it was allocated on alone
            memory.record_stream(stream)
        self.allocated_bytes -= memory.numel()
        self._dropped(memory)


@dataclass(frozen=True)
class Lifetimes:
    """What a stage keeps (see the table above).

    owns_everything: the reduced gradient, master and states cover the full bucket, not only the
    rank's shard.
    full_grad_resident: the full local gradient stays allocated between steps instead of only until
    it is reduced.
    full_weight_resident: so do the full weights, instead of only around their use (frozen ones are
    sharded then, too).
    """

    owns_everything: bool
    full_grad_resident: bool
    full_weight_resident: bool

    @property
    def gathers_new_weights(self) -> bool:
        """Whether a step's new weights are gathered at its end (stages 1 and 2): resident, and
        made in shards.
        """
        return self.full_weight_resident and not self.owns_everything


LIFETIMES = {
    0: Lifetimes(owns_everything=True, full_grad_resident=True, full_weight_resident=True),
    1: Lifetimes(owns_everything=False, full_grad_resident=True, full_weight_resident=True),
    2: Lifetimes(owns_everything=False, full_grad_resident=False, full_weight_resident=True),
    3: Lifetimes(owns_everything=False, full_grad_resident=False, full_weight_resident=False),
}


@dataclass(frozen=True)
class ReducePolicy:
    """How gradients accumulate: `accumulate` backwards a step; `sync_each` reduces every one of
    them, else only the last.

    grad_dtype: dtype of the reduced gradient (float32 or bfloat16) where ranks or micro-steps are
    summed.
    reduce_dtype: dtype of what travels, None for what there is: the parameter's dtype, or float32
    sums of micro-steps.
    backend_sums: the backend adds over ranks (engine/reduce_scatter.py).
    """

    accumulate: int
    sync_each: bool
    grad_dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None
    backend_sums: bool = False

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a local gradient of `dtype` is sent."""
        return self.reduce_dtype or dtype


_NOWHERE = torch.empty(0, device="cpu")
_DTYPE = attrgetter("dtype")


@dataclass(eq=False)
class Managed:
    """One parameter of the model under the engine, with what must be remembered about it between
    backward and step.

    index: its number in `model.parameters()`. group: its optimizer group, None for none. offset: of
    its slot in the bucket.
    used: this rank contributed to its gradient since the last reduction. has_grad: some rank did
    since zero_grad.
    grad_view: what stage 0 shows as `param.grad`.
    step: how many updates it has had. Where the device counts them (engine/device_step.py) that is
        as of the last read; tried: how many steps had its gradient, skipped ones included; cohort:
        see Note [Cohorts].
    storage, version: where its data lay, and its version counter (in-place edits move it), when the
    engine last knew its value.
    sliced: how it is cut over tensor-parallel ranks, None if it is not.
    changes: in words, whether its weights were loaded or edited since the last step, not with which
        values; ranks compare it, and a load makes up for what was before it.
    rewritten: whether they were loaded or edited since `Bucket.take_changes`.
    """

    name: str
    param: nn.Parameter
    index: int
    group: int | None
    offset: int = 0
    used: bool = False
    has_grad: bool = False
    step: int = 0
    tried: int = 0
    cohort: int = 0
    grad_view: torch.Tensor | None = None
    storage: tuple[int, int] = (0, 0)
    version: int = 0
    changes: str = ""
    rewritten: bool = True
    sliced: Slice | None = field(init=False)

    def __post_init__(self) -> None:
        """Find how the parameter is sliced, and know its value as it is now."""
        self.sliced = slice_of(self.name, self.param)
        self.version = self.version_now

    @property
    def local(self) -> torch.Tensor:
        """What is managed: the parameter, or the plain tensor of this rank's slice of it."""
        return self.param if self.sliced is None else held_by(self.param)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a tensor of the parameter's shape."""
        return full if self.sliced is None else self.sliced.cut(full)

    @property
    def columns(self) -> Columns | None:
        """What this rank has of the parameter, as columns; None: all of it."""
        return None if self.sliced is None else self.sliced.columns

    def full(self, local: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the parameter's shape of which `local` is what this rank has.
        Collective over slices.
        """
        return local if self.sliced is None else self.sliced.assemble(local)

    def as_param(self, local: torch.Tensor) -> torch.Tensor:
        """Return `local` in the parameter's form."""
        return local if self.sliced is None else self.sliced.wrap(local)

    def storage_now(self) -> tuple[int, int]:
        """Return the parameter's storage and offset: what changes when its `.data` is
        re-assigned, moved or cast.
        """
        return storage_id(self.local.untyped_storage()), int(self.local.storage_offset())

    @property
    def version_now(self) -> int:
        """The count of edits in place, of a DTensor or of what it holds."""
        return (
            self.param._version
            if self.sliced is None
            else self.param._version + self.local._version
        )

    @property
    def edited(self) -> bool:
        """Whether others than the engine wrote to the parameter since the engine did."""
        return self.version_now != self.version

    def note_load(self) -> None:
        """Note that all its weights were set."""
        self.changes, self.version = ", loaded", self.version_now
        self.rewritten = True

    def note_edit(self) -> None:
        """Note that its weights were edited."""
        self.changes = self.changes.removesuffix(", edited") + ", edited"
        self.version, self.rewritten = self.version_now, True

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View this parameter's slot of a full buffer of the bucket in the shape of what is
        managed.
        """
        return flat[self.offset : self.offset + self.local.numel()].view(self.local.shape)


def note_written(params: Sequence[Managed]) -> None:
    """Note that the engine wrote these weights, behind autograd: a graph that saved the old ones
    must not run backward.
    """
    versions = _C.note_write([managed.param for managed in params])
    for managed, version in zip(params, versions, strict=True):
        managed.version = version if managed.sliced is None else managed.version_now


def closed_message(name: str, unit: str, profiled: bool = False) -> str:
    """Return the error message for a read of weights that are sharded. profiled: while a profiler
    runs that reads weights.
    """
    inside = f"the forward and backward of {unit or 'the model'}"
    hint = (
        " torch.profiler's with_stack=True reads weights elsewhere: leave it out."
        if profiled
        else ""
    )
    return (
        f"{name} is sharded (stage 3) and unsharded only during {inside}. Read it inside "
        "`with shardcore.full_params(model):`. To copy or save the model, use model.state_dict() "
        f"or shardcore.save.{hint}"
    )


class WeightFiles(Protocol):
    """Shards of weights in files (offload/nvme_weights.py)."""

    def values(self, bucket: "Bucket", start: int, numel: int) -> torch.Tensor:
        """Copy elements [start, start + numel) of a shard into host memory."""

    def assign(self, bucket: "Bucket", start: int, values: torch.Tensor) -> None:
        """Overwrite elements of a shard from `start` on with `values`, which have its dtype."""

    def fetch(self, bucket: "Bucket", target: torch.Tensor) -> _C.CopyEvent | None:
        """Read a shard and copy it to `target`; returns the end of the copy."""

    def read_ahead(self, bucket: "Bucket") -> None:
        """Begin to read a shard that `bring` is soon called for, as far as there are buffers for
        it.
        """


class Bucket:
    """The parameters of one unit with one dtype and one optimizer group, and their buffers; or
    frozen ones of one dtype.

    weight: (layout.numel,) in `dtype`, the unsharded weights; the parameters are views of it. Empty
    while they are sharded.
    owned_weight: (owned_numel,), the owned range: a view of `weight` where that is resident, else
        memory of its own; empty where that is in `files`. See `owned_values`, `assign`.
    grad_dtype: the dtype in which the local gradient is sent, unless another is chosen: `dtype`;
        of float8 weights, which are kept in float32, the dtype that other weights have.
    float8: how the weights are cast before they are gathered (engine/float8.py); None: they are
        gathered as they are.
    reduces: the range, in the owned one, that this rank alone adds up, and writes to checkpoints.
    weight_tier: where that memory lies; tier: the only way to it where that is the host, or to
    `files`, else None.
    device_numel: how many elements of the owned range, its first ones, the device updates
        (offload/split_store.py); the CPU updates the other `host_numel`, whose states are in host
        memory.
    changed: the owned weights have edits that their masters do not have yet; perhaps through
        `p.data`, which no version counter shows. Not known where the unsharded weights are the
        shard.
    rewritten: whether others than steps wrote to the owned weights since `take_changes`. bits: by
        "device" and "host", a bit for each owned weight that is updated there, set by a step that
        changes it; empty where steps note nothing (engine/changes.py).
    counted: whether this rank's norm has it: of what all tensor-parallel ranks have (`repeated`),
    the first of them has it.
    grad: (owned_numel,), the reduced gradient of the owned range, averaged over ranks; meaningful
    while `reduced`.
    host_grad: (host_numel,), where gradients are offloaded (offload/host_gradients.py); then `grad`
    has `device_numel`.
    arrival: the copy that brings `host_grad`; None once it is known to be there.
    sq_norm: its squared norm (high, low) over this rank's shard; None: that of `grad` as it is, not
    taken yet.
    """

    def __init__(
        self,
        unit: str,
        dtype: torch.dtype,
        group: int | None,
        params: list[Managed],
        layout: FlatLayout,
        owned: tuple[int, int],
        reduces: tuple[int, int],
        trainable: bool = True,
        state_format: StateFormat = NO_STATES,
        grad_dtype: torch.dtype | None = None,
        float8: Float8Format | None = None,
    ) -> None:
        """Describe the bucket; this rank updates the range `owned` and adds up `reduces`;
        `state_format`: of its states.
        """
        self.unit = unit
        self.label = unit or "root"
        self.dtype, self.grad_dtype, self.float8 = dtype, grad_dtype or dtype, float8
        self.group = group
        self.params = params
        self.layout = layout
        self.owned = owned
        for managed, slot in zip(params, layout.slots, strict=True):
            managed.offset = slot.offset
        self.pieces: tuple[Piece, ...] = layout.pieces(*owned)
        self._pieces_of: dict[Managed, list[Piece]] = {managed: [] for managed in params}
        for piece in self.pieces:
            self._pieces_of[params[piece.slot]].append(piece)
        self.trainable, self.state_format = trainable, state_format
        self.repeated, self.counted = False, True
        self.changed = False
        self.rewritten, self.bits = True, dict[str, torch.Tensor]()
        self.weight = self.owned_weight = _NOWHERE
        self._has_slices = any(managed.sliced is not None for managed in self.params)
        self._addresses: list[int] = []  # of the parameters, where their weights are resident
        self.reduces = reduces[0] - owned[0], reduces[1] - owned[0]
        self.device_numel = self.owned_numel
        self.weight_tier = "device"
        self.tier: _C.HostTier | None = None
        self.files: WeightFiles | None = None
        self.grad: torch.Tensor | None = None
        self.host_grad: torch.Tensor | None = None
        self.arrival: _C.CopyEvent | None = None
        self.reduced = False
        self.sq_norm: torch.Tensor | None = None

    @property
    def owned_numel(self) -> int:
        """Length of the owned range in elements, padding included."""
        return self.owned[1] - self.owned[0]

    @property
    def host_numel(self) -> int:
        """How many elements of the owned range, its last ones, the CPU updates."""
        return self.owned_numel - self.device_numel

    @property
    def gathered_dtype(self) -> torch.dtype:
        """The dtype in which the weights of a shard are gathered around their use."""
        if self.float8 is None or self.weight_tier != "device":
            return self.dtype
        return self.float8.dtype

    @property
    def in_float8(self) -> bool:
        """Whether the unsharded weights that are there now, if any, are float8 bytes."""
        return self.float8 is not None and self.weight.dtype == self.float8.dtype

    def keep_unsharded(self, weight: torch.Tensor) -> None:
        """Keep the unsharded weights in this memory for good."""
        self.weight, self.owned_weight = weight, self.owned_slice(weight)
        start, size = weight.data_ptr(), weight.itemsize
        self._addresses = [start + size * managed.offset for managed in self.params]

    def owned_values(self, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) of the owned weights: live, or a copy of what
        is in files.
        """
        if self.files is not None:
            return self.files.values(self, start, numel)
        return self.owned_weight[start : start + numel]

    def assign(self, start: int, values: torch.Tensor) -> None:
        """Write `values` to the owned weights from `start` on, rounded as a step does.

        Frozen weights may have dtypes that no step supports. Those in host memory may still be on
        their way to the device, for a forward that the host is ahead of.
        """
        self.rewritten = True
        weight = self.owned_weight[start : start + values.numel()]
        if self.files is not None:
            weight = torch.empty(values.numel(), dtype=self.dtype, device=self.owned_weight.device)
        elif self.tier is not None:
            self.tier.synchronize()
        assign(weight, values)
        if self.files is not None:
            self.files.assign(self, start, weight)

    def release(self) -> torch.Tensor:
        """Return the memory of the unsharded weights, of which the bucket keeps only the shard."""
        weight, self.weight = self.weight, _NOWHERE
        return weight

    def take_edits(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Bring the owned weights in line with full ones that were perhaps edited, and note
        whether they were (`changed`).

        params: those that were perhaps edited behind the version counters; None: all.
        """
        if self.weight.numel() == 0 or storage_id(self.weight.untyped_storage()) == storage_id(
            self.owned_weight.untyped_storage()
        ):
            return
        if self.in_float8:  # nobody can write to the parameters
            return
        edited, old = self.owned_slice(self.weight), self.owned_weight
        if self.files is not None:
            old = self.files.values(self, 0, self.owned_numel).to(edited.device)
        elif self.tier is not None:
            old = torch.empty_like(edited)
            self.tier.from_tier(old, self.owned_weight).synchronize()
        ranges = [(0, self.owned_numel)]
        if params is not None:
            chosen = [m for m in self.params if m.param in params or m.edited]
            pieces = [piece for m in chosen for piece in self.pieces_of(m)]
            ranges = [(piece.start, piece.start + piece.numel) for piece in pieces]
        if all(_same_bits(old[start:end], edited[start:end]) for start, end in ranges):
            return
        self.changed = self.rewritten = True
        if self.files is not None:
            self.files.assign(self, 0, edited)
        elif self.tier is not None:
            self.tier.to_tier(self.owned_weight, edited).synchronize()
        else:
            self.owned_weight.copy_(edited)

    def bits_of(self, start: int, numel: int) -> torch.Tensor | None:
        """View the bits of owned weights [start, start + numel), which one tier updates; None
        where steps note nothing. start: a multiple of 8.
        """
        if not self.bits:
            return None
        near = start < self.device_numel
        first = start if near else start - self.device_numel
        return self.bits["device" if near else "host"][first // 8 : (first + numel + 7) // 8]

    def take_changes(self) -> torch.Tensor | None:
        """Return the bits of the owned weights that changed since the last call, none if nothing
        changes them, and note changes from now on. None: any may have changed.
        """
        known = not self.rewritten and not any(managed.rewritten for managed in self.params)
        self.rewritten = False
        for managed in self.params:
            managed.rewritten = False
        if self.group is None and known:
            return torch.empty(0, dtype=torch.uint8, device=self.owned_weight.device)
        parts = [bits.to(self.owned_weight.device, copy=True) for bits in self.bits.values()]
        for bits in self.bits.values():
            bits.zero_()
        return torch.cat(parts) if parts and known else None

    def untouched(self) -> bool:
        """Whether no parameter has a gradient, moved, or was written to since the engine wrote it.

        One call, as every step asks this of every parameter. False may mean "not known": of weights
        that are not resident, and of slices.
        """
        if not self._addresses or self._has_slices:
            return False
        params = [managed.param for managed in self.params]
        versions = [managed.version for managed in self.params]
        return _C.untouched(params, self._addresses, versions, self.dtype)

    def edited_params(self) -> set[Managed]:
        """Return the parameters that others than the engine wrote to since the engine did."""
        return {
            m
            for m in self.params
            if (m.param._version if m.sliced is None else m.version_now) != m.version
        }

    def check_in_place(self, op: str) -> None:
        """Raise ValueError if a parameter no longer uses the engine's memory (`.data`
        re-assigned, model moved or cast).
        """
        # of each parameter in each step: so without a frame of Python for it, and by address where
        # the weights are resident
        if self._addresses:
            tensors = [m.param if m.sliced is None else m.local for m in self.params]
            in_place = [*map(torch.Tensor.data_ptr, tensors)] == self._addresses
            if in_place and {*map(_DTYPE, tensors)} == {self.dtype}:
                return
        for managed in self.params:
            if managed.storage_now() != managed.storage or managed.param.dtype != self.dtype:
                raise ValueError(
                    f"{op}: {managed.name} is no longer stored in shardcore's memory. Do not "
                    "re-assign .data, and do not move or cast a sharded model, nor call "
                    ".to(memory_format=) on it (Accelerate's prepare() and Trainer move it on "
                    "several CPU ranks). Edit weights in place, or use load_state_dict"
                )

    def owned_slice(self, full: torch.Tensor) -> torch.Tensor:
        """View the owned range of a full buffer of the bucket."""
        return full[self.owned[0] : self.owned[1]]

    def replace_grad(self, grad: torch.Tensor, pool: BufferPool) -> None:
        """Let `grad` be the reduced gradient; what was before goes to the pool."""
        if self.grad is not None:
            pool.release(self.grad)
        self.grad = grad

    def sum_buffer(self, dtype: torch.dtype, pool: BufferPool) -> torch.Tensor:
        """Return the reduced gradient in the dtype that sums have; a first gradient kept as it
        was is converted.
        """
        old = self.grad
        if old is None or old.dtype != dtype:
            self.grad = pool.keep(
                self.owned_numel if self.host_grad is None else self.device_numel, dtype
            )
            if old is not None:
                _C.cast([self.grad], [old])
                pool.release(old)
        assert self.grad is not None
        return self.grad

    def reduced_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """View what this rank adds up in a buffer of the owned range: all of it, unless others
        own that, too.
        """
        start, end = self.reduces
        return flat[start:end]

    def grads(self) -> list[tuple[int, torch.Tensor]]:
        """Return the memory of the reduced gradient, a tensor for each tier, with where in the
        owned range it begins.
        """
        near = [] if self.grad is None else [(0, self.grad)]
        return near if self.host_grad is None else [*near, (self.device_numel, self.host_grad)]

    def read_grad(self, start: int, numel: int) -> tuple[torch.Tensor, None]:
        """View a range of the reduced gradient that is on one tier (see Digests.add)."""
        first, flat = next(part for part in reversed(self.grads()) if part[0] <= start)
        return flat[start - first : start - first + numel], None

    def own_grads(self) -> list[torch.Tensor]:
        """View the part of the reduced gradient whose norm this rank takes: what it added up
        (see `reduced_slice`).
        """
        start, end = self.reduces
        return [part[max(0, start - first) : max(0, end - first)] for first, part in self.grads()]

    def owned_grad(self) -> torch.Tensor | None:
        """Return the reduced gradient (owned_numel,); a copy on the CPU where it lies on two
        tiers.
        """
        parts = [part for _, part in self.grads()]
        return (
            torch.cat([part.cpu() for part in parts]) if len(parts) > 1 else next(iter(parts), None)
        )

    def owned_views(
        self, flat: torch.Tensor, start: int = 0
    ) -> Iterable[tuple[Managed, Piece, torch.Tensor]]:
        """Yield each owned parameter piece with its view of `flat`, a buffer of the owned range,
        or of it from `start` on.
        """
        for piece in self.pieces:
            first, end = piece.start - start, piece.start - start + piece.numel
            if end > 0 and first < flat.numel():
                yield self.params[piece.slot], piece, flat[max(0, first) : end]

    def pieces_of(self, managed: Managed) -> Sequence[Piece]:
        """Return the owned pieces of one parameter, in order."""
        return self._pieces_of[managed]


def sq_norm_of(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the squared norm (high, low) on `device` of tensors that may be on several devices."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return sum_of_squares([_C.sq_norm(of_device) for of_device in by_device.values()], device)


def sum_of_squares(squares: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum on `device` of squared norms (high, low) that may be on several devices."""
    if len(squares) == 1:
        return squares[0].to(device)
    return _C.sq_norm_add(torch.stack([part.cpu() for part in squares])).to(device)


def assign(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` to `weight`; see `Bucket.assign`."""
    if weight.dtype in PARAM_DTYPES and values.is_floating_point():
        _C.cast([weight], [values.to(weight.device, torch.float32)])
    else:
        weight.copy_(values)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare as integers: torch.equal of bfloat16 takes four times as long on a CPU."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.itemsize, torch.uint8)
    return torch.equal(one.view(integers), other.view(integers))


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in `dtype`, rounded as a step rounds masters to weights: bfloat16 ties go away
    from zero, where torch rounds them to even.
    """
    if values.dtype == dtype or not {values.dtype, dtype} <= set(PARAM_DTYPES):
        return values.to(dtype)
    values = values.contiguous()
    weights = torch.empty_like(values, dtype=dtype)
    _C.cast([weights], [values])
    return weights
