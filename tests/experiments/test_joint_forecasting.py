"""Joint laws of forecasts: path laws, calibration numbers, measures, statistics, and the page."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.forecasting import joint_statistics, joint_tables
from experiments.forecasting.joint_bases import PLANS, places
from experiments.forecasting.joint_calibration import PRIOR, PastWindow, group_numbers, step_number
from experiments.forecasting.joint_laws import (
    GROUPS,
    Forecast,
    combined,
    group_masks,
    group_parts,
    step_correlation,
    step_root,
    weighted,
)
from experiments.forecasting.joint_measures import measured
from experiments.forecasting.joint_runs import JointJob, grid
from experiments.forecasting.joint_statistics import Row

import probhard as ph

DOUBLE = torch.float64
TREE = ph.Hierarchy(np.vstack([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], np.eye(4)]))
STEPS = 3


def forecast(metric: str = "variances", seed: int = 0) -> Forecast:
    random = np.random.default_rng(seed)
    common = random.standard_normal((40, 1))
    errors = torch.from_numpy(random.standard_normal((40, 7)) + common)
    mean = torch.from_numpy(random.normal(10, 1, (STEPS, 7)))
    stddev = torch.from_numpy(random.uniform(0.5, 2, (STEPS, 7)))
    return Forecast(mean, stddev, ph.shrunk_correlation(errors), TREE, metric)


@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
def test_steps_are_correlated_as_they_should(rho):
    root = step_root(4, rho)
    torch.testing.assert_close(root @ root.mT, step_correlation(4, rho))
    assert bool((root.triu(1) == 0).all())


def test_deviations_have_the_covariance_of_nodes_times_that_of_steps():
    law = forecast()
    draws = law.deviations(joint=True, rho=0.6, samples=200_000, seed=0).sum(0)
    found = torch.cov(draws.flatten(1).mT)
    expected = torch.kron(step_correlation(STEPS, 0.6), law.correlation.dense().contiguous())
    scale = law.stddev.flatten()
    torch.testing.assert_close(found / scale / scale[:, None], expected, rtol=0, atol=0.015)
    alone = law.deviations(joint=False, rho=0.0, samples=200_000, seed=0)[0] / law.stddev
    torch.testing.assert_close(torch.cov(alone.flatten(1).mT), torch.eye(21, dtype=DOUBLE), rtol=0, atol=0.015)


@pytest.mark.parametrize("metric", ["orthogonal", "variances", "covariance"])
def test_projection_in_every_metric(metric):
    law = forecast(metric)
    points = law.mean + law.deviations(True, 0.5, 10, 0).sum(0)
    projected = law.project(points)
    rows = torch.from_numpy(np.hstack([np.eye(3), -TREE.summation.toarray()[:3]]))
    for step in range(STEPS):
        weight = {
            "orthogonal": torch.eye(7, dtype=DOUBLE),
            "variances": law.stddev[step].square().diag(),
            "covariance": law.correlation.scaled(law.stddev[step]).dense(),
        }[metric]
        move = weight @ rows.mT @ torch.linalg.inv(rows @ weight @ rows.mT) @ rows
        torch.testing.assert_close(projected[:, step], points[:, step] - points[:, step] @ move.mT)


@pytest.mark.parametrize("numbers", [[2.0, 0.5, 3.0], [2.0, 0.5, 3.0, 1.5]], ids=["independent", "joint"])
def test_parts_add_up_to_scaled_deviations(numbers):
    law, numbers = forecast(), torch.tensor(numbers, dtype=DOUBLE)
    masks = group_masks(TREE)
    assert masks.int().tolist() == [[1, 0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]]
    terms = law.deviations(len(numbers) > 3, 0.5, 20, 0)
    parts = group_parts(terms, TREE, law.project)
    by_hand = terms[0] if len(terms) == 1 else terms[0] + 1.5 * terms[1]
    by_hand = by_hand * torch.tensor([2, 0.5, 0.5, 3, 3, 3, 3], dtype=DOUBLE)
    torch.testing.assert_close(weighted(terms, numbers, masks), by_hand)
    whole = law.project(law.mean + by_hand)
    torch.testing.assert_close(combined(law.projected_mean(), parts, numbers), whole)


def windows(truth: torch.Tensor, rho: float, count: int) -> list[PastWindow]:
    """Windows whose observed values have deviations that are ``truth`` times those of the forecast."""
    law, masks = forecast(), group_masks(TREE)
    mean = law.projected_mean()
    parts = group_parts(law.deviations(True, 1.0, 400, 0), TREE, law.project)
    drawn = group_parts(law.deviations(True, rho, count, 1), TREE, law.project)
    return [PastWindow.of(0, mean, parts, y, masks) for y in combined(mean, drawn, truth)]


def test_numbers_find_the_truth_and_are_drawn_to_one():
    truth = torch.tensor([3.0, 1.0, 0.5, 2.0], dtype=DOUBLE)
    many = group_numbers(windows(truth, 0.0, 1000), shared=True)
    assert many[0] == pytest.approx(3.0, rel=0.2)
    assert many[2:].tolist() == pytest.approx([0.5, 2.0], rel=0.15)
    few = windows(truth, 0.0, 2)
    best = group_numbers(few, shared=True) ** ((len(few) + PRIOR) / len(few))  # without the prior

    def loss(numbers: torch.Tensor) -> float:
        total = 0.0
        for mask in group_masks(TREE):
            score = size = 0.0
            for window in few:
                variance = window.covariance(numbers).diagonal().mT
                law = ph.LocationScale(torch.zeros_like(window.error), ph.Diagonal(variance))
                score += float(ph.crps(law, window.error)[:, mask].sum())
                size += float(window.size[:, mask].sum())
            total += score / size
        return total

    near = [best * torch.eye(4, dtype=DOUBLE)[g].mul(step).exp() for g in range(4) for step in (0.05, -0.05)]
    assert all(loss(best) <= loss(other) for other in near if bool(((other > 0.1) & (other < 10)).all()))
    assert group_numbers([], shared=True).tolist() == [1, 1, 1, 1]
    assert group_numbers([], shared=False).tolist() == [1, 1, 1]


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_the_dependence_of_steps_is_found(rho):
    ones = torch.ones(4, dtype=DOUBLE)
    assert step_number(windows(ones, rho, 300), ones) == pytest.approx(rho, abs=0.1)
    assert step_number([], ones) == 0


def test_measures():
    torch.manual_seed(0)
    draws, y = torch.randn(300, STEPS, 7, dtype=DOUBLE), torch.zeros(STEPS, 7, dtype=DOUBLE)
    y[0, 0], y[1, 4] = 5.0, -5.0
    fields = measured(draws, y, group_masks(TREE), torch.tensor([1, 2, 4, 2, 4, 6, 8], dtype=DOUBLE))
    assert fields["top"]["coverage"] == pytest.approx(2 / 3)
    assert fields["middle"]["coverage"] == 1
    assert fields["bottom"]["coverage"] == pytest.approx(11 / 12)
    assert fields["top"]["coverage_sums"] == 0
    assert fields["bottom"]["coverage_sums"] == pytest.approx(3 / 4)
    assert fields["bottom"]["size"] == 5
    expected = ph.crps_ensemble(draws[..., 3:].sum(1), y[:, 3:].sum(0), estimator="fair").sum()
    assert fields["bottom"]["crps_sums"] == pytest.approx(float(expected))
    weight = 1 / torch.tensor([1, 3 * 2**0.5, 3 * 2**0.5, 10, 10, 10, 10], dtype=DOUBLE)
    few = (draws[:200] * weight).flatten(1)
    apart = torch.cdist(few, few).sum() / (200 * 199)
    near = (few - (y * weight).flatten()).norm(dim=-1).mean()
    assert fields["energy"] == pytest.approx(float(near - apart / 2), rel=1e-6)


def line(dataset: str, law: str, origin: int, covered: float, crps: float, calibrated: bool = True) -> dict:
    group = {"coverage": covered, "coverage_sums": covered / 2, "crps": crps, "crps_sums": 2 * crps, "size": 100.0}
    return {
        "dataset": dataset, "base": "ets-orthogonal", "law": law, "calibrated": calibrated, "seed": 0,
        "origin": origin, **dict.fromkeys(GROUPS, group), "energy": crps, "numbers": [1.0, 2.0, 3.0], "rho": 0.5,
    }  # fmt: skip


def some_lines() -> list[dict]:
    lines = []
    for dataset in ("labour", "wiki"):
        for origin in range(PLANS[dataset].test):
            for calibrated in (False, True):
                lines.append(line(dataset, "independent", origin, 0.5 + 0.05 * (origin % 2), 2.0, calibrated))
                better = 1.0 if dataset == "labour" else 2.2
                lines.append(line(dataset, "joint", origin, 0.8, better, calibrated))
    return lines


def test_means_over_sets_and_their_intervals():
    lines, row = some_lines(), Row("ets-orthogonal", "independent", True)
    found = joint_statistics.coverage(lines, [row], "top", "coverage")
    assert found.value == pytest.approx(0.525)
    assert 0.5 < found.low < found.value < found.high < 0.55
    joint = Row("ets-orthogonal", "joint", True)
    ratio = joint_statistics.ratio(lines, joint, row, "top", "crps", ["labour", "wiki"])
    assert ratio == pytest.approx([0.55**0.5] * 3)  # 0.5 and 1.1, at every origin
    assert joint_statistics.relative_score(lines, joint, "wiki", "top", "crps") == pytest.approx(0.022)


def test_blocks_are_consecutive_where_windows_overlap():
    index = joint_statistics._with_resamples(np.arange(8), "tourism")
    assert index[0].tolist() == [*range(8)]
    blocks = index[1:].reshape(-1, 2, 4)
    assert bool(((np.diff(blocks, axis=-1) % 8) == 1).all())
    assert len(np.unique(joint_statistics._with_resamples(np.arange(8), "wiki")[1:, 0])) == 8


def test_the_page_shows_what_went_against_us():
    page = joint_tables.render(some_lines())
    against = page[: page.index("## What is compared")]
    assert "| ets-orthogonal | sums | top | 40 [40, 40] | 26 [" in against
    assert "| ets-orthogonal | top | Wiki 1.100 [1.100, 1.100] |" in against
    assert "| ets-orthogonal | yes | steps | 0.742 [0.742, 0.742] |" in page
    assert "| ets-orthogonal | top | 20.00 / 10.00 |  |  |  | 20.00 / 22.00 |" in page
    assert "1.00, 2.00, 3.00; 0.5" in page
    good = [{**one, **{name: {**one[name], "coverage_sums": 0.8} for name in GROUPS}} for one in some_lines()]
    assert "None." in joint_tables.render(good)


def test_jobs():
    units = grid("none").units
    assert len(units) == 5 * 5
    assert len({unit.name for unit in units}) == len(units)
    assert len(JointJob("labour", "ets-variances").expected()) == 3 * 2 * 12
    assert len(JointJob("wiki", "deepvar-ob").expected()) == 2 * 2 * 8
    with pytest.raises(ph.ParameterError, match="data set"):
        grid("none", datasets=["nowhere"])


@pytest.mark.skipif("PROBHARD_DATA" not in os.environ, reason="the benchmark data are not here: PROBHARD_DATA")
def test_a_quick_job(tmp_path: Path):
    pytest.importorskip("statsforecast")
    calibration, test = places("tourism", quick=True)
    assert [place.start for place in (*calibration, *test)] == [25, 26, 27, 28]
    job = JointJob("tourism", "ets-variances", quick=True)
    lines = job.run(tmp_path / "work" / job.name, progress=False)
    keys = [{name: one[name] for name in job.expected()[0]} for one in lines]
    assert sorted(map(str, keys)) == sorted(map(str, job.expected()))
    assert {one["windows"] for one in lines} == {0}  # no window has ended before: they overlap
    assert len(list((tmp_path / "work" / "fits").glob("*.npz"))) == 4
