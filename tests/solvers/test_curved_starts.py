"""Curved equalities whose steps once failed, against roots of one variable: wide weights, and sets in two pieces."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import brentq

import probhard as ph


def sphere(u: torch.Tensor) -> torch.Tensor:
    """``|u|^2 = 1``."""
    return u.square().sum(-1, keepdim=True) - 1


def test_a_sphere_under_weights_of_many_decades():
    """Outside, ``u = z / (1 + l w)`` with the root l of ``|u| = 1``; it is bracketed by logarithms of l."""
    z = np.array([3.0, -2.0, 5.0, 1.5, 2.0])
    for decades in (4, 8, 12):
        w = 10.0 ** np.linspace(-decades / 2, decades / 2, 5)
        root = brentq(lambda log, w=w: np.square(z / (1 + 10**log * w)).sum() - 1, -20, 20, xtol=1e-15)
        law = ph.LocationScale(torch.from_numpy(z), ph.Diagonal(torch.from_numpy(w)))
        solution = ph.DPPL("oblique").project(law.loc, ph.NonlinearEquality(sphere), law)
        np.testing.assert_allclose(solution.value.numpy(), z / (1 + 10**root * w), atol=1e-9)


def test_a_root_behind_the_nearest_vertex_is_found():
    """Of both roots of the last variable, only the far one lies within the bounds."""
    lower, upper = torch.tensor([0.6, -2.0]), torch.tensor([0.6, 0.5])
    both = ph.NonlinearEquality(sphere) & ph.Box(lower, upper)
    solution = ph.DPPL("orthogonal").project(torch.tensor([[0.5, 0.45], [0.6, 2.0]], dtype=torch.float64), both)
    torch.testing.assert_close(solution.value, torch.tensor([[0.6, -0.8]] * 2, dtype=torch.float64))


def test_variables_at_bounds_stay_there_under_strong_multipliers():
    """The free variable with a tiny weight has to go all the way; the held one must not give way."""
    both = ph.NonlinearEquality(sphere) & ph.Box(torch.tensor([0.6, -9.0, -9.0]), torch.tensor([9.0, 9.0, 9.0]))
    law = ph.LocationScale(
        torch.tensor([-3.0, 0.0, 50.0]).double(), ph.Diagonal(torch.tensor([1e3, 1e3, 1e-6]).double())
    )
    solution = ph.DPPL("oblique").project(law.loc, both, law)
    torch.testing.assert_close(solution.value, torch.tensor([0.6, 0.0, 0.8]).double())
