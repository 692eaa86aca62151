"""FullyShardedDataParallel of FairScale, with its wrap functions, on shardcore.shard at stage 3.

Note [The optimizer comes later]. Scripts make the optimizer after FullyShardedDataParallel(model),
and shard needs both. So wrapping only notes what is asked for. The first forward that trains looks
for the one optimizer that has the model's parameters, and shards both. For that this file, once
imported, lets torch.optim.Optimizer's constructor note each optimizer that is made, weakly. The
script's optimizer goes on: its methods become those of the optimizer that shard returned, and they
share groups and states.

Note [In place]. A wrapped module stays the same object, with the names of its parameters, and gets
a class of both kinds.
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

from shardcore.api import full_params, load_sharded_state_dict, no_sync, shard, sharded_state_dict
from shardcore.integrations.fairscale.oss import OSS, optimizer_goes_on
from shardcore.optim.clip import clip_grad_norm_
from shardcore.optim.interface import engine_of
from shardcore.torch_private import mark_stepped

# --- the optimizer that comes later ---------------------------------------------------------------

_made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _note_optimizers() -> None:
    """See Note [The optimizer comes later]."""
    torchs = torch.optim.Optimizer.__init__

    @wraps(torchs)
    def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        torchs(self, *args, **kwargs)
        _made.add(self)

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]


_note_optimizers()


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers, made since this file was imported, that have parameters of the
    model.
    """
    params = set(model.parameters())

    def found() -> list[torch.optim.Optimizer]:
        # the one inside is found itself
        some = [one for one in list(_made) if not isinstance(one, OSS)]
        return [
            one
            for one in some
            if any(p in params for group in one.param_groups for p in group["params"])
        ]

    if len(found()) > 1:
        # schedulers and optimizers refer to each other, so dropped ones may be there still
        gc.collect()
    return found()


