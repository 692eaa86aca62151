"""Trainings on a pretended GPU (pretend_cuda.py): nothing is refused there, and the bits are those
of CPU ranks.

Twins: what a GPU, NCCL or a copy would refuse is refused, and a fault of shardcore's that only
showed on GPUs is found.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore._native import _C
from shardcore.engine.bucket import Bucket
from shardcore.engine.unshard import Gatherer
from shardcore.offload.host_gradients import HostGrads
from shardcore.offload.nvme_weights import WEIGHT, NvmeWeights
from tests.support.float8 import float8_net
from tests.support.groups import device_decides
from tests.support.models import (
    Branched,
    Net,
    batch_of,
    error_of,
    hash_of,
    hash_of_training,
    loss_of,
    made,
    make_net,
)
from tests.support.pretend_cuda import DEVICE, run_pretended, why_not
from tests.support.ranks import run_ranks
from tests.support.slices import mesh_of, sharded_lm, train_lm
from tests.support.tiers import small_chunks

WHY_NOT = why_not()
pytestmark = [pytest.mark.more, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def _muon(model: Net) -> Any:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return shardcore.Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Net], Any]] = {
    "adam": lambda model: shardcore.FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1),
    "8bit": lambda model: shardcore.FusedAdam(
        model.parameters(), lr=1e-2, state_dtype="8bit", master="split"
    ),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "muon": _muon,
}
STATES, GRADS = {"optimizer": "cpu"}, {"optimizer": "cpu", "gradients": "cpu"}
WEIGHTS = {**GRADS, "params": "cpu"}
FILES = {"optimizer": "nvme", "durable": False}


@dataclass(frozen=True)
class Case:
    """A training: what shard is told. decides: steps are decided on as on a GPU; activations:
    are kept in host memory; float8: blocks have torchao's float8 weights.
    """

    stage: int
    offload: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    precision: str = "bf16"
    decides: bool = False
    activations: bool = False
    float8: bool = False
    shard: dict[str, Any] = field(default_factory=dict)


OVERLAP, NODES = {"overlap_step": True}, {"ranks_per_node": 2}
LEAVING, GATHERED = Case(2, GRADS, precision="fp16"), Case(3, WEIGHTS)
ON_DISK = Case(3, {**FILES, "gradients": "cpu", "params": "nvme"})
ONE_RANK = [
    Case(0, precision="fp32"),
    Case(1, optimizer="sgd", shard=OVERLAP),
    Case(2, precision="fp16", decides=True),
    Case(3, optimizer="8bit", decides=True),
    LEAVING,
    Case(2, {**STATES, "ratio": 0.4}, "8bit"),
    Case(2, {**STATES, "ratio": 0.4}, "sgd", shard=OVERLAP),
    Case(2, STATES, "rmsprop"),
    GATHERED,
    Case(3, {**WEIGHTS, "ratio": 0.37}, shard=OVERLAP),
    Case(3, {**STATES, "params": "cpu"}, "muon"),
    Case(1, FILES, "8bit"),
    Case(3, {**FILES, **GRADS, "optimizer": "nvme", "params": "cpu"}, shard=OVERLAP),
    ON_DISK,
]
TWO_RANKS = [
    Case(0, optimizer="muon"),
    Case(2, STATES, shard=OVERLAP),
    Case(2, precision="fp16", decides=True),
    Case(2, GRADS, "8bit"),
    Case(3, optimizer="sgd", activations=True),
    ON_DISK,
    *([Case(3, float8=True)] if find_spec("torchao") else []),
]
FOUR_RANKS = [  # of two nodes
    Case(2, GRADS, shard=NODES),
    Case(3, WEIGHTS, shard={"reshard_after_forward": 2, "prefetch": 2}),
]


def _step(model: Any, optimizer: Any, rank: int, step: int, device: torch.device) -> float:
    x, y = (one.to(device) for one in batch_of(step, 0, rank))
    loss = loss_of(model, (x, y))
    optimizer.scale_loss(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _trained(rank: int, case: Case, folder: Path, device: torch.device) -> list[Any]:
    """Train, and use on the way what reads or writes weights and states; returns what must not
    depend on the device.
    """
    offload = (
        made({**case.offload, "path": folder / "states"})
        if case.offload.get("optimizer") == "nvme"
        else case.offload
    )
    model: Any = float8_net() if case.float8 else make_net()
    for number, block in enumerate(model.blocks if case.activations else ()):
        model.blocks[number] = shardcore.checkpoint_wrapper(block, offload_to_cpu=True)
    model, optimizer = shardcore.shard(
        model,
        OPTIMIZERS[case.optimizer](model),
        case.stage,
        precision=case.precision,
        offload=offload or None,
        **case.shard,
    )
    assert optimizer._engine.device == device
    ema = shardcore.EMA(model, 0.5)
    said: list[Any] = []
    for step in range(2):
        said.append(_step(model, optimizer, rank, step, device))
        ema.update()
    saving = shardcore.save(folder / "checkpoint", model, optimizer, ema=ema, wait=False)
    _step(model, optimizer, rank, 2, device)
    saving.wait()
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
    with shardcore.no_sync(model):
        optimizer.scale_loss(loss_of(model, (-x, y))).backward()
    optimizer.scale_loss(loss_of(model, (x, y))).backward()
    said += [
        float(shardcore.clip_grad_norm_(model, 0.1)),
        hash_of([shardcore.full_grad(next(model.parameters()))]),
    ]
    optimizer.step()
    optimizer.zero_grad()
    said += [optimizer.skipped_steps, optimizer.loss_scale, hash_of_training(model, optimizer)]
    return said


def _all(rank: int, cases: list[Case], folder: Path, device: torch.device) -> dict[str, list[Any]]:
    """Return by its name what each training gives, or its error."""
    found = {}
    for number, case in enumerate(cases):
        try:
            with (
                device_decides() if case.decides else nullcontext(),
                pytest.MonkeyPatch.context() as patch,
            ):
                small_chunks(patch)
                found[str(case)] = _trained(rank, case, folder / str(number), device)
        except Exception:
            found[str(case)] = traceback.format_exc().splitlines()
            if dist.get_world_size() > 1:
                return found
    return found


def _on_cpu(rank: int, world_size: int, cases: list[Case], folder: Path) -> dict[str, list[Any]]:
    return _all(rank, cases, folder, torch.device("cpu"))


def _on_the_device(
    rank: int, world_size: int, cases: list[Case], folder: Path
) -> dict[str, list[Any]]:
    return _all(rank, cases, folder, DEVICE)


@pytest.mark.parametrize(("world_size", "cases"), [(1, ONE_RANK), (2, TWO_RANKS), (4, FOUR_RANKS)])
def test_trainings_have_the_bits_of_cpu_ranks(
    world_size: int, cases: list[Case], tmp_path: Path
) -> None:
    expected = run_ranks(world_size, _on_cpu, cases, tmp_path / "cpu")
    found = run_pretended(world_size, _on_the_device, cases, tmp_path / "device")
    for of_rank, wanted in zip(found, expected, strict=True):
        for case in wanted:
            assert of_rank[case] == wanted[case], case


SLICED: list[dict[str, Any]] = [
    {"stage": 1, "sequence": False},
    {"stage": 3, "overlap_step": True, "offload": WEIGHTS},
]


def _sliced(rank: int, world_size: int, device_type: str, folder: Path) -> list[float]:
    """Train models in tensor-parallel slices, over a checkpoint; norms of gradients and weights."""
    mesh, found = mesh_of(world_size, 2, device_type), []
    for number, options in enumerate(SLICED):
        model, optimizer = sharded_lm(mesh, **options)
        found += train_lm(model, optimizer, mesh, range(2))
        shardcore.save(folder / str(number), model, optimizer)
        train_lm(model, optimizer, mesh, range(2, 3))
        shardcore.load(folder / str(number), model, optimizer)
        found += train_lm(model, optimizer, mesh, range(3, 5))
        found += [value.norm().item() for value in model.state_dict().values()]
    return found


def test_slices_train_within_rounding_of_cpu_ranks(tmp_path: Path) -> None:
    """torch's formulas of attention differ by device."""
    expected = run_ranks(4, _sliced, "cpu", tmp_path / "cpu")
    found = run_pretended(4, _sliced, "cuda", tmp_path / "device")
    assert found == [pytest.approx(of_rank, rel=1e-4) for of_rank in expected]


