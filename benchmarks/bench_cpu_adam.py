"""Time one CPU Adam step against torch's fused AdamW, DeepSpeed's CPU Adam (when installed) and the
memory's limit.

Two subjects, each a flat tensor of --sizes elements; bytes are what one element moves (read and
written):

    fp32      float32 weight and gradient (28 bytes)
    offload   what a step of offloaded training does: bfloat16 gradient in, unscale, Adam on the
              float32 master, bfloat16 weight out (28). shardcore does it in one pass; peers in
              four: widen, unscale, step, narrow.

Ours also with reduced states: bfloat16 (fp32: 20 bytes) or 8-bit moments (16); in offload with a
split master (26), and with both (18, 14). The first of the sizes binds by memory; the second stays
in the caches, where only arithmetic is left.

The limit is a loop over the same streams with trivial arithmetic (stream_limit.cpp). All buffers of
all engines ask for huge pages with --pages equal, so that only the loops differ; with --pages own
everybody has what it allocates by itself. At the end all engines with float32 states must hold the
same weights (to rounding), so nobody is fast by doing less.
"""

import argparse
import ctypes
import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

import shardcore
from benchmarks import harness, suite
from benchmarks.adam_kinds import LOSS_SCALE, OPTIONS, Kind, check_same_work
from benchmarks.cpu_buffers import Buffers, four_pass_step, huge_page_setting, step_of
from examples.arguments import elements

try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    DeepSpeedCPUAdam = None

SOURCE = Path(__file__).with_name("stream_limit.cpp")
OURS = "shardcore CPUAdam"
BF16 = Kind(torch.bfloat16, torch.bfloat16)
# subject -> what ours is called -> its kind; the first is the base.
KINDS = {
    "fp32": {
        OURS: Kind(),
        f"{OURS}, bf16 states": Kind(state_dtype="bf16"),
        f"{OURS}, 8-bit states": Kind(state_dtype="8bit"),
    },
    "offload": {
        OURS: replace(BF16, master="fp32"),
        f"{OURS}, split master": replace(BF16, master="split"),
        f"{OURS}, split master, bf16 states": replace(BF16, master="split", state_dtype="bf16"),
        f"{OURS}, split master, 8-bit states": replace(BF16, master="split", state_dtype="8bit"),
    },
}


def parse_options() -> argparse.Namespace:
    parser = suite.make_parser("cpu_adam", __doc__, rounds=15, pause=0.05, threads=True)
    parser.add_argument(
        "--sizes",
        type=elements,
        nargs="+",
        default=[2**26, 2**19],
        help="elements (default: 64M 512K)",
    )
    parser.add_argument(
        "--pages",
        choices=["equal", "own"],
        default="equal",
        help="see above (default: %(default)s)",
    )
    return suite.parse(parser)


class StreamLimit:
    """The loops of stream_limit.cpp. Raises OSError or CalledProcessError where there is no
    working C++ compiler.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
        with tempfile.TemporaryDirectory() as directory:
            library = Path(directory, "stream_limit.so")
            flags = ["-O3", "-std=c++20", "-shared", "-fPIC", "-pthread"]
            subprocess.run([compiler, *flags, "-o", library, SOURCE], check=True)
            self._library = ctypes.CDLL(str(library))

    def walk(self, subject: str, *streams: torch.Tensor) -> None:
        """Walk the streams of a step once: weight, gradient, the master in "offload", and both
        moments, (n,) each.
        """
        function = {
            "fp32": self._library.stream_limit_adam,
            "offload": self._library.stream_limit_offload,
        }[subject]
        pointers = [ctypes.c_void_p(stream.data_ptr()) for stream in streams]
        function(*pointers, ctypes.c_int64(streams[0].numel()), ctypes.c_int(self.threads))


@dataclass(frozen=True)
class Case:
    """One engine at work: ``step`` is what is timed, ``weight`` what it updates, if that is to
    be compared.
    """

    step: Callable[[], None]
    weight: torch.Tensor | None
    bytes_moved: int


def cases_of(subject: str, buffers: Buffers, limit: StreamLimit) -> dict[str, Case]:
    """Set up a subject for every engine; gradients of the offload step come multiplied by the
    loss scale.
    """
    base = KINDS[subject][OURS]
    scale = LOSS_SCALE if subject == "offload" else 1.0
    scaled = buffers.grad * scale  # a power of two: exact
    dtypes = (
        [torch.float32] * 4
        if subject == "fp32"
        else [torch.bfloat16, torch.bfloat16, *[torch.float32] * 3]
    )
    cases = {
        "limit": Case(
            partial(limit.walk, subject, *buffers.streams(*dtypes)), None, base.bytes_moved
        )
    }
    for name, kind in KINDS[subject].items():
        param = buffers.parameter(kind.weight)
        param.grad = buffers.copy_of(scaled, kind.grad)
        optimizer = shardcore.CPUAdam([param], **OPTIONS, **kind.options)
        exact = param if kind.state_dtype == "fp32" else None
        cases[name] = Case(partial(optimizer.step, grad_scale=1 / scale), exact, kind.bytes_moved)
    for name in peers():
        weight, grad = buffers.parameter(base.weight), buffers.copy_of(scaled, base.grad)
        if subject == "fp32":
            weight.grad = grad
            step = step_of(peer(name, weight), buffers)
        else:
            step = four_pass_step(partial(peer, name), weight.detach(), grad, buffers, 1 / scale)
        cases[name] = Case(step, weight, base.bytes_moved)
    return cases


def peers() -> list[str]:
    """Name the peers that are installed."""
    return ["torch fused AdamW"] + (["DeepSpeedCPUAdam"] if DeepSpeedCPUAdam is not None else [])


def peer(name: str, param: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Make a peer's optimizer over ``param``."""
    if name == "DeepSpeedCPUAdam":
        return DeepSpeedCPUAdam([param], **OPTIONS)
    return torch.optim.AdamW([param], **OPTIONS, fused=True)


