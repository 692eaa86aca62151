"""digest: one number for one set of values, however they are placed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardcore
from tests.support.digests import FORMS, expected_of, trained
from tests.support.models import error_of, make_net
from tests.support.pretend_cuda import run_pretended, why_not
from tests.support.ranks import run_ranks
from tests.support.slices import make_lm, mesh_of, sharded_lm, train_lm

KINDS = [(what, by) for what in ("weights", "grads", "states") for by in ("all", "unit", "param")]


def digests_of(model: Any) -> list[Any]:
    return [shardcore.digest(model, what, by) for what, by in KINDS]


def _placed(rank: int, world_size: int, form: str, path: str) -> list[Any]:
    options, adam = FORMS[form]
    files = {"path": path, "resume": False}
    offloads: dict[str, Any] = {
        "device": None,
        "cpu": {"optimizer": "cpu", "gradients": "cpu"},
        "a share": {"optimizer": "cpu", "ratio": 0.4},
        "nvme": {"optimizer": "nvme", **files},
    }
    found = []
    for stage in (0, 1, 2, 3):
        for tier, offload in offloads.items():
            if stage == 0 and tier == "cpu":
                offload = {"optimizer": "cpu"}
            units: Any = 100 if tier == "a share" else "auto"
            model, optimizer = trained(stage, adam, **options, offload=offload, units=units)
            of_all = digests_of(model)
            for whole, *parts in zip(*[iter(of_all)] * 3, strict=True):
                assert {sum(part.values()) % 2**64 for part in parts} == {whole}
            weights = {n: p for n, p in model.state_dict().items() if n in of_all[2]}
            assert of_all[2] == expected_of(weights)
            found.append(
                [each for (_, by), each in zip(KINDS, of_all, strict=True) if by != "unit"]
            )
            del model, optimizer
    return found


@pytest.mark.parametrize("form", FORMS)
def test_placement_does_not_show(form: str, tmp_path: Path) -> None:
    of_ranks = [
        found
        for world_size in (1, 2, 4)
        for found in run_ranks(world_size, _placed, form, str(tmp_path / str(world_size)))
    ]
    assert all(each == of_ranks[0][0] for found in of_ranks for each in found)


def test_a_split_master_counts_as_the_master() -> None:
    both = [trained(0, FORMS[form][1], **FORMS[form][0])[0] for form in ("masters", "split")]
    assert shardcore.digest(both[0]) == shardcore.digest(both[1])


def _flipped(rank: int, world_size: int) -> None:
    model, _ = trained(3, {})
    before = shardcore.digest(model, by="param")
    units = shardcore.digest(model, by="unit")
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        with shardcore.full_params(model), torch.no_grad():
            old = param.flatten()[-1].clone()
            param.view(-1)[-1].view(torch.int32).bitwise_xor_(1)
        after = shardcore.digest(model, by="param")
        assert {n for n in before if before[n] != after[n]} == {name}
        changed = [
            n for n, value in shardcore.digest(model, by="unit").items() if value != units[n]
        ]
        assert len(changed) == 1
        with shardcore.full_params(model), torch.no_grad():
            param.view(-1)[-1] = old
    assert shardcore.digest(model, by="param") == before


def test_a_flipped_bit_is_found_in_its_parameter() -> None:
    run_ranks(2, _flipped)


def _of_dtensors(rank: int, world_size: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (world_size,))
    model = make_net()
    plain = shardcore.digest(model)
    for module in model.modules():
        for name, param in [*module.named_parameters(recurse=False)]:
            module.register_parameter(
                name,
                nn.Parameter(
                    distribute_tensor(param, mesh, [Shard(0) if param.dim() else Replicate()])
                ),
            )
    return plain, shardcore.digest(model)


def test_dtensors_count_as_the_full_tensor() -> None:
    for plain, cut in run_ranks(2, _of_dtensors):
        assert plain == cut


def _sliced(rank: int, world_size: int, stage: int) -> tuple[int, int, dict[str, int]]:
    mesh = mesh_of(4, 2)
    model, optimizer = sharded_lm(mesh, stage, frozen="first", precision="bf16")
    start = shardcore.digest(model)
    train_lm(model, optimizer, mesh, range(1))
    found = shardcore.digest(model, by="param")
    weights = {n: p for n, p in model.state_dict().items() if n in found}
    assert {n: v for n, v in found.items()} == expected_of(weights)
    states = shardcore.digest(model, "states", "unit")
    lm_grads = shardcore.digest(model, "grads")
    del optimizer
    return start, lm_grads, states


@pytest.mark.parametrize("stage", [0, 3])
def test_tensor_parallel_slices_count_as_the_full_parameter(stage: int) -> None:
    plain = make_lm()
    for name, param in plain.named_parameters():
        param.requires_grad_("first" not in name)
        if not param.requires_grad:
            param.data = param.data.bfloat16()
    found = run_ranks(4, _sliced, stage)
    assert all(each == found[0] for each in found)
    assert found[0][0] == shardcore.digest(plain)


def _refused(rank: int, world_size: int) -> list[str]:
    model, _ = trained(3, {})
    said = [
        error_of(lambda: shardcore.digest(model, "master")),  # type: ignore[arg-type]
        error_of(lambda: shardcore.digest(model, by="layer")),  # type: ignore[call-overload]
        error_of(lambda: shardcore.digest(model, ("weights", "states")[rank])),  # type: ignore[arg-type]
        error_of(lambda: shardcore.digest(model, "weights" if rank else "none")),  # type: ignore[arg-type]
    ]
    with shardcore.full_params(model):
        said.append(error_of(lambda: shardcore.digest(model)))
    dist.barrier()
    return said


def test_bad_arguments_are_refused_on_every_rank() -> None:
    for what, by, other, one, held in run_ranks(2, _refused):
        assert 'what is \'master\'; expected one of "weights", "grads", "states"' in what
        assert "by is 'layer'" in by
        assert "weights by all" in other
        assert "states by all" in other
        assert "what is 'none'" in one or "rank 0" in one
        assert "full_params" in held
    with pytest.raises(TypeError, match="got a dict; expected a model"):
        shardcore.digest({})  # type: ignore[call-overload]
    with pytest.raises(ValueError, match='what="states" for a Linear that is not sharded'):
        shardcore.digest(nn.Linear(2, 2), "states")


def _on_cuda(rank: int, world_size: int) -> list[Any]:
    found = []
    for stage, offload in (
        (0, None),
        (2, {"optimizer": "cpu"}),
        (3, {"optimizer": "cpu", "ratio": 0.4}),
    ):
        model, optimizer = trained(stage, {}, precision="bf16", offload=offload)
        found.append(digests_of(model)[::3])
        del model, optimizer
    return found


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_streams_of_a_device() -> None:
    """The pretended GPU raises for what streams or devices would get wrong."""
    of_ranks = run_pretended(2, _on_cuda)
    assert all(each == of_ranks[0][0] for found in of_ranks for each in found)