# By stage: what shard is told. A linear layer of a branch alone is a unit, too, in some of them.
BRANCHES: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {"accumulate": 2}),
    (2, {"accumulate": 2, "sync_each": False}),
    (3, {}),
    (3, {"units": nn.Linear, "accumulate": 2}),
    (3, {"units": nn.Linear, "reshard_after_forward": 2, "prefetch": 2}),
    (3, {"offload": WEIGHTS}),
]


def _branched(rank: int, world_size: int, device_type: str) -> list[str]:
    """Train models with branches; on the device backward and step run on another stream than
    forward.
    """
    device, found = torch.device(device_type), []
    for stage, options in BRANCHES:
        torch.manual_seed(0)
        model = Branched()
        optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
        model, optimizer = shardcore.shard(model, optimizer, stage, precision="fp32", **options)
        for step in range(3):
            for micro in range(2):
                loss = loss_of(model, [one.to(device) for one in batch_of(step, micro, rank)])
                with _another_stream() if device.type == "cuda" else nullcontext():
                    loss.backward()
                    if micro == 1:
                        optimizer.step()
                        optimizer.zero_grad()
        found.append(hash_of_training(model, optimizer))
    return found


@contextmanager
def _another_stream() -> Iterator[None]:
    here, there = torch.cuda.current_stream(), torch.cuda.Stream()
    there.wait_stream(here)
    with torch.cuda.stream(there):
        yield
    here.wait_stream(there)


