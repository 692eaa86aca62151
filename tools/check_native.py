"""Checks a built extension: everything that _C.pyi promises is there, and one Adam step on the CPU
is right.

Run with the Python to check: python -m tools.check_native [--cuda]. With --cuda it must have been
built with CUDA sources.
"""

import argparse
import ast
import sys
from pathlib import Path
from types import ModuleType

import torch

import shardcore
from shardcore._native import _C, build_record

STUB = Path(__file__).resolve().parent.parent / "shardcore/_C.pyi"


def promised(stub: str) -> list[str]:
    """The names of a stub file: functions, classes, and "Class.member" for methods, properties
    and attributes.
    """
    names = []
    for node in ast.parse(stub).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.ClassDef):
            names.append(node.name)
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    names.append(f"{node.name}.{member.name}")
                elif isinstance(member, ast.AnnAssign):
                    names.append(f"{node.name}.{ast.unparse(member.target)}")
    return names


def missing(module: ModuleType, names: list[str]) -> list[str]:
    """The names that the module does not have."""
    absent = []
    for name in names:
        owner, _, member = name.partition(".")
        found = getattr(module, owner, None)
        if found is None or (member and not hasattr(found, member)):
            absent.append(name)
    return absent


def first_step_error(optimizer_class: type[torch.optim.Optimizer]) -> float:
    """How far the first Adam step is from its known value: without decay it moves each weight by
    lr against the gradient.
    """
    param = torch.nn.Parameter(torch.linspace(-1, 1, 1027))
    before = param.detach().clone()
    param.grad = torch.where(torch.arange(1027) % 2 == 0, 3.0, -0.5)
    optimizer_class([param], lr=0.1).step()  # type: ignore[call-arg]
    return float((param.detach() - (before - 0.1 * param.grad.sign())).abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--cuda", action="store_true", help="fail unless the CUDA sources were built"
    )
    options = parser.parse_args()
    info = _C.build_info()
    print(
        f"{build_record().get('line')}\nimported from {Path(_C.__file__).parent} with torch "
        f"{torch.__version__}; {info}"
    )
    problems = [
        f"shardcore._C lacks {name}, which _C.pyi promises"
        for name in missing(_C, promised(STUB.read_text()))
    ]
    if options.cuda and not info["cuda"]:
        problems.append("built without CUDA sources")
    for optimizer_class in (shardcore.FusedAdam, shardcore.CPUAdam):
        error = first_step_error(optimizer_class)
        print(
            f"{optimizer_class.__name__}: first step on the CPU within {error:.1e} of its known "
            f"value"
        )
        if not error < 1e-6:
            problems.append(f"{optimizer_class.__name__}: the first step is off by {error}")
    print("\n".join(problems) or "check_native: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
