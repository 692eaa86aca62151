"""Builds shardcore._C with torch.utils.cpp_extension. What is built and why is decided in
tools/build_config.py.
"""

import ctypes
import importlib.util
import json
import os
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a PEP 517 build does not put the project's folder on the path

from setuptools import setup  # noqa: E402

from tools import build_config  # noqa: E402
from tools.build_config import BuildError, Decision  # noqa: E402

NO_TORCH_NEEDED = {"sdist", "clean", "--version", "--name", "--help", "-h"}
BUILDS = {
    "build",
    "build_ext",
    "bdist",
    "bdist_wheel",
    "bdist_egg",
    "editable_wheel",
    "develop",
    "install",
    "install_lib",
}


def needs_torch(arguments: list[str]) -> bool:
    """Whether these commands build: any of them is enough (clean build_ext), and so is what we
    do not know.
    """
    return bool(BUILDS.intersection(arguments)) or not NO_TORCH_NEEDED.intersection(arguments)


def prepare() -> Decision:
    """Check torch and tools, set what torch's build reads from the environment, and decide.
    Raises BuildError.
    """
    spec = importlib.util.find_spec("torch")
    build_config.check_torch_location(spec.origin if spec else None, [sys.prefix, *sys.path])
    build_config.check_writable(ROOT)
    build_config.check_flags(dict(os.environ))
    build_config.check_tools(dict(os.environ), sysconfig.get_paths()["include"])
    import torch

    # looks in all that torch loads, too
    clang_openmp = hasattr(ctypes.CDLL(torch._C.__file__), "__kmpc_fork_call")
    build_config.check_compiler(build_config.read_macros(dict(os.environ)), clang_openmp)
    nvcc = None
    if torch.version.cuda and os.environ.get("SHARDCORE_CUDA") != "0":
        nvcc = build_config.find_nvcc(dict(os.environ))
    decision = build_config.decide(
        os.environ.get("SHARDCORE_CUDA"),
        nvcc,
        torch.__version__,
        torch.version.cuda,
        os.environ.get("TORCH_CUDA_ARCH_LIST"),
    )
    if decision.cuda and nvcc:
        # torch would guess it from PATH, where nvcc may be a script
        os.environ["CUDA_HOME"] = nvcc.cuda_home
        # unset, torch would ask the GPUs of this machine
        os.environ["TORCH_CUDA_ARCH_LIST"] = decision.arch_list
    # a virtual environment that is not activated is not on PATH
    if importlib.util.find_spec("ninja"):
        import ninja

        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])
    os.environ["MAX_JOBS"] = str(
        build_config.count_jobs(os.environ.get("MAX_JOBS"), len(os.sched_getaffinity(0)))
    )
    return decision


def extension_arguments(decision: Decision) -> dict[str, object]:
    """ext_modules and cmdclass for setup(). Imports torch's build helpers, which read CUDA_HOME
    when imported.
    """
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    class Build(BuildExtension):
        """BuildExtension that prints what was built and records it beside the library
        (shardcore/_C.build.json).
        """

        def run(self) -> None:
            super().run()
            record = {
                "torch": decision.torch,
                "cuda": decision.cuda,
                "python": sysconfig.get_python_version(),
                "line": decision.line,
                "files": files_line,
            }
            library = Path(self.get_ext_fullpath("shardcore._C"))
            library.with_name("_C.build.json").write_text(json.dumps(record, indent=1) + "\n")
            print(files_line, decision.line, sep="\n", file=sys.stderr, flush=True)

    liburing, files_line = build_config.find_liburing(dict(os.environ))
    parts = {"CUDA": decision.cuda, "LIBURING": liburing}
    flags = build_config.read_flags()
    macros = build_config.make_macros(version(), decision)
    extension = (CUDAExtension if decision.cuda else CppExtension)(
        name="shardcore._C",
        sources=build_config.join_bindings(
            build_config.find_sources(bool(decision.cuda)), int(os.environ["MAX_JOBS"])
        ),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[(f"SHARDCORE_WITH_{what}", "1") for what, there in parts.items() if there],
        extra_link_args=[liburing] if liburing else [],
        extra_compile_args={"cxx": flags["cxx"] + macros, "nvcc": flags["nvcc"]},
        depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.h"))],
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


def version() -> str:
    """The version of shardcore/version.py, without importing the package (it needs the
    extension).
    """
    names: dict[str, str] = {}
    exec((ROOT / "shardcore/version.py").read_text(), names)
    return names["__version__"]


if __name__ == "__main__":
    os.chdir(ROOT)
    arguments, requirement = {}, "torch>=2.11"  # of an sdist
    try:
        if needs_torch(sys.argv[1:]):
            decision = prepare()
            arguments, requirement = extension_arguments(decision), decision.requirement
            # of tools/make_wheel.py: 0.1.0+torch2.13.0.cpu
            if os.environ.get("SHARDCORE_LOCAL_VERSION") == "1":
                arguments["options"] = {"egg_info": {"tag_build": f"+{decision.local_version}"}}
    except BuildError as error:
        sys.exit(f"\n{error}\n")
    setup(license="Apache-2.0", install_requires=[requirement], **arguments)
