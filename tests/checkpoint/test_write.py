"""Files of a rank: what cannot be written is named on every rank, and leaves the checkpoints
that were there.
"""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

import shardcore
from shardcore._native import _C
from shardcore.checkpoint import format as layout
from shardcore.checkpoint import write
from tests.support.models import Run, error_of, hash_of_training, stepped, train
from tests.support.ranks import run_ranks


def _on(rank: int, fault: str, of: int) -> None:
    """Let the file engine of rank `of` have a fault; "" lets none have one."""
    write.file_engine = (
        (lambda: _C.FileEngine(faults=fault)) if rank == of and fault else layout.file_engine
    )


def _with_fault(
    rank: int, world_size: int, folder: str, fault: str, wait: bool
) -> tuple[str, str, str, list[str]]:
    model, optimizer, _ = train(rank, Run(stage=2, steps=1))
    shardcore.save(folder, model, optimizer)
    before = hash_of_training(model, optimizer)
    stepped(model, optimizer, rank, 1)
    _on(rank, fault, 1)
    try:
        said = error_of(lambda: shardcore.save(folder, model, optimizer, wait=wait).wait())
        dist.barrier()
        left = sorted(os.listdir(folder))
    finally:
        _on(rank, "", 1)
    loaded = shardcore.load(folder, model, optimizer)
    after = hash_of_training(model, optimizer)
    shardcore.save(folder, model, optimizer, tag="again")
    assert after == before
    return said, loaded.path.name, after, left


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("fault", "name", "wait"),
    [("write:EIO@4096", "Input/output error", True), ("write:ENOSPC@0", "No space left", False)],
)
def test_a_write_that_fails_is_named_and_leaves_the_old_checkpoint(
    tmp_path: Path, fault: str, name: str, wait: bool
) -> None:
    results = run_ranks(2, _with_fault, str(tmp_path), fault, wait)
    assert name in results[1][0]
    assert "rank_00001.safetensors" in results[1][0]
    assert "rank 1 failed" in results[0][0]
    assert name in results[0][0]
    for _, loaded, _, left in results:
        assert loaded == "global_step1"
        assert left == [".lock", "global_step1", "latest"]
    assert sorted(os.listdir(tmp_path)) == [".lock", "again", "global_step1", "latest"]
