"""docs/tutorial.md: the first script runs out of memory; the second trains, resumes and exports."""

import re

import pytest
import torch

from tests.support.scripts import ROOT, check_losses_fall, losses_in, run_forked

pytest.importorskip("transformers", reason="the tutorial trains transformers' Llama")

from transformers import LlamaForCausalLM

FOLDER = ROOT / "examples" / "tutorial"
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def after(folder, *arguments):
    return run_forked(FOLDER / "after.py", *arguments, ranks=2, folder=folder)


@pytest.mark.more
def test_plain_torch_runs_out_of_memory(tmp_path):
    run_forked(FOLDER / "before.py", ranks=0, folder=tmp_path, status=1)
    enough = ["--budget", "4096", "--steps", "1"]
    assert losses_in(run_forked(FOLDER / "before.py", *enough, ranks=0, folder=tmp_path))


@pytest.mark.more
def test_it_trains_resumes_and_exports(tmp_path):
    first = after(tmp_path)
    second = after(tmp_path, "--steps", "12", "--export", "exported")
    assert "resumed at step 10" in second
    losses = losses_in(first) + losses_in(second)
    check_losses_fall(losses)
    whole = tmp_path / "whole"
    whole.mkdir()
    assert losses_in(after(whole, "--steps", "12")) == losses
    model = LlamaForCausalLM.from_pretrained(tmp_path / "exported")
    assert sum(p.numel() for p in model.parameters()) == 63_328_768
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_lines_of_the_page_are_in_the_script():
    script = re.sub(r"\s+", "", (FOLDER / "after.py").read_text()).replace(",)", ")")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks[:3]:
        for part in block.split("\n\n"):
            text = re.sub(r"\s+", "", re.sub(r" +#.*", "", part)).replace(",)", ")")
            plain = re.sub(r"#[^\n]*?(?=model=|withtorch)", "", script)
            assert text in script or text in plain, part
