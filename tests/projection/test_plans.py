"""Plans of constraints: kept while the data stay the same, made anew when a tensor is changed or trained."""

from __future__ import annotations

import pytest
import torch

import probhard as ph

MEAN = torch.tensor([[0.2, 0.9, -0.4, 0.5], [1.5, -1.0, 0.3, 0.1]], dtype=torch.float64)
HIERARCHY = torch.cat([torch.ones(1, 3), torch.eye(3)]).double()


def made(name: str, datum: torch.Tensor) -> ph.Constraint:
    """A constraint with one tensor of data, a number or one for each of two elements."""
    return {
        "bound": lambda: ph.Hierarchy(HIERARCHY) & ph.Box(datum, None),
        "mass": lambda: ph.Conservation(torch.ones(4), datum) & ph.NonNegative(),
        "total": lambda: ph.Simplex(datum),
        "row": lambda: ph.LinearInequality(torch.ones(1, 4), datum.unsqueeze(-1)) & ph.NonNegative(),
        "variation": lambda: ph.TotalVariation(datum) & ph.Box(-1.0, 1.0),
        "radius": lambda: ph.L1Ball(datum),
        "ball": lambda: ph.Ball(datum),
        "function": lambda: ph.NonlinearInequality(lambda u, r: u.square().sum(-1, keepdim=True) - r, (datum,)),
    }[name]()


NAMES = ("bound", "mass", "total", "row", "variation", "radius", "ball", "function")


@pytest.mark.parametrize("name", NAMES)
def test_a_number_changed_in_place_is_noticed(name):
    datum, layer = torch.tensor(0.1), ph.DPPL("orthogonal")
    constraint = made(name, datum)
    first = layer.project(MEAN, constraint).value
    assert torch.equal(layer.project(MEAN, constraint).value, first)
    datum.fill_(0.2)
    expected = layer.project(MEAN, made(name, torch.tensor(0.2))).value
    torch.testing.assert_close(layer.project(MEAN, constraint).value, expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(first, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_trained_number_gets_its_gradient_in_every_step(name, dtype):
    """The constraint is built once; an optimiser changes its tensor in place."""
    datum, layer = torch.tensor(0.1, dtype=dtype, requires_grad=True), ph.DPPL("orthogonal")
    constraint, mean = made(name, datum), MEAN.to(dtype)
    optimiser = torch.optim.SGD([datum], lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        loss = layer.project(mean, constraint).value.square().sum()
        fresh = datum.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad(layer.project(mean, made(name, fresh)).value.square().sum(), fresh)
        loss.backward()
        torch.testing.assert_close(datum.grad, expected, rtol=1e-4, atol=1e-5)
        optimiser.step()


def test_a_plan_is_found_once():
    constraint = made("bound", torch.tensor(0.0))
    law = (MEAN, torch.ones(2, 4))
    ph.DPPL("oblique")(law, constraint).sample((3,))
    (plan,) = constraint.plans.values()
    ph.DPPL("oblique")(law, constraint).sample((3,))
    assert list(constraint.plans.values()) == [plan]
    assert constraint.plans[4] is plan
    assert constraint.to(torch.float32).plans == {}
