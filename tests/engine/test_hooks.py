"""Stage 3 under what people do to models: the bits of stage 1, or an error that names the
parameter and says what to do.
"""

import copy
import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore.engine.bucket import Bucket
from shardcore.engine.unshard import Unsharder
from tests.support.models import (
    Block,
    Net,
    Run,
    assert_one,
    batch_of,
    hash_of_training,
    loss_of,
    stepped,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.schedules import recording
from tests.support.tiers import PARAMS

# --- models ---------------------------------------------------------------------------------------


@dataclass
class Output:
    x: torch.Tensor
    more: Any = None


class KeywordBlock(Block):
    """Takes keywords only; what it returns lies in a dataclass in a dict in a tuple."""

    def forward(self, *, inputs: Output) -> Any:
        y = super().forward(inputs.x)
        return ({"out": Output(y, [y * 2])},)


class Structured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([KeywordBlock(24, 37) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> Any:
        out = Output(self.inp(x))
        for block in self.blocks:
            out = block(inputs=out)[0]["out"]
            out = Output(out.x + 0.1 * out.more[0])
        return self.head(out.x) * self.gain


class Box:  # nobody can look into it
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class BoxBlock(Block):
    def forward(self, box: Any) -> Any:
        return Box(super().forward(box.x))


class Boxes(Net):
    """Tensors pass from block to block in objects of a class of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([BoxBlock(24, 37) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box = Box(self.inp(x))
        for block in self.blocks:
            box = block(box)
        return self.head(box.x) * self.gain


class PartlyCheckpointed(Net):
    """A part of each block is recomputed, beside frozen weights."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.requires_grad_(False)
            block.forward = self._forward_of(block, reentrant)

    @staticmethod
    def _forward_of(block: Any, reentrant: bool) -> Any:
        def part(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(block.up(block.norm(x)))

        return lambda x: x + block.down(checkpoint(part, x, use_reentrant=reentrant))


class Hooked(Net):
    """Users' hooks, weight norm, edits in place of outputs, low-precision buffers and frozen
    parameters of other dtypes.
    """

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.up)
            block.register_buffer("slope", torch.full((24,), 0.5, dtype=torch.bfloat16))
            block.exact = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
            block.index = nn.Parameter(torch.arange(5), requires_grad=False)
            block.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
            block.register_forward_hook(
                lambda m, args, out: (out * m.slope * m.exact.sum() + m.index.sum() * 0.1).float()
            )
            block.down.register_full_backward_hook(
                lambda module, grad_in, grad_out: (grad_in[0] * 1.01,)
            )
        self.blocks[1].down.weight.register_hook(lambda grad: grad * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x).mul_(0.9).relu_()
        return self.head(x) * self.gain


class Lists(Net):
    """Layers in lists in a list, as many write transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.ModuleList([Block(24, 37), nn.Linear(24, 24)]) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block, mix in self.blocks:
            x = mix(block(x))
        return self.head(x) * self.gain


MODELS: dict[str, Any] = {
    "lists": Lists,
    "structured": Structured,
    "boxes": Boxes,
    "partly checkpointed": lambda: PartlyCheckpointed(False),
    "partly checkpointed, reentrant": lambda: PartlyCheckpointed(True),
    "hooked": Hooked,
}


def _hash_of_model(rank: int, world_size: int, kind: str, stage: int) -> str:
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer: Any = shardcore.FusedAdam(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    model, optimizer = shardcore.shard(model, optimizer, stage, precision="fp32")
    for step in range(2):
        stepped(model, optimizer, rank, step)
    return hash_of_training(model, optimizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", MODELS)
def test_models_train_as_at_stage_1(kind: str) -> None:
    assert_one(hash_ for stage in (1, 3) for hash_ in run_ranks(2, _hash_of_model, kind, stage))


# --- what is done to them -------------------------------------------------------------------------


def children(model: Any, optimizer: Any, rank: int) -> Any:
    """Modules that are no unit, called on their own: without gradients, in place of the model,
    beside it.
    """
    with torch.no_grad():
        said = model.head(torch.ones(2, 24)).sum().item()
    x = model.inp(torch.ones(3, 10))
    for block in model.blocks:
        x = block(x)
    loss = (
        model.head(x).sum() + model(torch.ones(2, 10)).sum() + model.head(torch.ones(2, 24)).sum()
    )
    loss.backward()
    optimizer.step()
    return said


def data_edits(model: Any, optimizer: Any, rank: int) -> Any:
    with shardcore.full_params(model):
        model.head.weight.data.mul_(0.5)
        model.blocks[1].up.weight.data.clamp_(-0.1, 0.1)


def steps_in_full_params(model: Any, optimizer: Any, rank: int) -> Any:
    """Weights held whole are the new ones after a step, and edits between steps count."""
    with shardcore.full_params(model):
        stepped(model, optimizer, rank, 3)
        said = model.head.weight.sum().item()
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(0.5)
        stepped(model, optimizer, rank, 4)
    with torch.no_grad():
        return said, model(torch.ones(2, 10)).sum().item()


def loads_after_a_failed_forward(model: Any, optimizer: Any, rank: int) -> Any:
    doubled = {key: value * 2 for key, value in model.state_dict().items()}
    handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 10))
    handle.remove()
    model.load_state_dict(doubled)
    with torch.no_grad():
        return model(torch.ones(1, 10)).sum().item()


def wrappers(model: Any, optimizer: Any, rank: int) -> Any:
    """Names in a state dict that are not those of parameters; a wrapper's state dict; loading it
    back.
    """
    for index in range(3):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    outer = nn.Sequential(model)
    state = outer.state_dict()
    assert "0.blocks.1.up.weight" in state
    stepped(outer, optimizer, rank, 3)
    outer.load_state_dict(state)
    return sum(value.double().sum().item() for value in state.values())


def graphs(model: Any, optimizer: Any, rank: int) -> Any:
    loss = loss_of(model, batch_of(5, 0, rank))
    one = torch.autograd.grad(loss, model.blocks[2].up.weight, retain_graph=True)[0].sum().item()
    loss.backward(retain_graph=True)
    loss.backward()
    loss_of(model, batch_of(6, 0, rank)).backward(
        inputs=[model.head.weight, model.blocks[1].up.weight]
    )
    x = torch.ones(3, 10, requires_grad=True)
    model(x).sum().backward(inputs=[x])
    optimizer.step()
    return one, x.grad.sum().item()


def failures(model: Any, optimizer: Any, rank: int) -> Any:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    for handle in (
        model.blocks[1].up.weight.register_hook(fail),
        model.blocks[1].register_forward_hook(fail),
    ):
        with pytest.raises(RuntimeError, match="planted"):
            loss_of(model, batch_of(5, 0, rank)).backward()
        handle.remove()
    with torch.no_grad():
        model(torch.ones(1, 10))


def toggled(model: Any, optimizer: Any, rank: int) -> Any:
    for block in model.blocks:
        block.requires_grad_(False)
    stepped(model, optimizer, rank, 3)
    model.blocks[1].requires_grad_(True)
    stepped(model, optimizer, rank, 4)


def copies(model: Any, optimizer: Any, rank: int) -> Any:
    """An average in a copy, a pickle, a learning rate finder: state dicts saved, steps made,
    state dicts put back.
    """
    with shardcore.full_params(model), torch.no_grad():
        average, twin = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    state, adam = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for step in range(2):
        optimizer.param_groups[0]["lr"] *= 3
        stepped(model, optimizer, rank, step)
        with shardcore.full_params(model), torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.1)
    model.load_state_dict(state)
    optimizer.load_state_dict(adam)
    return [each(torch.ones(2, 10)).sum().item() for each in (average, twin)]


def other_defaults(model: Any, optimizer: Any, rank: int) -> Any:
    """A default device and dtype of torch's that are not the model's; 257 is no bfloat16."""
    batch, state = batch_of(3, 0, rank), optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"].fill_(256.0)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer.load_state_dict(state)
        loss_of(model, batch).backward()
        shardcore.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state, shown = optimizer.state_dict(), optimizer.state[model.gain]["step"]
        optimizer.load_state_dict(state)
        optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
        optimizer.load_state_dict(state)
        model.load_state_dict(model.state_dict())
        steps = [
            shardcore.full_state(model.gain, "step"),
            shardcore.sharded_state_dict(optimizer)["gain.step"],
            shown,
        ]
        norm = shardcore.clip_grad_norm_([], 1.0), shardcore.clip_grad_norm_(model, 1.0)
        optimizer.step()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    steps += [entry["step"] for entry in state["state"].values()]
    assert all(step.dtype == torch.float32 and step.item() == 257 for step in steps)
    return [each.item() for each in norm]


def autocast(model: Any, optimizer: Any, rank: int) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, batch_of(3, 0, rank))
    loss.backward()
    optimizer.step()


DOINGS = [
    children,
    data_edits,
    steps_in_full_params,
    loads_after_a_failed_forward,
    wrappers,
    graphs,
    failures,
    toggled,
    copies,
    other_defaults,
    autocast,
]


def _done(rank: int, world_size: int, stage: int, doing: Any) -> tuple[Any, str]:
    model, optimizer, _ = train(rank, Run(stage=stage, steps=2))
    said = doing(model, optimizer, rank)
    optimizer.zero_grad()
    stepped(model, optimizer, rank, 9)
    return said, hash_of_training(model, optimizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize("doing", DOINGS)
def test_what_is_done_counts_as_at_stage_1(doing: Any) -> None:
    results = [run_ranks(2, _done, stage, doing) for stage in (1, 3)]
    assert results[0] == results[1]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rnn.flatten_parameters()
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("stage", [1, 3])
def test_cudnn_takes_no_weights_of_a_recurrent_network(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA flatten_parameters gives weights other memory; after shard it does not, and of
    a copy it does.
    """

    def flatten(module: nn.RNNBase) -> None:
        for weight in module._flat_weights:
            weight.data = weight.data.clone()

    torch.manual_seed(0)
    model: Any = Recurrent()
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), stage)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    for _ in range(2):
        model(torch.ones(2, 5, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to("cpu")
    with shardcore.full_params(model):
        copied = copy.deepcopy(model)
    before = [weight.data_ptr() for weight in copied.rnn.parameters()]
    copied(torch.ones(2, 5, 6))
    assert all(
        weight.data_ptr() != old
        for weight, old in zip(copied.rnn.parameters(), before, strict=True)
    )


# --- interrupts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "numbers", "offload"),
    [("unsharding", (0, 1, 2), None), ("resharding", (0, 1), PARAMS)],
)
def test_an_interrupt_between_two_buckets_of_a_unit(
    what: str, numbers: tuple[int, ...], offload: Any
) -> None:
    norms = {"keep_fp32": [nn.LayerNorm]}  # so units have two buckets each
    call = Unsharder._swap_memory

    def run(interrupted: int | None) -> str:
        model, optimizer, _ = train(
            0, Run(stage=3, steps=1, precision="bf16", shard=norms | {"offload": offload})
        )
        count = iter(range(99))

        def swap(unsharder: Unsharder, bucket: Bucket, op: str, *arguments: Any) -> None:
            if op == what and next(count) == interrupted:
                raise KeyboardInterrupt
            call(unsharder, bucket, op, *arguments)

        if interrupted is not None:
            with pytest.MonkeyPatch.context() as patch, torch.no_grad():
                patch.setattr(Unsharder, "_swap_memory", swap)
                with pytest.raises(KeyboardInterrupt):
                    model(batch_of(7, 0, 0)[0])
        stepped(model, optimizer, 0, 8)
        return hash_of_training(model, optimizer)

    assert {run(number) for number in numbers} == {run(None)}


# --- errors ---------------------------------------------------------------------------------------


def test_memory_that_a_user_put_there_is_named_and_left_alone() -> None:
    model, optimizer, _ = train(0, Run(stage=3))
    theirs = torch.ones(5, 24)
    closed = model.head.weight.data
    model.head.weight.data = theirs
    for use in (lambda: model(torch.ones(1, 10)), optimizer.step):
        with pytest.raises(
            ValueError, match=r"head\.weight is no longer stored in shardcore's memory"
        ):
            use()
    assert torch.equal(theirs, torch.ones(5, 24))
    model.head.weight.data = closed
    with (
        pytest.raises(
            ValueError, match=r"head\.weight is no longer stored in .*Edit weights in place"
        ),
        shardcore.full_params(model),
    ):
        model.head.weight.data = theirs
    assert torch.equal(theirs, torch.ones(5, 24))


def test_a_cast_in_full_params_is_named() -> None:
    model, _, _ = train(0, Run(stage=3))
    with (
        pytest.raises(ValueError, match=r"gain is no longer stored in shardcore's memory.*cast"),
        shardcore.full_params(model),
    ):
        model.half()


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.half(),
        copy.deepcopy,
        pickle.dumps,
        lambda model: torch.save(model, io.BytesIO()),
        lambda model: model.blocks[1].up(torch.ones(24)),
        lambda model: (
            torch.autograd.grad(
                model(torch.ones(1, 10)).sum(), model.inp.weight, create_graph=True
            )[0]
            .sum()
            .backward()
        ),
    ],
)
def test_other_uses_name_a_parameter(use: Any) -> None:
    model, optimizer, _ = train(0, Run(stage=3))
    before = hash_of_training(model, optimizer)
    with pytest.raises(RuntimeError, match=r"\w+ is sharded .*full_params.*state_dict.*\.save\.$"):
        use(model)
    assert hash_of_training(model, optimizer) == before


