"""Lion: the sign of an interpolated momentum."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from shardcore._native import _C
from shardcore.optim.dtensor import local_part


class Lion(torch.optim.Optimizer):
    """Lion, with decoupled weight decay; alone as torch's optimizers, and on shards by shardcore.shard.

    Each weight moves by lr times the sign of beta1 * exp_avg + (1 - beta1) * grad; then exp_avg becomes
    beta2 * exp_avg + (1 - beta2) * grad. One state per element, of its parameter's dtype (on shards float32). A step is one
    pass over memory, in float32 from whatever dtypes, with the same bits on every instruction set and on CUDA.

    params: float32, bfloat16 or float16, otherwise as in torch.optim. lr: usually a third to a tenth of AdamW's.
    weight_decay: usually three to ten times AdamW's.
    ValueError for a negative lr or weight_decay, or betas outside of [0, 1).
    Source: Chen et al. 2023, algorithm 2 (arXiv:2302.06675).
    """

    elementwise = True  # shardcore.shard may run it on any range of elements

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not (float(lr) >= 0.0 and weight_decay >= 0.0 and all(0.0 <= beta < 1.0 for beta in betas)):
            raise ValueError(
                f"Lion: lr={lr}, betas={betas}, weight_decay={weight_decay}; expected lr and weight_decay of at least 0 and "
                "betas in [0, 1)"
            )
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_device.setdefault(param.device, []).append((param, param.grad))
                    if not self.state[param]:
                        self.state[param]["exp_avg"] = torch.zeros_like(param)
            for pairs in by_device.values():
                weights = [local_part(param) for param, _ in pairs]
                grads = _C.dense([local_part(grad) for _, grad in pairs], weights)
                averages = [local_part(self.state[param]["exp_avg"]) for param, _ in pairs]
                _C.element_step("Lion", weights, grads, averages, [None] * len(pairs), self.scalars(group))
        return loss

    @staticmethod
    def scalars(options: Mapping[str, Any], step: int = 1, grad_scale: float = 1.0) -> _C.ElementScalars:
        """Return what a step with the options of a group reads. grad_scale: multiplies gradients."""
        (beta1, beta2), lr = options["betas"], float(options["lr"])
        return _C.ElementScalars(
            "lion",
            grad_scale=-grad_scale if options["maximize"] else grad_scale,
            decay=1.0 - lr * options["weight_decay"],
            lr=lr,
            of_direction=(beta1, 1.0 - beta1),
            of_state=(beta2, 1.0 - beta2),
        )
