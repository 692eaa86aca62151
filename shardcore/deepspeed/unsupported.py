"""DeepSpeed's public modules and names that are not here, and what to use instead of each.

An import under --as-deepspeed says so. A name stands for all that is below it. Source: the packages
of DeepSpeed 0.19.8.
"""

# Names, each for all that is below it, and what to use instead of them.
_COUNTERPARTS = {
    "DeepSpeedDataLoader runtime.dataloader.DeepSpeedDataLoader": (
        "the loader that initialize(training_data=...) returns, or engine.deepspeed_io"
    ),
    "DeepSpeedHybridEngine runtime.hybrid_engine runtime.rollout utils.static_cache": (
        "zero.unwrap_model_for_generation(engine), and generate() of the model inside"
    ),
    (
        "DeepSpeedInferenceConfig InferenceEngine default_inference_config inference "
        "model_implementations runtime.state_dict_factory utils.types"
    ): ("shardcore.consolidate(...), and an inference engine of your choice"),
    (
        "DeepSpeedTransformerConfig DeepSpeedTransformerLayer ops.deepspeed4science "
        "ops.transformer ops.triton_ops replace_transformer_layer"
    ): ("the layers of torch.nn, or of transformers"),
    "accelerator": "accelerator.get_accelerator(), which finds a GPU or else the CPU",
    "autotuning": "shardcore estimate, which finds what fits a machine",
    "checkpoint": (
        "shardcore.load, which reads checkpoints of any world size, DeepSpeed's and universal "
        "ones too"
    ),
    "comm": "torch.distributed, whose names deepspeed.comm has",
    "compat runtime.eigenvalue runtime.zero utils.exceptions utils.mixed_precision_linkage": (
        "code without it: it is internal to DeepSpeed"
    ),
    "compile ops.compile runtime.compiler": (
        "engine.compile(), which compiles each unit by torch.compile"
    ),
    "compression": "a library for compression, before or after the training",
    "datastates io nebula runtime.checkpoint_engine": (
        "save_checkpoint(..., wait=False), which writes behind the training"
    ),
    "elasticity": (
        "train_batch_size and train_micro_batch_size_per_gpu in the configuration (a checkpoint "
        "loads into any number of ranks)"
    ),
    "env_report": "shardcore info",
    "git_version_info_installed": "git_version_info",
    "launcher": "shardcore run (docs/launch.md)",
    "linear": "PEFT's LoRA, or quantized layers of another library",
    "module_inject": (
        "tensor_parallel.autotp_size in the configuration, and zero.GatheredParameters for "
        "whole weights"
    ),
    "moe": (
        "a model with its experts as ordinary modules, which are sharded as others are "
        "(moe.layer.MoE is for isinstance)"
    ),
    "monitor": (
        "monitor.monitor.MonitorMaster, or the sections tensorboard, csv_monitor and wandb in "
        "the configuration"
    ),
    "nvme": "shardcore estimate config.json, or fio to measure a disk",
    "ops.adam": "ops.adam.FusedAdam or DeepSpeedCPUAdam",
    "ops.aio ops.gds": "shardcore.save, and offload to nvme",
    "ops.fp_quantizer ops.quantizer runtime.weight_quantizer": "torchao",
    "ops.lion": "ops.lion.FusedLion or DeepSpeedCPULion",
    "ops.op_builder": (
        "the builders of ops.op_builder itself (shardcore compiles its operations when it is "
        "installed)"
    ),
    "ops.pin_memory utils.pin_memory": "torch.Tensor.pin_memory()",
    "ops.random_ltd runtime.data_pipeline": (
        "a sampler of your own, in training_data or a DataLoader"
    ),
    "ops.sparse_attention": "torch.nn.attention.flex_attention",
    "profiling": (
        "profiling.flops_profiler.FlopsProfiler, or the section flops_profiler in the configuration"
    ),
    "runtime.activation_checkpointing": (
        "checkpointing.checkpoint and configure, or torch.autograd.graph.save_on_cpu"
    ),
    "runtime.bf16_optimizer runtime.fp16 runtime.zero.stage3 runtime.zero.stage_1_and_2": (
        "the optimizer that initialize returns, which is a torch.optim.Optimizer and a "
        "runtime.base_optimizer.DeepSpeedOptimizer"
    ),
    "runtime.chunked_cross_entropy": "shardcore.chunked_cross_entropy",
    "runtime.comm": "the collectives of torch.distributed",
    (
        "runtime.config runtime.constants runtime.precision_config runtime.zero.config utils.config"
    ): ("the keys and values as they are written in a configuration"),
    "runtime.domino runtime.tensor_parallel tensor_parallel": (
        "tensor_parallel.autotp_size in the configuration"
    ),
    "runtime.keep_in_fp32": "data_types.keep_in_fp32_modules in the configuration",
    "runtime.lr_schedules": (
        "the section scheduler in the configuration, with arguments of your own parser"
    ),
    "runtime.model_checkpointing": "save_checkpoint and load_checkpoint of the engine",
    "runtime.pipe": "pipe.PipelineModule, and train_batch and eval_batch of its engine",
    "runtime.pipe.p2p": "torch.distributed.send and recv",
    "runtime.progressive_layer_drop": "layers that the model itself drops",
    "runtime.python_gc": "Python's gc",
    "runtime.sequence_parallel": (
        "sequence_tiled_compute, TiledMLP and UlyssesSPAttentionHF of ulysses_sp"
    ),
    "runtime.sequence_parallel.ulysses_sp.SequenceTiledCompute": (
        "sequence_tiled_compute of the same module"
    ),
    "runtime.sparse_tensor": "torch.sparse_coo_tensor (gradients of embeddings are dense)",
    "runtime.superoffload runtime.swap_tensor runtime.zenflow": (
        'zero_optimization.offload_optimizer, or the section "shardcore" (docs/memory.md)'
    ),
    "runtime.torch_autocast": "torch_autocast in the configuration, or torch.autocast",
    "runtime.utils.clip_grad_norm_": (
        "gradient_clipping in the configuration, or shardcore.clip_grad_norm_"
    ),
    "runtime.utils.get_global_norm runtime.utils.get_grad_norm": "engine.get_global_grad_norm()",
    "runtime.zero.TiledLinear runtime.zero.tiling zero.TiledLinear": (
        "runtime.sequence_parallel.ulysses_sp.TiledMLP, or shardcore.chunked_cross_entropy for "
        "a head"
    ),
    "runtime.zero.leaf_module_config": (
        "utils.set_z3_leaf_modules, or zero_optimization.leaf_module"
    ),
    "runtime.zero.linear": "torch.nn.Linear, whose weight is gathered for its forward and backward",
    "runtime.zero.mics": (
        "zero_optimization.zero_hpz_partition_size, or a DeviceMesh with shardcore.shard"
    ),
    "runtime.zero.muon": "an optimizer of type Muon in the configuration, or shardcore.optim.Muon",
    "sequence": (
        "runtime.sequence_parallel.ulysses_sp, or shardcore.chunked_cross_entropy for a loss"
    ),
    "sequence.layer": "torch.distributed.nn.functional.all_to_all_single",
    "utils.bwc": "utils.groups",
    "utils.comms_logging": "comms_logger in the configuration",
    "utils.debug": "shardcore.memory_report",
    "utils.numa": "shardcore run, which binds each rank to its GPU's NUMA node",
    "utils.safe_get_local utils.safe_set_local": (
        "safe_get_full_* and safe_set_full_* of utils (a rank owns another range of a parameter "
        "than in DeepSpeed)"
    ),
    "utils.timer": "wall_clock_breakdown in the configuration, or a clock of your own",
    "utils.zero_to_fp32": (
        "get_fp32_state_dict_from_zero_checkpoint of it, or shardcore consolidate"
    ),
    "utils.zero_to_torch": "shardcore consolidate",
}
INSTEAD = {
    name: counterpart for names, counterpart in _COUNTERPARTS.items() for name in names.split()
}


def instead_of(name: str) -> str | None:
    """Return what to use instead of a name below deepspeed, such as "inference.engine"; None for
    one that is not known.
    """
    prefixes = [
        known for known in INSTEAD if name == known or name.startswith((f"{known}.", f"{known}_"))
    ]
    return INSTEAD[max(prefixes, key=len)] if prefixes else None
