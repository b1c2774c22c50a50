"""``probhard reconcile``: means, intervals, quantiles and sample paths against dense algebra, and its certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from cli.reconcile_runs import MEAN, NODES, RANDOM, ROWS, SPREAD, STAMPS, Run, S, cube, long, normal, runner
from probhard.cli import _frames as frames

pd = pytest.importorskip("pandas")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return runner(tmp_path)


def spoilt(frame: Any, column: str, text: str) -> Any:
    values = frame[column].astype(object).to_list()
    return frame.assign(**{column: [*values[:4], text, *values[5:]]})


def affine(z: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest coherent points to z (..., n) and the matrix, by dense algebra."""
    gain = np.diag(weight) @ ROWS.T @ np.linalg.inv(ROWS @ np.diag(weight) @ ROWS.T)
    matrix = np.eye(7) - gain @ ROWS
    return z @ matrix.T, matrix


def gap(points: np.ndarray) -> float:
    return float(np.abs(points @ ROWS.T).max())


@pytest.mark.parametrize("metric", ["oblique", "orthogonal", "structural"])
def test_intervals_against_dense_algebra(run: Run, metric: str) -> None:
    options = ("--keys", "state,region", "--metric", metric, "--covariance", "independent", "--level", "95,50")
    status, out, certificate = run(long(normal()), *options)
    assert status == 0
    columns = ["state", "region", "ds", "ETS", *(f"ETS-{side}-{p}" for p in (80, 95, 50) for side in ("lo", "hi"))]
    assert list(out.columns) == columns
    for step in range(3):
        weight = {"oblique": SPREAD[step] ** 2, "orthogonal": np.ones(7), "structural": S.sum(1)}[metric]
        mean, matrix = affine(MEAN[step], weight)
        spread = np.sqrt(np.diag(matrix @ np.diag(SPREAD[step] ** 2) @ matrix.T))
        np.testing.assert_allclose(cube(out, "ETS")[0, step], mean, rtol=1e-11, atol=1e-12)
        for level in (50, 80, 95):
            for side, sign in (("lo", -1), ("hi", 1)):
                expected = mean + sign * scipy.stats.norm.ppf(0.5 + level / 200) * spread
                np.testing.assert_allclose(cube(out, f"ETS-{side}-{level}")[0, step], expected, rtol=1e-9, atol=1e-9)
    record = certificate["models"]["ETS"]
    assert (record["metric"], record["draws"], record["quantiles_in_closed_form"]) == (metric, 1000, True)
    assert certificate["checked"] == 3 * 1001
    assert record["incoherence"]["before"]["largest"] >= np.linalg.norm(MEAN @ ROWS.T, axis=-1).max()
    assert record["incoherence"]["after"]["largest"] < 1e-13
    assert certificate["after"]["smallest"] <= cube(out, "ETS-lo-95").min()


