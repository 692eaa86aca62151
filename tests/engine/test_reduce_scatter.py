"""What travels between ranks in a reduction, in which dtype, and who adds: reduce_dtype, and
reduction="nccl".
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore.distributed.comm import Comm
from shardcore.engine.reduce_scatter import ReduceScatter
from tests.support.choice import some
from tests.support.models import Ramp, Run, batch_of, hash_of_training, loss_of, make_net, train
from tests.support.ranks import run_ranks


class stand_in:  # noqa: N801 - a context manager
    """Lets gloo's reduce_scatter be chosen, and counts its calls; fault: an operation that
    spoils what it gives back.
    """

    def __init__(self, fault: Any = None) -> None:
        self.fault, self.calls = fault, 0

    def __enter__(self) -> "stand_in":
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Comm, "backend_sums", True)
        reduce_scatter = Comm.reduce_scatter

        def counted(comm: Comm, received: torch.Tensor, sent: torch.Tensor, name: str) -> Any:
            self.calls += 1
            works = reduce_scatter(comm, received, sent, name)
            if self.fault is not None:
                for work in works:
                    work.wait()
                self.fault(received)
            return [] if self.fault is not None else works

        self.patch.setattr(Comm, "reduce_scatter", counted)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def _hashes(
    rank: int, world_size: int, runs: list[Run], fault: Any = None
) -> tuple[list[str], int]:
    with stand_in(fault) as backend:
        return [hash_of_training(*train(rank, run)[:2]) for run in runs], backend.calls


def _twice(received: torch.Tensor) -> None:
    received.mul_(2.0)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("accumulate", "sync_each"), [(1, None), (2, True)])
def test_two_ranks_in_float32_have_the_bits_of_the_ordered_sum(
    accumulate: int, sync_each: bool | None
) -> None:
    """a + b is b + a: with two ranks there is one order of adding."""
    common = {"sync_each": sync_each, "clip_grad_norm": 0.5}
    runs = {
        reduction: [
            Run(stage=n, accumulate=accumulate, shard={**common, "reduction": reduction})
            for n in range(4)
        ]
        for reduction in ("nccl", "ordered")
    }
    (expected, no_calls), _ = run_ranks(2, _hashes, runs["ordered"])
    assert no_calls == 0
    for found, calls in run_ranks(2, _hashes, runs["nccl"]):
        assert found == expected
        assert calls >= 4 * len(runs["nccl"]), "the backend was not asked"
    for found, _ in run_ranks(2, _hashes, runs["nccl"][2:3], _twice):
        assert not set(found) & set(expected), "else the test could not fail"


def _grads(
    rank: int, world_size: int, precision: str, layout: str, stage: int
) -> list[torch.Tensor]:
    shard: dict[str, Any] = {"reduction": "nccl"}
    if layout == "mesh":
        shard["process_group"] = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
        )
    elif layout == "nodes":
        shard["ranks_per_node"] = 2
    with stand_in():
        model, optimizer, _ = train(
            rank, Run(stage=stage, steps=0, precision=precision, shard=shard)
        )
        optimizer.scale_loss(loss_of(model, batch_of(0, 0, rank))).backward()
        return [shardcore.full_grad(param).float() for param in model.parameters()]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("layout", "precision", "stage"),
    [("flat", "fp32", 0), ("mesh", "fp32", 3), ("nodes", "bf16", 2), ("flat", "fp16", 1)],
)
def test_every_layout_gets_the_average(layout: str, precision: str, stage: int) -> None:
    parts = []
    for rank in range(4):
        model = make_net()
        loss_of(model, batch_of(0, 0, rank)).backward()
        parts.append([param.grad for param in model.parameters()])
    tolerance = {"fp32": 1e-6, "bf16": 2.0**-5, "fp16": 2.0**-8}[precision]
    for grads in run_ranks(4, _grads, precision, layout, stage):
        for got, *of_ranks in zip(grads, *parts, strict=True):
            expected = sum(of_ranks) / 4
            assert (got - expected).abs().max() <= tolerance * max(
                part.abs().max() for part in of_ranks
            )


def _large(rank: int, world_size: int, divide: bool) -> list[float]:
    with stand_in(), pytest.MonkeyPatch.context() as patch:
        if not divide:
            patch.setattr("shardcore.engine.reduce_scatter._overflows", lambda sent: False)
        model: Any = Ramp()
        optimizer: Any = shardcore.FusedAdam(model.parameters())
        model, optimizer = shardcore.shard(
            model, optimizer, precision="fp16", loss_scale=1.0, reduction="nccl"
        )
        (model(torch.ones(1000)).float() * 65504.0).backward()
        return shardcore.full_grad(model.weight).unique().tolist()


def test_float16_is_divided_before_it_is_added() -> None:
    assert run_ranks(4, _large, True) == [[65504.0]] * 4
    assert run_ranks(4, _large, False) == [[float("inf")]] * 4, "else the test could not fail"


def _names(rank: int, world_size: int, shard: dict[str, Any], accumulate: int) -> list[str]:
    names: list[str] = []
    all_to_all = Comm.all_to_all

    def noted(
        comm: Comm, received: Any, sent: Any, kind: Any, name: str, *rest: Any, **of: Any
    ) -> Any:
        names.append(name)
        return all_to_all(comm, received, sent, kind, name, *rest, **of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "all_to_all", noted)
        train(rank, Run(steps=1, accumulate=accumulate, precision="bf16", shard=shard))
    return names


def test_sums_of_micro_steps_alone_are_named_as_such() -> None:
    for reduce_dtype, accumulate, local in (("fp32", 1, False), (None, 1, False), (None, 2, True)):
        names = run_ranks(
            2, _names, {"reduce_dtype": reduce_dtype, "sync_each": False}, accumulate
        )[0]
        assert len(names) >= 4
        assert [name.endswith(", added locally") for name in names] == [local] * len(names)


def _hidden(rank: int, world_size: int, at_once: bool) -> list[int]:
    """Return how many exchanges were started between each one across nodes and the wait for it,
    before backward ends.
    """
    started: list[int] = []  # numbers of all exchanges, in order
    found: list[tuple[int, int]] = []  # those before the wait of each across nodes, and before it
    model, optimizer, _ = train(
        rank, Run(stage=2, steps=0, shard={"ranks_per_node": 2, "units": 1})
    )
    comm = optimizer._engine.comm
    send = comm.all_to_all

    def watched(
        received: torch.Tensor, sent: torch.Tensor, kind: Any, name: str, ranks: Any, of: int
    ) -> Any:
        works = send(received, sent, kind, name, ranks, of=of)
        started.append(of)
        number, across = len(started), ranks == comm.topology.cross_node_ranks(rank)

        def wait() -> None:
            if across:
                found.append((len(started), number))
            for work in works:
                work.wait()

        if at_once:
            wait()
        return [SimpleNamespace(wait=wait)]

    comm.all_to_all = watched
    loss_of(model, batch_of(0, 0, rank)).backward()
    return [before - number for before, number in found if before < len(started) - 3]


def test_exchanges_across_nodes_are_not_waited_for_at_once() -> None:
    for hidden in run_ranks(4, _hidden, False):
        assert len(hidden) > 3
        assert min(hidden) >= 1, "a unit's backward runs meanwhile"
    assert 0 in run_ranks(4, _hidden, True)[0], "else the test could not fail"


def _gradients_before(rank: int, world_size: int, at_half: bool) -> list[int]:
    """Return how many gradients of the next unit there are when a unit's exchange across nodes
    starts, of each but the last.
    """
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))) for _ in range(4))
    )
    arrived: list[int] = []  # gradients so far, at each exchange across nodes
    count = 0

    def note(param: nn.Parameter) -> None:
        nonlocal count
        count += 1

    for param in model.parameters():  # before those of shard
        param.register_post_accumulate_grad_hook(note)
    with pytest.MonkeyPatch.context() as patch:
        if not at_half:
            patch.setattr(ReduceScatter, "arrive", lambda *_: ())
        model, optimizer = shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), 2, ranks_per_node=2
        )
        comm = optimizer._engine.comm
        send = comm.all_to_all

        def watched(*given: Any, **of: Any) -> Any:
            if given[4] == comm.topology.cross_node_ranks(rank):
                arrived.append(count)
            return send(*given, **of)

        comm.all_to_all = watched
        model(torch.ones(2, 16)).sum().backward()
    return [so_far - 4 * unit for unit, so_far in enumerate(arrived, 1)][:-1]


def test_units_go_across_nodes_before_the_next_is_complete() -> None:
    assert run_ranks(4, _gradients_before, True) == [[3, 3, 3]] * 4, "more than half"
    assert run_ranks(4, _gradients_before, False) == [[4, 4, 4]] * 4, "else the test could not fail"


def _most_in_flight(rank: int, world_size: int, groups: int) -> int:
    """Return how many exchanges are in flight at most, of units of one or two groups of the
    optimizer.
    """
    model = make_net()
    parts = [
        [p for p in model.parameters() if p.ndim > 1],
        [p for p in model.parameters() if p.ndim < 2],
    ]
    given = [{"params": params} for params in parts] if groups == 2 else model.parameters()
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(given), 2)
    in_flight, most = 0, 0
    comm = optimizer._engine.comm
    send = comm.all_to_all

    def watched(*args: Any, **of: Any) -> Any:
        nonlocal in_flight, most
        works = send(*args, **of)
        in_flight += 1
        most = max(most, in_flight)

        def wait() -> None:
            nonlocal in_flight
            in_flight -= 1
            for work in works:
                work.wait()

        return [SimpleNamespace(wait=wait)]

    comm.all_to_all = watched
    loss_of(model, batch_of(0, 0, rank)).backward()
    return most


@pytest.mark.parametrize("groups", [1, 2])
def test_two_units_are_in_flight_whatever_their_groups(groups: int) -> None:
    assert run_ranks(2, _most_in_flight, groups) == [2 * groups] * 2


def _refused(rank: int, world_size: int) -> str:
    model = make_net()
    try:
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()), reduction="nccl")
    except ValueError as error:
        return str(error)
    return "no error"


def test_other_backends_are_refused() -> None:
    for text in run_ranks(2, _refused):
        assert (
            'reduction is "nccl" but the process group has no nccl backend; expected "ordered"'
            in text
        )


def test_one_rank_alone_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = hash_of_training(*train(0, Run(shard={"keep_fp32": [nn.LayerNorm]}))[:2])
    monkeypatch.setattr(ReduceScatter, "_start", lambda *_: pytest.fail("something was sent"))
    assert (
        hash_of_training(
            *train(0, Run(shard={"keep_fp32": [nn.LayerNorm], "reduction": "nccl"}))[:2]
        )
        == ordered
    )


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _hash(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    return [hash_of_training(*train(rank, run)[:2]) for run in runs]


@pytest.mark.more
@pytest.mark.parametrize(
    ("precision", "order"),
    some(
        itertools.product(["fp32", "bf16", "fp16"], [(1, None), (2, True), (2, False)]),
        [("bf16", (2, True))],
    ),
)
def test_one_hash_for_every_stage_and_dtypes_that_differ(
    precision: str, order: tuple[int, Any]
) -> None:
    accumulate, sync_each = order

    def runs(reduce_dtype: str | None) -> list[Run]:
        options = {
            "reduce_dtype": reduce_dtype,
            "sync_each": sync_each,
            "keep_fp32": [nn.LayerNorm],
        }
        if precision == "fp16":
            options["loss_scale"] = 256.0
        return [
            Run(
                stage=stage,
                steps=2,
                precision=precision,
                accumulate=accumulate,
                shard={**options, "units": units},
            )
            for stage, units in ((1, 500), (3, "auto"))
        ]

    found = {}
    for name in (None, "fp32", "bf16", "fp16"):
        (found[name],) = {value for of_rank in run_ranks(2, _hash, runs(name)) for value in of_rank}
    assert found[None] == found["fp32"], "float32 holds every gradient and every sum as it is"
    # than what there is
    narrower = {"fp32", "bf16", "fp16"} - {precision if sync_each is not False else "fp32"}
    assert len({found[name] for name in narrower} | {found[None]}) == (
        3 if "fp32" not in narrower else 2
    )


def _sent(
    rank: int, world_size: int, reduce_dtype: str | None, locally: bool
) -> tuple[set[str], Any]:
    """What goes into all_to_all, and the reduced gradient; locally: after it was only added on
    this rank.
    """
    shard = {"reduce_dtype": reduce_dtype, "sync_each": not locally}
    model, optimizer, _ = train(rank, Run(stage=1, steps=0, accumulate=2, shard=shard))
    dtypes: set[str] = set()
    comm = optimizer._engine.comm
    send = comm.all_to_all

    def spy(received: torch.Tensor, sent: torch.Tensor, *where: Any, **of: Any) -> Any:
        dtypes.update([str(sent.dtype), str(received.dtype)])
        return send(received, sent, *where, **of)

    comm.all_to_all = spy
    loss_of(model, batch_of(0, 0, rank)).backward()
    assert (dtypes == set()) == locally
    full = shardcore.full_grad(model.head.weight)
    return dtypes, full.tolist()


@pytest.mark.parametrize(
    ("reduce_dtype", "locally"), [(None, False), ("fp32", True), ("bf16", False), ("fp16", True)]
)
def test_what_travels_has_that_dtype_and_is_rounded_once(
    reduce_dtype: str | None, locally: bool
) -> None:
    dtype = DTYPES[reduce_dtype or "fp32"]
    parts = []
    for rank in range(2):
        model = make_net()
        loss_of(model, batch_of(0, 0, rank)).backward()
        parts.append(model.head.weight.grad.to(dtype).float())
    expected = (parts[0] + parts[1]) / 2
    for dtypes, full in run_ranks(2, _sent, reduce_dtype, locally):
        assert dtypes == {str(dtype)}
        assert torch.equal(torch.tensor(full), expected)


def test_one_rank_alone_rounds_nothing() -> None:
    hashes = {
        hash_of_training(*train(0, Run(shard={"reduce_dtype": name}))[:2])
        for name in (None, "bf16", "fp16")
    }
    assert len(hashes) == 1


def test_bad_reduce_dtypes() -> None:
    model = make_net()
    with pytest.raises(
        ValueError, match=r'reduce_dtype is .fp8.; expected "bf16" or "fp16" or "fp32" or None'
    ):
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()), reduce_dtype="fp8")
