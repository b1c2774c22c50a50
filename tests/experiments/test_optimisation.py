"""The optimisation table: recipes of data, power flow as a constraint, page and figure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.optimisation import peers, programs
from experiments.optimisation.power_loads import drawn

FIRST_QUADRATIC = (0.2946650026871097, 0.5305867556052941)  # numpy's legacy generator with the seed 17


def test_dc3_problem_follows_the_published_draws() -> None:
    program = programs.dc3()
    np.testing.assert_allclose(program.quadratic[:2], FIRST_QUADRATIC, rtol=1e-12)
    random = np.random.RandomState(17)
    random.random_sample(200)
    np.testing.assert_array_equal(program.equal, random.normal(size=(50, 100)))
    training, validation, test = program.split()
    assert (len(training), len(validation), len(test)) == (8334, 833, 833)
    torch.testing.assert_close(torch.cat([training, validation, test]).numpy(), program.contexts)
    least = torch.from_numpy(np.linalg.pinv(program.equal)) @ test[0]
    assert program.violations(test[:1], least.unsqueeze(0)) < (1e-12, 1e-12)
    assert programs.dc3(sine=True).equal is not program.equal
    torch.testing.assert_close(programs.dc3(sine=True).contexts, program.contexts)


def test_optimum_satisfies_its_conditions_and_the_published_mean() -> None:
    program = programs.dc3()
    _, _, test = program.split()
    y = peers.optima(program, test[:20])
    assert max(program.violations(test[:20], y)) < 1e-9
    gradient = torch.from_numpy(program.quadratic) * y + torch.from_numpy(program.linear)
    tight = ((y @ torch.from_numpy(program.unequal).mT - torch.from_numpy(program.most)).abs() < 1e-8).double()
    for slope, active in zip(gradient, tight):  # the gradient lies in the span of the active rows
        rows = np.vstack([program.equal, program.unequal[active.numpy() > 0]])
        assert np.abs(slope.numpy() - rows.T @ np.linalg.lstsq(rows.T, slope.numpy(), rcond=None)[0]).max() < 1e-6


def test_local_optimum_is_no_worse_than_its_start() -> None:
    program = programs.dc3(sine=True)
    _, _, test = program.split()
    convex = peers.osqp_updated(program, test[:3], **peers.TIGHT)()
    local = peers.optima(program, test[:3])
    assert (program.objective(local) < program.objective(convex)).all()
    assert max(program.violations(test[:3], local)) < 1e-9


def test_loads_follow_the_recipe() -> None:
    case = {"bus": np.zeros((4, 13))}
    case["bus"][:, 2], case["bus"][:, 3] = [0.0, 10.0, 20.0, 30.0], [5.0, 4.0, -3.0, 0.0]
    stream = drawn(case)
    draws = [next(stream) for _ in range(4000)]
    active, reactive = (np.array([draw[k] for draw in draws]) for k in (0, 1))
    factor = active[:, 1:] / case["bus"][1:, 2]
    assert (np.abs(factor - 1) < 0.7).all()
    assert (active[:, 0] == 0).all()
    assert (reactive[:, 0] == 5).all()
    assert (reactive[:, 3] == 0).all()
    share = reactive[:, 1:3] / active[:, 1:3]
    assert (share[:, 0] >= 0).all()
    assert (share[:, 1] <= 0).all()
    assert np.abs(share).max() <= np.tan(np.arccos(0.8)) + 1e-12
    correlation = np.corrcoef(factor.T)[0, 1]
    assert 0.3 < correlation < 0.5  # 0.5 before truncation
    again = drawn(case)
    np.testing.assert_array_equal(next(again)[0], draws[0][0])


@pytest.fixture(params=["case9", "case30", "case57"])
def power(request: pytest.FixtureRequest):
    pytest.importorskip("pypower")
    from experiments.optimisation.power_case import Network, pypower_case

    return Network.of(request.param), pypower_case(request.param)


def test_power_flow_agrees_with_pypower(power) -> None:
    network, case = power
    from pypower.api import ppoption, runpf

    found, success = runpf(case, ppoption(VERBOSE=0, OUT_ALL=0, PF_TOL=1e-12))
    assert success
    bus, gen = found["bus"], found["gen"]
    point = network.point(np.concatenate([gen[:, 1], gen[:, 2], bus[:, 7], np.deg2rad(bus[:, 8])]))
    assert float(network.equations(network.load).residual(point).abs().max()) < 1e-9
    flow = np.concatenate([np.hypot(*found["branch"][:, k : k + 2].T) for k in (13, 15)]) / network.base
    if network.lines is not None:
        excess = (flow / network.lines.rate.numpy()) ** 2 - 1
        np.testing.assert_allclose(network.lines.excess(point).numpy(), excess, atol=1e-9)
    else:
        assert network.name == "case57"  # its rates are none in effect


def test_jacobians_of_power_flow_agree_with_differences(power) -> None:
    network, _ = power
    generator = torch.Generator().manual_seed(0)
    u = network.guess + 0.1 * torch.randn(2, network.variables, generator=generator, dtype=torch.float64)
    equations = network.equations(network.load)
    _assert_derivative(equations.residual, equations.jacobian(u), u)
    h, rows = equations.linearised(u)
    torch.testing.assert_close(h, equations.residual(u))
    torch.testing.assert_close(rows.dense(), equations.jacobian(u))
    if network.lines is not None:
        _assert_derivative(network.lines.excess, network.lines.jacobian(u), u)


def _assert_derivative(function, jacobian: torch.Tensor, u: torch.Tensor) -> None:
    step = 1e-6
    unit = torch.eye(u.shape[-1], dtype=torch.float64)
    slopes = [(function(u + step * e) - function(u - step * e)) / (2 * step) for e in unit]
    torch.testing.assert_close(torch.stack(slopes, -1), jacobian, atol=1e-6, rtol=1e-6)


def test_power_flow_is_projected_on_its_constraint(power) -> None:
    import probhard as ph

    network, _ = power
    generator = torch.Generator().manual_seed(1)
    inside = network.guess.clamp(network.lower + 1e-3, network.upper - 1e-3)
    z = inside + 0.003 * torch.randn(3, network.variables, generator=generator, dtype=torch.float64)
    constraint = network.equations(network.load) & network.box
    solution = ph.DPPL("orthogonal").project(z, constraint)
    assert bool(solution.stats.converged.all())
    assert float(constraint.violation(solution.value).max()) < 1e-9
    assert network.cost(solution.value).shape == (3,)


def test_a_power_network_is_run_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("pypower")
    from probhard.cli import main

    arguments = ["bench", "optimisation", "--quick", "--problems", "case9", "--output", str(tmp_path)]
    assert main(arguments) == 0
    folder = tmp_path / "quick"
    lines = {line["way"]: line for line in map(json.loads, (folder / "optimisation.jsonl").read_text().splitlines())}
    assert lines["probhard"]["equality"] < 1e-9
    assert lines["probhard"]["inequality"] < 1e-9
    assert lines["the network alone"]["equality"] > 1e-3
    assert lines["PYPOWER"]["gap"] == pytest.approx(0, abs=1e-6)
    page = (folder / "optimisation.md").read_text()
    assert "| case9 | PYPOWER |" in page
    assert "## Quadratic programs" in page
    assert (folder / "optimisation.png").stat().st_size > 5_000
    saved = (folder / "optimisation.jsonl").read_bytes()
    assert main(arguments) == 0  # what is done is not run again
    assert (folder / "optimisation.jsonl").read_bytes() == saved
    assert "Written" in capsys.readouterr().out


def test_unknown_cases_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from probhard.cli import main

    assert main(["bench", "optimisation", "--problems", "foo", "--output", str(tmp_path)]) != 0
    assert "problem='foo'" in capsys.readouterr().err
