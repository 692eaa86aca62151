"""Methods other than forward that use weights: the bits of a plain model, where stage 3 has no
weights outside of them.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.support.models import Block, Net, adam, batch_of, hash_of, hash_of_training
from tests.support.ranks import run_ranks


class Coder(Block):
    def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        """Use weights before and after forward, and another method of this kind."""
        return self(x * self.norm.weight) @ self.shift(self.up.weight.t())[:, : x.shape[-1]] * scale

    def shift(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.down.bias.sum()


class Coded(Net):
    """Its forward calls methods of its blocks; `embed` is what is trained, `forward` a part of
    that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Coder(24, 37) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block.encode(x, scale=0.1)
        return self.head(x)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self(x * self.gain) * self.gain.exp()


def registered(model: Any, blocks: bool = True) -> Any:
    for block in model.blocks if blocks else ():
        shardcore.register_forward_method(block, "encode")
        shardcore.register_forward_method(block, "shift")
    shardcore.register_forward_method(model, "embed")
    return model


def trained(
    rank: int, options: dict[str, Any] | None, late: bool = False
) -> tuple[Any, Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    model: Any = Coded() if options is None or late else registered(Coded())
    optimizer = adam(model)
    if options is not None:
        model, optimizer = shardcore.shard(model, optimizer, **options)
        model = registered(model) if late else model
    outputs = []
    for step in range(3):
        x, y = batch_of(step, 0, 0)
        (model.embed(x).float() - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            outputs.append(model.embed(x))
            outputs.append(
                model.blocks[1].encode(torch.ones(2, 24, dtype=outputs[0].dtype), scale=2.0)
            )
    return model, optimizer, outputs


def is_plain(rank: int, world_size: int, options: dict[str, Any], late: bool) -> None:
    model, _, outputs = trained(rank, options, late)
    plain, _, expected = trained(rank, None)
    assert hash_of(outputs) == hash_of(expected)
    with shardcore.full_params(model):
        assert hash_of(model.parameters()) == hash_of(plain.parameters())
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    x = batch_of(9, 0, 0)[0]
    assert torch.equal(copied.embed(x), plain.embed(x))


OPTIONS: list[tuple[dict[str, Any], bool]] = [
    ({"stage": 3}, False),
    ({"stage": 2, "overlap_step": True, "offload": {"optimizer": "cpu"}}, True),
    ({"stage": 3, "overlap_step": True, "offload": {"optimizer": "cpu", "params": "cpu"}}, True),
    ({"stage": 3, "reshard_after_forward": False}, True),
    ({"stage": 0}, False),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("options, late", OPTIONS, ids=str)
def test_methods_have_the_bits_of_a_plain_model(options: dict[str, Any], late: bool) -> None:
    run_ranks(2, is_plain, options, late)


def refuses(rank: int, world_size: int) -> None:
    model, _ = shardcore.shard(Coded(), None, 3)
    registered(model, blocks=False)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.norm\.weight is sharded"):
        model.embed(torch.ones(2, 10))
    registered(model)
    model.embed(torch.ones(2, 10))  # what failed has left nothing behind
    with pytest.raises(ValueError, match="Coded has no method 'missing'"):
        shardcore.register_forward_method(model, "missing")


def test_what_is_refused() -> None:
    run_ranks(2, refuses)


def casts(rank: int, world_size: int) -> list[str]:
    made = []
    for stage in (0, 3):
        model, optimizer, _ = trained(rank, {"stage": stage, "precision": "bf16"})
        made.append(hash_of_training(model, optimizer))
    return made


def test_a_method_of_the_model_casts_its_inputs() -> None:
    for first, second in run_ranks(2, casts):
        assert first == second
