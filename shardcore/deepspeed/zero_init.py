"""deepspeed.zero: Init, which partitions weights while a model is constructed, and
GatheredParameters.

Inside Init each rank runs the same constructors. At most `WHOLE_BYTES` of weights are full at once
(or the parameters of one module): beyond, the oldest are partitioned, with rank 0's values, and the
rest at the end. A constructor may use a partitioned weight: a TorchFunctionMode sees each function
of torch, getters included, gathers the weight before it, and counts it as full again. So weights
are partitioned at any time, and constructors do not notice.

All ranks partition and gather the same weights, which they compare before. A constructor that
raises an error on one rank raises on all of them.
Source: the behaviour documented at https://deepspeed.readthedocs.io/en/latest/zero3.html, 0.19.8.
"""

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from shardcore.checkpoint.pretrained import read_into_pieces
from shardcore.deepspeed.config import read_json
from shardcore.deepspeed.initialize import start_process_group
from shardcore.distributed.comm import Comm
from shardcore.distributed.machine import FreedMemory
from shardcore.engine.agreement import agree
from shardcore.engine.engine import Engine
from shardcore.engine.full_params import gathered
from shardcore.engine.pieces import (
    can_partition,
    check_load,
    described,
    gather,
    has_piece,
    id_of,
    is_partitioned,
    partition,
    pieces_of,
    show,
)
from shardcore.engine.pieces import gathered as gathered_pieces
from shardcore.engine.slices import refuse_slices
from shardcore.engine.unshard import tensors_in
from shardcore.optim.dtensor import is_dtensor
from shardcore.optim.group_options import dtype_name
from shardcore.optim.interface import engine_of
from shardcore.torch_private import unseen

logger = logging.getLogger("shardcore")

WHOLE_BYTES = 128 << 20

_OP = "zero.Init"
_THEN = "the model was not built"
_Tensor: Any = torch.Tensor
# These read no values, and no shape.
_OF_ANY = {
    getattr(_Tensor, name).__get__
    for name in (
        *("dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf"),
        *("is_cpu", "is_cuda", "is_meta", "is_quantized", "is_sparse"),
    )
} | {
    *(_Tensor.requires_grad.__set__, _Tensor.grad.__set__, _Tensor.requires_grad_),
    *(_Tensor.is_floating_point, torch.is_floating_point, _Tensor.is_complex, torch.is_complex),
    *(_Tensor.register_hook, _Tensor.element_size, _Tensor.__hash__),
}
# These read the shape alone, so one rank may call them.
_OF_SHAPE = {_Tensor.shape.__get__, _Tensor.ndim.__get__} | {
    *(_Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.nelement, _Tensor.__len__, torch.numel)
}


