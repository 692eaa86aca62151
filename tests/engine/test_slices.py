"""Tensor-parallel models: the unsliced model within rounding, one hash over stages and tiers,
full state dicts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore.engine import regroup
from shardcore.engine.bucket import Bucket
from shardcore.engine.hooks import detach
from shardcore.engine.slices import Slice
from shardcore.optim.dtensor import is_dtensor, local_part
from tests.support.models import assert_one, error_of, hash_of, hash_of_training
from tests.support.ranks import run_ranks
from tests.support.slices import WIDTH, lm_loss, make_lm, mesh_of, sharded_lm, slice_lm, train_lm

OFFLOAD: dict[str, Any] = {"optimizer": "cpu"}
STREAMING = OFFLOAD | {"gradients": "cpu", "params": "cpu"}
# stage, whether the stream is cut by positions, options of shard
Case = tuple[int, bool, dict[str, Any]]
PLAIN: Case = (2, True, {})
LATE: Case = (1, True, {"offload": OFFLOAD, "overlap_step": True})
STREAMED: Case = (3, True, {"offload": STREAMING, "overlap_step": True})


def _train(
    rank: int, world: int, tp: int, cases: list[Case], steps: int = 2, adagrad: bool = False
) -> list[Any]:
    """For each case: the hash, the weights and the norms. Adagrad makes its states as it is
    made, not in its first step.
    """
    mesh, found = mesh_of(world, tp), []
    for stage, sequence, options in cases:
        if adagrad:
            model: Any = make_lm()
            if tp > 1:
                slice_lm(model, mesh["tp"], sequence)
            model, optimizer = shardcore.shard(
                model, torch.optim.Adagrad(model.parameters()), stage, process_group=mesh["dp"]
            )
        else:
            model, optimizer = sharded_lm(mesh, stage, sequence, **options)
        norms = train_lm(model, optimizer, mesh, range(steps))
        tier = (options.get("offload") or {}).get("optimizer", "device")
        assert shardcore.memory_report(model).by_tier[tier] > 0, (
            "the states are where they are to be"
        )
        found.append(
            (
                hash_of_training(model, optimizer),
                {k: v.tolist() for k, v in model.state_dict().items()},
                norms,
            )
        )
    return found


def _error(found: Any, expected: Any) -> float:
    """The largest difference between two trainings' weights, relative to one, and norms."""
    assert list(found[1]) == list(expected[1])
    pairs = [
        (torch.tensor(found[1][key]), torch.tensor(value)) for key, value in expected[1].items()
    ]
    pairs.append((torch.tensor(found[2]), torch.tensor(expected[2])))
    return max(((a - b).abs() / b.abs().clamp(1.0)).max().item() for a, b in pairs)


@pytest.mark.parametrize(
    ("dp", "cases"),
    [
        (1, [(0, True, {}), LATE, STREAMED, (2, False, {})]),
        pytest.param(
            2, [(0, True, {}), PLAIN, (3, True, {}), (2, False, {})], marks=pytest.mark.more
        ),
    ],
)
def test_the_unsliced_model_within_rounding_and_one_hash(dp: int, cases: list[Case]) -> None:
    plain = run_ranks(dp, _train, 1, [PLAIN])[0][0]
    found = run_ranks(2 * dp, _train, 2, cases)
    for of_rank in found:
        # without positions the sums have another order
        assert_one(hashed for hashed, *_ in of_rank[:-1])
        assert all(_error(one, plain) < 2e-6 for one in of_rank)
    assert_one(of_rank[0][0] for of_rank in found)


@pytest.mark.more
def test_an_optimizer_that_makes_its_states_at_once() -> None:
    plain = run_ranks(2, _train, 1, [PLAIN], 2, True)[0][0]
    found = run_ranks(4, _train, 2, [(0, False, {}), (3, False, {})], 2, True)
    assert_one(hashed for of_rank in found for hashed, *_ in of_rank)
    assert all(_error(one, plain) < 2e-6 for of_rank in found for one in of_rank)


