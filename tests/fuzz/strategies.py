"""Strategies of hypothesis: recipes of cases, which shrink to few parts, few variables and plain laws."""

from __future__ import annotations

from experiments.reliability.recipes import (
    ALONE,
    BATCHES,
    COVARIANCES,
    DISTANCES,
    FREE,
    KINDS,
    METRICS,
    ORDINARY,
    Recipe,
)
from hypothesis import strategies as st


@st.composite
def recipes(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(KINDS)) -> Recipe:
    """Recipes around feasible points of some kinds."""
    kind = draw(st.sampled_from(kinds))
    names = draw(st.lists(st.sampled_from([*KINDS[kind], *FREE]), min_size=1, max_size=3))
    if kind in ALONE:
        names = [kind, *draw(st.lists(st.sampled_from(ALONE[kind] or (kind,)), max_size=1))]
    size, decades = draw(st.one_of(st.just((0.0, 0.0)), _ordinary(), _beyond()))
    return Recipe(
        seed=draw(st.integers(0, 2**31)),
        kind=kind,
        n=draw(st.integers(1, 12)),
        batch=draw(st.sampled_from(BATCHES)),
        parts=tuple(names),
        size=size,
        decades=decades,
        flat=draw(st.booleans()),
        covariance=draw(st.sampled_from(COVARIANCES)),
        certain=draw(st.booleans()) and draw(st.booleans()),
        distance=draw(st.sampled_from(DISTANCES)),
        metric=draw(st.sampled_from(METRICS)),
        dtype=draw(st.sampled_from(("float64", "float32"))),
    ).solvable()


def _ordinary() -> st.SearchStrategy[tuple[float, float]]:
    """Exponents of variances within six decades."""
    half = ORDINARY / 2
    return st.tuples(st.floats(-half / 2, half / 2), st.floats(0, half))


def _beyond() -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(st.floats(-12, 12), st.floats(0, 12))
