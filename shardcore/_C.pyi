"""The compiled extension (csrc/bind). The only rooms below it are torch-free C++ and CUDA.

Private to the package, which checks options and its own buffers in Python. What users can change
between two steps (parameters, gradients, states) is checked here, before anything is written:
ValueError or TypeError in the form ``op: argument[index] has X; expected Y (what to do)``. On CUDA
tensors work is queued on the current stream. Tensors have memory of their own that holds their
values: no released storage, no negative or conjugate bit, no wrapper or fake tensor. In a child
that was forked after CPU work used threads, CPU work runs serially, to the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch

class AdamHyper:
    """The scalars of one Adam step, made in double and rounded once to float32
    (csrc/adam/adam_scalars.h).

    ``step`` counts from 1. ``grad_scale`` multiplies the gradient. ``stochastic_rounding`` is for
    bfloat16 parameters that have no master; ``seed`` (with ``keys`` of ``AdamStepper.step``) keys
    it, and the rounding of reduced moments. For device_step lr may be a float32 or float64 tensor
    of one element, which is read when the step runs.
    """

    def __init__(
        self,
        *,
        lr: float | torch.Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float = 1.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None: ...

class LossScaleRule:
    """How a loss scale changes (csrc/core/loss_scale.h). window, hysteresis: 1 or more; minimum:
    more than 0.
    """

    def __init__(
        self, *, window: int, hysteresis: int, minimum: float, consecutive_hysteresis: bool
    ) -> None: ...
    def after(
        self, scale: float, stable_steps: int, hysteresis_left: int, overflow: bool
    ) -> tuple[float, int, int]:
        """The same three numbers after a step that updated the weights, or (overflow) was
        skipped.
        """

class DeviceScalars:
    """The scalars of a step where its tensors are, as device_step makes them: for
    AdamStepper.step in place of hypers. Also made of a copy of their bytes (n,), on any device.
    """

    def __init__(self, bytes: torch.Tensor) -> None: ...
    @property
    def bytes(self) -> torch.Tensor: ...

def device_step(
    state: torch.Tensor,
    squares: torch.Tensor | None,
    counts: Sequence[torch.Tensor],
    hyper_index: Sequence[int],
    hypers: Sequence[AdamHyper],
    *,
    grad_scale: float | torch.Tensor = 1.0,
    loss_scale: float | torch.Tensor = 1.0,
    found_inf: float | torch.Tensor = 0.0,
    max_norm: float | None = None,
    ranks: int = 1,
    rule: LossScaleRule | None = None,
) -> DeviceScalars:
    """Decide on a step on the device of `state`, int64 (6,), and update that, without synchronizing
    (csrc/adam/device_step.h).

    counts: int64 of one element there, how many steps each parameter made: incremented. Returns
    scalars for each of them, by hypers[hyper_index[i]], whose step and grad_scale are not read.
    grad_scale / loss_scale multiplies the gradients; with max_norm also the clip coefficient of
    their norm does. squares: float64 (n, 2) there, squared norms that add up, or None not to look
    at the norm. If found_inf is not 0, the scale or the norm is not finite, or loss_scale is 0,
    steps with the scalars write nothing, counts stay, and the state counts a skipped step.
    grad_scale, loss_scale and found_inf: numbers, or float32 or float64 tensors of one element,
    read when the step runs. rule: updates the loss scale in the state; ranks: for 1 / (ranks *
    scale) there.
    """

class AdamLists:
    """The arguments of the same names of AdamStepper.step, read once for many steps and kept as
    long as this object, the states until release_states.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        hyper_index: Sequence[int],
        masters: Sequence[torch.Tensor | None] | None = None,
        max_exp_avg_sqs: Sequence[torch.Tensor | None] | None = None,
        keys: Sequence[tuple[int, int]] | None = None,
        exp_avg_scales: Sequence[torch.Tensor | None] | None = None,
        exp_avg_sq_scales: Sequence[torch.Tensor | None] | None = None,
    ) -> None: ...
    def plain_grads(
        self, idle: Sequence[torch.Tensor], given: Sequence[object] | None = None
    ) -> tuple[torch.Tensor, ...] | None:
        """The gradients of params (those in `given`, one for each, if it is not None), or None if a
        step would have to look closer: one is missing, of another shape, device or order in memory,
        or not of a dtype for gradients, params changed their dtype or device, or whether they are
        contiguous, since the lists were made, or one of idle has a gradient."""

    def release_states(self, states: Mapping[torch.Tensor, Any]) -> None:
        """Hold no state any more, and note where `states` (optimizer.state) has them, for
        with_states. They are in place there, with their counts.
        """

    def with_states(self, states: Mapping[torch.Tensor, Any]) -> AdamLists | None:
        """These lists with the states' tensors that `states` has now, for one step. None if a step
        would have to look closer: a parameter's state is gone or elsewhere in the dict's order,
        another object is its count, an entry is new, gone, elsewhere, or no tensor any more, or
        exp_avg or the master has another dtype.
        """

