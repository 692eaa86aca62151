"""The public configurations of tests/support/ds_configs.py: plain JSON, the keys that they use; and each of them trains."""

import copy
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import shardcore
from tests.support.deepspeed import start
from tests.support.ds_configs import CONFIGS, ready
from tests.support.models import batch_of, hash_of

# Every key that the configurations use, by section
KEYS = {
    "": """activation_checkpointing aio bf16 bfloat16 comms_config cuda_visible_devices disable_allgather flops_profiler fp16
        gradient_accumulation_steps gradient_clipping hybrid_engine monitor_config optimizer prescale_gradients scheduler
        seq_parallel_communication_data_type steps_per_print tensorboard torch_autocast train_batch_size
        train_micro_batch_size_per_gpu wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        zero_optimization""",
    "activation_checkpointing": "contiguous_memory_optimization partition_activations",
    "aio": "block_size overlap_events queue_depth single_submit thread_count",
    "bf16": "bf16_master_weights_and_grads bf16_optimizer_states enabled",
    "bfloat16": "enabled",
    "comms_config": "verbose",
    "flops_profiler": "detailed enabled module_depth output_file profile_step top_modules",
    "fp16": """auto_cast enabled fp16_master_weights_and_grads hysteresis initial_scale_power loss_scale loss_scale_window
        min_loss_scale""",
    "hybrid_engine": """enabled inference_tp_size max_out_tokens pin_parameters release_inference_cache
        tp_gather_partition_size""",
    "monitor_config": "csv_monitor enabled tag",
    "monitor_config.csv_monitor": "enabled",
    "optimizer": "params type",
    "optimizer.params": "adam_w_mode betas bias_correction eps lr torch_adam weight_decay",
    "scheduler": "params type",
    "scheduler.params": """cycle_first_stair_count cycle_first_step_size cycle_max_lr cycle_max_mom cycle_min_lr cycle_min_mom
        cycle_second_stair_count cycle_second_step_size decay_lr_rate decay_mom_rate decay_step_size lr_range_test_min_lr
        lr_range_test_staircase lr_range_test_step_rate lr_range_test_step_size total_num_steps warmup_max_lr warmup_min_lr
        warmup_num_steps""",
    "tensorboard": "enabled job_name output_path",
    "torch_autocast": "dtype enabled lower_precision_safe_modules",
    "zero_optimization": """allgather_bucket_size allgather_partitions contiguous_gradients cpu_offload
        gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance memory_efficient_linear offload_optimizer
        offload_param overlap_comm reduce_bucket_size reduce_scatter round_robin_gradients stage
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters
        stage3_max_reuse_distance stage3_param_persistence_threshold stage3_prefetch_bucket_size sub_group_size""",
    "zero_optimization.offload_optimizer": "buffer_count device fast_init nvme_path pin_memory",
    "zero_optimization.offload_param": "buffer_count buffer_size device max_in_cpu nvme_path pin_memory",
}


def _items(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str, Any]]:
    """(section, key, value) of every key."""
    for key, value in config.items():
        yield section, key, value
        if isinstance(value, dict):
            yield from _items(value, f"{section}.{key}".removeprefix("."))


def _used(configs: Mapping[str, Any]) -> dict[str, set[str]]:
    used = defaultdict(set)
    for config in configs.values():
        for section, key, _ in _items(config):
            used[section].add(key)
    return dict(used)


def _is_plain(config: Any) -> bool:
    """Whether it comes back from a JSON file as it is: a tuple, a key that is no text, or another type would not."""
    try:
        return repr(json.loads(json.dumps(config))) == repr(config)
    except TypeError:
        return False


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_plain_json(name: str) -> None:
    assert _is_plain(CONFIGS[name])


@pytest.mark.parametrize("value", [(0.9, 0.999), {1: 2}, {1, 2}, object()])
def test_what_is_not_plain_json_is_seen(value: object) -> None:
    assert not _is_plain({"optimizer": {"params": {"betas": value}}})


def test_the_keys_that_they_use() -> None:
    assert _used(CONFIGS) == {section: set(keys.split()) for section, keys in KEYS.items()}


def test_a_new_key_is_seen() -> None:
    other = {"other": {"zero_optimization": {"offload_param": {"ratio": 1.0}}}}
    assert _used({**CONFIGS, **other}) != _used(CONFIGS)


def test_all_stages_tiers_and_schedules_are_there() -> None:
    values = defaultdict(set)
    for config in CONFIGS.values():
        for section, key, value in _items(config):
            if not isinstance(value, dict | list):
                values[f"{section}.{key}"].add(value)
    assert values["zero_optimization.stage"] == {0, 1, 2, 3}
    assert values["zero_optimization.offload_optimizer.device"] == {"none", "cpu", "nvme"}
    assert values["zero_optimization.offload_param.device"] == {"none", "cpu", "nvme"}
    assert values["scheduler.type"] == {"WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest"}
    assert values["optimizer.type"] == {"Adam", "AdamW"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_ready_one_has_numbers_that_agree(name: str) -> None:
    before = copy.deepcopy(CONFIGS[name])
    config = ready(name, "/tmp/nvme", world_size=2)

    assert CONFIGS[name] == before
    assert "auto" not in [value for _, _, value in _items(config)]
    assert {value for _, key, value in _items(config) if key == "nvme_path"} <= {"/tmp/nvme", None}
    samples = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2
    assert config.get("train_batch_size", samples) == samples <= 8
    enabled = [config.get(key, {}).get("enabled", False) for key in ("fp16", "bf16", "bfloat16")]
    assert sum(enabled) <= 1
    assert set(enabled) <= {True, False}
    kept = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    assert set(config) | kept == set(before) | kept


# --- they train -------------------------------------------------------------------------------------------------------


@pytest.mark.cases(11)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write there
    config = ready(name, str(tmp_path))
    engine = start(config, optimizer=None if "optimizer" in config else shardcore.FusedAdam)
    before = hash_of(engine.module.state_dict().values())
    for micro_step in range(4 * engine.gradient_accumulation_steps()):  # the first two steps of a warm-up have lr 0
        x, y = batch_of(micro_step, 0, 0)
        engine.backward(((engine(x.half() if engine.fp16_enabled() else x).float() - y) ** 2).mean())
        engine.step()
    assert engine.global_steps == 4
    assert (hash_of(engine.module.state_dict().values()) != before) == (engine.skipped_steps < 3)
    zero = config.get("zero_optimization", {})
    assert engine.zero_optimization_stage() == (zero.get("stage", 0) if isinstance(zero, dict) else int(zero))
