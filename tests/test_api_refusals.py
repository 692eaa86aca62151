"""What `shard` cannot do is refused: on every rank, by name, with nothing changed."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.support.logs import logged
from tests.support.models import Run, adam, batch_of, hash_of_training, loss_of, make_net, train
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"stage": 4}, ValueError, "stage is 4; expected 0, 1, 2 or 3"),
        ({"stage": True}, TypeError, "stage is True"),
        (
            {"reshard_after_forward": "no"},
            TypeError,
            "reshard_after_forward is .no.; expected True, False",
        ),
        (
            {"reshard_after_forward": 2},
            ValueError,
            "reshard_after_forward is 2; expected a divisor of 1, the ranks that share",
        ),
        (
            {"reshard_after_forward": 1},
            ValueError,
            "reshard_after_forward is 1 at stage 2, .* expected stage 3",
        ),
        (
            {"ranks_per_node": 2},
            ValueError,
            "ranks_per_node is 2; expected a divisor of the 1 ranks",
        ),
        ({"ranks_per_node": "2"}, TypeError, "ranks_per_node is .2.; expected a whole number"),
        (
            {"offload": {"optimizer": "disk"}},
            ValueError,
            r"offload\[\"optimizer\"\] is 'disk'; expected \"cpu\"",
        ),
        (
            {"offload": {"optimizer": "nvme"}},
            ValueError,
            r'offload\["optimizer"\] is "nvme" without "path"; add "path": DIR',
        ),
        (
            {"offload": {"optimizer": "cpu", "path": "/x"}},
            ValueError,
            "path.* is '/x' with the optimizer on .cpu.; remove it",
        ),
        (
            {"offload": {"optimizer": "nvme", "path": 3}},
            TypeError,
            "path.* is 3; expected a directory",
        ),
        (
            {"offload": {"optimizer": "nvme", "path": ""}},
            ValueError,
            "path.* is ''; expected a directory",
        ),
        (
            {"offload": {"optimizer": "nvme", "path": "/x", "params": "nvme"}},
            ValueError,
            'params.* is "nvme" at stage 2',
        ),
        (
            {
                "offload": {
                    "optimizer": "nvme",
                    "path": "/x",
                    "ratio": "auto",
                    "device_memory_limit": 1,
                }
            },
            ValueError,
            "ratio.* is .auto. with the optimizer on .nvme.; expected a number",
        ),
        ({"offload": {"optimiser": "cpu"}}, ValueError, "'optimiser'; did you mean 'optimizer'"),
        ({"precison": "bf16"}, TypeError, "unexpected keyword argument 'precison'"),
        (
            {"offload": {"optimizer": "cpu", "ratio": 1.5}},
            ValueError,
            "ratio.* is 1.5; expected a number from 0 to 1",
        ),
        (
            {"offload": {"optimizer": "cpu", "ratio": float("nan")}},
            ValueError,
            "is nan; expected a number from 0 to 1",
        ),
        (
            {"offload": {"optimizer": "cpu", "ratio": True}},
            TypeError,
            "is True; expected a number from 0 to 1",
        ),
        (
            {"offload": {"optimizer": "cpu", "device_memory_limit": 1}},
            ValueError,
            "is 1 with the ratio 1.0; expected",
        ),
        (
            {"offload": {"optimizer": "cpu", "params": "cpu"}, "stage": 2},
            ValueError,
            "at stage 2, which keeps full weights",
        ),
        (
            {"offload": {"optimizer": "cpu", "gradients": True}},
            ValueError,
            "gradients.* is True; expected .cpu. or None",
        ),
        (
            {"offload": {"optimizer": "cpu", "gradients": "cpu"}, "stage": 0},
            ValueError,
            "at stage 0, where p.grad shows them",
        ),
        (
            {"offload": {"gradients": "cpu"}},
            ValueError,
            'offload has gradients without "optimizer"; add "optimizer": "cpu"',
        ),
        ({"offload": {}}, ValueError, 'offload has no key without "optimizer"; add'),
        (
            {"offload": {"device": "nvme"}},
            ValueError,
            'unknown key "device"; write {"optimizer": "nvme"}$',
        ),
        (
            {"offload": {"optimizer": "cpuu"}},
            ValueError,
            r"offload\[\"optimizer\"\] is 'cpuu'; did you mean \"cpu\"\?",
        ),
        ({"precision": "bf61"}, ValueError, "precision is 'bf61'; did you mean \"bf16\"\\?"),
        (
            {"precision": torch.float64},
            ValueError,
            'precision is torch.float64; expected "bf16" or "fp16" or "fp32" or None '
            r"\(torch.bfloat16, torch.float16, torch.float32\)",
        ),
        (
            {"grad_dtype": "fp16"},
            ValueError,
            r"grad_dtype is 'fp16'; expected \"bf16\" or \"fp32\" \(torch.bf",
        ),
        (
            {"offload": {"params": "cpu", "gradients": "cpu"}, "stage": 3},
            ValueError,
            'gradients.* with the optimizer on None and the ratio 0: .*; expected "optimizer": '
            '"cpu" and a ratio above 0, or',
        ),
        (
            {"offload": {"optimizer": "cpu", "gradients": "cpu", "ratio": 0}, "stage": 2},
            ValueError,
            "gradients.* with the optimizer on 'cpu' and the ratio 0: ",
        ),
        ({"offload": "cpu"}, TypeError, "offload is 'cpu'"),
        ({"offload": {"optimizer": "cpu", "pin_memory": 1}}, TypeError, "pin_memory"),
        (
            {"offload": {"optimizer": "cpu", "pin_memory_limit": 1.5}},
            TypeError,
            "is 1.5; expected a whole number",
        ),
        (
            {"offload": {"optimizer": "cpu", "cpu_threads": 1.5}, "overlap_step": True},
            TypeError,
            "is 1.5; expected a whole number",
        ),
        (
            {"offload": {"optimizer": "cpu", "cpu_threads": 0}, "overlap_step": True},
            ValueError,
            "is 0; expected 1 to 4096",
        ),
        (
            {"offload": {"optimizer": "cpu", "cpu_threads": 2}},
            ValueError,
            "is 2 but overlap_step is False",
        ),
        (
            {"offload": {"optimizer": "cpu", "pin_memory_limit": -1}},
            ValueError,
            "is -1; expected 0 to",
        ),
        (
            {"offload": {"optimizer": "cpu", "pin_memory": False, "pin_memory_limit": 4096}},
            ValueError,
            'is 4096 but "pin_memory" is False; expected None, or True',
        ),
        ({"precision": "fp8"}, ValueError, "precision is 'fp8'; expected"),
        ({"grad_dtype": "fp16"}, ValueError, "grad_dtype is 'fp16'"),
        ({"clip_grad_norm": 0.0}, ValueError, "clip_grad_norm is 0"),
        ({"clip_grad_norm": float("nan")}, ValueError, "nan"),
        ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm is '1'"),
        ({"clip_grad_norm": 10**400}, ValueError, "expected a positive number"),
        ({"loss_scale": 10**400, "precision": "fp16"}, ValueError, "expected a positive number"),
        ({"precision": []}, ValueError, "precision is "),
        ({"cast_inputs": "no"}, TypeError, "cast_inputs is 'no'"),
        ({"broadcast": 1}, TypeError, "broadcast is 1"),
        ({"overlap_step": None}, TypeError, "overlap_step is None"),
        ({"sync_each": 1}, TypeError, "sync_each is 1"),
        ({"units": None}, TypeError, "units is None"),
        ({"keep_fp32": None}, TypeError, "keep_fp32 is None"),
        ({"accumulate": 0}, ValueError, "accumulate is 0; expected at least 1"),
        ({"accumulate": 1.5}, TypeError, "accumulate is 1.5"),
        ({"reduction": "fast"}, ValueError, 'reduction is \'fast\'; expected "nccl" or "ordered"'),
        ({"units": "every"}, ValueError, 'units is "every"'),
        ({"keep_fp32": ["nothing.here"]}, ValueError, "matches no parameter"),
        ({"keep_fp32": [3]}, TypeError, "keep_fp32 has 3"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = make_net()
    optimizer = adam(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=text):
        shardcore.shard(model, optimizer, **options)
    assert optimizer._engine is None
    assert not hasattr(model, "_shardcore_engine")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    shardcore.shard(model, optimizer, precision="fp32")


def test_arguments_in_another_order(tmp_path: Path) -> None:
    model = make_net()
    optimizer = adam(model)
    with pytest.raises(TypeError, match=r"model has type FusedAdam.* Call shard\(model, optimizer"):
        shardcore.shard(optimizer, model)
    model, optimizer = shardcore.shard(model, optimizer)
    for function in (shardcore.save, shardcore.load):
        name = function.__name__
        text = rf"^{name}: directory is a Net; call {name}\(directory, model, optimizer\)$"
        with pytest.raises(TypeError, match=text):
            function(model, tmp_path, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [1, 2])
def test_a_memory_format_after_shard_is_named(stage: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model, optimizer = shardcore.shard(model, adam(model), stage)
    model.to(memory_format=torch.channels_last)
    model(torch.ones(1, 3, 4, 4)).mean().backward()
    with pytest.raises(ValueError, match=r"0\.weight .* nor call \.to\(memory_format=\) on it"):
        optimizer.step()


def test_a_forgotten_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = make_net()
    with pytest.raises(
        ValueError, match=r"WORLD_SIZE is 4 but torch.distributed is not initialized"
    ):
        shardcore.shard(model, adam(model))


def test_what_happens_behind_the_engines_back() -> None:
    model, optimizer, _ = train(0, Run(steps=1))
    loss_of(model, batch_of(0, 0, 0)).backward()
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    with pytest.raises(ValueError, match=r"^step: head\.weight\.grad was assigned; expected None"):
        optimizer.step()
    model.head.weight.grad = None
    with pytest.raises(ValueError, match="grads was given"):
        optimizer.step(grads=[None] * len(list(model.parameters())))
    model.head.weight.data = model.head.weight.data.clone()
    with pytest.raises(ValueError, match=r"head\.weight is no longer stored in shardcore's memory"):
        optimizer.step()


def test_a_parameter_unfrozen_after_shard_is_named() -> None:
    model = make_net()
    model.head.requires_grad_(False)
    model, optimizer, _ = train(0, Run(steps=1), model)
    model.head.requires_grad_(True)
    loss_of(model, batch_of(0, 0, 0)).backward()
    with pytest.raises(ValueError, match=r"head.weight was frozen when"):
        optimizer.step()


def test_a_bad_option_at_step_changes_nothing() -> None:
    model, optimizer, _ = train(0, Run(steps=1))
    before = model.state_dict()
    loss_of(model, batch_of(0, 0, 0)).backward()
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"param_groups\[0\].lr is nan"):
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_sparse_gradients_are_refused_by_name() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.embed(x).sum()

    model = Words()
    model, _ = shardcore.shard(model, adam(model), precision="fp32")
    with pytest.raises(
        ValueError,
        match=r"gradient of embed\.weight has layout torch.sparse_coo; expected a dense gradient",
    ):
        model(torch.tensor([1, 2])).backward()


def _bad_option_on_rank_1(rank: int, world_size: int) -> tuple[str, bool]:
    model, optimizer, _ = train(rank, Run(steps=1))
    before = model.state_dict()
    loss_of(model, batch_of(0, 0, rank)).backward()
    if rank == 1:
        optimizer.param_groups[0]["lr"] = -1.0
    try:
        optimizer.step()
    except ValueError as error:
        return str(error), all(
            torch.equal(value, before[key]) for key, value in model.state_dict().items()
        )
    return "no error", False


def test_a_step_that_one_rank_refuses_is_refused_on_all() -> None:
    other, own = run_ranks(2, _bad_option_on_rank_1)
    assert "lr is -1.0" in own[0]
    assert "rank 1 refused: " in other[0]
    assert own[1]
    assert other[1]


def test_a_replaced_optimizer_refuses_to_work() -> None:
    model = make_net()
    old = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls: list[int] = []
    old.register_step_post_hook(lambda *_: calls.append(1))
    old.register_state_dict_post_hook(lambda self, state: {**state, "mine": 2})
    old.register_load_state_dict_pre_hook(lambda self, state: calls.append(state.pop("mine")))
    with logged() as said:
        model, optimizer = shardcore.shard(model, old, precision="fp32")
    assert said[0].endswith("the old optimizer, whose step() now raises an error.")
    for method, args in (
        ("step", ()),
        ("add_param_group", ({},)),
        ("state_dict", ()),
        ("load_state_dict", ({},)),
    ):
        with pytest.raises(ValueError, match=f"{method}: this AdamW was replaced by shardcore"):
            getattr(old, method)(*args)
    loss_of(model, batch_of(0, 0, 0)).backward()
    old.zero_grad()
    assert shardcore.full_grad(model.gain) is None
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [1, 2]


class _Around(torch.optim.Optimizer):
    """Steps another optimizer, as Lookahead and FairScale's OSS do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize(
    ("kind", "overlap_step"), [(torch.optim.SGD, False), (shardcore.FusedAdam, True)]
)
def test_an_optimizer_made_after_shard_refuses_gradients_that_it_cannot_see(
    kind: Any, overlap_step: bool
) -> None:
    model = make_net()
    model, optimizer = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), 2, overlap_step=overlap_step
    )
    later, around = kind(model.parameters(), 0.1), _Around(optimizer)
    loss_of(model, batch_of(0, 0, 0)).backward()
    with pytest.raises(
        ValueError,
        match=rf"this {kind.__name__} finds no p\.grad: shardcore\.shard sharded its parameters "
        r"with another optimizer",
    ):
        later.step()
    around.step()
    optimizer.zero_grad()
    loss_of(model, batch_of(0, 0, 1)).backward()
    optimizer.step()
    later.step()  # no gradient waits


