"""verl's training engine on shardcore: the backend "shardcore" of verl's EngineRegistry.

verl imports this module by VERL_USE_EXTERNAL_MODULES=shardcore.integrations.verl, and
`model_engine=shardcore` on its command line chooses the configurations below (docs/verl.md). A Ray
worker imports it with the configuration that it gets.

Batches, losses and the loop over micro-batches are those of verl's FSDP engine. The shards, the
step, the weights for rollouts and the checkpoints are here. Tested with verl 0.9.1.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from torch import nn
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.workers.config import ActorConfig, CriticConfig, EngineConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngine,
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)
from verl.workers.engine.spec import ShardSpec

from shardcore.api import no_sync, shard_and_log
from shardcore.checkpoint.format import plain_name
from shardcore.checkpoint.load import load
from shardcore.checkpoint.save import save
from shardcore.engine.away import offload_states, reload_states
from shardcore.engine.engine import Engine, engine_behind
from shardcore.stream import param_metadata, stream_params

_NAME = "shardcore"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class ShardcoreEngineConfig(EngineConfig):
    """The configuration of an engine, as `actor_rollout_ref.actor.shardcore.stage=2` sets it.

    Fields that verl's FSDPEngineConfig has, too, mean the same.

    Args:
        stage, offload, units: As in `shardcore.shard`.
        precision: "bf16", "fp16" or "fp32": the dtype of weights and of autocast. 16-bit weights
            have float32 masters.
        model_dtype: The dtype in which files are read, before precision converts.
        param_offload: Move weights and optimizer states to host memory between the phases of
            training. A stream to the rollout brings back the weights for its duration.
        optimizer_offload: Move optimizer states to host memory between the phases of training.
            With param_offload, too, only training brings them back.
        ulysses_sequence_parallel_size: The number of ranks that share each sequence.
        use_no_sync_for_gradient_accumulation: Add gradients of micro-batches locally, and reduce
            once in a step.

    Raises ValueError for settings of verl that this engine does not have.
    """

    # The contexts of verl's FSDP engine read it: there is no FSDP module to reshard.
    fsdp_size: ClassVar[int] = -1

    strategy: str = _NAME
    stage: int = 3
    offload: dict[str, Any] | None = None
    precision: str = "bf16"
    units: Any = "auto"
    model_dtype: str = "fp32"
    ulysses_sequence_parallel_size: int = 1
    use_no_sync_for_gradient_accumulation: bool = False
    use_torch_compile: bool = True
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    pad_to_length: bool = False
    pad_to_length_bucket: int = 1024

    def __post_init__(self) -> None:
        """Check what verl and this engine do not have in common."""
        super().__post_init__()
        if self.precision not in _DTYPES:
            raise ValueError(f"precision is {self.precision!r}; expected one of {list(_DTYPES)}")
        _expect("strategy", self.strategy, _NAME)
        _expect("dtype", self.dtype, "bfloat16", "set precision")
        _expect("router_replay.mode", self.router_replay.mode, "disabled")


def _expect(name: str, value: object, expected: object, remedy: str = "") -> None:
    if value != expected:
        more = f" ({remedy})" if remedy else ""
        raise ValueError(f"{name} is {value!r}; expected {expected!r}{more}")


@dataclass
class ShardcoreActorConfig(ActorConfig):
    """An actor, or the reference model, that this engine runs. See ShardcoreEngineConfig."""

    strategy: str = _NAME
    shardcore: ShardcoreEngineConfig = field(default_factory=ShardcoreEngineConfig)
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        """Let the worker find the engine's configuration."""
        super().__post_init__()
        self.engine = self.shardcore


@dataclass
class ShardcoreCriticConfig(CriticConfig):
    """A critic that this engine trains. See ShardcoreEngineConfig."""

    strategy: str = _NAME
    shardcore: ShardcoreEngineConfig = field(default_factory=ShardcoreEngineConfig)

    def __post_init__(self) -> None:
        """Let the worker find the engine's configuration."""
        super().__post_init__()
        self.engine = self.shardcore


