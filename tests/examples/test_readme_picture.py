"""The README's picture and its numbers are those of the committed results."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import readme_picture
from shardcore.version import __version__
from tests.support.scripts import ROOT

README = (ROOT / "README.md").read_text()
SVG = "{http://www.w3.org/2000/svg}"
GIB = 2**30


def texts(path):
    """The texts of an SVG, in order."""
    return [element.text for element in ElementTree.parse(path).iter(f"{SVG}text")]


def result(name):
    return json.loads((readme_picture.RESULTS / f"{name}.json").read_text())


def missing_in(found, panels):
    """Each title, name and number that is not among the texts of a picture."""
    wanted = [
        text for panel in panels for text in [panel.title, panel.note, *panel.bars, *panel.labels()]
    ]
    return [text for text in wanted if text and text not in found]


def test_the_committed_picture_has_the_numbers_of_the_files(monkeypatch, tmp_path):
    assert missing_in(texts(readme_picture.PICTURE), readme_picture.panels()) == []
    other = result("offload_train_1.5b_nvidia_h200")
    other["engines"]["DeepSpeed 2"]["step"]["median"] *= 2
    (tmp_path / "other.json").write_text(json.dumps(other))
    monkeypatch.setattr(readme_picture, "OFFLOAD", tmp_path / "other.json")
    assert missing_in(texts(readme_picture.PICTURE), readme_picture.panels()) == ["1.95 s"]


def test_every_bar_is_measured_and_the_picture_names_the_overlapped_step():
    """`lazy` in the names of the results is overlap_step=True, which is not the default."""
    memory, time, ranks = readme_picture.panels()
    assert all(value > 0 for panel in (memory, time, ranks) for value in panel.bars.values())
    lazy = [name for key, name in readme_picture.ENGINES.items() if "lazy" in key]
    assert lazy == [name for name in memory.bars if name.startswith("shardcore, offload")]
    assert "offload of shardcore: with overlap_step=True" in texts(readme_picture.PICTURE)
    assert {"shardcore", "other libraries"} <= set(texts(readme_picture.PICTURE)), "the legend"


def test_the_committed_picture_is_what_the_script_draws(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="draws the picture")
    readme_picture.draw(tmp_path / "again.svg")
    committed = readme_picture.PICTURE.read_text()
    assert texts(tmp_path / "again.svg") == texts(readme_picture.PICTURE)
    (version,) = re.findall(r"Matplotlib v([\w.]+),", committed)
    if version != matplotlib.__version__:
        pytest.skip(f"drawn by matplotlib {version}; another version draws other bytes")
    assert (tmp_path / "again.svg").read_text() == committed


def test_the_readme_shows_the_picture_and_names_the_numbers_of_the_files():
    assert f"]({readme_picture.PICTURE.relative_to(ROOT)})" in README
    steps = {
        name: engine["time_over_base"]["median"]
        for name, engine in result("train_step_xeon_2cores")["engines"].items()
        if "offload" not in name
    }

    def span(of):
        times = [time for name, time in steps.items() if name.startswith(of)]
        return f"{min(times):.2f} to {max(times):.2f}"

    cells = " | ".join(["1.00", *(span(of) for of in ("FSDP2", "DeepSpeed", "shardcore"))])
    assert f"| {cells} |" in README
    run = result("offload_train_7b_nvidia_h200")
    offload, without = (run["engines"][n] for n in ("shardcore 3, params, lazy", "shardcore 2"))
    device, host = offload["peak_bytes"] / GIB, offload["kept_bytes"]["cpu"] / GIB
    assert (
        f"A {run['numel'] / 1e9:.2f}B GPT trains in {device:.1f} GiB of device memory and "
        f"{host:.1f} GiB of host memory, at {offload['step']['median']:.2f} s per step. Without "
        f"offload a step takes {without['step']['median']:.2f} s and "
        f"{without['peak_bytes'] / GIB:.1f} GiB."
    ) in " ".join(README.split())


def test_the_memory_page_has_the_time_of_each_tier():
    page = (ROOT / "docs" / "memory.md").read_text()
    engines = result("offload_train_7b_nvidia_h200")["engines"]
    rows = {
        "nothing": "shardcore 2",
        "states, `overlap_step=True`": "shardcore 2, optimizer, lazy",
        "states and gradients, `overlap_step=True`": "shardcore 2, gradients, lazy",
        "states and gradients, without `overlap_step`": "shardcore 2, gradients",
        "states, gradients and weights (stage 3), `overlap_step=True`": "shardcore 3, params, lazy",
    }
    for name, key in rows.items():
        seconds, peak = engines[key]["step"]["median"], engines[key]["peak_bytes"] / GIB
        assert f"\n| {name} | {seconds:.2f} | {peak:.1f} |\n" in page
    assert len(rows) == len(engines)


def test_the_comparison_has_yes_no_or_a_number_in_every_cell():
    table = README.partition("## Comparison")[2].partition("\n##")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:1] == "|"][2:]
    cell = r"(yes|no)( \[(\d)\])?|\d\.\d\d( to \d\.\d\d)?"
    assert len(rows) > 10
    assert [
        row for row in rows if len(row) != 5 or not all(re.fullmatch(cell, c) for c in row[1:])
    ] == []
    notes = set(re.findall(r"\[(\d)\] [A-Z`]", table))
    assert set(re.findall(r"(?:yes|no) \[(\d)\]", table)) == notes


def test_one_version():
    """The status in the README, `shardcore --version` and the newest part of the changelog."""
    assert f"**Status:** version {__version__}, not released yet" in README
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert newest.startswith("[Unreleased]")
    assert f"Contents of {__version__}, the first version" in newest
