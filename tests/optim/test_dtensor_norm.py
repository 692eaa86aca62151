"""The norm of FSDP2's gradients over the mesh: clipping, replicas counted once, skipped steps; and broken twins."""

import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore._native import _C
from shardcore.distributed.comm import Comm
from shardcore.optim import CPUAdam, FusedAdam, dtensor, global_norm
from tests.ranks import run_ranks

from .fsdp2 import ALIGNED, BF16, F32, OPTIONS, SHAPES, backward, sharded_net, whole, whole_grads


def _clip(rank, world_size, shape, max_norm, twin=None):
    """Return the norms by all ways, what float64 says, and whether both ways of clipping have the expected weights."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    net, other = (sharded_net(SHAPES, BF16, mesh) for _ in range(2))
    optimizer = FusedAdam(net.parameters(), **OPTIONS, master="fp32")
    reference = [nn.Parameter(w) for w in whole(net.parameters())]
    expected = CPUAdam(reference, **OPTIONS, master="fp32")
    backward(net, rank, 0)
    backward(other, rank, 0)
    grads = whole_grads(net)
    exact = math.sqrt(sum(g.double().square().sum().item() for g in grads if g is not None))
    rows_of = dtensor.rows_of

    def wrong_rows(op, name, p):
        rows = rows_of(op, name, p)
        groups = {"replicas added": tuple(mesh.get_group(i) for i in range(mesh.ndim)), "own shard only": ()}[twin]
        return dtensor.Rows(**{**rows.__dict__, "groups": groups})

    with mock.patch.object(dtensor, "rows_of", wrong_rows) if twin else nullcontext():
        norm = shardcore.clip_grad_norm_(other.parameters(), max_norm).item()
        optimizer = FusedAdam(net.parameters(), **OPTIONS, master="fp32")
    optimizer.step(max_norm=max_norm)
    coefficient = _C.clip_coefficient(norm, max_norm)
    expected.step(grads=grads, grad_scale=coefficient)
    same_weights = all(torch.equal(a, b) for a, b in zip(whole(net.parameters()), reference, strict=True))
    clipped = [g.clone() for g in grads if g is not None]
    if coefficient != 1.0:
        torch._foreach_mul_(clipped, coefficient)
    scaled = all(torch.equal(a, b) for a, b in zip(whole_grads(other)[:-1], clipped, strict=True))
    torch_norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]).full_tensor().item()
    untouched = all(torch.equal(a, b) for a, b in zip(whole_grads(net)[:-1], grads[:-1], strict=True))
    return norm, exact, torch_norm, same_weights, scaled, untouched


MESHES = {"2": (2,), "3": (3,), "hsdp": (2, 2)}


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_by_the_norm_over_the_mesh(shape, max_norm):
    results = run_ranks(math.prod(shape), _clip, shape, max_norm)
    assert len({norm for norm, *_ in results}) == 1
    for norm, exact, torch_norm, same_weights, scaled, untouched in results:
        assert norm == pytest.approx(exact, rel=2**-23)
        assert norm == pytest.approx(torch_norm, rel=2**-6)  # torch adds bfloat16 norms
        assert same_weights
        assert scaled
        assert untouched


@pytest.mark.parametrize("twin", ["replicas added", "own shard only"])
def test_a_norm_of_other_ranks_is_rejected(twin):
    norm, exact, *_ = run_ranks(4, _clip, (2, 2), 0.5, twin)[0]
    assert norm != pytest.approx(exact, rel=2**-23)


def _other_norms(rank, world_size, shape):
    """Return (norm, torch's over whole gradients) for norms that are not Euclidean."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    net = sharded_net(SHAPES, F32, mesh)
    backward(net, rank, 0)
    grads = [grad for grad in whole_grads(net) if grad is not None]
    return [
        (shardcore.clip_grad_norm_(net.parameters(), math.inf, kind).item(), nn.utils.get_total_norm(grads, kind).item())
        for kind in (1, 1.5, math.inf)
    ]


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_norms_of_other_types_over_the_mesh(shape):
    first, *others = run_ranks(math.prod(shape), _other_norms, shape)
    assert all(ours == pytest.approx(torchs, rel=1e-5) for ours, torchs in first)
    assert all(other == first for other in others)


def _aligned_norm(rank, world_size):
    net = sharded_net(ALIGNED, F32)
    backward(net, rank, 0)
    return shardcore.clip_grad_norm_(net.parameters(), math.inf).item(), global_norm(
        [g for g in whole_grads(net) if g is not None]
    )


def test_the_norm_of_shards_that_cut_no_block_has_the_unsharded_bits():
    assert all(ours == unsharded for ours, unsharded in run_ranks(3, _aligned_norm))


def _not_finite(rank, world_size):
    """One bad element on one rank: every rank skips."""
    net = sharded_net(SHAPES, F32)
    optimizer = FusedAdam(net.parameters(), **OPTIONS)
    backward(net, rank, 0)
    before = whole(net.parameters())
    if rank == 1:
        next(net.parameters()).grad.to_local()[0, 0] = math.inf
    optimizer.step(max_norm=1.0)
    return optimizer.skipped_steps, all(torch.equal(a, b) for a, b in zip(whole(net.parameters()), before, strict=True))


def test_a_gradient_that_is_not_finite_on_one_rank_skips_on_all():
    assert run_ranks(2, _not_finite) == [(1, True)] * 2


def _scaler(rank, world_size):
    """GradScaler divides, and an infinity on one rank skips everywhere."""
    net = sharded_net(SHAPES, F32)
    optimizer = FusedAdam(net.parameters(), **OPTIONS)
    reference = [nn.Parameter(w) for w in whole(net.parameters())]
    expected = CPUAdam(reference, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        backward(net, rank, step)
        grads = whole_grads(net)
        if step != 1:
            expected.step(grads=grads)
        for p in net.parameters():
            if p.grad is not None:
                p.grad.to_local().mul_(scaler.get_scale())
        if (step, rank) == (1, 1):
            next(net.parameters()).grad.to_local()[0, 0] = math.inf
        scaler.scale(torch.zeros(()))  # starts it
        scaler.step(optimizer)
        scaler.update()
    same = all(torch.equal(a, b) for a, b in zip(whole(net.parameters()), reference, strict=True))
    return same, optimizer.skipped_steps, scaler.get_scale()


def test_grad_scaler_skips_on_all_ranks():
    assert run_ranks(2, _scaler) == [(True, 1, 2.0)] * 2


class _OnCpu(FusedAdam):
    _capture_type = "cpu"


def _capturable(rank, world_size):
    """A capturable step of DTensors beside the ordinary one; then one that clips, which cannot be."""
    net, other = (sharded_net(SHAPES, F32) for _ in range(2))
    optimizer, plain = _OnCpu(net.parameters(), **OPTIONS, capturable=True), FusedAdam(other.parameters(), **OPTIONS)
    for step in range(2):
        backward(net, rank, step)
        backward(other, rank, step)
        optimizer.step()
        plain.step()
    same = all(torch.equal(a, b) for a, b in zip(whole(net.parameters()), whole(other.parameters()), strict=True))
    before = [w.clone() for w in whole(net.parameters())]
    with pytest.raises(ValueError, match=r"max_norm has 1\.0 for capturable DTensors.*clip_grad_norm_ before"):
        optimizer.step(max_norm=1.0)
    untouched = all(torch.equal(a, b) for a, b in zip(whole(net.parameters()), before, strict=True))
    return same, untouched, optimizer.skipped_steps


def test_capturable_dtensors_step_alike_and_refuse_a_norm_that_needs_other_ranks():
    assert run_ranks(2, _capturable) == [(True, True, 0)] * 2


def _loses_the_others(rank, world_size):
    def lost(*args, **kwargs):
        raise RuntimeError("Connection closed by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.all_gather", lost)
        with pytest.raises(RuntimeError) as error:
            Comm().gather_rows(torch.zeros(2))
    return str(error.value)


def test_a_rank_that_waits_for_one_that_refused_says_what_that_means():
    for said in run_ranks(2, _loses_the_others):
        assert "expected every rank to run the same" in said
        assert said.endswith("Connection closed by peer")
