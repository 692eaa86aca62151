"""Digests of a model: 64 bits that do not depend on where and how its values are stored.

How they are computed: engine/digests.py. docs/reproducibility.md says what they are for.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, overload

import torch
from torch import nn

from shardcore.checkpoint.format import named_parameters, names_of, plain_name
from shardcore.distributed.comm import Comm
from shardcore.engine.bucket import Bucket, Managed
from shardcore.engine.digests import (
    Digests,
    ReadStored,
    add_param,
    dtype_text,
    key_of,
    stored_states,
    stored_weight,
    units_of,
    unsigned,
)
from shardcore.engine.engine import Engine
from shardcore.engine.slices import held_by
from shardcore.optim.dtensor import is_dtensor
from shardcore.optim.interface import Superseded, engine_of

_OP = "digest"
_WHAT, _BY = ("weights", "grads", "states"), ("all", "unit", "param")
What = Literal["weights", "grads", "states"]


@overload
def digest(model: nn.Module, what: What = "weights", by: Literal["all"] = "all") -> int: ...


@overload
def digest(
    model: nn.Module, what: What = "weights", *, by: Literal["unit", "param"]
) -> dict[str, int]: ...


@overload
def digest(model: nn.Module, what: What, by: Literal["unit", "param"]) -> dict[str, int]: ...


@torch.no_grad()
def digest(model: nn.Module, what: What = "weights", by: str = "all") -> Any:
    """Return the digest of a model's weights, gradients or optimizer states: 64 bits, as an int.
    Collective: every rank gets the same.

    It does not depend on the stage, the tier, the units, the number of ranks and the device. No
    full tensor is made, except for tensor-parallel slices, one parameter at a time. A change of one
    element always changes it; so does a swap of two elements, save for chance (2^-64). All NaNs
    count as one; -0 differs from +0. docs/reproducibility.md has the format.

    Args:
        model: A sharded model, or an ordinary one, whose parameters may be DTensors.
        what: "weights": the parameters as the optimizer sees them: float32 masters, where there are
            any. "grads": the averaged gradients, as the step would use them before it clips; what
            has no gradient is left out. "states": the optimizer's moments and steps, in the dtype
            in which they are stored, of parameters with a step.
        by: "all", or a dict of int: "unit" by unit ("root": of what is in no unit), "param" by
            parameter, or by parameter and state. Digests of parameters add up, modulo 2^64, to
            those of units and of all. Between pipeline stages dicts have the parameters of one
            stage.

    Reads each byte once, waits for a running step, and changes nothing.

    Raises:
        ValueError, TypeError: For bad arguments, on every rank.
    """
    problem = _problem(model, what, by)
    found = engine_of(model) if isinstance(model, nn.Module) else None
    if isinstance(found, Superseded):
        found.refuse(_OP)
    digests = Digests()
    if not isinstance(found, Engine):
        if problem is not None:
            raise problem
        return _of_ordinary(model, what, by, digests)
    engine = found

    def check() -> str:
        if problem is not None:
            raise problem
        engine.refuse_held(_OP)
        if what != "grads":
            engine.updater.accept_weight_edits()
        return f"{what} by {by}"

    if what == "grads" and problem is None:
        engine.begin_grad_read(_OP, check)
    else:
        engine.agree(_OP, check)
    names = names_of(engine)
    for bucket in engine.buckets:
        for managed in bucket.params:
            for name, dtype, read in _values_of(engine, bucket, managed, names, what):
                key = key_of(name, dtype, tuple(managed.param.shape))
                if managed.sliced is None:
                    add_param(digests, name, key, bucket, managed, read)
                else:
                    _add_full(digests, name, key, engine, bucket, managed, read)
    rest = [(names[p], p) for _, p in engine.unmanaged if p not in engine.bucket_of]
    if what == "weights":
        for name, param in rest:
            _add_constant(digests, name, param, engine)
    if what == "states":
        _add_steps(digests, engine, names)
    return _added_up(engine, digests, names, by)


def _problem(model: object, what: object, by: object) -> Exception | None:
    if not isinstance(model, nn.Module):
        return TypeError(f"{_OP}: got a {type(model).__name__}; expected a model")
    for name, value, expected in (("what", what, _WHAT), ("by", by, _BY)):
        if value not in expected:
            words = ", ".join(f'"{each}"' for each in expected)
            return ValueError(f"{_OP}: {name} is {value!r}; expected one of {words}")
    return None


def _values_of(
    engine: Engine, bucket: Bucket, managed: Managed, names: Mapping[torch.Tensor, str], what: str
) -> Iterator[tuple[str, str, ReadStored]]:
    """Yield the name, the dtype and the reader of each tensor that a parameter adds."""
    name = names[managed.param]
    if what == "weights":
        dtype, read = stored_weight(engine, bucket)
        yield name, dtype_text(dtype), read
    elif what == "grads" and managed.has_grad:
        # one rank may keep them in the dtype of the weights; float32 has the same values
        yield name, "float32", bucket.read_grad
    elif what == "states" and bucket.group is not None and managed.step > 0:
        for key, (dtype_name, read) in stored_states(engine, bucket).items():
            yield f"{name}.{key}", dtype_name, read


def _add_full(
    digests: Digests,
    name: str,
    key: int,
    engine: Engine,
    bucket: Bucket,
    managed: Managed,
    read: ReadStored,
) -> None:
    """Add the full parameter of which ranks have slices: on the first rank, after all have gathered
    it. 8-bit codes count by their values.
    """
    state = name.removeprefix(plain_name(managed.name)).lstrip(".")

    def values(start: int, numel: int) -> torch.Tensor:
        if bucket.group is not None and state:
            return engine.store.read(bucket, state, start, numel)
        flat, rest = read(start, numel)
        return flat if rest is None else engine.store.read(bucket, "master", start, numel)

    full = engine.full_tensors.of_param(bucket, managed, values)
    digests.name(name)
    if engine.everyone.rank == 0:
        digests.add(name, key, full.contiguous().view(-1))
        digests.flush()  # before the next one is gathered


def _add_constant(digests: Digests, name: str, param: torch.Tensor, engine: Engine) -> None:
    """Add a frozen parameter that every rank has, or its slice of it."""
    full = engine.constant[param].full(held_by(param).detach())  # type: ignore[index]
    digests.name(name)
    if engine.everyone.rank == 0:
        _add_whole(digests, name, full)


def _add_whole(digests: Digests, name: str, tensor: torch.Tensor) -> None:
    key = key_of(name, dtype_text(tensor.dtype), tuple(tensor.shape))
    digests.add(name, key, tensor.detach().contiguous().view(-1))


def _add_steps(digests: Digests, engine: Engine, names: Mapping[torch.Tensor, str]) -> None:
    trained = [m for bucket in engine.updater.buckets for m in bucket.params if m.step > 0]
    steps = torch.tensor([managed.step for managed in trained], dtype=torch.int64, device="cpu")
    for number, managed in enumerate(trained):
        name = f"{names[managed.param]}.step"
        digests.name(name)
        if engine.everyone.rank == 0:
            digests.add(name, key_of(name, "int64", ()), steps[number : number + 1])


def _added_up(
    engine: Engine, digests: Digests, names: Mapping[torch.Tensor, str], by: str
) -> int | dict[str, int]:
    """Return the sums over the ranks. Collective."""
    comm = engine.comm
    totals = digests.totals(engine.device)
    labels = digests.names
    if by == "all":
        return unsigned(int(_sum(totals.sum().view(1), [comm, *comm.across]).item()))
    if by == "unit":
        units = units_of(engine, names)
        of_name = {name: plain_name(units[_param_of(name, units)]) or "root" for name in labels}
        labels = [*dict.fromkeys(of_name.values())]
        numbers = torch.tensor([labels.index(of_name[name]) for name in of_name], device="cpu")
        sums = torch.zeros(len(labels), dtype=torch.int64, device=totals.device)
        totals = sums.index_add_(0, numbers.to(totals.device), totals)
    return _as_dict(labels, _sum(totals, [comm, *comm.slices]))


def _param_of(name: str, params: Mapping[str, str]) -> str:
    """Return the parameter of a digest, which may be that of a state."""
    return name if name in params else name.rpartition(".")[0]


def _as_dict(names: Iterable[str], totals: torch.Tensor) -> dict[str, int]:
    return dict(zip(names, map(unsigned, totals.tolist()), strict=True))


def _sum(totals: torch.Tensor, comms: Iterable[Comm]) -> torch.Tensor:
    for comm in comms:
        comm.add_up(totals, _OP)
    return totals


def _of_ordinary(model: nn.Module, what: str, by: str, digests: Digests) -> int | dict[str, int]:
    """Return the digests of a model that is not sharded by shardcore."""
    if what == "states" or by == "unit":
        given = 'what="states"' if what == "states" else 'by="unit"'
        raise ValueError(
            f"{_OP}: got {given} for a {type(model).__name__} that is not sharded; expected the "
            "model that shardcore.shard returned"
        )
    for name, param in named_parameters(model):
        tensor = param if what == "weights" else param.grad
        if tensor is not None:
            whole = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
            _add_whole(digests, name, whole)
            digests.flush()
    totals = digests.totals(torch.device("cpu"))
    return unsigned(int(totals.sum())) if by == "all" else _as_dict(digests.names, totals)
