"""The optimizers, their state, the exchange with torch.optim, and clipping.

FusedAdam, CPUAdam and clip_grad_norm_ are public; the rest is what the engine shares with them, so that options, scalars
and clipping have one meaning.
"""

from shardcore.optim.adam import AdamOptimizer, CPUAdam, FusedAdam
from shardcore.optim.engine import Engine, Gradients
from shardcore.optim.exchange import export_groups, export_state, import_groups, import_state, import_states
from shardcore.optim.norm import clip_grad_norm_, global_norm
from shardcore.optim.options import MASTERED_DTYPES, PARAM_DTYPES, check_options, check_param, hyper_of
from shardcore.optim.scale import check_max_norm
from shardcore.optim.state import ParamState, StepCount, new_state, step_tensor

__all__ = [
    "MASTERED_DTYPES",
    "PARAM_DTYPES",
    "AdamOptimizer",
    "CPUAdam",
    "Engine",
    "FusedAdam",
    "Gradients",
    "ParamState",
    "StepCount",
    "check_max_norm",
    "check_options",
    "check_param",
    "clip_grad_norm_",
    "export_groups",
    "export_state",
    "global_norm",
    "hyper_of",
    "import_groups",
    "import_state",
    "import_states",
    "new_state",
    "step_tensor",
]
