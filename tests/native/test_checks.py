"""What is refused before anything is written: wrong arguments, shared memory, and tensors whose
bytes are not their values.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore._native import _C
from tests.support.kernels import make_hyper, nothing_written


def step_with(**changes):
    """AdamStepper.step on two good tensors, with some arguments changed."""
    arguments = {
        "params": [torch.ones(4), torch.ones(6)],
        "grads": [torch.ones(4), torch.ones(6)],
        "exp_avgs": [torch.zeros(4), torch.zeros(6)],
        "exp_avg_sqs": [torch.zeros(4), torch.zeros(6)],
        "hypers": [make_hyper()],
        "hyper_index": [0, 0],
    } | changes
    tensors = [
        t
        for value in arguments.values()
        if isinstance(value, list)
        for t in value
        if isinstance(t, torch.Tensor)
    ]
    dense = [t for t in tensors if t.layout == torch.strided and t.device.type == "cpu"]
    with nothing_written(*dense):
        _C.AdamStepper().step(**arguments)


ONE = torch.ones(4)
SIX = torch.ones(6)
EIGHT_BIT = {
    "exp_avgs": [ONE.to(torch.int8), SIX],
    "exp_avg_sqs": [ONE.to(torch.uint8), SIX],
    "exp_avg_scales": [torch.ones(1), None],
    "exp_avg_sq_scales": [torch.ones(1), None],
}
STEP_VALUE_ERRORS = [
    ({"grads": [ONE]}, "AdamStepper.step: grads has 1 items; expected 2 (one for each of params)"),
    (
        {"masters": [None]},
        "AdamStepper.step: masters has 1 items; expected 2 (one for each of params)",
    ),
    ({"grads": [ONE, ONE]}, "AdamStepper.step: grads[1] has shape [4]; expected [6] (as params)"),
    (
        {"exp_avgs": [ONE, ONE]},
        "AdamStepper.step: exp_avgs[1] has shape [4]; expected [6] (as params)",
    ),
    (
        {"masters": [None, ONE]},
        "AdamStepper.step: masters[1] has shape [4]; expected [6] (as params)",
    ),
    (
        {"max_exp_avg_sqs": [ONE, ONE]},
        "AdamStepper.step: max_exp_avg_sqs[1] has shape [4]; expected [6] (as params)",
    ),
    (
        {"params": [ONE, torch.ones(3, 4).t()[::2]]},
        "AdamStepper.step: params[1] has shape [2, 3] with strides [2, 4]; expected memory without "
        "gaps or overlaps (call "
        "contiguous())",
    ),
    (
        {key: [ONE, torch.ones(2, 3)] for key in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
        | {"exp_avg_sqs": [ONE, torch.ones(3, 2).t()]},
        "AdamStepper.step: exp_avg_sqs[1] has strides [1, 2]; expected [3, 1] (as params: an "
        "optimizer's "
        "load_state_dict(state_dict()) makes its states anew)",
    ),
    (
        {"grads": [ONE, torch.ones(6).to_sparse()]},
        "AdamStepper.step: grads[1] has layout Sparse; expected a dense tensor (call to_dense())",
    ),
    (
        {"grads": [ONE, torch.ones(6, device="meta")]},
        "AdamStepper.step: grads[1] has device meta; expected cpu (all tensors of a call on one "
        "device)",
    ),
    (
        {"params": [torch.ones(4, device="meta"), ONE]},
        "AdamStepper.step: params[0] has device meta; expected cpu or cuda",
    ),
    (
        {"exp_avgs": [ONE.to(torch.int8), SIX], "exp_avg_sqs": [ONE.to(torch.uint8), SIX]},
        "AdamStepper.step: exp_avg_scales[0] has None; expected a tensor (scales go with 8-bit "
        "codes)",
    ),
    (
        {"exp_avg_scales": [None, torch.ones(1)]},
        "AdamStepper.step: exp_avg_scales[1] has a tensor; expected None (scales go with 8-bit "
        "codes)",
    ),
    (
        EIGHT_BIT | {"exp_avg_sq_scales": [torch.ones(2), None]},
        "AdamStepper.step: exp_avg_sq_scales[0] has 2 elements; expected 1 (one for 256 elements "
        "of params)",
    ),
    (
        EIGHT_BIT | {"max_exp_avg_sqs": [ONE, None]},
        "AdamStepper.step: max_exp_avg_sqs[0] has a tensor; expected None (amsgrad needs float32 "
        "moments)",
    ),
    (
        {"changed": [torch.zeros(1, dtype=torch.uint8), None]},
        "AdamStepper.step: changed[0] has a tensor; expected None (only 16-bit weights have bits)",
    ),
    (
        {"params": [ONE.bfloat16(), SIX], "changed": [torch.zeros(2, dtype=torch.uint8), None]},
        "AdamStepper.step: changed[0] has 2 elements; expected 1 (a bit for each element of "
        "params)",
    ),
]


@pytest.mark.parametrize(
    "changes, message", STEP_VALUE_ERRORS, ids=[m[:60] for _, m in STEP_VALUE_ERRORS]
)
def test_step_value_errors(changes, message):
    with pytest.raises(ValueError) as error:
        step_with(**changes)
    assert str(error.value) == message


STEP_TYPE_ERRORS = [
    ({"params": ONE}, "AdamStepper.step: params has type Tensor; expected a list of tensors"),
    ({"params": None}, "AdamStepper.step: params has type NoneType; expected a list of tensors"),
    ({"grads": [ONE, 1.0]}, "AdamStepper.step: grads[1] has type float; expected a tensor"),
    ({"grads": [ONE, None]}, "AdamStepper.step: grads[1] has type NoneType; expected a tensor"),
    ({"masters": [ONE, 2]}, "AdamStepper.step: masters[1] has type int; expected a tensor or None"),
    (
        {"params": [torch.ones(4, dtype=torch.float64), torch.ones(6)]},
        "AdamStepper.step: params[0] has dtype Double; expected Float, BFloat16 or Half",
    ),
    (
        {"grads": [torch.ones(4, dtype=torch.int64), torch.ones(6)]},
        "AdamStepper.step: grads[0] has dtype Long; expected Float, BFloat16 or Half",
    ),
    (
        {"exp_avgs": [torch.ones(4, dtype=torch.bfloat16), torch.ones(6)]},
        "AdamStepper.step: exp_avg_sqs[0] has dtype Float; expected BFloat16 (as exp_avgs says)",
    ),
    (
        {"exp_avgs": [torch.ones(4, dtype=torch.float16), torch.ones(6)]},
        "AdamStepper.step: exp_avgs[0] has dtype Half; expected Float, BFloat16 or Char (8-bit "
        "codes)",
    ),
    (
        {"masters": [None, torch.ones(6, dtype=torch.int16)]},
        "AdamStepper.step: masters[1] has dtype Short (a split master) for a parameter of Float; "
        "expected BFloat16 parameters",
    ),
    (
        {"masters": [None, torch.ones(6).half()]},
        "AdamStepper.step: masters[1] has dtype Half; expected Float",
    ),
]


@pytest.mark.parametrize(
    "changes, message", STEP_TYPE_ERRORS, ids=[m[:60] for _, m in STEP_TYPE_ERRORS]
)
def test_step_type_errors(changes, message):
    with pytest.raises(TypeError) as error:
        step_with(**changes)
    assert str(error.value) == message


def test_the_good_call_itself_is_accepted():
    # it writes, as it should: the refusals above are not refusals of everything
    with pytest.raises(AssertionError):
        step_with()


OUT = torch.zeros(4)
OPS = [
    (
        lambda: _C.sq_norm([ONE, torch.ones(2, dtype=torch.int32)]),
        TypeError,
        "sq_norm: tensors[1] has dtype Int; expected Float, BFloat16 or Half",
    ),
    (
        lambda: _C.sq_norm(ONE),
        TypeError,
        "sq_norm: tensors has type Tensor; expected a list of tensors",
    ),
    (
        lambda: _C.sq_norm([torch.ones(4, 4)[:, 1]]),
        ValueError,
        "sq_norm: tensors[0] has shape [4] with strides [4]; expected memory without gaps or "
        "overlaps (call contiguous())",
    ),
    (
        lambda: _C.cast([OUT], []),
        ValueError,
        "cast: srcs has 0 items; expected 1 (one for each of dsts)",
    ),
    (
        lambda: _C.cast([OUT], [torch.ones(5)]),
        ValueError,
        "cast: srcs[0] has 5 elements; expected 4 (as dsts)",
    ),
    (
        lambda: _C.cast([OUT, OUT], [ONE, torch.ones(4, dtype=torch.bool)]),
        TypeError,
        "cast: srcs[1] has dtype Bool; expected Float, BFloat16 or Half",
    ),
]


@pytest.mark.parametrize("call, kind, message", OPS, ids=[m[:60] for _, _, m in OPS])
def test_op_refusals(call, kind, message):
    with nothing_written(OUT, ONE), pytest.raises(kind) as error:
        call()
    assert str(error.value) == message


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
    (
        too_short,
        r"a storage of 28 bytes; expected 32 \(its memory was released: restore it first\)",
    ),
    (
        fake,
        r"no memory of its own \(it wraps another tensor, or stands for one\); expected a plain "
        r"tensor",
    ),
    (
        Wrapper,
        r"no memory of its own \(it wraps another tensor, or stands for one\); expected a plain "
        r"tensor",
    ),
    (lambda: torch._efficientzerotensor((4,)), r"no memory of its own"),
    (lambda: torch._to_functional_tensor(torch.ones(4)), r"no memory of its own"),
]
BADS = pytest.mark.parametrize(
    "make, message", BAD, ids=["neg", "released", "short", "fake", "wrapper", "zero", "functional"]
)


@BADS
@pytest.mark.parametrize(
    "name", ["params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "max_exp_avg_sqs"]
)
def test_a_step_refuses(name, make, message):
    good = {
        key: torch.ones(4)
        for key in ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "max_exp_avg_sqs")
    }
    lists = {key: [t, torch.ones(4)] for key, t in good.items()} | {name: [good[name], make()]}
    with (
        nothing_written(*good.values()),
        pytest.raises(ValueError, match=rf"^AdamStepper.step: {name}\[1\] has {message}"),
    ):
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
        (
            "decode_moment: scales",
            lambda: _C.decode_moment(torch.ones(4, dtype=torch.int8), make()),
        ),
        ("split_master: master", lambda: _C.split_master(make())),
    ]
    for where, call in calls:
        with nothing_written(ones, out, buffer), pytest.raises(ValueError, match=message) as error:
            call()
        assert str(error.value).startswith(where + " has ")
    assert tier.bytes_to_tier == tier.bytes_from_tier == 0


def test_a_conjugate_copy_is_refused():
    tier = _C.HostTier(torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"to_tier: src has torch's conjugate bit set; .*resolve_conj\(\)"
    ):
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
    tensors = [
        end,
        empty,
        torch.ones(8)[7:],
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(1).as_subclass(Named),
    ]
    with Idle():
        assert _C.sq_norm(tensors).tolist() == [4.0, 0.0]


def test_dense_copies_only_what_it_must():
    plain, gaps, turned = (
        torch.ones(4),
        torch.arange(8.0).view(2, 4)[:, ::2],
        torch.arange(8.0).view(2, 4).t(),
    )
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
    "negative": (
        torch.ones(4, 3, dtype=torch.complex64).conj().imag.t(),
        torch.ones(4, 3).t(),
        (1, 3),
    ),
    "like on meta": (torch.arange(12.0).view(3, 4), torch.ones(4, 3, device="meta").t(), (1, 3)),
    "like sparse": (torch.arange(12.0).view(3, 4), torch.ones(3, 4).to_sparse(), None),
    "of one element": (
        torch.ones(1, 3, 1).as_strided((1, 3, 1), (5, 1, 7)),
        torch.ones(1, 3, 1),
        None,
    ),
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
    for no in (
        x[:, :2],
        x[..., ::2],
        x[:1].expand(2, 3, 4, 5),
        x.as_strided((3, 3), (1, 1)),
        x[0, 0, 0, :1].expand(3),
    ):
        assert not _C.is_dense(no)


BUFFER = torch.ones(64)


def step_on(**changes):
    lists = {
        key: [torch.ones(8)] for key in ("params", "grads", "exp_avgs", "exp_avg_sqs")
    } | changes
    count = len(lists["params"])
    for key in ("grads", "exp_avgs", "exp_avg_sqs"):
        lists[key] = lists[key] + [torch.ones(8) for _ in range(count - len(lists[key]))]
    _C.AdamStepper().step(**lists, hypers=[make_hyper()], hyper_index=[0] * count)


SHARED = [
    ({"exp_avgs": [BUFFER[:8]], "exp_avg_sqs": [BUFFER[:8]]}, "exp_avg_sqs[0]", "exp_avgs[0]"),
    ({"params": [BUFFER[:8]], "exp_avgs": [BUFFER[1:9]]}, "exp_avgs[0]", "params[0]"),
    ({"params": [BUFFER[:8]], "grads": [BUFFER[7:15]]}, "grads[0]", "params[0]"),
    ({"params": [BUFFER[:8]], "grads": [BUFFER[:8]]}, "grads[0]", "params[0]"),
    ({"params": [BUFFER[20:28], BUFFER[:8], BUFFER[7:15]]}, "params[2]", "params[1]"),
    (
        {"params": [torch.ones(8), BUFFER[:8]], "masters": [BUFFER[:8], None]},
        "masters[0]",
        "params[1]",
    ),
    ({"params": [BUFFER[:8]], "masters": [BUFFER[4:12]]}, "masters[0]", "params[0]"),
    ({"params": [BUFFER[7:15]], "masters": [BUFFER[:8]]}, "masters[0]", "params[0]"),
    (
        {"params": [BUFFER.view(torch.bfloat16)[:8]], "masters": [BUFFER[:8]]},
        "masters[0]",
        "params[0]",
    ),
    (
        {"max_exp_avg_sqs": [BUFFER[:8]], "exp_avg_sqs": [BUFFER[:8]]},
        "max_exp_avg_sqs[0]",
        "exp_avg_sqs[0]",
    ),
    (
        {
            "params": [BUFFER[:8]],
            "exp_avgs": [torch.zeros(8, dtype=torch.int8)],
            "exp_avg_sqs": [torch.zeros(8, dtype=torch.uint8)],
            "exp_avg_scales": [torch.ones(1)],
            "exp_avg_sq_scales": [BUFFER[7:8]],
            "keys": [(0, 0)],
        },
        "exp_avg_sq_scales[0]",
        "params[0]",
    ),
    (
        {
            "params": [BUFFER.view(torch.bfloat16)[:8]],
            "changed": [BUFFER.view(torch.uint8)[15:16]],
            "keys": [(0, 0)],
        },
        "changed[0]",
        "params[0]",
    ),
]


@pytest.mark.parametrize("changes, where, other", SHARED, ids=[f"{w}-{o}" for _, w, o in SHARED])
def test_a_step_refuses_to_write_what_two_arguments_hold(changes, where, other):
    with nothing_written(BUFFER), pytest.raises(ValueError) as error:
        step_on(**changes)
    expected = "expected memory of its own (this call writes there)"
    assert (
        str(error.value) == f"AdamStepper.step: {where} has memory that {other} has too; {expected}"
    )


def test_a_step_accepts_neighbours_a_gradient_read_twice_and_a_parameter_as_its_master():
    buffer, grad = torch.ones(32), torch.ones(12)
    step_on(
        params=[buffer[:8], buffer[8:16]],
        exp_avgs=[buffer[16:24], buffer[24:]],
        grads=[grad[:8], grad[4:]],
        masters=[buffer[:8], None],
    )
    assert (buffer != 1).all()


def test_a_stepper_looks_again_when_memory_moves():
    stepper, hypers = _C.AdamStepper(), [make_hyper()]
    params, grads = [torch.ones(8), torch.ones(8)], [torch.ones(8), torch.ones(8)]
    averages, squares = [torch.zeros(8), torch.zeros(8)], [torch.zeros(8), torch.zeros(8)]

    def step(params=params, grads=grads, averages=averages):
        stepper.step(params, grads, averages, squares, hypers, [0, 0])

    step()
    for bad in (
        {"grads": [grads[0], squares[1]]},
        {"params": [params[0], params[0]]},
        {"averages": [grads[0], averages[1]]},
    ):
        for _ in range(2):  # a refusal is not remembered as good
            with (
                nothing_written(*params, *grads, *averages, *squares),
                pytest.raises(ValueError, match="has too; expected"),
            ):
                step(**bad)
        step()
