"""Conformal sets: coverage on exchangeable units, norms against dense algebra, bounds, limits and records."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import probhard as ph
import registry
from probhard._calibration import norm
from probhard._calibration.norm import deviation_norm
from probhard._calibration.promise import CoverageReport, Promise
from probhard.calibration import Calibration, ConformalModel, conformal
from probhard.errors import ParameterError, ShapeError
from small_model import Fixed

DOUBLE = torch.float64
TREE = registry.binary_tree(2)  # 7 nodes
N = len(TREE)
LEVELS = np.repeat([0, 1, 2], [1, 2, 4])


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def units(constraint: ph.Constraint, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and feasible targets whose errors are skewed, heavy-tailed and not those of any law below."""
    x = torch.randn(count, N, dtype=DOUBLE, generator=random(seed)) + 3
    noise = torch.randn(count, N, dtype=DOUBLE, generator=random(seed + 1)).exp() * (1 + x[:, :1].abs())
    return x, ph.DPPL("orthogonal").project(x + noise, constraint).value


ROWS = ph.Hierarchy(TREE)
COVS = {
    "diagonal": ph.Diagonal(torch.rand(N, dtype=DOUBLE, generator=random(1)) + 0.2),
    "low rank": ph.LowRank(
        torch.randn(N, 2, dtype=DOUBLE, generator=random(2)), torch.rand(N, dtype=DOUBLE, generator=random(3)) + 0.2
    ),
}
FAMILY = torch.cat([torch.eye(N, dtype=DOUBLE), torch.ones(1, N, dtype=DOUBLE)])


@pytest.mark.parametrize("functionals", [None, FAMILY], ids=["joint", "family"])
@pytest.mark.parametrize("bounds", [False, True], ids=["equalities", "bounds"])
def test_measured_coverage_is_the_promised_one(bounds: bool, functionals: Tensor | None) -> None:
    """Over many splits, the mean coverage is k / (n + 1) within the error of that mean."""
    constraint = ROWS & ph.NonNegative() if bounds else ROWS
    model = ph.ConstrainedModel(Fixed(COVS["diagonal"]), constraint)
    size, splits = 19, 400
    x, y = units(constraint, 4000)
    scores = conformal(model, (x, y), 0.5, functionals).region((x,)).score(y)
    picks = np.random.default_rng(0).permuted(np.tile(np.arange(len(x)), (splits, 1)), axis=1)[:, : 2 * size]
    inside = []
    for pick in picks:
        promise = Promise.of(scores[pick[:size]], 0.8, True, None)
        inside.append(float((scores[pick[size:]] <= promise.threshold).double().mean()))
    k = math.ceil(20 * 0.8)
    beta = k / 20 * (1 - k / 20)
    error = math.sqrt(beta * (1 / 21 + 1 / size) / splits)  # of the threshold and of the new units
    assert np.mean(inside) == pytest.approx(k / 20, abs=4 * error)
    report = conformal(model, (x[:999], y[:999]), 0.8, functionals).report((x[999:], y[999:]))
    assert report.promised == 0.8
    assert report.measured == pytest.approx(0.8, abs=4 * math.sqrt(0.16 * (1 / 1000 + 1 / 3001)))
    assert report.obey == 1


@pytest.mark.parametrize("metric", registry.METRICS)
@pytest.mark.parametrize("cov", ["diagonal", "low rank", "dense"])
@pytest.mark.parametrize(
    "name", ["conservation", "tree", "fixed nodes", "pins and mass", "overlapping", "dense", "pins"]
)
def test_norms_are_those_of_the_pseudo_inverse(name: str, cov: str, metric: str) -> None:
    constraint = registry.CONSTRAINTS[name]()
    n = constraint.variables
    base, weight = registry.covariance(cov, 3, n), registry.covariance("low rank" if cov != "diagonal" else cov, 3, n)
    loc = torch.zeros(3, n, dtype=DOUBLE)
    for source in (base, weight):
        projected = ph.DPPL(registry.METRICS[metric](n), "delta")(
            ph.LocationScale(loc, base), constraint, metric_from=ph.LocationScale(loc, source)
        )
        v = projected.tangent.apply(torch.randn(4, 3, n, dtype=DOUBLE, generator=random(4)))
        P = projected.tangent.apply(torch.eye(n, dtype=DOUBLE).reshape(n, 1, n).expand(n, 3, n)).movedim(0, -1)
        inverse = torch.linalg.pinv(P @ base.dense() @ P.mT, rtol=1e-10, hermitian=True)
        expected = torch.einsum("sbi,bij,sbj->sb", v, inverse, v).sqrt()
        oblique = metric == "oblique" and source is base
        for known in {False, oblique}:
            found = deviation_norm(v, base, projected.tangent, known)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["tree", "fixed nodes", "pins and mass", "dense"])
