"""The page of reliability: cases around known feasible points, peers on the same cases, damaged files."""

from __future__ import annotations

import statistics
from collections import Counter
from functools import partial
from pathlib import Path

from experiments import pictures, templates
from experiments.reliability import runs
from experiments.reliability.load_section import section
from experiments.reliability.peers import PEERS
from experiments.reliability.recipes import CONES, FREE, KINDS
from experiments.table import Line, Lines, Request, Table, measured
from experiments.templates import Figure, MissingFigureError
from probhard.errors import check_choices

PAGE = Path(__file__).parent / "pages" / "reliability.md"
KEYS = ("group", "number")
QUICK = 200
SLOW = 20.0
COLOURS = {"ordinary": pictures.GREEN, "beyond": "#c9772b"}
TITLES = {"ordinary": "variances within 1e±6", "beyond": "wider variances, or zeros"}
WORDS = {"l1_ball": "L1 ball", "lots": "semicontinuous", "fading": "variation diminishing", "program": "convex program"}


def table(request: Request, cases: int | None = None) -> Table:
    """The table of reliability.

    Args:
        request: The options of the command; ``problems`` are groups of ``runs.GROUPS``.
        cases: Number of cases; by default 10,000, or 200 in a quick run.
    """
    groups = request.names("problems")
    check_choices("problem", groups, runs.GROUPS)
    count = cases or (QUICK if request.quick else runs.CASES)
    work = measured(partial(runs.pieces, groups=groups, cases=count))
    return Table("reliability", KEYS, work, partial(render, load=section(request.folder)), plot)


def render(lines: Lines, load: str = "") -> str:
    """The page.

    Args:
        lines: Result lines of cases, peers and readers.
        load: The section on kills, disks and load.
    """
    own = [line for line in lines if line["group"] == runs.OURS]
    return templates.fill(
        PAGE,
        {
            "against": _against(own),
            "load": load,
            "ours": _ours(own),
            "failed": _failures(own),
            "sets": _sets(own),
            "peers": _peers(lines),
            "readers": _readers(lines),
            "count": Figure(lambda group: f"{_number(lines, group.strip()):,}"),
            "compared": sum(line.get("compared", 0) for line in own),
            "farther": sum(line.get("farther", 0) for line in own),
        },
    )


def failed(line: Line) -> bool:
    """Whether points were flagged, or an error raised, although a feasible point is known."""
    return bool(line.get("flagged") or (line.get("raised") and not line.get("refused") and not line.get("bare")))


def _number(lines: Lines, group: str) -> int:
    found = sum(line["group"] == group for line in lines)
    if not found:
        raise MissingFigureError(group)
    return found


def _strata(own: Lines) -> dict[str, list[Line]]:
    return {
        name: [line for line in own if line["ordinary"] == (name == "ordinary") and not line.get("refused")]
        for name in TITLES
    }


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.2g} %)" if total else "0"


def _against(own: Lines) -> str:
    parts = []
    for name, kept in _strata(own).items():
        count = sum(map(failed, kept))
        if kept and count:
            parts.append(f"{_share(count, len(kept))} of the cases with {TITLES[name]}")
    if not parts:
        return "No case failed."
    return f"A projection failed, with a flag, although a feasible point is known: in {' and in '.join(parts)}."


def _ours(own: Lines) -> str:
    rows = []
    for name, kept in _strata(own).items():
        if not kept:
            continue

        def total(field: str, kept: list[Line] = kept) -> int:
            return sum(line.get(field, 0) for line in kept)

        rows.append(
            [
                TITLES[name],
                f"{len(kept):,}",
                f"{total('points'):,}",
                _share(sum(map(failed, kept)), len(kept)),
                _share(total("flagged"), total("points")),
                *(str(total(field)) for field in ("silent", "nan", "bad_gradients")),
                str(sum(bool(line.get("bare")) for line in kept)),
                str(sum(line["seconds"] > SLOW for line in kept)),
                f"{1e3 * statistics.median(line['seconds'] for line in kept):.0f}",
            ]
        )
    names = ["variances", "cases", "points", "failed cases", "flagged points", "silently infeasible", "NaN unflagged"]
    names += ["NaN gradients", "bare tracebacks", "over 20 s", "median CPU ms"]
    return templates.table(names, rows) if rows else ""


