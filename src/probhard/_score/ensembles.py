"""Scores of draws: CRPS, energy and variogram scores of an ensemble.

CRPS = E|X - y| - E|X - X'| / 2,     energy = E||X - y|| - E||X - X'|| / 2,
variogram = sum_ij (E|X_i - X_j|^p - |y_i - y_j|^p)^2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from probhard._score.checks import check_samples, masked, observed, pair_count
from probhard._score.functionals import as_map, functional_mask
from probhard._util.tensors import broadcast
from probhard.errors import ParameterError, ShapeError

ENTRIES = 2**22  # differences of draws in memory at once


def crps_ensemble(
    samples: Tensor,  # (S, *batch, n)
    y: Tensor,  # (*batch, n)
    mask: Tensor | None = None,  # (*batch, n) bool
    estimator: str = "standard",
    functionals: Any = None,
) -> Tensor:
    """CRPS of an ensemble by sorting, O(S log S).

    Args:
        samples: Draws, (S, *batch, n).
        y: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool.
        estimator: ``"standard"`` scores the empirical law (1 / S^2); ``"fair"`` is unbiased for the law of the draws
            (1 / (S (S - 1))).
        functionals: A matrix (k, n) or a family, as in ``crps``; None scores variables.

    Returns:
        The score, (*batch, n), or (*batch, k) of functionals.
    """
    check_samples(samples, y)
    size = samples.shape[0]
    # Differences from the target do not cancel far from 0, as raw values would.
    error = samples - observed(y, mask, 0.0)  # (S, *batch, n)
    if functionals is not None:
        rows = as_map(functionals, y.shape[-1]).at(error)
        error, mask = rows.apply(error), functional_mask(rows, mask)
    order = error.sort(dim=0).values
    rank = torch.arange(1 - size, size, 2, dtype=order.dtype, device=order.device) / pair_count(size, estimator)
    rank = rank.reshape(-1, *[1] * (order.dim() - 1))  # no matrix product: autocast would round it
    return masked((order.abs() / size - rank * order).sum(0), mask)


def energy_score(
    samples: Tensor,  # (S, *batch, n)
    y: Tensor,  # (*batch, n)
    mask: Tensor | None = None,  # (*batch, n) bool
    estimator: str = "standard",
) -> Tensor:
    """Energy score of an ensemble over its last dimension; draws that coincide get gradient 0.

    Args:
        samples: Draws, (S, *batch, n).
        y: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool; unobserved coordinates leave the norm.
        estimator: As in ``crps_ensemble``.

    Returns:
        The score, (*batch,).
    """
    check_samples(samples, y)
    difference = samples - observed(y, mask, 0.0)  # (S, *batch, n)
    if mask is not None:
        difference = torch.where(mask, difference, 0.0)
    near = torch.linalg.vector_norm(difference, dim=-1).mean(0)
    draws = difference.movedim(0, -2)  # (*batch, S, n)
    apart = torch.cdist(draws, draws, compute_mode="donot_use_mm_for_euclid_dist")  # (*batch, S, S)
    return near - 0.5 * apart.sum((-2, -1)) / pair_count(samples.shape[0], estimator)


@torch.no_grad()
def variogram_score(
    samples: Tensor,  # (S, *batch, n)
    y: Tensor,  # (*batch, n)
    p: float = 0.5,
    pairs: Tensor | None = None,  # (P, 2) integers
    mask: Tensor | None = None,  # (*batch, n) bool
) -> Tensor:
    """Variogram score of an ensemble, for evaluation: it carries no gradient (Scheuerer and Hamill, 2015).

    Args:
        samples: Draws, (S, *batch, n).
        y: Targets, (*batch, n).
        p: Order of the differences, > 0.
        pairs: Pairs (i, j) of variables to compare, (P, 2); None takes all n^2, each unordered pair twice.
        mask: True where the target is observed, (*batch, n) bool; other pairs count 0.

    Returns:
        The score, (*batch,).
    """
    check_samples(samples, y)
    if not 0 < p < math.inf:
        raise ParameterError(f"Got p={p}.", "The order of a variogram is positive.", "Pass 0.5, 1 or 2.")
    target, n = observed(y, mask, 0.0), y.shape[-1]
    shape = broadcast(samples.shape[1:], y.shape)[:-1]
    index = _checked_pairs(pairs, n).to(samples.device) if pairs is not None else None
    count = n * n if index is None else len(index)
    step = max(1, ENTRIES // max(1, samples[..., 0].numel()))
    total = samples.new_zeros(shape)
    for first in range(0, count, step):
        at = torch.arange(first, min(first + step, count), device=samples.device)
        i, j = (at // n, at % n) if index is None else index[at].unbind(-1)
        expected = (samples[..., i] - samples[..., j]).abs().pow(p).mean(0)  # (*batch, step)
        difference = (target[..., i] - target[..., j]).abs().pow(p) - expected
        if mask is not None:
            difference = torch.where(mask[..., i] & mask[..., j], difference, 0.0)
        total += difference.square().sum(-1)
    return total


def _checked_pairs(pairs: Tensor, n: int) -> Tensor:
    """Pairs of variables (P, 2), or an error."""
    wrong = pairs.dim() != 2 or pairs.shape[-1] != 2 or pairs.is_floating_point() or pairs.dtype == torch.bool
    if wrong or (len(pairs) and not (int(pairs.min()) >= 0 and int(pairs.max()) < n)):
        raise ShapeError(
            f"Got pairs of shape {tuple(pairs.shape)} and dtype {pairs.dtype} for {n} variables.",
            "Each row holds the numbers of two variables, from 0.",
            "Pass an integer tensor (P, 2) with entries below n.",
        )
    return pairs.long()
