"""A loop of Accelerate's, with its own Accelerator under DDP and with ours: the same numbers,
and one hash everywhere.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")
pytest.importorskip("transformers", reason="tests with transformers")

from accelerate import Accelerator, cpu_offload, dispatch_model, init_empty_weights
from accelerate.utils import GradScalerKwargs, ProjectConfiguration, TorchDynamoPlugin
from safetensors.torch import load_file

import shardcore
from shardcore.integrations.accelerate import ShardcoreAccelerator
from tests.support.huggingface import (
    hash_of_state,
    launched,
    message_of,
    rows,
    seed_everything,
    tiny_gpt2,
)
from tests.support.ranks import run_ranks

MICRO_STEPS, CLIP = 8, 1e-3


def prepared(accelerator: Any) -> Any:
    """Return model, optimizer, loader and scheduler, of torch's kinds before. A large eps: else
    Adam would undo clipping.
    """
    seed_everything(0)
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.0)
    loader: Any = DataLoader(rows(64), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    scheduler = LambdaLR(optimizer, lambda step: 1.0 - step / 100)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def loop(
    accelerator: Any, things: Any, batches: Any, clip: float | None = CLIP
) -> tuple[list[float], list[float]]:
    model, optimizer, _, scheduler = things
    losses, norms = [], []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip is not None:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    return losses, norms


def make(options: Any, **more: Any) -> Any:
    more = {"cpu": True, "gradient_accumulation_steps": 2, **more}
    return (
        Accelerator(**more)
        if options is None
        else ShardcoreAccelerator(shard_options=options, **more)
    )


def train(
    rank: int,
    world_size: int,
    options: Any,
    save: str = "",
    load: str = "",
    clip: float | None = CLIP,
) -> dict[str, Any]:
    """Train for eight micro-steps: save after four; or load what was saved, and go on with the
    rest.
    """
    with launched(rank, world_size):
        accelerator = make(options)
        things = prepared(accelerator)
        batches = list(things[2])[:MICRO_STEPS]
        losses, norms = [], []
        for part, half in enumerate((batches[:4], batches[4:])):
            if part == 0 and load:
                accelerator.load_state(load)
                continue
            if part == 1 and save:
                accelerator.save_state(save)
            more = loop(accelerator, things, half, clip)
            losses += more[0]
            norms += more[1]
        model = accelerator.unwrap_model(things[0])
        state = model.state_dict()
        start = tiny_gpt2().state_dict()
        return {
            "losses": losses,
            "norms": norms,
            "rate": things[3].get_last_lr(),
            "hash": hash_of_state(state),
            "movement": torch.cat([(state[name] - start[name]).flatten() for name in start]),
        }


@pytest.fixture(scope="module")
def ddp() -> dict[str, Any]:
    """What Accelerate's own Accelerator has under DDP."""
    return run_ranks(2, train, None)[0]  # type: ignore[no-any-return]


STAGES: list[dict[str, Any]] = [
    {"stage": 0, "sync_each": True},
    {"stage": 3, "offload": {"optimizer": "cpu", "gradients": "cpu"}},
]


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    far = (ours["movement"] - theirs["movement"]).abs().max() > 1e-4 * theirs[
        "movement"
    ].abs().max()
    close = [
        ours[key] == pytest.approx(theirs[key], rel=1e-5) for key in ("losses", "norms", "rate")
    ]
    return all(close) and not far


def test_a_loop_with_accumulation_and_clipping_is_that_of_ddp(ddp: dict[str, Any]) -> None:
    assert min(ddp["norms"]) > 100 * CLIP
    of_ranks = [each for options in STAGES for each in run_ranks(2, train, options)]
    assert all(same(ours, ddp) for ours in of_ranks)
    assert len({ours["hash"] for ours in of_ranks}) == 1
    within = run_ranks(2, train, {"stage": 2, "clip_grad_norm": CLIP}, "", "", None)[0]
    assert same({**within, "norms": ddp["norms"]}, ddp), "clipped within the step"
    unclipped = run_ranks(2, train, {"stage": 2}, "", "", None)[0]
    assert not same({**unclipped, "norms": ddp["norms"]}, ddp), "a no-op clip"


def test_a_resumed_loop_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run_ranks(2, train, {"stage": 2}, str(tmp_path))[0]
    assert {path.name for path in tmp_path.iterdir()} >= {
        "model.safetensors",
        "scheduler.bin",
        "shardcore",
    }
    assert not list(tmp_path.glob("optimizer*"))
    resumed = run_ranks(2, train, {"stage": 3}, "", str(tmp_path))
    assert {each["hash"] for each in resumed} == {whole["hash"]}
    assert resumed[0]["losses"] == whole["losses"][4:]
    assert resumed[0]["rate"] == whole["rate"]
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["transformer.wte.weight"].isfinite().all()
    shutil.rmtree(tmp_path / "shardcore" / "state")
    for message in run_ranks(2, message_of, train, {"stage": 3}, "", str(tmp_path)):
        assert "FileNotFoundError" in message


