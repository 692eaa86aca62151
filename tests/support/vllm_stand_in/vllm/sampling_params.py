"""Names that TRL imports."""

from typing import Any


class SamplingParams:
    """Options of a generation."""

    def __init__(self, n: int = 1, max_tokens: int = 16, **unused: Any) -> None:
        self.n, self.max_tokens = n, max_tokens


class StructuredOutputsParams:
    """No test uses it."""
