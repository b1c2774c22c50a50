"""A constraint beside the same set in other words: dense rows, bounds and cvxpy terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor

import probhard as ph

BATCH = 3
INF = torch.inf
Terms = tuple[list[cp.Constraint], Any]  # constraints, and what is added to the objective


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Set:
    """A constraint, and the same set in other words."""

    build: Callable[[], ph.Constraint]
    n: int
    lower: Any = -INF  # number, (n,) or (BATCH, n)
    upper: Any = INF
    A: Any = None  # (q, n) or (BATCH, q, n)
    b: Any = 0.0  # number, (q,) or (BATCH, q)
    G: Any = None  # (p, n) or (BATCH, p, n)
    d: Any = 0.0
    also: Callable[[cp.Variable], Terms] = lambda u: ([], 0)
    beyond: Callable[[Tensor], list[Tensor]] | None = None  # excesses of what ``also`` says
    loc: float = 0.5  # where typical means are
    far: float = 30.0  # how far points outside are
    projection: bool = True  # False for a proximal map: points inside move
    curved: bool = False  # no constant tangents; Clarabel's own accuracy is less, too
    coupled: bool = False  # a curved set that is solved under coupled weights

    @property
    def shared(self) -> bool:
        """Whether all elements of the batch have the same set."""
        one = all(torch.as_tensor(getattr(self, name)).dim() <= 1 for name in ("lower", "upper", "b", "d"))
        return one and all(rows is None or torch.as_tensor(rows).dim() == 2 for rows in (self.A, self.G))

    def data(self, name: str, element: int) -> np.ndarray:
        """Bounds (n,), rows (q, n) or right-hand sides (q,) of one element of the batch."""
        value = torch.as_tensor(getattr(self, name), dtype=torch.float64)
        own = 2 if name in "AG" else 1
        value = value[element] if value.dim() > own else value
        if name in "bd":
            value = value.expand(torch.as_tensor(self.A if name == "b" else self.G).shape[-2])
        return (value.expand(self.n) if name in ("lower", "upper") else value).numpy()

    def describe(self, u: cp.Variable, element: int = 0) -> Terms:
        """The set of one element of the batch for cvxpy."""
        lower, upper = self.data("lower", element), self.data("upper", element)
        low, high = np.flatnonzero(np.isfinite(lower)), np.flatnonzero(np.isfinite(upper))
        found, extra = self.also(u)
        found = list(found)
        if len(low):
            found.append(u[low] >= lower[low])
        if len(high):
            found.append(u[high] <= upper[high])
        if self.A is not None:
            found.append(self.data("A", element) @ u == self.data("b", element))
        if self.G is not None:
            found.append(self.data("G", element) @ u <= self.data("d", element))
        return found, extra

    def violation(self, u: Tensor, z: Tensor) -> float:
        """The largest violation of rows and terms at u, both (..., BATCH, n), relative to what cancels in them.

        Terms below a millionth of the points z that were projected count as that large.
        """
        worst = 0.0
        for k in range(BATCH):
            x, floor = u[..., k, :].double().numpy(), 1e-6 * z[..., k, :].double().abs().amax(-1, keepdim=True).numpy()
            for rows, right, side in (("A", "b", np.abs), ("G", "d", lambda r: np.maximum(r, 0))):
                if getattr(self, rows) is not None:
                    M, m = self.data(rows, k), self.data(right, k)
                    size = np.maximum(np.abs(x) @ np.abs(M).T + np.abs(m), floor)
                    worst = max(worst, float((side(x @ M.T - m) / size).max()))
        for found in self.beyond(u) if self.beyond is not None else ():
            worst = max(worst, float(found.max() / z.abs().max()))
        return worst

    def excesses(self, u: Tensor, element: int) -> Tensor:
        """Residuals and positive excesses (..., q) of one element's points u (..., n)."""
        lower, upper = (torch.from_numpy(self.data(name, element).copy()) for name in ("lower", "upper"))
        found = [(lower - u).clamp(min=0), (u - upper).clamp(min=0)]
        for rows, right in (("A", "b"), ("G", "d")):
            if getattr(self, rows) is not None:
                M, m = (torch.from_numpy(self.data(name, element).copy()) for name in (rows, right))
                found.append(u @ M.T - m if rows == "A" else (u @ M.T - m).clamp(min=0))
        if self.beyond is not None:
            found += [part.unsqueeze(-1).clamp(min=0) for part in self.beyond(u)]
        return torch.cat(found, -1)

    def outside(self, u: Tensor) -> int:
        """How many numbers of u (..., BATCH, n) are not within their bounds: no tolerance."""
        lower, upper = (torch.as_tensor(x, dtype=torch.float64).to(u.dtype) for x in (self.lower, self.upper))
        return int((~((u >= lower) & (u <= upper))).sum())


