"""Trainers and Fabrics over the ranks of a test, and the plain loops whose bits they have to
have. Needs both packages.
"""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning
import lightning_fabric
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardcore
import shardcore.integrations.lightning as ours
from tests.support.models import Net, hash_of_training

PACKAGES = {
    "lightning": SimpleNamespace(pl=lightning.pytorch, fabric=lightning.fabric),
    "pytorch_lightning": SimpleNamespace(pl=pytorch_lightning, fabric=lightning_fabric),
}
LR, BATCH, STEPS = 1e-2, 4, 6
CLIP = {"gradient_clip_val": 0.1}
EVERYWHERE = [name for name in ours.STRATEGIES if "stage" in name and "nvme" not in name]


def samples(world_size: int, batches: int = STEPS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    numel = world_size * BATCH * batches
    return TensorDataset(
        torch.randn(numel, 10, generator=generator), torch.randn(numel, 5, generator=generator)
    )


def batches_of(rank: int, world_size: int, batches: int = STEPS) -> Iterator[list[torch.Tensor]]:
    """What a DistributedSampler without shuffling gives this rank."""
    x, y = samples(world_size, batches).tensors
    return zip(x[rank::world_size].split(BATCH), y[rank::world_size].split(BATCH), strict=True)


class Plain(nn.Module):
    """The module of `module_of` without Lightning, with the same names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()

    def loss(self, batch: Any) -> torch.Tensor:
        return ((self(batch[0]).float() - batch[1].float()) ** 2).mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.1)


def module_of(package: str = "lightning", **changes: Any) -> Any:
    """A LightningModule over Net; `changes` replace its methods."""

    class Lit(PACKAGES[package].pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()
            self.losses: list[float] = []

        forward = Plain.forward
        loss = Plain.loss

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def test_step(self, batch: Any, index: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            return adamw(self.parameters())

    return type("Changed", (Lit,), changes)()


def environment(package: str, rank: int, world_size: int) -> Any:
    # Lightning sets the number of threads otherwise, and a matrix product over others has other
    # bits.
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    base = PACKAGES[package].fabric.plugins.environments.LightningEnvironment
    methods = {
        "creates_processes_externally": property(lambda self: True),
        "world_size": lambda self: world_size,
        "global_rank": lambda self: rank,
        "local_rank": lambda self: rank,
        "set_world_size": lambda self, size: None,
        "set_global_rank": lambda self, rank: None,
    }
    return type("Ranks", (base,), methods)()


def trainer_of(
    rank: int,
    world_size: int,
    strategy: Any,
    package: str = "lightning",
    plugins: Any = (),
    **options: Any,
) -> Any:
    defaults = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return PACKAGES[package].pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        plugins=[environment(package, rank, world_size), *plugins],
        **{**defaults, "max_epochs": 1, **options},
    )


def loader(rank: int, world_size: int, batches: int = STEPS) -> Any:
    data = samples(world_size, batches)
    return DataLoader(
        data, batch_size=BATCH, sampler=DistributedSampler(data, world_size, rank, shuffle=False)
    )


def fit(
    rank: int,
    world_size: int,
    strategy: Any,
    module: Any = None,
    package: str = "lightning",
    **options: Any,
) -> Any:
    module = module_of(package) if module is None else module
    path = options.pop("ckpt_path", None)
    trainer = trainer_of(rank, world_size, strategy, package, **options)
    trainer.fit(module, loader(rank, world_size), ckpt_path=path)
    return trainer


def hash_of_fit(trainer: Any) -> str:
    return hash_of_training(trainer.lightning_module, trainer.optimizers[0])


def plain_loop(
    rank: int, world_size: int, accumulate: int = 1, scheduled: Any = None, **options: Any
) -> tuple[nn.Module, Any, list[float]]:
    """What a fit has to equal: shard(), and torch's loop."""
    model = Plain()
    optimizer = adamw(model.parameters())
    scheduler = None if scheduled is None else scheduled(optimizer)
    model, optimizer = shardcore.shard(model, optimizer, accumulate=accumulate, **options)
    losses = []
    for index, batch in enumerate(batches_of(rank, world_size)):
        if options.get("precision") is not None:  # Lightning casts whole batches
            batch = [
                tensor.to(
                    getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[options["precision"]])
                )
                for tensor in batch
            ]
        loss = model.loss(batch)
        losses.append(loss.item())
        optimizer.scale_loss(loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return model, optimizer, losses


class Made(nn.Module):
    """A model that every module of can be filled on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def fabric_of(
    rank: int,
    world_size: int,
    strategy: Any,
    package: str = "lightning",
    plugins: Any = (),
    **options: Any,
) -> Any:
    fabric = PACKAGES[package].fabric.Fabric(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        plugins=[environment(package, rank, world_size), *plugins],
        **options,
    )
    fabric.launch()
    return fabric
