"""The pool of members: what is learned on past windows, coherent paths, saved folders, cross-validation, pictures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch

from forecasting.helpers import KEYS, assert_three_parts, frame, incoherence
from probhard.errors import ParameterError
from probhard.forecasting import HierarchicalForecaster, cross_validation, from_frame, seasonal_bootstrap
from probhard.forecasting.limits import held
from probhard.forecasting.members import kept_tuning
from probhard.forecasting.members.base import MemberForecast
from probhard.forecasting.members.bootstrap import BootstrapMember, summary_of
from probhard.forecasting.members.coherent import _separate, fit_scales, groups, robust_factor
from probhard.forecasting.members.external import member_of
from probhard.forecasting.members.pooled import PooledForecast
from probhard.forecasting.members.tuning import earned_weights, pool_scores, shrunk_weights
from probhard.forecasting.reconciliation.joint_law import PathLaw


def quick(**options: Any) -> HierarchicalForecaster:
    return HierarchicalForecaster(
        KEYS, **{"models": ["naive", "smoothing"], "num_samples": 100, "horizon": 4, **options}
    )


@pytest.fixture(scope="module")
def pooled() -> HierarchicalForecaster:
    return quick(nonnegative=True).fit(frame(60))


def test_groups_are_top_middle_and_bottom() -> None:
    np.testing.assert_array_equal(groups(from_frame(frame(), KEYS)), [0, 1, 1, 2, 2, 2, 2])


def test_scales_are_found_and_shrunk() -> None:
    random, labels = np.random.default_rng(0), np.array([0, 2, 2])
    law = PathLaw(torch.zeros(4, 3), torch.ones(4, 3))
    windows = [random.standard_normal((4, 3)) * [1.0, 3.0, 3.0] for _ in range(300)]
    windows[0][0, 0] = np.nan
    top, middle, bottom = fit_scales([law] * 300, windows, labels)
    assert top == pytest.approx(1, abs=0.1)
    assert middle == 1
    assert bottom == pytest.approx(3, rel=0.06)
    few = fit_scales([law] * 3, windows[:3], labels)
    assert 1 < few[2] < 2.4  # halfway


@pytest.mark.parametrize(("ends", "count"), [((40, 42, 44), 2), ((40, 48, 56), 3)])
def test_overlapping_windows_count_as_fewer(ends: tuple[int, ...], count: int) -> None:
    data = from_frame(frame(60), KEYS)
    bases: list[Any] = [SimpleNamespace(data=data.window(0, end), mean=np.zeros((4, 7))) for end in ends]
    assert _separate(bases) == count


def windows_of(gain: float, noise: float, count: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    """Coefficients of the pool's CRPS of two members; the second is better by ``gain``, up to noise."""
    random, apart = np.random.default_rng(0), np.full((2, 2), 0.2)
    return [(np.array([1.0, 1.0 - gain + noise * random.standard_normal()]), apart) for _ in range(count)]


def test_members_on_trial_need_a_gain_beyond_chance() -> None:
    on_trial = np.array([False, True])
    sure, unsure = windows_of(0.3, 0.05), windows_of(0.02, 0.5)
    np.testing.assert_array_equal(earned_weights(sure, on_trial), shrunk_weights(sure))
    np.testing.assert_array_equal(earned_weights(unsure, on_trial), [1, 0])
    np.testing.assert_array_equal(earned_weights(sure[:2], on_trial), [1, 0])  # two windows tell nothing
    np.testing.assert_array_equal(earned_weights(unsure, np.array([True, True])), shrunk_weights(unsure))
    np.testing.assert_allclose(pool_scores(sure, np.array([1.0, 0.0])), 0.9)


def test_bursts_do_not_inflate_the_spread() -> None:
    random = np.random.default_rng(0)
    errors = random.standard_normal((400, 3))
    errors[50, 1] = 200.0
    errors[:, 2] = np.nan
    factor = robust_factor(errors, 12)
    assert factor[0] == pytest.approx(1, abs=0.15)
    assert factor[1] == pytest.approx(0.1, abs=0.03)  # 1 / sqrt(1 + 200^2 / 400)
    assert factor[2] == 1


def test_weights_leave_out_bad_members_and_share_between_equal_ones() -> None:
    near, apart = np.array([1.0, 1.0, 4.0]), np.full((3, 3), 0.9)
    apart[2] = apart[:, 2] = 3.0
    apart[2, 2] = 0.5
    apart[0, 1] = apart[1, 0] = 1.0
    weights = shrunk_weights([(near, apart)] * 2)
    assert weights[0] == pytest.approx(weights[1], abs=1e-6)
    assert weights[2] < 0.01


