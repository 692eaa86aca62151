"""Elementwise optimizers of torch.optim on shards: torch's own bits, one hash over stages and
tiers, states in torch's form.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.engine.states import StepError
from shardcore.offload import cpu_store
from shardcore.optim import elementwise
from tests.support.models import assert_one, batch_of, error_of, hash_of_training, loss_of, make_net
from tests.support.ranks import run_ranks

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5},
    ),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {}),
    "radam": (
        torch.optim.RAdam,
        {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ),
    "rprop": (torch.optim.Rprop, {}),
    "lion": (shardcore.Lion, {"lr": 0.01, "weight_decay": 0.1}),
}
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload": {"optimizer": "cpu"}},
    "gradients, share": {"offload": {"optimizer": "cpu", "gradients": "cpu", "ratio": 0.5}},
    "weights": {"offload": {"optimizer": "cpu", "gradients": "cpu", "params": "cpu"}},
    "overlapped": {"offload": {"optimizer": "cpu"}, "overlap_step": True},
}
PLACES = [
    (0, "device"),
    (1, "cpu"),
    (2, "device"),
    (2, "gradients, share"),
    (3, "device"),
    (3, "weights"),
    (3, "overlapped"),
]


def _sharded(name: str, stage: int = 2, **options: Any) -> tuple[nn.Module, Any]:
    model = make_net()
    cls, given = OPTIMIZERS[name]
    return shardcore.shard(model, cls(model.parameters(), **given), stage, **options)


def _train(model: nn.Module, optimizer: Any, steps: range, rank: int = 0) -> None:
    for step in steps:
        loss_of(model, batch_of(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rank_alone_has_torchs_bits_and_exchanges_states_with_torch(name: str) -> None:
    cls, options = OPTIMIZERS[name]
    # The square root of torch's step over whole tensors may not be the nearest float32: MKL's.
    same = partial(torch.allclose, rtol=2**-21, atol=2**-24) if name == "adagrad" else torch.equal
    plain = make_net()
    torchs = cls(plain.parameters(), **options)
    model, optimizer = _sharded(name, stage=3)
    _train(model, optimizer, range(4))
    _train(plain, torchs, range(4))
    for _ in range(2):
        ours, theirs = optimizer.state_dict(), torchs.state_dict()
        for number, state in theirs["state"].items():
            for key, value in state.items():
                # they count none
                if value is not None and (
                    key != "step" or cls not in (torch.optim.SGD, shardcore.Lion)
                ):
                    assert same(ours["state"][number][key], value), key
        optimizer.load_state_dict(theirs)
        torchs.load_state_dict(ours)
        for key, value in plain.state_dict().items():
            assert same(model.state_dict()[key], value)
        _train(model, optimizer, range(4, 6))
        _train(plain, torchs, range(4, 6))


def _hashes(
    rank: int, world_size: int, name: str, places: list[tuple[int, str]], precision: str | None
) -> list[str]:
    found = []
    for number, (stage, tier) in enumerate(places):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 1)  # of which each takes a piece
            # several pieces of each bucket, or one
            patch.setattr(elementwise, "PIECE_NUMEL", (112, 10**6)[number % 2])
            patch.setattr(cpu_store, "CHUNK_NUMEL", 512)  # several chunks per bucket
            model, optimizer = _sharded(
                name, stage, precision=precision, clip_grad_norm=0.3, **TIERS[tier]
            )
            _train(model, optimizer, range(4), rank)
            optimizer.synchronize()
        found.append(hash_of_training(model, optimizer))
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("ranks", "name", "precision"),
    [(4, "lion", "bf16"), (4, "rmsprop", None), (2, "momentum", "bf16"), (2, "adagrad", None)],
)
def test_one_hash_over_stages_and_tiers(ranks: int, name: str, precision: str | None) -> None:
    assert_one(one for found in run_ranks(ranks, _hashes, name, PLACES, precision) for one in found)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_one_hash_over_the_stages_and_tiers_of_one_rank(name: str) -> None:
    assert_one(_hashes(0, 1, name, PLACES, "bf16"))


@pytest.mark.parametrize("fault", ["scale", "step", "rounding", "piece"])
def test_faults_of_a_step_change_the_hash(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _hashes(0, 1, "radam", [(2, "device")], "bf16")
    run = elementwise.ElementStep.run
    if fault == "scale":
        monkeypatch.setattr(
            elementwise.ElementStep, "_scaled", lambda self, grad, scratch: grad.to(torch.float32)
        )
    elif fault == "step":
        monkeypatch.setattr(
            elementwise.ElementStep,
            "run",
            lambda self, *lists: run(replace(self, step=max(1, self.step - 1)), *lists),
        )
    elif fault == "piece":
        update = elementwise.ElementStep._update
        monkeypatch.setattr(
            elementwise.ElementStep,
            "_update",
            lambda self, *lists: lists[0][0].numel() < 112 or update(self, *lists),
        )
    else:
        monkeypatch.setattr(
            elementwise._C,
            "cast",
            lambda to, source: [a.copy_(b * 1.01) for a, b in zip(to, source, strict=True)],
        )
    assert _hashes(0, 1, "radam", [(2, "device")], "bf16") != expected


class _FailsOnce(torch.optim.RMSprop):
    """Whose third chunk of a step, which Python updates inside the pipeline, raises."""

    elementwise = True
    calls = 0

    def step(self, closure: Any = None) -> Any:
        _FailsOnce.calls += 1
        if _FailsOnce.calls == 3:
            raise ArithmeticError("a planted fault")
        return super().step(closure)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_of_a_step_in_python_ends_the_step_with_nothing_in_flight(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_store, "CHUNK_NUMEL", 512)
    model = make_net()
    optimizer: Any = _FailsOnce(model.parameters())
    model, optimizer = shardcore.shard(
        model, optimizer, offload={"optimizer": "cpu"}, overlap_step=overlap
    )
    monkeypatch.setattr(_FailsOnce, "calls", 0)
    loss_of(model, batch_of(0, 0, 0)).backward()
    if overlap:
        optimizer.step()
    with pytest.raises(StepError, match="a planted fault"):
        optimizer.synchronize() if overlap else optimizer.step()
    store = optimizer._engine.store
    assert [what for what, *_ in store._pipeline.events].count("update") == 2
    moved = store.moved_bytes
    store.copies.synchronize()
    assert store.moved_bytes == moved


def _saved_and_loaded(rank: int, world_size: int, folder: str, name: str) -> list[str]:
    model, optimizer = _sharded(name, 2, precision="bf16")
    _train(model, optimizer, range(3), rank)
    shardcore.save(folder, model, optimizer)
    found = []
    for stage, tier in ((3, "cpu"), (0, "device")):
        other, other_optimizer = _sharded(name, stage, precision="bf16", **TIERS[tier])
        shardcore.load(folder, other, other_optimizer)
        _train(other, other_optimizer, range(3, 5), rank)
        found.append(hash_of_training(other, other_optimizer))
    _train(model, optimizer, range(3, 5), rank)
    return [*found, hash_of_training(model, optimizer)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["momentum", "rmsprop"])
def test_a_checkpoint_goes_on_at_another_stage(name: str, tmp_path: Path) -> None:
    assert_one(
        one
        for found in run_ranks(2, _saved_and_loaded, str(tmp_path / "saved"), name)
        for one in found
    )


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.RAdam])
def test_a_checkpoint_of_another_optimizer_changes_nothing(other: Any, tmp_path: Path) -> None:
    """One that keeps part of what is needed, too: Lion's exp_avg without exp_avg_sq would let
    Adam divide by zeros.
    """
    model, optimizer = _sharded("lion")
    _train(model, optimizer, range(1))
    shardcore.save(tmp_path, model, optimizer)
    net = make_net(1)
    model, optimizer = shardcore.shard(net, other(net.parameters()))
    before = hash_of_training(model, optimizer)
    with pytest.raises(
        ValueError,
        match=r"contains no 'exp_avg_sq' of gain, so another optimizer saved it; expected .*exp_avg_sq",
    ):
        shardcore.load(tmp_path, model, optimizer)
    assert hash_of_training(model, optimizer) == before
    shardcore.load(tmp_path, model)


def test_the_options_of_another_optimizer_are_named_beside_those_expected() -> None:
    _, optimizer = _sharded("sgd")
    other = torch.optim.AdamW(make_net().parameters())
    with pytest.raises(
        ValueError,
        match=r"contains lr, betas, eps, .*'betas' is an unknown key; expected lr, mom.*, as in SGD",
    ):
        optimizer.load_state_dict(other.state_dict())
    assert repr(optimizer).startswith("SGD (")


def test_grad_scaler_at_stage_0_alone() -> None:
    plain = make_net()
    torchs = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1)
    model, optimizer = _sharded("sgd", 0)
    for net, steps in ((plain, torchs), (model, optimizer)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            scaler.scale(
                loss_of(net, batch_of(step, 0, 0)) * (torch.inf if step == 1 else 1.0)
            ).backward()
            scaler.step(steps)
            scaler.update()
            steps.zero_grad()
    assert optimizer.skipped_steps == 1
    assert all(
        torch.equal(model.state_dict()[key], value) for key, value in plain.state_dict().items()
    )
    model, optimizer = _sharded("sgd", 2)
    scaler.scale(loss_of(model, batch_of(0, 0, 0))).backward()
    with pytest.raises(ValueError, match="a GradScaler called it"):
        scaler.step(optimizer)


def _refusals(rank: int, world_size: int) -> list[str | None]:
    model = make_net()

    def sharded(cls: Any, options: dict[str, Any], **given: Any) -> Any:
        return lambda: shardcore.shard(model, cls(model.parameters(), **options), **given)

    found = [
        error_of(sharded(torch.optim.NAdam, {})),
        error_of(sharded(torch.optim.SGD, {"lr": 0.1}, offload={"optimizer": "nvme", "path": "."})),
        error_of(sharded(torch.optim.RMSprop, {"differentiable": True})),
        error_of(sharded(torch.optim.SGD, {"lr": 0.1 + rank})),
    ]
    model, optimizer = _sharded("momentum")
    loss_of(model, batch_of(0, 0, rank)).backward()
    for change in ({"momentum": 0.0}, {"lr": 0.1 + rank}, {"lr": -1.0}):
        old = dict(optimizer.param_groups[0])
        optimizer.param_groups[0].update(change)
        found.append(error_of(optimizer.step))
        optimizer.param_groups[0].update(old)
    loss_of(model, batch_of(0, 0, rank)).mul(torch.inf if rank == 0 else 1.0).backward()
    optimizer.step()
    return [*found, f"{optimizer.skipped_steps} skipped"]


def test_what_no_sharded_step_can_use_is_refused_on_every_rank() -> None:
    first, second = run_ranks(2, _refusals)
    expected = [
        "optimizer is a torch.optim.NAdam, which cannot run on shards. It keeps numbers",
        'offload["optimizer"] is "nvme" with SGD',
        "param_groups[0].differentiable is True",
        "ranks disagree",
        "param_groups[0].momentum is '0'; expected 'not 0'",
        "ranks disagree",
        "lr is -1.0; expected a finite number of at least 0",
        "1 skipped",
    ]
    for found in (first, second):
        assert all(text in str(message) for text, message in zip(expected, found, strict=True)), (
            found
        )


def test_a_class_says_that_it_is_elementwise_and_its_other_states_are_refused() -> None:
    class Mine(torch.optim.NAdam):
        elementwise = True

    model = make_net()
    with pytest.raises(
        NotImplementedError,
        match=r"a Mine keeps mu_product=.*; expected states of the parameter's shape",
    ):
        shardcore.shard(model, Mine(model.parameters()))


class Signed(torch.optim.Optimizer):
    """Signed momentum, whose factor is an attribute."""

    elementwise = True

    def __init__(self, params: Any, beta: float) -> None:
        super().__init__(params, {"lr": 0.1})
        self.beta = beta

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            average = self.state[param].setdefault("average", torch.zeros_like(param))
            average.lerp_(param.grad, 1.0 - self.beta)
            param.sub_(average.sign(), alpha=self.param_groups[0]["lr"])


class Layered(torch.optim.Optimizer):
    """Plain descent, by a factor of the layer that the user gives with each group."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(
                    param.grad, alpha=group["lr"] * float(group["factors"][group["layer_id"]])
                )


