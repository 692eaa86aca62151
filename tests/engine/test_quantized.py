"""Bases that bitsandbytes quantized to 4 bits: their scales in shards, in evaluation, in
checkpoints, and what is refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

bnb = pytest.importorskip("bitsandbytes", reason="tests with bitsandbytes")

import shardcore  # noqa: E402
from shardcore.engine import hooks, quantized  # noqa: E402
from shardcore.estimate import predict  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

WIDTH, HIDDEN = 128, 256


class Block(nn.Module):
    """A frozen base in NF4, with an adapter over one of its layers."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.up = self._layer(WIDTH, HIDDEN, nested)
        self.down = self._layer(HIDDEN, WIDTH, nested)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, HIDDEN, bias=False)

    @staticmethod
    def _layer(inputs: int, outputs: int, nested: bool) -> nn.Module:
        return bnb.nn.Linear4bit(
            inputs,
            outputs,
            bias=False,
            compute_dtype=torch.float32,
            compress_statistics=nested,
            quant_type="nf4",
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.b(self.a(x))))


def made(seed: int = 0, nested: bool = True) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(Block(nested), Block(nested)).to("cpu")


def sharded(stage: int, seed: int = 0, nested: bool = True) -> tuple[Any, Any]:
    model = made(seed, nested)
    params = [param for param in model.parameters() if param.requires_grad]
    return shardcore.shard(model, shardcore.FusedAdam(params, lr=0.01), stage=stage)


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def step(model: Any, optimizer: Any, rank: int, number: int) -> float:
    loss = model(inputs(rank, number)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def equal(state: Any, other: Any) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)


# --- around their use -----------------------------------------------------------------------------


def refused_read(rank: int, world_size: int) -> tuple[str, bool]:
    model, _ = sharded(3)
    expected = made()[0].up.weight.quant_state
    state = model[0].up.weight.quant_state
    with shardcore.full_params(model):
        held = torch.equal(state.absmax, expected.absmax)
        held &= torch.equal(state.state2.absmax, expected.state2.absmax)
    try:
        state.absmax.sum()
    except RuntimeError as error:
        return str(error), held
    return "nothing was raised", held


def test_scales_are_there_only_around_their_use() -> None:
    for message, held in run_ranks(2, refused_read):
        assert "0.up.weight.absmax is sharded (stage 3)" in message
        assert held


def resting(rank: int, world_size: int, whole_scales: bool) -> tuple[int, int, bool]:
    """Return the bytes of the frozen base that this rank holds between steps, and those of the
    base; and whether they are as predicted.
    """
    with pytest.MonkeyPatch.context() as patch:
        if whole_scales:  # as if each rank kept them
            patch.setattr("shardcore.engine.units.with_scales", lambda named: named)
        params = [param for param in made().parameters() if param.requires_grad]
        model, optimizer = sharded(3)
        for number in range(2):
            step(model, optimizer, rank, number)
        prediction = predict(made(), stage=3, world_size=world_size, rank=rank).resting
    report = shardcore.memory_report(model)
    weights = [line for line in report.lines if line.kind == "weights" and line.unit != "shared"]
    adapters = sum(param.nbytes for param in params) // world_size
    base = made().state_dict()
    total = sum(
        value.nbytes
        for name, value in base.items()
        if name.endswith((".up.weight", ".down.weight", "absmax"))
    )
    return sum(line.bytes for line in weights) - adapters, total, prediction.lines == report.lines


def test_a_rank_holds_its_share_of_packed_bytes_and_scales() -> None:
    padding = 4 * 2 * 1024  # of two units with two nested scales: a shard has at least 1 KiB
    for held, total, as_predicted in run_ranks(2, resting, False):
        assert held <= total // 2 + padding
        assert as_predicted
    for held, total, _ in run_ranks(2, resting, True):
        assert held > total // 2, "whole scales are seen"


def trained(rank: int, world_size: int, stage: int, nested: bool) -> tuple[list[float], Any]:
    # ranks quantize other weights: rank 0's count, scales included
    model, optimizer = sharded(stage, seed=rank, nested=nested)
    losses = [step(model, optimizer, rank, number) for number in range(3)]
    return losses, model.state_dict()


