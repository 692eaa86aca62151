"""The keys of a DeepSpeed configuration: what each becomes here, why it means nothing, or why it is
refused.

The one table that configurations are checked with (config.py) and that docs/deepspeed_keys.md is
made from. A key is
- honoured: its value is checked, and used;
- accepted: it means nothing here, and the log says why, once;
- refused, or removed by DeepSpeed itself: an error that says what to do instead, unless its value
turns the thing off. Every other key is refused, with the nearest known one. Source: DeepSpeed
0.19.8's configuration classes, and https://www.deepspeed.ai/docs/config-json.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardcore.deepspeed.checks import (
    BELOW_1,
    COUNT,
    FLAG,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    Check,
    has,
    instance,
    integer,
    number,
    word,
)
from shardcore.deepspeed.lr_schedules import check_scheduler
from shardcore.optim import Lion, Muon
from shardcore.optim.elementwise import ELEMENTWISE

OP = "initialize"


@dataclass(frozen=True)
class Key:
    """A key. kind: "honoured", "accepted", "refused" or "removed". note: what it becomes, why it
    means nothing, what to do.

    check: of honoured keys. harmless: values of refused keys that turn the thing off, beside null
    and false. field: of Config that has the value, where its name differs from the key's.
    """

    kind: str
    note: str
    check: Check = lambda where, value: value
    harmless: tuple[Any, ...] = ()
    field: str = ""

    def is_off(self, value: Any) -> bool:
        """Whether a value turns off what is refused: a section does that is empty, or that
        "enabled" is false in.
        """
        if isinstance(value, Mapping) and value not in self.harmless:
            switches = _switches(value)
            value = any(switches) if switches else bool(value)
        return value is None or value is False or any(value == one for one in self.harmless)


def _switches(section: Mapping[str, Any]) -> list[Any]:
    """Return what a section has as "enabled", or else what the sections in it have."""
    if "enabled" in section:
        return [section["enabled"]]
    return [
        switch
        for value in section.values()
        if isinstance(value, Mapping)
        for switch in _switches(value)
    ]


# --- checks of values -----------------------------------------------------------------------------


def _or_none(check: Check) -> Check:
    return lambda where, value: None if value is None else check(where, value)


def _betas(where: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError(has(where, value, "two numbers [beta1, beta2]"))
    beta1, beta2 = (BELOW_1(f"{where}[{i}]", beta) for i, beta in enumerate(value))
    return beta1, beta2


_share = number(0.0, 1.0, "a number from 0 to 1 (the share that the CPU updates)")
_text = instance(str, "text")


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise TypeError(has(where, value, "a list of texts"))
    return tuple(value)


def _patterns(where: str, value: Any) -> tuple[str, ...] | None:
    if value is None or value == "auto":
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(has(where, value, '"auto", or a list of patterns of names'))
    return tuple(value)


# What the section "shardcore" may have: arguments of shard, its offload's, and FusedAdam's, which
# check the values.
OF_SHARD = (
    "overlap_step",
    "reduction",
    "ranks_per_node",
    "mesh",
    "reshard_after_forward",
    "prefetch",
    "units",
    "sync_each",
)
OF_OFFLOAD = (
    *("gradients", "ratio", "device_memory_limit", "durable", "resume", "path", "pin_memory_limit"),
    "cpu_threads",
)
OF_ADAM = ("state_dtype", "master", "stochastic_rounding")


def _own(where: str, value: Any) -> dict[str, Any]:
    """Check the names of what shardcore alone has."""
    known: dict[str, Sequence[str]] = {
        "": (*OF_SHARD, "offload", "optimizer"),
        "offload": OF_OFFLOAD,
        "optimizer": OF_ADAM,
    }
    for name, keys in known.items():
        path, section = f"{where}.{name}" if name else where, value.get(name, {}) if name else value
        if name == "offload" and section == "auto":
            continue
        if not isinstance(section, Mapping):
            raise TypeError(
                has(path, section, "an object with keys" + ', or "auto"' * (name == "offload"))
            )
        for key in section:
            if key not in keys:
                meant = [
                    f" (shardcore.{other}.{key}?)"
                    for other, its in known.items()
                    if other and key in its
                ]
                expected = ", ".join(keys) + "".join(meant)
                raise ValueError(f"{path}.{key} is not supported; expected one of {expected}")
    mesh = value.get("mesh", [1, 1])
    if (
        not isinstance(mesh, list | tuple)
        or len(mesh) != 2
        or not all(type(size) is int and size > 0 for size in mesh)
    ):
        raise ValueError(has(f"{where}.mesh", mesh, "two numbers of ranks: [replicate, shard]"))
    return dict(value)


def _device(where: str, value: Any) -> str | None:
    if value not in ("cpu", "nvme", "none"):
        raise (ValueError if isinstance(value, str) else TypeError)(
            has(where, value, '"cpu", "nvme" or "none"')
        )
    return None if value == "none" else str(value)


def _dtype(*known: str) -> Check:
    """Check the name of a dtype, in each of its spellings, and return ours."""
    spelled = {
        "float32": "fp32",
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float": "fp32",
    }
    check = word(*known, expected=" or ".join(f'"{name}"' for name in known))

    def checked(where: str, value: Any) -> Any:
        if isinstance(value, str):
            name = value.lower().removeprefix("torch.")
            value = spelled.get(name, name)
        return check(where, value)

    return checked


def _slices(where: str, value: Any) -> int:
    return int(SIZE(where, value)) or 1  # 0: off


def _prefetch(where: str, value: Any) -> float:
    # trainers may leave it, or compute no whole number
    return 1.0 if value == "auto" else NOT_NEGATIVE(where, value)


_power = integer(0, 127, "0 to 127 (the scale is 2 to that power, in float32)")
_stage = integer(0, 3, "0, 1, 2 or 3", kind="0, 1, 2 or 3")
# By their names in lower case; they get optimizer.params as arguments.
OTHER_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    cls.__name__.lower(): cls for cls in (*ELEMENTWISE, Lion, Muon)
}
_OTHERS = ", ".join(cls.__name__ for cls in OTHER_OPTIMIZERS.values())
_adam = word(
    "adam",
    "adamw",
    expected='"Adam" or "AdamW"',
    otherwise=f", or {_OTHERS} (DeepSpeed has Lamb and 1-bit ones)",
)


def _print(where: str, value: Any) -> int | None:
    """Check steps_per_print, which Accelerate sets to infinity for never."""
    checked: int | None = None if value is None or value == math.inf else COUNT(where, value)
    return checked


# --- the table ------------------------------------------------------------------------------------


def _honoured(check: Check, note: str, field: str = "") -> Key:
    return Key("honoured", note, check, field=field)


_accepted = partial(Key, "accepted")
_refused = partial(Key, "refused")
_removed = partial(Key, "removed")

_BY_UNIT = (
    "gradients are reduced, and weights gathered, a unit of the model at a time, whatever its size"
)
_OWN_BUFFERS = "offload sizes its own buffers"
_ONE_CHECKPOINT = "every checkpoint is written by all ranks and loads into any number of them"
_LEAF_MODULES = "modules inside which nothing is a unit, as marked by utils.set_z3_leaf_modules"
_ZERO = "zero_optimization"
# Sections in sections; a name of several words is several keys.
_TABLE: dict[str, Any] = {
    "shardcore": _honoured(
        _own,
        f"what DeepSpeed has no key for: {', '.join(OF_SHARD)} of shard (mesh: [replicate, shard], "
        f"sizes of a DeviceMesh); "
        f'offload: "auto", or offload.({", ".join(OF_OFFLOAD)}); optimizer.({", ".join(OF_ADAM)}) '
        f"of FusedAdam",
    ),
    "train_batch_size": _honoured(_or_none(COUNT), "samples per optimizer step over all ranks"),
    "train_micro_batch_size_per_gpu": _honoured(
        _or_none(COUNT), "samples per backward on one rank"
    ),
    "gradient_accumulation_steps": _honoured(_or_none(COUNT), "backwards per optimizer step"),
    "gradient_clipping": _honoured(NOT_NEGATIVE, "global norm to clip to; 0 for none"),
    "steps_per_print": _honoured(_print, "steps between two lines of progress; null for none"),
    "dataloader_drop_last": _honoured(FLAG, "drop the last, smaller batch of an epoch"),
    "communication_data_type": _honoured(
        _or_none(_dtype("fp32", "bf16", "fp16")), "dtype of gradients that ranks send"
    ),
    "wall_clock_breakdown": _honoured(
        FLAG, "log the time of forward, backward, the update, and what they wait for"
    ),
    "memory_breakdown": _honoured(FLAG, "log the memory of weights, gradients and states"),
    "dump_state": _honoured(FLAG, "log the configuration"),
    "log_level": _honoured(
        _or_none(
            word(
                "debug",
                "info",
                "warning",
                "error",
                "critical",
                expected="the name of a level of logging",
            )
        ),
        "level of the logger shardcore",
    ),
    "optimizer": {
        "type": _honoured(
            _adam,
            f'FusedAdam; "Adam" means AdamW, too, unless adam_w_mode is false. {_OTHERS}: with '
            f"params as its arguments (of Muon DeepSpeed's; of Lion DeepSpeed's defaults)",
        ),
        "legacy_fusion": _accepted("there is one fused Adam"),
    },
    "optimizer.params": {
        "lr": _honoured(NOT_NEGATIVE, "FusedAdam(lr=)"),
        "betas": _honoured(_betas, "FusedAdam(betas=)"),
        "eps": _honoured(NOT_NEGATIVE, "FusedAdam(eps=)"),
        "weight_decay": _honoured(NOT_NEGATIVE, "FusedAdam(weight_decay=)"),
        "bias_correction": _honoured(FLAG, "FusedAdam(bias_correction=)"),
        "adam_w_mode": _honoured(FLAG, "FusedAdam(adam_w_mode=)"),
        "amsgrad": _honoured(FLAG, "FusedAdam(amsgrad=)"),
        "maximize": _honoured(FLAG, "FusedAdam(maximize=)"),
        "torch_adam": _honoured(
            FLAG,
            "true: FusedAdam, too, with weight_decay 0.01 by default if adam_w_mode is true",
        ),
        "fp32_optimizer_states": _honoured(FLAG, 'false: FusedAdam(state_dtype="bf16")'),
        "foreach fused set_grad_none": _accepted(
            "Adam has one implementation here, which follows torch.optim's formula"
        ),
        "max_grad_norm": _refused("clip with gradient_clipping"),
    },
    "scheduler": _honoured(
        check_scheduler,
        "type: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest or one of torch's; "
        "params: its arguments",
    ),
    "fp16": {
        "enabled": _honoured(FLAG, "train in float16, with float32 masters", "fp16"),
        "auto_cast": _honoured(FLAG, "cast inputs of forward to float16", "auto_cast"),
        "loss_scale": _honoured(NOT_NEGATIVE, "a fixed loss scale; 0 for a dynamic one"),
        "initial_scale_power": _honoured(_power, "the first loss scale is 2 to this power"),
        "loss_scale_window": _honoured(COUNT, "steps without overflow before it doubles"),
        "hysteresis": _honoured(COUNT, "overflows before it halves"),
        "min_loss_scale": _honoured(POSITIVE, "the smallest loss scale"),
        "consecutive_hysteresis": _honoured(
            FLAG, "count hysteresis anew after a step without overflow"
        ),
        "fp16_master_weights_and_grads": _refused("masters are float32"),
    },
    "bf16": {
        "enabled": _honoured(FLAG, "train in bfloat16, with float32 masters", "bf16"),
        "bf16_optimizer_states": _honoured(FLAG, 'FusedAdam(state_dtype="bf16")'),
        "bf16_master_weights_and_grads": _honoured(
            FLAG,
            'shard(grad_dtype="bf16"), FusedAdam(master="split"): masters stay exact, 2 bytes '
            "beside the bfloat16 weight",
        ),
        "immediate_grad_update": _accepted("gradients are always reduced during backward"),
        "check_grad_overflow": _accepted(
            "every step is checked for non-finite gradients, at no cost"
        ),
    },
    "data_types": {
        "grad_accum_dtype": _honoured(
            _or_none(_dtype("fp32", "bf16")), "shard(grad_dtype=)", "grad_dtype"
        ),
        "param_dtype": _honoured(
            _or_none(_dtype("fp32", "bf16", "fp16")),
            "has to be the dtype that fp16 and bf16 decide on",
        ),
        "buffer_dtype": _honoured(
            _or_none(_dtype("fp32", "bf16", "fp16")),
            "beside 16-bit weights buffers of floating point are cast to it; null: they keep "
            "theirs",
            "buffer_dtype",
        ),
        "keep_in_fp32_modules": _honoured(
            _patterns,
            'buffers that are float32 beside 16-bit weights: patterns of names, or "auto": the '
            "model's own lists",
            "keep_in_fp32_modules",
        ),
    },
    "torch_autocast": {
        "enabled": _honoured(
            FLAG, "run forward under torch.autocast, with float32 or bfloat16 weights"
        ),
        "dtype": _honoured(
            _or_none(_dtype("bf16", "fp16")),
            "autocast's dtype, bfloat16 by default; float16 with a loss scale",
        ),
        "lower_precision_safe_modules": _accepted(
            "ranks send gradients in communication_data_type"
        ),
    },
    "prescale_gradients gradient_predivide_factor": _accepted(
        "gradients are averaged in float32 and in rank order, where no factor can overflow"
    ),
    "gradient_allreduce_op": _honoured(
        word("mean", "sum", expected='"mean" or "sum"'),
        "mean; or sum, at stages 0 to 2: gradients are added up over ranks",
    ),
    "disable_allgather": _accepted("DeepSpeed does not read it either"),
    "managed_gradient_accumulation": _honoured(
        FLAG,
        "false: every step() updates, and backward() still divides by gradient_accumulation_steps",
    ),
    "cuda_visible_devices": _accepted(
        "set the variable CUDA_VISIBLE_DEVICES before the program starts, as for DeepSpeed"
    ),
    "vocabulary_size": _accepted("DeepSpeed only warns of it"),
    "zero_allow_untested_optimizer": _honoured(
        lambda where, value: FLAG(where, bool(value) if value in (0, 1) else value),
        "try an optimizer of an unknown class: it is taken if three steps of a tensor and of its "
        "flat parts have the same bits",
    ),
    "zero_force_ds_cpu_optimizer": _accepted("torch's Adam and AdamW are converted"),
    "seq_parallel_communication_data_type": _accepted(
        "sequence parallel attention exchanges values in their dtype"
    ),
    "allgather_size": _accepted(_BY_UNIT),
    _ZERO: {
        "stage": _honoured(_stage, "shard(stage=)", "stage"),
        "zero_hpz_partition_size": _honoured(
            SIZE, "shard(reshard_after_forward=) at stage 3, if above 1", "hpz_partition_size"
        ),
        "prefetch_bucket_size": _honoured(
            _prefetch,
            "0: shard(prefetch=0); more: weights are gathered one unit ahead",
            "prefetch_bucket_size",
        ),
        "gather_16bit_weights_on_model_save": _honoured(
            FLAG,
            "false: save_16bit_model saves nothing at stage 3, and returns False",
            "gathers_to_save",
        ),
        "overlap_comm contiguous_gradients round_robin_gradients "
        "use_multi_rank_bucket_allreduce": _accepted(
            "communication always overlaps with backward, with the same bits"
        ),
        "reduce_scatter allgather_partitions use_all_reduce_for_fetch_params "
        "allgather_sequential": _accepted(
            "each gradient is sent to the rank that owns it, and weights are gathered from these"
        ),
        "reduce_bucket_size allgather_bucket_size sub_group_size": _accepted(_BY_UNIT),
        "max_live_parameters max_reuse_distance module_granularity_threshold": _accepted(
            "at stage 3 two units are unsharded at a time, the one in use and the next, whatever "
            "their size"
        ),
        "leaf_module.classes": _honoured(_texts, _LEAF_MODULES, "leaf_classes"),
        "leaf_module.names": _honoured(_texts, _LEAF_MODULES, "leaf_names"),
        "leaf_module.name_suffixes": _honoured(_texts, _LEAF_MODULES, "leaf_suffixes"),
        "param_persistence_threshold model_persistence_threshold": _accepted(
            "a unit's parameters are gathered together, in a message for each dtype and group: "
            "small ones cost none of their own"
        ),
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint": _accepted(
            _ONE_CHECKPOINT
        ),
        "enable_sanity_checks": _accepted(
            "steps, gradients and checkpoints of ranks are always compared; edits inside "
            "GatheredParameters without modifier_rank, which it has DeepSpeed refuse, count here, "
            "and have to be the same on all ranks: at stage 3 the end of the block refuses others, "
            "below it a step does (but not through p.data, which is not noticed)"
        ),
        "compute_grad_norm": _accepted("the norm is always computed"),
        "ignore_unused_parameters": _honoured(
            FLAG,
            "false: at stages 1 and 2 with offload_optimizer on cpu a step needs the gradients "
            "of all parameters",
            "ignore_unused_parameters",
        ),
        "grad_hooks": _accepted("gradients are always reduced by hooks"),
        "parameter_alignment": _accepted("buffers are always aligned"),
        "memory_efficient_linear override_module_apply log_trace_cache_warnings": _accepted(
            "modules are left as they are"
        ),
        "save_muon_momentum_buffer_in_memory": _accepted(
            "Muon's momentum is where offload_optimizer says"
        ),
        "zenflow": _refused("offload here is exact, and hides behind compute; remove the section"),
        "zero_quantized_weights zero_quantized_gradients": _refused(
            "ranks exchange unquantized numbers; halve them with bf16 and "
            'communication_data_type "bf16"'
        ),
        "zero_quantized_nontrainable_weights": _refused(
            "load the frozen weights in 8 or 4 bits yourself"
        ),
        "legacy_stage1": _removed("stage 1 has one form"),
        "mics_shard_size": _removed(
            "shard over a DeviceMesh with shardcore.shard, or set zero_hpz_partition_size",
            harmless=(-1,),
        ),
        "mics_hierarchical_params_gather": _removed("as mics_shard_size"),
        "zeropp_loco_param": _removed("gradients are not quantized"),
    },
    f"{_ZERO}.offload_optimizer": {
        "device": _honoured(_device, 'shard(offload={"optimizer": ...})', "offload"),
        "pin_memory": _honoured(FLAG, "page-lock host memory that the GPU reads or writes"),
        "ratio": _honoured(_share, "the share of states that the CPU updates", "ratio"),
        "nvme_path": _honoured(
            _or_none(_text), 'shard(offload={"path": ...}) of the device nvme', "nvme_path"
        ),
        "buffer_count pipeline pipeline_read pipeline_write fast_init": _accepted(_OWN_BUFFERS),
        "super_offload cpuadam_cores_perc": _accepted(
            "the CPU's Adam runs beside the GPU, exactly, on the cores that are there"
        ),
    },
    f"{_ZERO}.offload_param": {
        "device": _honoured(
            _device,
            'shard(offload={"params": ...}) at stage 3; nothing below it, as in DeepSpeed',
            "params",
        ),
        "pin_memory": _honoured(FLAG, "as that of offload_optimizer"),
        "nvme_path": _honoured(
            _or_none(_text),
            "that of offload_optimizer: states and weights are beside each other",
        ),
        "buffer_count buffer_size max_in_cpu": _accepted(_OWN_BUFFERS),
    },
    "aio": {
        "block_size queue_depth thread_count intra_op_parallelism single_submit "
        "overlap_events": _accepted(
            "files are written and read with requests of 1 MiB, 16 at a time"
        ),
        "use_gds": _refused("files are read through host memory"),
    },
    "activation_checkpointing": {
        "cpu_checkpointing": _honoured(
            FLAG,
            "deepspeed.checkpointing.checkpoint keeps its inputs in host memory",
            "cpu_checkpointing",
        ),
        "partition_activations": _accepted(
            "deepspeed.checkpointing keeps inputs whole (shardcore.checkpoint_wrapper takes a "
            "group)"
        ),
        "contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary profile": _accepted(
            "checkpoints are torch.utils.checkpoint's"
        ),
    },
    "tensorboard": {
        "enabled": _honoured(FLAG, "write metrics for TensorBoard"),
        "output_path job_name": _honoured(_text, "files are in the folder output_path/job_name"),
    },
    "csv_monitor": {
        "enabled": _honoured(FLAG, "write metrics to CSV files"),
        "output_path job_name": _honoured(_text, "files are in the folder output_path/job_name"),
    },
    "wandb": {
        "enabled": _honoured(FLAG, "send metrics to Weights & Biases"),
        "group team": _honoured(_or_none(_text), "of the run"),
        "project": _honoured(_text, 'of the run; "deepspeed" by default'),
    },
    "comet": _refused("use tensorboard, csv_monitor or wandb"),
    "comms_logger": {
        "enabled": _honoured(
            FLAG,
            "log how often each collective was started, with each line of progress",
            "comms_logger",
        ),
        "verbose prof_all prof_ops debug": _accepted(
            "all collectives are counted (their bytes: shardcore estimate)"
        ),
    },
    "flops_profiler": {
        "enabled": _honoured(
            FLAG,
            "print what FlopsProfiler of profiling.flops_profiler counts in one forward",
            "flops_profiler",
        ),
        "profile_step": _honoured(
            integer(0, math.inf, "at least 0"),
            "how many steps come before, as in DeepSpeed",
            "profile_step",
        ),
        "module_depth": _honoured(
            integer(-1, math.inf, "at least -1"),
            "how deep modules are listed; -1 for all",
            "module_depth",
        ),
        "top_modules": _honoured(
            COUNT, "how many classes of modules are named at each depth", "top_modules"
        ),
        "detailed": _honoured(FLAG, "whether each module is listed", "detailed"),
        "output_file": _honoured(_or_none(_text), "a file instead of the output", "profile_file"),
        "recompute_fwd_factor": _accepted("backward is not counted"),
    },
    "checkpoint": {
        "tag_validation": _honoured(
            word("ignore", "warn", "fail", expected='"Ignore", "Warn" or "Fail"'),
            "of tags that differ by rank rank 0's holds; Warn: with a warning; Fail: an error",
            "tag_validation",
        ),
        "load_universal parallel_write.pipeline_stage": _accepted(_ONE_CHECKPOINT),
        "checkpoint_serialization": _accepted("nothing is pickled"),
        "writer": _accepted(
            "files are written past the page cache, durably; save_checkpoint(wait=False) in "
            "the background"
        ),
        "use_node_local_storage": _refused("save to a directory that all ranks see"),
    },
    "timers.throughput.enabled": _accepted("progress is logged every steps_per_print steps"),
    "timers.throughput.synchronized": _accepted("progress is logged every steps_per_print steps"),
    "disable_python_gc": _refused("call gc.disable()"),
    "datastates_ckpt": _refused("use save_checkpoint(wait=False)"),
    "tensor_parallel": {
        "autotp_size": _honoured(
            _slices,
            "slice the model by its plan over so many adjacent ranks, shard it over the "
            "others: docs/tensor_parallel.md",
            "autotp_size",
        ),
        "tp.tp_size": _honoured(_slices, "has to equal autotp_size"),
        "dtype": _accepted("fp16 and bf16 decide on it"),
        "preset_model tp.tp_grain_size": _accepted("slices are equal, by the model's own plan"),
        "tp_overlap_comm": _accepted("torch's parallel styles decide when ranks add up"),
        "vocab_parallel_lm_head vocab_parallel_ce_backend": _accepted(
            "logits are whole, on every rank"
        ),
        "partition_config injection_policy_tuple": _refused(
            'call shardcore.tensor_parallel(model, mesh["tp"], plan=...) before initialize'
        ),
        "keep_module_on_host": _refused('build the model under torch.device("meta")'),
        "replace_with_kernel_inject": _refused("it is for inference"),
        "tp.mpu tp.tp_group": _refused("adjacent ranks have a model together"),
    },
    "sequence_parallel_size": _honoured(
        COUNT, "the ranks of a sequence, which `mpu` has: docs/long_sequences.md"
    ),
    "expert_parallel": _refused("experts are sharded like other weights"),
    "moe": _refused("experts are sharded like other weights"),
    "use_data_before_expert_parallelism": _refused("experts are sharded like other weights"),
    "pipeline.activation_checkpoint_interval": _honoured(
        SIZE,
        "PipelineModule(activation_checkpoint_interval=); 0: as the module says",
        "activation_checkpoint_interval",
    ),
    "pipeline.stages pipeline.partition pipeline.seed_layers "
    "pipeline.pipe_partitioned pipeline.grad_partitioned pipeline.use_reentrant": _accepted(
        "PipelineModule's own arguments say it, or there is nothing to choose"
    ),
    "hybrid_engine": _refused("generate inside shardcore.full_params(model)"),
    "compile": _refused(
        "compile the model's blocks with torch.compile", harmless=({"deepcompile": False},)
    ),
    "weight_quantization": _refused("it is for inference"),
    "data_efficiency": _refused("sample in a DataLoader of your own"),
    "autotuning": _refused("use `shardcore estimate`"),
    "sparse_gradients": _removed("gradients of embeddings are dense"),
    "amp": _removed("use bf16, fp16 or torch_autocast"),
    "elasticity": _removed("set the batch sizes; checkpoints load into any number of ranks"),
    "curriculum_learning": _removed("shorten sequences in a DataLoader of your own"),
    "compression_training": _removed("it is not built"),
    "quantize_training": _removed("it is not built"),
    "eigenvalue": _removed("it is not built"),
    "sparse_attention": _removed("use torch's scaled_dot_product_attention or flex_attention"),
    "progressive_layer_drop": _removed("drop layers in the model"),
    "graph_harvesting": _removed("it is not built"),
    "nebula": _removed("save_checkpoint is durable, and wait=False saves in the background"),
}


def _flattened(section: Mapping[str, Any], where: str) -> Iterator[tuple[str, Key]]:
    for names, entry in section.items():
        for name in names.split():
            if isinstance(entry, Key):
                yield where + name, entry
            else:
                yield from _flattened(entry, f"{where}{name}.")


KEYS = dict(_flattened(_TABLE, ""))

# Other spellings of keys and sections. Old ones of offload are translated in config.py.
ALIASES = {
    "bfloat16": "bf16",
    f"{_ZERO}.gather_fp16_weights_on_model_save": f"{_ZERO}.gather_16bit_weights_on_model_save",
    f"{_ZERO}.hpz_partition_size": f"{_ZERO}.zero_hpz_partition_size",
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
}
_STAGE3 = f"{_ZERO}.stage3_"
# and what begins with "_" or "comment": notes, which DeepSpeed ignores, too
IGNORED = ("comms_config", "monitor_config")


def canonical(path: str) -> str:
    """Return the spelling of a key that the table has."""
    if path.startswith(_STAGE3):
        path = f"{_ZERO}.{path.removeprefix(_STAGE3)}"
    return ALIASES.get(path, path)


def is_note(name: str) -> bool:
    """Whether a key is a note to the reader."""
    return name in IGNORED or name.lstrip("_").lower().startswith("comment") or name.startswith("_")


SECTIONS = (
    frozenset(path.rpartition(".")[0] for path in KEYS if "." in path)
    | frozenset(path.split(".", 1)[0] for path in KEYS if "." in path)
    | {f"{_ZERO}.leaf_module", "checkpoint.parallel_write", "timers"}
)
