"""shard_options gives `shard` what a configuration asks for."""

from typing import Any

import pytest

from shardcore.deepspeed.config import read_config, shard_options
from shardcore.engine.loss_scale import LossScale
from shardcore.options import offload_options
from tests.support.deepspeed import ds_config

CPU = {"device": "cpu"}
LOW = {"enabled": True, "bf16_master_weights_and_grads": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"stage": 0},
            {
                "stage": 0,
                "offload": None,
                "precision": "fp32",
                "grad_dtype": "fp32",
                "cast_inputs": True,
            },
        ),
        (
            {"bf16": {"enabled": True}},
            {"precision": "bf16", "loss_scale": None, "cast_inputs": True},
        ),
        (
            {"fp16": {"enabled": True}},
            {"precision": "fp16", "loss_scale": LossScale(), "cast_inputs": False},
        ),
        (
            {"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 8}},
            {"loss_scale": 8.0, "cast_inputs": True},
        ),
        ({"communication_data_type": "bf16"}, {"reduce_dtype": "bf16"}),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, {"grad_dtype": "bf16"}),
        ({"bf16": LOW}, {"grad_dtype": "bf16"}),
        ({"bf16": LOW, "data_types": {"grad_accum_dtype": "fp32"}}, {"grad_dtype": "fp32"}),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {**CPU, "ratio": 0.5, "pin_memory": False},
                }
            },
            {
                "offload": {
                    "optimizer": "cpu",
                    "gradients": "cpu",
                    "ratio": 0.5,
                    "params": None,
                    "pin_memory": False,
                }
            },
        ),
        (
            {
                "zero_optimization": {"stage": 2, "offload_optimizer": CPU},
                "shardcore": {"offload": {"ratio": 0.0}},
            },
            {"offload": {"optimizer": "cpu", "ratio": 0.0, "params": None, "pin_memory": True}},
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {**CPU, "ratio": 0.0}}},
            {"offload": {"optimizer": "cpu", "ratio": 0.0, "params": None, "pin_memory": True}},
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": CPU}},
            {"offload": {"params": "cpu", "pin_memory": True}},
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            {"reshard_after_forward": 8},
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}},
            {"reshard_after_forward": True},
        ),
        (
            {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}},
            {"reshard_after_forward": True},
        ),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": CPU}}, {"overlap_step": True}),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}, {"overlap_step": False}),
        (
            {
                "zero_optimization": {"stage": 3, "offload_optimizer": CPU},
                "shardcore": {
                    "overlap_step": False,
                    "ranks_per_node": 8,
                    "prefetch": 2,
                    "offload": {"gradients": None},
                },
            },
            {
                "overlap_step": False,
                "ranks_per_node": 8,
                "prefetch": 2,
                "offload": {
                    "optimizer": "cpu",
                    "gradients": None,
                    "ratio": 1.0,
                    "params": None,
                    "pin_memory": True,
                },
            },
        ),
        (
            {"zero_optimization": {"stage": 3}, "shardcore": {"offload": "auto"}},
            {"offload": "auto", "overlap_step": False},
        ),
        (
            {
                "zero_optimization": {"stage": 2, "offload_optimizer": CPU},
                "shardcore": {"offload": {"ratio": "auto", "device_memory_limit": 1 << 30}},
            },
            {
                "offload": {
                    "optimizer": "cpu",
                    "gradients": "cpu",
                    "ratio": "auto",
                    "params": None,
                    "pin_memory": True,
                    "device_memory_limit": 1 << 30,
                },
            },
        ),
        ({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}}, {"prefetch": 0}),
        ({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0.9}}, {"prefetch": 1}),
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}},
            {"prefetch": 1},
        ),
        ({"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 0}}, {"prefetch": 1}),
    ],
)
def test_a_configuration_becomes_options(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    options = shard_options(read_config(ds_config(**changes)))
    assert {name: options[name] for name in expected} == expected
    if options["offload"] not in (None, "auto"):
        offload_options(options["offload"], options["stage"])  # takes it
    assert set(options) | {"ranks_per_node"} == {
        "ranks_per_node",
        *(
            "stage",
            "offload",
            "precision",
            "loss_scale",
            "reduce_dtype",
            "grad_dtype",
            "cast_inputs",
            "reshard_after_forward",
        ),
        *("prefetch", "overlap_step"),
    }


def test_offload_is_chosen_or_given() -> None:
    for section in ("offload_optimizer", "offload_param"):
        config = ds_config(
            zero_optimization={"stage": 3, section: CPU}, shardcore={"offload": "auto"}
        )
        with pytest.raises(
            ValueError, match=f'"auto" and zero_optimization.{section}; expected one of them'
        ):
            read_config(config)
    with pytest.raises(
        TypeError, match=r"shardcore.offload is 'cpu'; expected an object with keys, or \"auto\""
    ):
        read_config(ds_config(shardcore={"offload": "cpu"}))
