"""train_batch and eval_batch of a PipelineModule: as the whole model, whatever the stages;
checkpoints; what is refused.
"""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import shardcore
from shardcore.deepspeed.pipe_engine import PipelineError
from shardcore.deepspeed.pipe_module import LayerSpec, PipelineModule, TiedLayerSpec, TiedWeight
from tests.support.deepspeed import ds_config
from tests.support.ranks import run_ranks
from tools import nccl_standin

WORDS, WIDTH, ROWS, LENGTH = 11, 6, 2, 5
# At most 8 layers, forward and backward, whose products add up fewer than 30 terms, and as many
# micro-batches and ranks: 1,280 roundings of 2^-24, which are independent. Twice the root of their
# number, as a share of the largest gradient.
BOUND = 2 * 1280**0.5 * 2.0**-24


class Embed(nn.Module):
    """Embeds words; hands on which ones count, a tensor of booleans, and their places, of
    integers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(20, WIDTH)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        places = torch.arange(words.shape[1]).expand_as(words)
        return self.table(words) + self.places(places), words > 1, places


class Layer(nn.Module):
    """A residual layer, which masks, and uses the places as indices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, 20))

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, mask, places = inputs
        return (
            x
            + self.down(torch.tanh(self.up(x)))
            * (mask * self.scales[places])[..., None].to(x.dtype),
            mask,
            places,
        )


