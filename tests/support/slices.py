"""A small language model, its tensor-parallel plan, and a training of it on a mesh of (dp, tp)."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardcore
from tests.support.models import made

VOCAB, WIDTH, HEADS, LENGTH = 19, 16, 4, 8  # 19: the ranks' parts of the vocabulary differ in size


class Attention(nn.Module):
    """Causal attention over whatever heads this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return self.out(
            F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Lm(nn.Module):
    """Embedding, blocks, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_lm() -> Lm:
    torch.manual_seed(0)
    return Lm()


def slice_lm(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Slice the model over a mesh: columns and rows, and the vocabulary; `sequence`: the
    residual stream by positions, too.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for index in range(2):
        block = f"blocks.{index}"
        plan |= {
            f"{block}.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")
        }
        plan |= {
            f"{block}.attention.out": RowwiseParallel(output_layouts=stream),
            f"{block}.mlp.up": ColwiseParallel(),
        }
        plan |= {f"{block}.mlp.down": RowwiseParallel(output_layouts=stream)}
        if sequence:
            gather = PrepareModuleInput(
                input_layouts=(stream,), desired_input_layouts=(Replicate(),)
            )
            plan |= {f"{block}.{name}": gather for name in ("attention", "mlp")}
            plan |= {f"{block}.{name}": SequenceParallel() for name in ("first", "second")}
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)


def mesh_of(world: int, tp: int, device_type: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device_type, (world // tp, tp), mesh_dim_names=("dp", "tp"))


def sharded_lm(
    mesh: DeviceMesh,
    stage: int,
    sequence: bool = True,
    adam: Mapping[str, Any] | None = None,
    frozen: str = "-",
    **options: Any,
) -> tuple[Any, Any]:
    """Return a sharded model and its optimizer; not sliced where the mesh has one rank along "tp".

    frozen: in the names of parameters that do not train.
    """
    model = make_lm().to(mesh.device_type)
    if mesh["tp"].size() > 1:
        slice_lm(model, mesh["tp"], sequence)
    for name, param in model.named_parameters():
        param.requires_grad_(frozen not in name)
    given = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = shardcore.FusedAdam(given, lr=1e-2, weight_decay=0.1, **(adam or {}))
    options = {"clip_grad_norm": 0.5} | options
    made(options.get("offload"))
    return shardcore.shard(model, optimizer, stage, process_group=mesh["dp"], **options)


def lm_loss(model: nn.Module, step: int, rank: int, sliced: bool) -> torch.Tensor:
    """Run a step's forward, the loss over slices of the vocabulary. `step` and `rank` choose the
    batch.
    """
    from torch.distributed.tensor.parallel import loss_parallel

    tokens = torch.randint(
        VOCAB, (3, LENGTH + 1), generator=torch.Generator().manual_seed(1009 * step + rank)
    )
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(tokens[:, :-1])
    with loss_parallel() if sliced else nullcontext():
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train_lm(model: nn.Module, optimizer: Any, mesh: DeviceMesh, steps: range) -> list[float]:
    """Train; returns the norms of the gradients."""
    from torch.distributed.tensor.parallel import loss_parallel

    sliced, norms = mesh["tp"].size() > 1, []
    for step in steps:
        loss = lm_loss(model, step, mesh["dp"].get_local_rank(), sliced)
        with loss_parallel() if sliced else nullcontext():
            optimizer.scale_loss(loss).backward()
        optimizer.step()
        norms.append(optimizer._engine.last_grad_norm)
        optimizer.zero_grad()
    return norms
