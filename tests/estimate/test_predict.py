"""What shardcore.estimate says of a rank's memory and messages, beside what real ranks keep and
send: equal to the byte.

Three witnesses: memory_report, the tensors that Python's garbage collector finds alive (so what the
report forgets is seen), and a count of the collectives that leave Comm.
"""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore.distributed.comm import Comm
from shardcore.engine.bucket import BufferPool
from shardcore.engine.states import DeviceStore
from shardcore.estimate import Prediction, predict
from shardcore.estimate.predict import _Step
from tests.support.choice import combinations
from tests.support.models import Net, Run, batch_of, loss_of, train
from tests.support.ranks import run_ranks

LEAVING = {"optimizer": "cpu", "gradients": "cpu", "ratio": 0.6}

CASES = [
    Run(precision=precision, shard={"offload": offload})
    for precision in ("fp32", "bf16")
    for offload in (None, {"optimizer": "cpu"})
] + [
    Run(precision="bf16", shard={"keep_fp32": nn.LayerNorm, "grad_dtype": "bf16"}),
    Run(precision="bf16", accumulate=2, shard={"sync_each": True}),
    Run(
        precision="bf16", accumulate=2, shard={"sync_each": False, "offload": {"optimizer": "cpu"}}
    ),
    Run(precision="bf16", accumulate=2, shard={"sync_each": False, "reduce_dtype": "bf16"}),
    Run(
        precision="bf16", shard={"reshard_after_forward": False}, adam={"lr": 1e-2, "amsgrad": True}
    ),
    Run(
        precision="bf16",
        shard={"offload": {"optimizer": "cpu"}},
        adam={"master": "split", "state_dtype": "8bit"},
    ),
    Run(
        precision="bf16",
        shard={"keep_fp32": nn.LayerNorm},
        adam={"stochastic_rounding": True, "state_dtype": "bf16"},
    ),
    Run(precision="bf16", shard={"offload": {"optimizer": "cpu", "ratio": 0.37}}),
    Run(precision="bf16", shard={"offload": {"optimizer": "cpu", "gradients": "cpu"}}),
    Run(
        precision="fp32",
        accumulate=2,
        shard={"offload": {"optimizer": "cpu", "gradients": "cpu", "ratio": 0.37}},
    ),
    Run(precision="bf16", shard={"offload": LEAVING}),
    Run(precision="bf16", shard={"offload": {"optimizer": "cpu", "params": "cpu"}}),
    Run(precision="fp32", shard={"offload": LEAVING | {"params": "cpu"}}),
]

# The same over 4 ranks that lie in nodes; "hybrid" is a mesh of nodes and the ranks of one.
LAYOUTS = [
    Run(precision="bf16", shard={"ranks_per_node": 2}),
    Run(precision="fp32", shard={"ranks_per_node": 1, "offload": {"optimizer": "cpu"}}),
    Run(
        precision="bf16",
        accumulate=2,
        shard={"ranks_per_node": 2, "hybrid": True, "keep_fp32": nn.LayerNorm},
    ),
    Run(
        precision="fp32",
        shard={"ranks_per_node": 2, "hybrid": True, "offload": {"optimizer": "cpu"}},
    ),
    Run(precision="bf16", shard={"ranks_per_node": 1, "hybrid": True}),
    Run(precision="bf16", shard={"ranks_per_node": 4, "hybrid": True, "reshard_after_forward": 2}),
    Run(
        precision="fp32",
        accumulate=2,
        shard={"reshard_after_forward": 2, "keep_fp32": nn.LayerNorm},
    ),
    Run(precision="bf16", shard={"reshard_after_forward": 4}),
    Run(precision="bf16", shard={"reshard_after_forward": 1, "ranks_per_node": 2}),
    Run(precision="bf16", shard={"reduction": "nccl", "grad_dtype": "bf16"}),
    Run(precision="fp32", shard={"reduction": "nccl", "ranks_per_node": 2, "hybrid": True}),
    Run(
        precision="bf16",
        accumulate=2,
        shard={"ranks_per_node": 2, "hybrid": True, "sync_each": True, "offload": LEAVING},
    ),
    Run(
        precision="bf16",
        shard={"ranks_per_node": 2, "hybrid": True, "offload": LEAVING | {"params": "cpu"}},
    ),
]


class Model(Net):
    """Net with a frozen layer in one block and uneven blocks, so that buffers of the pools have
    several sizes.
    """

    def __init__(self) -> None:
        super().__init__(depth=5)
        self.blocks[1].up.requires_grad_(False)
        self.blocks[3].up = nn.Linear(24, 2500)
        self.blocks[3].down = nn.Linear(2500, 24)


