"""The check of compiled CUDA kernels reads machine code rightly, and rejects what it is there
for.
"""

import dataclasses
import re
from collections import Counter

import pytest

from tools import check_kernels
from tools.check_kernels import Loop, LoopRule, problems, read_kernels
from tools.sass import kernel_name

MANGLED = "_ZN9shardcore45_GLOBAL__N__c5a27b79_12_norm_cuda_cu_1e842cf911copy_kernelEPKfPf"
RULES = {"copy_kernel": [LoopRule(loads=1, stores=1)]}

RESOURCES = f"""
Fatbin elf code:
================
arch = sm_90
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function {MANGLED}:
  REG:22 STACK:0 SHARED:1152 LOCAL:0 CONSTANT[0]:552 TEXTURE:0 SURFACE:0 SAMPLER:0
"""

# A table entry; a vector loop with a branch in it, and a slow path that lies behind the exit; a
# scalar loop; the exit.
CODE = """
LDG.E.64 R2, desc[UR4][R2.64]
BSSY B0, {after}
vector: LDG.E.128 R4, desc[UR4][R2.64+0x10]
@P0 BRA {slow}
back: STG.E.128 desc[UR4][R8.64], R4
@!P1 BRA {vector}
BSYNC B0
after: LDG.E.U16 R4, [R2.64]
STG.E desc[UR4][R2.64], R4
@P1 BRA {after}
EXIT
slow: IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28]
BRA {back}
end: BRA {end}
"""


def sass(code: str = CODE, name: str = MANGLED) -> str:
    """A disassembly as cuobjdump prints it. ``label:`` names a line and ``{label}`` is its
    address.
    """
    lines = [line for line in code.splitlines() if line]
    labels = {line.partition(": ")[0]: hex(16 * i) for i, line in enumerate(lines) if ": " in line}
    text = f'\tcode for sm_90\n\t\tFunction : {name}\n\t.headerflags\t@"EF_CUDA_SM90"\n'
    for i, line in enumerate(lines):
        instruction = line.partition(": ")[2] or line
        text += (
            f"        /*{16 * i:04x}*/                   {instruction.format(**labels)} ;   "
            f"/* "
            f"0x00000a00ff017624 */\n"
        )
        text += " " * 88 + "/* 0x000fe400078e00ff */\n"
    return text + "\t\t..........\n"


def found(code: str = CODE, resources: str = RESOURCES, rules=RULES) -> list[str]:
    return list(problems(read_kernels(resources, sass(code)), rules))


def test_names():
    assert kernel_name(MANGLED) == "copy_kernel"
    assert (
        kernel_name("_ZN9shardcore3abc11adam_kernelILb0EEEvPKNS_11AdamSegmentE")
        == "adam_kernel<false>"
    )
    assert kernel_name("_ZN9shardcore3abc11some_kernelILb0ELb1EEEvPf") == "some_kernel<false, true>"
    assert kernel_name("_ZN9shardcore3abc11some_kernelILi12EEEvPf") == "some_kernel<12>"
    assert kernel_name("plain") == "plain"


def test_reads_registers_and_loops():
    (kernel,) = read_kernels(RESOURCES, sass())
    assert (kernel.name, kernel.arch, kernel.registers, kernel.spill_bytes) == (
        "copy_kernel",
        "sm_90",
        22,
        0,
    )
    assert kernel.loops == (
        Loop(Counter({("load", 16): 1, ("store", 16): 1}), instructions=4, integer=0),
    )
    assert kernel.outside == Counter({("load", 8): 1, ("load", 2): 1, ("store", 4): 1})
    assert found() == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        # in the slow path of the loop
        ("IMAD.MOV.U32 R1,", "LDG.E R1,", "a loop has 1 loads of 4 bytes; expected at most 0"),
        (
            "STG.E.128 desc",
            "STG.E.64 desc",
            "a loop has 0 stores of 16 bytes; expected at least 1, 1 stores of 8 bytes",
        ),
        (
            "LDG.E.128 R4",
            "LD.E.U8 R4",
            "a loop has 0 loads of 16 bytes; expected at least 1, 1 loads of 1 bytes",
        ),
        (".128", "", "0 loops with 16-byte accesses; expected 1"),  # all of the loop is scalar
        ("LDG.E.U16", "LDG.E.128", "2 loops with 16-byte accesses; expected 1"),
        (
            "IMAD.MOV.U32 R1,",
            "STL [R1],",
            "0 bytes of stack and local memory, 1 accesses to it; expected none",
        ),
    ],
)
def test_twins_are_rejected(old, new, problem):
    assert old in CODE
    (text,) = found(CODE.replace(old, new))
    assert text.startswith(f"copy_kernel for sm_90: {problem}")


