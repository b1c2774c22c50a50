"""The joint law of ``probhard train``: same means, correlated draws, bands that promise and measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid

from cli.training_folder import CONFIG, Folder, some, waves
from probhard.laws.spectral import Spectral
from probhard.pde.joint import LEAST, block_means, divided
from probhard.pde.samples import Samples
from probhard.pde.surrogate import Settings, Surrogate

MANY = {**CONFIG, "constraints": [{"conservation": {"mass": "amount"}}], "split": [0.3, 0.3, 0.4], "level": 0.8}


@pytest.fixture
def plain_dtype() -> torch.dtype:
    return torch.float32


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A run with the joint law, one without, one with a learned factor."""
    folder = Folder(tmp_path_factory.mktemp("joint"))
    assert folder.train(waves(40), {**MANY, "constraints": CONFIG["constraints"]}) == 0  # with bounds
    for run, options in {"joint": {}, "alone": {"joint": False}, "rank": {"rank": 2, "joint": False}}.items():
        assert folder.train(waves(40), {**MANY, **options}, run) == 0
    return folder


def neighbours(out: dict[str, np.ndarray]) -> float:
    """Correlation of neighbours in draws."""
    z = (out["draws"] - out["mean"]) / out["stddev"]
    return float(np.mean(z[..., 1:] * z[..., :-1]))


