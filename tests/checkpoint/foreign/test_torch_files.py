"""Checkpoints of torch's, as torch writes them in the test: torch.save,
torch.distributed.checkpoint, and usual folders.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardcore.checkpoint.foreign.deepspeed_files import open_foreign
from tests.support.foreign import differences, read_all, read_damaged, replaced, same_bits, whole
from tests.support.meta import save
from tests.support.models import Net, batch_of, loss_of, make_net
from tests.support.ranks import run_ranks

FULL = StateDictOptions(full_state_dict=True)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _trained(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = make_net()
    optimizer = kind(_groups(model), lr=1e-2, **options)
    _train(model, optimizer)
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> None:
    for step in range(3):
        loss_of(model, batch_of(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _names(model: nn.Module) -> list[str]:
    """Names in the order of the optimizer's parameters."""
    named = list(model.named_parameters())
    return [name for name, p in named if p.ndim > 1] + [name for name, p in named if p.ndim <= 1]


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    states = {name: optimizer.state[param] for name, param in model.named_parameters()}
    return {
        name: {key: value for key, value in state.items() if key != "step"}
        for name, state in states.items()
    }


def _check(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    names: list[str] | None = None,
) -> Any:
    """Compare a checkpoint with what was saved; returns its source."""
    source = open_foreign(path, _names(model) if names is None else names)
    assert source is not None
    assert (
        differences(
            source, model.state_dict(), {} if optimizer is None else _states(model, optimizer)
        )
        == []
    )
    if optimizer is None:
        assert source.groups is None
        assert source.steps == {}
        return source
    assert source.steps == dict.fromkeys(dict(model.named_parameters()), 3)
    assert source.groups is not None
    all_names = {param: name for name, param in model.named_parameters()}
    for found, group in zip(source.groups, optimizer.param_groups, strict=True):
        assert found == {
            **{k: v for k, v in group.items() if k != "param_names"},
            "params": [all_names[p] for p in group["params"]],
        }
    return source


# --- torch.save -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "amsgrad"), [(torch.optim.AdamW, False), (torch.optim.Adam, True)]
)
def test_a_file_with_model_and_optimizer(tmp_path: Path, kind: Any, amsgrad: bool) -> None:
    model, optimizer = _trained(kind, amsgrad=amsgrad)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 3,
    }
    torch.save({**saved, "rng": torch.get_rng_state()}, tmp_path / "last.ckpt")
    source = _check(tmp_path / "last.ckpt", model, optimizer)
    assert source.scheduler == scheduler.state_dict()
    assert source.client_state["epoch"] == 3
    assert torch.equal(source.client_state["rng"], torch.get_rng_state())
    assert source.groups[0]["decoupled_weight_decay"] == (kind is torch.optim.AdamW)


def test_names_in_a_file_need_no_order(tmp_path: Path) -> None:
    model = make_net()
    # in no order of the model's
    weights = [(name, p) for name, p in model.named_parameters() if p.ndim > 1][::-1]
    others = [(name, p) for name, p in model.named_parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "lr": 0.5}], lr=1e-2)
    _train(model, optimizer)
    torch.save(
        {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
        tmp_path / "last.pt",
    )
    source = _check(tmp_path / "last.pt", model, optimizer, sorted(dict(model.named_parameters())))
    assert source.client_state is None


def test_wrong_orders_of_names_are_refused_where_shapes_tell(tmp_path: Path) -> None:
    model, optimizer = _trained()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt"
    )
    for names, text in (
        (
            list(dict(model.named_parameters())),
            "has shape .*; expected one shape: give names in the order",
        ),
        (_names(model)[1:], r"\d+ parameters by number, and \d+ names are given; expected as many"),
        (["a", "b"], "has the model's names in 0 places"),
    ):
        with pytest.raises(ValueError, match=text):
            open_foreign(tmp_path / "last.pt", names)


def test_the_comparison_notices_names_in_another_order(tmp_path: Path) -> None:
    """Two parameters of one shape exchanged: no reader can know, and the test above would."""
    model, optimizer = _trained()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt"
    )
    names = _names(model)
    first, second = names.index("blocks.0.norm.weight"), names.index("blocks.1.norm.weight")
    names[first], names[second] = names[second], names[first]
    with pytest.raises(AssertionError):
        _check(tmp_path / "last.pt", model, optimizer, names)


