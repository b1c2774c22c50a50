"""The last projection (plans, caps, ended series, immutable nodes) against cvxpy; forecasts far from the history."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pandas as pd
import pytest

from forecasting.helpers import KEYS, TWO_GROUPS, assert_three_parts, frame
from probhard.errors import InfeasibleError, ParameterError
from probhard.forecasting import HierarchicalData, from_frame
from probhard.forecasting.data.support import unsupported
from probhard.forecasting.limits import Limits, held, read_plan


def drawn(data: HierarchicalData, horizon: int = 3, samples: int = 6) -> np.ndarray:
    random = np.random.default_rng(1)
    bottom = np.nan_to_num(data.bottom[-1]) + 20 * random.normal(size=(samples, horizon, data.hierarchy.bottoms))
    return bottom @ data.hierarchy.summation.toarray().T


def ended_data() -> HierarchicalData:
    df = frame()
    return from_frame(df[~((df["region"] == "y") & (df["ds"] >= "2020-01-01"))], KEYS)


def test_limits_against_cvxpy():
    data = ended_data()
    draws = drawn(data)
    fixed = np.full((3, 7), np.nan)
    fixed[1, 0] = 250.0
    limits = Limits(True, {"Total/B/z": 90.0}, fixed)
    result = limits.apply(draws, data)
    weight = 1 / np.maximum(draws.std(0, ddof=1), 1e-9) ** 2  # (H, n)
    for sample in range(2):
        for step in range(3):
            u = cp.Variable(7)
            rules = [u[:3] == TWO_GROUPS[:3] @ u[3:], u >= 0, u[6] <= 90, u[4] == 0]
            rules += [u[0] == 250] if step == 1 else []
            cost = cp.sum(cp.multiply(weight[step] / weight[step].mean(), cp.square(u - draws[sample, step])))
            cp.Problem(cp.Minimize(cost), rules).solve(solver="CLARABEL")
            np.testing.assert_allclose(result.draws[sample, step], u.value, atol=2e-3)
    assert (result.draws[..., 4] == 0).all()
    assert result.draws[..., 6].max() <= 90
    assert not Limits().active(from_frame(frame(), KEYS))
    assert Limits().active(data)


def test_a_plan_for_an_ended_series_counts():
    data = ended_data()
    result = Limits(fixed={"Total/A/y": 5.0}).apply(drawn(data), data)
    np.testing.assert_allclose(result.draws[..., 4], 5.0)


def test_plans_that_contradict_each_other():
    data = from_frame(frame(), KEYS)
    with pytest.raises(InfeasibleError):
        Limits(True, None, {"Total": 10.0, "Total/A": 20.0}).apply(drawn(data), data)
    assert np.isnan(Limits(True, None, {"Total": 10.0, "Total/A": 20.0}).apply(drawn(data), data, "flag").draws).all()


def test_immutable_nodes_keep_their_forecast_in_every_projection():
    data = held(from_frame(frame(), KEYS), ["Total"])
    incoherent = drawn(data) + np.random.default_rng(0).normal(size=(6, 3, 7))
    result = Limits().apply(incoherent, data)
    np.testing.assert_allclose(result.draws[..., 0], incoherent[..., 0], rtol=1e-12)
    np.testing.assert_allclose(result.draws[..., :3], result.draws[..., 3:] @ TWO_GROUPS[:3].T, rtol=1e-9)
    with pytest.raises(ParameterError, match="no node 'X'"):
        held(data, ["X"])


def test_plans_from_frames():
    data = from_frame(frame(), KEYS)  # to 2021-04
    rows = pd.DataFrame({"unique_id": ["Total", "Total/A"], "ds": ["2021-06-01", "2021-05-01"], "y": [9.0, 4.0]})
    plan = read_plan(rows, data, 3, "ds")
    assert plan[1, 0] == 9
    assert plan[0, 1] == 4
    assert np.isnan(plan).sum() == 19
    assert (read_plan(rows.drop(columns="ds"), data, 3, "ds")[:, 0] == 9).all()
    for wrong in (rows.assign(ds="2031-01-01"), rows.assign(z=1.0), rows.replace("Total/A", "Total/C")):
        with pytest.raises(ParameterError) as raised:
            read_plan(wrong, data, 3, "ds")
        assert_three_parts(raised.value)


@pytest.mark.parametrize(("factor", "warned"), [(1.0, False), (0.45, True), (0.6, False), (1.9, False), (2.2, True)])
def test_a_total_far_from_its_last_year(factor: float, warned: bool):
    data = from_frame(frame(), KEYS)
    draws = factor * data.values[-12:-9][None] * np.array([0.9, 1.1])[:, None, None]
    found = unsupported(data, draws)
    assert bool(found) == warned
    if warned:
        assert found[0].node == "Total"
        assert found[0].ratio == pytest.approx(factor)
        assert found[0].last_year == pytest.approx(data.values[-12:-9, 0].sum())
        assert found[0].since == "2020-05"
        assert "times its last year" in found[0].sentence


def test_seasons_and_small_totals_do_not_warn():
    stamps = pd.date_range("2020-01-01", periods=36, freq="MS")
    summer = np.where(np.isin(stamps.month, [6, 7]), 100.0, 1.0)
    df = pd.concat([pd.DataFrame({"id": k, "ds": stamps, "y": summer}) for k in "ab"])
    data = from_frame(df, ["id"])
    assert not unsupported(data, data.values[-12:][None])  # 100 times the month before, as last year
    signs = from_frame(df.assign(y=np.where(df["id"] == "a", df["y"], -df["y"] + 0.01)), ["id"])
    assert not unsupported(signs, 5 * signs.values[-12:][None])  # a total of almost 0
    longer = unsupported(data, np.concatenate([data.values[-12:]] * 2)[None] * 3)
    assert longer[0].ratio == pytest.approx(3)
