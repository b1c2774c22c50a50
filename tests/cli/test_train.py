"""``probhard train`` and ``probhard predict``: figures recomputed, runs resumed, grids changed, bad files refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import matplotlib.image
import numpy as np
import pytest
import torch
import yaml
import zarr
from scipy.integrate import trapezoid

from cli.training_folder import CONFIG, Folder, some, waves
from probhard.cli import main
from probhard.pde.samples import Samples
from probhard.pde.surrogate import PROJECTED, Settings, Surrogate

scoringrules = pytest.importorskip("scoringrules")


@pytest.fixture
def plain_dtype() -> torch.dtype:
    """As on the command line, where weights are float32 and all else names its dtype."""
    return torch.float32


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A finished run, not to be changed."""
    folder = Folder(tmp_path_factory.mktemp("trained"))
    assert folder.train(waves()) == 0
    return folder


def test_figures_of_a_run_are_those_of_its_predictions(trained: Folder) -> None:
    arrays, metrics = waves(), trained.metrics()
    test = Settings(split=CONFIG["split"]).parts(16)[2]
    status, out, certificate = trained.predict(some(arrays, test, "solutions"), "--draws", "400")
    assert status == 0
    truth = arrays["solutions"][test]
    assert metrics["samples"] == {"training": 8, "validation": 4, "calibration": 0, "test": 4}
    assert metrics["constrained"]["mse"] == pytest.approx(np.mean((out["mean"] - truth) ** 2), rel=1e-9)
    score = scoringrules.crps_ensemble(truth, np.moveaxis(out["draws"], 0, -1), estimator="fair").mean()
    assert metrics["constrained"]["crps"] == pytest.approx(score, rel=0.1)
    assert metrics["constrained"]["violation_mean"] < 1e-14
    assert metrics["constrained"]["violation_draws"] < 1e-14
    assert metrics["network"]["violation_draws"] > metrics["network"]["violation_mean"] > 1e-3
    assert metrics["solutions"]["violation"] < 1e-15
    np.testing.assert_allclose(trapezoid(out["draws"], arrays["x"]) / arrays["amount"][test], 1, rtol=1e-13)
    assert out["draws"].min() == 0
    assert (out["lower"] <= out["upper"]).all()
    assert (certificate["feasible"], certificate["checked"], certificate["draws"]) == (True, 4 * 3 * 401, 400)
    assert certificate["field_axes"] == ["sample", "time"]


def test_training_helps_and_leaves_pictures(trained: Folder, tmp_path: Path) -> None:
    arrays, metrics = waves(), trained.metrics()
    assert metrics["constrained"]["crps"] < 0.5 * arrays["solutions"].std()
    assert metrics["epochs"] == 3
    assert np.ptp(matplotlib.image.imread(trained.path / "run" / "training.png")[..., :3]) > 0.5
    new = some(arrays, np.arange(2), "solutions")
    first = trained.predict(new, "--figure", str(tmp_path / "figure.png"), "--seed", "7")[1]
    picture = matplotlib.image.imread(tmp_path / "figure.png")[..., :3]
    assert ((picture[..., 2] - picture[..., 0]) > 0.2).mean() > 0.01  # a blue band
    again = trained.predict(new, "--seed", "7")[1]
    np.testing.assert_array_equal(first["draws"], again["draws"])
    assert (trained.predict(new, "--seed", "8")[1]["draws"] != again["draws"]).any()


def test_a_stopped_run_goes_on_to_the_same_end(
    folder: Folder, trained: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, calls = Surrogate.loss, []

    def loss(self: Surrogate, batch: Any) -> torch.Tensor:
        calls.append(batch)
        if len(calls) == 6:  # one to begin with, 2 steps and a validation per epoch: in the second one
            raise KeyboardInterrupt
        return genuine(self, batch)

    monkeypatch.setattr(Surrogate, "loss", loss)
    assert folder.train(waves()) == 130
    assert not (folder.path / "run" / "model.pt").exists()
    assert folder.train(waves()) == 0
    assert len(calls) == 6 + 1 + 2 * 3  # the second epoch again, and the third
    whole, parts = trained.weights(), folder.weights()
    assert whole.keys() == parts.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=0, atol=0)
    assert folder.metrics()["constrained"] == trained.metrics()["constrained"]


