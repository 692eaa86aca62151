"""Parameters that are dense but not contiguous (channels_last, transposed): every plain kind,
states, norms, refusals.
"""

import copy
import io

import pytest
import torch

from shardcore._native import _C
from shardcore.optim import CPUAdam, FusedAdam, clip_grad_norm_
from shardcore.optim import tensor_lists as batch
from shardcore.optim.adam import AdamOptimizer
from shardcore.optim.clip import global_norm
from shardcore.optim.state_format import in_memory
from tests.support.oracle import Interval, Oracle, violations
from tests.support.params import OnCpu

ORDERS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "channels_last_3d": lambda x: x.to(memory_format=torch.channels_last_3d),
    "transposed": lambda x: x.t().contiguous().t(),
    "rolled": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
}
# with tails behind whole vectors and blocks; of one channel or one pixel memory is in two orders at
# once
SHAPES = (
    ((7, 5, 3, 3), "channels_last"),
    ((64, 33, 1, 1), "channels_last"),
    ((9, 1, 5, 5), "channels_last"),
    ((3, 4, 2, 3, 5), "channels_last_3d"),
    ((33, 41), "transposed"),
    ((2, 3, 4, 5), "rolled"),
    ((0, 3, 2, 2), "channels_last"),
)
KINDS = {
    "fp32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True, "maximize": True}),
    "adam": (torch.float32, {"adam_w_mode": False, "bias_correction": False}),
    "fp32, stochastic": (torch.float32, {"stochastic_rounding": True}),  # which rounds nothing here
    "bf16": (torch.bfloat16, {}),
    "bf16, master": (torch.bfloat16, {"master": "fp32"}),
    "fp16, master": (torch.float16, {"master": "fp32", "amsgrad": True}),
    "split": (torch.bfloat16, {"master": "split"}),
}
OPTIONS = {"lr": 0.02, "betas": (0.85, 0.97), "eps": 1e-6, "weight_decay": 0.3}
each_kind = pytest.mark.parametrize("kind", KINDS)
GRADS = {  # strides of a gradient
    "as the parameter": lambda grad, p: torch.empty_like(p).copy_(grad),
    "contiguous": lambda grad, p: grad.contiguous(),
    "backwards": lambda grad, p: (
        grad.permute(*range(grad.dim())[::-1]).contiguous().permute(*range(grad.dim())[::-1])
    ),
    "gaps": lambda grad, p: torch.stack([grad, grad], -1)[..., 0],
}


def params_of(dtype, contiguous=False):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape, _ in SHAPES]
    return [
        torch.nn.Parameter(value if contiguous else ORDERS[order](value))
        for value, (_, order) in zip(values, SHAPES, strict=True)
    ]


def steps_of(params, steps, grads="as the parameter", first=0):
    """Gradients of some steps, the same elements whatever the strides."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step + 1)
        made = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
        yield [GRADS[grads](grad, p.detach()) for grad, p in zip(made, params, strict=True)]


def train(optimizer, steps=3, grads="as the parameter", first=0, **arguments):
    """Step through p.grad and through grads= by turns."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step, found in enumerate(steps_of(params, steps, grads, first)):
        for p, grad in zip(params, found, strict=True):
            p.grad = None if step % 2 else grad
        optimizer.step(grads=found if step % 2 else None, **arguments)
    return optimizer


def made(kind, contiguous=False, make=CPUAdam, **more):
    dtype, options = KINDS[kind]
    return make(params_of(dtype, contiguous), **OPTIONS, **options, **more)


def parameters(optimizer):
    return optimizer.param_groups[0]["params"]


def elements(optimizer):
    """Parameters and states, by the elements' numbers."""
    tensors = [p.detach() for p in parameters(optimizer)]
    tensors += [
        value
        for p in parameters(optimizer)
        for key, value in sorted(optimizer.state[p].items())
        if key != "step"
    ]
    return [t.contiguous() for t in tensors]


def same(a, b):
    first, second = elements(a), elements(b)
    return len(first) == len(second) > len(SHAPES) and all(
        torch.equal(x, y) for x, y in zip(first, second, strict=True)
    )


