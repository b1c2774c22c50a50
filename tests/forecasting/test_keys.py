"""Nested and crossed keys, against Nixtla's ``aggregate`` on the same levels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hierarchicalforecast.utils import aggregate

from forecasting.helpers import assert_three_parts
from probhard.errors import ParameterError
from probhard.forecasting import from_frame
from probhard.forecasting.data.keys import Keys


def sales(rows: int = 6) -> pd.DataFrame:
    random = np.random.default_rng(0)
    stamps = pd.date_range("2020-01-01", periods=rows, freq="MS")
    places = [("N", "n1"), ("N", "n2"), ("Q", "q1"), ("Q", "q2")]
    rows_ = [(s, r, p, t) for s, r in places for p in ("fun", "work", "other") for t in stamps]
    df = pd.DataFrame(rows_, columns=["state", "region", "purpose", "ds"])
    return df.assign(y=random.uniform(1, 9, len(df)))


def test_notations():
    nested = ((), ("state",), ("state", "region"))
    assert Keys.of("state, region").levels == Keys.of(["state", "region"]).levels == nested
    crossed = Keys.of("state,region * purpose")
    assert crossed.columns == ("state", "region", "purpose")
    assert crossed.levels == (
        (),
        ("state",),
        ("purpose",),
        ("state", "region"),
        ("state", "purpose"),
        ("state", "region", "purpose"),
    )
    assert len(Keys.of("a,b * c * d,e").levels) == 3 * 2 * 3
    assert Keys.of(["state", "region * purpose"]) == crossed  # as a YAML list may split it
    assert Keys.of([["state"], ["state", "region"]]).levels == nested[1:]


def test_crossed_levels_against_nixtlas_aggregate():
    df = sales()
    data = from_frame(df, "state,region * purpose")
    spec = [["top", *level] for level in Keys.of("state,region * purpose").levels]
    expected, _, tags = aggregate(df.assign(top="Total"), spec)
    wide = expected.pivot(index="ds", columns="unique_id", values="y")
    assert set(data.names) == set(wide.columns)
    np.testing.assert_allclose(data.values, wide[list(data.names)].to_numpy(), rtol=1e-13)
    assert [len(level) for level in data.levels.values()] == [1, 2, 3, 4, 6, 12]
    assert sorted(map(len, tags.values())) == sorted(map(len, data.levels.values()))


def test_a_total_is_added_to_a_spec_unless_a_level_is_one():
    df = sales()
    spec = [["state"], ["purpose"], ["state", "purpose", "region"]]
    data = from_frame(df, spec)
    assert list(data.levels) == ["total", "total/state", "total/purpose", "total/state/purpose/region"]
    assert data.names[0] == "Total"
    np.testing.assert_allclose(data.values[:, 0], df.groupby("ds")["y"].sum())
    own = from_frame(df.assign(country="Au"), [["country"], *[["country", *level] for level in spec]])
    assert own.names[:3] == ("Au", "Au/N", "Au/Q")
    assert len(own.names) == len(data.names)


def test_a_constant_first_key_is_the_total_of_crossed_keys_too():
    df = sales().assign(country="Au")
    data = from_frame(df, "country,state * purpose".replace("state", "state,region"))
    assert data.names[0] == "Au"
    assert [len(level) for level in data.levels.values()] == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    "keys", ["state,,region", "state * state", "* purpose", "", [["state", "region"], ["state"]], [[]], [["a"], []]]
)
def test_what_cannot_be_read(keys):
    with pytest.raises(ParameterError) as raised:
        Keys.of(keys)
    assert_three_parts(raised.value)


def test_equal_names_of_crossed_levels_are_told_apart_or_refused():
    with pytest.raises(ParameterError, match="occurs more than once"):
        from_frame(sales().replace({"purpose": {"fun": "N"}}), "state,region * purpose")
