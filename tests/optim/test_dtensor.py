"""FSDP2's DTensors in FusedAdam and CPUAdam on gloo ranks: bits, norms over the mesh, state
dicts, refusals; broken twins.
"""

import math
import tempfile
import warnings
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardcore
from shardcore._native import _C
from shardcore.distributed.comm import Comm
from shardcore.optim import CPUAdam, FusedAdam, dtensor
from shardcore.optim.clip import global_norm
from tests.support.fsdp2 import (
    ALIGNED,
    BF16,
    F32,
    KINDS,
    OPTIONS,
    SHAPES,
    Net,
    backward,
    placed_grads,
    sharded_net,
    state_differs,
    whole,
    whole_grads,
    whole_state,
)
from tests.support.oracle import Interval, Oracle, violations
from tests.support.params import OnCpu
from tests.support.ranks import run_ranks


def _train(rank, world_size, kind, shapes, steps=4, twin=None):
    """Train sharded, and unsharded with the same whole gradients; return what differs."""
    dtype, options = KINDS[kind] if isinstance(kind, str) else kind
    net = sharded_net(shapes, dtype)
    optimizer = FusedAdam(net.parameters(), **OPTIONS, **options)
    reference = [nn.Parameter(w) for w in whole(net.parameters())]
    expected = CPUAdam(reference, **OPTIONS, **options)
    oracles = [
        Oracle(Interval.of(p), dtype, options.get("master") is not None, **OPTIONS)
        for p in reference
    ]
    with (
        mock.patch.object(dtensor.Rows, "first_element", 0)
        if twin == "keyed by the shard"
        else nullcontext()
    ):
        for step in range(steps):
            backward(net, rank, step)
            grads = whole_grads(net)
            optimizer.step(grad_scale=0.5)
            expected.step(grads=grads, grad_scale=0.5)
            for oracle, grad in zip(oracles[:-1], grads[:-1], strict=True):
                oracle.step(grad, 0.5)
    weights = [
        i
        for i, (a, b) in enumerate(zip(whole(net.parameters()), reference, strict=True))
        if not torch.equal(a, b)
    ]
    exact = options.get("state_dtype", "fp32") == "fp32" and set(options) <= {"master"}
    outside = (
        sum(violations(w, o.param) for w, o in zip(whole(net.parameters()), oracles, strict=True))
        if exact
        else 0
    )
    empty = sum(p.to_local().numel() == 0 for p in net.parameters())
    kinds = {
        type(v).__name__
        for entry in optimizer.state_dict()["state"].values()
        for k, v in entry.items()
        if k != "step"
    }
    unused = len(reference) - 1 in optimizer.state_dict()["state"]
    return (
        weights,
        state_differs(whole_state(optimizer), whole_state(expected)),
        outside,
        empty,
        kinds,
        unused,
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "world_size"), [(kind, 2 + number % 2) for number, kind in enumerate(KINDS)]
)
def test_fsdp2_trains_to_the_bits_of_the_unsharded_step(kind, world_size):
    results = run_ranks(world_size, _train, kind, SHAPES)
    for weights, states, outside, _, kinds, unused in results:
        assert (weights, states, outside) == ([], [], 0)
        assert kinds == {"DTensor"}
        assert not unused
    assert sum(empty for _, _, _, empty, _, _ in results) > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["bf16-stochastic", "fp32-bf16states"])
def test_random_bits_keyed_by_the_shard_are_rejected(kind):
    weights, states, *_ = run_ranks(2, _train, kind, SHAPES, 4, "keyed by the shard")[0]
    assert weights
    assert bool(states) == (kind == "fp32-bf16states")


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world_size", "options"), [(2, {"master": "split"}), (3, {})], ids=str)
def test_8_bit_blocks_that_no_rank_cuts_have_the_unsharded_bits(world_size, options):
    kind = (BF16, {"state_dtype": "8bit", "seed": 2, **options})
    for weights, states, *_ in run_ranks(world_size, _train, kind, ALIGNED):
        assert (weights, states) == ([], [])


