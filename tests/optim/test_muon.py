"""Muon's groups. tests/engine/test_orthogonalize.py has its steps, alone and on shards."""

import copy
from typing import Any

import pytest
import torch

import shardcore


def test_groups_have_the_options_of_torchs_optimizers_and_muon_takes_matrices() -> None:
    matrix, bias = (torch.zeros(shape, requires_grad=True) for shape in ((3, 2), (3,)))
    optimizer = shardcore.Muon(
        [{"params": [matrix]}, {"params": [bias], "use_muon": False}], lr=0.1
    )
    muon, adam = optimizer.param_groups
    for group, torchs in (
        (muon, torch.optim.Muon([matrix], lr=0.1)),
        (adam, torch.optim.AdamW([bias], lr=0.1)),
    ):
        expected = {**torchs.param_groups[0], "weight_decay": 0.1}
        assert all(
            group[key] == expected[key] for key in group if key not in ("params", "use_muon")
        )
    with pytest.raises(
        ValueError, match=r"param_groups\[1\]\.params\[0\] has shape \(3,\); expected a matrix"
    ):
        shardcore.Muon([{"params": [matrix]}, {"params": [bias]}])


@pytest.mark.parametrize(
    "options", [{"adjust_lr_fn": "match_rms_adam"}, {"use_muon": False, "betas": (0.9, 1.0)}]
)
def test_options_that_torchs_optimizers_refuse(options: dict[str, Any]) -> None:
    matrix, other = (torch.zeros(3, 2, requires_grad=True) for _ in range(2))
    optimizer = shardcore.Muon([matrix])
    with pytest.raises(ValueError, match=r"not supported|Invalid"):
        optimizer.add_param_group({"params": [other], **options})
    optimizer.add_param_group({"params": [other]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_steps": 100}, r"ns_steps is 100; expected a whole number from 0 to 99"),
        ({"ns_steps": 5.0}, r"ns_steps is 5\.0; expected a whole"),
        (
            {"ns_coefficients": (1.0, 2.0)},
            r"ns_coefficients is \(1\.0, 2\.0\); expected three finite numbers",
        ),
        (
            {"ns_coefficients": (1.0, 2.0, float("nan"))},
            r"ns_coefficients is .*nan\); expected three finite",
        ),
    ],
)
def test_iterations_that_no_step_can_make(options: dict[str, Any], message: str) -> None:
    matrix = torch.zeros(3, 2, requires_grad=True)
    with pytest.raises(ValueError, match=rf"Muon: param_groups\[0\]\.{message}"):
        shardcore.Muon([{"params": [matrix], **options}])
    model = torch.nn.Linear(3, 2, bias=False)
    _, optimizer = shardcore.shard(model, shardcore.Muon(model.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.param_groups[0].update(options)
    with pytest.raises(ValueError, match=rf"step: param_groups\[0\]\.{message}"):
        optimizer.step()


def test_a_sharded_step_is_torchs() -> None:
    model = torch.nn.Linear(6, 4, bias=False)
    twin, options = copy.deepcopy(model), {"lr": 0.1, "weight_decay": 0.5}
    torchs = torch.optim.Muon(twin.parameters(), **options)
    model, ours = shardcore.shard(model, shardcore.Muon(model.parameters(), **options))
    for _ in range(3):
        for one, optimizer in ((model, ours), (twin, torchs)):
            one(torch.ones(1, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-6, atol=1e-6)
