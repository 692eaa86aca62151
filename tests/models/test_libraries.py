"""Trainer, Accelerate and Lightning: clipping over sharded models, and our optimizers under FSDP2.

Over a sharded model each rank runs the library as if it were alone, on its own part of the data:
the engine is what joins the ranks.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import shardcore
from tests.support.fsdp2 import whole, whole_state
from tests.support.ranks import run_ranks

STEPS, BATCH, CLIP = 3, 8, 1e-3
# norms, where the library returns them; weights
Trained = tuple[list[float], dict[str, torch.Tensor]]


class Model(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


def _start(stage: int | None) -> tuple[Any, Any]:
    """Return a model and its optimizer, sharded if there is a stage. A large eps: else Adam
    would undo a constant factor.
    """
    torch.manual_seed(0)
    model: Any = Model()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2, eps=1e-2)
    return (
        (model, optimizer)
        if stage is None
        else shardcore.shard(model, optimizer, stage, precision="fp32")
    )


def _batches(rank: int, world_size: int) -> list[torch.Tensor]:
    return [
        torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))[rank::world_size]
        for step in range(STEPS)
    ]


def _trainer(
    model: Any, optimizer: Any, batches: list[torch.Tensor], clip: float, out: str
) -> list[float]:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=out,
        use_cpu=True,
        max_grad_norm=clip,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=len(batches[0]),
    )
    rows = [{"x": row} for batch in batches for row in batch]
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
    )
    # its own would shuffle
    trainer.get_train_dataloader = lambda: DataLoader(rows, len(batches[0]))
    trainer.train()
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def _accelerate(
    model: Any, optimizer: Any, batches: list[torch.Tensor], by_value: bool, clip: float
) -> list[float]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    norms = []
    for batch in batches:
        accelerator.backward(model(batch)["loss"])
        if by_value:
            accelerator.clip_grad_value_(model.parameters(), clip)
        else:
            norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _lightning(
    model: Any, optimizer: Any, batches: list[torch.Tensor], algorithm: str, clip: float
) -> list[float]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(batch)["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=clip,
        gradient_clip_algorithm=algorithm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(batches, batch_size=None))
    return []


def _fabric(
    model: Any, optimizer: Any, batches: list[torch.Tensor], options: dict[str, float]
) -> list[float]:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, optimizer)
    norms = []
    for batch in batches:
        fabric.backward(model(batch)["loss"])
        norm = fabric.clip_gradients(model, optimizer, **options)
        norms += [] if norm is None else [norm.item()]
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _train(
    rank: int, world_size: int, stage: int | None, train: Callable[..., list[float]], *options: Any
) -> Trained:
    model, optimizer = _start(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, of few workers and steps
        norms = train(model, optimizer, _batches(rank, world_size), *options)
    return norms, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("package", "stage", "train", "options"),
    [
        ("transformers", 2, _trainer, (CLIP,)),
        ("accelerate", 1, _accelerate, (False, CLIP)),
        ("accelerate", 3, _accelerate, (True, CLIP)),
        ("lightning", 3, _lightning, ("norm", CLIP)),
        ("lightning", 2, _lightning, ("value", CLIP)),
        ("lightning", 1, _fabric, ({"max_norm": CLIP, "norm_type": 1.0},)),
    ],
)
def test_sharded_models_are_clipped_as_plain_ones(
    package: str,
    stage: int,
    train: Callable[..., list[float]],
    options: tuple[Any, ...],
    tmp_path: Path,
) -> None:
    pytest.importorskip(package, reason=f"tests with {package}")
    pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")
    if train is _trainer:
        options = (*options, str(tmp_path))
    expected_norms, expected = run_ranks(1, _train, None, train, *options)[0]
    start = _start(None)[0].state_dict()
    moved = {name: (value - start[name]).abs().mean().item() for name, value in expected.items()}
    for norms, weights in run_ranks(2, _train, stage, train, *options):
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for name, value in weights.items():
            assert (value - expected[name]).abs().max() < 1e-2 * moved[name]
    if norms:
        assert len(norms) == STEPS
        assert min(norms) > 100 * CLIP, "so that not to clip is another training"


# --- FSDP2, where Accelerate swaps an optimizer's parameters for DTensors -------------------------


@contextmanager
def _fsdp2_on_cpus(rank: int, world_size: int) -> Iterator[None]:
    """Let Accelerate take CPU ranks over gloo for GPUs: it offers FSDP to those alone."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "ACCELERATE_TORCH_DEVICE": "cpu",
        }.items():
            patch.setenv(name, str(value))
        patch.setenv("ACCELERATE_USE_FSDP", "false")  # both libraries set it, and leave it
        patch.setattr(
            PartialState, "_prepare_backend", lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
        )
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def _fsdp2_by_hand(rank: int, world_size: int, kind: Any, options: dict[str, Any]) -> list[Any]:
    """fully_shard, then the optimizer."""
    torch.manual_seed(0)
    model: Any = fully_shard(Model().to(options.pop("dtype", torch.float32)))
    optimizer = kind(model.parameters(), lr=1e-2, eps=1e-2, **options)
    for batch in _batches(rank, world_size):
        model(batch.to(model.net[0].weight.dtype))["loss"].backward()
        optimizer.step(max_norm=CLIP)
        optimizer.zero_grad()
    return [*whole(model.parameters()), *(value for _, _, value in whole_state(optimizer))]


