"""Digests of a run: what every N-th step read, computed and wrote, in `digests.jsonl`.

`shardcore compare` (metrics/compare.py) reads them to find where two runs part. A row has, in the
order of computing: the weights, the batch, the random states, the outputs of units, the loss, each
rank's local gradient before it is sent, the reduced gradients, the weights after the step. It has
the weights before the step only if the row before does not have them, or a checkpoint was loaded.

Digests are computed where values are stored. Nothing waits for them: sums stay on the device until
the next step, and a row is written then, or at exit. Steps without a row cost a comparison in each
hook.

Without a change to the program, the environment has them recorded (`record_first_steps`).
"""

import hashlib
import json
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint.directory import replacing
from shardcore.checkpoint.format import names_of, plain_name
from shardcore.checkpoint.save import random_states
from shardcore.distributed.comm import Traffic
from shardcore.engine.agreement import together
from shardcore.engine.bucket import Bucket, Managed
from shardcore.engine.digests import (
    VERSION,
    Digests,
    add_param,
    dtype_text,
    key_of,
    own_pieces,
    stored_weight,
    unsigned,
)
from shardcore.engine.engine import Engine
from shardcore.engine.slices import held_by
from shardcore.engine.unshard import in_backward
from shardcore.optim.dtensor import local_part
from shardcore.torch_private import pytree

FILE = "digests.jsonl"
FORMAT = "shardcore digests"
GENERATORS = ("python", "numpy", "torch", "cuda")
# Set by `shardcore run --twice`: the directory of the file, and how many steps the program makes.
DIRECTORY_VARIABLE, STEPS_VARIABLE = "SHARDCORE_DIGESTS", "SHARDCORE_DIGESTS_STEPS"
OWN = ("grads", "weights")  # also by rank: what of all parameters each has
SUMMED = ("batch", "loss", "buffers")  # over ranks, before those of units and parameters
_MOST_SAMPLES = 4096  # a tensor of more rows counts as a whole