def test_wrappers_of_the_model_and_other_keys(tmp_path: Path) -> None:
    model, optimizer = _trained()
    path = tmp_path / "last.pt"
    # the last: of a LightningModule
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "net.inner.", "model."):
        torch.save(
            {
                "model": {prefix + k: v for k, v in model.state_dict().items()},
                "optim": optimizer.state_dict(),
            },
            path,
        )
        _check(path, model, optimizer)
    # torch.compile
    compiled = {
        k.replace("blocks.1.", "blocks.1._orig_mod."): v for k, v in model.state_dict().items()
    }
    torch.save({"model": compiled, "optim": optimizer.state_dict()}, path)
    _check(path, model, optimizer)
    both = {
        f"{prefix}.{k}": v + len(prefix)
        for prefix in ("model", "ema_model")
        for k, v in model.state_dict().items()
    }
    torch.save({"state_dict": both}, path)
    source = open_foreign(path, _names(model))
    assert source is not None
    assert same_bits(whole(source, "gain", "weight"), model.gain.detach() + 5)
    assert "ema_model.gain" in source.shapes, "it is unexpected, not left out"
    torch.save(model.state_dict(), path)
    assert _check(path, model, None).client_state is None
    torch.save({**model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}, path)
    assert _check(path, model, optimizer).client_state == {"epoch": 1}
    torch.save(
        {
            "state": {
                "net": model.state_dict(),
                "opt": optimizer.state_dict(),
                "scheduler": {"last": 2},
                "seed": 1,
            }
        },
        path,
    )
    source = _check(path, model, optimizer)
    assert source.scheduler == {"last": 2}
    assert source.client_state == {"state": {"seed": 1}}
    torch.save(
        {
            "state_dict": model.state_dict(),
            "optimizer_states": [optimizer.state_dict()],
            "callbacks": [{"a": 1}],
            "lr_schedulers": [{"last": 2}],
        },
        path,
    )
    source = _check(path, model, optimizer)
    assert source.client_state == {"callbacks": [{"a": 1}]}, "as Lightning saves"
    assert source.scheduler == {"last": 2}
    ema = {k: v + 1 for k, v in model.state_dict().items()}
    torch.save({"model": model.state_dict(), "ema": ema, "optimizer": optimizer.state_dict()}, path)
    assert torch.equal(_check(path, model, optimizer).client_state["ema"]["gain"], ema["gain"])
    for saved, text in (
        ({"a": model.state_dict(), "ema": ema}, r"in 2 places \(a, ema\)"),
        (
            {"model": model.state_dict(), "d": optimizer.state_dict(), "g": optimizer.state_dict()},
            r"optimizers in 2 places \(d, g\)",
        ),
        ({"epoch": 3}, "none in 'epoch'"),
        ([1, 2], "has a list; expected a dict"),
    ):
        torch.save(saved, path)
        with pytest.raises(ValueError, match=text):
            open_foreign(path, _names(model))


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"model": 1, "ema": 2, "rng": torch.zeros(3)}, "model"),
        ({"ema": {"state_dict": 1}, "average": 2}, "ema"),
        ({"weights": 1, "rng": torch.zeros(3)}, "weights"),
        ({"": 1, "train_state": {"seen": torch.zeros(3)}}, ""),
        ({"model": {f"module.{name}": name for name in ("a", "b")}}, "model"),
    ],
    ids=str,
)
def test_weights_are_found_without_names(tmp_path: Path, tree: dict[str, Any], place: str) -> None:
    """Numbers stand for state dicts, whose weights have that value. The optimizer's states have
    no names then.
    """
    _, optimizer = _trained()

    def filled(value: Any) -> Any:
        if isinstance(value, int):
            return {name: torch.full((3, 2), float(value)) for name in ("a", "b")}
        return (
            {k: filled(v) for k, v in value.items()}
            if isinstance(value, dict)
            else torch.ones(3, 2)
        )

    held = {
        key: value if isinstance(value, torch.Tensor) else filled(value)
        for key, value in tree.items()
    }
    held |= held.pop("", {})
    torch.save({**held, "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    source = open_foreign(tmp_path / "last.pt", ())
    assert source is not None
    assert {name: whole(source, name, "weight").unique().tolist() for name in source.shapes} == {
        "a": [1.0],
        "b": [1.0],
    }
    assert place in tree


def test_two_models_are_not_one_without_names(tmp_path: Path) -> None:
    torch.save(
        {"disc": {"a": torch.ones(2)}, "gen": {"a": torch.ones(2), "b": torch.ones(2)}},
        tmp_path / "last.pt",
    )
    with pytest.raises(
        ValueError,
        match=r"in 2 places \(disc, gen\); expected one state dict under model, state_dict",
    ):
        open_foreign(tmp_path / "last.pt", ())


def test_tied_weights_are_known_by_their_memory(tmp_path: Path) -> None:
    tied = torch.randn(4, 3)
    weights = {
        "embed": tied,
        "head": tied,
        "other": tied.clone(),
        "part": tied[:2],
        "flipped": tied.t(),
    }
    torch.save({"model": weights}, tmp_path / "last.pt")
    source = open_foreign(tmp_path / "last.pt", list(weights))
    assert source is not None
    assert source.tied == {"head": "embed"}
    del weights["embed"]
    weights |= {"head": tied}
    adam = {
        "state": {0: {"step": 3.0, "exp_avg": tied + 1, "exp_avg_sq": tied + 2}},
        "param_groups": [{"params": [0]}],
    }
    torch.save({"model": weights, "optimizer": adam}, tmp_path / "last.pt")
    source = open_foreign(tmp_path / "last.pt", {"embed": ["head"]})
    assert source is not None
    assert source.steps == {"head": 3}, "the name that is there"


def test_large_tensors_beside_the_model_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    average = {"decay": 0.9, "shadow": [torch.zeros(1 << 20) for _ in range(5)]}
    torch.save(
        {"model": {"a": torch.ones(2)}, "ema": average, "rng": torch.ones(9), "epoch": 1},
        tmp_path / "last.pt",
    )
    source = open_foreign(tmp_path / "last.pt", ["a"])
    assert source is not None
    assert source.client_state is not None
    assert set(source.client_state) == {"rng", "epoch"}
    assert [
        record.getMessage().partition("last.pt: ")[2]
        for record in caplog.records
        if record.name == "shardcore"
    ] == ["the tensors of ema are not used, and left out of client_state"]


def test_grad_scaler_and_modules_with_state_of_their_own(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    model = nn.Sequential(Counting(3, 2), nn.Linear(2, 1))
    scaler = {
        "scale": 1024.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    torch.save({"model": model.state_dict(), "scaler": scaler}, tmp_path / "last.pt")
    source = open_foreign(tmp_path / "last.pt", ["0.weight", "0.bias", "1.weight", "1.bias"])
    assert source is not None
    assert source.loss_scale == {"scale": 1024.0, "stable_steps": 7, "hysteresis_left": 1}
    assert source.extra_state == {"0": {"calls": 3}}
    assert set(source.shapes) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert source.client_state is None


def test_other_optimizers_and_what_is_no_state_dict_are_refused(tmp_path: Path) -> None:
    model, optimizer = _trained()
    good, others = (
        optimizer.state_dict(),
        (partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad, torch.optim.Adamax),
    )

    def changed(**more: Any) -> dict[str, Any]:
        return {
            "state": {**good["state"], 0: {**good["state"][0], **more}},
            "param_groups": good["param_groups"],
        }

    cases: list[tuple[dict[str, Any], str]] = [
        *(
            (_trained(kind)[1].state_dict(), "expected Adam's step, exp_avg and exp_avg_sq")
            for kind in others
        ),
        (changed(step=torch.tensor(1.5)), "is 1.5; expected a count of steps"),
        (changed(step=-1), "is -1; expected a count of steps"),
        (changed(step=torch.ones(2)), "expected a count of steps"),
        (changed(exp_avg=3), "expected Adam's step"),
        (changed(exp_avg=torch.ones(3)), "has shape"),
        ({**good, "state": {99: good["state"][0]}}, "99, which is in no group"),
        (
            {**good, "param_groups": [{"lr": 1}]},
            r"last\.pt is damaged or of another form \(KeyError: 'params'\)",
        ),
    ]
    for optim, text in cases:
        torch.save({"model": model.state_dict(), "optimizer": optim}, tmp_path / "last.pt")
        with pytest.raises(ValueError, match=text):
            open_foreign(tmp_path / "last.pt", _names(model))


def test_folders_with_a_file_for_each(tmp_path: Path) -> None:
    model, optimizer = _trained()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0] * 2)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert open_foreign(tmp_path, _names(model)) is None, "no model"
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert _check(tmp_path, model, optimizer).scheduler == scheduler.state_dict()
    (tmp_path / "pytorch_model.bin").unlink()
    tensors = dict(model.state_dict())
    weight_map = {name: f"pytorch_model-{index % 2}.bin" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        torch.save(
            {name: tensors[name] for name in tensors if weight_map[name] == file}, tmp_path / file
        )
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _check(tmp_path, model, optimizer)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    save(tmp_path / "model.safetensors", tensors)
    assert _check(tmp_path, model, optimizer).scheduler == scheduler.state_dict()
    _check(tmp_path / "model.safetensors", model, None)
    save(tmp_path / "adapter.safetensors", {"other": torch.ones(1)})
    _check(tmp_path, model, optimizer)
    (tmp_path / "model.safetensors").unlink()
    parts = {"model-1.safetensors": list(tensors)[::2], "model-2.safetensors": list(tensors)[1::2]}
    for file, names in parts.items():
        save(tmp_path / file, {name: tensors[name] for name in names})
    weight_map = {name: file for file, names in parts.items() for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    save(tmp_path / "adapter.safetensors", {"other": torch.ones(1)})
    _check(tmp_path, model, optimizer)
    for text in (
        '{"weight_map": {"gain": "../model-1.safetensors"}}',
        '{"weight_map"',
        "[]",
        '{"weight_map": {"a": 3}}',
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match="is torn or no index"):
            open_foreign(tmp_path, _names(model))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": of_optimizer}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    assert _check(tmp_path, model, optimizer).scheduler == scheduler.state_dict(), (
        "as Accelerate saves for FSDP"
    )
    # torch.distributed.checkpoint makes texts of the numbers of optimizer.state_dict()
    numbered = tmp_path / "numbered"
    dcp.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        checkpoint_id=numbered,
        no_dist=True,
    )
    _check(numbered, model, optimizer)
    (tmp_path / "manifest.json").touch()
    assert open_foreign(tmp_path, _names(model)) is None, "shardcore's own"
    (tmp_path / "text").write_text("text")
    assert open_foreign(tmp_path / "text", _names(model)) is None


def _opened(path: Path, names: list[str], what: str) -> bool:
    """Read all of a checkpoint; returns False if it is refused. Any error but those that are
    meant for it is raised.
    """
    try:
        source = open_foreign(path, names)
        if source is not None and all(prod(shape) < 10_000 for shape in source.shapes.values()):
            read_all(source)
    except (ValueError, OSError):
        return False
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    return True


@pytest.mark.more
def test_files_with_other_things_in_them_are_errors(tmp_path: Path) -> None:
    model, optimizer = _trained()
    tree = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"a": 1},
        "epoch": (1, [2]),
    }
    opened = 0
    for what, version in replaced(tree, 60):
        torch.save(version, tmp_path / "last.pt")
        opened += _opened(tmp_path / "last.pt", _names(model), what)
    assert 6 < opened < 42