def test_paths_are_coherent_bounded_and_of_any_length(pooled: HierarchicalForecaster) -> None:
    draws = pooled.sample()
    assert draws.shape == (100, 4, 7)
    assert incoherence(draws) < 1e-12
    assert draws.min() >= 0
    np.testing.assert_array_equal(pooled.sample(2), draws[:, :2])
    assert pooled.sample(30).shape == (100, 30, 7)
    assert sum(pooled.weights_.values()) == pytest.approx(1)
    assert pooled.model == "probhard"
    assert "learned on" in pooled.explanation_[0]
    assert pooled.explanation_[1].startswith("naive: deviations times")


def test_sums_over_the_horizon_are_as_wide_as_they_were_wrong() -> None:
    random = np.random.default_rng(4)
    table = frame(120)
    walk = random.standard_normal((4, 120)).cumsum(1) * 5
    table["y"] = 500 + walk.ravel()
    draws = quick(models=["ets"], season=1, horizon=6, num_samples=800).fit(table).sample()
    total = draws[..., 0]
    alone = np.sqrt((total.std(0) ** 2).sum())
    assert total.sum(1).std() > 1.6 * alone  # a random walk: steps are dependent


def test_saved_folders_forecast_alike_without_training(pooled: HierarchicalForecaster, tmp_path: Path) -> None:
    pooled.save(tmp_path / "model")
    loaded = HierarchicalForecaster.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.sample(), pooled.sample())
    assert loaded.explanation_ == pooled.explanation_
    later = loaded.update(frame(64)).predict(2)
    assert str(later["ds"].min())[:10] == "2023-05-01"
    assert loaded.weights_ == pooled.weights_
    (tmp_path / "model" / "members" / "0.npz").write_bytes(b"broken")
    with pytest.raises(ParameterError) as caught:
        HierarchicalForecaster.load(tmp_path / "model")
    assert_three_parts(caught.value)


def test_what_was_learned_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = quick(cache=tmp_path).fit(frame(60))
    (file,) = tmp_path.glob("tuned-*.json")
    with monkeypatch.context() as patch:
        patch.setattr(kept_tuning, "tune_pool", lambda *given: pytest.fail("tuned again"))
        again = quick(cache=tmp_path, nonnegative=True, num_samples=50).fit(frame(60))
    assert again.pool.tuned == first.pool.tuned
    assert quick().fit(frame(60)).pool.tuned == first.pool.tuned
    file.write_text('{"members": 1}')
    assert quick(cache=tmp_path).fit(frame(60)).pool.tuned == first.pool.tuned
    assert len(list(tmp_path.glob("tuned-*.json"))) == 1
    changed = frame(60).assign(y=lambda table: table["y"] * 1.01)
    others = [frame(61), changed, held(from_frame(frame(60), KEYS), ["Total"])]  # the last: another projection
    for count, other in enumerate(others, start=2):
        quick(cache=tmp_path).fit(other)
        assert len(list(tmp_path.glob("tuned-*.json"))) == count


def test_a_member_that_fails_is_left_out_with_a_note() -> None:
    data = from_frame(frame(11), KEYS)
    made = PooledForecast.fit([BootstrapMember(), *_naive(data)], data, 2)
    assert [one.name for one in made.made] == ["naive"]
    assert made.notes[0].startswith("bootstrap was left out: ")
    with pytest.raises(ParameterError, match="No member could be fitted"):
        PooledForecast.fit([BootstrapMember()], data, 2)


def _naive(data: Any) -> list[Any]:
    from probhard.forecasting.members.catalogue import named_member

    return [named_member("naive", data)]


def test_short_histories_take_the_prior() -> None:
    forecaster = quick(horizon=6).fit(frame(20))
    assert forecaster.pool.tuned.windows == 0
    assert forecaster.weights_ == {"naive": 0.5, "smoothing": 0.5}
    assert "too short" in forecaster.explanation_[0]
    assert incoherence(forecaster.sample()) < 1e-12


def test_members_that_draw_jointly_keep_their_paths() -> None:
    data = from_frame(frame(60), KEYS)
    draws = seasonal_bootstrap(data, 3, 50)
    member = MemberForecast("paths", [summary_of(data, draws)], [draws])
    assert member.bases[0].mean.shape == (3, 7)
    drawn = quick(models=["bootstrap"], windows=0, horizon=3).fit(data).sample()
    assert incoherence(drawn) < 1e-12