@pytest.mark.parametrize(("old", "new"), [("STACK:0", "STACK:16"), ("LOCAL:0", "LOCAL:16")])
def test_a_spill_is_rejected(old, new):
    (text,) = found(resources=RESOURCES.replace(old, new))
    assert text.startswith("copy_kernel for sm_90: 16 bytes of stack and local memory")


def test_a_tail_inside_the_vector_loop_is_rejected():
    assert (
        "1 loads of 2 bytes; expected at most 0"
        in found(CODE.replace("@P1 BRA {after}", "@P1 BRA {vector}"))[0]
    )


def test_narrower_accesses_that_a_rule_names_pass():
    code = CODE.replace("IMAD.MOV.U32 R1,", "LDG.E R1,")
    assert found(code, rules={"copy_kernel": [LoopRule(1, 1, {("load", 4): 1})]}) == []
    assert (
        found(code, rules={"copy_kernel": [LoopRule(1, 1, {("store", 4): 1, ("load", 8): 1})]})
        != []
    )


def test_each_loop_needs_a_rule_of_its_own():
    (kernel,) = read_kernels(RESOURCES, sass())
    two = dataclasses.replace(kernel, loops=kernel.loops * 2)
    assert list(problems([two], {"copy_kernel": [LoopRule(1, 1), LoopRule(1, 1)]})) == []
    assert len(list(problems([two], {"copy_kernel": [LoopRule(1, 1), LoopRule(2, 2)]}))) == 1


def test_a_round_of_more_instructions_than_the_rule_allows_is_rejected():
    code = CODE.replace(
        "@P0 BRA {slow}", "LOP3.LUT R5, R5, R6, RZ, 0xc0, !PT\nFFMA R5, R5, R6, RZ\n@P0 BRA {slow}"
    )
    (kernel,) = read_kernels(RESOURCES, sass(code))
    # without the slow path
    assert (kernel.loops[0].instructions, kernel.loops[0].integer) == (6, 1)
    assert found(code, rules={"copy_kernel": [LoopRule(1, 1, instructions=6, integer=1)]}) == []
    (text,) = found(code, rules={"copy_kernel": [LoopRule(1, 1, instructions=5, integer=0)]})
    assert (
        "6 instructions a round; expected at most 5, 1 instructions of the integer pipe a round; "
        "expected at most 0" in text
    )


def test_unknown_and_missing_kernels_are_problems():
    (unknown, missing) = found(rules={"other_kernel": []})
    assert unknown.startswith("copy_kernel for sm_90: no rule")
    assert missing.startswith("other_kernel: not in the library")


def test_what_cannot_be_followed_is_an_error():
    with pytest.raises(ValueError, match="BRX at 0x70 goes anywhere"):
        read_kernels(RESOURCES, sass(CODE.replace("LDG.E.U16 R4, [R2.64]", "BRX R2 -0x10")))
    with pytest.raises(ValueError, match="has no resource usage"):
        read_kernels("", sass())


def test_a_call_may_leave_a_loop():
    """nvcc may write a jump out of a loop within a loop as a call: both are one loop still."""
    left = CODE.replace("@!P1 BRA {vector}", "@P2 CALL.REL.NOINC {after}\nBRA {vector}")
    code = left.replace("@P1 BRA {after}", "@P1 BRA {vector}")
    assert "1 loads of 2 bytes; expected at most 0" in found(code)[0]


def test_barriers_lead_to_where_they_were_set():
    # then the scalar loop follows
    code = CODE.replace("BSYNC B0", "BRA {far}").replace("end: BRA {end}", "far: BSYNC B0")
    assert found(code) == []
    (kernel,) = read_kernels(RESOURCES, sass(code))
    assert len(kernel.loops) == 1


def test_every_kernel_of_the_sources_has_a_rule():
    sources = "".join(file.read_text() for file in (check_kernels.ROOT / "csrc").rglob("*.cu"))
    declared = set(re.findall(r"__global__[\w\s(),]*?\b(\w+_kernel)\(", sources))
    assert len(declared) == sources.count("__global__")
    assert declared == {name.split("<")[0] for name in check_kernels.RULES}


def test_a_library_without_cuda_code_is_named(tmp_path, monkeypatch, capsys):
    library = tmp_path / "_C.so"
    library.write_bytes(b"\x7fELF")
    monkeypatch.setattr("sys.argv", ["check_kernels", str(library)])
    with pytest.raises(SystemExit) as stop:
        check_kernels.main()
    assert stop.value.code == 2
    assert (
        f"{library} has no CUDA code; expected a library that was built with SHARDCORE_CUDA=1"
        in capsys.readouterr().err
    )
