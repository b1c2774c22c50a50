"""``probhard predict``: reads a trained run and new inputs, writes fields with bands and draws, and a certificate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probhard.cli import _pictures
from probhard.cli._bands import BANDS, RunBands, bands_text, with_solutions
from probhard.cli._certificate import FAR_TRAINED, Certificate, Moves
from probhard.cli._outputs import certificate_of, check_path, check_seed, conclude, sha256
from probhard.cli._projection import BUDGET, FieldProjection
from probhard.cli._stored import StoredLaw
from probhard.cli._train import CONFIG, FILES, GRID, MODEL, TRAINED_ON
from probhard.errors import ParameterError
from probhard.io.fields import read_fields, write_npz
from probhard.io.spec import read_spec
from probhard.laws.covariance import LowRank
from probhard.model import ConstrainedModel
from probhard.pde.samples import Samples
from probhard.pde.surrogate import Settings, Surrogate
from probhard.projection.layer import DPPL


@dataclass(frozen=True)
class Request:
    """The command's arguments, with the meaning that its ``--help`` gives them."""

    run: Path
    inputs: Path
    draws: int
    output: Path | None
    seed: int
    figure: Path | None

    def predict(self) -> None:
        """Predict all samples, write the fields and the certificate, and print a summary.

        Raises:
            ProbhardError: Invalid files or options.
            typer.Exit: Some points are not feasible (status 3).
        """
        path = self.inputs.with_name(f"{self.inputs.stem}-predicted.npz") if self.output is None else self.output
        sources = [self.inputs, *(self.run / name for name in FILES)]
        check_path(path, "--output", (".npz",), sources)
        old = certificate_of(path)
        if self.figure is not None:
            check_path(self.figure, "--figure", _pictures.SUFFIXES, sources)
        check_seed(self.seed)
        samples, model, bands = _trained(self.run, self.inputs)
        certificate, law = self._certificate(samples, model), _predicted(model, samples)
        arrays: dict[str, np.ndarray] = {}
        if bands is not None:
            arrays, certificate.setting["conformal"] = bands.of(model, with_solutions(samples))
        metric = model.method.inference.metric
        assert metric is not None
        layer, generator = DPPL(metric, on_failure="flag"), torch.Generator().manual_seed(self.seed)
        projection = FieldProjection(law, samples.spec, samples.data, layer, certificate, generator)
        results = projection.run(self.draws, path.parent)
        old.unlink(missing_ok=True)
        write_npz(path, {**samples.data.arrays, **results, **arrays})
        if self.figure is not None:
            _pictures.first_sample(self.figure, samples, law, results)
        lines = [certificate.table(), f"Joint law: {_joint_text(model)}"]
        if bands is not None:
            lines.append(bands_text(certificate.setting["conformal"]))
        conclude(certificate, path, "\n".join([*lines, f"Fields: {path}"]))

    def _certificate(self, samples: Samples, model: ConstrainedModel) -> Certificate:
        import yaml

        cells = samples.cells
        return Certificate(
            {
                "input": self.inputs.name,
                "input_sha256": sha256(self.inputs),
                "model_sha256": sha256(self.run / MODEL),
                "constraints": yaml.safe_dump(dict(samples.spec), sort_keys=False),
                "metric": model.method.inference.metric,
                "joint_law": _joint_text(model),
                "seed": self.seed,
                "fields": cells.fields,
                "cells": cells.variables,
                "field_axes": ["sample", *cells.per],
            },
            moved=Moves(FAR_TRAINED),
        )


def _joint_text(model: ConstrainedModel) -> str:
    """What correlates the cells of an event."""
    return "that of the network" if model.calibration is None else str(model.calibration)


def _trained(run: Path, inputs: Path) -> tuple[Samples, ConstrainedModel, RunBands | None]:
    """The samples to predict, the model of a run for their grid, and its conformal bands."""
    missing = [name for name in (CONFIG, GRID, MODEL) if not (run / name).is_file()]
    if missing:
        raise ParameterError(
            f"{run} has no {' and no '.join(missing)}.",
            "A run is complete when its model is written.",
            "Run 'probhard train' again with the same arguments to finish it, or check the path.",
        )
    content = read_spec(run / CONFIG, "configuration")
    trained_on = _described(content.pop(TRAINED_ON, None) if isinstance(content, dict) else None)
    if trained_on is None:
        raise ParameterError(
            f"{run / CONFIG} does not say what the run was trained on.",
            "'probhard train' writes that down; the file was changed or is not its own.",
            "Restore it, or train again.",
        )
    spec, settings = Settings.read(content)
    samples = Samples.unsolved({**read_fields(run / GRID), **read_fields(inputs)}, spec, trained_on["grid"])
    channels, axes = samples.inputs.shape[1], len(samples.cells.axes)
    if channels != trained_on["channels"]:
        raise ParameterError(
            f"{inputs} has {channels - axes} parameters and input fields, the run {trained_on['channels'] - axes}.",
            "The network takes those that it was trained on.",
            f"Bring the same parameters and inputs, in the order of {trained_on['file']}.",
        )
    model, cells = Surrogate.read(run / MODEL, settings, samples), samples.cells
    if model.calibration is not None and cells.grid != tuple(trained_on["grid"]):
        model = model.calibrated(model.calibration.on_grid(cells.shape) if cells.inside is None else None)
    return samples, model, RunBands.read(run / BANDS, trained_on["grid"])


def _described(trained_on: Any) -> dict[str, Any] | None:
    """What a configuration says about the samples of its run, None if that is not enough."""
    if not isinstance(trained_on, dict) or not {"grid", "channels", "file"} <= set(trained_on):
        return None
    sizes = trained_on["grid"]
    whole = isinstance(sizes, list) and all(isinstance(size, int) for size in (*sizes, trained_on["channels"]))
    return trained_on if whole else None


@torch.no_grad()
def _predicted(model: ConstrainedModel, samples: Samples) -> StoredLaw:
    """The network's law before projection."""
    cells = samples.cells
    arrays: dict[str, np.ndarray] = {}
    size = max(1, BUDGET // samples.inputs[0].size)
    for chosen in np.array_split(np.arange(len(samples)), -(-len(samples) // size)):
        law: Any = model.backbone(samples.batch(chosen).inputs)
        parts = {"mean": law.mean, "stddev": law.stddev}
        if isinstance(law.cov, LowRank):
            parts["factor"] = law.cov.factor.movedim(-1, 0)
        for name, values in parts.items():
            lead = values.shape[:-2] + cells.batch + cells.grid
            array = arrays.setdefault(name, np.full(lead, np.nan))
            cells.scatter(array, samples.events(chosen), values.numpy())
    return StoredLaw(arrays["mean"], arrays["stddev"], factor=arrays.get("factor"), calibration=model.calibration)
