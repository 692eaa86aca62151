"""The engine object of a DeepSpeed-style loop: engine(x), engine.backward(loss), engine.step()."""

import logging
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from shardcore.checkpoint.consolidate import (
    MAX_SHARD_BYTES,
    as_trained,
    on_first_rank,
    state_dict_of,
    whole_state_dict,
    write_model,
)
from shardcore.checkpoint.directory import LATEST, replacing
from shardcore.checkpoint.format import named_parameters
from shardcore.checkpoint.load import LoadOptions, has_checkpoint, load_from, open_together
from shardcore.checkpoint.save import Content, finish_saving, write_checkpoint
from shardcore.checkpoint.source import Source
from shardcore.deepspeed.checks import check_loss, refuse_deepcompile
from shardcore.deepspeed.config import ZERO, BatchSizes, Config
from shardcore.deepspeed.loaders import ShardedLoader
from shardcore.deepspeed.monitor import MonitorMaster, step_events
from shardcore.deepspeed.step_report import StepReport
from shardcore.distributed.everyone import Everyone
from shardcore.engine.agreement import attempt
from shardcore.engine.compiled import compile_together
from shardcore.engine.engine import Engine
from shardcore.optim import ShardableOptimizer
from shardcore.optim.interface import Superseded
from shardcore.options import DTYPES

logger = logging.getLogger("shardcore")


_NO_OPTIMIZER = (
    '{}: there is no optimizer; expected initialize(optimizer=...), or {{"optimizer": {{"type": '
    '"Adam"}}}} in config '
    "(without one a model only runs forward)"
)


def check_folder(op: str, save_dir: Any) -> None:
    """Raise ValueError for None and an empty string, which scripts pass whose argument was not
    given.
    """
    if save_dir is None or not os.fspath(save_dir):
        raise ValueError(f"{op}: save_dir is {save_dir!r}; expected the path of a folder")


_wrappers: "weakref.WeakSet[ForwardEngine]" = weakref.WeakSet()


def supersede(core: Engine) -> None:
    """Let the engines over `core` refuse every call: their model is sharded anew."""
    for engine in [engine for engine in _wrappers if engine._core is core]:
        _wrappers.discard(engine)
        _engines.discard(engine)  # type: ignore[arg-type]
        engine.__dict__.clear()
        engine.__class__ = Superseded  # type: ignore[assignment]


class _Kind(type):
    """The kind of the engines: one that only runs forward counts as a TrainingEngine,
    DeepSpeed's one class, too.
    """

    def __instancecheck__(cls, thing: object) -> bool:
        return super().__instancecheck__(thing) or (
            cls is TrainingEngine and type(thing) is ForwardEngine
        )


