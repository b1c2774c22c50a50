"""The page on first order: its cases, lines, errors and figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from experiments.first_order_cases import GROUPS, Case, cases

from experiments import first_order
from probhard import Conservation, NonNegative
from probhard.cli import main


def test_groups_are_measured_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["bench", "first-order", "--quick", "--problems", "simplex,hierarchy", "--output", str(tmp_path)]
    assert main(arguments) == 0
    folder = tmp_path / "quick"
    lines = list(map(json.loads, (folder / "first-order.jsonl").read_text().splitlines()))
    assert {line["rule"] for line in lines} == set(first_order.CORNERS)
    assert all(line["milliseconds"] > 0 and line["draws"] == 2000 for line in lines)
    page = (folder / "first-order.md").read_text()
    assert "| mean inside | 0.01 |" in page
    assert "### Spheres" not in page
    assert (folder / "first-order.png").stat().st_size > 5_000
    assert "Written" in capsys.readouterr().out


def test_unknown_groups_are_rejected(tmp_path: Path) -> None:
    assert main(["bench", "first-order", "--problems", "cone", "--output", str(tmp_path)]) == 2


def test_every_case_is_feasible_to_project() -> None:
    every = list(cases(GROUPS))
    assert len({(case.group, case.setting, case.spread) for case in every}) == len(every) == 61
    for case in cases(GROUPS, quick=True):
        draws = case.exact(5)
        assert draws.shape == (5, len(case.mean))
        assert case.constraint.violation(draws).max() < 1e-9


def test_exact_rules_have_no_errors_and_wrong_ones_have(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"delta": {"covariance": "delta"}, "censored": {"covariance": "censored"}}
    monkeypatch.setitem(first_order.RULES, "simplex", rules)
    mean = torch.zeros(4, dtype=torch.float64)
    case = Case("simplex", "", 1.0, mean, torch.ones_like(mean), NonNegative())
    delta, censored = first_order.measure(case, 50_000, 1)
    assert abs(censored["crps"]) < 1e-3
    assert max(censored["mean"], censored["variance"]) < 0.02
    # of the clipped law: mean 1 / sqrt(2 pi), variance 1 / 2 - 1 / (2 pi)
    assert delta["mean"] == pytest.approx(0.3989 / 0.3408**0.5, rel=0.02)
    assert delta["crps"] > 0.1
    rules = {"delta": {"covariance": "delta"}}
    monkeypatch.setitem(first_order.RULES, "simplex", rules)
    linear = Conservation(torch.ones(4, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    (exact,) = first_order.measure(Case("simplex", "", 1.0, mean, torch.ones_like(mean), linear), 50_000, 1)
    assert abs(exact["crps"]) < 1e-3
