"""What `shard` cannot do is refused: on every rank, by name, with nothing changed."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.support.models import Net, Run, batch_of, hash_of, hash_of_training, loss_of, make_net, train
from tests.support.ranks import run_ranks


def adam(model: nn.Module) -> Any:
    return shardcore.FusedAdam(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"stage": 4}, ValueError, "stage is 4; expected 0, 1, 2 or 3"),
        ({"reshard_after_forward": "no"}, TypeError, "reshard_after_forward is .no.; expected True, False"),
        ({"reshard_after_forward": 2}, ValueError, "reshard_after_forward is 2; expected a divisor of 1, the ranks that share"),
        ({"reshard_after_forward": 1}, ValueError, "reshard_after_forward is 1 at stage 2, .* expected stage 3"),
        ({"ranks_per_node": 2}, ValueError, "ranks_per_node is 2; expected a divisor of the 1 ranks"),
        ({"ranks_per_node": "2"}, TypeError, "ranks_per_node is .2.; expected a whole number"),
        ({"stage": "2"}, TypeError, "stage is '2'"),
        ({"stage": True}, TypeError, "stage is True"),
        ({"offload": {"optimizer": "disk"}}, ValueError, r"offload\[\"optimizer\"\] is 'disk'; expected \"cpu\""),
        ({"offload": {"optimizer": "nvme"}}, NotImplementedError, "nvme"),
        ({"offload": {"optimiser": "cpu"}}, ValueError, "unknown key 'optimiser'"),
        ({"offload": {"optimizer": "cpu", "ratio": 1.5}}, ValueError, "ratio.* is 1.5; expected a number from 0 to 1"),
        ({"offload": {"optimizer": "cpu", "ratio": float("nan")}}, ValueError, "is nan; expected a number from 0 to 1"),
        ({"offload": {"optimizer": "cpu", "ratio": True}}, TypeError, "is True; expected a number from 0 to 1"),
        ({"offload": {"optimizer": "cpu", "ratio": "auto"}}, ValueError, "device_memory_limit.* is None with the ratio 'auto'"),
        (
            {"offload": {"optimizer": "cpu", "device_memory_limit": 1}},
            ValueError,
            "is 1 with the ratio 1.0; expected",
        ),
        ({"offload": {"optimizer": "cpu", "params": "cpu"}, "stage": 2}, ValueError, "at stage 2, which keeps full weights"),
        ({"offload": {"params": "cpu"}, "stage": 3}, NotImplementedError, '"params" without "optimizer"'),
        ({"offload": {"optimizer": "cpu", "gradients": True}}, ValueError, "gradients.* is True; expected .cpu. or None"),
        ({"offload": {"optimizer": "cpu", "gradients": "cpu"}, "stage": 0}, ValueError, "at stage 0, where p.grad shows them"),
        ({"offload": {"gradients": "cpu"}}, ValueError, 'optimizer.* is None; expected "cpu"'),
        ({"offload": "cpu"}, TypeError, "offload is 'cpu'"),
        ({"offload": {"optimizer": "cpu", "pin_memory": 1}}, TypeError, "pin_memory"),
        ({"offload": {"optimizer": "cpu", "pin_memory_limit": 1.5}}, TypeError, "is 1.5; expected a whole number"),
        ({"offload": {"optimizer": "cpu", "pin_memory_limit": True}}, TypeError, "is True; expected a whole number"),
        (
            {"offload": {"optimizer": "cpu", "cpu_threads": 1.5}, "overlap_step": True},
            TypeError,
            "is 1.5; expected a whole number",
        ),
        (
            {"offload": {"optimizer": "cpu", "cpu_threads": 0}, "overlap_step": True},
            ValueError,
            "is 0; expected 1 to 4096",
        ),
        ({"offload": {"optimizer": "cpu", "cpu_threads": 2}}, ValueError, "is 2 but overlap_step is False"),
        ({"offload": {"optimizer": "cpu", "pin_memory_limit": -1}}, ValueError, "is -1; expected 0 to"),
        ({"offload": {"optimizer": "cpu", "pin_memory_limit": 1 << 63}}, ValueError, "is 9223372036854775808; expected 0 to"),
        (
            {"offload": {"optimizer": "cpu", "pin_memory": False, "pin_memory_limit": 4096}},
            ValueError,
            'is 4096 but "pin_memory" is False; expected None, or True',
        ),
        ({"precision": "fp8"}, ValueError, "precision is 'fp8'; expected"),
        ({"precision": torch.bfloat16}, ValueError, "precision is torch.bfloat16"),
        ({"grad_dtype": "fp16"}, ValueError, "grad_dtype is 'fp16'"),
        ({"clip_grad_norm": 0.0}, ValueError, "clip_grad_norm is 0"),
        ({"clip_grad_norm": -1.0}, ValueError, "clip_grad_norm is -1"),
        ({"clip_grad_norm": float("nan")}, ValueError, "nan"),
        ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm is '1'"),
        ({"clip_grad_norm": 10**400}, ValueError, "expected a positive number"),
        ({"loss_scale": 10**400, "precision": "fp16"}, ValueError, "expected a positive number"),
        ({"precision": []}, ValueError, "precision is "),
        ({"cast_inputs": "no"}, TypeError, "cast_inputs is 'no'"),
        ({"broadcast": 1}, TypeError, "broadcast is 1"),
        ({"overlap_step": None}, TypeError, "overlap_step is None"),
        ({"sync_each": 1}, TypeError, "sync_each is 1"),
        ({"units": None}, TypeError, "units is None"),
        ({"units": 3.5}, TypeError, "units is 3.5"),
        ({"keep_fp32": None}, TypeError, "keep_fp32 is None"),
        ({"keep_fp32": 3}, TypeError, "keep_fp32 is 3"),
        ({"accumulate": 0}, ValueError, "accumulate is 0; expected at least 1"),
        ({"accumulate": 1.5}, TypeError, "accumulate is 1.5"),
        ({"sync_each": "yes"}, TypeError, "sync_each is 'yes'"),
        ({"reduction": "fast"}, ValueError, 'reduction is \'fast\'; expected "nccl" or "ordered"'),
        ({"units": "every"}, ValueError, 'units is "every"'),
        ({"keep_fp32": ["nothing.here"]}, ValueError, "matches no parameter"),
        ({"keep_fp32": [3]}, TypeError, "keep_fp32 has 3"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = make_net()
    optimizer = adam(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=text):
        shardcore.shard(model, optimizer, **options)
    assert optimizer._engine is None
    assert not hasattr(model, "_shardcore_engine")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    shardcore.shard(model, optimizer, precision="fp32")


def test_models_and_optimizers() -> None:
    model = make_net()
    with pytest.raises(TypeError, match=r"optimizer is a SGD; expected shardcore\.FusedAdam"):
        shardcore.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="optimizer is a NAdam"):
        shardcore.shard(model, torch.optim.NAdam(model.parameters()))
    with pytest.raises(ValueError, match="differentiable is True"):
        shardcore.shard(model, torch.optim.AdamW(model.parameters(), differentiable=True))
    with pytest.raises(ValueError, match=r"param_groups\[0\] has parameter 0 .* that is not the model's"):
        shardcore.shard(model, adam(make_net()))
    loss_of(model, batch_of(0, 0, 0)).backward()
    with pytest.raises(ValueError, match="already has a gradient; expected None"):
        shardcore.shard(model, adam(model))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norms_on_a_cpu_stay_float32(kind: type[nn.Module], precision: str) -> None:
    model = nn.Sequential(nn.Linear(10, 4), kind(4), nn.Linear(4, 5))
    with pytest.raises(
        ValueError, match=rf"1 would have b?float16 .* on a CPU; expected keep_fp32=\[torch.nn.{kind.__name__}\]"
    ):
        shardcore.shard(model, adam(model), precision=precision)
    model, _ = shardcore.shard(model, adam(model), precision=precision, keep_fp32=[kind])
    if kind is nn.BatchNorm1d:
        loss_of(model, batch_of(0, 0, 0)).backward()
    others = [nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, track_running_stats=False), nn.InstanceNorm1d(4, affine=True)]
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
    with pytest.raises(ValueError, match=r"inp\.weight was made in torch\.inference_mode"):
        shardcore.shard(model, adam(model))


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
    with pytest.raises(ValueError, match="the module 0 is already sharded; expected to shard the whole model once"):
        shardcore.shard(outer, adam(outer))
    sharing = make_net()
    sharing.head.weight = model.head.weight
    with pytest.raises(ValueError, match=r"head\.weight belongs to another sharded model"):
        shardcore.shard(sharing, adam(sharing))
    with pytest.raises(ValueError, match="add_param_group was called after shard"):
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


def _disagree(rank: int, world_size: int, how: str) -> str:
    model: Any = make_net()
    stage = 2
    options: dict[str, Any] = {"precision": "bf16"}
    kind = {"lr": 1e-2}
    if how in ("lr", "tiers"):  # the same, in another order
        options["offload"] = (
            {"optimizer": "cpu", "ratio": 1} if rank == 0 else {"ratio": 1.0, "params": None, "optimizer": "cpu"}
        )
    if rank == 1:
        if how == "shape":
            model.head = nn.Linear(24, 6, bias=False)
        elif how == "name":
            model.tail = model.head
            del model.head
        elif how == "dtype":
            model.blocks[1].down.bfloat16()
        elif how == "frozen":
            model.blocks[0].up.bias.requires_grad_(False)
        elif how == "order":
            model.blocks[1].up, model.blocks[1].down = model.blocks[1].down, model.blocks[1].up
        elif how == "buffer":
            model.register_buffer("offset", torch.zeros(4))
        elif how == "stage":
            stage = 1
        elif how == "kept":
            options["keep_fp32"] = [nn.LayerNorm]
        elif how == "no module":
            model = None
        elif how == "bad":
            stage = 7
        elif how == "nodes":
            options["ranks_per_node"] = 3
        elif how == "group":
            options["process_group"] = "all"
        elif how == "tiers":
            options["offload"]["ratio"] = 0.5
        elif how == "lr":
            kind = {"lr": 2e-2}
        elif how == "amsgrad":
            kind = {"lr": 1e-2, "amsgrad": True}
    optimizer = shardcore.FusedAdam((model or make_net()).parameters(), **kind)
    if rank == 1 and how == "state":
        loss_of(model, batch_of(0, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [p.data_ptr() for p in model.parameters()] if model else []
    try:
        shardcore.shard(model, optimizer, stage, **options)
    except (ValueError, TypeError) as error:
        assert ([p.data_ptr() for p in model.parameters()] if model else []) == before
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("shape", ["head.weight (6, 24)", "head.weight (5, 24)", "on rank 1"]),
        ("name", ["tail.weight", "head.weight"]),
        ("dtype", ["blocks.1.down.weight", "bfloat16", "float32"]),
        ("frozen", ["blocks.0.up.bias", "frozen", "trainable"]),
        ("order", ["blocks.1.up.weight (24, 37)", "blocks.1.up.weight (37, 24)"]),
        ("buffer", ["buffer offset (4,)", "buffer offset (5,)"]),
        ("stage", ["stage=1", "stage=2"]),
        ("bad", ["stage is 7"]),
        ("nodes", ["ranks_per_node is 3; expected a divisor of the 2 ranks"]),
        ("group", ["process_group is 'all'; expected a process group"]),
        ("kept", ["blocks.0.norm.weight", "becoming float32", "becoming bfloat16"]),
        ("tiers", ["offload=OffloadOptions(optimizer='cpu', ratio=0.5", "ratio=1.0"]),
        ("lr", ["param_groups[0].lr=0.02", "param_groups[0].lr=0.01"]),
        ("amsgrad", ["amsgrad=True", "amsgrad=False"]),
        ("state", ["state=exp_avg exp_avg_sq step=1.0", "state=none"]),
        ("no module", ["model has type NoneType"]),
    ],
)
def test_ranks_that_disagree_all_say_where(how: str, texts: list[str]) -> None:
    answers = run_ranks(2, _disagree, how)
    for answer in answers:
        for text in texts:
            assert text in answer, answer


def test_a_forgotten_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = make_net()
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 4 but torch.distributed is not initialized"):
        shardcore.shard(model, adam(model))


def test_what_happens_behind_the_engines_back() -> None:
    model, optimizer, _ = train(0, Run(steps=1))
    loss_of(model, batch_of(0, 0, 0)).backward()
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    with pytest.raises(ValueError, match=r"^step: head\.weight\.grad was assigned; expected None"):
        optimizer.step()
    model.head.weight.grad = None
    with pytest.raises(ValueError, match="grads was given"):
        optimizer.step(grads=[None] * len(list(model.parameters())))
    model.head.weight.data = model.head.weight.data.clone()
    with pytest.raises(ValueError, match=r"head\.weight no longer lies in shardcore's memory"):
        optimizer.step()


def test_a_parameter_unfrozen_after_shard_is_named() -> None:
    model = make_net()
    model.head.requires_grad_(False)
    model, optimizer, _ = train(0, Run(steps=1), model)
    model.head.requires_grad_(True)
    loss_of(model, batch_of(0, 0, 0)).backward()
    with pytest.raises(ValueError, match=r"head.weight has a gradient but was frozen"):
        optimizer.step()


def test_a_bad_option_at_step_changes_nothing() -> None:
    model, optimizer, _ = train(0, Run(steps=1))
    before = model.state_dict()
    loss_of(model, batch_of(0, 0, 0)).backward()
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"param_groups\[0\].lr has nan"):
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_sparse_gradients_are_refused_by_name() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.embed(x).sum()

    model = Words()
    model, _ = shardcore.shard(model, adam(model), precision="fp32")
    with pytest.raises(ValueError, match=r"gradient of embed\.weight has layout torch.sparse_coo; expected a dense gradient"):
        model(torch.tensor([1, 2])).backward()


def _bad_option_on_rank_1(rank: int, world_size: int) -> tuple[str, bool]:
    model, optimizer, _ = train(rank, Run(steps=1))
    before = model.state_dict()
    loss_of(model, batch_of(0, 0, rank)).backward()
    if rank == 1:
        optimizer.param_groups[0]["lr"] = -1.0
    try:
        optimizer.step()
    except ValueError as error:
        return str(error), all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return "no error", False


def test_a_step_that_one_rank_refuses_is_refused_on_all() -> None:
    other, own = run_ranks(2, _bad_option_on_rank_1)
    assert "lr has -1.0" in own[0]
    assert "rank 1 refused the step, so no rank was updated" in other[0]
    assert own[1]
    assert other[1]


def test_a_replaced_optimizer_refuses_to_work() -> None:
    model = make_net()
    old = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls: list[int] = []
    old.register_step_post_hook(lambda *_: calls.append(1))
    model, optimizer = shardcore.shard(model, old, precision="fp32")
    for method, args in (("step", ()), ("add_param_group", ({},)), ("state_dict", ()), ("load_state_dict", ({},))):
        with pytest.raises(ValueError, match=f"{method}: this AdamW was replaced by shardcore"):
            getattr(old, method)(*args)
    loss_of(model, batch_of(0, 0, 0)).backward()
    old.zero_grad()
    assert shardcore.full_grad(model.gain) is None
    optimizer.step()
    assert calls == [1]


def test_grad_scaler_from_stage_1_on() -> None:
    model, optimizer, _ = train(0, Run(steps=0, stage=2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batch_of(0, 0, 0))).backward()
    with pytest.raises(ValueError, match=r"called by a GradScaler.*from stage 1 on they are sharded"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    loss_of(model, batch_of(0, 0, 0)).backward()
    optimizer.step()  # GradScaler leaves its attributes behind when a step raises


def test_whole_values_of_the_wrong_thing() -> None:
    model = make_net()
    model.inp.requires_grad_(False)
    model, _, _ = train(0, Run(steps=0), model)
    with pytest.raises(ValueError, match="was frozen when shard"):
        shardcore.full_grad(model.inp.weight)
    with pytest.raises(TypeError, match="got a Net; expected a parameter"):
        shardcore.full_grad(model)
    with pytest.raises(TypeError, match="got a Parameter; expected a module"), shardcore.full_params(model.head.weight):
        pass


def _weights(model: Net) -> None:
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data


def _rows(model: Net) -> None:
    model.part = nn.Parameter(model.head.weight.data[2:4])


def _frozen(model: Net) -> None:
    model.part = nn.Parameter(model.head.weight.data[:2], requires_grad=False)


def _of_a_frozen_one(model: Net) -> None:
    model.head.weight.requires_grad_(False)
    model.part = nn.Parameter(model.head.weight.data[4:])


def _buffer(model: Net) -> None:
    model.register_buffer("part", model.head.weight.detach())


def _transposed(model: Net) -> None:
    model.register_buffer("part", model.head.weight.detach().t())


def _assigned(model: Net) -> None:
    """What is tied comes from a file as two tensors of one memory."""
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.load_state_dict(dict(model.state_dict()), assign=True)


def _behind_another(model: Net) -> None:
    """The long one is not its neighbour in memory."""
    both = torch.randn(20)
    model.long, model.inner = nn.Parameter(both), nn.Parameter(both[4:8], requires_grad=False)
    model.part = nn.Parameter(both[12:16])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "share", [_weights, _rows, _frozen, _of_a_frozen_one, _buffer, _transposed, _assigned, _behind_another]
)
def test_memory_that_two_have_is_refused(share: Callable[[Net], None], device: str) -> None:
    with torch.device(device):
        model = make_net()
        share(model)
    before = hash_of(model.parameters()) if device == "cpu" else ""
    filled = {"materialize": lambda module: None} if device == "meta" else {}
    with pytest.raises(ValueError, match=r"has memory that \S+ has, too; expected memory of its own, or one Parameter"):
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3, precision="bf16", **filled)  # type: ignore[arg-type]
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
def test_weights_in_another_order_of_memory_are_refused(make: Callable[..., torch.optim.Optimizer], stage: int) -> None:
    """The optimizers alone take them. Frozen ones may have any order."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.Linear(6, 5)).to(memory_format=torch.channels_last)
    model[0].requires_grad_(False)
    before = hash_of(model.parameters())
    with pytest.raises(ValueError, match=r"shard: 1.weight has strides \(36, 1, 12, 4\) for .* expected contiguous memory"):
        shardcore.shard(model, make([p for p in model.parameters() if p.requires_grad]), stage, precision="bf16")
    assert hash_of(model.parameters()) == before
    model[1].weight.data = model[1].weight.data.contiguous()
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    with pytest.raises(ValueError, match=r"shard: 2.weight has strides \(1, 5\) for shape \(5, 6\)"):
        shardcore.shard(model, make([p for p in model.parameters() if p.requires_grad]), stage, precision="bf16")
    model[2].weight.data = model[2].weight.data.contiguous()
    shardcore.shard(model, make([p for p in model.parameters() if p.requires_grad]), stage, precision="bf16")


