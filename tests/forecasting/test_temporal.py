"""Cross-temporal hierarchies: sums by loops, projections by dense algebra, and real sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import probhard as ph
from probhard.forecasting import load
from probhard.forecasting.reconciliation.temporal import CrossTemporal, cross_temporal

PLACES = ph.Hierarchy(
    np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.0]]),
    names=["all", "north", "a", "b", "c"],
    tags={"top": ["all"], "side": ["north"], "town": ["a", "b", "c"]},
)


def test_variables_are_sums_over_places_and_time() -> None:
    whole = cross_temporal(PLACES, 12, [1, 3, 12])
    assert (whole.variables, whole.bottoms) == (5 * (12 + 4 + 1), 36)
    bottom = torch.rand(7, 12, 3)
    event = whole.aggregate(bottom.flatten(-2))  # (7, N)
    assert whole.relative_violation(event).max() < 1e-14
    members = {"all": [0, 1, 2], "north": [0, 1], "a": [0], "b": [1], "c": [2]}
    for i, (node, towns) in enumerate(members.items()):
        for period in (1, 3, 12):
            for block in range(12 // period):
                number = whole.variable(node, period, block)
                assert number == whole.variable(i, period, block)
                assert whole.names is not None
                assert whole.names[number] == f"{node}@{period}:{block}"
                expected = bottom[:, block * period : (block + 1) * period][..., towns].sum((-1, -2))
                torch.testing.assert_close(event[:, number], expected)
    assert sorted(whole.numbers.flatten().tolist()) == list(range(whole.variables))
    assert whole.tags["side@3"] == ("north@3:0", "north@3:1", "north@3:2", "north@3:3")


def test_there_and_back() -> None:
    whole = cross_temporal(PLACES, 6, [2, 6, 1])
    event = torch.randn(4, whole.variables)
    parts = whole.split(event)
    assert {period: tuple(part.shape) for period, part in parts.items()} == {6: (4, 1, 5), 2: (4, 3, 5), 1: (4, 6, 5)}
    torch.testing.assert_close(whole.join(parts), event, rtol=0, atol=0)
    assert parts[2][3, 1, 4] == event[3, whole.variable("c", 2, 1)]
    steps = np.random.default_rng(0).normal(size=(6, 5))
    sums = whole.sums(steps)
    np.testing.assert_allclose(sums[2][1], steps[2] + steps[3], rtol=1e-14)
    coherent = whole.join(whole.sums(PLACES.aggregate(torch.rand(6, 3))))
    assert whole.relative_violation(coherent) < 1e-15


def test_projection_against_dense_algebra() -> None:
    whole = cross_temporal(PLACES, 4, [1, 2, 4])
    rows = np.asarray(whole.A)
    random = np.random.default_rng(2)
    loc, variance = random.normal(5, 2, whole.variables), random.uniform(0.5, 2, whole.variables)
    law = ph.LocationScale(torch.tensor(loc), ph.Diagonal(torch.tensor(variance)))
    gain = np.diag(variance) @ rows.T @ np.linalg.inv(rows @ np.diag(variance) @ rows.T)
    matrix = np.eye(len(loc)) - gain @ rows
    projected = ph.DPPL("oblique")(law, whole)
    np.testing.assert_allclose(projected.mean, matrix @ loc, rtol=1e-11)
    np.testing.assert_allclose(projected.variance, np.diag(matrix @ np.diag(variance) @ matrix.T), rtol=1e-10)
    draws = ph.DPPL("oblique")(law, whole & ph.NonNegative()).sample((200,))
    assert draws.min() == 0
    for period, part in whole.split(draws).items():  # coherent in space, and in time
        assert PLACES.relative_violation(part, draws.abs().amax(-1)[:, None, None]).max() < 1e-13
        np.testing.assert_allclose(part, whole.sums(whole.split(draws)[1])[period], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "horizon", "periods"),
    [("tourism", 8, (1, 2, 4, 8)), ("labour", 12, (1, 3, 12)), ("us-employment", 12, (1, 3, 12))],
)
def test_real_sizes(name: str, horizon: int, periods: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    if name != "us-employment":
        assert isinstance(request.getfixturevalue("hierarchical_data"), Path)
    data = load(name)
    whole = cross_temporal(data.hierarchy, horizon, periods)
    torch.manual_seed(0)
    sums = whole.sums(torch.as_tensor(data.values[-horizon:]))
    event = whole.join({p: part * (1 + 0.5 * torch.randn(20, *part.shape)) for p, part in sums.items()})
    size = event.abs().amax(-1, keepdim=True)
    assert whole.relative_violation(event, size).min() > 1e-2
    for metric in ("oblique", "orthogonal"):
        solution = ph.DPPL(metric).project_samples(event, whole & ph.NonNegative())
        assert bool(solution.stats.converged.all())
        assert solution.value.min() >= 0
        assert whole.relative_violation(solution.value, size).max() < 1e-12


@pytest.mark.parametrize("periods", [[1], [3, 12], [1, 5], [0, 1], [1, 24]])
def test_periods_that_do_not_fit(periods: list[int]) -> None:
    with pytest.raises(ph.ParameterError, match="blocks of"):
        cross_temporal(PLACES, 12, periods)


def test_refusals() -> None:
    whole = CrossTemporal(PLACES, 12, [1, 12])
    with pytest.raises(ph.ParameterError, match="no blocks of 3 steps"):
        whole.variable("a", 3)
    with pytest.raises(ph.ParameterError, match="no block 12 of 1 steps"):
        whole.variable("a", 1, 12)
    with pytest.raises(ph.ParameterError, match="no node 'd'"):
        whole.variable("d")
    with pytest.raises(ph.ShapeError, match="nothing for blocks of 12"):
        whole.join({1: torch.zeros(12, 5)})
    with pytest.raises(ph.ShapeError, match=r"shape \(5, 12\)"):
        whole.sums(torch.zeros(5, 12))
