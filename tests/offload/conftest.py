"""What tests of offload on a GPU share with those of the engine."""

from tests.engine.conftest import device

__all__ = ["device"]
