"""get_accelerator(): the device that this process trains on, by the methods of DeepSpeed's
accelerators.

Source: https://deepspeed.readthedocs.io/en/latest/accelerator-abstraction.html and its base class,
0.19.8.
"""

import os
import resource
from typing import Any

import torch

from shardcore.distributed.machine import numa_nodes

# Methods of torch.cuda that tell of memory, as a CPU answers them: for the whole process, in bytes.
_HOST_NOW = ("memory_allocated", "memory_reserved", "memory_cached")
_HOST_MOST = ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")
_NOTHING = (
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "range_push",
    "range_pop",
)


class Accelerator:
    """What get_accelerator() returns: torch.cuda, or a CPU. Other attributes are those of
    torch.cuda (torch.cpu, or torch).
    """

    def __init__(self) -> None:
        """Look for a GPU."""
        self._name = "cuda" if torch.cuda.is_available() else "cpu"

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of torch.cuda; or of torch.cpu or torch, or what stands for it on
        a CPU.
        """
        if name.startswith("_"):  # of an object that is being unpickled
            raise AttributeError(name)
        if self._name == "cuda":
            return getattr(torch.cuda.nvtx if name.startswith("range_") else torch.cuda, name)
        if name in _HOST_NOW:
            return lambda device_index=None: _resident_bytes()
        if name in _HOST_MOST:
            return lambda device_index=None: max(
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _resident_bytes()
            )
        if name in _NOTHING:
            return lambda *args, **kwargs: None
        return getattr(torch.cpu, name) if hasattr(torch.cpu, name) else getattr(torch, name)

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda", "cuda:1" or "cpu"."""
        return (
            self._name
            if device_index is None or self._name == "cpu"
            else f"{self._name}:{device_index}"
        )

    def current_device_name(self) -> str:
        """Return the name of the current device."""
        return self.device_name(torch.cuda.current_device() if self._name == "cuda" else None)

    def device_count(self) -> int:
        """Return how many GPUs there are; on a CPU LOCAL_SIZE, as DeepSpeed's launcher sets it,
        else the NUMA nodes.
        """
        if self._name == "cuda":
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_SIZE", "0")) or len(numa_nodes()) or 1

    def set_device(self, device_index: int) -> None:
        """Make a GPU the current one; nothing without any."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device."""
        return torch.device(self.device_name(device_index))

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """Return "nccl" or "gloo"."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_available(self) -> bool:
        """Return True: a CPU trains, too."""
        return True

    def is_bf16_supported(self) -> bool:
        """Whether weights may be bfloat16."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether weights may be float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that weights may have."""
        return [
            torch.float32,
            torch.float16,
            *([torch.bfloat16] if self.is_bf16_supported() else []),
        ]

    def random(self) -> Any:
        """Return the module torch.random."""
        return torch.random

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random generators of all GPUs, or of the CPU."""
        torch.cuda.manual_seed_all(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def empty_cache(self) -> None:
        """Free memory that torch keeps on the GPU; nothing without any."""
        torch.cuda.empty_cache()

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that the device has; the machine without a GPU."""
        if self._name == "cuda":
            return torch.cuda.get_device_properties(self.device(device_index)).total_memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device, or of the machine, that nothing uses."""
        if self._name == "cuda":
            return torch.cuda.mem_get_info(device_index)[0]
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return a page-locked copy of a tensor in host memory; the tensor without a GPU.
        align_bytes: accepted.
        """
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in page-locked memory."""
        return self._name == "cuda" and tensor.is_pinned()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    """Return what describes the device that this process trains on."""
    return _accelerator


def is_current_accelerator_supported() -> bool:
    """Return True: a GPU and a CPU train."""
    return True
