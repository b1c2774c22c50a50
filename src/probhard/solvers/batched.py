"""Records of tensors that share their leading dimensions and are reshaped, selected and replaced together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batched:
    """Base of frozen dataclasses whose fields are all tensors over the same leading dimensions."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply one function to every field."""
        return replace(self, **{field.name: function(getattr(self, field.name)) for field in fields(self)})

    def take(self, index: Tensor) -> Self:
        """The elements with these indices (k,) of the first dimension."""
        return self.map(lambda value: value.index_select(0, index))

    def placed(self, index: Tensor, part: Self) -> Self:
        """A copy whose elements with these indices (k,) come from ``part``."""
        return self._joined(part, lambda own, other: own.index_copy(0, index, other))

    def kept(self, keep: Tensor, other: Self) -> Self:
        """The own elements where ``keep`` (L,) is True, those of ``other`` elsewhere."""

        def choose(own: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(keep.reshape(-1, *[1] * (theirs.dim() - 1)), own, theirs)

        return self._joined(other, choose)

    def _joined(self, other: Self, function: Callable[[Tensor, Tensor], Tensor]) -> Self:
        names = [field.name for field in fields(self)]
        return replace(self, **{name: function(getattr(self, name), getattr(other, name)) for name in names})
