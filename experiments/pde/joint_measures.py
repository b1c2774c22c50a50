"""Figures of a joint law on held-out fields: coverage and CRPS by scale, energy score, correlation of neighbours.

Two numbers calibrate the law (``calibrate``): ``own`` multiplies the scale of every point's own noise, ``shared`` that
of the noise that points share. A diagonal law has one. They minimise, on calibration fields, the score of the
projected law

    mean over cells of CRPS + weight * sum over scales of the mean over blocks of CRPS + energy score / sqrt(cells).

Without the last term all laws are too narrow where a few cells have most of the error: the CRPS of the others decides.

The metric stays, so means do too. Functionals that the constraint fixes have variance 0 and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.pde.joint_cases import Case, Data
from probhard import score as scores
from probhard.calibration import calibrate, error_correlation
from probhard.model import Batch, ConstrainedModel
from probhard.projection.mixture import Mixture

QUANTILE = 1.6448536269514722  # of the standard normal law at 0.95
WEIGHT, ENERGY = 0.3, 1.0  # of functionals and of the energy score in the score that calibration minimises
CHUNK = 10  # fields measured at a time


def measured(
    model: ConstrainedModel, case: Case, data: Data, seed: int, draws: int, errors: bool = False
) -> dict[str, Any]:
    """Return the figures of a trained model in float64, raw and calibrated.

    Args:
        model: The model.
        case: Its problem.
        data: Its data; the calibration fields give the two numbers, the test fields the figures.
        seed: Of the draws.
        draws: Per test field.
        errors: Whether the law gets the power spectrum of errors on validation fields, with a number for each octave.
    """
    correlation = None
    if errors:
        boundary = "periodic" if case.periodic else "reflecting"
        correlation = error_correlation(model, list(parts(_double(data.validation))), case.shape, boundary)
    adjusted = calibrate(
        model,
        list(parts(data.calibration)),
        functionals=case.blocks,
        functional_weight=WEIGHT,
        octaves=errors,
        correlation=correlation,
        energy=ENERGY,
    )
    assert adjusted.calibration is not None
    raw = figures(model, case, data.test, seed, draws)
    del raw["energy_fields"]
    line: dict[str, Any] = {"own": adjusted.calibration.own, "shared": adjusted.calibration.shared}
    line |= {**figures(adjusted, case, data.test, seed, draws), "raw": raw}
    return {**line, "shown": shown(adjusted, case, data.test)} if case.periodic and seed == 0 else line


def _double(batch: Batch) -> Batch:
    """The same fields in double precision."""
    assert batch.target is not None
    return Batch(batch.inputs.double(), batch.target.double(), None, batch.context.double())


def parts(batch: Batch) -> Iterator[Batch]:
    """A few fields at a time."""
    assert batch.target is not None
    for at in torch.arange(len(batch.target)).split(CHUNK):
        yield Batch(batch.inputs[at], batch.target[at], None, batch.context[at])


@torch.no_grad()
def shown(model: ConstrainedModel, case: Case, test: Batch) -> dict[str, list[list[float]]]:
    """Error of the mean and a centred draw for the first test field, with three digits, for a picture."""
    part = next(parts(test))
    assert part.target is not None
    forecast = model.forecast(part)
    draw = forecast.sample((), torch.Generator().manual_seed(0)) - forecast.mean
    fields = {"error": (part.target - forecast.mean)[0], "draw": draw[0]}
    return {
        name: [[float(f"{x:.3g}") for x in row] for row in field.unflatten(-1, case.shape).tolist()]
        for name, field in fields.items()
    }


@torch.no_grad()
def figures(model: ConstrainedModel, case: Case, test: Batch, seed: int, draws: int) -> dict[str, Any]:
    """Return the figures of a model's forecasts on test fields.

    Args:
        model: The model, in float64.
        case: Its problem.
        test: Inputs, exact fields and parameters.
        seed: Of the draws.
        draws: Per field.
    """
    functionals, generator = case.functionals, torch.Generator().manual_seed(seed)
    columns: dict[str, list[Tensor]] = {}
    for part in parts(test):
        assert part.target is not None
        forecast = model.forecast(part)
        assert not isinstance(forecast, Mixture)
        sample = forecast.sample((draws,), generator)
        rows = functionals.rows(part.target.shape[-1])
        error = rows.apply(part.target - forecast.mean)
        spread = forecast.functional(rows).scale
        cells = forecast.marginals.scale
        miss = part.target - forecast.mean
        for name, values in {
            "mse": miss.square().mean(-1),
            "crps": scores.crps(forecast, part.target).mean(-1),
            "energy": scores.energy_score(sample, part.target, estimator="fair"),
            "cells": (miss.abs() <= QUANTILE * cells).double().mean(-1),
            "fixed": spread == 0,
            "covered": (error.abs() <= QUANTILE * spread).double(),
            "scores": scores.crps(forecast, part.target, functionals=functionals),
            "lag_errors": _lag(miss / cells, case.shape),
            "lag_draws": _lag((sample - forecast.mean) / cells, case.shape).mean(0),
            "violation": model.constraint(part).violation(sample).amax(0),
        }.items():
            columns.setdefault(name, []).append(values)
    table = {name: torch.cat(parts) for name, parts in columns.items()}
    free = ~table["fixed"]
    groups = range(len(functionals.names))

    def by_scale(values: Tensor) -> list[float | None]:
        chosen = (free & (functionals.group == group) for group in groups)
        return [float(values[at].mean()) if bool(at.any()) else None for at in chosen]

    return {
        "mse": float(table["mse"].mean()),
        "crps": float(table["crps"].mean()),
        "energy": float(table["energy"].mean()),
        "scales": ["cells", *functionals.names],
        "covered_90": [float(table["cells"].mean()), *by_scale(table["covered"])],
        "crps_by_scale": [float(table["crps"].mean()), *by_scale(table["scores"])],
        "fixed": [0, *(int((~free & (functionals.group == group)).sum()) for group in groups)],
        "lag_errors": float(table["lag_errors"].mean()),
        "lag_draws": float(table["lag_draws"].mean()),
        "violation": float(table["violation"].max()),
        "energy_fields": table["energy"].tolist(),
    }


def _lag(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """Correlation of neighbours along the last axis of standardised fields (..., n), (...,); 0 / 0 counts as 0."""
    field = x.nan_to_num(0.0, 0.0, 0.0).unflatten(-1, shape)
    left, right = field[..., :-1], field[..., 1:]
    return (left * right).sum((-2, -1)) / (left.square().sum((-2, -1)) * right.square().sum((-2, -1))).sqrt()
