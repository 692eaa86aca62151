"""Draw the README's picture from committed results: memory and time of a training step.

    python -m benchmarks.readme_picture        # writes benchmarks/results/training_cost.svg

Needs matplotlib. The SVG keeps its text as text, so tests/examples/test_readme_picture.py compares
the numbers in it with the JSON files.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = RESULTS / "training_cost.svg"
OFFLOAD = RESULTS / "offload_train_1.5b_nvidia_h200.json"
RANKS = RESULTS / "train_step_xeon_2cores.json"
ENGINES = {  # the name in the picture, by the name in OFFLOAD
    "shardcore 2": "shardcore, no offload",
    "DeepSpeed 2": "DeepSpeed, ZeRO-Offload",
    "shardcore 2, gradients, lazy": "shardcore, offload",
    "shardcore 3, params, lazy": "shardcore, offload with weights",
}
STEPS = {  # likewise in RANKS
    "DDP": "DDP (plain torch)",
    "FSDP2 2": "FSDP2, weights kept after forward",
    "FSDP2 3": "FSDP2, weights freed after forward",
    **{f"DeepSpeed {stage}": f"DeepSpeed, ZeRO {stage}" for stage in (1, 2, 3)},
    **{f"shardcore {stage}": f"shardcore, stage {stage}" for stage in (1, 2, 3)},
}


OURS, OTHERS = "tab:blue", "0.7"  # colours


@dataclass(frozen=True)
class Panel:
    """Bars of one unit, by name from the top."""

    title: str
    unit: str
    bars: dict[str, float]
    mark: float | None = None  # a dashed vertical line
    note: str = ""  # below the panel

    def labels(self) -> list[str]:
        """Return the text beside each bar."""
        digits = 1 if self.unit == "GiB" else 2
        return [f"{value:.{digits}f} {self.unit}".strip() for value in self.bars.values()]


def panels() -> list[Panel]:
    """Return memory and time on the H200, and time on two CPU ranks. Reads the JSON files."""
    offload: dict[str, Any] = json.loads(OFFLOAD.read_text())
    ranks: dict[str, Any] = json.loads(RANKS.read_text())
    found, parts = offload["engines"], offload["measured"]
    alone = parts["forward"][0] + parts["backward"][0]
    return [
        Panel(
            "GPU memory: 1.5B GPT, one H200",
            "GiB",
            {name: found[key]["peak_bytes"] / 2**30 for key, name in ENGINES.items()},
            note="offload of shardcore: with overlap_step=True",
        ),
        Panel(
            f"Time per step of {offload['tokens_a_step']:,} tokens: the same runs",
            "s",
            {name: found[key]["step"]["median"] for key, name in ENGINES.items()},
            alone,
            f"dashed: forward and backward alone: {alone:.2f} s",
        ),
        Panel(
            "Time per step, relative to DDP: 26M GPT, two CPU ranks on a 2-core Xeon",
            "",
            {
                name: ranks["engines"][key]["time_over_base"]["median"]
                for key, name in STEPS.items()
            },
            1.0,
        ),
    ]


def draw(path: Path) -> None:
    """Write the picture. The same matplotlib writes the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = panels()
    style = {"svg.fonttype": "none", "svg.hashsalt": "shardcore", "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.5, 5.4), layout="constrained", facecolor="white")
        axes_of = figure.subplot_mosaic(
            [["memory", "time"], ["ranks", "ranks"]],
            height_ratios=[len(drawn[0].bars) + 1, len(drawn[2].bars)],
        )
        for axes, panel in zip(axes_of.values(), drawn, strict=True):
            names = list(panel.bars)
            others = ("DDP", "FSDP2", "DeepSpeed")
            colours = [OTHERS if name.startswith(others) else OURS for name in names]
            bars = axes.barh(names, list(panel.bars.values()), color=colours)
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.bar_label(bars, panel.labels(), padding=4, bbox=behind)
            if panel.mark is not None:
                axes.axvline(panel.mark, color="0.2", linewidth=1, linestyle="--")
            axes.set_xlabel(panel.note)
            axes.invert_yaxis()
            axes.margins(x=0.2 if panel.unit else 0.08)
            axes.set_title(panel.title, fontsize=10, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
        axes_of["time"].set_yticks([])  # the names are beside the panel on its left
        legend = [
            Patch(color=OURS, label="shardcore"),
            Patch(color=OTHERS, label="other libraries"),
        ]
        axes_of["memory"].legend(handles=legend, loc="lower right", fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None})
    lines = path.read_text().splitlines()  # matplotlib leaves spaces at the ends of lines
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


if __name__ == "__main__":
    draw(PICTURE)
    print(f"wrote {PICTURE}")
