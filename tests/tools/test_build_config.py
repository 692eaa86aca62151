"""What is built and why: every combination of nvcc, torch's CUDA and SHARDCORE_CUDA, and every
text of an error.
"""

import itertools
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from tools import build_config
from tools.build_config import BuildError, Decision, Nvcc, decide

NVCC = {
    "none": None,
    "same major": Nvcc("13.0", "/cuda"),
    "other minor": Nvcc("13.2", "/cuda"),
    "other major": Nvcc("12.8", "/cuda"),
}
TORCH = {"cpu": ("2.13.0+cpu", None), "cuda": ("2.11.0+cu130", "13.0")}

CUDA = "CUDA"
CPU_FORCED = "because SHARDCORE_CUDA=0"
CPU_TORCH = "because torch 2.13.0+cpu is built without CUDA"
CPU_NO_NVCC = "because nvcc was not found"
ERROR_TORCH = "ERROR SHARDCORE_CUDA is 1, but torch 2.13.0+cpu is built without CUDA"
ERROR_NVCC = "ERROR SHARDCORE_CUDA is 1, but nvcc was not found"
ERROR_MAJOR = "ERROR nvcc is CUDA 12.8 (/cuda), but torch 2.11.0+cu130 is built for CUDA 13.0"

# (SHARDCORE_CUDA, nvcc, torch) -> what must come out. Unset and empty are the same.
EXPECTED = (
    {("0", nvcc, torch): CPU_FORCED for nvcc in NVCC for torch in TORCH}
    | {(None, nvcc, "cpu"): CPU_TORCH for nvcc in NVCC}
    | {("1", nvcc, "cpu"): ERROR_TORCH for nvcc in NVCC}
    | {
        (None, "none", "cuda"): CPU_NO_NVCC,
        ("1", "none", "cuda"): ERROR_NVCC,
        (None, "same major", "cuda"): CUDA,
        ("1", "same major", "cuda"): CUDA,
        (None, "other minor", "cuda"): CUDA,
        ("1", "other minor", "cuda"): CUDA,
        (None, "other major", "cuda"): ERROR_MAJOR,
        ("1", "other major", "cuda"): ERROR_MAJOR,
    }
)


def outcome(
    forced: str | None, nvcc: Nvcc | None, torch_version: str, torch_cuda: str | None
) -> str:
    try:
        return decide(forced, nvcc, torch_version, torch_cuda).line
    except BuildError as error:
        return f"ERROR {error}"


def matches(text: str, expected: str) -> bool:
    if expected == CUDA:
        return "built for CPU and CUDA 13." in text
    if expected.startswith("ERROR"):
        return (
            text.startswith("ERROR build: ")
            and expected.removeprefix("ERROR ") in text
            and "; expected " in text
        )
    return text.startswith("shardcore: built for CPU only") and expected in text


def test_every_combination_is_listed():
    assert set(EXPECTED) == set(itertools.product((None, "0", "1"), NVCC, TORCH))


@pytest.mark.parametrize("case", EXPECTED, ids=str)
def test_decision(case):
    forced, nvcc, torch = case
    assert matches(outcome(forced, NVCC[nvcc], *TORCH[torch]), EXPECTED[case])
    if forced is None:
        assert outcome("", NVCC[nvcc], *TORCH[torch]) == outcome(None, NVCC[nvcc], *TORCH[torch])


@pytest.mark.parametrize("value", ["2", "True", " 1"])
def test_other_values_are_refused(value):
    with pytest.raises(BuildError, match=r"SHARDCORE_CUDA is '.*'; expected 0 .* 1 .* or unset"):
        decide(value, None, "2.13.0", None)