def test_a_run_keeps_its_settings_and_data(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    brief = {**CONFIG, "epochs": 1}
    assert folder.train(waves(), brief) == 0
    before = folder.weights()
    assert folder.train(waves(), brief) == 0  # nothing left to do
    for name, weight in folder.weights().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)
    for arrays, config, word in ((waves(), {**brief, "lr": 0.1}, "lr"), (waves(17), brief, "trained_on")):
        capsys.readouterr()
        assert folder.train(arrays, config) == 2
        assert f"another {word}." in capsys.readouterr().err


def test_early_stopping(folder: Folder) -> None:
    assert folder.train(waves(), {**CONFIG, "epochs": 60, "patience": 2, "lr": 0.5}) == 0
    metrics = folder.metrics()
    assert metrics["epochs"] == metrics["best_epoch"] + 3 < 60


def test_warm_up_is_trained_without_the_constraint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def weights(name: str, **settings: Any) -> dict[str, torch.Tensor]:
        (tmp_path / name).mkdir()
        folder = Folder(tmp_path / name)
        assert folder.train(waves(), {**CONFIG, "epochs": 1, **settings}) == 0
        return folder.weights()

    warmed, free, bound = weights("a", warm_up=1), weights("b", method="probhard-inf"), weights("c")
    assert all(torch.equal(weight, free[name]) for name, weight in warmed.items())
    assert not all(torch.equal(weight, bound[name]) for name, weight in warmed.items())
    assert Folder(tmp_path / "a").train(waves(), {**CONFIG, "epochs": 1, "warm_up": 2}) == 2
    assert "warm-up is part of the epochs" in capsys.readouterr().err


def test_units_do_not_matter(folder: Folder, trained: Folder) -> None:
    arrays, large = waves(), 2.0**30
    arrays |= {name: large * arrays[name] for name in ("solutions", "amount")}
    arrays |= {"time": 1e9 + arrays["time"], "parameters": 1e-6 * arrays["parameters"]}
    assert folder.train(arrays) == 0
    scores, expected = (of.metrics()["constrained"] for of in (folder, trained))
    assert scores["mse"] == pytest.approx(large**2 * expected["mse"], rel=1e-3)
    assert scores["crps"] == pytest.approx(large * expected["crps"], rel=1e-3)


def test_without_normalisation_units_are_kept() -> None:
    spec, settings = Settings.read({**CONFIG, "normalise": False})
    samples = Samples.solved(waves(), spec)
    model = Surrogate.build(settings.resolved(samples.cells.grid), samples, np.arange(8))
    batch = samples.batch(np.arange(2))
    expected = model.backbone.operator(batch.inputs.float()).mean.reshape(6, 8)
    torch.testing.assert_close(model.backbone(batch.inputs).mean, expected.double())
    np.testing.assert_array_equal(batch.inputs[1, 1], np.broadcast_to(waves()["time"][:, None], (3, 8)))
    np.testing.assert_array_equal(batch.target, waves()["solutions"][:2])


@pytest.mark.parametrize("method", PROJECTED)
def test_every_draw_of_every_method_obeys(folder: Folder, method: str) -> None:
    score = {} if method == "hier-e2e" else {"score": "nll"}
    assert folder.train(waves(), {**CONFIG, "epochs": 1, "method": method, **score}) == 0
    new = some(waves(), np.arange(3), "solutions")
    status, out, certificate = folder.predict(new, "--draws", "10")
    assert status == 0
    np.testing.assert_allclose(trapezoid(out["draws"], new["x"]) / new["amount"], 1, rtol=1e-13)
    assert certificate["metric"] == ("oblique" if method in ("probhard-ob", "probhard-inf") else "orthogonal")


def test_methods_that_do_not_project_every_draw_are_not_offered() -> None:
    assert set(PROJECTED) >= {"probhard-ob", "probhard-or", "probhard-inf", "hier-e2e"}
    assert not set(PROJECTED) & {"base", "softc", "hardc", "probconserv"}


