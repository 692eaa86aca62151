"""precision="fp16": one hash everywhere, gradients against float32, overflows, what is refused,
and twins that must fail.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardcore
from shardcore.engine.loss_scale import LossScaler
from tests.support.choice import EVERY, combinations, part
from tests.support.groups import LIVELY, device_decides, lines_logged
from tests.support.models import (
    Ramp,
    Run,
    assert_one,
    batch_of,
    hash_of_training,
    loss_of,
    make_net,
    stepped,
    train,
)
from tests.support.ranks import run_ranks

OFFLOAD = {"optimizer": "cpu"}


def fp16(**options: Any) -> Run:
    shard = {
        "loss_scale": LIVELY,
        "keep_fp32": [nn.LayerNorm],
        "clip_grad_norm": 0.5,
        **options.pop("shard", {}),
    }
    return Run(**{"precision": "fp16", "steps": 7, "shard": shard, **options})


def _train(rank: int, world_size: int, runs: list[Run]) -> list[tuple[str, float, int]]:
    found = []
    for run in runs:
        model, optimizer, _ = train(rank, run)
        found.append(
            (hash_of_training(model, optimizer), optimizer.loss_scale, optimizer.skipped_steps)
        )
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world_size", "order"), combinations([1, 2, 3], [(1, None), (2, True), (2, False)], meet=1)
)
@pytest.mark.parametrize("every", EVERY)
def test_one_hash_for_every_stage_tier_and_unit_size(
    world_size: int, order: tuple[int, Any], every: int
) -> None:
    accumulate, sync_each = order
    runs = [
        fp16(
            stage=stage,
            accumulate=accumulate,
            shard={"offload": offload, "units": units, "sync_each": sync_each},
        )
        for stage in (0, 1, 2, 3)
        for offload, units in (
            (None, "auto"),
            (None, 500),
            (OFFLOAD, 500 if stage == 3 else "auto"),
        )
    ]
    found = run_ranks(
        world_size, _train, runs if world_size == 1 else part(runs, every, world_size)
    )
    assert_one(value for of_rank in found for value in of_rank)
    _, scale, skipped = found[0][0]
    assert 2 <= skipped <= 5, "both kinds of steps"
    assert scale < 2**19


def _losses(rank: int, world_size: int, run: Run) -> list[float]:
    return train(rank, run)[2]


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_losses_follow_float32(stage: int) -> None:
    shard = {"loss_scale": None, "clip_grad_norm": 0.7}
    plain = run_ranks(2, _losses, Run(stage=2, steps=10, shard={"clip_grad_norm": 0.7}))
    half = run_ranks(2, _losses, fp16(stage=stage, steps=10, shard=shard))
    for want, got in zip(plain[0] + plain[1], half[0] + half[1], strict=True):
        assert abs(got - want) <= 0.01 * abs(want)


def _grads(
    rank: int, world_size: int, stage: int, scale: Any, twin: bool
) -> tuple[dict[str, Any], float, list[Any]]:
    model, optimizer, _ = train(
        rank, fp16(stage=stage, steps=0, shard={"loss_scale": scale, "clip_grad_norm": None})
    )
    if twin:
        optimizer._engine.reducer.scaler = LossScaler(None)  # divides by nothing
    optimizer.scale_loss(loss_of(model, batch_of(0, 0, rank))).backward()
    shown = [
        None if p.grad is None else (str(p.grad.dtype), p.grad.tolist()) for p in model.parameters()
    ]
    full = {name: shardcore.full_grad(param).tolist() for name, param in model.named_parameters()}
    return full, shardcore.clip_grad_norm_(model, 1e9).item(), shown


@pytest.mark.parametrize(
    ("scale", "stage", "twin"),
    [
        (64.0, 0, False),
        (1000.0, 1, False),
        (shardcore.LossScale(initial_power=12), 3, False),
        (1000.0, 0, True),
    ],
)
def test_gradients_are_those_of_float32_unscaled(stage: int, scale: Any, twin: bool) -> None:
    """The twin does not divide the scale out."""
    model = make_net()
    for rank in range(2):
        (loss_of(model, batch_of(0, 0, rank)) / 2).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for full, got_norm, shown in run_ranks(2, _grads, stage, scale, twin):
        close = []
        for (name, param), seen in zip(model.named_parameters(), shown, strict=True):
            close.append(
                torch.allclose(
                    torch.tensor(full[name]), param.grad, rtol=0.02, atol=0.02 * norm / 10
                )
            )
            assert (seen is not None) == (stage == 0)
            if seen is not None:
                close.append(
                    torch.allclose(
                        torch.tensor(seen[1]), torch.tensor(full[name]), rtol=1e-3, atol=1e-6
                    )
                )
                assert seen[0] == ("torch.float32" if "norm" in name else "torch.float16")
        close.append(got_norm == pytest.approx(norm, rel=5e-3))
        assert all(close) == (not twin)


def _ramp(
    rank: int,
    world_size: int,
    stage: int,
    slope: float,
    scale: Any,
    accumulate: int,
    sync_each: Any,
) -> Any:
    model = Ramp()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
    options = {"accumulate": accumulate, "sync_each": sync_each, "loss_scale": scale}
    model, optimizer = shardcore.shard(model, optimizer, stage, precision="fp16", **options)
    for _ in range(accumulate):
        optimizer.scale_loss(model(torch.full((1000,), slope))).backward()
    grad = shardcore.full_grad(model.weight)
    optimizer.step()
    return grad.dtype == torch.float32, grad.unique().tolist(), optimizer.skipped_steps


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "order"), combinations([0, 1, 2, 3], [(3, True), (3, False), (1, None)], meet=1)
)
def test_the_largest_gradients_add_up_without_overflow(stage: int, order: tuple[int, Any]) -> None:
    accumulate, sync_each = order
    largest = 65504.0
    assert (torch.tensor(largest).half() + torch.tensor(largest).half()).isinf(), (
        "a sum in float16 would be infinite"
    )
    for scale, slope in ((1.0, largest), (32.0, largest / 32)):
        for answer in run_ranks(4, _ramp, stage, slope, scale, accumulate, sync_each):
            assert answer == (True, [accumulate * slope], 0)


def test_small_gradients_live_only_with_a_scale() -> None:
    tiny = 2.0**-30  # float16 ends at 2**-24
    model = Ramp()
    for scale, expected in ((1.0, 0.0), (2.0**16, tiny)):
        model = Ramp()
        optimizer: Any = shardcore.FusedAdam(model.parameters())
        model, optimizer = shardcore.shard(model, optimizer, precision="fp16", loss_scale=scale)
        (optimizer.scale_loss(model(torch.ones(1000)).float() * tiny)).backward()
        assert shardcore.full_grad(model.weight).unique().tolist() == [expected]


# --- overflows ------------------------------------------------------------------------------------


def _overflow(
    rank: int, world_size: int, stage: int, on_device: bool, alone: bool = False
) -> dict[str, Any]:
    """A step that overflows on rank 1, then four others. alone: rank 1 leaves its scale as it
    is.
    """
    options = shardcore.LossScale(initial_power=8, window=2, hysteresis=1)
    with device_decides(forced=on_device) as waits, lines_logged() as lines:
        model, optimizer, _ = train(rank, fp16(stage=stage, steps=2, shard={"loss_scale": options}))
        before, waited = hash_of_training(model, optimizer), waits.count
        x, y = batch_of(2, 0, rank)
        if rank == 1:
            x[0, 0] = 60000.0
            if alone:
                optimizer._engine.scaler.after_overflow = lambda state: ""
        optimizer.scale_loss(loss_of(model, (x, y)) * 1e4).backward()
        optimizer.step()
        optimizer.zero_grad()
        found: dict[str, Any] = {
            "silent": not lines and waits.count == waited,
            "skipped": optimizer.skipped_steps,
        }
        found |= {
            "log": lines.copy(),
            "same": hash_of_training(model, optimizer) == before,
            "scale": optimizer.loss_scale,
        }
        found["error"] = ""
        for step in range(4):
            optimizer.scale_loss(loss_of(model, batch_of(step, 0, rank))).backward()
            try:
                optimizer.step()
            except ValueError as problem:
                found["error"] = str(problem)
            optimizer.zero_grad()
        return found | {
            "changed": hash_of_training(model, optimizer) != before,
            "after": optimizer.loss_scale,
        }


@pytest.mark.cases(2)
@pytest.mark.parametrize(("stage", "on_device"), [(0, False), (3, False), (0, True), (2, True)])
def test_an_overflow_on_one_rank_skips_and_halves_on_all(stage: int, on_device: bool) -> None:
    first, second = run_ranks(2, _overflow, stage, on_device)
    assert first == second
    (line,) = first.pop("log")
    assert (
        "nothing was updated on any rank (skipped steps so far: 1); the loss scale goes from 256 "
        "to 128" in line
    )
    expected = {"same": True, "scale": 128.0, "error": "", "changed": True, "after": 256.0}
    assert first == {"silent": on_device, "skipped": 1, **expected}


def test_a_rank_that_decides_alone_is_found_by_all() -> None:
    for result in run_ranks(2, _overflow, 2, False, True):
        assert (
            "option loss_scale is 256.0 on rank 1 but 128.0 on rank 0; expected the same"
            in result["error"]
        )
        assert not result["changed"]


def _other_terms(rank: int, world_size: int) -> list[str]:
    _, optimizer, _ = train(rank, Run(steps=1))
    errors = []
    for terms in (
        {"max_norm": 1.0 + rank},
        {"max_norm": None if rank else 1.0},
        {"grad_scale": 1.0 + rank},
    ):
        try:
            optimizer.step(**terms)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_scale_or_clip_differently_are_refused() -> None:
    for clip, only_one, scale in run_ranks(2, _other_terms):
        assert "max_norm is 2.0 on rank 1 but 1.0 on rank 0; expected the same" in clip
        assert "max_norm is None on rank 1 but 1.0 on rank 0" in only_one
        assert "grad_scale is 2.0 on rank 1 but 1.0 on rank 0" in scale


def _at_the_minimum(rank: int, world_size: int) -> tuple[list[str], bool, int]:
    options = shardcore.LossScale(initial_power=1, hysteresis=1)
    model, optimizer, _ = train(rank, fp16(steps=0, shard={"loss_scale": options}))
    before, errors = hash_of_training(model, optimizer), []
    for step in range(3):
        x, y = batch_of(step, 0, rank)
        optimizer.scale_loss(loss_of(model, (x / 0 if rank == 1 else x, y))).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            errors.append(str(error))
        optimizer.zero_grad()
    return errors, hash_of_training(model, optimizer) == before, optimizer.skipped_steps


def test_at_the_minimum_every_rank_gets_an_error() -> None:
    first, second = run_ranks(2, _at_the_minimum)
    assert first == second
    errors, same, skipped = first
    assert len(errors) == 2
    assert (
        "gradients are not finite though the loss scale is at its minimum, 1; nothing was updated"
        in errors[0]
    )
    assert (same, skipped) == (True, 3)


# --- state ----------------------------------------------------------------------------------------


def _resume(rank: int, world_size: int, stage: int, keep_scale: bool) -> bool:
    run = fp16(stage=stage, steps=5)
    model, optimizer, _ = train(rank, run)
    weights = model.state_dict()
    saved = optimizer.state_dict()
    again, loaded, _ = train(rank, fp16(stage=stage, steps=0), make_net(7))
    again.load_state_dict(weights)
    loaded.load_state_dict(
        saved if keep_scale else {k: v for k, v in saved.items() if k != "loss_scale"}
    )
    hashes = []
    for m, o in ((model, optimizer), (again, loaded)):
        for step in range(5, 9):
            stepped(m, o, rank, step)
        hashes.append((hash_of_training(m, o), o.loss_scale, o.state_dict()["loss_scale"]))
    return hashes[0] == hashes[1]


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_scale_is_part_of_the_state(stage: int) -> None:
    assert run_ranks(2, _resume, stage, True) == [True, True]
    assert run_ranks(2, _resume, stage, False) == [False, False], (
        "a scale that starts anew gives other steps"
    )


def _states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {
        "model": shardcore.sharded_state_dict(model),
        "optimizer": shardcore.sharded_state_dict(optimizer),
    }


def _four_more(model: nn.Module, optimizer: Any) -> tuple[float, dict[str, Any], str]:
    """The scale at first; what it and the training became. Every rank has the same samples: any
    number of ranks, one sum.
    """
    scale = optimizer.loss_scale
    for step in range(5, 9):
        stepped(model, optimizer, 0, step)
    return scale, optimizer.state_dict()["loss_scale"], hash_of_training(model, optimizer)


def _in_shards(rank: int, world_size: int, stage: int, folder: str, resume: bool) -> Any:
    model, optimizer, _ = train(
        rank, fp16(stage=stage, steps=0 if resume else 5), make_net(7) if resume else None
    )
    if not resume:
        assert optimizer.skipped_steps > 0
        assert optimizer.loss_scale != 2.0**19
        dcp.save(_states(model, optimizer), checkpoint_id=folder)
        return _four_more(model, optimizer)
    state = _states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    assert optimizer.loss_scale == 2.0**19, "loading fills copies"
    shardcore.load_sharded_state_dict(model, state["model"])
    shardcore.load_sharded_state_dict(optimizer, state["optimizer"])
    return _four_more(model, optimizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_scale_is_part_of_a_checkpoint_in_shards(tmp_path: Path, stage: int) -> None:
    saved, other = run_ranks(2, _in_shards, stage, str(tmp_path), False)
    assert saved == other
    for world_size in (2, 1):
        assert run_ranks(world_size, _in_shards, stage, str(tmp_path), True) == [saved] * world_size


def _wrong_scale(rank: int, world_size: int, value: Any) -> tuple[str, bool]:
    model, optimizer, _ = train(rank, fp16(steps=5))
    before = optimizer.loss_scale, hash_of_training(model, optimizer)
    state = shardcore.sharded_state_dict(optimizer)
    for values in (
        values for shards in state.values() for _, values in getattr(shards, "ranges", [])
    ):
        values.fill_(3.0)
    if rank == 1:
        state["loss_scale.scale"] = value
    try:
        shardcore.load_sharded_state_dict(optimizer, state)
    except (ValueError, TypeError) as error:
        return str(error), (optimizer.loss_scale, hash_of_training(model, optimizer)) == before
    return "no error", False


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor(0.0), "expected a scale above 0"),
        ("1", "expected a finite number"),
        (torch.tensor(4.0), "ranks disagree"),
    ],
)
def test_a_scale_that_none_or_only_one_rank_can_have_is_refused_before_anything_changes(
    value: Any, text: str
) -> None:
    (other, as_before), (own, own_as_before) = run_ranks(2, _wrong_scale, value)
    assert text in own
    assert "rank 1 refused" in other or "ranks disagree" in other
    assert as_before
    assert own_as_before


def test_only_a_scale_that_moves_is_in_a_checkpoint_in_shards() -> None:
    for run, expected in (
        (fp16(steps=0), True),
        (fp16(steps=0, shard={"loss_scale": 128.0}), False),
        (Run(steps=0), False),
    ):
        _, optimizer, _ = train(0, run)
        found = {
            key for key in shardcore.sharded_state_dict(optimizer) if key.startswith("loss_scale.")
        }
        assert found == (
            {f"loss_scale.{key}" for key in ("scale", "stable_steps", "hysteresis_left")}
            if expected
            else set()
        )


def test_torch_optim_and_plain_optimizers_read_the_state() -> None:
    _, optimizer, _ = train(0, fp16(steps=5))
    saved = optimizer.state_dict()
    assert saved["loss_scale"]["scale"] == optimizer.loss_scale
    plain = make_net()
    for other in (torch.optim.AdamW(plain.parameters()), shardcore.FusedAdam(plain.parameters())):
        for entry in saved["state"].values():
            entry.pop("master", None)  # float32 weights have none
        other.load_state_dict(saved)
        assert torch.equal(other.state_dict()["state"][0]["exp_avg"], saved["state"][0]["exp_avg"])
    saved, scale = optimizer.state_dict(), optimizer.loss_scale
    optimizer.load_state_dict(saved | {"loss_scale": saved["loss_scale"] | {"scale": 4.0}})
    assert optimizer.loss_scale == 4.0 != scale
    with pytest.raises(
        ValueError,
        match=r"load_state_dict: state_dict\[.loss_scale.\] is .*expected a scale above 0",
    ):
        optimizer.load_state_dict(saved | {"loss_scale": saved["loss_scale"] | {"scale": 0.0}})
    _, other, _ = train(0, Run(steps=0, precision="bf16"))
    other.load_state_dict(saved)
    assert (other.loss_scale, "loss_scale" in other.state_dict()) == (1.0, False)


def test_torchs_distributed_checkpoint_keeps_all_but_the_scale() -> None:
    model, optimizer, _ = train(0, fp16(steps=5))
    saved = get_optimizer_state_dict(model, optimizer)
    again, loaded, _ = train(0, fp16(steps=0), make_net(7))
    set_optimizer_state_dict(again, loaded, saved)
    want, got = optimizer.state_dict()["state"], loaded.state_dict()["state"]
    assert all(torch.equal(want[n][key], got[n][key]) for n in want for key in want[n])
    assert "loss_scale" not in saved
    assert loaded.loss_scale == 2.0**19


# --- what is asked and what is refused ------------------------------------------------------------


def _one_forgets_to_scale(rank: int, world_size: int, micro_steps: int) -> list[str]:
    model, optimizer, _ = train(rank, fp16(steps=1, accumulate=micro_steps))
    before, found = hash_of_training(model, optimizer), []
    for attempt in range(2):
        for micro in range(micro_steps):
            loss = loss_of(model, batch_of(attempt, micro, rank))
            (
                loss if attempt == 0 and rank == 1 and micro == 0 else optimizer.scale_loss(loss)
            ).backward()
        try:
            optimizer.step()
            found.append("stepped")
        except ValueError as error:
            found.append(str(error))
            assert hash_of_training(model, optimizer) == before
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_loss_that_was_not_scaled_is_noticed_on_every_rank(micro_steps: int) -> None:
    other, own = run_ranks(2, _one_forgets_to_scale, micro_steps)
    assert "a backward ran on a loss without the scale" in own[0]
    assert "step: rank 1 refused: " in other[0]
    assert own[1] == other[1] == "stepped"


def test_losses_of_every_kind_count_as_scaled() -> None:
    model, optimizer, _ = train(0, fp16(stage=1, steps=0))
    loss = loss_of(model, batch_of(0, 0, 0))
    scaled = optimizer.scale_loss(loss)
    scaled.backward(retain_graph=True)
    (scaled * 0.5 + optimizer.scale_loss(loss)).backward()
    optimizer.step()
    with torch.no_grad():
        assert optimizer.scale_loss(torch.tensor(0.5)).item() == optimizer.loss_scale / 2
    assert optimizer.scale_loss(torch.tensor(60000.0).half()).isfinite(), "in float32"


def test_other_precisions_leave_losses_alone() -> None:
    for precision in ("fp32", "bf16"):
        _, optimizer, _ = train(0, Run(steps=0, precision=precision))
        loss = torch.tensor(1.0)
        assert optimizer.scale_loss(loss) is loss
        assert optimizer.loss_scale == 1.0


def test_torchs_grad_scaler_at_stage_0_scales_instead() -> None:
    hashes = []
    for by_scaler in (True, False):
        scale = 1.0 if by_scaler else 256.0
        model, optimizer, _ = train(
            0, fp16(stage=0, steps=0, shard={"loss_scale": scale, "clip_grad_norm": None})
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10**6)
        for step in range(3):
            loss = loss_of(model, batch_of(step, 0, 0))
            if by_scaler:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.scale_loss(loss).backward()
                optimizer.step()
            optimizer.zero_grad()
        hashes.append(hash_of_training(model, optimizer))
    assert hashes[0] == hashes[1]
    model, optimizer, _ = train(0, fp16(stage=0, steps=0))
    scaler.scale(loss_of(model, batch_of(0, 0, 0))).backward()
    with pytest.raises(
        ValueError,
        match=r"without the scale 524288; .*loss_scale=1\.0\) you scale the loss yourself",
    ):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"precision": "bf16", "loss_scale": 2.0},
            ValueError,
            'is 2.0 with precision="bf16", and no weight is float16, or float32 for a forward '
            "under torch.autocast; expected",
        ),
        (
            {"precision": "fp16", "loss_scale": 0},
            ValueError,
            "loss_scale is 0; expected a positive number",
        ),
        ({"precision": "fp16", "loss_scale": float("inf")}, ValueError, "loss_scale is inf"),
        (
            {"precision": "fp16", "loss_scale": True},
            TypeError,
            "loss_scale is True; expected a number",
        ),
        ({"precision": "fp16", "loss_scale": "dynamic"}, TypeError, "loss_scale is 'dynamic'"),
        (
            {"precision": "fp8"},
            ValueError,
            'precision is .fp8.; expected "bf16" or "fp16" or "fp32"',
        ),
        (
            {"precision": "fp16", "grad_dtype": "fp16"},
            ValueError,
            'grad_dtype is .fp16.; expected "bf16" or "fp32"',
        ),
    ],
)
def test_bad_options(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    model = make_net()
    with pytest.raises(kind, match=text):
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()), **options)


def test_weights_inputs_and_masters() -> None:
    given = {key: value.clone() for key, value in make_net().state_dict().items()}
    model, _, _ = train(0, fp16(steps=0, shard={"keep_fp32": [nn.LayerNorm, "gain"]}))
    for name, param in model.named_parameters():
        kept = "norm" in name or name == "gain"
        assert param.dtype == (torch.float32 if kept else torch.float16), name
        assert torch.equal(model.state_dict()[name], given[name]), name
        if not kept:
            assert torch.equal(shardcore.full_state(param, "master"), given[name])
    model = Ramp()
    model, _ = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), precision="fp16")
    assert model(torch.ones(1000)).dtype == torch.float16, "floating inputs are cast"
    model = Ramp()
    model, _ = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), precision="fp16", cast_inputs=False
    )
    assert model(torch.ones(1000)).dtype == torch.float32