# --- torch.distributed.checkpoint -----------------------------------------------------------------


class _App(Stateful):
    """The state of an application, as torch's tutorials save it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def _one_dimensional() -> Net:
    """The model without a scalar parameter, which FSDP2 does not take."""
    model = make_net()
    model.gain = nn.Parameter(torch.ones(1))
    return model


def _fsdp2(rank: int, world_size: int, folder: str) -> None:
    """Train with FSDP2, save in every form, and in full.pt what get_state_dict gathers."""
    model = _one_dimensional()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-2)
    _train(model, optimizer, rank)
    weights, states = get_state_dict(model, optimizer)
    _, flat = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    forms: dict[str, tuple[Any, Any]] = {
        "model and optim": (
            {"model": weights, "optim": states, "epoch": 3, "scheduler": {"last": 2}},
            FileSystemWriter,
        ),
        "app": ({"app": _App(model, optimizer)}, FileSystemWriter),
        "flattened": ({"model": weights, "optimizer": flat}, FileSystemWriter),
        "a file an item": (
            {"net": weights, "opt": states},
            partial(FileSystemWriter, single_file_per_rank=False, thread_count=2),
        ),
        "model": (weights, FileSystemWriter),
        "safetensors": (weights, partial(HuggingFaceStorageWriter, save_distributed=True)),
        "consolidated": (
            get_model_state_dict(model),
            partial(HuggingFaceStorageWriter, save_distributed=True, enable_consolidation=True),
        ),
    }
    for form in FORMS:
        state, writer = forms[form]
        dcp.save(state, storage_writer=writer(f"{folder}/{form}"))
    had = get_state_dict(model, optimizer, options=FULL)
    if rank == 0:
        torch.save(had, f"{folder}/full.pt")


FORMS = [
    "model and optim",
    "app",
    "flattened",
    "a file an item",
    "model",
    "safetensors",
    "consolidated",
]


@pytest.fixture(scope="module")
def of_fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("safetensors", reason="HuggingFaceStorageWriter needs it")
    folder = tmp_path_factory.mktemp("fsdp2")
    run_ranks(3, _fsdp2, str(folder))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_fsdp2(of_fsdp2: Path, form: str) -> None:
    weights, optim = torch.load(of_fsdp2 / "full.pt", weights_only=False)
    names = list(dict(_one_dimensional().named_parameters()))
    source = open_foreign(of_fsdp2 / form, names[::-1])
    assert source is not None
    states = {
        name: {k: v for k, v in state.items() if k != "step"}
        for name, state in optim["state"].items()
    }
    with_states = form not in ("model", "safetensors", "consolidated")
    assert differences(source, weights, states if with_states else {}) == []
    assert source.steps == (dict.fromkeys(names, 3) if with_states else {})
    if with_states:
        assert source.groups is not None
        for found, group in zip(source.groups, optim["param_groups"], strict=True):
            assert {**found, "params": sorted(found["params"])} == {
                **group,
                "params": sorted(group["params"]),
            }
    else:
        assert source.groups is None
    assert source.client_state == ({"epoch": 3} if form == "model and optim" else None)
    assert source.scheduler == ({"last": 2} if form == "model and optim" else None)


def test_ranks_parts_in_another_order_are_seen(of_fsdp2: Path, tmp_path: Path) -> None:
    """What a reader would return that exchanges two parts of a tensor."""
    weights, _ = torch.load(of_fsdp2 / "full.pt", weights_only=False)
    folder = Path(shutil.copytree(of_fsdp2 / "model", tmp_path / "model"))
    _change(folder, _exchange)
    source = open_foreign(folder, list(weights))
    assert source is not None
    assert differences(source, weights, {}) == ["inp.weight.weight"]


def _exchange(metadata: Any) -> None:
    """Exchange the places of two parts of inp.weight."""
    places = metadata.storage_data
    first, second, _ = (index for index in places if index.fqn == "inp.weight")
    places[first], places[second] = places[second], places[first]


def _boxes(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    tensor = torch.randn(7, 5)
    placements = {
        "both": (Shard(0), Shard(1)),
        "columns": (Replicate(), Shard(1)),
        "rows": (Shard(0), Replicate()),
        "rows twice": (Shard(0), Shard(0)),
    }
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, where) for name, where in placements.items()
    }
    assert all(isinstance(value, DTensor) for value in state.values())
    dcp.save(
        {"model": {**state, "scalar": torch.tensor(2.0), "empty": torch.empty(0, 3)}},
        checkpoint_id=folder,
    )


def test_tensors_sharded_in_two_dimensions(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run_ranks(4, _boxes, str(folder))
    torch.manual_seed(0)
    tensor = torch.randn(7, 5)
    names = ["both", "columns", "rows", "rows twice"]
    source = open_foreign(folder, names)
    assert source is not None
    had = {**dict.fromkeys(names, tensor), "scalar": torch.tensor(2.0), "empty": torch.empty(0, 3)}
    assert differences(source, had, {}) == []
    for name in names:
        for start in range(33):
            assert torch.equal(
                source.read(name, "weight", start, 3), tensor.view(-1)[start : start + 3]
            ), name
        with pytest.raises(ValueError, match="expected at most 35"):
            source.read(name, "weight", 33, 3)
        with pytest.raises(ValueError, match="has no exp_avg of"):
            source.read(name, "exp_avg", 0, 1)
    with pytest.raises(ValueError, match="has no other"):
        source.read("other", "weight", 0, 1)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[str]]:
    """A checkpoint of one process."""
    model, optimizer = _trained()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save(
        {"model": of_model, "optim": of_optimizer, "epoch": 3},
        checkpoint_id=tmp_path / "saved",
        no_dist=True,
    )
    return tmp_path / "saved", _names(model)


def _change(folder: Path, change: Callable[[Any], Any]) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))


def test_metadata_that_leads_elsewhere_or_lacks_parts_is_refused(
    saved: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, names = saved
    shutil.copy(folder / "__0_0.distcp", tmp_path / "outside.distcp")

    def places(metadata: Any, **changes: Any) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, **changes)

    def first_chunk(metadata: Any, **changes: Any) -> None:
        entry = metadata.state_dict_metadata["model.inp.weight"]
        entry.chunks[0] = replace(entry.chunks[0], **changes)

    def remove(metadata: Any) -> None:
        metadata.storage_data = {
            k: v for k, v in metadata.storage_data.items() if k.fqn != "model.inp.weight"
        }

    cases: list[tuple[Callable[[Any], Any], str]] = [
        (
            lambda metadata: places(metadata, relative_path="../outside.distcp"),
            "names the file '../outside.distcp'",
        ),
        (
            lambda metadata: places(metadata, relative_path=str(tmp_path / "outside.distcp")),
            "names the file",
        ),
        (lambda metadata: places(metadata, relative_path="other.distcp"), "other.distcp"),
        (lambda metadata: places(metadata, offset=1 << 40), "is it cut off"),
        (lambda metadata: places(metadata, length=1 << 40), "is it cut off"),
        (lambda metadata: places(metadata, offset=-5), "is it cut off"),
        (
            lambda metadata: places(metadata, transform_descriptors=["zstd"]),
            "without extensions of the storage",
        ),
        (
            lambda metadata: first_chunk(metadata, sizes=torch.Size([24, 9])),
            "parts of 216 elements; expected 240",
        ),
        (lambda metadata: first_chunk(metadata, sizes=torch.Size([240])), "inside shape"),
        (
            lambda metadata: first_chunk(metadata, offsets=torch.Size([1, 0])),
            "no file for the part at",
        ),
        (remove, "no file for the part at"),
        (lambda metadata: {"a": 1}, "damaged or of another form"),
        (lambda metadata: [metadata], "damaged or of another form"),
    ]
    good = (folder / ".metadata").read_bytes()
    for change, text in cases:
        _change(folder, change)
        with pytest.raises((ValueError, OSError), match=text):
            open_foreign(folder, names)
        (folder / ".metadata").write_bytes(good)
    assert open_foreign(folder, names) is not None


@pytest.mark.more
def test_metadata_with_other_things_in_them_are_errors(saved: tuple[Path, list[str]]) -> None:
    folder, names = saved
    metadata = FileSystemReader(folder).read_metadata()
    opened = 0
    for what, version in replaced(metadata, 40):
        if "memory_format" in what:
            continue  # torch pickles none but its own
        (folder / ".metadata").write_bytes(pickle.dumps(version))
        opened += _opened(folder, names, what)
    assert 1 < opened < 28


def test_hostile_metadata_and_items_are_not_run(
    saved: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, names = saved
    hostile = (
        b"\x80\x02cposix\nsystem\nX\x15\x00\x00\x00touch "
        + str(tmp_path / "ran").encode()[:15].ljust(15)
        + b"\x85R."
    )
    (folder / ".metadata").write_bytes(hostile)
    with pytest.raises(ValueError, match=r"\.metadata names posix\.system, which is refused"):
        open_foreign(folder, names)

    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    model, _ = _trained()
    dcp.save(
        {"model": model.state_dict(), "evil": {"x": Evil()}},
        checkpoint_id=tmp_path / "evil",
        no_dist=True,
    )
    with pytest.raises(
        ValueError, match=r"__0_0\.distcp at \d+ .* names builtins\.getattr, which is refused"
    ):
        open_foreign(tmp_path / "evil", names)
    assert not (tmp_path / "ran").exists()


def test_damaged_safetensors_are_errors(tmp_path: Path) -> None:
    model, _ = _trained()
    path = save(tmp_path / "model.safetensors", dict(model.state_dict()))
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    assert (
        50 < read_damaged(path, 200, lambda: read_all(open_foreign(tmp_path, _names(model)))) <= 200
    )
    for version in (
        raw[:4],
        raw[: 8 + size - 1],
        (1 << 60).to_bytes(8, "little") + raw[8:],
        raw[:-1],
        b"",
    ):
        path.write_bytes(version)
        with pytest.raises(ValueError, match="torn or no safetensors file"):
            open_foreign(tmp_path, _names(model))