def _fsdp2_by_accelerate(
    rank: int, world_size: int, kind: Any, options: dict[str, Any]
) -> list[Any]:
    """The optimizer, then fully_shard and Accelerate's own fsdp2_switch_optimizer_parameters."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    torch.manual_seed(0)
    model: Any = Model().to(options.pop("dtype", torch.float32))
    optimizer = kind(model.parameters(), lr=1e-2, eps=1e-2, **options)
    with _fsdp2_on_cpus(rank, world_size):
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        assert accelerator.is_fsdp2
        model, prepared = accelerator.prepare(model, optimizer)
        for batch in _batches(rank, world_size):
            accelerator.backward(model(batch.to(model.net[0].weight.dtype))["loss"])
            optimizer.step(max_norm=CLIP)
            prepared.zero_grad()
    params = list(model.parameters())
    assert all(isinstance(param, DTensor) for param in params)
    assert list(map(id, optimizer.state)) == list(map(id, params)), (
        "no state of a parameter that was swapped"
    )
    return [*whole(params), *(value for _, _, value in whole_state(optimizer))]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (shardcore.CPUAdam, {}),
        (shardcore.FusedAdam, {"dtype": torch.bfloat16, "master": "split"}),
        (shardcore.FusedAdam, {"state_dtype": "bf16"}),
    ],
)
def test_optimizers_step_the_dtensors_that_accelerate_swaps_in(
    kind: Any, options: dict[str, Any]
) -> None:
    pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")
    by_hand = run_ranks(2, _fsdp2_by_hand, kind, options)
    for expected, found in zip(
        by_hand, run_ranks(2, _fsdp2_by_accelerate, kind, options), strict=True
    ):
        assert len(found) == len(expected) > 4
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _fsdp2_trainer(
    rank: int, world_size: int, kind: Any, clip: float, out: str
) -> tuple[list[float], list[torch.Tensor]]:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model: Any = Model()
    with _fsdp2_on_cpus(rank, world_size):
        args = TrainingArguments(
            output_dir=out,
            use_cpu=True,
            max_grad_norm=clip,
            num_train_epochs=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            per_device_train_batch_size=BATCH // world_size,
            fsdp="full_shard",
            fsdp_config={"version": 2, "fsdp_version": 2},
        )
        rows = [{"x": row} for batch in _batches(0, 1) for row in batch]
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=rows,
            optimizer_cls_and_kwargs=(kind, {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0}),
        )
        assert trainer.accelerator.is_fsdp2
        trainer.train()
    return [
        entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry
    ], whole(model.parameters())


@pytest.mark.more
def test_trainer_with_fsdp2_trains_as_with_torchs_adam(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="tests with transformers")
    pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")
    expected_norms, expected = run_ranks(2, _fsdp2_trainer, torch.optim.AdamW, CLIP, str(tmp_path))[
        0
    ]
    for norms, weights in run_ranks(2, _fsdp2_trainer, shardcore.FusedAdam, CLIP, str(tmp_path)):
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        assert len(norms) == STEPS
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
