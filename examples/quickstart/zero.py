"""Train with ZeRO stage 1, 2 or 3: the losses are equal, and each rank keeps less.

    torchrun --nproc-per-node 8 zero.py --stage 3          on GPUs, one rank each, over NCCL
    torchrun --nproc-per-node 2 zero.py --stage 3          on a machine without GPUs, over gloo

Stage 1 shards master weights and optimizer states, 2 gradients, too, 3 weights, too.
--precision bf16 trains in bfloat16. Other optimizers: --optimizer sgd, --optimizer lion.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardcore

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


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=2)
parser.add_argument("--optimizer", choices=["adamw", "sgd", "lion"], default="adamw")
parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
options = parser.parse_args()

dist.init_process_group()
torch.manual_seed(0)
model = make_model()
successor = torch.randperm(VOCABULARY)  # what is learned: the token that follows each token
if options.optimizer == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
elif options.optimizer == "lion":
    optimizer = shardcore.Lion(model.parameters(), lr=1e-3, weight_decay=0.01)
else:
    optimizer = shardcore.FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01)
model, optimizer = shardcore.shard(
    model, optimizer, options.stage, precision=options.precision, clip_grad_norm=1.0
)
# shard has moved the model to this rank's GPU, if there is one
device = next(model.parameters()).device
successor = successor.to(device)

torch.manual_seed(1 + dist.get_rank())  # each rank has its own batches
for step in range(20):
    tokens = torch.randint(VOCABULARY, (8, 64)).to(device)
    loss = F.cross_entropy(model(tokens).float().flatten(0, 1), successor[tokens].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)
if dist.get_rank() == 0:
    print(shardcore.memory_report(model).table())
dist.destroy_process_group()
