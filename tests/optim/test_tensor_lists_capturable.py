"""capturable: the bits of the ordinary step with counts and skips on the device, and CUDA graphs
of it (these need a GPU).
"""

import copy
import math
import pickle

import pytest
import torch

from shardcore._native import _C
from shardcore.optim import CPUAdam, FusedAdam
from shardcore.optim import group_options as options
from shardcore.optim import tensor_lists as batch
from shardcore.options import accept_optimizer
from tests.support.params import CAPTURABLE_KINDS, OnCpu, grads_of, params_of, same, snapshot


@pytest.fixture
def cpu_is_a_device(monkeypatch):
    """CPU tensors count as tensors that the host would have to wait for, and must not be read."""
    monkeypatch.setattr(options, "on_device", lambda value: isinstance(value, torch.Tensor))


@pytest.fixture
def captured(monkeypatch):
    """Every device is being captured once the list has an item."""
    now = []
    monkeypatch.setattr(batch, "capturing", lambda device: bool(now))
    for module in ("adam", "base"):
        monkeypatch.setattr(f"shardcore.optim.{module}.capturing", lambda device: bool(now))
    return now


def run(make, kind, steps=8):
    """Steps with scales, clipping, skips and changing sets of gradients; returns everything, and
    the skipped steps.
    """
    kind = dict(kind)
    params = params_of(3, 300, 5, 1000, 0, dtype=kind.pop("dtype", torch.float32))
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05, "betas": (0.8, 0.97)}]
    optimizer = make(groups, lr=torch.tensor(0.1), **kind)
    for step in range(steps):
        grads = [g.to(p.dtype) for g, p in zip(grads_of(params, seed=step), params, strict=True)]
        if step == 3:
            grads[1][7] = math.inf
        for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
            p.grad = grad if (i + step // 3) % 4 else None
        optimizer.param_groups[0]["lr"].fill_(0.1 / (step + 1))
        optimizer.step(grad_scale=0.5, max_norm=1.5 if step % 2 else None)
    return (
        snapshot(optimizer),
        [optimizer.state[p]["step"].item() for p in params],
        optimizer.skipped_steps,
    )


@pytest.mark.parametrize("kind", CAPTURABLE_KINDS, ids=str)
def test_the_bits_are_the_ordinary_steps(kind, cpu_is_a_device):
    assert_same_run(run(OnCpu, kind), run(FusedAdam, kind))


def assert_same_run(got, want):
    assert got[1:] == want[1:]
    assert all(
        torch.equal(a, b) or (a != a).equal(b != b) for a, b in zip(got[0], want[0], strict=True)
    )
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got[0], want[0], strict=True)
    )


def test_twins_are_rejected(cpu_is_a_device, monkeypatch):
    want = run(FusedAdam, {})
    real = _C.device_step

    def forgets_the_norm(state, squares, *lists, **terms):
        return real(state, None, *lists, **terms)

    def counts_one_for_all(state, squares, counters, *lists, **terms):
        return real(
            state,
            squares,
            [counter if i else counter.clone() for i, counter in enumerate(counters)],
            *lists,
            **terms,
        )

    for twin in (forgets_the_norm, counts_one_for_all):
        monkeypatch.setattr(_C, "device_step", twin)
        with pytest.raises(AssertionError):
            assert_same_run(run(OnCpu, {}), want)


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale, cpu_is_a_device):
    runs = []
    for make in (OnCpu, FusedAdam):
        params = params_of(4, 300)
        optimizer = make(params, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            factor = math.inf if step in (0, 3) else float(step + 1)
            scaler.scale(sum((p * p).sum() for p in params) * factor).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer, max_norm=0.5 if step % 2 else None)
            scaler.update()
        runs.append(
            (
                snapshot(optimizer),
                optimizer.skipped_steps,
                optimizer.state[params[0]]["step"].item(),
            )
        )
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:] == (2, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"grad_scale": torch.tensor(math.nan)},
        {"grad_scale": torch.tensor(math.inf, dtype=torch.float64)},
        {"max_norm": 1.0, "bad": math.nan},
        {"max_norm": math.inf, "bad": -math.inf},
        {"found_inf": torch.tensor(1.0)},
        {"found_inf": 1.0},
        {"loss_scale": torch.zeros(1)},
    ],
    ids=str,
)
def test_a_skipped_step_writes_nothing(arguments, cpu_is_a_device):
    arguments = dict(arguments)
    params = params_of(5, 0, 300)
    optimizer = OnCpu(params, master="fp32")
    optimizer.step(grads=grads_of(params))
    before = snapshot(optimizer)
    grads = grads_of(params)
    grads[2][299] = arguments.pop("bad", 1.0)
    for attribute, name in (("found_inf", "found_inf"), ("grad_scale", "loss_scale")):
        if name in arguments:
            setattr(optimizer, attribute, arguments.pop(name))
    for count in (1, 2):
        optimizer.step(grads=grads, **arguments)
        assert same(snapshot(optimizer), before)
        assert optimizer.skipped_steps == count
    for attribute in ("found_inf", "grad_scale"):
        vars(optimizer).pop(attribute, None)
    optimizer.step(grads=grads)
    assert not same(snapshot(optimizer), before)
    assert (optimizer.skipped_steps, optimizer.state[params[0]]["step"]) == (2, 2)


