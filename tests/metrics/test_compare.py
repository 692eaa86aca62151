"""`shardcore compare`: the first step in which two runs differ, and what differed first in it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.cli import main
from shardcore.engine.engine import engine_behind
from shardcore.metrics.compare import Comparison, compare, read_run
from tests.support.models import made
from tests.support.ranks import run_ranks

WHEN = 3  # the step in which a fault happens


@dataclass(frozen=True)
class Training:
    """A run of four steps: a fault happens in step WHEN, on `rank` alone if that is given."""

    folder: str
    fault: str = ""
    rank: int | None = None
    stage: int = 3
    every: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    adam: tuple[tuple[str, Any], ...] = ()


class Block(nn.Module):
    """A unit whose output, or gradient, a fault changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.fault = nn.Linear(16, 16), nn.Dropout(0.1), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(torch.relu(self.linear(x)))
        if self.fault == "forward":
            y = y + 1e-3
        if self.fault == "backward":
            y.register_hook(lambda grad: grad * 1.001)
        return x + y


class Model(nn.Module):
    """Blocks between layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.layers = nn.Sequential(*(Block() for _ in range(4)))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x if layer.fault == "left out" else layer(x)
        return self.last(x)


def _train(rank: int, world_size: int, run: Training) -> None:
    torch.manual_seed(0)
    model: Any = Model()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2, **dict(run.adam))
    options = dict(run.options)
    made(options.get("offload"))
    units = [*model.layers]
    model, optimizer = shardcore.shard(model, optimizer, run.stage, units=units, **options)
    metrics = shardcore.Metrics(model, run.folder, digests=run.every, log=False)
    torch.manual_seed(rank)
    for step in range(1, 5):
        fault = run.fault if step == WHEN and run.rank in (None, rank) else ""
        model.layers[1].fault = fault
        if fault == "load":
            with shardcore.full_params(model), torch.no_grad():
                model.last.weight[0, 0] += 1e-3
        if fault == "random":
            torch.rand(1)
        seed = 100 * step + rank + 50 * (fault == "data")
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        loss = (model(x) ** 2).mean() * (1.0001 if fault == "loss" else 1)
        optimizer.scale_loss(loss).backward()
        if fault == "reduction":
            bucket = engine_behind("test", model).bucket_of[model.layers[1].linear.weight]
            bucket.own_grads()[0][0] += 1e-3
        if fault == "update":
            optimizer.param_groups[0]["lr"] *= 1.01
        optimizer.step()
        optimizer.zero_grad()
        if fault == "buffers":
            model.seen += 1
        metrics.step(loss=loss)


def _trained(rank: int, world_size: int, runs: list[Training]) -> None:
    for run in runs:
        _train(rank, world_size, run)


def compared(one: Training, other: Training) -> Comparison:
    return compare(read_run(Path(one.folder)), read_run(Path(other.folder)))


FAULTS = {
    "data": ("data", "", WHEN),
    "random": ("random", "layers.0", WHEN),
    "forward": ("forward", "layers.1", WHEN),
    "left out": ("forward", "layers.1", WHEN),
    "backward": ("backward", "layers.1", WHEN),
    "loss": ("loss", "", WHEN),
    "reduction": ("reduction", "layers.1.linear.weight", WHEN),
    "update": ("update", "first.weight", WHEN),
    "buffers": ("buffers", "", WHEN + 1),  # they change after the optimizer's step
}


@pytest.mark.parametrize("rank", [None, 1])
def test_the_first_difference_is_named(rank: int | None, tmp_path: Path) -> None:
    plain = Training(str(tmp_path / "plain"))
    of_one_rank = ("data", "forward", "backward", "reduction")
    names = FAULTS if rank is None else of_one_rank
    runs = [Training(str(tmp_path / name), name, rank) for name in names]
    run_ranks(2, _trained, [plain, *runs])
    for run in runs:
        found = compared(plain, run).difference
        assert found is not None
        expected = FAULTS[run.fault]
        if run.fault == "reduction" and rank == 1:  # the first of its half of the unit
            expected = ("reduction", "layers.1.linear.bias", WHEN)
        assert (found.kind, found.where, found.step) == expected, found.message
        if run.fault in ("backward", "reduction", "update"):
            assert found.ranks == ((0, 1) if rank is None else (1,))
        turned = compared(run, plain).difference
        assert turned is not None
        assert turned.where == found.where
        assert ("layers.1, which one run does not call, differs" in turned.message) == (
            run.fault == "left out"
        )
        path = Path(run.folder, "digests.jsonl")
        path.write_text(path.read_text().replace('"placement": "', '"placement": "other ', 1))
        found = compared(plain, run).difference
        assert found is not None
        assert found.kind == "backward" or not found.ranks, "ranks have other parameters"


def test_placement_does_not_show(tmp_path: Path) -> None:
    files = {"optimizer": "nvme", "path": str(tmp_path / "files"), "resume": False}
    ways: list[dict[str, Any]] = [
        {"stage": 0},
        {"stage": 1, "options": (("offload", {"optimizer": "cpu"}),)},
        {"stage": 2, "options": (("offload", {"optimizer": "cpu", "gradients": "cpu"}),)},
        {"stage": 2, "options": (("overlap_step", True), ("offload", {"optimizer": "cpu"}))},
        {"stage": 3, "options": (("offload", files),)},
    ]
    plain = Training(str(tmp_path / "plain"))
    runs = [Training(str(tmp_path / str(number)), **way) for number, way in enumerate(ways)]
    run_ranks(2, _trained, [plain, *runs])
    for run in runs:
        found = compared(plain, run)
        assert str(found) == "equal: 4 steps, 1 to 4"
        assert found.equal
    lines = [(Path(run.folder) / "digests.jsonl").read_text() for run in (plain, *runs)]
    assert len({json.dumps(json.loads(line.splitlines()[2])["grads"]) for line in lines}) == 1


def test_a_split_master_is_the_master(tmp_path: Path) -> None:
    bf16 = (("precision", "bf16"),)
    one = Training(str(tmp_path / "fp32"), options=bf16)
    other = Training(str(tmp_path / "split"), options=bf16, adam=(("master", "split"),))
    run_ranks(1, _trained, [one, other])
    assert compared(one, other).equal


def test_weights_that_differ_between_recorded_steps(tmp_path: Path) -> None:
    plain = Training(str(tmp_path / "plain"), every=2)
    faults = [Training(str(tmp_path / name), name, every=2) for name in ("update", "load")]
    run_ranks(1, _trained, [plain, *faults])
    for run in faults:
        found = compared(plain, run).difference
        assert found is not None
        assert (found.step, found.kind) == (4, "weights")
        assert "part after step 2" in found.message


def test_a_weight_that_changes_between_two_rows_is_a_cause(tmp_path: Path) -> None:
    """No row has the weight: the message says so, and does not say that the weights agree."""
    plain, edited = Training(str(tmp_path / "plain")), Training(str(tmp_path / "edited"), "load")
    run_ranks(1, _trained, [plain, edited])
    found = compared(plain, edited).difference
    assert found is not None
    assert (found.step, found.kind, found.where) == (3, "forward", "")
    assert "; the weights after step 2, the batches" in found.message
    assert "or a weight that changed after step 2" in found.message


def _step(model: Any, optimizer: Any, metrics: shardcore.Metrics, number: int) -> None:
    """Make the step of this number, and record it."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    loss = (model(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    metrics.step(loss=loss)