def in_order(optimizer):
    """Whether every state lies in memory as its parameter does."""
    return all(
        _C.dense([value], [p])[0] is value
        for p in parameters(optimizer)
        for key, value in optimizer.state[p].items()
        if key != "step"
    )


def wrong(kind, grads, steps=3):
    """How many elements of parameters and states the float64 oracle rejects."""
    optimizer = made(kind)
    dtype, options = KINDS[kind]
    mastered = options.get("master") is not None
    more = OPTIONS | {
        key: value for key, value in options.items() if key not in ("master", "stochastic_rounding")
    }
    oracles = [Oracle(Interval.of(p), dtype, mastered, **more) for p in parameters(optimizer)]
    for found in steps_of(parameters(optimizer), steps, grads):
        optimizer.step(grads=found)
        for oracle, grad in zip(oracles, found, strict=True):
            oracle.step(grad)
    count = 0
    for p, oracle in zip(parameters(optimizer), oracles, strict=True):
        state = optimizer.state[p]
        count += violations(p, oracle.param)
        count += violations(state["exp_avg"], oracle.exp_avg) + violations(
            state["exp_avg_sq"], oracle.exp_avg_sq
        )
        if "max_exp_avg_sq" in state:
            count += violations(state["max_exp_avg_sq"], oracle.max_exp_avg_sq)
        if "master" in state:
            count += violations(state["master"], oracle.weight)
    return count


@each_kind
@pytest.mark.parametrize("grads", GRADS)
def test_every_plain_kind_is_inside_the_oracle(kind, grads):
    assert wrong(kind, grads) == 0


def memory_as_it_lies(tensors, likes=None):
    """A twin that hands the kernel contiguous gradients' memory for the parameter's order."""
    return [
        t.contiguous().as_strided(p.shape, p.stride())
        for t, p in zip(tensors, likes or tensors, strict=True)
    ]


@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_a_gradient_in_another_order_is_rejected(kind, monkeypatch):
    class Twin:
        dense = staticmethod(memory_as_it_lies)

        def __getattr__(self, name):
            return getattr(_C, name)

    monkeypatch.setattr(batch, "_C", Twin())
    monkeypatch.setattr(batch.Update, "find", lambda *arguments: None)
    assert wrong(kind, "contiguous") > 0


@each_kind
@pytest.mark.parametrize("make", [CPUAdam, FusedAdam])
def test_the_bits_are_those_of_contiguous_parameters(kind, make):
    ours = train(made(kind, make=make), grad_scale=0.5)
    assert in_order(ours)
    for grads in GRADS:
        assert same(ours, train(made(kind, make=make), grads=grads, grad_scale=0.5)), grads
    twin = made(kind, contiguous=True, make=make)
    assert same(ours, train(twin, grads="contiguous", grad_scale=0.5))
    assert same(
        ours, train(made(kind, contiguous=True, make=make), grads="backwards", grad_scale=0.5)
    )
    assert not same(ours, train(made(kind), steps=2, grad_scale=0.5))
    assert [p.stride() for p in parameters(ours)] == [p.stride() for p in params_of(torch.float32)]


