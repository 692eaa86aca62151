"""DeepSpeed's public modules and names that are not here, and what to use instead of each.

An import under --as-deepspeed says so. A name stands for all that is below it. Source: the packages
of DeepSpeed 0.19.8.
"""

_INFERENCE = "shardcore.consolidate(...), and an inference engine of your choice"
_LAYERS = "the layers of torch.nn, or of transformers"
_OPTIMIZER = (
    "the optimizer that initialize returns, which is a torch.optim.Optimizer and a "
    "runtime.base_optimizer.DeepSpeedOptimizer"
)
_LOCAL = (
    "safe_get_full_* and safe_set_full_* of utils (a rank owns another range of a parameter "
    "than in DeepSpeed)"
)
_GENERATION = "zero.unwrap_model_for_generation(engine), and generate() of the model inside"
_SAMPLING = "a sampler of your own, in training_data or a DataLoader"
_LOADER = "the loader that initialize(training_data=...) returns, or engine.deepspeed_io"
_COMPILE = "block.compile() of the model's blocks before initialize"
_SAVE = "save_checkpoint(..., wait=False), which writes behind the training"
_CONFIG = "the keys and values as they are written in a configuration"
_INTERNAL = "code without it: it is internal to DeepSpeed"
_TENSOR_PARALLEL = "tensor_parallel.autotp_size in the configuration"
_TILED_LINEAR = (
    "runtime.sequence_parallel.ulysses_sp.TiledMLP, or shardcore.chunked_cross_entropy for a head"
)
_OFFLOAD = 'zero_optimization.offload_optimizer, or the section "shardcore" (docs/memory.md)'

