"""The engine that initialize returns: micro-steps and boundaries, schedulers, skips, norms, and
shard's own bits.
"""

import contextlib
import io
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore.deepspeed.lr_schedules import WarmupDecayLR
from tests.support.deepspeed import ADAM, ds_config, start, train
from tests.support.models import Net, batch_of, hash_of, hash_of_training, loss_of, make_net
from tests.support.ranks import run_ranks


def _by_shard(
    rank: int,
    steps: int,
    accumulation: int,
    stage: int,
    adam: dict[str, Any] = ADAM,
    **options: Any,
) -> str:
    model = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), **adam)
    model, optimizer = shardcore.shard(model, optimizer, stage, accumulate=accumulation, **options)
    for step in range(steps):
        for micro in range(accumulation):
            optimizer.scale_loss(
                loss_of(model, batch_of(step, micro, rank)) / accumulation
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of_training(model, optimizer)


# --- the same as shard, and as torch --------------------------------------------------------------


def _both(rank: int, world_size: int) -> list[tuple[str, str]]:
    hashes = []
    for stage, device, bf16 in (
        (0, None, False),
        (1, "cpu", True),
        (1, "none", False),
        (2, None, True),
        (2, "cpu", False),
    ):
        zero = {"stage": stage} | (
            {} if device is None else {"offload_optimizer": {"device": device}}
        )
        engine = start(
            ds_config(2, zero_optimization=zero, bf16={"enabled": bf16}, gradient_clipping=0.3)
        )
        assert engine._core.store.tier == ("cpu" if device == "cpu" else "device")
        train(engine, rank, 2)
        shard = {"precision": "bf16" if bf16 else "fp32", "clip_grad_norm": 0.3}
        expected = _by_shard(
            rank, 2, 2, stage, offload={"optimizer": "cpu"} if device == "cpu" else None, **shard
        )
        hashes.append((hash_of_training(engine, engine.optimizer), expected))
    return hashes


@pytest.mark.cases(1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_bits_as_shard(world_size: int) -> None:
    assert all(
        got == expected for hashes in run_ranks(world_size, _both) for got, expected in hashes
    )


FP16 = {
    "enabled": True,
    "auto_cast": True,
    "initial_scale_power": 19,
    "loss_scale_window": 1,
    "hysteresis": 1,
}


def _fp16_both(rank: int, world_size: int) -> list[Any]:
    hashes = []
    for stage, loss_scale in ((0, 0), (1, 512), (3, 0)):
        engine = start(ds_config(2, stage, fp16=FP16 | {"loss_scale": loss_scale}))
        train(engine, rank, 6)
        scale = loss_scale or shardcore.LossScale(initial_power=19, window=1, hysteresis=1)
        expected = _by_shard(rank, 6, 2, stage, precision="fp16", loss_scale=scale)
        skipped = (
            engine.skipped_steps,
            engine.optimizer.skipped_steps,
            engine.optimizer.loss_scale,
        )
        hashes.append((hash_of_training(engine, engine.optimizer) == expected, *skipped))
    return hashes


@pytest.mark.more
def test_fp16_is_shards_fp16() -> None:
    for hashes_of_rank in run_ranks(2, _fp16_both):
        assert all(same for same, _, _, _ in hashes_of_rank)
        assert hashes_of_rank[1][1:] == (0, 0, 512.0)
        assert hashes_of_rank[0] == hashes_of_rank[2]
        assert 0 < hashes_of_rank[0][1] == hashes_of_rank[0][2] < 6


def test_fp16_casts_inputs_only_when_asked() -> None:
    engine = start(ds_config(fp16={"enabled": True}))
    with pytest.raises(RuntimeError, match="dtype"):
        engine(batch_of(0, 0, 0)[0])
    loss = ((engine(batch_of(0, 0, 0)[0].half()).float()) ** 2).mean()
    assert engine.backward(loss).item() == loss.item(), "the returned loss is not scaled"
    engine.step()
    assert engine.optimizer.loss_scale == 2.0**16


@pytest.mark.parametrize("accumulation", [1, 4])
def test_losses_divide_as_in_plain_torch(accumulation: int) -> None:
    engine = start(
        ds_config(accumulation, optimizer={"type": "AdamW", "params": ADAM | {"eps": 1e-3}})
    )
    plain = make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM, eps=1e-3)
    for step in range(5):
        for micro in range(accumulation):
            batch = batch_of(step, micro, 0)
            loss = loss_of(plain, batch) / accumulation
            loss.backward()
            returned = engine.backward(loss_of(engine, batch))
            engine.step()
            assert returned.item() == pytest.approx(loss.item(), rel=1e-5)
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        # 4 times as much if not divided
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.allclose(engine.state_dict()[name], value, rtol=1e-5, atol=1e-6), name


def test_scale_wrt_gas_false_leaves_the_loss_alone() -> None:
    norms = []
    for scale in (True, False):
        engine = start(ds_config(2))
        for micro in range(2):
            engine.backward(loss_of(engine, batch_of(0, micro, 0)), scale_wrt_gas=scale)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-6)


