"""The overlapped step: the same bits as a step that is complete when it returns, every read
waits, one order of collectives.
"""

import copy
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.distributed import comm as comm_module
from shardcore.distributed.comm import Comm, Traffic, wait_all
from shardcore.offload import overlap_step
from shardcore.offload.overlap_step import OverlapStep, PendingGroup, PendingParams
from tests.support.choice import combinations
from tests.support.groups import LIVELY, as_on_nccl, device_decides
from tests.support.models import (
    Run,
    batch_of,
    hash_of,
    hash_of_training,
    loss_of,
    micro_steps,
    stepped,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.schedules import LateStore, SlowStore, start

OFFLOAD = {"optimizer": "cpu"}
STEPS, OVERFLOW = 4, 1


def _outcome(rank: int, world_size: int, run: Run, schedule: str | None) -> tuple[str, str]:
    """Train through a step that overflows on rank 0; returns the hash and the losses."""
    overlap = schedule is not None
    model, optimizer = start(rank, run, overlap, late=rank == 0 or schedule != "one late")
    if schedule == "the caller gathers":  # as on NCCL
        optimizer._engine.overlap_step._worker_gathers = False
    losses = []
    for step in range(run.steps):
        losses += micro_steps(
            model, optimizer, rank, step, run.accumulate, overflow=step == OVERFLOW and rank == 0
        )
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = float("nan")  # step() has read it
        optimizer.zero_grad()
    if overlap:  # a skipped step hands nothing over
        assert optimizer._engine.overlap_step.step_count == run.steps - optimizer.skipped_steps > 0
    assert optimizer.skipped_steps >= 1
    return hash_of_training(model, optimizer), repr(losses)


SCHEDULES = ["one late", "both late", "the caller gathers"]
GRID = combinations(
    [0, 1, 2, 3],
    [None, "cpu"],
    ["fp32", "bf16", "fp16"],
    [(1, None), (3, True), (3, False)],
    SCHEDULES,
)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("stage", "tier", "precision", "order", "schedule"), GRID)
def test_the_same_bits_as_a_step_that_waits(
    stage: int, tier: Any, precision: str, order: Any, schedule: str
) -> None:
    """On one rank or both the weights come as late as the waits allow; a late rank alone must
    not change the collectives.
    """
    options = {
        "offload": tier and {"optimizer": tier},
        "clip_grad_norm": 0.5,
        "sync_each": order[1],
    }
    options |= {"loss_scale": shardcore.LossScale(initial_power=6)} if precision == "fp16" else {}
    run = Run(stage=stage, steps=STEPS, accumulate=order[0], precision=precision, shard=options)
    assert run_ranks(2, _outcome, run, schedule) == run_ranks(2, _outcome, run, None)


def _without(rank: int, world_size: int, missing: str, stage: int, overlap: bool) -> str:
    """Train while forward leaves out a wait for Adam (of one unit) or for gathers, which is then
    made at forward's end.
    """
    wait, left = OverlapStep.wait_for, []

    def but_for_one(self: OverlapStep, buckets: Any) -> None:
        buckets = list(buckets)
        if {bucket.unit for bucket in buckets} != {"blocks.1"}:
            wait(self, buckets)

    def finish(self: OverlapStep) -> None:
        wait(self, list(self._pending))
        while left:
            wait_all(left.pop().gathers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlapStep, "finish", finish)
        if missing == "wait":
            patch.setattr(OverlapStep, "wait_for", but_for_one)
        elif missing == "gather":
            patch.setattr(OverlapStep, "_wait_for_gather", lambda self, update: left.append(update))
        model, optimizer = start(rank, Run(stage=stage), overlap, late=missing == "wait")
        if missing == "gather" and rank == 1:
            SlowStore(optimizer._engine.overlap_step)
        losses = [loss for step in range(3) for loss in stepped(model, optimizer, rank, step)]
        optimizer.synchronize()
        return repr(losses)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("missing", "stage"), [("wait", 0), ("wait", 2), ("wait", 3), ("gather", 1)]
)
def test_a_wait_that_is_left_out_changes_the_losses(missing: str, stage: int) -> None:
    expected = run_ranks(2, _without, "nothing", stage, False)
    assert run_ranks(2, _without, missing, stage, True)[0] != expected[0]