class _Construction(TorchFunctionMode):
    """The weights that are constructed inside the outermost Init.

    whole: the full ones, oldest first, with their bytes. Strong references: a collector frees
    cycles at other times on other ranks.
    made: all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.comm = Comm()
        self.whole: dict[nn.Parameter, int] = {}
        self.names: dict[nn.Parameter, str] = {}  # of full ones, with the class of their module
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.made: dict[int, weakref.ref[nn.Parameter]] = {}  # by id
        self._freed = FreedMemory()
        self.broken = False  # ranks disagreed: another collective could hang
        self._handles: list[Any] = []

    def begin(self) -> None:
        self._handles = [
            register_module_module_registration_hook(self._add_module),
            register_module_parameter_registration_hook(self._add_param),
        ]
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func in _OF_ANY:
            return func(*args, **kwargs)
        used: list[Any] = list(
            dict.fromkeys(t for t in tensors_in([args, kwargs]) if is_partitioned(t))
        )
        if not used:
            return func(*args, **kwargs)
        if func in _OF_SHAPE and args and args[0] is used[0]:
            stand_in = torch.empty(used[0].ds_shape, dtype=used[0].dtype, device="meta")
            return func(stand_in, *args[1:], **kwargs)
        self._agree([("weight that a constructor uses", described(p), "") for p in used])
        gather(self.comm, used)
        self.add(used, keep=set(used))
        return func(*args, **kwargs)

    @unseen
    def _add_param(self, module: Any, name: str, param: nn.Parameter | None) -> None:
        """(A hook of torch, which takes None as: leave it so.)"""
        if param is not None:
            self.watch(module)
            self.names[param] = f"{type(module).__name__}.{name}"
            self.add([param], keep={param, *module._parameters.values()})

    @unseen
    def _add_module(self, parent: Any, name: str, module: nn.Module | None) -> None:
        # of a copied module no parameter was registered
        if module is not None:
            self.add(module.parameters(), keep=())

    def watch(self, module: Any) -> None:
        """Let load_state_dict of a module say that its parameters are partitioned."""
        if module not in self._watched:
            self._watched.add(module)
            module.register_load_state_dict_pre_hook(_check_load)

    def add(self, params: Iterable[nn.Parameter], keep: Collection[Any]) -> None:
        """Count parameters as full, and partition the oldest but `keep` while there are too many
        bytes. Collective.
        """
        for param in params:
            if is_partitioned(param) or can_partition(param):
                self.made[id(param)] = weakref.ref(param)
                if not is_partitioned(param):
                    self.whole.setdefault(param, param.nbytes)
        total, oldest = sum(self.whole.values()), []
        for param, nbytes in self.whole.items():
            if total <= WHOLE_BYTES:
                break
            if param not in keep:
                oldest.append(param)
                total -= nbytes
        if oldest:
            self.partition(oldest)

    def partition(self, params: Sequence[nn.Parameter]) -> None:
        """Partition full parameters, with rank 0's values. Collective."""
        names = [self.names.get(param, "") for param in params]
        self._agree(
            [
                ("weight", f"{name} {tuple(p.shape)}".lstrip(), str(p.dtype))
                for name, p in zip(names, params, strict=True)
            ]
        )
        partition(self.comm, params, source=0)
        for param in params:
            self.names.pop(param, None)
            self._freed.add(self.whole.pop(param, 0))

    def _agree(self, entries: Sequence[tuple[str, str, str]]) -> None:
        try:
            agree(self.comm, _OP, entries=entries, then=_THEN, of_work=True)
        except BaseException:
            self.broken = True
            raise


_constructions: list[_Construction] = []  # of the outermost Init, if any


class Init:
    """A context in which weights are partitioned while a model is constructed. Collective: every
    rank must construct the same modules.

    Each rank keeps an equal part of each parameter, with rank 0's values. Outside of
    GatheredParameters a parameter is empty, and has ds_tensor, ds_shape, ds_numel, ds_id and
    ds_status. `initialize` and `shard` lay the parts out in shards. Constructors may read and edit
    weights. `from_pretrained` of transformers reads .safetensors files straight into the parts.

    A view of a weight that a constructor keeps may become a copy.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        *args: Any,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        sequence_data_parallel_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        """Start torch.distributed.

        module: A module to partition at once. All ranks get rank 0's values.
        data_parallel_group: None, or a group of all ranks. sequence_data_parallel_group replaces
            it, as in DeepSpeed. Raises NotImplementedError for a group of some ranks.
        dtype: The default dtype of torch inside the context. By default weights keep the dtypes
            that constructors give them, and `initialize` converts them, so masters lose nothing.

        Of `config_dict_or_path` (or `config`), a warning says if `initialize` will refuse 16-bit
        weights. The other arguments have no effect.
        """
        self._enabled, self._dtype = enabled, dtype
        self._config = kwargs.get("config_dict_or_path") or kwargs.get("config")
        self._contexts = ExitStack()
        if not enabled:
            return
        if not dist.is_initialized():
            start_process_group(_OP, 29500)
        _check_group(sequence_data_parallel_group or data_parallel_group)
        if module is not None:
            _partition_module(module)

    def __enter__(self) -> None:
        """Partition the parameters of modules from here on."""
        if not self._enabled:
            return
        if self._dtype is not None:
            self._contexts.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
        _warn_of_dtype(self._config)
        read_into_pieces(Init)
        self._construction = None if _constructions else _Construction()
        if self._construction is not None:
            _constructions.append(self._construction)
            self._construction.begin()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Partition the parameters that are still full. Collective; raises on every rank if a
        constructor did on one.
        """
        if not self._enabled:
            return
        self._contexts.close()
        own, self._construction = self._construction, None
        if own is not None:
            _constructions.remove(own)
            own.end(kind, error, traceback)
        construction = own or _constructions[0]
        if construction.broken:
            return
        if error is None:
            _partition_rest(construction)
        elif own is not None and construction.comm.world_size > 1:
            agree(construction.comm, _OP, [error], then=_THEN, of_work=True)


