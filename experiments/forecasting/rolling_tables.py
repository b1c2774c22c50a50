"""Result lines of the rolling table as a page; the prose is in ``pages/``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import ttest_rel

from experiments import templates
from experiments.forecasting import rows
from experiments.forecasting.nine_sets import SETS
from experiments.forecasting.rolling_runs import (
    ABLATIONS,
    DEFAULT,
    GROUPS,
    KEYS,
    LEVEL,
    NO_NETWORK,
    NO_POOL,
    NO_STEPS,
    RIVALS,
    SAMPLES,
    alone,
)
from experiments.forecasting.tables import TITLES
from experiments.grid import Grid
from experiments.records import Records
from experiments.table import Line, Request, Table, resumed

NAME = "forecasting-rolling"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
NAMES = {**TITLES, "swiss_stays": "Stays", "nsw_offences": "Offences", "aus_births": "Births", "ercot_hourly": "ERCOT"}
DEEPVAR = {"base": "DeepVAR", "probhard-or": "DeepVAR, Or", "probhard-ob": "DeepVAR, Ob"}
RESAMPLES, TIE = 2000, 0.01
OVERLAPPING = ("tourism",)  # windows that share rows: not tested

Scores = dict[tuple[str, str], dict[int, float]]  # CRPS by (row, set) and origin


def table(request: Request) -> Table:
    """The table, with its data sets; DeepVAR's lines are read from the ``forecasting.jsonl`` beside its own."""

    def grid(path: Path) -> Grid:
        from experiments.forecasting import rolling_runs

        return rolling_runs.grid(path, request.names("problems"))

    def page(lines: Sequence[Line]) -> str:
        return render(lines, Records(request.folder / "forecasting.jsonl", rows.KEYS).read())

    return Table(NAME, KEYS, resumed(grid, request), page)


def render(lines: Sequence[Line], networks: Sequence[Line] = ()) -> str:
    """Return the page.

    Args:
        lines: Result lines of the table.
        networks: Result lines of the table of networks, whose rolling origins are the same.
    """
    scores = collect(lines, networks)
    sets = [name for name, chosen in SETS.items() if len(scores.get((DEFAULT, name), {})) == chosen.origins]
    lines = [line for line in lines if line["dataset"] in sets]
    missing = [NAMES[name] for name in SETS if name not in sets]
    values = {
        "count": len(lines),
        "level": f"{100 * LEVEL:.0f} %",
        "samples": SAMPLES,
        "missing": f"Not run yet, or not at all origins: {', '.join(missing)}." if missing else "",
        "behind": _behind(scores, sets),
        "first": f"{sum(_rank(scores, name)[2] <= 1 + TIE for name in sets)} of {len(sets)}",
        "crps": _crps(scores, sets),
        "ablations": _crps(scores, sets, (DEFAULT, *ABLATIONS, NO_STEPS, NO_POOL, NO_NETWORK)),
        "flips": _flips(scores, sets),
        "coverage": _coverage(lines, "inside"),
        "sums": _coverage(lines, "inside_sums"),
        "sum_shares": ", ".join(f"{_held(lines, group)} ({group})" for group in GROUPS),
        "top_share": _held([line for line in lines if "inside_sums" in line], GROUPS[0], "inside"),
        "origins": ", ".join(f"{NAMES[name]} {len(scores[DEFAULT, name])}" for name in sets),
    }
    return templates.fill(PAGE, values)


def collect(lines: Sequence[Line], networks: Sequence[Line] = ()) -> Scores:
    """CRPS by row, set and origin; networks are averaged over seeds, on sets whose origins are all there."""
    scores: Scores = {}
    for line in lines:
        scores.setdefault((line["method"], line["dataset"]), {})[line["origin"]] = line["crps"]
    seeds: dict[tuple[str, str, int], list[float]] = {}
    for line in networks:
        if line["window"] == "rolling" and line["method"] in DEEPVAR and (DEFAULT, line["dataset"]) in scores:
            seeds.setdefault((DEEPVAR[line["method"]], line["dataset"], line["origin"]), []).append(line["crps"])
    for (row, dataset, origin), values in seeds.items():
        if origin in scores[DEFAULT, dataset]:
            scores.setdefault((row, dataset), {})[origin] = float(np.mean(values))
    whole = {key: found for key, found in scores.items() if (DEFAULT, key[1]) in scores}
    return {key: found for key, found in whole.items() if set(found) == set(scores[DEFAULT, key[1]])}


def rows_of(scores: Scores) -> list[str]:
    """Names of the rows that the default is compared with, in the order of the table."""
    members = sorted({row for row, _ in scores if row.endswith(alone(""))})
    return [*members, *RIVALS, *(row for row in DEEPVAR.values() if any(key[0] == row for key in scores))]


