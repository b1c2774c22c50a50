"""Templates of result pages, and the committed pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments.conformal import tables as conformal
from experiments.records import Records
from experiments.templates import Figure, MissingFigureError

from benchmarks import growth_report, runner
from experiments import first_order, templates, timing

RESULTS = Path(__file__).parents[2] / "results"
TEMPLATE = """# Title

## First

Always {count} lines.

Introduces a figure:

{figure:a b}

## Second

{table}

## Third

{figure:missing}
"""


def figure(argument: str) -> str:
    if argument == "missing":
        raise MissingFigureError(argument)
    return f"<{argument}>"


def test_blocks_without_figures_and_bare_headings_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(TEMPLATE)
    values = {"count": 3, "figure": Figure(figure), "table": templates.table(["a", "b"], [["1", "2"]])}
    page = templates.fill(tmp_path / "page.md", values)
    first = "# Title\n\n## First\n\nAlways 3 lines.\n\nIntroduces a figure:\n\n<a b>\n"
    assert page == f"{first}\n## Second\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    (tmp_path / "page.md").write_text(TEMPLATE.replace("a b", "missing"))
    page = templates.fill(tmp_path / "page.md", {**values, "table": ""})
    assert page == "# Title\n\n## First\n\nAlways 3 lines.\n"  # an introduction goes with its figure


def test_a_placeholder_without_a_value_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("{counts} lines")
    with pytest.raises(KeyError, match="counts"):
        templates.fill(tmp_path / "page.md", {"count": 3})


@pytest.mark.parametrize("table", ["pde-linear", "pde-nonlinear", "tvd"])
def test_committed_pages_of_fields_are_what_their_lines_give(table: str) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    from experiments.pde import tables

    lines = Records(RESULTS / f"{table}.jsonl", tables.TABLES[table].keys).read()
    page = (RESULTS / f"{table}.md").read_text()
    assert tables.render(table, lines) == page
    blocks = (tables.PAGES / f"{table}.md").read_text().count("\n\n")
    assert page.split("## All rows")[0].count("\n\n") >= blocks - 2  # no finding was left out


def test_committed_pages_of_forecasts_and_times_are_what_their_lines_give() -> None:
    from experiments.forecasting import rows, tables

    lines = Records(RESULTS / "forecasting.jsonl", rows.KEYS).read()
    assert tables.render(lines) == (RESULTS / "forecasting.md").read_text()
    lines = Records(RESULTS / "timing.jsonl", timing.KEYS).read()
    assert timing.render(lines) == (RESULTS / "timing.md").read_text()


def test_the_committed_page_of_conformal_sets_is_what_its_lines_give() -> None:
    lines = Records(RESULTS / "conformal.jsonl", conformal.KEYS).read()
    page = (RESULTS / "conformal.md").read_text()
    assert conformal.render(lines) == page
    assert page.count("\n\n") == conformal.PAGE.read_text().count("\n\n")  # no finding was left out


def test_the_committed_page_on_first_order_is_what_its_lines_give() -> None:
    lines = Records(RESULTS / "first-order.jsonl", first_order.KEYS).read()
    page = (RESULTS / "first-order.md").read_text()
    assert first_order.render(lines) == page
    assert page.count("\n\n") == first_order.PAGE.read_text().count("\n\n")  # no finding was left out


def test_committed_pages_of_speed_are_what_their_lines_give(tmp_path: Path) -> None:
    for path in (RESULTS / "speed").glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    runner.render(tmp_path)
    growth_report.write(tmp_path)
    for name in ("speed.md", "growth.md"):
        assert (tmp_path / name).read_text() == (RESULTS / "speed" / name).read_text()
