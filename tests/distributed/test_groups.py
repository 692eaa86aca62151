"""Groups made beside the one that users give: gloo beside NCCL, of meshes, used again, and
destroyed ones.
"""

import gc
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardcore
from shardcore.distributed import comm as comm_module
from shardcore.distributed import groups as process_groups
from shardcore.distributed.comm import Comm
from shardcore.distributed.groups import slots_in_use, slots_of
from shardcore.engine.device_step import decides_on_device
from shardcore.torch_private import timeout_of
from tests.support.choice import combinations
from tests.support.groups import as_on_nccl, device_decides
from tests.support.logs import logged
from tests.support.models import (
    Run,
    batch_of,
    error_of,
    hash_of_training,
    hashes_of_runs,
    loss_of,
    make_net,
    train,
)
from tests.support.ranks import run_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@contextmanager
def nccl_alone(rank: int, world_size: int, store: str) -> Iterator[Counter[tuple[str, bool]]]:
    """Replace the default group by one of NCCL's stand-in; counts gathers by backend, and those
    of `Comm.all_gather_cpu`.
    """
    if not hasattr(dist.Backend, "STANDIN"):
        made = lambda *given: dist.ProcessGroupGloo(*given[:3], timeout=given[3])  # noqa: E731
        dist.Backend.register_backend("standin", made, devices=["cpu"])
    dist.barrier()  # or a rank that is still connecting would find this one gone
    dist.destroy_process_group()
    dist.init_process_group(
        "standin",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=40),
    )
    gather_cpu, all_gather = Comm.all_gather_cpu, comm_module._all_gather
    counted, compare = Counter[tuple[str, bool]](), [False]
    hosts = lambda: [place.host for place in slots_in_use()]  # noqa: E731

    def counted_gather(*given: Any) -> Any:
        compare[0] = True
        try:
            return gather_cpu(*given)
        finally:
            compare[0] = False

    def counts(call: Any) -> Any:
        def called(*given: Any, group: Any, **options: Any) -> Any:
            counted["gloo" if group in hosts() else "standin", compare[0]] += 1
            return call(*given, group=group, **options)

        return called

    with as_on_nccl() as patch:
        patch.setattr(Comm, "all_gather_cpu", counted_gather)
        patch.setattr(comm_module, "_all_gather", counts(all_gather))
        patch.setattr(dist, "isend", counts(dist.isend))
        yield counted


def _needs_no_device(comm: Comm) -> bool:
    """Whether the host would not wait for a GPU, where the stand-in's data lies."""
    comm.device, device = GPU, comm.device
    try:
        assert decides_on_device(GPU, "device", comm, False, False) == (comm.compare_device == CPU)
        return comm.compare_device == CPU
    finally:
        comm.device = device


RUNS = [Run(stage=stage, steps=3, shard={"clip_grad_norm": 0.3}) for stage in range(4)]
RUNS += [
    Run(precision="bf16"),
    Run(stage=1, shard={"offload": {"optimizer": "cpu"}, "overlap_step": True}),
]


