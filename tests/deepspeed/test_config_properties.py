"""The batch arithmetic of a DeepSpeed configuration, for any numbers."""

import pytest

from shardcore.deepspeed.config import BatchSizes
from tests.support.deepspeed import config_of

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
from hypothesis import given
from hypothesis import strategies as st

_COUNTS = st.integers(1, 64)


@given(_COUNTS, _COUNTS, _COUNTS, st.sampled_from(["train", "micro", "steps"]))
def test_any_missing_one_is_derived(micro: int, steps: int, world: int, missing: str) -> None:
    whole = BatchSizes(micro * steps * world, micro, steps)
    known = {"train": whole.train, "micro": micro, "steps": steps} | {missing: None}
    assert config_of(**known).batch_sizes(world) == whole


@given(_COUNTS, _COUNTS, _COUNTS, st.integers(-64, 64).filter(bool))
def test_any_contradiction_is_refused(micro: int, steps: int, world: int, off: int) -> None:
    train = micro * steps * world + off
    if train > 0:
        with pytest.raises(ValueError, match=f"train_batch_size has {train}; expected"):
            config_of(train, micro, steps).batch_sizes(world)
