"""Several members as one forecast: fit, tune on past windows, draw.

    members -> law, scales, learned projection -> pool -> one factor -> coherent paths

A member that cannot be fitted is left out, with a note.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from probhard.errors import MissingExtraError, ParameterError, ProbhardError
from probhard.forecasting.data.table import HierarchicalData
from probhard.forecasting.members.base import Member, MemberForecast, past_origins
from probhard.forecasting.members.kept import kept_forecast
from probhard.forecasting.members.kept_tuning import kept_tuning
from probhard.forecasting.members.streamed import Steps, fits_at_once, step_draws
from probhard.forecasting.members.tuning import PoolRecipe, TunedPool, pooled_draws, tune_pool


@dataclass(frozen=True, eq=False)
class PooledForecast:
    """Fitted members, and what was learned of them.

    Args:
        members: The members that were fitted.
        made: Their forecasts.
        tuned: Scales, metrics, weights and factor.
        horizon: Steps of the forecasts.
        recipe: Which parts are used.
        notes: Members or series that were left out.
    """

    members: list[Member]
    made: list[MemberForecast]
    tuned: TunedPool
    horizon: int
    recipe: PoolRecipe = field(default_factory=PoolRecipe)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def fit(
        cls,
        members: Sequence[Member],
        data: HierarchicalData,
        horizon: int,
        *,
        windows: int | None = None,
        recipe: PoolRecipe | None = None,
        folder: Path | None = None,
        keep_tuning: bool = False,
        jobs: int = 1,
        progress: str = "",
    ) -> PooledForecast:
        """Fit all members and tune the pool.

        Args:
            members: The members.
            data: The history.
            horizon: Number of steps H.
            windows: Number of past windows; by default from the horizon, 0 for none.
            recipe: Which parts are used; all by default.
            folder: Where fits are kept; None for nowhere.
            keep_tuning: Whether what is learned on past windows is kept there, too.
            jobs: Number of processes.
            progress: Label of a line per member; "" writes none.

        Raises:
            ParameterError: If no member can be fitted.
        """
        recipe = recipe or PoolRecipe()
        origins = () if windows == 0 else past_origins(data, horizon, windows)
        made, fitted, notes = [], [], []
        for member in members:
            started = time.perf_counter()
            try:
                one = kept_forecast(member, data, horizon, origins, folder, jobs)
            except MissingExtraError:
                raise
            except ProbhardError as error:
                notes.append(f"{member.name} was left out: {error}")
                continue
            made.append(one)
            fitted.append(member)
            notes += one.notes
            if progress:
                _say(f"{progress}: {member.name}, {len(data.names)} series, {time.perf_counter() - started:.1f} s")
        if not made:
            raise ParameterError(
                f"No member could be fitted. {' '.join(notes)}",
                "A forecast needs at least one.",
                "Use a longer history, or other models.",
            )
        started = time.perf_counter()
        trial = {member.name for member in fitted if getattr(member, "trial", False)}
        if folder is not None and keep_tuning:
            tuned = kept_tuning(made, data, horizon, origins, recipe, trial, folder)
        else:
            tuned = tune_pool(made, data, horizon, origins, recipe, trial)
        unused = [name for name in trial if not tuned.weights[name]]
        notes += [f"{name} was tried and is not used: past windows show no sure gain by it." for name in unused]
        if progress:
            _say(f"{progress}: tuned on {tuned.windows} past windows, {time.perf_counter() - started:.1f} s")
        last = [replace(one, bases=one.bases[-1:], draws=one.draws and one.draws[-1:]) for one in made]
        return cls(fitted, last, tuned, horizon, recipe, notes)

    def moved(self, data: HierarchicalData, horizon: int | None = None) -> PooledForecast:
        """Forecast from the end of another history, or farther, with the same parameters.

        Args:
            data: A history of the same hierarchy.
            horizon: Number of steps; by default as before.
        """
        steps = horizon or self.horizon
        made = [member.resume(data, steps, one.state) for member, one in zip(self.members, self.made)]
        return replace(self, made=made, horizon=steps)

    def sample(self, data: HierarchicalData, samples: int, seed: int, horizon: int | None = None) -> np.ndarray:
        """Draw coherent paths, before any bounds, (S, h, n).

        Args:
            data: The fitted history.
            samples: Number of paths.
            seed: Seed of the draws.
            horizon: Number of steps; by default that of the fit.
        """
        steps = horizon or self.horizon
        source = self.moved(data, steps) if steps > self.horizon else self
        draws = pooled_draws(source.made, self.tuned, data, samples, seed, self.recipe)
        return draws[:, :steps]

    def steps(self, data: HierarchicalData, samples: int, seed: int, horizon: int | None = None) -> Iterator[Steps]:
        """Draw coherent paths before any bounds: all steps at once, or one after the other where they are too many.

        Args:
            data: The fitted history.
            samples: Number of paths.
            seed: Seed of the draws.
            horizon: Number of steps; by default that of the fit.

        Yields:
            Some steps, and their draws (S, k, n).
        """
        count = horizon or self.horizon
        if fits_at_once(samples, count, len(data.names)):
            yield slice(0, count), self.sample(data, samples, seed, count)
            return
        source = self.moved(data, count) if count > self.horizon else self
        yield from step_draws(source.made, self.tuned, data.hierarchy, samples, seed, count, self.recipe)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
