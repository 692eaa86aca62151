"""Checkpointed activations: the same gradients, inputs in host memory where a configuration or a
call says so.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardcore.deepspeed import checkpointing
from tests.support.deepspeed import ds_config, start
from tests.support.models import batch_of, make_net

ON_CPU = {"activation_checkpointing": {"cpu_checkpointing": True}}


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is kept in host memory; `configure` is forgotten before and after."""
    monkeypatch.setattr(checkpointing, "_on_cpu", None)
    saved: list[torch.Tensor] = []

    # torch's own checkpoint has a class of its own of it
    hooks = torch.autograd.graph.saved_tensors_hooks

    def recording(
        pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> Any:
        return hooks(lambda tensor: (saved.append(tensor), pack(tensor))[1], unpack)  # type: ignore[func-returns-value]

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", recording)
    return saved


def gradients(
    net: Any, checkpointed: bool, by_name: bool = False
) -> tuple[list[torch.Tensor], int]:
    calls = []

    def run(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return net(x)

    x = batch_of(0, 0, 0)[0].requires_grad_()
    by = partial(checkpointing.checkpoint, run) if checkpointed else run
    (by(x=x) if by_name else by(x)).sum().backward()
    grads = [param.grad.clone() for param in net.parameters()]
    net.zero_grad()
    return grads, len(calls)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_gradients_are_the_same_and_activations_are_computed_again(
    on_cpu: bool, by_name: bool, kept: list[torch.Tensor]
) -> None:
    net = make_net()
    expected, once = gradients(net, False)
    checkpointing.configure(None, checkpoint_in_cpu=on_cpu)
    grads, twice = gradients(net, True, by_name)
    checkpointing.reset()
    assert (once, twice) == (1, 2)
    assert all(torch.equal(*pair) for pair in zip(grads, expected, strict=True))
    assert [tensor.shape for tensor in kept] == ([batch_of(0, 0, 0)[0].shape] if on_cpu else []), (
        "inputs alone are kept"
    )


def test_a_configuration_says_where_inputs_are_kept(
    tmp_path: Path, kept: list[torch.Tensor]
) -> None:
    assert not checkpointing.is_configured()
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ON_CPU))
    for config in (ON_CPU, path):
        checkpointing.configure(None, deepspeed_config=config)
        gradients(make_net(), True)
        assert kept, config
        kept.clear()
    checkpointing.configure(None, deepspeed_config=ON_CPU, checkpoint_in_cpu=False)
    gradients(make_net(), True)
    assert not kept
    assert checkpointing.is_configured()
    with pytest.raises(ValueError, match=r"activation_checkpointing\.cpu_checkpoints is unknown"):
        checkpointing.configure(
            None, deepspeed_config={"activation_checkpointing": {"cpu_checkpoints": True}}
        )


def test_initialize_follows_its_configuration(kept: list[torch.Tensor]) -> None:
    start(ds_config())
    assert not checkpointing.is_configured(), "what a script has configured stays"
    start(ds_config(**ON_CPU))
    gradients(make_net(), True)
    assert kept