def predicted(rank: int, world_size: int, run: Run) -> Prediction:
    with torch.device("meta"):
        model = Model()
    adam = shardcore.FusedAdam if "state_dtype" in run.adam else torch.optim.AdamW
    optimizer = adam([p for p in model.parameters() if p.requires_grad], **run.adam)
    options = {**run.shard, "precision": run.precision, "accumulate": run.accumulate}
    return predict(model, optimizer, run.stage, world_size=world_size, rank=rank, **options)


def live_tensors() -> dict[int, int]:
    """Bytes of every storage that a Python tensor holds, by storage; weights that are only in
    shards have none.
    """
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            if thing.layout != torch.strided:
                continue
            storage = thing.untyped_storage()
            try:
                found[storage._cdata] = storage.nbytes() if storage.data_ptr() else 0
            except RuntimeError:  # closed
                found[storage._cdata] = 0
    return found


def counting(method: Any, sent: Counter[str]) -> Any:
    """Return a method of Comm that adds what it sends to `sent`."""

    def counted(comm: Comm, given: torch.Tensor | list[torch.Tensor], *rest: Any, **of: Any) -> Any:
        ranks = comm.world_size if isinstance(rest[-1], str | None) else len(rest[-1])
        tensors = [item for item in (given, *rest) if isinstance(item, torch.Tensor)]
        nbytes = (
            max(tensor.nbytes for tensor in tensors)
            if tensors
            else sum(full.nbytes for full in given)
        )
        if ranks > 1 and nbytes:
            sent["collectives"] += 1
            sent["bytes"] += nbytes // ranks * (ranks - 1)
        return method(comm, given, *rest, **of)

    return counted


def counting_rows(method: Any, sent: Counter[str]) -> Any:
    """Return Comm.gather_rows so that it adds what it sends to `sent`."""

    def counted(comm: Comm, row: torch.Tensor, *rest: Any) -> Any:
        if comm.world_size > 1:
            sent["collectives"] += 1
            sent["bytes"] += row.nbytes * (comm.world_size - 1)
        return method(comm, row, *rest)

    return counted


def _measured(rank: int, world_size: int, runs: list[Run]) -> list[tuple[Any, ...]]:
    return [_measured_one(rank, run) for run in runs]


