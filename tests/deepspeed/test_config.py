"""The DeepSpeed configuration: every accepted key, every refusal by name, the batch arithmetic,
JSON files.
"""

import base64
import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardcore
from shardcore import LossScale
from shardcore.deepspeed.config import BatchSizes, read_config
from shardcore.optim import Elementwise
from tests.support.deepspeed import config_of

BASE = {"train_micro_batch_size_per_gpu": 1}
ADAM = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
    "adam_w_mode": True,
}
ADAM |= {"amsgrad": False, "maximize": False}
PARAM_AT_2 = {
    "stage": 2,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"},
}
PARAM_ALONE = {"stage": 3, "offload_param": {"device": "cpu"}}


def _nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b", with what makes a whole configuration around it."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    if path.startswith("optimizer.") and path != "optimizer.type":
        config["optimizer"] = {"type": "Adam"}
    if path.startswith("zero_optimization.offload_optimizer.") and not path.endswith(".device"):
        config["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
    if path.startswith("zero_optimization.offload_param."):
        config["zero_optimization"] = {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    if path.startswith("fp16.") and path != "fp16.enabled":
        config["fp16"] = {"enabled": True}
    *sections, key = path.split(".")
    inside = config
    for section in sections:
        inside = inside.setdefault(section, {})
    inside[key] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "field", "expected"),
    [
        ("train_batch_size", 4, "train_batch_size", 4),
        ("train_micro_batch_size_per_gpu", 4, "train_micro_batch_size_per_gpu", 4),
        ("gradient_accumulation_steps", 4, "gradient_accumulation_steps", 4),
        ("train_batch_size", None, "train_batch_size", None),
        ("gradient_accumulation_steps", None, "gradient_accumulation_steps", None),
        ("communication_data_type", None, "communication_data_type", None),
        ("gradient_clipping", 0.5, "gradient_clipping", 0.5),
        ("gradient_clipping", 1, "gradient_clipping", 1.0),
        ("communication_data_type", "BF16", "communication_data_type", "bf16"),
        ("bf16.enabled", True, "bf16", True),
        ("bf16", None, "bf16", False),
        ("fp16.enabled", True, "fp16", True),
        ("fp16.enabled", True, "loss_scale", LossScale()),
        ("fp16.enabled", False, "loss_scale", None),
        ("fp16.auto_cast", True, "auto_cast", True),
        ("fp16.loss_scale", 128, "loss_scale", 128.0),
        ("fp16.initial_scale_power", 20, "loss_scale", LossScale(initial_power=20)),
        ("fp16.loss_scale_window", 500, "loss_scale", LossScale(window=500)),
        ("fp16.hysteresis", 1, "loss_scale", LossScale(hysteresis=1)),
        ("fp16.min_loss_scale", 0.25, "loss_scale", LossScale(minimum=0.25)),
        ("fp16.consecutive_hysteresis", True, "loss_scale", LossScale(consecutive_hysteresis=True)),
        ("zero_optimization.stage", 2, "stage", 2),
        ("zero_optimization.offload_optimizer.device", "cpu", "offload", "cpu"),
        ("zero_optimization.offload_optimizer.device", "none", "offload", None),
        (
            "zero_optimization",
            {"stage": 3, "offload_optimizer": None, "offload_param": {}},
            "offload",
            None,
        ),
        ("zero_optimization.offload_optimizer.pin_memory", True, "pin_memory", True),
        ("zero_optimization.offload_optimizer.ratio", 0.25, "ratio", 0.25),
        ("zero_optimization.offload_param.device", "cpu", "params", "cpu"),
        ("zero_optimization.offload_param.pin_memory", False, "pin_memory", False),
        ("zero_optimization", PARAM_AT_2, "params", None),
        ("zero_optimization", PARAM_ALONE, "params", "cpu"),
        ("zero_optimization", {"stage": 2, "cpu_offload": True}, "offload", "cpu"),
        ("zero_optimization", {"stage": 2, "cpu_offload": False}, "offload", None),
        (
            "zero_optimization",
            {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False},
            "pin_memory",
            False,
        ),
        (
            "zero_optimization",
            {"stage": 3, "cpu_offload": True, "cpu_offload_params": True},
            "params",
            "cpu",
        ),
        ("zero_optimization", True, "stage", 1),
        ("zero_optimization.zero_hpz_partition_size", 8, "hpz_partition_size", 8),
        ("zero_optimization.leaf_module.classes", ["a", "b"], "leaf_classes", ("a", "b")),
        ("zero_optimization.leaf_module.names", "a", "leaf_names", ("a",)),
        (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            False,
            "gathers_to_save",
            False,
        ),
        (
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            False,
            "gathers_to_save",
            False,
        ),
        ("bfloat16.enabled", True, "bf16", True),
        ("data_types.grad_accum_dtype", "bfloat16", "grad_dtype", "bf16"),
        ("torch_autocast", {"enabled": True, "dtype": "torch.bfloat16"}, "autocast", "bf16"),
        ("torch_autocast", {"enabled": False}, "autocast", None),
        (
            "torch_autocast",
            {"enabled": True, "dtype": "fp16"},
            "loss_scale",
            LossScale(16, 2000, 1, 2.0**-126),
        ),
        ("gradient_allreduce_op", "SUM", "gradient_allreduce_op", "sum"),
        ("data_types.buffer_dtype", "torch.float16", "buffer_dtype", "fp16"),
        ("data_types.keep_in_fp32_modules", ["a*"], "keep_in_fp32_modules", ("a*",)),
        ("train_batch_size", 5e8, "train_batch_size", 500_000_000),
        ("dataloader_drop_last", True, "dataloader_drop_last", True),
        ("activation_checkpointing.cpu_checkpointing", True, "cpu_checkpointing", True),
        (
            "scheduler",
            {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
            "scheduler",
            ("WarmupLR", {"warmup_num_steps": 3}),
        ),
        ("csv_monitor", {"enabled": False}, "csv_monitor", None),
        ("comms_logger", {"enabled": False}, "comms_logger", False),
        ("flops_profiler", {"enabled": False, "profile_step": 2}, "flops_profiler", False),
        ("optimizer.params.amsgrad", True, "optimizer", ADAM | {"amsgrad": True}),
        ("optimizer.params.torch_adam", True, "optimizer", ADAM | {"weight_decay": 0.01}),
        ("optimizer.params", {"torch_adam": True, "weight_decay": 0.0}, "optimizer", ADAM),
        (
            "optimizer.params",
            {"torch_adam": True, "adam_w_mode": False},
            "optimizer",
            ADAM | {"adam_w_mode": False},
        ),
        (
            "optimizer.params.fp32_optimizer_states",
            False,
            "optimizer",
            ADAM | {"state_dtype": "bf16"},
        ),
        ("optimizer.type", "adamw", "optimizer", ADAM),
        ("optimizer.params", None, "optimizer", ADAM),
        ("optimizer.params.lr", 0.1, "optimizer", ADAM | {"lr": 0.1}),
        ("optimizer.params.betas", [0.8, 0.9], "optimizer", ADAM | {"betas": (0.8, 0.9)}),
        ("optimizer.params.eps", 1e-6, "optimizer", ADAM | {"eps": 1e-6}),
        ("optimizer.params.weight_decay", 0.1, "optimizer", ADAM | {"weight_decay": 0.1}),
        ("optimizer.params.bias_correction", False, "optimizer", ADAM | {"bias_correction": False}),
        ("optimizer.params.adam_w_mode", False, "optimizer", ADAM | {"adam_w_mode": False}),
        ("steps_per_print", 7, "steps_per_print", 7),
        ("steps_per_print", None, "steps_per_print", None),
        ("steps_per_print", math.inf, "steps_per_print", None),
    ],
)
def test_accepted_keys(path: str, value: Any, field: str, expected: Any) -> None:
    config = _nested(path, value)
    before = json.dumps(config)
    assert getattr(read_config(config), field) == expected
    assert json.dumps(config) == before, "the caller's dict is not changed"


def test_defaults() -> None:
    config = read_config(BASE)
    assert (config.gradient_clipping, config.bf16, config.stage) == (1.0, False, 0)
    assert (config.offload, config.optimizer, config.pin_memory) == (None, None, True)
    assert (config.steps_per_print, config.train_batch_size) == (None, None)
    assert config.explicit == frozenset(BASE)


# path, value, and what the error says
WRONG_VALUES = [
    ("amp", {"enabled": True}, "config amp is not supported"),
    ("fp16.loss_scale", -1, "fp16.loss_scale is -1; expected a finite number of at least 0"),
    ("fp16.loss_scale_window", 0, "fp16.loss_scale_window is 0; expected at least 1"),
    ("fp16.initial_scale_power", 128, "fp16.initial_scale_power is 128; expected 0 to 127"),
    ("fp16.min_loss_scale", 0, "fp16.min_loss_scale is 0; expected a finite number above 0"),
    (
        "fp16.min_loss_scale",
        2**17,
        r"fp16.min_loss_scale is 131072.0; expected at most 2\*\*initial_scale",
    ),
    (
        "fp16.fp16_master_weights_and_grads",
        True,
        "fp16.fp16_master_weights_and_grads is not supported",
    ),
    ("optimizer.params.max_grad_norm", 1.0, r"optimizer.params.max_grad_norm .*gradient_clipping"),
    ("gradient_acumulation_steps", 2, r"did you mean gradient_accumulation_steps\?"),
    ("zero_optimization.stages", 2, r"did you mean zero_optimization.stage\?"),
    ("optimizer.adam_w_mode", True, r"did you mean optimizer.params.adam_w_mode\?"),
    ("train_batch_size", 0, "train_batch_size is 0; expected at least 1"),
    (
        "gradient_clipping",
        -1.0,
        "gradient_clipping is -1.0; expected a finite number of at least 0",
    ),
    (
        "communication_data_type",
        "fp8",
        'communication_data_type is \'fp8\'; expected "fp32" or "bf16"',
    ),
    (
        "zero_optimization",
        {"cpu_offload": True, "offload_optimizer": {}},
        "cpu_offload and .*offload_optimizer",
    ),
    (
        "zero_optimization",
        {"stage3_max_reuse_distance": 1, "max_reuse_distance": 2},
        "in two spellings",
    ),
    (
        "zero_optimization.zero_quantized_gradients",
        True,
        "Remove it, or turn it off: ranks exchange",
    ),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, "zenflow is not supported. Remove it"),
    ("zero_optimization.mics_shard_size", 4, r"not supported \(DeepSpeed removed it, too\)"),
    ("compression_training", {"weight_quantization": {}}, "compression_training is not supported"),
    (
        "tensor_parallel",
        {"partition_config": {"a": []}},
        "partition_config is not supported. Remove it",
    ),
    (
        "tensor_parallel",
        {"autotp_size": 2, "tp": {"tp_size": 4}},
        r"tp_size differs from .*; expected 2",
    ),
    ("sequence_parallel_size", 0, "sequence_parallel_size is 0; expected at least 1"),
    ("scheduler", {"type": "WarmupLr"}, "scheduler.type is 'WarmupLr'; expected one of"),
    ("wandb", {"enabled": True, "projects": ""}, "did you mean wandb.project"),
    (
        "data_types.param_dtype",
        "bf16",
        "param_dtype is 'bf16', and fp16 and bf16 ask for 'fp32'; expected the",
    ),
    ("gradient_allreduce_op", "max", 'gradient_allreduce_op is \'max\'; expected "mean" or "sum"'),
    ("zero_optimization.stage", 4, "zero_optimization.stage is 4; expected 0, 1, 2 or 3"),
    (
        "zero_optimization.offload_optimizer.device",
        "nvme",
        "offload_optimizer.nvme_path is missing",
    ),
    (
        "zero_optimization.offload_optimizer.device",
        "gpu",
        '.device is \'gpu\'; expected "cpu", "nvme"',
    ),
    (
        "zero_optimization.offload_optimizer.ratio",
        1.5,
        "ratio is 1.5; expected a number from 0 to 1",
    ),
    (
        "zero_optimization.offload_param.device",
        "nvme",
        'offload_param.device is "nvme" and zero_optimization.offload_optimizer.device '
        "'cpu'; expected \"nvme\" for both",
    ),
    ("optimizer", {"params": {}}, 'optimizer.type is missing; expected "Adam" or "AdamW"'),
    (
        "optimizer.type",
        "OneBitAdam",
        'optimizer.type is \'OneBitAdam\'; expected "Adam" or "AdamW", or SGD, .*, Muon '
        "\\(DeepSpeed has Lamb",
    ),
    ("optimizer", {"type": "Lion", "params": {"lr": -1}}, "are not those of Lion; .*lr=-1"),
    (
        "optimizer",
        {"type": "Muon", "params": {"per_head_muon": True}},
        "per_head_muon is True; expected False",
    ),
    ("optimizer", {"type": "Muon", "params": {"weight_decay": -1}}, "are not those of Muon; .*-1"),
    ("optimizer", {"type": "SGD", "momentum": 0.9}, "optimizer.momentum is not supported"),
    (
        "optimizer.params.lr",
        -0.1,
        "optimizer.params.lr is -0.1; expected a finite number of at least 0",
    ),
    ("optimizer.params.eps", math.nan, "optimizer.params.eps is nan"),
    ("optimizer.params.betas", [0.9, 1.0], r"betas\[1\] is 1.0; expected a number in \[0, 1\)"),
    (
        "checkpoint.tag_validation",
        "no",
        'tag_validation is \'no\'; expected "Ignore", "Warn" or "Fail"',
    ),
    ("steps_per_print", 0, "steps_per_print is 0; expected at least 1"),
]
WRONG_TYPES = [
    ("fp16.hysteresis", 1.5, "fp16.hysteresis is 1.5; expected a whole number"),
    ("fp16.consecutive_hysteresis", None, "fp16.consecutive_hysteresis is None"),
    ("train_batch_size", "8", "train_batch_size is '8'; expected a whole number"),
    ("train_batch_size", "auto", 'train_batch_size is "auto", which a trainer must fill in'),
    ("bf16", True, 'config bf16 is True; expected {"enabled": true}$'),
    ("fp16", False, 'config fp16 is False; expected {"enabled": false}$'),
    ("bf16.enabled", 1, "bf16.enabled is 1; expected true or false"),
    ("zero_optimization", 2, "zero_optimization is 2; expected an object"),
    ("zero_optimization", {"cpu_offload": 1.5}, "cpu_offload is 1.5; expected true or false"),
    (
        "data_types.keep_in_fp32_modules",
        "router",
        "is 'router'; expected \"auto\", or a list of patterns",
    ),
    ("zero_optimization.stage", True, "zero_optimization.stage is True; expected 0, 1, 2 or 3"),
    (
        "zero_optimization.offload_optimizer.pin_memory",
        1,
        "pin_memory is 1; expected true or false",
    ),
    ("optimizer", "Adam", "config optimizer is 'Adam'; expected an object"),
    ("optimizer", {"type": "SGD", "params": {"betas": [0.9]}}, "are not those of SGD; .*'betas'"),
    (
        "optimizer",
        {"type": "Muon", "params": {"beta": 0.9}},
        "are not those of Muon; .*beta is unknown; .*, muon_lr",
    ),
    ("optimizer.type", 1, "optimizer.type is 1"),
    ("optimizer.params.lr", "auto", 'optimizer.params.lr is "auto"'),
    ("optimizer.params.betas", 0.9, "optimizer.params.betas is 0.9; expected two numbers"),
    ("optimizer.params.betas", [True, 0.9], r"betas\[0\] is True; expected a number"),
    ("optimizer.params.adam_w_mode", None, "adam_w_mode is None; expected true or false"),
]


