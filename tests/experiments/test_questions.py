"""The tables that answer readers' questions: quick runs, pages, and what their helpers compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from experiments.pde.measures import variogram_pairs
from experiments.pde.rows import TABLES
from experiments.questions import inference, metrics, multimodal, multivariate, sampling
from experiments.records import Records
from experiments.table import Request

from probhard.cli import main
from probhard.pde.problems import PROBLEMS

RESULTS = Path(__file__).parents[2] / "results"
MODULES = {module.NAME: module for module in (inference, metrics, multimodal, multivariate, sampling)}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_committed_page_is_what_its_lines_give(name: str) -> None:
    table = MODULES[name].table(Request(name, RESULTS))
    lines = Records(RESULTS / f"{name}.jsonl", table.keys).read()
    assert table.render(lines) == (RESULTS / f"{name}.md").read_text()


def lines_of(folder: Path, name: str) -> list[dict]:
    return list(map(json.loads, (folder / "quick" / f"{name}.jsonl").read_text().splitlines()))


def test_mixtures_are_trained_and_shown(tmp_path: Path) -> None:
    rows = "normal,two modes"
    assert main(["bench", "multimodal", "--quick", "--methods", rows, "--output", str(tmp_path)]) == 0
    lines = lines_of(tmp_path, "multimodal")
    assert [line["row"] for line in lines] == ["normal", "two modes"]
    assert all(line["violation_draws"] > 1e-3 for line in lines)  # neither is projected
    assert "| two modes |" in (tmp_path / "quick" / "multimodal.md").read_text()


def test_pulses_keep_their_mass() -> None:
    data = multimodal.data(50, 0)
    rule = multimodal.mass(data.inputs)
    assert rule.violation(data.target).max() < 1e-3  # the pulse is cut at no end, but the grid is coarse
    assert rule.violation(data.modes).max() < 1e-3


def test_draws_are_timed(tmp_path: Path) -> None:
    problems = "one mass row,hierarchy"
    assert main(["bench", "inference", "--quick", "--problems", problems, "--output", str(tmp_path)]) == 0
    lines = lines_of(tmp_path, "inference")
    assert {line["set"] for line in lines} == {"one mass row", "hierarchy"}
    assert all(0 < line["free"] < 1e6 and line["violation"] < 1e-12 and line["flagged"] == 0 for line in lines)
    assert "a feasible draw costs" in (tmp_path / "quick" / "inference.md").read_text()


def test_every_set_of_the_draws_has_a_feasible_center() -> None:
    for name, case in inference.CASES.items():
        size = case.sizes[0]
        center, constraint = case.center(size), case.build(size)
        if name != "total variation penalty":
            assert constraint.relative_violation(center.unsqueeze(0)).max() < 0.05, name


def test_metrics_are_those_of_their_names() -> None:
    errors = torch.randn(30, 4, dtype=torch.float64) @ torch.randn(4, 4, dtype=torch.float64)
    held = metrics.Errors(errors, errors.square().mean(0), lambda layer: layer.metric.values.square().sum())
    z = torch.zeros(4, dtype=torch.float64)
    dense = metrics.build("dense", held).weight(z, None).dense()
    torch.testing.assert_close(dense.diagonal(), errors.square().mean(0))
    sample = errors.mT @ errors / len(errors)
    apart = [float((dense - share * sample - (1 - share) * torch.diag(sample.diagonal())).norm()) for share in (0, 0.9)]
    assert apart[1] < apart[0]  # correlated like the errors
    learned = metrics.build("learned diagonal", held)
    assert learned.values.log().abs().sum() < held.variance.log().abs().sum()  # towards the minimum of this loss, 1


def test_fields_are_scored_as_a_whole(tmp_path: Path) -> None:
    arguments = ["bench", "multivariate", "--quick", "--problems", "stefan", "--methods", "base"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    lines = {line["method"]: line for line in lines_of(tmp_path, "multivariate")}
    assert {"base", "probconserv", "probhard-physics-inf"} <= set(lines)
    assert min(lines["base"]["outside_bounds"], lines["base"]["rising"]) > 0
    assert lines["probhard-physics-inf"]["outside_depth"] < 1e-9
    page = (tmp_path / "quick" / "multivariate.md").read_text()
    assert "| probconserv |" in page
    assert "Kendall" in page


def test_pairs_of_the_variogram_are_neighbours_and_others() -> None:
    problem = PROBLEMS["heat"]()
    pairs = variogram_pairs(problem)
    slices, points = problem.shape
    near = slices * (points - 1) + (slices - 1) * points
    assert len(pairs) > near
    assert set((pairs[:near, 0] - pairs[:near, 1]).tolist()) == {1, points}
    assert int(pairs.max()) < slices * points


def test_rows_of_draws_are_judged_by_the_closed_form(tmp_path: Path) -> None:
    lines = [
        {"method": name, "seed": 0, "epochs": 4, "mse": 1.0, "crps": crps, "energy": 1.0, "covered_90": 0.9,
         "epoch_seconds": seconds}
        for name, crps, seconds in (("closed form", 0.2, 0.1), ("10 draws", 0.1, 0.7))
    ]  # fmt: skip
    page = sampling.render(lines)
    assert "takes 7 times as long" in page
    assert "Against us: 10 draws" in page
    assert "Rows not run: base, 50 draws" in page
    rows = TABLES["sampling"].rows
    assert rows["10 draws"].judge == rows["50 draws"].judge == rows["closed form"].method
