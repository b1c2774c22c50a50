"""Second-order cones beyond the registry: closed form, data per batch element, gradients, draws and bad input."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import probhard as ph


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_standard_cone_in_closed_form():
    z = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 4.0], [-9.0, 3.0, 4.0]])  # inside, beside, below
    value = ph.DPPL("orthogonal").project(z, ph.SecondOrderCone()).value
    torch.testing.assert_close(value, torch.tensor([[2.0, 1.0, 0.0], [2.5, 1.5, 2.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("metric", ["orthogonal", "oblique"])
def test_the_iterated_cone_is_the_closed_form(metric):
    z = 2 * normal(1, 5, 4)
    rows = torch.eye(4)
    law = ph.LocationScale(z, ph.Diagonal(torch.rand(5, 4) + 0.5))
    layer = ph.DPPL(metric)
    one = layer.project(z, ph.SecondOrderCone(), dist=law)
    two = layer.project(z, ph.SecondOrderCone(rows[1:], None, rows[0]), dist=law)
    torch.testing.assert_close(one.value, two.value, rtol=0, atol=1e-10)
    torch.testing.assert_close(one.tangent.apply(z.flip(-1)), two.tangent.apply(z.flip(-1)), rtol=0, atol=1e-7)


def test_gradients_in_the_point_and_all_data():
    def nearest(z, stddev, B, c, a, d):
        law = ph.LocationScale(z, ph.Diagonal.from_stddev(stddev.expand_as(z)))
        return ph.DPPL().project(z, ph.SecondOrderCone(B, c, a, d), dist=law).value

    data = (
        3 * normal(2, 2, 3),
        torch.tensor([0.5, 1.0, 0.8]),
        normal(3, 2, 3),
        normal(4, 2),
        normal(5, 3),
        torch.ones(2),
    )
    assert gradcheck(nearest, tuple(x.clone().requires_grad_() for x in data), atol=1e-4, rtol=1e-4)


def test_draws_with_a_cone_per_batch_element():
    cone = ph.SecondOrderCone(normal(6, 2, 2, 4), normal(7, 2), normal(8, 4), torch.tensor([1.0, 2.0]))
    law = ph.LocationScale(normal(9, 2, 4), ph.Diagonal(torch.ones(2, 4)))
    projected = ph.DPPL(draws=10)(law, cone)
    assert float(cone.violation(projected.sample((20,))).max()) < 1e-10
    assert bool((projected.variance > 0).all())
    assert ph.DPPL("orthogonal").project(torch.zeros(0, 4), ph.SecondOrderCone()).value.shape == (0, 4)


def test_bad_input_is_named():
    with pytest.raises(ph.ParameterError, match="no B"):
        ph.SecondOrderCone(d=1.0)
    with pytest.raises(ph.ShapeError, match="c of the cone"):
        ph.SecondOrderCone(torch.eye(3), torch.zeros(2))
    with pytest.raises(ph.ShapeError, match="B of the cone"):
        ph.SecondOrderCone(torch.zeros(3))
    with pytest.raises(ph.ParameterError, match="a of the cone"):
        ph.SecondOrderCone(torch.eye(2), a=[0.0, float("nan")])
    with pytest.raises(ph.ShapeError, match="1 variables"):
        ph.DPPL("orthogonal").project(torch.zeros(1), ph.SecondOrderCone())
