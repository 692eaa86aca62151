"""Checkpoints that DeepSpeed 0.19.8 writes in the test, compared bit for bit with what its
engine had; and refused ones.
"""

import fcntl
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.checkpoint.foreign.deepspeed_files import open_foreign
from shardcore.checkpoint.source import Source
from tests.support.foreign import Model, differences, read_all, replaced, same_bits, whole
from tests.support.scripts import ROOT, run_forked

pytestmark = pytest.mark.more  # two processes of DeepSpeed's write all cases
ZERO = (
    *(
        "zero1_fp32",
        "zero1_bf16",
        "zero1_bf16_optimizer",
        "zero2_bf16",
        "zero2_fp16",
        "zero2_round_robin",
        "zero2_aligned",
    ),
    *("zero2_elastic", "zero3_bf16", "zero3_fp16"),
)
# the optimizer's order
NAMES = (
    "inp.weight",
    "mid.weight",
    "head.weight",
    "inp.bias",
    "norm.weight",
    "norm.bias",
    "mid.bias",
)
UNIVERSAL = ("zero1_bf16", "zero2_fp16", "zero3_bf16")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DeepSpeed's checkpoints, written once by two ranks: see
    tests/support/deepspeed_writer.py.
    """
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed's checkpoints need deepspeed")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "deepspeed"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:  # other workers wait, and use what the first one wrote
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("DS_ACCELERATOR", "cpu")
                run_forked("tests.support.deepspeed_writer", str(folder), ranks=2, folder=ROOT)
            (folder / "done").touch()
    return folder


def _opened(path: Path) -> Source:
    source = open_foreign(path, NAMES)
    assert source is not None
    return source


def _had(written: Path, case: str) -> dict[str, Any]:
    """What the engine had; full names, buffers and weights that share memory as in a state dict."""
    had: dict[str, Any] = torch.load(written / f"{case}.pt", weights_only=True)
    # the same training; DeepSpeed's own calls find states by a wrong order
    if case in ("zero2_round_robin", "zero2_aligned"):
        had |= {key: _had(written, "zero2_bf16")[key] for key in ("weights", "states")}
    for of in (had["weights"], had["states"]):
        of["tied.weight"] = of["head.weight"]
    had["weights"] |= had["buffers"]
    return had


@pytest.mark.parametrize("case", ZERO)
def test_every_value_is_what_the_engine_had(written: Path, case: str) -> None:
    had = _had(written, case)
    for path in (written / case, written / case / "global_step3"):
        source = _opened(path)
        assert differences(source, had["weights"], had["states"]) == []
        assert source.steps == dict.fromkeys([*NAMES, "tied.weight"], 3)
    for name, weight in had["consolidated"].items():  # zero_to_fp32's, from the same files
        assert torch.equal(whole(source, name, "weight").float(), weight), name
    left_out = {"zero1": 2, "zero2": 0, "zero3": 0}[case[:5]]  # frozen parameters, of stage 1
    assert len(had["consolidated"]) == (
        0 if case == "zero1_bf16_optimizer" else len(had["weights"]) - left_out
    )


@pytest.mark.parametrize("case", ZERO)
def test_options_counts_and_plain_data(written: Path, case: str) -> None:
    had = _had(written, case)
    source = _opened(written / case)
    if case == "zero2_elastic":
        assert source.groups is None  # it has none
    else:
        assert source.groups is not None
        for group, options, names in zip(source.groups, had["groups"], had["names"], strict=True):
            assert {key: value for key, value in group.items() if key != "params"} == options
            assert sorted(group["params"]) == sorted(names)
        assert source.groups[0]["betas"] == (0.8, 0.99)
    assert source.scheduler == had["scheduler"]
    assert dict(source.counters) == had["counters"] | {"global_samples": 12}
    assert source.tied == {"tied.weight": "head.weight"}
    assert source.client_state is not None
    assert {key: value for key, value in source.client_state.items() if key != "rng"} == {
        "epoch": 3,
        "best": float("inf"),
        "args": {"lr": 0.1},
    }
    assert source.client_state["rng"].shape == torch.get_rng_state().shape
    scaler = had["scaler"]
    assert (scaler is not None) == ("fp16" in case or case == "zero2_elastic")
    if scaler is not None:
        stable = scaler["cur_iter"] - scaler["last_overflow_iter"] - 1
        assert source.loss_scale == {
            "scale": scaler["cur_scale"],
            "stable_steps": stable,
            "hysteresis_left": 2,
        }
        assert source.loss_scale["scale"] == 512.0  # it began at 256 and has doubled
    else:
        assert source.loss_scale is None


def test_frozen_parameters_are_known(written: Path) -> None:
    for case in ("zero1_bf16", "zero3_bf16", "zero3_bf16_universal"):
        source = _opened(written / case)
        assert source.frozen == {"frozen.weight", "frozen.bias"}, case


def test_groups_without_options_are_said_once(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_foreign(written / "zero2_elastic", NAMES)
    assert (
        len(
            [
                record
                for record in caplog.records
                if "contains no options of groups" in record.getMessage()
            ]
        )
        == 1
    )


def test_trainers_scheduler_is_beside_the_tag(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "zero3_bf16", tmp_path / "checkpoint-3")
    for file in (tmp_path / "checkpoint-3").glob("*/*_model_states.pt"):
        torch.save({**torch.load(file, weights_only=False), "lr_scheduler": None}, file)
    torch.save({"last_epoch": 3}, tmp_path / "checkpoint-3" / "scheduler.pt")
    for path in (tmp_path / "checkpoint-3", tmp_path / "checkpoint-3" / "global_step3"):
        source = _opened(path)
        assert source.scheduler == {"last_epoch": 3}


@pytest.mark.parametrize("case", UNIVERSAL)
def test_universal_checkpoints(written: Path, case: str) -> None:
    had = _had(written, case)
    if case != "zero3_bf16":  # frozen parameters are float32 there
        had["weights"] = {name: weight.float() for name, weight in had["weights"].items()}
    plain = open_foreign(written / case, NAMES)
    for path in (written / f"{case}_universal", written / f"{case}_universal" / "global_step3"):
        source = _opened(path)
        assert differences(source, had["weights"], had["states"]) == []
        assert source.steps == dict.fromkeys([*NAMES, "tied.weight"], 3)
        for what in ("groups", "scheduler", "loss_scale", "counters", "tied"):
            assert getattr(source, what) == getattr(plain, what), what


def test_stage_0_in_float32(written: Path) -> None:
    had = _had(written, "zero0_fp32")
    del had["states"]["tied.weight"]
    source = _opened(written / "zero0_fp32")
    assert differences(source, had["weights"], had["states"]) == []
    assert source.steps == dict.fromkeys(NAMES, 3)
    assert source.groups is not None
    assert [group["params"] for group in source.groups] == had["names"]
    assert source.scheduler == had["scheduler"]
    assert source.client_state is not None
    assert source.client_state["epoch"] == 3


@pytest.mark.parametrize("variant", ["count_in_state", "count_in_group"])
def test_steps_of_other_optimizers_of_deepspeed(written: Path, variant: str) -> None:
    source = _opened(written / variant)
    assert source.steps == dict.fromkeys([*NAMES, "tied.weight"], 3)
    assert source.groups is not None
    assert all("step" not in group for group in source.groups)


# --- twins: what a wrong reader would return ------------------------------------------------------


@pytest.mark.parametrize("case", ["zero1_bf16", "zero2_fp16", "zero3_bf16"])
def test_the_comparison_notices_exchanged_ranks_and_a_changed_bit(
    written: Path, tmp_path: Path, case: str
) -> None:
    had = _had(written, case)
    folder = Path(shutil.copytree(written / case / "global_step3", tmp_path / "exchanged"))
    first, second = sorted(folder.glob("*_optim_states.pt"))
    files = first.read_bytes(), second.read_bytes()
    first.write_bytes(files[1])
    second.write_bytes(files[0])
    source = _opened(folder)
    assert len(differences(source, had["weights"], had["states"])) > 5
    source = _opened(written / case)
    had["states"]["mid.bias"]["exp_avg_sq"].view(torch.int32)[12] ^= 1
    assert differences(source, had["weights"], had["states"]) == ["mid.bias.exp_avg_sq"]
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


# --- refusals -------------------------------------------------------------------------------------


def _changed(written: Path, tmp_path: Path, how: str) -> Path:
    """A checkpoint of two ranks that another layout of DeepSpeed's would look like."""
    saved = written / ("zero3_bf16" if how.startswith("zero3") else "zero1_bf16") / "global_step3"
    folder = Path(shutil.copytree(saved, tmp_path / "global_step3"))
    optim = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    model = folder / "mp_rank_00_model_states.pt"
    if how == "tensor parallel":
        shutil.copy(model, folder / "mp_rank_01_model_states.pt")
    elif how == "pipeline":
        (folder / "layer_00-model_00-model_states.pt").touch()
    elif how == "experts":
        (folder / "layer_0_expert_3_mp_rank_00_model_states.pt").touch()
    elif how == "zero3 lacks a rank":
        (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    elif how == "lacks a rank":
        optim.unlink()
    elif how == "lacks rank 0":
        (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    elif how == "of two saves":
        shutil.copy(optim, folder / optim.name.removeprefix("bf16_"))
    elif how == "no model":
        model.unlink()
    elif how == "no optimizer":
        for file in folder.glob("*optim*"):
            file.unlink()
    else:
        content = torch.load(model, weights_only=False)
        change: dict[str, Any] = {
            "mp_world_size": {"mp_world_size": 2},
            "pp_degree": {"checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 1}},
            "no module": {"module": None},
            "a shape": {
                "param_shapes": [
                    {**content["param_shapes"][0], "mid.weight": torch.Size([13, 14])},
                    content["param_shapes"][1],
                ]
            },
            "a group less": {"param_shapes": content["param_shapes"][:1]},
            "a name less": {
                "param_shapes": [content["param_shapes"][0], {"inp.bias": torch.Size([13])}]
            },
        }[how]
        torch.save(content | change, model)
    return folder


REFUSED = [
    (
        "tensor parallel",
        "mp_rank_01_model_states.pt is of model parallelism above 1, which is not supported",
    ),
    ("mp_world_size", "is of model parallelism above 1"),
    ("pp_degree", "is of a pipeline"),
    ("no module", "is of a pipeline"),
    ("pipeline", "layer_00-model_00-model_states.pt is of a pipeline"),
    ("experts", "is of a mixture of experts"),
    ("lacks a rank", "was written by 2 ranks, and .* contains 1 optimizer files"),
    ("lacks rank 0", r"optimizer files of the ranks \[1\]"),
    ("zero3 lacks a rank", "contains 1 model files; expected 2"),
    ("of two saves", "with and without bf16_"),
    ("no model", r"model files of \[\]"),
    ("no optimizer", "contains no .*optim_states.pt"),
    ("a shape", "elements over all ranks; expected"),
    ("a group less", "2 flat groups; expected 1"),
    ("a name less", "of group 1 are .*; expected 1 counts"),
]


@pytest.mark.parametrize("how, text", REFUSED, ids=[how for how, _ in REFUSED])
def test_other_layouts_and_incomplete_checkpoints_are_refused(
    written: Path, tmp_path: Path, how: str, text: str
) -> None:
    with pytest.raises((ValueError, OSError), match=text):
        open_foreign(_changed(written, tmp_path, how), NAMES)


@pytest.mark.parametrize(
    "variant, text",
    [("experts", "mixture of experts"), ("sgd", "momentum_buffer.*; expected Adam's step")],
)
def test_other_optimizers_are_refused(written: Path, variant: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        open_foreign(written / variant, NAMES)


def test_latest(written: Path, tmp_path: Path) -> None:
    assert open_foreign(tmp_path / "nothing", NAMES) is None
    assert open_foreign(tmp_path, NAMES) is None
    for text in (
        "../elsewhere",
        "",
        "a\nb",
        "x" * 2000,
        "\udcff".encode("utf-8", "surrogateescape").decode("latin1") + "\0",
    ):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(ValueError, match="expected the name of a folder beside it"):
            open_foreign(tmp_path, NAMES)
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(FileNotFoundError, match="latest names global_step9, but the folder"):
        open_foreign(tmp_path, NAMES)
    (tmp_path / "global_step9").mkdir()
    (tmp_path / "global_step9" / "manifest.json").touch()
    assert open_foreign(tmp_path, NAMES) is None, "shardcore's own"
    shutil.copytree(written / "zero1_bf16" / "global_step3", tmp_path / "global_step3")
    (tmp_path / "latest").write_text("global_step3\n")
    assert open_foreign(tmp_path, NAMES) is not None


@pytest.mark.parametrize("case", ["zero1_bf16", "zero3_fp16", "zero0_fp32"])
def test_files_with_other_things_in_them_are_errors(
    written: Path, tmp_path: Path, case: str
) -> None:
    folder = Path(shutil.copytree(written / case / "global_step3", tmp_path / "folder"))
    (path,) = (
        folder.glob("*mp_rank_00_model_states.pt")
        if case != "zero3_fp16"
        else folder.glob("*rank_0_*_model_states.pt")
    )
    opened = 0
    for what, version in replaced(torch.load(path, weights_only=False), 40):
        torch.save(version, path)
        try:
            read_all(open_foreign(folder, NAMES))
            opened += 1
        except (ValueError, OSError):
            pass
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
    assert 8 < opened < 38, "not all of a file is used"


@pytest.mark.parametrize("folder", ["zero1_fp32", "zero2_fp16_universal", "zero3_bf16"])
def test_training_goes_on_from_it(written: Path, folder: str) -> None:
    """shardcore.load takes it as it takes shardcore's own."""
    had = _had(written, folder.removesuffix("_universal"))
    torch.manual_seed(1)
    model = Model()
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim <= 1]},
    ]
    optimizer: Any = shardcore.FusedAdam(groups, lr=1.0)
    model, optimizer = shardcore.shard(model, optimizer, 3, precision="bf16")
    loaded = shardcore.load(written / folder, model, optimizer)
    assert loaded.missing == loaded.unexpected == []
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    for name, value in model.state_dict().items():
        expected = had["weights"][name].float()
        if name in frozen:
            _C.cast([rounded := torch.empty(expected.shape, dtype=torch.bfloat16)], [expected])
            expected = rounded.float()
        assert torch.equal(value.float(), expected), name
    state = optimizer.state_dict()
    for number, name in enumerate(NAMES):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state["state"][number][key], had["states"][name][key].float()), (
                name,
                key,
            )
        assert state["state"][number]["step"] == 3
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    model(torch.randn(2, 7)).sum().backward()
    optimizer.step()


def test_it_is_consolidated(written: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    had = _had(written, "zero3_bf16")
    shardcore.consolidate(written / "zero3_bf16", tmp_path, dtype=torch.float32)
    consolidated = safetensors.load_file(tmp_path / "model.safetensors")
    assert set(consolidated) == set(had["weights"]) - {"tied.weight"}
    assert all(
        torch.equal(value, had["weights"][name].float()) for name, value in consolidated.items()
    )
