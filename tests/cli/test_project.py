"""``probhard project``: fields against dense algebra, masks, bands, draws, and a certificate that is recomputed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

import probhard as ph
from probhard.cli import _projection, main

RANDOM = np.random.default_rng(1)
Run = Any  # runs the command on arrays and a YAML text: status, output arrays, certificate


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def command(arrays: dict[str, Any], text: str, *options: str) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
        source, output = tmp_path / "fields.npz", tmp_path / "out.npz"
        np.savez(source, **arrays)
        (tmp_path / "c.yaml").write_text(text)
        arguments = [str(source), "--constraints", str(tmp_path / "c.yaml"), "--output", str(output), *options]
        status = main(["project", *arguments])
        if status == 2:
            return status, {}, {}
        assert not [path for path in tmp_path.iterdir() if "partial" in path.name or ".probhard" in path.name]
        with np.load(output) as arrays:
            return status, dict(arrays), json.loads(output.with_suffix(".json").read_text())

    return command


def affine(z: np.ndarray, variance: np.ndarray, rows: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The oblique projection of z (..., n) on ``rows u = b``, by dense algebra, and its matrix."""
    sigma = np.diag(variance)
    gain = sigma @ rows.T @ np.linalg.inv(rows @ sigma @ rows.T)
    return z + (b - z @ rows.T) @ gain.T, np.eye(len(variance)) - gain @ rows


def mass_and_sign(z: np.ndarray, variance: np.ndarray, weights: np.ndarray, mass: float) -> np.ndarray:
    """The nearest non-negative point with a mass: one multiplier, by a root finder."""

    def point(multiplier: float) -> np.ndarray:
        return np.maximum(0.0, z + multiplier * variance * weights)

    far = 1e4
    return point(scipy.optimize.brentq(lambda x: weights @ point(x) - mass, -far, far, xtol=1e-14, rtol=1e-15))


