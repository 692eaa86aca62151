"""The real Trainer over sharded models: its numbers are those of plain Trainer under DDP, and
placement changes no bit.
"""

import copy
import json
import logging
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments  # noqa: E402

import shardcore  # noqa: E402
from shardcore.deepspeed.auto import resolve  # noqa: E402
from shardcore.integrations.transformers import (  # noqa: E402
    ShardcoreTrainer,
    ShardcoreTrainerMixin,
    ShardcoreTrainingArguments,
    values_of,
)
from tests.support.huggingface import (  # noqa: E402
    VOCAB,
    hash_of_state,
    launched,
    message_of,
    rows,
    seed_everything,
    tiny_gpt2,
)
from tests.support.ranks import run_fresh, run_ranks  # noqa: E402

STEPS = 4
HOST = {"optimizer": "cpu"}
Result = dict[str, Any]


def arguments(out: str, kind: Any = TrainingArguments, **more: Any) -> Any:
    """Four steps of two micro-batches of two samples on each rank, clipped by the way."""
    defaults = {
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "log_level": "error",
    }
    return kind(output_dir=out, **{**defaults, **more})


def result_of(trainer: Any) -> Result:
    """Return losses, norms and the hash of the whole weights, which every rank has to be able to
    make.
    """
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "eval": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "hash": hash_of_state(trainer.model.state_dict()),
    }


