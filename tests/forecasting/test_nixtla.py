"""``ProjectionReconciler`` inside hierarchicalforecast, against its MinT, dense algebra and cvxpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats

import probhard as ph
from probhard.forecasting import load
from probhard.forecasting.reconciliation.nixtla import Columns, ProjectionReconciler, probabilities

pd = pytest.importorskip("pandas")
core = pytest.importorskip("hierarchicalforecast.core")
methods = pytest.importorskip("hierarchicalforecast.methods")

HORIZON = 6
DATA = load("us-employment")
S = DATA.hierarchy.summation.toarray()
RANDOM = np.random.default_rng(3)
MEAN = DATA.values[-HORIZON:] * (1 + 0.02 * RANDOM.normal(size=(HORIZON, len(S))))  # (H, n), incoherent
SPREAD = DATA.values[-HORIZON:] * RANDOM.uniform(0.01, 0.05, size=(HORIZON, len(S)))
COUNTS = RANDOM.normal(0.3, 1.0, size=(HORIZON, len(S)))  # means of small counts, many of them negative


def frames(mean: np.ndarray, spread: np.ndarray, library: str = "pandas") -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Nixtla's ``Y_hat_df``, ``S_df`` and ``tags``."""
    names, half = list(DATA.names), scipy.stats.norm.ppf(0.9) * spread.T.ravel()
    stamps = pd.date_range("2016-01-01", periods=HORIZON, freq="MS")
    rows = {"unique_id": np.repeat(names, HORIZON), "ds": np.tile(stamps, len(names)), "M": mean.T.ravel()}
    forecasts = pd.DataFrame({**rows, "M-lo-80": mean.T.ravel() - half, "M-hi-80": mean.T.ravel() + half})
    forecasts = forecasts.sample(frac=1, random_state=0)
    summing = pd.DataFrame({"unique_id": names, **dict(zip(names[DATA.hierarchy.aggregates :], S.T))})
    if library == "polars":
        polars = pytest.importorskip("polars")
        forecasts, summing = polars.from_pandas(forecasts), polars.from_pandas(summing)
    return forecasts, summing, {level: np.array(nodes) for level, nodes in DATA.hierarchy.tags.items()}


def run(reconcilers: list[Any], mean: np.ndarray, spread: np.ndarray, library: str = "pandas", **options: Any) -> Any:
    forecasts, summing, tags = frames(mean, spread, library)
    result = core.HierarchicalReconciliation(reconcilers).reconcile(
        forecasts, tags=tags, S_df=summing, intervals_method="normality", **options
    )
    result = result if library == "pandas" else result.to_pandas()
    place = pd.Categorical(result["unique_id"], list(DATA.names))
    return result.assign(unique_id=place).sort_values(["unique_id", "ds"])


def column(result: Any, name: str) -> np.ndarray:
    return result[name].to_numpy().reshape(len(S), HORIZON).T  # (H, n)


def gap(points: np.ndarray) -> float:
    """Largest incoherence of points (..., n) relative to the largest value of each."""
    bottom = points[..., DATA.hierarchy.aggregates :]
    return float((np.abs(points - bottom @ S.T).max(-1) / np.abs(points).max(-1)).max())


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize(("metric", "mint"), [("orthogonal", "ols"), ("structural", "wls_struct")])
def test_mint_is_the_projection_without_bounds(metric: str, mint: str, library: str) -> None:
    reconcilers = [ProjectionReconciler(metric, covariance="independent"), methods.MinTrace(mint)]
    result = run(reconcilers, MEAN, SPREAD, library, level=[80, 95], num_samples=7, diagnostics=True)
    ours = f"M/ProjectionReconciler_metric-{metric}_covariance-independent"
    theirs = f"M/MinTrace_method-{mint}"
    for end in ("", "-lo-80", "-hi-80", "-lo-95", "-hi-95"):
        np.testing.assert_allclose(column(result, ours + end), column(result, theirs + end), rtol=1e-9)
    draws = np.stack([column(result, f"{ours}-sample-{i}") for i in range(7)])
    assert gap(draws) < 1e-14
    assert gap(column(result, ours)) < 1e-14
    assert gap(MEAN) > 1e-3
    assert len(np.unique(draws[..., 0])) == draws[..., 0].size


