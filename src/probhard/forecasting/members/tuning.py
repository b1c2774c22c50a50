"""The pool of members: weights and one factor, learned on past windows after each member's own numbers.

    paths:  drawn from member k with probability w_k,  then  mean + c (path - mean),  then projected onto the bounds.

Weights minimise the pooled CRPS over past windows (``models.pool``) and are shrunk, as windows get few, to
weights that are equal for members of equal scores.
A linear pool of calibrated members is too wide, so c is fitted on the pooled paths.
Members on trial get a weight only if the pool gains more than twice its standard error over the windows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from probhard._util.numerics import TINY
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import MemberForecast
from probhard.forecasting.members.coherent import Recipe, Tuned, coherent_draws, tune
from probhard.forecasting.models import pool, spread

PAST_DRAWS, FEWEST_DRAWS = 200, 10  # paths of a member in a past window; least number for very many series
PAST_NUMBERS = 100_000_000  # of all paths in past windows, to bound the memory
FEW = 3.0  # windows at which weights are halfway between prior and best
FALL = 4.0  # of a member's prior weight with its score: 1.1 times the best score has two thirds of its weight
LEAST = 0.01  # smaller weights are 0
SURE, FEWEST = 2.0, 3  # standard errors of a gain, and least number of windows, that end a trial well


@dataclass(frozen=True)
class PoolRecipe(Recipe):
    """Which parts of the pool are used.

    Args:
        weights: Whether weights are learned; otherwise they are equal.
        factor: Whether the factor after pooling is fitted.
    """

    weights: bool = True
    factor: bool = True


@dataclass(frozen=True)
class TunedPool:
    """What was learned on past windows.

    Args:
        members: Scales and metric by member.
        weights: Weight by member, with sum 1.
        factor: c, on the deviations of pooled paths.
        windows: Number of past windows.
        scores: CRPS on the past windows by member, and of the pool.
    """

    members: dict[str, Tuned]
    weights: dict[str, float]
    factor: float = 1.0
    windows: int = 0
    scores: dict[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """All numbers as plain values."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> TunedPool:
        """The numbers of a ``record``."""
        return cls(**{**record, "members": {name: Tuned.of(one) for name, one in record["members"].items()}})

    def sentences(self) -> list[str]:
        """Explain the numbers, one sentence each."""
        shares = ", ".join(f"{name} {100 * weight:.0f} %" for name, weight in self.weights.items())
        learned = f"learned on {self.windows} past windows" if self.windows else "not learned: the history is too short"
        first = f"Pool: {shares}, {learned}; deviations of the pooled paths times {self.factor:.2f}."
        return [first, *(tuned.sentence(name) for name, tuned in self.members.items())]


