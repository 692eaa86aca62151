"""Real Fabrics over gloo ranks: the bits of plain shard() loops, clipping, checkpoints,
accumulation.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the Trainer needs lightning")
pytest.importorskip("pytorch_lightning", reason="the other package needs pytorch_lightning")
import torch
from torch import nn

from tests.support.lightning import (
    PACKAGES,
    Made,
    Plain,
    adamw,
    batches_of,
    fabric_of,
    ours,
    plain_loop,
)
from tests.support.models import error_of, hash_of_training
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.more

# --- Fabric ---------------------------------------------------------------------------------------


def train_fabric(
    fabric: Any, rank: int, world_size: int, model: Any, optimizer: Any, steps: slice = slice(None)
) -> list[float]:
    norms = []
    for batch in [*batches_of(rank, world_size)][steps]:
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        fabric.backward(loss)
        norms.append(
            fabric.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=False).item()
        )
        optimizer.step()
        optimizer.zero_grad()
    return norms


def hash_of_fabric(model: Any, optimizer: Any) -> str:
    return hash_of_training(model.module, optimizer.optimizer)


def set_up(fabric: Any, kind: Any = Plain) -> Any:
    with fabric.init_module():
        model = kind()
    return fabric.setup(model, adamw(model.parameters()))


def _fabric(rank: int, world_size: int, folder: str) -> Any:
    model, optimizer, _ = plain_loop(rank, world_size, stage=2, clip_grad_norm=0.1)
    hashes = {"plain": hash_of_training(model, optimizer)}
    norms = {}
    for package, name in zip(
        PACKAGES, ("shardcore_stage_1", "shardcore_stage_3_offload"), strict=True
    ):
        fabric = fabric_of(rank, world_size, name, package)
        model, optimizer = set_up(fabric)
        norms[name] = train_fabric(fabric, rank, world_size, model, optimizer)
        hashes[name] = hash_of_fabric(model, optimizer)
    for whole in (False, True):
        path = f"{folder}/whole.ckpt" if whole else f"{folder}/shards"
        for stage in (3, 1):  # save, and load into another stage
            strategy = ours.ShardcoreFabricStrategy(stage, save_distributed_checkpoint=not whole)
            fabric = fabric_of(rank, world_size, strategy)
            model, optimizer = set_up(fabric)
            state = {"model": model, "optimizer": optimizer, "step": 3 if stage == 3 else 0}
            if stage == 3:
                train_fabric(fabric, rank, world_size, model, optimizer, slice(3))
                fabric.save(path, state | {"more": [1]})
            else:
                assert fabric.load(path, state) == {"more": [1]}
                train_fabric(fabric, rank, world_size, model, optimizer, slice(state["step"], None))
                hashes[path] = hash_of_fabric(model, optimizer)
        assert Path(path).is_file() == whole
    return hashes, norms


def test_fabric_trains_clips_and_resumes(tmp_path):
    for hashes, norms in run_ranks(2, _fabric, str(tmp_path)):
        assert len(set(hashes.values())) == 1, hashes
        assert len({tuple(each) for each in norms.values()}) == 1
        assert min(*norms.values()) > [0.1]


def _fabric_accumulates(rank: int, world_size: int) -> Any:
    fabric = fabric_of(rank, world_size, "shardcore_stage_2")
    model, optimizer = set_up(fabric)
    for index, batch in enumerate(batches_of(rank, world_size)):
        with fabric.no_backward_sync(model, enabled=index % 3 != 2):
            fabric.backward(((model(batch[0]) - batch[1]) ** 2).mean() / 3)
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    expected = plain_loop(rank, world_size, stage=2, accumulate=3, sync_each=False)
    assert hash_of_fabric(model, optimizer) == hash_of_training(*expected[:2])
    half = PACKAGES["lightning"].fabric.plugins.MixedPrecision("16-mixed", "cpu")
    fabric = fabric_of(rank, world_size, "shardcore_stage_2", plugins=[half])
    model, optimizer = set_up(fabric)
    for batch in batches_of(rank, world_size):
        fabric.backward(((model(batch[0]) - batch[1]) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.loss_scale == 65536.0
    for param in model.parameters():
        assert param.dtype == torch.float32
    meta, _ = set_up(fabric_of(rank, world_size, "shardcore_stage_3", precision="bf16-true"), Made)
    errors = {
        "value": error_of(lambda: fabric.clip_gradients(model, optimizer, clip_val=1.0)),
        "alone": error_of(lambda: fabric.setup_optimizers(adamw([nn.Parameter(torch.zeros(1))]))),
        "two": error_of(
            lambda: fabric.setup(Made(), *(adamw([nn.Parameter(torch.zeros(1))]) for _ in range(2)))
        ),
    }
    return errors, {str(param.dtype) for param in meta.parameters()}


def test_fabric_accumulates_and_refuses():
    for errors, dtypes in run_ranks(2, _fabric_accumulates):
        assert "clip_val is 1.0; expected max_norm=" in errors["value"]
        assert "expected fabric.setup(model, optimizer)" in errors["alone"]
        assert "got 2 optimizers; expected one" in errors["two"]
        assert dtypes == {"torch.bfloat16"}