def test_branches_on_streams_of_their_own_train_without_races() -> None:
    expected = run_ranks(2, _branched, "cpu")
    assert run_pretended(2, _branched, "cuda") == expected


# --- twins ----------------------------------------------------------------------------------------


def _wrong_calls(rank: int, world_size: int) -> list[str]:
    here, there = torch.ones(4), torch.ones(4, device=DEVICE)
    tier = _C.HostTier(there.device)
    wrong = [
        lambda: there + here,
        lambda: torch.outer(there, here),
        lambda: torch.cat([there, here]),
        lambda: _C.cast([there], [here]),
        lambda: _C.AdamStepper().step([there], [there], [here], [there], [], [0]),
        lambda: tier.to_tier(tier.empty(4, torch.float32), here),
        lambda: tier.from_tier(here, tier.empty(4, torch.float32)),
        lambda: dist.all_reduce(here),
        lambda: dist.all_reduce(there[::2]),
        lambda: dist.reduce_scatter_tensor(here[:2], here),
        lambda: dist.send(here, 1 - rank),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, here, 1 - rank)]),
    ]
    sums, rows = torch.zeros(2, device=DEVICE), torch.zeros(8, device=DEVICE)
    dist.reduce_scatter_tensor(sums, there)
    dist.all_gather_into_tensor(rows, there)
    assert sums.tolist() == [2.0, 2.0]
    assert rows.tolist() == 8 * [1.0]
    return [error_of(call) for call in wrong]


def test_what_a_gpu_refuses_is_refused() -> None:
    for found in run_pretended(2, _wrong_calls):
        assert all(
            "pretended GPU: " in error or "on the same device" in error for error in found
        ), found


