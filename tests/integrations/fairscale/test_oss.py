"""OSS and ShardedDataParallel, over gloo ranks: the bits of shardcore.shard, and what
FairScale's tests say of them.
"""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore.integrations.fairscale import OSS, AdaScale, ShardedDataParallel
from tests.support.models import batch_of, hash_of_training, loss_of, make_net
from tests.support.ranks import run_ranks

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
SGD = partial(torch.optim.SGD, momentum=0.9)


def _loop(rank, model, optimizer, scheduler, clip, no_sync, steps=range(4)):
    for step in steps:
        with no_sync():
            (loss_of(model, batch_of(step, 0, rank)) / 2).backward()
        (loss_of(model, batch_of(step, 1, rank)) / 2).backward()
        clip()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _made(optim=torch.optim.AdamW, **options):
    model = make_net()
    oss = OSS(model.parameters(), optim, **ADAMW)
    scheduler = torch.optim.lr_scheduler.StepLR(oss, 2, 0.5)
    return ShardedDataParallel(model, oss, **options), oss, scheduler


def _ours(rank, optim=torch.optim.AdamW, steps=range(4), **options):
    model, oss, scheduler = _made(optim, **options)
    _loop(rank, model, oss, scheduler, lambda: oss.clip_grad_norm(0.5), model.no_sync, steps)
    return model, oss


