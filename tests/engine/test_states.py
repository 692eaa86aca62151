"""Formats of states under shard: split masters, bfloat16 and 8-bit moments, weights rounded
stochastically without a master.

Each format has one hash, that of the unsharded optimizer, over stages, tiers, worlds (whose ranks
see the same batch) and ways to get there; broken twins must not have it.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore.engine import states as store
from shardcore.engine.step import Updater
from shardcore.offload import cpu_store
from shardcore.offload.split_store import MEASURED_STEPS
from shardcore.optim import state_format
from tests.support.choice import EVERY, combinations, part, some
from tests.support.models import Net, batch_of, hash_of
from tests.support.ranks import run_ranks

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"master": "fp32"},
    "split": {"master": "split"},
    "bf16": {"master": "fp32", "state_dtype": "bf16"},
    "8bit": {"master": "fp32", "state_dtype": "8bit"},
    "split 8bit": {"master": "split", "state_dtype": "8bit"},
    "stochastic": {"stochastic_rounding": True, "seed": 7},
    "stochastic 8bit": {"stochastic_rounding": True, "state_dtype": "8bit"},
}
CPU_TIER = {"optimizer": "cpu"}
PART = CPU_TIER | {"ratio": 0.37}
LEAVING = PART | {"gradients": "cpu"}
ALL_TIERS = LEAVING | {"params": "cpu"}
MAX_NORM = 0.5
STEPS = 3
# (stage, offload, units, and perhaps overlap_step): what must not show in the bits
PLACES = [
    (stage, offload, "auto" if stage % 2 == i else 500)
    for stage in (0, 1, 2, 3)
    for i, offload in enumerate((None, CPU_TIER))
] + [
    (1, PART, 500, True),
    (2, LEAVING, "auto"),
    (3, ALL_TIERS, 500, True),
    (3, CPU_TIER | {"params": "cpu"}, "auto"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As on the ranks: how torch's own forward rounds depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Model(Net):
    """Net, of which a step may leave the last block out."""

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.head(x) * self.gain + self.offset


def make(form: str) -> tuple[Model, Any]:
    """A bfloat16 model and its optimizer; two groups, not in the model's order, and a frozen
    parameter among them.
    """
    torch.manual_seed(0)
    model = Model().bfloat16()
    model.blocks[1].up.weight.requires_grad_(False)
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-2}]
    return model, shardcore.FusedAdam(groups, lr=1e-2, **FORMATS[form])


def sharded(form: str, place: tuple[Any, ...], **more: Any) -> tuple[Model, Any]:
    stage, offload, units, *overlap_step = place
    model, optimizer = make(form)
    return shardcore.shard(
        model,
        optimizer,
        stage,
        offload=offload,
        units=units,
        overlap_step=overlap_step == [True],
        **more,
    )


def go(model: nn.Module, optimizer: Any, start: int, end: int) -> None:
    """Steps of the same batches on every rank; the last block takes no part in step 1."""
    for step in range(start, end):
        x, y = batch_of(step, 0, 0)
        ((model(x.bfloat16(), depth=2 if step == 1 else 3).float() - y) ** 2).mean().backward()
        optimizer.step(max_norm=MAX_NORM)
        optimizer.zero_grad()


def fingerprint(model: nn.Module, optimizer: Any) -> str:
    """A hash of weights as they compute, and of all states, masters included. Collective."""
    state = optimizer.state_dict()["state"]
    kept = [entry[key].float() for _, entry in sorted(state.items()) for key in sorted(entry)]
    if optimizer._engine is None:
        return hash_of([*model.parameters(), *kept])
    with shardcore.full_params(model):
        return hash_of([*model.parameters(), *kept])


def unsharded(form: str, steps: int = STEPS) -> str:
    model, optimizer = make(form)
    go(model, optimizer, 0, steps)
    return fingerprint(model, optimizer)


def _hashes(rank: int, world_size: int, form: str, places: list[tuple[Any, ...]]) -> list[str]:
    return [_hash_of_form(form, place) for place in places]


def _hash_of_form(form: str, place: tuple[Any, ...], **more: Any) -> str:
    model, optimizer = sharded(form, place, **more)
    go(model, optimizer, 0, STEPS)
    return fingerprint(model, optimizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("form", "world_size"), combinations(FORMATS, [1, 2, 3], meet=1))
@pytest.mark.parametrize("every", EVERY)
def test_each_format_has_the_unsharded_bits_everywhere(
    form: str, world_size: int, every: int
) -> None:
    """Stages, tiers, units, cuts into shards; the ranks' gradients are equal."""
    expected = unsharded(form)
    places = PLACES if world_size == 1 else part(PLACES, every, list(FORMATS).index(form))
    hashes = run_ranks(world_size, _hashes, form, places)
    assert {value for of_rank in hashes for value in of_rank} == {expected}