class Head(nn.Module):
    """What follows the layers where nothing is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        return self.out(inputs[0])


def project(embed: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.linear(inputs[0], embed.table.weight)


def loss_of(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), words.flatten())


def make(stages: int, tied: bool, **options: Any) -> PipelineModule:
    attr = {"tied_weight_attr": "table.weight"}
    first = TiedLayerSpec("embed", Embed, **attr) if tied else LayerSpec(Embed)
    last = TiedLayerSpec("embed", Embed, forward_fn=project, **attr) if tied else LayerSpec(Head)
    layers = [first, *(LayerSpec(Layer) for _ in range(4)), last]
    return PipelineModule(layers, num_stages=stages, loss_fn=loss_of, seed_layers=True, **options)


def batches(
    replica: int, count: int, start: int = 0, length: int = LENGTH
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in range(start, start + count):
        generator = torch.Generator().manual_seed(1000 * replica + number)
        words = torch.randint(0, WORDS, (ROWS, length), generator=generator)
        yield words, (3 * words + 1) % WORDS


def engine_of(
    stages: int,
    tied: bool = False,
    micro: int = 3,
    module: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    settings = {
        **ds_config(micro, config.pop("stage", 1)),
        "train_micro_batch_size_per_gpu": ROWS,
        **config,
    }
    return shardcore.initialize(model=make(stages, tied, **(module or {})), config=settings)[0]


# --- as the whole model ---------------------------------------------------------------------------


def _gradients(
    rank: int, world: int, stages: int, tied: bool, micro: int, stage: int, twin: bool
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if twin:
            patch.setattr(TiedWeight, "add_gradients", lambda self: None)
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
        engine = engine_of(stages, tied, micro, stage=stage, **sgd)
        before = {name: value.clone() for name, value in engine.module_state_dict().items()}
        loss = engine.train_batch(batches(engine.grid.get_data_parallel_rank(), micro))
    moved = {
        name: (before[name] - value).tolist() for name, value in engine.module_state_dict().items()
    }
    for one in engine.module.tied:
        copies = [torch.empty_like(one.weight) for _ in range(2)]
        dist.all_gather(copies, one.weight.detach(), group=one._group)
        assert torch.equal(*copies)
    return loss.item(), moved


def _error(
    world: int, stages: int, tied: bool, micro: int, stage: int, twin: bool = False
) -> float:
    """Return the largest error of losses and gradients, as shares, beside the whole model in
    float64.
    """
    whole = make(1, tied).double()
    replicas = world // stages
    total = torch.zeros((), dtype=torch.float64)
    for replica in range(replicas):
        for words, labels in batches(replica, micro):
            total = total + loss_of(whole(words), labels) / (micro * replicas)
    total.backward()
    results = run_ranks(world, _gradients, stages, tied, micro, stage, twin)
    state_dict: dict[str, Any] = {}
    for _, moved in results:
        state_dict = (
            moved | state_dict
        )  # what is not tied of tied layers is in use in the first stage alone
    expected = {
        name: param.grad for name, param in whole.named_parameters() if param.grad is not None
    }
    assert set(state_dict) == {name for name, _ in whole.named_parameters()}
    errors = [abs(loss - total.item()) / total.item() for loss, _ in results]
    for name, grad in expected.items():
        # Weights of about 1 lose the gradient's last bits.
        errors.append(
            (
                (torch.tensor(state_dict[name]) - grad).abs().max()
                / max(grad.abs().max().item(), 2.0**-3)
            ).item()
        )
    return max(errors)


@pytest.mark.parametrize(
    "world, stages, tied, micro, stage",
    [
        (2, 2, True, 3, 0),
        (4, 2, True, 1, 1),
        (4, 4, False, 2, 2),
        (4, 4, True, 6, 1),
        (2, 2, False, 3, 3),
    ],
)
def test_a_step_is_that_of_the_whole_model(
    world: int, stages: int, tied: bool, micro: int, stage: int
) -> None:
    assert _error(world, stages, tied, micro, stage) < BOUND


def test_gradients_of_tied_weights_that_are_not_added_are_seen() -> None:
    assert _error(2, 2, True, 3, 1, twin=True) > 1000 * BOUND


def _hash(rank: int, world: int, stages: int, options: dict[str, Any]) -> tuple[str, list[float]]:
    engine = engine_of(stages, tied=True, bf16={"enabled": True}, gradient_clipping=0.5, **options)
    losses = [
        engine.train_batch(batches(engine.grid.data_parallel_id, 3, 3 * step)).item()
        for step in range(3)
    ]
    digest = hashlib.sha256()
    for _, value in sorted(engine.module_state_dict().items()):
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), losses


def test_one_hash_over_stages_and_tiers() -> None:
    options: list[dict[str, Any]] = [{"stage": stage} for stage in (0, 2)]
    cpu = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    hashes = [
        run_ranks(4, _hash, 2, one)
        for one in [*options, cpu, {"stage": 1, "shardcore": {"overlap_step": True}}]
    ]
    assert all(one == hashes[0] for one in hashes)
    assert hashes[0][0][1][-1] < hashes[0][0][1][0]


def _over_standin(rank: int, world: int) -> tuple[str, list[float]]:
    nccl_standin.install("cpu")
    with pytest.MonkeyPatch.context() as patch:
        new, backend = dist.new_group, nccl_standin.backend("cpu")
        patch.setattr(dist, "new_group", lambda ranks: new(ranks, backend=backend))
        return _hash(rank, world, 2, {"stage": 1})


@pytest.mark.more
def test_the_messages_pair_on_groups_that_behave_as_nccl() -> None:
    assert run_ranks(4, _over_standin) == run_ranks(4, _hash, 2, {"stage": 1})


# --- batches --------------------------------------------------------------------------------------


def _shapes(rank: int, world: int) -> None:
    engine = engine_of(2)
    for length in (LENGTH, LENGTH + 2):
        engine.train_batch(batches(0, 3, length=length))
        engine.eval_batch(batches(0, 3, length=length + 1))
    mixed = [*batches(0, 2), *batches(0, 1, length=LENGTH + 1)]
    dynamic = engine_of(2, module={"dynamic_shape": True})
    assert torch.isfinite(dynamic.train_batch(iter(mixed)))


def test_shapes_may_change() -> None:
    run_ranks(2, _shapes)


def _other_shape(rank: int, world: int) -> None:
    engine = engine_of(2)
    with pytest.MonkeyPatch.context() as patch:  # the other stage would wait
        patch.setattr(dist, "batch_isend_irecv", lambda operations: [])
        if rank == 0:
            with pytest.raises(ValueError, match="expected the same shapes and dtypes, or"):
                engine.train_batch(iter([*batches(0, 1), *batches(0, 1, length=LENGTH + 1)]))


def test_another_shape_in_a_batch_is_refused() -> None:
    run_ranks(2, _other_shape)


def _evaluate(rank: int, world: int) -> None:
    engine = engine_of(2)
    pairs = [*batches(0, 3)]
    engine.module.train()
    events: list[Any] = []
    engine.monitor = SimpleNamespace(enabled=True, write_events=events.extend)
    loss = engine.eval_batch(iter(pairs))
    assert events == ([("Train/Samples/eval_loss", loss.item(), 0)] if rank == 0 else [])
    assert not engine.module.training
    losses = engine.eval_batch(iter(pairs), reduce_output=None)
    result, logits = engine.eval_batch(
        iter(pairs), return_logits=True, bcast_loss=False, num_micro_batches=1
    )
    outputs = engine.eval_batch(iter(pairs), compute_loss=False, reduce_output=None)
    mean = engine.eval_batch(iter(pairs), compute_loss=False, bcast_loss=False)
    if rank == 0:
        assert mean is None
        assert losses is logits is outputs is result is None
        return
    assert torch.equal(torch.stack(losses).mean(), loss)
    assert [loss_of(output, y) for output, (_, y) in zip(outputs, pairs, strict=True)] == losses
    assert torch.equal(logits, outputs[0])
    assert torch.equal(result, losses[0])
    assert torch.equal(mean, torch.stack(outputs).mean(0))


def test_evaluation() -> None:
    run_ranks(2, _evaluate)


def _own_data(rank: int, world: int) -> list[float]:
    pairs = [pair for replica in range(2) for pair in batches(replica, 3)]
    data = TensorDataset(*(torch.cat(column) for column in zip(*pairs, strict=True)))
    settings = {**ds_config(3, 1), "train_micro_batch_size_per_gpu": ROWS}
    engine, _, loader, _ = shardcore.initialize(
        model=make(2, False), config=settings, training_data=data
    )
    assert loader is engine.training_dataloader
    losses = [engine.train_batch().item() for _ in range(2)]
    again = engine_of(2)
    replica = again.grid.data_parallel_id
    words, labels = (column[replica::2].split(ROWS) for column in data.tensors)  # DeepSpeed's order
    again.set_batch_fn(lambda pair: (pair["words"], pair["labels"]))
    again.set_dataloader([{"words": x, "labels": y} for x, y in zip(words, labels, strict=True)])
    assert losses == [again.train_batch().item() for _ in range(2)]
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (
        2,
        6,
        2 * 3 * ROWS * 2,
    )
    return losses


def test_data_of_a_dataset_a_loader_and_a_function() -> None:
    losses = run_ranks(4, _own_data)
    assert all(one == losses[0] for one in losses)


def _interrupted(rank: int, world: int) -> None:
    losses = []
    for stops in (True, False):
        engine = engine_of(2, tied=True)
        if stops:
            with pytest.raises(StopIteration):
                engine.train_batch(batches(0, 2))
        losses.append([engine.train_batch(batches(0, 3, 3 * step)).item() for step in range(3)])
    assert losses[0] == losses[1]


def test_nothing_of_a_batch_that_ended_early_is_left() -> None:
    run_ranks(2, _interrupted)


def _more_micro_batches(rank: int, world: int) -> None:
    engines = [engine_of(2, tied=True, micro=micro) for micro in (3, 4)]
    engines[0].set_train_batch_size(8 * ROWS)
    assert [engine.train_batch_size() for engine in engines] == [8 * ROWS] * 2
    assert engines[0].gradient_accumulation_steps() == 4
    assert (engines[0].world_size, engines[0].dp_world_size, engines[0].get_mom()) == (
        4,
        2,
        [(0.9, 0.999)],
    )
    losses = [
        [one.train_batch(batches(one.grid.data_parallel_id, 4)).item() for _ in range(3)]
        for one in engines
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(ValueError, match="train_batch_size is 6; expected a multiple of 4"):
        engines[0].set_train_batch_size(6)


def test_another_number_of_micro_batches() -> None:
    run_ranks(4, _more_micro_batches)


class Kept(nn.Module):
    """Sees whether a float32 tensor that came with the activations has kept its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, scales = inputs
        assert (x.dtype, scales.dtype) == (torch.bfloat16, torch.float32)
        return (x @ self.weight).float() * scales


