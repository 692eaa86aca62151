"""What a sharded model's own methods do: forward, state_dict, load_state_dict, zero_grad.

All are hooks and one instance attribute on the user's module: its class stays. The hooks know how to be copied: a deepcopy
of a sharded model is an ordinary model with ordinary weights.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardcore.engine.engine import Engine
from shardcore.engine.state_store import StepError
from shardcore.engine.units import callable_parts, in_backward, tensors_in
from shardcore.engine.unshard import Unsharder


def attach(model: nn.Module, engine: Engine, input_dtype: torch.dtype | None) -> None:
    """Install the hooks of `engine` on its model; floating inputs of the root forward are cast to `input_dtype` if given."""
    model.__dict__["_shardcore_engine"] = engine
    model.__dict__["zero_grad"] = _ZeroGrad(model, engine)
    model.register_forward_pre_hook(_BeforeForward(engine, input_dtype), with_kwargs=True)
    if engine.unsharder is not None:
        for index, unit in enumerate(engine.unsharder.units):
            module = model.get_submodule(unit.name)
            if module._forward_pre_hooks and module is not model:  # the user's
                module.register_forward_pre_hook(_BeforeHooks(engine, index), prepend=True)
            module.register_forward_pre_hook(_BeforeUnit(engine, index), with_kwargs=True)
            module.register_forward_hook(_AfterUnit(engine, index))
            for part in callable_parts(model, unit, engine.unsharder.units):
                part.register_forward_pre_hook(_BeforePart(engine, index))
                part.register_forward_hook(_AfterPart(engine, index))
    if engine.overlap_step is not None:
        model.__dict__["train"] = _Train(model, engine)
        for index, unit in enumerate(engine.overlap_step.units):  # before the user's own hooks, which may read weights, too
            model.get_submodule(unit.name).register_forward_pre_hook(_BeforeWeights(engine, index), prepend=True)
    model.register_forward_hook(_AfterForward(engine))
    for name, module in model.named_modules():
        if any(param in engine.managed for param in module.parameters()):
            module.register_state_dict_pre_hook(_BeforeStateDict(engine, name))
            module.register_state_dict_post_hook(_WholeStateDict(engine, name))
        if any(param is not None for param in module._parameters.values()):
            load = _LoadIntoMaster(engine)
            module.register_load_state_dict_pre_hook(load.before)
            module.register_load_state_dict_post_hook(load.after)


class _EngineHook:
    """A hook that a copy of the model keeps without the engine: `self.engine` is None there, and the hook does nothing."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine

    @property
    def unsharder(self) -> Unsharder | None:
        """What makes weights whole around their use; None if nothing has to (inside `full_params`, unless backward follows)."""
        unsharder = None if self.engine is None else self.engine.unsharder
        return None if unsharder is None or (unsharder.all_held and not torch.is_grad_enabled()) else unsharder


class _Method(_EngineHook):
    """What stands in for a method of the model, which has it in its `__dict__` and so is not kept by it."""

    def __init__(self, model: nn.Module, engine: Engine | None) -> None:
        super().__init__(engine)
        self._model = weakref.ref(model)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this method is gone; expected it to be kept")
        return model

    def __reduce__(self) -> tuple[Any, ...]:
        """Be copied and pickled with the model, as a method of the copy."""
        return type(self), (self.model, None)


class _ZeroGrad(_Method):
    """`model.zero_grad`: gradients live in shards, where nn.Module.zero_grad does not look."""

    def __call__(self, set_to_none: bool = True) -> None:
        if self.engine is not None:
            self.engine.zero_grad(set_to_none)
        else:
            type(self.model).zero_grad(self.model, set_to_none)


class _Train(_Method):
    """`model.train`, and so `model.eval`: whoever changes the mode finds new weights, also behind references held before."""

    def __call__(self, mode: bool = True) -> nn.Module:
        if self.engine is not None and mode != self.model.training:
            self.engine.synchronize()
        return type(self.model).train(self.model, mode)


