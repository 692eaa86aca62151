"""The engine of a PipelineModule: train_batch and eval_batch run micro-batches through the stages.

A rank sends its stage's output to the next stage, and the gradient of its input back to the one
before. While a batch trains, each stage runs ahead by as many forwards as there are stages after
it, and then one forward and one backward in turn (1F1B), so it holds the activations of no more
micro-batches than that.

Invariants: two neighbours exchange the same messages in the same order, and where both send and
receive, in one batch (batch_isend_irecv): NCCL needs both. The receiver learns shapes and dtypes
with the first micro-batch of each batch, or with every one (dynamic_shape).
Source: the schedule is PipeDream-Flush, https://arxiv.org/abs/2006.09503; the names those of
https://deepspeed.readthedocs.io/en/latest/pipeline.html, 0.19.8.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardcore.checkpoint.directory import LATEST
from shardcore.deepspeed.loaders import RepeatingLoader
from shardcore.deepspeed.pipe_module import PipelineModule, PipelineParallelGrid
from shardcore.deepspeed.training_engine import TrainingEngine, check_folder
from shardcore.optim.group_options import dtype_name

# inputs and outputs of a micro-batch, until its backward
_Run = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
# of a stage's output: shapes, dtypes, and whether its gradient comes back
_Layout = list[tuple[list[int], str, bool]]


class PipelineError(RuntimeError):
    """A call that a pipeline does not have."""


class PipelineEngine(TrainingEngine):
    """A PipelineModule with its optimizer: of `initialize`. forward, backward and step are
    train_batch's own.

    stage_id, num_stages: of this rank. micro_batches: of a batch, gradient_accumulation_steps().
    grid: the groups of ranks.
    """

    _shuffles = False

    def __init__(self, module: PipelineModule, *args: Any) -> None:
        """Wrap what `shard` returned; see initialize."""
        super().__init__(module, *args)
        self._pipe = module
        self.grid: PipelineParallelGrid = module.mpu()
        self.stage_id, self.num_stages = module.stage_id, module.num_stages
        self.micro_batches = self.gradient_accumulation_steps()
        self.is_pipe_parallel = self.num_stages > 1
        self._batch_fn: Callable[[Any], Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._layout: _Layout | None = None  # of what comes from the stage before
        self._announced: _Layout | None = None  # of what goes to the next one
        # of the last stage: losses, or in an evaluation perhaps outputs, of each micro-batch
        self._results: list[Any] = []
        self._core.scaler.has_losses = self.is_last_stage()
        if self.num_stages > 1:  # NCCL's first messages in a group have to be of all of its ranks
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.grid.pp_proc_group)
        for tied in module.tied:
            tied.make_copy(self.device)

    def is_first_stage(self) -> bool:
        """Whether this rank's stage takes the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank's stage takes the labels."""
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    @property
    def mpu(self) -> PipelineParallelGrid:
        """The groups of ranks."""
        return self.grid

    # --- data -------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        """Set the loader for train_batch calls without an iterator. At its end it restarts."""
        self._batches = None if loader is None else RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Set the iterator for train_batch calls without an iterator."""
        self._batches = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Set a function from an item of the iterator to (inputs, labels)."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes may be others in every batch."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: stages exchange tensors of any dtype."""

    def get_additional_losses(self) -> None:
        """Return None: a layer or loss_fn gives one loss."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples of a batch, by changing the number of micro-batches. Raises ValueError
        unless micro-batches add up to this number.
        """
        self.zero_grad()  # of a batch that an error ended
        super().set_train_batch_size(train_batch_size)
        self.micro_batches = self.gradient_accumulation_steps()

    def _load(self) -> tuple[Any, Any]:
        """Return the inputs and labels of the next micro-batch."""
        if self._batches is None:
            if self.training_dataloader is None:
                raise ValueError(
                    "pipeline: there is no data; expected train_batch(data_iter), or "
                    "initialize(training_data=...)"
                )
            self.set_dataloader(self.training_dataloader)
            return self._load()
        batch = next(self._batches)
        batch = batch if self._batch_fn is None else self._batch_fn(batch)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            kind = f"a {type(batch).__name__}"
            if isinstance(batch, tuple | list):
                kind = f"{len(batch)} values"
            raise ValueError(
                f"pipeline: the data iterator yields {kind}; expected (inputs, labels), each a "
                f"tensor or a tuple of tensors (or set_batch_fn)"
            )
        return batch[0], batch[1]

    def _on_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.device, non_blocking=True)
        if isinstance(value, Mapping):
            return {key: self._on_device(entry) for key, entry in value.items()}
        return tuple(map(self._on_device, value)) if isinstance(value, tuple | list) else value

    # --- batches ----------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train on gradient_accumulation_steps() micro-batches, step, and return the mean loss on
        every rank. Collective.

        data_iter: yields (inputs, labels) on the ranks of the first and of the last stage. The
            first stage uses the inputs, the last stage the labels, and both need the same samples.
            Later calls reuse the iterator. Default: the iterator of the last call, or
            training_data.

        If the iterator ends within a batch, these ranks raise StopIteration, and the ranks of other
        stages wait. A scheduler whose step accepts an increment, as in Megatron, gets the samples
        of the batch.
        """
        if not torch.is_grad_enabled():
            raise PipelineError(
                "train_batch: gradients are disabled; expected no torch.no_grad() around it, or "
                "eval_batch"
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._pipe.train()
        self._start()
        self.zero_grad()  # of a batch that an error ended
        for tied in self._pipe.tied:
            tied.forget_gradients()
        self._run_1f1b()
        for tied in self._pipe.tied:
            tied.add_gradients()
        loss = self._loss = self._mean(self._results)
        self._stepped = True
        megatrons = (
            self.lr_scheduler is not None
            and "increment" in signature(self.lr_scheduler.step).parameters
        )
        self._step_at_boundary({"increment": self.train_batch_size()} if megatrons else None, 1.0)
        self.micro_steps += self.micro_batches
        self._update_tied()
        return loss

    def _update_tied(self) -> None:
        if self._pipe.tied:
            self.optimizer.synchronize()
        for tied in self._pipe.tied:
            tied.update()

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run micro-batches forward, in evaluation mode; returns their mean loss, on every rank.
        Collective.

        data_iter: see train_batch, whose iterator stays as it is. num_micro_batches: default as
        many as train_batch takes.
        compute_loss: False: the outputs of the last stage, instead of losses. reduce_output: None:
        a list, one per micro-batch.
        bcast_loss: False: the result is on the ranks of the last stage alone, and None elsewhere
        (as always without a loss, or a mean). return_logits: (result, output of the last
        micro-batch; None on other stages' ranks).
        """
        if reduce_output not in ("avg", None):
            raise ValueError(
                f'eval_batch: reduce_output is {reduce_output!r}; expected "avg" or None'
            )
        batches, self._batches = self._batches, data_iter
        output = None
        try:
            self._pipe.eval()
            self._start()
            with torch.no_grad():
                for _ in range(
                    self.micro_batches if num_micro_batches is None else num_micro_batches
                ):
                    output = self._forward(self._next_batch(), compute_loss)[1]
                    self._to_next(output)
        finally:
            self._batches = batches
        result: Any = self._results if self.is_last_stage() else None
        if reduce_output is not None and compute_loss and bcast_loss:
            result = self._mean(self._results)
        elif reduce_output is not None and self.is_last_stage():
            result = self._mean_here(self._results)
        if self.monitor.enabled and self.global_rank == 0 and isinstance(result, torch.Tensor):
            self.monitor.write_events(
                [("Train/Samples/eval_loss", result.item(), self.global_samples)]
            )
        if not return_logits:
            return result
        if output is None or not self.is_last_stage():
            return result, None
        return result, output[0] if len(output) == 1 else output

    def _start(self) -> None:
        self._layout = self._announced = None
        self._results = []

    def _run_1f1b(self) -> None:
        """Run the forwards and backwards of a batch."""
        count = self.micro_batches
        ahead = min(count, self.num_stages - 1 - self.stage_id)
        running: deque[_Run] = deque()
        for _ in range(ahead):
            running.append(self._forward(self._next_batch()))
            self._to_next(running[-1][1])
        if count > ahead:
            batch = self._next_batch()
        for number in range(ahead + 1, count + 1):
            running.append(self._forward(batch))
            grads = self._to_next(running[-1][1], running[0][1])
            grads = self._backward(*running.popleft(), grads)
            if number < count:
                batch = self._next_batch(grads)
            else:
                self._from_previous(grads, wanted=False)
        while running:
            grads = self._to_next((), running[0][1])
            self._from_previous(self._backward(*running.popleft(), grads), wanted=False)

    def _next_batch(self, grads: Sequence[torch.Tensor] = ()) -> tuple[Sequence[Any], Any]:
        """Return the inputs and labels of the next micro-batch. grads: to send meanwhile, of
        earlier inputs.

        What the stage loads, it loads first: without more data the first and the last stage both
        raise.
        """
        loaded, labels = (
            self._load() if self.is_first_stage() or self.is_last_stage() else (None, None)
        )
        if self.is_last_stage():
            labels = self._on_device(labels)
        if not self.is_first_stage():
            return self._from_previous(grads), labels
        inputs = self._on_device(loaded)
        return inputs if isinstance(inputs, tuple) else (inputs,), labels

    def _forward(self, batch: tuple[Sequence[Any], Any], compute_loss: bool = True) -> _Run:
        """Run this stage; returns its inputs and outputs; of the last stage the scaled loss
        where backward needs it.
        """
        inputs, labels = batch
        outputs = super().__call__(*inputs)
        if not self.is_last_stage():
            sent = outputs if isinstance(outputs, tuple) else (outputs,)
            if not all(isinstance(one, torch.Tensor) for one in sent):
                raise TypeError(
                    f"pipeline: the last layer of stage {self.stage_id} returns "
                    f"{[type(one).__name__ for one in sent]}; "
                    "expected a tensor, or a tuple of tensors (the next stage is on another rank)"
                )
            return inputs, sent
        if not compute_loss:
            self._results.append(outputs)
            return inputs, outputs if isinstance(outputs, tuple) else (outputs,)
        loss = outputs if self._pipe.loss_fn is None else self._pipe.loss_fn(outputs, labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f"a {type(loss).__name__}"
            if isinstance(loss, torch.Tensor):
                shape = f"a tensor of shape {tuple(loss.shape)}"
            raise ValueError(
                f"pipeline: the loss is {shape}; expected a tensor of one element, of loss_fn or "
                f"the last layer"
            )
        loss = loss.float()
        self._results.append(loss.detach())
        if torch.is_grad_enabled():
            return inputs, (self.scale(loss / self.micro_batches),)
        return inputs, outputs if isinstance(outputs, tuple) else (outputs,)

    def _backward(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Run backward of one micro-batch; returns the gradients of those inputs that have one.
        grads: None: of a loss.
        """
        roots = [output for output in outputs if output.requires_grad]
        if roots:
            torch.autograd.backward(roots, grads)
        if self.is_first_stage():
            return []
        return [
            torch.zeros_like(i) if i.grad is None else i.grad.contiguous()
            for i in inputs
            if i.requires_grad
        ]

    # --- messages ---------------------------------------------------------------------------------

    def _to_next(
        self, outputs: Sequence[torch.Tensor], awaited: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor] | None:
        """Send outputs to the next stage, and receive the gradients of others, sent earlier;
        None on the last stage.
        """
        if self.is_last_stage():
            return None
        peer = self.grid.stage_to_global(self.stage_id + 1)
        sent = [output.detach().contiguous() for output in outputs]
        if outputs:
            layout = [
                ([*output.shape], dtype_name(output.dtype), output.requires_grad)
                for output in outputs
            ]
            if self._announced is None or self._pipe.dynamic_shape:
                text = torch.frombuffer(bytearray(json.dumps(layout).encode()), dtype=torch.uint8)
                self._exchange(peer, [torch.tensor([text.numel()], device=self.device)], [])
                self._exchange(peer, [text.to(self.device)], [])
                self._announced = layout
            elif layout != self._announced:
                raise ValueError(
                    f"pipeline: stage {self.stage_id} returns {layout} after {self._announced} in "
                    f"one batch; expected the "
                    "same shapes and dtypes, or PipelineModule(dynamic_shape=True)"
                )
        received = [
            torch.empty(output.shape, dtype=output.dtype, device=self.device)
            for output in awaited
            if output.requires_grad
        ]
        self._exchange(peer, sent, received)
        return received

    def _from_previous(
        self, grads: Sequence[torch.Tensor] = (), wanted: bool = True
    ) -> list[torch.Tensor]:
        """Send gradients of inputs to the stage before, and receive the next inputs if wanted;
        none on the first stage.
        """
        if self.is_first_stage():
            return []
        peer = self.grid.stage_to_global(self.stage_id - 1)
        if wanted and (self._layout is None or self._pipe.dynamic_shape):
            length = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._exchange(peer, [], [length])
            text = torch.zeros(int(length.item()), dtype=torch.uint8, device=self.device)
            self._exchange(peer, [], [text])
            self._layout = json.loads(bytes(text.tolist()))
        layout = self._layout if wanted and self._layout is not None else []
        inputs = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            for shape, dtype, _ in layout
        ]
        self._exchange(peer, grads, inputs)
        for value, (_, _, has_grad) in zip(inputs, layout, strict=True):
            value.requires_grad_(has_grad)
        return inputs

    def _exchange(
        self, peer: int, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> None:
        group = self.grid.pp_proc_group
        operations = [dist.P2POp(dist.isend, tensor, peer, group) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, peer, group) for tensor in received]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _mean_here(self, results: Sequence[Any]) -> Any:
        """Return the mean over micro-batches and the ranks of the last stage, on which it is
        called.
        """
        if isinstance(results[0], tuple):
            return tuple(self._mean_here(column) for column in zip(*results, strict=True))
        mean = torch.stack([*results]).mean(0)
        if self.grid.data_parallel_size > 1:
            dist.all_reduce(mean, group=self.grid.dp_proc_group)
        return mean / self.grid.data_parallel_size

    def _mean(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean loss on all ranks."""
        mean: torch.Tensor = torch.zeros((), device=self.device)
        if self.is_last_stage():
            mean = self._mean_here([loss.reshape(()) for loss in losses])
        if self.num_stages > 1:
            dist.broadcast(
                mean, self.grid.stage_to_global(self.num_stages - 1), self.grid.pp_proc_group
            )
        return mean

    # --- checkpoints ------------------------------------------------------------------------------

    def _folder(self, directory: str | os.PathLike[str]) -> Path:
        name = f"stage_{self.stage_id:02d}" if self.num_stages > 1 else ""
        return Path(directory) / name

    def save_checkpoint(self, save_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> bool:
        """Save as TrainingEngine.save_checkpoint: several stages each into a folder of
        `save_dir`, "stage_00" and so on.
        """
        check_folder("save_checkpoint", save_dir)
        return super().save_checkpoint(self._folder(save_dir), *args, **kwargs)

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, *args: Any, **kwargs: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint of save_checkpoint with the same number of stages, of any number of
        ranks each. See TrainingEngine.load_checkpoint.

        Raises ValueError for another number of stages. Without `tag` it also raises ValueError if
        the newest checkpoints of the stages are of different steps, as after a crash between their
        saves. Then pass a tag of all stages.
        """
        if dist.is_initialized():
            tag = self._agree_on_tag("load_checkpoint", tag)
            try:
                self.wait_for_checkpoint()
            finally:
                dist.barrier()  # each stage saves by itself
            latest = self._folder(load_dir) / LATEST
            newest = latest.read_text().strip() if latest.is_file() else None
            saved = len([*Path(load_dir).glob("stage_*")]) or int(Path(load_dir, LATEST).is_file())
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, (newest, saved))
            topology = self._pipe.topology()
            stages = [
                of_ranks[topology.filter_match(pipe=stage)[0]] for stage in range(self.num_stages)
            ]
            if (saved := stages[0][1]) not in (0, self.num_stages):
                raise ValueError(
                    f"load_checkpoint: the checkpoint in {load_dir} is of {saved} stages; expected "
                    f"{self.num_stages}, cut at the same layers"
                )
            if tag is None and len({newest for newest, _ in stages}) > 1:
                raise ValueError(
                    "load_checkpoint: the newest checkpoints of the stages are "
                    f"{[newest for newest, _ in stages]}; expected one tag (give tag= with a tag "
                    "of every stage)"
                )
        loaded = super().load_checkpoint(self._folder(load_dir), tag, *args, **kwargs)
        self._update_tied()
        return loaded

    # --- what a pipeline does otherwise -----------------------------------------------------------

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: train_batch does it."""
        raise PipelineError(
            "a PipelineModule is trained as a whole; expected engine.train_batch(data_iter), or "
            "eval_batch"
        )

    __call__ = forward = backward = step = no_sync = _refuse

    def _check_whole(self) -> None:
        """Refuse: no rank has all weights."""
        if self.num_stages == 1:
            return
        raise PipelineError(
            "the weights of a PipelineModule are on the ranks of several stages; call "
            "module_state_dict(), which returns the weights of this stage under their names in "
            "the whole model"
        )

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """See TrainingEngine; PipelineError with several stages."""
        self._check_whole()
        return super().save_16bit_model(*args, **kwargs)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """See TrainingEngine; PipelineError with several stages."""
        self._check_whole()
        return super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict
