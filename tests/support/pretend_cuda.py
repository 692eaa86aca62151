"""A pretended GPU in host memory, of torch's device type "cuda", by which a machine without one
finds what would fail there.

What CUDA, NCCL and the kernels refuse raises here: operations on tensors of two devices, a CPU
tensor given to NCCL (or one with gaps), tensors of two devices given to a kernel, a tensor on the
wrong side of a copy to or from host memory. A race of streams raises, too (pretend_cuda.cpp):
torch's operations, kernels, collectives and the tier's copies each use memory on their stream, and
waits order these. What comes to host memory comes as late as may be.

Not pretended: how kernels run, and time; the waits inside of csrc, which are taken to be there;
uses of host memory outside of a tier; that a wait of one host thread orders nothing for another; an
event that is not done when it is asked.

torch learns of its devices once for a process, so it is there in processes of their own alone
(`run_pretended`).
"""

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # it looks for CUDA when it is imported, in vain
import torch.distributed as dist
from torch.utils.cpp_extension import include_paths, library_paths

from shardcore._native import _C
from tests.support import ranks
from tests.support.copies import ROOT, compiled
from tests.support.tiers import Wrapped, tier_with
from tools import nccl_standin

DEVICE = torch.device("cuda", 0)
SOURCE = ROOT / "tests/support/pretend_cuda.cpp"
READ = {  # by each kernel only read: positions of arguments, and names
    "cast": (1,),
    "sq_norm": (0,),
    "sq_norm_add": (0,),
    "digest": (0, 3),
    "ordered_sum": (0, 2, "own", "scale"),
    "element_step": (1,),
    "device_step": (1, "grad_scale", "loss_scale", "found_inf"),
    "step": (1, 4),
}
COLLECTIVES = {  # those of the stand-in that the others call: what they receive
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "broadcast": "broadcast",
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "scatter": "scatter",
}
_ops: Any = torch.ops.pretend_cuda
_calls = count()


def why_not() -> str | None:
    """Return why there is no pretended GPU here, or None."""
    if torch.version.cuda is not None:
        return "this torch has CUDA itself"
    compiler = os.environ.get("CXX", "c++")
    return (
        None
        if shutil.which(compiler)
        else f"{compiler}, which compiles the pretended GPU, is not on PATH"
    )


