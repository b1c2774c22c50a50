"""Result lines of joint laws as a page: what is missed first, then the tables, beside the paper's rebuttal.

The computation is that of means over seeds, and of differences that are paired by seed and field. The prose is in
``pages/joint-fields.md``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments import templates
from experiments.grid import Grid
from experiments.pde.joint import KEYS
from experiments.pde.joint_figures import COLOURS, picture
from experiments.table import Line, Request, Table, resumed
from experiments.templates import Figure, MissingFigureError

NAME = "joint-fields"
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"
DIAGONAL, ERRORS, JOINT = "diagonal", "errors", "joint"
FIXED = ("total", "integral")  # scales that the constraint fixes, or all but
LOW, HIGH = 0.85, 0.95  # coverage that is asked for
WORSE, DEARER = 1.02, 1.25  # largest ratios of CRPS and of the training step
EARLIER = ", functionals only"  # ends the names of laws that were calibrated without the energy score
REBUTTAL = {  # problem: MSE and energy score with a diagonal Q, and with one of rank 100
    "heat": ("5.15e-7", ".0063", "4.6e-6", ".0180"),
    "pme": ("5.35e-5", ".156", "1e-4", ".212"),
    "advection": (".0020", ".870", ".0007", ".537"),
    "stefan": (".0030", ".563", ".0019", ".457"),
}


def table(request: Request) -> Table:
    """The table, with its problems, laws and seeds."""
    quick = request.quick

    def grid(path: Path) -> Grid:
        from experiments.pde import joint

        problems, laws = request.names("problems"), request.names("methods")
        return joint.grid(path, request.chosen_seeds(range(3)), problems, laws, quick=quick)

    return Table(NAME, KEYS, resumed(grid, request), partial(render, quick=quick), plot)


def plot(path: Path, lines: Sequence[Line]) -> None:
    """Write the picture of the present calibration, else of the earlier one."""
    now, before = divided(lines)
    picture(path, now or before)


def render(lines: Sequence[Line], quick: bool = False) -> str:
    """Return the page.

    Args:
        lines: Result lines.
        quick: Whether they are those of a quick run, of which no findings are told.
    """
    now, before = divided(lines)
    laws, problems = _laws(now), _problems(now)
    values = {
        "count": len(lines),
        "hours": f"{sum(line['seconds'] for line in lines if line['law'].split(',')[0] != ERRORS) / 3600:.1f}",
        "command": "probhard bench joint-fields --quick" if quick else "probhard bench joint-fields",
        "seeds": "; ".join(f"{problem}: {_seeds(now, problem)}" for problem in problems) or "none",
        "picture": f"![Coverage by scale, and a draw of each law]({NAME}.png)",
        "goals": Figure(lambda _: _goals(now, [] if quick else _compared(now))),
        "coverage": _coverage(now, problems, laws) if now else "",
        "scores": _scores(now, problems, laws) if now else "",
        "crps": _by_scale(now, problems, laws) if now else "",
        "rebuttal": _rebuttal(now, before),
        "steps": Figure(lambda _: _steps(lines)),
        "earlier": Figure(lambda _: _earlier(before)),
    }
    return templates.fill(PAGE, values)


def divided(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Lines of laws that were calibrated with the energy score, and those without, by their plain names."""
    now = [line for line in lines if not line["law"].endswith(EARLIER)]
    earlier = [line for line in lines if line["law"].endswith(EARLIER)]
    before: list[Line] = [{**line, "law": line["law"].removesuffix(EARLIER)} for line in earlier]
    return now, before


def _laws(lines: Sequence[Line]) -> list[str]:
    return [law for law in COLOURS if any(line["law"] == law for line in lines)]


def _problems(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["problem"] for line in lines))


def _compared(lines: Sequence[Line]) -> list[str]:
    """Problems with a joint law beside the diagonal one."""
    return [p for p in _problems(lines) if _pairs(lines, p, JOINT) or _pairs(lines, p, ERRORS)]


def _earlier(lines: Sequence[Line]) -> str:
    """Goals, coverage and scores of the laws that were calibrated without the energy score."""
    if not lines:
        raise MissingFigureError("earlier")
    laws, problems = _laws(lines), _problems(lines)
    tables = [_coverage(lines, problems, laws, raw=False), _scores(lines, problems, laws)]
    return "\n\n".join([_goals(lines, _compared(lines)), *tables])


