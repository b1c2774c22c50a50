"""The law of a normal vector projected on bounds, by the cavity method (adaptive TAP; Opper and Winther 2001).

Rows ``v ~ (m, V)`` are projected on ``l <= s <= h`` in the metric ``K^-1``. The multipliers y solve
``s = v - K y``. Without row j its value would be the cavity field ``x_j = s_j + k_j y_j``, hence

    s_j = clip(x_j, l_j, h_j),        y_j = r(x_j) / k_j,        r(x) = x - clip(x).

The field is a sum of many terms: it keeps the family of v, with mean x_j and scale t_j. The best linear fit of r has
the slope p_j, the probability of the bounds (for normal laws), and leaves uncorrelated noise. So the multipliers solve
a linear system, ``(K + E) y = v - a + noise`` with diagonal E, and with ``G = (K + E)^-1``

    E_j = k_j (1 / p_j - 1),     a_j = x_j - E r / p_j,     n_j = Var r / p_j^2 - t_j^2,
    k_j = 1 / G_jj - E_j,        x_j = a_j + (G (m - a))_j / G_jj,      t_j^2 = (G (V + N) G)_jj / G_jj^2 - n_j.

This fixed point is exact for one row, and for rows that are independent in both K and V. A few iterations find it.
Gradients are those of the fixed point, by the same iteration on the adjoint. Rows whose bounds have a probability below
``COUNTS`` are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.jit import AVAILABLE
from probhard._util.numerics import TINY
from probhard._util.tensors import checking, safe_sqrt
from probhard.laws._cavity import Cavity, Inverse, excess, inverse, times
from probhard.laws._cavity_kernels import COOLING, COUNTS, adjoint, settle
from probhard.laws.family import Family

STEPS = 60  # most iterations
TRACED = 12  # iterations where values cannot be looked at
WHOLE = 16  # full steps; later ones go half of the way
CLOSE = 1e-4  # step in units of the rows' scales at which an element has converged
RARE = 1e-9  # smallest slope
FAR = 3.0  # violation in scales from which an element starts with wider fields
NARROW = 1e-6  # smallest scale of a field, relative to the scales and violations of its element


@dataclass(frozen=True)
class Rows:
    """Rows with bounds, flattened over the batch."""

    loc: Tensor  # m, (B, r)
    gram: Tensor  # K, (B, r, r), positive semi-definite
    lower: Tensor  # (B, r)
    upper: Tensor  # (B, r)
    own: Tensor | None = None  # V, (B, r, r); None if it is K

    @property
    def cov(self) -> Tensor:
        """V, (B, r, r)."""
        return self.gram if self.own is None else self.own

    @property
    def traced(self) -> bool:
        """Whether gradients are needed."""
        parts = (self.loc, self.gram, self.cov, self.lower, self.upper)
        return torch.is_grad_enabled() and any(x.requires_grad for x in parts)

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """The rows with every tensor changed."""
        loc, gram, lower, upper = (change(x) for x in (self.loc, self.gram, self.lower, self.upper))
        return Rows(loc, gram, lower, upper, None if self.own is None else change(self.own))

    def select(self, index: Tensor, used: Tensor) -> Rows:
        """Some rows (B, k) of every element; those that are not ``used`` are free and independent of all others."""
        both = used.unsqueeze(-1) & used.unsqueeze(-2)
        empty = torch.diag_embed((~used).to(self.loc))

        def chosen(matrix: Tensor) -> Tensor:
            lines = matrix.gather(-2, index.unsqueeze(-1).expand(*index.shape, matrix.shape[-1]))
            entries = lines.gather(-1, index.unsqueeze(-2).expand(-1, index.shape[-1], -1))
            return torch.where(both, entries, empty)

        ends = zip((0.0, -torch.inf, torch.inf), (self.loc, self.lower, self.upper))
        loc, lower, upper = (torch.where(used, x.gather(-1, index), end) for end, x in ends)
        return Rows(loc, chosen(self.gram), lower, upper, None if self.own is None else chosen(self.own))


@dataclass(frozen=True)
class Fields:
    """Cavity fields of the rows that count."""

    index: Tensor  # their rows, (B, k)
    used: Tensor  # whether an entry is one, (B, k) bool
    loc: Tensor  # x, (B, k)
    scale: Tensor  # t, (B, k)
    system: _System
    state: Tensor  # (3, B, k)

    def multipliers(self) -> tuple[Tensor, Tensor, Tensor]:
        """``E y``, (B, k), the response G, (B, k, k), and ``V + N``, (B, k, k)."""
        rows = self.system.rows
        gate, center, noise = self.system.channel(self.state)
        response = Inverse.apply(rows.gram, gate)
        return times(response, rows.loc - center), response, rows.cov + torch.diag_embed(noise)


def mean_field(rows: Rows, family: Family) -> Fields:
    """The fields of projected rows.

    Args:
        rows: The rows; bounds may be infinite.
        family: Unit law of every row, with a finite variance.
    """
    every = torch.arange(rows.loc.shape[-1], device=rows.loc.device).expand(rows.loc.shape)
    if not checking():  # no look at values: a fixed number of steps, differentiated one by one
        system = _System(rows, family)
        state = system.start()
        for _ in range(TRACED):
            state = system.step(state)
        return Fields(every, every >= 0, state[0], safe_sqrt(state[1].clamp(min=0)), system, state)
    with torch.no_grad():
        state, counts = _settled(rows.map(Tensor.detach), family)
        width = int(counts.sum(-1).max()) if counts.numel() else 0
        index, used = every, counts
        if width < counts.shape[-1]:
            index = torch.argsort(counts.to(torch.int8), stable=True, dim=-1, descending=True)[:, :width]
            used = counts.gather(-1, index)
            state = state.gather(-1, index.expand(3, *index.shape))
    if not bool(used.all()) or width < counts.shape[-1]:
        rows = rows.select(index, used)
        state = torch.where(used, state, _System(rows, family).start().detach())
    system = _System(rows, family)
    state = _implicit(system, state)
    return Fields(index, used, state[0], safe_sqrt(state[1].clamp(min=0)), system, state)


def _settled(rows: Rows, family: Family) -> tuple[Tensor, Tensor]:
    """The fixed point (3, B, r), and the rows that count, (B, r) bool."""
    if family.name != "normal" or not AVAILABLE:
        state = _iterated(rows, family)
        scale = state[1].clamp(min=TINY).sqrt()
        return state, excess(state[0], scale, rows.lower, rows.upper, family)[1] >= COUNTS
    state = torch.empty(3, *rows.loc.shape, dtype=torch.float64)
    counts = torch.empty(rows.loc.shape, dtype=torch.bool)
    start = _System(rows, family)
    floors = torch.cat([start.least, start.wide], -1)
    parts = (rows.loc, rows.gram, rows.cov, rows.lower, rows.upper, floors)
    loc, gram, cov, lower, upper, floor = (x.contiguous().numpy(force=True) for x in parts)
    limits = (STEPS, WHOLE, CLOSE, RARE)
    settle(loc, gram, cov, rows.own is None, lower, upper, floor, limits, state.numpy(), counts.numpy())
    return state.to(rows.loc.device), counts.to(rows.loc.device)


def _iterated(rows: Rows, family: Family) -> Tensor:
    """The fixed point (3, B, r); elements that have converged take no further step."""
    system, size = _System(rows, family), _size(rows)
    state = system.start()
    found, index = state.clone(), torch.arange(state.shape[1], device=state.device)
    for count in range(STEPS):
        system.floor = torch.maximum(system.least, system.wide * COOLING**count)
        fresh = system.next(state)
        if count >= WHOLE:
            fresh = 0.5 * (state + fresh)
        moved = ((fresh - state).abs() / size).amax((0, 2))
        found[:, index] = fresh
        going = (moved > CLOSE) | (system.floor > system.least).squeeze(-1)
        kept = going.nonzero().squeeze(-1)
        if not len(kept):
            break
        index, state, size = index[kept], fresh[:, kept], size[:, kept]
        rows = rows.map(lambda x: x.index_select(0, kept))  # noqa: B023 - used at once
        system = _System(rows, family)
    return found


def _size(rows: Rows) -> Tensor:
    """Sizes (3, B, r) of the means, squared scales and stiffnesses."""
    variance, own = (x.diagonal(dim1=-2, dim2=-1).clamp(min=TINY) for x in (rows.cov, rows.gram))
    return torch.stack([variance.sqrt() + NARROW * rows.loc.abs(), variance, own])


def _implicit(system: _System, state: Tensor) -> Tensor:
    """One more step from the fixed point, with the gradients of the fixed point."""
    rows, found = system.rows, system.step(state)
    known = system.last
    if not rows.traced or known is None:
        return found

    def solved(gradient: Tensor) -> Tensor:
        slopes, center = _slopes(_System(rows.map(Tensor.detach), system.family), state)
        product = times(known[0], rows.loc.detach() - center)
        parts = (gradient, known[0], known[1], product, slopes)
        first, response, wide, right, slope = (x.detach().contiguous().numpy(force=True) for x in parts)
        return torch.from_numpy(adjoint(first, response, wide, right, slope, STEPS, CLOSE)).to(gradient)

    found.register_hook(solved)
    return found


def _slopes(system: _System, state: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives (3, 3, B, r) of E, a and n by means, squared scales and stiffnesses, and a, (B, r)."""
    with torch.enable_grad():
        inner = state.detach().requires_grad_()
        outputs = system.channel(inner)
        slopes = [torch.autograd.grad(x.sum(), inner, retain_graph=True)[0] for x in outputs]
    return torch.stack(slopes), outputs[1].detach()


