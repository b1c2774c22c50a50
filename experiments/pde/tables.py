"""Result lines as tables and figures, beside the paper's own figures.

Nothing is computed here but means and spreads over seeds: what a table shows is what its file of lines holds, beside
figures of the paper and ``NEAREST``, which no training can change.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.pde.runs import TABLES

Line = Mapping[str, Any]

UNITS = {
    "pde-linear": {"mse": 1e-5, "ce_mean": 1e-3, "ce_draws": 1e-3, "crps": 1e-3},
    "pde-nonlinear": {"mse": 1e-6, "ce_mean": 1e-3, "ce_draws": 1e-3, "crps": 1e-4},
    "tvd": {"mse": 1e-5, "ce_mean": 1e-3, "crps": 1e-3, "negative": 1e-2, "outside_bounds": 1e-2},
}
TITLES = {
    "mse": "MSE",
    "ce_mean": "CE of the mean",
    "ce_draws": "CE, worst draw",
    "crps": "CRPS",
    "negative": "negative values of draws",
    "outside_bounds": "values beyond bounds",
    "mse_free": "MSE where free",
    "covered_90": "exact values in 90 % bands",
    "infeasible": "flagged draws",
    "ce_mass": "CE of the mean, mass",
    "ce_paper": "CE of the mean, paper's law",
}
FURTHER = {  # where lines have them
    "pde-linear": {"covered_90": 1e-2, "infeasible": 1e-2, "ce_paper": 1e-3},
    "pde-nonlinear": {"covered_90": 1e-2, "infeasible": 1e-2, "ce_mass": 1e-3},
    "tvd": {"covered_90": 1e-2, "infeasible": 1e-2},
}
LEGEND = {
    "pde-linear": """
MSE and CRPS are means over the grid points of 100 test fields; CE of the mean is the mean over fields of the summed
|mass of the mean - exact mass|, CE of the worst draw the largest such difference of a slice over 100 draws per field.
Every law is the exact one; the paper's laws of Stefan and advection ignore that fronts leave. 90 % bands are the
central 90 % of the draws; more is in them than 90 % where values that are certain, such as bounds, are met.

- base, softc: the network alone; with a penalty chosen on validation data.
- probconserv, probhard-inf: base, projected obliquely at inference. For a linear law both are the same.
- hardc: the mean projected, the variance kept, so draws miss. probhard-ob, -or: both projected, and trained so.
- probhard-physics, -or: mass, bounds and monotony at once, trained on projected draws, which have a CRPS but no
  likelihood; -inf: at inference only; -warm: the first third of the epochs is trained without constraint.
- probhard-interval: the same, but the trapezoid sum only has to be as near to the mass as that of a monotone field
  with this mass is, within half a cell. Exact fields obey it; CE is bounded by it instead of 0. -tv: trained with
  bounds and a penalty of total variation alone, which leaves the network to learn where the front is; the interval
  comes at inference.
- probhard-jump: the same, but the trapezoid sum is to be what the rule makes of a field with this mass and a jump at
  the front, whose place and height the law gives (Rankine and Hugoniot). Exact fields obey it to the second order of
  the spacing; CE is then theirs, from the rule alone. Heat and pme have no jump, and neither of these two rows.
- probhard-phases: trained as probhard-jump-warm; at inference values are also 0 or at least u*, to which they fall
  before the jump. Where the front is stays open. On advection this would leave one field, so only Stefan has it.
- -law: mean and draws of the row so named are in the end put on the nearest fields, with equal weights, that obey the
  trapezoid law, bounds and monotony. What is missing of the mass is thus spread over the profile, which squares less
  than at the front, and CE is 0 again; values between 0 and u* are back, though small ones.
- On advection such a mass, the bounds and a sharp front leave one field, so that the network only has to be steep:
  figures near 0 there speak for the constraint, not for the network.
