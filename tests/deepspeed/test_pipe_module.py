"""PipelineModule: which rank makes which layers, and what they compute."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore as deepspeed
from shardcore.deepspeed.pipe_module import (
    LayerSpec,
    PipelineModule,
    PipeModelDataParallelTopology,
    TiedLayerSpec,
    partition,
)
from shardcore.distributed.groups import group_beside
from tests.support.ranks import run_ranks

# What deepspeed.runtime.utils.partition_balanced of 0.19.8 returns.
CUTS: list[tuple[list[int], list[int]]] = [
    ([1] * 26, [0, 4, 8, 11, 14, 17, 20, 23, 26]),
    ([1] * 10, [0, 3, 6, 8, 10]),
    ([9, 2, 2, 2, 2, 2, 2, 0, 1, 9], [0, 1, 4, 9, 10]),
    ([38, 7, 7, 7, 7, 7, 7, 0, 38], [0, 1, 8, 9]),
    ([0, 1, 1, 0, 1, 1, 0], [0, 4, 7]),
    ([5, 5, 5], [0, 1, 2, 3]),
    ([3, 4], [0, 2]),
]


@pytest.mark.parametrize("weights, bounds", CUTS)
def test_layers_are_cut_as_by_deepspeed(weights: list[int], bounds: list[int]) -> None:
    assert partition(weights, len(bounds) - 1) == bounds


def _grid(rank: int, world: int) -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=2)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pipe", "data", "model"))
    assert (*topology.get_coord(rank),) == (*mesh.get_coordinate(),)
    assert topology.get_rank(pipe=1, data=0, model=0) == 2
    assert topology.get_axis_comm_lists("pipe") == [[0, 2], [1, 3]]
    assert topology.get_axis_comm_lists("data") == [[0, 1], [2, 3]]
    assert topology.get_axis_list("pipe", 1) == topology.filter_match(pipe=1) == [2, 3]
    assert (topology.get_rank_repr(1), topology.get_rank_repr(1, ["model"], "+", "/")) == (
        "model_00",
        "pipe+00/data+01",
    )
    assert (topology.get_dim("data"), topology.get_dim("other"), topology.world_size()) == (2, 0, 4)
    grid = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], topology=topology).mpu()
    assert (grid.pp_group, grid.dp_group) == (
        [rank % 2, rank % 2 + 2],
        [rank // 2 * 2, rank // 2 * 2 + 1],
    )
    assert (grid.stage_to_global(1), grid.stage_to_global(1, data=0)) == (rank % 2 + 2, 2)
    assert (grid.get_pipe_parallel_rank(), grid.get_data_parallel_rank()) == (rank // 2, rank % 2)


def test_ranks_are_placed_as_in_a_mesh() -> None:
    run_ranks(4, _grid)


def _layers() -> list[Any]:
    return [
        LayerSpec(nn.Linear, 4, 8),
        torch.tanh,
        LayerSpec(nn.Linear, 8, 4),
        nn.LayerNorm(4),
        LayerSpec(nn.Linear, 4, 4),
    ]


def _parts_and_weights(
    rank: int, world: int, method: str
) -> tuple[list[int], dict[str, list[float]]]:
    module = PipelineModule(_layers(), num_stages=world, partition_method=method, seed_layers=True)
    assert [module.stage_owner(index) for index in (0, len(_layers()) - 1)] == [0, world - 1]
    return module.parts, {name: param.tolist() for name, param in module.named_parameters()}


@pytest.mark.parametrize(
    "method, parts", [("uniform", [0, 3, 5]), ("parameters", [0, 2, 5]), ("type:linear", [0, 4, 5])]
)
def test_layers_are_made_where_they_belong(method: str, parts: list[int]) -> None:
    ((_, whole),) = run_ranks(1, _parts_and_weights, method)
    of_ranks = run_ranks(2, _parts_and_weights, method)
    assert [bounds for bounds, _ in of_ranks] == [parts, parts]
    assert of_ranks[0][1] | of_ranks[1][1] == whole
    assert not of_ranks[0][1].keys() & of_ranks[1][1].keys()
    assert set(whole) == {
        f"{layer}.{kind}" for layer in (0, 2, 3, 4) for kind in ("weight", "bias")
    }


class Own(PipelineModule):
    """Cut by the user, as in a script that overrides a method of DeepSpeed's class."""

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = [0, 1, len(self._layer_specs)]
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


def _own(rank: int, world: int) -> list[str]:
    return [
        name for name, _ in Own(_layers(), num_stages=2, partition_method="manual").named_children()
    ]


