"""CUDA graphs of a capturable FusedAdam: replays have the bits of the ordinary steps on the CPU. Needs a GPU."""

import math

import pytest
import torch

from shardcore.optim import FusedAdam

from .helpers import CAPTURABLE_KINDS, grads_of, params_of

pytestmark = pytest.mark.gpu

SIZES = (3, 300, 5, 100_000, 0)


def on_cuda(params):
    return [torch.nn.Parameter(p.detach().cuda()) for p in params]


def give(params, step):
    """Put this step's gradients where they are already, or in new memory."""
    for i, (p, grad) in enumerate(zip(params, grads_of(params, seed=step), strict=True)):
        if step % 5 == 4 and i == 1:
            grad[7] = math.inf
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(grad)


def lr_of(step):
    return 0.1 / (step + 1)


def everything(optimizer):
    """Weights and states on the CPU, with split masters joined."""
    saved = optimizer.state_dict()["state"]
    states = [state[key] for state in saved.values() for key in sorted(state)]
    return [t.detach().cpu() for t in [*(p for g in optimizer.param_groups for p in g["params"]), *states]]


def cpu_steps(kind, steps, **arguments):
    kind = dict(kind)
    params = params_of(*SIZES, dtype=kind.pop("dtype", torch.float32))
    optimizer = FusedAdam(params, lr=torch.tensor(0.0, dtype=torch.float64), **kind)
    for step in range(steps):
        give(params, step)
        optimizer.param_groups[0]["lr"].fill_(lr_of(step))
        optimizer.step(grad_scale=0.5 + step, max_norm=1.5)
    return everything(optimizer), optimizer.skipped_steps


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def warm_up(step):
    """One step on a side stream, as torch asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)


class Captured:
    """A graph of one step; the first step was its warm-up."""

    def __init__(self, kind):
        kind = dict(kind)
        self.params = on_cuda(params_of(*SIZES, dtype=kind.pop("dtype", torch.float32)))
        self.lr = torch.zeros((), dtype=torch.float64, device="cuda")
        self.grad_scale = torch.zeros((), device="cuda")
        self.optimizer = FusedAdam(self.params, lr=self.lr, capturable=True, **kind)
        self.set(0)
        warm_up(self.step)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def set(self, step):
        give(self.params, step)
        self.lr.fill_(lr_of(step))
        self.grad_scale.fill_(0.5 + step)

    def step(self):
        self.optimizer.step(grad_scale=self.grad_scale, max_norm=1.5)


@pytest.mark.parametrize("kind", CAPTURABLE_KINDS, ids=str)
def test_replays_have_the_bits_of_the_cpus_steps(kind):
    captured = Captured(kind)
    for step in range(1, 8):
        captured.set(step)
        captured.graph.replay()
    want, skipped = cpu_steps(kind, 8)
    assert_same(everything(captured.optimizer), want)
    assert captured.optimizer.skipped_steps == skipped == 1
    with pytest.raises(AssertionError):  # a twin: one replay less
        assert_same(everything(captured.optimizer), cpu_steps(kind, 7)[0])


def test_other_steps_and_other_memory_between_replays_disturb_nothing():
    captured = Captured({})
    for step in range(1, 8):
        if step in (2, 5):  # gradients somewhere else, not in the graph; the tables of this step are made and dropped
            kept = [p.grad for p in captured.params]
            for p in captured.params:
                p.grad = None
            captured.set(step)
            captured.step()
            for p, grad in zip(captured.params, kept, strict=True):
                p.grad = grad
            torch.cuda.empty_cache()
            noise = [torch.full((n,), math.nan, device="cuda") for n in (100, 10_000, 1_000_000)]
            del noise
        else:
            captured.set(step)
            captured.graph.replay()
    assert_same(everything(captured.optimizer), cpu_steps({}, 8)[0])


def test_gradients_of_the_graphs_own_pool():
    """Backward and step in one graph: gradients are made in the capture."""

    def loss_of(params, x):
        return sum((p * x).square().mean() for p in params)

    def train(params, x, steps, lr, graphed):
        optimizer = FusedAdam(params, lr=lr, capturable=graphed)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss_of(params, x).backward()
            optimizer.step(max_norm=1.0)

        if not graphed:
            for _ in range(steps):
                step()
            return everything(optimizer)
        warm_up(step)
        optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss_of(params, x).backward()
            optimizer.step(max_norm=1.0)
        for _ in range(steps - 1):
            graph.replay()
        return everything(optimizer)

    x = torch.tensor(1.5, device="cuda")
    sizes = (300, 70_000)
    runs = [train(on_cuda(params_of(*sizes)), x, 5, 0.1, graphed) for graphed in (True, False)]
    assert_same(*runs)


def test_grad_scaler_without_a_graph():
    """GradScaler's tensors stay on the device; the bits are the ordinary step's on the device."""
    runs = []
    for capturable in (True, False):
        params = on_cuda(params_of(4, 300))
        optimizer = FusedAdam(params, lr=0.1, capturable=capturable)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            factor = math.inf if step == 3 else float(step + 1)
            scaler.scale(sum((p * p).sum() for p in params) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        runs.append((everything(optimizer), optimizer.skipped_steps))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1] == 1


def test_step_tensors_are_on_the_device():
    params = on_cuda(params_of(4))
    optimizer = FusedAdam(params, capturable=True)
    optimizer.step(grads=[torch.ones(4, device="cuda")])
    step = optimizer.state[params[0]]["step"]
    assert (step.device.type, step.dtype, step.shape, step.item()) == ("cuda", torch.float32, (), 1)
    reference = torch.optim.Adam(on_cuda(params_of(4)), capturable=True)
    reference.load_state_dict(optimizer.state_dict())
    reference.param_groups[0]["params"][0].grad = torch.ones(4, device="cuda")
    reference.step()
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.state[params[0]]["step"].item() == 2


@pytest.mark.parametrize("capturable", [True, False])
def test_a_capture_that_cannot_work_is_refused(capturable):
    params = on_cuda(params_of(4))
    optimizer = FusedAdam(params, capturable=capturable)
    params[0].grad = torch.ones(4, device="cuda")
    why = "has a gradient and no state yet" if capturable else "expected capturable=True"
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match=why), torch.cuda.graph(graph):
        optimizer.step()
    assert not optimizer.state
