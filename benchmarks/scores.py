"""Scores and their gradients against scoringrules' torch backend, one thread.

Errors are relative to scoringrules' NumPy backend in float64. The normal CRPS is also taken where a projection has left
standard deviations of exactly 0, as at known initial values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import scoringrules
import torch
from torch import Tensor

import probhard as ph
from benchmarks.timing import Comparison, measured

POINTS, DRAWS, BATCH, EVENT = 40_000, 200, 20, 500


def run(quick: bool = False) -> Iterator[Comparison]:
    """Compare value and gradient."""
    torch.manual_seed(0)
    points = 100 if quick else POINTS
    for dtype in (torch.float32, torch.float64):
        mean, target = torch.randn(2, 1, points, dtype=dtype)
        for name, stddev in (("", 0.1 + torch.rand(1, points, dtype=dtype)), (", some stddev 0", None)):
            spread = torch.rand(1, points, dtype=dtype) if stddev is None else stddev
            if stddev is None:
                spread[:, ::10] = 0.0
            yield _normal(f"CRPS of {points:,} normals, {str(dtype)[6:]}{name}", mean, spread, target)
    draws, batch = (20, 2) if quick else (DRAWS, BATCH)
    samples, target = torch.randn(draws, batch, EVENT), torch.randn(batch, EVENT)
    yield _ensemble(
        f"CRPS of {draws} draws, {batch} x {EVENT}",
        lambda x: scoringrules.crps_ensemble(target, x, m_axis=0, estimator="qd", backend="torch"),
        lambda x: ph.crps_ensemble(x, target),
        scoringrules.crps_ensemble(target.double().numpy(), samples.double().numpy(), m_axis=0, backend="numpy"),
        samples,
    )
    samples, target = samples[:, :4], target[:4]
    yield _ensemble(
        f"energy score of {draws} draws, {len(target)} x {EVENT}",
        lambda x: scoringrules.es_ensemble(target, x, m_axis=0, v_axis=-1, backend="torch"),
        lambda x: ph.energy_score(x, target),
        scoringrules.es_ensemble(
            target.double().numpy(), samples.double().numpy(), m_axis=0, v_axis=-1, backend="numpy"
        ),
        samples,
    )


def _normal(case: str, mean: Tensor, stddev: Tensor, target: Tensor) -> Comparison:
    tiny = stddev.double().clamp(min=1e-30).numpy()  # the limit of 0 is |mean - target|
    true = scoringrules.crps_normal(target.double().numpy(), mean.double().numpy(), tiny, backend="numpy")
    leaves = mean.clone().requires_grad_(), stddev.clone().requires_grad_()

    def scored(score: Callable[..., Tensor]) -> Tensor:
        value = score(*leaves)
        value.sum().backward()
        return value.detach()

    peer_run, our_run = measured(
        lambda: scored(lambda m, s: scoringrules.crps_normal(target, m, s, backend="torch")),
        lambda: scored(lambda m, s: ph.crps((m, s), target)),
    )
    return Comparison.of(case, "scoringrules, torch", peer_run, our_run, lambda value: _error(value, true))


def _ensemble(
    case: str,
    theirs: Callable[[Tensor], Tensor],
    ours: Callable[[Tensor], Tensor],
    true: np.ndarray,
    samples: Tensor,
) -> Comparison:
    leaf = samples.clone().requires_grad_()

    def scored(score: Callable[[Tensor], Tensor]) -> Tensor:
        value = score(leaf)
        value.sum().backward()
        return value.detach()

    peer_run, our_run = measured(lambda: scored(theirs), lambda: scored(ours))
    return Comparison.of(case, "scoringrules, torch", peer_run, our_run, lambda value: _error(value, true))


def _error(value: Tensor, true: np.ndarray) -> float:
    """The largest error relative to the mean score."""
    return float((value.double() - torch.as_tensor(true)).abs().max() / np.abs(true).mean())
