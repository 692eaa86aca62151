"""Train with Hugging Face Accelerate's loop on shardcore.

    torchrun --nproc-per-node 8 accelerate_loop.py          on GPUs, one rank each
    torchrun --nproc-per-node 2 accelerate_loop.py          on a machine without GPUs

`accelerate launch --multi_gpu` works as well, without its DeepSpeed and FSDP plugins.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardcore.integrations.accelerate import ShardcoreAccelerator

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_model(width=64, layers=4):
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, width), *blocks, nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
    )


torch.manual_seed(0)
successor = torch.randperm(VOCABULARY)  # what is learned: the token that follows each token
tokens = torch.randint(VOCABULARY, (640, 64))
loader = DataLoader(TensorDataset(tokens, successor[tokens]), batch_size=8)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

accelerator = ShardcoreAccelerator(
    cpu=not torch.cuda.is_available(),
    gradient_accumulation_steps=2,
    shard_options={"stage": 2},  # arguments of shardcore.shard
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (inputs, targets) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(f"step {step} loss {mean.item():.6f}", flush=True)
accelerator.end_training()