# --- micro-steps, boundaries, schedulers, skips ---------------------------------------------------


def _weights(engine: Any) -> str:
    with shardcore.full_params(engine.module):
        return hash_of(engine.module.parameters())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_only_boundaries_step(stage: int) -> None:
    engine = start(
        ds_config(3, stage),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    before, seen = _weights(engine), []
    for micro_step in range(7):
        boundary = engine.is_gradient_accumulation_boundary()
        engine.backward(loss_of(engine, batch_of(0, micro_step, 0)))
        engine.step()
        after = _weights(engine)
        seen.append((boundary, after != before, engine.global_steps, engine.get_lr()[0]))
        has_grad = (
            shardcore.full_grad(engine.module.head.weight) is not None
            if micro_step % 3 != 0 or stage
            else not boundary
        )
        assert has_grad != boundary, "gradients stay between boundaries and are zeroed after"
        before = after
    lrs = [1e-2, 1e-2, 5e-3, 5e-3, 5e-3, 2.5e-3, 2.5e-3]
    assert seen == [(i in (2, 5), i in (2, 5), (i + 1) // 3, lr) for i, lr in enumerate(lrs)]
    assert (engine.micro_steps, engine.skipped_steps) == (7, 0)


def _overflow(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    engine = start(
        ds_config(2, stage),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    train(engine, rank, 1)
    before, lr = hash_of_training(engine, engine.optimizer), engine.get_lr()
    for micro in range(2):
        x, y = batch_of(1, micro, rank)
        if (rank, micro) == (1, 0):
            x[0, 0] = float("inf")
        engine.backward(loss_of(engine, (x, y)))
        engine.step()
    kept = hash_of_training(engine, engine.optimizer) == before and engine.get_lr() == lr
    counts = (engine.global_steps, engine.micro_steps, engine.skipped_steps)
    norm = engine.get_global_grad_norm()
    train(engine, rank, 1)
    moved = hash_of_training(engine, engine.optimizer) != before
    return {
        "kept": kept,
        "counts": counts,
        "finite": norm == norm and norm != float("inf"),
        "moved": moved,
        "lr": engine.get_lr(),
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_on_one_rank_skips_the_step_and_the_scheduler_on_all(stage: int) -> None:
    for result in run_ranks(2, _overflow, stage):
        assert result == {
            "kept": True,
            "counts": (2, 4, 1),
            "finite": False,
            "moved": True,
            "lr": [2.5e-3],
        }


def test_lr_kwargs_reach_the_scheduler() -> None:
    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    engine = start(ds_config(), lr_scheduler=plateau)
    for value in (1.0, 2.0):
        engine.backward(loss_of(engine, batch_of(0, 0, 0)))
        engine.step(lr_kwargs={"metrics": value})
    assert engine.get_lr() == pytest.approx([1e-3])


def _with_no_sync(rank: int, world_size: int) -> tuple[str, str]:
    engine = start(ds_config())
    with engine.no_sync():
        engine.backward(loss_of(engine, batch_of(0, 0, rank)))
    engine.backward(loss_of(engine, batch_of(0, 1, rank)))
    engine.step()
    model = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), **ADAM)
    model, optimizer = shardcore.shard(model, optimizer, 2, precision="fp32")
    with shardcore.no_sync(model):
        loss_of(model, batch_of(0, 0, rank)).backward()
    loss_of(model, batch_of(0, 1, rank)).backward()
    optimizer.step()
    return hash_of_training(engine, engine.optimizer), hash_of_training(model, optimizer)


def test_no_sync_is_shards() -> None:
    for got, expected in run_ranks(2, _with_no_sync):
        assert got == expected


def _coalesced(rank: int, world_size: int, coalesced: bool) -> str:
    engine = start(ds_config(stage=3))
    with engine.coalesce_grad_reduction() if coalesced else engine.no_sync():
        for micro in range(2):
            engine.backward(loss_of(engine, batch_of(0, micro, rank)))
    assert engine._core.reducer._local_sums != coalesced
    engine.step()
    return hash_of_training(engine, engine.optimizer)


def test_coalesced_gradients_are_reduced_at_the_end_of_the_block() -> None:
    assert run_ranks(2, _coalesced, True) == run_ranks(2, _coalesced, False)


def _no_sync_at_the_boundary(rank: int, world_size: int) -> str:
    engine = start(ds_config(2, stage=1))
    for micro in range(2):
        with engine.no_sync():
            engine.backward(loss_of(engine, batch_of(0, micro, rank)))
        engine.step()
    return hash_of_training(engine, engine.optimizer)


def _accumulated_locally(rank: int, world_size: int) -> str:
    return _by_shard(rank, 1, 2, 1, precision="fp32")


def test_a_boundary_after_no_sync_reduces_what_is_there() -> None:
    assert run_ranks(2, _no_sync_at_the_boundary) == run_ranks(2, _accumulated_locally)


def test_misuse() -> None:
    engine = start(ds_config(2))
    with pytest.raises(ValueError, match=r"step: there was no backward since the last step"):
        engine.step()
    with pytest.raises(ValueError, match=r"loss has shape \(4, 5\); expected one element"):
        engine.backward(engine(batch_of(0, 0, 0)[0]))
    with pytest.raises(ValueError, match=r"scale: loss has shape \(4, 5\); expected one element"):
        engine.scale(engine(batch_of(0, 0, 0)[0]))
    with pytest.raises(TypeError, match="loss has type float"):
        engine.backward(1.0)
    with torch.no_grad(), pytest.raises(ValueError, match="loss does not require a gradient"):
        engine.backward(loss_of(engine, batch_of(0, 0, 0)))
    assert (engine.micro_steps, engine.global_steps) == (0, 0)
    for unset in (None, ""):
        with pytest.raises(ValueError, match=r"save_checkpoint: save_dir is .*; expected the path"):
            engine.save_checkpoint(unset)
    engine.backward(loss_of(engine, batch_of(0, 0, 0)))
    engine.step()
    with pytest.raises(ValueError, match=r"step: there was no backward since the last step"):
        engine.step()
    with engine.no_sync():
        engine.backward(loss_of(engine, batch_of(0, 1, 0)))
        with pytest.raises(ValueError, match=r"step: called inside no_sync\(\)"):
            engine.step()
        with pytest.raises(ValueError, match=r"entered inside no_sync\(\)"), engine.no_sync():
            pass
    engine.step()
    assert (engine.micro_steps, engine.global_steps) == (2, 1)


# --- checkpoints ----------------------------------------------------------------------------------


def _start(seed: int = 0, stage: int = 2, **config: Any) -> Any:
    torch.manual_seed(seed)
    schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    settings = ds_config(2, stage, bf16={"enabled": True}) | config
    return shardcore.initialize(model=Net(), config=settings, lr_scheduler=schedule)[0]


def _checkpointed(rank: int, world_size: int, folder: str) -> None:
    engine = _start()
    assert engine.load_checkpoint(folder) == (None, {})
    train(engine, rank, 2)
    assert engine.save_checkpoint(folder, client_state={"epoch": 3}) is True
    train(engine, rank, 2)
    expected = hash_of_training(engine, engine.optimizer), engine.get_lr()
    for stage in (2, 3):
        resumed = _start(5, stage)
        path, client_state = resumed.load_checkpoint(folder)
        assert path == os.path.join(folder, "global_step2"), "the name that transformers looks for"
        assert client_state == {"epoch": 3}
        assert (resumed.global_steps, resumed.micro_steps) == (2, 4)
        train(resumed, rank, 2)
        assert (hash_of_training(resumed, resumed.optimizer), resumed.get_lr()) == expected
        assert resumed.global_steps == 4


@pytest.mark.more
def test_a_checkpoint_has_model_optimizer_scheduler_and_counters(tmp_path: Path) -> None:
    run_ranks(2, _checkpointed, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "global_step2"


def _parts(rank: int, world_size: int, folder: str) -> None:
    engine = _start()
    train(engine, rank, 2)
    engine.save_checkpoint(folder, "mine", save_latest=False)
    weights, states = engine.module.state_dict(), engine.optimizer.state_dict()["state"]
    assert not os.path.exists(os.path.join(folder, "latest"))
    for options, has_states, has_counters in (
        ({"load_module_only": True}, False, False),
        ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, False, True),
        ({"load_lr_scheduler_states": False}, True, True),
    ):
        other = _start(5)
        lr = other.get_lr()
        other.load_checkpoint(folder, "mine", **options)
        assert all(
            torch.equal(value, weights[name]) for name, value in other.module.state_dict().items()
        )
        found = other.optimizer.state_dict()["state"]
        equal = len(found) == len(states) and all(
            torch.equal(found[i]["exp_avg"], states[i]["exp_avg"]) for i in states
        )
        assert equal == has_states
        assert other.global_steps == (2 if has_counters else 0)
        assert other.lr_scheduler.last_epoch == 0
        assert has_states or other.get_lr() == lr


def test_parts_of_a_checkpoint_are_loaded(tmp_path: Path) -> None:
    run_ranks(2, _parts, str(tmp_path))


def _counts_skips(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    engine = start(ds_config(2, fp16=FP16))
    train(engine, rank, 4)
    engine.save_checkpoint(folder)
    resumed = start(ds_config(2, fp16=FP16))
    resumed.load_checkpoint(folder)
    assert resumed.optimizer.loss_scale == engine.optimizer.loss_scale < 2**19
    return engine.skipped_steps, resumed.skipped_steps


def test_skipped_steps_go_on(tmp_path: Path) -> None:
    for saved, loaded in run_ranks(2, _counts_skips, str(tmp_path)):
        assert saved == loaded > 0


def test_steps_begin_with_their_first_micro_step(tmp_path: Path) -> None:
    engine = start(ds_config(2))
    engine.backward(loss_of(engine, batch_of(0, 0, 0)))
    engine.step()
    engine.save_checkpoint(tmp_path)
    engine.zero_grad()
    resumed = start(ds_config(2))
    resumed.backward(loss_of(resumed, batch_of(5, 0, 0)))  # of a step that is given up
    resumed.step()
    resumed.load_checkpoint(tmp_path)
    # the gradient of the first one is not saved
    assert (engine.micro_steps, resumed.micro_steps) == (1, 0)
    train(resumed, 0, 1)
    assert resumed.global_steps == 1
    other = start(ds_config(2))
    other.load_checkpoint(tmp_path)
    train(other, 0, 1)
    assert hash_of_training(resumed, resumed.optimizer) == hash_of_training(other, other.optimizer)
    engine.save_checkpoint(tmp_path, wait=False)
    engine.wait_for_checkpoint()


def test_the_epoch_of_the_loader_goes_on(tmp_path: Path) -> None:
    data = [(torch.full((10,), float(number)), torch.zeros(5)) for number in range(32)]

    def epoch_of(engine: Any) -> list[float]:
        return [value for x, _ in engine.training_dataloader for value in x[:, 0].tolist()]

    engine = start(ds_config(), training_data=data)
    epochs = [epoch_of(engine), epoch_of(engine)]
    engine.save_checkpoint(tmp_path)
    epochs.append(epoch_of(engine))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    resumed = start(ds_config(), training_data=data)
    resumed.load_checkpoint(tmp_path, load_module_only=True)
    assert epoch_of(resumed) == epochs[0]
    resumed.load_checkpoint(tmp_path)
    assert epoch_of(resumed) == epochs[2]
    start(ds_config()).save_checkpoint(tmp_path)  # without a loader
    resumed.load_checkpoint(tmp_path)
    assert resumed.training_dataloader.epoch == 3


def _saves_16bit(rank: int, world_size: int, folder: str, stage: int) -> None:
    engine = _start(stage=stage)
    train(engine, rank, 1)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, True)
    for name in ("pytorch_model.bin", "model.safetensors"):
        assert engine.save_16bit_model(folder, name) is True
    full = engine.module.state_dict()
    if rank == 0:
        state_dict = torch.load(os.path.join(folder, "pytorch_model.bin"), weights_only=True)
        assert set(state_dict) == set(full)
        for name, value in state_dict.items():
            assert value.dtype == (torch.float32 if name == "offset" else torch.bfloat16)
            assert torch.equal(value, full[name].to(value.dtype)), name
        assert sorted(os.listdir(folder)) == ["model.safetensors", "pytorch_model.bin"]


@pytest.mark.parametrize("stage", [1, 3])
def test_16_bit_weights_are_saved(tmp_path: Path, stage: int) -> None:
    run_ranks(2, _saves_16bit, str(tmp_path), stage)


# --- backward by other ways -----------------------------------------------------------------------


def _plainly(rank: int, world_size: int) -> list[tuple[str, str]]:
    """(hash, that of engine.backward) with plain backward, with a gradient, with scale, and one
    loss over two engines.
    """
    hashes = []
    for stage, more in ((0, {}), (2, {}), (3, {}), (2, {"fp16": FP16})):
        engine, other = start(ds_config(2, stage, **more)), start(ds_config(2, stage, **more))
        train(engine, rank, 2)
        for micro in range(4):
            x, y = batch_of(micro // 2, micro % 2, rank)
            out = other(x).float()
            if more or micro % 2:
                other.scale(((out - y) ** 2).mean()).backward()
            else:
                # as of the mean of squares
                out.backward((out - y).detach() * 2 * (torch.ones(()) / y.numel()))
            other.step()
        hashes.append(
            (hash_of_training(other, other.optimizer), hash_of_training(engine, engine.optimizer))
        )
    apart, both = (
        [start(ds_config(2), make_net(seed)) for seed in (0, 1)],
        [start(ds_config(2), make_net(s)) for s in (0, 1)],
    )
    for micro in range(4):
        batch = batch_of(micro // 2, micro % 2, rank)
        for engine in apart:
            engine.backward(loss_of(engine, batch))
            engine.step()
        loss = loss_of(both[0], batch) + loss_of(both[1], batch)
        both[0].backward(loss) if micro < 2 else loss.backward()
        for engine in both:
            engine.step()
    hashes += [
        (hash_of_training(a, a.optimizer), hash_of_training(b, b.optimizer))
        for a, b in zip(both, apart, strict=True)
    ]
    return hashes


@pytest.mark.more
def test_other_ways_of_backward_give_the_bits_of_the_engines() -> None:
    for hashes in run_ranks(2, _plainly):
        for own, expected in hashes:
            assert own == expected
        assert len({own for own, _ in hashes}) > 3, "they are different trainings"


def test_ways_of_backward_that_cannot_be_right_are_refused() -> None:
    engine = start(ds_config(fp16=FP16))
    loss_of(engine, batch_of(0, 0, 0)).backward()
    with pytest.raises(
        ValueError, match=r"without the scale, and float16 needs it; .*engine\.scale\(loss\)"
    ):
        engine.step()
    engine.zero_grad()
    engine.scale(loss_of(engine, batch_of(0, 0, 0))).backward()
    engine.step()
    engine = start(ds_config(2))
    engine.backward(loss_of(engine, batch_of(0, 0, 0)))
    engine.step()
    loss_of(engine, batch_of(0, 1, 0)).backward()
    with pytest.raises(ValueError, match=r"1 backwards of this step were engine\.backward\(loss\)"):
        engine.step()


def test_a_boundary_that_is_set_takes_the_place_of_the_count() -> None:
    expected, engine = start(ds_config(3)), start(ds_config(3))
    train(expected, 0, 1)
    for micro in range(3):
        engine.set_gradient_accumulation_boundary(micro == 2)
        engine.backward(loss_of(engine, batch_of(0, micro, 0)))
    engine.step()
    assert engine.was_step_applied()
    assert hash_of_training(engine, engine.optimizer) == hash_of_training(
        expected, expected.optimizer
    )
    engine.set_gradient_accumulation_boundary(None)
    engine.backward(loss_of(engine, batch_of(1, 0, 0)))
    engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.was_step_applied()) == (1, 2, False)


def test_autocast_runs_forward_in_the_low_dtype() -> None:
    engine = start(ds_config(torch_autocast={"enabled": True, "dtype": "bfloat16"}))
    plain = start(ds_config())
    x = batch_of(0, 0, 0)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
    assert torch.equal(engine(x), expected)
    assert not torch.equal(engine(x).float(), plain(x))
    assert all(param.dtype == torch.float32 for param in engine.module.parameters())


def _scheduled(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    section = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 8, "warmup_num_steps": 4, "warmup_max_lr": 0.1},
    }
    engine = start(ds_config(2, scheduler=section))
    rates = []
    for step in range(6):
        train(engine, rank, 1)
        rates += engine.get_lr()
        if step == 2:
            engine.save_checkpoint(folder)
    other = start(ds_config(2, scheduler=section))
    other.load_checkpoint(folder)
    resumed = other.get_lr()
    for _ in range(3):
        train(other, rank, 1)
        resumed += other.get_lr()
    return rates, resumed


def test_a_schedule_of_the_configuration_is_followed_and_resumed(tmp_path: Path) -> None:
    (rates, resumed), other = run_ranks(2, _scheduled, str(tmp_path))
    assert (rates, resumed) == other
    assert rates[2:] == resumed
    plain = torch.optim.SGD([torch.zeros(1)])
    schedule = WarmupDecayLR(plain, total_num_steps=8, warmup_num_steps=4, warmup_max_lr=0.1)
    expected = [(schedule.step(), plain.param_groups[0]["lr"])[1] for _ in rates]
    assert rates == expected
    assert len(set(rates)) > 3


def test_dtypes_of_states_and_gradients_are_followed() -> None:
    low = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    engine = start(ds_config(bf16=low, data_types={"grad_accum_dtype": "bf16"}))
    train(engine, 0, 2)
    full, split = (
        shardcore.memory_report(one.module).by_kind
        for one in (start(ds_config(bf16={"enabled": True})), engine)
    )
    assert split["master"] == full["master"] / 2, "2 bytes per parameter beside the weight"
    param = next(engine.module.parameters())
    assert shardcore.full_state(param, "exp_avg").dtype == torch.bfloat16


def test_weights_are_not_gathered_to_save_where_that_is_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    assert start(ds_config(zero_optimization=zero)).save_16bit_model(tmp_path) is False
    assert "nothing was saved" in caplog.text
    assert list(tmp_path.iterdir()) == []


# --- what can be asked ----------------------------------------------------------------------------


def test_attributes_pass_through_to_the_module() -> None:
    model = make_net()
    engine, optimizer, loader, scheduler = shardcore.initialize(
        model=model, config=ds_config(2, stage=1)
    )
    assert (loader, scheduler) == (None, None)
    assert engine.module is model
    assert engine.optimizer is optimizer
    assert isinstance(optimizer, shardcore.FusedAdam)
    assert engine.head is model.head
    assert list(engine.parameters()) == list(model.parameters())
    assert engine.state_dict().keys() == model.state_dict().keys()
    assert engine.device == torch.device("cpu")
    assert engine.eval() is engine
    assert not model.training
    assert not engine.training
    assert engine.train().training
    assert engine.get_lr() == [1e-2]
    assert engine.get_global_grad_norm() is None, "before the first step"
    x = batch_of(0, 0, 0)[0]
    assert torch.equal(engine(x), model(x))
    assert torch.equal(engine.forward(x), model(x))
    engine.load_state_dict(Net().state_dict())
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'no_such'"):
        _ = engine.no_such
    engine.backward(loss_of(engine, batch_of(0, 0, 0)))
    engine.zero_grad()
    assert shardcore.full_grad(model.head.weight) is None


def _logged(rank: int, world_size: int) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardcore")
    logger.addHandler(handler)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            engine = start(ds_config(2, steps_per_print=2))
            train(engine, rank, 5)
        messages += printed.getvalue().splitlines()
        del (config := ds_config())["gradient_clipping"]
        start(config)
        with contextlib.redirect_stdout(printed := io.StringIO()):
            train(
                start(ds_config(fp16={"enabled": True, "auto_cast": True}, steps_per_print=1)),
                rank,
                1,
            )
        messages += printed.getvalue().splitlines()
    finally:
        logger.removeHandler(handler)
    return messages


def test_progress_is_printed_on_rank_0() -> None:
    first, second = run_ranks(2, _logged)
    assert [message.split(" loss=")[0] for message in first[:2]] == [
        f"step={n} skipped=0 lr=[0.01]" for n in (2, 4)
    ]
    assert all(0 < float(message.split("loss=")[1]) < 10 for message in first[:2])
    assert "config omits gradient_clipping, so the global norm is clipped to 1.0" in first[2]
    assert first[3].startswith("step=1 skipped=0 lr=[0.01] loss=")
    assert first[3].endswith(" loss_scale=65536")
    assert len(first) == 4
    assert second == []


def test_the_engine_says_what_was_configured() -> None:
    config = ds_config(2, stage=1)
    engine = start(config)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 4)
    assert (engine.gradient_accumulation_steps(), engine.zero_optimization_stage()) == (2, 1)
    assert (engine.local_rank, engine.fp16_enabled(), engine.bfloat16_enabled()) == (0, 0, 0)
    assert engine.zero_optimization()
    assert engine.managed_gradient_accumulation()
    assert engine.gradient_clipping() == 0.0
    assert engine.config is config


# --- torch.compile --------------------------------------------------------------------------------


class Graphs:
    """A backend that runs graphs as they are, and counts them."""

    count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def _compiled(rank: int, world_size: int, stage: int) -> tuple[list[str], list[int]]:
    """Train without, with the section alone, and with a call of engine.compile."""
    hashes, counts = [], []
    for section, calls in ((False, False), (True, False), (True, True)):
        torch._dynamo.reset()
        config = ds_config(2, zero_optimization={"stage": stage})
        if section:
            config["compile"] = {"deepcompile": False, "backend": "inductor"}
        engine, graphs = start(config), Graphs()
        assert not engine.is_compiled
        if calls:
            engine.compile(backend=graphs, compile_kwargs={"fullgraph": True})
        assert engine.is_compiled == calls
        compiled = ["forward" in vars(block) for block in engine.module.blocks]
        assert compiled == [calls] * len(compiled)
        train(engine, rank, 2)
        hashes.append(hash_of_training(engine, engine.optimizer))
        counts.append(graphs.count)
    return hashes, counts


@pytest.mark.parametrize("stage", [0, 3])
def test_compile_compiles_each_unit_and_the_configuration_alone_compiles_nothing(
    stage: int,
) -> None:
    for hashes, counts in run_ranks(2, _compiled, stage):
        assert len(set(hashes)) == 1
        assert counts == [0, 0, 1]


def _bad_compile(rank: int, world_size: int, of_rank: list[Any]) -> str:
    engine = start(ds_config(2, zero_optimization={"stage": 2}))
    try:
        engine.compile(**of_rank[rank])
    except Exception as error:
        assert not engine.is_compiled
        assert "forward" not in vars(engine.module.blocks[0])
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("of_rank", "match"),
    [
        ([{"schedule": [(0, [])]}] * 2, "NotImplementedError: compile: schedule has"),
        ([{"compiled_autograd_enabled": True}, {}], "compiled_autograd_enabled"),
        ([{"backend": "eager"}, {"backend": "aot_eager"}], "aot_eager"),
        ([{"compile_kwargs": {"mode": "fastest"}}] * 2, "mode=fastest"),
    ],
)
def test_bad_arguments_of_compile_raise_on_every_rank(of_rank: list[Any], match: str) -> None:
    assert all(match in message for message in run_ranks(2, _bad_compile, of_rank))
