"""The table of systems: published draws, the toy's function, one quick run, page and verdict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.optimisation import system_tables, systems
from experiments.optimisation.system_problems import CASES, toy_constraint, toy_grid, toy_points, toy_target
from experiments.records import Records


def test_problems_are_those_of_the_papers() -> None:
    dc3, hardnet = CASES["dc3-nonconvex"](), CASES["hardnet-nonconvex"]()
    random = np.random.RandomState(17)
    random.random_sample(200)
    np.testing.assert_array_equal(hardnet.program.unequal, random.normal(size=(50, 100)))  # inequalities come first
    np.testing.assert_array_equal(hardnet.program.equal, random.normal(size=(50, 100)))
    np.testing.assert_array_equal(dc3.program.equal, hardnet.program.unequal)  # DC3 draws equalities there
    for case in (dc3, hardnet):
        assert len(set(case.solved)) == 50
        assert abs(np.linalg.det(case.program.equal[:, case.solved])) > 1e-4


def test_the_toy_obeys_its_own_constraint() -> None:
    (x, y), (grid, target) = toy_points(), toy_grid()
    assert x.shape == y.shape == (50, 1)
    assert toy_constraint(x).violation(y).max() <= 1e-12
    assert toy_constraint(grid).violation(target).max() <= 1e-12
    by_hand = {-1.5: -5 * np.sin(-np.pi / 4), -0.5: 0.0, 0.5: 4 - 9 * (0.5 - 2 / 3) ** 2, 1.5: 0.5}
    for at, value in by_hand.items():
        assert float(toy_target(torch.tensor([[at]], dtype=torch.float64))) == pytest.approx(value)


def test_quick_rows_and_page(tmp_path: Path) -> None:
    records = Records(tmp_path / "systems.jsonl", systems.KEYS)
    optima = records.folder("optima")
    plan = systems.recipes(1, 1)
    for way in ("DC3", "HardNet-Aff"):
        records.append(*systems.program_lines("dc3-convex", way, systems.OURS, plan[systems.OURS], optima, quick=True))
    records.append(*systems.toy_lines("HardNet-Aff", epochs=3, seeds=1))
    rows = {line["way"]: line for line in records.read() if line["case"] == "dc3-convex"}
    assert rows["DC3"]["equality"] < 1e-9 < rows["DC3"]["inequality"]
    assert max(rows["HardNet-Aff"]["equality"], rows["HardNet-Aff"]["inequality"]) < 1e-10
    page = system_tables.render(records.read())
    assert "| DC3, convex | ours | DC3 | 1 |" in page
    assert "Not run yet: " in page
    assert len(list(systems.pieces(records, ["dc3-convex"], quick=True))) == 4  # three by our recipe, one published
    system_tables.plot(tmp_path / "systems.png", records.read())
    assert (tmp_path / "systems.png").stat().st_size > 5_000


def line(way: str, gap: float, violated: float = 0.0) -> dict[str, object]:
    shared = {"case": "dc3-convex", "recipe": systems.OURS}
    return {**shared, "way": way, "gap": gap, "objective": gap - 15, "violated": violated}


def test_the_verdict_names_who_is_ahead() -> None:
    ours = line("probhard", 0.2)
    assert system_tables.verdict([ours, line("DC3", 0.1, 0.5), line("HardNet-Aff", 3.0)]).startswith("Ahead")
    behind = system_tables.verdict([ours, line("HardNet++", 0.1)])
    assert behind.startswith(
        "Not ahead: DC3, convex (recipe: ours): HardNet++ has the smaller gap, 0.10 % against 0.20"
    )


def test_the_toy_is_learnt_alike_by_the_shift_and_the_projection() -> None:
    shift, nearest = (systems.toy_lines(way, epochs=20, seeds=1)[0] for way in ("HardNet-Aff", "probhard"))
    assert shift["mse"] == pytest.approx(nearest["mse"], rel=1e-6)
    assert max(shift["inequality"], nearest["inequality"]) < 1e-10
