"""from_pretrained after the training arguments of stage 3: each rank makes its part alone, and
training has the bits of a model that was whole.
"""

import gc
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")

from transformers import AutoModelForCausalLM, Trainer  # noqa: E402
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled  # noqa: E402

from shardcore.deepspeed import zero_init  # noqa: E402
from shardcore.engine.pieces import has_piece, is_partitioned  # noqa: E402
from shardcore.integrations.transformers import (  # noqa: E402
    ShardcoreTrainer,
    ShardcoreTrainingArguments,
)
from tests.support.huggingface import (  # noqa: E402
    LORA,
    forget_deepspeed,
    hash_of_state,
    launched,
    rows,
    seed_everything,
    tiny,
    tiny_gpt2,
)
from tests.support.logs import logged  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.torch_memory import recorded_memory  # noqa: E402

ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
MUON = {"type": "Muon", "params": {"lr": "auto", "adam_lr": 1e-3}}


def config(stage: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        **more,
    }


def arguments(out: str, deepspeed: Any = None, kind: Any = ShardcoreTrainingArguments) -> Any:
    return kind(
        output_dir=out,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        learning_rate=1e-2,
        deepspeed=deepspeed,
    )


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="tests with PEFT")
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


def resized(model: Any) -> Any:
    torch.manual_seed(5)
    model.resize_token_embeddings(48, mean_resizing=False)
    return model


def broken(model: Any) -> Any:
    """The broken twin: one element on one rank."""
    param = next(model.parameters())
    if torch.distributed.get_rank() == 1:
        param.ds_tensor[3] += 1e-2
    return model


def loaded(folder: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder)


def train(
    rank: int,
    world_size: int,
    folder: str,
    change: Any,
    in_pieces: bool,
    optimizer: dict[str, Any],
    resume: str | None = None,
) -> tuple[str, list[float]]:
    forget_deepspeed()
    with launched(rank, world_size):
        seed_everything(0)
        plain = None if in_pieces else loaded(folder)
        args = arguments(folder + "/out", config(**optimizer))
        model = loaded(folder) if in_pieces else plain
        assert all(is_partitioned(param) == in_pieces for param in model.parameters())
        if change is not None:
            model = change(model)
        trainer = ShardcoreTrainer(model=model, args=args, train_dataset=rows(16))
        assert is_deepspeed_zero3_enabled(), "for reference models that trainers load"
        trainer.train(resume_from_checkpoint=resume)
        assert not is_deepspeed_zero3_enabled(), "one rank may load a model again"
        assert not any(has_piece(param) for param in trainer.model.parameters())
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return hash_of_state(trainer.model.state_dict()), losses


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("change", "optimizer"),
    [
        (None, {"optimizer": ADAMW}),
        (None, {"optimizer": MUON}),
        (resized, {}),
        (with_lora, {}),
    ],
)
def test_pieces_train_to_the_bits_of_a_whole_model(
    tmp_path: Path, change: Any, optimizer: dict[str, Any]
) -> None:
    tiny_gpt2(3).save_pretrained(tmp_path)
    run = (train, str(tmp_path), change)
    whole = run_ranks(2, *run, False, optimizer)
    assert run_ranks(2, *run, True, optimizer) == whole
    if change is None:
        assert run_ranks(2, train, str(tmp_path), broken, True, optimizer) != whole


def _saved_by_plain_trainer(rank: int, world_size: int, folder: str) -> str:
    with launched(rank, world_size):
        seed_everything(0)
        args = arguments(folder + "/plain", kind=transformers.TrainingArguments)
        args.max_steps, args.save_strategy, args.save_steps = 1, "steps", 1
        Trainer(model=tiny_gpt2(4), args=args, train_dataset=rows(16)).train()
        return folder + "/plain/checkpoint-1"


@pytest.mark.more
def test_pieces_resume_from_a_checkpoint_of_plain_trainer(tmp_path: Path) -> None:
    tiny_gpt2(3).save_pretrained(tmp_path)
    checkpoint = run_ranks(2, _saved_by_plain_trainer, str(tmp_path))[0]
    whole, pieces = (
        run_ranks(2, train, str(tmp_path), None, in_pieces, {}, checkpoint)
        for in_pieces in (False, True)
    )
    assert pieces == whole
    assert pieces != run_ranks(2, train, str(tmp_path), None, True, {})


