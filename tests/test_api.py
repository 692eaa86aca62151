"""A training under `shard`: losses, gradients, one hash over stages, tiers and units; and models
that only run forward.
"""

import copy
import itertools
import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore import _native
from shardcore.offload.cpu_store import CpuStore
from tests.support.choice import EVERY, part, some
from tests.support.meta import init, meta
from tests.support.models import (
    Net,
    Run,
    assert_one,
    batch_of,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
    records_of_runs,
    train,
)
from tests.support.ranks import run_ranks

ADAM = {"lr": 1e-2, "weight_decay": 0.1}


def _plain(
    world_size: int, steps: int, clip: float | None = None, accumulate: int = 1
) -> tuple[nn.Module, list[float]]:
    """Single-process torch on the global batch: the mean over equal rank batches is the mean
    over their union.
    """
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(accumulate):
            parts = [batch_of(step, micro, rank) for rank in range(world_size)]
            loss = (
                loss_of(model, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
                / accumulate
            )
            loss.backward()
            total += loss.item()
        losses.append(total)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def _losses(rank: int, world_size: int, run: Run) -> list[float]:
    return train(rank, run)[2]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "world_size"),
    some(product([0, 1, 2, 3], [1, 2, 4]), [(0, 2), (1, 4), (2, 1), (3, 2)]),
)
def test_fp32_losses_follow_single_process_training(world_size: int, stage: int) -> None:
    _, expected = _plain(world_size, 20, clip=0.7)
    run = Run(stage=stage, steps=20, shard={"clip_grad_norm": 0.7})
    of_ranks = run_ranks(world_size, _losses, run)
    for step, want in enumerate(expected):
        got = sum(losses[step] for losses in of_ranks) / world_size
        assert abs(got - want) <= 1e-5 * abs(want), (step, got, want)


def test_a_wrong_gradient_scale_would_be_seen() -> None:
    """Broken twin of the test above: ranks that sum instead of averaging are one
    learning-rate-free Adam step apart.
    """
    _, expected = _plain(2, 20, clip=0.7)
    _, unclipped = _plain(2, 20, clip=None)
    assert max(abs(a - b) / abs(a) for a, b in zip(expected, unclipped, strict=True)) > 1e-3


def _grads(rank: int, world_size: int, stage: int, precision: str) -> dict[str, Any]:
    model, _optimizer, _ = train(rank, Run(stage=stage, steps=0, precision=precision))
    loss_of(model, batch_of(0, 0, rank)).backward()
    shown = {name: param.grad for name, param in model.named_parameters()}
    full = {
        name: shardcore.full_grad(param).float().tolist()
        for name, param in model.named_parameters()
    }
    return {
        "shown": {
            n: None if g is None else (g.float().tolist(), str(g.dtype)) for n, g in shown.items()
        },
        "full": full,
    }


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")]
)
def test_gradients_are_averages(stage: int, precision: str) -> None:
    results = run_ranks(3, _grads, stage, precision)
    model = make_net()
    for rank in range(3):
        (loss_of(model, batch_of(0, 0, rank)) / 3).backward()
    tolerance = 1e-6 if precision == "fp32" else 0.05
    for result in results:
        for name, param in model.named_parameters():
            full = torch.tensor(result["full"][name])
            assert torch.allclose(full, param.grad, rtol=tolerance, atol=tolerance), name
            if stage == 0:
                values, dtype = result["shown"][name]
                assert dtype == ("torch.float32" if precision == "fp32" else "torch.bfloat16")
                assert torch.allclose(
                    torch.tensor(values), full, rtol=1e-2 if precision == "bf16" else 0
                )
            else:
                assert result["shown"][name] is None


