"""Early refusals: space and memory before any work, repeated columns, crossed quantiles, seeds, inputs as outputs."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from cli.training_folder import waves
from probhard._util import memory
from probhard.cli import main

SUMMING = ["--summing", "S.csv"]
CONFIG: dict[str, Any] = {
    "constraints": [{"conservation": {"mass": "amount"}}],
    "per": "time",
    "epochs": 1,
    "width": 4,
    "layers": 2,
    "modes": 3,
    "split": [0.5, 0.25, 0.25],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    mean = np.random.default_rng(0).normal(1.0, 0.1, (3, 20))
    np.savez("fields.npz", mean=mean, stddev=np.full_like(mean, 0.1), x=np.linspace(0, 1, 20), total=1.0)
    Path("c.yaml").write_text("constraints:\n  - conservation: {mass: total}\n")
    pd.DataFrame({"unique_id": ["Total", "A", "B"], "A": [1, 1, 0], "B": [1, 0, 1]}).to_csv("S.csv", index=False)
    forecasts().to_csv("f.csv", index=False)
    return tmp_path


def forecasts() -> pd.DataFrame:
    rows = [(name, f"2025-0{month}-01", 2.0 + i) for month in (1, 2) for i, name in enumerate(("Total", "A", "B"))]
    frame = pd.DataFrame(rows, columns=["unique_id", "ds", "ETS"])
    return frame.assign(**{"ETS-lo-80": frame["ETS"] - 1, "ETS-hi-80": frame["ETS"] + 1})


def train(arrays: dict[str, Any], run: str = "run", **settings: Any) -> int:
    np.savez("data.npz", **arrays)
    Path("train.yaml").write_text(yaml.safe_dump({**CONFIG, **settings}))
    return main(["train", "data.npz", "--config", "train.yaml", "--output", run])


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The message of a command that is refused."""
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


PROJECT = ["project", "fields.npz", "--constraints", "c.yaml"]
RECONCILE = ["reconcile", "f.csv", *SUMMING]


@pytest.mark.parametrize("seed", ["-1", str(2**63), str(2**70)])
@pytest.mark.parametrize(
    "command", [PROJECT, RECONCILE, ["predict", "run", "fields.npz"], ["demo", "--quick"]], ids=lambda x: x[0]
)
def test_seeds_out_of_range(folder: Path, capsys, command: list[str], seed: str):
    assert "from 0 to 2^63 - 1" in refused(capsys, [*command, "--seed", seed])


@pytest.mark.parametrize("draws", [10**9, 10**11, 10**20])
@pytest.mark.parametrize("command", [PROJECT, RECONCILE], ids=lambda x: x[0])
def test_too_many_draws_are_refused_before_any_work(folder: Path, capsys, command: list[str], draws: int):
    text = refused(capsys, [*command, "--draws", str(draws)])
    assert "Ask for fewer draws" in text
    assert {path.name for path in folder.iterdir()} == {"fields.npz", "c.yaml", "S.csv", "f.csv"}


def test_memory_is_compared_with_what_is_free(folder: Path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 100_000)
    for command in (PROJECT, RECONCILE):
        assert "GB of memory" in refused(capsys, command)
    assert train(waves(12)) == 2
    assert "Lower width, layers" in capsys.readouterr().err
    assert not Path("run").exists()


def test_limits_of_the_process_count(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**40, 2**40))
    assert 2**39 < (memory._of_process() or 0) < 2**40
    monkeypatch.setattr(memory, "_of_process", lambda: -5)
    assert memory.available() == 0


def test_space_is_estimated_before_training(folder: Path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 100))
    for command in (PROJECT, RECONCILE, ["demo", "--quick", "--output", "out"]):
        assert "MB left" in refused(capsys, command)
    assert train(waves(12)) == 2
    assert "MB left" in capsys.readouterr().err
    assert not Path("run").exists()


def test_columns_of_one_name(folder: Path, capsys):
    rows = [f"{name},2025-01-01,1,2" for name in ("Total", "A", "B")]
    Path("twice.csv").write_text("\n".join(["unique_id,ds,ETS,ETS", *rows]) + "\n")
    assert "more than one column 'ETS'" in refused(capsys, ["reconcile", "twice.csv", *SUMMING])
    Path("S2.csv").write_text("unique_id,A,B\nTotal,1,1\nA,1,0\nA,0,1\nB,0,1\n")
    assert "more than one row 'A'" in refused(capsys, ["reconcile", "f.csv", "--summing", "S2.csv"])


def test_crossed_quantiles_are_named(folder: Path, capsys):
    frame = forecasts()
    frame.loc[4, ["ETS-lo-80", "ETS-hi-80"]] = frame.loc[4, ["ETS-hi-80", "ETS-lo-80"]].to_numpy()
    frame.to_csv("crossed.csv", index=False)
    text = refused(capsys, ["reconcile", "crossed.csv", *SUMMING])
    assert "'ETS-lo-80' is above 'ETS-hi-80' for 'A' at 2025-02-01, and in 1 places" in text


def test_files_without_rows_and_bad_histories(folder: Path, capsys):
    forecasts().iloc[:0].to_csv("none.csv", index=False)
    assert "no rows" in refused(capsys, ["reconcile", "none.csv", *SUMMING])
    Path("h.csv").write_text("unique_id,ds,y,ETS\nTotal,2024-01-01,a,b\n")
    assert "has the text 'a'" in refused(capsys, [*RECONCILE, "--history", "h.csv"])
    Path("h.csv").write_text("unique_id,ds,y,ETS\n" + 2 * "Total,2024-01-01,1,2\n")
    assert "several rows for a node" in refused(capsys, [*RECONCILE, "--history", "h.csv"])


