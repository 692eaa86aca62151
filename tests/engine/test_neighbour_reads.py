"""Ranks that read each other's memory, instead of sending: who does, to the same bits, and what falls back."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcore import neighbour_reads
from shardcore.comm import Comm
from shardcore.neighbour_reads import Neighbours
from tests.engine.models import Run, hash_of_training, train
from tests.ranks import run_ranks


def _train(rank: int, world_size: int, runs: list[Run], smallest: int | None, refuse: str = "") -> list[Any]:
    """Return the hash of each run, then how many pieces went each way. smallest: bytes of a piece that is read.

    refuse: "env" or "connect": rank 1 does not take part.
    """
    neighbour_reads.MIN_BYTES = smallest or 1
    os.environ.pop("SHARDCORE_NEIGHBOUR_READS", None)
    if smallest is None or (refuse == "env" and rank == 1):
        os.environ["SHARDCORE_NEIGHBOUR_READS"] = "0" if smallest is None else "off"
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("send", "receive"):
            original = getattr(Neighbours, name)
            patch.setattr(Neighbours, name, lambda *a, _o=original, _n=name: (counts.update([_n]), _o(*a))[1])
        isend = dist.isend
        patch.setattr(dist, "isend", lambda *a, **k: (counts.update(["isend"]), isend(*a, **k))[1])
        if refuse == "connect" and rank == 1:
            patch.setattr(neighbour_reads._C, "NeighbourReads", _Unreachable)
        hashes = [hash_of_training(*train(rank, run)[:2]) for run in runs]
    os.environ.pop("SHARDCORE_NEIGHBOUR_READS", None)
    return [hashes, dict(counts)]


class _Unreachable:
    """An end from which nobody can be read: a kernel that forbids it."""

    def __init__(self, *_: Any) -> None: ...

    def address(self) -> tuple[int, ...]:
        return (os.getpid(), 0, 0, 0, 0)

    def connect(self, number: int, address: Any) -> str:
        return "Operation not permitted"


RUNS = [Run(stage=stage, shard={"clip_grad_norm": 0.5}) for stage in (0, 1, 2, 3)]
RUNS += [Run(stage=2, precision="bf16", accumulate=2), Run(stage=3, shard={"offload": {"optimizer": "cpu"}})]


def test_pieces_that_are_read_have_the_bits_of_those_that_are_sent() -> None:
    some_pieces = 1000
    ways = [run_ranks(3, _train, RUNS, smallest) for smallest in (1, some_pieces, None)]
    assert all(hashes == ways[0][0][0] for ranks in ways for hashes, _ in ranks)
    (read, mixed, sent) = (ranks[0][1] for ranks in ways)
    assert "isend" not in read
    assert read["send"] == read["receive"] > 0
    assert 0 < mixed["send"] < read["send"]
    assert mixed["send"] + mixed["isend"] == read["send"]
    assert sent == {"isend": read["send"]}


def _train_on_an_unnamed_backend(rank: int, world_size: int, store: str) -> list[Any]:
    dist.barrier()  # or a rank that is still connecting would find this one gone
    dist.destroy_process_group()
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=world_size)
    return _train(rank, world_size, RUNS[2:3], 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch chooses gloo only where there is no GPU")
def test_a_backend_that_torch_chose(tmp_path: Path) -> None:
    for _, counts in run_ranks(2, _train_on_an_unnamed_backend, str(tmp_path / "store")):
        assert counts["send"] > 0
        assert "isend" not in counts


def test_nccl_that_torch_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            assert not Comm().uses_nccl
            patch.setattr(dist, "get_backend", lambda group: "undefined")  # as torch has it after init_process_group()
            patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
            comm = Comm()
            assert comm.uses_nccl
            assert comm.device == torch.device("cuda:0")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("refuse", ["env", "connect"])
def test_a_rank_that_cannot_be_read_is_sent_to(refuse: str) -> None:
    answers = run_ranks(3, _train, RUNS[2:3], 1, refuse)
    assert len({hashes[0] for hashes, _ in answers}) == 1
    first, refusing, third = (counts for _, counts in answers)
    assert set(refusing) == {"isend"}
    assert first["send"] == third["send"] == first["isend"] == refusing["isend"] // 2 > 0
