"""Small models and a training loop that tests run on ranks."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore


class Block(nn.Module):
    """A residual MLP block with a norm, so that units hold tensors of several sizes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding-like input, repeated blocks, a head: the shape of a transformer, with odd sizes
    and a scalar parameter.
    """

    def __init__(self, width: int = 24, hidden: int = 37, depth: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(10, width)
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(depth)])
        self.head = nn.Linear(width, 5, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("offset", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain + self.offset


@dataclass
class Run:
    """What a training run is asked for; `shard` are extra arguments of shardcore.shard."""

    stage: int = 2
    steps: int = 4
    accumulate: int = 1
    precision: str | None = "fp32"
    seed: int = 0
    batch: int = 4
    shard: dict[str, Any] = field(default_factory=dict)
    adam: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.1})


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def adam(model: nn.Module) -> Any:
    return shardcore.FusedAdam(model.parameters(), lr=1e-2)


def batch_of(step: int, micro: int, rank: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's samples of one micro-step: a function of its arguments alone."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 10_007 * micro + rank)
    return torch.randn(size, 10, generator=generator), torch.randn(size, 5, generator=generator)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return ((model(batch[0]).float() - batch[1]) ** 2).mean()


def of_forward(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that forward uses. Collective."""
    with shardcore.full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert the same names in the same order, dtypes and values."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def made(offload: Any) -> Any:
    """Return shard's `offload` with the directories of its files made, which shard itself does not
    make on the root file system.
    """
    path = offload.get("path") if isinstance(offload, Mapping) else None
    paths = path if isinstance(path, list) else [path]
    folders = [Path(p).expanduser() for p in paths if isinstance(p, str | os.PathLike)]
    goes_on = folders and offload.get("resume") and folders[0].exists()
    for folder in [] if goes_on else folders:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
    return offload


def train(
    rank: int, run: Run, model: nn.Module | None = None
) -> tuple[nn.Module, Any, list[float]]:
    """Shard and train; returns the model, the optimizer and this rank's losses."""
    model = make_net(run.seed) if model is None else model
    optimizer: Any = shardcore.FusedAdam(model.parameters(), **run.adam)
    made(run.shard.get("offload"))
    model, optimizer = shardcore.shard(
        model, optimizer, run.stage, precision=run.precision, accumulate=run.accumulate, **run.shard
    )
    losses = []
    for step in range(run.steps):
        for micro in range(run.accumulate):
            loss = loss_of(model, batch_of(step, micro, rank, run.batch)) / run.accumulate
            optimizer.scale_loss(loss).backward()  # the loss itself but with float16
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses


def hash_of(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def hash_of_training(model: Any, optimizer: Any) -> str:
    """The digest of each whole master weight of a model (or engine), and of each whole optimizer
    state, a line each. Collective.
    """
    read = model.state_dict if isinstance(model, nn.Module) else model.module_state_dict
    tensors = dict(sorted(read().items()))
    for number, entry in sorted(optimizer.state_dict()["state"].items()):
        tensors |= {f"state {number}.{key}": entry[key].float() for key in sorted(entry)}
    return "\n".join(f"{name} {hash_of([tensor])[:16]}" for name, tensor in tensors.items())


def assert_one(hashes: Iterable[Any]) -> None:
    """Raise AssertionError if two trainings differ, with the first line that does: which step, or
    which parameter.
    """
    first, *others = hashes
    for number, other in enumerate(others, start=1):
        for line, other_line in zip_longest(str(first).splitlines(), str(other).splitlines()):
            if line != other_line:
                raise AssertionError(
                    f"training {number} of {len(others)}: {other_line}, not {line}"
                )


class Reused(Net):
    """Blocks recomputed by nested backwards, the first one used outside of that, too; modules
    that can be units inside.
    """

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 37))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.blocks[0](x)) * self.gain


class Ordered(Net):
    """Runs its blocks in the order that each forward is given."""

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        x = self.inp(x)
        for index in order:
            x = self.blocks[index](x)
        return self.head(x) * self.gain


