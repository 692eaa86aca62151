"""Each private name of torch does what the package needs of it; a torch that changes one fails
here first."""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.overrides import TorchFunctionMode

from shardcore import torch_private

CPU = torch.device("cpu")


@pytest.fixture
def world():
    """A gloo group of one rank."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=40)
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


# --- autograd -------------------------------------------------------------------------------------


def test_graph_task_id_names_the_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    found = []
    x.register_hook(lambda grad: found.append(torch_private.graph_task_id()))
    assert torch_private.graph_task_id() == -1
    (x * x).sum().backward()
    (x * x).sum().backward()
    assert -1 not in found
    assert len(set(found)) == 2
    assert torch_private.graph_task_id() == -1


def test_queued_callbacks_run_once_all_gradients_are_there() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    found: list[Any] = []

    def note() -> None:
        found.append((x.grad is not None, y.grad is not None))
        if len(found) == 1:  # those that a callback queues run, too
            torch_private.queue_callback(note)

    loss = (y.exp() * x).sum()
    loss.register_hook(lambda grad: torch_private.queue_callback(note))
    loss.backward()
    assert found == [(True, True)] * 2


def test_a_callback_without_a_backward_is_refused() -> None:
    with pytest.raises(RuntimeError, match="backward"):
        torch_private.queue_callback(print)


def test_sequence_numbers_tell_which_node_is_older() -> None:
    x = torch.ones(2, requires_grad=True)
    first = torch_private.next_sequence_nr()
    old = x.exp()
    between = torch_private.next_sequence_nr()
    new = x.sin()
    numbers = [torch_private.sequence_nr_of(made.grad_fn) for made in (old, new)]
    assert first <= numbers[0] < between <= numbers[1] < torch_private.next_sequence_nr()


def test_base_of_is_the_viewed_tensor() -> None:
    x = torch.ones(4)
    assert torch_private.base_of(x) is None
    assert torch_private.base_of(x[1:].view(3, 1)) is x


def test_accumulate_hooks_run_in_the_order_of_the_dict() -> None:
    x = torch.ones(2, requires_grad=True)
    ran: list[str] = []
    first = x.register_post_accumulate_grad_hook(lambda param: ran.append("first"))
    x.register_post_accumulate_grad_hook(lambda param: ran.append("second"))
    hooks = torch_private.accumulate_hooks_of(x)
    assert next(iter(hooks)) == first.id
    # moved to the end while a backward runs, before the gradient is added
    x.register_hook(lambda grad: hooks.update({first.id: hooks.pop(first.id)}))
    x.sum().backward()
    assert ran == ["second", "first"]


@pytest.mark.parametrize("restored", [False, True])
def test_hooks_of_swapped_tensors_are_restored(restored: bool) -> None:
    param, twin = nn.Parameter(torch.ones(2, device="meta")), nn.Parameter(torch.ones(2))
    ran: list[str] = []
    param.register_hook(lambda grad: ran.append("before"))
    param.register_post_accumulate_grad_hook(lambda param: ran.append("after"))
    torch.utils.swap_tensors(param, twin)
    param.__dict__.update(twin.__dict__)
    if restored:
        torch_private.restore_hooks(param)
    param.sum().backward()
    assert ran == (["before", "after"] if restored else [])


@contextmanager
def annotation(name: str) -> Iterator[None]:
    record = torch_private.record_function_enter(name)
    yield
    torch_private.record_function_exit(record)


@pytest.mark.parametrize("scope", [torch_private.ProfilerScope, annotation])
def test_a_scope_shows_in_profiles(scope: Callable[[str], Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with scope("of shardcore"):
            torch.ones(2).exp()
        torch.ones(2).sin()
    events = {event.name: event for event in profile.events()}
    inside = events["of shardcore"].time_range
    assert inside.start <= events["aten::exp"].time_range.start <= inside.end
    assert events["aten::sin"].time_range.start >= inside.end


# --- tracing and dispatch -------------------------------------------------------------------------


def test_fake_mode_is_seen() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert torch_private.fake_mode() is None
    with FakeTensorMode() as mode:
        assert torch_private.fake_mode() is mode
    assert torch_private.fake_mode() is None


def test_functorch_level_is_seen() -> None:
    levels = []

    def function(x: torch.Tensor) -> torch.Tensor:
        levels.append(torch_private.functorch_level())
        return x.sum()

    assert torch_private.functorch_level() is None
    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    assert len(levels) == 2
    assert None not in levels
    assert torch_private.functorch_level() is None


def test_disable_dynamo_keeps_the_compiler_out() -> None:
    seen = []

    @torch_private.disable_dynamo
    def apart() -> None:
        seen.append(torch.compiler.is_compiling())

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        y = x + torch.compiler.is_compiling()
        apart()
        return y

    assert compiled(torch.zeros(1)).item() == 1.0
    assert seen == [False]


def test_pytree_maps_over_containers() -> None:
    tree = {"a": [torch.zeros(1), 2], "b": (3, None)}
    leaves, spec = torch_private.pytree.tree_flatten(tree)
    assert leaves[1:] == [2, 3, None]
    assert torch_private.pytree.tree_leaves(tree)[0] is tree["a"][0]
    again = torch_private.pytree.tree_unflatten(leaves, spec)
    assert again["b"] == (3, None)
    assert again["a"] is not tree["a"]
    assert torch_private.pytree.tree_map(str, {"b": (3,)}) == {"b": ("3",)}


class _Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch_private.make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return _Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise TypeError(function)


def test_wrapper_subclasses_are_made_without_memory_and_recognized() -> None:
    wrapper = _Wrapper(torch.zeros(1 << 4, dtype=torch.float64))
    assert isinstance(wrapper, _Wrapper)
    assert (wrapper.shape, wrapper.dtype, wrapper.device) == ((16,), torch.float64, CPU)
    assert wrapper.data_ptr() == 0
    with pytest.raises(TypeError, match="exp"):
        wrapper.exp()
    assert torch_private.is_traceable_wrapper_subclass(wrapper)
    for plain in (torch.zeros(1), nn.Parameter(torch.zeros(1))):
        assert not torch_private.is_traceable_wrapper_subclass(plain)


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, device", [(4, "cpu"), (4, "meta"), (0, "cpu")])
def test_storage_ids_are_equal_for_one_storage_alone(size: int, device: str) -> None:
    x, y = (torch.empty(size, device=device) for _ in range(2))
    ids = [torch_private.storage_id(one.untyped_storage()) for one in (x, x.view(-1), x.data, y)]
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_can_assign_data_tells_before_the_error() -> None:
    x, meta = torch.zeros(1), torch.zeros(1, device="meta")
    assert torch_private.can_assign_data(x, torch.zeros(2, dtype=torch.bfloat16))
    assert not torch_private.can_assign_data(meta, x)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        meta.data = x


def test_use_count_sees_graphs() -> None:
    x = nn.Parameter(torch.zeros(1, device="meta"))
    assert torch_private.use_count_of(x) == 1
    y = x * x
    assert torch_private.use_count_of(x) > 1
    del y
    assert torch_private.use_count_of(x) == 1


def test_the_tensor_of_a_dtensor_is_itself(world: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    param = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Shard(0)]))
    torch_private.local_tensor_of(param).data = torch.ones(4)
    assert param.to_local().tolist() == [1.0] * 4


def test_strided_shards(world: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    placement = torch_private.strided_shard(1, 2)
    assert placement.dim == 1
    assert torch_private.split_factor_of(placement) == 2
    assert [torch_private.split_factor_of(other) for other in (Shard(1), Replicate())] == [1, 1]
    mesh = init_device_mesh("cpu", (1,))
    local = torch.arange(8.0).view(2, 4)
    tensor = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=local.shape, stride=local.stride()
    )
    assert torch_private.split_factor_of(tensor.placements[0]) == 2


# --- modules --------------------------------------------------------------------------------------


def test_hooks_of_modules_are_listed_in_order() -> None:
    module = nn.Linear(1, 1)

    def hook(*_: Any) -> None: ...

    others = [functools.partial(hook) for _ in range(5)]
    module.register_forward_pre_hook(others[0])
    module.register_forward_pre_hook(others[1], with_kwargs=True)
    module.register_forward_pre_hook(others[2], prepend=True)
    module.register_forward_hook(others[3])
    module.register_state_dict_pre_hook(others[4])
    before = torch_private.forward_pre_hooks(module)
    assert before == [(others[2], False), (others[0], False), (others[1], True)]
    assert torch_private.forward_hooks(module) == [others[3]]
    assert torch_private.state_dict_pre_hooks(module) == [others[4]]


def test_persistent_buffers() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("left", torch.zeros(1), persistent=False)
    assert torch_private.is_persistent(module, "kept")
    assert not torch_private.is_persistent(module, "left")
    assert [*module.state_dict()] == ["kept"]


class _Fixed(torch_private.ChecksMoves):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.refuses = nn.Parameter(torch.zeros(1)), True

    def before_move(self, fn: Any) -> None:
        if self.refuses:
            raise TypeError(f"moved to {fn(torch.zeros(1)).dtype}")


def test_moves_of_the_module_around_are_checked() -> None:
    fixed = _Fixed()
    around = nn.Sequential(fixed)
    with pytest.raises(TypeError, match="bfloat16"):
        around.bfloat16()
    with pytest.raises(TypeError, match="float64"):
        fixed.to(torch.float64)
    fixed.refuses = False
    assert around.half()[0].weight.dtype == torch.float16


def test_the_ddp_whose_forward_runs_is_seen(world: Any) -> None:
    seen = []

    class Module(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch_private.active_ddp())
            return super().forward(x)

    ddp = nn.parallel.DistributedDataParallel(Module(1, 1))
    ddp(torch.zeros(1, 1))
    assert seen == [ddp]
    assert torch_private.active_ddp() is None


def test_replicas_are_marked() -> None:
    module = nn.Linear(1, 1)
    replica = module._replicate_for_data_parallel()  # what DataParallel calls on GPUs
    assert getattr(replica, torch_private.IS_REPLICA)
    assert not hasattr(module, torch_private.IS_REPLICA)


def test_wrappers_change_names_so() -> None:
    from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

    inner = nn.Linear(1, 1, bias=False)
    names = [
        next(iter(dict(nn.Sequential(wrapped).named_parameters())))
        for wrapped in (checkpoint_wrapper(inner), torch.compile(inner))
    ]
    names = [name[2:].replace("weight", "") for name in names] + [f"{FSDP_WRAPPED_MODULE}."]
    assert tuple(names) == torch_private.WRAPPERS


def test_replicated_modules_have_the_type(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed._composable import replicate

    with warnings.catch_warnings(action="ignore"):
        module = replicate(nn.Linear(1, 1))
    kind = torch_private.replicated_type()
    assert kind is not None
    assert isinstance(module, kind)
    assert not isinstance(nn.Linear(1, 1), kind)
    monkeypatch.delitem(sys.modules, "torch.distributed._composable.replicate")
    assert torch_private.replicated_type() is None


def test_compiled_modules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(1, 1), torch.compile(nn.Linear(1, 1)), nn.Linear(1, 1))
    model[2].compile()
    assert torch_private.compiled_parts(model) == ["1", "2"]
    assert torch_private.is_compiled(model[1])
    assert not torch_private.is_compiled(model[2])
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame")
    assert not torch_private.is_compiled(model[1])


def test_profiles_that_read_weights_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, noted = torch.autograd.profiler.profile, []
    for name in ("_start_trace", "__exit__"):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # as it is, afterwards
    torch_private.on_profiles_with_stack(noted.append)
    for with_stack in (False, True):
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], with_stack=with_stack
        ):
            assert noted == [True] * with_stack
    assert noted == [True, False]


# --- optimizers -----------------------------------------------------------------------------------

WHEN = [
    f"{method}_{when}"
    for method in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


@pytest.mark.parametrize("when", WHEN)
def test_hooks_of_optimizers_are_shared(when: str) -> None:
    old, new = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    torch_private.share_optimizer_hooks(new, old)
    ran: list[Any] = []

    def hook(optimizer: Any, *_: Any) -> None:
        ran.append(optimizer)

    handle = getattr(old, f"register_{when}_hook")(hook)
    assert torch_private.optimizer_hooks(new, when) == {handle.id: hook}
    new.step()
    new.load_state_dict(new.state_dict())
    assert ran == [new]
    handle.remove()
    assert not torch_private.optimizer_hooks(new, when)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_schedulers_take_a_marked_optimizer_for_stepped(marked: bool, early: bool) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)

    def schedule() -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    scheduler = schedule() if early else None
    step = functools.partial(print)  # no method, which schedulers could not wrap
    optimizer.__dict__["step"] = step
    if marked:
        torch_private.mark_stepped(optimizer)
    if not marked and not early:
        with pytest.raises(AttributeError):
            schedule()
        return
    scheduler = scheduler or schedule()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        scheduler.step()
    assert bool(found) != marked
    assert optimizer.step is step
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_clip_grad_norm_multiplies_by_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.utils.clip_grad, "_clip_grads_with_norm_", None)  # given back after
    param, got = nn.Parameter(torch.zeros(1)), []
    param.grad = torch.full((1,), 3.0)

    def clip(params: Any, max_norm: float, total_norm: Any, foreach: Any = None) -> None:
        got.append((params, max_norm, total_norm.item()))

    torch_private.replace_clipping(clip)
    nn.utils.clip_grad_norm_([param], 1.0)
    assert got == [([param], 1.0, 3.0)]


# --- process groups and devices -------------------------------------------------------------------


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_timeouts_are_read_and_set(level: str) -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    try:
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=40)
        )
        group = dist.new_group(timeout=timedelta(seconds=7))
        assert torch_private.timeout_of(group, CPU) == timedelta(seconds=7)
        torch_private.set_timeout(group, CPU, timedelta(seconds=9))
        assert torch_private.timeout_of(group, CPU) == timedelta(seconds=9)
        assert torch_private.timeout_of(dist.group.WORLD, CPU) == timedelta(seconds=40)
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(before)


@pytest.mark.parametrize("local", [False, True])
def test_groups_get_the_name_given(world: Any, local: bool) -> None:
    with torch_private.group_named("a name"):
        group = dist.new_group([0], use_local_synchronization=local)
    assert group.group_name == "a name"
    assert dist.new_group([0], use_local_synchronization=local).group_name != "a name"


def test_destroyed_groups_are_not_alive(world: Any) -> None:
    group = dist.new_group([0])
    assert torch_private.is_group_alive(group)
    dist.destroy_process_group(group)
    assert not torch_private.is_group_alive(group)
    assert torch_private.is_group_alive(world)


def test_sequence_numbers_count_collectives(world: Any) -> None:
    before = torch_private.sequence_number_of(world)
    dist.all_reduce(torch.zeros(1))
    dist.broadcast(torch.zeros(1), 0)
    assert torch_private.sequence_number_of(world) == before + 2


def test_this_process_is_no_fork_of_one_with_cuda() -> None:
    assert not torch_private.is_in_bad_fork()


@pytest.mark.gpu
def test_a_fork_after_cuda_is_bad() -> None:
    torch.cuda.init()
    child = os.fork()
    if child == 0:
        os._exit(torch_private.is_in_bad_fork())
    assert os.waitpid(child, 0)[1] != 0


def test_the_default_store_is_the_worlds(world) -> None:
    torch_private.default_store().set("of shardcore", "1")
    assert world.get_group_store().get("of shardcore") == b"1"


def test_modes_do_not_see_what_is_unseen() -> None:
    class Seeing(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    def double(x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x * 2 * times

    one = torch.ones(1)
    with Seeing() as mode:
        assert torch_private.unseen(double)(one, times=3) == 6.0
        seen = len(mode.seen)
        double(one)
    assert len(mode.seen) > seen
    assert torch.Tensor.mul not in mode.seen[:seen]
