"""Pictures of projected fields: the worst field before and after, and profiles of the first predicted sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from probhard._util.atomic import write_figure
from probhard.cli._projection import FieldProjection
from probhard.cli._stored import StoredLaw
from probhard.io.cells import Cells

if TYPE_CHECKING:
    from probhard.pde.samples import Samples

SUFFIXES = (".png", ".pdf", ".svg")
PANELS, SHOWN_DRAWS = 4, 5  # profiles of a sample, and draws in each of them
Arrays = Mapping[str, np.ndarray]


def before_and_after(path: Path, projection: FieldProjection, results: Arrays) -> None:
    """Draw the mean with the largest violation: as a profile with its band, or as images of a plane."""
    from matplotlib.figure import Figure

    cells, number = projection.data.cells, projection.worst[1]
    before, after = (_event(cells, array, number) for array in (projection.law.mean, results["mean"]))
    profile = before.ndim == 1
    figure = Figure(figsize=(8, 4.5) if profile else (13, 4), dpi=110, layout="constrained")
    names, index = projection.certificate.setting["field_axes"], projection.field_index(number)
    labels = [f"{name} {i}" for name, i in zip(names, index)]
    labels += [f"{name} index {size // 2}" for name, size in zip(cells.order[:-2], cells.shape)]
    where = f" ({', '.join(labels)})" if labels else ""
    lost = "" if np.isfinite(after).any() else "; no feasible field was found"
    figure.suptitle(f"Mean before and after the projection{where}{lost}")
    if profile:
        _draw_profile(figure, projection, results, {"before": before, "after": after})
    else:
        _draw_planes(figure, projection, before, after)
    write_figure(path, figure)


def _draw_profile(figure: Any, projection: FieldProjection, results: Arrays, means: Arrays) -> None:
    """Two lines with their bands."""
    cells, law, number = projection.data.cells, projection.law, projection.worst[1]
    axes, (name,) = figure.add_subplot(), cells.order
    place = projection.data.arrays.get(name, np.arange(cells.shape[0]))
    bands = {}
    if "lower" in results:
        bands["before"] = [_event(cells, array, number) for array in law.band()]
        bands["after"] = [_event(cells, results[side], number) for side in ("lower", "upper")]
    for label, color in (("before", "tab:orange"), ("after", "tab:blue")):
        axes.plot(place, means[label], color=color, lw=1.4, label=label)
        if label in bands:
            band = f"{label}: {law.level:.0%} band"
            axes.fill_between(place, *bands[label], color=color, alpha=0.25, lw=0, label=band)
    axes.set(xlabel=name)
    axes.grid(alpha=0.25)
    axes.legend()


def _draw_planes(figure: Any, projection: FieldProjection, before: np.ndarray, after: np.ndarray) -> None:
    """The middle plane of the last two axes as images, and the change."""
    middle = tuple(size // 2 for size in before.shape[:-2])
    before, after = before[middle], after[middle]
    vertical, horizontal = projection.data.cells.order[-2:]
    arrays = projection.data.arrays
    places = [arrays.get(name, np.arange(n)) for name, n in zip((horizontal, vertical), before.shape[::-1])]
    both, change = np.stack([before, after]), after - before
    values = {"vmin": float(np.nanmin(both)), "vmax": float(np.nanmax(both)), "cmap": "viridis"}
    span = float(np.nanmax(np.abs(change), initial=0.0)) or 1.0
    panels = (
        ("before", before, values),
        ("after", after, values),
        ("after - before", change, {"vmin": -span, "vmax": span, "cmap": "RdBu"}),
    )
    for number, (title, plane, colors) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, 3, number)
        image = axes.pcolormesh(*places, plane, shading="nearest", **colors)
        axes.set(title=title, xlabel=horizontal, ylabel=vertical)
        figure.colorbar(image, ax=axes)


def first_sample(path: Path, samples: Samples, law: StoredLaw, results: Arrays) -> None:
    """Draw profiles of the first sample along the last axis: the network's mean, the projected one and its band."""
    from matplotlib.figure import Figure

    cells, arrays = samples.cells, samples.data.arrays
    profiles = int(np.prod(cells.grid[:-1]))
    chosen = np.unique(np.linspace(0, profiles - 1, min(PANELS, profiles)).round().astype(int))
    figure = Figure(figsize=(max(6.0, 3.4 * len(chosen)), 3.6), dpi=110, layout="constrained")
    figure.suptitle("First sample")
    panels = np.atleast_1d(np.asarray(figure.subplots(1, len(chosen), sharey=True)))
    place = arrays.get(cells.axes[-1], np.arange(cells.grid[-1]))

    def profile(array: np.ndarray, number: int) -> np.ndarray:
        return array[0].reshape(profiles, -1)[number]

    for axes, number in zip(panels, chosen):
        band = [profile(results[side], number) for side in ("lower", "upper")]
        axes.fill_between(place, *band, color="tab:blue", alpha=0.25, lw=0, label=f"{law.level:.0%} band")
        for draw in results["draws"][:SHOWN_DRAWS]:
            axes.plot(place, profile(draw, number), color="tab:blue", lw=0.5, alpha=0.5)
        axes.plot(place, profile(law.mean, number), color="tab:orange", lw=1.2, ls="--", label="network, before")
        axes.plot(place, profile(results["mean"], number), color="tab:blue", lw=1.6, label="mean")
        index = np.unravel_index(number, cells.grid[:-1]) if profiles > 1 else ()
        title = [f"{name} = {f'{arrays[name][i]:.3g}' if name in arrays else i}" for name, i in zip(cells.axes, index)]
        axes.set(title=", ".join(title), xlabel=cells.axes[-1])
        axes.grid(alpha=0.25)
    panels[0].legend()
    write_figure(path, figure)


def _event(cells: Cells, array: np.ndarray, number: int) -> np.ndarray:
    """One event on its own axes, NaN outside the mask."""
    values = np.full(int(np.prod(cells.shape)), np.nan)
    values[slice(None) if cells.inside is None else cells.inside] = cells.gather(array, np.array([number]))[0]
    return values.reshape(cells.shape)
