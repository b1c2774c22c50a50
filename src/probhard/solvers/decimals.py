"""The nearest point of a polyhedron in decimal arithmetic, for points that no method finds in float64.

With weights over 24 decades, float64 loses the small ones, whatever the units. Here the dual active set method of
Goldfarb and Idnani (1983) runs with ``DIGITS`` digits on numbers that are read without rounding,

    minimise  |e|^2 / 2   subject to  lower <= rows v <= upper,      v = v0 + R e,

and the inverse of the Gram matrix of active rows is updated. Auxiliary variables get weights so large that their cost
is below the last digit that matters. Rows that only agree to rounding have no common point in exact arithmetic, so all
are relaxed by ``RELAXED``, and the result is the nearest point of that larger set.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal, localcontext

import numpy as np

DIGITS = 240
RELAXED = (1e-14, 1e-12)  # tried in turn, in units of the largest right-hand side over the coefficients of its row
CHEAP = Decimal("1e60")  # weight of auxiliary variables, relative to the largest of the others
ZERO = Decimal("1e-150")  # squares below this share of their terms are 0
STEPS = 20  # changes of the active set, for each row and variable

_NONE = Decimal(0)


@dataclass(frozen=True)
class Nearest:
    """The nearest point and its derivatives, for one element."""

    value: np.ndarray  # of the relaxed set, (n,)
    face: np.ndarray  # of the active rows without relaxation, (n,)
    tangent: np.ndarray  # du/dz, (n, n)
    pull: np.ndarray  # W^-1 (u - z), (n,)
    lift: np.ndarray  # du/dside for active rows, 0 for the others, (n, rows)
    side: np.ndarray  # -1 where a row is active at its lower side, 1 at its upper, 0 elsewhere, (rows,)
    multiplier: np.ndarray  # y with W^-1 (u - z) = rows^T y, at most 0 at upper sides, (rows,)


@dataclass(frozen=True)
class Sides:
    """Rows with two sides, ``lower <= on_u u + own s <= upper``."""

    on_u: np.ndarray  # (rows, n)
    own: np.ndarray  # (rows, k), of auxiliary variables
    lower: np.ndarray  # (rows,)
    upper: np.ndarray  # (rows,)


def nearest(z: np.ndarray, root: np.ndarray, sides: Sides) -> Nearest | None:
    """The nearest point under ``W = root root^T``; None if the set is empty or too many steps are needed.

    Args:
        z: The point, (n,).
        root: R, (n, r).
        sides: The rows.
    """
    arrays = (z, root, sides.on_u, sides.own)
    if not all(np.isfinite(x).all() for x in arrays) or np.isnan(sides.lower).any() or np.isnan(sides.upper).any():
        return None
    with localcontext(Context(prec=DIGITS, Emax=10**9, Emin=-(10**9))):
        for relaxed in RELAXED:
            found = _Search(z, root, sides, relaxed).run()
            if found is not None:
                return found
    return None


class _Search:
    """One run; signed rows ``c v >= d`` are numbered 0 to rows - 1 for lower sides, then for upper ones."""

    def __init__(self, z: np.ndarray, root: np.ndarray, sides: Sides, relaxed: float) -> None:
        n, k = len(z), sides.own.shape[1]
        self.n, self.count = n, len(sides.lower)
        lengths = np.abs(sides.on_u).max(1, initial=0.0) + np.abs(sides.own).max(1, initial=0.0)
        ends = np.stack([np.where(np.isfinite(x), np.abs(x), 0.0) for x in (sides.lower, sides.upper)]).max(0)
        size = (ends / np.where(lengths > 0, lengths, 1.0)).max(initial=0.0)
        self.exact_root = _exact(root)
        largest = max((x * x for x in self.exact_root.ravel()), default=Decimal(1)) or Decimal(1)
        rows, own = _exact(sides.on_u), _exact(sides.own)
        turned = rows.dot(self.exact_root) if n else np.zeros((self.count, 0), dtype=object)
        cheap = own * (CHEAP * largest).sqrt()
        self.normals = _stacked(np.concatenate([turned, cheap], 1))  # C R, (2 rows, r + k)
        at = rows.dot(_exact(z))
        self.room = room = _exact(relaxed * size * lengths)
        signed = []
        for sign, end in ((1, sides.lower), (-1, sides.upper)):
            known = np.isfinite(end)
            gap = sign * (at - _exact(np.where(known, end, 0.0))) + room
            signed.append(np.where(known, gap, np.array(Decimal("Infinity"), dtype=object)))
        self.start = np.concatenate(signed)  # values of c v - d at the start, (2 rows,)
        self.z, self.rows, self.columns = z, rows, root.shape[1] + k
        self.active: list[int] = []
        self.multiplier = np.zeros(0, dtype=object)
        self.inverse = np.zeros((0, 0), dtype=object)
        self.moved = np.full(self.columns, _NONE, dtype=object)  # e

    def run(self) -> Nearest | None:
        """Add the most violated row until there is none."""
        squares = (self.normals * self.normals).sum(1) if self.columns else np.full(2 * self.count, _NONE)
        finite = np.array([x.is_finite() for x in self.start])
        for _ in range(STEPS * (self.count + self.columns)):
            slack = self.start[finite] + self.normals[finite].dot(self.moved)
            scale = np.array([(x if x > 0 else Decimal(1)).sqrt() for x in squares[finite]])
            worst = int(np.argmin(slack / scale))
            row = int(np.flatnonzero(finite)[worst])
            if row in self.active or slack[worst] >= -ZERO * (abs(self.start[row]) + ZERO):
                return self._result()
            if not self._added(row, slack[worst], squares[row]):
                return None
        return None

    def _added(self, row: int, slack: Decimal, square: Decimal) -> bool:
        """Make a violated row active, dropping rows on the way; False if the set is empty."""
        normal, own = self.normals[row], _NONE
        while True:
            chosen = self.normals[self.active]
            along = self.inverse.dot(chosen.dot(normal)) if self.active else np.zeros(0, dtype=object)
            step = normal - along.dot(chosen) if self.active else normal
            length = step.dot(step)
            free = length > ZERO * square and length > 0
            ratios = [(y / r, i) for i, (y, r) in enumerate(zip(self.multiplier, along, strict=True)) if r > 0]
            blocked, first = min(ratios, default=(Decimal("Infinity"), -1))
            full = -slack / length if free else Decimal("Infinity")
            size = min(blocked, full)
            if not size.is_finite():
                return False
            self.multiplier, own = self.multiplier - size * along, own + size
            if free:
                self.moved, slack = self.moved + size * step, slack + size * length
            if full <= blocked:
                self._bordered(row, along, length, own)
                return True
            self._dropped(first)

    def _bordered(self, row: int, along: np.ndarray, length: Decimal, own: Decimal) -> None:
        """Append a row to the active ones; ``length`` is the Schur complement of its square."""
        k, column = len(self.active), along / length if len(along) else along
        inverse = np.empty((k + 1, k + 1), dtype=object)
        inverse[:k, :k] = self.inverse + np.multiply.outer(column, along)
        inverse[:k, k] = inverse[k, :k] = -column
        inverse[k, k] = 1 / length
        self.inverse, self.active = inverse, [*self.active, row]
        self.multiplier = np.concatenate([self.multiplier, np.array([own], dtype=object)])

    def _dropped(self, at: int) -> None:
        rest = [i for i in range(len(self.active)) if i != at]
        column = self.inverse[rest, at]
        self.inverse = self.inverse[np.ix_(rest, rest)] - np.multiply.outer(column, column) / self.inverse[at, at]
        self.active, self.multiplier = [self.active[i] for i in rest], self.multiplier[rest]

    def _result(self) -> Nearest:
        own = self.exact_root.shape[1]
        value = _exact(self.z) + self.exact_root.dot(self.moved[:own])
        which = [row % self.count for row in self.active]
        sign = np.array([1 if row < self.count else -1 for row in self.active], dtype=object)
        side = np.zeros(self.count, dtype=np.int8)
        side[which] = -sign.astype(np.int8)
        lift, multiplier = np.zeros((self.n, self.count)), np.zeros(self.count)
        tangent, pull, face = np.eye(self.n), np.zeros(self.n), value
        if which:
            rows = self.rows[which] * sign[:, None]  # (k, n)
            pulled = self.exact_root.dot(self.normals[self.active][:, :own].T).dot(self.inverse)  # W C^T M^-1, (n, k)
            tangent = (np.array([[Decimal(int(x)) for x in row] for row in tangent]) - pulled.dot(rows)).astype(float)
            lift[:, which] = (pulled * sign).astype(float)
            multiplier[which] = (self.multiplier * sign).astype(float)
            pull, face = rows.T.dot(self.multiplier).astype(float), value + pulled.dot(self.room[which])
        return Nearest(value.astype(float), face.astype(float), tangent, pull, lift, side, multiplier)


def _exact(x: np.ndarray | float) -> np.ndarray:
    """Decimals of the same value."""
    flat = np.asarray(x, dtype=float)
    return np.array([Decimal(float(value)) for value in flat.ravel()] + [None], dtype=object)[:-1].reshape(flat.shape)


def _stacked(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, -rows])
