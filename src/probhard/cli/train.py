"""``probhard train``: samples of a user's own fields in, a neural operator that obeys their laws out.

The folder of a run holds config.yaml (every setting), grid.npz (coordinates, cell volumes, mask), checkpoints, and at
the end model.pt (the best epoch), metrics.json (on held-out samples) and training.png. The same command goes on with a
run that was stopped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from probhard._util.atomic import replacing
from probhard.cli.certificate import sha256, versions
from probhard.errors import ParameterError
from probhard.io.fields import read_fields, write_npz
from probhard.io.spec import AXES, MASK, VOLUMES, read_spec
from probhard.pde.samples import Samples
from probhard.pde.surrogate import Settings, Surrogate, check_constraints, measure

if TYPE_CHECKING:
    from probhard.training import Fit

MODEL, CONFIG, GRID, METRICS, CURVES = "model.pt", "config.yaml", "grid.npz", "metrics.json", "training.png"
TRAINED_ON = "trained_on"  # the part of config.yaml that was found, not chosen


def train(
    data: Annotated[Path, typer.Argument(help="An .npz, .zarr or HDF5 file of parameters or inputs, and solutions.")],
    config: Annotated[Path, typer.Option(help="A YAML file that names constraints, method, epochs, ...")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run; goes on with one that is there.")],
) -> None:
    """Train a neural operator on your own fields under hard constraints."""
    from probhard.training import Schedule, fit  # here, so that --help needs no Lightning

    if output.exists() and not output.is_dir():
        raise ParameterError(f"--output {output} is a file.", "A run is a folder.", "Name another.")
    spec, settings = Settings.read(read_spec(config, "configuration"))
    times = {name: getattr(settings, name) for name in ("epochs", "batch_size", "lr", "warm_up", "patience")}
    schedule = Schedule(**times)
    arrays = read_fields(data)
    samples = Samples.solved(arrays, spec)
    settings = settings.resolved(samples.cells.grid)
    training, validation, test = (np.sort(part) for part in settings.parts(len(samples)))
    model = Surrogate.build(settings, samples, training)
    check_constraints(model, samples, np.arange(len(samples)))  # before anything is written
    model.loss(samples.batch(training[:1]))
    found: dict[str, Any] = {"file": data.name, "sha256": sha256(data)}
    found |= {"grid": list(samples.cells.grid), "channels": samples.inputs.shape[1]}
    content = {**spec, "axes": list(samples.cells.axes), **settings.record(), TRAINED_ON: found}
    _start(output, content, {name: arrays[name] for name in (*AXES, VOLUMES, MASK) if name in arrays})
    batches = samples.batch(training), samples.batch(validation)
    seed, where, progress = settings.seed, output / "checkpoints", sys.stdout.isatty()
    done = fit(model, *batches, schedule, seed=seed, directory=where, progress=progress)
    model.cpu().save(output / MODEL)
    figures = measure(model, samples, test)
    _curves(output / CURVES, done)
    sizes = dict(zip(("training", "validation", "test"), map(len, (training, validation, test))))
    about = {"best_epoch": done.best_epoch, "epochs": done.epochs, "seconds": done.seconds, "samples": sizes}
    text = json.dumps({**figures, **about, "versions": versions()}, indent=2)
    (output / METRICS).write_text(text + "\n", encoding="utf-8")
    typer.echo(_table(figures, len(test)))
    typer.echo(f"Best of {done.epochs} epochs: {done.best_epoch + 1}. Run: {output}")


def _start(output: Path, content: dict[str, Any], grid: dict[str, np.ndarray]) -> None:
    """Write down what is to be done, or check that it is what was begun here."""
    import yaml

    path = output / CONFIG
    content = json.loads(json.dumps(content))  # as it will be read again
    if path.exists():
        before = read_spec(path) or {}
        changed = [name for name in {**before, **content} if before.get(name) != content.get(name)]
        if changed:
            raise ParameterError(
                f"{output} holds a run with another {' and '.join(changed)}.",
                "A run goes on only with the settings and the data that it began with.",
                "Pass another --output, or remove this folder.",
            )
        return
    output.mkdir(parents=True, exist_ok=True)
    write_npz(output / GRID, grid)
    with replacing(path) as partial:
        partial.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _table(figures: dict[str, dict[str, float]], count: int) -> str:
    """Network and constrained model side by side, and how well the solutions obey the constraints themselves."""
    rows = {"mse": "MSE", "crps": "CRPS", "covered_90": "in the 90 % band"}
    rows |= {"violation_mean": "violation of means", "violation_draws": "  of draws"}
    lines = [f"{f'{count} held-out samples':22s}{'network':>14s}{'constrained':>14s}"]
    for name, title in rows.items():
        lines.append(f"{title:22s}" + "".join(f"{figures[kind][name]:14.4g}" for kind in ("network", "constrained")))
    if figures["constrained"]["failed"]:
        lines.append(f"{figures['constrained']['failed']} events with draws that could not be projected are left out.")
    lines.append(f"The solutions themselves violate the constraints by {figures['solutions']['violation']:.2g}.")
    return "\n".join(lines)


def _curves(path: Path, done: Fit) -> None:
    """Training loss and validation score of every epoch."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    axes = drawing.add_subplot()
    epochs = range(1, 1 + len(done.history))
    for name, color in (("train", "tab:orange"), ("validation", "tab:blue")):
        axes.plot(epochs, [row[name] for row in done.history], color=color, lw=1.4, label=name)
    axes.plot(done.best_epoch + 1, done.best_score, "o", color="tab:blue", label=f"best: epoch {done.best_epoch + 1}")
    axes.set(xlabel="epoch", ylabel="loss per cell")
    if min(min(row.values()) for row in done.history) > 0:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.legend()
    drawing.savefig(path)