@each_kind
def test_a_repeated_step_takes_the_short_way(kind, monkeypatch):
    want = train(made(kind), steps=5)
    ours = train(made(kind), steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(AdamOptimizer, "_update", None)
        train(ours, steps=2, first=2)
        with pytest.raises(TypeError, match="not callable"):
            train(ours, steps=1, grads="backwards", first=4)
    train(ours, steps=1, grads="contiguous", first=4)
    assert same(ours, want)


def test_states_on_pages_of_their_own():
    """Large ones, whose memory comes another way."""
    weights = torch.randn(1025, 1025, generator=torch.Generator().manual_seed(0))
    ours, twin = (
        CPUAdam([torch.nn.Parameter(value)])
        for value in (ORDERS["transposed"](weights), weights.clone())
    )
    for _ in range(2):
        for optimizer in (ours, twin):
            optimizer.step(grads=[weights.cos()])
    (p,), (q,) = parameters(ours), parameters(twin)
    assert in_order(ours)
    assert torch.equal(p, q)
    assert all(
        torch.equal(ours.state[p][key], twin.state[q][key]) for key in ("exp_avg", "exp_avg_sq")
    )


# --- norms ----------------------------------------------------------------------------------------


def test_the_norm_goes_through_memory():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(16, 24, 3, 3, generator=generator) * 10.0 ** torch.randint(
        -9, 9, (16, 24, 3, 3), generator=generator
    )
    for order in (ORDERS["channels_last"], ORDERS["rolled"]):
        turned = order(x)
        assert _C.sq_norm([turned]).equal(_C.sq_norm([in_memory(turned)]))
        assert not _C.sq_norm([turned]).equal(_C.sq_norm([x]))
        assert global_norm([turned]) == pytest.approx(x.double().norm().item(), rel=2**-23)


@pytest.mark.parametrize("grads", GRADS)
def test_clipping_takes_the_parameters_order(grads, monkeypatch):
    """step(max_norm=) and clip_grad_norm_ sum the same blocks, those of contiguous parameters of
    the same memory.
    """
    seen = []
    monkeypatch.setattr("shardcore.optim.clip._C", Recorder(seen))
    optimizer = made("fp32")
    params = parameters(optimizer)
    flat = [torch.nn.Parameter(in_memory(p.detach()).clone()) for p in params]
    twin = CPUAdam(flat, **OPTIONS)
    for found in steps_of(params, 3, grads):
        plain = [
            in_memory(torch.empty_like(p).copy_(grad))
            for p, grad in zip(params, found, strict=True)
        ]
        optimizer.step(grads=found, max_norm=0.7)
        twin.step(grads=plain, max_norm=0.7)
        for p, grad in zip(params, found, strict=True):
            p.grad = grad.clone()
        norm = clip_grad_norm_(params, 0.7)
        assert seen[0] == seen[1] == seen[2] != []
        seen.clear()
        want = torch.cat([grad.flatten() for grad in found]).double().norm()
        assert norm.item() == pytest.approx(want.item(), rel=2**-23)
        for p, grad in zip(params, found, strict=True):
            assert p.grad.stride() == grad.clone().stride()
            torch.testing.assert_close(p.grad, grad * (0.7 / (norm + 1e-6)))
    assert all(torch.equal(in_memory(p.detach()), q) for p, q in zip(params, flat, strict=True))


class Recorder:
    """_C, with every sum of squares noted."""

    def __init__(self, seen):
        self.seen = seen

    def sq_norm(self, tensors):
        total = _C.sq_norm(tensors)
        self.seen.append(total.tolist())
        return total

    def __getattr__(self, name):
        return getattr(_C, name)


# --- states ---------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    "ways",
    [(False, True), (True, False), (False, False)],
    ids=["to contiguous", "from contiguous", "same"],
)
def test_state_dicts_mean_elements(kind, ways):
    """What one order saved another loads, and trains on to the same bits."""
    saver = train(made(kind, contiguous=ways[0]))
    written = io.BytesIO()
    torch.save(saver.state_dict(), written)
    written.seek(0)
    loader = made(kind, contiguous=ways[1])
    with torch.no_grad():
        for p, q in zip(parameters(loader), parameters(saver), strict=True):
            # a split master sets its weights
            p.copy_(torch.zeros_like(q) if "split" in kind else q)
    loader.load_state_dict(torch.load(written))
    assert same(loader, saver)
    assert in_order(loader)
    assert same(train(loader, first=3), train(saver, first=3))


def moved(source, target):
    """Bring weights and states to another optimizer."""
    with torch.no_grad():
        for p, q in zip(parameters(target), parameters(source), strict=True):
            p.copy_(q)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert same(target, source)
    return target


