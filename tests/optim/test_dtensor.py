"""FSDP2's DTensors in FusedAdam and CPUAdam on real gloo ranks: the bits of the unsharded step; and broken twins."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardcore._native import _C
from shardcore.optim import CPUAdam, FusedAdam, dtensor
from tests.ranks import run_ranks

from .fsdp2 import (
    ALIGNED,
    BF16,
    F32,
    KINDS,
    OPTIONS,
    SHAPES,
    backward,
    sharded_net,
    state_differs,
    whole,
    whole_grads,
    whole_state,
)
from .oracle import Interval, Oracle, violations


def _train(rank, world_size, kind, shapes, steps=4, twin=None):
    """Train sharded, and unsharded with the same whole gradients; return what differs."""
    dtype, options = KINDS[kind] if isinstance(kind, str) else kind
    net = sharded_net(shapes, dtype)
    optimizer = FusedAdam(net.parameters(), **OPTIONS, **options)
    reference = [nn.Parameter(w) for w in whole(net.parameters())]
    expected = CPUAdam(reference, **OPTIONS, **options)
    oracles = [Oracle(Interval.of(p), dtype, options.get("master") is not None, **OPTIONS) for p in reference]
    with mock.patch.object(dtensor.Rows, "first_element", 0) if twin == "keyed by the shard" else nullcontext():
        for step in range(steps):
            backward(net, rank, step)
            grads = whole_grads(net)
            optimizer.step(grad_scale=0.5)
            expected.step(grads=grads, grad_scale=0.5)
            for oracle, grad in zip(oracles[:-1], grads[:-1], strict=True):
                oracle.step(grad, 0.5)
    weights = [i for i, (a, b) in enumerate(zip(whole(net.parameters()), reference, strict=True)) if not torch.equal(a, b)]
    exact = options.get("state_dtype", "fp32") == "fp32" and set(options) <= {"master"}
    outside = sum(violations(w, o.param) for w, o in zip(whole(net.parameters()), oracles, strict=True)) if exact else 0
    empty = sum(p.to_local().numel() == 0 for p in net.parameters())
    kinds = {type(v).__name__ for entry in optimizer.state_dict()["state"].values() for k, v in entry.items() if k != "step"}
    unused = len(reference) - 1 in optimizer.state_dict()["state"]
    return weights, state_differs(whole_state(optimizer), whole_state(expected)), outside, empty, kinds, unused


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2_trains_to_the_bits_of_the_unsharded_step(kind, world_size):
    results = run_ranks(world_size, _train, kind, SHAPES)
    for weights, states, outside, _, kinds, unused in results:
        assert (weights, states, outside) == ([], [], 0)
        assert kinds == {"DTensor"}
        assert not unused
    assert sum(empty for _, _, _, empty, _, _ in results) > 0


@pytest.mark.parametrize("kind", ["bf16-stochastic", "fp32-bf16states"])
def test_random_bits_keyed_by_the_shard_are_rejected(kind):
    weights, states, *_ = run_ranks(2, _train, kind, SHAPES, 4, "keyed by the shard")[0]
    assert weights
    assert bool(states) == (kind == "fp32-bf16states")


@pytest.mark.parametrize("options", [{}, {"master": "split"}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_8_bit_blocks_that_no_rank_cuts_have_the_unsharded_bits(world_size, options):
    kind = (BF16, {"state_dtype": "8bit", "seed": 2, **options})
    for weights, states, *_ in run_ranks(world_size, _train, kind, ALIGNED):
        assert (weights, states) == ([], [])


def _eight_bit_shards(rank, world_size):
    """Each local shard as a tensor of its own, with the keys of the whole."""
    net = sharded_net(SHAPES, F32)
    optimizer = FusedAdam(net.parameters(), **OPTIONS, state_dtype="8bit", seed=3)
    alone = [p.detach().to_local().clone() for p in net.parameters()][:-1]
    codes = [torch.zeros_like(p, dtype=torch.int8) for p in alone], [torch.zeros_like(p, dtype=torch.uint8) for p in alone]
    scales = [[torch.zeros(-(-p.numel() // 256)) for p in alone] for _ in range(2)]
    firsts = []
    for p in list(net.parameters())[:-1]:  # counted, not computed: whole indices, cut as the parameter is
        numbers = torch.arange(p.numel(), dtype=torch.float32).view(p.shape)
        local = distribute_tensor(numbers, p.device_mesh, p.placements).to_local().flatten()
        firsts.append(int(local[0]) if local.numel() else 0)
    for step in range(3):
        backward(net, rank, step)
        grads = [p.grad.to_local().clone() for p in list(net.parameters())[:-1]]
        optimizer.step()
        beta1, beta2 = OPTIONS["betas"]
        hyper = {key: OPTIONS[key] for key in ("lr", "eps", "weight_decay")}
        hypers = [_C.AdamHyper(beta1=beta1, beta2=beta2, step=step + 1, seed=3, **hyper)]
        _C.AdamStepper().step(
            alone, grads, *codes, hypers, [0] * len(alone), keys=list(enumerate(firsts)), exp_avg_scales=scales[0],
            exp_avg_sq_scales=scales[1],
        )  # fmt: skip
    return all(torch.equal(p.to_local(), a) for p, a in zip(list(net.parameters())[:-1], alone, strict=True))


def test_8_bit_shards_are_blocks_of_their_own_keyed_by_the_whole():
    assert all(run_ranks(3, _eight_bit_shards))


def _refusals(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    texts = []

    def refused(call):
        try:
            call()
        except (TypeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("accepted")

    ones = torch.ones(4, 6)
    for placement in (Shard(1), Partial()):
        p = DTensor.from_local(ones.clone(), mesh, [placement])
        refused(lambda p=p: FusedAdam([p]))
    refused(lambda: FusedAdam([DTensor.from_local(torch.ones(6, 4).t(), mesh, [Replicate()])]))
    p = nn.Parameter(distribute_tensor(ones, mesh, [Shard(0)]))
    plain = nn.Parameter(ones.clone())
    optimizer = FusedAdam([p, plain])
    good = distribute_tensor(ones, mesh, [Shard(0)])
    optimizer.step(grads=[good, ones])
    before = whole([p, plain]), whole_state(optimizer)
    for bad in (
        DTensor.from_local(ones.clone(), mesh, [Partial()]),
        distribute_tensor(ones, mesh, [Replicate()]),
        torch.ones(4, 6),
        distribute_tensor(torch.ones(5, 6), mesh, [Shard(0)]),
        distribute_tensor(torch.ones(4, 6, dtype=torch.float64), mesh, [Shard(0)]),
    ):
        refused(lambda bad=bad: optimizer.step(grads=[bad, ones]))
        refused(lambda bad=bad: optimizer.step(grads=[bad, ones], max_norm=1.0))
    refused(lambda: optimizer.step(grads=[good, good]))
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = distribute_tensor(ones, mesh, [Replicate()])
    refused(lambda: optimizer.load_state_dict(saved))
    saved["state"][0]["exp_avg"] = torch.ones(2, 6)
    refused(lambda: optimizer.load_state_dict(saved))
    same = all(torch.equal(a, b) for a, b in zip(whole([p, plain]), before[0], strict=True))
    return texts, same and not state_differs(whole_state(optimizer), before[1])


def test_what_cannot_work_is_refused_and_nothing_is_written():
    expected = [
        "ValueError: FusedAdam: params[0] has placements (Shard(dim=1),); expected Replicate() and Shard(0) only",
        "ValueError: FusedAdam: params[0] has placements (Partial(sum),); expected Replicate() and Shard(0) only",
        "ValueError: FusedAdam: params[0] has a local part with strides (1, 4) for shape (4, 6); expected contiguous",
        *["ValueError: FusedAdam: grads[0] has placements (Partial(sum),)"] * 2,
        *["ValueError: FusedAdam: grads[0] has placements (Replicate(),)"] * 2,
        *["TypeError: FusedAdam: grads[0] has type Tensor; expected a DTensor, as its parameter is one"] * 2,
        *["ValueError: FusedAdam: grads[0] has shape (5, 6); expected (4, 6), the parameter's"] * 2,
        *["TypeError: FusedAdam: grads[0] has dtype float64; expected float32, bfloat16 or float16"] * 2,
        "ValueError: AdamStepper.step: grads[1] has no memory of its own",
        "ValueError: FusedAdam: state[0].exp_avg has placements (Replicate(),)",
        "ValueError: FusedAdam: state[0].exp_avg has shape (2, 6); expected (4, 6), the parameter's",
    ]
    for texts, same in run_ranks(3, _refusals):
        assert same
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start), text


def _replicated(rank, world_size):
    """A plain parameter and a replicated DTensor count once, beside a sharded one."""
    mesh = init_device_mesh("cpu", (world_size,))
    values = [torch.full((3, 4), 2.0), torch.full((5,), 3.0), torch.full((7, 2), 4.0)]
    params = [nn.Parameter(torch.zeros(3, 4))]
    params += [
        nn.Parameter(distribute_tensor(torch.zeros(v.shape), mesh, [s]))
        for v, s in zip(values[1:], [Replicate(), Shard(0)], strict=True)
    ]
    optimizer = FusedAdam(params)
    grads = [values[0], *(distribute_tensor(v, mesh, p.placements) for v, p in zip(values[1:], params[1:], strict=True))]
    optimizer.step(grads=grads, max_norm=1.0)
    reference = [nn.Parameter(torch.zeros(v.shape)) for v in values]
    CPUAdam(reference).step(grads=values, max_norm=1.0)
    versions = [p._version for p in params]
    return [torch.equal(a, b) for a, b in zip(whole(params), reference, strict=True)], min(versions)


def test_plain_and_replicated_parameters_beside_sharded_ones():
    for same, versions in run_ranks(2, _replicated):
        assert all(same)
        assert versions > 0
