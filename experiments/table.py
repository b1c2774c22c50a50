"""What a table is: work that gives result lines, and a page and a picture made from them.

Each table's module has a function ``table(request)`` that returns its ``Table``. Rendering reads the lines alone, so
what the work needs is imported only when it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.records import Records
from probhard._util.atomic import replacing
from probhard.errors import ParameterError, check_choices

if TYPE_CHECKING:
    from experiments.grid import Grid

Line = Mapping[str, Any]
Lines = Sequence[Line]


@dataclass(frozen=True)
class Request:
    """The options of ``probhard bench``; lists are comma-separated, and empty for all."""

    table: str
    folder: Path
    epochs: int = 150
    seeds: str = ""
    problems: str = ""
    methods: str = ""
    scores: str = "crps,nll"
    windows: str = "paper,rolling"
    workers: int = 1
    engine: str = "joblib"
    address: str | None = None
    quick: bool = False
    render: bool = False

    def names(self, option: str) -> list[str]:
        """The parts of a comma-separated option."""
        return [part.strip() for part in getattr(self, option).split(",") if part.strip()]

    def chosen(self, option: str, choices: Iterable[str]) -> list[str]:
        """The parts of a comma-separated option, by default all choices.

        Raises:
            ParameterError: If a part is not among the choices.
        """
        known, names = list(choices), self.names(option)
        check_choices(option.removesuffix("s"), names, known)
        return names or known

    def chosen_epochs(self, default: int) -> int:
        """The epochs that are asked for, else those of a table that has a number of its own."""
        return default if self.epochs == Request.epochs else self.epochs

    def chosen_seeds(self, default: Iterable[int] = (0,)) -> list[int]:
        """The seeds that are asked for, else the first of the defaults in a quick run, else all defaults.

        Raises:
            ParameterError: If one is not a number.
        """
        try:
            chosen = [int(seed) for seed in self.names("seeds")]
        except ValueError as error:
            raise ParameterError(
                f"--seeds {self.seeds} are not numbers.", "Seeds are integers.", "Pass 0,1,2."
            ) from error
        return chosen or list(default)[: 1 if self.quick else None]


@dataclass(frozen=True)
class Table:
    """A table of results.

    Args:
        name: Of its files: ``NAME.jsonl``, ``NAME.md`` and ``NAME.png``.
        keys: Fields that identify a line.
        run: Does the work and appends lines to the records; yields messages for the user.
        render: The page from the lines.
        plot: Writes the picture to a path, if lines have something to show; None for a page without one.
    """

    name: str
    keys: Sequence[str]
    run: Callable[[Records], Iterable[str]]
    render: Callable[[Lines], str]
    plot: Callable[[Path, Lines], object] | None = None

    def make(self, request: Request) -> Iterator[str]:
        """Do the work, unless only the page is asked for, and write page and picture.

        Yields:
            Messages for the user.

        Raises:
            ParameterError: If there is nothing to run or to render.
        """
        records = Records(request.folder / f"{self.name}.jsonl", self.keys)
        if not request.render:
            yield from self.run(records)
        lines = records.read()
        if not lines:  # an empty page would replace a full one
            raise ParameterError(
                f"{records.path} holds no result lines.", "There is nothing to render.", "Run without --render first."
            )
        for path in self.write(request.folder, lines):
            yield f"Written: {path}"

    def write(self, folder: Path, lines: Lines) -> list[Path]:
        """Write page and picture; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        page, picture = folder / f"{self.name}.md", folder / f"{self.name}.png"
        with replacing(page) as partial:
            partial.write_text(self.render(lines))
        if self.plot is None:
            return [page]
        self.plot(picture, lines)
        return [page, picture] if picture.exists() else [page]


def resumed(grid: Callable[[Path], Grid], request: Request) -> Callable[[Records], Iterator[str]]:
    """The ``run`` of a table whose units of work may be shared among processes and resumed.

    Args:
        grid: Its units, for the file of their lines.
        request: The options of the command.
    """

    def run(records: Records) -> Iterator[str]:
        units = grid(records.path)
        if not units.units:
            raise ParameterError(
                "These options leave nothing to run.",
                "Rows trained on draws have no likelihood, rows of jumps want a problem that has one, and some tables "
                "have one score or window only.",
                "Leave out --scores, --problems or --windows.",
            )
        done = units.run(request.workers, engine=request.engine, address=request.address)
        yield f"{done} of {len(units.units)} units done; lines in {records.path}"

    return run


def measured(
    pieces: Callable[[Records], Iterable[Callable[[], Lines]]],
) -> Callable[[Records], Iterator[str]]:
    """The ``run`` of a table that is measured in this process, piece by piece, in one thread.

    Args:
        pieces: Pieces of work, each of which returns its lines; they see the records to leave out what is done.
    """

    def run(records: Records) -> Iterator[str]:
        from tqdm.auto import tqdm

        with one_thread():
            for piece in tqdm(pieces(records), unit="case"):
                records.append(*piece())
        yield f"Lines in {records.path}"

    return run


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread, as all times are those of one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
