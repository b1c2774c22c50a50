"""Result lines of the forecasting experiments as tables, beside the paper's figures.

The pooled CRPS is shown times 1000, as the paper does. On the rolling window methods are compared origin by origin: the
difference of two rows has as many values as there are origins, each a mean over seeds, tested by a paired t-test.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from experiments.forecasting.runs import CLASSICAL, DATASETS, NAIVE, SETTINGS

Line = Mapping[str, Any]

TITLES = {"labour": "Labour", "tourism": "Tourism", "tourism_large": "Tourism-L", "traffic": "Traffic", "wiki": "Wiki"}
PAPER: dict[str, tuple[float | None, ...]] = {  # CRPS times 1000, in the order of DATASETS
    "probhard-ob": (36.1, 98.9, 155.2, 55.0, 212.1),
    "probhard-or": (28.6, 82.4, 156.4, 60.6, 215.8),
    "probconserv": (45.8, 100.7, 176.9, 71.0, 264.7),
    "hier-e2e": (50.5, 103.1, 161.3, 41.8, 216.5),
    "arima-naivebu": (45.3, 113.8, 174.1, 80.8, 377.0),
    "ets-naivebu": (43.2, 100.8, 169.0, 66.5, 467.0),
    "ets-permbu-mint": (39.3, 77.1, None, 67.7, 281.0),
    "base": (38.2, 92.5, 158.1, 40.0, 229.4),
}
BEST = (28.6, 77.1, 155.2, 40.0, 212.1)
SIGNIFICANT = 0.05
TRAFFIC = (  # checked in tests/test_forecasting_experiments.py
    "Traffic's rows repeat: from row 267 on each equals, to the last digit, the row 267 days before, so what is to be\n"
    "forecast lies in the history. There a small CRPS shows memory as much as skill."
)


def write(folder: Path, lines: Sequence[Line]) -> list[Path]:
    """Write the tables as Markdown; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "forecasting.md"
    page.write_text(render(lines))
    return [page]


def render(lines: Sequence[Line]) -> str:
    """Both windows, and what the draws obey."""
    paper = [line for line in lines if line["window"] == "paper"]
    rolling = [line for line in lines if line["window"] == "rolling"]
    parts = [
        "# Hierarchical forecasting",
        "",
        f"Rendered by `probhard bench forecasting --render` from `forecasting.jsonl`, {len(lines)} lines.",
        "",
        "## One window, as in the paper",
        "",
        "Pooled CRPS times 1000, mean +- population standard deviation over seeds; the paper's figure in brackets.",
        "Naive and classical rows have one seed. One window cannot rank methods: see the rolling evaluation below.",
        "The paper's classical rows were made with R, ours with statsforecast. softc has the penalty 1, not tuned.",
        "ARIMA's orders of series of over 150 rows are compared by conditional sums of squares, as R does by default;",
        "on Wiki a full comparison gives naivebu 362.5 and permbu-mint 368.7.",
        "",
        TRAFFIC,
        "",
        *_scores(paper, PAPER),
        "",
        "## What the draws obey",
        "",
        "Largest relative incoherence, and smallest value, over all draws, horizons and seeds.",
        "",
        *_certificates(paper),
        "",
    ]
    if rolling:
        parts += [
            "## Rolling origins",
            "",
            "Mean over origins (and seeds); +- is the standard deviation over origins; brackets tell how many origins",
            "there are where a row has fewer than the others.",
            "",
            *_scores(rolling, {}),
            "",
            *_tests(rolling),
            "",
        ]
    return "\n".join(parts)


def _methods(lines: Sequence[Line]) -> list[str]:
    """Neural rows first, then classical and naive ones, each in a fixed order."""
    found = {line["method"] for line in lines}
    fixed = [*CLASSICAL, *NAIVE]
    return [*sorted(found - set(fixed)), *(name for name in fixed if name in found)]


