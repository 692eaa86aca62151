"""Checkpoints of torch's, as torch writes them in the test: torch.save,
torch.distributed.checkpoint, and usual folders.
"""

import json
import pickle
import shutil
from collections.abc import Callable, Collection
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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardcore.checkpoint.foreign.deepspeed_files import open_foreign
from shardcore.checkpoint.source import Source
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
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for group in _groups(model) for param in group["params"]]


@pytest.fixture(scope="module")
def trained() -> tuple[Net, torch.optim.Optimizer]:
    return _trained()


def _saved(folder: Path, value: Any) -> Path:
    torch.save(value, folder / "last.pt")
    return folder / "last.pt"


def _opened(path: Path, names: Collection[str]) -> Source:
    source = open_foreign(path, names)
    assert source is not None
    return source


def _check(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    names: list[str] | None = None,
) -> Any:
    """Compare a checkpoint with what was saved; returns its source."""
    source = _opened(path, _names(model) if names is None else names)
    all_names = {param: name for name, param in model.named_parameters()}
    if optimizer is None:
        assert differences(source, model.state_dict(), {}) == []
        assert (source.groups, source.steps) == (None, {})
        return source
    states = {
        all_names[param]: {key: value for key, value in state.items() if key != "step"}
        for param, state in optimizer.state.items()
    }
    assert differences(source, model.state_dict(), states) == []
    assert source.steps == dict.fromkeys(all_names.values(), 3)
    assert source.groups == [
        {key: value for key, value in group.items() if key != "param_names"}
        | {"params": [all_names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return source


# --- torch.save -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "amsgrad"), [(torch.optim.AdamW, False), (torch.optim.Adam, True)]
)
def test_a_file_with_model_and_optimizer(tmp_path: Path, kind: Any, amsgrad: bool) -> None:
    model, optimizer = _trained(kind, amsgrad=amsgrad)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).state_dict()
    weights, states = model.state_dict(), optimizer.state_dict()
    saved = {"model": weights, "optimizer": states, "lr_scheduler": scheduler, "epoch": 3}
    rng = torch.get_rng_state()
    source = _check(_saved(tmp_path, saved | {"rng": rng}), model, optimizer)
    assert source.scheduler == scheduler
    assert source.client_state["epoch"] == 3
    assert torch.equal(source.client_state["rng"], rng)
    assert source.groups[0]["decoupled_weight_decay"] == (kind is torch.optim.AdamW)


def test_names_in_a_file_need_no_order(tmp_path: Path) -> None:
    model = make_net()
    # in no order of the model's
    weights = [(name, p) for name, p in model.named_parameters() if p.ndim > 1][::-1]
    others = [(name, p) for name, p in model.named_parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "lr": 0.5}], lr=1e-2)
    _train(model, optimizer)
    path = _saved(tmp_path, {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()})
    source = _check(path, model, optimizer, sorted(dict(model.named_parameters())))
    assert source.client_state is None


def test_other_orders_of_names(trained: Any, tmp_path: Path) -> None:
    """They are refused where shapes tell. Two parameters of one shape exchanged no reader can
    know, and the comparison does.
    """
    model, optimizer = trained
    path = _saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    names = _names(model)
    for other_names, text in (
        (
            list(dict(model.named_parameters())),
            r"has shape .*; expected one shape\. Pass names in",
        ),
        (names[1:], r"numbers \d+ parameters, but \d+ names are given"),
        (["a", "b"], r"contains no name of the model \(its keys are 'model', 'optimizer'\)"),
    ):
        with pytest.raises(ValueError, match=text):
            open_foreign(path, other_names)
    first, second = names.index("blocks.0.norm.weight"), names.index("blocks.1.norm.weight")
    names[first], names[second] = names[second], names[first]
    with pytest.raises(AssertionError):
        _check(path, model, optimizer, names)


def _prefixed(prefix: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: weight for name, weight in weights.items()}


