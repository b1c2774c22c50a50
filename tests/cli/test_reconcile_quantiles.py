"""``probhard reconcile`` on quantiles: how they are named and read, and what their means and spreads become."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

import probhard as ph
from cli.reconcile_runs import MEAN, SPREAD, Run, S, cube, long, normal, runner
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import Reconciliation


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return runner(tmp_path)


def test_names_of_others_for_quantiles_and_sums(run: Run) -> None:
    _, plain, _ = run(long(normal()), "--keys", "state,region")
    renamed = long(normal()).rename(columns={"ETS": "q50", "ETS-lo-80": "p10", "ETS-hi-80": "p90"})
    for word in ("Total", "<aggregated>", "all"):
        aggregated = renamed.assign(state=renamed.state.replace("", word), region=renamed.region.replace("", word))
        status, out, certificate = run(aggregated.assign(cutoff=2023, note="NA"), "--keys", "state,region")
        assert status == 0
        for theirs, ours in (("q50", "ETS"), ("p10", "ETS-lo-80"), ("p90", "ETS-hi-80")):
            np.testing.assert_allclose(out[theirs], plain[ours], rtol=1e-9)
        assert set(out["state"]) == {word, "NSW", "VIC"}
        assert set(out["cutoff"]) == {2023}
        assert certificate["left_as_they_were"] == ["cutoff", "note"]


def test_skewed_quantiles_do_not_make_means_random(run: Run) -> None:
    skewed = {"M": MEAN, "M-lo-80": MEAN - SPREAD, "M-hi-80": MEAN + 3 * SPREAD}
    outputs = [run(long(skewed), "--keys", "state,region", "--seed", str(seed))[1] for seed in (0, 1)]
    np.testing.assert_array_equal(*(cube(out, "M") for out in outputs))


def test_the_spread_of_quantiles_is_that_of_their_draws() -> None:
    values = np.array([-1.0, 0.0, 0.3, 4.0])[:, None, None] * np.array([[[1.0, 2.0]]])
    law = Forecasts.of_quantiles([0.05, 0.4, 0.5, 0.9], values)
    assert law.quantiles is not None
    drawn = law.drawn(400_000, torch.Generator().manual_seed(0))
    np.testing.assert_allclose(law.spread, drawn.std(0), rtol=5e-3)


def test_quantiles_are_read_as_laws() -> None:
    probabilities, mean = [0.9, 0.1, 0.5], np.full((1, 1), 2.0)
    straight = Forecasts.of_quantiles(probabilities, np.array([3.0, 1.0, 2.0])[:, None, None])
    assert straight.stddev is not None
    np.testing.assert_allclose(straight.stddev, 1 / scipy.stats.norm.ppf(0.9))
    skewed = Forecasts.of_quantiles([0.1, 0.9], np.array([1.5, 4.0])[:, None, None], mean)
    draws = skewed.drawn(100_000, torch.Generator().manual_seed(0))
    np.testing.assert_allclose(np.quantile(draws, [0.1, 0.5, 0.9]), [1.5, 2.0, 4.0], atol=0.05)
    crossing = Forecasts.of_quantiles([0.1, 0.9], np.array([3.0, 1.0])[:, None, None])
    np.testing.assert_allclose(crossing.stddev, straight.stddev)
    assert Forecasts.of_quantiles([0.5], mean[None]).certain
    with pytest.raises(ph.ParameterError, match="one probability"):
        Forecasts.of_quantiles([0.5, 0.5], np.zeros((2, 1, 1)))
    with pytest.raises(ph.ShapeError, match="forecasts of 4 series"):
        Reconciliation(ph.Hierarchy(S))(Forecasts(MEAN[:, 3:]))


def test_a_mean_beside_a_median_moves_no_quantile(run: Run) -> None:
    """Means and medians add up as they are, the mean beside the middle of a normal law."""
    bottom = np.abs(MEAN[:, 3:]) + 1
    median, half = bottom @ S.T, 1.0 + 0.0 * MEAN
    columns = {"M": 1.1 * median, "M-median": median, "M-lo-80": median - half, "M-hi-80": median + half}
    _, frame, certificate = run(long(columns), "--keys", "state,region")
    np.testing.assert_allclose(cube(frame, "M")[0], columns["M"], rtol=1e-12)
    assert not certificate["models"]["M"]["quantiles_in_closed_form"]
    np.testing.assert_allclose(cube(frame, "M-median")[0], median, atol=0.1)


@pytest.mark.parametrize("options", [(), ("--executor", "joblib")])
def test_sums_of_normal_bottom_nodes_are_exact(run: Run, options: tuple[str, ...]) -> None:
    _, frame, _ = run(long(normal(), slice(3, None)), "--keys", "state,region", *options)
    half = scipy.stats.norm.ppf(0.9) * np.sqrt(np.square(SPREAD[:, 3:]) @ S.T)
    mean = MEAN[:, 3:] @ S.T
    for column, expected in (("ETS", mean), ("ETS-lo-80", mean - half), ("ETS-hi-80", mean + half)):
        np.testing.assert_allclose(cube(frame, column)[0], expected, rtol=1e-9)


def test_fixed_sums_of_bottom_nodes_come_from_draws(run: Run) -> None:
    columns = {**normal(), "plan": np.where(np.arange(7) == 3, 2.0, np.nan) + 0 * MEAN}
    _, frame, certificate = run(long(columns, slice(3, None)), "--keys", "state,region", "--fixed", "plan")
    assert not certificate["models"]["ETS"]["quantiles_in_closed_form"]
    for column in ("ETS", "ETS-lo-80", "ETS-hi-80"):
        np.testing.assert_allclose(cube(frame, column)[0][:, 3], 2.0, rtol=1e-12)