def _warn_of_dtype(config: Any) -> None:
    """Warn, before weights are read, that `initialize` refuses their dtype: `check_model`."""
    config = read_json(config) if isinstance(config, str | os.PathLike) else config
    dtype = torch.get_default_dtype()
    if dtype == torch.float32 or not isinstance(config, Mapping) or dist.get_rank() > 0:
        return
    sections = (config.get(n) for n in ("bf16", "bfloat16", "fp16", "torch_autocast"))
    if not any(isinstance(each, Mapping) and each.get("enabled") for each in sections):
        logger.warning(
            "%s: the weights are made in %s, and the configuration enables neither bf16 nor fp16, "
            "so initialize() will refuse them. Pass TrainingArguments(bf16=True) and "
            '{"bf16": {"enabled": "auto"}}, or from_pretrained(dtype=torch.float32)',
            _OP,
            dtype_name(dtype),
        )


def _check_group(group: dist.ProcessGroup | None) -> None:
    if group is None:  # perhaps of a single process that has no group
        return
    size, ranks = dist.get_world_size(group), dist.get_world_size()
    if size != ranks:  # a rank outside of its group has size -1
        raise NotImplementedError(
            f"{_OP}: data_parallel_group has {max(size, 0)} of {ranks} ranks, and weights are "
            "partitioned over all of them. Pass None, or build the model on the meta device and "
            "give initialize materialize="
        )


@unseen
def _partition_rest(construction: _Construction) -> None:
    # whether there are any or not: another rank may say here that its constructor failed
    construction.partition(list(construction.whole))


@contextmanager
def init_with_shapes() -> Iterator[None]:
    """Init, at whose end weights have their shapes, which optimizers may read. A read of values
    raises RuntimeError until `shard` ends. Collective.
    """
    with Init():
        made = _constructions[0].made
        yield
    show(param for ref in made.values() if (param := ref()) is not None)


def _check_load(*arguments: Any) -> None:
    if not _constructions:  # inside Init a load gathers what it writes to
        check_load(*arguments)


def _partition_module(module: nn.Module) -> None:
    construction = _Construction()
    for each in module.modules():
        construction.watch(each)
    for name, param in module.named_parameters():
        if can_partition(param) and not has_piece(param):
            construction.whole[param], construction.names[param] = param.nbytes, name
    _partition_rest(construction)


@contextmanager
def gathered_parameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Keep parameters unsharded inside the context. Collective.

    params: a parameter, several parameters (also of several models), or a module. Whole units are
        gathered, so pass many parameters at once.
    modifier_rank: the rank with the edits to keep, through `p.data` and `load_state_dict`, too. At
        the end all ranks take its weights, in their dtypes, and masters follow. None: edits must be
        the same on all ranks. At stage 3 a difference raises ValueError on all of them at the end.
        At stages 0 to 2 with None nothing is collective.

    If all parameters of a module are gathered, its state dict is local and keeps the dtypes of the
    weights. One rank alone may then save it.

    Parameters of `Init` are gathered before `initialize`, too, one by one, and 4-bit weights with
    their scales. With None a difference raises ValueError on all ranks. All other parameters, and
    None, stay as they are.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, nn.Parameter):
        params = [params]
    params = dict.fromkeys(param for param in params if param is not None) if enabled else {}
    engines = dict.fromkeys(filter(lambda it: isinstance(it, Engine), map(engine_of, params)))
    # In an order that all ranks have: a library may pass a set.
    of_engine = {
        engine: [param for param in engine.model.parameters() if param in params]
        for engine in engines
    }
    is_sliced = modifier_rank is not None and any(
        is_dtensor(param) for own in of_engine.values() for param in own
    )
    refuse_slices("GatheredParameters: modifier_rank", is_sliced, "the same edits on all ranks")
    in_pieces = (p for p in params if engine_of(p) is None and has_piece(p))
    of_init = sorted((each for param in in_pieces for each in pieces_of(param)), key=id_of)
    with ExitStack() as contexts:
        if of_init:
            contexts.enter_context(gathered_pieces(of_init, modifier_rank))
        for engine, own in of_engine.items():
            contexts.enter_context(gathered(engine, own, modifier_rank))
        yield
