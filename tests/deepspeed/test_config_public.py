"""Each of the public configurations of tests/support/ds_configs.py trains."""

from pathlib import Path

import pytest

import shardcore
from tests.support.deepspeed import start
from tests.support.ds_configs import CONFIGS, ready
from tests.support.models import batch_of, hash_of


@pytest.mark.cases(9)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write there
    config = ready(name, str(tmp_path))
    engine = start(config, optimizer=None if "optimizer" in config else shardcore.FusedAdam)
    before = hash_of(engine.module.state_dict().values())
    # the first two steps of a warm-up have lr 0
    for micro_step in range(4 * engine.gradient_accumulation_steps()):
        x, y = batch_of(micro_step, 0, 0)
        engine.backward(
            ((engine(x.half() if engine.fp16_enabled() else x).float() - y) ** 2).mean()
        )
        engine.step()
    assert engine.global_steps == 4
    assert (hash_of(engine.module.state_dict().values()) != before) == (engine.skipped_steps < 3)
    zero = config.get("zero_optimization", {})
    assert engine.zero_optimization_stage() == (
        zero.get("stage", 0) if isinstance(zero, dict) else int(zero)
    )
