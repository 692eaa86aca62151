"""Real Trainers over gloo ranks: the bits of plain shard() loops at every stage and tier, and DDP's
digits.

That Lightning's own launcher starts ranks, tests/examples/test_quickstart.py shows with
lightning_trainer.py.
"""

from functools import partial
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
    overlapped = ours.ShardcoreStrategy(
        3, overlap_step=True, offload={"optimizer": "cpu"}, units=50
    )
    hashes = {
        "plain": hash_of_training(*plain_loop(rank, world_size, stage=2)[:2]),
        "overlapped": hash_of_fit(fit(rank, world_size, overlapped)),
        "of the trainer": hash_of_fit(
            fit(
                rank,
                world_size,
                "shardcore_stage_2",
                sync_batchnorm=True,
                enable_model_summary=True,
                detect_anomaly=True,
            )
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
    hashes = {}
    for sync_each, stage in ((False, 3), (True, 1), (None, 1), (None, 2)):
        strategy = ours.ShardcoreStrategy(stage, sync_each=sync_each)
        hashes[sync_each, stage] = hash_of_fit(
            fit(rank, world_size, strategy, accumulate_grad_batches=3)
        )
    for sync_each in (False, True):
        hashes[sync_each] = hash_of_training(
            *plain_loop(rank, world_size, 3, stage=2, sync_each=sync_each)[:2]
        )
    return hashes


@pytest.mark.more
def test_accumulates_in_either_order():
    for hashes in run_ranks(2, _accumulates):
        assert hashes[False] == hashes[False, 3] == hashes[None, 1]
        assert hashes[True] == hashes[True, 1] == hashes[None, 2] != hashes[False]


def _clips(rank: int, world_size: int) -> Any:
    found = {
        "plain": hash_of_training(*plain_loop(rank, world_size, stage=2, clip_grad_norm=0.1)[:2])
    }
    for name in ("shardcore_stage_1", "shardcore_stage_3_offload"):
        trainer = fit(rank, world_size, name, **CLIP)
        found[name] = hash_of_fit(trainer)

    def in_the_hook(
        self: Any, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def by_torch(
        self: Any, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
    ) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    for name, hook in (("hook", in_the_hook), ("torch", by_torch)):
        module = module_of(configure_gradient_clipping=hook)
        found[name] = hash_of_fit(fit(rank, world_size, "shardcore_stage_2", module))
    ddp = fit(rank, world_size, "ddp", **CLIP).lightning_module.state_dict()
    model = trainer.lightning_module.state_dict()
    for name, value in ddp.items():
        torch.testing.assert_close(value, model[name], rtol=1e-4, atol=1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours._TrainerPrecision, "clip_gradients", lambda *args, **kwargs: None)
        assert hash_of_fit(fit(rank, world_size, "shardcore", **CLIP)) not in found.values(), (
            "a twin that clips nothing"
        )
    return found


@pytest.mark.more
def test_clips_as_shard_does():
    for of_rank in run_ranks(2, _clips):
        assert len(set(of_rank.values())) == 1, of_rank


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
        rank,
        world_size,
        stage=3,
        clip_grad_norm=0.1,
        scheduled=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    )
    return hash_of_fit(fit(rank, world_size, "shardcore_stage_3", module)), hash_of_training(
        *expected[:2]
    )


@pytest.mark.more
def test_manual_optimization():
    for own, expected in run_ranks(2, _manual):
        assert own == expected


def _schedules(rank: int, world_size: int) -> Any:
    made = {"step": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6)}
    made["epoch"] = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch)
    found = {}
    for epochs, (interval, make) in enumerate(made.items(), 1):

        def configure_optimizers(self: Any, make: Any = make, interval: str = interval) -> Any:
            optimizer = adamw(self.parameters())
            self.rates: list[float] = []
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": make(optimizer), "interval": interval},
            }

        def on_train_batch_start(self: Any, batch: Any, index: int) -> None:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        module = module_of(
            configure_optimizers=configure_optimizers, on_train_batch_start=on_train_batch_start
        )
        trainer = fit(rank, world_size, "shardcore_stage_3_offload", module, max_epochs=epochs)
        found[interval] = hash_of_fit(trainer), trainer.lightning_module.rates
    return found, hash_of_training(
        *plain_loop(rank, world_size, scheduled=made["step"], stage=2)[:2]
    )


