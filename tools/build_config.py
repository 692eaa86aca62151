"""Decides what the build makes (CPU only, or CPU and CUDA) and says why. Pure: imports neither
torch nor setuptools.

The rule: CUDA sources are built when nvcc is found and torch is a CUDA build; SHARDCORE_CUDA=0|1
forces. Whether this machine has a GPU is never asked, so a build on a login node or in a container
equals a build on the GPU machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# 8.x and 9.0 as machine code; PTX lets newer GPUs compile at load
DEFAULT_CUDA_ARCH_LIST = "8.0;9.0+PTX"
# lack instructions of the kernels
OLDER_ARCH = re.compile(r"[1-7]\.\d|Kepler|Maxwell|Pascal|Volta|Turing")
CXX_STANDARD = "-std=c++20"  # torch 2.13 headers need it, torch 2.11 headers accept it
# of the environment: what setuptools, torch's build and nvcc take compilers and flags from
FLAG_VARIABLES = (
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED", "LDCXXSHARED"),
    *("PYTORCH_NVCC", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"),
)
# GCC's, clang's and nvcc's. At link time, too: there -ffast-math makes the whole process flush
# subnormals to zero.
UNSAFE_MATH = re.compile(
    r"(?<![\w/.])("
    r"-Ofast|-ffast-math|-funsafe-math-optimizations|-fassociative-math|-freciprocal-math|-ffinite-math-only|-fno-signed-zeros|"
    r"-fapprox-func|-fsingle-precision-constant|-fcx-limited-range|-ffp-contract=(on|fast)\S*|-ffp-model=(?!strict)\S*|"
    r"-fdenormal-fp-math\S*|-mfpmath\S*|-mrecip\S*|-mdaz-ftz|-mpc\d+|"
    r"--?use_fast_math|--?(fmad|ftz)[= ]true|--?prec-(div|sqrt)[= ]false)|crtfastmath"
)
MIN_TORCH = (2, 11)
MIN_GCC = 11
NO_ISOLATION = "pip install --no-build-isolation -e ."
ISOLATED = (
    "build: this is an isolated build environment; expected the environment whose torch will run "
    "shardcore, because an "
    "extension works only with the torch it was built against (add --no-build-isolation: "
    f"{NO_ISOLATION}; python -m build: --no-isolation)"
)

NO_WHEEL = (
    "build: setuptools here is older than 70.1 and wheel is missing; expected one that can "
    "make wheels (pip install wheel)"
)


class BuildError(Exception):
    """A build that cannot go on; the text names what was found and the fix."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its release ("13.0") and the toolkit folder that has bin/nvcc and
    include/cuda_runtime.h.
    """

    release: str
    cuda_home: str


@dataclass(frozen=True)
class Decision:
    """What is built. ``cuda`` is the toolkit's release, or "" for a CPU build; ``reason`` is the
    part after "because".
    """

    torch: str
    cuda: str
    arch_list: str
    reason: str

    @property
    def line(self) -> str:
        """The one line that every build prints and records."""
        what = f"CPU and CUDA {self.cuda} ({self.arch_list})" if self.cuda else "CPU only"
        return f"shardcore: built for {what}, torch {self.torch}, because {self.reason}"

    @property
    def requirement(self) -> str:
        """What the built package requires: the torch that import demands, too, of any local
        version (+cpu, +cu130).
        """
        return f"torch=={self.torch.split('+')[0]}"

    @property
    def local_version(self) -> str:
        """The local version of a wheel that is given to others (PEP 440): torch2.13.0.cpu,
        torch2.11.0.cu130.
        """
        device = "cu" + self.cuda.replace(".", "") if self.cuda else "cpu"
        return f"torch{self.torch.split('+')[0]}.{device}"


def decide(
    forced: str | None,
    nvcc: Nvcc | None,
    torch_version: str,
    torch_cuda: str | None,
    arch_list: str | None = None,
) -> Decision:
    """Choose CPU or CUDA from SHARDCORE_CUDA (``forced``), the nvcc found and torch's own CUDA
    version.

    Raises BuildError for another value of SHARDCORE_CUDA, for 1 without nvcc or with a torch that
    has no CUDA, for a toolkit whose major version is not torch's, for a torch older than 2.11, and
    for an arch_list of older GPUs than 8.0 alone. Those beside newer ones are left out: containers
    set TORCH_CUDA_ARCH_LIST to all that their torch supports.
    """
    release = re.match(r"(\d+)\.(\d+)", torch_version)
    if release and (int(release[1]), int(release[2])) < MIN_TORCH:
        raise BuildError(
            f"build: torch is {torch_version}; expected 2.11 or newer (pip install 'torch>=2.11')"
        )
    if forced not in (None, "", "0", "1"):
        raise BuildError(
            f"build: SHARDCORE_CUDA is {forced!r}; expected 0 (CPU only), 1 (CUDA required) or "
            f"unset (CUDA if nvcc and a "
            "CUDA build of torch are there)"
        )
    if forced == "0":
        return Decision(torch_version, "", "", "SHARDCORE_CUDA=0")
    if torch_cuda is None:
        if forced == "1":
            raise BuildError(
                f"build: SHARDCORE_CUDA is 1, but torch {torch_version} is built without CUDA; "
                f"expected a CUDA build of "
                "torch (install one, see pytorch.org, or unset SHARDCORE_CUDA)"
            )
        return Decision(torch_version, "", "", f"torch {torch_version} is built without CUDA")
    if nvcc is None:
        if forced == "1":
            raise BuildError(
                f"build: SHARDCORE_CUDA is 1, but nvcc was not found; expected the CUDA "
                f"{torch_cuda} toolkit (install it and "
                "put its bin folder on PATH or set CUDA_HOME, or unset SHARDCORE_CUDA)"
            )
        return Decision(
            torch_version, "", "", "nvcc was not found on PATH, in CUDA_HOME or in /usr/local/cuda"
        )
    if nvcc.release.split(".")[0] != torch_cuda.split(".")[0]:
        raise BuildError(
            f"build: nvcc is CUDA {nvcc.release} ({nvcc.cuda_home}), but torch {torch_version} is "
            f"built for CUDA {torch_cuda}; "
            f"expected the same major version (set CUDA_HOME to a CUDA {torch_cuda.split('.')[0]} "
            f"toolkit, or set "
            "SHARDCORE_CUDA=0 for a CPU build)"
        )
    why = f"nvcc {nvcc.release} was found and torch {torch_version} is built for CUDA {torch_cuda}"
    if forced == "1":
        why = f"SHARDCORE_CUDA=1, {why}"
    given = re.split(r"[;\s]+", (arch_list or DEFAULT_CUDA_ARCH_LIST).strip("; "))
    archs = [arch for arch in given if not OLDER_ARCH.match(arch)]
    if not archs:
        raise BuildError(
            f"build: TORCH_CUDA_ARCH_LIST is {arch_list!r}; expected 8.0 or newer, such as "
            f"{DEFAULT_CUDA_ARCH_LIST} "
            "(older GPUs cannot run the kernels: unset it, or set SHARDCORE_CUDA=0 for a CPU build)"
        )
    return Decision(torch_version, nvcc.release, ";".join(archs), why)


def find_nvcc(env: dict[str, str]) -> Nvcc | None:
    """The nvcc of CUDA_HOME or CUDA_PATH, else of PATH, else of /usr/local/cuda. None without
    one that runs.
    """
    named = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    path = (
        f"{named}/bin/nvcc"
        if named
        else shutil.which("nvcc", path=env.get("PATH")) or "/usr/local/cuda/bin/nvcc"
    )
    if not os.access(path, os.X_OK):
        if named:
            raise BuildError(
                f"build: CUDA_HOME is {named}, which has no bin/nvcc; expected a CUDA toolkit "
                f"(correct or unset it)"
            )
        return None
    version = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=False
    ).stdout
    release = re.search(r"release (\d+\.\d+)", version)
    return Nvcc(release[1], named or _toolkit_of(path)) if release else None


def _toolkit_of(nvcc: str) -> str:
    """The toolkit folder of an nvcc. A dry run tells it even when nvcc is a script that calls
    the real one.
    """
    dry = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
    )
    top = re.search(r"^#\$ TOP=(.+)$", dry.stderr, re.MULTILINE)
    folders = [Path(top[1].strip())] if top else []
    folders += [Path(nvcc).resolve().parent.parent, Path("/usr/local/cuda")]
    for folder in folders:
        if (folder / "include/cuda_runtime.h").exists() or list(
            folder.glob("targets/*/include/cuda_runtime.h")
        ):
            return str(folder.resolve())
    raise BuildError(
        f"build: {nvcc} was found, but not its toolkit (no include/cuda_runtime.h near it); "
        f"expected a whole CUDA toolkit "
        "(set CUDA_HOME to it, or set SHARDCORE_CUDA=0 for a CPU build)"
    )


def find_liburing(env: dict[str, str]) -> tuple[str, str]:
    """How to link liburing ("" without it), and the line that says so. SHARDCORE_IO_URING=0 leaves
    it out, 1 requires it.

    The static library where it can be linked into an extension: then a machine needs liburing only
    to build.
    """
    forced = env.get("SHARDCORE_IO_URING")
    if forced not in (None, "", "0", "1"):
        raise BuildError(
            f"build: SHARDCORE_IO_URING is {forced!r}; expected 0 (files by threads only), 1 "
            f"(liburing required) or unset "
            "(io_uring if liburing is there)"
        )
    threads = "shardcore: files by threads only, because "
    if forced == "0":
        return "", threads + "SHARDCORE_IO_URING=0"
    # io_uring_free_probe: the newest function that csrc/io calls
    source = (
        "#include <liburing.h>\nint made(io_uring* r) { return io_uring_free_probe(nullptr), "
        "io_uring_queue_init(1, r, 0); }\n"
    )
    for flag in ("-l:liburing.a", "-luring"):
        with tempfile.TemporaryDirectory() as folder:
            command = [env.get("CXX") or "c++", "-shared", "-fPIC", "-Wl,-z,defs", "-x", "c++", "-"]
            command += ["-o", f"{folder}/made.so", flag]
            done = subprocess.run(
                command, input=source, env=env, capture_output=True, text=True, check=False
            )
        if done.returncode == 0:
            return (
                flag,
                f"shardcore: files by io_uring or threads, because liburing was found ({flag})",
            )
    if forced == "1":
        raise BuildError(
            "build: SHARDCORE_IO_URING is 1, but liburing 2.0 or newer was not found; expected its "
            "header and library "
            "(Debian, Ubuntu: apt-get install liburing-dev; Fedora: dnf install liburing-devel; or "
            "unset it): "
            f"{done.stderr[-500:].strip()}"
        )
    return (
        "",
        threads + "liburing 2.0 or newer was not found (apt-get install liburing-dev, dnf install "
        "liburing-devel)",
    )


def is_isolated(paths: list[str]) -> bool:
    """Whether sys.prefix and sys.path (``paths``) are those of a throw-away build environment of
    pip, build or uv.

    pip and build make them in the temporary folder, uv in its cache; elsewhere a folder may have
    such a name and mean nothing.
    """
    temporary = re.escape(os.path.realpath(tempfile.gettempdir()))
    throw_away = re.compile(rf"^{temporary}/(pip-)?build-env-|/builds-v\d+/\.tmp")
    return any(throw_away.search(os.path.realpath(path)) for path in paths)


def no_setuptools(paths: list[str]) -> str:
    """The text for a build environment without setuptools."""
    if is_isolated(paths):
        return ISOLATED
    return (
        f"build: setuptools is not installed here; expected it (pip install setuptools wheel "
        f"ninja, then {NO_ISOLATION})"
    )


def check_torch_location(torch_file: str | None, paths: list[str]) -> None:
    """Refuse to build where torch is missing, or is a copy that pip put into a throw-away build
    environment.

    An extension works only with the torch it was compiled against. An isolated environment is not
    where the package will run, so its torch (or the lack of one) says nothing. ``paths``:
    sys.prefix and sys.path.
    """
    if torch_file is None and is_isolated(paths):
        raise BuildError(ISOLATED)
    if torch_file is None:
        raise BuildError(
            f"build: torch is not installed here; expected 2.11 or newer (pip install torch, then "
            f"{NO_ISOLATION})"
        )
    if is_isolated([torch_file]):
        raise BuildError(f"{ISOLATED} [torch here: {torch_file}]")


def check_tools(env: dict[str, str], include_dir: str) -> None:
    """Refuse to start without a C++ compiler or Python's headers, naming the packages to
    install.
    """
    cxx = env.get("CXX") or "c++"
    if len(cxx.split()) > 1:
        raise BuildError(
            f"build: CXX is {cxx!r}; expected one word, because torch's build takes it as the name "
            f"of one program (set CXX to the path of an executable script with the two "
            f'lines #!/bin/sh and exec {cxx} "$@")'
        )
    if not shutil.which(cxx, path=env.get("PATH")):
        raise BuildError(
            f"build: no C++ compiler ({cxx} is not on PATH); expected GCC {MIN_GCC} or newer "
            f"(Debian, Ubuntu: "
            "apt-get install g++; Fedora: dnf install gcc-c++; or set CXX)"
        )
    if not Path(include_dir, "Python.h").exists():
        raise BuildError(
            f"build: Python.h is not in {include_dir}; expected Python's C headers (Debian, "
            f"Ubuntu: apt-get install "
            "python3-dev; Fedora: dnf install python3-devel)"
        )


def check_writable(root: Path) -> None:
    """Refuse a source tree that cannot be written to: all that is built goes through its build/."""
    for folder in (root, root / "build"):
        try:
            folder.mkdir(exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise BuildError(
                f"build: {folder} cannot be written to ({error.strerror}); expected a source tree "
                f"of your own, with space for "
                "what is built (copy it)"
            ) from error


def read_macros(env: dict[str, str]) -> dict[str, str]:
    """What the C++ compiler says of itself: its predefined macros. Raises BuildError if it does
    not run.
    """
    command = [env.get("CXX") or "c++", "-O3", "-dM", "-E", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(
            f"build: {command[0]} does not work; expected a C++ compiler: "
            f"{done.stderr[-2000:].strip()}"
        )
    return dict(re.findall(r"^#define (\w+) ?(.*)$", done.stdout, re.MULTILINE))


def check_compiler(macros: dict[str, str], clang_openmp: bool) -> None:
    """Refuse a compiler whose code would not load, or would change results, or that is too old:
    after minutes it would fail.

    macros: see read_macros. clang_openmp: whether the OpenMP library that torch brings has what
    clang's code calls.
    """
    fix = (
        f"expected GCC {MIN_GCC} or newer (set CXX to a g++; Enterprise Linux 8 has gcc-toolset-12)"
    )
    if (
        "__FAST_MATH__" in macros
        or macros.get("__FINITE_MATH_ONLY__") == "1"
        or "__INTEL_LLVM_COMPILER" in macros
    ):
        raise BuildError(
            f"build: the C++ compiler changes arithmetic by default (-ffast-math); {fix}"
        )
    if "__clang__" in macros and not clang_openmp:
        raise BuildError(
            f"build: the C++ compiler is clang {macros.get('__clang_major__')}, whose OpenMP calls "
            f"torch's OpenMP library does "
            f"not have, so that the extension would not load; {fix}"
        )
    if "__clang__" not in macros and int(macros.get("__GNUC__", "0")) < MIN_GCC:
        raise BuildError(
            f"build: the C++ compiler is GCC {macros.get('__GNUC__', '(unknown)')}; {fix}"
        )


def check_flags(env: dict[str, str]) -> None:
    """Refuse compiler flags of the environment that would change results: shardcore promises the
    same bits everywhere.
    """
    for name in FLAG_VARIABLES:
        unsafe = UNSAFE_MATH.search(env.get(name, ""))
        if unsafe:
            raise BuildError(
                f"build: {name} has {unsafe[0]}; expected no flag that changes arithmetic (unset "
                f"it)"
            )


def read_flags(path: Path = ROOT / "csrc/flags.txt") -> dict[str, list[str]]:
    """The compiler flags of csrc/flags.txt for the extension: cxx, and nvcc with the host's
    flags for its host half.
    """
    lines = [
        line.split(":", 1)
        for line in path.read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    flags = {name.strip(): value.split() for name, value in lines}
    host = [flag for flag in flags["cxx"] if flag.startswith("-f")]
    flags["cxx"] = [CXX_STANDARD, *flags["cxx"], *flags.pop("extension", []), "-g0"]
    flags["nvcc"] = [CXX_STANDARD, *flags["nvcc"], "-Xcompiler", ",".join(host)]
    return flags


def make_macros(version: str, decision: Decision) -> list[str]:
    """The macros of every source.

    build_info() shows them. Of torch also because another torch in the same place may have older
    files than our objects (conda and uv keep dates), and ninja would link these: a command line
    that differs makes it compile.
    """
    values = {"VERSION": version, "CUDA_ARCH_LIST": decision.arch_list, "FOR_TORCH": decision.torch}
    return [f'-DSHARDCORE_{name}="{value}"' for name, value in values.items()]


def find_sources(with_cuda: bool, csrc: Path = ROOT / "csrc") -> list[str]:
    """All csrc/**/*.cpp, and *.cu with CUDA, as sorted paths relative to the repository root.

    Raises BuildError when two sources of one folder differ in their suffix only: both would become
    the same object file.
    """
    found = sorted(
        p
        for suffix in ([".cpp", ".cu"] if with_cuda else [".cpp"])
        for p in csrc.rglob(f"*{suffix}")
    )
    objects: dict[Path, Path] = {}
    for path in found:
        other = objects.setdefault(path.with_suffix(""), path)
        if other != path:
            raise BuildError(
                f"build: {other.name} and {path.name} have one object file; expected other names "
                f"(say {path.stem}_cuda.cu)"
            )
    if not found:
        raise BuildError(
            f"build: no sources in {csrc}; expected a full checkout or an sdist that has csrc/"
        )
    return [str(path.relative_to(csrc.parent)) for path in found]


def count_jobs(given: str | None, cores: int) -> int:
    """Return how many files are compiled at once: what MAX_JOBS says, or one a core. Raises
    BuildError.
    """
    if given is None:
        return cores
    if not given.isdecimal() or int(given) == 0:
        raise BuildError(
            f"build: MAX_JOBS is {given!r}; expected a number from 1 on (or unset it: one file per "
            f"core)"
        )
    return int(given)


def join_bindings(sources: list[str], count: int, root: Path = ROOT) -> list[str]:
    """Put at most `count` files in build/ that include them in the place of csrc/bind's C++
    sources; returns what to compile.

    Reading torch's headers takes most of the time of each, so a file per core is what compiles
    fastest.
    """
    bindings = [
        source for source in sources if source.startswith("csrc/bind/") and source.endswith(".cpp")
    ]
    joined = []
    count = max(1, min(count, len(bindings)))
    for index in range(count):
        path = root / f"build/bindings_{index}_of_{count}.cpp"
        text = "".join(
            f'#include "{source.removeprefix("csrc/")}"\n' for source in bindings[index::count]
        )
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != text:  # else ninja would compile it again
            path.write_text(text)
        joined.append(str(path.relative_to(root)))
    return joined + [source for source in sources if source not in bindings]
