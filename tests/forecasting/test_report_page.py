"""The report page: charts against the numbers, hostile names, and a real browser at two widths."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from forecasting.helpers import TWO_GROUPS
from probhard.errors import MissingExtraError
from probhard.forecasting import HierarchicalData
from probhard.forecasting.report import charts, formats, rivals
from probhard.forecasting.report import page as page_module
from probhard.forecasting.report.backtest import Backtest, backtest, held_out
from probhard.forecasting.report.moves import Move
from probhard.forecasting.report.page import Report

EVIL = ["<script>window.hacked = 1</script>", '"><img src=x onerror="window.hacked = 2">', "{{ 7 * 7 }}", "</template>"]
NAMES = ["Total", EVIL[0], "B" * 70, *EVIL[1:], "plain"]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Report:
    """A page of a history with a gap, random draws and hostile names; no network is trained."""

    def missing(*args: object) -> None:
        raise MissingExtraError("statsforecast", "forecast", "A classical forecast")

    monkeypatch.setattr(rivals, "base_forecast", missing)
    random = np.random.default_rng(0)
    bottom = 100 + 10 * np.arange(4) + random.normal(size=(40, 4)).cumsum(0)
    bottom[20, 0] = np.nan
    tags = {"total": NAMES[:1], "<b>level</b>": NAMES[1:3], "bottom": NAMES[3:]}
    index = pd.period_range("2020-01", periods=40, freq="M")
    data = HierarchicalData.from_matrix(bottom, TWO_GROUPS, index, NAMES, tags, season=12, name="<i>shop</i>")

    def draws(known: HierarchicalData) -> np.ndarray:
        return (known.bottom[-1] + random.normal(size=(80, 5, 4)).cumsum(1)) @ TWO_GROUPS.T

    tested = backtest("probhard-or", draws, held_out(data, 5), [0.8, 0.95])
    certificate = {
        "feasible": True,
        "checked": 405,
        "infeasible": 0,
        "incoherence": {"largest": 1e-13, "relative": 2.5e-16, "smallest_draw": 88.25},
        "after": {"relative": 1e-15, "largest": 512345.6},
        "tolerance": 1e-9,
        "input": "<u>shop</u>.csv",
        "input_sha256": "0" * 64,
        "versions": {"probhard": "0.1.0"},
        "packages": {},
    }
    settings = {"nonnegative": True, "seed": 0, "lags_seq": [1, 12], "note": "<u>x</u>", "upper": None}
    notes = list(tested.left_out.values())
    extras = {
        "warnings": ["<u>warned</u>"],
        "learned": ["<u>learned</u>"],
        "weights": {"ets": 0.7, "<u>net</u>": 0.3},
        "moves": {0: Move(100.0, 103.5, [(EVIL[0], 4.0), ("plain", -0.5)])},
    }
    return Report(data, "probhard-or", [80.0, 95.0], draws(data), tested, certificate, settings, notes, **extras)


class Parts(HTMLParser):
    """Tags with their attributes, and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def points(path: str) -> np.ndarray:
    return np.array([[float(x) for x in pair.split(",")] for pair in re.findall(r"[ML]([-\d.]+,[-\d.]+)", path)])


def test_page_is_one_file_and_names_are_texts(report: Report) -> None:
    page = report.html()
    parts = Parts(page)
    assert [tag for tag, _ in parts.tags].count("script") == 1
    assert not [tag for tag, _ in parts.tags if tag in ("img", "link", "iframe", "b", "u")]
    assert not [attribute for _, attributes in parts.tags for attribute in attributes if attribute.startswith("on")]
    assert not [attributes for _, attributes in parts.tags if "src" in attributes or "href" in attributes]
    assert "http:" not in page
    assert "https:" not in page
    texts = " ".join(parts.texts)
    assert all(name in texts for name in [*NAMES, "<i>shop</i>", "<b>level</b>", "<u>shop</u>.csv", "<u>x</u>"])
    assert "statsforecast, which is not installed" in texts
    assert texts.count("2.50e-16") == 1


def test_tables_have_headers_and_charts_have_words(report: Report) -> None:
    parts = Parts(report.html())
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in parts.tags if tag == "th")
    charts = [attributes for tag, attributes in parts.tags if tag == "svg"]
    assert len(charts) == len(report.picked) + len(NAMES) + 1 + len(report.data.levels)  # one PIT a level, and of all
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in charts)


def test_chart_shows_the_numbers(report: Report) -> None:
    chart = report.chart(0)
    total = report.data.values[-24:, 0]
    observed = points(chart["observed"])
    known = ~np.isnan(total)
    assert len(observed) == known.sum() == 23  # one gap
    assert chart["observed"].count("M") == 2
    slope, start = np.polyfit(total[known], observed[:, 1], 1)
    np.testing.assert_allclose(start + slope * total[known], observed[:, 1], atol=0.06)
    assert slope < 0  # larger values are higher
    tested, forecast = chart["fans"]
    assert [fan["css_class"] for fan in report.chart(0, 3)["fans"]] == ["backtest"] * 3 + ["forecast"]
    for fan, draws, before in ((tested, report.tested.draws[-1], total[-6]), (forecast, report.draws, total[-1])):
        mean = np.append(before, draws[..., 0].mean(0))
        np.testing.assert_allclose(points(fan["mean"])[:, 1], start + slope * mean, atol=0.15)
        wide, narrow = (points(band)[:, 1] for band in fan["bands"])
        upper = np.append(before, np.percentile(draws[..., 0], 97.5, axis=0))
        lower = np.append(before, np.percentile(draws[..., 0], 2.5, axis=0))
        np.testing.assert_allclose(wide, start + slope * np.append(upper, lower[::-1]), atol=0.15)
        assert (narrow[1:6] > wide[1:6]).all()  # the 80 % band lies inside
    assert [label for _, label in chart["periods"]][::3] == ["2021-05", "2023-09"]
    for y, label in chart["ticks"]:
        assert y == pytest.approx(start + slope * float(label), abs=0.15)


