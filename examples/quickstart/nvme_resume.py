"""Train with master weights and Adam's states on a disk, and go on after a crash without a
checkpoint.

    python nvme_resume.py --kill-after 7      trains 7 steps, then the process is killed
    python nvme_resume.py                     goes on from its last committed step

Every step is committed to --dir, which belongs to one training, beside the next one's forward and
backward.
"""

import argparse
import os
import signal

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


parser = argparse.ArgumentParser()
parser.add_argument("--dir", default="states")
parser.add_argument("--kill-after", type=int)
options = parser.parse_args()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = make_model()
# what is learned: the token that follows each token
successor = torch.randperm(VOCABULARY).to(device)
optimizer = shardcore.CPUAdam(model.parameters(), lr=3e-3, weight_decay=0.01)
os.makedirs(options.dir, exist_ok=True)  # shard() creates no folder on the root file system
offload = {"optimizer": "nvme", "path": options.dir, "resume": True}
model, optimizer = shardcore.shard(model, optimizer, stage=2, offload=offload, precision="bf16")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
# 0 in a new training; random states are as they were
first = shardcore.resume(model, scheduler=scheduler)
print(f"going on from step {first}", flush=True)

for step in range(first, 20):
    tokens = torch.randint(VOCABULARY, (8, 64)).to(device)
    loss = F.cross_entropy(model(tokens).float().flatten(0, 1), successor[tokens].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
    if step + 1 == options.kill_after:
        os.kill(os.getpid(), signal.SIGKILL)
optimizer.synchronize()  # the last step is committed, too
