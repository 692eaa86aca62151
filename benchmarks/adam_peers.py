"""Other Adam optimizers for CUDA that bench_fused_adam sets beside ours, where they are installed."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.adam_kinds import OPTIONS, Kind

FP32 = Kind()
PURE_BF16 = Kind(torch.bfloat16, torch.bfloat16, None, "bf16")  # what torch does with bfloat16 parameters


@dataclass(frozen=True)
class Peer:
    """One optimizer class, and the kinds of step that it does as we do, so in the same bytes.

    ``exact``: it keeps float32 throughout, so its weights must agree with ours.
    """

    name: str
    module: str
    attribute: str
    kinds: Sequence[Kind]
    options: Mapping[str, object] = field(default_factory=dict)
    exact: bool = True
    on_cpu: bool = False

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module.split(".")[0]) is not None

    def make(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer. Raises whatever its import or its constructor raises: it may be half installed."""
        cls = getattr(importlib.import_module(self.module), self.attribute)
        optimizer: torch.optim.Optimizer = cls(params, **OPTIONS, **self.options)
        return optimizer


ADAM_W = {"adam_w_mode": True}
PEERS = (
    Peer("torch AdamW fused", "torch.optim", "AdamW", [FP32], {"fused": True}, on_cpu=True),
    Peer("torch AdamW foreach", "torch.optim", "AdamW", [FP32], {"foreach": True}, on_cpu=True),
    Peer("torch AdamW fused, bf16", "torch.optim", "AdamW", [PURE_BF16], {"fused": True}, exact=False, on_cpu=True),
    Peer("torch AdamW foreach, bf16", "torch.optim", "AdamW", [PURE_BF16], {"foreach": True}, exact=False, on_cpu=True),
    Peer("Apex FusedAdam", "apex.optimizers", "FusedAdam", [FP32], ADAM_W),
    Peer("Transformer Engine FusedAdam", "transformer_engine.pytorch.optimizers", "FusedAdam", [FP32], ADAM_W),
    Peer("DeepSpeed FusedAdam", "deepspeed.ops.adam", "FusedAdam", [FP32], ADAM_W),
    Peer("bitsandbytes AdamW", "bitsandbytes.optim", "AdamW", [FP32]),
    Peer("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit", [Kind(state_dtype="8bit")], exact=False),
)
