"""Pooled coverage of 80 % intervals by group of levels, of independent and joint laws: one panel per base forecast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.forecasting.joint_laws import GROUPS
from experiments.forecasting.joint_measures import LEVEL
from experiments.forecasting.joint_statistics import Row, coverage
from experiments.forecasting.joint_tables import KINDS, RANGE, rows_of
from experiments.table import Line

LOOKS = {  # law and calibration: colour and marker
    ("independent", False): ("tab:red", "o"),
    ("independent", True): ("tab:orange", "s"),
    ("joint", False): ("tab:cyan", "o"),
    ("joint", True): ("tab:blue", "s"),
}


def draw(path: Path, lines: Sequence[Line]) -> Path:
    """Draw the picture.

    Args:
        path: Of the picture.
        lines: Result lines of the table.

    Returns:
        The path.
    """
    there = rows_of(lines)
    bases = list(dict.fromkeys(row.base for row in there))
    figure = Figure(figsize=(2.7 * len(bases), 5.6), dpi=110, layout="constrained")
    axes = figure.subplots(len(KINDS), len(bases), squeeze=False, sharey=True)
    for down, (field, kind) in enumerate(KINDS.items()):
        for across, base in enumerate(bases):
            panel = axes[down][across]
            panel.axhspan(100 * RANGE[0], 100 * RANGE[1], color="0.9", lw=0)
            panel.axhline(100 * LEVEL, color="0.5", lw=0.8)
            for number, ((law, calibrated), (colour, marker)) in enumerate(LOOKS.items()):
                row = Row(base, law, calibrated)
                if row not in there:
                    continue
                found = [coverage(lines, [row], group, field) for group in GROUPS]
                at = [place + 0.16 * (number - 1.5) for place in range(len(GROUPS))]
                below = [100 * (one.value - one.low) for one in found]
                above = [100 * (one.high - one.value) for one in found]
                values = [100 * one.value for one in found]
                label = f"{law}{', calibrated' if calibrated else ''}"
                panel.errorbar(at, values, (below, above), fmt=marker, ms=4, color=colour, capsize=2, label=label)
            panel.set_xticks(range(len(GROUPS)), GROUPS)
            panel.set(ylim=(0, 103), title=base if down == 0 else "")
        axes[down][0].set(ylabel=f"coverage of {kind}, %")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"Central {100 * LEVEL:.0f} % intervals, mean over data sets, with block-bootstrap intervals")
    figure.savefig(path)
    return path
