"""Rows ``A u = b``: the structure of A, analysed once, and a factor of ``A W A^T`` for each metric weight W."""

from probhard.rows.base import Factor, Structure
from probhard.rows.system import LinearSystem

__all__ = ["Factor", "LinearSystem", "Structure"]
