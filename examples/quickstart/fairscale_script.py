"""A script for FairScale, of which the import alone was changed.

    torchrun --nproc-per-node 2 fairscale_script.py --fully-sharded

Without --fully-sharded OSS and ShardedDataParallel shard all but the weights. CPUs run it, too.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shardcore.integrations.fairscale.nn import (
    FullyShardedDataParallel,
    ShardedDataParallel,
    checkpoint_wrapper,
    enable_wrap,
    wrap,
)
from shardcore.integrations.fairscale.optim import OSS
from torch import nn

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
    blocks = [wrap(checkpoint_wrapper(Block(width))) for _ in range(layers)]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, width), *blocks, nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
    )


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--fully-sharded", action="store_true")
options = parser.parse_args()

dist.init_process_group()
device = (
    torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    if torch.cuda.is_available()
    else torch.device("cpu")
)
torch.manual_seed(0)
# what is learned: the token that follows each token
successor = torch.randperm(VOCABULARY).to(device)
if options.fully_sharded:
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, reshard_after_forward=True):
        model = wrap(make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
else:
    model = make_model().to(device)
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=3e-3, weight_decay=0.01)
    model = ShardedDataParallel(model, optimizer)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

torch.manual_seed(1 + dist.get_rank())  # each rank has its own batches
for step in range(20):
    tokens = torch.randint(VOCABULARY, (8, 64)).to(device)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), successor[tokens].flatten())
    loss.backward()
    if options.fully_sharded:
        model.clip_grad_norm_(1.0)
    else:
        optimizer.clip_grad_norm(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)
dist.destroy_process_group()