FORMS: dict[int, dict[str, Any]] = {
    2: {"precision": "bf16", "units": nn.Linear},
    4: {"precision": "fp16", "clip_grad_norm": None},
}


@pytest.mark.more
@pytest.mark.parametrize(("tp", "cases"), [(2, [PLAIN, STREAMED]), (4, [(0, True, {}), LATE])])
def test_one_hash_over_forms(tp: int, cases: list[Case]) -> None:
    found = run_ranks(
        4,
        _train,
        tp,
        [(stage, sequence, options | FORMS[tp]) for stage, sequence, options in cases],
    )
    assert_one(hashed for of_rank in found for hashed, *_ in of_rank)


def test_states_and_weights_on_nvme_have_the_same_hash(tmp_path: Any) -> None:
    nvme = OFFLOAD | {"optimizer": "nvme", "path": str(tmp_path), "durable": False}
    cases: list[Case] = [PLAIN, (1, True, {"offload": nvme, "overlap_step": True})]
    cases.append((3, True, {"offload": nvme | {"gradients": "cpu", "params": "nvme"}}))
    assert_one(hashed for of_rank in run_ranks(4, _train, 2, cases) for hashed, *_ in of_rank)


_local = Slice.local


def _without_sum(self: Slice, dtensor: Any) -> torch.Tensor:
    return local_part(dtensor) if self.dim is None else _local(self, dtensor)


def _counted_on_each(rank: int, world: int) -> list[Any]:
    always = property(lambda bucket: True, lambda bucket, value: None)
    with mock.patch.object(Bucket, "counted", always, create=True):
        return _train(rank, world, 2, [PLAIN])


def test_what_all_ranks_have_counts_once() -> None:
    """Twice is seen."""
    plain = run_ranks(1, _train, 1, [PLAIN])[0][0]
    assert _error(run_ranks(2, _counted_on_each)[0][0], plain) > 1e-4