def _shard(rank, optim):
    model = make_net()
    model, optimizer = shardcore.shard(model, optim(model.parameters(), **ADAMW), stage=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    clip = lambda: shardcore.clip_grad_norm_(model, 0.5)  # noqa: E731
    _loop(rank, model, optimizer, scheduler, clip, lambda: shardcore.no_sync(model))
    return model, optimizer


def _trains(rank, world_size):
    model, oss = _ours(rank, SGD)
    assert hash_of_training(model.module, oss.optim) == hash_of_training(*_shard(rank, SGD))
    net = make_net()
    ddp, plain = nn.parallel.DistributedDataParallel(net), SGD(net.parameters(), **ADAMW)
    clip = lambda: nn.utils.clip_grad_norm_(net.parameters(), 0.5)  # noqa: E731
    _loop(rank, ddp, plain, torch.optim.lr_scheduler.StepLR(plain, 2, 0.5), clip, ddp.no_sync)
    for name, value in model.module.state_dict().items():
        assert torch.allclose(value, net.state_dict()[name], rtol=1e-5, atol=1e-6), name
    hashes = {"shard": hash_of_training(*_shard(rank, shardcore.FusedAdam))}
    for name, options in {"2": {}, "1, cpu": {"stage": 1, "offload": {"optimizer": "cpu"}}}.items():
        model, oss = _ours(rank, **options)
        hashes[name] = hash_of_training(model.module, oss.optim)
    model, oss = _ours(rank, shardcore.FusedAdam)
    hashes["FusedAdam"] = hash_of_training(model.module, oss.optim)
    copied = OSS.use  # the twin: an OSS whose groups are others than those of what steps
    OSS.use = lambda self, optim: self.__dict__.update(
        optim=optim, param_groups=copy.copy(self.param_groups), state={}
    )
    try:
        model = make_net()
        oss = OSS(model.parameters(), torch.optim.AdamW, **ADAMW)
        model = ShardedDataParallel(model, oss)
        oss.param_groups[0] = dict(oss.param_groups[0])
        scheduler = torch.optim.lr_scheduler.StepLR(oss, 2, 0.5)
        _loop(rank, model, oss, scheduler, lambda: oss.clip_grad_norm(0.5), model.no_sync)
        return hashes, hash_of_training(model.module, oss.optim)
    finally:
        OSS.use = copied


def test_trains_to_the_bits_of_shard():
    for hashes, twin in run_ranks(2, _trains):
        assert len(set(hashes.values())) == 1, hashes
        assert twin not in hashes.values()


def _resumes(rank, world_size):
    model, oss = _ours(rank)
    whole = hash_of_training(model.module, oss.optim)
    model, oss = _ours(rank, steps=range(2))
    with pytest.raises(RuntimeError, match="did not consolidate"):
        oss.state_dict()
    oss.consolidate_state_dict(recipient_rank=1)
    if rank == 1:
        states = oss.state_dict()
    else:
        with pytest.raises(RuntimeError, match="did not consolidate"):
            oss.state_dict()
        states = None
    states_of_rank = [states]
    dist.broadcast_object_list(states_of_rank, 1)
    plain = torch.optim.AdamW(make_net().parameters())
    plain.load_state_dict(states_of_rank[0])  # in torch's format
    full = model.module.state_dict()
    model, oss, _ = _made()
    model.module.load_state_dict(full)
    oss.load_state_dict(states_of_rank[0])
    scheduler = torch.optim.lr_scheduler.StepLR(oss, 2, 0.5)
    scheduler.last_epoch = 2
    _loop(rank, model, oss, scheduler, lambda: oss.clip_grad_norm(0.5), model.no_sync, range(2, 4))
    return whole, hash_of_training(model.module, oss.optim)


@pytest.mark.more
def test_consolidated_states_go_on():
    for whole, resumed in run_ranks(2, _resumes):
        assert whole == resumed


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.note = nn.Linear(10, 5), nn.BatchNorm1d(5), "kept"

    def forward(self, x):
        return self.norm(self.inner(x))


def _buffers(rank, world_size):
    torch.manual_seed(rank)  # weights, too: rank 0's are taken
    model = Counts()
    oss = OSS(model.parameters(), torch.optim.AdamW, lr=0.1)
    model = ShardedDataParallel(model, AdaScale(oss))
    assert model.note == "kept"
    assert set(model.state_dict()) == {f"module.{name}" for name in Counts().state_dict()}
    for step in range(2):
        loss_of(model, batch_of(step, 0, rank)).backward()
        oss.step()
        model.zero_grad(set_to_none=True)
    with torch.no_grad():
        model.eval()(batch_of(2, 0, rank)[0])
    return model.norm.running_mean.tolist(), model.inner.weight.tolist()


def test_buffers_are_rank_0s_and_attributes_the_modules():
    first, second = run_ranks(2, _buffers)
    assert first == second


def _own_buffers(rank, world_size):
    """Whether two forwards inside no_sync leave a rank's buffers as without other ranks."""
    torch.manual_seed(0)
    model, alone = Counts(), Counts()
    alone.load_state_dict(model.state_dict())
    oss = OSS(model.parameters(), torch.optim.AdamW, lr=0.1)
    model = ShardedDataParallel(model, oss)
    with model.no_sync():
        for step in range(2):
            for net in (model, alone):
                net(batch_of(step, 0, rank)[0])
    return torch.equal(model.norm.running_mean, alone.norm.running_mean)


def test_buffers_stay_a_ranks_own_inside_no_sync():
    assert run_ranks(2, _own_buffers) == [True, True]


def _unfreezes(rank, world_size):
    """Freeze the first layers for two steps; at stage 2 beside DDP, which is made anew."""
    models = [make_net(), make_net()]
    for net in models:
        next(net.children()).requires_grad_(False)
    oss, plain = OSS(models[0].parameters(), SGD, **ADAMW), SGD(models[1].parameters(), **ADAMW)
    wrapped = [ShardedDataParallel(models[0], oss), nn.parallel.DistributedDataParallel(models[1])]
    for step in range(4):
        if step == 2:
            for net in models:
                net.requires_grad_(True)
            wrapped[1] = nn.parallel.DistributedDataParallel(models[1])
        for model, optimizer in zip(wrapped, (oss, plain), strict=True):
            model.zero_grad()
            loss_of(model, batch_of(step, 0, rank)).backward()
            optimizer.step()
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(value, models[1].state_dict()[name])
    assert len(oss.state) == len(list(models[0].parameters()))


def test_frozen_parameters_begin_to_train():
    run_ranks(2, _unfreezes)


def _reduces(rank, world_size):
    """A step after backwards that were all local: beside DDP, whose last one is not."""
    nets = [make_net(), make_net()]
    oss, plain = OSS(nets[0].parameters(), SGD, **ADAMW), SGD(nets[1].parameters(), **ADAMW)
    model, ddp = ShardedDataParallel(nets[0], oss), nn.parallel.DistributedDataParallel(nets[1])
    assert model.device_type == ddp.device_type
    assert model.is_multi_device_module == ddp.is_multi_device_module
    for step in range(2):
        for micro in range(2):
            with model.no_sync():
                loss_of(model, batch_of(step, micro, rank)).backward()
            with ddp.no_sync() if micro == 0 else nullcontext():
                loss_of(ddp, batch_of(step, micro, rank)).backward()
        model.reduce()
        torch.testing.assert_close(
            oss.clip_grad_norm(0.5), nn.utils.clip_grad_norm_(nets[1].parameters(), 0.5)
        )
        for optimizer in (oss, plain):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in nets[0].state_dict().items():
        torch.testing.assert_close(value, nets[1].state_dict()[name])


def test_local_gradients_are_reduced():
    run_ranks(2, _reduces)


def _refused(rank, world_size):
    net = make_net()
    oss = OSS(net.parameters(), torch.optim.AdamW, lr=0.1)
    other = OSS(net.parameters(), torch.optim.AdamW, lr=0.1)
    ddp = nn.parallel.DistributedDataParallel(net)
    loss_of(ddp, batch_of(0, 0, rank)).backward()
    with pytest.raises(RuntimeError, match="in place of DistributedDataParallel"):
        oss.step()
    with pytest.raises(ValueError, match="contains 2 optimizers; expected one"):
        ShardedDataParallel(net, [oss, other])
    with pytest.raises(TypeError, match="sharded_optimizer is a AdamW; expected an OSS"):
        ShardedDataParallel(net, torch.optim.AdamW(net.parameters()))
    oss.group = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="another one than the OSS's group"):
        ShardedDataParallel(net, oss, dist.group.WORLD)
    with pytest.raises(NotImplementedError, match="filter_params_fn"):
        oss.clip_grad_norm(1.0, filter_params_fn=list)


def test_what_cannot_be_followed_is_refused_by_name():
    run_ranks(2, _refused)


def test_one_process_steps_without_shard():
    param, twin = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    oss, plain = OSS([param], lr=0.1, momentum=0.9), torch.optim.SGD([twin], lr=0.1, momentum=0.9)
    for one, of in ((oss, param), (plain, twin)):
        for _ in range(2):
            of.square().sum().backward()
            one.step()
            one.zero_grad()
    assert torch.equal(param, twin)
    assert oss.state_dict(all_ranks=True)["state"].keys() == plain.state_dict()["state"].keys()
    oss.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
    assert [group["lr"] for group in oss.param_groups] == [0.1, 0.5]
