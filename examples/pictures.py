"""Pictures, where matplotlib is installed; elsewhere it is said that none is drawn."""

from pathlib import Path
from typing import Any

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError:
    Figure = None


def new_figure(path: Path, width: float, height: float) -> Any:
    """Return an empty figure of so many inches, meant for `path`; None, and say so, where
    matplotlib is missing.
    """
    if Figure is None:
        print(f"no {path.name}: matplotlib is not installed (pip install matplotlib)")
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG, and say so."""
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