def _own_keys(rank: int, world_size: int) -> None:
    for cls in (torch.optim.SGD, torch.optim.RMSprop, Layered, shardcore.Muon, shardcore.FusedAdam):
        trained = []
        # Muon rounds to bfloat16 between matrix products: its twin is sharded too, without the keys.
        is_muon = cls is shardcore.Muon
        for sharded, with_keys in ((True, True), (is_muon, not is_muon)):
            model = make_net()
            given = [p for p in model.parameters() if p.ndim == 2 or not is_muon]
            own = {
                "layer_id": -1,
                "factors": torch.tensor([1.0, 2.0, 3.0]),
                "name": f"of {rank}",
                "note": _own_keys,
            }
            optimizer = cls([{"params": given, **(own if with_keys else {})}], lr=0.01)
            if sharded:
                model.requires_grad_(False)
                for param in given:
                    param.requires_grad_(True)
                model, optimizer = shardcore.shard(model, optimizer, 2)
            for step in range(2):
                optimizer.zero_grad()
                for one in [rank] if sharded else range(world_size):
                    (
                        loss_of(model, batch_of(step, 0, one)) / (1 if sharded else world_size)
                    ).backward()
                optimizer.step()
                if with_keys:
                    optimizer.param_groups[0].update(
                        layer_id=-2, name=f"after {step} of {rank}", flag=True
                    )
            if with_keys:
                assert torch.equal(optimizer.param_groups[0]["factors"], own["factors"])
            optimizer.load_state_dict(optimizer.state_dict())
            trained.append(model.state_dict())
        for name, value in trained[0].items():
            bounds = {"rtol": 0.0, "atol": 0.0} if is_muon else {"rtol": 1e-4, "atol": 1e-5}
            assert torch.allclose(value, trained[1][name], **bounds), (cls, name)


