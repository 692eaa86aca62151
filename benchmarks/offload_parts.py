"""What the parts of a training step take on this machine, each measured by itself: compute, the
link, CPU Adam; and its bound.

Gradients go to host memory as backward makes them, Adam runs there, the new weights come back. All
is cut into equal chunks (units), so that parts can overlap; within one resource (the device, each
direction of the link, the CPU) they run one after the other. Weights may change only when backward
has ended, as clipping needs the norm of all gradients. From then on Adam can take the chunks whose
gradients have arrived, while the others arrive.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

import shardcore
from benchmarks import harness
from benchmarks.bench_copies import FROM_TIER, TO_TIER, plain_rates
from benchmarks.bench_train_step import OPTIONS
from benchmarks.cpu_buffers import Buffers
from benchmarks.device import Device
from benchmarks.offload_trainers import plain_model
from examples.gpt import PRESETS, next_byte_loss
from shardcore._native import _C
from shardcore.distributed.machine import own_cores, quota, worker_threads

WARMUP = 2
COPY_BYTES, COPIES = 2**26, 8
ADAM_NUMEL = 2**26


class Marks:
    """Times on the device's current stream, from mark to mark: those of its work, not of the
    host that queues it.
    """

    def __init__(self, device: Device) -> None:
        self._on_gpu = device.is_cuda
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        """Note the time at which all that is queued so far is done."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def intervals(self) -> list[float]:
        """Return the seconds between neighbouring marks. Waits for the last one."""
        if not self._on_gpu:
            return [after - before for before, after in pairwise(self._marks)]
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._marks)]


@contextmanager
def freed_after(device: Device) -> Iterator[None]:
    """Let go, in the end, of all that was allocated inside and is not held any more."""
    try:
        yield
    finally:
        device.free_bytes()
        if device.is_cuda and hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()  # pinned memory that torch would keep for later


@dataclass(frozen=True)
class Parts:
    """Seconds of a step's parts: forward and backward; gradients out, Adam and weights back of
    all chunks.
    """

    forward: float
    backward: float
    out: float
    adam: float
    back: float
    chunks: int


def streamed(parts: Parts, weights: float) -> Parts:
    """Return the parts of a step whose weights lie in host memory and come anew for each pass, in
    `weights` seconds.

    The step brings none back then: Adam writes them where they lie.
    """
    return replace(
        parts, forward=max(parts.forward, weights), backward=max(parts.backward, weights), back=0.0
    )


def lazy_bound(parts: Parts) -> float:
    """The least that a step takes whose Adam and weights back hide behind the next step's forward.

    Chunk after chunk goes through Adam, back and forward, of which the slowest never waits once it
    has begun; and the last gradient goes through them when it has arrived.
    """
    chunks = parts.chunks
    through = (parts.adam + parts.back + parts.forward) / chunks
    updated = (
        parts.backward
        + max(parts.adam, parts.back, parts.forward) * (chunks - 1) / chunks
        + through
    )
    arrived = max(parts.out + parts.backward / chunks, parts.backward + parts.out / chunks)
    return max(updated, arrived + through)


@dataclass
class Measured:
    """Seconds of forward and backward, bytes per second each way, seconds per element of CPU Adam:
    a sample per round.

    activation_bytes: what a step needs beside weights and their gradients; None where nobody
    counts.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    link: dict[str, list[float]] = field(default_factory=lambda: {TO_TIER: [], FROM_TIER: []})
    adam: list[float] = field(default_factory=list)
    adam_threads: int = 0
    activation_bytes: int | None = None

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return harness.spread(self.forward).median + harness.spread(self.backward).median

    def parts(
        self, numel: int, chunks: int, moved: tuple[float, float], streams: bool
    ) -> Parts | None:
        """Return the parts of a step of `numel` elements that moves so many bytes out and back;
        None if compute is unknown.
        """
        if not self.forward:
            return None
        out, back = (
            size / harness.spread(self.link[way]).median
            for size, way in zip(moved, (TO_TIER, FROM_TIER), strict=True)
        )
        adam = numel * harness.spread(self.adam).median
        parts = Parts(
            harness.spread(self.forward).median,
            harness.spread(self.backward).median,
            out,
            adam,
            back,
            chunks,
        )
        return streamed(parts, back / 2) if streams else parts


def measure(
    device: Device, preset: str, batch: Mapping[str, torch.Tensor], rounds: int, into: Measured
) -> str | None:
    """Add a sample of each part; returns why compute could not be measured, or None."""
    # On a GPU buffers that no cache holds, as the states of any model there; tests without one have
    # small models.
    copy_bytes, adam_numel = (
        (COPY_BYTES, ADAM_NUMEL) if device.is_cuda else (block_numel(preset), block_numel(preset))
    )
    with freed_after(device):
        for way, rate in plain_rates(device, copy_bytes, COPIES, rounds).items():
            into.link[way].append(rate)
    with freed_after(device):
        into.adam.append(adam_seconds(adam_numel, rounds, into))
    try:
        with freed_after(device):
            compute(device, preset, batch, rounds, into)
    except torch.OutOfMemoryError as error:
        return str(error).partition("\n")[0]
    return None


def block_numel(preset: str) -> int:
    """Return about how many parameters a block has."""
    return 12 * PRESETS[preset].dim ** 2


def compute(
    device: Device, preset: str, batch: Mapping[str, torch.Tensor], rounds: int, into: Measured
) -> None:
    """Time forward and backward of the model in plain torch, in bfloat16, whose gradients are
    dropped as they come.
    """
    model = plain_model(preset, device.torch)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop_grad)
    marks = Marks(device)
    held = 0
    if device.is_cuda:
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARMUP + rounds):
        marks.mark()
        loss = next_byte_loss(model(batch["tokens"]), batch["targets"])
        marks.mark()
        loss.backward()
        marks.mark()
    seconds = marks.intervals()[3 * WARMUP :]
    into.forward.append(harness.spread(seconds[0::3]).median)
    into.backward.append(harness.spread(seconds[1::3]).median)
    if device.is_cuda:
        into.activation_bytes = torch.cuda.max_memory_allocated() - held


def drop_grad(param: torch.Tensor) -> None:
    param.grad = None


def adam_seconds(numel: int, rounds: int, into: Measured) -> float:
    """Return the seconds per element of a CPU Adam step (bfloat16 in and out, float32 master),
    on its threads.
    """
    buffers = Buffers(numel, equal_pages=True)
    param = buffers.parameter(torch.bfloat16)
    param.grad = buffers.copy_of(buffers.grad, torch.bfloat16)
    optimizer = shardcore.CPUAdam([param], **OPTIONS, master="fp32")
    into.adam_threads = worker_threads([own_cores()], 0, quota())
    with ThreadPoolExecutor(1) as worker:
        worker.submit(_C.use_threads, into.adam_threads).result()
        seconds = worker.submit(
            harness.interleave, {"adam": optimizer.step}, rounds, pause_s=0, warmup=WARMUP
        ).result()
    return harness.spread(seconds["adam"]).median / numel
