"""What the tests of shardcore._C share: data, float64 oracles, and a way to see that a refused
call wrote nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shardcore._native import _C

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT = 2.0**-24  # half a float32 ulp of 1
SIZES = [*range(2 * 16 + 4), 255, 256, 257, 1000]


def make_hyper(**changes: object) -> "_C.AdamHyper":
    """An AdamHyper with values that make mistakes large."""
    options: dict[str, object] = dict(
        lr=0.05, beta1=0.8, beta2=0.97, eps=1e-6, weight_decay=0.2, step=3, grad_scale=0.6
    )
    return _C.AdamHyper(**(options | changes))


def tensor(
    numel: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    misalign: int = 0,
    scale: float = 1.0,
) -> torch.Tensor:
    """Normal values (numel,) of dtype, starting `misalign` elements into its storage, with room
    behind.
    """
    storage = torch.full((misalign + numel + 8,), 7.0, dtype=dtype)
    view = storage[misalign : misalign + numel]
    view.copy_(torch.randn(numel, generator=generator) * scale)
    return view


@dataclass
class Lists:
    """The arguments of one AdamStepper.step over tensors of given sizes."""

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    exp_avgs: list[torch.Tensor] = field(default_factory=list)
    exp_avg_sqs: list[torch.Tensor] = field(default_factory=list)
    masters: list[torch.Tensor | None] = field(default_factory=list)
    max_exp_avg_sqs: list[torch.Tensor | None] = field(default_factory=list)

    def add(
        self,
        numel: int,
        param: torch.dtype,
        grad: torch.dtype,
        master: bool,
        amsgrad: bool,
        seed: int,
        misalign: int = 0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.params.append(tensor(numel, param, rng, misalign=misalign))
        self.grads.append(tensor(numel, grad, rng, misalign=misalign))
        self.exp_avgs.append(tensor(numel, torch.float32, rng, misalign=misalign, scale=0.3))
        self.exp_avg_sqs.append(
            tensor(numel, torch.float32, rng, misalign=misalign, scale=0.3).abs_().add_(1e-3)
        )
        self.masters.append(
            tensor(numel, torch.float32, rng, misalign=misalign) if master else None
        )
        self.max_exp_avg_sqs.append(
            tensor(numel, torch.float32, rng, misalign=misalign).abs_() if amsgrad else None
        )

    def all(self) -> list[torch.Tensor]:
        lists = (
            self.params,
            self.grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.masters,
            self.max_exp_avg_sqs,
        )
        return [t for items in lists for t in items if t is not None]

    def clone(self) -> "Lists":
        """A deep copy that keeps what lies around each tensor in its storage."""

        def copy(t: torch.Tensor | None) -> torch.Tensor | None:
            if t is None:
                return None
            storage = torch.tensor([], dtype=t.dtype).set_(t.untyped_storage().clone())
            return storage[t.storage_offset() : t.storage_offset() + t.numel()]

        names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "max_exp_avg_sqs")
        return Lists(*([copy(t) for t in getattr(self, name)] for name in names))

    def step(
        self, hypers: "list[_C.AdamHyper]", index: list[int] | None = None, **more: object
    ) -> None:
        _C.AdamStepper().step(
            self.params,
            self.grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            hypers,
            index or [0] * len(self.params),
            masters=self.masters,
            max_exp_avg_sqs=self.max_exp_avg_sqs,
            **more,
        )


def bits(tensors: "list[torch.Tensor] | Lists") -> list[bytes]:
    """The bytes of the whole storages, so that writes past an end show."""
    items = tensors.all() if isinstance(tensors, Lists) else tensors
    return [
        torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage()).numpy().tobytes()
        for t in items
    ]


@contextmanager
def nothing_written(*tensors: torch.Tensor) -> Iterator[None]:
    """Fails if the block changes a byte, or the version counter, of any tensor."""
    strided = [t for t in tensors if t.layout == torch.strided]
    before, versions = bits(strided), [t._version for t in strided]
    yield
    assert bits(strided) == before
    assert [t._version for t in strided] == versions


@contextmanager
def each_isa() -> Iterator[Callable[[], Iterator[str]]]:
    """Gives an iterator that sets each instruction set in turn; puts the choice back at the end."""
    saved = _C.cpu_isa()

    def isas() -> Iterator[str]:
        for isa in _C.cpu_isas():
            _C.set_cpu_isa(isa)
            yield isa

    try:
        yield isas
    finally:
        _C.set_cpu_isa(saved)


def round_bf16_away(x: torch.Tensor) -> torch.Tensor:
    """float32 -> bfloat16, to nearest, ties away from zero, by comparing float64 distances to
    both neighbours.
    """
    low = (x.contiguous().view(torch.int32) & -65536).view(torch.float32)  # towards zero
    high = (low.view(torch.int32) + 65536).view(torch.float32)
    to_low, to_high = (x.double() - low.double()).abs(), (high.double() - x.double()).abs()
    return torch.where(to_high <= to_low, high, low).bfloat16()