def test_outputs_never_replace_inputs(folder: Path, capsys):
    before = Path("S.csv").read_bytes()
    assert "not be an input" in refused(capsys, [*RECONCILE, "--output", "S.csv"])
    assert Path("S.csv").read_bytes() == before
    assert train(waves(12)) == 0
    capsys.readouterr()
    np.savez("new.npz", **{name: array for name, array in waves(12).items() if name != "solutions"})
    before = Path("run/grid.npz").read_bytes()
    assert "not be an input" in refused(capsys, ["predict", "run", "new.npz", "--output", "run/grid.npz"])
    assert Path("run/grid.npz").read_bytes() == before


def test_no_samples(folder: Path, capsys):
    common = ("time", "x")
    assert train({name: array if name in common else array[:0] for name, array in waves(12).items()}) == 2
    assert "shape (0, 3, 8)" in capsys.readouterr().err


def test_settings_beyond_memory(folder: Path, capsys):
    for settings in ({"width": 10**7}, {"layers": 10**7}, {"modes": 10**7}, {"rank": 10**10}):
        assert train(waves(12), **settings) == 2
        assert "Lower width, layers, modes, rank or batch_size" in capsys.readouterr().err


def test_data_that_break_their_own_law(folder: Path, capsys):
    arrays = waves(12)
    assert train({**arrays, "amount": 1.1 * arrays["amount"]}) == 2
    text = capsys.readouterr().err
    assert "data_tolerance=0.01" in text
    assert "The solution of sample" in text
    assert not Path("run").exists()
    assert train({**arrays, "amount": 1.1 * arrays["amount"]}, data_tolerance=0.2) == 0
    assert train({**arrays, "amount": 1.001 * arrays["amount"]}, run="near") == 0


def test_swapped_time_and_x_on_a_square_grid(folder: Path, capsys):
    """Axes of one size must be named; if the arrays have them in the other order, the data break their law."""
    arrays = waves(12, times=8)
    assert train(arrays) == 2
    assert "both have 8 points" in capsys.readouterr().err
    assert train({**arrays, "solutions": arrays["solutions"].swapaxes(1, 2)}, axes=["time", "x"]) == 2
    assert "breaks the constraints" in capsys.readouterr().err
    assert train(arrays, axes=["time", "x"]) == 0


def test_odd_certificates(folder: Path, capsys):
    common = {"feasible": True, "checked": 2, "tolerance": 1, "versions": {}}
    odd = [{}, {"infeasible": 0, "files": [1]}, {"infeasible": 0, "files": {"/etc/passwd": "x"}}]
    for more in [*odd, {"infeasible": 0, "files": {"../f.csv": "x"}}]:
        Path("odd.json").write_text(json.dumps({**common, **more}))
        assert "not a certificate" in refused(capsys, ["verify", "odd.json"])


def test_arrays_of_one_name(folder: Path, capsys):
    with zipfile.ZipFile("fields.npz", "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("mean.npy", archive.read("mean.npy"))
    assert "two arrays have one name" in refused(capsys, PROJECT)


def test_results_do_not_depend_on_chunks(folder: Path, monkeypatch):
    """Draws of a field are projected and summarised in parts; the parts change nothing."""
    from probhard.cli import _projection

    assert main([*PROJECT, "--draws", "30", "--output", "whole.npz"]) == 0
    monkeypatch.setattr(_projection, "BUDGET", 50)
    assert main([*PROJECT, "--draws", "30", "--output", "parts.npz"]) == 0
    with np.load("whole.npz") as whole, np.load("parts.npz") as parts:
        assert set(whole) == set(parts)
        for name in ("mean", "stddev", "lower", "upper"):
            np.testing.assert_allclose(parts[name], whole[name], rtol=1e-9)
        for array in (whole["draws"], parts["draws"]):
            weights = np.full(20, 1 / 19)
            weights[[0, -1]] /= 2
            np.testing.assert_allclose(array @ weights, 1.0, rtol=1e-9)


@pytest.mark.parametrize(
    ("settings", "options", "text"),
    [
        ({"lags_seq": [1_000_000]}, [], "lags_seq has the lag 1000000, and the longest history 30 rows"),
        ({"context_length": 10**10}, [], "Lower batch_size, context_length"),
        ({"batch_size": 10**10}, [], "Lower batch_size, context_length"),
        ({"hidden_size": 10**7}, [], "Lower batch_size, context_length"),
        ({}, ["--horizon", str(10**9)], "or a shorter horizon"),
        ({}, ["--draws", str(10**10)], "All draws of a step are held at once"),
    ],
)
def test_networks_beyond_history_or_memory(folder: Path, capsys, settings, options, text):
    pytest.importorskip("gluonts")
    stamps = pd.date_range("2020-01-01", periods=30, freq="MS").strftime("%Y-%m-%d")
    parts = [pd.DataFrame({"shop": name, "date": stamps, "y": np.arange(30.0) + i}) for i, name in enumerate("ab")]
    pd.concat(parts).to_csv("shops.csv", index=False)
    tiny = {"num_batches_per_epoch": 1, "batch_size": 2, "hidden_size": 4, "context_length": 6, "epochs": 1}
    Path("run.yaml").write_text(yaml.safe_dump({**tiny, "calibrate": False, "num_samples": 10, **settings}))
    base = ["forecast", "shops.csv", "--keys", "shop", "--config", "run.yaml", "--no-backtest", "--output", "out"]
    assert text in refused(capsys, [*base, *(options or ["--horizon", "2"])])
    assert not Path("out/certificate.json").exists()
