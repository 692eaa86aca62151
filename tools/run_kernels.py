"""Runs every kernel on tiny tensors, misaligned ones among them: what compute-sanitizer watches
(tools/sanitize.py).

Run: python -m tools.run_kernels [--device cpu]. Values are made on the CPU, so that few kernels but
ours run. Every tensor ends where its memory ends: with PYTORCH_NO_CUDA_MEMORY_CACHING=1 each has an
allocation of its own, and one step too far is an error.
"""

import argparse
import itertools
import sys

import torch

import shardcore
from benchmarks.adam_kinds import SHORT, every_kind
from shardcore._native import _C

# (elements, how many lie before them): none, less than a vector, across a block of 256, across a
# chunk, with a tail.
SIZES = [(0, 0), (1, 0), (3, 1), (256, 0), (257, 1), (1000, 3), (9001, 0)]
DONE = "run_kernels: all done"


def make(device: torch.device, dtype: torch.dtype, numel: int, before: int = 0) -> torch.Tensor:
    """Make normal values (numel,) that end where their memory ends."""
    return torch.randn(before + numel).to(dtype).to(device)[before:]


def run_adam(device: torch.device) -> int:
    """Two steps of every kind, the second with clipping; returns the number of steps."""
    variants = [(kind, {}) for kind in every_kind()]
    variants += [
        (kind, {"amsgrad": True, "adam_w_mode": False})
        for kind in every_kind()
        if kind.state_dtype == "fp32"
    ]
    for kind, more in variants:
        params = [torch.nn.Parameter(make(device, kind.weight, *size)) for size in SIZES]
        optimizer = shardcore.FusedAdam(params, lr=0.01, weight_decay=0.1, **kind.options, **more)
        for max_norm in (None, 1.0):
            optimizer.step(
                grads=[make(device, kind.grad, *size) for size in SIZES],
                grad_scale=0.5,
                max_norm=max_norm,
            )
    return 2 * len(variants)


def run_device_step(device: torch.device) -> int:
    """Steps that decide and count on the device, the last one skipped."""
    params, grads, *moments = (
        [make(device, torch.float32, *size) for size in SIZES] for _ in range(4)
    )
    counts = [torch.zeros((), dtype=torch.int64, device=device) for _ in SIZES]
    state = torch.zeros(6, dtype=torch.int64, device=device)
    indices = list(range(len(SIZES)))
    lr = torch.full((), 0.01, dtype=torch.float64, device=device)
    hyper = _C.AdamHyper(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1)
    for found_inf in (0.0, 1.0):
        found = torch.full((), found_inf, device=device)
        squares = _C.sq_norm(grads).unsqueeze(0)
        terms = {"loss_scale": lr, "found_inf": found, "max_norm": 1.0}
        scalars = _C.device_step(state, squares, counts, [0] * len(SIZES), [hyper], **terms)
        _C.AdamStepper().step(
            params, grads, *moments, scalars, indices, keys=[(i, 0) for i in indices]
        )
    return 2


def run_norm(device: torch.device) -> int:
    for dtype in SHORT:
        _C.sq_norm([make(device, dtype, *size) for size in SIZES])
    return len(SHORT)


def run_ordered_sum(device: torch.device) -> int:
    cases = list(
        itertools.product(SHORT, (torch.float32, torch.bfloat16), SIZES, (1, 3), (False, True))
    )
    for pieces_dtype, out_dtype, (numel, before), world_size, extras in cases:
        pieces = make(device, pieces_dtype, world_size * numel, before)
        own = make(device, pieces_dtype, numel, before) if extras else None
        _C.ordered_sum(
            pieces, world_size, 1 / world_size, make(device, out_dtype, numel, before), extras, own
        )
    return len(cases)


def run_cast(device: torch.device) -> int:
    for to, start in itertools.product(SHORT, SHORT):
        _C.cast(
            [make(device, to, *size) for size in SIZES],
            [make(device, start, *size) for size in SIZES],
        )
    return len(SHORT) ** 2


def run_elements(device: torch.device) -> int:
    formulas = ("sgd", "momentum", "nesterov", "adagrad", "lion")
    cases = list(itertools.product(formulas, SHORT, SHORT, SHORT, (False, True)))
    for formula, param, grad, state, master in cases:
        params, grads, states = (
            [make(device, dtype, *size) for size in SIZES] for dtype in (param, grad, state)
        )
        masters = [make(device, torch.float32, *size) if master else None for size in SIZES]
        none = [None] * len(SIZES)
        scalars = _C.ElementScalars(
            formula, l2=0.1, lr=1e-3, of_direction=(0.9, 0.1), of_state=(0.9, 0.1)
        )
        _C.element_step(params, grads, none if formula == "sgd" else states, masters, scalars)
    return len(cases)


def run_host_tier(device: torch.device) -> int:
    for pin_memory in {False, device.type == "cuda"}:
        tier = _C.HostTier(device, pin_memory)
        buffer = tier.empty(1000, torch.float32)
        tier.to_tier(buffer, make(device, torch.float32, 1000, 3)).wait()
        tier.from_tier(make(device, torch.float32, 1000, 1), buffer)
        tier.synchronize()
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.run_kernels", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to test this program"
    )
    device = torch.device(parser.parse_args().device)
    for run in (
        run_adam,
        run_device_step,
        run_norm,
        run_ordered_sum,
        run_cast,
        run_elements,
        run_host_tier,
    ):
        count = run(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"{run.__name__}: {count} calls", flush=True)
    print(DONE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