def tune_pool(
    made: Sequence[MemberForecast],
    data: HierarchicalData,
    horizon: int,
    origins: Sequence[int],
    recipe: PoolRecipe,
    trial: Collection[str] = (),
) -> TunedPool:
    """Learn scales, metrics, weights and the factor on past windows.

    Args:
        made: Forecasts of all members at the origins, and at the end.
        data: The history.
        horizon: Number of steps H.
        origins: Past origins; none leaves everything at its prior.
        recipe: Which parts are learned.
        trial: Names of members on trial.
    """
    targets = [data.observed[end : end + horizon] for end in origins]
    used = [k for k, y in enumerate(targets) if np.nansum(np.abs(y)) > 0]
    targets, count = [targets[k] for k in used], len(used)
    if count < len(origins):
        made = [_only(member, used) for member in made]
    members = {one.name: tune(one, targets, recipe) for one in made}
    on_trial = np.array([one.name in trial for one in made])
    equal = np.ones(len(made)) if on_trial.all() else 1.0 - on_trial
    equal = equal / equal.sum()
    if not count or (len(made) == 1 and not recipe.factor):
        return TunedPool(members, dict(zip(members, equal.tolist())), 1.0, count)
    numbers = count * len(made) * targets[0].size
    paths = int(np.clip(PAST_NUMBERS // numbers, FEWEST_DRAWS, PAST_DRAWS))
    drawn = [
        [coherent_draws(one, k, members[one.name], data.hierarchy, paths, k, recipe) for one in made]
        for k in range(count)
    ]
    terms = [pool.scores(draws, y) for draws, y in zip(drawn, targets)]
    weights = earned_weights(terms, on_trial) if recipe.weights and len(made) > 1 else equal
    factor = 1.0
    if recipe.factor and len(made) > 1:
        mixed = [pool.pooled(draws, weights, paths, k) for k, draws in enumerate(drawn)]
        factor = spread.factor([torch.from_numpy(x) for x in mixed], [torch.from_numpy(y) for y in targets])
    alone = np.mean([a - b.diagonal() / 2 for a, b in terms], axis=0)
    together = float(pool_scores(terms, weights).mean())
    scores = {**dict(zip(members, alone.tolist())), "pool": together}
    return TunedPool(members, dict(zip(members, weights.tolist())), factor, count, scores)


def earned_weights(terms: Sequence[tuple[np.ndarray, np.ndarray]], on_trial: np.ndarray) -> np.ndarray:
    """Shrunk weights, (K,), without the members on trial unless the pool gains by them beyond chance.

    Args:
        terms: Coefficients of the pool's CRPS on past windows, from ``pool.scores``.
        on_trial: Which members are on trial, (K,).
    """
    weights = shrunk_weights(terms)
    if not on_trial.any() or on_trial.all():
        return weights
    others = np.flatnonzero(~on_trial)
    without = np.zeros(len(on_trial))
    without[others] = shrunk_weights([(a[others], b[np.ix_(others, others)]) for a, b in terms])
    gain = pool_scores(terms, without) - pool_scores(terms, weights)
    error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) >= FEWEST else np.inf
    return weights if gain.mean() > SURE * error else without


def pool_scores(terms: Sequence[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> np.ndarray:
    """CRPS of a pool on every past window, (windows,)."""
    return np.array([weights @ a - weights @ b @ weights / 2 for a, b in terms])


def shrunk_weights(terms: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Weights between the best ones on past windows and prior ones, (K,).

    The prior is equal for members of equal scores, and falls with the power ``FALL`` of a member's score.

    Args:
        terms: Coefficients of the pool's CRPS on past windows, from ``pool.scores``.
    """
    best = pool.best_weights(terms)
    alone = np.mean([a - b.diagonal() / 2 for a, b in terms], axis=0)
    prior = (alone.min() / np.maximum(alone, TINY)) ** FALL
    share = len(terms) / (len(terms) + FEW)
    weights = share * best + (1 - share) * prior / prior.sum()
    weights[weights < LEAST] = 0
    return weights / weights.sum()


def pooled_draws(
    made: Sequence[MemberForecast],
    tuned: TunedPool,
    data: HierarchicalData,
    samples: int,
    seed: int,
    recipe: PoolRecipe,
) -> np.ndarray:
    """Draw coherent paths from the pool, before any bounds, (S, H, n)."""
    weights = np.array([tuned.weights[one.name] for one in made])
    draws = [
        coherent_draws(
            one, -1, tuned.members[one.name], data.hierarchy, max(2, round(samples * weight) + 1), seed + k, recipe
        )
        for k, (one, weight) in enumerate(zip(made, weights))
    ]
    if len(made) == 1:
        return spread.widened(draws[0][:samples], tuned.factor)
    return spread.widened(pool.pooled(draws, weights, samples, seed), tuned.factor)


def _only(made: MemberForecast, used: Sequence[int]) -> MemberForecast:
    kept = [*used, -1]
    draws = None if made.draws is None else [made.draws[k] for k in kept]
    return replace(made, bases=[made.bases[k] for k in kept], draws=draws)