def _values(lines: Sequence[Line], method: str, dataset: str, over: str) -> list[float]:
    """One value for each seed or origin, the mean over the other."""
    groups: dict[Any, list[float]] = {}
    for line in lines:
        if line["method"] == method and line["dataset"] == dataset:
            groups.setdefault(line[over], []).append(1000 * line["crps"])
    return [statistics.fmean(groups[key]) for key in sorted(groups)]


def _scores(lines: Sequence[Line], paper: Mapping[str, Sequence[float | None]]) -> list[str]:
    over = "seed" if all(line["window"] == "paper" for line in lines) else "origin"
    text = _head()
    for method in _methods(lines):
        cells = []
        for index, dataset in enumerate(DATASETS):
            values = _values(lines, method, dataset, over)
            cell = f"{statistics.fmean(values):.1f}" if values else ""
            cell += f" +- {statistics.pstdev(values):.1f}" if len(values) > 1 else ""
            few = over == "origin" and 0 < len(values) < SETTINGS[dataset].origins
            cell += f" ({len(values)} origins)" if few else ""
            printed = paper[method][index] if method in paper else None
            cells.append(cell + (f" ({printed:g})" if printed is not None else ""))
        text.append(f"| {method} | {' | '.join(cells)} |")
    if paper:
        text.append(f"| best of the paper | {' | '.join(f'{value:g}' for value in BEST)} |")
    return text


def _certificates(lines: Sequence[Line]) -> list[str]:
    text = _head()
    for method in _methods(lines):
        cells = []
        for dataset in DATASETS:
            own = [line for line in lines if line["method"] == method and line["dataset"] == dataset]
            worst = max((line["incoherence_relative"] for line in own), default=None)
            smallest = min((line["smallest_draw"] for line in own), default=None)
            cells.append("" if worst is None else f"{worst:.0e}, {smallest:.3g}")
        text.append(f"| {method} | {' | '.join(cells)} |")
    return text


def _tests(lines: Sequence[Line]) -> list[str]:
    """For every neural row, the classical and naive rows that it does not beat significantly."""
    neural = [method for method in _methods(lines) if method not in (*CLASSICAL, *NAIVE)]
    others = [method for method in _methods(lines) if method in (*CLASSICAL, *NAIVE)]
    text = [
        f"Rows that are not beaten at the {SIGNIFICANT:.0%} level (paired t-test over shared origins).",
        "Tourism's windows share most of their rows, so its origins are no independent trials, and nothing is tested:",
        "",
        *_head(),
    ]
    for method in neural:
        cells = []
        for dataset in DATASETS:
            if SETTINGS[dataset].step is not None:  # rows between origins, fewer than a window has
                cells.append("not tested" if _by_origin(lines, method, dataset) else "")
                continue
            left = [other for other in others if not _beats(lines, method, other, dataset)]
            cells.append((", ".join(left) or "none") if _by_origin(lines, method, dataset) else "")
        text.append(f"| {method} | {' | '.join(cells)} |")
    return text


def _beats(lines: Sequence[Line], method: str, other: str, dataset: str) -> bool:
    pairs = [_by_origin(lines, name, dataset) for name in (method, other)]
    shared = sorted(set(pairs[0]) & set(pairs[1]))
    if len(shared) < 2:
        return not pairs[1]  # a row that is not there cannot stand
    first, second = ([pair[origin] for origin in shared] for pair in pairs)
    return bool(stats.ttest_rel(first, second, alternative="less").pvalue < SIGNIFICANT)


def _by_origin(lines: Sequence[Line], method: str, dataset: str) -> dict[int, float]:
    own = [line for line in lines if line["method"] == method and line["dataset"] == dataset]
    return {
        origin: statistics.fmean(line["crps"] for line in own if line["origin"] == origin)
        for origin in {line["origin"] for line in own}
    }


def _head() -> list[str]:
    return [f"| method | {' | '.join(TITLES[name] for name in DATASETS)} |", f"|---|{'---|' * len(DATASETS)}"]
