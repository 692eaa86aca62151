"""Shards and tensor-parallel slices as one world: what ranks say comes in one order, and the
first problem is everyone's.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore.distributed.comm import Comm
from shardcore.distributed.compare import in_words
from shardcore.distributed.everyone import Everyone
from shardcore.engine.engine import Engine
from shardcore.engine.hooks import detach
from shardcore.engine.set_full import set_full_grad, set_full_state
from tests.support.models import batch_of, hash_of_training, loss_of, make_net, stepped
from tests.support.ranks import run_ranks


def _as_one(rank: int, world: int, shape: tuple[int, ...]) -> list[Any]:
    names = ("dp", "tp", "pp")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    comm, *parts = (Comm(mesh[name].get_group()) for name in names)
    comm.slices = parts[:1]
    everyone = Everyone(comm, parts if len(parts) > 1 else None)
    said = everyone.gather_json(rank)
    problems = [
        everyone.first_problem(ValueError(f"of {rank}") if rank in bad else None)
        for bad in ([], [2], [1, 2, 3])
    ]
    return [everyone.rank, everyone.world_size, everyone.slices, said, problems]


@pytest.mark.parametrize(("shape", "slices"), [((4,), 1), ((2, 2), 2), ((1, 2, 2), 4)])
def test_ranks_of_all_dimensions_are_one_world(shape: tuple[int, ...], slices: int) -> None:
    problems = [None, (2, "ValueError: of 2"), (1, "ValueError: of 1")]
    for rank, found in enumerate(run_ranks(4, _as_one, shape)):
        assert found == [rank, 4, slices, [0, 1, 2, 3], problems]


class OfTheUserError(Exception):
    """No kind of error that a library expects."""


class WithoutATextError(Exception):
    """One that cannot be printed."""

    def __str__(self) -> str:
        """Fail, as some classes do that are made with other arguments than they expect."""
        raise AttributeError("no such field")


ERRORS = [KeyError, OSError, MemoryError, OverflowError, OfTheUserError, KeyboardInterrupt]


def _calls(model: Any, optimizer: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Every public collective that ranks agree on before it writes, by name."""
    head, engine, ema = model.head.weight, model._shardcore_engine, shardcore.EMA(model)
    ema.update()
    average, value = ema.state_dict(), torch.zeros(head.shape)
    weights, states = shardcore.sharded_state_dict(model), shardcore.sharded_state_dict(optimizer)
    shardcore.save(folder / "there", model, optimizer)
    group = {"params": [model.gain]}
    return {
        "step": optimizer.step,
        "state_dict": model.state_dict,
        "state_dict of a module": model.blocks[1].state_dict,
        "optimizer.state_dict": optimizer.state_dict,
        "full_grad": lambda: shardcore.full_grad(head),
        "full_state": lambda: shardcore.full_state(head, "exp_avg"),
        "set_full_state": lambda: set_full_state(engine, head, "exp_avg", value),
        "set_full_grad": lambda: set_full_grad(engine, head, value),
        "clip_grad_norm_": lambda: shardcore.clip_grad_norm_(model, 1.0),
        "clip_grad_value_": lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "save": lambda: shardcore.save(folder, model, optimizer),
        "load": lambda: shardcore.load(folder / "there", model, optimizer),
        "consolidate": lambda: shardcore.consolidate(model, folder / "whole"),
        "sharded_state_dict": lambda: shardcore.sharded_state_dict(model),
        "sharded_state_dict of the optimizer": lambda: shardcore.sharded_state_dict(optimizer),
        "load_sharded_state_dict": lambda: shardcore.load_sharded_state_dict(model, weights),
        "load_sharded_state_dict of the optimizer": lambda: shardcore.load_sharded_state_dict(
            optimizer, states
        ),
        "EMA.swap": lambda: ema.swap().__enter__(),
        "EMA.state_dict": ema.state_dict,
        "EMA.load_state_dict": lambda: ema.load_state_dict(average),
        "add_param_group": lambda: optimizer.add_param_group(group),
        "unfreeze": lambda: shardcore.unfreeze(model.inp),
        "join": lambda: shardcore.join(model, [1, 2]),
        "detach": lambda: detach(model),
    }


@contextmanager
def _planted(here: bool, kind: type[BaseException]) -> Iterator[None]:
    """Let the first thing that most collectives do on each rank, which is to wait for its own
    step, fail `here`.
    """

    def fail(engine: Engine) -> None:
        raise kind("planted")

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(Engine, "synchronize", fail)
        yield


def _what_each_raises(call: Callable[[], Any]) -> str:
    try:
        call()
    except BaseException as error:
        return in_words(error)
    return "no error"


def _one_fails(
    rank: int, world_size: int, stage: int, folder: Path, fails: bool
) -> tuple[dict[tuple[str, str], str], str]:
    model = make_net()
    model.inp.bias.requires_grad_(False)
    model.gain.requires_grad_(False)
    optimizer: Any = shardcore.FusedAdam(
        [param for param in model.parameters() if param is not model.gain], lr=1e-2
    )
    model, optimizer = shardcore.shard(model, optimizer, stage, precision="fp32")
    stepped(model, optimizer, rank, 0)
    calls = _calls(model, optimizer, folder)
    said = {}
    for (name, call), kind in itertools.product(calls.items(), ERRORS) if fails else ():
        with _planted(rank == 1, kind):
            said[name, kind.__name__] = _what_each_raises(call)
    loss_of(model, batch_of(1, 0, rank)).backward()
    if fails:
        group = optimizer.param_groups[0]
        for key, change in (("eps", group.pop), ("lr", lambda key: group.update({key: 10**400}))):
            before = group[key]
            if rank == 1:
                change(key)
            said["step", key] = _what_each_raises(optimizer.step)
            group[key] = before
        said["step", "max_norm"] = _what_each_raises(
            lambda: optimizer.step(max_norm=10**400 if rank == 1 else 1.0)
        )
        said["step", "closure"] = _what_each_raises(
            lambda: optimizer.step(lambda: [][rank] if rank == 1 else 0.0)
        )

        def interrupted() -> float:
            if rank == 1:
                raise KeyboardInterrupt
            return 0.0

        said["step", "closure interrupted"] = _what_each_raises(lambda: optimizer.step(interrupted))
        with _planted(rank == 1, WithoutATextError):
            said["step", "no text"] = _what_each_raises(optimizer.step)
    optimizer.step()
    return said, hash_of_training(model, optimizer)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.more), 3])
def test_an_error_of_any_kind_before_the_first_write_is_one_on_every_rank(
    stage: int, tmp_path: Path
) -> None:
    """The rank where it is raises it, others one that names it, and the group is as whole as
    before.
    """
    (others, trained), (own, _) = run_ranks(2, _one_fails, stage, tmp_path / "a", True)
    for (name, kind), said in own.items():
        if kind in [one.__name__ for one in ERRORS]:
            assert said == f"{kind}: " + ("'planted'" if kind == "KeyError" else "planted"), (
                name,
                said,
            )
        assert "rank 1" in others[name, kind], (name, kind, others[name, kind])
        assert said in others[name, kind], (name, kind, others[name, kind])
    assert own["step", "no text"].startswith("WithoutATextError")
    assert own["step", "eps"] == "KeyError: 'eps'"
    assert own["step", "lr"].startswith("OverflowError")
    assert own["step", "max_norm"].startswith("OverflowError")
    assert own["step", "closure"].startswith("IndexError")
    assert own["step", "closure interrupted"].startswith("KeyboardInterrupt")
    assert trained == run_ranks(2, _one_fails, stage, tmp_path / "b", False)[0][1]
