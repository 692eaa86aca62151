"""Tensors whose bytes are not their values, that or that have no memory: refused before anything is written."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore._native import _C
from tests.native.helpers import make_hyper, nothing_written


def flipped(n=4):
    """Contiguous, of memory +1, with torch's negative bit: its values are -1."""
    tensor = torch._neg_view(torch.ones(n))
    assert tensor.is_neg()
    assert tensor[0] == -1
    return tensor


def released(n=4):
    tensor = torch.ones(n)
    tensor.untyped_storage().resize_(0)  # as FSDP does with parameters that are not in use
    return tensor


def too_short():
    tensor = torch.ones(8)[4:]
    tensor.untyped_storage().resize_(28)
    return tensor


def fake(n=4):
    with FakeTensorMode():
        return torch.ones(n)


class Wrapper(torch.Tensor):
    """A subclass that keeps its values elsewhere, as a DTensor does."""

    @staticmethod
    def __new__(cls, n=4):
        return torch.Tensor._make_wrapper_subclass(cls, (n,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("nobody should ask this tensor")


BAD = [
    (flipped, r"torch's negative bit set; expected plain values \(call resolve_neg\(\)\)"),
    (released, r"a storage of 0 bytes; expected 16 \(its memory was released: restore it first\)"),
    (too_short, r"a storage of 28 bytes; expected 32 \(its memory was released: restore it first\)"),
    (fake, r"no memory of its own \(it wraps another tensor, or stands for one\); expected a plain tensor"),
    (Wrapper, r"no memory of its own \(it wraps another tensor, or stands for one\); expected a plain tensor"),
    (lambda: torch._efficientzerotensor((4,)), r"no memory of its own"),
    (lambda: torch._to_functional_tensor(torch.ones(4)), r"no memory of its own"),
]
BADS = pytest.mark.parametrize("make, message", BAD, ids=["neg", "released", "short", "fake", "wrapper", "zero", "functional"])


@BADS
@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "max_exp_avg_sqs"])
def test_a_step_refuses(name, make, message):
    good = {key: torch.ones(4) for key in ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "max_exp_avg_sqs")}
    lists = {key: [t, torch.ones(4)] for key, t in good.items()} | {name: [good[name], make()]}
    with nothing_written(*good.values()), pytest.raises(ValueError, match=rf"^AdamStepper.step: {name}\[1\] has {message}"):
        _C.AdamStepper().step(**lists, hypers=[make_hyper()], hyper_index=[0, 0])


@BADS
def test_the_other_functions_refuse(make, message):
    ones, out = torch.ones(4), torch.zeros(4)
    tier = _C.HostTier(torch.device("cpu"))
    buffer = tier.empty(4, torch.float32)
    calls = [
        ("sq_norm: tensors[1]", lambda: _C.sq_norm([ones, make()])),
        ("cast: dsts[1]", lambda: _C.cast([out, make()], [ones, ones])),
        ("cast: srcs[1]", lambda: _C.cast([out, torch.zeros(4)], [ones, make()])),
        ("HostTier.to_tier: src", lambda: tier.to_tier(buffer, make())),
        ("HostTier.from_tier: dst", lambda: tier.from_tier(make(), buffer)),
        ("encode_moment: values", lambda: _C.encode_moment(make(), torch.int8)),
        ("decode_moment: scales", lambda: _C.decode_moment(torch.ones(4, dtype=torch.int8), make())),
        ("split_master: master", lambda: _C.split_master(make())),
    ]
    for where, call in calls:
        with nothing_written(ones, out, buffer), pytest.raises(ValueError, match=message) as error:
            call()
        assert str(error.value).startswith(where + " has ")
    assert tier.bytes_to_tier == tier.bytes_from_tier == 0


def test_a_conjugate_copy_is_refused():
    tier = _C.HostTier(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"to_tier: src has torch's conjugate bit set; .*resolve_conj\(\)"):
        tier.to_tier(tier.empty(2, torch.complex64), torch.ones(2, dtype=torch.complex64).conj())


def test_transformed_tensors_are_refused():
    def norm(x):
        _C.sq_norm([x])

    for transform in (torch.func.vmap(norm), torch.func.grad(norm)):
        with pytest.raises(ValueError, match=r"sq_norm: tensors\[0\] has no memory of its own"):
            transform(torch.ones(4, 4))