def _of(lines: Sequence[Line], problem: str, law: str) -> list[Line]:
    return [line for line in lines if (line["problem"], line["law"]) == (problem, law)]


def _seeds(lines: Sequence[Line], problem: str) -> str:
    """Seeds of each law of a problem."""
    of_law = {law: sorted(line["seed"] for line in _of(lines, problem, law)) for law in (DIAGONAL, ERRORS, JOINT)}
    texts = {law: " ".join(map(str, seeds)) or "none" for law, seeds in of_law.items()}
    return texts[JOINT] if len(set(texts.values())) == 1 else ", ".join(f"{law} {text}" for law, text in texts.items())


def _pairs(lines: Sequence[Line], problem: str, law: str) -> list[tuple[Line, Line]]:
    """Lines of the diagonal law and of another with the same seed."""
    others = {line["seed"]: line for line in _of(lines, problem, law)}
    return [(line, others[line["seed"]]) for line in _of(lines, problem, DIAGONAL) if line["seed"] in others]


def _mean(lines: Sequence[Line], *path: str | int) -> float | None:
    """The mean over lines of a figure at a path of names and positions; None if a line does not have it."""
    numbers = []
    for line in lines:
        value: Any = line
        for name in path:
            value = value[name]
        if value is None:
            return None
        numbers.append(float(value))
    return statistics.fmean(numbers) if numbers else None


def _scales(lines: Sequence[Line]) -> list[str]:
    return list(lines[0]["scales"])


def _goals(lines: Sequence[Line], problems: Sequence[str]) -> str:
    """Every goal for both joint laws, whether it is met, and where not."""
    if not problems:
        raise MissingFigureError("goals")
    rows = [
        row for law in (JOINT, ERRORS) for row in _goals_of(lines, [p for p in problems if _pairs(lines, p, law)], law)
    ]
    steps = _step_ratios(lines)
    if steps:
        text = ", ".join(f"{problem} {ratio:.2f}" for problem, ratio in steps.items())
        verdict = "met" if max(steps.values()) <= DEARER else "missed"
        rows.append([JOINT, "training step at most 1.25 times the diagonal one", f"{verdict}: {text}"])
    rows.sort(key=lambda row: row[2].startswith("met"))
    return templates.table(["law", "goal", "result"], rows)


def _goals_of(lines: Sequence[Line], problems: Sequence[str], law: str) -> list[list[str]]:
    """The goals of one law on the problems that it was measured on."""
    if not problems:
        return []
    outside, energy = [], []
    for problem in problems:
        of_law = _of(lines, problem, law)
        for index, scale in enumerate(_scales(of_law)):
            value = _mean(of_law, "covered_90", index)
            if value is not None and not LOW <= value <= HIGH:
                outside.append(f"{problem}, {scale}: {100 * value:.0f} %")
        low, mean, high = _paired(lines, problem, law)
        if not mean < 0:
            energy.append(f"{problem}: {mean:+.2g} [{low:+.2g}, {high:+.2g}]")
    ratios = {p: _ratio(lines, p, "crps", law) for p in problems}
    crps = statistics.fmean(ratios.values())
    each = ", ".join(f"{p} {100 * (r - 1):+.1f} %" for p, r in ratios.items())
    verdict = f"{'met' if crps <= WORSE else 'missed'}: {100 * (crps - 1):+.1f} % ({each})"
    return [
        [law, "calibrated coverage within 85 to 95 % at every scale", _verdict(outside)],
        [law, "energy score below that of the diagonal law", _verdict(energy)],
        [law, "marginal CRPS at most 2 % worse in the mean over problems", verdict],
    ]


def _verdict(misses: Sequence[str]) -> str:
    return f"missed: {'; '.join(misses)}" if misses else "met"


def _paired(lines: Sequence[Line], problem: str, law: str) -> tuple[float, float, float]:
    """Mean difference of the energy scores of fields, joint less diagonal, between 95 % limits of its normal law."""
    differences = [
        after - before
        for diagonal, joint in _pairs(lines, problem, law)
        for before, after in zip(diagonal["energy_fields"], joint["energy_fields"])
    ]
    mean = statistics.fmean(differences)
    half = 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
    return mean - half, mean, mean + half


