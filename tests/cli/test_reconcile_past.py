"""``probhard reconcile`` with a history, with past forecasts, with crossed ids; its joint law and explanations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

import probhard as ph
from probhard.cli import _frames as frames
from probhard.cli import main
from probhard.forecasting import PathLaw, projected_moments
from probhard.forecasting.reconciliation.family import middle
from probhard.forecasting.reconciliation.ids import split, tree

pd = pytest.importorskip("pandas")
NAMES = ["Total", "Total/a", "Total/b", "Total/a/x", "Total/a/y", "Total/b/x", "Total/b/y"]
S = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], *np.eye(4)])
HORIZON, ROWS, WINDOWS = 2, 40, 3
DAYS = pd.date_range("2024-01-01", periods=ROWS + HORIZON, freq="D").strftime("%Y-%m-%d").to_list()


def observed(seed: int = 0) -> np.ndarray:
    """Bottom series that move together, and their sums, (T, 7)."""
    random = np.random.default_rng(seed)
    return (50 + random.standard_normal((ROWS, 4)) + 3 * random.standard_normal((ROWS, 1))) @ S.T


FITTED = np.broadcast_to(observed().mean(0), (ROWS, 7)) + np.random.default_rng(1).normal(0, 0.5, (ROWS, 7))
MEAN = observed().mean(0) + np.random.default_rng(2).normal(0, 1, (HORIZON, 7))
SPREAD = np.broadcast_to((observed() - FITTED).std(0), (HORIZON, 7))


def long(days: list[str], columns: dict[str, np.ndarray], stamp: str = "ds") -> Any:
    """Columns (H, 7) as a frame of ids."""
    rows = pd.DataFrame([(name, day) for day in days for name in NAMES], columns=["unique_id", stamp])
    return rows.assign(**{name: np.asarray(values).ravel() for name, values in columns.items()})


def forecasts(mean: np.ndarray = MEAN, spread: np.ndarray = SPREAD) -> dict[str, np.ndarray]:
    half = scipy.stats.norm.ppf(0.9) * spread
    return {"M": mean, "M-lo-80": mean - half, "M-hi-80": mean + half}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def command(frame: Any, *options: str, status: int = 0, **files: Any) -> tuple[Any, dict[str, Any]]:
        source, output, given = tmp_path / "in.csv", tmp_path / "out.csv", []
        frames.write(source, frame)
        for name, content in files.items():
            frames.write(tmp_path / f"{name}.csv", content)
            given += [f"--{name}", str(tmp_path / f"{name}.csv")]
        assert main(["reconcile", str(source), "--output", str(output), *given, *options]) == status
        if status == 2:
            return None, {}
        return pd.read_csv(output), json.loads(output.with_suffix(".json").read_text())

    return command


def history(stamp: str = "ds") -> Any:
    return long(DAYS[:ROWS], {"y": observed(), "M": FITTED}, stamp)


def past() -> Any:
    """Three windows, forecast by the mean of what came before."""
    parts = []
    for k in range(WINDOWS, 0, -1):
        start = ROWS - k * HORIZON
        columns = {"y": observed()[start : start + HORIZON], **forecasts()}
        parts.append(long(DAYS[start : start + HORIZON], columns).assign(cutoff=DAYS[start - 1]))
    return pd.concat(parts)


def table(frame: Any, column: str) -> np.ndarray:
    return frame[column].to_numpy().reshape(-1, 7)


def width(frame: Any) -> float:
    """Width of the total's 80 % interval at the first step, in its standard deviations."""
    return float(table(frame, "M-hi-80")[0, 0] - table(frame, "M-lo-80")[0, 0]) / 2 / scipy.stats.norm.ppf(0.9)


