"""Any elementwise optimizer of torch.optim on flat ranges of shards: SGD and Adagrad by kernels,
others by torch's own steps.

An elementwise step computes each element from its own weight, gradient and states. So it may run on
any range of a flat buffer: the bits do not depend on the parameters in the range, nor on where they
begin. States are float32, as masters are.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardcore._native import _C
from shardcore.optim.base import Group, ShardableOptimizer
from shardcore.optim.group_options import MASTERED_DTYPES, number
from shardcore.optim.lion import Lion
from shardcore.optim.state import check_tensor, step_count, step_tensor
from shardcore.optim.state_dict import SCHEDULER_KEYS, TORCH_ONLY, import_groups, numbers_of
from shardcore.optim.state_format import Allocate, StateFormat, StateTensors

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RAdam,
    torch.optim.Rprop,
)

# Elements that a CPU thread updates at a time: an operation finds the results of the one before in
# the caches, and memory for its own results is reused.
PIECE_NUMEL = 1 << 18

# Keys of groups that do not change the arithmetic of a step.
_NOTES = ("params", "capturable", *TORCH_ONLY, *SCHEDULER_KEYS)
# Numbers for which 0 means that there is no such state.
_SWITCHES = ("momentum",)


def _sgd(options: Mapping[str, Any], step: int, grad_scale: float) -> _C.ElementScalars:
    """Return the kernel's scalars for torch.optim.SGD; its first momentum is the gradient."""
    momentum = options["momentum"]
    return _C.ElementScalars(
        "nesterov" if options["nesterov"] else "momentum" if momentum else "sgd",
        grad_scale=-grad_scale if options["maximize"] else grad_scale,
        l2=options["weight_decay"],
        lr=options["lr"],
        of_direction=(momentum, 1.0),
        # -0.0 + x is x, also if that is -0.0
        of_state=(-0.0, 1.0) if step == 1 else (momentum, 1.0 - options["dampening"]),
    )


def _adagrad(options: Mapping[str, Any], step: int, grad_scale: float) -> _C.ElementScalars:
    """Return the kernel's scalars for torch.optim.Adagrad."""
    return _C.ElementScalars(
        "adagrad",
        grad_scale=-grad_scale if options["maximize"] else grad_scale,
        l2=options["weight_decay"],
        lr=options["lr"] / (1.0 + (step - 1) * options["lr_decay"]),
        eps=options["eps"],
    )


def _lion(options: Mapping[str, Any], step: int, grad_scale: float) -> _C.ElementScalars:
    """Return the kernel's scalars for Lion."""
    (beta1, beta2), lr = options["betas"], options["lr"]
    return _C.ElementScalars(
        "lion",
        grad_scale=-grad_scale if options["maximize"] else grad_scale,
        decay=1.0 - lr * options["weight_decay"],
        lr=lr,
        of_direction=(beta1, 1.0 - beta1),
        of_state=(beta2, 1.0 - beta2),
    )


# Classes with a kernel: one pass over memory, with the same bits on every device and tier.
KERNELS: dict[type, Callable[[Mapping[str, Any], int, float], _C.ElementScalars]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    Lion: _lion,
}


