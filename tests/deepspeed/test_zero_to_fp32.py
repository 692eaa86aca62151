"""zero_to_fp32 under DeepSpeed's names: float32 weights from a checkpoint, in memory, in files
and from the command line.
"""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.deepspeed import zero_to_fp32
from tests.support.models import Net, Run, make_net, train
from tests.support.ranks import run_ranks


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    model = make_net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[1].requires_grad_(False)
    model, optimizer, _ = train(0, Run(stage=2, steps=1, precision="bf16"), model)
    shardcore.save(tmp_path / "saved", model, optimizer)
    return tmp_path / "saved", {name: value.clone() for name, value in model.state_dict().items()}


def test_weights_are_float32(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, expected = saved
    state_dict = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert set(state_dict) == set(expected)
    for name, value in state_dict.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name].float()), name
    assert state_dict["blocks.2.up.weight"] is state_dict["blocks.0.up.weight"]
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        folder, "global_step1", exclude_frozen_parameters=True
    )
    assert set(state_dict) - set(trained) == {
        name for name in state_dict if name.startswith("blocks.1.")
    }
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Net(), folder)
    assert all(torch.equal(value, state_dict[name]) for name, value in model.state_dict().items())


def test_lazy_tensors_are_read_one_by_one(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, expected = saved
    state_dict = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    assert not any(isinstance(value, torch.Tensor) for value in state_dict.values())
    for name, value in state_dict.items():
        assert (value.shape, value.dtype) == (expected[name].shape, torch.float32)
        assert torch.equal(value.contiguous(), expected[name].float()), name


def test_the_arguments_are_deepspeeds() -> None:
    theirs = pytest.importorskip("deepspeed.utils.zero_to_fp32", reason="compares with DeepSpeed's")
    for name in (
        "get_fp32_state_dict_from_zero_checkpoint",
        "convert_zero_checkpoint_to_fp32_state_dict",
    ):
        here, there = (
            list(inspect.signature(getattr(module, name)).parameters)
            for module in (zero_to_fp32, theirs)
        )
        assert here == there
    with pytest.raises(ValueError, match="safe_serialization is False; expected True"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict("nothing", "out", "5GB", False)


def test_files_without_frozen_parameters(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    folder, expected = saved
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        folder, tmp_path / "out", None, exclude_frozen_parameters=True
    )
    tensors = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert set(expected) - set(tensors) == {
        name for name in expected if name.startswith("blocks.1.")
    } | {"blocks.2.up.weight"}


def _converted(rank: int, world_size: int, folder: Path, output: Path) -> None:
    """Let every rank write one folder at once."""
    dist.barrier()
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, output)


def test_all_ranks_may_write_one_folder(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    folder, expected = saved
    run_ranks(2, _converted, folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    for name, value in safetensors.load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(value, expected[name].float()), name


def test_the_command_line_warns_of_nothing(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """`python -m` warns of a module that importing its package has imported already."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    words = [
        str(saved[0]),
        str(tmp_path / "out"),
        "--max_shard_size",
        "1MB",
        "--safe_serialization",
    ]
    command = [sys.executable, "-m", "shardcore.deepspeed.zero_to_fp32", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    tensors = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, saved[1][name].float()) for name, value in tensors.items())


def test_errors_are_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zero_to_fp32.main([str(tmp_path / "nothing"), str(tmp_path / "out")])
    assert "Pass the directory given to save" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        zero_to_fp32.main([str(tmp_path / "nothing"), str(tmp_path / "out"), "-d"])
