"""Draws step by step: the law of draws made at once, the memory that is asked for, and the command's outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from forecasting.helpers import KEYS, assert_three_parts, frame, incoherence
from probhard.cli import app
from probhard.errors import ParameterError
from probhard.forecasting import HierarchicalForecaster
from probhard.forecasting.limits import Limits
from probhard.forecasting.members import streamed
from probhard.forecasting.members.coherent import law_of
from probhard.forecasting.members.streamed import check_memory, projected_steps
from probhard.forecasting.reconciliation import joint_law
from probhard.forecasting.reconciliation.family import MetricWeights, project_law, projected_moments


@pytest.fixture
def forecaster() -> HierarchicalForecaster:
    options = {"models": ["smoothing", "bootstrap"], "horizon": 4, "num_samples": 300}
    return HierarchicalForecaster(KEYS, **options).fit(frame(60))


def test_steps_have_the_moments_and_the_dependence_of_paths(forecaster: HierarchicalForecaster) -> None:
    base, hierarchy, weights = forecaster.base("smoothing"), forecaster.data.hierarchy, MetricWeights(0.5, 0.5)
    assert base is not None
    law = law_of(base)
    draws = np.stack(list(projected_steps(law, weights, hierarchy, 20_000, 0)), axis=1)
    mean, stddev = (x.numpy() for x in projected_moments(law, weights, hierarchy))
    np.testing.assert_allclose(draws.mean(0), mean, atol=4 * stddev.max() / 20_000**0.5)
    np.testing.assert_allclose(draws.std(0), stddev, rtol=0.03)
    assert incoherence(draws) < 1e-12
    whole = project_law(law, weights, hierarchy, 20_000, 1).numpy()
    for lag in (1, 3):  # sums over the horizon depend on it
        ours, theirs = (np.corrcoef(x[:, 0, 0], x[:, lag, 0])[0, 1] for x in (draws, whole))
        assert ours == pytest.approx(theirs, abs=0.03)


def test_steps_do_not_depend_on_the_size_of_parts(
    forecaster: HierarchicalForecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, hierarchy = forecaster.base("smoothing"), forecaster.data.hierarchy
    assert base is not None
    law = law_of(base)
    whole = np.stack(list(projected_steps(law, MetricWeights(), hierarchy, 50, 7)))
    monkeypatch.setattr(streamed, "NOISE_NUMBERS", 16 * len(forecaster.data.names))
    np.testing.assert_allclose(np.stack(list(projected_steps(law, MetricWeights(), hierarchy, 50, 7))), whole)


def test_a_pool_is_streamed_with_bounds(forecaster: HierarchicalForecaster, monkeypatch: pytest.MonkeyPatch) -> None:
    free = forecaster.sample()
    forecaster.upper = {"Total": 400.0}
    ((steps, whole),) = forecaster.steps()
    assert steps == slice(0, 4)
    np.testing.assert_array_equal(whole, forecaster.sample())
    limits = Limits(upper=np.tile([400.0, *[np.nan] * 6], (4, 1)))  # steps are projected one by one as all at once
    each = [limits.at(slice(k, k + 1)).apply(free[:, k : k + 1], forecaster.data).draws for k in range(4)]
    np.testing.assert_allclose(np.concatenate(each, axis=1), whole, atol=1e-9)
    table = forecaster.predict()
    monkeypatch.setattr(streamed, "LARGEST", 100)
    parts = list(forecaster.steps())
    assert [steps.start for steps, _ in parts] == [0, 1, 2, 3]
    draws = np.concatenate([part for _, part in parts], axis=1)
    assert draws.shape == whole.shape
    assert draws[..., 0].max() <= 400.0 + 1e-9
    assert incoherence(draws) < 1e-12
    streamed_table = forecaster.predict()
    assert list(streamed_table.columns) == list(table.columns)
    np.testing.assert_allclose(streamed_table["probhard"], draws.mean(0).T.ravel())
    forecaster.upper = None
    draws = np.concatenate([part for _, part in forecaster.steps()], axis=1)
    np.testing.assert_allclose(draws.mean(0), free.mean(0), atol=6 * free.std(0).max() / 300**0.5)
    np.testing.assert_allclose(draws.std(0), free.std(0), rtol=0.35)


def test_draws_that_do_not_fit_are_refused_with_a_number_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "available", lambda: 8_000_000_000)
    with pytest.raises(ParameterError, match=r"1000 draws of 500000 nodes.*at most 175 draws") as caught:
        check_memory(1000, 500_000)
    assert_three_parts(caught.value)
    check_memory(175, 500_000)
    monkeypatch.setattr(streamed, "available", lambda: None)
    check_memory(1000, 10**9)  # unknown memory: nothing to compare with


def test_the_command_streams_forecasts_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "series.csv"
    frame(60).to_csv(source, index=False)
    monkeypatch.setattr(streamed, "LARGEST", 100)
    options = ["--keys", "state,region", "--models", "smoothing", "--horizon", "3", "--draws", "5", "--nonnegative"]
    result = CliRunner().invoke(app, ["forecast", str(source), *options, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "No backtest" in result.output
    forecasts, draws = (pd.read_csv(tmp_path / "out" / f"{name}.csv") for name in ("forecasts", "draws"))
    assert len(forecasts) == 7 * 3
    assert len(draws) == 5 * 7 * 3
    sums = draws.pivot_table(index=["draw", "ds"], columns="unique_id", values="probhard")
    parts = [name for name in sums.columns if name.count("/") == 2]
    np.testing.assert_allclose(sums["Total"], sums[parts].sum(axis=1))
    assert (draws["probhard"] >= 0).all()
    assert (tmp_path / "out" / "report.html").exists()


def test_many_series_bound_the_rank_of_their_correlation(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    errors = torch.randn(60, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert joint_law.error_correlation(errors).factor_size == 40
    monkeypatch.setattr(joint_law, "LARGE", 20)
    monkeypatch.setattr(joint_law, "LARGE_RANK", 8)
    small = joint_law.error_correlation(errors)
    assert small.factor_size == 8
    torch.testing.assert_close(small.diagonal(), torch.ones(40, dtype=torch.float64))
