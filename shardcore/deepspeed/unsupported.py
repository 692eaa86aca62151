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
_OFFLOAD = 'zero_optimization.offload_optimizer, or the section "shardcore" (docs/memory.md)'

INSTEAD = {
    "DeepSpeedHybridEngine": _GENERATION,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "DeepSpeedTransformerConfig": _LAYERS,
    "DeepSpeedTransformerLayer": _LAYERS,
    "InferenceEngine": _INFERENCE,
    "autotuning": "shardcore estimate, which finds what fits a machine",
    "checkpoint": "shardcore.load, which reads checkpoints of any world size, DeepSpeed's and "
    "universal ones too",
    "comm": "torch.distributed, whose names deepspeed.comm has",
    "compile": "block.compile() of the model's blocks before initialize",
    "compression": "a library for compression, before or after the training",
    "datastates": "save_checkpoint(..., wait=False), which writes behind the training",
    "env_report": "shardcore info",
    "inference": _INFERENCE,
    "io": "save_checkpoint(..., wait=False), which writes behind the training",
    "launcher": "shardcore run (docs/launch.md)",
    "linear": "PEFT's LoRA, or quantized layers of another library",
    "model_implementations": _INFERENCE,
    "module_inject": "tensor_parallel.autotp_size in the configuration, and "
    "zero.GatheredParameters for whole weights",
    "moe": "a model with its experts as ordinary modules, which are sharded as others are "
    "(moe.layer.MoE is for isinstance)",
    "nvme": "shardcore estimate config.json, or fio to measure a disk",
    "ops.aio": "shardcore.save, and offload to nvme",
    "ops.deepspeed4science": _LAYERS,
    "ops.fp_quantizer": "torchao",
    "ops.gds": "shardcore.save, and offload to nvme",
    "ops.quantizer": "torchao",
    "ops.random_ltd": _SAMPLING,
    "ops.sparse_attention": "torch.nn.attention.flex_attention",
    "ops.transformer": _LAYERS,
    "replace_transformer_layer": _LAYERS,
    "runtime.bf16_optimizer": _OPTIMIZER,
    "runtime.checkpoint_engine": "save_checkpoint(..., wait=False), which writes behind the "
    "training",
    "runtime.comm": "the collectives of torch.distributed",
    "runtime.data_pipeline": _SAMPLING,
    "runtime.domino": "tensor_parallel.autotp_size in the configuration",
    "runtime.fp16": _OPTIMIZER,
    "runtime.hybrid_engine": _GENERATION,
    "runtime.rollout": _GENERATION,
    "runtime.sequence_parallel": "sequence_tiled_compute, TiledMLP and UlyssesSPAttentionHF of "
    "ulysses_sp",
    "runtime.superoffload": _OFFLOAD,
    "runtime.swap_tensor": _OFFLOAD,
    "runtime.zenflow": _OFFLOAD,
    "runtime.config": "the keys and values as they are written in a configuration",
    "runtime.zero": "the names of deepspeed.zero, and what initialize returns",
    "sequence": "sequence.layer.DistributedAttention, or runtime.sequence_parallel.ulysses_sp",
    "utils.debug": "shardcore.memory_report",
    "utils.safe_get_local": _LOCAL,
    "utils.safe_set_local": _LOCAL,
    "utils.timer": "wall_clock_breakdown in the configuration, or a clock of your own",
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint of it, or shardcore "
    "consolidate",
    "zero.TiledLinear": "runtime.sequence_parallel.ulysses_sp.TiledMLP, or "
    "shardcore.chunked_cross_entropy for a head",
    "runtime.zero.tiling": "runtime.sequence_parallel.ulysses_sp.TiledMLP, or "
    "shardcore.chunked_cross_entropy for a head",
}


def instead_of(name: str) -> str | None:
    """Return what to use instead of a name below deepspeed, such as "inference.engine"; None for
    one that is not known.
    """
    found = [
        known for known in INSTEAD if name == known or name.startswith((f"{known}.", f"{known}_"))
    ]
    return INSTEAD[max(found, key=len)] if found else None