def _all_told_by_gloo(rank: int, world_size: int, runs: list[Run], store: str) -> list[str]:
    hashes = []
    with nccl_alone(rank, world_size, store) as counted:
        for run in runs:
            with device_decides(forced="offload" not in run.shard):
                model, optimizer, _ = train(rank, run)
                counted.clear()
                assert _needs_no_device(optimizer._engine.comm)
                loss_of(model, batch_of(run.steps, 0, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
                hashes.append(hash_of_training(model, optimizer))
            assert counted["gloo", True] > 0
            assert not counted["standin", True], (
                "what the device's backend carries waits for the device"
            )
            assert not counted["gloo", False], "data stays where it is"
    return hashes


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world_size", "index"), combinations([2, 3], range(len(RUNS)), meet=1))
def test_what_ranks_exchange_about_a_step_goes_over_gloo(
    world_size: int, index: int, tmp_path: Any
) -> None:
    run = RUNS[index]
    more = Run(**{**vars(run), "steps": run.steps + 1})
    found = run_ranks(world_size, _all_told_by_gloo, [run], str(tmp_path / "store"))
    assert found == run_ranks(world_size, hashes_of_runs, [more])


def _several(rank: int, world_size: int, store: str) -> tuple[int, int]:
    with nccl_alone(rank, world_size, store):
        run = Run(stage=1, steps=1)
        first, one, _ = train(rank, run)
        second, two, _ = train(rank, run)
        beside = [model._engine.comm._slot.host for model in (one, two)]
        assert len(set(beside)) == 2, "each engine has its own, as their backwards may interleave"
        for group in beside:
            assert group is not None
            assert dist.get_backend(group) == "gloo"
            assert timeout_of(group, CPU) == timedelta(seconds=40)
        count = len(dist.distributed_c10d._world.pg_names)
        del first, one, second, two
        _, again, _ = train(rank, run)
        assert again._engine.comm._slot.host in beside
        return count, len(dist.distributed_c10d._world.pg_names)


def test_each_engine_has_one_which_the_next_engine_takes_over(tmp_path: Any) -> None:
    for before, after in run_ranks(2, _several, str(tmp_path / "store")):
        assert before == after


def _part(rank: int, world_size: int, store: str, shape: list[list[int]]) -> str:
    with nccl_alone(rank, world_size, store):
        for ranks in ([0, 1], [0, 1], [1, 2]):  # rank 0 is in two, rank 2 in one
            dist.new_group(ranks)
        mesh = DeviceMesh("cpu", shape)
        dist.barrier()  # so that nobody goes before all are connected
        if rank == 1:
            return ""
        world = dist.group.WORLD
        assert world is not None
        world.bound_device_id = GPU  # as of init_process_group(device_id=)
        model, optimizer, _ = train(rank, Run(stage=2, steps=3, shard={"process_group": mesh}))
        assert world.bound_device_id == GPU
        world.bound_device_id = None
        assert _needs_no_device(optimizer._engine.comm)
        host = optimizer._engine.comm._slot.host
        assert dist.get_process_group_ranks(host) == [0, 2]
        return hash_of_training(model, optimizer)


@pytest.mark.parametrize("shape", [[[0, 2]], [[0], [2]]])
def test_a_mesh_over_part_of_the_world(shape: list[list[int]], tmp_path: Any) -> None:
    """The others do not come: neither for the group, nor for a split of the communicator of a
    world with a bound device.
    """
    first, _, third = run_ranks(3, _part, str(tmp_path / "store"), shape)
    assert "head.weight" in first
    assert first == third


def _cannot(rank: int, world_size: int, late: bool, store: str) -> tuple[str, list[str], int]:
    attempts, new_group = [0], dist.new_group

    def fails(ranks: Any, *given: Any, **options: Any) -> Any:
        by_gloo = options.get("backend") == "gloo"
        attempts[0] += by_gloo
        made = new_group(ranks, *given, **options) if late or not by_gloo or rank != 1 else None
        if by_gloo and rank == 1:
            if made is not None:
                dist.destroy_process_group(made)
            else:
                # as torch does before it fails
                dist.distributed_c10d._process_group_name(ranks, False)
            raise RuntimeError("no interface")
        return made

    with (
        nccl_alone(rank, world_size, store),
        pytest.MonkeyPatch.context() as patch,
        logged() as said,
    ):
        patch.setattr(dist, "new_group", fails)
        patch.setattr(process_groups, "MAKING", timedelta(seconds=1))
        began = time.monotonic()
        models = [train(rank, Run(stage=stage, steps=4)) for stage in (2, 3)]
        assert time.monotonic() - began < 30, "of 40"
        for _, optimizer, _ in models:
            assert not _needs_no_device(optimizer._engine.comm)
        hashes = [hash_of_training(model, optimizer) for model, optimizer, _ in models]
        assert not [
            group
            for group in dist.distributed_c10d._world.pg_map
            if dist.get_backend(group) == "gloo"
        ]
    return "".join(said), hashes, attempts[0]


@pytest.mark.more
@pytest.mark.parametrize("late", [False, True])
def test_where_one_rank_can_make_none_all_do_without(late: bool, tmp_path: Any) -> None:
    """late: the others have made theirs."""
    found = run_ranks(3, _cannot, late, str(tmp_path / "store"))
    expected = run_ranks(3, hashes_of_runs, [Run(stage=stage, steps=4) for stage in (2, 3)])
    for _, hashes, attempts in found:
        assert hashes == expected[0]
        assert attempts == 1, "tried once, not for each model"
    assert found[1][0] == found[2][0] == ""
    reason = (
        "on 1 of 3 ranks; on rank 1: RuntimeError: no interface"
        if late
        else "on 3 of 3 ranks; on rank 0: RuntimeError: "
    )
    assert reason in found[0][0]
    assert "GLOO_SOCKET_IFNAME" in found[0][0]


def _destroyed(rank: int, world_size: int, store: str) -> list[str]:
    errors = []
    with nccl_alone(rank, world_size, store):
        model, optimizer, _ = train(rank, Run(stage=3, steps=1))
        dist.destroy_process_group()
        backward = lambda: loss_of(model, batch_of(1, 0, rank)).backward()  # noqa: E731
        for call in (backward, optimizer.step, model.state_dict):
            with pytest.raises(RuntimeError) as error:
                call()
            errors.append(str(error.value))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}2", rank=rank, world_size=world_size
    )
    dist.barrier()
    return errors


