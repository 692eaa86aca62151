"""Time activation checkpointing and the chunked cross entropy, and their peak memory, beside
torch's own ways.

blocks: forward and backward of a stack of attention and MLP blocks: plain; torch.utils.checkpoint;
that within torch's save_on_cpu; shardcore.apply_activation_checkpointing; that with offload_to_cpu.
On a CPU the last copies within host memory: only a GPU shows what offload takes and frees. head:
forward and backward of a language model's head and loss: cross_entropy of all logits; torch's
linear_cross_entropy in chunks, where there is one (2.13); shardcore.chunked_cross_entropy.

peak = bytes of torch's allocator beyond those before the step.
The gradients of a part's cases are compared before anything is timed.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore
from benchmarks import harness, suite
from benchmarks.cpu_buffers import counted
from benchmarks.device import Device

SIZES = {  # blocks, width, tokens, classes, bytes of our chunks of logits
    "cuda": (16, 4096, 8192, 131072, 2**28),
    "cpu": (8, 256, 2048, 32768, 2**25),
    "tiny": (2, 32, 64, 128, 2**12),
}
Case = Callable[[], list[torch.Tensor]]


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Stack(nn.Module):
    """Blocks, each called by `call`."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def recomputed(block: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def saved_on_cpu(block: nn.Module, x: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return recomputed(block, x)


def stacks(device: torch.device, depth: int, width: int, tokens: int) -> dict[str, Case]:
    """Return what the part "blocks" times."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain = Stack(depth, width).to(device, dtype)
    x = torch.randn(1, tokens, width, device=device, dtype=dtype)

    def case(model: nn.Module) -> Case:
        def step() -> list[torch.Tensor]:
            model(x).float().square().mean().backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            model.zero_grad()
            return grads

        return step

    models = {
        name: copy.deepcopy(plain)
        for name in ("torch checkpoint", "torch checkpoint, save_on_cpu", "ours", "ours, offload")
    }
    models["torch checkpoint"].call = recomputed
    models["torch checkpoint, save_on_cpu"].call = saved_on_cpu
    shardcore.apply_activation_checkpointing(models["ours"])
    shardcore.apply_activation_checkpointing(models["ours, offload"], offload_to_cpu=True)
    return {name: case(model) for name, model in {"plain": plain, **models}.items()}


def heads(
    device: torch.device, width: int, tokens: int, classes: int, chunk_bytes: int
) -> dict[str, Case]:
    """Return what the part "head" times."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(classes, width, device=device) * width**-0.5).to(dtype).requires_grad_()
    target = torch.randint(classes, (tokens,), device=device)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "all logits": lambda: F.cross_entropy(F.linear(hidden, weight).float(), target),
        "ours": lambda: shardcore.chunked_cross_entropy(
            hidden, weight, target, chunk_bytes=chunk_bytes
        ),
    }
    chunked: Any = getattr(F, "linear_cross_entropy", None)
    if chunked is not None:
        ways["torch's chunks"] = lambda: chunked(
            hidden, weight, target, options=nn.LinearCrossEntropyOptions()
        )  # type: ignore[attr-defined]

    def case(way: Callable[[], torch.Tensor]) -> Case:
        return lambda: list(torch.autograd.grad(way(), (hidden, weight)))

    return {name: case(way) for name, way in ways.items()}


def check_same_gradients(cases: Mapping[str, Case], first: str) -> None:
    """Raise AssertionError unless all cases have the gradients of the first, up to rounding."""
    expected = cases[first]()
    for name, case in cases.items():
        for got, grad in zip(case(), expected, strict=True):
            error = ((got - grad).float().norm() / grad.float().norm()).item()
            assert error < (1e-2 if grad.dtype == torch.bfloat16 else 1e-4), (
                f"{name}: gradients differ by {error:.1e}"
            )


def peak_of(case: Case, device: torch.device) -> int:
    """Return the most bytes that a call takes beyond those before it."""
    case()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        case()
        return torch.cuda.max_memory_allocated(device) - before
    found: list[int] = []
    with counted(found):
        case()
    return found[1]


def main() -> int:
    """Run, print tables, write activations.json into --out."""
    parser = suite.make_parser("activations", str(__doc__), rounds=7, pause=0.2)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = suite.parse(parser)
    device = Device(options.device)
    depth, width, tokens, classes, chunk_bytes = SIZES["tiny" if options.tiny else options.device]
    result = suite.about_run("activations", options) | {
        "depth": depth,
        "width": width,
        "tokens": tokens,
    }
    result |= {"classes": classes, "chunk_bytes": chunk_bytes}
    for part, cases in {
        "blocks": stacks(device.torch, depth, width, tokens),
        "head": heads(device.torch, width, tokens, classes, chunk_bytes),
    }.items():
        first = next(iter(cases))
        check_same_gradients(cases, first)
        peaks = {name: peak_of(case, device.torch) for name, case in cases.items()}

        calls: dict[str, Callable[[], Any]] = dict(cases)
        seconds = harness.interleave(
            calls, options.rounds, pause_s=options.pause, timer=device.timer
        )
        ratios = {
            name: harness.paired(samples, seconds[first]) for name, samples in seconds.items()
        }
        rows = [[part, f"time over {first}", "peak, MiB"]]
        rows += [[name, str(ratio), f"{peaks[name] / 2**20:.0f}"] for name, ratio in ratios.items()]
        print(harness.table(rows), end="\n\n")
        result[part] = {
            "seconds": seconds,
            "peak_bytes": peaks,
            "ratios": {name: vars(ratio) for name, ratio in ratios.items()},
        }
    harness.write_json(options.out / "activations.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