def _failures(own: Lines) -> str:
    """The joins that fail most."""
    found = Counter(" & ".join(sorted(map(_word, line["parts"]))) for line in own if failed(line))
    rows = [[name, str(count)] for name, count in found.most_common(12)]
    return templates.table(["sets", "failed cases"], rows) if rows else ""


def _word(name: str) -> str:
    return WORDS.get(name, name.replace("_", " ").replace("nonnegative", "non-negative"))


def _by_set(own: Lines) -> dict[str, dict[str, tuple[int, int]]]:
    """Failed cases and cases with each set, by stratum."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name in dict.fromkeys((*FREE, *CONES, *(name for names in KINDS.values() for name in names))):
        for stratum, kept in _strata(own).items():
            mine = [line for line in kept if name in line["parts"]]
            if mine:
                found.setdefault(name, {})[stratum] = sum(map(failed, mine)), len(mine)
    return found


def _sets(own: Lines) -> str:
    rows = []
    for name, strata in _by_set(own).items():
        cells = [f"{strata[key][0]} of {strata[key][1]}" if key in strata else "" for key in TITLES]
        rows.append([_word(name), *cells])
    return templates.table(["set, alone or joined", *TITLES.values()], rows) if rows else ""


def _peers(lines: Lines) -> str:
    rows = []
    for peer in PEERS:
        given = [line for line in lines if line["group"] == peer]
        tried = [line for line in given if line["expressed"]]
        if not tried:
            continue
        for who, name in (("ours", "probhard"), ("peer", peer)):
            ended = Counter(line[f"{who}_ended"].split(":")[0] for line in tried)
            worst = max((line[f"{who}_violation"] or 0.0 for line in tried), default=0.0)
            seconds = statistics.median(line[f"{who}_seconds"] for line in tried)
            counts = [
                ended[key] for key in ("solved", "infeasible", "nan", "nan gradient", "crashed", "flagged", "slow")
            ]
            label = f"{name}, {len(tried)} of {len(given):,} cases" if who == "ours" else f"**{name}**, the same"
            rows.append([label, *map(str, counts), f"{worst:.1e}", f"{1e3 * seconds:.1f}"])
    names = ["library", "feasible", "infeasible, silent", "NaN", "NaN gradient", "crashed", "flagged", "over 60 s"]
    return templates.table([*names, "worst violation", "median CPU ms"], rows) if rows else ""


def _readers(lines: Lines) -> str:
    rows = []
    for group in runs.GROUPS:
        tried = [line for line in lines if line["group"] == group and group.startswith(runs.READING)]
        if tried:
            ended = Counter(line["ended"] for line in tried)
            other = len(tried) - ended["read"] - ended["rejected"]
            most = max(line["seconds"] for line in tried)
            cells = (len(tried), ended["read"], ended["rejected"], other)
            rows.append([group.removeprefix(runs.READING), *(f"{cell:,}" for cell in cells), f"{most:.2f}"])
    names = ["format", "files", "read", "rejected in three parts", "bare tracebacks, memory, time", "longest, CPU s"]
    return templates.table(names, rows) if rows else ""


def plot(path: Path, lines: Lines) -> None:
    """Write the figure: the share of failed cases with each set."""
    from matplotlib.figure import Figure as Canvas

    found = _by_set([line for line in lines if line["group"] == runs.OURS])
    if not found:
        return
    figure = Canvas(figsize=(9, 0.34 * len(found) + 1.2), layout="constrained")
    axes = figure.subplots()
    for shift, (stratum, colour) in zip((-0.2, 0.2), COLOURS.items()):
        shares = [
            100 * strata[stratum][0] / strata[stratum][1] if stratum in strata else 0 for strata in found.values()
        ]
        places = [place + shift for place in range(len(found))]
        axes.barh(places, shares, height=0.38, color=colour, label=TITLES[stratum])
    axes.set_yticks(range(len(found)), [_word(name) for name in found])
    axes.invert_yaxis()
    axes.set(xlabel="cases with a flagged point, %")
    axes.legend(frameon=False)
    pictures.save(figure, path)
