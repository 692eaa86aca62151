"""docs/coming_from.md: what its tables say is ours is there, and takes these arguments."""

import builtins
import re
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore import cli
from tests.support.models import Block, Net
from tests.support.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"
COMMANDS = "shardcore "
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2},
}


def rows(text):
    """The cells of every row of the page's tables: theirs, ours, a note."""
    lines = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and " | shardcore | " not in line
    ]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def ours(text):
    """The code in the column "shardcore", without what a shell runs; and, as a second list,
    that.
    """
    code = [span for row in rows(text) for span in re.findall(r"`([^`]+)`", row[1])]
    return [s for s in code if not s.startswith(COMMANDS)], [
        s for s in code if s.startswith(COMMANDS)
    ]


class Encoder(Net):
    """With a method other than forward."""

    encode = Net.forward


class Names:
    """The names that a row uses, made when it uses them: a sharded model in training, an engine,
    what they take.
    """

    torch, nn, shardcore, Block = torch, nn, shardcore, Block
    ds_config = DS_CONFIG

    def __init__(self, folder):
        self.folder = folder

    def __getitem__(self, name):
        return getattr(self, name) if hasattr(self, name) else vars(builtins)[name]

    def shard(self, **options):
        """Shard a new model."""
        with torch.device("meta" if "materialize" in options else "cpu"):
            model = Net()
        return shardcore.shard(model, torch.optim.AdamW(model.parameters()), **options)

    def init(self, module):
        """Fill a module's own tensors."""
        for tensor in (*module.parameters(False), *module.buffers(False)):
            nn.init.zeros_(tensor)

    @cached_property
    def trained(self):
        model, optimizer = self.shard(stage=2, precision="bf16")
        model(torch.randn(4, 10)).float().square().mean().backward()
        return model, optimizer

    @cached_property
    def engine(self):
        engine, *_ = shardcore.initialize(model=Net(), config=DS_CONFIG)
        engine.backward(self.loss_of(engine))
        return engine

    def loss_of(self, model):
        return model(torch.randn(4, 10)).float().square().mean()

    model = property(lambda self: self.trained[0])
    optimizer = property(lambda self: self.trained[1])
    loss = property(lambda self: self.loss_of(self.model))
    p = property(lambda self: next(self.model.parameters()))
    full = property(lambda self: self.model.state_dict())
    state = property(lambda self: shardcore.sharded_state_dict(self.model))
    states = property(lambda self: self.optimizer.state_dict())
    params = property(lambda self: [nn.Parameter(torch.ones(3))])
    loader = property(lambda self: [torch.randn(4, 10)])
    module = property(lambda self: Encoder())
    block = property(lambda self: nn.Linear(3, 3))
    x = property(lambda self: torch.ones(2, 3))
    group = property(lambda self: dist.group.WORLD)
    mesh = property(lambda self: init_device_mesh("cpu", (1, dist.get_world_size())))


def _run_all(rank, world_size, code, folder):
    """Run each; returns what failed, and with which error."""
    trained, failed = Names(folder).trained, []
    shardcore.save(f"{folder}/checkpoints", *trained)
    for span in code:
        placed = span.replace('"checkpoints"', f'"{folder}/checkpoints"').replace(
            '"exported"', f'"{folder}/exported{rank}"'
        )
        try:
            found = eval(placed, {}, Names(folder))
            with found if isinstance(found, AbstractContextManager) else nullcontext():
                pass
        except Exception as error:  # of any kind: a row that is not true
            failed.append((span, repr(error)))
    return failed


@pytest.mark.more
def test_what_is_ours_runs(tmp_path):
    code, _ = ours(PAGE.read_text())
    assert len(code) > 100
    assert run_ranks(2, _run_all, list(dict.fromkeys(code)), str(tmp_path)) == [[], []]


def test_a_row_that_is_not_true_is_found(tmp_path):
    text = (
        "| `theirs` | `shard(stage=4)`, `shard(units_per_rank=3)`, `shardcore.gather(model)`, "
        "`optimizer.gather()` | |\n"
    )
    code, _ = ours(text)
    for failed in run_ranks(2, _run_all, [*code, "shard(stage=1)"], str(tmp_path)):
        assert [span for span, _ in failed] == code


@pytest.mark.parametrize("command", ours(PAGE.read_text())[1])
def test_commands_are_there(command, capsys):
    name, *arguments = command.removeprefix(COMMANDS).split()
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in arguments if word.startswith("--"))


def test_a_row_without_ours_says_why():
    for theirs, here, note in rows(PAGE.read_text()):
        # code, none, or a link to what has no line that runs
        assert here.startswith(("`", "-", "[")), theirs
        assert here != "-" or len(note) > 10, theirs