def test_keys_of_the_user_in_a_group_are_the_steps_alone() -> None:
    """Negative numbers, texts that change, tensors, and values that differ by rank."""
    run_ranks(2, _own_keys)


def test_a_step_may_read_attributes_of_its_optimizer() -> None:
    plain, net = make_net(), make_net()
    theirs = Signed(plain.parameters(), 0.5)
    model, ours = shardcore.shard(net, Signed(net.parameters(), 0.5))
    _train(plain, theirs, range(3))
    _train(model, ours, range(3))
    assert all(
        torch.equal(model.state_dict()[key], value) for key, value in plain.state_dict().items()
    )


def test_groups_may_read_attributes_of_their_optimizer() -> None:
    class Scaled(torch.optim.SGD):
        elementwise = True

        def __init__(self, params: Any, scale: float) -> None:
            self.scale = scale
            super().__init__(params, lr=0.1)

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group({"lr": 0.1 * self.scale, **param_group})

    model: Any = make_net()
    model.head.requires_grad_(False)
    model, optimizer = shardcore.shard(
        model, Scaled([p for p in model.parameters() if p.requires_grad], 0.5)
    )
    model.head.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.head.parameters())})
    assert optimizer.param_groups[1]["lr"] == 0.05
    _train(model, optimizer, range(1))


