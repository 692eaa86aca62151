"""Loading: training goes on bit for bit from what was saved, in every form, at every stage and
tier, and in other worlds.
"""

import errno
import os
import re
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.checkpoint import format as layout
from shardcore.deepspeed import lr_schedules
from tests.support.choice import some
from tests.support.deepspeed import ds_config, start
from tests.support.meta import frozen_net
from tests.support.models import (
    Run,
    assert_one,
    batch_of,
    error_of,
    failing_forward,
    hash_of_training,
    loss_of,
    make_net,
    micro_steps,
    stepped,
    train,
)
from tests.support.ranks import run_ranks

TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload": {"optimizer": "cpu"}},
    "split": {"offload": {"optimizer": "cpu", "ratio": 0.37}},
    "overlapped": {"offload": {"optimizer": "cpu", "cpu_threads": 1}, "overlap_step": True},
    # at stage 3 alone
    "all": {"offload": {"optimizer": "cpu", "gradients": "cpu", "params": "cpu"}},
}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {}),
    "masters": ("bf16", {"master": "fp32"}),
    "split masters": ("bf16", {"master": "split", "amsgrad": True}),
    "bf16 states": ("bf16", {"master": "fp32", "state_dtype": "bf16"}),
    "8-bit states": ("bf16", {"master": "split", "state_dtype": "8bit"}),
    "stochastic": ("bf16", {"stochastic_rounding": True, "state_dtype": "8bit"}),
}


def model_of(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return frozen_net() if kind == "frozen" else make_net(seed)


def run_of(stage: int, tier: str, form: str, steps: int = 1) -> Run:
    precision, options = FORMS[form]
    tier = "split" if tier == "all" and stage < 3 else tier
    return Run(
        stage=stage,
        steps=steps,
        precision=precision,
        shard=dict(TIERS[tier]),
        adam={"lr": 1e-2, **options},
    )


def _goes_on(
    rank: int, world_size: int, saving: Run, resuming: list[Run], folder: str, kind: str
) -> list[str]:
    """Train, save and train two steps more; then train something else, load, and train two steps
    more, too.
    """
    model, optimizer, _ = train(rank, saving, model_of(kind, 0))
    before = hash_of_training(model, optimizer)
    shardcore.save(folder, model, optimizer, client_state={"epoch": 3})
    assert hash_of_training(model, optimizer) == before, "saving changes nothing"
    found = []
    for run in (None, *resuming):
        if run is not None:
            model, optimizer, _ = train(rank, run, model_of(kind, 7))
            loaded = shardcore.load(folder, model, optimizer)
            assert (loaded.client_state, loaded.path.name) == ({"epoch": 3}, "global_step2")
        for step in (2, 3):
            stepped(model, optimizer, rank, step)
        found.append(hash_of_training(model, optimizer))
    return found


# Each tier with two stages or more, each form with two tiers. What is saved goes on as it was, and
# at another stage and tier.
CASES = [
    *((0, "device", "fp32", "net"), (0, "cpu", "8-bit states", "frozen")),
    *((1, "split", "masters", "frozen"), (1, "overlapped", "stochastic", "net")),
    *((2, "cpu", "split masters", "net"), (2, "device", "bf16 states", "frozen")),
    *((3, "all", "8-bit states", "net"), (3, "overlapped", "bf16 states", "frozen")),
    *((3, "split", "split masters", "net"), (3, "all", "masters", "frozen")),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "tier", "form", "model"),
    some(product([0, 1, 2, 3], TIERS, FORMS, ["net", "frozen"]), CASES),
    ids=str,
)
def test_a_run_goes_on_bit_for_bit(
    tmp_path: Path, stage: int, tier: str, form: str, model: str
) -> None:
    tiers = list(TIERS)
    other = run_of((stage + 2) % 4, tiers[(tiers.index(tier) + 1) % len(tiers)], form)
    resuming = [run_of(stage, tier, form), other]
    for hashes in run_ranks(
        2, _goes_on, run_of(stage, tier, form, steps=2), resuming, str(tmp_path), model
    ):
        assert_one(hashes)


