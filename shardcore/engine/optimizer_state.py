"""The optimizer's full state dict, gathered from shards and scattered back, in the form of
torch.optim.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardcore.engine.bucket import Bucket, Managed
from shardcore.engine.full_tensors import FullTensors
from shardcore.engine.step import Updater
from shardcore.optim.state import check_tensor, step_tensor
from shardcore.optim.state_dict import (
    export_state,
    numbers_of,
    saved_states,
    warn_of_lost,
)

_OP = "load_state_dict"


class ShardedStates(Mapping[Any, Any]):
    """What `optimizer.state` shows of a sharded optimizer: its parameters and their step counts,
    read only.

    others: what the user keeps there under other keys, on this rank.
    """

    def __init__(
        self, buckets: Sequence[Bucket], settle: Callable[[bool], None], others: dict[Any, Any]
    ) -> None:
        """Show the parameters that `buckets`, those with an optimizer group, update, once
        `settle(True)` has read counts.
        """
        self._settle = settle
        self._managed: dict[Any, Managed] = {
            managed.param: managed for bucket in buckets for managed in bucket.params
        }
        self.others = others

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, torch.Tensor):
            return self.others[key]
        self._settle(True)
        return _ParamStates({"step": step_tensor(self._managed[key].step)})

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, torch.Tensor):
            _refuse()
        self.others[key] = value

    def __delitem__(self, key: Any) -> None:
        if isinstance(key, torch.Tensor):
            _refuse()
        del self.others[key]

    def clear(self) -> None:
        """Raise TypeError: the states of parameters are sharded."""
        _refuse()

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._managed, *self.others])

    def __len__(self) -> int:
        return len(self._managed) + len(self.others)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the dict that it shows: a copy has no engine."""
        return dict, (dict(self),)


def _refuse(*_: Any, **__: Any) -> None:
    raise TypeError(
        "optimizer.state: it was changed, but states are sharded; expected "
        "optimizer.load_state_dict(), or shardcore.load_sharded_state_dict(optimizer, ...)"
    )


class _ParamStates(dict[str, Any]):
    __setitem__ = __delitem__ = update = clear = pop = popitem = setdefault = __ior__ = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a plain dict."""
        return dict, (dict(self),)

    def __missing__(self, key: str) -> None:
        raise KeyError(
            f"optimizer.state: {key!r} was read, but states are sharded; expected "
            f"shardcore.full_state(param, {key!r}), or optimizer.state_dict()"
        )


class OptimizerStateIO:
    """Reads and writes the states of an updater's buckets as full tensors."""

    def __init__(
        self, updater: Updater, groups: Sequence[dict[str, Any]], full_tensors: FullTensors
    ) -> None:
        """Serve `updater`; parameters are numbered as `groups` (live) list them."""
        self.updater, self.groups, self._full_tensors = updater, groups, full_tensors

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return every parameter's full state, as torch.optim keeps it (a never updated
        parameter has none). Collective.
        """
        number_of = numbers_of(self.groups)
        entries: dict[int, dict[str, Any]] = {}
        stepped = (
            bucket
            for bucket in self.updater.buckets
            if any(managed.step > 0 for managed in bucket.params)
        )
        states = [(bucket, key) for bucket in stepped for key in bucket.state_format.keys]
        fulls = self._full_tensors.of_buckets(
            (bucket, self.updater.store.read(bucket, key)) for bucket, key in states
        )
        for (bucket, key), full in zip(states, fulls, strict=True):
            for managed in bucket.params:
                if managed.step > 0:
                    entry = entries.setdefault(
                        number_of[managed.param], {"step": step_tensor(managed.step)}
                    )
                    entry[key] = managed.full(managed.slice_of(full).clone())
        state = {number: entries[number] for number in sorted(entries)}
        return {"state": state, "param_groups": self.updater.kind.export_groups(self.groups)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[Any, Any]:
        """Take this rank's part of every parameter's full state; nothing changes if any of it does
        not fit.

        Returns what the state has under other keys than parameters' (other_entries).
        """
        groups = self.groups
        options = self.updater.kind.import_groups(_OP, groups, state_dict)
        self.updater.check_fixed(
            _OP, [{**group, **new} for group, new in zip(groups, options, strict=True)]
        )
        states, others = saved_states(_OP, groups, state_dict)
        saved = {param: state for param, (_, state) in states.items()}
        lost: list[str] = []
        imported: dict[Managed, Mapping[str, Any]] = {}
        for managed, bucket in self._optimized():
            imported[managed], lost_of_param = self._import(managed, bucket, saved)
            lost += lost_of_param
        warn_of_lost(_OP, lost, stacklevel=4)
        for group, new_options in zip(groups, options, strict=True):
            group.update(new_options)
        for managed, bucket in self._optimized():
            self._scatter(managed, bucket, imported[managed])
        self.updater.loaded = "loaded"
        return others

    def carry(self, states: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Take over the states that an optimizer had before it was sharded, without remainders
        (joined_state).

        Each is taken out of `states` first, so that no more than one of them is there twice.
        """
        for managed, bucket in self._optimized():
            if state := states.pop(managed.param, None):
                param: torch.Tensor = managed.param
                exported = {param: export_state(state, param)}
                self._scatter(managed, bucket, self._import(managed, bucket, exported)[0])

    def _optimized(self) -> list[tuple[Managed, Bucket]]:
        return [(managed, bucket) for bucket in self.updater.buckets for managed in bucket.params]

    def _import(
        self, managed: Managed, bucket: Bucket, saved: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> tuple[dict[str, Any], list[str]]:
        """Check a parameter's saved state; return it without what is not kept, and in words what
        that is, and what is rounded.

        What is returned are the tensors as given: full ones are made for the check alone, for one
        parameter at a time.
        """
        entry, state_format, where = (
            saved.get(managed.param, {}),
            bucket.state_format,
            f"state of {managed.name}",
        )
        if managed.sliced is not None and isinstance(entry, Mapping):
            full = {
                key: check_tensor(_OP, f"{where}.{key}", entry[key], managed.param.shape)
                for key in bucket.state_format.keys
                if key in entry
            }
            entry = {**entry, **{key: managed.cut(value) for key, value in full.items()}}
        state, lost = self.updater.kind.import_state(_OP, where, entry, managed.local, state_format)
        imported = {
            key: value
            for key, value in entry.items()
            if key != "master" or "master" in state or "remainder" in state
        }
        return ({**imported, "step": state["step"]} if state else {}), lost

    def _scatter(self, managed: Managed, bucket: Bucket, state: Mapping[str, Any]) -> None:
        """Keep this rank's part of a state as a state dict shows it."""
        managed.step = int(state["step"]) if state else 0
        for key in bucket.state_format.keys:
            values = state.get(key)
            if values is None and key == "master":
                continue
            flat = (
                torch.zeros(managed.local.numel(), device="cpu")
                if values is None
                else values.detach().reshape(-1)
            )
            if key == "master":
                self.updater.set_weights(bucket, managed, flat)
                continue
            for piece in bucket.pieces_of(managed):
                part = flat[piece.param_start : piece.param_start + piece.numel]
                self.updater.store.write(
                    bucket, key, piece.start, part.to(bucket.owned_weight.device)
                )
