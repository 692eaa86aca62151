"""Proves this checkout on a machine with a CUDA GPU and writes what it saw: make gpu-check, or
python -m tools.gpu_check.

It uses the torch, nvcc and pytest that are there and no network. It consists of parts (PARTS, each
under PART_LIMIT_S); a part is a list of steps after one build for that GPU. A step that fails does
not stop the next ones. Each part writes one JSON file, gpu_<part>_<device>.json (device, driver,
commit, every step's status, clocks and figures), after every step, and pictures beside it.

Exit status: 0 all steps passed; 1 a step failed, or was not done because a tool is missing; 2 no
GPU: nothing was run.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

try:
    import torch

    from benchmarks import harness
    from examples.machine import describe_machine, git_commit
except ImportError:
    torch = None
from tools.setup_env import fits, read_json

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build/gpu_check"
PART_LIMIT_S = 460  # with the start and the last step's end still under 8 minutes
NOT_DONE = 3  # the exit status of a step whose tool is missing (tools/sanitize.py)
NO_GPU = 2
# The files of the tests marked gpu, by part: pytest reads no others.
GPU_TESTS = {
    "activations": ["tests/extras/test_activations.py", "tests/extras/test_cross_entropy.py"],
    "kernels": [
        "tests/native/test_elements.py",
        "tests/native/test_ops_placement.py",
        "tests/optim/test_adam_placement.py",
        "tests/optim/test_tensor_lists_capturable.py",
    ],
    "sharding": [
        "tests/engine/test_reducer.py",
        "tests/engine/test_engine.py",
        "tests/engine/test_engine_offload_states.py",
        "tests/engine/test_audit.py",
        "tests/engine/test_device_step.py",
        "tests/checkpoint/test_background.py",
        "tests/checkpoint/test_load.py",
        "tests/test_torch_private.py",
    ],
    "offload": ["tests/offload/test_cpu_store_cuda.py"],
}
INTERRUPT_S = 10  # what a step that ran too long has to write what it has
# what a step that keeps to a time ({seconds}) has around it: to start, to end what it has begun
ENDING_S = 25

# Reads what a step left in its folder: its figures, and what is wrong with them (None: nothing).
Reader = Callable[[Path], tuple[dict[str, object], str | None]]


@dataclass(frozen=True)
class Step:
    """One command, run in the repository root with its own folder ({folder} in its arguments) and a
    limit of its own.

    {seconds} in its arguments: when it has to begin to end, within what is left for it.
    """

    name: str
    command: list[str]
    limit_s: float
    read: Reader | None = None
    echo: bool = False  # print its output when it is done


def read_tests(folder: Path) -> tuple[dict[str, object], str | None]:
    """Read pytest's junit.xml: counts, and the names of what failed or was skipped. No test at
    all is a failure.
    """
    cases = list(ElementTree.parse(folder / "junit.xml").iter("testcase"))
    failed = [
        name_of(case)
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = {
        name_of(case): case.find("skipped").get("message")
        for case in cases
        if case.find("skipped") is not None
    }
    passed = len(cases) - len(failed) - len(skipped)
    figures = {"passed": passed, "failed": failed, "skipped": skipped}
    return figures, None if passed else "no test passed"


def name_of(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def read_figures(name: str) -> Reader:
    """Return what reads the JSON that a benchmark wrote under this name."""

    def read(folder: Path) -> tuple[dict[str, object], str | None]:
        figures = read_json(folder / f"{name}.json")
        return (figures, None) if isinstance(figures, dict) else ({}, "it wrote no figures")

    return read


def read_copies(folder: Path) -> tuple[dict[str, object], str | None]:
    """Read bench_copies' figures; what it found below its target is a failure."""
    figures, problem = read_figures("copies")(folder)
    return figures, problem or "; ".join(figures["below_target"]) or None


def read_training(folder: Path) -> tuple[dict[str, object], str | None]:
    """Read bench_offload_train's figures; that no engine of ours trained with anything in host
    memory is a failure.
    """
    figures, problem = read_figures("offload_train")(folder)
    engines = figures.get("engines", {})
    measured = any(
        name.startswith("shardcore") and sum(engine["moved_bytes"])
        for name, engine in engines.items()
    )
    return figures, problem or (
        None if measured else f"nothing of ours was measured with offload: {figures['left_out']}"
    )