def _rank(scores: Scores, dataset: str) -> tuple[str, float, float]:
    """The best other row of a set, its mean CRPS, and the default's relative to it."""
    means = {row: mean(scores[row, dataset]) for row in rows_of(scores) if (row, dataset) in scores}
    best = min(means, key=means.__getitem__)
    return best, means[best], mean(scores[DEFAULT, dataset]) / means[best]


def mean(found: dict[int, float]) -> float:
    """Mean over origins."""
    return float(np.mean(list(found.values())))


def difference(scores: Scores, row: str, dataset: str) -> float:
    """p-value of a paired t-test between the default and a row over origins; NaN where windows share rows."""
    ours, theirs = scores[DEFAULT, dataset], scores[row, dataset]
    if dataset in OVERLAPPING or len(ours) < 3:
        return float("nan")
    return float(ttest_rel([ours[k] for k in sorted(ours)], [theirs[k] for k in sorted(ours)]).pvalue)


def sign_flips(ratios: Sequence[float]) -> float:
    """One-sided p-value of a mean below 0: the share of sign patterns with a mean as small, all enumerated."""
    values = np.asarray(ratios)
    signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    means = (signs * np.abs(values)).mean(1)
    return float((means <= values.mean() + 1e-12).mean())


def _behind(scores: Scores, sets: Sequence[str]) -> str:
    rows = []
    for name in sets:
        best, value, ratio = _rank(scores, name)
        if ratio > 1:
            p = difference(scores, best, name)
            tested = "not tested" if np.isnan(p) else f"{p:.2g}"
            rows.append([NAMES[name], best, f"{100 * value:.3f}", f"{100 * value * ratio:.3f}", f"{ratio:.3f}", tested])
    if not rows:
        return "None: the default has the smallest mean CRPS on every set."
    return templates.table(["set", "best row", "its CRPS, %", "ours", "ratio", "p of the difference"], rows)


def _crps(scores: Scores, sets: Sequence[str], chosen: Sequence[str] | None = None) -> str:
    table = []
    for row in chosen or (DEFAULT, *rows_of(scores)):
        cells = []
        for name in sets:
            if (row, name) not in scores:
                cells.append("")
                continue
            text = f"{100 * mean(scores[row, name]):.3f}"
            others = [mean(scores[r, name]) for r in (DEFAULT, *rows_of(scores)) if (r, name) in scores]
            best = chosen is None and mean(scores[row, name]) <= min(others)
            cells.append(f"**{text}**" if best else text)
        table.append([row, *cells])
    return templates.table(["row", *(NAMES[name] for name in sets)], table)


def _flips(scores: Scores, sets: Sequence[str]) -> str:
    table = []
    for row in (*rows_of(scores), *ABLATIONS, NO_STEPS, NO_POOL, NO_NETWORK):
        shared = [name for name in sets if (row, name) in scores]
        if not shared:
            continue
        ratios = [float(np.log(mean(scores[DEFAULT, name]) / mean(scores[row, name]))) for name in shared]
        wins = sum(ratio < 0 for ratio in ratios)
        table.append([row, f"{np.mean(ratios):+.3f}", f"{wins} of {len(shared)}", f"{sign_flips(ratios):.3f}"])
    return templates.table(["compared with", "mean log ratio", "ahead on", "p"], table)


def _coverage(lines: Sequence[Line], field: str) -> str:
    """Shares inside the interval by row and group, pooled over sets with equal weight, with bootstrap intervals."""
    table = []
    for row in (DEFAULT, *dict.fromkeys(line["method"] for line in lines if line["method"] != DEFAULT)):
        found = [line for line in lines if line["method"] == row and field in line]
        if not found:
            continue
        cells = [_share([line for line in found if line[field][group][1]], field, group) for group in GROUPS]
        table.append([row, *cells])
    return templates.table(["row", *GROUPS], table)


def _held(lines: Sequence[Line], group: str, field: str = "inside_sums") -> str:
    """Share of sums over the horizon inside the default's intervals, without its own interval."""
    found = [line for line in lines if line["method"] == DEFAULT and field in line]
    return _share([line for line in found if line[field][group][1]], field, group).split(" ")[0]


def _share(lines: Sequence[Line], field: str, group: str) -> str:
    """Mean over sets of the shares inside, and its interval by resampling the origins of each set."""
    if not lines:
        return ""
    by_set: dict[str, list[float]] = {}
    for line in lines:
        inside, count = line[field][group]
        by_set.setdefault(line["dataset"], []).append(inside / count)
    random, drawn = np.random.default_rng(0), []
    for shares in by_set.values():
        values = np.asarray(shares)
        drawn.append(values[random.integers(len(values), size=(RESAMPLES, len(values)))].mean(1))
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    center = np.mean([np.mean(shares) for shares in by_set.values()])
    return f"{100 * center:.0f} ({100 * low:.0f} to {100 * high:.0f})"
