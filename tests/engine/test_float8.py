"""float8 weights of torchao over gloo ranks: the bits of every stage and of FSDP2, the bytes that
are gathered, edits and loads, and refusals; broken twins.
"""

import copy
import logging
import math
from contextlib import ExitStack, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardcore
from shardcore.distributed.comm import Comm, Traffic
from shardcore.engine.engine import engine_behind
from shardcore.engine.float8 import Float8Weights
from shardcore.estimate.predict import predict
from shardcore.extras.activations import apply_activation_checkpointing
from shardcore.optim.float8 import check_float8, plain_part
from tests.support.float8 import ADAM, float8_net, fsdp2_losses, trained
from tests.support.models import (
    Reused,
    Run,
    assert_one,
    batch_of,
    error_of,
    hash_of_training,
    loss_of,
    stepped,
)
from tests.support.ranks import run_ranks

float8_config = pytest.importorskip("torchao.float8.config", reason="needs torchao")

STEPS = 3
_take_scales, _cast = Float8Weights.take_scales, Float8Weights.cast
_measure = Float8Weights.measure


def _own_scales(self):
    """A twin: each rank's scales are those of its own shard."""
    with mock.patch.object(Comm, "gather_rows", lambda self, row, *_: row.unsqueeze(0)):
        _take_scales(self)


def _measure_half(self, bucket):
    """A twin: a step measures other values than the new weights."""
    weight = bucket.owned_weight
    bucket.owned_weight = weight / 2
    try:
        _measure(self, bucket)
    finally:
        bucket.owned_weight = weight


def _cast_of_rounded(self, bucket, target):
    """A twin: the cast is from bfloat16 weights, not from the float32 masters."""
    full, bucket.owned_weight = bucket.owned_weight, bucket.owned_weight.bfloat16().float()
    try:
        _cast(self, bucket, target)
    finally:
        bucket.owned_weight = full


TWINS = {
    "scales of the shard": {"take_scales": _own_scales},
    "cast of rounded weights": {"cast": _cast_of_rounded},
    "largest elements of other weights": {"measure": _measure_half},
    "scales of the first step": {"is_stale": lambda self, buckets: not self._scales},
}


def _train(rank, world_size, run, twin=None, net=None):
    """The losses and the hash of a training. run: its stage alone may differ between calls."""
    with ExitStack() as patches:
        for name, broken in TWINS.get(twin, {}).items():
            patches.enter_context(mock.patch.object(Float8Weights, name, broken))
        model, optimizer, losses = trained(rank, run, **net or {})
        return losses, hash_of_training(model, optimizer)


def _fsdp2(rank, world_size, precision):
    return fsdp2_losses(rank, STEPS, precision)


def _run(stage, precision=None, **options):
    accumulate = options.pop("accumulate", 1)
    return Run(stage, STEPS, accumulate, precision, adam=ADAM, shard=options)


@pytest.mark.cases(1)
@pytest.mark.parametrize("precision", ["bf16", None])
def test_every_stage_has_the_losses_of_fsdp2_and_one_hash(precision):
    expected = run_ranks(2, _fsdp2, precision)
    hashes = []
    for stage in range(4):
        results = run_ranks(2, _train, _run(stage, precision), None, {"hidden": 36})
        assert [losses for losses, _ in results] == expected
        hashes += [digest for _, digest in results]
    assert_one(hashes)


@pytest.mark.cases(2)
@pytest.mark.parametrize("twin", TWINS)
def test_broken_twins_have_other_losses(twin):
    expected = run_ranks(2, _train, _run(0))
    losses = [losses for losses, _ in run_ranks(2, _train, _run(3), twin)]
    assert losses != [losses for losses, _ in expected]