def test_the_profiler_that_reads_weights_is_named_while_it_runs() -> None:
    model, optimizer, _ = train(0, Run(stage=3, steps=0))
    cpu = [torch.profiler.ProfilerActivity.CPU]

    def names_it() -> bool:
        with pytest.raises(RuntimeError, match="is sharded") as raised:
            copy.deepcopy(model)
        return "with_stack=True" in str(raised.value)

    assert not names_it()
    with torch.profiler.profile(activities=cpu):
        assert not names_it()
        stepped(model, optimizer, 0, 0)
    with shardcore.full_params(model):
        with torch.profiler.profile(activities=cpu, with_stack=True):
            copy.deepcopy(model)
        copy.deepcopy(model)
    with torch.profiler.profile(activities=cpu, with_stack=True):
        assert names_it()
    assert not names_it()
    stepped(model, optimizer, 0, 1)


# --- memory ---------------------------------------------------------------------------------------


def test_frozen_units_are_resharded_before_the_next_are_gathered() -> None:
    """As trainable ones: the one in use, and the next. No gradient marks the end of a frozen
    unit's backward.
    """
    model = Net(depth=5)
    for block in model.blocks:
        block.up.requires_grad_(False)
    model, _, _ = train(0, Run(stage=3, steps=1), model)
    with recording() as events:
        loss_of(model, batch_of(1, 0, 0)).backward()
    whole = 0
    for event in events:
        whole += {"+": 1, "-": -1}[event[0]]
        assert whole <= 3, f"{event} of {events}"


class Queries(nn.Module):
    """A learned input, which a frozen part takes as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.net = nn.Parameter(torch.ones(4, 10)), Net()

    def forward(self) -> torch.Tensor:
        return self.net(self.queries)


def test_hooks_of_an_input_that_stays_do_not_pile_up() -> None:
    model: Any = Queries()
    model, optimizer = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), 3, units=[model.net]
    )
    counts = set()
    for _ in range(3):
        model().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.add(len(model.queries._backward_hooks))
    assert len(counts) == 1
