"""Ranks agree, or all of them raise: what a rank proposes, what it hears, and in which words."""

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
from shardcore.distributed.compare import Entry, first_difference, in_words
from shardcore.engine import build
from shardcore.engine.agreement import OtherCallError, Payload, agree, together
from shardcore.engine.engine import Engine
from shardcore.engine.full_values import set_full_grad, set_full_state
from shardcore.engine.hooks import detach
from shardcore.metrics import collect
from tests.support.models import batch_of, error_of, hash_of_training, loss_of, make_net, stepped
from tests.support.ranks import run_ranks

# --- the words of a difference --------------------------------------------------------------------

WEIGHT, BIAS = ("parameter", "4.weight", "(16, 16)", "float32"), ("parameter", "4.bias", "(16,)")
STAGE = ("option", "stage", "2")


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ([STAGE, WEIGHT, BIAS], None),
        ([STAGE], "rank 1 lacks 2 parameters of rank 0; the first is 4.weight (16, 16)"),
        (
            [STAGE, WEIGHT, BIAS, ("parameter", "5.bias", "(8,)")],
            "rank 1 has 1 parameter more than rank 0; the first is 5.bias (8,)",
        ),
        (
            [STAGE, WEIGHT, ("parameter", "5.bias", "(16,)")],
            "rank 1 has the parameter 5.bias, where rank 0 has 4.bias",
        ),
        ([STAGE, BIAS, WEIGHT], "parameter 0 is 4.bias on rank 1 but 4.weight on rank 0"),
        (
            [STAGE, (*WEIGHT[:3], "bfloat16"), BIAS],
            "parameter 4.weight is bfloat16 on rank 1 but float32 on rank 0",
        ),
        (
            [("option", "stage", "3"), BIAS],  # the kind that comes first is named
            "option stage is 3 on rank 1 but 2 on rank 0",
        ),
        (
            [STAGE, WEIGHT, BIAS, ("optimizer", "", "SGD")],
            "rank 1 has 1 optimizer more than rank 0; the first is SGD",
        ),
    ],
)
def test_the_first_difference_is_in_the_users_words(own: list[Entry], text: str | None) -> None:
    assert first_difference([[STAGE, WEIGHT, BIAS]] * 2 + [own]) == (
        None if text is None else text.replace("rank 1", "rank 2")
    )
    assert first_difference([[STAGE, WEIGHT, BIAS], own]) == text


# --- what a rank proposes -------------------------------------------------------------------------


