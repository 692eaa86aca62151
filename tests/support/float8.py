"""Models in torchao's float8, trained by shardcore and by FSDP2 with one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardcore
from tests.support.models import Block, Net, Run, batch_of, loss_of, train

ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
Prepare = Callable[[nn.Module], None]


def float8_net(
    kind: type[Any] = Net,
    hidden: int = 37,
    whole: bool = False,
    flag: bool = True,
    prepare: Prepare | None = None,
    **config: Any,
) -> Any:
    """A Net whose blocks compute in float8 (`whole`: the other layers, too), on any machine."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = kind() if kind is not Net else Net(hidden=hidden)
    model.gain = nn.Parameter(torch.ones(1))  # FSDP2 takes no scalars
    if prepare is not None:
        prepare(model)
    return convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: whole or name.startswith("blocks"),
        config=Float8LinearConfig(
            enable_fsdp_float8_all_gather=flag, **{"emulate": True, **config}
        ),
    )


def trained(rank: int, run: Run, **net: Any) -> tuple[Any, Any, list[float]]:
    """Shard and train; see tests.support.models.train."""
    return train(rank, run, float8_net(**net))


def fsdp2_losses(rank: int, steps: int, precision: str | None) -> list[float]:
    """The losses of `Run(steps=steps)` under FSDP2, with float32 shards."""
    model = float8_net(hidden=36)  # FSDP2 needs even shards
    policy = MixedPrecisionPolicy()
    if precision is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = shardcore.FusedAdam(model.parameters(), **ADAM)
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch_of(step, 0, rank))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