def test_nodes_that_matter(report: Report) -> None:
    nodes = [node for node, _, _ in report.picked]
    assert nodes[0] == 0
    assert 6 in nodes  # the largest bottom node
    scores = report.tested.scores
    gain = scores["seasonal naive"].nodes - scores["probhard-or"].nodes
    improved = [node for node, _, why in report.picked if why == "most improved"]
    assert all(gain[node] > 0 for node in improved)
    best = [int(level[np.argmax(gain[level])]) for level in report.data.levels.values()]
    assert {node for node in best if gain[node] > 0} <= set(nodes)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234567.0, "1,234,567"), (12.3456, "12.35"), (4.8e-16, "4.80e-16"), (None, "–"), (-0.05, "-0.05000")],  # noqa: RUF001
)
def test_numbers(value: float | None, text: str) -> None:
    assert formats.number(value) == text


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 1, ["0.0", "0.5", "1.0"]),
        (135e3, 147e3, ["135k", "140k", "145k"]),
        (-2e6, 7e6, ["-2M", "0M", "2M", "4M", "6M"]),
        (3, 3, ["2.90", "2.95", "3.00", "3.05", "3.10"]),
    ],
)
def test_axes(low: float, high: float, labels: list[str]) -> None:
    bottom, top, ticks = charts.axis(low, high)
    assert bottom < low
    assert top > high
    assert [label for _, label in ticks] == labels


def test_many_nodes_are_cut_to_the_largest(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MOST_NODES", 3)
    page = report.html()
    assert page.count("<option") == page.count("<template") == 3
    assert "The 4 smallest nodes" in page


def test_warnings_come_first_then_a_rival_that_is_better(report: Report) -> None:
    page = report.html()
    text = Parts(page).texts
    joined = " ".join(text)
    order = [page.index(part) for part in ("&lt;u&gt;warned", 'class="banner', "Selected nodes", "learned&lt;")]
    assert order[1] < order[0] < order[2] < order[3]
    assert report.tested.verdict in joined
    assert "Base forecast 100.0 a step, coherent 103.5 (+3.500)" in joined
    assert "ets" in joined
    assert "70 %" in joined


@pytest.mark.parametrize(("ours", "css", "words"), [(3.0, "bad", "A rival was better"), (1.0, "good", "Better than")])
def test_verdicts(report: Report, ours: float, css: str, words: str) -> None:
    target = np.stack([test.values for test in report.tested.tests])

    def forecast(known: HierarchicalData) -> np.ndarray:
        window = len(known.index) // 5 - 5  # tests start at rows 25, 30 and 35
        return target[window] * (1 + 0.1 * (ours - 1)) + np.zeros((5, 1, 1))

    tested = backtest("probhard-or", forecast, held_out(report.data, 5), [0.8])
    changed = dataclasses.replace(report, tested=tested)
    assert changed.verdict_class == css
    assert tested.verdict.startswith(words)
    assert f'class="banner {css}">{words}' in changed.html()


def test_without_a_backtest(report: Report) -> None:
    page = dataclasses.replace(report, tested=None).html()
    assert "No backtest was made" in page
    assert "PIT" not in page
    assert page.count("<figure>") == len(dataclasses.replace(report, tested=None).picked) + len(NAMES)


def test_left_out_and_record(report: Report) -> None:
    assert isinstance(report.tested, Backtest)
    record = report.tested.record()
    assert list(record["scores"]) == ["probhard-or", "seasonal naive"]
    assert set(record["left_out"]) == {"AutoETS bottom-up", "AutoETS + MinT-shrink", "AutoETS + OLS"}
    assert "statsforecast" in record["left_out"]["AutoETS bottom-up"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser to drive")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium was found, so the page is not opened in a browser")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(browser: Any, report: Report, tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(report.html(), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 800})
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert page.title() == "Forecast of <i>shop</i>"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shown = page.locator("#view .observed").get_attribute("d")
    assert page.locator("#view figcaption strong").inner_text() == "Total"
    for node, name in enumerate(NAMES[1:], 1):
        page.select_option("#node", str(node))
        assert page.locator("#view figcaption strong").inner_text() == name
        assert page.locator("#view .observed").get_attribute("d") == report.chart(node)["observed"] != shown
        assert not page.locator("#view .move").count()  # the total alone has one
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    tables = "[...document.querySelectorAll('.wide')].every(box => box.scrollWidth <= box.clientWidth)"
    assert page.evaluate(tables)  # nothing is cut off
    box = page.locator("#view svg").bounding_box()
    assert box["width"] > 250
    assert page.evaluate("window.hacked") is None
    # the policy blocks a script that got into the page
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'hacked = 3'}))")
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in text for text in noise)
    assert len(noise) == 1
    assert asked == [path.as_uri()]
    page.close()
