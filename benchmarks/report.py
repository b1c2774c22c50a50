"""Result lines as a page with a table per suite, and as a picture of all ratios; the prose is in ``pages/``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from experiments.records import Records
from experiments.templates import Figure, MissingFigureError
from matplotlib.figure import Figure as Canvas

from benchmarks.suites import SUITES
from experiments import templates

Line = Mapping[str, Any]

PAGE = Path(__file__).parent / "pages" / "speed.md"
COLUMNS = ("case", "peer", "peer ms", "our ms", "ratio", "goal", "peer off by", "we are off by", "peer MB", "our MB")
LAYER = ("case", "without, ms", "with, ms", "factor", "goal")


def write(folder: Path, speed: Sequence[Line], overhead: Sequence[Line], suites: Sequence[Line]) -> list[Path]:
    """Write ``speed.md`` and ``speed.png``; returns the files that were written.

    Args:
        folder: Where to write; the lines of ``million`` and ``bandwidth`` are read from it.
        speed: Lines of ``Comparison.record``.
        overhead: Lines of ``Overhead.record``.
        suites: How each suite ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    million = [x for x in Records(folder / "growth.jsonl", ("case", "axis", "size")).read() if x.get("dense_memory")]
    distances = Records(folder / "bandwidth.jsonl", ("case", "dtype")).read()
    page = folder / "speed.md"
    page.write_text(render(speed, overhead, suites, million, distances))
    return [page, *picture(folder / "speed.png", speed)]


def render(
    speed: Sequence[Line],
    overhead: Sequence[Line],
    suites: Sequence[Line],
    million: Sequence[Line] = (),
    distances: Sequence[Line] = (),
) -> str:
    """Return the page: goals first, then a table per suite with notes, then how the suites ended.

    Args:
        speed: Lines of ``Comparison.record``.
        overhead: Lines of ``Overhead.record``.
        suites: How each suite ended.
        million: Lines of ``million``.
        distances: Lines of ``bandwidth``.
    """
    rates = [line["bandwidth"] / 1e9 for line in distances]
    ends = [(line["suite"], line["status"], f"{line['seconds']:.0f}", _cell(line["reason"])) for line in suites]
    values = {
        "goals": _goals(speed, overhead),
        "far": Figure(lambda _: f"{sum(line['factor'] > line['goal'] for line in _some(distances))}"),
        "passes": len(distances),
        "goal": max((line["goal"] for line in distances), default=0),
        "families": "\n\n".join(_families(speed, overhead)),
        "suites": templates.table(("suite", "end", "seconds", "reason"), ends) if suites else "",
        "million": _million(million) if million else "",
        "bandwidth": Figure(lambda _: f"{min(_some(rates)):.0f} to {max(rates):.0f}"),
        "distances": _distances(distances),
    }
    return templates.fill(PAGE, values)


Item = TypeVar("Item")


def _some(items: Sequence[Item]) -> Sequence[Item]:
    """The items, of which there must be some."""
    if not items:
        raise MissingFigureError("lines of bandwidth")
    return items


def _families(speed: Sequence[Line], overhead: Sequence[Line]) -> Iterator[str]:
    """The heading, the tables, the notes and the setting of every suite that has lines."""
    for family in dict.fromkeys([*SUITES, *(line.get("family", "") for line in (*speed, *overhead))]):
        here = [line for line in speed if line.get("family", "") == family]
        layers = [line for line in overhead if line.get("family", "") == family]
        if here or layers:
            yield f"## {SUITES[family].title if family in SUITES else family}"
            yield from _tables(here, layers)
            yield _setting([*here, *layers])


def _million(lines: Sequence[Line]) -> str:
    rows = [
        (
            _cell(line["case"].removeprefix("million, ")),
            f"{line['size']:,}",
            f"{line['seconds_each']:.2f}",
            f"{line['count']:,}",
            "" if line["memory"] is None else f"{line['memory'] / 1e9:.1f}",
            f"{line['dense_memory'] / 1e9:,.0f}",
            _small(line["violation"]),
        )
        for line in lines
    ]
    columns = ("case", "series", "seconds each", "how many", "peak GB so far", "dense GB", "off by")
    return templates.table(columns, rows)


def _distances(lines: Sequence[Line]) -> str:
    rows = [
        (
            _cell(line["case"]),
            line["dtype"],
            f"{line['size']:,}",
            _milliseconds(line["seconds"]),
            _milliseconds(line["pass_seconds"]),
            _judged(f"{line['factor']:.1f}", line["factor"] > line["goal"]),
        )
        for line in lines
    ]
    return templates.table(("case", "dtype", "variables", "ms", "pass ms", "factor, goal 5"), rows)


def reached(line: Line) -> bool | None:
    """Return whether a line meets its goal; None if it has no goal."""
    if line.get("goal") is None:
        return None
    return line["ratio"] >= line["goal"] if "ratio" in line else line["factor"] <= line["goal"]


