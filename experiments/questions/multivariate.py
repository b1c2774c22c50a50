"""Scores of whole fields, and how far draws leave bounds, shapes and variations, for the rows of the PDE tables.

The networks are those of the tables, trained anew for fewer epochs, so their marginal scores are larger than there. All
rows of a problem share epochs, data and seed. The prose is in ``pages/``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scipy.stats import kendalltau

from experiments import pictures, templates
from experiments.grid import Grid
from experiments.pde.measures import PAIRS
from experiments.pde.rows import TABLES
from experiments.pde.runs import Job
from experiments.pde.runs import grid as jobs
from experiments.records import Records
from experiments.table import Line, Lines, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError

NAME = "multivariate"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
KEYS = ("table", "problem", "m_range", "method", "seed", "epochs")
TRAINED = {  # rows of the paper's tables, cheap ones first
    "pde-linear": ("base", "probhard-or", "probhard-ob", "hardc", "softc"),
    "pde-nonlinear": ("base", "probhard-or", "probhard-ob"),
    "tvd": ("base", "probhard-tvd"),
}
EPOCHS = 30
SCORES = {"crps_draws": "CRPS", "energy": "energy score", "variogram": "variogram score"}
COLOURS = {"crps_draws": pictures.GREY, "energy": pictures.BLUE, "variogram": pictures.GREEN}


@dataclass(frozen=True)
class Trial:
    """A job of a PDE table whose lines name their table."""

    job: Job

    @property
    def name(self) -> str:
        """Identifies the trial; a valid file name."""
        return f"{self.job.table}-{self.job.name}"

    def expected(self) -> list[dict[str, Any]]:
        """Return the key fields of its lines."""
        return [self._named(key) for key in self.job.expected()]

    def run(self, folder: Path, progress: bool = True) -> list[dict[str, Any]]:
        """Train, measure, and return one line per row; curves of figures are left out."""
        return [
            {name: value for name, value in self._named(line).items() if name != "profile"}
            for line in self.job.run(folder, progress)
        ]

    def _named(self, line: Line) -> dict[str, Any]:
        return {"table": self.job.table, "m_range": None, **line}


def table(request: Request) -> Table:
    """The table: problems and trained rows of all PDE tables, or those that are named."""

    def grid(path: Path) -> Grid:
        chosen, rows = request.names("problems"), request.names("methods")
        epochs = request.chosen_epochs(EPOCHS)
        units: list[Trial] = []
        for name, trained in TRAINED.items():
            own = [problem for problem in chosen if problem in TABLES[name].problems]
            some = [row for row in trained if not rows or row in rows]
            if (chosen and not own) or not some:
                continue
            found = jobs(name, path, epochs, request.chosen_seeds(), own, some, ("crps",), request.quick)
            units += [Trial(_light(job)) for job in found.units if isinstance(job, Job)]
        units.sort(key=lambda trial: trial.job.trained == "softc")
        return Grid(units, Records(path, KEYS))

    return Table(NAME, KEYS, resumed(grid, request), render, plot)


def _light(job: Job) -> Job:
    """The job without compilation, which does not pay off in few epochs."""
    return replace(job, compiled=False)


def groups(lines: Lines) -> dict[str, list[Line]]:
    """Lines by table and problem."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        span = f", m in [{line['m_range'][0]:g}, {line['m_range'][1]:g}]" if line["m_range"] else ""
        found.setdefault(f"{line['table']}: {line['problem']}{span}", []).append(line)
    return found


def render(lines: Lines) -> str:
    """Return the page."""
    return templates.fill(
        PAGE,
        {
            "count": len(lines),
            "pairs": PAIRS,
            "epochs": ", ".join(str(epochs) for epochs in sorted({line["epochs"] for line in lines})),
            "hours": f"{sum({_unit(line): line['seconds'] for line in lines}.values()) / 3600:.1f}",
            "agreement": _agreement(lines),
            "changed": _changed(lines),
            "missing": _missing(lines),
            "scores": _scores(lines),
            "violations": _violations(lines),
            "worst": Figure(partial(_worst, lines)),
        },
    )


def _unit(line: Line) -> tuple[Any, ...]:
    """What identifies a trained network: rows that share one have its seconds to all digits."""
    return line["table"], line["problem"], str(line["m_range"]), line["seconds"]


def _best(lines: Lines, score: str) -> str:
    return str(min(lines, key=lambda line: line[score])["method"])


