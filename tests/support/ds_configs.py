"""DeepSpeed configurations that people use, as their public files have them, rewritten from shared
pieces.

CONFIGS has them by "project/name", as few as together have every key, kind of value, and tiers and
precision of each stage that people use; "auto" stands where the file has it. `ready` makes one that
a small test can train with.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]

_AUTO = "auto"
_BATCH = {
    "train_batch_size": _AUTO,
    "train_micro_batch_size_per_gpu": _AUTO,
    "gradient_accumulation_steps": _AUTO,
}
_SCALE = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_QUIET = {"steps_per_print": 2000, "wall_clock_breakdown": False}
_BF16 = {"bf16": {"enabled": True}}
_EITHER = {"fp16": {"enabled": _AUTO, **_SCALE}, "bf16": {"enabled": _AUTO}}
_CPU = {"device": "cpu"}
_PINNED = {"device": "cpu", "pin_memory": True}


def _zero(stage: int, *, optimizer: Any = None, params: Any = None, **keys: Any) -> Config:
    """The section zero_optimization; optimizer and params: what is offloaded, and how."""
    tiers = {"offload_optimizer": optimizer, "offload_param": params}
    return {
        "zero_optimization": {
            "stage": stage,
            **{name: tier for name, tier in tiers.items() if tier is not None},
            **keys,
        }
    }


def _adam(kind: str, **params: Any) -> Config:
    return {"optimizer": {"type": kind, "params": params}}


def _schedule(kind: str, **params: Any) -> Config:
    return {"scheduler": {"type": kind, "params": params}}


def _autos(*names: str) -> Config:
    return dict.fromkeys(names, _AUTO)


def _sizes(elements: float) -> Config:
    """Both bucket sizes, and that they are used."""
    return {
        "allgather_partitions": True,
        "allgather_bucket_size": elements,
        "reduce_scatter": True,
        "reduce_bucket_size": elements,
        "contiguous_gradients": True,
    }


_HIDDEN = _autos(
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"
)
_LIVE = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
_GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


# --- LLaMA-Factory: examples/deepspeed ------------------------------------------------------------


def _llamafactory() -> dict[str, Config]:
    base = {**_BATCH, "gradient_clipping": _AUTO, "zero_allow_untested_optimizer": True, **_EITHER}
    flat = {**_sizes(5e8), "overlap_comm": False, "round_robin_gradients": True}
    full = {
        "overlap_comm": False,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        **_HIDDEN,
        **_LIVE,
        **_GATHER,
    }
    fp8 = {name: size for name, size in base.items() if name != "train_batch_size"}
    fp8 |= {
        "fp16": {"enabled": False, **_SCALE},
        "zero_force_ds_cpu_optimizer": True,
        "steps_per_print": 10_000_000,
    }
    fp8 |= {
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
    }
    fp8["monitor_config"]["tag"] = "DeepSpeedMonitor"
    fixed = dict.fromkeys((*_LIVE, "sub_group_size"), 1_000_000_000) | dict(
        zip(_HIDDEN, (12845056, 11560550, 35840), strict=True)
    )
    return {
        "z0": base | _zero(0, **flat),
        "z2_offload": base | _zero(2, optimizer=_PINNED, **flat),
        "z3_fp8": fp8
        | _zero(3, optimizer={"device": "cpu", "pin_memory": False}, **{**full, **fixed}),
    }


# --- axolotl: deepspeed_configs -------------------------------------------------------------------


def _axolotl() -> dict[str, Config]:
    base = {**_BATCH, "gradient_clipping": _AUTO, "wall_clock_breakdown": False}
    either = base | {
        "bf16": {"enabled": _AUTO},
        "fp16": {"enabled": _AUTO, "auto_cast": False, **_SCALE, "initial_scale_power": 32},
    }
    bare = {
        "sub_group_size": 0,
        "max_live_parameters": 0,
        "max_reuse_distance": 0,
        "gather_16bit_weights_on_model_save": True,
    }
    full = {"overlap_comm": True, "contiguous_gradients": True, **_HIDDEN, **bare}
    own = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    return {
        "zero1": either | _zero(1, overlap_comm=True),
        "zero3": either | _zero(3, **full),
        "zero3_bf16_cpuoffload_params": base | own | _BF16 | _zero(3, params=_PINNED, **full),
    }


# --- Hugging Face: tests and documentation of Transformers, Accelerate's templates, TRL -----------


def _transformers() -> dict[str, Config]:
    optimizer = _adam("AdamW", **_autos("lr", "betas", "eps", "weight_decay"))
    schedule = _schedule("WarmupLR", **_autos("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"))
    base = {**_BATCH, "gradient_clipping": _AUTO, **_QUIET, **optimizer, **schedule}
    full = {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        **_HIDDEN,
        **_LIVE,
    }
    renamed = {"stage3_gather_fp16_weights_on_model_save": True}
    two = _zero(2, optimizer=_PINNED, overlap_comm=True, **_sizes(2e8))
    nvme = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
    disk = {
        "block_size": 262144,
        "queue_depth": 32,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    }
    return {
        "tests_zero3": base
        | {"fp16": {"enabled": _AUTO, **_SCALE}}
        | _zero(
            3, optimizer=_PINNED, params=_PINNED, **{**full, "sub_group_size": 1e14}, **renamed
        ),
        "tests_zero2_bf16": base | {"bfloat16": {"enabled": _AUTO}} | two,
        # DeepSpeed reads aio at the top; the documentation has it in zero_optimization, where
        # DeepSpeed 0.19 refuses it
        "docs_infinity": base
        | {"fp16": {"enabled": _AUTO, **_SCALE}, "aio": disk}
        | _zero(
            3,
            optimizer={**nvme, "buffer_count": 4, "fast_init": False},
            params={**nvme, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
            **full,
            **_GATHER,
        ),
    }


def _accelerate() -> dict[str, Config]:
    base = {**_BATCH, "gradient_accumulation_steps": 1, "gradient_clipping": _AUTO, **_QUIET}
    decay = _schedule(
        "WarmupDecayLR",
        **_autos("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
    )
    template = base | {"fp16": {"enabled": True, **_SCALE}, **decay}
    adam = _adam("AdamW", **_autos("lr", "weight_decay"))
    torch_adam = _adam("AdamW", **_autos("lr", "weight_decay"), torch_adam=True, adam_w_mode=True)
    flat = {**_sizes(2e8), "reduce_bucket_size": _AUTO, "overlap_comm": True}
    full = {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        **_HIDDEN,
        **_LIVE,
    }
    gather = _autos("stage3_gather_16bit_weights_on_model_save")
    return {
        "zero_stage1": template | torch_adam | _zero(1, **flat),
        "zero_stage3": template | adam | _zero(3, **full, **gather),
        "alst": {
            **_BATCH,
            "gradient_accumulation_steps": 1,
            **_BF16,
            **_zero(3),
            "seq_parallel_communication_data_type": "bf16",
        },
    }


def _trl() -> dict[str, Config]:
    """What Accelerate's plugin makes of TRL's accelerate_configs, at mixed_precision bf16."""

    def plugin(stage: int, save: bool = False) -> Config:
        none = {"device": "none", "nvme_path": None}
        zero = _zero(
            stage, optimizer=none, params=none, stage3_gather_16bit_weights_on_model_save=save
        )
        sizes = {**_BATCH, "gradient_accumulation_steps": 1}
        return sizes | _BF16 | {"fp16": {"enabled": False}, "steps_per_print": math.inf} | zero

    return {"zero1": plugin(1), "zero2": plugin(2), "zero3": plugin(3, save=True)}


# --- DeepSpeed: tutorials, its tests, DeepSpeedExamples -------------------------------------------


def _tutorials() -> dict[str, Config]:
    """The fragments of the tutorials (ZeRO, schedules, profiler), in the configuration of the
    guide to ZeRO-3.
    """
    optimizer = _adam("AdamW", lr=0.001, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7)
    base = {"train_batch_size": 8, "fp16": {"enabled": True}, **optimizer}
    cycle = dict.fromkeys(
        ("cycle_first_step_size", "cycle_second_step_size", "decay_step_size"), 1000
    )
    cycle |= {
        "cycle_first_stair_count": 500,
        "cycle_second_stair_count": 500,
        "cycle_min_lr": 0.0001,
        "cycle_max_lr": 0.001,
    }
    cycle |= {
        "decay_lr_rate": 0.001,
        "cycle_min_mom": 0.85,
        "cycle_max_mom": 0.99,
        "decay_mom_rate": 0.0,
    }
    profile = {
        "enabled": True,
        "profile_step": 1,
        "module_depth": -1,
        "top_modules": 1,
        "detailed": True,
        "output_file": None,
    }
    return {
        "getting_started": {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            **_adam("Adam", lr=0.00015),
            "fp16": {"enabled": True},
            "zero_optimization": True,
        },
        "cifar10": {
            "train_batch_size": 4,
            **_QUIET,
            **_adam("Adam", lr=0.001, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7),
            **_schedule("WarmupLR", warmup_min_lr=0, warmup_max_lr=0.001, warmup_num_steps=1000),
        },
        "one_cycle": base | _schedule("OneCycle", **cycle),
        "lr_range_test": base
        | _schedule(
            "LRRangeTest",
            lr_range_test_min_lr=0.0001,
            lr_range_test_step_size=200,
            lr_range_test_step_rate=5,
            lr_range_test_staircase=False,
        ),
        "flops_profiler": base | {"flops_profiler": profile},
        "torch_autocast": {
            "train_batch_size": 8,
            **optimizer,
            "torch_autocast": {
                "enabled": True,
                "dtype": "bfloat16",
                "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"],
            },
        },
    }


def _tests() -> dict[str, Config]:
    """DeepSpeed's own tests: Megatron-GPT2, BERT, torch.compile, the hybrid engine."""
    megatron = {"gradient_accumulation_steps": 1, "steps_per_print": 1, "gradient_clipping": 1.0}
    megatron |= {
        "fp16": {
            "enabled": True,
            **{key: value for key, value in _SCALE.items() if key != "initial_scale_power"},
        }
    }
    buckets = {
        "reduce_bucket_size": 7_000_000,
        "allgather_bucket_size": 7_000_000,
        "reduce_scatter": True,
    }
    recompute = {
        "activation_checkpointing": {
            "partition_activations": True,
            "contiguous_memory_optimization": True,
        }
    }
    accumulated = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3}
    squad = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "steps_per_print": 1,
        "gradient_clipping": 1.0,
    }
    squad |= _adam("Adam", lr=3e-5, weight_decay=0.0, bias_correction=False) | {
        "fp16": {"enabled": True}
    }
    fast = {"loss_scale_window": 100, "enabled": True}
    return {
        "megatron_zero1_perf": {
            **megatron,
            "train_batch_size": 16,
            **_zero(1),
            "disable_allgather": True,
        },
        "megatron_zero2_gas3": {**megatron, **accumulated, **_zero(2, **buckets), **recompute},
        "squad_zero2": squad | _zero(2),
        "hybrid_engine": {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 10,
            **_zero(0, params=_CPU, stage3_param_persistence_threshold=0),
            "fp16": fast,
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
        },
    }