def test_cross_validation_is_nixtlas_frame_of_cutoffs() -> None:
    table = cross_validation(quick(models=["naive"]), frame(60), h=3, n_windows=2, level=[80])
    assert list(table.columns) == ["unique_id", "ds", "cutoff", "y", "probhard", "probhard-lo-80", "probhard-hi-80"]
    assert len(table) == 2 * 7 * 3
    first = table[table["cutoff"] == table["cutoff"].min()]
    history = frame(60)
    known = history[history["ds"] <= first["cutoff"].iloc[0]]
    again = quick(models=["naive"], horizon=3).fit(known).predict(3, level=[80])
    np.testing.assert_allclose(first["probhard"], again["probhard"])
    total = history.groupby("ds")["y"].sum()
    one = first[first["unique_id"] == "Total"]
    np.testing.assert_allclose(one["y"], total.loc[one["ds"]])


def test_pictures_of_a_node(pooled: HierarchicalForecaster) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = pooled.plot("Total/A")
    assert axes.get_title() == "Total/A"
    assert len(axes.get_lines()[1].get_xdata()) == 4
    pyplot.close("all")
    with pytest.raises(ParameterError, match="no node 'total/a'") as caught:
        pooled.plot("total/a")
    assert "Total/A" in caught.value.fix


def test_models_of_statsforecast_are_members() -> None:
    models = pytest.importorskip("statsforecast.models")
    forecaster = quick(models=[models.HistoricAverage(), "naive"]).fit(frame(60))
    assert set(forecaster.weights_) == {"HistoricAverage", "naive"}
    assert incoherence(forecaster.sample()) < 1e-12


class Drift:
    """An engine with Nixtla's interface: every series goes on from its last value."""

    def fit(self, df: Any) -> Drift:
        self.last = df.sort_values("ds").groupby("unique_id")[["ds", "y"]].last()
        return self

    def predict(self, h: int) -> Any:
        rows = [(name, row.ds + k + 1, row.y) for name, row in self.last.iterrows() for k in range(h)]
        return pd.DataFrame(rows, columns=["unique_id", "ds", "Drift"])

    def cross_validation(self, df: Any, h: int, n_windows: int, step_size: int, refit: bool) -> Any:
        assert not refit
        last, parts = df["ds"].max() - h, []
        for k in range(n_windows - 1, -1, -1):
            cutoff = last - k * step_size
            parts.append(self.fit(df[df["ds"] <= cutoff]).predict(h).assign(cutoff=cutoff))
        return pd.concat(parts)


def test_engines_take_their_errors_from_past_windows() -> None:
    data = from_frame(frame(60), KEYS)
    made = member_of(Drift(), data).forecast(data, 3, (51, 54, 57))
    np.testing.assert_array_equal(made.bases[-1].mean, np.tile(data.values[-1], (3, 1)))
    np.testing.assert_array_equal(made.bases[1].mean, np.tile(data.values[53], (3, 1)))
    errors = np.concatenate([data.values[end : end + 3] - data.values[end - 1] for end in (51, 54, 57)])
    np.testing.assert_allclose(data.values[51:] - made.bases[-1].fitted[51:], errors)
    assert np.isnan(made.bases[-1].fitted[:51]).all()
    np.testing.assert_allclose(made.bases[-1].stddev[0], np.sqrt(np.mean(errors**2, axis=0)))
    np.testing.assert_allclose(made.bases[0].stddev[0], np.sqrt(np.mean(errors[3:] ** 2, axis=0)))
    assert incoherence(quick(models=[Drift()]).fit(frame(60)).sample()) < 1e-12


def test_engines_of_statsforecast_with_stamps_are_members() -> None:
    engine = pytest.importorskip("statsforecast").StatsForecast(
        models=[pytest.importorskip("statsforecast.models").SeasonalNaive(12)], freq="MS"
    )
    data = from_frame(frame(60), KEYS)
    made = member_of(engine, data).forecast(data, 3, (51, 54, 57))
    np.testing.assert_allclose(made.bases[1].mean, data.values[42:45])
    np.testing.assert_allclose(made.bases[-1].mean, data.values[48:51])


def test_gluonts_estimators_are_members() -> None:
    class Estimator:
        prediction_length = 3
        trained: ClassVar[list[int]] = []

        def train(self, entries: Any) -> Estimator:
            self.trained.append(len(entries[0]["target"]))
            return self

        def predict(self, entries: Any, num_samples: int) -> Any:
            for entry in entries:
                noise = np.random.default_rng(0).standard_normal((num_samples, 3))
                yield SimpleNamespace(samples=entry["target"][-1] + noise)

    data = from_frame(frame(60), KEYS)
    made = member_of(Estimator(), data).forecast(data, 3, (51, 54, 57))
    assert Estimator.trained == [51, 60]
    np.testing.assert_allclose(made.bases[1].mean, np.tile(data.values[53], (3, 1)), atol=0.3)
    np.testing.assert_allclose(made.bases[-1].stddev, 1, atol=0.2)
    with pytest.raises(ParameterError, match="prediction_length=3, the horizon is 4"):
        quick(models=[Estimator()]).fit(frame(60))