def _muon(params: Any) -> Any:
    given = [*params]
    groups = [
        {"params": [p for p in given if (p.ndim == 2) == of], "use_muon": of}
        for of in (True, False)
    ]
    return shardcore.Muon(groups)


@pytest.mark.parametrize("name", ["momentum", "adagrad", "rmsprop", "lion", "muon"])
def test_under_another_default_dtype(name: str) -> None:
    found = []
    cls, options = OPTIMIZERS[name] if name != "muon" else (_muon, {})
    for dtype in (torch.float32, torch.bfloat16):
        model, batches = make_net(), [batch_of(step, 0, 0) for step in range(2)]
        torch.set_default_dtype(dtype)
        try:
            model, optimizer = shardcore.shard(model, cls(model.parameters(), **options))
            for batch in batches:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(hash_of_training(model, optimizer))
    assert found[0] == found[1]


def test_states_of_adagrads_constructor_on_the_meta_device() -> None:
    def fill(module: nn.Module) -> None:
        for param in module.to_empty(device="cpu", recurse=False).parameters(recurse=False):
            nn.init.constant_(param, 0.1)

    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model: nn.Module = nn.Linear(10, 5)
        if device == "cpu":
            fill(model)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
        model, sharded = shardcore.shard(
            model, optimizer, 3, materialize=fill if device == "meta" else None
        )
        _train(model, sharded, range(2))
        found.append(hash_of_training(model, sharded))
    assert found[0] == found[1]