# --- without a worker, as on a GPU ----------------------------------------------------------------


def _as_on_a_gpu(rank: int, world_size: int, overlap: bool) -> tuple[str, list[list[str]], bool]:
    """Return the hash, for each forward the units whose new weights were not waited for as a
    unit began, and a read's bits.
    """
    pending: list[str] = []
    seen: list[list[str]] = []
    all_gather = Comm.all_gather

    def watched(comm: Comm, full: torch.Tensor, kind: Any, name: str, *rest: Any, **of: Any) -> Any:
        works = all_gather(comm, full, kind, name, *rest, **of)
        if kind is not Traffic.STEP:
            return works
        pending.append(name)

        def wait() -> None:
            if name in pending:
                pending.remove(name)
            wait_all(works)

        return [SimpleNamespace(wait=wait)]

    with device_decides(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_step, "uses_worker", lambda device, store: False)
        patch.setattr(Comm, "all_gather", watched)
        shard = {"clip_grad_norm": 0.5, "overlap_step": overlap, "loss_scale": LIVELY}
        model, optimizer, _ = train(rank, Run(steps=0, precision="fp16", shard=shard))
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: seen.append(list(pending)))
        for step in range(7):
            optimizer.scale_loss(loss_of(model, batch_of(step, 0, rank))).backward()
            seen.clear()
            optimizer.step()
            optimizer.zero_grad()
        read = hash_of(model.blocks[2].parameters())  # waits
        loss_of(model, batch_of(8, 0, rank))
        same = read == hash_of(model.blocks[2].parameters())
        optimizer.scale_loss(loss_of(model, batch_of(9, 0, rank))).backward()
        optimizer.step()
        seen.clear()
        loss_of(model, batch_of(10, 0, rank))
        return hash_of_training(model, optimizer), list(seen), same


def test_without_a_worker_each_forward_waits_for_its_own_gather() -> None:
    (expected, at_once, _), _ = run_ranks(2, _as_on_a_gpu, False)
    assert at_once == [[], [], []], "else the test could not fail: step() waited"
    for found, seen, same in run_ranks(2, _as_on_a_gpu, True):
        assert (found, same) == (expected, True)
        names = [f"the new weights of blocks.{number}" for number in range(3)]
        assert seen == [[names[1], names[2]], [names[2]], []]


# --- reads ----------------------------------------------------------------------------------------


def _in_full_params(model: Any, optimizer: Any, held: Any) -> list[torch.Tensor]:
    with shardcore.full_params(model):
        return [param.detach().clone() for param in held]


def _after_mode(model: Any, optimizer: Any, held: Any) -> list[torch.Tensor]:
    model.train(not model.training)
    return list(held)


def _loaded(model: Any, optimizer: Any, held: Any) -> list[torch.Tensor]:
    """Loading one weight leaves the others as the step makes them."""
    model.load_state_dict({"gain": torch.tensor(2.0)}, strict=False)
    return list(held)[1:]


def _synchronized(model: Any, optimizer: Any, held: Any) -> list[torch.Tensor]:
    optimizer.synchronize()
    return list(held)


X = batch_of(99, 0, 0)[0]
HIDDEN = torch.linspace(-1, 1, 24).repeat(2, 1).to(torch.bfloat16)
READS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "forward": lambda model, *_: [model(X)],
    "a unit's forward": lambda model, *_: [model.blocks[1](HIDDEN)],
    "parameters": lambda model, *_: list(model.parameters()),
    "named_parameters": lambda model, *_: [param for _, param in model.named_parameters()],
    "a submodule's parameters": lambda model, *_: list(model.blocks[2].parameters()),
    "param_groups": lambda _, optimizer, __: [
        param for group in optimizer.param_groups for param in group["params"]
    ],
    "all of a group": lambda _, optimizer, __: dict(optimizer.param_groups[0])["params"],
    "a copy of a module's dict": lambda model, *_: list(
        dict(model.blocks[2].down._parameters).values()
    ),
    "an attribute": lambda model, *_: [model.head.weight],
    "a layer inside a unit": lambda model, *_: [model.blocks[0].up(HIDDEN)],
    "deepcopy": lambda model, *_: list(copy.deepcopy(model).parameters()),
    "pickle": lambda model, *_: list(pickle.loads(pickle.dumps(model)).parameters()),
    "state_dict": lambda model, *_: list(model.state_dict().values()),
    "a submodule's state_dict": lambda model, *_: list(model.blocks[1].state_dict().values()),
    "load_state_dict": _loaded,
    "train or eval": _after_mode,
    "optimizer.state_dict": lambda model, optimizer, _: [
        entry[key]
        for _, entry in sorted(optimizer.state_dict()["state"].items())
        for key in sorted(entry)
    ],
    "sharded_state_dict": lambda model, *_: [
        part
        for value in shardcore.sharded_state_dict(model).values()
        for _, part in getattr(value, "ranges", [])
    ],
    "full_params": _in_full_params,
    "full_state": lambda model, _, held: [shardcore.full_state(held[1], "exp_avg")],
    "synchronize": _synchronized,
}
AT_STAGE_3 = [
    *(
        "forward",
        "a unit's forward",
        "state_dict",
        "optimizer.state_dict",
        "sharded_state_dict",
        "full_params",
        "full_state",
    )
]


