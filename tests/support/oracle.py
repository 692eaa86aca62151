"""Adam in float64 interval arithmetic: what a correct float32 kernel may return, element by
element.

The bound is reasoned, not measured. The kernel works in IEEE float32, round to nearest: each scalar
and each result of +, *, fma, /, sqrt is off by at most half an ulp of its own value, that is by a
factor within 1 +- 2^-24 (and by 2^-150 where it is subnormal). So every value here is an interval
[lo, hi] of float64; each operation is done on the ends and then widened by exactly that
(``rounded``). What the kernel computes lies inside, whatever it fuses less or more than this.

Where a value is stored in bfloat16 or float16 the ends are rounded as the storage rounds (a
monotone map), so the interval is one number, and the check is for equal bits, unless a tie lies
between the ends. Intervals go on from step to step and are never re-synchronized with what is
tested.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

# Half an ulp, relative; the second factor covers float64's own rounding here.
U = 2.0**-24 * (1 + 2.0**-20)
HALF_SUBNORMAL = 2.0**-150


@dataclass(frozen=True)
class Interval:
    lo: np.ndarray
    hi: np.ndarray

    @staticmethod
    def of(x: torch.Tensor) -> "Interval":
        """An exact value: any of the dtypes fits float64."""
        exact = x.detach().double().numpy().reshape(-1).copy()
        return Interval(exact, exact)

    def rounded(self) -> "Interval":
        return Interval(
            self.lo - U * np.abs(self.lo) - HALF_SUBNORMAL,
            self.hi + U * np.abs(self.hi) + HALF_SUBNORMAL,
        )

    def stored(self, dtype: torch.dtype, stochastic: bool = False) -> "Interval":
        """As the storage rounds; stochastic rounding may go to either neighbour."""
        if dtype is torch.float32:
            return self
        if stochastic and dtype is torch.bfloat16:
            return Interval(store(self.lo, dtype, np.floor), store(self.hi, dtype, np.ceil))
        return Interval(store(self.lo, dtype), store(self.hi, dtype))

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(self.lo + other.lo, self.hi + other.hi)

    def __mul__(self, other: "Interval") -> "Interval":
        ends = np.stack(
            [self.lo * other.lo, self.lo * other.hi, self.hi * other.lo, self.hi * other.hi]
        )
        return Interval(ends.min(0), ends.max(0))

    def __neg__(self) -> "Interval":
        return Interval(-self.hi, -self.lo)

    def __truediv__(self, other: "Interval") -> "Interval":
        assert (other.lo > 0).all()
        return self * Interval(1 / other.hi, 1 / other.lo)

    def sqrt(self) -> "Interval":
        return Interval(np.sqrt(np.maximum(self.lo, 0)), np.sqrt(self.hi))

    def maximum(self, other: "Interval") -> "Interval":
        return Interval(np.maximum(self.lo, other.lo), np.maximum(self.hi, other.hi))

    def width_ulps(self) -> np.ndarray:
        """Half the width, in float32 ulps of the middle."""
        middle = np.abs(self.lo + self.hi) / 2
        return (self.hi - self.lo) / 2 / np.spacing(middle.astype(np.float32)).astype(np.float64)


def ties_away(x: np.ndarray) -> np.ndarray:
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def store(
    x: np.ndarray, dtype: torch.dtype, to_integer: Callable[[np.ndarray], np.ndarray] = ties_away
) -> np.ndarray:
    """Round float64 to bfloat16 (to nearest, ties away from zero, or as to_integer) or float16
    (to nearest, ties to even).
    """
    if dtype is torch.float16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float64)
    _, exponent = np.frexp(x)  # |x| in [2^(e-1), 2^e)
    # eight bits of mantissa; the subnormals share one unit
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    return to_integer(x / unit) * unit


def scalar(x: float) -> Interval:
    return Interval(np.float64(x), np.float64(x)).rounded()


@dataclass
class Oracle:
    """Adam over one flat tensor. ``weight`` is the master where there is one, else the parameter
    itself.
    """

    weight: Interval
    dtype: torch.dtype  # of the parameter
    master: bool
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    adam_w_mode: bool = True
    amsgrad: bool = False
    maximize: bool = False
    bias_correction: bool = True
    stochastic_rounding: bool = False
    seed: int = 0
    state_dtype: str = "fp32"
    step_count: int = 0
    exp_avg: Interval = field(init=False)
    exp_avg_sq: Interval = field(init=False)
    max_exp_avg_sq: Interval = field(init=False)

    def __post_init__(self) -> None:
        zeros = np.zeros_like(self.weight.lo)
        self.exp_avg = self.exp_avg_sq = self.max_exp_avg_sq = Interval(zeros, zeros)

    @property
    def param(self) -> Interval:
        return self.weight.stored(self.dtype) if self.master else self.weight

    def step(self, grad: torch.Tensor, grad_scale: float = 1.0) -> None:
        self.step_count += 1
        beta1, beta2 = self.betas
        bias1 = 1 - beta1**self.step_count if self.bias_correction else 1.0
        bias2 = 1 - beta2**self.step_count if self.bias_correction else 1.0
        p, m, v = self.weight, self.exp_avg, self.exp_avg_sq
        g = (Interval.of(grad) * scalar(-grad_scale if self.maximize else grad_scale)).rounded()
        decay = scalar(1 - self.lr * self.weight_decay if self.adam_w_mode else 1.0)
        if not self.adam_w_mode:
            g = ((scalar(self.weight_decay) * p).rounded() + g).rounded()
        m = (scalar(beta1) * m + (scalar(1 - beta1) * g).rounded()).rounded()
        v = (scalar(beta2) * v + ((scalar(1 - beta2) * g).rounded() * g).rounded()).rounded()
        self.exp_avg, self.exp_avg_sq = (
            kept_moment(m, self.state_dtype, True),
            kept_moment(v, self.state_dtype, False),
        )
        if self.amsgrad:
            self.max_exp_avg_sq = v = self.max_exp_avg_sq.maximum(v)
        denominator = (
            (v.sqrt().rounded() * scalar(1 / np.sqrt(bias2))).rounded() + scalar(self.eps)
        ).rounded()
        update = (scalar(self.lr / bias1) * (m / denominator).rounded()).rounded()
        p = ((p * decay).rounded() + -update).rounded()
        self.weight = p if self.master else p.stored(self.dtype, self.stochastic_rounding)


def kept_moment(x: Interval, state_dtype: str, signed: bool) -> Interval:
    """As reduced moments are kept: bfloat16 (the second stochastically), or 8-bit codes, of which
    either neighbour may come.

    A code has 3 bits of mantissa, and below 2^-17 (first) and 2^-33 (second moment) of the block's
    largest equal steps; the scale is less than twice the largest.
    """
    if state_dtype == "fp32":
        return x
    if state_dtype == "bf16":
        return x.stored(torch.bfloat16, stochastic=not signed)
    magnitude = np.maximum(np.abs(x.lo), np.abs(x.hi))
    largest = np.concatenate(
        [
            np.full_like(b, b.max())
            for b in np.split(magnitude, range(256, len(x.lo), 256))
            if len(b)
        ]
        or [x.lo]
    )
    step = np.maximum(magnitude * 2.0**-3, 2 * largest * 2.0 ** (-17 if signed else -33))
    lo = x.lo - step
    return Interval(lo if signed else np.maximum(lo, 0), x.hi + step)


def violations(actual: torch.Tensor, expected: Interval) -> int:
    """How many elements lie outside. NaN does."""
    x = actual.detach().double().numpy().reshape(-1)
    return int((~((expected.lo <= x) & (x <= expected.hi))).sum())
