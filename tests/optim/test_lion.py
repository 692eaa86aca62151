"""Lion beside its paper's algorithm in float64, and its kernel: every dtype, size and place."""

import itertools

import pytest
import torch

import shardcore
from shardcore._native import _C
from tests.support.kernels import DTYPES, SIZES, UNIT, tensor
from tests.support.placement import device_of, each_place, first_difference, moved, running_at

OPTIONS = {"lr": 0.05, "betas": (0.8, 0.97), "weight_decay": 0.2, "grad_scale": 0.6}
# Dtypes of weight, gradient and state, and whether there is a float32 master.
MIXES = [(*dtypes, master) for dtypes, master in itertools.product(itertools.product(DTYPES, repeat=3), (False, True))]


def _lion(weight: torch.Tensor, grads: list[torch.Tensor], lr: float, decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 2 of arXiv:2302.06675, in the precision of its inputs."""
    average = torch.zeros_like(weight)
    for grad in grads:
        move = torch.sign(0.9 * average + (1 - 0.9) * grad)
        weight = weight - lr * (move + decay * weight)
        average = 0.99 * average + (1 - 0.99) * grad
    return weight, average


def _farthest(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest distance of a float32 tensor from a float64 one, in units of 2**-23 of the latter's largest."""
    return float((got.double() - wanted).abs().max() / wanted.abs().max() * 2**23)


def test_lion_is_its_paper_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator, dtype=torch.float64).float()
    grads = [torch.randn(1000, generator=generator) for _ in range(5)]
    weight = start.clone().requires_grad_()
    optimizer = shardcore.Lion([weight], lr=0.01, weight_decay=0.1)
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    wanted, average = _lion(start.double(), [grad.double() for grad in grads], 0.01, 0.1)
    assert _farthest(weight.detach(), wanted) <= 2 * len(grads)  # two rounded operations on a weight in each step
    assert _farthest(optimizer.state[weight]["exp_avg"], average) <= 2 * len(grads)
    twin, _ = _lion(start.double(), [grad.double() for grad in grads[:-1]], 0.01, 0.1)
    assert _farthest(weight.detach(), twin) > 2 * len(grads)
    with pytest.raises(ValueError, match="betas in"):
        shardcore.Lion([weight], betas=(1.0, 0.9))


def _lists(mix, sizes, seed=0):
    """Parameters, gradients, states and masters of these sizes, not aligned, with room around them."""
    param, grad, state, master = mix
    rng = torch.Generator().manual_seed(seed)
    lists = [[tensor(n, dtype, rng, misalign=n % 4) for n in sizes] for dtype in (param, grad, state)]
    return [*lists, [tensor(n, torch.float32, rng, misalign=n % 3) if master else None for n in sizes]]


def _flat(lists):
    return [t for items in lists for t in items if t is not None]


def _moved(lists, device):
    return [[None if t is None else moved(t, device) for t in items] for items in lists]


def _step(lists, **changes):
    _C.lion(*lists, **(OPTIONS | changes))


@each_place
@pytest.mark.cases(4)
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_every_place_gives_the_same_bits_and_writes_nothing_else(place, mix):
    lists = _lists(mix, [0, *SIZES, 70_001, 0])
    before, there = _moved(lists, torch.device("cpu")), _moved(lists, device_of(place))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        _step(lists)
        with running_at(place):
            torch.set_num_threads(3)
            _step(there)
    finally:
        torch.set_num_threads(threads)
    assert first_difference(_flat(there), _flat(lists)) is None  # whole storages: what lies around the tensors, too
    for new, old in zip(_flat(lists), _flat(before), strict=True):
        whole, was = (torch.tensor([], dtype=t.dtype).set_(t.untyped_storage()) for t in (new, old))
        inside = slice(new.storage_offset(), new.storage_offset() + new.numel())
        was[inside] = whole[inside]
        assert torch.equal(whole, was)
    _step(before, grad_scale=0.61)  # a twin
    assert first_difference(_flat(before), _flat(lists)) is not None