- MSE where free: without the slices on which mass and bounds leave a single field.
- The nearest field that obeys physics misses the exact one, since that misses the trapezoid law: Stefan's by
  u(0, 0) = 1 alone, where law and bounds ask for 0. On the whole grid no method with CE 0 can do better, so on
  Stefan not a tenth of the paper's smallest MSE.
- Lines of the first runs do not count flagged draws.
""",
    "pde-nonlinear": """
As in pde-linear.md, with 20 draws per field; the law is the flux law of the porous medium, CE its residuals.
probconserv obeys the mass alone. -known: initial and boundary values; -positive: and u >= 0; -flux: the values and the
flux law; without such an ending, all of it. -inf: at inference only.

CE is large where the flux law is not obeyed, because the flux at x = 0 is a difference over one cell of width 0.01, and
larger still where the first value alone is set right. The paper's CE is that of its own form of the law.
""",
    "tvd": """
Every row of total variation also keeps 0 <= u <= 1, which the paper's does not: that no value is negative is by
construction. probhard-tv is a penalty whose weight is chosen on validation data, probhard-tvd obeys a variation that
never grows in time. Shares of negative values are those of all draws in the table, of the profile's in the figure.
base is trained again for this table, so its figures differ a little from those of pde-linear.md. The profile is at
t = 0.152: by t = 0.505, which the paper names, this front has left. Where the place of the front is uncertain, steep
draws differ more from each other than smeared ones, so the spread is larger.
""",
}
FINDINGS = {  # what the committed lines show
    "pde-linear": """Exact fields obey the interval and the sum of a jump, not the trapezoid law. Yet the CRPS of
probhard-interval is larger than that of probhard-physics on advection and Stefan (150 epochs): an exact value says more
about the place of a front than its half cell costs. The sum of a jump is an exact value that is right: its rows have
the smallest errors on both. What is left on Stefan are values between 0 and u* at the two points beside the front;
probhard-phases allows none, at inference only, and is below a tenth of the paper's smallest MSE.

After 500 epochs such a tenth is also reached with CE 0, by probhard-jump-warm-law on advection, on the whole grid, and
by probhard-phases-law on Stefan, where slices are free. Their bands pay for it: the law moves all values of a slice a
little, and in every draw by the same amount, so that the bands miss more exact values than without it.

Under such constraints from the first epoch on, advection's draws are after 15 epochs all projected on one and the same
field, which leaves no gradient. Under probhard-jump that is nearly the right one, how nearly depends on the seed. With
epochs without constraint at first the network learns where the front is: 150 epochs are too few for that, after 500 the
errors of all seeds are small. On Stefan they halve the error (150 epochs), and on the porous medium
probhard-physics-warm has the smallest errors of all rows.
""",
    "pde-nonlinear": """For m in [3, 4], where all parts were trained end to end, u >= 0 earns all of the gain: behind
