"""Published systems as arguments of ``DeepVAREstimator``: ``DeepVAREstimator(freq, H, S, **SYSTEMS["clover"])``.

| name       | law of a step                                       | trained by                          |
|------------|-----------------------------------------------------|-------------------------------------|
| clover     | bottoms mu + sigma z + F e, all series are sums     | CRPS of all series, closed form     |
| dpmn       | bottoms: mixture of 10 Poisson products, sums       | joint likelihood of the bottoms     |
| copdeepvar | a block of steps and its sums over time, projected  | CRPS of projected draws             |

CLOVER (Olivares et al., 2024) and DPMN (Olivares et al., 2023) are bottom-up. CLOVER's own loss is the CRPS of draws;
the closed form is its expectation. COPDeepVAR (Rangapuram et al., 2023) is HierE2E on a temporal hierarchy, whose data
``TemporalBlocks`` makes. The encoder is that of DeepVAR for all: an LSTM that sees all series, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probhard.method import Method, Step
from probhard.projection.bottom_up import BOTTOM_UP

FACTORS, COMPONENTS = 10, 10
DRAWS = 10  # the fair CRPS of draws is unbiased for any number of them
SUMS = Step(BOTTOM_UP)

SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "clover": {"method": Method(SUMS, SUMS, "crps"), "rank": FACTORS},
    "dpmn": {"method": Method(SUMS, SUMS, "nll"), "law": "poisson-mixture", "components": COMPONENTS},
    "copdeepvar": {"method": Method(Step("orthogonal", draws=DRAWS), Step("orthogonal"), "crps")},
}
