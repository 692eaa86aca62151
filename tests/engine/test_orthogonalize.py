"""Muon: torch's own alone, the same on shards, one hash over stages and tiers, whole matrices
whatever their cuts.
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.engine import orthogonalize
from shardcore.offload import cpu_store
from shardcore.optim.muon import MuonKind
from tests.support.models import batch_of, error_of, hash_of_training, loss_of
from tests.support.ranks import run_ranks

PLACES: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {"offload": {"optimizer": "cpu"}}),
    (2, {}),
    (2, {"offload": {"optimizer": "cpu", "ratio": 0.5}}),
    (3, {}),
    (3, {"offload": {"optimizer": "cpu", "params": "cpu"}, "units": nn.Linear}),
]


def make_model() -> nn.Module:
    """A model of one unit: the shards of two ranks meet inside its second matrix."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 37), nn.Tanh(), nn.Linear(37, 5)
    )


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [
        {"params": matrices, "lr": 0.02, "adjust_lr_fn": "match_rms_adamw"},
        {"params": others, "lr": 0.01, "weight_decay": 0.0, "use_muon": False},
    ]


def _sharded(stage: int, **options: Any) -> tuple[nn.Module, Any]:
    model = make_model()
    return shardcore.shard(model, shardcore.Muon(_groups(model)), stage, **options)


def _train(model: nn.Module, optimizers: list[Any], steps: range, rank: int = 0) -> None:
    for step in steps:
        loss_of(model, batch_of(step, 0, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_alone_it_is_torchs_muon_and_adamw_and_exchanges_states_with_shards() -> None:
    plain, torchs = make_model(), make_model()
    optimizer = shardcore.Muon(_groups(plain))
    matrices, others = _groups(torchs)
    others.pop("use_muon")
    _train(plain, [optimizer], range(3))
    _train(
        torchs,
        [torch.optim.Muon([matrices], weight_decay=0.1), torch.optim.AdamW([others])],
        range(3),
    )
    for key, value in torchs.state_dict().items():
        assert torch.equal(plain.state_dict()[key], value)
    model, sharded = _sharded(3)
    _train(model, [sharded], range(3))
    for key, value in plain.state_dict().items():
        # A step moves an element by at most lr * 0.2 * sqrt(37) * 1.3; both round it to bfloat16 at
        # the same places.
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=2**-20)
    theirs = optimizer.state_dict()
    sharded.load_state_dict(theirs)
    for number, state in sharded.state_dict()["state"].items():
        for key in theirs["state"][number]:
            assert torch.equal(state[key], theirs["state"][number][key])


def _hashes(
    rank: int, world_size: int, places: list[tuple[int, dict[str, Any]]], precision: str | None
) -> list[str]:
    found = []
    for stage, options in places:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_store, "CHUNK_NUMEL", 512)  # several chunks per bucket
            model, optimizer = _sharded(stage, precision=precision, clip_grad_norm=0.3, **options)
        _train(model, [optimizer], range(3), rank)
        found.append(hash_of_training(model, optimizer))
    return found


@pytest.mark.more
@pytest.mark.parametrize(("world_size", "precision"), [(2, "bf16"), (4, None)])
def test_one_hash_over_stages_and_tiers(world_size: int, precision: str | None) -> None:
    places = PLACES if world_size == 2 else PLACES[::2] + PLACES[-1:]
    assert (
        len({one for found in run_ranks(world_size, _hashes, places, precision) for one in found})
        == 1
    )


def _without_gather(rank: int, world_size: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        way = orthogonalize._direction
        patch.setattr(orthogonalize, "_direction", lambda *args: way(*args[:-1], None))
        return _hashes(rank, world_size, [(0, {}), (2, {})], None)


def test_parts_of_matrices_give_another_hash() -> None:
    whole, parts = run_ranks(2, _without_gather)[0]
    assert whole != parts


def test_momentum_left_out_gives_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _hashes(0, 1, [(2, {})], None)
    monkeypatch.setattr(MuonKind, "momentum", staticmethod(lambda options, buffer, grad: grad))
    assert _hashes(0, 1, [(2, {})], None) != expected


def test_one_bucket_at_a_time_has_an_orthogonalized_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    way = orthogonalize._direction

    def watched(*arguments: Any) -> torch.Tensor:
        assert all(before() is None for before in made)
        made.append(weakref.ref(made_now := way(*arguments)))
        return made_now

    monkeypatch.setattr(orthogonalize, "_direction", watched)
    for options in ({}, {"offload": {"optimizer": "cpu"}}):
        model, optimizer = _sharded(2, units=nn.Linear, **options)
        _train(model, [optimizer], range(1))
    assert len(made) == 6


def _fails(rank: int, world_size: int, stage: int, where: str) -> list[str]:
    model, optimizer = _sharded(stage, units=nn.Linear)
    _train(model, [optimizer], range(1), rank)
    loss_of(model, batch_of(1, 0, rank)).backward()

    def fails(*_: Any) -> torch.Tensor:  # rank 1 has a part of the second of three buckets alone
        raise OSError("planted")

    said = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(MuonKind, where, staticmethod(fails))
        for _ in range(2):
            try:
                optimizer.step()
                said.append("nothing")
            except (RuntimeError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize(("stage", "where"), [(2, "momentum"), (3, "direction")])
def test_an_error_on_a_rank_lets_no_other_wait(stage: int, where: str) -> None:
    others, mine = run_ranks(2, _fails, stage, where)
    assert others[0] == "nothing"
    assert "step: rank 1 refused: " in others[1]
    assert all(
        "StepError: step: updating the weights failed on its way (OSError: planted)" in text
        for text in mine
    )


def test_nothing_is_updated_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _sharded(2, units=nn.Linear)
    _train(model, [optimizer], range(1))
    loss_of(model, batch_of(1, 0, 0)).backward()
    before = [param.detach().clone() for param in model.parameters()]
    momentum, calls = MuonKind.momentum, []

    def fails(*given: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) != 2:
            raise OSError(f"planted {len(calls)}")
        return momentum(*given)

    monkeypatch.setattr(MuonKind, "momentum", staticmethod(fails))
    assert "updating the weights failed on its way (OSError: planted 1)" in error_of(optimizer.step)
    assert all(map(torch.equal, model.parameters(), before))


def _goes_on(rank: int, world_size: int, folder: str) -> list[str]:
    model, optimizer = _sharded(2, precision="bf16")
    _train(model, [optimizer], range(2), rank)
    shardcore.save(folder, model, optimizer)
    other, other_optimizer = _sharded(3, precision="bf16", offload={"optimizer": "cpu"})
    shardcore.load(folder, other, other_optimizer)
    for one, its in ((model, optimizer), (other, other_optimizer)):
        _train(one, [its], range(2, 4), rank)
    return [hash_of_training(model, optimizer), hash_of_training(other, other_optimizer)]


def test_a_checkpoint_goes_on_at_another_stage(tmp_path: Path) -> None:
    assert (
        len({one for found in run_ranks(2, _goes_on, str(tmp_path / "saved")) for one in found})
        == 1
    )


def test_what_muon_cannot_do_is_refused() -> None:
    for options in ({"overlap_step": True}, {"offload": {"optimizer": "cpu", "gradients": "cpu"}}):
        with pytest.raises(NotImplementedError, match="Muon does not support overlap_step=True or"):
            _sharded(2, **options)
    model = make_model()
    assert "is a torch.optim.Muon, which" in error_of(
        lambda: shardcore.shard(model, torch.optim.Muon([model[0].weight]))
    )
