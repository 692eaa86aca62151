"""Trainings on a pretended GPU (pretend_device.py): nothing is refused there, and the bits are those of CPU ranks.

Twins: what a GPU, NCCL or a copy would refuse is refused, and a fault of shardcore's that only showed on GPUs is found.
"""

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore._native import _C
from shardcore.engine.bucket import Bucket
from shardcore.engine.nvme_weights import WEIGHT, NvmeWeights
from tests.support.groups import device_decides
from tests.support.models import Net, batch_of, error_of, hash_of, hash_of_training, loss_of, make_net
from tests.support.pretend_device import NAME, run_pretended, why_not
from tests.support.ranks import run_ranks
from tests.support.tiers import small_chunks

WHY_NOT = why_not()
pytestmark = [pytest.mark.more, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def _muon(model: Net) -> Any:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return shardcore.Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Net], Any]] = {
    "adam": lambda model: shardcore.FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1),
    "8bit": lambda model: shardcore.FusedAdam(model.parameters(), lr=1e-2, state_dtype="8bit", master="split"),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "muon": _muon,
}
STATES, GRADS = {"optimizer": "cpu"}, {"optimizer": "cpu", "gradients": "cpu"}
WEIGHTS = {**GRADS, "params": "cpu"}
FILES = {"optimizer": "nvme", "durable": False}


@dataclass(frozen=True)
class Case:
    """A training: what shard is told. decides: steps are decided on as on a GPU."""

    stage: int
    offload: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    precision: str = "bf16"
    decides: bool = False
    shard: dict[str, Any] = field(default_factory=dict)


OVERLAP = {"overlap_step": True}
ONE_RANK = [
    Case(0, precision="fp32"),
    Case(1, optimizer="sgd", shard=OVERLAP),
    Case(2, precision="fp16", decides=True),
    Case(3, optimizer="8bit", decides=True),
    Case(3, optimizer="muon"),
    Case(0, STATES, "sgd"),
    Case(1, STATES, "8bit", shard=OVERLAP),
    Case(2, GRADS, precision="fp16"),
    Case(2, {**STATES, "ratio": 0.4}, "8bit"),
    Case(3, WEIGHTS),
    Case(3, {**WEIGHTS, "ratio": 0.37}, shard=OVERLAP),
    Case(3, {**STATES, "params": "cpu"}, "muon"),
    Case(1, FILES, "8bit"),
    Case(3, {**FILES, **GRADS, "optimizer": "nvme", "params": "cpu"}, shard=OVERLAP),
    Case(3, {**FILES, "gradients": "cpu", "params": "nvme"}),
]
TWO_RANKS = [
    Case(0, optimizer="muon"),
    Case(2, STATES, shard=OVERLAP),
    Case(2, precision="fp16", decides=True),
    Case(2, GRADS, "8bit"),
    Case(3, optimizer="sgd"),
    Case(3, WEIGHTS, shard=OVERLAP),
    Case(3, {**FILES, "gradients": "cpu", "params": "nvme"}),
]


