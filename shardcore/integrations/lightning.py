"""Strategies for Lightning's Trainer and for Fabric: `import shardcore.integrations.lightning`
registers them by name.

For `lightning` and `pytorch_lightning` alike, which have equal classes under different names: so
what is ours is in mixins, and the classes are made of a mixin and a class of the package (`_make`).
Launching, process groups, samplers and reductions of metrics are those of Lightning's DDPStrategy.

Private names of Lightning, all of which DeepSpeedStrategy overrides or calls as well:
`_after_closure` of the precision plugin, `_forward_redirection`, `_layer_sync` and
`_backward_sync_control` of a strategy. Tested with Lightning 2.6.6.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardcore.api import no_sync, shard_and_log
from shardcore.checkpoint.format import MANIFEST
from shardcore.checkpoint.load import load
from shardcore.checkpoint.plain import to_json
from shardcore.checkpoint.save import save
from shardcore.deepspeed.zero_init import init_with_shapes
from shardcore.engine.engine import engine_behind
from shardcore.engine.hooks import detach
from shardcore.engine.loss_scale import LossScale
from shardcore.engine.pieces import has_piece
from shardcore.optim.clip import clip_grad_norm_
from shardcore.optim.interface import engine_of
from shardcore.options import GROUPS, OPTIONS, did_you_mean

# The options of shard for each precision of Lightning. "*-mixed" are float32 weights under
# torch.autocast, as with Lightning's DDP and FSDP strategies, so that a change of the strategy
# changes no arithmetic. "*-true" are 16-bit weights, beside which shardcore always has float32
# masters: the memory and the messages of DeepSpeed's bf16 mode. float16 has a loss scale in both.
PRECISIONS: dict[str, dict[str, Any]] = {
    "32-true": {},
    "bf16-mixed": {},
    "16-mixed": {"loss_scale": LossScale()},
    "bf16-true": {"precision": "bf16"},
    "16-true": {"precision": "fp16"},
}

# Options of shard that are settings of the Trainer or of Fabric.
ELSEWHERE = {
    "model": "fit(model)",
    "optimizer": "configure_optimizers",
    "precision": "Trainer(precision=) or Fabric(precision=)",
    "clip_grad_norm": "Trainer(gradient_clip_val=) or fabric.clip_gradients",
    "accumulate": "Trainer(accumulate_grad_batches=) or fabric.no_backward_sync",
    "process_group": "num_nodes= and devices=",
}
SHARD_OPTIONS = [name for name in (*OPTIONS, *GROUPS) if name not in ELSEWHERE]

OFFLOAD = {
    1: {"optimizer": "cpu"},
    2: {"optimizer": "cpu", "gradients": "cpu"},
    3: {"optimizer": "cpu", "gradients": "cpu", "params": "cpu"},
}
# The path is DeepSpeed's default. Lightning has checkpoints of its own.
NVME = {
    "optimizer": "nvme",
    "path": "/local_nvme",
    "gradients": "cpu",
    "params": "nvme",
    "durable": False,
}

# What `shardcore` registers, by name.
STRATEGIES: dict[str, dict[str, Any]] = {
    "shardcore": {},
    **{f"shardcore_stage_{stage}": {"stage": stage} for stage in OFFLOAD},
    **{
        f"shardcore_stage_{stage}_offload": {"stage": stage, "offload": offload}
        for stage, offload in OFFLOAD.items()
    },
    "shardcore_stage_3_nvme": {"stage": 3, "offload": NVME},
}

_CLIENT = "lightning"  # the key of client_state


# --- precision plugins ----------------------------------------------------------------------------


# of mixins: what else they have is that of the classes that they are mixed into
_Base: Any = object


class _Weights(_Base):
    """Of every precision plugin: `shard` converts weights, and masters start from the weights as
    given.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Leave the module to `shard`."""
        return module

    def module_init_context(self) -> AbstractContextManager[None]:
        """Let modules be made in torch's default dtype."""
        return nullcontext()


