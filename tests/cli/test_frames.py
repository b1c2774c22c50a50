"""Frames in files: what spreadsheets write is read as the same frame; what cannot be read is refused with a reason."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import probhard as ph
from probhard.cli import _frames as frames
from probhard.cli import main

pd = pytest.importorskip("pandas")

FRAME = pd.DataFrame(
    {
        "state": ["", "Köln", "NA"],
        "ds": ["2024-01", "2024-01", "2024-01"],
        "code": ["007", "1,5", "x"],
        "ETS": [0.1 + 0.2, -1234.5, 3.0],
        "count": [1, 2, 3],
    }
)
TEXTS = ["state", "ds", "code"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(("separator", "decimal"), [(",", "."), (";", ","), (";", "."), ("\t", ","), ("\t", ".")])
def test_spreadsheets_of_any_country(tmp_path: Path, separator: str, decimal: str, encoding: str) -> None:
    path = tmp_path / "f.csv"
    frame = FRAME if separator == "," or decimal == "," else FRAME.assign(code=["007", "1.5", "x"])
    frame.to_csv(path, index=False, sep=separator, decimal=decimal, encoding=encoding)
    pd.testing.assert_frame_equal(frames.read(path, TEXTS), frame, check_exact=True, check_dtype=False)


@pytest.mark.parametrize("suffix", frames.SUFFIXES)
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"f{suffix}"
    frames.write(path, FRAME)
    pd.testing.assert_frame_equal(frames.read(path, TEXTS), FRAME, check_exact=True, check_dtype=False)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("polars")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    test_round_trip(tmp_path, ".parquet")
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(ph.ParameterError, match=r"bad\.parquet cannot be read"):
        frames.read(tmp_path / "bad.parquet", [])


def test_tall_parquet_has_categories_and_no_copies_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    rows = 1000
    frame = pd.DataFrame(
        {
            "key": [f"s{k % 7}" if k % 97 else None for k in range(rows)],
            "ds": pd.date_range("2024-01-01", periods=rows),
            "y": [float(k) for k in range(rows)],
            "count": range(rows),
        }
    )
    path = tmp_path / "tall.parquet"
    frame.to_parquet(path, row_group_size=10, engine="pyarrow")  # groups with other texts
    whole = frames.read(path, ["key"])
    monkeypatch.setattr(frames, "TYPED_ROWS", 10)
    tall = frames.read(path, ["key"])
    assert set(tall["key"].cat.categories) == set(whole["key"].dropna())
    expected = whole.assign(key=whole["key"].astype(tall["key"].dtype))
    pd.testing.assert_frame_equal(tall, expected[tall.columns], check_dtype=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("latin.csv", "state,ds,ETS\nKöln,2024,1\n".encode("latin-1")),
        ("empty.csv", b""),
        ("ragged.csv", b"state,ds,ETS\nA,2024,1\nB,2024,1,2,3\n"),
        ("bad.parquet", b"PAR1 but not a file PAR1"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, capsys: Any, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["reconcile", str(path), "--keys", "state"]) == 2
    message = capsys.readouterr().err
    assert f"{name} cannot be read: " in message
    assert all(part in message for part in frames.FORMAT_HELP[path.suffix])
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_without_rows(tmp_path: Path) -> None:
    (tmp_path / "names.csv").write_text("state,ds,ETS\n")
    with pytest.raises(ph.ParameterError, match=r"names\.csv has no rows"):
        frames.read(tmp_path / "names.csv", [])


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"shop": ["1.2", "x"], "Datum": ["01.02.2024", "01.03.2024"]}, ["Datum"]),
        ({"when": ["2024-01-01T10:00+01:00", "2024-01-01 11:00"]}, ["when"]),
        ({"Quartal": ["2024Q1", "2024-Q2"]}, ["Quartal"]),
        ({"from": ["2024-01-01"] * 2, "to": ["2024-01-31"] * 2}, ["from", "to"]),
        ({"Date": ["soon", "later"], "due": ["2024-01-01"] * 2}, ["Date"]),
        ({"price": [1.0, 2.0], "code": ["2024-01-01x", "7"]}, []),
    ],
)
def test_columns_of_stamps(columns: dict[str, list[Any]], found: list[str]) -> None:
    assert frames.time_columns(pd.DataFrame(columns), ["shop"]) == found
