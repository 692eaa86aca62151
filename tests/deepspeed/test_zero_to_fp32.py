"""zero_to_fp32 under DeepSpeed's names: float32 weights from a checkpoint, in memory, in files and from the command line."""

from pathlib import Path

import pytest
import torch

import shardcore
from shardcore.deepspeed import zero_to_fp32
from tests.support.models import Net, Run, make_net, train


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
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert set(found) == set(expected)
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name].float()), name
    assert found["blocks.2.up.weight"] is found["blocks.0.up.weight"]
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "global_step1", exclude_frozen_parameters=True)
    assert set(found) - set(trained) == {name for name in found if name.startswith("blocks.1.")}
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Net(), folder)
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


def test_the_command_line(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    folder, expected = saved
    assert zero_to_fp32.main([str(folder), str(tmp_path / "out"), "--max_shard_size", "1MB"]) == 0
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, expected[name].float()) for name, value in found.items())


def test_errors_are_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zero_to_fp32.main([str(tmp_path / "nothing"), str(tmp_path / "out")])
    assert "expected a directory that save was given" in capsys.readouterr().err
