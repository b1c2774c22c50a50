"""Result lines of the PDE experiments as a page of tables, beside the paper's figures.

The only computation is that of means and spreads over seeds. The prose is in ``pages/``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments import templates
from experiments.grid import Grid
from experiments.pde.figures import profiles
from experiments.pde.references import NEAREST, PAPER, PAPER_CE, smallest_of_paper
from experiments.pde.rows import TABLES
from experiments.pde.runs import Job
from experiments.table import Line, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError

Key = tuple[Any, ...]  # problem, range of m if there is one, score, epochs
Parts = Mapping[Key, Sequence[Line]]

PAGES = Path(__file__).parent / "pages"
UNITS = {
    "pde-linear": {"mse": 1e-5, "ce_mean": 1e-3, "ce_draws": 1e-3, "crps": 1e-3},
    "pde-nonlinear": {"mse": 1e-6, "ce_mean": 1e-3, "ce_draws": 1e-3, "crps": 1e-4},
    "tvd": {"mse": 1e-5, "ce_mean": 1e-3, "crps": 1e-3, "negative": 1e-2, "outside_bounds": 1e-2},
}
FURTHER = {  # shown if lines have them
    "pde-linear": {"covered_90": 1e-2, "infeasible": 1e-2, "ce_paper": 1e-3},
    "pde-nonlinear": {"covered_90": 1e-2, "infeasible": 1e-2, "ce_mass": 1e-3},
    "tvd": {"covered_90": 1e-2, "infeasible": 1e-2},
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
COMPARED = ("mse", "crps")  # figures that the paper prints, in its order


def table(request: Request) -> Table:
    """The table that is asked for, with its problems, rows, scores and seeds."""
    name, quick = request.table, request.quick

    def grid(path: Path) -> Grid:
        from experiments.pde import runs

        problems, rows, scores = (request.names(option) for option in ("problems", "methods", "scores"))
        return runs.grid(name, path, request.epochs, request.chosen_seeds(), problems, rows, scores, quick)

    return Table(
        name,
        TABLES[name].keys,
        resumed(grid, request),
        partial(render, name, quick=quick),
        partial(plot, name),
    )


def plot(table: str, path: Path, lines: Sequence[Line]) -> None:
    """Write the figure of a table, if lines have profiles.

    Args:
        table: A name in ``TABLES``.
        path: Of the picture.
        lines: Result lines of the table.
    """
    shown, profile = _shown(table, lines), TABLES[table].profile
    if shown:
        assert profile is not None
        profiles(path, shown, *SHOWN[table], profile[1])


def render(table: str, lines: Sequence[Line], quick: bool = False) -> str:
    """Return the page of a table, with one part per problem, score and number of epochs.

    Args:
        table: A name in ``TABLES``.
        lines: Result lines of the table.
        quick: Whether they are those of a quick run, of which no findings are told.
    """
    parts: dict[Key, list[Line]] = {}
    for line in lines:
        span = (tuple(map(int, line["m_range"])),) if "m_range" in line else ()
        parts.setdefault((line["problem"], *span, line["score"], line["epochs"]), []).append(line)
    setting = TABLES[table]
    shared = set(setting.rows) - set(setting.order)  # rows that use the network of another
    size = setting.few if quick else {}
    title, _ = SHOWN[table]
    values = {
        "count": len(lines),
        "hours": f"{sum(line['seconds'] for line in lines if line['method'] not in shared) / 3600:.1f}",
        "commands": _commands(table, lines, quick),
        "picture": f"![{title}, of one seed]({table}.png)" if _shown(table, lines) else "",
        "fields": size.get("sizes", Job.sizes)[2],
        "draws": min(size.get("draws", Job.draws), setting.draws),
        "time": setting.profile[1] if setting.profile else "",
        "behind": Figure(lambda _: _behind({} if quick else parts)),
        "nearest": Figure(lambda problem: f"{NEAREST[problem]:g}"),
        "tenth": Figure(lambda problem: f"{smallest_of_paper((problem,), 0) / 10:.3g}"),
        "best": _best(table, parts),
        "parts": "\n\n".join(_part(table, key, parts[key]) for key in sorted(parts, key=str)),
    }
    for name, unit in {**UNITS[table], **FURTHER[table], "mse_free": UNITS[table]["mse"]}.items():
        values[name] = Figure(partial(_figure, {} if quick else parts, name, unit))
    return templates.fill(PAGES / f"{table}.md", values)


def _shown(table: str, lines: Sequence[Line]) -> list[Line]:
    """The lines that a figure can show."""
    _, methods = SHOWN[table]
    return [line for line in lines if "profile" in line and line["score"] == "crps" and line["method"] in methods]


def _commands(table: str, lines: Sequence[Line], quick: bool) -> str:
    """The commands that give all lines, and more."""
    if quick:
        return f"- `probhard bench {table} --quick`, with small networks and few fields"
    runs: dict[int, set[int]] = {}
    for line in lines:
        runs.setdefault(line["epochs"], set()).add(line["seed"])
    return "\n".join(
        f"- `probhard bench {table} --epochs {epochs} --seeds {','.join(map(str, sorted(runs[epochs])))}`"
        for epochs in sorted(runs)
    )


def _figure(parts: Parts, name: str, unit: float, argument: str) -> str:
    """A cell for the prose; the argument is ``problem method epochs [score]``, with m in the problem: ``pme-2-3``."""
    problem, method, epochs, *score = argument.split()
    kind, *span = problem.split("-")
    key = (kind, *([tuple(map(int, span))] if span else []), *(score or ["crps"]), int(epochs))
    cell = _cell(parts.get(key, ()), method, name, unit)
    if not cell:
        raise MissingFigureError(f"{name}:{argument}")
    return cell


def _behind(parts: Parts) -> str:
    """Per part, how many of the rows that the paper has too have larger errors than the paper's."""
    rows = []
    for key in sorted(parts, key=str):
        printed = PAPER.get(key[:-1], {})
        units = UNITS["pde-nonlinear" if len(key) == 4 else "pde-linear"]
        methods = [method for method in printed if _values(parts[key], method, "mse")]
        if not methods:
            continue
        larger = [
            sum(_mean(parts[key], method, name) / units[name] > printed[method][index] for method in methods)
            for index, name in enumerate(COMPARED)
        ]
        rows.append((_title(key[:-2]), key[-2], f"{key[-1]}", f"{len(methods)}", *map(str, larger)))
    if not rows:
        raise MissingFigureError("behind")
    return templates.table(("problem", "trained with", "epochs", "rows", "larger MSE", "larger CRPS"), rows)