def _normalizes(rank: int, world_size: int, bag: bool, stage: int) -> str:
    model = make_net()
    model.table = (nn.EmbeddingBag if bag else nn.Embedding)(8, 10, max_norm=0.5)
    try:
        model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), stage, precision="bf16")
    except ValueError as error:
        return str(error)
    rows = model.table(torch.tensor([[1, 2]]))
    model(rows.view(-1, 10)).sum().backward()
    optimizer.step()
    return "trains"


@pytest.mark.parametrize(("bag", "stage"), [(False, 3), (False, 1), (True, 3)])
def test_embeddings_that_normalize_their_rows_are_refused_over_several_ranks(bag: bool, stage: int) -> None:
    assert run_ranks(1, _normalizes, bag, stage) == ["trains"]
    for error in run_ranks(2, _normalizes, bag, stage):
        assert "shard: table has max_norm=0.5, by which each rank's forward changes the rows that its own batch uses" in error


def elsewhere(call: Callable[[], Any]) -> list[str]:
    """Run `call` on another thread to its end; returns the text of its error, if any."""
    errors: list[str] = []

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def _step(model: Any, optimizer: Any) -> str:
    optimizer.zero_grad()
    loss_of(model, batch_of(1, 0, 0)).backward()
    optimizer.step()
    return hash_of_training(model, optimizer)


