"""What shardcore logs, for ranks, which have no caplog."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[list[str]]:
    """Give the messages that are logged inside, as they come."""
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("shardcore")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
