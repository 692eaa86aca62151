"""The same bits for every stage, tier and unit size, on real ranks; and twins that must not have them."""

import itertools
from typing import Any

import pytest
import torch

from shardcore import _native
from shardcore.engine.cpu_store import CpuStore
from tests.choice import EVERY, part, some
from tests.engine.models import Run, batch_of, hash_of_training, loss_of, make_net, train
from tests.ranks import run_ranks

OFFLOAD = {"optimizer": "cpu"}


def _hashes(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    return [hash_of_training(*train(rank, run)[:2]) for run in runs]


def _variants(**common: Any) -> list[Run]:
    """Stages 0 to 3, with offload or another unit size or neither; everything else as in `common`."""
    shard = common.pop("shard", {})
    return [
        Run(stage=stage, shard={"offload": offload, "units": units, "clip_grad_norm": 0.5, **shard}, **common)
        for stage in (0, 1, 2, 3)
        for offload, units in ((None, "auto"), (None, 500), (OFFLOAD, 500 if stage == 3 else "auto"))
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


@pytest.mark.parametrize(
    ("world_size", "precision", "order"), some(itertools.product([1, 2, 3, 4], ["fp32", "bf16"], ORDERS), CHOSEN)
)
@pytest.mark.parametrize("every", EVERY)
def test_one_hash_for_every_stage_tier_and_unit_size(
    world_size: int, precision: str, order: tuple[int, Any], every: int
) -> None:
    accumulate, sync_each = order
    runs = _variants(precision=precision, accumulate=accumulate, steps=3, shard={"sync_each": sync_each})
    runs = runs if world_size == 1 else part(runs, every, world_size + (precision == "bf16"))
    hashes = run_ranks(world_size, _hashes, runs)
    assert len({value for of_rank in hashes for value in of_rank}) == 1


def test_the_two_orders_of_accumulation_differ() -> None:
    """If they did not, the test above could not tell which one ran."""
    runs = [Run(accumulate=3, shard={"sync_each": sync_each}) for sync_each in (True, False)]
    each, once = run_ranks(2, _hashes, runs)[0]
    assert each != once


def test_amsgrad_and_groups_are_the_same_everywhere() -> None:
    adam = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "adam_w_mode": False, "maximize": True}
    hashes = run_ranks(2, _hashes, _variants(adam=adam))
    assert len(set(hashes[0] + hashes[1])) == 1


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


def test_the_hash_sees_what_matters() -> None:
    """Broken twins: other clipping, precision, steps, decay, data, and a rank that repeats another's data."""
    hashes = run_ranks(2, _other_runs)[0]
    assert len(set(hashes)) == len(hashes)


class _Losing:
    """A pipeline that once copies zeros for gradients, or copies weights to where they do not belong."""

    def __init__(self, pipeline: Any, which: str) -> None:
        self._pipeline, self._which, self._left = pipeline, which, 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def _lose(self, which: str, tensors: list[Any]) -> list[Any]:
        self._left -= which == self._which
        return [torch.zeros_like(tensor) for tensor in tensors] if which == self._which and self._left == 0 else tensors

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
    spans = sum(bucket.layout.slots[-1].offset + bucket.layout.slots[-1].numel for bucket in engine.buckets)
    assert copies.bytes_to_tier - before[0] == 2 * spans  # bf16 gradients as they are: one rank, no accumulation
    assert copies.bytes_from_tier - before[1] == 2 * spans  # bf16 weights
    for bucket in engine.buckets:
        master = engine.store.read(bucket, "master")
        assert master.untyped_storage().data_ptr() != bucket.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("chunk_numel", [256, 1024, 1 << 20])
def test_chunks_do_not_change_the_bits(chunk_numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hash_of_training(*train(0, Run())[:2])
    monkeypatch.setattr(CpuStore.__init__, "__defaults__", (None, chunk_numel))
    model, optimizer, _ = train(0, Run(shard={"offload": OFFLOAD}))
    assert hash_of_training(model, optimizer) == expected


def test_instruction_sets_do_not_change_the_bits() -> None:
    chosen = _native._C.cpu_isa()
    try:
        hashes = set()
        for isa in _native._C.cpu_isas():
            _native._C.set_cpu_isa(isa)
            # The forward pass is torch's own; only the optimizer's and the reduction's code is switched.
            hashes.add(hash_of_training(*train(0, Run(precision="bf16", accumulate=2))[:2]))
        assert len(hashes) == 1
    finally:
        _native._C.set_cpu_isa(chosen)


def test_a_plain_model_starts_from_the_same_weights() -> None:
    model, _, _ = train(0, Run(steps=0))
    for (name, value), expected in zip(model.state_dict().items(), make_net().state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
