"""`offload="auto"`: one choice on all ranks, from the figures of all. Ranks here have figures of
GPUs, and compute on CPUs.
"""

import logging
from typing import Any

import pytest
import torch

import shardcore
from shardcore.distributed.machine import machine_id
from shardcore.estimate import fit, predict, probe
from tests.support.models import Net, Run, batch_of, hash_of_training, loss_of, make_net, train
from tests.support.ranks import run_ranks

STEPS = 5


def figures(device: int, host: int = 1 << 30) -> dict[str, Any]:
    return {
        "place": machine_id(),
        "device": device,
        "headroom": 0,
        "host": host,
        "to_host": 1e9,
        "from_host": 1e9,
        "adam": 1e9,
    }


def taken(stage: int, world: int, offload: Any) -> dict[str, int]:
    with torch.device("meta"):
        return predict(
            Net(), None, stage, world_size=world, precision="bf16", offload=offload
        ).resting.by_tier


def _trained(
    rank: int, world_size: int, free: list[int], decides_alone: bool = False
) -> tuple[str, list[str], Any]:
    """Rank r has free[r] bytes; returns the hash of its training (or the error), what it logged,
    and what is offloaded.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("shardcore")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardcore.api._figures", lambda device: figures(free[rank]))
        patch.setattr(log, "isEnabledFor", lambda level: level >= logging.INFO)
        patch.setattr(log, "handlers", [handler])
        if decides_alone and rank == 1:
            patch.setattr(probe, "agreed", lambda every, agreed=probe.agreed: agreed(every[1:]))
        try:
            model, optimizer, _ = train(rank, Run(2, STEPS, 1, "bf16", shard={"offload": "auto"}))
        except (ValueError, MemoryError) as error:
            return str(error), said, None
    tiers = optimizer._engine.options["offload"]
    return hash_of_training(model, optimizer), said, (tiers.optimizer, tiers.gradients, tiers.auto)


def _plain(rank: int, world_size: int) -> str:
    return hash_of_training(*train(rank, Run(2, STEPS, 1, "bf16"))[:2])


@pytest.mark.more
def test_the_rank_with_the_least_memory_decides_and_the_bits_stay() -> None:
    nothing = taken(2, 2, None)["device"]
    plain = run_ranks(2, _plain)
    for free, expected in (
        ([nothing, nothing], (None, None, False)),
        ([1 << 30, nothing - 1], ("cpu", None, True)),
        ([nothing - 1, 1 << 30], ("cpu", None, True)),
    ):
        for rank, (found, said, tiers) in enumerate(run_ranks(2, _trained, free)):
            assert tiers == expected
            assert found == plain[rank]
            tables = [text for text in said if 'offload="auto" chose' in text]
            assert len(tables) == (rank == 0)
            assert all(text.count("yes, chosen") == 1 and "none" in text for text in tables)


def test_a_rank_that_decides_alone_is_rejected() -> None:
    nothing = taken(2, 2, None)["device"]
    for answer, *_ in run_ranks(2, _trained, [nothing - 1, nothing], True):
        assert "ranks disagree" in answer
        assert "offload" in answer


def test_where_nothing_fits_all_ranks_say_what_was_considered() -> None:
    for answer, *_ in run_ranks(2, _trained, [1 << 30, 1000]):
        assert 'offload is "auto", and nothing fits' in answer
        assert "optimizer cpu + gradients cpu" in answer
        assert '{"optimizer": "nvme", "path": DIR}' in answer


def test_muon_keeps_its_gradients_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no others, though these would take fewer milliseconds."""

    def started() -> tuple[Any, Any]:
        model = make_net()
        others = [param for param in model.parameters() if param.ndim != 2]
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == 2]},
            {"params": others, "use_muon": False},
        ]
        return shardcore.shard(model, shardcore.Muon(groups), 2, precision="bf16", offload="auto")

    monkeypatch.setattr("shardcore.api._figures", lambda _: figures(60_000))
    model, optimizer = started()
    tiers = optimizer._engine.options["offload"]
    assert (tiers.optimizer, tiers.gradients) == ("cpu", None)
    loss_of(model, batch_of(0, 0, 0)).backward()
    optimizer.step()
    monkeypatch.setattr(fit, "fit", lambda *given, fit=fit.fit: fit(*given[:5]))
    assert started()[1]._engine.options["offload"].gradients == "cpu", (
        "else the test could not fail"
    )


def _on_one_rank(rank: int, world_size: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardcore.api._figures", lambda device: figures(1 << 30))
        with pytest.raises(ValueError) as caught:
            train(rank, Run(steps=0, shard={"offload": "auto" if rank == 0 else None}))
    return str(caught.value)


def test_auto_on_one_rank_alone_and_a_failed_probe_are_errors_on_all_ranks() -> None:
    for answer in run_ranks(2, _on_one_rank):
        assert 'offload is "auto", but not on rank 1; expected the same on every rank' in answer
    own, other = run_ranks(2, _failing)
    assert own == "no such link"
    assert other.startswith("shard: rank 0 refused: ")
    assert "no such link" in other


def _failing(rank: int, world_size: int) -> str:
    def measured(device: torch.device) -> Any:
        if rank == 0:
            raise RuntimeError("no such link")
        return figures(1000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardcore.api._figures", measured)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            train(rank, Run(steps=0, shard={"offload": "auto"}))
    return str(caught.value)


def test_on_the_cpu_it_is_none_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardcore"):
        _, optimizer, _ = train(0, Run(steps=1, shard={"offload": "auto"}))
    assert [record.getMessage() for record in caplog.records if "auto" in record.getMessage()] == [
        'shard: offload="auto" chose None: this rank computes on the CPU, whose memory is the '
        "host's"
    ]
    assert optimizer._engine.options["offload"].optimizer is None
    with pytest.raises(ValueError, match='"auto" without an optimizer; expected None, or'):
        shardcore.shard(make_net(), None, offload="auto")
    with pytest.raises(TypeError, match=r"offload is 'fast'; expected None, \"auto\" or"):
        shardcore.shard(make_net(), torch.optim.AdamW(make_net().parameters()), offload="fast")
