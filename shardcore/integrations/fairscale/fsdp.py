"""FullyShardedDataParallel of FairScale, with its wrap functions, on shardcore.shard at stage 3.

Note [The optimizer comes later]. Scripts make the optimizer after FullyShardedDataParallel(model),
and shard needs both. So wrapping only notes what is asked for. The first forward that trains looks
for the one optimizer that has the model's parameters, and shards both. For that this file, once
imported, lets torch.optim.Optimizer's constructor note each optimizer that is made, weakly. The
script's optimizer goes on: its methods become those of the optimizer that shard returned, and they
share groups and states.
"""

import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardcore.api import (
    full_params,
    load_sharded_state_dict,
    no_sync,
    shard_and_log,
    sharded_state_dict,
)
from shardcore.integrations.fairscale.oss import OSS, optimizer_goes_on
from shardcore.optim.clip import clip_grad_norm_
from shardcore.optim.interface import engine_of
from shardcore.torch_private import mark_stepped

# --- the optimizer that comes later ---------------------------------------------------------------

_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _note_optimizers() -> None:
    """See Note [The optimizer comes later]."""
    torchs = torch.optim.Optimizer.__init__

    @wraps(torchs)
    def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        torchs(self, *args, **kwargs)
        _optimizers.add(self)

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]


_note_optimizers()


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers, made since this file was imported, that have parameters of the
    model.
    """
    params = set(model.parameters())

    def matching() -> list[torch.optim.Optimizer]:
        optimizers = []
        for optimizer in list(_optimizers):
            trained = [param for group in optimizer.param_groups for param in group["params"]]
            # an OSS is not listed: the optimizer inside it is
            if not isinstance(optimizer, OSS) and not params.isdisjoint(trained):
                optimizers.append(optimizer)
        return optimizers

    if len(matching()) > 1:
        # schedulers and optimizers refer to each other, so dropped ones may be there still
        gc.collect()
    return matching()


def keep_working(old: torch.optim.Optimizer, sharded: Any) -> None:
    """Let `old` go on as the optimizer that shard returned for it."""
    if old is sharded:
        return
    for name in (
        "step",
        "zero_grad",
        "state_dict",
        "load_state_dict",
        "add_param_group",
        "scale_loss",
    ):
        if hasattr(sharded, name):
            old.__dict__[name] = partial(getattr(sharded, name))
    # schedulers would put the step of old's class in its place
    mark_stepped(old)
    old.param_groups, old.state = sharded.param_groups, sharded.state


class ShardedLater(nn.Module):
    """A model that is sharded by its first forward that trains."""

    def shard_options(self) -> dict[str, Any] | None:
        """Return the options of shard; None for a part of a model that is sharded as a whole."""
        raise NotImplementedError

    def shard_now(self) -> None:
        """Shard, if that is still to do. Collective.

        With gradients disabled, or in eval(), nothing is done as long as there is no optimizer.
        Otherwise ValueError unless there is one.
        """
        if engine_of(self) is not None:
            return
        options = self.shard_options()
        if options is None:
            return
        optimizers = optimizers_of(self)
        if not optimizers and not (torch.is_grad_enabled() and self.training):
            return
        kind = type(self).__name__
        if len(optimizers) != 1:
            raise ValueError(
                f"{kind}: its first forward found {len(optimizers)} optimizers with its "
                f"parameters; expected one (with groups for different options), made before this "
                f"forward and after the import of shardcore.integrations.fairscale; forwards "
                f"without one need torch.no_grad() or eval()"
            )
        (optimizer,) = optimizers
        trained = {param for group in optimizer.param_groups for param in group["params"]}
        if not trained <= set(self.parameters()):
            raise ValueError(
                f"{kind}: the optimizer holds parameters of other modules, too; expected "
                "FullyShardedDataParallel(model) around the whole model of the optimizer"
            )
        with optimizer_goes_on():
            _, sharded = shard_and_log(self, optimizer, **options)
        keep_working(optimizer, sharded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Shard if that is still to do, before any hook; then run forward."""
        self.shard_now()
        return super().__call__(*args, **kwargs)


# --- FullyShardedDataParallel ---------------------------------------------------------------------


@dataclass
class _WrapRequest:
    """What a wrapper was asked for: options of shard, FairScale's arguments; and whether it lies
    in another wrapper.
    """

    options: Mapping[str, Any]
    arguments: Mapping[str, Any]
    inside: bool = False

    def __deepcopy__(self, memo: Any) -> "_WrapRequest":
        return _WrapRequest(
            self.options, self.arguments, self.inside
        )  # a process group has no copies