@pytest.mark.parametrize(
    ("kind", "path", "value", "says"),
    [(ValueError, *row) for row in WRONG_VALUES] + [(TypeError, *row) for row in WRONG_TYPES],
)
def test_refusals_name_the_key(kind: type[Exception], path: str, value: Any, says: str) -> None:
    with pytest.raises(kind, match=says) as raised:
        read_config(_nested(path, value))
    assert type(raised.value) is kind
    assert str(raised.value).startswith("initialize: config ")
    remedies = "expected", "did you mean", "known keys here", "Remove it"
    assert any(remedy in str(raised.value) for remedy in remedies)


def test_what_means_nothing_is_explained_once_for_each_reason() -> None:
    zero = {
        "reduce_bucket_size": "auto",
        "overlap_comm": True,
        "contiguous_gradients": False,
        "sub_group_size": 1e14,
    }
    config = BASE | {
        "zero_optimization": zero,
        "prescale_gradients": True,
        "_comment": 1,
        "comms_config": {},
        "comment2": "",
    }
    assert [line.partition(":")[0] for line in read_config(config).accepted] == [
        "zero_optimization.reduce_bucket_size, zero_optimization.sub_group_size",
        "zero_optimization.overlap_comm, zero_optimization.contiguous_gradients",
        "prescale_gradients",
    ]
    other = {
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": False},
    }
    assert "pinned" in read_config(BASE | {"zero_optimization": {"stage": 3, **other}}).accepted[0]
    low = {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}
    for optimizer in ({}, {"optimizer": {"type": "Lion"}}):
        (line,) = read_config(BASE | {"bf16": low, **optimizer}).accepted
        assert line.startswith(
            "bf16.bf16_optimizer_states, bf16.bf16_master_weights_and_grads: masters and states "
            "are red"
        )
    assert not read_config(BASE | {"bf16": low, "optimizer": {"type": "Adam"}}).accepted
    unused = {"stage": 2, "ignore_unused_parameters": False}
    assert "but at stages 1 and 2" in read_config(BASE | {"zero_optimization": unused}).accepted[0]
    in_host = read_config(
        BASE | {"zero_optimization": unused | {"offload_optimizer": {"device": "cpu"}}}
    )
    assert (in_host.accepted, in_host.ignore_unused_parameters) == ((), False)
    assert (
        "16-bit weights only"
        in read_config(BASE | {"data_types": {"buffer_dtype": "bf16"}}).accepted[0]
    )
    assert "at stage 3 only" in read_config(BASE | {"zero_optimization": PARAM_AT_2}).accepted[0]


