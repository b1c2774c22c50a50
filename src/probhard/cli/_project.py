"""``probhard project``: reads fields, projects them, writes the feasible ones and a certificate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from probhard.cli import _pictures
from probhard.cli._certificate import Certificate
from probhard.cli._outputs import certificate_of, check_path, check_seed, conclude, sha256
from probhard.cli._projection import FieldProjection
from probhard.cli._stored import StoredLaw
from probhard.errors import ParameterError
from probhard.io.fields import read_fields, write_npz
from probhard.io.spec import Data, cells_from, read_spec
from probhard.projection.layer import DPPL


@dataclass(frozen=True)
class Request:
    """The command's arguments, with the meaning that its ``--help`` gives them."""

    fields: Path
    constraints: Path
    metric: str | None
    draws: int
    output: Path | None
    seed: int
    grid_dims: int | None
    figure: Path | None

    def run(self) -> None:
        """Project all fields, write the results and the certificate, and print a summary.

        Raises:
            ProbhardError: Invalid files or options.
            typer.Exit: Some points are not feasible (status 3).
        """
        source = self.fields
        path = source.with_name(f"{source.stem}-projected.npz") if self.output is None else self.output
        sources = [source, self.constraints]
        check_path(path, "--output", (".npz",), sources)
        old = certificate_of(path)
        if self.figure is not None:
            check_path(self.figure, "--figure", _pictures.SUFFIXES, sources)
        check_seed(self.seed)
        arrays = read_fields(source)
        projection = self._projection(arrays)
        results = projection.run(self.draws, path.parent)
        if "variance" in arrays and "stddev" in results:
            results["variance"] = np.square(results["stddev"])
        old.unlink(missing_ok=True)
        write_npz(path, {**arrays, **results})
        if self.figure is not None:
            _pictures.before_and_after(self.figure, projection, results)
        certificate = projection.certificate
        conclude(certificate, path, f"{certificate.table()}\nFields: {path}")

    def _projection(self, arrays: dict[str, np.ndarray]) -> FieldProjection:
        """What is to be projected, checked."""
        spec = read_spec(self.constraints)
        law = StoredLaw.of(arrays)
        cells = cells_from(spec, arrays, law.mean.shape, self.grid_dims)
        law.check(cells)
        metric = self.metric or ("orthogonal" if law.stddev is None else "oblique")
        if metric == "oblique" and law.stddev is None:
            raise ParameterError(
                "--metric oblique got fields without variances.",
                "It moves uncertain cells more than certain ones.",
                "Add 'stddev' to the file, or use --metric orthogonal.",
            )
        certificate = Certificate(
            {
                "input": self.fields.name,
                "input_sha256": sha256(self.fields),
                "constraints": self.constraints.read_text("utf-8"),
                "metric": metric,
                "seed": self.seed,
                "fields": cells.fields,
                "cells": cells.variables,
                "field_axes": ["batch"] * len(cells.batch) + list(cells.per),
            }
        )
        generator = torch.Generator().manual_seed(self.seed)
        layer = DPPL(metric, on_failure="flag")
        return FieldProjection(law, spec, Data(cells, arrays), layer, certificate, generator)
