"""What an error says of a nonlinear projection that failed: kink, rank, or no feasible point."""

from __future__ import annotations

import pytest
import torch

import probhard as ph


def single(fn) -> ph.NonlinearEquality:
    return ph.NonlinearEquality(lambda u: fn(u).unsqueeze(-1))


def failed(constraint, z, match, **options) -> None:
    with pytest.raises(ph.ConvergenceError, match=match):
        ph.DPPL("orthogonal", **options).project(torch.tensor(z), constraint)


NOWHERE = single(lambda u: u.square().sum(-1) + 1)


@pytest.mark.parametrize("how", ["retry", "raise", "resample"])
def test_no_feasible_point(how):
    failed(NOWHERE, [[1.0, 2.0]], "no feasible point was found", on_failure=how)
    failed(NOWHERE & ph.NonNegative(), [[1.0, 2.0]], "no feasible point was found", on_failure=how)
    both = single(lambda u: u.square().sum(-1) - 1) & single(lambda u: u.square().sum(-1) - 4)
    failed(both, [[1.0, 2.0]], "no feasible point was found", on_failure=how)


def test_data_of_the_failed_point_decide():
    sphere = ph.NonlinearEquality(lambda u, r: u.square().sum(-1, keepdim=True) - r, (torch.tensor([[1.0], [-1.0]]),))
    failed(sphere, [[1.0, 2.0], [1.0, 2.0]], "1 of 2 points .* Failed: 1. Point 1 .* no feasible", on_failure="raise")


def test_kinks():
    flat = single(lambda u: torch.maximum(u[..., 0], u[..., 1]) - 1)
    failed(flat, [[2.0, 2.1]], "kink at a feasible point")
    failed(
        single(lambda u: u[..., 0].abs() + 0.5 + 0 * u[..., 1]),
        [[1.0, 1.0]],
        r"(kink at a point where|out of steps at) .h. (is|=) 0.5",
    )  # on the kink, or near it


def test_a_set_without_a_tangent():
    touching = ph.NonlinearEquality(lambda u: torch.stack([u[..., 0] ** 2 - u[..., 1], u[..., 1]], -1))
    failed(touching, [[1.0, -1.0]], "rank-deficient at the point that was reached: rank 1 of 2")


def test_rows_of_very_different_sizes_are_regular():
    tip = ph.NonlinearEquality(lambda u: torch.stack([u[..., 0] ** 2 - u[..., 1] ** 3, u[..., 1]], -1))
    z = torch.tensor([[1.0, -1.0]], requires_grad=True)
    solution = ph.DPPL("orthogonal").project(z, tip)
    assert solution.value.abs().max() <= 1e-12  # the set is one point
    (gradient,) = torch.autograd.grad(solution.value.sum(), z)
    assert gradient.abs().max() <= 1e-9


def test_smooth_pieces_of_functions_with_kinks_are_solved():
    octagon = single(lambda u: u.abs().sum(-1) - 1)
    z = torch.tensor([[2.0, 1.5], [0.4, 0.3], [-1.0, 0.9]])
    solution = ph.DPPL("orthogonal").project(z, octagon)
    assert solution.stats.converged.all()
    torch.testing.assert_close(solution.value, z.sign() * (z.abs() + (1 - z.abs().sum(-1, keepdim=True)) / 2))
