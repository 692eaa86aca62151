"""Silent mistakes in a training loop: each gives one warning per engine, with its remedy.

An ordinary step does not enter this file (tests/engine/test_hot_path.py).
"""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from shardcore.torch_private import compiled_parts, disable_dynamo, is_compiled

logger = logging.getLogger("shardcore")

# DistributedDataParallel's switch of its reduction
GRAD_SYNC = "require_backward_grad_sync"
_STEPS_WATCHED = 3


class Mistakes:
    """The warnings of one engine.

    accumulate: the expected number of backwards per step. watches: whether `check_step` must see
    ordinary steps, too. no_sync: whether the user ran `shardcore.no_sync`.
    """

    def __init__(self, accumulate: int, rank: int) -> None:
        """Rank 0 warns; every rank warns of edits (`warn_of_lost_edits`)."""
        self._speaks, self._steps = rank == 0, 0
        self.accumulate, self.no_sync = accumulate, False
        self.watches = self._speaks and accumulate > 1
        self._before = 0  # how many backwards the step before had, while watched
        self._said: set[str] = set()

    def _say(self, text: str, *values: object) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning(text, *values)

    def check_step(
        self, backwards: int, updates: bool, repeats: bool, model: nn.Module | None
    ) -> None:
        """Check one step after `backwards` backwards.

        updates: some parameter had a gradient. repeats: the last step used these gradients, too.
        """
        if not self._speaks:
            return
        if self.watches:
            self._steps += 1
            same = backwards > 0 and self._before in (0, backwards)
            self._before = backwards
            differs = same and backwards != self.accumulate
            self.watches = differs and self._steps < _STEPS_WATCHED
            if differs and not self.watches:
                self._say(
                    "step: shard() got accumulate=%d, but each of the first %d steps came after %d "
                    "backward(s). Call step() after %d backwards, or pass accumulate=%d.",
                    self.accumulate,
                    _STEPS_WATCHED,
                    backwards,
                    self.accumulate,
                    backwards,
                )
        if not backwards and not updates:
            self._say(
                "step: no parameter has a gradient, so nothing was updated. Call backward() on a "
                "loss of this model after zero_grad() and before step()."
            )
        elif not backwards and repeats:
            self._say(
                "step: no backward ran since the last step, so this step used the same gradients "
                "again. Call zero_grad() and backward() before each step()."
            )
        if model is None or GRAD_SYNC not in vars(model) or self.accumulate > 1 or self.no_sync:
            return
        # True at the last backward of several; alone it is how gradients are reduced anyway
        if backwards > 1 or not vars(model)[GRAD_SYNC]:
            self._say(
                "step: model.%s has no effect on a sharded model. To add gradients locally, run "
                "each backward but the last inside `with shardcore.no_sync(model):`, or pass "
                "accumulate= to shard().",
                GRAD_SYNC,
            )

    @disable_dynamo
    def warn_of_compiling(self) -> None:
        """Warn that the forward of the whole model is being compiled."""
        if self._speaks:
            self._say(
                "forward: torch.compile is around the whole model. Its graph ends at each hook of "
                "shardcore, and gradients are reduced only after the backward of a whole graph. "
                "Pass compile=True to shard() instead, which compiles each unit."
            )

    def warn_of_frozen(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of an optimizer none of whose parameters requires a gradient."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if self._speaks and params and not any(param.requires_grad for param in params):
            self._say(
                "shard: no parameter of the optimizer requires a gradient, so steps update "
                "nothing. Set requires_grad before shard(), or pass None as the optimizer of a "
                "model that only runs forward."
            )

    def warn_of_lost_edits(self, names: Sequence[str]) -> None:
        """Warn of edits of these weights by name, before the step reverts them."""
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        self._say(
            "step: the 16-bit weights of %s were edited through .data after shard() or a load. "
            "Steps revert this edit, because the float32 masters do not have it. Edit before "
            "shard(), or edit the parameter itself: with torch.no_grad(): p.clamp_(-1, 1).",
            ", ".join(names[:3]) + more,
        )


def warn_of_compiled(model: nn.Module, units: Sequence[str], sharded: bool) -> None:
    """Warn of torch.compile around a model, or around units of it, before `shard`.

    units: the names of the units. sharded: their weights are, so each unit cuts a graph around it.
    Compiled blocks are fine. The first forward warns of a model compiled in place.
    """
    what = ""
    if is_compiled(model):
        what = "torch.compile(model) was called before shard(). State dicts get the prefix "
        what += (
            '"_orig_mod.", and each unit cuts the graph (stage 3).' if sharded else '"_orig_mod.".'
        )
    for name in compiled_parts(model) if sharded and not what else ():
        inside = [
            unit for unit in units if unit.startswith(f"{name}.") and unit != f"{name}._orig_mod"
        ]
        if inside:
            named = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
            what = (
                f"{name} was compiled before shard(), around the units {named}. Each unit cuts the "
                "graph (stage 3)."
            )
            break
    if what:
        logger.warning(
            "shard: %s Do not call torch.compile. Pass compile=True to shard(), which compiles "
            "each unit.",
            what,
        )
