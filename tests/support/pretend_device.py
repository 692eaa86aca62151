"""A pretended GPU, "pretend", in host memory, by which a machine without one finds what would fail on a GPU alone.

What CUDA, NCCL and the kernels refuse raises here: operations on tensors of two devices, a CPU tensor given to NCCL (or one
with gaps), tensors of two devices given to a kernel, a tensor on the wrong side of a copy to or from host memory. Such copies
are made when something waits for them, as late as may be. What is not pretended: streams, and CUDA's own calls, which
shardcore makes where a device's type is "cuda".

torch names the device once for a process, so it is there in processes of their own alone (`run_pretended`).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.cpp_extension import include_paths, library_paths

from shardcore._native import _C
from shardcore.distributed.comm import Comm
from shardcore.optim import options
from tests.support.copies import ROOT, compiled
from tests.support.ranks import run_ranks, stop_ranks
from tests.support.tiers import Wrapped, tier_with
from tools import nccl_standin

NAME = "pretend"
SOURCE = ROOT / "tests/support/pretend_device.cpp"
KERNELS = ("cast", "sq_norm", "sq_norm_add", "ordered_sum", "element_step", "device_step")
COLLECTIVES = (  # those of the stand-in that the others call
    *(
        "alltoall",
        "alltoall_base",
        "all_to_all_single",
        "allgather",
        "allgather_into_tensor_coalesced",
        "broadcast",
        "allreduce",
    ),
    *("all_gather_single_coalesced", "reduce_scatter"),
)


def why_not() -> str | None:
    """Return why there is no pretended device here, or None."""
    compiler = os.environ.get("CXX", "c++")
    return None if shutil.which(compiler) else f"{compiler}, which compiles the pretended device, is not on PATH"


def run_pretended(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(rank, world_size, group, *args)` on ranks that have the device; see run_ranks.

    group: of all ranks, as NCCL alone. The ranks are new, since autograd starts its threads once for all devices, and end here.
    """
    library = _library()
    stop_ranks()
    try:
        return run_ranks(world_size, _run, library, function, args)
    finally:
        stop_ranks()


