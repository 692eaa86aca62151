"""Pieces of tensors that processes read from each other; here two ends in one process."""

import gc
import weakref

import pytest
import torch

from shardcore import _C


def make_pair(seconds: float = 60) -> tuple[_C.NeighbourReads, _C.NeighbourReads]:
    a, b = _C.NeighbourReads(2, 0, seconds), _C.NeighbourReads(2, 1, seconds)
    why = a.connect(1, b.address()) or b.connect(0, a.address())
    if why:
        pytest.skip(why)
    return a, b


def test_pieces_cross():
    a, b = make_pair()
    x, y = torch.randn(100_000), torch.arange(7)
    got_x, got_y = torch.empty_like(x), torch.empty_like(y)
    version = got_x._version
    tickets = [b.receive(0, 3, got_x), a.send(1, 3, x), b.send(0, 3, y), a.receive(1, 3, got_y)]
    for ticket in tickets:
        ticket.wait()
        ticket.wait()  # as often as one likes
    assert torch.equal(got_x, x)
    assert torch.equal(got_y, y)
    assert got_x._version > version


def test_tensors_live_until_they_were_read():
    a, b = make_pair()
    x = torch.randn(1000)
    expected, alive = x.clone(), weakref.ref(x.untyped_storage())
    ticket = a.send(1, 0, x)
    del x
    got = torch.empty(1000)
    b.receive(0, 0, got).wait()
    assert torch.equal(got, expected)
    ticket.wait()
    del ticket
    gc.collect()
    assert alive() is None


def test_pieces_of_other_sizes_and_late_ones_raise():
    a, b = make_pair(seconds=0.05)
    sent = a.send(1, 0, torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"16 bytes of neighbour 0 .* were expected, but it sent 12"):
        b.receive(0, 0, torch.zeros(4)).wait()
    sent.wait()
    with pytest.raises(RuntimeError, match=r"4 bytes for neighbour 0 .* were not there within 50 ms"):
        b.send(0, 0, torch.zeros(1)).wait()


REFUSALS = [
    (lambda a: _C.NeighbourReads(0, 0, 1), "NeighbourReads: count has 0; expected 1 to 1048576"),
    (lambda a: _C.NeighbourReads(2, 2, 1), "NeighbourReads: own has 2; expected 0 to 1"),
    (lambda a: _C.NeighbourReads(2, 0, 0), "NeighbourReads: timeout_seconds has 0; expected a number above 0"),
    (lambda a: a.connect(2, (1, 1, 1, 1, 1)), "NeighbourReads.connect: number has 2; expected 0 to 1"),
    (
        lambda a: a.send(0, 0, torch.zeros(1)),
        "NeighbourReads.send: to has 0; expected the number of a process that connect() found",
    ),
    (
        lambda a: a.receive(1, 0, torch.zeros(2, 2).t()[0]),
        "NeighbourReads.receive: data has shape [2] with strides [2]; expected a contiguous tensor (call contiguous())",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_refusals(call, message):
    a, _ = make_pair()
    with pytest.raises(ValueError) as error:
        call(a)
    assert str(error.value) == message
