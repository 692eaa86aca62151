"""State dicts of a sharded model and of its parts."""

from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.models import Run, train


def test_a_state_dict_through_wrappers_is_from_the_masters() -> None:
    """At every stage: what lies under another name than its parameter's was the rounded weight
    before.
    """
    model, _, _ = train(0, Run(stage=1, precision="bf16"))
    masters = model.state_dict()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    state = model.state_dict()
    assert all(
        torch.equal(masters[key], state[key]) and state[key].dtype == torch.float32
        for key in masters
    )


def test_a_state_dict_that_failed_is_forgotten() -> None:
    """Else that of a part would be taken for one inside it: live weights, rounded."""
    model, _, _ = train(0, Run(stage=1, precision="bf16"))

    def failing(*_: Any) -> None:
        raise ZeroDivisionError

    model.head.register_state_dict_pre_hook(failing)
    with pytest.raises(ZeroDivisionError):
        model.state_dict()
    assert {value.dtype for value in model.blocks.state_dict().values()} == {torch.float32}
