"""Plain data as JSON: what is written is read back as it was, and everything else is refused by
name.
"""

import json
import math
from collections import Counter, OrderedDict
from enum import Enum, IntEnum
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardcore.checkpoint import plain
from tests.support.models import error_of
from tests.support.ranks import run_ranks


def there_and_back(value: Any) -> Any:
    return plain.from_json(
        json.loads(json.dumps(plain.to_json(value, "value"), allow_nan=False)), "file"
    )


def test_floats_that_json_lacks_come_back() -> None:
    found = there_and_back([math.nan, math.inf, -math.inf, -0.0])
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf, 0.0]
    assert math.copysign(1, found[3]) == -1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.randn(3, 4).t(),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.int64),
        torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    found = there_and_back({"tensor": tensor})["tensor"]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.nan_to_num(7), tensor.nan_to_num(7))
    found.zero_()  # it has memory of its own, which may be written


def test_arrays_come_back() -> None:
    array = numpy.arange(6.0).reshape(2, 3)
    for given in (array.T, array[::-1], array.astype(">f4")):
        assert (there_and_back(given) == given).all()
    for dtype in ("uint32", "uint64", "float32", "int8", "bool"):
        found = there_and_back(array.astype(dtype))
        assert found.dtype == dtype
        assert (found == array.astype(dtype)).all()
    assert there_and_back(numpy.float64(2.5)) == 2.5
    with pytest.raises(TypeError, match=r"given is of type ndarray; expected plain data"):
        plain.to_json(numpy.array(["text"]), "given")


def test_counters_come_back() -> None:
    found = there_and_back(
        {"milestones": Counter([3, 8, 8]), "words": Counter("aab"), "none": Counter()}
    )
    assert [list(found[key].elements()) for key in found] == [[3, 8, 8], ["a", "a", "b"], []]


class Color(IntEnum):
    RED = 3


class Phase(str, Enum):  # noqa: UP042 - str() of it is another text
    TRAIN = "train"


def test_subclasses_become_what_they_are_made_of() -> None:
    assert there_and_back(OrderedDict(a=Color.RED)) == {"a": 3}
    assert there_and_back(Phase.TRAIN) == "train"


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        Color,
        lambda: 0,
        torch.nn.Linear(1, 1),
        {"a": [object()]},
        {(object(),): 1},
    ],
)
def test_other_things_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"given.* is of type .*; expected plain data"):
        plain.to_json(value, "given")


def _distributed(rank: int, world_size: int) -> tuple[str, bool]:
    whole = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (world_size,)), [Shard(0)])
    error = error_of(lambda: plain.to_json({"ema": whole}, "client_state"))
    return error, torch.equal(there_and_back(whole.full_tensor()), torch.arange(8.0))


def test_distributed_tensors_are_refused_by_name() -> None:
    for error, full in run_ranks(2, _distributed):
        assert (
            "client_state['ema'] is of type DTensor, which stores its values in other tensors"
            in error
        )
        assert full


def test_an_error_says_where() -> None:
    with pytest.raises(TypeError, match=r"client_state\['a'\]\[1\]\['b'\] is of type object"):
        plain.to_json({"a": [0, {"b": object()}]}, "client_state")


def test_a_cycle_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="levels deep"):
        plain.to_json(value, "given")


@pytest.mark.parametrize(
    "value",
    [
        {"$unknown": 1},
        {"$tuple": 3},
        {"$bytes": "?"},
        {"$float": "1e400"},
        {"$dict": [1]},
        {"$counter": 3},
        {"$dict": [[{"a": 1}, 2]]},
        {"$tensor": "AAAA", "dtype": "float32", "shape": [1]},
        {"$tensor": "", "dtype": "float32", "shape": [1 << 60]},
        {"$tensor": "", "dtype": "os.system", "shape": [0]},
        {"$tensor": "AAAAAA==", "dtype": "float32"},
        {"$array": {"$tensor": "AA==", "dtype": "int8", "shape": [1]}, "dtype": "O"},
        [[{"$tensor": "AA==", "dtype": "int8", "shape": [-1]}]],
        {"$tensor": "AA==", "dtype": "int8", "shape": [math.inf]},
        {"$array": [1], "dtype": "i4"},
        {"$array": {"$tensor": "AA==", "dtype": "int8", "shape": [1]}, "dtype": "i1,,"},
    ],
    ids=str,
)
def test_damaged_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="file: a value is damaged"):
        plain.from_json(value, "file")
