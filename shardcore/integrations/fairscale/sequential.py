"""OffloadModel and Pipe of FairScale: an nn.Sequential with weights in host memory, or on
several devices of a process.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardcore.extras.activations import CheckpointOptions, run_checkpointed
from shardcore.integrations.fairscale.fsdp import ShardedLater
from shardcore.optim.interface import engine_of
from shardcore.torch_private import ChecksMoves

Tensors = torch.Tensor | tuple[torch.Tensor, ...]


class _Slice(nn.Sequential):
    """Layers that are on the device together; it runs all micro-batches while they are."""

    def __init__(self, layers: Iterable[nn.Module], checkpoint: bool) -> None:
        super().__init__(*layers)
        self._checkpoint = checkpoint

    def forward(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        run: Any = super().forward
        options = CheckpointOptions(offload_to_cpu=True)
        return [
            run_checkpointed(options, run, part) if self._checkpoint else run(part)
            for part in parts
        ]


class OffloadModel(ShardedLater):
    """Trains an nn.Sequential on one device, slice by slice; weights, gradients and optimizer
    states are in host memory.
    """

    def __init__(
        self,
        model: nn.Sequential | list[nn.Module],
        device: torch.device | str,
        offload_device: torch.device | str = "cpu",
        num_slices: int = 3,
        checkpoint_activation: bool = False,
        num_microbatches: int = 1,
        **options: Any,
    ) -> None:
        """Cut the model. The first forward that trains finds its optimizer, as with
        FullyShardedDataParallel.

        Args:
            model: an nn.Sequential, or a list of slices.
            device: where it computes. offload_device: the CPU.
            num_slices: of about as many parameters each.
            checkpoint_activation: keep only the inputs of slices for backward, in host memory, and
            compute the rest again.
            num_microbatches: parts of a batch that a slice computes one after another, with
            checkpoint_activation.
            options: of shardcore.shard.

        Raises TypeError, ValueError or RuntimeError for arguments that cannot be followed, or on
        several ranks.
        """
        super().__init__()
        if not isinstance(model, nn.Sequential | list) or not len(model):
            raise TypeError(
                f"OffloadModel: model is a {type(model).__name__}; expected an nn.Sequential with "
                f"layers"
            )
        if device is None or torch.device(offload_device).type != "cpu":
            raise TypeError(
                f"OffloadModel: device is {device}, offload_device {offload_device}; expected a "
                f"device, and the CPU"
            )
        self.device = torch.device(device)
        if (self.device.type == "cuda") != torch.cuda.is_available():
            raise ValueError(
                f"OffloadModel: device is {device} with {torch.cuda.device_count()} GPUs; expected "
                "a GPU if there is one, else the CPU"
            )
        if num_microbatches > 1 and not checkpoint_activation:
            raise RuntimeError(
                f"OffloadModel: num_microbatches is {num_microbatches} without "
                f"checkpoint_activation; expected it to be True"
            )
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"OffloadModel: there are {dist.get_world_size()} ranks; expected one process, or "
                "FullyShardedDataParallel(model, move_params_to_cpu=True), which offloads on each "
                "rank"
            )
        slices = [[part] for part in model] if isinstance(model, list) else cut(model, num_slices)
        self.model_slices = nn.ModuleList(
            [_Slice(layers, checkpoint_activation) for layers in slices]
        )
        self._num_microbatches, self._options = num_microbatches, options

    def shard_options(self) -> dict[str, Any]:
        """Return the options of shard: the slices are its units."""
        offload = {"optimizer": "cpu", "gradients": "cpu", "params": "cpu"}
        return {"stage": 3, "units": [*self.model_slices], "offload": offload, **self._options}

    def shard_now(self) -> None:
        """Shard on the model's device, which need not be the current one, that `shard` takes for
        weights in host memory.
        """
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            super().shard_now()

    def forward(self, *inputs: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the output for one batch, a tensor (batch, ...) that is moved to the device."""
        if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
            raise TypeError(
                f"OffloadModel: it was called with {len(inputs)} arguments; expected one tensor"
            )
        device = self.device if engine_of(self) is not None else next(self.parameters()).device
        parts: Sequence[torch.Tensor] = inputs[0].to(device).chunk(self._num_microbatches)
        for model_slice in self.model_slices:
            parts = model_slice(parts)
        return parts[0] if len(parts) == 1 else torch.cat([*parts])


def cut(model: nn.Sequential, number: int) -> list[list[nn.Module]]:
    """Cut the layers into at most `number` slices of about as many parameters each, in their
    order.
    """
    sizes = [sum(param.numel() for param in layer.parameters()) for layer in model]
    goal = sum(sizes) / min(number, len(model))
    slices: list[list[nn.Module]] = [[]]
    numel = 0
    for layer, size in zip(model, sizes, strict=True):
        if numel and size and numel + size > goal and len(slices) < number:
            slices.append([])
            numel = 0
        slices[-1].append(layer)
        numel += size
    return slices


