"""Every Python block of the README and of the pages runs; and a run that the checkpoint page's
functions save resumes.

A page marks its blocks by comments, which readers do not see, in the lines above the block:

    <!-- ranks: 2 -->                it runs over so many gloo ranks; without this in one process
    <!-- continues -->               it runs after the block before it
    <!-- continues: docs/guide.md -->  it runs after the first script of that page
    <!-- given: folder = "x" -->     this runs before it: names that the page describes in words
    <!-- not run: REASON -->         it cannot run on CPUs without a network

A block without a comment runs alone. A script is a block that does not continue the one before it,
with all that do.
"""

import re
import tomllib
from dataclasses import dataclass

import pytest
import torch

import shardcore
from tests.support.models import batch_of, hash_of_training, loss_of, make_net
from tests.support.ranks import run_ranks
from tests.support.scripts import ROOT, run_forked

# The reference shows signatures, which tools/make_reference.py writes.
PAGES = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.name != "reference.md"
]
PACKAGES = ("transformers", "accelerate", "peft", "matplotlib", "lightning")
FENCE = re.compile(r"^[ \t>]*(?:```+|~~~+)[ \t]*\{?[ \t.]*py", re.IGNORECASE | re.MULTILINE)
COMMENT = r"<!--(?:(?!-->).)*-->\n"
BLOCK = re.compile(rf"^((?:{COMMENT})*)```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- (ranks|continues|given|not run)(?:: (.+?))? -->\n", re.DOTALL)


@dataclass
class Block:
    """A block of a page: its first line's number, its code, its marks."""

    page: str
    line: int
    code: str
    marks: dict[str, str]

    @property
    def source(self) -> str:
        """The code as a part of a script, that says where it is from."""
        given = self.marks.get("given", "")
        return f"# {self.page}, line {self.line}\n{given}\n{self.code}"


@dataclass
class Script:
    """Blocks that run one after the other, in as many processes as `ranks` says (0: alone)."""

    blocks: list[Block]
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.blocks[-1].page}:{self.blocks[-1].line}"

    @property
    def source(self) -> str:
        return "\n".join(block.source for block in self.blocks)


def blocks_in(text: str, page: str) -> list[Block]:
    """Return the blocks of a page's text; ValueError where a mark or a fence is none of ours."""
    blocks = []
    for match in BLOCK.finditer(text):
        comments, code = match.groups()
        line = text[: match.start(2)].count("\n") + 1
        marks = {name: value or "" for name, value in MARK.findall(comments)}
        if MARK.sub("", comments) or "\n<!--" in code:
            raise ValueError(f"{page}, line {line}: unknown mark in {comments!r}")
        if "not run" in marks and (len(marks) > 1 or len(marks["not run"]) < 10):
            raise ValueError(f"{page}, line {line}: `not run` needs a reason, and no other mark")
        blocks.append(Block(page, line, code, marks))
    if len(FENCE.findall(text)) != len(blocks):
        raise ValueError(f"{page}: a Python block is indented, or does not begin with ```python")
    return blocks


def blocks_of(page: str) -> list[Block]:
    return blocks_in((ROOT / page).read_text(), page)


def scripts_in(blocks: list[Block]) -> list[Script]:
    """Return the scripts that the blocks of a page make, without blocks that cannot run.

    Raises ValueError for a block that continues one that is not there or does not run, and for one
    that would change the number of ranks.
    """
    scripts: list[Script] = []
    continued = None
    for block in blocks:
        earlier = block.marks.get("continues")
        if earlier == "":
            if continued is None or "ranks" in block.marks:
                raise ValueError(f"{block.page}, line {block.line}: expected a script to continue")
            continued.blocks.append(block)
            continue
        if "not run" in block.marks:
            continued = None
            continue
        before = scripts_in(blocks_of(earlier))[:1] if earlier else []
        ranks = max([int(block.marks.get("ranks", 0)), *(script.ranks for script in before)])
        continued = Script([b for script in before for b in script.blocks] + [block], ranks)
        scripts.append(continued)
    return scripts


def cases():
    """Each script of each page. Those over ranks and those that need other packages are `more`."""
    for page in PAGES:
        for script in scripts_in(blocks_of(page)):
            slow = script.ranks or any(package in script.source for package in PACKAGES)
            yield pytest.param(script, id=script.name, marks=[pytest.mark.more] if slow else [])


@pytest.mark.parametrize("script", list(cases()))
def test_blocks_run(script, tmp_path):
    for package in PACKAGES:
        if re.search(rf"^\s*(?:from|import) {package}\b", script.source, re.MULTILINE):
            pytest.importorskip(package, reason=f"{script.name} imports {package}")
    path = tmp_path / "train.py"
    path.write_text(script.source)
    run_forked(path, ranks=script.ranks, folder=tmp_path)


def test_blocks_that_cannot_run_are_python():
    blocks = [block for page in PAGES for block in blocks_of(page) if "not run" in block.marks]
    assert blocks
    for block in blocks:
        compile(block.code, f"{block.page}, line {block.line}", "exec")