def keep_working(old: torch.optim.Optimizer, made: Any) -> None:
    """Let `old` go on as what shard made of it."""
    if old is made:
        return
    for name in (
        "step",
        "zero_grad",
        "state_dict",
        "load_state_dict",
        "add_param_group",
        "scale_loss",
    ):
        if hasattr(made, name):
            old.__dict__[name] = partial(getattr(made, name))
    # schedulers would put the step of old's class in its place
    mark_stepped(old)
    old.param_groups, old.state = made.param_groups, made.state


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
        if engine_of(self) is not None or (options := self.shard_options()) is None:
            return
        found = optimizers_of(self)
        if not found and not (torch.is_grad_enabled() and self.training):
            return
        kind = type(self).__name__
        if len(found) != 1:
            raise ValueError(
                f"{kind}: its first forward found {len(found)} optimizers with its parameters; "
                f"expected one (with groups for "
                "different options), made before this forward and after the import of "
                "shardcore.integrations.fairscale; "
                "forwards without one need torch.no_grad() or eval()"
            )
        if any(
            param not in set(self.parameters())
            for group in found[0].param_groups
            for param in group["params"]
        ):
            raise ValueError(
                f"{kind}: the optimizer has parameters of other modules, too; expected "
                f"FullyShardedDataParallel(model) around the whole model that it trains"
            )
        with optimizer_goes_on():
            _, made = shard(self, found[0], **options)
        keep_working(found[0], made)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Shard if that is still to do, before any hook; then run forward."""
        self.shard_now()
        return super().__call__(*args, **kwargs)


# --- FullyShardedDataParallel ---------------------------------------------------------------------


@dataclass
class _Wish:
    """What a wrapper was asked for: options of shard, FairScale's arguments; and whether it lies
    in another wrapper.
    """

    options: Mapping[str, Any]
    arguments: Mapping[str, Any]
    inside: bool = False

    def __deepcopy__(self, memo: Any) -> "_Wish":
        return _Wish(self.options, self.arguments, self.inside)  # a process group has no copies


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
    if not mixed_precision and {
        param.dtype for param in module.parameters() if param.is_floating_point()
    } == {compute}:
        compute = torch.float32  # what shard leaves as it is
    if compute not in names or (compute != torch.float32 and not mixed_precision):
        raise ValueError(
            f"{op}: compute_dtype is {compute_dtype} with mixed_precision={mixed_precision}; "
            f"expected float16 or bfloat16 with "
            "mixed_precision=True, the dtype that the parameters have, or None"
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

    The same module is returned, changed in place: see the Notes at the top of the file.
    """

    _fsdp: _Wish

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
        module.__class__ = _both(wrapper, kind)
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
        wanted = _options_of(
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
        self.__dict__["_fsdp"] = _Wish({**wanted, **options}, arguments)
        for part in get_fsdp_instances(self):
            part._fsdp.inside = part is not self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module; else what the wrapper was asked for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            wish = self.__dict__.get("_fsdp")
            if wish is None or name not in wish.arguments:
                raise
            return wish.arguments[name]

    def shard_options(self) -> dict[str, Any] | None:
        """Return the options of shard, with the wrapped parts as units. ValueError if theirs are
        others.
        """
        if self._fsdp.inside:
            return None
        own = self._fsdp.options
        parts = [part for part in get_fsdp_instances(self) if part is not self]
        kept: list[nn.Parameter] = []
        for part in parts:
            theirs = part._fsdp.options
            ignored = {"units", "process_group", "reshard_after_forward"}
            if own["precision"] is not None and theirs["precision"] is None:
                ignored |= {"precision", "reduce_dtype"}
                kept.extend(param for param in part.parameters() if param not in set(kept))
            for name in sorted({*theirs} - ignored):
                if own.get(name) != theirs.get(name):
                    raise ValueError(
                        f"FullyShardedDataParallel: a {type(part).__name__} inside the "
                        f"{type(self).__name__} asks for {name}="
                        f"{theirs.get(name)!r}, and that for {own.get(name)!r}; expected the same"
                    )
        keep = {"keep_fp32": [*own.get("keep_fp32", ()), *kept]} if kept else {}
        return {"units": parts or "auto", **own, **keep}

    @property
    def module(self) -> nn.Module:
        """The module that was wrapped, which is this one; or its own part of this name."""
        return self._modules.get("module") or self

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
        """Do nothing: parameters that modules share are found, whichever wrappers these lie in."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients locally inside the context. The model is sharded by then."""
        self.shard_now()
        with no_sync(self):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all ranks is at most max_norm; returns the
        norm from before. Collective.
        """
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return full weights in float32, by the names of the plain model. Collective."""
        found = super().state_dict(*args, **kwargs)
        first = not dist.is_initialized() or dist.get_rank(self._fsdp.options["process_group"]) == 0
        return (
            {}
            if self._fsdp.arguments["state_dict_on_rank_0_only"]
            and not self._fsdp.inside
            and not first
            else found
        )

    def local_state_dict(self) -> dict[str, Any]:
        """Return the weights in shards, for torch.distributed.checkpoint (see
        shardcore.sharded_state_dict). Collective.
        """
        self.shard_now()
        return sharded_state_dict(self)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Set the weights from what local_state_dict returned, and a checkpoint filled.
        Collective.
        """
        self.shard_now()
        load_sharded_state_dict(self, state_dict)

    @staticmethod
    def consolidate_shard_weights(*args: Any, **kwargs: Any) -> None:
        """Refuse: weights that local_state_dict returns go to torch.distributed.checkpoint."""
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
        found = optim.state_dict()
        return (
            found
            if not dist.is_initialized() or dist.get_rank(self._fsdp.options["process_group"]) == 0
            else None
        )

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the state dict as it is: the optimizer's load_state_dict takes full ones, the
        same on every rank.
        """
        return full_optim_state_dict


@cache
def _both(wrapper: Any, kind: Any) -> Any:
    return type(
        kind.__name__,
        (wrapper, kind),
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__},
    )


def _new(wrapper: Any, kind: Any) -> nn.Module:
    made = _both(wrapper, kind)
    return made.__new__(made)  # type: ignore[no-any-return]


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """Return the wrapped modules in a module, itself included; with skip_empty those that have
    parameters.
    """
    found = [module for module in mod.modules() if isinstance(module, FullyShardedDataParallel)]
    return [
        module for module in found if not skip_empty or next(module.parameters(), None) is not None
    ]


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
    """Whether auto_wrap wraps a module: if it has an attribute wrapper_config, a dict of
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
    """Let wrap and auto_wrap in the context wrap modules in wrapper_cls(module, **wrapper_kwargs).

    Raises NotImplementedError inside another such context.
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
    """Wrap a module and its parts, inside out, where the policy (enable_wrap's, or this one) says
    so; outside return it.

    Raises ValueError for a module with wrapped parts.
    """
    if not _wrapping:
        return module
    wrapper = _wrapping[0].wrapper
    if isinstance(wrapper, type) and any(isinstance(part, wrapper) for part in module.modules()):
        raise ValueError(
            f"auto_wrap: the {type(module).__name__} has wrapped parts; expected one without, or "
            f"wrap(module)"
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
        made, inside = _auto_wrap(child, policy, False, options)
        setattr(module, name, made)
        wrapped += inside
    if policy(
        module=module, recurse=False, unwrapped_params=numel - wrapped, module_is_root=is_root
    ):
        return wrap(module, **options), numel
    return module, wrapped
