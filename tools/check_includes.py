"""Checks the walls between the rooms of csrc/ and some rules that no other tool knows. Run: python
-m tools.check_includes

- Each room of csrc/ includes its own headers and those of the rooms that ROOMS allows it; only
  csrc/bind sees torch.
- No source file has more than 900 lines.
- Each test file is named after a module of the package that its folder mirrors, and imports from no
  other test file.
- Each module of the package has such a test file.
- Private names of torch stand in shardcore/torch_private.py alone. All files may use
  `torch._foreach_*`, `Tensor._version`, `torch._dynamo.disable`, and `_parameters`, `_modules` and
  `_buffers` of a module. A private name that the package does not define itself counts as
  torch's, unless it is one of OTHERS.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 900

# Which other rooms a room may include (DESIGN: core knows nothing; bind knows all).
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "adam": {"core"},
    "norm": {"core"},
    "reduce": {"core", "norm"},
    "elementwise": {"core"},
    "digest": {"core"},
    "isa": {"core", "adam", "norm", "reduce", "elementwise", "digest"},
    "copy": {"core"},
    "offload": {"core", "adam", "copy"},
    "io": {"core", "copy"},
    "bind": {"core", "adam", "norm", "reduce", "elementwise", "digest", "copy", "offload", "io"},
}
# What test files are named after: modules of shardcore/<folder>, or where it is listed here of
# these folders, and these words.
TESTED: dict[str, tuple[str, ...]] = {
    "": ("shardcore/", "cpp"),
    "build": ("ci", "native", "optional_packages", "pip", "sdist", "wheel"),
    "engine": ("shardcore/engine/", "hot_path"),
    "examples": (
        "examples/",
        "benchmarks/",
        "benchmarks",
        "readme",
        "quickstart",
        "recipes",
        "tutorial",
    ),
    "launch": ("shardcore/launch/", "ray"),
    "models": ("architectures", "libraries", "pretrained"),
    "native": ("csrc/bind/",),
    "support": ("tests/support/",),
    "tools": ("tools/",),
}
# tests/build/test_native.py tests the last one
UNTESTED = {"__init__", "__main__", "version", "_native"}
BIND_ONLY = re.compile(r"^(torch|ATen|c10|pybind11|caffe2)/|^Python\.h$")
# two thread runtimes disturb each other, and TSan cannot see OpenMP
NOWHERE = re.compile(r"^omp\.h$")
TORCH_PRIVATE = Path("shardcore", "torch_private.py")
# names that begin with one underscore, of which these are allowed in all files
PRIVATE = re.compile(r"_(?!_)\w+")
ALLOWED = re.compile(r"_foreach_\w+|_version|_parameters|_modules|_buffers|_shardcore_\w+")
# private names of Python and of libraries other than torch, and our marks on modules
OTHERS = {
    # Python
    *("_current_frames", "_exit", "_option_string_actions", "_replace", "_run_exitfuncs"),
    "_shutdown",
    # transformers, PEFT, TRL, accelerate and lightning
    *("_adjust_missing_and_unexpected_keys", "_attn_implementation", "_init_weights"),
    "_cache_pop",
    *("_hf_peft_config_loaded", "_keys_to_ignore_on_save"),
    *("_keys_to_ignore_on_load_missing", "_n_gpu", "_supports_attention_backend", "_tp_plan"),
    *("_hf_hook", "_initialize_missing_keys", "_is_accelerate_prepared", "_is_hf_initialized"),
    *("_load_pretrained_model", "_models", "_optimizers", "_weight_conversions"),
    "_weight_metadata",
    *("_after_closure", "_forward_redirection", "_layer_sync"),
    # verl and hydra
    *("_autocast_dtype", "_build_fsdp_module", "_build_model_optimizer", "_build_optimizer"),
    *("_current_platform", "_global_", "_gradient_sync_context", "_is_lora"),
    # DeepSpeed, and ours
    *("_autotp_size", "_z3_leaf", "_of_adapters", "_sliced_over"),
}
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
SOURCE_FOLDERS = ("csrc", "shardcore", "tests", "benchmarks", "examples", "tools")


def check_room(path: Path, text: str) -> Iterator[str]:
    """Problems in the includes of one file; ``path`` is relative to the repository
    (csrc/<room>/...).
    """
    room = path.parts[1]
    if room not in ROOMS:
        yield (
            f"{path}: csrc/{room} is not a room; expected one of {', '.join(ROOMS)} (or add it "
            f"to {Path(__file__).name})"
        )
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if not match:
            continue
        header = match[2]
        if NOWHERE.match(header):
            yield (
                f"{path}:{number}: includes {header}; expected no OpenMP (take an executor, "
                f"csrc/core/executor.h)"
            )
        elif BIND_ONLY.match(header):
            if room != "bind":
                yield (
                    f"{path}:{number}: includes {header}; expected torch and Python in "
                    f"csrc/bind "
                    f"only"
                )
        elif match[1] == '"':
            other = header.split("/")[0] if "/" in header else ""
            if other not in ROOMS:
                yield (
                    f'{path}:{number}: includes "{header}"; expected a path from csrc/, such as '
                    f'"{room}/{Path(header).name}"'
                )
            elif other != room and other not in ROOMS[room]:
                yield (
                    f"{path}:{number}: csrc/{room} includes {header}; expected only "
                    f"{', '.join(sorted({room, *ROOMS[room]}))}"
                )


def check_length(path: Path, text: str) -> Iterator[str]:
    lines = len(text.splitlines())
    if lines > MAX_LINES:
        yield f"{path}: has {lines} lines; expected at most {MAX_LINES} (split it by subject)"


def named_after(stem: str, names: Iterable[str]) -> str:
    """The one of ``names`` after which a test file is named: the longest that fits
    (test_state_dict.py: state_dict), or "".
    """
    return max(
        (name for name in names if f"{stem}_".startswith(f"test_{name}_")), key=len, default=""
    )


def check_test(path: Path, text: str, root: Path) -> Iterator[str]:
    """The name and the imports of one test file (tests/<folder>/test_<module>_<subject>.py)."""
    for node in ast.walk(ast.parse(text)):
        found = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else []
        )
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module or ''}.{name}" for name in found]
        for name in found:
            if any(part.startswith("test_") for part in name.split(".")):
                yield (
                    f"{path}:{node.lineno}: imports {name}; expected what tests share in "
                    f"tests/support"
                )
    folder = "/".join(path.parts[1:-1])
    names = set()
    for word in TESTED.get(folder, (f"shardcore/{folder}/",)):
        files = (
            [file.stem for file in (root / word).glob("*") if file.is_file()]
            if word.endswith("/")
            else [word]
        )
        names |= {name.removeprefix("bind_").lstrip("_") for name in files if name != "__init__"}
    if not named_after(path.stem, names):
        expected = "expected test_<module>.py or test_<module>_<subject>.py"
        yield f"{path}: is named after none of {', '.join(sorted(names))}; {expected}"


def check_tested(path: Path, text: str, root: Path) -> Iterator[str]:
    """That one module of shardcore/ has a test file; ``path`` is relative to the repository."""
    if path.stem in UNTESTED or not text.strip():
        return
    folder = Path("tests", *path.parts[1:-1])
    names = [file.stem for file in (root / path.parent).glob("*.py")]
    if not any(
        named_after(file.stem, names) == path.stem for file in (root / folder).glob("test_*.py")
    ):
        yield (
            f"{path}: has no test file; expected {folder}/test_{path.stem}.py or "
            f"test_{path.stem}_<subject>.py"
        )


def own_names(trees: Iterable[ast.AST]) -> set[str]:
    """The names that the package gives to functions, classes, variables and attributes."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name("self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def check_private(path: Path, text: str, own: set[str], torchs: set[str]) -> Iterator[str]:
    """Private names of others in one file. own: the package's; torchs: those in TORCH_PRIVATE,
    which count as the package's after "self." alone.
    """
    tree = ast.parse(text.replace("torch._dynamo.disable", "disable"))  # the lines stay the same
    for node in ast.walk(tree):
        of_self = False
        match node:
            case ast.Attribute(value=value, attr=name):
                found, of_self = [name], ast.unparse(value) in ("self", "cls", "super()")
            case ast.Import(names=names):
                torch = [each.name for each in names if each.name.startswith("torch")]
                found = [part for name in torch for part in name.split(".")]
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                found = [*module.split("."), *(each.name for each in names)]
            case ast.Call(args=[*_, ast.Constant(str(name))] | [_, ast.Constant(str(name)), _]):
                # getattr and the like; sys.modules.get and import_module
                found = name.split(".") if name.startswith("torch.") else [name]
            case ast.Subscript(value=ast.Attribute(attr="__dict__"), slice=ast.Constant(str(name))):
                found = [name]
            case _:
                continue
        for name in found:
            known = own if of_self else own - torchs
            if (
                PRIVATE.fullmatch(name)
                and not ALLOWED.fullmatch(name)
                and name not in known | OTHERS
            ):
                yield (
                    f"{path}:{node.lineno}: uses the private name {name}; expected torch's names "
                    f"in {TORCH_PRIVATE} (other libraries': in OTHERS of {Path(__file__).name})"
                )


def problems(root: Path = ROOT) -> Iterable[str]:
    """All problems of a checkout, sorted by file."""
    package = {file.relative_to(root): file.read_text() for file in root.glob("shardcore/**/*.py")}
    own = own_names(map(ast.parse, package.values()))
    torchs = set(re.findall(rf"\b{PRIVATE.pattern}", package.get(TORCH_PRIVATE, "")))
    for folder in SOURCE_FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            path = file.relative_to(root)
            if (
                file.suffix not in CPP_SUFFIXES | {".py", ".pyi", ".sh"}
                or "__pycache__" in path.parts
            ):
                continue
            text = file.read_text()
            yield from check_length(path, text)
            if folder == "csrc":
                yield from check_room(path, text)
            if folder == "shardcore" and file.suffix == ".py":
                yield from check_tested(path, text, root)
                if path != TORCH_PRIVATE:
                    yield from check_private(path, text, own, torchs)
            if folder == "tests" and file.match("test_*.py"):
                yield from check_test(path, text, root)


def main() -> int:
    found = list(problems())
    print("\n".join(found) if found else "check_includes: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
