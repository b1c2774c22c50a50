"""The page and the figure of the systems of the field, from their result lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments import templates
from experiments.optimisation.control_runs import CONTROL, QUOTED_CONTROL, control_methods, fixed_policies
from experiments.optimisation.system_problems import CASES
from experiments.optimisation.systems import KEYS, OPTIMUM, OURS, PINET, PUBLISHED, QUOTED, QUOTED_TOY, TOY, WAYS
from experiments.pictures import BLUE, GREY, save
from experiments.records import Records
from experiments.table import Lines, Request, Table, measured
from experiments.templates import Figure, MissingFigureError
from probhard.errors import check_choices

PAGE = Path(__file__).parent / "pages" / "systems.md"
TITLES = {
    "dc3-convex": "DC3, convex",
    "dc3-nonconvex": "DC3, non-convex",
    "hardnet-nonconvex": "HardNet, non-convex",
}
RECIPES = {OURS: "ours", PUBLISHED: "papers"}
ORDER = (*WAYS, PINET, OPTIMUM)
OWN = "probhard"
NEAR = 0.1  # a published figure is met within this share


def table(request: Request) -> Table:
    """The table of systems."""

    def pieces(records: Records) -> Any:
        from experiments.optimisation import control_runs, systems

        names = request.names("problems")
        check_choices("problem", names, (*CASES, TOY, CONTROL))
        if CONTROL in (names or (CONTROL,)):
            yield from control_runs.pieces(records, request.quick)
        others = [name for name in names if name != CONTROL]
        if others or not names:
            yield from systems.pieces(records, others, request.quick)

    return Table("systems", KEYS, measured(pieces), render, plot)


def render(lines: Lines) -> str:
    """The page."""
    programs = [line for line in lines if line["case"] in TITLES]
    toy = [line for line in lines if line["case"] == TOY]
    control = [line for line in lines if line["case"] == CONTROL]
    values = {
        "verdict": verdict(programs, control),
        "programs": _figure(_program_table, programs),
        "toy": _figure(_toy_table, toy),
        "control": _figure(_control_table, control),
        "control_epochs": _figure(_control_epochs, control),
        "quoted": _figure(_quoted_table, [*programs, *toy]),
        "epochs": Figure(partial(_epochs, lines)),
        "missing": _missing(lines),
    }
    return templates.fill(PAGE, values)


def verdict(programs: Lines, control: Lines = ()) -> str:
    """Where our row is not the best among rows without visible violations, in sentences."""
    ahead, behind = [], []
    groups = dict.fromkeys((line["case"], line["recipe"]) for line in programs)
    for case, recipe in groups:
        rows = {line["way"]: line for line in programs if (line["case"], line["recipe"]) == (case, recipe)}
        feasible = {way: line for way, line in rows.items() if way in WAYS and line["violated"] == 0}
        if OWN not in rows or len(feasible) < 2:
            continue
        best = min(feasible, key=lambda way: feasible[way]["objective"])
        place = f"{TITLES[case]} (recipe: {RECIPES[recipe]})"
        if best == OWN:
            ahead.append(place)
        else:
            gaps = f"{rows[best]['gap']:.2f} % against {rows[OWN]['gap']:.2f} %"
            behind.append(f"{place}: {best} has the smaller gap, {gaps}")
    driven = {line["way"]: line["cost"] for line in control if line["violated"] == 0}
    if OWN in driven:
        best = min(driven, key=lambda way: driven[way])
        place = "HardNet, control"
        if best == OWN:
            ahead.append(place)
        else:
            behind.append(f"{place}: {best} has the smaller cost, {driven[best]:.0f} against {driven[OWN]:.0f}")
    text = [f"Not ahead: {'; '.join(behind)}."] if behind else []
    if ahead:
        text.append(f"Ahead of all rows without visible violations: {'; '.join(ahead)}.")
    return " ".join(text) or "No problem has been run for all systems yet."


def _program_table(lines: Lines) -> str:
    names = ["problem", "recipe", "system", "epochs", "objective", "gap %", "equalities", "inequalities", "violated"]
    names += ["ms each", "ms a step"]
    place = {way: k for k, way in enumerate(ORDER)}
    ordered = sorted(lines, key=lambda x: (list(TITLES).index(x["case"]), x["recipe"], place[x["way"]]))
    return templates.table(
        names,
        [
            [
                TITLES[line["case"]],
                RECIPES[line["recipe"]],
                line["way"],
                "" if line["way"] == OPTIMUM else str(line["epochs"]),
                f"{line['objective']:.3f}",
                f"{line['gap']:.2f}",
                _small(line["equality"]),
                _small(line["inequality"]),
                f"{100 * line['violated']:.1f} %",
                "" if line["instance_ms"] is None else f"{line['instance_ms']:.3f}",
                "" if line["step_ms"] is None else f"{line['step_ms']:.0f}",
            ]
            for line in ordered
        ],
    )


def _toy_table(lines: Lines) -> str:
    rows = [
        [
            line["way"],
            f"{line['mse']:.2f}",
            "" if line["mse_spread"] is None else f"{line['mse_spread']:.2f}",
            _small(line["inequality"]),
            f"{QUOTED_TOY[line['way']]:.2f}" if line["way"] in QUOTED_TOY else "",
        ]
        for line in lines
    ]
    return templates.table(["system", "MSE", "sd over seeds", "largest violation", "published MSE"], rows)


def _control_table(lines: Lines) -> str:
    names = ["system", "cost", "violation", "largest violation", "violated", "collided", "ms a run", "ms a step"]
    names += ["published cost", "published violation"]
    found = {line["way"]: line for line in lines}
    order = [way for way in (*control_methods(), *fixed_policies()) if way in found]
    rows = []
    for way in order:
        line, quoted = found[way], QUOTED_CONTROL.get(way)
        rows.append(
            [
                way,
                f"{line['cost']:.1f}",
                *(_plain(line[field]) for field in ("violation", "worst")),
                f"{line['violated']:.0%}",
                f"{line['collided']:.0%}",
                f"{line['run_ms']:.1f}",
                "" if line["step_ms"] is None else f"{line['step_ms']:.0f}",
                *(("", "") if quoted is None else (f"{quoted[0]:.1f}", f"{quoted[1]:g}")),
            ]
        )
    return templates.table(names, rows)


def _control_epochs(lines: Lines) -> str:
    return str(max(line["epochs"] or 0 for line in lines))


def _quoted_table(lines: Lines) -> str:
    """Published figures beside ours from the papers' recipe."""
    found = {(line["case"], line["way"]): line for line in lines if line["recipe"] == PUBLISHED}
    rows = []
    for (case, way), figure in QUOTED.items():
        line = found.get((case, way))
        here = "not run yet" if line is None else f"{line['objective']:.2f} ({line['epochs']} epochs)"
        far = line is not None and abs(line["objective"] - figure) > NEAR * abs(figure)
        rows.append([TITLES[case], way, f"{figure:.2f}", here, "**no**" if far else "" if line is None else "yes"])
    return templates.table(["problem", "system", "published", "here", "within 10 %"], rows)


