"""Parameters in pieces, from their construction under zero.Init until `shard` lays them out in
units.

A partitioned Parameter stays the same object, and has empty data. This rank keeps its piece: an
equal part of the flat weight, the last one padded. DeepSpeed's attributes describe the weight:

    ds_tensor   this rank's piece, (ceil(ds_numel / ranks),)
    ds_shape, ds_numel   of the full weight
    ds_id       the same number on all ranks
    ds_status   NOT_AVAILABLE while it is partitioned, AVAILABLE while it is gathered

Pieces are cut over all ranks of torch.distributed. Large ones have memory of their own, which goes
back to the system when they are freed: a heap would keep it. A gathered weight keeps its piece, so
an error at the end of a context restores the values of before. The dtype of the empty data counts:
after `model.half()` a weight is gathered and laid out in half precision, from its piece.
Of a 4-bit weight of bitsandbytes the packed bytes and the scales are parameters in pieces.
Source: https://deepspeed.readthedocs.io/en/latest/zero3.html, 0.19.8.
"""

import copy
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Traffic, wait_all
from shardcore.distributed.compare import Entry
from shardcore.distributed.machine import FreedMemory
from shardcore.engine.agreement import agree
from shardcore.engine.bucket import Bucket, allocate
from shardcore.engine.build import Builder
from shardcore.engine.full_params import digest_of, leaving
from shardcore.engine.quantized import parts_of
from shardcore.engine.states import ReadPart, StateStore, part_of, set_weights
from shardcore.torch_private import is_traceable_wrapper_subclass, unseen, without_override