def predicted(runs: Folder, run: str, *options: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    new = some(waves(40), np.arange(5), "solutions")
    status, out, certificate = runs.predict(new, "--draws", "200", *options, run=run)
    assert status == 0
    np.testing.assert_allclose(trapezoid(out["draws"], new["x"]) / new["amount"], 1, rtol=1e-12)
    return out, certificate


def test_draws_are_correlated_as_errors_are(runs: Folder) -> None:
    out, certificate = predicted(runs, "joint")
    alone, _ = predicted(runs, "alone")
    assert neighbours(out) > 0.3 > abs(neighbours(alone)) + 0.1
    assert "correlated as past errors (Spectral)" in certificate["joint_law"]
    samples = Samples.solved(waves(40), Settings.read(MANY)[0])
    settings = Settings.read(MANY)[1].resolved(samples.cells.grid)
    model = Surrogate.read(runs.path / "joint" / "model.pt", settings, samples)
    assert model.calibration is not None
    assert isinstance(model.calibration.correlation, Spectral)
    with torch.no_grad():
        forecast = model.forecast(samples.batch(np.arange(5)))
    np.testing.assert_allclose(out["mean"].reshape(15, 8), forecast.mean, atol=1e-12)
    np.testing.assert_allclose(out["stddev"].reshape(15, 8), forecast.stddev, atol=1e-12)
    without = model.calibrated(None).forecast(samples.batch(np.arange(5)))
    torch.testing.assert_close(forecast.mean, without.mean.detach(), rtol=0, atol=1e-12)  # means stay


def test_the_validation_samples_are_divided(runs: Folder) -> None:
    assert runs.metrics("joint")["samples"] == {"training": 12, "validation": 6, "calibration": 6, "test": 16}
    assert runs.metrics("alone")["samples"] == {"training": 12, "validation": 12, "calibration": 0, "test": 16}
    early, held = divided(np.arange(11))
    assert sorted([*early, *held]) == list(range(11))
    assert len(divided(np.arange(2 * LEAST - 1))[1]) == 0


def test_a_learned_factor_reaches_the_draws(runs: Folder) -> None:
    out, certificate = predicted(runs, "rank")
    assert certificate["joint_law"] == "that of the network"
    samples = Samples.solved(waves(40), Settings.read(MANY)[0])
    settings = Settings.read({**MANY, "rank": 2})[1].resolved(samples.cells.grid)
    model = Surrogate.read(runs.path / "rank" / "model.pt", settings, samples)
    with torch.no_grad():
        cov = model.forecast(samples.batch(np.arange(5))).cov
        rows = torch.eye(8, dtype=torch.float64)
        pairs = torch.stack([cov.apply(row.expand(15, -1)) for row in rows], 1).numpy()
    draws = out["draws"].reshape(200, 15, 8) - out["mean"].reshape(15, 8)
    sample = np.einsum("sbi,sbj->bij", draws, draws) / 200
    scale = out["stddev"].reshape(15, 8)
    products = scale[:, None] * scale[..., None]
    np.testing.assert_allclose(sample / products, pairs / products, atol=0.4)
    apart = pairs / products - np.eye(8)
    assert np.corrcoef((sample / products - np.eye(8)).ravel(), apart.ravel())[0, 1] > 0.9


def test_bands_promise_and_measure(runs: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((runs.path / "joint" / "conformal.json").read_text())
    assert (record["promise"]["units"], record["promise"]["elements"]) == (8, 3)
    assert record["report"]["promised"] == pytest.approx(8 / 9)
    assert record["report"]["units"] == 8
    arrays = waves(40)
    status, out, certificate = runs.predict(some(arrays, np.arange(12)), "--draws", "5", run="joint")
    assert status == 0
    truth = arrays["solutions"][:12]
    inside = ((out["band_lower"] <= truth) & (truth <= out["band_upper"])).all((1, 2)).mean()
    assert certificate["conformal"]["measured"]["measured"] == pytest.approx(inside)
    assert certificate["conformal"]["promised"] == pytest.approx(8 / 9)
    assert certificate["conformal"]["held_out"] == record["report"]
    text = capsys.readouterr().out
    assert "promised coverage 0.8889" in text
    assert "8 held-out samples of the run" in text
    assert "12 samples with solutions here" in text


def test_bands_leave_out_what_cannot_be_met(runs: Folder) -> None:
    new = some(waves(40), np.arange(4), "solutions")
    new["amount"] = new["amount"].copy()
    new["amount"][2, 1] = -1.0
    status, out, _ = runs.predict(new, "--draws", "5")
    assert status == 3
    assert np.isnan(out["band_lower"][2]).all()
    assert np.isfinite(out["band_lower"][[0, 1, 3]]).all()
    assert out["band_lower"][[0, 1, 3]].min() >= 0


def test_another_grid_keeps_the_waves_and_promises_nothing(runs: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    fine = some(waves(4, points=15), np.arange(4), "solutions")
    status, out, certificate = runs.predict({**fine, "x": np.linspace(0, 2, 15)}, "--draws", "200", run="joint")
    assert status == 0
    assert neighbours(out) > 0.5
    assert certificate["conformal"]["promised"] is None
    assert "band_lower" not in out
    assert "No conformal bands: The grid is not that of the run" in capsys.readouterr().out


def test_bounds_and_few_samples(runs: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = predicted(runs, "run")
    assert out["draws"].min() >= 0
    assert neighbours(out) > 0.3
    folder = Folder(tmp_path)
    assert folder.train(waves(16)) == 0
    text = capsys.readouterr().out
    assert "4 validation samples are fewer than 10" in text
    assert "No conformal bands: the level 0.9 takes 18 test samples" in text
    assert not (tmp_path / "run" / "conformal.json").exists()


def test_a_mask_takes_a_low_rank_correlation(tmp_path: Path) -> None:
    random, mask = np.random.default_rng(2), np.ones((6, 5), dtype=bool)
    mask[:2, 3:] = False
    inputs = random.normal(size=(40, 1, 6, 5))
    arrays = {"inputs": inputs, "mask": mask, "solutions": np.where(mask, inputs[:, 0] ** 2, np.nan)}
    arrays["total"] = np.nansum(arrays["solutions"], (1, 2))
    config = {
        **MANY,
        "constraints": [{"conservation": {"mass": "total", "weights": 1}}],
        "axes": ["x", "y"],
        "per": None,
    }
    folder = Folder(tmp_path)
    assert folder.train(arrays, config) == 0
    new = {"inputs": inputs[:2], "total": arrays["total"][:2]}
    status, out, certificate = folder.predict(new, "--draws", "5")
    assert status == 0
    assert "LowRank" in certificate["joint_law"]
    np.testing.assert_allclose(out["draws"][..., mask].sum(-1), np.tile(arrays["total"][:2], (5, 1)), rtol=1e-12)
    spec = Settings.read(config)[0]
    family = block_means(Samples.solved(arrays, spec).cells, (2, "total"))
    np.testing.assert_allclose(family.matrix.sum(1), 1)