def test_profiles_against_dense_algebra(run: Run) -> None:
    x = np.sort(RANDOM.uniform(size=9))
    weights = np.gradient(x)
    weights[1:-1] = (x[2:] - x[:-2]) / 2
    weights[[0, -1]] = np.diff(x)[[0, -1]] / 2
    mean, stddev, mass = RANDOM.normal(size=(3, 9)), RANDOM.uniform(0.1, 1, size=(3, 9)), np.array([1.0, -0.5, 2])
    arrays = {"mean": mean, "variance": stddev**2, "x": x, "mass": mass, "note": np.arange(4.0)}
    status, out, certificate = run(arrays, "constraints:\n - conservation: {mass: mass}", "--draws", "400")
    assert status == 0
    for i in range(3):
        value, matrix = affine(mean[i], stddev[i] ** 2, weights[None], mass[i : i + 1])
        spread = np.sqrt(np.diag(matrix @ np.diag(stddev[i] ** 2) @ matrix.T))
        np.testing.assert_allclose(out["mean"][i], value, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(out["stddev"][i], spread, rtol=1e-11)
        half = scipy.stats.norm.ppf(0.95) * spread
        np.testing.assert_allclose(out["lower"][i], value - half, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(out["upper"][i], value + half, rtol=1e-11, atol=1e-11)
        error = out["draws"][:, i].mean(0) - value
        assert np.abs(error / spread).max() < 5 / np.sqrt(400)
        np.testing.assert_allclose(out["draws"][:, i].std(0), spread, rtol=0.2)
    np.testing.assert_allclose(out["draws"] @ weights, np.broadcast_to(mass, (400, 3)), rtol=1e-12)
    np.testing.assert_allclose(out["variance"], out["stddev"] ** 2)
    np.testing.assert_array_equal(out["note"], arrays["note"])
    assert float(out["level"]) == 0.9
    assert certificate["algorithm"] == "disjoint rows (1), elementwise"


def test_draws_of_planes_in_time(run: Run) -> None:
    x, y, weight = np.linspace(0, 1, 4), np.linspace(0, 2, 3), np.outer([0.5, 1, 1, 0.5], [0.5, 1, 0.5]) / 3
    draws = RANDOM.normal(0.5, 1.0, size=(6, 2, 5, 4, 3))  # (S, batch, time, x, y)
    mass = RANDOM.uniform(0.5, 2, size=(2, 5))
    arrays = {"draws": draws, "x": x, "y": y, "time": np.arange(5.0), "m": mass}
    text = "constraints:\n - conservation: {mass: m}\n - nonnegative\nper: time"
    status, out, certificate = run(arrays, text)
    assert status == 0
    for s, i, t in np.ndindex(6, 2, 5):
        variance = draws[:, i, t].reshape(6, -1).var(0, ddof=1)
        nearest = mass_and_sign(draws[s, i, t].ravel(), variance, weight.ravel(), mass[i, t])
        np.testing.assert_allclose(out["draws"][s, i, t].ravel(), nearest, rtol=1e-9, atol=1e-10)
    assert out["draws"].min() == 0
    np.testing.assert_allclose(out["mean"], out["draws"].mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(out["stddev"], out["draws"].std(0, ddof=1), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(out["lower"], np.quantile(out["draws"], 0.05, axis=0), rtol=1e-12, atol=1e-12)
    assert (certificate["fields"], certificate["cells"], certificate["checked"]) == (10, 12, 70)
    samples = torch.tensor(draws).flatten(-2)
    constraint = ph.Conservation(torch.tensor(weight.ravel()), torch.tensor(mass)) & ph.NonNegative()
    expected = ph.DPPL().project_samples(samples, constraint).value
    np.testing.assert_allclose(out["draws"].reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


def test_a_volume_with_cell_volumes_and_a_mask(run: Run) -> None:
    shape = (4, 3, 5)
    mask = RANDOM.uniform(size=shape) < 0.6
    mean, volumes = RANDOM.normal(size=(2, *shape)), RANDOM.uniform(1, 2, size=shape)
    mean[:, ~mask], volumes[~mask] = np.nan, np.nan
    known = np.zeros(shape, dtype=bool)
    known[tuple(np.argwhere(mask)[3])] = known[tuple(np.argwhere(mask)[7])] = True
    arrays = {"mean": mean, "cell_volumes": volumes, "mask": mask, "m": np.array([3.0, 4]), "known": known}
    arrays |= {"value": np.full((2, *shape), 7.0), "stddev": np.where(mask, 0.5, np.nan)}
    text = "constraints:\n - conservation: {mass: m}\n - fixed: {mask: known, values: value}"
    status, out, _ = run(arrays, text, "--grid-dims", "3", "--metric", "orthogonal", "--draws", "5")
    assert status == 0
    rows = np.vstack([volumes[mask], np.eye(mask.sum())[known[mask]]])
    for i, m in enumerate((3.0, 4.0)):
        value, matrix = affine(mean[i][mask], np.ones(mask.sum()), rows, np.array([m, 7.0, 7.0]))
        np.testing.assert_allclose(out["mean"][i][mask], value, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(out["stddev"][i][mask], 0.5 * np.sqrt(np.diag(matrix @ matrix.T)), atol=1e-12)
        np.testing.assert_allclose(out["draws"][:, i][:, mask] @ volumes[mask], m, rtol=1e-12)
        assert (out["draws"][:, i][:, known] == 7).all()
    assert np.isnan(out["mean"][:, ~mask]).all()


def test_cells_outside_keep_what_they_had(run: Run) -> None:
    mask = np.array([1, 1, 0, 1, 1])
    draws = RANDOM.normal(size=(4, 2, 5))
    status, out, _ = run({"draws": draws, "mask": mask}, "constraints: [nonnegative]", "--grid-dims", "1")
    assert status == 0
    np.testing.assert_array_equal(out["draws"][..., 2], draws[..., 2])
    np.testing.assert_allclose(out["mean"][..., 2], draws[..., 2].mean(0))
    np.testing.assert_array_equal(out["draws"][..., mask == 1], np.maximum(draws, 0)[..., mask == 1])
    mean = draws[0]
    _, out, _ = run({"mean": mean, "stddev": 0.1, "mask": mask}, "constraints: [nonnegative]", "--grid-dims", "1")
    np.testing.assert_array_equal(out["draws"][..., 2], np.broadcast_to(mean[:, 2], (100, 2)))
    np.testing.assert_array_equal(out["stddev"][..., 2], [0.1, 0.1])


def test_bands_become_normal_laws(run: Run) -> None:
    mean, stddev = RANDOM.normal(size=8), RANDOM.uniform(0.5, 1, size=8)
    half = scipy.stats.norm.ppf(0.9) * stddev
    band = {"lower": mean - half, "upper": mean + half, "level": 0.8}
    status, out, _ = run(band, "constraints:\n - linear_equality: {matrix: A, value: 2}", "--seed", "3")
    assert status == 2  # there is no array A
    row = RANDOM.normal(size=(1, 8))
    status, out, _ = run({**band, "A": row}, "constraints:\n - linear_equality: {matrix: A, value: 2}")
    assert status == 0
    value, matrix = affine(mean, stddev**2, row, np.array([2.0]))
    spread = np.sqrt(np.diag(matrix @ np.diag(stddev**2) @ matrix.T))
    np.testing.assert_allclose(out["mean"], value, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(out["upper"], value + scipy.stats.norm.ppf(0.9) * spread, rtol=1e-11)
    assert float(out["level"]) == 0.8
    status, out, _ = run(band, "constraints: [nonnegative]")
    assert status == 0
    np.testing.assert_allclose(out["lower"], np.maximum(band["lower"], 0), rtol=1e-12, atol=1e-12)
    assert out["draws"].min() == 0


def test_means_alone(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    mean = RANDOM.normal(size=(3, 6))
    text = "constraints:\n - monotone: {direction: decreasing}\naxes: [x]"
    status, out, certificate = run({"mean": mean}, text)
    assert (status, set(out), certificate["metric"]) == (0, {"mean"}, "orthogonal")
    for before, after in zip(mean, out["mean"]):
        nearest = scipy.optimize.isotonic_regression(before, increasing=False).x
        np.testing.assert_allclose(after, nearest, rtol=1e-12, atol=1e-12)
    assert run({"mean": mean}, text, "--metric", "oblique")[0] == 2
    assert "without variances" in capsys.readouterr().err


def test_the_certificate_is_true(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draws = RANDOM.normal(1, 1, size=(7, 4, 6))
    arrays = {"draws": draws, "x": np.arange(6.0), "m": np.array([4.0, 5, 6, 7])}
    text = "constraints:\n - conservation: {mass: m, weights: 1}\n - box: {lower: 0, upper: 3}"
    status, out, certificate = run(arrays, text, "--seed", "5")
    assert status == 0

    def check(points: np.ndarray, extent: dict[str, Any]) -> None:
        everything = np.concatenate([points, points.mean(0, keepdims=True)])
        gap = np.abs(everything.sum(-1) - arrays["m"])
        over = np.maximum(np.maximum(-everything, everything - 3).max(-1), 0)
        assert extent["violation"] == pytest.approx(max(gap.max(), over.max()), rel=1e-12, abs=1e-14)
        size = np.abs(everything).sum(-1) + arrays["m"]
        limit = np.maximum(-everything / np.abs(everything), (everything - 3) / (np.abs(everything) + 3)).max(-1)
        assert extent["relative"] == pytest.approx(max((gap / size).max(), limit.max()), rel=1e-9, abs=1e-14)
        assert (extent["smallest"], extent["largest"]) == (everything.min(), everything.max())
        assert extent["points"] == 32

    check(draws, certificate["before"])
    after = certificate["after"]
    assert after["violation"] == pytest.approx(np.abs(out["draws"].sum(-1) - arrays["m"]).max(), abs=2e-14)
    assert max(after["violation"], after["relative"]) < 1e-13
    assert (after["smallest"], after["largest"], after["points"]) == (0.0, out["draws"].max(), 32)
    assert certificate["input_sha256"] == hashlib.sha256((tmp_path / "fields.npz").read_bytes()).hexdigest()
    assert certificate["constraints"] == text
    assert (certificate["seed"], certificate["metric"], certificate["draws"]) == (5, "oblique", 7)
    assert (certificate["feasible"], certificate["infeasible"], certificate["flagged"]) == (True, 0, [])
    assert certificate["versions"]["torch"] == str(torch.__version__)
    printed = capsys.readouterr().out
    assert "32 means and draws checked, all feasible." in printed
    assert f"{certificate['before']['violation']:.6g}" in printed


def test_empty_sets_are_flagged_and_nothing_else_is_lost(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    mean = RANDOM.uniform(size=(2, 3, 5))
    mass = np.full((2, 3), 0.5)
    arrays = {"mean": mean, "stddev": 0.1, "x": np.linspace(0, 1, 5), "m": mass}
    text = "constraints:\n - conservation: {mass: m}\n - box: {lower: 0, upper: 1}\nper: time\naxes: [time, x]"
    status, good, _ = run(arrays, text)
    assert status == 0
    mass[1, 2] = 1.5  # more than the box holds
    status, out, certificate = run(arrays, text)
    assert status == 3
    for name in ("mean", "stddev", "lower", "upper"):
        assert np.isnan(out[name][1, 2]).all()
        kept = ~np.isnan(out[name])
        assert kept.sum() == 25
        if name in ("mean", "stddev"):
            np.testing.assert_allclose(out[name][kept], good[name][kept], rtol=1e-12, atol=1e-12)
    assert np.isnan(out["draws"]).sum() == 100 * 5
    (flag,) = certificate["flagged"]
    assert (flag["field"], flag["mean"], flag["draws"]) == ([1, 2], True, list(range(100)))
    assert "asks for 1.5" in flag["reason"]
    assert (certificate["feasible"], certificate["infeasible"], certificate["checked"]) == (False, 101, 606)
    assert certificate["field_axes"] == ["batch", "time"]
    assert "101 NOT feasible" in capsys.readouterr().out


def test_draws_that_fail_are_flagged(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = ph.DPPL.project

    def project(self: ph.DPPL, z: torch.Tensor, *args: Any) -> ph.Solution:
        solution = genuine(self, z, *args)
        converged = solution.stats.converged.clone()
        if z.dim() == 3:  # draws
            converged[2, 1] = False
        return replace(solution, stats=replace(solution.stats, converged=converged))

    monkeypatch.setattr(ph.DPPL, "project", project)
    draws = RANDOM.normal(size=(5, 3, 4))
    status, out, certificate = run({"draws": draws}, "constraints: [nonnegative]", "--grid-dims", "1")
    assert status == 3
    clipped = np.maximum(draws, 0)
    assert np.isnan(out["draws"][2, 1]).all()
    assert np.isnan(out["draws"]).sum() == 4
    np.testing.assert_allclose(out["mean"][1], clipped[[0, 1, 3, 4], 1].mean(0), rtol=1e-12)
    np.testing.assert_allclose(out["mean"][2], clipped[:, 2].mean(0), rtol=1e-12)
    (flag,) = certificate["flagged"]
    assert (flag["field"], flag["mean"], flag["draws"], certificate["infeasible"]) == ([1], False, [2], 1)


def test_pieces_give_what_the_whole_gives(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = RANDOM.normal(size=(9, 3, 5))
    arrays = {
        "draws": draws,
        "x": np.arange(5.0),
        "m": RANDOM.uniform(size=3),
        "top": RANDOM.uniform(1, 2, size=(3, 5)),
    }
    text = "constraints:\n - conservation: {mass: m}\n - nonnegative\n - box: {upper: top}"
    _, whole, first = run(arrays, text)
    monkeypatch.setattr(_projection, "BUDGET", 20)  # one field, four draws at a time
    status, pieces, second = run(arrays, text)
    assert status == 0
    for name, array in whole.items():
        np.testing.assert_allclose(pieces[name], array, rtol=1e-12, atol=1e-12)
    assert first["before"] == second["before"]
    law = {"mean": draws[0], "stddev": 0.5, **{name: arrays[name] for name in ("x", "m", "top")}}
    _, pieces, _ = run(law, text)
    monkeypatch.undo()
    _, whole, _ = run(law, text)
    np.testing.assert_allclose(pieces["mean"], whole["mean"], rtol=1e-12, atol=1e-12)
    assert np.abs(pieces["draws"] - whole["draws"]).max() > 0.1  # other draws, of the same law


def test_seeds(run: Run) -> None:
    arrays = {"mean": np.ones(4), "stddev": 1.0}
    first, same, other = (run(arrays, "constraints: [nonnegative]", "--seed", seed)[1] for seed in ("1", "1", "2"))
    np.testing.assert_array_equal(first["draws"], same["draws"])
    assert (first["draws"] != other["draws"]).any()


def test_a_set_that_is_not_convex_has_a_feasible_mean(run: Run) -> None:
    mean = np.cumsum(RANDOM.normal(size=(2, 4, 6)), 1)  # the variation grows in time
    arrays = {"mean": mean, "stddev": 0.5, "x": np.arange(6.0), "time": np.arange(4.0)}
    status, out, certificate = run(arrays, "constraints: [total_variation_diminishing]", "--draws", "20")
    assert status == 0
    for points in (out["mean"], out["draws"]):
        variation = np.abs(np.diff(points, axis=-1)).sum(-1)
        assert np.diff(variation, axis=-1).max() <= 1e-9
    assert certificate["before"]["violation"] > 0.1


@pytest.mark.parametrize("shape", [(9,), (4, 5, 6)])
def test_a_picture_is_drawn(run: Run, tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "picture.png"
    arrays = {"mean": RANDOM.normal(size=(2, *shape)), "stddev": 0.3, "mask": np.arange(shape[-1]) > 1}
    options = ("--grid-dims", str(len(shape)), "--draws", "4", "--figure", str(path))
    assert run(arrays, "constraints: [nonnegative]", *options)[0] == 0
    image = matplotlib.image.imread(path)
    assert min(image.shape[:2]) > 300
    assert len({tuple(color) for color in image[..., :3].reshape(-1, 3).round(2)}) > 50


def test_other_formats_and_default_names(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    mean = RANDOM.normal(size=(2, 5))
    with h5py.File(tmp_path / "fields.h5", "w") as file:
        file["mean"] = mean
    (tmp_path / "c.yaml").write_text("constraints: [nonnegative]\naxes: [x]")
    assert main(["project", str(tmp_path / "fields.h5"), "--constraints", str(tmp_path / "c.yaml")]) == 0
    with np.load(tmp_path / "fields-projected.npz") as arrays:
        np.testing.assert_array_equal(arrays["mean"], np.maximum(mean, 0))
    assert json.loads((tmp_path / "fields-projected.json").read_text())["feasible"]


@pytest.mark.parametrize(
    ("arrays", "text", "options", "words"),
    [
        ({"average": [1.0]}, "constraints: [nonnegative]", (), "The file has the arrays average."),
        ({"mean": [1.0, np.nan]}, "constraints: [nonnegative]", (), "NaN or infinite in 1 of 2 cells"),
        ({"mean": [1.0, 2], "stddev": -1.0}, "constraints: [nonnegative]", (), "negative in 2 of 2 cells"),
        ({"mean": [1.0, 2], "variance": -1.0}, "constraints: [nonnegative]", (), "negative in 2 of 2 cells"),
        ({"lower": [1.0, 2], "upper": [2.0, 3]}, "constraints: [nonnegative]", (), "The level of the band is []"),
        ({"lower": [3.0], "upper": [2.0], "level": 0.9}, "constraints: [nonnegative]", (), "above 'upper' in 1 of 1"),
        ({"draws": [1.0, 2]}, "constraints: [nonnegative]", (), "The draws have shape (2,)."),
        ({"mean": [[1.0, 2]]}, "constraints: [nonnegative]", (), "Pass --grid-dims"),
        ({"mean": [1.0, 2]}, "constraints: [nonegative]", (), "Did you mean 'nonnegative'?"),
        ({"mean": [1.0, 2]}, "constraints: [nonnegative", (), "cannot be read"),
        ({"mean": [1.0, 2], "stddev": 1.0}, "constraints: [nonnegative]", ("--metric", "sideways"), "'sideways'"),
        ({"mean": [1.0, 2]}, "constraints: [nonnegative]", ("--output", "none/out.npz"), "cannot be written"),
        ({"mean": [1.0, 2]}, "constraints: [nonnegative]", ("--figure", "out.txt"), "--figure out.txt cannot"),
        ({"mean": [1.0, 2]}, "constraints: [nonnegative]", ("--draws", "1"), "--draws"),
    ],
)
def test_bad_requests_are_explained(
    run: Run, capsys: pytest.CaptureFixture[str], arrays: Any, text: str, options: tuple[str, ...], words: str
) -> None:
    assert run(arrays, text, *options)[0] == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
