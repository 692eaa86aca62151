"""Writes docs/support.md from tools/support.toml.

Run: python -m tools.make_support [--check]. With --check it writes nothing, and fails if the page
is not up to date.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE: dict[str, list[dict[str, Any]]] = tomllib.loads((ROOT / "tools/support.toml").read_text())
PAGE = ROOT / "docs" / "support.md"
PRECISIONS = ("fp32", "bf16", "fp16")
HEAD = """# Supported versions and combinations

Which machines and which combinations of options are supported. `python -m
tools.make_support` makes this page from [one table](../tools/support.toml). Tests compare the
table with the code.

- **works**: tests run it on CPU ranks.
- **refused**: `shard` raises an error before it changes anything.
- **H200**: a committed result of one H200, whose file lists the versions and options.
- **never run**: works on CPU ranks, and was not run on a GPU yet.
- **Several GPUs**: nothing was run on several GPUs yet.

## Versions and machines
"""


def works(
    stage: int, tier: dict[str, Any], optimizer: dict[str, Any], precision: str | None
) -> bool:
    """Return whether the table says that a combination works; else `shard` refuses it."""
    return (
        stage in tier["stages"]
        and not optimizer.get("refused", False)
        and tier["name"] not in optimizer.get("not_tiers", ())
        and precision not in optimizer.get("not_precisions", ())
    )


def _stages(stages: Sequence[int]) -> str:
    if not stages:
        return "refused"
    first, last = min(stages), max(stages)
    return f"{first} to {last}" if first < last else str(first)


def _gpu(result: str) -> str:
    return result if result == "never run" else f"[H200](../benchmarks/results/{result})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def page() -> str:
    """Return the text of the page."""
    tiers, optimizers = TABLE["tier"], TABLE["optimizer"]
    parts = [
        HEAD,
        _table(
            ["what", "supported", "tested"],
            ([e["what"], e["supported"], e["tested"]] for e in TABLE["environment"]),
        ),
        "\n## Stages and tiers\n\nWith FusedAdam, in every precision. [memory.md](memory.md) "
        "explains stages and tiers.\n",
        _table(
            ["tier", *(f"stage {stage}" for stage in range(4)), "on a GPU"],
            (
                [
                    tier["name"],
                    *("works" if stage in tier["stages"] else "refused" for stage in range(4)),
                    _gpu(tier["gpu"]),
                ]
                for tier in tiers
            ),
        ),
        "\n## Optimizers\n\nThe stages at which an optimizer works with each tier. "
        "[optimizers.md](optimizers.md) has their options.\n",
        _table(
            ["optimizer", *(tier["name"] for tier in tiers), "precision", "on a GPU"],
            (
                [
                    optimizer["name"],
                    *(
                        _stages([s for s in range(4) if works(s, tier, optimizer, None)])
                        + optimizer.get("notes", {}).get(tier["name"], "")
                        for tier in tiers
                    ),
                    ", ".join(p for p in PRECISIONS if works(3, tiers[0], optimizer, p)) or "none",
                    "refused" if optimizer.get("refused") else _gpu(optimizer["gpu"]),
                ]
                for optimizer in optimizers
            ),
        ),
        "\n## Parallelism\n\nWith FusedAdam and every tier of a stage, on CPU ranks.\n",
        _table(
            ["parallelism", "stages", "notes"],
            (
                [
                    f"[{kind['name']}]({kind['page']})",
                    _stages(kind["stages"]) if kind["stages"] else "not supported",
                    kind.get("note", ""),
                ]
                for kind in TABLE["parallel"]
            ),
        ),
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def main(arguments: Sequence[str]) -> int:
    """Write the page, or compare it with the table."""
    if "--check" not in arguments:
        PAGE.write_text(page())
    return int(PAGE.read_text() != page())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
