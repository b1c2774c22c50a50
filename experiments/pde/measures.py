"""Figures of a model on exact fields: errors, scores, residuals of the law and of the mass, calibration.

    ce_mean = mean over fields of sum_i |residual_i(mean)|,      ce_draws = max over draws, fields and i.

The others are means over the grid points of the test fields:

- mse, mse_draws: of the forecast's mean, and of the mean of the draws.
- mse_free: mse without the slices on which mass and bounds leave a single point.
- crps_marginals: closed form, exact without inequalities; absent with a last rule.
- crps_draws: unbiased estimate from the draws.
- ce_mass, ce_paper: ce_mean for the mass, and for the paper's mass if it differs.
- covered_90: share of exact values in the central 90 % of the draws.
- infeasible: share of draws that could not be made feasible.
- energy, variogram: unbiased scores of whole fields; the variogram of order 1/2 over neighbours and distant pairs.
- outside_depth: largest distance of a draw from the bounds.
- rising, rising_depth: share of steps to the right that rise, and the highest, where exact fields never rise.
- variation: total variation of a draw's slice over the exact one's, where slices are not constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from probhard import score as scores
from probhard.constraints.base import Constraint
from probhard.model import Batch, ConstrainedModel
from probhard.pde.base import Problem
from probhard.pde.problems import Advection, Stefan
from probhard.projection.forecast import Forecast
from probhard.projection.layer import DPPL
from probhard.projection.projected import Projected

CHUNK = 10  # fields measured at a time
PAIRS = 2000  # of distant points in the variogram
ROUNDING = 1e-9  # steps that count as rising are higher

Rule = Callable[[Problem, Tensor], Constraint]


def dataset(problem: Problem, parameters: Tensor) -> Batch:
    """Return inputs, exact fields ``(batch, nt * nx)`` and parameters ``(batch,)`` as one batch."""
    return Batch(problem.inputs(parameters), problem.solution(parameters).flatten(-2), None, parameters)


@torch.no_grad()
def evaluate(
    model: ConstrainedModel,
    problem: Problem,
    law: Rule,
    test: Batch,
    generator: torch.Generator,
    count: int = 100,
    last: Rule | None = None,
) -> dict[str, float]:
    """Return the figures of a model on test fields, as named above.

    Args:
        model: Its forecasts are measured.
        problem: Of the fields.
        law: The rule whose residuals are reported.
        test: Inputs, exact fields and parameters.
        generator: Of the draws.
        count: Draws per field.
        last: A rule that mean and draws are moved to, as in ``predicted``.
    """
    assert test.target is not None
    total: dict[str, Tensor] = {}
    largest: dict[str, Tensor] = {}
    pairs = variogram_pairs(problem)
    masses = {"ce_mass": problem}
    if isinstance(problem, Stefan | Advection):
        masses["ce_paper"] = replace(problem, law="paper")
    for chunk in torch.arange(len(test.target)).split(CHUNK):
        part = Batch(test.inputs[chunk], test.target[chunk], None, test.context[chunk])
        assert part.target is not None
        forecast = model.forecast(part)
        prediction = predicted(forecast, generator, count, None if last is None else last(problem, part.context))
        mean, draws = prediction.mean, prediction.draws
        rows = law(problem, part.context)
        error = (mean - part.target).square()
        free = ~problem.single_point(part.context)[..., None].expand(-1, *problem.shape).flatten(-2)
        residuals = rows.residual(draws)
        lower, upper = (bound.expand(-1, *problem.shape).flatten(-2) for bound in problem.bounds(part.context))
        worst = {
            "ce_draws": residuals.abs().max(),
            "outside_depth": torch.maximum(lower - draws, draws - upper).max().clamp_min(0.0),
        }
        figures = {
            "mse": error.mean(-1),
            "mse_draws": (draws.mean(0) - part.target).square().mean(-1),
            "crps_draws": scores.crps_ensemble(draws, part.target, estimator="fair").mean(-1),
            "ce_mean": rows.residual(mean).abs().sum(-1),
            "ce_squares": residuals.square().sum(-1).mean(0),
            "free_errors": (error * free).sum(-1),
            "free_points": free.to(error).sum(-1),
            "covered_90": scores.coverage(draws, part.target).mean(-1),
            "outside_bounds": ((draws < lower) | (draws > upper)).double().mean((0, -1)),
            "negative": (draws < 0).double().mean((0, -1)),
            "infeasible": prediction.flagged.double().mean(0),
            "energy": scores.energy_score(draws, part.target, estimator="fair"),
            "variogram": scores.variogram_score(draws, part.target, pairs=pairs) / len(pairs),
        }
        along, deepest = _along(problem, part.target, draws)
        figures, worst = figures | along, worst | deepest
        for name, value in worst.items():
            largest[name] = torch.maximum(largest.get(name, value), value)
        if last is None:
            figures["crps_marginals"] = scores.crps(forecast, part.target).mean(-1)
        for name, other in masses.items():
            figures[name] = other.constraint(part.context).residual(mean).abs().sum(-1)
        for name, value in figures.items():
            total[name] = total.get(name, torch.tensor(0.0)) + value.sum()
    points = float(total.pop("free_points"))
    free_mse = float(total.pop("free_errors")) / max(points, 1.0)
    means = {name: float(value) / len(test.target) for name, value in total.items()}
    return {**means, "mse_free": free_mse, **{name: float(value) for name, value in largest.items()}}


def _along(problem: Problem, exact: Tensor, draws: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Figures of steps along x, by field (batch,), and their worst: what rises where nothing should, and variation.

    Args:
        problem: Of the fields.
        exact: Exact fields, (batch, nt * nx).
        draws: (S, batch, nt * nx).
    """
    falls, steps = (x.unflatten(-1, problem.shape).diff(dim=-1) for x in (exact, draws))
    figures, worst = {}, {}
    if bool((falls <= 0).all()):
        figures["rising"] = (steps > ROUNDING).double().mean((0, -2, -1))
        worst["rising_depth"] = steps.max().clamp_min(0.0)
    size = falls.abs().sum(-1)
    ratio = steps.abs().sum(-1).mean(0) / size
    figures["variation"] = torch.where(size > 0, ratio, 0.0).sum(-1) / (size > 0).sum(-1).clamp_min(1)
    return figures, worst


