"""The tags of messages, by which gloo tells apart what ranks send. Pure.

A tag has the message's kind and a number. One half of the numbers is for messages about something that has a number itself (a
bucket): ranks on different ways never pair messages about different things, which gloo, where sizes differ, would answer by
ending the process.
"""

from collections import Counter

_A_NUMBER = 1 << 4
_OF_NUMBERS = 1 << 19
_A_KIND = 1 << 28


class Tags:
    """The tags of one engine's messages, the same on every rank that sends the same messages."""

    def __init__(self) -> None:
        """Begin with those of the first message."""
        self._count: Counter[tuple[int, int | None]] = Counter()

    def next(self, kind: int, of: int | None) -> int:
        """Return the tag of the next message of this kind, about what has the number `of` (None: the order of calls tells)."""
        self._count[kind, of] += 1
        number = self._count[kind, of]
        if of is None:
            number %= _OF_NUMBERS
        else:
            number = _OF_NUMBERS + (of * _A_NUMBER + number % _A_NUMBER) % _OF_NUMBERS
        return kind * _A_KIND + number
