"""The demo: every method has its row, projected draws obey the law, and an interruption keeps what was finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

from probhard import METHODS, ConstrainedModel
from probhard.__main__ import main
from probhard.errors import ParameterError
from probhard.pde import PorousMedium, demo

TINY = demo.Size(train=10, test=4, batch=5, width=16, draws=5)
PROJECTED = ("probconserv", "probhard-ob", "probhard-or")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[demo.Row]]:
    output = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return output, demo.run(output, epochs=3, seed=0, size=TINY)


def test_every_method_has_a_row(finished: tuple[Path, list[demo.Row]]) -> None:
    _, rows = finished
    assert [row.method for row in rows] == list(demo.NAMES)
    corrected = {name for name, method in METHODS.items() if method.inference.correction is not None}
    assert set(demo.NAMES) == set(METHODS) - {"hier-e2e", "probhard-inf"} - corrected
    assert [row.method for row in rows if row.seconds == 0] == ["probconserv"]


def test_projected_draws_obey_the_law_and_others_do_not(finished: tuple[Path, list[demo.Row]]) -> None:
    rows = {row.method: row for row in finished[1]}
    for name in PROJECTED:
        assert rows[name].ce_draws <= 1e-4
        assert rows[name].ce_mean <= 1e-4
    for name in ("base", "softc"):
        assert rows[name].ce_draws > 1e-3
        assert rows[name].ce_mean > 1e-3
    assert rows["hardc"].ce_mean <= 1e-4
    assert rows["hardc"].ce_draws > 1e-3


def test_the_picture_is_drawn(finished: tuple[Path, list[demo.Row]]) -> None:
    image = matplotlib.image.imread(finished[0] / demo.PICTURE)
    assert min(image.shape[:2]) > 500
    panel = image[: image.shape[0] // 3, :, :3]
    assert len({tuple(color) for color in panel.reshape(-1, 3).round(2)}) > 50
    assert 0.02 < float((image[..., :3].min(-1) < 0.9).mean()) < 0.5


def test_numbers_are_saved_as_returned(finished: tuple[Path, list[demo.Row]]) -> None:
    output, rows = finished
    saved = json.loads((output / demo.NUMBERS).read_text())
    assert [demo.Row(**row) for row in saved["rows"]] == rows
    assert (saved["epochs"], saved["seed"], saved["train"]) == (3, 0, 10)
    assert sorted(path.name for path in output.iterdir()) == sorted([demo.PICTURE, demo.NUMBERS])


def test_table_states_its_units() -> None:
    row = demo.Row("base", mse=8e-5, ce_mean=0.0123, ce_draws=0.004, crps=0.0021, seconds=0.0)
    lines = demo.table([row], gap=0.011).splitlines()
    assert lines[0].split() == ["method", "MSE", "CE", "mean", "CE", "draws", "CRPS", "train"]
    assert lines[1].split() == ["e-5", "e-3", "e-3", "e-3", "s"]
    assert lines[2].split() == ["base", "8.00", "12.3000", "4.0000", "2.100", "reused"]
    assert "CE mean of 11.0" in demo.table([row], gap=0.011)


def test_same_seed_same_rows_and_no_trace_in_global_state(tmp_path: Path) -> None:
    def figures(seed: int) -> list[tuple[float, ...]]:
        rows = demo.run(tmp_path, epochs=2, seed=seed, methods=("base", "probhard-inf", "probconserv"), size=TINY)
        return [(row.mse, row.ce_mean, row.crps) for row in rows]

    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first = figures(3)
    assert first == figures(3)
    assert first != figures(4)
    assert first[1] == first[2]  # probhard-inf is probconserv for a linear law
    assert torch.equal(before, torch.random.get_rng_state())
    assert threads == torch.get_num_threads()
    assert not (tmp_path / demo.PICTURE).exists()  # nothing to compare with


def test_training_improves_the_forecast(tmp_path: Path) -> None:
    (short,) = demo.run(tmp_path, epochs=1, methods=("probhard-or",), size=TINY)
    (longer,) = demo.run(tmp_path, epochs=60, methods=("probhard-or",), size=TINY)
    assert longer.crps < 0.5 * short.crps


def test_every_weight_gets_a_gradient() -> None:
    problem = PorousMedium()
    model = ConstrainedModel(demo.BranchTrunk(problem, 8), problem.constraint, "probhard-ob")
    model.loss(demo.batch_of(problem, problem.parameters(2))).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ctrl-C in the training of a method, after a few of its steps."""

    def arrange(name: str) -> None:
        genuine, steps = ConstrainedModel.loss, list[int]()

        def loss(model: ConstrainedModel, batch: Any) -> torch.Tensor:
            if model.method == METHODS[name]:
                steps.append(1)
                if len(steps) > 3:
                    raise KeyboardInterrupt
            return genuine(model, batch)

        monkeypatch.setattr(ConstrainedModel, "loss", loss)

    return arrange


def test_interruption_keeps_the_finished_rows(
    tmp_path: Path, interrupted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted("softc")
    rows = demo.run(tmp_path, epochs=2, size=TINY)
    assert [row.method for row in rows] == ["base"]
    assert [row["method"] for row in json.loads((tmp_path / demo.NUMBERS).read_text())["rows"]] == ["base"]
    printed = capsys.readouterr().out
    assert "Interrupted: 1 of 6 methods are finished." in printed
    assert "\nbase " in printed
    assert "\nsoftc " not in printed


def test_interruption_before_the_first_row(tmp_path: Path, interrupted: Any) -> None:
    interrupted("base")
    assert demo.run(tmp_path, epochs=2, size=TINY) == []
    assert list(tmp_path.iterdir()) == []


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "QUICK", TINY)
    assert main(["demo", "--quick", "--epochs", "1", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    assert f"Picture: {Path('demo-output') / demo.PICTURE}" in printed
    assert json.loads((tmp_path / "demo-output" / demo.NUMBERS).read_text())["seed"] == 5


def test_command_line_after_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: Any) -> None:
    monkeypatch.setattr(demo, "QUICK", TINY)
    interrupted("softc")
    assert main(["demo", "--quick", "--epochs", "2", "--output", str(tmp_path)]) == 130


def test_bad_requests_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert main(["demo", "--output", str(occupied)]) == 2
    assert "cannot be made" in capsys.readouterr().err
    with pytest.raises(ParameterError, match="epochs=0"):
        demo.run(tmp_path, epochs=0)
    with pytest.raises(ParameterError, match="'nothing' is not known"):
        demo.run(tmp_path, methods=("nothing",))
