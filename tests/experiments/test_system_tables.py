"""The page of published systems: what it says of lines that are made up, and one quick job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments.forecasting import system_tables
from experiments.table import Request


def line(method: str, crps: float, dataset: str = "labour", window: str = "paper", origin: int = 0) -> dict:
    return {
        **{"dataset": dataset, "method": method, "seed": 0, "window": window, "origin": origin},
        **{"crps": crps, "incoherence_relative": 1e-16, "smallest_draw": 0.5},
    }


def test_systems_that_are_ahead_are_named_first():
    lines = [line("clover", 0.02), line("dpmn", 0.04), line("probhard-or", 0.03), line("hier-e2e", 0.025)]
    page = system_tables.render(lines)
    assert "| probhard-or | Labour (20.0, 30.0) | none of those run |  |" in page
    assert "| clover against hier-e2e | -20.0 |  |  |  |  | -20.0 |" in page
    assert "| dpmn | 1e-16, 0.5 |" in page.replace("  ", " ")
    assert page.index("Labour (20.0, 30.0)") < page.index("## One window")
    assert "- dpmn, paper window: Tourism, Tourism-L, Traffic, Wiki" in page
    assert "- copdeepvar, paper window: Labour, Tourism, Tourism-L\n" in page
    assert "At rolling origins" not in page  # nothing was run there


def test_our_lines_come_from_the_other_tables(tmp_path: Path):
    networks = [line("probhard-or", 0.03), {**line("probhard-or", 9.0), "seed": 4}, line("ets-mint", 0.01)]
    default = [{"dataset": "labour", "method": m, "origin": k, "crps": 0.01} for m in ("probhard", "x") for k in (0, 1)]
    for name, lines in (("forecasting", networks), ("forecasting-rolling", default)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(made) + "\n" for made in lines))
    found = system_tables.companions(tmp_path)
    assert [(made["method"], made["window"], made["origin"]) for made in found] == [
        ("probhard-or", "paper", 0),
        ("probhard-or", "paper", 0),
        ("probhard", "rolling", 0),
        ("probhard", "paper", 0),
        ("probhard", "rolling", 1),
    ]
    page = system_tables.render([line("clover", 0.02), *found])
    assert "| probhard-or | 30.0 (4515.0) |" in page  # the seed of the systems, and all seeds
    assert "| probhard | 10.0 |" in page


def test_stored_lines_give_the_stored_page():
    folder = Path(__file__).parents[2] / "results"
    stored = folder / "systems-forecasting.jsonl"
    lines = [json.loads(text) for text in stored.read_text().splitlines()]
    page = system_tables.table(Request("systems-forecasting", folder)).render(lines)
    assert page == (folder / "systems-forecasting.md").read_text()


@pytest.mark.parametrize("system", ["dpmn", "clover", "copdeepvar"])
def test_a_quick_job_gives_coherent_draws(system: str, tmp_path: Path, hierarchical_data: Path):
    from experiments.forecasting.system_runs import Job

    job = Job("tourism", system, quick=True)
    (made,) = job.run(tmp_path, progress=False)
    assert {key: made[key] for key in job.expected()[0]} == job.expected()[0]
    assert 0 < made["crps"] < 1
    assert made["incoherence_relative"] < 1e-11
    assert system != "dpmn" or made["smallest_draw"] >= 0
