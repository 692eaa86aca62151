"""`shardcore compare`: the first step in which two runs differ, and what differed first in it.

A wrong name costs days, so the rule follows the order of computing. Once a unit's output differs
the loss does, and all gradients: they say nothing then. If all outputs agree, the first unit in the
order of backward whose local gradient differs is named: all units nearer to the loss agree. If the
local gradients of all ranks agree, the reduction is named, else the update.

Random states differ between runs whose code seeds only some generators. So they count only where an
output differs.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardcore.engine.digests import VERSION
from shardcore.metrics.compare_checkpoints import CheckpointComparison, compare_checkpoints
from shardcore.metrics.run_digests import FILE, FORMAT
from shardcore.metrics.writers import read_table

_OP = "compare"
_NO_LOSS = "0" * 16
_TORCH = ("torch", "cuda")  # the generators that modules draw from
Row = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """What differs first between two runs.

    kind: "load", "weights", "data", "random", "forward", "loss", "backward", "reduction", "update"
    or "buffers". where: the unit or the parameter. ranks: those whose values differ, where they are
    known by rank.
    """

    step: int
    kind: str
    where: str
    ranks: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Comparison:
    """The result for two runs. steps: the steps that both have, which were compared.

    difference: None if all agree. Not compared at all, with the reason, if `reason` is not empty.
    uncompared: what one run alone has.
    """

    steps: tuple[int, ...]
    difference: Difference | None
    reason: str = ""
    uncompared: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all that was compared agrees, and something was."""
        return not self.reason and self.difference is None and bool(self.steps)

    def __str__(self) -> str:
        """Say it in words."""
        if self.reason:
            return self.reason
        first, last = self.steps[0], self.steps[-1]
        if self.difference is None:
            equal = f"equal: {len(self.steps)} steps, {first} to {last}"
            return "; ".join([equal, *self.uncompared])
        return f"step {self.difference.step}: {self.difference.message}"


@dataclass(frozen=True)
class Run:
    """The digests of a run: the head that holds for each row, and rows, by step."""

    folder: Path
    heads: Mapping[int, Row]
    rows: Mapping[int, Row]


def read_run(folder: Path) -> Run:
    """Read the digests of a directory that was given to shardcore.Metrics.

    Raises FileNotFoundError if there are none, ValueError for other contents.
    """
    path = folder / FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{_OP}: {folder} contains no {FILE}. Record it with shardcore.Metrics(model, "
            "directory, digests=N)"
        )
    heads: dict[int, Row] = {}
    rows: dict[int, Row] = {}
    head: Row | None = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{_OP}: line {number} of {path} is cut short or damaged. Remove it to compare the "
                "steps before"
            ) from error
        if "format" in row:
            if row["format"] != FORMAT or row["version"] != VERSION:
                raise ValueError(
                    f"{_OP}: {path} is of {row['format']}, version {row.get('version')}; expected "
                    f"{FORMAT}, version {VERSION}"
                )
            head = row
        elif head is None:
            raise ValueError(f"{_OP}: {path} has no head in line 1; expected one of {FORMAT}")
        else:
            heads[row["step"]], rows[row["step"]] = head, row
    if head is None:
        raise ValueError(f"{_OP}: {path} is empty; expected digests of at least one step")
    return Run(folder, heads, rows)


def compare(one: Run, other: Run) -> Comparison:
    """Compare two runs step by step. Raises ValueError for runs of different models, or without a
    common step.
    """
    steps = sorted(one.rows.keys() & other.rows.keys())
    if not steps:
        raise ValueError(
            f"{_OP}: no step is in both runs: {_steps(one)} in {one.folder}, {_steps(other)} in "
            f"{other.folder}. Record the same steps"
        )
    before: int | None = None
    for step in steps:
        heads = one.heads[step], other.heads[step]
        _check_models(heads, one, other)
        if reason := _other_sums(*heads):
            batch = "" if one.rows[step]["batch"] == other.rows[step]["batch"] else "not "
            return Comparison(
                (), None, f"bits are not compared: {reason}, so gradients are added in another "
                f"order. The batches of step {step} are {batch}the same. {_norms(one, other)}",
            )  # fmt: skip
        found = _load(one, other, step, before) or _first(one.rows[step], other.rows[step], heads)
        if found is not None:
            return Comparison(tuple(steps), found)
        before = step
    return Comparison(tuple(steps), None, uncompared=tuple(_uncompared(one, other, steps)))