class RunDigests:
    """Records the digests of every `every`-th step of one model, from its hooks.

    write: takes a row; called on rank 0 alone. start: the number of steps made before.
    """

    def __init__(
        self, engine: Engine, every: int, start: int, write: Callable[[dict[str, Any]], None]
    ) -> None:
        """Install the hooks, and write the head. Local."""
        self._engine, self._every, self._steps = engine, every, start
        self._pending = _Pending(write)
        # of tensor-parallel ranks, which have the same batch, the first counts
        self._counts = all(comm.rank == 0 for comm in engine.comm.slices)
        self._order: list[str] = []  # of the units in this step's forward
        self._knows_weights = False  # the last row has those of now
        self._loads = engine.loads
        self._new_step()
        self._hooked: set[str] = set()  # units
        self._look()
        before = engine.model.register_forward_pre_hook(_weakly(self._before), with_kwargs=True)
        engine.handles.append(before)
        weakref.finalize(self, self._pending.write)  # at exit, too

    def _look(self) -> None:
        """Find the parameters and units as they are now (see `unfreeze`), and write the head."""
        engine = self._engine
        self._buckets = engine.buckets
        self._names = names_of(engine)
        self._units = [*dict.fromkeys(plain_name(bucket.unit) for bucket in engine.buckets)]
        self._knows_frozen = False
        trained = [b for b in engine.buckets if b.trainable]
        self._trained = [self._names[m.param] for b in trained for m in b.params]
        in_units = [m.index for b in trained if b.unit for m in b.params]
        of_root = sorted(
            (m for b in trained if not b.unit for m in b.params), key=attrgetter("index")
        )
        # Local gradients of the root are recorded by parameter: those behind the units are the
        # first in backward, the others the last.
        last = max(in_units, default=-1)
        self._behind = [self._names[m.param] for m in of_root if m.index > last]
        self._ahead = [self._names[m.param] for m in of_root if m.index < last]
        self._locals = [*filter(None, self._units), *self._behind, *self._ahead]
        engine.reducer.before_send.append(_weakly(self._send))  # unfreeze makes a new reducer
        for unit in {bucket.unit for bucket in engine.buckets} - self._hooked:
            after = _weakly(self._after, plain_name(unit))
            engine.handles.append(engine.model.get_submodule(unit).register_forward_hook(after))
            self._hooked.add(unit)
        if engine.everyone.rank == 0:
            self._pending.write()
            self._pending.write_row(self._head())

    def _head(self) -> dict[str, Any]:
        """Return the line before the rows."""
        comm, options = self._engine.comm, self._engine.options
        return {
            "format": FORMAT,
            "version": VERSION,
            "every": self._every,
            "ranks": comm.world_size,
            # what changes the order of sums, and so the bits
            "sums": {
                "ranks_per_node": comm.topology.ranks_per_node,
                "reduction": options["reduction"],
                "slices": self._engine.everyone.slices,
            },
            "units": self._units,
            "root": {"behind": self._behind, "ahead": self._ahead},
            "placement": self._placement(),
            "params": {name: [*param.shape] for param, name in self._names.items()},
        }

    def _placement(self) -> str:
        """Return a hash of what this rank has, which differs where parameters are cut elsewhere."""
        pieces = [
            (self._names[managed.param], piece.param_start, piece.numel)
            for bucket in self._engine.buckets
            for managed in bucket.params
            for piece in own_pieces(bucket, managed)
        ]
        return hashlib.sha256(repr(pieces).encode()).hexdigest()[:16]

    @property
    def _on(self) -> bool:
        """Whether the step that is being computed has a row."""
        return (self._steps + 1) % self._every == 0

    def _new_step(self) -> None:
        self._begun = False
        self._order = []
        self._digests = Digests()
        self._local = Digests()

    # --- what a step reads and computes -----------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._on or not _trains():
            return
        if not self._begun:
            self._begin()
        if not self._counts:
            return
        for number, tensor in enumerate(_tensors((args, kwargs))):
            rows = tensor.shape[0] if tensor.dim() else 0
            flat = tensor.detach().contiguous()
            if not 0 < rows <= _MOST_SAMPLES:
                key = key_of(f"batch {number}", dtype_text(flat.dtype), tuple(flat.shape))
                self._digests.add("batch", key, flat.view(-1))
                continue
            key = key_of(f"batch {number}", dtype_text(flat.dtype), tuple(flat.shape[1:]))
            for row in flat.view(rows, -1):
                self._digests.add("batch", key, row)
        self._digests.flush()

    def _begin(self) -> None:
        """Begin the row: every rank has the same names, in the same order."""
        if self._buckets is not self._engine.buckets:
            self._look()
        if self._loads != self._engine.loads:  # frozen weights are loaded, too
            self._loads = self._engine.loads
            self._knows_weights = self._knows_frozen = False
        self._begun = True
        for name in SUMMED:
            self._digests.name(name)
        for kind, names in (
            ("random", GENERATORS),
            ("forward", self._units),
            ("grads", self._trained),
            ("weights", self._trained),
            ("before", () if self._knows_weights else self._weights_before()),
        ):
            for name in names:
                self._digests.name(f"{kind}/{name}")
        for name in self._locals:
            self._local.name(name)
        if not self._knows_weights:
            self._add_weights("before")
        if self._counts:
            for name, state in random_states(self._engine.device).items():
                text = repr(_plain(state)).encode()
                whole = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
                word = torch.tensor([whole - (1 << 63)], device="cpu")
                self._digests.add(f"random/{name}", key_of(name, "int64", ()), word)

    def _after(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._begun or not _trains():
            return
        if unit not in self._order:
            self._order.append(unit)
        for number, tensor in enumerate(_tensors(output)):
            if tensor.is_floating_point():
                flat = tensor.detach().contiguous()
                key = key_of(f"{unit} {number}", dtype_text(flat.dtype), tuple(flat.shape))
                self._digests.add(f"forward/{unit}", key, flat.view(-1))
        self._digests.flush()

    def _send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if not self._begun:
            return
        unit = plain_name(bucket.unit)
        for managed in bucket.params:
            name = self._names[managed.param]
            part = flat[managed.offset : managed.offset + managed.local.numel()]
            self._local.add(unit or name, key_of(name, "float32", _shape(managed)), part)
        self._local.flush()

    # --- the end of a step ------------------------------------------------------------------------

    def after_step(self) -> None:
        """Read what the step used and made. Call it after the optimizer's step, before gradients
        are cleared.
        """
        self._steps += 1
        self._knows_weights = self._begun
        if not self._begun:
            return
        engine, digests = self._engine, self._digests
        if engine.reducer.host_grads is not None:
            engine.reducer.host_grads.synchronize()
        for bucket in engine.buckets:
            for managed in filter(attrgetter("has_grad"), bucket.params):
                name = self._names[managed.param]
                key = key_of(name, "float32", _shape(managed))
                add_param(digests, f"grads/{name}", key, bucket, managed, bucket.read_grad)
        self._add_weights("weights")
        for name, buffer in engine.model.named_buffers():
            flat = buffer.detach().contiguous()
            key = key_of(name, dtype_text(flat.dtype), tuple(flat.shape))
            if flat.numel() and self._counts:
                digests.add("buffers", key, flat.view(-1))
        digests.flush()

    def _weights_before(self) -> list[str]:
        """Return the names of the weights before a step that a row has: frozen ones do not change,
        so the first row alone has them.
        """
        return self._trained if self._knows_frozen else [*self._names.values()]

    def _add_weights(self, kind: str) -> None:
        engine, digests = self._engine, self._digests
        engine.synchronize()  # an overlapped step
        for bucket in engine.buckets:
            if not bucket.trainable and self._knows_frozen:
                continue
            dtype, read = stored_weight(engine, bucket)
            for managed in bucket.params:
                name = self._names[managed.param]
                key = key_of(name, dtype_text(dtype), _shape(managed))
                add_param(digests, f"{kind}/{name}", key, bucket, managed, read)
        for _, param in () if self._knows_frozen else engine.unmanaged:
            if param not in engine.bucket_of and engine.everyone.rank == 0:
                flat = held_by(param).detach().contiguous()
                key = key_of(self._names[param], dtype_text(flat.dtype), tuple(flat.shape))
                digests.add(f"{kind}/{self._names[param]}", key, flat.view(-1))
        self._knows_frozen = True
        digests.flush()

    def end_step(self, loss: torch.Tensor | float | None = None, **values: Any) -> None:
        """End the row of a step. Collective.

        loss: of this rank. values: what else the row has, as plain values.
        """
        self._pending.write()
        if not self._begun:
            return
        engine, comm = self._engine, self._engine.comm
        if loss is not None and self._counts:
            value = torch.as_tensor(loss).detach().reshape(1)
            key = key_of("loss", dtype_text(value.dtype), ())
            self._digests.add("loss", key, value)
        totals, local = self._digests.totals(engine.device), self._local.totals(engine.device)
        for slices in comm.slices:
            slices.add_up(totals, "digests")
            slices.add_up(local, "digests")
        names = self._digests.names
        firsts = [names.index(f"{kind}/{self._trained[0]}") for kind in OWN]
        own = [totals[first : first + len(self._trained)].sum() for first in firsts]
        local = torch.cat([local, torch.stack(own)])
        comm.add_up(totals, "digests")
        of_ranks = comm.gather_rows(local, Traffic.METRICS, "digests")
        if engine.everyone.rank == 0:
            head = {"step": self._steps, **values, "order": self._order}
            by_rank = [f"local/{name}" for name in self._locals] + [f"own/{kind}" for kind in OWN]
            self._pending.keep(head, names, by_rank, totals, of_ranks)
        self._new_step()


def check_parts(op: str, engine: Engine) -> None:
    """Raise NotImplementedError for pipeline stages."""
    if len(engine.comm.across) > len(engine.comm.slices):
        raise NotImplementedError(
            f"{op}: got digests for pipeline stages; expected a model without stages"
        )


_of_process: list["RunDigests"] = []  # at most one: of the first optimizer


def record_first_steps(optimizer: Any) -> None:
    """Record every step of the process's first optimizer as the environment says, and end the
    process after the last. Called by `shard`. Collective.
    """
    if _of_process:  # another model of the program
        return
    folder, text = Path(os.environ[DIRECTORY_VARIABLE]), os.environ.get(STEPS_VARIABLE)
    engine: Engine = optimizer._engine
    everyone = engine.everyone
    with together(everyone, "shard", f"{DIRECTORY_VARIABLE} is set, and nothing is recorded"):
        if text is not None and not (text.isdecimal() and int(text) > 0):
            raise ValueError(f"shard: {STEPS_VARIABLE} is {text!r}; expected at least 1")
        check_parts("shard", engine)
        write: Callable[[dict[str, Any]], None] = drop
        if everyone.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            write = writer_to(folder, 0)
        digests = RunDigests(engine, 1, 0, write)
    _of_process.append(digests)

    def after_step(*arguments: Any) -> None:
        digests.after_step()
        digests.end_step()
        if text is None or digests._steps < int(text):
            return
        with together(everyone, "step", "the last row of digests is lost"):
            digests._pending.write()
        _end_process()

    optimizer.register_step_post_hook(after_step)


def _end_process() -> None:
    """End it as a program that is done. SystemExit would run what the program has in `finally`,
    such as a save; and threads of gloo may abort the end of an interpreter.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for worker in multiprocessing.active_children():  # of a data loader
        worker.terminate()
    os._exit(0)


class _Pending:
    """A row whose sums are on their way to the host."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self.write_row = write
        self._row: tuple[Any, ...] | None = None

    def keep(
        self,
        head: dict[str, Any],
        names: list[str],
        by_rank: list[str],
        totals: torch.Tensor,
        of_ranks: torch.Tensor,
    ) -> None:
        """Begin to copy the sums to the host."""
        both = torch.cat([totals, of_ranks.flatten()])
        on_host, event = both, None
        if both.is_cuda:
            on_host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            on_host.copy_(both, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._row = head, names, by_rank, on_host, event

    def write(self) -> None:
        """Write the row that is there, if any."""
        if self._row is None:
            return
        head, names, by_rank, on_host, event = self._row
        self._row = None
        if event is not None:
            event.synchronize()
        values = [f"{unsigned(value):016x}" for value in on_host.tolist()]
        of_ranks = values[len(names) :]
        lists = [of_ranks[at :: len(by_rank)] for at in range(len(by_rank))]
        row: dict[str, Any] = {**head}
        for name, value in zip([*names, *by_rank], [*values[: len(names)], *lists], strict=True):
            kind, slash, of = name.partition("/")
            if slash:
                row.setdefault(kind, {})[of] = value
            else:
                row[kind] = value
        self.write_row(row)


def writer_to(folder: Path, start: int) -> Callable[[dict[str, Any]], None]:
    """Begin the file, or continue it after step `start`, and return what writes a line. Raises
    OSError.
    """
    path = folder / FILE
    lines = path.read_text().splitlines() if start and path.exists() else []
    kept = [line for line in lines if json.loads(line).get("step", 0) <= start]
    with replacing(path) as new:
        new.write_text("".join(f"{line}\n" for line in kept))

    def write(row: dict[str, Any]) -> None:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")

    return write


def drop(row: dict[str, Any]) -> None:
    """Write nothing, as all ranks but the first do."""


def _shape(managed: Managed) -> tuple[int, ...]:
    """Return the shape of what this rank has: of a tensor-parallel slice its own."""
    return tuple(managed.local.shape)


def _trains() -> bool:
    """Whether a forward is a step's, and is not repeated in backward."""
    return torch.is_grad_enabled() and not in_backward()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(tree):
        tensor = local_part(leaf) if isinstance(leaf, torch.Tensor) else None
        if tensor is not None and tensor.numel() and tensor.layout == torch.strided:
            yield tensor


def _plain(value: Any) -> Any:
    """Return a value whose repr has all of it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Return a hook that refers to its object weakly, and returns None."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        function = weak()
        if function is not None:
            function(*first, *arguments)

    return call
