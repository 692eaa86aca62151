"""sq_norm, ordered_sum and cast at every place, the host tier beside CUDA, and all kernels beyond
2^31 elements.

The large tests run with few elements where there is no GPU, so that they are tested themselves.
They compare windows of the large result (its ends, and around 2^31) with the CPU kernel on the same
elements alone, which the random keys allow.
"""

import itertools
import math

import pytest
import torch

from benchmarks.device import Device
from shardcore._native import _C
from tests.support.kernels import DTYPES, SIZES, make_hyper, tensor
from tests.support.placement import bits, device_of, each_place, first_difference, moved, running_at

BLOCK = 256
LARGE = 2**31 + 1001
SMALL = 70_001
WINDOW = 64 * BLOCK


def random_list(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = [0, 70_000, 1, *SIZES, 0, 100_001, 0]
    return [tensor(n, DTYPES[(n + seed) % 3], generator, misalign=n % 4) for n in sizes]


@each_place
def test_norm(place):
    tensors = random_list(1)
    expected = _C.norm_from_sq(_C.sq_norm(tensors))
    device = device_of(place)

    def norm(tensors):
        with running_at(place):
            return _C.norm_from_sq(_C.sq_norm([moved(t, device) for t in tensors]).cpu())

    assert norm(tensors) == expected
    assert norm([]) == norm(tensors[:1]) == 0.0
    tensors[-2][-1] += 0.5
    assert norm(tensors) != expected
    tensors[-2][-1] = math.nan
    assert math.isnan(norm(tensors))


@each_place
@pytest.mark.parametrize("pieces_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ordered_sum(place, pieces_dtype, out_dtype):
    generator = torch.Generator().manual_seed(3)
    device = device_of(place)
    cases = itertools.product(
        (1, 2, 5), [0, *SIZES[:40:7], 257, 70_001], (False, True), (False, True)
    )
    for world_size, numel, accumulate, with_own in cases:
        pieces = tensor(world_size * numel, pieces_dtype, generator, misalign=1)
        out = tensor(numel, out_dtype, generator, misalign=3)
        own = tensor(numel, pieces_dtype, generator, misalign=2) if with_own else None
        pieces_there, out_there = moved(pieces, device), moved(out, device)
        own_there = None if own is None else moved(own, device)
        arguments = (world_size, 0.37 / world_size)
        sq = _C.ordered_sum(pieces, *arguments, out, accumulate, own, world_size - 1)
        with running_at(place):
            sq_there = _C.ordered_sum(
                pieces_there, *arguments, out_there, accumulate, own_there, world_size - 1
            )
        assert first_difference([out_there], [out]) is None
        assert _C.norm_from_sq(sq_there.cpu()) == _C.norm_from_sq(sq)


@each_place
@pytest.mark.parametrize("world_size", [8, 64, 256, 1024])
def test_ordered_sum_of_many_pieces(place, world_size):
    """More ranks than a GPU's lane has under way, in pieces that start on 16 bytes and odd ones."""
    generator = torch.Generator().manual_seed(world_size)
    device = device_of(place)
    for dtype, numel in itertools.product(DTYPES, (4 * BLOCK, 1017)):
        pieces, own = tensor(world_size * numel, dtype, generator), tensor(numel, dtype, generator)
        out = torch.zeros(numel)
        pieces_there, own_there, out_there = (moved(t, device) for t in (pieces, own, out))
        sq = _C.ordered_sum(pieces, world_size, 1 / world_size, out, False, own, world_size // 2)
        with running_at(place):
            sq_there = _C.ordered_sum(
                pieces_there,
                world_size,
                1 / world_size,
                out_there,
                False,
                own_there,
                world_size // 2,
            )
        assert first_difference([out_there], [out]) is None
        assert _C.norm_from_sq(sq_there.cpu()) == _C.norm_from_sq(sq)
        # a twin: the same pieces in another order
        turned = pieces.view(world_size, numel).flip(0).reshape(-1)
        _C.ordered_sum(
            turned, world_size, 1 / world_size, out, False, own, world_size - 1 - world_size // 2
        )
        if dtype == torch.float32:  # sums of a few 16-bit numbers may be exact
            assert first_difference([out_there], [out]) is not None


@pytest.mark.gpu
def test_norms_on_several_streams_and_in_graphs_at_once():
    """Each counts its own CUDA blocks: replays of two graphs run beside each other and beside
    norms on three streams.
    """
    lists = [[torch.randn(3_000_001 * (i + 1), device="cuda")] for i in range(5)]
    want = [_C.sq_norm(tensors).cpu() for tensors in lists]
    streams = [torch.cuda.Stream() for _ in lists]
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], [torch.empty(0)] * 5
    torch.cuda.synchronize()
    for i, graph in enumerate(graphs):
        # captured on the stream that then runs the last list's norm
        with torch.cuda.graph(graph, stream=streams[4]):
            outs[i] = _C.sq_norm(lists[i])
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i < len(graphs):
                    outs[i].fill_(-1.0)
                    graphs[i].replay()
                else:
                    outs[i] = _C.sq_norm(lists[i])
        torch.cuda.synchronize()
        for out, expected in zip(outs, want, strict=True):
            assert torch.equal(out.cpu(), expected)


@pytest.mark.gpu
def test_a_norm_is_one_launch():
    tensors = [torch.ones(1_000_003, device="cuda"), torch.ones(77, device="cuda")]
    assert Device("cuda").launches(lambda: _C.sq_norm(tensors)) == {"kernels": 1, "copies": 0}


@each_place
@pytest.mark.parametrize(("to", "start"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_cast(place, to, start):
    generator = torch.Generator().manual_seed(4)
    device = device_of(place)
    sources = [tensor(n, start, generator, misalign=n % 4) for n in (*SIZES, 70_001)]
    for source in sources:
        source.mul_(10.0 ** torch.randint(-44, 38, source.shape, generator=generator))
    targets = [torch.zeros_like(s, dtype=to) for s in sources]
    targets_there = [moved(t, device) for t in targets]
    _C.cast(targets, sources)
    with running_at(place):
        _C.cast(targets_there, [moved(s, device) for s in sources])
    assert first_difference(targets_there, targets) is None


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [False, True])
def test_host_tier(pin_memory):
    device = torch.device("cuda")
    tier = _C.HostTier(device, pin_memory)
    source = tensor(70_001, torch.float32, torch.Generator().manual_seed(5))
    buffer, back = tier.empty(70_001, torch.float32), torch.zeros(70_001, device=device)
    tier.to_tier(buffer, moved(source, device)).synchronize()
    assert torch.equal(buffer, source)
    tier.from_tier(back, buffer).wait()
    assert torch.equal(back.cpu(), source)
    assert (tier.bytes_pinned, tier.bytes_refused) == (
        (70_001 * 4 + 4095) // 4096 * 4096 if pin_memory else 0,
        0,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [False, True])
def test_copies_keep_the_order_of_the_compute_stream(pin_memory):
    """A copy comes after the kernels queued before it; kernels queued after wait() come after
    it. No host wait in between.
    """
    device, numel = torch.device("cuda"), 1 << 22
    tier = _C.HostTier(device, pin_memory)
    places, x = (
        [tier.empty(numel, torch.float32) for _ in range(2)],
        torch.zeros(numel, device=device),
    )
    for side in (torch.cuda.current_stream(), torch.cuda.Stream()):
        x.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for round_ in range(20):
                place = places[round_ % 2]
                torch.cuda._sleep(1_000_000)  # the copy would come too early if it did not wait
                x.add_(1.0)
                tier.to_tier(place, x.clone()).wait()  # the clone is freed while it is copied
                x.fill_(-1.0)
                tier.from_tier(x, place).wait()
        side.synchronize()
        assert torch.equal(x, torch.full_like(x, 20.0))
    tier.synchronize()


def need_bytes(device: torch.device, wanted: int) -> None:
    """Skip where the device has less free memory than a test needs."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if free < wanted:
            pytest.skip(
                f"{free / 2**30:.0f} GiB of GPU memory are free; expected {wanted / 2**30:.0f} GiB"
            )


def windows(numel: int) -> list[tuple[int, int]]:
    """Ranges that start on a block: both ends, and around 2^31 and 2^32 bytes or elements where
    there are as many.
    """
    starts = {0, (numel - WINDOW) // BLOCK * BLOCK}
    starts |= {2**power - WINDOW // 2 for power in range(28, 32) if 2**power + WINDOW < numel}
    return [(start, min(start + WINDOW, numel)) for start in sorted(starts)]


def fill(
    numel: int, dtype: torch.dtype, device: torch.device, seed: int, scale: float = 1.0
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(numel, dtype=dtype, device=device).normal_(generator=generator).mul_(scale)


def large_lists(numel: int, kind: str, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of one Adam step over ``numel`` elements, by name."""
    weight = torch.float32 if kind == "fp32" else torch.bfloat16
    lists = {
        "params": fill(numel, weight, device, 1),
        "grads": fill(numel, torch.bfloat16, device, 2),
    }
    if kind != "8bit":
        lists["exp_avgs"] = fill(numel, torch.float32, device, 3, 0.3)
        lists["exp_avg_sqs"] = fill(numel, torch.float32, device, 4, 0.3).square_()
    else:
        scales = -(-numel // BLOCK)
        lists["exp_avgs"] = torch.zeros(numel, dtype=torch.int8, device=device)
        lists["exp_avg_sqs"] = torch.zeros(numel, dtype=torch.uint8, device=device)
        lists["exp_avg_scales"] = torch.zeros(scales, device=device)
        lists["exp_avg_sq_scales"] = torch.zeros(scales, device=device)
    if kind == "split":
        lists["masters"] = torch.zeros(numel, dtype=torch.int16, device=device)
    return lists


def adam_steps(lists: dict[str, torch.Tensor], first: int, drop_tail: int = 0) -> None:
    """Two steps over elements that begin at element ``first`` of their parameter."""
    stepper = _C.AdamStepper()
    numel = lists["params"].numel() - drop_tail
    cut = {name: [t[:numel] if t.numel() > numel else t] for name, t in lists.items()}
    for step in (1, 2):
        hyper = make_hyper(step=step, seed=5, stochastic_rounding="masters" not in lists)
        stepper.step(hypers=[hyper], hyper_index=[0], keys=[(3, first)], **cut)


def cut_out(lists: dict[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    """Copies on the CPU of the elements begin to end (begin on a block), and of their blocks'
    scales.
    """
    scaled = (begin // BLOCK, -(-end // BLOCK))
    return {
        name: t[slice(*scaled if name.endswith("scales") else (begin, end))].cpu().clone()
        for name, t in lists.items()
    }


BYTES_EACH = {"fp32": 4 + 2 + 8, "split": 2 + 2 + 2 + 8, "8bit": 2 + 2 + 2 + 0.04}


@each_place
@pytest.mark.parametrize("kind", list(BYTES_EACH))
def test_adam_beyond_two_to_the_31(place, kind):
    device = device_of(place)
    numel = LARGE if place == "cuda" else SMALL
    need_bytes(device, int(numel * BYTES_EACH[kind]) + 2**30)
    lists = large_lists(numel, kind, device)
    ranges = windows(numel)
    expected = [cut_out(lists, begin, end) for begin, end in ranges]
    with running_at(place):
        adam_steps(lists, 0)
    for (begin, end), window in zip(ranges, expected, strict=True):
        lost_tail = {name: t.clone() for name, t in window.items()}
        adam_steps(window, begin)
        actual = cut_out(lists, begin, end)
        assert first_difference(actual.values(), window.values()) is None, (begin, end)
        adam_steps(lost_tail, begin, drop_tail=1)
        assert first_difference(actual.values(), lost_tail.values()) is not None


@each_place
def test_every_element_beyond_two_to_the_31_is_updated_once(place):
    """Equal elements must end equal: one that is left out, or updated twice, ends elsewhere."""
    device = device_of(place)
    numel = LARGE if place == "cuda" else SMALL
    need_bytes(device, 14 * numel + 2**31)
    lists = {
        "params": torch.ones(numel, device=device),
        "grads": torch.ones(numel, dtype=torch.bfloat16, device=device),
    }
    lists |= {name: torch.zeros(numel, device=device) for name in ("exp_avgs", "exp_avg_sqs")}
    with running_at(place):
        adam_steps(lists, 0)
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        low, high = lists[name].aminmax()
        assert torch.equal(low, high), name
    assert lists["params"][0] < 1
    adam_steps(lists, 0, drop_tail=1)
    assert not torch.equal(*lists["params"].aminmax())


@each_place
def test_norm_and_cast_beyond_two_to_the_31(place):
    device = device_of(place)
    numel = LARGE if place == "cuda" else SMALL
    need_bytes(device, 6 * numel + 2**31)
    whole = fill(numel, torch.bfloat16, device, 6)
    cut = 100 * BLOCK if place != "cuda" else 2**30
    parts = [whole[first : first + cut] for first in range(0, numel, cut)]
    with running_at(place):
        norm = _C.norm_from_sq(_C.sq_norm([whole]).cpu())
        sums = torch.stack([_C.sq_norm([part]).cpu() for part in parts])
    assert norm == _C.norm_from_sq(_C.sq_norm_add(sums))
    assert norm != _C.norm_from_sq(_C.sq_norm_add(sums[:-1]))
    widened = torch.empty(numel, dtype=torch.float32, device=device)
    with running_at(place):
        _C.cast([widened], [whole])
    assert all(
        torch.equal(widened[begin:end], whole[begin:end].float()) for begin, end in windows(numel)
    )


@each_place
def test_ordered_sum_beyond_two_to_the_31(place):
    device = device_of(place)
    numel = LARGE // 2 // BLOCK * BLOCK + 77 if place == "cuda" else SMALL
    need_bytes(device, 8 * numel + 2**30)
    pieces = fill(2 * numel, torch.bfloat16, device, 7)
    assert place != "cuda" or pieces.numel() > 2**31
    out = torch.full((numel,), 7.0, device=device)
    with running_at(place):
        _C.ordered_sum(pieces, 2, 0.5, out)
    for begin, end in windows(numel):
        mine = torch.cat([pieces[begin:end], pieces[numel + begin : numel + end]]).cpu()
        want = torch.empty(end - begin)
        _C.ordered_sum(mine, 2, 0.5, want)
        assert torch.equal(bits(out[begin:end].clone()), bits(want))