def _options_of(
    module: nn.Module,
    process_group: Any,
    reshard_after_forward: bool,
    mixed_precision: bool,
    fp32_reduce_scatter: bool,
    move_params_to_cpu: bool,
    compute_dtype: torch.dtype | None,
    buffer_dtype: torch.dtype | None,
    move_grads_to_cpu: bool | None,
) -> dict[str, Any]:
    """Return options of shard for arguments of FairScale's; ValueError for what shard cannot do."""
    op = "FullyShardedDataParallel"
    compute = compute_dtype or (torch.float16 if mixed_precision else torch.float32)
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: None}
    dtypes = {param.dtype for param in module.parameters() if param.is_floating_point()}
    if not mixed_precision and dtypes == {compute}:
        compute = torch.float32  # what shard leaves as it is
    if compute not in names or (compute != torch.float32 and not mixed_precision):
        raise ValueError(
            f"{op}: compute_dtype is {compute_dtype} with mixed_precision={mixed_precision}; "
            "expected float16 or bfloat16 with mixed_precision=True, the dtype of the parameters, "
            "or None"
        )
    if fp32_reduce_scatter and not mixed_precision:
        raise ValueError(
            f"{op}: fp32_reduce_scatter is True without mixed_precision; expected "
            f"mixed_precision=True, or False"
        )
    if buffer_dtype not in (None, torch.float32):
        raise ValueError(
            f"{op}: buffer_dtype is {buffer_dtype}; expected None (buffers keep their dtype), or "
            f"to cast them first"
        )
    if move_grads_to_cpu and not move_params_to_cpu:
        raise ValueError(
            f"{op}: move_grads_to_cpu is True, but move_params_to_cpu is not; expected both, or "
            f"offload={{...}}"
        )
    offload = {"optimizer": "cpu", "params": "cpu"} if move_params_to_cpu else None
    if offload is not None and move_grads_to_cpu is not False:
        offload["gradients"] = "cpu"
    return {
        "stage": 3,
        "process_group": process_group,
        "reshard_after_forward": reshard_after_forward,
        "precision": names[compute],
        "reduce_dtype": "fp32" if fp32_reduce_scatter else None,
        "offload": offload,
    }


