"""A DeepSpeed script on shardcore: one word changes, the import.

    shardcore run deepspeed_script.py --deepspeed --deepspeed_config ds_config.json
                                       on all GPUs; add --num_gpus 2 without GPUs, for two ranks
                                       over gloo

torchrun works as well.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import shardcore as deepspeed

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
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed()
torch.manual_seed(0)
model = make_model()
successor = torch.randperm(VOCABULARY)  # what is learned: the token that follows each token
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
successor = successor.to(engine.device)

torch.manual_seed(1 + engine.global_rank)  # each rank has its own batches
for step in range(20):
    tokens = torch.randint(VOCABULARY, (engine.train_micro_batch_size_per_gpu(), 64)).to(
        engine.device
    )
    loss = F.cross_entropy(engine(tokens).float().flatten(0, 1), successor[tokens].flatten())
    engine.backward(loss)
    engine.step()
    mean = loss.detach() / engine.world_size
    deepspeed.comm.all_reduce(mean)
    if engine.global_rank == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)
engine.destroy()