ON: dict[str, Any] = {"enabled": True}


@pytest.mark.parametrize(
    ("says", "config"),
    [
        (
            'adam_w_mode is False for the type "AdamW"',
            {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
        ),
        (
            r"fp16\.enabled and bf16\.enabled are both true; expected one",
            {"fp16": ON, "bf16": ON},
        ),
        (
            'gradient_allreduce_op is "sum" at stage 3',
            {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
        ),
        (
            'dtype is "fp16" with bf16.enabled',
            {"torch_autocast": {**ON, "dtype": "fp16"}, "bf16": ON},
        ),
        (
            r"^initialize: config optimizer\.type is 'OneBitAdam'; expected",  # and nothing else
            {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 400}}},
        ),
    ],
)
def test_contradictions_are_refused(says: str, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=says):
        read_config(BASE | config)


def test_a_section_that_is_off_has_no_loss_scale() -> None:
    off = {"enabled": False, "min_loss_scale": 2}
    assert read_config(BASE | {"fp16": off, "bf16": ON}).loss_scale is None


def test_a_fixed_loss_scale_leaves_the_other_keys_aside() -> None:
    fp16 = {
        "enabled": True,
        "loss_scale": 64,
        "initial_scale_power": 3,
        "min_loss_scale": 16,
        "hysteresis": 2,
    }
    assert read_config(BASE | {"fp16": fp16}).loss_scale == 64.0