class FullyShardedDataParallel(ShardedLater):
    """Shards a model over all ranks (ZeRO stage 3); wrapped modules inside it are its units.

    The same module is returned, changed in place: it stays the same object, with the names of its
    parameters, and gets a class of both kinds. When it is sharded: see the Note at the top of the
    file.
    """

    _fsdp: _WrapRequest

    def __new__(cls, module: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the module itself, of a class that is this one and its own."""
        if module is None:  # copies
            return super().__new__(cls)
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"FullyShardedDataParallel: module is a {type(module).__name__}; expected a "
                f"torch.nn.Module"
            )
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"FullyShardedDataParallel: the {type(module).__name__} is wrapped already; "
                f"expected to wrap it once"
            )
        wrapper: Any = cls
        kind: Any = type(module)
        module.__class__ = _wrapped_class(wrapper, kind)
        return module

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        process_group_reduce_scatter: Any = None,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
        **options: Any,
    ) -> None:
        """Note what is asked for. Nothing is sharded yet.

        Args:
            module: the model; or a part of it, which is gathered on its own, and whose options are
                those of the model's wrapper (in a model with mixed_precision a part without keeps
                float32 weights).
            process_group: the ranks (default: all).
            reshard_after_forward, mixed_precision, fp32_reduce_scatter, compute_dtype: see
            docs/fairscale.md.
            move_params_to_cpu, cpu_offload, move_grads_to_cpu: keep weights, states and gradients
            in host memory.
            state_dict_on_rank_0_only: state_dict() is empty on other ranks.
            options: of shardcore.shard: units, loss_scale, offload, overlap_step, ...

        The other arguments are accepted and change nothing, but for buffer_dtype, state_dict_device
        and force_input_to_fp32, which raise ValueError where they ask for something.
        """
        if state_dict_device is not None or force_input_to_fp32:
            raise ValueError(
                f"FullyShardedDataParallel: state_dict_device is {state_dict_device}, "
                f"force_input_to_fp32 {force_input_to_fp32}; expected None and False"
            )
        requested = _options_of(
            module,
            process_group,
            reshard_after_forward,
            mixed_precision,
            fp32_reduce_scatter,
            move_params_to_cpu or cpu_offload,
            compute_dtype,
            buffer_dtype,
            move_grads_to_cpu,
        )
        arguments = {
            "process_group": process_group,
            "reshard_after_forward": reshard_after_forward,
            "mixed_precision": mixed_precision,
            "flatten_parameters": flatten_parameters,
            "move_params_to_cpu": move_params_to_cpu or cpu_offload,
            "state_dict_on_rank_0_only": state_dict_on_rank_0_only,
        }
        self.__dict__["_fsdp"] = _WrapRequest({**requested, **options}, arguments)
        for part in get_fsdp_instances(self):
            part._fsdp.inside = part is not self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module; else what the wrapper was asked for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            request = self.__dict__.get("_fsdp")
            if request is None or name not in request.arguments:
                raise
            return request.arguments[name]

    def shard_options(self) -> dict[str, Any] | None:
        """Return the options of shard, with the wrapped parts as units. ValueError if theirs are
        others.
        """
        if self._fsdp.inside:
            return None
        options = self._fsdp.options
        parts = [part for part in get_fsdp_instances(self) if part is not self]
        fp32_params: list[nn.Parameter] = []
        for part in parts:
            part_options = part._fsdp.options
            ignored = {"units", "process_group", "reshard_after_forward"}
            if options["precision"] is not None and part_options["precision"] is None:
                ignored |= {"precision", "reduce_dtype"}
                fp32_params.extend(
                    param for param in part.parameters() if param not in set(fp32_params)
                )
            for name in sorted({*part_options} - ignored):
                if options.get(name) != part_options.get(name):
                    raise ValueError(
                        f"FullyShardedDataParallel: a {type(part).__name__} inside the "
                        f"{type(self).__name__} sets {name}={part_options.get(name)!r}, and the "
                        f"outer module {options.get(name)!r}; expected the same"
                    )
        result = {"units": parts or "auto", **options}
        if fp32_params:
            result["keep_fp32"] = [*options.get("keep_fp32", ()), *fp32_params]
        return result

    @property
    def module(self) -> nn.Module:
        """The wrapped module (this module itself), or its own part of this name."""
        return self._modules.get("module") or self

    @property
    def _is_first_rank(self) -> bool:
        group = self._fsdp.options["process_group"]
        return not dist.is_initialized() or dist.get_rank(group) == 0

    @property
    def _is_sharded(self) -> bool:
        return engine_of(self) is not None or any(
            engine_of(param) is not None for param in self.parameters()
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be copied, without what `shard` has made of it."""
        return _new, type(self).__bases__, *object.__reduce_ex__(self, protocol)[2:]

    def summon_full_params(
        self, recurse: bool = True, volatile: bool = False
    ) -> AbstractContextManager[None]:
        """Unshard the weights in a context, to read or to edit them in place: the same edits on
        every rank. Collective.
        """
        return full_params(self) if self._is_sharded else nullcontext()

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Do nothing: shared parameters are found in all wrappers."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients locally inside the context. The model is sharded by then."""
        self.shard_now()
        with no_sync(self):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients to a norm over all ranks of at most max_norm. Return the norm before.
        Collective.
        """
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return full weights in float32, by the names of the plain model. Collective."""
        state = super().state_dict(*args, **kwargs)  # on every rank: it is collective
        on_rank_0_only = self._fsdp.arguments["state_dict_on_rank_0_only"]
        if on_rank_0_only and not self._fsdp.inside and not self._is_first_rank:
            return {}
        return state

    def local_state_dict(self) -> dict[str, Any]:
        """Return the weights in shards, for torch.distributed.checkpoint (see
        shardcore.sharded_state_dict). Collective.
        """
        self.shard_now()
        return sharded_state_dict(self)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Set the weights from a dict of local_state_dict that a checkpoint filled. Collective."""
        self.shard_now()
        load_sharded_state_dict(self, state_dict)

    @staticmethod
    def consolidate_shard_weights(*args: Any, **kwargs: Any) -> None:
        """Raise an error: weights of local_state_dict go to torch.distributed.checkpoint."""
        raise NotImplementedError(
            "consolidate_shard_weights: not built; expected model.state_dict(), or shardcore.save "
            "and shardcore.consolidate"
        )

    def gather_full_optim_state_dict(
        self, optim: torch.optim.Optimizer, **ignored: Any
    ) -> dict[str, Any] | None:
        """Return the optimizer's full state dict, in torch.optim's format, on rank 0; None on
        others. Collective.
        """
        state = optim.state_dict()  # on every rank: it is collective
        return state if self._is_first_rank else None

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the state dict as it is: the optimizer's load_state_dict takes full ones, the
        same on every rank.
        """
        return full_optim_state_dict


