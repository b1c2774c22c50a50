"""Probabilistic models that obey hard constraints exactly, in PyTorch.

Public names and submodules are imported on first use (PEP 562), so that ``import probhard`` does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from probhard import _compat

if TYPE_CHECKING:
    from probhard.calibration import (
        Calibration,
        ConformalModel,
        ConformalSet,
        CoverageReport,
        calibrate,
        conformal,
        error_correlation,
    )
    from probhard.comparison import Comparison, compare
    from probhard.constraints import (
        Ball,
        Box,
        Conservation,
        Constraint,
        Convex,
        ConvexProgram,
        Correlation,
        Hierarchy,
        Intersection,
        L1Ball,
        LinearEquality,
        LinearInequality,
        Monotone,
        NonlinearEquality,
        NonlinearInequality,
        NonNegative,
        PositiveSemidefinite,
        SecondOrderCone,
        Semicontinuous,
        Simplex,
        TotalVariation,
        TotalVariationDiminishing,
        TotalVariationPenalty,
        matrix_of,
        per_slice,
        trapezoid_weights,
        vectorise,
    )
    from probhard.corrections import AffineShift, Completion, Correction, DampedSweeps
    from probhard.ensembles import DeepEnsemble, MCDropout
    from probhard.errors import (
        ConvergenceError,
        InfeasibleError,
        MissingExtraError,
        ParameterError,
        ProbhardError,
        RankError,
        ShapeError,
    )
    from probhard.laws.correlation import shrunk_correlation
    from probhard.laws.covariance import Covariance, Dense, Diagonal, Factored, LowRank
    from probhard.laws.distribution import LocationScale, as_location_scale, marginals
    from probhard.laws.family import LAPLACE, LOGISTIC, NORMAL, UNIFORM, Family
    from probhard.laws.field_correlation import spectral_correlation
    from probhard.laws.hierarchy_factors import HierarchyFactors, HierarchyPattern
    from probhard.laws.marginals import CensoredMarginals, Marginals
    from probhard.laws.spectral import Spectral
    from probhard.laws.student_t import student_t
    from probhard.method import METHODS, Method, Step
    from probhard.metric import DenseMetric, DiagonalMetric, LowRankMetric, Metric
    from probhard.model import ConstrainedModel
    from probhard.projection.base import Projector, Solution, Stats
    from probhard.projection.frozen import FrozenIterations, FrozenProjection
    from probhard.projection.layer import DPPL
    from probhard.projection.mixture import Mixture
    from probhard.projection.projected import Projected
    from probhard.score import (
        BlockMeans,
        Directions,
        Functionals,
        Horizons,
        Levels,
        constraint_error,
        coverage,
        crps,
        crps_ensemble,
        degenerate,
        energy_score,
        functional_rule,
        functionals_from_record,
        mse,
        n_merci,
        nll,
        pit,
        quantile_loss,
        sample_quantiles,
        variogram_score,
        weighted_quantile_loss,
    )
    from probhard.tangent import ProjectedCovariance, Tangent

__version__ = "0.1.0"

__all__: list[str] = []
_module_of: dict[str, str] = {}  # public name -> module that defines it


def _defined_in(module: str) -> None:
    """Note the module of the names that were added to ``__all__`` since the last call."""
    _module_of.update({name: f"probhard.{module}" for name in __all__ if name not in _module_of})


__all__ += ["Calibration", "ConformalModel", "ConformalSet", "CoverageReport", "calibrate", "conformal"]
__all__ += ["error_correlation"]
_defined_in("calibration")
__all__ += ["Comparison", "compare"]
_defined_in("comparison")
__all__ += [
    "Ball",
    "Box",
    "Conservation",
    "Constraint",
    "Convex",
    "ConvexProgram",
    "Correlation",
    "Hierarchy",
    "Intersection",
    "L1Ball",
    "LinearEquality",
    "LinearInequality",
    "Monotone",
    "NonNegative",
    "NonlinearEquality",
    "NonlinearInequality",
    "PositiveSemidefinite",
    "SecondOrderCone",
    "Semicontinuous",
    "Simplex",
    "TotalVariation",
    "TotalVariationDiminishing",
    "TotalVariationPenalty",
    "matrix_of",
    "per_slice",
    "trapezoid_weights",
    "vectorise",
]
_defined_in("constraints")
__all__ += ["AffineShift", "Completion", "Correction", "DampedSweeps"]
_defined_in("corrections")
__all__ += ["DeepEnsemble", "MCDropout"]
_defined_in("ensembles")
__all__ += [
    "ConvergenceError",
    "InfeasibleError",
    "MissingExtraError",
    "ParameterError",
    "ProbhardError",
    "RankError",
    "ShapeError",
]
_defined_in("errors")
__all__ += ["shrunk_correlation"]
_defined_in("laws.correlation")
__all__ += ["spectral_correlation"]
_defined_in("laws.field_correlation")
__all__ += ["Covariance", "Dense", "Diagonal", "Factored", "LowRank"]
_defined_in("laws.covariance")
__all__ += ["LocationScale", "as_location_scale", "marginals"]
_defined_in("laws.distribution")
__all__ += ["LAPLACE", "LOGISTIC", "NORMAL", "UNIFORM", "Family"]
_defined_in("laws.family")
__all__ += ["HierarchyFactors", "HierarchyPattern"]
_defined_in("laws.hierarchy_factors")
__all__ += ["CensoredMarginals", "Marginals"]
_defined_in("laws.marginals")
__all__ += ["Spectral"]
_defined_in("laws.spectral")
__all__ += ["student_t"]
_defined_in("laws.student_t")
__all__ += ["METHODS", "Method", "Step"]
_defined_in("method")
__all__ += ["DenseMetric", "DiagonalMetric", "LowRankMetric", "Metric"]
_defined_in("metric")
__all__ += ["ConstrainedModel"]
_defined_in("model")
__all__ += ["Projector", "Solution", "Stats"]
_defined_in("projection.base")
__all__ += ["FrozenIterations", "FrozenProjection"]
_defined_in("projection.frozen")
__all__ += ["DPPL"]
_defined_in("projection.layer")
__all__ += ["Mixture"]
_defined_in("projection.mixture")
__all__ += ["Projected"]
_defined_in("projection.projected")
__all__ += [
    "BlockMeans",
    "Directions",
    "Functionals",
    "Horizons",
    "Levels",
    "constraint_error",
    "coverage",
    "crps",
    "crps_ensemble",
    "degenerate",
    "energy_score",
    "functional_rule",
    "functionals_from_record",
    "mse",
    "n_merci",
    "nll",
    "pit",
    "quantile_loss",
    "sample_quantiles",
    "variogram_score",
    "weighted_quantile_loss",
]
_defined_in("score")
__all__ += ["ProjectedCovariance", "Tangent"]
_defined_in("tangent")

if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> Any:
        """Import a public name or submodule on first use."""
        if name in _module_of:
            value = globals()[name] = getattr(import_module(_module_of[name]), name)
            return value
        if f"probhard.{name}" in _compat.MOVED:
            return _compat.former_module(f"probhard.{name}")
        if not name.startswith("_") and find_spec(f"probhard.{name}") is not None:
            return import_module(f"probhard.{name}")
        raise AttributeError(f"module 'probhard' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names and submodules, imported or not."""
    submodules = (module.name for module in iter_modules(__path__) if not module.name.startswith("_"))
    return sorted({*globals(), *_module_of, *submodules})


_compat.install()