def _resumed(rank: int, world_size: int, folder: str, wrong: bool) -> None:
    for start in (0, 2):
        torch.manual_seed(0)
        model: Any = Model().eval()
        optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
        model, optimizer = shardcore.shard(model, optimizer, 3, units=[*model.layers])
        if start and not wrong:
            shardcore.load(f"{folder}/saved", model, optimizer)
        metrics = shardcore.Metrics(model, folder, start=start, digests=1, log=False)
        for step in range(start + 1, start + 3):
            _step(model, optimizer, metrics, step)
        if not start:
            shardcore.save(f"{folder}/saved", model, optimizer)
        del model, optimizer, metrics


def test_a_resume_continues_the_file(tmp_path: Path) -> None:
    right, wrong = str(tmp_path / "right"), str(tmp_path / "wrong")
    run_ranks(2, _resumed, right, False)
    run_ranks(2, _resumed, wrong, True)
    found = compare(read_run(Path(right)), read_run(Path(wrong)))
    assert found.steps == (1, 2, 3, 4)
    assert found.difference is not None
    assert (found.difference.step, found.difference.kind) == (3, "load")


def _unfrozen(rank: int, world_size: int, path: str) -> None:
    """The first layer is frozen, and trains from step 3 on. Two record it."""
    for stage in (1, 3):
        torch.manual_seed(0)
        model: Any = Model().eval()
        model.first.requires_grad_(False)
        model.layers[0].requires_grad_(False)
        given = [param for param in model.parameters() if param.requires_grad]
        optimizer: Any = shardcore.FusedAdam(given, lr=1e-2)
        model, optimizer = shardcore.shard(model, optimizer, stage, units=[*model.layers])
        recorders = [
            shardcore.Metrics(model, f"{path}/{name}", digests=1, log=False)
            for name in (stage, f"{stage}, again")
        ]
        for step in range(1, 5):
            if step == 3:
                for module in (model.first, model.layers[0]):
                    module.requires_grad_(True)
                    optimizer.add_param_group({"params": [*module.parameters()]})
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for metrics in recorders:
                metrics.step(loss=loss)


def test_frozen_and_unfrozen_layers(tmp_path: Path) -> None:
    run_ranks(2, _unfrozen, str(tmp_path))
    for stage in "13":
        first, again = (
            (tmp_path / name / "digests.jsonl").read_text() for name in (stage, f"{stage}, again")
        )
        assert first == again
    assert str(compare(*(read_run(tmp_path / stage) for stage in "13"))) == "equal: 4 steps, 1 to 4"
    rows = [
        json.loads(row)
        for row in (tmp_path / "1" / "digests.jsonl").read_text().splitlines()
        if '"step"' in row
    ]
    assert "first.weight" in rows[0]["before"]
    assert ["layers.0" in row["local"] for row in rows] == [False, False, True, True]
    assert set(rows[3]["local"]["layers.0"]) != {"0" * 16}