def _hybrid(rank: int, world_size: int, forms: dict[str, int]) -> list[str]:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("node", "rank"))
    return [
        _hash_of_form(form, (stage, CPU_TIER, 500), process_group=mesh)
        for form, stage in forms.items()
    ]


@pytest.mark.more
def test_replicas_draw_the_same_random_bits() -> None:
    forms = {"split 8bit": 1, "stochastic": 3}
    assert run_ranks(4, _hybrid, forms) == [[unsharded(form) for form in forms]] * 4


@pytest.mark.parametrize("overlap_step", [False, True])
def test_a_share_that_is_chosen_late_keeps_the_bits(
    overlap_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcore.offload.split_store.choose_ratio", lambda *_: 0.5)
    auto = CPU_TIER | {"ratio": "auto", "device_memory_limit": 1 << 30}
    model, optimizer = sharded("split 8bit", (2, auto, 500, overlap_step))
    go(model, optimizer, 0, MEASURED_STEPS + 3)
    optimizer.synchronize()
    store_now, buckets = optimizer._engine.store, optimizer._engine.buckets
    assert {tier for bucket in buckets for tier, _, size in store_now.stored(bucket) if size} == {
        "device",
        "cpu",
    }
    assert fingerprint(model, optimizer) == unsharded("split 8bit", MEASURED_STEPS + 3)


def test_formats_differ_unless_they_are_lossless() -> None:
    """If they did not, the hashes above could not show which format ran."""
    hashes = {form: unsharded(form) for form in FORMATS}
    assert hashes["split"] == hashes["fp32"]
    assert hashes["split 8bit"] == hashes["8bit"]
    assert len(set(hashes.values())) == len(FORMATS) - 2


# --- broken twins ---------------------------------------------------------------------------------


def _replan(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(patch: pytest.MonkeyPatch) -> None:
        spans_of = Updater._spans_of

        def changed(*arguments: Any) -> Any:
            return {
                bucket: [change(span) for span in spans]
                for bucket, spans in spans_of(*arguments).items()
            }

        patch.setattr(Updater, "_spans_of", changed)

    return patch


def _forget_remainders(patch: pytest.MonkeyPatch) -> None:
    step = store.DeviceStore.step

    def forgetful(self: Any, spans: Any, hypers: Any) -> None:
        step(self, spans, hypers)
        for span in spans:
            self._states[span.bucket]["remainder"].zero_()

    patch.setattr(store.DeviceStore, "step", forgetful)


def _chunks_count_anew(patch: pytest.MonkeyPatch) -> None:
    part = store.Span.part
    patch.setattr(
        store.Span,
        "part",
        lambda span, offset, numel: replace(part(span, offset, numel), key=span.key),
    )


TWINS: dict[str, tuple[str, Any, Any]] = {
    "elements counted in the shard": (
        "8bit",
        None,
        _replan(lambda span: replace(span, key=(span.key[0], span.start))),
    ),
    "parameters counted in the bucket": (
        "stochastic",
        None,
        _replan(lambda span: replace(span, key=(0, span.key[1]))),
    ),
    "spans over several parameters": (
        "8bit",
        None,
        lambda patch: patch.setattr(state_format, "draws_random_bits", lambda _: False),
    ),
    "remainders dropped": ("split", None, _forget_remainders),
    "elements counted in the chunk": ("stochastic 8bit", CPU_TIER, _chunks_count_anew),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_format_changes_the_hash(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, offload, break_it = TWINS[twin]
    expected = unsharded(form)
    monkeypatch.setattr(cpu_store, "CHUNK_NUMEL", 256)  # chunks end inside parameters
    assert _hash_of_form(form, (2, offload, "auto")) == expected
    break_it(monkeypatch)
    assert _hash_of_form(form, (2, offload, "auto")) != expected


# --- state dicts ----------------------------------------------------------------------------------

SAVED, LOADED = (3, ALL_TIERS, 500, True), (2, None, "auto")


def _resumed(rank: int, world_size: int, form: str) -> dict[str, str]:
    """Two steps, then the state by each way into another optimizer, then one more step."""
    warnings.filterwarnings("error", "load_state_dict|FusedAdam", UserWarning)
    model, optimizer = sharded(form, SAVED)
    go(model, optimizer, 0, 2)
    weights, states = model.state_dict(), optimizer.state_dict()
    shards = shardcore.sharded_state_dict(model), shardcore.sharded_state_dict(optimizer)
    found = {}

    def end(way: str, model: nn.Module, optimizer: Any) -> None:
        go(model, optimizer, 2, STEPS)
        found[way] = fingerprint(model, optimizer)

    end("straight on", model, optimizer)
    other, other_optimizer = sharded(form, LOADED)
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(states)
    end("whole into another stage", other, other_optimizer)
    plain, plain_optimizer = make(form)
    plain.load_state_dict(weights)
    plain_optimizer.load_state_dict(states)
    end("whole into an unsharded one", plain, plain_optimizer)
    before, before_optimizer = make(form)
    go(before, before_optimizer, 0, 2)
    before, before_optimizer = shardcore.shard(
        before, before_optimizer, LOADED[0], precision="bf16"
    )
    end("carried into shards", before, before_optimizer)
    last, last_optimizer = sharded(form, (SAVED[0], None, SAVED[2]))
    shardcore.load_sharded_state_dict(last, shards[0])
    shardcore.load_sharded_state_dict(last_optimizer, shards[1])
    end("shards", last, last_optimizer)
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(("form",), some(zip(FORMATS), [("split 8bit",), ("stochastic",)]))
def test_states_are_restored_exactly_in_every_way(form: str) -> None:
    found = run_ranks(2, _resumed, form)
    assert found[0] == found[1] == dict.fromkeys(found[0], unsharded(form))


def test_full_state_shows_what_state_dicts_show() -> None:
    model, optimizer = sharded("split 8bit", SAVED)
    go(model, optimizer, 0, 2)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, entry in optimizer.state_dict()["state"].items():
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "master"}
        for key, value in entry.items():
            assert torch.equal(shardcore.full_state(params[number], key), value)
            assert value.dtype == torch.float32
    with pytest.raises(
        KeyError, match="no state 'remainder'; expected one of step, exp_avg, exp_avg_sq, master"
    ):
        shardcore.full_state(params[0], "remainder")


def test_what_a_format_cannot_keep_is_warned_of() -> None:
    model, optimizer = sharded("fp32", SAVED)
    go(model, optimizer, 0, 2)
    state, shards = optimizer.state_dict(), shardcore.sharded_state_dict(optimizer)
    for form, lost in (
        ("8bit", "exp_avg is rounded from float32 to 8-bit codes"),
        ("stochastic", "master is left out"),
    ):
        _, other = sharded(form, LOADED)
        with pytest.warns(UserWarning, match=lost):
            other.load_state_dict(state)
    _, other = sharded("8bit", SAVED)
    with pytest.warns(
        UserWarning,
        match=r"load_sharded_state_dict: .*exp_avg is rounded to the dtype of .* \(and 4\d more like it\)",
    ):
        shardcore.load_sharded_state_dict(other, shards)


# --- weights that others write --------------------------------------------------------------------


@pytest.mark.parametrize("offload", [None, CPU_TIER, PART])
def test_edits_of_split_weights_keep_the_rest_and_zeros_are_zero(offload: Any) -> None:
    model, optimizer = sharded("split", (1, offload, "auto"))
    go(model, optimizer, 0, 2)
    weight = model.head.weight
    old = shardcore.full_state(weight, "master")
    assert not torch.equal(old, weight.float()), "there are remainders"
    with torch.no_grad():
        weight[0] = 0.0
        weight[1] = 3.0
    new = shardcore.full_state(weight, "master")
    assert torch.equal(new[2:], old[2:])
    assert new[0].abs().max() < 2.0**-126, "a remainder is left of some, below what bfloat16 knows"
    assert torch.equal(new.bfloat16(), weight)
    weight.data.zero_()  # which no counter shows
    assert shardcore.full_state(weight, "master").abs().max() < 2.0**-126
    given = {
        key: torch.randn_like(value, dtype=torch.float32)
        for key, value in model.state_dict().items()
    }
    model.load_state_dict(given)
    for key, value in model.state_dict().items():
        if key not in ("offset", "blocks.1.up.weight"):
            assert torch.equal(value, given[key]), key
    go(model, optimizer, 2, 3)


@pytest.mark.parametrize(
    ("form", "reason"), [("split", "master='split'"), ("stochastic", "stochastic_rounding=True")]
)
def test_float16_weights_are_refused_where_the_format_needs_bfloat16(
    form: str, reason: str
) -> None:
    with pytest.raises(
        ValueError,
        match=f"shard: the sharded weight .* has dtype float16 with {reason}; expected bfloat16",
    ):
        sharded(form, SAVED, precision="fp16")


def test_a_step_moves_only_what_its_format_needs() -> None:
    """bfloat16 gradients to the tier, bfloat16 weights too unless a float32 master replaces
    them, bfloat16 weights back.
    """
    for form, bytes_in in (("8bit", 2), ("split 8bit", 4), ("stochastic 8bit", 4)):
        model, optimizer = sharded(form, (2, CPU_TIER, "auto"))
        copies = optimizer._engine.store.copies
        before = copies.bytes_to_tier, copies.bytes_from_tier
        go(model, optimizer, 0, 1)
        numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert copies.bytes_to_tier - before[0] == bytes_in * numel
        assert copies.bytes_from_tier - before[1] == 2 * numel


def _another_seed(rank: int, world_size: int) -> str:
    model, optimizer = sharded("8bit", SAVED)
    optimizer.param_groups[1]["seed"] = rank
    before = fingerprint(model, optimizer)
    with pytest.raises(ValueError, match=r"step: ranks disagree: .*seed") as raised:
        go(model, optimizer, 0, 1)
    optimizer.param_groups[1]["seed"] = 0
    assert fingerprint(model, optimizer) == before
    return str(raised.value)


def test_ranks_that_draw_other_random_bits_are_refused() -> None:
    assert all("param_groups[1].seed" in text for text in run_ranks(2, _another_seed))


def test_float32_models_take_any_format() -> None:
    """Masters start from the weights as given; float32 weights have none and draw no random bits
    for themselves.
    """
    torch.manual_seed(0)
    model = Model()
    given = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer: Any = shardcore.FusedAdam(model.parameters(), master="split")
    model, _ = shardcore.shard(model, optimizer, keep_fp32=["gain", "head"], precision="bf16")
    assert model.inp.weight.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert name == "offset" or torch.equal(value, given[name])
    with pytest.raises(KeyError, match="no state 'master'"):
        shardcore.full_state(model.gain, "master")
