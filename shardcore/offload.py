"""The cpu tier of optimizer states: exact, chunk by chunk, through counted copies only.

States and masters live in the tier's buffers. A step copies each chunk of the reduced gradient to the tier (and of weights
that have no master: float32 ones), runs the same Adam kernel there, and copies the new weights back. On CPU ranks the tier
is still memory of its own, so that what the copies do can be tested anywhere.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket
from shardcore.engine.store import Span, state_keys, step_spans
from shardcore.layout import BLOCK

CHUNK_NUMEL = 1 << 22


def staging_numel(buckets: Sequence[Bucket], chunk_numel: int = CHUNK_NUMEL) -> int:
    """Return the length of a staging buffer; there is one for each dtype of gradients, and one for each of weights."""
    return min(chunk_numel, max((bucket.owned_numel for bucket in buckets), default=BLOCK))


class CpuStore:
    """Optimizer states in host memory; `copies` is the only way to and from it."""

    tier = "cpu"

    def __init__(
        self,
        buckets: Sequence[Bucket],
        amsgrad: Mapping[Bucket, bool],
        device: torch.device,
        pin_memory: bool,
        chunk_numel: int = CHUNK_NUMEL,
    ) -> None:
        """Allocate zero states for `buckets`, whose weights are on `device`, and staging buffers of `chunk_numel` elements."""
        if chunk_numel < BLOCK or chunk_numel % BLOCK:
            raise ValueError(f"offload: chunk_numel is {chunk_numel}; expected a multiple of {BLOCK}")
        self.copies = _C.HostTier(device, pin_memory)
        self._stepper = _C.AdamStepper()
        self._states = {
            bucket: {
                key: self.copies.empty(bucket.owned_numel, torch.float32)
                for key in state_keys(amsgrad[bucket], bucket.needs_master)
            }
            for bucket in buckets
        }
        self._chunk_numel = staging_numel(buckets, chunk_numel)
        self._staging: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    @property
    def scratch_bytes(self) -> int:
        """See StateStore."""
        return sum(staging.numel() * staging.itemsize for staging in self._staging.values())

    def states(self, bucket: Bucket) -> Mapping[str, torch.Tensor]:
        """See StateStore."""
        return self._states[bucket]

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """See StateStore."""
        source = values.to(torch.float32).contiguous().view(-1)
        self.copies.to_tier(self._states[bucket][key][start : start + source.numel()], source)
        self.copies.synchronize()

    def step(self, spans: Sequence[Span], hypers: Sequence[_C.AdamHyper]) -> None:
        """See StateStore. Complete when it returns."""
        for chunk in self._chunks(spans):
            params, grads, states, back = [], [], [], []
            cursor = 0
            for span in chunk:
                bucket, end = span.bucket, span.start + span.numel
                assert bucket.grad is not None
                grad = self._stage("grad", bucket.grad.dtype, cursor, span.numel)
                param = self._stage("param", bucket.dtype, cursor, span.numel)
                self.copies.to_tier(grad, bucket.grad[span.start : end])
                weight = bucket.owned_weight[span.start : end]
                if not bucket.needs_master:
                    self.copies.to_tier(param, weight)
                grads.append(grad)
                params.append(param)
                states.append({key: flat[span.start : end] for key, flat in self._states[bucket].items()})
                back.append((weight, param))
                cursor += span.numel
            self.copies.synchronize()
            step_spans(self._stepper, hypers, [span.hyper for span in chunk], params, grads, states)
            for weight, param in back:
                self.copies.from_tier(weight, param)
            self.copies.synchronize()

    def _chunks(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Cut spans at block boundaries and pack them into lists of at most `chunk_numel` elements."""
        chunk: list[Span] = []
        room = self._chunk_numel
        for span in spans:
            start, left = span.start, span.numel
            while left:
                numel = min(left, room)
                chunk.append(Span(span.bucket, start, numel, span.hyper))
                start, left, room = start + numel, left - numel, room - -(-numel // BLOCK) * BLOCK
                if room <= 0:
                    yield chunk
                    chunk, room = [], self._chunk_numel
        if chunk:
            yield chunk

    def _stage(self, kind: str, dtype: torch.dtype, start: int, numel: int) -> torch.Tensor:
        key = (kind, dtype)
        if key not in self._staging:
            self._staging[key] = self.copies.empty(self._chunk_numel, dtype)
        return self._staging[key][start : start + numel]
