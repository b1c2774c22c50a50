"""How good is first order? The rules for moments of projected laws against exact laws, over curvature times spread.

With the exact law's means m, variances v and own score ``E|Y - Y'| / 2``, all from 10^5 draws Y, a rule's errors are

    rms(mean - m) / sqrt(mean v),     rms(variance - v) / mean v,     E crps(rule, Y) / own score - 1.

Means and variances are those of the marginals, which scores read; the worst mean is in its own sd. Times are of one
step, forward and backward, in CPU seconds for a batch of equal laws. The rules of a case take their steps in turn. The
prose is in ``pages/``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import probhard as ph
from experiments import pictures, templates
from experiments.first_order_cases import CHUNK, GROUPS, Case, cases
from experiments.records import Records
from experiments.table import Line, Lines, Request, Table, measured
from experiments.templates import Figure, MissingFigureError
from probhard.errors import check_choices
from probhard.laws.marginals import Marginals
from probhard.projection import Projected
from probhard.score import crps, crps_ensemble

PAGE = Path(__file__).parent / "pages" / "first-order.md"
KEYS = ("group", "setting", "spread", "rule")
DRAWS, ROUNDS = 100_000, 5
BATCH = {
    "sphere": 64,
    "pme": 8,
    "simplex": 64,
    "hierarchy": 64,
    "flow": 64,
    "rows": 64,
    "portfolio": 64,
}  # of timed steps
FLOOR = 0.01  # smallest loss in per cent that is shown
FEASIBLE = "feasible mean"  # monte-carlo, with marginals about the feasible mean
CURVED: dict[str, dict[str, Any]] = {
    "delta": {"covariance": "delta"},
    "delta, exact": {"covariance": "delta", "curvature": "exact"},
    "second-order": {"covariance": "second-order"},
    "second-order, exact": {"covariance": "second-order", "curvature": "exact"},
    "16 draws": {"covariance": "monte-carlo", "draws": 16},
    "monte-carlo": {"covariance": "monte-carlo"},
    FEASIBLE: {"covariance": "monte-carlo"},
}
CORNERS: dict[str, dict[str, Any]] = {
    name: {"covariance": name} for name in ("delta", "censored", "mean-field", "monte-carlo")
}
POLYHEDRA = {name: rule for name, rule in CORNERS.items() if name != "censored"}
RULES = {
    **{"sphere": CURVED, "pme": CURVED, "simplex": CORNERS, "hierarchy": CORNERS},
    **{"flow": POLYHEDRA, "rows": POLYHEDRA, "portfolio": POLYHEDRA},
}
DISTANCES = ("hierarchy", "flow", "rows")  # groups whose spread is a distance in sds
COLOURS = {
    "delta": pictures.GREY,
    "second-order": pictures.GREEN,
    "16 draws": "#f4b393",
    "monte-carlo": pictures.ORANGE,
    "censored": pictures.BLUE,
    "mean-field": "#7b3fb5",
}
PANELS = {  # title: group, setting, label of the spread
    "sphere, n = 10": ("sphere", "n = 10, mean at radius 1", "sd / radius"),
    "porous medium flux law": ("pme", "mean one sd off", "sd"),
    "simplex, mean at a face": ("simplex", "mean at a face", "sd"),
    "hierarchy and bounds": ("hierarchy", "", "distance of the mean from the bound, in sds"),
    "flows in a grid": ("flow", "box 2 sds away", "distance of the mean from the limits, in sds"),
    "random rows": ("rows", "", "distance of the mean from the limits, in sds"),
}


def measure(case: Case, draws: int = DRAWS, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return a result line per rule.

    Args:
        case: The law and its constraint.
        draws: Of the exact law.
        rounds: Timed steps of every rule, after one to warm up.
    """
    exact = case.exact(draws)
    mean, variance = exact.mean(0), exact.var(0)
    own = float(((exact - mean).abs().mean(0) - crps_ensemble(exact, mean, estimator="fair")).sum())
    rules = RULES[case.group]
    seconds: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(rounds + 1):
        for name, options in rules.items():
            seconds[name].append(_step(case, options))
    lines = []
    for name, options in rules.items():
        with torch.no_grad():
            law = _projected(case, options)
            marginals = law.marginals
            if name == FEASIBLE:
                marginals = Marginals(law.mean, law.scale)
            total = sum(float(marginals.crps(part).sum()) for part in exact.split(CHUNK)) / len(exact)
        lines.append(
            {
                "group": case.group,
                "setting": case.setting,
                "spread": case.spread,
                "rule": name,
                "mean": _rms(marginals.mean - mean) / float(variance.mean().sqrt()),
                "worst": float(((marginals.mean - mean).abs() / variance.sqrt())[variance > 0].max()),
                "variance": _rms(marginals.variance - variance) / float(variance.mean()),
                "crps": total / own - 1,
                "milliseconds": 1e3 * statistics.median(seconds[name][1:]),
                "draws": len(exact),
            }
        )
    return lines


