"""Wrapped modules give the gradients of plain ones, bit for bit, and keep what was asked for
between forward and backward.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore import apply_activation_checkpointing, checkpoint_wrapper
from shardcore.extras import activations
from tests.support.activations import Live
from tests.support.models import Block, Net, adam, hash_of, hash_of_training, make_net, stepped
from tests.support.ranks import run_ranks

X = torch.linspace(-1, 1, 640).view(64, 10)


class Dropping(Net):
    """With dropout, and blocks of whose inputs one is not contiguous, and one is no
    floating-point tensor.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(nn.functional.dropout(x, 0.3).t().contiguous().t())
        return self.head(x)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(X).square().mean().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "offloaded": {"offload_to_cpu": True},
    "every second": {"every": 2, "offload_to_cpu": True},
    "chosen": {"check_fn": lambda module: isinstance(module, nn.Linear)},
    "with results kept": {"save": [torch.ops.aten.addmm.default], "offload_to_cpu": True},
}


@pytest.mark.parametrize("kind", [Net, Dropping])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_plain_model(way: str, kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(model, **WAYS[way])
    for _ in range(3):  # buffers are used again
        for got, expected in zip(gradients(model), gradients(plain), strict=True):
            assert torch.equal(got, expected)


def test_a_broken_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = activations._Offloaded.fetch
    monkeypatch.setattr(activations._Offloaded, "fetch", lambda saved: fetch(saved) + 1e-3)
    with pytest.raises(AssertionError):
        test_gradients_are_those_of_the_plain_model("offloaded", Net)


def alive_after_forward(model: nn.Module) -> int:
    x = X.clone()
    with Live([*model.parameters(), *model.buffers(), x]) as live:
        loss = model(x).square().mean()
        alive = live.alive_bytes
    loss.backward()
    return alive


def test_memory_between_forward_and_backward() -> None:
    depth, inputs = 8, 64 * 24 * 4
    models = [Net(depth=depth) for _ in range(3)]
    apply_activation_checkpointing(models[1])
    apply_activation_checkpointing(models[2], offload_to_cpu=True)
    plain, recomputed, offloaded = map(alive_after_forward, models)
    assert recomputed + depth * 64 * 37 * 4 < plain  # at least what tanh keeps of each block
    # Two calls' inputs are on their way still; of the first block what `inp` returned.
    assert offloaded <= recomputed - (depth - 2) * inputs


def test_host_memory_is_that_of_the_longest_step() -> None:
    activations._offload_of.cache_clear()
    block, plain = checkpoint_wrapper(Block(24, 37), offload_to_cpu=True), Block(24, 37)
    plain.load_state_dict(block.state_dict())
    for dtype in (torch.float32, torch.bfloat16):
        for length in (3, 64, 5, 63, 80, 1):
            for module in (block.to(dtype), plain.to(dtype)):
                module.zero_grad()
                module(module(torch.ones(length, 24, dtype=dtype))).sum().backward()
            assert hash_of(p.grad for p in block.parameters()) == hash_of(
                p.grad for p in plain.parameters()
            )
    # Two calls' inputs, of which one is kept in each buffer: not two buffers for each length.
    assert activations._offload_of(torch.device("cpu")).tier.bytes_allocated == 2 * 80 * 24 * 4


class Named(nn.Linear):
    """Its forward has arguments of the names that functions on its way have."""

    def forward(
        self, x: torch.Tensor, *, options: float, function: float, debug: bool
    ) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * options + function * debug


def test_a_forward_may_name_its_arguments_as_it_likes() -> None:
    module = checkpoint_wrapper(Named(4, 4))
    given = {"options": 2.0, "function": 3.0, "debug": True}
    x = torch.ones(2, 4)
    y = module(x, **given)
    assert torch.equal(y, nn.functional.linear(x, module.weight, module.bias) * 2 + 3)
    y.sum().backward()
    assert torch.equal(module.weight.grad, torch.full((4, 4), 4.0))


def test_every_second_block_begins_with_the_first() -> None:
    model = make_net()
    assert apply_activation_checkpointing(model, every=2) == ["blocks.0", "blocks.2"]


def test_names_class_and_copies_stay() -> None:
    plain, model = make_net(), make_net()
    names = apply_activation_checkpointing(model, offload_to_cpu=True)
    assert names == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model.blocks[0], Block)
    assert repr(model) == repr(plain)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert hash_of(gradients(twin)) == hash_of(gradients(plain))
        with pytest.raises(ValueError, match="already wrapped"):
            checkpoint_wrapper(twin.blocks[0])


def test_forward_without_gradients_is_left_alone() -> None:
    model = make_net()
    apply_activation_checkpointing(model, offload_to_cpu=True)
    with torch.no_grad(), torch.inference_mode():
        assert torch.equal(model(X), make_net()(X))


def test_a_graph_that_is_kept_gives_its_gradients_twice() -> None:
    model, plain = make_net(), make_net()
    apply_activation_checkpointing(model, offload_to_cpu=True)
    loss, expected = model(X).square().mean(), gradients(plain)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert hash_of(param.grad for param in model.parameters() if param.grad is not None) == hash_of(
        expected
    )


