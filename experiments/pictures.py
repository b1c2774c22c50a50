"""Pictures of tables: one palette, and axes without a frame above and on the right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, GREEN, ORANGE, PURPLE, GREY = "#2a78d6", "#1baf7a", "#eb6834", "#8a4fd3", "#9aa5b1"


def save(figure: Figure, path: Path) -> None:
    """Write a finished figure.

    Args:
        figure: All its panels lose their upper and right sides.
        path: The file.
    """
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
