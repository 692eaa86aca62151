"""A simulated fabric: the engine's own schedule of one rank of many, in computed time, on nodes of
GPUs that NICs join.

The engine runs as it is, on the CPU, as rank 0 over torch's fake backend, and takes that for NCCL.
Its collectives move nothing. Each takes the links it needs for as long as its bytes take, after
those before it on its communicator, and what waits for it waits until then; modules and Adam
compute for as long as a GPU would. So what a schedule exposes is found without noise; what a
network does beyond bytes, latency and the order of communicators is not in it.

The model has the units of a large one, and a small fraction of its parameters: bytes and operations
are multiplied.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardcore
from shardcore.distributed import comm as comm_module
from shardcore.distributed.comm import Comm
from shardcore.engine.states import DeviceStore
from shardcore.offload import overlap_step

# that a step moves per parameter: masters and moments read and written, gradients, weights
ADAM_BYTES = 30


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes. nvlink, nic, memory: bytes per second of a GPU, of links each way; flops:
    operations; latency: seconds.

    message: seconds of a small message between hosts over gloo; host: bytes per second of a larger
    one.
    """

    ranks_per_node: int = 8
    nvlink: float = 350e9
    nic: float = 45e9
    latency: float = 20e-6
    memory: float = 3.3e12
    flops: float = 4e14
    message: float = 80e-6  # both about as between two processes of one machine, over TCP
    host: float = 1.2e9


@dataclass(frozen=True)
class Large:
    """The model that is computed with: parameters of a unit and of the root (embedding and head),
    and units. 7B by default.

    Where the small model's parameters of one or the other are no multiple of 256 for each rank,
    they are padded to one.
    """

    unit: float = 202e6
    root: float = 252.5e6  # so no padding up to 1,024 ranks that are a power of two
    units: int = 32


