"""Activation checkpointing: modules that keep their inputs alone, in host memory or in parts, and
compute again in backward.

Recomputation is torch.utils.checkpoint's, without reentrant backwards. What is new is where inputs
are kept between forward and backward.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardcore._native import _C
from shardcore.distributed.comm import gather_flat
from shardcore.engine.compiled import UnitForward, compiled_inside
from shardcore.engine.units import plan_units
from shardcore.optim.state_format import in_memory

_IN_FLIGHT = 2  # calls whose inputs are on their way to host memory


@dataclass(frozen=True)
class CheckpointOptions:
    """See checkpoint_wrapper."""

    offload_to_cpu: bool = False
    partition: dist.ProcessGroup | None = None
    save: tuple[Any, ...] = ()

    @property
    def moves_inputs(self) -> bool:
        """Whether inputs are kept elsewhere, by code that torch.compile cannot trace."""
        return self.offload_to_cpu or self.partition is not None

    def __deepcopy__(self, memo: Any) -> "CheckpointOptions":
        return self  # a process group has no copies


def checkpoint_wrapper(
    module: nn.Module,
    offload_to_cpu: bool = False,
    partition: dist.ProcessGroup | None = None,
    *,
    save: Collection[Any] = (),
) -> nn.Module:
    """Save only the inputs of `module` for backward, which runs its forward again. Returns the same
    module, changed in place.

    Names, parameters, isinstance and state dicts do not change. Call it before or after `shard`.
    The gradients are bit for bit the same as without it: random states (dropout) are restored, and
    copies are exact. It does nothing under torch.no_grad().

    Args:
        offload_to_cpu: Keep floating-point inputs in pinned host memory, if they are passed by
            position. Later calls reuse the buffers for inputs of at most the same size. Copies run
            on their own streams; backward starts each copy one call ahead of its use.
        partition: A process group whose ranks pass the same inputs (tensor parallel ranks). Each
            rank keeps 1/n of every input, and backward gathers them. Collective in backward, in the
            order of calls. With offload_to_cpu, the part is offloaded.
        save: Operators whose results are saved instead of computed again, such as
            torch.ops.aten.mm.default.

    Raises TypeError if `module` is not a module or `partition` is not a process group, and
    ValueError if the module is already wrapped. Source:
    https://docs.pytorch.org/docs/stable/checkpoint.html; the name is from FairScale.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"checkpoint_wrapper: module is of type {type(module).__name__}; expected a "
            "torch.nn.Module"
        )
    if isinstance(module, _Checkpointed):
        raise ValueError(
            f"checkpoint_wrapper: the {type(module).__name__} is already wrapped. Wrap it only once"
        )
    if not isinstance(vars(module).get("forward"), UnitForward | None):
        raise ValueError(
            "checkpoint_wrapper: another library replaced the forward of this "
            f"{type(module).__name__}. Wrap it before forward is replaced"
        )
    if partition is not None and not isinstance(partition, dist.ProcessGroup):
        raise TypeError(
            f"checkpoint_wrapper: partition is {partition!r}; expected a process group, or None"
        )
    module._shardcore_checkpoint = CheckpointOptions(bool(offload_to_cpu), partition, tuple(save))  # type: ignore[assignment]
    kind: Any = type(module)
    module.__class__ = _checkpointed(kind)
    return module


def apply_activation_checkpointing(
    model: nn.Module,
    check_fn: Callable[[nn.Module], bool] | None = None,
    *,
    every: int = 1,
    **options: Any,
) -> list[str]:
    """Call `checkpoint_wrapper(module, **options)` for modules of `model`; returns their names.

    Args:
        check_fn: Whether to wrap a module. It is not called for modules inside of wrapped modules.
            By default, the blocks chosen by `shard` as units are wrapped.
        every: Wrap only every n-th of these modules, beginning with the first.

    Raises ValueError if no module is chosen, or if `every` is below 1.
    """
    if every < 1:
        raise ValueError(f"apply_activation_checkpointing: every is {every}; expected at least 1")
    names = {module: name for name, module in model.named_modules()}
    blocks = (spec.module for spec in plan_units(model) if spec.module is not model)
    candidates = list(blocks if check_fn is None else _outermost(model, check_fn))
    if not candidates:
        expected = "check_fn to choose some"
        if check_fn is None:
            expected = "a model with repeated blocks, or check_fn"
        raise ValueError(
            f"apply_activation_checkpointing: no module of the {type(model).__name__} is chosen; "
            f"expected {expected}"
        )
    chosen = candidates[::every]
    for module in chosen:
        checkpoint_wrapper(module, **options)
    return [names[module] for module in chosen]