class Ramp(nn.Module):
    """loss = sum(weight * slope): the gradient is the slope."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def forward(self, slope: torch.Tensor) -> torch.Tensor:
        return (self.weight * slope).sum()


def micro_steps(
    model: Any, optimizer: Any, rank: int, step: int, accumulate: int, overflow: bool = False
) -> list[float]:
    losses = []
    for micro in range(accumulate):
        x, y = batch_of(step, micro, rank)
        loss = (
            loss_of(model, (x * float("inf") if overflow and micro == accumulate - 1 else x, y))
            / accumulate
        )
        optimizer.scale_loss(loss).backward()
        losses.append(loss.item())
    return losses


def stepped(model: Any, optimizer: Any, rank: int, step: int) -> list[float]:
    losses = micro_steps(model, optimizer, rank, step, 1)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def steps_of_run(model: Any, optimizer: Any, run: Run, rank: int, steps: range) -> None:
    for step in steps:
        micro_steps(model, optimizer, rank, step, run.accumulate)
        optimizer.step()
        optimizer.zero_grad()


def failing_forward(model: Any, rank: int) -> None:
    """Run a forward that ends in an error inside its second block."""
    handle = model.blocks[1].down.register_forward_pre_hook(lambda *_: 1 / 0)
    with suppress(ZeroDivisionError):
        model(batch_of(9, 0, rank)[0])
    handle.remove()


def error_of(function: Any) -> str:
    try:
        function()
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def hashes_of_runs(rank: int, world_size: int, runs: Iterable[Run]) -> list[str]:
    """Return the hash of each training. Collective."""
    return [hash_of_training(*train(rank, run)[:2]) for run in runs]


def records_of_runs(rank: int, world_size: int, runs: Iterable[Run]) -> list[str]:
    """Return of each training the losses of all ranks, a line for each backward, and its hash.
    Collective.
    """

    def record(run: Run) -> str:
        model, optimizer, losses = train(rank, run)
        of_ranks: Any = [losses] * world_size
        if world_size > 1:
            dist.all_gather_object(of_ranks, losses)
        backwards = (f"losses {n} {each}" for n, each in enumerate(zip(*of_ranks, strict=True)))
        return "\n".join([*backwards, hash_of_training(model, optimizer)])

    return [record(run) for run in runs]


class Branch(nn.Module):
    """Two linear layers side by side, or one twice; on a GPU one runs on a stream of its own,
    forked and joined.
    """

    forks: ClassVar[bool] = True
    streams: ClassVar[list[Any]] = []  # the one of all branches

    def __init__(self, width: int, side_first: bool, shared: bool = False) -> None:
        super().__init__()
        self.main, self.side_first = nn.Linear(width, width), side_first
        self.aside = self.main if shared else nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fork, join = (
            self._streams(x) if self.forks and x.is_cuda else (nullcontext(), lambda y: None)
        )
        if not self.side_first:
            z = self.main(x)
        with fork:
            y = self.aside(x)
        if self.side_first:
            z = self.main(x)
        join(y)
        return torch.tanh(y + z)

    def _streams(self, x: torch.Tensor) -> tuple[Any, Callable[[torch.Tensor], None]]:
        if not self.streams:
            self.streams.append(torch.cuda.Stream())
        here, side = torch.cuda.current_stream(), self.streams[0]
        side.wait_stream(here)
        x.record_stream(side)

        def join(y: torch.Tensor) -> None:
            here.wait_stream(side)
            y.record_stream(here)

        return torch.cuda.stream(side), join


class Branched(nn.Module):
    """Blocks of two branches: side streams first and last in backward, gradients above and below
    64 KiB.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 160)
        self.blocks = nn.Sequential(
            Branch(160, True), Branch(160, False), Branch(160, True, shared=True)
        )
        self.down = nn.Linear(160, 24)
        self.small = nn.Sequential(
            Branch(24, False), Branch(24, True), Branch(24, False, shared=True)
        )
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.small(self.down(self.blocks(self.inp(x)))))