def test_numbers_are_still_checked(cpu_is_a_device):
    (p,) = params = params_of(4)
    optimizer = OnCpu(params)
    for grad_scale in (math.nan, math.inf):
        with pytest.raises(ValueError, match="grad_scale is"):
            optimizer.step(grads=grads_of(params), grad_scale=grad_scale)
    for bad in (
        torch.ones(2),
        torch.ones(1, dtype=torch.int64),
        torch.ones(1, dtype=torch.bfloat16),
    ):
        with pytest.raises(
            TypeError, match=r"grad_scale is a .* tensor .*expected one float32 or float64 number"
        ):
            optimizer.step(grads=grads_of(params), grad_scale=bad)
        with pytest.raises(TypeError, match=r"param_groups\[0\].lr is a .* tensor"):
            OnCpu(params, lr=bad)
    with pytest.raises(TypeError, match="max_norm is a tensor on the device; expected a number"):
        optimizer.step(grads=grads_of(params), max_norm=torch.ones(()))
    for name, value in (
        ("eps", torch.ones(())),
        ("weight_decay", torch.ones(())),
        ("betas", (0.9, torch.tensor(0.9))),
    ):
        with pytest.raises(
            TypeError, match=rf"param_groups\[0\].{name}.* is a tensor on cpu; expected a number"
        ):
            OnCpu(params, **{name: value})
    assert not optimizer.state
    assert torch.equal(p, params_of(4)[0])


def test_each_parameter_has_a_counter_of_its_own():
    """A graph goes on counting the parameters that it was captured with, so no two may share
    one.
    """
    params = params_of(4, 5, 6)
    optimizer = OnCpu(params)
    optimizer.step(grads=grads_of(params))
    counters = [optimizer.state[p].count.counter for p in params]
    assert len({counter.data_ptr() for counter in counters}) == 3
    a, _, c = grads_of(params)
    optimizer.step(grads=[a, None, c])
    optimizer.step(grads=grads_of(params))
    assert [counter.item() for counter in counters] == [3, 2, 3]
    assert all(
        optimizer.state[p].count.counter is counter
        for p, counter in zip(params, counters, strict=True)
    )
    step = optimizer.state[params[0]]["step"]
    assert (step.dtype, step.shape) == (torch.float32, ())
    step.fill_(7)  # a copy, as always
    assert optimizer.state[params[0]]["step"] == 3
    optimizer.state[params[0]]["step"] = 10
    optimizer.step(grads=grads_of(params))
    assert optimizer.state[params[0]]["step"] == 11


