"""float8 weights at stage 3: shards in float32, of which only the float8 bytes are gathered.

torchao's Float8Linear casts its weight to float8 before each product. The cast is elementwise once
the scale is known, so each rank casts its shard and sends a byte per element. Stages 0 to 2 have
the full float32 weights, which Float8Linear casts itself. All casts are from float32 and by
torchao's functions, so every stage has the same bits.

Note [Scales]: a scale needs the largest element over all ranks. A step takes the largest elements
of each bucket's shard right after it has updated the bucket, and exchanges those of all buckets at
its end, at once. After other changes, and where a worker runs the step, the next gather takes and
exchanges them. Steps, loads and edits count a version of the Parameters, on every rank alike, and
weights whose version is known keep their scale. `full_params` may see edits that no counter shows,
so its end drops all scales.
Note [Bytes]: the Parameter stays float32 and sharded while the bytes are there: they are lent to a
tensor of their own. Inside `full_params` the Parameter has its float32 values, and Float8Linear
casts them. A graph of a forward must run backward on the same side of `full_params`.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Traffic
from shardcore.engine.bucket import Bucket, closed_message
from shardcore.optim.float8 import float8_linears
from shardcore.optim.interface import keep_uncompiled

_COMPILE_LAYERS = "at stage 3 the bytes of float8 weights come and go, so a graph is cut there"
# An attribute of float8 layers inside `Float8Weights.shown`: whether their bytes are shown. A graph
# depends on it.
SHOWN = "_shardcore_shown"
_CAST_NUMEL = 1 << 22  # elements that are cast at once: the products are float32


class Float8Weights:
    """The float8 tensors and the scales of the buckets that are gathered as bytes.

    buckets: those of `float8` with their shard on the device; others are gathered in float32.
    tensors: of each bucket's parameters, without memory until a gather lends it.
    """

    def __init__(self, buckets: Iterable[Bucket], comm: Comm, device: torch.device) -> None:
        """Serve `buckets`, whose shards are in place."""
        # called from hooks of layers that may be compiled: torch.compile must not look inside
        keep_uncompiled(Float8Weights, "show", reason=_COMPILE_LAYERS)
        self._comm, self._device = comm, device
        self.tensors: dict[Bucket, list[torch.Tensor]] = {}
        self._slot_of: dict[nn.Parameter, tuple[Bucket, int]] = {}
        self._scales: dict[Bucket, torch.Tensor] = {}  # (parameters,) float32
        self._versions: dict[Bucket, list[int]] = {}  # of the Parameters, when scales were taken
        self._measured: dict[Bucket, torch.Tensor] = {}  # the largest elements in this rank's part
        self._owned: dict[Bucket, torch.Tensor] = {}  # the parameters that the shard has a part of
        for bucket in buckets:
            if bucket.gathered_dtype == bucket.dtype:
                continue
            like = torch.empty(0, dtype=bucket.gathered_dtype, device=device)
            self.tensors[bucket] = [
                _C.closed(m.local.shape, like, closed_message(m.name, bucket.unit))
                for m in bucket.params
            ]
            self._slot_of |= {m.param: (bucket, slot) for slot, m in enumerate(bucket.params)}
            self._owned[bucket] = torch.tensor([p.slot for p in bucket.pieces], device=device)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets that are gathered as bytes."""
        return [*self.tensors]

    def forget_scales(self) -> None:
        """Take the scales anew at the next gather: weights may have changed."""
        self._versions.clear()

    def is_stale(self, buckets: Iterable[Bucket]) -> bool:
        """Whether weights of these buckets changed since their scales were taken."""
        return any(
            self._versions.get(bucket) != [m.version_now for m in bucket.params]
            for bucket in buckets
            if bucket in self.tensors
        )

    def measure(self, bucket: Bucket) -> None:
        """Take the largest elements of a shard that a step has just written, for `take_scales` at
        its end.
        """
        if bucket in self.tensors:
            self._measured[bucket] = self._largest(bucket)

    @torch.no_grad()
    def _largest(self, bucket: Bucket) -> torch.Tensor:
        """Return the largest element of this rank's part of each parameter: (parameters,)
        float32, zero where it has none.
        """
        largest = torch.zeros(len(bucket.params), device=self._device)
        views = [view for _, _, view in bucket.owned_views(bucket.owned_weight)]
        if views:
            norms = torch.stack(torch._foreach_norm(views, math.inf))
            largest.scatter_reduce_(0, self._owned[bucket], norms, "amax")
        return largest

    @torch.no_grad()
    def take_scales(self) -> None:
        """Take the scales of all weights that changed. Collective. See Note [Scales]."""
        stale = [bucket for bucket in self.tensors if self.is_stale([bucket])]
        measured, self._measured = self._measured, {}
        if not stale:
            return
        parts = [measured[b] if b in measured else self._largest(b) for b in stale]
        rows = self._comm.gather_rows(
            torch.cat(parts), Traffic.WEIGHTS, "the scales of float8 weights"
        )
        utils = sys.modules["torchao.float8.float8_utils"]
        sizes = [len(part) for part in parts]
        for bucket, amax in zip(stale, torch.split(rows.amax(0), sizes), strict=True):
            assert bucket.float8 is not None
            form = bucket.float8
            self._scales[bucket] = utils.amax_to_scale(amax, form.dtype, form.rounds_scale)
            self._versions[bucket] = [m.version_now for m in bucket.params]

    @torch.no_grad()
    def cast(self, bucket: Bucket, target: torch.Tensor) -> None:
        """Write the shard as float8 to `target` (owned_numel,); padding stays as it is."""
        assert bucket.float8 is not None
        to_float8 = sys.modules["torchao.float8.float8_utils"].to_fp8_saturated
        scales = self._scales[bucket]
        for _, piece, view in bucket.owned_views(bucket.owned_weight):
            written = torch.split(target[piece.start : piece.start + piece.numel], _CAST_NUMEL)
            for part, values in zip(written, torch.split(view, _CAST_NUMEL), strict=True):
                part.copy_(to_float8(values * scales[piece.slot], bucket.float8.dtype))

    @contextmanager
    def shown(self, module: nn.Module, unit: str) -> Iterator[None]:
        """Show the bytes to the float8 layers of a unit inside the context, so that a graph of the
        unit does not end where their hooks would.
        """
        linears = [
            linear
            for linear in float8_linears(module).values()
            if (found := self._slot_of.get(linear._parameters["weight"])) is not None
            and found[0].unit == unit
        ]
        try:
            for linear in linears:
                self.show(linear)
                vars(linear)[SHOWN] = "weight" in vars(linear)
            yield
        finally:
            for linear in linears:
                vars(linear).pop("weight", None)
                vars(linear).pop(SHOWN, None)

    def show(self, linear: Any) -> None:
        """Let a float8 layer see its weight as torchao's Float8TrainingTensor, whose gradient is
        the Parameter's: an attribute of that name hides the Parameter. Does nothing where its bytes
        are not gathered.
        """
        vars(linear).pop("weight", None)  # perhaps of a forward that failed
        param = linear._parameters.get("weight")
        bucket, slot = self._slot_of.get(param, (None, 0))
        if bucket is None or not bucket.in_float8:
            return
        assert bucket.float8 is not None
        vars(linear)["weight"] = _AsFloat8.apply(  # type: ignore[no-untyped-call]
            param,
            self.tensors[bucket][slot],
            self._scales[bucket][slot],
            bucket.grad_dtype,
            bucket.float8.mm_config,
        )


class _AsFloat8(torch.autograd.Function):
    """The float8 form of a weight, as torchao's products take it; the gradient passes unchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        param: torch.Tensor,
        data: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        mm_config: Any,
    ) -> torch.Tensor:
        ctx.param, ctx.version = param, param._version
        torchao = sys.modules["torchao.float8.float8_training_tensor"]
        made: torch.Tensor = torchao.Float8TrainingTensor(
            data,
            scale,
            dtype,
            linear_mm_config=mm_config,
            gemm_input_role=torchao.GemmInputRole.WEIGHT,
        )
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.param._version != ctx.version:  # autograd sees no write to the bytes
            raise RuntimeError(
                f"backward: a float8 weight of shape {tuple(ctx.param.shape)} changed since the "
                "forward. Run backward before the step, a load or an edit"
            )
        return (*grads, None, None, None, None)
