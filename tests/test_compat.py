"""Old module paths work for one release, and say where the module is now."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module

import pytest

from probhard._compat import MOVED, NOW_PACKAGES

STATEMENTS = {
    "from probhard import memory": "probhard._util.memory",
    "import probhard.memory": "probhard._util.memory",
    "import probhard; probhard.memory": "probhard._util.memory",
    "from probhard.forecasting.given import Forecasts": "probhard.forecasting.reconciliation.given",
    "from probhard.forecasting.data import summed": "probhard.forecasting.data.table",
    "from probhard.projectors import projector_of": "probhard.projection.dispatch",
    "from probhard.projectors.base import Options": "probhard.projection.base",
}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_old_paths_work_and_warn(statement: str) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *options, "-c", statement], capture_output=True, text=True)

    shown = run()  # by Python's own filters, which show deprecations of the main program alone
    assert shown.returncode == 0, shown.stderr
    assert "<string>:1: DeprecationWarning" in shown.stderr
    assert STATEMENTS[statement] in shown.stderr
    assert run("-W", "ignore").stderr == ""
    refused = run("-W", "error::DeprecationWarning")
    assert refused.returncode == 1
    assert "DeprecationWarning: probhard" in refused.stderr


@pytest.mark.parametrize("old", MOVED)
def test_old_and_new_are_one_module(old: str) -> None:
    if "forecasting" in old:
        pytest.importorskip("gluonts")
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=old):
        module = import_module(old)
    new = MOVED[old]
    if isinstance(new, str):
        assert module is import_module(new)
        assert module.__name__ == new
        assert module.__spec__ is not None
        assert module.__spec__.name == new
    else:
        for part in map(import_module, new):
            for name in getattr(part, "__all__", [name for name in vars(part) if not name.startswith("_")]):
                assert getattr(module, name) is getattr(part, name)


@pytest.mark.parametrize("package", NOW_PACKAGES)
def test_modules_that_became_packages_have_their_former_names(package: str) -> None:
    if "forecasting" in package:
        pytest.importorskip("gluonts")
    now, former = import_module(package), import_module(NOW_PACKAGES[package])
    names = [name for name, value in vars(former).items() if getattr(value, "__module__", "") == former.__name__]
    assert names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in names:
            if not name.startswith("_"):
                assert getattr(now, name) is getattr(former, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        now.nothing  # noqa: B018


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", ["probhard.nothing", "probhard.structure.children", "probhard.projectors.layer"])
def test_other_paths_are_unknown(path: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module(path)
