"""Checks the compiled CUDA kernels, without a GPU: no spills, and 16 bytes per thread in each
access to a bulk stream.

Run with the Python that has the built extension: python -m tools.check_kernels [library]. It reads
the disassembly of cuobjdump (of the CUDA toolkit, else the one in triton's wheel), prints a table,
and fails if a kernel breaks its rule in RULES.

How bulk accesses are told from others. A kernel reads a few table entries, then walks its streams
in loops: a vector loop over what is whole and aligned, and a scalar loop over the rest. An
outermost loop (tools/sass.py finds them) with 16-byte accesses to global memory is a *bulk loop*:

- it must have at least the 16-byte loads and stores of its LoopRule: what the paths of all dtypes
  need together;
- narrower accesses in it must be those that the rule names: 8-bit codes 8 bytes, the scale of each
  256-element block 4;
- a kernel must have as many bulk loops as it has rules, so a vector loop that lost all its wide
  accesses is missed;
- where arithmetic may bind the rule limits the instructions of a round of the loop, and those of
  the integer pipe, which has half the rate of the others: of the shortest ways through each wide
  access the longest, since what is rare is a detour.

What lies outside of bulk loops is tables, results of blocks and scalar tails, and is free. Accesses
to local memory are spills.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.build_config import find_nvcc
from tools.sass import (
    Access,
    access_of,
    kernel_name,
    loops_of,
    parse_resources,
    parse_sass,
    shortest_round,
    successors,
)

ROOT = Path(__file__).resolve().parent.parent
WIDE = 16  # bytes
# Opcodes of the integer pipe: logic, shifts, additions, compares and selections, those of floats
# included.
INTEGER = frozenset(
    {
        "BMSK",
        "CS2R",
        "FCHK",
        "FMNMX",
        "FSEL",
        "FSETP",
        "IABS",
        "IADD3",
        "IMNMX",
        "ISETP",
        "LEA",
        "LOP3",
        "MOV",
        "P2R",
        "PLOP3",
    }
    | {"PRMT", "R2P", "SEL", "SGXT", "SHF", "VABSDIFF", "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3"}
)


@dataclass(frozen=True)
class Loop:
    accesses: Counter[Access]  # to global memory
    instructions: int  # of a round
    integer: int  # of these, of the integer pipe


@dataclass(frozen=True)
class Kernel:
    name: str
    arch: str
    registers: int
    spill_bytes: int  # stack frame and local memory
    local_accesses: int
    loops: tuple[Loop, ...]  # bulk loops
    outside: Counter[Access]  # accesses to global memory of everything else


@dataclass(frozen=True)
class LoopRule:
    """What a bulk loop must have: at least these 16-byte loads and stores; at most these
    narrower accesses and instructions.
    """

    loads: int
    stores: int
    narrower: Mapping[Access, int] = field(default_factory=dict)
    instructions: int | None = None
    integer: int | None = None

    def broken(self, loop: Loop) -> list[str]:
        problems, accesses = [], loop.accesses
        for kind, least in (("load", self.loads), ("store", self.stores)):
            if accesses[kind, WIDE] < least:
                problems.append(
                    f"{accesses[kind, WIDE]} {kind}s of {WIDE} bytes; expected at least {least}"
                )
        for (kind, size), count in sorted(accesses.items()):
            if size < WIDE and count > self.narrower.get((kind, size), 0):
                problems.append(
                    f"{count} {kind}s of {size} bytes; expected at most "
                    f"{self.narrower.get((kind, size), 0)}"
                )
        if self.instructions is not None and loop.instructions > self.instructions:
            problems.append(
                f"{loop.instructions} instructions a round; expected at most {self.instructions}"
            )
        if self.integer is not None and loop.integer > self.integer:
            problems.append(
                f"{loop.integer} instructions of the integer pipe a round; expected at most "
                f"{self.integer}"
            )
        return problems


# What a stream needs for 8 elements of a thread: 1 access if it is 16-bit, 2 if it is float32, 3 in
# code for either. Adam: grad; weight or float32 master; the parameter beside a master; a split
# master's remainder; the moments.
_LOADS = 3 + 3 + 1
_STORES = 3 + 2 + 1
_F32 = LoopRule(_LOADS + 4, _STORES + 4)
_AMSGRAD = LoopRule(_LOADS + 6, _STORES + 6)
_BF16 = LoopRule(_LOADS + 2, _STORES + 2)
# Both moments 8 bytes, their scales 4 bytes a 256-element block.
_CODES = {("load", 8): 2, ("store", 8): 2, ("load", 4): 2, ("store", 4): 2}
_8BIT = LoopRule(_LOADS, _STORES, _CODES, instructions=785, integer=415)


def _noting(rule: LoopRule) -> LoopRule:
    """Return the rule of a loop that notes changed weights, too: it reads the master or the weight
    again, and writes a byte of bits.
    """
    narrower = {**rule.narrower, ("load", 1): 1, ("store", 1): 1}
    instructions = None if rule.instructions is None else rule.instructions + 20
    integer = None if rule.integer is None else rule.integer + 20
    return LoopRule(rule.loads + 3, rule.stores, narrower, instructions, integer)


# Every kernel, with a rule for each of its bulk loops, the lesser rules first. Those of Adam in the
# order of kAdamForms: 8-bit moments with dtypes of weight, gradient and master; then f32, bf16 and
# 8-bit moments with any, and any moments.
RULES: dict[str, list[LoopRule]] = {
    "adam_kernel<0>": [LoopRule(4, 2, _CODES, instructions=660, integer=315)],
    "adam_kernel<1>": [LoopRule(2, 1, _CODES, instructions=660, integer=315)],
    "adam_kernel<2>": [LoopRule(3, 3, _CODES, instructions=720, integer=355)],
    "adam_kernel<3>": [LoopRule(3, 2, _CODES, instructions=685, integer=335)],
    "adam_kernel<4>": [LoopRule(4, 3, _CODES, instructions=705, integer=345)],
    "adam_kernel<5>": [LoopRule(4, 2, _CODES, instructions=800, integer=395)],
    "adam_kernel<6>": [_F32],
    "adam_kernel<7>": [_BF16],
    "adam_kernel<8>": [_8BIT],
    "adam_kernel<9>": [_noting(rule) for rule in (_8BIT, _BF16, _F32, _AMSGRAD)],
    "device_step_kernel": [],  # tables alone
    # A loop over chunks. A lane has a float32 block's 8 loads in flight, or the 4 copies of the
    # next round of 16-bit blocks, of two dtypes. Narrower: the table of tensors, tails of single
    # elements, the chunk's sum.
    "sq_norm_kernel": [
        LoopRule(
            8 + 2 * (4 + 4),
            stores=0,
            narrower={("load", 2): 16, ("load", 4): 9, ("load", 8): 3, ("store", 8): 2},
        )
    ],
    # reads what blocks have summed: one number for thousands of elements
    "add_partials_kernel": [],
    # A loop a dtype of pieces: 4 copies of the first steps, 4 of each other, what the sum is added
    # to, float32 or bfloat16. Of float32 pieces a lane has two runs of 4 elements, so 8 bytes of
    # bfloat16 each.
    "ordered_sum_kernel": [
        LoopRule(loads=4 + 4 + 2, stores=2, narrower={("load", 8): 2, ("store", 8): 2}),
        LoopRule(loads=4 + 4 + 3, stores=3),
        LoopRule(loads=4 + 4 + 3, stores=3),
    ],
    # One loop for float32, 16 bits, and a split master's halves. Narrower: bytes and their scale,
    # and tails of single elements.
    "digest_kernel": [
        LoopRule(
            loads=2 + 1 + 2,
            stores=0,
            narrower={("load", 1): 8, ("load", 2): 24, ("load", 4): 9, ("load", 8): 1},
            instructions=365,
            integer=195,
        )
    ],
    # Of gradient, weight and state each 16 bits or float32, and a float32 master.
    "element_kernel<false>": [LoopRule(loads=3 * 3, stores=2 * 3 + 2)],
    "element_kernel<true>": [LoopRule(loads=3, stores=3)],  # casts
}


def read_kernels(resources: str, sass: str) -> list[Kernel]:
    """The kernels of cuobjdump's two outputs, sorted by name and architecture."""
    usage = parse_resources(resources)
    kernels = []
    for (arch, mangled), code in parse_sass(sass).items():
        if (arch, mangled) not in usage:
            raise ValueError(
                f"check_kernels: {mangled} for {arch} has no resource usage; expected both outputs "
                f"of one file"
            )
        registers, spill_bytes = usage[arch, mangled]
        accesses = [access_of(instruction.opcode) for instruction in code]
        outside = Counter(access for access in accesses if access)
        graph = successors(code)
        loops = []
        for loop in loops_of(code):
            inside = Counter(access for i in loop if (access := accesses[i]))
            wide = [i for i in loop if (access := accesses[i]) and access[1] >= WIDE]
            if wide:
                way = max((shortest_round(graph, loop, i) for i in wide), key=len)
                loops.append(Loop(inside, len(way), sum(code[i].base in INTEGER for i in way)))
                outside -= inside
        local = sum(instruction.base in {"LDL", "STL"} for instruction in code)
        kernels.append(
            Kernel(kernel_name(mangled), arch, registers, spill_bytes, local, tuple(loops), outside)
        )
    return sorted(kernels, key=lambda kernel: (kernel.name, kernel.arch))