it the network need not draw the front's kink itself. The flux law makes the fields conserve and leaves the error as it
is. Networks trained with likelihoods have larger errors on every row, as in the paper.
""",
}
SHOWN = {
    "pde-linear": ("Stefan, u* = 0.625", ("base", "probconserv", "probhard-physics-inf", "probhard-phases")),
    "pde-nonlinear": ("Porous medium, m = 3.88", ("base", "probconserv", "probhard-inf", "probhard-or")),
    "tvd": ("Advection, beta = 1.5", ("base", "probconserv", "probhard-tv", "probhard-tvd")),
}
ABLATION = {  # parts of the nonlinear constraint, and the end of their rows' names
    "known values": "-known",
    "known values, u >= 0": "-known-positive",
    "known values, flux law": "-flux",
    "known values, u >= 0, flux law": "",
}
OBEYED = 1e-6  # largest residual of a draw that counts as CE 0
# MSE (1e-5) of the field that is nearest to the exact one among those that obey mass, bounds and monotony: exact fields
# miss the trapezoid law a little. Stefan's is all due to u(0, 0) = 1, where the law and u >= 0 ask for 0.
NEAREST = {"heat": 0.0, "pme": 0.0317, "stefan": 50.4, "advection": 2.27}
_LINEAR = ("probhard-ob", "probhard-or", "hardc", "probconserv", "softc", "base")
_NONLINEAR = ("probhard-ob", "probhard-or", "probhard-inf", "probconserv", "base")


def _paper(names: Sequence[str], mse: Sequence[float], crps: Sequence[float]) -> dict[str, tuple[float, float]]:
    return dict(zip(names, zip(mse, crps)))


# MSE and CRPS as printed, in the units above.
PAPER: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = {
    ("heat", "crps"): _paper(
        _LINEAR, (0.036, 0.031, 0.031, 0.027, 0.051, 0.029), (0.304, 0.271, 0.275, 0.392, 0.354, 0.396)
    ),
    ("heat", "nll"): _paper(_LINEAR, (0.047, 0.301, 0.090, 1.26, 0.156, 2.01), (0.37, 0.713, 0.452, 4.27, 1.129, 4.39)),
    ("pme", "crps"): _paper(_LINEAR, (9.59, 9.01, 8.87, 8.80, 8.19, 7.95), (2.01, 1.80, 1.785, 2.03, 2.07, 2.02)),
    ("pme", "nll"): _paper(_LINEAR, (6.16, 11.08, 10.55, 10.5, 7.36, 8.13), (2.65, 1.80, 1.667, 2.49, 2.44, 2.43)),
    ("advection", "crps"): _paper(_LINEAR, (131, 88.1, 104, 134, 148, 149), (4.19, 2.94, 3.24, 3.88, 3.96, 3.98)),
    ("advection", "nll"): _paper(_LINEAR, (262, 311, 458, 277, 599, 605), (7.03, 8.67, 11.2, 7.90, 9.70, 10.1)),
    ("stefan", "crps"): _paper(_LINEAR, (186, 395, 394, 303, 432, 425), (7.52, 14.1, 14.4, 7.85, 9.88, 9.51)),
    ("stefan", "nll"): _paper(_LINEAR, (207, 433, 433, 273, 429, 425), (7.85, 14.7, 14.5, 8.33, 10.1, 10.2)),
    ("pme", (2, 3), "crps"): _paper(_NONLINEAR, (5.04, 9.38, 78.2, 88.5, 80.3), (8.65, 11.3, 19.0, 20.7, 20.8)),
    ("pme", (3, 4), "crps"): _paper(_NONLINEAR, (296, 3.19, 158, 185, 162), (11.2, 7.10, 22.6, 24.7, 23.7)),
    ("pme", (4, 5), "crps"): _paper(_NONLINEAR, (425, 1.59, 280, 277, 199), (10.8, 5.62, 23.3, 25.4, 27.2)),
    ("pme", (2, 3), "nll"): _paper(_NONLINEAR, (107, 43.5, 86.1, 94.5, 89.2), (18.9, 14.8, 33.0, 36.7, 37.1)),
    ("pme", (3, 4), "nll"): _paper(_NONLINEAR, (471, 135, 200, 276, 202), (16.9, 11.2, 30.4, 35.1, 48.5)),
    ("pme", (4, 5), "nll"): _paper(_NONLINEAR, (717, 206, 332, 620, 342), (19.9, 9.36, 32.4, 41.3, 35.9)),
}


PAPER_CE: dict[tuple[Any, ...], dict[str, float]] = {  # of the rows that miss, in the units above; the others' are 0
    ("heat", "crps"): {"softc": 0.852, "base": 1.76},
    ("heat", "nll"): {"softc": 4.806, "base": 34.3},
    ("pme", "crps"): {"softc": 17.1, "base": 20.2},
    ("pme", "nll"): {"softc": 29.3, "base": 27.2},
    ("advection", "crps"): {"softc": 19.3, "base": 18.9},
    ("advection", "nll"): {"softc": 183, "base": 182},
    ("stefan", "crps"): {"softc": 167, "base": 180},
    ("stefan", "nll"): {"softc": 169, "base": 169},
    ("pme", (2, 3), "crps"): {"base": 0.020},
    ("pme", (2, 3), "nll"): {"base": 0.028},
    ("pme", (3, 4), "crps"): {"base": 14.8},
    ("pme", (3, 4), "nll"): {"base": 34.1},
    ("pme", (4, 5), "crps"): {"base": 22.8},
    ("pme", (4, 5), "nll"): {"base": 59.7},
}


def write(folder: Path, table: str, lines: Sequence[Line], quick: bool = False) -> list[Path]:
    """Write the table as Markdown and, where there are profiles, the figure; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{table}.md"
    page.write_text(render(table, lines, quick))
    shown, profile = _shown(table, lines), TABLES[table].profile
    if not shown:
        return [page]
    assert profile is not None
    return [page, profiles(folder / f"{table}.png", shown, *SHOWN[table], profile[1])]