class OfMegatron:
    samples = 0

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, increment: int) -> None:
        self.samples += increment


def _dtypes(rank: int, world: int) -> None:
    first = [nn.Linear(4, 4), lambda x: (x, torch.full((1, 4), 1.001))]
    module = PipelineModule(
        [*first, Kept()], num_stages=2, partition_method="uniform", loss_fn=nn.functional.mse_loss
    )
    config = ds_config(
        bf16={"enabled": True}, pipeline={"activation_checkpoint_interval": 2}, steps_per_print=1
    )
    engine = shardcore.initialize(model=module, config=config, lr_scheduler=OfMegatron)[0]
    assert engine.module.activation_checkpoint_interval == 2
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text, **options: printed.append(text))
        loss = engine.train_batch(iter([(torch.ones(4, 4), torch.zeros(4, 4))]))
    assert engine.lr_scheduler.samples == engine.train_batch_size() == 4
    module = PipelineModule([nn.Linear(4, 4)], num_stages=1, activation_checkpoint_interval=3)
    resumed = shardcore.initialize(
        model=module, config=ds_config(pipeline={"activation_checkpoint_interval": 0})
    )[0]
    assert resumed.module.activation_checkpoint_interval == 3
    assert printed == ([f"step=1 skipped=0 lr=[0.01] loss={loss.item():.6g}"] if rank == 0 else [])


