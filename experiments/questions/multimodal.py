"""Laws with two modes: a pulse that moves left or right, under a conserved mass.

A pulse of height a and width b sits in the middle of a periodic interval. By chance it has moved left or right by a
known distance; the odds depend on the input. The input is (a, b, distance, odds), the target the field on ``POINTS``
points with a small smooth error of integral zero, so that the mass is known. No law with one mode can say this. The
prose is in ``pages/``.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import probhard as ph
from experiments import pictures, templates
from experiments.records import Records
from experiments.table import Lines, Request, Table, measured
from probhard.errors import check_choices

NAME = "multimodal"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
KEYS = ("row", "seed")
POINTS, TRAIN, TEST, DRAWS = 32, 2000, 500, 200
STEPS, BATCH, RATE, HIDDEN = 2000, 100, 2e-3, 64
DIRECTIONS = 64  # random ones
NOISE, NEAR = 0.03, 0.15  # of the target; largest RMS distance of a draw that lies on a mode
SEEDS = (0, 1, 2)
FLOAT = torch.float32
GRID = (torch.arange(POINTS, dtype=FLOAT) + 0.5) / POINTS


@dataclass(frozen=True)
class Row:
    """A number of modes, a method, and whether random directions are scored besides the points."""

    modes: int
    method: str
    directions: bool = False


ROWS = {
    "normal": Row(1, "base"),
    "normal, projected": Row(1, "probhard-ob"),
    "normal, projected, directions": Row(1, "probhard-ob", True),
    "two modes": Row(2, "base"),
    "two modes, projected by member": Row(2, "probhard-ob"),
    "two modes, directions": Row(2, "base", True),
    "two modes, directions, draws projected": Row(2, "probhard-inf", True),
    "two modes, projected by member, directions": Row(2, "probhard-ob", True),
    "four modes, projected by member, directions": Row(4, "probhard-ob", True),
}


@dataclass(frozen=True)
class Data:
    """Inputs (N, 4), targets (N, n) and both possible fields (2, N, n)."""

    inputs: Tensor
    target: Tensor
    modes: Tensor


def pulse(inputs: Tensor, side: float) -> Tensor:
    """The field (N, n) that has moved left (-1) or right (1)."""
    height, width, distance, _ = inputs.unbind(-1)
    apart = (GRID - (0.5 + side * distance).unsqueeze(-1) + 0.5) % 1.0 - 0.5  # periodic
    return height.unsqueeze(-1) * torch.exp(-0.5 * (apart / width.unsqueeze(-1)).square())


def data(count: int, seed: int) -> Data:
    """Draw pulses.

    Args:
        count: Number of them.
        seed: Of inputs, sides and errors.
    """
    source = torch.Generator().manual_seed(seed)
    low, high = torch.tensor([[0.5, 0.03, 0.12, 0.2], [1.5, 0.08, 0.3, 0.8]], dtype=FLOAT)
    inputs = low + (high - low) * torch.rand(count, 4, generator=source, dtype=FLOAT)
    modes = torch.stack([pulse(inputs, -1.0), pulse(inputs, 1.0)])
    right = torch.rand(count, generator=source) < inputs[:, 3]
    waves = torch.stack([torch.sin(2 * torch.pi * k * GRID) for k in (1, 2, 3)])  # of integral zero
    error = NOISE * torch.randn(count, 3, generator=source, dtype=FLOAT) @ waves
    return Data(inputs, torch.where(right.unsqueeze(-1), modes[1], modes[0]) + error, modes)


def mass(inputs: Tensor) -> ph.Conservation:
    """The mean over the points of the pulse before it moved, which both sides keep."""
    return ph.Conservation(torch.full((POINTS,), 1 / POINTS, dtype=FLOAT), pulse(inputs, 0.0).mean(-1))


class Network(nn.Module):
    """Means, standard deviations and odds of the modes, from inputs (N, 4).

    Args:
        modes: Number of modes.
    """

    def __init__(self, modes: int) -> None:
        super().__init__()
        self.modes = modes
        sizes = (4, HIDDEN, HIDDEN)
        body = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.SiLU())]
        self.body, self.head = nn.Sequential(*body), nn.Linear(HIDDEN, modes * (2 * POINTS + 1))

    def forward(self, inputs: Tensor) -> Any:
        """A law, or a mixture."""
        values = self.head(self.body(inputs)).unflatten(-1, (self.modes, 2 * POINTS + 1))
        members = [
            (part[:, :POINTS], nn.functional.softplus(part[:, POINTS:-1] - 2) + 1e-3) for part in values.unbind(-2)
        ]
        if self.modes == 1:
            return members[0]
        return ph.Mixture(tuple(map(ph.as_location_scale, members)), torch.softmax(values[..., -1], -1).T)


def method(row: Row) -> ph.Method:
    """The method of a row; directions are unit vectors, and weigh as much as the points."""
    own = ph.METHODS[row.method]
    if not row.directions:
        return own
    rows = torch.randn(DIRECTIONS, POINTS, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    return own.replace(functionals=ph.Directions(rows / rows.norm(dim=-1, keepdim=True)), functional_weight=1.0)


def measure(name: str, seed: int, steps: int = STEPS) -> Lines:
    """Train a row and return its line.

    Args:
        name: In ``ROWS``.
        seed: Of data, weights and draws.
        steps: Of training.
    """
    row = ROWS[name]
    train, test = data(TRAIN, 2 * seed), data(TEST, 2 * seed + 1)
    torch.manual_seed(seed)
    model = ph.ConstrainedModel(Network(row.modes).to(FLOAT), mass, method(row))
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        some = torch.randint(TRAIN, (BATCH,))
        optimizer.zero_grad()
        (model.loss((train.inputs[some], train.target[some])) / BATCH).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        forecast = model.forecast(test.inputs)
        draws = forecast.sample((DRAWS,), torch.Generator().manual_seed(seed))
        rule = mass(test.inputs)
        apart = (draws - test.modes.unsqueeze(1)).square().mean(-1).sqrt()  # (2, S, N)
        right = (apart[1] < apart[0]).double().mean(0)
        line = {
            "row": name,
            "seed": seed,
            "crps": float(ph.crps(forecast, test.target).mean()),
            "crps_draws": float(ph.crps_ensemble(draws, test.target, estimator="fair").mean()),
            "energy": float(ph.energy_score(draws, test.target, estimator="fair").mean()),
            "on_a_mode": float((apart.amin(0) < NEAR).double().mean()),
            "odds_error": float((right - test.inputs[:, 3]).abs().mean()),
            "violation_mean": float(rule.violation(forecast.mean).max()),
            "violation_draws": float(rule.violation(draws).max()),
        }
        if seed == 0:
            line["shown"] = {"modes": test.modes[:, 0].tolist(), "draws": draws[:12, 0].tolist()}
    return [line]


def table(request: Request) -> Table:
    """The table: all rows, or those that are named."""
    rows = request.names("methods")
    check_choices("method", rows, tuple(ROWS))

    def pieces(records: Records) -> list[Callable[[], Lines]]:
        return [
            partial(measure, name, seed, 20 if request.quick else STEPS)
            for seed in request.chosen_seeds(SEEDS)
            for name in rows or ROWS
            if not records.has({"row": name, "seed": seed})
        ]

    return Table(NAME, KEYS, measured(pieces), render, plot)


def render(lines: Lines) -> str:
    """Return the page."""
    rows = []
    for name in ROWS:
        own = [line for line in lines if line["row"] == name]
        if own:
            worst = (max(line[x] for line in own) for x in ("violation_mean", "violation_draws"))
            rows.append(
                [
                    name,
                    *(_spread([line[x] for line in own], ".4f") for x in ("crps", "crps_draws")),
                    _spread([line["energy"] for line in own], ".3f"),
                    _spread([100 * line["on_a_mode"] for line in own], ".1f") + " %",
                    _spread([line["odds_error"] for line in own], ".3f"),
                    *(f"{value:.0e}" for value in worst),
                ]
            )
    columns = [
        *("row", "CRPS, closed form", "CRPS, draws", "energy score", "draws on a mode", "error of the odds"),
        *("violation, mean", "violation, worst draw"),
    ]
    values = {
        "table": templates.table(columns, rows),
        "seeds": len({line["seed"] for line in lines}),
        "points": POINTS,
        "near": NEAR,
        "steps": STEPS,
        "directions": DIRECTIONS,
    }
    return templates.fill(PAGE, values)


def _spread(values: list[float], form: str) -> str:
    """Mean and standard deviation over seeds."""
    mean = f"{statistics.mean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form}}"


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: draws of every row for one input, over both possible fields."""
    from matplotlib.figure import Figure as Canvas

    shown = [line for name in ROWS for line in lines if line["row"] == name and "shown" in line]
    figure = Canvas(figsize=(11, 7.4), layout="constrained")
    panels = figure.subplots(3, 3, sharex=True, sharey=True).flatten()
    for axes, line in zip(panels, shown):
        for field in line["shown"]["draws"]:
            axes.plot(GRID, field, color=pictures.BLUE, lw=0.7, alpha=0.6)
        for field in line["shown"]["modes"]:
            axes.plot(GRID, field, color=pictures.ORANGE, lw=1.4, ls="--")
        axes.set_title(line["row"], fontsize=9)
    figure.supxlabel("place; dashed: the two possible fields, lines: 12 draws", fontsize=9)
    pictures.save(figure, path)