def _examples() -> dict[str, Config]:
    """DeepSpeedExamples, some of which build their configuration in Python: CIFAR,
    HelloDeepSpeed, DeepSpeed-Chat.
    """

    def cifar(stage: int, precision: str) -> Config:
        scale = {
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        }
        return {
            "train_batch_size": 16,
            **_QUIET,
            **_adam("Adam", lr=0.001, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7),
            **_schedule("WarmupLR", warmup_min_lr=0, warmup_max_lr=0.001, warmup_num_steps=1000),
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "bf16": {"enabled": precision == "bf16"},
            "fp16": {
                "enabled": precision == "fp16",
                "fp16_master_weights_and_grads": False,
                **scale,
            },
            **_zero(stage, **_sizes(50_000_000), overlap_comm=True, cpu_offload=False),
        }

    def chat(stage: int, device: str, **precision: Any) -> Config:
        sizes = {
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
        }
        tier = {"device": device}
        hybrid = {
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
        }
        return {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10,
            **_zero(
                stage,
                optimizer=tier,
                params=tier,
                overlap_comm=True,
                **sizes,
                memory_efficient_linear=False,
            ),
            **precision,
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "hybrid_engine": {"enabled": False, **hybrid, "tp_gather_partition_size": 8},
            "tensorboard": {
                "enabled": False,
                "output_path": "/ds_tensorboard_logs/",
                "job_name": "_tensorboard",
            },
        }

    hello = {
        "train_micro_batch_size_per_gpu": 8,
        **_adam("Adam", lr=1e-4),
        **_zero(1, optimizer=_CPU),
    }
    master = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 100,
    }
    master |= _adam("AdamW", lr=1e-4, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01)
    master |= _zero(
        3,
        overlap_comm=True,
        contiguous_gradients=True,
        reduce_bucket_size=5e7,
        stage3_param_persistence_threshold=0,
    )
    return {
        "hello_fp16": hello | {"fp16": {"enabled": True}},
        **{
            f"cifar_{precision}_{stage}": cifar(stage, precision)
            for precision, stage in (("bf16", 0), ("fp16", 2), ("fp32", 3))
        },
        "chat_offload": chat(3, "cpu", bfloat16={"enabled": True}),
        "bf16_master_full": master
        | {
            "bf16": {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
            }
        }
        | {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}},
        "imagenet_z1": {
            "train_batch_size": 256,
            "gradient_accumulation_steps": 1,
            "steps_per_print": 50,
            **_adam("Adam", lr=0.001, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7),
            **_zero(1),
            "zero_allow_untested_optimizer": True,
            "fp16": {"enabled": True, "auto_cast": True},
            "gradient_clipping": 0,
            "prescale_gradients": False,
            "cuda_visible_devices": 0,
            "wall_clock_breakdown": False,
        },
    }