def test_an_optimizer_made_after_shard_steps_stage_0() -> None:
    model = make_net()
    model, _ = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 0)
    loss_of(model, batch_of(0, 0, 0)).backward()
    before = model.gain.detach().clone()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(model.gain, before)


def test_grad_scaler_from_stage_1_on() -> None:
    model, optimizer, _ = train(0, Run(steps=0, stage=2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batch_of(0, 0, 0))).backward()
    with pytest.raises(
        ValueError, match=r"a GradScaler called it.*from stage 1 on they are sharded"
    ):
        scaler.step(optimizer)
    optimizer.zero_grad()
    loss_of(model, batch_of(0, 0, 0)).backward()
    optimizer.step()  # GradScaler leaves its attributes behind when a step raises


def elsewhere(call: Callable[[], Any]) -> list[str]:
    """Run `call` on another thread to its end; returns the text of its error, if any."""
    errors: list[str] = []

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def _step(model: Any, optimizer: Any) -> str:
    optimizer.zero_grad()
    loss_of(model, batch_of(1, 0, 0)).backward()
    optimizer.step()
    return hash_of_training(model, optimizer)


def test_one_thread_after_the_other_trains_as_one() -> None:
    plain, its, _ = train(0, Run(stage=3, steps=1))
    model, optimizer, _ = train(0, Run(stage=3, steps=1))
    losses: list[torch.Tensor] = []
    assert not elsewhere(lambda: losses.append(loss_of(model, batch_of(1, 0, 0))))
    assert not elsewhere(losses[0].backward)
    assert not elsewhere(optimizer.step)
    assert hash_of_training(model, optimizer) == _step(plain, its)


