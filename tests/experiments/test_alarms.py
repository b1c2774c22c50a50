"""The page on false alarms: its cases, lines and figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from experiments.alarm_cases import cases, flat_start, power_flow
from experiments.records import Records

from experiments import alarms
from probhard.cli import main


def test_cases_are_measured_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["bench", "alarms", "--quick", "--problems", "quaternion,SO(3) by six", "--output", str(tmp_path)]
    assert main(arguments) == 0
    folder = tmp_path / "quick"
    lines = list(map(json.loads, (folder / "alarms.jsonl").read_text().splitlines()))
    assert {line["case"] for line in lines} == {"quaternion", "SO(3) by six"}
    assert all(line["converged"] == line["as_near"] == 1 and line["alarms"] == 0 for line in lines)
    page = (folder / "alarms.md").read_text()
    assert "| quaternion, near | 0.1 | 100.00 % | 0 |" in page
    assert "## A training step" not in page
    assert (folder / "alarms.png").stat().st_size > 5_000
    assert "Written" in capsys.readouterr().out


def test_the_committed_page_is_what_its_lines_give() -> None:
    results = Path(__file__).parents[2] / "results"
    lines = Records(results / "alarms.jsonl", alarms.KEYS).read()
    assert alarms.render(lines) == (results / "alarms.md").read_text()


def test_unknown_cases_are_rejected(tmp_path: Path) -> None:
    assert main(["bench", "alarms", "--problems", "cone", "--output", str(tmp_path)]) == 2


def test_slsqp_is_an_oracle_of_all_cases() -> None:
    for case in cases():
        z = case.points(1, case.near)
        if case.name != "SO(3) by nine":  # SLSQP cannot solve dependent rows
            assert case.constraint.violation(alarms.slsqp(case, z[0])) <= alarms.FEASIBLE


def test_power_flow_balances_powers() -> None:
    """Complex powers ``V conj(Y V)`` are generation less load."""
    from experiments.alarm_cases import admittance, loads

    u = flat_start() + 0.1 * torch.randn(36, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    voltage = torch.polar(u[18:27], u[27:])
    power = voltage * (admittance() @ voltage).conj()
    made = torch.complex(u[:9] - loads()[:9], u[9:18] - loads()[9:])
    h = power_flow().residual(u)
    torch.testing.assert_close(torch.complex(h[:9], h[9:18]), made - power)
    assert h[18] == u[27]


def test_a_training_step_is_timed() -> None:
    line = alarms.training_step(4, 1)
    assert line["milliseconds"] > line["their_milliseconds"] > 0
