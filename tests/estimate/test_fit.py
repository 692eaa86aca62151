"""What `shardcore estimate --fit` chooses for machines of given memory."""

from typing import Any

import pytest
import torch

from examples.llama import llama_7b, llama_70b
from shardcore import cli
from shardcore.estimate import fit, predict

GIB = 2**30
CPU, NVME = {"optimizer": "cpu"}, {"optimizer": "nvme", "path": "DIR"}
GRADIENTS = {"gradients": "cpu"}
CARDS = {"24 GB": 22.3, "80 GB": 74.5, "141 GB": 131.3}


def chosen(build: Any, card: str, host_gib: float, disk_gib: float = 0.0, world: int = 1) -> list[fit.Candidate]:
    with torch.device("meta"):
        model = build()
    device = int(CARDS[card] * GIB)
    machine = fit.Machine(device, device // 10, int(host_gib * GIB), int(disk_gib * GIB), min(world, 8))
    predicted = lambda stage, offload: predict(model, None, stage, world_size=world, precision="bf16", offload=offload)  # noqa: E731
    return fit.fit(machine, world, predicted)


@pytest.mark.parametrize(
    ("build", "card", "host_gib", "disk_gib", "world", "expected"),
    [
        (llama_7b, "141 GB", 64, 0, 1, (2, None)),
        (llama_7b, "80 GB", 128, 0, 1, (2, CPU)),
        (llama_7b, "24 GB", 128, 0, 1, (2, CPU | GRADIENTS)),
        (llama_7b, "24 GB", 64, 200, 1, (2, NVME | GRADIENTS)),
        (llama_7b, "24 GB", 64, 0, 1, None),
        (llama_70b, "80 GB", 2000, 0, 8, (3, CPU)),
        (llama_70b, "80 GB", 64, 4000, 8, (3, NVME)),
        (llama_70b, "80 GB", 64, 0, 64, (3, None)),
    ],
)
def test_the_first_that_fits(build: Any, card: str, host_gib: float, disk_gib: float, world: int, expected: Any) -> None:
    *others, last = chosen(build, card, host_gib, disk_gib, world)
    assert all(one.lacks for one in others)
    assert (None if last.lacks else (last.stage, last.offload)) == expected


def test_a_byte_too_few_is_too_few() -> None:
    def found(device: int, host: int, disk: int) -> list[fit.Candidate]:
        predicted = lambda stage, offload: predict(model, None, stage, world_size=4, precision="bf16", offload=offload)  # noqa: E731
        return fit.fit(fit.Machine(device, 1000, host, disk, 2), 4, predicted)

    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, device="meta") for _ in range(6)))
    tight = predict(model, None, 3, world_size=4, precision="bf16", offload=CPU).resting.by_tier
    device, host = tight["device"] + 1000, 2 * tight["cpu"]
    fits = found(device, host, 0)[-1]
    assert (fits.stage, fits.offload, fits.lacks) == (3, CPU, "")
    assert found(device - 1, 10 * host, 0)[-1].offload == CPU | GRADIENTS
    assert found(device, host - 1, 0)[-1].lacks.startswith("host")


def test_the_table_and_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "examples.llama:llama_7b", "--fit", "--device-memory", "22.3"]
    assert cli.main([*command, "--host-memory", "128"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(
        "shardcore.shard(model, optimizer, stage=2, precision='bf16', offload={'optimizer': 'cpu', 'gradients': 'cpu'}, "
        "overlap_step=True)\n"
    )
    assert "device 102.6 of 22.3 GiB" in said
    assert cli.main([*command, "--host-memory", "16", "--state-dtype", "8bit"]) == 1
    assert "nothing fits: more ranks" in capsys.readouterr().out
    asked = ["--grad-dtype", "bf16", "--units", "1000", "--prefetch", "2", "--accumulate", "4", "--state-dtype", "8bit"]
    assert cli.main([*command, "--host-memory", "128", *asked]) == 0
    call, optimizer = capsys.readouterr().out.splitlines()[-2:]
    assert "stage=2, precision='bf16', grad_dtype='bf16', accumulate=4, units=1000, offload=" in call, (
        "nothing is gathered ahead"
    )
    assert optimizer == "of optimizer = shardcore.FusedAdam(model.parameters(), state_dtype='8bit', ...)"
    with pytest.raises(SystemExit):
        cli.main(["estimate", "examples.llama:llama_7b", "--host-memory", "16"])
    assert "without --fit; expected --fit" in capsys.readouterr().err
    for wrong in (["--stage", "2"], ["--offload", "cpu"], ["--json"], ["--ratio", "0.5"], ["--hybrid"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--host-memory", "16", *wrong])
        assert "with --fit; expected --fit alone" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(command)
    assert "without --device-memory or --host-memory" in capsys.readouterr().err
