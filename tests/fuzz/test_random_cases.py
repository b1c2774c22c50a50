"""Random constraints around known feasible points: whatever is returned as feasible is feasible, by NumPy."""

from __future__ import annotations

import pytest
from experiments.reliability.trial import trial

CASES = range(60)


@pytest.mark.parametrize("block", range(6))
def test_nothing_infeasible_is_returned_as_feasible(block):
    for number in CASES[10 * block : 10 * block + 10]:
        record = trial(number)
        assert record["traceback"] is None, record
        assert (record["silent"], record["nan"], record["bad_gradients"]) == (0, 0, 0), record


def test_most_cases_are_solved():
    records = [trial(number) for number in range(20)]
    points = sum(record["points"] for record in records)
    assert points > 100
    assert sum(record["flagged"] for record in records) <= 0.05 * points


def test_a_number_always_gives_the_same_case():
    first, second = trial(12), trial(12)
    assert {k: v for k, v in first.items() if k != "seconds"} == {k: v for k, v in second.items() if k != "seconds"}