class Part:
    """Stands for a process group of some of the ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)


@dataclass(eq=False)
class _Flight:
    kind: str
    end: float
    fabric: "Fabric"

    def wait(self) -> bool:
        self.fabric.wait(self)
        return True

    def is_completed(self) -> bool:
        return True


@dataclass
class Fabric:
    """Computed time of one rank. now: of the stream that computes; exposed: seconds that it waits,
    by what it waits for.

    kind: of the collectives that are started next. compared: seconds that the host has taken to
    compare ranks.
    """

    machine: Machine
    world: int
    scale: float  # bytes of the large model for one of the small
    now: float = 0.0
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    kind: str = ""
    compared: float = 0.0
    # communicators and links
    _free: defaultdict[Any, float] = field(default_factory=lambda: defaultdict(float))

    def compute(self, seconds: float) -> None:
        """Let the GPU compute."""
        self.now += seconds

    def wait(self, flight: _Flight) -> None:
        """Wait for a collective, in the order of the stream."""
        self.exposed[flight.kind] += max(0.0, flight.end - self.now)
        self.now = max(self.now, flight.end)

    def start(self, group: Any, nvlink_bytes: float, nic_bytes: float) -> _Flight:
        """Start a collective: the bytes that this rank sends over its NVLink and over its NIC."""
        machine = self.machine
        links = [name for name, sent in (("nvlink", nvlink_bytes), ("nic", nic_bytes)) if sent]
        begin = max(self.now, *(self._free[one] for one in (group, *links)))
        end = (
            begin
            + machine.latency
            + self.scale * max(nvlink_bytes / machine.nvlink, nic_bytes / machine.nic)
        )
        for one in (group, *links):
            self._free[one] = end
        return _Flight(self.kind, end, self)

    def ranks(self, group: Any) -> Sequence[int]:
        """Return the ranks of a group."""
        return group.ranks if isinstance(group, Part) else range(self.world)

    def ring(self, group: Any, full_bytes: float) -> _Flight:
        """Gather, or reduce and scatter, by rings: one through each NIC of a node."""
        ranks, local = self.ranks(group), self.machine.ranks_per_node
        sent = full_bytes / len(ranks) * (len(ranks) - 1)
        here = sum(rank // local == 0 for rank in ranks)
        return self.start(group, sent if here > 1 else 0, 0 if here == len(ranks) else sent / here)

    def exchange(self, group: Any, full_bytes: int) -> _Flight:
        """Send each rank its piece."""
        ranks, local = self.ranks(group), self.machine.ranks_per_node
        piece, here = full_bytes / len(ranks), sum(rank // local == 0 for rank in ranks)
        return self.start(group, piece * (here - 1), piece * (len(ranks) - here))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let a stream of its own go on from here: what it waits for is not exposed."""
        now, exposed = self.now, dict(self.exposed)
        yield
        self.now = now
        self.exposed.clear()
        self.exposed.update(exposed)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Be what the engine sends over, in a world of which this process is rank 0."""
        init, start = Comm.__init__, Comm._start
        step = DeviceStore.step

        def as_on_gpus(comm: Comm, *given: Any) -> None:
            init(comm, *given)
            comm.uses_nccl, comm._backends = True, {"cpu": "gloo", "cuda": "nccl"}

        def noted(comm: Comm, name: str, ranks: Any = None) -> Any:
            # the second: gathered at stage 0
            sums = name.startswith(("the reduction", "the gradients"))
            self.kind = "gradients" if sums else "new weights" if "new" in name else "weights"
            return start(comm, name, ranks)

        def timed_step(store: DeviceStore, spans: Any, *rest: Any, **more: Any) -> None:
            step(store, spans, *rest, **more)
            self.compute(
                self.scale * ADAM_BYTES * sum(span.numel for span in spans) / self.machine.memory
            )

        # Others gather what this rank does, and send zeros: with numbers that are not finite a step
        # would be skipped.
        def gather(fulls: list[torch.Tensor], owns: list[torch.Tensor], group: Any) -> _Flight:
            for full, own in zip(fulls, owns, strict=True):
                full.view(-1, own.numel()).copy_(own.clone())
            return self.ring(group, sum(full.nbytes for full in fulls))

        def reduce_scatter(
            own: torch.Tensor, full: torch.Tensor, group: Any, async_op: bool
        ) -> _Flight:
            own.zero_()
            return self.ring(group, full.nbytes)

        def all_to_all(
            received: torch.Tensor, sent: torch.Tensor, group: Any, async_op: bool
        ) -> _Flight:
            return self.exchange(group, received.zero_().nbytes)

        waiting: list[torch.Tensor] = []  # comparisons over gloo, of which each gets what it sends

        def receive(tensor: torch.Tensor, source: int, **where: Any) -> None:
            waiting.append(tensor)

        def send(tensor: torch.Tensor, target: int, **where: Any) -> None:
            waiting.pop().copy_(tensor)
            self.compared += self.machine.message + tensor.nbytes / self.machine.host

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.world)
        patches: list[Any] = [
            mock.patch.object(Comm, "__init__", as_on_gpus),
            mock.patch.object(Comm, "_start", noted),
            mock.patch.object(Comm, "_after_current", side_effect=self.aside),
            mock.patch.object(comm_module, "group_beside", lambda like, ranks, *rest: Part(ranks)),
            mock.patch.object(comm_module, "_all_gather", gather),
            mock.patch.object(comm_module, "_reduce_scatter", reduce_scatter),
            mock.patch.object(dist, "all_to_all_single", all_to_all),
            mock.patch.object(dist, "irecv", receive),
            mock.patch.object(dist, "isend", send),
            mock.patch.object(DeviceStore, "step", timed_step),
            mock.patch.object(overlap_step, "uses_worker", return_value=False),
        ]
        try:
            for patch in patches:
                patch.start()
            yield
        finally:
            mock.patch.stopall()
            dist.destroy_process_group()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute on one thread, which is enough for a small model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Compute(torch.autograd.Function):
    """Takes time, and twice as much in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fabric: Fabric, seconds: float) -> torch.Tensor:
        ctx.fabric, ctx.seconds = fabric, seconds
        fabric.compute(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.fabric.compute(2 * ctx.seconds)
        return grads[0], None, None


class _Layer(nn.Module):
    """Weights of one size, whose gradients come one after the other."""

    def __init__(self, fabric: Fabric, seconds: float, *sizes: tuple[int, int]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.fabric, self.seconds = fabric, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = _Compute.apply(linear(x), self.fabric, self.seconds / len(self.linears))
        return x


def _forward_seconds(machine: Machine, large: Large, tokens: int) -> tuple[float, float]:
    """Return what forward takes in a unit, and in the head, half of the root."""
    return 2 * large.unit * tokens / machine.flops, large.root * tokens / machine.flops


class _Model(nn.Module):
    def __init__(self, fabric: Fabric, large: Large, tokens: int, width: int) -> None:
        super().__init__()
        unit_seconds, head_seconds = _forward_seconds(fabric.machine, large, tokens)
        half, down, up = (
            math.ceil(width * large.root / large.unit / 2),
            (width, width // 4),
            (width // 4, width),
        )
        self.embedding = nn.Linear(width, half, bias=False)
        self.blocks = nn.ModuleList(
            _Layer(fabric, unit_seconds, down, up, down, up) for _ in range(large.units)
        )
        self.head = _Layer(fabric, head_seconds, (width, half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.embedding(x).mean()
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def simulate(
    world: int,
    tokens: int,
    machine: Machine = Machine(),
    large: Large = Large(),
    head_apart: bool = False,
    **options: Any,
) -> dict[str, float]:
    """Return the seconds of a step by kind ("compute", "gradients", "weights", "new weights") after
    shard(..., **options).

    What is not "compute" is exposed. tokens: per rank and step. head_apart: whether the output head
    is a unit of its own. "host": what the engine's Python took, in real seconds; "compared": its
    comparisons of ranks, beside the GPU.
    """
    # of layers: units of 256 elements, or a multiple, for each rank
    width = 512 if world <= 256 else 1024
    fabric = Fabric(machine, world, large.unit / (width * width))
    torch.manual_seed(0)
    with fabric.installed(), _one_thread():
        model: Any = _Model(fabric, large, tokens, width)
        if head_apart:
            options["units"] = [*model.blocks, model.head]
        model, optimizer = shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), precision="bf16", **options
        )
        x = torch.ones(1, width, dtype=torch.bfloat16)
        begin, begun = 0.0, 0.0
        for step in range(4):
            # the order of units is known; a step's gathers may run into the next forward, so two
            # are averaged
            if step == 2:
                fabric.exposed.clear()
                fabric.compared = 0.0
                begin, begun = fabric.now, time.perf_counter()
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        host = time.perf_counter() - begun
        exposed = {kind: seconds / 2 for kind, seconds in fabric.exposed.items()}
        total = (fabric.now - begin) / 2
        optimizer.synchronize()
    return {
        "compute": total - sum(exposed.values()),
        "host": host / 2,
        "compared": fabric.compared / 2,
        **exposed,
    }


def simulate_fsdp2(
    world: int, tokens: int, machine: Machine = Machine(), large: Large = Large()
) -> dict[str, float]:
    """Return what `simulate` does, of the GPU alone, for FSDP2's schedule, as its documentation has
    it; none of its code runs.

    The root is gathered first, kept, and reduced last. Units are freed after forward. In both
    passes the next unit's gather is issued when a unit begins to compute; after a unit's backward
    its bfloat16 gradients are reduced and scattered by a ring. All ranks have one communicator,
    which runs these in order. Only the end of backward waits for reductions (FSDP2's buffers limit
    how many are in flight, which could only add waits).
    """
    fabric = Fabric(machine, world, scale=1)
    unit_seconds, head_seconds = _forward_seconds(machine, large, tokens)

    def start(kind: str, numel: float) -> _Flight:
        fabric.kind = kind
        return fabric.ring("all ranks", 2 * numel)

    fabric.wait(start("weights", large.root))
    reductions = []
    for backward in (False, True):
        coming = start("weights", large.unit)
        if backward:
            fabric.compute(2 * head_seconds)
        for left in reversed(range(large.units)):
            fabric.wait(coming)
            if left:
                coming = start("weights", large.unit)
            fabric.compute((2 if backward else 1) * unit_seconds)
            if backward:
                reductions.append(start("gradients", large.unit))
        if not backward:
            fabric.compute(head_seconds)
    for reduction in [*reductions, start("gradients", large.root)]:
        fabric.wait(reduction)
    fabric.compute(ADAM_BYTES * (large.units * large.unit + large.root) / world / machine.memory)
    return {"compute": fabric.now - sum(fabric.exposed.values()), **fabric.exposed}


def simulate_deepspeed(
    world: int,
    tokens: int,
    machine: Machine = Machine(),
    large: Large = Large(),
    stage: int = 2,
    bucket: float = 5e8,
) -> dict[str, float]:
    """Return what `simulate_fsdp2` does for DeepSpeed's schedule with its defaults and
    overlap_comm; none of its code runs.

    Gradients are reduced in buckets of so many parameters, on the one communicator of all ranks:
    stage 2 adds them up on all ranks, and gathers all weights after the step; stage 3 scatters
    them. It gathers the next 5e7 parameters (its stage3_prefetch_bucket_size) when those before
    them begin to compute, the first ones of each pass when they are needed.
    """
    fabric = Fabric(machine, world, scale=1)
    unit_seconds, head_seconds = _forward_seconds(machine, large, tokens)

    def start(kind: str, numel: float) -> _Flight:
        fabric.kind = kind
        return fabric.ring("all ranks", 2 * numel)

    pieces = math.ceil(large.unit / 5e7)
    # What is gathered, and how long forward computes with it: the embedding, units, the head.
    forward = [
        (large.root / 2, 0.0),
        *[(large.unit / pieces, unit_seconds / pieces)] * (pieces * large.units),
    ]
    forward.append((large.root / 2, head_seconds))
    filled, reductions = 0.0, []
    for passed in (forward, forward[::-1]):
        coming = start("weights", passed[0][0]) if stage == 3 else None
        for index, (numel, seconds) in enumerate(passed):
            if coming is not None:
                fabric.wait(coming)
                coming = start("weights", passed[index + 1][0]) if index + 1 < len(passed) else None
            fabric.compute(seconds if passed is forward else 2 * seconds)
            if passed is not forward:
                if filled + numel > bucket:
                    reductions.append(start("gradients", filled * (1 if stage == 3 else 2)))
                    filled = 0.0
                filled += numel
    for reduction in [*reductions, start("gradients", filled * (1 if stage == 3 else 2))]:
        fabric.wait(reduction)
    total = large.units * large.unit + large.root
    fabric.compute(ADAM_BYTES * total / world / machine.memory)
    if stage < 3:
        fabric.wait(start("new weights", total))
    return {"compute": fabric.now - sum(fabric.exposed.values()), **fabric.exposed}
