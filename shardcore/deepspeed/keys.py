"""The keys of a DeepSpeed configuration: the effect of each, or why it has no effect or is refused.

config.py checks configurations against this table, and docs/deepspeed_keys.md is generated from it.
A key is
- honoured: its value is checked and used;
- accepted: it has no effect here, and the log gives the reason once;
- refused, or removed by DeepSpeed itself: an error names the alternative, unless the value turns
the feature off. Every other key is refused, with the nearest known one. Source: DeepSpeed 0.19.8's
configuration classes, and https://www.deepspeed.ai/docs/config-json.
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
    instance,
    integer,
    number,
    unexpected,
    word,
)
from shardcore.deepspeed.lr_schedules import check_scheduler
from shardcore.optim import Lion, Muon
from shardcore.optim.elementwise import ELEMENTWISE

OP = "initialize"


@dataclass(frozen=True)
class Key:
    """A key. kind: "honoured", "accepted", "refused" or "removed". note: its effect, or why it has
    none, or the alternative.

    check: of honoured keys. harmless: values of refused keys that turn the feature off, beside null
    and false. field: the field of Config for the value, if its name differs from the key's.
    """

    kind: str
    note: str
    check: Check = lambda where, value: value
    harmless: tuple[Any, ...] = ()
    field: str = ""

    def is_off(self, value: Any) -> bool:
        """Whether a value turns the refused feature off. An empty section does, and a section in
        which "enabled" is false.
        """
        if isinstance(value, Mapping) and value not in self.harmless:
            switches = _switches(value)
            value = any(switches) if switches else bool(value)
        return value is None or value is False or any(value == one for one in self.harmless)


def _switches(section: Mapping[str, Any]) -> list[Any]:
    """Return the value of "enabled" in a section, or else the values in its own sections."""
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
        raise TypeError(unexpected(where, value, "two numbers [beta1, beta2]"))
    beta1, beta2 = (BELOW_1(f"{where}[{i}]", beta) for i, beta in enumerate(value))
    return beta1, beta2


_share = number(0.0, 1.0, "a number from 0 to 1 (the share that the CPU updates)")
_text = instance(str, "text")


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise TypeError(unexpected(where, value, "a list of texts"))
    return tuple(value)


def _patterns(where: str, value: Any) -> tuple[str, ...] | None:
    if value is None or value == "auto":
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(unexpected(where, value, '"auto", or a list of patterns of names'))
    return tuple(value)


# Keys of the section "shardcore": arguments of shard, of its offload and of FusedAdam, which check
# the values.
OF_SHARD = (
    "overlap_step",
    "reduction",
    "ranks_per_node",
    "mesh",
    "reshard_after_forward",
    "prefetch",
    "units",
    "sync_each",
    "audit",
)
OF_OFFLOAD = (
    *("gradients", "ratio", "device_memory_limit", "durable", "resume", "path", "pin_memory_limit"),
    "cpu_threads",
)
OF_ADAM = ("state_dtype", "master", "stochastic_rounding")


def _own(where: str, value: Any) -> dict[str, Any]:
    """Check the names in the section "shardcore"."""
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
                unexpected(
                    path, section, "an object with keys" + ', or "auto"' * (name == "offload")
                )
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
        raise ValueError(
            unexpected(f"{where}.mesh", mesh, "two numbers of ranks: [replicate, shard]")
        )
    return dict(value)


def _device(where: str, value: Any) -> str | None:
    if value not in ("cpu", "nvme", "none"):
        raise (ValueError if isinstance(value, str) else TypeError)(
            unexpected(where, value, '"cpu", "nvme" or "none"')
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
    # trainers may leave "auto" here, or compute a fraction
    return 1.0 if value == "auto" else NOT_NEGATIVE(where, value)


_power = integer(0, 127, "0 to 127 (the scale is 2 to that power, in float32)")
_stage = integer(0, 3, "0, 1, 2 or 3", kind="0, 1, 2 or 3")
# By their names in lower case; optimizer.params are their arguments.
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
    "gradients are reduced, and weights gathered, one unit of the model at a time, of any size"
)
_OWN_BUFFERS = "offload chooses the sizes of its buffers"
_ONE_CHECKPOINT = "all ranks write each checkpoint, and any number of ranks can load it"
_LEAF_MODULES = "modules without units inside, as marked by utils.set_z3_leaf_modules"
_ZERO = "zero_optimization"
# Sections in sections; a name of several words is several keys.
_TABLE: dict[str, Any] = {
    "shardcore": _honoured(
        _own,
        f"options without a DeepSpeed key: {', '.join(OF_SHARD)} of shard "
        f"(mesh: [replicate, shard], sizes of a DeviceMesh); "
        f'offload: "auto", or offload.({", ".join(OF_OFFLOAD)}); optimizer.({", ".join(OF_ADAM)}) '
        f"of FusedAdam",
    ),
    "train_batch_size": _honoured(_or_none(COUNT), "samples per optimizer step over all ranks"),
    "train_micro_batch_size_per_gpu": _honoured(
        _or_none(COUNT), "samples per backward on one rank"
    ),
    "gradient_accumulation_steps": _honoured(_or_none(COUNT), "backwards per optimizer step"),
    "gradient_clipping": _honoured(
        NOT_NEGATIVE, "maximum global norm of the gradients; 0: no clipping"
    ),
    "steps_per_print": _honoured(_print, "steps between two lines of progress; null: no lines"),
    "dataloader_drop_last": _honoured(FLAG, "drop the last, smaller batch of an epoch"),
    "communication_data_type": _honoured(
        _or_none(_dtype("fp32", "bf16", "fp16")), "dtype in which ranks send gradients"
    ),
    "wall_clock_breakdown": _honoured(
        FLAG, "log the times of forward, backward and the update, and their waits"
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
        "level of the logger `shardcore`",
    ),
    "optimizer": {
        "type": _honoured(
            _adam,
            f'Adam and AdamW: FusedAdam; "Adam" means AdamW, unless adam_w_mode is false. '
            f"{_OTHERS}: params are the arguments (Muon: DeepSpeed's arguments; Lion: DeepSpeed's "
            f"defaults)",
        ),
        "legacy_fusion": _accepted("shardcore has one fused Adam"),
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
            "true: FusedAdam all the same; if adam_w_mode is true, weight_decay is 0.01 by default",
        ),
        "fp32_optimizer_states": _honoured(FLAG, 'false: FusedAdam(state_dtype="bf16")'),
        "foreach fused set_grad_none": _accepted(
            "shardcore has one implementation of Adam, with torch.optim's formula"
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
        "auto_cast": _honoured(FLAG, "cast the inputs of forward to float16", "auto_cast"),
        "loss_scale": _honoured(NOT_NEGATIVE, "a fixed loss scale; 0: a dynamic one"),
        "initial_scale_power": _honoured(_power, "the first loss scale is 2 to this power"),
        "loss_scale_window": _honoured(
            COUNT, "steps without overflow before the loss scale doubles"
        ),
        "hysteresis": _honoured(COUNT, "overflows before the loss scale halves"),
        "min_loss_scale": _honoured(POSITIVE, "the smallest loss scale"),
        "consecutive_hysteresis": _honoured(
            FLAG, "start the count of hysteresis again after a step without overflow"
        ),
        "fp16_master_weights_and_grads": _refused("masters are float32 here"),
    },
    "bf16": {
        "enabled": _honoured(FLAG, "train in bfloat16, with float32 masters", "bf16"),
        "bf16_optimizer_states": _honoured(FLAG, 'FusedAdam(state_dtype="bf16")'),
        "bf16_master_weights_and_grads": _honoured(
            FLAG,
            'shard(grad_dtype="bf16"), FusedAdam(master="split"): masters stay exact, in '
            "2 bytes beside the bfloat16 weight",
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
            "must be the dtype selected by fp16 and bf16",
        ),
        "buffer_dtype": _honoured(
            _or_none(_dtype("fp32", "bf16", "fp16")),
            "beside 16-bit weights, floating-point buffers are cast to this dtype; null: buffers "
            "keep their dtype",
            "buffer_dtype",
        ),
        "keep_in_fp32_modules": _honoured(
            _patterns,
            'buffers kept in float32 beside 16-bit weights: patterns of names, or "auto" for the '
            "model's own lists",
            "keep_in_fp32_modules",
        ),
    },
    "torch_autocast": {
        "enabled": _honoured(
            FLAG, "run forward under torch.autocast, over float32 or bfloat16 weights"
        ),
        "dtype": _honoured(
            _or_none(_dtype("bf16", "fp16")),
            "dtype of autocast, bfloat16 by default; float16 uses a loss scale",
        ),
        "lower_precision_safe_modules": _accepted(
            "ranks send gradients in communication_data_type"
        ),
    },
    "prescale_gradients gradient_predivide_factor": _accepted(
        "gradients are averaged in float32, in rank order; no factor can overflow"
    ),
    "gradient_allreduce_op": _honoured(
        word("mean", "sum", expected='"mean" or "sum"'),
        "mean; or, at stages 0 to 2, sum: gradients are added up over ranks",
    ),
    "disable_allgather": _accepted("DeepSpeed does not read this key either"),
    "managed_gradient_accumulation": _honoured(
        FLAG,
        "false: every step() updates the weights; backward() still divides by "
        "gradient_accumulation_steps",
    ),
    "cuda_visible_devices": _accepted(
        "set the variable CUDA_VISIBLE_DEVICES before the program starts, as for DeepSpeed"
    ),
    "vocabulary_size": _accepted("DeepSpeed uses it for a warning only"),
    "zero_allow_untested_optimizer": _honoured(
        lambda where, value: FLAG(where, bool(value) if value in (0, 1) else value),
        "try an optimizer of an unknown class: it is accepted if three steps of a tensor and of "
        "the tensor's flat parts have the same bits",
    ),
    "zero_force_ds_cpu_optimizer": _accepted("torch's Adam and AdamW are converted"),
    "seq_parallel_communication_data_type": _accepted(
        "sequence parallel attention sends values in their own dtype"
    ),
    "allgather_size": _accepted(_BY_UNIT),
    _ZERO: {
        "stage": _honoured(_stage, "shard(stage=)", "stage"),
        "zero_hpz_partition_size": _honoured(
            SIZE, "above 1, at stage 3: shard(reshard_after_forward=)", "hpz_partition_size"
        ),
        "prefetch_bucket_size": _honoured(
            _prefetch,
            "0: shard(prefetch=0); more: weights are gathered one unit ahead",
            "prefetch_bucket_size",
        ),
        "gather_16bit_weights_on_model_save": _honoured(
            FLAG,
            "false: at stage 3 save_16bit_model saves nothing and returns False",
            "gathers_to_save",
        ),
        "overlap_comm contiguous_gradients round_robin_gradients "
        "use_multi_rank_bucket_allreduce": _accepted(
            "communication always overlaps with backward, with the same bits"
        ),
        "reduce_scatter allgather_partitions use_all_reduce_for_fetch_params "
        "allgather_sequential": _accepted(
            "each gradient is sent to the rank of its shard; weights are gathered from these ranks"
        ),
        "reduce_bucket_size allgather_bucket_size sub_group_size": _accepted(_BY_UNIT),
        "max_live_parameters max_reuse_distance module_granularity_threshold": _accepted(
            "at stage 3 two units are gathered at a time, the current and the next one, of any size"
        ),
        "leaf_module.classes": _honoured(_texts, _LEAF_MODULES, "leaf_classes"),
        "leaf_module.names": _honoured(_texts, _LEAF_MODULES, "leaf_names"),
        "leaf_module.name_suffixes": _honoured(_texts, _LEAF_MODULES, "leaf_suffixes"),
        "param_persistence_threshold model_persistence_threshold": _accepted(
            "all parameters of a unit are gathered in one message for each dtype and group; small "
            "parameters need no message of their own"
        ),
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint": _accepted(
            _ONE_CHECKPOINT
        ),
        "enable_sanity_checks": _accepted(
            "ranks always compare steps, gradients and checkpoints. With this key DeepSpeed "
            "refuses edits inside GatheredParameters without modifier_rank. Here they are kept, "
            "and must be the same on all ranks. Different edits raise an error: at stage 3 at the "
            "end of the block, at stages 0 to 2 in the next step (edits of p.data are not noticed "
            "there)"
        ),
        "compute_grad_norm": _accepted("the norm is always computed"),
        "ignore_unused_parameters": _honoured(
            FLAG,
            "false: at stages 1 and 2 with offload_optimizer on cpu, a step requires the gradients "
            "of all parameters",
            "ignore_unused_parameters",
        ),
        "grad_hooks": _accepted("hooks always reduce the gradients"),
        "parameter_alignment": _accepted("buffers are always aligned"),
        "memory_efficient_linear override_module_apply log_trace_cache_warnings": _accepted(
            "shardcore does not change modules"
        ),
        "save_muon_momentum_buffer_in_memory": _accepted(
            "offload_optimizer places Muon's momentum"
        ),
        "zenflow": _refused("offload here is exact, and overlaps with compute"),
        "zero_quantized_weights zero_quantized_gradients": _refused(
            "ranks exchange unquantized numbers; to halve them, use bf16 and "
            'communication_data_type "bf16"'
        ),
        "zero_quantized_nontrainable_weights": _refused(
            "load the frozen weights in 8 or 4 bits yourself"
        ),
        "legacy_stage1": _removed("stage 1 has one implementation"),
        "mics_shard_size": _removed(
            "shard over a DeviceMesh with shardcore.shard, or set zero_hpz_partition_size",
            harmless=(-1,),
        ),
        "mics_hierarchical_params_gather": _removed("see mics_shard_size"),
        "zeropp_loco_param": _removed("gradients are not quantized"),
    },
    f"{_ZERO}.offload_optimizer": {
        "device": _honoured(_device, 'shard(offload={"optimizer": ...})', "offload"),
        "pin_memory": _honoured(FLAG, "page-lock host memory that the GPU reads or writes"),
        "ratio": _honoured(_share, "the share of the states updated by the CPU", "ratio"),
        "nvme_path": _honoured(
            _or_none(_text), 'shard(offload={"path": ...}), for the device "nvme"', "nvme_path"
        ),
        "buffer_count pipeline pipeline_read pipeline_write fast_init": _accepted(_OWN_BUFFERS),
        "super_offload cpuadam_cores_perc": _accepted(
            "the CPU's Adam is exact, overlaps with the GPU and uses all available cores"
        ),
    },
    f"{_ZERO}.offload_param": {
        "device": _honoured(
            _device,
            'shard(offload={"params": ...}) at stage 3; no effect below, as in DeepSpeed',
            "params",
        ),
        "pin_memory": _honoured(FLAG, "see offload_optimizer.pin_memory"),
        "nvme_path": _honoured(
            _or_none(_text),
            "offload_optimizer.nvme_path, or none: states and weights share a folder",
        ),
        "buffer_count buffer_size max_in_cpu": _accepted(_OWN_BUFFERS),
    },
    "aio": {
        "block_size queue_depth thread_count intra_op_parallelism single_submit "
        "overlap_events": _accepted(
            "files are read and written in requests of 1 MiB, 16 at a time"
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
            "deepspeed.checkpointing keeps whole inputs; shardcore.checkpoint_wrapper(group=) "
            "partitions them"
        ),
        "contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary profile": _accepted(
            "torch.utils.checkpoint recomputes activations"
        ),
    },
    "tensorboard": {
        "enabled": _honoured(FLAG, "write metrics for TensorBoard"),
        "output_path job_name": _honoured(
            _text, "files are written to the folder output_path/job_name"
        ),
    },
    "csv_monitor": {
        "enabled": _honoured(FLAG, "write metrics to CSV files"),
        "output_path job_name": _honoured(
            _text, "files are written to the folder output_path/job_name"
        ),
    },
    "wandb": {
        "enabled": _honoured(FLAG, "send metrics to Weights & Biases"),
        "group team": _honoured(_or_none(_text), "group and team of the run"),
        "project": _honoured(_text, 'project of the run; "deepspeed" by default'),
    },
    "comet": _refused("use tensorboard, csv_monitor or wandb"),
    "comms_logger": {
        "enabled": _honoured(
            FLAG,
            "log with each line of progress how often each collective was called",
            "comms_logger",
        ),
        "verbose prof_all prof_ops debug": _accepted(
            "all collectives are counted; `shardcore estimate` prints their bytes"
        ),
    },
    "flops_profiler": {
        "enabled": _honoured(
            FLAG,
            "print the counts of profiling.flops_profiler.FlopsProfiler for one forward",
            "flops_profiler",
        ),
        "profile_step": _honoured(
            integer(0, math.inf, "at least 0"),
            "number of steps before the profiled step, as in DeepSpeed",
            "profile_step",
        ),
        "module_depth": _honoured(
            integer(-1, math.inf, "at least -1"),
            "depth to which modules are listed; -1: all",
            "module_depth",
        ),
        "top_modules": _honoured(
            COUNT, "number of module classes listed at each depth", "top_modules"
        ),
        "detailed": _honoured(FLAG, "true: list each module", "detailed"),
        "output_file": _honoured(
            _or_none(_text), "a file to write to, in place of the output", "profile_file"
        ),
        "recompute_fwd_factor": _accepted("backward is not profiled"),
    },
    "checkpoint": {
        "tag_validation": _honoured(
            word("ignore", "warn", "fail", expected='"Ignore", "Warn" or "Fail"'),
            "if tags differ by rank, rank 0's is used; Warn: with a warning; Fail: raises an error",
            "tag_validation",
        ),
        "load_universal parallel_write.pipeline_stage": _accepted(_ONE_CHECKPOINT),
        "checkpoint_serialization": _accepted("checkpoints contain no pickles"),
        "writer": _accepted(
            "files are written durably, past the page cache; save_checkpoint(wait=False) writes in "
            "the background"
        ),
        "use_node_local_storage": _refused("save to a directory visible to all ranks"),
    },
    "timers.throughput.enabled": _accepted("progress is logged every steps_per_print steps"),
    "timers.throughput.synchronized": _accepted("progress is logged every steps_per_print steps"),
    "disable_python_gc": _refused("call gc.disable()"),
    "datastates_ckpt": _refused("use save_checkpoint(wait=False)"),
    "tensor_parallel": {
        "autotp_size": _honoured(
            _slices,
            "slice the model by its plan over this number of adjacent ranks, and shard it over the "
            "others: docs/tensor_parallel.md",
            "autotp_size",
        ),
        "tp.tp_size": _honoured(_slices, "must equal autotp_size"),
        "dtype": _accepted("fp16 and bf16 select the dtype"),
        "preset_model tp.tp_grain_size": _accepted(
            "slices are of equal size, by the model's own plan"
        ),
        "tp_overlap_comm": _accepted(
            "torch's parallel styles choose when ranks add partial results"
        ),
        "vocab_parallel_lm_head vocab_parallel_ce_backend": _accepted(
            "every rank computes whole logits"
        ),
        "partition_config injection_policy_tuple": _refused(
            'call shardcore.tensor_parallel(model, mesh["tp"], plan=...) before initialize'
        ),
        "keep_module_on_host": _refused('build the model under torch.device("meta")'),
        "replace_with_kernel_inject": _refused("it is for inference"),
        "tp.mpu tp.tp_group": _refused("set autotp_size: adjacent ranks share a model"),
    },
    "sequence_parallel_size": _honoured(
        COUNT, "number of ranks that share a sequence, as in `mpu`: docs/long_sequences.md"
    ),
    "expert_parallel": _refused("experts are sharded like other weights"),
    "moe": _refused("experts are sharded like other weights"),
    "use_data_before_expert_parallelism": _refused("experts are sharded like other weights"),
    "pipeline.activation_checkpoint_interval": _honoured(
        SIZE,
        "PipelineModule(activation_checkpoint_interval=); 0: the module's own value",
        "activation_checkpoint_interval",
    ),
    "pipeline.stages pipeline.partition pipeline.seed_layers "
    "pipeline.pipe_partitioned pipeline.grad_partitioned pipeline.use_reentrant": _accepted(
        "PipelineModule's own arguments set it, or there is no choice"
    ),
    "hybrid_engine": _refused("generate inside shardcore.full_params(model)"),
    "compile": {
        "deepcompile free_activation offload_activation offload_opt_states offload_parameters "
        "symmetric_memory passes": _refused(
            "shardcore does not support DeepCompile; engine.compile() compiles each unit"
        ),
        "free_activation_threshold double_buffer debug_log sync_before_reduce sync_after_reduce "
        "sync_before_allgather sync_after_allgather keep_int_input_tensors "
        "keep_all_input_tensors": _accepted("it has no effect without DeepCompile"),
        "enabled backend kwargs": _accepted(
            "the configuration compiles nothing; call engine.compile(backend, compile_kwargs)"
        ),
    },
    "weight_quantization": _refused("it is for inference"),
    "data_efficiency": _refused("sample in your own DataLoader"),
    "autotuning": _refused("use `shardcore estimate`"),
    "sparse_gradients": _removed("gradients of embeddings are dense"),
    "amp": _removed("use bf16, fp16 or torch_autocast"),
    "elasticity": _removed("set the batch sizes; any number of ranks can load a checkpoint"),
    "curriculum_learning": _removed("shorten sequences in your own DataLoader"),
    "compression_training": _removed("shardcore has no counterpart"),
    "quantize_training": _removed("shardcore has no counterpart"),
    "eigenvalue": _removed("shardcore has no counterpart"),
    "sparse_attention": _removed("use torch's scaled_dot_product_attention or flex_attention"),
    "progressive_layer_drop": _removed("drop layers in the model"),
    "graph_harvesting": _removed("shardcore has no counterpart"),
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
# as are keys that begin with "_" or "comment": notes, which DeepSpeed ignores, too
IGNORED = ("comms_config", "monitor_config")


def canonical(path: str) -> str:
    """Return the spelling of a key in the table."""
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
