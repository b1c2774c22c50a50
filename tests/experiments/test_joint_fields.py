"""The table of joint laws: calibration, coverage by scale, goals, and the page that lies in the repository."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.pde import joint_measures as measures
from experiments.pde import joint_tables as tables
from experiments.pde.joint_cases import Case, Data
from torch import nn

import probhard as ph
from probhard.calibration import Calibration
from probhard.laws.covariance import LowRank
from probhard.laws.distribution import LocationScale
from probhard.model import Batch

SHAPE = (16, 16)
RESULTS = Path(__file__).parents[2] / "results"


class Given(nn.Module):
    """A backbone that predicts one law with independent and shared noise."""

    def __init__(self) -> None:
        super().__init__()
        x = torch.linspace(0, 1, 256)
        self.factor = torch.stack([torch.cos(k * x) for k in (1, 2, 3)], -1)

    def forward(self, inputs: torch.Tensor) -> LocationScale:
        count = len(inputs)
        cov = LowRank(self.factor.expand(count, -1, -1), torch.full((count, 256), 0.2))
        return LocationScale(torch.zeros(count, 256), cov)


def mass(context: torch.Tensor) -> ph.Conservation:
    return ph.Conservation(torch.full((256,), 1 / 256), context)


def drawn(model: ph.ConstrainedModel, count: int, calibration: Calibration) -> Batch:
    """Fields from the projected law with reweighted parts."""
    batch = Batch(torch.zeros(count, 1), None, None, torch.zeros(count))
    fields = model.calibrated(calibration).forecast(batch).sample((), torch.Generator().manual_seed(1))
    return Batch(batch.inputs, fields, None, batch.context)


def case_of(data: Any = None) -> Case:
    return Case("given", SHAPE, partial(lambda *_: data), mass, periodic=True)


def test_calibration_finds_the_numbers_that_the_fields_were_drawn_with() -> None:
    model = ph.ConstrainedModel(Given(), mass, "probhard-ob")
    case = case_of()
    batches = [drawn(model, count, Calibration(2.0, 0.7)) for count in (200, 40)]
    line = measures.measured(model, case, Data(batches[0], batches[0], *batches), 1, 5)
    assert line["own"] == pytest.approx(2.0, rel=0.05)
    assert line["shared"] == pytest.approx(0.7, rel=0.1)
    assert abs(line["covered_90"][0] - 0.9) < abs(line["raw"]["covered_90"][0] - 0.9)
    assert line["mse"] == line["raw"]["mse"]


def test_bands_of_the_true_law_hold_what_they_promise_at_every_scale() -> None:
    model = ph.ConstrainedModel(Given(), mass, "probhard-ob")
    case = case_of()
    figures = measures.figures(model, case, drawn(model, 400, Calibration()), 0, 20)
    assert figures["scales"] == ["cells", *(f"blocks of {k} x {k}" for k in (2, 4, 8)), "total", "integral"]
    assert all(0.85 < value < 0.95 for value in figures["covered_90"][:-2])
    assert figures["covered_90"][-2:] == [None, None]
    assert figures["fixed"] == [0, 0, 0, 0, 400, 400]
    assert figures["violation"] < 1e-11
    assert figures["lag_draws"] == pytest.approx(figures["lag_errors"], abs=0.05)


def line(problem: str, law: str, seed: int, covered: float, energy: float, **others: Any) -> dict[str, Any]:
    """A result line with the same coverage at every scale."""
    figures = {"scales": ["cells", "blocks of 2 x 2", "total"], "covered_90": [covered, covered, None],
               "crps_by_scale": [0.1, 0.2, None], "fixed": [0, 0, 100], "energy": energy, "crps": 0.1, "mse": 0.01,
               "lag_errors": 0.9, "lag_draws": 0.8, "violation": 0.0}  # fmt: skip
    fields = [energy, energy + 0.1]
    return {"problem": problem, "law": law, "seed": seed, "epochs": 2, **figures, "raw": dict(figures), "own": 1.0,
            "shared": 1.0, "energy_fields": fields, "seconds": 10.0, **others}  # fmt: skip


def test_goals_are_told_with_misses_first() -> None:
    lines = [line("pme", "diagonal", 0, 0.5, 2.0), line("pme", "joint", 0, 0.9, 1.5)]
    page = tables.render(lines)
    assert "| calibrated coverage within 85 to 95 % at every scale | met |" in page
    assert "-0.5 [-0.5, -0.5]" in page
    worse = [*lines, line("heat", "diagonal", 0, 0.5, 1.0), line("heat", "joint", 0, 0.8, 1.2, crps=0.2)]
    page = tables.render(worse)
    assert "missed: heat, cells: 80 %; heat, blocks of 2 x 2: 80 %" in page
    assert "missed: heat: +0.2 [+0.2, +0.2]" in page
    assert "missed: +50.0 % (pme +0.0 %, heat +100.0 %)" in page
    timed = [*lines, line("stefan", "joint", 0, 0.9, 1.0, step_seconds=0.2, diagonal_step_seconds=0.1)]
    assert "missed: stefan 2.00" in tables.render(timed)
    assert "| goal | result |" not in tables.render(lines[:1])  # nothing to compare


def test_the_page_is_the_one_that_its_lines_give() -> None:
    path = RESULTS / "joint-fields.jsonl"
    if not path.exists():
        pytest.skip("there are no result lines")
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert (RESULTS / "joint-fields.md").read_text() == tables.render(lines)
