"""What `make setup` decides: which torch fits, and when the extension must be built again."""

import sys

import pytest

from tools import setup_env


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.11.0", True),
        ("2.11.0+cu130", True),
        ("2.13.0+cpu", True),
        ("3.0.0", True),
        ("2.10.2", False),
        ("1.13.1", False),
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
    monkeypatch.setenv("SHARDCORE_CUDA", "0")
    seen.append(setup_env.fingerprint(sys.executable))
    assert len(set(seen)) == len(seen)


def test_failing_command_shows_the_end_of_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_env, "BUILD", tmp_path)
    command = [sys.executable, "-c", "print('first'); print('the reason'); raise SystemExit(3)"]
    with pytest.raises(
        setup_env.SetupError, match=r"(?s)the reason.*setup: it failed \(exit status 3; all output: .*setup\.log\)"
    ):
        setup_env.run(command, "it failed", quiet=True)


def test_python_without_setuptools_says_so(monkeypatch):
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setup_env.SetupError, match=r"torch 2\.13\.0 but not setuptools.*install setuptools"):
        setup_env.use_machine_python("2.13.0")


def test_python_without_venv_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_env, "VENV", tmp_path / "venv")
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setup_env.SetupError, match=r"apt-get install python3-venv"):
        setup_env.use_venv("torch==2.13.0")
