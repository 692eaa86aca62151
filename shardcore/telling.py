"""How ranks compare what may differ between them, and the errors that say where it does. Pure: callers bring the collective."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_HEAD, _SHORT = 16, 240  # bytes: of a head, and of a row that goes in the same message
_AT = {  # by Traffic
    0: "an agreement",
    1: "the end of a backward",
    2: "a step",
    3: "a read of whole values",
}


def tell(row: torch.Tensor, kind: int, rank: int, world_size: int, gather: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return the rows of all ranks stacked; `gather` fills a tensor of which each rank has set its own row.

    gloo's all_gather has no tags, and ends the process where sizes differ. So each row comes with a head of fixed size that
    has the row's kind and size; where heads differ all ranks raise. Short rows travel in the same message as their head.
    """
    said = as_bytes(row.contiguous())
    size = said.numel()
    heads = torch.zeros(world_size, _HEAD + _SHORT, dtype=torch.uint8, device="cpu")
    heads[rank, :_HEAD] = as_bytes(torch.tensor([kind, size], device="cpu"))
    heads[rank, _HEAD : _HEAD + size] = said[:_SHORT]
    gather(heads)
    says = heads[:, :_HEAD].view(torch.int64).tolist()
    if any(other != says[0] for other in says):
        raise elsewhere([f"{_AT[what]} ({count} bytes)" for what, count in says])
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
    return RuntimeError(f"ranks went different ways: {how}; expected every rank to run the same units in the same order")


def elsewhere(points: Sequence[str]) -> RuntimeError:
    """What every rank raises when ranks came to different `points`, one a rank."""
    ranks: dict[str, list[int]] = {}
    for rank, point in enumerate(points):
        ranks.setdefault(point, []).append(rank)
    lines = (f"rank{'s' * (len(there) > 1)} {', '.join(map(str, there))} at {point}" for point, there in ranks.items())
    return different_ways("; ".join(lines))


def plain(value: Any) -> Any:
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