def _around_steps(
    reads: Iterable[str], stage: int, offload: Any, overlap: bool
) -> dict[str, tuple[list[Any], list[Any]]]:
    """What each of these reads returns before a step, and right after it."""
    model, optimizer = start(
        0, Run(stage=stage, precision="bf16", shard={"offload": offload}), overlap
    )
    held = list(model.parameters())

    def read(name: str) -> list[torch.Tensor]:
        return [value.detach().clone() for value in READS[name](model, optimizer, held)]

    stepped(model, optimizer, 0, 0)
    found = {}
    for step, name in enumerate(reads, 1):
        optimizer.synchronize()
        before = read(name)
        stepped(model, optimizer, 0, step)
        found[name] = before, read(name)
    optimizer.synchronize()
    return found


@pytest.mark.parametrize(
    ("stage", "offload", "reads"),
    [(2, OFFLOAD, READS), (3, None, AT_STAGE_3), (0, None, ["parameters"])],
)
def test_every_read_waits(stage: int, offload: Any, reads: Iterable[str]) -> None:
    found = _around_steps(reads, stage, offload, overlap=True)
    for name, (before, after) in _around_steps(reads, stage, offload, overlap=False).items():
        assert len(found[name][1]) == len(after) > 0, name
        assert all(map(torch.equal, found[name][1], after)), name
        assert not all(map(torch.equal, before, after)), name


def test_reads_see_old_weights_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin of the test above."""
    monkeypatch.setattr(OverlapStep, "_defer_reads", lambda self, *_: None)
    monkeypatch.setattr(PendingGroup, "_waited", lambda group, key: group.wrapped)
    reads = (
        "parameters",
        "param_groups",
        "all of a group",
        "an attribute",
        "a layer inside a unit",
        "deepcopy",
    )
    for name, (before, after) in _around_steps(reads, 2, OFFLOAD, overlap=True).items():
        assert all(map(torch.equal, before, after)), name


class _Recurrent(torch.nn.Module):
    """An LSTM, which reads a list of its weights, and a hook of the user's that reads weights
    before the forward.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.seen = torch.nn.LSTM(4, 4), []
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.blocks[1].held = [self.blocks[1].weight]
        self.blocks[1].register_forward_pre_hook(
            lambda module, _: self.seen.append(module.held[0].sum().item())
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](self.rnn(x)[0]))


