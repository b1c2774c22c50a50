"""Module paths of the previous release, which work for one more release with a DeprecationWarning.

``MOVED`` lists modules by their old and new path. Where one new path is given, the old name is that very module; where
several are given, it is a module with the names of all of them. ``NOW_PACKAGES`` lists modules that have become
packages of the same path; names that the package itself lacks are looked up in the module that is given.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MOVED: dict[str, str | tuple[str, ...]] = {
    "probhard.censored": "probhard.laws.marginals",
    "probhard.covariance": "probhard.laws.covariance",
    "probhard.demo": "probhard.pde.demo",
    "probhard.distribution": "probhard.laws.distribution",
    "probhard.family": ("probhard.laws.family", "probhard.laws.student_t"),
    "probhard.fields": ("probhard.io.fields", "probhard.io.cells"),
    "probhard.files": "probhard._util.atomic",
    "probhard.jit": "probhard._util.jit",
    "probhard.memory": "probhard._util.memory",
    "probhard.partial": "probhard.laws.tails",
    "probhard.projected": "probhard.projection.projected",
    "probhard.recent": "probhard._util.lru",
    "probhard.settings": "probhard.io.settings",
    "probhard.spec": ("probhard.io.spec", "probhard.io.data"),
    "probhard.special": "probhard.laws.special",
    "probhard.constraints.curved": ("probhard.constraints.ball", "probhard.constraints.nonlinear"),
    "probhard.constraints.linear": "probhard.constraints.equality",
    "probhard.constraints.polyhedron": (
        "probhard.constraints.inequality",
        "probhard.constraints.monotone",
        "probhard.constraints.simplex",
        "probhard.constraints.shapes",
    ),
    "probhard.constraints.program": "probhard.constraints.convex_program",
    "probhard.forecasting.backtest": "probhard.forecasting.report.backtest",
    "probhard.forecasting.baselines": "probhard.forecasting.models.baselines",
    "probhard.forecasting.classical": "probhard.forecasting.models.classical",
    "probhard.forecasting.datasets": "probhard.forecasting.data.datasets",
    "probhard.forecasting.distributed": "probhard.forecasting.reconciliation.distributed",
    "probhard.forecasting.estimator": "probhard.forecasting.models.estimator",
    "probhard.forecasting.evaluation": "probhard.forecasting.report.evaluation",
    "probhard.forecasting.frames": "probhard.forecasting.data.frames",
    "probhard.forecasting.given": "probhard.forecasting.reconciliation.given",
    "probhard.forecasting.network": "probhard.forecasting.models.network",
    "probhard.forecasting.nixtla": "probhard.forecasting.reconciliation.nixtla",
    "probhard.forecasting.pool": "probhard.forecasting.models.pool",
    "probhard.forecasting.predictor": "probhard.forecasting.models.predictor",
    "probhard.forecasting.seasons": "probhard.forecasting.data.seasons",
    "probhard.forecasting.spread": "probhard.forecasting.models.spread",
    "probhard.forecasting.stamps": "probhard.forecasting.data.stamps",
    "probhard.forecasting.storage": "probhard.forecasting.models.storage",
    "probhard.forecasting.temporal": "probhard.forecasting.reconciliation.temporal",
    "probhard.forecasting.training": "probhard.forecasting.models.training",
    "probhard.forecasting.windows": "probhard.forecasting.models.windows",
    "probhard.projectors": ("probhard.projection", "probhard.projection.base", "probhard.projection.dispatch"),
    "probhard.projectors.ball": "probhard.projection.ball",
    "probhard.projectors.base": "probhard.projection.base",
    "probhard.projectors.choice": "probhard.projection.dispatch",
    "probhard.projectors.coupled": "probhard.projection.coupled",
    "probhard.projectors.curved": "probhard.projection.curved",
    "probhard.projectors.diagnosis": "probhard.projection.diagnosis",
    "probhard.projectors.diminishing": "probhard.projection.diminishing",
    "probhard.projectors.faces": "probhard.projection.polyhedral",
    "probhard.projectors.gathered": "probhard.projection.parts",
    "probhard.projectors.groups": "probhard.tangent.profiles",
    "probhard.projectors.lifting": "probhard.projection.lifting",
    "probhard.projectors.linear": "probhard.projection.linear",
    "probhard.projectors.nonlinear": "probhard.projection.nonlinear",
    "probhard.projectors.pooled": "probhard.projection.profiles",
    "probhard.projectors.program": "probhard.projection.convex_program",
    "probhard.solvers.capacity": "probhard.solvers.profiles.capacity",
    "probhard.solvers.duals": "probhard.solvers.profiles.duals",
    "probhard.solvers.interior": "probhard.solvers.interior_point",
    "probhard.solvers.newton": "probhard.solvers.sqp",
    "probhard.solvers.phases": "probhard.solvers.profiles.phases",
    "probhard.solvers.pooling": "probhard.solvers.profiles.pooling",
    "probhard.solvers.search": "probhard.solvers.single_row",
    "probhard.solvers.sequential": "probhard.solvers.sqp_active",
    "probhard.structure": ("probhard.rows",),
    "probhard.structure.base": ("probhard.rows.base", "probhard.rows.maps", "probhard._util.tensors"),
    "probhard.structure.blocks": "probhard.rows.blocks",
    "probhard.structure.crossed": "probhard.rows.crossed",
    "probhard.structure.dense": "probhard.rows.dense",
    "probhard.structure.disjoint": "probhard.rows.disjoint",
    "probhard.structure.elimination": "probhard.rows.elimination",
    "probhard.structure.fixed_sweeps": "probhard.rows._kernels.fixed_sweeps",
    "probhard.structure.kernels": "probhard.rows._kernels.sparse",
    "probhard.structure.local": "probhard.rows.children",
    "probhard.structure.moments": "probhard.rows._kernels.moments",
    "probhard.structure.pattern": "probhard.rows.pattern",
    "probhard.structure.presolve": "probhard.rows.presolve",
    "probhard.structure.slices": "probhard.rows._kernels.slices",
    "probhard.structure.sparse": "probhard.rows.sparse",
    "probhard.structure.sweeps": "probhard.rows._kernels.sweeps",
    "probhard.structure.system": "probhard.rows.system",
    "probhard.structure.tree": "probhard.rows.tree",
    "probhard.structure.tree_kernels": "probhard.rows._kernels.tree",
    "probhard.tangent.diagonal": ("probhard.tangent.linear", "probhard.tangent.dispatch", "probhard.laws.covariance"),
    "probhard.tangent.projected": "probhard.tangent.covariance",
}
NOW_PACKAGES = {
    "probhard.forecasting.data": "probhard.forecasting.data.table",
    "probhard.forecasting.reconciliation": "probhard.forecasting.reconciliation.reconcile",
    "probhard.forecasting.report": "probhard.forecasting.report.page",
    "probhard.projection": "probhard.projection.layer",
    "probhard.solvers.profiles": "probhard.solvers.profiles.unbounded",
}


class _Finder(MetaPathFinder, Loader):
    """Finds modules by their old paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that has moved or become a package; None for all others."""
        if fullname in MOVED:
            _warn(fullname, MOVED[fullname], stacklevel=3)
            return ModuleSpec(fullname, self)
        if fullname not in NOW_PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = _with_former_names(spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[assignment, method-assign]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module under its new path; its own spec is kept aside, because the import system replaces it."""
        module = _new_module(spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back; its code has run already."""
        assert module.__spec__ is not None
        if module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make ``import`` find old paths, before folders are searched: an alias of a package must not load files twice."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def former_module(old: str) -> ModuleType:
    """The module of an old path that is used as an attribute of its parent, with the same warning."""
    _warn(old, MOVED[old], stacklevel=4)
    return sys.modules.setdefault(old, _new_module(old))


def _new_module(old: str) -> ModuleType:
    new = MOVED[old]
    if isinstance(new, str):
        return import_module(new)
    joined = ModuleType(old, f"Names of {', '.join(new)}.")
    joined.__path__ = []  # its submodules are found by the table alone
    for module in map(import_module, new):
        public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        vars(joined).update(public)
    return joined


def _with_former_names(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Run a package's code, then let names that it lacks be looked up in the module that it was."""

    def exec_module(package: ModuleType) -> None:
        execute(package)
        former, own = NOW_PACKAGES[package.__name__], getattr(package, "__getattr__", None)

        def former_name(name: str) -> Any:
            if own is not None:
                with suppress(AttributeError):
                    return own(name)
            if not name.startswith("_") and find_spec(f"{package.__name__}.{name}") is None:
                value = getattr(import_module(former), name, _MISSING)
                if value is not _MISSING:
                    _warn(f"{package.__name__}.{name}", f"{former}.{name}", stacklevel=3)
                    return value
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")

        package.__getattr__ = former_name  # type: ignore[method-assign]

    return exec_module


def _warn(old: str, new: str | tuple[str, ...], stacklevel: int) -> None:
    """Warn at the caller's line; ``warnings`` does not count the frames of the import system."""
    where = new if isinstance(new, str) else " and ".join(new)
    warnings.warn(
        f"{old} has moved to {where}. The old path will stop working in the next release. Import the new one.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


_MISSING = object()