def test_ordinary_tensors_with_odd_storages_are_accepted():
    class Named(torch.Tensor):
        """A subclass with memory like any other."""

    class Idle(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    end = torch.ones(8)[8:]  # an offset behind a storage that holds nothing more
    empty = torch.ones(4)[:0]
    empty.untyped_storage().resize_(0)
    tensors = [end, empty, torch.ones(8)[7:], torch.nn.Parameter(torch.ones(2)), torch.ones(1).as_subclass(Named)]
    with Idle():
        assert _C.sq_norm(tensors).tolist() == [4.0, 0.0]


def test_dense_copies_only_what_it_must():
    plain, gaps, turned = torch.ones(4), torch.arange(8.0).view(2, 4)[:, ::2], torch.arange(8.0).view(2, 4).t()
    got = _C.dense((plain, gaps, flipped(), turned))
    assert got[0] is plain
    assert got[1].is_contiguous()
    assert torch.equal(got[1], gaps)
    assert not got[2].is_neg()
    assert got[2].tolist() == [-1.0] * 4
    assert got[3] is turned


LIKES = {  # tensor, like, the copy's strides (None: no copy)
    "both contiguous": (torch.arange(12.0).view(3, 4), torch.ones(3, 4), None),
    "contiguous, like transposed": (torch.arange(12.0).view(3, 4), torch.ones(4, 3).t(), (1, 3)),
    "transposed, like contiguous": (torch.arange(12.0).view(4, 3).t(), torch.ones(3, 4), (4, 1)),
    "both transposed": (torch.arange(12.0).view(4, 3).t(), torch.ones(4, 3).t(), None),
    "like with gaps": (torch.arange(12.0).view(4, 3).t(), torch.ones(4, 6).t()[::2], (4, 1)),
    "like with gaps, contiguous": (torch.arange(12.0).view(3, 4), torch.ones(4, 6).t()[::2], None),
    "gaps": (torch.arange(24.0).view(3, 8)[:, ::2], torch.ones(4, 3).t(), (1, 3)),
    "expanded": (torch.arange(3.0).view(3, 1).expand(3, 4), torch.ones(4, 3).t(), (1, 3)),
    "negative": (torch.ones(4, 3, dtype=torch.complex64).conj().imag.t(), torch.ones(4, 3).t(), (1, 3)),
    "like on meta": (torch.arange(12.0).view(3, 4), torch.ones(4, 3, device="meta").t(), (1, 3)),
    "like sparse": (torch.arange(12.0).view(3, 4), torch.ones(3, 4).to_sparse(), None),
    "of one element": (torch.ones(1, 3, 1).as_strided((1, 3, 1), (5, 1, 7)), torch.ones(1, 3, 1), None),
    "other strides of one element": (
        torch.arange(12.0).as_strided((4, 1, 3), (1, 99, 4)),
        torch.ones(12).as_strided((4, 1, 3), (1, 7, 4)),
        None,
    ),
    "channels_last of one channel": (
        torch.ones(2, 1, 3, 3).to(memory_format=torch.channels_last),
        torch.ones(2, 1, 3, 3),
        None,
    ),
}


@pytest.mark.parametrize("case", LIKES)
def test_dense_as_others_lie(case):
    tensor, like, strides = LIKES[case]
    (got,) = _C.dense([tensor], [like])
    assert torch.equal(got, tensor)
    assert not got.is_neg()
    if strides is None:
        assert got is tensor
    else:
        assert got.stride() == strides
        assert got.device == tensor.device


def test_is_dense():
    x = torch.ones(2, 3, 4, 5)
    for yes in (
        x,
        x.transpose(0, 3),
        x.to(memory_format=torch.channels_last),
        x[:1],
        x[:, :0],
        x[0, 0, 0, 0],
    ):
        assert _C.is_dense(yes)
    for no in (x[:, :2], x[..., ::2], x[:1].expand(2, 3, 4, 5), x.as_strided((3, 3), (1, 1)), x[0, 0, 0, :1].expand(3)):
        assert not _C.is_dense(no)