def tests_of(part: str, limit_s: float) -> Step:
    """Return the step that runs the part's tests marked gpu."""
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "--junitxml={folder}/junit.xml"]
    return Step(
        "tests", [sys.executable, "-m", "pytest", *options, *GPU_TESTS[part]], limit_s, read_tests
    )


def speed() -> list[Step]:
    """The kernels beside their peers."""
    python, out = [sys.executable, "-m"], ["--out", "{folder}"]
    return [
        Step(
            "ordered_sum",
            [*python, "benchmarks.bench_ordered_sum", *out],
            60,
            read_figures("ordered_sum"),
            echo=True,
        ),
        Step(
            "benchmarks",
            [*python, "benchmarks.bench_fused_adam", "--rounds", "7", *out],
            270,
            read_figures("fused_adam"),
            echo=True,
        ),
    ]


def kernels() -> list[Step]:
    """The kernels alone: bits, machine code, memory errors, races."""
    python = [sys.executable, "-m"]
    return [
        tests_of("kernels", 180),
        Step("machine_code", [*python, "tools.check_kernels"], 60),
        *(
            Step(tool, [*python, "tools.sanitize", tool], 90)
            for tool in ("memcheck", "racecheck", "initcheck")
        ),
    ]


def sharding() -> list[Step]:
    """The engine on one GPU over nccl: bits of stages and tiers, a step's time beside torch and
    FSDP2, a trace of it.
    """
    python, gpu = (
        [sys.executable, "-m"],
        ["--device", "cuda", "--nproc", "1", "--preset", "gpu", "--out", "{folder}"],
    )
    ours = [f"shardcore {stage}" for stage in range(4)]
    engines = ["--engines", "FSDP2 2", "FSDP2 3", *ours, "shardcore 2 + offload"]
    trace = [*python, "benchmarks.trace_step", *gpu]
    lazy = ["--stage", "2", "--offload", "gradients", "--overlap-step"]
    return [
        tests_of("sharding", 120),
        Step(
            "benchmark",
            [*python, "benchmarks.bench_train_step", *gpu, *engines],
            200,
            read_figures("train_step"),
            echo=True,
        ),
        Step("trace", trace, 60, read_figures("trace_step")),
        Step("trace_offload", [*trace, *lazy], 60, read_figures("trace_step")),
    ]


def offload() -> list[Step]:
    """Host memory: bits wherever things lie, copies beside plain ones, training of a 1.5B and a
    7B model beside its bound.
    """
    python, out = [sys.executable, "-m"], ["--out", "{folder}"]
    train = [*python, "benchmarks.bench_offload_train", "--seconds", "{seconds}", *out]
    return [
        tests_of("offload", 90),
        Step("copies", [*python, "benchmarks.bench_copies", *out], 60, read_copies, echo=True),
        Step("train_1.5b", [*train, "--preset", "1.5b"], 120, read_training, echo=True),
        Step(
            "train_7b",
            [*train, "--preset", "7b", "--steps", "4", "--rounds", "1"],
            185,
            read_training,
            echo=True,
        ),
    ]


def ranks() -> list[Step]:
    """A rank on each GPU (of up to 8) over nccl: one hash over layouts, an error where one leaves
    out a backward, rates, peers.

    With one GPU: 2 and 4 ranks on it over a stand-in for nccl, whose times say nothing.
    """
    python, out = [sys.executable, "-m"], ["--out", "{folder}"]
    count = min(8, torch.cuda.device_count())

    def started(ranks: int, *options: str) -> list[str]:
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [*python, *launch, "-m", "tools.check_ranks", *options]

    least, most = (count, count) if count > 1 else (2, 4)
    left_out = Step("left_out_backward", started(least, "--leave-out-backward"), 90, echo=True)
    if count <= 1:
        small = ["--sizes", "32", *out]
        layouts = [
            Step(f"layouts_{n}", started(n, *small), 170, read_figures("ranks"), echo=True)
            for n in (least, most)
        ]
        return [*layouts, left_out]
    train = [
        "benchmarks.bench_train_step",
        "--device",
        "cuda",
        "--nproc",
        str(count),
        "--preset",
        "gpu",
        *out,
    ]
    return [
        Step("layouts", started(most, *out), 200, read_figures("ranks"), echo=True),
        left_out,
        Step("benchmark", [*python, *train], 220, read_figures("train_step"), echo=True),
    ]


