"""Audits: planted wrong bits are found and named, and nothing else is."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardcore
from shardcore.engine.reduce_scatter import Parts
from tests.support.groups import device_decides
from tests.support.params import OnCpu
from tests.support.ranks import run_ranks

RAISE = {"every": 1, "sweep": 4, "on_corruption": "raise"}


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 50), nn.Linear(50, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(2 * step + rank))


def _train(
    rank: int,
    world_size: int,
    stage: int,
    options: dict[str, Any],
    make: str,
    of_optimizer: dict[str, Any],
    steps: int = 9,
    plant: Callable[..., None] | None = None,
) -> tuple[int, str]:
    """Train; returns the digest of the weights, and what SilentCorruption said."""
    own = model()
    of_model = getattr(shardcore, make, None) or getattr(torch.optim, make)
    groups = [{"params": [*own.parameters()]}]
    if make == "Muon":
        groups = [
            {"params": [p for p in own.parameters() if (p.dim() == 2) == muon], "use_muon": muon}
            for muon in (True, False)
        ]
    optimizer = of_model(groups, **{"lr": 1e-2, **of_optimizer})
    if options.pop("mesh", False):
        options["process_group"] = init_device_mesh(
            "cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")
        )
    decides = device_decides(late=None) if options.pop("device", False) else nullcontext()
    with decides:
        sharded, optimizer = shardcore.shard(own, optimizer, stage, **options)
        return _run(rank, sharded, optimizer, options.get("accumulate", 1), steps, plant)


def _run(
    rank: int,
    sharded: Any,
    optimizer: Any,
    accumulate: int,
    steps: int,
    plant: Callable[..., None] | None,
) -> tuple[int, str]:
    if plant is not None:
        plant(rank, sharded, optimizer)
    for step in range(steps):
        try:
            for _ in range(accumulate):
                given = batch(rank, step).to(next(sharded.parameters()).device)
                loss = sharded(given).float().square().mean()
                optimizer.scale_loss(loss).backward()
            optimizer.step()
        except shardcore.SilentCorruption as error:
            with pytest.raises(shardcore.SilentCorruption):
                optimizer.step()
            with pytest.raises(shardcore.SilentCorruption):
                sharded.state_dict()
            return shardcore.digest(sharded), str(error)
        optimizer.zero_grad()
    optimizer.synchronize()
    return shardcore.digest(sharded), ""


CASES: list[Any] = [
    pytest.param(stage, {}, "FusedAdam", {}, id=f"stage{stage}") for stage in range(4)
] + [
    pytest.param(stage, options, make, of_optimizer, id=name)
    for name, stage, options, make, of_optimizer in (
        ("split", 2, {"precision": "bf16"}, "FusedAdam", {"master": "split"}),
        ("masters", 3, {"precision": "bf16"}, "FusedAdam", {"amsgrad": True}),
        ("8bit", 1, {}, "FusedAdam", {"state_dtype": "8bit"}),
        ("bf16 states", 2, {"precision": "bf16"}, "FusedAdam", {"state_dtype": "bf16"}),
        ("random", 3, {"precision": "bf16"}, "FusedAdam", {"stochastic_rounding": True}),
        ("fp16", 2, {"precision": "fp16"}, "FusedAdam", {}),
        ("decided on the device", 2, {"device": True}, "FusedAdam", {}),
        ("SGD", 2, {"precision": "bf16"}, "SGD", {"momentum": 0.9}),
        ("Lion", 3, {}, "Lion", {}),
        ("Muon", 2, {}, "Muon", {}),
        ("accumulate", 2, {"accumulate": 2, "clip_grad_norm": 1e-3}, "FusedAdam", {}),
        ("nodes", 2, {"ranks_per_node": 1}, "FusedAdam", {}),
        ("replicas", 3, {"mesh": True}, "FusedAdam", {}),
        ("cpu", 2, {"offload": {"optimizer": "cpu", "gradients": "cpu"}}, "CPUAdam", {}),
        ("params", 3, {"offload": {"optimizer": "cpu", "params": "cpu"}}, "CPUAdam", {}),
        ("ratio", 3, {"offload": {"optimizer": "cpu", "ratio": 0.5}}, "CPUAdam", {}),
        ("overlap", 1, {"overlap_step": True, "offload": {"optimizer": "cpu"}}, "CPUAdam", {}),
        ("nvme", 3, {"offload": {"optimizer": "nvme", "params": "nvme"}}, "CPUAdam", {}),
        (
            "nvme, overlap",
            1,
            {"overlap_step": True, "precision": "bf16", "offload": {"optimizer": "nvme"}},
            "CPUAdam",
            {},
        ),
    )
]


@pytest.mark.parametrize(("stage", "options", "make", "of_optimizer"), CASES)
def test_no_difference_is_found_where_none_is(
    stage: int, options: dict[str, Any], make: str, of_optimizer: dict[str, Any], tmp_path: Path
) -> None:
    """And the bits are those of a run without audits."""
    found = []
    for audit in (RAISE, None):
        given = {**options, "audit": audit}
        if options.get("offload", {}).get("optimizer") == "nvme":
            path = tmp_path / str(audit is None)
            path.mkdir()
            given["offload"] = {**options["offload"], "path": str(path)}
        found.append(run_ranks(2, _train, stage, given, make, of_optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_audits_of_some_steps_find_no_difference(stage: int, every: int) -> None:
    """Backwards between two audits do not count."""
    options = {"audit": {**RAISE, "every": every}}
    audited = run_ranks(2, _train, stage, options, "FusedAdam", {}, 13)
    assert audited == run_ranks(2, _train, stage, {}, "FusedAdam", {}, 13)


class Flip:
    """Changes a bit of one element on rank 1 at step `first`, behind the kernel."""

    def __init__(
        self, where: str, lasting: bool = False, first: int = 3, at: tuple[int, int] = (0, 300)
    ) -> None:
        """at: the number of the bucket, and the element of its owned range."""
        self.where, self.lasting, self.first, self.at = where, lasting, first, at

    def __call__(self, rank: int, sharded: Any, optimizer: Any) -> None:
        if rank != 1:
            return
        store, calls = optimizer._engine.store, iter(range(1, 100))
        steps = store.steps
        number_of_bucket, at = self.at
        bucket = optimizer._engine.updater.buckets[number_of_bucket]

        def flip() -> None:
            flat = (
                bucket.grad
                if self.where == "grad"
                else bucket.owned_weight
                if self.where == "weight"
                else store.states_of(bucket, 0, bucket.owned_numel)[self.where]
            )
            words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[flat.itemsize]
            flat[at : at + 1].view(words).bitwise_xor_(64)

        def wrong(parts: Any, hypers: Any) -> Iterator[Any]:
            number = next(calls)
            is_now = number == self.first or (self.lasting and number > self.first)
            if is_now and self.where == "grad":
                flip()
            events = list(steps(parts, hypers))
            if is_now and self.where != "grad":
                flip()
            yield from events

        store.steps = wrong


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("where", ["grad", "weight", "master", "exp_avg", "exp_avg_sq"])
def test_a_wrong_update_is_named(where: str, stage: int) -> None:
    options = {"precision": "bf16", "audit": {**RAISE, "sweep": 1}}
    of_ranks = run_ranks(2, _train, stage, options, "FusedAdam", {}, 9, Flip(where))
    assert of_ranks[0] == of_ranks[1]
    text = of_ranks[0][1]
    assert "rank 1 (" in text
    assert "the update of step 3 wrote" in text
    assert f"{'weight' if where == 'grad' else where} of " in text or where == "grad"
    assert "transient" in text
    assert "(1 of " in text
    assert "had all passed: none yet" in text


@pytest.mark.parametrize("where", ["weight", "exp_avg"])
def test_a_sweep_finds_what_lasts(where: str) -> None:
    """A chunk is audited once in a sweep of 4."""
    options = {"audit": RAISE}
    of_ranks = run_ranks(2, _train, 2, options, "FusedAdam", {}, 9, Flip(where, lasting=True))
    assert "the update of step" in of_ranks[0][1]


def test_a_sweep_covers_every_element() -> None:
    """A flip that lasts, at any place, is found by the four audits of the first sweep."""
    _, optimizer = shardcore.shard(own := model(), shardcore.FusedAdam(own.parameters()))
    places = [
        (number, piece.start + at)
        for number, bucket in enumerate(optimizer._engine.updater.buckets)
        for piece in bucket.pieces
        for at in range(0, piece.numel, 500)
    ]
    assert len(places) > 10
    for at in places:
        options = {"audit": RAISE}
        plant = partial(Flip("exp_avg", lasting=True, first=1, at=at), 1)
        text = _train(0, 1, 2, options, "FusedAdam", {}, 5, lambda _, *both, p=plant: p(*both))[1]
        assert "the update of step" in text, at


def _another_sum(rank: int, sharded: Any, optimizer: Any) -> None:
    """What rank 0 receives in one reduction has another bit."""
    exchange, calls = optimizer._engine.reducer.exchange, iter(range(100))
    parts_of = exchange._parts

    def wrong(flight: Any) -> Parts:
        parts: Parts = parts_of(flight)
        if rank == 0 and next(calls) == 4:
            parts.received.view(parts.count, -1)[1, 5] += 1.0
        return parts

    exchange._parts = wrong


@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_a_wrong_reduction_is_named(ranks_per_node: int | None) -> None:
    options = {"audit": RAISE, "ranks_per_node": ranks_per_node}
    of_ranks = run_ranks(2, _train, 2, options, "FusedAdam", {}, 9, _another_sum)
    assert of_ranks[0] == of_ranks[1]
    assert (
        "that rank 0 added up differs from what rank 1 added up from the same local gradients"
        in of_ranks[0][1]
    )


def _each_sum(rank: int, sharded: Any, optimizer: Any) -> None:
    """Each piece that rank 0 receives has another bit."""
    exchange = optimizer._engine.reducer.exchange
    parts_of = exchange._parts

    def wrong(flight: Any) -> Parts:
        parts: Parts = parts_of(flight)
        if rank == 0:
            parts.received.view(parts.count, -1)[1, 5] += 1.0
        return parts

    exchange._parts = wrong


@pytest.mark.parametrize(("every", "steps"), [(1, 2), (3, 4)])
def test_the_first_audit_of_a_reduction_counts(every: int, steps: int) -> None:
    """It is compared at the start of the next step, after the next backward."""
    options = {"audit": {**RAISE, "every": every}}
    for made, is_found in ((steps - 1, False), (steps, True)):
        text = run_ranks(2, _train, 2, dict(options), "FusedAdam", {}, made, _each_sum)[0][1]
        assert ("that rank 0 added up differs" in text) == is_found


def _drifts(rank: int, sharded: Any, optimizer: Any) -> None:
    """Rank 2's weights change between two steps."""
    if rank == 2:
        sharded[0].weight.data[3, 3] += 1e-3


