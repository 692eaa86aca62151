"""Time CPU Adam steps with reduced states against our own float32 ones: what fewer bytes bring, and where arithmetic binds.

Two subjects, each a flat tensor of --numel elements; bytes are what one element moves (read and written):

    offload   bfloat16 gradient in, unscale, Adam, bfloat16 weight out: float32 master (28 bytes), split master (26), and a
              split master with bfloat16 (18) or 8-bit (14) moments
    fp32      float32 weight and gradient: float32 (28), bfloat16 (20) or 8-bit (16) moments

Each is measured at --numel elements, where memory binds, and at --small, which stays in the caches: there only arithmetic
is left. Cases take turns in a random order; what counts is the ratio within a round.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

import shardcore
from benchmarks import harness, suite
from benchmarks.adam_kinds import LOSS_SCALE, OPTIONS, Kind
from benchmarks.cpu_buffers import Buffers, huge_page_setting
from examples.arguments import elements

# subject -> name -> kind; the first is the base.
BF16 = Kind(torch.bfloat16, torch.bfloat16)
SUBJECTS = {
    "offload": {
        "fp32 master": replace(BF16, master="fp32"),
        "split master": replace(BF16, master="split"),
        "split master, bf16 states": replace(BF16, master="split", state_dtype="bf16"),
        "split master, 8-bit states": replace(BF16, master="split", state_dtype="8bit"),
    },
    "fp32": {
        "fp32 states": Kind(),
        "bf16 states": Kind(state_dtype="bf16"),
        "8-bit states": Kind(state_dtype="8bit"),
    },
}


def make_step(buffers: Buffers, kind: Kind) -> Callable[[], None]:
    """Set up one optimizer; its step unscales."""
    param = buffers.parameter(kind.weight)
    param.grad = buffers.copy_of(buffers.grad * LOSS_SCALE, kind.grad)
    optimizer = shardcore.CPUAdam([param], **OPTIONS, **kind.options)
    return lambda: optimizer.step(grad_scale=1 / LOSS_SCALE)


def measure(subject: str, numel: int, options: argparse.Namespace) -> dict[str, object]:
    """Run one subject at one size; prints the table and returns what JSON holds."""
    buffers = Buffers(numel, equal_pages=True)
    cases = {name: make_step(buffers, kind) for name, kind in SUBJECTS[subject].items()}
    repeats = min(200, max(1, 2**26 // numel))  # a sample of a small size is many steps
    seconds = harness.interleave(cases, options.rounds, repeats=repeats, pause_s=options.pause, warmup=2)
    base = next(iter(cases))
    rows = [["states", "bytes", "Gparam/s", f"speed / {base} [quartiles]"]]
    result = {}
    for name, samples in seconds.items():
        rate = numel / harness.spread(samples).median / 1e9
        speed = harness.paired(seconds[base], samples)
        bytes_each = SUBJECTS[subject][name].bytes_moved
        rows.append([name, str(bytes_each), f"{rate:.2f}", str(speed)])
        result[name] = {"seconds": samples, "bytes": bytes_each, "gparams_per_second": rate, "speed_over_base": asdict(speed)}
    print(f"\n{subject}, {numel:,} elements, {options.threads} threads, {options.rounds} rounds")
    print(harness.table(rows))
    return {"subject": subject, "numel": numel, "base": base, "states": result}


def main() -> int:
    parser = suite.make_parser("reduced_states", __doc__, rounds=15, pause=0.02, threads=True)
    parser.add_argument("--numel", type=elements, default=64 * 2**20, help="elements where memory binds (default: 64M)")
    parser.add_argument("--small", type=elements, default=512 * 2**10, help="elements that the caches hold (default: 512K)")
    options = suite.parse(parser)
    torch.set_num_threads(options.threads)
    results = [measure(subject, numel, options) for numel in (options.numel, options.small) for subject in SUBJECTS]
    report = {**suite.about_run("reduced_states", options), "huge_pages": huge_page_setting(), "results": results}
    harness.write_json(options.out / "reduced_states.json", report)
    panels = [
        harness.Panel(
            f"{result['subject']}, {result['numel']:,} elements",
            f"speed, {result['base']} = 1 (median and quartiles)",
            {
                name: harness.paired(result["states"][result["base"]]["seconds"], state["seconds"])
                for name, state in result["states"].items()
            },
            lambda name: True,
            mark=1.0,
        )
        for result in results
    ]
    harness.write_png(options.out / "reduced_states.png", panels, f"Reduced states, {options.threads} threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
