"""Time one training step of shardcore's stages beside DDP, FSDP2 and DeepSpeed (when installed), on
CPU ranks or GPUs.

On the CPU over gloo; with --device cuda over nccl, a rank each.

All engines live in the same processes and take turns in a random order that the ranks share, a step
each, or --steps in a row: as in training, caches then hold what this engine left, and a rank may be
ahead of another until they next meet. A turn starts at a barrier and counts as long as its slowest
rank. All train the same model from the same weights on the same batches in float32, and their
losses must agree, so nobody is fast by doing less: a peer whose losses do not is left out by name.
What counts is the ratio to DDP within a round (with --nproc 1: to torch without any engine).
Engines:

    DDP                  DistributedDataParallel (gradient_as_bucket_view, no buffer broadcast) +
                         fused AdamW
    ZeroRedundancy       DistributedDataParallel + torch's ZeroRedundancyOptimizer (ZeRO stage 1)
                         over AdamW
    FSDP2 2, 3           fully_shard on each block and the root + fused AdamW; weights kept after
                         forward (2) or not
    FairScale            OSS over fused AdamW + ShardedDataParallel (ZeRO stages 1 and 2)
    DeepSpeed 1, 2, 3    ZeRO stages, contiguous gradients, overlap_comm; DeepSpeedCPUAdam, or on
                         GPUs torch's fused AdamW
    DeepSpeed 2 + offload   ZeRO-Offload: stage 2 with offload_optimizer on the cpu (not on GPUs:
                            bench_offload_train)
    shardcore 0 to 3     the stages, each with the optimizer states in place and on the cpu tier ("+
                         offload")
"""

import argparse
import copy
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shardcore
from benchmarks import harness, suite
from examples.arguments import positive
from examples.corpus import load_corpus
from examples.gpt import PRESETS, build_gpt, next_byte_loss
from examples.launch import Rank, launch
from examples.training import gather

try:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS
except ImportError:
    OSS = None

try:
    # imported where it trains: each rank takes seconds for that
    DEEPSPEED: str | None = version("deepspeed")
except PackageNotFoundError:
    DEEPSPEED = None

OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# relative; float32 sums in other orders differ by less over the few steps of a benchmark
LOSS_TOLERANCE = 1e-3

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens, targets -> loss


def torch_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, set_to_none: bool = True
) -> Step:
    """One step as every torch program writes it."""

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = next_byte_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        return loss.detach()

    return step


def torch_adamw_step(model: nn.Module) -> Step:
    return torch_step(model, torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True))


def ddp(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers to what 2.11 does not know
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False, process_group=group
        )


def ddp_step(model: nn.Module) -> Step:
    return torch_adamw_step(ddp(model))


def zero_redundancy_step(model: nn.Module) -> Step:
    wrapped = ddp(model)
    adam = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **OPTIONS, fused=True)
    return torch_step(wrapped, adam)


def fairscale_step(model: nn.Module) -> Step:
    adam = OSS(model.parameters(), torch.optim.AdamW, **OPTIONS, fused=True)
    # Its buckets are views of p.grad: without them it trains something else from the third step on.
    return torch_step(
        ShardedDataParallel(model, adam, broadcast_buffers=False), adam, set_to_none=False
    )


def fsdp2_step(model: nn.Module, stage: int) -> Step:
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=stage == 3 and module is not model)
    return torch_adamw_step(model)


def shardcore_step(model: nn.Module, stage: int, offload: bool) -> Step:
    optimizer = shardcore.FusedAdam(model.parameters(), **OPTIONS)
    place = {"optimizer": "cpu"} if offload else None
    return torch_step(
        *shardcore.shard(model, optimizer, stage=stage, offload=place, precision="fp32")
    )


def deepspeed_config(stage: int, batch: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # DeepSpeed clips to 1.0 unless told not to
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": True},
    }


