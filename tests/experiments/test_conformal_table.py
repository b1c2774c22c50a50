"""The conformal table: units, splits and rolling origins, page and figure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("hierarchicalforecast")

from experiments.conformal import runs, tables, units

from probhard.cli import main


def test_a_case_is_measured_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "conformal", "--quick", "--problems", "simulated tree", "--output", str(tmp_path)]) == 0
    folder = tmp_path / "quick"
    lines = [json.loads(line) for line in (folder / "conformal.jsonl").read_text().splitlines()]
    assert [(line["sets"], line["level"]) for line in lines] == [
        (kind, level) for kind in (runs.JOINT, runs.FAMILY, runs.EACH, runs.PEER) for level in runs.LEVELS
    ]
    for line in lines:
        scatter = line["expected_spread"] * (1 if line["sets"] in (runs.JOINT, runs.FAMILY) else 2)
        assert line["measured"] == pytest.approx(line["promised"], abs=4 * scatter / line["splits"] ** 0.5)
        assert line["violation"] < 1e-10
        assert line["obey"] == 1
    page = (folder / "conformal.md").read_text()
    assert "| simulated tree | joint | 0.8 | 0.802 |" in page
    assert "## Rolling origins" not in page.split("![")[0].split("## Exchangeable")[0]
    assert (folder / "conformal.png").stat().st_size > 5_000
    assert "Written" in capsys.readouterr().out


def test_unknown_cases_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "conformal", "--problems", "foo", "--output", str(tmp_path)]) != 0
    assert "problem='foo'" in capsys.readouterr().err


def test_the_peer_has_the_same_means_and_the_textbook_intervals() -> None:
    scored = runs.Scored(units.tree_case(60))
    P, base = scored.peer
    coherent = (scored.case.summation @ P @ base).T
    equal = scored.joint.deviations
    assert equal.tangent is not None
    b = torch.zeros(equal.tangent.core.row_count, dtype=torch.float64)
    np.testing.assert_allclose(equal.tangent.project(scored.case.units.inputs, b).numpy(), coherent, atol=1e-9)
    calibration, test = np.arange(40), np.arange(40, 60)
    lower, upper = scored.intervals(runs.EACH, calibration, test, 0.8)
    deviation = scored.relative[calibration].sort(0).values[33 - 1]  # ceil(41 * 0.8) = 33
    center, scale = scored.family.deviations.centers[test], scored.family.deviations.scales[test]
    torch.testing.assert_close(upper, center + scale * deviation)
    torch.testing.assert_close(lower, (center - scale * deviation).clamp(min=0))


def test_fields_keep_the_mass_of_their_grid() -> None:
    case = units.field_case("advection", 20)
    assert case.units.target is not None
    constraint = case.model.constraint(case.units)
    assert float(constraint.relative_violation(case.units.target).max()) < 1e-12
    blocks = sum(-(-units.SLICES // size) * -(-units.POINTS // size) for size in units.SIZES)
    assert case.family.rows(units.SLICES * units.POINTS).row_count == blocks
    assert case.units.target.shape == (20, units.SLICES * units.POINTS)


def test_rolling_origins_promise_nothing() -> None:
    case = units.tree_case(24)
    lines = runs.origin_lines(case)
    assert {line["exchangeable"] for line in lines} == {False}
    assert all("promised" not in line for line in lines)
    assert [line["unbounded"] for line in lines if line["sets"] == runs.PEER] == [0, 0]
    page = tables.render([{**line, "case": "labour"} for line in lines])
    assert "| labour | family | 0.9 |" in page
    assert "no row falls short" in page or "bands fall short on" in page
