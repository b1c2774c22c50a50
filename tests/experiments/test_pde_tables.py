"""Experiments of the PDE tables: lines, figures, resuming, rendering."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.pde import figures as pictures
from experiments.pde import measures, references, tables
from experiments.pde import runs as experiments
from experiments.pde.measures import dataset, evaluate
from experiments.pde.rows import LINEAR, NONLINEAR, TABLES, TVD
from experiments.pde.rules import RULES

import probhard as ph
from probhard.cli import main
from probhard.pde.problems import PROBLEMS

pytest.importorskip("lightning", reason="lightning is not installed")

FIELDS = {"problem", "method", "score", "seed", "epochs", "mse", "crps", "ce_mean", "ce_draws", "seconds"}


def run(folder: Path, *arguments: str) -> list[dict]:
    assert main(["bench", *arguments, "--quick", "--output", str(folder)]) == 0
    return [json.loads(line) for line in (folder / "quick" / f"{arguments[0]}.jsonl").read_text().splitlines()]


def first_row(page: str, heading: str, name: str) -> str:
    return next(row for row in page.partition(heading)[2].splitlines() if row.startswith(f"| {name} |"))


def test_a_table_is_run_rendered_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    few = ("pde-linear", "--problems", "pme", "--scores", "crps")
    lines = run(tmp_path, *few, "--methods", "base,softc")
    assert [line["method"] for line in lines] == [
        "base", "probconserv", "probhard-inf", "probhard-physics-inf", "probhard-physics-inf-or", "softc",
    ]  # fmt: skip
    assert all(set(line) >= FIELDS for line in lines)
    assert lines[-1]["choice"] in ph.method.PENALTIES
    by_name = {line["method"]: line for line in lines}
    for name, line in by_name.items():
        if name.startswith("prob"):
            assert line["ce_draws"] < 1e-12
            assert line["ce_mean"] < 1e-11
            assert line["infeasible"] == 0
        else:
            assert line["ce_draws"] > 1e-3
        assert (line["outside_bounds"] == 0) == ("physics" in name)
    # For a linear law alone these two are the same method.
    assert by_name["probconserv"]["mse"] == by_name["probhard-inf"]["mse"]
    page = (tmp_path / "quick" / "pde-linear.md").read_text()
    assert "### pme; trained with crps, 2 epochs, seeds 0" in page
    assert ".png" not in page  # there is no profile of it
    assert "| 7.95 | 20.2 | 2.02 |" in first_row(page, "## All rows", "base")
    before = (tmp_path / "quick" / "pde-linear.jsonl").stat().st_mtime_ns
    lines = run(tmp_path, *few, "--methods", "base,softc")
    assert (tmp_path / "quick" / "pde-linear.jsonl").stat().st_mtime_ns == before
    assert "2 of 2 units done" in capsys.readouterr().out
    assert len(run(tmp_path, *few, "--methods", "base,softc,probhard-or")) == 7
    assert not list((tmp_path / "quick" / "pde-linear.work").glob("pme*"))  # checkpoints are removed


def test_sums_that_exact_fronts_have_hold_in_training_or_afterwards(tmp_path: Path) -> None:
    names = ["probhard-jump", "probhard-interval", "probhard-interval-tv"]
    lines = run(tmp_path, "pde-linear", "--problems", "advection", "--methods", ",".join(names))
    assert [line["method"] for line in lines] == names
    for line in lines:
        assert 1e-4 < line["ce_draws"] <= 0.5 / 99 + 1e-12  # half a cell
        assert line["outside_bounds"] == line["infeasible"] == 0
    exact = PROBLEMS["advection"](dtype=torch.float64)
    parameters = exact.split(0, 20, 10, 10).test  # whose sums probhard-jump has, as quick tables draw them
    gap = exact.constraint(parameters).residual(exact.solution(parameters).flatten(-2)).abs()
    assert lines[0]["ce_mean"] == pytest.approx(float(gap.sum(-1).mean()), rel=1e-7)
    assert lines[0]["ce_draws"] == pytest.approx(float(gap.max()), rel=1e-7)


def test_rows_of_one_network(tmp_path: Path) -> None:
    few = ("pde-linear", "--scores", "crps", "--methods", "probhard-jump-warm", "--problems")
    jump, law = run(tmp_path / "advection", *few, "advection")
    assert [jump["method"], law["method"]] == ["probhard-jump-warm", "probhard-jump-warm-law"]
    assert law["best_epoch"] == jump["best_epoch"]
    assert law["ce_draws"] < 1e-12 < 1e-4 < jump["ce_draws"]
    assert law["ce_mean"] < 1e-11
    assert law["outside_bounds"] == law["infeasible"] == 0
    assert law["crps"] == law["crps_draws"] != jump["crps"]
    assert "crps_marginals" not in law


def test_phases_are_there_at_inference_and_in_the_figure(tmp_path: Path) -> None:
    rows = "base,probhard-jump-warm"
    lines = run(tmp_path, "pde-linear", "--problems", "stefan", "--scores", "crps", "--methods", rows)[-4:]
    assert [line["method"].removeprefix("probhard-") for line in lines] == [
        "jump-warm", "jump-warm-law", "phases", "phases-law",
    ]  # fmt: skip
    warm, _, phases, law = lines
    assert all(line["infeasible"] == line["outside_bounds"] == 0 for line in lines)
    assert phases["ce_draws"] == pytest.approx(warm["ce_draws"], rel=1e-7)
    assert phases["ce_draws"] <= 0.5 / 99 + 1e-12
    assert law["ce_draws"] < 1e-12
    means = {line["method"]: np.array(line["profile"]["mean"]) for line in lines}
    apart = {name: bool(((mean == 0) | (mean >= 0.625)).all()) for name, mean in means.items()}
    assert [name for name, both in apart.items() if both] == ["probhard-phases"]
    assert "pde-linear.png" in (tmp_path / "quick" / "pde-linear.md").read_text()
    assert (tmp_path / "quick" / "pde-linear.png").read_bytes()[:4] == b"\x89PNG"


def test_smallest_figures_of_all_rows_and_of_those_that_obey() -> None:
    def line(method: str, mse: float, crps: float, ce: float) -> dict[str, Any]:
        figures = {"mse": mse, "mse_free": 2 * mse, "crps": crps, "ce_mean": ce, "ce_draws": ce, "seconds": 1.0}
        return {"problem": "stefan", "method": method, "score": "crps", "seed": 0, "epochs": 2, **figures}

    lines = [line("base", 3e-5, 2e-3, 1e-2), line("probhard-ob", 5e-5, 4e-3, 1e-15), line("softc", 6e-5, 1e-3, 2e-6)]
    row = first_row(tables.render("pde-linear", lines), "## Smallest figures", "stefan")
    ours = [cell.partition(",")[0] for cell in row.split(" | ") if " by " in cell]
    assert ours == ["3 by base", "5 by probhard-ob", "1 by softc", "4 by probhard-ob", "10 by probhard-ob"]


def test_warm_ups_and_problems_of_rows(tmp_path: Path) -> None:
    def units(table: str, **options: Any) -> dict[tuple[str, str], int]:
        jobs = experiments.grid(table, tmp_path / "lines.jsonl", 150, objectives=["crps"], **options).units
        assert all(isinstance(job, experiments.Job) for job in jobs)
        return {(job.problem, job.trained): job.schedule.warm_up for job in jobs}

    linear, nonlinear = units("pde-linear"), units("pde-nonlinear")
    assert {row: warm for (_, row), warm in linear.items() if warm} == dict.fromkeys(
        ["probhard-physics-warm", "probhard-jump-warm"], 50
    )
    assert [problem for problem, row in linear if row == "probhard-jump-warm"] == ["advection", "stefan"]
    assert {warm for (_, row), warm in nonlinear.items() if row != "base"} == {15}
    assert {warm for (_, row), warm in units("pde-nonlinear", quick=True).items() if row != "base"} == {190}
    assert nonlinear["pme-2-3", "base"] == units("pde-nonlinear", quick=True)["pme-2-3", "base"] == 0


def test_tvd_keeps_profiles_and_draws_them(tmp_path: Path) -> None:
    lines = run(tmp_path, "tvd", "--methods", "base,probhard-tv")
    for line in lines:
        profile = line["profile"]
        assert profile["parameter"] == 1.5
        assert len(profile["mean"]) == len(profile["exact"]) == len(profile["stddev"]) == 100
        assert set(profile["exact"]) == {0, 1}  # the front is inside
        assert (line["negative"] == 0) == line["method"].startswith("probhard")
    assert (tmp_path / "quick" / "tvd.png").read_bytes()[:4] == b"\x89PNG"


def test_panels_of_a_figure_are_trained_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr(pictures.Figure, "suptitle", lambda self, title: titles.append(title))
    curve = {"exact": [1.0, 1.0, 0.0], "mean": [1.0, 0.9, 0.0], "stddev": [0.0, 0.1, 0.0], "negative": 0.0}

    def line(method: str, epochs: int, seed: int = 0) -> dict:
        about = {"score": "crps", "outside_bounds": 0.0, "profile": curve}
        return {"method": method, "epochs": epochs, "seed": seed, **about}

    lines = [line("base", 150), line("probhard-or", 150), line("probhard-or", 500)]
    path = tmp_path / "f.png"
    assert pictures.profiles(path, lines, "Front", ["base", "probhard-or"], 0.25) == path
    assert pictures.profiles(path, [*lines, line("base", 500)], "Front", ["base", "probhard-or"], 0.25) == path
    assert titles == ["Front, t = 0.250; 150 epochs", "Front, t = 0.250; 500 epochs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pde-linear", "--methods", "foo"], "method='foo'"),
        (["pde-linear", "--problems", "pme-2-3"], "Choose one of 'advection', 'stefan', 'pme', 'heat'"),
        (["pde-nonlinear", "--scores", "rmse"], "score='rmse'"),
        (["pde-linear", "--seeds", "a,b"], "--seeds a,b are not numbers"),
        (["pde-linear", "--methods", "probhard-physics", "--scores", "nll"], "nothing to run"),
        (["pde-linear", "--methods", "probhard-jump", "--problems", "heat"], "want a problem that has one"),
        (["tvd", "--render"], "holds no result lines"),
        (["timing", "--problems", "foo"], "problem='foo'"),
        (["timing", "--render"], "holds no result lines"),
        (["forecasting", "--windows", "foo"], "window='foo'"),
        (["forecasting", "--problems", "foo"], "data set='foo'"),
        (["forecasting", "--methods", "foo"], "method='foo'"),
    ],
)
def test_nothing_is_run_for_names_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", *arguments, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unknown_tables_are_named(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "pde-cubic"]) == 2
    assert "pde-linear" in capsys.readouterr().err


class Known(torch.nn.Module):
    """The exact field plus a known error."""

    def __init__(self, field: torch.Tensor, error: torch.Tensor) -> None:
        super().__init__()
        self.fields, self.error = field, error

    def forward(self, inputs: torch.Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.fields[: len(inputs)] + self.error, 0.1 * torch.ones(1))


def test_figures_against_plain_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "CHUNK", 4)
    problem = PROBLEMS["advection"](dtype=torch.float64)
    test = dataset(problem, torch.full((4,), 1.3))
    error = 0.05 * torch.randn(2000, generator=torch.Generator().manual_seed(0))
    model = ph.ConstrainedModel(Known(test.target, error), problem.constraint, "base")
    figures = evaluate(model, problem, RULES["mass"], test, torch.Generator().manual_seed(0))
    assert figures["mse"] == pytest.approx(float(error.square().mean()), rel=1e-12)
    field = (test.target[0] + error).reshape(20, 100).numpy()
    grid, times = np.linspace(0, 1, 100), np.linspace(0, 1, 100)[0:-1:5]
    gap = np.trapezoid(field, grid) - (0.5 + np.minimum(1.3 * times, 0.5))
    assert figures["ce_mean"] == pytest.approx(np.abs(gap).sum(), rel=1e-10)
    free = 1.3 * times < 0.5
    assert figures["mse_free"] == pytest.approx(float(error.reshape(20, 100)[torch.from_numpy(free)].square().mean()))
    assert figures["crps_draws"] == pytest.approx(figures["crps_marginals"], rel=0.05)
    assert figures["ce_draws"] > np.abs(gap).max()


def test_every_row_names_a_rule_and_every_trained_row_exists() -> None:
    for table in TABLES.values():
        assert all(one.rule in RULES for row in table.rows.values() for _, one in row.chosen())
        networks = [table.rows[name].network for name in table.order]  # each of them once
        assert all(networks.count(row.network) == 1 for row in table.rows.values())
        assert all(row.last in (None, *RULES) for row in table.rows.values())
        assert table.law in RULES
    assert [job.problem for job in experiments.grid("pde-nonlinear", "none", objectives=("crps",)).units[:3]] == [
        "pme-2-3", "pme-3-4", "pme-4-5",
    ]  # fmt: skip
    key = experiments.grid("pde-nonlinear", "none").units[0].expected()[0]
    assert key["problem"] == "pme"
    assert key["m_range"] == [2.0, 3.0]
    assert not LINEAR.rows["softc"].reuses_base
    assert NONLINEAR.rows["probhard-inf"].rule == "flux, positive"
    assert TVD.profile == (1.5, 0.152)


def test_cells_show_mean_and_spread_over_seeds() -> None:
    lines = [
        {"problem": "heat", "method": "base", "score": "crps", "seed": seed, "epochs": 500, "seconds": 1800.0,
         "mse": 1e-7 * (seed + 1), "mse_free": 1e-7 * (seed + 1), "crps": 3e-4, "ce_mean": 1e-3, "ce_draws": 1e-2}
        for seed in range(3)
    ]  # fmt: skip
    page = tables.render("pde-linear", lines)
    assert "0.02 +- 0.0082" in page
    assert "1.5 hours" in page
    assert "seeds 0, 1, 2" in page
    assert "| 0.029 | 1.76 | 0.396 |" in page
    assert "| method | MSE" in page
    apart = tables.render("pde-linear", [*lines, {**lines[0], "method": "softc"}])
    assert "| method | seeds | MSE" in apart
    assert "| softc | 0 | 0.01 |" in apart
    assert "| base | 0, 1, 2 | 0.02 +- 0.0082 |" in apart


@pytest.mark.parametrize("name", list(references.NEAREST))
def test_what_a_feasible_field_can_reach_at_best(name: str) -> None:
    problem = PROBLEMS[name](dtype=torch.float64)
    parameters = problem.split(0).test
    exact = problem.solution(parameters).flatten(-2)
    nearest = ph.DPPL("orthogonal").project_samples(exact, problem.physics(parameters)).value
    error = float((nearest - exact).square().mean()) / tables.UNITS["pde-linear"]["mse"]
    assert error == pytest.approx(references.NEAREST[name], rel=0.01, abs=1e-9)