def close(a, b):
    """Make one more step with both, and compare."""
    for optimizer in (a, b):
        for found in steps_of(parameters(optimizer), 1, first=9):
            for p, grad in zip(parameters(optimizer), found, strict=True):
                p.grad = grad
        optimizer.step()
    for x, y in zip(elements(a), elements(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("contiguous", [False, True], ids=["in order", "from and to contiguous"])
def test_exchange_with_torch(contiguous):
    theirs = torch.optim.AdamW(params_of(torch.float32, contiguous), **OPTIONS)
    for _ in range(2):
        close(theirs, theirs)
    ours = moved(theirs, made("fp32"))
    assert in_order(ours)
    close(ours, theirs)
    train(ours, steps=2, first=2)
    close(moved(ours, torch.optim.AdamW(params_of(torch.float32, contiguous), **OPTIONS)), ours)


@each_kind
def test_copies_go_on_alike(kind):
    ours = train(made(kind))
    copied = copy.deepcopy(ours)
    assert in_order(copied)
    assert same(train(copied, first=3), train(ours, first=3))


@pytest.mark.parametrize("kind", ["fp32", "bf16, master", "split"])
def test_an_order_that_changes_between_steps(kind):
    """model.to(memory_format=) behind the first step: refused, until the states are made anew."""
    ours, want = made(kind, contiguous=True), made(kind, contiguous=True)
    train(ours), train(want)
    for p, (_, order) in zip(parameters(ours), SHAPES, strict=True):
        p.grad = None
        p.data = ORDERS[order](p.detach())
    with pytest.raises(
        ValueError,
        match=r"exp_avgs\[0\] has strides .* load_state_dict\(state_dict\(\)\) makes its states "
        r"anew",
    ):
        train(ours, first=3)
    assert same(ours, want)
    ours.load_state_dict(ours.state_dict())
    assert in_order(ours)
    assert same(train(ours, first=3), train(want, first=3))


# --- torch's manners ------------------------------------------------------------------------------


@each_kind
def test_capturable_steps(kind, monkeypatch):
    want = train(made(kind, make=FusedAdam), max_norm=3.0)
    assert same(train(made(kind, make=OnCpu), max_norm=3.0), want)


def test_a_model_with_a_grad_scaler():
    """Convolutions in channels_last, scaled losses, an overflow: as torch's AdamW."""
    models, losses = [], []
    for make in (torch.optim.AdamW, FusedAdam):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)
        )
        model = model.to(memory_format=torch.channels_last)
        optimizer, scaler = (
            make(model.parameters(), **OPTIONS),
            torch.amp.GradScaler("cpu", init_scale=2.0**10),
        )
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(
                memory_format=torch.channels_last
            )
            loss = model(x).square().mean() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        models.append(model)
        losses.append(loss.item())
    assert not models[1][0].weight.is_contiguous()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


# --- refusals -------------------------------------------------------------------------------------

NUMBERED = {
    "8bit": (
        torch.float32,
        {"state_dtype": "8bit"},
        "with state_dtype='8bit'; .* a group with state_dtype='fp32'",
    ),
    "bf16 states": (
        torch.bfloat16,
        {"state_dtype": "bf16", "master": "split"},
        "with state_dtype='bf16'; expected contiguous",
    ),
    "stochastic": (
        torch.bfloat16,
        {"stochastic_rounding": True},
        "with stochastic_rounding=True; .*stochastic_rounding=False",
    ),
}


@pytest.mark.parametrize("case", NUMBERED)
@pytest.mark.parametrize("make", [CPUAdam, FusedAdam])
def test_kinds_that_number_elements(case, make):
    dtype, options, match = NUMBERED[case]
    params = params_of(dtype)
    match = (
        rf"param_groups\[0\].params\[0\] has strides \(45, 1, 15, 5\) for shape \(7, 5, 3, "
        rf"3\) "
        rf"{match}"
    )
    with pytest.raises(ValueError, match=match):
        make(params, **options)
    optimizer = make([torch.nn.Parameter(torch.ones(3, dtype=dtype))], **options)
    with pytest.raises(ValueError, match=match.replace(r"groups\[0\]", r"groups\[1\]")):
        optimizer.add_param_group({"params": params})
    optimizer.add_param_group({"params": [p for p in params if p.is_contiguous()]})
    late = make(params, **{key: value for key, value in options.items() if key == "master"})
    train(late)
    late.param_groups[0].update(options)
    before = elements(late)
    for grads in [next(steps_of(params, 1))] * 2:
        with pytest.raises(ValueError, match=match):
            late.step(grads=grads)
    assert all(torch.equal(a, b) for a, b in zip(before, elements(late), strict=True))
