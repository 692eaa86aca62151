"""The loaded extension agrees with its stub, and an extension that is absent or stale says so
and how to build it.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardcore._native import _C, build_record
from tools import check_native

ROOT = Path(__file__).resolve().parents[2]
HOW = "'pip install --no-build-isolation -e .'"


@pytest.fixture
def package(tmp_path):
    """A package named shardcore with _native.py alone, to which a test adds a broken extension."""
    folder = tmp_path / "shardcore"
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(ROOT / "shardcore/_native.py", folder)
    return folder


def import_error(
    package: Path, cuda: str | None = None, release: str = "2.13.0", path: Path | None = None
) -> str:
    """The ImportError of ``import shardcore._native`` in a new process; it has no torch but a
    stand-in of that version. ``path``: a folder later on sys.path.
    """
    version = (
        release
        if "+" in release
        else f"{release}+cu{cuda.replace('.', '')}"
        if cuda
        else f"{release}+cpu"
    )
    code = (
        "import sys, types\n"
        f"torch = types.ModuleType('torch'); torch.__version__ = '{version}'; sys.modules['torch'] "
        f"= torch\n"
        f"torch.version = types.SimpleNamespace(cuda={cuda!r})\n"
        "try:\n"
        "    import shardcore._native\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print('IMPORTED', shardcore._native._C.__name__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without an installed shardcore
        cwd=package.parent,
        env={"PYTHONPATH": str(path)} if path else {},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_not_built(package):
    text = import_error(package)
    assert "(shardcore._C) is not built" in text
    assert str(package) in text
    assert HOW in text


def test_a_checkout_that_hides_an_installed_package_says_so(package, tmp_path):
    """After 'pip install .', Python that is started in the checkout finds the checkout first."""
    installed = tmp_path / "site-packages"
    (installed / "shardcore").mkdir(parents=True)
    assert "is not built" in import_error(package, path=installed)  # nothing is built there
    (installed / "shardcore" / "_C.cpython-311-x86_64-linux-gnu.so").touch()
    text = import_error(package, path=installed)
    assert f"hides the package installed in {installed}" in text
    assert f"in a folder other than {package.parent}" in text
    assert HOW in text
    assert "is not built" not in text
    shutil.copy(installed / "shardcore" / "_C.cpython-311-x86_64-linux-gnu.so", package)
    assert "hides the package" not in import_error(
        package, path=installed
    )  # then it is another error


@pytest.fixture
def broken(package):
    """The package with a file that is no library."""
    suffix = Path(_C.__file__).name.removeprefix("_C")
    (package / f"_C{suffix}").write_bytes(b"not a library")
    return package


@pytest.mark.parametrize("record", [None, "[]", "null", '"2.13.0"', '{"torch"'])
def test_does_not_load(broken, record):
    """Whatever the record of the build is."""
    if record is not None:
        (broken / "_C.build.json").write_text(record)
    text = import_error(broken)
    assert text.startswith("shardcore: its C++ extension does not load: ")
    assert HOW in text


def test_does_not_load_because_of_another_torch(broken):
    (broken / "_C.build.json").write_text(json.dumps({"torch": "2.11.0+cpu", "cuda": ""}))
    text = import_error(broken)
    assert text.startswith(
        "shardcore: its C++ extension is built for torch 2.11.0+cpu, but torch is 2.13.0+cpu with "
        "no CUDA; "
    )
    assert "; install the wheel for this torch, or rebuild: " in text
    assert HOW in text
    assert "--no-cache-dir --force-reinstall --no-deps" in text


@pytest.mark.parametrize(
    ("cuda", "here"), [(None, "2.13.0+cpu with no CUDA"), ("13.0", "2.13.0+cu130 with CUDA 13.0")]
)
def test_does_not_load_because_of_another_cuda(broken, cuda, here):
    (broken / "_C.build.json").write_text(json.dumps({"torch": "2.13.0+cu128", "cuda": "12.8"}))
    text = import_error(broken, cuda)
    assert text.startswith(
        f"shardcore: its C++ extension is built for torch 2.13.0+cu128 and CUDA 12.8, but torch is "
        f"{here}; "
    )


def test_built_for_another_python(package):
    (package / "_C.cpython-38-x86_64-linux-gnu.so").touch()
    text = import_error(package)
    assert text.startswith("shardcore: its C++ extension is built for another Python")
    assert HOW in text


@pytest.mark.parametrize(
    ("built_for", "built_cuda", "cuda", "here", "loads"),
    [
        ("2.13.0", "", None, "2.13.0", True),
        ("2.13.0", "", "13.0", "2.13.0", True),
        ("2.13.0", "13.2", "13.0", "2.13.0", True),
        ("2.13.0", "12.8", "13.0", "2.13.0", False),
        ("2.13.0", "13.0", None, "2.13.0", False),
        ("2.13.1", "", None, "2.13.0", False),
        # No release: NVIDIA's containers, nightlies, own builds. Two with the same numbers may
        # differ.
        ("2.13.0a0+eb65b36.nv26.06", "13.0", "13.0", "2.13.0a0+eb65b36.nv26.06", True),
        ("2.13.0a0+eb65b36.nv26.06", "13.0", "13.0", "2.13.0a0+f00d123.nv26.07", False),
        ("2.13.0.dev20260601+cu130", "13.0", "13.0", "2.13.0.dev20260602+cu130", False),
        ("2.13.0+cu130", "13.0", "13.0", "2.13.0a0+eb65b36.nv26.06", False),
        ("2.13.0rc1+cu130", "13.0", "13.0", "2.13.0rc1+cu130", True),
    ],
)
def test_loads_but_is_built_for_another_torch(package, built_for, built_cuda, cuda, here, loads):
    (package / "_C.py").write_text(
        f"def build_info():\n    return {{'torch': {built_for!r}, 'cuda': {built_cuda!r}}}\n"
    )
    text = import_error(package, cuda, here)
    assert text.startswith(
        "IMPORTED" if loads else f"shardcore: its C++ extension is built for torch {built_for}"
    )
    assert loads or f", but torch is {here}" in text


def test_stub_and_extension_agree():
    names = check_native.promised((ROOT / "shardcore/_C.pyi").read_text())
    assert len(names) > 10
    assert check_native.missing(_C, names) == []
    assert check_native.missing(_C, ["cpu_isa", "gone", "AdamStepper.gone"]) == [
        "gone",
        "AdamStepper.gone",
    ]


def test_build_info_and_record_agree():
    info, record = _C.build_info(), build_record()
    assert set(info) == {"version", "torch", "cuda", "cuda_arch_list", "compiler", "io_uring"}
    assert (
        info["torch"].split("+")[0]
        == torch.__version__.split("+")[0]
        == record["torch"].split("+")[0]
    )
    assert bool(info["cuda"]) == bool(record["cuda"])
    assert info["io_uring"] == ("because liburing was found" in record["files"])
    assert record["line"].startswith("shardcore: built for ")


@pytest.mark.more
def test_import_brings_in_nothing_beyond_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import shardcore; "
        "print(*sorted(set(sys.modules) - before))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = result.stdout.split()
    assert "shardcore._C" in imported
    assert [
        name
        for name in imported
        if name.split(".")[0] not in {"shardcore", *sys.stdlib_module_names}
    ] == []
