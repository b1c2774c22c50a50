"""The rolling table: a job on a small set, statistics against plain recomputations, and the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from experiments.forecasting import nine_sets, rolling_runs, rolling_tables
from experiments.forecasting.nine_sets import RollingSet
from experiments.forecasting.rolling_runs import ABLATIONS, DEFAULT, NO_POOL, NO_STEPS, RIVALS, Job

from forecasting.helpers import KEYS, frame
from probhard.forecasting import from_frame
from probhard.forecasting.members.catalogue import named_member


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> RollingSet:
    chosen = RollingSet(4, 3, 4, 2, refit=False)
    monkeypatch.setitem(nine_sets.SETS, "tourism", chosen)
    monkeypatch.setattr(nine_sets, "load_set", lambda name: from_frame(frame(70), KEYS))
    monkeypatch.setattr(
        rolling_runs, "default_members", lambda data, horizon: [named_member(name, data) for name in ("ets", "naive")]
    )
    return chosen


def test_development_ends_before_the_test(small: RollingSet) -> None:
    test, development = nine_sets.splits("tourism"), nine_sets.splits("tourism", development=True)
    assert [number for number, _, _ in test] == [2, 1, 0]
    assert [len(known.index) for _, known, _ in test] == [58, 62, 66]
    assert [number for number, _, _ in development] == [4, 3]
    assert development[-1][2].index[-1] + 1 == test[0][2].index[0]


def test_a_job_gives_all_rows_at_all_origins(small: RollingSet, tmp_path: Path) -> None:
    job = Job("tourism")
    lines = job.run(tmp_path / "unit")
    keys = [{key: line[key] for key in rolling_runs.KEYS} for line in lines]
    assert all(expected in keys for expected in job.expected())
    assert {line["method"] for line in lines} == {
        DEFAULT, "ets alone", "naive alone", *RIVALS, *ABLATIONS, NO_STEPS, NO_POOL,
    }  # fmt: skip
    for line in lines:
        assert 0 < line["crps"] < 1
        assert [count for _, count in line["inside"].values()] == [4, 8, 16]
        assert ("inside_sums" in line) == (line["method"] not in RIVALS)
    assert list((tmp_path / "fits").glob("ets-*.npz"))
    page = rolling_tables.render(lines)
    assert "not at all origins: Labour" in page
    assert "| probhard |" in page
    assert "{" not in page


def test_sign_flips_are_enumerated() -> None:
    assert rolling_tables.sign_flips([-1.0, -2.0, -3.0]) == pytest.approx(1 / 8)
    assert rolling_tables.sign_flips([1.0, 2.0, 3.0]) == 1
    assert rolling_tables.sign_flips([-3.0, 1.0]) == pytest.approx(2 / 4)


def test_networks_count_on_sets_with_the_same_origins() -> None:
    lines = [{"method": DEFAULT, "dataset": "wiki", "origin": k, "crps": 0.1} for k in range(2)]
    network = {"window": "rolling", "method": "base", "dataset": "wiki"}
    both = [{**network, "origin": k, "crps": c, "seed": s} for k in range(2) for s, c in enumerate((0.2, 0.4))]
    found = rolling_tables.collect(lines, both)["DeepVAR", "wiki"]
    assert found == {0: pytest.approx(0.3), 1: pytest.approx(0.3)}
    assert ("DeepVAR", "wiki") not in rolling_tables.collect(lines, both[:2])


def test_shares_are_means_over_sets() -> None:
    lines = [
        {"dataset": name, "inside": {"top": [inside, 10.0]}} for name, inside in (("a", 9.0), ("a", 7.0), ("b", 6.0))
    ]
    assert rolling_tables._share(lines, "inside", "top").startswith("70 (")
    assert np.isnan(rolling_tables.difference({(DEFAULT, "tourism"): {}, ("x", "tourism"): {}}, "x", "tourism"))
