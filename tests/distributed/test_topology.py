"""Ranks in nodes: gradients added over a node, then over nodes; hybrid sharding; weights kept by
a few ranks.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore.distributed import comm as comm_module
from shardcore.distributed import joining
from shardcore.distributed.comm import Comm, Traffic
from shardcore.distributed.groups import group_beside
from shardcore.distributed.topology import Topology
from tests.support.choice import EVERY, part, some
from tests.support.groups import as_on_nccl
from tests.support.logs import logged
from tests.support.models import (
    Run,
    batch_of,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
    stepped,
    train,
)
from tests.support.ranks import run_ranks

MESH, NODES, FLAT = "mesh of 2 x 2", "2 ranks a node", "flat"


def _start(rank: int, layout: str, **run: Any) -> tuple[Any, Any]:
    shard = run.pop("shard", {})
    if layout == MESH:
        shard = {
            **shard,
            "process_group": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        }
    elif layout == NODES:
        shard = {**shard, "ranks_per_node": 2}
    model, optimizer, _ = train(rank, Run(shard={"clip_grad_norm": 0.5, **shard}, **run))
    return model, optimizer


LEAVING = {"optimizer": "cpu", "gradients": "cpu", "ratio": 0.6}


def _hashes(rank: int, world_size: int, layout: str, runs: list[dict[str, Any]]) -> list[str]:
    return [hash_of_training(*_start(rank, layout, **run)) for run in runs]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("accumulate", "sync_each"), some([(1, None), (3, True), (3, False)], [(1, None), (3, True)])
)
@pytest.mark.parametrize("every", EVERY)
def test_one_hash_for_every_stage_and_layout_of_nodes(
    accumulate: int, sync_each: bool | None, every: int
) -> None:
    """The way of adding is configuration, the sharding is not: hybrid or not, stage, tier, and
    what a few ranks keep.
    """
    common = {"accumulate": accumulate, "steps": 2, "shard": {"sync_each": sync_each}}
    runs = [{"stage": stage, **common} for stage in (0, 1, 2, 3)]
    runs.append({"stage": 2, **common, "shard": {**common["shard"], "offload": LEAVING}})
    runs.append({"stage": 3, **common, "shard": {**common["shard"], "reshard_after_forward": 2}})
    runs += [
        {"stage": stage, **common, "shard": {**common["shard"], "overlap_step": True}}
        for stage in (1, 3)
    ]
    hashes = set()
    for number, layout in enumerate((MESH, NODES)):
        of_layout = part(runs, min(every, 2) if accumulate == 1 else every, number)
        hashes |= {
            value for of_rank in run_ranks(4, _hashes, layout, of_layout) for value in of_rank
        }
    assert len(hashes) == 1
    flat = {value for of_rank in run_ranks(4, _hashes, FLAT, runs[:1]) for value in of_rank}
    assert hashes != flat, "else the test could not fail"


def _as_on_nccl(
    rank: int, world_size: int, layout: str, runs: list[dict[str, Any]]
) -> tuple[list[str], int, list[int]]:
    """Return the hashes, how many batches of messages were sent, and the bytes that each run
    sends off the node.
    """
    batches, off_node = 0, [0]
    exchange, all_gather, all_to_all = (
        dist.batch_isend_irecv,
        comm_module._all_gather,
        dist.all_to_all_single,
    )

    def counted_batch(calls: list[dist.P2POp]) -> Any:
        nonlocal batches
        batches += 1
        return exchange(calls)

    def count(group: dist.ProcessGroup, part: int) -> None:
        others = [other for other in dist.get_process_group_ranks(group) if other // 2 != rank // 2]
        off_node[-1] += part * len(others)

    def counted_gather(
        fulls: list[torch.Tensor], owns: list[torch.Tensor], group: dist.ProcessGroup
    ) -> Any:
        count(group, sum(own.nbytes for own in owns))
        return all_gather(fulls, owns, group)

    def counted_exchange(received: torch.Tensor, sent: torch.Tensor, **options: Any) -> Any:
        count(options["group"], sent.nbytes // dist.get_world_size(options["group"]))
        return all_to_all(received, sent, **options)

    hashes = []
    with as_on_nccl() as patch:
        patch.setattr(dist, "batch_isend_irecv", counted_batch)
        patch.setattr(comm_module, "_all_gather", counted_gather)
        patch.setattr(dist, "all_to_all_single", counted_exchange)
        for run in runs:
            model, optimizer = _start(rank, layout, **run)
            off_node.append(0)
            stepped(model, optimizer, rank, 1)
            off_node.append(0)
            hashes.append(hash_of_training(model, optimizer))
    return hashes, batches, off_node[1::2]


@pytest.mark.more
def test_on_nccl_levels_are_collectives_of_groups_and_a_node_sends_each_byte_once() -> None:
    runs: list[dict[str, Any]] = [{"stage": stage, "steps": 1} for stage in (0, 2, 3)]
    runs.append({"stage": 3, "steps": 1, "shard": {"reshard_after_forward": 2}})
    runs.append({"stage": 3, "steps": 1, "shard": {"offload": {"params": "cpu"}}})
    sent = {}
    for layout in (NODES, MESH, FLAT):
        gloo = run_ranks(4, _hashes, layout, [{"stage": 1, "steps": 2}])
        for rank, (hashes, batches, off_node) in enumerate(run_ranks(4, _as_on_nccl, layout, runs)):
            assert set(hashes) == set(gloo[rank])
            assert batches == 0, "a message for each rank"
            sent[layout, rank] = off_node
    for rank in range(4):
        for nodes, flat in zip(sent[NODES, rank], sent[FLAT, rank], strict=True):
            assert nodes <= 0.51 * flat, "2 ranks a node: each byte once"


def _advice(rank: int, world_size: int, local: str, shard: dict[str, Any]) -> list[str]:
    """Return what shard says of nodes, of two models."""
    with as_on_nccl() as patch, logged() as said:
        patch.setattr(joining, "_advised", False)
        patch.setenv("LOCAL_WORLD_SIZE", local)
        for _ in range(2):
            _start(rank, FLAT, steps=0, shard=shard)
    return [text for text in said if "share a node" in text]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("local", "shard", "says"), [("2", {}, 1), ("4", {}, 0), ("2", {"ranks_per_node": 2}, 0)]
)
def test_flat_exchanges_over_nodes_are_advised_against_once(
    local: str, shard: dict[str, Any], says: int
) -> None:
    first, *others = run_ranks(4, _advice, local, shard)
    assert len(first) == says
    assert all("of which 2 share a node; expected ranks_per_node=2" in text for text in first)
    assert others == [[]] * 3


def _grads(rank: int, world_size: int, layout: str, stage: int) -> list[tuple[bool, bool]]:
    parts = []
    for other in range(4):
        plain = make_net()
        loss_of(plain, batch_of(0, 0, other)).backward()
        parts.append([param.grad for param in plain.parameters()])
    model, _ = _start(rank, layout, stage=stage, steps=0)
    loss_of(model, batch_of(0, 0, rank)).backward()
    return [
        (torch.equal(got, ((a + b) + (c + d)) * 0.25), torch.equal(got, (((a + b) + c) + d) * 0.25))
        for got, a, b, c, d in zip(
            map(shardcore.full_grad, model.parameters()), *parts, strict=True
        )
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("layout", "stage"), [(MESH, 0), (NODES, 2), (MESH, 3)])
def test_gradients_are_added_over_a_node_and_then_over_nodes(layout: str, stage: int) -> None:
    for of_rank in run_ranks(4, _grads, layout, stage):
        assert all(right for right, _ in of_rank)
        assert not all(flat for _, flat in of_rank), "else the test could not fail"


def _reads(rank: int, world_size: int, layout: str, stage: int) -> list[Any]:
    model, optimizer = _start(rank, layout, stage=stage, steps=2)
    saved = model.state_dict(), optimizer.state_dict()
    with shardcore.full_params(model), torch.no_grad():
        model.head.weight[1] = 2.0
    loss_of(model, batch_of(7, 0, rank)).backward()
    norm = shardcore.clip_grad_norm_(model, 0.1).item()
    grads = hash_of(shardcore.full_grad(param) for param in model.parameters())
    optimizer.step()
    edited = hash_of_training(model, optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    state = hash_of([shardcore.full_state(model.inp.weight, "exp_avg")])
    return [norm, grads, edited, hash_of_training(model, optimizer), state]


@pytest.mark.more
def test_whole_values_edits_and_loading_are_the_same_in_every_layout() -> None:
    seen = [
        of_rank
        for layout, stage in ((MESH, 3), (NODES, 1))
        for of_rank in run_ranks(4, _reads, layout, stage)
    ]
    assert all(values == seen[0] for values in seen)


def _saved_and_loaded(
    rank: int, world_size: int, layout: str, stage: int, folder: str
) -> list[str]:
    model, _ = _start(rank, layout, stage=stage)
    dcp.save(shardcore.sharded_state_dict(model), checkpoint_id=folder)
    other, _ = _start(rank, layout, stage=stage, seed=5, steps=1)
    state = shardcore.sharded_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    shardcore.load_sharded_state_dict(other, state)
    with shardcore.full_params(other):
        live = hash_of(param for _, param in sorted(other.named_parameters()))
    saved = model.state_dict()
    return [live, hash_of(saved[name] for name, _ in sorted(model.named_parameters()))]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("layout", "stage"), [(MESH, 1), (NODES, 2), (MESH, 3)])
def test_state_in_shards_is_restored(layout: str, stage: int, tmp_path: Path) -> None:
    for live, saved in run_ranks(4, _saved_and_loaded, layout, stage, str(tmp_path)):
        assert live == saved


def _traffic(rank: int, world_size: int, layout: str, reshard: bool | int) -> dict[str, Any]:
    partners: list[list[int]] = []
    real = Comm._exchange

    def recording(
        comm: Comm, sent: Any, received: Any, kind: Traffic, name: str, ranks: Any, of: Any
    ) -> Any:
        if kind == Traffic.WEIGHTS:
            partners.append(list(ranks))
        return real(comm, sent, received, kind, name, ranks, of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "_exchange", recording)
        model, _ = _start(rank, layout, stage=3, steps=0, shard={"reshard_after_forward": reshard})
        loss = loss_of(model, batch_of(0, 0, rank))
        forward, partners[:] = partners.copy(), []
        loss.backward()
    report = shardcore.memory_report(model)
    owned = {
        kind: sum(
            line.bytes for line in report.lines if line.kind == kind and line.unit != "shared"
        )
        for kind in report.by_kind
    }
    return {"forward": forward, "backward": partners, "owned": owned}


def test_hybrid_weights_never_leave_their_node() -> None:
    hybrid, flat = (run_ranks(4, _traffic, layout, True) for layout in (MESH, FLAT))
    for rank, seen in enumerate(hybrid):
        assert seen["forward"] + seen["backward"] == [[0, 1] if rank < 2 else [2, 3]] * 7, (
            "root, 3 blocks, 3 blocks"
        )
        assert seen["owned"]["weights"] == 2 * flat[rank]["owned"]["weights"]
        assert seen["owned"]["states"] == 2 * flat[rank]["owned"]["states"]


def test_weights_that_two_ranks_keep_are_gathered_from_them_alone() -> None:
    for rank, seen in enumerate(run_ranks(4, _traffic, FLAT, 2)):
        assert seen["forward"] == [[0, 1, 2, 3]] * 4
        assert seen["backward"] == [[0, 1] if rank < 2 else [2, 3]] * 3


def _refusal(rank: int, world_size: int, what: str) -> str:
    from torch.distributed.device_mesh import DeviceMesh

    options: dict[str, Any] = {
        "three dimensions": lambda: {"process_group": init_device_mesh("cpu", (2, 1, 1))},
        "other order": lambda: {"process_group": DeviceMesh("cpu", [[1], [0]])},
        "no divisor": lambda: {"ranks_per_node": 3},
        "both": lambda: {"process_group": init_device_mesh("cpu", (2, 1)), "ranks_per_node": 2},
        "ranks differ": lambda: {"ranks_per_node": 1 + rank},
    }[what]()
    model = make_net()
    try:
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()), **options)
    except ValueError as error:
        dist.barrier()
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("three dimensions", "process_group is a mesh of 3 dimensions; expected 1, or 2"),
        (
            "other order",
            "process_group is a mesh of the ranks [1, 0]; expected them in rising order",
        ),
        ("no divisor", "ranks_per_node is 3; expected a divisor of the 2 ranks"),
        ("both", "ranks_per_node is 2; expected 1, the mesh's second dimension, or None"),
        ("ranks differ", "option ranks is Topology"),
    ],
)
def test_refusals(what: str, message: str) -> None:
    for error in run_ranks(2, _refusal, what):
        assert message in error


def _outside(rank: int, world_size: int, names: tuple[str, str] | None) -> str:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=names)
    try:
        said = hash_of_training(
            *train(rank, Run(stage=3, steps=1, shard={"process_group": mesh}))[:2]
        )
        assert Comm(mesh).group is Comm(mesh).group, "a model more would take a group more"
    except ValueError as error:
        said = str(error)
    return said


@pytest.mark.parametrize("names", [("node", "rank"), None])
def test_a_rank_outside_the_mesh_raises_and_the_others_train(names: tuple[str, str] | None) -> None:
    first, second, outside = run_ranks(3, _outside, names)
    assert first == second
    assert "head.weight" in first
    assert (
        outside
        == "shard: process_group is a mesh without this rank; expected a mesh with this rank"
    )


def _in_more_groups(rank: int, world_size: int, meshes: bool) -> list[str]:
    """Train three models side by side, of all ranks (which are in different numbers of groups)
    or (meshes) of the first two.
    """
    from torch.distributed.device_mesh import DeviceMesh

    for ranks in ([0, 2], [1, 2]) if meshes else ([0, 2], [1, 2], [1, 2]):
        dist.new_group(ranks)
    where = {"process_group": DeviceMesh("cpu", [[0], [1]])} if meshes else {}
    dist.barrier()  # so that nobody goes before all are connected
    if meshes and rank == 2:
        return []
    models = [train(rank, Run(stage=1, steps=1, seed=seed, shard=where))[:2] for seed in range(3)]
    return [hash_of_training(*model) for model in models]


@pytest.mark.cases(1)
@pytest.mark.parametrize("meshes", [True, False])
def test_ranks_that_are_in_other_groups_besides_make_one_together(meshes: bool) -> None:
    first, second, third = run_ranks(3, _in_more_groups, meshes)
    assert first == second
    assert third in ([], first)
    assert len(set(first)) == 3


def _then_of_all(rank: int, world_size: int) -> int:
    """Make groups of two of three ranks, as for models of theirs, and then one of all."""
    pair = dist.new_group([0, 1])
    for _ in range(2 if rank < 2 else 0):
        group_beside(pair, [0, 1], torch.device("cpu"))
    return dist.get_world_size(dist.new_group(timeout=timedelta(seconds=20)))


def test_a_group_of_all_ranks_can_be_made_after_one_of_some() -> None:
    assert run_ranks(3, _then_of_all) == [3, 3, 3]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (5, 8)])
@pytest.mark.parametrize("replicate", [False, True])
def test_every_piece_is_reduced_once_and_owned_ranges_make_the_whole(
    nodes: int, per_node: int, replicate: bool
) -> None:
    world = nodes * per_node
    topology = Topology(world, per_node, replicate)
    assert sorted(topology.piece_index(rank) for rank in range(world)) == list(range(world))
    for rank in range(world):
        held = list(range(world))
        for ranks in topology.levels(rank):
            size = len(held) // len(ranks)
            held = held[ranks.index(rank) * size :][:size]
        assert held == [topology.piece_index(rank)], (
            "cutting level by level ends at the rank's piece"
        )
        ranges = [topology.owned_pieces(other) for other in topology.shard_ranks(rank)]
        assert [piece for first, last in ranges for piece in range(first, last)] == list(
            range(world)
        )
        assert [topology.piece_index(other) for other in topology.replica_ranks(rank)] == list(
            range(*topology.owned_pieces(rank))
        )
