"""Tables of hierarchical series: coherence, gaps, splits, GluonTS."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from gluonts.dataset.hierarchical import HierarchicalTimeSeries

from forecasting.helpers import FIVE_NODES, assert_three_parts
from probhard import Hierarchy, ParameterError, ShapeError
from probhard.forecasting import HierarchicalData

NAMES = ["all", "ab", "a", "b", "c"]
TAGS = {"total": ["all"], "pair": ["ab"], "leaf": ["a", "b", "c"]}
MONTHS = pd.period_range("2020-01", periods=24, freq="M")


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(1, 9, (24, 3)) @ FIVE_NODES.T


def monthly(**options) -> HierarchicalData:
    return HierarchicalData.from_matrix(table(), FIVE_NODES, MONTHS, NAMES, TAGS, **options)


def test_levels_names_and_frequency():
    data = monthly(name="x")
    assert data.names == tuple(NAMES)
    assert data.freq == "M"
    assert {k: v.tolist() for k, v in data.levels.items()} == {"total": [0], "pair": [1], "leaf": [2, 3, 4]}
    plain = HierarchicalData.from_matrix(table(), FIVE_NODES, MONTHS)
    assert {k: v.tolist() for k, v in plain.levels.items()} == {"aggregates": [0, 1], "bottom": [2, 3, 4]}
    assert plain.names == ("0", "1", "2", "3", "4")
    assert list(data.future(2).astype(str)) == ["2022-01", "2022-02"]


def test_incoherent_history_is_refused_with_the_worst_series_or_rebuilt():
    values = table()
    values[3, 0] *= 1.001
    values[5, 1] *= 1.5
    with pytest.raises(ParameterError, match=r"'ab' differs .* at 2020-06.* 2 of 2 sums") as error:
        HierarchicalData.from_matrix(values, FIVE_NODES, MONTHS, NAMES, TAGS)
    assert "coherence='aggregate'" in error.value.fix
    rebuilt = HierarchicalData.from_matrix(values, FIVE_NODES, MONTHS, NAMES, TAGS, coherence="aggregate")
    np.testing.assert_allclose(rebuilt.values, table(), rtol=1e-14)
    values = table()
    values[3, 0] *= 1 + 1e-9  # rounding of a file
    assert HierarchicalData.from_matrix(values, FIVE_NODES, MONTHS).values[3, 0] == values[3, 0]


def test_missing_values_mask_only_the_sums_that_need_them():
    values = table()
    values[2, 4] = np.nan  # c is in the total only
    values[:, :2] = np.nan
    values[2, 0] = 77.0  # known, although c is missing
    filled = HierarchicalData.from_matrix(values, FIVE_NODES, MONTHS).values
    assert filled[2, 0] == 77.0
    np.testing.assert_allclose(filled[2, 1], filled[2, 2] + filled[2, 3])
    np.testing.assert_allclose(np.delete(filled, 2, 0), np.delete(table(), 2, 0))
    bottoms = HierarchicalData.from_matrix(values[:, 2:], FIVE_NODES, MONTHS).values
    assert np.isnan(bottoms[2, [0, 4]]).all()
    assert np.isnan(bottoms).sum() == 2


def test_splits_by_origin():
    data = monthly(horizon=4)
    train, test = data.train_test()
    assert len(train.index) == 20
    np.testing.assert_array_equal(test.values, data.values[20:])
    assert str(test.index[0]) == "2021-09"
    train, test = data.train_test(origin=2)
    np.testing.assert_array_equal(train.values, data.values[:12])
    np.testing.assert_array_equal(test.values, data.values[12:16])
    train, test = data.train_test(horizon=3, origin=2, step=1)
    np.testing.assert_array_equal(test.values, data.values[19:22])
    for bad in ({"origin": 5}, {"origin": 6}, {"horizon": 24}, {"origin": -1}, {"horizon": -2}):
        with pytest.raises(ParameterError, match="rows to learn from"):
            data.train_test(**bad)
    with pytest.raises(ParameterError, match="No horizon"):
        monthly().train_test()
    np.testing.assert_array_equal(data.window(2, -3).values, data.values[2:-3])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"values": table().T}, ShapeError, r"\(5, 24\)"),
        ({"index": pd.date_range("2020", periods=24)}, ParameterError, "DatetimeIndex"),
        ({"index": MONTHS.delete(3).append(MONTHS[-1:] + 1)}, ParameterError, "consecutive"),
        ({"names": ["all", "ab", "a", "a", "c"]}, ParameterError, "'a' occurs more than once"),
        ({"tags": {"total": ["everything"]}}, ParameterError, "'everything', which is not a series"),
        ({"values": np.where(table() > 20, np.inf, table())}, ParameterError, "'all' is infinite at"),
        ({"values": table() * 1e300}, ParameterError, r"'all' is .*e\+30. at .* choose larger units"),
        ({"coherence": "hope"}, ParameterError, "hope"),
    ],
)
def test_bad_tables_are_refused(change, error, message):
    arguments = {"values": table(), "S": FIVE_NODES, "index": MONTHS, "names": NAMES, "tags": {}} | change
    with pytest.raises(error, match=message) as raised:
        HierarchicalData.from_matrix(**arguments)
    assert_three_parts(raised.value)


def test_gluonts_there_and_back():
    bottom = pd.DataFrame(table()[:, 2:], index=MONTHS, columns=["a", "b", "c"])
    theirs = HierarchicalTimeSeries(ts_at_bottom_level=bottom, S=FIVE_NODES)
    data = HierarchicalData.from_gluonts(theirs, horizon=3)
    (entry,) = data.to_gluonts()
    (expected,) = theirs.to_dataset()
    np.testing.assert_allclose(entry["target"], expected["target"], rtol=1e-14)
    assert entry["start"] == expected["start"]
    assert data.names[2:] == ("a", "b", "c")


def test_a_ready_hierarchy_is_taken_as_it_is():
    hierarchy = Hierarchy(FIVE_NODES, names=NAMES, tags=TAGS)
    assert HierarchicalData.from_matrix(table(), hierarchy, MONTHS).hierarchy is hierarchy