def run_pretended(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(rank, world_size, *args)` on ranks that have the device, in a process group of
    NCCL alone; see run_ranks.

    The ranks are new, since torch must find the device when it is imported, and end here.
    """
    library = _library()
    ranks.stop_ranks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", library)
        patch.setattr(ranks, "context", multiprocessing.get_context("spawn"))
        try:
            return ranks.run_ranks(
                world_size, _run, library, ranks.store_port(), next(_calls), function, args
            )
        finally:
            ranks.stop_ranks()


def _run(
    rank: int,
    world_size: int,
    library: str,
    port: int,
    call: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    os.environ.pop("LD_PRELOAD", None)  # of programs that this one starts
    torch.ops.load_library(library)
    patch = pytest.MonkeyPatch()  # for good: threads go on
    pretend_torch_cuda(patch)
    build = dict(_C.build_info(), cuda="pretended")
    patch.setattr(_C, "build_info", lambda: build)
    for name in READ.keys() - {"step"}:
        patch.setattr(_C, name, _kernel(name, getattr(_C, name)))
    patch.setattr(_C, "AdamStepper", _Stepper)
    patch.setattr(_C, "AdamLists", _Lists)
    tier_with(patch, _Tier, late=True)
    _pretend_nccl(patch)
    dist.destroy_process_group()
    store = dist.PrefixStore(f"pretended {call}", dist.TCPStore("127.0.0.1", port, is_master=False))
    backend = nccl_standin.backend("cpu", alone=True)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    return function(rank, world_size, *args)


def _library() -> str:
    """Return the path of the device's library, which is compiled once for a version of torch."""
    flags = ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-I{path}" for path in include_paths()]
    flags += [part for path in library_paths() for part in (f"-L{path}", f"-Wl,-rpath,{path}")]
    return str(
        compiled(SOURCE, [*flags, "-lc10", "-ltorch_cpu", "-ltorch"], version=torch.__version__)
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def host_views(value: Any) -> Any:
    """Return lists, tuples and dicts with CPU tensors over the same memory in place of those on
    the device.
    """
    if isinstance(value, torch.Tensor):
        return _ops.host_view(value.detach()) if value.is_cuda else value
    if isinstance(value, dict):
        return {key: host_views(one) for key, one in value.items()}
    return type(value)(map(host_views, value)) if type(value) in (list, tuple) else value


# --- torch.cuda -----------------------------------------------------------------------------------


class Stream:
    """A stream: its number. Number 0 is the default stream."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        self.number = _ops.new_stream(0) if number is None else number
        self.device, self.cuda_stream = DEVICE, self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def wait_stream(self, other: "Stream") -> None:
        _ops.wait(self.number, _ops.clock(other.number))

    def wait_event(self, event: "Event") -> None:
        _ops.wait(self.number, event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _ops.host_waits(_ops.clock(self.number))

    def query(self) -> bool:
        self.synchronize()
        return True


class Event:
    """A point of a stream."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.clock: list[int] = []

    def record(self, stream: Stream | None = None) -> None:
        self.clock = _ops.clock((stream or current_stream()).number)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _ops.host_waits(self.clock)

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


def current_stream(device: Any = None) -> Stream:
    return Stream(number=_ops.current_stream())


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Return torch.cuda.stream of a stream."""
    before = _ops.current_stream()
    _ops.set_stream(before if stream is None else stream.number)
    try:
        yield
    finally:
        _ops.set_stream(before)


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    torch.ops.aten.record_stream(
        tensor, torch.Stream(stream_id=stream.number, device_index=0, device_type=1)
    )


def pretend_torch_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let torch.cuda's functions be those of the pretended GPU."""
    pci = dict.fromkeys(("pci_domain_id", "pci_bus_id", "pci_device_id"), 0)
    properties = SimpleNamespace(
        name="pretended", total_memory=80 << 30, multi_processor_count=132, major=9, minor=0, **pci
    )
    pretended: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(number=0),
        "synchronize": lambda device=None: _ops.synchronize(),
        "mem_get_info": lambda device=None: (60 << 30, 80 << 30),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "nvtx": SimpleNamespace(range_push=lambda name: 0, range_pop=lambda: 0),
    }
    pretended |= dict.fromkeys(
        ("is_available", "is_initialized", "is_bf16_supported", "_is_compiled"), lambda *_: True
    )
    pretended |= dict.fromkeys(("is_current_stream_capturing", "_is_in_bad_fork"), lambda: False)
    pretended |= dict.fromkeys(
        ("_lazy_init", "empty_cache", "set_device", "reset_peak_memory_stats", "init"),
        lambda *_: None,
    )
    pretended |= dict.fromkeys(("manual_seed", "manual_seed_all", "ipc_collect"), lambda *_: None)
    zeros = (
        "current_device",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    )
    pretended |= dict.fromkeys((*zeros, "_exchange_device", "_maybe_exchange_device"), lambda *_: 0)
    pretended["device_count"] = lambda: 1
    for name, value in pretended.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.Tensor, "record_stream", _record_stream)


# --- uses of memory -------------------------------------------------------------------------------


def uses(what: str, reads: Any, writes: Any) -> None:
    """Note that an operation on the current stream begins, and which tensors it reads and
    writes.
    """
    _ops.launch(what)
    for tensors, written in ((reads, False), (writes, True)):
        for tensor in tensors_in(tensors):
            _ops.use(tensor.detach(), written)


class _Line:
    """A stream that something else works on: NCCL, or a direction of a tier's copies."""

    def __init__(self) -> None:
        self.stream = Stream()

    def do(self, what: str, reads: Any, writes: Any) -> list[int]:
        """Note an operation after all on the current stream; returns its end, for `after`."""
        self.stream.wait_stream(current_stream())
        with on_stream(self.stream):
            uses(what, reads, writes)
        return list(_ops.clock(self.stream.number))


def after(end: list[int]) -> None:
    """Let the current stream wait for the end of an operation."""
    _ops.wait(_ops.current_stream(), end)


# --- kernels --------------------------------------------------------------------------------------


def _kernel(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that takes tensors of one device, and returns its tensor there."""

    def call(*arguments: Any, **named: Any) -> Any:
        devices = {tensor.device for tensor in tensors_in((arguments, named))}
        if len(devices) > 1:
            raise TypeError(
                f"pretended GPU: {name} got tensors on {sorted(map(str, devices))}; expected one "
                f"device"
            )
        given = {**dict(enumerate(arguments)), **named}
        if devices == {DEVICE}:
            uses(
                name,
                [given.get(key) for key in READ[name]],
                [given[key] for key in given if key not in READ[name]],
            )
        made = kernel(*host_views(arguments), **host_views(named))
        return made.to(*devices) if isinstance(made, torch.Tensor) else made

    return call


class _Lists:
    """AdamLists on one device."""

    def __init__(self, make: Callable[..., Any] = _C.AdamLists, **lists: Any) -> None:
        self.lists, self.tensors = make(**host_views(lists)), list(tensors_in(lists))

    def plain_grads(self, *given: Any) -> None:
        """Let each step look closer."""

    release_states = with_states = plain_grads


class _Stepper:
    """AdamStepper on one device."""

    def __init__(self, make: Callable[[], Any] = _C.AdamStepper) -> None:
        self._stepper = make()
        self.step = _kernel("step", self._stepper.step)

    def repeat(self, lists: _Lists, grads: Any, *scalars: Any) -> None:
        uses("step", (grads, scalars), lists.tensors)
        self._stepper.repeat(lists.lists, host_views(grads), *host_views(scalars))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)


# --- host memory ----------------------------------------------------------------------------------


def _expect(what: str, tensors: Any, type_of_device: str) -> None:
    for tensor in tensors_in(tensors):
        if tensor.device.type != type_of_device:
            raise TypeError(
                f"pretended GPU: {what} is on {tensor.device}; expected {type_of_device}"
            )


class _Copy:
    """The event of a copy that ends at `end`."""

    def __init__(self, event: Any, end: list[int]) -> None:
        self.event, self._end = event, end

    def wait(self) -> None:
        self.event.wait()
        after(self._end)

    def synchronize(self) -> None:
        self.event.synchronize()
        _ops.host_waits(self._end)

    def query(self) -> bool:
        done = bool(self.event.query())
        if done:
            _ops.host_waits(self._end)
        return done


class _Tier(Wrapped):
    """A tier beside the device."""

    def __init__(self, tier: Any) -> None:
        super().__init__(tier)
        self.outward, self.inward = _Line(), _Line()

    def to_tier(self, dst: torch.Tensor, src: torch.Tensor) -> Any:
        _expect("dst of to_tier", dst, "cpu")
        _expect("src of to_tier", src, "cuda")
        return _Copy(self._tier.to_tier(dst, host_views(src)), self.outward.do("to_tier", src, ()))

    def from_tier(self, dst: torch.Tensor, src: torch.Tensor) -> Any:
        _expect("dst of from_tier", dst, "cuda")
        _expect("src of from_tier", src, "cpu")
        return _Copy(
            self._tier.from_tier(host_views(dst), src), self.inward.do("from_tier", (), dst)
        )

    def synchronize(self) -> None:
        self._tier.synchronize()
        self._host_waits()

    def drain(self) -> None:
        self._tier.drain()
        self._host_waits()

    def _host_waits(self) -> None:
        self.outward.stream.synchronize()
        self.inward.stream.synchronize()

    def pipeline(self, pipeline: Any) -> Any:
        return _Pipeline(pipeline, self)


class _Pipeline(Wrapped):
    """The pipeline of such a tier: weights, and gradients that come, are on the device, all else
    in host memory.
    """

    def __init__(self, pipeline: Any, tier: _Tier) -> None:
        super().__init__(pipeline)
        self._of = tier
        # of each chunk: of its copies in, and out
        self._ends: list[tuple[list[int], list[int]]] = []

    def chunk(self, **given: Any) -> Any:
        return self._chunk(self._tier.chunk, **given)

    def element_chunk(self, **given: Any) -> Any:
        return self._chunk(self._tier.element_chunk, **given)

    def _chunk(self, make: Any, *, weights: Any, grads_come: bool, **lists: Any) -> Any:
        _expect("a weight of a chunk", weights, "cuda")
        _expect("a list of a chunk", lists, "cpu")
        self._grads_on = "cuda" if grads_come else "cpu"
        return _Chunk(
            make(weights=host_views(list(weights)), grads_come=grads_come, **lists), list(weights)
        )

    def begin(
        self, chunks: Any, grads: Any, *arguments: Any, arrivals: Any = (), **named: Any
    ) -> Any:
        _expect("a gradient of a step", grads, self._grads_on)
        self._ends, left = [], list(grads)
        for chunk in chunks:
            mine, left = left[: len(chunk.weights)], left[len(chunk.weights) :]
            fetched = self._of.outward.do(
                "the copies in of a step", mine if self._grads_on == "cuda" else (), ()
            )
            self._ends.append(
                (fetched, self._of.inward.do("the copies out of a step", (), chunk.weights))
            )
        arrivals = [event.event if isinstance(event, _Copy) else event for event in arrivals]
        inner = [chunk.chunk for chunk in chunks]
        return self._tier.begin(
            inner, host_views(list(grads)), *arguments, arrivals=arrivals, **named
        )

    def wait_updated(self, first: int, last: int) -> Any:
        event = self._tier.wait_updated(first, last)
        if last > 0:
            _ops.host_waits(self._ends[last - 1][0])
        return None if event is None else _Copy(event, self._ends[last - 1][1])


class _Chunk:
    def __init__(self, chunk: Any, weights: list[torch.Tensor | None]) -> None:
        self.chunk, self.weights = chunk, weights


# --- NCCL -----------------------------------------------------------------------------------------


def _line_of(group: Any) -> _Line:
    if not hasattr(group, "line"):
        group.line = _Line()
    line: _Line = group.line
    return line


def _start(group: Any, what: str, sent: Any, received: Any, start: Callable[[], Any]) -> Any:
    """Start a collective on the group's stream; like NCCL's group in torch it keeps its tensors
    until someone waits for it.
    """
    end = _line_of(group).do(what, sent, received)
    flight = start()
    flight.end, flight.kept = end, (sent, received)
    return flight


def _as_nccl(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective of the stand-in that takes what NCCL takes: tensors on the device,
    without gaps.
    """

    def call(group: dist.ProcessGroup, *arguments: Any) -> Any:
        for tensor in tensors_in(arguments):
            if not tensor.is_cuda or not tensor.is_contiguous():
                raise TypeError(
                    f"pretended GPU: {collective.__name__} of NCCL got a tensor on {tensor.device} "
                    f"with strides "
                    f"{tensor.stride()}; expected cuda and no gaps"
                )
        what = COLLECTIVES[name]
        return _start(
            group,
            what,
            arguments[1:],
            arguments[0],
            lambda: collective(group, *host_views(arguments)),
        )

    return call


def _batch(
    group: Any, ops: Sequence[Any], batch: Callable[..., Any] = nccl_standin.StandIn.batch
) -> Any:
    tensors: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for op in ops:
        _expect("a message of NCCL", op.tensor, "cuda")
        tensors[op.op is dist.isend].append(op.tensor)
        op.tensor = host_views(op.tensor)
    return _start(
        group, "a batch of messages", tensors[True], tensors[False], lambda: batch(group, ops)
    )


def _one_message(sends: bool) -> Callable[..., Any]:
    def call(group: Any, tensors: Any, peer: int, tag: int) -> Any:
        return group.batch(
            [
                dist.P2POp(
                    dist.isend if sends else dist.irecv, tensors[0], group=group, group_peer=peer
                )
            ]
        )

    return call


class _Flight(nccl_standin.Flight):
    def is_completed(self) -> bool:
        done = super().is_completed()
        if done:
            _ops.host_waits(self.end)
        return done

    def wait(self, timeout: Any = None) -> bool:
        super().wait(timeout)
        after(self.end)
        self.kept = None
        return True


def _pretend_nccl(patch: pytest.MonkeyPatch) -> None:
    """Let the collectives of the stand-in be NCCL's, on the device."""
    nccl_standin.install("cpu")
    patch.setattr(nccl_standin, "Flight", _Flight)
    patch.setattr(dist.distributed_c10d, "_get_object_coll_device", lambda group=None: "cuda")
    for name in COLLECTIVES:
        patch.setattr(
            nccl_standin.StandIn, name, _as_nccl(name, getattr(nccl_standin.StandIn, name))
        )
    patch.setattr(nccl_standin.StandIn, "batch", _batch)
    for name in ("send", "recv"):
        patch.setattr(nccl_standin.StandIn, name, _one_message(name == "send"), raising=False)