Tree = Callable[[dict[str, Any], dict[str, Any]], Any]  # of a model's and an optimizer's state
LAYOUTS: dict[str, tuple[Tree, Any, Any]] = {  # with client_state and scheduler
    "beside the weights": (lambda w, o: {**w, "optimizer": o, "epoch": 1}, {"epoch": 1}, None),
    "in a dict": (
        lambda w, o: {"state": {"net": w, "opt": o, "scheduler": {"last": 2}, "seed": 1}},
        {"state": {"seed": 1}},
        {"last": 2},
    ),
    "Lightning": (
        lambda w, o: {
            "state_dict": w,
            "optimizer_states": [o],
            "callbacks": [{"a": 1}],
            "lr_schedulers": [{"last": 2}],
        },
        {"callbacks": [{"a": 1}]},
        {"last": 2},
    ),
    # as of torch.compile
    "compiled": (
        lambda w, o: {
            "model": {k.replace("blocks.1.", "blocks.1._orig_mod."): v for k, v in w.items()},
            "optim": o,
        },
        None,
        None,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_a_file(trained: Any, tmp_path: Path, layout: str) -> None:
    model, optimizer = trained
    tree, client_state, scheduler = LAYOUTS[layout]
    path = _saved(tmp_path, tree(model.state_dict(), optimizer.state_dict()))
    source = _check(path, model, optimizer)
    assert (source.client_state, source.scheduler) == (client_state, scheduler)


@pytest.mark.parametrize(
    "prefix",
    # the last: of a LightningModule
    ["module.", "_orig_mod.", "module._orig_mod.", "net.inner.", "model."],
)
def test_wrappers_of_the_model(trained: Any, tmp_path: Path, prefix: str) -> None:
    model, optimizer = trained
    weights = _prefixed(prefix, model.state_dict())
    path = _saved(tmp_path, {"model": weights, "optim": optimizer.state_dict()})
    _check(path, model, optimizer)


def test_averages_beside_the_model(trained: Any, tmp_path: Path) -> None:
    model, optimizer = trained
    weights, states = model.state_dict(), optimizer.state_dict()
    assert _check(_saved(tmp_path, weights), model, None).client_state is None
    ema = {name: weight + 1 for name, weight in weights.items()}
    both = _prefixed("model.", weights) | _prefixed("ema_model.", ema)
    source = _opened(_saved(tmp_path, {"state_dict": both}), _names(model))
    assert same_bits(whole(source, "gain", "weight"), model.gain.detach())
    assert "ema_model.gain" in source.shapes, "it is unexpected, not left out"
    path = _saved(tmp_path, {"model": weights, "ema": ema, "optimizer": states})
    assert torch.equal(_check(path, model, optimizer).client_state["ema"]["gain"], ema["gain"])
    for saved, text in (
        ({"a": weights, "ema": ema}, r"in 2 places \(a, ema\)"),
        ({"model": weights, "d": states, "g": states | {}}, r"optimizers in 2 places \(d, g\)"),
        ({"epoch": 3}, r"contains no name of the model \(its keys are 'epoch'\); expected one"),
        ({}, r"last\.pt contains an empty dict; expected one state dict"),
        (
            {"model": weights, "optimizer": {"state": {}, "param_groups": [{"lr": 1}]}},
            r"last\.pt is damaged or in another format \(KeyError: 'params'\)",
        ),
        ([1, 2], "contains a list; expected a dict"),
    ):
        with pytest.raises(ValueError, match=text):
            open_foreign(_saved(tmp_path, saved), _names(model))


@pytest.mark.parametrize(
    "tree",
    [
        lambda w, ema: {"model": w, "ema": ema, "rng": torch.zeros(3)},
        lambda w, ema: {"ema": {"state_dict": w}, "average": ema},
        lambda w, ema: {"weights": w, "rng": torch.zeros(3)},
        lambda w, ema: {**w, "train_state": {"seen": torch.zeros(3)}},
        lambda w, ema: {"model": _prefixed("module.", w)},
    ],
)
def test_weights_are_found_without_names(trained: Any, tmp_path: Path, tree: Tree) -> None:
    """The optimizer's states have no names then."""
    weights = {name: torch.ones(3, 2) for name in ("a", "b")}
    saved = tree(weights, {name: weight + 1 for name, weight in weights.items()})
    path = _saved(tmp_path, {**saved, "optimizer": trained[1].state_dict()})
    assert differences(_opened(path, ()), weights, {}) == []


def test_two_models_are_not_one_without_names(tmp_path: Path) -> None:
    tree = {"disc": {"a": torch.ones(2)}, "gen": {"a": torch.ones(2), "b": torch.ones(2)}}
    with pytest.raises(
        ValueError,
        match=r"in 2 places \(disc, gen\); expected one state dict under model, state_dict",
    ):
        open_foreign(_saved(tmp_path, tree), ())


def test_tied_weights_are_known_by_their_memory(tmp_path: Path) -> None:
    tied = torch.randn(4, 3)
    weights = {"embed": tied, "head": tied, "other": tied.clone(), "part": tied[:2]}
    weights["flipped"] = tied.t()
    source = _opened(_saved(tmp_path, {"model": weights}), list(weights))
    assert source.tied == {"head": "embed"}
    del weights["embed"]
    states = {0: {"step": 3.0, "exp_avg": tied + 1, "exp_avg_sq": tied + 2, "master": tied + 3}}
    adam = {"state": states, "param_groups": [{"params": [0]}]}
    path = _saved(tmp_path, {"model": weights, "optimizer": adam})
    source = _opened(path, {"embed": ["head"]})
    assert source.steps == {"head": 3}, "the name that is there"
    assert source.keys("head") == ("weight", "exp_avg", "exp_avg_sq")
    assert same_bits(whole(source, "head", "weight"), tied + 3), "the master"


def test_large_tensors_beside_the_model_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    average = {"decay": 0.9, "shadow": [torch.zeros(1 << 20) for _ in range(5)]}
    tree = {"model": {"a": torch.ones(2)}, "ema": average, "rng": torch.ones(9), "epoch": 1}
    source = _opened(_saved(tmp_path, tree), ["a"])
    assert source.client_state is not None
    assert set(source.client_state) == {"rng", "epoch"}
    assert [
        record.getMessage().partition("last.pt: ")[2]
        for record in caplog.records
        if record.name == "shardcore"
    ] == ["the tensors of ema are unused, and left out of client_state"]


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
    path = _saved(tmp_path, {"model": model.state_dict(), "scaler": scaler})
    source = _opened(path, ["0.weight", "0.bias", "1.weight", "1.bias"])
    assert source.loss_scale == {"scale": 1024.0, "stable_steps": 7, "hysteresis_left": 1}
    assert source.extra_state == {"0": {"calls": 3}}
    assert set(source.shapes) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert source.client_state is None


@pytest.mark.parametrize(
    "kind",
    [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad, torch.optim.Adamax],
)
def test_other_optimizers_are_refused(tmp_path: Path, kind: Any) -> None:
    model, optimizer = _trained(kind)
    path = _saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(ValueError, match="expected Adam's step, exp_avg and exp_avg_sq"):
        open_foreign(path, _names(model))


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ({0: {"step": torch.tensor(1.5)}}, "is 1.5; expected a count of steps"),
        ({0: {"step": -1}}, "is -1; expected a count of steps"),
        ({0: {"step": torch.ones(2)}}, "expected a count of steps"),
        ({0: {"exp_avg": 3}}, "expected Adam's step"),
        ({0: {"exp_avg": torch.ones(3)}}, "has shape"),
        ({99: {}}, "99, which is in no group"),
    ],
)
def test_damaged_states_are_refused(
    trained: Any, tmp_path: Path, states: dict[int, Any], text: str
) -> None:
    model, optimizer = trained
    adam = optimizer.state_dict()
    adam["state"] |= {number: adam["state"][0] | state for number, state in states.items()}
    path = _saved(tmp_path, {"model": model.state_dict(), "optimizer": adam})
    with pytest.raises(ValueError, match=text):
        open_foreign(path, _names(model))


