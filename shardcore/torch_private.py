"""Every private name of torch that the package uses, each with its purpose and why no public name
serves it.

All were tried with torch 2.11.0 and 2.13.0. tests/test_torch_private.py fails where torch changes
one. tools/check_includes.py refuses private names of torch in all other files, except
`torch._foreach_*`, `Tensor._version`, `torch._dynamo.disable` and the `_parameters`, `_modules`
and `_buffers` of a module.

Note [No frames]: what runs in each forward and backward is bound here to a function of C, so that
it adds no Python frame.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, partial, wraps
from operator import attrgetter, methodcaller
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _python_dispatch, _pytree

# --- autograd -------------------------------------------------------------------------------------

# The number of the backward that this thread runs, -1 outside of one; autograd has no public way to
# ask whether, or which.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Lets autograd call a function at the end of the backward that this thread runs. Public hooks
# belong to a tensor or a node, and none runs last. DDP and FSDP2 use this one, too.
queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)

# The number that the next node made on this thread gets, and the number of a node: they tell which
# node is older. Nodes have no public order.
next_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
sequence_nr_of: Callable[[torch.autograd.graph.Node], int] = methodcaller("_sequence_nr")

# The tensor of which a tensor is a view, or None. Publicly only the memory can be compared.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")

# The hooks of a parameter that run after p.grad was set, by id, in order. The public method only
# adds one at the end.
accumulate_hooks_of: Callable[[torch.Tensor], MutableMapping[int, Any]] = attrgetter(
    "_post_accumulate_grad_hooks"
)


def restore_hooks(tensor: torch.Tensor) -> None:
    """Tell autograd again of the hooks of a tensor: torch.utils.swap_tensors moves the Python
    attributes alone, and adding hooks anew would change their handles.
    """
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, name, None):
            setattr(tensor, name, getattr(tensor, name))


# A range of torch.profiler, as a context of C, which traces show among the operations. The public
# record_function takes five times as long while nothing is recorded.
ProfilerScope: Callable[[str], AbstractContextManager[object]] = (
    torch._C._profiler._RecordFunctionFast
)

# Begin and end a range that traces show as an annotation, also beside the kernels that it starts.
record_function_enter: Callable[[str], Any] = torch._C._autograd._record_function_with_args_enter
record_function_exit: Callable[[Any], None] = torch._C._autograd._record_function_with_args_exit


@cache
def on_profiles_with_stack(note: Callable[[bool], None]) -> None:
    """Call `note` when a profile with with_stack=True begins (True) and after it ends (False), from
    now on in this process. torch has no hook for that, and asks modules for the addresses of their
    weights before any hook of these.
    """
    kind: Any = torch.autograd.profiler.profile
    start, leave = kind._start_trace, kind.__exit__

    @wraps(start)
    def start_trace(self: Any) -> Any:
        if self.with_stack:
            note(True)
        return start(self)

    @wraps(leave)
    def exit_trace(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            if self.with_stack:
                note(False)

    kind._start_trace, kind.__exit__ = start_trace, exit_trace


# The store of the default group. The public get_group_store is None where Python made the group.
default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store

# --- tracing and dispatch -------------------------------------------------------------------------

# The FakeTensorMode of this thread, or None. FakeTensorMode itself is private.
fake_mode: Callable[[], Any] = partial(
    torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
)

# The innermost transform of torch.func that this thread runs, or None. torch.func has no public way
# to ask.
functorch_level: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack

# Keeps torch.compile out of a function, as torch.compiler.disable does, which would import
# torch._dynamo with the package (most of a second).
disable_dynamo = torch._compile._disable_dynamo

# Maps over nested containers, with those that users registered. torch 2.13 has no public form.
pytree = _pytree

# Whether a tensor only wraps others (DTensor, quantized ones), so that it has no memory of its own.
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass

# Makes a tensor of a subclass without memory. torch's own guide to subclasses uses it; there is no
# public form.
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

# --- tensors --------------------------------------------------------------------------------------

# The identity of a storage. Its public data_ptr() is 0 for each one on meta, and for empty ones.
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")

# Whether `tensor.data = other` is possible for two tensors; publicly only an error tells, which has
# no type of its own.
can_assign_data: Callable[[torch.Tensor, torch.Tensor], bool] = (
    torch._has_compatible_shallow_copy_type
)

# How many references C++ has to a tensor (graphs hold it). torch.utils.swap_tensors, which needs a
# count of 1, only raises an error after the fact.
use_count_of: Callable[[torch.Tensor], int] = methodcaller("_use_count")

# The tensor that a DTensor holds, itself: the public to_local() makes another of the same memory.
local_tensor_of: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")


def split_factor_of(placement: Any) -> int:
    """Return into how many blocks a DTensor's placement cuts a dimension before each block is
    sharded; 1 for all but _StridedShard, which has no public name.
    """
    return placement.split_factor if type(placement).__name__ == "_StridedShard" else 1


def strided_shard(dim: int, split_factor: int) -> Any:
    """Make such a placement. torch.distributed.tensor has to be imported."""
    placements = sys.modules["torch.distributed.tensor"].placement_types
    return placements._StridedShard(dim, split_factor=split_factor)


# --- modules --------------------------------------------------------------------------------------


def forward_pre_hooks(module: nn.Module) -> list[tuple[Any, bool]]:
    """Return the hooks that run before a module's forward, and whether each takes keyword
    arguments; publicly they can only be added and removed.
    """
    with_kwargs = module._forward_pre_hooks_with_kwargs
    return [(hook, number in with_kwargs) for number, hook in module._forward_pre_hooks.items()]


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run after a module's forward; publicly they can only be added and
    removed.
    """
    return [*module._forward_hooks.values()]