def _broken(lists, weight, average, grad):
    """Whether float32 results of a step from these float64 inputs are further from the algorithm than its roundings explain."""
    (beta1, beta2), lr, decay = OPTIONS["betas"], OPTIONS["lr"], OPTIONS["weight_decay"]
    g = OPTIONS["grad_scale"] * grad
    move, of_grad = beta1 * average + (1 - beta1) * g, 4 * ((1 - beta1) * g).abs()
    clear = move.abs() > UNIT * (2 * (beta1 * average).abs() + of_grad)  # else its sign may be another
    kept = (1 - lr * decay) * weight
    wanted, bound = kept - lr * move.sign(), UNIT * (3 * kept.abs() + 2 * lr)
    wrong = ((lists[0][0].double() - wanted).abs() > bound) & clear
    bound = UNIT * (3 * (beta2 * average).abs() + 4 * ((1 - beta2) * g).abs())
    return bool((wrong | ((lists[2][0].double() - (beta2 * average + (1 - beta2) * g)).abs() > bound)).any())


def test_an_element_is_as_near_to_float64_as_its_roundings_allow():
    lists = _lists((torch.float32, torch.float32, torch.float32, False), [70_001])
    inputs = [lists[0][0].double(), lists[2][0].double(), lists[1][0].double()]
    twins = [_moved(lists, torch.device("cpu")) for _ in range(3)]
    _step(lists)
    assert not _broken(lists, *inputs)
    for twin, change in zip(twins, ({"lr": 0.0500001}, {"betas": (0.8, 0.9700001)}, {"betas": (0.81, 0.97)}), strict=True):
        _step(twin, **change)
        assert _broken(twin, *inputs), change


def test_a_master_is_what_is_stepped_and_the_weight_its_rounding():
    lists = _lists((torch.bfloat16, torch.bfloat16, torch.float32, True), [70_001])
    alone = [[lists[3][0].clone()], [lists[1][0].float()], [lists[2][0].clone()], [None]]
    _step(lists)
    _step(alone)
    assert torch.equal(lists[3][0], alone[0][0])
    assert torch.equal(lists[2][0], alone[2][0])
    rounded = torch.empty_like(lists[0][0])
    _C.cast([rounded], [alone[0][0]])
    assert torch.equal(lists[0][0], rounded)


def test_a_nan_stays_and_the_sign_of_nothing_is_nothing():
    weight = torch.tensor([1.0, 1.0, 1.0])
    average = torch.zeros(3)
    _C.lion([weight], [torch.tensor([float("nan"), 0.0, 1.0])], [average], [None], 0.5, (0.9, 0.99), 0.0, 1.0)
    assert weight[0].isnan()
    assert average[0].isnan()
    assert weight[1:].tolist() == [1.0, 0.5]


def test_alone_it_takes_what_torchs_take():
    """Weights in another order of memory, expanded gradients, maximize, several groups; what cannot be stepped is named."""
    rng = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(6, 5, generator=rng).t().requires_grad_(),
        torch.randn(3, 4, generator=rng).bfloat16().requires_grad_(),
    ]
    grads = [torch.randn(5, 6, generator=rng), torch.randn(1, 4, generator=rng).bfloat16().expand(3, 4)]
    wanted = [_lion(w.detach().double(), [-g.double()], 0.01, 0.0)[0] for w, g in zip(weights, grads, strict=True)]
    optimizer = shardcore.Lion([{"params": [weights[0]]}, {"params": [weights[1]]}], lr=0.01, maximize=True)
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad
    optimizer.step()
    for weight, target in zip(weights, wanted, strict=True):
        assert torch.allclose(weight.detach().double(), target, rtol=2**-8 if weight.dtype == torch.bfloat16 else 2**-22)
        assert optimizer.state[weight]["exp_avg"].dtype == weight.dtype
    strange = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    strange.grad = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"Lion: params\[0\] has dtype Double; expected Float, BFloat16 or Half"):
        shardcore.Lion([strange]).step()
