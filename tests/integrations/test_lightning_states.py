"""Checkpoints, resumed runs and evaluation, with real Trainers over gloo ranks."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the Trainer needs lightning")
pytest.importorskip("pytorch_lightning", reason="the other package needs pytorch_lightning")
import torch
from torch import nn

import shardcore
from tests.support.lightning import (
    EVERYWHERE,
    PACKAGES,
    STEPS,
    Plain,
    adamw,
    batches_of,
    fit,
    hash_of_fit,
    loader,
    module_of,
    ours,
    plain_loop,
    trainer_of,
)
from tests.support.models import hash_of_training
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.more

# --- checkpoints ----------------------------------------------------------------------------------


def _resumes(rank: int, world_size: int, folder: str) -> Any:
    def training_step(self: Any, batch: Any, index: int) -> torch.Tensor:
        return self.loss([nn.functional.dropout(batch[0], 0.1), batch[1]])

    def configure_optimizers(self: Any) -> Any:
        optimizer = adamw(self.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * STEPS)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    changes = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    hashes = {}
    name = "shardcore_stage_2_offload"
    torch.manual_seed(rank)
    module = module_of(**changes)
    callback = PACKAGES["lightning"].pl.callbacks.ModelCheckpoint(
        folder, filename=f"{name}-{{epoch}}", monitor="val_loss", save_top_k=2, save_last=True
    )
    trainer = trainer_of(
        rank, world_size, name, max_epochs=3, callbacks=[callback], enable_checkpointing=True
    )
    trainer.fit(module, loader(rank, world_size), loader(rank, world_size, 2))
    hashes[name] = hash_of_fit(trainer)
    best = callback.best_model_path
    assert (Path(best) / "manifest.json").exists(), best
    assert sum(Path(path).exists() for path in callback.best_k_models) == 2
    (score,) = trainer.test(
        ckpt_path="best", dataloaders=loader(rank, world_size, 2), verbose=False
    )
    assert score["test_loss"] == float(callback.best_model_score)
    for other in EVERYWHERE[::3]:
        torch.manual_seed(1000 + rank)  # random states are resumed
        module = module_of(**changes)
        again = trainer_of(rank, world_size, other, max_epochs=3)
        again.fit(module, loader(rank, world_size), ckpt_path=f"{folder}/{name}-epoch=1.ckpt")
        assert again.global_step == 3 * STEPS
        hashes[f"{other} from {name}"] = hash_of_fit(again)
    return hashes


def test_resumes_to_the_bit_from_a_directory_of_shards(tmp_path):
    for hashes in run_ranks(2, _resumes, str(tmp_path)):
        assert len(set(hashes.values())) == 1, hashes


def _whole_files(rank: int, world_size: int, folder: str) -> Any:
    whole = {"save_distributed_checkpoint": False}
    hashes, half = {}, {}
    for name, strategy in (("shards", ours.ShardcoreStrategy(3, **whole)), ("ddp", "ddp")):
        trainer = fit(rank, world_size, strategy)
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
        half[name] = trainer.lightning_module
        again = fit(
            rank,
            world_size,
            ours.ShardcoreStrategy(1, **whole),
            ckpt_path=f"{folder}/{name}.ckpt",
            max_epochs=2,
        )
        hashes[name] = hash_of_fit(again)
    assert hashes["shards"] != hashes["ddp"]  # the halves differ in the last digits
    hashes["at once"] = hash_of_fit(fit(rank, world_size, "shardcore_stage_2", max_epochs=2))
    ddp = fit(
        rank, world_size, "ddp", ckpt_path=f"{folder}/shards.ckpt", max_epochs=2
    ).lightning_module.state_dict()
    for name, value in again.lightning_module.state_dict().items():
        torch.testing.assert_close(value, ddp[name], rtol=1e-4, atol=1e-5)
    loaded = type(half["ddp"]).load_from_checkpoint(f"{folder}/shards.ckpt")
    weights = half["shards"].state_dict()
    return hashes, all(
        torch.equal(value, weights[name]) for name, value in loaded.state_dict().items()
    )


def test_whole_files_are_those_of_other_strategies(tmp_path):
    for hashes, equal in run_ranks(2, _whole_files, str(tmp_path)):
        assert hashes["shards"] == hashes["at once"]
        assert equal
    assert (tmp_path / "shards.ckpt").is_file()


# --- evaluation, and the same module again --------------------------------------------------------


def _evaluates(rank: int, world_size: int, folder: str) -> Any:
    name = "shardcore_stage_3_offload"
    module = module_of()
    trainer = trainer_of(rank, world_size, name)
    plain, batch = Plain(), next(iter(batches_of(rank, world_size)))
    (before,) = trainer.validate(module, loader(rank, world_size), verbose=False)
    mean = torch.stack(
        [plain.loss(batch) for r in range(world_size) for batch in batches_of(r, world_size)]
    ).mean()
    torch.testing.assert_close(before["val_loss"], mean.item(), rtol=1e-5, atol=0)
    predicted = trainer.predict(module, loader(rank, world_size))
    assert torch.equal(predicted[0], plain(batch[0]))
    trainer.fit(module, loader(rank, world_size))
    first = hash_of_fit(trainer)
    trainer.save_checkpoint(f"{folder}/{name}")
    expected = plain_loop(rank, world_size, stage=2)
    assert first == hash_of_training(*expected[:2])
    (after,) = trainer.test(module, loader(rank, world_size), verbose=False)
    fresh = trainer_of(rank, world_size, "shardcore_stage_2")
    (loaded,) = fresh.test(
        module_of(), loader(rank, world_size), ckpt_path=f"{folder}/{name}", verbose=False
    )
    assert after == loaded
    # a second fit begins with these weights and a new optimizer
    again = trainer_of(rank, world_size, "shardcore_stage_3")
    again.fit(module, loader(rank, world_size))
    model = Plain()
    model.load_state_dict(expected[0].state_dict())
    model, optimizer = shardcore.shard(model, adamw(model.parameters()), 2)
    for batch in batches_of(rank, world_size):
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert hash_of_fit(again) == hash_of_training(model, optimizer)
    return True


def test_evaluates_and_fits_again(tmp_path):
    assert run_ranks(2, _evaluates, str(tmp_path)) == [True, True]
