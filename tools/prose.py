"""Measures how plainly the pages, the public docstrings and the messages are written.

Run: python -m tools.prose [--worst N] [--check]. A rate counts the words of `STIFF` per 1,000
words. PyTorch's documentation uses them seldom: 13 per 1,000 in torch/optim and FSDP2. Pages are
README.md and docs/, without code blocks; a table's cells are paragraphs. Public docstrings are
those of docs/reference.md. Messages are the texts of raised errors and of log calls, in shardcore/.
The numbers point to sentences worth reading again. With --check, a rate above its limit is an
error, and a sentence of more than `LONGEST` words in a page.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
STIFF = re.compile(
    r"\b(?:what|that|has|have|had|which|those|such|lies?|goes|stands?|comes?|knows?|says?|told|"
    r"whatever|wherever|where)\b",
    re.IGNORECASE,
)
LIMITS = {"pages": 20.0, "public docstrings": 30.0, "messages": 30.0}
LONGEST = 40
_LOGS = {"debug", "info", "warning", "error", "warn"}
_REFERENCE = "reference.md"


class Sentence(NamedTuple):
    """A sentence of a group, such as "pages", and the file that has it."""

    group: str
    file: str
    text: str

    @property
    def words(self) -> int:
        """How many words it has."""
        return len(self.text.split())

    @property
    def stiff(self) -> int:
        """How many of them are stiff."""
        return len(STIFF.findall(self.text))


def sentences(root: Path = ROOT) -> Iterator[Sentence]:
    """Yield the sentences of all groups."""
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        group = "public docstrings" if path.name == _REFERENCE else "pages"
        for text in split(prose_of(path.read_text())):
            yield Sentence(group, str(path.relative_to(root)), text)
    for path in sorted((root / "shardcore").rglob("*.py")):
        for message in messages_of(path.read_text()):
            for text in split(message):
                yield Sentence("messages", str(path.relative_to(root)), text)


def prose_of(page: str) -> str:
    """Return a page's text without code blocks, comments and targets of links. Cells of tables are
    paragraphs.
    """
    page = re.sub(r"```.*?```|<!--.*?-->", " ", page, flags=re.DOTALL)
    page = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", " X ", page, flags=re.DOTALL)
    page = re.sub(r"\]\([^)]*\)", "] ", page)
    page = re.sub(r"^\s*\|[-:| ]*$", " ", page, flags=re.MULTILINE)  # below a table's head
    row = re.compile(r"^\s*\|.*$", re.MULTILINE)
    return row.sub(lambda cells: cells[0].replace("|", "\n\n"), page)


def split(text: str) -> list[str]:
    """Return the sentences of a text of more than three words."""
    parts = re.split(r"(?<=[.;:!?])\s+|\n\s*\n|\n\s*[-*#]", text)
    return [" ".join(part.split()) for part in parts if len(part.split()) > 3]


def messages_of(source: str) -> Iterator[str]:
    """Yield the texts of raised errors and of log calls. A value is the letter X."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _texts(node.exc)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _LOGS
        ):
            yield from _texts(node)


def _texts(call: ast.Call) -> Iterator[str]:
    for argument in call.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield re.sub(r"%[-.\d]*[a-z]|`[^`]*`", "X", argument.value)
        elif isinstance(argument, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else "X" for part in argument.values
            )
            yield re.sub(r"`[^`]*`", "X", "".join(map(str, parts)))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 1 if --check finds a rate or a sentence above its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="print N sentences")
    parser.add_argument("--check", action="store_true", help="compare with the limits")
    options = parser.parse_args(arguments)
    found = list(sentences())
    problems = []
    for group, limit in LIMITS.items():
        of_group = [sentence for sentence in found if sentence.group == group]
        words = sum(sentence.words for sentence in of_group)
        rate = 1000 * sum(sentence.stiff for sentence in of_group) / max(1, words)
        print(f"{group}: {rate:.1f} stiff words per 1,000 of {words} (limit {limit:.0f})")
        if rate > limit:
            problems.append(f"{group}: {rate:.1f} stiff words per 1,000; expected at most {limit}")
    problems += [
        f"{sentence.file}: a sentence has {sentence.words} words; expected at most {LONGEST}: "
        f"{sentence.text}"
        for sentence in found
        if sentence.group == "pages" and sentence.words > LONGEST
    ]
    worst = sorted(found, key=lambda sentence: -(sentence.stiff + sentence.words / 20))
    for sentence in worst[: options.worst]:
        print(f"{sentence.file}: {sentence.text}")
    if not options.check:
        return 0
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
