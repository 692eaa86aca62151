"""Accelerate on shardcore: an Accelerator whose prepare() shards models in place of wrapping them.

Invariants: a prepared model is the same object, with no wrapper; all arithmetic is that of `shard`.
What Accelerate does beside models and optimizers (data loaders, schedulers, trackers, random
states, gathering of metrics) stays Accelerate's.

Private names of Accelerate: its lists of prepared objects (`_models`, `_optimizers`) and the flag
`_is_accelerate_prepared`. Tested with accelerate 1.15.0.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs, DistributedType, GradScalerKwargs, TorchDynamoPlugin
from torch import nn

from shardcore.api import no_sync, shard_and_log
from shardcore.checkpoint.consolidate import MAX_SHARD_BYTES, whole_state_dict, write_model
from shardcore.checkpoint.directory import LATEST
from shardcore.checkpoint.format import with_extra_state
from shardcore.checkpoint.load import load
from shardcore.checkpoint.materialize import required
from shardcore.checkpoint.save import save
from shardcore.checkpoint.save_pretrained import first_names, save_weights
from shardcore.deepspeed.trl import stream_to_vllm
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.pieces import has_piece
from shardcore.extras.generation import generate_together
from shardcore.optim import clip_grad_norm_
from shardcore.optim.interface import engine_of
from shardcore.options import GROUPS, OPTIONS, check_names, dtype_name

# in a folder of save_state: the sharded checkpoint; of further models with _1, _2
_FOLDER = "shardcore"
_PLUGINS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
)
_ENVIRONMENT = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")
_WITHOUT_OPTIMIZER = (
    "stage",
    "units",
    "precision",
    "keep_fp32",
    "cast_inputs",
    "broadcast",
    "process_group",
    "materialize",
    "compile",
)


class ShardcoreAccelerator(Accelerator):
    """An accelerate.Accelerator over sharded models. See shardcore.shard.

    shard_options: keyword arguments of `shard`. Default of accumulate: gradient_accumulation_steps.
        A model on the meta device (init_empty_weights) requires materialize: a folder for
        pretrained weights, or None to initialize at random.
        precision follows mixed_precision: weights use this dtype with float32 masters, in place of
        autocast. compile follows dynamo_backend or dynamo_plugin: each unit is compiled.

    Accelerate's own arguments are supported by name. Arguments for DistributedDataParallel have no
    effect.

    Raises ValueError for plugins of other engines, and for arguments without effect:
    GradScalerKwargs, AutocastKwargs.
    """

    def __init__(
        self,
        *,
        shard_options: Mapping[str, Any] | None = None,
        mixed_precision: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Make an accelerator; see the class."""
        if mixed_precision is None:
            mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        precision = str(mixed_precision)
        check_names("shard_options", shard_options or {}, (*OPTIONS, *GROUPS))
        _check_arguments(precision, kwargs)
        self._compile = _compile_of(kwargs, shard_options or {})
        super().__init__(mixed_precision="no", **kwargs)
        if self.distributed_type in (
            DistributedType.DEEPSPEED,
            DistributedType.FSDP,
            DistributedType.MEGATRON_LM,
        ):
            raise ValueError(
                f"ShardcoreAccelerator: this process began with {self.distributed_type.value}; "
                "expected an Accelerator without a plugin (AcceleratorState._reset_state() "
                "forgets it)"
            )
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        # as on machines without a GPU: each rank would train on all of the data
        if ranks != self.num_processes:
            raise ValueError(
                f"ShardcoreAccelerator: the launcher started {ranks} ranks, but Accelerate counts "
                f"{self.num_processes}; expected the same number (cpu=True without a GPU)"
            )
        self._precision = precision
        self.shard_options = dict(shard_options or {})
        self._streams_state = False
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)

    @property
    def mixed_precision(self) -> str:
        """The requested dtype. Weights use it, without autocast."""
        return self._precision

    # --- preparing --------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Shard the models among `args`, each with the optimizer of its parameters, and prepare the
        rest. Collective.

        Returns them in order. A model without an optimizer in the same call only runs forward from
        then on. torch's Adam and AdamW are replaced, as by `shard`; schedulers made before go on to
        drive the new one.
        """
        objects = list(args)
        models = [index for index, thing in enumerate(objects) if isinstance(thing, nn.Module)]
        optimizers = [
            index for index, thing in enumerate(objects) if isinstance(thing, torch.optim.Optimizer)
        ]
        for index in models:
            if engine_of(objects[index]) is None:
                params = set(objects[index].parameters())
                of_model = [
                    other
                    for other in optimizers
                    if not params.isdisjoint(_params_of(objects[other]))
                ]
                if len(of_model) > 1:
                    raise ValueError(
                        f"prepare: the model args[{index}] has {len(of_model)} optimizers; "
                        f"expected one for all of it"
                    )
                objects[index], new = self._shard(
                    objects[index], objects[of_model[0]] if of_model else None
                )
                if of_model:
                    objects[of_model[0]] = new
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model that only runs forward. Return a model unchanged if prepare() sharded it.
        Collective.
        """
        if engine_of(model) is None:
            model, _ = self._shard(model, None)
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap the optimizer of a sharded model, so that it acts only where gradients are
        complete.
        """
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            if getattr(optimizer, "_engine", None) is None:
                params = [p for group in optimizer.param_groups for p in group["params"]]
                if not any(param.requires_grad for param in params):
                    raise ValueError(
                        "prepare: no parameter requires a gradient. Call requires_grad_(True) for "
                        "the parameters to train, or add adapters"
                    )
                raise ValueError(
                    f"prepare: no parameter of the {type(optimizer).__name__} is in a model of "
                    "this call; expected prepare(model, optimizer), the two together, before the "
                    "model is sharded"
                )
            optimizer = _Optimizer(optimizer, device_placement=False)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def _shard(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        stream_to_vllm()  # of TRL's trainers
        options = dict(self.shard_options)
        # a model of init_empty_weights may be a pretrained one: no random weights in silence
        options.setdefault("materialize", required)
        check_model(model)
        options.setdefault("compile", self._compile)
        precision = None if self._precision == "no" else self._precision
        chosen = dtype_name(options.setdefault("precision", precision))
        if precision is not None and chosen != precision:
            raise ValueError(
                f"prepare: shard_options sets precision={chosen!r} with "
                f"mixed_precision={precision!r}; expected one of them"
            )
        if optimizer is None:
            forward = {name: value for name, value in options.items() if name in _WITHOUT_OPTIMIZER}
            sharded = shard_and_log(model, None, **forward)
            generate_together(model, engine_behind("prepare", model))
            return sharded
        options.setdefault("accumulate", self.gradient_accumulation_steps)
        if self.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            options.setdefault("sync_each", True)
        sharded = shard_and_log(model, optimizer, **options)
        generate_together(model, engine_behind("prepare", model))
        prepared = [each.optimizer for each in self._optimizers]
        if sum(map(_scales, [*prepared, sharded[1]])) > 1:
            raise ValueError(
                "prepare: two models use float16 weights, each with its own loss scale, and "
                'backward(loss) scales one loss; expected "bf16", or one ShardcoreAccelerator for '
                "each model"
            )
        return sharded

    # --- training ---------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Divide the loss by gradient_accumulation_steps and run backward, with fp16 on the
        scaled loss. Collective.
        """
        loss = loss / self.gradient_accumulation_steps
        for each in self._optimizers:
            if _scales(each.optimizer):
                loss = each.optimizer.scale_loss(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Add gradients locally inside the context; nothing to do if `accumulate` says when they
        are reduced.
        """
        engine = engine_of(model)
        if isinstance(engine, Engine) and engine.reducer.policy.accumulate == 1:
            with no_sync(model):
                yield
        else:
            yield

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip by the global norm over all ranks, and return it. Collective. See
        shardcore.clip_grad_norm_.

        shard_options={"clip_grad_norm": ...} clips within the step, without a pass over the
        gradients.
        """
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        return clip_grad_norm_(listed, max_norm, norm_type)

    # --- saving -----------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return the full state dict on the main process, in the dtypes of training. Return {} on
        other processes. Collective.
        """
        engine = engine_of(model)
        if engine is None:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        if self._streams_state:
            return {}
        return whole_state_dict(engine_behind("get_state_dict", model))

    def save_model(
        self,
        model: nn.Module,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the full weights, in the dtypes of training, as .safetensors files of at most
        `max_shard_size`. Ranks write different files at the same time, unit by unit. Collective.

        With safe_serialization=False the main process holds all weights, and writes pickles.
        """
        if engine_of(model) is None or not safe_serialization or with_extra_state(model):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        save_weights(engine_behind("save_model", model), Path(save_directory), max_shard_size)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Save all prepared objects: the full weights of each model, and a sharded checkpoint with
        its optimizer. Collective.
        """
        if self.project_configuration.save_on_each_node:
            raise ValueError(
                "save_state: save_on_each_node is True; expected False (each rank writes its "
                "shards to one folder)"
            )
        # then _save_sharded writes the weights in place of Accelerate, which needs all at once
        self._streams_state = safe_serialization and not any(
            engine_of(model) is None or with_extra_state(model) for model in self._models
        )
        with self._keeping_optimizers():
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load a folder of save_state, of any number of ranks and stage, or of a plain Accelerator.
        Collective.
        """
        with self._keeping_optimizers():
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextmanager
    def _keeping_optimizers(self) -> Iterator[None]:
        """Bring back what the hooks below hide from Accelerate."""
        before = list(self._optimizers)
        try:
            yield
        finally:
            self._optimizers[:] = before
            self._streams_state = False

    def _save_sharded(self, models: list[Any], weights: list[Any], output_dir: Any) -> None:
        if self._streams_state:
            weights.clear()
            for index, model in enumerate(models):
                engine = engine_behind("save_state", model)
                stem = f"model_{index}" if index else "model"
                path = Path(output_dir) / f"{stem}.safetensors"
                write_model("save_state", engine, path, first_names(engine), MAX_SHARD_BYTES)
        for index, (model, optimizer) in enumerate(self._pairs()):
            save(
                _folder(output_dir, index),
                model,
                optimizer,
                tag="state",
                exclude_frozen_parameters=has_adapters(model),
            )
        self._optimizers.clear()  # Accelerate would save whole states

    def _load_sharded(self, models: list[Any], input_dir: Any) -> None:
        if not (_folder(input_dir, 0) / LATEST).exists():
            return
        for index, (model, optimizer) in enumerate(self._pairs()):
            load(_folder(input_dir, index), model, optimizer)
        models.clear()  # Accelerate would load the rounded weights
        self._optimizers.clear()

    def _pairs(self) -> Iterator[tuple[nn.Module, Any]]:
        of = {each.optimizer._engine: each.optimizer for each in self._optimizers}
        for model in self._models:
            if engine_of(model) is not None:
                yield model, of.get(engine_of(model))


class _Optimizer(AcceleratedOptimizer):
    """Accelerate's wrapper, which leaves calls out between micro-steps; whether a step was
    skipped is the engine's to say.
    """

    def __init__(self, optimizer: Any, device_placement: bool) -> None:
        super().__init__(optimizer, device_placement=device_placement)
        self._skipped_before = 0

    def step(self, closure: Any = None) -> None:
        if self.gradient_state.sync_gradients:
            self._skipped_before = self.optimizer.skipped_steps
        super().step(closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step found gradients that are not finite. Waits for it."""
        return bool(self.optimizer.skipped_steps > self._skipped_before)


def _check_arguments(precision: str, kwargs: Mapping[str, Any]) -> None:
    if precision not in ("no", "bf16", "fp16"):
        raise ValueError(
            f'ShardcoreAccelerator: mixed_precision is {precision!r}; expected "no", "bf16" or '
            f'"fp16"'
        )
    for name in _PLUGINS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"ShardcoreAccelerator: {name} is given; expected None (shard_options sets how "
                "models are sharded)"
            )
    for name in _ENVIRONMENT:
        if os.environ.get(name, "false").lower() == "true":
            raise ValueError(
                f"ShardcoreAccelerator: the environment sets {name}=true; expected a launcher "
                "without that plugin (torchrun, or accelerate launch --multi_gpu)"
            )
    for handler in kwargs.get("kwargs_handlers") or ():
        if isinstance(handler, GradScalerKwargs | AutocastKwargs):
            raise ValueError(
                f"ShardcoreAccelerator: kwargs_handlers has {type(handler).__name__}; expected "
                f"none: there is no autocast "
                '(shard_options={"precision": ..., "loss_scale": ...})'
            )


def _compile_of(
    kwargs: Mapping[str, Any], shard_options: Mapping[str, Any]
) -> dict[str, Any] | bool:
    """Return the option compile of `shard` for Accelerate's arguments, or for the environment of
    accelerate launch. False if neither names a backend.
    """
    plugin = kwargs.get("dynamo_plugin") or TorchDynamoPlugin(backend=kwargs.get("dynamo_backend"))
    if plugin.backend.value == "NO":
        return False
    if "compile" in shard_options:
        raise ValueError(
            f"ShardcoreAccelerator: the dynamo backend is {plugin.backend.value.lower()}, and "
            f"shard_options has compile={shard_options['compile']!r}. Use one of them"
        )
    arguments: dict[str, Any] = plugin.to_kwargs()
    return arguments


def check_model(model: nn.Module) -> None:
    """Raise ValueError for weights that the real DeepSpeed has partitioned."""
    for name, param in model.named_parameters():
        if hasattr(param, "ds_id") and not has_piece(param):
            raise ValueError(
                f"shard: {name} was made under deepspeed.zero.Init, as from_pretrained does after "
                "TrainingArguments(deepspeed=...) with stage 3; expected an ordinary parameter "
                "(make the model first, or use "
                "shardcore.integrations.transformers.ShardcoreTrainingArguments)"
            )


def _params_of(optimizer: Any) -> Iterable[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _scales(optimizer: Any) -> bool:
    """Whether this sharded optimizer's losses are scaled."""
    return bool(optimizer._engine.scaler.active)


def has_adapters(model: nn.Module) -> bool:
    """Whether this is a model of PEFT, of which the adapters alone are saved."""
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


def _folder(directory: Any, index: int) -> Path:
    return Path(directory) / (f"{_FOLDER}_{index}" if index else _FOLDER)