CASES = {
    "plain": ({}, {}),
    "bf16": ({"precision": "bf16"}, {}),
    "powers of two": ({}, {"round_scales_to_power_of_2": True}),
    "micro-steps": ({"precision": "bf16", "accumulate": 2, "sync_each": False}, {}),
    "kept parts": ({"reshard_after_forward": 3}, {}),
    "kept": ({"reshard_after_forward": False}, {}),
    "overlapped": ({"overlap_step": True, "offload": {"optimizer": "cpu"}}, {}),
    "weights in host memory": ({"offload": {"optimizer": "cpu", "params": "cpu"}}, {}),
    "layers as units": ({"precision": "bf16", "units": 800, "cast_inputs": "units"}, {}),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", CASES)
def test_stage_3_over_odd_ranks_has_the_bits_of_stage_0(case):
    """Rows of 37 and 24 over 3 ranks: shards cut rows."""
    options, config = CASES[case]
    net = {"whole": True, **config}
    only_3 = "reshard_after_forward", "offload", "overlap_step"
    at_0 = {key: value for key, value in options.items() if key not in only_3}
    expected = run_ranks(3, _train, _run(0, **at_0), None, net)
    assert run_ranks(3, _train, _run(3, **options), None, net) == expected


def test_one_rank_has_the_bits_of_stage_0():
    assert run_ranks(1, _train, _run(3, "bf16")) == run_ranks(1, _train, _run(0, "bf16"))


SCALES = "the scales of float8 weights"


def _freeze_blocks(model):
    model.blocks.requires_grad_(False)


def _traffic(rank, world_size, flag):
    """What a rank sends to gather weights in a step, and of that for scales; as predicted."""
    model, optimizer, _ = trained(rank, _run(3, "bf16"), flag=flag)
    comm = engine_behind("test", model).comm
    before = comm.sent[Traffic.WEIGHTS], comm.collectives().get(SCALES, 0)
    stepped(model, optimizer, rank, 7)
    sent = comm.sent[Traffic.WEIGHTS] - before[0]
    exchanges = comm.collectives().get(SCALES, 0) - before[1]
    prediction = predict(float8_net(flag=flag), stage=3, world_size=world_size, precision="bf16")
    gathers = [t.bytes for t in prediction.transfers if t.purpose.startswith("gather weights")]
    return sent, exchanges, sum(gathers)


def test_stage_3_sends_a_byte_per_float8_weight_and_exchanges_scales_once_a_step():
    as_float8, exchanges, predicted = run_ranks(2, _traffic, True)[0]
    as_bfloat16, none, predicted_bfloat16 = run_ranks(2, _traffic, False)[0]
    assert (exchanges, none) == (1, 0)
    assert as_bfloat16 == predicted_bfloat16
    assert as_float8 == predicted + 6 * 4  # a float32 for each weight
    # of 3 blocks in forward and 2 in backward; each has 2 weights of 24 * 37, padded to 1,024,
    # and a rank sends its half of a byte less for each
    assert as_bfloat16 - predicted == 5 * 2 * 1024 // 2


def _exchanges(rank, world_size, options, prepare):
    """Return how many exchanges of scales each part of a training makes."""
    model, optimizer, _ = trained(rank, _run(3, "bf16", **options), prepare=prepare)
    comm, counts, before = engine_behind("test", model).comm, [], 0

    def count():
        nonlocal before
        now = comm.collectives().get(SCALES, 0)
        counts.append(now - before)
        before = now

    count()
    for scale in (1.0, math.inf, 1.0):
        (loss_of(model, batch_of(7, 0, rank)) * scale).backward()
        count()
        optimizer.step()
        count()
        optimizer.zero_grad()
    state = model.state_dict()
    count()
    model.load_state_dict(state)
    with torch.no_grad():
        model(batch_of(7, 0, rank)[0])
    count()
    return counts


HOST = {"offload": {"optimizer": "cpu"}}


# In turn: the first three steps; then backward and step of a step, of one that is skipped because
# of its gradients, and of a third one; a state dict; a load and a forward.
@pytest.mark.parametrize(
    ("options", "prepare", "expected"),
    [
        ({}, None, [4, 0, 1, 0, 0, 0, 1, 0, 1]),
        (HOST, None, [4, 0, 1, 0, 0, 0, 1, 0, 1]),
        # the forward after a step is the first that knows its weights
        ({**HOST, "overlap_step": True}, None, [3, 1, 0, 1, 0, 0, 0, 0, 1]),
        ({}, _freeze_blocks, [1, 0, 0, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_a_step_exchanges_the_scales_of_what_it_changed(options, prepare, expected):
    for counts in run_ranks(2, _exchanges, options, prepare):
        assert counts == expected


def _contexts(rank, world_size, stage):
    """What is read, computed and edited in full_params, loaded, copied; two steps after each."""
    model, optimizer, losses = trained(rank, _run(stage, "bf16"))
    batch, up = batch_of(9, 0, rank), model.blocks[1].up.weight
    with shardcore.full_params(model):
        values = [up.detach().clone(), loss_of(model, batch).detach()]
        with torch.no_grad():
            up.mul_(0.5)  # another scale
            values.append(model(batch[0]))
    with torch.no_grad():
        values.append(model(batch[0]))
    losses += stepped(model, optimizer, rank, 4)
    with shardcore.full_params(model):
        up.data[3, 5] = 7.0  # which no version counter shows
    with torch.no_grad():
        values.append(model(batch[0]))
    state = model.state_dict()
    losses += stepped(model, optimizer, rank, 5)
    model.load_state_dict(state)
    losses += stepped(model, optimizer, rank, 6)
    model.load_state_dict(float8_net().state_dict())  # torchao's tensors
    with torch.no_grad():
        values.append(model(batch[0]))
    with shardcore.full_params(model):
        values.append(copy.deepcopy(model)(batch[0].bfloat16()).detach())
    return [v.float().tolist() for v in values], losses, hash_of_training(model, optimizer)


def test_full_params_edits_and_loads_reach_the_bytes():
    expected = run_ranks(2, _contexts, 0)
    assert run_ranks(2, _contexts, 3) == expected


def _unfrozen(rank, world_size, stage):
    model, optimizer, losses = trained(rank, _run(stage, "bf16"), prepare=_freeze_blocks)
    shardcore.unfreeze(model.blocks[1])
    losses += stepped(model, optimizer, rank, 7) + stepped(model, optimizer, rank, 8)
    return losses, hash_of_training(model, optimizer)


def test_frozen_weights_are_gathered_as_bytes_and_may_begin_to_train():
    assert run_ranks(2, _unfrozen, 3) == run_ranks(2, _unfrozen, 0)


def test_blocks_that_backward_runs_again_use_the_bytes():
    net = {"kind": Reused}
    expected = run_ranks(2, _train, _run(0, "bf16"), None, net)
    assert run_ranks(2, _train, _run(3, "bf16"), None, net) == expected


def _compiled(rank, world_size, stage, net):
    """Return the losses, the hash, and how many graphs there are; fullgraph raises for a cut."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    run = _run(stage, "bf16", compile={"backend": graphs, "fullgraph": True})
    model, optimizer, losses = trained(rank, run, **net)
    return losses, hash_of_training(model, optimizer), graphs.frame_count


@pytest.mark.more
@pytest.mark.parametrize("options", [None, {}, {"offload_to_cpu": True}])
def test_compiled_blocks_are_one_graph_at_every_stage(options):
    """Also checkpointed ones, whose layers see the bytes again in backward."""
    net = {}
    if options is not None:
        net["prepare"] = partial(apply_activation_checkpointing, **options)
    eager = run_ranks(2, _train, _run(0, "bf16"), None, net)
    for stage in (0, 3):
        assert run_ranks(2, _compiled, stage, net) == [(*each, 1) for each in eager]


def _compiled_contexts(rank, world_size, stage):
    """Forwards with gradients in full_params and outside, and steps."""
    torch._dynamo.reset()
    model = float8_net()
    optimizer = shardcore.FusedAdam(model.parameters(), **ADAM)
    shard = {"precision": "bf16", "compile": {"backend": "aot_eager", "fullgraph": True}}
    model, optimizer = shardcore.shard(model, optimizer, stage, **shard)
    losses = []
    for step in range(2):
        with shardcore.full_params(model):
            losses.append(loss_of(model, batch_of(9, 0, rank)).item())
        losses += stepped(model, optimizer, rank, step)
    return losses, hash_of_training(model, optimizer), "weight" in vars(model.blocks[1].up)


@pytest.mark.more
def test_compiled_blocks_see_the_parameters_in_full_params():
    expected = run_ranks(2, _compiled_contexts, 0)
    assert run_ranks(2, _compiled_contexts, 3) == expected
    assert not expected[0][2]


def _fill(module):
    if isinstance(module, nn.Linear | nn.LayerNorm):
        module.reset_parameters()
    else:
        module.gain.detach().fill_(1.0)
        module.offset.zero_()


def _made_in_shards(rank, world_size, stage):
    with torch.device("meta"):
        model = float8_net()
    optimizer = shardcore.FusedAdam(model.parameters(), **ADAM)
    torch.manual_seed(1)
    model, optimizer = shardcore.shard(model, optimizer, stage, precision="bf16", materialize=_fill)
    types = {type(p) for p in model.parameters()}
    return stepped(model, optimizer, rank, 1), hash_of_training(model, optimizer), types


def test_a_model_on_the_meta_device_is_made_in_shards():
    results = run_ranks(2, _made_in_shards, 3)
    assert results == run_ranks(2, _made_in_shards, 0)
    assert results[0][2] == {nn.Parameter}


def _errors(rank, world_size):
    model, optimizer, _ = trained(rank, _run(3, "bf16"))
    up, batch = model.blocks[0].up, batch_of(9, 0, rank)
    errors = [error_of(lambda: up(torch.zeros(2, 24))), error_of(up.weight.sum)]
    with shardcore.full_params(model):
        inside = loss_of(model, batch)
    errors.append(error_of(inside.backward))
    optimizer.zero_grad()
    weight = None

    def keep(module, arguments):
        nonlocal weight
        weight = module.weight

    handle = up.register_forward_pre_hook(keep)
    loss_of(model, batch).backward()
    handle.remove()
    optimizer.step()
    grad = torch.zeros(37, 24, dtype=weight.dtype)
    errors.append(error_of(lambda: torch.autograd.grad(weight, up.weight, grad)))
    return errors


def test_reads_outside_of_a_unit_and_graphs_of_old_weights_raise_errors():
    for inner, read, other_side, old in run_ranks(2, _errors):
        for error in (inner, read, other_side):
            assert "blocks." in error
            assert "is sharded (stage 3)" in error
        assert "(37, 24) changed since the forward" in old


def _logged(flag, **config):
    model = float8_net(flag=flag, **config)
    shardcore.shard(model, shardcore.FusedAdam(model.parameters()))


def test_layers_that_gather_their_own_dtype_are_named_once(caplog):
    axiswise = float8_config.ScalingGranularity.AXISWISE
    rows = float8_config.CastConfig(scaling_granularity=axiswise)
    caplog.set_level(logging.INFO, "shardcore")
    _logged(True)
    assert "own dtype" not in caplog.text
    _logged(False)
    assert "6 float8 layers (blocks.0.up, ...)" in caplog.text
    assert "enable_fsdp_float8_all_gather is False" in caplog.text
    caplog.clear()
    _logged(False, cast_config_weight=rows, cast_config_input=rows, cast_config_grad_output=rows)
    assert [record.message.count("recipe scales rows") for record in caplog.records] == [1]


@pytest.mark.parametrize(("capability", "fits"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_float8_units_is_refused(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check_float8(float8_net(), torch.device("cuda", 0))
    model = float8_net(emulate=False)
    check_float8(model, torch.device("cpu"))
    message = r"blocks\.0\.up computes in float8.* \(compute capability 8\.6\) does not support"
    with nullcontext() if fits else pytest.raises(ValueError, match=message):
        check_float8(model, torch.device("cuda", 0))


class _Own(nn.Parameter):
    """Stands for a weight of another package that FSDP2 lets gather itself."""

    def fsdp_pre_all_gather(self, mesh):
        raise AssertionError("not called")


def test_weights_that_gather_themselves_and_shared_ones_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = _Own(torch.ones(4, 4))
    error = error_of(lambda: shardcore.shard(model, shardcore.FusedAdam(model.parameters())))
    assert "0.weight" in error
    assert "test_float8._Own" in error
    tied = float8_net()
    tied.other = nn.Linear(24, 37, bias=False)
    tied.other.weight = tied.blocks[0].up.weight
    error = error_of(lambda: shardcore.shard(tied, shardcore.FusedAdam(tied.parameters())))
    assert "blocks.0.up.weight is a float8 weight and is used by other modules" in error
    apart = float8_net()
    apart.other = nn.Linear(24, 37, bias=False)
    apart.other.weight = nn.Parameter(plain_part(apart.blocks[0].up.weight))
    error = error_of(lambda: shardcore.shard(apart, shardcore.FusedAdam(apart.parameters())))
    assert "other.weight shares its memory with blocks.0.up.weight" in error


def _sliced(rank, world_size, wraps):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = float8_net(hidden=36)
    up = model.blocks[0].up
    weight = up.weight.detach() if wraps else plain_part(up.weight)
    up.weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(0)]))
    optimizer = shardcore.FusedAdam(model.parameters())
    return error_of(lambda: shardcore.shard(model, optimizer, 3, process_group=mesh["dp"]))


@pytest.mark.parametrize("wraps", [True, False])
def test_tensor_parallel_float8_weights_are_refused_by_name(wraps):
    for error in run_ranks(2, _sliced, wraps):
        assert "blocks.0.up.weight is a float8 weight and is sliced by tensor parallelism" in error