def test_all_problems_are_reported_at_once() -> None:
    config = {
        "train_batch_size": "auto",
        "amp": True,
        "zero_optimization": {"stage": 4},
        "optimizer": {"params": {"lr": -1}},
    }
    with pytest.raises(ValueError, match="config has 5 problems") as raised:
        read_config(config)
    lines = str(raised.value).splitlines()[1:]
    expected = [
        "train_batch_size",
        "amp",
        "zero_optimization.stage",
        "optimizer.params.lr",
        "optimizer.type",
    ]
    assert [line.split()[0] for line in lines] == expected


def test_problems_of_one_kind_keep_it() -> None:
    with pytest.raises(TypeError, match="2 problems"):
        read_config({"train_batch_size": "8", "bf16": {"enabled": 1}})


@pytest.mark.parametrize("config", [3, ["train_batch_size"]])
def test_what_is_no_configuration(config: Any) -> None:
    with pytest.raises(TypeError, match="expected a dict or the path of a JSON file"):
        read_config(config)


def test_no_configuration() -> None:
    with pytest.raises(TypeError, match="there is no config; expected config=, or args="):
        read_config(None, SimpleNamespace(deepspeed_config=None))


# --- batch sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "micro", "steps", "world", "expected"),
    [
        (16, 2, 4, 2, (16, 2, 4)),
        (16, 2, None, 2, (16, 2, 4)),
        (16, None, 4, 2, (16, 2, 4)),
        (None, 2, 4, 2, (16, 2, 4)),
        (16, None, None, 2, (16, 8, 1)),
        (None, 2, None, 2, (4, 2, 1)),
        (1, None, None, 1, (1, 1, 1)),
    ],
)
def test_batch_sizes(
    train: Any, micro: Any, steps: Any, world: int, expected: tuple[int, int, int]
) -> None:
    assert config_of(train, micro, steps).batch_sizes(world) == BatchSizes(*expected)