def test_input_fields_with_a_mask_from_zarr_and_hdf5(folder: Folder) -> None:
    random, mask = np.random.default_rng(2), np.ones((6, 5), dtype=bool)
    mask[:2, 3:] = False
    inputs = np.where(mask, random.normal(size=(10, 2, 6, 5)), np.nan)
    solutions, volumes = np.abs(inputs[:, 0]) + inputs[:, 1] ** 2, random.uniform(1, 2, size=(6, 5))
    arrays = {"inputs": inputs, "mask": mask, "cell_volumes": volumes, "solutions": solutions}
    arrays["total"] = np.nansum(volumes * solutions, (1, 2))
    group = zarr.open_group(folder.path / "data.zarr", mode="w")
    for name, array in arrays.items():
        group.create_array(name, data=array)
    config = {"constraints": [{"conservation": {"mass": "total"}}, "nonnegative"], "axes": ["x", "y"]}
    own = {name: CONFIG[name] for name in ("batch_size", "width", "layers")}
    (folder.path / "c.yaml").write_text(yaml.safe_dump({**config, **own, "epochs": 1, "patience": None}))
    assert folder.begin("data.zarr") == 0
    chosen = yaml.safe_load((folder.path / "run" / "config.yaml").read_text())
    assert (chosen["modes"], chosen["patience"]) == ([7, 7], None)
    with h5py.File(folder.path / "new.h5", "w") as file:
        for name in ("inputs", "total"):
            file.create_dataset(name, data=arrays[name][:3])
    assert main(["predict", str(folder.path / "run"), str(folder.path / "new.h5"), "--draws", "5"]) == 0
    with np.load(folder.path / "new-predicted.npz") as results:
        mean, draws = results["mean"], results["draws"]
    assert np.isnan(mean[:, ~mask]).all()
    np.testing.assert_allclose(draws[..., mask] @ volumes[mask], np.tile(arrays["total"][:3], (5, 1)), rtol=1e-13)
    assert draws[..., mask].min() >= 0


def test_a_finer_grid(trained: Folder) -> None:
    fine = some(waves(4, points=15), np.arange(4), "solutions")
    status, out, _ = trained.predict({**fine, "x": np.linspace(0, 2, 15)}, "--draws", "5")
    assert status == 0
    assert out["mean"].shape == (4, 3, 15)
    np.testing.assert_allclose(trapezoid(out["draws"], np.linspace(0, 2, 15)) / fine["amount"], 1, rtol=1e-13)
    coarse = trained.predict(some(waves(4), np.arange(4), "solutions", "x", "time"))[1]  # the grid of the run
    assert coarse["mean"].shape == (4, 3, 8)


def test_what_cannot_be_is_flagged(trained: Folder) -> None:
    new = some(waves(), np.arange(3), "solutions")
    new["amount"] = new["amount"].copy()
    new["amount"][1, 2] = -1.0
    status, out, certificate = trained.predict(new, "--draws", "5")
    assert status == 3
    assert np.isnan(out["mean"][1, 2]).all()
    assert np.isfinite(np.delete(out["mean"].reshape(9, -1), 5, 0)).all()
    assert [flag["field"] for flag in certificate["flagged"]] == [[1, 2]]