def _shown(table: str, lines: Sequence[Line]) -> list[Line]:
    """The lines that a figure can show."""
    _, methods = SHOWN[table]
    return [line for line in lines if "profile" in line and line["score"] == "crps" and line["method"] in methods]


def render(table: str, lines: Sequence[Line], quick: bool = False) -> str:
    """All lines of a table as Markdown, one part per problem, score and number of epochs."""
    parts: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        span = (tuple(map(int, line["m_range"])),) if "m_range" in line else ()
        parts.setdefault((line["problem"], *span, line["score"], line["epochs"]), []).append(line)
    shared = set(TABLES[table].rows) - set(TABLES[table].order)  # rows that use the network of another
    trained = [line for line in lines if line["method"] not in shared]
    hours = sum(line["seconds"] for line in trained) / 3600
    head = [
        f"# Table {table}",
        "",
        f"Rendered by `probhard bench {table} --render` from `{table}.jsonl`: {len(lines)} lines,",
        f"at least {hours:.1f} hours of one thread (of the first resumed runs, the last part alone was counted),",
        "made by",
        *_commands(table, lines, quick),
        "",
        "Means over seeds, +- population standard deviation. Rows are sorted by CRPS.",
        "",
        LEGEND[table].lstrip("\n"),
        *([f"![{SHOWN[table][0]}, of one seed]({table}.png)", ""] if _shown(table, lines) else []),
        *([FINDINGS[table]] if table in FINDINGS and not quick else []),
    ]
    return "\n".join([*head, *_best(table, parts), *(_part(table, key, parts[key]) for key in sorted(parts, key=str))])


def _commands(table: str, lines: Sequence[Line], quick: bool) -> list[str]:
    """The commands that give all lines, and more."""
    if quick:
        return [f"`probhard bench {table} --quick`, with small networks and few fields"]
    runs: dict[int, set[int]] = {}
    for line in lines:
        runs.setdefault(line["epochs"], set()).add(line["seed"])
    return [
        f"`probhard bench {table} --epochs {epochs} --seeds {','.join(map(str, sorted(runs[epochs])))}`"
        for epochs in sorted(runs)
    ]


def _best(table: str, parts: Mapping[tuple[Any, ...], Sequence[Line]]) -> list[str]:
    """Per problem the smallest figures of all rows, scores and numbers of epochs, beside the paper's smallest."""
    problems = sorted({key[:-2] for key in parts if key[:-1] in PAPER})
    if not problems:
        return []
    known = NEAREST if table == "pde-linear" else {}
    whose = ["paper's", "our", *(["our, CE 0,"] if known else [])]
    limits = [float("inf"), *([OBEYED] if known else [])]
    names = ("mse", "crps")
    head = [f"{who} {TITLES[name]} ({_unit(UNITS[table][name])})" for name in names for who in whose]
    free = "mse_free"
    head += [f"our, CE 0, {TITLES[free]} (1e-5)", "MSE of the nearest field that obeys physics (1e-5)"] if known else []
    text = ["## Smallest figures", "", f"| problem | {' | '.join(head)} |", f"|---|{'---|' * len(head)}"]
    for problem in problems:
        cells = []
        for index, name in enumerate(names):
            printed = min(row[index] for key, rows in PAPER.items() if key[:-1] == problem for row in rows.values())
            ours = [_smallest(parts, problem, name, UNITS[table][name], limit) for limit in limits]
            cells += [f"{printed:g}", *ours]
        if known:
            cells += [_smallest(parts, problem, free, UNITS[table]["mse"], OBEYED), f"{known[problem[0]]:g}"]
        text.append(f"| {_title(problem)} | {' | '.join(cells)} |")
    return [*text, ""]


