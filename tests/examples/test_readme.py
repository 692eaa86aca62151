"""The Python example of the README; those of the guide and the pages after it, which are one
script; Hugging Face's.
"""

import re
import tomllib

import pytest
import torch

import shardcore
from tests.support.models import batch_of, hash_of_training, loss_of, make_net
from tests.support.ranks import run_ranks
from tests.support.scripts import ROOT, run_forked


def python_blocks(*pages):
    return [
        block
        for page in pages
        for block in re.findall(
            r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
        )
    ]


@pytest.mark.more
@pytest.mark.parametrize(
    ("pages", "count"),
    [
        (["README.md"], 1),
        (
            [
                f"docs/{page}.md"
                for page in ("guide", "checkpoints", "meta_models", "optimizers", "deepspeed")
            ],
            11,
        ),
        (["docs/huggingface.md"], 2),
    ],
)
def test_examples_run_over_two_ranks(pages, count, tmp_path):
    if "docs/huggingface.md" in pages:
        pytest.importorskip("transformers", reason="the page's examples need transformers")
    blocks = python_blocks(*pages)
    assert len(blocks) == count
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks))
    run_forked(script, ranks=2, folder=tmp_path)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


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
            block for block in python_blocks("docs/checkpoints.md") if "def resume" in block
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
