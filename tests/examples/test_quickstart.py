"""Every script of examples/quickstart, on CPUs: losses fall, and equal trainings are equal.

Ranks are forked: tests/launch and test_train_gpt.py start programs by `shardcore run` and torchrun.
"""

import difflib
import json
import re
import signal
from functools import cache

import pytest

from tests.support.scripts import (
    ROOT,
    check_losses_fall,
    environment,
    losses_in,
    run_forked,
    to_digits,
)

FOLDER = ROOT / "examples" / "quickstart"
CONFIG = ["--deepspeed", "--deepspeed_config", str(FOLDER / "ds_config.json")]
TORCHRUN, EIGHT_RANKS, SHARDCORE_RUN, PYTHON = (
    "torchrun --nproc-per-node 2",
    "torchrun --nproc-per-node 8",
    "shardcore run",
    "python",
)
# four: one replica of the two that eight are
RANKS = {TORCHRUN: 2, SHARDCORE_RUN: 2, EIGHT_RANKS: 4, PYTHON: 0}
# The script, its arguments, how it is started, the packages that it needs.
SCRIPTS = {
    "ddp.py": ([], TORCHRUN, []),
    "ddp_to_shardcore.py": ([], TORCHRUN, []),
    "zero.py": (["--stage", "3", "--precision", "bf16"], TORCHRUN, []),
    "long_sequences.py": ([], TORCHRUN, []),
    "unfreeze.py": ([], TORCHRUN, []),
    "ema.py": ([], TORCHRUN, []),
    "pipeline.py": ([], TORCHRUN, []),
    "three_dimensions.py": ([], EIGHT_RANKS, []),
    "sequence_parallel.py": ([], TORCHRUN, ["transformers"]),
    "tensor_parallel.py": ([], TORCHRUN, ["transformers"]),
    "offload_one_gpu.py": ([], PYTHON, []),
    "nvme_resume.py": ([], PYTHON, []),
    "deepspeed_script.py": (CONFIG, SHARDCORE_RUN, []),
    "fairscale_script.py": (["--fully-sharded"], TORCHRUN, []),
    "hf_trainer.py": ([], TORCHRUN, ["transformers", "accelerate"]),
    "trl_sft_lora.py": ([], TORCHRUN, ["trl", "peft"]),
    "accelerate_loop.py": ([], TORCHRUN, ["accelerate"]),
    "lightning_trainer.py": (["--devices", "2"], PYTHON, ["lightning"]),
    "fsdp2_cpu_adam.py": (["--offload"], TORCHRUN, []),
}
NOTEBOOK = FOLDER / "notebook.ipynb"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that runs a script of the folder, once for all tests, and returns its losses."""
    folder = tmp_path_factory.mktemp("quickstart")

    @cache
    def losses_of(name: str, *arguments: str) -> list[str]:
        return losses_in(
            run_forked(FOLDER / name, *arguments, ranks=RANKS[SCRIPTS[name][1]], folder=folder)
        )

    return losses_of


def code_of(name: str) -> list[str]:
    """Return the lines of a script after its docstring."""
    return (FOLDER / name).read_text().split('"""', 2)[2].strip("\n").splitlines()


def test_every_script_is_run_and_listed():
    assert {path.name for path in FOLDER.glob("*.py")} == set(SCRIPTS)
    listed = set(
        re.findall(r"`(\w+\.(?:py|json|ipynb))`", (ROOT / "examples" / "README.md").read_text())
    )
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == listed - {
        "train_gpt.py",
        "test_recipes.py",
        "test_tutorial.py",
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_short_and_say_how_to_start_them(name):
    text = (FOLDER / name).read_text()
    assert len(text.splitlines()) <= 85
    arguments, how, _ = SCRIPTS[name]
    command = " ".join([how, name, *arguments]).replace(f"{FOLDER}/", "")
    assert command.removesuffix(" --precision bf16") in text.split('"""')[1]


def test_losses_that_do_not_fall_are_seen():
    for losses in (["5.5"] * 20, ["5.5"] * 9 + ["5.0"], ["5.5", "1.0"]):
        with pytest.raises(AssertionError):
            check_losses_fall(losses)


@pytest.mark.more
@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_fall(name, trained):
    arguments, _, packages = SCRIPTS[name]
    for package in packages:
        pytest.importorskip(package, reason=f"{name} needs {package}")
    check_losses_fall(trained(name, *arguments))


@pytest.mark.more
def test_shardcore_has_the_losses_of_ddp(trained, tmp_path):
    assert to_digits(trained("ddp_to_shardcore.py")) == to_digits(trained("ddp.py"))
    text = (FOLDER / "ddp_to_shardcore.py").read_text()
    sharding = "model, optimizer = shardcore.shard(model, optimizer, stage=2)\n"
    assert text.count(sharding) == 1
    (tmp_path / "alone.py").write_text(text.replace(sharding, ""))
    apart = losses_in(run_forked(tmp_path / "alone.py", ranks=2, folder=tmp_path))
    assert to_digits(apart) != to_digits(trained("ddp.py")), "else the test could not fail"


@pytest.mark.more
def test_fsdp2_offloaded_has_the_losses_of_ddp(trained):
    assert to_digits(trained("fsdp2_cpu_adam.py", "--offload")) == to_digits(trained("ddp.py"))


@pytest.mark.more
def test_a_killed_training_on_disk_has_the_losses_of_one_that_is_not(trained, tmp_path):
    script = FOLDER / "nvme_resume.py"
    killed = run_forked(
        script, "--kill-after", "7", ranks=0, folder=tmp_path, status=-signal.SIGKILL
    )
    went_on = run_forked(script, ranks=0, folder=tmp_path)
    assert "going on from step 6" in went_on
    assert losses_in(killed)[:6] + losses_in(went_on) == trained("nvme_resume.py")


def test_the_notebook_is_stripped():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.more
def test_the_notebook_trains(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="the notebook is run by nbclient")
    nbclient = pytest.importorskip("nbclient", reason="the notebook is run by nbclient")
    pytest.importorskip(
        "ipykernel", reason="the notebook is run by nbclient, in a kernel of ipykernel"
    )
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3")
    client.execute(cwd=str(tmp_path), env=environment())
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    check_losses_fall(losses_in(printed))


def test_the_page_shows_the_difference_that_there_is():
    files = ("ddp.py", "ddp_to_shardcore.py")
    page = (ROOT / "docs" / "recipes" / "ddp_in_three_lines.md").read_text()
    (shown,) = re.findall(r"^```diff\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    assert shown == "\n".join(
        difflib.unified_diff(*map(code_of, files), *files, lineterm="", n=1)
    ).rstrip("\n")
    statements = [line for line in shown.splitlines() if re.match(r"[-+](?![-+])\S", line)]
    # two lines go, two come: an import and a call for an import and a call
    assert len(statements) == 4
