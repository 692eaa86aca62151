"""The floating-point operations of a model's forward, by DeepSpeed's names.

torch's FlopCounterMode counts matrix products, convolutions and attention, whatever function called
them. DeepSpeed adds operations of single elements, such as biases, activations and norms. A
multiplication and an addition are two operations, and one MAC.
Source: https://www.deepspeed.ai/tutorials/flops-profiler, 0.19.8.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardcore.deepspeed.accelerator import get_accelerator

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


class FlopsProfiler:
    """Counts and times the computation of forwards between `start_profile` and `stop_profile`."""

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        """Take a model. ds_engine, recompute_fwd_factor: accepted, for backward is not counted."""
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._hooks: list[Any] = []
        self.reset_profile()

    def start_profile(self, ignore_list: Collection[type] | None = None) -> None:
        """Count from 0.

        ignore_list: classes of modules without a line of their own; their parents include them.
        """
        self.stop_profile()
        self.reset_profile()
        for module in self.model.modules():
            if type(module) not in (ignore_list or ()):
                self._hooks.append(module.register_forward_pre_hook(self._enter))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        self.started = True

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        get_accelerator().synchronize()
        if not self._open:
            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((module, self._mode.get_total_flops(), time.perf_counter()))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        get_accelerator().synchronize()
        _, flops, since = self._open.pop()
        if all(outer is not module for outer, _, _ in self._open):  # else it is counted there
            self._flops[module] += self._mode.get_total_flops() - flops
            self._seconds[module] += time.perf_counter() - since
        if not self._open:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def stop_profile(self) -> None:
        """Stop counting. The counts stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def reset_profile(self) -> None:
        """Begin at 0."""
        self._flops: Counter[nn.Module] = Counter()
        self._seconds: dict[nn.Module, float] = dict.fromkeys(self.model.modules(), 0.0)
        self._open: list[tuple[nn.Module, int, float]] = []  # modules whose forward runs

    def end_profile(self) -> None:
        """Stop counting, and clear the counts."""
        self.stop_profile()
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the floating-point operations; as_string: as text."""
        total = self._flops[self.model]
        return number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiplications with an addition: half of the operations."""
        total = self._flops[self.model] // 2
        return macs_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return how many seconds the forwards took."""
        total = self._seconds[self.model]
        return duration_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of parameters of the model, in full if they are sharded."""
        total = _params_of(self.model)
        return params_to_string(total) if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the totals, the largest modules, and each module.

        Args:
            profile_step: the number of the step to print.
            module_depth: the depth of the list of modules; -1: all.
            top_modules: the number of module classes to print at each depth.
            detailed: whether to print each module.
            output_file: a file to write to instead.
        """
        seconds = self.get_total_duration()
        speed = flops_to_string(self.get_total_flops() / seconds) if seconds else "-"
        lines = [
            f"profile of step {profile_step}, forwards on this rank:",
            f"parameters: {self.get_total_params(True)}, {self.get_total_flops(True)}FLOPs, "
            f"{self.get_total_macs(True)}",
            f"time: {self.get_total_duration(True)}, {speed}",
            *self._most(module_depth, top_modules),
        ]
        if detailed:
            for name, module in self.model.named_modules():
                if module_depth < 0 or _depth(name) <= module_depth:
                    lines.append(
                        f"{'  ' * _depth(name)}{name or '(model)'} {type(module).__name__}: "
                        f"{self._line(module)}"
                    )
        _say(lines, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the classes that have most parameters, MACs and time, at each depth.

        module_depth: the only depth; -1: all. top_modules: how many classes.
        """
        _say(self._most(module_depth, top_modules), None)

    def _line(self, module: nn.Module) -> str:
        total, seconds = self._flops[self.model], self._seconds[self.model]
        shares = self._flops[module] / (total or 1), self._seconds[module] / (seconds or 1.0)
        return (
            f"{params_to_string(_params_of(module))} parameters, "
            f"{macs_to_string(self._flops[module] // 2)} ({shares[0]:.1%}), "
            f"{duration_to_string(self._seconds[module])} ({shares[1]:.1%})"
        )

    def _most(self, module_depth: int, top_modules: int) -> list[str]:
        at: dict[int, dict[str, Counter[str]]] = {}  # by depth, class and kind
        for name, module in self.model.named_modules():
            sums = at.setdefault(_depth(name), {})
            amounts = {
                "parameters": _params_of(module),
                "MACs": self._flops[module] // 2,
                "time": self._seconds[module],
            }
            for kind, amount in amounts.items():
                sums.setdefault(kind, Counter())[type(module).__name__] += amount  # type: ignore[assignment]
        lines = []
        for depth, kinds in sorted(at.items()):
            if module_depth in (-1, depth):
                most = {
                    kind: [name for name, _ in amounts.most_common(top_modules)]
                    for kind, amounts in kinds.items()
                }
                lines.append(
                    f"depth {depth}: "
                    + "; ".join(f"most {kind}: {', '.join(names)}" for kind, names in most.items())
                )
        return lines


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return the operations, MACs and parameters of one forward of a model.

    The model is in evaluation mode afterwards.

    Args:
        input_shape: the shape of a single input tensor. Otherwise args and kwargs are the inputs.
        print_profile: whether to call FlopsProfiler.print_model_profile.
        detailed, module_depth, top_modules, output_file: its arguments.
        warm_up: the number of forwards before.
        as_string: whether to return strings.
        ignore_modules: classes of modules without a line of their own.
        mode: "forward", or "generate" for `model.generate`.

    Raises ValueError for another mode, or without inputs.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f"get_model_profile: mode is {mode!r}; expected 'forward' or 'generate'")
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = [torch.zeros(input_shape, dtype=like.dtype, device=like.device)]
    kwargs = kwargs or {}
    if not args and not kwargs:
        raise ValueError(
            "get_model_profile: there are no inputs; expected input_shape, args or kwargs"
        )
    model.eval()
    run: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    for _ in range(warm_up):
        run(*args, **kwargs)
    profiler.start_profile(ignore_modules)
    run(*args, **kwargs)
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    totals = (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
    flops, macs, params = (total(as_string) for total in totals)
    profiler.end_profile()
    return flops, macs, params


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number with its unit of thousands, "1.5 G"; units: the unit to use."""
    if units is None:
        units = (
            "" if num == 0 else next((unit for unit, size in _UNITS.items() if num >= size), "u")
        )
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def _with(unit: str, num: float, units: str | None = None, precision: int = 2) -> str:
    return f"{number_to_string(num, units, precision)}{unit}"


macs_to_string = partial(_with, "MACs")
flops_to_string = partial(_with, "FLOPS")
bytes_to_string = partial(_with, "B")
duration_to_string = partial(_with, "s")


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of parameters, in which B is for thousands of millions."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def _params_of(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _say(lines: list[str], output_file: str | None) -> None:
    text = "\n".join(lines)
    if not output_file:
        print(text, flush=True)
        return
    Path(output_file).parent.mkdir(parents=True, exist_ok=True)
    Path(output_file).write_text(text + "\n")
