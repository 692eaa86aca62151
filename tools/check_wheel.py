"""Checks a wheel of tools/make_wheel.py: python -m tools.check_wheel dist/shardcore-*.whl

What is in it (no library of torch's, no source), what it requires, whether its name promises no
older glibc than it needs; and that it works where there is no compiler: in a new environment that
sees the torch of the running Python, from another folder, with nothing else on PATH, two steps of
training equal torch's, a checkpoint is saved and loaded, and the command runs.
"""

from __future__ import annotations

import argparse
import email
import json
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from tools.make_wheel import OF_TORCH

CONTENT = re.compile(
    r"shardcore/(.*\.py|_C\.pyi|py\.typed|_C\.build\.json|_C\.cpython-\w+(-[\w-]+)?\.so)"
    r"|shardcore/deepspeed/stand_in/deepspeed-[\d.]+\.dist-info/(METADATA|top_level\.txt)"
    r"|shardcore\.libs/liburing[\w.-]*"
    r"|shardcore-[^/]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|top_level\.txt|(licenses/)?LICENSE(\.liburing)?|sboms/auditwheel\.cdx\.json)"
)
TRAINING = """
import shutil, sys, torch, shardcore
assert shardcore.__file__.startswith(sys.prefix), shardcore.__file__
assert shutil.which("c++") is None and shutil.which("nvcc") is None

def trained(shards):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.GELU(), torch.nn.Linear(300, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if shards:
        model, optimizer = shardcore.shard(model, optimizer, stage=3, offload={"optimizer": "cpu"})
    for _ in range(2):
        device = next(model.parameters()).device
        model(torch.ones(5, 40, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer

model, optimizer = trained(shards=True)
weights = {name: value.cpu() for name, value in model.state_dict().items()}
plain, _ = trained(shards=False)
torch.testing.assert_close(weights, plain.state_dict(), rtol=0, atol=1e-5)
shardcore.save("checkpoint", model, optimizer)
fresh = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.GELU(), torch.nn.Linear(300, 8))
fresh, optimizer = shardcore.shard(fresh, torch.optim.AdamW(fresh.parameters()), stage=0)
shardcore.load("checkpoint", fresh, optimizer)
loaded = {name: value.cpu() for name, value in fresh.state_dict().items()}
torch.testing.assert_close(loaded, weights, rtol=0, atol=0)
print("trained")
"""


class WheelError(Exception):
    """A wheel that must not be given to anyone; the text says why."""


def check_content(names: list[str]) -> None:
    """Refuse a wheel that has other files than the package, its metadata and the licenses of
    what is in it.
    """
    other = [name for name in names if not CONTENT.fullmatch(name)]
    if other:
        raise WheelError(
            f"check_wheel: has {', '.join(other[:5])}; expected the package alone "
            f"(tools/check_wheel.py: CONTENT)"
        )
    notices = {name.rpartition("/")[2] for name in names} & {"LICENSE", "LICENSE.liburing"}
    if len(notices) != 2:  # setuptools takes files of these names
        raise WheelError(
            f"check_wheel: has the licenses {sorted(notices)}; expected LICENSE and "
            f"LICENSE.liburing"
        )
    if sum(name.endswith(".so") and name.startswith("shardcore/") for name in names) != 1:
        raise WheelError("check_wheel: has not one library in shardcore/; expected _C and no other")


def check_metadata(metadata: str, record: dict[str, str], version: str) -> None:
    """Refuse metadata that do not name, in the version and as the one requirement, the torch of
    the build's record.
    """
    fields = email.message_from_string(metadata)
    torch = record["torch"].split("+")[0]
    cuda = f"cu{record['cuda'].replace('.', '')}" if record["cuda"] else "cpu"
    if fields["Version"] != f"{version}+torch{torch}.{cuda}":
        raise WheelError(
            f"check_wheel: the version is {fields['Version']}; expected "
            f"{version}+torch{torch}.{cuda}"
        )
    required = [text for text in fields.get_all("Requires-Dist", []) if "extra ==" not in text]
    if required != [f"torch=={torch}"]:
        raise WheelError(f"check_wheel: it requires {required}; expected torch=={torch} alone")


def check_platform(name: str, shown: dict[str, object]) -> None:
    """Refuse a name that promises an older glibc than the symbols need, or libraries that
    neither torch nor glibc have.
    """
    if f"{shown['sym_tag']}." not in name.replace(".whl", "."):
        raise WheelError(
            f"check_wheel: the wheel's name is {name}; expected its platform to be "
            f"{shown['sym_tag']}"
        )
    libraries = shown["external_libs"]
    assert isinstance(libraries, dict)
    other = [
        library
        for library in libraries
        if not any(fnmatch(library, pattern) for pattern in OF_TORCH)
    ]
    if other:
        raise WheelError(
            f"check_wheel: needs {', '.join(other)}; expected no library but torch's and the "
            f"system's"
        )


def run(command: list[str], folder: Path, env: dict[str, str] | None = None) -> str:
    """Run a command in a folder; returns its output. Raises WheelError with it if the command
    fails.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise WheelError(
            f"{done.stdout[-4000:]}\n\ncheck_wheel: {' '.join(command[:4])} failed (exit status "
            f"{done.returncode})"
        )
    return done.stdout


def check_use(wheel: Path, version: str, folder: Path) -> None:
    """Install the wheel into an environment in `folder` and train with it there, with no PATH
    but the environment's.
    """
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    bins = folder / "venv/bin"
    python = str(bins / "python")
    pure = run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder
    ).strip()
    # torch and pip come from there
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    Path(pure, "base.pth").write_text("\n".join(seen) + "\n")
    env = {"PATH": str(bins), "HOME": str(folder)}
    install = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    run([*install, str(wheel.resolve())], folder, env)
    if "trained" not in run([python, "-c", TRAINING], folder, env):
        raise WheelError("check_wheel: the training printed nothing; expected 'trained'")
    shown = run([str(bins / "shardcore"), "--version"], folder, env)
    if shown != f"shardcore {version}\n":
        raise WheelError(
            f"check_wheel: shardcore --version printed {shown!r}; expected shardcore {version}"
        )
    print(run([str(bins / "shardcore"), "info"], folder, env), end="")


def check(wheel: Path) -> None:
    """Check a wheel for the running Python and its torch. Raises WheelError."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        check_content(names)
        record = json.loads(archive.read("shardcore/_C.build.json"))
        code: dict[str, str] = {}
        exec(archive.read("shardcore/version.py"), code)
        (metadata,) = [
            name
            for name in names
            if name.startswith("shardcore-") and name.endswith(".dist-info/METADATA")
        ]
        check_metadata(archive.read(metadata).decode(), record, code["__version__"])
    with tempfile.TemporaryDirectory() as name:
        shown = run(
            [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel.resolve())], Path(name)
        )
        check_platform(wheel.name, json.loads(shown[shown.index("{") :]))
        check_use(wheel, code["__version__"], Path(name))
    print(
        f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, {len(names)} files, works without a "
        f"compiler"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    try:
        check(parser.parse_args().wheel)
    except WheelError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
