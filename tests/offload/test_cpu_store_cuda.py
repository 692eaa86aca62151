"""Offload on a GPU, and on the CPU in its place: bits wherever things lie, the order of copies,
pinned bytes, device memory.
"""

import gc
import mmap
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from tests.support.models import Net, batch_of, hash_of_training, loss_of, make_net
from tests.support.tiers import CPU_TIER, GRADS, PARAMS, SPLITS, fits, tier_with

PLACES = [
    (stage, offload, overlap_step)
    for overlap_step in (False, True)
    for offload in [None, *SPLITS]
    for stage in (0, 1, 2, 3)
    if fits(stage, offload or {})
]

# bytes of activations, and of gradients as autograd makes them: two tensors of a block at most
SLACK = 2**25


def trained(
    device: torch.device, stage: int, offload: Any, streams: int = 0, **options: Any
) -> str:
    """Train with a step that is skipped; from the second step on each has the next of some
    streams as its current one.
    """
    model: Any = make_net().to(device)
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    options = {"precision": "bf16"} | options
    model, optimizer = shardcore.shard(
        model, optimizer, stage, offload=offload, clip_grad_norm=0.5, sync_each=True, **options
    )
    others = [torch.cuda.Stream(device) for _ in range(streams)] if device.type == "cuda" else []
    for step in range(4):
        before, stream = None, others[step % streams] if others and step else None
        if stream is not None:
            before = torch.cuda.current_stream(device)
            stream.wait_stream(before)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for micro in range(options.get("accumulate", 1)):
                x, y = batch_of(step, micro, 0)
                x = torch.full_like(x, torch.inf) if (step, micro) == (2, 0) else x
                loss_of(model, (x.to(device), y.to(device))).backward()
            optimizer.step()
            optimizer.zero_grad()
        if stream is not None and before is not None:
            before.wait_stream(stream)
    assert optimizer.skipped_steps == 1
    return hash_of_training(model, optimizer)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_hash_over_tiers_ratios_stages_and_overlapped_steps(
    device: torch.device, accumulate: int
) -> None:
    # on the CPU other tests have the rest
    some = PLACES if device.type == "cuda" else PLACES[20 * accumulate :: 15]
    expected = trained(device, 0, None, accumulate=accumulate)
    hashes = {
        (stage, str(offload), overlap_step): trained(
            device, stage, offload, overlap_step=overlap_step, accumulate=accumulate
        )
        for stage, offload, overlap_step in some
    }
    assert [place for place, found in hashes.items() if found != expected] == []


def test_steps_on_several_streams(device: torch.device) -> None:
    expected = trained(device, 0, None)
    for stage, offload in ((3, PARAMS | GRADS), (2, GRADS | {"ratio": 0.37})):
        for overlap_step in (True, False):
            assert (
                trained(device, stage, offload, streams=2, overlap_step=overlap_step) == expected
            ), (stage, overlap_step)
            if device.type == "cpu":  # has none
                return


def test_copies_run_after_what_was_queued_and_before_what_waits(device: torch.device) -> None:
    on_gpu, numel = device.type == "cuda", 1 << 18
    tier = _C.HostTier(device, True)
    there, here, back = (
        tier.empty(numel, torch.float32),
        torch.zeros(numel, device=device),
        torch.zeros(numel, device=device),
    )

    def be_late() -> None:
        """Let what is computed next be late, so that a copy which does not wait for it is early."""
        if on_gpu:
            torch.cuda._sleep(2_000_000)

    for value in range(1, 9):
        be_late()
        here.fill_(value)
        left = tier.to_tier(there, here)
        left.wait()
        here.fill_(-1)
        left.synchronize()
        assert bool((there == value).all())
        be_late()
        back.fill_(0)
        tier.from_tier(back, there).wait()
        assert float((back * 2).sum()) == 2.0 * value * numel
    assert (tier.bytes_to_tier, tier.bytes_from_tier) == (32 * numel, 32 * numel)
    assert tier.pin_refusal == ""
    assert there.is_pinned() == on_gpu