def deepspeed_step(model: nn.Module, stage: int, batch: int, offload: bool) -> Step:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    config = deepspeed_config(stage, batch)
    if offload:  # on CPU ranks there is nothing to pin for
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    params = list(model.parameters())
    on_gpu = params[0].device.type == "cuda"
    adam = (
        torch.optim.AdamW(params, **OPTIONS, fused=True)
        if on_gpu
        else DeepSpeedCPUAdam(params, **OPTIONS)
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = next_byte_loss(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def engines(batch: int) -> dict[str, Callable[[nn.Module], Step]]:
    """Return, by name, what turns a model into a step."""
    makers: dict[str, Callable[[nn.Module], Step]] = {"torch": torch_adamw_step, "DDP": ddp_step}
    makers["ZeroRedundancy"] = zero_redundancy_step
    if OSS is not None:
        makers["FairScale"] = fairscale_step
    for stage in (2, 3):
        makers[f"FSDP2 {stage}"] = lambda model, stage=stage: fsdp2_step(model, stage)
    for stage in (0, 1, 2, 3):
        makers[f"shardcore {stage}"] = lambda model, stage=stage: shardcore_step(
            model, stage, offload=False
        )
        makers[f"shardcore {stage} + offload"] = lambda model, stage=stage: shardcore_step(
            model, stage, offload=True
        )
    if DEEPSPEED is not None:
        for stage in (1, 2, 3):
            makers[f"DeepSpeed {stage}"] = lambda model, stage=stage: deepspeed_step(
                model, stage, batch, offload=False
            )
        makers["DeepSpeed 2 + offload"] = lambda model: deepspeed_step(
            model, 2, batch, offload=True
        )
    return makers


def base_of(world_size: int) -> str:
    """Return what the others are compared to: DDP, or with one rank torch without anything."""
    return "DDP" if world_size > 1 else "torch"


def measure(
    rank: Rank, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run all engines in turns; returns this rank's seconds per step by round (warm-up left
    out), and all losses, by engine.
    """
    base, makers = base_of(rank.world_size), engines(options.batch)
    makers = {
        name: make
        for name, make in makers.items()
        if name == base or (name in options.engines and name != "torch")
    }
    on_gpu = rank.device.type == "cuda"
    if on_gpu:
        makers = {name: make for name, make in makers.items() if name != "DeepSpeed 2 + offload"}
    model = build_gpt(options.preset, seed=0)
    steps = {name: make(copy.deepcopy(model).to(rank.device)) for name, make in makers.items()}
    finish = torch.cuda.synchronize if on_gpu else lambda: None
    corpus = load_corpus()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number, order in enumerate(
        harness.random_order(list(steps), options.warmup + options.rounds, seed=0)
    ):
        batches = [
            corpus.batch(
                seed=0,
                rank=rank.rank,
                step=step,
                micro_step=0,
                batch=options.batch,
                context=PRESETS[options.preset].context,
            )
            for step in range(number * options.steps, (number + 1) * options.steps)
        ]
        placed = [[part.to(rank.device) for part in batch] for batch in batches]
        for name in order:
            time.sleep(options.pause)
            dist.barrier()
            finish()
            start = time.perf_counter()
            of_turn = [steps[name](tokens, targets) for tokens, targets in placed]
            finish()
            seconds[name].append((time.perf_counter() - start) / options.steps)
            losses[name] += [loss.item() for loss in of_turn]
        if rank.rank == 0:
            print(
                f"\rround {number + 1}/{options.warmup + options.rounds}",
                end="",
                file=sys.stderr,
                flush=True,
            )
    return {name: samples[options.warmup :] for name, samples in seconds.items()}, losses


def check_losses(
    losses: dict[str, list[float]],
    base: str,
    tolerance: float = LOSS_TOLERANCE,
    op: str = "bench_train_step",
    scale: float | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return each engine's largest relative difference from the base's losses, and that of peers
    which train something else.

    scale: what it is relative to; None: the base's loss at that step. ValueError if one of ours
    trains something else.
    """
    worst = {
        name: max(abs(a - b) / (scale or abs(b)) for a, b in zip(values, losses[base], strict=True))
        for name, values in losses.items()
    }
    others = {name: difference for name, difference in worst.items() if not difference <= tolerance}
    for name, difference in others.items():
        if name.startswith("shardcore"):
            found = f"losses that differ from {base}'s by {difference:.1e}"
            raise ValueError(f"{op}: {name} has {found}; expected at most {tolerance}")
    return {name: difference for name, difference in worst.items() if name not in others}, others


def slowest(own_seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank, by case and round. Collective."""
    of_ranks = gather(own_seconds)
    return {
        name: [max(at) for at in zip(*(of_rank[name] for of_rank in of_ranks), strict=True)]
        for name in own_seconds
    }


def run_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Measure on every rank and report on rank 0."""
    base = base_of(rank.world_size)
    own_seconds, losses = measure(rank, options)
    worst, others = check_losses(losses, base)
    seconds = slowest({name: own_seconds[name] for name in worst})
    if rank.rank > 0:
        return 0
    rows = [
        ["engine", "ms (median)", f"time / {base} [quartiles]", f"losses within ... of {base}'s"]
    ]
    ratios = {name: harness.paired(samples, seconds[base]) for name, samples in seconds.items()}
    for name, samples in seconds.items():
        rows.append(
            [
                name,
                f"{harness.spread(samples).median * 1e3:.1f}",
                str(ratios[name]),
                f"{worst[name]:.1e}",
            ]
        )
    print(
        f"\n{options.preset}, batch {options.batch} a rank, {rank.world_size} {options.device} "
        f"ranks, {options.rounds} rounds"
    )
    print(harness.table(rows))
    for name, difference in others.items():
        print(
            f"{name} is left out: its losses differ from {base}'s by {difference:.1e} (more than "
            f"{LOSS_TOLERANCE}: other work)"
        )
    result = {
        **suite.about_run("train_step", options),
        "world_size": rank.world_size,
        "base": base,
        "deepspeed": DEEPSPEED,
        "engines": {
            name: {
                "seconds": seconds[name],
                "time_over_base": asdict(ratios[name]),
                "losses_within": worst[name],
            }
            for name in seconds
        },
        "left_out": others,
    }
    harness.write_json(options.out / "train_step.json", result)
    panel = harness.Panel(
        title=f"{options.preset}, batch {options.batch} a rank, {rank.world_size} {options.device} "
        f"ranks, float32",
        x_label=f"time of a step, {base} = 1 (median and quartiles; shorter is better)",
        bars=ratios,
        ours=lambda name: name.startswith("shardcore"),
        mark=1.0,
    )
    harness.write_png(options.out / "train_step.png", [panel], "One training step")
    return 0


def main() -> int:
    names = list(engines(batch=1))
    parser = suite.make_parser("train_step", __doc__, rounds=20, pause=0.02)
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="cpu26m", help="model (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=positive, default=4, help="sequences per rank (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=positive, default=3, help="rounds before them (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=1,
        help="steps in a row of an engine's turn (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="of the ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--nproc",
        type=positive,
        default=2,
        help="ranks; with 1 the base is plain torch (default: %(default)s)",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=names,
        default=names,
        help="which to time, beside DDP (default: all here)",
    )
    options = suite.parse(parser)
    threads = None  # all cores: a GPU's rank has its share of them
    if options.device == "cpu":
        threads = 1
        os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")  # the ranks inherit these
    if DEEPSPEED is None and options.device == "cpu":
        print(
            "DeepSpeed is left out: deepspeed is not installed (pip install --no-build-isolation "
            "deepspeed)"
        )
    return launch(run_rank, options.nproc, options.device, threads, options)


if __name__ == "__main__":
    sys.exit(main())
