"""What the engine's schedule of one rank of many leaves exposed, in computed time
(benchmarks/fabric.py).
"""

from unittest import mock

import pytest
import torch.distributed as dist

from benchmarks.fabric import (
    Fabric,
    Large,
    Machine,
    Part,
    simulate,
    simulate_deepspeed,
    simulate_fsdp2,
)
from shardcore.distributed.comm import Comm
from shardcore.engine.reduce_scatter import ReduceScatter


def exposed(seconds: dict[str, float], *kinds: str) -> float:
    """The share of compute that is exposed, by these kinds or in all."""
    kinds = kinds or tuple(seconds.keys() - {"compute", "host", "compared"})
    return sum(seconds[kind] for kind in kinds) / seconds["compute"]


@pytest.mark.more
def test_nodes_and_prefetch_hide_what_flat_or_late_gathers_expose():
    flat, late = (simulate(64, 4096, stage=3, prefetch=prefetch) for prefetch in (1, 0))
    assert exposed(simulate(64, 4096, stage=3, ranks_per_node=8)) < exposed(flat) / 2
    assert exposed(late, "weights") > 3 * exposed(flat, "weights")


@pytest.mark.parametrize(
    "options",
    [{"stage": 3}, pytest.param({"stage": 2, "overlap_step": True}, marks=pytest.mark.more)],
)
def test_with_a_unit_for_the_head_less_than_two_percent_are_exposed(options):
    together, apart = (
        exposed(simulate(64, 4096, head_apart=head_apart, ranks_per_node=8, **options))
        for head_apart in (False, True)
    )
    assert apart < 0.0172 < 0.02 < together


@pytest.mark.more
def test_units_go_across_nodes_while_the_next_one_computes(monkeypatch):
    at_half = simulate(64, 4096, stage=3, ranks_per_node=8)
    monkeypatch.setattr(ReduceScatter, "arrive", lambda *_: ())
    late = simulate(64, 4096, stage=3, ranks_per_node=8)
    # Of the last unit but one: in float32 an eighth over the NIC; the last one's exchange in the
    # node, beside it, stays.
    across, within = 4 * 202e6 / 8 * 7 / 8 / 45e9, 2 * 202e6 * 7 / 8 / 350e9
    assert late["gradients"] - at_half["gradients"] == pytest.approx(across - within)


def test_a_comparison_of_1024_ranks_is_ten_messages(monkeypatch):
    compare, counts = Comm.all_gather_cpu, []

    def counted(comm, *given):
        with mock.patch.object(dist, "isend", wraps=dist.isend) as send:
            rows = compare(comm, *given)
        counts.append(send.call_count)
        return rows

    monkeypatch.setattr(Comm, "all_gather_cpu", counted)
    compared = simulate(1024, 4096, large=Large(units=2), stage=3, ranks_per_node=8)["compared"]
    assert max(counts) == 10
    assert 20 * 80e-6 < compared < 2e-3  # a step of two; round a ring 1,023 messages each


@pytest.fixture
def fabric() -> Fabric:
    """Rank 0 of four, two in a node. Bytes of a small model are four of the large one."""
    return Fabric(Machine(ranks_per_node=2, nvlink=100, nic=10, latency=1), world=4, scale=4)


def test_durations(fabric):
    # A ring passes 15 of 20 bytes on: all over NVLink, half of it over each NIC. An exchange sends
    # 5 to each other rank.
    assert fabric.ring("all", 20).end == 1 + 4 * 7.5 / 10
    fabric.compute(4)
    assert fabric.exchange("all", 20).end == 4 + 1 + 4 * 10 / 10
    fabric.compute(5)
    assert fabric.ring(Part([0, 1]), 20).end == 9 + 1 + 4 * 10 / 100
    # over the NIC, at the same time
    assert fabric.exchange(Part([0, 2]), 20).end == 9 + 1 + 4 * 10 / 10


def test_the_order_on_communicators_and_links(fabric):
    within, across = Part([0, 1]), Part([0, 2])
    first, second, beside = (
        fabric.ring(within, 50),
        fabric.ring(within, 50),
        fabric.ring(across, 50),
    )
    assert (first.end, second.end) == (2, 4)
    assert beside.end == 11  # over the NIC, from the beginning
    # a communicator of its own, but both links were busy
    assert fabric.ring("all", 20).end == 11 + 1 + 3
    fabric.compute(3)
    fabric.kind = "late"
    late = fabric.exchange(across, 0)
    fabric.wait(first)
    fabric.wait(second)
    assert (fabric.now, dict(fabric.exposed)) == (4, {"": 1})
    fabric.wait(late)
    assert (fabric.now, dict(fabric.exposed)) == (12, {"": 1, "late": 8})


def test_fsdp2_by_hand():
    # Two units of 30 parameters and a root of 20, each on 2 nodes of a rank: a gather takes 1 +
    # numel / 10 seconds, a pass through a unit 6 forward and 12 backward, and the head 2 and 4.
    machine = Machine(ranks_per_node=1, nic=10, latency=1, flops=10, memory=1e12)
    seconds = simulate_fsdp2(2, 1, machine, Large(unit=30, root=20, units=2))
    # The root, then the first unit, then nothing in forward: 3 + 4. In backward the head, as long
    # as the last unit's gather, hides it. At the end the last unit's reduction and the root's: 4 +
    # 3.
    assert seconds == pytest.approx(
        {"compute": 2 + 12 + 4 + 24, "weights": 3 + 4, "gradients": 4 + 3}
    )


# The model above, in buckets of 40: the first is full after both units' backward, the second at the
# end, as large.
@pytest.mark.parametrize(
    ("stage", "exposed_seconds"),
    [
        (2, {"gradients": 2 * (1 + 2 * 40 / 10), "new weights": 1 + 80 / 10}),
        # In forward the embedding and the first unit are waited for, in backward the head.
        (3, {"gradients": 2 * (1 + 40 / 10), "weights": 2 + 4 + 2}),
    ],
)
def test_deepspeed_by_hand(stage, exposed_seconds):
    machine = Machine(ranks_per_node=1, nic=10, latency=1, flops=10, memory=1e12)
    seconds = simulate_deepspeed(2, 1, machine, Large(unit=30, root=20, units=2), stage, bucket=40)
    assert seconds == pytest.approx({"compute": 2 + 12 + 4 + 24, **exposed_seconds})