def test_many_rows_are_solved_by_iterations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = registry.CONSTRAINTS[name]()
    n = constraint.variables
    base, weight = registry.covariance("low rank", 3, n), registry.covariance("low rank", 3, n)
    loc = torch.zeros(3, n, dtype=DOUBLE)
    laws = [ph.LocationScale(loc, cov) for cov in (base, weight)]
    tangent = ph.DPPL(covariance="delta")(laws[0], constraint, metric_from=laws[1]).tangent
    v = torch.randn(4, 3, n, dtype=DOUBLE, generator=random(4))
    formed = deviation_norm(v, base, tangent)
    monkeypatch.setattr(norm, "FORMED", 0)
    torch.testing.assert_close(deviation_norm(v, base, tangent), formed, rtol=1e-9, atol=1e-10)


def test_variables_of_variance_zero_do_not_count() -> None:
    variance = torch.tensor([1.0, 0.0, 4.0], dtype=DOUBLE)
    factor = torch.tensor([[1.0], [0.0], [2.0]], dtype=DOUBLE)
    v = torch.tensor([[3.0, 5.0, 8.0]], dtype=DOUBLE)
    assert float(deviation_norm(v, ph.Diagonal(variance))) == 5
    without = ph.LowRank(factor[[0, 2]], variance[[0, 2]])
    low_rank = deviation_norm(v, ph.LowRank(factor, variance))
    torch.testing.assert_close(low_rank, deviation_norm(v[:, [0, 2]], without))


@pytest.mark.parametrize("cov", COVS)
@pytest.mark.parametrize("calibration", [None, Calibration(2.0, 2.0), Calibration(0.5, 3.0)])
def test_intervals_are_the_extent_of_the_set(cov: str, calibration: Calibration | None) -> None:
    if cov == "diagonal" and calibration is not None and not calibration.proportional:
        calibration = Calibration(1.0, 1.0, (0.5, 1.0, 3.0), tuple(LEVELS))
    model = ph.ConstrainedModel(Fixed(COVS[cov]), ROWS).calibrated(calibration)
    x, y = units(ROWS, 200)
    region = conformal(model, (x, y), 0.9).region((x[:2],))
    lower, upper = region.intervals()
    center, threshold = region.deviations.center, region.promise.threshold
    torch.testing.assert_close(center, model.forecast((x[:2],)).mean)
    # The furthest point along coordinate i is center + threshold * C e_i / sqrt(C_ii), for the projected covariance C.
    C = model.forecast((x[:2],)).cov.dense()
    furthest = threshold * C / torch.diagonal(C, dim1=-2, dim2=-1).sqrt().unsqueeze(-1)
    for i in range(N):
        point = center + 0.999999 * furthest[..., i, :]
        assert bool(region.contains(point).all())
        assert not bool(region.contains(center + 1.000001 * furthest[..., i, :]).any())
        torch.testing.assert_close(point[:, i], upper[:, i], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lower + upper, 2 * center)
    torch.testing.assert_close(region.size, (upper - lower).mean(-1))


def test_points_that_violate_the_constraint_are_not_in_the_set() -> None:
    x, y = units(ROWS, 100)
    region = conformal(ph.ConstrainedModel(Fixed(COVS["diagonal"]), ROWS), (x, y)).region((x[:3],))
    center = region.deviations.center
    assert bool(region.contains(center).all())
    off = center + torch.tensor([1e-2, 0, 0, 0, 0, 0, 0], dtype=DOUBLE)
    assert not bool(region.contains(off).any())
    report = region.report(off)
    assert (report.measured, report.obey) == (0, 0)