def _micro_steps_of_one(
    rank: int, world_size: int, run: Run, folder: str, whole: int, steps: tuple[int, ...]
) -> str:
    """Load, if there is something, and train: `whole` micro-batches a step, over all ranks."""
    model, optimizer, _ = train(
        rank, Run(**{**run.__dict__, "steps": 0}), make_net(0 if 0 in steps else 5)
    )
    if 0 not in steps:
        shardcore.load(folder, model, optimizer)
    for step in steps:
        for micro in range(whole // world_size):
            loss = loss_of(model, batch_of(step, 0, micro * world_size + rank)) / (
                whole // world_size
            )
            optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    if 0 in steps:
        shardcore.save(folder, model, optimizer)
    return hash_of_training(model, optimizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_a_run_goes_on_in_another_world_bit_for_bit(
    tmp_path: Path, first: int, second: int
) -> None:
    """Where both worlds add two numbers: (a + b) / 2 is a / 2 + b / 2. Of four ranks two would
    add in another order.
    """
    runs = {size: Run(stage=2, precision="fp32", accumulate=2 // size) for size in (1, 2)}
    straight = run_ranks(
        first, _micro_steps_of_one, runs[first], str(tmp_path / "straight"), 2, (0, 1, 2, 3)
    )
    run_ranks(first, _micro_steps_of_one, runs[first], str(tmp_path / "part"), 2, (0, 1))
    resumed = run_ranks(
        second, _micro_steps_of_one, runs[second], str(tmp_path / "part"), 2, (2, 3)
    )
    assert set(resumed) == set(straight)


def _rolled_back(rank: int, world_size: int, folder: str) -> list[str]:
    model, optimizer, _ = train(rank, Run(stage=3, steps=2, precision="bf16"))
    shardcore.save(folder, model, optimizer)
    expected, found = hash_of_training(model, optimizer), []
    for before in (
        lambda: None,
        lambda: model(batch_of(8, 0, rank)[0]),
        lambda: failing_forward(model, rank),
        lambda: loss_of(model, batch_of(8, 0, rank)).backward(),
    ):
        stepped(model, optimizer, rank, 7)
        before()
        shardcore.load(folder, model, optimizer)
        assert hash_of_training(model, optimizer) == expected
        stepped(model, optimizer, rank, 2)
        found.append(hash_of_training(model, optimizer))
    with shardcore.full_params(model):
        assert "load: called inside full_params; expected it after the block" in error_of(
            lambda: shardcore.load(folder, model)
        )
    return found


@pytest.mark.more
def test_a_run_is_rolled_back_in_the_middle_of_a_step(tmp_path: Path) -> None:
    assert_one(
        hash_of for of_rank in run_ranks(2, _rolled_back, str(tmp_path)) for hash_of in of_rank
    )


def test_skipped_steps_are_those_of_the_run(tmp_path: Path) -> None:
    model, optimizer, _ = train(0, Run(2, 0, precision="bf16"))
    for step in range(3):
        micro_steps(model, optimizer, 0, step, 1, overflow=step < 2)
        optimizer.step()
        optimizer.zero_grad()
    shardcore.save(tmp_path, model, optimizer)
    other, adam, _ = train(0, Run(1, 0, precision="bf16"))
    shardcore.load(tmp_path, other, adam)
    assert adam.skipped_steps == 2
    micro_steps(other, adam, 0, 3, 1, overflow=True)
    adam.step()
    assert adam.skipped_steps == 3
    shardcore.load(tmp_path, other, adam)
    assert adam.skipped_steps == 2


def test_weights_that_are_not_finite_are_no_rounded_ones(tmp_path: Path) -> None:
    model, optimizer, _ = train(0, Run(stage=2, steps=1))
    with torch.no_grad():
        model.gain.fill_(float("nan"))
    shardcore.save(tmp_path, model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        shardcore.load(tmp_path, model, optimizer)
    assert model.state_dict()["gain"].isnan()


@pytest.mark.parametrize(
    ("first", "second", "exact"),
    [
        ("8-bit states", "masters", True),
        ("bf16 states", "masters", True),
        ("stochastic", "8-bit states", True),
        ("masters", "8-bit states", False),
        ("masters", "bf16 states", False),
        ("masters", "stochastic", False),
    ],
)
def test_other_forms_are_exact_or_said_to_be_rounded(
    tmp_path: Path, first: str, second: str, exact: bool
) -> None:
    model, optimizer, _ = train(0, run_of(2, "device", first, steps=3))
    shardcore.save(tmp_path, model, optimizer)
    other, its, _ = train(0, run_of(1, "cpu", second, steps=1), make_net(5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardcore.load(tmp_path, other, its)
    weights, states = model.state_dict(), optimizer.state_dict()["state"]
    equal = all(
        torch.equal(value.float(), weights[name].float())
        for name, value in other.state_dict().items()
    )
    for number, state in its.state_dict()["state"].items():
        equal &= all(
            torch.equal(state[key].float(), states[number][key].float())
            for key in ("exp_avg", "exp_avg_sq", "step")
        )
    assert equal == exact
    said = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    assert len(said) == (0 if exact else 1)
    assert exact or re.search(
        "is rounded to the dtype of this optimizer: (8-bit codes|bfloat16).* more like it", said[0]
    )


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = train(0, run_of(2, "device", "masters"))
    shardcore.save(tmp_path, model, optimizer)
    other, its, _ = train(0, run_of(2, "device", "split masters"))
    before = hash_of_training(other, its)
    assert "param_groups[0].amsgrad is False; expected True" in error_of(
        lambda: shardcore.load(tmp_path, other, its)
    )
    assert hash_of_training(other, its) == before


def test_states_are_not_reset_in_silence(tmp_path: Path) -> None:
    model, optimizer, _ = train(0, run_of(2, "device", "masters"))
    shardcore.save(tmp_path, model)
    before = hash_of_training(model, optimizer)
    said = error_of(lambda: shardcore.load(tmp_path, model, optimizer))
    assert "contains no optimizer states. Load without an optimizer" in said
    assert hash_of_training(model, optimizer) == before
    torch.manual_seed(11)
    expected = torch.rand(2)
    torch.manual_seed(11)
    shardcore.load(tmp_path, model)
    assert torch.equal(torch.rand(2), expected), "random states come with the optimizer's"


def _one_for_each(rank: int, world_size: int, folder: str, saves: bool) -> str:
    model, optimizer, _ = train(rank, run_of(2, "device", "masters"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if saves:
        shardcore.save(folder, model, optimizer, stateful={"data": scheduler})
    before = hash_of_training(model, optimizer)
    said = error_of(lambda: shardcore.load(folder, model, optimizer, stateful={"data": scheduler}))
    assert hash_of_training(model, optimizer) == before
    return said


def _wrong_names(rank: int, world_size: int, folder: str) -> tuple[str, str, str, str]:
    model, optimizer, _ = train(rank, run_of(2, "device", "masters"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    shardcore.save(
        folder, model, optimizer, tag="there", stateful={"data": scheduler} if rank == 0 else {}
    )
    stepped(model, optimizer, rank, 1)
    before = hash_of_training(model, optimizer)
    read_json = layout.read_json

    def fail(path: Path) -> Any:
        if path.name == layout.rank_file(1):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_json(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "read_json", fail)
        unread = error_of(
            lambda: shardcore.load(folder, model, optimizer, stateful={"data": scheduler})
        )
    said = (
        error_of(lambda: shardcore.load(folder, model, optimizer, stateful={"loader": scheduler})),
        error_of(lambda: shardcore.load(folder, model, optimizer, tag="missing")),
        error_of(lambda: shardcore.load(f"{folder}/missing", model, optimizer)),
        unread,
    )
    assert hash_of_training(model, optimizer) == before
    return said


def test_names_that_are_not_there_change_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(2, _wrong_names, str(tmp_path))
    assert re.search(
        r"stateful names loader, but .*there contains no state of it .* the saved names \(data\)",
        first[0],
    )
    assert "saved names (none)" in second[0]
    assert re.search(
        r"FileNotFoundError: .*the checkpoint .* does not exist\. .* as tag= \(there\)",
        first[1],
    )
    assert re.search(
        r"RuntimeError: load: rank 0 failed: FileNotFoundError.*missing does not exist.*\(there\).*nothing was "
        r"changed",
        second[1],
    )
    assert "/missing does not exist. Pass the directory given to save" in first[2]
    assert "load: rank 1 refused" in first[3]
    assert "rank_00001.json" in second[3]
    assert "rank 0 failed: FileNotFoundError" in second[2]


def test_positions_in_data_are_of_a_world(tmp_path: Path) -> None:
    assert run_ranks(2, _one_for_each, str(tmp_path), True) == ["no error"] * 2
    assert (
        "was saved by 2 ranks, each with its own state; expected 1"
        in run_ranks(1, _one_for_each, str(tmp_path), False)[0]
    )


# --- checkpoints of others ------------------------------------------------------------------------


def _torch_run(steps: range, model: Any, optimizer: Any, world_size: int = 2) -> None:
    for step in steps:
        for rank in range(world_size):
            (loss_of(model, batch_of(step, 0, rank)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()


def _from_torch(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    model, optimizer, _ = train(rank, Run(stage=3, steps=1), make_net(5))
    shardcore.load(Path(folder, "checkpoint.pt"), model, optimizer)
    loaded = hash_of_training(model, optimizer)
    for step in (2, 3):
        stepped(model, optimizer, rank, step)
    return loaded, {name: value.clone() for name, value in model.state_dict().items()}


def test_a_run_of_torchs_goes_on(tmp_path: Path) -> None:
    plain = make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.2)
    _torch_run(range(2), plain, optimizer)
    torch.save(
        {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4},
        tmp_path / "checkpoint.pt",
    )
    hashes = hash_of_training(plain, optimizer)
    _torch_run(range(2, 4), plain, optimizer)
    for loaded, weights in run_ranks(2, _from_torch, str(tmp_path)):
        assert loaded == hashes
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


class _Four(nn.Module):
    """Weights of one shape, which no shape can tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * (number + 1)
        return x


def _four_of_torch(folder: Path, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Four()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more},
        folder / "four.pt",
    )
    return model, optimizer


def _four(*groups: slice) -> tuple[Any, Any]:
    model: Any = _Four()
    params = list(model.parameters())
    optimizer: Any = shardcore.FusedAdam([{"params": params[group]} for group in groups], lr=1e-2)
    return shardcore.shard(model, optimizer, 2)


def test_parameters_by_number_need_groups_of_the_same_sizes(tmp_path: Path) -> None:
    """States of layers 0 and 1 would go to layers 2 and 3."""
    _, adam = _four_of_torch(tmp_path)
    model, optimizer = _four(slice(2, 4), slice(0, 2))
    before = hash_of_training(model, optimizer)
    with pytest.raises(
        ValueError, match=r"numbers the parameters, in groups of \[4\]; expected groups of \[2, 2\]"
    ):
        shardcore.load(tmp_path / "four.pt", model, optimizer)
    assert hash_of_training(model, optimizer) == before
    model, optimizer = _four(slice(0, 4))
    shardcore.load(tmp_path / "four.pt", model, optimizer)
    for number, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], adam.state_dict()["state"][number]["exp_avg"])


SCHEDULES: dict[str, Any] = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (step + 1)
    ),
    "warm-up": lambda optimizer: lr_schedules.WarmupLR(optimizer, warmup_num_steps=10),
}


@pytest.mark.parametrize(
    ("saved", "made"),
    [
        *((kind, kind) for kind in SCHEDULES),
        ("lambda", "cosine"),
        ("cosine", "warm-up"),
        ("warm-up", "lambda"),
    ],
)
def test_the_state_of_another_scheduler_is_refused_first(
    tmp_path: Path, saved: str, made: str
) -> None:
    _, adam = _four_of_torch(tmp_path)
    scheduler = SCHEDULES[saved](adam)
    for _ in range(3):
        adam.step()
        scheduler.step()
    of_older_torch = {} if saved == "warm-up" else {"verbose": False}
    _four_of_torch(tmp_path, scheduler={**scheduler.state_dict(), **of_older_torch})
    model, optimizer = _four(slice(0, 4))
    other = SCHEDULES[made](optimizer)
    before = hash_of_training(model, optimizer), dict(other.state_dict())
    if made == saved:
        shardcore.load(tmp_path / "four.pt", model, optimizer, scheduler=other)
        assert {**other.state_dict(), "verbose": 0} == {**scheduler.state_dict(), "verbose": 0}
        return
    with pytest.raises(
        ValueError,
        match=rf"a scheduler state with .*; expected .*, as in this {type(other).__name__}",
    ):
        shardcore.load(tmp_path / "four.pt", model, optimizer, scheduler=other)
    assert (hash_of_training(model, optimizer), dict(other.state_dict())) == before
    _four_of_torch(tmp_path, sched=scheduler.state_dict(), epoch=3)
    with pytest.raises(
        ValueError, match=r"contains no scheduler state \(its client_state contains sched, epoch\)"
    ):
        shardcore.load(tmp_path / "four.pt", model, optimizer, scheduler=other)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)
        self.embed = nn.Embedding(9, 4)
        self.embed.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("left_out", ["embed.weight", "head.weight", None])
def test_a_tied_weight_may_have_any_of_its_names(
    tmp_path: Path, left_out: str | None, stage: int
) -> None:
    """Trainer and consolidate write one of them."""
    torch.manual_seed(0)
    plain = _Tied()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.5)
    plain(torch.arange(9)).sum().backward()
    adam.step()
    weights = {name: value for name, value in plain.state_dict().items() if name != left_out}
    torch.save({"model": weights, "optimizer": adam.state_dict()}, tmp_path / "last.pt")
    model: Any = _Tied()
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), stage)
    loaded = shardcore.load(tmp_path / "last.pt", model, optimizer)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    assert torch.equal(model.state_dict()["embed.weight"], plain.embed.weight)
    state, expected = optimizer.state_dict()["state"][0], adam.state_dict()["state"][0]
    assert all(torch.equal(state[key], expected[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    assert optimizer.param_groups[0]["lr"] == 0.5


def _through_an_engine(rank: int, world_size: int, folder: str) -> None:
    engine = start(ds_config(1))
    for nothing in ("nothing", "logs", "by tag"):
        assert engine.load_checkpoint(os.path.join(folder, nothing)) == (None, {})
    assert engine.load_checkpoint(os.path.join(folder, "by tag"), "mine")[1] == {"epoch": 1}
    for there in ("last.pt", "trainer"):
        path, _ = start(ds_config(1)).load_checkpoint(os.path.join(folder, there))
        assert path == os.path.join(folder, there)
    said = error_of(lambda: engine.load_checkpoint(os.path.join(folder, "torn")))
    assert "torn" in said, said


def test_an_engine_loads_what_load_reads(tmp_path: Path) -> None:
    """It began again from nothing where others had written."""
    model, optimizer, _ = train(0, Run(steps=1))
    shardcore.save(
        tmp_path / "by tag",
        model,
        optimizer,
        tag="mine",
        client_state={"epoch": 1},
        save_latest=False,
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.txt").write_text("step 1")
    plain = make_net()
    adam = torch.optim.AdamW(plain.parameters())
    _torch_run(range(1), plain, adam)
    torch.save({"model": plain.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "last.pt")
    for folder, cut in (("trainer", None), ("torn", 900)):
        (tmp_path / folder).mkdir()
        torch.save(plain.state_dict(), tmp_path / folder / "pytorch_model.bin")
        torch.save(adam.state_dict(), tmp_path / folder / "optimizer.pt")
        path = tmp_path / folder / "pytorch_model.bin"
        path.write_bytes(path.read_bytes()[:cut])
    run_ranks(2, _through_an_engine, str(tmp_path))


def test_an_option_that_no_step_can_use_is_named(tmp_path: Path) -> None:
    """In a manifest whose checksum is right."""
    model, optimizer, _ = train(0, Run(stage=2, steps=1))
    path = shardcore.save(tmp_path, model, optimizer).path / layout.MANIFEST
    before = hash_of_training(model, optimizer)
    held = {key: value for key, value in layout.read_json(path).items() if key != "crc32c"}
    for key, value in (("lr", {"a": 1}), ("betas", [0.9])):
        path.write_bytes(layout.json_bytes({**held, "groups": [{**held["groups"][0], key: value}]}))
        said = error_of(lambda: shardcore.load(tmp_path, model, optimizer))
        assert re.match(
            rf"ValueError: load: the 'groups' of .*global_step1 are unusable for a step .*{key}",
            said,
        ), said
    assert hash_of_training(model, optimizer) == before


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("tier", ["device", "cpu", "split", "overlapped", "all"])
@pytest.mark.parametrize("form", ["masters", "8-bit states"])
def test_on_a_gpu(tmp_path: Path, form: str, tier: str, wait: bool) -> None:
    def make(seed: int) -> Any:
        run = run_of(3, tier, form)
        model = make_net(seed).cuda()
        optimizer: Any = shardcore.FusedAdam(model.parameters(), **run.adam)
        return shardcore.shard(model, optimizer, 3, precision=run.precision, **run.shard)

    def step(model: Any, optimizer: Any, number: int) -> None:
        x, y = (part.cuda() for part in batch_of(number, 0, 0))
        loss_of(model, (x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make(0)
    step(model, optimizer, 0)
    saving = shardcore.save(tmp_path, model, optimizer, wait=wait)
    step(model, optimizer, 1)  # at once: what is not written yet is held
    saving.wait()
    expected = hash_of_training(model, optimizer), torch.rand(3, device="cuda")
    resumed, other = make(7)
    step(resumed, other, 5)
    shardcore.load(tmp_path, resumed, other)
    step(resumed, other, 1)
    assert hash_of_training(resumed, other) == expected[0]
    assert torch.equal(torch.rand(3, device="cuda"), expected[1])