def test_a_subclass_may_cut() -> None:
    assert run_ranks(2, _own) == [["tied_modules", "0"], ["tied_modules", "2", "3", "4"]]


@pytest.mark.parametrize(
    "every, names, recomputed",
    [(0, None, 0), (1, None, 3), (2, None, 5), (5, None, 5), (1, ["Linear"], 3)],
)
def test_activations_are_recomputed_in_backward(
    every: int, names: list[str] | None, recomputed: int
) -> None:
    torch.manual_seed(0)
    calls: list[int] = []
    layers: list[Any] = [nn.Linear(4, 4), torch.tanh, nn.Linear(4, 4), torch.tanh, nn.Linear(4, 4)]
    module = PipelineModule(
        layers,
        num_stages=1,
        activation_checkpoint_interval=every,
        checkpointable_layers=names,
        seed_layers=True,
        seed_fn=calls.append,
    )
    calls.clear()
    x = torch.randn(3, 4, requires_grad=True)
    module(x).sum().backward()
    assert len(calls) == 5 + recomputed
    value = x
    for layer in layers:
        value = layer(value)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(value.sum(), x)[0])


def test_tied_layers_of_one_stage_are_one_module() -> None:
    embed = partial(TiedLayerSpec, "embed", nn.Embedding, 5, 3)
    module = PipelineModule(
        [embed(), embed(forward_fn=lambda layer, x: x @ layer.weight.t())], num_stages=1
    )
    assert [name for name, _ in module.named_parameters()] == ["tied_modules.embed.weight"]
    weight = module.tied_modules["embed"].weight
    assert torch.equal(module(torch.tensor([1, 4])), weight[[1, 4]] @ weight.t())


def _beside(rank: int, world: int) -> None:
    tied = partial(TiedLayerSpec, "key", nn.Linear, 2, 2)
    module = PipelineModule([tied(), nn.Linear(2, 2), tied()], num_stages=world)
    assert len(module.tied) == (rank != 1)
    if rank < 2:  # as `shard` makes groups beside those that are given
        assert dist.group.WORLD is not None
        beside = group_beside(
            dist.group.WORLD, [0, 1], torch.device("cpu"), timeout=timedelta(seconds=20)
        )
        dist.barrier(beside)


def test_stages_with_and_without_a_tied_weight_find_each_other() -> None:
    run_ranks(3, _beside)


def _refusals(rank: int, world: int) -> None:
    linear = nn.Linear(2, 2)
    tied = partial(TiedLayerSpec, "key", nn.Linear, 2, 2)
    for match, layers, options in [
        ("num_stages and topology are both None", [linear], {}),
        ("num_stages is 3; expected a divisor of the 2 ranks", [linear], {"num_stages": 3}),
        ("layers has 1 for 2 stages", [linear], {"num_stages": 2}),
        (
            "topology has 2 tensor-parallel ranks",
            [linear],
            {"topology": PipeModelDataParallelTopology(1, 2, 1)},
        ),
        (
            r"of \[2, 2, 1\] ranks; expected pipe and data, for 2",
            [linear],
            {"topology": PipeModelDataParallelTopology(2, 1, 2)},
        ),
        (
            "partition_method is 'profile'",
            [linear],
            {"num_stages": 1, "partition_method": "profile"},
        ),
        (
            "no layer's class name matches 'conv'",
            [linear],
            {"num_stages": 1, "partition_method": "type:conv"},
        ),
        (
            r"layers\[1\] shares its parameter weight with layers\[0\]",
            [linear, linear],
            {"num_stages": 2},
        ),
        (
            "tied_weight_attr is 'scale', but Linear",
            [tied(tied_weight_attr="scale")] * 2,
            {"num_stages": 2},
        ),
        (
            "is a LayerNorm tied to a Linear",
            [tied(), TiedLayerSpec("key", nn.LayerNorm, 2)],
            {"num_stages": 1},
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            PipelineModule(layers, **options)
    with pytest.raises(TypeError, match=r"layers\[0\] is 5; expected a module"):
        PipelineModule([5], num_stages=1, partition_method="uniform")
    with pytest.raises(TypeError, match="typename is 5; expected a class"):
        LayerSpec(5)  # type: ignore[arg-type]


def test_refusals() -> None:
    run_ranks(2, _refusals)


def test_names() -> None:
    assert (
        deepspeed.PipelineModule is deepspeed.runtime.pipe.module.PipelineModule is PipelineModule
    )  # type: ignore[attr-defined]