def problems(kernels: list[Kernel], rules: Mapping[str, list[LoopRule]]) -> Iterator[str]:
    """What is wrong, a line each."""
    for kernel in kernels:
        where = f"{kernel.name} for {kernel.arch}"
        if kernel.spill_bytes or kernel.local_accesses:
            yield (
                f"{where}: {kernel.spill_bytes} bytes of stack and local memory, "
                f"{kernel.local_accesses} accesses to it; "
                "expected none (registers spill, or an array is not in registers)"
            )
        if kernel.name not in rules:
            yield (
                f"{where}: no rule; expected one in RULES of {Path(__file__).name} (how its "
                f"streams are read and written)"
            )
            continue
        left = list(rules[kernel.name])
        if len(kernel.loops) != len(left):
            yield (
                f"{where}: {len(kernel.loops)} loops with {WIDE}-byte accesses; expected "
                f"{len(left)}"
            )
            continue
        for loop in sorted(kernel.loops, key=lambda loop: loop.accesses["load", WIDE]):
            fitting = next((rule for rule in left if not rule.broken(loop)), None)
            if fitting is None:
                yield f"{where}: a loop has " + ", ".join(left[-1].broken(loop))
            else:
                left.remove(fitting)
    for name in sorted(set(rules) - {kernel.name for kernel in kernels}):
        yield f"{name}: not in the library; expected each kernel of RULES (or take its rule out)"


