"""tools/support.toml says what works: combinations are tried on CPUs, versions compared."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import shardcore
from tests.support.ranks import run_ranks
from tools import build_config, make_support
from tools.make_support import PRECISIONS, ROOT, TABLE, works

TIERS = {tier["name"]: tier for tier in TABLE["tier"]}
OPTIMIZERS = {optimizer["name"]: optimizer for optimizer in TABLE["optimizer"]}
TRIED = [kind["name"] for kind in TABLE["parallel"] if kind.get("tried")]
REFUSALS = (ValueError, TypeError, NotImplementedError)


def test_the_page_is_up_to_date(monkeypatch):
    assert make_support.main(["--check"]) == 0, "run python -m tools.make_support"
    monkeypatch.setitem(TIERS["states on NVMe"], "stages", [3])
    assert make_support.main(["--check"]) == 1


def test_results_and_pages_are_there():
    for row in (*TABLE["tier"], *TABLE["optimizer"]):
        result = row.get("gpu", "never run")
        assert result == "never run" or (ROOT / "benchmarks" / "results" / result).is_file()


def missing(rows):
    """Return the optimizers of torch.optim that no row names."""
    named = set(re.findall(r"\w+", " ".join(row["name"] for row in rows if "torch" in row["make"])))
    classes = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    return {
        each.__name__ for each in classes if issubclass(each, torch.optim.Optimizer)
    } - named.union({"Optimizer"})


def test_every_optimizer_of_torch_has_a_row():
    rows = TABLE["optimizer"]
    assert missing(rows) == set()
    assert missing([row for row in rows if row["name"] != "torch.optim.Muon"]) == {"Muon"}


def test_versions_are_those_of_the_build():
    rows = {row["what"]: row for row in TABLE["environment"]}
    project = (ROOT / "pyproject.toml").read_text()
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    assert rows["Python"]["supported"].startswith(f"{python} or newer")
    assert rows["compiler"]["supported"] == f"GCC {build_config.MIN_GCC} or newer"
    build = (ROOT / "tools" / "build_config.py").read_text()
    assert f"expected {rows['torch']['supported'].split(';')[0]} (pip" in build
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    for torch_version in set(re.findall(r"torch: ([\d.]+)", release)):
        assert torch_version in rows["torch"]["tested"]
    for toolkit in set(re.findall(r"toolkit: ([\d-]+)", release)):
        assert toolkit.replace("-", ".") in rows["CUDA"]["tested"]
    for minor in set(re.findall(r"cp3(\d+)", release)):
        assert f"3.{minor}" in rows["Python"]["tested"]


def offload_of(tier, folder):
    offload = dict(TIERS[tier]["offload"])
    if offload.get("optimizer") == "nvme":
        offload |= {"path": folder, "durable": False}
    return offload or None


def outcome(stage, tier, optimizer, precision, folder):
    """Shard and take a step: whether that works; or `shard` refuses it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    before = [p.detach().clone() for p in model.parameters()]
    names = {"torch": torch, "shardcore": shardcore, "p": list(model.parameters())}
    made = eval(OPTIMIZERS[optimizer]["make"], names)
    try:
        model, made = shardcore.shard(
            model, made, stage=stage, offload=offload_of(tier, folder), precision=precision
        )
    except REFUSALS:
        return False
    loss = model(torch.ones(4, 8)).float().square().mean()
    made.scale_loss(loss).backward()
    made.step()
    after = model.state_dict().values()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return True


def wrong(combinations, folder):
    """Those of the combinations for which the table is wrong."""
    return [
        (*names, expected)
        for names in combinations
        if (expected := works(names[0], TIERS[names[1]], OPTIMIZERS[names[2]], names[3]))
        != outcome(*names, folder)
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_combinations_on_one_rank(optimizer, tmp_path):
    assert wrong(itertools.product(range(4), TIERS, [optimizer], PRECISIONS), str(tmp_path)) == []


def _over_ranks(rank, world_size, tier, folder):
    torch.set_num_threads(1)
    chosen = ["FusedAdam", "torch.optim.SGD", "Muon", "torch.optim.LBFGS"]
    return wrong(itertools.product(range(4), [tier], chosen, ["bf16"]), folder)


@pytest.mark.cases(1)
@pytest.mark.parametrize("tier", TIERS)
def test_combinations_on_two_ranks(tier, tmp_path):
    assert run_ranks(2, _over_ranks, tier, str(tmp_path)) == [[], []]


def _parallel(rank, world_size, kind, stage, folder):
    """Take a step with a kind of parallelism, on each tier of a stage."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("first", "second"))
    for tier in [name for name, of in TIERS.items() if stage in of["stages"]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        x, options = torch.ones(4, 8), {}
        if kind == "tensor parallel":
            shardcore.tensor_parallel(model, mesh["second"], {"0": "colwise", "2": "rowwise"})
            options = {"process_group": mesh["first"]}
        elif kind.startswith("hybrid"):
            options = {"process_group": mesh}
        options |= {"stage": stage, "offload": offload_of(tier, folder)}
        optimizer = shardcore.FusedAdam(model.parameters(), lr=0.1)
        if kind.startswith("pipeline"):
            group = mesh["second"].get_group()
            part = PipelineStage(model, rank, 2, torch.device("cpu"), group=group)
            model, optimizer = shardcore.shard_pipeline(
                part, optimizer, n_microbatches=2, process_group=mesh["first"], **options
            )
            schedule = ScheduleGPipe(
                part, 2, loss_fn=lambda y, t: (y - t).square().mean() / 2, scale_grads=False
            )
            schedule.step(*([x] if rank == 0 else []), target=x if rank else None)
        else:
            model, optimizer = shardcore.shard(model, optimizer, **options)
            model(x).square().mean().backward()
        old = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.step()
        new = model.state_dict()
        assert any(not torch.equal(old[name], new[name]) for name in old), (kind, stage, tier)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "kind, stage",
    [(kind, stage) for kind in TRIED for stage in range(4)],
)
def test_parallelism(kind, stage, tmp_path):
    (row,) = (row for row in TABLE["parallel"] if row["name"] == kind)
    assert stage in row["stages"]
    run_ranks(2, _parallel, kind, stage, str(tmp_path))
