"""OSS and ShardedDataParallel of FairScale, on shardcore.shard at stage 2.

An OSS holds the optimizer that it is asked for, which has all the parameters. ShardedDataParallel
shards it with its module.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardcore.api import no_sync, shard_and_log
from shardcore.engine.engine import engine_behind
from shardcore.engine.regroup import regroup
from shardcore.integrations.fairscale.adascale import AdaScale
from shardcore.optim.clip import clip_grad_norm_

logger = logging.getLogger("shardcore")


@contextmanager
def optimizer_goes_on() -> Iterator[None]:
    """Leave out shard's warning that the optimizer which was given does nothing any more: here
    it does.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("shard: made a ")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


class OSS(torch.optim.Optimizer):
    """An optimizer `optim(params, **default)` with states to shard by ShardedDataParallel. The
    attribute `optim` is the wrapped optimizer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: Any = torch.optim.SGD,
        group: dist.ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        """Make the optimizer.

        Args:
            optim: a class of optimizers that shardcore.shard takes.
            group: the ranks that share the states (default: all).
            broadcast_buffer_size, broadcast_fp16, force_broadcast_object: accepted; weights are
                sent in the dtype that they train in.
            default: what `optim` is made with.
        """
        self.optim: Any = optim(params, **default)
        self.group = group
        self.is_sharded = False
        self._consolidated: dict[str, Any] | None = None
        super().__init__(self.optim.param_groups, default)
        self.use(self.optim)

    def use(self, optim: Any) -> None:
        """Go on with an optimizer over the same groups."""
        self.optim = optim
        self.param_groups, self.state = optim.param_groups, optim.state

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Step, and pass further arguments to the wrapped optimizer. Collective.

        On several ranks raises RuntimeError without ShardedDataParallel, which averages gradients.
        """
        if not self.is_sharded and dist.is_initialized() and dist.get_world_size(self.group) > 1:
            raise RuntimeError(
                "OSS.step: no ShardedDataParallel uses this optimizer; expected "
                "ShardedDataParallel(model, optimizer) before the first forward, also in place of "
                "DistributedDataParallel"
            )
        return self.optim.step(**kwargs) if closure is None else self.optim.step(closure, **kwargs)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on, if ShardedDataParallel got a loss_scale or the model
        is float16.
        """
        return self.optim.scale_loss(loss)  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, or set them to zero."""
        self.optim.zero_grad(set_to_none)

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, filter_params_fn: Any = None
    ) -> torch.Tensor:
        """Scale gradients to a norm over all ranks of at most max_norm. Return the norm before.
        Collective.

        filter_params_fn: None; any other value raises NotImplementedError.
        """
        if filter_params_fn is not None:
            raise NotImplementedError(
                "OSS.clip_grad_norm: filter_params_fn was given; expected "
                "shardcore.clip_grad_norm_(params, max_norm) of the parameters to clip"
            )
        return clip_grad_norm_(
            [param for group in self.param_groups for param in group["params"]], max_norm, norm_type
        )

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Gather all states, for a following state_dict() on recipient_rank (-1: on every rank).
        Collective.
        """
        state = self.optim.state_dict()
        rank = dist.get_rank(self.group) if dist.is_initialized() else 0
        self._consolidated = state if recipient_rank in (-1, rank) else None

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Return the last consolidated state, in torch.optim's format. With all_ranks gather it
        now, which is collective.

        Raises RuntimeError if this rank consolidated nothing.
        """
        if all_ranks:
            self.consolidate_state_dict(-1)
        if self._consolidated is None:
            raise RuntimeError(
                "OSS.state_dict: this rank did not consolidate the state; expected "
                "consolidate_state_dict(recipient_rank) on all ranks before, or all_ranks=True"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: Any) -> None:
        """Load full states, the same ones on every rank."""
        self.optim.load_state_dict(state_dict)
        self.use(self.optim)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as the optimizer can."""
        if self.param_groups is self.optim.param_groups:
            self.optim.add_param_group(param_group)
        else:  # torch.optim's constructor lists them
            super().add_param_group(param_group)

    def refresh_trainable(self) -> None:
        """Do nothing: there is no partition by parameters."""


class ShardedDataParallel(nn.Module):
    """Wraps a module with sharded gradients and optimizer states. `module` is the model of
    shardcore.shard.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
        **options: Any,
    ) -> None:
        """Shard the module and its OSS. Collective.

        Args:
            sharded_optimizer: an OSS, an AdaScale over one, or a list of one.
            process_group: the ranks (default: the OSS's).
            broadcast_buffers: send rank 0's buffers before each forward.
            sync_models_at_startup: take rank 0's weights.
            auto_refresh_trainable: call refresh_trainable before each forward.
            reduce_buffer_size, warn_on_trainable_params_changed: accepted; gradients are reduced a
            unit at a time.
            reduce_fp16: send gradients in float16; sums are float32.
            options: of shardcore.shard: stage, units, offload, loss_scale, ...

        Raises ValueError, TypeError or NotImplementedError, as `shard`, on every rank.
        """
        super().__init__()
        optimizers = (
            [*sharded_optimizer] if isinstance(sharded_optimizer, Sequence) else [sharded_optimizer]
        )
        if len(optimizers) != 1:
            raise ValueError(
                f"ShardedDataParallel: sharded_optimizer contains {len(optimizers)} optimizers; "
                "expected one for a model (use groups for parameters with other options)"
            )
        optimizer: Any = optimizers[0]
        if isinstance(optimizer, AdaScale):
            optimizer = optimizer._optimizer
        if not isinstance(optimizer, OSS):
            raise TypeError(
                f"ShardedDataParallel: sharded_optimizer is a {type(optimizer).__name__}; expected "
                f"an OSS or AdaScale(OSS(...))"
            )
        if None not in (process_group, optimizer.group) and process_group is not optimizer.group:
            raise ValueError(
                "ShardedDataParallel: process_group is another one than the OSS's group; expected "
                "the same"
            )
        self._group = process_group or optimizer.group
        self._broadcasts = broadcast_buffers and dist.is_initialized()
        shard_options = {
            "stage": 2,
            "broadcast": sync_models_at_startup,
            "reduce_dtype": "fp16" if reduce_fp16 else None,
            "process_group": self._group,
            **options,
        }
        with optimizer_goes_on():
            self.module, sharded = shard_and_log(module, optimizer.optim, **shard_options)
        optimizer.use(sharded)
        optimizer.is_sharded = True
        # as DDP
        self.device_type = optimizer.param_groups[0]["params"][0].device.type
        self.is_multi_device_module = False
        self._optimizer, self._auto_refresh = optimizer, auto_refresh_trainable

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module inside."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Collective with broadcast_buffers, and when parameters begin to train."""
        if self._auto_refresh:
            self.refresh_trainable()
        if self._broadcasts:
            self.sync_buffers()
        return self.module(*inputs, **kwargs)

    @torch.no_grad()
    def sync_buffers(self, blocking: bool = False) -> None:
        """Take rank 0's buffers. Collective."""
        source = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        for buffer in self.module.buffers():
            dist.broadcast(buffer, source, self._group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, or set them to zero."""
        self.module.zero_grad(set_to_none)

    def reduce(self) -> None:
        """Do nothing: the next step or norm averages the gradients of no_sync."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients locally inside the context, and leave buffers alone."""
        broadcasts, self._broadcasts = self._broadcasts, False
        try:
            with no_sync(self.module):
                yield
        finally:
            self._broadcasts = broadcasts

    def refresh_trainable(self) -> None:
        """Let frozen parameters train if they require gradients now. Then collective: see
        shardcore.unfreeze.
        """
        engine = engine_behind("refresh_trainable", self.module)
        trained = {
            managed.param
            for bucket in engine.buckets
            if bucket.trainable
            for managed in bucket.params
        }
        if any(param.requires_grad and param not in trained for param in self.module.parameters()):
            regroup(engine, self._optimizer.optim, None, "unfreeze")
            self._optimizer.use(self._optimizer.optim)
