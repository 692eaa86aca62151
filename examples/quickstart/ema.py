"""Keep a moving average of sharded weights, and evaluate with it; ranks have different numbers of
batches.

    torchrun --nproc-per-node 2 ema.py

Each rank keeps the average of its shard, in float32. shardcore.save(..., ema=ema) saves it.
"""

import torch
import torch.distributed as dist
from torch import nn

import shardcore

dist.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
)
optimizer = shardcore.FusedAdam(model.parameters(), lr=3e-3)
model, optimizer = shardcore.shard(model, optimizer, stage=3)
ema = shardcore.EMA(model, decay=0.8)

# shard has moved the model to this rank's GPU, if there is one
device = next(model.parameters()).device
truth = torch.randn(32, 1, device=device)  # what is learned: a noisy linear map
torch.manual_seed(1 + dist.get_rank())  # each rank has its own batches
held_out = torch.randn(256, 32, device=device)

loader = [torch.randn(64, 32, device=device) for _ in range(20 - 3 * dist.get_rank())]
# 20 times on every rank; those that have run out add nothing
for step, x in enumerate(shardcore.join(model, loader)):
    loss = (model(x) - x @ truth - 0.5 * torch.randn(64, 1, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update()
    # the model has the averages; afterwards its own weights, bit for bit
    with ema.swap(), torch.no_grad():
        error = (model(held_out) - held_out @ truth).square().mean()
    dist.all_reduce(error)
    if dist.get_rank() == 0:
        print(f"step {step} loss {error.item() / dist.get_world_size():.6f}", flush=True)

dist.destroy_process_group()