@pytest.mark.more
def test_schedulers_drive_the_sharded_optimizer():
    for own, plain in run_ranks(2, _schedules):
        assert own["step"][0] == plain
        assert len(set(own["step"][1])) == 6
        assert own["epoch"][1] == [1e-2] * 6 + [5e-3] * 6


# --- precision ------------------------------------------------------------------------------------


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
    hashes = {}
    # Trainer(precision=) makes it bf16 on CPUs
    half = PACKAGES["lightning"].pl.plugins.MixedPrecision("16-mixed", "cpu")
    for precision, stage in (("bf16-mixed", 1), ("bf16-true", 3), ("16-true", 1)):
        trainer = fit(rank, world_size, f"shardcore_stage_{stage}", precision=precision)
        hashes[precision] = (
            hash_of_fit(trainer),
            str(next(trainer.lightning_module.parameters()).dtype),
        )
        if precision == "bf16-mixed":
            ddp = fit(rank, world_size, "ddp", precision=precision).lightning_module.losses
            torch.testing.assert_close(trainer.lightning_module.losses, ddp, rtol=1e-4, atol=0)
    trainer = fit(rank, world_size, "shardcore_stage_3", plugins=[half], **CLIP)
    hashes["16-mixed"] = hash_of_fit(trainer), trainer.optimizers[0].loss_scale
    scaled = {"loss_scale": shardcore.LossScale(), "clip_grad_norm": 0.1}
    expected = {
        "bf16-mixed": plain_autocast(rank, world_size, torch.bfloat16, stage=2),
        "16-mixed": plain_autocast(rank, world_size, torch.float16, stage=2, **scaled),
        "bf16-true": hash_of_training(*plain_loop(rank, world_size, stage=2, precision="bf16")[:2]),
        "16-true": hash_of_training(*plain_loop(rank, world_size, stage=2, precision="fp16")[:2]),
    }
    return hashes, expected


@pytest.mark.more
def test_precisions():
    seen = {
        "bf16-mixed": "torch.float32",
        "bf16-true": "torch.bfloat16",
        "16-true": "torch.float16",
        "16-mixed": 65536.0,
    }
    for own, expected in run_ranks(2, _precisions):
        assert own == {precision: (expected[precision], seen[precision]) for precision in seen}
        assert len(set(expected.values())) == 4


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.more
def test_bad_options_are_refused_by_name():
    for options, text in (
        ({"precision": "bf16"}, r"precision was given; expected it in Trainer\(precision=\)"),
        (
            {"clip_grad_norm": 1.0},
            r"clip_grad_norm was given; expected it in Trainer\(gradient_clip_val=\)",
        ),
        ({"stages": 2}, "stages is no option; did you mean 'stage'"),
        ({"find_unused_parameters": True}, "find_unused_parameters is no option; .* save_distr"),
    ):
        with pytest.raises(TypeError, match=text):
            ours.ShardcoreStrategy(**options)
    with pytest.raises(
        TypeError,
        match=r"precision is a DoublePrecision \(64-true\); expected one of 32-true, bf16-mixed",
    ):
        PACKAGES["lightning"].pl.Trainer(
            accelerator="cpu", devices=1, strategy="shardcore", precision="64-true", logger=False
        )
    plugin = PACKAGES["lightning"].pl.plugins.MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=7)
    )
    with pytest.raises(ValueError, match="uses a GradScaler"):
        ours.ShardcoreStrategy(precision_plugin=plugin)