def test_a_history_gives_the_joint_law_and_shapes_the_metric(run):
    frame, certificate = run(long(DAYS[ROWS:], forecasts()), history=history())
    law = PathLaw.of_errors(MEAN, SPREAD.copy(), torch.from_numpy(observed() - FITTED))
    mean, stddev = projected_moments(law, middle(ROWS), ph.Hierarchy(S))
    np.testing.assert_allclose(table(frame, "M"), mean, rtol=1e-9)
    np.testing.assert_allclose(table(frame, "M-hi-80"), mean + scipy.stats.norm.ppf(0.9) * stddev, rtol=1e-9)
    record = certificate["models"]["M"]
    assert (record["metric"], record["covariance"], record["quantiles_in_closed_form"]) == ("middle", "errors", True)
    assert record["metric_numbers"] == vars(middle(ROWS))
    assert certificate["history"] == "history.csv"


def test_intervals_of_the_total_are_not_silently_the_independent_ones(run):
    """True deviation of the total: about 12 where independent series have 6.3."""
    frame = long(DAYS[ROWS:], forecasts())
    independent, certificate = run(frame, "--covariance", "independent")
    assert certificate["models"]["M"]["covariance"] == "independent"
    spread = SPREAD[0, 0]
    assert width(independent) < 0.75 * spread
    for options, name in (({"history": history()}, "errors"), ({}, "hierarchy")):
        found, certificate = run(frame, **options)
        assert certificate["models"]["M"]["covariance"] == name
        assert width(found) == pytest.approx(spread, rel=0.1)


def test_past_forecasts_choose_the_metric(run, capsys):
    frame, certificate = run(long(DAYS[ROWS:], forecasts()), history=history(), past=past())
    record = certificate["models"]["M"]
    assert (record["metric"], record["past_windows"], record["covariance"]) == ("learned", WINDOWS, "errors")
    assert "metric learned on 3 past windows" in capsys.readouterr().out
    bottoms = table(frame, "M")[:, 3:]
    np.testing.assert_allclose(table(frame, "M"), bottoms @ S.T, rtol=1e-12)
    _, certificate = run(long(DAYS[ROWS:], forecasts()), past=past())
    assert certificate["models"]["M"]["covariance"] == "errors"  # of the past windows
    _, certificate = run(long(DAYS[ROWS:], forecasts()), "--metric", "structural", past=past())
    assert certificate["models"]["M"]["metric"] == "structural"


def test_means_alone_use_the_errors_of_a_history(run):
    """As MinT does: weights from the errors, which are known without intervals."""
    frame, certificate = run(long(DAYS[ROWS:], {"M": MEAN}), "--metric", "oblique", history=history())
    methods = pytest.importorskip("hierarchicalforecast.methods")
    theirs = methods.MinTrace("mint_shrink")(
        S=S.astype(float), y_hat=MEAN.T, y_insample=observed().T, y_hat_insample=FITTED.T
    )["mean"].T
    np.testing.assert_allclose(table(frame, "M"), theirs, rtol=1e-3)
    assert certificate["models"]["M"]["covariance"] is None


def test_bottom_rows_alone_warn(run, capsys):
    bottoms = long(DAYS[ROWS:], forecasts())
    bottoms = bottoms[bottoms["unique_id"].str.count("/") == 2]
    _, certificate = run(bottoms)
    assert "too narrow if they move together" in certificate["models"]["M"]["warning"]
    assert "Warning: Forecasts of bottom series alone" in capsys.readouterr().out
    frame, certificate = run(bottoms, history=history())
    assert "warning" not in certificate["models"]["M"]
    top = frame[frame["unique_id"] == "Total"]
    half = (top["M-hi-80"] - top["M-lo-80"]).iloc[0] / 2
    assert half > 1.5 * scipy.stats.norm.ppf(0.9) * np.sqrt(np.square(SPREAD[0, 3:]).sum())
    run(bottoms, "--covariance", "hierarchy", status=2)
    assert "bottom series alone" in capsys.readouterr().err


def test_other_names_of_stamps(run):
    plain, _ = run(long(DAYS[ROWS:], forecasts()), history=history())
    dated, _ = run(long(DAYS[ROWS:], forecasts(), "date"), history=history("timestamp"))
    assert list(dated.columns)[1] == "date"
    np.testing.assert_array_equal(plain["M"], dated["M"])


