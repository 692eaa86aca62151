"""Pipelines of sharded stages train as the model that is not cut, with one hash over ZeRO stages
and tiers.
"""

import copy
import hashlib
import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardcore
from shardcore.extras import pipeline
from tests.support.models import Block, assert_one
from tests.support.ranks import run_ranks

WIDTH, MICROBATCHES, ROWS, MAX_NORM = 16, 4, 8, 0.05
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
STAGES_OF_A_RANK = {"interleaved": 2, "zero bubble": 2}
# At most 8 blocks, whose products and norms add up fewer than 80 terms, forward and backward: 1,280
# roundings of 2^-24, which are independent. Twice the root of their number, as a share of the
# largest gradient.
BOUND = 2 * 1280**0.5 * 2.0**-24


def modules(count: int) -> list[nn.Module]:
    """Return a model in so many parts."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(10, WIDTH), Block(WIDTH, 24), Block(WIDTH, 24))
    middle = [nn.Sequential(Block(WIDTH, 24), Block(WIDTH, 24)) for _ in range(count - 2)]
    return [first, *middle, nn.Sequential(Block(WIDTH, 24), nn.Linear(WIDTH, 5))]


def batch_of(step: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dp)
    return torch.randn(ROWS, 10, generator=generator), torch.randn(ROWS, 5, generator=generator)


def part_of_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output - y).square().mean() / MICROBATCHES


def on_meta(parts: list[nn.Module]) -> tuple[list[nn.Module], Any]:
    """Return the parts without weights, and what fills them with those that they had."""
    empty = [copy.deepcopy(part).to("meta") for part in parts]
    twins = {
        one: other
        for part, made in zip(parts, empty, strict=True)
        for one, other in zip(made.modules(), part.modules(), strict=True)
    }

    def fill(module: nn.Module) -> None:
        for param, values in zip(
            module.parameters(recurse=False), twins[module].parameters(recurse=False), strict=True
        ):
            param.copy_(values)

    return empty, fill


class Pipeline:
    """This rank's stages, sharded, and their schedule."""

    def __init__(
        self,
        rank: int,
        world: int,
        kind: str,
        pp: int,
        stage: int,
        loss: Any = part_of_loss,
        **options: Any,
    ) -> None:
        tp = options.pop("tp", 1)
        # Not "tp": torch's caches find meshes by ranks and names, and then use groups of another
        # test that are gone.
        mesh = init_device_mesh(
            "cpu", (world // pp // tp, pp, tp), mesh_dim_names=("dp", "pp", "tp of pp")
        )
        self.dp, self.pp, self.ends = mesh.get_local_rank("dp"), mesh.get_local_rank("pp"), pp - 1
        count = pp * STAGES_OF_A_RANK.get(kind, 1)
        self.numbers = range(self.pp, count, pp)
        scale = options.pop("scale_grads", False)
        parts, group = modules(count), mesh["pp"].get_group()
        if options.pop("meta", False):
            parts, options["materialize"] = on_meta(parts)
        for block in (
            module
            for part in parts
            for module in part.modules()
            if isinstance(module, Block) and tp > 1
        ):
            parallelize_module(
                block, mesh["tp of pp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        stages = [
            PipelineStage(parts[number], number, count, torch.device("cpu"), group=group)
            for number in self.numbers
        ]
        groups = {"process_group": mesh["dp"], "n_microbatches": MICROBATCHES}
        optimizer = shardcore.FusedAdam(
            chain(*(one.submod.parameters() for one in stages)), lr=1e-2
        )
        given = stages if len(stages) > 1 else stages[0]
        self.model, self.optimizer = shardcore.shard_pipeline(
            given, optimizer, stage, **groups, **options
        )
        self.schedule = SCHEDULES[kind](given, MICROBATCHES, loss_fn=loss, scale_grads=scale)

    def backwards(self, step: int) -> None:
        x, y = batch_of(step, self.dp)
        self.schedule.step(
            *([x] if self.pp == 0 else []), **({"target": y} if self.pp == self.ends else {})
        )

    def train(self, steps: range) -> None:
        for step in steps:
            self.backwards(step)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def named(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return values under their names in the whole model."""
        if len(self.numbers) == 1:
            return {f"{self.numbers[0]}.{name}": value.tolist() for name, value in tensors.items()}
        split = {(*name.split(".", 1),): value for name, value in tensors.items()}
        return {
            f"{self.numbers[int(index)]}.{name}": value.tolist()
            for (index, name), value in split.items()
        }


def gradients(
    rank: int, world: int, kind: str, pp: int, tp: int, stage: int, twin: str = ""
) -> tuple[dict[str, Any], float]:
    with pytest.MonkeyPatch.context() as patch:
        given: dict[str, Any] = {"tp": tp}
        if twin:
            patch.setattr(pipeline, "_refuse_scaling", lambda factor: None)
            given |= {
                "scale_grads": True,
                "loss": lambda output, y: part_of_loss(output, y) * MICROBATCHES,
            }
        one = Pipeline(rank, world, kind, pp, stage, **given)
        one.backwards(0)
    grads = one.named(
        {name: shardcore.full_grad(param) for name, param in one.model.named_parameters()}
    )
    return grads, shardcore.clip_grad_norm_(one.model, MAX_NORM).item()


def error_of(world: int, kind: str, pp: int, stage: int, tp: int = 1, twin: str = "") -> float:
    """Return the largest error of the gradients and of their norm, as shares, beside the whole
    model in float64.
    """
    whole = nn.Sequential(*modules(pp * STAGES_OF_A_RANK.get(kind, 1))).double()
    replicas = world // pp // tp
    for dp in range(replicas):
        x, y = batch_of(0, dp)
        ((whole(x.double()) - y.double()).square().mean() / replicas).backward()
    expected = {
        name: param.grad for name, param in whole.named_parameters() if param.grad is not None
    }
    found: dict[str, Any] = {}
    errors = []
    norm = nn.utils.get_total_norm(expected.values()).item()
    for grads, its_norm in run_ranks(world, gradients, kind, pp, tp, stage, twin):
        found.update(grads)
        errors.append(abs(its_norm - norm) / norm)
    assert set(found) == set(expected)
    for name, grad in expected.items():
        errors.append(((torch.tensor(found[name]) - grad).abs().max() / grad.abs().max()).item())
    return max(errors)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "world, kind, pp", [(2, "gpipe", 2), (4, "1f1b", 4), (4, "interleaved", 2)]
)
def test_gradients_are_those_of_the_whole_model(world: int, kind: str, pp: int) -> None:
    assert error_of(world, kind, pp, 2) < BOUND


@pytest.mark.more
def test_gradients_in_three_dimensions() -> None:
    assert error_of(8, "1f1b", 2, 3, tp=2) < BOUND


def test_gradients_that_nothing_divides_are_noticed() -> None:
    assert error_of(2, "gpipe", 2, 1, twin="scale_grads") > 1


def trained(
    rank: int, world: int, kind: str, stage: int, options: dict[str, Any]
) -> dict[str, Any]:
    one = Pipeline(rank, world, kind, 2, stage, clip_grad_norm=MAX_NORM, **options)
    one.train(range(3))
    return one.named(one.model.state_dict())


def reductions(rank: int, world: int, kind: str) -> int:
    """How often a step's gradients are reduced."""
    one = Pipeline(rank, world, kind, 2, 1, sync_each=False)
    one.train(range(1))
    return int(one.model._shardcore_engine.comm.collectives()["the end of a backward"])


def test_several_stages_of_a_rank_reduce_after_the_last_microbatch_of_all() -> None:
    assert run_ranks(4, reductions, "interleaved") == [1] * 4


def hash_of(kind: str, stage: int, options: dict[str, Any], world: int = 4) -> str:
    weights: dict[str, Any] = {}
    for part in run_ranks(world, trained, kind, stage, options):
        weights.update(part)
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()


PLACES: list[tuple[int, dict[str, Any]]] = [
    (2, {"offload": {"optimizer": "cpu"}}),
    (3, {}),
    (1, {}),
    (3, {"offload": {"optimizer": "cpu", "params": "cpu"}}),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "places"), [("1f1b", PLACES[2:]), ("interleaved", PLACES[:2])])
def test_one_hash_over_stages_and_tiers(
    kind: str, places: list[tuple[int, dict[str, Any]]]
) -> None:
    assert_one(hash_of(kind, stage, options) for stage, options in [(0, {}), *places])


@pytest.mark.more
def test_one_hash_in_three_dimensions() -> None:
    places = [PLACES[0], PLACES[3]]
    assert_one(hash_of("1f1b", stage, {"tp": 2, **options}, world=8) for stage, options in places)


@pytest.mark.more
def test_sliced_stages_on_the_meta_device() -> None:
    assert_one(hash_of("interleaved", 3, {"tp": 2, **options}) for options in ({}, {"meta": True}))


def resumed(rank: int, world: int, folder: str, tp: int) -> bool:
    """Save each stage's ranks into a folder of their own; go on from there at another ZeRO
    stage, to the same bits.
    """
    one = Pipeline(rank, world, "interleaved", 2, 2, tp=tp)
    own = Path(folder) / f"pipeline_{one.pp}"
    one.train(range(2))
    shardcore.save(own, one.model, one.optimizer)
    one.train(range(2, 4))
    other = Pipeline(rank, world, "interleaved", 2, 1, tp=tp)
    shardcore.load(own, other.model, other.optimizer)
    other.train(range(2, 4))
    return all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))