@pytest.mark.parametrize(("stage", "offload"), [(2, CPU_TIER), (2, GRADS), (3, PARAMS | GRADS)])
def test_what_travels_is_pinned_and_counted_and_no_more(
    device: torch.device, stage: int, offload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        tier_with(monkeypatch, pinnable_bytes=1 << 40)

    def sharded(limit: int | None = None) -> tuple[Any, Any]:
        model = make_net().to(device)
        place = offload if limit is None else offload | {"pin_memory_limit": limit}
        return shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), stage, offload=place, precision="bf16"
        )

    model, optimizer = sharded()
    copies = optimizer._engine.store.copies
    lines = [line for line in shardcore.memory_report(model).lines if line.tier == "cpu"]
    travelling = [
        line.bytes for line in lines if line.kind in ("gradients", "weights", "communication")
    ]
    buffers = len(travelling) + 5  # places in staging share a line
    assert sum(travelling) <= copies.bytes_pinned < sum(travelling) + buffers * mmap.PAGESIZE
    assert copies.bytes_allocated == sum(line.bytes for line in lines)
    assert (copies.bytes_refused, copies.pin_refusal) == (0, "")
    for bucket in optimizer._engine.buckets:
        if bucket.host_grad is not None and device.type == "cuda":
            assert bucket.host_grad.is_pinned()
    pinned = copies.bytes_pinned
    _, limited = sharded(pinned - 1)
    copies = limited._engine.store.copies
    assert copies.bytes_refused > 0
    assert copies.bytes_pinned <= pinned - 1 < copies.bytes_pinned + copies.bytes_refused
    assert f"pin_memory_limit is {pinned - 1} bytes" in copies.pin_refusal


def _most_on_device(device: torch.device, offload: Any, depth: int) -> tuple[int, int]:
    """Return the most bytes on the device while a model trains, without activations on the CPU;
    and those of a block.
    """
    width = 1024 if device.type == "cuda" else 64
    torch.manual_seed(0)
    model: Any = Net(width, 4 * width, depth)
    block = 2 * sum(param.numel() for param in model.blocks[0].parameters())
    if device.type == "cuda":
        # cuBLAS takes its workspaces, of forward's thread and of backward's: they stay, and are
        # nobody's here.
        x, y = batch_of(0, 0, 0)
        loss_of(
            make_net().to(device, torch.bfloat16), (x.to(device, torch.bfloat16), y.to(device))
        ).backward()
        gc.collect()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-3)
    model, optimizer = shardcore.shard(
        model, optimizer, 3, offload=offload, overlap_step=True, precision="bf16"
    )
    for step in range(3):
        if step == 1 and device.type == "cuda":  # the order of units is known
            torch.cuda.reset_peak_memory_stats()
        x, y = batch_of(step, 0, 0)
        loss_of(model, (x.to(device), y.to(device))).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    kept = shardcore.memory_report(model).by_tier["device"]
    if device.type == "cpu":
        return kept, block
    most = torch.cuda.max_memory_allocated() - before
    assert most <= kept + SLACK, (
        "beside a few activations nothing takes memory that the report leaves out"
    )
    return most, block


def test_layers_stream_through_a_few_units_of_device_memory(device: torch.device) -> None:
    """Two blocks of weights, and gradients that are on their way; a deeper model takes no more."""
    shallow, deep, slack = (8, 16, SLACK) if device.type == "cuda" else (5, 8, 0)
    few, block = _most_on_device(device, PARAMS | GRADS, shallow)
    many, _ = _most_on_device(device, PARAMS | GRADS, deep)
    assert many <= few + slack
    assert many < 7 * block + slack
    whole, _ = _most_on_device(device, CPU_TIER, deep)  # the twin, whose weights do not stream
    assert whole > deep * block + slack
