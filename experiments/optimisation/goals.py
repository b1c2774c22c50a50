"""What the optimisation table set out to show, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.table import Line

OURS, UPDATED, PINET, TUNED = "probhard", "OSQP, one factor", "Pi-net, 200 iterations", "Pi-net, 50 tuned iterations"
GAP, FASTER, ROUNDING = 0.5, 8.0, 1e-11  # percent; times OSQP; absolute violation


def goals(lines: Sequence[Line]) -> list[list[str]]:
    """Rows of the table of goals: goal, asked, measured, met."""
    return [[goal, asked, measured, "yes" if met else "**no**"] for goal, asked, measured, met in _judged(lines)]


def missed(lines: Sequence[Line]) -> str:
    """The goals that were missed, in one sentence."""
    failed = [f"{goal} ({measured}, asked: {asked})" for goal, asked, measured, met in _judged(lines) if not met]
    return f"Missed: {'; '.join(failed)}." if failed else "All goals below are met."


def _judged(lines: Sequence[Line]) -> Iterator[tuple[str, str, str, bool]]:
    by_key = {(line["case"], line["way"]): line for line in lines}
    for (case, way), line in by_key.items():
        if way != OURS:
            continue
        power = case.startswith("case")
        if "gap" in line and line["gap"] is not None:
            yield f"{case}: gap to the optimum", f"under {GAP} %", f"{line['gap']:.3f} %", line["gap"] < GAP
        worst = max(line["equality"], line["inequality"])
        yield f"{case}: violations at rounding", f"under {ROUNDING:.0e}", f"{worst:.0e}", worst < ROUNDING
        if power:
            yield f"{case}: all test points solved", "100 %", f"{100 * line['solved']:.1f} %", line["solved"] == 1
        if (case, UPDATED) in by_key:
            ratio = by_key[case, UPDATED]["instance_ms"] / line["instance_ms"]
            yield f"{case}: faster than OSQP (one factor)", f"{FASTER:g} times", f"{ratio:.1f} times", ratio >= FASTER
        for rival in (PINET, TUNED):
            if (case, rival) in by_key:
                ratio = by_key[case, rival]["instance_ms"] / line["instance_ms"]
                yield f"{case}: no slower than {rival}", "1 times", f"{ratio:.1f} times", ratio >= 1