class Pipe(ChecksMoves):
    """Runs an nn.Sequential on several devices of one process, micro-batch by micro-batch
    (arXiv:1811.06965).

    Micro-batch i is on device j in cycle i + j. Work on GPUs is queued, so different devices
    compute at the same time. For a pipeline over ranks see torch.distributed.pipelining, whose
    stages shardcore.shard takes.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Any] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        """Move the layers to their devices.

        Args:
            balance: how many layers each partition has.
            devices: of the partitions (default: all GPUs).
            chunks: micro-batches of a batch.
            checkpoint: which of them keep only their inputs for backward, while training: "always"
            all, "except_last", "never".
            deferred_batch_norm: False; NotImplementedError for True.

        Raises TypeError unless module is an nn.Sequential, ValueError for other arguments,
        IndexError for too few devices.
        """
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise TypeError(f"Pipe: module is a {type(module).__name__}; expected an nn.Sequential")
        if deferred_batch_norm:
            raise NotImplementedError(
                "Pipe: deferred_batch_norm is True; expected False, or norms without statistics of "
                "batches"
            )
        layers, sizes = list(module.named_children()), [*(() if balance is None else balance)]
        if len(layers) != len(module):
            raise ValueError(
                "Pipe: module contains a layer twice; expected distinct layers (they may share "
                "parameters on one device)"
            )
        if balance is None or sum(sizes) != len(layers) or any(size <= 0 for size in sizes):
            raise ValueError(
                f"Pipe: balance is {None if balance is None else sizes} for {len(layers)} layers; "
                f"expected positive numbers of this sum"
            )
        self.chunks, self.checkpoint, self.balance = int(chunks), str(checkpoint), sizes
        if self.chunks < 1:
            raise ValueError(f"Pipe: chunks is {chunks}; expected at least 1")
        if self.checkpoint not in ("always", "except_last", "never"):
            raise ValueError(
                f"Pipe: checkpoint is {checkpoint!r}; expected 'always', 'except_last', or 'never'"
            )
        if devices is None:
            devices = range(torch.cuda.device_count())
        available = [torch.device(device) for device in devices]
        if len(available) < len(sizes):
            raise IndexError(
                f"Pipe: there are {len(available)} devices for {len(sizes)} partitions; expected "
                f"one for each"
            )
        self.devices = available[: len(sizes)]
        places: dict[nn.Parameter, torch.device] = {}
        self.partitions = nn.ModuleList()
        for size, device in zip(sizes, self.devices, strict=True):
            partition = nn.Sequential(OrderedDict(layers[:size]))
            del layers[:size]
            if any(places.setdefault(param, device) != device for param in partition.parameters()):
                raise ValueError(
                    "Pipe: a parameter is in partitions on different devices; expected it on one"
                )
            self.partitions.append(partition.to(device))

    def __len__(self) -> int:
        """Return the number of layers."""
        return sum(self.balance)

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the layers."""
        return (layer for partition in self.partitions for layer in partition.children())

    def __getitem__(self, index: int) -> nn.Module:
        """Return a layer."""
        layers = [*iter(self)]
        return layers[index]

    def before_move(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refuse other devices."""
        before = [param.device for param in self.parameters()]
        moved = [fn(torch.empty(0, device=device)).device for device in before]
        if moved != before:
            raise TypeError(
                "Pipe: a Pipe cannot move to another device; expected devices= with the device of "
                "each partition"
            )

    def forward(self, input: Tensors) -> Tensors:
        """Return the output for a batch: a tensor (batch, ...), or a tuple of some, on the last
        device.
        """
        whole = (input,) if isinstance(input, torch.Tensor) else input
        if not isinstance(whole, tuple) or not all(
            isinstance(tensor, torch.Tensor) for tensor in whole
        ):
            raise TypeError(
                f"Pipe: input is a {type(input).__name__}; expected a tensor, or a tuple of tensors"
            )
        if not self.devices:
            return input
        chunked = zip(*(tensor.chunk(self.chunks) for tensor in whole), strict=True)
        parts: list[Tensors] = [
            part[0] if isinstance(input, torch.Tensor) else part for part in chunked
        ]
        checkpointed_parts = 0
        if self.training and self.checkpoint != "never":
            checkpointed_parts = len(parts) if self.checkpoint == "always" else self.chunks - 1
        for cycle in range(len(parts) + len(self.devices) - 1):
            first, end = max(0, cycle - len(self.devices) + 1), min(cycle + 1, len(parts))
            for index in reversed(range(first, end)):
                partition, device = self.partitions[cycle - index], self.devices[cycle - index]
                part = _to(parts[index], device)
                if index < checkpointed_parts:
                    parts[index] = run_checkpointed(CheckpointOptions(), partition, part)
                else:
                    parts[index] = partition(part)
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts)  # type: ignore[arg-type]
        return tuple(torch.cat(some) for some in zip(*parts, strict=True))


def _to(part: Tensors, device: torch.device) -> Tensors:
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    return tuple(tensor.to(device, non_blocking=True) for tensor in part)
