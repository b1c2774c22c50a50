"""Projection: the layer, the projected law, and one file per method for the nearest point."""

from probhard.projection.base import Projector, Solution, Stats
from probhard.projection.frozen import FrozenIterations, FrozenProjection
from probhard.projection.layer import DPPL
from probhard.projection.mixture import Mixture
from probhard.projection.projected import Projected

__all__ = ["DPPL", "FrozenIterations", "FrozenProjection", "Mixture", "Projected", "Projector", "Solution", "Stats"]
