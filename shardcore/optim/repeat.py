"""The short way of a step that repeats the last one: what it needs from Python does not grow with the number of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardcore._native import _C
from shardcore.optim.batch import Group, Update
from shardcore.optim.options import CheckedOptions, check_options
from shardcore.optim.scale import DeviceScale
from shardcore.optim.state import Changes, StepCount

# The stepper and lists of each call, and its gradients as AdamLists.plain_grads returns them.
Found = Sequence[tuple["_C.AdamStepper", "_C.AdamLists", tuple[torch.Tensor, ...]]]


class Repeat:
    """The lists of a committed step, read once, to be run again while only values change.

    They are good as long as groups hold the same parameters and storage options, no state was put in place or taken away, and
    the same parameters have gradients. Options, learning rates and counts are looked at anew, and so is each tensor's memory.
    """

    def __init__(
        self,
        update: Update,
        steppers: Mapping[torch.device, "_C.AdamStepper"],
        groups: Sequence[Group],
        states: Mapping[torch.Tensor, Any],
        idle: Sequence[torch.Tensor],
    ) -> None:
        """Remember `update`, just committed."""
        self._calls = [
            (steppers[device], _C.AdamLists(**call.lists()), [index for index, _ in call.keys])
            for device, call in update.calls.items()
        ]
        self._states, self._idle, self._changes = states, tuple(idle), Changes.count
        self._groups = list(groups)
        self._params = [list(group["params"]) for group in groups]
        self._kinds = [_kind(group) for group in groups]
        self._checked = [CheckedOptions(group) for group in groups]
        index = {id(group): i for i, group in enumerate(groups)}
        self._sources = [(index[id(group)], None if state is None else state.count) for group, state in update.sources]
        self._counters = [count.counter for count in update.device_counts]
        self._source_of = update.source_of
        counts = [state.count for state in update.states]
        self._counts = list({id(count): count for count in counts if isinstance(count, StepCount)}.values())
        Changes.keep(self)

    def forget(self) -> None:
        """Let go of the tensors, as a state changed: `find` finds nothing any more."""
        self._calls, self._states = [], {}

    def find(
        self,
        op: str,
        groups: Sequence[Group],
        states: Mapping[torch.Tensor, Any],
        given: Sequence[torch.Tensor | None] | None,
    ) -> Found | None:
        """Return the calls of this step with their gradients, or None if something else has to be looked at.

        given: gradients in place of ``p.grad``, one entry for each parameter. Raises ValueError or TypeError for options that
        no step can use; those that hold are not looked at again.
        """
        if self._changes != Changes.count or states is not self._states or not _C.same_objects(groups, self._groups):
            return None
        for i, (group, params) in enumerate(zip(groups, self._params, strict=True)):
            if not self._checked[i].hold(group):
                check_options(op, group, f"param_groups[{i}].")
                if _kind(group) != self._kinds[i]:
                    return None
                self._checked[i] = CheckedOptions(group)
            if not _C.same_objects(group.get("params"), params):
                return None
        if given is not None and sum(grad is None for grad in given) != len(self._idle):
            return None
        found = []
        for stepper, lists, indices in self._calls:
            if given is None:
                grads = lists.plain_grads(self._idle)
            else:
                grads = lists.plain_grads((), [given[index] for index in indices])
            if grads is None:
                return None
            found.append((stepper, lists, grads))
        return found or None

    def run(self, scale: float | DeviceScale, found: Found) -> None:
        """Step with the gradients that were found, and count the step."""
        if isinstance(scale, DeviceScale):
            of_groups = [self._checked[i].hyper(self._groups[i]) for i, _ in self._sources]
            for stepper, lists, grads in found:  # of one device
                scalars = scale.decide(scale.squares(grads), self._counters, self._source_of, of_groups)
                stepper.repeat(lists, grads, scalars)
        else:
            hypers = [
                self._checked[i].hyper(self._groups[i], 1 if count is None else count.value + 1, scale)
                for i, count in self._sources
            ]
            for stepper, lists, grads in found:
                stepper.repeat(lists, grads, hypers)
        for count in self._counts:
            count.value += 1


def _kind(group: Group) -> tuple[Any, ...]:
    """The options of a group that decide which lists a step has."""
    return group["master"], group["state_dtype"], group["amsgrad"], group["stochastic_rounding"], group["capturable"]
