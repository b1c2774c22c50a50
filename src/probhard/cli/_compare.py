"""``probhard compare``: trains one neural operator for each method and measures them on held-out samples.

The folder of a comparison holds

    comparison.csv    one row for each method and seed      comparison.png    scores, violations and times
    comparison.json   data, settings, versions, reasons of methods that do not apply, and the hashes of both files
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import typer

from probhard._util.atomic import write_text
from probhard._util.memory import check_memory
from probhard.cli._certificate import versions
from probhard.cli._outputs import FILES, check_folder, check_foreign, check_writable, sha256
from probhard.cli._train import check_room
from probhard.comparison import Plan, compared
from probhard.errors import ParameterError, check_choices
from probhard.io.fields import read_fields
from probhard.io.spec import read_spec
from probhard.method import METHODS, Method
from probhard.pde.samples import Samples
from probhard.pde.surrogate import Settings, Surrogate, check_constraints
from probhard.training import Schedule

NAME = "comparison"
COPIES = 3  # of all draws, while they are projected and scored
SCHEDULED = ("epochs", "batch_size", "lr", "warm_up", "patience")


def run(data: Path, config: Path, output: Path, methods: str, seeds: str, epochs: int | None, draws: int) -> None:
    """Train and measure methods, write the folder, and print the table.

    Args:
        data: File of parameters or inputs, and solutions.
        config: YAML file of constraints and settings.
        output: Folder to write to.
        methods: Names of methods, comma-separated; empty for all.
        seeds: Seeds, comma-separated.
        epochs: Replaces that of the configuration; None keeps it.
        draws: Number of draws that are scored.

    Raises:
        ProbhardError: Invalid files, settings, methods or seeds.
    """
    if output.exists() and not output.is_dir():
        raise ParameterError(f"--output {output} is a file.", "A comparison is a folder.", "Name another.")
    check_writable(output, "--output")
    files = [output / f"{NAME}.csv", output / f"{NAME}.png"]
    note_path = output / f"{NAME}.json"
    check_folder(output, [note_path.name], [file.name for file in files])
    check_foreign(note_path, note_path.exists() and not _is_note(note_path))
    names = [name.strip() for name in methods.split(",") if name.strip()] or list(METHODS)
    check_choices("method", names, tuple(METHODS))
    numbers = _numbers(seeds)
    spec, settings = Settings.read(read_spec(config, "configuration"))
    settings = settings if epochs is None else replace(settings, epochs=epochs)
    samples = Samples.solved(read_fields(data), spec)
    settings = settings.resolved(samples.cells.grid)
    parts = dict(zip(("train", "validation", "test"), map(np.sort, settings.parts(len(samples)))))
    check_room(settings, samples, output)
    held = len(parts["test"])
    size = 8.0 * COPIES * draws * held * math.prod(samples.cells.grid)
    check_memory(size, f"{draws} draws of {held} samples", "Ask for fewer draws.")
    model = Surrogate.build(replace(settings, method="probhard-ob", functionals=None), samples, parts["train"])
    check_constraints(model, samples, np.arange(len(samples)), settings.data_tolerance)
    batches = {name: samples.batch(part) for name, part in parts.items()}

    def build(method: Method, seed: int) -> Surrogate:
        seeded = replace(settings, seed=seed, method="probhard-ob", functionals=None)
        backbone = Surrogate.build(seeded, samples, parts["train"]).backbone
        scored = method.replace(score=settings.score) if settings.score and not method.training.draws else method
        return Surrogate(backbone, samples.constraint, scored)

    schedule = Schedule(**{name: getattr(settings, name) for name in SCHEDULED})
    plan = Plan({name: METHODS[name] for name in names}, schedule, numbers, draws, sys.stderr.isatty())
    result = compared(build, batches, plan)
    output.mkdir(parents=True, exist_ok=True)
    note_path.unlink(missing_ok=True)
    result.to_csv(files[0])
    result.plot(files[1])
    note = {
        "data": {"file": data.name, "sha256": sha256(data)},
        "settings": {**spec, **settings.record()},
        "samples": {name: batch.size for name, batch in batches.items()},
        "draws": draws,
        "feasible_by_design": [row.method for row in result.means() if row.feasible],
        "skipped": result.skipped,
        "rows": [asdict(row) for row in result.measured],
        "versions": versions(),
        FILES: {file.name: sha256(file) for file in files},
    }
    write_text(note_path, json.dumps(note, indent=2) + "\n")
    typer.echo(f"{batches['test'].size} held-out samples, {draws} draws\n{result}\nComparison: {output}")


def _is_note(path: Path) -> bool:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {FILES, "rows", "settings"} <= set(content)


def _numbers(seeds: str) -> list[int]:
    try:
        numbers = [int(seed) for seed in seeds.split(",") if seed.strip()]
    except ValueError as error:
        raise ParameterError(f"--seeds {seeds} are not numbers.", "Seeds are integers.", "Pass 0,1,2.") from error
    if not numbers or min(numbers) < 0:
        raise ParameterError(f"--seeds {seeds!r}.", "There is a row for every seed, from 0 on.", "Pass 0,1,2.")
    return numbers
