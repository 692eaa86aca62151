"""What a trace shows of a step: the engine's scopes, by kind and unit, and the same names as
NVTX ranges.
"""

import os
import resource
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from shardcore.distributed import clock
from tests.support.models import Run, batch_of, loss_of, train
from tests.support.ranks import run_ranks, start

UNITS = ["root", "blocks.0", "blocks.1", "blocks.2"]


def _of_every_unit(*kinds: str) -> Counter[str]:
    return Counter({f"shardcore::{kind}({unit})": 1 for kind in kinds for unit in UNITS})


STEP = Counter({"shardcore::step": 1})
# of state_dict(): float32 weights are whole on every rank before stage 3
READ = _of_every_unit("read")
# each block is gathered for its forward and its backward, but the last one, whose backward is next,
# and the root once
AGAIN = Counter({"shardcore::gather(blocks.0)": 1, "shardcore::gather(blocks.1)": 1})
EXPECTED = {
    0: STEP + _of_every_unit("reduce", "sum", "gather_grad") + Counter({"shardcore::adam": 1}),
    2: STEP + _of_every_unit("reduce", "sum", "adam", "gather"),
    3: STEP
    + READ
    + _of_every_unit("reduce", "sum", "gather")
    + AGAIN
    + Counter({"shardcore::adam": 1}),
}


def _step(rank: int, stage: int) -> Counter[str]:
    model, optimizer, _ = train(rank, Run(stage=stage, steps=2))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loss_of(model, batch_of(2, 0, rank)).backward()
        optimizer.step()
        model.state_dict()
    return Counter(
        event.name for event in recorded.events() if event.name.startswith("shardcore::")
    )


def _scopes(rank: int, world_size: int, stage: int, twin: bool) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:
        if twin:
            patch.setattr("shardcore.distributed.comm.scope_type", lambda: nullcontext)
        return _step(rank, stage)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_trace_names_every_gather_reduce_and_step(stage: int) -> None:
    for found in run_ranks(2, _scopes, stage, False):
        assert found == EXPECTED[stage]
    assert run_ranks(2, _scopes, stage, True)[0] != EXPECTED[stage]


def test_nvtx_ranges_have_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    marked: Counter[str] = Counter()

    def push(name: str) -> None:
        opened.append(name)
        marked[name] += 1

    monkeypatch.setattr(clock, "_has_nvtx", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", opened.pop)
    model, optimizer, _ = train(0, Run(stage=3, steps=2))
    marked.clear()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loss_of(model, batch_of(2, 0, 0)).backward()
        optimizer.step()
    assert opened == []
    assert marked == Counter(
        event.name for event in recorded.events() if event.name.startswith("shardcore::")
    )
    assert "shardcore::gather(blocks.1)" in marked

    def fails() -> Any:
        with clock.scope_type()("shardcore::reduce(blocks.0)"):
            raise ValueError

    with pytest.raises(ValueError):
        fails()
    assert opened == []


def _with_stack(stage: int, errors: str) -> None:
    """Run forward under the profiler that reads weights; `errors`: the file that standard error
    goes to.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    model, _, _ = train(0, Run(stage=stage, steps=1))
    with profile(activities=[ProfilerActivity.CPU], with_stack=True):
        model(torch.ones(2, 10))


def test_at_stage_3_a_profiler_that_reads_weights_between_uses_is_named(tmp_path: Path) -> None:
    """In processes of their own: torch 2.11 ends the one whose weights it cannot read."""
    for stage in (2, 3):
        process = start(_with_stack, stage, str(tmp_path / "errors"))
        process.join()
        said = (
            "with_stack=True reads weights elsewhere: leave it out"
            in (tmp_path / "errors").read_text()
        )
        assert (process.exitcode != 0, said) == (stage == 3, stage == 3)