def _best(table: str, parts: Parts) -> str:
    """Per problem the smallest figures of all rows, scores and numbers of epochs, beside the paper's smallest."""
    problems = sorted({key[:-2] for key in parts if key[:-1] in PAPER})
    if not problems:
        return ""
    nearest = NEAREST if table == "pde-linear" else {}
    whose = ["paper's", "our", *(["our, CE 0,"] if nearest else [])]
    limits = [float("inf"), *([OBEYED] if nearest else [])]
    head = ["problem", *(f"{who} {TITLES[name]} ({_unit(UNITS[table][name])})" for name in COMPARED for who in whose)]
    if nearest:
        head += [f"our, CE 0, {TITLES['mse_free']} (1e-5)", "MSE of the nearest field that obeys physics (1e-5)"]
    rows = []
    for problem in problems:
        cells = [_title(problem)]
        for index, name in enumerate(COMPARED):
            ours = [_smallest(parts, problem, name, UNITS[table][name], limit) for limit in limits]
            cells += [f"{smallest_of_paper(problem, index):g}", *ours]
        if nearest:
            cells += [_smallest(parts, problem, "mse_free", UNITS[table]["mse"], OBEYED), f"{nearest[problem[0]]:g}"]
        rows.append(cells)
    return f"## Smallest figures\n\n{templates.table(head, rows)}"


