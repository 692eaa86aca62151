"""Time CPU steps of SGD with momentum, Adagrad and Lion on shards against torch's own, and
DeepSpeed's kernels.

Two subjects for each, of a flat tensor of --numel elements:

    fp32      float32 weight and gradient
    offload   what a step of offloaded training does: bfloat16 gradient in, unscale, step on the
              float32 master, bfloat16 weight out. Peers widen, unscale, step and narrow.

"shardcore" is the kernel that shard runs on a range of a shard in host memory. "torch" is its plain
step, "fused" that with fused=True; for Lion, which torch does not have, shardcore.Lion without
shard. DeepSpeed has no kernel for SGD. All buffers ask for huge pages. At the end all must hold the
same weights (to rounding).
"""

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

import shardcore
from benchmarks import harness, suite
from benchmarks.adam_kinds import LOSS_SCALE, check_same_work
from benchmarks.cpu_buffers import Buffers, four_pass_step, huge_page_setting, step_of
from examples.arguments import elements
from shardcore.optim.elementwise import ElementKind

try:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.lion import DeepSpeedCPULion
except ImportError:
    DeepSpeedCPUAdagrad = DeepSpeedCPULion = None

# name -> class, options, DeepSpeed's class
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, None),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-3}, DeepSpeedCPUAdagrad),
    "Lion": (
        shardcore.Lion,
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1},
        DeepSpeedCPULion,
    ),
}
OURS = "shardcore"
Make = Callable[[torch.nn.Parameter], torch.optim.Optimizer]


def engines(name: str, with_deepspeed: bool) -> dict[str, Make]:
    """Return what makes each engine's optimizer over one parameter; OURS runs as on shards."""
    cls, options, deepspeed = OPTIMIZERS[name]
    plain: Make = lambda param: cls([param], **options)  # noqa: E731
    fused: Make = lambda param: cls([param], **options, fused=True)  # noqa: E731
    made = {OURS: plain, "torch": plain}
    if cls is not shardcore.Lion:
        made["torch, fused"] = fused
    if with_deepspeed and deepspeed is not None:
        made["DeepSpeed"] = lambda param: deepspeed([param], **options)
    return made


def on_shards(
    make: Make, weight: torch.Tensor, grad: torch.Tensor, buffers: Buffers, scale: float
) -> Callable[[], None]:
    """Return the step of a range of a shard, whose states lie in host memory."""
    group = make(torch.nn.Parameter(torch.zeros(1))).param_groups[0]
    kind = ElementKind(type(make(torch.nn.Parameter(torch.zeros(1)))))
    state_format = kind.format_of(group, weight.dtype)
    state = {key: buffers.zeros() for key in state_format.keys}
    if "master" in state:
        state["master"].copy_(weight)
    count = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal count
        count += 1
        kind.hyper(group, count, scale).update([weight], [grad], [state])

    return step


def cases_of(
    name: str, subject: str, buffers: Buffers, with_deepspeed: bool
) -> tuple[dict[str, Callable[[], None]], dict[str, torch.Tensor]]:
    """Return the step of every engine, and the weight that it updates."""
    dtype, scale = (torch.float32, 1.0) if subject == "fp32" else (torch.bfloat16, 1 / LOSS_SCALE)
    grad = buffers.copy_of(buffers.grad / scale, dtype)  # the loss scale is a power of two: exact
    steps, weights = {}, {}
    for engine, make in engines(name, with_deepspeed).items():
        weight = weights[engine] = buffers.parameter(dtype).detach()
        if engine == OURS:
            steps[engine] = on_shards(make, weight, grad, buffers, scale)
        elif subject == "fp32":
            param = torch.nn.Parameter(weight)
            param.grad = grad
            steps[engine] = step_of(make(param), buffers)
        else:
            steps[engine] = four_pass_step(make, weight, grad, buffers, scale)
    return steps, weights


def measure(name: str, subject: str, options: argparse.Namespace) -> dict[str, object]:
    """Run one optimizer on one subject; prints the table and returns what JSON holds."""
    steps, weights = cases_of(
        name, subject, Buffers(options.numel, equal_pages=True), options.deepspeed
    )
    seconds = harness.interleave(steps, options.rounds, pause_s=options.pause, warmup=2)
    worst = check_same_work(f"{name}'s {subject}", weights, OURS, "bench_elementwise")
    rows = [["engine", "ms (median)", "time / ours [quartiles]"]]
    result = {}
    for engine, samples in seconds.items():
        ratio = harness.paired(samples, seconds[OURS])
        rows.append([engine, f"{1e3 * harness.spread(samples).median:.1f}", str(ratio)])
        result[engine] = {"seconds": samples, "time_over_ours": asdict(ratio)}
    print(
        f"\n{name}, {subject}, {options.numel:,} elements, {options.threads} threads, "
        f"{options.rounds} rounds"
    )
    print(harness.table(rows))
    return {"optimizer": name, "subject": subject, "weights_agree_to": worst, "engines": result}


def main() -> int:
    parser = suite.make_parser("elementwise", __doc__, rounds=11, pause=0.05, threads=True)
    parser.add_argument(
        "--numel", type=elements, default=48 * 2**20, help="elements (default: 48M)"
    )
    parser.add_argument(
        "--deepspeed",
        action="store_true",
        help="with DeepSpeed's kernels, which compile for minutes",
    )
    options = suite.parse(parser)
    suite.use_threads("elementwise", options)
    if options.deepspeed and DeepSpeedCPULion is None:
        print(
            "DeepSpeed is left out: deepspeed is not installed (pip install --no-build-isolation "
            "deepspeed)"
        )
    results = []
    for name in OPTIMIZERS:
        for subject in ("fp32", "offload"):
            results.append(measure(name, subject, options))
            gc.collect()
    report = {
        **suite.about_run("elementwise", options),
        "huge_pages": huge_page_setting(),
        "results": results,
    }
    harness.write_json(options.out / "elementwise.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
