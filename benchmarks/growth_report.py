"""The lines of ``growth`` as a page of tables and a picture.

    seconds ~ size^exponent,

fitted by least squares of log seconds (forward and backward) on log size over the upper two decades.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from experiments.records import Records

from benchmarks.growth_cases import AXES, KEYS, Case, cases
from experiments import templates

Line = Mapping[str, Any]

PAGE = Path(__file__).parent / "pages" / "growth.md"
DECADES = 2.0  # over which exponents are fitted
ROOM = 0.15  # by which an exponent may exceed the one that the structure allows
HEAD = "| case | largest | forward s | backward s | setup s | peak MB | violation | exponent | of setup | verdict |"


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of log seconds over log size in the upper two decades; NaN below three sizes.

    Args:
        sizes: In any order.
        seconds: Of each size.
    """
    upper = [(math.log(n), math.log(s)) for n, s in zip(sizes, seconds) if n * 10**DECADES >= max(sizes) * 0.999]
    if len(upper) < 3:
        return math.nan
    logs = np.array(upper)
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def series(lines: Sequence[Line], axis: str) -> Iterator[tuple[Case, list[Line]]]:
    """Yield each case of an axis with its lines, in the order of their sizes.

    Args:
        lines: Result lines of ``growth``.
        axis: A name in ``AXES``.
    """
    for case in cases():
        own = [line for line in lines if (line["case"], line["axis"]) == (case.name, case.axis) and axis == case.axis]
        if own:
            yield case, sorted(own, key=lambda line: line["size"])


def total(line: Line) -> float:
    """Return the seconds of forward and backward together."""
    return float(line["seconds"] + line["seconds_backward"])


def render(lines: Sequence[Line]) -> str:
    """Return the page: for each axis, the largest sizes, the exponents, and whether they are allowed.

    Args:
        lines: Result lines of ``growth``.
    """
    above, parts = [], []
    for axis, what in AXES.items():
        rows = []
        for case, own in series(lines, axis):
            slope = _slope(own)
            if slope > case.allowed + ROOM:
                above.append(f"{case.name} ({slope:.2f}, allowed {case.allowed:g})")
            rows.append(_row(case, own))
        parts.append("\n".join([f"## With the {what}", "", HEAD, "|---|" + "---:|" * 8 + "---|", *rows]))
    values = {"above": ", ".join(above) or "none", "decades": DECADES, "axes": "\n\n".join(parts)}
    return templates.fill(PAGE, values)


def _row(case: Case, lines: Sequence[Line]) -> str:
    """The row of a case, given its lines in the order of their sizes."""
    last, slope = lines[-1], _slope(lines)
    setup = exponent([line["size"] for line in lines], [max(1e-6, line["setup_seconds"]) for line in lines])
    verdict = "in order" if slope <= case.allowed + ROOM else f"above {case.allowed:g}"
    if last["size"] < case.sizes[-1]:
        verdict += f"; stopped, {total(last):.0f} s"
    memory = "-" if last["memory"] is None else f"{last['memory'] / 1e6:.0f}"
    numbers = f"{last['seconds']:.3g} | {last['seconds_backward']:.3g} | {last['setup_seconds']:.3g} | {memory}"
    slopes = f"{last['violation']:.1e} | {slope:.2f} | {setup:.2f}"
    return f"| {case.name} | {last['size']:,} | {numbers} | {slopes} | {verdict} |"


def _slope(lines: Sequence[Line]) -> float:
    return exponent([line["size"] for line in lines], [total(line) for line in lines])


def plot(lines: Sequence[Line], path: Path) -> None:
    """Write a picture of seconds over size, one panel per axis, with lines of slope 1, and 2 for rows.

    Args:
        lines: Result lines of ``growth``.
        path: Of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6.4), layout="constrained")
    for axes, (axis, what) in zip(figure.subplots(1, len(AXES)), AXES.items()):
        axes.set(xlabel=what, title=f"Cost against {what}", ylabel="processor seconds, forward and backward")
        axes.grid(alpha=0.25)
        shown = list(series(lines, axis))
        for k, (case, own) in enumerate(shown):
            style = {"marker": "osD^vP*X"[k % 8], "linestyle": ("-", "--")[k // 8 % 2], "color": f"C{k % 10}"}
            axes.loglog([x["size"] for x in own], [total(x) for x in own], label=case.name, markersize=5, **style)
        if not shown:
            continue
        low, high = axes.get_xlim()
        ends = np.array([(low * high**3) ** 0.25, high / 1.5])
        for slope in (1, 2) if axis == "q" else (1,):
            height = axes.get_ylim()[0] * 2
            axes.loglog(ends, height * (ends / ends[0]) ** slope, color="0.6", linewidth=3, alpha=0.6, zorder=0)
            axes.annotate(f"slope {slope}", (ends[1], height * (ends[1] / ends[0]) ** slope), ha="right", va="bottom")
        axes.legend(fontsize=8, loc="upper left", framealpha=0.9)
        axes.set_ylim(top=axes.get_ylim()[1] * 30)  # room for the legend
    figure.savefig(path, dpi=110)


def write(folder: Path) -> None:
    """Write page and picture of the lines in a folder."""
    lines = Records(folder / "growth.jsonl", KEYS).read()
    (folder / "growth.md").write_text(render(lines))
    plot(lines, folder / "growth.png")