GOOD = waves(8)
BAD_TRAINING: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no solutions": ({**GOOD, "solutions": None}, CONFIG, "There is no array 'solutions'"),
    "no inputs": ({**GOOD, "parameters": None}, CONFIG, "neither 'parameters' nor 'inputs'"),
    "few parameters": ({**GOOD, "parameters": GOOD["parameters"][:-1]}, CONFIG, "The parameters have shape (7,)"),
    "other grid": ({**GOOD, "inputs": np.ones((8, 1, 3, 7))}, CONFIG, "The inputs have shape (8, 1, 3, 7)"),
    "no channel": ({**GOOD, "inputs": np.ones((8, 3, 8))}, CONFIG, "(8, C, 3, 8), with C = 1"),
    "nan": ({**GOOD, "solutions": np.where(GOOD["solutions"] > 0.5, np.nan, 0)}, CONFIG, "'solutions' is NaN"),
    "nan inputs": ({**GOOD, "parameters": np.full(8, np.inf)}, CONFIG, "'parameters' is NaN or infinite in 8 of 8"),
    "axes": ({**GOOD, "time": None}, {**CONFIG, "per": None}, "only the axes x are named"),
    "mass": ({**GOOD, "amount": GOOD["amount"][:, :2]}, CONFIG, "mass has shape (8, 2), the fields need (8, 3)"),
    "array": ({**GOOD, "amount": None}, CONFIG, "'amount', neither a number nor the name of an array"),
    "name": (GOOD, {**CONFIG, "constraints": ["nonegative"]}, "Did you mean 'nonnegative'?"),
    "none": (GOOD, {**CONFIG, "constraints": None}, "A list is needed"),
    "setting": (
        GOOD,
        {**CONFIG, "epoch": 3},
        "There is no setting 'epoch'. Nothing is guessed. Did you mean 'epochs'?",
    ),
    "value": (GOOD, {**CONFIG, "epochs": 2.5}, "epochs is 2.5. It must be a whole number"),
    "negative": (GOOD, {**CONFIG, "width": -1}, "width is -1"),
    "zero": (GOOD, {**CONFIG, "lr": 0}, "lr is 0"),
    "method": (GOOD, {**CONFIG, "method": "hardc"}, "'hardc' does not project every draw"),
    "unknown": (GOOD, {**CONFIG, "method": "probhard"}, "There is no method 'probhard'. "),
    "score": (GOOD, {**CONFIG, "score": "rmse"}, "score='rmse' is not known"),
    "modes": (GOOD, {**CONFIG, "modes": [3, 3, 3]}, "modes=[3, 3, 3] for the grid (3, 8)"),
    "many modes": (GOOD, {**CONFIG, "modes": 30}, "too small for the modes (30, 30)"),
    "split": (GOOD, {**CONFIG, "split": [0.5, 0.5]}, "split=[0.5, 0.5] of 8 samples"),
    "samples": (waves(2), CONFIG, "of 2 samples"),
    "text": (GOOD, "just words", "The configuration is 'just words'"),
}


@pytest.mark.parametrize("case", BAD_TRAINING)
def test_bad_requests_are_refused(folder: Folder, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arrays, config, words = BAD_TRAINING[case]
    assert folder.train({name: array for name, array in arrays.items() if array is not None}, config) == 2
    assert words in capsys.readouterr().err
    assert not (folder.path / "run").exists()


def test_bad_predictions_are_refused(trained: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    new = some(GOOD, np.arange(2), "solutions")

    def refused(arrays: dict[str, Any], words: str, run: str = "run") -> None:
        capsys.readouterr()
        assert trained.predict(arrays, run=run)[0] == 2
        assert words in capsys.readouterr().err

    refused(new, "has no config.yaml and no grid.npz and no model.pt", "nowhere")
    refused(some(new, np.arange(2), "parameters"), "neither 'parameters' nor 'inputs'")
    refused(some(new, np.arange(2), "amount"), "'amount', neither a number nor the name of an array")
    refused({**new, "parameters": np.ones((2, 3))}, "has 3 parameters and input fields, the run 1")
    refused({**new, "amount": np.ones((3, 3))}, "mass has shape (3, 3)")
    refused({**new, "parameters": np.array([1, np.nan])}, "'parameters' is NaN")
    other = trained.path / "other"
    other.mkdir()
    for name in ("config.yaml", "grid.npz", "model.pt"):
        (other / name).write_bytes((trained.path / "run" / name).read_bytes())
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("width: 4", "width: 5"))
    refused(new, "do not fit this backbone", "other")
    for wrong in (text.replace("channels: 3", "channels: three"), text.replace("  - 8", "  - eight")):
        assert wrong != text
        (other / "config.yaml").write_text(wrong)
        refused(new, "does not say what the run was trained on", "other")
    (other / "config.yaml").write_text(text)
    (other / "model.pt").write_bytes(b"not a model")
    refused(new, "cannot be read as a saved model", "other")


def test_files_of_others_are_not_replaced(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.path / "run").mkdir()
    (folder.path / "run" / "model.pt").write_text("mine")
    assert folder.train(waves()) == 2
    assert "model.pt was not written by probhard" in capsys.readouterr().err
    assert (folder.path / "run" / "model.pt").read_text() == "mine"