def _epochs(lines: Lines, recipe: str) -> str:
    for line in lines:
        if line["recipe"] == recipe and line["case"] in TITLES:
            return str(line["epochs"])
    raise MissingFigureError(recipe)


def _missing(lines: Lines) -> str:
    """The rows that have no line yet."""
    done = {tuple(line[key] for key in KEYS) for line in lines}
    rows = [(case, way, OURS) for case in CASES for way in WAYS] + [(*row, PUBLISHED) for row in QUOTED]
    left = [f"HardNet, control / {way}" for way in control_methods() if (CONTROL, way, OURS) not in done]
    left += [f"{TITLES[case]} / {way} / {RECIPES[kind]}" for case, way, kind in rows if (case, way, kind) not in done]
    return f"Not run yet: {'; '.join(left)}." if left else ""


def _figure(text: Callable[[Lines], str], lines: Lines) -> Figure:
    """A text from lines; its block is left out if there are none."""

    def filled(_: str) -> str:
        if not lines:
            raise MissingFigureError("lines")
        return text(lines)

    return Figure(filled)


def _plain(value: float) -> str:
    return f"{value:.3g}" if value > 1e-2 else _small(value)


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: violation against gap for each problem, by our recipe.

    Args:
        path: The file.
        lines: Result lines.
    """
    from matplotlib.figure import Figure as Canvas

    cases = [case for case in TITLES if any(line["case"] == case and line["recipe"] == OURS for line in lines)]
    if not cases:
        return
    figure = Canvas(figsize=(4.6 * len(cases), 3.8), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases):
        for line in lines:
            if (line["case"], line["recipe"]) != (case, OURS) or line["way"] == OPTIMUM:
                continue
            worst = max(line["equality"], line["inequality"], 1e-16)
            color = BLUE if line["way"] == OWN else GREY
            axes.plot(max(line["gap"], 1e-2), worst, "o", ms=8, color=color)
            spot = (max(line["gap"], 1e-2), worst)
            below = (4, -13) if line["way"] == "DC3" else (4, 6)  # its violation is near that of a soft loss
            axes.annotate(line["way"], spot, xytext=below, textcoords="offset points", fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel="gap to the optimum, %", title=TITLES[case])
        axes.margins(0.3, 0.2)
    figure.axes[0].set_ylabel("largest violation")
    save(figure, path)
