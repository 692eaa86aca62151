"""Keys and calls of the engine that mean what they mean in DeepSpeed, by themselves and beside
DeepSpeed's answers.
"""

import contextlib
import importlib.util
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from tests.support.deepspeed import ds_config, start, train
from tests.support.groups import device_decides
from tests.support.models import batch_of, hash_of, hash_of_training, loss_of, make_net
from tests.support.ranks import run_ranks
from tests.support.scripts import ROOT, run_forked


def _weights(engine: Any) -> str:
    with shardcore.full_params(engine.module):
        return hash_of(engine.module.parameters())


class Skipping(torch.nn.Module):
    """Three layers: the first is frozen, the others are used by turns, or both."""

    uses: tuple[str, ...] = ("up",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = (torch.nn.Linear(10, out) for out in (10, 5, 5))
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return sum((self.get_submodule(name)(x) for name in self.uses), torch.zeros(5))


def _skips_a_layer(rank: int, world_size: int) -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "ignore_unused_parameters": False}
    engine = start(ds_config(2, zero_optimization=zero), Skipping())

    def micro_step(uses: str) -> None:
        engine.module.uses = tuple(uses.split())
        with engine.no_sync():
            engine.backward(loss_of(engine, batch_of(0, 0, rank)))
        engine.step()

    micro_step("up")
    with pytest.raises(
        ValueError,
        match=r"no rank computed a gradient for down\.weight, down\.bias; expected all parameters in",
    ):
        micro_step("up")
    assert engine.global_steps == 0
    engine.zero_grad()
    micro_step("up down" if rank == 0 else "up")
    assert engine.was_step_applied()


def test_a_step_without_all_gradients_is_refused_where_the_configuration_says_so() -> None:
    run_ranks(2, _skips_a_layer)


def test_the_returned_loss_has_the_dtype_of_the_loss() -> None:
    engine = start(ds_config(3, bf16={"enabled": True}))
    loss = loss_of(engine, batch_of(0, 0, 0)).bfloat16()
    returned = engine.backward(loss)
    assert returned.dtype == torch.bfloat16
    assert torch.equal(returned, loss / 3)


def _tags(rank: int, world_size: int, folder: str, **config: Any) -> list[str]:
    engine = start(ds_config(**config))
    train(engine, rank, 1)
    with contextlib.closing(io.StringIO()) as log:
        handler = logging.StreamHandler(log)
        logging.getLogger("shardcore").addHandler(handler)
        engine.save_checkpoint(folder, tag=f"of {rank}")
        path, _ = engine.load_checkpoint(folder, tag=f"of {rank}")
        logging.getLogger("shardcore").removeHandler(handler)
        lines = log.getvalue().splitlines()
    assert path == str(Path(folder, "of 0"))
    strict = start(ds_config(checkpoint={"tag_validation": "FAIL"}))
    for call in (strict.save_checkpoint, strict.load_checkpoint):
        with pytest.raises(
            ValueError,
            match=f"{call.__name__}: tag is 'of 1' on rank 1; expected 'of 0', as on rank 0",
        ):
            call(folder, tag=f"of {rank}")
    assert strict.load_checkpoint(folder, tag="of 0")[0] == path
    return lines


def test_of_tags_that_differ_by_rank_the_first_holds_or_none(tmp_path: Path) -> None:
    first, second = run_ranks(2, _tags, str(tmp_path))
    says = "tag is 'of 1' on rank 1; every rank uses the tag of rank 0, 'of 0'"
    assert first == [f"{op}_checkpoint: {says}" for op in ("save", "load")]
    assert second == []
    assert [path.name for path in tmp_path.glob("of*")] == ["of 0"]


def _tags_ignored(rank: int, world_size: int, folder: str) -> list[str]:
    return _tags(rank, world_size, folder, checkpoint={"tag_validation": "Ignore"})


def test_ignored_tags_are_not_warned_of(tmp_path: Path) -> None:
    assert run_ranks(2, _tags_ignored, str(tmp_path)) == [[], []]


def test_an_engine_without_an_optimizer_has_the_counters_of_what_it_loads(tmp_path: Path) -> None:
    trained = start(ds_config(2))
    train(trained, 0, 3)
    trained.save_checkpoint(tmp_path)
    config = ds_config(2)
    del config["optimizer"]
    engine, again = start(config), start(config)
    names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    assert [getattr(engine, name) for name in names] == [0, 0, 0, 0]
    assert (engine.get_lr(), engine.get_global_grad_norm()) == ([], None)
    assert not engine.is_gradient_accumulation_boundary()
    assert not engine.was_step_applied()
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert engine.global_steps == 0
    engine.load_checkpoint(tmp_path)
    assert [getattr(engine, name) for name in names] == [3, 24, 6, 0]
    engine.save_checkpoint(tmp_path / "again")
    assert again.load_checkpoint(tmp_path / "again")[0] == str(tmp_path / "again" / "global_step3")
    assert [getattr(again, name) for name in names] == [3, 24, 6, 0]
    del config["gradient_accumulation_steps"]
    assert start(config).is_gradient_accumulation_boundary()