def _step(model: Any, optimizer: Any, rank: int, step: int, device: torch.device) -> float:
    x, y = (one.to(device) for one in batch_of(step, 0, rank))
    loss = loss_of(model, (x, y))
    optimizer.scale_loss(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _trained(rank: int, case: Case, folder: Path, device: torch.device, group: dist.ProcessGroup | None) -> list[Any]:
    """Train, and use on the way what reads or writes weights and states; returns what must not depend on the device."""
    offload = {**case.offload, "path": folder / "states"} if case.offload.get("optimizer") == "nvme" else case.offload
    model: Any = make_net()
    model, optimizer = shardcore.shard(
        model,
        OPTIMIZERS[case.optimizer](model),
        case.stage,
        precision=case.precision,
        offload=offload or None,
        process_group=group,
        **case.shard,
    )
    assert optimizer._engine.device == device
    ema = shardcore.EMA(model, 0.5)
    said: list[Any] = []
    for step in range(2):
        said.append(_step(model, optimizer, rank, step, device))
        ema.update()
    shardcore.save(folder / "checkpoint", model, optimizer, ema=ema)
    _step(model, optimizer, rank, 2, device)
    shardcore.load(folder / "checkpoint", model, optimizer, ema=ema)
    with ema.swap(), torch.no_grad():
        said.append(hash_of([model(batch_of(3, 0, rank)[0].to(device))]))
    ema.load_state_dict(ema.state_dict())
    model.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    optimizer.load_state_dict(optimizer.state_dict())
    said.append(_step(model, optimizer, rank, 3, device))
    with shardcore.full_params(model), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    x, y = (one.to(device) for one in batch_of(4, 0, rank))
    optimizer.scale_loss(loss_of(model, (x, y))).backward()
    said += [float(shardcore.clip_grad_norm_(model, 0.1)), hash_of([shardcore.full_grad(next(model.parameters()))])]
    optimizer.step()
    optimizer.zero_grad()
    said += [optimizer.skipped_steps, optimizer.loss_scale, hash_of_training(model, optimizer)]
    return said


def _all(
    rank: int, cases: list[Case], folder: Path, device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, list[Any]]:
    """Return by its name what each training gives, or its error."""
    found = {}
    for number, case in enumerate(cases):
        try:
            with device_decides() if case.decides else nullcontext(), pytest.MonkeyPatch.context() as patch:
                small_chunks(patch)
                found[str(case)] = _trained(rank, case, folder / str(number), device, group)
        except Exception:
            found[str(case)] = traceback.format_exc().splitlines()
            if dist.get_world_size() > 1:
                return found
    return found


def _on_cpu(rank: int, world_size: int, cases: list[Case], folder: Path) -> dict[str, list[Any]]:
    return _all(rank, cases, folder, torch.device("cpu"), None)


def _on_the_device(
    rank: int, world_size: int, group: dist.ProcessGroup, cases: list[Case], folder: Path
) -> dict[str, list[Any]]:
    return _all(rank, cases, folder, torch.device(NAME, 0), group)


@pytest.mark.parametrize(("world_size", "cases"), [(1, ONE_RANK), (2, TWO_RANKS)])
def test_trainings_have_the_bits_of_cpu_ranks(world_size: int, cases: list[Case], tmp_path: Path) -> None:
    expected = run_ranks(world_size, _on_cpu, cases, tmp_path / "cpu")
    assert run_pretended(world_size, _on_the_device, cases, tmp_path / "device") == expected


# --- twins --------------------------------------------------------------------------------------------------------------


def _wrong_calls(rank: int, world_size: int, group: dist.ProcessGroup) -> list[str]:
    here, there = torch.ones(4), torch.ones(4, device=NAME)
    tier = _C.HostTier(there.device)
    wrong = [
        lambda: there + here,
        lambda: torch.outer(there, here),
        lambda: torch.cat([there, here]),
        lambda: _C.cast([there], [here]),
        lambda: _C.AdamStepper().step([there], [there], [here], [there], [], [0]),
        lambda: tier.to_tier(tier.empty(4, torch.float32), here),
        lambda: tier.from_tier(here, tier.empty(4, torch.float32)),
        lambda: dist.all_reduce(here, group=group),
        lambda: dist.all_reduce(there[::2], group=group),
        lambda: dist.reduce_scatter_tensor(here[:2], here, group=group),
        lambda: dist.send(here, 1 - rank, group=group),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, here, 1 - rank, group)]),
    ]
    sums, rows = torch.zeros(2, device=NAME), torch.zeros(8, device=NAME)
    dist.reduce_scatter_tensor(sums, there, group=group)
    dist.all_gather_into_tensor(rows, there, group=group)
    assert sums.tolist() == [2.0, 2.0]
    assert rows.tolist() == 8 * [1.0]
    return [error_of(call) for call in wrong]


def test_what_a_gpu_refuses_is_refused() -> None:
    for found in run_pretended(2, _wrong_calls):
        assert all("pretended device: " in error or "on the same device" in error for error in found), found


def _assign_from_the_host(files: NvmeWeights, bucket: Bucket, start: int, values: torch.Tensor) -> None:
    for first, numel, kept in files.change(bucket, start, values.numel()):
        files._copies.to_tier(kept[WEIGHT], values[first - start : first - start + numel].contiguous()).synchronize()


def _with_a_fault(rank: int, world_size: int, group: dist.ProcessGroup, case: Case, folder: Path) -> dict[str, list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NvmeWeights, "assign", _assign_from_the_host)
        return _on_the_device(rank, world_size, group, [case], folder)


def test_a_fault_that_only_gpus_showed_is_found(tmp_path: Path) -> None:
    (found,) = run_pretended(1, _with_a_fault, ONE_RANK[-1], tmp_path)
    assert "src of to_tier is on cpu" in str(found)
    assert ONE_RANK[-1].offload["params"] == "nvme"
