"""The walls hold in this checkout, and each rule finds the breach that it is there for."""

from pathlib import Path

import pytest

from tools import check_includes


@pytest.fixture
def checkout(tmp_path):
    """A clean small checkout; ``write`` adds a file to it."""

    def write(path: str, text: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    write("csrc/core/span.h", "#include <cstdint>\n")
    write("csrc/adam/adam_cpu.cpp", '#include "adam/adam_cpu.h"\n#include "core/span.h"\n')
    write("csrc/bind/module.cpp", '#include <torch/types.h>\n#include "adam/adam_cpu.h"\n')
    write("shardcore/layout.py", "import math\n")
    write("tests/test_layout.py", "")
    write("shardcore/optim/state.py", "import math\n")
    write("tests/optim/test_state_cases.py", "")
    for path in ("__init__", "version", "optim/__init__", "optim/empty"):
        write(f"shardcore/{path}.py", "" if path == "optim/empty" else "import math\n")
    return write


@pytest.mark.slow  # tools/lint.sh runs it
def test_this_checkout_keeps_the_rules():
    assert list(check_includes.problems()) == []


def test_a_clean_checkout_passes(checkout):
    assert list(check_includes.problems(checkout("csrc/adam/adam_cpu.h", ""))) == []


ALLOWED = """
import os
import torch

class Own:
    def __init__(self, module, param):
        self._kept = self._base = torch._foreach_mul([param], 2.0)
        self._version = param._version
        self.all = module._parameters, module._modules, module._buffers

    @torch._dynamo.disable
    def _end(self, other):
        other._kept, self._base = other._end(self), self._base
        getattr(other, "_shardcore_engine", None)
        os._exit(0)
"""


def test_private_names_of_torch_stand_in_one_file(checkout):
    checkout("tests/test_torch_private.py", "")
    checkout("shardcore/torch_private.py", "base_of = lambda x: x._base\nid = torch._C._id\n")
    assert list(check_includes.problems(checkout("shardcore/layout.py", ALLOWED))) == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch._C", "_C"),
        ("torch._foreign_mul(x)", "_foreign_mul"),
        ("x.grad_fn._sequence_nr()", "_sequence_nr"),
        ("x._base", "_base"),  # a name that Own has, too, but for itself
        ("self._backward_hooks", "_backward_hooks"),
        ("x._opt_called = True", "_opt_called"),
        ("x.__dict__['_opt_called'] = True", "_opt_called"),
        ("torch._dynamo.reset()", "_dynamo"),
        ("getattr(x, '_is_replica')", "_is_replica"),
        ("getattr(x, '_is_replica', False)", "_is_replica"),
        ("setattr(x, '_is_replica', False)", "_is_replica"),
        ("sys.modules.get('torch.distributed._composable')", "_composable"),
        ("import torch.utils._pytree as pytree", "_pytree"),
        ("from torch.utils import _pytree", "_pytree"),
        ("from torch._compile import disable", "_compile"),
    ],
)
def test_other_private_names_are_found(checkout, line, name):
    checkout("tests/test_torch_private.py", "")
    checkout("shardcore/torch_private.py", "base_of = lambda x: x._base\n")
    found = list(check_includes.problems(checkout("shardcore/layout.py", f"{ALLOWED}\n{line}\n")))
    number = len(ALLOWED.splitlines()) + 2
    start = (
        f"shardcore/layout.py:{number}: uses the private name {name}; expected torch's names in "
    )
    assert [problem[: len(start)] for problem in found] == [start]
    assert "shardcore/torch_private.py" in found[0]


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        (
            "csrc/core/x.h",
            "#include <torch/types.h>",
            "csrc/core/x.h:1: includes torch/types.h; expected torch and Python in csrc/bind",
        ),
        ("csrc/adam/x.h", "#  include <pybind11/pybind11.h>", "torch and Python in csrc/bind only"),
        (
            "csrc/norm/x.cpp",
            "\n#include <c10/util/Half.h>",
            "csrc/norm/x.cpp:2: includes c10/util/Half.h",
        ),
        ("csrc/copy/x.cu", "#include <Python.h>", "torch and Python in csrc/bind only"),
        (
            "csrc/core/x.cpp",
            '#include "adam/adam_math.h"',
            "csrc/core includes adam/adam_math.h; expected only core",
        ),
        (
            "csrc/adam/x.cpp",
            '#include "bind/checks.h"',
            "csrc/adam includes bind/checks.h; expected only adam, core",
        ),
        ("csrc/adam/x.cpp", '#include "norm/norm.h"', "csrc/adam includes norm/norm.h"),
        ("csrc/adam/x.cpp", '#include "../core/span.h"', "expected a path from csrc/"),
        ("csrc/core/x.cpp", "#include <omp.h>", "expected no OpenMP"),
        ("csrc/stuff/x.cpp", "", "csrc/stuff is not a room"),
        ("csrc/core/long.cpp", "//\n" * 901, "has 901 lines; expected at most 900"),
        ("tests/test_layout.py", "#\n" * 901, "has 901 lines; expected at most 900"),
        (
            "shardcore/x.py",
            "1",
            "shardcore/x.py: has no test file; expected tests/test_x.py or test_x_<subject>.py",
        ),
        (
            "shardcore/optim/layout.py",
            "1",
            "layout.py: has no test file; expected tests/optim/test_layout.py",
        ),
        (
            "shardcore/optim/state_cases.py",
            "1",
            "optim/state.py: has no test file; expected tests/optim/test_state.py",
        ),
        (
            "tests/test_layout_of_units.py",
            "from tests.engine.test_units import x",
            "_units.py:1: imports tests.engine.test_units.x",
        ),
        (
            "tests/test_layout.py",
            "def f():\n    import tests.test_api",
            "tests/test_layout.py:2: imports tests.test_api",
        ),
        (
            "tests/test_layouts.py",
            "",
            "_layouts.py: is named after none of cpp, layout, version; expected test_<module>.py",
        ),
        ("tests/engine/test_layout.py", "", "tests/engine/test_layout.py: is named after none of "),
    ],
)
def test_each_rule_finds_its_breach(checkout, path, text, problem):
    found = list(check_includes.problems(checkout(path, text)))
    assert len(found) == 1
    assert problem in found[0]
