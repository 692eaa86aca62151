"""What get_accelerator() says of the device."""

import pickle
from importlib import import_module

import pytest
import torch
from shardcore.accelerator import get_accelerator  # type: ignore[import-not-found]

import shardcore as deepspeed


def test_the_accelerator_is_the_device_that_trains() -> None:
    accelerator = get_accelerator()
    assert accelerator is deepspeed.get_accelerator()
    if not torch.cuda.is_available():
        assert (accelerator.device_name(0), accelerator.communication_backend_name()) == (
            "cpu",
            "gloo",
        )
        accelerator.set_device(0)
    assert accelerator.is_bf16_supported() in (True, False)


def test_the_accelerator_is_sent_to_workers() -> None:
    assert (
        pickle.loads(pickle.dumps(get_accelerator())).device_name()
        == get_accelerator().device_name()
    )


def test_dtypes_and_memory_are_told_of() -> None:
    accelerator = get_accelerator()
    assert (
        {torch.float32, torch.float16}
        <= set(accelerator.supported_dtypes())
        <= {torch.float32, torch.float16, torch.bfloat16}
    )
    assert 0 < accelerator.available_memory() < accelerator.total_memory()
    assert accelerator.on_accelerator(torch.ones(1, device=accelerator.device()))
    assert not accelerator.on_accelerator(torch.ones(1, device="meta"))
    accelerator.range_push("step")
    accelerator.range_pop()


def test_a_device_is_supported() -> None:
    assert deepspeed.accelerator.is_current_accelerator_supported()
    assert get_accelerator().device_count() >= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed counts GPUs there")
@pytest.mark.parametrize("size", [None, "0", "3"])
def test_devices_of_a_cpu_are_counted_as_deepspeed_does(
    size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed", reason="compares with DeepSpeed's")
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("LOCAL_SIZE", size)
    theirs = import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator()
    count = get_accelerator().device_count()
    assert count == (3 if size == "3" else count)
    if size == "3" or count == 1:  # it counts NUMA nodes by numactl, if that is installed
        assert count == theirs.device_count()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these are torch.cuda's")
def test_a_cpu_tells_of_the_process() -> None:
    accelerator = get_accelerator()
    before = accelerator.memory_allocated()
    tensor = torch.ones(64 * 2**20)
    assert accelerator.memory_allocated() - before > tensor.nbytes / 2
    assert accelerator.max_memory_allocated() >= accelerator.memory_reserved() > 0
    accelerator.reset_peak_memory_stats()
    state = accelerator.get_rng_state()
    drawn = torch.rand(1)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(1), drawn)
    assert accelerator.pin_memory(tensor) is tensor
    assert not accelerator.is_pinned(tensor)
    with pytest.raises(AttributeError, match="no_such"):
        accelerator.no_such  # noqa: B018
