"""Train a small model with DistributedDataParallel.

    torchrun --nproc-per-node 8 ddp.py          on GPUs, one rank each, over NCCL
    torchrun --nproc-per-node 2 ddp.py          on a machine without GPUs, over gloo

ddp_to_shardcore.py is the same script on shardcore.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


dist.init_process_group()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if torch.cuda.is_available()
    else torch.device("cpu")
)
torch.manual_seed(0)
model = make_model().to(device)
# what is learned: the token that follows each token
successor = torch.randperm(VOCABULARY).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model = DistributedDataParallel(model)

torch.manual_seed(1 + dist.get_rank())  # each rank has its own batches
for step in range(20):
    tokens = torch.randint(VOCABULARY, (8, 64)).to(device)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), successor[tokens].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)
dist.destroy_process_group()
