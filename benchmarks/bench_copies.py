"""Time the copies of the cpu tier beside plain ones: to host memory, from it, and both at once.

Every case moves --copies buffers of a size in a row, in each direction that it has, and is over
when the last has arrived. Cases take turns. All buffers are there before anything is timed, and at
the end each must hold what was sent.

    shardcore   _C.HostTier: its queues, events, counted copies, its own page-locked memory
    plain       torch: copy_(non_blocking=True) between device memory and pin_memory=True, a stream
                a direction

What counts is the rate over the plain one's of the same round: 1 means that the tier costs nothing.
With --device cpu the queues are host threads, and a plain copy is copy_ in the caller; that shows
that this program works, and no more.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict

import torch

from benchmarks import harness, suite
from benchmarks.device import Device
from examples.arguments import elements, positive
from shardcore._native import _C

TO_TIER, FROM_TIER = "to host", "from host"
WAYS: dict[str, Sequence[str]] = {
    TO_TIER: (TO_TIER,),
    FROM_TIER: (FROM_TIER,),
    "both at once": (TO_TIER, FROM_TIER),
}
TARGET = 0.95  # of a plain copy's rate


class Buffers:
    """A buffer on the device and one in host memory for each direction, where the source holds
    other bytes than the target.
    """

    def __init__(
        self, size_bytes: int, device: torch.device, empty: Callable[[int], torch.Tensor]
    ) -> None:
        self.sources, self.targets = {}, {}
        for way in (TO_TIER, FROM_TIER):
            here, there = (
                torch.zeros(size_bytes, dtype=torch.uint8, device=device),
                empty(size_bytes),
            )
            source, target = (here, there) if way == TO_TIER else (there, here)
            source.copy_(
                torch.arange(251, dtype=torch.uint8, device=source.device).repeat(
                    size_bytes // 251 + 1
                )[:size_bytes]
            )
            target.zero_()
            self.sources[way], self.targets[way] = source, target

    def check(self, name: str, ways: Sequence[str]) -> None:
        """ValueError if a target does not hold what was sent."""
        for way in ways:
            if not torch.equal(self.targets[way].cpu(), self.sources[way].cpu()):
                raise ValueError(
                    f"bench_copies: {name} {way} brought other bytes than were sent; expected the "
                    f"same"
                )
            self.targets[way].zero_()


class Tier:
    """Copies through a HostTier."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.tier = _C.HostTier(device, True)
        self.buffers = Buffers(size_bytes, device, lambda size: self.tier.empty(size, torch.uint8))

    def queue(self, way: str) -> None:
        """Begin one copy."""
        copy = self.tier.to_tier if way == TO_TIER else self.tier.from_tier
        copy(self.buffers.targets[way], self.buffers.sources[way])

    def finish(self) -> None:
        """Wait until all have arrived."""
        self.tier.synchronize()