def _wrapped_threads(rank: int, world_size: int, stage: int) -> list[str]:
    from torch.distributed._composable import replicate

    texts = []
    model, _, _ = train(rank, Run(stage=stage, steps=1))
    around, _, _ = train(rank, Run(stage=stage, steps=1))
    copy = model._replicate_for_data_parallel()
    wrapped = [
        nn.parallel.DistributedDataParallel(nn.Sequential(model)),
        replicate(nn.Sequential(model)),
        replicate(around),
    ]
    for each in (copy, *wrapped):
        with pytest.raises(RuntimeError) as refusal:
            each(torch.ones(2, 10))
        texts.append(str(refusal.value))
    teaching = nn.parallel.DistributedDataParallel(make_net())
    teaching.module.register_forward_hook(
        lambda module, args, output: output - model(args[0]).detach()
    )
    teaching(torch.ones(2, 10)).sum().backward()  # a model beside the wrapped one is left alone
    return texts


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 2])
def test_wrappers_that_would_average_again_are_refused(stage: int) -> None:
    for replica, *wrapped in run_ranks(2, _wrapped_threads, stage):
        assert "runs inside DataParallel" in replica
        assert len(wrapped) == 3
        assert all(
            "runs inside DistributedDataParallel or replicate(); expected it on its own" in text
            for text in wrapped
        )