class _BeforeForward(_EngineHook):
    def __init__(self, engine: Engine | None, input_dtype: torch.dtype | None) -> None:
        super().__init__(engine)
        self.input_dtype = input_dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if self.engine is not None and torch.is_grad_enabled():
            _refuse_wrappers(module, self.engine)
            self.engine.reducer.settle()
        if self.engine is not None and (unsharder := self.unsharder) is not None:
            if torch.compiler.is_compiling():
                unsharder.warn_of_compiling()
            if self.engine.reducer.boundary.under_way and not in_backward():
                raise RuntimeError(
                    "forward: another thread is inside a backward of this model; expected one after the other at stage 3, where"
                    " weights come and go with each"
                )
            unsharder.begin_forward(module)
        if self.engine is not None and self.engine.ratio_tuner is not None and torch.is_grad_enabled():
            if self.engine.ratio_tuner.measures:
                self.engine.synchronize()
            self.engine.ratio_tuner.begin_forward()
        if self.input_dtype is None:
            return None
        return pytree.tree_map(self._cast, (args, kwargs))  # type: ignore[no-any-return]

    def _cast(self, value: Any) -> Any:
        return value.to(self.input_dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class _AfterForward(_EngineHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.engine is not None and self.engine.ratio_tuner is not None:
            self.engine.ratio_tuner.end_forward()
        if (unsharder := self.unsharder) is not None:
            unsharder.end_forward()
        if self.engine is not None and self.engine.overlap_step is not None:
            self.engine.overlap_step.end_forward()
        if self.engine is None or not torch.is_grad_enabled():
            return
        _refuse_wrappers(module, self.engine)  # again, for hooks that were put around this module later
        begin = self.engine.reducer.begin_backward
        for value in tensors_in(output):
            if value.grad_fn is not None:
                value.register_hook(lambda grad: begin())  # type: ignore[no-untyped-call]


def _refuse_wrappers(module: nn.Module, engine: Engine) -> None:
    """Raise RuntimeError in the forward of what would average or collect gradients a second time, in p.grad.

    torch's replicate() has a DistributedDataParallel, too, over a list of the parameters.
    """
    ddp = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    inside_ddp = ddp is not None and any(param in engine.managed for param in ddp.parameters())
    if inside_ddp or getattr(module, "_is_replica", False):
        wrapper = "DistributedDataParallel or replicate()" if inside_ddp else "DataParallel"
        raise RuntimeError(
            f"forward: the sharded model runs inside {wrapper}; expected it on its own, as shardcore.shard already averages "
            "gradients over ranks (call the model itself)"
        )


class _UnitHook(_EngineHook):
    def __init__(self, engine: Engine | None, index: int) -> None:
        super().__init__(engine)
        self.index = index


class _BeforeWeights(_UnitHook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.engine is not None and self.engine.overlap_step is not None:
            self.engine.overlap_step.before_forward(self.index)


class _BeforeUnit(_UnitHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (unsharder := self.unsharder) is not None:
            unsharder.before_forward(self.index, (args, kwargs))


class _BeforeHooks(_UnitHook):
    """Before the user's own hooks, which may read weights (torch.nn.utils.weight_norm's does)."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if (unsharder := self.unsharder) is not None:
            unsharder.before_hooks(self.index)


class _AfterUnit(_UnitHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if (unsharder := self.unsharder) is not None:
            unsharder.after_forward(self.index, output)


class _BeforePart(_UnitHook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        if (unsharder := self.unsharder) is not None:
            unsharder.before_part(self.index, module)


class _AfterPart(_UnitHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if (unsharder := self.unsharder) is not None:
            unsharder.after_part(self.index, module, output)


class _StateDictHook(_EngineHook):
    def __init__(self, engine: Engine | None, name: str) -> None:
        super().__init__(engine)
        self.name = name

    def read(self, engine: Engine) -> None:
        engine.read_all("state_dict", self.name or "the model")


class _BeforeStateDict(_StateDictHook):
    """Note the outermost of the sharded modules whose state_dict this is: a part may also lie in a module that is not sharded.

    Finish the step. If it failed, the other ranks, which wait for this one's part, are told so.
    """

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.engine is None:
            return
        reader = self.engine.state_dict_of
        if reader is None or not self.name or (reader[0] and not self.name.startswith(f"{reader[0]}.")):
            self.engine.state_dict_of = self.name, prefix
            try:
                self.engine.synchronize()
            except StepError:
                self.read(self.engine)


class _WholeStateDict(_StateDictHook):
    """Replace the entries of managed parameters with whole tensors of their own memory, from the masters. Collective."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        engine = self.engine
        if engine is None or engine.state_dict_of != (self.name, prefix):  # part of the state_dict of a module around this one
            return
        engine.state_dict_of = None
        self.read(engine)
        engine.updater.warn_of_lost_edits("state_dict")
        # By place, not by name: wrappers (torch's CheckpointWrapper, ...) show their parameters under other names.
        param_at = {(*managed.place, managed.param.shape): managed.param for managed in engine.managed.values()}
        keys: dict[nn.Parameter, list[str]] = {}
        for key, value in state_dict.items():
            if type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided and key.startswith(prefix):
                place = value.untyped_storage()._cdata, int(value.storage_offset()), value.shape
                if place in param_at:
                    keys.setdefault(param_at[place], []).append(key)
        with torch.no_grad():
            asked = [bucket for bucket in engine.buckets if any(managed.param in keys for managed in bucket.params)]
            wholes = engine.full_tensors.of_buckets((bucket, engine.master_or_weight(bucket)) for bucket in asked)
            for bucket, whole in zip(asked, wholes, strict=True):
                for managed in bucket.params:
                    if managed.param in keys:
                        values = managed.slice_of(whole).clone()
                        for key in keys[managed.param]:
                            state_dict[key] = values


class _LoadIntoMaster(_EngineHook):
    """Loading a module's parameters also sets their masters, from the values as given, not as rounded to the weights."""

    def __init__(self, engine: Engine | None) -> None:
        super().__init__(engine)
        self._given: list[tuple[nn.Parameter, torch.Tensor]] = []

    def _named(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
        assert self.engine is not None
        for name, param in module._parameters.items():
            if param is not None and (param in self.engine.managed or param in self.engine.constant):
                yield prefix + name, param

    def before(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        if self.engine is None:
            return
        self.engine.synchronize()
        self._given = []
        if local_metadata.get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict: assign is True for a sharded model; expected False (its parameters are views into buffers)"
            )
        for key, param in self._named(module, prefix):
            value = state_dict.get(key)
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                self._given.append((param, value))
        if self.engine.unsharder is not None:
            self.engine.unsharder.lend_scratch([param for _, param in self._named(module, prefix)])

    def after(self, module: nn.Module, incompatible_keys: Any) -> None:
        if self.engine is not None:
            for param, value in self._given:
                if param in self.engine.managed:
                    self.engine.updater.set_weights(self.engine.bucket_of[param], self.engine.managed[param], value)
                else:
                    self.engine.constant[param].note_load()
            if self.engine.unsharder is not None:
                self.engine.unsharder.end_scratch()
        self._given = []
