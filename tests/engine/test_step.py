"""Parameters that were changed since the last step are named, and a step that Ctrl-C interrupts
is whole, or made nowhere.
"""

import re
import signal
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardcore
from shardcore.engine import engine
from shardcore.engine.hooks import Membership
from shardcore.engine.reducer import Reducer
from shardcore.engine.states import DeviceStore
from shardcore.engine.step import Updater, interrupts_held_back
from tests.support.choice import few
from tests.support.models import (
    Net,
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
from tests.support.schedules import start


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.zeros(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Listed(Net):
    """Net with two tied weights, a list of parameters, a frozen one and one that no group of the
    optimizer has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[1].up.weight
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(5))])
        self.inp.bias.requires_grad_(False)
        self.left_out = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.left_out + sum(self.shifts)


def _set_in(module: nn.Module, name: str, value: Any) -> None:
    setattr(module, name, value)


def _meta_head(model: Any) -> None:
    model.head.to("meta")


def _data(param: nn.Parameter) -> None:
    param.data = torch.ones(param.shape)


# what is done between two steps -> what the error says
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "setattr": (
        lambda m: _set_in(m.head, "scale", nn.Parameter(torch.ones(5))),
        "head.scale was added and would",
    ),
    "register_parameter": (
        lambda m: m.blocks[1].register_parameter("scale", nn.Parameter(torch.ones(1))),
        "blocks.1.scale was added",
    ),
    "add_module": (
        lambda m: m.add_module("tail", nn.Linear(2, 2)),
        "tail.weight was added .*; tail.bias was added",
    ),
    "ParameterList": (
        lambda m: m.shifts.append(nn.Parameter(torch.zeros(5))),
        "shifts.1 was added",
    ),
    "replaced": (
        lambda m: _set_in(m.head, "weight", nn.Parameter(torch.ones(5, 24))),
        "head.weight was replaced",
    ),
    "adapters": (
        lambda m: _set_in(m.blocks[0], "up", Adapted(m.blocks[0].up)),
        r"blocks\.0\.up\.down was added .*; blocks\.0\.up\.up was added",
    ),
    "tied": (
        lambda m: _set_in(m.blocks[0].up, "weight", m.blocks[1].up.weight),
        r"blocks\.0\.up\.weight is blocks\.1\.up\.weight now",
    ),
    "untied": (
        lambda m: _set_in(m.blocks[2].up, "weight", nn.Parameter(torch.ones(37, 24))),
        r"blocks\.2\.up\.weight was replaced",
    ),
    "removed": (lambda m: m.blocks.__delitem__(2), r"blocks\.2\.norm\.weight was removed"),
    "moved": (_meta_head, "head.weight was replaced"),
    "data": (
        lambda m: _data(m.head.weight),
        "head.weight is no longer stored in shardcore's memory",
    ),
    "data of no group": (
        lambda m: _data(m.left_out),
        "left_out is no longer stored in shardcore's memory",
    ),
}


def sharded(stage: int, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Listed()
    optimizer = shardcore.FusedAdam(
        [p for p in model.parameters() if p.requires_grad and p is not model.left_out], lr=1e-2
    )
    return shardcore.shard(model, optimizer, stage, precision="fp32", **options)


@pytest.mark.parametrize(("change", "stage"), few([*product(CHANGES, (0, 1, 2, 3))], meet=1))
def test_the_next_step_names_what_changed(change: str, stage: int) -> None:
    model, optimizer = sharded(stage)
    apply, text = CHANGES[change]
    stepped(model, optimizer, 0, 0)
    loss_of(model, batch_of(1, 0, 0)).backward()
    apply(model)
    with pytest.raises(ValueError, match="step: .*" + text):
        optimizer.step()


@pytest.mark.parametrize(
    "change", ["setattr", "add_module", "ParameterList", "replaced", "adapters"]
)
def test_without_the_check_it_would_train_something_else(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Membership, "check", lambda self, op: None)
    model, optimizer = sharded(2)
    known = set(model.parameters())
    CHANGES[change][0](model)
    new = [param for param in model.parameters() if param not in known]
    assert new
    before = hash_of(new)
    if change != "add_module":
        loss_of(model, batch_of(0, 0, 0)).backward()
    optimizer.step()
    assert hash_of(new) == before


def _in_place(group: dict[str, Any]) -> None:
    group["lr"].fill_(-1.0)


OPTIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a number": (lambda group: group.update(lr=-1.0), "lr is -1.0"),
    "a tensor": (lambda group: group.update(lr=torch.tensor(-1.0)), "lr is -1.0"),
    "two numbers in a tensor": (lambda group: group.update(lr=torch.zeros(2)), "lr is a float32"),
    "a tensor in place": (_in_place, "lr is -1.0"),
    "a list": (lambda group: group.update(betas=[0.9, 1.0]), r"betas\[1\] is 1.0"),
    "an equal value of another type": (lambda group: group.update(maximize=0), "maximize is 0"),
    "a fixed one": (lambda group: group.update(amsgrad=True), "amsgrad is True"),
}


@pytest.mark.parametrize("change", OPTIONS)
def test_a_step_checks_options_that_changed(change: str) -> None:
    model, optimizer = sharded(2)
    apply, text = OPTIONS[change]
    if change == "a tensor in place":
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
    for step in range(2):
        stepped(model, optimizer, step, 0)
    apply(optimizer.param_groups[0])
    loss_of(model, batch_of(2, 0, 0)).backward()
    for _ in range(2):  # what was refused once is not taken for checked
        with pytest.raises((TypeError, ValueError), match="step: .*" + text):
            optimizer.step()


def _scheduled(lrs: list[Any]) -> str:
    model, optimizer = sharded(2)
    lr = torch.tensor(0.0) if lrs[0] == "in place" else None
    for step, value in enumerate(lrs[-3:]):
        optimizer.param_groups[0]["lr"] = value if lr is None else lr.fill_(value)
        stepped(model, optimizer, step, 0)
    return hash_of_training(model, optimizer)


def test_a_step_uses_the_options_that_it_finds() -> None:
    lrs = [0.25, 0.25, 0.5]  # float32 has them
    assert _scheduled(["in place", *lrs]) == _scheduled(lrs) != _scheduled([0.25] * 3)


def _on_rank_1(rank: int, world_size: int, changes: list[str], stage: int) -> list[str]:
    texts = []
    for change in changes:
        model, optimizer = sharded(stage)
        loss_of(model, batch_of(0, 0, rank)).backward()
        if rank == 1:
            CHANGES[change][0](model)
        try:
            optimizer.step()
            texts.append("no error")
        except ValueError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("stage", [0, 3])
def test_a_change_on_one_rank_is_refused_on_all(stage: int) -> None:
    other, own = run_ranks(2, _on_rank_1, ["replaced", "data"], stage)
    assert "head.weight was replaced" in own[0]
    assert "head.weight is no longer stored" in own[1]
    assert all("rank 1 refused: " in text for text in other)


def _data_before_forward(rank: int, world_size: int, stage: int) -> str:
    model, optimizer = sharded(stage)
    if rank == 1:
        _data(model.head.weight)
    try:
        loss_of(model, batch_of(0, 0, rank)).backward()
        optimizer.step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("stage", [2, 3])
def test_data_assigned_before_a_forward(stage: int) -> None:
    other, own = run_ranks(2, _data_before_forward, stage)
    assert "head.weight is no longer stored in shardcore's memory" in own
    assert (
        "rank 1 refused" if stage < 3 else "can never end: rank 0 for the weights of blocks.0"
    ) in other


def _averaged_twice(rank: int, world_size: int, inside: str) -> str:
    from torch.distributed._composable import replicate

    model, optimizer = sharded(0)
    if inside == "replicate()":
        replicate(model.blocks[0])
    else:
        model.blocks[0] = nn.parallel.DistributedDataParallel(model.blocks[0])
    loss_of(model, batch_of(0, 0, rank)).backward()
    with pytest.raises(ValueError) as refusal:
        optimizer.step()
    return str(refusal.value)


@pytest.mark.parametrize("inside", ["replicate()", "DistributedDataParallel"])
def test_what_would_average_a_part_a_second_time_is_refused(inside: str) -> None:
    for text in run_ranks(2, _averaged_twice, inside):
        assert text.startswith(f"step: blocks.0 is wrapped in {inside}, and both would average")


def test_modules_around_others_only_change_names() -> None:
    model, optimizer, _ = train(0, Run(stage=2, steps=0))
    plain, plain_optimizer, _ = train(0, Run(stage=2, steps=0))
    for step in range(2):
        for each, its in ((model, optimizer), (plain, plain_optimizer)):
            loss_of(each, batch_of(step, 0, 0)).backward()
            if step == 0 and each is model:
                model.blocks[0] = checkpoint_wrapper(model.blocks[0])
            its.step()
            its.zero_grad()
    assert hash_of(model.parameters()) == hash_of(plain.parameters())


def _alone(rank: int, world_size: int, stage: int) -> tuple[list[str], list[str]]:
    """Load weights, then an optimizer state, on rank 1 only, then on all; and on another model
    on all at once.
    """
    texts, hashes = [], []
    for alone in (True, False):
        model, optimizer = sharded(stage)
        state, adam = model.state_dict(), optimizer.state_dict()
        for load, what in ((model.load_state_dict, state), (optimizer.load_state_dict, adam)):
            if alone:
                if rank == 1:
                    load(what)
                loss_of(model, batch_of(0, 0, rank)).backward()
                with pytest.raises(ValueError) as refusal:
                    optimizer.step()
                texts.append(str(refusal.value))
                optimizer.zero_grad()
            load(what)
        for step in range(2):  # the second one does not hold the loads against any rank
            loss_of(model, batch_of(step, 0, rank)).backward()
            optimizer.step()
        hashes.append(hash_of_training(model, optimizer))
    return texts, hashes


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_one_rank_loads_alone_is_refused_on_all(stage: int) -> None:
    for (weights, states), (after, expected) in run_ranks(2, _alone, stage):
        assert "is loaded on rank 1 but unchanged on rank 0" in weights
        assert "the optimizer state is loaded on rank 1 but not loaded on rank 0" in states
        assert after == expected


SPLIT = {"optimizer": "cpu", "ratio": 0.4}


def _through_data(rank: int, world_size: int, run: Run) -> list[str]:
    """Clip weights as a WGAN does; what the state dicts between say."""
    model, optimizer, _ = train(rank, run)
    said: list[str] = []

    def save() -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saved = model.state_dict()
            shardcore.sharded_state_dict(model)
        said.extend(f"{warning.category.__name__} {warning.message}" for warning in caught)
        return saved["blocks.1.up.weight"].abs().max().item() > 0.011

    with shardcore.full_params(model), torch.no_grad():
        model.head.weight.clamp_(-0.01, 0.01)
    save()
    assert not said, "an edit that counts"
    with shardcore.full_params(model):
        for param in model.blocks[1].parameters():
            param.data.clamp_(-0.01, 0.01)
    lost = save()
    save()
    stepped(model, optimizer, rank, 7)
    save()
    with shardcore.full_params(model):
        model.inp.weight.data.zero_()
    save()
    return [str(lost), *said]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("stage", "offload"), [(0, None), (1, SPLIT), (2, None)])
def test_an_edit_through_data_that_is_lost_is_named_once(stage: int, offload: Any) -> None:
    run = Run(stage=stage, precision="bf16", steps=2, shard={"offload": offload})
    names: list[set[str]] = [set(), set()]
    for lost, *said in run_ranks(2, _through_data, run):
        assert lost == "True"
        for text in said:
            assert re.match(
                r"UserWarning (sharded_)?state_dict: the weights of .* were edited behind autograd",
                text,
            )
            names["inp.weight" in text].update(re.findall(r"[\w.]+\.(?:weight|bias)", text))
        assert len(said) <= 2
    assert {"blocks.1.norm.weight", "blocks.1.up.weight", "blocks.1.down.weight"} <= names[0]
    assert names[1] == {"inp.weight"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "run",
    [
        Run(stage=3, precision="bf16"),  # full_params compares the weights with the shards
        Run(stage=3, precision="bf16", shard={"offload": SPLIT}),
        Run(stage=2),
        Run(stage=2, precision="bf16", adam={"master": "split"}),
    ],
)
def test_an_edit_through_data_counts_at_stage_3_and_where_weights_are_masters(run: Run) -> None:
    assert run_ranks(2, _through_data, run) == [["False"]] * 2


def test_overflow_to_non_finite_weights_is_no_edit() -> None:
    model, _, _ = train(0, Run(stage=2, precision="fp16", steps=0))
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    model.load_state_dict({**model.state_dict(), "inp.weight": torch.full((24, 10), 1e6)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.state_dict()["inp.weight"].eq(1e6).all()


IN_STEP: dict[str, tuple[Any, str]] = {
    "before it is decided": (Reducer, "reduce_pending"),
    "as it is decided": (Updater, "decide"),
    "while the weights change": (DeviceStore, "step"),
    "behind that": (engine, "note_written"),
}


def _interrupted(
    rank: int,
    world_size: int,
    stage: int,
    place: str,
    who: int,
    overlap: bool,
    by: signal.Signals = signal.SIGINT,
) -> tuple[str, int]:
    """Train two steps; in the first one rank `who` is interrupted, and goes on. A step that was
    refused is made once more.
    """
    model, optimizer = start(rank, Run(stage), overlap, late=False)
    owner, name = IN_STEP[place]
    call, count = getattr(owner, name), [0]

    def interrupted(*arguments: Any) -> Any:
        if rank == who and not count[0]:
            count[0] += 1
            signal.raise_signal(by)
        return call(*arguments)

    before = signal.signal(by, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        for step in range(2):
            micro_steps(model, optimizer, rank, step, 1)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                count[0] += 1
                if place == "before it is decided":
                    optimizer.step()
            except ValueError as error:  # here, of the rank that was interrupted
                if "rank 1 refused: KeyboardInterrupt" not in str(error):
                    raise
                optimizer.step()
            optimizer.zero_grad()
    signal.signal(by, before)
    return hash_of_training(model, optimizer), count[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "place", "overlap", "by"),
    [
        *((2, place, False, signal.SIGINT) for place in IN_STEP),
        (3, "as it is decided", True, signal.SIGINT),
        # whose handler raises, as where jobs are preempted
        (2, "while the weights change", False, signal.SIGTERM),
    ],
)
def test_a_step_that_is_interrupted_is_whole_or_made_nowhere(
    stage: int, place: str, overlap: bool, by: signal.Signals
) -> None:
    expected = [hashed for hashed, _ in run_ranks(2, _interrupted, stage, place, -1, overlap)]
    (first, none), (second, interrupted) = run_ranks(2, _interrupted, stage, place, 1, overlap, by)
    assert [first, second] == expected
    assert (none, interrupted) == (0, 2), "raised once, and passed on once"


def test_every_signal_that_came_is_delivered() -> None:
    """Also behind a handler that raises; handlers are back then."""
    seen: list[int] = []
    early: list[int] = []

    def interrupted(*numbers: int) -> None:
        with interrupts_held_back():
            for number in numbers:
                signal.raise_signal(number)
            early.extend(seen)
            if not numbers:
                raise ZeroDivisionError

    def mine(number: int, frame: Any) -> None:
        seen.append(number)

    old = (
        signal.signal(signal.SIGTERM, mine),
        signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted(signal.SIGINT, signal.SIGTERM, signal.SIGTERM)
        assert early == []
        assert seen == [signal.SIGTERM, signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(ZeroDivisionError):
            interrupted()
    finally:
        signal.signal(signal.SIGTERM, old[0])
        signal.signal(signal.SIGINT, old[1])


class OnDevice(torch.Tensor):
    """A learning rate that is taken for one on a GPU; counts how often the host reads it."""

    reads = 0

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (
            torch.Tensor.item,
            torch.Tensor.tolist,
            torch.Tensor.__float__,
            torch.Tensor.__bool__,
        ):
            OnDevice.reads += 1
        return super().__torch_function__(function, types, args, kwargs or {})


_READERS: dict[str, Callable[[list[Any], Any], Any]] = {
    "FusedAdam": lambda params, lr: shardcore.FusedAdam(params, lr=lr),
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "Adagrad": lambda params, lr: torch.optim.Adagrad(params, lr=lr),
    "Lion": lambda params, lr: shardcore.Lion(params, lr=lr),
}


def _reads_of_lr(rank: int, world_size: int, name: str, sharded: bool) -> tuple[list[int], bool]:
    """Return how often each step reads a learning rate, and whether weights are those of a
    number.
    """
    reads, hashes = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "shardcore.optim.group_options.on_device", lambda value: isinstance(value, OnDevice)
        )
        for lr in (torch.tensor(0.01).as_subclass(OnDevice), float(torch.tensor(0.01))):
            torch.manual_seed(0)
            model: Any = Net()
            optimizer = _READERS[name](list(model.parameters()), lr)
            if sharded:
                model, optimizer = shardcore.shard(model, optimizer, 2, precision="fp32")
            for step in range(3):
                loss_of(model, batch_of(step, 0, rank)).backward()
                before = OnDevice.reads
                optimizer.step()
                reads.append(OnDevice.reads - before)
                optimizer.zero_grad()
            hashes.append(hash_of(model.state_dict().values()))
    return reads[:3], hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("world_size", "name", "sharded"),
    [
        (1, "FusedAdam", False),
        (1, "SGD", True),
        (2, "FusedAdam", True),
        (2, "SGD", True),
        (2, "Lion", True),
    ],
)
def test_a_step_reads_a_learning_rate_of_the_device_once(
    world_size: int, name: str, sharded: bool
) -> None:
    run = run_ranks(world_size, _reads_of_lr, name, sharded)
    assert run == [([1, 1, 1], True)] * world_size
