"""Bases that bitsandbytes or torchao has quantized: their scales in shards, in evaluation, in
checkpoints, and what is refused.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

bnb = pytest.importorskip("bitsandbytes", reason="tests with bitsandbytes")
ao = pytest.importorskip("torchao.quantization", reason="tests with torchao")
nf4_tensor = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")


import shardcore  # noqa: E402
from shardcore.engine import hooks, quantized  # noqa: E402
from shardcore.estimate import predict  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

WIDTH, HIDDEN = 128, 256


KINDS = "nf4", "nf4 nested", "int8"


class Block(nn.Module):
    """A frozen base, with an adapter over one of its layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up = layer(WIDTH, HIDDEN, kind)
        self.down = layer(HIDDEN, WIDTH, kind)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.b(self.a(x))))


def layer(inputs: int, outputs: int, kind: str) -> nn.Module:
    if kind == "int8":
        linear = nn.Linear(inputs, outputs, bias=False)
        ao.quantize_(linear, ao.Int8WeightOnlyConfig())
        return linear
    options = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4"}
    return bnb.nn.Linear4bit(inputs, outputs, compress_statistics="nested" in kind, **options)


def made(seed: int = 0, kind: str = "nf4 nested") -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(Block(kind), Block(kind)).to("cpu")


def sharded(stage: int, seed: int = 0, kind: str = "nf4 nested") -> tuple[Any, Any]:
    model = made(seed, kind)
    params = [param for param in model.parameters() if param.requires_grad]
    return shardcore.shard(model, shardcore.FusedAdam(params, lr=0.01), stage=stage)


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model with the tensors in int8 weights in place of these."""
    state = model.state_dict()
    for name in quantized.take_apart(state):
        del state[name]
    return state


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


def resting(
    rank: int, world_size: int, kind: str, whole_scales: bool = False
) -> tuple[int, int, bool]:
    """Return the bytes of the frozen base that this rank holds between steps, and those of the
    base; and whether they are as predicted.
    """
    with pytest.MonkeyPatch.context() as patch:
        if whole_scales:  # as if each rank kept them
            patch.setattr("shardcore.engine.units.with_parts", lambda named: named)
        params = [param for param in made().parameters() if param.requires_grad]
        model, optimizer = sharded(3, kind=kind)
        for number in range(2):
            step(model, optimizer, rank, number)
        prediction = predict(made(kind=kind), stage=3, world_size=world_size, rank=rank).resting
    report = shardcore.memory_report(model)
    weights = [line for line in report.lines if line.kind == "weights" and line.unit != "shared"]
    adapters = sum(param.nbytes for param in params) // world_size
    ends = ".up.weight", ".down.weight", "absmax", "qdata", "scale", "zero_point"
    total = sum(
        value.nbytes for name, value in plain(made(kind=kind)).items() if name.endswith(ends)
    )
    return sum(line.bytes for line in weights) - adapters, total, prediction.lines == report.lines


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_its_share_of_codes_and_scales(kind: str) -> None:
    # of two units: a shard of nested scales takes 1 KiB, for few bytes of them
    padding = 2 * 1024
    for held, total, as_predicted in run_ranks(2, resting, kind):
        assert held <= total // 2 + padding
        assert as_predicted


def test_whole_scales_are_seen() -> None:
    for held, total, _ in run_ranks(2, resting, "nf4", True):
        assert held > total // 2 + 2 * 1024


def trained(rank: int, world_size: int, stage: int, kind: str) -> tuple[list[float], Any]:
    # ranks quantize other weights: rank 0's count, scales included
    model, optimizer = sharded(stage, seed=rank, kind=kind)
    losses = [step(model, optimizer, rank, number) for number in range(3)]
    return losses, plain(model)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_agree_to_the_bit_and_ranks_have_the_scales_of_rank_0(kind: str) -> None:
    of_stage = [run_ranks(2, trained, stage, kind) for stage in (0, 3)]
    for (losses, state), (other_losses, other) in zip(*of_stage, strict=True):
        assert losses == other_losses
        assert equal(state, other)
    first, second = (state for _, state in of_stage[1])
    assert equal(first, second)
    base, others = plain(made(kind=kind)), plain(made(1, kind))
    assert all(torch.equal(first[name], value) for name, value in base.items() if ".up." in name)
    scales = "0.up.weight.scale" if kind == "int8" else "0.up.weight.absmax"
    assert not torch.equal(first[scales], others[scales])


# --- biases ----------------------------------------------------------------------------------------


def with_biases(trains: bool) -> Any:
    """Return 4-bit layers that compute in bfloat16, with biases in float32, as PEFT's
    prepare_model_for_kbit_training leaves them.
    """
    torch.manual_seed(0)
    options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4"}
    layers = (bnb.nn.Linear4bit(64, 64, **options) for _ in range(2))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), layer) for layer in layers)).to("cpu")
    for block in model:
        block[1].bias.requires_grad_(trains)
    return model


def with_biases_trained(
    rank: int, world_size: int, stage: int | None, trains: bool, precision: str | None
) -> Any:
    """stage: None trains without shard()."""
    model: Any = with_biases(trains)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = shardcore.FusedAdam(params, lr=0.01)
    if stage is not None:
        model, optimizer = shardcore.shard(model, optimizer, stage=stage, precision=precision)
    losses = []
    for number in range(3):
        loss = model(inputs(0, number)[:, :64]).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_biases_train_in_the_dtype_that_their_4_bit_layers_cast_them_to() -> None:
    [expected] = run_ranks(1, with_biases_trained, None, False, None)
    for stage in (0, 3):
        assert run_ranks(2, with_biases_trained, stage, False, None) == [expected, expected]
    other, trained = [], []
    for stage in (0, 3):  # bitsandbytes alone raises an error in backward
        trained += run_ranks(2, with_biases_trained, stage, True, None)
        other += run_ranks(2, with_biases_trained, stage, False, "fp32")
    assert trained == [trained[0]] * 4
    assert trained[0][1:] != expected[1:]
    assert other == [other[0]] * 4


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
            patch.setattr(hooks, "keep_as_packed", lambda model, device: None)
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


def rounding(weight: Any, state: Any) -> Any:
    """Round scales to bfloat16, as bitsandbytes' packing for evaluations does."""
    state.absmax = state.absmax.bfloat16().float()
    return weight.clone(), state


