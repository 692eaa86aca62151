"""Ray Train's TorchTrainer as the launcher: two workers train to the bits of two ranks without
Ray, and the example resumes.
"""

import hashlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from tests.support.models import Net
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/cluster/ray_train.py"
STEPS = 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]


def hash_of(model: torch.nn.Module) -> str:
    """A hash of the whole weights. Collective."""
    return hashlib.sha256(
        b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
    ).hexdigest()


def batches() -> Any:
    """This rank's batches."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        yield torch.randn(4, 10, generator=generator)


def with_shard() -> str:
    torch.manual_seed(1)
    model = Net()
    model, optimizer = shardcore.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3
    )
    for batch in batches():
        model(batch.to(next(model.parameters()).device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of(model)


def with_initialize() -> str:
    torch.manual_seed(1)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 0.5,
    }
    engine, *_ = shardcore.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for batch in batches():
        engine.backward(engine(batch.to(engine.device)).square().mean())
        engine.step()
    return hash_of(model)


def both(*_: Any) -> list[Any]:
    """What Ray, or run_ranks, runs on each rank: two trainings in one process group."""
    torch.set_num_threads(1)
    return [with_shard(), with_initialize()]


def on_worker(config: dict[str, Any]) -> list[Any]:
    """What Ray's worker runs: `both`, and what Ray has set in the environment, as torchrun
    would.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        rows,
        [os.environ[name] for name in names] + ["MASTER_ADDR" in os.environ, dist.get_backend()],
    )
    return [*both(), rows]


def example_alone(rank: int, world_size: int, steps: int) -> str:
    """The example's training without Ray."""
    spec = importlib.util.spec_from_file_location("ray_train_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.ray.train.report = lambda metrics: None
    torch.set_num_threads(1)
    trained: str = example.train({"stage": 3, "steps": steps, "checkpoints": None})
    return trained


def under_ray(folder: str) -> None:
    """What the test's process runs: a Ray of two CPUs, `both` in it, then the example, for 2
    steps and on to 4.
    """
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    trainer = TorchTrainer(
        on_worker,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/results"),
    )
    print("both", json.dumps(trainer.fit().return_value), flush=True)
    for steps in ("2", "4"):
        sys.argv = [
            "ray_train.py",
            "--steps",
            steps,
            "--storage",
            f"{folder}/results",
            "--checkpoints",
            f"{folder}/saved",
        ]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    ray.shutdown()


def test_two_workers_train_as_two_ranks_do(tmp_path: Path) -> None:
    code = f"from tests.launch.test_ray import under_ray; under_ray({str(tmp_path)!r})"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [
        line.split(" ", 1)
        for line in done.stdout.splitlines()
        if line.startswith(("both ", "weights "))
    ]
    assert [name for name, _ in lines] == ["both", "weights", "weights"]
    *hashes, rows = json.loads(lines[0][1])
    assert rows == [[str(rank), "2", str(rank), "2", True, "gloo"] for rank in range(2)]
    assert run_ranks(2, both) == [hashes, hashes]
    assert not set(hashes) & set(run_ranks(1, both)[0]), "a rank that trains alone"
    alone = [run_ranks(2, example_alone, steps)[0] for steps in (2, 4)]
    assert [text for _, text in lines[1:]] == alone
    assert alone[0] != alone[1]
