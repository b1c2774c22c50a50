"""Probabilistic models that obey hard constraints exactly, in PyTorch."""

from probhard.constraints import (
    Conservation,
    Constraint,
    Hierarchy,
    Intersection,
    LinearEquality,
    NonlinearEquality,
    per_slice,
    trapezoid_weights,
)
from probhard.covariance import Covariance, Dense, Diagonal, LowRank
from probhard.distribution import LocationScale, Marginals, as_location_scale, marginals
from probhard.errors import (
    ConvergenceError,
    InfeasibleError,
    MissingExtraError,
    ParameterError,
    ProbhardError,
    RankError,
    ShapeError,
)
from probhard.family import LAPLACE, LOGISTIC, NORMAL, UNIFORM, Family, student_t
from probhard.method import METHODS, Method, Step
from probhard.metric import DenseMetric, DiagonalMetric, LowRankMetric, Metric
from probhard.model import ConstrainedModel
from probhard.projection import DPPL, FrozenProjection, Projected
from probhard.projectors import Projector, Solution, Stats
from probhard.score import (
    constraint_error,
    coverage,
    crps,
    crps_ensemble,
    degenerate,
    energy_score,
    mse,
    nll,
    pit,
    quantile_loss,
    sample_quantiles,
    weighted_quantile_loss,
)
from probhard.tangent import ProjectedCovariance, Tangent

__version__ = "0.1.0"

__all__ = [
    "DPPL",
    "LAPLACE",
    "LOGISTIC",
    "METHODS",
    "NORMAL",
    "UNIFORM",
    "Conservation",
    "ConstrainedModel",
    "Constraint",
    "ConvergenceError",
    "Covariance",
    "Dense",
    "DenseMetric",
    "Diagonal",
    "DiagonalMetric",
    "Family",
    "FrozenProjection",
    "Hierarchy",
    "InfeasibleError",
    "Intersection",
    "LinearEquality",
    "LocationScale",
    "LowRank",
    "LowRankMetric",
    "Marginals",
    "Method",
    "Metric",
    "MissingExtraError",
    "NonlinearEquality",
    "ParameterError",
    "ProbhardError",
    "Projected",
    "ProjectedCovariance",
    "Projector",
    "RankError",
    "ShapeError",
    "Solution",
    "Stats",
    "Step",
    "Tangent",
    "as_location_scale",
    "constraint_error",
    "coverage",
    "crps",
    "crps_ensemble",
    "degenerate",
    "energy_score",
    "marginals",
    "mse",
    "nll",
    "per_slice",
    "pit",
    "quantile_loss",
    "sample_quantiles",
    "student_t",
    "trapezoid_weights",
    "weighted_quantile_loss",
]