def _refuses(rank: int, world_size: int, folder: str) -> dict[str, str]:
    found = {}
    found["value"] = error_of(
        lambda: fit(
            rank, world_size, "shardcore", gradient_clip_val=0.1, gradient_clip_algorithm="value"
        )
    )
    two = module_of(
        configure_optimizers=lambda self: [adamw(self.parameters()), adamw(self.parameters())]
    )
    two.automatic_optimization = False
    found["two"] = error_of(lambda: fit(rank, world_size, "shardcore", two))
    sgd = module_of(configure_optimizers=lambda self: torch.optim.NAdam(self.parameters()))
    found["sgd"] = error_of(lambda: fit(rank, world_size, "shardcore", sgd))
    module = module_of()
    module.save_hyperparameters({"config": Made})
    found["hparams"] = error_of(
        lambda: fit(
            rank,
            world_size,
            "shardcore",
            module,
            default_root_dir=folder,
            enable_checkpointing=True,
        )
    )
    shards, optimizer, _ = plain_loop(rank, world_size, stage=2)
    shardcore.save(folder, shards, optimizer, tag="plain")
    found["plain"] = error_of(
        lambda: fit(rank, world_size, "shardcore", ckpt_path=f"{folder}/plain")
    )
    trainer = fit(rank, world_size, "shardcore")
    found["file"] = error_of(lambda: trainer.save_checkpoint(f"{folder}/plain/manifest.json"))
    found["url"] = error_of(lambda: trainer.save_checkpoint("s3://bucket/last.ckpt"))
    return found


def _averages(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for package, classes in PACKAGES.items():
        averages = {"StochasticWeightAveraging": {"swa_lrs": 1e-2}, "EMAWeightAveraging": {}}
        for name, options in averages.items():
            for stage in (2, 3) if package == "lightning" else (3,):
                callbacks = [getattr(classes.pl.callbacks, name)(**options)]
                run = partial(
                    fit,
                    rank,
                    world_size,
                    f"shardcore_stage_{stage}",
                    package=package,
                    callbacks=callbacks,
                )
                found[f"{package} {name} {stage}"] = error_of(run)

    class Ours(PACKAGES["lightning"].pl.Callback):
        def on_fit_start(self, trainer, module):
            self.ema = shardcore.EMA(module, 0.5)

        def on_train_batch_end(self, trainer, module, *_):
            self.ema.update()

    callback = Ours()
    trainer = fit(rank, world_size, "shardcore_stage_3", callbacks=[callback])
    x = torch.ones(2, 10)
    with torch.no_grad():
        trained = trainer.lightning_module(x)
        with callback.ema.swap():
            assert not torch.equal(trainer.lightning_module(x), trained)
    return found


def test_averages_of_whole_weights_are_refused_at_setup_and_ours_is_one():
    for messages in run_ranks(2, _averages):
        for run, said in messages.items():
            _, name, stage = run.split()
            if stage == "3":
                assert said.startswith(
                    f"ValueError: ShardcoreStrategy: callbacks include {name}, which reads weights"
                )
                assert "expected shardcore.EMA(module)" in said
            else:
                assert said == "no error", run


@pytest.mark.more
def test_errors_name_what_to_do(tmp_path):
    for messages in run_ranks(2, _refuses, str(tmp_path)):
        assert messages["value"].startswith(
            'ValueError: clip_gradients: gradient_clip_algorithm is "value"; expected "norm"'
        )
        assert "configure_optimizers returned 2 optimizers; expected one" in messages["two"]
        assert "optimizer is a torch.optim.NAdam, which" in messages["sgd"]
        assert "hparams['config'] is of type type; expected plain data" in messages["hparams"]
        assert "save_hyperparameters(ignore=[...])" in messages["hparams"]
        assert "was not saved by Lightning's Trainer" in messages["plain"]
        assert "manifest.json, an existing file; expected a directory" in messages["file"]
        assert "path is s3://bucket/last.ckpt, a URL; expected a directory" in messages["url"]
