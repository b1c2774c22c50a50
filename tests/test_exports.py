"""Public names are imported on first use: the lists agree, and ``import probhard`` loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import probhard as ph

PROGRAM = """
import sys
import probhard
assert probhard.__version__ and "Ball" in dir(probhard) and "forecasting" in dir(probhard)
assert not {"torch", "numpy", "scipy", "pandas", "matplotlib"} & set(sys.modules)
assert probhard.ParameterError is probhard.errors.ParameterError
assert not {"torch", "numpy"} & set(sys.modules)
assert probhard.tangent.DiagonalTangent
assert "torch" in sys.modules
"""


def imported_for_type_checkers() -> dict[str, str]:
    """Names of the ``if TYPE_CHECKING:`` block and their modules."""
    tree = ast.parse(Path(ph.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in blocks[0].body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_the_lists_agree() -> None:
    assert len(set(ph.__all__)) == len(ph.__all__)
    assert imported_for_type_checkers() == ph._module_of
    assert set(ph.__all__) == set(ph._module_of)


def test_every_name_is_that_of_its_module() -> None:
    for name, module in ph._module_of.items():
        assert getattr(ph, name) is getattr(import_module(module), name)


def test_unknown_names() -> None:
    for name in ("nothing", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=name):
            getattr(ph, name)
    with pytest.raises(ImportError):
        from probhard import nothing  # noqa: F401


def test_import_loads_no_torch() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