INSTEAD = {
    "DeepSpeedDataLoader": _LOADER,
    "DeepSpeedHybridEngine": _GENERATION,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "DeepSpeedTransformerConfig": _LAYERS,
    "DeepSpeedTransformerLayer": _LAYERS,
    "InferenceEngine": _INFERENCE,
    "accelerator": "accelerator.get_accelerator(), which finds a GPU or else the CPU",
    "autotuning": "shardcore estimate, which finds what fits a machine",
    "checkpoint": "shardcore.load, which reads checkpoints of any world size, DeepSpeed's and "
    "universal ones too",
    "comm": "torch.distributed, whose names deepspeed.comm has",
    "compat": _INTERNAL,
    "compile": _COMPILE,
    "compression": "a library for compression, before or after the training",
    "datastates": _SAVE,
    "default_inference_config": _INFERENCE,
    "elasticity": "train_batch_size and train_micro_batch_size_per_gpu in the configuration (a "
    "checkpoint loads into any number of ranks)",
    "env_report": "shardcore info",
    "git_version_info_installed": "git_version_info",
    "inference": _INFERENCE,
    "io": _SAVE,
    "launcher": "shardcore run (docs/launch.md)",
    "linear": "PEFT's LoRA, or quantized layers of another library",
    "model_implementations": _INFERENCE,
    "module_inject": "tensor_parallel.autotp_size in the configuration, and "
    "zero.GatheredParameters for whole weights",
    "moe": "a model with its experts as ordinary modules, which are sharded as others are "
    "(moe.layer.MoE is for isinstance)",
    "monitor": "monitor.monitor.MonitorMaster, or the sections tensorboard, csv_monitor and wandb "
    "in the configuration",
    "nebula": _SAVE,
    "nvme": "shardcore estimate config.json, or fio to measure a disk",
    "ops.adam": "ops.adam.FusedAdam or DeepSpeedCPUAdam",
    "ops.aio": "shardcore.save, and offload to nvme",
    "ops.compile": _COMPILE,
    "ops.deepspeed4science": _LAYERS,
    "ops.fp_quantizer": "torchao",
    "ops.gds": "shardcore.save, and offload to nvme",
    "ops.lion": "ops.lion.FusedLion or DeepSpeedCPULion",
    "ops.op_builder": "the builders of ops.op_builder itself (shardcore compiles its operations "
    "when it is installed)",
    "ops.pin_memory": "torch.Tensor.pin_memory()",
    "ops.quantizer": "torchao",
    "ops.random_ltd": _SAMPLING,
    "ops.sparse_attention": "torch.nn.attention.flex_attention",
    "ops.transformer": _LAYERS,
    "ops.triton_ops": _LAYERS,
    "profiling": "profiling.flops_profiler.FlopsProfiler, or the section flops_profiler in the "
    "configuration",
    "replace_transformer_layer": _LAYERS,
    "runtime.activation_checkpointing": "checkpointing.checkpoint and configure, or "
    "torch.autograd.graph.save_on_cpu",
    "runtime.bf16_optimizer": _OPTIMIZER,
    "runtime.checkpoint_engine": _SAVE,
    "runtime.chunked_cross_entropy": "shardcore.chunked_cross_entropy",
    "runtime.comm": "the collectives of torch.distributed",
    "runtime.compiler": _COMPILE,
    "runtime.config": _CONFIG,
    "runtime.constants": _CONFIG,
    "runtime.data_pipeline": _SAMPLING,
    "runtime.dataloader.DeepSpeedDataLoader": _LOADER,
    "runtime.domino": _TENSOR_PARALLEL,
    "runtime.eigenvalue": _INTERNAL,
    "runtime.fp16": _OPTIMIZER,
    "runtime.hybrid_engine": _GENERATION,
    "runtime.keep_in_fp32": "data_types.keep_in_fp32_modules in the configuration",
    "runtime.lr_schedules": "the section scheduler in the configuration, with arguments of your "
    "own parser",
    "runtime.model_checkpointing": "save_checkpoint and load_checkpoint of the engine",
    "runtime.pipe": "pipe.PipelineModule, and train_batch and eval_batch of its engine",
    "runtime.pipe.p2p": "torch.distributed.send and recv",
    "runtime.precision_config": _CONFIG,
    "runtime.progressive_layer_drop": "layers that the model itself drops",
    "runtime.python_gc": "Python's gc",
    "runtime.rollout": _GENERATION,
    "runtime.sequence_parallel": "sequence_tiled_compute, TiledMLP and UlyssesSPAttentionHF of "
    "ulysses_sp",
    "runtime.sequence_parallel.ulysses_sp.SequenceTiledCompute": "sequence_tiled_compute of the "
    "same module",
    "runtime.sparse_tensor": "torch.sparse_coo_tensor (gradients of embeddings are dense)",
    "runtime.state_dict_factory": _INFERENCE,
    "runtime.superoffload": _OFFLOAD,
    "runtime.swap_tensor": _OFFLOAD,
    "runtime.tensor_parallel": _TENSOR_PARALLEL,
    "runtime.torch_autocast": "torch_autocast in the configuration, or torch.autocast",
    "runtime.utils.clip_grad_norm_": "gradient_clipping in the configuration, or "
    "shardcore.clip_grad_norm_",
    "runtime.utils.get_global_norm": "engine.get_global_grad_norm()",
    "runtime.utils.get_grad_norm": "engine.get_global_grad_norm()",
    "runtime.weight_quantizer": "torchao",
    "runtime.zenflow": _OFFLOAD,
    "runtime.zero": _INTERNAL,
    "runtime.zero.TiledLinear": _TILED_LINEAR,
    "runtime.zero.config": _CONFIG,
    "runtime.zero.leaf_module_config": "utils.set_z3_leaf_modules, or "
    "zero_optimization.leaf_module",
    "runtime.zero.linear": "torch.nn.Linear, whose weight is gathered for its forward and backward",
    "runtime.zero.mics": "zero_optimization.zero_hpz_partition_size, or a DeviceMesh with "
    "shardcore.shard",
    "runtime.zero.muon": "an optimizer of type Muon in the configuration, or shardcore.optim.Muon",
    "runtime.zero.stage3": _OPTIMIZER,
    "runtime.zero.stage_1_and_2": _OPTIMIZER,
    "runtime.zero.tiling": _TILED_LINEAR,
    "sequence": "runtime.sequence_parallel.ulysses_sp, or shardcore.chunked_cross_entropy for a "
    "loss",
    "sequence.layer": "torch.distributed.nn.functional.all_to_all_single",
    "tensor_parallel": _TENSOR_PARALLEL,
    "utils.bwc": "utils.groups",
    "utils.comms_logging": "comms_logger in the configuration",
    "utils.config": _CONFIG,
    "utils.debug": "shardcore.memory_report",
    "utils.exceptions": _INTERNAL,
    "utils.mixed_precision_linkage": _INTERNAL,
    "utils.numa": "shardcore run, which binds each rank to its GPU's NUMA node",
    "utils.pin_memory": "torch.Tensor.pin_memory()",
    "utils.safe_get_local": _LOCAL,
    "utils.safe_set_local": _LOCAL,
    "utils.static_cache": _GENERATION,
    "utils.timer": "wall_clock_breakdown in the configuration, or a clock of your own",
    "utils.types": _INFERENCE,
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint of it, or shardcore "
    "consolidate",
    "utils.zero_to_torch": "shardcore consolidate",
    "zero.TiledLinear": _TILED_LINEAR,
}


def instead_of(name: str) -> str | None:
    """Return what to use instead of a name below deepspeed, such as "inference.engine"; None for
    one that is not known.
    """
    found = [
        known for known in INSTEAD if name == known or name.startswith((f"{known}.", f"{known}_"))
    ]
    return INSTEAD[max(found, key=len)] if found else None
