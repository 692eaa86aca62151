"""What `make setup` decides: which torch fits, and when the extension must be built again."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.11.0+cu130", True),
        ("3.0.0", True),
        ("2.10.2", False),
        (None, False),
    ],
)
def test_which_torch_fits(version, fits):
    assert setup_env.fits(version) is fits


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in ("setup.py", "tools/build_config.py", "shardcore/version.py", "csrc/core/span.h"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    for name in setup_env.BUILD_ENV:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_build_again_when_sources_or_settings_change(checkout, monkeypatch):
    seen = [setup_env.fingerprint(sys.executable)]
    assert setup_env.fingerprint(sys.executable) == seen[0]
    (checkout / "shardcore/layout.py").write_text("# Python alone needs no build")
    assert setup_env.fingerprint(sys.executable) == seen[0]
    (checkout / "csrc/core/span.h").write_text("changed")
    seen.append(setup_env.fingerprint(sys.executable))
    (checkout / "csrc/core/new.cpp").write_text("")
    seen.append(setup_env.fingerprint(sys.executable))
    for name in (
        "SHARDCORE_CUDA",
        "SHARDCORE_IO_URING",
        "CPPFLAGS",
        "NVCC_APPEND_FLAGS",
        "LDSHARED",
    ):
        monkeypatch.setenv(name, "0")
        seen.append(setup_env.fingerprint(sys.executable))
    assert len(set(seen)) == len(seen)


def test_build_again_when_what_was_missing_is_there(monkeypatch):
    record = {
        "line": "because nvcc was not found on PATH",
        "files": "because liburing 2.0 or newer was not found",
    }
    monkeypatch.setattr(setup_env, "find_nvcc", lambda env: None)
    monkeypatch.setattr(setup_env, "find_liburing", lambda env: ("", "threads only"))
    assert not setup_env.found_since(record)
    for name, found in (("find_nvcc", object()), ("find_liburing", ("-luring", "io_uring"))):
        with monkeypatch.context() as patch:
            patch.setattr(setup_env, name, lambda env, found=found: found)
            assert setup_env.found_since(record)
            assert not setup_env.found_since(
                {"line": "built for CPU and CUDA", "files": "by io_uring"}
            )


def test_failing_command_shows_the_end_of_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_env, "BUILD", tmp_path)
    command = [sys.executable, "-c", "print('first'); print('the reason'); raise SystemExit(3)"]
    with pytest.raises(
        setup_env.SetupError,
        match=r"(?s)the reason.*setup: it failed \(exit status 3; all output: .*setup\.log\)",
    ):
        setup_env.run(command, "it failed", quiet=True)


def test_python_without_setuptools_says_so(monkeypatch):
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        setup_env.SetupError, match=r"torch 2\.13\.0 but not setuptools.*install setuptools"
    ):
        setup_env.use_machine_python("2.13.0")


def test_python_without_venv_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_env, "VENV", tmp_path / "venv")
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setup_env.SetupError, match=r"apt-get install python3-venv"):
        setup_env.use_venv("torch==2.13.0")


@pytest.fixture
def made(checkout, monkeypatch):
    """Runs use_venv over a .venv that costs no download: its Python is this one. What was run is
    in `commands`.
    """
    venv, commands = checkout / ".venv", []
    monkeypatch.setattr(setup_env, "VENV", venv)
    monkeypatch.setattr(setup_env, "dev_requirements", lambda: ["pytest"])

    def run(command: list[str], failure: str, quiet: bool = False) -> None:
        commands.append(command)
        if "venv" in command:
            (venv / "bin").mkdir(parents=True, exist_ok=True)
            (venv / "lib/python3/site-packages").mkdir(parents=True, exist_ok=True)
            (venv / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            (venv / "bin/python").chmod(0o755)
        elif "torch==9" in command:
            raise setup_env.SetupError(failure)

    monkeypatch.setattr(setup_env, "run", run)

    def made(torch_requirement: str = "torch==2.13.0") -> list[list[str]]:
        commands.clear()
        assert setup_env.use_venv(torch_requirement) == str(venv / "bin/python")
        return commands

    made.venv = venv
    return made


def test_ready_venv_is_left_alone_and_others_are_made_anew(made, monkeypatch, capsys):
    assert [command[1:3] for command in made()] == [["-m", "venv"], ["-m", "pip"]]
    assert "again" not in capsys.readouterr().out
    assert made() == []
    assert "--clear" in made("torch==2.11.0")[0]
    assert (
        "again, because it was made from another Python or other requirements"
        in capsys.readouterr().out
    )
    for name, value in (("base_prefix", "/another"), ("version_info", (3, 99, 0))):
        monkeypatch.setattr(setup_env.sys, name, value)
        assert "--clear" in made("torch==2.11.0")[0], name
        assert made("torch==2.11.0") == [], name


def test_failed_change_of_the_venv_leaves_none_that_passes_for_ready(made, capsys):
    made()
    with pytest.raises(setup_env.SetupError, match="pip could not install"):
        made("torch==9")
    assert not (made.venv / "requirements.json").exists()
    assert made() != []
    (made.venv / "requirements.json").write_text('{"python"')
    assert made() != []
    assert "again, because it is not complete" in capsys.readouterr().out


def test_venv_that_lost_torch_is_made_again(made, monkeypatch):
    made()
    (made.venv / "bin/python").write_text("#!/bin/sh\nexit 1\n")
    assert "--clear" in made()[0]
    monkeypatch.setattr(setup_env, "probe", lambda python: None)
    with pytest.raises(setup_env.SetupError, match=r"has no torch; expected 2\.11 or newer"):
        setup_env.fingerprint(sys.executable)


def run_setup_env(before: str) -> subprocess.CompletedProcess[str]:
    """Run tools/setup_env.py --help in a Python that did `before`, without site-packages."""
    main = (
        "sys.argv = ['setup_env', '--help']; runpy.run_path('tools/setup_env.py', {}, '__main__')"
    )
    code = f"import runpy, sys; {before}; {main}"
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=setup_env.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_old_python_is_named_before_what_it_lacks_is_missed():
    lacks = "; ".join(
        f"sys.modules[{name!r}] = None" for name in ("importlib.metadata", "tomllib", "dataclasses")
    )
    old = run_setup_env(f"sys.version_info = (3, 6, 15); {lacks}")
    assert old.returncode == 1
    assert "; expected 3.11 or newer (make PYTHON=python3.12 ...)" in old.stderr
    assert "Traceback" not in old.stderr
    assert "ModuleNotFoundError" in run_setup_env(lacks).stderr


@pytest.mark.parametrize("missing", ["pytest", "numpy"])
def test_make_test_names_what_all_tests_need(tmp_path, missing):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copy(setup_env.ROOT / "Makefile", tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *-c*{missing}*) exit 1;; esac\n')
    python.chmod(0o755)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/python").write_text(f"{python}\n")
    done = subprocess.run(
        ["make", "-o", "setup", "test"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"pytest or numpy is not installed for {python}; expected both there" in done.stderr


def test_pip_installs_into_the_venv_though_it_is_configured_for_another_place(made):
    # under PIP_USER=1 pip refuses an install into a virtual environment
    assert "--no-user" in made()[1]


def test_what_pip_installed_is_compiled(made):
    library = made.venv / "lib/python3/site-packages"
    library.mkdir(parents=True)
    (library / "good.py").write_text("x = 1\n")
    (library / "template.py").write_text("{{ no Python }}\n")
    assert "--no-compile" in made()[1]
    assert [file.name.split(".")[0] for file in library.glob("__pycache__/*.pyc")] == ["good"]


@pytest.mark.slow
def test_the_command_is_in_the_venv(made, tmp_path):
    made()
    assert (
        made.venv / "lib/python3/site-packages/shardcore.pth"
    ).read_text() == f"{setup_env.ROOT}\n"
    found = subprocess.run(
        ["shardcore", "--version"],
        cwd=tmp_path,
        env={
            "PATH": f"{made.venv}/bin:/usr/bin:/bin",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith("shardcore ")