def _uncompared(one: Run, other: Run, steps: list[int]) -> Iterator[str]:
    """Say what one run alone has."""
    for run in (one, other):
        if alone := sorted(run.rows.keys() - steps):
            yield f"not compared: steps {alone[0]} to {alone[-1]} ({len(alone)}) of {run.folder}"
    if any(_NO_LOSS in (one.rows[step]["loss"], other.rows[step]["loss"]) for step in steps):
        yield "not compared: losses, which are not recorded"


def _check_models(heads: tuple[Row, Row], one: Run, other: Run) -> None:
    first, second = (head["params"] for head in heads)
    if first != second:
        name = next(n for n in [*first, *second] if first.get(n) != second.get(n))
        raise ValueError(
            f"{_OP}: the runs have different models: {name} has the shape {first.get(name)} in "
            f"{one.folder} and {second.get(name)} in {other.folder}; expected one model"
        )


def _other_sums(one: Row, other: Row) -> str:
    """Return in words why the sums of two runs are not the same, if they are not."""
    given = [{"ranks": head["ranks"], **head["sums"]} for head in (one, other)]
    keys = [key for key in given[0] if given[0][key] != given[1].get(key)]
    return ", ".join(f"{key} is {given[0][key]} and {given[1].get(key)}" for key in keys)


def _load(one: Run, other: Run, step: int, before: int | None) -> Difference | None:
    """Return the difference of the weights before a step. before: the last step that agrees."""
    mine, others = (
        run.rows[step].get("before") or run.rows.get(step - 1, {}).get("weights", {})
        for run in (one, other)
    )
    name = next((n for n in mine if n in others and mine[n] != others[n]), None)
    if name is None:
        return None
    message = f"the weights before it differ, first in {name}: "
    begins = any(before is None or run.heads[step] is not run.heads[before] for run in (one, other))
    if begins or before == step - 1:  # the weights after the step before agree
        message += "another start, another checkpoint, or a load that failed"
        return Difference(step, "load", name, (), message)
    message += f"the runs part after step {before}. Record the steps from there on, with digests=1"
    return Difference(step, "weights", name, (), message)


