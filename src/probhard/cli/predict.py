"""``probhard predict``: parameters or inputs of new samples in, fields with bands and draws out, and a certificate."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from probhard.cli.certificate import Certificate, check_path, conclude, sha256
from probhard.cli.project import PICTURES
from probhard.cli.stored import BUDGET, Job, Law
from probhard.cli.train import CONFIG, GRID, MODEL, TRAINED_ON
from probhard.errors import ParameterError
from probhard.io.fields import read_fields, write_npz
from probhard.io.spec import read_spec
from probhard.model import ConstrainedModel
from probhard.pde.samples import Samples
from probhard.pde.surrogate import Settings, Surrogate
from probhard.projection.layer import DPPL

PANELS, SHOWN = 4, 5  # profiles in the picture, and draws in each of them


def predict(
    run: Annotated[Path, typer.Argument(help="The folder that 'probhard train' wrote.")],
    inputs: Annotated[Path, typer.Argument(help="Parameters or inputs, and what the constraints need by name.")],
    draws: Annotated[int, typer.Option(min=2, help="Draws of each field.")] = 100,
    output: Annotated[Path | None, typer.Option(help="Default: NAME-predicted.npz beside the inputs.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    figure: Annotated[Path | None, typer.Option(help="A picture of the first sample with its bands.")] = None,
) -> None:
    """Predict fields with a trained run, certified."""
    import yaml

    path = inputs.with_name(f"{inputs.stem}-predicted.npz") if output is None else output
    check_path(path, "--output", (".npz",), inputs)
    if figure is not None:
        check_path(figure, "--figure", PICTURES, inputs)
    samples, model = _trained(run, inputs)
    cells, step = samples.cells, model.method.inference
    source = {"input": inputs.name, "input_sha256": sha256(inputs), "model_sha256": sha256(run / MODEL)}
    names = yaml.safe_dump(dict(samples.spec), sort_keys=False)
    setting = {**source, "constraints": names, "metric": step.metric, "seed": seed}
    axes = ["sample", *cells.per]
    certificate = Certificate({**setting, "fields": cells.fields, "cells": cells.variables, "field_axes": axes})
    generator = torch.Generator().manual_seed(seed)
    law = _law(model, samples)
    assert step.metric is not None
    job = Job(law, samples.spec, samples.data, DPPL(step.metric, on_failure="flag"), certificate, generator)
    with tempfile.TemporaryDirectory(prefix=".probhard-", dir=path.parent) as scratch:
        results = job.run(draws, Path(scratch))
        write_npz(path, {**samples.data.arrays, **results})
        if figure is not None:
            _picture(figure, samples, law, results)
    conclude(certificate, path, f"{certificate.table()}\nFields: {path}")


def _trained(run: Path, inputs: Path) -> tuple[Samples, ConstrainedModel]:
    """The samples to predict, and the model of a run for their grid."""
    missing = [name for name in (CONFIG, GRID, MODEL) if not (run / name).is_file()]
    if missing:
        raise ParameterError(
            f"{run} has no {' and no '.join(missing)}.",
            "A run is complete when its model is written.",
            "Run 'probhard train' again with the same arguments to finish it, or check the path.",
        )
    content = read_spec(run / CONFIG, "configuration")
    known = content.pop(TRAINED_ON, None) if isinstance(content, dict) else None
    if not isinstance(known, dict) or not {"grid", "channels", "file"} <= set(known):
        raise ParameterError(
            f"{run / CONFIG} does not say what the run was trained on.",
            "'probhard train' writes that down; the file was changed or is not its own.",
            "Restore it, or train again.",
        )
    spec, settings = Settings.read(content)
    samples = Samples.unsolved({**read_fields(run / GRID), **read_fields(inputs)}, spec, known["grid"])
    channels, axes = samples.inputs.shape[1], len(samples.cells.axes)
    if channels != known["channels"]:
        raise ParameterError(
            f"{inputs} has {channels - axes} parameters and input fields, the run {known['channels'] - axes}.",
            "The network takes those that it was trained on.",
            f"Bring the same parameters and inputs, in the order of {known['file']}.",
        )
    return samples, Surrogate.read(run / MODEL, settings, samples)


@torch.no_grad()
def _law(model: ConstrainedModel, samples: Samples) -> Law:
    """What the network predicts, before it is projected."""
    cells = samples.cells
    mean, stddev = (np.full(cells.batch + cells.grid, np.nan) for _ in range(2))
    size = max(1, BUDGET // samples.inputs[0].size)
    for part in np.array_split(np.arange(len(samples)), -(-len(samples) // size)):
        law: Any = model.backbone(samples.batch(part).inputs)
        for array, values in ((mean, law.mean), (stddev, law.stddev)):
            cells.scatter(array, samples.events(part), values.numpy())
    return Law(mean, stddev)


def _picture(path: Path, samples: Samples, law: Law, results: dict[str, np.ndarray]) -> None:
    """Profiles of the first sample along the last axis: the network's mean, and the projected one with its band."""
    from matplotlib.figure import Figure

    cells = samples.cells
    lines = int(np.prod(cells.grid[:-1]))
    chosen = np.unique(np.linspace(0, lines - 1, min(PANELS, lines)).round().astype(int))
    drawing = Figure(figsize=(max(6.0, 3.4 * len(chosen)), 3.6), dpi=110, layout="constrained")
    drawing.suptitle("First sample")
    panels = np.atleast_1d(np.asarray(drawing.subplots(1, len(chosen), sharey=True)))
    place = samples.data.arrays.get(cells.axes[-1], np.arange(cells.grid[-1]))

    def profile(array: np.ndarray, number: int) -> np.ndarray:
        return array[0].reshape(lines, -1)[number]

    for axes, number in zip(panels, chosen):
        band = [profile(results[side], number) for side in ("lower", "upper")]
        axes.fill_between(place, *band, color="tab:blue", alpha=0.25, lw=0, label=f"{law.level:.0%} band")
        for draw in results["draws"][:SHOWN]:
            axes.plot(place, profile(draw, number), color="tab:blue", lw=0.5, alpha=0.5)
        axes.plot(place, profile(law.mean, number), color="tab:orange", lw=1.2, ls="--", label="network, before")
        axes.plot(place, profile(results["mean"], number), color="tab:blue", lw=1.6, label="mean")
        where = np.unravel_index(number, cells.grid[:-1]) if lines > 1 else ()
        coordinates = [samples.data.arrays.get(name) for name in cells.axes]
        title = [
            f"{name} = {i if values is None else f'{values[i]:.3g}'}"
            for name, values, i in zip(cells.axes, coordinates, where)
        ]
        axes.set(title=", ".join(title), xlabel=cells.axes[-1])
        axes.grid(alpha=0.25)
    panels[0].legend()
    drawing.savefig(path)