def test_a_loop_that_decides_when_to_step_updates_at_every_step() -> None:
    engine = start(ds_config(3, managed_gradient_accumulation=False))
    for backwards in (1, 2, 4):
        before = _weights(engine)
        for micro in range(backwards):
            engine.backward(loss_of(engine, batch_of(0, micro, 0)))
            assert not engine.is_gradient_accumulation_boundary()
        engine.step()
        assert engine.was_step_applied()
        assert _weights(engine) != before
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 3, 4 * 7)
    with pytest.raises(
        ValueError,
        match=r"set_gradient_accumulation_boundary: config managed_gradient_accumulation is False"
        ".*Trainer and Accelerate",
    ):
        engine.set_gradient_accumulation_boundary(True)
    with (
        pytest.raises(ValueError, match="coalesce_grad_reduction: config managed"),
        engine.coalesce_grad_reduction(),
    ):
        pass


def _summed(rank: int, world_size: int) -> list[list[tuple[str, str]]]:
    answers = []
    low = {"enabled": True, "auto_cast": True, "initial_scale_power": 4, "loss_scale_window": 1}
    for stage, more, forced in (
        (0, {}, False),
        (2, {}, False),
        (1, {"fp16": low}, False),
        (1, {"fp16": low}, True),
    ):
        hashes = []
        for op, times in (("sum", 1), ("mean", world_size)):
            with device_decides(forced=forced):
                engine = start(ds_config(2, stage, gradient_allreduce_op=op, **more))
                for micro_step in range(4):
                    engine.backward(times * loss_of(engine, batch_of(0, micro_step, rank)))
                    gradient = shardcore.full_grad(engine.module.head.weight)
                    engine.step()
                assert (engine._core.device_step is not None) == forced
                hashes.append((hash_of([gradient]), hash_of_training(engine, engine.optimizer)))
        answers.append(hashes)
    return answers


def test_gradients_are_added_up_over_ranks() -> None:
    first, second = run_ranks(2, _summed)
    assert first == second
    assert all(summed[0] == averaged[0] for summed, averaged in first)
    assert all(summed == averaged for summed, averaged in first[:2]), (
        "float16 rounds larger losses otherwise"
    )
    assert first[2] == first[3], "where the device decides"


@pytest.mark.more
@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_are_answered_as_deepspeed_answers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed's answers need deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    answers = []
    for module in ("deepspeed", "shardcore"):
        run_forked(
            "tests.support.deepspeed_calls",
            module,
            str(tmp_path / module),
            ranks=ranks,
            folder=ROOT,
        )
        answers.append(json.loads((tmp_path / module).read_text()))
    expected, own = answers
    assert own.keys() == expected.keys()
    for call, cases in expected.items():
        for case, values in cases.items():
            same = [
                pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
                for value in values
            ]
            assert own[call][case] == same, (call, case)


def test_autocast_to_float16_scales_the_loss() -> None:
    engine = start(ds_config(torch_autocast={"enabled": True, "dtype": "float16"}))
    for factor, scale in ((1.0, 2.0**16), (float("inf"), 2.0**15), (1.0, 2.0**15)):
        loss = factor * loss_of(engine, batch_of(0, 0, 0))
        assert engine.backward(loss).item() == loss.item()
        engine.step()
        assert engine.optimizer.loss_scale == scale
    assert engine.skipped_steps == 1
    loss_of(engine, batch_of(0, 0, 0)).backward()
    with pytest.raises(
        ValueError,
        match=r"without the scale, and float16 needs it; expected engine\.backward",
    ):
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_runs_over_bfloat16_weights(stage: int) -> None:
    engine = start(
        ds_config(stage=stage, torch_autocast={"enabled": True}), make_net().to(torch.bfloat16)
    )
    for _ in range(4):
        engine.backward(loss_of(engine, batch_of(0, 0, 0)))
        engine.step()
    assert all(param.dtype == torch.bfloat16 for param in engine.module.parameters())
    assert all(
        value.dtype == torch.float32
        for value in engine.module_state_dict().values()
        if value.dim() > 1
    ), "masters"
