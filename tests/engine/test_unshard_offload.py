"""Weights in host memory (stage 3): when shards come, what edits and steps do to them, and twins
that forget one.
"""

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.engine.bucket import Bucket
from shardcore.offload.split_store import SplitStore
from tests.support.meta import init, meta
from tests.support.models import (
    Run,
    batch_of,
    error_of,
    hash_of_training,
    loss_of,
    make_net,
    stepped,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.tiers import GRADS, PARAMS, Watched, Wrapped, hashes_of, partly_frozen, tier_with


def test_weights_stream_from_host_memory() -> None:
    """On one rank: each unit comes for its forward and for its backward, the last one once; a
    step moves nothing at all.
    """
    run = Run(stage=3, steps=2, precision="bf16", shard={"offload": PARAMS | GRADS})
    model, optimizer, _ = train(0, run, partly_frozen())
    engine = optimizer._engine
    sizes = {
        unit.name: sum(2 * bucket.layout.numel for bucket in unit.buckets)
        for unit in engine.unsharder.units
    }
    in_weights = {"device": 0, "cpu": 0}
    for line in shardcore.memory_report(model).lines:
        if line.kind == "weights":
            in_weights[line.tier] += line.bytes
    assert in_weights == {"device": sizes[""] + 2 * sizes["blocks.0"], "cpu": sum(sizes.values())}
    copies = engine.store.copies
    moved = [copies.bytes_from_tier]
    loss_of(model, batch_of(5, 0, 0)).backward()
    moved += [copies.bytes_from_tier, copies.bytes_to_tier]
    optimizer.step()
    moved += [copies.bytes_from_tier, copies.bytes_to_tier]
    twice = [name for name in sizes if name not in ("", "blocks.3")]
    assert moved[1] - moved[0] == sum(sizes.values()) + sum(sizes[name] for name in twice)
    assert moved[3:] == moved[1:3]


def test_a_shard_is_on_its_way_while_the_unit_before_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    tier_with(monkeypatch, lambda tier: Watched(tier, log), late=True)
    model, _, _ = train(0, Run(stage=3, steps=2, shard={"offload": PARAMS}))
    for index, block in enumerate(model.blocks):
        block.norm.register_forward_hook(lambda *_, index=index: log.append(f"block {index}"))
    log.clear()
    model(batch_of(0, 0, 0)[0])
    starts, waits = "from_tier", "from_tier.wait"
    assert log == [
        starts,
        starts,
        waits,
        starts,
        waits,
        "block 0",
        starts,
        waits,
        "block 1",
        waits,
        "block 2",
    ]


@pytest.mark.parametrize("ratio", [0, 0.5, 1])
def test_a_step_writes_no_weights_that_are_still_on_their_way(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier_with(monkeypatch, late=True)
    model, optimizer, _ = train(
        0, Run(stage=3, steps=1, precision="bf16", shard={"offload": PARAMS | {"ratio": ratio}})
    )
    loss_of(model, batch_of(1, 0, 0)).backward()
    engine = optimizer._engine
    old = [bucket.owned_weight.clone() for bucket in engine.buckets]
    come = [torch.empty_like(weight) for weight in old]
    for here, bucket in zip(come, engine.buckets, strict=True):
        engine.store.copies.from_tier(here, bucket.owned_weight)
    optimizer.step()
    engine.store.copies.synchronize()
    assert all(map(torch.equal, come, old))
    assert not any(
        torch.equal(weight, bucket.owned_weight)
        for weight, bucket in zip(old, engine.buckets, strict=True)
    )


@pytest.mark.parametrize("what", ["swap", "load"])
def test_no_average_and_no_load_writes_weights_that_are_still_on_their_way(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host is ahead of a forward, whose last units come after it has returned."""
    tier_with(monkeypatch, late=True)
    model, optimizer, _ = train(0, Run(stage=3, steps=1, shard={"offload": PARAMS}))
    ema, state = shardcore.EMA(model, 0.5), shardcore.sharded_state_dict(model)
    stepped(model, optimizer, 0, 1)
    engine = optimizer._engine
    old = [bucket.owned_weight.clone() for bucket in engine.buckets]
    come = [torch.empty_like(weight) for weight in old]
    for here, bucket in zip(come, engine.buckets, strict=True):
        engine.store.copies.from_tier(here, bucket.owned_weight)
    with ema.swap() if what == "swap" else nullcontext():
        if what == "load":
            shardcore.load_sharded_state_dict(model, state)
        engine.store.copies.synchronize()
        assert all(map(torch.equal, come, old))
        assert not any(
            torch.equal(weight, bucket.owned_weight)
            for weight, bucket in zip(old, engine.buckets, strict=True)
        )


def test_the_device_s_share_is_in_host_memory_when_a_step_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host reads it there, and on a GPU `wait` is the stream's alone. One bucket, so that
    the scratch is taken once.
    """
    run = Run(3, 2, shard={"offload": PARAMS | {"ratio": 0.6}, "units": 10**9})
    good = hash_of_training(*train(0, run)[:2])
    tier_with(
        monkeypatch, lambda tier: Watched(tier, [], lambda made: made == "to_tier.wait"), late=True
    )
    assert hash_of_training(*train(0, run)[:2]) == good


@pytest.mark.cases(1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_weights_in_host_memory_and_late_copies_give_the_same_bits(world_size: int) -> None:
    expected = run_ranks(world_size, _frozen, None, False)
    assert run_ranks(world_size, _frozen, PARAMS | GRADS | {"ratio": 0.6}, True) == expected


def _frozen(rank: int, world_size: int, offload: Any, late: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if late:
            tier_with(patch, late=True)
        run = Run(stage=3, steps=3, precision="bf16", accumulate=2, shard={"offload": offload})
        return hash_of_training(*train(rank, run, partly_frozen())[:2])


def _no_wait(patch: pytest.MonkeyPatch) -> None:
    """The unit's forward does not wait for its shard."""
    tier_with(
        patch, lambda tier: Watched(tier, [], lambda made: made == "from_tier.wait"), late=True
    )


def _no_edit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bucket, "take_edits", lambda bucket, params=None: None)


def _in_scratch_alone(store: SplitStore, spans: Any, hypers: Any) -> None:
    for span in spans:
        store.on_device.step([span], hypers, store._scratch[span.bucket])


def _not_back(patch: pytest.MonkeyPatch) -> None:
    """The device's share of new weights does not go back to host memory."""
    patch.setattr(SplitStore, "_step_in_scratch", _in_scratch_alone)


@pytest.mark.parametrize("twin", [_no_wait, _no_edit, _not_back])
def test_weights_in_host_memory_that_are_not_kept_up_change_the_hash(
    twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(3, 2, precision="bf16", shard={"offload": PARAMS | {"ratio": 0.6}})
    good = hashes_of(0, 1, [run])
    twin(monkeypatch)
    assert hashes_of(0, 1, [run]) != good


def _fails_to_come(rank: int, world_size: int, which: int) -> str:
    """Of rank 0 a copy of weights fails, and all after it: the first, one ahead, or the last one
    of a pass (0).
    """
    run = Run(3, 1, precision="bf16", shard={"offload": PARAMS})
    log: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        tier_with(patch, lambda tier: Watched(tier, log))
        model, _, _ = train(rank, run)
        copies = log.count("to_tier") + log.count("from_tier")
        log.clear()
        loss_of(model, batch_of(1, 0, rank)).backward()
        last = log.count("from_tier")
    with pytest.MonkeyPatch.context() as patch:
        tier_with(patch, failing_copy=copies + (which or last) if rank == 0 else 0)
        model, _, _ = train(rank, run)
    return error_of(lambda: loss_of(model, batch_of(1, 0, rank)).backward())


@pytest.mark.cases(1)
@pytest.mark.parametrize("which", [1, 3, 0])
def test_weights_that_one_rank_cannot_copy_are_an_error_on_all(which: int) -> None:
    mine, others = run_ranks(2, _fails_to_come, which)
    assert mine.startswith("RuntimeError: HostTier.from_tier: copy ")
    assert "(a planted fault)" in mine
    assert others.startswith(
        "RuntimeError: ranks wait for different things, which can never end: rank 1 for the "
        "weights of "
    )


def _fails_in_shard(rank: int, world_size: int, how: str) -> list[str]:
    """Of rank 0 the first copy of those that shard makes fails, or the last one."""
    said: list[str] = []
    log: list[str] = []
    shard = {"offload": PARAMS, "process_group": dist.new_group(timeout=timedelta(seconds=15))}

    def sharded() -> None:
        model = meta() if how == "meta" else make_net()
        optimizer = shardcore.FusedAdam(model.parameters())
        if how == "with states":
            stepped(model, optimizer, 0, 0)
        shardcore.shard(
            model,
            optimizer,
            3,
            materialize=init if how == "meta" else None,
            precision="bf16",
            **shard,
        )

    with pytest.MonkeyPatch.context() as patch:
        tier_with(patch, lambda tier: Watched(tier, log))
        sharded()
    for number in (1, log.count("to_tier")):
        with pytest.MonkeyPatch.context() as patch:
            tier_with(patch, failing_copy=number if rank == 0 else 0)
            said.append(error_of(sharded))
    return said


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("how", "first", "last"),
    [
        ("plain", "placing the weights of the root", "placing the weights of blocks.2"),
        ("with states", "placing the weights of the root", "taking over the optimizer's states"),
        ("meta", "filling the root (Net)", "filling blocks.2.up (Linear)"),
    ],
)
def test_a_copy_that_fails_in_shard_is_the_error_of_every_rank(
    how: str, first: str, last: str
) -> None:
    own, others = run_ranks(2, _fails_in_shard, how)
    for error, text, doing in zip(own, others, (first, last), strict=True):
        assert error.startswith("RuntimeError: HostTier.to_tier: copy ")
        assert "(a planted fault)" in error
        assert text.startswith(f"RuntimeError: shard: {doing}: rank 0 failed: {error}; ")


class _Full(Wrapped):
    """A tier that has memory for so many buffers only."""

    def __init__(self, tier: Any, room: int) -> None:
        super().__init__(tier)
        self._room, self.taken = room, 0

    def empty(self, *arguments: Any, **options: Any) -> Any:
        self.taken += 1
        if self.taken > self._room:
            raise MemoryError("planted")
        return self._tier.empty(*arguments, **options)


def _without_memory(rank: int, world_size: int) -> list[str]:
    """Of rank 0 the first buffer cannot be had, one of the weights' shards, or the last; a model
    that was left alone trains.
    """
    offload = PARAMS | {"gradients": "cpu", "ratio": 0.5}
    group = dist.new_group(timeout=timedelta(seconds=15))
    expected = hash_of_training(
        *train(rank, Run(3, 1, precision="bf16", shard={"process_group": group}))[:2]
    )
    said, tiers = [], []
    for number, room in enumerate((1 << 30, 0, 12, -1)):
        model = make_net()
        with pytest.MonkeyPatch.context() as patch:
            room = room if room >= 0 else tiers[0].taken - 1
            tier_with(
                patch,
                lambda tier, room=room: (
                    tiers.append(_Full(tier, room if rank == 0 else 1 << 30)) or tiers[-1]
                ),
            )
            run = Run(3, 0, precision="bf16", shard={"offload": offload, "process_group": group})
            said.append(error_of(lambda model=model, run=run: train(rank, run, model)))
        if number in (1, 2):  # nothing was changed
            assert (
                hash_of_training(
                    *train(
                        rank,
                        Run(3, 1, precision="bf16", shard=run.shard | {"offload": None}),
                        model,
                    )[:2]
                )
                == expected
            )
    return said


def test_memory_that_one_rank_cannot_have_is_the_error_of_every_rank() -> None:
    own, others = run_ranks(2, _without_memory)
    assert own[1:] == ["MemoryError: planted"] * 3
    for text, (doing, then) in zip(
        others[1:],
        [("taking memory", "nothing was changed")] * 2 + [("starting the engine", "anew")],
        strict=True,
    ):
        assert text.startswith(
            f"RuntimeError: shard: {doing}: rank 0 failed: MemoryError: planted; "
        )
        assert text.endswith(then)
