"""A rank's program runs as Python runs it, and leaves its exception where the launcher looks."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import shardcore.launch.rank as rank

BASE = {
    "kind": "script",
    "local_rank": False,
    "as_deepspeed": False,
    "gpus": "",
    "cores": [[], []],
    "threads": [0, 3],
    "restart": 2,
    "max_restarts": 4,
}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Run a program (its text, or a command) as rank 1; returns the process, with ``recorded``
    of its exception.
    """
    (tmp_path / "failures").mkdir()

    def start(
        program: str | list[str],
        *arguments: str,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Any:
        words = program if isinstance(program, list) else [str(tmp_path / "program.py")]
        if isinstance(program, str):
            (tmp_path / "program.py").write_text(textwrap.dedent(program))
        options_as_json = json.dumps(BASE | {"failures": str(tmp_path / "failures")} | options)
        known = {"PATH": os.environ["PATH"], "RANK": "1", "LOCAL_RANK": "1"}
        known |= {"LOCAL_WORLD_SIZE": "2"} | (environment or {})
        command = [sys.executable, "-u", rank.__file__, options_as_json, *words, *arguments]
        done: Any = subprocess.run(
            command,
            env=known,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            check=False,
        )
        file = tmp_path / "failures" / "1.json"
        done.recorded = json.loads(file.read_text()) if file.exists() else None
        return done

    return start


def test_a_script_finds_what_python_gives(run: Any, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 5")
    program = """
        import os, sys, beside
        import multiprocessing
        def work(number): return number * beside.value
        if __name__ == "__main__":
            assert sys.modules["__main__"].work is work and __file__ == sys.argv[0]
            print(sys.argv[1:], sys.path[0], os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"])
            print(os.environ["OMP_NUM_THREADS"], os.environ["LOCAL_SIZE"], "torch" in sys.modules, "shardcore" in sys.modules)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [3]))
    """
    done = run(program, "--x", "$y ${local_rank}")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"['--x', '$y ${{local_rank}}'] {tmp_path} 2 4",
        "3 2 False False",
        "[15]",
    ]
    plain = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), "--x", "$y ${local_rank}"],
        capture_output=True,
        text=True,
        check=True,
        env={
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "OMP_NUM_THREADS": "3",
            "LOCAL_SIZE": "2",
        },
    )
    assert plain.stdout == done.stdout, "as without the launcher"


def test_local_rank_threads_and_cores(run: Any) -> None:
    last = max(os.sched_getaffinity(0))
    program = (
        "import os, sys; print(sys.argv[1:], os.environ.get('OMP_NUM_THREADS'), "
        "os.sched_getaffinity(0))"
    )
    done = run(
        program, "a", local_rank=True, cores=[[], [last]], environment={"OMP_NUM_THREADS": "7"}
    )
    assert done.stdout == f"['--local_rank=1', 'a'] 7 {{{last}}}\n"
    assert run(program, threads=[0, 0]).stdout.startswith("[] None"), (
        "one rank keeps torch's own number"
    )


def test_modules_folders_and_other_programs(run: Any, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    text = (
        "import sys, os; print(__name__, sys.argv[1:], os.path.basename(sys.argv[0]), sys.path[0])"
    )
    (tmp_path / "package" / "__main__.py").write_text(text)
    assert run(["package"], "a", kind="module").stdout == f"__main__ ['a'] __main__.py {tmp_path}\n"
    assert run(["package"], "a").stdout == "__main__ ['a'] package package\n"
    assert run(["echo"], "a b", kind="program", local_rank=True).stdout == "--local_rank=1 a b\n"
    done = run(["no-such-program"], kind="program")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.recorded["last"].startswith("FileNotFoundError")


def test_an_exception_is_recorded_and_not_printed(run: Any, tmp_path: Path) -> None:
    done = run("""
        def fail():
            try:
                {}["absent"]
            except KeyError:
                raise ValueError("two\\nlines")
        print("started")
        fail()
    """)
    assert (done.returncode, done.stderr, done.stdout) == (1, "", "started\n")
    plain = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, check=False
    )
    assert done.recorded["text"] == plain.stderr, "Python's own, without the launcher's frames"
    assert done.recorded["last"] == "lines"
    assert done.recorded["time_ns"] > 1e18
    broken = run("x = (")
    assert broken.recorded["last"].startswith("SyntaxError")
    assert "rank.py" not in broken.recorded["text"]


def test_ends_that_are_no_exception(run: Any) -> None:
    assert (
        run("import sys; sys.exit(7)").returncode,
        run("import sys; sys.exit(0)").returncode,
    ) == (7, 0)
    done = run("import sys; sys.exit('a message')")
    assert (done.returncode, done.stderr, done.recorded) == (1, "a message\n", None)
    done = run("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert (done.returncode, done.stderr, done.recorded) == (-signal.SIGINT, "", None), (
        "the launcher says so"
    )


def test_where_nothing_can_be_recorded_it_is_printed(run: Any) -> None:
    done = run("raise ValueError('boom')", failures="/nonexistent")
    assert done.stderr.endswith("ValueError: boom\n")


def test_hooks_that_others_put_before(run: Any) -> None:
    """As torch.distributed's, which calls the hook that was there; as rich's, which does not,
    and prints itself.
    """
    chained = (
        "import sys; old = sys.excepthook; sys.excepthook = lambda *a: old(*a); raise "
        "ValueError('boom')"
    )
    assert run(chained).recorded["last"] == "ValueError: boom"


def test_a_hook_of_its_own_prints(run: Any) -> None:
    done = run(
        "import sys; sys.excepthook = lambda *a: print('mine', file=sys.stderr); raise "
        "ValueError('boom')"
    )
    assert (done.recorded, done.stderr, done.returncode) == (None, "mine\n", 1)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_rank_ends_with_its_launcher(tmp_path: Path) -> None:
    code = (
        "import os, sys; from shardcore.launch.rank import end_with_parent; end_with_parent(); "
        "print(os.getpid(), flush=True); "
    )
    code = code.replace(
        "from shardcore.launch.rank import", "sys.path.insert(0, sys.argv[1]); from rank import"
    )
    child = [
        sys.executable,
        "-c",
        code + "import time; time.sleep(60)",
        str(Path(rank.__file__).parent),
    ]
    parent = (
        f"import subprocess, sys; print(subprocess.Popen({child!r}, "
        f"stdout=subprocess.PIPE).stdout.readline().decode())"
    )
    number = int(
        subprocess.run(
            [sys.executable, "-c", parent], capture_output=True, text=True, check=True
        ).stdout
    )
    for _ in range(100):
        if (
            not Path(f"/proc/{number}").exists()
            or "Z" in Path(f"/proc/{number}/stat").read_text().split()[2]
        ):
            return
        subprocess.run(["sleep", "0.1"], check=True)
    os.kill(number, signal.SIGKILL)
    pytest.fail("it outlived its parent")
