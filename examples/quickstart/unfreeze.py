"""Train the last layers of a model first, and the others later, with a learning rate of their own.

    torchrun --nproc-per-node 2 unfreeze.py

Frozen weights have no gradients, masters and states; they get them when they begin to train.
"""

import torch
import torch.distributed as dist
from torch import nn

import shardcore

dist.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)), nn.Linear(32, 1)
)
model.requires_grad_(False)
model[3:].requires_grad_(True)
optimizer = shardcore.FusedAdam(model[2:].parameters(), lr=3e-3)
model, optimizer = shardcore.shard(model, optimizer, stage=3)

# shard has moved the model to this rank's GPU, if there is one
device = next(model.parameters()).device
truth = torch.randn(32, 1, device=device)  # what is learned: a linear map
torch.manual_seed(1 + dist.get_rank())  # each rank has its own batches

for step in range(20):
    if step == 5:
        shardcore.unfreeze(model[2])  # the optimizer has it already
    if step == 10:
        model[:2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[:2].parameters()), "lr": 1e-3})
    x = torch.randn(256, 32, device=device)
    loss = (model(x) - (x @ truth).tanh()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)
dist.destroy_process_group()