def test_dtypes_between_stages_the_interval_and_the_line_of_a_step() -> None:
    run_ranks(2, _dtypes)


def _of_no_layer(rank: int, world: int) -> list[str]:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    layers = [
        frozen,
        nn.Linear(4, 4),
        TiedLayerSpec("one", nn.Linear, 4, 4),
        torch.tanh,
        TiedLayerSpec("one", nn.Linear, 4, 4),
    ]

    class Cut(PipelineModule):
        def _partition_layers(self, method: str = "parameters") -> None:
            self.parts = [0, 1, 3, 5]
            self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    torch.manual_seed(0)
    module = Cut(layers, num_stages=3, loss_fn=nn.functional.mse_loss)
    params = [param for param in module.parameters() if param.requires_grad]
    engine = shardcore.initialize(model=module, model_parameters=params, config=ds_config())[0]
    losses = [
        engine.train_batch(iter([(torch.ones(4, 4), torch.zeros(4, 4))])).item() for _ in range(5)
    ]
    assert losses[-1] < 0.9 * losses[0]
    return sorted(name for name, param in module.named_parameters() if param.requires_grad)


def test_stages_without_trainable_parameters_of_their_own() -> None:
    tied = [f"tied_modules.one.{name}" for name in ("bias", "weight")]
    assert run_ranks(3, _of_no_layer) == [["of_no_layer"], ["1.bias", "1.weight", *tied], tied[:1]]