def test_marks_make_scripts():
    text = (
        "```python\nx = 1\n```\n\n<!-- continues -->\n```python\ny = x\n```\n"
        "<!-- not run: needs eight GPUs -->\n```python\nz\n```\n"
        "<!-- ranks: 2 -->\n<!-- given: w =\\\n2 -->\n```python\nv = w\n```\n"
    )
    first, second = scripts_in(blocks_in(text, "a.md"))
    assert [block.code for block in first.blocks] == ["x = 1\n", "y = x\n"]
    assert (first.ranks, first.name) == (0, "a.md:7")
    assert second.ranks == 2
    assert second.source == "# a.md, line 17\nw =\\\n2\nv = w\n"


def test_a_script_continues_another_page():
    text = "<!-- continues: docs/guide.md -->\n```python\nx = model\n```\n"
    (script,) = scripts_in(blocks_in(text, "a.md"))
    assert [block.page for block in script.blocks] == ["docs/guide.md", "a.md"]
    assert script.ranks == 2


@pytest.mark.parametrize(
    "text",
    [
        "<!-- continues -->\n```python\nx\n```\n",
        "<!-- not run: needs a GPU -->\n```python\nx\n```\n<!-- continues -->\n```python\ny\n```\n",
        "```python\nx\n```\n<!-- continues -->\n<!-- ranks: 2 -->\n```python\ny\n```\n",
    ],
)
def test_a_block_that_continues_no_script_is_found(text):
    with pytest.raises(ValueError, match=r"a\.md, line \d+: expected a script to continue"):
        scripts_in(blocks_in(text, "a.md"))


@pytest.mark.parametrize(
    "text",
    [
        "<!-- skipped: why not -->\n```python\nx\n```\n",
        "<!-- not run -->\n```python\nx\n```\n",
        "<!-- not run: no -->\n```python\nx\n```\n",
        "<!-- not run: needs a GPU -->\n<!-- continues -->\n```python\nx\n```\n",
        "- a list\n\n  ```python\n  x\n  ```\n",
        "~~~python\nx\n~~~\n",
        "```py\nx\n```\n",
        "``` python\nx\n```\n",
        "```python title=a\nx\n```\n",
    ],
)
def test_a_block_that_would_not_run_is_found(text):
    with pytest.raises(ValueError, match=r"a\.md"):
        blocks_in(text, "a.md")


def test_a_block_that_fails_fails_the_test(tmp_path):
    (script,) = scripts_in(blocks_in("```python\nx = 1\nassert x == 2\n```\n", "a.md"))
    (tmp_path / "train.py").write_text(script.source)
    with pytest.raises(AssertionError, match="assert x == 2"):
        run_forked(tmp_path / "train.py", ranks=0, folder=tmp_path)


def test_the_readme_is_short():
    seen = re.sub(COMMENT, "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(seen.split()) <= 900


def test_no_page_shows_an_address_while_pyproject_has_none():
    pages = [ROOT / "README.md", *(ROOT / ".github").rglob("*.md")]
    assert len(pages) >= 4
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    for page in pages:
        assert urls or not re.search(r"https?://|\w@\w", page.read_text()), page


class Run:
    """A model in training, that the guide's functions save and resume."""

    def __init__(self, seed, stage):
        (source,) = (
            block.code for block in blocks_of("docs/checkpoints.md") if "def resume" in block.code
        )
        self.functions = {"shardcore": shardcore}
        exec(source.partition('\nsave("')[0], self.functions)
        model = make_net(seed)
        optimizer = shardcore.FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        self.model, self.optimizer = shardcore.shard(model, optimizer, stage, precision="bf16")

    def call(self, function, folder):
        self.functions[function](folder, self.model, self.optimizer, self.scheduler)

    def steps(self, first, end, rank):
        for step in range(first, end):
            loss_of(self.model, batch_of(step, 0, rank)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def digest(self):
        return hash_of_training(self.model, self.optimizer), self.scheduler.state_dict()["_last_lr"]


def _begun(rank, world_size, stage, folder):
    """Save after two steps, and train two more."""
    run = Run(0, stage)
    run.steps(0, 2, rank)
    run.call("save", folder)
    saved = run.digest()
    run.steps(2, 4, rank)
    return saved, run.digest()


def _resumed(rank, world_size, stage, folder, again):
    """Resume, and save what was resumed; or train on."""
    run = Run(1, stage)
    run.call("resume", folder)
    if again is None:
        run.steps(2, 4, rank)
    else:
        run.call("save", again)
    return run.digest()


def test_a_run_resumes_over_another_number_of_ranks(tmp_path):
    """And after that over as many as at first, where it goes on as if nothing had been."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    ((saved, end), _) = run_ranks(2, _begun, 3, first)
    assert all(found == saved for found in run_ranks(3, _resumed, 1, first, second))
    assert all(found == end for found in run_ranks(2, _resumed, 3, second, None))