class _TrainerPrecision(_Weights):
    """Scales losses, and clips in the step.

    Lightning clips through its precision plugin, which would look for p.grad and, after a
    GradScaler, refuse. This one passes the limit to the optimizer's step, which clips in the pass
    that updates.
    """

    _limit: float | None = None  # of the norm, inside a step; None outside

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Scale the loss (float16), and call the hooks that come before backward."""
        scaled: torch.Tensor = super().pre_backward(
            engine_behind("backward", module).scale_loss(tensor), module
        )
        return scaled

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure and the hooks that follow it, among them clipping; then step.
        Collective.
        """
        result = closure()
        self._limit = math.inf
        try:
            self._after_closure(model, optimizer)
            if self._limit < math.inf:
                kwargs["max_norm"] = min(self._limit, kwargs.get("max_norm") or math.inf)
        finally:
            self._limit = None
        optimizer.step(**kwargs)
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip by the global norm: inside a step with it, and outside (manual optimization) at
        once, which is collective.
        """
        if clip_val is None or clip_val <= 0:
            return
        check_algorithm(gradient_clip_algorithm)
        if self._limit is not None:
            self._limit = min(self._limit, float(clip_val))
        else:
            clip_grad_norm_(
                [param for group in optimizer.param_groups for param in group["params"]], clip_val
            )


class _FabricPrecision(_Weights):
    """Scales losses."""

    def backward(
        self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run backward on the scaled loss. model: what the strategy found."""
        scaled = tensor if model is None else engine_behind("backward", model).scale_loss(tensor)
        super().backward(scaled, model, *args, **kwargs)


def check_algorithm(algorithm: str) -> None:
    """Raise ValueError for clipping by value."""
    if algorithm == "value":
        raise ValueError(
            'clip_gradients: gradient_clip_algorithm is "value"; expected "norm" (or call '
            "torch.nn.utils.clip_grad_value_(self.parameters(), limit) in "
            "configure_gradient_clipping)"
        )


# --- both strategies ------------------------------------------------------------------------------


class _Sharding(_Base):
    """What the Trainer's and Fabric's strategies share.

    _precisions: our precision plugins, by the class of the package's own whose place they take.
    """

    _precisions: Mapping[type, type]
    _plain_io: type  # the package's TorchCheckpointIO

    def __init__(
        self,
        stage: int = 2,
        *,
        offload: Any = None,
        save_distributed_checkpoint: bool = True,
        **options: Any,
    ) -> None:
        """Take the options of shardcore.shard, and those of Lightning's DDPStrategy that concern
        processes.

        Args:
            stage, offload: See shardcore.shard, as `units`, `overlap_step` and so on.
            save_distributed_checkpoint: Save directories, each rank what it owns (shardcore.save);
                else one file, for which rank 0 gathers everything. Both kinds are loaded.
            options: Further options of shardcore.shard; `accelerator`, `parallel_devices`,
                `cluster_environment`, `checkpoint_io`, `precision_plugin` (Fabric: `precision`),
                `process_group_backend`, `timeout`, `start_method`.

        Raises TypeError for others.
        """
        kind = type(self).__name__
        ddp_options = [
            name for name in inspect.signature(super().__init__).parameters if name not in _DDPS
        ]
        for name in options:
            if name in ELSEWHERE:
                raise TypeError(f"{kind}: {name} was given; expected it in {ELSEWHERE[name]}")
            known = ["save_distributed_checkpoint", *SHARD_OPTIONS, *ddp_options]
            if name not in known:
                raise TypeError(f"{kind}: {name} is no option; {did_you_mean(name, known)}")
        shard_options = {name: value for name, value in options.items() if name in SHARD_OPTIONS}
        self._shard_options: dict[str, Any] = {"stage": stage, "offload": offload, **shard_options}
        self._saves_shards = save_distributed_checkpoint
        super().__init__(
            **{name: value for name, value in options.items() if name not in SHARD_OPTIONS}
        )

    def _shardcore_plugin(self, plugin: Any) -> Any:
        """Return our precision plugin for one of Lightning's; TypeError or ValueError for one
        that we have none for.
        """
        kind = type(self).__name__
        if plugin is None or isinstance(plugin, _Weights):
            return plugin
        if type(plugin) not in self._precisions:
            raise TypeError(
                f"{kind}: precision is a {type(plugin).__name__} "
                f"({getattr(plugin, 'precision', '')}); expected one of {', '.join(PRECISIONS)}"
            )
        plugin_class = self._precisions[type(plugin)]
        if not hasattr(plugin, "scaler"):
            return (
                plugin_class(plugin.precision) if plugin.precision != "32-true" else plugin_class()
            )
        usual = torch.amp.GradScaler(plugin.device)
        if plugin.scaler is not None and plugin.scaler.state_dict() != usual.state_dict():
            raise ValueError(
                f"{kind}: precision uses a GradScaler; expected none "
                f"({kind}(loss_scale=shardcore.LossScale(...)) sets the scale)"
            )
        converted = plugin_class(plugin.precision, plugin.device)
        converted.scaler = None  # the engine scales
        return converted

    def _shard(self, model: nn.Module, optimizer: Any, precision: str) -> Any:
        """Shard the model, for training if there is an optimizer; returns the optimizer to use.
        Collective.
        """
        options = {**PRECISIONS[precision], **self._shard_options}
        if optimizer is None:
            options.pop("loss_scale", None)
        return shard_and_log(model, optimizer, **options)[1]

    def _is_filled_later(self, empty_init: bool | None) -> bool:
        """Whether `shard` is to give modules their values, or slices of them."""
        options = map(self._shard_options.get, ("materialize", "model_parallel_group"))
        return bool(empty_init) or any(option is not None for option in options)

    def _device_context(self, empty_init: bool | None) -> AbstractContextManager[Any]:
        """Make modules on the meta device if `shard` is to give them values; else in memory."""
        return torch.device("meta") if self._is_filled_later(empty_init) else nullcontext()

    def _partitioning(self, empty_init: bool | None) -> AbstractContextManager[None]:
        """Partition weights of stage 3 as they are made, if they get values there. Collective."""
        over_ranks = dist.is_initialized() and dist.get_world_size() > 1
        if self._shard_options["stage"] < 3 or not over_ranks or self._is_filled_later(empty_init):
            return nullcontext()
        return in_parts()

    @property
    def _adds_locally(self) -> bool:
        """Whether micro-steps are added on each rank and reduced once, as shard's sync_each says
        or by default.
        """
        sync_each = self._shard_options.get("sync_each")
        return self._shard_options["stage"] < 2 if sync_each is None else not sync_each

    def _directory_of(self, path: Any, storage_options: Any) -> Path:
        """Return where to save a directory, the same on all ranks. Collective."""
        if storage_options is not None or type(self.checkpoint_io) is not self._plain_io:
            raise TypeError(
                f"save_checkpoint: storage_options or a CheckpointIO was given to "
                f"{type(self).__name__}; expected None (every "
                "rank writes its own files), or save_distributed_checkpoint=False"
            )
        folder, is_file = self.broadcast((str(path), Path(path).is_file()))
        if is_file or "://" in folder:
            raise ValueError(
                f"save_checkpoint: path is {folder}, {'an existing file' if is_file else 'a URL'}; "
                "expected a directory on a file system that all ranks share, or "
                "save_distributed_checkpoint=False"
            )
        return Path(folder)