@pytest.mark.more
@pytest.mark.parametrize("tp", [1, 2])
def test_stages_are_saved_and_resumed(tp: int, tmp_path: Path) -> None:
    assert all(run_ranks(4, resumed, str(tmp_path), tp))


def scaled(rank: int, world: int) -> dict[str, Any]:
    """Train in float16: gradients of a step, one that overflows in the last stage alone, and one
    whose loss is not scaled.
    """
    pipelines: list[Pipeline] = []

    def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = part_of_loss(output.float(), y)
        return loss if factor is None else pipelines[0].optimizer.scale_loss(loss * factor)

    pipelines.append(one := Pipeline(rank, world, "1f1b", 2, 2, loss=loss_of, precision="fp16"))
    factor: float | None = 1.0
    one.backwards(0)
    grads = one.named(
        {name: shardcore.full_grad(param) for name, param in one.model.named_parameters()}
    )
    one.optimizer.zero_grad()
    factor = float("inf")
    one.train(range(1))
    assert one.optimizer.skipped_steps == 1
    factor = None
    with pytest.raises(
        ValueError,
        match="without the scale" if one.pp == one.ends else r"rank \d refused",
    ):
        one.train(range(1))
    return grads


def test_the_last_stage_scales_losses() -> None:
    whole = nn.Sequential(*modules(2)).double()
    x, y = batch_of(0, 0)
    (whole(x.double()) - y.double()).square().mean().backward()
    grads_of_stages = {name: grad for grads in run_ranks(2, scaled) for name, grad in grads.items()}
    for name, param in whole.named_parameters():
        assert param.grad is not None
        # tens of float16 roundings
        assert (
            torch.tensor(grads_of_stages[name]) - param.grad
        ).abs().max() < 0.02 * param.grad.abs().max()