def test_one_thread_after_the_other_trains_as_one() -> None:
    plain, its, _ = train(0, Run(stage=3, steps=1))
    model, optimizer, _ = train(0, Run(stage=3, steps=1))
    losses: list[torch.Tensor] = []
    assert not elsewhere(lambda: losses.append(loss_of(model, batch_of(1, 0, 0))))
    assert not elsewhere(losses[0].backward)
    assert not elsewhere(optimizer.step)
    assert hash_of_training(model, optimizer) == _step(plain, its)


def _wrapped_threads(rank: int, world_size: int, stage: int) -> list[str]:
    from torch.distributed._composable import replicate

    texts = []
    model, _, _ = train(rank, Run(stage=stage, steps=1))
    around, _, _ = train(rank, Run(stage=stage, steps=1))
    copy = model._replicate_for_data_parallel()
    wrapped = [nn.parallel.DistributedDataParallel(nn.Sequential(model)), replicate(nn.Sequential(model)), replicate(around)]
    for each in (copy, *wrapped):
        with pytest.raises(RuntimeError) as refusal:
            each(torch.ones(2, 10))
        texts.append(str(refusal.value))
    teaching = nn.parallel.DistributedDataParallel(make_net())
    teaching.module.register_forward_hook(lambda module, args, output: output - model(args[0]).detach())
    teaching(torch.ones(2, 10)).sum().backward()  # a model beside the wrapped one is left alone
    return texts


@pytest.mark.parametrize("stage", [0, 2])
def test_wrappers_that_would_average_again_are_refused(stage: int) -> None:
    for replica, *wrapped in run_ranks(2, _wrapped_threads, stage):
        assert "runs inside DataParallel" in replica
        assert len(wrapped) == 3
        assert all("runs inside DistributedDataParallel or replicate(); expected it on its own" in text for text in wrapped)
