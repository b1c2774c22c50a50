"""Mistakes that a new user makes: each has an error in three parts, and nothing is silently dropped or broadcast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bad_input import DOUBLE, Backbone, explained, ones, rejected, zeros
from probhard import (
    DPPL,
    Box,
    ConstrainedModel,
    Diagonal,
    LinearEquality,
    LocationScale,
    NonlinearEquality,
    NonlinearInequality,
    NonNegative,
    ParameterError,
    ShapeError,
    Simplex,
    TotalVariationDiminishing,
    per_slice,
)
from probhard.projection.parts import parts_of

SUM = LinearEquality(ones(1, 5), 1.0)
LIST = [SUM, NonNegative()]


def law(batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(0.1, 1.0, 5 * batch, dtype=DOUBLE).reshape(batch, 5), ones(batch, 5)


def model(constraint) -> ConstrainedModel:
    return ConstrainedModel(Backbone(), constraint)


def loss(target: torch.Tensor, inputs: int = 4) -> torch.Tensor:
    return model(SUM).loss((zeros(inputs, 3), target))


# what is done, the error, and what its message must name
MISTAKES = {
    "and": (lambda: Simplex() and Box(0.0, 1.0), ParameterError, ["Simplex", "'and'", "'&'"]),
    "or": (lambda: SUM or NonNegative(), ParameterError, ["LinearEquality", "'&'"]),
    "not": (lambda: not NonNegative(), ParameterError, ["is None"]),
    "if": (lambda: 1 if SUM & NonNegative() else 0, ParameterError, ["Intersection", "is None"]),
    "a list to a layer": (lambda: DPPL()(law(), LIST), ParameterError, ["DPPL", "list of 2", "a & b"]),
    "a tuple to a layer": (lambda: DPPL()(law(), tuple(LIST)), ParameterError, ["tuple of 2", "a & b"]),
    "a list of points": (lambda: DPPL("orthogonal").project(law()[0], LIST), ParameterError, ["list of 2"]),
    "None to a layer": (lambda: DPPL()(law(), None), ParameterError, ["DPPL", "None"]),
    "a class to a layer": (lambda: DPPL()(law(), Simplex), ParameterError, ["class Simplex", "Simplex(...)"]),
    "a number to a layer": (lambda: DPPL()(law(), 1.0), ParameterError, ["float"]),
    "a list to a model": (lambda: model(LIST), ParameterError, ["ConstrainedModel", "list of 2", "a & b"]),
    "None to a model": (lambda: model(None), ParameterError, ["ConstrainedModel", "None"]),
    "a function that returns a list": (
        lambda: model(lambda x: LIST).forecast(zeros(2, 3)),
        ParameterError,
        ["ConstrainedModel", "list of 2"],
    ),
    "a function without return": (lambda: model(lambda x: None)(zeros(2, 3)), ParameterError, ["None"]),
    "'&' with None": (lambda: SUM & None, ParameterError, ["'&'", "None"]),
    "'&' with a list": (lambda: SUM & [NonNegative()], ParameterError, ["list of 1", "a & b"]),
    "'&' with a class": (lambda: SUM & NonNegative, ParameterError, ["NonNegative(...)"]),
    "slices of None": (lambda: per_slice(None, (2, 5)), ParameterError, ["per_slice", "None"]),
    "slices of a list": (lambda: per_slice(LIST, (2, 5)), ParameterError, ["list of 2"]),
    "one target for a batch": (lambda: loss(zeros(5)), ShapeError, ["(5,)", "(4, 5)", "broadcast"]),
    "one target with a dimension": (lambda: loss(zeros(1, 5)), ShapeError, ["(1, 5)", "(4, 5)"]),
    "as many variables as samples": (lambda: loss(zeros(5), inputs=5), ShapeError, ["(5,)", "(5, 5)"]),
    "targets of another batch": (lambda: loss(zeros(3, 5)), ShapeError, ["(3, 5)", "(4, 5)"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_explained(name):
    rejected(*MISTAKES[name])


ONE_POINT = {
    "a sum over everything": lambda u: (u.square().sum() - 1)[None],
    "a number": lambda u: u.square().sum() - 1,
    "variables by number": lambda u: u[0] * u[1] - 1,
    "stacked": lambda u: torch.stack([u[0] * u[1] - 1, u[0] + u[1]]),
    "three variables": lambda u: torch.stack([u[0] * u[1] - u[2]]),
    "a sum over the points": lambda u: u.square().sum(0, keepdim=True) - 1,
    "a norm of everything": lambda u: (u / u.norm()).square().sum(-1, keepdim=True) - 1.1,
    "a mean over points": lambda u: (u - u.mean(0)).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("kind", [NonlinearEquality, NonlinearInequality])
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", ONE_POINT)
def test_functions_of_one_point_are_recognised(name, batch, kind):
    if (name, batch) == ("a mean over points", 1):
        pytest.skip("for one point it is a function of that point")
    with pytest.raises((ParameterError, ShapeError)) as caught:
        DPPL("orthogonal").project(law(batch)[0], kind(ONE_POINT[name]))
    explained(caught.value, ["*batch", "dim=-1"])


def sphere(u: torch.Tensor) -> torch.Tensor:
    return u.square().sum(-1, keepdim=True) - 1


def test_functions_of_batches_are_not_mistaken():
    radius = torch.tensor([0.5, 1.0, 2.0], dtype=DOUBLE)
    z, stddev = law()
    for function in (sphere, torch.func.vmap(lambda u: (u.square().sum() - 1)[None])):
        value = DPPL("orthogonal").project(z, NonlinearEquality(function)).value
        torch.testing.assert_close(value, z / z.norm(dim=-1, keepdim=True))
    closure = NonlinearEquality(lambda u: u.square().sum(-1, keepdim=True) - radius[:, None] ** 2)
    value = DPPL("orthogonal").project(z, closure).value
    torch.testing.assert_close(value, radius[:, None] * z / z.norm(dim=-1, keepdim=True))
    draws = DPPL("orthogonal")((z, 0.1 * stddev), NonlinearEquality(sphere)).sample((7,))
    torch.testing.assert_close(draws.norm(dim=-1), ones(7, 3))


def test_a_law_may_be_broadcast_to_its_targets():
    class Constant(nn.Module):
        def forward(self, x):
            return zeros(5), ones(5)

    several = ConstrainedModel(Constant(), SUM).loss((zeros(4, 3), zeros(4, 5)))
    one = ConstrainedModel(Constant(), SUM).loss((zeros(4, 3), zeros(5)))
    torch.testing.assert_close(several, 4 * one)


def test_no_decision_depends_on_the_truth_of_a_part():
    diminishing = TotalVariationDiminishing((2, 5))
    assert not parts_of(diminishing, 10).polyhedral
    with pytest.raises(ParameterError, match="joined"):
        DPPL()(LocationScale(zeros(10), Diagonal(ones(10))), diminishing & LinearEquality(ones(1, 10), 1.0))