def test_oblique_against_dense_algebra() -> None:
    result = run([ProjectionReconciler("oblique", covariance="independent")], MEAN, SPREAD, level=[90])
    rows = np.hstack([np.eye(DATA.hierarchy.aggregates), -S[: DATA.hierarchy.aggregates]])
    name = "M/ProjectionReconciler_metric-oblique_covariance-independent"
    for step in range(HORIZON):
        cov = np.diag(SPREAD[step] ** 2)
        matrix = np.eye(len(S)) - cov @ rows.T @ np.linalg.solve(rows @ cov @ rows.T, rows)
        expected = matrix @ MEAN[step]
        half = scipy.stats.norm.ppf(0.95) * np.sqrt(np.diag(matrix @ cov @ matrix.T))
        for end, value in (("", expected), ("-lo-90", expected - half), ("-hi-90", expected + half)):
            np.testing.assert_allclose(column(result, name + end)[step], value, rtol=1e-9)


def test_fitted_values_give_the_law_and_the_metric() -> None:
    """``Y_df`` with fitted values: oblique is then MinT's mint_shrink, scaled to the forecast deviations."""
    bottoms = RANDOM.normal(size=(60, S.shape[1])) + RANDOM.normal(size=(60, 1))
    errors = bottoms @ S.T + RANDOM.normal(size=(60, len(S)))
    insample = {"y_insample": errors.T, "y_hat_insample": np.zeros_like(errors.T)}
    stddev = np.broadcast_to(errors.std(0), MEAN.shape)
    ours = ProjectionReconciler("oblique")(S, MEAN.T, stddev.T, level=[80], **insample)
    theirs = methods.MinTrace("mint_shrink")(S=S, y_hat=MEAN.T, **insample)["mean"]
    np.testing.assert_allclose(ours["mean"], theirs, rtol=1e-7)
    width = {name: _width(ProjectionReconciler(**options), stddev, insample) for name, options in LAWS.items()}
    assert width["errors"] == width["default"] > 1.2 * width["independent"]


LAWS: dict[str, dict[str, Any]] = {
    "default": {},
    "errors": {"covariance": "errors"},
    "independent": {"covariance": "independent"},
}


def _width(reconciler: ProjectionReconciler, stddev: np.ndarray, insample: dict[str, np.ndarray]) -> float:
    """Width of the total's interval at the first step."""
    ends = reconciler(S, MEAN.T, stddev.T, level=[80], **insample)["quantiles"][0, 0]
    return float(ends[1] - ends[0])


def test_nonnegative_in_every_sample_where_mint_is_not() -> None:
    reconcilers = [ProjectionReconciler("structural", nonnegative=True), methods.MinTrace("wls_struct", True)]
    result = run(reconcilers, COUNTS, np.ones_like(COUNTS), level=[80, 90], num_samples=40)
    ours = "M/ProjectionReconciler_metric-structural_nonnegative-True"
    theirs = "M/MinTrace_method-wls_struct_nonnegative-True"
    ends = ["", "-lo-80", "-lo-90", "-hi-80", "-hi-90", *(f"-sample-{i}" for i in range(40))]
    assert min(column(result, ours + end).min() for end in ends) == 0.0
    assert (column(result, theirs + "-lo-90") < 0).mean() > 0.1
    assert gap(np.stack([column(result, f"{ours}-sample-{i}") for i in range(40)])) < 1e-14
    sizes = S.sum(1)
    cost = [((column(result, name) - COUNTS) ** 2 / sizes).sum() for name in (ours, theirs)]
    assert cost[0] < cost[1]  # MinTrace clips the base forecasts first
    cvxpy = pytest.importorskip("cvxpy")
    bottom = cvxpy.Variable((DATA.hierarchy.bottoms, HORIZON), nonneg=True)
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares((S @ bottom - COUNTS.T) / np.sqrt(sizes)[:, None])))
    problem.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    np.testing.assert_allclose(cost[0], problem.value, rtol=1e-8)
    np.testing.assert_allclose(column(result, ours), (S @ bottom.value).T, atol=1e-4)