@pytest.mark.more
def test_a_plain_accelerators_state_is_loaded(tmp_path: Path) -> None:
    ddp = run_ranks(2, train, None, str(tmp_path))[0]
    ours = run_ranks(2, train, {"stage": 3}, "", str(tmp_path))[0]
    assert ours["losses"] == pytest.approx(ddp["losses"][4:], rel=1e-5)
    assert ours["norms"] == pytest.approx(ddp["norms"][2:], rel=1e-5)


def _bf16(rank: int, world_size: int, out: str) -> Any:
    with launched(rank, world_size):
        accelerator = make(
            {"stage": 3},
            mixed_precision="bf16",
            project_config=ProjectConfiguration(out, automatic_checkpoint_naming=True),
        )
        things = prepared(accelerator)
        batches = list(things[2])[:4]
        losses, _ = loop(accelerator, things, batches)
        accelerator.save_state()
        model, optimizer = things[:2]
        before = hash_of_state(model.state_dict())
        loop(accelerator, things, batches)
        after = hash_of_state(model.state_dict())
        accelerator.load_state()
        assert (accelerator.mixed_precision, len(accelerator._optimizers)) == ("bf16", 1)
        state = accelerator.get_state_dict(model)
        accelerator.save_model(model, f"{out}/exported")
        assert isinstance(optimizer.optimizer, shardcore.FusedAdam)
        kinds = {str(value.dtype) for value in state.values()}
        return losses, hash_of_state(model.state_dict()) == before != after, kinds


@pytest.mark.more
def test_bf16_keeps_float32_masters_and_saves_them(tmp_path: Path, ddp: dict[str, Any]) -> None:
    (losses, same_bits, kinds), (_, too, nothing) = run_ranks(2, _bf16, str(tmp_path))
    assert losses == pytest.approx(ddp["losses"][:4], rel=0.02)
    assert same_bits
    assert too
    assert (kinds, nothing) == ({"torch.bfloat16"}, set()), "whole on the main process alone"
    assert (
        load_file(tmp_path / "exported/model.safetensors")["transformer.wpe.weight"].dtype
        == torch.bfloat16
    )
    assert (tmp_path / "checkpoints/checkpoint_0/shardcore/latest").exists()


def _export(rank: int, world_size: int, out: str, options: Any) -> None:
    """Save the initial weights, to files of at most 8 KB and to one, without a whole state dict."""
    with launched(rank, world_size), pytest.MonkeyPatch.context() as patch:
        accelerator = make(options)
        model = prepared(accelerator)[0]
        patch.setattr("shardcore.integrations.accelerate.whole_state_dict", None)
        accelerator.save_model(model, f"{out}/several", max_shard_size="8KB")
        accelerator.save_model(model, f"{out}/one")
        accelerator.save_state(f"{out}/state")


@pytest.mark.more
@pytest.mark.parametrize("stage", [0, 3])
def test_models_are_saved_in_the_files_of_accelerate(tmp_path: Path, stage: int) -> None:
    run_ranks(2, _export, str(tmp_path / "ours"), {"stage": stage})
    run_ranks(1, _export, str(tmp_path / "plain"), None)
    for folder in ("several", "one", "state"):
        ours, plain = tmp_path / "ours" / folder, tmp_path / "plain" / folder
        files = sorted(path.name for path in plain.glob("model*"))
        assert sorted(path.name for path in ours.glob("model*")) == files
        for name in files:
            if name.endswith(".json"):
                assert json.loads((ours / name).read_text()) == json.loads(
                    (plain / name).read_text()
                )
                continue
            found, expected = load_file(ours / name), load_file(plain / name)
            assert found.keys() == expected.keys()
            assert hash_of_state(found) == hash_of_state(expected)
    assert len(list((tmp_path / "ours" / "several").iterdir())) > 3
    twin = tmp_path / "ours" / "one" / "model.safetensors"
    values = load_file(twin)
    values["transformer.wpe.weight"][0, 0] += 1
    plain_values = load_file(tmp_path / "plain" / "one" / "model.safetensors")
    assert hash_of_state(values) != hash_of_state(plain_values)


