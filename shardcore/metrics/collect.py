"""Collects the metrics of a training and writes a row of them every few steps.

Between two rows nothing waits for the device: losses are added where they are, times are events
(distributed/clock.py), bytes are counted on the host. A row reads them, and ranks gather four
numbers each. Ranks are all that have parts of the model: tensor-parallel slices and pipeline
stages, too.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from shardcore.distributed.comm import Traffic
from shardcore.distributed.everyone import Everyone
from shardcore.engine.agreement import Payload, agree, attempt, together
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.memory_report import report_now
from shardcore.metrics import writers
from shardcore.metrics.run_digests import RunDigests, check_parts, drop, writer_to
from shardcore.metrics.writers import COLUMNS
from shardcore.offload.cpu_store import CpuStore
from shardcore.optim import ShardableOptimizer
from shardcore.optim.interface import weakly
from shardcore.version import __version__

Row = dict[str, Any]


class Metrics:
    """Write loss, norm, speed, times, memory and bytes of a training run every few steps, on rank
    0.

    Collective over all ranks of the model, including other tensor-parallel slices and pipeline
    stages. docs/metrics.md lists the columns.

    Args:
        model: The model returned by shardcore.shard or initialize, with its optimizer.
        directory: The directory of metrics.csv, plotted by `shardcore report`. None: no file.
        every: The number of steps between two rows.
        start: The number of steps made before, to continue in the same directory. Later rows there
            are dropped.
        flops: Floating-point operations of a step on this rank. None: see `count_flops`.
        log: Print a line for each row.
        digests: Also write directory/digests.jsonl: digests of what every so many-th step read,
            computed and wrote, for `shardcore compare`. None: none, at no cost. Not with pipeline
            stages.
        tensorboard: Also write to directory/tensorboard.
        wandb: Also write to Weights & Biases: True, or options of wandb.init.

    Raises:
        ValueError, TypeError: On every rank, for bad arguments.
        FileExistsError, OSError: On rank 0 (RuntimeError on the others), if the directory already
            contains metrics and `start` is 0, or if it cannot be written.
        ImportError: On rank 0 (RuntimeError on the others), for a package that is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        directory: str | Path | None = None,
        *,
        every: int = 1,
        start: int = 0,
        flops: float | None = None,
        log: bool = True,
        digests: int | None = None,
        tensorboard: bool = False,
        wandb: bool | Mapping[str, Any] = False,
    ) -> None:
        """Begin to measure."""
        self._engine = engine_behind("Metrics", model)
        self._comm = self._engine.comm
        folder = None if directory is None else Path(directory)
        self._every, self._steps, self._flops = every, start, flops
        self._counted: float | None = None  # operations of the step that count_flops counts
        self._write: list[Callable[[Row], None]] = []
        self._ranks = ranks = Everyone(self._comm, self._comm.across)
        then = "nothing is measured"
        problems: list[BaseException] = []
        attempt(problems, lambda: _check(every, start, flops, folder, tensorboard))
        attempt(problems, lambda: _check_digests(digests, folder, self._engine))
        optimizer: Any = self._engine._optimizer()
        if not isinstance(optimizer, ShardableOptimizer):
            problems.append(
                ValueError(
                    "Metrics: the model was sharded without an optimizer, or its optimizer no "
                    "longer exists. Pass a model with an optimizer in training"
                )
            )
        self._optimizer = optimizer
        given = {"every": every, "start": start, "digests": digests}
        arguments = [("argument", name, str(value)) for name, value in given.items()]
        agree(
            self._comm,
            "Metrics",
            problems,
            arguments,
            over=self._comm.across,
            entries_of_model=arguments,
            then=then,
        )
        if ranks.rank == 0 and log:
            self._write.append(lambda row: print(writers.as_line(row), flush=True))
        self._digests: RunDigests | None = None
        with together(ranks, "Metrics", then):
            if ranks.rank == 0:
                self._open(folder, start, tensorboard, wandb)
            if digests is not None and folder is not None:
                write = writer_to(folder, start) if ranks.rank == 0 else drop
                self._digests = RunDigests(self._engine, digests, start, write)
        self._comm.clock.start(self._engine.device)
        optimizer.register_step_post_hook(weakly(self._after_step))
        self._row: Row = {}  # what was noted right after the optimizer's step
        # since the last row: the sum of losses, how many these are, tokens
        self._loss: torch.Tensor | float = 0.0
        self._losses = self._tokens = 0
        self._first, self._since, self._before = start, perf_counter(), self._counts()

    def step(
        self,
        *,
        loss: torch.Tensor | float | None = None,
        tokens: int | None = None,
        position: int | str | None = None,
    ) -> Row | None:
        """Record the end of a step, with this rank's `loss` (one element; not scaled), the number
        of `tokens` in the step, and beside digests the `position` of the data loader.

        Call it on every rank after optimizer.step(). In a pipeline, pass the loss only on the ranks
        of the last stage. Every `every`-th step returns a row and is collective; other steps return
        None. In a row, loss is the mean over the ranks and steps with a loss, tokens are the sum
        over the ranks of process_group, and times, bytes and memory are from this rank.

        Raises:
            TypeError, ValueError: For bad arguments; in a step with a row, on every rank.
            OSError: On rank 0 (RuntimeError on the others), if a row cannot be written.
        """
        problems: list[BaseException] = []
        attempt(problems, lambda: self._add(loss, tokens))
        if self._digests is not None:
            self._digests.end_step(loss, position=position)
        if (self._steps + 1) % self._every:
            if problems:
                raise problems.pop()  # this rank's alone: nothing is collective here
            self._steps += 1
            return None
        row = self._read(problems)
        with together(self._ranks, "Metrics.step", "the row is written in part, or not at all"):
            for write in self._write:
                write(row)
        return row

    def _add(self, loss: torch.Tensor | float | None, tokens: int | None) -> None:
        """Add one step's loss and tokens to those since the last row."""
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ValueError(
                    f"Metrics.step: loss has shape {tuple(loss.shape)}; expected one element. "
                    "Take its mean or sum"
                )
            loss = loss.detach().to(torch.float64).reshape(())
        elif loss is not None and (isinstance(loss, bool) or not isinstance(loss, int | float)):
            raise TypeError(
                f"Metrics.step: loss is of type {type(loss).__name__}; expected a tensor of one "
                "element or a number"
            )
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int)):
            raise TypeError(
                f"Metrics.step: tokens is of type {type(tokens).__name__}; expected a whole number"
            )
        if loss is not None:
            self._loss, self._losses = self._loss + loss, self._losses + 1
        self._tokens += tokens or 0
        if self._flops is None:
            self._flops, self._counted = self._counted, None

    @contextmanager
    def count_flops(self) -> Iterator[None]:
        """Count the floating-point operations of the forwards and backwards inside the context. It
        counts only in the first step; afterwards `flops` is known.

        Counts matrix products, convolutions and attention, like torch.utils.flop_counter. Repeated
        work of activation checkpointing is included.
        """
        if self._flops is not None:
            yield
            return
        # `import shardcore` leaves it out
        counter = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
        with counter:
            yield
        self._counted = (self._counted or 0) + counter.get_total_flops()

    # --- one row ----------------------------------------------------------------------------------

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note the learning rate before a scheduler changes it, and memory before zero_grad
        frees gradients.
        """
        if self._digests is not None:
            self._digests.after_step()
        lr = optimizer.param_groups[0]["lr"]
        self._row["lr"] = lr.clone() if isinstance(lr, torch.Tensor) else lr
        if (self._steps + 1) % self._every == 0:
            memory: dict[str, int] = {
                f"{kind}_{tier}_bytes": 0 for tier in writers.TIERS for kind in writers.KINDS
            }
            for line in report_now(self._engine).lines:
                memory[f"{line.kind}_{line.tier}_bytes"] += line.bytes
            self._row |= memory

    def _read(self, problems: list[BaseException]) -> Row:
        """Return the row of the steps since the last one. Waits for the device. Collective;
        problems: why this rank refuses.
        """
        of_rank = [float(self._loss), float(self._losses), float(self._tokens), self._flops or 0.0]
        agreed = agree(
            self._comm,
            "Metrics.step",
            problems,
            payload=Payload(
                {"sums": torch.tensor(of_rank, dtype=torch.float64, device="cpu")},
                Traffic.METRICS,
                of_part=lambda ranks: {"sums": ranks["sums"].sum(0)},
            ),
            over=self._comm.across,
            then="no row was written",
        )
        self._steps += 1
        parts = agreed.parts["sums"]
        loss, losses, _, flops = parts.sum(0).tolist()
        tokens = parts[:, 2].max().item()  # parts of the model have the same samples
        device, engine = self._engine.device, self._engine
        counts = self._counts()
        steps = self._steps - self._first
        seconds = perf_counter() - self._since
        tflops = None
        if flops:
            tflops = flops / self._ranks.world_size * steps / seconds / 1e12
        peak = None
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
        row: Row = dict.fromkeys(COLUMNS) | {
            "step": self._steps,
            "loss": loss / losses if losses else None,
            "grad_norm": engine.last_grad_norm,
            "loss_scale": engine.loss_scale,
            "skipped_steps": self._optimizer.skipped_steps,
            "step_ms": 1000.0 * seconds / steps,
            "tokens_per_s": tokens / seconds if tokens else None,
            "tflops_per_s": tflops,
            **{name: (count - self._before[name]) / steps for name, count in counts.items()},
            "device_peak_bytes": peak,
            **self._row,
        }
        row["lr"] = None if row["lr"] is None else float(row["lr"])
        self._loss, self._losses, self._tokens = 0.0, 0, 0
        self._first, self._since, self._before = self._steps, self._since + seconds, counts
        return row

    def _counts(self) -> dict[str, float]:
        """Return what is counted from the start on."""
        sent, store = self._comm.sent, self._engine.store
        moved_bytes = store.moved_bytes if isinstance(store, CpuStore) else {}
        counts = {f"{part}_ms": ms for part, ms in self._comm.clock.totals().items()}
        counts["sent_gradients_bytes"] = sent[Traffic.BACKWARD]
        counts["sent_weights_bytes"] = sent[Traffic.WEIGHTS] + sent[Traffic.STEP]
        for path in ("to_host", "from_host", "to_nvme", "from_nvme"):
            counts[f"{path}_bytes"] = moved_bytes.get(path, 0)
        return counts

    # --- where rows go ----------------------------------------------------------------------------

    def _open(
        self, folder: Path | None, start: int, tensorboard: bool, wandb: bool | Mapping[str, Any]
    ) -> None:
        """Open what was asked for, packages first."""
        chosen = {"tensorboard": tensorboard, "wandb": wandb is not False}
        packages = {
            name: writers.import_package(name, f"Metrics: {name} is True")
            for name, on in chosen.items()
            if on
        }
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._write.append(writers.Table(folder, start).write)
            (folder / writers.FACTS).write_text(
                json.dumps(_facts(self._engine, self._ranks.world_size)) + "\n"
            )
        if folder is not None and tensorboard:
            tensorboard_events = writers.open_tensorboard(
                packages["tensorboard"], folder / "tensorboard"
            )
            self._write.append(lambda row: tensorboard_events(writers.as_events(row)))
        if wandb is not False:
            wandb_events = writers.open_wandb(packages["wandb"], {} if wandb is True else wandb)
            self._write.append(lambda row: wandb_events(writers.as_events(row)))


def _check(
    every: int, start: int, flops: float | None, folder: Path | None, tensorboard: bool
) -> None:
    for name, value, least in (("every", every, 1), ("start", start, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"Metrics: {name} is {value!r}; expected a whole number")
        if value < least:
            raise ValueError(f"Metrics: {name} is {value}; expected at least {least}")
    if flops is not None and (isinstance(flops, bool) or not isinstance(flops, int | float)):
        raise TypeError(f"Metrics: flops is {flops!r}; expected a number, or None")
    if flops is not None and not flops > 0:
        raise ValueError(f"Metrics: flops is {flops}; expected more than 0")
    if tensorboard and folder is None:
        raise ValueError(
            "Metrics: tensorboard is True without a directory. Pass a directory for its files"
        )


def _check_digests(digests: int | None, folder: Path | None, engine: Engine) -> None:
    if digests is None:
        return
    if isinstance(digests, bool) or not isinstance(digests, int):
        raise TypeError(f"Metrics: digests is {digests!r}; expected a whole number, or None")
    if digests < 1:
        raise ValueError(f"Metrics: digests is {digests}; expected at least 1")
    if folder is None:
        raise ValueError("Metrics: got digests without a directory. Pass a directory for the file")
    check_parts("Metrics", engine)


def _facts(engine: Engine, ranks: int) -> dict[str, Any]:
    """Return what a page says of the run."""
    options = engine.options
    gpu = None
    if engine.device.type == "cuda":
        gpu = torch.cuda.get_device_name(engine.device)
    tiers = {
        kind: getattr(options["offload"], kind) for kind in ("optimizer", "gradients", "params")
    }
    offload = {kind: tier for kind, tier in tiers.items() if tier}
    facts = {
        "model": type(engine.model).__name__,
        "parameters": sum(param.numel() for param in engine.model.parameters()),
        "ranks": ranks,
        "device": gpu or "CPU",
        "stage": options["stage"],
        "offload": ", ".join(f"{kind}: {tier}" for kind, tier in offload.items()) or "none",
        "precision": options["precision"] or "as the model's",
        "shardcore": __version__,
        "torch": torch.__version__,
    }
    if len(engine.comm.across) > len(engine.comm.slices):
        del facts["parameters"]  # they are those of one stage
    return facts