def test_a_family_is_covered_at_once_and_fixed_functionals_are_left_out() -> None:
    constraint = ROWS & ph.LinearEquality(torch.eye(N)[:1], [20.0])
    x, y = units(constraint, 300)
    fitted = conformal(ph.ConstrainedModel(Fixed(COVS["low rank"]), constraint), (x, y), 0.8, FAMILY)
    region = fitted.region((x,))
    assert region.left_out == 2  # the total, and the sum of all nodes, which is three times the total
    lower, upper = region.intervals()
    values = y @ FAMILY.T
    inside = ((lower - 1e-9 <= values) & (values <= upper + 1e-9)).all(-1)
    assert bool((inside == region.contains(y)).all())
    report = fitted.report((x, y))
    assert f"left out, fixed by the constraint: {region.left_out}" in str(report)
    assert int(inside.sum()) == fitted.promise.rank  # on the calibration units themselves


def test_bounds_cut_intervals() -> None:
    box = ph.Box(torch.zeros(N), torch.full((N,), 30.0))
    constraint = ROWS & box
    x, y = units(constraint, 300)
    differences = torch.tensor([[0, 1.0, -1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0]], dtype=DOUBLE)
    model = ph.ConstrainedModel(Fixed(COVS["diagonal"]), constraint)
    for functionals, least, most in (
        (None, 0.0, 30.0),
        (differences, torch.tensor([-30.0, 0]), torch.tensor([30, 60.0])),
    ):
        region = conformal(model, (x, y), 0.99, functionals).region((x,))
        lower, upper = region.intervals()
        assert bool((lower >= least).all())
        assert bool((upper <= most).all())
        values = y if functionals is None else y @ functionals.T
        inside = region.contains(y)
        assert bool(((lower - 1e-9 <= values) & (values <= upper + 1e-9))[inside].all())
        assert float(region.report(y).measured) == pytest.approx(0.99, abs=0.01)


@pytest.mark.parametrize(
    ("count", "level", "rank"), [(9, 0.9, 9), (8, 0.9, 9), (99, 0.9, 90), (19, 0.8, 16), (30, 0.95, 30)]
)
def test_the_rank_is_the_textbook_one(count: int, level: float, rank: int) -> None:
    promise = Promise.of(torch.arange(1.0, count + 1), level, True, None)
    assert promise.rank == rank
    assert promise.threshold == (rank if rank <= count else math.inf)
    assert promise.coverage == min(1.0, rank / (count + 1))


def test_several_elements_form_one_unit() -> None:
    model = ph.ConstrainedModel(Fixed(COVS["low rank"]), ROWS)
    x, y = units(ROWS, 60)
    single, found = (conformal(model, (x, y), 0.8, FAMILY, elements=count) for count in (1, 3))
    scores = single.region((x,)).score(y).unflatten(0, (20, 3)).amax(-1)
    assert found.promise.units == 20
    assert found.promise.threshold == scores.sort().values[math.ceil(21 * 0.8) - 1]
    report = found.report((x, y))
    assert report.units == 20
    assert report.measured == pytest.approx(float((scores <= found.promise.threshold).double().mean()))
    parts = [found.report((x[at], y[at])) for at in (slice(0, 9), slice(9, 60))]
    joined = CoverageReport.joined(parts)
    assert (joined.units, joined.measured) == (20, pytest.approx(report.measured))
    assert joined.size == pytest.approx(report.size)
    assert Promise.from_record(found.promise.record()) == found.promise
    older = {name: value for name, value in single.promise.record().items() if name != "elements"}
    assert Promise.from_record(older) == single.promise
    with pytest.raises(ParameterError, match="whole units"):
        conformal(model, (x, y), 0.8, elements=7)


def test_too_few_units_leave_the_sets_unbounded() -> None:
    constraint = ROWS & ph.NonNegative()
    x, y = units(constraint, 8)
    fitted = conformal(ph.ConstrainedModel(Fixed(COVS["diagonal"]), constraint), (x, y), 0.9)
    assert "unbounded" in fitted.guarantee
    assert "takes 9" in fitted.guarantee
    region = fitted.region((x,))
    assert bool(region.contains(1e6 * y).all())
    lower, upper = region.intervals()
    assert bool((lower == 0).all())
    assert bool((upper == math.inf).all())
    assert fitted.promise.coverage == 1


