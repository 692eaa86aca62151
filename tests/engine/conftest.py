"""What tests of the engine on a GPU share with their stand-in, the CPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """A world of one rank on the device, over the backend that a larger one would have."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    if os.name == "posix":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if request.param == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.device(request.param)
    dist.destroy_process_group()
