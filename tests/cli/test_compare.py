"""``probhard compare``: the files that it writes, and bad requests."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import yaml

from cli.training_folder import CONFIG, waves
from probhard.cli import main


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    data, config = tmp_path / "data.npz", tmp_path / "config.yaml"
    np.savez(data, **waves())
    config.write_text(yaml.safe_dump({**CONFIG, "epochs": 1}))
    return data, config, tmp_path / "out"


def command(files: tuple[Path, Path, Path], *options: str) -> int:
    data, config, output = map(str, files)
    return main(["compare", data, "--config", config, "--output", output, *options])


def test_it_writes_a_table_a_picture_and_a_note(files, capsys):
    assert command(files, "--methods", "base,probhard-ob,hardnet-aff", "--draws", "10", "--seeds", "0,1") == 0
    output = files[2]
    rows = list(csv.DictReader((output / "comparison.csv").read_text().splitlines()))
    assert [(row["method"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("base", "probhard-ob", "hardnet-aff") for seed in "01"
    ]
    assert matplotlib.image.imread(output / "comparison.png").std() > 0
    note = json.loads((output / "comparison.json").read_text())
    assert note["feasible_by_design"] == ["probhard-ob"]
    assert "9 rows on 8 variables" in note["skipped"]["hardnet-aff"]
    assert set(note["files"]) == {"comparison.csv", "comparison.png"}
    assert note["samples"] == {"train": 8, "validation": 4, "test": 4}
    assert "hardnet-aff: does not apply" in capsys.readouterr().out


@pytest.mark.parametrize("options", [("--methods", "probhardy"), ("--seeds", "one"), ("--seeds", "-1")])
def test_bad_requests_end_with_status_2(files, options, capsys):
    assert command(files, *options) == 2
    assert not files[2].exists()
    assert capsys.readouterr().err.startswith("probhard: ")


@pytest.mark.parametrize("name", ["comparison.csv", "comparison.json"])
def test_files_of_others_are_not_replaced(files, name, capsys):
    files[2].mkdir()
    (files[2] / name).write_text("mine")
    assert command(files, "--methods", "base") == 2
    assert f"{name} was not written by probhard" in capsys.readouterr().err
    assert (files[2] / name).read_text() == "mine"


def test_memory_and_data_are_checked_before_training(files, capsys):
    assert command(files, "--methods", "base", "--draws", "1000000000000") == 2
    assert "1000000000000 draws of 4 samples would take about" in capsys.readouterr().err
    arrays = waves()
    np.savez(files[0], **{**arrays, "amount": 1000 * arrays["amount"]})
    assert command(files, "--methods", "base") == 2
    assert "more than data_tolerance=0.01" in capsys.readouterr().err
    assert not files[2].exists()
