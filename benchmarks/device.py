"""Where bench_fused_adam runs: how a GPU's time is taken, its kernels counted, and what its memory
can do.

With the CPU as the device everything works alike, so that a machine without a GPU can test the
benchmark; its figures mean nothing.
"""

import ctypes
import gc
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import harness
from tools.nvcc import compile_cuda

SOURCE = Path(__file__).with_name("read_limit.cu")
COPIES = ("Memcpy", "Memset")  # how the profiler begins the names of copies and fills
ANNOTATIONS = ("Optimizer.",)  # and of ranges that torch marks


def event_seconds(call: Callable[[], None], repeats: int) -> float:
    """Time ``repeats`` calls with CUDA events on the current stream, from an idle device until
    the last kernel is done.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def count_kernels(names: Iterable[str]) -> dict[str, int]:
    """Sort what ran on the device into kernels and copies (fills included)."""
    names = [name for name in names if not name.startswith(ANNOTATIONS)]
    copies = sum(name.startswith(COPIES) for name in names)
    return {"kernels": len(names) - copies, "copies": copies}


class Device:
    """A CUDA device, or the CPU standing in for one."""

    def __init__(self, kind: str) -> None:
        self.torch = torch.device(kind)
        self.is_cuda = self.torch.type == "cuda"
        self.name = torch.cuda.get_device_name() if self.is_cuda else "cpu"
        self.timer = event_seconds if self.is_cuda else harness.wall_seconds

    def free_bytes(self) -> int | None:
        """Let go of what nobody uses and return the memory that can be allocated then; None if
        there is no need to ask.
        """
        gc.collect()
        if not self.is_cuda:
            return None
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def launches(self, call: Callable[[], None]) -> dict[str, int] | None:
        """Run ``call`` once and count what it launched on the device; None on the CPU.

        Only after all timing: the profiler stays attached to the process and slows every launch
        that follows.
        """
        if not self.is_cuda:
            return None
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        return count_kernels(
            e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA
        )

    def copier(self, size_bytes: int) -> Callable[[], None]:
        """Return a call that copies ``size_bytes`` within the device's memory, so moves twice as
        many.
        """
        source = torch.ones(size_bytes, dtype=torch.uint8, device=self.torch)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    def reader(self, size_bytes: int) -> Callable[[], None]:
        """Return a call that reads ``size_bytes`` (a multiple of 16) of the device's memory and
        writes nothing.
        """
        data = torch.ones(size_bytes // 4, dtype=torch.float32, device=self.torch)
        if not self.is_cuda:
            return lambda: data.sum()
        read = _build_reader()
        out = torch.zeros(1, dtype=torch.int32, device=self.torch)

        def call() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            error = read(
                ctypes.c_void_p(data.data_ptr()),
                ctypes.c_int64(size_bytes),
                ctypes.c_void_p(out.data_ptr()),
                ctypes.c_void_p(stream),
            )
            if error:
                raise RuntimeError(f"read_limit: CUDA error {error} at its launch")

        return call


def compile_reader(library: Path, arch: str | None = None) -> None:
    """Compile read_limit.cu, for the GPU here or another architecture."""
    compile_cuda(SOURCE, library, "-shared", "-Xcompiler", "-fPIC", arch=arch)


def _build_reader() -> "ctypes._CFuncPtr":
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, "read_limit.so")
        compile_reader(library)
        return ctypes.CDLL(str(library)).read_limit
