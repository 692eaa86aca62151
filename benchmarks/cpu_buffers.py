"""Memory of the CPU benchmarks: buffers that ask for huge pages, equal starting values for every
engine, and bytes in use.
"""

import gc
import json
import mmap
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

HUGE_PAGE_BYTES = 2 * 2**20


def allocate(numel: int, dtype: torch.dtype, huge: bool) -> torch.Tensor:
    """Make a zero-filled CPU tensor (numel,), on pages that ask to be huge ones if ``huge``."""
    if not huge or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(numel, dtype=dtype)
    # A huge page more than needed: to start on its border, and because streams that lie exactly 256
    # MiB apart contend for the same cache sets and memory banks (a plain loop over four of them
    # then takes three times as long).
    # shared memory, the default, has huge pages only where tmpfs has
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, numel * dtype.itemsize + HUGE_PAGE_BYTES, flags=flags)
    pages.madvise(mmap.MADV_HUGEPAGE)
    offset = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    return torch.frombuffer(pages, dtype=dtype, count=numel, offset=offset)


class Buffers:
    """Starting values, the same for every engine: weight and gradient (numel,) float32, small
    random numbers.
    """

    def __init__(self, numel: int, equal_pages: bool) -> None:
        self.numel = numel
        self.equal_pages = equal_pages
        generator = torch.Generator().manual_seed(0)
        # Narrowed once, so that the float32 and the bfloat16 subjects hold the same numbers.
        self.weight = torch.randn(numel, generator=generator).mul_(0.02).bfloat16()
        self.grad = torch.randn(numel, generator=generator).mul_(1e-3).bfloat16()

    def copy_of(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy ``source`` into a new buffer of ``dtype``."""
        return allocate(self.numel, dtype, self.equal_pages).copy_(source)

    def parameter(self, dtype: torch.dtype) -> torch.nn.Parameter:
        """Make a parameter of its own memory that holds the weight."""
        return torch.nn.Parameter(self.copy_of(self.weight, dtype))

    def streams(self, *dtypes: torch.dtype) -> list[torch.Tensor]:
        """Make buffers for the limit that hold small numbers: always on huge pages, else it
        would not be the limit.
        """
        return [allocate(self.numel, dtype, huge=True).copy_(self.weight) for dtype in dtypes]

    def zeros(self) -> torch.Tensor:
        """Make a float32 state."""
        return allocate(self.numel, torch.float32, self.equal_pages)


def step_of(optimizer: torch.optim.Optimizer, buffers: Buffers) -> Callable[[], None]:
    """Return a peer's step; with equal pages its states lie on huge pages, too."""
    if not buffers.equal_pages:
        return optimizer.step
    moved = False

    def step() -> None:
        nonlocal moved
        optimizer.step()
        if not moved:  # its states are made in its first step, which is never timed
            for state in optimizer.state.values():
                flats = {
                    key: flat
                    for key, flat in state.items()
                    if torch.is_tensor(flat) and flat.numel() == buffers.numel
                }
                state.update({key: buffers.zeros().copy_(flat) for key, flat in flats.items()})
            moved = True

    return step


def four_pass_step(
    make: Callable[[torch.nn.Parameter], torch.optim.Optimizer],
    weight: torch.Tensor,
    grad: torch.Tensor,
    buffers: Buffers,
    scale: float,
) -> Callable[[], None]:
    """Make a peer's offload step: widen the gradient, multiply it by ``scale``, step on the
    master, narrow the weight.
    """
    master = buffers.parameter(torch.float32)
    master.grad = buffers.zeros()
    optimizer_step = step_of(make(master), buffers)

    def step() -> None:
        master.grad.copy_(grad)
        master.grad.mul_(scale)
        optimizer_step()
        weight.copy_(master.detach())

    return step


def huge_page_setting() -> str:
    """Return what the system says about transparent huge pages, such as "always [madvise]
    never".
    """
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().strip() if path.exists() else "unknown"


def storages() -> dict[int, int]:
    """Return address and bytes of what Python's tensors lie in."""
    found = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor):
            # DTensors have none; their local tensors do
            with suppress(RuntimeError, NotImplementedError):
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


@contextmanager
def counted(found: list[int]) -> Iterator[Callable[[], None]]:
    """Append the bytes of tensors made inside: those still there at the end, and most since the
    yielded function was called.

    The profiler sees what torch's allocator gives, also to C++ (DDP's buckets). Our large buffers,
    in huge pages, it does not: Python sees them, and they live as long as the engine.
    """

    def mark() -> None:
        with torch.profiler.record_function("mark"):
            pass

    before = storages()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        yield mark
        gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    live: dict[int, int] = {}
    total = most = 0
    for event in sorted(
        (event for event in events if event["name"] in ("mark", "[memory]")),
        key=lambda event: event["ts"],
    ):
        if event["name"] == "mark":
            most = total
            continue
        address, count = event["args"]["Addr"], event["args"]["Bytes"]
        total -= live.pop(address, 0)
        if count > 0:
            live[address] = count
            total += count
        most = max(most, total)
    ours = sum(
        count
        for address, count in storages().items()
        if address not in before and address not in live
    )
    found += [total + ours, most + ours]
