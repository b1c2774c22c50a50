"""Draws of the pool a few steps at a time, where all of them together would not fit into memory.

    w_1 = e_1,      w_h = rho w_(h-1) + sqrt(1 - rho^2) e_h,      x_h = P_h (mean_h + s_h R w_h),

with independent noise e_h of S paths, rho of what series share or of each alone, and the root R of their correlation.
That is the law of ``PathLaw``: the noise of the last step is all that a step needs of the earlier ones. Weights, factor
and bounds act on the draws of one step, and so do means and quantiles. Only S numbers are kept for a series, not S H.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from probhard._util.memory import available
from probhard.constraints import Hierarchy
from probhard.errors import ParameterError
from probhard.forecasting.members.base import MemberForecast
from probhard.forecasting.members.coherent import Tuned, law_of
from probhard.forecasting.members.tuning import PoolRecipe, TunedPool
from probhard.forecasting.models import spread
from probhard.forecasting.reconciliation.family import MetricWeights, tangents
from probhard.forecasting.reconciliation.joint_law import NOISE_NUMBERS, PathLaw

LARGEST = 125_000_000  # numbers of draws that are made at once: 1 GB
COPIES = 8  # arrays of the size of a step's draws that a step takes: noise, points, projections, bounds
SHARE = 0.7  # of the free memory that may be taken

Steps = tuple[slice, np.ndarray]  # some steps, and their draws (S, k, n)


def fits_at_once(samples: int, steps: int, nodes: int) -> bool:
    """Return whether all draws (S, H, n) can be made at once."""
    return samples * steps * nodes <= LARGEST


def check_memory(samples: int, nodes: int, kept: int = 0) -> None:
    """Check that the draws of one step fit into memory.

    Args:
        samples: Number of paths S.
        nodes: Number of series n.
        kept: Numbers that are kept besides.

    Raises:
        ParameterError: If they do not; the text says how many would.
    """
    free = available()
    if free is None:
        return
    most = int((SHARE * free / 8 - kept) // (COPIES * nodes))
    if samples > most:
        raise ParameterError(
            f"{samples} draws of {nodes} nodes need {8 * (COPIES * samples * nodes + kept) / 1e9:.1f} GB at every "
            f"step, and {free / 1e9:.1f} GB are free.",
            "All draws of a step are held at once, for its quantiles and bounds.",
            f"Ask for at most {max(0, most)} draws (num_samples), or for fewer written draws."
            if most > 1
            else "Forecast fewer series, or write fewer draws.",
        )


def step_draws(
    made: Sequence[MemberForecast],
    tuned: TunedPool,
    hierarchy: Hierarchy,
    samples: int,
    seed: int,
    horizon: int,
    recipe: PoolRecipe,
) -> Iterator[Steps]:
    """Draw coherent paths of the pool step by step, before any bounds.

    Args:
        made: Forecasts of all members, at the end of the history.
        tuned: What was learned of them.
        hierarchy: The sums.
        samples: Number of paths S.
        seed: Seed of the draws.
        horizon: Number of steps H.
        recipe: Which parts are used.

    Yields:
        One step after the other, with its draws (S, 1, n); paths keep their place.
    """
    weights = np.array([tuned.weights[one.name] for one in made])
    exact = samples * weights / weights.sum()
    share = np.floor(exact).astype(int)
    share[np.argsort(share - exact, kind="stable")[: samples - share.sum()]] += 1
    order = np.random.default_rng(seed).permutation(samples) if len(made) > 1 else slice(None)
    members = [
        _member_steps(one, tuned.members[one.name], hierarchy, int(count), seed + k, horizon, recipe)
        for k, (one, count) in enumerate(zip(made, share))
        if count
    ]
    for step, parts in enumerate(zip(*members, strict=True)):
        drawn = parts[0] if len(parts) == 1 else np.concatenate(parts)[order]
        yield slice(step, step + 1), spread.widened(drawn, tuned.factor)[:, None]


def _member_steps(
    made: MemberForecast, tuned: Tuned, hierarchy: Hierarchy, samples: int, seed: int, horizon: int, recipe: PoolRecipe
) -> Iterator[np.ndarray]:
    """Coherent draws of a member, (S, n) for each step."""
    if made.draws is not None:
        draws = made.draws[-1]
        chosen = np.random.default_rng(seed).choice(len(draws), samples, replace=samples > len(draws))
        for step in range(horizon):
            yield spread.widened(draws[:, step], tuned.scales[0])[chosen]
        return
    law = law_of(made.bases[-1], tuned.scales, recipe.correlation)
    law = law if tuned.rho is None else replace(law, rho=tuned.rho, own_rho=tuned.own_rho)
    yield from projected_steps(law.at(slice(0, horizon)), tuned.metric or MetricWeights(), hierarchy, samples, seed)


def projected_steps(
    law: PathLaw, weights: MetricWeights, hierarchy: Hierarchy, samples: int, seed: int
) -> Iterator[np.ndarray]:
    """Draw coherent paths from a base law, (S, n) for each step.

    Args:
        law: The base law, (H, n).
        weights: The metric.
        hierarchy: The sums.
        samples: Number of paths S.
        seed: Seed of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    right = torch.zeros(hierarchy.aggregates, dtype=torch.float64)
    nodes, correlation = law.mean.shape[-1], law.correlation
    state = torch.zeros(samples, nodes if correlation is None else correlation.root_size, dtype=torch.float64)
    rho = torch.full(state.shape[1:], law.rho, dtype=torch.float64)
    rho[:nodes] = law.rho if law.own_rho is None else law.own_rho
    rows = max(1, NOISE_NUMBERS // nodes)  # paths at a time
    for step in range(len(law.mean)):
        now, keep = law.at(slice(step, step + 1)), rho if step else 0.0 * rho
        ((_, tangent),) = tangents(now, weights, hierarchy)
        drawn = torch.empty(samples, nodes, dtype=torch.float64)
        for noise, part in zip(state.split(rows), drawn.split(rows)):
            fresh = torch.randn(noise.shape, generator=generator, dtype=torch.float64)
            noise.mul_(keep).add_(fresh.mul_((1 - keep.square()).sqrt()))
            points = now.mean + now.stddev * (noise if correlation is None else correlation.root(noise))
            part.copy_(tangent.project(points[:, None], right)[:, 0])
        yield drawn.numpy()
