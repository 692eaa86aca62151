"""docs/troubleshooting.md quotes messages that shardcore prints, and names what ranks wait for."""

import ast
import re

import pytest
import torch.distributed as dist

import shardcore
from tests.support.models import Run, batch_of, error_of, loss_of, train
from tests.support.ranks import run_ranks
from tests.support.scripts import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
MISTAKES = ROOT / "shardcore" / "engine" / "mistakes.py"
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def text_of(node):
    """The text of a message; NUL for each value in it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "\0"


def messages():
    """Every string of the Python sources, and of C++ each line's."""
    for path in (*(ROOT / "shardcore").rglob("*.py"), ROOT / "tools" / "build_config.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if (
                isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
                and id(node) not in docstrings
            ):
                yield text_of(node)
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        for line in path.read_text().splitlines():
            yield "\0".join(LITERAL.findall(line))


def warnings_of(path):
    """The texts of the warnings in a module, where its calls give them as literals."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("_say", "warning"):
            text = text_of(node.args[0])
            if text.strip("\0"):
                yield text


def quotations(page):
    """The code spans in the first column of tables under "shardcore prints"."""
    quoted = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("| shardcore prints"):
            quoted = True
        elif not line.startswith("|"):
            quoted = False
        elif quoted and not line.startswith("|--"):
            yield from re.findall(r"`([^`]+)`", cells[0])


def awaited(page):
    """The code spans in the first column of the table "the ranks wait for", by row."""
    table = page.partition("| the ranks wait for |")[2].partition("\n\n")[0]
    return [re.findall(r"`([^`]+)`", row.split(" | ")[0]) for row in table.splitlines()[2:]]


def is_in(quotation, sources):
    """Whether the fixed words of a quotation are, in their order, in one message."""
    pattern = re.compile(".*".join(map(re.escape, re.split(r"\s*\.\.\.,?\s*", quotation))), re.S)
    return any(pattern.search(message) for message in sources)


@pytest.fixture(scope="module")
def sources():
    return sorted(set(messages()))


def test_quoted_messages_are_in_the_sources(sources):
    quoted = list(quotations(PAGE.read_text()))
    assert len(quoted) > 80
    assert [text for text in quoted if not is_in(text, sources)] == []


@pytest.mark.parametrize(
    "wrong", ["is shaded (stage 3)", "waited ... for ..., at that", "is nowhere near"]
)
def test_a_wrong_quotation_is_noticed(sources, wrong):
    assert not is_in(wrong, sources)


def test_every_warning_of_a_mistake_in_the_loop_is_on_the_page():
    quoted = list(quotations(PAGE.read_text()))
    texts = list(warnings_of(MISTAKES))
    # `_say` itself is one "_say(", and one warning does not go through it
    assert len(texts) == MISTAKES.read_text().count("_say(")
    assert [text for text in texts if not any(is_in(words, [text]) for words in quoted)] == []


def test_a_warning_without_a_row_is_noticed(tmp_path):
    (tmp_path / "a.py").write_text('self._say("step: nothing %d of this", 1)\nself._say(text)\n')
    (text,) = warnings_of(tmp_path / "a.py")
    assert not any(is_in(words, [text]) for words in quotations(PAGE.read_text()))


# What rank 0 does while rank 1 is in a barrier, by what the table says that it waits for.
ALONE = {
    "the reduction of ...": lambda model, optimizer, folder: loss_of(
        model, batch_of(1, 0, 0)
    ).backward(),
    "state_dict": lambda model, optimizer, folder: model.state_dict(),
    "save": lambda model, optimizer, folder: shardcore.save(folder, model, optimizer),
    "the weights of ...": lambda model, optimizer, folder: model(batch_of(1, 0, 0)),
}


def _mistake(rank, world_size, wait, folder):
    model, optimizer, _ = train(rank, Run(stage=3 if "weights" in wait else 2, steps=1))
    if rank == 1:
        return error_of(dist.barrier)
    return error_of(lambda: ALONE[wait](model, optimizer, folder))


@pytest.mark.cases(1)
@pytest.mark.parametrize("wait", ALONE)
def test_the_table_names_what_the_ranks_of_a_mistake_wait_for(wait, tmp_path):
    said, _ = run_ranks(2, _mistake, wait, str(tmp_path))
    proof = said.partition("can never end: ")[2].partition("; expected")[0]
    fitting = [
        row
        for row in awaited(PAGE.read_text())
        if wait in row and all(is_in(f"for {words}", [proof]) for words in row)
    ]
    assert fitting, proof
    assert "for torch.distributed.barrier" in proof
    assert not is_in("for an agreement", [proof]), "as the page said"