def _goals(speed: Sequence[Line], overhead: Sequence[Line]) -> str:
    judged = [line for line in (*speed, *overhead) if reached(line) is not None]
    missed = [line for line in judged if not reached(line)]
    text = f"{len(judged) - len(missed)} of {len(judged)} goals are met."
    wrong = dict.fromkeys(line["peer"] for line in speed if line.get("wrong"))
    text += f" Wrong in at least one case: {', '.join(wrong)}." if wrong else ""
    for line in missed:
        figure = f"ratio {line['ratio']:.3g}" if "ratio" in line else f"factor {line['factor']:.3g}"
        against = f" against {line['peer']}" if "peer" in line else ""
        text += f"\n- Missed: {line['case']}{against}, {figure}, goal {line['goal']:g}."
    return text


def _tables(speed: Sequence[Line], overhead: Sequence[Line]) -> list[str]:
    notes: list[str] = []

    def case(line: Line) -> str:
        if not line.get("explanation"):
            return _cell(line["case"])
        if line["explanation"] not in notes:
            notes.append(line["explanation"])
        return f"{_cell(line['case'])} [{notes.index(line['explanation']) + 1}]"

    rows = [
        (
            case(x),
            _cell(x["peer"]) + (" (wrong)" if x.get("wrong") else ""),
            _milliseconds(x["peer_seconds"]),
            _milliseconds(x["our_seconds"]),
            _judged(f"{x['ratio']:.3g}", reached(x) is False or x["ratio"] < 1),
            "" if x.get("goal") is None else f">= {x['goal']:g}",
            *(_small(x[name], x.get("wrong")) for name in ("peer_violation", "our_violation")),
            *(_megabytes((x.get("memory") or {}).get(name)) for name in ("peer", "ours")),
        )
        for x in speed
    ]
    layers = [
        (
            case(x),
            _milliseconds(x["base_seconds"]),
            _milliseconds(x["our_seconds"]),
            _judged(f"{x['factor']:.3f}", reached(x) is False),
            "" if x.get("goal") is None else f"<= {x['goal']:g}",
        )
        for x in overhead
    ]
    parts = [templates.table(COLUMNS, rows)] if rows else []
    parts += [templates.table(LAYER, layers)] if layers else []
    return [*parts, "\n".join(f"[{k}] {note}  " for k, note in enumerate(notes, 1))] if notes else parts


def _setting(lines: Sequence[Line]) -> str:
    versions = {f"{name} {version}": None for line in lines for name, version in (line.get("versions") or {}).items()}
    threads = sorted({line.get("threads", 1) for line in lines})
    dates = sorted({line["date"] for line in lines if line.get("date")})
    loads = [line["load"] for line in lines if line.get("load") is not None]
    said = [f"{'/'.join(map(str, threads))} thread{'s' if threads != [1] else ''}", ", ".join(versions), *dates[-1:]]
    said += [f"load of the machine {min(loads):.1f} to {max(loads):.1f}"] if loads else []
    return f"*{'; '.join(part for part in said if part)}*"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _judged(text: str, bad: bool) -> str:
    return f"**{text}**" if bad else text


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _small(value: float | None, wrong: bool | None = False) -> str:
    if value is None:  # lines hold None for NaN too
        return "not finite" if wrong else ""
    return f"{value:.0e}" if value else "0"


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.1f}"


def picture(path: Path, speed: Sequence[Line]) -> list[Path]:
    """Write all ratios as bars on a logarithmic axis, with their goals, hatched if the peer is wrong."""
    if not speed:
        return []
    order = {family: k for k, family in enumerate(SUITES)}
    lines = sorted(speed, key=lambda line: order.get(line.get("family", ""), len(order)))
    figure = Canvas(figsize=(11, 1.6 + 0.24 * len(lines)), layout="constrained")
    axes = figure.add_subplot()
    for row, line in enumerate(lines):
        colour = f"C{order.get(line.get('family', ''), 0) % 10}"
        pattern = "////" if line.get("wrong") else None
        axes.barh(row, line["ratio"] - 1, left=1, color=colour, alpha=0.75, hatch=pattern, edgecolor="white")
        axes.text(max(line["ratio"], 1) * 1.06, row, f"{line['ratio']:.3g}", va="center", fontsize=8)
        if line.get("goal") is not None:
            axes.plot([line["goal"]] * 2, [row - 0.42, row + 0.42], color="black", linewidth=2)
    axes.set_yticks(range(len(lines)), [f"{line['case']}  |  {line['peer']}" for line in lines], fontsize=8)
    axes.set(xscale="log", xlabel="times faster than the peer (black: goal; hatched: the peer's result is wrong)")
    axes.set_xlim(min(0.5, 0.7 * min(line["ratio"] for line in lines)), 3 * max(line["ratio"] for line in lines))
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.axvline(1, color="black", linewidth=0.8)
    figure.savefig(path, dpi=120)
    return [path]
