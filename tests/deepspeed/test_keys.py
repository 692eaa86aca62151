"""The table of DeepSpeed's keys: kinds, spellings, what is off, and what DeepSpeed itself has."""

import inspect
import json
from typing import Any

import pytest

from shardcore.deepspeed.config import read_config
from shardcore.deepspeed.keys import KEYS, SECTIONS, canonical, is_note

BASE = {"train_micro_batch_size_per_gpu": 1}
OFF = {
    "amp": {"enabled": False},
    "elasticity": False,
    "autotuning": {"enabled": False, "fast": True},
    "compile": {"deepcompile": False},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
    "data_efficiency": {"enabled": False, "data_routing": {"enabled": True}},
    "hybrid_engine": {},
    "tensor_parallel": {"autotp_size": 1},
    "zero_optimization": {"zero_quantized_weights": False, "mics_shard_size": -1},
}


def test_what_is_off_is_no_problem_and_needs_no_word() -> None:
    assert read_config(BASE | OFF).accepted == ()


def test_every_key_has_a_kind_and_says_why() -> None:
    assert {key.kind for key in KEYS.values()} == {"honoured", "accepted", "refused", "removed"}
    assert all(key.note for key in KEYS.values())
    assert not set(KEYS) & SECTIONS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("amp", {"enabled": True}),
        ("amp", {"opt_level": "O1"}),
        ("compression_training", {"weight_quantization": {"shared_parameters": {"enabled": True}}}),
        ("compression_training", {"layer_reduction": {}}),
        ("sparse_attention", {"mode": "fixed"}),
        ("compile.deepcompile", True),
        ("compile.passes", ["z3"]),
    ],
)
def test_what_is_on_is_refused(key: str, value: Any) -> None:
    assert KEYS[key].kind in ("refused", "removed")
    assert not KEYS[key].is_off(value)
    section, _, name = key.rpartition(".")
    with pytest.raises(ValueError, match=f"config {key} is not supported"):
        read_config(BASE | {section or key: {name: value} if section else value})


def test_a_section_compile_alone_is_accepted_with_what_to_call() -> None:
    section = {"deepcompile": False, "enabled": True, "backend": "inductor", "debug_log": True}
    lines = read_config(BASE | {"compile": section}).accepted
    assert any("compile.backend" in line and "engine.compile(" in line for line in lines)
    assert any("compile.debug_log" in line for line in lines)


def test_notes_are_ignored_as_in_deepspeed() -> None:
    assert all(
        map(
            is_note, ("_comment", "comment", "__why", "_Comment2", "comms_config", "monitor_config")
        )
    )
    assert not any(map(is_note, ("communication_data_type", "optimizer", "monitor")))


def test_every_spelling_is_one_key() -> None:
    assert (
        canonical("zero_optimization.stage3_max_live_parameters")
        == "zero_optimization.max_live_parameters"
    )
    assert canonical("bfloat16") == "bf16"
    assert canonical("zero_optimization.stage3_gather_fp16_weights_on_model_save") in KEYS
    assert all(canonical(path) == path for path in KEYS)


def test_deepspeeds_own_keys_are_all_known() -> None:
    """Fields of DeepSpeed's configuration classes: a new one of theirs is to be put in the
    table.
    """
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    old = {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"}  # see config.py
    zero = "zero_optimization"
    for section, kind in (
        ("fp16", DeepSpeedFP16Config),
        ("bf16", DeepSpeedBF16Config),
        (zero, DeepSpeedZeroConfig),
        (f"{zero}.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        (f"{zero}.offload_param", DeepSpeedZeroOffloadParamConfig),
    ):
        assert inspect.isclass(kind)
        for name, field in kind.model_fields.items():
            path = canonical(f"{section}.{field.alias or name}")
            assert path in KEYS or path in SECTIONS or name in old, path
    assert json.dumps(sorted(KEYS))
