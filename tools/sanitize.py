"""Runs every CUDA kernel under one tool of compute-sanitizer: python -m tools.sanitize memcheck |
racecheck | initcheck.

First the tool must find a fault that was planted for it (planted_faults.cu), then none in
tools/run_kernels.py. Exit status: 0 nothing found; 1 something found, or the kernels did not run to
their end; 3 the tool is missing, or finds nothing anywhere.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.build_config import find_nvcc
from tools.nvcc import compile_cuda
from tools.run_kernels import DONE

ROOT = Path(__file__).resolve().parent.parent
NOT_DONE = 3
# memcheck also reports calls of CUDA's API that fail on purpose (torch asks what kind of memory a
# pointer is).
TOOLS = {"memcheck": ["--report-api-errors", "no"], "racecheck": [], "initcheck": []}
SUMMARY = re.compile(
    r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.MULTILINE
)


def find_sanitizer(cuda_home: str) -> str | None:
    """Return the path of compute-sanitizer: on PATH, else in the toolkit."""
    folders = [os.environ.get("PATH", ""), f"{cuda_home}/bin", f"{cuda_home}/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def findings(output: str) -> int | None:
    """Read how many errors or hazards the tool reported; None if it did not come to a summary."""
    counts = SUMMARY.findall(output)
    return sum(map(int, counts)) if counts else None


def watch(sanitizer: str, tool: str, command: list[str]) -> str:
    """Run a command under the tool; returns all it printed."""
    full = [sanitizer, "--tool", tool, "--print-limit", "20", *TOOLS[tool], *command]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        full,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def check(tool: str, sanitizer: str, planted: Path) -> int:
    """Run both programs; returns the exit status, with a last line that says why."""
    output = watch(sanitizer, tool, [str(planted), tool])
    if not findings(output):
        print(
            f"{output}\nsanitize: {tool} does not find the fault that was planted for it; it does "
            f"not work on this machine"
        )
        return NOT_DONE
    output = watch(sanitizer, tool, [sys.executable, "-m", "tools.run_kernels"])
    found = findings(output)
    print(output)
    if DONE not in output or found is None:
        print(f"sanitize: {tool}: the kernels did not run to their end")
        return 1
    print(f"sanitize: {tool}: {found} found in our kernels; its planted fault was found")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sanitize", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("tool", choices=list(TOOLS))
    tool = parser.parse_args().tool
    nvcc = find_nvcc(dict(os.environ))
    sanitizer = find_sanitizer(nvcc.cuda_home) if nvcc is not None else None
    if nvcc is None or sanitizer is None:
        print(
            f"sanitize: {'nvcc' if nvcc is None else 'compute-sanitizer'} was not found; {tool} "
            f"was not done"
        )
        return NOT_DONE
    with tempfile.TemporaryDirectory() as folder:
        planted = Path(folder, "planted_faults")
        compile_cuda(ROOT / "tools/planted_faults.cu", planted)
        return check(tool, sanitizer, planted)


if __name__ == "__main__":
    sys.exit(main())
