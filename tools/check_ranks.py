"""Trains a small model over several ranks in every layout, and compares bits: torchrun
--nproc-per-node N -m tools.check_ranks.

On GPUs over NCCL, or, where there is one, all ranks on it over a stand-in for NCCL
(tools/nccl_standin.py); with --device cpu over gloo, or the stand-in. Layouts that add gradients in
the same order have one hash of weights and states: all stages, tiers, prefetches and overlapped
steps, flat or in nodes of --ranks-per-node, hybrid sharding or not. Then it times collectives of
the size of a model's units. Rank 0 writes ranks.json into --out. Exit status: 0 all hashes are as
they should be; 1 one is not, or a layout failed. With --leave-out-backward only this: the last rank
leaves out a backward, and each rank must raise an error that says so, well before the group's
timeout of a minute.
"""

import argparse
import gc
import hashlib
import itertools
import os
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from benchmarks import harness
from examples.machine import describe_machine
from tools import nccl_standin

WIDTH, DEPTH, STEPS = 256, 6, 3
LEAVE_OUT_S = 60.0  # the group's timeout
MIB = 1 << 20


class Block(nn.Module):
    """A residual block; collective: with a collective of the user's in its forward."""

    def __init__(self, collective: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.collective = collective

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.collective:
            dist.all_reduce(torch.ones(1, device=x.device))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks, and a head outside of them."""

    def __init__(self, collective: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(collective) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Training:
    """One sharded model, of which the optimizer decays matrices alone."""

    def __init__(self, device: torch.device, layout: dict[str, Any], seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = Model(layout.pop("collective", False)).to(device)
        params = [
            [p for p in model.parameters() if p.ndim > 1],
            [p for p in model.parameters() if p.ndim < 2],
        ]
        adam = shardcore.FusedAdam(
            [{"params": params[0]}, {"params": params[1], "weight_decay": 0.0}],
            lr=1e-3,
            weight_decay=0.1,
        )
        if (mesh := layout.pop("mesh", None)) is not None:
            layout["process_group"] = init_device_mesh(device.type, mesh)
        if (backend := layout.pop("backend", None)) is not None:
            layout["process_group"] = dist.new_group(backend=backend)
        self.model, self.optimizer = shardcore.shard(
            model, adam, precision="bf16", clip_grad_norm=0.5, **layout
        )
        self.device = device

    def step(self, number: int) -> None:
        """Train one step."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(16, WIDTH, generator=generator).to(self.device, torch.bfloat16)
        self.model(x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def hash(self) -> str:
        """Hash master weights and states."""
        digest = hashlib.sha256()
        state = self.optimizer.state_dict()["state"]
        tensors = [value for _, value in sorted(self.model.state_dict().items())]
        tensors += [
            entry[key] for _, entry in sorted(state.items()) for key in ("exp_avg", "exp_avg_sq")
        ]
        for tensor in tensors:
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def layouts(
    world: int, per_node: int, alone: str | None = None
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (order in which gradients are added, name, arguments of shard). alone: a backend
    without gloo beside it.
    """
    cpu = {"optimizer": "cpu", "gradients": "cpu"}
    ways: list[tuple[str, str, range, dict[str, Any]]] = [("flat", "", range(4), {})]
    if 1 < per_node < world:
        ways += [
            (
                "flat",
                f", weights kept by {per_node} ranks",
                range(3, 4),
                {"reshard_after_forward": per_node},
            ),
            ("nodes", f", nodes of {per_node}", range(4), {"ranks_per_node": per_node}),
            ("nodes", ", hybrid", range(1, 4), {"mesh": (world // per_node, per_node)}),
        ]
    for order, way, stages, how in ways:
        for stage, offload, overlap in itertools.product(stages, (False, True), (False, True)):
            if stage > 0 or not offload:
                name = f"stage {stage}{way}{', offload' * offload}{', overlapped' * overlap}"
                tier = {"offload": dict(cpu)} if offload else {}
                yield order, name, {"stage": stage, "overlap_step": overlap, **tier, **how}
    yield (
        "flat",
        "stage 3, weights in host memory",
        {"stage": 3, "offload": {**cpu, "params": "cpu"}},
    )
    yield "flat", "stage 3, nothing ahead", {"stage": 3, "prefetch": 0}
    yield "flat", "stage 3, three ahead", {"stage": 3, "prefetch": 3}
    yield "flat", "stage 3, weights kept", {"stage": 3, "reshard_after_forward": False}
    yield "flat", "stage 3, a user's collective in forward", {"stage": 3, "collective": True}
    if alone is not None:
        for stage in (0, 3):
            yield "flat", f"stage {stage}, a group without gloo", {"stage": stage, "backend": alone}


def run(device: torch.device, layout: dict[str, Any]) -> str:
    """Train in one layout; returns the hash, or what failed, of which ranks have the same."""
    training = Training(device, layout)
    for step in range(STEPS):
        training.step(step)
    return training.hash()


def two_at_once(device: torch.device) -> str:
    """Train two models in turns, of which the first has the hash that it has alone."""
    first, second = (
        Training(device, {"stage": 3}),
        Training(device, {"stage": 2, "overlap_step": True}, seed=1),
    )
    for step in range(STEPS):
        first.step(step)
        second.step(step)
    return first.hash()


def leave_out_backward(device: torch.device) -> bool:
    """Let the last rank leave out a backward; returns whether this rank's error says so in time."""
    training, rank, world = Training(device, {"stage": 2}), dist.get_rank(), dist.get_world_size()
    training.step(0)
    store, begun, said = dist.distributed_c10d._get_default_store(), time.perf_counter(), "no error"
    try:
        if rank < world - 1:
            training.step(1)
        else:
            training.optimizer.step()
        training.hash()
    except RuntimeError as error:
        said = str(error)
    took = time.perf_counter() - begun
    print(f"rank {rank} after {took:.1f} s: {said}", flush=True)
    limit = timedelta(seconds=2 * LEAVE_OUT_S)
    store.set(f"said/{rank}", "")
    # that another rank ends would end a wait, too
    store.wait([f"said/{other}" for other in range(world)], limit)
    store.set(f"left/{rank}", "")
    if rank == 0:  # it serves the store
        store.wait([f"left/{other}" for other in range(world)], limit)
    return said.startswith("ranks wait for different things") and took < LEAVE_OUT_S / 2


def join(
    kind: str, standin: bool, timeout: timedelta | None
) -> tuple[torch.device, str, str | None]:
    """Join the default group; returns this rank's device, what carries its data, and a backend
    without gloo beside it.
    """
    if kind == "cuda":
        standin = torch.cuda.device_count() == 1 < int(os.environ["LOCAL_WORLD_SIZE"])
        device = torch.device("cuda", 0 if standin else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if standin:
        nccl_standin.install(kind)
        dist.init_process_group(nccl_standin.backend(kind), timeout=timeout)
        return device, nccl_standin.NAME, nccl_standin.backend(kind, alone=True)
    if kind == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout)
        return device, "nccl", "nccl"
    dist.init_process_group("gloo", timeout=timeout)
    return device, "gloo", None


def rates(device: torch.device, sizes_mib: tuple[int, ...]) -> list[dict[str, float]]:
    """Time gathers and exchanges of these sizes; returns GB/s that a rank sends, best of five."""
    world, found = dist.get_world_size(), []
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for size in sizes_mib:
        full = torch.zeros(size * MIB // world * world, dtype=torch.uint8, device=device)
        other, own = torch.empty_like(full), full.chunk(world)[dist.get_rank()]
        entry: dict[str, float] = {"MiB": size}
        calls = {
            "all_gather": lambda f=full, o=own: gather(f, o),
            "all_to_all": lambda f=full, o=other: dist.all_to_all_single(o, f),
        }
        for name, call in calls.items():
            best = float("inf")
            for _ in range(6):
                dist.barrier()
                begun = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                best = min(best, time.perf_counter() - begun)
            entry[f"{name}, GB/s"] = round(full.nbytes * (world - 1) / world / best / 1e9, 2)
        found.append(entry)
    return found


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--standin", action="store_true", help="with --device cpu: over the stand-in for NCCL"
    )
    parser.add_argument("--leave-out-backward", action="store_true", help="only this")
    parser.add_argument(
        "--ranks-per-node", type=int, help="of the layouts in nodes (default: half of the ranks)"
    )
    parser.add_argument("--only", default="", help="layouts whose name has this")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="*",
        default=[32, 128, 512],
        help="MiB of the collectives that are timed",
    )
    parser.add_argument("--out", type=Path, default=Path("build/check_ranks"))
    return parser


def main() -> int:
    """Run on this rank."""
    options = make_parser().parse_args()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=LEAVE_OUT_S) if options.leave_out_backward else None
    device, over, alone = join(options.device, options.standin, timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.leave_out_backward:
        told = leave_out_backward(device)
        os._exit(0 if told else 1)  # the group is aborted, which its own end might wait for
    hashes: dict[str, dict[str, str]] = {}
    problems: list[str] = []
    wanted = [
        one
        for one in layouts(world, options.ranks_per_node or world // 2, alone)
        if options.only in one[1]
    ]
    for order, name, layout in [
        *wanted,
        *([("flat", "two models at once", None)] if options.only in "two models at once" else []),
    ]:
        begun = time.perf_counter()
        try:
            found = two_at_once(device) if layout is None else run(device, layout)
        except Exception as error:
            traceback.print_exc()
            found = f"failed: {type(error).__name__}: {str(error)[:300]}"
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, found)
        gc.collect()
        found = everyone[0] if len(set(everyone)) == 1 else f"ranks differ: {everyone}"
        hashes.setdefault(order, {})[name] = found
        expected = next(iter(hashes[order].values()))
        if found != expected or ":" in found:
            problems.append(f"{name}: {found}; expected {expected}")
        if rank == 0:
            print(
                f"{found:16}  {order:5}  {name}  ({time.perf_counter() - begun:.1f} s)", flush=True
            )
    if (
        len(hashes) == 2
        and world > 3
        and len({next(iter(of.values())) for of in hashes.values()}) == 1
    ):
        problems.append(
            "adding in nodes gave the bits of flat adding; expected others, else this shows nothing"
        )
    speeds = rates(device, tuple(options.sizes))
    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        result = {
            "world": world,
            "device": options.device,
            "over": over,
            "hashes": hashes,
            "problems": problems,
        }
        harness.write_json(
            options.out / "ranks.json", {"machine": describe_machine(), **result, "rates": speeds}
        )
        for entry in speeds:
            print(", ".join(f"{key} {value}" for key, value in entry.items()))
        count = sum(map(len, hashes.values()))
        print(
            "\n".join(problems)
            or f"{count} layouts of {world} ranks over {over}: one hash per order of adding"
        )
    dist.barrier()
    dist.destroy_process_group()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
