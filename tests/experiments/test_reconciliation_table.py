"""The table of reconciliation alone: a job on a small set, and its page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from experiments.forecasting import nine_sets, reconciliation_tables
from experiments.forecasting.nine_sets import RollingSet
from experiments.forecasting.reconciliation import KEYS as LINE_KEYS
from experiments.forecasting.reconciliation import OURS, PAST, THEIRS, Job

from forecasting.helpers import KEYS, frame
from probhard.forecasting import from_frame


def test_a_job_gives_all_rows_and_the_page_their_ratios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("hierarchicalforecast")
    monkeypatch.setitem(nine_sets.SETS, "tourism", RollingSet(4, 2, 4, 2, refit=False))
    monkeypatch.setattr(nine_sets, "load_set", lambda name: from_frame(frame(70), KEYS))
    job = Job("tourism")
    lines = job.run(tmp_path / "unit")
    assert [{key: line[key] for key in LINE_KEYS} for line in lines] == [
        {"dataset": "tourism", "method": row, "origin": number} for number in (1, 0) for row in (*OURS, *THEIRS)
    ]
    assert all(0 < line["crps"] < 1 and not line["failed"] for line in lines)
    assert all(0 <= number <= 1 for line in lines if line["method"] == PAST for number in line["metric"].values())
    assert min(line["smallest_bounded"] for line in lines if "smallest_bounded" in line) >= 0
    page = reconciliation_tables.render(lines)
    ours, theirs = (np.mean([line["crps"] for line in lines if line["method"] == row]) for row in (PAST, "mint_shrink"))
    row = next(text for text in page.splitlines() if text.startswith(f"| {PAST} |") and text.count("|") == 6)
    assert row.endswith(f" {100 * np.log(ours / theirs):+.1f} % |")
    assert "{" not in page