@pytest.mark.parametrize(
    ("torch", "cuda", "requirement", "local"),
    [
        ("2.13.0+cpu", "", "torch==2.13.0", "torch2.13.0.cpu"),
        ("2.13.0", "", "torch==2.13.0", "torch2.13.0.cpu"),
        ("2.11.0+cu130", "13.0", "torch==2.11.0", "torch2.11.0.cu130"),
        ("2.11.0+cu128", "12.8", "torch==2.11.0", "torch2.11.0.cu128"),
        ("2.11.0+cu130", "", "torch==2.11.0", "torch2.11.0.cpu"),
    ],
)
def test_a_wheel_names_its_torch(torch, cuda, requirement, local):
    decision = Decision(torch, cuda, "", "")
    assert (decision.requirement, decision.local_version) == (requirement, local)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cpu", "2.9.0a0"])
def test_old_torch_is_refused(version):
    with pytest.raises(BuildError, match=r"expected 2\.11 or newer"):
        decide(None, None, version, None)


def test_arch_list_is_honoured_and_has_a_default():
    assert decide(None, NVCC["same major"], *TORCH["cuda"], "9.0").arch_list == "9.0"
    for unset in (None, ""):
        assert (
            decide(None, NVCC["same major"], *TORCH["cuda"], unset).arch_list
            == build_config.DEFAULT_CUDA_ARCH_LIST
        )


