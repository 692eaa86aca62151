"""Gradients and parameters whose memory is not what it seems."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardcore.optim import CPUAdam, FusedAdam
from tests.native.helpers import nothing_written

OURS = pytest.mark.parametrize("make", [CPUAdam, FusedAdam])


def param(n=8):
    return torch.nn.Parameter(torch.ones(n))


@OURS
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("through_grads", [True, False])
def test_a_gradient_with_the_negative_bit_counts_with_its_sign(make, max_norm, through_grads):
    grad = torch._neg_view(torch.ones(8))  # what z.conj().imag is
    assert grad.is_neg()
    assert grad[0] == -1
    grad.requires_grad_()  # as create_graph leaves it
    p, plain = param(), param()
    ours, reference = make([p], lr=0.1), make([plain], lr=0.1)
    if not through_grads:
        p.grad = grad
    ours.step(grads=[grad] if through_grads else None, max_norm=max_norm)
    reference.step(grads=[torch.full((8,), -1.0)], max_norm=max_norm)
    assert torch.equal(p, plain)
    assert p[0] > 1
    assert grad.is_neg()  # the caller's gradient is left as it was


@OURS
def test_a_released_parameter_is_refused(make):
    p, q = param(), param()
    optimizer = make([q, p])
    p.untyped_storage().resize_(0)
    with nothing_written(q), pytest.raises(ValueError, match=r"params\[1\] has a storage of 0 bytes; expected 32 \(its memory"):
        optimizer.step(grads=[torch.ones(8)] * 2)
    assert not optimizer.state  # nothing has been counted either
    p.untyped_storage().resize_(32)
    optimizer.step(grads=[torch.ones(8)] * 2)


@OURS
def test_tensors_without_memory_are_refused(make):
    p = param()
    optimizer = make([p])
    p.grad = torch.ones(8)
    with nothing_written(p), FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(8)
        with pytest.raises(ValueError, match=r"\[0\] has no memory of its own"):
            optimizer.step()
    for grad in (fake, torch._efficientzerotensor((8,))):
        with nothing_written(p), pytest.raises(ValueError, match=r"grads\[0\] has no memory of its own"):
            optimizer.step(grads=[grad])
    assert not optimizer.state
