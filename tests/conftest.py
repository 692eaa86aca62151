"""Tests marked gpu need a CUDA device and a build for it; elsewhere they are skipped, and say which of the two is missing."""

import pytest
import torch


def why_no_gpu() -> str | None:
    """Return why tests marked gpu cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    from shardcore._native import _C  # not at the top: some tests run where the extension is not built

    return None if _C.build_info()["cuda"] else "this build has no CUDA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    reason = why_no_gpu() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
