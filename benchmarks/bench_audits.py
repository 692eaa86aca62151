"""Time steps that are audited, and count the planted flips that audits find.

cost: a step of a stack of blocks on one rank at stage 2, with shard(audit=1) and without; the cost
of audit=100 is a hundredth of the difference. bytes: the copies of an audit, over what an update
reads and writes.

found: two CPU ranks over gloo, every step audited. Each of --flips flips changes a random bit of
the mantissa of a random element of the whole shard of rank 1. (A flip in an exponent often ends in
a skipped step, which shows.) A transient flip is there for one step, so the share that is found is
the probability per audit. A lasting flip is there in every step of a sweep.
"""

import argparse
import json
import logging
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardcore
from benchmarks import harness, suite
from benchmarks.bench_activations import SIZES, Stack
from benchmarks.device import Device
from examples.launch import Rank, launch
from shardcore.distributed.comm import Traffic
from shardcore.engine.audit import Audit

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# name: stage, what is flipped, when, whether the flip lasts
FAULTS: dict[str, tuple[int, str, str, bool]] = {
    "reduced gradient": (2, "grad", "before", False),
    "new weight": (2, "weight", "after", False),
    "new master": (2, "master", "after", False),
    "new exp_avg": (2, "exp_avg", "after", False),
    "new exp_avg_sq": (2, "exp_avg_sq", "after", False),
    "a piece of a gradient, on the way": (2, "received", "reduction", False),
    "new weight, lasting": (2, "weight", "after", True),
    "new exp_avg, lasting": (2, "exp_avg", "after", True),
    "a master, between two steps": (2, "master", "rest", False),
    "a master, between two steps, with a replica": (0, "master", "rest", False),
}


