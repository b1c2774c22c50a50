"""One batch of data: what the backbone takes, what is scored, and what the constraint depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from probhard.errors import ParameterError


@dataclass(frozen=True)
class Batch:
    """One batch of data.

    Args:
        inputs: What the backbone takes.
        target: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool.
        context: What the constraint function takes.
    """

    inputs: Any
    target: Tensor | None = None
    mask: Tensor | None = None
    context: Any = None

    @classmethod
    def of(cls, batch: Any) -> Batch:
        """Convert data to a batch whose context is set.

        Args:
            batch: A ``Batch``; a tuple (inputs, target, mask, context), of which trailing parts may be left out; a
                mapping with these names; or the inputs alone.

        Returns:
            The batch; its context is the inputs unless another one is passed.

        Raises:
            ParameterError: If a mapping has other keys or no inputs, or a tuple another length.
        """
        if isinstance(batch, Batch):
            parts = batch
        elif isinstance(batch, Mapping):
            unknown = set(batch) - {"inputs", "target", "mask", "context"}
            if unknown or "inputs" not in batch:
                raise ParameterError(
                    f"The batch has the keys {sorted(batch)}.",
                    "A mapping must hold 'inputs' and may hold 'target', 'mask' and 'context'.",
                    "Put what the backbone takes into 'inputs' and what the constraint needs into 'context'.",
                )
            parts = cls(**batch)
        elif isinstance(batch, tuple | list):
            if len(batch) not in (1, 2, 3, 4):
                raise ParameterError(
                    f"The batch has {len(batch)} parts.",
                    "A tuple is (inputs, target, mask, context), with one to four parts.",
                    "Name the parts in a dictionary.",
                )
            parts = cls(*batch)
        else:
            parts = cls(batch)
        return parts if parts.context is not None else replace(parts, context=parts.inputs)

    @property
    def size(self) -> int:
        """Number of samples: the length of the targets, or of the first tensor of the inputs."""
        leaves = [part for part in tree_leaves((self.target, self.inputs)) if isinstance(part, Tensor)]
        return len(leaves[0]) if leaves and leaves[0].dim() else 1
