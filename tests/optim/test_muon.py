"""Muon's groups. tests/engine/test_orthogonalize.py has its steps, alone and on shards."""

import pytest
import torch

import shardcore


def test_groups_have_the_options_of_torchs_optimizers_and_muon_takes_matrices() -> None:
    matrix, bias = (torch.zeros(shape, requires_grad=True) for shape in ((3, 2), (3,)))
    optimizer = shardcore.Muon([{"params": [matrix]}, {"params": [bias], "use_muon": False}], lr=0.1)
    muon, adam = optimizer.param_groups
    for group, torchs in ((muon, torch.optim.Muon([matrix], lr=0.1)), (adam, torch.optim.AdamW([bias], lr=0.1))):
        expected = {**torchs.param_groups[0], "weight_decay": 0.1}
        assert all(group[key] == expected[key] for key in group if key not in ("params", "use_muon"))
    with pytest.raises(ValueError, match=r"param_groups\[1\]\.params\[0\] has shape \(3,\); expected a matrix"):
        shardcore.Muon([{"params": [matrix]}, {"params": [bias]}])
