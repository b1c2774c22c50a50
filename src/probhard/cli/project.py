"""``probhard project``: the fields of an already trained model in, feasible ones and a certificate out."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from probhard.cli.certificate import Certificate, check_path, conclude, sha256
from probhard.cli.stored import Job, Law
from probhard.errors import ParameterError
from probhard.io.fields import Cells, read_fields, write_npz
from probhard.io.spec import Data, cells_from, read_spec
from probhard.projection.layer import DPPL

PICTURES = (".png", ".pdf", ".svg")


def project(
    fields: Annotated[Path, typer.Argument(help="An .npz, .zarr or HDF5 file of means, bands or draws.")],
    constraints: Annotated[Path, typer.Option(help="A YAML file that names the constraints.")],
    metric: Annotated[
        str | None, typer.Option(help="oblique (by variances; the default where there are any) or orthogonal.")
    ] = None,
    draws: Annotated[int, typer.Option(min=2, help="Draws of each field, where the input has none.")] = 100,
    output: Annotated[Path | None, typer.Option(help="Default: NAME-projected.npz beside the input.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    grid_dims: Annotated[
        int | None, typer.Option(min=1, max=3, help="Space axes of the grid, where coordinates do not tell.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="A picture of the worst field before and after.")] = None,
) -> None:
    """Make a trained model's fields feasible, certified."""
    path = fields.with_name(f"{fields.stem}-projected.npz") if output is None else output
    check_path(path, "--output", (".npz",), fields)
    if figure is not None:
        check_path(figure, "--figure", PICTURES, fields)
    arrays, spec = read_fields(fields), read_spec(constraints)
    law = Law.of(arrays)
    cells = cells_from(spec, arrays, law.mean.shape, grid_dims)
    law.check(cells)
    chosen = metric or ("orthogonal" if law.stddev is None else "oblique")
    if chosen == "oblique" and law.stddev is None:
        raise ParameterError(
            "--metric oblique got fields without variances.",
            "It moves uncertain cells more than certain ones.",
            "Add 'stddev' to the file, or use --metric orthogonal.",
        )
    source = {"input": fields.name, "input_sha256": sha256(fields), "constraints": constraints.read_text("utf-8")}
    names = ["batch"] * len(cells.batch) + list(cells.per)
    certificate = Certificate(
        {
            **source,
            "metric": chosen,
            "seed": seed,
            "fields": cells.fields,
            "cells": cells.variables,
            "field_axes": names,
        }
    )
    generator = torch.Generator().manual_seed(seed)
    job = Job(law, spec, Data(cells, arrays), DPPL(chosen, on_failure="flag"), certificate, generator)
    with tempfile.TemporaryDirectory(prefix=".probhard-", dir=path.parent) as scratch:
        results = job.run(draws, Path(scratch))
        if "variance" in arrays and "stddev" in results:
            results["variance"] = np.square(results["stddev"])
        write_npz(path, {**arrays, **results})
        if figure is not None:
            picture(figure, job, results)
    conclude(certificate, path, f"{certificate.table()}\nFields: {path}")


def picture(path: Path, job: Job, results: dict[str, np.ndarray]) -> None:
    """The field that was furthest from feasible, before and after: a profile with its band, or a plane as images."""
    from matplotlib.figure import Figure

    cells, law, number = job.data.cells, job.law, job.worst[1]
    before, after = (_event(cells, array, number) for array in (law.mean, results["mean"]))
    flat = before.ndim == 1
    drawing = Figure(figsize=(8, 4.5) if flat else (13, 4), dpi=110, layout="constrained")
    where = ", ".join(f"{name} {i}" for name, i in zip(job.certificate.setting["field_axes"], job.number(number)))
    lost = "; no feasible field was found" if not np.isfinite(after).any() else ""
    middle = ", ".join(f"{name} index {size // 2}" for name, size in zip(cells.order[:-2], cells.shape))
    where = ", ".join(filter(None, (where, middle)))
    drawing.suptitle(f"Mean before and after the projection{' (' + where + ')' if where else ''}{lost}")
    (draw_profile if flat else draw_planes)(drawing, job, results, before, after)
    drawing.savefig(path)


def draw_profile(drawing: Any, job: Job, results: dict[str, np.ndarray], before: np.ndarray, after: np.ndarray) -> None:
    """Two lines with their bands."""
    cells, law, number = job.data.cells, job.law, job.worst[1]
    axes, (name,) = drawing.add_subplot(), cells.order
    place = job.data.arrays.get(name, np.arange(cells.shape[0]))
    bands = {}
    if "lower" in results:
        bands["before"] = [_event(cells, array, number) for array in law.band()]
        bands["after"] = [_event(cells, results[side], number) for side in ("lower", "upper")]
    for label, mean, color in (("before", before, "tab:orange"), ("after", after, "tab:blue")):
        axes.plot(place, mean, color=color, lw=1.4, label=label)
        if label in bands:
            band = f"{label}: {law.level:.0%} band"
            axes.fill_between(place, *bands[label], color=color, alpha=0.25, lw=0, label=band)
    axes.set(xlabel=name)
    axes.grid(alpha=0.25)
    axes.legend()


def draw_planes(drawing: Any, job: Job, results: dict[str, np.ndarray], before: np.ndarray, after: np.ndarray) -> None:
    """The middle plane of the last two axes as images, and what was changed."""
    middle = tuple(size // 2 for size in before.shape[:-2])
    before, after = before[middle], after[middle]
    up, across = job.data.cells.order[-2:]
    places = [job.data.arrays.get(name, np.arange(n)) for name, n in zip((across, up), before.shape[::-1])]
    both = np.stack([before, after])
    low, high = float(np.nanmin(both)), float(np.nanmax(both))
    change = after - before
    span = float(np.nanmax(np.abs(change), initial=0.0)) or 1.0
    kinds = (("before", before, low, high, "viridis"), ("after", after, low, high, "viridis"))
    for place, (label, plane, bottom, top, colors) in enumerate(
        (*kinds, ("after - before", change, -span, span, "RdBu"))
    ):
        axes = drawing.add_subplot(1, 3, 1 + place)
        image = axes.pcolormesh(*places, plane, vmin=bottom, vmax=top, cmap=colors, shading="nearest")
        axes.set(title=label, xlabel=across, ylabel=up)
        drawing.colorbar(image, ax=axes)


def _event(cells: Cells, array: np.ndarray, number: int) -> np.ndarray:
    """One event on its own axes, NaN outside the mask."""
    whole = np.full(int(np.prod(cells.shape)), np.nan)
    whole[slice(None) if cells.inside is None else cells.inside] = cells.gather(array, np.array([number]))[0]
    return whole.reshape(cells.shape)
