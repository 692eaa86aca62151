"""Lion: the sign of an interpolated momentum."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion, with decoupled weight decay. Use it alone like torch's optimizers, or on shards with
    shardcore.shard.

    Each weight moves by lr times the sign of beta1 * exp_avg + (1 - beta1) * grad. Then exp_avg
    becomes beta2 * exp_avg + (1 - beta2) * grad. There is one state per element, of its parameter's
    dtype. On shards the state is float32, and one kernel runs the step.

    Args:
        params: As in torch.optim.
        lr: Usually a third to a tenth of AdamW's.
        weight_decay: Usually three to ten times AdamW's.

    Raises ValueError for a negative lr or weight_decay, or betas outside of [0, 1). Source: Chen et
    al. 2023, algorithm 2 (arXiv:2302.06675).
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
        if not (
            float(lr) >= 0.0 and weight_decay >= 0.0 and all(0.0 <= beta < 1.0 for beta in betas)
        ):
            raise ValueError(
                f"Lion: lr={lr}, betas={betas}, weight_decay={weight_decay}; expected lr and "
                "weight_decay of at least 0 and betas in [0, 1)"
            )
        super().__init__(
            params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
            grads = [param.grad for param in params]
            if group["maximize"]:
                grads = list(torch._foreach_neg(grads))
            averages = [self.state[param]["exp_avg"] for param in params]
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            moves = torch._foreach_mul(averages, beta1)
            torch._foreach_add_(moves, grads, alpha=1.0 - beta1)
            torch._foreach_sign_(moves)
            torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
            torch._foreach_add_(params, moves, alpha=-lr)
            torch._foreach_mul_(averages, beta2)
            torch._foreach_add_(averages, grads, alpha=1.0 - beta2)
        return loss
