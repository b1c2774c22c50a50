"""One step of the cavity method: moments of the excess over bounds, and the fields of a linear system.

    G = (K + E)^-1,     x_j = a_j + (G (m - a))_j / G_jj,     t_j^2 = (G (V + N) G)_jj / G_jj^2 - n_j,
    k_j = 1 / G_jj - E_j.

``laws.mean_field`` says what the letters mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.laws.family import Family
from probhard.laws.tails import FARTHEST, partial_moments, unit_variance

RAISED = 1e-13


def excess(loc: Tensor, scale: Tensor, lower: Tensor, upper: Tensor, family: Family) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of ``r = X - clip(X)`` for X = loc + scale * unit.

    Args:
        loc: (*batch, r), as all arguments.
        scale: Positive.
        lower: Lower bounds.
        upper: Upper bounds.
        family: Unit law.

    Returns:
        ``E r``, the slope ``Cov(r, X) / Var X``, and ``Var r`` in units of ``Var X``.
    """
    unit, bounds = unit_variance(family), torch.stack([lower, upper])
    finite = ~bounds.isinf()
    gap = torch.where(finite, bounds, loc) - loc
    t = (torch.stack([gap[0], -gap[1]]) / scale).clamp(-FARTHEST, FARTHEST)
    out = t > 0
    size = torch.where(out, t, -t)  # unlike abs, with a gradient at 0
    first, second = (torch.where(finite, part, 0.0) for part in partial_moments(family, -size)[1:])
    mean = torch.where(out, t + first, first)  # E (t - T)+
    part = (second + size * first) / unit
    slope = torch.where(out, 1 - part, part)
    spread = torch.where(out, unit - second - 2 * size * first, second) - first.square()
    variance = (spread[0] + spread[1] + 2 * mean[0] * mean[1]) / unit
    return scale * (mean[1] - mean[0]), slope[0] + slope[1], variance


def inverse(gram: Tensor, gate: Tensor) -> Tensor:
    """``(K + E)^-1``; where rounding makes the matrix singular, its diagonal is raised by ``RAISED`` of its size."""
    matrix = gram + torch.diag_embed(gate)
    root, failed = torch.linalg.cholesky_ex(matrix)
    if checking() and bool(failed.any()):
        raised = RAISED * matrix.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True) * (failed > 0).unsqueeze(-1)
        root, failed = torch.linalg.cholesky_ex(matrix + torch.diag_embed(raised.expand_as(gate)))
    good = (failed == 0)[..., None, None]
    unit = torch.eye(root.shape[-1]).to(root)
    return torch.where(good, torch.cholesky_inverse(torch.where(good, root, unit)), torch.inf)


class Inverse(torch.autograd.Function):
    """``(K + E)^-1``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gram: Tensor, gate: Tensor) -> Tensor:
        return inverse(gram, gate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (response,) = ctx.saved_tensors
        to_gram = -(response @ gradient @ response)
        return to_gram, to_gram.diagonal(dim1=-2, dim2=-1)


class Cavity(torch.autograd.Function):
    """Means, squared scales and stiffnesses (3, B, r) of the fields, from K, V, m, E, a and n."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Tensor) -> Tensor:
        _, _, loc, gate, center, noise, response, wide = inputs
        own = response.diagonal(dim1=-2, dim2=-1)
        solved = times(response, loc - center)
        square = wide.diagonal(dim1=-2, dim2=-1) / own.square() - noise
        return torch.stack([center + solved / own, square, 1 / own - gate])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2], inputs[4], *inputs[6:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        loc, center, response, wide = ctx.saved_tensors
        of_loc, of_square, of_own = gradient
        own, spread = (x.diagonal(dim1=-2, dim2=-1) for x in (response, wide))
        solved = times(response, loc - center)
        to_solved, to_spread = of_loc / own, of_square / own.square()
        to_own = -(of_loc * solved + of_own + 2 * of_square * spread / own) / own.square()
        pulled = times(response, to_solved)
        squares = response.square()
        to_gate = -of_own - times(squares, to_own) - pulled * solved - 2 * times(response * wide, to_spread)
        to_noise = times(squares, to_spread) - of_square
        to_gram = to_cov = None
        if ctx.needs_input_grad[0]:
            left = (response * to_own.unsqueeze(-2)) @ response + 2 * (response * to_spread.unsqueeze(-2)) @ wide
            to_gram = -(left + pulled.unsqueeze(-1) * solved.unsqueeze(-2))
            to_gram = 0.5 * (to_gram + to_gram.mT)
        if ctx.needs_input_grad[1]:
            to_cov = response * to_spread.unsqueeze(-2) @ response
        return to_gram, to_cov, pulled, to_gate, of_loc - pulled, to_noise, None, None


def times(matrix: Tensor, x: Tensor) -> Tensor:
    """``M x``, (B, r), for M (B, r, r) and x (B, r)."""
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)