class Plain:
    """Copies by torch alone."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.buffers = Buffers(
            size_bytes, device, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        )
        self.streams = {
            way: torch.cuda.Stream(device) if cuda else None for way in (TO_TIER, FROM_TIER)
        }

    def queue(self, way: str) -> None:
        """Begin one copy."""
        stream = self.streams[way]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self.buffers.targets[way].copy_(self.buffers.sources[way], non_blocking=True)

    def finish(self) -> None:
        """Wait until all have arrived."""
        for stream in self.streams.values():
            if stream is not None:
                stream.synchronize()


ENGINES: dict[str, type[Tier] | type[Plain]] = {"shardcore": Tier, "plain": Plain}


def case_of(engine: Tier | Plain, ways: Sequence[str], copies: int) -> Callable[[], None]:
    """Return a call that makes `copies` copies each way and waits for all."""

    def call() -> None:
        for _ in range(copies):
            for way in ways:
                engine.queue(way)
        engine.finish()

    return call


def plain_rates(device: Device, size_bytes: int, copies: int, rounds: int) -> dict[str, float]:
    """Return the bytes per second of plain copies each way while both are under way: what the
    link gives a training step.
    """
    case = case_of(Plain(size_bytes, device.torch), WAYS["both at once"], copies)
    wait_for(device)
    seconds = harness.interleave({"both": case}, rounds, pause_s=0)["both"]
    rate = copies * size_bytes / harness.spread(seconds).median
    return {TO_TIER: rate, FROM_TIER: rate}


def wait_for(device: Device) -> None:
    """Wait until nothing is queued on the device: streams of copies do not know what made their
    sources.
    """
    if device.is_cuda:
        torch.cuda.synchronize()


def measure(device: Device, size_bytes: int, options: argparse.Namespace) -> dict[str, object]:
    """Time all ways at one size; returns what JSON holds."""
    device.free_bytes()
    engines = {name: make(size_bytes, device.torch) for name, make in ENGINES.items()}
    wait_for(device)
    cases = {
        f"{name}, {way}": case_of(engine, ways, options.copies)
        for name, engine in engines.items()
        for way, ways in WAYS.items()
    }
    seconds = harness.interleave(cases, options.rounds, pause_s=options.pause, warmup=2)
    for name, engine in engines.items():
        for way, ways in WAYS.items():
            for target in engine.buffers.targets.values():
                target.zero_()
            wait_for(device)
            cases[f"{name}, {way}"]()
            engine.buffers.check(name, ways)
    tier = engines["shardcore"].tier
    result: dict[str, object] = {
        "size_bytes": size_bytes,
        "pinned_bytes": tier.bytes_pinned,
        "pin_refusal": tier.pin_refusal,
        "ways": {},
    }
    for way, ways in WAYS.items():
        moved = options.copies * size_bytes * len(ways)
        of_engine = {name: seconds[f"{name}, {way}"] for name in engines}
        result["ways"][way] = {
            "seconds": of_engine,
            "gb_per_second": {
                name: moved / harness.spread(samples).median / 1e9
                for name, samples in of_engine.items()
            },
            "rate_over_plain": asdict(harness.paired(of_engine["plain"], of_engine["shardcore"])),
        }
    return result


def shortfalls(report: dict[str, object]) -> list[str]:
    """Say what is below the target, and what was not pinned though it should be; sizes below
    --judge are only told.
    """
    found = []
    for result in report["sizes"]:
        size = f"{result['size_bytes'] / 2**20:g} MiB"
        if result["pin_refusal"]:
            found.append(f"{size} could not be pinned: {result['pin_refusal']}")
        if result["size_bytes"] < report["options"]["judge"]:
            continue
        for way, figures in result["ways"].items():
            ratio = figures["rate_over_plain"]["median"]
            if not ratio >= TARGET:
                found.append(f"{size} {way}: {ratio:.3f} of a plain copy's rate; expected {TARGET}")
    return found


def main() -> int:
    parser = suite.make_parser("copies", __doc__, rounds=10, pause=0.01)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: figures without meaning"
    )
    parser.add_argument(
        "--sizes",
        type=elements,
        nargs="+",
        default=[2**20, 2**24, 2**26, 2**28],
        help="bytes of a copy (default: 1M to 256M)",
    )
    parser.add_argument(
        "--copies", type=positive, default=8, help="in a row and direction (default: %(default)s)"
    )
    parser.add_argument(
        "--judge",
        type=elements,
        default=2**24,
        help="bytes from which on the target holds (default: 16M, a chunk of a step)",
    )
    options = suite.parse(parser)
    device = Device(options.device)
    report: dict[str, object] = {
        **suite.about_run("copies", options),
        "device": device.name,
        "target": TARGET,
        "sizes": [],
    }
    rows = [["copies of", *(f"{way}, GB/s" for way in WAYS), *(f"{way} / plain" for way in WAYS)]]
    panels = []
    for size_bytes in options.sizes:
        result = measure(device, size_bytes, options)
        report["sizes"].append(result)
        ratios = {
            way: harness.Spread(**figures["rate_over_plain"])
            for way, figures in result["ways"].items()
        }
        rates = [
            f"{figures['gb_per_second']['shardcore']:.2f}" for figures in result["ways"].values()
        ]
        name = f"{size_bytes / 2**20:g} MiB"
        rows.append([name, *rates, *map(str, ratios.values())])
        panels.append(
            harness.Panel(
                f"copies of {name}",
                "rate, plain = 1 (median and quartiles)",
                ratios,
                lambda _: True,
                mark=TARGET,
            )
        )
        report["below_target"] = shortfalls(report)
        harness.save_json(options.out / "copies.json", report)
    print(f"{device.name}, {options.copies} copies in a row, {options.rounds} rounds")
    print(harness.table(rows))
    print("\n".join(report["below_target"]) or f"every rate is at least {TARGET} of a plain copy's")
    harness.write_json(options.out / "copies.json", report)
    harness.write_png(
        options.out / "copies.png", panels, f"Copies between {device.name} and host memory"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
