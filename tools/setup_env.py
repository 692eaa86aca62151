"""Makes the checkout ready to run: picks the Python, fills .venv if there is none with torch,
builds the extension in place.

Called by the Makefile with the machine's python3; needs only the standard library. If that Python
already has a fitting torch it is the one used, nothing is downloaded and nothing is installed into
it: the extension is built into shardcore/ and found through PYTHONPATH. Otherwise .venv gets torch,
the ``dev`` packages of pyproject.toml and the command shardcore. What is up to date is left alone.
Writes build/python: the path of the Python to use.
"""

import sys

# - older Pythons do call this file, and lack some of the modules below
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        f"setup: {sys.executable} is Python {sys.version.split()[0]}; expected 3.11 or newer (make "
        f"PYTHON=python3.12 ...)"
    )

import argparse
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import time
import tomllib
from pathlib import Path

from tools.build_config import (
    FLAG_VARIABLES,
    MIN_TORCH,
    BuildError,
    check_writable,
    find_liburing,
    find_nvcc,
)

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
VENV = ROOT / ".venv"
BUILD_ENV = (
    "SHARDCORE_CUDA",
    "SHARDCORE_IO_URING",
    "TORCH_CUDA_ARCH_LIST",
    "CUDA_HOME",
    "CUDA_PATH",
    *FLAG_VARIABLES,
)
OPTIONAL = {
    "accelerate": "tests with Accelerate and Trainer",
    "auditwheel": "make wheel, with patchelf",
    "hypothesis": "property tests",
    "lightning": "tests with Lightning",
    "matplotlib": "plots",
    "pytorch-lightning": "tests with Lightning, as its other package",
    "rich": "progress bars",
    "transformers": "tests on real architectures",
}


class SetupError(Exception):
    """The set-up cannot go on; the text says why and what to do."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def fits(torch_version: str | None) -> bool:
    """Whether this torch can run shardcore (2.11 or newer)."""
    release = re.match(r"(\d+)\.(\d+)", torch_version or "")
    return release is not None and (int(release[1]), int(release[2])) >= MIN_TORCH


def own_torch() -> str | None:
    """The version of the torch installed for the running Python, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def use_machine_python(torch_version: str) -> str:
    """The running Python, after checking that it can build; says what optional packages it
    lacks.
    """
    if importlib.util.find_spec("setuptools") is None:
        raise SetupError(
            f"{sys.executable} has torch {torch_version} but not setuptools, which the build needs "
            f"(install setuptools)"
        )
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    say(f"using {sys.executable}, which has torch {torch_version}; nothing is downloaded")
    for name in missing:
        say(f"  without {name} ({OPTIONAL[name]}): what needs it is skipped")
    return sys.executable


def use_venv(torch_requirement: str) -> str:
    """The Python of .venv, made anew unless it stands complete, from this Python and these
    requirements.
    """
    requirements = [torch_requirement, *dev_requirements()]
    wanted = {"python": [*sys.version_info[:2], sys.base_prefix], "requirements": requirements}
    stamp = VENV / "requirements.json"
    python = VENV / "bin/python"
    made_from = read_json(stamp)
    if made_from == wanted and probe(str(python)) is not None:
        return str(python)
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(
            f"{sys.executable} cannot make virtual environments; expected the venv and ensurepip "
            f"modules (Debian, Ubuntu: "
            f"apt-get install python3-venv or {version}-venv)"
        )
    why = (
        "it is not complete"
        if made_from in (None, wanted)
        else "it was made from another Python or other requirements"
    )
    again = f" again, because {why}," if VENV.exists() else ""
    say(
        f"making .venv{again} with {torch_requirement} (a download of some hundred MB, more where "
        f"torch brings CUDA)"
    )
    # first: what is interrupted from here on must not pass for complete
    stamp.unlink(missing_ok=True)
    run([sys.executable, "-m", "venv", "--clear", str(VENV)], "python3 -m venv failed")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    pip.append("--no-user")  # PIP_USER=1 is common on clusters
    run(
        [*pip, *requirements],
        "pip could not install the requirements (no network? TORCH=... picks another torch)",
        quiet=True,
    )
    compile_packages(python)
    add_shardcore(python)
    stamp.write_text(json.dumps(wanted))
    return str(python)


