"""Guards of floating-point arithmetic, each with one meaning.

| name             | guards against                                                        |
|------------------|-----------------------------------------------------------------------|
| ``TINY``         | division by 0 in float64, where any smaller number means 0            |
| ``SMALLEST``     | the same, by dtype                                                    |
| ``TOLERANCE``    | calling a point feasible that is not                                  |
| ``SINGLE_POINT`` | calling a set empty that is a single point within rounding            |
| ``floored``      | weights so small next to others that a row could not move             |
| ``equal_bounds`` | taking two bounds that agree within rounding for an interval          |
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-300  # divisors in float64 are at least this
SMALLEST = {torch.float64: TINY, torch.float32: 1e-37}  # ... by dtype
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative feasibility of a returned point
SINGLE_POINT = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative width of a set that counts as one point


def floored(weight: Tensor, share: float) -> Tensor:
    """Weights (*batch, n) of at least a share of the largest; 1 where all are 0."""
    top = weight.amax(-1, keepdim=True)
    return torch.where(top > 0, torch.maximum(weight, share * top), 1.0)


def equal_bounds(lower: Tensor, upper: Tensor, closeness: float = 0.0) -> Tensor:
    """Where two bounds are equal, or closer than a share of the upper one."""
    return (upper - lower).abs() <= closeness * upper.abs() if closeness else lower == upper
