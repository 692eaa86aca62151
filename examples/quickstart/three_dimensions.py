"""Train over three dimensions: two pipeline stages, each sliced over two ranks (tensor parallel),
in shards over the rest.

torchrun --nproc-per-node 8 three_dimensions.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardcore

VOCABULARY, WIDTH, STAGES, SLICES, MICROBATCHES = 64, 64, 2, 2, 4


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
shape = (dist.get_world_size() // STAGES // SLICES, STAGES, SLICES)
mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "pp", "tp"))
rank = mesh["pp"].get_local_rank()
device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

torch.manual_seed(rank)  # the ranks of a stage have the same weights before they are sliced
blocks = [Block(), Block()]
module = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks)
if rank == 1:
    module = nn.Sequential(*blocks, nn.Linear(WIDTH, VOCABULARY))
module.to(device)
for block in blocks:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
stage = PipelineStage(module, rank, STAGES, device, group=mesh["pp"].get_group())
optimizer = shardcore.FusedAdam(module.parameters(), lr=3e-3, weight_decay=0.01)
module, optimizer = shardcore.shard_pipeline(
    stage,
    optimizer,
    stage=2,
    n_microbatches=MICROBATCHES,
    process_group=mesh["dp"],
    clip_grad_norm=1.0,  # of the norm of all stages and slices
)
schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)

torch.manual_seed(0)
successor = torch.randperm(VOCABULARY)  # what is learned: the token that follows each token
# ranks that differ in pp and tp alone have the same batches
torch.manual_seed(1 + mesh["dp"].get_local_rank())
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
        print(f"step {step} loss {mean.item() / mesh['dp'].size() / SLICES:.6f}", flush=True)
dist.destroy_process_group()