class _System:
    """The map whose fixed point is sought, of states (3, B, r): means, squared scales and stiffnesses."""

    def __init__(self, rows: Rows, family: Family) -> None:
        self.rows, self.family = rows, family
        self.last: tuple[Tensor, Tensor] | None = None
        with torch.no_grad():
            variance = rows.cov.diagonal(dim1=-2, dim2=-1)
            outside = (rows.loc - torch.clamp(rows.loc, rows.lower, rows.upper)).square()
            largest = torch.nn.functional.pad(variance + outside, (0, 1)).amax(-1, keepdim=True)  # 0 without rows
            self.least = NARROW**2 * largest.clamp(min=TINY)
            far = outside > FAR**2 * variance
            self.wide = torch.nn.functional.pad(torch.where(far, outside, 0.0), (0, 1)).amax(-1, keepdim=True)
            self.floor = self.least
            self.softest = RARE * rows.gram.diagonal(dim1=-2, dim2=-1).clamp(min=TINY)

    def start(self) -> Tensor:
        """Every row by itself."""
        variance, own = (x.diagonal(dim1=-2, dim2=-1) for x in (self.rows.cov, self.rows.gram))
        return torch.stack([self.rows.loc, variance, own])

    def next(self, state: Tensor) -> Tensor:
        """The next state, without gradients."""
        gate, center, noise = self.channel(state)
        response = inverse(self.rows.gram, gate)
        own = response.diagonal(dim1=-2, dim2=-1)
        if self.rows.own is None:  # G (K + N) G = G - G (E - N) G
            spread = own - times(response.square(), gate - noise)
        else:
            spread = ((response @ self.rows.own) * response).sum(-1) + times(response.square(), noise)
        solved = times(response, self.rows.loc - center)
        return torch.stack([center + solved / own, spread / own.square() - noise, 1 / own - gate])

    def step(self, state: Tensor) -> Tensor:
        """The next state, with gradients; ``last`` becomes G and G (V + N) G."""
        rows = self.rows
        gate, center, noise = self.channel(state)
        with torch.no_grad():
            response = inverse(rows.gram, gate)
            if rows.own is None:
                wide = response - (response * (gate - noise).unsqueeze(-2)) @ response
            else:
                wide = response @ (rows.own + torch.diag_embed(noise)) @ response
        self.last = response, wide
        found: Tensor = Cavity.apply(rows.gram, rows.cov, rows.loc, gate, center, noise, response, wide)
        return found

    def channel(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """E, a and n, each (B, r)."""
        loc, square, own = state
        square, own = torch.maximum(square, self.floor), torch.maximum(own, self.softest)
        mean, slope, variance = excess(loc, square.sqrt(), self.rows.lower, self.rows.upper, self.family)
        slope = slope.clamp(RARE, 1 - RARE)
        noise = (square * (variance / slope.square() - 1)).clamp(min=0)
        return own * (1 / slope - 1), loc - mean / slope, noise
