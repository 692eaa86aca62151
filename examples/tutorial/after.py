"""Train a Llama on shardcore, in a memory budget that is too small for plain PyTorch.

    torchrun --nproc-per-node 2 after.py                       trains, and saves every 5 steps
    torchrun --nproc-per-node 2 after.py --steps 20            continues from the last checkpoint
    torchrun --nproc-per-node 2 after.py --steps 20 --export exported

before.py is the same training on plain PyTorch. docs/tutorial.md goes from one to the other.
"""

import argparse
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore

VOCABULARY, LENGTH = 64, 32

parser = argparse.ArgumentParser()
parser.add_argument("--budget", type=int, default=896, help="MiB for each process")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--checkpoints", default="checkpoints")
parser.add_argument("--export", help="folder for the weights, in Hugging Face's format")
args = parser.parse_args()


def limit_memory(mib):
    """Limit what this process may allocate from now on: on its GPU, else in host memory."""
    size = mib * 2**20
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(size / total)
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        size += pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def batch_of(step, rank, size=2):
    """Sequences in which each token is the one before it plus 1."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    first = torch.randint(VOCABULARY, (size, 1), generator=generator)
    return (first + torch.arange(LENGTH)) % VOCABULARY


dist.init_process_group()
rank = dist.get_rank()
config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=20,
    num_attention_heads=8,
    max_position_embeddings=LENGTH,
)
limit_memory(args.budget)

torch.manual_seed(0)
with torch.device("meta"):  # no memory yet: shard makes each rank's shards
    model = LlamaForCausalLM(config)
shardcore.apply_activation_checkpointing(model)
optimizer = shardcore.FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.01, state_dtype="8bit")
model, optimizer = shardcore.shard(
    model,
    optimizer,
    stage=3,
    offload={"optimizer": "cpu"} if torch.cuda.is_available() else None,
    clip_grad_norm=1.0,
)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5)
device = next(model.buffers()).device

first = 0
if Path(args.checkpoints, "latest").exists():
    loaded = shardcore.load(args.checkpoints, model, optimizer, scheduler=scheduler)
    first = loaded.client_state["step"]
    if rank == 0:
        print(f"resumed at step {first}", flush=True)

for step in range(first, args.steps):
    tokens = batch_of(step, rank).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if (step + 1) % 5 == 0:
        shardcore.save(
            args.checkpoints,
            model,
            optimizer,
            scheduler=scheduler,
            client_state={"step": step + 1},
            keep_last=2,
        )

report = shardcore.memory_report(model)  # of this rank
if rank == 0:
    print(report, flush=True)

if args.export:
    shardcore.consolidate(model, args.export)
    if rank == 0:
        config.save_pretrained(args.export)
        print(f"exported to {args.export}", flush=True)
dist.destroy_process_group()
