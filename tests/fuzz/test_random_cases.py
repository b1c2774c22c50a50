"""Random constraints around known feasible points: whatever is returned as feasible is feasible, by NumPy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments.reliability.recipes import Recipe, numbered
from experiments.reliability.trial import broken, failed, trial
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.strategies import recipes

GROUPS = (
    ("any",),
    ("positive",),
    ("rising", "bent"),
    ("sums",),
    ("matrix", "correlation"),
    ("lots", "fading", "program"),
)
REGRESSIONS = Path(__file__).with_name("regressions.jsonl")
STEADY = settings(  # a failing case is not shrunk: that would take minutes
    max_examples=33,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)


@pytest.mark.parametrize("kinds", GROUPS, ids=" ".join)
def test_nothing_infeasible_is_returned_as_feasible(kinds):
    @STEADY
    @given(recipes(kinds))
    def check(recipe: Recipe) -> None:
        record = trial(recipe)
        assert not broken(record), (recipe.stored, record)

    check()


@pytest.mark.parametrize("line", REGRESSIONS.read_text().splitlines())
def test_what_failed_before_works(line):
    stored = json.loads(line)
    record = trial(Recipe.restored(stored["recipe"]))
    assert not broken(record), record
    assert stored.get("flagged") or not failed(record), record


def test_most_cases_are_solved():
    tried = [(recipe, trial(recipe)) for recipe in map(numbered, range(30)) if recipe.ordinary]
    assert sum(record["points"] for _, record in tried) > 100
    assert sum(failed(record) for _, record in tried) <= 1


@given(st.integers(0, 10**6))
@settings(max_examples=20, derandomize=True, database=None)
def test_a_recipe_survives_a_file(number):
    recipe = numbered(number)
    assert Recipe.restored(json.loads(json.dumps(recipe.stored))) == recipe == numbered(number)


def test_a_number_always_gives_the_same_case():
    first, second = trial(numbered(12)), trial(numbered(12))
    assert {k: v for k, v in first.items() if k != "seconds"} == {k: v for k, v in second.items() if k != "seconds"}
