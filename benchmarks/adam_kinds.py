"""What the Adam benchmarks time: the options of every engine, kinds of step with the bytes that
each moves, lists of shapes.

A tensor's bytes count once for each time that a step must read or write it. The float32 scales of
8-bit moments (1/16 byte an element) are left out, as are tables of pointers: rates are then a
little lower than what the memory moved.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LOSS_SCALE = 1024.0
CHECK_STRIDE = 997  # weights are compared at every such element
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1}
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Kind:
    """How one step keeps its numbers; the fields are FusedAdam's options and the dtypes of
    weight and gradient.
    """

    weight: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    master: str | None = None
    state_dtype: str = "fp32"
    stochastic_rounding: bool = False

    @property
    def options(self) -> dict[str, object]:
        return {
            "master": self.master,
            "state_dtype": self.state_dtype,
            "stochastic_rounding": self.stochastic_rounding,
        }

    @property
    def bytes_moved(self) -> int:
        """Bytes that a step reads and writes for one element."""
        weight = self.weight.itemsize
        weights = {None: 2 * weight, "fp32": 2 * 4 + weight, "split": 2 * weight + 2 * 2}[
            self.master
        ]
        return self.grad.itemsize + weights + 2 * 2 * MOMENT_BYTES[self.state_dtype]

    @property
    def bytes_held(self) -> int:
        """Bytes that weight, master and moments take for one element."""
        return (
            self.weight.itemsize
            + {None: 0, "fp32": 4, "split": 2}[self.master]
            + 2 * MOMENT_BYTES[self.state_dtype]
        )

    def __str__(self) -> str:
        parts = [
            f"{SHORT[self.weight]} weight",
            f"{SHORT[self.grad]} grad",
            f"{self.state_dtype} states",
        ]
        if self.master is not None:
            parts.append(f"{self.master} master")
        if self.stochastic_rounding:
            parts.append("stochastic")
        return ", ".join(parts)


def every_kind() -> Iterator[Kind]:
    """Yield every combination that FusedAdam takes. A float32 weight is its own master; only
    bfloat16 ones split.
    """
    masters = {
        torch.float32: (None,),
        torch.bfloat16: (None, "fp32", "split"),
        torch.float16: (None, "fp32"),
    }
    for weight, grad, state_dtype in itertools.product(masters, SHORT, MOMENT_BYTES):
        for master in masters[weight]:
            yield Kind(weight, grad, master, state_dtype)
        if weight == torch.bfloat16:
            yield Kind(weight, grad, None, state_dtype, stochastic_rounding=True)


def numel_of(shapes: Shapes) -> int:
    """Count the elements of all shapes."""
    return sum(torch.Size(shape).numel() for shape in shapes)


def gpt2_shapes(
    layers: int = 12, dim: int = 768, vocab: int = 50257, context: int = 1024
) -> Shapes:
    """Return the parameters of GPT-2 (by default the 124M one: 148 tensors) in the model's
    order; the head is the embedding.
    """
    norm: Shapes = [(dim,), (dim,)]
    attention: Shapes = [(dim, 3 * dim), (3 * dim,), (dim, dim), (dim,)]
    mlp: Shapes = [(dim, 4 * dim), (4 * dim,), (4 * dim, dim), (dim,)]
    return [(vocab, dim), (context, dim), *(norm + attention + norm + mlp) * layers, *norm]


def llama_shapes(
    layers: int = 32, dim: int = 4096, hidden: int = 11008, vocab: int = 32000
) -> Shapes:
    """Return the parameters of Llama (by default the 7B one: 291 tensors, 6.7e9 elements)."""
    layer: Shapes = [(dim, dim)] * 4 + [(hidden, dim)] * 2 + [(dim, hidden), (dim,), (dim,)]
    return [(vocab, dim), *layer * layers, (dim,), (vocab, dim)]


def shard(shapes: Shapes, ranks: int) -> Shapes:
    """Return what one rank holds when each tensor is cut along its first dimension, as FSDP2
    does.
    """
    return [(shape[0] // ranks, *shape[1:]) for shape in shapes]


def differences(
    weights: Mapping[str, torch.Tensor], ours: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Return each engine's largest difference from our weights, relative to |weight| + lr: those
    that agree, the others.
    """
    sampled = {name: weight.detach()[::CHECK_STRIDE].double() for name, weight in weights.items()}
    # A bfloat16 weight may round the other way once. In float32, engines that keep beta^t in
    # float32 are off by 1e-5 and more.
    tolerance = 2.0**-7 if weights[ours].dtype == torch.bfloat16 else 1e-4
    scale = sampled[ours].abs() + OPTIONS["lr"]
    found = {
        name: float(((values - sampled[ours]).abs() / scale).max())
        for name, values in sampled.items()
    }
    agree = {name: difference for name, difference in found.items() if difference <= tolerance}
    return agree, {name: difference for name, difference in found.items() if name not in agree}


def check_same_work(subject: str, weights: Mapping[str, torch.Tensor], ours: str, op: str) -> float:
    """Return the largest difference of any engine's weights from ours; ValueError if one is
    large.
    """
    agree, others = differences(weights, ours)
    if others:
        named = ", ".join(f"{name}'s by {difference:.2e}" for name, difference in others.items())
        raise ValueError(
            f"{op}: {subject} weights differ from ours: {named} relative; expected the same but "
            f"for rounding"
        )
    return max(agree.values())
