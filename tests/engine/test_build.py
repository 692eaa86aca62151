"""Which models and optimizers `shard` refuses, on every rank, by name, with nothing changed; and
what ranks compare.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.support.models import Net, Run, adam, batch_of, hash_of, loss_of, make_net, train
from tests.support.ranks import run_ranks


def test_models_and_optimizers() -> None:
    model = make_net()
    with pytest.raises(
        TypeError, match=r"optimizer is a torch\.optim\.LBFGS, which cannot.*shardcore\.FusedAdam"
    ):
        shardcore.shard(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match=r"optimizer is a torch\.optim\.NAdam"):
        shardcore.shard(model, torch.optim.NAdam(model.parameters()))
    with pytest.raises(ValueError, match="differentiable is True"):
        shardcore.shard(model, torch.optim.AdamW(model.parameters(), differentiable=True))
    with pytest.raises(
        ValueError, match=r"parameter 0 of param_groups\[0\], .* is not in the model"
    ):
        shardcore.shard(model, adam(make_net()))
    loss_of(model, batch_of(0, 0, 0)).backward()
    with pytest.raises(ValueError, match="already has a gradient; expected None"):
        shardcore.shard(model, adam(model))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norms_on_a_cpu_stay_float32(kind: type[nn.Module], precision: str) -> None:
    model = nn.Sequential(nn.Linear(10, 4), kind(4), nn.Linear(4, 5))
    with pytest.raises(
        ValueError,
        match=rf"1 would use b?float16 .* on a CPU; expected "
        rf"keep_fp32=\[torch.nn.{kind.__name__}\]",
    ):
        shardcore.shard(model, adam(model), precision=precision)
    model, _ = shardcore.shard(model, adam(model), precision=precision, keep_fp32=[kind])
    if kind is nn.BatchNorm1d:
        loss_of(model, batch_of(0, 0, 0)).backward()
    others = [
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.InstanceNorm1d(4, affine=True),
    ]
    for norm in (*others, nn.BatchNorm1d(4).bfloat16()):  # which torch runs
        model = nn.Sequential(nn.Linear(10, 4), norm, nn.Linear(4, 5))
        shardcore.shard(model, adam(model), precision=precision)


def test_parameters_of_kinds_that_cannot_train() -> None:
    for dtype in (torch.float64, torch.complex64):
        model = make_net()
        model.odd = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = shardcore.FusedAdam(model.head.parameters())
        with pytest.raises(TypeError, match=f"odd has dtype {str(dtype)[6:]}; expected float32"):
            shardcore.shard(model, optimizer)


def test_parameters_made_in_inference_mode() -> None:
    model = make_net()
    with torch.inference_mode():
        model.inp = nn.Linear(10, 24)
    with pytest.raises(ValueError, match=r"inp\.weight was created in torch\.inference_mode"):
        shardcore.shard(model, adam(model))


def test_models_that_device_map_has_placed_are_refused() -> None:
    places: list[dict[str, Any]] = [
        {"hf_device_map": {"0": 0, "1": "cpu"}},
        {"hf_device_map": {"": "disk"}},
        {"_hf_hook": object()},
    ]
    for marks in places:
        for inside in ("", "0"):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            vars(model.get_submodule(inside)).update(marks)
            with pytest.raises(ValueError, match="was placed by device_map"):
                shardcore.shard(model, None)
    model = nn.Sequential(nn.Linear(2, 2))
    model.hf_device_map = {"": "cpu"}  # one device, and no hooks
    shardcore.shard(model, None)


def test_parts_that_take_no_hooks() -> None:
    model = make_net()
    model.blocks[1] = torch.jit.script(nn.Sequential(nn.Linear(24, 24), nn.Tanh()))
    before = hash_of(model.parameters())
    with pytest.raises(TypeError, match=r"shard: blocks\.1 is a ScriptModule"):
        shardcore.shard(model, adam(model), precision="fp32")
    assert hash_of(model.parameters()) == before
    model.blocks[1] = torch.jit.script(nn.Tanh())  # what has no weights needs no hooks
    shardcore.shard(model, adam(model), 3, precision="fp32")
    model(torch.ones(2, 10)).sum().backward()


def test_twice() -> None:
    model, optimizer, _ = train(0, Run(steps=1))
    with pytest.raises(ValueError, match="the model is already sharded"):
        shardcore.shard(model, adam(model))
    with pytest.raises(ValueError, match="the optimizer is already sharded"):
        shardcore.shard(make_net(), optimizer)
    outer = nn.Sequential(model, nn.Linear(5, 5))
    with pytest.raises(
        ValueError, match="the module 0 is already sharded; expected to shard the whole model once"
    ):
        shardcore.shard(outer, adam(outer))
    sharing = make_net()
    sharing.head.weight = model.head.weight
    with pytest.raises(ValueError, match=r"head\.weight belongs to another sharded model"):
        shardcore.shard(sharing, adam(sharing))
    with pytest.raises(ValueError, match="not parameters of the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def _wrapped(rank: int, world_size: int) -> list[str]:
    from torch.distributed._composable import replicate
    from torch.distributed.fsdp import fully_shard

    texts = []
    ddp = nn.parallel.DistributedDataParallel(make_net())
    inner = make_net()
    inner.head = nn.parallel.DistributedDataParallel(inner.head)
    replicated, partly = replicate(make_net()), make_net()
    replicate(partly.blocks[1])
    fsdp = make_net().head  # fully_shard takes no scalar parameter
    fully_shard(fsdp)
    plain = ((model, adam(model)) for model in (ddp, inner, replicated, partly))
    for model, optimizer in (*plain, (fsdp, torch.optim.AdamW(fsdp.parameters()))):
        try:
            shardcore.shard(model, optimizer)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_models_that_are_sharded_by_others() -> None:
    ddp, inner, replicated, partly, fsdp = run_ranks(2, _wrapped)[0]
    assert "the model is wrapped in DistributedDataParallel" in ddp
    assert "(pass model.module)" in ddp
    assert "head is wrapped in DistributedDataParallel" in inner
    assert "the model is wrapped in replicate()" in replicated
    assert "blocks.1 is wrapped in replicate()" in partly
    assert "already sharded (DTensor)" in fsdp


def _steps(model: Any, optimizer: Any) -> None:
    loss_of(model, batch_of(0, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _renamed(model: Any) -> None:
    model.tail = model.head
    del model.head


def _reordered(model: Any) -> None:
    model.blocks[1].up, model.blocks[1].down = model.blocks[1].down, model.blocks[1].up


# What rank 1 has, alone: a change of its model, options of shard, options of its optimizer. And
# what all ranks say.
DIFFERENCES: dict[
    str, tuple[Callable[[Any], Any] | None, dict[str, Any], dict[str, Any], list[str]]
] = {
    "shape": (
        lambda model: setattr(model, "head", nn.Linear(24, 6, bias=False)),
        *({}, {}, ["parameter head.weight is (6, 24) on rank 1 but (5, 24) on rank 0"]),
    ),
    "name": (_renamed, {}, {}, ["tail.weight", "head.weight"]),
    "dtype": (
        lambda model: model.blocks[1].down.bfloat16(),
        {},
        {},
        ["blocks.1.down.weight", "bfloat16", "float32"],
    ),
    "frozen": (
        lambda model: model.blocks[0].up.bias.requires_grad_(False),
        *({}, {}, ["blocks.0.up.bias", "frozen", "trainable"]),
    ),
    "order": (_reordered, {}, {}, ["blocks.1.up.weight is (24, 37) on", "(37, 24) on rank 0"]),
    "buffer": (
        lambda model: model.register_buffer("offset", torch.zeros(4)),
        *({}, {}, ["buffer offset is (4,) on rank 1 but (5,) on rank 0"]),
    ),
    "stage": (None, {"stage": 1}, {}, ["option stage is 1 on rank 1 but 2 on rank 0"]),
    "bad": (None, {"stage": 7}, {}, ["stage is 7"]),
    "nodes": (
        None,
        {"ranks_per_node": 3},
        {},
        ["ranks_per_node is 3; expected a divisor of the 2 ranks"],
    ),
    "group": (
        None,
        {"process_group": "all"},
        {},
        ["process_group is 'all'; expected a process group"],
    ),
    "kept": (
        None,
        {"keep_fp32": [nn.LayerNorm]},
        {},
        ["blocks.0.norm.weight", "stored as float32", "stored as bfloat16"],
    ),
    "tiers": (
        None,
        {"offload": {"optimizer": "cpu", "ratio": 0.5}},
        *({}, ["option offload.ratio is 0.5 on rank 1 but 1.0 on rank 0"]),
    ),
    "lr": (None, {}, {"lr": 2e-2}, ["param_groups[0].lr is 0.02 on rank 1 but 0.01"]),
    "amsgrad": (
        None,
        {},
        {"amsgrad": True},
        ["param_groups[0].amsgrad is True on rank 1 but False"],
    ),
    "state": (
        None,
        {},
        {},
        ["with the states: exp_avg exp_avg_sq step=1.0", "with the states: none"],
    ),
    "no module": (None, {}, {}, ["model has type NoneType"]),
}


def _disagree(rank: int, world_size: int, how: str) -> str:
    change, options, adam_options, _ = DIFFERENCES[how]
    model: Any = make_net()
    given: dict[str, Any] = {"stage": 2, "precision": "bf16"}
    if how in ("lr", "tiers"):  # the same, in another order
        given["offload"] = (
            {"optimizer": "cpu", "ratio": 1}
            if rank == 0
            else {"ratio": 1.0, "params": None, "optimizer": "cpu"}
        )
    if rank == 1 and change is not None:
        change(model)
    optimizer = shardcore.FusedAdam(
        model.parameters(), **({"lr": 1e-2} | (adam_options if rank == 1 else {}))
    )
    if rank == 1 and how == "state":
        _steps(model, optimizer)
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises((ValueError, TypeError)) as error:
        shardcore.shard(
            None if (rank, how) == (1, "no module") else model,
            optimizer,
            **given | (options if rank == 1 else {}),
        )
    assert [p.data_ptr() for p in model.parameters()] == before
    return str(error.value)


@pytest.mark.parametrize("how", DIFFERENCES)
def test_ranks_that_disagree_all_say_where(how: str) -> None:
    for answer in run_ranks(2, _disagree, how):
        for text in DIFFERENCES[how][-1]:
            assert text in answer, answer


def _assigned(model: Net) -> None:
    """What is tied comes from a file as two tensors of one memory."""
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.load_state_dict(dict(model.state_dict()), assign=True)


def _behind_another(model: Net) -> None:
    """The long one is not its neighbour in memory."""
    both = torch.randn(20)
    model.long, model.inner = nn.Parameter(both), nn.Parameter(both[4:8], requires_grad=False)
    model.part = nn.Parameter(both[12:16])


SHARES: list[Callable[[Any], Any]] = [
    lambda model: setattr(model.blocks[1].up.weight, "data", model.blocks[0].up.weight.data),
    lambda model: setattr(model, "part", nn.Parameter(model.head.weight.data[2:4])),
    lambda model: setattr(
        model, "part", nn.Parameter(model.head.weight.data[:2], requires_grad=False)
    ),
    lambda model: setattr(
        model.requires_grad_(False), "part", nn.Parameter(model.head.weight.data[4:])
    ),
    lambda model: model.register_buffer("part", model.head.weight.detach()),
    lambda model: model.register_buffer("part", model.head.weight.detach().t()),
    _assigned,
    _behind_another,
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("share", SHARES)
def test_memory_that_two_have_is_refused(share: Callable[[Net], None], device: str) -> None:
    with torch.device(device):
        model = make_net()
        share(model)
    before = hash_of(model.parameters()) if device == "cpu" else ""
    filled = {"materialize": lambda module: None} if device == "meta" else {}
    with pytest.raises(
        ValueError,
        match=r"shares its memory with \S+; expected memory of its own, or one Parameter",
    ):
        shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), 3, precision="bf16", **filled
        )  # type: ignore[arg-type]
    assert device == "meta" or hash_of(model.parameters()) == before


def test_memory_side_by_side_is_not() -> None:
    """As flat weights of an RNN lie; and what does not change may be shared."""
    model = make_net()
    both = torch.randn(20)
    model.one, model.two = nn.Parameter(both[:8]), nn.Parameter(both[8:])
    model.none = nn.Parameter(both[4:4])
    model.register_buffer("three", torch.zeros(4))
    model.register_buffer("four", model.three[1:3])
    model.five = nn.Parameter(model.three[2:], requires_grad=False)
    model.six = model.one  # one Parameter in both places
    shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3, precision="bf16")


@pytest.mark.parametrize("make", [shardcore.FusedAdam, torch.optim.AdamW])
@pytest.mark.parametrize("stage", [0, 3])
def test_weights_in_another_order_of_memory_are_refused(
    make: Callable[..., torch.optim.Optimizer], stage: int
) -> None:
    """The optimizers alone take them. Frozen ones may have any order."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.Linear(6, 5)).to(
        memory_format=torch.channels_last
    )
    model[0].requires_grad_(False)
    before = hash_of(model.parameters())
    with pytest.raises(
        ValueError,
        match=r"1.weight has strides \(36, 1, 12, 4\) for .*channels_last\).*contiguous\(\).* give up "
        "channels_last",
    ):
        shardcore.shard(
            model, make([p for p in model.parameters() if p.requires_grad]), stage, precision="bf16"
        )
    assert hash_of(model.parameters()) == before
    model[1].weight.data = model[1].weight.data.contiguous()
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    with pytest.raises(
        ValueError, match=r"shard: 2.weight has strides \(1, 5\) for shape \(5, 6\)"
    ):
        shardcore.shard(
            model, make([p for p in model.parameters() if p.requires_grad]), stage, precision="bf16"
        )
    model[2].weight.data = model[2].weight.data.contiguous()
    shardcore.shard(
        model, make([p for p in model.parameters() if p.requires_grad]), stage, precision="bf16"
    )


def _normalizes(rank: int, world_size: int, bag: bool, stage: int) -> str:
    model = make_net()
    model.table = (nn.EmbeddingBag if bag else nn.Embedding)(8, 10, max_norm=0.5)
    try:
        model, optimizer = shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), stage, precision="bf16"
        )
    except ValueError as error:
        return str(error)
    rows = model.table(torch.tensor([[1, 2]]))
    model(rows.view(-1, 10)).sum().backward()
    optimizer.step()
    return "trains"


@pytest.mark.parametrize(("bag", "stage"), [(False, 3), (False, 1), (True, 3)])
def test_embeddings_that_normalize_their_rows_are_refused_over_several_ranks(
    bag: bool, stage: int
) -> None:
    assert run_ranks(1, _normalizes, bag, stage) == ["trains"]
    for error in run_ranks(2, _normalizes, bag, stage):
        assert "shard: table has max_norm=0.5. Each rank's forward would change other rows" in error
