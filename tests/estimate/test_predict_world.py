"""A world of 1,024 ranks that is not there: a 70B model planned on meta, and a small one trained
over torch's fake backend.

The fake backend runs this rank only: what it "receives" is a copy of what it sends, or nothing. So
memory, order, number and size of messages are the real ones, and values are not (they are checked
over real ranks, in the other tests of this folder).
"""

import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardcore
from examples.llama import Llama, llama_70b
from shardcore.distributed import comm as comm_module
from shardcore.distributed.comm import Comm, Traffic
from shardcore.engine.agreement import HEADER_BYTES
from shardcore.engine.step import STEP_ROW_BYTES
from shardcore.estimate import Prediction, predict

WORLD = 1024


# --- 70B, planned ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big() -> torch.nn.Module:
    with torch.device("meta"):
        return llama_70b()


def shard_of(numel: int) -> int:
    """Elements of a rank's part: equal for all ranks, in whole blocks of 256."""
    return -(-numel // (256 * WORLD)) * 256


# q and o, k and v, the MLP, two norms
BLOCK = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
ROOT = 2 * 32000 * 8192 + 8192  # embedding and head, a norm
SHARD_BLOCK, SHARD_ROOT = shard_of(BLOCK), shard_of(ROOT)
WHOLE_BLOCK, WHOLE_ROOT = SHARD_BLOCK * WORLD, SHARD_ROOT * WORLD
SHARD, WHOLE = 80 * SHARD_BLOCK + SHARD_ROOT, 80 * WHOLE_BLOCK + WHOLE_ROOT

# bf16 weights and local gradients, float32 masters, moments and reduced gradients. At most two
# buckets are on their way, each sent and received; from stage 2 on a third one's local gradient
# fills, and the root's does from the start (its head is first).
BYTES = {
    1: {
        "weights": 2 * WHOLE,
        "gradients": 2 * WHOLE + 4 * SHARD,
        "communication": 2 * 2 * WHOLE_BLOCK,
    },
    2: {
        "weights": 2 * WHOLE,
        "gradients": 4 * SHARD,
        "communication": 2 * (5 * WHOLE_BLOCK + WHOLE_ROOT),
    },
    3: {
        # the unit in use, the next one, the root
        "weights": 2 * SHARD + 2 * (2 * WHOLE_BLOCK + WHOLE_ROOT),
        "gradients": 4 * SHARD,
        "communication": 2 * (5 * WHOLE_BLOCK + WHOLE_ROOT),
    },
}
# (collectives, bytes sent): each sends a rank's part, or 1,023 of 1,024 parts.
SENT = {
    1: {
        "exchange gradients": (81, 2 * SHARD * 1023),
        "gather weights after the step": (81, 2 * SHARD * 1023),
    },
    2: {
        "exchange gradients": (81, 2 * SHARD * 1023),
        "gather weights after the step": (81, 2 * SHARD * 1023),
    },
    3: {
        "exchange gradients": (81, 2 * SHARD * 1023),
        "gather weights in forward": (81, 2 * SHARD * 1023),
        # not the root, nor the last block
        "gather weights in backward": (79, 2 * 79 * SHARD_BLOCK * 1023),
    },
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("rank", "stage"), [(1023, 1), (0, 3), (1, 2)])
def test_a_70b_model_over_1024_ranks(big: torch.nn.Module, stage: int, rank: int) -> None:
    start = time.perf_counter()
    prediction = predict(big, None, stage, world_size=WORLD, rank=rank, precision="bf16")
    print(f"stage {stage}, rank {rank}: planned in {time.perf_counter() - start:.2f} s")
    assert prediction.numel == 80 * BLOCK + ROOT == 68_976_648_192
    assert prediction.units == 81
    assert prediction.resting.by_kind == BYTES[stage] | {"master": 4 * SHARD, "states": 8 * SHARD}
    small = {
        "agree on used parameters": (1, (723 + HEADER_BYTES) * 1023),
        "agree on the norm": (1, STEP_ROW_BYTES * 1023),
    }
    assert {t.purpose: (t.collectives, t.bytes) for t in prediction.transfers} == SENT[
        stage
    ] | small


# --- a small one, trained -------------------------------------------------------------------------


def small() -> Llama:
    torch.manual_seed(0)
    return Llama(layers=3, width=64, heads=4, kv_heads=2, hidden=96, vocabulary=101)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=WORLD)
    yield request.param
    dist.destroy_process_group()