def activations() -> list[Step]:
    """Activations computed again, in host memory, and the loss without logits: bits, time and
    peak memory beside torch's.
    """
    python, out = [sys.executable, "-m"], ["--out", "{folder}"]
    return [
        tests_of("activations", 90),
        Step(
            "benchmark",
            [*python, "benchmarks.bench_activations", *out],
            120,
            read_figures("activations"),
            echo=True,
        ),
    ]


# The speed of the kernels, then what was never run.
PARTS: dict[str, Callable[[], list[Step]]] = {
    "speed": speed,
    "ranks": ranks,
    "activations": activations,
    "kernels": kernels,
    "sharding": sharding,
    "offload": offload,
}


def build() -> Step:
    """Build the extension in place, unless it is there for this GPU."""
    return Step("build", [sys.executable, "-m", "tools.setup_env"], 240)


def build_environment() -> dict[str, str]:
    """What setup.py reads: CUDA or an error, for the architectures of the GPUs here."""
    capabilities = {
        torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
    }
    return {
        "SHARDCORE_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": ";".join(f"{a}.{b}" for a, b in sorted(capabilities)),
    }


def why_no_gpu() -> str | None:
    """Say why nothing can be run here; None where there is a GPU."""
    if torch is None:
        return (
            f"{sys.executable} has no torch; expected one built for CUDA (make gpu-check "
            f"PYTHON=... picks another Python)"
        )
    if not fits(torch.__version__):
        return f"{sys.executable} has torch {torch.__version__}; expected 2.11 or newer"
    if not torch.cuda.is_available():
        return f"this machine has no GPU that torch {torch.__version__} can use; expected one"
    return None


def describe_device() -> dict[str, object]:
    """Describe the GPU and its driver as JSON can hold them."""
    properties = torch.cuda.get_device_properties(0)
    try:
        driver, *clocks = (
            subprocess.run(
                nvidia_smi("driver_version,clocks.max.sm,clocks.max.mem"),
                capture_output=True,
                text=True,
                check=True,
            )
            .stdout.strip()
            .split(", ")
        )
    except (OSError, subprocess.CalledProcessError):
        driver, clocks = "unknown", []
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "count": torch.cuda.device_count(),
        "driver": driver,
        "max_clocks_mhz": clocks,  # of the multiprocessors, of the memory
    }


def nvidia_smi(fields: str, *options: str) -> list[str]:
    """Return what prints these fields of the first GPU, without units."""
    return [
        "nvidia-smi",
        f"--query-gpu={fields}",
        "--format=csv,noheader,nounits",
        "--id=0",
        *options,
    ]


@contextlib.contextmanager
def clocks_in(folder: Path) -> Iterator[dict[str, list[float]]]:
    """Watch the GPU's clocks; the dict that is yielded has least, median and greatest in MHz at
    the end ({}: unknown).
    """
    found: dict[str, list[float]] = {}
    log = folder / "clocks.txt"
    with log.open("w") as out, contextlib.ExitStack() as stack:
        try:
            watch = subprocess.Popen(
                nvidia_smi("clocks.sm,clocks.mem", "--loop=2"),
                stdout=out,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            yield found
            return
        stack.callback(watch.wait)
        stack.callback(watch.kill)
        yield found
    rows = re.findall(r"^(\d+), (\d+)$", log.read_text(), re.MULTILINE)
    for name, column in zip(("sm", "memory"), zip(*rows, strict=True), strict=False):
        values = sorted(map(float, column))
        found[name] = [values[0], statistics.median(values), values[-1]]


def run_command(
    command: list[str], log: Path, environment: dict[str, str], limit_s: float
) -> int | None:
    """Run a command with its output in ``log``; returns its exit status, None if it had to be
    stopped at the limit.
    """
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # Python then ends by an exception, and what it measured is written
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPT_S)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                # what it left running, and it itself when we are interrupted
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_step(
    step: Step, folder: Path, environment: dict[str, str], left_s: float
) -> dict[str, object]:
    """Run one step; returns its entry in the report: name, status (passed, failed, not done),
    detail, seconds, clocks, figures.
    """
    if left_s <= 0:
        return {
            "name": step.name,
            "status": "failed",
            "detail": "no time was left for it",
            "seconds": 0.0,
            "figures": {},
        }
    folder.mkdir(parents=True)
    log, limit_s, start = folder / "log.txt", min(step.limit_s, left_s), time.monotonic()
    seconds = f"{max(1.0, limit_s - ENDING_S):.0f}"
    command = [
        part.replace("{folder}", str(folder)).replace("{seconds}", seconds) for part in step.command
    ]
    with clocks_in(folder) as clocks:
        code = run_command(command, log, environment, limit_s)
    problem = {0: None, None: f"stopped after {limit_s:.0f} s", NOT_DONE: "a tool is missing"}.get(
        code, f"exit status {code}"
    )
    figures: dict[str, object] = {}
    if step.read is not None:
        try:
            figures, wrong = step.read(folder)
            problem = problem or wrong
        except (OSError, ElementTree.ParseError) as error:
            problem = problem or f"its result cannot be read: {error}"
    lines = log.read_text(errors="replace").strip().splitlines()
    if step.echo or problem:
        print("\n".join(lines if step.echo else lines[-30:]))
    status = "passed" if problem is None else "not done" if code == NOT_DONE else "failed"
    last_line = lines[-1].replace(f"{ROOT}/", "")[:500] if lines else ""
    return {
        "name": step.name,
        "status": status,
        "detail": f"{problem}: {last_line}" if problem else last_line,
        "seconds": round(time.monotonic() - start, 1),
        "clocks_mhz": clocks,
        "figures": figures,
    }


