"""sq_norm, ordered_sum and cast against exact or float64 oracles, on every instruction set and
thread count.
"""

import math
import os
from fractions import Fraction

import numpy as np
import pytest
import torch

from shardcore._native import _C
from tests.support.kernels import DTYPES, SIZES, each_isa, round_bf16_away, tensor
from tests.support.ranks import run_fresh


def block_sums(x):
    """The sums of the definition: square in float64, then halve over zero-padded blocks of 256."""
    padded = np.zeros(-(-x.numel() // 256) * 256)
    padded[: x.numel()] = x.float().numpy().astype(np.float64) ** 2
    a = padded.reshape(-1, 256)
    for s in (128, 64, 32, 16, 8, 4, 2, 1):
        a = a[:, :s] + a[:, s : 2 * s]
    return a[:, 0]


def random_list(seed):
    rng = torch.Generator().manual_seed(seed)
    return [
        tensor(n, DTYPES[(n + seed) % 3], rng, misalign=n % 4)
        for n in [0, 70_000, 1, *SIZES, 0, 100_001, 0]
    ]


def test_norm_is_exact_to_double_double_on_every_isa_and_thread_count():
    # up to 512 Ki elements one thread reads
    large = tensor((1 << 20) + 5, torch.float32, torch.Generator().manual_seed(2))
    tensors = [*random_list(1), large]
    exact = sum((Fraction(float(s)) for t in tensors for s in block_sums(t)), Fraction(0))
    results = []
    threads = torch.get_num_threads()
    try:
        with each_isa() as isas:
            for _isa in isas():
                for count in (1, 2, 3):
                    torch.set_num_threads(count)
                    results.append(_C.sq_norm(tensors))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(r, results[0]) for r in results)
    high, low = results[0].tolist()
    assert abs(Fraction(high) + Fraction(low) - exact) <= exact * Fraction(1, 2**95)
    assert _C.norm_from_sq(results[0]) == float(np.float32(math.sqrt(high + low)))
    # The twin that adds blocks in plain float64 is worse than that.
    plain = 0.0
    for t in tensors:
        for s in block_sums(t):
            plain += s
    assert abs(Fraction(plain) - exact) > exact * Fraction(1, 2**95)


def test_any_grouping_of_a_list_gives_the_same_norm():
    tensors = random_list(2)
    whole = _C.norm_from_sq(_C.sq_norm(tensors))
    for step in (1, 2, 5):
        parts = torch.stack(
            [_C.sq_norm(tensors[i : i + step]) for i in range(0, len(tensors), step)]
        )
        assert _C.norm_from_sq(_C.sq_norm_add(parts)) == whole
        assert _C.norm_from_sq(_C.sq_norm_add(parts.flip(0).contiguous())) == whole
    big = tensors[1]
    cut = [big[:25_600], big[25_600:]]  # at a block boundary
    assert _C.norm_from_sq(_C.sq_norm(cut)) == _C.norm_from_sq(_C.sq_norm([big]))


def test_norm_of_not_finite_empty_and_huge():
    assert _C.sq_norm([]).tolist() == [0.0, 0.0]
    assert _C.sq_norm([torch.zeros(0)]).tolist() == [0.0, 0.0]
    assert _C.norm_from_sq(_C.sq_norm([torch.tensor([1.0, math.inf])])) == math.inf
    assert math.isnan(_C.norm_from_sq(_C.sq_norm([torch.ones(300), torch.tensor([math.nan])])))
    assert _C.norm_from_sq(_C.sq_norm([torch.full((100,), 3e37)])) == pytest.approx(3e38, rel=1e-6)
    assert _C.sq_norm_add(torch.zeros(0, 2, dtype=torch.float64)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("pieces_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_ordered_sum_has_the_bits_of_the_definition(pieces_dtype, out_dtype, accumulate):
    rng = torch.Generator().manual_seed(3)
    with each_isa() as isas:
        for _isa in isas():
            for world_size in (1, 2, 5):
                for numel in [*SIZES[:40:7], 0, 257, *([70_001] if world_size == 2 else [])]:
                    pieces = tensor(world_size * numel, pieces_dtype, rng, misalign=1)
                    out = tensor(numel, out_dtype, rng, misalign=1)
                    scale = 0.37 / world_size
                    total = torch.zeros(numel)
                    for rank, piece in enumerate(pieces.float().split(numel) if numel else []):
                        total = piece.clone() if rank == 0 else total + piece
                    want = (total.double() * scale).float()
                    if accumulate:
                        want = out.float() + want
                    want = want if out_dtype == torch.float32 else round_bf16_away(want)
                    sq = _C.ordered_sum(pieces, world_size, scale, out, accumulate)
                    assert torch.equal(out, want)
                    assert torch.equal(sq, _C.sq_norm([out]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ordered_sum_takes_the_own_piece_from_where_it_lies(dtype, rank):
    rng = torch.Generator().manual_seed(5)
    pieces = tensor(3 * 70_001, dtype, rng)
    want, out = torch.empty(70_001, dtype=dtype), torch.empty(70_001, dtype=dtype)
    sq = _C.ordered_sum(pieces, 3, 1 / 3, want)
    place = pieces.view(3, -1)[rank]
    own = place.clone()
    place.fill_(math.nan)
    for target in (out, own):  # memory of its own, or the piece's
        assert torch.equal(_C.ordered_sum(pieces, 3, 1 / 3, target, own=own, rank=rank), sq)
        assert torch.equal(target, want)
    _C.ordered_sum(pieces, 3, 1 / 3, out, own=out, rank=(rank + 1) % 3)
    assert out.isnan().all()  # the piece of another rank is not replaced


def test_cast_rounds_as_documented_and_every_isa_agrees():
    rng = torch.Generator().manual_seed(4)
    float32 = torch.cat(
        [torch.randn(5000, generator=rng) * 10.0**e for e in (-42, -38, -8, -5, 0, 4, 37)]
    )
    with each_isa() as isas:
        for _isa in isas():
            bf16, half = (
                torch.empty_like(float32, dtype=torch.bfloat16),
                torch.empty_like(float32, dtype=torch.float16),
            )
            _C.cast([bf16, half], [float32, float32])
            assert torch.equal(bf16, round_bf16_away(float32))
            assert torch.equal(half, float32.half())
            back = torch.empty_like(float32), torch.empty_like(float32)
            _C.cast(back, [bf16, half])
            assert torch.equal(back[0], bf16.float())
            assert torch.equal(back[1], half.float())
    tie = torch.tensor([1.0 + 2.0**-8, -1.0 - 2.0**-8])
    out = torch.empty(2, dtype=torch.bfloat16)
    _C.cast([out], [tie])
    assert out.tolist() == [1.0 + 2.0**-7, -1.0 - 2.0**-7]
    assert tie.bfloat16().tolist() == [1.0, -1.0]  # torch rounds ties to even: the other result


def test_isa_choice():
    isas = _C.cpu_isas()
    assert _C.cpu_isa() in isas
    with pytest.raises(ValueError, match=f'set_cpu_isa: name has "sse9"; expected {isas[0]}'):
        _C.set_cpu_isa("sse9")


def isa_with(value):
    os.environ["SHARDCORE_CPU_ISA"] = value
    try:
        _C.sq_norm([torch.ones(3)])
        return _C.cpu_isa()
    except ValueError as error:
        return str(error)


def test_environment_forces_an_isa_or_says_what_is_wrong():
    for isa in _C.cpu_isas():
        assert run_fresh(isa_with, isa) == isa
    assert 'environment: SHARDCORE_CPU_ISA has "fast"; expected ' in run_fresh(isa_with, "fast")


def test_threads_are_torchs_own():
    """The extension must not bring a second OpenMP runtime into the process."""
    with open("/proc/self/maps") as maps:
        runtimes = {
            line.split()[-1]
            for line in maps
            if "libgomp" in line or "libomp" in line or "libiomp" in line
        }
    assert len(runtimes) <= 1, runtimes


def test_build_info():
    info = _C.build_info()
    assert set(info) == {"version", "torch", "cuda", "cuda_arch_list", "compiler", "io_uring"}
    assert torch.__version__.split("+")[0] == info["torch"].split("+")[0]
