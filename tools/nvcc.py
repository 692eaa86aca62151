"""Compiles single CUDA files that stand beside the extension: limits that benchmarks compare
with, planted faults.
"""

import os
import subprocess
from pathlib import Path

import torch

from tools.build_config import find_nvcc


def compile_cuda(source: Path, output: Path, *flags: str, arch: str | None = None) -> None:
    """Compile ``source`` to ``output`` for ``arch`` ("sm_90"; None: that of the GPU here).

    Raises FileNotFoundError without nvcc, CalledProcessError where it fails.
    """
    nvcc = find_nvcc(dict(os.environ))
    if nvcc is None:
        raise FileNotFoundError(
            f"compile_cuda: nvcc was not found for {source.name}; expected it on PATH or in "
            f"CUDA_HOME"
        )
    if arch is None:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    subprocess.run(
        [f"{nvcc.cuda_home}/bin/nvcc", "-O3", f"-arch={arch}", *flags, "-o", output, source],
        check=True,
    )
