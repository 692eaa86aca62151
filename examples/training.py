"""One training of the GPT with shardcore, as short as a user would write it, and what it
measured.
"""

import ctypes
import hashlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import shardcore
from examples.corpus import Corpus
from examples.gpt import PRESETS, build_gpt, next_byte_loss
from examples.launch import Rank
from shardcore.distributed.comm import Comm

TAIL_STEPS = 20  # the loss at the end is the mean over this many steps: one batch alone is noise


@dataclass(frozen=True)
class TrainConfig:
    """What both trainings of a comparison share. ``batch`` is sequences per rank and micro-step;
    the rest as in the options.
    """

    preset: str
    steps: int
    batch: int
    accumulate: int
    lr: float
    weight_decay: float
    clip: float
    precision: str
    seed: int

    def tokens_per_step(self, world_size: int) -> int:
        """Count the tokens that all ranks together train on in one step."""
        return world_size * self.accumulate * self.batch * PRESETS[self.preset].context


@dataclass(frozen=True)
class Placement:
    """Where the optimizer states go: the ZeRO stage, and "cpu" or "none" for the tier."""

    stage: int
    offload: str

    def __str__(self) -> str:
        return f"stage {self.stage}, " + (
            "no offload" if self.offload == "none" else f"{self.offload} offload"
        )


@dataclass(frozen=True)
class Checkpoints:
    """Where a training is saved, every how many steps (None: never), how many are kept (None:
    all), and if it goes on there.
    """

    directory: str
    every: int | None = None
    keep_last: int | None = None
    resume: bool = False


@dataclass(frozen=True)
class Training:
    """The outcome. losses: each step's mean over ranks, nats a byte. bytes_per_rank: by kind, one
    dict a rank.

    skipped_steps: those whose gradients were not finite.
    """

    placement: Placement
    losses: list[float]
    step_seconds: list[float]
    tokens_per_step: int
    bytes_per_rank: list[dict[str, int]]
    weights_sha256: list[str]
    skipped_steps: int

    @property
    def last_loss(self) -> float:
        return statistics.fmean(self.losses[-TAIL_STEPS:])

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of the steps, then a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def state_sha256(state: dict[str, torch.Tensor]) -> str:
    """Hash names, dtypes, shapes and bytes of a state dict in the order of its names."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(
                (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(
                    tensor.data_ptr()
                )
            )
    return digest.hexdigest()


def gather(value: object) -> list:
    """Return every rank's value, in the order of ranks, as JSON has it (torch's own way needs
    numpy). Collective.
    """
    return Comm().gather_json(value)


def mean_over_ranks(losses: list[float]) -> list[float]:
    """Return each step's mean over ranks of this rank's and the others' losses. Collective."""
    return [statistics.fmean(of_ranks) for of_ranks in zip(*gather(losses), strict=True)]


def check_same(path: Path, saved: dict[str, object], here: dict[str, object]) -> None:
    """Raise ValueError if a checkpoint is of a training with other options."""
    for name, value in here.items():
        if saved.get(name) != value:
            raise ValueError(
                f"train_gpt: {path} was saved with {name} {saved.get(name)!r}; expected {value!r}, "
                f"as here (give the same "
                "options and text, or another --checkpoint-dir)"
            )


def train(
    rank: Rank,
    corpus: Corpus,
    config: TrainConfig,
    placement: Placement,
    on_step: Callable[[int, float, float], None],
    checkpoints: Checkpoints | None = None,
) -> Training:
    """Train from the seed, or go on from the latest checkpoint, if there is one. Collective.

    ``on_step(step, loss, seconds)`` hears of every step on this rank.
    """
    model = build_gpt(config.preset, config.seed)
    optimizer = shardcore.FusedAdam(
        model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, config.steps)
    )
    model, optimizer = shardcore.shard(
        model,
        optimizer,
        stage=placement.stage,
        offload=None if placement.offload == "none" else {"optimizer": placement.offload},
        precision=config.precision,
        clip_grad_norm=config.clip if config.clip > 0 else None,
        accumulate=config.accumulate,
        # the default depends on the stage, and which sums come first shows in the bits
        sync_each=True,
    )
    context = PRESETS[config.preset].context
    options = {**asdict(config), "text": corpus.sha256}
    # Batches are a function of the step, so how many losses there are is the position in the data,
    # too.
    past = {"options": options, "losses": [], "step_seconds": [], "skipped_steps": 0}
    if (
        checkpoints is not None
        and checkpoints.resume
        and Path(checkpoints.directory, "latest").exists()
    ):
        loaded = shardcore.load(checkpoints.directory, model, optimizer, scheduler=scheduler)
        past = loaded.client_state
        check_same(loaded.path, past["options"], options)
        if rank.rank == 0:
            print(f"going on from {loaded.path}", flush=True)
    losses, step_seconds, bytes_by_kind = past["losses"], past["step_seconds"], {}
    own_losses = []  # of this rank, not yet in losses
    for step in range(len(losses), config.steps):
        start = time.perf_counter()
        step_loss = torch.zeros((), device=rank.device)
        for micro_step in range(config.accumulate):
            tokens, targets = corpus.batch(
                seed=config.seed,
                rank=rank.rank,
                step=step,
                micro_step=micro_step,
                batch=config.batch,
                context=context,
            )
            logits = model(tokens.to(rank.device))
            loss = next_byte_loss(logits, targets.to(rank.device)) / config.accumulate
            optimizer.scale_loss(loss).backward()  # with fp16; otherwise that is loss itself
            step_loss += loss.detach()
        # gradients are all there now; after zero_grad they may be gone
        if step == config.steps - 1:
            bytes_by_kind = shardcore.memory_report(model).by_kind
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        own_losses.append(step_loss.item())
        step_seconds.append(time.perf_counter() - start)
        on_step(step, own_losses[-1], step_seconds[-1])
        if checkpoints is not None and checkpoints.every and (step + 1) % checkpoints.every == 0:
            losses += mean_over_ranks(own_losses)
            own_losses.clear()
            shardcore.save(
                checkpoints.directory,
                model,
                optimizer,
                tag=f"step{step + 1}",
                scheduler=scheduler,
                client_state={
                    "options": options,
                    "losses": losses,
                    "step_seconds": step_seconds,
                    "skipped_steps": past["skipped_steps"] + optimizer.skipped_steps,
                },
                keep_last=checkpoints.keep_last,
            )
    training = Training(
        placement=placement,
        losses=losses + mean_over_ranks(own_losses),
        step_seconds=step_seconds,
        tokens_per_step=config.tokens_per_step(rank.world_size),
        bytes_per_rank=gather(bytes_by_kind),
        weights_sha256=gather(state_sha256(model.state_dict())),
        skipped_steps=past["skipped_steps"] + optimizer.skipped_steps,
    )
    del model, optimizer, scheduler
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()
    return training