def _rolled_back(rank: int, world_size: int, path: str) -> None:
    """After step 2 the program loads a checkpoint, the second time that of step 1."""
    for tag in ("2", "1"):
        torch.manual_seed(0)
        model: Any = Model().eval()
        model.last.requires_grad_(False)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer: Any = shardcore.FusedAdam(trained, lr=1e-2)
        model, optimizer = shardcore.shard(model, optimizer, 3, units=[*model.layers])
        metrics = shardcore.Metrics(model, f"{path}/{tag}", digests=1, log=False)
        for step in range(1, 5):
            if step == 3:
                shardcore.load(f"{path}/saved {tag}", model, optimizer, tag=tag)
            _step(model, optimizer, metrics, step)
            shardcore.save(f"{path}/saved {tag}", model, optimizer, tag=str(step))


def test_a_load_between_two_steps_is_named(tmp_path: Path) -> None:
    run_ranks(2, _rolled_back, str(tmp_path))
    found = compare(*(read_run(tmp_path / tag) for tag in "21")).difference
    assert found is not None
    assert (found.step, found.kind) == (3, "load")
    rows = [json.loads(row) for row in (tmp_path / "1" / "digests.jsonl").read_text().splitlines()]
    assert ["before" in row for row in rows[1:]] == [True, False, True, False]
    assert "last.weight" in rows[3]["before"], "frozen weights are loaded, too"


def test_other_sums_are_not_compared_as_bits(tmp_path: Path) -> None:
    one, other = Training(str(tmp_path / "one")), Training(str(tmp_path / "two"))
    run_ranks(1, _trained, [one])
    run_ranks(2, _trained, [other])
    found = compared(one, other)
    assert not found.equal
    assert "bits are not compared: ranks is 1 and 2" in str(found)
    assert "At most they differ in loss by" in str(found)
    assert "not the same" in str(found)


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    one, other = Training(str(tmp_path / "one")), Training(str(tmp_path / "two"), "forward")
    run_ranks(1, _trained, [one, other])
    assert main(["compare", one.folder, one.folder]) == 0
    assert capsys.readouterr().out == "equal: 4 steps, 1 to 4\n"
    assert main(["compare", one.folder, other.folder, "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["equal"] is False
    assert printed["difference"]["where"] == "layers.1"


def test_what_is_not_compared_is_said(tmp_path: Path, capsys: Any) -> None:
    faults = ("", "", "loss", "backward")
    one, *others = (
        Training(str(tmp_path / name), fault) for name, fault in zip("abcd", faults, strict=True)
    )
    run_ranks(1, _trained, [one, *others])
    for run in others:
        path = Path(run.folder, "digests.jsonl")
        head, *rows = map(json.loads, path.read_text().splitlines())
        for row in rows:
            row["loss"] = "0" * 16  # as Metrics.step without a loss, and `shardcore run --twice`
        path.write_text("".join(f"{json.dumps(line)}\n" for line in (head, *rows[:3])))
    equal, *others = (compared(one, other) for other in others)
    assert equal.equal
    assert str(equal) == (
        f"equal: 3 steps, 1 to 3; not compared: steps 4 to 4 (1) of {one.folder}; "
        "not compared: losses, which are not recorded"
    )
    for found, where, note in zip(others, ("layers.3", "layers.1"), (True, False), strict=True):
        assert found.difference is not None
        assert (found.difference.kind, found.difference.where) == ("backward", where)
        assert found.difference.message.endswith(" (or the loss, which is not recorded)") == note


def test_files_that_do_not_fit(tmp_path: Path, capsys: Any) -> None:
    runs = [Training(str(tmp_path / name)) for name in ("one", "two")]
    run_ranks(1, _trained, runs)
    path = tmp_path / "two" / "digests.jsonl"
    lines = path.read_text().splitlines()

    def said(*changed: str) -> str:
        path.write_text("\n".join(changed) + "\n")
        with pytest.raises(SystemExit) as ended:
            main(["compare", runs[0].folder, runs[1].folder])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "line 2" in said(lines[0], lines[1][:-9])
    assert "different models: first.weight has the shape [16, 8]" in said(
        lines[0].replace("[16, 8]", "[8, 16]"), *lines[1:]
    )
    assert "version 9; expected" in said(lines[0].replace('"version": 1', '"version": 9'))
    assert "no head" in said(lines[1])
    assert "no step is in both" in said(lines[0], lines[1].replace('"step": 1,', '"step": 7,'))
    path.unlink()
    with pytest.raises(FileNotFoundError, match="digests=N"):
        read_run(path.parent)


def test_bad_options() -> None:
    model: Any = Model()
    optimizer = shardcore.FusedAdam(model.parameters())
    model, optimizer = shardcore.shard(model, optimizer, 2)
    with pytest.raises(ValueError, match="digests is 0; expected at least 1"):
        shardcore.Metrics(model, "x", digests=0)
    with pytest.raises(ValueError, match="digests without a directory"):
        shardcore.Metrics(model, digests=1)
