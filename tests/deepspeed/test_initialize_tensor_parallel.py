"""initialize with tensor_parallel.autotp_size: the bits of shard over the same mesh; data,
checkpoints, refusals.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import TensorDataset

import shardcore
from shardcore.deepspeed import initialize as module
from shardcore.deepspeed import names
from shardcore.optim.dtensor import is_dtensor
from tests.support.deepspeed import ADAM, ds_config
from tests.support.models import assert_one, hash_of_training, make_net
from tests.support.ranks import run_ranks
from tests.support.slices import mesh_of
from tests.support.torch_memory import recorded_memory

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 22,
}


def _llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=tied)
    )


def _config(stage: int, size: int, **more: Any) -> dict[str, Any]:
    section = {"tensor_parallel": {"autotp_size": size}} if size > 1 else {}
    return ds_config(2, stage, **section, **more) | {"gradient_clipping": 0.5}


def _losses(
    model: Any, backward: Callable[[torch.Tensor], Any], step: Callable[[], Any], dp: int
) -> list[float]:
    losses = []
    for micro_step in range(4):
        tokens = torch.randint(
            22, (3, 7), generator=torch.Generator().manual_seed(1009 * micro_step + dp)
        )
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        step()
        losses.append(loss.item())
    return losses


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, of weights in another order than the model's: matrices decay."""
    params = list(model.parameters())[::-1]
    return [
        {"params": [p for p in params if (p.dim() > 1) == of]}
        | ({} if of else {"weight_decay": 0.0})
        for of in (True, False)
    ]


def _optimizer_options(kind: str, model: nn.Module) -> dict[str, Any]:
    """What initialize is given of the whole model."""
    if kind == "parameters":
        return {"model_parameters": _groups(model)}
    return {"optimizer": torch.optim.AdamW(_groups(model), **ADAM)}


Found = tuple[str, list[float], list[float]]


