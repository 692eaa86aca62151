"""Train a 70B Llama on 8 GPUs of 80 GB: ZeRO stage 3, with master weights and Adam's states in host
memory.

    torchrun --nproc-per-node 8 llama_70b_eight_gpus.py --weights FOLDER    of Hugging Face
    torchrun --nproc-per-node 8 llama_70b_eight_gpus.py --lean    a third of the host memory
    torchrun --nproc-per-node 2 llama_70b_eight_gpus.py --preset tiny --length 64

Needs transformers. What it takes on each tier: docs/recipes/70b_on_8x80_gb.md. Put your own data
into `batch`.
"""

import argparse
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore

PRESETS = {
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
    },
}
LEAN = {"master": "split", "state_dtype": "8bit"}
SHARD = {
    "stage": 3,
    "offload": {"optimizer": "cpu"},  # weights and gradients stay on the devices
    "overlap_step": True,  # Adam runs behind the next forward
    "precision": "bf16",
    "grad_dtype": "bf16",  # of reduced gradients, which are added in float32
    "clip_grad_norm": 1.0,
}


def make_model(preset):
    """Make the model on the meta device, without memory."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**PRESETS[preset], use_cache=False))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch(step, sequences, length, vocabulary, device):
    """Stand-in for your data: sequences in which each token is the one before it plus 1; others
    on each rank.
    """
    first = (step * dist.get_world_size() + dist.get_rank()) * sequences
    starts = torch.arange(first, first + sequences, device=device)
    return (starts[:, None] + torch.arange(length, device=device)) % vocabulary


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="70b")
    parser.add_argument(
        "--weights", metavar="FOLDER", help="with .safetensors files (default: random weights)"
    )
    parser.add_argument("--lean", action="store_true", help="split masters and 8-bit moments")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=2, help="a rank and step")
    parser.add_argument("--length", type=int, default=4096, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--save",
        metavar="FOLDER",
        help="of a checkpoint at the end, for shardcore.load or consolidate",
    )
    options = parser.parse_args()

    dist.init_process_group()
    torch.manual_seed(0)
    model = make_model(options.preset)
    optimizer = shardcore.FusedAdam(
        model.parameters(), lr=options.lr, weight_decay=0.1, **(LEAN if options.lean else {})
    )
    model, optimizer = shardcore.shard(model, optimizer, materialize=options.weights, **SHARD)
    device = model.device
    for step in range(options.steps):
        start = time.monotonic()
        tokens = batch(step, options.sequences, options.length, model.config.vocab_size, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(
                f"step {step} loss {mean.item():.6f} seconds {time.monotonic() - start:.2f}",
                flush=True,
            )
    if options.save is not None:
        shardcore.save(options.save, model, optimizer)  # each rank its part
    if dist.get_rank() == 0:
        print(shardcore.memory_report(model).table())
        if torch.cuda.is_available():
            print(
                f"most on a device, activations included: "
                f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
            )
    optimizer.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