def test_the_text_says_what_is_covered() -> None:
    x, y = units(ROWS, 50)
    model = ph.ConstrainedModel(Fixed(COVS["diagonal"]), ROWS)
    text = conformal(model, (x, y), 0.9).guarantee
    assert "46/51 = 0.9020" in text
    for word in ("exchangeable", "obey the constraint", "average over", "not the quantiles of draws"):
        assert word in text
    assert "at once" in conformal(model, (x, y), 0.9, FAMILY).guarantee
    rolling = conformal(model, (x, y), 0.9, exchangeable=False)
    assert rolling.guarantee.startswith("No guarantee")
    certificate = str(rolling.report((x, y)))
    assert "level 0.9, no guarantee" in certificate
    assert "measured coverage: 0.92" in certificate
    assert "promised coverage: 0.9020" in str(conformal(model, (x, y), 0.9).report((x, y)))


@pytest.mark.parametrize("functionals", [None, FAMILY], ids=["joint", "family"])
def test_a_record_restores_the_sets(functionals: Tensor | None) -> None:
    x, y = units(ROWS, 60)
    model = ph.ConstrainedModel(Fixed(COVS["low rank"]), ROWS)
    first = conformal(model, [(x[:20], y[:20]), (x[20:], y[20:])], 0.8, functionals)
    second = ConformalModel.from_record(model, json.loads(json.dumps(first.record())))
    assert second.promise == first.promise
    for one, other in zip(first.region((x,)).intervals(), second.region((x,)).intervals()):
        torch.testing.assert_close(one, other)
    with pytest.raises(ParameterError, match="Calibrate the sets again"):
        ConformalModel.from_record(model, {"level": 0.9})


@pytest.mark.parametrize("method", ["base", "hardc", "probhard-or", "probconserv"])
def test_every_method_has_sets(method: str) -> None:
    constraint = ROWS & ph.NonNegative() if method == "probconserv" else ROWS
    x, y = units(constraint, 200)
    model = ph.ConstrainedModel(Fixed(COVS["low rank"]), constraint, method)
    for functionals in (None, FAMILY):
        report = conformal(model, (x[:100], y[:100]), 0.8, functionals).report((x[100:], y[100:]))
        assert 0.6 < report.measured < 0.95
        assert report.size > 0


def test_nonlinear_equalities_have_sets() -> None:
    ball = ph.NonlinearEquality(lambda u: u.square().sum(-1, keepdim=True) - 9)
    x = torch.randn(60, 3, dtype=DOUBLE, generator=random(0))
    y = ph.DPPL("orthogonal").project(x + torch.randn(60, 3, dtype=DOUBLE, generator=random(1)) / 4, ball).value
    model = ph.ConstrainedModel(Fixed(ph.Diagonal(torch.ones(3, dtype=DOUBLE) / 16)), ball)
    report = conformal(model, (x[:40], y[:40]), 0.8).report((x[40:], y[40:]))
    assert report.measured > 0.5
    assert report.obey == 1


@pytest.mark.parametrize(
    ("calibration", "options", "error", "text"),
    [
        (units(ROWS, 5), {"level": 1.0}, ParameterError, "level=1.0"),
        (units(ROWS, 5), {"level": 90}, ParameterError, "between 0 and 1"),
        ([], {}, ParameterError, "no calibration units"),
        ((torch.zeros(3, N, dtype=DOUBLE),), {}, ParameterError, "missing targets"),
        ((torch.zeros(3, N, dtype=DOUBLE), torch.full((3, N), torch.nan)), {}, ParameterError, "missing targets"),
        ((torch.zeros(3, N, dtype=DOUBLE), torch.zeros(2, N)), {}, ShapeError, "Each unit has one set"),
        (units(ROWS, 5), {"functionals": torch.eye(3)}, ShapeError, "variables"),
    ],
)
def test_errors_say_what_to_do(calibration: object, options: dict, error: type, text: str) -> None:
    model = ph.ConstrainedModel(Fixed(COVS["diagonal"]), ROWS)
    with pytest.raises(error, match=text) as caught:
        conformal(model, calibration, **options)
    assert caught.value.why
    assert caught.value.fix
