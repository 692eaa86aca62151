"""The engine object of a DeepSpeed-style loop: engine(x), engine.backward(loss), engine.step(); and its data loader."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from shardcore.checkpoint.consolidate import MAX_SHARD_BYTES, Tensor, in_order, on_first_rank, write_model
from shardcore.checkpoint.directory import LATEST, replacing
from shardcore.checkpoint.load import Wanted, is_there, load_from, open_together
from shardcore.checkpoint.save import Content, finish_saving, named_buffers, named_parameters, write_checkpoint
from shardcore.deepspeed.config import BatchSizes, Config
from shardcore.engine.engine import Engine
from shardcore.optim import AdamOptimizer

logger = logging.getLogger("shardcore")


class ShardedLoader(DataLoader[Any]):
    """This rank's micro-batches. Each iteration over it is an epoch, with a new order that is the same on all ranks."""

    def __init__(self, dataset: Dataset[Any], sampler: DistributedSampler[Any], **options: Any) -> None:
        """Load the samples of `sampler`; `options` are DataLoader's."""
        self._epoch = 0
        super().__init__(dataset, sampler=sampler, **options)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration (to resume a run)."""
        self._epoch = epoch

    def __iter__(self) -> Any:
        """Start the next epoch."""
        sampler: Any = self.sampler
        sampler.set_epoch(self._epoch)
        self._epoch += 1
        return super().__iter__()


class TrainingEngine:
    """A sharded model with its optimizer, scheduler and micro-step counter. Other attributes are those of `module`.

    global_steps: optimizer steps, skipped ones included. micro_steps: calls of step().
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: AdamOptimizer,
        lr_scheduler: Any,
        training_dataloader: ShardedLoader | None,
        config: Config,
        sizes: BatchSizes,
    ) -> None:
        """Wrap what `shard` returned; see initialize."""
        core = optimizer._engine
        assert isinstance(core, Engine)
        self.module, self.optimizer, self.lr_scheduler = module, optimizer, lr_scheduler
        self.training_dataloader = training_dataloader
        self.device: torch.device = core.device
        self.global_steps = self.micro_steps = 0
        self._skipped_before = optimizer.skipped_steps
        self._core, self._config, self._sizes = core, config, sizes
        self._backwards = 0  # since the last step()
        self._loss: torch.Tensor | None = None  # sum of the scaled losses since the last boundary
        self._inside_no_sync = False

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of `module`."""
        if name == "module":  # not set yet: a copy under construction
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with its hooks."""
        return self.module(*inputs, **kwargs)

    forward = __call__

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Divide `loss` (one element) by the accumulation steps, run backward and return the divided loss. Collective.

        scale_wrt_gas: whether to divide. With fp16 backward runs on the scaled loss.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"backward: loss has type {type(loss).__name__}; expected a tensor of one element")
        if loss.numel() != 1:
            raise ValueError(f"backward: loss has shape {tuple(loss.shape)}; expected one element (take its mean or sum)")
        if not loss.requires_grad:
            raise ValueError("backward: loss does not require a gradient; expected one computed by engine(...) outside no_grad")
        if scale_wrt_gas and self._sizes.accumulation > 1:
            loss = (loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss) / self._sizes.accumulation
        self.optimizer.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self._backwards += 1
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step; at an accumulation boundary clip, update, zero the gradients and step the scheduler.

        A step with a non-finite gradient updates nothing on any rank and does not step the scheduler, so with a scheduler the
        host waits for the norm. lr_kwargs: of lr_scheduler.step. Collective at a boundary. Raises ValueError without a backward
        since the last call.
        """
        if self._inside_no_sync:
            raise ValueError("step: called inside no_sync(); expected it after the block (gradients there are not reduced)")
        if self._backwards == 0:
            raise ValueError(
                "step: there was no engine.backward(loss) since the last step(); expected one for every micro-step"
            )
        if self.is_gradient_accumulation_boundary():
            self._step_at_boundary(lr_kwargs)
        self.micro_steps += 1
        self._backwards = 0

    def _step_at_boundary(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        before = None if self.lr_scheduler is None else self.optimizer.skipped_steps
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1
        if before is not None and self.optimizer.skipped_steps == before:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        every = self._config.steps_per_print
        if self._core.comm.rank == 0 and every is not None and self.global_steps % every == 0:
            loss = "unknown" if self._loss is None else f"{self._loss.item():.6g}"  # waits for the device
            scale = f" loss_scale={self.optimizer.loss_scale:g}" if self._config.fp16 else ""
            print(f"step={self.global_steps} skipped={self.skipped_steps} lr={self.get_lr()} loss={loss}{scale}", flush=True)
        self._loss = None

    @property
    def skipped_steps(self) -> int:
        """Return how many steps were skipped since a gradient was not finite. Waits for the last norm."""
        return self.optimizer.skipped_steps - self._skipped_before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, without reduction, inside the context; call step() after it."""
        if self._inside_no_sync:
            raise ValueError("no_sync: entered inside no_sync(); expected one block at a time")
        self._inside_no_sync = True
        try:
            with self._core.no_sync():
                yield
        finally:
            self._inside_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the micro-steps so far."""
        self.optimizer.zero_grad(set_to_none)
        self._loss = None

    def train(self, mode: bool = True) -> "TrainingEngine":
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> "TrainingEngine":
        """Set the module's evaluation mode."""
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step() updates the weights."""
        return (self.micro_steps + 1) % self._sizes.accumulation == 0

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each param_group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the averaged gradients at the last step, before clipping; None before the first. Waits for it."""
        return self._core.last_grad_norm

    def train_batch_size(self) -> int:
        """Return the samples per optimizer step over all ranks."""
        return self._sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per backward and rank."""
        return self._sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps per optimizer step."""
        return self._sizes.accumulation

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self._config.stage

    # --- checkpoints ------------------------------------------------------------------------------------------------------

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
        """Save model, optimizer, scheduler, counters and random states to `save_dir`/`tag`; returns True. Collective.

        tag: default "global_step" and the optimizer steps so far. The other arguments, errors and what a crash leaves: see
        shardcore.save.
        """
        content = Content(
            states=True,
            exclude_frozen=exclude_frozen_parameters,
            scheduler=self.lr_scheduler,
            client_state=client_state,
            counters={
                "global_steps": self.global_steps,
                "micro_steps": self.micro_steps,
                "skipped_steps": self.skipped_steps,
                "global_samples": self.global_steps * self._sizes.train,
            },
        )
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        write_checkpoint(self._core, Path(save_dir), name, content, save_latest, keep_last, wait)
        return True

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
        """Load what save_checkpoint or shardcore.save has saved, of any world size and stage. Collective.

        Returns the path of the checkpoint and its client_state; (None, {}), with a warning, where `load_dir` has no "latest"
        and no tag was given. load_module_strict: see shardcore.load. load_module_only: neither states, scheduler nor counters.
        """
        finish_saving(self._core)
        folder = Path(load_dir)
        found = tag is not None or self._core.comm.rank > 0 or is_there(folder)
        if not all(self._core.comm.gather_json(found)):
            logger.warning("load_checkpoint: there is no %s, and no tag was given: nothing was loaded", folder / LATEST)
            return None, {}
        source = open_together(self._core, folder, None if tag is None else str(tag))
        try:
            states = load_optimizer_states and not load_module_only
            scheduled = load_lr_scheduler_states and not load_module_only and source.scheduler is not None
            if self.lr_scheduler is not None and not scheduled and load_lr_scheduler_states and not load_module_only:
                logger.warning("load_checkpoint: %s has no state of a scheduler; this one goes on as it is", source.path)
            wanted = Wanted(load_module_strict, states, self.lr_scheduler if scheduled else None)
            loaded = load_from(source, self._core, wanted)
        finally:
            source.close()
        if not load_module_only:
            self.global_steps = source.counters.get("global_steps", max(source.steps.values(), default=self.global_steps))
            micro_steps = source.counters.get("micro_steps", self.micro_steps)
            self.micro_steps = micro_steps - micro_steps % self._sizes.accumulation  # gradients are not saved
            self._skipped_before = self.optimizer.skipped_steps - source.counters.get("skipped_steps", 0)
        self._backwards = 0
        self.zero_grad()
        return str(loaded.path), dict(loaded.client_state)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights, in the dtypes that they train in, to one file for plain torch; returns True. Collective.

        A name that ends with .safetensors gets that format, and any other a file of torch.save's, for which rank 0 holds all
        weights in host memory. Tied weights: in a file of safetensors once.
        """
        tensors = {
            name: Tensor(tuple(tensor.shape), tensor.dtype)
            for name, tensor in in_order(self._core).items()
            if not (exclude_frozen_parameters and isinstance(tensor, nn.Parameter) and not self._core.trains(tensor))
        }
        path = Path(save_dir) / save_filename
        if path.suffix == ".safetensors":
            write_model(self._core, path, tensors, MAX_SHARD_BYTES)
            return True

        def save(values: Iterator[torch.Tensor]) -> list[Path]:
            found = {name: next(values).view(tensor.shape).clone() for name, tensor in tensors.items()}
            name_of = {tensor: name for name, tensor in in_order(self._core).items()}
            named = {**dict(named_parameters(self.module, remove_duplicate=False)), **dict(named_buffers(self.module))}
            path.parent.mkdir(parents=True, exist_ok=True)
            held = {name: found[name_of[tensor]] for name, tensor in named.items() if name_of[tensor] in found}
            with replacing(path) as unfinished:
                torch.save(held, unfinished)
            return [path]

        on_first_rank(self._core, tensors, save)
        return True