def _fp16(rank: int, world_size: int) -> Any:
    with launched(rank, world_size):
        accelerator = make(
            {"stage": 1, "loss_scale": shardcore.LossScale(initial_power=22, hysteresis=1)},
            mixed_precision="fp16",
        )
        things = prepared(accelerator)
        skipped = []
        for half in (list(things[2])[:2], list(things[2])[2:14]):
            loop(accelerator, things, half)
            skipped.append(accelerator.optimizer_step_was_skipped)
        steps = things[1].optimizer.skipped_steps
        return skipped, steps, things[3].scheduler.last_epoch


@pytest.mark.more
def test_fp16_scales_losses_and_holds_the_scheduler() -> None:
    for skipped, steps, scheduled in run_ranks(2, _fp16):
        assert skipped == [True, False]
        assert 1 <= steps < 7
        assert scheduled == 2 * (7 - steps), "Accelerate counts a step for each rank"


class Net(nn.Module):
    """A student, or a teacher of which only forwards are needed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.blocks(x)


def _distill(rank: int, world_size: int, options: Any, manual: bool) -> str:
    with launched(rank, world_size):
        accelerator = make(options, gradient_accumulation_steps=1)
        student, teacher = Net(0), Net(1)
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
        student, optimizer = accelerator.prepare(student, optimizer)
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        for step in range(3):
            for micro in range(2):
                x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2 * step + micro))[
                    rank::world_size
                ]

                def backward(x: torch.Tensor = x) -> None:
                    with torch.no_grad():
                        wanted = teacher(x)
                    accelerator.backward((student(x) - wanted).square().mean() / 2)

                if manual and micro == 0:
                    with accelerator.no_sync(student):
                        backward()
                else:
                    backward()
            optimizer.step()
            optimizer.zero_grad()
        return hash_of_state(accelerator.unwrap_model(student).state_dict())


@pytest.mark.more
def test_a_teacher_only_runs_forward_and_no_sync_adds_locally() -> None:
    by_hand = run_ranks(2, _distill, {"stage": 3}, True)
    locally = run_ranks(2, _distill, {"stage": 0, "accumulate": 2, "sync_each": False}, False)
    assert len({*by_hand, *locally}) == 1, "the order of adding of accumulate without sync_each"


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mixed_precision": "fp8"}, "mixed_precision is 'fp8'; expected"),
        ({"deepspeed_plugin": object()}, "deepspeed_plugin is given; expected None"),
        (
            {"kwargs_handlers": [GradScalerKwargs()]},
            "kwargs_handlers has GradScalerKwargs; expected none",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(options: dict[str, Any], match: str) -> None:
    with launched(0, 1), pytest.raises(ValueError, match=match):
        ShardcoreAccelerator(cpu=True, **options)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("ACCELERATE_USE_FSDP", "true", "the environment sets ACCELERATE_USE_FSDP=true"),
    ],
)
def test_other_engines_of_the_environment_are_refused(
    name: str, value: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with launched(0, 1), pytest.raises(ValueError, match=match):
        ShardcoreAccelerator(cpu=True)


def _compiles(**more: Any) -> tuple[list[bool], float]:
    with launched(0, 1):
        accelerator = make({"stage": 2}, **more)
        things = prepared(accelerator)
        losses, _ = loop(accelerator, things, list(things[2])[:2])
        return ["forward" in vars(block) for block in things[0].transformer.h], losses[-1]


@pytest.mark.more
@pytest.mark.parametrize("way", ["argument", "plugin", "environment"])
def test_a_dynamo_backend_compiles_each_block(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _compiles()
    if way == "environment":  # of accelerate launch
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
        found = _compiles()
    elif way == "plugin":
        found = _compiles(dynamo_plugin=TorchDynamoPlugin(backend="eager", dynamic=False))
    else:
        found = _compiles(dynamo_backend="eager")
    assert expected == ([False, False], found[1])
    assert found[0] == [True, True]


def test_two_ways_to_compile_are_refused() -> None:
    with (
        launched(0, 1),
        pytest.raises(ValueError, match=r"dynamo backend is eager, .*compile=True"),
    ):
        make({"compile": True}, dynamo_backend="eager")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate counts ranks with GPUs")
def test_ranks_that_accelerate_does_not_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with launched(0, 1):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(
            ValueError,
            match=r"started 2 ranks, but Accelerate counts 1; expected the same number \(cpu=True",
        ):
            ShardcoreAccelerator()


@pytest.mark.more
def test_a_misspelled_option_is_answered_by_the_nearest_before_a_model_is_there() -> None:
    with pytest.raises(TypeError, match=r"shard_options: 'offlod' is no.*; did you mean 'offload'"):
        ShardcoreAccelerator(cpu=True, shard_options={"offlod": "auto"})


def test_a_replaced_optimizer_is_no_warning_as_prepare_returns_the_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "shardcore")
    accelerator = ShardcoreAccelerator(
        cpu=True, mixed_precision="bf16", shard_options={"precision": torch.bfloat16}
    )
    model = nn.Linear(2, 3)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert model.weight.dtype == torch.bfloat16
    (record,) = (record for record in caplog.records if "from AdamW" in record.getMessage())
    assert record.levelname == "INFO"


def test_model_and_optimizer_are_prepared_together() -> None:
    with launched(0, 1):
        accelerator = ShardcoreAccelerator(
            cpu=True, mixed_precision="bf16", shard_options={"precision": "fp32"}
        )
        model = Net(0)
        optimizers = [
            torch.optim.AdamW(part.parameters()) for part in (model.blocks[0], model.blocks[2])
        ]
        with pytest.raises(ValueError, match=r"model args\[0\] has 2 optimizers; expected one"):
            accelerator.prepare(model, *optimizers)
        with pytest.raises(
            ValueError,
            match=r"no parameter of the AdamW is in a model of this call; expected prepare\(model, opt",
        ):
            accelerator.prepare(optimizers[0])
        with pytest.raises(
            ValueError, match="precision='fp32' with mixed_precision='bf16'; expected one"
        ):
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def test_a_low_bit_optimizer_of_another_package_is_refused_by_name() -> None:
    low_bit = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    with launched(0, 1):
        model, accelerator = Net(0), ShardcoreAccelerator(cpu=True)
        with pytest.raises(TypeError, match=r'AdamW8bit of bitsandbytes, .*state_dtype="8bit"'):
            accelerator.prepare(model, low_bit(model.parameters()))


# --- loading --------------------------------------------------------------------------------------


def empty_gpt2() -> Any:
    with init_empty_weights():
        model = tiny_gpt2()
    model.tie_weights()
    assert all(param.is_meta for param in model.parameters())
    return model


def _prepares(rank: int, world_size: int, model: Any, options: Any, trains: bool = True) -> str:
    with launched(rank, world_size):
        accelerator = make(options)
        torch.manual_seed(5)
        if trains:
            model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        else:
            model = accelerator.prepare(model)
        return hash_of_state(model.state_dict())


def _loads(rank: int, world_size: int, folder: str) -> Any:
    files = {"stage": 3, "materialize": folder}
    loaded = [_prepares(rank, world_size, empty_gpt2(), files, trains) for trains in (True, False)]
    # another seed than the folder's
    made = _prepares(rank, world_size, empty_gpt2(), {"stage": 3, "materialize": None})
    on_one_rank = tiny_gpt2() if rank == 0 else empty_gpt2()
    refused = [
        message_of(rank, world_size, _prepares, model, {"stage": 3}, trains)
        for model in (empty_gpt2(), on_one_rank)
        for trains in (True, False)
    ]
    plain = _prepares(rank, world_size, tiny_gpt2(3), {"stage": 3})
    return loaded, made, plain, refused


def test_empty_weights_are_read_from_a_folder_or_refused(tmp_path: Path) -> None:
    tiny_gpt2(3).save_pretrained(tmp_path)
    for loaded, made, plain, refused in run_ranks(2, _loads, str(tmp_path)):
        assert set(loaded) == {plain}
        assert made != plain, "random weights on request"
        for message in refused:
            assert "wte.weight is on the meta device, and materialize is not given" in message


def _placed(rank: int, world_size: int) -> list[str]:
    spread = tiny_gpt2()
    spread.hf_device_map = {"transformer": 0, "lm_head": 1}
    hooked = dispatch_model(tiny_gpt2(), {"": "cpu"}, force_hooks=True)
    # its weights are on the meta device by then: random ones would take their place
    offloaded = cpu_offload(tiny_gpt2(), torch.device("cpu"))
    messages = [
        message_of(rank, world_size, _prepares, model, {"stage": 2, "materialize": None})
        for model in (spread, hooked, offloaded)
    ]
    # one device and no hooks: an ordinary model
    alone = dispatch_model(tiny_gpt2(), {"": "cpu"})
    assert alone.hf_device_map == {"": "cpu"}
    same = _prepares(rank, world_size, alone, {"stage": 2})
    return [*messages, same, _prepares(rank, world_size, tiny_gpt2(), {"stage": 2})]


def test_device_map_is_refused_by_name() -> None:
    for spread, hooked, offloaded, alone, plain in run_ranks(2, _placed):
        assert "ValueError: shard: the model was placed by device_map over 0, 1, and" in spread
        assert "the model was placed by device_map over cpu, and Accelerate's hooks" in hooked
        assert "was placed by device_map, and Accelerate's hooks move its weights" in offloaded
        assert alone == plain
