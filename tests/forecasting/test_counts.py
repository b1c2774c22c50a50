"""Count hierarchies: non-negative reconciliation here and in hierarchicalforecast."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import probhard as ph

STEPS, LEVEL, DRAWS = 12, 90, 400


@pytest.fixture(scope="module")
def counts() -> dict[str, np.ndarray]:
    """Eight intermittent series in two groups and a total, forecast by their past means."""
    rng = np.random.default_rng(0)
    summing = np.vstack([np.ones((1, 8)), np.kron(np.eye(2), np.ones((1, 4))), np.eye(8)])
    rate = rng.gamma(1.0, 0.5, 8)
    series = summing @ rng.poisson(rate[:, None], size=(8, 200 + STEPS))
    past, future = series[:, :200], series[:, 200:]
    mean = past.mean(1, keepdims=True)
    fitted = np.repeat(mean, 200, 1) + 0.01  # hierarchicalforecast rejects a fit without bias
    return {
        "summing": summing,
        "past": past,
        "future": future,
        "fitted": fitted,
        "mean": np.repeat(mean, STEPS, 1),
        "sd": np.repeat(past.std(1, keepdims=True), STEPS, 1),
    }


@pytest.fixture(scope="module")
def theirs(counts) -> tuple[np.ndarray, np.ndarray]:
    """Lower bounds (series, steps) and samples (series, steps, draws) of MinTrace with normal intervals."""
    methods = pytest.importorskip("hierarchicalforecast.methods", reason="the extra 'forecast' is not installed")
    method = methods.MinTrace("wls_var", nonnegative=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = method.fit_predict(
            S=counts["summing"],
            y_hat=counts["mean"],
            y_insample=counts["past"],
            y_hat_insample=counts["fitted"],
            sigmah=counts["sd"],
            level=[LEVEL],
            intervals_method="normality",
            num_samples=DRAWS,
            seed=0,
        )
        samples = method.sample(DRAWS)
    return fit["quantiles"][..., 0], samples


@pytest.fixture(scope="module")
def ours(counts) -> torch.Tensor:
    """Draws (draws, steps, series), each projected onto coherence and non-negativity."""
    law = tuple(torch.from_numpy(counts[key].T.copy()) for key in ("mean", "sd"))
    constraint = ph.Hierarchy(counts["summing"]) & ph.NonNegative()
    return ph.DPPL()(law, constraint).sample((DRAWS,), generator=torch.Generator().manual_seed(0))


def test_the_peer_returns_negative_counts(theirs):
    lower, samples = theirs
    assert (lower < 0).mean() > 0.2
    assert (samples < -1e-9).mean() > 0.02


def test_ours_returns_none_and_stays_coherent(counts, ours):
    constraint = ph.Hierarchy(counts["summing"]) & ph.NonNegative()
    assert float(ours.min()) >= 0.0
    assert float(constraint.relative_violation(ours).max()) <= 1e-12
    tails = (1 - LEVEL / 100) / 2, (1 + LEVEL / 100) / 2
    assert float(ph.sample_quantiles(ours, tails).min()) >= 0.0


def test_the_score_is_no_worse(counts, theirs, ours):
    target = torch.from_numpy(counts["future"].T.copy())
    peer = torch.from_numpy(np.moveaxis(theirs[1], -1, 0)).transpose(-1, -2)
    scores = [float(ph.crps_ensemble(draws, target).mean()) for draws in (ours, peer)]
    assert scores[0] <= scores[1]