def _overflow(rank: int, world: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = engine_of(2, tied=True, fp16=fp16)
    engine.train_batch(batches(0, 3))
    assert engine.was_step_applied()
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.module.loss_fn = lambda output, y: loss_of(output, y) * float("inf")
    engine.train_batch(batches(0, 3))
    assert engine.skipped_steps == 1
    assert not engine.was_step_applied()
    assert engine.optimizer.loss_scale == 128.0
    assert all(
        torch.equal(value, before[name]) for name, value in engine.module_state_dict().items()
    )
    engine.module.loss_fn = loss_of
    engine.train_batch(batches(0, 3))
    assert engine.skipped_steps == 1


def test_a_step_that_overflows_is_skipped_on_all_stages() -> None:
    run_ranks(2, _overflow)


# --- checkpoints ----------------------------------------------------------------------------------


def _resumed(rank: int, world: int, folder: str) -> None:
    def step(engine: Any, number: int) -> float:
        return engine.train_batch(batches(engine.grid.data_parallel_id, 3, 3 * number)).item()

    engine = engine_of(2, tied=True)
    step(engine, 0)
    with pytest.raises(ValueError, match="save_dir is ''"):
        engine.save_checkpoint("")
    engine.save_checkpoint(folder, client_state={"seen": 3})
    expected = [step(engine, number) for number in (1, 2)]
    other = engine_of(2, tied=True, stage=2)
    path, state = other.load_checkpoint(folder)
    assert path is not None
    assert Path(path).parent.name == f"stage_0{engine.stage_id}"
    assert (state, other.global_steps) == ({"seen": 3}, 1)
    assert [step(other, number) for number in (1, 2)] == expected
    if engine.stage_id == 1:
        engine_folder = Path(folder, "stage_01")
        dist.barrier()
        if engine.grid.data_parallel_id == 0:
            (engine_folder / "latest").unlink()
    else:
        dist.barrier()
    dist.barrier()
    with pytest.raises(
        ValueError, match=r"the stages are \['global_step1', None\]; expected one tag"
    ):
        other.load_checkpoint(folder)
    assert other.load_checkpoint(folder, tag="global_step1")[0] is not None
    for stages in (1, 4):
        with pytest.raises(ValueError, match=f"is of 2 stages; expected {stages}"):
            engine_of(stages).load_checkpoint(folder)
    one = engine_of(1)
    one.save_checkpoint(folder + "/one")
    assert one.load_checkpoint(folder + "/one")[0] is not None
    with pytest.raises(ValueError, match="is of 1 stages; expected 2"):
        other.load_checkpoint(folder + "/one")
    assert engine_of(4).load_checkpoint(folder + "/nothing") == (None, {})


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    run_ranks(4, _resumed, str(tmp_path))


def _one_is_late(rank: int, world: int, folder: str) -> None:
    engine = engine_of(2)
    engine.train_batch(batches(0, 3))
    time.sleep(rank)  # that stage saves when the other one looks for what there is
    engine.save_checkpoint(folder)
    assert engine.load_checkpoint(folder)[0] is not None


def test_a_load_waits_for_the_saves_of_all_stages(tmp_path: Path) -> None:
    run_ranks(2, _one_is_late, str(tmp_path))


# --- refusals -------------------------------------------------------------------------------------


def _refusals(rank: int, world: int) -> None:
    engine = engine_of(2)
    for call in (engine, engine.forward, engine.backward, engine.step):
        with pytest.raises(
            PipelineError, match=r"is trained as a whole; expected engine\.train_batch"
        ):
            call(torch.zeros(1))
    with pytest.raises(
        PipelineError, match="are on the ranks of several stages; call module_state_dict"
    ):
        engine.save_16bit_model("anywhere")
    with pytest.raises(ValueError, match="there is no data; expected train_batch"):
        engine.train_batch()
    with pytest.raises(ValueError, match=r"yields 3 values; expected \(inputs, labels\)"):
        engine.train_batch(iter([(1, 2, 3)]))
    with pytest.raises(PipelineError, match="gradients are disabled"), torch.no_grad():
        engine.train_batch(batches(0, 3))
    with pytest.raises(ValueError, match="reduce_output is 'sum'"):
        engine.eval_batch(batches(0, 3), reduce_output="sum")
    for match, tied, config in [
        ("stage is 3 for a PipelineModule with weights tied", True, {"stage": 3}),
        ("shardcore.mesh is given for a PipelineModule", False, {"shardcore": {"mesh": [1, 2]}}),
        (
            "gradient_accumulation is False for a PipelineModule",
            False,
            {"managed_gradient_accumulation": False},
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            engine_of(2, tied, **config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        early = make(1, False)
    with pytest.raises(
        ValueError, match=r"was made for 1 ranks, and there are 2; expected deepspeed\."
    ):
        shardcore.initialize(model=early, config=ds_config())
    with pytest.raises(ValueError, match="is given without an optimizer"):
        shardcore.initialize(model=make(2, False), config={"train_micro_batch_size_per_gpu": 1})


def test_refusals() -> None:
    run_ranks(2, _refusals)


def _bad_layers(rank: int, world: int) -> None:
    module = PipelineModule(
        [nn.Linear(2, 2), lambda x: [x], nn.Linear(2, 2)], num_stages=2, partition_method="uniform"
    )
    engine = shardcore.initialize(
        model=module, config={**ds_config(), "train_micro_batch_size_per_gpu": 1}
    )[0]
    if rank == 0:
        with pytest.raises(
            TypeError, match=r"stage 0 returns \['list'\]; expected a tensor, or a tuple of tensors"
        ):
            engine.train_batch(iter([(torch.zeros(1, 2), None)]))
    alone = PipelineModule([nn.Linear(2, 2)], num_stages=1)
    engine = shardcore.initialize(
        model=alone, config={**ds_config(), "train_micro_batch_size_per_gpu": 1}
    )[0]
    with pytest.raises(
        ValueError,
        match=r"the loss is a tensor of shape \(1, 2\); expected a tensor of one element",
    ):
        engine.train_batch(iter([(torch.zeros(1, 2), None)]))


def test_layers_that_do_not_fit() -> None:
    run_ranks(2, _bad_layers)
