"""What a result was measured on: commit, versions, processors. Numbers without these mean
nothing later.
"""

import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
# The flags under which Linux reports bfloat16 multiply units: AVX-512 BF16 and AMX on x86, BF16 on
# aarch64.
CPU_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def cpu_fields(key: str) -> list[str]:
    """Return the values of one field of /proc/cpuinfo, one a core; empty where there is no such
    file.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    pairs = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in pairs if name.strip() == key]


def cpu_has_bf16() -> bool:
    """Tell if this CPU multiplies bfloat16 natively; without it, bfloat16 training on the CPU is
    slower than float32.
    """
    flags = cpu_fields("flags") or cpu_fields("Features")
    return bool(flags) and not CPU_BF16_FLAGS.isdisjoint(flags[0].split())


def usable_cores() -> int:
    """Count the cores that this process may run on."""
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )


def git_commit() -> str:
    """Return the commit of this tree, with "+changes" if tracked files differ from it, or "unknown"
    where git does not track it.

    A tree that was unpacked inside another repository is none of its commits.
    """
    try:
        _git("ls-files", "--error-unmatch", "pyproject.toml")
        head = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changes else "")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def describe_machine() -> dict[str, object]:
    """Describe commit (SHARDCORE_COMMIT, where git cannot tell), software and hardware as a dict
    that JSON can hold.
    """
    model_names = cpu_fields("model name")
    return {
        "commit": os.environ.get("SHARDCORE_COMMIT") or git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cpu": model_names[0] if model_names else platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": usable_cores(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