_SOURCES = {
    "llamafactory": _llamafactory,
    "axolotl": _axolotl,
    "transformers": _transformers,
    "accelerate": _accelerate,
    "trl": _trl,
    "tutorials": _tutorials,
    "tests": _tests,
    "examples": _examples,
}
CONFIGS: Mapping[str, Config] = {
    f"{project}/{name}": made for project, make in _SOURCES.items() for name, made in make().items()
}


# --- for a test to train with ---------------------------------------------------------------------

# What Trainer puts for "auto" by default, in a bf16 run of 100 steps of a model with hidden_size 64
_FILLED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 1,
    "scheduler.params.total_num_steps": 100,
    "bf16.enabled": True,
    "bfloat16.enabled": True,
    "fp16.enabled": False,
    "zero_optimization.reduce_bucket_size": 64 * 64,
    "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * 64 * 64),
    "zero_optimization.stage3_param_persistence_threshold": 10 * 64,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
}


def ready(name: str, nvme_path: str, world_size: int = 1) -> Config:
    """Copy a configuration: with numbers for "auto", at most 2 samples and 2 backwards a rank,
    files below nvme_path.
    """
    config = copy.deepcopy(CONFIGS[name])
    if config.get("fp16", {}).get("enabled") == _AUTO and "bf16" not in config:
        config["fp16"]["enabled"] = True  # a file for fp16 alone
    _fill(config, "")
    micro = min(config.get("train_micro_batch_size_per_gpu", 2), 2)
    steps = min(config.get("gradient_accumulation_steps", 1), 2)
    config.pop("train_batch_size", None)
    config |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    if "train_batch_size" in CONFIGS[name]:
        config["train_batch_size"] = micro * steps * world_size
    zero = config["zero_optimization"] if isinstance(config.get("zero_optimization"), dict) else {}
    for tier in ("offload_optimizer", "offload_param"):
        if zero.get(tier, {}).get("nvme_path"):
            zero[tier]["nvme_path"] = nvme_path
    return config


def _fill(section: Config, prefix: str) -> None:
    for key, value in section.items():
        path = prefix + key
        if isinstance(value, dict):
            _fill(value, path + ".")
        elif value == _AUTO and path != "train_batch_size":
            section[key] = copy.deepcopy(_FILLED[path])