class AdamStepper:
    """Runs Adam over a list of tensors in one call. Holds the CUDA chunk table, and the memory last
    checked, between calls.

    While the current stream is captured in a CUDA graph a call needs DeviceScalars, and its tensors
    must live as long as the graph.
    """

    def __init__(self) -> None: ...
    def step(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        hypers: Sequence[AdamHyper] | DeviceScalars,
        hyper_index: Sequence[int],
        masters: Sequence[torch.Tensor | None] | None = None,
        max_exp_avg_sqs: Sequence[torch.Tensor | None] | None = None,
        keys: Sequence[tuple[int, int]] | None = None,
        exp_avg_scales: Sequence[torch.Tensor | None] | None = None,
        exp_avg_sq_scales: Sequence[torch.Tensor | None] | None = None,
        changed: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Update params (and masters, exp_avgs, exp_avg_sqs, max_exp_avg_sqs) in place, in one pass
        over memory.

        All tensors: on one device; at equal index is_dense, of one shape and order in memory
        (elements count in it). params, grads: float32 | bfloat16 | float16, each independent.
        exp_avgs and exp_avg_sqs: both float32, both bfloat16 (the second always rounded
        stochastically), or int8 and uint8 codes with exp_avg_scales and exp_avg_sq_scales, float32,
        contiguous, one for 256 elements (maps: csrc/adam/state_codec.h). masters[i]: float32, then
        it is what the formula reads and writes, and params[i] is only written (rounded from it); or
        int16, the remainder that makes a bfloat16 params[i] a float32 master, lossless.
        max_exp_avg_sqs[i] (float32) given means amsgrad. hyper_index[i] picks the scalars of tensor
        i. keys[i] = (parameter index, index in the full parameter of element 0): the random key of
        stochastic rounding. changed[i]: uint8, contiguous, a bit for each element of a 16-bit
        params[i]; bit k % 8 of byte k / 8 is set where the step changes element k. Of a float32
        masters[i] the element before the step is the master, rounded. What is written shares no
        memory with another argument; only a float32
        params[i] may be its own masters[i]. DeviceScalars need keys.
        """

    def repeat(
        self,
        lists: AdamLists,
        grads: Sequence[torch.Tensor],
        hypers: Sequence[AdamHyper] | DeviceScalars,
    ) -> None:
        """Do the same as step, with the same checks, with lists that were read before."""

def sq_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of squares as a float64 tensor (2,) = (high, low) in double-double, on the tensors'
    device.

    Each aligned 256-element block of a tensor's memory (is_dense) has one fixed order; what is not
    finite makes high so.
    """

def sq_norm_add(parts: torch.Tensor) -> torch.Tensor:
    """Add rows of a float64 tensor (n, 2) in order, in double-double; returns (2,) there. On
    CUDA grouped, and queued.
    """

def norm_from_sq(total: torch.Tensor) -> float:
    """float32(sqrt(high + low)) of a float64 CPU tensor (2,), returned as a Python float."""

def clip_coefficient(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)) in double; NaN for a NaN norm (a minimum would hide it)."""

def clipped_scale(scale: float, norm: float, max_norm: float) -> float | None:
    """What multiplies gradients of this norm: scale times the clip coefficient of the scaled
    norm; None if not finite.
    """

def ordered_sum(
    pieces: torch.Tensor,
    world_size: int,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    accumulate: bool = False,
    own: torch.Tensor | None = None,
    rank: int = 0,
) -> torch.Tensor:
    """out = [out +] scale * (pieces[0] + pieces[1] + ...), summed in rank order in float32; returns
    sq_norm of out.

    pieces: contiguous (world_size * n,), float32 | bfloat16 | float16; out: contiguous (n,) of
    float32 | bfloat16. The product with scale (a number, or a float64 tensor of one element, read
    when the sum runs) is taken in double and rounded once to float32; out is read and written once.
    own: contiguous (n,), the piece of `rank` (0 to world_size - 1), read instead of that part of
    pieces; it may be out itself.
    """

def digest(
    tensors: Sequence[torch.Tensor],
    keys: Sequence[int],
    first_blocks: Sequence[int],
    rests: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Digests of tensors, modulo 2^64 in an int64 tensor (n,) on their device; on CUDA queued.

    tensors: contiguous, on one device: float32 | bfloat16 | float16 values, int32 words, or int8 |
    uint8 | bool bytes. keys[i]: of 64 bits. first_blocks[i]: the number of the first 256-element
    block of tensors[i] in the whole tensor. rests[i]: of bfloat16 weights the int16 remainders, so
    that the digest is that of their float32 masters; of bytes float32 scales, one per 256 elements.
    """

