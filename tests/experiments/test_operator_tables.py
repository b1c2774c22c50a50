"""Tables of operators: references against exact solutions, rows that run, and pages that are up to date."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from experiments.pde import cl, cl_tables, diffusion, diffusion_tables, out_of_range, range_tables
from experiments.pde.cl_cases import CASES, burgers, darcy, derivatives
from experiments.table import Request

RESULTS = Path(__file__).parents[2] / "results"


def test_burgers_against_cole_and_hopf() -> None:
    points, v = 64, 0.2
    x = np.arange(points) * 2 * np.pi / points
    field = burgers(torch.as_tensor(np.sin(x))[None], torch.tensor([v], dtype=torch.float64), 5)[0, -1]
    # u = -2 v (log phi)_x for the heat equation's phi, from phi_0 = exp(-int u_0 / (2 v)), convolved with its kernel.
    y = np.linspace(-12, 12, 8001)
    shifted = x[:, None] - y
    weight = np.exp((np.cos(shifted) - 1) / (2 * v) - y**2 / (4 * v))
    exact = (y / 1.0 * weight).sum(-1) / weight.sum(-1)
    np.testing.assert_allclose(field.numpy(), exact, atol=2e-4)


def test_darcy_against_the_series_of_a_constant() -> None:
    u = darcy(np.full((65, 65), 2.0))
    odd = np.arange(1, 60, 2)
    m, n = np.meshgrid(odd, odd)
    centre = (16 / np.pi**4 * np.sin(m * np.pi / 2) * np.sin(n * np.pi / 2) / (m * n * (m**2 + n**2))).sum()
    assert u[32, 32] == pytest.approx(centre / 2, rel=1e-3)
    assert abs(u[0]).max() == abs(u[:, -1]).max() == 0


def test_spectral_derivatives() -> None:
    x = torch.arange(16, dtype=torch.float64) * 2 * torch.pi / 16
    first, second = derivatives(16)
    torch.testing.assert_close(first @ torch.sin(3 * x), 3 * torch.cos(3 * x))
    torch.testing.assert_close(second @ torch.sin(3 * x), -9 * torch.sin(3 * x))


@pytest.mark.parametrize("name", list(CASES))
def test_references_nearly_satisfy_the_rows(name: str) -> None:
    case = CASES[name]()
    batch = case.data(2, torch.Generator().manual_seed(0))
    rows = case.equations(batch.inputs).residual(batch.target)
    assert rows.shape[-1] == len(case.places) == case.shape[0] * case.shape[1]
    assert float(rows.square().mean().sqrt()) < 5e-3 * float(batch.target.square().mean().sqrt())
    assert float(case.known(batch.inputs).residual(batch.target).abs().max()) < 1e-9


@pytest.mark.parametrize("row", ["solver", "PDE-CL 4 experts", "PDE-CL law probhard-ob", "soft"])
def test_rows_of_pde_cl_run(tmp_path: Path, row: str) -> None:
    request = Request("pde-cl", tmp_path, problems="darcy", methods=row, quick=True)
    units = cl.grid(tmp_path / "pde-cl.jsonl", request)
    assert units.run(progress=False) == 1
    (line,) = units.records.read()
    assert line["relative"] < 0.01 or row != "solver"
    assert line["known"] < 1e-10 or row not in ("solver", "PDE-CL law probhard-ob")
    assert "### darcy" in cl_tables.render([line], quick=True)


def test_rows_outside_the_range_run(tmp_path: Path) -> None:
    request = Request("out-of-range", tmp_path, methods="BayesianNO, DiverseNO, probhard-ob", quick=True)
    units = out_of_range.grid(tmp_path / "out-of-range.jsonl", request)
    assert units.run(progress=False) == 3
    lines = units.records.read()
    assert len(lines) == 4 * (3 + 2 + 1)
    for line in lines:
        assert (line["ce"] < 1e-10) == ("+" in line["row"] or line["row"] == "probhard-ob")
    assert "k in [7, 8]" in range_tables.render(lines, quick=True)


def test_rows_of_diffusion_run(tmp_path: Path) -> None:
    units = diffusion.grid(tmp_path / "diffusion.jsonl", networks=["soft", "projected", "gp"], quick=True)
    assert units.run(progress=False) == 3
    lines = {line["row"]: line for line in units.records.read()}
    for row in ("probhard-ob, ANP", "ProbConserv-GP"):
        assert lines[row]["ce_draws"] < 1e-10
    assert lines["ProbConserv-GP"]["mse"] < lines["GP"]["mse"]
    assert "published" in diffusion_tables.render(list(lines.values()), quick=True)


@pytest.mark.parametrize("tables", [cl_tables, range_tables, diffusion_tables])
def test_pages_are_those_of_the_lines(tables: ModuleType) -> None:
    lines = [json.loads(line) for line in (RESULTS / f"{tables.NAME}.jsonl").read_text().splitlines()]
    assert tables.render(lines) == (RESULTS / f"{tables.NAME}.md").read_text()
