"""Profiles near the front, one panel per method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.table import Line


def profiles(path: Path, lines: Sequence[Line], title: str, methods: Sequence[str], time: float) -> Path:
    """Mean and 3 standard deviations near the front, one panel per method, of lines that hold a profile.

    All panels share seed and number of epochs: those with the most methods, then the most epochs, then the first seed.

    Args:
        path: Of the picture.
        lines: Result lines with the field ``profile``.
        title: Of the figure, without time and epochs.
        methods: Rows to show, from left to right.
        time: Of profiles that do not say theirs.

    Returns:
        The path.
    """
    alike: dict[tuple[int, int], dict[str, Line]] = {}
    for line in lines:
        alike.setdefault((line["epochs"], -line["seed"]), {})[line["method"]] = line
    (epochs, _), by_method = max(alike.items(), key=lambda item: (len(item[1]), item[0]))
    shown = [method for method in methods if method in by_method]
    figure = Figure(figsize=(3.4 * len(shown), 6.4), dpi=110, layout="constrained")
    axes = figure.subplots(2, len(shown), squeeze=False, sharey="row")
    for column, method in enumerate(shown):
        curve = by_method[method]["profile"]
        exact, mean, spread = curve["exact"], curve["mean"], curve["stddev"]
        grid = [index / (len(exact) - 1) for index in range(len(exact))]
        front = _front(exact)
        floor = -float("inf") if curve["negative"] else 0.0  # no band where no draw is
        ceiling = float("inf") if by_method[method]["outside_bounds"] else max(exact)
        low = [max(m - 3 * s, floor) for m, s in zip(mean, spread)]
        high = [min(m + 3 * s, ceiling) for m, s in zip(mean, spread)]
        above, below = axes[0][column], axes[1][column]
        above.fill_between(grid, low, high, alpha=0.3, lw=0, label="3 std. dev. of the draws, within their range")
        above.plot(grid, mean, ls="--", label="mean")
        above.plot(grid, exact, color="black", lw=1, label="exact")
        above.axhline(0, color="grey", lw=0.5)
        above.set(
            title=f"{method}\n{100 * curve['negative']:.1f} % of values negative", xlim=(front - 0.2, front + 0.2)
        )
        below.plot(grid, spread)
        below.set(xlabel="x", xlim=(front - 0.2, front + 0.2))
    axes[0][0].set(ylabel="u")
    axes[1][0].set(ylabel="standard deviation of the draws", ylim=(0, None))  # once all panels are drawn
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    time = by_method[shown[0]]["profile"].get("time", time)
    figure.suptitle(f"{title}, t = {time:.3f}; {epochs} epochs")
    figure.savefig(path)
    return path


def _front(exact: Sequence[float]) -> float:
    """Where a falling profile has lost half its height."""
    half = max(exact) / 2
    return next((index for index, value in enumerate(exact) if value < half), len(exact)) / (len(exact) - 1)
