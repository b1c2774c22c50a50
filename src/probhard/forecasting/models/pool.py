"""Linear pool of forecasts, with weights chosen on past windows.

The pool draws from member k with probability w_k. Its CRPS, pooled over steps and series, is quadratic in the weights,

    CRPS(w) = sum_k w_k a_k - 1/2 sum_kl w_k w_l B_kl,      a_k = E|X_k - y|,    B_kl = E|X_k - X_l|,

with a and B summed over steps and series and divided by the summed ``|y|``. B is conditionally negative definite, so
the best weights on the simplex, for the mean over several windows, solve a small convex program. Draws of coherent
members are coherent; ``nonnegative`` projects them onto non-negative values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import minimize

from probhard.constraints import Hierarchy, NonNegative
from probhard.errors import ParameterError, ShapeError
from probhard.projection.layer import DPPL

PAIRED = 100  # draws per member for the pairwise distances B
CHUNK = 2**22  # differences per step, to bound the memory


def scores(draws: Sequence[np.ndarray], target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the coefficients of the pool's CRPS on one window.

    Args:
        draws: Draws of each of K members, (S, H, n).
        target: Observed values, (H, n); NaN where missing.

    Returns:
        a (K,) and B (K, K).

    Raises:
        ProbhardError: If shapes do not fit, or no observed value differs from 0.
    """
    if not draws or any(member.shape[1:] != target.shape for member in draws):
        raise ShapeError(
            f"Got draws of shapes {[member.shape for member in draws]} for a target of shape {target.shape}.",
            "Every member needs forecasts of all series over the same steps, draws first.",
            "Pass (S, H, n) for each member and (H, n) for the target.",
        )
    observed = ~np.isnan(target).ravel()
    y = torch.from_numpy(target.ravel()[observed])
    total = float(y.abs().sum())
    if not total > 0:
        raise ParameterError(
            "The window's observed values are all zero, or there are none.",
            "The score is relative to their sum.",
            "Choose another window.",
        )
    flat = [torch.from_numpy(np.ascontiguousarray(member.reshape(len(member), -1)[:, observed])) for member in draws]
    near = [float((member - y).abs().mean(0).sum()) for member in flat]
    few = [member[np.linspace(0, len(member) - 1, min(len(member), PAIRED)).astype(int)] for member in flat]
    apart = np.zeros((len(few), len(few)))
    for k, first in enumerate(few):
        for m, second in enumerate(few[: k + 1]):
            apart[k, m] = apart[m, k] = _distance(first, second, same=k == m)
    return np.array(near) / total, apart / total


def _distance(first: torch.Tensor, second: torch.Tensor, same: bool) -> float:
    """Sum E|X - X'| over the columns, without the pairs of a draw with itself."""
    pairs = len(first) * (len(second) - 1 if same and len(second) > 1 else len(second))
    width = max(1, CHUNK // (len(first) * len(second)))
    parts = zip(first.split(width, 1), second.split(width, 1))
    return sum(float((x.unsqueeze(1) - z.unsqueeze(0)).abs().sum()) for x, z in parts) / pairs


def best_weights(windows: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Find the weights of smallest mean CRPS; weights below 0.01 are set to 0.

    Args:
        windows: Coefficients a (K,) and B (K, K) of past windows, from ``scores``.

    Returns:
        Weights with sum 1, (K,).

    Raises:
        ParameterError: If there are no windows.
    """
    if not windows:
        raise ParameterError("There are no windows.", "Weights are fitted to them.", "Pass scores() of past windows.")
    near = np.mean([a for a, _ in windows], axis=0)
    apart = np.mean([b for _, b in windows], axis=0)
    count = len(near)
    starts = [np.full(count, 1 / count), np.eye(count)[int((near - apart.diagonal() / 2).argmin())]]
    solutions = [
        minimize(
            lambda w: float(w @ near - w @ apart @ w / 2),
            start,
            jac=lambda w: near - apart @ w,
            bounds=[(0, 1)] * count,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(count)},
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 500},
        )
        for start in starts
    ]
    weights = np.clip(min(solutions, key=lambda result: float(result.fun)).x, 0, None)
    weights[weights < 0.01 * weights.sum()] = 0
    return weights / weights.sum()


def pooled(draws: Sequence[np.ndarray], weights: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Draw from the pool, without repeats where a member has enough draws.

    Args:
        draws: Draws of each of K members, (S, H, n).
        weights: Weights with sum 1, (K,); shares are exact to within one draw.
        count: Number of draws.
        seed: Seed of the selection.

    Returns:
        Draws in random order, (count, H, n).

    Raises:
        ParameterError: If the weights are not K numbers of at least 0 with sum 1.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != (len(draws),) or not (weights >= 0).all() or abs(weights.sum() - 1) > 1e-6:
        raise ParameterError(
            f"{len(draws)} members got the weights {weights.tolist()}.",
            "They are the members' shares of the draws.",
            "Pass one weight of at least 0 per member, with sum 1.",
        )
    random, exact = np.random.default_rng(seed), count * weights
    share = np.floor(exact).astype(int)
    share[np.argsort(share - exact, kind="stable")[: count - share.sum()]] += 1
    parts = [
        member[random.choice(len(member), size=size, replace=size > len(member))] for member, size in zip(draws, share)
    ]
    return np.concatenate(parts)[random.permutation(count)]


def nonnegative(draws: np.ndarray, hierarchy: Hierarchy) -> np.ndarray:
    """Project draws with negative values to the nearest coherent and non-negative ones.

    Args:
        draws: Coherent draws, (*batch, n).
        hierarchy: The sums over n series.

    Returns:
        Draws, (*batch, n); those without negative values are unchanged.
    """
    negative = np.flatnonzero((draws < 0).any(-1))
    flat = draws.reshape(-1, draws.shape[-1]).copy()
    if len(negative):
        points = torch.from_numpy(flat[negative])
        flat[negative] = DPPL("orthogonal", on_failure="raise").project(points, hierarchy & NonNegative()).value.numpy()
    return flat.reshape(draws.shape)