def _projected(case: Case, options: Mapping[str, Any]) -> Projected:
    law = ph.DPPL(**options)((case.mean, case.stddev), case.constraint)
    assert isinstance(law, Projected)
    return law


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _step(case: Case, options: Mapping[str, Any]) -> float:
    """Seconds of a forward and a backward pass of the score, for a batch of equal laws."""
    shape = (BATCH[case.group], len(case.mean))
    mean, stddev = (x.expand(shape).clone().requires_grad_() for x in (case.mean, case.stddev))
    started = time.process_time()
    crps(ph.DPPL(**options)((mean, stddev), case.constraint), case.mean.expand(shape)).sum().backward()
    return time.process_time() - started


def table(request: Request) -> Table:
    """The table: the named groups of cases, by default all."""
    groups, quick = request.names("problems"), request.quick
    check_choices("problem", groups, GROUPS)

    def pieces(_: Records) -> list[Callable[[], Lines]]:
        return [partial(measure, case, *((2000, 1) if quick else ())) for case in cases(groups or GROUPS, quick)]

    return Table("first-order", KEYS, measured(pieces), render, plot)


def render(lines: Lines) -> str:
    """Return the page: what each rule loses against the exact law, and at what cost."""
    values = {
        "crps": Figure(partial(_crps_table, lines)),
        "errors": Figure(partial(_error_table, lines)),
        "cost": _cost_table(lines),
        "ratio": Figure(partial(_ratio, lines)),
        "figure": Figure(partial(_figure, lines)),
    }
    return templates.fill(PAGE, values)


def _crps_table(lines: Lines, group: str) -> str:
    """What every rule loses in CRPS, in per cent of the exact law's own."""
    return _table(lines, group, lambda line: _percent(line["crps"]))


def _error_table(lines: Lines, group: str) -> str:
    """Errors of means and variances of every rule."""
    return _table(lines, group, lambda line: f"{line['mean']:.3f} / {line['variance']:.3f}")


def _table(lines: Lines, group: str, cell: Callable[[Line], str]) -> str:
    own = {(line["setting"], line["spread"], line["rule"]): line for line in lines if line["group"] == group}
    if not own:
        raise MissingFigureError(group)
    rules = [rule for rule in RULES[group] if any(key[2] == rule for key in own)]
    rows = []
    for setting, spread in dict.fromkeys(key[:2] for key in own):
        name = [setting] if setting else []
        rows.append([*name, f"{spread:g}", *(cell(own[setting, spread, rule]) for rule in rules)])
    columns = ["distance in sds" if group in DISTANCES else "sd", *rules]
    return templates.table(["case", *columns] if len(rows[0]) > len(columns) else columns, rows)


def _cost_table(lines: Lines) -> str:
    """The median time of a step of every rule over that of delta, by group."""
    rules = [*(rule for rule in CURVED if rule != FEASIBLE), "censored", "mean-field"]
    rows = []
    for group in dict.fromkeys(line["group"] for line in lines):
        times = [_ratio(lines, f"{group};{rule}") if rule in RULES[group] else "" for rule in rules]
        rows.append([f"{group}, batch of {BATCH[group]}", *times])
    return templates.table(["case", *rules], rows)


def _ratio(lines: Lines, argument: str) -> str:
    """The median time over that of delta: ``group; rule``."""
    group, rule = (part.strip() for part in argument.split(";"))
    times: dict[str, dict[tuple[Any, ...], float]] = {"delta": {}, rule: {}}
    for line in lines:
        if line["group"] == group and line["rule"] in times:
            times[line["rule"]][line["setting"], line["spread"]] = line["milliseconds"]
    if not times[rule]:
        raise MissingFigureError(argument)
    return f"{statistics.median(time / times['delta'][key] for key, time in times[rule].items()):.1f}"


def _figure(lines: Lines, argument: str) -> str:
    """One number: ``group; setting; spread; rule; field``, CRPS in per cent."""
    group, setting, spread, rule, field = (part.strip() for part in argument.split(";"))
    for line in lines:
        if tuple(line[key] for key in KEYS) == (group, setting, float(spread), rule):
            return _percent(line[field]) if field == "crps" else f"{line[field]:.2f}"
    raise MissingFigureError(argument)


def _percent(value: float) -> str:
    return f"{100 * value:.2g}" if 100 * value >= FLOOR else "0"


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: loss in CRPS over the spread, one panel per kind of constraint."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(13, 7), layout="constrained")
    panels = figure.subplots(2, 3).flatten()
    shown = {}
    for axes, (title, (group, setting, label)) in zip(panels, PANELS.items()):
        spreads: list[float] = []
        for rule, colour in COLOURS.items():
            own = [x for x in lines if (x["group"], x["setting"], x["rule"]) == (group, setting, rule)]
            if not own:
                continue
            loss = [max(100 * line["crps"], FLOOR) for line in own]
            spreads = [line["spread"] for line in own]
            (shown[rule],) = axes.plot(spreads, loss, "o-", color=colour, ms=4)
        axes.set(title=title, xlabel=label, ylabel="loss in CRPS, per cent", yscale="log", ylim=(0.8 * FLOOR, 100))
        axes.axhline(1, color="#cccccc", lw=0.8, zorder=0)
        if group not in DISTANCES:
            axes.set_xscale("log")
            axes.set_xticks(spreads, [f"{spread:g}" for spread in spreads])
            axes.minorticks_off()
    figure.legend(list(shown.values()), list(shown), ncols=6, frameon=False, loc="outside lower center")
    pictures.save(figure, path)
