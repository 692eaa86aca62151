"""How often the tests marked crash do what they do: a few times in make test, as often as make
crash-test says there.
"""

import os

PREFIX = "SHARDCORE_CRASH_"


def times(what: str, few: int) -> int:
    """Return how often to do a thing: `few` times, unless SHARDCORE_CRASH_<WHAT> has a number."""
    return int(os.environ.get(f"{PREFIX}{what.upper()}", few))


def wanted() -> bool:
    """Whether this is make crash-test, which wants a table of what was done."""
    return any(name.startswith(PREFIX) for name in os.environ)
