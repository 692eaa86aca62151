"""Train on long sequences: activations computed again, their inputs in host memory, a loss without
logits.

    torchrun --nproc-per-node 2 long_sequences.py

Weights are sharded at stage 3, so activations and logits would be most of what each rank holds.
"""

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


class Model(nn.Module):
    def __init__(self, width=64, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens, target):
        hidden = self.norm(self.blocks(self.embedding(tokens)))
        # here, where the weight is gathered
        return shardcore.chunked_cross_entropy(hidden, self.head.weight, target)


dist.init_process_group()
torch.manual_seed(0)
model = Model()
shardcore.apply_activation_checkpointing(model, offload_to_cpu=True)
optimizer = shardcore.FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01)
model, optimizer = shardcore.shard(model, optimizer, stage=3)

# shard has moved the model to this rank's GPU, if there is one
device = next(model.parameters()).device

# what is learned: the token that follows each token
successor = torch.randperm(VOCABULARY).to(device)
torch.manual_seed(1 + dist.get_rank())  # each rank has its own batches
for step in range(20):
    tokens = torch.randint(VOCABULARY, (4, 128)).to(device)
    loss = model(tokens, successor[tokens])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)
dist.destroy_process_group()
