"""Train on one GPU with master weights, Adam's states, gradients and weights in host memory.

    python offload_one_gpu.py          on the GPU, or without one on the CPU

The device holds the weights of two blocks at a time, and activations. Adam runs on the CPU, behind
the next forward.
"""

import torch
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


torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = make_model()
optimizer = shardcore.CPUAdam(model.parameters(), lr=3e-3, weight_decay=0.01)
model, optimizer = shardcore.shard(
    model,
    optimizer,
    stage=3,
    offload={"optimizer": "cpu", "gradients": "cpu", "params": "cpu"},
    overlap_step=True,  # step() returns at once; each block's forward waits for its own weights
    precision="bf16",
    clip_grad_norm=1.0,
)

# what is learned: the token that follows each token
successor = torch.randperm(VOCABULARY).to(device)
for step in range(20):
    tokens = torch.randint(VOCABULARY, (8, 64)).to(device)
    loss = F.cross_entropy(model(tokens).float().flatten(0, 1), successor[tokens].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
print(shardcore.memory_report(model).table())
