"""The page of reliability: its lines, its command and that it resumes."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.records import Records
from experiments.reliability import runs, tables
from experiments.table import Request

RESULTS = Path(__file__).parents[2] / "results"


def test_the_page_is_that_of_its_lines():
    lines = Records(RESULTS / "reliability.jsonl", tables.KEYS).read()
    assert tables.render(lines) == (RESULTS / "reliability.md").read_text()


def test_nothing_is_silently_infeasible():
    lines = Records(RESULTS / "reliability.jsonl", tables.KEYS).read()
    own = [line for line in lines if line["group"] == runs.OURS]
    for field in ("silent", "nan", "bad_gradients", "bare"):
        assert not any(line.get(field) for line in own), field
    assert all(line["ended"] in ("read", "rejected") for line in lines if line["group"].startswith(runs.READING))


def test_a_run_resumes(tmp_path):
    request = Request("reliability", tmp_path, problems="cases,reader csv")
    for count, expected in ((3, 3), (6, 6)):
        list(tables.table(request, count).make(request))
        lines = list(map(json.loads, (tmp_path / "reliability.jsonl").read_text().splitlines()))
        assert sum(line["group"] == runs.OURS for line in lines) == expected
    assert "| variances within" in (tmp_path / "reliability.md").read_text()
    assert (tmp_path / "reliability.png").stat().st_size > 5_000
