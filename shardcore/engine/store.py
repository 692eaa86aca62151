"""Where optimizer states live and where Adam runs on them.

A store holds, for each bucket, flat float32 tensors of the owned range: exp_avg, exp_avg_sq, max_exp_avg_sq (amsgrad) and
the master weights. The device store keeps them beside the weights; shardcore.offload has the cpu tier. Both feed the same
kernel the same numbers, so the tier never shows in the bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket, Managed, allocate
from shardcore.optim import PARAM_DTYPES

# (numel, dtype) -> a zero-filled flat tensor
Allocate = Callable[[int, torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Span:
    """A range of a bucket's owned range that one set of scalars updates: `hypers[hyper]` of the step."""

    bucket: Bucket
    start: int
    numel: int
    hyper: int


class StateStore(Protocol):
    """What the engine needs of a place for optimizer states."""

    tier: str

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside the states: what steps work in."""

    @property
    def weight_scratch_bytes(self) -> int:
        """Bytes on the device that weights of another tier are updated in."""

    def step(self, spans: Sequence[Span], hypers: Sequence[_C.AdamHyper]) -> None:
        """Update states, masters and the owned weights from the buckets' reduced gradients."""

    def states(self, bucket: Bucket) -> Mapping[str, torch.Tensor]:
        """Return the bucket's state tensors by key, to read; each (owned_numel,) float32."""

    def tiers(self, bucket: Bucket) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Return the memory that the bucket's states take, by tier and key."""

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """Overwrite part of a state with `values` (flat, any float dtype, any device)."""


def state_keys(amsgrad: bool, master: bool) -> list[str]:
    """Return the keys of the tensors that a bucket keeps."""
    return ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad + ["master"] * master


def step_spans(
    stepper: _C.AdamStepper,
    hypers: Sequence[_C.AdamHyper],
    hyper_index: Sequence[int],
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Run the Adam kernel once over parallel lists; `states[i]` has the keys of `state_keys`."""
    stepper.step(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        hypers,
        hyper_index,
        masters=[state.get("master") for state in states],
        max_exp_avg_sqs=[state.get("max_exp_avg_sq") for state in states],
    )


class DeviceStore:
    """States beside the weights."""

    tier = "device"

    def __init__(self, buckets: Sequence[Bucket], amsgrad: Mapping[Bucket, bool]) -> None:
        """Allocate zero states for `buckets` on their weights' device."""
        self._steppers = {bucket: _C.AdamStepper() for bucket in buckets}
        self._states = {
            bucket: {
                key: allocate(bucket.owned_numel, torch.float32, bucket.owned_weight.device)
                for key in state_keys(amsgrad[bucket], bucket.needs_master)
            }
            for bucket in buckets
        }

    @property
    def scratch_bytes(self) -> int:
        """See StateStore."""
        return 0

    @property
    def weight_scratch_bytes(self) -> int:
        """See StateStore."""
        return 0

    def states(self, bucket: Bucket) -> Mapping[str, torch.Tensor]:
        """See StateStore."""
        return self._states[bucket]

    def tiers(self, bucket: Bucket) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """See StateStore."""
        return {"device": self._states[bucket]}

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """See StateStore."""
        self._states[bucket][key][start : start + values.numel()].copy_(values)

    def step(self, spans: Sequence[Span], hypers: Sequence[_C.AdamHyper]) -> None:
        """See StateStore. Queued on the current stream on CUDA."""
        if not spans:
            return
        params, grads, states = [], [], []
        for span in spans:
            assert span.bucket.grad is not None
            end = span.start + span.numel
            params.append(span.bucket.owned_weight[span.start : end])
            grads.append(span.bucket.grad[span.start : end])
            states.append({key: flat[span.start : end] for key, flat in self._states[span.bucket].items()})
        step_spans(self._steppers[spans[0].bucket], hypers, [span.hyper for span in spans], params, grads, states)


# (start, numel) -> that range of a flattened parameter's new values; any float dtype, any device
ReadPart = Callable[[int, int], torch.Tensor]


def part_of(values: torch.Tensor) -> ReadPart:
    """Return what reads parts of values that are in memory, in the parameter's shape."""
    flat = values.detach().contiguous().view(-1)
    return lambda start, numel: flat[start : start + numel]


@torch.no_grad()
def set_weights(store: StateStore, bucket: Bucket, managed: Managed, read: ReadPart) -> None:
    """Set a parameter, and this rank's part of its master, from new values; only what the rank keeps is read."""
    if bucket.weight.numel():
        values = read(0, managed.param.numel()).to(bucket.weight.device)
        assign(managed.slice_of(bucket.weight).view(-1), values)
        read = part_of(values)
    set_owned(store, bucket, managed, read)


@torch.no_grad()
def set_owned(store: StateStore, bucket: Bucket, managed: Managed, read: ReadPart) -> None:
    """Set the part of a parameter and its master that this rank owns."""
    master = bucket.group is not None and "master" in store.states(bucket)
    for piece in bucket.pieces:
        if bucket.params[piece.slot] is managed:
            part = read(piece.param_start, piece.numel).to(bucket.owned_weight.device)
            assign(bucket.owned_weight[piece.start : piece.start + piece.numel], part)
            if master:
                store.write(bucket, "master", piece.start, part)
    managed.version = managed.param._version


def assign(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Round `values` to weights as a step does; frozen weights may have dtypes that no step knows."""
    if weight.dtype in PARAM_DTYPES and values.is_floating_point():
        _C.cast([weight], [values.to(weight.device, torch.float32)])
    else:
        weight.copy_(values)