class ZeroParamStatus(enum.Enum):
    """Whether the weights of a parameter are there, or sharded (stage 3): `param.ds_status`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2


_OP = "zero.Init"
_MESSAGE = (
    "the parameter is partitioned by zero.Init, and each rank has its part alone. Shard the model "
    "first (shard, initialize, Fabric's setup, or train of a trainer), or use the parameter inside "
    "shardcore.zero.GatheredParameters"
)
# They change no values. Other functions that end with _ would, and empty data hides it.
_HARMLESS = {"requires_grad_", "detach_", "share_memory_"}
_ASSIGNS = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"}
_ATTRIBUTES = (
    *("ds_tensor", "ds_shape", "ds_numel", "ds_id", "ds_status"),
    *("_shardcore_ranks", "__deepcopy__"),
)
_FIRST_COPY = 1 << 40


class _Numbers:
    """The numbers of partitioned parameters. Copies count apart: one rank alone may make some."""

    def __init__(self) -> None:
        self.made, self.copied = count(), count(_FIRST_COPY)


_numbers: "WeakKeyDictionary[dist.ProcessGroup, _Numbers]" = WeakKeyDictionary()  # of all ranks
_alone = _Numbers()


def _numbers_now() -> _Numbers:
    world = dist.group.WORLD if dist.is_initialized() else None
    return _alone if world is None else _numbers.setdefault(world, _Numbers())


class _Empty:
    """The empty data of a partitioned parameter: what fails on it says why, and it is not pickled.
    What works on an empty tensor, as `half`, works here.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(getattr(func, "__name__", func))
        writes = name.endswith("_") and not name.startswith("_") and name not in _HARMLESS
        if (writes or name in _ASSIGNS) and args and isinstance(args[0], _Empty):
            raise RuntimeError(f"{name}: {_MESSAGE}")
        try:
            result = without_override(func, *args, **(kwargs or {}))
        except (RuntimeError, ValueError, IndexError) as error:
            raise RuntimeError(f"{name}: {_MESSAGE}") from error
        is_alias = func in (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
        return result.as_subclass(_InStateDict) if is_alias else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(f"pickle: {_MESSAGE}")


class _Partitioned(_Empty, nn.Parameter):
    """A Parameter while it is partitioned. It is the same object before and afterwards."""


class _InStateDict(_Empty, torch.Tensor):
    """What a state dict has of it."""


def has_piece(tensor: torch.Tensor) -> bool:
    """Whether a parameter was partitioned, and is in no engine yet."""
    return "ds_tensor" in getattr(tensor, "__dict__", ())


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether a parameter has its piece alone."""
    return has_piece(tensor) and tensor.ds_status is ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]


def pieces_of(param: nn.Parameter) -> list[nn.Parameter]:
    """Return a parameter with a piece; a 4-bit weight is followed by its scales."""
    return [param, *(part for _, part in parts_of(param))]


def partitioned_params(model: Any) -> list[nn.Parameter]:
    """Return the partitioned parameters of a model, in order; none of what is no model."""
    params = model.parameters() if isinstance(model, nn.Module) else ()
    return [each for param in params if is_partitioned(param) for each in pieces_of(param)]


@unseen
def can_partition(param: nn.Parameter) -> bool:
    """Whether a parameter is an ordinary dense tensor in memory. Others, such as quantized ones,
    stay full.
    """
    return (
        type(param) is nn.Parameter
        and not param.is_meta
        and not is_traceable_wrapper_subclass(param.data)
        and param.layout == torch.strided
    )


def id_of(param: nn.Parameter) -> int:
    """Return the number of a parameter with a piece."""
    number: int = param.ds_id  # type: ignore[attr-defined]
    return number


def described(param: Any) -> str:
    """Return a parameter with a piece in words: names are not known before `shard`."""
    return f"number {param.ds_id}, {tuple(param.ds_shape)}"


@unseen
@torch.no_grad()
def partition(comm: Comm, params: Iterable[nn.Parameter], source: int | None = None) -> None:
    """Keep this rank's pieces of full parameters, and free the rest.

    source: the rank whose values count, by a broadcast of one parameter after the other
        (collective); None: all ranks have the same values.
    """
    param: Any
    for param in params:
        values = param.data.contiguous().view(-1)
        if source is not None and comm.world_size > 1:
            values = values.to(comm.device)
            comm.broadcast(values, source, _OP)
        shape, numel = param.shape, param.numel()
        piece = values.to(param.device)
        if comm.world_size > 1:
            size = -(-numel // comm.world_size)
            start = min(comm.rank * size, numel)
            piece = allocate(size, param.dtype, param.device)
            own = values[start : start + size]
            piece[: own.numel()] = own
        _keep(comm, param, piece, shape)


@unseen
def begin(comm: Comm, param: nn.Parameter, shape: Sequence[int]) -> None:
    """Make an empty parameter a partitioned one of this shape, without values: `fill_piece` or
    `scatter_piece` gives them. All ranks begin the same parameters in the same order.
    """
    size = -(-prod(shape) // comm.world_size)
    _keep(comm, param, allocate(size, param.dtype, param.device), torch.Size(shape))


def _keep(comm: Comm, param: Any, piece: torch.Tensor, shape: torch.Size) -> None:
    """Give a parameter its piece, and DeepSpeed's attributes."""
    param.ds_tensor, param.ds_shape, param.ds_numel = piece, shape, prod(shape)
    param._shardcore_ranks = comm.world_size
    if "ds_id" not in param.__dict__:
        param.ds_id = next(_numbers_now().made)
    _hide(param)


@unseen
def _hide(param: Any) -> None:
    """Show a partitioned parameter as DeepSpeed does: empty."""
    param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    if type(param) is nn.Parameter:
        param.__class__ = _Partitioned
    # of the object, since torch's copies the empty data alone
    param.__deepcopy__ = partial(_copy, param)


def _unhide(param: Any) -> None:
    if type(param) is _Partitioned:
        param.__class__ = nn.Parameter  # type: ignore[assignment]


@unseen
def _copy(param: Any, memo: dict[int, Any]) -> nn.Parameter:
    """Return a copy of a partitioned parameter, which is partitioned, too. Not collective."""
    if id(param) in memo:
        return memo[id(param)]  # type: ignore[no-any-return]
    empty = torch.empty(0, dtype=param.dtype, device=param.device)
    twin: Any = nn.Parameter(empty, param.requires_grad)
    memo[id(param)] = twin
    twin.__dict__.update(
        {key: value for key, value in param.__dict__.items() if key != "__deepcopy__"}
    )
    twin.ds_tensor, twin.ds_id = copy.deepcopy(param.ds_tensor), next(_numbers_now().copied)
    if hasattr(twin, "quant_state"):
        twin.__class__ = param.__class__
        twin.quant_state = copy.deepcopy(param.quant_state, memo)
    _hide(twin)
    if param.shape == param.ds_shape:
        show([twin])
    return twin  # type: ignore[no-any-return]


@unseen
@torch.no_grad()
def full_of(comm: Comm, param: Any) -> torch.Tensor:
    """Return the full weight of a partitioned parameter, in its shape and dtype, on the device of
    `comm`. Collective.
    """
    piece: torch.Tensor = param.ds_tensor
    if comm.world_size == 1:
        full = piece
    else:
        full = allocate(piece.numel() * comm.world_size, piece.dtype, comm.device)
        full[comm.rank * piece.numel() :][: piece.numel()] = piece
        wait_all(comm.all_gather([full], Traffic.READ, _OP))
    return full[: param.ds_numel].view(param.ds_shape).to(param.dtype)


@unseen
@torch.no_grad()
def gather(comm: Comm, params: Iterable[nn.Parameter]) -> None:
    """Give partitioned parameters their full weights, in memory of their own. Collective."""
    param: Any
    for param in params:
        full = full_of(comm, param).to(param.device)
        shares = full.data_ptr() == param.ds_tensor.data_ptr()
        param.data = full.clone() if shares else full
        param.ds_status = ZeroParamStatus.AVAILABLE
        del param.__deepcopy__
        _unhide(param)


def check_load(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Raise RuntimeError if a state dict has a partitioned parameter of a module. A hook of
    load_state_dict, which would only find the sizes of empty data.
    """
    for name, param in module._parameters.items():
        if param is not None and is_partitioned(param) and prefix + name in state_dict:
            raise RuntimeError(f"load_state_dict: {prefix + name}: {_MESSAGE}")


@contextmanager
def gathered(params: Sequence[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
    """Gather parameters with pieces inside the context, and partition them again at its end.
    Collective.

    params: in an order that all ranks have. Some may be gathered already; they stay so.
    modifier_rank: the rank of torch.distributed whose values count at the end; None: all ranks must
        have the same ones.

    Raises ValueError on all ranks, with the weights as before, if these differ.
    """
    comm, op = Comm(), f"GatheredParameters(modifier_rank={modifier_rank})"
    source = None if modifier_rank is None else comm.rank_of(op, modifier_rank)
    opened = {param for param in params if is_partitioned(param)}
    entries = [("weight", described(param), str(param in opened)) for param in params]
    agree(comm, op, entries=entries)
    gather(comm, filter(opened.__contains__, params))

    @unseen
    def settle() -> None:
        own = [param for param in params if has_piece(param)]  # else an engine has it meanwhile
        entries: list[Entry] = [
            ("weight", described(param), str(tuple(param.shape)), str(param.dtype)) for param in own
        ]
        if source is None and comm.world_size > 1:
            entries += [
                ("values of weight", described(param), str(digest_of(param).item()))
                for param in own
            ]
        try:
            agree(comm, f"the end of {op}", entries=entries, then="the weights are as before")
        except BaseException:
            hide(opened)
            raise
        for param in own:
            if param in opened:
                partition(comm, [param], source)
            elif source is not None:
                _take_values(comm, param, source)

    with leaving(settle):
        yield


@unseen
@torch.no_grad()
def _take_values(comm: Comm, param: nn.Parameter, source: int) -> None:
    value = param.detach().to(comm.device).contiguous()
    comm.broadcast(value, source, _OP)
    param.detach().copy_(value)  # nothing, if it is the same memory


@unseen
@torch.no_grad()
def fill_piece(comm: Comm, param: Any, read: ReadPart) -> None:
    """Fill this rank's piece with new values, in the parameter's dtype. Only the piece is read.
    Not collective.
    """
    size = param.ds_tensor.numel()
    start = min(comm.rank * size, param.ds_numel)
    numel = min(size, param.ds_numel - start)
    piece = allocate(size, param.dtype, param.ds_tensor.device)
    if numel:
        piece[:numel] = read(start, numel)
    param.ds_tensor = piece


@unseen
@torch.no_grad()
def scatter_piece(comm: Comm, param: Any, flat: torch.Tensor | None, source: int) -> None:
    """Fill all pieces of a parameter from the flat values on rank `source`, in the parameter's
    dtype. Collective.
    """
    size, piece = param.ds_tensor.numel(), param.ds_tensor
    parts = torch.empty(0, dtype=param.dtype, device=comm.device)
    if flat is not None and comm.rank == source:
        parts = allocate(size * comm.world_size, param.dtype, comm.device)
        parts[: flat.numel()] = flat
    own = allocate(size, param.dtype, comm.device)
    comm.scatter(own, parts, source, _OP)
    param.ds_tensor = own.to(piece.device)


# --- from pieces into units -----------------------------------------------------------------------


@unseen
def show(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Let partitioned parameters have their shapes, without memory, and return those that were
    empty. A read raises RuntimeError.
    """
    hidden: list[Any] = [
        param
        for param in params
        if is_partitioned(param) and param.shape != param.ds_shape  # type: ignore[attr-defined]
    ]
    for param in hidden:
        like = torch.empty(0, dtype=param.dtype, device=param.device)
        param.data = _C.closed(param.ds_shape, like, _MESSAGE)
    return hidden


def hide(params: Iterable[nn.Parameter]) -> None:
    """Show parameters that still have their pieces as empty again, with the values of these."""
    for param in params:
        if has_piece(param):
            _hide(param)


def checked_pieces(comm: Comm, model: Any) -> list[nn.Parameter]:
    """Return the partitioned parameters of a model. Raise ValueError unless the ranks of `comm`
    have their pieces.
    """
    params: list[Any] = partitioned_params(model)
    for param in params:
        if not has_piece(param):
            raise ValueError(
                "shard: the scales of a 4-bit weight were moved to another device before shard(), "
                "which loses their parts. Load the model again, and let shard() move it"
            )
        if param._shardcore_ranks != comm.world_size:
            raise ValueError(
                "shard: the weights were partitioned at their construction over "
                f"{param._shardcore_ranks} ranks, and shard() got {comm.world_size}. Pass "
                'process_group=None, or build the model under torch.device("meta")'
            )
    return params


def assemble(params: Iterable[nn.Parameter]) -> None:
    """Make partitioned parameters ordinary ones, with all of their weights. Collective."""
    params = [param for param in params if is_partitioned(param)]
    gather(Comm(), params)
    for param in params:
        forget(param)


def forget(param: nn.Parameter) -> None:
    """Free the piece of a parameter, which has its values elsewhere."""
    for name in _ATTRIBUTES:
        param.__dict__.pop(name, None)
    _unhide(param)


@unseen
@torch.no_grad()
def lay_out(
    builder: Builder, buckets: Iterable[Bucket], store: StateStore, model: nn.Module
) -> None:
    """Move the partitioned parameters of a model into buckets, one after the other; the ones
    without a bucket become full. Collective.
    """
    left = dict.fromkeys(partitioned_params(model))
    comm, freed = builder.comm, FreedMemory()
    for bucket in buckets:
        for managed in bucket.params:
            if managed.param not in left:
                continue
            del left[managed.param]
            values = full_of(comm, managed.param)
            with builder.together(f"placing {managed.name}"):
                set_weights(store, bucket, managed, part_of(values))
                builder.attach(bucket, managed)
                forget(managed.param)
            freed.add(values.nbytes)
    for param in left:
        gather(comm, [param])
        forget(param)
        builder.move_rest([param], broadcast=False)
    for param in filter(has_piece, model.parameters()):  # gathered: filled like any other
        for each in pieces_of(param):
            forget(each)