def test_folders_with_a_file_for_each(trained: Any, tmp_path: Path) -> None:
    model, optimizer = trained
    names, tensors = _names(model), dict(model.state_dict())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0] * 2).state_dict()

    def check() -> None:
        assert _check(tmp_path, model, optimizer).scheduler == scheduler

    def split(kind: str, index: str, save: Callable[[Any, Path], Any]) -> None:
        files = {name: f"part-{number % 2}.{kind}" for number, name in enumerate(tensors)}
        for file in set(files.values()):
            save({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file)
        (tmp_path / index).write_text(json.dumps({"weight_map": files}))

    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert open_foreign(tmp_path, names) is None, "no model"
    torch.save(scheduler, tmp_path / "scheduler.pt")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    check()
    (tmp_path / "pytorch_model.bin").unlink()
    split("bin", "pytorch_model.bin.index.json", torch.save)
    check()
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    save(tmp_path / "model.safetensors", tensors)
    check()
    _check(tmp_path / "model.safetensors", model, None)
    save(tmp_path / "adapter.safetensors", {"other": torch.ones(1)})
    check()
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    split("safetensors", index.name, lambda part, file: save(file, part))
    check()
    for text in (
        '{"weight_map": {"gain": "../model-1.safetensors"}}',
        '{"weight_map"',
        "[]",
        '{"weight_map": {"a": 3}}',
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match="is torn or not an index"):
            open_foreign(tmp_path, names)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp_save = partial(dcp.save, no_dist=True)
    dcp_save({"model": of_model}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0")
    dcp_save({"optimizer": of_optimizer}, checkpoint_id=tmp_path / "optimizer_0")
    check()  # as Accelerate saves for FSDP
    # torch.distributed.checkpoint makes texts of the numbers of optimizer.state_dict()
    numbered = {"model": tensors, "optimizer": optimizer.state_dict()}
    dcp_save(numbered, checkpoint_id=tmp_path / "numbered")
    _check(tmp_path / "numbered", model, optimizer)
    (tmp_path / "manifest.json").touch()
    assert open_foreign(tmp_path, names) is None, "shardcore's own"
    (tmp_path / "text").write_text("text")
    assert open_foreign(tmp_path / "text", names) is None


def _opens(path: Path, names: list[str], what: str) -> bool:
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
def test_files_with_other_things_in_them_are_errors(trained: Any, tmp_path: Path) -> None:
    model, optimizer = trained
    tree = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"a": 1},
        "epoch": (1, [2]),
    }
    opened = 0
    for what, version in replaced(tree, 60):
        path = _saved(tmp_path, version)
        opened += _opens(path, _names(model), what)
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


