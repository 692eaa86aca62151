"""Train a 7B Llama on one GPU of 24 GB; weights, gradients, master weights and Adam's states are in
host memory.

    python llama_7b_one_gpu.py --weights FOLDER     from a Hugging Face folder; without --weights,
                                                    from random weights
    python llama_7b_one_gpu.py --lean               half the host memory: split masters, 8-bit
                                                    moments
    python llama_7b_one_gpu.py --preset tiny --length 64    on any machine, with or without a GPU,
                                                            in seconds

Needs transformers. What it takes on each tier: docs/recipes/7b_on_24_gb.md. Put your own data into
`batch`.
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore

PRESETS = {
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
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
    "stage": 3,  # weights are on the device only while their block runs
    "offload": {"optimizer": "cpu", "gradients": "cpu", "params": "cpu"},
    "overlap_step": True,  # Adam runs behind the next forward
    "precision": "bf16",
    "clip_grad_norm": 1.0,
}


def make_model(preset):
    """Make the model on the meta device, without memory."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**PRESETS[preset], use_cache=False))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch(step, sequences, length, vocabulary, device):
    """Stand-in for your data: sequences in which each token is the one before it plus 1."""
    starts = torch.arange(step * sequences, (step + 1) * sequences, device=device)
    return (starts[:, None] + torch.arange(length, device=device)) % vocabulary


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="7b")
    parser.add_argument(
        "--weights", metavar="FOLDER", help="with .safetensors files (default: random weights)"
    )
    parser.add_argument("--lean", action="store_true", help="split masters and 8-bit moments")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=4, help="a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--save",
        metavar="FOLDER",
        help="of a checkpoint at the end, for shardcore.load or consolidate",
    )
    options = parser.parse_args()

    torch.manual_seed(0)
    model = make_model(options.preset)
    optimizer = shardcore.CPUAdam(
        model.parameters(), lr=options.lr, weight_decay=0.1, **(LEAN if options.lean else {})
    )
    model, optimizer = shardcore.shard(model, optimizer, materialize=options.weights, **SHARD)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for step in range(options.steps):
        start = time.monotonic()
        tokens = batch(step, options.sequences, options.length, model.config.vocab_size, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"step {step} loss {loss.item():.6f} seconds {time.monotonic() - start:.2f}", flush=True
        )
    if options.save is not None:
        shardcore.save(options.save, model, optimizer)
    print(shardcore.memory_report(model).table())
    if torch.cuda.is_available():
        print(
            f"most on the device, activations included: "
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        )


if __name__ == "__main__":
    main()
