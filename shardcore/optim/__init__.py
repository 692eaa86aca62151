"""The optimizers, their state, the exchange with torch.optim, and clipping.

FusedAdam, CPUAdam and clip_grad_norm_ are public; the rest is what the engine shares with them, so that options, scalars
and clipping have one meaning.
"""

from shardcore.optim.adam import AdamOptimizer, CPUAdam, FusedAdam
from shardcore.optim.clip import by_engine, clip_grad_norm_, global_norm, join, norm_part
from shardcore.optim.options import (
    MASTERED_DTYPES,
    PARAM_DTYPES,
    check_capturable,
    check_dtype,
    check_options,
    draws_random_bits,
    dtype_name,
    hyper_of,
    lr_on_device,
)
from shardcore.optim.sharded import EngineRef, engine_of, weakly
from shardcore.optim.state import ParamState, StepCount, step_count, step_tensor
from shardcore.optim.state_dict import (
    export_groups,
    export_state,
    import_groups,
    import_state,
    joined_state,
    numbers_of,
    other_entries,
    saved_states,
    warn_of_lost,
)
from shardcore.optim.state_format import (
    MASTER_STORAGE,
    MOMENTS,
    SCALES,
    joined_master,
    moment_values,
    new_moments,
    split_remainder,
    stored_moment,
)
from shardcore.optim.step import DeviceScale, DeviceState, capturing, check_max_norm

__all__ = [
    "MASTERED_DTYPES",
    "MASTER_STORAGE",
    "MOMENTS",
    "PARAM_DTYPES",
    "SCALES",
    "AdamOptimizer",
    "CPUAdam",
    "DeviceScale",
    "DeviceState",
    "EngineRef",
    "FusedAdam",
    "ParamState",
    "StepCount",
    "by_engine",
    "capturing",
    "check_capturable",
    "check_dtype",
    "check_max_norm",
    "check_options",
    "clip_grad_norm_",
    "draws_random_bits",
    "dtype_name",
    "engine_of",
    "export_groups",
    "export_state",
    "global_norm",
    "hyper_of",
    "import_groups",
    "import_state",
    "join",
    "joined_master",
    "joined_state",
    "lr_on_device",
    "moment_values",
    "new_moments",
    "norm_part",
    "numbers_of",
    "other_entries",
    "saved_states",
    "split_remainder",
    "step_count",
    "step_tensor",
    "stored_moment",
    "warn_of_lost",
    "weakly",
]
