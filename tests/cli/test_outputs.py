"""Outputs that belong together, and certificates that warn of implausible moves."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from probhard._util import atomic
from probhard.cli import _project, main
from probhard.errors import ParameterError

X = np.linspace(0, 1, 20)
MASS = "constraints:\n  - conservation: {mass: total}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    mean = np.random.default_rng(0).normal(1.0, 0.1, (3, 20))
    np.savez(tmp_path / "fields.npz", mean=mean, stddev=np.full_like(mean, 0.1), x=X, total=1.0)
    (tmp_path / "c.yaml").write_text(MASS)
    return tmp_path


def project(folder: Path, output: str = "out.npz", *options: str) -> int:
    paths = [str(folder / name) for name in ("fields.npz", "c.yaml", output)]
    return main(["project", paths[0], "--constraints", paths[1], "--output", paths[2], "--draws", "5", *options])


def test_a_certificate_vouches_for_its_files(folder: Path, capsys):
    assert project(folder) == 0
    content = json.loads((folder / "out.json").read_text())
    assert set(content["files"]) == {"out.npz"}
    assert main(["verify", str(folder / "out.json")]) == 0
    assert "out.npz: unchanged" in capsys.readouterr().out
    changed = bytearray((folder / "out.npz").read_bytes())
    changed[-100] ^= 1
    (folder / "out.npz").write_bytes(bytes(changed))
    assert main(["verify", str(folder / "out.json")]) == 2
    assert "was changed since out.json" in capsys.readouterr().err
    (folder / "out.npz").unlink()
    assert main(["verify", str(folder / "out.json")]) == 2
    assert "is missing since" in capsys.readouterr().err
    assert main(["verify", str(folder / "c.yaml")]) == 2


@pytest.mark.parametrize("point", ["write_npz", "conclude"])
def test_no_old_certificate_stands_beside_new_files(folder: Path, capsys, monkeypatch, point):
    """Whenever the run ends after its first write, the certificate of the run before is gone."""
    assert project(folder) == 0

    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(_project, point, full)
    assert project(folder) == 2
    assert "No space left" in capsys.readouterr().err
    assert not (folder / "out.json").exists()


def test_a_file_that_is_no_certificate_is_kept(folder: Path, capsys):
    (folder / "mine.json").write_text('{"my": "notes"}')
    assert project(folder, "mine.npz") == 2
    assert "not a certificate" in capsys.readouterr().err
    assert (folder / "mine.json").read_text() == '{"my": "notes"}'
    assert not (folder / "mine.npz").exists()


def test_paths_are_checked_before_any_work(folder: Path, capsys):
    (folder / "d.npz").mkdir()
    assert project(folder, "d.npz") == 2
    assert "must be a file" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tempfile.TemporaryFile", lambda **_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
        )
        assert project(folder) == 2
    assert "no file can be written" in capsys.readouterr().err


def test_space_for_draws_is_reserved(tmp_path: Path, monkeypatch):
    reserved = []

    def reserve(file: int, start: int, size: int) -> None:
        reserved.append(size)
        if len(reserved) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.ftruncate(file, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    mapped = atomic.reserved_map(tmp_path, (10, 1000))
    assert reserved == [mapped.nbytes]
    mapped[3] = 7.0
    assert float(mapped.sum()) == 7000.0
    assert not list(tmp_path.iterdir())  # the file has no name, so that a killed process leaves nothing
    with pytest.raises(OSError, match="No space"):
        atomic.reserved_map(tmp_path, (10, 1000))


def test_lack_of_memory_is_a_message(folder: Path, capsys, monkeypatch):
    def small(*_: object) -> None:
        raise MemoryError("Unable to allocate 10. GiB")

    monkeypatch.setattr(_project, "read_fields", small)
    assert project(folder) == 2
    assert "too little memory" in capsys.readouterr().err


def test_feasible_is_not_plausible(folder: Path, capsys):
    """A mass 1000 times too large is met, but moves every cell by thousands of deviations."""
    assert project(folder) == 0
    moved = json.loads((folder / "out.json").read_text())["moved_in_deviations"]
    assert moved["worst"] < 2
    assert moved["share_above_5"] == 0
    with np.load(folder / "fields.npz") as arrays:
        np.savez(folder / "fields.npz", **{**arrays, "total": 1000.0})
    assert project(folder) == 4
    content = json.loads((folder / "out.json").read_text())
    assert content["feasible"]
    assert not content["plausible"]
    assert content["moved_in_deviations"]["share_above_5"] == 1
    assert "contradict each other" in capsys.readouterr().out


@pytest.mark.parametrize(("found", "status"), [({"feasible": False}, 3), ({"plausible": False}, 4), ({}, 0)])
def test_verify_ends_with_the_status_of_the_command(folder: Path, found, status):
    assert project(folder) == 0
    path = folder / "out.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **found}))
    assert main(["verify", str(path)]) == status


def test_moves_are_those_of_dense_algebra(folder: Path):
    assert project(folder) == 0
    with np.load(folder / "fields.npz") as arrays:
        mean = arrays["mean"]
    weights = np.full(20, X[1])
    weights[[0, -1]] /= 2
    moves = np.abs((1.0 - mean @ weights)[:, None] * weights / (weights @ weights)) / 0.1
    moved = json.loads((folder / "out.json").read_text())["moved_in_deviations"]
    assert moved["mean"] == pytest.approx(moves.mean(), rel=1e-9)
    assert moved["worst"] == pytest.approx(moves.max(), rel=1e-9)


def test_a_forecast_is_sealed_with_its_model_and_report(tmp_path: Path, capsys):
    pytest.importorskip("statsforecast")
    output = tmp_path / "out"
    run = ["forecast", "us-employment", "--horizon", "2", "--fast", "--no-backtest", "--output", str(output)]
    assert main(run) == 0
    content = json.loads((output / "certificate.json").read_text())
    assert set(content["files"]) == {"forecasts.csv", "model", "report.html"}
    assert main(["verify", str(output / "certificate.json")]) == 0
    (output / "report.html").write_text("changed")
    assert main(["verify", str(output / "certificate.json")]) == 2
    (output / "certificate.json").write_text("{}")  # not ours any more
    assert main(run) == 2
    assert "not a certificate" in capsys.readouterr().err


def test_ctrl_c_inside_a_reader_is_an_interruption(folder: Path, monkeypatch):
    """Readers in C turn KeyboardInterrupt into errors of their own, which must not look like a bad file."""

    def read(path: Path) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ParameterError("It cannot be read.") from error

    monkeypatch.setattr(_project, "read_fields", read)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
    assert project(folder) == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_ends_a_command(folder: Path, monkeypatch):
    monkeypatch.setattr(_project, "read_fields", lambda _: signal.raise_signal(signal.SIGTERM))
    assert project(folder) == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
