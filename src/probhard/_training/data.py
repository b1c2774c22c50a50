"""Training data: tensors as a dataset, checked and fetched batch by batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from probhard.errors import ParameterError, ShapeError
from probhard.model import Batch

TRAIN, VALIDATION = "train", "validation"


class TensorData(Dataset):
    """A batch of all data as a dataset, which fetches a list of items by one indexing operation."""

    def __init__(self, content: Batch) -> None:
        self.content = content

    def __len__(self) -> int:
        return self.content.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        return {name: tree_map(lambda part: _items(part, indices), part) for name, part in vars(self.content).items()}


def _items(part: Any, indices: list[int]) -> Any:
    return part[indices] if isinstance(part, Tensor) else part


def as_dataset(data: Any, targets: bool = True) -> Dataset:
    """Convert data to a dataset.

    Args:
        data: A torch ``Dataset``, which is returned as it is, or anything that ``Batch.of`` takes.
        targets: Whether targets are needed.

    Returns:
        The dataset.

    Raises:
        ParameterError: If there are no targets, or they are not a tensor.
        ShapeError: If inputs, targets and context have different numbers of samples, or none.
    """
    if isinstance(data, Dataset):
        return data
    content = Batch.of(data)
    if content.target is None and targets:
        raise ParameterError(
            "fit() got data without targets.",
            "There is nothing to learn from.",
            "Pass (inputs, targets), or a model whose score is a function of the prediction and the batch.",
        )
    if content.target is not None and not isinstance(content.target, Tensor):
        raise ParameterError(
            f"fit() got targets of the type {type(content.target).__name__}.",
            "Training needs tensors.",
            "Pass torch.as_tensor(...) of inputs and targets.",
        )
    parts = tree_leaves((content.inputs, content.target, content.context, content.mask))
    counts = {len(part) if part.dim() else 1 for part in parts if isinstance(part, Tensor)}
    if len(counts) > 1 or 0 in counts:
        raise ShapeError(
            f"Inputs, targets and context have {' and '.join(map(str, sorted(counts)))} samples.",
            "Each input belongs to one target, and at least one sample is needed.",
            "Pass tensors with the same first dimension.",
        )
    if not counts:
        raise ParameterError(
            f"fit() got inputs of the type {type(content.inputs).__name__} and no targets.",
            "The number of samples is that of the tensors.",
            "Pass torch.as_tensor(...) of the inputs.",
        )
    return TensorData(content)


def collate_for(data: Dataset) -> Any:
    """The collate function of a dataset's loader; None, the default of torch, for the caller's own datasets."""
    return (lambda batch: batch) if isinstance(data, TensorData) else None