def add_shardcore(python: Path) -> None:
    """Let .venv find the package in this checkout, and its command: .venv/bin/shardcore. pip
    would build it once more.
    """
    [packages] = (VENV / "lib").glob("python3*/site-packages")
    (packages / "shardcore.pth").write_text(f"{ROOT}\n")
    command = VENV / "bin/shardcore"
    command.write_text(f"#!/bin/sh\nexec '{python}' -P -m shardcore \"$@\"\n")
    command.chmod(0o755)


def compile_packages(python: Path) -> None:
    """Write the bytecode of what .venv has, on all cores: pip would on one. Where that fails
    (templates) there is none.
    """
    command = [str(python), "-m", "compileall", "-q", "-j", "0", str(VENV / "lib")]
    subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def probe(python: str) -> bytes | None:
    """What an interpreter says about itself and its torch, which is not imported; None if it
    does not run or has no torch.
    """
    code = "import sys, importlib.metadata as m; print(sys.version, m.version('torch'))"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def read_json(path: Path) -> object:
    """What a JSON file holds; None if it is missing or cut short."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def dev_requirements() -> list[str]:
    """The ``dev`` extra of pyproject.toml."""
    return list(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
            "dev"
        ]
    )


def run(command: list[str], failure: str, quiet: bool = False) -> None:
    """Run a command in the repository root. Quiet: its output goes to build/setup.log and is
    shown only if it fails.
    """
    log = BUILD / "setup.log"
    with log.open("w") as out:
        kwargs = {"stdout": out, "stderr": subprocess.STDOUT} if quiet else {}
        code = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False, **kwargs
        ).returncode
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise SetupError(
            f"{tail}\n\nsetup: {failure} (exit status {code}; all output: {log})"
            if quiet
            else failure
        )


def fingerprint(python: str) -> str:
    """A hash of everything that the built library depends on: sources, flags, environment,
    interpreter and its torch.
    """
    digest = hashlib.sha256()
    inputs = [ROOT / "setup.py", ROOT / "tools/build_config.py", ROOT / "shardcore/version.py"]
    inputs += sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    for path in inputs:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    for name in BUILD_ENV:
        digest.update(f"{name}={os.environ.get(name)}\0".encode())
    found = probe(python)
    if found is None:
        raise SetupError(
            f"{python} has no torch; expected 2.11 or newer (make TORCH=torch==2.13.0 ...)"
        )
    digest.update(python.encode() + found)
    return digest.hexdigest()


def found_since(record: object) -> bool:
    """Whether something that the recorded build did without, because it was not found, is here
    now.
    """
    said, env = str(record), dict(os.environ)
    return ("nvcc was not found" in said and find_nvcc(env) is not None) or (
        "liburing 2.0 or newer was not found" in said and find_liburing(env)[0] != ""
    )


def build(python: str) -> None:
    """Build shardcore._C in place, unless the library there is from the same inputs."""
    state_path, record_path = BUILD / "setup.json", ROOT / "shardcore/_C.build.json"
    record = read_json(record_path)
    state = {"fingerprint": fingerprint(python), "record": record}
    libraries = any((ROOT / "shardcore").glob("_C*.so"))
    if libraries and record and read_json(state_path) == state and not found_since(record):
        return
    say("building the C++ extension (about a minute; output in build/setup.log)")
    start = time.monotonic()
    run([python, "setup.py", "build_ext", "--inplace"], "the build failed", quiet=True)
    run(
        [python, "-c", "import shardcore._native"],
        "the extension was built but does not load",
        quiet=True,
    )
    state["record"] = json.loads(record_path.read_text())
    state_path.write_text(json.dumps(state))
    say(f"{state['record']['line'].removeprefix('shardcore: ')} ({time.monotonic() - start:.0f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--torch",
        default="torch==2.13.0",
        help="what pip installs into .venv (default: %(default)s)",
    )
    options = parser.parse_args()
    check_writable(ROOT)
    with (BUILD / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second waits and finds it done
        torch_version = own_torch()
        if torch_version and fits(torch_version):
            python = use_machine_python(torch_version)
        else:
            if torch_version:
                say(f"{sys.executable} has torch {torch_version}, older than 2.11: using .venv")
            python = use_venv(options.torch)
        os.environ["PYTHONPATH"] = str(ROOT)
        build(python)
        (BUILD / "python").write_text(python + "\n")


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(str(error))
    except SetupError as error:
        sys.exit(str(error) if "\n" in str(error) else f"setup: {error}")
