"""AdaScale of FairScale: learning rates that follow the gain of a larger batch (arXiv:2007.05105).

Of every backward each rank adds up the squared norms of its own gradients, in hooks of the
parameters, which see them before they are averaged. After the last backward of a step the averaged
gradient's norm is taken by shardcore.clip_grad_norm_ with no limit: so it is the same for a plain
model, DistributedDataParallel and each stage of `shard`, where no p.grad may be.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardcore.engine.unshard import in_backward
from shardcore.optim.clip import by_engine, clip_grad_norm_
from shardcore.optim.interface import engine_of
from shardcore.torch_private import graph_task_id, queue_callback

_STATE = ("grad_sqr_avg", "grad_var_avg")


class AdaScale(torch.optim.Optimizer):
    """An optimizer over `optimizer`, whose steps multiply each group's learning rate by its
    gain.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
    ) -> None:
        """Take an optimizer of torch's, an OSS, or what shardcore.shard returned.

        Args:
            world_size: ranks whose gradients are averaged (default: all).
            scale: the batch of a step over that of scale 1 (default: world_size *
            num_gradients_to_accumulate).
            smoothing: of the moving averages (default: 1 - world_size * num_gradients_to_accumulate
            / 1000, at least 0).
            num_gradients_to_accumulate: backwards per step.
            is_scaled_loss: losses are divided by that; else call scale_grad_by_num_grads_to_accum
            before each step.
            debias_ewma: averages without bias; False for the paper's appendix B.3.

        Raises RuntimeError for one rank with one backward per step, where a variance cannot be
        estimated.
        """
        # torch.optim's constructor is not run: groups, states and hooks are those of the optimizer
        # inside
        self._optimizer = optimizer
        self._world_size = world_size or (dist.get_world_size() if dist.is_initialized() else 1)
        self._is_scaled_loss, self._debias = is_scaled_loss, debias_ewma
        self._backwards = 0
        self._task = -1  # autograd's number of the backward that was noticed last
        self._local: dict[torch.device, torch.Tensor] = {}  # squared norms of this rank, by group
        self._handles: list[Any] = []
        self.set_num_gradients_to_accumulate(num_gradients_to_accumulate)
        if smoothing is not None:
            self._smoothing = smoothing
        if self._world_size * self._num_grads_to_accum <= 1:
            raise RuntimeError(
                "AdaScale: one rank with num_gradients_to_accumulate=1 computes one gradient per "
                "step, and AdaScale estimates a variance; expected two gradients or more"
            )
        count = len(optimizer.param_groups)
        self._estimates: dict[str, torch.Tensor] = {
            "grad_sqr_avg": torch.ones(count, dtype=torch.float64, device="cpu"),
            "grad_var_avg": torch.zeros(count, dtype=torch.float64, device="cpu"),
        }
        self._scale = 1.0
        self.set_scale(
            self._world_size * self._num_grads_to_accum if scale is None else scale,
            update_estimate=False,
        )
        self._hook()

    def _hook(self) -> None:
        self.unhook()
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.requires_grad:
                    self._handles.append(
                        param.register_hook(lambda grad, index=index: self._on_grad(index, grad))
                    )

    def unhook(self) -> None:
        """Remove the hooks from the parameters: from then on gains stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer inside."""
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The param_groups of the wrapped optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self._optimizer.state

    # --- what is estimated ------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """The batch size of a step, relative to the batch size of scale 1."""
        return self._scale

    @property
    def smoothing(self) -> float:
        """The factor of the moving averages."""
        return self._smoothing

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Set the scale, between steps.

        update_estimate: True adjusts the estimated variance, which depends on the scale.
        """
        self._between_steps("set_scale")
        if scale < 1:
            raise ValueError(f"set_scale: scale is {scale}; expected at least 1")
        if update_estimate:
            for name, value in self._estimates.items():
                if name in ("grad_var_avg", "grad_var_avg_biased", "grad_var_avg_total"):
                    value *= self._scale / scale
        self._scale = float(scale)

    def set_num_gradients_to_accumulate(
        self, num_gradients_to_accumulate: int, update_smoothing: bool = True
    ) -> None:
        """Set the number of backwards per step, between steps; usually `set_scale` follows."""
        self._between_steps("set_num_gradients_to_accumulate")
        if num_gradients_to_accumulate < 1:
            raise ValueError(
                f"set_num_gradients_to_accumulate: num_gradients_to_accumulate is "
                f"{num_gradients_to_accumulate}; expected at least 1"
            )
        self._num_grads_to_accum = num_gradients_to_accumulate
        if update_smoothing:
            self._smoothing = max(1 - self._world_size * num_gradients_to_accumulate / 1000, 0.0)

    def gain(self, pg_idx: int | None = None) -> float:
        """Return by how much the learning rate grows: of one group, or of all together. From 1
        to `scale`; not collective.
        """
        sqr, var = (self._estimates[name] for name in _STATE)
        mean, noise = (float(x.sum() if pg_idx is None else x[pg_idx]) for x in (sqr, var))
        return (noise + mean) / (noise / self._scale + mean)

    def _between_steps(self, op: str) -> None:
        if self._backwards:
            raise RuntimeError(
                f"{op}: {self._backwards} of {self._num_grads_to_accum} backwards of a step ran "
                "already; expected the call between steps"
            )

    # --- gradients --------------------------------------------------------------------------------

    def _on_grad(self, index: int, grad: torch.Tensor) -> None:
        """Add a gradient of this rank; at the end of this backward, and of all that averages
        gradients there, go on.
        """
        if grad.device not in self._local:
            self._local[grad.device] = torch.zeros(
                len(self.param_groups), dtype=torch.float64, device=grad.device
            )
        self._local[grad.device][index] += (
            torch.linalg.vector_norm(grad, dtype=torch.float32).double().square()
        )
        assert in_backward()
        task = graph_task_id()
        if task != self._task:
            self._task = task
            # those of a DDP, or of an engine, are queued by then
            queue_callback(lambda: queue_callback(self._after_backward))

    def _after_backward(self) -> None:
        """Estimate anew after the last backward of a step. Collective then."""
        self._backwards += 1
        if self._backwards % self._num_grads_to_accum:
            return
        self._backwards = 0
        local = torch.zeros(
            len(self.param_groups), dtype=torch.float64, device=next(iter(self._local))
        )
        for value in self._local.values():
            local += value.to(local.device)
        self._local = {}
        if self._world_size > 1:
            dist.all_reduce(local)
        local = local.cpu() / float(getattr(self._optimizer, "loss_scale", 1.0)) ** 2
        norms = [float(clip_grad_norm_(group["params"], math.inf)) for group in self.param_groups]
        total = torch.tensor(norms, dtype=torch.float64, device="cpu").square()
        if self._is_scaled_loss:
            local *= self._num_grads_to_accum**2
        else:
            total /= self._num_grads_to_accum**2
        if not (local.isfinite().all() and total.isfinite().all()):
            return  # a skipped step
        # Appendix B.3, for `count` gradients whose mean is what a batch of `scale` has
        scale, count = self._scale, self._world_size * self._num_grads_to_accum
        var = (local / count - total) * scale / (count - 1)
        self._average("grad_sqr_avg", (total - var / scale).clamp(min=0.0))
        self._average("grad_var_avg", var.clamp(min=1e-6))

    def _average(self, name: str, value: torch.Tensor) -> None:
        estimates, factor = self._estimates, self._smoothing
        zeros = torch.zeros_like(value)
        if self._debias:
            estimates[f"{name}_biased"] = (
                factor * estimates.get(f"{name}_biased", zeros) + (1 - factor) * value
            )
            estimates[f"{name}_unbias"] = factor * estimates.get(f"{name}_unbias", zeros) + (
                1 - factor
            )
            estimates[name] = estimates[f"{name}_biased"] / estimates[f"{name}_unbias"]
            return
        estimates[f"{name}_count"] = estimates.get(f"{name}_count", zeros[:1]) + 1
        if float(estimates[f"{name}_count"]) < 1 / max(1 - factor, 1e-12):
            estimates[f"{name}_total"] = estimates.get(f"{name}_total", zeros) + value
            estimates[name] = estimates[f"{name}_total"] / estimates[f"{name}_count"]
        else:
            estimates[name] = factor * estimates[name] + (1 - factor) * value

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide gradients by the number of backwards, after the last backward, if losses are not
        divided. Collective.

        Raises RuntimeError with is_scaled_loss=True, and with one backward per step.
        """
        self._between_steps("scale_grad_by_num_grads_to_accum")
        if self._is_scaled_loss or self._num_grads_to_accum == 1:
            raise RuntimeError(
                f"scale_grad_by_num_grads_to_accum: is_scaled_loss is {self._is_scaled_loss} with "
                f"num_gradients_to_accumulate={self._num_grads_to_accum}; expected False, and 2 or "
                f"more"
            )
        params = [param for group in self.param_groups for param in group["params"]]
        for engine, sharded in by_engine(params).items():
            engine.own_grads("scale_grad_by_num_grads_to_accum", sharded, list).scale(
                1 / self._num_grads_to_accum
            )
        for param in params:
            if engine_of(param) is None and param.grad is not None:
                param.grad.div_(self._num_grads_to_accum)

    # --- the optimizer ----------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step with the learning rates times the gains; afterwards they are as before."""
        self._between_steps("step")
        before = [group["lr"] for group in self.param_groups]
        for index, group in enumerate(self.param_groups):
            group["lr"] = group["lr"] * self.gain(index)
        try:
            return self._optimizer.step(*args, **kwargs)
        finally:
            for lr, group in zip(before, self.param_groups, strict=True):
                group["lr"] = lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, between steps."""
        self._between_steps("zero_grad")
        self._optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside, whose gain begins as 1."""
        self._between_steps("add_param_group")
        self._optimizer.add_param_group(param_group)
        for name, value in self._estimates.items():
            if not name.endswith("_count"):
                self._estimates[name] = torch.cat(
                    [value, value.new_full((1,), name == "grad_sqr_avg")]
                )
        self._hook()

    def state_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the optimizer's state dict, with the estimates as state["adascale"]."""
        self._between_steps("state_dict")
        inner = self._optimizer.state_dict(**kwargs)
        return {
            **inner,
            "state": {
                **inner["state"],
                "adascale": {k: v.clone() for k, v in self._estimates.items()},
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of state_dict, of this class or of FairScale."""
        self._between_steps("load_state_dict")
        state = dict(state_dict["state"])
        estimates = state.pop("adascale", {})
        self._optimizer.load_state_dict({**state_dict, "state": state})
        self._estimates.update(
            {
                name: torch.as_tensor(value, dtype=torch.float64, device="cpu").clone()
                for name, value in estimates.items()
            }
        )


class AdaScaleWrapper(AdaScale):
    """AdaScale over a new optimizer of `optim_cls`, with the other arguments."""

    def __init__(
        self,
        params: Iterable[Any],
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: Any = torch.optim.SGD,
        **additional_optim_args: Any,
    ) -> None:
        """See AdaScale."""
        optimizer = optim_cls(params, **additional_optim_args)
        super().__init__(
            optimizer,
            world_size,
            scale,
            smoothing,
            num_gradients_to_accumulate,
            debias_ewma=debias_ewma,
        )
