"""Time delivering the weights of a sharded Llama to an inference engine, parameter by parameter,
beside DeepSpeed's and FSDP2's ways, on two CPU ranks over gloo (with two GPUs, over NCCL).

Every rank receives each full parameter in bfloat16, reads one element of it and drops it:

    all-gather             one all_gather_into_tensor of each block's bytes: the aim
    stream                 shardcore.stream_params at stage 3
    stream to rank 0       the same with ranks=[0]
    changes                stream_params with changes, where 1% of the weights changed
    gathered               shardcore.zero.GatheredParameters([param]), one parameter after another
    deepspeed              deepspeed.zero.GatheredParameters([param])
    fsdp2                  DTensor.full_tensor() of each parameter
    state dict             torch's get_model_state_dict(full_state_dict=True) of the FSDP2 model

All models are in the same processes, and cases take turns in random order. seconds: of the slowest
rank. extra: by how much the anonymous memory of a rank grows, at most, over the bytes of the
largest unit. sent: the bytes that a rank sends, of those of a whole sync (shardcore only).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness, suite
from benchmarks.bench_load import config_of, peak_of

RANKS = 2
ZERO_3 = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    "zero_allow_untested_optimizer": True,
}
CASES = (
    "all-gather",
    "stream",
    "stream to rank 0",
    "changes",
    "gathered",
    "deepspeed",
    "fsdp2",
    "state dict",
)


def make_model(gb: float) -> nn.Module:
    """Return the model with random weights, the same on every rank."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(gb)).to(torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape[-1]).mul_(0.02))
    return model


def take(value: torch.Tensor) -> None:
    """Use a full parameter."""
    value.view(-1)[-1].item()


def counted(sharded: Any, case: Callable[[], None]) -> Callable[[], int]:
    """Return a case that returns the bytes that this rank has sent."""
    sent = sharded._shardcore_engine.comm.sent

    def run() -> int:
        before = sum(sent.values())
        case()
        return int(sum(sent.values()) - before)

    return run


def of_shardcore(model: nn.Module) -> dict[str, Callable[[], int]]:
    import shardcore

    zero: Any = shardcore.zero  # type: ignore[attr-defined]
    sharded, _ = shardcore.shard(model, None, 3)

    def stream(ranks: list[int] | None) -> None:
        for _, value in shardcore.stream_params(sharded, ranks=ranks):
            take(value)

    def gathered() -> None:
        for param in sharded.parameters():
            with zero.GatheredParameters([param]):
                take(param.detach())

    return {
        "stream": counted(sharded, lambda: stream(None)),
        "stream to rank 0": counted(sharded, lambda: stream([0])),
        "gathered": counted(sharded, gathered),
    }


def of_changes(model: nn.Module) -> dict[str, Callable[[], int]]:
    import shardcore

    optimizer = shardcore.FusedAdam(model.parameters())
    sharded, _ = shardcore.shard(model, optimizer, 3)
    changes = shardcore.track_changes(sharded)
    for _ in shardcore.stream_params(sharded, changes=changes):
        pass
    torch.manual_seed(dist.get_rank())
    bits = {}
    for bucket in sharded._shardcore_engine.updater.buckets:
        changed = torch.rand(bucket.owned_numel, device=bucket.bits["device"].device) < 0.01
        powers = 1 << torch.arange(8, device=changed.device)
        bits[bucket] = (changed.view(-1, 8) * powers).sum(1).to(torch.uint8)

    def changed_elements() -> None:
        for bucket, noted in bits.items():  # as a step notes them
            bucket.bits["device"].copy_(noted)
        for _, _, values in shardcore.stream_params(
            sharded, changes=changes, since=changes.version
        ):
            take(values)

    return {"changes": counted(sharded, changed_elements)}


def of_deepspeed(model: nn.Module) -> dict[str, Callable[[], None]]:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=ZERO_3
    )

    def gathered() -> None:
        for param in engine.module.parameters():
            with deepspeed.zero.GatheredParameters([param]):
                take(param.detach())

    return {"deepspeed": gathered}


def of_fsdp2(model: nn.Module) -> dict[str, Callable[[], None]]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    blocks: Any = model
    for block in blocks.model.layers:
        fully_shard(block)
    fully_shard(model)

    def full_tensors() -> None:
        for param in model.parameters():
            whole: Any = param
            take(whole.full_tensor().detach())

    def state_dict() -> None:
        options = StateDictOptions(full_state_dict=True)
        for value in get_model_state_dict(model, options=options).values():
            take(value)

    return {"fsdp2": full_tensors, "state dict": state_dict}