def test_two_columns_of_stamps_are_ambiguous(run, capsys):
    frame = long(DAYS[ROWS:], forecasts(), "date").assign(month="2024-02")
    run(frame, status=2)
    assert "More than one column of the stamps" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["history", "past"])
def test_files_without_the_model_are_refused(run, capsys, option):
    frame = {"history": history, "past": past}[option]()
    run(long(DAYS[ROWS:], forecasts()), status=2, **{option: frame.rename(columns={"M": "other"})})
    assert "none of M. Past values are matched to models" in capsys.readouterr().err


def test_explanations(run, tmp_path):
    frame, _ = run(long(DAYS[ROWS:], forecasts()), "--explain", "Total, Total/a/x", history=history())
    pulls = pd.read_csv(tmp_path / "out-explained.csv")
    assert set(pulls["node"]) == {"Total", "Total/a/x"}
    assert set(pulls["pulled_by"]) == set(NAMES[:3])
    for (node, day), group in pulls.groupby(["node", "ds"]):
        moved = frame[(frame["unique_id"] == node) & (frame["ds"] == day)]["M"].item()
        assert group["base"].iloc[0] + group["pull"].sum() == pytest.approx(moved)


CROSSED = ["A", "A/n", "A/s", "A/u", "A/v", "A/n/u", "A/n/v", "A/s/u", "A/s/v"]
EMPTY = ["A//", "A/n/", "A/s/", "A//u", "A//v", "A/n/u", "A/n/v", "A/s/u", "A/s/v"]


@pytest.mark.parametrize("ids", [CROSSED, EMPTY, [f"{name}/" for name in EMPTY]], ids=["short", "empty", "trailing"])
def test_crossed_ids(ids, run):
    rows = split(ids, 0)
    assert rows == split(EMPTY, 0)
    matrix, nodes, only_bottoms = tree(rows)
    assert not only_bottoms
    expected = {("A", "", "u"): ["n/u", "s/u"], ("A", "n", ""): ["n/u", "n/v"]}
    bottoms = ["/".join(node[1:]) for node in nodes[-4:]]
    for node, members in expected.items():
        found = [bottoms[i] for i in matrix[[nodes.index(node)]].toarray()[0].nonzero()[0]]
        assert found == members
    frame = pd.DataFrame({"unique_id": ids, "ds": "2024-01-01", "M": np.random.default_rng(0).uniform(1, 2, 9)})
    out, _ = run(frame)
    values = dict(zip(EMPTY, out["M"]))
    assert values["A//u"] == pytest.approx(values["A/n/u"] + values["A/s/u"])
    assert values["A//"] == pytest.approx(values["A//u"] + values["A//v"])


def test_nixtlas_own_crossed_ids(run):
    aggregate = pytest.importorskip("hierarchicalforecast.utils").aggregate
    cells = [(s, p) for s in ("NSW", "VIC") for p in ("Business", "Holiday")]
    bottom = pd.DataFrame([("Australia", *cell, pd.Timestamp("2024-01-01"), 1.0 + i) for i, cell in enumerate(cells)])
    bottom.columns = ["Country", "State", "Purpose", "ds", "y"]
    spec = [["Country"], ["Country", "State"], ["Country", "Purpose"], ["Country", "State", "Purpose"]]
    frame, summing, _ = aggregate(bottom, spec)
    noisy = frame.assign(M=frame["y"] + np.random.default_rng(0).normal(0, 0.1, len(frame))).drop(columns="y")
    out, _ = run(noisy)
    names = list(summing["unique_id"])
    values = out.set_index("unique_id")["M"][names].to_numpy()
    matrix = summing.drop(columns="unique_id").to_numpy()
    np.testing.assert_allclose(values, matrix @ values[-4:], rtol=1e-12)


def test_ids_that_can_be_read_in_two_ways_are_refused():
    with pytest.raises(ph.ParameterError, match="'u' can be read as /u/ or as //u"):
        split(["u", "A/u/x", "A/x/u"], 0)
