"""Time digests: the kernel beside a read of the same bytes, and a training that records them.

kernel: _C.digest of --numel elements beside sums by torch (one read of the bytes) and shardcore's
squared norm: float32, bfloat16, and split masters (a bfloat16 weight and its remainder).

run: a step of a stack of blocks at stage 2 with Adam, without digests and with Metrics(digests=1),
which records every step: the worst case, as N steps share the cost of digests=N. bytes: what a row
reads, over the bytes of the masters. calls: launches of the kernel (on a GPU) for a row.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardcore
from benchmarks import harness, suite
from benchmarks.bench_activations import SIZES, Stack
from benchmarks.device import Device
from examples.arguments import elements
from shardcore._native import _C


def kernels(device: torch.device, numel: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return what the part "kernel" times, by dtype."""
    values = torch.randn(numel, device=device)
    weight = values.bfloat16()
    remainder = torch.randint(-(1 << 15), 1 << 15, (numel,), dtype=torch.int16, device=device)

    def cases(flat: torch.Tensor, rest: torch.Tensor | None = None) -> dict[str, Any]:
        norm = {} if rest is not None else {"norm": lambda: _C.sq_norm([flat])}
        # torch's sum of float32 words of the same bytes: a read, and little else
        words = [each.view(torch.float32) for each in (flat, rest) if each is not None]
        return {
            "read": lambda: [each.sum() for each in words],
            "digest": lambda: _C.digest([flat], [1], [0], [rest]),
            **norm,
        }

    return {
        "float32": cases(values),
        "bfloat16": cases(weight),
        "split": cases(weight, remainder),
    }


@contextmanager
def counted(found: list[int]) -> Iterator[None]:
    """Append the number of calls of the kernel inside, and the bytes that they read."""
    digest, calls = _C.digest, []

    def call(tensors: Any, keys: Any, first_blocks: Any, rests: Any) -> torch.Tensor:
        read = [*tensors, *(rest for rest in rests if rest is not None)]
        calls.append(sum(tensor.nbytes for tensor in read))
        return digest(tensors, keys, first_blocks, rests)

    _C.digest = call
    try:
        yield
    finally:
        _C.digest = digest
    found += [len(calls), sum(calls)]


def training(device: torch.device, sizes: tuple[int, int, int], folder: Path) -> dict[str, Any]:
    """Return a step without and with digests, each of a model of its own."""
    depth, width, tokens = sizes
    steps = {}
    for name, digests in {"without": None, "digests=1": 1}.items():
        torch.manual_seed(0)
        model: Any = Stack(depth, width).to(device)
        optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-4)
        model, optimizer = shardcore.shard(model, optimizer, 2, units=[*model.blocks])
        path = folder / (name.partition("=")[0])
        shutil.rmtree(path, ignore_errors=True)
        metrics = shardcore.Metrics(model, path, digests=digests, every=1 << 30, log=False)
        x = torch.randn(1, tokens, width, device=device)
        steps[name] = partial(train, model, optimizer, metrics, x)
    return steps


def train(model: Any, optimizer: Any, metrics: shardcore.Metrics, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    metrics.step(loss=loss)


def main() -> int:
    """Run, print tables, write digests.json into --out."""
    parser = suite.make_parser("digests", str(__doc__), rounds=7, pause=0.1)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--numel", type=elements, default=elements("64M"))
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = suite.parse(parser)
    device = Device(options.device)
    result = suite.about_run("digests", options)
    rows = [["kernel", "time over a read"]]
    kernel: dict[str, Any] = {}
    for dtype, cases in kernels(device.torch, options.numel).items():
        seconds = harness.interleave(
            cases, options.rounds, pause_s=options.pause, timer=device.timer
        )
        kernel[dtype] = {
            name: vars(harness.paired(samples, seconds["read"]))
            for name, samples in seconds.items()
            if name != "read"
        }
        for name in kernel[dtype]:
            ratio = harness.paired(seconds[name], seconds["read"])
            rows.append([f"{dtype}: {name}", str(ratio)])
    print(harness.table(rows), end="\n\n")
    sizes = SIZES["tiny" if options.tiny else options.device][:3]
    steps = training(device.torch, sizes, options.out / "digests")
    for step in steps.values():
        step()
    found: list[int] = []
    with counted(found):
        steps["digests=1"]()
    calls, read_bytes = found
    seconds = harness.interleave(steps, options.rounds, pause_s=options.pause, timer=device.timer)
    ratio = harness.paired(seconds["digests=1"], seconds["without"])
    master_bytes = 4 * sum(param.numel() for param in Stack(*sizes[:2]).parameters())
    result |= {
        "kernel": kernel,
        "run": {
            "sizes": sizes,
            "time_over_without": vars(ratio),
            "calls": calls,
            "read_bytes": read_bytes,
            "read_over_masters": read_bytes / master_bytes,
            "seconds": seconds,
        },
    }
    rows = [["a step with digests=1", "time over without", "bytes over masters", "calls"]]
    rows.append(["stage 2", str(ratio), f"{read_bytes / master_bytes:.2f}", str(calls)])
    print(harness.table(rows), end="\n\n")
    harness.write_json(options.out / "digests.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