def _outermost(module: nn.Module, check_fn: Callable[[nn.Module], bool]) -> Iterable[nn.Module]:
    if check_fn(module):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, check_fn)


def run_checkpointed(
    options: CheckpointOptions, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Return function(*args, **kwargs), whose backward runs it again from its inputs."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    checkpoint_options: dict[str, Any] = {"use_reentrant": False}
    if options.save:
        checkpoint_options["context_fn"] = partial(
            create_selective_checkpoint_contexts, list(options.save)
        )
    with _saved_inputs(options):
        # whose own names a forward may use, too
        return checkpoint(partial(function, **kwargs), *args, **checkpoint_options)


class _Checkpointed:
    """Comes before the class of a wrapped module, in a class of the same name."""

    _shardcore_checkpoint: CheckpointOptions

    @property
    def _shardcore_compiles_inside(self) -> bool:
        return self._shardcore_checkpoint.moves_inputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = super().forward  # type: ignore[misc]
        options = self._shardcore_checkpoint
        if options.moves_inputs:
            forward = compiled_inside(self, forward)  # type: ignore[arg-type]
        return run_checkpointed(options, forward, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (type(self).__mro__[2],), *reduced[2:]


@cache
def _checkpointed(kind: Any) -> Any:
    return type(
        kind.__name__,
        (_Checkpointed, kind),
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__},
    )


def _new(kind: Any) -> nn.Module:
    wrapped = _checkpointed(kind)
    return wrapped.__new__(wrapped)  # type: ignore[no-any-return]


def _saved_inputs(options: CheckpointOptions) -> Any:
    """Return a context in which what autograd saves is kept as `options` say: inputs, as torch
    has hooks of its own inside.
    """
    if not options.moves_inputs:
        return nullcontext()
    call = _Call()

    def pack(tensor: torch.Tensor) -> Any:
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
        return (
            _SavedInput(tensor, options, call) if plain and tensor.is_floating_point() else tensor
        )

    def unpack(saved: Any) -> torch.Tensor:
        return saved.fetch() if isinstance(saved, _SavedInput) else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _SavedInput:
    """An input as it is kept: `part`, a flat range of its elements, is on the device, or
    `offloaded`.
    """

    def __init__(self, tensor: torch.Tensor, options: CheckpointOptions, call: "_Call") -> None:
        dense = tensor.detach() if _C.is_dense(tensor) else tensor.detach().contiguous()
        self.shape, self.stride, self.group = dense.shape, dense.stride(), options.partition
        part = in_memory(dense)
        if self.group is not None:
            size = -(-part.numel() // self.group.size())
            start = min(size * self.group.rank(), part.numel())
            of_rank = part[start : start + size]
            part = of_rank.new_zeros(size)
            part[: of_rank.numel()] = of_rank
        self.part: torch.Tensor | _Offloaded = part
        if options.offload_to_cpu and part.numel():
            self.part = _offload_of(part.device).offload(part, call)

    def fetch(self) -> torch.Tensor:
        """Return the input, on its device, as it was."""
        part = self.part.fetch() if isinstance(self.part, _Offloaded) else self.part
        if self.group is not None:
            full = part.new_empty(part.numel() * self.group.size())
            gather_flat(full, part, self.group)
            part = full
        return part[: self.shape.numel()].as_strided(self.shape, self.stride)


class _Call:
    """A call of a module whose inputs are offloaded, and the one before it, if its inputs are
    still kept.
    """

    def __init__(self) -> None:
        self.inputs: list[weakref.ref[_Offloaded]] = []
        self.before: weakref.ref[_Call] | None = None

    def prefetch(self) -> None:
        """Start to copy all inputs back to the device, once."""
        inputs, self.inputs = self.inputs, []
        for ref in inputs:
            saved = ref()
            if saved is not None:
                saved.prefetch()


class _Offloaded:
    """A flat tensor at the start of a buffer of the tier, which is free for others when this is
    freed. Copies run on the streams of a HostTier (csrc/copy).
    """

    def __init__(
        self, offload: "_Offload", buffer: torch.Tensor, source: torch.Tensor, call: _Call
    ) -> None:
        self._offload, self._buffer, self._call = offload, buffer, call
        self._device = source.device
        self._on_host = buffer[: source.nbytes].view(source.dtype)
        self._prefetched: tuple[torch.Tensor, _C.CopyEvent] | None = None
        self._copied = offload.tier.to_tier(self._on_host, source)
        self._source: torch.Tensor | None = source
        self._version = source._version

    def finish_copy(self) -> None:
        """Wait on the host until the copy is there, and free the tensor on the device."""
        if self._source is not None:
            self._copied.synchronize()
            if self._source._version != self._version:
                raise RuntimeError(
                    "checkpoint_wrapper: an input was changed in place while it was copied to "
                    "host memory. Do not change inputs of wrapped modules in place"
                )
            self._source = None

    def prefetch(self) -> None:
        """Start to copy it back to the device."""
        if self._prefetched is None:
            self.finish_copy()
            on_device = torch.empty_like(self._on_host, device=self._device)
            self._prefetched = on_device, self._offload.tier.from_tier(on_device, self._on_host)

    def fetch(self) -> torch.Tensor:
        """Return it on the device, in the order of the current stream."""
        self._call.prefetch()
        self.prefetch()  # again, where the graph is kept for a second backward
        # The inputs of the call before, which backward needs next, come behind the computation of
        # this call.
        before = None if self._call.before is None else self._call.before()
        if before is not None:
            before.prefetch()
        assert self._prefetched is not None
        on_device, arrived = self._prefetched
        self._prefetched = None
        arrived.wait()
        return on_device

    def __del__(self) -> None:
        # A copy into the buffer, or from it, may be on its way still: who uses it next waits for
        # both.
        last = self._copied if self._prefetched is None else self._prefetched[1]
        self._offload.free.append((self._buffer, last))


class _Offload:
    """The host memory of a device's offloaded inputs."""

    def __init__(self, device: torch.device) -> None:
        self.tier = _C.HostTier(device, pin_memory=True)
        self.free: list[tuple[torch.Tensor, _C.CopyEvent]] = []
        self._in_flight: deque[_Call] = deque()
        self._last: weakref.ref[_Call] | None = None

    def offload(self, part: torch.Tensor, call: _Call) -> _Offloaded:
        """Start to copy a flat tensor to host memory."""
        if not call.inputs:
            before = None if self._last is None else self._last()
            call.before = None if before is None else weakref.ref(before)
            self._last = weakref.ref(call)
            self._in_flight.append(call)
            # A forward waits only here, which bounds what copies in flight take of the device.
            if len(self._in_flight) > _IN_FLIGHT:
                for ref in self._in_flight.popleft().inputs:
                    earlier = ref()
                    if earlier is not None:
                        earlier.finish_copy()
        offloaded = _Offloaded(self, self._buffer_of(part.nbytes), part, call)
        call.inputs.append(weakref.ref(offloaded))
        return offloaded

    def _buffer_of(self, size: int) -> torch.Tensor:
        """Return the smallest free buffer of at least `size` bytes; if there is none, a new one in
        place of the largest.

        So there are never more than were in use at once, however sizes differ between steps.
        """

        def misfit(index: int) -> tuple[bool, int]:
            room = self.free[index][0].numel() - size
            return room < 0, abs(room)

        if self.free:
            buffer, last = self.free.pop(min(range(len(self.free)), key=misfit))
            if buffer.numel() >= size:
                last.synchronize()
                return buffer
            del buffer, last  # before another one is pinned
        return self.tier.empty(size, torch.uint8)


@cache
def _offload_of(device: torch.device) -> _Offload:
    return _Offload(device)