@pytest.mark.parametrize(
    ("world_size", "odd"),
    [(3, "of ranks 0, 1, 2: odd are 2"), (2, ""), (4, "of ranks 0, 2: no majority agrees")],
)
def test_the_odd_replica_is_named(world_size: int, odd: str) -> None:
    """By the majority. Of two, both are named."""
    options = {"audit": RAISE, "mesh": world_size == 4}
    stage = 3 if world_size == 4 else 0
    plant = _drifts_in_shard if world_size == 4 else _drifts
    of_ranks = run_ranks(world_size, _train, stage, options, "FusedAdam", {}, 4, plant)
    assert (odd in of_ranks[0][1]) if odd else not of_ranks[0][1]


def _drifts_in_shard(rank: int, sharded: Any, optimizer: Any) -> None:
    if rank == 2:
        optimizer._engine.updater.buckets[0].owned_weight[3] += 1e-3


def _tensor_parallel(rank: int, world_size: int, drifts: bool) -> str:
    """What tensor-parallel ranks have, too, is compared: the norm's weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = model().append(nn.LayerNorm(3))
    parallelize_module(own, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded, optimizer = shardcore.shard(
        own, torch.optim.AdamW(own.parameters()), 3, process_group=mesh["dp"], audit=RAISE
    )
    data = mesh["dp"].get_local_rank()
    assert not _run(data, sharded, optimizer, 1, 3, None)[1]
    if drifts and rank == 3:
        next(b for b in optimizer._engine.updater.buckets if b.repeated).owned_weight[0] += 1e-3
    return _run(data, sharded, optimizer, 1, 3, None)[1]


def test_tensor_parallel_copies_are_compared() -> None:
    assert run_ranks(4, _tensor_parallel, False) == [""] * 4
    assert "of ranks 2, 3: no majority agrees" in run_ranks(4, _tensor_parallel, True)[0]


def _stages(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    own = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 50 if rank < 2 else 70))
    sharded, optimizer = shardcore.shard(
        own,
        shardcore.FusedAdam(own.parameters()),
        process_group=mesh["dp"].get_group(),
        model_parallel_group=mesh["pp"].get_group(),
        audit={**RAISE, "sweep": 1},
    )
    return _run(rank, sharded, optimizer, 1, 5, Flip("exp_avg"))[1]


def test_an_error_of_one_stage_is_one_of_all() -> None:
    of_ranks = run_ranks(4, _stages)
    assert of_ranks == of_ranks[:1] * 4
    assert "the update of step 3 wrote" in of_ranks[0]


def _unfrozen(rank: int, world_size: int) -> tuple[int, str]:
    own = model()
    optimizer = shardcore.FusedAdam(own.parameters())
    own[0].requires_grad_(False)
    sharded, optimizer = shardcore.shard(own, optimizer, 3, audit={**RAISE, "sweep": 1})
    before = _run(rank, sharded, optimizer, 1, 5, None)[1]
    shardcore.unfreeze(sharded[0])
    Flip("exp_avg")(rank, sharded, optimizer)
    return len(before), _run(rank, sharded, optimizer, 1, 5, None)[1]


def test_audits_continue_after_unfreeze() -> None:
    before, after = run_ranks(2, _unfrozen)[0]
    assert not before
    assert "the update of step 8 wrote" in after


def _logged(rank: int, world_size: int) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardcore").addHandler(handler)
    try:
        _train(rank, world_size, 2, {"audit": 1}, "FusedAdam", {}, 4, Flip("weight", lasting=True))
    finally:
        logging.getLogger("shardcore").removeHandler(handler)
    return [message for message in messages if message.startswith("audit: ")]


def test_by_default_a_difference_is_logged() -> None:
    """On rank 0 and on the rank that computes wrong bits."""
    of_ranks = run_ranks(2, _logged)
    assert of_ranks[0] == of_ranks[1]


def _saved(rank: int, world_size: int, folder: str) -> str:
    sharded, optimizer = shardcore.shard(
        own := model(), shardcore.FusedAdam(own.parameters()), audit={**RAISE, "sweep": 1}
    )
    Flip("weight")(rank, sharded, optimizer)
    for step in range(3):
        if step == 2:
            shardcore.save(folder, sharded, optimizer)
        sharded(batch(rank, step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(shardcore.SilentCorruption) as raised:
        shardcore.save(folder, sharded, optimizer)
    assert sorted(path.name for path in Path(folder).glob("global*")) == ["global_step2"]
    return str(raised.value)


def _checked(rank: int, world_size: int) -> str:
    """Count no step of check_determinism, and name no checkpoint that it removes."""
    own = model()
    sharded, optimizer = shardcore.shard(
        own, shardcore.FusedAdam(own.parameters()), audit={**RAISE, "sweep": 1}
    )

    def step(index: int) -> None:
        sharded(batch(rank, index)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert shardcore.check_determinism(step, 2, sharded).equal
    Flip("weight")(rank, sharded, optimizer)
    return _run(rank, sharded, optimizer, 1, 5, None)[1]


def test_a_check_of_determinism_is_no_part_of_the_run() -> None:
    text = run_ranks(2, _checked)[0]
    assert "the update of step 3 wrote" in text
    assert "had all passed: none yet" in text


def test_nothing_is_saved_after_a_difference(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    text = run_ranks(2, _saved, folder)[0]
    assert f"had all passed: {Path(folder, 'global_step2')}" in text


def _committed(rank: int, world_size: int, folder: str, resume: bool | None) -> str | int:
    own = model()
    offload = {"optimizer": "nvme", "path": folder} | ({} if resume is None else {"resume": resume})
    sharded, optimizer = shardcore.shard(
        own, shardcore.CPUAdam(own.parameters()), 2, offload=offload, audit={**RAISE, "sweep": 1}
    )
    if resume:
        return int(shardcore.resume(sharded))
    Flip("weight")(rank, sharded, optimizer)
    return _run(rank, sharded, optimizer, 1, 5, None)[1]


def test_a_wrong_step_is_not_committed(tmp_path: Path) -> None:
    text = run_ranks(2, _committed, str(tmp_path), None)[0]
    assert "the update of step 3 wrote" in text
    assert "; committed to files: step 2." in text
    assert run_ranks(2, _committed, str(tmp_path), True) == [2, 2]


@pytest.mark.parametrize(
    ("audit", "error", "text"),
    [
        ("often", TypeError, "audit is 'often'; expected None"),
        (0, ValueError, r'audit\["every"\] is 0; expected a whole number'),
        ({"sweep": 3}, ValueError, 'audit has no "every"'),
        ({"every": 5, "sweeps": 3}, ValueError, "unknown key 'sweeps'; did you mean 'sweep'"),
        ({"every": 5, "on_corruption": "rise"}, ValueError, 'did you mean "raise"'),
        ({"every": 5, "sweep": 1.5}, ValueError, r'audit\["sweep"\] is 1.5'),
    ],
)
def test_bad_options_are_refused(audit: Any, error: type[Exception], text: str) -> None:
    own = model()
    with pytest.raises(error, match=text):
        shardcore.shard(own, shardcore.FusedAdam(own.parameters()), audit=audit)


@pytest.mark.parametrize("form", [{}, {"master": "split"}, {"state_dtype": "8bit"}])
@pytest.mark.parametrize("where", ["", "grad", "exp_avg"])
def test_a_device_computes_the_bits_of_the_cpu(
    device: torch.device, form: dict[str, Any], where: str
) -> None:
    own = model().to(device)
    optimizer: Any = shardcore.FusedAdam(own.parameters(), **form)
    precision = "bf16" if "master" in form else None
    sharded, optimizer = shardcore.shard(
        own, optimizer, 2, precision=precision, audit={**RAISE, "sweep": 1}
    )
    if where:
        Flip(where)(1, sharded, optimizer)
    text = _run(0, sharded, optimizer, 1, 5, None)[1]
    assert all(part in text for part in ("step 3 wrote", str(device))) if where else not text


def test_captured_steps_are_refused() -> None:
    own = model()
    with pytest.raises(ValueError, match="audit is given with capturable=True"):
        shardcore.shard(own, OnCpu(own.parameters()), audit=10)