def test_a_destroyed_group_of_nccl_is_named(tmp_path: Any) -> None:
    for errors in run_ranks(2, _destroyed, str(tmp_path / "store")):
        for error in errors:
            assert (
                "the process group of this sharded model is gone (destroy_process_group)" in error
            )


def _elsewhere(rank: int, world_size: int, store: str) -> str:
    """Rank 1 reads full values where the others step."""
    with nccl_alone(rank, world_size, store):
        model, optimizer, _ = train(rank, Run(stage=1, steps=1))
        with pytest.raises(RuntimeError) as error:
            model.state_dict() if rank == 1 else optimizer.step()
        return str(error.value)


@pytest.mark.more
def test_ranks_at_different_points_all_raise(tmp_path: Any) -> None:
    """Messages of one are not taken for those of the other, and the watchdog ends both waits."""
    for error in run_ranks(3, _elsewhere, str(tmp_path / "store")):
        assert error.startswith("ranks wait for different things, which can never end: ")
        assert "ranks 0, 2 for a step" in error
        assert "rank 1 for state_dict" in error


def _with_gloo(rank: int, world_size: int) -> bool:
    """Groups that have gloo for the CPU make none."""
    with as_on_nccl():
        _, optimizer, _ = train(rank, Run(steps=1))
    assert _needs_no_device(optimizer._engine.comm)
    return all(place.host is None for place in slots_of(dist.group.WORLD))


def test_gloo_beside_nccl_needs_no_other() -> None:
    assert run_ranks(2, _with_gloo) == [True, True]


def _late(rank: int, world_size: int, store: str) -> str:
    """Rank 1 makes no step: the others' wait for it ends in an error, where NCCL would end the
    process.
    """
    with nccl_alone(rank, world_size, store):
        group = dist.new_group(timeout=timedelta(seconds=3), backend="standin")
        _, optimizer, _ = train(
            rank, Run(stage=1, steps=1, shard={"process_group": group}), make_net()
        )
        if rank == 1:
            time.sleep(5)
            return ""
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        return str(error.value)


@pytest.mark.more
def test_a_wait_for_other_ranks_ends_at_the_groups_timeout(tmp_path: Any) -> None:
    first, _ = run_ranks(2, _late, str(tmp_path / "store"))
    assert "waiting for the other ranks failed" in first


def _many_models(rank: int, world_size: int) -> tuple[int, int]:
    for _ in range(3):
        model = make_net()
        model, optimizer = shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), 2, precision="bf16"
        )
        second = make_net()
        second, other = shardcore.shard(
            second, shardcore.FusedAdam(second.parameters()), 2, precision="bf16"
        )
        loss_of(second, batch_of(0, 0, rank)).backward()
        loss_of(model, batch_of(0, 0, rank)).backward()
        optimizer.step()
        other.step()
        del model, optimizer, second, other
    before = len(slots_of(dist.group.WORLD))
    _model, _, _ = train(rank, Run(steps=1))
    return before, len(slots_of(dist.group.WORLD))


def test_groups_of_engines_that_are_gone_are_used_again() -> None:
    first, second = run_ranks(2, _many_models)
    assert first == second
    assert first[0] == first[1] > 1


def _after_the_group(rank: int, world_size: int, stage: int, store: str) -> list[str]:
    model, optimizer, _ = train(rank, Run(steps=1, stage=stage))
    dist.destroy_process_group()
    backward = error_of(lambda: loss_of(model, batch_of(1, 0, rank)).backward())
    errors = [backward, error_of(optimizer.step), error_of(model.state_dict)]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    train(rank, Run(steps=1, stage=stage))
    return errors


@pytest.mark.parametrize("stage", [0, 3])
def test_a_destroyed_group_is_named(stage: int, tmp_path: Path) -> None:
    for errors in run_ranks(2, _after_the_group, stage, str(tmp_path / "store")):
        assert all(
            "the process group of this sharded model is gone (destroy_process_group)" in error
            for error in errors
        )


def _group_of_a_left_backward(rank: int, world_size: int) -> list[bool]:
    free = []
    for left, again in ((False, False), (True, False), (True, True)):
        one = Comm()
        one.acquire_group()
        slot = one._slot
        one.start_backward()
        if again:
            one.start_backward()  # the next backward, after one that was left
        if not left or again:
            one.end_backward()
        del one
        gc.collect()
        free.append(not slot.in_use)
    return free


def test_the_group_of_a_backward_that_was_left_is_not_used_again() -> None:
    assert run_ranks(2, _group_of_a_left_backward) == [[True, False, False]] * 2