def _smallest(
    parts: Mapping[tuple[Any, ...], Sequence[Line]], problem: tuple[Any, ...], name: str, unit: float, limit: float
) -> str:
    """The smallest figure of a problem's rows whose draws miss the law by at most a limit, and whose it is."""
    found = [
        (_mean(lines, method, name), method, key)
        for key, lines in parts.items()
        if key[:-2] == problem
        for method in {line["method"] for line in lines}
        if max(_values(lines, method, "ce_draws")) <= limit and _values(lines, method, name)
    ]
    if not found:
        return ""
    _, method, key = min(found, key=lambda one: one[:2])
    count = len(_values(parts[key], method, name))
    seeds = "one seed" if count == 1 else f"{count} seeds"
    return f"{_cell(parts[key], method, name, unit)} by {method}, {key[-2]}, {key[-1]} epochs, {seeds}"


def _title(problem: tuple[Any, ...]) -> str:
    return ", ".join([problem[0], *(f"m in [{a}, {b}]" for a, b in problem[1:])])


def _part(table: str, key: tuple[Any, ...], lines: Sequence[Line]) -> str:
    units = dict(UNITS[table])
    if any(not 0.8 <= line.get("mse_free", line["mse"]) / line["mse"] <= 1.2 for line in lines):
        units["mse_free"] = units["mse"]  # some slices leave one point only
    units |= {name: unit for name, unit in FURTHER[table].items() if any(line.get(name) is not None for line in lines)}
    paper, missed = PAPER.get(key[:-1], {}), PAPER_CE.get(key[:-1], {})
    seeds = sorted({line["seed"] for line in lines})
    methods = {
        line["method"]: sorted(one["seed"] for one in lines if one["method"] == line["method"]) for line in lines
    }
    apart = any(found != seeds for found in methods.values())  # not all rows have all seeds
    head = [*(["seeds"] if apart else []), *(f"{TITLES[name]} ({_unit(unit)})" for name, unit in units.items())]
    if paper:
        head += ["paper's MSE", "paper's CE", "paper's CRPS"]
    text = [
        f"### {_title(key[:-2])}; trained with {key[-2]}, {key[-1]} epochs, seeds {', '.join(map(str, seeds))}",
        "",
        f"| method | {' | '.join(head)} |",
        f"|---|{'---|' * len(head)}",
    ]
    for method in sorted(methods, key=lambda name: (_mean(lines, name, "crps"), name)):
        cells = [", ".join(map(str, methods[method]))] if apart else []
        cells += [_cell(lines, method, name, unit) for name, unit in units.items()]
        if paper:
            mse, crps = paper.get(method, ("", ""))
            cells += [f"{value}" for value in (mse, missed.get(method, 0) if method in paper else "", crps)]
        text.append(f"| {method} | {' | '.join(cells)} |")
    if table == "pde-nonlinear":
        text += _ablation(lines, units)
    return "\n".join([*text, ""])


def _ablation(lines: Sequence[Line], units: Mapping[str, float]) -> list[str]:
    """What each part of the constraint brings, orthogonally projected at inference only and end to end."""
    names = ("mse", "crps")
    kinds = {"at inference only": "probhard-inf-or", "end to end": "probhard-or"}
    head = [f"{kind}, {TITLES[name]}" for kind in kinds for name in names]
    text = ["", f"| part of the constraint | {' | '.join(head)} |", f"|---|{'---|' * len(head)}"]
    rows = {"nothing": ["base", "base"]}
    for part, end in ABLATION.items():
        # the inference-only rows of a part are orthogonal too, but are named without it
        rows[part] = [f"{kind.removesuffix('-or') if end and '-inf' in kind else kind}{end}" for kind in kinds.values()]
    found = {line["method"] for line in lines}
    if not any(method in found for part in ABLATION for method in rows[part] if part != list(ABLATION)[-1]):
        return []
    for part, methods in rows.items():
        cells = [_cell(lines, method, name, units[name]) for method in methods for name in names]
        text.append(f"| {part} | {' | '.join(cells)} |")
    return text