class ForwardEngine(metaclass=_Kind):
    """A sharded model that only runs forward, of `initialize` without an optimizer. Other
    attributes are those of `module`.
    """

    optimizer: Any = None
    lr_scheduler: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    sparse_tensor_module_names: frozenset[str] = frozenset()  # gradients of embeddings are dense
    is_compiled = False  # by compile()
    _shuffles = True  # loaders of training data that are made here

    def __init__(
        self,
        module: nn.Module,
        core: Engine,
        config: Config,
        sizes: BatchSizes,
        replicas: tuple[int, int],
        training_dataloader: ShardedLoader | None,
    ) -> None:
        """Wrap what `shard` returned; see initialize. replicas: how many parts data has, and
        which is this rank's.
        """
        self.module, self.training_dataloader = module, training_dataloader
        self._sizes, self._replicas, self._core, self._config = sizes, replicas, core, config
        self.device: torch.device = core.device
        self.global_steps = self.micro_steps = self.global_samples = 0
        self._counted_from = 0  # micro_steps when the count of the accumulation began
        self._skipped_loaded = 0  # skipped steps of the training that a checkpoint goes on with
        # What set_gradient_accumulation_boundary said; of a loop that decides itself when to step,
        # whether step() is running.
        self._is_boundary: bool | None = None if config.managed_gradient_accumulation else False
        _wrappers.add(self)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of `module`."""
        if name == "module":  # not set yet: a copy under construction
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with its hooks. If the configuration enables autocast, run it
        under torch.autocast.
        """
        low = self._config.autocast
        with nullcontext() if low is None else torch.autocast(self.device.type, DTYPES[low]):
            return self.module(*inputs, **kwargs)

    forward = __call__

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Raise ValueError: there is no optimizer."""
        raise ValueError(_NO_OPTIMIZER.format("backward"))

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Raise ValueError: there is no optimizer."""
        raise ValueError(_NO_OPTIMIZER.format("step"))

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next step() updates the weights. With managed_gradient_accumulation
        false, return whether step() is running.
        """
        counted = (self.micro_steps + 1 - self._counted_from) % self._sizes.accumulation == 0
        return counted if self._is_boundary is None else self._is_boundary

    def was_step_applied(self) -> bool:
        """Return False: there was no step."""
        return False

    @property
    def skipped_steps(self) -> int:
        """Return how many steps the training of the loaded checkpoint had skipped."""
        return self._skipped_loaded

    def get_lr(self) -> list[Any]:
        """Return no learning rate."""
        return []

    def get_global_grad_norm(self) -> float | None:
        """Return None: there are no gradients."""
        return None

    def train(self, mode: bool = True) -> Self:
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the module's evaluation mode."""
        return self.train(False)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's batches, made as `initialize` makes the loader of
        training_data.

        batch_size: default train_micro_batch_size_per_gpu.
        route: "train" takes a new order in each epoch. "eval" and "predict" keep the order of the
            dataset.
        data_sampler: replaces both orders.
        collate_fn: default the collate_fn of `initialize`.
        num_local_io_workers: the number of worker processes, default 0.
        """
        options: dict[str, Any] = {
            "batch_size": batch_size or self.train_micro_batch_size_per_gpu(),
            "collate_fn": collate_fn or self.collate_fn,
            "pin_memory": pin_memory and torch.cuda.is_available(),
            "drop_last": self._config.dataloader_drop_last,
            "num_workers": num_local_io_workers or 0,
        }
        if data_sampler is not None:
            return DataLoader(dataset, sampler=data_sampler, **options)
        return ShardedLoader(
            dataset, self._replicas, route == "train" and self._shuffles, **options
        )

    def empty_partition_cache(self) -> None:
        """Free the memory of gathered weights at stage 3. The next forward allocates it again."""
        if self._core.unsharder is not None:
            self._core.unsharder.pool.shrink(0)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the forward of each unit of the model except the root, by torch.compile.
        Collective. See the option compile of shardcore.shard.

        backend, compile_kwargs: arguments of torch.compile.

        Raises NotImplementedError for schedule and compiled_autograd_enabled (DeepCompile), and
        ValueError or TypeError for other bad arguments, on every rank.
        """
        problems: list[BaseException] = []
        attempt(problems, lambda: refuse_deepcompile(schedule, compiled_autograd_enabled))
        arguments = {**(compile_kwargs or {}), "backend": backend}
        compile_together("compile", self._core, arguments, problems)
        self.is_compiled = True

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the full state dict of the model, from the masters. Collective.

        `module.state_dict()` differs below stage 3 without overlap_step: it keeps the dtypes of
        training, and one rank may call it alone. Inside GatheredParameters of all parameters both
        functions behave in this way, at every stage.
        """
        own, self._core.own_weights = self._core.own_weights, False
        try:
            full = self.module.state_dict()
        finally:
            self._core.own_weights = own
        if exclude_frozen_parameters:
            for name, param in named_parameters(self.module):
                if not self._core.trains(param):
                    full.pop(name, None)
        return dict(full)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Return the full state dict on rank 0, on the CPU, in the dtypes that weights train in;
        None elsewhere. Collective.

        Raises ValueError, as DeepSpeed does, if the configuration says that weights are not to be
        gathered, and only then.
        """
        if not self._config.gathers_to_save:
            raise ValueError(
                "_zero3_consolidated_16bit_state_dict: config "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save is "
                "false; expected true"
            )
        try:
            return whole_state_dict(self._core, exclude_frozen_parameters) or None
        # which Trainer would take for the one above, and save something else
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict  # OpenRLHF calls it

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep_last: int | None = None,
        wait: bool = True,
    ) -> bool:
        """Save model, optimizer, scheduler, counters and random states to `save_dir`/`tag`, and
        return True. Collective.

        Without an optimizer the checkpoint holds the model, counters and random states. The epoch
        of the loader of `initialize` is saved, too: after a load, its next iteration is the epoch
        after the started epoch. Save the position within an epoch yourself (client_state), and skip
        to it.

        tag: default "global_step100" after 100 optimizer steps. If ranks pass different tags, all
            ranks use the tag of rank 0, and a warning is logged. checkpoint.tag_validation "Ignore"
            omits the warning, and "Fail" raises ValueError.

        shardcore.save documents the other arguments, errors and the state after a crash. Raises
        ValueError, too, if save_dir is None or empty.
        """
        content = Content(
            states=self.optimizer is not None,
            exclude_frozen=exclude_frozen_parameters,
            scheduler=self.lr_scheduler,
            client_state=client_state,
            counters=self._counters(),
        )
        check_folder("save_checkpoint", save_dir)
        name = self._agree_on_tag(
            "save_checkpoint", f"global_step{self.global_steps}" if tag is None else tag
        )
        write_checkpoint(self._core, Path(save_dir), name, content, save_latest, keep_last, wait)
        return True

    def _counters(self) -> dict[str, int]:
        """Return what a checkpoint has of the loop, by name."""
        return {
            "global_steps": self.global_steps,
            "micro_steps": self.micro_steps,
            "skipped_steps": self.skipped_steps,
            "global_samples": self.global_samples,
        } | ({} if self.training_dataloader is None else {"epoch": self.training_dataloader.epoch})

    def _restore_counters(self, counters: Mapping[str, int], steps: Mapping[Any, int]) -> None:
        """Go on from the counters of a checkpoint; steps: those of its optimizer."""
        self.global_steps = counters.get(
            "global_steps", max(steps.values(), default=self.global_steps)
        )
        micro_steps = counters.get("micro_steps", self.micro_steps)
        if self.managed_gradient_accumulation():  # gradients are not saved
            micro_steps -= micro_steps % self._sizes.accumulation
        self.micro_steps = micro_steps
        self._counted_from = 0
        self.global_samples = counters.get("global_samples", self.global_steps * self._sizes.train)
        self._skipped_loaded = counters.get("skipped_steps", 0)
        if self.training_dataloader is not None and "epoch" in counters:
            self.training_dataloader.set_epoch(counters["epoch"])

    def wait_for_checkpoint(self) -> None:
        """Wait for a save_checkpoint(wait=False), and raise its error. Collective."""
        finish_saving(self._core)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint of save_checkpoint or shardcore.save, of any world size and stage.
        Collective.

        load_module_strict: see shardcore.load.
        load_module_only: load neither states, scheduler nor counters.

        Returns the path of the checkpoint and its client_state. If `load_dir` holds no "latest" and
        no tag is given, it returns (None, {}) and logs a warning. Without an optimizer it loads
        weights and counters only.
        """
        source = self._open_checkpoint(load_dir, tag)
        if source is None:
            return None, {}
        scheduler = self.lr_scheduler
        if load_module_only or not load_lr_scheduler_states:
            scheduler = None
        try:
            if scheduler is not None and source.scheduler is None:
                scheduler = None
                logger.warning(
                    "load_checkpoint: %s contains no state of a scheduler; this scheduler "
                    "continues unchanged",
                    source.path,
                )
            states = load_optimizer_states and not load_module_only and self.optimizer is not None
            options = LoadOptions(load_module_strict, states, scheduler)
            loaded = load_from(source, self._core, options)
        finally:
            source.close()
        if not load_module_only:
            self._restore_counters(source.counters, source.steps)
        if self.optimizer is not None:
            self.zero_grad()
        return str(loaded.path), dict(loaded.client_state)

    def _agree_on_tag(self, op: str, tag: str | None) -> str | None:
        """Return rank 0's tag. Where ranks have others checkpoint.tag_validation decides: Warn
        logs a warning each time, as DeepSpeed does, Fail raises ValueError. Collective.
        """
        ranks = Everyone(self._core.comm, self._core.comm.across)
        tags = ranks.gather_json(None if tag is None else str(tag))
        others = [
            f"{other!r} on rank {rank}" for rank, other in enumerate(tags) if other != tags[0]
        ]
        if others and self._config.tag_validation == "fail":
            raise ValueError(
                f"{op}: tag is {others[0]}; expected {tags[0]!r}, as on rank 0 (config "
                "checkpoint.tag_validation has Fail)"
            )
        if others and ranks.rank == 0 and self._config.tag_validation == "warn":
            logger.warning(
                "%s: tag is %s; every rank uses the tag of rank 0, %r", op, others[0], tags[0]
            )
        agreed: str | None = tags[0]
        return agreed

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights to one file for plain torch, in the dtypes of training, and return True.
        Collective.

        At stage 3 it returns False and saves nothing if stage3_gather_16bit_weights_on_model_save
        is false.

        A name with the ending .safetensors selects this format, which is written unit by unit. Any
        other name selects a file of torch.save; rank 0 then holds all weights in host memory. A
        file of safetensors stores tied weights once.
        """
        if not self._config.gathers_to_save and self._config.stage == 3:
            logger.warning(
                "save_16bit_model: nothing was saved, because "
                "stage3_gather_16bit_weights_on_model_save is false in the configuration"
            )
            return False
        tensors = as_trained(self._core, exclude_frozen_parameters)
        path = Path(save_dir) / save_filename
        if path.suffix == ".safetensors":
            write_model("save_16bit_model", self._core, path, tensors, MAX_SHARD_BYTES)
            return True

        def save(values: Iterator[torch.Tensor]) -> list[Path]:
            state_dict = state_dict_of(self._core, tensors, values)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as unfinished:
                torch.save(state_dict, unfinished)
            return [path]

        on_first_rank("save_16bit_model", self._core, tensors, save)
        return True

    def _open_checkpoint(self, load_dir: str | os.PathLike[str], tag: str | None) -> Source | None:
        """Open a checkpoint; None, with a warning, where there is no "latest" and no tag was
        given. Collective.
        """
        finish_saving(self._core)
        folder, tag = Path(load_dir), self._agree_on_tag("load_checkpoint", tag)
        exists = tag is not None or self._core.comm.rank > 0 or has_checkpoint(folder)
        if not all(self._core.comm.gather_json(exists)):
            logger.warning(
                "load_checkpoint: there is no %s, and no tag was given: nothing was loaded",
                folder / LATEST,
            )
            return None
        return open_together(self._core, folder, tag)

    def destroy(self) -> None:
        """Wait for background work (the model and the optimizer own the memory). Collective."""
        finish_saving(self._core)

    # --- what it says of its configuration and of the ranks ---------------------------------------

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self._config.stage

    def fp16_enabled(self) -> bool:
        """Return whether weights train in float16."""
        return self._config.fp16

    def bfloat16_enabled(self) -> bool:
        """Return whether weights train in bfloat16."""
        return self._config.bf16

    def train_batch_size(self) -> int:
        """Return the samples per optimizer step over all ranks."""
        return self._sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per backward and rank."""
        return self._sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps per optimizer step."""
        return self._sizes.accumulation

    def managed_gradient_accumulation(self) -> bool:
        """Return whether step() counts micro-steps. If not, every step() updates the weights."""
        return self._config.managed_gradient_accumulation

    def gradient_clipping(self) -> float:
        """Return the global norm to clip gradients to, or 0 for none."""
        return self._config.gradient_clipping

    def zero_optimization(self) -> bool:
        """Return whether the ZeRO stage is above 0."""
        return self._config.stage > 0

    def steps_per_print(self) -> int | None:
        """Return the number of steps between two lines of progress, or None for no lines."""
        return self._config.steps_per_print

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the configuration as it was given (the model's own is `module.config`)."""
        return self._config.source

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether the configuration allows gathering weights at stage 3 to save them."""
        return self._config.gathers_to_save

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine (LOCAL_RANK), or 0 without a launcher."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """This rank's number in the world."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def dp_world_size(self) -> int:
        """The number of ranks with different batches."""
        return self._core.comm.world_size

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the training ranks, or None without a group."""
        return self._core.comm.group


_engines: "weakref.WeakSet[TrainingEngine]" = weakref.WeakSet()


def grad_scale_of(core: Engine) -> float:
    """Return what the next step() multiplies the gradients in `core` by: not 1 after a plain
    backward while accumulating.
    """
    return next((engine._grad_scale() for engine in _engines if engine._core is core), 1.0)


class TrainingEngine(ForwardEngine):
    """A sharded model with its optimizer, scheduler and counter of micro-steps. Other attributes
    are the attributes of `module`.

    global_steps: the number of optimizer steps, including skipped steps.
    micro_steps: the number of calls of step().
    global_samples: the number of samples that all ranks trained on.

    `loss.backward()` also works in place of `engine.backward(loss)`, and for one loss over several
    engines. With fp16 call `engine.scale(loss).backward()`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ShardableOptimizer,
        lr_scheduler: Any,
        training_dataloader: ShardedLoader | None,
        config: Config,
        sizes: BatchSizes,
        replicas: tuple[int, int],
        monitor: MonitorMaster,
    ) -> None:
        """Wrap what `shard` returned; see initialize and ForwardEngine."""
        core = optimizer._engine
        assert isinstance(core, Engine)
        super().__init__(module, core, config, sizes, replicas, training_dataloader)
        self.optimizer: ShardableOptimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._skipped_before = optimizer.skipped_steps  # at the last load, or the start
        # how many of the core's backwards, which gave this rank a gradient, there were at the last
        # step()
        self._seen = 0
        self._ran = False  # backward() was called since then
        # how many of them since the last boundary were by engine.backward, this engine's or
        # another's
        self._divided = 0
        self._scaled = 0  # how many times scale() or backward() has scaled a loss since then
        self._stepped = False  # the last step() was at a boundary
        _engines.add(self)
        self._report = StepReport(config, module, core.comm, self.device)
        self.monitor = monitor
        self._loss: torch.Tensor | None = None  # sum of the scaled losses since the last boundary
        self._inside_no_sync = False

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with its hooks. If the configuration enables autocast, run it
        under torch.autocast.
        """
        with self._report.forward(self.global_steps):
            return super().__call__(*inputs, **kwargs)

    forward = __call__

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Divide `loss` (one element) by the accumulation steps, run backward and return the
        divided loss. Collective.

        scale_wrt_gas: False does not divide.

        The result has the dtype of `loss`. With fp16 backward runs on the scaled loss.
        """
        check_loss("backward", loss)
        dtype = loss.dtype
        if scale_wrt_gas and self._sizes.accumulation > 1:
            is_low = dtype in (torch.bfloat16, torch.float16)
            loss = (loss.float() if is_low else loss) / self._sizes.accumulation
        before = {engine: engine._core.reducer.backwards for engine in _engines}
        self.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        for engine, count in before.items():
            engine._divided += engine._core.reducer.backwards - count
        self._ran = True
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        return loss.to(dtype)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` (one element) times the loss scale, to call `backward()` on it. Without
        fp16, return it unchanged.
        """
        check_loss("scale", loss)
        self._scaled += 1
        return self.optimizer.scale_loss(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step. At an accumulation boundary clip, update, zero the gradients and step
        the scheduler. Collective at a boundary.

        lr_kwargs: arguments for lr_scheduler.step.

        With managed_gradient_accumulation false every call is at a boundary, after any number of
        backwards. A step with a non-finite gradient updates nothing on any rank and does not step
        the scheduler. With a scheduler the host therefore waits for the norm. Raises ValueError
        without a backward since the last call.
        """
        if self._inside_no_sync:
            raise ValueError(
                "step: called inside no_sync(); expected it after the block (gradients there are "
                "not reduced)"
            )
        backwards = self._core.reducer.backwards
        if backwards == self._seen and not self._ran:
            raise ValueError(
                "step: there was no backward since the last step(); expected "
                "engine.backward(loss), or loss.backward(), for every micro-step"
            )
        plain = backwards - self._divided
        if self._config.loss_scale is not None and self._scaled < backwards:
            raise ValueError(
                "step: a backward since the last step ran on a loss without the scale, and "
                "float16 needs it; expected engine.backward(loss), or "
                "engine.scale(loss).backward() (call zero_grad() before the next one)"
            )
        self._stepped = (
            not self.managed_gradient_accumulation() or self.is_gradient_accumulation_boundary()
        )
        if self._stepped:
            if plain > 0 and self._divided > 0 and self._sizes.accumulation > 1:
                raise ValueError(
                    f"step: {self._divided} backwards of this step were engine.backward(loss) and "
                    f"divided the loss by the accumulation steps, and {plain} were not; expected "
                    "one kind for all (call zero_grad() before the next one)"
                )
            before, self._is_boundary = self._is_boundary, True
            try:
                self._step_at_boundary(lr_kwargs, self._grad_scale())
            finally:
                self._is_boundary = before
        self.micro_steps += 1
        self._seen, self._ran = self._core.reducer.backwards, False

    def _grad_scale(self) -> float:
        """Return what step() has to multiply the gradients by."""
        # The gradients of a loss's own backward() are divided here: only now it is known that
        # nothing divided the loss.
        if self._core.reducer.backwards > self._divided:
            return 1.0 / self._sizes.accumulation
        return 1.0

    def _step_at_boundary(self, lr_kwargs: Mapping[str, Any] | None, grad_scale: float) -> None:
        managed = self.managed_gradient_accumulation()
        micro_batches = self._sizes.accumulation if managed else self._core.reducer.backwards
        if not self._config.ignore_unused_parameters:
            self._refuse_unused()
        before = None if self.lr_scheduler is None else self.optimizer.skipped_steps
        self.optimizer.step(grad_scale=None if grad_scale == 1.0 else grad_scale)
        loss = self._loss
        self.zero_grad()
        self.global_steps += 1
        self.global_samples += self._sizes.train // self._sizes.accumulation * micro_batches
        if before is not None and self.optimizer.skipped_steps == before:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        every = self._config.steps_per_print
        if self.global_rank == 0 and every is not None and self.global_steps % every == 0:
            loss_text = "unknown" if loss is None else f"{loss.item():.6g}"  # waits for the device
            scale = f" loss_scale={self.optimizer.loss_scale:g}" if self._config.fp16 else ""
            print(
                f"step={self.global_steps} skipped={self.skipped_steps} lr={self.get_lr()} "
                f"loss={loss_text}{scale}",
                flush=True,
            )
        self._report.end_step(self.global_steps, every)
        if self.monitor.enabled and self.global_rank == 0:
            loss_scale = self.optimizer.loss_scale if self._config.fp16 else None
            events = step_events(
                self.global_samples, train_loss=loss, lr=self.get_lr()[0], loss_scale=loss_scale
            )
            self.monitor.write_events(events)

    def _refuse_unused(self) -> None:
        """Raise ValueError, on every rank, where no rank has a gradient of a parameter that the
        optimizer updates.
        """
        self.allreduce_gradients()
        unused = [
            managed.name
            for bucket in self._core.buckets
            if bucket.trainable and bucket.group is not None
            for managed in bucket.params
            if not managed.has_grad
        ]
        if unused:
            raise ValueError(
                f"step: no rank computed a gradient for {', '.join(unused)}; expected all "
                f"parameters in the loss, or config {ZERO}.ignore_unused_parameters true"
            )

    def _restore_counters(self, counters: Mapping[str, int], steps: Mapping[Any, int]) -> None:
        super()._restore_counters(counters, steps)
        self._skipped_before = self.optimizer.skipped_steps

    def was_step_applied(self) -> bool:
        """Return whether the last step() updated the weights: it was at a boundary, and the norm
        was finite. Waits for the norm.
        """
        norm = self.get_global_grad_norm() if self._stepped else None
        return norm is not None and math.isfinite(norm)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce the gradients that were only added locally. Collective. Backward does this by
        itself.

        bucket_size: ignored.
        """
        self._core.reducer.reduce_pending()

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because of a non-finite gradient. Waits for the
        last norm.
        """
        return self._skipped_loaded + self.optimizer.skipped_steps - self._skipped_before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the context, without reduction.

        Call step() after the context.
        """
        if self._inside_no_sync:
            raise ValueError("no_sync: entered inside no_sync(); expected one block at a time")
        self._inside_no_sync = True
        try:
            with self._core.no_sync():
                yield
        finally:
            self._inside_no_sync = False

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Add the gradients of several backwards locally inside the context, and reduce their sum
        at its end. Collective.

        Call step() after the context, once for all of these backwards. Raises ValueError with
        managed_gradient_accumulation false.
        """
        self._refuse_unmanaged("coalesce_grad_reduction")
        with self.no_sync():
            yield
        self.allreduce_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the micro-steps so far."""
        self.optimizer.zero_grad(set_to_none)
        self._loss = None
        self._seen = self._divided = self._scaled = 0
        self._ran = False

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Choose whether the next step() updates the weights. None returns to counting micro-steps.

        Raises ValueError with managed_gradient_accumulation false, since every step() then updates.
        """
        self._refuse_unmanaged("set_gradient_accumulation_boundary")
        self._is_boundary = is_boundary

    def _refuse_unmanaged(self, op: str) -> None:
        if not self.managed_gradient_accumulation():
            raise ValueError(
                f"{op}: config managed_gradient_accumulation is False, so every step() updates "
                "the weights; expected step() alone, or true (Trainer and Accelerate need it)"
            )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples per optimizer step over all ranks, by changing the number of
        micro-batches per step.

        Loaders and learning rates do not change. Raises ValueError unless it is a multiple of the
        samples of one micro-batch on all ranks, and between the micro-steps of a step.
        """
        samples = self._sizes.micro * self._replicas[0]
        if train_batch_size < samples or train_batch_size % samples:
            raise ValueError(
                f"set_train_batch_size: train_batch_size is {train_batch_size}; expected a "
                f"multiple of {samples}, the samples of one micro-batch on all ranks"
            )
        self._set_sizes("set_train_batch_size", self._sizes.micro, train_batch_size // samples)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the number of samples per backward and rank. Loaders do not change.

        Raises ValueError for a number below 1, or between the micro-steps of a step.
        """
        if micro_batch_size < 1:
            raise ValueError(
                f"set_train_micro_batch_size: micro_batch_size is {micro_batch_size}; expected at "
                f"least 1"
            )
        self._set_sizes("set_train_micro_batch_size", micro_batch_size, self._sizes.accumulation)

    def _set_sizes(self, op: str, micro: int, accumulation: int) -> None:
        if self._core.reducer.backwards > 0:
            raise ValueError(
                f"{op}: called between the micro-steps of a step; expected it before the first or "
                f"after the last"
            )
        self._sizes = BatchSizes(micro * accumulation * self._replicas[0], micro, accumulation)
        self._counted_from = self.micro_steps

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each param_group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the betas of each param_group, or its momentum if it has no betas."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate of all param_groups, or one rate for each. Raises ValueError for
        another number of rates.
        """
        groups = self.optimizer.param_groups
        rates = list(lr) if isinstance(lr, Sequence) else [lr] * len(groups)
        if len(rates) != len(groups):
            raise ValueError(
                f"set_lr: lr has {len(rates)} values; expected one, or {len(groups)}, one per "
                f"param_group"
            )
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the averaged gradients at the last step, before clipping. Return None
        before the first step. Waits for the norm.
        """
        return self._core.last_grad_norm

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Free device memory until reload_states. See FusedAdam.offload_states."""
        self.optimizer.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the offloaded states back to the device."""
        self.optimizer.reload_states(non_blocking)

    def destroy(self) -> None:
        """Wait for background work (the model and the optimizer own the memory). Collective."""
        super().destroy()
        self.optimizer.synchronize()