def state_dict_pre_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run before a module's state_dict; publicly they can only be added and
    removed.
    """
    return [*module._state_dict_pre_hooks.values()]


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether the state dict has a module's own buffer of this name; publicly only a whole state
    dict tells.
    """
    return buffer not in module._non_persistent_buffers_set


class ChecksMoves(nn.Module):
    """A module that is asked before it is moved or cast, however that is done: by its own to(),
    cuda(), half(), ... or by the module around it, which calls no public method of its children.
    """

    def before_move(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise an error to refuse. fn: what is applied to each parameter and buffer."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.before_move(fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


# The DistributedDataParallel whose forward runs, or None. A module cannot see publicly what calls
# it.
active_ddp: Callable[[], Any] = partial(
    getattr, nn.parallel.DistributedDataParallel, "_active_ddp_module"
)

# The attribute that marks a copy of a module which DataParallel makes for each forward.
IS_REPLICA = "_is_replica"

# What wrappers of torch put into the names of parameters: activation checkpointing, torch.compile,
# FSDP1. Their attributes have no public names.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what torch.compile(module) returned: a wrapper, whose class has no public
    name. Where torch._dynamo was never imported there is none.
    """
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return isinstance(module, wrapper)


def compiled_parts(model: nn.Module) -> list[str]:
    """Return the names of the modules inside a model that torch.compile is around, or that
    `module.compile()` compiled in place, which leaves a private attribute.
    """
    return [
        name
        for name, module in model.named_modules()
        if name and (is_compiled(module) or module._compiled_call_impl is not None)
    ]


def replicated_type() -> type | None:
    """Return the base class that torch's composable replicate() gives a module; None if it was
    never imported. Neither has a public name.
    """
    return getattr(sys.modules.get("torch.distributed._composable.replicate"), "DDP", None)


# --- optimizers -----------------------------------------------------------------------------------


def optimizer_hooks(optimizer: torch.optim.Optimizer, when: str) -> Mapping[int, Any]:
    """Return the hooks of an optimizer, by id; publicly they can only be added and removed. when:
    "step", "state_dict" or "load_state_dict", with "_pre" or "_post".
    """
    hooks: Mapping[int, Any] = getattr(optimizer, f"_optimizer_{when}_hooks")
    return hooks


def share_optimizer_hooks(new: torch.optim.Optimizer, old: torch.optim.Optimizer) -> None:
    """Give `new` all hooks of `old`, and those that either gets later."""
    for method in ("step", "state_dict", "load_state_dict"):
        for when in (f"{method}_pre", f"{method}_post"):
            setattr(new, f"_optimizer_{when}_hooks", optimizer_hooks(old, when))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Make schedulers take an optimizer for one that has stepped, whose `step` they have wrapped;
    else they warn, and wrap what is there. They have no public switch.
    """
    step: Any = optimizer.step
    step._wrapped_by_lr_sched = True
    optimizer.__dict__["_opt_called"] = True


def replace_clipping(function: Callable[..., None]) -> None:
    """Replace the function by which torch's clip_grad_norm_ multiplies gradients: where a program
    has imported clip_grad_norm_ by name, no public name reaches it.
    """
    nn.utils.clip_grad._clip_grads_with_norm_ = function


# --- process groups and devices -------------------------------------------------------------------


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)  # wrapped where TORCH_DISTRIBUTED_DEBUG=DETAIL


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of collectives of `group` on `device`; publicly it can only be set."""
    timeout: timedelta = _backend_of(group, device).options._timeout
    return timeout


def set_timeout(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
    """Set the timeout of collectives of `group` on `device`. The public ProcessGroup.set_timeout
    raises with TORCH_DISTRIBUTED_DEBUG=DETAIL in torch 2.11.
    """
    _backend_of(group, device).set_timeout(timeout)


@contextmanager
def group_named(name: str) -> Iterator[None]:
    """Let torch give the groups made inside this name; new_group takes none. torch calls what is
    replaced once for each group that it makes.
    """
    torchs: Any = dist.distributed_c10d
    theirs = torchs._process_group_name
    torchs._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        torchs._process_group_name = theirs


def is_group_alive(group: dist.ProcessGroup) -> bool:
    """Whether torch still has this group: destroy_process_group leaves the object usable, and has
    no public counterpart that asks.
    """
    return group in dist.distributed_c10d._world.pg_map


def sequence_number_of(group: dist.ProcessGroup) -> int:
    """Return how many collectives this rank has started on `group`; torch counts them, but shows
    the count in its own logs alone.
    """
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return number


def is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had initialized CUDA; publicly only an error
    at the first use of CUDA tells, which initializes it where there is none.
    """
    return torch.cuda._is_in_bad_fork()


_P = ParamSpec("_P")
_R = TypeVar("_R")


def unseen(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function whose calls of torch no TorchFunctionMode sees; publicly only such a mode
    itself leaves it.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def without_override(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch as if no tensor's class overrode it, as `super()` does publicly for
    the class of the first one alone.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)
