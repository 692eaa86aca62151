"""What `shardcore estimate --fit` and `offload="auto"` choose for machines of given figures."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from examples.llama import llama_7b
from shardcore import cli
from shardcore.estimate import Prediction, fit, predict

GIB = 2**30
CPU, NVME = {"optimizer": "cpu"}, {"optimizer": "nvme", "path": "DIR"}
GRADIENTS, PARAMS = {"gradients": "cpu"}, {"params": "cpu"}
CARDS = {"16 GB": 14.9, "24 GB": 22.3, "80 GB": 74.5, "141 GB": 131.3}
RATES = fit.Rates(25e9, 25e9, 1e9, 50e9)


@cache
def model() -> torch.nn.Module:
    with torch.device("meta"):
        return llama_7b()


@cache
def predicted(world: int, stage: int, *offload: Any) -> Prediction:
    return predict(
        model(), None, stage, world_size=world, precision="bf16", offload=dict(offload) or None
    )


def considered(
    card: str,
    host_gib: float,
    disk_gib: float,
    world: int,
    stage: int | None,
    rates: fit.Rates = RATES,
) -> list[fit.Candidate]:
    device = int(CARDS[card] * GIB)
    machine = fit.Machine(
        device, device // 10, int(host_gib * GIB), int(disk_gib * GIB), min(world, 8)
    )
    of = lambda stage, offload: predicted(world, stage, *(offload or {}).items())  # noqa: E731
    return fit.fit(machine, rates, world, of, stage)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("card", "host_gib", "disk_gib", "world", "stage", "expected"),
    [
        ("141 GB", 64, 0, 1, None, (2, None)),
        ("80 GB", 128, 0, 1, None, (2, CPU | GRADIENTS)),
        ("80 GB", 128, 0, 1, 0, (0, CPU)),
        # too little for gradients beside the states, and for all states
        ("80 GB", 35, 0, 1, None, (2, CPU)),
        ("24 GB", 128, 0, 1, None, (3, CPU | GRADIENTS | PARAMS)),
        ("24 GB", 128, 0, 1, 2, (2, CPU | GRADIENTS)),
        ("24 GB", 64, 200, 1, None, (2, NVME | GRADIENTS)),
        ("24 GB", 64, 0, 1, None, None),
        ("24 GB", 64, 0, 8, None, (3, None)),
        ("16 GB", 16, 400, 8, None, (3, NVME)),
    ],
)
def test_the_fewest_milliseconds_that_fit(
    card: str, host_gib: float, disk_gib: float, world: int, stage: int | None, expected: Any
) -> None:
    found = considered(card, host_gib, disk_gib, world, stage)
    best = fit.chosen_of(found)
    assert (None if best is None else (best.stage, best.offload)) == expected
    if best is not None and best.offload is not None and not best.on_disk:
        assert best.argument == {
            **best.offload,
            "ratio": best.ratio if host_gib == 35 else "auto",
        }, "which starts as 1"
    assert fit.table(found).count("chosen") == (best is not None)
    for one in found:
        assert one.lacks or best is None or one.milliseconds >= best.milliseconds
        device = one.prediction.resting.by_tier["device"] + int(CARDS[card] * GIB) // 10
        assert ("device" in one.lacks) == (device > CARDS[card] * GIB)


def test_rates_decide_between_placements_that_fit() -> None:
    """Of a slow link the fewest bytes count, of a slow CPU the fewest elements there."""
    for rates, expected in (
        (replace(RATES, to_host=2e9, from_host=2e9), CPU | GRADIENTS),
        (replace(RATES, adam=1e8), None),
    ):
        best = fit.chosen_of(considered("80 GB", 128, 0, 1, 3, rates))
        assert best is not None
        assert best.offload == (expected or CPU | GRADIENTS | PARAMS)
        assert best.argument == {**best.offload, "ratio": "auto"}


def test_a_byte_too_few_is_too_few() -> None:
    def found(device: int, host: int) -> fit.Candidate:
        predicted = lambda stage, offload: predict(  # noqa: E731
            model, None, stage, world_size=4, precision="bf16", offload=offload
        )
        return fit.fit(fit.Machine(device, 1000, host, 0, 2), RATES, 4, predicted, 3)[1]

    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, device="meta") for _ in range(6)))
    tight = predict(
        model, None, 3, world_size=4, precision="bf16", offload=CPU | {"ratio": 0.5}
    ).resting.by_tier
    device, host = tight["device"] + 1000, 2 * tight["cpu"]
    fits = found(device, host)
    assert (fits.stage, fits.offload, fits.ratio, fits.lacks) == (3, CPU, 0.5, "")
    assert found(device - 1, 10 * host).ratio > 0.5
    assert found(device, host - 1).lacks.startswith("host")


@pytest.mark.more
def test_the_table_and_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "examples.llama:llama_7b", "--fit", "--device-memory", "22.3"]
    assert cli.main([*command, "--host-memory", "128"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(
        "model, optimizer = shardcore.shard(model, optimizer, stage=3, precision='bf16', offload={'optimizer': 'cpu', "
        "'gradients': 'cpu', "
        "'params': 'cpu', 'ratio': 'auto'}, overlap_step=True)\n"
    )
    assert "device 102.6 of 22.3 GiB" in said
    assert cli.main([*command, "--host-memory", "16", "--state-dtype", "8bit"]) == 1
    said = capsys.readouterr().out
    assert "nothing fits: add ranks" in said
    assert "  does not fit  " in said
    activations = ["--batch", "1", "--seq-len", "2048"]
    command[-1] = "58"
    assert cli.main([*command, "--host-memory", "0.1", *activations]) == 0
    *_, name, optimizer, checkpoints, call = capsys.readouterr().out.splitlines()
    assert name == "fits with master='split', state_dtype='8bit', checkpointing:"
    assert optimizer == (
        "optimizer = shardcore.FusedAdam(model.parameters(), master='split', state_dtype='8bit')"
    )
    assert checkpoints == "shardcore.apply_activation_checkpointing(model)"
    assert call.endswith("stage=2, precision='bf16')")
    command[-1] = "22.3"
    asked = [
        "--grad-dtype",
        "bf16",
        "--units",
        "1000",
        "--prefetch",
        "2",
        "--accumulate",
        "4",
        "--state-dtype",
        "8bit",
        "--link",
        "10",
    ]
    assert cli.main([*command, "--host-memory", "128", "--stage", "2", *asked]) == 0
    optimizer, call = capsys.readouterr().out.splitlines()[-2:]
    assert (
        "stage=2, precision='bf16', grad_dtype='bf16', accumulate=4, units=1000, offload=" in call
    ), "nothing is gathered ahead"
    assert optimizer == ("optimizer = shardcore.FusedAdam(model.parameters(), state_dtype='8bit')")
    with pytest.raises(SystemExit):
        cli.main(["estimate", "examples.llama:llama_7b", "--host-memory", "16"])
    assert "without --fit; expected --fit" in capsys.readouterr().err
    for wrong in (["--offload", "cpu"], ["--json"], ["--ratio", "0.5"], ["--hybrid"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--host-memory", "16", *wrong])
        assert "with --fit; expected --fit alone" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*command, "--host-memory", "16", "--link", "0"])
    assert "expected a number above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(command)
    assert "without --device-memory or --host-memory" in capsys.readouterr().err
