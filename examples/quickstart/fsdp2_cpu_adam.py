"""Use only shardcore's optimizers, in FSDP2: CPUAdam on weights that fully_shard offloads,
FusedAdam on those it does not.

    torchrun --nproc-per-node 8 fsdp2_cpu_adam.py --offload          on GPUs, one rank each
    torchrun --nproc-per-node 2 fsdp2_cpu_adam.py --offload          on a machine without GPUs, over
                                                                     gloo

Without --offload weights and states stay on the device. Sharding and communication are FSDP2's
either way.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

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
parser.add_argument(
    "--offload", action="store_true", help="weights, gradients and states in host memory"
)
options = parser.parse_args()

on_gpus = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those in host memory
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
torch.manual_seed(0)
model = make_model() if options.offload else make_model().to(device)
# what is learned: the token that follows each token
successor = torch.randperm(VOCABULARY).to(device)
policy = {"offload_policy": CPUOffloadPolicy(pin_memory=on_gpus)} if options.offload else {}
for layer in model:
    if isinstance(layer, Block):
        fully_shard(layer, mesh=mesh, **policy)
fully_shard(model, mesh=mesh, **policy)
kind = shardcore.CPUAdam if options.offload else shardcore.FusedAdam
optimizer = kind(model.parameters(), lr=3e-3, weight_decay=0.01)

torch.manual_seed(1 + dist.get_rank())  # each rank has its own batches
for step in range(20):
    tokens = torch.randint(VOCABULARY, (8, 64)).to(device)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), successor[tokens].flatten())
    loss.backward()
    optimizer.step(max_norm=1.0)  # the norm over all ranks, clipping and Adam, in one pass
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)
dist.destroy_process_group()
