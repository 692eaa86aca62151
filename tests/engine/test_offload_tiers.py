"""What may lie on which tier: a share of the states; the same bits wherever it lies, and twins that must not have them."""

import itertools
from typing import Any

import pytest
import torch

import shardcore
from shardcore.engine.cpu_store import CpuStore
from shardcore.engine.state_store import DeviceStore, Span
from shardcore.estimate import predict
from tests.choice import some
from tests.engine.models import Net, Run, batch_of, hash_of, hash_of_training, loss_of, train
from tests.engine.test_backward import Reused
from tests.engine.test_offload import Watched, Wrapped, small_chunks, tier_with
from tests.ranks import run_ranks

CPU_TIER = {"optimizer": "cpu"}
GRADS = CPU_TIER | {"gradients": "cpu"}
PARAMS = CPU_TIER | {"params": "cpu"}
OFFLOADS: list[dict[str, Any]] = [
    *(CPU_TIER | {"ratio": ratio} for ratio in (0, 0.37, 0.8)),
    GRADS,
    *(GRADS | {"ratio": ratio} for ratio in (0.37, 0.8)),
    PARAMS,
    *(PARAMS | GRADS | {"ratio": ratio} for ratio in (0, 0.37, 1)),
]


def fits(stage: int, offload: dict[str, Any]) -> bool:
    """Whether `shard` takes it."""
    return ("params" not in offload or stage == 3) and ("gradients" not in offload or stage > 0)


def partly_frozen() -> Any:
    torch.manual_seed(0)
    model = Net(depth=4)
    model.blocks[1].requires_grad_(False)
    return model


