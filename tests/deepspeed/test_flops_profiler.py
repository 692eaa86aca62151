"""The operations of a model's forward, as DeepSpeed's flops_profiler counts products and
convolutions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from shardcore.profiling import flops_profiler as ours  # type: ignore[import-not-found]
from torch import nn

from tests.support.models import Net, make_net


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.conv(x).mean((2, 3)))

    def generate(self, x: torch.Tensor) -> Any:
        return self(x), self(x)


def profile(profiler: Any, **options: Any) -> Any:
    return profiler.get_model_profile(Images(), (2, 3, 10, 10), print_profile=False, **options)


def test_products_and_convolutions_are_counted() -> None:
    convolution, product = 2 * 8 * 8 * 8 * 3 * 9, 2 * 8 * 5  # MACs: batch, outputs, inputs
    assert profile(ours, as_string=False) == (
        2 * (convolution + product),
        convolution + product,
        3 * 8 * 9 + 8 * 5 + 5,
    )
    assert profile(ours, as_string=False, mode="generate", warm_up=0)[0] == 4 * (
        convolution + product
    )
    assert profile(ours) == ("55.46 K", "27.73 KMACs", "261")


def test_they_are_deepspeeds() -> None:
    theirs = pytest.importorskip(
        "deepspeed.profiling.flops_profiler", reason="DeepSpeed is not installed"
    )
    flops, macs, params = profile(theirs, as_string=False)
    assert profile(ours, as_string=False) == (pytest.approx(flops, rel=1e-3), macs, params)
    assert profile(ours)[1:] == profile(theirs)[1:]
    for name in ("number", "macs", "flops", "bytes", "params", "duration"):
        for number in (0, 0.0021, 1, 999, 12_345, 2.5e9, 7e13):
            text = f"{name}_to_string"
            assert getattr(ours, text)(number) == getattr(theirs, text)(number)
    assert ours.number_to_string(5e9, "M", 1) == theirs.number_to_string(5e9, "M", 1)


def test_a_training_is_profiled_between_two_calls() -> None:
    net = make_net()
    profiler = ours.FlopsProfiler(net)
    once = 4 * 2 * (10 * 24 + 3 * 2 * 24 * 37 + 24 * 5)
    profiler.start_profile()
    for _ in range(2):
        net(torch.ones(4, 10)).sum().backward()  # backward is not counted
    torch.ones(5, 5) @ torch.ones(5, 5)
    profiler.stop_profile()
    net(torch.ones(4, 10))
    assert profiler.get_total_flops() == 2 * once == 2 * profiler.get_total_macs()
    assert profiler.get_total_duration() > 0
    assert profiler.get_total_params() == sum(param.numel() for param in net.parameters())
    profiler.end_profile()
    assert profiler.get_total_flops() == 0


def test_a_failing_forward_ends_the_count() -> None:
    net = make_net()
    profiler = ours.FlopsProfiler(net)
    profiler.start_profile()
    with pytest.raises(RuntimeError):
        net(torch.ones(4, 11))
    net(torch.ones(1, 10))
    assert profiler.get_total_macs() == 10 * 24 + 3 * 2 * 24 * 37 + 24 * 5


def test_the_profile_lists_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "profile.txt"
    ours.get_model_profile(
        make_net(), args=[torch.ones(4, 10)], output_file=str(file), ignore_modules=[nn.LayerNorm]
    )
    text = file.read_text()
    assert "profile of step 1" in text
    assert "blocks.2.down Linear: 912 parameters, 3.55 KMACs (15.6%)" in text
    ours.get_model_profile(make_net(), (4, 10), detailed=False, module_depth=1, top_modules=2)
    output = capsys.readouterr().out
    assert "most MACs: ModuleList, Linear" in output or "most MACs: Linear" in output
    assert "blocks.2" not in output
    profiler = ours.FlopsProfiler(Net())
    profiler.print_model_aggregated_profile(0)
    assert capsys.readouterr().out.startswith("depth 0: most parameters: Net")


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="mode is 'train'"):
        profile(ours, mode="train")
    with pytest.raises(ValueError, match="no inputs"):
        ours.get_model_profile(make_net())