@pytest.mark.parametrize("nested", [True, False])
def test_stages_agree_to_the_bit_and_ranks_have_the_scales_of_rank_0(nested: bool) -> None:
    of_stage = [run_ranks(2, trained, stage, nested) for stage in (0, 3)]
    for (losses, state), (other_losses, other) in zip(*of_stage, strict=True):
        assert losses == other_losses
        assert equal(state, other)
    first, second = (state for _, state in of_stage[1])
    assert equal(first, second)
    base = made(nested=nested).state_dict()
    assert all(torch.equal(first[name], value) for name, value in base.items() if ".up." in name)
    other = made(1, nested=nested).state_dict()
    assert not torch.equal(first["0.up.weight.absmax"], other["0.up.weight.absmax"])


# --- evaluation -----------------------------------------------------------------------------------


def evaluated(rank: int, world_size: int, stage: int, prepared: bool) -> tuple[int, Any]:
    """Train, evaluate and train on a CPU that would pack weights anew; returns how often it did."""
    packed = []

    def pack(weight: Any, state: Any) -> Any:
        packed.append(weight)
        return weight.clone(), state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
        patch.setattr("bitsandbytes.nn.modules._convert_weight_packed_for_cpu", pack)
        if not prepared:
            patch.setattr(quantized, "keep_as_packed", lambda model, device: None)
        model, optimizer = sharded(stage)
        losses = [step(model, optimizer, rank, 0)]
        try:
            with torch.no_grad():
                losses.append(model.eval()(inputs(rank, 9)).sum().item())
            model.train()
            losses.append(step(model, optimizer, rank, 1))
        except ValueError as error:
            return len(packed), str(error)
    return len(packed), losses


def test_an_evaluation_leaves_weights_in_their_shards() -> None:
    kept = [run_ranks(2, evaluated, stage, True) for stage in (0, 3)]
    assert kept[0] == kept[1]
    assert [count for count, _ in kept[1]] == [0, 0]
    for count, message in run_ranks(2, evaluated, 3, False):
        assert count > 0
        assert "0.up.weight is no longer stored in shardcore's memory" in message


def test_a_weight_in_the_packing_of_an_evaluation_is_refused() -> None:
    model = made()
    model[1].down.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=r"1\.down\.weight has the packing"):
        shardcore.shard(model, None, stage=3)


# --- checkpoints and models -----------------------------------------------------------------------


def saved_and_loaded(rank: int, world_size: int, folder: str, stages: tuple[int, int]) -> bool:
    model, optimizer = sharded(stages[0])
    step(model, optimizer, rank, 0)
    shardcore.save(folder, model, optimizer)
    other, other_optimizer = sharded(stages[1], seed=5)
    assert not equal(other.state_dict(), model.state_dict())
    shardcore.load(folder, other, other_optimizer)
    later = [step(m, o, rank, 1) for m, o in ((model, optimizer), (other, other_optimizer))]
    return later[0] == later[1] and equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("stages", [(3, 0), (2, 3)])
def test_a_checkpoint_has_scales_and_loads_at_another_stage(
    tmp_path: Path, stages: tuple[int, int]
) -> None:
    assert run_ranks(2, saved_and_loaded, str(tmp_path), stages) == [True, True]


def in_shards(rank: int, world_size: int) -> bool:
    model, _ = sharded(3)
    other, _ = sharded(3, seed=5)
    shardcore.load_sharded_state_dict(other, shardcore.sharded_state_dict(model))
    return equal(other.state_dict(), model.state_dict())


def test_a_sharded_state_dict_has_scales() -> None:
    assert run_ranks(2, in_shards) == [True, True]


def made_plain(rank: int, world_size: int, stage: int) -> bool:
    model, optimizer = sharded(stage)
    step(model, optimizer, rank, 0)
    before = model.state_dict()
    hooks.detach(model)
    assert isinstance(model[0].up.weight, bnb.nn.Params4bit)
    again, _ = shardcore.shard(model, None, stage=3)
    return equal(again.state_dict(), before)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_model_again_has_its_scales(stage: int) -> None:
    assert run_ranks(2, made_plain, stage) == [True, True]


def differing(rank: int, world_size: int) -> str:
    model = made()
    if rank == 1:
        model[0].up.weight.quant_state.quant_type = "fp4"
    try:
        shardcore.shard(model, None, stage=3)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_ranks_with_other_kinds_of_4_bits_are_refused() -> None:
    for message in run_ranks(2, differing):
        assert "0.up.weight" in message
        assert "in nf4 blocks of 64" in message


def test_8_bits_at_stage_3_are_refused() -> None:
    model = made()
    model[0].up.weight.SCB = None  # as bitsandbytes' Int8Params have
    with pytest.raises(ValueError, match=r"0\.up\.weight is quantized to 8 bits"):
        shardcore.shard(model, None, stage=3)
