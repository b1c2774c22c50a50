"""The tracer's solver against an exact solution, a finer grid and its conservation law."""

from __future__ import annotations

import math

import pytest
import torch

import probhard as ph
from probhard.pde.tracer import Flow, Tracer


def test_a_shear_flow_tilts_a_wave() -> None:
    tracer = Tracer(points=48, time=1.0, diffusivity=1e-12)
    x, y = tracer.axis[:, None], tracer.axis
    flow = Flow(torch.cos(2 * x).expand(1, 48, 48), -torch.cos(y).expand(1, 48, 48))  # v = (sin y, 0)
    torch.testing.assert_close(tracer.solution(flow)[0], torch.cos(2 * (x - torch.sin(y))), rtol=0, atol=1e-5)


def test_a_flow_along_the_waves_leaves_diffusion_alone() -> None:
    tracer = Tracer(points=16, time=2.0, diffusivity=0.1)
    x, y = tracer.axis[:, None], tracer.axis
    flow = Flow(torch.cos(3 * y).expand(1, 16, 16), -torch.cos(y).expand(1, 16, 16))
    torch.testing.assert_close(tracer.solution(flow)[0], math.exp(-0.1 * 9 * 2) * torch.cos(3 * y) + 0 * x)


def test_fields_conserve_their_mass_and_velocities_have_no_divergence() -> None:
    tracer = Tracer(points=32)
    flow = tracer.draw(3, torch.Generator().manual_seed(0))
    field, mass = tracer.solution(flow), tracer.mass(flow)
    assert float((field.mean((-2, -1)) - mass).abs().max()) < 1e-14
    assert float(tracer.constraint(mass).violation(field.flatten(-2)).max()) < 1e-12
    first, second = (torch.fft.rfft2(part) for part in tracer.velocity(flow.stream))
    assert float((tracer.waves[0] * first + tracer.waves[1] * second).abs().max()) < 1e-9
    speed = torch.stack(tracer.velocity(flow.stream)).square().sum(0).mean((-2, -1)).sqrt()
    torch.testing.assert_close(speed, torch.full((3,), tracer.speed, dtype=torch.float64))
    assert tracer.inputs(flow).shape == (3, 3, 32, 32)


def test_a_finer_grid_gives_the_same_field() -> None:
    coarse, fine = (Tracer(points=points, diffusivity=0.05) for points in (48, 96))
    flows = [tracer.draw(1, torch.Generator().manual_seed(1)) for tracer in (coarse, fine)]
    expected = fine.solution(flows[1])[:, ::2, ::2]
    torch.testing.assert_close(coarse.solution(flows[0]), expected, rtol=0, atol=2e-3)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ph.ParameterError, match="even points"):
        Tracer(points=9)
