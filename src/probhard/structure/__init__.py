"""Row systems ``A u = b``: what depends on A alone, found once, and how ``A W A^T`` is factored for each metric."""

from probhard.structure.base import Factor, Structure
from probhard.structure.system import LinearSystem

__all__ = ["Factor", "LinearSystem", "Structure"]