class Found(logging.Handler):
    """Counts what audits log."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith("audit: ")


class Planted:
    """Plants flips in the engine of an optimizer, on this rank."""

    def __init__(self, optimizer: Any, what: str, when: str, chance: random.Random) -> None:
        engine = optimizer._engine
        self._store, self._buckets = engine.store, engine.updater.buckets
        self._what, self._when, self._chance = what, when, chance
        self._steps, self._exchange = engine.store.steps, engine.reducer.exchange
        self._parts = self._exchange._parts
        self._bucket = self._buckets[0]
        self._at, self._bit = 0, 0
        self.on = False
        self._store.steps, self._exchange._parts = self._update, self._receive

    def choose(self) -> None:
        """Choose another element and bit."""
        pieces = [(bucket, piece) for bucket in self._buckets for piece in bucket.pieces]
        numels = [piece.numel for _, piece in pieces]
        self._bucket, piece = self._chance.choices(pieces, numels)[0]
        self._at = piece.start + self._chance.randrange(piece.numel)
        self._bit = self._chance.randrange(32)

    def _flip(self, flat: torch.Tensor) -> None:
        at = self._at % flat.numel()
        bit = self._bit % (7 if flat.itemsize == 2 else 23)  # of the mantissa
        flat[at : at + 1].view(_WORDS[flat.itemsize]).bitwise_xor_(1 << bit)

    def flip(self) -> None:
        """Flip it."""
        if self._what == "grad":
            flat = self._bucket.grad
        elif self._what == "weight":
            flat = self._bucket.owned_weight
        else:
            states = self._store.states_of(self._bucket, 0, self._bucket.owned_numel)
            flat = states[self._what]
        self._flip(flat)

    def _update(self, parts: Any, hypers: Any) -> Iterator[Any]:
        if self.on and self._when == "before":
            self.flip()
        events = list(self._steps(parts, hypers))
        if self.on and self._when == "after":
            self.flip()
        yield from events

    def _receive(self, flight: Any) -> Any:
        parts = self._parts(flight)
        if self.on and self._when == "reduction" and flight.bucket is self._bucket:
            other = 1 - parts.number
            self._flip(parts.received.view(parts.count, -1)[other])
        return parts


def _sharded(stage: int, sweep: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-3)
    audit = {"every": 1, "sweep": sweep}
    return shardcore.shard(model, optimizer, stage, precision="bf16", audit=audit)


def _sent(sweep: int) -> dict[str, int]:
    """Return the bytes that this rank sends in a step: gradients, and for an audit. Collective."""
    model, optimizer = _sharded(2, sweep)
    sent = optimizer._engine.comm.sent
    before = dict(sent)
    _train(model, optimizer, torch.randn(4, 256).bfloat16())
    optimizer._engine.settle_audits()
    names = {"gradients": Traffic.BACKWARD, "audit": Traffic.READ}
    return {name: sent[kind] - before.get(kind, 0) for name, kind in names.items()}


def _count(rank: Rank, fault: tuple[int, str, str, bool], flips: int, sweep: int) -> int:
    """Return how many flips are found. Collective."""
    stage, what, when, lasting = fault
    model, optimizer = _sharded(stage, sweep)
    engine = optimizer._engine
    planted = Planted(optimizer, what, when, random.Random(0))
    log = Found()
    logger = logging.getLogger("shardcore")
    logger.addHandler(log)
    x = torch.randn(4, 256).bfloat16()
    found = 0
    kept = [flat.clone() for flat in _tensors(engine)]
    for _ in range(flips):
        for flat, value in zip(_tensors(engine), kept, strict=True):
            flat.copy_(value)
        planted.choose()
        log.count = 0
        for _ in range(sweep if lasting else 1):
            planted.on = rank.rank == 1
            if planted.on and when == "rest":
                planted.flip()
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.settle_audits()
        found += log.count > 0
    logger.removeHandler(log)
    return found


def _tensors(engine: Any) -> Iterator[torch.Tensor]:
    """Yield all weights, and the states of this rank."""
    for bucket in engine.updater.buckets:
        yield bucket.weight
        yield from engine.store.states_of(bucket, 0, bucket.owned_numel).values()


def run_rank(rank: Rank, flips: int, sweep: int, lasting_sweep: int, path: str) -> int:
    """Count for each kind of fault, and write the result on rank 0."""
    logging.getLogger("shardcore").propagate = False
    result: dict[str, Any] = {"sent_bytes": _sent(sweep)}
    found = result["found"] = {}
    for name, fault in FAULTS.items() if flips else ():
        of = lasting_sweep if fault[3] else sweep
        found[name] = {"sweep": of, "flips": flips, "found": _count(rank, fault, flips, of)}
    if rank.rank == 0:
        Path(path).write_text(json.dumps(result))
    return 0


def training(device: torch.device, sizes: tuple[int, int, int]) -> dict[str, Callable[[], None]]:
    """Return a step without and with audits, each of a model of its own."""
    depth, width, tokens = sizes
    steps: dict[str, Callable[[], None]] = {}
    for name, audit in {"without": None, "audit=1": 1}.items():
        torch.manual_seed(0)
        model: Any = Stack(depth, width).to(device)
        optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-4)
        model, optimizer = shardcore.shard(
            model, optimizer, 2, units=[*model.blocks], precision="bf16", audit=audit
        )
        x = torch.randn(1, tokens, width, device=device)
        steps[name] = partial(_train, model, optimizer, x)
    return steps


def _train(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def copies_of(step: Callable[[], None]) -> tuple[int, int]:
    """Return how many copies the audit of a step makes, and their bytes."""
    copied = []
    to_host = Audit._to_host

    def counted(audit: Audit, flat: torch.Tensor) -> torch.Tensor:
        copied.append(flat.nbytes)
        return to_host(audit, flat)

    Audit._to_host = counted  # type: ignore[method-assign]
    try:
        step()
    finally:
        Audit._to_host = to_host  # type: ignore[method-assign]
    return len(copied), sum(copied)


def main() -> int:
    """Run, print tables, write audits.json into --out."""
    parser = suite.make_parser("audits", str(__doc__), rounds=9, pause=0.1)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--flips", type=int, default=1000, help="of each kind; 0: the cost alone")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = suite.parse(parser)
    device = Device(options.device)
    result = suite.about_run("audits", options)
    sizes = SIZES["tiny" if options.tiny else options.device][:3]
    steps = training(device.torch, sizes)
    calls, copied = copies_of(steps["audit=1"])
    seconds = harness.interleave(steps, options.rounds, pause_s=options.pause, timer=device.timer)
    ratio = harness.paired(seconds["audit=1"], seconds["without"])
    # read and written: master, both moments; read: the gradient; written: the weight
    moved = (2 * 12 + 4 + 2) * sum(p.numel() for p in Stack(*sizes[:2]).parameters())
    result["cost"] = {
        "sizes": sizes,
        "time_over_without": vars(ratio),
        "copies": calls,
        "copied_bytes": copied,
        "copied_over_update": copied / moved,
        "seconds": seconds,
    }
    rows = [["a step with audit=1", "time over without", "bytes copied over the update's"]]
    rows.append(["stage 2", str(ratio), f"{copied / moved:.3f}"])
    print(harness.table(rows), end="\n\n")

    path = options.out / "audits_found.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sweeps = (4, 2) if options.tiny else (100, 10)
    if status := launch(run_rank, 2, "cpu", 1, options.flips, *sweeps, str(path)):
        return status
    of_ranks = json.loads(path.read_text())
    result |= of_ranks
    found = of_ranks["found"]
    path.unlink()
    rows = [["flipped bit", "audits a sweep", "found"]]
    for name, of in found.items():
        rows.append([name, str(of["sweep"]), f"{of['found']} of {of['flips']}"])
    print(harness.table(rows), end="\n\n")
    harness.write_json(options.out / "audits.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