class Averaged(torch.optim.Optimizer):
    """An Adam whose states count steps by an int. factor: what else a step multiplies by."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def factor(self, group: dict[str, Any], param: torch.Tensor) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(
                        step=0, average=torch.zeros_like(param), square=torch.zeros_like(param)
                    )
                state["step"] += 1
                state["average"].lerp_(param.grad, 0.1)
                state["square"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
                scale = (
                    group["lr"] * (1.0 - 0.99 ** state["step"]) ** 0.5 * self.factor(group, param)
                )
                param.addcdiv_(state["average"], state["square"].sqrt().add_(1e-8), value=-scale)


class Trusting(Averaged):
    """As LAMB."""

    def factor(self, group: dict[str, Any], param: torch.Tensor) -> float:
        return float(param.norm() / param.grad.norm())


class Counting(Averaged):
    """Counts its steps in groups."""

    def factor(self, group: dict[str, Any], param: torch.Tensor) -> float:
        group["count"] = group.get("count", 0) + 1
        return 1.0 / group["count"]


class Random(Averaged):
    def factor(self, group: dict[str, Any], param: torch.Tensor) -> float:
        return float(torch.rand(()))


class Idle(Averaged):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_a_trial_finds_steps_that_are_not_elementwise() -> None:
    params = [nn.Parameter(torch.ones(3, 4))]
    for cls in (
        Averaged,
        torch.optim.SGD,
        torch.optim.RMSprop,
        torch.optim.RAdam,
        torch.optim.Rprop,
        torch.optim.AdamW,
    ):
        optimizer = cls([{"params": params, "lr": 0.0}])
        assert elementwise.not_elementwise(optimizer) is None, cls
        assert not optimizer.state
    refused = {
        Trusting: "other weights",
        Counting: "other weights",
        Random: "other weights",
        Idle: "changed nothing",
    }
    refused |= {
        torch.optim.Adafactor: "other weights",
        torch.optim.NAdam: "mu_product",
        torch.optim.LBFGS: "'closure'",
    }
    for cls, says in refused.items():
        optimizer = cls(params)
        assert says in (elementwise.not_elementwise(optimizer) or ""), cls
        assert "count" not in optimizer.param_groups[0]
    assert torch.equal(params[0], torch.ones(3, 4))


def test_a_class_that_counts_steps_by_an_int_has_the_bits_of_its_own_step() -> None:
    class Mine(Averaged):
        elementwise = True

    plain = make_net()
    torchs = Averaged(plain.parameters())
    model = make_net()
    model, optimizer = shardcore.shard(model, Mine(model.parameters()), 3)
    _train(model, optimizer, range(3))
    _train(plain, torchs, range(3))
    assert all(
        torch.equal(model.state_dict()[key], value) for key, value in plain.state_dict().items()
    )
