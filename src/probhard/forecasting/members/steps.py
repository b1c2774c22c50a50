"""The correlation of steps, learned on sums over the horizon of past windows.

The projected error of step h has a part that series share and a part of each series alone, with variances ``a_h`` and
``b_h``. A sum over the horizon has the variance

    sum_hk  rho^|h-k| sqrt(a_h a_k) + rho_own^|h-k| sqrt(b_h b_k).

Noise of single series cancels in totals: their sums tell rho, those of bottoms rho_own. Both minimise the
CRPS of sums; top, middle and bottom levels count alike. No forecast of a single step depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from probhard.constraints import Hierarchy
from probhard.forecasting.reconciliation.family import MetricWeights, tangents
from probhard.forecasting.reconciliation.joint_law import LARGE, PathLaw, step_root
from probhard.laws import Diagonal, LocationScale
from probhard.score import crps

FEW = 3.0  # windows at which a correlation is halfway, in log(1 - rho), between the prior and its best
SHARED = 0.9  # least prior of what series share: a total that is off stays off
FEW_STEPS = 7  # of a sum, for very many series: evenly spaced
RHOS = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985, 0.995)  # candidates


def fit_steps(
    laws: Sequence[PathLaw],
    targets: Sequence[np.ndarray],
    metric: MetricWeights,
    hierarchy: Hierarchy,
    labels: np.ndarray,
) -> tuple[float, float] | None:
    """Fit the correlations of successive steps.

    Args:
        laws: Base laws of past windows.
        targets: What was observed there, (H, n) each.
        metric: The metric of the projection.
        hierarchy: The sums over nodes.
        labels: Group of each node, (n,); groups count alike.

    Returns:
        rho of what series share and of each series alone, shrunk as windows get few; None without complete sums.
    """
    apart = -(-len(targets[0]) // FEW_STEPS) if hierarchy.nodes > LARGE else 1
    laws, targets = [law.at(slice(None, None, apart)) for law in laws], [target[::apart] for target in targets]
    y = torch.stack([torch.from_numpy(target).sum(0) for target in targets])  # (windows, n)
    seen = ~y.isnan()
    if not bool(seen.any()):
        return None
    parts = [projected_parts(law, metric, hierarchy) for law in laws]
    mean = torch.stack([part[0].sum(0) for part in parts])
    shared, own = (torch.stack([_variances(part[k], apart) for part in parts]) for k in (1, 2))  # (windows, rhos, n)
    losses = np.zeros((len(RHOS), len(RHOS)))
    for group in np.unique(labels):
        inside = seen & torch.from_numpy(labels == group)
        if not bool(inside.any()):
            continue
        found = np.array(
            [[_loss(mean, shared[:, i] + own[:, j], y, inside) for j in range(len(RHOS))] for i in range(len(RHOS))]
        )
        losses += found / found.min()
    losses[np.triu_indices(len(RHOS), 1)] = np.inf  # series alone forget no slower
    i, j = np.unravel_index(int(losses.argmin()), losses.shape)
    implied = min(float(np.mean([law.rho for law in laws])), RHOS[-1])
    return _between(RHOS[i], max(implied, SHARED), len(laws)), _between(RHOS[j], implied, len(laws))


def projected_parts(law: PathLaw, metric: MetricWeights, hierarchy: Hierarchy) -> tuple[Tensor, Tensor, Tensor]:
    """Means, and deviations of what series share and of each series alone, of the projected law, (H, n) each."""
    mean, total, own = (torch.empty_like(law.mean) for _ in range(3))
    right = torch.zeros(hierarchy.aggregates, dtype=torch.float64)
    alone = 1.0 if law.correlation is None else law.correlation.diagonal_part
    for steps, tangent in tangents(law, metric, hierarchy):
        part = law.at(steps)
        mean[steps] = tangent.project(part.mean, right)
        total[steps] = tangent.variance(part.covariance)
        own[steps] = tangent.variance(Diagonal(alone * part.stddev.square()))
    return mean, (total - own).clamp(min=0).sqrt(), own.clamp(min=0).sqrt()


def _variances(stddev: Tensor, apart: int) -> Tensor:
    """Variances of sums of H steps, each ``apart`` from the next, for every candidate, (rhos, n)."""
    return torch.stack([(step_root(len(stddev), rho**apart).mT @ stddev).square().sum(0) for rho in RHOS])


def _loss(mean: Tensor, variance: Tensor, y: Tensor, seen: Tensor) -> float:
    law = LocationScale(mean[seen], Diagonal(variance[seen]), validate_args=False)
    return float(crps(law, y[seen]).sum())


def _between(best: float, prior: float, windows: int) -> float:
    share = windows / (windows + FEW)
    return float(1 - (1 - best) ** share * (1 - min(prior, RHOS[-1])) ** (1 - share))
