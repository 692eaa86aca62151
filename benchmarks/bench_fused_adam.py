"""Time FusedAdam on a GPU beside other optimizers, as a share of the device's copy bandwidth in the
same run.

Workloads: flat tensors from 1e6 to 1e9 elements, GPT-2 124M's 148 tensors, one rank's shard of
Llama 7B over 8 ranks, and 20,000 tensors of 100 elements. At each, the headline kinds of step; at
one flat size, every combination of weight and gradient dtype, states and master. Then the norm of a
list of gradients, as a share of what a kernel that only reads reaches; and the host's time for a
step on an idle device, with gradients that lie where those of the last step did, and elsewhere.

share = bytes that the step must move / its time, over the same for a large copy within device
memory, in the same round. Small workloads can stay in the L2 cache and so be above 1. Times are
from CUDA events around several steps in a row; where the host is slower than the device, it is the
host's time. Cases take turns in a random order. --device cpu only tests this program.
"""

import argparse
import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

import shardcore
from benchmarks import adam_kinds, harness, suite
from benchmarks.adam_kinds import OPTIONS, SHORT, Kind, Shapes, differences, numel_of
from benchmarks.device import Device
from examples.arguments import positive
from shardcore._native import _C

FP32 = Kind()
# what torch does with bfloat16 parameters
PURE_BF16 = Kind(torch.bfloat16, torch.bfloat16, None, "bf16")
BF16 = Kind(torch.bfloat16, torch.bfloat16)
HEADLINES = (
    FP32,
    replace(BF16, master="fp32"),
    replace(BF16, master="split"),
    replace(BF16, master="split", state_dtype="8bit"),
    PURE_BF16,
)
OURS = "shardcore: "