FORMS = ["model and optim", "app", "flattened", "a file an item", "model", "safetensors"]
FORMS += ["consolidated"]


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
    source = _opened(of_fsdp2 / form, names[::-1])
    extra = form == "model and optim"
    assert source.client_state == ({"epoch": 3} if extra else None)
    assert source.scheduler == ({"last": 2} if extra else None)
    if form in ("model", "safetensors", "consolidated"):
        assert differences(source, weights, {}) == []
        assert (source.groups, source.steps) == (None, {})
        return
    states = {name: dict(state) for name, state in optim["state"].items()}
    assert {name: state.pop("step").item() for name, state in states.items()} == source.steps
    assert source.steps == dict.fromkeys(names, 3)
    assert differences(source, weights, states) == []
    by_name = [
        [{**group, "params": sorted(group["params"])} for group in groups or ()]
        for groups in (source.groups, optim["param_groups"])
    ]
    assert by_name[0] == by_name[1]


def test_ranks_parts_in_another_order_are_seen(of_fsdp2: Path, tmp_path: Path) -> None:
    """What a reader would return that exchanges two parts of a tensor."""
    weights, _ = torch.load(of_fsdp2 / "full.pt", weights_only=False)
    folder = Path(shutil.copytree(of_fsdp2 / "model", tmp_path / "model"))
    _change(folder, _exchange)
    assert differences(_opened(folder, list(weights)), weights, {}) == ["inp.weight.weight"]


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
    state = {name: distribute_tensor(tensor, mesh, where) for name, where in placements.items()}
    state |= {"scalar": torch.tensor(2.0), "empty": torch.empty(0, 3)}
    dcp.save({"model": state}, checkpoint_id=folder)


def test_tensors_sharded_in_two_dimensions(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run_ranks(4, _boxes, str(folder))
    torch.manual_seed(0)
    tensor = torch.randn(7, 5)
    names = ["both", "columns", "rows", "rows twice"]
    source = _opened(folder, names)
    had = {**dict.fromkeys(names, tensor), "scalar": torch.tensor(2.0), "empty": torch.empty(0, 3)}
    assert differences(source, had, {}) == []
    for name in names:
        for chunk in range(1, 9):
            assert same_bits(whole(source, name, "weight", chunk), tensor), name
    for name, key, start, text in (
        ("both", "weight", 33, "expected at most 35"),
        ("both", "exp_avg", 0, "contains no exp_avg of"),
        ("other", "weight", 0, "contains no other"),
    ):
        with pytest.raises(ValueError, match=text):
            source.read(name, key, start, 3)


@pytest.fixture
def saved(trained: Any, tmp_path: Path) -> tuple[Path, list[str]]:
    """A checkpoint of one process."""
    of_model, of_optimizer = get_state_dict(*trained)
    tree = {"model": of_model, "optim": of_optimizer, "epoch": 3}
    dcp.save(tree, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved", _names(trained[0])


def _change(folder: Path, change: Callable[[Any], Any]) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))