def coherence(S: np.ndarray) -> np.ndarray:
    """Aggregates less the sums of their bottom series."""
    above = S.shape[0] - S.shape[1]
    return np.hstack([np.eye(above), -S[:above]])


def differences(n: int, slices: int = 1) -> np.ndarray:
    """``u_(i+1) - u_i`` within each slice."""
    width = n // slices
    return np.kron(np.eye(slices), np.eye(width)[1:] - np.eye(width)[:-1])


def second_differences(grid: Any, slices: int = 1) -> np.ndarray:
    """Differences of slopes at the inner places of a grid, times the harmonic mean of the steps."""
    h = np.diff(np.asarray(grid))
    slopes = np.diff(np.eye(len(h) + 1), axis=0) / h[:, None]
    mean = 2 / (1 / h[1:] + 1 / h[:-1])
    return np.kron(np.eye(slices), mean[:, None] * np.diff(slopes, axis=0))


def by_slice(row: Any, slices: int) -> np.ndarray:
    return np.kron(np.eye(slices), np.atleast_2d(np.asarray(row)))


def tv_bound(amount: float) -> dict[str, Any]:
    return {
        "also": lambda u: ([cp.tv(u) <= amount], 0),
        "beyond": lambda u: [u.diff(dim=-1).abs().sum(-1) - amount],
    }


def tv_penalty(amount: float) -> dict[str, Any]:
    return {"also": lambda u: ([], amount * cp.tv(u)), "projection": False}


def l1_ball(radius: float, center: Any = 0.0) -> dict[str, Any]:
    middle = np.asarray(center)
    return {
        "also": lambda u: ([cp.norm1(u - middle) <= radius], 0),
        "beyond": lambda u: [(u - torch.as_tensor(center)).abs().sum(-1) - radius],
    }


def ball(radius: float, center: Tensor) -> dict[str, Any]:
    return {
        "also": lambda u: ([cp.norm(u - center.numpy()) <= radius], 0),
        "beyond": lambda u: [(u - center.to(u)).norm(dim=-1) - radius],
        "curved": True,
    }


def exponential(total: float) -> dict[str, Any]:
    return {
        "also": lambda u: ([cp.sum(cp.exp(u)) <= total], 0),
        "beyond": lambda u: [u.exp().sum(-1) - total],
        "curved": True,
        "far": 3.0,
    }


def symmetric(size: int) -> np.ndarray:
    """The map from the vector of a symmetric matrix to its entries, (size^2, n)."""
    row, column = np.tril_indices(size)
    found = np.zeros((size, size, len(row)))
    for k, (i, j) in enumerate(zip(row, column)):
        found[i, j, k] = found[j, i, k] = 1.0 if i == j else 0.5**0.5
    return found.reshape(size * size, -1)


def semidefinite(size: int) -> dict[str, Any]:
    entries = symmetric(size)
    whole = torch.from_numpy(entries)
    return {
        "also": lambda u: ([cp.reshape(entries @ u, (size, size), order="C") >> 0], 0),
        "beyond": lambda u: [-torch.linalg.eigvalsh((u.double() @ whole.T).unflatten(-1, (size, size)))[..., 0]],
        "curved": True,
        "coupled": True,
    }


def second_order(B: Tensor, c: Tensor, a: Tensor, d: float) -> dict[str, Any]:
    return {
        "also": lambda u: ([cp.norm(B.numpy() @ u + c.numpy()) <= a.numpy() @ u + d], 0),
        "beyond": lambda u: [(u @ B.to(u).T + c.to(u)).norm(dim=-1) - u @ a.to(u) - d],
        "curved": True,
        "coupled": True,
    }
