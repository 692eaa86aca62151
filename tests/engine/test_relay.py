"""Models that `initialize` shards a second time: the values of masters move to new buckets, a
few units at a time.
"""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from shardcore.engine.full_tensors import FullTensors
from tests.support.deepspeed import ds_config, start, train
from tests.support.models import batch_of, hash_of_training, make_net
from tests.support.ranks import run_ranks

BF16 = {"bf16": {"enabled": True}}
CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
# stage, of zero_optimization, of the configuration
FORMS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "replicated": (0, {}, {}),
    "states": (1, {"offload_optimizer": CPU}, {}),
    "gradients": (2, {}, BF16),
    "split": (2, {}, {**BF16, "shardcore": {"optimizer": {"master": "split"}}}),
    "weights": (3, {}, BF16),
    "overlapped": (3, {"offload_optimizer": CPU, "offload_param": CPU}, BF16),
    "files": (3, {"offload_optimizer": NVME, "offload_param": NVME}, {}),
}
PAIRS = [
    "replicated weights",
    "weights split",
    "split overlapped",
    "overlapped gradients",
    "states files",
    "files states",
]


def _config(form: str, folder: str) -> dict[str, Any]:
    stage, zero, more = FORMS[form]
    tiers = {
        key: {**tier, "nvme_path": folder} if tier is NVME else tier for key, tier in zero.items()
    }
    return {**ds_config(**more), "zero_optimization": {"stage": stage, **tiers}}


def _hooks(model: torch.nn.Module) -> int:
    kinds = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_state_dict_pre_hooks",
        "_state_dict_hooks",
        "_load_state_dict_pre_hooks",
    )
    of_params = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]  # type: ignore[attr-defined]
    return sum(of_params) + sum(
        len(getattr(module, kind)) for module in model.modules() for kind in kinds
    )


def _moved(rank: int, world_size: int, first: str, second: str, folder: str) -> None:
    model, fresh = make_net(rank), make_net(rank)
    for each in (model, fresh):
        each.blocks[0].requires_grad_(False)
    before = start(_config(first, folder), model)
    train(before, rank, 2)
    masters = before.module_state_dict()
    before.backward(before(batch_of(2, 0, rank)[0]).float().square().mean())  # which no step uses
    held = [
        weakref.ref(thing)
        for thing in (before._core.store, before._core.reducer, before.optimizer.state)
    ]
    after = start(_config(second, folder), model)
    assert not any(ref() for ref in held), "kept by cycles, or by the first engine"
    for name, value in after.module_state_dict().items():
        if not name.startswith("blocks.0"):  # frozen, and so without masters
            assert torch.equal(value, masters[name]), name
    fresh.load_state_dict(masters)
    expected = start(_config(second, folder), fresh)
    assert _hooks(model) == _hooks(fresh)
    for engine in (after, expected):
        train(engine, rank, 2)
    assert hash_of_training(after, after.optimizer) == hash_of_training(
        expected, expected.optimizer
    )


@pytest.mark.cases(3)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_training_goes_on_from_masters_with_new_states(pair: str, tmp_path: Path) -> None:
    run_ranks(2, _moved, *pair.split(), str(tmp_path))


def _largest(rank: int, world_size: int) -> None:
    model = make_net(rank)
    start(_config("weights", ""), model)
    total = sum(param.numel() for param in model.parameters())
    fulls: list[Any] = []
    most = 0
    gather = FullTensors._start

    def watched(self: FullTensors, *args: Any) -> Any:
        nonlocal most
        started = gather(self, *args)
        fulls.append(weakref.ref(started[0]))
        most = max(most, sum(full.numel() for ref in fulls if (full := ref()) is not None))
        return started

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FullTensors, "_start", watched)
            start(_config("weights", ""), model)
    finally:
        gc.enable()
    assert len(fulls) > 3
    assert 0 < most < total


def test_no_rank_has_a_whole_model() -> None:
    run_ranks(2, _largest)
