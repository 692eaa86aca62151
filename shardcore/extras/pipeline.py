"""Pipeline parallelism: torch.distributed.pipelining runs the stages, whose training state is
sharded over their ranks.

A schedule runs a backward for each stage of a rank and each micro-batch. Their gradients are added
locally, and reduced over the ranks of the stages in the last one; the norm, and whether a step is
skipped, are those of all stages.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcore.api import shard
from shardcore.engine.engine import engine_behind


def shard_pipeline(
    stages: Any,
    optimizer: Any,
    stage: int = 2,
    *,
    n_microbatches: int,
    process_group: dist.ProcessGroup | DeviceMesh,
    sync_each: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Shard this rank's stages of a pipeline. Returns their module and the optimizer to use.
    Collective over all stages.

    The returned module is the stage's module, or an nn.ModuleList for several stages (interleaved
    schedules), changed in place. Create the schedule with scale_grads=False. If loss_fn computes a
    mean, it must divide by n_microbatches. schedule.step() runs all backwards of a step. After it,
    call optimizer.step() and optimizer.zero_grad(). Schedules with split backwards (zero bubble)
    are not supported, and raise an error in their first step.

    Args:
        stages: A torch.distributed.pipelining.PipelineStage, or a sequence of all stages of this
            rank.
        optimizer: An optimizer over the parameters of all these stages.
        stage: The ZeRO stage.
        n_microbatches: The number of micro-batches of the schedule.
        process_group: The ranks with the same stages, such as mesh["dp"]. The other stages are on
            the ranks of the group of the PipelineStages.
        sync_each: Reduce in every backward. At stages 2 and 3, only shards are kept between
            backwards, for more communication.
        options: See `shard`. With several stages per rank, overlap_step is not supported, and
            floating inputs are not cast.

    Raises TypeError if `stages` contains no stage, ValueError for overlap_step, and the errors of
    `shard`. A schedule with scale_grads=True raises ValueError at its first step.

    Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html.
    """
    chosen = [*stages] if isinstance(stages, Sequence) else [stages]
    modules: list[Any] = [getattr(pipeline_stage, "submod", None) for pipeline_stage in chosen]
    if not chosen or not all(isinstance(module, nn.Module) for module in modules):
        raise TypeError(
            f"shard_pipeline: stages is {stages!r}; expected a PipelineStage, or a sequence of them"
        )
    if len(chosen) > 1 and options.get("overlap_step"):
        raise ValueError(
            "shard_pipeline: overlap_step is True with several stages on one rank. Use "
            "overlap_step=False, or one stage per rank"
        )
    sharded = shard(
        modules[0] if len(chosen) == 1 else nn.ModuleList(modules),
        optimizer,
        stage,
        accumulate=n_microbatches * len(chosen),
        sync_each=sync_each,
        process_group=process_group,
        model_parallel_group=chosen[0].group or dist.group.WORLD,
        **options,
    )
    scaler = engine_behind("shard_pipeline", sharded[0]).scaler
    scaler.has_losses = len(chosen) == 1 and chosen[0].is_last
    for pipeline_stage in chosen:
        pipeline_stage.scale_grads = _refuse_scaling
        pipeline_stage.backward_weight_one_chunk = _refuse_split
    return sharded


def _refuse_scaling(factor: int) -> None:
    """Stand in for PipelineStage.scale_grads, which looks for gradients in p.grad."""
    if factor != 1:
        raise ValueError(
            f"shard_pipeline: the schedule would divide gradients by {factor}, but they are "
            f"sharded. Pass scale_grads=False and divide the loss by the {factor} micro-batches in "
            "loss_fn, which gives the same gradients"
        )


def _refuse_split(*args: Any, **kwargs: Any) -> None:
    """Stand in for PipelineStage.backward_weight_one_chunk, which assigns p.grad."""
    raise ValueError(
        "shard_pipeline: the schedule computes gradients of weights and of inputs separately. Use "
        "a schedule with whole backwards: ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
    )