class _Engine(FSDPEngine):
    """What a language model and a value model have in common."""

    def __init__(
        self,
        model_config: Any,
        engine_config: ShardcoreEngineConfig,
        optimizer_config: Any,
        checkpoint_config: Any,
    ) -> None:
        """See verl's BaseEngine. Nothing is built yet."""
        _expect("model.enable_activation_offload", model_config.enable_activation_offload, False)
        _expect("checkpoint.async_save", (checkpoint_config or {}).get("async_save", False), False)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._autocast_dtype = _DTYPES[engine_config.precision]

    # --- the model and its optimizer --------------------------------------------------------------

    def initialize(self) -> None:
        """Build the model, the optimizer and the scheduler. Collective."""
        self._build_model_optimizer()
        self.checkpoint_manager = BaseCheckpointManager(
            self.module,
            self.optimizer,
            self.lr_scheduler,
            self.model_config.get_processor(),
            self.checkpoint_config,
        )
        self._move("cpu")

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Shard the model, together with its optimizer, which verl asks for afterwards."""
        config = self.engine_config
        if any(param.is_meta for param in module.parameters()):
            # verl reads the files on rank 0 alone. Memory that nobody writes to takes no room.
            module.to_empty(device="cpu")
        optimizer = None if config.forward_only else super()._build_optimizer(module)
        module, self._sharded_optimizer = shard_and_log(
            module,
            optimizer,
            stage=config.stage,
            units=config.units,
            offload=config.offload,
            precision=config.precision,
            clip_grad_norm=None if config.forward_only else self.optimizer_config.clip_grad,
        )
        if config.precision == "fp16" and not config.forward_only:
            self.scaler = SimpleNamespace(scale=self._sharded_optimizer.scale_loss)
        return module

    def _build_optimizer(self, module: nn.Module) -> Any:
        return self._sharded_optimizer

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        if is_last_micro_batch or not self.engine_config.use_no_sync_for_gradient_accumulation:
            return nullcontext()
        return no_sync(self.module)

    def optimizer_step(self) -> float:
        """Clip and step, unless the norm is not finite. Returns the norm before clipping."""
        self.optimizer.step()
        return self._core.last_grad_norm or 0.0

    @property
    def _core(self) -> Engine:
        return engine_behind("verl", self.module)

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move weights and optimizer states to host memory ("cpu"), or back to the device.

        States leave with the weights; with optimizer_offload they come back for optimizer=True
        only. Buffers of gradients and gathered weights are freed, whatever grad is. While gradients
        wait for a step, the weights stay on the device.
        """
        optimizer = optimizer and self.optimizer is not None
        if device == get_device_name():
            if model:
                states = optimizer or not self.is_optimizer_offload_enabled
                reload_states(self.module, states=states)
            elif optimizer:
                self.optimizer.reload_states()
        elif self._core.reducer.holds_grads:
            if optimizer:
                self.optimizer.offload_states(["optim_states"])
        elif model:
            offload_states(self.module)
        elif optimizer:
            self.optimizer.offload_states()

    def _move(self, device: str) -> None:
        """Move the parts that the configuration keeps in host memory between phases."""
        model, optimizer = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        self.to(device, model=model, optimizer=optimizer)

    @contextmanager
    def _weights_on_device(self) -> Iterator[None]:
        """Have the weights on the device inside, and move them back if they were in host memory."""
        away = self._core.weights_away is not None
        if away:
            self.to(get_device_name(), optimizer=False)
        try:
            yield
        finally:
            if away:
                self.to("cpu", optimizer=False)

    def _yielded(self, weights: Iterator[Any]) -> Iterator[Any]:
        # entered with the first weight: verl's worker asks for two streams before it reads one
        with self._weights_on_device():
            yield from weights

    # --- weights for rollouts ---------------------------------------------------------------------

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Return an iterator over the full weights, one unit in memory at a time, and PEFT's
        configuration if the rollout gets adapters. Every rank iterates to the end.

        base_sync_done: of adapters that are not merged, yield the adapters, else their base.
        layered_summon is ignored: weights are never gathered all at once. Weights in host memory
        are on the device from the first tensor to the end.
        """
        peft = getattr(self.module, "peft_config", None)
        if peft is None or self.model_config.lora.get("merge", False):
            merge = peft is not None
            stream = stream_params(self.module, names="huggingface", merge_adapters=merge)
            return self._yielded(stream), None
        config = peft["default"]
        if base_sync_done:
            stream = stream_params(self.module, only_trainable=True)
            return self._yielded(stream), config.to_dict()
        return self._yielded(self._base(config)), config.to_dict()

    def _base(self, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under the adapters, by the names that a rollout with LoRA has."""
        for name, weight in stream_params(self.module):
            if "lora_" not in name:
                name = name.removeprefix("base_model.model.").replace(".base_layer", "")
                yield replace_lora_wrapper(name, config), weight

    def get_per_tensor_param_shard(
        self, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor, Any]], None]:
        """Return an iterator over this rank's parts of the weights, each with its place in the
        whole parameter. Not collective; every rank yields all names, in one order.

        A part is the flat tensor that this rank updates, empty if it has none. Raises
        NotImplementedError for adapters, and for weights that files have in another layout.
        """
        if hasattr(self.module, "peft_config"):
            raise NotImplementedError(
                "get_per_tensor_param_shard: the model has adapters; expected a model without "
                'them, or checkpoint_engine.backend="naive"'
            )
        own = [each.name for each in param_metadata(self.module)]
        if own != [each.name for each in param_metadata(self.module, names="huggingface")]:
            raise NotImplementedError(
                "get_per_tensor_param_shard: files of this model have its weights in another "
                "layout, such as one tensor for each expert; expected the same layout, or "
                'checkpoint_engine.backend="naive"'
            )
        return self._yielded(self._parts()), None

    def _parts(self) -> Iterator[tuple[str, torch.Tensor, Any]]:
        engine = self._core
        engine.synchronize()
        managed = {each.param: each for bucket in engine.buckets for each in bucket.params}
        for name, param in self.module.named_parameters():
            bucket, shape = engine.bucket_of.get(param), tuple(param.shape)
            if bucket is None:
                yield plain_name(name), param.detach().reshape(-1), ShardSpec(shape)
                continue
            place, part = 0, torch.empty(0, dtype=bucket.dtype, device=engine.device)
            low, high = bucket.reduces  # at stage 0, too, each rank has a part of its own
            for piece in bucket.pieces_of(managed[param]):
                start, end = max(piece.start, low), min(piece.start + piece.numel, high)
                if start < end:
                    place = piece.param_start + start - piece.start
                    part = bucket.owned_values(start, end - start).to(engine.device)
            spec = ShardSpec(shape, place=place, gather_group=dist.group.WORLD)
            yield plain_name(name), part, spec

    # --- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save with `shardcore.save` to local_path, and the tokenizer and the model's
        configuration to local_path/huggingface. Collective.

        checkpoint.save_contents: "model" or "optimizer" saves weights; "optimizer" also states;
        "extra" also the scheduler; "hf_model" writes the files of from_pretrained, too.
        """
        _expect("hdfs_path", hdfs_path, None)
        manager = self.checkpoint_manager
        if manager.should_save_model or manager.should_save_optimizer:
            with self._weights_on_device():
                save(
                    local_path,
                    self.module,
                    self.optimizer if manager.should_save_optimizer else None,
                    scheduler=self.lr_scheduler if manager.should_save_extra else None,
                    exclude_frozen_parameters=self._adapters_alone,
                )
        folder = Path(local_path) / "huggingface"
        if self.rank == 0:
            config = self.model_config
            for each in (config.hf_config, config.generation_config, manager.processing_class):
                if each is not None:
                    each.save_pretrained(folder)
        if manager.should_save_hf_model:
            with self._weights_on_device():
                self.module.save_pretrained(folder)
        if self.rank == 0:
            manager.register_checkpoint(local_path, max_ckpt_to_keep)
        dist.barrier()

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **kwargs: Any,
    ) -> None:
        """Load a checkpoint of `save_checkpoint`, from any number of ranks. Collective.

        del_local_after_load is ignored: the files are not copies.
        """
        _expect("hdfs_path", hdfs_path, None)
        if local_path is None:
            return
        manager = self.checkpoint_manager
        self._move(get_device_name())
        load(
            local_path,
            self.module,
            self.optimizer if manager.should_load_optimizer else None,
            scheduler=self.lr_scheduler if manager.should_load_extra else None,
            strict=not self._adapters_alone,
        )
        self._move("cpu")

    @property
    def _adapters_alone(self) -> bool:
        """Whether checkpoints have the adapters without their base."""
        return bool(self._is_lora and self.checkpoint_manager.should_save_lora_only)


@EngineRegistry.register(model_type="language_model", backend=_NAME, device=["cpu", "cuda"])
class ShardcoreEngine(_Engine, FSDPEngineWithLMHead):
    """verl's engine of actors and reference models."""