def test_older_gpus_are_left_out():
    found = decide(None, NVCC["same major"], *TORCH["cuda"], "5.2 7.5;8.0 8.6 9.0a 10.0;12.0+PTX")
    assert found.arch_list == "8.0;8.6;9.0a;10.0;12.0+PTX"
    with pytest.raises(
        BuildError, match=r"TORCH_CUDA_ARCH_LIST is 'Turing 7.0\+PTX'; expected 8\.0 or newer"
    ):
        decide(None, NVCC["same major"], *TORCH["cuda"], "Turing 7.0+PTX")


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def toolkit(tmp_path):
    """A toolkit whose nvcc answers --version and --dryrun, and a script elsewhere that calls it."""
    home = tmp_path / "toolkit"
    executable(
        home / "bin/nvcc",
        "#!/bin/sh\n"
        'case "$1" in\n'
        "  --version) echo 'Cuda compilation tools, release 13.0, V13.0.88';;\n"
        f"  *) echo '#$ TOP={home}/bin/..' >&2;;\n"
        "esac\n",
    )
    (home / "include").mkdir()
    (home / "include/cuda_runtime.h").touch()
    executable(tmp_path / "bin/nvcc", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    return home


def test_nvcc_behind_a_script_is_traced_to_its_toolkit(toolkit):
    assert build_config.find_nvcc({"PATH": str(toolkit.parent / "bin")}) == Nvcc(
        "13.0", str(toolkit)
    )


def test_cuda_home_comes_before_path(toolkit, tmp_path):
    assert build_config.find_nvcc({"CUDA_HOME": str(toolkit), "PATH": ""}) == Nvcc(
        "13.0", str(toolkit)
    )
    with pytest.raises(BuildError, match=r"CUDA_HOME is .*no bin/nvcc; expected a CUDA toolkit"):
        build_config.find_nvcc(
            {"CUDA_HOME": str(tmp_path / "gone"), "PATH": str(toolkit.parent / "bin")}
        )


TMP = tempfile.gettempdir()


@pytest.mark.parametrize(
    "prefix",
    [f"{TMP}/pip-build-env-x1/overlay", f"{TMP}/build-env-a", "/me/.cache/uv/builds-v0/.tmpK"],
)
def test_isolated_environment_is_refused_with_what_to_add(prefix):
    paths = [prefix, f"{prefix}/lib/python3.11/site-packages"]
    for torch in (None, f"{paths[1]}/torch/__init__.py"):
        with pytest.raises(BuildError, match=r"isolated.*add --no-build-isolation"):
            build_config.check_torch_location(torch, paths)
    assert "--no-build-isolation" in build_config.no_setuptools(paths)


@pytest.mark.parametrize(
    "prefix",
    ["/home/me/env", "/opt/build-env-py311", "/opt/pip-build-env-1", "/srv/builds-v0.9/env"],
)
def test_ordinary_environment_passes_and_missing_torch_names_the_fix(prefix):
    paths = [prefix, f"{prefix}/lib/python3.11/site-packages"]
    build_config.check_torch_location(f"{paths[1]}/torch/__init__.py", paths)
    with pytest.raises(
        BuildError,
        match=r"torch is not installed here; expected 2\.11 or newer \(pip install torch",
    ):
        build_config.check_torch_location(None, paths)
    assert "pip install setuptools" in build_config.no_setuptools(paths)


def test_missing_compiler_or_headers_name_what_helps(tmp_path):
    compiler = executable(tmp_path / "bin/c++", "#!/bin/sh\n")
    (tmp_path / "Python.h").touch()
    env = {"PATH": str(compiler.parent)}
    build_config.check_tools(env, str(tmp_path))
    build_config.check_tools({"PATH": "", "CXX": str(compiler)}, str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(c\+\+ .*apt-get install g\+\+"):
        build_config.check_tools({"PATH": str(tmp_path)}, str(tmp_path))
    with pytest.raises(
        BuildError, match=r"no C\+\+ compiler \(clang\+\+-99 .*apt-get install g\+\+"
    ):
        build_config.check_tools(env | {"CXX": "clang++-99"}, str(tmp_path))
    with pytest.raises(BuildError, match=r"Python\.h .*apt-get install python3-dev"):
        build_config.check_tools(env, str(tmp_path / "bin"))
    with pytest.raises(
        BuildError,
        match=r"""CXX is 'env c\+\+'; expected one word.*script.*exec env c\+\+ "\$@".""",
    ):
        build_config.check_tools(
            {"PATH": f"{compiler.parent}:/usr/bin", "CXX": "env c++"}, str(tmp_path)
        )


GCC_12 = {"__GNUC__": "12", "__FINITE_MATH_ONLY__": "0"}
CLANG = {"__GNUC__": "4", "__clang__": "1", "__clang_major__": "19"}


def test_compilers_that_cannot_do_are_refused_before_minutes_of_building():
    build_config.check_compiler(GCC_12, clang_openmp=False)
    # a torch that was built with LLVM's OpenMP
    build_config.check_compiler(CLANG, clang_openmp=True)
    for macros, message in (
        (GCC_12 | {"__GNUC__": "8"}, r"is GCC 8; expected GCC 11 or newer \(set CXX"),
        ({}, r"is GCC \(unknown\); expected GCC 11"),
        (
            CLANG,
            r"is clang 19, whose OpenMP calls torch's OpenMP library does not have.*expected GCC "
            r"11",
        ),
        (GCC_12 | {"__FAST_MATH__": "1"}, "changes arithmetic by default.*expected GCC 11"),
        (GCC_12 | {"__FINITE_MATH_ONLY__": "1"}, "changes arithmetic by default"),
        (CLANG | {"__INTEL_LLVM_COMPILER": "20250000"}, "changes arithmetic by default"),
    ):
        with pytest.raises(BuildError, match=message):
            build_config.check_compiler(macros, clang_openmp=False)


def test_a_tree_that_cannot_be_written_to_is_named(tmp_path):
    build_config.check_writable(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["build"]
    with pytest.raises(
        BuildError,
        match=r"build: /proc cannot be written to \(.+\); expected a source tree of your own",
    ):
        build_config.check_writable(Path("/proc"))  # not even by root
    (tmp_path / "build").rmdir()
    (tmp_path / "build").symlink_to("/proc/self")  # of another user's build
    with pytest.raises(BuildError, match=r"/build cannot be written to"):
        build_config.check_writable(tmp_path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_a_compiler_is_asked_what_it_is(tmp_path):
    env = dict(os.environ)
    build_config.check_compiler(build_config.read_macros(env | {"CXX": "g++"}), clang_openmp=False)
    # what check_flags cannot see
    fast = executable(tmp_path / "fast", '#!/bin/sh\nexec g++ -ffast-math "$@"\n')
    with pytest.raises(BuildError, match="changes arithmetic by default"):
        build_config.check_compiler(
            build_config.read_macros(env | {"CXX": str(fast)}), clang_openmp=False
        )
    broken = executable(tmp_path / "broken", "#!/bin/sh\necho no cc1plus >&2; exit 1\n")
    with pytest.raises(
        BuildError, match=r"broken does not work; expected a C\+\+ compiler: no cc1plus"
    ):
        build_config.read_macros(env | {"CXX": str(broken)})


UNSAFE_FLAGS = {
    "CFLAGS": [
        "-O2 -ffast-math",
        "-mfpmath=387",
        "-freciprocal-math -fno-signed-zeros",
        "-fsingle-precision-constant",
    ],
    "CXXFLAGS": [
        "-Ofast",
        "-fno-signed-zeros",
        "-ffp-contract=fast",
        "-ffp-contract=on",
        "-ffp-model=precise",
        "-mdaz-ftz",
    ],
    "CPPFLAGS": ["-ffinite-math-only"],
    "LDFLAGS": ["-ffast-math", "-Wl,--as-needed -Ofast", "/usr/lib/gcc/crtfastmath.o"],
    "LDSHARED": ["gcc -shared -ffast-math"],
    "CC": ["gcc -Ofast"],
    "CXX": ["g++ -ffast-math"],
    "NVCC_PREPEND_FLAGS": ["--ftz=true", "-Xcompiler=-ffast-math", "-Xcompiler -O3,-Ofast"],
    "NVCC_APPEND_FLAGS": [
        "-use_fast_math",
        "--fmad=true",
        "-fmad true",
        "-prec-div=false",
        "--prec-sqrt=false",
    ],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in UNSAFE_FLAGS.items() for value in values]
)
def test_unsafe_flags_of_the_environment_are_refused(name, value):
    with pytest.raises(
        BuildError, match=rf"{name} has \S.*; expected no flag that changes arithmetic"
    ):
        build_config.check_flags({name: value})


def test_other_flags_of_the_environment_are_taken():
    build_config.check_flags(
        {
            "CC": "/opt/gcc-Ofast/bin/gcc",
            "CFLAGS": "-O2 -g -march=x86-64-v3 -fno-fast-math -ffp-contract=off -fsigned-zeros "
            "-ffp-model=strict",
            "CXXFLAGS": "",
            "LDFLAGS": "-Wl,-O1 -L/opt/fast-math/lib",
            "NVCC_APPEND_FLAGS": "--fmad=false -ftz=false -prec-div=true --threads 4",
        }
    )


def compiler(folder: Path, body: str) -> dict[str, str]:
    """An environment whose C++ compiler is a shell script."""
    return {
        "CXX": str(executable(folder / "c++", f"#!/bin/sh\n{body}\n")),
        "PATH": os.environ["PATH"],
    }


def test_liburing_is_linked_statically_where_that_works_and_says_why_not(tmp_path):
    find = build_config.find_liburing
    assert find(compiler(tmp_path, "exit 0")) == (
        "-l:liburing.a",
        "shardcore: files by io_uring or threads, because liburing was found (-l:liburing.a)",
    )
    shared = compiler(tmp_path, 'case "$*" in *liburing.a*) exit 1;; esac')
    assert find(shared)[0] == "-luring"
    assert find({**shared, "SHARDCORE_IO_URING": "1"})[0] == "-luring"
    missing = compiler(tmp_path, "echo 'liburing.h: No such file' >&2; exit 1")
    flag, line = find(missing)
    assert (flag, "because liburing 2.0 or newer was not found (apt-get" in line) == ("", True)
    with pytest.raises(
        BuildError,
        match=r"IO_URING is 1, but liburing .* was not found; .*liburing\.h: No such file",
    ):
        find({**missing, "SHARDCORE_IO_URING": "1"})
    assert find({**shared, "SHARDCORE_IO_URING": "0"}) == (
        "",
        "shardcore: files by threads only, because SHARDCORE_IO_URING=0",
    )
    with pytest.raises(BuildError, match="SHARDCORE_IO_URING is 'yes'; expected 0"):
        find({**shared, "SHARDCORE_IO_URING": "yes"})


def test_flags_fix_the_arithmetic():
    """And none ties a build to one machine."""
    flags, host = (
        build_config.read_flags(),
        ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
    )
    assert flags["cxx"] == ["-std=c++20", "-O3", *host, "-fopenmp", "-g0"]
    exact = ["--fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"]
    # of the host half of a CUDA file
    assert flags["nvcc"] == ["-std=c++20", "-O3", *exact, "-Xcompiler", ",".join(host)]
    others = ("setup.py", "CMakeLists.txt", "CMakePresets.json", "tests/cpp/CMakeLists.txt")
    assert not re.search(
        "-march=|-mtune=|fast-math|-Ofast",
        "".join((build_config.ROOT / name).read_text() for name in others),
    )


def test_another_torch_or_architecture_compiles_again_whatever_the_dates_of_files():
    lines = [
        build_config.make_macros("0.1.0", Decision(torch, "13.0", arch_list, ""))
        for torch, arch_list in (
            ("2.13.0+cu130", "8.0"),
            ("2.13.1+cu130", "8.0"),
            ("2.13.0+cu130", "9.0"),
        )
    ]
    assert '-DSHARDCORE_VERSION="0.1.0"' in lines[0]
    assert len({tuple(line) for line in lines}) == 3


def test_sources(tmp_path):
    csrc = tmp_path / "csrc"
    for name in ("bind/module.cpp", "adam/adam.cpp", "adam/adam_cuda.cu", "adam/adam.h"):
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).touch()
    assert build_config.find_sources(False, csrc) == ["csrc/adam/adam.cpp", "csrc/bind/module.cpp"]
    assert build_config.find_sources(True, csrc) == [
        "csrc/adam/adam.cpp",
        "csrc/adam/adam_cuda.cu",
        "csrc/bind/module.cpp",
    ]
    (csrc / "adam/adam.cu").touch()
    assert len(build_config.find_sources(False, csrc)) == 2
    with pytest.raises(
        BuildError, match=r"adam\.cpp and adam\.cu have one object file; expected other names"
    ):
        build_config.find_sources(True, csrc)
    with pytest.raises(BuildError, match=r"no sources in .*; expected a full checkout"):
        build_config.find_sources(False, tmp_path / "empty")


@pytest.mark.parametrize("count", [0, 1, 2, 16])
def test_bindings_are_joined_and_the_rest_stays(tmp_path, count):
    sources = [
        "csrc/adam/adam.cpp",
        "csrc/bind/a.cpp",
        "csrc/bind/b.cpp",
        "csrc/bind/c.cpp",
        "csrc/bind/d.cu",
    ]
    joined = build_config.join_bindings(sources, count, tmp_path)
    assert joined[-2:] == ["csrc/adam/adam.cpp", "csrc/bind/d.cu"]
    assert len(joined) - 2 == max(1, min(count, 3))
    lines = [line for path in joined[:-2] for line in (tmp_path / path).read_text().splitlines()]
    assert sorted(lines) == [f'#include "bind/{name}.cpp"' for name in "abc"]
    before = [(tmp_path / path).stat().st_mtime_ns for path in joined[:-2]]
    assert build_config.join_bindings(sources, count, tmp_path) == joined
    assert [(tmp_path / path).stat().st_mtime_ns for path in joined[:-2]] == before, (
        "nothing is compiled again"
    )


def test_jobs_are_what_max_jobs_says_or_one_a_core():
    assert [build_config.count_jobs(given, 7) for given in (None, "1", "12")] == [7, 1, 12]
    for given in ("", "0", "-1", "many", "1.5"):
        with pytest.raises(BuildError, match="MAX_JOBS is"):
            build_config.count_jobs(given, 7)
