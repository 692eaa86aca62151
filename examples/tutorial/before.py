"""Train a Llama with plain PyTorch, in a memory budget that is too small for it.

    python before.py

after.py is the same training on shardcore. docs/tutorial.md goes from one to the other.
"""

import argparse
import resource
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 64, 32

parser = argparse.ArgumentParser()
parser.add_argument("--budget", type=int, default=896, help="MiB for each process")
parser.add_argument("--steps", type=int, default=20)
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


def batch_of(step, size=2):
    """Sequences in which each token is the one before it plus 1."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (size, 1), generator=generator)
    return (first + torch.arange(LENGTH)) % VOCABULARY


device = "cuda" if torch.cuda.is_available() else "cpu"
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
model = LlamaForCausalLM(config).to(device)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(args.steps):
    tokens = batch_of(step).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
