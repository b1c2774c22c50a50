"""Named data sets: embedded, from a folder, by download; and imports without the extra."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest

from probhard import MissingExtraError, ParameterError
from probhard.forecasting import load
from probhard.forecasting.data import datasets
from probhard.forecasting.data.table import require


def test_embedded_employment_against_published_totals():
    data = load()
    assert data.values.shape == (120, 21)
    assert load("employment").name == data.name == "us-employment"
    published = {  # January 2006 and December 2015, thousands
        "nonfarm": (135450, 143093),
        "private": (113603, 120993),
        "goods_producing": (22467, 19737),
        "private_service_providing": (91136, 101256),
        "manufacturing": (14210, 12360),
        "trade_transportation_utilities": (26162, 27036),
    }
    for name, values in published.items():
        np.testing.assert_allclose(data.values[[0, -1], data.names.index(name)], values, atol=0.7)
    assert sum(len(v) for v in data.levels.values()) == 21
    assert data.hierarchy.algorithm.startswith("tree")
    assert (data.freq, str(data.index[0]), str(data.index[-1])) == ("M", "2006-01", "2015-12")


@pytest.mark.parametrize(
    ("name", "shape", "ends", "horizon", "freq", "season"),
    [
        ("labour", (514, 57), [1, 9, 25, 57], 8, "M", 12),
        ("tourism", (36, 89), [1, 5, 33, 89], 8, "Q-DEC", 4),
        ("tourism_large", (228, 555), [1, 8, 35, 111, 115, 143, 251, 555], 12, "M", 12),
        ("traffic", (366, 207), [1, 3, 7, 207], 1, "D", 7),
        ("wiki", (366, 199), [1, 7, 25, 49, 199], 1, "D", 7),
    ],
)
def test_benchmark_sets(hierarchical_data, name, shape, ends, horizon, freq, season):
    data = load(name)
    raw = np.genfromtxt(hierarchical_data / name / "data.csv", delimiter=",", skip_header=1)[:, -shape[1] :]
    np.testing.assert_array_equal(data.values[:, -10:], raw[:, -10:])
    assert data.values.shape == shape
    assert [v[-1] + 1 for v in data.levels.values()] == ends
    assert (data.horizon, data.freq, data.season) == (horizon, freq, season)
    total = data.values[:, : shape[1] - data.hierarchy.bottoms]
    np.testing.assert_allclose(total[:, 0], data.bottom.sum(1), rtol=1e-12)


def test_changed_or_absent_files_are_refused(hierarchical_data, tmp_path, monkeypatch):
    folder = tmp_path / "hierarchical" / "tourism"
    shutil.copytree(hierarchical_data / "tourism", folder)
    monkeypatch.setenv("PROBHARD_DATA", str(tmp_path))
    assert load("tourism").name == "tourism"
    text = (folder / "data.csv").read_text()
    (folder / "data.csv").write_text(text.replace("84503", "84504", 1))
    with pytest.raises(ParameterError, match="has the sha256"):
        load("tourism")
    with pytest.raises(ParameterError, match=r"There is no file .*labour"):
        load("labour")
    with pytest.raises(ParameterError, match="'tourism_large'"):
        load("tourismlarge")


def test_download_is_pinned_and_explains_a_missing_network(monkeypatch, tmp_path):
    import pooch

    monkeypatch.delenv("PROBHARD_DATA", raising=False)
    asked = []

    def retrieve(url, known_hash, **options):
        asked.append((url, known_hash))
        raise OSError("no route to host")

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(ParameterError, match="could not be downloaded: no route to host") as raised:
        load("wiki")
    assert "PROBHARD_DATA" in raised.value.fix
    source = datasets.BENCHMARKS["wiki"]
    assert asked == [(f"{datasets.SOURCE}wiki2/data.csv", f"sha256:{source.data}")]
    assert "a822a9d7c571e20ef2e1d554e6a678c2404ee2b3" in datasets.SOURCE


def test_import_needs_no_extra_and_use_names_it(monkeypatch):
    block = "import sys; sys.modules.update(dict.fromkeys(['pandas', 'gluonts', 'statsforecast', 'pooch']));"
    code = block + (
        "import probhard.forecasting as f\ntry: f.load()\nexcept ImportError as e: print(type(e).__name__, e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MissingExtraError")
    assert 'pip install "probhard[forecast]"' in done.stdout
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(MissingExtraError, match="pooch"):
        require("pooch", "Downloading")