@contextmanager
def in_parts() -> Iterator[None]:
    """Partition weights as they are made; from_pretrained reads files into the parts.
    Collective.
    """
    has_transformers = find_spec("transformers") is not None
    zero3: Any = import_module("shardcore.integrations.zero3") if has_transformers else None
    with nullcontext() if zero3 is None else zero3.from_pretrained_in_pieces(), init_with_shapes():
        yield


_DDPS = (
    "self",
    "args",
    "kwargs",
    "ddp_comm_state",
    "ddp_comm_hook",
    "ddp_comm_wrapper",
    "model_averaging_period",
)


def is_directory_of_shards(strategy: Any, path: Any) -> bool:
    """Whether a checkpoint is what shardcore.save has saved, as rank 0 sees it. Collective."""
    is_saved_by_shardcore: bool = strategy.broadcast((Path(path) / MANIFEST).exists())
    return is_saved_by_shardcore


def unpacked(kind: str, path: Path, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `kind` has saved beside the model. ValueError if it did not save this
    checkpoint.
    """
    saved = client_state.get(_CLIENT)
    if not isinstance(saved, dict) or saved.get("kind") != kind:
        raise ValueError(
            f"load_checkpoint: {path} was not saved by Lightning's {kind}; expected a checkpoint "
            f"of it"
        )
    return dict(saved["content"])


# --- the Trainer's strategy -----------------------------------------------------------------------


def _step_of(name: str, context: str) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The LightningModule itself is sharded, so its hooks begin and end each forward: its
        # steps run inside its __call__, by Lightning's own redirection, as under DDP.
        module = self.lightning_module
        with getattr(self.precision_plugin, context)():
            return self._forward_redirection(module, module, name, *args, **kwargs)

    step.__doc__ = f"Run the module's {name}."
    return step


class _TrainerStrategy(_Sharding):
    """Shards the LightningModule when the Trainer sets up, and saves and loads its checkpoints.

    After `fit` the module stays sharded: `validate`, `test` and `save_checkpoint` go on with it.
    Another `fit` of it makes it an ordinary one first (engine/hooks.py: detach), since its
    optimizer is new.
    """

    optimizers: list[Any]
    _averages: tuple[type, ...]  # the package's callbacks that average whole weights

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, which is ours."""
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = self._shardcore_plugin(plugin)

    def setup(self, trainer: Any) -> None:
        """Make the optimizer and shard the module; for evaluation without an optimizer.
        Collective.
        """
        self.accelerator.setup(trainer)
        fits, module = trainer.state.fn == "fit", self.lightning_module
        self._check(trainer, fits)
        self.model = module
        if fits:
            if engine_of(module) is not None:
                detach(module)
            if self._layer_sync:
                self.model = module = self._layer_sync.apply(module)
            self.setup_optimizers(trainer)
            if len(self.optimizers) != 1:
                raise ValueError(
                    f"{type(self).__name__}: configure_optimizers returned {len(self.optimizers)} "
                    "optimizers; expected one (use groups for parameters with other options)"
                )
        if engine_of(module) is None:
            sharded = self._shard(
                module, self.optimizers[0] if fits else None, self.precision_plugin.precision
            )
            self.optimizers = [sharded] if fits else []
        for child in module.modules():  # metrics, whose states are no buffers
            if next(child.parameters(), None) is None:
                child.to(self.root_device)
        self.setup_precision_plugin()
        evaluations = (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        )
        # what is gathered in torch.inference_mode would be of no use in training
        for loop in evaluations:
            loop.inference_mode = False

    def _check(self, trainer: Any, fits: bool) -> None:
        """Raise before training for what would fail in it."""
        if trainer.gradient_clip_val:
            check_algorithm(trainer.gradient_clip_algorithm or "norm")
        averages = [
            type(each).__name__ for each in trainer.callbacks if isinstance(each, self._averages)
        ]
        if fits and averages and self._shard_options["stage"] == 3:
            raise ValueError(
                f"{type(self).__name__}: callbacks include {averages[0]}, which reads weights, and "
                "at stage 3 they are sharded; expected shardcore.EMA(module), updated in "
                "on_train_batch_end, or stage 0, 1 or 2"
            )
        if fits and self._saves_shards and trainer.checkpoint_callback is not None:
            for thing in (self.lightning_module, trainer.datamodule):
                try:
                    to_json(getattr(thing, "hparams", {}), "hparams")
                except (TypeError, ValueError) as error:
                    raise type(error)(
                        f"{type(self).__name__}: of {type(thing).__name__}, {error}; or "
                        f"save_hyperparameters(ignore=[...]), or save_distributed_checkpoint=False"
                    ) from error

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make modules in host memory; on the meta device if empty_init is True, or the option
        materialize is given: `shard` then gives the values.
        """
        with self._device_context(empty_init):
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Partition the weights of configure_model at stage 3 as they are made. Collective."""
        with self._partitioning(empty_init=None):
            yield

    # --- steps ------------------------------------------------------------------------------------

    training_step = _step_of("training_step", "train_step_context")
    validation_step = _step_of("validation_step", "val_step_context")
    test_step = _step_of("test_step", "test_step_context")
    predict_step = _step_of("predict_step", "predict_step_context")

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add the gradients of a micro-step that is not the last one, in the order that shard
        has for this stage.
        """
        with no_sync(self.lightning_module) if self._adds_locally else nullcontext():
            yield

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Load into shards."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full weights on rank 0; nothing on other ranks, and where every rank saves
        its own. Collective.
        """
        return {} if self._saves_shards else self._on_first(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the full states, as lightning_module_state_dict does."""
        if self._saves_shards:
            return {}
        return self._on_first(getattr(optimizer, "_optimizer", optimizer).state_dict())

    def _on_first(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self.is_global_zero else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save what the Trainer has put together: a directory, or by rank 0 one file.
        Collective.
        """
        if not self._saves_shards:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        path = self._directory_of(filepath, storage_options)
        content = {
            key: value
            for key, value in checkpoint.items()
            if key not in ("state_dict", "optimizer_states")
        }
        optimizer = self.optimizers[0] if checkpoint.get("optimizer_states") else None
        state = {_CLIENT: {"kind": "Trainer", "content": content}}
        save(
            path.parent,
            self.lightning_module,
            optimizer,
            tag=path.name,
            client_state=state,
            save_latest=False,
        )

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a directory into the shards and return the rest of it; or return what is in a
        file. Collective.
        """
        if not is_directory_of_shards(self, checkpoint_path):
            content: dict[str, Any] = self.checkpoint_io.load_checkpoint(
                checkpoint_path, weights_only=weights_only
            )
            return content
        module = self.lightning_module
        fits = module.trainer.state.fn == "fit"
        optimizer = self.optimizers[0] if self.optimizers and fits else None
        loaded = load(checkpoint_path, module, optimizer, strict=module.strict_loading)
        return {
            **unpacked("Trainer", loaded.path, loaded.client_state),
            "state_dict": {},
            "optimizer_states": [],
        }

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Set the weights from a file; those of a directory are loaded already."""
        if checkpoint["state_dict"]:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Set the states from a file; those of a directory are loaded already."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """End the run. The module stays where it is, sharded."""
        for part in (
            self.cluster_environment,
            self.precision_plugin,
            self.accelerator,
            self.checkpoint_io,
        ):
            if part is not None:
                part.teardown()


# --- Fabric's strategy ----------------------------------------------------------------------------


class _NoBackwardSync:
    """What `fabric.no_backward_sync` enters."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Add gradients locally, where `enabled`."""
        return no_sync(module) if enabled else nullcontext()


class _FabricStrategy(_Sharding):
    """Shards the model in `fabric.setup(model, optimizer)`, or without an optimizer for forwards
    alone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See _Sharding."""
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoBackwardSync()
        self._trained: list[nn.Module] = []

    @property
    def precision(self) -> Any:
        """The precision plugin, which is ours."""
        return self._precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = self._shardcore_plugin(plugin)

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Partition weights at stage 3 as modules are made; at other stages make them in host
        memory. On the meta device if empty_init is True, or the option materialize is given:
        `shard` then gives the values. Collective.
        """
        with self._device_context(empty_init), self._partitioning(empty_init):
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to the rank's device, unless `shard` is to."""
        waits = any(param.is_meta or has_piece(param) for param in module.parameters())
        if engine_of(module) is None and not waits:
            module.to(self.root_device)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        """Shard the model with its one optimizer. Collective."""
        if len(optimizers) != 1:
            raise ValueError(
                f"setup: got {len(optimizers)} optimizers; expected one for a model (it may have "
                f"groups)"
            )
        sharded = self._shard(module, optimizers[0], self.precision.precision)
        self._trained.append(module)
        return module, [sharded], scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a model that only runs forward. Collective."""
        self._shard(module, None, self.precision.precision)
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Refuse an optimizer without its model."""
        raise ValueError(
            "setup_optimizers: got an optimizer alone; expected fabric.setup(model, optimizer)"
        )

    def backward(
        self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run backward, with float16 on the scaled loss of `module` or of the only model."""
        scales = self.precision.precision in ("16-mixed", "16-true")
        if module is None and len(self._trained) > 1 and scales:
            raise ValueError(
                f"backward: {len(self._trained)} models use loss scales; expected "
                "fabric.backward(loss, model=model)"
            )
        super().backward(tensor, module or next(iter(self._trained), None), *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip to the global norm and return it. Collective."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Refuse clipping by value."""
        raise ValueError(
            f"clip_gradients: clip_val is {clip_val}; expected max_norm= (or "
            "torch.nn.utils.clip_grad_value_)"
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: Mapping[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save the sharded model, its optimizer and plain data: a directory, or by rank 0 one
        file. Collective.
        """
        if not self._saves_shards:
            super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)
            return
        if filter:
            raise TypeError(
                "save: filter was given; expected None, or save_distributed_checkpoint=False"
            )
        model, optimizer, rest = _parts("save", state)
        folder = self._directory_of(path, storage_options)
        content = {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in rest.items()
        }
        client = {_CLIENT: {"kind": "Fabric", "content": content}}
        save(
            folder.parent, model, optimizer, tag=folder.name, client_state=client, save_latest=False
        )

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a directory or a file into `state`, in place; returns what was not asked for.
        Collective.
        """
        if not is_directory_of_shards(self, path):
            unused: dict[str, Any] = super().load_checkpoint(
                path, state, strict=strict, weights_only=weights_only
            )
            return unused
        if not isinstance(state, dict):
            raise TypeError(
                f'load: state is a {type(state).__name__}; expected {{"model": model, ...}} for a '
                f"directory of shards"
            )
        model, optimizer, rest = _parts("load", state)
        loaded = load(path, model, optimizer, strict=strict)
        content = unpacked("Fabric", loaded.path, loaded.client_state)
        for key, value in rest.items():
            if key not in content and strict:
                raise KeyError(
                    f"load: {loaded.path} does not contain {key!r}; expected one of "
                    f"{', '.join(content)}, or strict=False"
                )
            if key not in content:
                continue
            saved = content.pop(key)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            else:
                state[key] = saved
        return content


def _parts(op: str, state: Mapping[str, Any]) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return the sharded model in `state`, its optimizer or None, and the rest."""
    models = {
        key: value
        for key, value in state.items()
        if isinstance(value, nn.Module) and engine_of(value) is not None
    }
    if len(models) != 1:
        raise ValueError(
            f"{op}: state contains {len(models)} models of fabric.setup; expected one per "
            "checkpoint"
        )
    ((name, model),) = models.items()
    optimizers = [
        key for key, value in state.items() if getattr(value, "_engine", None) is engine_of(model)
    ]
    rest = {key: value for key, value in state.items() if key != name and key not in optimizers}
    return model, state[optimizers[0]] if optimizers else None, rest


# --- the classes, for each package ----------------------------------------------------------------


@dataclass(frozen=True)
class Classes:
    """The strategies for one of the packages: for its Trainer and for its Fabric."""

    trainer: Any
    fabric: Any


def _make(package: str, fabric: str) -> Classes:
    """Make the classes for a package (`lightning.pytorch` or `pytorch_lightning`) and its
    Fabric, and register them.
    """

    def join(name: str, mixin: type, base: type, **attributes: Any) -> Any:
        return type(
            name, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__, **attributes}
        )

    def precisions(mixin: type, plugins: Any) -> dict[type, Any]:
        bases = (plugins.Precision, plugins.MixedPrecision, plugins.HalfPrecision)
        return {base: join(f"Shardcore{base.__name__}", mixin, base) for base in bases}

    plugins = import_module(f"{package}.plugins")
    strategies = import_module(f"{package}.strategies")
    callbacks = import_module(f"{package}.callbacks")
    fabric_plugins = import_module(f"{fabric}.plugins")
    fabric_strategies = import_module(f"{fabric}.strategies")
    trainer = join(
        "ShardcoreStrategy",
        _TrainerStrategy,
        strategies.DDPStrategy,
        _precisions=precisions(_TrainerPrecision, plugins),
        _averages=(callbacks.StochasticWeightAveraging, callbacks.WeightAveraging),
        _plain_io=fabric_plugins.TorchCheckpointIO,
    )
    fabric_strategy = join(
        "ShardcoreFabricStrategy",
        _FabricStrategy,
        fabric_strategies.DDPStrategy,
        _precisions=precisions(_FabricPrecision, fabric_plugins),
        _plain_io=fabric_plugins.TorchCheckpointIO,
    )
    for name, options in STRATEGIES.items():
        about = f"shardcore.shard with {options or 'its defaults'}"
        strategies.StrategyRegistry.register(name, trainer, description=about, **options)
        fabric_strategies.STRATEGY_REGISTRY.register(
            name, fabric_strategy, description=about, **options
        )
    return Classes(trainer, fabric_strategy)


def _installed() -> Iterator[tuple[str, Classes]]:
    """Make the classes for each package that is installed; ModuleNotFoundError if none is."""
    absent = []
    for name, package, fabric in (
        ("lightning", "lightning.pytorch", "lightning.fabric"),
        ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
    ):
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            absent.append(name)
        else:
            yield name, _make(package, fabric)
    if len(absent) == 2:
        raise ModuleNotFoundError(
            "shardcore.integrations.lightning: expected lightning or pytorch_lightning to be "
            "installed"
        )


PACKAGES = dict(_installed())
_first = next(iter(PACKAGES.values()))
ShardcoreStrategy, ShardcoreFabricStrategy = _first.trainer, _first.fabric
