"""The reference of digests, from the documentation, and models to compute them of."""

from pathlib import Path
from typing import Any

import torch

import shardcore
from tests.support.models import batch_of, loss_of, made, make_net

PAGE = Path(__file__).parents[2] / "docs/reproducibility.md"


def in_numpy() -> Any:
    """Return the reference of the documentation: digest_of(name, values, dtype)."""
    blocks = PAGE.read_text().split("```python\n")
    found: dict[str, Any] = {}
    exec(next(b for b in blocks if "def digest_of" in b).split("```")[0], found)
    return found["digest_of"]


def expected_of(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    digest_of = in_numpy()
    return {
        name: digest_of(name, value.float().numpy(), str(value.dtype).removeprefix("torch."))
        for name, value in tensors.items()
    }


def trained(stage: int, adam: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Return a model with gradients and states; every rank has the same batches, so that the values
    are those of one rank.
    """
    model = make_net()
    for name, param in model.named_parameters():
        param.requires_grad_("0.0.bias" not in name)
    given = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = shardcore.FusedAdam(given, lr=1e-2, **adam)
    made(options.get("offload"))
    model, optimizer = shardcore.shard(model, optimizer, stage, **options)
    for step in range(2):
        optimizer.zero_grad()
        x, y = (part.to(next(model.parameters()).device) for part in batch_of(step, 0, 0))
        loss_of(model, (x, y)).backward()
        if step == 0:
            optimizer.step()
    return model, optimizer


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {"amsgrad": True}),
    "masters": ({"precision": "bf16"}, {}),
    "split": ({"precision": "bf16"}, {"master": "split"}),
    "8bit": ({"precision": "bf16"}, {"state_dtype": "8bit"}),
}
