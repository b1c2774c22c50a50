"""Projectors: one constraint under one weight, made ready; ``choice`` says which serves what."""

from probhard.projectors.base import Options, Projector, Solution, Stats
from probhard.projectors.choice import projector_of

__all__ = ["Options", "Projector", "Solution", "Stats", "projector_of"]