def table(kernels: list[Kernel]) -> str:
    """A line a kernel and architecture; accesses to global memory as loads/stores."""

    def both(accesses: Counter[Access], low: int, high: int) -> str:
        count = Counter[str]()
        for (kind, size), number in accesses.items():
            count[kind] += number if low <= size < high else 0
        return f"{count['load']}/{count['store']}"

    columns = (
        "kernel",
        "arch",
        "registers",
        "spills",
        "bulk loops",
        "16 bytes",
        "8",
        "narrower",
        "outside of bulk loops",
    )
    rows = [(*columns, "a round (integer)")]
    for kernel in kernels:
        inside: Counter[Access] = sum((loop.accesses for loop in kernel.loops), Counter())
        spills = str(kernel.spill_bytes)
        sizes = (
            both(inside, WIDE, 1 << 30),
            both(inside, 8, WIDE),
            both(inside, 0, 8),
            both(kernel.outside, 0, 1 << 30),
        )
        rounds = ", ".join(f"{loop.instructions} ({loop.integer})" for loop in kernel.loops)
        rows.append(
            (
                kernel.name,
                kernel.arch,
                str(kernel.registers),
                spills,
                str(len(kernel.loops)),
                *sizes,
                rounds,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def find_cuobjdump() -> str:
    """The toolkit's, else that of triton's wheel. Raises FileNotFoundError."""
    nvcc = find_nvcc(dict(os.environ))
    toolkits = [Path(nvcc.cuda_home) / "bin"] if nvcc else []
    spec = importlib.util.find_spec("triton")
    wheels = (
        [Path(folder) / "backends/nvidia/bin" for folder in spec.submodule_search_locations or ()]
        if spec
        else []
    )
    for folder in [*toolkits, *map(Path, os.get_exec_path()), *wheels]:
        if os.access(folder / "cuobjdump", os.X_OK):
            return str(folder / "cuobjdump")
    raise FileNotFoundError(
        "check_kernels: cuobjdump is not there; expected it beside nvcc, on PATH, or in triton's "
        "wheel"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "library", nargs="?", type=Path, help="default: the extension built into shardcore/"
    )
    library = parser.parse_args().library or next(
        iter(sorted((ROOT / "shardcore").glob("_C*.so"))), None
    )
    if library is None:
        parser.error(
            "no library; expected shardcore/_C*.so (build it with SHARDCORE_CUDA=1), or a path"
        )
    if b".nv_fatbin" not in library.read_bytes():
        parser.error(
            f"{library} has no CUDA code; expected a library that was built with SHARDCORE_CUDA=1"
        )
    cuobjdump = find_cuobjdump()
    texts = [
        subprocess.run(
            [cuobjdump, option, library], capture_output=True, text=True, check=True
        ).stdout
        for option in ("-res-usage", "-sass")
    ]
    kernels = read_kernels(*texts)
    print(f"{cuobjdump} of {library}; accesses to global memory as loads/stores")
    print(table(kernels))
    found = list(problems(kernels, RULES))
    print("\n".join(found) or "check_kernels: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
