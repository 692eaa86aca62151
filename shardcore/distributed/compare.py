"""Differences between the values of ranks, and the errors that describe them. Pure: callers gather
the values.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

# A value that has to be equal on every rank: its kind ("parameter"), its name ("4.weight", or ""
# if the kind has only one entry), and its properties in words. Messages name it by the first one.
Entry: TypeAlias = Sequence[str]


def in_words(error: BaseException) -> str:
    """Return the class and the text of an error; only its class if making the text raises."""
    try:
        text = str(error)
        if isinstance(error, KeyError) and " " in text:
            text = str(error.args[0])  # a sentence, which str() quotes like a key
        return f"{type(error).__name__}: {text}"
    except Exception:  # raised on one rank alone, while the others wait to hear of the first one
        return f"{type(error).__name__} (whose text cannot be made)"


def first_difference(
    of_ranks: Sequence[Sequence[Entry]], numbers: Sequence[int] | None = None
) -> str | None:
    """Describe the first entry of a rank that differs from the first rank's; None if all are equal.

    Kinds are compared in the order in which they first appear: first the set of names, then the
    order of names, then the values. numbers: of the ranks, in messages (0, 1, ... by default).
    """
    reference = of_ranks[0]
    first, *others = numbers or range(len(of_ranks))
    for rank, entries in zip(others, of_ranks[1:], strict=True):
        for kind in dict.fromkeys(entry[0] for entry in [*reference, *entries]):
            of_kind = [
                {entry[1]: entry[2:] for entry in of_rank if entry[0] == kind}
                for of_rank in (reference, entries)
            ]
            text = _difference_of(kind, rank, first, *of_kind)
            if text is not None:
                return text
    return None


def _difference_of(
    kind: str,
    rank: int,
    first_rank: int,
    expected: Mapping[str, Sequence[str]],
    actual: Mapping[str, Sequence[str]],
) -> str | None:
    more = [name for name in actual if name not in expected]
    less = [name for name in expected if name not in actual]
    if more and less:
        return f"rank {rank} has the {kind} {more[0]}, where rank {first_rank} has {less[0]}"
    if more or less:
        count = f"{len(more or less)} {kind}{'s' * (len(more or less) > 1)}"
        name = (more or less)[0]
        value = (actual if more else expected)[name][:1]
        first = " ".join(filter(None, [name, *value]))
        verbs = f"has {count} more than" if more else f"lacks {count} of"
        return f"rank {rank} {verbs} rank {first_rank}; the first is {first}"
    for place, (name, other_name) in enumerate(zip(actual, expected, strict=True)):
        if name != other_name:
            return f"{kind} {place} is {name} on rank {rank} but {other_name} on rank {first_rank}"
    for name, values in actual.items():
        for value, other_value in zip(values, expected[name], strict=True):
            if value != other_value:
                subject = f"{kind} {name}" if name else f"the {kind}"
                return f"{subject} is {value} on rank {rank} but {other_value} on rank {first_rank}"
    return None


def uneven_backwards(counts: Sequence[int]) -> RuntimeError:
    """Return the error of every rank after ranks ran different numbers of backwards. counts: of
    each rank, by Reducer.count.
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
    words = ", ".join(
        f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts
    )
    return f"rank{'s' * (len(ranks) > 1)} {words}"
