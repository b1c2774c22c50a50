"""Projection: the layer, the law that it returns, and one file for each method of finding the nearest point."""

from probhard.projection.base import Projector, Solution, Stats
from probhard.projection.layer import DPPL, FrozenProjection
from probhard.projection.projected import Projected

__all__ = ["DPPL", "FrozenProjection", "Projected", "Projector", "Solution", "Stats"]