def _proposes(rank: int, world: int) -> list[Any]:
    """Ranks 0, 2 have one part of a model, ranks 1, 3 the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    comm = Comm(mesh["dp"].get_group())
    parts = [Comm(mesh["tp"].get_group())]
    said: list[Any] = []

    def propose(op: str = "call", **options: Any) -> Any:
        try:
            return agree(comm, op, over=parts, then="as before", **options)
        except (ValueError, KeyError, OtherCallError) as error:
            said.append(in_words(error))
        return None

    tensors = {
        "flags": torch.tensor([rank, 7], dtype=torch.uint8),
        "norm": torch.tensor([rank / 2, 3.0], dtype=torch.float64),
        "nothing": torch.zeros(0),
    }
    agreed = propose(payload=Payload(tensors, of_part=lambda ranks: {"sum": ranks["norm"].sum(0)}))
    said.append(agreed.ranks["flags"].tolist())
    said.append([agreed.ranks["norm"].tolist(), agreed.parts["sum"].tolist()])
    propose(problems=[KeyError("own"), ValueError("later")] if rank == 3 else None)
    propose(entries=[("option", "lr", "2.0" if rank == 2 else "1.0")])
    propose(entries_of_model=[("option", "max_norm", str(rank % 2))])
    apart = [("option", "path", "b" if rank == 2 else "a")]
    propose(entries=apart, entries_of_model=apart)
    propose("other call" if rank == 3 else "call")
    propose("other call" if rank == 3 else "call", problems=[KeyError(1)] if rank == 1 else None)
    propose(entries=[("value read", "", str(rank // 2))], explain=lambda: None)
    propose(
        entries=[("value read", "", str(rank // 2))],
        explain=lambda: ValueError(f"rank 0 has {comm.gather_json(rank)[0]}"),
    )
    return said


def test_all_ranks_of_all_parts_raise_or_none() -> None:
    found = run_ranks(4, _proposes)
    for rank, said in enumerate(found):
        flags, norms, refuses, differs, of_parts, apart, other, both, explained = said
        assert flags == [[rank % 2, 7], [rank % 2 + 2, 7]]
        assert norms[0] == [[rank % 2 / 2, 3.0], [(rank % 2 + 2) / 2, 3.0]]
        assert norms[1] == [[1.0, 6.0], [2.0, 6.0]]
        own = "KeyError: 'own'"
        assert refuses == (
            own if rank == 3 else f"ValueError: call: rank 3 refused: {own} (as before)"
        )
        assert differs == (
            "ValueError: call: ranks disagree: option lr is 2.0 on rank 2 but 1.0 on rank 0; "
            "expected the same on every rank (as before)"
        )
        assert of_parts == (
            "ValueError: call: parts of the model disagree: option max_norm is 1 on rank 1 but 0 "
            "on rank 0; expected the same in every part (as before)"
        )
        assert "option path is b on rank 2 but a on rank 0" in apart  # of the ranks of its part
        in_call, out = ("other call", "call") if rank == 3 else ("call", "other call")
        named = f"{in_call}: rank {1 if rank == 3 else 3} calls {out}; expected every rank"
        assert (named if rank % 2 else "call: rank 3 calls other call; expected") in other
        assert other.startswith("OtherCallError: " if rank % 2 else "ValueError: ")
        # a refusal in another call is no reason of this one
        assert both == "KeyError: 1" if rank == 1 else "calls" in both or "refused" in both
        assert explained == f"ValueError: rank 0 has {rank % 2}"


def _names_that_utf_8_lacks(rank: int, world: int) -> str:
    try:
        agree(Comm(), "shard", entries=[("buffer", "b\udc80" if rank else "b")])
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_name_that_utf_8_cannot_encode_is_compared() -> None:
    for text in run_ranks(2, _names_that_utf_8_lacks):
        assert "rank 1 has the buffer b\udc80, where rank 0 has b" in text


def _averages_apart(rank: int, world: int) -> list[str]:
    model: Any = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = shardcore.shard(model, optimizer, 2, precision="fp32")
    ema = shardcore.EMA(model, decay=0.5 if rank else 0.9)
    ema.update()
    return [error_of(ema.state_dict), error_of(lambda: ema.swap().__enter__())]


def test_averages_of_other_decays_are_no_average() -> None:
    for texts in run_ranks(2, _averages_apart):
        for text in texts:
            assert "1 updates with decay 0.5 on rank 1 but the average after 1 updates with" in text


def _works(rank: int, world: int, fails: list[int], kind: type[BaseException]) -> str:
    try:
        with together(Comm(), "save", "files are as before"):
            if rank in fails:
                raise kind("planted")
    except BaseException as error:
        return f"{in_words(error)} {getattr(error, '__notes__', '')}"
    return "no error"


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_work_that_fails_on_one_rank_fails_on_every_rank(kind: type[BaseException]) -> None:
    name = kind.__name__
    own = f"{name}: planted ['save: files are as before']"
    other = f"RuntimeError: save: rank 1 failed: {name}: planted; files are as before "
    assert run_ranks(3, _works, [1, 2], kind) == [other, own, own]
    assert run_ranks(3, _works, [], kind) == ["no error"] * 3


def _in_different_calls(rank: int, world: int, folder: Path) -> tuple[list[str], str]:
    model: Any = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = shardcore.shard(model, optimizer, 2, precision="fp32")
    stepped(model, optimizer, rank, 0)
    shardcore.save(folder, model, optimizer)
    calls: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: shardcore.join(model, [1]), lambda: shardcore.load(folder, model, optimizer)),
        (
            lambda: shardcore.consolidate(model, folder / "whole"),
            lambda: shardcore.Metrics(model, log=False),
        ),
        (optimizer.state_dict, lambda: shardcore.join(model, [1])),
    ]
    said = [_what_each_raises(pair[rank]) for pair in calls]
    stepped(model, optimizer, rank, 1)
    metrics = shardcore.Metrics(model, log=False)
    batches = iter(shardcore.join(model, iter([1])))
    return said, _what_each_raises((metrics.step, lambda: next(batches))[rank])


def test_ranks_in_different_calls_all_raise(tmp_path: Path) -> None:
    (first, slow), (second, also_slow) = run_ranks(2, _in_different_calls, tmp_path)
    pairs = [("join", "load"), ("consolidate", "Metrics"), ("optimizer.state_dict", "join")]
    for (op, other_op), text, other_text in zip(pairs, first, second, strict=True):
        assert text.startswith(f"OtherCallError: {op}: rank 1 calls {other_op}; expected every")
        assert other_text.startswith(f"OtherCallError: {other_op}: rank 0 calls {op}; expected")
    for text in (slow, also_slow):  # found by the watchdog
        assert "rank 0 for Metrics.step (call 1)" in text
        assert "rank 1 for join (call 3)" in text
        assert text.endswith("expected every rank to make the same calls in the same order")


# what moves weights and gradients of a unit
UNITS = "the reduction of", "the gradients of", "the weights of", "the new weights of"


def _counted(rank: int, world: int, stage: int) -> list[dict[str, int]]:
    """The collectives of a backward and of a step over three units, by name."""
    model: Any = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = shardcore.shard(model, optimizer, stage, precision="fp32")
    stepped(model, optimizer, rank, 0)
    comm = model._shardcore_engine.comm
    counts = [comm.collectives()]
    loss_of(model, batch_of(1, 0, rank)).backward()
    counts.append(comm.collectives())
    optimizer.step()
    counts.append(comm.collectives())
    return [
        {
            name: count - before.get(name, 0)
            for name, count in after.items()
            if count > before.get(name, 0) and not name.startswith(UNITS)
        }
        for before, after in itertools.pairwise(counts)
    ]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_and_a_step_agree_by_one_collective_each(stage: int) -> None:
    for backward, step in run_ranks(2, _counted, stage):
        assert (backward, step) == ({"the end of a backward": 1}, {"a step": 1})


# --- every public collective ----------------------------------------------------------------------


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
        "Metrics": lambda: shardcore.Metrics(model),
        "shard": lambda: shardcore.shard(make_net(), None),
        "initialize": lambda: shardcore.initialize(
            model=make_net(), config={"train_micro_batch_size_per_gpu": 1}
        ),
        "detach": lambda: detach(model),
    }


# What fails of a call, where it does not begin with the wait for the rank's own last step.
PLACES: dict[str, tuple[Any, str]] = {
    "Metrics": (collect, "_check"),
    "shard": (build, "check_model"),
    "initialize": (build, "check_model"),
}


@contextmanager
def _planted(name: str, here: bool, kind: type[BaseException]) -> Iterator[None]:
    """Let the beginning of a call fail `here`."""

    def fail(*_: Any, **__: Any) -> None:
        raise kind("planted")

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(*PLACES.get(name, (Engine, "synchronize")), fail)
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
        with _planted(name, rank == 1, kind):
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
        with _planted("step", rank == 1, WithoutATextError):
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
