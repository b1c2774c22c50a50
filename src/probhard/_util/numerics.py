"""Guards of floating-point arithmetic, each with one meaning.

| name             | guards against                                                        |
|------------------|-----------------------------------------------------------------------|
| ``TINY``         | division by 0 in float64, where any smaller number means 0            |
| ``SMALLEST``     | the same, by dtype                                                    |
| ``TOLERANCE``    | calling a point feasible that is not                                  |
| ``SINGLE_POINT`` | calling a set empty that is a single point within rounding            |
| ``floored``      | weights so small next to others that a row could not move             |
| ``equal_bounds`` | two sides of a variable that has one value                            |
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-300  # divisors in float64 are at least this
SMALLEST = {torch.float64: TINY, torch.float32: 1e-37}  # ... by dtype
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative feasibility of a returned point
WEIGHT_FLOOR = 1e-12  # smallest weight that may move a row, relative to the largest
SINGLE_POINT = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative width of a set that counts as one point


def floored(weight: Tensor) -> Tensor:
    """Weights (*batch, n) of at least ``WEIGHT_FLOOR`` times the largest; the floor has no gradient."""
    return torch.maximum(weight, WEIGHT_FLOOR * weight.detach().amax(-1, keepdim=True))


def equal_bounds(lower: Tensor, upper: Tensor) -> Tensor:
    """Where two bounds leave one value; the variable then counts as held at its upper bound."""
    return lower == upper
