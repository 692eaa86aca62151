"""Models that nobody refers to any more give back all that they took at once, without Python's
cyclic garbage collector.
"""

import copy
import gc
import io
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# torch imports it at its first optimizer, which leaves frames to the collector
import torch._dynamo
from torch import nn
from torch.utils.data import TensorDataset

import shardcore
from tests.support.choice import combinations
from tests.support.groups import device_decides
from tests.support.meta import meta
from tests.support.models import Run, batch_of, loss_of, make_net, train
from tests.support.ranks import run_fresh, run_ranks

CPU = {"optimizer": "cpu"}
PLACES: list[dict[str, Any]] = [
    {},
    {"overlap_step": True},
    {"offload": CPU},
    {"offload": CPU, "overlap_step": True},
]
GRADS: dict[str, Any] = {"offload": {**CPU, "gradients": "cpu"}}
PARAMS: dict[str, Any] = {"offload": {**CPU, "gradients": "cpu", "params": "cpu", "ratio": 0.5}}


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    gc.disable()
    gc.collect()
    gc.freeze()  # what is here need not be looked at by each collection, of other tests neither
    yield
    gc.enable()


def parts_of(model: nn.Module, optimizer: Any) -> dict[str, "weakref.ref[Any]"]:
    """The model, its optimizer and the largest of what they keep, without keeping it."""
    engine = optimizer._engine
    parts = {
        "engine": engine,
        "reducer": engine.reducer,
        "store": engine.store,
        "comm": engine.comm,
    }
    bucket = engine.buckets[-1]
    parts |= {
        "model": model,
        "optimizer": optimizer,
        "parameter": next(model.parameters()),
        "weights": bucket.owned_weight,
    }
    return {name: weakref.ref(part) for name, part in parts.items()}


def left(parts: dict[str, "weakref.ref[Any]"]) -> list[str]:
    """What is left of these, and what a collection finds of shardcore's, tensors and modules."""
    names = [name for name, part in parts.items() if part() is not None]
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    kinds = {type(found) for found in gc.garbage}
    gc.garbage.clear()
    gc.collect()
    return names + [
        kind.__name__
        for kind in kinds
        if issubclass(kind, (torch.Tensor, nn.Module)) or "shardcore" in str(kind)
    ]


def trained(stage: int, **options: Any) -> tuple[nn.Module, Any]:
    return train(0, Run(stage=stage, steps=3, shard=options))[:2]


def use(model: nn.Module, optimizer: Any) -> None:
    """Read, copy, load and clip."""
    loss_of(model, batch_of(0, 0, 0)).backward()
    shardcore.clip_grad_norm_(model, 1.0)
    shardcore.full_grad(model.head.weight)
    optimizer.step()
    for thing in (model, optimizer):
        thing.load_state_dict(thing.state_dict())
        shardcore.load_sharded_state_dict(thing, shardcore.sharded_state_dict(thing))
    with shardcore.full_params(model):
        copied = copy.deepcopy(model)
        torch.save(model, file := io.BytesIO())
        file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        loss_of(other, batch_of(0, 0, 0)).backward()
        other.zero_grad()
        assert all(param.grad is None for param in other.parameters())
        assert other.eval() is other
    with torch.no_grad():
        model(batch_of(0, 0, 0)[0])


# --- dropped --------------------------------------------------------------------------------------


def _train_and_use(stage: int, options: dict[str, Any]) -> dict[str, "weakref.ref[Any]"]:
    model, optimizer = trained(stage, **options)
    use(model, optimizer)
    loss_of(model, batch_of(0, 0, 0)).backward()
    optimizer.step()
    return parts_of(model, optimizer)


@pytest.mark.parametrize(
    ("stage", "place"), [*combinations((0, 1, 2, 3), range(4), meet=1), (1, 4), (2, 4), (3, 5)]
)
def test_a_dropped_model_is_gone_at_once(stage: int, place: int) -> None:
    assert left(_train_and_use(stage, [*PLACES, GRADS, PARAMS][place])) == []


KINDS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "units": lambda: trained(3, units=500),
    "meta": lambda: train(0, Run(stage=3, shard={"materialize": _init}), meta())[:2],
    "auto": lambda: train(
        0, Run(steps=5, shard={"offload": {**CPU, "ratio": "auto", "device_memory_limit": 999}})
    )[:2],
    "fp16": lambda: train(0, Run(stage=1, precision="fp16"))[:2],
    "accumulate": lambda: train(0, Run(stage=2, accumulate=2, shard=GRADS))[:2],
}


def _init(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 0.1)


@pytest.mark.parametrize(
    ("kind", "decided_on_device"),
    [("units", False), ("meta", True), ("auto", False), ("fp16", True), ("accumulate", False)],
)
def test_it_is_so_however_it_was_made(kind: str, decided_on_device: bool) -> None:
    with device_decides(forced=decided_on_device):
        parts = parts_of(*KINDS[kind]())
    assert left(parts) == []


