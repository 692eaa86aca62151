"""A backend that behaves as NCCL where ranks share one GPU, which NCCL refuses, or have CPU
tensors.

What is the same: the collectives of a group run in the order in which they were started, beside
what computes, and are paired by nothing else; where ranks start different ones they never end. On a
GPU they run on a stream of the group: it copies to host memory, waits there for a word from a
thread that exchanges over gloo, and copies back. So the host waits for nothing, and `Work.wait`
makes the current stream wait. On CPU tensors the thread works on these, and `Work.wait` waits for
it.
"""

import ctypes
import os
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from shardcore.distributed import comm, groups
from shardcore.distributed.comm import Comm

NAME = "nccl_standin"  # the watchdog looks for "nccl" in the name
POLL_S = 5e-5
_END = 2**31 - 1  # of all collectives
_NO_MESSAGE = 1 << 30  # a tag that is never sent

Rows = Sequence[Sequence[torch.Tensor]]  # for each rank what is sent to it, or received from it

_SUMS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda rows: rows.sum(0),
    dist.ReduceOp.AVG: lambda rows: rows.mean(0),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
}


class Flight(dist.Work):
    """A collective that was started. event: that its stream has done all (on a GPU)."""

    def __init__(self) -> None:
        super().__init__()
        self.event: Any = None
        self.exchanged, self.error = threading.Event(), ""

    def is_completed(self) -> bool:
        """Return whether all is done."""
        return bool(self.event.query()) if self.event is not None else self.exchanged.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait: in the order of the current stream on a GPU, else until done."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        else:
            self.exchanged.wait()
        if self.error:
            raise RuntimeError(self.error)
        return True


def _of_gpus(collective: Callable[..., Flight]) -> Callable[..., Any]:
    """Leave a collective of CPU tensors to gloo, where those of a GPU are staged."""

    @wraps(collective)
    def call(group: "StandIn", output: Any, *rest: Any) -> Any:
        tensor = output
        while not isinstance(tensor, torch.Tensor):
            tensor = tensor[0]
        if group.on_gpu and not tensor.is_cuda:
            return getattr(group.gloo, collective.__name__)(output, *rest)
        return collective(group, output, *rest)

    return call


