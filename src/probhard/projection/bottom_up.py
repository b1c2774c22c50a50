"""Bottom-up laws: a law of the bottom series and its sums, ``u = S y``.

This is the projection that moves aggregates alone (``W = 0`` on the bottom series). Draws add up to rounding. Each
margin of a location-scale law is in closed form, and so is that of a mixture of Poisson products.
"""

from __future__ import annotations

from typing import Any

import scipy.sparse as sp
import torch
from torch import Size, Tensor
from torch import distributions as td
from torch.distributions.constraints import Constraint as Support

from probhard.constraints.base import Constraint
from probhard.constraints.hierarchy import Hierarchy
from probhard.errors import ParameterError, ShapeError
from probhard.laws.base import LinearMap
from probhard.laws.distribution import FIXED_DRAWS, LocationScale, Marginals, as_location_scale
from probhard.laws.family import Family
from probhard.laws.poisson_mixture import PoissonMixture
from probhard.rows.maps import SparseMap

BOTTOM_UP = "bottom-up"


class BottomUp(td.Distribution):
    """The law of all n series from that of the m bottom ones.

    Args:
        bottoms: A ``PoissonMixture`` or anything that ``as_location_scale`` takes, over (*batch, m).
        hierarchy: The sums.

    Raises:
        ParameterError: If the constraint is not a ``Hierarchy``.
        ShapeError: If the law does not have m variables.
    """

    arg_constraints: dict[str, Support] = {}  # noqa: RUF012
    feasible = True

    def __init__(self, bottoms: Any, hierarchy: Constraint) -> None:
        self.hierarchy = summing(hierarchy)
        self.bottoms: PoissonMixture | LocationScale
        self.bottoms = bottoms if isinstance(bottoms, PoissonMixture) else as_location_scale(bottoms)
        if tuple(self.bottoms.event_shape) != (self.hierarchy.bottoms,):
            raise ShapeError(
                f"A law of {self.bottoms.event_shape[-1]} variables got {self.hierarchy.bottoms} bottom series.",
                "A bottom-up method predicts the bottom series alone; their sums follow.",
                f"Return the law of the last {self.hierarchy.bottoms} of the {self.hierarchy.nodes} series.",
            )
        super().__init__(self.bottoms.batch_shape, Size([self.hierarchy.nodes]), validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean, (*batch, n)."""
        return self.hierarchy.aggregate(self.bottoms.mean)

    @property
    def variance(self) -> Tensor:
        """Marginal variances, (*batch, n)."""
        return self.all_series().variance

    @property
    def marginals(self) -> Marginals:
        """Margins of all series, batch (*batch, n); exact for elliptical families, else with matched moments."""
        return self._normal.functional(self._map())

    def all_series(self) -> PoissonMixture | Marginals:
        """The laws of all series, each by itself: mixtures of Poisson laws, or the margins."""
        return self.bottoms.functional(self._map())

    @property
    def family(self) -> Family:
        """Family of the margins; of counts, that of the law with their moments."""
        return self._normal.family

    @property
    def exact(self) -> bool:
        """Whether functionals stay in the family; else only moments are matched."""
        return not isinstance(self.bottoms, PoissonMixture) and self.bottoms.exact

    def functional(self, rows: LinearMap) -> Marginals:
        """The laws of linear functionals ``F u = F S y``, each by itself, batch (*batch, k).

        Args:
            rows: F, (k, n), such as a ``SparseMap``.
        """
        matrix = rows.transpose(torch.eye(rows.row_count, dtype=self.mean.dtype, device=self.mean.device))
        return self._normal.functional(SparseMap(sp.csr_array(matrix.numpy(force=True)) @ self.hierarchy.summation))

    def fixed_draws(self, count: int = FIXED_DRAWS) -> Tensor:
        """Fixed antithetic draws, (S, *batch, n), as of ``LocationScale``; of counts, of the law with their moments."""
        return self.hierarchy.aggregate(self._normal.fixed_draws(count))

    @property
    def _normal(self) -> LocationScale:
        """The law of the bottom series, or the normal law with its moments."""
        return as_location_scale(self.bottoms)

    def nll(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Negative log likelihood of the bottom series, which determine the others.

        Args:
            value: Values of all series, (*batch, n).
            mask: True where a value is observed, (*batch, n) bool.

        Returns:
            That of the mixture, jointly, (*batch,); that of the margins for a location-scale law, (*batch, m).
        """
        first = self.hierarchy.aggregates
        value, mask = value[..., first:], None if mask is None else mask[..., first:]
        if isinstance(self.bottoms, PoissonMixture):
            return -self.bottoms.log_prob(value, mask)
        return self.bottoms.marginals.nll(value, mask)

    def rsample(self, sample_shape: Any = (), generator: Any = None) -> Tensor:
        """Coherent draws that carry gradients, (*sample_shape, *batch, n).

        Args:
            sample_shape: Leading dimensions of the draws.
            generator: Source of random numbers; torch's global one for None.

        Raises:
            ParameterError: If the law is one of counts, whose draws have no gradient.
        """
        if isinstance(self.bottoms, PoissonMixture):
            raise ParameterError(
                "Draws of counts carry no gradient.",
                "A mixture of Poisson laws is trained by its likelihood.",
                "Use score='nll' and a training step without draws.",
            )
        return self.hierarchy.aggregate(self.bottoms.rsample(sample_shape, generator))

    def sample(self, sample_shape: Any = (), generator: Any = None) -> Tensor:
        """Draws without gradient; arguments and shape as of ``rsample``."""
        return self.hierarchy.aggregate(self.bottoms.sample(sample_shape, generator))

    def expand(self, batch_shape: Any, _instance: Any = None) -> BottomUp:
        """The same law with batch dimensions expanded to ``batch_shape``."""
        return BottomUp(self.bottoms.expand(batch_shape), self.hierarchy)

    def _map(self) -> SparseMap:
        return SparseMap(self.hierarchy.summation)


def summing(constraint: Constraint) -> Hierarchy:
    """The hierarchy of a bottom-up step.

    Raises:
        ParameterError: If the constraint is not one hierarchy alone.
    """
    if isinstance(constraint, Hierarchy):
        return constraint
    raise ParameterError(
        f"A bottom-up step got a {type(constraint).__name__}.",
        "It sums the bottom series and moves nothing else, so it holds no other constraint.",
        "Pass a Hierarchy alone, or choose a projecting method such as 'probhard-or'.",
    )
