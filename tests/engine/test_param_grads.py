"""`param.grad` at stage 0: what users do to it counts."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import Run, batch_of, loss_of, make_net, train


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stage_0_accepts_edited_replaced_and_removed_gradients(precision: str) -> None:
    def step(edit: Any) -> dict[str, torch.Tensor]:
        model, optimizer, _ = train(
            0, Run(stage=0, steps=0, precision=precision, adam={"lr": 1e-2})
        )
        loss_of(model, batch_of(0, 0, 0)).backward()
        edit(model)
        optimizer.step()
        return model.state_dict()

    def removed(model: nn.Module) -> None:
        model.head.weight.grad = None

    def replaced(model: nn.Module) -> None:
        model.head.weight.grad = torch.zeros_like(model.head.weight)

    def edited(model: nn.Module) -> None:
        model.head.weight.grad.zero_()

    start = make_net().state_dict()
    untouched = step(lambda model: None)
    for edit in (removed, replaced, edited):
        result = step(edit)
        assert torch.equal(result["head.weight"], start["head.weight"])
        assert torch.equal(result["inp.weight"], untouched["inp.weight"])
    assert not torch.equal(untouched["head.weight"], start["head.weight"])


@pytest.mark.parametrize("rest", [False, True])
def test_a_step_leaves_alone_what_has_no_gradient_any_more(rest: bool) -> None:
    """All of them, too: no p.grad is then left that shows an edit."""
    model, optimizer, _ = train(0, Run(stage=0, steps=1))
    loss_of(model, batch_of(1, 0, 0)).backward()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        if name != "gain" or not rest:
            param.grad = None
    optimizer.step()
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert changed == (["gain"] if rest else [])