def variogram_pairs(problem: Problem) -> Tensor:
    """Pairs of points (P, 2) for the variogram score: neighbours in space and in time, and random ones."""
    index = torch.arange(problem.shape[0] * problem.shape[1]).reshape(problem.shape)
    neighbours = [
        torch.stack([index[:, 1:], index[:, :-1]], -1).flatten(0, 1),
        torch.stack([index[1:], index[:-1]], -1).flatten(0, 1),
    ]
    random = torch.randint(index.numel(), (PAIRS, 2), generator=torch.Generator().manual_seed(0))
    return torch.cat([*neighbours, random])


@dataclass(frozen=True)
class Prediction:
    """Mean and draws of a model."""

    mean: Tensor  # (*batch, n)
    draws: Tensor  # (S, *batch, n)
    flagged: Tensor  # (S, *batch), draws that could not be made feasible


def predicted(
    forecast: Forecast,
    generator: torch.Generator,
    count: int,
    last: Constraint | None = None,
) -> Prediction:
    """Return mean and draws of a forecast, moved to the nearest fields that obey ``last`` if it is given.

    Args:
        forecast: With event shape ``(n,)``.
        generator: Of the draws.
        count: Number of draws.
        last: Constraint to project on, orthogonally.
    """
    if isinstance(forecast, Projected):
        solution = forecast.draw((count,), generator)
        prediction = Prediction(forecast.mean, solution.value, ~solution.stats.converged)
    else:
        draws = forecast.sample((count,), generator)
        prediction = Prediction(forecast.mean, draws, torch.zeros(draws.shape[:-1], dtype=torch.bool))
    if last is None:
        return prediction
    layer = DPPL("orthogonal", on_failure="flag")
    solution = layer.project(prediction.draws, last)
    flagged = prediction.flagged | ~solution.stats.converged
    return Prediction(layer.project(prediction.mean, last).value, solution.value, flagged)


@torch.no_grad()
def profile(
    model: ConstrainedModel, problem: Problem, parameter: float, time: float, count: int, last: Rule | None = None
) -> dict[str, Any]:
    """Return the slice nearest to a time, for a figure like the paper's.

    Args:
        model: Its forecast is shown.
        problem: Of the field.
        parameter: Of the problem.
        time: The slice nearest to it is taken.
        count: Draws that give the spread.
        last: A rule that mean and draws are moved to, as in ``predicted``.
    """
    one = dataset(problem, torch.tensor([parameter], dtype=problem.dtype))
    generator = torch.Generator().manual_seed(0)
    prediction = predicted(model.forecast(one), generator, count, None if last is None else last(problem, one.context))
    assert one.target is not None
    number = int((problem.times - time).abs().argmin())
    cut = slice(number * problem.points, (number + 1) * problem.points)
    curves = {"exact": one.target[0], "mean": prediction.mean[0], "stddev": prediction.draws[:, 0].std(0)}
    kept = {name: [float(f"{value:.5g}") for value in curve[cut].tolist()] for name, curve in curves.items()}
    where = {"parameter": parameter, "time": float(problem.times[number])}
    return {**where, **kept, "negative": float((prediction.draws[:, 0, cut] < 0).double().mean())}
