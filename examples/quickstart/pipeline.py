"""Train a model in two pipeline stages: each rank has one, in shards over the ranks that have the
same one.

    torchrun --nproc-per-node 2 pipeline.py

With 4 ranks each stage is on two of them, which shard its gradients and states at stage 2.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import shardcore

VOCABULARY, WIDTH, STAGES, MICROBATCHES = 64, 64, 2, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def loss_of(logits, target):  # of a micro-batch: its share of the mean
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) / MICROBATCHES


dist.init_process_group()
kind = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(
    kind, (dist.get_world_size() // STAGES, STAGES), mesh_dim_names=("dp", "pp")
)
rank = mesh["pp"].get_local_rank()
device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

torch.manual_seed(rank)
first, last = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
module = (
    nn.Sequential(first, Block(), Block()) if rank == 0 else nn.Sequential(Block(), Block(), last)
)
stage = PipelineStage(module, rank, STAGES, device, group=mesh["pp"].get_group())
optimizer = shardcore.FusedAdam(module.parameters(), lr=3e-3, weight_decay=0.01)
module, optimizer = shardcore.shard_pipeline(
    stage,
    optimizer,
    stage=2,
    n_microbatches=MICROBATCHES,
    process_group=mesh["dp"],
    clip_grad_norm=1.0,  # of the norm of all stages
)
schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)

torch.manual_seed(0)
successor = torch.randperm(VOCABULARY)  # what is learned: the token that follows each token
torch.manual_seed(1 + mesh["dp"].get_local_rank())  # the ranks of a pipeline have the same batches
for step in range(20):
    tokens = torch.randint(VOCABULARY, (8, 64))
    losses = []
    if rank == 0:
        schedule.step(tokens.to(device))
    else:
        schedule.step(target=successor[tokens].to(device), losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=device)
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item() / mesh['dp'].size():.6f}", flush=True)
dist.destroy_process_group()