@cache
def _wrapped_class(wrapper: Any, kind: Any) -> Any:
    return type(
        kind.__name__,
        (wrapper, kind),
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__},
    )


def _new(wrapper: Any, kind: Any) -> nn.Module:
    wrapped = _wrapped_class(wrapper, kind)
    return wrapped.__new__(wrapped)  # type: ignore[no-any-return]


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """Return the wrapped modules in a module, including itself. With skip_empty, return only
    modules with parameters.
    """
    wrapped = [module for module in mod.modules() if isinstance(module, FullyShardedDataParallel)]
    if not skip_empty:
        return wrapped
    return [module for module in wrapped if next(module.parameters(), None) is not None]


# --- wrap -----------------------------------------------------------------------------------------


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Whether auto_wrap looks into a module (recurse), or wraps it: one with min_num_params
    outside of wrapped parts.
    """
    policy: Any = default_auto_wrap_policy
    leaves = policy.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = policy.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    is_large = unwrapped_params >= min_num_params
    if recurse:
        return is_large and not isinstance(module, tuple(leaves))
    return (is_large or (module_is_root and skip_params_check_for_root)) and not isinstance(
        module, tuple(excluded)
    )


default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
default_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def config_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool
) -> bool:
    """Return whether auto_wrap wraps a module: if it has an attribute wrapper_config, a dict of
    arguments.
    """
    return recurse or hasattr(module, "wrapper_config")


@dataclass
class _Wrapping:
    wrapper: Callable[..., nn.Module]
    policy: Callable[..., bool]
    options: Mapping[str, Any]


_wrapping: list[_Wrapping] = []  # of the enable_wrap that runs; there is one at most


@contextmanager
def enable_wrap(
    auto_wrap_policy: Callable[..., bool] | None = None,
    wrapper_cls: Callable[..., nn.Module] = FullyShardedDataParallel,
    **wrapper_kwargs: Any,
) -> Iterator[None]:
    """Let wrap and auto_wrap inside the context wrap modules as wrapper_cls(module,
    **wrapper_kwargs).

    Raises NotImplementedError inside another enable_wrap.
    """
    if _wrapping:
        raise NotImplementedError(
            "enable_wrap: it was called inside of another enable_wrap; expected one at a time"
        )
    _wrapping.append(
        _Wrapping(wrapper_cls, auto_wrap_policy or default_auto_wrap_policy, wrapper_kwargs)
    )
    try:
        yield
    finally:
        _wrapping.clear()


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module inside of enable_wrap, whose arguments its wrapper_config and wrap_overrides
    change; else return it.
    """
    if not _wrapping:
        return module
    return _wrapping[0].wrapper(
        module,
        **{**_wrapping[0].options, **getattr(module, "wrapper_config", {}), **wrap_overrides},
    )


def auto_wrap(
    module: nn.Module, auto_wrap_policy: Callable[..., bool] | None = None, **kwargs: Any
) -> nn.Module:
    """Wrap a module and its parts, inside out, by a policy (of enable_wrap, or this argument).
    Outside of enable_wrap return the module.

    Raises ValueError for a module with wrapped parts.
    """
    if not _wrapping:
        return module
    wrapper = _wrapping[0].wrapper
    if isinstance(wrapper, type) and any(isinstance(part, wrapper) for part in module.modules()):
        raise ValueError(
            f"auto_wrap: the {type(module).__name__} contains wrapped modules; expected a module "
            "without any, or wrap(module)"
        )
    return _auto_wrap(module, auto_wrap_policy or _wrapping[0].policy, True, kwargs)[0]


def _auto_wrap(
    module: nn.Module, policy: Callable[..., bool], is_root: bool, options: Mapping[str, Any]
) -> tuple[nn.Module, int]:
    """Return the module, perhaps wrapped, and how many of its parameters lie in wrapped modules."""
    numel = sum(param.numel() for param in module.parameters())
    if not policy(module=module, recurse=True, unwrapped_params=numel, module_is_root=is_root):
        return module, 0
    wrapped = 0
    for name, child in module.named_children():
        wrapped_child, numel_inside = _auto_wrap(child, policy, False, options)
        setattr(module, name, wrapped_child)
        wrapped += numel_inside
    if policy(
        module=module, recurse=False, unwrapped_params=numel - wrapped, module_is_root=is_root
    ):
        return wrap(module, **options), numel
    return module, wrapped
