"""Rows ``A u = b``: what depends on A alone, found once, and how ``A W A^T`` is factored for each metric."""

from probhard.rows.base import Factor, Structure
from probhard.rows.system import LinearSystem

__all__ = ["Factor", "LinearSystem", "Structure"]
