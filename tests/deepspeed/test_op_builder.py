"""DeepSpeed's op builders say what shardcore's extension has."""

import pytest
import torch
from shardcore.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, FusedLambBuilder  # type: ignore[import-not-found]

import shardcore as deepspeed


def test_an_operation_of_the_extension_is_there_and_names_its_counterpart() -> None:
    assert CPUAdamBuilder().is_compatible()
    assert AsyncIOBuilder().is_compatible(verbose=True)
    loaded = CPUAdamBuilder().load()
    with pytest.raises(
        AttributeError, match=r"create_adam: .* expected ops\.adam\.DeepSpeedCPUAdam"
    ):
        loaded.create_adam(0)


def test_another_operation_is_not_there() -> None:
    assert not FusedLambBuilder().is_compatible()
    with pytest.raises(
        NotImplementedError,
        match="FusedLambBuilder: shardcore has no fused_lamb; expected one of cpu_adam",
    ):
        FusedLambBuilder().load()


def test_compatible_operations_are_those_of_the_builders() -> None:
    compatible = deepspeed.ops.__compatible_ops__
    assert compatible["cpu_adam"]
    assert not compatible["fused_lamb"]
    for name, builder in deepspeed.ops.op_builder.all_ops.ALL_OPS.items():
        assert compatible[name] == builder.is_compatible()


def test_names_and_values_are_deepspeeds() -> None:
    peer = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    builders = pytest.importorskip("deepspeed.ops.op_builder")
    names = {name for name in vars(builders) if name.endswith("Builder")}
    # of another accelerator
    assert names - vars(deepspeed.ops.op_builder).keys() <= {"FlashAttentionBuilder"}
    for name in names & vars(deepspeed.ops.op_builder).keys() - {"OpBuilder"}:
        # of those that a CPU does not have: deepspeed_not_implemented
        theirs = getattr(builders, name).NAME
        assert theirs in (
            getattr(deepspeed.ops.op_builder, name).NAME,
            "deepspeed_not_implemented",
        ), name
    assert peer.ops.__compatible_ops__.keys() <= deepspeed.ops.__compatible_ops__.keys()
    info, theirs = deepspeed.git_version_info, peer.git_version_info
    assert info.torch_info.keys() == theirs.torch_info.keys()
    if torch.version.cuda is None:
        assert info.torch_info["version"] == ".".join(torch.__version__.split(".")[:2])
        assert info.torch_info["cuda_version"] == "0.0"
    assert (deepspeed.__git_hash__, deepspeed.__git_branch__) == (info.git_hash, info.git_branch)
    assert type(peer.__git_hash__) is str
