"""How ranks compare what may differ between them, and the errors that say where it does. Pure: callers bring the collective."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_HEAD, _SHORT = 24, 232  # bytes: of a head, and of a row that goes in the same message
_AT = ("an agreement", "the end of a backward", "a step")  # by Traffic; what follows is a read
# What users call on every rank to read whole values.
READS = (
    "optimizer.state_dict",
    "state_dict",
    "full_grad",
    "full_state",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "clip_grad_value_",
    "sharded_state_dict",
    "load_sharded_state_dict",
)


def all_gather_cpu(
    row: torch.Tensor, kind: int, read: int, rank: int, world_size: int, gather: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Return the rows of all ranks stacked; `gather` fills a tensor of which each rank has set its own row.

    gloo's all_gather has no tags, and ends the process where sizes differ. So each row comes with a head of fixed size that
    has the row's kind and size, and the index in READS of a read; where kinds or sizes differ all ranks raise. Short rows
    travel in the same message as their head.
    """
    said = as_bytes(row.contiguous())
    size = said.numel()
    heads = torch.zeros(world_size, _HEAD + _SHORT, dtype=torch.uint8, device="cpu")
    heads[rank, :_HEAD] = as_bytes(torch.tensor([kind, size, read], device="cpu"))
    heads[rank, _HEAD : _HEAD + size] = said[:_SHORT]
    gather(heads)
    says = heads[:, :_HEAD].view(torch.int64).tolist()
    if any(other[:2] != says[0][:2] for other in says):
        raise elsewhere([f"{_AT[what] if what < len(_AT) else READS[which]} ({count} bytes)" for what, count, which in says])
    whole = heads[:, _HEAD : _HEAD + size]
    if size > _SHORT:
        whole = said.expand(world_size, size).contiguous()
        gather(whole)
    return whole.contiguous().view(row.dtype).view(world_size, *row.shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as flat bytes."""
    return tensor.view(-1).view(torch.uint8)


def different_ways(how: str) -> RuntimeError:
    """What every rank raises when ranks did not do the same; `how` tells what each did."""
    return RuntimeError(
        f"ranks went different ways: {how}; expected every rank to run the same units in the same order, and equally many "
        "backwards per step (leave out micro-batches that only some ranks have)"
    )


def elsewhere(points: Sequence[str]) -> RuntimeError:
    """What every rank raises when ranks came to different `points`, one a rank."""
    ranks: dict[str, list[int]] = {}
    for rank, point in enumerate(points):
        ranks.setdefault(point, []).append(rank)
    lines = (f"rank{'s' * (len(there) > 1)} {', '.join(map(str, there))}: {point}" for point, there in ranks.items())
    return different_ways("; ".join(lines))


def uneven_backwards(counts: Sequence[int]) -> RuntimeError:
    """Return what every rank raises when ranks ran other numbers of backwards; `counts` are those of Reducer.count."""

    def said(count: int) -> str:
        added = "some" if count % 2 else "none"
        return f"{count // 2} backwards since the last step or zero_grad(), {added} of them added locally"

    return elsewhere([said(count) for count in counts])


def json_value(value: Any) -> Any:
    """Return a value that ranks compare without torch: of a tensor its numbers."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def first_difference(signatures: Sequence[Sequence[Any]]) -> str | None:
    """Describe the first place where a rank's signature (a list of JSON values) differs from rank 0's, or return None."""
    reference = signatures[0]
    for rank, signature in enumerate(signatures[1:], start=1):
        for index in range(max(len(reference), len(signature))):
            a = reference[index] if index < len(reference) else "nothing"
            b = signature[index] if index < len(signature) else "nothing"
            if a != b:
                return f"entry {index} is {b} on rank {rank} but {a} on rank 0"
    return None