class Beside(nn.Module):
    """A sliced layer, and one that adds to its part of the outputs, as adapters do: a plain
    weight of local shape.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(WIDTH, 3 * WIDTH // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def _unlike(rank: int, world: int, stages: list[int]) -> list[tuple[str, bool]]:
    """What the first step says of gradients that differ between tensor-parallel ranks, and
    whether it wrote nothing.
    """
    mesh, found = mesh_of(world, 2), []
    for stage in stages:
        model: Any = make_lm()
        slice_lm(model, mesh["tp"], False)
        model.blocks[1].mlp.up = Beside(model.blocks[1].mlp.up)
        model, optimizer = shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), stage, process_group=mesh["dp"]
        )
        before = hash_of_training(model, optimizer)
        text = error_of(partial(train_lm, model, optimizer, mesh, range(1)))
        found.append((text, hash_of_training(model, optimizer) == before))
    return found


def test_gradients_that_differ_between_tensor_parallel_ranks_are_named_at_the_first_step() -> None:
    for of_rank in run_ranks(4, _unlike, [0, 2, 3]):
        for text, kept in of_rank:
            assert text.startswith(
                "ValueError: step: the gradient of blocks.1.mlp.up.adapter.bias, which every "
                "tensor-parallel"
            )
            assert "(none was updated)" in text
            assert kept


def _without_the_sum(rank: int, world: int) -> str:
    with mock.patch.object(Slice, "local", _without_sum):
        return error_of(lambda: _train(rank, world, 2, [PLAIN]))


def test_a_gradient_whose_sum_over_the_mesh_is_not_taken_is_seen() -> None:
    for text in run_ranks(2, _without_the_sum):
        assert text.startswith("ValueError: step: the gradient of "), text


# --- state dicts ----------------------------------------------------------------------------------


def _through_state_dicts(rank: int, world: int) -> list[bool]:
    """From a model of dp x tp at stage 3 to a plain one, and one at stage 0, and on, by full
    state dicts.
    """
    mesh = mesh_of(world, 2)
    model, optimizer = sharded_lm(mesh, 3)
    train_lm(model, optimizer, mesh, range(2))
    saved = model.state_dict(), optimizer.state_dict()
    plain = make_lm()
    plain.load_state_dict(saved[0])
    torch_adam = torch.optim.AdamW(plain.parameters())
    torch_adam.load_state_dict(saved[1])
    same = [hash_of(plain.state_dict().values()) == hash_of(saved[0].values())]
    other, other_optimizer = sharded_lm(mesh, 0)
    other.load_state_dict(plain.state_dict())
    other_optimizer.load_state_dict(saved[1])
    same.append(hash_of_training(other, other_optimizer) == hash_of_training(model, optimizer))
    for each, its in ((model, optimizer), (other, other_optimizer)):
        train_lm(each, its, mesh, range(2, 3))
    same.append(hash_of_training(other, other_optimizer) == hash_of_training(model, optimizer))
    return same


@pytest.mark.more
def test_state_dicts_are_full_and_load_anywhere() -> None:
    assert run_ranks(4, _through_state_dicts) == [[True] * 3] * 4


def _save_sharded(rank: int, world: int, tp: int, stage: int, folder: str) -> str:
    mesh = mesh_of(world, tp)
    model, optimizer = sharded_lm(mesh, stage)
    train_lm(model, optimizer, mesh, range(2))
    state = {
        "model": shardcore.sharded_state_dict(model),
        "optimizer": shardcore.sharded_state_dict(optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    return hash_of_training(model, optimizer)


def _load_sharded(rank: int, world: int, tp: int, stage: int, folder: str) -> str:
    model, optimizer = sharded_lm(mesh_of(world, tp), stage)
    state = {
        "model": shardcore.sharded_state_dict(model),
        "optimizer": shardcore.sharded_state_dict(optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    shardcore.load_sharded_state_dict(model, state["model"])
    shardcore.load_sharded_state_dict(optimizer, state["optimizer"])
    return hash_of_training(model, optimizer)


SHAPES = [(4, 2), (4, 1), (2, 2), (1, 1)]  # ranks, and how many of them slice


@pytest.mark.cases(1)
@pytest.mark.parametrize(("before", "after"), [(0, 1), (3, 2)])
def test_sharded_state_dicts_reshard_over_both_dimensions(
    before: int, after: int, tmp_path: Any
) -> None:
    (ranks, tp), (new_ranks, new_tp) = SHAPES[before], SHAPES[after]
    saved = run_ranks(ranks, _save_sharded, tp, before % 4, str(tmp_path))
    loaded = run_ranks(new_ranks, _load_sharded, new_tp, 3 - after % 4, str(tmp_path))
    assert_one([*saved, *loaded])


# --- gradients, edits and frozen weights ----------------------------------------------------------


def _gradients(rank: int, world: int, stage: int) -> list[Any]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = mesh_of(world, 2)
    model, optimizer = sharded_lm(mesh, stage, clip_grad_norm=None)
    loss = lm_loss(model, 0, 0, True)
    with loss_parallel():
        loss.backward()
    plain = make_lm()
    lm_loss(plain, 0, 0, False).backward()
    errors, names = [], dict(model.named_parameters())
    for name, param in plain.named_parameters():
        assert param.grad is not None
        grad = shardcore.full_grad(names[name])
        errors.append((grad - param.grad).abs().max().item())
        shown = names[name].grad
        if stage == 0:
            shown = shown.full_tensor() if isinstance(shown, DTensor) else shown
            errors.append((shown - param.grad).abs().max().item())
        else:
            assert shown is None
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    errors.append(abs((norm - nn.utils.clip_grad_norm_(plain.parameters(), 0.1)).item()))
    clipped = shardcore.full_grad(model.head.weight)
    assert clipped is not None
    errors.append((clipped - plain.head.weight.grad).abs().max().item())
    if stage == 0:  # edits in place reach the step
        with torch.no_grad():
            model.head.weight.grad.mul_(0.0)
        edited = shardcore.full_grad(model.head.weight)
        assert edited is not None
        errors.append(edited.abs().max().item())
    with shardcore.full_params(model), torch.no_grad():
        model.head.weight.mul_(0.0)
        model.norm.weight.mul_(0.0)
    optimizer.zero_grad()
    state = model.state_dict()
    errors += [state[name].abs().max().item() for name in ("head.weight", "norm.weight")]
    return errors


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.more), 3])
def test_gradients_and_edits(stage: int) -> None:
    assert all(max(errors) < 1e-6 for errors in run_ranks(2, _gradients, stage))


def _frozen(rank: int, world: int, stages: list[int]) -> list[tuple[str, bool]]:
    """Some slices are frozen, each rank begins with other weights, and torch's AdamW is given."""
    mesh, found = mesh_of(world, 2), []
    for stage in stages:
        model: Any = make_lm()
        with torch.no_grad():
            model.norm.weight.mul_(1.0 + rank)
            model.blocks[0].first.weight.mul_(1.0 + rank)
        slice_lm(model, mesh["tp"], sequence=False)
        for name in ("norm.weight", "blocks.0.mlp.up.weight", "blocks.1.attention.out.bias"):
            model.get_parameter(name).requires_grad_(False)
        given = [param for param in model.parameters() if param.requires_grad]
        model, optimizer = shardcore.shard(
            model,
            torch.optim.AdamW(given, lr=1e-2),
            stage,
            process_group=mesh["dp"],
            precision="bf16",
        )
        train_lm(model, optimizer, mesh, range(2))
        state = model.state_dict()
        untouched = torch.equal(
            state["blocks.0.mlp.up.weight"].float(),
            make_lm().blocks[0].mlp.up.weight.bfloat16().float(),
        )
        model.load_state_dict(state)
        found.append((hash_of(value.float() for value in model.state_dict().values()), untouched))
    return found


