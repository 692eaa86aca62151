"""stream_params: the full weights of a sharded model, unit by unit, and their metadata."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from tests.support.models import (
    assert_equal,
    batch_of,
    error_of,
    hash_of_training,
    loss_of,
    made,
    make_net,
    of_forward,
)
from tests.support.pretend_cuda import DEVICE, run_pretended, why_not
from tests.support.ranks import run_ranks
from tests.support.slices import mesh_of, sharded_lm, train_lm


def trained(rank: int, stage: int, **options: Any) -> tuple[Any, Any]:
    """Return a model after a step, so that masters have other values than its weights."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = shardcore.shard(model, optimizer, stage, **options)
    loss_of(model, batch_of(0, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


PRECISIONS = {"float32": {}, "bf16": {"precision": "bf16"}}


def _stream(rank: int, world_size: int, stage: int, options: dict[str, Any]) -> None:
    model, optimizer = trained(rank, stage, **options)
    before = hash_of_training(model, optimizer)
    for bucket_bytes in (None, 1, 1000):
        found = dict(shardcore.stream_params(model, bucket_bytes=bucket_bytes))
        assert_equal(found, of_forward(model))
        assert [(n, t.shape, t.dtype) for n, t in found.items()] == shardcore.param_metadata(model)
    masters = dict(shardcore.stream_params(model, dtype=torch.float32))
    assert_equal(masters, {name: model.state_dict()[name] for name in masters})
    wrong = {name: value + 1 for name, value in found.items()}
    with pytest.raises(AssertionError):  # what the comparison has to reject
        assert_equal(wrong, of_forward(model))
    assert hash_of_training(model, optimizer) == before


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_streams_the_weights_of_forward(stage: int, world_size: int, precision: str) -> None:
    run_ranks(world_size, _stream, stage, PRECISIONS[precision])


def _of_tiers(rank: int, world_size: int, offloads: list[dict[str, Any]]) -> None:
    for offload in offloads:
        model, optimizer = trained(rank, 3, precision="bf16", offload=made(offload))
        assert_equal(dict(shardcore.stream_params(model, bucket_bytes=500)), of_forward(model))
        masters = dict(shardcore.stream_params(model, dtype=torch.float32))
        assert_equal(masters, {name: model.state_dict()[name] for name in masters})
        del model, optimizer


def test_streams_weights_in_host_memory_and_in_files(tmp_path: Path) -> None:
    files = {"path": str(tmp_path), "gradients": "cpu", "resume": False}
    offloads = [
        {"optimizer": "cpu"},
        {"optimizer": "cpu", "params": "cpu"},
        {"optimizer": "nvme", "params": "cpu", **files},
        {"optimizer": "nvme", "params": "nvme", **files},
    ]
    run_ranks(2, _of_tiers, offloads)


def _to_some(rank: int, world_size: int) -> None:
    model, _ = trained(rank, 3, precision="bf16")
    for ranks in ([1], [0, 2], []):
        for bucket_bytes in (None, 300):
            stream = shardcore.stream_params(model, ranks=ranks, bucket_bytes=bucket_bytes)
            expected = of_forward(model) if rank in ranks else (of_forward(model), {})[1]
            assert_equal(dict(stream), expected)
    plain, _ = trained(rank, 3, precision="bf16")
    for each in (model, plain):  # training continues as if nothing had been streamed
        loss_of(each, batch_of(1, 0, rank)).backward()
    assert_equal(of_forward(model), of_forward(plain))


def test_only_the_ranks_asked_for_receive_tensors() -> None:
    run_ranks(3, _to_some)


def _leave(rank: int, world_size: int, raises: bool) -> list[str]:
    model, _ = trained(rank, 3)
    expected = of_forward(model)

    def loop() -> None:
        for number, _ in enumerate(shardcore.stream_params(model)):
            if rank == 1 and number == 2:
                if raises:
                    raise KeyError("in the loop")
                break

    errors = [error_of(loop)]
    assert_equal(dict(shardcore.stream_params(model)), expected)
    return errors


@pytest.mark.parametrize("raises", [False, True])
def test_a_rank_that_leaves_early_is_named_on_all_others(raises: bool) -> None:
    first, second, third = run_ranks(3, _leave, raises)
    assert first == third
    assert "rank 1 failed: _LeftEarlyError: its loop ended at tensor 3" in first[0]
    assert ("KeyError" in second[0]) if raises else (second[0] == "no error")


def _refused(rank: int, world_size: int) -> list[str]:
    model, _ = trained(rank, 3)
    errors = []

    def stream(**options: Any) -> None:
        list(shardcore.stream_params(model, **options))

    for options in (
        {"dtype": (torch.bfloat16, torch.float32)[rank]},
        {"dtype": (None, torch.int8)[rank]},
        {"names": (str.upper, str)[rank]},
        {"names": "vllm"},
        {"names": lambda name: "one"},
        {"names": "huggingface"},
        {"ranks": [2]},
        {"bucket_bytes": 0},
        {"device": "foo"},
        {"device": ("cpu", "cuda:99")[rank]},
    ):
        errors.append(error_of(lambda options=options: stream(**options)))
    with shardcore.full_params(model):
        errors.append(error_of(stream))
    loss = loss_of(model, batch_of(1, 0, rank))
    seen = []
    loss.register_hook(lambda grad: seen.append(error_of(stream)))
    loss.backward()
    return errors + seen


def test_bad_arguments_are_refused_on_every_rank() -> None:
    errors = list(zip(*run_ranks(2, _refused), strict=True))
    expected = [
        "ranks disagree",
        "dtype is torch.int8; expected a floating dtype",
        "ranks disagree",
        'names is \'vllm\'; expected "model", "huggingface" or a function',
        "names returned one twice",
        "expected a model of transformers",
        "ranks has 2; expected ranks of torch.distributed, 0 to 1",
        "bucket_bytes is 0; expected a number of bytes",
        "device is 'foo'; expected a device that torch has here",
        "device is 'cuda:99'; expected a device that torch has here",
        "called inside full_params; expected it after the block",
        "called inside a backward; expected it between steps",
    ]
    assert len(errors) == len(expected)
    for on_ranks, text in zip(errors, expected, strict=True):
        for error in on_ranks:
            assert "stream_params: " in error
            assert text in error


def _of_slices(rank: int, world_size: int, stage: int) -> None:
    mesh = mesh_of(world_size, 2)
    model, optimizer = sharded_lm(mesh, stage, frozen="norm", precision="bf16")
    train_lm(model, optimizer, mesh, range(1))
    found = dict(shardcore.stream_params(model, bucket_bytes=2000))
    expected = {name: p.full_tensor() for name, p in of_forward(model).items()}
    assert_equal(found, expected)
    assert [(n, t.shape, t.dtype) for n, t in found.items()] == shardcore.param_metadata(model)
    alone = dict(shardcore.stream_params(model, ranks=[3]))
    assert_equal(alone, expected if rank == 3 else {})


@pytest.mark.parametrize("stage", [1, 3])
def test_tensor_parallel_slices_are_assembled(stage: int) -> None:
    run_ranks(4, _of_slices, stage)


def test_an_ordinary_model_yields_its_parameters() -> None:
    model = make_net()
    found = dict(shardcore.stream_params(model, dtype=torch.bfloat16, names=lambda n: f"x.{n}"))
    expected = {f"x.{n}": p.detach().bfloat16() for n, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    assert [(n, t.shape, t.dtype) for n, t in found.items()] == shardcore.param_metadata(
        model, dtype=torch.bfloat16, names=lambda n: f"x.{n}"
    )


def test_another_object_is_refused() -> None:
    with pytest.raises(TypeError, match="got a list; expected a model"):
        list(shardcore.stream_params([]))  # type: ignore[arg-type]


def _of_ties(rank: int, world_size: int, stage: int) -> list[bool]:
    """Return whether weights halfway between two of bfloat16 are rounded away from zero."""
    model = make_net()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-1 - 2**-8)
    model, _ = shardcore.shard(model, None, stage)
    found = shardcore.stream_params(model, dtype=torch.bfloat16)
    return [bool((value == -1 - 2**-7).all()) for _, value in found]


@pytest.mark.parametrize("stage", [0, 3])
def test_ties_are_rounded_as_a_step_rounds_them(stage: int) -> None:
    assert bool((torch.tensor(-1 - 2**-8).bfloat16() == -1).all()), "torch rounds to even"
    for ties in run_ranks(2, _of_ties, stage):
        assert len(ties) == 22
        assert all(ties)


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


def _by_a_sender(rank: int, world_size: int, stage: int) -> bool:
    """Take and pack tensors as vLLM's sender does: on two streams, which wait for nothing."""
    model = make_net()
    optimizer = shardcore.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = shardcore.shard(model, optimizer, stage, precision="bf16")
    x, y = (value.to(DEVICE) for value in batch_of(0, 0, rank))
    ((model(x).float() - y) ** 2).mean().backward()
    optimizer.step()
    side, packed = [torch.cuda.Stream() for _ in range(2)], []
    values = shardcore.stream_params(model, bucket_bytes=300)
    while True:
        with torch.cuda.stream(side[len(packed) % 2]):
            parts = [_bytes_of(value) for _, value in islice(values, 3)]
            if not parts:
                break
            packed.append(torch.cat(parts))
            del parts
    for stream in side:
        stream.synchronize()
    expected = torch.cat([_bytes_of(value) for value in of_forward(model).values()])
    return torch.equal(torch.cat(packed), expected)


@pytest.mark.more
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("stage", [2, 3])
def test_tensors_are_taken_on_any_cuda_stream(stage: int) -> None:
    """The pretended GPU raises where a stream reads what another may not have written."""
    assert run_pretended(2, _by_a_sender, stage) == [True, True]


def _failing_copy(rank: int, world_size: int) -> list[str]:
    model, _ = trained(rank, 3)
    copied = torch.Tensor.to

    def copy(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if rank == 1 and args == ("cpu",) and tensor.shape == (37, 24):
            raise MemoryError("no memory for a copy")
        return copied(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", copy)
        said = error_of(lambda: list(shardcore.stream_params(model, device="cpu")))
    assert_equal(dict(shardcore.stream_params(model)), of_forward(model))
    names = [m.name for m in shardcore.param_metadata(model)]
    pairs = list(zip(names, shardcore.stream_params(model), strict=False))  # takes no end
    assert all(name == item[0] for name, item in pairs)
    return [said]


def test_a_copy_that_fails_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(2, _failing_copy)
    assert "rank 1 failed: MemoryError: no memory for a copy" in first[0]
    assert second == ["MemoryError: no memory for a copy"]