def _measured_one(rank: int, run: Run) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        counted: Counter[str] = Counter()
        for name in ("all_to_all", "reduce_scatter", "all_gather"):
            patch.setattr(Comm, name, counting(getattr(Comm, name), counted))
        patch.setattr(Comm, "gather_rows", counting_rows(Comm.gather_rows, counted))
        before = live_tensors()
        torch.manual_seed(0)
        shard = {key: value for key, value in run.shard.items() if key != "hybrid"}
        if "hybrid" in run.shard:
            nodes = dist.get_world_size() // shard["ranks_per_node"]
            shard["process_group"] = init_device_mesh(
                "cpu", (nodes, shard["ranks_per_node"]), mesh_dim_names=("node", "rank")
            )
        patch.setattr(Comm, "backend_sums", True)  # gloo stands in for NCCL
        model, optimizer, _ = train(rank, replace(run, shard=shard, steps=3), Model())
        counted.clear()
        for micro in range(run.accumulate):
            loss_of(model, batch_of(7, micro, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        report = shardcore.memory_report(model)
        sent = dict(counted)
        alive = sum(size for storage, size in live_tensors().items() if before.get(storage) != size)
    return report.lines, sent, alive


def differences(prediction: Prediction, measured: tuple[Any, ...]) -> list[str]:
    """Say where a prediction and what was measured differ."""
    lines, sent, alive = measured
    found = []
    ours, theirs = (Counter[Any](), Counter[Any]())
    for table, report in ((ours, prediction.resting.lines), (theirs, lines)):
        for line in report:
            table[line.unit, line.kind, line.tier] += line.bytes
    found += [
        f"{key}: {ours[key]} != {theirs[key]}"
        for key in ours.keys() | theirs.keys()
        if ours[key] != theirs[key]
    ]
    counted = {
        "collectives": sum(t.collectives for t in prediction.transfers),
        "bytes": prediction.sent_bytes,
    }
    if counted != {"collectives": 0, "bytes": 0} | sent:
        found.append(f"sent: {counted} != {sent}")
    total = sum(line.bytes for line in prediction.resting.lines)
    if not total <= alive <= total + 4096:  # buffers of the model, norms, the step's bookkeeping
        found.append(f"alive: {total} != {alive}")
    return found


def fits(run: Run) -> bool:
    """Whether `shard` takes such an offload at this stage."""
    offload = run.shard.get("offload") or {}
    return ("params" not in offload or run.stage == 3) and (
        "gradients" not in offload or run.stage > 0
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize(("stage", "world_size"), combinations([0, 1, 2, 3], [1, 2, 4], meet=1))
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_prediction_is_what_ranks_keep_and_send(stage: int, world_size: int, every: int) -> None:
    if world_size == 2:
        every = min(every, 2)
    only_here = (
        [run for run in CASES if "params" in (run.shard.get("offload") or {})]
        if world_size == 2 and stage == 3
        else []
    )
    runs = [replace(run, stage=stage) for run in CASES[stage % every :: every] + only_here]
    runs = [run for run in runs if fits(run)]
    for rank, answers in enumerate(run_ranks(world_size, _measured, runs)):
        for run, measured in zip(runs, answers, strict=True):
            assert differences(predicted(rank, world_size, run), measured) == [], run


@pytest.mark.parametrize("stage", [0, 2])
def test_one_rank_keeps_gradients_as_they_are(stage: int) -> None:
    # nothing travels, so this says nothing
    run = Run(stage=stage, precision="bf16", shard={"reduce_dtype": "fp32"})
    [measured] = run_ranks(1, _measured, [run])
    assert differences(predicted(0, 1, run), measured[0]) == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_prediction_for_ranks_in_nodes_and_for_what_a_few_ranks_keep(stage: int) -> None:
    runs = [
        replace(run, stage=stage)
        for run in LAYOUTS
        if stage == 3 or "reshard_after_forward" not in run.shard
    ]
    runs = [run for run in runs if fits(run)]
    for rank, answers in enumerate(run_ranks(4, _measured, runs)):
        for run, measured in zip(runs, answers, strict=True):
            assert differences(predicted(rank, 4, run), measured) == [], run


def test_another_order_of_use_costs_less_than_a_unit() -> None:
    """`gain` is the first parameter of the model and the last one used; with "bf16" it has a
    buffer of its own here.
    """
    runs = [Run(stage=stage, precision="bf16", shard={"keep_fp32": "gain"}) for stage in (2, 3)]
    unit = max(sum(p.numel() for p in block.parameters()) for block in Model().blocks) * 2
    for rank, answers in enumerate(run_ranks(2, _measured, runs)):
        for run, (lines, *_) in zip(runs, answers, strict=True):
            ours, theirs = (
                sum(line.bytes for line in found)
                for found in (predicted(rank, 2, run).resting.lines, lines)
            )
            assert abs(ours - theirs) <= 0.02 * theirs + unit


def _check_twins(
    world_size: int, twins: list[tuple[Callable[[pytest.MonkeyPatch], None], Run]]
) -> None:
    """Predictions are right, and with what a twin forgets wrong."""
    runs = [run for _, run in twins]
    for (forget, run), measured in zip(
        twins, run_ranks(world_size, _measured, runs)[0], strict=True
    ):
        assert differences(predicted(0, world_size, run), measured) == []
        with pytest.MonkeyPatch.context() as patch:
            forget(patch)
            assert differences(predicted(0, world_size, run), measured) != [], forget.__name__


def _forget_state(patch: pytest.MonkeyPatch) -> None:
    stored = DeviceStore.stored
    patch.setattr(
        DeviceStore,
        "stored",
        lambda states, bucket: list(stored(states, bucket))[bucket.unit == "blocks.1" :],
    )


def _one_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shardcore.engine.reduce_scatter.MAX_IN_FLIGHT", 1)


def _no_received(patch: pytest.MonkeyPatch) -> None:
    take = BufferPool.acquire
    patch.setattr(
        BufferPool,
        "acquire",
        lambda pool, numel, dtype: take(pool, numel if pool._lent else 0, dtype),
    )


def _one_level(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "shardcore.distributed.topology.Topology.levels",
        lambda topology, rank: [range(topology.world_size)],
    )


def _nothing_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(predict.__globals__, "keepers_of", lambda reshard: 0)


def _all_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "shardcore.distributed.topology.Topology.owned_pieces",
        lambda topology, rank: (topology.piece_index(rank), topology.piece_index(rank) + 1),
    )


@pytest.mark.more
def test_a_prediction_that_forgets_nodes_is_rejected() -> None:
    twins = [
        (_one_level, LAYOUTS[0], 2),
        (_nothing_kept, LAYOUTS[6], 3),
        (_all_share, LAYOUTS[2], 1),
    ]
    _check_twins(4, [(forget, replace(run, stage=stage)) for forget, run, stage in twins])


def _no_gathers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Step, "_move_weights", lambda step, known: None)


def _no_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shardcore.layout.BLOCK", 1)


def _one_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(_Step._leave.__globals__, "IN_FLIGHT", 1)


def test_a_prediction_that_forgets_a_buffer_is_rejected() -> None:
    twins = [
        *((_forget_state, 0, None), (_one_in_flight, 2, None), (_no_received, 2, None)),
        *((_no_gathers, 3, None), (_no_padding, 1, None), (_one_leaves, 2, LEAVING)),
    ]
    _check_twins(
        2,
        [
            (forget, Run(stage=of, precision="bf16", shard={"offload": to}))
            for forget, of, to in twins
        ],
    )


def _hoarding(rank: int, world_size: int, run: Run) -> tuple[Any, ...]:
    keep = BufferPool.keep
    hoard: list[torch.Tensor] = []

    def leaking(pool: BufferPool, numel: int, dtype: torch.dtype) -> torch.Tensor:
        hoard.append(torch.zeros(2048))
        return keep(pool, numel, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BufferPool, "keep", leaking)
        return _measured_one(rank, run)


def test_a_buffer_that_the_report_forgets_is_seen() -> None:
    run = Run(stage=1)
    measured = run_ranks(1, _hoarding, run)[0]
    assert [text.split(":")[0] for text in differences(predicted(0, 1, run), measured)] == ["alive"]


def test_predict_changes_nothing_and_refuses_what_shard_refuses() -> None:
    model = Model()
    before = {name: (id(param), param.data_ptr()) for name, param in model.named_parameters()}
    predict(model, None, 3, world_size=7, rank=6, precision="bf16")
    assert before == {
        name: (id(param), param.data_ptr()) for name, param in model.named_parameters()
    }
    for options, error, message in (
        ({"stage": 4}, ValueError, "stage is 4; expected 0, 1, 2 or 3"),
        (
            {"world_size": 2, "rank": 2},
            ValueError,
            "rank is 2 of 2; expected 0 <= rank < world_size",
        ),
        (
            {"prefetched": 3},
            TypeError,
            "'prefetched' is no option of shard.*; did you mean 'prefetch'",
        ),
        (
            {"process_group": object()},
            ValueError,
            "process_group was given; expected world_size, and ranks_per_node with",
        ),
        ({"hybrid": True}, ValueError, "hybrid is True without ranks_per_node"),
        (
            {"ranks_per_node": 3},
            ValueError,
            "ranks_per_node is 3; expected a divisor of the 2 ranks",
        ),
        ({"units": "none"}, ValueError, 'units is "none"'),
        ({"optimizer": shardcore.FusedAdam(Net().parameters())}, ValueError, "is not in the model"),
        (
            {"optimizer": torch.optim.NAdam(model.parameters())},
            TypeError,
            "NAdam, which cannot run on shards. It keeps numbers",
        ),
    ):
        with pytest.raises(error, match=message):
            predict(model, **{"world_size": 2, **options})


@pytest.mark.parametrize(
    ("stage", "accumulate", "offload", "master"),
    [
        (2, 1, {"optimizer": "cpu", "ratio": 0.25}, "fp32"),
        (2, 2, LEAVING | {"ratio": 0.5}, "split"),
        (3, 1, LEAVING | {"ratio": 0.5, "params": "cpu"}, "fp32"),
        (3, 2, {"params": "cpu"}, "split"),
    ],
)
def test_copies_to_and_from_host_memory(
    stage: int, accumulate: int, offload: Any, master: str
) -> None:
    # whole blocks: nothing is padded
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    options = {"precision": "bf16", "accumulate": accumulate, "units": 1, "offload": offload}
    adam = lambda: shardcore.FusedAdam(model.parameters(), lr=1e-2, master=master)  # noqa: E731
    ours = predict(model, adam(), stage, world_size=1, **options).copies
    model, optimizer = shardcore.shard(model, adam(), stage, **options)
    for _ in range(3):
        before = optimizer._engine.store.moved_bytes
        for _ in range(accumulate):
            model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = optimizer._engine.store.moved_bytes
    assert (ours.to_host, ours.from_host) == tuple(
        moved[way] - before[way] for way in ("to_host", "from_host")
    )
    assert ours.updated == (
        0 if "optimizer" not in offload else round(offload["ratio"] * 4 * 64 * 64)
    )
