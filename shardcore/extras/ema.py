"""An exponential moving average of the weights of a sharded model, kept in shards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint.format import names_of
from shardcore.checkpoint.sharded import read_weights
from shardcore.distributed.comm import Traffic, wait_all
from shardcore.engine.bucket import Bucket, note_written
from shardcore.engine.engine import engine_behind


class EMA:
    """Keep an exponential moving average of a sharded model's weights. Each rank keeps its local
    shard.

    Args:
        model: The model returned by shard, or the engine returned by initialize. It must be sharded
            with an optimizer; the average covers the weights that the optimizer updates.
        decay: A number from 0 to 1. It may be set between updates, for example to warm it up.
        offload: True keeps the average in host memory, False on the device. By default it is stored
            with the masters, or with the weights if there are no masters.

    The average is float32, and follows the masters if there are any. It takes 4 bytes per
    parameter, divided over the ranks that share shards. It equals
    `torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`: the
    first update copies the weights, and each later update is `average.lerp_(weights, 1 - decay)`.
    Frozen weights and buffers are not averaged.

    Raises ValueError for an invalid decay, and for a model without shards or without an optimizer.
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.999, *, offload: bool | None = None
    ) -> None:
        """See the class."""
        self._engine = engine_behind("EMA", model)
        if not self._engine.updater.buckets:
            raise ValueError(
                "EMA: no optimizer updates this model. Use a model sharded with an optimizer"
            )
        self._offload, self._averages = offload, dict[Bucket, torch.Tensor]()
        self.decay = decay
        self.updates = 0
        self._engine.synchronize()
        for bucket in self._engine.updater.buckets:
            self.shard(bucket)

    @property
    def decay(self) -> float:
        """The factor of the old average in an update, from 0 to 1."""
        return self._decay

    @decay.setter
    def decay(self, value: float) -> None:
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"EMA: decay is {value!r}; expected a number from 0 to 1")
        self._decay = float(value)

    @torch.no_grad()
    def shard(self, bucket: Bucket) -> torch.Tensor:
        """Return the average of this rank's shard of a bucket: (owned_numel,) float32, not a copy.
        It begins with the weights.
        """
        if bucket not in self._averages:
            weights = read_weights(self._engine, bucket)(0, bucket.owned_numel)
            device = weights.device
            if self._offload is not None:
                device = torch.device("cpu") if self._offload else self._engine.device
            self._averages[bucket] = weights.to(device, torch.float32, copy=True)
        return self._averages[bucket]

    @torch.no_grad()
    def follow(self) -> None:
        """Include parameters that began to train later, by shardcore.unfreeze. Their average begins
        with their weights.

        Collective if there are any.
        """
        engine, buckets = self._engine, self._engine.updater.buckets
        replaced = {
            bucket: average for bucket, average in self._averages.items() if bucket not in buckets
        }
        if not replaced and len(self._averages) == len(buckets):
            return
        engine.synchronize()
        averages = dict[torch.Tensor, torch.Tensor]()
        for bucket, full in zip(
            replaced, engine.full_tensors.of_buckets(replaced.items()), strict=True
        ):
            averages |= {
                managed.param: managed.full(managed.slice_of(full).clone())
                for managed in bucket.params
            }
            del self._averages[bucket]
        params = [managed.param for bucket in buckets for managed in bucket.params]
        self._set({param: averages.get(param) for param in params})

    def _described(self) -> str:
        """Return what has to be the same on every rank for one average of all shards."""
        return f"the average after {self.updates} updates with decay {self.decay}"

    def _set(self, averages: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
        """Set this rank's parts of the averages of parameters from full ones; None: they stay,
        or begin with the weights.
        """
        for bucket in self._engine.updater.buckets:
            shard = self.shard(bucket)
            for managed in bucket.params:
                full = averages[managed.param]
                if full is None:
                    continue
                for piece in bucket.pieces_of(managed):
                    part = managed.cut(full).reshape(-1)[
                        piece.param_start : piece.param_start + piece.numel
                    ]
                    shard[piece.start : piece.start + piece.numel].copy_(part)

    @torch.no_grad()
    def update(self) -> None:
        """Average in the current weights. Call it on every rank after each step, or every few
        steps.

        It waits for the step. With overlap_step=True, call it between backward and the next step,
        when the last step is complete anyway. Ranks send nothing. Raises ValueError inside `swap`,
        and RuntimeError if the step failed.

        Streams: queued on the current stream. An average in host memory waits for the work queued
        there.
        """
        engine = self._engine
        engine.updater.refuse_swapped("update")
        engine.synchronize()
        engine.updater.accept_weight_edits()
        self.follow()
        for bucket in engine.updater.buckets:
            average = self.shard(bucket)
            weights = read_weights(engine, bucket)(0, bucket.owned_numel).to(
                average.device, torch.float32
            )
            if self.updates == 0:
                average.copy_(weights)
            else:
                average.lerp_(weights, 1 - self._decay)
        self.updates += 1

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Use the averaged weights inside the context, for evaluation. Collective at its start and
        end.

        The average is rounded to the weights' dtype, as a step rounds masters. Masters and states
        do not change. Afterwards the original weights are restored bit for bit, so edits inside the
        context are lost. Each rank keeps a copy of its shard of the weights meanwhile. Inside the
        context, operations on masters (a step, state dicts, save, load) raise ValueError;
        `EMA.state_dict` works.
        """
        engine = self._engine

        def check() -> str:
            engine.updater.refuse_swapped("swap")
            engine.updater.accept_weight_edits()
            engine.refuse_held("swap")
            return self._described()

        engine.agree("EMA.swap", check)
        self.follow()
        weights = {
            bucket: bucket.owned_values(0, bucket.owned_numel).clone()
            for bucket in engine.updater.buckets
        }
        try:
            engine.updater.swapped = True
            self._put({bucket: self.shard(bucket) for bucket in weights})
            yield
        finally:
            self._put(weights)
            engine.updater.swapped = False

    @torch.no_grad()
    def _put(self, values: Mapping[Bucket, torch.Tensor]) -> None:
        """Write values of owned ranges to the weights, and show them on every rank. Collective."""
        engine = self._engine
        if engine.unsharder is not None:
            engine.unsharder.reshard_all()
        gathers: list[Any] = []
        for bucket, owned in values.items():
            bucket.assign(0, owned)
            if engine.lifetimes.gathers_new_weights:
                gathers += engine.comm.all_gather(
                    [bucket.weight], Traffic.READ, "the average", engine.comm.shard_ranks
                )
        wait_all(gathers)
        note_written([managed for bucket in values for managed in bucket.params])

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return {"updates": the number of updates, "averages": full float32 tensors by parameter
        name}. Collective.

        The tensors are on the device of the average, or in host memory with offload. Load them into
        a plain model by `plain.load_state_dict(state["averages"], strict=False)`. A checkpoint
        keeps the average in shards: `shardcore.save(..., ema=ema)`.
        """
        engine, averages = self._engine, dict[str, torch.Tensor]()

        def check() -> str:
            engine.membership.check("EMA.state_dict")
            return self._described()

        engine.agree("EMA.state_dict", check)
        self.follow()
        names = names_of(engine)
        fulls = engine.full_tensors.of_buckets(
            (bucket, self.shard(bucket)) for bucket in engine.updater.buckets
        )
        for bucket, full in zip(engine.updater.buckets, fulls, strict=True):
            averages |= {
                names[managed.param]: managed.full(managed.slice_of(full).clone())
                for managed in bucket.params
            }
        return {"updates": self.updates, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the average from the result of `state_dict`, saved with any number of ranks. Every
        rank passes all of it. Collective.

        Raises ValueError, on every rank, for other names or shapes.
        """
        engine = self._engine
        self.follow()
        params: dict[str, torch.Tensor] = {}

        def check() -> str:
            saved = state_dict["averages"]
            engine.membership.check("EMA.load_state_dict")
            names = names_of(engine)
            for bucket in engine.updater.buckets:
                params.update({names[managed.param]: managed.param for managed in bucket.params})
            shapes = {name: tuple(param.shape) for name, param in params.items()}
            saved_shapes = {name: tuple(value.shape) for name, value in saved.items()}
            for name in [*shapes, *saved_shapes]:
                if shapes.get(name) != saved_shapes.get(name):
                    raise ValueError(
                        f"EMA.load_state_dict: {name} has shape {saved_shapes.get(name)}; "
                        f"expected {shapes.get(name)} (None: does not exist)"
                    )
            return f"the average after {int(state_dict['updates'])} updates"

        engine.agree("EMA.load_state_dict", check)
        self._set({param: state_dict["averages"][name] for name, param in params.items()})
        self.updates = int(state_dict["updates"])