@pytest.mark.parametrize(
    ("train", "micro", "steps", "world", "says"),
    [
        (16, 2, 4, 3, r"train_batch_size is 16; expected 24, the product"),
        (16, 3, None, 2, r"is 16; expected a multiple of 6, the product"),
        (16, None, 3, 2, r"is 16; expected a multiple of 6, the product"),
        (3, None, None, 2, r"is 3; expected a multiple of 2, the product"),
        (1, None, None, 2, r"is 1; expected a multiple of 2, the product"),
        (2, 4, None, 1, r"is 2; expected a multiple of 4, the product"),
        (None, None, 4, 2, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
        (None, None, None, 1, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
    ],
)
def test_contradictions_show_the_numbers(
    train: Any, micro: Any, steps: Any, world: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        config_of(train, micro, steps).batch_sizes(world)


# --- where it comes from --------------------------------------------------------------------------


def test_json_files_and_args(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(BASE | {"bf16": {"enabled": True}}))
    expected = read_config(BASE | {"bf16": {"enabled": True}})
    assert read_config(path) == read_config(str(path)) == expected
    assert read_config(None, Namespace(deepspeed_config=str(path))) == expected
    assert read_config(path, Namespace(deepspeed_config=None)) == expected
    assert read_config(path, Namespace(local_rank=0)) == expected
    with pytest.raises(ValueError, match="given twice"):
        read_config(BASE, Namespace(deepspeed_config=str(path)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            b'{"train_batch_size": 8, "train_batch_size": 16}',
            "the key 'train_batch_size' appears twice",
        ),
        (
            b'{"bf16": {"enabled": true, "enabled": true}, "train_batch_size": 8}',
            "the key 'enabled' appears twice",
        ),
        (b'{"train_batch_size": [8}', "line 1 column"),
        (b"", "Expecting value"),
        (b"train a model", "Expecting value"),  # a text to Hjson
        (b'{"x": "\xff"}', "ds_config.json is not valid"),
    ],
)
def test_bad_json_names_the_file_and_the_place(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=says) as raised:
        read_config(path)
    assert str(path) in str(raised.value)


def test_hjson_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{\n  // of the whole job\n  "train_batch_size": 8,\n}\n')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "hjson", None)
        with pytest.raises(ValueError, match=r"is not valid: .*pip install hjson"):
            read_config(path)
    pytest.importorskip("hjson", reason="DeepSpeed brings it")
    assert read_config(path) == read_config({"train_batch_size": 8})
    path.write_text('{\n  # of the whole job\n  "train_batch_size": 8,\n  "train_batch_size": 9}\n')
    with pytest.raises(ValueError, match="or Hjson: the key 'train_batch_size' appears twice"):
        read_config(path)


def test_base64_as_gpt_neox_gives_it() -> None:
    text = base64.urlsafe_b64encode(json.dumps(BASE).encode()).decode()
    assert (
        read_config(text)
        == read_config(None, Namespace(deepspeed_config=text))
        == read_config(BASE)
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"initialize: config file .*no_such\.json does not exist$"
    ):
        read_config(tmp_path / "no_such.json")


def test_sizes_that_trl_writes_beside_the_section_mean_nothing_either() -> None:
    zero = {"stage": 3, "reduce_bucket_size": 16, "stage3_prefetch_bucket_size": 14}
    beside = {
        "zero_optimization.reduce_bucket_size": 16,
        "zero_optimization.stage3_prefetch_bucket_size": 14.4,
    }
    assert (
        read_config(
            {"train_batch_size": 1, "zero_optimization": zero, **beside}
        ).prefetch_bucket_size
        == 14
    )
    assert (
        read_config({"train_batch_size": 1, "zero_optimization": {"stage": 3}, **beside}).stage == 3
    )
    with pytest.raises(ValueError, match="stage is given in two spellings"):
        read_config(
            {"train_batch_size": 1, "zero_optimization": zero, "zero_optimization.stage": 2}
        )


def test_other_optimizers_get_their_arguments() -> None:
    read = read_config(
        {**BASE, "optimizer": {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}}}
    )
    assert (read.optimizer_type, read.optimizer) == (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    model = torch.nn.Linear(2, 2)
    engine, optimizer, _, _ = shardcore.initialize(model=model, config=dict(read.source))
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert isinstance(optimizer, Elementwise)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    lion = read_config({**BASE, "optimizer": {"type": "Lion", "params": {"lr": 0.1}}})
    assert lion.optimizer == {"lr": 0.1, "betas": (0.9, 0.999)}, "DeepSpeed's defaults"