def _recurrent(overlap: bool, read: Callable[[Any], Any]) -> tuple[float, list[float]]:
    model: Any = _Recurrent()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=0.1)
    model, optimizer = shardcore.shard(model, optimizer, 2, precision="fp32", overlap_step=overlap)
    if overlap:
        LateStore(optimizer._engine.overlap_step)
    for _ in range(2):
        model(torch.ones(3, 2, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = read(model).sum().item()
    optimizer.synchronize()
    return found, model.seen


def test_weights_behind_lists_and_hooks() -> None:
    reads: list[Callable[[Any], Any]] = [
        lambda model: model.rnn(torch.ones(3, 2, 4))[0],
        lambda model: model.blocks[1](torch.ones(4)),
        lambda model: torch.func.functional_call(
            model, {"blocks.0.weight": torch.ones(4, 4)}, (torch.ones(3, 2, 4),)
        ),
    ]
    for read in reads:
        assert _recurrent(True, read) == _recurrent(False, read)


def test_a_unit_waits_for_its_own_weights_only() -> None:
    model, optimizer = start(0, Run(stage=2), True)
    overlap = optimizer._engine.overlap_step
    stepped(model, optimizer, 0, 0)
    next(model.blocks[0].parameters())
    assert {bucket.unit for bucket in overlap._pending} == {"", "blocks.1", "blocks.2"}
    model.blocks[2].requires_grad_(True)  # a read of all its parameters
    assert {bucket.unit for bucket in overlap._pending} == {"", "blocks.1"}
    model.train()  # as it was: nothing is read
    assert overlap._pending
    copied = copy.deepcopy(model)
    assert copied.train() is copied
    assert not overlap._pending
    assert all(type(module._parameters) is dict for module in copied.modules())
    assert not any(isinstance(module._parameters, PendingParams) for module in model.modules())


def _pending_at_collectives(rank: int, world_size: int) -> list[int]:
    """How many updates are in flight when this rank starts each of its small collectives."""
    model, optimizer = start(rank, Run(stage=2), True)
    engine, pending = optimizer._engine, []

    def noted(call: Any) -> Any:
        def gather(*arguments: Any, **options: Any) -> Any:
            pending.append(len(engine.overlap_step._pending))
            return call(*arguments, **options)

        return gather

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_cpu", "gather_rows"):
            patch.setattr(Comm, name, noted(getattr(Comm, name)))
        for step, call in enumerate((optimizer.step, model.state_dict)):
            stepped(model, optimizer, rank, step)
            call()
    return pending


def test_all_is_there_before_a_collective() -> None:
    """The worker's gathers and another collective would be on one group, from two threads."""
    for pending in run_ranks(2, _pending_at_collectives):
        assert len(pending) >= 4
        assert not any(pending)


def test_schedulers_do_not_wait_for_weights() -> None:
    """Options of groups are read, set and added while a step is in flight; what holds "params"
    or all of a group waits.
    """
    model, optimizer = start(0, Run(stage=2), True)
    overlap, own = optimizer._engine.overlap_step, list(optimizer.param_groups)
    stepped(model, optimizer, 0, 0)
    optimizer._opt_called = True  # or the scheduler warns: it did not see that step
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=8)
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).step(1.0)
    (group,) = optimizer.param_groups
    ways: list[Callable[[Any], Any]] = [
        *(copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)), dict),
        *(lambda it: it.copy(), lambda it: {**it}, lambda it: it | {}),
    ]
    for step, way in enumerate(ways, 1):
        scheduler.step()
        assert (group["lr"], "max_lr" in group) == (scheduler.get_last_lr()[0], True)
        assert len(group) == len(list(group)) == len(group.keys()) > len(optimizer.defaults)
        assert "lr" in repr(optimizer)
        assert [type(entry) for entry in optimizer.param_groups] == [PendingGroup]
        assert {bucket.unit for bucket in overlap._pending} == {
            "",
            "blocks.0",
            "blocks.1",
            "blocks.2",
        }
        assert own[0]["lr"] == group["lr"]
        copied = way(group)  # a reference that is kept goes on, too
        assert type(copied) is dict
        assert copied.keys() == own[0].keys()
        assert not overlap._pending
        assert optimizer.param_groups[0] is own[0]
        stepped(model, optimizer, 0, step)
    optimizer.synchronize()