def _eight_bit_shards(rank, world_size):
    """Each local shard as a tensor of its own, with the keys of the whole."""
    net = sharded_net(SHAPES, F32)
    optimizer = FusedAdam(net.parameters(), **OPTIONS, state_dtype="8bit", seed=3)
    alone = [p.detach().to_local().clone() for p in net.parameters()][:-1]
    codes = (
        [torch.zeros_like(p, dtype=torch.int8) for p in alone],
        [torch.zeros_like(p, dtype=torch.uint8) for p in alone],
    )
    scales = [[torch.zeros(-(-p.numel() // 256)) for p in alone] for _ in range(2)]
    firsts = []
    # counted, not computed: whole indices, cut as the parameter is
    for p in list(net.parameters())[:-1]:
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
            alone,
            grads,
            *codes,
            hypers,
            [0] * len(alone),
            keys=list(enumerate(firsts)),
            exp_avg_scales=scales[0],
            exp_avg_sq_scales=scales[1],
        )
    return all(
        torch.equal(p.to_local(), a)
        for p, a in zip(list(net.parameters())[:-1], alone, strict=True)
    )


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
        refused(lambda p=p: FusedAdam([p]).step())  # shard takes slices of other dimensions
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
        "ValueError: FusedAdam: params[0] is placed (Shard(dim=1),); expected only "
        "Replicate() and Shard(0)",
        "ValueError: FusedAdam: params[0] is placed (Partial(sum),); expected only "
        "Replicate() and Shard(0)",
        "ValueError: FusedAdam: the local part of params[0] has strides (1, 4) for shape (4, 6); "
        "expected contiguous",
        *["ValueError: FusedAdam: grads[0] is placed (Partial(sum),)"] * 2,
        *["ValueError: FusedAdam: grads[0] is placed (Replicate(),)"] * 2,
        *["TypeError: FusedAdam: grads[0] is of type Tensor; expected a DTensor, as its parameter"]
        * 2,
        *["ValueError: FusedAdam: grads[0] has shape (5, 6); expected (4, 6), as its parameter"]
        * 2,
        *["TypeError: FusedAdam: grads[0] has dtype float64; expected float32, bfloat16 or float16"]
        * 2,
        "ValueError: AdamStepper.step: grads[1] has no memory of its own",
        "ValueError: FusedAdam: state[0].exp_avg is placed (Replicate(),)",
        "ValueError: FusedAdam: state[0].exp_avg has shape (2, 6); expected (4, 6), as its parameter",
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
    grads = [
        values[0],
        *(
            distribute_tensor(v, mesh, p.placements)
            for v, p in zip(values[1:], params[1:], strict=True)
        ),
    ]
    optimizer.step(grads=grads, max_norm=1.0)
    reference = [nn.Parameter(torch.zeros(v.shape)) for v in values]
    CPUAdam(reference).step(grads=values, max_norm=1.0)
    versions = [p._version for p in params]
    return [torch.equal(a, b) for a, b in zip(whole(params), reference, strict=True)], min(versions)


def test_plain_and_replicated_parameters_beside_sharded_ones():
    for same, versions in run_ranks(2, _replicated):
        assert all(same)
        assert versions > 0


def _clip(rank, world_size, shape, max_norm, twin=None):
    """Return the norms by all ways, what float64 says, and whether both ways of clipping have
    the expected weights.
    """
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
        groups = {
            "replicas added": tuple(mesh.get_group(i) for i in range(mesh.ndim)),
            "own shard only": (),
        }[twin]
        return dtensor.Rows(**{**rows.__dict__, "groups": groups})

    with mock.patch.object(dtensor, "rows_of", wrong_rows) if twin else nullcontext():
        norm = shardcore.clip_grad_norm_(other.parameters(), max_norm).item()
        optimizer = FusedAdam(net.parameters(), **OPTIONS, master="fp32")
    optimizer.step(max_norm=max_norm)
    coefficient = _C.clip_coefficient(norm, max_norm)
    expected.step(grads=grads, grad_scale=coefficient)
    same_weights = all(
        torch.equal(a, b) for a, b in zip(whole(net.parameters()), reference, strict=True)
    )
    clipped = [g.clone() for g in grads if g is not None]
    if coefficient != 1.0:
        torch._foreach_mul_(clipped, coefficient)
    scaled = all(torch.equal(a, b) for a, b in zip(whole_grads(other)[:-1], clipped, strict=True))
    torch_norm = (
        nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        .full_tensor()
        .item()
    )
    untouched = all(
        torch.equal(a, b) for a, b in zip(whole_grads(net)[:-1], grads[:-1], strict=True)
    )
    return norm, exact, torch_norm, same_weights, scaled, untouched


@pytest.mark.cases(1)
@pytest.mark.parametrize(("shape", "max_norm"), [((2,), 1e6), ((2, 2), 0.5), ((3,), 0.5)], ids=str)
def test_clipping_by_the_norm_over_the_mesh(shape, max_norm):
    results = run_ranks(math.prod(shape), _clip, shape, max_norm)
    assert len({norm for norm, *_ in results}) == 1
    for norm, exact, torch_norm, same_weights, scaled, untouched in results:
        assert norm == pytest.approx(exact, rel=2**-23)
        assert norm == pytest.approx(torch_norm, rel=2**-6)  # torch adds bfloat16 norms
        assert same_weights
        assert scaled
        assert untouched


@pytest.mark.cases(1)
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
        (
            shardcore.clip_grad_norm_(net.parameters(), math.inf, kind).item(),
            nn.utils.get_total_norm(grads, kind).item(),
        )
        for kind in (1, 1.5, math.inf)
    ]


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
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
    return optimizer.skipped_steps, all(
        torch.equal(a, b) for a, b in zip(whole(net.parameters()), before, strict=True)
    )


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


def _capturable(rank, world_size):
    """A capturable step of DTensors beside the ordinary one; then one that clips, which cannot
    be.
    """
    net, other = (sharded_net(SHAPES, F32) for _ in range(2))
    optimizer, plain = OnCpu(net.parameters(), **OPTIONS), FusedAdam(other.parameters(), **OPTIONS)
    for step in range(2):
        backward(net, rank, step)
        backward(other, rank, step)
        optimizer.step()
        plain.step()
    same = all(
        torch.equal(a, b)
        for a, b in zip(whole(net.parameters()), whole(other.parameters()), strict=True)
    )
    before = [w.clone() for w in whole(net.parameters())]
    with pytest.raises(
        ValueError,
        match=r"max_norm is 1\.0 for capturable sharded DTensors.*clip_grad_norm_ before",
    ):
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
        assert "made other calls" in said
        assert said.endswith("Connection closed by peer")


CHECKPOINT_KINDS = ["bf16-split", "bf16-fp32", "fp32-bf16states"]


def _save(rank, world_size, kind, folder):
    dtype, options = KINDS[kind]
    net = sharded_net(SHAPES, dtype)
    optimizer = FusedAdam(net.parameters(), **OPTIONS, **options)
    for step in range(3):
        optimizer.step(grads=placed_grads(net, step))
    dcp.save(
        {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)},
        checkpoint_id=folder,
    )


def _resume(rank, world_size, kind, folder):
    """Load into another world, go on, and compare with the unsharded run."""
    dtype, options = KINDS[kind]
    net = sharded_net(SHAPES, dtype)
    optimizer = FusedAdam(net.parameters(), **{**OPTIONS, "lr": 0.5}, **options)
    with torch.no_grad():
        for p in net.parameters():
            p.to_local().zero_()
    state = {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(net, state["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
        full = get_optimizer_state_dict(
            net, optimizer, options=StateDictOptions(full_state_dict=True)
        )
        set_optimizer_state_dict(
            net, optimizer, full, options=StateDictOptions(full_state_dict=True)
        )
    plain = Net(SHAPES, dtype)
    expected = CPUAdam(plain.parameters(), **OPTIONS, **options)
    for step in range(5):
        expected.step(grads=whole(placed_grads(net, step)))
        if step >= 3:
            optimizer.step(grads=placed_grads(net, step))
    weights = [
        torch.equal(a, b) for a, b in zip(whole(net.parameters()), plain.parameters(), strict=True)
    ]
    return (
        all(weights),
        state_differs(whole_state(optimizer), whole_state(expected)),
        optimizer.param_groups[0]["lr"],
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", CHECKPOINT_KINDS)
def test_distributed_checkpoints_go_on_in_another_world(kind):
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, _save, kind, folder)
        assert run_ranks(3, _resume, kind, folder) == [(True, [], OPTIONS["lr"])] * 3


def _exchange(rank, world_size):
    """To torch.optim.AdamW over the same DTensors and back; whole plain tensors load too."""
    net = sharded_net(SHAPES, F32)
    ours = FusedAdam(net.parameters(), **OPTIONS)
    for step in range(2):
        ours.step(grads=placed_grads(net, step))
    theirs = torch.optim.AdamW(net.parameters(), **OPTIONS)
    theirs.load_state_dict(ours.state_dict())
    for p, grad in zip(net.parameters(), placed_grads(net, 2), strict=True):
        p.grad = grad
    theirs.step()
    again = CPUAdam(net.parameters())
    again.load_state_dict(theirs.state_dict())
    differs = state_differs(whole_state(again), whole_state(theirs))
    saved = again.state_dict()
    saved["state"] = {
        i: {key: whole([value])[0] for key, value in entry.items()}
        for i, entry in saved["state"].items()
    }
    third = CPUAdam(net.parameters())
    third.load_state_dict(saved)
    return (
        differs,
        state_differs(whole_state(third), whole_state(theirs)),
        int(again.state_dict()["state"][0]["step"]),
    )


def test_states_go_to_torch_and_back():
    assert run_ranks(2, _exchange) == [([], [], 3)] * 2
