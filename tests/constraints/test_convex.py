"""Convex profiles beyond the registry: gradients, short profiles, the grid, draws and bad input."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import probhard as ph

GRID = torch.tensor([0.0, 0.1, 0.4, 0.5, 0.9], dtype=torch.float64)


def test_gradients_under_two_metrics():
    z = torch.tensor([[0.3, 0.9, -0.4, 0.7, 0.1], [1.0, -0.2, 0.6, 0.5, 0.4]], requires_grad=True)
    stddev = torch.tensor([0.3, 0.8, 0.5, 1.1, 0.7], requires_grad=True)
    layer = ph.DPPL()

    def nearest(z, stddev):
        law = ph.LocationScale(z, ph.Diagonal.from_stddev(stddev.expand_as(z)))
        return layer.project(z, ph.Convex("up", GRID), dist=law).value

    assert gradcheck(nearest, (z, stddev), atol=1e-5, rtol=1e-4)


def test_a_line_stays_and_its_bulge_is_removed():
    line = 2.0 * GRID - 1.0
    layer = ph.DPPL("orthogonal")
    torch.testing.assert_close(layer.project(line, ph.Convex("up", GRID)).value, line)
    bulge = line - GRID * (GRID - 0.9)  # concave: the nearest convex profile is the least-squares line
    design = torch.stack([torch.ones(5), GRID], -1)
    fitted = design @ torch.linalg.lstsq(design, bulge.unsqueeze(-1)).solution
    torch.testing.assert_close(layer.project(bulge, ph.Convex("up", GRID)).value, fitted.squeeze(-1))
    torch.testing.assert_close(layer.project(bulge, ph.Convex("down", GRID)).value, bulge)


def test_draws_and_moments_of_a_law():
    law = ph.LocationScale(torch.zeros(3, 5), ph.Diagonal(torch.ones(3, 5)))
    constraint = ph.Convex("up", GRID)
    projected = ph.DPPL()(law, constraint)
    assert float(constraint.violation(projected.sample((50,))).max()) < 1e-12
    assert bool((projected.variance > 0).all())
    assert ph.DPPL()(ph.LocationScale(torch.zeros(0, 5), ph.Diagonal(torch.ones(0, 5))), constraint).mean.shape == (
        0,
        5,
    )


@pytest.mark.parametrize("n", [1, 2])
def test_short_profiles_are_convex(n):
    z = torch.randn(4, n)
    assert torch.equal(ph.DPPL("orthogonal").project(z, ph.Convex()).value, z)


def test_bad_input_is_named():
    with pytest.raises(ph.ParameterError, match="direction"):
        ph.Convex("sideways")
    with pytest.raises(ph.ParameterError, match="does not increase"):
        ph.Convex("up", [0.0, 1.0, 1.0])
    with pytest.raises(ph.ShapeError, match=r"shape \(1, 3\)"):
        ph.Convex("up", [[0.0, 1.0, 2.0]])
    with pytest.raises(ph.ParameterError, match="slices=0"):
        ph.Convex(slices=0)
    with pytest.raises(ph.ShapeError, match="5 variables"):
        ph.DPPL("orthogonal").project(torch.zeros(4), ph.Convex("up", GRID))
    assert repr(ph.per_slice(ph.Convex("down", GRID), (2, 5))) == "Convex('down', grid of 5 places, slices=2)"
