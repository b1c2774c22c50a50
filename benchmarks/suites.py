"""The suites. Each covers one peer or one kind of work and runs in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """A module of this folder whose ``run(quick)`` yields comparisons and overheads.

    Args:
        title: Heading of its table.
        module: Name of the module.
        packages: Required distributions; their versions go into the lines.
        threads: For the peer and for us.
        reports: Whether it writes result lines and pages of its own.
    """

    title: str
    module: str
    packages: tuple[str, ...] = ()
    threads: int = 1
    reports: bool = False


SUITES = {
    "conservation": Suite("Conservation rows against dense algebra", "conservation"),
    "gaussian-process": Suite("Draws of a Gaussian process that conserve mass", "gaussian_process", ("gpytorch",)),
    "hierarchies": Suite("Hierarchies with variances against dense inverses", "hierarchies"),
    "reconciliation": Suite(
        "Reconciliation against hierarchicalforecast", "reconciliation", ("hierarchicalforecast", "clarabel")
    ),
    "cvxpylayers": Suite(
        "Convex sets against cvxpylayers", "convex_cvxpylayers", ("cvxpylayers", "diffcp", "clarabel", "scs")
    ),
    "moreau": Suite("Convex sets against moreau", "convex_moreau", ("moreau",)),
    "qpth": Suite("Convex sets against qpth", "convex_qpth", ("qpth",)),
    "pinet": Suite("Convex sets against Pi-net", "convex_pinet", ("pinet-hcnn", "jax")),
    "shared-rows": Suite("Shared dense rows against active sets of all rows and OSQP", "shared_rows", ("osqp",)),
    "constrained-steps": Suite("Training steps with general inequalities", "constrained_steps"),
    "construction": Suite(
        "Building redundant rows against a pivoted QR and the time allowed", "construction", ("scipy",)
    ),
    "phases": Suite("Values that are 0 or not small against SCIP", "phases", ("pyscipopt", "cvxpy")),
    "nonlinear": Suite("Nonlinear equalities against the plain iteration and SLSQP", "nonlinear", ("scipy",)),
    "porous-medium": Suite("The porous medium law against its generic form", "porous_medium", ("scipy",)),
    "operators": Suite("Training steps of neural operators", "operators", ("neuraloperator",)),
    "deepvar": Suite("Training steps of DeepVAR on the five hierarchies", "deepvar", ("gluonts", "lightning")),
    "joint": Suite("Correlated laws", "joint"),
    "scores": Suite("Scores against scoringrules", "scores", ("scoringrules",)),
    "growth": Suite("How cost grows", "growth", reports=True),
    "million": Suite("A million series", "million", reports=True),
    "bandwidth": Suite("The distance to the hardware", "bandwidth", reports=True),
}