def test_caps_and_fixed_nodes() -> None:
    names, mean, spread = list(DATA.names), np.abs(COUNTS) + 1, np.ones_like(COUNTS)
    bottom, plan = names[-1], np.linspace(20, 25, HORIZON)
    levels = list(DATA.hierarchy.tags)
    reconciler = ProjectionReconciler(
        nonnegative=True, upper={bottom: 1.5, levels[-1]: 4.0}, fixed={0: plan, names[-2]: "own forecast"}, names=names
    )
    result = run([reconciler], mean, spread, level=[80], num_samples=50)
    prefix = next(name for name in result.columns if name.endswith("-sample-0")).removesuffix("-sample-0")
    assert prefix.startswith(f"M/ProjectionReconciler_nonnegative-True_upper-{bottom}:1.5,")
    draws = np.stack([column(result, f"{prefix}-sample-{i}") for i in range(50)])
    assert gap(draws) < 1e-14
    assert draws.min() == 0.0
    level = [names.index(node) for node in DATA.hierarchy.tags[levels[-1]]]
    assert draws[..., level].max() == 4.0
    for end in ("", "-lo-80", "-hi-80"):
        np.testing.assert_allclose(column(result, prefix + end)[:, 0], plan, rtol=1e-14)
    np.testing.assert_allclose(draws[..., 0], np.broadcast_to(plan, (50, HORIZON)), rtol=1e-14)
    np.testing.assert_array_equal(column(result, prefix)[:, -2], np.minimum(mean[:, -2], 4.0))
    law = np.clip(scipy.stats.norm(mean[:, -2], 1.0).rvs((20000, HORIZON), random_state=1), 0, 4)
    np.testing.assert_allclose(draws[..., -2].mean(0), law.mean(0), atol=5 / np.sqrt(50))
    assert (draws[..., -2].std(0) > 0.4).all()


def test_upper_is_one_number_for_all_nodes() -> None:
    reconciler = ProjectionReconciler("orthogonal", upper=3.0)
    result = reconciler(S, COUNTS.T + 2.0, np.ones_like(COUNTS.T), level=[80])
    assert result["mean"].max() == 3.0
    assert result["quantiles"].shape == (len(S), HORIZON, 2)
    assert result["quantiles"].max() == 3.0
    assert (result["quantiles"][..., 0] <= result["quantiles"][..., 1]).all()


def test_samples_follow_the_seeds() -> None:
    def sample(seed: int, call: int | None) -> np.ndarray:
        reconciler = ProjectionReconciler(seed=seed)
        reconciler(S, MEAN.T, SPREAD.T, level=[80], seed=call)
        return reconciler.sample(3)

    np.testing.assert_array_equal(sample(1, 2), sample(3, None))
    assert (sample(1, 2) != sample(1, 3)).all()
    assert sample(0, 0).shape == (len(S), HORIZON, 3)


def test_refusals() -> None:
    with pytest.raises(ph.ParameterError, match="got no standard deviations"):
        run([ProjectionReconciler("oblique")], MEAN, SPREAD)
    with pytest.raises(ph.ParameterError, match="no node or level 'nowhere'"):
        ProjectionReconciler("orthogonal", fixed={"nowhere": 1.0})(S, MEAN.T)
    with pytest.raises(ph.ParameterError, match="metric='mint_shrink' is not known"):
        ProjectionReconciler("mint_shrink")
    with pytest.raises(ph.ParameterError, match="no reconciled law"):
        ProjectionReconciler().sample(3)
    with pytest.raises(ph.InfeasibleError):  # the caps do not allow the fixed total
        ProjectionReconciler("orthogonal", upper=1.0, fixed={0: 2.0})(S, MEAN.T)


def test_names_of_columns() -> None:
    models = Columns.of(["A", "A-lo-80", "A-hi-80", "B-median", "B-q0.1", "B-ql0.9", "0.25", "mean", "A-lo-97.5"])
    assert [(c.model, c.mean) for c in models] == [("A", "A"), ("B", None), ("mean", "mean")]
    assert models[0].quantiles == pytest.approx({"A-lo-80": 0.1, "A-hi-80": 0.9, "A-lo-97.5": 0.0125})
    assert models[1].quantiles == {"B-median": 0.5, "B-q0.1": 0.1, "B-ql0.9": 0.9}
    assert models[2].quantiles == {"0.25": 0.25}
    assert probabilities([95, 80]) == pytest.approx([0.025, 0.1, 0.9, 0.975])
    with pytest.raises(ph.ParameterError, match="level 100"):
        probabilities([100])
