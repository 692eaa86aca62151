"""Train a Llama on sequences that are split over ranks: each pair of ranks shares its sequences,
and heads in attention.

    torchrun --nproc-per-node 2 sequence_parallel.py

With 4 ranks there are two pairs, with sequences of their own. The weights are sharded over all
ranks, at stage 3.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore
from shardcore.integrations.sequence_attention import enable_sequence_parallel

VOCABULARY, TOKENS, RANKS_OF_A_SEQUENCE = 64, 128, 2

dist.init_process_group()
kind = "cuda" if torch.cuda.is_available() else "cpu"
shape = (dist.get_world_size() // RANKS_OF_A_SEQUENCE, RANKS_OF_A_SEQUENCE)
mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "sp"))

torch.manual_seed(0)
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))
enable_sequence_parallel(model, mesh["sp"])
shardcore.apply_activation_checkpointing(model)
optimizer = shardcore.FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01)
model, optimizer = shardcore.shard(model, optimizer, stage=3)  # over all ranks
device = next(model.parameters()).device  # this rank's GPU, if there is one

successor = torch.randperm(VOCABULARY)  # what is learned: the token that follows each token
samples = []
for first in torch.randint(VOCABULARY, (80,)):
    tokens = [first]
    while len(tokens) < TOKENS:
        tokens.append(successor[tokens[-1]])
    samples.append({"input_ids": torch.stack(tokens), "labels": torch.stack(tokens)})

sampler = DistributedSampler(
    samples, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank()
)
loader = shardcore.SequenceParallelLoader(
    DataLoader(samples, batch_size=4, sampler=sampler), mesh["sp"]
)
for step, batch in enumerate(loader):
    loss = model(**{name: part.to(device) for name, part in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)
dist.destroy_process_group()