class _Backwards(torch.nn.Module):
    """Uses its blocks from the last to the first, or on the `other` rank from the first to the
    last.
    """

    def __init__(self, other: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if self.other else reversed(self.blocks):
            x = torch.tanh(block(x))
        return x


def _in_order(
    rank: int, world_size: int, stage: int, overlap: bool, differ: bool
) -> tuple[list[str], str]:
    model: Any = _Backwards(differ and rank == 1)
    model, optimizer = shardcore.shard(
        model,
        shardcore.FusedAdam(model.parameters(), lr=0.1),
        stage,
        precision="fp32",
        overlap_step=overlap,
    )
    order = []
    for _ in range(3):
        model(torch.ones(2, 4) + rank).sum().backward()
        with shardcore.full_params(model) if stage == 3 else nullcontext():
            optimizer.step()
            order = (
                [bucket.unit for bucket in optimizer._engine.overlap_step._pending]
                if overlap and stage < 3
                else []
            )
            if stage == 3:  # held weights are brought in line by the step
                order = [hash_of([param]) for param in optimizer.param_groups[0]["params"]]
        optimizer.zero_grad()
    return order, hash_of_training(model, optimizer)


def test_units_are_updated_in_the_order_of_the_last_forward() -> None:
    """Of the ranks' one order; where they have several, of the model's."""
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for differ in (False, True):
        (first, bits), second = run_ranks(2, _in_order, 1, True, differ)
        assert (first, bits) == second
        assert first == (blocks if differ else blocks[::-1])
        assert bits == run_ranks(2, _in_order, 1, False, differ)[0][1]


def test_weights_that_are_held_whole_are_new_after_the_step() -> None:
    assert run_ranks(2, _in_order, 3, True, False) == run_ranks(2, _in_order, 3, False, False)


# --- gradients, averages --------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_in_use_are_left_alone(stage: int) -> None:
    """Backward of a part alone, zeros, and clipping come after the step that still reads the
    gradients.
    """

    def trained(overlap: bool) -> str:
        model, optimizer = start(0, Run(stage=stage), overlap)
        for step in range(3):
            stepped(model, optimizer, 0, step)
            model.blocks[0](HIDDEN.float()).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, batch_of(step, 7, 0)).backward()
            optimizer.step()
            shardcore.clip_grad_norm_(model, 1e-3)
            optimizer.zero_grad()
        return hash_of_training(model, optimizer)

    assert trained(True) == trained(False)


def test_an_average_of_the_weights() -> None:
    """Over model.parameters() as it is; over references held before with synchronize(), and
    wrong without.
    """

    def averaged(overlap: bool, held: bool, synchronize: bool) -> list[torch.Tensor]:
        model, optimizer = start(0, Run(stage=2), overlap)
        references = list(model.parameters())
        average = [param.detach().clone() for param in references]
        for step in range(3):
            stepped(model, optimizer, 0, step)
            if synchronize:
                optimizer.synchronize()
            with torch.no_grad():
                torch._foreach_lerp_(average, references if held else list(model.parameters()), 0.5)
        optimizer.synchronize()
        return average

    expected = averaged(False, False, False)
    for held, synchronize in ((False, False), (True, True)):
        assert all(map(torch.equal, averaged(True, held, synchronize), expected))
    assert not all(map(torch.equal, averaged(True, True, False), expected))


def test_an_old_graph_cannot_run_backward_on_new_weights() -> None:
    for overlap in (False, True):
        model, optimizer = start(0, Run(stage=2), overlap)
        loss = loss_of(model, batch_of(0, 0, 0))
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class _Streams:
    """Stands in for torch.cuda: writes down what streams wait for, a current stream for each
    thread as torch has.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._current = threading.local()

    def current_stream(self, device: Any = None) -> "_Stream":
        return getattr(self._current, "stream", None) or _Stream(
            self, threading.current_thread().name
        )

    @contextmanager
    def stream(self, stream: "_Stream") -> Iterator[None]:
        self._current.stream = stream
        yield
        self._current.stream = None

    def event(self) -> Any:
        streams = self

        class Event:
            def record(self, stream: "_Stream") -> None:
                self.after = f"{stream.name} after {streams.log[-1]}"

        return Event()


class _Stream:
    def __init__(self, streams: _Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_event(self, event: Any) -> None:
        self.streams.log.append(f"{self.name} waits for {event.after}")


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's for what step() was called after, and that of who reads for each bucket; no
    GPU is needed to see it.
    """
    streams = _Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    monkeypatch.setattr(torch.cuda, "Event", streams.event)
    _, optimizer = start(0, Run(stage=2, shard={"units": 10**9}), True, late=False)
    engine = optimizer._engine
    overlap, steps = engine.overlap_step, engine.store.steps
    overlap._stream = _Stream(streams, "worker")

    def logged(parts: Any, hypers: Any) -> Iterator[Any]:
        for left in steps(parts, hypers):
            streams.log.append(f"adam on {streams.current_stream().name}")
            yield left

    overlap.store = type("Logged", (), {"steps": staticmethod(logged)})()
    loss_of(engine.model, batch_of(0, 0, 0)).backward()
    streams.log.append("backward")
    optimizer.step()
    optimizer.synchronize()
    assert streams.log == [
        "backward",
        "worker waits for MainThread after backward",
        "adam on worker",
        "MainThread waits for worker after adam on worker",
    ]