class StandIn(dist.ProcessGroup):
    """A process group: collectives of tensors on `device_type` as NCCL's, everything else as
    gloo's.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, device_type: str
    ) -> None:
        super().__init__(rank, size)
        self.gloo, self._carrier = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)
            for name in ("gloo", "carrier")
        )
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self.on_gpu, self._numbers, self._lock = device_type == "cuda", count(1), threading.Lock()
        # Those that were copied to the host, and exchanged: numbers that streams and the thread
        # wait for.
        self._words = torch.zeros(2, dtype=torch.int32, pin_memory=self.on_gpu)
        self._stream: Any = None
        self._aborted = False
        # pinned memory, so that only who starts collectives frees it
        self._kept: deque[tuple[int, Rows, Rows]] = deque()
        self._messages: Counter[tuple[str, int]] = Counter()
        self._jobs: SimpleQueue[tuple[int, str, Flight, Rows, Rows, Callable[[], None]] | None] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    # --- a collective -----------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        sent: Rows,
        received: Rows,
        result: torch.Tensor | None = None,
        op: Any = None,
        rows: Any = None,
    ) -> Flight:
        """Start sending sent[i] to rank i and receiving received[i] from it; result: gets what
        `op` makes of `rows` then.
        """
        with self._lock:
            if self._aborted:
                raise RuntimeError(f"{name}: this group was aborted")
            number = next(self._numbers)

            def finish() -> None:
                if result is not None:
                    result.copy_(_SUMS[op](rows))

            flight = Flight()
            if not self.on_gpu:
                self._jobs.put((number, name, flight, sent, received, finish))
                return flight
            while self._kept and self._kept[0][0] < self._words[1]:  # the thread is past these
                self._kept.popleft()
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            stream = self._stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                host_sent, host_received = _pinned(sent), _pinned(received)
                self._kept.append((number, host_sent, host_received))
                for source, target in _pairs(sent, host_sent):
                    target.copy_(source, non_blocking=True)
                self._on_stream("Write", 0, number)
                self._jobs.put((number, name, flight, host_sent, host_received, lambda: None))
                self._on_stream("Wait", 1, number)
                for target, source in _pairs(received, host_received):
                    target.copy_(source, non_blocking=True)
                finish()
                flight.event = stream.record_event()
            for tensor in [
                *(one for row in (*sent, *received) for one in row),
                *([] if result is None else [result]),
            ]:
                tensor.record_stream(stream)
            return flight

    def _on_stream(self, what: str, word: int, number: int) -> None:
        """Let the group's stream write a number to a word, or wait until the word is at least
        the number.
        """
        call = getattr(ctypes.CDLL("libcuda.so.1"), f"cuStream{what}Value32_v2")
        where = ctypes.c_uint64(self._words.data_ptr() + 4 * word)
        code = call(
            ctypes.c_void_p(self._stream.cuda_stream),
            where,
            ctypes.c_uint32(number),
            ctypes.c_uint(0),
        )
        if code != 0:
            raise RuntimeError(f"cuStream{what}Value32: CUDA's error {code}")

    def _run(self) -> None:
        """Exchange, one collective after the other. No call of CUDA: it may wait for a stream
        that waits for this thread.
        """
        while (job := self._jobs.get()) is not None:
            number, name, flight, sent, received, finish = job
            try:
                while self.on_gpu and self._words[0] < number and not self._aborted:
                    time.sleep(POLL_S)
                self._exchange(name, sent, received)
                finish()
            except Exception as error:
                flight.error = f"{type(error).__name__}: {error}"
            self._words[1] = number
            if self._aborted:
                self._words[1] = _END
            flight.exchanged.set()
            del job, flight, sent, received, finish

    def _exchange(self, name: str, sent: Rows, received: Rows) -> None:
        """Exchange host tensors, each with a tag that says what it is: what another collective
        sends is never received.
        """
        me, works = self.rank(), []
        if received[me]:
            for target, source in zip(received[me], sent[me], strict=True):
                target.copy_(source)
        for call, rows in ((self._carrier.recv, received), (self._carrier.send, sent)):
            for peer, tensors in enumerate(rows):
                if peer != me and tensors:
                    self._messages[call.__name__, peer] += 1
                    what = (
                        f"{self._messages[call.__name__, peer]} {name} "
                        f"{[tensor.nbytes for tensor in tensors]}"
                    )
                    tag = zlib.crc32(what.encode()) >> 3
                    works += [call([tensor], peer, tag) for tensor in tensors if tensor.numel()]
        for work in works:
            work.wait()

    # --- what torch.distributed calls; names of torch 2.11 and 2.13 -------------------------------

    def _pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.view(self.size(), tensor.numel() // self.size()).unbind(0))

    def _all_to_all(self, name: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> Flight:
        return self._start(name, [[one] for one in inputs], [[one] for one in outputs])

    @_of_gpus
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Flight:
        return self._all_to_all("all_to_all", outputs, inputs)

    @_of_gpus
    def alltoall_base(
        self, output: Any, input: Any, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Flight:
        outputs = output.split(list(output_sizes)) if output_sizes else self._pieces(output)
        inputs = input.split(list(input_sizes)) if input_sizes else self._pieces(input)
        return self._all_to_all("all_to_all", outputs, inputs)

    @_of_gpus
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Flight:
        return self._all_to_all("all_gather", outputs[0], inputs * self.size())

    @_of_gpus
    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Flight:
        return self.allgather_into_tensor_coalesced([output], [input])

    @_of_gpus
    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> Flight:
        pieces, flats = (
            [self._pieces(output) for output in outputs],
            [one.reshape(-1) for one in inputs],
        )
        return self._start(
            "all_gather",
            [flats] * self.size(),
            [[piece[i] for piece in pieces] for i in range(self.size())],
        )

    @_of_gpus
    def broadcast(self, tensors: Any, opts: Any) -> Flight:
        root = opts.rootRank == self.rank()
        received = [tensors if i == opts.rootRank and not root else [] for i in range(self.size())]
        return self._start("broadcast", [tensors if root else []] * self.size(), received)

    @_of_gpus
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Flight:
        sent = [[one] for one in inputs[0]] if opts.rootRank == self.rank() else [[]] * self.size()
        return self._start(
            "scatter", sent, [outputs if i == opts.rootRank else [] for i in range(self.size())]
        )

    @_of_gpus
    def allreduce(self, tensors: Any, opts: Any) -> Flight:
        (tensor,) = tensors
        rows = tensor.new_empty(self.size(), *tensor.shape)
        return self._start(
            "all_reduce",
            [[tensor]] * self.size(),
            [[row] for row in rows],
            tensor,
            opts.reduceOp.op,
            rows,
        )

    @_of_gpus
    def reduce(self, tensors: Any, opts: Any) -> Flight:
        (tensor,), at_root = tensors, opts.rootRank == self.rank()
        rows = tensor.new_empty(self.size() if at_root else 0, *tensor.shape)
        sent = [[tensor] if i == opts.rootRank else [] for i in range(self.size())]
        received = [[rows[i]] if at_root else [] for i in range(self.size())]
        return self._start(
            "reduce", sent, received, tensor if at_root else None, opts.reduceOp.op, rows
        )

    @_of_gpus
    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any) -> Flight:
        return self.reduce_scatter([output], [self._pieces(input)], opts)

    @_of_gpus
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Flight:
        (input,) = inputs
        return self._reduce_scatter_base(outputs[0], input, opts)

    @_of_gpus
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Flight:
        (output,), rows = outputs, outputs[0].new_empty(self.size(), outputs[0].numel())
        sent, received = [[one] for one in inputs[0]], [[row] for row in rows]
        return self._start(
            "reduce_scatter", sent, received, output.view(-1), opts.reduceOp.op, rows
        )

    all_to_all_single, all_gather_single, reduce_scatter_single = (
        alltoall_base,
        _allgather_base,
        _reduce_scatter_base,
    )
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def batch(self, ops: Sequence[dist.P2POp]) -> Flight:
        """Start `ops` as one group of calls."""
        sent: list[list[torch.Tensor]] = [[] for _ in range(self.size())]
        received: list[list[torch.Tensor]] = [[] for _ in range(self.size())]
        for op in ops:
            (sent if op.op is dist.isend else received)[op.group_peer].append(op.tensor)
        return self._start("batch", sent, received)

    def barrier(self, opts: Any = None) -> Any:
        return self.gloo.barrier(opts)

    def _get_backend(self, device: torch.device) -> Any:
        return self.gloo  # whose options have the timeout

    def _get_sequence_number_for_group(self) -> int:
        return int(self._words[1])

    def abort(self) -> None:
        """End all collectives, those that are running too, with nothing received."""
        self._aborted = True
        self._words[1] = _END
        self.gloo.abort()  # which wakes nobody, as in torch's own groups
        for peer in range(self.size()):
            if peer != self.rank():  # a receive that times out closes the connection
                with suppress(RuntimeError):
                    self._carrier.recv([torch.empty(1)], peer, _NO_MESSAGE).wait(
                        timedelta(milliseconds=1)
                    )

    def shutdown(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join(1.0)


def _pinned(rows: Rows) -> list[list[torch.Tensor]]:
    """Return host memory for all of `rows`; for a tensor that is there more than once, the same."""
    made: dict[int, torch.Tensor] = {}
    for tensor in (one for row in rows for one in row):
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return [[made[id(tensor)] for tensor in row] for row in rows]


def _pairs(rows: Rows, others: Rows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Iterate over pairs of tensors, each pair once."""
    found = {
        id(a): (a, b)
        for row, other in zip(rows, others, strict=True)
        for a, b in zip(row, other, strict=True)
    }
    return iter(found.values())