def _number_of(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _switches(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that decide the states of a group."""
    named = {key: value for key, value in options.items() if isinstance(value, bool | str | None)}
    return named | {
        key: "0" if options[key] == 0 else "not 0" for key in _SWITCHES if key in options
    }


def own_state(state: StateTensors) -> torch.Tensor | None:
    """Return the state that a kernel updates beside weights: the momentum, or Adagrad's sum."""
    return next((flat for key, flat in state.items() if key != "master"), None)


def is_elementwise(optimizer: object) -> bool:
    """Whether shard can run the optimizer on flat ranges: one of ELEMENTWISE, or with
    `elementwise = True`.
    """
    return type(optimizer) in ELEMENTWISE or (
        isinstance(optimizer, torch.optim.Optimizer)
        and getattr(optimizer, "elementwise", False) is True
    )


@dataclass(frozen=True)
class ElementFormat(StateFormat):
    """States of an elementwise optimizer: `names`, one float32 per element each, and perhaps
    masters.
    """

    names: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """See StateFormat."""
        return (*self.names, *["master"] * (self.master is not None))

    def new(self, numel: int, make: Allocate) -> StateTensors:
        """See StateFormat."""
        return {key: make(numel, torch.float32) for key in self.keys}


@dataclass(frozen=True)
class ElementStep:
    """The update of elements in their `step`-th step (from 1); gradients are multiplied by
    grad_scale, in float32.
    """

    kind: "ElementKind"
    options: Mapping[str, Any]
    step: int
    grad_scale: float

    @property
    def _fills(self) -> bool:
        return self.step == 1 and bool(self.options.get("initial_accumulator_value"))

    @property
    def scalars(self) -> _C.ElementScalars | None:
        """The kernel's scalars; None if the class has no kernel, or the first step fills states."""
        scalars_of = KERNELS.get(self.kind.cls)
        if scalars_of is None or self._fills:
            return None
        return scalars_of(self.options, self.step, self.grad_scale)

    def update(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[StateTensors],
    ) -> None:
        """Update flat weights and their states in place, where they lie. grads: of any float
        dtype; not written.
        """
        if self.kind.cls in KERNELS:
            if self._fills:
                for state in states:
                    state["sum"].fill_(self.options["initial_accumulator_value"])
            states_of_kernel = [own_state(state) for state in states]
            masters = [state.get("master") for state in states]
            scalars = KERNELS[self.kind.cls](self.options, self.step, self.grad_scale)
            _C.element_step(params, grads, states_of_kernel, masters, scalars)
            return
        if params[0].device.type != "cpu":
            self._update(params, grads, states)
            return
        numel = torch.get_num_threads() * PIECE_NUMEL
        scratch = torch.empty(
            min(numel, max(param.numel() for param in params)), dtype=torch.float32, device="cpu"
        )
        for param, grad, state in zip(params, grads, states, strict=True):
            for start in range(0, param.numel(), numel):
                elements = slice(start, start + numel)
                self._update(
                    [param[elements]],
                    [grad[elements]],
                    [{key: flat[elements] for key, flat in state.items()}],
                    scratch,
                )

    def _update(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[StateTensors],
        scratch: torch.Tensor | None = None,
    ) -> None:
        targets = [state.get("master", param) for param, state in zip(params, states, strict=True)]
        self.run(targets, [self._scaled(grad, scratch) for grad in grads], states)
        rounded = [
            (param, target)
            for param, target in zip(params, targets, strict=True)
            if param is not target
        ]
        if rounded:
            _C.cast([param for param, _ in rounded], [target for _, target in rounded])

    def run(
        self,
        targets: list[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[StateTensors],
    ) -> None:
        """Run a step of torch's over flat float32 tensors; new values of their states are in
        `states`.
        """
        names, kind = [key for key in states[0] if key != "master"], self.kind
        if self.step == 1:  # the optimizer makes them
            mine: list[dict[str, Any]] = [kind.first(self.options, target) for target in targets]
        else:
            mine = [
                {key: state[key] for key in names} | {"step": kind.count(self.step - 1)}
                for state in states
            ]
        of_targets = defaultdict(dict, zip(targets, mine, strict=True))
        optimizer = bare_optimizer(kind.cls, self.options, targets, of_targets, kind.attributes)
        for target, grad in zip(targets, grads, strict=True):
            target.grad = grad
        try:
            plain_step(kind.cls)(optimizer)
        finally:
            for target in targets:
                target.grad = None
        for target, state in zip(targets, states, strict=True):
            for key in names:
                new = optimizer.state[target][key]
                if new is not state[key]:
                    state[key].copy_(new)

    def _scaled(self, grad: torch.Tensor, scratch: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient in float32, multiplied; if that has to be written, in `scratch`."""
        if scratch is not None and (grad.dtype != torch.float32 or self.grad_scale != 1.0):
            grad = scratch[: grad.numel()].copy_(grad)
            return grad if self.grad_scale == 1.0 else grad.mul_(self.grad_scale)
        grad = grad.to(torch.float32)
        return grad if self.grad_scale == 1.0 else grad * self.grad_scale


def bare_optimizer(
    cls: type[torch.optim.Optimizer],
    options: Group,
    params: list[torch.Tensor],
    states: MutableMapping[Any, Any],
    attributes: Mapping[str, Any] | None = None,
) -> Any:
    """Return an optimizer over these tensors and states, made without its constructor.
    attributes: others that it has.
    """
    optimizer = cls.__new__(cls)
    group = {**options, "params": params, "capturable": False, "differentiable": False}
    optimizer.__setstate__(
        {**(attributes or {}), "defaults": group, "param_groups": [group], "state": states}
    )
    return optimizer


def plain_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the step of a class without torch's wrapper that calls hooks: they have run for the
    user's optimizer.
    """
    step: Callable[..., Any] = cls.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


class ElementKind:
    """See Kind."""

    on_device = False

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        optimizer: torch.optim.Optimizer | None = None,
        option_names: Collection[str] = (),
    ) -> None:
        """Describe the optimizers of this class. A step may read the attributes of `optimizer`
        other than its groups and states.

        option_names: of the class, beside the defaults of `optimizer`. Other keys of a group are
        the user's: a step may read them, and nothing else looks at them.
        """
        self.cls, self.name = cls, cls.__name__
        self._option_names = {
            *option_names,
            *({} if optimizer is None else optimizer.defaults),
        }.difference(_NOTES)
        self.read = self._option_names
        attributes = {} if optimizer is None else vars(optimizer)
        self.attributes = {
            key: value
            for key, value in attributes.items()
            if key not in ("defaults", "param_groups", "state")
        }
        self._names: dict[str, tuple[str, ...]] = {}
        # how the class counts steps in its states: int, or a tensor
        self.count: Callable[[int], Any] = step_tensor

    def terms(self, group: Group) -> dict[str, Any]:
        """Return the options that decide the arithmetic of a step, with numbers in place of
        tensors. See Kind.
        """
        return {key: _number_of(group[key]) for key in group if key in self._option_names}

    def _options(self, group: Group) -> dict[str, Any]:
        """Return the options of a step: `terms`, and the user's own keys unchanged."""
        return {key: group[key] for key in group if key not in _NOTES} | self.terms(group)

    def fixed(self, group: Group) -> dict[str, Any]:
        """See Kind."""
        return _switches(self.terms(group))

    def check_options(self, op: str, group: Group, where: str = "") -> None:
        """See Kind."""
        for key in ("capturable", "differentiable"):
            if group.get(key):
                raise ValueError(
                    f"{op}: {where}{key} is True; expected False for a sharded {self.name}"
                )
        for key, value in group.items():
            number_of_class = (
                key in self._option_names
                and isinstance(value, int | float)
                and not isinstance(value, bool)
            )
            if (key == "lr" or number_of_class) and not 0.0 <= number(
                op, where + key, value
            ) < float("inf"):
                raise ValueError(
                    f"{op}: {where}{key} is {value}; expected a finite number of at least 0"
                )

    def hypers(self, group: Group) -> Callable[..., ElementStep]:
        """See Kind."""
        return partial(self.hyper, group)

    def hyper(self, group: Group, step: int, grad_scale: float) -> ElementStep:
        """Return what updates parameters in their `step`-th step."""
        runs = {key: group[key] for key in ("foreach", "fused") if key in group}
        return ElementStep(self, self._options(group) | runs, step, grad_scale)

    def format_of(self, group: Group, dtype: torch.dtype) -> StateFormat:
        """See Kind."""
        return ElementFormat(
            "fp32" if dtype in MASTERED_DTYPES else None,
            names=self._states_of(self._options(group)),
        )

    def _states_of(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the states that a step makes, as one on two elements shows. Raises
        NotImplementedError.
        """
        switches = str(_switches(options))
        if switches not in self._names:
            param = torch.zeros(2, dtype=torch.float32, device="cpu")
            states = {param: self.first(options, param)}
            optimizer = bare_optimizer(
                self.cls, options, [param], defaultdict(dict, states), self.attributes
            )
            param.grad = torch.zeros_like(param)
            plain_step(self.cls)(optimizer)
            names = []
            for key, value in optimizer.state[param].items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == param.shape
                    and value.dtype == torch.float32
                ):
                    names.append(key)
                elif key == "step":
                    self.count = int if isinstance(value, int) else step_tensor
                elif value is not None:
                    raise NotImplementedError(
                        f"shard: a {self.name} keeps {key}={value!r} for a parameter; expected "
                        "states of the parameter's shape"
                    )
            self._names[switches] = tuple(names)
        return self._names[switches]

    @staticmethod
    def first(options: Mapping[str, Any], param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the states that a constructor would have made (Adagrad's); others begin in an
        element's first step.
        """
        if "initial_accumulator_value" not in options:
            return {}
        return {
            "sum": torch.full_like(param, options["initial_accumulator_value"]),
            "step": step_tensor(0),
        }

    def export_groups(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """See Kind."""
        numbers = numbers_of(groups)
        return [
            {**group, "params": [numbers[param] for param in group["params"]]} for group in groups
        ]

    def import_groups(
        self, op: str, groups: Sequence[Group], state_dict: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """See Kind."""
        return import_groups(
            op,
            groups,
            state_dict,
            local_keys=("capturable",),
            renamed={},
            check=self.check_options,
            name=self.name,
        )

    def import_state(
        self, op: str, name: str, saved: Any, param: torch.Tensor, state_format: StateFormat
    ) -> tuple[Mapping[str, Any], list[str]]:
        """See Kind. A non-empty state without "step" (torch's SGD has none) counts as one step.

        States that a constructor made are not read (on the meta device they have no values): the
        first step makes them anew.
        """
        if not isinstance(saved, Mapping):
            raise TypeError(f"{op}: {name} is of type {type(saved).__name__}; expected a dict")
        lost: list[str] = []
        values = {key: value for key, value in saved.items() if value is not None}
        count = step_count(op, f"{name}.step", values.get("step", 1 if values else 0))
        if count == 0:
            return {}, lost
        keys = [key for key in state_format.keys if key != "master"]
        state: dict[str, Any] = {}
        for key, value in values.items():
            if key == "step":
                continue
            if key == "master" and (
                state_format.master is None or getattr(value, "dtype", None) is not torch.float32
            ):
                lost.append(f"{name}.master is left out: the weights stay as they are")
            elif key in state_format.keys:
                state[key] = check_tensor(op, f"{name}.{key}", value, param.shape)
            else:
                expected = ", ".join(("step", *state_format.keys))
                raise ValueError(
                    f"{op}: {name} contains the unknown key {key!r}; expected {expected}, as in a "
                    f"{self.name}"
                )
        if missing := [key for key in keys if key not in state]:
            raise ValueError(
                f"{op}: {name} contains no {missing[0]!r}; expected {', '.join(keys)}, as in a "
                f"{self.name} with these options"
            )
        return state | {"step": step_tensor(count)}, lost


def _zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device="cpu")


def not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why shards cannot have the steps of an optimizer of any class; None if a trial found
    no reason.

    The trial makes three steps of a tensor with the options of each group, and as shards do, of the
    same values in flat parts. Of `optimizer` nothing changes.
    """
    random = torch.Generator("cpu").manual_seed(0)
    draws = partial(torch.randn, 3, 256, generator=random, dtype=torch.float32, device="cpu")
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        if options.get("lr") == 0.0:  # of a schedule that begins there
            options["lr"] = 1e-2
        begin = draws()
        whole, parts = begin.clone(), [begin[:1].flatten().clone(), begin[1:].flatten().clone()]
        try:
            kind = ElementKind(type(optimizer), optimizer)
            state_format = kind.format_of(options, torch.float32)
            states = [state_format.new(256 * rows, _zeros) for rows in (1, 2)]
            of_whole = defaultdict(dict, {whole: kind.first(options, whole)})
            plain = bare_optimizer(kind.cls, options, [whole], of_whole, kind.attributes)
            for step in range(1, 4):
                whole.grad = draws() * torch.tensor([[0.01], [1.0], [100.0]])
                grads = [whole.grad[:1].flatten(), whole.grad[1:].flatten()]
                plain_step(kind.cls)(plain)
                kind.hyper(options, step, 1.0).update(parts, grads, states)
        except Exception as error:  # of any kind: it is another's code
            return f"a trial of them raised {type(error).__name__}: {error}"
        if not torch.equal(torch.cat(parts).view_as(whole), whole):
            return (
                "they give a tensor other weights than its flat parts, or need more than states "
                "of its elements"
            )
        if torch.equal(whole, begin):
            return "they changed nothing in a trial"
    return None


class Elementwise(ShardableOptimizer):
    """What shard returns for an elementwise optimizer of torch.optim: its param_groups, updated on
    shards.

    `step` has the arguments of FusedAdam.step; so have `scale_loss`, `skipped_steps` and
    `synchronize` their meaning.
    """

    kind: ElementKind

    def __init__(self, optimizer: torch.optim.Optimizer, kind: ElementKind) -> None:
        """Take the groups of `optimizer`, of this kind. ValueError for options that no sharded
        step can use.
        """
        self.kind = kind
        self._engine, self._skipped, self._device_state = None, 0, None
        for index, group in enumerate(optimizer.param_groups):
            self.kind.check_options("shard", group, f"param_groups[{index}].")
        super().__init__(
            [{**group, "params": list(group["params"])} for group in optimizer.param_groups],
            optimizer.defaults,
        )

    @property
    def _op(self) -> str:
        return self.kind.name

    def _add_group(self, param_group: dict[str, Any]) -> None:
        if self._engine is None:
            super()._add_group(param_group)
            return
        # which may give a group options of its own, and refuse it
        of_class = self.kind.cls.__new__(self.kind.cls)
        state = {"defaults": self.defaults, "param_groups": self.param_groups, "state": {}}
        of_class.__setstate__({**self.kind.attributes, **state})
        of_class.add_param_group(param_group)
        self.kind.check_options(
            self._op, self.param_groups[-1], f"param_groups[{len(self.param_groups) - 1}]."
        )

    def __repr__(self) -> str:
        """Return what the optimizer's own class does."""
        return super().__repr__().replace(type(self).__name__, self.kind.name, 1)
