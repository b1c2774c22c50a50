"""The command's frame: exit statuses, messages instead of tracebacks, and a --help that loads nothing heavy."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

import probhard
from probhard.cli import app, main
from probhard.errors import MissingExtraError, ParameterError
from probhard.pde import demo


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """The demo, replaced by something that raises."""

    def arrange(error: BaseException) -> None:
        def run(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(demo, "run", run)

    return arrange


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"probhard {probhard.__version__}\n"
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {command.callback.__name__} " in listed for command in app.registered_commands)
    assert main(["demo", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(option in printed for option in ("--output", "--epochs", "--seed", "--quick"))


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["demo", "--epochs", "many"], ["demo", "--nothing"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "Usage: probhard" in captured.err
    assert captured.out == ""


def test_refusals_are_one_message(failing, capsys: pytest.CaptureFixture[str]) -> None:
    failing(ParameterError("This was found.", "It matters.", "Do that."))
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "probhard: This was found. It matters. Do that.\n"
    failing(MissingExtraError("h5py", "fields", "Reading this file"))
    assert main(["demo"]) == 2
    assert 'pip install "probhard[fields]"' in capsys.readouterr().err


def test_other_errors_are_not_hidden(failing) -> None:
    failing(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["demo"])


def test_interruption(failing) -> None:
    failing(KeyboardInterrupt())
    assert main(["demo"]) == 130


def test_help_loads_no_plotting_library() -> None:
    program = "import sys; from probhard.cli import main; main(['project', '--help']); print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "--constraints" in loaded
    assert not {"matplotlib", "h5py", "zarr"} & set(loaded.split())


def test_module_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["probhard", "nothing"])
    monkeypatch.delitem(sys.modules, "probhard.__main__", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("probhard", run_name="__main__")
    assert end.value.code == 2
    assert "No such command" in capsys.readouterr().err
