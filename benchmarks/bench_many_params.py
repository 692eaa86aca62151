"""Time what an engine costs for each parameter: backward and step of many small ones, on one rank.

The work on 8 x 8 elements is nothing, so the time is that of the calls. Two models of equal weights
train in turns, both with shardcore's FusedAdam:

    plain      p.grad of torch's autograd, and FusedAdam over the parameters
    sharded    the same under shard(stage=2)

"backward" and "step" are timed apart, each inside whole iterations, in seconds of the one thread
that computes: nothing here waits, and so other programs on the machine count less. At the end both
models must have the same weights, to the bit.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import nn

import shardcore
from benchmarks import harness, suite
from examples.arguments import positive

SIDE = 8
PARTS = ("backward", "step")


class Many(nn.Module):
    """So many square parameters, each of which is used once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.many = nn.ParameterList(
            nn.Parameter(torch.randn(SIDE, SIDE, generator=generator)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * param for param in self.many]).square().sum()


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], dict[str, float]]:
    """Return a training iteration, which returns the seconds of its parts."""
    x = torch.linspace(-1.0, 1.0, SIDE * SIDE).view(SIDE, SIDE)

    def iteration() -> dict[str, float]:
        loss = model(x)
        start = time.thread_time()
        loss.backward()
        between = time.thread_time()
        optimizer.step()
        end = time.thread_time()
        optimizer.zero_grad()
        return {"backward": between - start, "step": end - between}

    return iteration


def models_of(count: int) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
    """Return each engine's model and optimizer."""
    made = {}
    for engine in ("plain", "sharded"):
        model: nn.Module = Many(count)
        optimizer: torch.optim.Optimizer = shardcore.FusedAdam(model.parameters(), lr=1e-3)
        if engine == "sharded":
            model, optimizer = shardcore.shard(model, optimizer, stage=2, precision="fp32")
        made[engine] = model, optimizer
    return made


def check_same_weights(models: dict[str, tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    """Raise ValueError if the models do not have the same weights."""
    (plain, _), (sharded, _) = models["plain"], models["sharded"]
    for (name, ours), theirs in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        if not torch.equal(ours, theirs):
            raise ValueError(f"bench_many_params: {name} differs; expected the plain model's bits")


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each part, by engine and round."""
    models = models_of(options.params)
    iterations = {engine: trainer(*pair) for engine, pair in models.items()}
    cases = {
        f"{engine} {part}": lambda iteration=iteration, part=part: iteration()[part]
        for engine, iteration in iterations.items()
        for part in PARTS
    }

    def of_part(case: Callable[[], float], repeats: int) -> float:
        case()  # caches hold what other cases left
        return min(case() for _ in range(repeats)) * repeats

    repeats, rounds = options.repeats, options.rounds
    seconds = harness.interleave(
        cases, rounds, repeats=repeats, pause_s=options.pause, warmup=3, timer=of_part
    )
    # as many iterations of each
    check_same_weights(models)
    return {part: {engine: seconds[f"{engine} {part}"] for engine in iterations} for part in PARTS}


def main() -> int:
    parser = suite.make_parser("many_params", __doc__, rounds=30, pause=0.02)
    parser.add_argument(
        "--params", type=positive, default=1024, help="parameters (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=5,
        help="iterations of a sample, of which the fastest counts (default: %(default)s)",
    )
    options = suite.parse(parser)
    torch.set_num_threads(1)
    rows = [["part", "plain, ms", "sharded, ms", "sharded / plain [quartiles]"]]
    result = {}
    for part, seconds in measure(options).items():
        ratio = harness.paired(seconds["sharded"], seconds["plain"])
        medians = [f"{1e3 * harness.spread(seconds[e]).median:.2f}" for e in ("plain", "sharded")]
        rows.append([part, *medians, str(ratio)])
        result[part] = {"seconds": seconds, "sharded_over_plain": asdict(ratio)}
    print(f"\n{options.params:,} parameters of {SIDE} x {SIDE}, one thread")
    print(harness.table(rows))
    report = {**suite.about_run("many_params", options), "parts": result}
    harness.write_json(options.out / "many_params.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