@pytest.mark.more
def test_frozen_slices_and_weights_that_differ_before() -> None:
    found = run_ranks(4, _frozen, [0, 3])
    assert_one(hashed for of_rank in found for hashed, _ in of_rank)
    assert all(untouched for of_rank in found for _, untouched in of_rank)


# --- what begins to train later, and what is no longer sharded ------------------------------------


def _later(rank: int, world: int, tp: int, cases: list[Case], broken: bool = False) -> list[Any]:
    """Train queries and keys after two steps, what else is frozen after three. Then detach,
    shard anew, and train on.
    """
    mesh, found, move = mesh_of(world, tp), [], regroup._move

    def forgets(engine: Any, gone: Any, made: list[Bucket]) -> None:
        move(engine, gone, made)
        for managed in (managed for bucket in made for managed in bucket.params if broken):
            managed.step = 0

    for stage, sequence, options in cases:
        model: Any = make_lm()
        if tp > 1:
            slice_lm(model, mesh["tp"], sequence)
        attention, later = (
            model.blocks[1].attention,
            [*model.blocks[1].attention.out.parameters(), *model.norm.parameters()],
        )
        for param in [*later, attention.query.weight, attention.key.weight]:
            param.requires_grad_(False)
        given = [param for param in model.parameters() if all(param is not one for one in later)]
        optimizer: Any = shardcore.FusedAdam(given, lr=1e-2)
        model, optimizer = shardcore.shard(
            model, optimizer, stage, process_group=mesh["dp"], clip_grad_norm=0.5, **options
        )
        norms = train_lm(model, optimizer, mesh, range(2))
        with mock.patch.object(regroup, "_move", forgets):
            for module in (attention.query, attention.key):
                shardcore.unfreeze(module)
            norms += train_lm(model, optimizer, mesh, range(2, 3))
            optimizer.add_param_group(
                {"params": [param.requires_grad_() for param in later], "lr": 3e-3}
            )
        norms += train_lm(model, optimizer, mesh, range(3, 5))
        weights, hashed = model.state_dict(), hash_of_training(model, optimizer)
        detach(model)
        shown = {
            name: value.full_tensor() if tp > 1 and is_dtensor(value) else value
            for name, value in model.state_dict().items()
        }
        assert all(torch.equal(value, weights[name]) for name, value in shown.items())
        model, optimizer = shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), 2, process_group=mesh["dp"]
        )
        train_lm(model, optimizer, mesh, range(1))
        found.append(
            (
                hashed,
                {k: v.tolist() for k, v in weights.items()},
                norms,
                hash_of_training(model, optimizer),
            )
        )
    return found


