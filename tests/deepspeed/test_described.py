"""What the engine says of its configuration and of the ranks."""

from tests.support.deepspeed import ds_config, start


def test_the_engine_says_what_was_configured() -> None:
    config = ds_config(2, stage=1)
    engine = start(config)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 4)
    assert (engine.gradient_accumulation_steps(), engine.zero_optimization_stage()) == (2, 1)
    assert (engine.local_rank, engine.fp16_enabled(), engine.bfloat16_enabled()) == (
        0,
        False,
        False,
    )
    assert (
        engine.zero_optimization(),
        engine.managed_gradient_accumulation(),
        engine.gradient_clipping(),
    ) == (True, True, 0.0)
    assert engine.config is config
