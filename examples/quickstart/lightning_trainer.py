"""Train with Lightning's Trainer on shardcore: the strategy is named, and the module stays as it
is.

    python lightning_trainer.py --devices 8          on GPUs
    python lightning_trainer.py --devices 2          on a machine without GPUs

Lightning starts the other ranks itself. Strategies: docs/lightning.md.
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardcore.integrations.lightning  # noqa: F401  registers the strategies

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(lightning.LightningModule):
    def __init__(self, width=64, layers=4):
        super().__init__()
        blocks = [Block(width) for _ in range(layers)]
        ends = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, *ends)

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        self.print(f"step {index} loss {mean.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="shardcore_stage_2")
    options = parser.parse_args()

    lightning.seed_everything(0)
    successor = torch.randperm(VOCABULARY)  # what is learned: the token that follows each token
    tokens = torch.randint(VOCABULARY, (20 * 8 * options.devices, 64))
    trainer = lightning.Trainer(
        strategy=options.strategy,
        devices=options.devices,
        max_epochs=1,
        gradient_clip_val=1.0,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Language(), DataLoader(TensorDataset(tokens, successor[tokens]), batch_size=8))