def trained_and_evaluated(rank: int, world_size: int, stage: int | None, form: str) -> Any:
    """Return losses of steps and outputs of the evaluations after them, on a CPU that would pack.

    stage: None trains on the samples of two ranks, unsharded. form: the kind of layers; "floats":
    of ordinary layers with the dequantized weights.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
        patch.setattr("bitsandbytes.nn.modules._convert_weight_packed_for_cpu", rounding)
        model: Any = made(kind="nf4")
        if form == "floats":
            for block in model:
                for name in ("up", "down"):
                    floats = nn.Parameter(quantized.dequantized(getattr(block, name).weight), False)
                    linear = nn.Linear(*reversed(floats.shape), bias=False, device="meta")
                    linear.weight = floats
                    setattr(block, name, linear)
        optimizer: Any = shardcore.FusedAdam(
            [param for param in model.parameters() if param.requires_grad], lr=0.01
        )
        if stage is not None:
            model, optimizer = shardcore.shard(model, optimizer, stage=stage)
        losses, outputs = [], []
        ranks = [rank] if stage is not None else [0, 1]
        for number in range(3):
            for each in ranks:
                loss = model.train()(inputs(each, number)).square().mean()
                (loss / len(ranks)).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                outputs.append(model.eval()(inputs(0, 9)))
    return losses, torch.stack(outputs)


def test_evaluations_and_the_steps_after_them_have_the_bits_of_the_dequantized_base() -> None:
    [(losses, outputs)] = run_ranks(1, trained_and_evaluated, None, "floats")
    [(packed_losses, packed_outputs)] = run_ranks(1, trained_and_evaluated, None, "nf4")
    assert packed_losses[2:] != losses[2:], "the test sees a packing that stays after evaluations"
    assert not torch.equal(packed_outputs, outputs)
    for stage in (0, 3):
        first, second = run_ranks(2, trained_and_evaluated, stage, "nf4")
        assert [loss for pair in zip(first[0], second[0], strict=True) for loss in pair] == losses
        assert torch.equal(first[1], outputs)
        assert torch.equal(second[1], outputs)


def test_a_weight_in_the_packing_of_an_evaluation_is_refused() -> None:
    model = made()
    model[1].down.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=r"1\.down\.weight has the packing"):
        shardcore.shard(model, None, stage=3)


# --- checkpoints and models -----------------------------------------------------------------------


def saved_and_loaded(
    rank: int, world_size: int, folder: str, stages: tuple[int, int], kind: str
) -> bool:
    model, optimizer = sharded(stages[0], kind=kind)
    step(model, optimizer, rank, 0)
    shardcore.save(folder, model, optimizer)
    other, other_optimizer = sharded(stages[1], seed=5, kind=kind)
    assert not equal(plain(other), plain(model))
    shardcore.load(folder, other, other_optimizer)
    later = [step(m, o, rank, 1) for m, o in ((model, optimizer), (other, other_optimizer))]
    return later[0] == later[1] and equal(plain(other), plain(model))


@pytest.mark.parametrize(
    "stages, kind", [((3, 0), "nf4 nested"), ((2, 3), "nf4"), ((0, 3), "int8"), ((3, 2), "int8")]
)
def test_a_checkpoint_has_scales_and_loads_at_another_stage(
    tmp_path: Path, stages: tuple[int, int], kind: str
) -> None:
    assert run_ranks(2, saved_and_loaded, str(tmp_path), stages, kind) == [True, True]


def in_shards(rank: int, world_size: int, kind: str) -> bool:
    model, other = sharded(3, kind=kind)[0], sharded(3, seed=5, kind=kind)[0]
    shardcore.load_sharded_state_dict(other, shardcore.sharded_state_dict(model))
    return equal(plain(other), plain(model))


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_a_sharded_state_dict_has_scales(kind: str) -> None:
    assert run_ranks(2, in_shards, kind) == [True, True]


def loaded_whole(rank: int, world_size: int, stage: int) -> bool:
    model, other = sharded(3, kind="int8")[0], sharded(stage, seed=5, kind="int8")[0]
    state = model.state_dict()
    other.load_state_dict(state)
    return equal(plain(other), plain(model)) and type(state["0.up.weight"]) is ao.Int8Tensor


@pytest.mark.parametrize("stage", [2, 3])
def test_int8_weights_load_from_a_state_dict(stage: int) -> None:
    assert run_ranks(2, loaded_whole, stage) == [True, True]


def made_plain(rank: int, world_size: int, stage: int, kind: str) -> bool:
    model, optimizer = sharded(stage, kind=kind)
    step(model, optimizer, rank, 0)
    before = plain(model)
    hooks.detach(model)
    assert type(model[0].up.weight) is type(made(kind=kind)[0].up.weight)
    again, _ = shardcore.shard(model, None, stage=3)
    return equal(plain(again), before)


@pytest.mark.parametrize("stage, kind", [(0, "nf4 nested"), (3, "nf4 nested"), (3, "int8")])
def test_a_plain_model_again_has_its_scales(stage: int, kind: str) -> None:
    assert run_ranks(2, made_plain, stage, kind) == [True, True]


# --- refusals -------------------------------------------------------------------------------------


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
    model[0].up = bnb.nn.Linear8bitLt(WIDTH, HIDDEN, has_fp16_weights=False).to("cpu")
    with pytest.raises(ValueError, match=r"0\.up\.weight is quantized to 8 bits.*load_in_4bit"):
        shardcore.shard(model, None, stage=3)


def with_weight(weight: torch.Tensor) -> Any:
    model: Any = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4))
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    return model


def nf4() -> torch.Tensor:
    return nf4_tensor.to_nf4(torch.randn(64, 64), 64, 1)  # type: ignore[no-any-return]


def int4() -> torch.Tensor:
    codes, scales = torch.zeros(64, 32, dtype=torch.uint8), torch.ones(2, 64)
    return ao.Int4Tensor(codes, scales, scales, [1, 32], torch.Size([64, 64]))  # type: ignore[no-any-return]


def int8_with_activations() -> torch.Tensor:
    model = nn.Sequential(nn.Linear(64, 64))
    ao.quantize_(model, ao.Int8DynamicActivationInt8WeightConfig())
    return model[0].weight  # type: ignore[return-value]


def float8() -> torch.Tensor:
    model = nn.Sequential(nn.Linear(64, 64))
    ao.quantize_(model, ao.Float8WeightOnlyConfig())
    return model[0].weight  # type: ignore[return-value]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "weight, named",
    [
        (nf4, r"torchao\.\S*\.NF4Tensor, which shardcore does not gather"),
        (int4, "Int4Tensor of torchao"),
        (int8_with_activations, "Int8Tensor of torchao"),
        (float8, "Float8Tensor of torchao"),
    ],
)
def test_other_quantized_tensors_are_refused_by_library(
    weight: Any, named: str, stage: int
) -> None:
    model = with_weight(weight())
    optimizer = shardcore.FusedAdam(model[1].parameters())
    with pytest.raises(ValueError, match=rf"0\.weight is a {named}.*4-bit weights"):
        shardcore.shard(model, optimizer, stage=stage)


@pytest.mark.parametrize(
    "method, kind",
    [
        ("int8_weight_only_quantized_training", "Int8QuantizedTrainingLinearWeight"),
        ("int8_mixed_precision_training", "Int8MixedPrecisionTrainingLinearWeight"),
    ],
)
def test_int8_training_weights_are_refused_by_name(method: str, kind: str) -> None:
    training = pytest.importorskip("torchao.prototype.quantized_training")
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4))
    ao.quantize_(model, getattr(training, method)())
    with pytest.raises(TypeError, match=rf"params\[0\] is of type {kind}"):
        shardcore.FusedAdam(model.parameters())
    with pytest.raises(ValueError, match=rf"0\.weight is a \S*{kind}, which.*4-bit weights"):
        shardcore.shard(model, None, stage=3)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_training_over_other_methods_is_refused_by_name(method: str) -> None:
    model = made()
    model[0].quantization_method = method  # as transformers names it, of a model inside PEFT's
    params = [param for param in model.parameters() if param.requires_grad]
    with pytest.raises(ValueError, match=f"0 is quantized by {method}.*load_in_4bit"):
        shardcore.shard(model, shardcore.FusedAdam(params))
    shardcore.shard(model, None)


def test_experts_that_were_not_quantized_are_named_with_their_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = made()
    model[1].experts = nn.Parameter(torch.zeros(10, 100, 100), requires_grad=False)
    with caplog.at_level(logging.WARNING, "shardcore"):
        shardcore.shard(model, None)
    (text,) = [line for line in caplog.messages if "fused experts" in line]
    assert "1 fused experts stay in float32 and take 0.40 MB" in text
    assert "the first is 1.experts" in text