def train(
    rank: int,
    world_size: int,
    out: str,
    kind: Any,
    options: Any,
    changes: dict[str, Any],
    resume: Any = None,
) -> Result:
    with launched(rank, world_size):
        seed_everything(0)
        sharded = {} if options is None else {"shard_options": options}
        args = arguments(out, **changes)
        trainer = kind(
            model=tiny_gpt2(),
            args=args,
            train_dataset=rows(64),
            eval_dataset=rows(12, 2),
            **sharded,
        )
        trainer.train(resume_from_checkpoint=resume)
        return result_of(trainer)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What plain Trainer has under DDP."""
    return run_ranks(2, train, str(tmp_path_factory.mktemp("ddp")), Trainer, None, {})[0]  # type: ignore[no-any-return]


def close(ours: list[float], theirs: list[float]) -> bool:
    return ours == pytest.approx(theirs, rel=1e-5)


# --- training -------------------------------------------------------------------------------------


def test_a_max_grad_norm_of_zero_is_no_clipping(tmp_path: Path) -> None:
    """As in Trainer."""
    options = {"stage": 2}
    hashes = [
        run_ranks(2, train, str(tmp_path), ShardcoreTrainer, options, {"max_grad_norm": limit})[0][
            "hash"
        ]
        for limit in (0.0, 1e9, 1e-3)
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_losses_and_norms_are_those_of_ddp_and_one_hash_at_every_stage_and_tier(
    tmp_path: Path, ddp: Result
) -> None:
    placements = [
        {"stage": 0, "sync_each": True},
        {"stage": 2, "offload": HOST},
        {
            "stage": 3,
            "offload": {**HOST, "params": "cpu", "gradients": "cpu"},
            "overlap_step": True,
        },
    ]
    found = [
        each
        for options in placements
        for each in run_ranks(2, train, str(tmp_path), ShardcoreTrainer, options, {})
    ]
    for ours in found:
        assert len(ours["norms"]) == STEPS
        assert close(ours["losses"], ddp["losses"])
        assert close(ours["norms"], ddp["norms"])
    assert len({ours["hash"] for ours in found}) == 1
    assert min(ddp["norms"]) > 0.5, "so that clipping has an effect"


def moved(state: dict[str, torch.Tensor]) -> torch.Tensor:
    start = tiny_gpt2().state_dict()
    return torch.cat([(state[name] - start[name]).flatten() for name in start])


class NoClip(ShardcoreTrainer):
    """A twin that clips nothing, and shows the true norm all the same."""

    def _options(self, options: Any) -> dict[str, Any]:
        return {**super()._options(options), "clip_grad_norm": None}


def train_clipped(
    rank: int, world_size: int, out: str, kind: Any, options: Any
) -> tuple[list[float], torch.Tensor]:
    """A large epsilon: else Adam would undo a constant factor."""
    with launched(rank, world_size):
        sharded = {} if options is None else {"shard_options": options}
        args = arguments(out, max_grad_norm=1e-3, adam_epsilon=1e-2, weight_decay=0.0)
        trainer = kind(model=tiny_gpt2(), args=args, train_dataset=rows(64), **sharded)
        trainer.train()
        return result_of(trainer)["norms"], moved(trainer.model.state_dict())


@pytest.mark.more
def test_clipping_at_a_thousandth_moves_weights_as_without_sharding(tmp_path: Path) -> None:
    norms, expected = run_ranks(2, train_clipped, str(tmp_path), Trainer, None)[0]
    assert min(norms) > 100e-3

    def same(kind: Any, stage: int) -> bool:
        results = run_ranks(2, train_clipped, str(tmp_path), kind, {"stage": stage})
        assert all(close(ours[:1], norms[:1]) for ours, _ in results), (
            "the log has the norm from before"
        )
        return all(
            (movement - expected).abs().max() < 1e-4 * expected.abs().max()
            for _, movement in results
        )

    assert same(ShardcoreTrainer, 3)
    assert not same(NoClip, 3), "a no-op clip"


@pytest.mark.more
def test_bf16_and_gradient_checkpointing(tmp_path: Path, ddp: Result) -> None:
    """Weights in bfloat16 with float32 masters: near autocast's numbers, and checkpointing
    changes no bit.
    """
    hashes = set()
    for kwargs in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        more = {
            "bf16": True,
            "gradient_checkpointing": kwargs is not None,
            "gradient_checkpointing_kwargs": kwargs,
        }
        ours = run_ranks(2, train, str(tmp_path), ShardcoreTrainer, {"stage": 3}, more)
        hashes |= {each["hash"] for each in ours}
        assert ours[0]["losses"] == pytest.approx(ddp["losses"], rel=0.02)
        assert not close(ours[0]["losses"], ddp["losses"])
    assert len(hashes) == 1


@pytest.mark.more
def test_fp16_skips_overflows_and_holds_the_scheduler(tmp_path: Path) -> None:
    results = run_ranks(2, _fp16, str(tmp_path))
    skipped, rates, norms = results[0]
    assert (skipped, rates) == results[1][:2]
    assert skipped == 2
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2, 0.75e-2]), (
        "logged before each step; two did not count"
    )
    assert torch.tensor(norms).isfinite().tolist() == [False, False, True, True]


def _fp16(rank: int, world_size: int, out: str) -> tuple[int, list[float], list[float]]:
    with launched(rank, world_size):
        options = {
            "precision": "fp16",
            "loss_scale": shardcore.LossScale(initial_power=19, hysteresis=1),
        }
        trainer = ShardcoreTrainer(
            model=tiny_gpt2(),
            args=arguments(out),
            train_dataset=rows(64),
            shard_options={**options, "stage": 1},
        )
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        skipped = trainer.optimizer.optimizer.skipped_steps
        return (
            skipped,
            [entry["learning_rate"] for entry in history],
            [entry["grad_norm"] for entry in history],
        )


# --- checkpoints ----------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.more
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    more = {**SAVING, "bf16": True}
    whole = run_ranks(2, train, str(tmp_path), ShardcoreTrainer, {"stage": 2}, more)
    folder = tmp_path / "checkpoint-2"
    assert {path.name for path in folder.iterdir()} >= {
        "model.safetensors",
        "config.json",
        "trainer_state.json",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "latest",
        "global_step2",
    }
    assert not list(folder.glob("optimizer*"))
    resumed = run_ranks(2, train, str(tmp_path), ShardcoreTrainer, {"stage": 3}, more, str(folder))
    assert resumed[0]["losses"][-2:] == whole[0]["losses"][-2:]
    assert {each["hash"] for each in resumed} == {whole[0]["hash"]}
    last = run_ranks(
        2, train, str(tmp_path), ShardcoreTrainer, {"stage": 1, "sync_each": True}, more, True
    )
    assert last[0]["hash"] == whole[0]["hash"], "resumed after the last step"
    shutil.rmtree(folder / "global_step2")
    more_args = (str(tmp_path), ShardcoreTrainer, {"stage": 2}, more, str(folder))
    assert all(
        "FileNotFoundError" in message for message in run_ranks(2, message_of, train, *more_args)
    )


@pytest.mark.more
def test_a_checkpoint_of_plain_trainer_is_resumed(tmp_path: Path) -> None:
    ddp = run_ranks(2, train, str(tmp_path), Trainer, None, SAVING)[0]
    folder = str(tmp_path / "checkpoint-2")
    ours = run_ranks(
        2, train, str(tmp_path / "ours"), ShardcoreTrainer, {"stage": 3}, SAVING, folder
    )
    assert close(ours[0]["losses"][-2:], ddp["losses"][-2:])
    assert close(ours[0]["norms"][-2:], ddp["norms"][-2:])


@pytest.mark.more
def test_whole_weights_are_for_from_pretrained(tmp_path: Path) -> None:
    """In the dtype that they train in, and tied ones once."""
    more = {**SAVING, "bf16": True, "save_only_model": True, "max_steps": 2}
    run_ranks(2, train, str(tmp_path), ShardcoreTrainer, {"stage": 3}, more)
    folder = tmp_path / "checkpoint-2"
    assert not (folder / "latest").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (
        moved({name: value.float() for name, value in model.state_dict().items()}).abs().max()
        > 1e-2
    )


class _SavesOnFirstRank:
    """save_model of transformers before 5.23."""

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            self._save(output_dir)


class _OlderTrainer(ShardcoreTrainerMixin, _SavesOnFirstRank, Trainer):
    pass


def _saves_with_older_transformers(rank: int, world_size: int, out: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardcore.integrations.transformers._SAVES_ON_FIRST_RANK", True)
        train(
            rank,
            world_size,
            out,
            _OlderTrainer,
            {"stage": 3},
            {"save_strategy": "steps", "save_steps": 2, "max_steps": 2},
        )


@pytest.mark.more
def test_older_transformers_save_too(tmp_path: Path) -> None:
    run_ranks(2, _saves_with_older_transformers, str(tmp_path))
    folder = tmp_path / "checkpoint-2"
    assert (folder / "latest").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert moved(model.state_dict()).abs().max() > 1e-2


def _saves_on_one_rank(rank: int, world_size: int, out: str) -> None:
    with launched(rank, world_size):
        trainer = ShardcoreTrainer(
            model=tiny_gpt2(),
            args=arguments(out, max_steps=1),
            train_dataset=rows(64),
            shard_options={"stage": 2},
        )
        trainer.train()
        if rank == 0:
            trainer.save_model()
        else:
            trainer.evaluate(rows(4))


@pytest.mark.more
def test_a_save_on_one_rank_only_raises_on_all(tmp_path: Path) -> None:
    messages = run_ranks(2, message_of, _saves_on_one_rank, str(tmp_path))
    assert any(
        "ranks wait for different things" in message and "rank 0 for save_pretrained" in message
        for message in messages
    )
    assert all(message.startswith("RuntimeError") for message in messages)


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.more
def test_evaluation_and_the_best_model_at_the_end(tmp_path: Path) -> None:
    more = {
        **SAVING,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "greater_is_better": True,
        "save_total_limit": 1,
    }
    ddp = run_ranks(2, train, str(tmp_path / "ddp"), Trainer, None, more)[0]
    assert ddp["eval"][0] > ddp["eval"][1], "the best is not the last"
    ours = run_ranks(2, train, str(tmp_path), ShardcoreTrainer, {"stage": 3}, more)
    assert close(ours[0]["eval"], ddp["eval"])
    best = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert {each["hash"] for each in ours} == {hash_of_state(best.state_dict())}


def _without_training(
    rank: int, world_size: int, out: str, kind: Any, options: Any, then_train: bool
) -> Any:
    with launched(rank, world_size):
        sharded = {} if options is None else {"shard_options": options}
        data = rows(64) if then_train else None
        trainer = kind(model=tiny_gpt2(), args=arguments(out), train_dataset=data, **sharded)
        loss = trainer.evaluate(rows(12, 2))["eval_loss"]
        logits = trainer.predict(rows(5, 3)).predictions
        if then_train:
            trainer.train()
        return loss, torch.as_tensor(logits), result_of(trainer)["hash"]


@pytest.mark.more
def test_evaluate_and_predict_before_and_without_training(tmp_path: Path) -> None:
    expected_loss, expected, start = run_ranks(
        2, _without_training, str(tmp_path), Trainer, None, False
    )[0]
    for then_train in (False, True):
        for loss, logits, after in run_ranks(
            2, _without_training, str(tmp_path), ShardcoreTrainer, {"stage": 3}, then_train
        ):
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            torch.testing.assert_close(logits, expected)
            assert (after == start) != then_train


class Generating(ShardcoreTrainerMixin, Seq2SeqTrainer):
    """Generates in place of evaluating losses."""


def _generate(rank: int, world_size: int, out: str, options: dict[str, Any]) -> Any:
    with launched(rank, world_size):
        config = transformers.T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            initializer_factor=8.0,
        )
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(config)
        args = arguments(
            out, Seq2SeqTrainingArguments, predict_with_generate=True, per_device_eval_batch_size=1
        )
        data = [
            {"input_ids": torch.arange(8) * (3 + index) % VOCAB, "labels": torch.arange(7)}
            for index in range(6)
        ]
        trainer = Generating(model=model, args=args, train_dataset=data, shard_options={"stage": 3})
        model.generation_config.eos_token_id = list(range(10, VOCAB, 2))
        predictions = torch.as_tensor(
            trainer.predict(data, max_new_tokens=12, **options).predictions
        )
        # as TRL's GRPO does
        own = trainer.model.generate(data[rank]["input_ids"][None], max_new_tokens=12, **options)[0]
        with shardcore.full_params(trainer.model):
            copied = copy.deepcopy(trainer.model)
            if rank == 0:  # alone, as no forward gathers
                trainer.model.generate(data[0]["input_ids"][None], max_new_tokens=12)
        if rank == 0:
            copied.generate(data[0]["input_ids"][None], max_new_tokens=12)
        return predictions, own.tolist()


@pytest.mark.more
def test_ranks_generate_until_all_are_done(tmp_path: Path) -> None:
    alone, _ = run_ranks(1, _generate, str(tmp_path), {})[0]
    lengths = [row.count_nonzero().item() for row in alone]
    assert any(a != b for a, b in zip(lengths[::2], lengths[1::2], strict=True)), (
        "ranks are done at different times"
    )
    for rank, (tokens, own) in enumerate(run_ranks(2, _generate, str(tmp_path), {})):
        assert torch.equal(tokens, alone)
        assert own == alone[rank, : len(own)].tolist()
        assert len(own) == len(alone[rank]) or not alone[rank, len(own) :].any()
    messages = run_ranks(2, message_of, _generate, str(tmp_path), {"synced_gpus": False})
    assert any("ranks wait for different things" in message for message in messages), messages


# --- a DeepSpeed configuration --------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
}


def _configured(rank: int, world_size: int, out: str, kind: Any, config: Any) -> Any:
    with launched(rank, world_size):
        args = arguments(out, kind, deepspeed=config)
        trainer = ShardcoreTrainer(model=tiny_gpt2(), args=args, train_dataset=rows(64))
        trainer.train()
        assert args.deepspeed == config
        assert trainer.accelerator.distributed_type != "DEEPSPEED"
        decay = [group["weight_decay"] for group in trainer.optimizer.param_groups]
        return decay, result_of(trainer), trainer.accelerator.shard_options


def _one_group(rank: int, world_size: int, out: str) -> Result:
    with launched(rank, world_size):
        model = tiny_gpt2()
        optimizer = shardcore.FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
        trainer = ShardcoreTrainer(
            model=model,
            args=arguments(out),
            train_dataset=rows(64),
            optimizers=(optimizer, None),
            shard_options={"stage": 2},
        )
        trainer.train()
        return result_of(trainer)


def test_a_deepspeed_configuration_says_how_to_shard(tmp_path: Path) -> None:
    """As a file, and without its optimizer; of transformers' own arguments, too, which need
    DeepSpeed for it.
    """
    expected = run_ranks(2, _one_group, str(tmp_path))[0]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    for decay, ours, options in run_ranks(
        2, _configured, str(tmp_path), ShardcoreTrainingArguments, str(path)
    ):
        assert decay == [0.1], "as with DeepSpeed, whose optimizer knows of no groups"
        assert ours == expected
        assert (options["stage"], options["offload"]["optimizer"], options["precision"]) == (
            2,
            "cpu",
            "fp32",
        )
        assert (options["accumulate"], options["clip_grad_norm"]) == (2, 0.5)
    without = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    grouped = run_ranks(2, train, str(tmp_path), ShardcoreTrainer, {"stage": 2}, {})[0]
    kind = TrainingArguments if find_spec("deepspeed") else ShardcoreTrainingArguments
    for decay, ours, _ in run_ranks(2, _configured, str(tmp_path), kind, without):
        assert decay == [0.1, 0.0]
        assert ours == grouped


def test_a_configurations_muon_has_its_groups(tmp_path: Path) -> None:
    config = {**CONFIG, "optimizer": {"type": "Muon", "params": {"lr": "auto", "adam_lr": 1e-3}}}
    decay, ours, options = run_ranks(
        1, _configured, str(tmp_path), ShardcoreTrainingArguments, config
    )[0]
    assert decay == [0.0, 0.0], "matrices by Muon, the rest by Adam"
    assert len(ours["losses"]) == STEPS
    assert "gradients" not in options["offload"]


def _without_deepspeed(out: str) -> tuple[bool, int, list[str]]:
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # an import of it is an ImportError
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardcore").addHandler(handler)
    with launched(0, 1):
        args = arguments(out, ShardcoreTrainingArguments, deepspeed=json.dumps(CONFIG))
        trainer = ShardcoreTrainer(model=tiny_gpt2(), args=args, train_dataset=rows(64))
        trainer.train()
        trainer.train()  # again, with the same sharded model
        return args.deepspeed == CONFIG, trainer.state.global_step, messages


@pytest.mark.more
def test_no_deepspeed_is_needed_and_the_log_says_what_auto_is(tmp_path: Path) -> None:
    config, steps, messages = run_fresh(_without_deepspeed, str(tmp_path))
    assert (config, steps) == (True, STEPS)
    (said,) = (message for message in messages if "auto" in message)
    assert 'config optimizer.params.lr "auto" is 0.01' in said


@pytest.mark.more
def test_auto_is_resolved_as_transformers_does(tmp_path: Path) -> None:
    """Its own code: HfTrainerDeepSpeedConfig."""
    pytest.importorskip(
        "deepspeed", reason="compared with transformers' own code, which needs DeepSpeed"
    )
    from transformers.integrations.deepspeed import (
        HfTrainerDeepSpeedConfig,
        unset_hf_deepspeed_config,
    )

    buckets = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    config = {
        **CONFIG,
        "fp16": {"enabled": "auto"},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(
                ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
            ),
        },
        "zero_optimization": {"stage": 3, **dict.fromkeys(buckets, "auto")},
    }
    args = arguments(
        str(tmp_path),
        bf16=True,
        adam_beta2=0.98,
        adam_epsilon=1e-7,
        warmup_steps=0.1,
        gradient_accumulation_steps=5,
    )
    model: Any = type(
        "Model", (), {"config": transformers.LlamaConfig(hidden_size=48, num_attention_heads=2)}
    )()
    try:
        theirs = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
        theirs.trainer_config_process(args)
        theirs.trainer_config_finalize(args, model, 120)
    finally:
        unset_hf_deepspeed_config()
    assert resolve(config, values_of(args, model, 120))[0] == theirs.config
    assert (
        resolve(config, {**values_of(args, model, 120), "scheduler.params.total_num_steps": 121})[0]
        != theirs.config
    )


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "changes", "match"),
    [
        (
            {"accumulate": 2},
            {},
            "shard_options has accumulate; expected it as gradient_accumulation_steps",
        ),
        (
            {"stage": 2},
            {"deepspeed": CONFIG},
            "shard_options is given, and the training arguments set deepspeed",
        ),
        (
            None,
            {"deepspeed": {**CONFIG, "gradient_clipping": 2.0}},
            "gradient_clipping is 2.0; expected 0.5, as the training",
        ),
        (
            None,
            {"deepspeed": {**CONFIG, "zero_optimization": {"sub_groups": 1}}},
            "sub_groups is unknown",
        ),
        ({}, {"auto_find_batch_size": True}, "set auto_find_batch_size=True; expected none"),
        ({}, {"bf16_full_eval": True}, "set bf16_full_eval=True; expected none"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, options: Any, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        ShardcoreTrainer(
            model=tiny_gpt2(),
            args=arguments(str(tmp_path), ShardcoreTrainingArguments, **changes),
            train_dataset=rows(4),
            shard_options=options,
        )


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_32bit", "adamw_torch_4bit"])
def test_low_bit_optimizers_are_refused_by_name(tmp_path: Path, optim: str) -> None:
    args = arguments(str(tmp_path), optim=optim)
    trainer = ShardcoreTrainer(model=tiny_gpt2(), args=args, train_dataset=rows(8))
    with pytest.raises(ValueError, match=f'optim="{optim}", .*state_dtype="8bit"'):
        trainer.train()


def _trains(rank: int, world_size: int, model: Any, out: str, options: Any) -> str:
    with launched(rank, world_size):
        seed_everything(0)
        trainer = ShardcoreTrainer(
            model=model,
            args=arguments(out, max_steps=1),
            train_dataset=rows(64),
            shard_options=options,
        )
        trainer.train()
        return hash_of_state(model.state_dict())


def _from_meta(rank: int, world_size: int, out: str, folder: str) -> tuple[str, str, str]:
    with torch.device("meta"):
        first, second = tiny_gpt2(), tiny_gpt2()
    files = {"stage": 3, "materialize": folder}
    loaded = _trains(rank, world_size, first, out, files)
    refused = message_of(rank, world_size, _trains, second, out, {"stage": 3})
    return loaded, refused, _trains(rank, world_size, tiny_gpt2(3), out, {"stage": 3})


@pytest.mark.more
def test_a_model_on_the_meta_device_is_read_from_a_folder_or_refused(tmp_path: Path) -> None:
    tiny_gpt2(3).save_pretrained(tmp_path)
    for loaded, refused, plain in run_ranks(2, _from_meta, str(tmp_path / "out"), str(tmp_path)):
        assert loaded == plain
        assert "wte.weight is on the meta device, and materialize is not given" in refused


@pytest.mark.more
def test_a_model_that_deepspeed_has_partitioned_is_refused(tmp_path: Path) -> None:
    model = tiny_gpt2()
    model.transformer.wpe.weight.ds_id = 3
    trainer = ShardcoreTrainer(model=model, args=arguments(str(tmp_path)), train_dataset=rows(8))
    with pytest.raises(ValueError, match=r"wpe\.weight was made under deepspeed\.zero\.Init"):
        trainer.train()


def _compiled(rank: int, world_size: int, out: str) -> tuple[list[str], list[bool]]:
    hashes, compiled = [], []
    for changes in ({}, {"torch_compile_backend": "eager", "torch_compile_mode": "default"}):
        with launched(rank, world_size):
            seed_everything(0)
            args = arguments(out, **changes)
            trainer = ShardcoreTrainer(
                model=tiny_gpt2(),
                args=args,
                train_dataset=rows(64),
                shard_options={"stage": 3},
            )
            trainer.train()
            hashes.append(result_of(trainer)["hash"])
            compiled += ["forward" in vars(block) for block in trainer.model.transformer.h]
    return hashes, compiled


@pytest.mark.more
def test_torch_compile_compiles_each_block(tmp_path: Path) -> None:
    for hashes, compiled in run_ranks(2, _compiled, str(tmp_path)):
        assert hashes[0] == hashes[1]
        assert compiled == [False, False, True, True]