# --- when transformers partitions -----------------------------------------------------------------


def _states(rank: int, world_size: int, out: str) -> list[tuple[bool, bool]]:
    """Whether transformers partitions, and whether `deepspeed` is in sys.modules."""
    before, states = set(sys.modules), []

    def note() -> None:
        gc.collect()
        states.append((is_deepspeed_zero3_enabled(), "deepspeed" in sys.modules))

    with launched(rank, world_size):
        args = [arguments(out, config(2))]
        note()
        args = [arguments(out, config(3))]
        note()
        args.append(arguments(out, config(3)))
        note()
        del args[0]
        note()
        del args[0]
        note()
    assert not {name for name in sys.modules if name.startswith("deepspeed")} - before
    return states


def test_only_arguments_of_stage_3_count_as_long_as_they_exist(tmp_path: Path) -> None:
    yes, no = (True, True), (False, False)
    assert run_ranks(2, _states, str(tmp_path)) == [[no, yes, yes, yes, no]] * 2
    assert run_ranks(1, _states, str(tmp_path)) == [[no] * 5], "nothing to partition"


def _with_real_deepspeed(rank: int, world_size: int, folder: str, ranks: int) -> list[bool]:
    """ranks: on how many Accelerate has imported an installed DeepSpeed before."""
    forget_deepspeed()
    real, part = ModuleType("deepspeed"), ModuleType("deepspeed.comm")
    if rank < ranks:
        sys.modules |= {"deepspeed": real, "deepspeed.comm": part}
    try:
        with launched(rank, world_size):
            args = arguments(folder + "/out", config())
            in_pieces = all(map(has_piece, loaded(folder).parameters()))
            del args
            gc.collect()
        found = [sys.modules.get(name) for name in ("deepspeed", "deepspeed.comm")]
        return [in_pieces, found == ([real, part] if rank < ranks else [None, None])]
    finally:
        forget_deepspeed()


def test_a_deepspeed_that_is_imported_comes_back(tmp_path: Path) -> None:
    tiny_gpt2(3).save_pretrained(tmp_path)
    for ranks in (1, 2):
        assert run_ranks(2, _with_real_deepspeed, str(tmp_path), ranks) == [[True, True]] * 2


def _load_in_16_bits(rank: int, world_size: int, folder: str) -> list[list[str]]:
    forget_deepspeed()
    said = []
    with launched(rank, world_size):
        for bf16 in ({"enabled": "auto"}, {"enabled": True}, None):
            sections = {} if bf16 is None else {"bf16": bf16}
            args = arguments(folder + "/out", config(**sections))
            with logged() as messages:
                loaded(folder)
            said.append([each for each in messages if "will refuse" in each])
            del args
    return said


def test_weights_in_16_bits_that_training_refuses_are_reported_before_they_are_read(
    tmp_path: Path,
) -> None:
    tiny_gpt2(3).bfloat16().save_pretrained(tmp_path)
    (auto, enabled, without), others = run_ranks(2, _load_in_16_bits, str(tmp_path))
    assert len(auto) == len(without) == 1
    assert "made in bfloat16" in auto[0]
    assert "TrainingArguments(bf16=True)" in auto[0]
    assert enabled == []
    assert others == [[], [], []], "rank 0 speaks"


# --- memory ---------------------------------------------------------------------------------------

WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}


def _peak(rank: int, world_size: int, folder: str, in_pieces: bool) -> tuple[int, int]:
    """Return the peak of from_pretrained and of resuming, and the bytes of all weights."""
    forget_deepspeed()
    with launched(rank, world_size), pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_init, "WHOLE_BYTES", 0)
        args = arguments(folder + "/out", config(3 if in_pieces else 2))
        with recorded_memory() as memory:
            model = loaded(folder)
            if in_pieces:  # as train(resume_from_checkpoint=folder) does first
                trainer = ShardcoreTrainer(model=model, args=args)
                trainer._load_from_checkpoint(folder)
        whole = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()) * 4
        del args
        return memory.peak, whole


def test_a_rank_never_has_the_whole_model(tmp_path: Path) -> None:
    tiny("Llama", **WIDE).save_pretrained(tmp_path)
    for in_pieces in (True, False):
        for peak, whole in run_ranks(2, _peak, str(tmp_path), in_pieces):
            assert (peak <= 0.7 * whole) == in_pieces, (peak, whole)
