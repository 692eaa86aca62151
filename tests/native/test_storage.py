"""closed, lend, withdraw: memory that comes and goes behind a tensor, and errors that name it in
between. untouched, note_write: whether others wrote to it.
"""

import pytest
import torch
from torch import nn

from shardcore._native import _C

CPU = torch.zeros(1)


def closed_param(*shape: int) -> nn.Parameter:
    param = nn.Parameter(torch.empty(*shape))
    param.data = _C.closed(shape, CPU, "w is away")
    return param


@pytest.mark.parametrize(
    "touch",
    [
        lambda p: p + 1,
        lambda p: p.sum(),
        lambda p: p.clone(),
        lambda p: p.tolist(),
        lambda p: p.data_ptr(),
        lambda p: p[0, 0].item(),
        lambda p: p.detach().numpy(),
        lambda p: p.data.copy_(torch.ones(4, 6)),
        lambda p: p.data.zero_(),
        lambda p: nn.functional.linear(torch.ones(2, 6), p),
        lambda p: nn.functional.embedding(torch.tensor([1]), p),
        lambda p: torch.cat([p, p]),
        lambda p: p.to(torch.bfloat16),
        lambda p: _C.sq_norm([p.detach()]),
        lambda p: _C.cast([p.data], [torch.ones(4, 6)]),
    ],
)
def test_whatever_touches_a_closed_tensor_raises_with_its_name(touch):
    param = closed_param(4, 6)
    assert (param.shape, param.stride(), param.requires_grad) == ((4, 6), (6, 1), True)
    with pytest.raises(RuntimeError, match="w is away"):
        touch(param)


def test_lent_memory_is_seen_without_a_copy_and_taken_back():
    param, memory = closed_param(4, 6), torch.randn(256)
    version = param._version
    for offset in (0, 10, 232):
        _C.lend([param], memory, [offset])
        assert torch.equal(param.detach().view(-1), memory[offset : offset + 24])
        with torch.no_grad():
            param.add_(1)
        assert param.data_ptr() == memory[offset:].data_ptr()
        _C.withdraw([param], ["gone again"])
        with pytest.raises(RuntimeError, match="gone again"):
            param.sum()
    assert param._version == version + 3, "only what wrote to it counts"


def test_what_autograd_saved_sees_the_memory_that_is_there_in_backward():
    param, x = closed_param(4, 6), torch.randn(2, 6, requires_grad=True)
    _C.lend([param], torch.randn(24), [0])
    loss = nn.functional.linear(x, param).sum()
    _C.withdraw([param], ["away in backward"])
    with pytest.raises(RuntimeError, match="away in backward"):
        torch.autograd.grad(loss, x, retain_graph=True)
    other = torch.randn(24)
    _C.lend([param], other, [0])
    loss.backward()
    assert torch.equal(x.grad, other.view(4, 6).sum(0).expand(2, 6))


def test_what_was_interrupted_is_done_again():
    param, first, second = closed_param(4, 6), torch.zeros(24), torch.ones(24)
    _C.lend([param], first, [0])
    _C.lend([param], second, [0])
    assert param.data_ptr() == second.data_ptr()
    for message in ("away", "still away"):
        _C.withdraw([param], [message])
        with pytest.raises(RuntimeError, match=message):
            param.sum()


def test_lent_memory_lives_until_it_is_taken_back():
    tier = _C.HostTier(torch.device("cpu"))
    param = closed_param(4, 6)
    _C.lend([param], tier.empty(24, torch.float32), [0])
    assert tier.bytes_allocated == 96
    _C.withdraw([param], [""])
    assert tier.bytes_allocated == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p, m: _C.lend([p], m.double(), [0]),
            TypeError,
            r"lend: tensors\[0\] has dtype Float on cpu; expected Double",
        ),
        (
            lambda p, m: _C.lend([p[1:]], m, [0]),
            ValueError,
            r"lend: tensors\[0\] has no storage of its own",
        ),
    ],
)
def test_refusals(call, error, message):
    param, memory = closed_param(4, 6), torch.zeros(24)
    with pytest.raises(error, match=message):
        call(param, memory)
    with pytest.raises(RuntimeError, match="w is away"):
        param.sum()


def test_memory_of_someone_else_is_neither_hidden_nor_given_up():
    param, memory, theirs = closed_param(4, 6), torch.zeros(24), torch.ones(4, 6)
    param.data = theirs
    with pytest.raises(
        ValueError, match=r"lend: tensors\[0\] has memory of someone else; expected a sharded param"
    ):
        _C.lend([param], memory, [0])
    with pytest.raises(ValueError, match=r"withdraw: tensors\[0\] has memory of someone else"):
        _C.withdraw([param], ["away"])
    assert torch.equal(theirs, torch.ones(4, 6))
    nothing = closed_param(0, 6)
    for _ in range(2):
        _C.lend([nothing], memory[:0], [0])
        _C.withdraw([nothing], ["away"])


@pytest.mark.parametrize(
    "touch",
    [
        lambda p: p.detach().add_(1),
        lambda p: setattr(p, "grad", torch.ones(4, 6)),
        lambda p: setattr(p, "data", p.data.clone()),
        lambda p: setattr(p, "data", p.data.view(torch.int32).view(torch.float32)[1:]),
        lambda p: setattr(p, "data", p.data.double()),
    ],
)
def test_each_touch_of_a_parameter_is_seen(touch):
    params, watched = watched_params()
    assert _C.untouched(params, *watched)
    touch(params[1])
    assert not _C.untouched(params, *watched)


def watched_params():
    """Three parameters with what `untouched` compares of them."""
    params = [nn.Parameter(torch.ones(4, 6)) for _ in range(3)]
    addresses = [p.data_ptr() for p in params]
    return params, (addresses, [p._version for p in params], torch.float32)


def test_a_noted_write_moves_versions_as_one_in_place_does():
    params, (addresses, before, dtype) = watched_params()
    loss = (params[0] * params[0]).sum()
    versions = _C.note_write(params)
    assert versions == [p._version for p in params] == [version + 1 for version in before]
    assert not _C.untouched(params, addresses, before, dtype)
    assert _C.untouched(params, addresses, versions, dtype)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_lists_of_other_lengths_are_refused():
    params, (addresses, versions, dtype) = watched_params()
    with pytest.raises(ValueError, match="3 tensors, 2 addresses and 3 versions"):
        _C.untouched(params, addresses[1:], versions, dtype)
