"""tools/sanitize.py with a stand-in for compute-sanitizer, and the program that it watches."""

import os
import shutil
import sys

import pytest
import torch

from tools import run_kernels, sanitize
from tools.nvcc import compile_cuda

STAND_IN = """#!{python}
import sys
ours = "tools.run_kernels" in sys.argv
if ours and {finishes}:
    print({done!r})
count = {ours} if ours else {planted}
if count is not None:
    print(f"========= {{'RACECHECK' if 'racecheck' in sys.argv else 'ERROR'}} SUMMARY: {{count}} " +
          ("hazards displayed (0 errors, 0 warnings)" if "racecheck" in sys.argv else "errors"))
"""


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run main with a compute-sanitizer that reports given counts for the planted fault and for
    our kernels.
    """
    monkeypatch.setattr(sanitize, "compile_cuda", lambda source, output: None)
    monkeypatch.setattr(
        sanitize, "find_nvcc", lambda env: type("Nvcc", (), {"cuda_home": str(tmp_path)})
    )
    monkeypatch.setenv("PATH", str(tmp_path))

    def run(tool, planted=1, ours=0, finishes=True, installed=True):
        stand_in = tmp_path / "compute-sanitizer"
        text = STAND_IN.format(
            python=sys.executable,
            done=run_kernels.DONE,
            planted=planted,
            ours=ours,
            finishes=finishes,
        )
        stand_in.write_text(text)
        stand_in.chmod(0o755 if installed else 0o644)
        monkeypatch.setattr(sys, "argv", ["sanitize", tool])
        return sanitize.main(), capsys.readouterr().out.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize("tool", list(sanitize.TOOLS))
def test_exit_status(run, tool):
    assert run(tool) == (
        0,
        f"sanitize: {tool}: 0 found in our kernels; its planted fault was found",
    )
    assert run(tool, ours=2) == (
        1,
        f"sanitize: {tool}: 2 found in our kernels; its planted fault was found",
    )
    assert run(tool, finishes=False) == (
        1,
        f"sanitize: {tool}: the kernels did not run to their end",
    )
    assert run(tool, ours=None) == (1, f"sanitize: {tool}: the kernels did not run to their end")
    for blind in (0, None):
        status, line = run(tool, planted=blind)
        assert (status, "does not find the fault that was planted for it" in line) == (3, True)
    assert run(tool, installed=False) == (
        3,
        f"sanitize: compute-sanitizer was not found; {tool} was not done",
    )


def test_without_nvcc(run, monkeypatch):
    monkeypatch.setattr(sanitize, "find_nvcc", lambda env: None)
    assert run("memcheck") == (3, "sanitize: nvcc was not found; memcheck was not done")


def test_the_toolkits_own_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    tool = tmp_path / "compute-sanitizer/compute-sanitizer"
    tool.parent.mkdir()
    tool.touch(0o755)
    assert sanitize.find_sanitizer(str(tmp_path)) == str(tool)


def test_every_kernel_runs_on_the_cpu_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_kernels", "--device", "cpu"])
    assert run_kernels.main() == 0
    assert capsys.readouterr().out.strip().splitlines()[-1] == run_kernels.DONE


@pytest.mark.parametrize("numel", [0, 1, 257])
def test_tensors_end_where_their_memory_ends(numel):
    t = run_kernels.make(torch.device("cpu"), torch.bfloat16, numel, 3)
    assert t.untyped_storage().nbytes() == (3 + numel) * 2
    assert t.numel() == 0 or t.storage_offset() == 3


@pytest.mark.more
def test_planted_faults_compile(tmp_path):
    if shutil.which("nvcc", path=os.environ["PATH"]) is None:
        pytest.skip("nvcc is not on PATH")
    compile_cuda(
        sanitize.ROOT / "tools/planted_faults.cu", tmp_path / "planted_faults", arch="sm_90"
    )
    assert (tmp_path / "planted_faults").exists()