def _run(rank: int, world_size: int, library: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _register(library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "DEVICE_TYPES", (*options.DEVICE_TYPES, NAME))
        for name in KERNELS:
            patch.setattr(_C, name, _on_one_device(name, getattr(_C, name)))
        patch.setattr(_C, "AdamStepper", _Stepper)
        tier_with(patch, _Tier, late=True)
        return function(rank, world_size, _group_on_the_device(patch), *args)


def _library() -> str:
    """Return the path of the device's library, which is compiled once for a version of torch."""
    flags = ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-I{path}" for path in include_paths()]
    flags += [part for path in library_paths() for part in (f"-L{path}", f"-Wl,-rpath,{path}")]
    return str(compiled(SOURCE, [*flags, "-lc10", "-ltorch_cpu", "-ltorch"], version=torch.__version__))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def host_views(value: Any) -> Any:
    """Return lists, tuples and dicts with CPU tensors over the same memory in place of those on the device."""
    if isinstance(value, torch.Tensor):
        return torch.ops.pretend_device.host_view(value.detach()) if on_device(value) else value
    if isinstance(value, dict):
        return {key: host_views(one) for key, one in value.items()}
    return type(value)(map(host_views, value)) if type(value) in (list, tuple) else value


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the pretended device."""
    return tensor.device.type == NAME


# --- torch --------------------------------------------------------------------------------------------------------------


def _register(library: str) -> None:
    """Make the device known to torch."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = ModuleType(f"torch.{NAME}")
    module.current_device, module.device_count = lambda: 0, lambda: 1
    module.is_available = module.is_initialized = lambda: True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._is_in_bad_fork, module.manual_seed_all = lambda: False, lambda seed: None
    torch._register_device_module(NAME, module)


# --- kernels ------------------------------------------------------------------------------------------------------------


def _on_one_device(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that takes tensors of one device, and returns its tensor there."""

    def call(*arguments: Any, **named: Any) -> Any:
        devices = {tensor.device for tensor in tensors_in((arguments, named))}
        if len(devices) > 1:
            raise TypeError(f"pretended device: {name} got tensors on {sorted(map(str, devices))}; expected one device")
        made = kernel(*host_views(arguments), **host_views(named))
        return made.to(*devices) if isinstance(made, torch.Tensor) else made

    return call


class _Stepper:
    """AdamStepper on one device."""

    def __init__(self, make: Callable[[], Any] = _C.AdamStepper) -> None:
        self._stepper = make()
        self.step = _on_one_device("AdamStepper.step", self._stepper.step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)


# --- host memory --------------------------------------------------------------------------------------------------------


def _expect(what: str, tensors: Any, type_of_device: str) -> None:
    for tensor in tensors_in(tensors):
        if tensor.device.type != type_of_device:
            raise TypeError(f"pretended device: {what} is on {tensor.device}; expected {type_of_device}")


class _Tier(Wrapped):
    """A tier beside the device."""

    def to_tier(self, dst: torch.Tensor, src: torch.Tensor) -> Any:
        _expect("dst of to_tier", dst, "cpu")
        _expect("src of to_tier", src, NAME)
        return self._tier.to_tier(dst, host_views(src))

    def from_tier(self, dst: torch.Tensor, src: torch.Tensor) -> Any:
        _expect("dst of from_tier", dst, NAME)
        _expect("src of from_tier", src, "cpu")
        return self._tier.from_tier(host_views(dst), src)

    def pipeline(self, pipeline: Any) -> Any:
        return _Pipeline(pipeline)


class _Pipeline(Wrapped):
    """The pipeline of such a tier: weights, and gradients that come, are on the device, all else in host memory."""

    def chunk(self, *, weights: Any, grads_come: bool, **lists: Any) -> Any:
        _expect("a weight of a chunk", weights, NAME)
        _expect("a list of a chunk", lists, "cpu")
        self._grads_on = NAME if grads_come else "cpu"
        return self._tier.chunk(weights=host_views(list(weights)), grads_come=grads_come, **lists)

    def begin(self, chunks: Any, grads: Any, *arguments: Any, **named: Any) -> Any:
        _expect("a gradient of a step", grads, self._grads_on)
        return self._tier.begin(chunks, host_views(list(grads)), *arguments, **named)


# --- NCCL ---------------------------------------------------------------------------------------------------------------


def _as_nccl(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective of the stand-in that takes what NCCL takes: tensors on the device, without gaps."""

    def call(group: dist.ProcessGroup, *arguments: Any) -> Any:
        for tensor in tensors_in(arguments):
            if not on_device(tensor) or not tensor.is_contiguous():
                raise TypeError(
                    f"pretended device: {collective.__name__} of NCCL got a tensor on {tensor.device} with strides "
                    f"{tensor.stride()}; expected {NAME} and no gaps"
                )
        return collective(group, *host_views(arguments))

    return call


def _batch(group: Any, ops: list[dist.P2POp], batch: Callable[..., Any] = nccl_standin.StandIn.batch) -> Any:
    _expect("a message of NCCL", [op.tensor for op in ops], NAME)
    for op in ops:
        op.tensor = host_views(op.tensor)
    return batch(group, ops)


def _one_by_one(group: Any, tensors: Any, *_: Any) -> Any:
    raise TypeError(f"pretended device: NCCL alone was given a message on {tensors[0].device}; expected a batch of them")


def _group_on_the_device(patch: pytest.MonkeyPatch) -> dist.ProcessGroup:
    """Return a group of all ranks whose collectives are NCCL's, and whose Comm is on the device."""
    nccl_standin.install("cpu")
    for name in COLLECTIVES:
        patch.setattr(nccl_standin.StandIn, name, _as_nccl(getattr(nccl_standin.StandIn, name)))
    patch.setattr(nccl_standin.StandIn, "batch", _batch)
    for name in ("send", "recv"):
        patch.setattr(nccl_standin.StandIn, name, _one_by_one, raising=False)
    init = Comm.__init__

    def with_device(comm: Comm, *given: Any, **named: Any) -> None:
        init(comm, *given, **named)
        comm.device = torch.device(NAME, 0) if comm.uses_nccl else comm.device

    patch.setattr(Comm, "__init__", with_device)
    return dist.new_group(backend=nccl_standin.backend("cpu", alone=True))
