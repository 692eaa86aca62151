"""How values that ranks compare are written, and the errors that say where they differ. Pure:
callers gather them.
"""

from collections.abc import Sequence
from typing import Any


def in_words(error: BaseException) -> str:
    """Return the class and the text of an error; its class alone if that has a text that cannot
    be made.
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # raised on one rank alone, while the others wait to hear of the first one
        return f"{type(error).__name__} (whose text cannot be made)"


def first_difference(signatures: Sequence[Sequence[Any]]) -> str | None:
    """Describe the first entry where a rank's signature (a list of JSON values) differs from
    rank 0's, or return None.
    """
    reference = signatures[0]
    for rank, signature in enumerate(signatures[1:], start=1):
        for index in range(max(len(reference), len(signature))):
            a = reference[index] if index < len(reference) else "nothing"
            b = signature[index] if index < len(signature) else "nothing"
            if a != b:
                return f"entry {index} is {b} on rank {rank} but {a} on rank 0"
    return None


def uneven_backwards(counts: Sequence[int]) -> RuntimeError:
    """Return what every rank raises when ranks ran different numbers of backwards; `counts` are
    those of Reducer.count.
    """
    ranks: dict[int, list[int]] = {}
    for rank, count in enumerate(counts):
        ranks.setdefault(count, []).append(rank)
    described = "; ".join(
        f"{name_ranks(ranks_of_count)}: {count // 2} backwards since the last step or "
        f"zero_grad(), {'some' if count % 2 else 'none'} of them added locally"
        for count, ranks_of_count in ranks.items()
    )
    return RuntimeError(
        f"ranks went different ways: {described}; expected every rank to run the same units in the "
        f"same order, and equally many "
        "backwards per step (loop over shardcore.join(model, loader) where only some ranks have a "
        "batch)"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "ranks 0, 2 to 5" of a list of rising ranks."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    shown = ", ".join(
        f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts
    )
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
