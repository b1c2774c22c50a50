"""The joint law of a trained surrogate: the correlation of its errors on validation samples, and conformal bands.

    network's standard deviations  x  correlation of held-out errors  x  a few calibration numbers   ->  projection

Means stay. The validation samples are divided: early stopping and the correlation use one part, the numbers the other.
Conformal bands use test samples: one part sets the threshold, the other measures the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from probhard.calibration import CoverageReport, Promise, calibrate, conformal, error_correlation
from probhard.io.fields import Cells
from probhard.laws.covariance import Factored
from probhard.model import Batch, ConstrainedModel
from probhard.pde.samples import Samples
from probhard.score import BlockMeans, Directions, Functionals

LEAST = 5  # samples of each part of the validation samples; with fewer, the law stays that of independent cells
SIZES = (2, 4, 8, 16)  # sides of the blocks whose means are scored, where they fit
WEIGHT, ENERGY = 0.3, 1.0  # of their scores, and of the energy score
CHUNK = 100_000  # cells of a batch
MOST = 400_000  # cells on which numbers are fitted, at most


def divided(validation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divide samples into those of early stopping and those of calibration; the latter are none if there are few.

    Args:
        validation: Numbers of the samples, (count,).
    """
    if len(validation) < 2 * LEAST:
        return validation, validation[:0]
    return validation[::2], validation[1::2]


def block_means(cells: Cells, sizes: Any) -> Functionals:
    """Means over blocks of an event; with a mask, over the cells of the domain in each block that has any.

    Args:
        cells: Cells of the grid.
        sizes: As in ``BlockMeans``.
    """
    family = BlockMeans(cells.shape, tuple(sizes))
    if cells.inside is None:
        return family
    matrix = family.matrix[:, cells.inside]
    count = matrix.sum(1)
    there = count > 0
    names = [name for name, kept in zip(family.labels, there) if kept]
    return Directions(sp.diags_array(1 / count[there]) @ matrix[there], names)


def joint_law(model: ConstrainedModel, samples: Samples, early: np.ndarray, held: np.ndarray) -> ConstrainedModel:
    """The model with the correlation of its own errors, unless it has learned one, and with calibration numbers.

    Args:
        model: A trained model.
        samples: All samples, with solutions.
        early: Numbers of the samples of early stopping, (count,), whose errors give the correlation.
        held: Numbers of samples that nothing has used, (count,), on which the calibration numbers are fitted.

    Returns:
        A model with the same weights and means.
    """
    cells, correlation = samples.cells, None
    shape = cells.shape if cells.inside is None else None
    with torch.no_grad():
        learned = isinstance(model.backbone(samples.batch(early[:1]).inputs).cov, Factored)
    if not learned:
        correlation = error_correlation(model, list(_batches(samples, early)), shape)
    return calibrate(
        model,
        list(_batches(samples, held[: max(LEAST, MOST // cells.index.size)])),
        functionals=scored_blocks(cells),
        functional_weight=WEIGHT,
        octaves=not learned and shape is not None,
        correlation=correlation,
        energy=ENERGY,
    )


def scored_blocks(cells: Cells) -> Functionals:
    """Means over blocks of all sizes that fit an event."""
    return block_means(cells, [size for size in SIZES if size <= min(cells.shape)] or ["total"])


def conformal_bands(
    model: ConstrainedModel, samples: Samples, numbers: np.ndarray, level: float
) -> tuple[Promise, CoverageReport] | None:
    """Bands that hold all cells of a new sample at once.

    Args:
        model: A trained model.
        samples: All samples, with solutions.
        numbers: Numbers of samples that nothing else has used, (count,): one half sets the threshold.
        level: Wanted coverage.

    Returns:
        The threshold with its promise, and the coverage of the other half; None if there are too few samples.
    """
    units, others = numbers[::2], numbers[1::2]
    if len(others) < 1 or math.ceil((len(units) + 1) * level) > len(units):
        return None
    every, slices = every_cell(samples.cells), samples.slices
    found = conformal(model, list(_batches(samples, units)), level, every, elements=slices)
    reports = [found.report(batch) for batch in _batches(samples, others)]
    return found.promise, CoverageReport.joined(reports)


def every_cell(cells: Cells) -> Functionals:
    """All cells of an event, as functionals."""
    return Directions(sp.eye_array(cells.variables, format="csr"))


def _batches(samples: Samples, numbers: np.ndarray) -> Iterator[Batch]:
    """A few samples at a time."""
    size = max(1, CHUNK // samples.cells.index.size)
    for first in range(0, len(numbers), size):
        yield samples.batch(numbers[first : first + size])