def measure(
    subject: str, numel: int, options: argparse.Namespace, limit: StreamLimit
) -> dict[str, object]:
    """Run one subject at one size; prints the table and returns what JSON holds."""
    cases = cases_of(subject, Buffers(numel, options.pages == "equal"), limit)
    repeats = min(200, max(1, 2**26 // numel))  # a sample of a small size is many steps
    steps = {name: case.step for name, case in cases.items()}
    seconds = harness.interleave(
        steps, options.rounds, repeats=repeats, pause_s=options.pause, warmup=2
    )
    weights = {name: case.weight for name, case in cases.items() if case.weight is not None}
    worst = check_same_work(subject, weights, OURS, "bench_cpu_adam")
    ours = seconds[OURS]
    rows = [["engine", "ms (median)", "Gparam/s", "bytes", "GB/s", "time / ours [quartiles]"]]
    result = {}
    for name, samples in seconds.items():
        rate = numel / harness.spread(samples).median / 1e9
        ratio = harness.paired(samples, ours)
        moved = cases[name].bytes_moved
        rows.append(
            [
                name,
                f"{numel / rate / 1e6:.2f}",
                f"{rate:.2f}",
                str(moved),
                f"{rate * moved:.1f}",
                str(ratio),
            ]
        )
        result[name] = {
            "seconds": samples,
            "bytes": moved,
            "gparams_per_second": rate,
            "time_over_ours": asdict(ratio),
        }
    print(
        f"\n{subject}, {numel:,} elements, {options.threads} threads, {options.rounds} rounds, "
        f"{options.pages} pages"
    )
    print(harness.table(rows))
    of_limit = harness.paired(seconds["limit"], ours)
    print(
        f"shardcore reaches {of_limit.median:.0%} of the limit; engines' weights agree to "
        f"{worst:.1e}"
    )
    return {"subject": subject, "numel": numel, "weights_agree_to": worst, "engines": result}


def panel(result: dict[str, object]) -> harness.Panel:
    """Turn one result into bars: each engine's speed over ours, by paired ratios."""
    speeds = {}
    for name, engine in result["engines"].items():
        ours = result["engines"][OURS]["seconds"]
        speeds[name] = harness.paired(ours, engine["seconds"])
    title = f"{result['subject']}, {result['numel']:,} elements"
    return harness.Panel(
        title,
        "speed, shardcore = 1 (median and quartiles)",
        speeds,
        lambda name: OURS in name,
        mark=1.0,
    )


def main() -> None:
    options = parse_options()
    suite.use_threads("cpu_adam", options)
    if DeepSpeedCPUAdam is None:
        print(
            "DeepSpeedCPUAdam is left out: deepspeed is not installed (pip install "
            "--no-build-isolation deepspeed)"
        )
    limit = StreamLimit(options.threads)
    results = []
    for numel in options.sizes:
        for subject in KINDS:
            results.append(measure(subject, numel, options, limit))
            gc.collect()
    report = {
        **suite.about_run("cpu_adam", options),
        "huge_pages": huge_page_setting(),
        "results": results,
    }
    harness.write_json(options.out / "cpu_adam.json", report)
    harness.write_png(
        options.out / "cpu_adam.png",
        [panel(result) for result in results],
        f"CPU Adam, {options.threads} threads",
    )


if __name__ == "__main__":
    main()
