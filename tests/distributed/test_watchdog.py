"""Waits that can never end are errors that name ranks, operations and units; ranks that are late
are named and waited for.
"""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.distributed import comm, watchdog
from shardcore.distributed.comm import Comm
from shardcore.engine.bucket import BufferPool
from tests.support.groups import as_on_nccl
from tests.support.logs import logged
from tests.support.models import (
    Ordered,
    Run,
    batch_of,
    error_of,
    hash_of_training,
    loss_of,
    make_net,
    stepped,
    train,
)
from tests.support.ranks import context, free_port, run_ranks, start

NEVER = "ranks wait for different things, which can never end: "


def _detached(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        model.blocks[1].register_forward_hook(lambda module, args, out: out.detach())
    for step in range(2):
        stepped(model, optimizer, rank, step)


def _own_collective(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    stepped(model, optimizer, rank, 1)


def _seen_late(model: Any, optimizer: Any, rank: int) -> None:
    """As above, and the thread of rank 2 looks after its second reduction was started, and
    before it waits for the first.
    """
    on_device = watchdog.on_device

    def slow(operation: watchdog.Operation, work: dist.Work, device: torch.device) -> None:
        on_device(operation, work, device)
        time.sleep(0.3 if "blocks.1" in operation.name else 0)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(watchdog, "on_device", slow)
        _own_collective(model, optimizer, rank)


def _read_beside_a_barrier(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        model.state_dict()
    dist.barrier()


def _two_models(model: Any, optimizer: Any, rank: int) -> None:
    other, its, _ = train(rank, Run(steps=1))
    for one in [model, other] if rank == 0 else [other, model]:
        loss_of(one, batch_of(1, 0, rank)).backward()
    optimizer.step()
    its.step()


DIFFERENT: dict[str, tuple[Callable[[Any, Any, int], None], tuple[int, ...], tuple[str, ...]]] = {
    "a detached output": (_detached, (3,), ("the weights of", "the reduction of")),
    "a collective of the user's": (
        _own_collective,
        (0, 1, 2, 3),
        ("torch.distributed.all_reduce",),
    ),
    "a collective of the user's, seen late": (_seen_late, (2,), ("torch.distributed.all_reduce",)),
    "a read beside a barrier": (
        _read_beside_a_barrier,
        (1, 3),
        ("state_dict", "torch.distributed.barrier"),
    ),
    "two models": (_two_models, (1,), ("the reduction of",)),
}


def _diverge(rank: int, world_size: int, what: str, stage: int, nccl: bool) -> tuple[str, float]:
    with as_on_nccl() if nccl else nullcontext():
        model, optimizer, _ = train(rank, Run(stage=stage, steps=1))
        began = time.monotonic()
        try:
            DIFFERENT[what][0](model, optimizer, rank)
        except RuntimeError as error:
            return str(error), time.monotonic() - began
        return "no error", time.monotonic() - began


WITHIN = [("a collective of the user's", stage, stage % 2 == 0) for stage in range(4)]
WITHIN += [("a read beside a barrier", 1, False), ("a read beside a barrier", 3, True)]
ONCE = [(what, stages[0]) for what, (_, stages, _) in DIFFERENT.items() if len(stages) == 1]
WITHIN += [(what, stage, index % 2 == 0) for index, (what, stage) in enumerate(ONCE)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("what", "stage", "nccl"), WITHIN)
def test_what_can_never_end_is_an_error_that_names_it(what: str, stage: int, nccl: bool) -> None:
    answers = [said for said, _ in run_ranks(3, _diverge, what, stage, nccl)]
    for said in answers:
        print(said)
    named = [said for said in answers if said.startswith(NEVER)]
    assert named
    for said in answers:  # a collective of the user's raises torch's own error
        assert said.startswith(NEVER) or ("user" in what or "barrier" in what), said
    for part in DIFFERENT[what][2]:
        assert part in named[0]
    assert "rank 0 for " in named[0]
    # those that are known to wait when it is proved
    assert re.search(r"ranks? (1|2|1, 2) for ", named[0])


def _out_of_memory(
    rank: int, world_size: int, stage: int, where: str, point: int, nccl: bool
) -> str:
    """Rank 0 meets an error at the `point`-th buffer that it takes, catches it and trains on, as
    if nothing had been.
    """
    with as_on_nccl() if nccl else nullcontext(), pytest.MonkeyPatch.context() as patch:
        model, optimizer, _ = train(rank, Run(stage=stage, steps=1))
        taken, take = [0], BufferPool.acquire
        gather_rows = comm.Comm.gather_rows

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def counts(*given: Any, **options: Any) -> Any:
                taken[0] += 1
                if rank == 0 and taken[0] == point:
                    raise torch.OutOfMemoryError("injected")
                return call(*given, **options)

            return counts

        if where == "reduction":
            patch.setattr(BufferPool, "acquire", counted(take))
        else:
            patch.setattr(comm.Comm, "gather_rows", counted(gather_rows))
        try:
            for step in range(1, 4):
                with suppress(torch.OutOfMemoryError):
                    if where == "state_dict" and step == 1:
                        model.state_dict()
                    loss_of(model, batch_of(step, 0, rank)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return hash_of_training(model, optimizer)
        except RuntimeError as error:
            return str(error)


# gloo's own collectives, which stand in for NCCL's, end the process where sizes differ: as they do
# at stage 3.
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("where", "stage", "point", "nccl"),
    [
        ("reduction", 2, 3, True),
        ("reduction", 3, 5, False),
        ("state_dict", 1, 2, True),
        ("state_dict", 3, 2, False),
    ],
)
def test_an_error_that_one_rank_catches_ends_all(
    where: str, stage: int, point: int, nccl: bool
) -> None:
    """Or training goes on, where the messages that were left out are those of a whole pass: to
    one hash on all ranks.
    """
    answers = run_ranks(2, _out_of_memory, stage, where, point, nccl)
    for said in answers:
        assert (
            said.startswith((NEVER, "ranks went different ways", "step: ranks disagree"))
            or len(set(answers)) == 1
        ), said


def _error_in_backward(rank: int, world_size: int, stage: int, nccl: bool) -> list[str]:
    """Rank 1's backward ends in an error, which it keeps; then it does nothing, and then a step."""
    with as_on_nccl() if nccl else nullcontext():
        model, optimizer, _ = train(rank, Run(stage=stage, steps=1))

        def fail(grad: torch.Tensor) -> None:
            raise KeyError("planted")

        if rank == 1:
            model.blocks[1].up.weight.register_hook(fail)
        said = []
        for call in (lambda: loss_of(model, batch_of(1, 0, rank)).backward(), optimizer.step):
            try:
                call()
            except Exception as error:
                said.append(error)
            time.sleep(2 * (rank == 1 and len(said) == 1))
        return [f"{type(error).__name__}: {error}" for error in said]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "nccl"), [(0, False), (3, True), pytest.param(2, False, marks=pytest.mark.more)]
)
def test_an_error_in_one_backward_is_named_where_it_is_waited_for(stage: int, nccl: bool) -> None:
    first, _, third = run_ranks(3, _error_in_backward, stage, nccl)
    for said in (*first, *third):
        assert said.startswith(f"RuntimeError: {NEVER}")
        assert (
            "rank 1 does not take part; the backward of rank 1 ended in an error: KeyError: "
            "'planted'; expected each" in said
        )


def _uneven_errors(rank: int, world_size: int, stage: int) -> list[str]:
    """The backward fails on both ranks, before anything is sent on one; then both go on."""
    model, optimizer, _ = train(rank, Run(stage=stage, steps=1))

    def fail(grad: torch.Tensor) -> None:
        handle.remove()
        raise ValueError("planted")

    handle = (model.head.weight if rank == 1 else model.inp.weight).register_hook(fail)
    backward = lambda: loss_of(model, batch_of(1, 0, rank)).backward()  # noqa: E731
    return [error_of(backward), error_of(backward), error_of(optimizer.step)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_backward_that_fails_on_all_ranks_at_other_places_is_named_in_the_next(
    stage: int,
) -> None:
    for first, *later in run_ranks(2, _uneven_errors, stage):
        assert first == "ValueError: planted"
        for said in later:
            assert said.startswith(f"RuntimeError: {NEVER}")
            assert (
                "the backward of rank 1 ended in an error: ValueError: planted; expected each "
                "backward to succeed" in said
            )
            assert "start again" in said


def _leaves(rank: int, world_size: int) -> str:
    with as_on_nccl():
        model, optimizer, _ = train(rank, Run(stage=2, steps=1))
        if rank == 1:  # its training is over, and the process lives on
            del model, optimizer
            gc.collect()
            time.sleep(4)
            return ""
        try:
            stepped(model, optimizer, rank, 1)
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.more
def test_a_rank_whose_engine_is_gone_is_not_waited_for() -> None:
    waiting, gone, _ = run_ranks(3, _leaves)
    assert waiting.startswith(NEVER)
    assert "rank 1 does not take part: its engine is gone" in waiting
    assert gone == ""


def _late(rank: int, world_size: int, late: bool) -> tuple[list[str], str]:
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        patch.setattr(watchdog, "LATE_S", 1.0)
        model, optimizer, _ = train(rank, Run(stage=3, steps=1))
        if rank == 1 and late:
            time.sleep(2.7)
        stepped(model, optimizer, rank, 1)
        return lines, hash_of_training(model, optimizer)


@pytest.mark.more
def test_ranks_that_are_late_are_named_and_waited_for() -> None:
    (first, trained), (second, _), (third, _) = run_ranks(3, _late, True)
    assert second == third == []
    assert 1 <= len(first) <= 2  # once a LATE_S
    assert first[0].startswith(
        "ranks 0, 2 have waited 1 s for the weights of the root (call 2), at which rank 1 has not "
        "arrived"
    )
    assert run_ranks(3, _late, False)[0] == ([], trained)


def _shards_late(rank: int, world_size: int) -> str:
    model, optimizer, _ = train(rank, Run(steps=1))
    del model, optimizer
    gc.collect()
    if rank == 1:
        time.sleep(2)  # it reads data before it makes the next model
    return hash_of_training(*train(rank, Run(steps=1))[:2])


@pytest.mark.more
def test_a_rank_between_two_models_is_waited_for() -> None:
    assert len({*run_ranks(2, _shards_late)}) == 1


class Slow:
    """An object that takes long to unpickle."""

    def __reduce__(self) -> Any:
        return time.sleep, (2.5,)


def _gathers_objects(rank: int, world_size: int) -> str:
    model, optimizer, _ = train(rank, Run(steps=1))
    dist.gather_object(Slow(), [None] * world_size if rank == 0 else None)
    stepped(model, optimizer, rank, 1)
    return hash_of_training(model, optimizer)


@pytest.mark.more
class _Seen(watchdog.Log):
    """A log of whose earlier engine all is said, when it gets the name of the next one."""

    def __init__(self) -> None:
        self.group = lambda: SimpleNamespace(group_name="group")
        self.engine_gone = True
        self.failed = (3, "KeyError: 'a'")

    def __setattr__(self, key: str, value: Any) -> None:
        super().__setattr__(key, value)
        if key == "name":
            self.said = self.engine_gone, self.failed


def test_nothing_of_an_engine_that_is_gone_is_written_under_the_name_of_the_next() -> None:
    log = _Seen()
    log.begin_engine("2", in_order=False)
    assert log.said == (False, None)


def test_a_rank_that_unpickles_what_others_sent_is_waited_for() -> None:
    assert len({*run_ranks(2, _gathers_objects)}) == 1


_ENDS = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
import shardcore
from shardcore.distributed import watchdog

def ends_first(rank):  # rank 0, which serves the store, before rank 1
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=rank, world_size=2)
    dist.barrier()
    time.sleep(rank)

def in_a_store():
    store = dist.HashStore()
    def look():
        try:
            store.wait(["never"], timedelta(milliseconds=1))
        except RuntimeError:
            pass
    watchdog.PAUSE_S, watchdog._watch.look = 0.0, look
    watchdog._watch.start()
    time.sleep(0.2)

children = []
for number in range(6):  # of a process that has imported torch
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        ends_first(number) if number < 2 else in_a_store()
        break
    children.append(child)
else:
    ended = [os.waitpid(child, 0)[1] for child in children]
    assert signal.SIGALRM not in map(os.WTERMSIG, ended[:2]), "the store that is gone is waited for"
    assert not any(ended[2:]), "the thread of the watchdog aborts the end"
"""


@pytest.mark.more
def test_processes_end_though_the_store_is_gone_or_the_watchdog_is_inside_of_one() -> None:
    """Nothing of ours connects to the store at the end; without an end of the thread two of
    three of the others abort.
    """
    subprocess.run([sys.executable, "-c", _ENDS, free_port()], check=True, timeout=100)


def test_the_thread_asks_about_collectives_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would open the first GPU, too."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    group: Any = SimpleNamespace(name="of no group")
    watch, operation, device = (
        watchdog._Watch(),
        watchdog.Operation(group, "a gather", 1),
        torch.device("cuda", 3),
    )
    watch.on_device(operation, dist.Work(), device)
    assert watch._longest() is None
    assert used == [device]


def test_collectives_that_were_started_in_another_order_are_found() -> None:
    assert not watchdog._differ((3, ["a", "b", "c"]), (2, ["a", "b"]))
    assert not watchdog._differ((103, ["x", "y"]), (102, ["w", "x"]))
    assert watchdog._differ((2, ["a", "b"]), (2, ["b", "a"]))
    assert watchdog._differ((103, ["x", "y"]), (103, ["x", "z"]))


NEVER_ENDS = re.compile(
    r"ranks wait for different things, which can never end: .*ranks 0, 2 for .*expected every rank"
)


def _different(rank: int, world_size: int, what: str, trained: int, stage: int = 3) -> str:
    torch.manual_seed(0)
    model, optimizer, _ = train(rank, Run(stage=stage, steps=trained), Ordered())
    x, odd = torch.ones(2, 10), rank == 1
    try:
        if what == "skips a unit":
            model(x, (0, 2) if odd else (0, 1, 2))
        elif what == "skips the last unit":
            model(x, (0, 1) if odd else (0, 1, 2)).sum().backward()
        elif what == "has no backward":
            loss = model(x).sum()
            if not odd:
                loss.backward()
            optimizer.step()
        elif what == "reads":
            if odd:
                model.state_dict()
            model(x).sum().backward()
        elif what == "evaluates":
            if odd:
                with torch.no_grad():
                    model(x)
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("what", "trained"),
    [
        ("skips a unit", 0),
        ("skips the last unit", 0),
        ("has no backward", 2),
        ("evaluates", 2),
        ("reads", 0),
    ],
)
def test_different_blocks_on_one_rank_are_an_error_on_every_rank(what: str, trained: int) -> None:
    """Before the order is known, and after."""
    for error in run_ranks(3, _different, what, trained):
        assert NEVER_ENDS.match(error), error


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("what", "odd", "stage"), [("has no backward", "a step", 0), ("reads", "state_dict", 2)]
)
def test_a_missing_call_on_one_rank_is_an_error_on_every_rank_below_stage_3(
    what: str, odd: str, stage: int
) -> None:
    for error in run_ranks(3, _different, what, 1, stage):
        assert NEVER_ENDS.match(error), error
        assert f"rank 1 for {odd}" in error
        assert "ranks 0, 2 for the reduction of blocks.2" in error


def _in_another_order(rank: int, world_size: int) -> tuple[str, bool]:
    """Units of one size, gathered as often on each rank: what is matched by its order alone
    takes one for another.
    """
    with as_on_nccl():
        torch.manual_seed(0)
        model, optimizer, _ = train(
            rank, Run(stage=3, steps=0, shard={"reshard_after_forward": False}), Ordered()
        )
        before = hash_of_training(model, optimizer)
        model(torch.ones(2, 10), (0, 2, 1) if rank == 1 else (0, 1, 2)).sum().backward()
        with pytest.raises(ValueError) as refusal:
            optimizer.step()
        optimizer.zero_grad()
        return str(refusal.value), hash_of_training(model, optimizer) == before


def test_step_refuses_when_ranks_run_blocks_in_different_orders() -> None:
    """With NCCL, for which gloo's own collectives stand in. It would update from gradients of
    wrong weights.
    """
    for error, unchanged in run_ranks(2, _in_another_order):
        assert re.search(
            r"step: ranks disagree: collective \d+ is the weights of blocks\.2 on rank 1 but the "
            r"weights of blocks\.1 on",
            error,
        )
        assert unchanged


def _backward(model: Any, rank: int, micro: int = 0) -> None:
    loss_of(model, batch_of(0, micro, rank)).backward()


def _no_sync_once_more(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        with shardcore.no_sync(model):
            _backward(model, rank)
    _backward(model, rank, 1)
    optimizer.step()


def _one_more(model: Any, optimizer: Any, rank: int, then: Callable[[Any, Any], Any]) -> None:
    for micro in range(3 - rank):
        _backward(model, rank, micro)
    then(model, optimizer)


# By numbers of backwards, or by what each rank waits for.
NAMED = re.compile(
    "[12] backwards since the last step|can never end: .*the same number of backwards "
    "per step|backwards=. on rank 1 but"
)
UNEVEN: dict[str, Callable[[Any, Any, int], None]] = {
    "no_sync once more": _no_sync_once_more,
    "one more, step": lambda *given: _one_more(*given, lambda model, optimizer: optimizer.step()),
    "one more, clip": lambda *given: _one_more(
        *given, lambda model, optimizer: shardcore.clip_grad_norm_(model, 1.0)
    ),
    "one more, full_grad": lambda *given: _one_more(
        *given, lambda model, optimizer: shardcore.full_grad(model.head.weight)
    ),
}


def _uneven(
    rank: int, world_size: int, what: str, stage: int, precision: str, accumulate: int, nccl: bool
) -> str:
    with as_on_nccl() if nccl else nullcontext():
        run = Run(
            stage, steps=1, accumulate=accumulate, precision=precision, shard={"sync_each": False}
        )
        model, optimizer, _ = train(rank, run)
        try:
            UNEVEN[what](model, optimizer, rank)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "nothing"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("what", "precision", "accumulate", "stage", "nccl"),
    [
        ("no_sync once more", "bf16", 1, 0, False),
        ("no_sync once more", "fp32", 1, 2, True),
        ("one more, step", "fp32", 3, 0, False),
        ("one more, step", "fp32", 4, 2, True),
        ("one more, clip", "fp32", 4, 2, False),
        ("one more, full_grad", "fp32", 3, 1, False),
    ],
)
def test_uneven_backwards_are_an_error_on_every_rank(
    what: str, precision: str, accumulate: int, stage: int, nccl: bool
) -> None:
    for said in run_ranks(2, _uneven, what, stage, precision, accumulate, nccl):
        assert NAMED.search(said), said


def _one_engine_backward_more(rank: int, world_size: int, stage: int) -> str:
    model = make_net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    }
    engine, *_ = shardcore.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    try:
        for micro in range(2):
            engine.backward(loss_of(engine, batch_of(0, micro, rank)))
            if micro == rank == 0:
                engine.backward(loss_of(engine, batch_of(0, 2, rank)))
            engine.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 2])
def test_one_engine_backward_more_is_an_error_on_every_rank(stage: int) -> None:
    for said in run_ranks(2, _one_engine_backward_more, stage):
        assert "the same number of backwards per step. For loaders of different length" in said


READS = 2  # of whole values, after the error


def _rank(rank: int, store: str, stage: int, where: str, answer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=60),
    )

    def die(*_: Any) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "shard":
        comm: Any = Comm
        broadcast = Comm.broadcast
        comm.broadcast = lambda *args: (die(), broadcast(*args))
    try:
        model, optimizer, _ = train(rank, Run(stage=stage, steps=2))
        if where == "forward":
            model.blocks[1].register_forward_pre_hook(die)
        elif where == "backward":
            model.blocks[1].up.weight.register_hook(die)
        else:
            optimizer.register_step_pre_hook(die)
        for step in range(3):
            loss_of(model, batch_of(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        answer.send("no error")
    except RuntimeError as error:
        answer.send(str(error))
    for _ in range(READS if where != "shard" else 0):
        try:
            with shardcore.full_params(model):
                model.state_dict()
        except RuntimeError as error:
            answer.send(str(error))
    os._exit(0)  # a group that lost a rank cannot be left in order


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "where"), [(1, "shard"), (0, "backward"), (2, "step"), (3, "forward")]
)
def test_the_other_ranks_raise(stage: int, where: str, tmp_path: Path) -> None:
    pipes, processes = [], []
    for rank in range(3):
        ours, theirs = context.Pipe()
        process = start(_rank, rank, str(tmp_path / "store"), stage, where, theirs)
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for rank in (0, 2):
            assert pipes[rank].poll(90), f"rank {rank} still waits for the one that was killed"
            # So does what is read afterwards, instead of showing what lies in memory.
            for _ in range(1 + READS if where != "shard" else 1):
                assert "waiting for the other ranks failed: a rank ended" in pipes[rank].recv()
        processes[1].join(30)
        assert processes[1].exitcode == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
            process.join()


def _shards_again(rank: int, world_size: int) -> str:
    """Train, and shard anew after the first engine is gone, which rank 0 begins late."""
    train(rank, Run(steps=1))
    gather = Comm.all_gather_cpu

    def late(self: Comm, row: torch.Tensor, kind: Any = None, name: str = "") -> torch.Tensor:
        if rank == 0 and name == "shard":
            time.sleep(2.0)
        return gather(self, row, kind, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "all_gather_cpu", late)
        return hash_of_training(*train(rank, Run(steps=1))[:2])


@pytest.mark.more
def test_a_rank_that_comes_late_to_the_next_shard_is_waited_for() -> None:
    assert len({*run_ranks(2, _shards_again)}) == 1