def _step(model: Any, optimizer: Any, step: int) -> None:
    loss_of(model, batch_of(step, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def backward(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.scale_loss(loss_of(model, batch)).backward()


def hashes_of(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    """Of each training: weights and states after a step that was skipped, a clipping, edited weights and loaded states."""
    found = []
    for run in runs:
        model, optimizer, _ = train(rank, run)
        backward(model, optimizer, (torch.full((4, 10), torch.inf), torch.zeros(4, 5)))
        optimizer.step()
        assert optimizer.skipped_steps == 1
        optimizer.zero_grad()
        backward(model, optimizer, batch_of(8, 0, rank))
        shardcore.clip_grad_norm_(model, 0.1)
        optimizer.step()
        with shardcore.full_params(model), torch.no_grad():
            model.blocks[1].up.weight[3:20].mul_(1.5)
            model.gain.add_(0.25)
        backward(model, optimizer, batch_of(9, 0, rank))  # added to the gradients that the last step used
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with shardcore.no_sync(model):  # float32 sums, where the last gradients may have been bfloat16 as they were
            backward(model, optimizer, batch_of(10, 0, rank))
        backward(model, optimizer, batch_of(10, 1, rank))
        grad = shardcore.full_grad(model.blocks[0].down.weight)
        assert grad is not None
        optimizer.step()
        found.append(hash_of_training(model, optimizer) + hash_of([grad]))
    return found


ORDERS = [(1, "fp32", 1, None), (2, "bf16", 2, True)]
MORE_ORDERS = [(1, "bf16", 2, True), (1, "bf16", 1, None), (2, "fp32", 2, False), (2, "bf16", 1, None), (3, "fp16", 2, True)]


@pytest.mark.parametrize(("world_size", "precision", "accumulate", "sync_each"), some(ORDERS + MORE_ORDERS, ORDERS))
def test_one_hash_wherever_things_lie(world_size: int, precision: str, accumulate: int, sync_each: bool | None) -> None:
    common: dict[str, Any] = {"clip_grad_norm": 0.5, "sync_each": sync_each}
    if precision == "fp16":
        common["loss_scale"] = 1024.0
    places = [(0, None), *((stage, offload) for stage in (0, 1, 2, 3) for offload in OFFLOADS if fits(stage, offload))]
    runs = [
        Run(stage, 2, accumulate, precision, shard=common | {"offload": offload, "units": (500, "auto")[stage % 2]} | lazy)
        for (stage, offload), lazy in zip(places, itertools.cycle([{}, {"overlap_step": True}]), strict=False)
    ]
    hashes = run_ranks(world_size, hashes_of, runs)
    assert [place for place, value in zip(places, hashes[0], strict=True) if value != hashes[0][0]] == []
    assert all(of_rank == hashes[0] for of_rank in hashes)


RATIOS = (0, 0.37, 1)
TIERS: list[dict[str, Any]] = [CPU_TIER, GRADS, PARAMS, PARAMS | GRADS]


def _grid() -> list[tuple[int, Any, Any, bool]]:
    offloads = [None, *(tiers | {"ratio": ratio} for tiers in TIERS for ratio in RATIOS)]
    return [
        (stage, offload, units, overlap_step)
        for stage in (0, 1, 2, 3)
        for offload in offloads
        for units in ("auto", 500)
        for overlap_step in (False, True)
        if fits(stage, offload or {})
    ]


def _after_20_steps(rank: int, world_size: int, places: list[Any], accumulate: int, sync_each: bool | None) -> list[str]:
    found = []
    for stage, offload, units, overlap_step in places:
        shard = {
            "clip_grad_norm": 0.5,
            "sync_each": sync_each,
            "offload": offload,
            "units": units,
            "overlap_step": overlap_step,
        }
        # Sums of a few bfloat16 gradients are exact in float32, so only float32 ones show in which order they were added.
        run = Run(stage, 0, accumulate, "bf16" if accumulate == 1 else "fp32", shard=shard)
        model, optimizer, _ = train(rank, run)
        for step in range(20):
            for micro in range(accumulate):
                x, y = batch_of(step, micro, rank)
                loss_of(model, (torch.full_like(x, torch.inf) if (step, micro) == (7, 0) else x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.skipped_steps == 1
        found.append(hash_of_training(model, optimizer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("accumulate", "sync_each"), [(1, None), (4, True), (4, False)])
def test_the_whole_grid_has_one_hash(world_size: int, accumulate: int, sync_each: bool | None) -> None:
    places = _grid()
    hashes: list[list[str]] = [[], []]
    for start in range(0, len(places), 6):  # a call has two minutes
        for rank, more in enumerate(run_ranks(world_size, _after_20_steps, places[start : start + 6], accumulate, sync_each)):
            hashes[rank] += more
    assert [place for place, value in zip(places, hashes[0], strict=True) if value != hashes[0][0]] == []
    assert hashes[world_size - 1] == hashes[0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_was_checked_is_what_is_taken_and_no_step_takes_more(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[int] = []
    monkeypatch.setattr("shardcore.api.short_of_memory", lambda comm, needs: needed.append(needs))
    for offload in (tiers | {"ratio": ratio} for tiers in TIERS for ratio in RATIOS):
        shard = {"offload": offload, "grad_dtype": "bf16"}
        model, optimizer, _ = train(0, Run(3, 0, accumulate, "bf16", shard=shard), partly_frozen())
        copies = optimizer._engine.store.copies
        for step in range(2):
            assert copies.bytes_allocated == needed[-1] == shardcore.memory_report(model).by_tier.get("cpu", 0), offload
            for micro in range(accumulate):
                loss_of(model, batch_of(step, micro, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        predicted = predict(partly_frozen(), None, 3, world_size=1, precision="bf16", accumulate=accumulate, **shard)
        assert predicted.resting.by_tier.get("cpu", 0) == needed[-1], offload


# --- a share of the states --------------------------------------------------------------------------------------------


def test_ratio_is_the_share_on_the_cpu_and_only_that_travels() -> None:
    for ratio, offload in ((0.0, CPU_TIER | {"ratio": 0}), (0.25, CPU_TIER | {"ratio": 0.25}), (1.0, CPU_TIER)):
        model, optimizer, _ = train(0, Run(steps=0, precision="bf16", shard={"offload": offload, "units": 10**9}))
        (bucket,) = optimizer._engine.buckets
        report = shardcore.memory_report(model)
        cut = round(ratio * bucket.owned_numel / 256) * 256
        in_states = {tier: 0 for tier in ("device", "cpu")}
        for line in report.lines:
            if line.kind in ("master", "states"):
                in_states[line.tier] += line.bytes
        assert in_states == {"device": 12 * (bucket.owned_numel - cut), "cpu": 12 * cut}
        copies = optimizer._engine.store.copies
        assert copies.bytes_allocated == report.by_tier.get("cpu", 0)
        before = copies.bytes_to_tier, copies.bytes_from_tier
        _step(model, optimizer, 0)
        used = bucket.layout.slots[-1].offset + bucket.layout.slots[-1].numel
        here = max(0, used - (bucket.owned_numel - cut))  # padding at the end stays
        assert (copies.bytes_to_tier - before[0], copies.bytes_from_tier - before[1]) == (2 * here, 2 * here)


def test_the_device_works_while_the_first_chunks_come(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    small_chunks(monkeypatch)
    tier_with(monkeypatch, lambda tier: Watched(tier, log))
    step = DeviceStore.step
    monkeypatch.setattr(DeviceStore, "step", lambda *arguments: (log.append("device"), step(*arguments)))
    model, optimizer, _ = train(0, Run(steps=0, precision="bf16", shard={"offload": CPU_TIER | {"ratio": 0.5}, "units": 10**9}))
    log.clear()
    _step(model, optimizer, 0)
    assert log[:4] == ["to_tier", "to_tier", "device", "to_tier.synchronize"]


def test_a_step_like_the_last_one_cuts_and_views_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = train(0, Run(steps=2, shard={"offload": CPU_TIER | {"ratio": 0.5}}))
    store = optimizer._engine.store
    kept = [*store.on_device._lists.values(), *store.on_cpu._parts.values()]
    monkeypatch.setattr(Span, "part", None)
    _step(model, optimizer, 2)
    assert all(a is b for a, b in zip([*store.on_device._lists.values(), *store.on_cpu._parts.values()], kept, strict=True))


def _idle_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceStore, "step", lambda store, spans, hypers: None)


def _idle_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuStore, "steps", lambda store, parts, hypers, beside: map(beside, range(len(parts))))


def _cut_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """The CPU's part of gradients begins a block later than its states do."""
    patch.setattr("shardcore.engine.cpu_store._grad_of", lambda bucket: (bucket.grad.roll(-256), 0))


@pytest.mark.parametrize("twin", [_idle_device, _idle_cpu, _cut_elsewhere])
def test_a_split_that_forgets_a_part_changes_the_hash(twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(steps=2, shard={"offload": CPU_TIER | {"ratio": 0.37}})
    good = hash_of_training(*train(0, run)[:2])
    twin(monkeypatch)
    assert hash_of_training(*train(0, run)[:2]) != good


# --- gradients --------------------------------------------------------------------------------------------------------


def _moved(rank: int, world_size: int, offload: dict[str, Any], accumulate: int) -> list[tuple[int, int, int]]:
    """Bytes to the tier in each backward and in the step, beside the elements that leave; and on the device after backward."""
    shard = {"offload": offload, "sync_each": True, "grad_dtype": "bf16", "units": 10**9}
    model, optimizer, _ = train(rank, Run(stage=2, steps=1, precision="bf16", accumulate=accumulate, shard=shard))
    (bucket,) = optimizer._engine.buckets
    copies = optimizer._engine.store.copies
    cut = bucket.owned_numel - bucket.host_grad.numel()
    assert cut == bucket.owned_numel - round(offload.get("ratio", 1) * bucket.owned_numel / 256) * 256
    found = []
    for micro in range(accumulate + 1):
        before = copies.bytes_to_tier
        if micro < accumulate:
            loss_of(model, batch_of(3, micro, rank)).backward()
        else:
            optimizer.step()
        held = sum(
            line.bytes for line in shardcore.memory_report(model).lines if line.kind == "gradients" and line.tier == "device"
        )
        found.append((copies.bytes_to_tier - before, bucket.owned_numel - cut, held - 2 * cut))
    return found


@pytest.mark.parametrize("offload", [GRADS, GRADS | {"ratio": 0.37}])
def test_gradients_leave_in_backward_and_their_memory_is_given_back(offload: dict[str, Any]) -> None:
    """What is added travels in float32, whatever grad_dtype is; nothing travels in the step, since masters are there."""
    for world_size, accumulate in ((1, 1), (2, 2)):
        for backward, *others, step in run_ranks(world_size, _moved, offload, accumulate):
            leaves = backward[1]
            assert leaves > 0
            assert backward == (2 * leaves, leaves, 0)
            assert others == [(4 * leaves, leaves, 0)] * (accumulate - 1)
            assert step == (0, leaves, 0)


def test_the_latest_copies_of_gradients_that_the_waits_allow_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for accumulate, precision in ((1, "fp32"), (2, "bf16")):
        run = Run(steps=3, accumulate=accumulate, precision=precision, shard={"grad_dtype": "bf16"})
        expected = hash_of_training(*train(0, run)[:2])
        run.shard["offload"] = GRADS | {"ratio": 0.6}
        with monkeypatch.context() as patch:
            tier_with(patch, late=True)
            assert hash_of_training(*train(0, run)[:2]) == expected


@pytest.mark.parametrize("call", ["to_tier.wait", "to_tier.synchronize"])
def test_a_wait_for_a_gradient_that_is_left_out_changes_the_hash(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(steps=3, accumulate=2, precision="bf16")
    expected = hash_of_training(*train(0, run)[:2])
    run.shard["offload"] = GRADS
    tier_with(monkeypatch, lambda tier: Watched(tier, [], lambda made: made == call), late=True)
    assert hash_of_training(*train(0, run)[:2]) != expected


def test_a_gradient_leaves_while_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    tier_with(monkeypatch, lambda tier: Watched(tier, log))
    model, _, _ = train(0, Run(steps=2, shard={"offload": GRADS}))
    for index, block in enumerate(model.blocks):
        block.norm.weight.register_hook(lambda _, index=index: log.append(f"block {index}"))  # the unit's last gradient but one
    log.clear()
    loss_of(model, batch_of(0, 0, 0)).backward()
    waited = "to_tier.wait"
    assert log == ["block 2", "to_tier", "block 1", "to_tier", "block 0", waited, "to_tier", waited, "to_tier", waited, waited]


class _Rounding:
    """A tier to which float32 comes as bfloat16 would have."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier

    def to_tier(self, dst: torch.Tensor, src: torch.Tensor) -> Any:
        return self._tier.to_tier(dst, src.bfloat16().to(src.dtype))


@pytest.mark.parametrize("rounds", [False, True])
def test_a_product_that_is_rounded_before_it_is_added_changes_the_hash(rounds: bool) -> None:
    run = Run(steps=2, accumulate=2, shard={"grad_dtype": "bf16"})
    expected = hash_of_training(*train(0, run)[:2])
    run = Run(steps=0, accumulate=2, shard={"grad_dtype": "bf16", "offload": GRADS})
    model, optimizer, _ = train(0, run)
    host = optimizer._engine.reducer.host_grads
    host._copies = _Rounding(host._copies) if rounds else host._copies
    for step in range(2):
        for micro in range(2):
            (loss_of(model, batch_of(step, micro, 0)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (hash_of_training(model, optimizer) == expected) != rounds


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_that_does_not_leave_changes_the_hash(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(steps=2, accumulate=2, shard={"offload": GRADS})
    good = hash_of_training(*train(0, run)[:2])
    left = [4 + which]

    def forgetful(tier: Any) -> Any:
        class Forgetful(Wrapped):
            def to_tier(self, dst: torch.Tensor, src: torch.Tensor) -> Any:
                left[0] -= dst.numel() > 0
                return tier.to_tier(dst, src) if left[0] else tier.to_tier(dst[:-256], src[:-256])

        return Forgetful(tier)

    tier_with(monkeypatch, forgetful)
    assert hash_of_training(*train(0, run)[:2]) != good


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_come_in_parts_and_backwards_that_fail(world_size: int) -> None:
    common = {"offload": GRADS | {"ratio": 0.6}}
    for precision, options in (("fp32", {"grad_dtype": "bf16"}), ("bf16", {"accumulate": 2})):
        places = [{}, common]
        hashes = {run_ranks(world_size, _in_parts, 2 + world_size % 2, precision, options | place)[0] for place in places}
        assert len(hashes) == 1


def _fail(grad: torch.Tensor) -> None:
    raise RuntimeError("planted")


def _in_parts(rank: int, world_size: int, stage: int, precision: str, options: dict[str, Any]) -> str:
    torch.manual_seed(0)
    accumulate = options.pop("accumulate", 1)
    run = Run(stage=stage, precision=precision, shard={"sync_each": False, **options}, accumulate=accumulate)
    model, optimizer, _ = train(rank, run, Reused())
    if world_size == 1:
        handle = model.blocks[1].down.weight.register_hook(_fail)  # the unit behind is on its way
        with pytest.raises(RuntimeError, match="planted"):
            loss_of(model, batch_of(5, 0, 0)).backward()
        handle.remove()
        optimizer.zero_grad()
        _step(model, optimizer, 6)
    return hash_of_training(model, optimizer)
