"""Counts the files that one training iteration passes through, and the calls that land in another file.

Run: python -m tools.trace_iteration [--stage 2] [--files]. Two gloo ranks train a model of six layers; of the second step
rank 0 prints, for forward, backward and step, the files of shardcore/ that ran, how many calls were made from one of them,
and how many of these landed in another. An engine that follows one subject through few files is one that a reader can
follow, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import shardcore

PACKAGE = str(Path(shardcore.__file__).parent)


class Calls:
    """Counts calls between files of the package, on the thread that trains, as pairs (from, to)."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self.pairs: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Calls:
        """Begin to count."""
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
                caller = caller.f_back
            source = "" if caller is None else caller.f_code.co_filename
            self.pairs[source, frame.f_code.co_filename] += 1

    @property
    def files(self) -> set[str]:
        """The files that ran."""
        return {to[len(PACKAGE) + 1 :] for _, to in self.pairs}

    @property
    def inside(self) -> tuple[int, int]:
        """Calls made by a file of the package, and those of them that landed in another."""
        calls = {pair: count for pair, count in self.pairs.items() if pair[0]}
        return sum(calls.values()), sum(count for (source, to), count in calls.items() if source != to)


def _rank(rank: int, store: str, stage: int, show: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), stage, units=list(model))
    found = {name: Calls() for name in ("forward", "backward", "step")}
    for step in range(2):
        x = torch.randn(4, 32)
        counting = found if step == 1 and rank == 0 else {name: Calls() for name in found}
        with counting["forward"]:
            loss = model(x).square().mean()
        with counting["backward"]:
            loss.backward()
        with counting["step"]:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        for name, calls in found.items():
            made, crossing = calls.inside
            share = 100 * crossing / max(made, 1)
            print(f"{name}: {len(calls.files)} files, {made} calls, {share:.0f}% into another file")
            for file in sorted(calls.files) if show else ():
                print(f"  {file}")
        print(f"an iteration at stage {stage}: {len(set().union(*(calls.files for calls in found.values())))} files")
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage (default: 2)")
    parser.add_argument("--files", action="store_true", help="list the files")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/store", options.stage, options.files), nprocs=2)  # type: ignore[no-untyped-call]
    return 0


if __name__ == "__main__":
    sys.exit(main())