def _agreement(lines: Lines) -> str:
    """Rank correlation of the rows' scores, by problem."""
    rows = []
    for name, own in groups(lines).items():
        if len(own) < 3:
            continue
        marginal = [line["crps_draws"] for line in own]
        taus = [f"{kendalltau(marginal, [line[score] for line in own]).statistic:.2f}" for score in SCORES][1:]
        rows.append([name, str(len(own)), *taus, *(_best(own, score) for score in SCORES)])
    if not rows:
        raise MissingFigureError("agreement")
    names = ["table: problem", "rows", "tau, CRPS and energy", "tau, CRPS and variogram"]
    return templates.table([*names, *(f"best {title}" for title in SCORES.values())], rows)


def _changed(lines: Lines) -> str:
    """Problems on which a score of fields prefers another row than CRPS."""
    found = [
        f"{name} ({_best(own, 'crps_draws')} by CRPS, {_best(own, 'energy')} by energy score)"
        for name, own in groups(lines).items()
        if _best(own, "crps_draws") != _best(own, "energy")
    ]
    return "; ".join(found) if found else "none"


def _missing(lines: Lines) -> str:
    """Networks that were not trained, by table."""
    parts = []
    for name, trained in TRAINED.items():
        for problem in TABLES[name].problems:
            key = TABLES[name].problems[problem]()
            span = [key.lower, key.upper] if "m_range" in TABLES[name].keys else None
            own = [x for x in lines if x["table"] == name and x["problem"] == key.name and x["m_range"] in (span, None)]
            left = [row for row in trained if not any(line["method"] == row for line in own)]
            parts += [f"{name}, {problem}: {', '.join(left)}"] if left else []
    return f"Not run yet: {'; '.join(parts)}." if parts else ""


def _scores(lines: Lines) -> str:
    parts = []
    for name, own in groups(lines).items():
        rows = [
            [line["method"], f"{line['mse']:.3g}", *(f"{line[score]:.4g}" for score in SCORES)]
            for line in sorted(own, key=lambda line: line["energy"])
        ]
        parts.append(f"### {name}\n\n" + templates.table(["row", "MSE", *SCORES.values()], rows))
    return "\n\n".join(parts)


def _violations(lines: Lines) -> str:
    """Shares and depths of what draws break, for every row."""
    columns: dict[str, Callable[[Line], str]] = {
        "law, worst residual": lambda line: f"{line['ce_draws']:.1e}",
        "values beyond bounds": lambda line: _share(line["outside_bounds"]),
        "deepest": lambda line: f"{line['outside_depth']:.2g}",
        "rising steps": lambda line: _share(line["rising"]) if "rising" in line else "not monotone",
        "highest": lambda line: f"{line['rising_depth']:.2g}" if "rising_depth" in line else "",
        "variation over exact": lambda line: f"{line['variation']:.3g}",
        "flagged": lambda line: _share(line["infeasible"]),
    }
    parts = []
    for name, own in groups(lines).items():
        rows = [[line["method"], *(cell(line) for cell in columns.values())] for line in own]
        parts.append(f"### {name}\n\n" + templates.table(["row", *columns], rows))
    return "\n\n".join(parts)


def _share(value: float) -> str:
    return f"{100 * value:.2g} %"


def _worst(lines: Lines, method: str) -> str:
    """The largest share of values beyond bounds of a row, and where."""
    own = [line for line in lines if line["method"] == method]
    if not own:
        raise MissingFigureError(method)
    worst = max(own, key=lambda line: line["outside_bounds"])
    return f"{_share(worst['outside_bounds'])} ({worst['problem']}, up to {worst['outside_depth']:.2g})"


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: scores of all rows over the unconstrained network's, by problem."""
    from matplotlib.figure import Figure as Canvas

    parts = groups(lines)
    figure = Canvas(figsize=(10, 0.6 + 0.26 * len(lines) + 0.5 * len(parts)), layout="constrained")
    panels = figure.subplots(
        len(parts),
        1,
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [len(own) + 1 for own in parts.values()]},
    )[:, 0]
    for axes, (name, own) in zip(panels, parts.items()):
        base = next((line for line in own if line["method"] == "base"), own[0])
        for place, line in enumerate(own):
            for score, colour in COLOURS.items():
                axes.plot(line[score] / base[score], place, "o", color=colour, ms=5, label=SCORES[score])
        axes.set_yticks(range(len(own)), [line["method"] for line in own], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1.0, color="#cccccc", lw=0.8, zorder=0)
        axes.set_title(name, fontsize=9, loc="left")
    panels[-1].set(xscale="log", xlabel="score over that of the unconstrained network (left is better)")
    handles, labels = panels[0].get_legend_handles_labels()
    shown = dict(zip(labels, handles))
    figure.legend(shown.values(), shown.keys(), ncols=3, frameon=False, loc="outside upper center")
    pictures.save(figure, path)