def _places(metadata: Any, **changes: Any) -> None:
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, **changes)


def _first_chunk(metadata: Any, **changes: Any) -> None:
    chunks = metadata.state_dict_metadata["model.inp.weight"].chunks
    chunks[0] = replace(chunks[0], **changes)


def _lose(metadata: Any) -> None:
    """Remove the places of a tensor."""
    for index in [index for index in metadata.storage_data if index.fqn == "model.inp.weight"]:
        del metadata.storage_data[index]


def _repeat(metadata: Any) -> None:
    """Give all items the keys of one."""
    ways = metadata.planner_data
    metadata.planner_data = dict.fromkeys(ways, ways["model.inp.weight"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (partial(_places, relative_path="../outside.distcp"), r"the file '\.\./outside\.distcp'"),
        (partial(_places, relative_path="/outside.distcp"), "names the file"),
        (partial(_places, relative_path="other.distcp"), "other.distcp"),
        (partial(_places, offset=1 << 40), "may be cut off"),
        (partial(_places, length=1 << 40), "may be cut off"),
        (partial(_places, offset=-5), "may be cut off"),
        (partial(_places, transform_descriptors=["zstd"]), "without extensions of the storage"),
        (partial(_first_chunk, sizes=torch.Size([24, 9])), "hold 216 elements; expected 240"),
        (partial(_first_chunk, sizes=torch.Size([240])), "outside of shape"),
        (partial(_first_chunk, offsets=torch.Size([1, 0])), "no file for the part at"),
        (_lose, "no file for the part at"),
        (_repeat, "an item is below another one, 'inp.weight'"),
        (lambda metadata: {"a": 1}, "damaged or in another format"),
        (lambda metadata: [metadata], "damaged or in another format"),
    ],
)
def test_metadata_that_leads_elsewhere_or_lacks_parts_is_refused(
    saved: tuple[Path, list[str]], tmp_path: Path, change: Callable[[Any], Any], text: str
) -> None:
    folder, names = saved
    shutil.copy(folder / "__0_0.distcp", tmp_path / "outside.distcp")
    assert open_foreign(folder, names) is not None
    _change(folder, change)
    with pytest.raises((ValueError, OSError), match=text):
        open_foreign(folder, names)


@pytest.mark.more
def test_metadata_with_other_things_in_them_are_errors(saved: tuple[Path, list[str]]) -> None:
    folder, names = saved
    metadata = FileSystemReader(folder).read_metadata()
    opened = 0
    for what, version in replaced(metadata, 40):
        if "memory_format" in what:
            continue  # torch pickles none but its own
        (folder / ".metadata").write_bytes(pickle.dumps(version))
        opened += _opens(folder, names, what)
    assert 1 < opened < 28


def test_hostile_metadata_and_items_are_not_run(
    saved: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, names = saved

    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    hostile = b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R."
    tree = {"model": {name: torch.ones(1) for name in names}, "evil": {"x": Evil()}}
    dcp.save(tree, checkpoint_id=tmp_path / "evil", no_dist=True)
    for path, raw, text in (
        (folder, hostile, r"\.metadata names posix\.system, which is refused"),
        (folder, pickle.dumps(Evil()), r"\.metadata names builtins\.getattr, which is refused"),
        (tmp_path / "evil", None, r"__0_0\.distcp at \d+ .* names builtins\.getattr, which is"),
    ):
        if raw is not None:
            (path / ".metadata").write_bytes(raw)
        with pytest.raises(ValueError, match=text):
            open_foreign(path, names)
    assert not (tmp_path / "ran").exists()


def test_a_tensor_in_two_safetensors_files_is_refused(tmp_path: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        save(tmp_path / file, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match="and elsewhere, in the same place; expected it once"):
        open_foreign(tmp_path, ["a"])


def test_damaged_safetensors_are_errors(trained: Any, tmp_path: Path) -> None:
    model, _ = trained
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
        with pytest.raises(ValueError, match="torn or not a safetensors file"):
            open_foreign(tmp_path, _names(model))