def _train(rank: int, world: int, size: int, cases: list[tuple[str, int, bool]]) -> list[Found]:
    """Hashes, losses and a norm of weights by initialize."""
    hashes = []
    for kind, stage, tied in cases:
        model = _llama(tied)
        options = _optimizer_options(kind, model)
        config = _config(stage, size)
        if kind == "optimizer":
            del config["optimizer"]
        engine, optimizer, _, _ = shardcore.initialize(model=model, config=config, **options)
        assert any(map(is_dtensor, model.parameters())) == (size > 1)
        losses = _losses(engine, engine.backward, engine.step, rank // size)
        weights = [value.norm().item() for value in engine.module_state_dict().values()]
        hashes.append((hash_of_training(engine, optimizer), losses, weights))
    return hashes


def _by_shard(rank: int, world: int, size: int, cases: list[tuple[str, int, bool]]) -> list[Found]:
    """The same by shard and a mesh."""
    mesh, hashes = mesh_of(world, size), []
    for _, stage, tied in cases:
        model: Any = shardcore.tensor_parallel(_llama(tied), mesh["tp"])
        optimizer: Any = shardcore.FusedAdam(_groups(model), **ADAM)
        model, optimizer = shardcore.shard(
            model,
            optimizer,
            stage,
            process_group=mesh["dp"],
            clip_grad_norm=0.5,
            accumulate=2,
            precision="fp32",
        )
        steps = iter(range(4))

        def step(optimizer: Any = optimizer, steps: Any = steps) -> None:
            if next(steps) % 2:
                optimizer.step()
                optimizer.zero_grad()

        losses = _losses(model, lambda loss: (loss / 2).backward(), step, rank // size)
        hashes.append((hash_of_training(model, optimizer), losses, []))
    return hashes


WIDE = {"hidden_size": 64, "intermediate_size": 256}


def _built(rank: int, world: int, how: str, folder: str) -> tuple[str, int, int]:
    """Hash, the peak of initialize, and the bytes of all weights."""
    context: Any = {"zero.Init": shardcore.zero.Init(), "meta": torch.device("meta")}
    with mock.patch.dict(SIZES, WIDE), context.get(how, nullcontext()):
        model = _llama()
    options: dict[str, Any] = {"materialize": folder} if how == "meta" else {}
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()) * 4
    with recorded_memory() as memory:
        engine = shardcore.initialize(model=model, config=_config(3, 2), **options)[0]
    return hash_of_training(engine, engine.optimizer), memory.peak, whole


@pytest.mark.more
def test_a_model_is_sliced_from_its_files_or_from_the_pieces_of_zero_init(tmp_path: Path) -> None:
    with mock.patch.dict(SIZES, WIDE):
        _llama().save_pretrained(tmp_path)
    plain, pieces, files = (
        run_ranks(2, _built, how, str(tmp_path)) for how in ("plain", "zero.Init", "meta")
    )
    for of_rank in zip(plain, pieces, files, strict=True):
        assert_one(hash for hash, _, _ in of_rank)
    for (_, gathered, whole), (_, peak, _) in zip(pieces, files, strict=True):
        assert peak <= 1.7 * whole < gathered, "half of the weights, and two states of each"


CASES = [("parameters", 2, False), ("optimizer", 3, True)]


def _wrong(rank: int, world: int, cases: list[tuple[str, int, bool]]) -> list[Found]:
    """Slices over ranks that are not adjacent, which get other batches."""
    strided = DeviceMesh(
        "cpu", torch.arange(world).reshape(2, -1).T.contiguous(), mesh_dim_names=("dp", "tp")
    )
    with (
        mock.patch.object(module, "make_tensor_mesh", return_value=strided),
        mock.patch.object(module, "_compare_inputs"),
    ):
        return _train(rank, world, 2, cases)


def test_training_has_the_bits_of_shard_and_the_losses_of_whole_models() -> None:
    sliced, expected = run_ranks(4, _train, 2, CASES), run_ranks(4, _by_shard, 2, CASES)
    whole, wrong = run_ranks(2, _train, 1, CASES), run_ranks(4, _wrong, CASES[:1])
    for rank, of_rank in enumerate(sliced):
        for one, same, other in zip(of_rank, expected[rank], whole[rank // 2], strict=True):
            assert one[:2] == same[:2]
            assert one[1:] == (pytest.approx(other[1], abs=2e-5), pytest.approx(other[2], abs=2e-5))
        assert wrong[rank][0][0] != of_rank[0][0]
    assert wrong[0][0][1] != pytest.approx(whole[0][0][1], abs=2e-5)


def _data(rank: int, world: int, folder: str) -> Any:
    """What the loader has, after a checkpoint and a file of all weights; two models have one
    mesh.
    """
    groups = names.MODULES["utils.groups"]
    with pytest.raises(RuntimeError, match="no model is sliced over ranks; expected tp_model_init"):
        groups["get_tensor_model_parallel_group"]()
    model = names.tp_model_init(_llama(), 2, torch.float32)
    assert groups["get_tensor_model_parallel_src_rank"]() == rank - rank % 2
    samples = TensorDataset(torch.arange(24))
    config = _config(2, 1, train_batch_size=4 * 2 * 4, bf16={"enabled": True})
    engine, _, loader, _ = shardcore.initialize(model=model, training_data=samples, config=config)
    assert (engine.train_batch_size(), engine.world_size, engine.dp_world_size, len(loader)) == (
        16,
        4,
        2,
        3,
    )
    _losses(engine, engine.backward, engine.step, rank // 2)
    assert [groups[f"get_{what}_parallel_rank"]() for what in ("data", "tensor_model")] == [
        rank // 2,
        rank % 2,
    ]
    engine.save_checkpoint(folder, tag="t")
    engine.save_16bit_model(folder, "weights.bin")
    mesh = module.tensor_mesh()
    other = shardcore.initialize(model=_llama(), config=_config(3, 2, bf16={"enabled": True}))[0]
    assert mesh is not None
    assert module.tensor_mesh() is mesh
    other.load_checkpoint(folder)
    hashes = {hash_of_training(each, each.optimizer) for each in (engine, other)}
    return [int(sample) for batch in loader for sample in batch[0]], hashes


def _load(rank: int, world: int, folder: str) -> set[str]:
    engine = shardcore.initialize(model=_llama(), config=_config(1, 1, bf16={"enabled": True}))[0]
    engine.load_checkpoint(folder)
    weights = torch.load(f"{folder}/weights.bin")
    assert all(
        torch.equal(value, weights[name]) for name, value in engine.module.state_dict().items()
    )
    return {hash_of_training(engine, engine.optimizer)}


def test_data_and_checkpoints(tmp_path: Path) -> None:
    of_ranks = run_ranks(4, _data, str(tmp_path))
    samples = [of_rank[0] for of_rank in of_ranks]
    assert (samples[0], samples[2]) == (samples[1], samples[3])
    assert sorted(samples[0] + samples[2]) == list(range(24))
    (loaded,) = run_ranks(1, _load, str(tmp_path))
    assert all(of_rank[1] == loaded for of_rank in of_ranks)


def _refusals(rank: int, world: int) -> None:
    def refused(
        error: type[Exception], match: str, model: nn.Module, config: dict[str, Any], **given: Any
    ) -> None:
        with pytest.raises(error, match=match):
            shardcore.initialize(model=model, config=config, **given)
        assert not any(map(is_dtensor, model.parameters()))

    refused(ValueError, "Net defines no plan for its layers. Pass plan=", make_net(), _config(2, 2))
    refused(ValueError, "is 3 with 2 ranks, which it does not divide", _llama(), _config(2, 3))
    refused(
        ValueError, "is 2 with shardcore.mesh", _llama(), _config(2, 2, shardcore={"mesh": [1, 2]})
    )
    refused(
        ValueError,
        "train_batch_size is 8; expected 16",
        _llama(),
        _config(2, 2, train_batch_size=8),
    )
    muon = {"type": "Muon", "params": {"lr": 1e-3}}
    refused(
        NotImplementedError, "is given with Muon", _llama(), _config(2, 2) | {"optimizer": muon}
    )
    model = names.tp_model_init(_llama(), 4, torch.float32)
    refused(ValueError, "is 2, and tp_model_init 4; expected the same", model, _config(2, 2))
    with pytest.raises(ValueError, match="tp_group is given"):
        names.tp_model_init(model, 2, torch.float32, tp_group=object())
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters())
    _losses(model, torch.Tensor.backward, optimizer.step, 0)
    config = _config(2, 2)
    del config["optimizer"]
    refused(NotImplementedError, "an optimizer that has states", model, config, optimizer=optimizer)
    sliced = shardcore.tensor_parallel(
        make_net(), mesh_of(world, 2)["tp"], {"head": "colwise_gather_output"}
    )
    with pytest.raises(ValueError, match="is 4 with a model in 2 slices; expected"):
        shardcore.initialize(model=sliced, config=_config(2, 4))
    # what defines no plan is sliced before
    engine = shardcore.initialize(model=sliced, config=_config(2, 2))[0]
    assert engine.dp_world_size == 1
    with pytest.raises(NotImplementedError, match="modifier_rank: not available yet"):
        names.gathered_parameters(sliced, 0).__enter__()
    with pytest.raises(
        ValueError, match="slices of one model are given different inputs; expected the same"
    ):
        engine(torch.full((2, 10), float(rank)))
    wrapped = nn.ModuleDict({"model": names.tp_model_init(_llama(), 2, torch.float32)})
    refused(ValueError, "ModuleDict defines no plan", wrapped, _config(2, 1))  # the mark is found


def test_refusals() -> None:
    run_ranks(2, _refusals)