def encode_moment(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes and scales of a moment, rounded to nearest: int8 for exp_avg, uint8 for
    exp_avg_sq.

    values: contiguous float32 CPU tensor (n,). Returns codes (n,) and float32 scales, one per 256
    elements. Exact for values that decode_moment has made.
    """

def decode_moment(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 values (n,) of int8 (exp_avg) or uint8 (exp_avg_sq) codes (n,) on the CPU."""

def join_split(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 master (n,) of a bfloat16 weight (n,) and its int16 remainder (n,) on the CPU."""

def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 weight (to nearest, ties away from zero) and the int16 remainder of a float32
    master (n,) on the CPU.
    """

def dense(
    tensors: Sequence[torch.Tensor], likes: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The tensors, with a copy for each that has torch's negative bit, or has neither the strides
    of likes[i] (None: its own) nor, if that is not is_dense and of its shape, contiguous memory."""

# no gaps or overlaps in memory, its dimensions in any order (channels_last)
def is_dense(tensor: torch.Tensor) -> bool: ...
def same_objects(a: object, b: object) -> bool:
    """Whether both are lists or tuples, and hold the very same objects, in one order."""

def cast(dsts: Sequence[torch.Tensor], srcs: Sequence[torch.Tensor]) -> None:
    """dsts[i][:] = srcs[i] between float32, bfloat16 and float16, rounded as Adam rounds weights
    (bfloat16: to nearest, ties away from zero; float16: to nearest, ties to even). No dst shares
    memory with another dst or a src."""

class ElementScalars:
    """What one step of a formula reads, in float32: "sgd", "momentum", "nesterov", "adagrad" or
    "lion" (csrc/elementwise/element_math.h). l2 is added to gradients times the weight; weights are
    multiplied by decay (lion). of_direction and of_state: what the state and the gradient are
    multiplied by for each."""

    def __init__(
        self,
        formula: str,
        *,
        grad_scale: float = 1.0,
        l2: float = 0.0,
        decay: float = 1.0,
        lr: float = 0.0,
        of_direction: tuple[float, float] = (0.0, 0.0),
        of_state: tuple[float, float] = (0.0, 0.0),
        eps: float = 0.0,
    ) -> None: ...

def element_step(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor | None],
    masters: Sequence[torch.Tensor | None],
    scalars: ElementScalars,
) -> None:
    """One step, in place. A flat parameter, its gradient and its state (None for "sgd") have the
    same number of elements, each in float32, bfloat16 or float16; a master is float32. On one
    device."""

def empty_huge(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A zero-filled CPU tensor (numel,) on its own pages, which ask for huge pages when large
    (madvise).
    """

def untouched(
    tensors: Sequence[torch.Tensor],
    addresses: Sequence[int],
    versions: Sequence[int],
    dtype: torch.dtype,
) -> bool:
    """Whether each tensor has no gradient, and the address, the version and the dtype that are
    given."""

def note_write(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Increment the version counters of tensors, as a write in place does: a graph that saved one
    of them no longer runs backward. Returns the new versions."""

def closed(shape: Sequence[int], like: torch.Tensor, message: str) -> torch.Tensor:
    """A contiguous tensor of this shape, with the dtype and device of `like`, without memory (its
    storage is closed): reading or writing elements raises a RuntimeError with the text `message`.
    """

def lend(tensors: Sequence[torch.Tensor], memory: torch.Tensor, offsets: Sequence[int]) -> None:
    """Put memory[offsets[i] : offsets[i] + tensors[i].numel()] behind tensors[i], and behind all
    views of it, without a copy.

    tensors: made by `closed`, or Parameters over such; memory: flat, of the same dtype and device,
    kept alive until `withdraw`. Version counters stay as they are."""

def withdraw(tensors: Sequence[torch.Tensor], messages: Sequence[str]) -> None:
    """Close the storages of tensors again, and release the memory that was lent."""

class CopyEvent:
    """One copy of a HostTier, to wait for. It stays valid when the tier or the tensors are freed.

    As torch.cuda.Event. Each method raises RuntimeError with the copy's number if it, or one before
    it in its direction, failed on its way.
    """

    def query(self) -> bool:
        """Whether the copy is done."""

    def synchronize(self) -> None:
        """Wait on the host until the copy is done."""

    def wait(self) -> None:
        """Make later work on the current CUDA stream wait for the copy, without waiting on the
        host; for the CPU, wait here.
        """

class HostTier:
    """The cpu tier: exact-size host buffers that are reached only through counted copies
    (csrc/copy).

    ``device`` is where the other side of every copy lives. Copies are queued and return at once: a
    queue for each direction, in order, on a CUDA stream of its own, or on a thread of its own for
    the CPU. A copy begins after all that was queued on the current CUDA stream before it (for the
    CPU: at once). Until its event is done its src must not be written, nor its dst read or written;
    both are kept alive until then. In a forked child, where the threads are missing, copies are
    complete on return; CUDA does not work there.

    With ``pin_memory`` buffers for a CUDA device are page-locked, whole pages and no more,
    ``pin_memory_limit`` bytes at most (None: no limit), near the device where the machine has NUMA
    nodes. A buffer beyond the limit, or that the system refuses to lock, is pageable: copies of it
    do not overlap with anything. For the CPU nothing needs to be locked.

    backend: None, or a capsule "shardcore.CopyBackend" of the CopyBackend (csrc/copy/copy_stream.h)
    that makes the copies instead; the tier then owns it.
    """

    def __init__(
        self,
        device: torch.device,
        pin_memory: bool = False,
        pin_memory_limit: int | None = None,
        backend: object = None,
    ) -> None: ...
    def empty(
        self, numel: int, dtype: torch.dtype, pinned: bool = True, nodes: Sequence[int] = ()
    ) -> torch.Tensor:
        """A zero-filled buffer (numel,) of the tier; pageable if not `pinned`. MemoryError if there
        is no such memory.

        nodes: the NUMA nodes that its pages lie on by turns (default: near the device). Not heeded
        where the process has a memory policy of its own, or the system forbids it (`node_refusal`).
        """

    def to_tier(self, dst: torch.Tensor, src: torch.Tensor) -> CopyEvent:
        """Queue a copy of src (on the device) to dst (of this tier): contiguous, same dtype and
        numel.
        """

    def from_tier(self, dst: torch.Tensor, src: torch.Tensor) -> CopyEvent:
        """Queue a copy of src (of this tier) to dst (on the device)."""

    def synchronize(self) -> None:
        """Wait on the host for all copies. RuntimeError if one failed."""

    def drain(self) -> None:
        """Wait until no copy is in flight, failed ones included."""

    @property
    def pin_refusal(self) -> str:
        """Why the first of bytes_refused was refused; empty if none ever was."""

    @property
    def node_refusal(self) -> str:
        """Why the system did not place a buffer on its `nodes`, the first one; empty if it
        always did.
        """

    bytes_to_tier: int  # of all copies queued so far
    bytes_from_tier: int
    bytes_allocated: int  # of the live buffers, as they were asked for
    bytes_pinned: int  # of those that are page-locked, in whole pages
    bytes_refused: int  # of those that could not be page-locked, in whole pages

class OffloadChunk:
    """A chunk of an OffloadPipeline, with the tensors that it uses. Its destructor waits for
    copies in flight.
    """

class OffloadPipeline:
    """Runs the steps of a tier, chunk by chunk: copies gradients in, updates, copies weights out;
    no GIL (csrc/offload).

    ``places``: how many staging buffers for weights the chunks use in turn. events: what the last
    step did: (what, begin and end in seconds of time.perf_counter, amount): copies as they were
    queued (bytes), "to_tier.synchronize" and the like (the number of the copy in its direction),
    "update" (elements).
    """

    events: list[tuple[str, float, float, int]]

    def __init__(self, tier: HostTier, places: int) -> None: ...
    def chunk(
        self,
        *,
        weights: Sequence[torch.Tensor | None],
        grad_starts: Sequence[int],
        grads_come: bool,
        place: int,
        **lists: Any,
    ) -> OffloadChunk:
        """Return a chunk for steps that pass only gradients. lists: all those of AdamStepper.step,
        in host memory.

        weights[i]: None, or on the device: new weights are copied there from params[i], a staging
        buffer, and unless masters[i] is float32 the old ones are copied from there. grads_come:
        gradients are copied to grads[i], staging buffers; else grads[i] only has their dtype.
        grad_starts[i]: where span i begins in the gradient that a step passes. place: the number of
        the staging buffer that params are in.
        """

    def element_chunk(
        self,
        *,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor | None],
        masters: Sequence[torch.Tensor | None],
        hyper_index: Sequence[int],
        weights: Sequence[torch.Tensor | None],
        grad_starts: Sequence[int],
        grads_come: bool,
        place: int,
    ) -> OffloadChunk:
        """Return the same for an elementwise optimizer: lists of element_step, all flat, states and
        masters float32.
        """

    def begin(
        self,
        chunks: Sequence[OffloadChunk],
        grads: Sequence[torch.Tensor],
        hypers: Sequence[AdamHyper] | Sequence[ElementScalars] | Callable[[int], object],
        num_threads: int = 0,
        weights_leave: bool = False,
        arrivals: Sequence[CopyEvent | None] = (),
        any_order: bool = False,
    ) -> None:
        """Begin a step, after the end of the last. grads: for each span of each chunk a tensor (at
        least the span's, 1-D). hypers: what a kernel reads, or what updates the chunk of a number
        (which waits for no thread that has the GIL: num_threads is 0).

        num_threads: 0: the step runs in the waits; else a thread of its own, with so many, itself
        included, on the caller's cores. Copies begin after the work queued on the current CUDA
        stream. weights_leave: first wait for copies to the device in flight. arrivals: for each
        span the copy to the tier that brings its gradient, None if it is there; a chunk waits for
        its own. any_order: chunks that copy nothing in may be updated from the last one on while
        the next one's gradients are not there.
        """

    def wait_fetched(self, count: int) -> None:
        """Wait until the copies in for the first `count` chunks are queued, or these updated.
        RuntimeError if a copy failed.
        """

    def wait_updated(self, first: int, last: int) -> CopyEvent | None:
        """Wait, as wait_fetched, until chunks below `last` are updated; returns the event of the
        last copy of [first, last).
        """

    def end(self) -> None:
        """End the step, leaving out chunks not updated yet; it reads no gradients then. Weights
        may still be in flight.
        """

class FileEngine:
    """Asynchronous reads and writes of files, past the page cache where they can (csrc/io). Used by
    FileWriter and FileReader.

    backend: "io_uring", "threads", or "auto", which takes io_uring where this build has liburing
    and the system allows it.
    depth: how many transfers (of at most 1 MiB) are in flight at once, 1 to 256; a writer has twice
    as many MiB of buffers. Threads start with the first transfer, and end with the engine. In a
    forked child RuntimeError: make another. ValueError for an argument; OSError for "io_uring"
    where there is none.

    faults: for tests; see csrc/io/faults.h.
    """

    def __init__(self, backend: str = "auto", depth: int = 16, faults: str = "") -> None: ...
    @property
    def backend(self) -> str:
        """The one in use: "io_uring" or "threads"."""

    @property
    def note(self) -> str:
        """One line that says why io_uring is not used; "" if it is, or was not asked for."""

class FileWriter:
    """Writes one file of `size_bytes` from its beginning to its end, in the background, through
    buffers of 1 MiB.

    Creates the file, or empties it, and takes its space at once: a full disk is an OSError here,
    and the file is then empty.
    direct: past the page cache (O_DIRECT) where the file system can. overwrite: an existing file is
    not emptied first, but written over in place, in the space that it has. Calls of several threads
    follow one another.

    An error of a write is raised by the next append or finish, and by all later ones: an OSError
    with errno, filename, and a text with the offset, the bytes asked and the bytes done.
    """

    def __init__(
        self,
        engine: FileEngine,
        path: str | PathLike[str],
        size_bytes: int,
        direct: bool = True,
        overwrite: bool = False,
    ) -> None: ...
    def append(self, tensor: torch.Tensor) -> int:
        """Append the bytes of a contiguous CPU tensor, of any dtype, and return their CRC-32C.

        They are copied, so the tensor may change afterwards; waits only if all buffers are in
        flight. ValueError beyond size_bytes, with nothing appended.
        """

    def finish(self) -> None:
        """Write what is left, wait for all writes, and make the file durable (fdatasync), not yet
        its name in its directory.

        ValueError if the bytes appended are not size_bytes.
        """

    def close(self) -> None:
        """Wait for writes in flight and close the file. Without finish() before it stays
        unfinished. Raises nothing.
        """

class FileRead:
    """A read of a FileReader. It goes on when the reader is closed; its destructor waits for it."""

    def wait(self) -> torch.Tensor:
        """Return the bytes, uint8 (nbytes,), which own their memory. Once, else RuntimeError.
        OSError as in FileWriter.
        """

class FileReader:
    """Reads parts of one regular file, by several threads at once. direct: past the page cache
    where the file system can.
    """

    def __init__(
        self, engine: FileEngine, path: str | PathLike[str], direct: bool = True
    ) -> None: ...
    @property
    def size_bytes(self) -> int:
        """Of the file when it was opened."""

    def start(self, offset: int, nbytes: int) -> FileRead:
        """Start to read [offset, offset + nbytes), anywhere in the file; takes as much memory, in
        whole blocks around it.

        ValueError outside of the file, or after close().
        """

    def close(self) -> None:
        """Close the file when the reads that were started are over."""

class FileTransfer:
    """A read or write under way; it keeps its memory, which nothing else may use until it is
    over.
    """

    def wait(self) -> None:
        """Wait until it is over, any number of times. OSError as in FileWriter, each time."""

class BlockFile:
    """A file made or brought to `size_bytes`, whose blocks are read and written in place; new ones
    read as zeros.

    Its space is taken first, where the file system can; past the page cache where it can (direct).
    OSError as in FileWriter.
    """

    def __init__(
        self, engine: FileEngine, path: str | PathLike[str], size_bytes: int, direct: bool = True
    ) -> None: ...
    @property
    def block_bytes(self) -> int:
        """What addresses of memory, offsets and sizes are multiples of, else ValueError."""

    def read(self, memory: torch.Tensor, offset: int) -> FileTransfer:
        """Start to read as many bytes as a contiguous CPU tensor has, from `offset` on."""

    def write(self, memory: torch.Tensor, offset: int) -> FileTransfer:
        """Start to write them."""

    def sync(self) -> None:
        """Make durable what was written (fdatasync)."""

def crc32c(tensor: torch.Tensor) -> int:
    """The CRC-32C (Castagnoli) of the bytes of a contiguous CPU tensor."""

def exchange_paths(a: str | PathLike[str], b: str | PathLike[str]) -> bool:
    """Exchange two names of files or directories in one step. False, with nothing done, where
    that does not work. OSError.
    """

def cpu_isa() -> str:
    """The instruction set in use: "avx512", "avx2", "neon" or "base" (SHARDCORE_CPU_ISA forces
    one at the first call).
    """

def set_cpu_isa(name: str) -> None:
    """Force an instruction set for the rest of the process; ValueError if this CPU lacks it. For
    tests.
    """

def cpu_isas() -> list[str]:
    """The instruction sets that this build has and this CPU can run."""

def use_threads(count: int) -> None:
    """Let kernels that the calling thread runs on the CPU use `count` threads of its own, itself
    included, instead of torch's.

    They end with it. 0: torch's again.
    """

def allow_captures() -> None:
    """Let other threads capture CUDA graphs while the calling one asks about events; nothing in
    a build without CUDA.
    """

def build_info() -> dict[str, Any]:
    """Keys: version, torch (the version built against), cuda ("13.0" or ""), cuda_arch_list,
    compiler: texts; io_uring: whether liburing was there."""