def _races(rank: int, world_size: int) -> dict[str, str]:
    """Return what each way to use memory on two streams raises."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    tier = _C.HostTier(DEVICE)
    kept, x = tier.empty(4, torch.float32), torch.ones(4, device=DEVICE)

    def on_side(use: Callable[[], Any], waits: Callable[[], None] = lambda: None) -> None:
        waits()
        with torch.cuda.stream(side):
            use()

    def freed() -> None:
        def double(y: torch.Tensor) -> None:
            on_side(lambda: y.mul_(2), lambda: side.wait_stream(torch.cuda.current_stream()))

        double(x + 1)
        torch.zeros(4, device=DEVICE)  # may have that memory

    def copied(how: str) -> None:
        copy = tier.to_tier(kept, x)
        getattr(copy, how)()
        x.add_(1)

    def late() -> bool:
        host = torch.zeros(4).copy_(x, non_blocking=True)
        early = bool(host.isnan().all())
        torch.cuda.current_stream().synchronize()
        assert torch.equal(host, x.cpu())
        return early

    def gathered(wait: bool) -> None:
        rows = torch.empty(4 * world_size, device=DEVICE)
        work = dist.all_gather_into_tensor(rows, x, async_op=True)
        if wait:
            work.wait()
        rows.sum()

    ways: dict[str, Callable[[], Any]] = {
        "reads": lambda: (x.add_(1), on_side(lambda: x.sum())),
        "reads after a wait for the stream": lambda: on_side(
            x.sum, lambda: side.wait_stream(torch.cuda.current_stream())
        ),
        "writes": lambda: (x.sum(), on_side(lambda: x.add_(1))),
        "writes after a wait for an event": lambda: (
            event.record(),
            side.wait_event(event),
            on_side(lambda: x.add_(1)),
        ),
        "writes after the host waited": lambda: (
            x.sum(),
            torch.cuda.synchronize(),
            on_side(lambda: x.add_(1)),
        ),
        "frees": freed,
        "copies": lambda: copied("query"),
        "copies and waits": lambda: copied("wait"),
        "gathers": lambda: gathered(False),
        "gathers and waits": lambda: gathered(True),
    }
    found = {}
    for name, way in ways.items():
        torch.cuda.synchronize()
        found[name] = error_of(way)
    assert late()
    return found


def test_races_of_streams_are_found() -> None:
    races = {"reads", "writes", "frees", "copies", "gathers"}
    for found in run_pretended(2, _races):
        assert {name for name, error in found.items() if "may not have" in error} == races, found
        assert {error for name, error in found.items() if name not in races} == {"no error"}, found


def _assign_from_the_host(
    files: NvmeWeights, bucket: Bucket, start: int, values: torch.Tensor
) -> None:
    for first, numel, kept in files.change(bucket, start, values.numel()):
        files._copies.to_tier(
            kept[WEIGHT], values[first - start : first - start + numel].contiguous()
        ).synchronize()


def _release_at_once(gradients: HostGrads, count: int) -> None:
    for _ in range(count):
        pending = gradients._leaving.popleft()
        pending.release(pending.source)


# training, what is replaced by what, what is said
FAULTS: dict[str, tuple[Case, Any, str, Any, str]] = {
    "values of the host": (
        ON_DISK,
        NvmeWeights,
        "assign",
        _assign_from_the_host,
        "src of to_tier is on cpu",
    ),
    "nobody waits for weights": (
        GATHERED,
        Gatherer,
        "wait",
        lambda self, gathers: None,
        "reads what from_tier",
    ),
    "memory is given back while it is copied": (
        LEAVING,
        HostGrads,
        "_release",
        _release_at_once,
        "what to_tier",
    ),
}


def _with_a_fault(rank: int, world_size: int, fault: str, folder: Path) -> dict[str, list[Any]]:
    case, of, name, instead, _ = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, name, instead)
        return _on_the_device(rank, world_size, [case], folder)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_only_gpus_show_are_found(fault: str, tmp_path: Path) -> None:
    (found,) = run_pretended(1, _with_a_fault, fault, tmp_path)
    assert FAULTS[fault][-1] in str(found), found