def run_part(part: str, out: Path, commit: str) -> bool:
    """Build, run a part's steps, and write its report after each; returns whether all passed."""
    device = describe_device()
    file = (
        out / f"gpu_{part}_{re.sub('[^a-z0-9]+', '_', str(device['name']).lower()).strip('_')}.json"
    )
    report = {"report": "gpu_check", "part": part, "passed": False, "device": device}
    report |= {"machine": describe_machine() | {"commit": commit}, "steps": (entries := [])}
    # what an earlier run left must not pass for this one's
    shutil.rmtree(WORK / part, ignore_errors=True)
    environment = os.environ | build_environment()
    # or the figures of a step would name what git takes the copy for
    environment["SHARDCORE_COMMIT"] = commit
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    end = time.monotonic() + PART_LIMIT_S
    print(
        f"gpu_check: part {part} on {device['name']}, driver {device['driver']}, commit {commit}",
        flush=True,
    )
    for step in [build(), *PARTS[part]()]:
        if entries and entries[0]["status"] != "passed":
            entry = {
                "name": step.name,
                "status": "not done",
                "detail": "the build failed",
                "seconds": 0.0,
                "figures": {},
            }
        else:
            entry = run_step(step, WORK / part / step.name, environment, end - time.monotonic())
        entries.append(entry)
        print(
            f"gpu_check: {entry['name']}: {entry['status']} ({entry['seconds']} s) "
            f"{entry['detail']}",
            flush=True,
        )
        report["passed"] = len(entries) > len(PARTS[part]()) and all(
            e["status"] == "passed" for e in entries
        )
        harness.save_json(file, report)
    pictures = sorted((WORK / part).glob("*/*.png"))
    names = [picture.name for picture in pictures]
    for picture in pictures:
        several = names.count(picture.name) > 1  # steps that run one program
        shutil.copyfile(
            picture, out / f"{file.stem}_{f'{picture.parent.name}_' * several}{picture.name}"
        )
    if not pictures:
        print("gpu_check: no picture was made (matplotlib is optional); the JSON has every figure")
    print(
        f"gpu_check: part {part} {'passed' if report['passed'] else 'did NOT pass'}; wrote {file}",
        flush=True,
    )
    return bool(report["passed"])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=list(PARTS), help="only this part (default: all)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results"
    )
    parser.add_argument(
        "--commit", help="what is checked, where git cannot tell (a copy without .git)"
    )
    options = parser.parse_args()
    reason = why_no_gpu()
    if reason is not None:
        print(f"gpu_check: {reason}; nothing was run", file=sys.stderr)
        return NO_GPU
    # Started in the background of a script we would ignore interrupts, and so would the steps,
    # which are stopped by them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options.out.mkdir(parents=True, exist_ok=True)
    commit = options.commit or git_commit()
    return (
        0
        if all(
            [run_part(part, options.out, commit) for part in PARTS if options.part in (None, part)]
        )
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