@dataclass(frozen=True)
class Peer:
    """One optimizer class, and the kinds of step that it does as we do, so in the same bytes.

    ``exact``: it keeps float32 throughout, so its weights must agree with ours.
    """

    name: str
    module: str
    attribute: str
    kinds: Sequence[Kind]
    options: Mapping[str, object] = field(default_factory=dict)
    exact: bool = True
    on_cpu: bool = False

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module.split(".")[0]) is not None

    def make(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer. Raises whatever its import or its constructor raises: it may be
        half installed.
        """
        cls = getattr(importlib.import_module(self.module), self.attribute)
        optimizer: torch.optim.Optimizer = cls(params, **OPTIONS, **self.options)
        return optimizer


ADAM_W = {"adam_w_mode": True}
PEERS = (
    Peer("torch AdamW fused", "torch.optim", "AdamW", [FP32], {"fused": True}, on_cpu=True),
    Peer("torch AdamW foreach", "torch.optim", "AdamW", [FP32], {"foreach": True}, on_cpu=True),
    Peer(
        "torch AdamW fused, bf16",
        "torch.optim",
        "AdamW",
        [PURE_BF16],
        {"fused": True},
        exact=False,
        on_cpu=True,
    ),
    Peer(
        "torch AdamW foreach, bf16",
        "torch.optim",
        "AdamW",
        [PURE_BF16],
        {"foreach": True},
        exact=False,
        on_cpu=True,
    ),
    Peer("Apex FusedAdam", "apex.optimizers", "FusedAdam", [FP32], ADAM_W),
    Peer(
        "Transformer Engine FusedAdam",
        "transformer_engine.pytorch.optimizers",
        "FusedAdam",
        [FP32],
        ADAM_W,
    ),
    Peer("DeepSpeed FusedAdam", "deepspeed.ops.adam", "FusedAdam", [FP32], ADAM_W),
    Peer("bitsandbytes AdamW", "bitsandbytes.optim", "AdamW", [FP32]),
    Peer(
        "bitsandbytes AdamW8bit",
        "bitsandbytes.optim",
        "AdamW8bit",
        [Kind(state_dtype="8bit")],
        exact=False,
    ),
)


@dataclass
class Case:
    """One optimizer at work: ``step`` is timed, ``weight`` what it updates, ``peer`` None for
    ours.
    """

    name: str
    kind: Kind
    peer: Peer | None
    step: Callable[[], None]
    weight: torch.Tensor


def workloads(scale: int) -> dict[str, Shapes]:
    """Return the lists of shapes by name; ``scale`` divides them (1 for the real ones)."""
    flats = {
        f"flat {numel:.0e}".replace("e+0", "e"): [(numel // scale,)]
        for numel in (10**6, 10**7, 10**8, 10**9)
    }
    if scale > 1:
        return {
            **flats,
            "GPT-2": adam_kinds.gpt2_shapes(1, 8, 100, 16),
            "20 tiny tensors": [(100,)] * 20,
        }
    return {
        **flats,
        "GPT-2 124M": adam_kinds.gpt2_shapes(),
        "Llama 7B, one of 8 ranks": adam_kinds.shard(adam_kinds.llama_shapes(), 8),
        "20,000 tiny tensors": [(100,)] * 20_000,
    }


def random_list(
    device: Device, shapes: Shapes, dtype: torch.dtype, size: float, seed: int
) -> list[torch.Tensor]:
    """Make one tensor a shape with normal values of that size; equal seeds give values that
    round from the same numbers.
    """
    generator = torch.Generator(device.torch).manual_seed(seed)
    draw = {"device": device.torch, "generator": generator, "dtype": torch.float32}
    return [torch.randn(shape, **draw).mul_(size).to(dtype) for shape in shapes]


def make_case(
    device: Device, shapes: Shapes, grads: list[torch.Tensor], kind: Kind, peer: Peer | None
) -> Case:
    """Set up one optimizer and take its first step, which makes its states. Gradients are shared
    by all cases.
    """
    params = [
        torch.nn.Parameter(weight)
        for weight in random_list(device, shapes, kind.weight, 0.02, seed=0)
    ]
    for param, grad in zip(params, grads, strict=True):
        if grad.dtype != param.dtype:
            param.grad_dtype = grad.dtype
        param.grad = grad
    optimizer = (
        shardcore.FusedAdam(params, **OPTIONS, **kind.options)
        if peer is None
        else peer.make(params)
    )
    optimizer.step()
    largest = max(params, key=torch.Tensor.numel)
    return Case(
        f"{OURS}{kind}" if peer is None else peer.name,
        kind,
        peer,
        optimizer.step,
        largest.detach().view(-1),
    )


def units(kinds: Iterable[Kind], device: Device) -> list[list[tuple[Kind, Peer | None]]]:
    """List what must be measured together: each of our kinds with the installed peers that do
    the same.
    """
    peers = [peer for peer in PEERS if peer.installed and (device.is_cuda or peer.on_cpu)]
    return [
        [(kind, None), *((kind, peer) for peer in peers if kind in peer.kinds)] for kind in kinds
    ]


def pack(wanted: list[int], room: int | None) -> list[list[int]]:
    """Group the indices of units that need so many bytes, in order, so that each group fits; too
    large ones are left out.
    """
    groups: list[list[int]] = []
    left = 0
    for index, size in enumerate(wanted):
        if room is not None and size > room:
            continue
        if not groups or (room is not None and size > left):
            groups.append([])
            left = room or 0
        groups[-1].append(index)
        left -= size
    return groups


def unit_bytes(unit: list[tuple[Kind, Peer | None]], numel: int) -> int:
    """Bytes that a unit needs: its cases, a gradient, and what foreach and the float32 random
    numbers take for a while.
    """
    kind = unit[0][0]
    return numel * (len(unit) * kind.bytes_held + kind.grad.itemsize + 8) + 2**28


def measure(
    device: Device, name: str, shapes: Shapes, kinds: Iterable[Kind], options: argparse.Namespace
) -> dict[str, object]:
    """Time all kinds and their peers over one list of shapes; prints the table and returns what
    JSON holds.
    """
    numel = numel_of(shapes)
    result = {
        "workload": name,
        "numel": numel,
        "tensors": len(shapes),
        "cases": [],
        "left_out": [],
        "weights_agree_to": None,
    }
    all_units = units(kinds, device)
    free = device.free_bytes()
    room = None if free is None else int(free * 0.9) - 2 * options.copy_bytes
    groups = pack([unit_bytes(unit, numel) for unit in all_units], room)
    fitting = {index for group in groups for index in group}
    for index, unit in enumerate(all_units):
        if index not in fitting:
            leave_out(
                result,
                f"{OURS}{unit[0][0]}",
                f"needs {unit_bytes(unit, numel) / 2**30:.0f} GiB, {room / 2**30:.0f} are there",
            )
    for group in groups:
        measure_group(device, shapes, [all_units[index] for index in group], options, result)
    print_cases(result, options)
    return result


def leave_out(result: dict[str, object], engine: str, reason: str) -> None:
    """Note what was not measured, and why."""
    result.setdefault("left_out", []).append({"engine": engine, "reason": reason})
    print(f"{result['workload']}: {engine} is left out: {reason}")


def measure_group(
    device: Device,
    shapes: Shapes,
    some: list[list[tuple[Kind, Peer | None]]],
    options: argparse.Namespace,
    result: dict[str, object],
) -> None:
    """Time what fits into memory at once; adds to ``result``."""
    device.free_bytes()
    numel = numel_of(shapes)
    grads = {
        dtype: random_list(device, shapes, dtype, 1e-3, seed=1)
        for dtype in {unit[0][0].grad for unit in some}
    }
    cases: dict[str, Case] = {}
    for kind, peer in (entry for unit in some for entry in unit):
        case = try_case(device, shapes, grads[kind.grad], kind, peer, result)
        if case is not None:
            cases[case.name] = case
    calls = {
        "copy": device.copier(options.copy_bytes),
        **{name: case.step for name, case in cases.items()},
    }
    seconds = timed(device, calls, shapes, options)
    exact = {
        n: case.weight
        for n, case in cases.items()
        if case.kind == FP32 and (case.peer is None or case.peer.exact)
    }
    others: dict[str, float] = {}
    if exact:
        agree, others = differences(exact, f"{OURS}{FP32}")
        if others and not any(
            case.peer is not None for name, case in cases.items() if name in agree
        ):
            raise ValueError(
                f"bench_fused_adam: fp32 weights differ from every peer's: {others}; expected the "
                f"same but for rounding"
            )
        result["weights_agree_to"] = max(agree.values())
    for name, difference in others.items():
        leave_out(
            result,
            name,
            f"its weights differ from ours by {difference:.1e} relative, as another's do not: "
            f"other work",
        )
        del cases[name]
    for name, case in cases.items():
        ours = seconds[f"{OURS}{case.kind}"]
        result["cases"].append(
            {
                "engine": name,
                "ours": case.peer is None,
                "kind": str(case.kind),
                "bytes_per_element": case.kind.bytes_moved,
                **harness.rates(
                    seconds[name],
                    seconds["copy"],
                    numel * case.kind.bytes_moved,
                    2 * options.copy_bytes,
                ),
                "time_over_ours": asdict(harness.paired(seconds[name], ours)),
            }
        )


def try_case(
    device: Device,
    shapes: Shapes,
    grads: list[torch.Tensor],
    kind: Kind,
    peer: Peer | None,
    result: dict[str, object],
) -> Case | None:
    """make_case; a peer that does not work is noted in ``result``, for it must not stop the run.
    Ours must work.
    """
    try:
        return make_case(device, shapes, grads, kind, peer)
    except Exception as error:
        if peer is None:
            raise
        leave_out(result, peer.name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return None


def timed(
    device: Device,
    calls: Mapping[str, Callable[[], object]],
    shapes: Shapes,
    options: argparse.Namespace,
) -> dict[str, list[float]]:
    """Interleave the calls; a sample of a small list is many steps, so that the queue never runs
    empty.
    """
    few = max(2, 2**15 // len(shapes))  # of a list so long that the host takes milliseconds
    repeats = options.repeats or min(100, max(5, 2**32 // numel_of(shapes)), few)
    return harness.interleave(
        calls, options.rounds, repeats=repeats, pause_s=options.pause, warmup=2, timer=device.timer
    )


def print_cases(result: Mapping[str, object], options: argparse.Namespace) -> None:
    rows = [["engine", "bytes", "ms (median)", "GB/s", "share of copy [quartiles]", "time / ours"]]
    for case in result["cases"]:
        ms = harness.spread(case["seconds"]).median * 1e3
        share, ratio = harness.Spread(**case["share"]), harness.Spread(**case["time_over_ours"])
        bytes_each = str(case["bytes_per_element"])
        rows.append(
            [
                case["engine"],
                bytes_each,
                f"{ms:.3f}",
                f"{case['gb_per_second']:.0f}",
                str(share),
                str(ratio),
            ]
        )
    print(
        f"\n{result['workload']}: {result['numel']:,} elements in {result['tensors']:,} tensors, "
        f"{options.rounds} rounds"
    )
    print(harness.table(rows))


def measure_norm(
    device: Device, name: str, shapes: Shapes, options: argparse.Namespace
) -> dict[str, object]:
    """Time the squared norm of a list, and torch's norm of it, beside a kernel that only reads."""
    numel = numel_of(shapes)
    result = {"workload": name, "numel": numel, "tensors": len(shapes), "cases": [], "left_out": []}
    free = device.free_bytes()
    if free is not None and 16 * numel + options.copy_bytes > free:
        leave_out(
            result,
            "norm",
            f"needs {16 * numel / 2**30:.0f} GiB of memory, {free / 2**30:.0f} are there",
        )
        return result
    calls, bytes_each = {"read": device.reader(options.copy_bytes)}, {}
    for dtype, short in SHORT.items():
        tensors = random_list(device, shapes, dtype, 1e-3, seed=1)
        calls[f"{OURS}{short}"] = lambda tensors=tensors: _C.sq_norm(tensors)
        calls[f"torch: {short}"] = lambda tensors=tensors: torch.nn.utils.get_total_norm(tensors)
        bytes_each |= dict.fromkeys(list(calls)[-2:], dtype.itemsize)
    seconds = timed(device, calls, shapes, options)
    rows = [["norm", "ms (median)", "GB/s", "share of reading [quartiles]"]]
    for engine, size in bytes_each.items():
        case = harness.rates(seconds[engine], seconds["read"], numel * size, options.copy_bytes)
        result["cases"].append(
            {"engine": engine, "ours": engine.startswith(OURS), "bytes_per_element": size, **case}
        )
        share, ms = harness.Spread(**case["share"]), harness.spread(seconds[engine]).median * 1e3
        rows.append([engine, f"{ms:.3f}", f"{case['gb_per_second']:.0f}", str(share)])
    print(
        f"\nnorm of {name}: {numel:,} elements in {len(shapes):,} tensors, {options.rounds} rounds"
    )
    print(harness.table(rows))
    return result


def measure_host(
    device: Device, name: str, shapes: Shapes, options: argparse.Namespace
) -> dict[str, object]:
    """Time the host's part of a step, in microseconds a tensor. On the CPU, where Adam is in it,
    over one element of each.
    """
    threads = torch.get_num_threads()
    if not device.is_cuda:
        shapes = [(1,)] * len(shapes)
        torch.set_num_threads(1)
    params = [
        torch.nn.Parameter(weight)
        for weight in random_list(device, shapes, BF16.weight, 0.02, seed=0)
    ]
    lists = [random_list(device, shapes, BF16.grad, 1e-3, seed=seed) for seed in (1, 2)]
    optimizer = shardcore.FusedAdam(params, **OPTIONS)
    turns = itertools.cycle(lists)

    def timer(call: Callable[[], None], repeats: int) -> float:
        seconds = 0.0
        for _ in range(repeats):
            if device.is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            seconds += time.perf_counter() - start
        return seconds

    calls = {
        "the same": lambda: optimizer.step(grads=lists[0]),
        "elsewhere": lambda: optimizer.step(grads=next(turns)),
    }
    taken = harness.interleave(
        calls, options.rounds, repeats=10, pause_s=options.pause, warmup=2, timer=timer
    )
    torch.set_num_threads(threads)
    spreads = {
        where: harness.spread([s / len(shapes) * 1e6 for s in seconds])
        for where, seconds in taken.items()
    }
    print(f"\nhost time of {name}: {len(shapes):,} tensors, {options.rounds} rounds of 10 steps")
    print(
        harness.table(
            [
                ["gradients", "us a tensor [quartiles]"],
                *([where, str(s)] for where, s in spreads.items()),
            ]
        )
    )
    return {
        "workload": name,
        "tensors": len(shapes),
        "us_per_tensor": {where: asdict(s) for where, s in spreads.items()},
    }


def count_launches(device: Device, name: str, shapes: Shapes) -> dict[str, object]:
    """Count what one step, and one norm, of each engine launches over a list."""
    rows, result = (
        [["one step of", "kernels", "copies"]],
        {"workload": name, "tensors": len(shapes), "engines": {}},
    )
    for kind, peer in (entry for unit in units(HEADLINES, device) for entry in unit):
        grads = random_list(device, shapes, kind.grad, 1e-3, seed=1)
        case = try_case(device, shapes, grads, kind, peer, result)
        if case is not None:
            result["engines"][case.name] = device.launches(case.step)
    result["engines"][f"{OURS}norm"] = device.launches(lambda: _C.sq_norm(grads))
    for engine, launches in result["engines"].items():
        rows.append(
            [
                engine,
                *("-" if launches is None else str(launches[key]) for key in ("kernels", "copies")),
            ]
        )
    print(f"\n{name}: launches")
    print(harness.table(rows))
    return result


def panel(result: Mapping[str, object], limit: str) -> harness.Panel:
    """Turn one result into bars: each engine's share of the limit."""
    bars = {case["engine"]: harness.Spread(**case["share"]) for case in result["cases"]}
    title = f"{result['workload']}: {result['numel']:,} elements, {result['tensors']:,} tensors"
    return harness.Panel(
        title,
        f"share of {limit} (median and quartiles)",
        bars,
        lambda name: name.startswith(OURS),
        mark=1.0,
    )


def main() -> int:
    parser = suite.make_parser("fused_adam", __doc__, rounds=20, pause=0.005)
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: small sizes, figures without meaning",
    )
    parser.add_argument("--repeats", type=positive, help="steps a sample (default: by size)")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help='only what has one of these in its name ("GPT-2", "norm")',
    )
    options = suite.parse(parser)
    device = Device(options.device)
    scale = 1 if device.is_cuda else 10_000
    options.copy_bytes = 2**31 // scale // 16 * 16
    lists = workloads(scale)
    flat_256m = [(2**28 // scale,)]
    every_kind = {"flat 256M, every combination": flat_256m}
    normed = {**lists, "flat 256M": flat_256m}
    report: dict[str, object] = {
        **suite.about_run("fused_adam", options),
        "device": device.name,
        "not_installed": sorted(
            {peer.module.split(".")[0] for peer in PEERS if not peer.installed}
        ),
        "workloads": (steps := []),
        "norm": (norms := []),
        "host": (hosts := []),
        "launches": (launches := []),
    }
    try:  # whatever stops the run, what was measured is kept
        for name, shapes in only(options, lists).items():
            steps.append(measure(device, name, shapes, HEADLINES, options))
        for name, shapes in only(options, every_kind).items():
            steps.append(measure(device, name, shapes, list(adam_kinds.every_kind()), options))
        for name, shapes in only(
            options, {f"norm of {name}": shapes for name, shapes in normed.items()}
        ).items():
            norms.append(measure_norm(device, name.removeprefix("norm of "), shapes, options))
        for name, shapes in only(
            options, {f"host time of {n}": s for n, s in lists.items() if len(s) > 1}
        ).items():
            hosts.append(measure_host(device, name.removeprefix("host time of "), shapes, options))
        for name, shapes in only(
            options, {f"launches of {n}": s for n, s in lists.items() if len(s) > 1}
        ).items():
            launches.append(count_launches(device, name.removeprefix("launches of "), shapes))
    finally:
        harness.write_json(options.out / "fused_adam.json", report)
    panels = [panel(r, "copy bandwidth") for r in steps if r["cases"]] + [
        panel(r, "read bandwidth") for r in norms if r["cases"]
    ]
    if panels:
        harness.write_png(options.out / "fused_adam.png", panels, f"FusedAdam on {device.name}")
    return 0


def only(options: argparse.Namespace, lists: Mapping[str, Shapes]) -> dict[str, Shapes]:
    """Keep the entries that --only asks for."""
    return {
        name: shapes
        for name, shapes in lists.items()
        if not options.only or any(text in name for text in options.only)
    }


if __name__ == "__main__":
    sys.exit(main())