LATER: list[Case] = [(3, True, {}), LATE]


def test_slices_that_train_later_and_detached_ones() -> None:
    plain, found = run_ranks(2, _later, 1, LATER[:1])[0][0], run_ranks(4, _later, 2, LATER)
    assert_one(hashed for of_rank in found for hashed, *_ in of_rank)
    assert_one(again for of_rank in found for *_, again in of_rank)
    assert all(_error(one, plain) < 2e-6 for of_rank in found for one in of_rank)


def test_lost_counts_of_slices_are_seen() -> None:
    plain, found = (
        run_ranks(2, _later, 1, LATER[:1])[0][0],
        run_ranks(4, _later, 2, LATER[:1], True),
    )
    assert _error(found[0][0], plain) > 1e-4


def _refused_on_one(rank: int, world: int) -> list[str]:
    model, optimizer = sharded_lm(mesh_of(world, 2), 2, frozen="blocks.1")
    late = [param.requires_grad_() for param in model.blocks[1].parameters()]
    texts = [
        error_of(lambda: optimizer.add_param_group({"params": late, "lr": -1.0 if rank else 0.1}))
    ]
    assert len(optimizer.param_groups) == 1
    return texts


def test_a_group_that_one_slice_refuses_is_in_none() -> None:
    first, second = run_ranks(2, _refused_on_one)
    assert "rank 1 refused: " in first[0]
    assert "lr" in second[0]


# --- what is refused ------------------------------------------------------------------------------


def _refusals(rank: int, world: int, folder: str) -> list[str]:
    texts = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises((ValueError, NotImplementedError)) as raised:
            call()
        texts.append(str(raised.value))

    mesh = mesh_of(world, 2)
    refused(lambda: sharded_lm(mesh, 2, offload={"optimizer": "nvme", "path": folder}))
    sliced = make_lm()
    slice_lm(sliced, mesh["tp"], sequence=False)
    refused(lambda: shardcore.shard(sliced, shardcore.FusedAdam(sliced.parameters())))
    matrices = [param for param in sliced.blocks.parameters() if param.dim() == 2]
    refused(lambda: shardcore.shard(sliced, shardcore.Muon(matrices), process_group=mesh["dp"]))
    optimizer = torch.optim.AdamW(sliced.parameters())
    sliced.head.weight.sum().full_tensor().backward()
    optimizer.step()
    optimizer.zero_grad()
    refused(lambda: shardcore.shard(sliced, optimizer, process_group=mesh["dp"]))
    both = make_lm()
    slice_lm(both, init_device_mesh("cpu", (world,)), sequence=False)
    refused(
        lambda: shardcore.shard(
            both, shardcore.FusedAdam(both.parameters()), process_group=mesh["dp"]
        )
    )
    return texts


@pytest.mark.more
def test_what_is_not_supported_is_named(tmp_path: Any) -> None:
    expected = [
        "shard: states in files that outlast the process: not available yet",
        "shard: the model is already sharded (DTensor) over the ranks",
        "shard: Muon: not available yet",
        "shard: the state that the optimizer has: not available yet",
        "shard: the model is already sharded (DTensor) over the ranks",
    ]
    for texts in run_ranks(4, _refusals, str(tmp_path)):
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start), text
