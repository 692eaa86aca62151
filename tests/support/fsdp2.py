"""What the tests of DTensors share: models sharded by FSDP2, their whole values, and the kinds
of optimizer to try.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Rows that divide no world, fewer rows than ranks (empty local shards), one element.
SHAPES = ((7, 33), (2, 5), (1,), (40, 3), (5, 16, 2), (1, 300))
# every shard of 1, 2, 3 ranks starts on a 256-element block
ALIGNED = ((6, 256), (12, 512), (24, 128))
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
KINDS = {
    "fp32": (F32, {}),
    "fp32-adam-amsgrad": (F32, {"adam_w_mode": False, "amsgrad": True, "maximize": True}),
    "bf16-fp32": (BF16, {"master": "fp32"}),
    "bf16-split": (BF16, {"master": "split"}),
    "fp16-fp32": (F16, {"master": "fp32"}),
    "bf16": (BF16, {}),
    "bf16-stochastic": (BF16, {"stochastic_rounding": True, "seed": 5}),
    "fp32-bf16states": (F32, {"state_dtype": "bf16", "seed": 6}),
    "bf16-split-bf16states": (BF16, {"master": "split", "state_dtype": "bf16"}),
}


class Net(nn.Module):
    """Parameters of any shapes; the last one is never used."""

    def __init__(self, shapes, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in (*shapes, (3, 4))]
        self.weights = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self, x):
        return sum(
            (w.float() * x[: w.numel()].view(w.shape)).sin().sum() for w in self.weights[:-1]
        )


def sharded_net(shapes, dtype, mesh=None):
    net = Net(shapes, dtype)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(net, mesh=mesh)


def backward(net, rank, step):
    net.zero_grad()
    x = torch.randn(12 * 512, generator=torch.Generator().manual_seed(10 * step + rank))
    net(x).backward()


def whole(tensors):
    return [t.full_tensor().detach() if isinstance(t, DTensor) else t for t in tensors]


def whole_grads(net):
    return [None if p.grad is None else p.grad.full_tensor() for p in net.parameters()]


def whole_state(optimizer):
    """(parameter's number, key, whole tensor) for everything in the state dict."""
    state = optimizer.state_dict()["state"]
    return [
        (i, key, *whole([value]))
        for i, entry in state.items()
        for key, value in sorted(entry.items())
    ]


def state_differs(a, b):
    return [
        (i, key)
        for (i, key, x), (j, other, y) in zip(a, b, strict=True)
        if (i, key) != (j, other) or not torch.equal(x, y)
    ]


def placed_grads(net, step):
    generator = torch.Generator().manual_seed(step)
    return [
        distribute_tensor(
            torch.randn(p.shape, generator=generator).to(p.dtype),
            p.device_mesh,
            p.placements,
            src_data_rank=None,
        )
        for p in net.parameters()
    ]
