"""FullyShardedDataParallel and the wrap functions: the bits of shardcore.shard at stage 3, with
the script's own optimizer.
"""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import shardcore
from shardcore.integrations.fairscale import (
    OSS,
    FullyShardedDataParallel,
    ShardedDataParallel,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    get_fsdp_instances,
    wrap,
)
from shardcore.integrations.fairscale import fsdp as fairscale_fsdp
from tests.support.models import Block, Net, batch_of, hash_of_training, loss_of, make_net
from tests.support.ranks import run_ranks

FSDP = FullyShardedDataParallel
SGD = partial(torch.optim.SGD, momentum=0.9)
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def _loop(rank, model, optimizer, scheduler, no_sync, clip, steps=range(4)):
    for step in steps:
        with no_sync():  # before the first forward that FSDP sees
            (loss_of(model, batch_of(step, 0, rank)) / 2).backward()
        (loss_of(model, batch_of(step, 1, rank)) / 2).backward()
        clip()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _shard(rank, optim=shardcore.FusedAdam, **options):
    model = make_net()
    model, optimizer = shardcore.shard(
        model, optim(model.parameters(), **ADAMW), 3, units=Block, **options
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    clip = lambda: shardcore.clip_grad_norm_(model, 0.5)  # noqa: E731
    _loop(rank, model, optimizer, scheduler, lambda: shardcore.no_sync(model), clip)
    return hash_of_training(model, optimizer)


def _wrapped(part_options=None, **options):
    model = make_net()
    for index in range(3):
        # the model's alone
        inside = {name: value for name, value in options.items() if name != "loss_scale"}
        model.blocks[index] = FSDP(model.blocks[index], **{**inside, **(part_options or {})})
    return FSDP(model, **options)


def _fsdp(rank, part_options=None, steps=range(4), optim=torch.optim.AdamW, late=False, **options):
    model = _wrapped(part_options, **options)
    optimizer = optim(model.parameters(), **ADAMW)
    make = partial(torch.optim.lr_scheduler.StepLR, optimizer, 2, 0.5)
    if late:  # a scheduler of the optimizer that was replaced
        model.shard_now()
    _loop(rank, model, optimizer, make(), model.no_sync, lambda: model.clip_grad_norm_(0.5), steps)
    return model, optimizer


def _trains(rank, world_size):
    mixed = {"mixed_precision": True, "compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True}
    bf16 = {"precision": "bf16", "reduce_dtype": "fp32"}
    pairs = {
        "plain": (
            _shard(rank),
            [
                {"move_params_to_cpu": True},
                {"reshard_after_forward": False, "optim": shardcore.FusedAdam},
            ],
        ),
        "mixed": (_shard(rank, **bf16), [mixed]),
        "SGD": (_shard(rank, SGD), [{"optim": SGD, "late": True}]),
    }
    for name, (wanted, cases) in pairs.items():
        for options in cases:
            assert hash_of_training(*_fsdp(rank, **options)) == wanted, (name, options)
    assert pairs["plain"][0] != pairs["mixed"][0]
    keeps, fairscale_fsdp.keep_working = (
        fairscale_fsdp.keep_working,
        lambda old, made: old.__dict__.update(step=made.step),
    )
    try:  # the twin: load_state_dict and zero_grad go on, the learning rate's steps do not
        with pytest.raises(AttributeError):
            _fsdp(rank, late=True)
    finally:
        fairscale_fsdp.keep_working = keeps


@pytest.mark.more
def test_trains_to_the_bits_of_shard():
    run_ranks(2, _trains)


def _states(rank, world_size):
    model, optimizer = _fsdp(rank)
    whole = hash_of_training(model, optimizer)
    model, optimizer = _fsdp(rank, steps=range(2), state_dict_on_rank_0_only=True)
    states = [model.state_dict(), model.gather_full_optim_state_dict(optimizer, recipient_rank=0)]
    assert (bool(states[0]), states[1] is not None) == (rank == 0, rank == 0)
    torch.distributed.broadcast_object_list(states, 0)
    assert list(states[0]) == list(Net().state_dict())
    torch.optim.AdamW(Net().parameters()).load_state_dict(states[1])  # in torch's format
    with model.summon_full_params():
        summoned = {name: param.detach().clone() for name, param in model.named_parameters()}
        model.head.weight.detach().mul_(2)
    assert all(torch.equal(states[0][name], value) for name, value in summoned.items())
    assert torch.equal(
        shardcore.full_state(model.gain, "exp_avg"), states[1]["state"][0]["exp_avg"]
    )
    shards = model.local_state_dict()
    again = _wrapped()  # loads before it is sharded
    again.append_shared_param(again.head.weight)
    optimizer = torch.optim.AdamW(again.parameters(), **ADAMW)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    again.load_state_dict(states[0])
    optimizer.load_state_dict(again.get_shard_from_optim_state_dict(states[1]))
    scheduler.last_epoch = 2
    _loop(
        rank,
        again,
        optimizer,
        scheduler,
        again.no_sync,
        lambda: again.clip_grad_norm_(0.5),
        range(2, 4),
    )
    assert hash_of_training(again, optimizer) == whole
    again.load_local_state_dict(shards)
    doubled = {**states[0], "head.weight": states[0]["head.weight"] * 2}
    assert not again.state_dict_on_rank_0_only
    assert all(torch.equal(value, doubled[name]) for name, value in again.state_dict().items())
    with again.summon_full_params():
        plain = copy.deepcopy(again)  # an ordinary model, which is not sharded
    assert [name for name, _ in plain.named_parameters()] == [
        name for name, _ in Net().named_parameters()
    ]
    with torch.no_grad():
        plain(batch_of(0, 0, rank)[0])
    assert pickle.loads(pickle.dumps(plain)).gain == plain.gain


@pytest.mark.more
def test_states_are_the_plain_models_and_go_on():
    run_ranks(2, _states)


def _refused(rank, world_size):
    batch = batch_of(0, 0, rank)
    model = _wrapped()
    with torch.no_grad():
        before = model(batch[0])
    with pytest.raises(ValueError, match="found 0 optimizers with its parameters; expected one"):
        model(batch[0])
    assert torch.equal(model.eval()(batch[0]), before)
    model.train()
    first = torch.optim.AdamW(model.parameters(), **ADAMW)
    first.scheduler = torch.optim.lr_scheduler.StepLR(first, 1)  # a cycle
    second = torch.optim.AdamW(model.parameters(), **ADAMW)
    with pytest.raises(ValueError, match="found 2 optimizers"):
        model(batch[0])
    del first
    assert torch.allclose(model(batch[0]), before)
    second.step()
    nets = nn.ModuleList([make_net(), FSDP(make_net())])
    both = torch.optim.AdamW(nets.parameters())
    with pytest.raises(ValueError, match="holds parameters of other modules, too"):
        nets[1](batch[0])
    del both
    model = _wrapped({"move_params_to_cpu": True})
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="sets offload="):
        model(batch[0])
    del optimizer


def test_what_cannot_be_followed_is_refused_by_name():
    run_ranks(2, _refused)
    for options, says in {
        "fp32_reduce_scatter": True,
        "compute_dtype": torch.float16,
        "buffer_dtype": torch.float16,
        "move_grads_to_cpu": True,
        "state_dict_device": torch.device("cpu"),
    }.items():
        with pytest.raises(ValueError, match=options):
            FSDP(nn.Linear(2, 2), **{options: says})
    assert (
        FSDP(nn.Linear(2, 2).half(), compute_dtype=torch.float16).shard_options()["precision"]
        is None
    )
    with pytest.raises(ValueError, match="wrapped already"):
        FSDP(FSDP(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="module is a list"):
        FSDP([])


def _scales(rank, world_size):
    batch = batch_of(0, 0, rank)
    model = _wrapped(mixed_precision=True, loss_scale=shardcore.LossScale(initial_power=4))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    loss_of(model, batch).backward()
    with pytest.raises(ValueError, match="scale_loss"):
        optimizer.step()
    optimizer.zero_grad()
    before = loss_of(model, batch)
    optimizer.scale_loss(before).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert loss_of(model, batch) < before
    net = make_net()
    oss = OSS(net.parameters(), lr=0.1)
    model = ShardedDataParallel(net, oss, loss_scale=64.0)
    assert oss.scale_loss(torch.ones(())) == 64


def test_float16_scales_losses():
    run_ranks(2, _scales)


def test_parts_without_mixed_precision_keep_float32():
    model = _wrapped({"mixed_precision": False}, mixed_precision=True)
    options = model.shard_options()
    assert options["precision"] == "fp16"
    assert set(options["keep_fp32"]) == {
        param for block in model.blocks for param in block.parameters()
    }
    assert options["units"] == [*model.blocks]
    assert get_fsdp_instances(model) == [model, *model.blocks]


# --- wrap: what FairScale's tests say -------------------------------------------------------------


def _nested():
    return nn.Sequential(
        nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), nn.Linear(5, 5)
    )


def test_wrap_is_for_enable_wrap_alone():
    assert not isinstance(wrap(nn.Linear(5, 5)), FSDP)
    assert not isinstance(auto_wrap(_nested()), FSDP)
    with enable_wrap(wrapper_cls=FSDP, reshard_after_forward=False):
        wrapped, other = wrap(nn.Linear(5, 5)), wrap(nn.Linear(5, 5), reshard_after_forward=True)
        with pytest.raises(NotImplementedError, match="inside of another"), enable_wrap():
            pass
    assert isinstance(wrapped, FSDP)
    assert isinstance(wrapped, nn.Linear)
    assert not wrapped.shard_options()["reshard_after_forward"]
    assert other.shard_options()["reshard_after_forward"]
    assert (
        wrapped.reshard_after_forward,
        wrapped.mixed_precision,
        other.reshard_after_forward,
    ) == (
        False,
        False,
        True,
    )
    assert not isinstance(wrap(nn.Linear(5, 5)), FSDP)


def test_auto_wrap_by_size():
    with enable_wrap(wrapper_cls=FSDP):
        model = auto_wrap(
            _nested(), auto_wrap_policy=partial(default_auto_wrap_policy, min_num_params=40)
        )
        assert [isinstance(part, FSDP) for part in (model, model.module[0], model.module[1])] == [
            True,
            False,
            True,
        ]
        assert not any(isinstance(part, FSDP) for part in model.module[1].module)
        with pytest.raises(ValueError, match="contains wrapped modules"):
            auto_wrap(nn.Sequential(model))
        small = partial(
            default_auto_wrap_policy, min_num_params=40, skip_params_check_for_root=True
        )
        assert isinstance(
            auto_wrap(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), auto_wrap_policy=small), FSDP
        )
        inside = auto_wrap(  # the rest beside the wrapped linear layer has 30 parameters
            nn.Sequential(nn.Linear(10, 10), nn.Linear(5, 5)),
            auto_wrap_policy=partial(default_auto_wrap_policy, min_num_params=40),
        )
        assert [isinstance(part, FSDP) for part in (inside, inside[0])] == [False, True]
        lists = auto_wrap(
            nn.ModuleList([nn.Linear(10, 10)]),
            auto_wrap_policy=partial(default_auto_wrap_policy, min_num_params=40),
        )
        assert [isinstance(part, FSDP) for part in (lists, lists[0])] == [False, True]
        leaf = auto_wrap(
            nn.Sequential(nn.Linear(10, 10), nn.MultiheadAttention(100, 1)),
            auto_wrap_policy=partial(default_auto_wrap_policy, min_num_params=40),
        )
        assert [isinstance(part, FSDP) for part in (leaf[0], leaf[1], leaf[1].out_proj)] == [
            True,
            False,
            False,
        ]


def test_auto_wrap_by_configuration():
    model = _nested()
    model[1].wrapper_config = {"reshard_after_forward": False}
    with enable_wrap(auto_wrap_policy=config_auto_wrap_policy):
        model = auto_wrap(model)
    assert get_fsdp_instances(model) == [model[1]]
    assert not model[1].shard_options()["reshard_after_forward"]
    torch.save(model.state_dict(), io.BytesIO())