def _ratio(lines: Sequence[Line], problem: str, name: str, law: str) -> float:
    pairs = _pairs(lines, problem, law)
    return sum(joint[name] for _, joint in pairs) / sum(diagonal[name] for diagonal, _ in pairs)


def _coverage(lines: Sequence[Line], problems: Sequence[str], laws: Sequence[str], raw: bool = True) -> str:
    """Coverage in % by scale, calibrated and, if wanted, raw."""
    scales = _scales(lines)
    rows = []
    for problem in problems:
        for law in laws:
            of_law = _of(lines, problem, law)
            if of_law:
                for kind, path in (("calibrated", ()), ("raw", ("raw",)))[: 1 + raw]:
                    cells = [_share(_mean(of_law, *path, "covered_90", index)) for index in range(len(scales))]
                    rows.append([problem, law, kind, *cells])
    return templates.table(["problem", "law", "", *scales], rows)


def _scores(lines: Sequence[Line], problems: Sequence[str], laws: Sequence[str]) -> str:
    """Energy score, CRPS and MSE, with the calibration numbers and the correlations of neighbours."""
    rows = []
    for problem in problems:
        for law in laws:
            of_law = _of(lines, problem, law)
            if not of_law:
                continue
            difference = ""
            if law in (ERRORS, JOINT) and _pairs(lines, problem, law):
                low, mean, high = _paired(lines, problem, law)
                difference = f"{mean:+.2g} [{low:+.2g}, {high:+.2g}]"
            figures = [_number(_mean(of_law, name)) for name in ("energy", "crps", "mse")]
            lags = [_number(_mean(of_law, name)) for name in ("lag_errors", "lag_draws", "own", "shared")]
            rows.append([problem, law, figures[0], difference, *figures[1:], *lags])
    head = ["problem", "law", "energy score", "less the diagonal law's, by field", "CRPS", "MSE"]
    return templates.table([*head, "lag 1, errors", "lag 1, draws", "own", "shared"], rows)


def _by_scale(lines: Sequence[Line], problems: Sequence[str], laws: Sequence[str]) -> str:
    """CRPS by scale, calibrated."""
    scales = [scale for scale in _scales(lines) if scale not in FIXED]
    rows = [
        [problem, law, *(_number(_mean(of_law, "crps_by_scale", index)) for index in range(len(scales)))]
        for problem in problems
        for law in laws
        if (of_law := _of(lines, problem, law))
    ]
    return templates.table(["problem", "law", *scales], rows)


def _rebuttal(now: Sequence[Line], before: Sequence[Line]) -> str:
    """MSE and energy score beside those of the paper's rebuttal; of each law the later calibration."""
    rows = []
    for problem, (mse, energy, mse_100, energy_100) in REBUTTAL.items():
        for law in COLOURS:
            of_law = _of(now, problem, law) or _of(before, problem, law)
            theirs = (mse, energy) if law == DIAGONAL else (mse_100, energy_100)
            if of_law:
                rows.append([problem, law, _number(_mean(of_law, "mse")), _number(_mean(of_law, "energy")), *theirs])
    return templates.table(["problem", "law", "MSE", "energy score", "rebuttal's MSE", "rebuttal's energy score"], rows)


def _step_ratios(lines: Sequence[Line]) -> dict[str, float]:
    timed = [line for line in lines if line["law"] == JOINT and "step_seconds" in line]
    return {line["problem"]: line["step_seconds"] / line["diagonal_step_seconds"] for line in timed}


def _steps(lines: Sequence[Line]) -> str:
    """Seconds of a training step."""
    rows = [
        [line["problem"], line["law"].removesuffix(EARLIER), f"{line['step_seconds']:.3f}",
         f"{line['diagonal_step_seconds']:.3f}", f"{line['step_seconds'] / line['diagonal_step_seconds']:.2f}"]
        for line in lines if "step_seconds" in line
    ]  # fmt: skip
    if not rows:
        raise MissingFigureError("steps")
    return templates.table(["problem", "law", "seconds per step", "of the diagonal law", "ratio"], rows)


def _share(value: float | None) -> str:
    return "fixed" if value is None else f"{100 * value:.0f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
