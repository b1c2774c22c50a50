"""Corrections: steps of the literature that move points towards a set, without being its nearest points.

| correction     | system                | points it returns                                                |
|----------------|-----------------------|------------------------------------------------------------------|
| `AffineShift`  | HardNet-Aff           | feasible; rows that were met keep their value                    |
| `DampedSweeps` | HardNet++             | near the set: violations are those that the sweeps leave         |
| `Completion`   | DC3, feasible latents | on the equalities; inequalities are corrected by a few steps     |

HardNet-Cvx is the orthogonal projection, ``Step("orthogonal")``.
"""

from probhard.corrections.affine import AffineShift
from probhard.corrections.base import Correction
from probhard.corrections.completion import Completion
from probhard.corrections.layer import CorrectionLayer
from probhard.corrections.sweeps import DampedSweeps

__all__ = ["AffineShift", "Completion", "Correction", "CorrectionLayer", "DampedSweeps"]