def backend(device_type: str, alone: bool = False) -> str:
    """Return what init_process_group takes, after `install`; alone: shardcore finds no gloo in
    the group.
    """
    other = {"cpu": "cuda", "cuda": "cpu"}[device_type]
    return f"{device_type}:{NAME}" if alone else f"{other}:gloo,{device_type}:{NAME}"


def install(device_type: str) -> None:
    """Let "nccl_standin" be a backend of tensors on `device_type`, which shardcore takes for NCCL,
    in this process.

    On "cpu" messages that are sent one by one, which have tags, stay gloo's.
    """
    # torch 2.15 records calls of its own backends' groups alone
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(
        NAME, lambda *given: StandIn(*given, device_type), devices=["cpu", "cuda"]
    )
    batch, backends_of, init = dist.batch_isend_irecv, groups.backends_of, Comm.__init__

    def batch_of(ops: list[dist.P2POp]) -> Any:
        group = ops[0].group
        return [group.batch(ops)] if isinstance(group, StandIn) else batch(ops)

    def taken_for_nccl(group: dist.ProcessGroup) -> dict[str, str]:
        if not isinstance(group, StandIn):
            return backends_of(group)
        alone = dist.get_backend_config(group) == backend(device_type, alone=True)
        return {"cuda": "nccl"} if alone else {"cpu": "gloo", "cuda": "nccl"}

    def on_cpu(new: Comm, *given: Any, **options: Any) -> None:
        init(new, *given, **options)
        new.uses_nccl = new.uses_nccl or isinstance(new.group, StandIn)

    dist.batch_isend_irecv = batch_of
    comm.backends_of = groups.backends_of = taken_for_nccl
    if device_type == "cpu":
        Comm.__init__ = on_cpu  # type: ignore[method-assign]