def all_gather(shapes: list[int], device: torch.device) -> Callable[[], None]:
    """Return a case that gathers so many elements at a time."""
    shards = [
        torch.zeros(-(-numel // RANKS), dtype=torch.bfloat16, device=device) for numel in shapes
    ]

    def gather() -> None:
        for shard in shards:
            full = torch.empty(RANKS * shard.numel(), dtype=shard.dtype, device=device)
            dist.all_gather_into_tensor(full, shard)
            take(full)

    return gather


def run_rank(options: argparse.Namespace) -> None:
    """Run all rounds in this process; rank 0 prints the result as JSON."""
    on_gpu = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.set_num_threads(1)
    model = make_model(options.gb)
    units = {
        name: sum(param.numel() for param in block.parameters())
        for name, block in model.named_modules()
        if type(block).__name__ == "LlamaDecoderLayer"
    }
    numel = sum(param.numel() for param in model.parameters())
    shapes = [*units.values(), numel - sum(units.values())]
    cases: dict[str, Callable[[], int | None]] = {"all-gather": all_gather(shapes, device)}
    makers: dict[tuple[str, ...], Callable[[nn.Module], Any]] = {
        ("stream", "stream to rank 0", "gathered"): of_shardcore,
        ("changes",): of_changes,
        ("deepspeed",): of_deepspeed,
        ("fsdp2", "state dict"): of_fsdp2,
    }
    del model
    for names, make in makers.items():
        if any(name in options.cases for name in names):
            cases |= make(make_model(options.gb).to(device))
    cases = {name: cases[name] for name in options.cases}
    found: dict[str, Any] = {
        name: {"seconds": [], "peak_bytes": [], "sent_bytes": []} for name in cases
    }
    for names in harness.random_order(list(cases), options.rounds + 1, seed=0):
        for name in names:
            peak = {"peak_bytes": 0}
            dist.barrier()
            begun = time.perf_counter()
            with peak_of(peak):
                sent = cases[name]()
            dist.barrier()
            found[name]["seconds"].append(time.perf_counter() - begun)
            found[name]["peak_bytes"].append(peak["peak_bytes"])
            found[name]["sent_bytes"].append(sent)
    for each in found.values():  # the first round fills caches
        each["seconds"], each["peak_bytes"] = each["seconds"][1:], each["peak_bytes"][1:]
        each["sent_bytes"] = each["sent_bytes"][-1]
    all_found: list[Any] = [None] * RANKS
    dist.all_gather_object(all_found, found)
    if dist.get_rank() == 0:
        about = {"bytes": 2 * numel, "largest_unit_bytes": 2 * max(shapes)}
        print("result " + json.dumps([about, all_found]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = suite.make_parser("weight_sync", __doc__, rounds=7, pause=0.0)
    parser.add_argument("--gb", type=float, default=1.5, help="of weights (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = suite.parse(parser)
    if options.rank:
        run_rank(options)
        return 0
    with tempfile.TemporaryDirectory() as logs:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if torch.cuda.device_count() < RANKS:
            environment["DS_ACCELERATOR"] = "cpu"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", "-m", "benchmarks.bench_weight_sync", "--rank"]
        command += ["--gb", str(options.gb), "--rounds", str(options.rounds), "--out", logs]
        done = subprocess.run(
            [*command, "--cases", *options.cases],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        raise RuntimeError(f"failed with {done.returncode}:\n{done.stdout[-12000:]}")
    about, ranks = json.loads(lines[-1].removeprefix("result "))
    report: dict[str, Any] = {**suite.about_run("weight_sync", options), **about, "cases": {}}
    rows = [["", "seconds", "of an all-gather", "extra, of a unit", "sent"]]
    whole = about["bytes"] * (RANKS - 1) / RANKS
    for case in options.cases:
        seconds = [
            max(each) for each in zip(*(rank[case]["seconds"] for rank in ranks), strict=True)
        ]
        peak = max(max(rank[case]["peak_bytes"]) for rank in ranks)
        sent = max((rank[case]["sent_bytes"] or 0) for rank in ranks)
        found = {"seconds": seconds, "peak_bytes": peak, "sent_bytes": sent}
        report["cases"][case] = found
        if "all-gather" in report["cases"]:
            ratio = harness.paired(seconds, report["cases"]["all-gather"]["seconds"])
            found["of_all_gather"] = ratio._asdict() if hasattr(ratio, "_asdict") else vars(ratio)
            rows.append(
                [
                    case,
                    f"{harness.spread(seconds).median:.3f}",
                    f"{ratio.median:.2f}",
                    f"{peak / about['largest_unit_bytes']:.2f}",
                    f"{sent / whole:.1%}" if sent else "",
                ]
            )
    print(harness.table(rows))
    harness.write_json(options.out / "weight_sync.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
