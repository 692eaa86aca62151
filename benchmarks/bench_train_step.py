"""Time one training step of shardcore's stages beside DDP, FSDP2 and DeepSpeed (when installed), on CPU ranks over gloo.

All engines live in the same processes and take turns, step by step, in a random order that the ranks share; every step
starts at a barrier and counts as long as its slowest rank. All train the same model from the same weights on the same
batches in float32, and their losses must agree, so nobody is fast by doing less. What counts is the ratio to DDP within a
round. Engines:

    DDP                  DistributedDataParallel (gradient_as_bucket_view, no buffer broadcast) + fused AdamW
    FSDP2                fully_shard on each block and the root, weights kept after forward (as ZeRO stage 2) + fused AdamW
    DeepSpeed 1, 2       ZeRO stages 1 and 2, contiguous gradients, overlap_comm, DeepSpeedCPUAdam
    shardcore 0, 1, 2    stages 0 to 2, each with the optimizer states in place and on the cpu tier ("+ offload")
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardcore
from benchmarks import harness
from examples.arguments import make_out_folder, not_negative, positive, whole_number
from examples.corpus import load_corpus
from examples.gpt import PRESETS, build_gpt, next_byte_loss
from examples.launch import Rank, launch
from examples.machine import describe_machine
from examples.training import gather

try:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    deepspeed = None

OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BASE = "DDP"
LOSS_TOLERANCE = 1e-3  # relative; float32 sums in other orders differ by less over the few steps of a benchmark

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens, targets -> loss


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """One step as every torch program writes it."""

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = next_byte_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp_step(model: nn.Module) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames broadcast_buffers to what 2.11 does not know
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    return torch_step(wrapped, torch.optim.AdamW(wrapped.parameters(), **OPTIONS, fused=True))


def fsdp2_step(model: nn.Module) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return torch_step(model, torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True))


def shardcore_step(model: nn.Module, stage: int, offload: bool) -> Step:
    optimizer = shardcore.FusedAdam(model.parameters(), **OPTIONS)
    place = {"optimizer": "cpu"} if offload else None
    return torch_step(*shardcore.shard(model, optimizer, stage=stage, offload=place, precision="fp32"))


def deepspeed_step(model: nn.Module, stage: int, batch: int) -> Step:
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # DeepSpeed clips to 1.0 unless told not to
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": True},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), **OPTIONS), config=config)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = next_byte_loss(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def engines(batch: int) -> dict[str, Callable[[nn.Module], Step]]:
    """Return, by name, what turns a model into a step."""
    makers: dict[str, Callable[[nn.Module], Step]] = {BASE: ddp_step, "FSDP2": fsdp2_step}
    for stage in (0, 1, 2):
        makers[f"shardcore {stage}"] = lambda model, stage=stage: shardcore_step(model, stage, offload=False)
        makers[f"shardcore {stage} + offload"] = lambda model, stage=stage: shardcore_step(model, stage, offload=True)
    if deepspeed is not None:
        for stage in (1, 2):
            makers[f"DeepSpeed {stage}"] = lambda model, stage=stage: deepspeed_step(model, stage, batch)
    return makers


def measure(rank: Rank, options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run all engines in turns; returns this rank's seconds and losses by engine and round (warm-up left out of seconds)."""
    makers = {name: make for name, make in engines(options.batch).items() if name == BASE or name in options.engines}
    steps = {name: make(build_gpt(options.preset, seed=0)) for name, make in makers.items()}
    corpus = load_corpus()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number, order in enumerate(harness.random_order(list(steps), options.warmup + options.rounds, seed=0)):
        tokens, targets = corpus.batch(
            seed=0, rank=rank.rank, step=number, micro_step=0, batch=options.batch, context=PRESETS[options.preset].context
        )
        for name in order:
            time.sleep(options.pause)
            dist.barrier()
            start = time.perf_counter()
            loss = steps[name](tokens, targets)
            seconds[name].append(time.perf_counter() - start)
            losses[name].append(loss.item())
        if rank.rank == 0:
            print(f"\rround {number + 1}/{options.warmup + options.rounds}", end="", file=sys.stderr, flush=True)
    return {name: samples[options.warmup :] for name, samples in seconds.items()}, losses


def check_losses(losses: dict[str, list[float]]) -> dict[str, float]:
    """Return each engine's largest relative difference from DDP's losses; raises ValueError if one trains something else."""
    worst = {}
    for name, values in losses.items():
        worst[name] = max(abs(a - b) / abs(b) for a, b in zip(values, losses[BASE], strict=True))
        if not worst[name] <= LOSS_TOLERANCE:
            found = f"losses that differ from {BASE}'s by {worst[name]:.1e}"
            raise ValueError(f"bench_train_step: {name} has {found}; expected at most {LOSS_TOLERANCE}")
    return worst


def run_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Measure on every rank and report on rank 0."""
    own_seconds, losses = measure(rank, options)
    worst = check_losses(losses)
    of_ranks = gather(own_seconds, rank.world_size)
    if rank.rank > 0:
        return 0
    seconds = {
        name: [max(samples) for samples in zip(*(of_rank[name] for of_rank in of_ranks), strict=True)] for name in own_seconds
    }
    rows = [["engine", "ms (median)", f"time / {BASE} [quartiles]", f"losses within ... of {BASE}'s"]]
    ratios = {name: harness.paired(samples, seconds[BASE]) for name, samples in seconds.items()}
    for name, samples in seconds.items():
        rows.append([name, f"{harness.spread(samples).median * 1e3:.1f}", str(ratios[name]), f"{worst[name]:.1e}"])
    print(
        f"\n{options.preset}, batch {options.batch} a rank, {rank.world_size} ranks, one thread each, {options.rounds} rounds"
    )
    print(harness.table(rows))
    result = {
        "benchmark": "train_step",
        "machine": describe_machine(),
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "world_size": rank.world_size,
        "deepspeed": deepspeed.__version__ if deepspeed is not None else None,
        "engines": {
            name: {"seconds": seconds[name], "time_over_ddp": asdict(ratios[name]), "losses_within": worst[name]}
            for name in seconds
        },
    }
    harness.write_json(options.out / "train_step.json", result)
    panel = harness.Panel(
        title=f"{options.preset}, batch {options.batch} a rank, {rank.world_size} gloo ranks, float32",
        x_label=f"time of a step, {BASE} = 1 (median and quartiles; shorter is better)",
        bars=ratios,
        ours=lambda name: name.startswith("shardcore"),
        mark=1.0,
    )
    harness.write_png(options.out / "train_step.png", [panel], "One training step")
    return 0


def main() -> int:
    names = list(engines(batch=1))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_train_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu26m", help="model (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=4, help="sequences a rank (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=20, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warmup", type=positive, default=3, help="rounds before them (default: %(default)s)")
    parser.add_argument("--pause", type=not_negative, default=0.02, help="seconds before each step (default: %(default)s)")
    parser.add_argument("--nproc", type=whole_number(2), default=2, help="ranks (default: %(default)s)")
    parser.add_argument(
        "--engines", nargs="+", choices=names, default=names, help=f"which to time, beside {BASE} (default: all here)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/benchmarks"), help="folder of the results (default: %(default)s)"
    )
    options = parser.parse_args()
    make_out_folder(parser, options.out)
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")  # the ranks inherit these
    if deepspeed is None:
        print("DeepSpeed is left out: deepspeed is not installed (pip install --no-build-isolation deepspeed)")
    return launch(run_rank, options.nproc, "cpu", 1, options)


if __name__ == "__main__":
    sys.exit(main())
