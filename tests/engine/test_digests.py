"""Digests of tensors: the format, for every dtype."""

import numpy as np
import torch
from torch import nn

import shardcore
from shardcore.engine.digests import Digests, key_of, unsigned
from tests.support.digests import expected_of, in_numpy


def test_ranges_add_up_on_any_device() -> None:
    values = torch.randn(10, 100)
    key = key_of("x", "float32", (10, 100))
    digests = Digests()
    for start in range(0, 1000, 512):
        digests.add("x", key, values.view(-1)[start : start + 512], start)
    digests.name("nothing")
    expected = {"x": expected_of({"x": values})["x"], "nothing": 0}
    totals = digests.totals(torch.device("cpu")).tolist()
    assert dict(zip(digests.names, map(unsigned, totals), strict=True)) == expected
    assert {
        key_of(*other)
        for other in (
            ("y", "float32", (10, 100)),
            ("x", "bfloat16", (10, 100)),
            ("x", "float32", (100, 10)),
        )
    }.isdisjoint({key})


def test_values_of_every_dtype() -> None:
    model = nn.Module()
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-100, 100, (3, 300), generator=generator)
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    others = [torch.float64, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64]
    for dtype in dtypes + others:
        name = f"of_{dtype}".replace("torch.", "")
        model.register_parameter(name, nn.Parameter(numbers.to(dtype), requires_grad=False))
    found = shardcore.digest(model, by="param")
    names = [f"of_{dtype}".replace("torch.", "") for dtype in dtypes]
    expected = expected_of({name: getattr(model, name).detach() for name in names})
    assert {name: found[name] for name in names} == expected
    for name, param in model.named_parameters():
        for place in (0, 450, 899):
            flat = param.data.view(-1)
            old = flat[place].clone()
            flat[place] = not old if param.dtype == torch.bool else old + 1
            assert shardcore.digest(model, by="param")[name] != found[name], (name, place)
            flat[place] = old
    assert shardcore.digest(model, by="param") == found


def test_nan_and_zeros() -> None:
    model = nn.Linear(2, 2, bias=False)
    bits = torch.tensor([0x7FC00001, -4194303, 0, 1], dtype=torch.int32)
    model.weight.data = bits.view(torch.float32).view(2, 2)
    found = shardcore.digest(model)
    assert found == in_numpy()("weight", np.array([[np.nan, np.nan], [0, 1e-45]], np.float32))
    model.weight.data[1, 0] = -0.0
    assert shardcore.digest(model) != found
