"""What a rank measures for `offload="auto"`, and what all ranks have at least."""

import pytest
import torch

from shardcore.estimate import probe
from shardcore.estimate.fit import Machine, Rates


def test_figures_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LINK_BYTES", 1 << 20)
    monkeypatch.setattr(probe, "ADAM_NUMEL", 1 << 16)
    figures = probe.measure(torch.device("cpu"))
    assert 0 < figures["headroom"] == figures["device"] // 10
    assert figures["host"] > 0
    for rate in (figures["to_host"], figures["from_host"], figures["adam"]):
        assert 1e4 < rate < 1e13


def test_the_least_of_all_ranks() -> None:
    first = {
        "place": ["a"],
        "device": 100,
        "headroom": 8,
        "host": 90,
        "to_host": 3.0,
        "from_host": 5.0,
        "adam": 7.0,
    }
    ranks = [
        first,
        {**first, "device": 80, "headroom": 9, "adam": 6.0},
        {**first, "place": ["b"], "host": 50, "to_host": 2.0},
    ]
    assert probe.agreed(ranks) == (Machine(80, 9, 45, 0, 1), Rates(2.0, 5.0, 6.0)), (
        "two ranks share the 90 of a"
    )
    assert probe.agreed(ranks[:1]) == (Machine(100, 8, 90, 0, 1), Rates(3.0, 5.0, 7.0))
