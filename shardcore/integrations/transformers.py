"""Transformers' Trainer, and TRL's trainers, on shardcore: `class T(ShardcoreTrainerMixin,
SFTTrainer)`.

Invariants: Trainer's loop, data order, logs and files stay; the model is sharded where Trainer
would wrap it. What a DeepSpeed configuration says goes through shardcore.deepspeed, and no part of
DeepSpeed is imported or needed.

Private names of Trainer: `_save`, `_save_optimizer_and_scheduler`, `_load_from_checkpoint`,
`_load_optimizer_and_scheduler`, `_load_best_model`, `_clip_grad_norm`, `_get_grad_norm`,
`_maybe_log_save_evaluate`, `_build_accelerator_args`; of its arguments `_setup_devices` and
`_n_gpu`. transformers has them all since 5.3. Tested with 5.24.0 and TRL 1.16.0.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from shardcore.checkpoint.consolidate import as_trained, on_first_rank, state_dict_of
from shardcore.checkpoint.directory import LATEST
from shardcore.checkpoint.load import load
from shardcore.checkpoint.pretrained import load_into_pieces
from shardcore.checkpoint.save import save
from shardcore.checkpoint.save_pretrained import (
    can_stream,
    save_adapters,
    save_pretrained,
    saves_adapters,
)
from shardcore.deepspeed.auto import resolve, sizes_by
from shardcore.deepspeed.config import Config, read_config, read_json, shard_options
from shardcore.deepspeed.initialize import check_model, configured_optimizer
from shardcore.deepspeed.leaf_modules import mark_configured
from shardcore.deepspeed.lr_schedules import make as make_scheduler
from shardcore.deepspeed.zero_init import gathered_parameters
from shardcore.engine.engine import Engine
from shardcore.engine.pieces import hide, partitioned_params, show
from shardcore.integrations.accelerate import ShardcoreAccelerator, has_adapters
from shardcore.integrations.zero3 import Zero3Loading, has_stage_3
from shardcore.optim import Muon
from shardcore.optim.interface import engine_of
from shardcore.options import accept_optimizer

logger = logging.getLogger("shardcore")

if Version(transformers.__version__) < Version("5.3"):
    raise ImportError(
        f"shardcore.integrations.transformers: transformers is {transformers.__version__}; "
        f"expected 5.3 or newer"
    )
# newer save_model calls _save on every rank
_SAVES_ON_FIRST_RANK = Version(transformers.__version__) < Version("5.23")

# Of a configuration, what the engine that initialize returns does.
_OF_THE_ENGINE = (
    "autocast dataloader_drop_last wall_clock_breakdown memory_breakdown dump_state comms_logger "
    "flops_profiler tensorboard csv_monitor wandb cpu_checkpointing log_level"
)

_OP = "ShardcoreTrainer"
# options of shard
_OF_ARGUMENTS = {"accumulate": "gradient_accumulation_steps", "clip_grad_norm": "max_grad_norm"}


# of mixins: what else they have is that of the classes that they are mixed into
_Base: Any = object


class ShardcoreArgumentsMixin(_Base):
    """Accepts `deepspeed=` in training arguments without DeepSpeed: `class
    C(ShardcoreArgumentsMixin, SFTConfig)`.

    A ShardcoreTrainerMixin reads the configuration.

    With stage 3 and several ranks, from_pretrained and from_config partition weights, as under
    zero.Init: from here until a trainer with these arguments shards its model, or as long as the
    arguments exist. For this time `import deepspeed` imports shardcore, also where DeepSpeed is
    installed. Both functions are collective.
    """

    deepspeed: Any

    def __post_init__(self) -> None:
        """Let transformers check everything but `deepspeed`."""
        config, self.deepspeed = self.deepspeed, None
        super().__post_init__()
        text = isinstance(config, str) and config.lstrip().startswith("{")
        self.deepspeed = json.loads(config) if text else config
        # with a single rank there is nothing to partition, and `device_map` remains possible
        in_memory = _in_memory(self.deepspeed)
        if self.world_size > 1 and has_stage_3(in_memory):
            filled = dict(in_memory)
            for name in ("bf16", "fp16"):
                section = in_memory.get(name)
                if isinstance(section, Mapping) and section.get("enabled") == "auto":
                    filled[name] = {**section, "enabled": getattr(self, name)}
            self._zero3_loading = Zero3Loading(filled)


@dataclass
class ShardcoreTrainingArguments(ShardcoreArgumentsMixin, TrainingArguments):
    """transformers.TrainingArguments whose `deepspeed=` (a dict or a file) needs no DeepSpeed."""


class ShardcoreTrainerMixin(_Base):
    """Shards the model of a Trainer, or of a subclass of Trainer. See shardcore.shard.

    shard_options: keyword arguments of `shard`. The training arguments set accumulation, clipping
        and precision. With `bf16` or `fp16` weights use this dtype with float32 masters, in place
        of autocast. With `torch_compile` each unit is compiled.
        A model on the meta device requires materialize: a folder for pretrained weights, or None to
        initialize at random. from_pretrained has made the whole model on each rank by then, unless
        a ShardcoreArgumentsMixin of stage 3 was made before it.

    Alternatively the training arguments contain `deepspeed=`: a DeepSpeed configuration, with
    "auto" resolved from the arguments. With neither, the model trains at stage 2. All other
    arguments are the trainer's.

    Every rank must call `train`, `evaluate`, `predict` and `save_model`. Raises ValueError for both
    kinds of options together, and for training arguments that contradict sharding.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, *args: Any, shard_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Make a trainer; see the class."""
        arguments = (*args, *kwargs.values())
        training_arguments = next(
            (each for each in arguments if isinstance(each, TrainingArguments)), None
        )
        config = None if training_arguments is None else training_arguments.deepspeed
        _check_options(config, shard_options)
        self._given_options = dict(shard_options or {})
        self._config: Mapping[str, Any] | None = _in_memory(config)
        self._settings: Config | None = None
        if training_arguments is not None:
            _leave_deepspeed(training_arguments)
        super().__init__(*args, **kwargs)
        if training_arguments is not None:
            training_arguments.deepspeed = (
                config  # as it was given; the other marks of DeepSpeed are gone
            )
        if self._config is not None and self.model is not None:
            self._apply_config(log=False)  # for its errors

    # --- what is used in place of what ------------------------------------------------------------

    @property
    def place_model_on_device(self) -> bool:
        """False: sharding moves the model."""
        return False

    @place_model_on_device.setter
    def place_model_on_device(self, value: bool) -> None:
        pass  # Trainer decides it in its __init__

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        arguments["mixed_precision"] = "no"
        self._accelerator_args = arguments
        return arguments  # type: ignore[no-any-return]

    def create_accelerator_and_postprocess(self) -> None:
        """Make a ShardcoreAccelerator with the arguments that Trainer would give its
        Accelerator.
        """
        _check_training_arguments(self.args)
        self.args._n_gpu = min(self.args.n_gpu, 1)  # no DataParallel in one process
        super().create_accelerator_and_postprocess()
        precision = "no"
        if self.args.bf16:
            precision = "bf16"
        elif self.args.fp16:
            precision = "fp16"
        options = self._given_options
        if has_stage_3(self._config):
            options = {"stage": 3}  # of a reference model, which TRL prepares before _apply_config
        self.accelerator = ShardcoreAccelerator(
            shard_options=self._options(options),
            **{**self._accelerator_args, "mixed_precision": precision},
        )
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        clip = self.args.max_grad_norm
        accumulate = self.args.gradient_accumulation_steps
        return {
            **options,
            "accumulate": accumulate,
            "clip_grad_norm": clip if clip and clip > 0 else None,
        }

    def _apply_config(self, log: bool = True) -> None:
        """Resolve "auto" in the DeepSpeed configuration, check it, and let it say how models are
        sharded.
        """
        assert self._config is not None
        steps = max(self.state.max_steps or 0, self.args.max_steps, 1)
        resolved, lines = resolve(self._config, values_of(self.args, self.model, steps))
        settings = read_config(resolved)
        settings.batch_sizes(self.args.world_size)
        check_model(self.model, settings)
        if settings.autotp_size > 1:
            raise NotImplementedError(
                f"{_OP}: config tensor_parallel.autotp_size is {settings.autotp_size}; expected "
                f"1, or Trainer itself under shardcore run --as-deepspeed"
            )
        if settings.optimizer is not None and self.optimizer is not None and self._engine is None:
            raise ValueError(
                f"{_OP}: optimizers is given, and the configuration names an optimizer; expected "
                "one of them"
            )
        if log and self.args.process_index == 0:
            if lines:
                logger.warning("%s: %s", _OP, "; ".join(lines))
            for line in settings.accepted:
                logger.warning("%s: config is ignored here: %s", _OP, line)
            unused = [name for name in _OF_THE_ENGINE.split() if getattr(settings, name)]
            if unused:
                logger.warning(
                    "%s: config is ignored under Trainer: %s; use Trainer's own arguments",
                    _OP,
                    ", ".join(unused),
                )
        mark_configured(self.model, settings, log=log and self.args.process_index == 0)
        self._settings = settings
        muon = settings.optimizer_type is Muon or isinstance(self.optimizer, Muon)
        self.accelerator.shard_options = self._options(shard_options(settings, muon))

    # --- training ---------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine | None:
        """The engine of the model, once it is sharded."""
        engine = engine_of(self.model)
        return engine if isinstance(engine, Engine) else None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make Trainer's optimizer, or the one that the DeepSpeed configuration has, ready to be
        sharded.
        """
        self._end_zero3_loading()
        partitioned = show(partitioned_params(self.model))  # optimizers may read shapes
        try:
            if self._engine is None and self._config is not None:
                self._apply_config()
                if self._settings is not None and self.optimizer is None:
                    self.optimizer = self._configured_optimizer(self._settings)
            by_trainer = self.optimizer is None
            if by_trainer:
                _check_optim(self.args)
            super().create_optimizer(*args, **kwargs)
            if by_trainer:
                # nobody else has it yet, so nothing is to be replaced
                self.optimizer = accept_optimizer(self.optimizer)
        finally:
            hide(partitioned)
        return self.optimizer

    def _configured_optimizer(self, settings: Config) -> torch.optim.Optimizer | None:
        if settings.optimizer is None:
            return None
        params = [param for param in self.model.parameters() if param.requires_grad]
        return configured_optimizer(self.model, params, settings)

    def _end_zero3_loading(self) -> None:
        """Let from_pretrained make ordinary models again, also on one rank alone."""
        self.args.__dict__.pop("_zero3_loading", None)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the scheduler that the DeepSpeed configuration has, or Trainer's."""
        configured = None if self._settings is None else self._settings.scheduler
        if configured is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        if optimizer is None:
            optimizer = self.optimizer
        self.lr_scheduler = make_scheduler(*configured, optimizer)
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """The step clips."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Known after the step."""

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        logs = self._engine is not None and self.control.should_log
        # waits for it
        norm = self._engine.last_grad_norm if logs and self._engine is not None else None
        super()._maybe_log_save_evaluate(tr_loss, norm, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; before training, with the model sharded as for training."""
        trains = getattr(self, "train_dataset", None) is not None
        if self._engine is None and trains:
            self.create_optimizer()
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
        elif self._engine is None and self._config is not None:
            self._end_zero3_loading()
            self._apply_config()
        return super().evaluation_loop(*args, **kwargs)

    # --- saving and loading -----------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save full weights, for from_pretrained, and the other files of Trainer. Collective."""
        super().save_model(output_dir, _internal_call)
        if _SAVES_ON_FIRST_RANK and self._engine is not None and not self.args.should_save:
            self._save(output_dir)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        engine = self._engine
        if engine is None or state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        if can_stream(self.model):
            save_rest = partial(super()._save, output_dir, state_dict={})
            save_pretrained(engine, Path(output_dir or self.args.output_dir), save_rest)
            return
        write = partial(super()._save, output_dir)
        if saves_adapters(self.model) and save_adapters(engine, lambda st: write(state_dict=st)):
            return
        tensors = as_trained(engine, exclude_frozen=has_adapters(self.model))

        def on_first(values: Any) -> list[Path]:
            write(state_dict=state_dict_of(engine, tensors, values))
            return []

        on_first_rank("save_model", engine, tensors, on_first)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        # In place of optimizer.pt, beside what Trainer writes: it resumes on any number of ranks.
        save(
            output_dir,
            self.model,
            _unwrapped_optimizer(self.optimizer),
            tag=f"global_step{self.state.global_step}",
            scheduler=self.lr_scheduler,
            exclude_frozen_parameters=has_adapters(self.model),
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if _is_sharded(resume_from_checkpoint) or load_into_pieces(
            "resume_from_checkpoint", self.model, resume_from_checkpoint
        ):
            return
        pieces = partitioned_params(self.model)  # Trainer fills full weights
        with gathered_parameters(pieces, modifier_rank=0):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and _is_sharded(checkpoint):
            load(
                checkpoint,
                self.model,
                _unwrapped_optimizer(self.optimizer),
                scheduler=self.lr_scheduler,
            )
        else:
            # Of a plain Trainer's folder: by state dicts, which a sharded optimizer accepts.
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self._engine is not None and _is_sharded(best):
            logger.info("%s: the best model is that of %s (%s)", _OP, best, self.state.best_metric)
            load(best, self.model)
        else:
            super()._load_best_model()


class ShardcoreTrainer(ShardcoreTrainerMixin, Trainer):
    """transformers.Trainer over a sharded model: see ShardcoreTrainerMixin."""


def values_of(args: TrainingArguments, model: Any, num_training_steps: int) -> dict[str, object]:
    """Return what "auto" stands for in a DeepSpeed configuration, by dotted path, as Hugging
    Face's Trainer has it.
    """
    config = getattr(model, "config", None)
    sizes = [
        getattr(part, "hidden_size", None) or max(getattr(part, "hidden_sizes", None) or [0])
        for part in (config, getattr(config, "text_config", None))
    ]
    hidden_size = next(filter(None, sizes), None)
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": args.world_size * micro * accumulation,
        "gradient_clipping": args.max_grad_norm,
        "bf16.enabled": args.bf16 or args.bf16_full_eval,
        "fp16.enabled": args.fp16 or args.fp16_full_eval,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "scheduler.params.warmup_num_steps": max(1, args.get_warmup_steps(num_training_steps)),
        "scheduler.params.total_num_steps": num_training_steps,
        **({} if hidden_size is None else sizes_by(hidden_size)),
    }


def _in_memory(config: Any) -> Any:
    """Return a DeepSpeed configuration, read from its file if it is a path."""
    return read_json(config) if isinstance(config, str | os.PathLike) else config


def _unwrapped_optimizer(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _is_sharded(folder: str) -> bool:
    """Whether a checkpoint of shardcore.save is in a folder of Trainer's."""
    return (Path(folder) / LATEST).exists()


def _check_options(config: Any, options: Mapping[str, Any] | None) -> None:
    if config is not None and options is not None:
        raise ValueError(
            f"{_OP}: shard_options is given, and the training arguments set deepspeed; expected "
            "one of them"
        )
    for name, argument in _OF_ARGUMENTS.items():
        if name in (options or {}):
            raise ValueError(
                f"{_OP}: shard_options has {name}; expected it as {argument} of the training "
                f"arguments"
            )


def _check_training_arguments(args: TrainingArguments) -> None:
    refused = {
        "fsdp": "sharding is shardcore's",
        "auto_find_batch_size": "ranks would run out of memory at different times, and wait for "
        "each other",
        "save_on_each_node": "each rank writes its shards to one folder",
        "fp16_full_eval": "weights are in the dtype that they train in: use fp16",
        "bf16_full_eval": "weights are in the dtype that they train in: use bf16",
    }
    for name, why in refused.items():
        if getattr(args, name, None):
            raise ValueError(
                f"{_OP}: the training arguments set {name}={getattr(args, name)!r}; expected none "
                f"({why})"
            )


def _check_optim(args: TrainingArguments) -> None:
    """Raise ValueError for low-bit and paged optimizers, before their packages are imported."""
    name = str(getattr(args.optim, "value", args.optim))
    if any(part in name for part in ("8bit", "4bit", "paged", "bnb")):
        raise ValueError(
            f'{_OP}: the training arguments set optim="{name}", whose states cannot be sharded. '
            "Pass optimizers=(shardcore.FusedAdam(model.parameters(), "
            'state_dtype="8bit"), None) to the trainer'
        )


def _leave_deepspeed(args: TrainingArguments) -> None:
    """Take the configuration out of training arguments, and undo what transformers and
    Accelerate have made of it.
    """
    args.deepspeed = None
    if getattr(args, "deepspeed_plugin", None) is not None:
        args.deepspeed_plugin = args.hf_deepspeed_config = None
        unset_hf_deepspeed_config()
        vars(args).pop("_setup_devices", None)
        _ = args.device  # begins Accelerate's state anew, over the process group that there is