def test_the_option_may_be_switched_between_steps():
    results = []
    for flags in ([False] * 6, [True] * 6, [False, False, True, True, False, True]):
        params = params_of(4, 300)
        optimizer = OnCpu(params, capturable=flags[0], lr=0.1)
        for step, flag in enumerate(flags):
            optimizer.param_groups[0]["capturable"] = flag
            for p, grad in zip(params, grads_of(params, seed=step), strict=True):
                p.grad = grad
            optimizer.step(max_norm=1.0)
        results.append(snapshot(optimizer))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_state_dicts_are_exchanged_with_torch():
    ours, theirs = params_of(4, 300), params_of(4, 300)
    optimizer = OnCpu(ours, lr=0.1)
    for step in range(3):
        optimizer.step(grads=grads_of(ours, seed=step))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["capturable"] is True
    reference = torch.optim.Adam(theirs, capturable=True)
    reference.load_state_dict(saved)
    assert reference.param_groups[0]["capturable"] is True
    for p, q in zip(ours, theirs, strict=True):
        assert reference.state[q]["step"].dtype == torch.float32
        assert reference.state[q]["step"] == 3
        assert torch.equal(reference.state[q]["exp_avg"], optimizer.state[p]["exp_avg"])
    back = OnCpu(params_of(4, 300), lr=0.1)
    back.load_state_dict(copy.deepcopy(reference.state_dict()))
    ordinary = FusedAdam(params_of(4, 300), lr=0.1)
    ordinary.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert [group["capturable"] for group in (back.param_groups[0], ordinary.param_groups[0])] == [
        True,
        False,
    ]
    for made in (back, ordinary):
        for p, q in zip(made.param_groups[0]["params"], ours, strict=True):
            p.data.copy_(q)
    for step in range(3, 6):
        for made in (optimizer, back, ordinary):
            made.step(grads=grads_of(ours, seed=step))
    assert same(snapshot(back), snapshot(optimizer))
    assert same(snapshot(ordinary), snapshot(optimizer))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies_count_for_themselves(copied):
    params = params_of(4, 5)
    optimizer = OnCpu(params)
    optimizer.step(grads=grads_of(params))
    optimizer.step(grads=[g * math.nan for g in grads_of(params)], max_norm=1.0)
    twin = copied(optimizer)
    twins = twin.param_groups[0]["params"]
    twin.step(grads=grads_of(twins))
    twin.step(grads=[g * math.nan for g in grads_of(twins)], max_norm=1.0)
    assert (optimizer.skipped_steps, twin.skipped_steps) == (1, 2)
    assert [optimizer.state[p]["step"].item() for p in params] == [1, 1]
    assert [twin.state[p]["step"].item() for p in twins] == [2, 2]


def test_a_capture_needs_states_that_exist(captured):
    params = params_of(4, 5, 6)
    a, b, c = grads_of(params)
    optimizer = OnCpu(params)
    captured.append(True)
    with pytest.raises(
        ValueError,
        match=r"params\[0\] got its first gradient while a CUDA graph is captured",
    ):
        optimizer.step(grads=[a, None, c])
    assert not optimizer.state
    captured.clear()
    optimizer.step(grads=[a, None, c])
    before = snapshot(optimizer)
    captured.append(True)
    # appeared
    with pytest.raises(ValueError, match=r"params\[1\] got its first gradient while"):
        optimizer.step(grads=[a, b, c])
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match=r"params\[0\] got its first gradient while"):
        optimizer.step(grads=[a, None, c])
    optimizer.param_groups[0]["amsgrad"] = False
    # on the host: its copy to the device would be part of the graph
    optimizer.state[params[2]]["step"] = 1
    with pytest.raises(ValueError, match=r"params\[2\] got its first gradient while"):
        optimizer.step(grads=[a, None, c])
    assert same(snapshot(optimizer), before)
    assert len(optimizer.state) == 2
    optimizer.step(grads=[a, None, None])  # vanished: the graph leaves it out, as torch does
    assert [optimizer.state[p]["step"].item() for p in (params[0], params[2])] == [2, 1]


def test_loaded_states_can_be_captured_at_once(captured):
    params = params_of(4)
    optimizer, ordinary = OnCpu(params), FusedAdam(params_of(4))
    ordinary.step(grads=grads_of(params))
    optimizer.load_state_dict(ordinary.state_dict())
    captured.append(True)
    optimizer.step(grads=grads_of(params))
    assert optimizer.state[params[0]]["step"] == 2


