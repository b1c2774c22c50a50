"""``probhard bench``: runs one table at a time, its result lines first and then its page.

A table's code is imported when that table is asked for. Rendering forecasts, times and speed needs neither GluonTS nor
Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from experiments.table import Request
from probhard.errors import check_choice

MODULES = {  # each has a function table(request)
    "pde-linear": "experiments.pde.tables",
    "pde-nonlinear": "experiments.pde.tables",
    "tvd": "experiments.pde.tables",
    "joint-fields": "experiments.pde.joint_tables",
    "out-of-range": "experiments.pde.range_tables",
    "diffusion": "experiments.pde.diffusion_tables",
    "pde-cl": "experiments.pde.cl_tables",
    "forecasting": "experiments.forecasting.tables",
    "forecasting-rolling": "experiments.forecasting.rolling_tables",
    "reconciliation": "experiments.forecasting.reconciliation_tables",
    "joint-forecasting": "experiments.forecasting.joint_tables",
    "conformal": "experiments.conformal.tables",
    "first-order": "experiments.first_order",
    "alarms": "experiments.alarms",
    "optimisation": "experiments.optimisation.tables",
    "timing": "experiments.timing",
    "reliability": "experiments.reliability.tables",
    "multivariate": "experiments.questions.multivariate",
    "multimodal": "experiments.questions.multimodal",
    "sampling": "experiments.questions.sampling",
    "inference": "experiments.questions.inference",
    "metrics": "experiments.questions.metrics",
}
SPEED = "speed"  # has a folder of lines, one file for each suite
TABLES = (*MODULES, SPEED)


def run(request: Request) -> Iterator[str]:
    """Run the experiments behind a table, unless only its page is asked for, and write the page.

    Args:
        request: The options of the command.

    Yields:
        Messages for the user.

    Raises:
        ParameterError: If an option names something unknown, or there is nothing to run or to render.
    """
    check_choice("table", request.table, TABLES)
    if request.table == SPEED:
        yield from _speed(request)
    else:
        yield from import_module(MODULES[request.table]).table(request).make(request)


def _speed(request: Request) -> Iterator[str]:
    """Run the comparisons of ``benchmarks/``, each suite in a process of its own, and write their page."""
    from benchmarks import runner

    folder, suites = request.folder / SPEED, request.names("problems")
    for path in runner.render(folder) if request.render else runner.run(suites, folder, request.quick):
        yield f"Written: {path}"
