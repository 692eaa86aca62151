"""DeepSpeed's op builders: which of its operations have a counterpart in shardcore's extension.

DeepSpeed compiles each when it is loaded. Here all are compiled when shardcore is installed, so
`load` only says so.
Source: `ds_report` and deepspeed/ops of https://deepspeed.readthedocs.io, 0.19.8.
"""

from typing import Any, NoReturn

import torch

from shardcore._native import _C

_HERE = {  # by name: what has the operation here
    "cpu_adam": ("CPUAdamBuilder", "ops.adam.DeepSpeedCPUAdam"),
    "cpu_adagrad": ("CPUAdagradBuilder", "ops.adagrad.DeepSpeedCPUAdagrad"),
    "cpu_lion": ("CPULionBuilder", "ops.lion.DeepSpeedCPULion"),
    "fused_adam": ("FusedAdamBuilder", "ops.adam.FusedAdam"),
    "fused_lion": ("FusedLionBuilder", "ops.lion.FusedLion"),
    "async_io": ("AsyncIOBuilder", 'zero_optimization.offload_optimizer with "device": "nvme"'),
}
_MISSING = {
    "dc": "DeepCompileBuilder",
    "deepspeed_ccl_comm": "CCLCommBuilder",
    "deepspeed_not_implemented": "NotImplementedBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "evoformer_attn": "EvoformerAttnBuilder",
    "fp_quantizer": "FPQuantizerBuilder",
    "fused_lamb": "FusedLambBuilder",
    "gds": "GDSBuilder",
    "inference_core_ops": "InferenceCoreBuilder",
    "cutlass_ops": "InferenceCutlassBuilder",
    "pin_memory": "PinMemoryBuilder",
    "quantizer": "QuantizerBuilder",
    "ragged_device_ops": "RaggedOpsBuilder",
    "ragged_ops": "RaggedUtilsBuilder",
    "random_ltd": "RandomLTDBuilder",
    "spatial_inference": "SpatialInferenceBuilder",
    "stochastic_transformer": "StochasticTransformerBuilder",
    "transformer": "TransformerBuilder",
    "transformer_inference": "InferenceBuilder",
    "utils": "UtilsBuilder",
}


class Operation:
    """What `load` returns: the operation is there. Its functions are not DeepSpeed's."""

    def __init__(self, name: str, instead: str) -> None:
        """name: DeepSpeed's; instead: what to call."""
        self._name, self._instead = name, instead

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError, which says what to call."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name}: shardcore's {self._name} does not provide DeepSpeed's functions; expected "
            f"{self._instead}"
        )


class OpBuilder:
    """The base of the builders of this module."""

    NAME = ""
    _instead = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operation runs here. verbose: accepted.

        Fused ones need an extension with CUDA where there is a GPU; elsewhere they use host memory.
        """
        fused = self.NAME.startswith("fused_") and torch.cuda.is_available()
        return bool(self._instead) and (not fused or bool(_C.build_info()["cuda"]))

    def load(self, verbose: bool = True) -> Operation:
        """Return the operation, which is compiled already. verbose: accepted.

        Raises NotImplementedError for one that shardcore does not have, RuntimeError for one that
        does not run here.
        """
        if not self._instead:
            raise NotImplementedError(
                f"{type(self).__name__}: shardcore has no {self.NAME}; expected one of "
                f"{', '.join(_HERE)} (see is_compatible)"
            )
        if not self.is_compatible():
            raise RuntimeError(
                f"{type(self).__name__}: shardcore's extension was built without CUDA; expected a "
                "build for this GPU (docs/install.md)"
            )
        return Operation(self.NAME, self._instead)


_KINDS = _HERE | {name: (kind, "") for name, kind in _MISSING.items()}
_BUILDERS: dict[str, type[OpBuilder]] = {
    kind: type(
        kind,
        (OpBuilder,),
        {"NAME": name, "_instead": instead, "__doc__": f"Of DeepSpeed's {name}: see OpBuilder."},
    )
    for name, (kind, instead) in _KINDS.items()
}
NAMES: dict[str, Any] = {"OpBuilder": OpBuilder, **_BUILDERS}  # of deepspeed.ops.op_builder
ALL_OPS = {builder.NAME: builder() for builder in _BUILDERS.values()}


def compatible_ops() -> dict[str, bool]:
    """Return which operations run on this machine: `deepspeed.ops.__compatible_ops__`."""
    return {name: builder.is_compatible() for name, builder in ALL_OPS.items()}


def _first_two(version: str | None) -> str:
    return ".".join((version or "0.0").split("+")[0].split(".")[:2])


def _nccl() -> str:
    if torch.version.cuda is None:
        return "0.0"
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version[:2]))


INFO: dict[str, Any] = {  # of deepspeed.git_version_info
    "git_hash": "unknown",
    "git_branch": "unknown",
    "installed_ops": {name: bool(builder._instead) for name, builder in ALL_OPS.items()},
    "accelerator_name": "cpu" if torch.version.cuda is None else "cuda",
    "torch_info": {
        "version": _first_two(torch.__version__),
        "bf16_support": torch.version.cuda is not None,
        "cuda_version": _first_two(torch.version.cuda),
        "nccl_version": _nccl(),
        "hip_version": _first_two(torch.version.hip),
    },
}
