"""Outputs that belong together: the files of a run, and the certificate that vouches for them.

The old certificate is removed before the first file is written, and the new one is written last, with the SHA-256 of
every file. So a certificate never stands beside files that it was not made for, whenever a run is stopped.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

from probhard.cli._certificate import IMPLAUSIBLE, INFEASIBLE, Certificate
from probhard.errors import ParameterError

FILES = "files"  # the key of a certificate that holds the hashes of its files
KEYS = {"feasible", "checked", "infeasible", "tolerance", "versions"}  # that every certificate has


def check_path(path: Path, option: str, suffixes: tuple[str, ...], sources: Iterable[Path | None]) -> None:
    """Check a path of output before any work is done.

    Args:
        path: Path to write to.
        option: Option that named it.
        suffixes: Suffixes that it may have.
        sources: Paths of all inputs, None for those that were not given.

    Raises:
        ParameterError: It has another suffix, is a folder or an input, or cannot be written.
    """
    same = path.resolve() in {source.resolve() for source in sources if source is not None}
    if path.suffix not in suffixes or not path.parent.is_dir() or path.is_dir() or same:
        raise ParameterError(
            f"{option} {path} cannot be written.",
            f"It must be a file that ends in {' or '.join(suffixes)}, lie in an existing folder, and not be an input.",
            "Pass another path.",
        )
    check_writable(path.parent, option)


def check_writable(folder: Path, option: str) -> None:
    """Check that files can be made in a folder, or in the nearest folder above it that exists.

    Raises:
        ParameterError: They cannot.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(prefix=".probhard-", dir=folder):
            pass
    except OSError as error:
        raise ParameterError(
            f"{option}: no file can be written to {folder} ({error.strerror or error}).",
            "The results would be lost after all the work.",
            "Pass another folder, or make room in it.",
        ) from error


def check_seed(seed: int) -> None:
    """Check the seed of a random generator.

    Raises:
        ParameterError: It is negative or too large.
    """
    if not 0 <= seed < 2**63:
        raise ParameterError(f"--seed is {seed}.", "It seeds a random generator.", "Pass a number from 0 to 2^63 - 1.")


def certificate_of(path: Path) -> Path:
    """Path of the certificate of an output file.

    Raises:
        ParameterError: There is a file of this name that is no certificate.
    """
    certificate = path.with_suffix(".json")
    check_certificate(certificate)
    return certificate


def check_certificate(path: Path) -> None:
    """Check that a path is free for a certificate: nothing is there, or an earlier certificate.

    Raises:
        ParameterError: There is another file.
    """
    if path.exists() and not _is_certificate(path):
        raise ParameterError(
            f"{path} is not a certificate of probhard.",
            "The certificate of the output would replace it.",
            "Move that file away, or pass another --output.",
        )


def check_folder(folder: Path, ours: Sequence[str], names: Sequence[str]) -> None:
    """Check that a folder of output has no files of others under the names of its own.

    Args:
        folder: The folder; it need not exist.
        ours: Files or folders, one of which every earlier run has left.
        names: Files that the run replaces.

    Raises:
        ParameterError: There is such a file.
    """
    if not any((folder / name).exists() for name in ours):
        for path in (folder / name for name in names):
            check_foreign(path, path.exists())


def check_foreign(path: Path, foreign: bool) -> None:
    """Raise ParameterError for a file that an output would replace though no earlier run has written it."""
    if foreign:
        raise ParameterError(
            f"{path} was not written by probhard.",
            "The output would replace it.",
            "Move that file away, or pass another --output.",
        )


def conclude(certificate: Certificate, path: Path, text: str, files: Sequence[Path] = ()) -> None:
    """Save the certificate beside the output, and print a summary.

    Args:
        certificate: The certificate.
        path: File of the output.
        text: Summary to print.
        files: Further files of the run.

    Raises:
        typer.Exit: Some points are infeasible (status 3), or were moved implausibly far (4).
    """
    target = certificate_of(path)
    seal(certificate, target, [path, *files])
    typer.echo(f"{text}\nCertificate: {target}")
    if not certificate.feasible:
        raise typer.Exit(INFEASIBLE)
    if certificate.moved.implausible:
        raise typer.Exit(IMPLAUSIBLE)


def seal(certificate: Certificate, path: Path, files: Iterable[Path]) -> None:
    """Write a certificate with the hashes of its files, named relative to its folder."""
    certificate.setting[FILES] = {file.relative_to(path.parent).as_posix(): sha256(file) for file in files}
    certificate.save(path)


def verify(path: Path) -> dict[str, Any]:
    """Read a certificate and compare the files that it vouches for with their hashes.

    Returns:
        The certificate as plain values.

    Raises:
        ParameterError: It is no certificate, or a file is missing or was changed.
    """
    if not _is_certificate(path):
        raise ParameterError(
            f"{path} is not a certificate of probhard.",
            "It is missing, damaged or another file.",
            "Pass the .json file that a command wrote beside its output.",
        )
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    for name, digest in content.get(FILES, {}).items():
        file = path.parent / name
        state = "is missing" if not file.exists() else "was changed" if sha256(file) != digest else ""
        if state:
            raise ParameterError(
                f"{file} {state} since {path.name} was written.",
                "The certificate does not hold for it.",
                "Run the command again.",
            )
    return content


def sha256(path: Path) -> str:
    """SHA-256 of a file, or of all files of a folder with their names."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        if path.is_dir():
            digest.update(file.relative_to(path).as_posix().encode() + b"\0")
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _is_certificate(path: Path) -> bool:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(content, dict) or not set(content) >= KEYS:
        return False
    files = content.get(FILES, {})
    return isinstance(files, dict) and not any(Path(name).is_absolute() or ".." in Path(name).parts for name in files)
