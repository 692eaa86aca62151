"""What memory_report counts, and its tables."""

import pytest

import shardcore
from tests.support.models import Run, make_net, train


def test_memory_report_counts_what_the_layout_says() -> None:
    model, optimizer, _ = train(
        0, Run(precision="bf16", steps=1, shard={"offload": {"optimizer": "cpu"}})
    )
    numel = sum(bucket.layout.numel for bucket in optimizer._engine.buckets)
    report = shardcore.memory_report(model)
    assert report.by_kind["weights"] == 2 * numel
    assert report.by_kind["gradients"] == 2 * numel
    assert report.by_kind["master"] == 4 * numel
    assert report.by_kind["states"] == 8 * numel
    places = 2 + 3  # for gradients and for weights of a chunk, with room for float32
    staging = places * 4 * max(bucket.owned_numel for bucket in optimizer._engine.buckets)
    assert report.by_kind["communication"] == staging
    assert report.by_tier == {"device": 4 * numel, "cpu": 12 * numel + staging}
    titles, device, cpu, together = (row.split() for row in str(report).splitlines())
    assert titles == [
        "unit",
        "tier",
        "weights",
        "gradients",
        "master",
        "states",
        "communication",
        "total",
    ]
    mib = [f"{count * numel / 2**20:.2f}" for count in (2, 4, 8)]
    assert device == ["all", "device", mib[0], mib[0], "0.00", "0.00", "0.00", mib[1]]
    assert cpu[:6] == ["all", "cpu", "0.00", "0.00", mib[1], mib[2]]
    assert (cpu[6], together[-1]) == (
        f"{staging / 2**20:.2f}",
        f"{sum(report.by_tier.values()) / 2**20:.2f}",
    )
    rows = [tuple(row.split()[:2]) for row in report.table(by_unit=True).splitlines()]
    assert {
        ("blocks.1", "device"),
        ("blocks.1", "cpu"),
        ("shared", "cpu"),
        ("all", "device"),
        ("all", "all"),
    } <= set(rows)
    with pytest.raises(ValueError, match="is not sharded"):
        shardcore.memory_report(make_net())