def _logged(patch: pytest.MonkeyPatch) -> list[str]:
    """Log what this rank starts: gathers of the engine, and the user's all_reduce."""
    log: list[str] = []

    def log_calls(owner: Any, attribute: str, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, attribute)

        def logged(*args: Any, **options: Any) -> Any:
            log.append(
                f"{name} of "
                f"{[t.numel() for t in args[0]] if isinstance(args[0], list) else args[0].numel()}"
            )
            return call(*args, **options)

        patch.setattr(owner, attribute, logged)

    log_calls(comm_module, "_all_gather", "gather")
    log_calls(dist, "all_reduce", "all_reduce")
    return log


def _with_a_collective_in_forward(rank: int, world_size: int) -> tuple[list[str], str]:
    with as_on_nccl() as patch:
        model, optimizer = start(rank, Run(stage=3, shard={"offload": OFFLOAD}), True, late=False)
        if rank == 1:
            SlowStore(optimizer._engine.overlap_step)
        # SyncBatchNorm, experts or a metric have one like this.
        model.blocks[1].register_forward_hook(lambda *_: dist.all_reduce(torch.ones(3)))
        log = _logged(patch)
        for step in range(4):
            stepped(model, optimizer, rank, step)
        optimizer.synchronize()
        return log, hash_of_training(model, optimizer)


def test_a_slow_update_changes_no_order_of_collectives() -> None:
    (first, bits), second = run_ranks(2, _with_a_collective_in_forward)
    assert (first, bits) == second
    assert first.count("all_reduce of 3") == 4
    assert len(first) > 20


ORDER_READS: dict[str, Callable[[Any, Any], Any]] = {
    "parameters": lambda model, optimizer: list(model.parameters()),
    "a weight": lambda model, optimizer: model.head.weight,
    "param_groups": lambda model, optimizer: optimizer.param_groups[0]["params"],
}


def _read_on_one_rank(rank: int, world_size: int, read: str | None) -> tuple[list[str], str, str]:
    with as_on_nccl() as patch:
        model, optimizer = start(
            rank, Run(shard={"offload": OFFLOAD}), read is not None, late=False
        )
        log = _logged(patch)
        said = ""
        for step in range(3):
            stepped(model, optimizer, rank, step)
            if rank == 0 and read is not None:
                try:
                    ORDER_READS[read](model, optimizer)
                except RuntimeError as error:
                    said = str(error)
            dist.all_reduce(torch.ones(3))
        optimizer.synchronize()
        assert len(list(model.parameters())) == len(optimizer.param_groups[0]["params"])
        return log, said, hash_of_training(model, optimizer)


def test_a_read_on_one_rank_starts_no_collective() -> None:
    (complete, _, expected), _ = run_ranks(2, _read_on_one_rank, None)
    for read in ORDER_READS:
        (first, said, bits), (second, _, other_bits) = run_ranks(2, _read_on_one_rank, read)
        assert first == second
        assert sorted(first) == sorted(complete)
        assert bits == other_bits == expected
        assert "optimizer.synchronize() on every rank" in said


def _read_together(rank: int, world_size: int, folder: Path, nccl: bool) -> list[str]:
    with as_on_nccl() if nccl else nullcontext():
        model, optimizer = start(rank, Run(stage=2, shard={"offload": OFFLOAD}), True, late=False)
        stepped(model, optimizer, rank, 0)
        shardcore.save(folder, model, optimizer)
        stepped(model, optimizer, rank, 1)
        shardcore.load(folder, model, optimizer)
        found = [hash_of_training(model, optimizer)]
        stepped(model, optimizer, rank, 2)
        with shardcore.full_params(model):
            found.append(hash_of(model.parameters()))
        return found


def test_what_all_ranks_do_together_starts_gathers(tmp_path: Path) -> None:
    expected = run_ranks(2, _read_together, tmp_path / "gloo", False)
    assert run_ranks(2, _read_together, tmp_path / "nccl", True) == expected
    assert expected[0] == expected[1]