def train(stage: int, counted: Counter[Any]) -> tuple[Any, Prediction]:
    """Train three steps; `counted` is left with the messages of the last one."""
    model = small()
    model, optimizer = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), stage, precision="bf16"
    )
    for _ in range(3):
        counted.clear()
        model(torch.arange(8).view(1, 8)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 0
    return model, predict(
        small(), None, stage, world_size=WORLD, rank=dist.get_rank(), precision="bf16"
    )


PLACES = [(0, 0), (WORLD - 1, 1), (0, 2), (WORLD - 1, 3)]


def expected(prediction: Prediction) -> tuple[int, int]:
    return sum(t.collectives for t in prediction.transfers), prediction.sent_bytes


def echo(monkeypatch: pytest.MonkeyPatch, counted: Counter[Any] | None = None) -> None:
    """Let each message that is received be the one that is sent: the others do what this rank
    does.
    """
    waiting: list[torch.Tensor] = []
    done = SimpleNamespace(wait=lambda: True)
    counted = Counter() if counted is None else counted

    def irecv(tensor: torch.Tensor, source: int, *, group: Any, tag: int) -> Any:
        counted["receives", tag >> 28] += 1
        waiting.append(tensor)
        return done

    def isend(tensor: torch.Tensor, target: int, *, group: Any, tag: int) -> Any:
        counted["sends", tag >> 28] += 1
        counted["bytes", tag >> 28] += tensor.nbytes
        waiting.pop().copy_(tensor)
        return done

    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(dist, "isend", isend)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("rank", "stage"), PLACES, indirect=["rank"])
def test_collectives_as_nccl_would_run_them(
    rank: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One collective of torch.distributed for each purpose and bucket, but what ranks compare,
    which goes over gloo.
    """
    counted: Counter[str] = Counter()
    init = Comm.__init__

    def as_on_gpus(comm: Comm, *given: Any) -> None:
        init(comm, *given)
        comm.uses_nccl, comm._backends = True, {"cpu": "gloo", "cuda": "nccl"}

    def counting(operation: Any) -> Any:
        def count(output: torch.Tensor | list[torch.Tensor], *given: Any, **options: Any) -> Any:
            outputs = output if isinstance(output, list) else [output]
            counted["collectives"] += 1
            counted["bytes"] += sum(each.nbytes for each in outputs) // WORLD * (WORLD - 1)
            return operation(output, *given, **options)

        return count

    monkeypatch.setattr(Comm, "__init__", as_on_gpus)
    monkeypatch.setattr(comm_module, "_all_gather", counting(comm_module._all_gather))
    monkeypatch.setattr(dist, "all_to_all_single", counting(dist.all_to_all_single))
    monkeypatch.setattr(dist, "all_gather", None)  # of a list: a copy for each rank
    echo(monkeypatch)
    model, prediction = train(stage, counted)
    on_gpus = [t for t in prediction.transfers if not t.purpose.startswith("agree on")]
    assert counted["collectives"] == sum(t.collectives for t in on_gpus)
    assert counted["bytes"] == sum(t.bytes for t in on_gpus)
    assert shardcore.memory_report(model).lines == prediction.resting.lines


@pytest.mark.cases(1)
@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (WORLD - 1, 3)], indirect=["rank"])
def test_messages_as_gloo_would_send_them(
    rank: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message to each other rank for each purpose and bucket; comparisons take as many as
    1,024 has digits.
    """
    counted: Counter[Any] = Counter()
    echo(monkeypatch, counted)
    model, prediction = train(stage, counted)
    collectives, sent = expected(prediction)
    compared = sum(t.collectives for t in prediction.transfers if t.purpose.startswith("agree on"))
    messages = (collectives - compared) * (WORLD - 1) + compared * 10
    assert sum(counted["sends", kind] for kind in Traffic) == messages
    assert sum(counted["receives", kind] for kind in Traffic) == messages
    assert sum(counted["bytes", kind] for kind in Traffic) == sent
    assert shardcore.memory_report(model).lines == prediction.resting.lines
