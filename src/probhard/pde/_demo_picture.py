"""The picture of the demonstration: forecasts of one test field, their errors, and the mass error of draws."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from probhard._util.atomic import write_figure
from probhard.model import ConstrainedModel
from probhard.pde._branch_trunk import batch_of
from probhard.pde.base import Problem

SHOWN = {"base": "tab:orange", "probhard-or": "tab:blue"}  # methods and their colors
FLOOR = 1e-10  # lowest mass error drawn, on a logarithmic axis


@torch.no_grad()
def picture(path: Path, problem: Problem, models: dict[str, ConstrainedModel], parameter: Tensor, seed: int) -> None:
    """Draw means and bands at three times, their difference from the exact field, and the mass error of draws.

    Args:
        path: Image file to write.
        problem: The problem.
        models: Models by name, of the names in ``SHOWN``.
        parameter: Parameter of the field, a scalar.
        seed: Seed of the draws.
    """
    test, times, grid = batch_of(problem, parameter.reshape(1)), problem.times, problem.grid
    exact = test["target"].unflatten(-1, problem.shape)[0]  # (nt, nx)
    figure = Figure(figsize=(12, 9.6), dpi=110, layout="constrained")
    cells = figure.add_gridspec(3, 3)
    fields, errors = ([figure.add_subplot(cells[row, column]) for column in range(3)] for row in range(2))
    mass = figure.add_subplot(cells[2, :])
    slices = (problem.slices // 5, problem.slices // 2, problem.slices - 1)
    zoom = fields[1].inset_axes((0.53, 0.42, 0.44, 0.54))
    panels = [(axes, index, 1.0) for axes, index in zip(fields, slices)] + [(zoom, slices[1], 1.0)]
    panels += [(axes, index, 0.0) for axes, index in zip(errors, slices)]
    for axes, index, level in panels:
        axes.plot(grid, level * exact[index], color="black", lw=1.2, label="exact", zorder=3)
    for name, model in models.items():
        color, forecast, constraint = SHOWN[name], model.forecast(test), model.constraint(test)
        mean, band = (part.unflatten(-1, problem.shape)[0] for part in (forecast.mean, 3 * forecast.stddev))
        for axes, index, level in panels:
            middle = mean[index] - (1 - level) * exact[index]
            low, high = middle - band[index], middle + band[index]
            axes.plot(grid, middle, color=color, lw=1.2, ls="--", label=f"{name}: mean")
            axes.fill_between(grid, low, high, color=color, alpha=0.3, lw=0, label=f"{name}: 3 std. dev.")
        draws = forecast.sample((20,), torch.Generator().manual_seed(seed))
        error = constraint.residual(draws)[:, 0].abs().clamp(min=FLOOR)  # (draws, nt)
        spread = f"{name}: 20 draws, largest {float(error.max()):.0e}"
        mass.scatter(times.expand_as(error), error, s=9, color=color, alpha=0.5, lw=0, label=spread)
    gap = problem.constraint(test["context"]).residual(test["target"])[0].abs().clamp(min=FLOOR)
    mass.plot(times[1:], gap[1:], color="black", ls=":", label="exact field: error of the trapezoid rule")
    for axes, below, index in zip(fields, errors, slices):
        axes.set(title=f"t = {float(times[index]):.2f}", xlabel="x", ylim=(-0.1, 1.9))
        below.set(xlabel="x", ylim=(-0.06, 0.1))
    fields[0].set(ylabel="u")
    errors[0].set(ylabel="u - exact")
    front = float(times[slices[1]])
    zoom.set(xlim=(front - 0.06, front + 0.04), ylim=(-0.05, 0.5))
    zoom.annotate("the front", (0.95, 0.87), xycoords="axes fraction", ha="right", fontsize=9)
    zoom.tick_params(labelsize=8)
    fields[0].legend(loc="upper right", fontsize=9)
    mass.set(title=f"Mass error of draws in every slice (0 drawn at {FLOOR:.0e})", xlabel="t", ylabel="|mass - law|")
    mass.set(yscale="log", ylim=(FLOOR / 3, 1))
    mass.legend(loc="upper center", fontsize=9, ncols=3)
    for axes in (*fields, *errors, zoom, mass):
        axes.grid(alpha=0.25)
    figure.suptitle(f"Porous medium equation, test parameter m = {float(parameter):.2f}")
    write_figure(path, figure)