def refused_schedule(rank: int, world: int, kind: str, options: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as raised:
        Pipeline(rank, world, kind, 2, 1, **options).backwards(0)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("gpipe", {"scale_grads": True}, "Pass scale_grads=False"),
        ("zero bubble", {}, "a schedule with whole backwards"),
        ("interleaved", {"overlap_step": True}, "overlap_step is True"),
    ],
)
def test_refused_schedules(kind: str, options: dict[str, Any], words: str) -> None:
    """Each over a group of its own: a schedule that raises abandons receives, which block
    whatever gloo sends next.
    """
    for message in run_ranks(2, refused_schedule, kind, options):
        assert words in message


def refused_arguments(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    module = nn.Linear(4, 4)  # of one shape in both stages: else their ranks find it out
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    with pytest.raises(ValueError) as swapped:
        shardcore.shard_pipeline(
            stage,
            shardcore.FusedAdam(module.parameters()),
            n_microbatches=2,
            process_group=mesh["pp"],
        )
    with pytest.raises(TypeError) as wrong:
        shardcore.shard_pipeline([nn.Linear(1, 1)], None, n_microbatches=1, process_group=None)
    return [str(swapped.value), str(wrong.value)]


def test_refused_arguments() -> None:
    for message in run_ranks(2, refused_arguments):
        assert "share the ranks [0, 1]" in message[0]
        assert "expected a PipelineStage" in message[1]