def test_what_initialize_returns_is_gone_at_once() -> None:
    def run() -> dict[str, "weakref.ref[Any]"]:
        engine, optimizer, loader, scheduler = shardcore.initialize(
            model=make_net(),
            config={
                "train_batch_size": 4,
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            },
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: 1.0
            ),
            training_data=TensorDataset(*batch_of(0, 0, 0, 16)),
        )
        for batch in loader:
            engine.backward(loss_of(engine, batch))
            engine.step()
        others = {"engine object": engine, "loader": loader, "scheduler": scheduler}
        return parts_of(engine.module, optimizer) | {
            name: weakref.ref(other) for name, other in others.items()
        }

    assert left(run()) == []


# --- dropped after an error -----------------------------------------------------------------------


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise MemoryError


def _refuse(*_: Any) -> None:
    raise MemoryError


def fail(model: nn.Module, rank: int, backward: bool) -> None:
    """Let a forward, or a backward, of the model end in the middle."""
    if backward:
        model.blocks[1].register_forward_hook(lambda module, args, output: _Fails.apply(output))
    else:
        model.blocks[1].register_forward_pre_hook(_refuse)
    with pytest.raises(MemoryError):
        loss_of(model, batch_of(0, 0, rank)).backward()


@pytest.mark.parametrize(
    ("stage", "options", "backward"),
    [(0, {}, True), (2, GRADS, True), (3, PLACES[3], False), (3, {}, True)],
)
def test_a_model_whose_pass_failed_is_gone_at_once(
    stage: int, options: dict[str, Any], backward: bool
) -> None:
    def run() -> dict[str, "weakref.ref[Any]"]:
        model, optimizer = trained(stage, **options)
        fail(model, 0, backward)
        return parts_of(model, optimizer)

    assert left(run()) == []


def _step_with_another_parameter(model: nn.Module, optimizer: Any) -> None:
    loss_of(model, batch_of(0, 0, 0)).backward()
    model.head.register_parameter("extra", nn.Parameter(torch.ones(1)))
    optimizer.step()


REFUSED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "step(grads=)": lambda model, optimizer: optimizer.step(grads=[1]),
    "step": _step_with_another_parameter,
    "clip_grad_norm_": lambda model, optimizer: shardcore.clip_grad_norm_(model, -1.0),
    "clip_grad_value_": lambda model, optimizer: nn.utils.clip_grad_value_(
        model.parameters(), -1.0
    ),
    "full_state": lambda model, optimizer: shardcore.full_state(model.head.weight, "unknown"),
    "load_sharded_state_dict": lambda model, optimizer: shardcore.load_sharded_state_dict(
        model, {}
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_whose_call_was_refused_is_gone_at_once(what: str) -> None:
    def run() -> dict[str, "weakref.ref[Any]"]:
        model, optimizer = trained(3)
        with pytest.raises((ValueError, KeyError)):
            REFUSED[what](model, optimizer)
        return parts_of(model, optimizer)

    assert left(run()) == []


def test_a_model_that_was_refused_is_not_kept() -> None:
    def refuse(
        make: Callable[[nn.Module], Any], build: Callable[[], nn.Module] = make_net
    ) -> dict[str, "weakref.ref[Any]"]:
        model = build()
        with pytest.raises((ValueError, TypeError, RuntimeError, MemoryError)):
            make(model)
        return {"model": weakref.ref(model), "parameter": weakref.ref(next(model.parameters()))}

    adam, config = shardcore.FusedAdam, {"train_batch_size": 4, "optimizer": {"type": "Adam"}}
    assert (
        left(refuse(lambda model: shardcore.shard(model, adam(model.parameters()), stage=7))) == []
    )
    assert (
        left(refuse(lambda model: shardcore.shard(model, torch.optim.NAdam(model.parameters()))))
        == []
    )
    assert (
        left(
            refuse(
                lambda model: shardcore.shard(model, adam(model.parameters()), materialize=_refuse),
                meta,
            )
        )
        == []
    )
    for wrong in (
        {"zero_optimization": {"stage": 9}},
        {"zero_optimization": {"stage": 9}, "unknown": 1},
    ):
        parts = refuse(
            lambda model, wrong=wrong: shardcore.initialize(model=model, config={**config, **wrong})
        )
        assert left(parts) == []
    assert (
        left(
            refuse(
                lambda model: shardcore.initialize(
                    model=model, config=config, model_parameters=model.gain
                )
            )
        )
        == []
    )


# --- only a part of it is kept --------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "options"), [(0, {}), (1, PLACES[1]), (3, PLACES[3])])
def test_the_model_alone_still_evaluates(stage: int, options: dict[str, Any]) -> None:
    model, optimizer = trained(stage, **options)
    x = batch_of(0, 0, 0)[0]
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    whole = make_net()
    whole.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), whole(x), rtol=0, atol=0)