def test_bounds_hold_for_means_quantiles_and_draws(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cap, plan = np.full((3, 7), np.nan), np.full((3, 7), np.nan)
    cap[:, 3], plan[1, 1], plan[2, [2, 5, 6]] = 1.25, 3.0, [2.0, 0.5, 1.5]  # one of the last three says it twice
    frame = long({**normal(), "cap": cap, "plan": plan})
    options = ("--keys", "state,region", "--nonnegative", "--upper", "cap", "--fixed", "plan", "--draws", "1000")
    status, out, certificate = run(frame, *options)
    assert status == 0
    draws = cube(frames.read(tmp_path / "out-draws.csv", ["state", "region"]), "ETS")
    assert draws.shape == (1000, 3, 7)
    assert gap(draws) < 1e-13
    assert gap(cube(out, "ETS")) < 1e-13
    every = np.concatenate([draws, *(cube(out, name) for name in ("ETS", "ETS-lo-80", "ETS-hi-80"))])
    assert every.min() == 0
    assert every[..., 3].max() == 1.25
    assert (every[:, 1, 1] == 3).all()
    np.testing.assert_allclose(every[:, 2, [2, 5, 6]], np.broadcast_to([2, 0.5, 1.5], (1003, 3)), rtol=1e-14)
    np.testing.assert_allclose(cube(out, "ETS-lo-80")[0], np.quantile(draws, 0.1, axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(cube(out, "ETS-hi-80")[0], np.quantile(draws, 0.9, axis=0), rtol=1e-12, atol=1e-12)
    assert certificate["after"]["smallest"] == 0
    assert certificate["before"]["smallest"] < 0
    assert certificate["feasible"] is True
    text = capsys.readouterr().out
    assert "3003 means and draws checked, all feasible." in text
    assert "ETS: largest incoherence" in text


def test_nonnegative_means_against_cvxpy(run: Run) -> None:
    cvxpy = pytest.importorskip("cvxpy")
    mean = MEAN - 2.0
    status, out, certificate = run(long({"M": mean}), "--keys", "state,region", "--nonnegative")
    assert status == 0
    assert certificate["models"]["M"]["metric"] == "structural"
    for step in range(3):
        bottom = cvxpy.Variable(4, nonneg=True)
        cost = cvxpy.sum_squares((S @ bottom - mean[step]) / np.sqrt(S.sum(1)))
        cvxpy.Problem(cvxpy.Minimize(cost)).solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13)
        np.testing.assert_allclose(cube(out, "M")[0, step], S @ bottom.value, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "Total/"])
def test_ids_instead_of_keys_and_several_models(run: Run, prefix: str) -> None:
    frame = long({**normal("A"), "B": MEAN + 1, "y": MEAN}).assign(note="NA")
    _, keyed, _ = run(frame, "--keys", "state,region", "--models", "A")
    np.testing.assert_array_equal(keyed["B"], frame["B"])  # not asked for
    pairs = zip(frame["state"], frame["region"])
    ids = ["/".join(filter(None, (prefix.strip("/"), *pair))) or "Total" for pair in pairs]
    named = frame.drop(columns=["state", "region"]).assign(unique_id=ids)
    for options in ((), ("--keys", "state,region")):
        status, out, certificate = run(named, *options)
        assert status == 0
        out = out.assign(state=frame["state"].to_numpy(), region=frame["region"].to_numpy())
        for name in ("A", "A-lo-80", "A-hi-80"):
            np.testing.assert_allclose(cube(out, name), cube(keyed, name), rtol=1e-12)
        np.testing.assert_allclose(cube(out, "B")[0], affine(MEAN + 1, S.sum(1))[0], rtol=1e-12)
        np.testing.assert_array_equal(cube(out, "y")[0], MEAN)
        assert list(certificate["models"]) == ["A", "B"]
        assert set(out["note"]) == {"NA"}


@pytest.mark.parametrize("polars", [False, True])
def test_sample_paths_and_parquet(run: Run, monkeypatch: pytest.MonkeyPatch, polars: bool) -> None:
    if polars:
        monkeypatch.setattr(frames, "_polars", lambda: pytest.importorskip("polars"))
    else:
        pytest.importorskip("pyarrow")
    paths = MEAN + SPREAD * RANDOM.normal(size=(30, 3, 7)) @ RANDOM.normal(size=(7, 7))
    frame = pd.concat([long({"net": path}).assign(sample=i) for i, path in enumerate(paths)])
    options = ("--keys", "state,region", "--level", "80", "--metric", "oblique")
    status, out, certificate = run(frame, *options, suffix=".parquet")
    assert status == 0
    assert list(out.columns) == [*frame.columns, "net-lo-80", "net-hi-80"]
    draws = cube(out, "net")
    for step in range(3):
        expected = affine(paths[:, step], paths[:, step].var(0, ddof=1))[0]
        np.testing.assert_allclose(draws[:, step], expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(cube(out, "net-lo-80"), np.broadcast_to(np.quantile(draws, 0.1, 0), draws.shape))
    assert certificate["models"]["net"]["draws"] == 30
    _, out, certificate = run(frame, *options, "--nonnegative", suffix=".parquet")
    assert cube(out, "net").min() == 0
    assert cube(out, "net-lo-80").min() == 0
    assert gap(cube(out, "net")) < 1e-12


def test_bottom_rows_alone_get_their_aggregates(run: Run) -> None:
    quantiles = {0.1: MEAN - SPREAD, 0.5: MEAN, 0.9: MEAN + 3 * SPREAD, 0.98: MEAN + 6 * SPREAD}  # skewed
    frame = long({f"q{p}": values for p, values in quantiles.items()}, slice(3, None))
    status, out, certificate = run(frame, "--keys", "state,region", "--draws", "4000")
    assert status == 0
    assert len(out) == 21
    for p, values in quantiles.items():
        error = (cube(out, f"q{p}")[0, :, 3:] - values[:, 3:]) / SPREAD[:, 3:]
        assert np.abs(error).max() < (0.5 if p > 0.85 else 0.12)
    assert certificate["models"]["mean"]["incoherence"]["before"]["largest"] < 1e-12
    status, out, _ = run(long({"M": MEAN}, slice(3, None)), "--keys", "state,region")
    np.testing.assert_allclose(cube(out, "M")[0], MEAN[:, 3:] @ S.T, rtol=1e-14)


def test_a_summing_matrix(run: Run, tmp_path: Path) -> None:
    names = ["whole", "left", "right", "a", "b", "c", "d"]
    matrix = pd.DataFrame(S, columns=names[3:]).assign(unique_id=names).sample(frac=1, random_state=0)
    matrix.to_csv(tmp_path / "S.csv", index=False)
    frame = long(normal())
    named = frame.assign(unique_id=[names[NODES.index(pair)] for pair in zip(frame["state"], frame["region"])])
    status, out, certificate = run(named, "--summing", str(tmp_path / "S.csv"), "--metric", "oblique")
    assert status == 0
    expected = [affine(MEAN[step], SPREAD[step] ** 2)[0] for step in range(3)]
    np.testing.assert_allclose(cube(out, "ETS")[0], expected, rtol=1e-11)
    assert (certificate["nodes"], certificate["bottom_nodes"], certificate["steps"]) == (7, 4, 3)
    bottoms = named[named["region"] != ""]
    _, out, _ = run(bottoms, "--summing", str(tmp_path / "S.csv"))
    total = out[(out["unique_id"] == "whole") & (out["ds"] == STAMPS[1])]["ETS"].item()
    np.testing.assert_allclose(total, MEAN[1, 3:].sum(), rtol=1e-14)


def test_crossed_keys(run: Run) -> None:
    grid = [(a, b) for a in ("", "x", "y") for b in ("", "u", "v", "w")]
    values = RANDOM.uniform(1, 2, (12,))
    frame = pd.DataFrame(grid, columns=["k1", "k2"]).assign(ds=7, M=values)
    status, out, _ = run(frame, "--keys", "k1,k2", "--metric", "orthogonal")
    assert status == 0
    table = out["M"].to_numpy().reshape(3, 4)
    np.testing.assert_allclose(table[0], table[1:].sum(0), rtol=1e-13)
    np.testing.assert_allclose(table[:, 0], table[:, 1:].sum(1), rtol=1e-13)
    cells = [pair for pair in grid if all(pair)]
    design = np.array([[all(k in ("", c) for k, c in zip(node, cell)) for cell in cells] for node in grid], float)
    best = design @ np.linalg.lstsq(design, values, rcond=None)[0]
    np.testing.assert_allclose(table.ravel(), best, rtol=1e-12)


def test_bottom_rows_of_crossed_keys_get_all_levels(run: Run) -> None:
    cells = [(a, b) for a in ("x", "y") for b in ("u", "v", "w")]
    frame = pd.DataFrame(cells, columns=["k1", "k2"]).assign(ds=7, M=np.arange(6.0))
    status, out, certificate = run(frame, "--keys", "k1 * k2")
    assert status == 0
    assert certificate["nodes"] == 6 + 2 + 3 + 1
    sums = {(row.k1, row.k2): row.M for row in out.fillna("").itertuples()}
    assert sums["", ""] == 15
    assert (sums["x", ""], sums["", "v"]) == (3, 1 + 4)
    assert run(frame, "--keys", "k1,k2")[2]["nodes"] == 6 + 2 + 1


def test_what_cannot_be_reached_is_flagged(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    plan = np.full((3, 7), np.nan)
    plan[1, [1, 3, 4]] = [5.0, 1.0, 1.0]  # does not add up
    status, out, certificate = run(long({**normal(), "plan": plan}), "--keys", "state,region", "--fixed", "plan")
    assert status == 3
    assert np.isnan(cube(out, "ETS")[0, 1]).all()
    assert np.isnan(cube(out, "ETS-lo-80")[0, 1]).all()
    assert np.isfinite(cube(out, "ETS")[0, [0, 2]]).all()
    assert (certificate["infeasible"], certificate["checked"]) == (1001, 3003)
    assert [flag["field"] for flag in certificate["flagged"]] == ["ETS at 2025-02-01"]
    assert "1001 NOT feasible" in capsys.readouterr().out


def test_one_impossible_stamp_among_others(run: Run) -> None:
    cap, plan = np.full((3, 7), np.nan), np.full((3, 7), np.nan)
    plan[:, 0], cap[2, 3:] = 5.0, 1.0  # the same nodes are fixed everywhere, but the last caps leave no room
    frame = long({**normal(), "cap": cap, "plan": plan})
    status, out, certificate = run(frame, "--keys", "state,region", "--fixed", "plan", "--upper", "cap")
    assert status == 3
    assert np.isfinite(cube(out, "ETS")).all(-1).tolist() == [[True, True, False]]
    np.testing.assert_allclose(cube(out, "ETS-hi-80")[0, :2, 0], 5.0, rtol=1e-14)
    assert [flag["field"] for flag in certificate["flagged"]] == ["ETS at 2025-03-01"]


def test_certain_series_do_not_stop_the_others(run: Run) -> None:
    spread = SPREAD.copy()
    spread[:, [1, 3, 4]] = 0.0  # a state and its regions, known to be incoherent
    frame = long(normal(spread=spread))
    status, out, _ = run(frame, "--keys", "state,region")
    assert status == 0
    assert gap(cube(out, "ETS")) < 1e-12
    assert gap(MEAN) > 0.1


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda f: f[(f.ds != STAMPS[1]) | (f.region != "East")], (), "no row for 'VIC/East' at 2025-02-01"),
        (lambda f: f[f.state != "VIC"].assign(ds="x")[1:], (), "at x"),
        (lambda f: pd.concat([f, f[:1]]), (), "2 rows for"),
        (lambda f: f[(f.state != "VIC") | (f.region == "")], (), "'VIC/' has no bottom node"),
        (lambda f: f.assign(ETS=f.ETS.where(f.state != "NSW")), (), "'ETS' is nan in row"),
        (lambda f: f[["state", "region", "ds", "ETS"]], ("--level", "80"), "means alone"),
        (lambda f: f[["state", "region", "ds", "ETS"]], ("--metric", "oblique"), "without spreads"),
        (lambda f: f.drop(columns="region"), (), "no column 'region'"),
        (lambda f: f.drop(columns=["region", "state"]), (), "no column 'state'"),
        (lambda f: f.drop(columns=["region", "state"]).assign(unique_id="a"), (), "ids have up to 1 parts"),
        (lambda f: f, ("--models", "TFT"), "no model 'TFT'"),
        (lambda f: f, ("--upper", "capacity"), "'capacity' is not a number"),
        (lambda f: f, ("--upper", "nan"), "'nan' is not a number"),
        (lambda f: f, ("--fixed", "plan"), "no column 'plan'"),
        (lambda f: f, ("--level", "101"), "level 101"),
        (lambda f: f[["state", "region", "ds"]], (), "no column of numbers"),
        (lambda f: f[["state", "region", "ds"]].assign(y=1.0), (), "'y' is what was seen"),
        (lambda f: f.rename(columns={"ETS-lo-80": "ETS_lower"}), (), "'ETS_lower' is a quantile of an unknown"),
        (lambda f: spoilt(f, "ETS-hi-80", "-"), (), "'ETS-hi-80' has the text '-' in row 5"),
        (lambda f: spoilt(f, "ETS", "1,234"), (), "'ETS' has the text '1,234' in row 5"),
    ],
)
def test_refusals(
    run: Run, capsys: pytest.CaptureFixture[str], change: Any, options: tuple[str, ...], message: str
) -> None:
    assert run(change(long(normal())), "--keys", "state,region", *options)[0] == 2
    assert message in capsys.readouterr().err


def test_differences_count_their_terms(run: Run, tmp_path: Path) -> None:
    """A balance is moved as much as a total of as many series: weights 2, 1, 1."""
    (tmp_path / "S.csv").write_text("unique_id,in,out\nnet,1,-1\nin,1,0\nout,0,1\n")
    frame = pd.DataFrame({"unique_id": ["net", "in", "out"], "ds": 1, "M": [3.0, 10.0, 6.0]})
    status, out, _ = run(frame, "--summing", str(tmp_path / "S.csv"))
    assert status == 0
    np.testing.assert_allclose(out["M"], [3.5, 9.75, 6.25], rtol=1e-12)


def test_ids_without_a_sum_are_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame({"unique_id": ["USA", "NSW", "VIC"], "ds": 1, "M": [100.0, 40.0, 65.0]})
    assert run(frame)[0] == 2
    assert "none is 'Total'" in capsys.readouterr().err
    status, out, certificate = run(frame.replace("USA", "total"))
    assert status == 0
    assert out["M"][0] == pytest.approx(out["M"][1] + out["M"][2])
    assert not certificate["aggregates_made"]
