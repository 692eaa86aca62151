"""Which device and backend a rank communicates over; errors at the start of a collective, and
after the end of its group.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardcore
from shardcore.distributed import comm as comm_module
from shardcore.distributed import joining
from shardcore.distributed.comm import Comm, Started, Traffic
from shardcore.distributed.groups import NotAMemberError
from tests.support.groups import as_on_nccl
from tests.support.models import Run, batch_of, error_of, loss_of, make_net, train
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(
    ("of_model", "bound", "local_rank", "seen", "expected"),
    [
        (3, 2, "1", 4, 3),
        (None, 2, "1", 4, 2),
        (None, 2, None, 4, 2),
        (None, None, "1", 4, 1),
        (None, None, "7", 1, 0),
        (None, None, None, 4, 0),
    ],
)
@pytest.mark.parametrize("chosen", [0, 2])
def test_the_gpu_over_which_the_first_message_goes(
    of_model: int | None,
    bound: int | None,
    local_rank: str | None,
    seen: int,
    chosen: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of NCCL: the model's; else the bound one; else the current one, if it is not 0; else
    LOCAL_RANK's. It is made current.
    """
    if chosen >= seen:
        pytest.skip("the rank sees no such GPU")
    if of_model is None and bound is None and chosen:
        expected = chosen
    model = nn.Linear(2, 2)
    if of_model is not None:
        with FakeTensorMode():  # needs no GPU, as long as torch does not think that there are some
            model = nn.Module()
            model.weight = nn.Parameter(torch.empty(2, device=f"cuda:{of_model}"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(("current", device)))

    def joined(*given: Any) -> Comm:
        found.append(Comm(*given).device)
        raise NotAMemberError("enough")

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        world.bound_device_id = None if bound is None else torch.device("cuda", bound)
        with monkeypatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
            patch.setattr(joining, "Comm", joined)
            with pytest.raises(NotAMemberError):
                shardcore.shard(model, None)
        world.bound_device_id = None
    finally:
        dist.destroy_process_group()
    own, given = torch.device("cuda", expected), bound is not None or local_rank is not None
    assert found == [*[("current", own)] * (of_model is None and given), own]


def test_a_local_rank_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_available": True, "device_count": 4, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setenv("LOCAL_RANK", "4")
    model = make_net()
    for start in (
        lambda: shardcore.shard(model, shardcore.FusedAdam(model.parameters())),
        lambda: shardcore.initialize(model=model, config={}),
    ):
        with pytest.raises(
            ValueError,
            match="LOCAL_RANK is 4 but this process sees 4 CUDA devices; expected one for each",
        ):
            start()


def test_nccl_that_torch_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            assert not Comm().uses_nccl
            # as torch has it after init_process_group()
            patch.setattr(dist, "get_backend", lambda group: "undefined")
            patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
            comm = Comm()
            assert comm.uses_nccl
            assert comm.device == torch.device("cuda:0")
    finally:
        dist.destroy_process_group()


def _rows(rank: int, world_size: int, shift: int) -> bool:
    comm = Comm()
    comm.acquire_group()
    with pytest.MonkeyPatch.context() as patch:
        roll = torch.Tensor.roll
        patch.setattr(
            torch.Tensor, "roll", lambda rows, shifts, dim: roll(rows, shifts + shift, dim)
        )
        rows = [
            comm.all_gather_cpu(torch.tensor([rank, 7.0]), kind).tolist()
            for kind in (Traffic.STEP, Traffic.READ)
        ]
    return rows == [[[float(other), 7.0] for other in range(world_size)]] * 2


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_small_rows_come_in_the_order_of_ranks(world_size: int) -> None:
    assert all(run_ranks(world_size, _rows, 0))
    assert not any(run_ranks(world_size, _rows, 1)), "else the test could not fail"


def _start_fails(rank: int, world_size: int) -> list[str]:
    """What each kind of collective says if the backend refuses to start it."""

    def refuse(*given: Any, **options: Any) -> None:
        raise RuntimeError("NCCL communicator was aborted on rank 1.")

    with as_on_nccl() as patch:
        comm = Comm()
        comm.acquire_group()
        for owner, name in (
            (dist, "all_to_all_single"),
            (comm_module, "_reduce_scatter"),
            (comm_module, "_all_gather"),
            (dist, "batch_isend_irecv"),
        ):
            patch.setattr(owner, name, refuse)
        full, part, ranks = torch.zeros(4), torch.zeros(2), range(world_size)
        said = []
        for start in (
            lambda: comm.all_to_all(full, full.clone(), Traffic.BACKWARD, "the exchange"),
            lambda: comm.reduce_scatter(part, full, "the exchange"),
            lambda: comm.all_gather([full], Traffic.READ, "the exchange"),
            lambda: comm.gather_parts([part, part.clone()], Traffic.READ, "the exchange", ranks),
        ):
            comm._slot.broken = ""
            said.append(f"{error_of(start)} {comm.broken}")
    return said


def test_an_error_at_the_start_of_a_collective_is_explained() -> None:
    for said in run_ranks(2, _start_fails):
        for text in said:
            assert text.startswith("RuntimeError: waiting for the other ranks failed: a rank ended")
            assert text.endswith(
                "torch.distributed reports, at the exchange: NCCL communicator was aborted on rank "
                "1. True"
            )


def _ended_in_backward(rank: int, world_size: int) -> tuple[str, int]:
    """The group is ended while gradients are in flight, as by the watchdog; what is waited for
    after that.
    """
    with as_on_nccl() as patch:
        trained = train(rank, Run(steps=1))
        model: Any = trained[0]
        comm, waits = model._shardcore_engine.comm, [0]

        def fail(grad: torch.Tensor) -> None:
            for log in comm._logs:
                log.ended = "ranks wait for different things"
            patch.setattr(Started, "wait", lambda started: waits.__setitem__(0, waits[0] + 1))
            raise ValueError("planted")

        model.inp.weight.register_hook(fail)
        backward = lambda: loss_of(model, batch_of(1, 0, rank)).backward()  # noqa: E731
        assert error_of(backward) == "ValueError: planted"
        model._shardcore_engine.reducer.settle()
        return error_of(model.state_dict), waits[0]


def test_nothing_is_waited_for_after_the_watchdog_has_ended_a_group() -> None:
    assert (
        run_ranks(2, _ended_in_backward)
        == [("RuntimeError: ranks wait for different things", 0)] * 2
    )
