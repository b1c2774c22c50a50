"""Probability laws: location-scale distributions, their covariances and families, and censored marginals."""

from probhard.laws.correlation import shrunk_correlation
from probhard.laws.covariance import Covariance, Dense, Diagonal, Factored, LowRank
from probhard.laws.distribution import LocationScale, Marginals, as_location_scale, marginals
from probhard.laws.family import LAPLACE, LOGISTIC, NORMAL, UNIFORM, Family
from probhard.laws.field_correlation import spectral_correlation
from probhard.laws.hierarchy_factors import HierarchyFactors, HierarchyPattern
from probhard.laws.marginals import CensoredMarginals
from probhard.laws.poisson_mixture import PoissonMixture
from probhard.laws.spectral import Spectral
from probhard.laws.split_marginals import SplitMarginals
from probhard.laws.student_t import student_t

__all__ = [
    "LAPLACE",
    "LOGISTIC",
    "NORMAL",
    "UNIFORM",
    "CensoredMarginals",
    "Covariance",
    "Dense",
    "Diagonal",
    "Factored",
    "Family",
    "HierarchyFactors",
    "HierarchyPattern",
    "LocationScale",
    "LowRank",
    "Marginals",
    "PoissonMixture",
    "Spectral",
    "SplitMarginals",
    "as_location_scale",
    "marginals",
    "shrunk_correlation",
    "spectral_correlation",
    "student_t",
]
