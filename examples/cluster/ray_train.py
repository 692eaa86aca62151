"""Ray Train starts the ranks: python examples/cluster/ray_train.py --workers 8 --gpu --checkpoints
/shared/run

Ray's workers have the process group and RANK, LOCAL_RANK, MASTER_ADDR and so on when the function
begins, so `shard` and `initialize` need nothing of it. After a failure Ray starts all workers anew,
and they go on from the last checkpoint: a directory that every machine sees, since each rank writes
its share. On several machines start Ray first (ray start), with torch and shardcore installed on
each.
"""

import argparse
import hashlib
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import shardcore


def train(config: dict) -> str:
    """Train on each worker: an ordinary loop, with a report to Ray a step. Returns a hash of the
    weights.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    model, optimizer = shardcore.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=config["stage"]
    )
    device = next(model.parameters()).device
    done = 0
    if config["checkpoints"] and Path(config["checkpoints"], "latest").exists():
        done = shardcore.load(config["checkpoints"], model, optimizer).client_state["step"]
    for step in range(done + 1, config["steps"] + 1):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        batch = torch.randn(16, 64, generator=generator).to(device)
        loss = (model(batch) - batch.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if config["checkpoints"]:
            shardcore.save(
                config["checkpoints"], model, optimizer, client_state={"step": step}, keep_last=2
            )
        ray.train.report({"step": step, "loss": loss.item()})
    digest = hashlib.sha256()
    for value in model.state_dict().values():  # collective: on every worker
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="a GPU for each worker, over NCCL (default: CPUs, over gloo)",
    )
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--checkpoints",
        help="a directory that all machines see; goes on from what is there (default: none)",
    )
    parser.add_argument(
        "--restarts", type=int, default=3, help="after failures (default: %(default)s)"
    )
    parser.add_argument("--storage", help="for Ray's own results (default: ~/ray_results)")
    options = parser.parse_args()
    checkpoints = (
        str(Path(options.checkpoints).resolve()) if options.checkpoints else None
    )  # workers have other current folders
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "stage": options.stage,
            "steps": options.steps,
            "checkpoints": checkpoints,
        },
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.restarts),
        ),
    )
    print("weights", trainer.fit().return_value)


if __name__ == "__main__":
    main()
