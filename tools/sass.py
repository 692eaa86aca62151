"""Reads what cuobjdump prints of compiled CUDA kernels: registers, instructions, and where the
loops are.

An outermost loop is a strongly connected component of the control flow graph: from each of its
instructions every other one can be reached. Loops within it belong to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

Access = tuple[str, int]  # "load" or "store", bytes per thread
Graph = list[list[int]]  # of each node those that may follow


@dataclass(frozen=True)
class Instruction:
    address: int
    guarded: bool  # has a predicate, so it may not happen
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        """The opcode without its modifiers: LDG of LDG.E.128."""
        return self.opcode.split(".")[0]


def kernel_name(mangled: str) -> str:
    """The name without namespaces, with its template arguments if they are booleans or integers."""
    rest = mangled.removeprefix("_ZN")
    name = mangled
    while match := re.match(r"\d+", rest):
        rest = rest[match.end() :]
        name, rest = rest[: int(match[0])], rest[int(match[0]) :]
    if arguments := re.match(r"I((?:L[bi]\d+E)+)E", rest):
        values = re.findall(r"L([bi])(\d+)E", arguments[1])
        name += (
            "<"
            + ", ".join(
                ("false", "true")[int(value)] if kind == "b" else value for kind, value in values
            )
            + ">"
        )
    return name


def parse_resources(text: str) -> dict[tuple[str, str], tuple[int, int]]:
    """{(arch, mangled name): (registers, bytes of stack and local memory)} of ``cuobjdump
    -res-usage``.
    """
    found, arch, name = {}, "", ""
    for line in text.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):$", line):
            name = match[1]
        elif match := re.match(r"\s*REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", line):
            found[arch, name] = int(match[1]), int(match[2]) + int(match[3])
    return found


def parse_sass(text: str) -> dict[tuple[str, str], list[Instruction]]:
    """{(arch, mangled name): instructions} of ``cuobjdump -sass``."""
    found: dict[tuple[str, str], list[Instruction]] = {}
    arch, code = "", None
    for line in text.splitlines():
        if match := re.match(r"\s*code for (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            code = found.setdefault((arch, match[1]), [])
        elif code is not None and (
            match := re.match(r"\s*/\*([0-9a-f]+)\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", line)
        ):
            code.append(
                Instruction(int(match[1], 16), match[2] is not None, match[3], match[4].strip())
            )
    return found


def access_of(opcode: str) -> Access | None:
    """The access to global memory that an instruction makes."""
    parts = opcode.split(".")
    if parts[0] not in {"LD", "LDG", "LDGSTS", "ST", "STG"}:
        return None
    sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
    return "load" if parts[0].startswith("LD") else "store", next(
        (sizes[part] for part in parts if part in sizes), 4
    )


def loops_of(code: list[Instruction]) -> Iterator[list[int]]:
    """The outermost loops, as indices of their instructions in no order."""
    graph = successors(code)
    for component in components(graph):
        if len(component) > 1 or component[0] in graph[component[0]]:
            yield component


def shortest_round(graph: Graph, loop: list[int], start: int) -> list[int]:
    """The instructions of the shortest way through `loop` from one of them back to it: what is
    rare is a detour.
    """
    inside, before, front = set(loop), dict[int, int](), [start]
    while start not in before:
        reached_next = [
            (way, node)
            for node in front
            for way in graph[node]
            if way in inside and way not in before
        ]
        before |= dict(reversed(reached_next))
        front = list(dict.fromkeys(way for way, _ in reached_next))
    found = [before[start]]
    while found[-1] != start:
        found.append(before[found[-1]])
    return found


def successors(code: list[Instruction]) -> Graph:
    """Where each instruction may go on."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    meetings = meeting_points(code, index)
    graph = []
    for i, instruction in enumerate(code):
        following = [i + 1] if i + 1 < len(code) else []
        if instruction.base in {"BRX", "BRXU", "JMX", "JMXU", "JMP"}:
            raise ValueError(
                f"check_kernels: {instruction.opcode} at {instruction.address:#x} goes anywhere; "
                f"expected BRA"
            )
        if instruction.base == "BRA":
            address, always = branch(instruction)
            graph.append(([] if always else following) + [index[address]])
        elif instruction.base == "CALL":  # comes back, or leaves a loop for good
            graph.append([*following, index[branch(instruction)[0]]])
        elif instruction.base in {"EXIT", "RET"}:
            graph.append(following if instruction.guarded else [])
        elif instruction.base == "BSYNC":
            ways = meetings.get(barrier_of(instruction), set())
            graph.append(following if not ways or i + 1 in ways else sorted(ways))
        else:
            graph.append(following)
    return graph


def branch(instruction: Instruction) -> tuple[int, bool]:
    """Where a BRA goes, and whether it always does: without a predicate, a modifier, or a
    condition among its operands.
    """
    address = re.search(r"0x[0-9a-f]+$", instruction.operands)
    if address is None:
        raise ValueError(
            f"check_kernels: BRA {instruction.operands} has no target; expected an address"
        )
    always = (
        not instruction.guarded
        and instruction.opcode == "BRA"
        and address[0] == instruction.operands
    )
    return int(address[0], 16), always


def meeting_points(code: list[Instruction], index: dict[int, int]) -> dict[str, set[int]]:
    """Where threads that part go on together: BSSY says it of a barrier, and BSYNC of that
    barrier sends them there.
    """
    points: dict[str, set[int]] = {}
    for instruction in code:
        if instruction.base == "BSSY":
            points.setdefault(barrier_of(instruction), set()).add(
                index[int(instruction.operands.partition(",")[2], 16)]
            )
    return points


def barrier_of(instruction: Instruction) -> str:
    """The barrier that a BSSY or BSYNC names last before an address: B0 of "B0, 0x240" and of
    "!P1, B0".
    """
    return next(
        word
        for word in reversed(re.split(r"[\s,]+", instruction.operands))
        if not word.startswith("0x")
    )


def components(graph: Graph) -> Iterator[list[int]]:
    """The strongly connected components (S. R. Kosaraju's algorithm: what leads to a node, in
    reverse postorder).
    """
    reverse: Graph = [[] for _ in graph]
    for node, following in enumerate(graph):
        for way in following:
            reverse[way].append(node)
    seen: set[int] = set()
    for root in reversed(postorder(graph)):
        if root not in seen:
            yield reached(reverse, root, seen)


def postorder(graph: Graph) -> list[int]:
    """All nodes, each after those that a depth-first search reaches from it. Without recursion:
    kernels are long.
    """
    order: list[int] = []
    seen: set[int] = set()
    for root in range(len(graph)):
        path = [] if root in seen else [(root, iter(graph[root]))]
        seen.add(root)
        while path:
            node, ways = path[-1]
            way = next((way for way in ways if way not in seen), None)
            if way is None:
                order.append(node)
                path.pop()
            else:
                seen.add(way)
                path.append((way, iter(graph[way])))
    return order


def reached(graph: Graph, root: int, seen: set[int]) -> list[int]:
    """What can be reached from root without what was seen before; adds it to `seen`."""
    found = [root]
    seen.add(root)
    for node in found:  # grows meanwhile
        fresh = [way for way in dict.fromkeys(graph[node]) if way not in seen]
        seen.update(fresh)
        found += fresh
    return found