class Joining(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack(inputs).square().sum()


def test_each_of_several_inputs_is_copied_back_once_a_backward() -> None:
    inputs = [torch.full((40,), float(i), requires_grad=True) for i in range(3)]
    loss = checkpoint_wrapper(Joining(), offload_to_cpu=True)(*inputs)
    tier = activations._offload_of(torch.device("cpu")).tier
    for backwards in (1, 2):
        before = tier.bytes_from_tier
        loss.backward(retain_graph=True)
        assert tier.bytes_from_tier - before == 3 * 40 * 4
        assert all(torch.equal(x.grad, 2.0 * backwards * x) for x in inputs)


def test_an_input_that_is_changed_while_it_is_copied_is_an_error() -> None:
    block = checkpoint_wrapper(Block(24, 37), offload_to_cpu=True)
    x = torch.ones(4, 24, requires_grad=True) * 1
    y = block(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_refusals() -> None:
    with pytest.raises(TypeError, match="module is of type Tensor"):
        checkpoint_wrapper(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="partition is True"):
        checkpoint_wrapper(Block(2, 2), partition=True)  # type: ignore[arg-type]
    patched = Block(2, 2)
    patched.forward = patched.forward  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="replaced the forward"):
        checkpoint_wrapper(patched)
    with pytest.raises(ValueError, match="every is 0"):
        apply_activation_checkpointing(Net(), every=0)
    with pytest.raises(ValueError, match="no module of the Linear is chosen"):
        apply_activation_checkpointing(nn.Linear(2, 2))


def _trained(
    rank: int, world_size: int, stage: int, options: dict[str, Any] | None, after: bool = False
) -> str:
    """Return the hash of three steps; options: of the checkpointing, which comes before or after
    `shard`.
    """
    model: Any = make_net()
    if options is not None and not after:
        apply_activation_checkpointing(model, **options)
    model, optimizer = shardcore.shard(model, adam(model), stage)
    if options is not None and after:
        apply_activation_checkpointing(model, **options)
    for step in range(3):
        stepped(model, optimizer, rank, step)
    return hash_of_training(model, optimizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_training_has_the_same_bits(world_size: int) -> None:
    expected = run_ranks(world_size, _trained, 0, None)
    for stage, after in [(2, False), (3, False), (3, True)]:
        assert run_ranks(world_size, _trained, stage, {"offload_to_cpu": True}, after) == expected


def _with_parts(rank: int, world_size: int, offload_to_cpu: bool) -> tuple[bool, list[int]]:
    """Return whether gradients are those without parts, and what is alive after forward without
    and with them.
    """
    torch.manual_seed(0)
    model, plain = Net(depth=8), Net(depth=8)
    plain.load_state_dict(model.state_dict())
    apply_activation_checkpointing(plain)
    apply_activation_checkpointing(model, offload_to_cpu=offload_to_cpu, partition=dist.group.WORLD)
    same = all(
        hash_of(gradients(one)) == hash_of(gradients(plain))
        for one in (model, copy.deepcopy(model))
    )
    return same, [alive_after_forward(one) for one in (plain, model)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_ranks_with_the_same_inputs_keep_a_part_each(offload_to_cpu: bool) -> None:
    inputs = 8 * 64 * 24 * 4
    for same, (plain, parts) in run_ranks(3, _with_parts, offload_to_cpu):
        assert same
        assert parts <= plain - inputs * (7 / 8 if offload_to_cpu else 2 / 3) + 64 * 24 * 4


def _uneven_parts(rank: int, world_size: int) -> bool:
    torch.manual_seed(0)
    plain = nn.Linear(7, 5)
    model = checkpoint_wrapper(copy.deepcopy(plain), partition=dist.group.WORLD)
    for one in (plain, model):
        one(torch.arange(7.0, requires_grad=True)).square().sum().backward()
    return torch.equal(plain.weight.grad, model.weight.grad)  # type: ignore[arg-type]


def test_inputs_that_ranks_do_not_divide_are_whole_in_backward() -> None:
    assert run_ranks(3, _uneven_parts) == [True] * 3


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    torch.manual_seed(0)
    plain = (
        nn.Sequential(*(nn.Sequential(Block(1024, 4096), nn.Dropout(0.1)) for _ in range(12)))
        .cuda()
        .bfloat16()
    )
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(model, offload_to_cpu=True)
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    peaks = []
    for _ in range(3):
        found = []
        for one in (plain, model):
            torch.cuda.reset_peak_memory_stats()
            torch.manual_seed(1)
            one.zero_grad()
            one(x).float().square().mean().backward()
            found.append(
                hash_of(param.grad for param in one.parameters() if param.grad is not None)
            )
            peaks.append(torch.cuda.max_memory_allocated())
        assert found[0] == found[1]
    assert peaks[-1] < peaks[-2] - 11 * x.nbytes
