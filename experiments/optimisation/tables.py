"""The page and the figure of the optimisation table, from its result lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from experiments import pictures, templates
from experiments.optimisation.goals import goals, missed
from experiments.records import Records
from experiments.table import Line, Lines, Request, Table, measured
from experiments.templates import Figure, MissingFigureError
from probhard.errors import check_choices

PAGE = Path(__file__).parent / "pages" / "optimisation.md"
KEYS = ("case", "way")
OURS, PYPOWER = "probhard", "PYPOWER"
TITLES = {
    "dc3-convex": "DC3, convex",
    "dc3-nonconvex": "DC3, non-convex",
    "pinet-convex": "Pi-net, convex",
    "pinet-control": "Pi-net, control",
}
# means of the published tests; HardNet's matrices are drawn in another order, so its optimum differs too
QUOTED = (
    ("dc3-convex", "DC3", -13.46, "OSQP -15.05"),
    ("dc3-nonconvex", "DC3", -10.66, "IPOPT -11.59"),
    ("other matrices, non-convex", "HardNet-Aff", -14.10, "IPOPT -14.28, DC3 -12.57"),
    ("case57", "DC3", 3.82, "PYPOWER 3.81; 0.089 s against 0.949 s"),
)


def table(request: Request) -> Table:
    """The table: the named families of programs and power networks, by default all."""

    def pieces(records: Records) -> Iterator[Callable[[], Lines]]:
        from experiments.optimisation import runs

        names = request.names("problems")
        check_choices("problem", names, runs.CASES)
        return runs.pieces(records, names, request.quick)

    return Table("optimisation", KEYS, measured(pieces), render, plot)


def render(lines: Sequence[Line]) -> str:
    """Return the page.

    Args:
        lines: Result lines.
    """
    programs = [line for line in lines if line["case"] in TITLES]
    power = [line for line in lines if line["case"].startswith("case")]
    trained = [line for line in power if line.get("epochs")]
    values = {
        "missed": missed(lines),
        "goals": templates.table(["goal", "asked", "measured", "met"], goals(lines)),
        "worst": Figure(lambda case: f"{_of(lines, case, OURS)['worst_gap']:.2g}"),
        "gap": Figure(lambda case: f"{_of(lines, case, OURS)['gap']:.1f}"),
        "epochs": Figure(lambda case: str(_of(lines, case, OURS)["epochs"])),
        "programs": templates.of_lines(_program_table, programs),
        "power": templates.of_lines(_power_table, power),
        "loads": Figure(lambda case: f"{_of(lines, case, OURS)['loads']:,}"),
        "solved": Figure(lambda case: f"{100 * _of(lines, case, OURS)['solved']:.1f}"),
        "slower": Figure(partial(_slower, lines)),
        "training": templates.of_lines(_training, trained),
        "quoted": templates.table(
            ["problem", "system", "its objective", "beside"],
            [[TITLES.get(case, case), system, f"{value:.2f}", beside] for case, system, value, beside in QUOTED],
        ),
    }
    return templates.fill(PAGE, values)


def _of(lines: Sequence[Line], case: str, way: str) -> Line:
    for line in lines:
        if (line["case"], line["way"]) == (case, way):
            return line
    raise MissingFigureError(case)


def _slower(lines: Sequence[Line], case: str) -> str:
    """Our time for an instance as a share of PYPOWER's."""
    return f"{_of(lines, case, OURS)['instance_ms'] / _of(lines, case, PYPOWER)['instance_ms']:.2g}"


def _program_table(lines: Sequence[Line]) -> str:
    names = ["problem", "way", "objective", "gap %", "worst gap %", "equalities", "inequalities", "ms each", "layer ms"]
    rows = [
        [
            TITLES[line["case"]],
            line["way"],
            *_quality(line),
            f"{line['instance_ms']:.3f}",
            _time(line, "layer_ms"),
        ]
        for line in lines
    ]
    return templates.table(names, rows)


def _power_table(lines: Sequence[Line]) -> str:
    names = ["network", "way", "instances", "cost", "gap %", "worst gap %", "equations", "bounds", "solved", "ms each"]
    rows = [
        [
            line["case"],
            line["way"],
            str(line["instances"]),
            *_quality(line),
            f"{100 * line['solved']:.1f} %",
            _time(line, "instance_ms"),
        ]
        for line in lines
    ]
    return templates.table(names, rows)


def _quality(line: Line) -> list[str]:
    """Cells of the objective and its gaps, mean and worst, and of the largest violations."""
    gaps = [f"{line['objective']:.4f}", f"{line['gap']:.3f}", f"{line['worst_gap']:.2g}"]
    return [*gaps, *(_small(line[name]) for name in ("equality", "inequality"))]


def _training(lines: Sequence[Line]) -> str:
    names = [
        "network",
        "served loads",
        "others",
        "soft epochs",
        "epochs",
        "ms per step",
        "batch",
        "projections",
        "failed",
    ]
    rows = [
        [
            line["case"],
            str(line["loads"]),
            str(line["unserved"]),
            str(line["soft_epochs"]),
            str(line["epochs"]),
            f"{line['step_ms']:.0f}",
            str(line["batch"]),
            f"{line['projections']:,}",
            str(line["failures"]),
        ]
        for line in lines
    ]
    return templates.table(names, rows)


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def _time(line: Line, name: str) -> str:
    return "" if line.get(name) is None else f"{line[name]:.1f}"


def plot(path: Path, lines: Sequence[Line]) -> None:
    """Write the figure: time against violation of all ways on DC3's problems, and the gap over epochs.

    Args:
        path: The file.
        lines: Result lines.
    """
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for line in lines:
        if line["case"] == "dc3-convex":
            worst = max(line["equality"], line["inequality"], 1e-16)
            colour = pictures.BLUE if line["way"] == OURS else pictures.GREY
            left.loglog(line["instance_ms"], worst, "o", ms=8, color=colour)
            place = (-5, -16) if line["way"] == "OSQP, one factor" else (-5, 8)
            left.annotate(
                line["way"], (line["instance_ms"], worst), xytext=place, textcoords="offset points", fontsize=8
            )
    left.set_xlabel("ms for each instance")
    left.set_ylabel("largest violation")
    left.set_title("DC3's convex problem: lower left is better", fontsize=10)
    left.set_xlim(0.05, 30)
    left.margins(y=0.25)
    for case, title in TITLES.items():
        for line in lines:
            if (line["case"], line["way"]) == (case, OURS) and line.get("curve"):
                best = line.get("validation_optimum")
                if best is not None:
                    gaps = [100 * (value - best) / abs(best) for value in line["curve"]]
                    right.semilogy(range(1, len(gaps) + 1), gaps, label=title)
    right.axhline(0.5, color="black", lw=1, ls=":", label="goal")
    right.set_xlabel("epoch")
    right.set_ylabel("gap to the optimum, %")
    right.set_title("validation instances", fontsize=10)
    right.legend(frameon=False)
    pictures.save(figure, path)
