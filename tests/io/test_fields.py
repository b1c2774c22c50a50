"""Arrays that may be read in two ways, masks with NaN, settings and checkpoints that are not what they seem."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import probhard as ph
from probhard.cli import main
from probhard.errors import ParameterError, ProbhardError, ShapeError
from probhard.pde.operators import VarianceNO
from probhard.training import Schedule, fit

X = np.linspace(0, 1, 20)
RANDOM = np.random.default_rng(0)


def project(folder: Path, constraints: str, *options: str, **arrays: np.ndarray) -> int:
    np.savez(folder / "fields.npz", **arrays)
    (folder / "c.yaml").write_text(constraints)
    given = ["project", str(folder / "fields.npz"), "--constraints", str(folder / "c.yaml")]
    return main([*given, "--output", str(folder / "out.npz"), *options])


MASS = "per: time\nconstraints:\n  - conservation: {mass: total}\n"


@pytest.mark.parametrize("times", [6, 7])
def test_a_number_for_each_field(tmp_path: Path, capsys, times):
    """With as many fields as times the shape (6,) is refused, (6, 1) and (1, 6) are not."""
    mean, total = RANDOM.normal(1.0, 0.1, (6, times, 20)), np.linspace(0.5, 1.5, 6)
    arrays = {"mean": mean, "time": np.arange(times), "x": X}
    status = project(tmp_path, MASS, **arrays, total=total)
    if times == 6:
        assert status == 2
        assert "(6, 1) for the batch, or (1, 6)" in capsys.readouterr().err
        assert project(tmp_path, MASS, **arrays, total=total[None]) == 0
        projected = np.load(tmp_path / "out.npz")["mean"]
        np.testing.assert_allclose(np.trapezoid(projected, X), np.broadcast_to(total, (6, 6)), rtol=1e-12)
        status = project(tmp_path, MASS, **arrays, total=total[:, None])
    assert status == 0
    projected = np.load(tmp_path / "out.npz")["mean"]
    np.testing.assert_allclose(np.trapezoid(projected, X), np.broadcast_to(total[:, None], (6, times)), rtol=1e-12)


def test_bounds_of_each_field(tmp_path: Path, capsys):
    mean, box = RANDOM.normal(1.0, 0.1, (20, 20)), "constraints:\n  - box: {upper: cap}\n"
    cap = np.linspace(0.01, 2, 20)
    assert project(tmp_path, box, mean=mean, x=X, cap=cap) == 2
    assert "It may hold a number for each field" in capsys.readouterr().err
    assert project(tmp_path, box, mean=mean, x=X, cap=np.full(20, 0.5)) == 0  # the same in both ways
    assert project(tmp_path, box, mean=mean[:9], x=X, cap=cap[:9]) == 0
    assert (np.load(tmp_path / "out.npz")["mean"] <= cap[:9, None]).all()


def test_cells_whose_mask_is_nan_are_outside(tmp_path: Path):
    mask = np.where(np.arange(20) < 10, 1.0, np.nan)
    arrays = {"mean": RANDOM.normal(1.0, 0.1, (3, 20)), "x": X, "mask": mask, "cell_volumes": np.full(20, 0.05)}
    assert project(tmp_path, "constraints:\n  - conservation: {mass: 0.2}\n", **arrays) == 0
    mean = np.load(tmp_path / "out.npz")["mean"]
    np.testing.assert_allclose(mean[:, :10].sum(1) * 0.05, 0.2, rtol=1e-12)
    np.testing.assert_array_equal(mean[:, 10:], arrays["mean"][:, 10:])


@pytest.mark.parametrize(
    ("constraints", "changed", "message"),
    [
        ("per: 3\nconstraints: [nonnegative]", {}, "Axes have names"),
        ("axes: 2\nconstraints: [nonnegative]", {}, "Axes have names"),
        ("constraints:\n  - monotone: {axis: 1}", {}, "no axis 1"),
        ("constraints: [nonnegative]", {"mean": np.zeros((3, 0))}, "shape (3, 0)"),
        ("constraints:\n  - conservation: {mass: 1}", {"cell_volumes": np.full(20, np.nan)}, "are NaN in 20 of 20"),
        ("constraints: [nonnegative]", {"draws": np.full((5, 3, 20), np.nan)}, "mean of the draws is NaN"),
        ("constraints: [nonnegative]", {"draws": np.zeros((0, 3, 20))}, "at least one"),
        ("constraints: [nonnegative]", {"label": np.array(["a"])}, "or save numbers"),
        (
            "constraints: [nonnegative]",
            {"lower": np.ones((3, 20)), "upper": np.zeros((3, 20)), "level": 0.9},
            "above 'upper' in 60",
        ),
        ("constraints: [nonnegative]", {"stddev": np.array(1.0), "variance": np.array(2.0)}, "not the variances"),
        ("constraints:\n  - conservation: {mass: true}", {}, "mass is True, neither a number"),
    ],
)
def test_refusals(tmp_path: Path, capsys, constraints, changed, message):
    arrays = {"mean": np.ones((3, 20)), "x": X, **changed}
    if 0 in arrays["mean"].shape:
        del arrays["x"]
    assert project(tmp_path, constraints, **arrays) == 2
    assert message in capsys.readouterr().err


def test_pictures_tell_what_is_lost(tmp_path: Path, recwarn):
    arrays = {"mean": np.ones((2, 6, 20)), "x": np.arange(6.0), "y": X, "cell_volumes": np.ones((6, 20))}
    text = "axes: [x, y]\nconstraints:\n  - conservation: {mass: -1}\n  - nonnegative\n"
    assert project(tmp_path, text, "--figure", str(tmp_path / "f.png"), **arrays) == 3
    assert (tmp_path / "f.png").stat().st_size > 1000
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]


def samples(folder: Path, **changed: np.ndarray) -> Path:
    parameter = np.linspace(1, 2, 12)
    arrays = {"parameters": parameter, "solutions": parameter[:, None] * np.ones((12, 20)), "x": X, **changed}
    np.savez(folder / "d.npz", **arrays)
    return folder / "d.npz"


TINY = "epochs: 1\nwidth: 4\nlayers: 1\nmodes: 3\n"


def test_a_sample_that_cannot_obey_is_named_before_anything_is_trained(tmp_path: Path, capsys):
    mass = np.linspace(1, 2, 12)
    mass[7] = -1
    data = samples(tmp_path, total=mass)
    config = tmp_path / "run.yaml"
    config.write_text(TINY + "constraints:\n  - conservation: {mass: total}\n  - nonnegative\n")
    assert main(["train", str(data), "--config", str(config), "--output", str(tmp_path / "run")]) == 2
    assert "Sample 7:" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("lines", "output", "message"),
    [
        ("seed: -1\n", "run", "from 0 to"),
        ("lr: 0\n", "run", "a positive number"),
        ("", "d.npz", "is a file"),
    ],
)
def test_training_that_is_refused(tmp_path: Path, capsys, lines, output, message):
    data, config = samples(tmp_path), tmp_path / "run.yaml"
    config.write_text(lines + "constraints: [nonnegative]\n")
    assert main(["train", str(data), "--config", str(config), "--output", str(tmp_path / output)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "constraints: [nonnegative]\n", "[1]\n"])
def test_runs_whose_configuration_was_changed(tmp_path: Path, capsys, text):
    for name in ("grid.npz", "model.pt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.yaml").write_text(text)
    assert main(["predict", str(tmp_path), str(samples(tmp_path))]) == 2
    assert "does not say what the run was trained on" in capsys.readouterr().err


class Small(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.distributions.Normal:
        mean, spread = super().forward(x).chunk(2, -1)
        return torch.distributions.Normal(mean, torch.nn.functional.softplus(spread))


def model(width: int = 3) -> ph.ConstrainedModel:
    return ph.ConstrainedModel(Small(2, 2 * width), ph.Simplex(), "base")


DATA = torch.randn(24, 2, dtype=torch.float64), torch.rand(24, 3, dtype=torch.float64)
ONE = Schedule(1, batch_size=8)


@pytest.mark.parametrize(
    ("train", "validation"),
    [
        ({"inputs": DATA[0], "target": DATA[1], "context": torch.ones(5)}, DATA),
        (DATA, (DATA[0][:0], DATA[1][:0])),
        ((DATA[0][:0], DATA[1][:0]), DATA),
        ((DATA[0].numpy(), DATA[1].numpy()), DATA),
    ],
)
def test_data_that_cannot_be_trained_on(train, validation):
    with pytest.raises(ProbhardError, match=r"samples|of the type ndarray"):
        fit(model(), train, validation, ONE, progress=False)


@pytest.mark.parametrize("name", ["last.ckpt", "best.ckpt"])
@pytest.mark.parametrize("content", [None, b"broken"])
def test_damaged_checkpoints(tmp_path: Path, name, content):
    if name == "last.ckpt" and content is None:
        pytest.skip("A folder without it begins anew.")
    fit(model(), DATA, DATA, ONE, directory=tmp_path, progress=False)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(ParameterError, match="cannot be read"):
        fit(model(), DATA, DATA, Schedule(2, batch_size=8), directory=tmp_path, progress=False)


def test_checkpoints_of_another_network(tmp_path: Path):
    fit(model(), DATA, DATA, ONE, directory=tmp_path, progress=False)
    wide = DATA[0], torch.rand(24, 4)
    with pytest.raises(ParameterError, match="weights of another network"):
        fit(model(4), wide, wide, Schedule(2, batch_size=8), directory=tmp_path, progress=False)


def test_large_seeds():
    fit(model(), DATA, DATA, ONE, seed=2**40, progress=False)


@pytest.mark.parametrize("options", [{"lr": float("inf")}, {"weight_decay": -1.0}, {"epochs": 2.5}, {"clip": 0.0}])
def test_schedules_that_are_refused(options):
    with pytest.raises(ParameterError, match="Got Schedule"):
        Schedule(**options)


@pytest.mark.parametrize("epochs", [10, 19, 25, 150, 500])
def test_the_rate_is_halved_evenly(epochs):
    rates = [Schedule(epochs, lr=1.0).rate(epoch) for epoch in range(epochs)]
    assert rates[0] == 1.0
    assert rates[-1] == 0.5**9
    lengths = [rates.count(0.5**k) for k in range(10)]
    assert max(lengths) - min(lengths) <= 1


def test_operators_refuse_other_numbers():
    with pytest.raises(ParameterError, match="dropout=2"):
        VarianceNO(dropout=2)
    with pytest.raises(ParameterError, match="int64"):
        VarianceNO()(torch.ones(1, 3, 30, 30, dtype=torch.int64))
    with pytest.raises(ShapeError, match="3 channels"):
        VarianceNO()(torch.ones(1, 2, 30, 30))
