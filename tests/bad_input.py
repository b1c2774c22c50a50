"""What tests of bad input share: small tensors, a hierarchy, a backbone, and the check of an error's three parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from probhard import Hierarchy, LinearEquality, ProbhardError

DOUBLE = torch.float64
NAN, INF = float("nan"), float("inf")


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=DOUBLE)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=DOUBLE)


def spoiled(x: torch.Tensor, value: float, at: int = 0) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[at] = value
    return x


def eye(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=DOUBLE)


SUMS = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], dtype=DOUBLE)
S = torch.cat([SUMS, eye(4)])  # 7 series, 4 of them at the bottom
NAMES = ["total", "left", "right", "a", "b", "c", "d"]
ROW = LinearEquality(ones(1, 5), 1.0)
BATCHED = torch.randn(3, 2, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))


def hierarchy(**options) -> Hierarchy:
    return Hierarchy(S, **options)


def law(n: int = 5, batch: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    return zeros(*batch, n), ones(*batch, n)


class Backbone(nn.Module):
    """Five Gaussians from three inputs."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2 * width, dtype=DOUBLE)

    def forward(self, x):
        mean, raw = self.linear(x).chunk(2, -1)
        return mean, nn.functional.softplus(raw) + 0.1


def explained(error: ProbhardError, fragments: list[str]) -> None:
    """Three sentences, and the numbers that matter among them."""
    assert isinstance(error, ValueError)
    for part in (error.what, error.why, error.fix):
        assert part.strip()
        assert part.rstrip().endswith(".")
    assert str(error) == f"{error.what} {error.why} {error.fix}"
    for fragment in fragments:
        assert fragment in str(error)


def rejected(action: Callable[[], object], kind: type[ProbhardError], fragments: list[str]) -> None:
    """An action raises an error of this very kind, whose message names these fragments."""
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    explained(caught.value, fragments)
