"""The L1 ball beyond the registry: data per batch element, gradients in its data, and bad input."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

import probhard as ph

PORTFOLIO = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


def test_radius_and_center_per_batch_element():
    z, center, radius = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0.5, 1.0, 2.0])
    projected = ph.DPPL("orthogonal").project(z, ph.L1Ball(radius, center)).value
    for k in range(3):
        u = cp.Variable(4)
        cp.Problem(
            cp.Minimize(cp.sum_squares(u - z[k].numpy())), [cp.norm1(u - center[k].numpy()) <= float(radius[k])]
        ).solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(projected[k].numpy(), u.value, atol=1e-6)


@pytest.mark.parametrize("joined", [lambda ball: ball, lambda ball: ball & ph.Simplex()])
def test_gradients_in_point_radius_and_center(joined):
    def nearest(z, radius, center):
        return ph.DPPL("orthogonal").project(z, joined(ph.L1Ball(radius, center))).value

    z, radius = torch.tensor([[0.9, -0.4, 0.3, 0.5]]), torch.tensor([0.31])
    inputs = tuple(x.clone().requires_grad_() for x in (z, radius, PORTFOLIO[None]))
    assert gradcheck(nearest, inputs, atol=1e-5, rtol=1e-4)


def test_every_draw_of_a_portfolio_stays_within_its_turnover():
    law = ph.LocationScale(PORTFOLIO.expand(5, 4), ph.Diagonal(torch.full((5, 4), 0.09)))
    constraint = ph.Simplex() & ph.L1Ball(0.25, PORTFOLIO)
    for metric in ("oblique", "orthogonal"):
        draws = ph.DPPL(metric)(law, constraint).sample((200,))
        assert float((draws.sum(-1) - 1).abs().max()) < 1e-12
        assert float(draws.min()) >= 0
        assert float((draws - PORTFOLIO).abs().sum(-1).max()) < 0.25 + 1e-9


def test_points_inside_stay_and_a_radius_of_zero_leaves_the_center():
    assert torch.equal(ph.DPPL("orthogonal").project(0.1 * torch.ones(4), ph.L1Ball(1.0)).value, 0.1 * torch.ones(4))
    pinned = ph.DPPL("orthogonal").project(torch.randn(2, 4), ph.L1Ball(0.0, PORTFOLIO)).value
    torch.testing.assert_close(pinned, PORTFOLIO.expand(2, 4))


def test_bad_input_is_named():
    with pytest.raises(ph.InfeasibleError, match="radius of the L1 ball is -1"):
        ph.L1Ball(-1.0)
    with pytest.raises(ph.ParameterError, match="center of the L1 ball"):
        ph.L1Ball(1.0, [0.0, float("nan")])
    with pytest.raises(ph.ShapeError, match="3 variables"):
        ph.DPPL("orthogonal").project(torch.zeros(4), ph.L1Ball(1.0, torch.zeros(3)))
    with pytest.raises(ph.ParameterError, match="per_slice cannot lift a L1Ball"):
        ph.per_slice(ph.L1Ball(1.0), (2, 3))
    assert repr(ph.L1Ball(2.0).to(torch.float32)) == "L1Ball(radius=2)"