def _values(lines: Sequence[Line], method: str, name: str) -> list[float]:
    return [float(line[name]) for line in lines if line["method"] == method and line.get(name) is not None]


def _mean(lines: Sequence[Line], method: str, name: str) -> float:
    return statistics.fmean(_values(lines, method, name) or [float("inf")])


def _cell(lines: Sequence[Line], method: str, name: str, unit: float) -> str:
    values = [value / unit for value in _values(lines, method, name)]
    if not values:
        return ""
    centre = statistics.fmean(values)
    text = f"{centre:.1e}" if 0 < abs(centre) < 1e-3 else f"{centre:.3g}"
    return text if len(values) == 1 else f"{text} +- {statistics.pstdev(values):.2g}"


def _unit(unit: float) -> str:
    return "%" if unit == 1e-2 else f"{unit:.0e}".replace("e-0", "e-")


def profiles(path: Path, lines: Sequence[Line], title: str, methods: Sequence[str], time: float) -> Path:
    """Mean and 3 standard deviations near the front, one panel per method, of lines that hold a profile.

    All panels are of one seed and number of epochs: those with the most methods, then the longest, then the first seed.
    The time is that of profiles which do not say theirs.
    """
    alike: dict[tuple[int, int], dict[str, Line]] = {}
    for line in lines:
        alike.setdefault((line["epochs"], -line["seed"]), {})[line["method"]] = line
    (epochs, _), found = max(alike.items(), key=lambda item: (len(item[1]), item[0]))
    shown = [method for method in methods if method in found]
    figure = Figure(figsize=(3.4 * len(shown), 6.4), dpi=110, layout="constrained")
    axes = figure.subplots(2, len(shown), squeeze=False, sharey="row")
    for column, method in enumerate(shown):
        curve = found[method]["profile"]
        exact, mean, spread = curve["exact"], curve["mean"], curve["stddev"]
        grid = [index / (len(exact) - 1) for index in range(len(exact))]
        front = _front(exact)
        floor = -float("inf") if curve["negative"] else 0.0  # no band where no draw is
        ceiling = float("inf") if found[method]["outside_bounds"] else max(exact)
        low = [max(m - 3 * s, floor) for m, s in zip(mean, spread)]
        high = [min(m + 3 * s, ceiling) for m, s in zip(mean, spread)]
        above, below = axes[0][column], axes[1][column]
        above.fill_between(grid, low, high, alpha=0.3, lw=0, label="3 std. dev. of the draws, within their range")
        above.plot(grid, mean, ls="--", label="mean")
        above.plot(grid, exact, color="black", lw=1, label="exact")
        above.axhline(0, color="grey", lw=0.5)
        above.set(
            title=f"{method}\n{100 * curve['negative']:.1f} % of values negative", xlim=(front - 0.2, front + 0.2)
        )
        below.plot(grid, spread)
        below.set(xlabel="x", xlim=(front - 0.2, front + 0.2))
    axes[0][0].set(ylabel="u")
    axes[1][0].set(ylabel="standard deviation of the draws", ylim=(0, None))  # once all panels are drawn
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    time = found[shown[0]]["profile"].get("time", time)
    figure.suptitle(f"{title}, t = {time:.3f}; {epochs} epochs")
    figure.savefig(path)
    return path


def _front(exact: Sequence[float]) -> float:
    """Where a falling profile has lost half its height."""
    half = max(exact) / 2
    return next((index for index, value in enumerate(exact) if value < half), len(exact)) / (len(exact) - 1)