def test_an_ordinary_step_is_no_part_of_a_graph(captured):
    params = params_of(4)
    optimizer = FusedAdam(params)
    captured.append(True)
    with pytest.raises(
        ValueError, match=r"step runs while a CUDA graph is captured\. This needs capturable=True"
    ):
        optimizer.step(grads=grads_of(params), grad_scale=torch.tensor(0.5))
    late = OnCpu(params, capturable=False)
    late.param_groups[0]["capturable"] = True
    with pytest.raises(
        ValueError,
        match="capturable was set after construction",
    ):
        late.step(grads=grads_of(params))
    assert not optimizer.state
    assert late.skipped_steps == 0


def test_groups_are_all_capturable_or_none():
    a, b = params_of(4, 5)
    for first in (True, False):
        with pytest.raises(
            ValueError, match=r"param_groups\[1\].capturable is .*expected the same in all groups"
        ):
            OnCpu([{"params": [a], "capturable": first}, {"params": [b], "capturable": not first}])
    optimizer = OnCpu([{"params": [a]}, {"params": [b]}])
    optimizer.param_groups[1]["capturable"] = False
    with pytest.raises(
        ValueError, match=r"param_groups\[1\].capturable is False, and True in param_groups\[0\]"
    ):
        optimizer.step(grads=grads_of([a, b]))
    assert not optimizer.state


def test_cpu_parameters_and_several_devices_are_refused():
    class SaysCuda1(torch.nn.Parameter):
        device = torch.device("cuda:1")

    class SaysCuda0(torch.nn.Parameter):
        device = torch.device("cuda:0")

    for make in (FusedAdam, CPUAdam):
        with pytest.raises(
            ValueError,
            match=r"param_groups\[0\].capturable is True for CPU parameters; expected False",
        ):
            make(params_of(3), capturable=True)
    group = {"params": [SaysCuda0(torch.ones(2)), SaysCuda1(torch.ones(2))], "capturable": True}
    with pytest.raises(
        ValueError, match="is True for parameters on cuda:0 and cuda:1; expected one device"
    ):
        options.check_capturable("FusedAdam", [group], "cuda")


def test_shard_takes_it_without_offload():
    optimizer = OnCpu(params_of(3))
    assert accept_optimizer(optimizer) is optimizer
    with pytest.raises(
        ValueError,
        match=r"shard: param_groups\[0\].capturable is True with offload; expected False",
    ):
        accept_optimizer(optimizer, {"optimizer": "cpu"})


def test_the_short_way_is_taken(monkeypatch):
    params = params_of(3, 300)
    optimizer = OnCpu(params)
    for step in range(3):
        for p, grad in zip(params, grads_of(params, seed=step), strict=True):
            p.grad = grad
        if step == 2:
            monkeypatch.setattr(
                "shardcore.optim.adam.Update", lambda *args: pytest.fail("the long way")
            )
        optimizer.step(max_norm=1.0)
    assert optimizer.state[params[0]]["step"] == 3


def test_a_step_reads_no_tensor_on_the_host(cpu_is_a_device, monkeypatch):
    def steps(make):
        params = params_of(3, 300)
        optimizer = make(params, lr=torch.tensor(0.1), master="fp32")
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
                patch.setattr(torch.Tensor, name, lambda *args: pytest.fail("waits for the device"))
            for _ in range(3):  # the first makes states, the last goes the short way
                for p, grad in zip(params, grads_of(params), strict=True):
                    p.grad = grad
                optimizer.step(grad_scale=torch.tensor(0.5, dtype=torch.float64), max_norm=1.0)

    steps(OnCpu)
    with pytest.raises(pytest.fail.Exception, match="waits for the device"):
        steps(FusedAdam)


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
    return [
        t.detach().cpu()
        for t in [*(p for g in optimizer.param_groups for p in g["params"]), *states]
    ]


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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_other_steps_and_other_memory_between_replays_disturb_nothing():
    captured = Captured({})
    for step in range(1, 8):
        # gradients somewhere else, not in the graph; the tables of this step are made and dropped
        if step in (2, 5):
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [True, False])
def test_a_capture_that_cannot_work_is_refused(capturable):
    params = on_cuda(params_of(4))
    optimizer = FusedAdam(params, capturable=capturable)
    params[0].grad = torch.ones(4, device="cuda")
    why = "got its first gradient while" if capturable else "This needs capturable=True"
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match=why), torch.cuda.graph(graph):
        optimizer.step()
    assert not optimizer.state