def _first(one: Row, other: Row, heads: tuple[Row, Row]) -> Difference | None:
    """Return what differs first in a step, in the order of computing; the weights before agree."""
    step = one["step"]

    def found(kind: str, where: str, message: str, ranks: tuple[int, ...] = ()) -> Difference:
        return Difference(step, kind, where, ranks, message)

    def differ(kind: str) -> Iterator[str]:
        mine, others = one.get(kind, {}), other.get(kind, {})
        return (name for name in mine if name in others and mine[name] != others[name])

    weights, changed = "the weights before it", ""
    if not ("before" in one and "before" in other):  # a row has them only if the last has not
        weights = f"the weights after step {step - 1}"
        changed = f", or a weight that changed after step {step - 1}"
    positions = {one.get("position"), other.get("position")} - {None}
    if one["batch"] != other["batch"] or len(positions) > 1:
        return found(
            "data", "", f"the batches differ, {weights} agree: other data, another seed or "
            "position of the data loader",
        )  # fmt: skip
    if forwards := [*differ("forward")]:
        unit, of_other = (
            next((unit for unit in row["order"] if unit in forwards), forwards[0])
            for row in (one, other)
        )
        if of_other not in one["order"]:  # one run leaves it out, and so goes on to a later unit
            unit = of_other
        where = f"the forward output of {unit or 'the root, outside of the units,'} differs"
        cause = "a nondeterministic kernel, other torch or hardware"
        if (unit in one["order"]) != (unit in other["order"]):
            where = f"the forward output of {unit}, which one run does not call, differs"
            cause = "a random choice of the model, or other options"
        drawn = [*differ("random")]
        if on_device := [name for name in drawn if name in _TORCH]:
            return found(
                "random", unit, f"{where}, and so do the random states of "
                f"{' and '.join(on_device)} before it: another seed, or random states that a "
                "resume did not restore",
            )  # fmt: skip
        note = f" (or {drawn[0]}'s random state, which differs)" if drawn else ""
        return found(
            "forward", unit, f"{where}; {weights}, the batches, torch's random states and the "
            f"outputs of earlier units agree: {cause}{changed}{note}",
        )  # fmt: skip
    knows_loss = _NO_LOSS not in (one["loss"], other["loss"])
    if knows_loss and one["loss"] != other["loss"]:
        return found(
            "loss", "", "the losses differ, the outputs of all units agree: another loss function, "
            "a nondeterministic kernel in it, or other targets",
        )  # fmt: skip
    ends = {end: [*reversed(names)] for end, names in heads[0]["root"].items()}
    units = [*reversed([unit for unit in one["order"] if unit in one["local"]])]
    nearest = True  # to the loss
    for unit in dict.fromkeys([*ends["behind"], *units, *one["local"], *ends["ahead"]]):
        if unit not in other["local"]:  # a frozen unit, which stage 3 has alone
            continue
        if ranks := _ranks(one["local"][unit], other["local"][unit]):
            note = "" if knows_loss or not nearest else " (or the loss, which is not recorded)"
            return found(
                "backward", unit, f"the local gradients of {unit} differ on ranks "
                f"{[*ranks]}; all outputs agree, and so do the gradients of units nearer to the "
                "loss: a nondeterministic kernel in its backward, other torch or hardware" + note,
                ranks,
            )  # fmt: skip
        nearest = False
    for kind, label, message in (
        (
            "grads",
            "reduction",
            "the reduced gradients differ{}, first in {}; the local gradients of all ranks agree: "
            "the network, or a device that adds wrong",
        ),
        (
            "weights",
            "update",
            "the weights after it differ{}, first in {}; the gradients agree: other options of the "
            "optimizer or states, or a device that computes wrong",
        ),
    ):
        if (name := next(differ(kind), None)) is not None:
            ranks = _ranks(one["own"][kind], other["own"][kind])
            if heads[0]["placement"] != heads[1]["placement"]:  # each rank has other parameters
                ranks = ()
            on = f" on ranks {[*ranks]}" if ranks else ""
            return found(label, name, message.format(on, name), ranks)
    if one["buffers"] != other["buffers"]:
        return found("buffers", "", "the buffers after it differ; all else agrees")
    return None


def _ranks(one: list[str], other: list[str]) -> tuple[int, ...]:
    """Return the ranks whose digests differ."""
    return tuple(rank for rank, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def _norms(one: Run, other: Run) -> str:
    """Say how far the losses and norms of two runs are apart."""
    tables = []
    for run in (one, other):
        try:
            tables.append({int(row["step"]): row for row in read_table(run.folder, _OP)})
        except FileNotFoundError:
            return "Without metrics.csv in both directories, norms are not compared, either"
    said = []
    for column in ("loss", "grad_norm"):
        worst = [
            (abs(a - b) / max(abs(a), abs(b), 1e-30), step)
            for step in sorted(tables[0].keys() & tables[1].keys())
            if (texts := (tables[0][step][column], tables[1][step][column])) and all(texts)
            for a, b in [map(float, texts)]
        ]
        if worst:
            apart, step = max(worst)
            said.append(f"{column} by {apart:.1e} (step {step})")
    return f"At most they differ in {' and in '.join(said)}" if said else "No norms are in both"


def _steps(run: Run) -> str:
    return f"steps {min(run.rows)} to {max(run.rows)}" if run.rows else "no steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "one",
        metavar="A",
        help="directory passed to shardcore.Metrics(digests=), or to save, or one checkpoint",
    )
    parser.add_argument("other", metavar="B", help="that of the other run, or checkpoint")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(parsed: argparse.Namespace) -> int:
    """Compare and print. Returns 0 if both are equal, else 1. Raises OSError, ValueError."""
    result = _compared(Path(parsed.one), Path(parsed.other))
    print(json.dumps({"equal": result.equal, **asdict(result)}) if parsed.json else result)
    return 0 if result.equal else 1


def _compared(one: Path, other: Path) -> Comparison | CheckpointComparison:
    """Compare the runs, or else the checkpoints, that two directories have."""
    if any((folder / FILE).is_file() for folder in (one, other)):
        return compare(read_run(one), read_run(other))
    return compare_checkpoints(one, other)