class Branches(nn.Module):
    """Two branches; each forward says which are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(10, 5), nn.Linear(10, 5), nn.Linear(10, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        return self.frozen(sum(getattr(self, name)(x) for name in use.split("+")))


def _branches(
    rank: int, world_size: int, stage: int, offload: Any, plan: list[list[str]]
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Branches()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), **ADAM)
    model, optimizer = shardcore.shard(model, optimizer, stage, precision="fp32", offload=offload)
    for step, uses in enumerate(plan):
        x, y = batch_of(step, 0, rank)
        ((model(x, uses[rank % len(uses)]) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = {
        name: shardcore.full_state(p, "step").item()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return {"weights": {k: v.tolist() for k, v in model.state_dict().items()}, "steps": steps}


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(0, None), (1, {"optimizer": "cpu"}), (2, None), (3, {"optimizer": "cpu"})],
)
def test_unused_and_frozen_parameters_behave_as_in_torch(stage: int, offload: Any) -> None:
    # the third: one on rank 0, the other on rank 1
    plan = [["first"], ["first+second"], ["first", "second"], ["second"]]
    results = run_ranks(2, _branches, stage, offload, plan)
    assert results[0] == results[1]
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step, uses in enumerate(plan):
        for rank in range(2):
            x, y = batch_of(step, 0, rank)
            (((model(x, uses[rank % len(uses)]) - y) ** 2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.allclose(
            torch.tensor(results[0]["weights"][name]), value, rtol=1e-5, atol=1e-6
        ), name
    for name in ("first.weight", "second.bias"):
        assert results[0]["steps"][name] == 3
    assert results[0]["steps"]["never.weight"] == 0
    torch.manual_seed(0)
    assert torch.equal(
        torch.tensor(results[0]["weights"]["never.weight"]), Branches().never.weight
    ), "no decay either"


@pytest.mark.parametrize("kind", ["FusedAdam", "torch"])
def test_a_scheduler_made_before_shard_drives_the_optimizer(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def run(sharded: bool) -> nn.Module:
        model = make_net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), **ADAM)
        if sharded and kind == "FusedAdam":
            optimizer = shardcore.FusedAdam(model.parameters(), **ADAM)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        group = optimizer.param_groups[0]
        if sharded:
            given = optimizer
            with caplog.at_level(logging.WARNING, logger="shardcore"):
                model, optimizer = shardcore.shard(model, optimizer, 2, precision="fp32")
            assert (optimizer is given) == (kind == "FusedAdam")
            assert isinstance(optimizer, shardcore.FusedAdam)
            assert optimizer.param_groups[0] is group
            assert group["params"] == list(model.parameters())
        for step in range(4):
            loss_of(model, batch_of(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert group["lr"] == pytest.approx(1e-2 / 16)
        return model

    expected, got = run(False), run(True)
    for a, b in zip(expected.parameters(), got.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    levels = [record.levelname for record in caplog.records if "from AdamW" in record.getMessage()]
    assert levels == ["WARNING"] * (kind == "torch")


def _poisoned(rank: int, world_size: int, stage: int) -> tuple[bool, int, float, float]:
    model, optimizer, _ = train(rank, Run(stage=stage, steps=2))
    before = hash_of_training(model, optimizer)
    x, y = batch_of(7, 0, rank)
    if rank == 1:
        x[0, 0] = float("inf")
    loss_of(model, (x, y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    same = hash_of_training(model, optimizer) == before
    loss_of(model, batch_of(8, 0, rank)).backward()
    optimizer.step()
    step = shardcore.full_state(next(model.parameters()), "step").item()
    return same, optimizer.skipped_steps, step, optimizer._engine.last_grad_norm


@pytest.mark.cases(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(stage: int) -> None:
    results = run_ranks(2, _poisoned, stage)
    assert results[0] == results[1]
    same, skipped, step, norm = results[0]
    assert same
    assert (skipped, step) == (1, 3)
    assert 0 < norm < 100


def test_gradients_add_up_until_zero_grad() -> None:
    for stage in (0, 2):
        model, _, _ = train(0, Run(stage=stage, steps=0))
        plain = make_net()
        for micro in range(3):
            loss_of(model, batch_of(0, micro, 0)).backward()
            loss_of(plain, batch_of(0, micro, 0)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(shardcore.full_grad(p), q.grad, rtol=1e-5, atol=1e-7)
        model.zero_grad()
        assert all(shardcore.full_grad(p) is None for p in model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clip_grad_norm_is_the_global_norm(stage: int) -> None:
    norms = run_ranks(2, _clip, stage)
    model = make_net()
    for rank in range(2):
        (loss_of(model, batch_of(0, 0, rank)) / 2).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for before, after in norms:
        assert before == pytest.approx(expected.item(), rel=1e-6)
        assert after == pytest.approx(0.1, rel=1e-4)


def _clip(rank: int, world_size: int, stage: int) -> tuple[float, float]:
    model, _, _ = train(rank, Run(stage=stage, steps=0))
    loss_of(model, batch_of(0, 0, rank)).backward()
    before = shardcore.clip_grad_norm_(model, 0.1)
    after = shardcore.clip_grad_norm_(model.parameters(), 10.0)
    return before.item(), after.item()


@pytest.mark.parametrize("offload", [None, {"optimizer": "cpu"}])
def test_float32_weights_edited_through_data_count_on_every_tier(offload: Any) -> None:
    model, optimizer, _ = train(0, Run(steps=1, shard={"offload": offload}))
    model.head.weight.data.clamp_(-0.01, 0.01)
    loss_of(model, batch_of(3, 0, 0)).backward()
    optimizer.step()
    assert model.head.weight.abs().max() < 0.05


OFFLOAD = {"optimizer": "cpu"}


def _variants(folder: Path, **common: Any) -> list[Run]:
    """Stages 0 to 3, with states in each tier or other units or neither; everything else as in
    `common`.
    """
    shard = common.pop("shard", {})
    disk = {"optimizer": "nvme", "path": str(folder)}
    return [
        Run(
            stage=stage,
            shard={"offload": offload, "units": units, "clip_grad_norm": 0.5, **shard},
            **common,
        )
        for stage in (0, 1, 2, 3)
        for offload, units in (
            (None, "auto"),
            (None, 500),
            (OFFLOAD, 500 if stage == 3 else "auto"),
            ({**disk, "resume": False}, "auto" if stage == 3 else 500),
            ({**disk, "durable": False}, "auto"),
        )
    ]


ORDERS = [(1, None), (3, True), (3, False)]
# Each world with each precision or order once; four ranks are slow, and have one.
CHOSEN = [
    (1, "bf16", (3, True)),
    (1, "fp32", (3, False)),
    (2, "fp32", (3, True)),
    (2, "bf16", (3, False)),
    (3, "fp32", (1, None)),
    (4, "bf16", (1, None)),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world_size", "precision", "order"),
    some(itertools.product([1, 2, 3, 4], ["fp32", "bf16"], ORDERS), CHOSEN),
)
@pytest.mark.parametrize("every", EVERY)
def test_one_hash_for_every_stage_tier_and_unit_size(
    world_size: int, precision: str, order: tuple[int, Any], every: int, tmp_path: Path
) -> None:
    accumulate, sync_each = order
    runs = _variants(
        tmp_path,
        precision=precision,
        accumulate=accumulate,
        steps=3,
        shard={"sync_each": sync_each},
    )
    runs = part(
        runs, min(every, 2) if world_size == 1 else every, world_size + (precision == "bf16")
    )
    hashes = run_ranks(world_size, records_of_runs, runs)
    assert_one(value for of_rank in hashes for value in of_rank)


def test_the_two_orders_of_accumulation_differ() -> None:
    """If they did not, the test above could not show which one ran."""
    runs = [Run(accumulate=3, shard={"sync_each": sync_each}) for sync_each in (True, False)]
    each, once = run_ranks(2, records_of_runs, runs)[0]
    assert each != once


@pytest.mark.more
def test_amsgrad_and_groups_are_the_same_everywhere(tmp_path: Path) -> None:
    adam = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "amsgrad": True,
        "adam_w_mode": False,
        "maximize": True,
    }
    runs = _variants(tmp_path, adam=adam)[::3]  # each stage, each tier
    hashes = run_ranks(2, records_of_runs, runs)
    assert_one(hashes[0] + hashes[1])


def _other_runs(rank: int, world_size: int) -> list[str]:
    base = hash_of_training(*train(rank, Run())[:2])
    others = [
        hash_of_training(*train(rank, Run(shard={"clip_grad_norm": 0.5}))[:2]),
        hash_of_training(*train(rank, Run(precision="bf16"))[:2]),
        hash_of_training(*train(rank, Run(steps=5))[:2]),
        hash_of_training(*train(rank, Run(adam={"lr": 1e-2, "weight_decay": 0.11}))[:2]),
        hash_of_training(*train(rank + 1, Run())[:2]),
        hash_of_training(*train(0, Run())[:2]),
    ]
    return [base, *others]


@pytest.mark.more
def test_the_hash_sees_what_matters() -> None:
    """Broken twins: other clipping, precision, steps, decay, data, and a rank that repeats
    another's data.
    """
    hashes = run_ranks(2, _other_runs)[0]
    assert len(set(hashes)) == len(hashes)


class _Losing:
    """A pipeline that once copies zeros for gradients, or copies weights to where they do not
    belong.
    """

    def __init__(self, pipeline: Any, which: str) -> None:
        self._pipeline, self._which, self._left = pipeline, which, 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def _lose(self, which: str, tensors: list[Any]) -> list[Any]:
        self._left -= which == self._which
        return (
            [torch.zeros_like(tensor) for tensor in tensors]
            if which == self._which and self._left == 0
            else tensors
        )

    def chunk(self, weights: list[Any], **lists: Any) -> Any:
        return self._pipeline.chunk(weights=self._lose("weights", weights), **lists)

    def begin(self, chunks: list[Any], grads: list[Any], *arguments: Any, **options: Any) -> None:
        self._pipeline.begin(chunks, self._lose("grads", grads), *arguments, **options)


@pytest.mark.parametrize("which", ["grads", "weights", None])
def test_a_tier_that_skips_copies_changes_the_hash(which: str | None) -> None:
    run = Run(steps=3, shard={"offload": OFFLOAD})
    good = hash_of_training(*train(0, run)[:2])
    model, optimizer, _ = train(0, Run(steps=0, shard={"offload": OFFLOAD}))
    store = optimizer._engine.store
    store._pipeline = _Losing(store._pipeline, which or "nothing")
    for step in range(3):
        loss_of(model, batch_of(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (hash_of_training(model, optimizer) == good) == (which is None)


def test_bytes_really_move_through_the_tier() -> None:
    model, optimizer, _ = train(0, Run(steps=0, precision="bf16", shard={"offload": OFFLOAD}))
    engine = optimizer._engine
    assert isinstance(engine.store, CpuStore)
    copies = engine.store.copies
    before = copies.bytes_to_tier, copies.bytes_from_tier
    loss_of(model, (torch.ones(2, 10), torch.ones(2, 5))).backward()
    optimizer.step()
    spans = sum(
        bucket.layout.slots[-1].offset + bucket.layout.slots[-1].numel for bucket in engine.buckets
    )
    # bf16 gradients as they are: one rank, no accumulation
    assert copies.bytes_to_tier - before[0] == 2 * spans
    assert copies.bytes_from_tier - before[1] == 2 * spans  # bf16 weights
    for bucket in engine.buckets:
        master = engine.store.read(bucket, "master")
        assert master.untyped_storage().data_ptr() != bucket.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("chunk_numel", [256, 1024])
def test_chunks_do_not_change_the_bits(chunk_numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hash_of_training(*train(0, Run())[:2])
    monkeypatch.setattr("shardcore.offload.cpu_store.CHUNK_NUMEL", chunk_numel)
    model, optimizer, _ = train(0, Run(shard={"offload": OFFLOAD}))
    assert hash_of_training(model, optimizer) == expected


def test_instruction_sets_do_not_change_the_bits() -> None:
    chosen = _native._C.cpu_isa()
    try:
        hashes = set()
        for isa in _native._C.cpu_isas():
            _native._C.set_cpu_isa(isa)
            # The forward pass is torch's own; only the optimizer's and the reduction's code is
            # switched.
            hashes.add(hash_of_training(*train(0, Run(precision="bf16", accumulate=2))[:2]))
        assert len(hashes) == 1
    finally:
        _native._C.set_cpu_isa(chosen)


PLACES = [
    (0, None),
    (2, None),
    (3, None),
    (3, {"params": "cpu"}),
    (3, {"optimizer": "cpu", "params": "cpu"}),
]


def wide_net(seed: int) -> Net:
    """So wide that padding counts little."""
    torch.manual_seed(seed)
    return Net(64, 128)


def _forward(rank: int, world_size: int, stage: int, offload: Any) -> None:
    plain, x = wide_net(0), batch_of(0, 0, rank)[0]
    # rank 0's weights
    model, nothing = shardcore.shard(wide_net(rank), None, stage, offload=offload)
    assert nothing is None
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
    expected = hash_of(plain.state_dict().values())
    assert hash_of(model.state_dict().values()) == expected
    with shardcore.full_params(model):
        assert hash_of(model.parameters()) == hash_of(plain.parameters())
        model.gain.data.fill_(2.0)
    state = shardcore.sharded_state_dict(model)
    model.load_state_dict(wide_net(7).state_dict())
    assert hash_of(model.state_dict().values()) == hash_of(wide_net(7).state_dict().values())
    shardcore.load_sharded_state_dict(model, state)
    assert model.state_dict()["gain"] == 2.0
    model.load_state_dict(plain.state_dict())
    report = shardcore.memory_report(model)
    assert report.by_kind["master"] == report.by_kind["states"] == report.by_kind["gradients"] == 0
    if stage == 3:
        kept = sum(
            line.bytes for line in report.lines if line.kind == "weights" and line.unit != "shared"
        )
        assert kept < 0.6 * sum(p.nbytes for p in plain.parameters())
        assert report.by_tier.get("cpu", 0) >= (kept if offload else 0)
    with shardcore.full_params(model):
        copied = copy.deepcopy(model)
    assert hash_of(copied.state_dict().values()) == expected
    copied(x).sum().backward()  # an ordinary model


@pytest.mark.cases(3)
@pytest.mark.parametrize(("stage", "offload"), PLACES)
def test_a_model_without_an_optimizer(stage: int, offload: Any) -> None:
    run_ranks(2, _forward, stage, offload)


def _gradients(rank: int, world_size: int, stage: int, offload: Any) -> str:
    """They flow through frozen weights to what comes before; one that reaches a parameter is an
    error on every rank.
    """
    plain = make_net().requires_grad_(False)
    model, _ = shardcore.shard(make_net().requires_grad_(False), None, stage, offload=offload)
    for step in range(2):
        inputs = [batch_of(step, 0, rank)[0].requires_grad_() for _ in range(2)]
        model(inputs[0]).square().sum().backward()
        plain(inputs[1]).square().sum().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    model, _ = shardcore.shard(make_net(), None, stage, offload=offload)
    with pytest.raises(RuntimeError) as raised:
        loss_of(model, batch_of(0, 0, rank)).backward()
    dist.barrier()
    with torch.no_grad():
        assert torch.equal(model(inputs[0]), plain(inputs[0]))
    assert all(p.grad is None for p in model.parameters())
    return str(raised.value)


@pytest.mark.parametrize(("stage", "offload"), PLACES[1:4])
def test_gradients_through_and_to_it(stage: int, offload: Any) -> None:
    for text in run_ranks(2, _gradients, stage, offload):
        assert (
            "requires a gradient, but its model was sharded without an optimizer, to run forward "
            "only; expected model.req" in text
        )


def _distilled(rank: int, world_size: int, teacher_stage: int | None) -> str:
    teacher: nn.Module = make_net(3)
    if teacher_stage is not None:
        teacher, _ = shardcore.shard(teacher, None, teacher_stage)
    student = make_net(0)
    student, optimizer = shardcore.shard(
        student, shardcore.FusedAdam(student.parameters(), lr=1e-2), 3
    )
    for step in range(3):
        x = batch_of(step, 0, rank)[0]
        with torch.no_grad():
            target = teacher(x)
        (student(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of_training(student, optimizer)


def test_a_teacher_beside_a_student() -> None:
    assert_one(text for stage in (None, 2, 3) for text in run_ranks(2, _distilled, stage))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_teacher_from_the_meta_device(stage: int) -> None:
    torch.manual_seed(0)
    model, _ = shardcore.shard(meta(), None, stage, materialize=init)
    assert hash_of(model.state_dict().values()) == hash_of(make_net(0).state_dict().values())


def _one_rank_trains(rank: int, world_size: int) -> str:
    model = make_net()
    with pytest.raises(ValueError, match="ranks disagree") as raised:
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()) if rank else None)
    return str(raised.value)


def test_ranks_with_and_without_an_optimizer_are_refused() -> None:
    for text in run_ranks(2, _one_rank_trains):
        assert "the optimizer is FusedAdam on rank 1 but None on rank 0" in text
