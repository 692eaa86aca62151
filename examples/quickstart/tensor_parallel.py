"""Train a Llama whose weights are sliced over pairs of ranks, and whose training state is sharded
over the others.

    torchrun --nproc-per-node 2 tensor_parallel.py

With 4 ranks there are two pairs, with batches of their own. GPT2LMHeadModel in place of
LlamaForCausalLM works, too. To begin with the weights in a folder, build the model from its config
and give `shard` materialize=folder.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore

VOCABULARY, TOKENS, SLICES = 64, 32, 2

dist.init_process_group()
kind = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(
    kind, (dist.get_world_size() // SLICES, SLICES), mesh_dim_names=("dp", "tp")
)

torch.manual_seed(0)  # the ranks of a pair have the same model, batches and random numbers
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
with torch.device("meta"):  # without weights: shard makes each rank's slices and shards of them
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))
shardcore.tensor_parallel(model, mesh["tp"])
optimizer = shardcore.FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01)
model, optimizer = shardcore.shard(
    model, optimizer, stage=2, process_group=mesh["dp"], clip_grad_norm=1.0
)

successor = torch.randperm(VOCABULARY)  # what is learned: the token that follows each token
batches = torch.Generator().manual_seed(1 + mesh["dp"].get_local_rank())
for step in range(20):
    tokens = [torch.randint(VOCABULARY, (8,), generator=batches)]
    while len(tokens) < TOKENS:
        tokens.append(successor[tokens[-1]])
    inputs = torch.stack(tokens, dim=1).to(kind)
    loss = model(input_ids=inputs, labels=inputs).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)

weights = model.state_dict()  # full tensors under the plain model's names, on every rank
if dist.get_rank() == 0:
    LlamaForCausalLM(model.config).load_state_dict(weights)
dist.destroy_process_group()
