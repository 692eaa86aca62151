"""A rank that is killed in the middle of a step, or of shard(): the others raise, and say what that means, within seconds."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.distributed.comm import Comm
from tests.engine.models import Run, batch_of, loss_of, train
from tests.ranks import context, start

READS = 2  # of whole values, after the error


def _rank(rank: int, store: str, stage: int, where: str, answer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timedelta(seconds=60))

    def die(*_: Any) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "shard":
        comm: Any = Comm
        broadcast = Comm.broadcast
        comm.broadcast = lambda *args: (die(), broadcast(*args))
    try:
        model, optimizer, _ = train(rank, Run(stage=stage, steps=2))
        if where == "forward":
            model.blocks[1].register_forward_pre_hook(die)
        elif where == "backward":
            model.blocks[1].up.weight.register_hook(die)
        else:
            optimizer.register_step_pre_hook(die)
        for step in range(3):
            loss_of(model, batch_of(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        answer.send("no error")
    except RuntimeError as error:
        answer.send(str(error))
    for _ in range(READS if where != "shard" else 0):
        try:
            with shardcore.full_params(model):
                model.state_dict()
        except RuntimeError as error:
            answer.send(str(error))
    os._exit(0)  # a group that lost a rank cannot be left in order


@pytest.mark.parametrize(("stage", "where"), [(1, "shard"), (0, "backward"), (2, "step"), (3, "forward")])
def test_the_other_ranks_raise(stage: int, where: str, tmp_path: Path) -> None:
    pipes, processes = [], []
    for rank in range(3):
        ours, theirs = context.Pipe()
        process = start(_rank, rank, str(tmp_path / "store"), stage, where, theirs)
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for rank in (0, 2):
            assert pipes[rank].poll(90), f"rank {rank} still waits for the one that was killed"
            # So does what is read afterwards, instead of showing what lies in memory.
            for _ in range(1 + READS if where != "shard" else 1):
                assert "waiting for the other ranks failed; expected every rank to run the same" in pipes[rank].recv()
        processes[1].join(30)
        assert processes[1].exitcode == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
            process.join()