@pytest.mark.parametrize(("stage", "options"), [(0, {}), (2, PLACES[1]), (3, PLACES[2])])
def test_the_optimizer_alone_still_steps(stage: int, options: dict[str, Any]) -> None:
    """It keeps what it updates: a graph that is left runs backward, and a step follows."""
    model, optimizer = trained(stage, **options)
    other, expected = trained(stage, **options)
    loss, same = loss_of(model, batch_of(9, 0, 0)), loss_of(other, batch_of(9, 0, 0))
    gone = weakref.ref(model)
    del model
    assert gone() is None
    for result, adam in ((loss, optimizer), (same, expected)):
        result.backward()
        adam.step()
    got, want = optimizer.state_dict()["state"], expected.state_dict()["state"]
    assert all(torch.equal(got[i][key], want[i][key]) for i in want for key in want[i])


@pytest.mark.parametrize(("stage", "options"), [(0, {}), (2, PLACES[3]), (3, {})])
def test_parameters_alone_are_plain_ones(stage: int, options: dict[str, Any]) -> None:
    model, optimizer = trained(stage, **options)
    head, whole = model.head.weight, model.state_dict()["head.weight"]
    parts = parts_of(model, optimizer)
    del parts["parameter"], parts["weights"], model, optimizer
    assert left(parts) == []
    with pytest.raises(
        ValueError, match=r"full_grad: Parameter is left of a sharded model that is gone.*expected"
    ):
        shardcore.full_grad(head)
    if stage < 3:
        assert torch.equal(head, whole)
        (head * 2).sum().backward()
        assert torch.equal(head.grad, torch.full_like(head, 2))
        torch.save(head, file := io.BytesIO())
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False), whole)
    else:
        with pytest.raises(RuntimeError, match=r"head\.weight is sharded"):
            head.sum()


def test_a_module_of_it_alone_still_trains() -> None:
    model, optimizer = trained(2)
    blocks = model.blocks
    gone = weakref.ref(model)
    del model
    assert gone() is None
    before = blocks[0].up.weight.detach().clone()
    blocks[0](torch.ones(2, 24)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, blocks[0].up.weight)


# --- many, one after the other --------------------------------------------------------------------


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _many() -> list[int]:
    gc.disable()
    sizes = []
    for _ in range(5):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))
        optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-3)
        model, optimizer = shardcore.shard(model, optimizer, 2, overlap_step=True)
        for _ in range(2):
            model(torch.ones(2, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        del model, optimizer
        sizes.append(_resident_bytes() >> 20)
    return sizes


def test_many_models_take_the_memory_of_one() -> None:
    sizes = run_fresh(_many)
    assert max(sizes[2:]) < sizes[1] + 20, sizes  # MiB; each takes 36 at least


def _threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _engines_threads() -> list[str]:
    """The threads of engines; the watchdog's, which starts with the first, stays."""
    return [thread.name for thread in threading.enumerate() if thread.name != "shardcore-watchdog"]


def _sharded_again(
    rank: int, world_size: int, run: Run, failing: str
) -> tuple[list[str], list[tuple[int, int]]]:
    """Train several models one after the other; returns what is left of the last, and threads
    and files after each.
    """
    gc.collect()
    gc.disable()
    try:
        counts, first, threads = [], None, len(_engines_threads())
        parts: dict[str, weakref.ref[Any]] = {}
        for _ in range(4):
            model, optimizer, losses = train(rank, run)  # an overlapped step is still on its way
            parts = parts_of(model, optimizer)
            if failing:
                fail(model, rank, backward=failing == "backward")
            del model, optimizer
            first = first or losses
            assert losses == first
            until = time.monotonic() + 10
            while len(_engines_threads()) > threads and time.monotonic() < until:
                time.sleep(0.01)
            counts.append(_threads_and_files())
        until = time.monotonic() + 10
        while not failing and counts[-1][0] > counts[0][0] and time.monotonic() < until:
            time.sleep(0.01)  # the system's threads end after Python's
            counts[-1] = _threads_and_files()
        torch.distributed.barrier()
        return left(parts), counts
    finally:
        gc.enable()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world_size", "stage", "options"),
    [(2, 2, {**GRADS, "overlap_step": True}), (3, 1, PLACES[1]), (2, 3, PLACES[3])],
)
def test_ranks_take_the_threads_and_files_of_one_model(
    world_size: int, stage: int, options: dict[str, Any]
) -> None:
    for rest, counts in run_ranks(world_size, _sharded_again, Run(stage=stage, shard=options), ""):
        assert rest == []
        (threads, files), (threads_now, files_now) = counts[0], counts[-1]
        assert threads_now <= threads, counts
        # the watchdog's connection, which opens with its first long wait
        assert files_now <= files + 1, counts


@pytest.mark.cases(1)
@pytest.mark.parametrize(("stage", "failing"), [(3, "forward"), (3, "backward")])
def test_ranks_train_anew_after_a_pass_that_failed(stage: int, failing: str) -> None:
    for rest, _ in run_ranks(2, _sharded_again, Run(stage=stage), failing):
        assert set(rest) <= {"weights"}  # of buckets whose gradients are on their way