@EngineRegistry.register(model_type="value_model", backend=_NAME, device=["cpu", "cuda"])
class ShardcoreValueEngine(_Engine, FSDPEngineWithValueHead):
    """verl's engine of critics."""


def _store(group: str, name: str, node: Mapping[str, Any], package: str | None = None) -> None:
    """Let verl's command line find a configuration, as if a file group/name.yaml were in verl."""
    ConfigStore.instance().store(group=group, name=name, node=dict(node), package=package)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _role(kind: type, base: str, **own: Any) -> dict[str, Any]:
    return {
        "defaults": [{"/optim@optim": "fsdp"}, {f"/engine@{_NAME}": _NAME}, base, "_self_"],
        "_target_": _path(kind),
        "strategy": _NAME,
        **own,
    }


def _engine_node() -> dict[str, Any]:
    """Return what verl's command line may set of an engine: not what verl's workers set."""
    of_verl = ["param_offload", "optimizer_offload", "forward_only", "dtype", "seed"]
    names = [*ShardcoreEngineConfig.__annotations__, *of_verl, "full_determinism"]
    config = ShardcoreEngineConfig()
    return {"_target_": _path(ShardcoreEngineConfig)} | {
        name: getattr(config, name) for name in names if name != "fsdp_size"
    }


_PADDING = {"use_remove_padding": "${oc.select:actor_rollout_ref.model.use_remove_padding,false}"}
_store("model_engine", _NAME, {"model_engine": _NAME}, "_global_")
_store("engine", _NAME, _engine_node())
_store("actor", f"{_NAME}_actor", _role(ShardcoreActorConfig, "actor", **_PADDING))
_ULYSSES = "ulysses_sequence_parallel_size"  # a reference model follows its actor, as verl's do
_OF_REF = {
    "forward_only": True,
    _ULYSSES: f"${{oc.select:actor_rollout_ref.actor.{_NAME}.{_ULYSSES},1}}",
}
_store("ref", f"{_NAME}_ref", _role(ShardcoreActorConfig, "ref", shardcore=_OF_REF))
_store("critic", f"{_NAME}_critic", _role(ShardcoreCriticConfig, "critic"))
