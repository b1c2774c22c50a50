"""Metrics Q of the projection ``min |u - z|_Q``, each represented by its weight ``W = Q^-1``.

| metric         | weight W                         |
|----------------|----------------------------------|
| Orthogonal     | I                                |
| Oblique        | Sigma, the law's own covariance  |
| Variances      | diag(Sigma)                      |
| DiagonalMetric | diag(values)                     |
| LowRankMetric  | diag(diagonal) + factor factor^T |
| DenseMetric    | L L^T                            |

The last three hold a weight of their own, fixed (buffers) or learned with the model (parameters). See the paper's
section "Flexibility in the choice of Q and its structure".
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from probhard._util.tensors import check_finite, checking
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.laws.covariance import Covariance, Dense, Diagonal, Identity, LowRank


class Metric(nn.Module):
    """The weight W of a projection; subclasses implement ``weight``."""

    fixed = True  # whether W is the same for every distribution
    oblique = False  # whether W is the covariance of the distribution itself

    @abstractmethod
    def weight(self, z: Tensor, cov: Covariance | None) -> Covariance:
        """The weight W of the projection of points.

        Args:
            z: Points, (*batch, n); only their size, dtype and device matter.
            cov: Covariance of the distribution that is projected, or None for bare points.

        Returns:
            W, of shape (n,) or (*batch, n).

        Raises:
            ParameterError: If the metric needs ``cov`` and there is none.
            ShapeError: If the metric has another number of variables.
        """


class Orthogonal(Metric):
    """Q = I: the nearest point in Euclidean distance."""

    def weight(self, z: Tensor, cov: Covariance | None) -> Covariance:
        return Identity.like(z)


class Oblique(Metric):
    """Q = Sigma^-1: uncertain coordinates move, certain coordinates stay."""

    fixed = False
    oblique = True

    def weight(self, z: Tensor, cov: Covariance | None) -> Covariance:
        if cov is None:
            raise ParameterError(
                "The oblique metric was asked to project points without a distribution.",
                "Its weight is the distribution's covariance.",
                "Pass dist=..., or use metric='orthogonal' or a DiagonalMetric.",
            )
        return cov


class Variances(Metric):
    """Q = diag(Sigma)^-1: the variances alone say how far a coordinate moves, not what it shares with others.

    Shared noise under ``Oblique`` turns a small violation of a sum into a smooth change of all its terms. Here every
    term moves by its own variance, as under the law of independent coordinates.
    """

    fixed = False

    def weight(self, z: Tensor, cov: Covariance | None) -> Covariance:
        if cov is None:
            raise ParameterError(
                "The metric 'variances' was asked to project points without a distribution.",
                "Its weight is the distribution's variances.",
                "Pass dist=..., or use metric='orthogonal' or a DiagonalMetric.",
            )
        return Diagonal(cov.diagonal())


class _Own(Metric):
    """A metric with a W of its own, fixed or learned."""

    def _hold(self, name: str, value: Tensor, learn: bool) -> None:
        if learn:
            self.register_parameter(name, nn.Parameter(value.detach().clone()))
        else:
            self.register_buffer(name, value)

    def _positive(self, name: str, value: Tensor, learn: bool) -> Tensor:
        """Positive numbers as they are stored: their logarithm if they are learned, else themselves."""
        if checking():
            check_finite(f"The metric's {name}", value, minimum=0.0)
            if learn and bool((value == 0).any()):
                raise ParameterError(
                    f"A learned metric starts with {int((value == 0).sum())} zeros in its {name}.",
                    "They are learned on a logarithmic scale, which does not reach 0.",
                    "Start from positive numbers, such as ones.",
                )
        return value.log() if learn else value

    def _check(self, z: Tensor, size: int) -> None:
        if z.shape[-1] != size:
            raise ShapeError(
                f"{type(self).__name__} has {size} variables, the distribution {z.shape[-1]}.",
                "A metric needs one weight per variable.",
                f"Build it with {z.shape[-1]} entries.",
            )


class DiagonalMetric(_Own):
    """``W = diag(values)``: variables with large weights move most.

    Args:
        values: Weights >= 0, (n,); a variable with weight 0 keeps its value.
        learn: Train the weights with the model, on a logarithmic scale.

    Raises:
        ParameterError: If a weight is negative, NaN or infinite, or 0 where weights are learned.
    """

    values: Tensor

    def __init__(self, values: Tensor, learn: bool = False) -> None:
        super().__init__()
        self.learn = learn
        self._hold("values", self._positive("weights", values, learn), learn)

    def weight(self, z: Tensor, cov: Covariance | None) -> Covariance:
        self._check(z, self.values.shape[-1])
        values = self.values.exp() if self.learn else self.values
        return Diagonal(values.to(z))


class LowRankMetric(_Own):
    """``W = diag(diagonal) + factor factor^T``.

    Args:
        factor: (n, rank).
        diagonal: >= 0, (n,).
        learn: Train both with the model, the diagonal on a logarithmic scale.

    Raises:
        ParameterError: If the diagonal is negative, NaN or infinite, or 0 where it is learned.
        ShapeError: If factor and diagonal have different n.
    """

    factor: Tensor
    diagonal: Tensor

    def __init__(self, factor: Tensor, diagonal: Tensor, learn: bool = False) -> None:
        super().__init__()
        LowRank(factor, diagonal)  # checks the shapes
        self.learn = learn
        self._hold("factor", factor, learn)
        self._hold("diagonal", self._positive("diagonal", diagonal, learn), learn)

    def weight(self, z: Tensor, cov: Covariance | None) -> Covariance:
        self._check(z, self.factor.shape[-2])
        diagonal = self.diagonal.exp() if self.learn else self.diagonal
        return LowRank(self.factor.to(z), diagonal.to(z))


class DenseMetric(_Own):
    """``W = L L^T`` with a lower triangular L.

    Args:
        scale_tril: L, (n, n), with a diagonal >= 0.
        learn: Train L with the model, its diagonal on a logarithmic scale.

    Raises:
        ParameterError: If L is not lower triangular, or its diagonal negative, or 0 where it is learned.
        ShapeError: If L is not square.
    """

    lower: Tensor
    corner: Tensor

    def __init__(self, scale_tril: Tensor, learn: bool = False) -> None:
        super().__init__()
        Dense(scale_tril).validate()
        self.learn = learn
        self._hold("lower", scale_tril.tril(-1), learn)
        self._hold("corner", self._positive("diagonal", scale_tril.diagonal(dim1=-2, dim2=-1), learn), learn)

    def weight(self, z: Tensor, cov: Covariance | None) -> Covariance:
        self._check(z, self.lower.shape[-1])
        corner = self.corner.exp() if self.learn else self.corner
        return Dense((self.lower.tril(-1) + torch.diag_embed(corner)).to(z))


NAMED: dict[str, type[Metric]] = {"oblique": Oblique, "orthogonal": Orthogonal, "variances": Variances}


def as_metric(metric: str | Metric) -> Metric:
    """Look up a metric.

    Args:
        metric: ``"oblique"``, ``"orthogonal"``, ``"variances"``, or a ``Metric``, which is returned as it is.

    Returns:
        The metric.

    Raises:
        ParameterError: If the name is not known, or ``metric`` is neither.
    """
    if isinstance(metric, Metric):
        return metric
    if not isinstance(metric, str):
        raise ParameterError(
            f"metric got a {type(metric).__name__}.",
            "A metric is a name or a Metric; distributions and constraints are passed when the layer is called.",
            'Write DPPL("oblique")(distribution, constraint), or "orthogonal".',
        )
    check_choice("metric", metric, tuple(NAMED))
    return NAMED[metric]()
