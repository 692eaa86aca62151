"""Real Trainers over gloo ranks: the bits of plain shard() loops at every stage and tier, and DDP's digits."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the Trainer needs lightning")
pytest.importorskip("pytorch_lightning", reason="the other package needs pytorch_lightning")
import torch
from torch import nn

import shardcore
from tests.support.lightning import (
    CLIP,
    EVERYWHERE,
    PACKAGES,
    Made,
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
from tests.support.models import error_of, hash_of_training
from tests.support.ranks import run_ranks
from tests.support.scripts import finished


def _fits_like_a_plain_loop(rank: int, world_size: int, package: str) -> Any:
    model, optimizer, losses = plain_loop(rank, world_size, stage=2)
    hashes = {"shard": hash_of_training(model, optimizer)}
    for name in EVERYWHERE if package == "lightning" else ("shardcore",):
        trainer = fit(rank, world_size, name, package=package)
        assert trainer.lightning_module.losses == losses, name
        assert isinstance(trainer.optimizers[0], shardcore.FusedAdam)
        hashes[name] = hash_of_fit(trainer)
    trainer = fit(rank, world_size, "ddp", package=package)
    torch.testing.assert_close(trainer.lightning_module.losses, losses, rtol=1e-5, atol=0)
    for name, value in trainer.lightning_module.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)
    return hashes


@pytest.mark.cases(1)
@pytest.mark.parametrize("package", PACKAGES)
def test_fits_like_a_plain_loop_at_every_stage_and_tier(package):
    for hashes in run_ranks(2, _fits_like_a_plain_loop, package):
        assert len(set(hashes.values())) == 1, hashes


def _options(rank: int, world_size: int) -> Any:
    overlapped = ours.ShardcoreStrategy(3, overlap_step=True, offload={"optimizer": "cpu"}, units=50)
    hashes = {
        "plain": hash_of_training(*plain_loop(rank, world_size, stage=2)[:2]),
        "overlapped": hash_of_fit(fit(rank, world_size, overlapped)),
        "of the trainer": hash_of_fit(
            fit(rank, world_size, "shardcore_stage_2", sync_batchnorm=True, enable_model_summary=True, detect_anomaly=True)
        ),
    }
    trainer = trainer_of(rank, world_size, "shardcore_stage_3", enable_model_summary=True)
    trainer.fit(module_of(), loader(rank, world_size), loader(rank, world_size, 2))
    hashes["validated"] = hash_of_fit(trainer)
    assert not trainer.fit_loop.epoch_loop.val_loop.inference_mode
    return hashes


@pytest.mark.more
@pytest.mark.parametrize("world_size", [1, 2])
def test_options_of_shard_and_of_the_trainer(world_size):
    for hashes in run_ranks(world_size, _options):
        assert len(set(hashes.values())) == 1, hashes


def _accumulates(rank: int, world_size: int) -> Any:
    found = {}
    for sync_each, stages in ((False, (1, 3)), (True, (1, 3)), (None, (1, 2))):
        for stage in stages:
            strategy = ours.ShardcoreStrategy(stage, sync_each=sync_each)
            found[sync_each, stage] = hash_of_fit(fit(rank, world_size, strategy, accumulate_grad_batches=3))
            plain = plain_loop(rank, world_size, accumulate=3, stage=stage, sync_each=sync_each)[:2]
            assert found[sync_each, stage] == hash_of_training(*plain), (sync_each, stage)
    return found


@pytest.mark.more
def test_accumulates_in_either_order():
    for found in run_ranks(2, _accumulates):
        assert found[False, 1] == found[False, 3] == found[None, 1]
        assert found[True, 1] == found[True, 3] == found[None, 2] != found[False, 1]


def _clips(rank: int, world_size: int) -> Any:
    found = {"plain": hash_of_training(*plain_loop(rank, world_size, stage=2, clip_grad_norm=0.1)[:2])}
    for name in ("shardcore_stage_1", "shardcore_stage_3_offload"):
        found[name] = hash_of_fit(fit(rank, world_size, name, **CLIP))

    def in_the_hook(self: Any, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def by_torch(self: Any, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    for name, hook in (("hook", in_the_hook), ("torch", by_torch)):
        module = module_of(configure_gradient_clipping=hook)
        found[name] = hash_of_fit(fit(rank, world_size, "shardcore_stage_2", module))
    ddp = fit(rank, world_size, "ddp", **CLIP).lightning_module.state_dict()
    model = fit(rank, world_size, "shardcore", **CLIP).lightning_module.state_dict()
    for name, value in ddp.items():
        torch.testing.assert_close(value, model[name], rtol=1e-4, atol=1e-5)
    return found


def _clips_nothing(rank: int, world_size: int) -> tuple[str, str]:
    clipped = hash_of_fit(fit(rank, world_size, "shardcore", **CLIP))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours._TrainerPrecision, "clip_gradients", lambda *args, **kwargs: None)
        return clipped, hash_of_fit(fit(rank, world_size, "shardcore", **CLIP))


@pytest.mark.more
def test_clips_as_shard_does():
    for found in run_ranks(2, _clips):
        assert len(set(found.values())) == 1, found


@pytest.mark.more
def test_clipping_that_does_nothing_is_seen():
    for clipped, unclipped in run_ranks(2, _clips_nothing):
        assert clipped != unclipped


def _manual(rank: int, world_size: int) -> Any:
    def training_step(self: Any, batch: Any, index: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        scheduler.step()

    def configure_optimizers(self: Any) -> Any:
        optimizer = adamw(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    module = module_of(training_step=training_step, configure_optimizers=configure_optimizers)
    module.automatic_optimization = False
    expected = plain_loop(
        rank, world_size, stage=3, clip_grad_norm=0.1, scheduled=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)
    )
    return hash_of_fit(fit(rank, world_size, "shardcore_stage_3", module)), hash_of_training(*expected[:2])


@pytest.mark.more
def test_manual_optimization():
    for found, expected in run_ranks(2, _manual):
        assert found == expected


def _schedules(rank: int, world_size: int) -> Any:
    made = {"step": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=12)}
    made["epoch"] = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch)
    found = {}
    for interval, make in made.items():

        def configure_optimizers(self: Any, make: Any = make, interval: str = interval) -> Any:
            optimizer = adamw(self.parameters())
            self.rates: list[float] = []
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": interval}}

        def on_train_batch_start(self: Any, batch: Any, index: int) -> None:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        for strategy in ("shardcore_stage_3_offload", "ddp"):
            module = module_of(configure_optimizers=configure_optimizers, on_train_batch_start=on_train_batch_start)
            trainer = fit(rank, world_size, strategy, module, max_epochs=2)
            found[interval, strategy] = trainer.lightning_module.rates, trainer.lightning_module.losses
    return found


@pytest.mark.more
def test_schedulers_drive_the_sharded_optimizer():
    for found in run_ranks(2, _schedules):
        for interval in ("step", "epoch"):
            rates, losses = found[interval, "shardcore_stage_3_offload"]
            assert rates == found[interval, "ddp"][0]
            assert len(set(rates)) == (12 if interval == "step" else 2)
            torch.testing.assert_close(losses, found[interval, "ddp"][1], rtol=1e-5, atol=0)


# --- precision -----------------------------------------------------------------------------------------------------------


def plain_autocast(rank: int, world_size: int, dtype: torch.dtype, **options: Any) -> str:
    model = Plain()
    model, optimizer = shardcore.shard(model, adamw(model.parameters()), **options)
    for batch in batches_of(rank, world_size):
        with torch.autocast("cpu", dtype, cache_enabled=False):
            loss = model.loss(batch)
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of_training(model, optimizer)


def _precisions(rank: int, world_size: int) -> Any:
    found = {}
    half = PACKAGES["lightning"].pl.plugins.MixedPrecision("16-mixed", "cpu")  # Trainer(precision=) makes it bf16 on CPUs
    for stage in (1, 3):
        for precision in ("bf16-mixed", "bf16-true", "16-true"):
            trainer = fit(rank, world_size, f"shardcore_stage_{stage}", precision=precision)
            found[precision, stage] = hash_of_fit(trainer), str(next(trainer.lightning_module.parameters()).dtype)
        trainer = fit(rank, world_size, f"shardcore_stage_{stage}", plugins=[half], **CLIP)
        found["16-mixed", stage] = hash_of_fit(trainer), trainer.optimizers[0].loss_scale
    expected = {
        "bf16-mixed": plain_autocast(rank, world_size, torch.bfloat16, stage=2),
        "16-mixed": plain_autocast(
            rank, world_size, torch.float16, stage=2, loss_scale=shardcore.LossScale(), clip_grad_norm=0.1
        ),
        "bf16-true": hash_of_training(*plain_loop(rank, world_size, stage=2, precision="bf16")[:2]),
        "16-true": hash_of_training(*plain_loop(rank, world_size, stage=2, precision="fp16")[:2]),
    }
    ddp = fit(rank, world_size, "ddp", precision="bf16-mixed").lightning_module.losses
    mixed = fit(rank, world_size, "shardcore_stage_2", precision="bf16-mixed").lightning_module.losses
    torch.testing.assert_close(mixed, ddp, rtol=1e-4, atol=0)
    return found, expected


@pytest.mark.more
def test_precisions():
    for found, expected in run_ranks(2, _precisions):
        for (precision, stage), (value, seen) in found.items():
            assert value == expected[precision], (precision, stage)
            is_of = {"bf16-mixed": "torch.float32", "bf16-true": "torch.bfloat16", "16-true": "torch.float16"}
            assert seen == is_of.get(precision, 65536.0)
        assert len(set(expected.values())) == 4


# --- errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.more
def test_bad_options_are_refused_by_name():
    for options, text in (
        ({"precision": "bf16"}, r"precision was given; expected it in Trainer\(precision=\)"),
        ({"clip_grad_norm": 1.0}, r"clip_grad_norm was given; expected it in Trainer\(gradient_clip_val=\)"),
        ({"stages": 2}, "stages is no option; expected save_distributed_checkpoint, stage, units"),
        ({"find_unused_parameters": True}, "find_unused_parameters is no option"),
    ):
        with pytest.raises(TypeError, match=text):
            ours.ShardcoreStrategy(**options)
    with pytest.raises(TypeError, match=r"precision is a DoublePrecision \(64-true\); expected one of 32-true, bf16-mixed"):
        PACKAGES["lightning"].pl.Trainer(accelerator="cpu", devices=1, strategy="shardcore", precision="64-true", logger=False)
    plugin = PACKAGES["lightning"].pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=7))
    with pytest.raises(ValueError, match="has a GradScaler of its own"):
        ours.ShardcoreStrategy(precision_plugin=plugin)


def _refuses(rank: int, world_size: int, folder: str) -> dict[str, str]:
    found = {}
    found["value"] = error_of(
        lambda: fit(rank, world_size, "shardcore", gradient_clip_val=0.1, gradient_clip_algorithm="value")
    )
    two = module_of(configure_optimizers=lambda self: [adamw(self.parameters()), adamw(self.parameters())])
    two.automatic_optimization = False
    found["two"] = error_of(lambda: fit(rank, world_size, "shardcore", two))
    sgd = module_of(configure_optimizers=lambda self: torch.optim.NAdam(self.parameters()))
    found["sgd"] = error_of(lambda: fit(rank, world_size, "shardcore", sgd))
    module = module_of()
    module.save_hyperparameters({"config": Made})
    found["hparams"] = error_of(
        lambda: fit(rank, world_size, "shardcore", module, default_root_dir=folder, enable_checkpointing=True)
    )
    shards, optimizer, _ = plain_loop(rank, world_size, stage=2)
    shardcore.save(folder, shards, optimizer, tag="plain")
    found["plain"] = error_of(lambda: fit(rank, world_size, "shardcore", ckpt_path=f"{folder}/plain"))
    trainer = fit(rank, world_size, "shardcore")
    found["file"] = error_of(lambda: trainer.save_checkpoint(f"{folder}/plain/manifest.json"))
    found["url"] = error_of(lambda: trainer.save_checkpoint("s3://bucket/last.ckpt"))
    return found


@pytest.mark.more
def test_errors_name_what_to_do(tmp_path):
    for found in run_ranks(2, _refuses, str(tmp_path)):
        assert found["value"].startswith('ValueError: clip_gradients: gradient_clip_algorithm is "value"; expected "norm"')
        assert "configure_optimizers returned 2 optimizers; expected one" in found["two"]
        assert "optimizer is a NAdam, which keeps numbers" in found["sgd"]
        assert "hparams['config'] has type type; expected plain data" in found["hparams"]
        assert "save_hyperparameters(ignore=[...])" in found["hparams"]
        assert "was not saved by Lightning's Trainer" in found["plain"]
        assert "manifest.json, a file that exists; expected a directory" in found["file"]
        assert "path is s3://bucket/last.ckpt, a URL; expected a directory" in found["url"]


# --- Lightning's own launcher --------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
import pytorch_lightning as pl
import shardcore.integrations.lightning

class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=2, logger=False, enable_progress_bar=False,
    default_root_dir=sys.argv[2], gradient_clip_val=0.1,
)
trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=4))
weights = trainer.lightning_module.state_dict()["net.weight"]
if trainer.is_global_zero:
    print("weights", trainer.world_size, weights.flatten().tolist())
"""


def one_process() -> torch.Tensor:
    """Train as the script does over two ranks: a step takes the two batches of four as one of eight."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    samples = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    for epoch in range(2):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(epoch))  # DistributedSampler's
        for batch in samples[order].split(8):
            net(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return net.weight.detach().flatten()


@pytest.mark.slow  # two processes import lightning; test_quickstart.py starts such a script, too
def test_lightnings_launcher(tmp_path):
    """Of the package pytorch_lightning; that of lightning starts examples/quickstart/lightning_trainer.py."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    environment["PYTHONPATH"] = str(Path(shardcore.__file__).resolve().parents[1])
    done = finished([sys.executable, str(script), "shardcore_stage_3", str(tmp_path)], tmp_path, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("weights 2 ")]
    found = torch.tensor(json.loads(line.removeprefix("weights 2 ")))
    torch.testing.assert_close(found, one_process(), rtol=1e-4, atol=1e-6)
