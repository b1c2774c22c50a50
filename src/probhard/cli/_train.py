"""``probhard train``: trains a neural operator on samples of a user's own fields.

The folder of a run holds

    config.yaml     every setting                      model.pt        weights of the best epoch
    grid.npz        coordinates, cell volumes, mask    metrics.json    scores on held-out samples
    checkpoints/    where a stopped run resumes        training.png    loss curves
    conformal.json  threshold and coverage of bands, if there are enough held-out samples

The same command resumes a run that was stopped.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from probhard._util.atomic import check_space, write_figure, write_text
from probhard._util.memory import check_memory
from probhard.cli._bands import BANDS, write_bands
from probhard.cli._certificate import versions
from probhard.cli._outputs import check_folder, check_writable, sha256
from probhard.errors import ParameterError
from probhard.io.fields import read_fields, write_npz
from probhard.io.spec import AXES, MASK, VOLUMES, read_spec
from probhard.pde.joint import LEAST, conformal_bands, divided, joint_law
from probhard.pde.operators import HEAD
from probhard.pde.samples import Samples
from probhard.pde.settings import PADDING
from probhard.pde.surrogate import Settings, Surrogate, check_constraints, measure

if TYPE_CHECKING:
    from probhard.calibration import CoverageReport, Promise
    from probhard.model import ConstrainedModel
    from probhard.training import Fit

MODEL, CONFIG, GRID, METRICS, CURVES = "model.pt", "config.yaml", "grid.npz", "metrics.json", "training.png"
FILES = (MODEL, CONFIG, GRID, METRICS, CURVES, BANDS)
COPIES, SAVED = 4, 8  # of all weights: values, gradients, two moments; in checkpoints and the model
LAYER = 4  # arrays of activations that a layer keeps for gradients
TRAINED_ON = "trained_on"  # the key of config.yaml that describes the data; all others are settings


def run(data: Path, config: Path, output: Path) -> None:
    """Train or resume a run, write its folder, and print its scores on held-out samples.

    Args:
        data: File of parameters or inputs, and solutions.
        config: YAML file of constraints and settings.
        output: Folder of the run.

    Raises:
        ProbhardError: Invalid files or settings, or a folder that holds another run.
    """
    from probhard.training import Schedule, fit

    if output.exists() and not output.is_dir():
        raise ParameterError(f"--output {output} is a file.", "A run is a folder.", "Name another.")
    check_writable(output, "--output")
    spec, settings = Settings.read(read_spec(config, "configuration"))
    schedule = Schedule(**{n: getattr(settings, n) for n in ("epochs", "batch_size", "lr", "warm_up", "patience")})
    arrays = read_fields(data)
    samples = Samples.solved(arrays, spec)
    settings = settings.resolved(samples.cells.grid)
    training, validation, test = (np.sort(part) for part in settings.parts(len(samples)))
    check_room(settings, samples, output)
    model = Surrogate.build(settings, samples, training)
    check_constraints(model, samples, np.arange(len(samples)), settings.data_tolerance)  # before anything is written
    model.loss(samples.batch(training[:1]))
    trained_on: dict[str, Any] = {
        "file": data.name,
        "sha256": sha256(data),
        "grid": list(samples.cells.grid),
        "channels": samples.inputs.shape[1],
    }
    content = {**spec, "axes": list(samples.cells.axes), **settings.record(), TRAINED_ON: trained_on}
    _start(output, content, {name: arrays[name] for name in (*AXES, VOLUMES, MASK) if name in arrays})
    early, held = divided(validation) if settings.joint else (validation, validation[:0])
    batches = samples.batch(training), samples.batch(early)
    checkpoints, progress = output / "checkpoints", sys.stdout.isatty()
    done = fit(model, *batches, schedule, seed=settings.seed, directory=checkpoints, progress=progress)
    trained: ConstrainedModel = model.cpu().eval()
    if len(held):
        trained = joint_law(trained, samples, early, held)
    scores = measure(trained, samples, test)
    bands = conformal_bands(trained, samples, test, settings.level)
    if bands is not None:
        write_bands(output / BANDS, *bands)
    _plot_curves(output / CURVES, done)
    sizes = {"training": len(training), "validation": len(early), "calibration": len(held), "test": len(test)}
    about = {"best_epoch": done.best_epoch, "epochs": done.epochs, "seconds": done.seconds, "samples": sizes}
    text = json.dumps({**scores, **about, "versions": versions()}, indent=2)
    write_text(output / METRICS, text + "\n")
    trained.save(output / MODEL)  # last: a run is complete when its model is written
    typer.echo(_table(scores, len(test)))
    typer.echo(_joint(trained, settings, len(validation)))
    typer.echo(_bands(bands, settings.level))
    typer.echo(f"Best of {done.epochs} epochs: {done.best_epoch + 1}. Run: {output}")


def check_room(settings: Settings, samples: Samples, output: Path) -> None:
    """Check memory for weights and activations, and space for checkpoints and model."""
    assert settings.modes is not None
    width, layers, grid = settings.width, settings.layers, samples.cells.grid
    weights = width**2 * (2 ** len(grid) * math.prod(settings.modes) + 1) * layers + HEAD * (width + 3 + settings.rank)
    points = math.prod(size + PADDING for size in grid)
    batch = min(settings.batch_size, len(samples))
    activations = float(batch * points) * (width * layers * LAYER + HEAD + 3 + settings.rank)
    fix = "Lower width, layers, modes, rank or batch_size."
    check_memory(4.0 * (COPIES * weights + activations), f"A network of {layers} layers of width {width}", fix)
    check_space(output, 4.0 * SAVED * weights, "The checkpoints of the run", fix)


def _start(output: Path, content: dict[str, Any], grid: dict[str, np.ndarray]) -> None:
    """Write the configuration of a new run, or check that it is the one of the run in this folder."""
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
    check_folder(output, [CONFIG], FILES)
    output.mkdir(parents=True, exist_ok=True)
    write_npz(output / GRID, grid)
    write_text(path, yaml.safe_dump(content, sort_keys=False))


def _table(scores: dict[str, dict[str, float]], count: int) -> str:
    """Scores of the network and of the constrained model side by side, and the violation of the solutions."""
    rows = {"mse": "MSE", "crps": "CRPS", "covered_90": "in the 90 % band", "blocks_covered_90": "  of block means"}
    rows |= {"violation_mean": "violation of means", "violation_draws": "  of draws"}
    lines = [f"{f'{count} held-out samples':22s}{'network':>14s}{'constrained':>14s}"]
    for name, title in rows.items():
        lines.append(f"{title:22s}" + "".join(f"{scores[kind][name]:14.4g}" for kind in ("network", "constrained")))
    if scores["constrained"]["failed"]:
        lines.append(f"{scores['constrained']['failed']} events with draws that could not be projected are left out.")
    lines.append(f"The solutions themselves violate the constraints by {scores['solutions']['violation']:.2g}.")
    return "\n".join(lines)


def _joint(model: ConstrainedModel, settings: Settings, count: int) -> str:
    """What correlates the cells of an event."""
    if model.calibration is not None:
        return f"Joint law: {model.calibration}."
    why = f"{count} validation samples are fewer than {2 * LEAST}" if settings.joint else "joint: false"
    return f"Cells of an event are independent ({why}), so bands of sums are too narrow."


def _bands(bands: tuple[Promise, CoverageReport] | None, level: float) -> str:
    """The promise of conformal bands and what was measured."""
    if bands is None:
        least = 2 * math.ceil(level / (1 - level) - 1e-9)
        return f"No conformal bands: the level {level:g} takes {least} test samples, half of them for the threshold."
    return "Conformal bands of all cells of a sample at once:\n" + textwrap.indent(str(bands[1]), "  ")


def _plot_curves(path: Path, done: Fit) -> None:
    """Training loss and validation score of every epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    epochs = range(1, 1 + len(done.history))
    for name, color in (("train", "tab:orange"), ("validation", "tab:blue")):
        axes.plot(epochs, [row[name] for row in done.history], color=color, lw=1.4, label=name)
    axes.plot(done.best_epoch + 1, done.best_score, "o", color="tab:blue", label=f"best: epoch {done.best_epoch + 1}")
    axes.set(xlabel="epoch", ylabel="loss per cell")
    if min(min(row.values()) for row in done.history) > 0:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.legend()
    write_figure(path, figure)
