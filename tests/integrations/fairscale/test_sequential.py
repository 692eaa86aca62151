"""OffloadModel and Pipe, in one process: the results of the plain model."""

from collections import OrderedDict
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from shardcore.integrations.fairscale import OffloadModel, Pipe
from shardcore.integrations.fairscale import sequential as fairscale_sequential
from shardcore.integrations.fairscale.fsdp import ShardedLater
from tests.support.ranks import run_ranks


def _layers(dropout=0.0):
    torch.manual_seed(0)
    layers = [
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Dropout(dropout),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    ]
    return nn.Sequential(*layers)


def _train(model, optimizer, steps=4):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(torch.ones(2, 6))


ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.parametrize(
    "options", [{}, {"num_slices": 2, "checkpoint_activation": True, "num_microbatches": 3}]
)
def test_offload_model_trains_as_the_plain_model(options):
    plain = _layers()
    expected = _train(plain, torch.optim.AdamW(plain.parameters(), **ADAMW))
    model = OffloadModel(_layers(), device="cpu", **options)
    assert torch.allclose(_evaluate(model), _evaluate(_layers()))  # not sharded yet
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = _train(model, optimizer)
    assert torch.allclose(losses, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="is sharded"):  # its weights are in host memory
        model.model_slices[0][0].weight.sum()
    with pytest.raises(AssertionError):
        assert torch.allclose(_evaluate(_layers()), expected, rtol=1e-5, atol=1e-6)


def test_offload_model_is_sharded_on_its_gpu(monkeypatch):
    current = [None]

    @contextmanager
    def switched(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", switched)
    devices = []
    monkeypatch.setattr(ShardedLater, "shard_now", lambda model: devices.append(current[-1]))
    model = OffloadModel(_layers(), "cuda:1")
    model.shard_now()
    assert (devices, current) == ([torch.device("cuda:1")], [None])


def _evaluate(model):
    with torch.no_grad():
        return model(torch.ones(2, 6))


def test_offload_model_cuts_by_parameters():
    sizes = [
        [sum(p.numel() for p in layer.parameters()) for layer in one]
        for one in fairscale_sequential.cut(_layers(), 3)
    ]
    assert sizes == [[112, 0], [272, 0], [272, 0, 51]], sizes
    assert len(fairscale_sequential.cut(_layers(), 100)) <= 7


def _several_ranks(rank, world_size):
    with pytest.raises(ValueError, match="there are 2 ranks; expected one process"):
        OffloadModel(_layers(), "cpu")


def test_offload_model_refuses_by_name():
    run_ranks(2, _several_ranks)
    with pytest.raises(TypeError, match="model is a Linear"):
        OffloadModel(nn.Linear(2, 2), "cpu")
    with pytest.raises(TypeError, match="device is None"):
        OffloadModel(_layers(), None)
    with pytest.raises(RuntimeError, match="num_microbatches is 2 without checkpoint_activation"):
        OffloadModel(_layers(), "cpu", num_microbatches=2)
    with pytest.raises(TypeError, match="called with 2 arguments"):
        _evaluate(lambda x: OffloadModel(_layers(), "cpu")(x, x))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("chunks", [1, 3, 20])
def test_pipe_trains_as_the_plain_model(checkpoint, chunks):
    plain = _layers()
    expected = _train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model = Pipe(
        _layers(), balance=[2, 3, 2], devices=["cpu"] * 3, chunks=chunks, checkpoint=checkpoint
    )
    assert torch.allclose(
        _train(model, torch.optim.SGD(model.parameters(), lr=0.1)), expected, rtol=1e-5, atol=1e-6
    )


def test_pipe_runs_each_micro_batch_on_the_next_partition_in_its_cycle():
    order = []
    model = Pipe(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu", "cpu"], chunks=3
    )
    for index, partition in enumerate(model.partitions):
        partition.register_forward_pre_hook(
            lambda module, args, index=index: order.append((index, int(args[0][0, 0])))
        )
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
    model.eval()(torch.arange(3.0).repeat(2, 1).T.contiguous())
    assert order == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]


@pytest.mark.parametrize("checkpoint, forwards", [("always", 6), ("except_last", 5), ("never", 3)])
def test_pipe_computes_micro_batches_again_as_it_is_told(checkpoint, forwards):
    model = Pipe(
        nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"], chunks=3, checkpoint=checkpoint
    )
    calls = []
    model.partitions[0].register_forward_pre_hook(lambda module, args: calls.append(module))
    model(torch.ones(3, 2)).sum().backward()
    assert len(calls) == forwards


def test_pipe_is_a_sequence_and_takes_tuples():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    model = Pipe(nn.Sequential(first, second), [1, 1], devices=["cpu", "cpu"], chunks=2)
    assert (len(model), list(model), model[0], model[-1]) == (2, [first, second], first, second)
    assert (model.balance, model.devices, model.chunks) == ([1, 1], [torch.device("cpu")] * 2, 2)
    with pytest.raises(IndexError):
        model[2]
    assert model.double()[0].weight.dtype == torch.float64
    with pytest.raises(TypeError, match="cannot move to another device"):
        model.to("meta")

    class Pair(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1], pair[0] - pair[1]

    assert set(
        Pipe(
            nn.Sequential(OrderedDict(a=first, b=second)), [1, 1], devices=["cpu"] * 2
        ).state_dict()
    ) == {
        *(
            "partitions.0.a.weight",
            "partitions.0.a.bias",
            "partitions.1.b.weight",
            "partitions.1.b.bias",
        ),
    }
    with pytest.raises(ValueError, match="contains a layer twice"):
        Pipe(nn.Sequential(first, first), [1, 1], devices=["cpu"] * 2)
    a, b = torch.rand(5, 1), torch.rand(5, 1)
    outs = Pipe(nn.Sequential(Pair()), [1], devices=["cpu"], chunks=2)((a, b))
    assert torch.equal(outs[0], a + b)
    assert torch.equal(outs[1], a - b)


@pytest.mark.parametrize(
    "options, error, says",
    [
        ({"balance": None}, ValueError, "balance is None"),
        ({"balance": [1]}, ValueError, "balance is \\[1\\] for 2 layers"),
        ({"balance": [0, 2]}, ValueError, "positive numbers"),
        ({"balance": [1, 1], "devices": ["cpu"]}, IndexError, "1 devices for 2 partitions"),
        ({"balance": [2], "chunks": 0}, ValueError, "chunks is 0"),
        (
            {"balance": [2], "checkpoint": "sometimes"},
            ValueError,
            "'always', 'except_last', or 'never'",
        ),
        ({"balance": [2], "deferred_batch_norm": True}, NotImplementedError, "deferred_batch_norm"),
    ],
)
def test_pipe_refuses_by_name(options, error, says):
    with pytest.raises(error, match=says):
        Pipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), **{"devices": ["cpu"], **options})
