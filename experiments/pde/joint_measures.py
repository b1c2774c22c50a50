"""Figures of a joint law on held-out fields: coverage and CRPS by scale, energy score, correlation of neighbours.

Two numbers calibrate the law: ``own`` multiplies the scale of every point's own noise, ``shared`` that of the noise that
points share. A diagonal law has the first only. They minimise, on calibration fields and with the metric of the
uncalibrated law, the score of the projected law

    mean over cells of CRPS + weight * sum over scales of the mean over blocks of CRPS.

Means of the law therefore stay where they are. Functionals that the constraint fixes have variance 0 and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.pde.joint_cases import Case, Data
from probhard import score as scores
from probhard.laws.covariance import Covariance, Diagonal, Factored
from probhard.laws.distribution import LocationScale, as_location_scale
from probhard.model import Batch, ConstrainedModel
from probhard.projection.projected import Projected

LEVEL = 0.9
QUANTILE = 1.6448536269514722  # of the standard normal law at (1 + LEVEL) / 2
WEIGHT = 0.3  # of the functionals in the score that calibration minimises, for all laws
CHUNK = 10  # fields measured at a time
STEPS = 25  # of the search for the two numbers

Numbers = tuple[float, float]


def measured(model: ConstrainedModel, case: Case, data: Data, seed: int, draws: int) -> dict[str, Any]:
    """Return the figures of a trained model in float64, raw and calibrated.

    Args:
        model: The model.
        case: Its problem.
        data: Its data; the calibration fields give the two numbers, the test fields the figures.
        seed: Of the draws.
        draws: Per test field.
    """
    own, shared = calibrated_numbers(model, case, data.calibration)
    raw = figures(model, case, data.test, seed, draws)
    del raw["energy_fields"]
    figured = figures(model, case, data.test, seed, draws, (own, shared))
    return {"own": own, "shared": shared, **figured, "raw": raw}


@torch.no_grad()
def shown(model: ConstrainedModel, case: Case, test: Batch, numbers: Numbers) -> dict[str, list[list[float]]]:
    """Error of the mean and a centred draw for the first test field, with three digits, for a picture."""
    law, part = next(laws(model, test))
    assert part.target is not None
    forecast = projected(model, law, part, numbers)
    draw = forecast.sample((), torch.Generator().manual_seed(0)) - forecast.mean
    fields = {"error": (part.target - forecast.mean)[0], "draw": draw[0]}
    return {name: [[float(f"{x:.3g}") for x in row] for row in field.unflatten(-1, case.shape).tolist()]
            for name, field in fields.items()}  # fmt: skip


def reweighted(cov: Covariance, own: Tensor | float, shared: Tensor | float) -> Covariance:
    """The covariance with the scales of its two parts multiplied; a diagonal one has the first part only."""
    if isinstance(cov, Factored):
        return cov.weighted(own, shared)
    assert isinstance(cov, Diagonal)
    return Diagonal(cov.variance * own**2)


def laws(model: ConstrainedModel, batch: Batch) -> Iterator[tuple[LocationScale, Batch]]:
    """The law before the projection, and the fields, a few at a time."""
    assert batch.target is not None
    for at in torch.arange(len(batch.target)).split(CHUNK):
        part = Batch(batch.inputs[at], batch.target[at], None, batch.context[at])
        with torch.no_grad():
            yield as_location_scale(model.backbone(part.inputs)), part


def projected(model: ConstrainedModel, law: LocationScale, part: Batch, numbers: Any = (1.0, 1.0)) -> Projected:
    """The projection of a law with reweighted parts, in the metric of the law itself."""
    assert model.inference_layer is not None
    cov = reweighted(law.cov, *numbers)
    changed = LocationScale(law.loc, cov, law.family, validate_args=False)
    return model.inference_layer(changed, model.constraint(part), metric_from=law)


def calibrated_numbers(model: ConstrainedModel, case: Case, batch: Batch) -> Numbers:
    """The two numbers that minimise the score on calibration fields; the second is 1 for a diagonal law."""
    parts = list(laws(model, batch))
    functionals = case.blocks
    assert batch.target is not None
    n, joint = batch.target.shape[-1], isinstance(parts[0][0].cov, Factored)

    def loss(logs: Tensor) -> Tensor:
        numbers = logs.exp()
        total = torch.zeros((), dtype=torch.float64)
        for law, part in parts:
            assert part.target is not None
            forecast = projected(model, law, part, (numbers[0], numbers[1] if joint else 1.0))
            blocks = scores.crps(forecast, part.target, functionals=functionals)
            total = total + scores.crps(forecast, part.target).sum() / n
            total = total + WEIGHT * (blocks * functionals.weight.to(blocks)).sum()
        return total / len(batch.target)

    return minimised(loss, 2 if joint else 1)


def minimised(loss: Callable[[Tensor], Tensor], count: int) -> Numbers:
    """The numbers exp(x) of the smallest loss(x), from 1 on; one that is not there is 1."""
    logs = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([logs], max_iter=STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-7)
    unit = float(loss(logs.detach()))

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(logs) / unit
        value.backward()
        return value

    optimiser.step(closure)  # type: ignore[arg-type]
    own, *shared = logs.detach().exp().tolist()
    return own, shared[0] if shared else 1.0


@torch.no_grad()
def figures(
    model: ConstrainedModel, case: Case, test: Batch, seed: int, draws: int, numbers: Numbers = (1.0, 1.0)
) -> dict[str, Any]:
    """Return the figures of the projected law with reweighted parts on test fields.

    Args:
        model: The model, in float64.
        case: Its problem.
        test: Inputs, exact fields and parameters.
        seed: Of the draws.
        draws: Per field.
        numbers: The two calibration numbers.
    """
    functionals, generator = case.functionals, torch.Generator().manual_seed(seed)
    columns: dict[str, list[Tensor]] = {}
    for law, part in laws(model, test):
        assert part.target is not None
        forecast = projected(model, law, part, numbers)
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
