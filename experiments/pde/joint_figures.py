"""The picture of joint laws: coverage by scale of every problem, and one field's error beside a draw of each law."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.table import Line

COLOURS = {"diagonal": "tab:orange", "errors": "tab:green", "joint": "tab:blue", "spectral": "tab:purple"}
LEFT_OUT = ("total", "integral")


def picture(path: Path, lines: Sequence[Line]) -> Path:
    """Draw the picture.

    Args:
        path: Of the picture.
        lines: Result lines; those with ``shown`` hold an error and a draw.

    Returns:
        The path.
    """
    problems = list(dict.fromkeys(line["problem"] for line in lines))
    shown = {line["law"]: line["shown"] for line in lines if line["law"] in COLOURS and "shown" in line}
    width = max(len(problems), 2 * len(shown), 1)
    figure = Figure(figsize=(2.6 * width, 5.6), dpi=110, layout="constrained")
    rows: Any = figure.subfigures(2, 1)
    above = rows[0].subplots(1, len(problems), squeeze=False, sharey=True)[0]
    for axes, problem in zip(above, problems):
        _coverage(axes, problem, [line for line in lines if line["problem"] == problem and line["law"] in COLOURS])
    above[0].set(ylabel="in calibrated 90 % bands (%)", ylim=(0, 100))
    above[0].legend(fontsize="small", loc="lower left")
    if shown:
        below = rows[1].subplots(1, 2 * len(shown), squeeze=False)[0]
        for index, (law, fields) in enumerate(shown.items()):
            largest = max(abs(value) for part in fields.values() for row in part for value in row)
            for axes, (name, field) in zip(below[2 * index : 2 * index + 2], fields.items()):
                axes.imshow(field, cmap="RdBu_r", vmin=-largest, vmax=largest)
                axes.set(title=f"{law}: {name}", xticks=[], yticks=[])
    figure.savefig(path)
    return path


def _coverage(axes: Any, problem: str, lines: Sequence[Line]) -> None:
    """Coverage by scale, one faint curve per seed and one of their mean."""
    axes.axhspan(85, 95, color="grey", alpha=0.25, lw=0)
    for law, colour in COLOURS.items():
        curves = [_curve(line) for line in lines if line["law"] == law]
        for curve in curves:
            axes.plot(*zip(*curve.items()), color=colour, alpha=0.3, lw=1)
        if curves:
            mean = {name: sum(curve[name] for curve in curves) / len(curves) for name in curves[0]}
            axes.plot(*zip(*mean.items()), color=colour, marker="o", ms=3, label=law)
    axes.set(title=problem, xlabel="side of the block")


def _curve(line: Line) -> dict[str, float]:
    """Coverage in % by the side of a block, as a label."""
    return {
        "1" if name == "cells" else name.split()[-1]: 100 * value
        for name, value in zip(line["scales"], line["covered_90"])
        if value is not None and name not in LEFT_OUT
    }
