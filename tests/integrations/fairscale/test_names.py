"""FairScale's names: where its scripts import them, their arguments, and what is said of those
that are not here.
"""

import inspect
from importlib import import_module

import pytest

from shardcore.integrations import fairscale
from shardcore.integrations.fairscale.names import PATHS, REFUSED

# The arguments of FairScale 0.4.13, in its order.
SIGNATURES = {
    "OSS": "params optim group broadcast_buffer_size broadcast_fp16 force_broadcast_object",
    "ShardedDataParallel": (
        "module sharded_optimizer process_group broadcast_buffers sync_models_at_startup "
        "reduce_buffer_size auto_refresh_trainable reduce_fp16 warn_on_trainable_params_changed"
    ),
    "FullyShardedDataParallel": (
        "module process_group process_group_reduce_scatter reshard_after_forward "
        "disable_reshard_on_root mixed_precision fp32_reduce_scatter flatten_parameters "
        "move_params_to_cpu compute_dtype buffer_dtype move_grads_to_cpu bucket_cap_mb "
        "compute_device no_broadcast_optim_state state_dict_device clear_autocast_cache "
        "force_input_to_fp32 verbose cpu_offload state_dict_on_rank_0_only "
        "gradient_predivide_factor allow_reset_parameters"
    ),
    "OffloadModel": "model device offload_device num_slices checkpoint_activation num_microbatches",
    "checkpoint_wrapper": "module offload_to_cpu",
    "AdaScale": "optimizer world_size scale smoothing num_gradients_to_accumulate is_scaled_loss "
    "debias_ewma",
    "Pipe": "module balance devices chunks checkpoint deferred_batch_norm",
    "default_auto_wrap_policy": (
        "module recurse unwrapped_params module_is_root min_num_params force_leaf_modules "
        "exclude_wrap_modules skip_params_check_for_root"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_fairscales(name):
    parameters = (
        inspect.signature(getattr(fairscale, name)).parameters
        if name != "FullyShardedDataParallel"
        else None
    )
    parameters = (
        parameters or inspect.signature(fairscale.FullyShardedDataParallel.__init__).parameters
    )
    names = [n for n in parameters if n != "self"]
    assert names[: len(SIGNATURES[name].split())] == SIGNATURES[name].split()


def test_fairscales_paths_are_there():
    for path, names in PATHS.items():
        module = import_module(f"shardcore.integrations.fairscale.{path}")
        for name in names:
            assert getattr(module, name) is getattr(fairscale, name)


def test_what_is_not_here_says_what_there_is():
    for name in REFUSED:
        with pytest.raises(NotImplementedError, match=rf"has no {name}; expected "):
            getattr(fairscale, name)()
    with pytest.raises(NotImplementedError, match=r"expected model.state_dict\(\)"):
        fairscale.FullyShardedDataParallel.consolidate_shard_weights([], [])
    assert not hasattr(fairscale, "Nothing")