def _smallest(parts: Parts, problem: Key, name: str, unit: float, limit: float) -> str:
    """The smallest figure of a problem's rows whose draws miss the law by at most a limit, and the row's name."""
    candidates = [
        (_mean(lines, method, name), method, key)
        for key, lines in parts.items()
        if key[:-2] == problem
        for method in {line["method"] for line in lines}
        if max(_values(lines, method, "ce_draws")) <= limit and _values(lines, method, name)
    ]
    if not candidates:
        return ""
    _, method, key = min(candidates, key=lambda candidate: candidate[:2])
    count = len(_values(parts[key], method, name))
    seeds = "one seed" if count == 1 else f"{count} seeds"
    return f"{_cell(parts[key], method, name, unit)} by {method}, {key[-2]}, {key[-1]} epochs, {seeds}"


def _part(table: str, key: Key, lines: Sequence[Line]) -> str:
    """All rows of a problem, score and number of epochs."""
    units = dict(UNITS[table])
    if any(not 0.8 <= line.get("mse_free", line["mse"]) / line["mse"] <= 1.2 for line in lines):
        units["mse_free"] = units["mse"]  # some slices leave one point only
    units |= {name: unit for name, unit in FURTHER[table].items() if any(line.get(name) is not None for line in lines)}
    paper, missed = PAPER.get(key[:-1], {}), PAPER_CE.get(key[:-1], {})
    seeds = sorted({line["seed"] for line in lines})
    seeds_of: dict[str, list[int]] = {}
    for line in lines:
        seeds_of.setdefault(line["method"], []).append(line["seed"])
    differ = any(sorted(own) != seeds for own in seeds_of.values())
    head = [*(["seeds"] if differ else []), *(f"{TITLES[name]} ({_unit(unit)})" for name, unit in units.items())]
    if paper:
        head += ["paper's MSE", "paper's CE", "paper's CRPS"]
    rows = []
    for method in sorted(seeds_of, key=lambda name: (_mean(lines, name, "crps"), name)):
        cells = [", ".join(map(str, sorted(seeds_of[method])))] if differ else []
        cells += [_cell(lines, method, name, unit) for name, unit in units.items()]
        if paper:
            mse, crps = paper.get(method, ("", ""))
            cells += [f"{value}" for value in (mse, missed.get(method, 0) if method in paper else "", crps)]
        rows.append([method, *cells])
    trained = f"trained with {key[-2]}, {key[-1]} epochs, seeds {', '.join(map(str, seeds))}"
    blocks = [f"### {_title(key[:-2])}; {trained}", templates.table(["method", *head], rows)]
    if table == "pde-nonlinear":
        blocks += _ablation(lines, units)
    return "\n\n".join(blocks)


def _ablation(lines: Sequence[Line], units: Mapping[str, float]) -> list[str]:
    """What each part of the constraint brings, orthogonally projected at inference only and end to end."""
    kinds = {"at inference only": "probhard-inf-or", "end to end": "probhard-or"}
    methods_of = {"nothing": ["base", "base"]}
    for part, end in ABLATION.items():
        # The inference-only rows of a part are orthogonal too, but are named without "-or".
        methods_of[part] = [
            f"{kind.removesuffix('-or') if end and '-inf' in kind else kind}{end}" for kind in kinds.values()
        ]
    there = {line["method"] for line in lines}
    if not any(method in there for part, end in ABLATION.items() if end for method in methods_of[part]):
        return []
    rows = [
        [part, *(_cell(lines, method, name, units[name]) for method in methods for name in COMPARED)]
        for part, methods in methods_of.items()
    ]
    head = [f"{kind}, {TITLES[name]}" for kind in kinds for name in COMPARED]
    return [templates.table(["part of the constraint", *head], rows)]


def _title(problem: Key) -> str:
    return ", ".join([problem[0], *(f"m in [{a}, {b}]" for a, b in problem[1:])])


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
