"""Settings of ``probhard train``: method, score, schedule, network size, joint law and split of the samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from probhard.errors import ParameterError
from probhard.io.fields import Cells
from probhard.io.settings import Reader, at_least, closest_name, listed, number, setting, switch, whole, within, word
from probhard.io.spec import KEYS
from probhard.method import METHODS, Method
from probhard.pde.joint import block_means

MODES = 12  # per axis, fewer on grids that cannot resolve them
PADDING = 9  # points on the right of each axis, for fields that are not periodic

READERS: dict[str, Reader] = {
    **dict.fromkeys(("epochs", "batch_size", "patience", "width", "layers"), at_least(1)),
    **dict.fromkeys(("seed", "warm_up", "rank"), at_least(0)),
    **dict.fromkeys(("method", "score"), (word, "a name")),
    "lr": (within(0, math.inf, inside=False), "a positive number"),
    "functionals": (listed(whole), "block sizes: whole numbers"),
    "functional_weight": (within(0, math.inf), "a number from 0 on"),
    "modes": (listed(whole), "a whole number, or one per axis of the grid"),
    "split": (listed(number), "three numbers, for training, validation and test"),
    **dict.fromkeys(("normalise", "joint"), (switch, "true or false")),
    "data_tolerance": (within(0, math.inf), "a number from 0 on"),
    "level": (within(0, 1, inside=False), "a number between 0 and 1"),
}
STEPS = {name: method.inference for name, method in METHODS.items()}
PROJECTED = [  # methods whose draws all obey the entire constraint
    name
    for name, step in STEPS.items()
    if step.metric is not None and step.covariance != "keep" and not step.linear_only
]


@dataclass(frozen=True)
class Settings:
    """Settings of a configuration beside its constraints; see also ``Schedule`` and ``VarianceNO``.

    Args:
        method: A method that projects every draw.
        score: ``crps`` or ``nll``; None takes that of the method.
        warm_up: Number of first epochs, trained without the constraint.
        patience: Stop after this many epochs without a better validation score; None never stops early.
        modes: Modes of the Fourier layers, per axis; None takes 12, fewer on small grids.
        rank: Columns of the factor that correlates the cells of an event; 0 for independent cells.
        functionals: Sizes of blocks whose means are scored in training, beside the mean of the event; None for none.
        functional_weight: Their weight in the loss.
        joint: Correlate the cells of an event as errors on validation samples are; half of these then fit calibration
            numbers, and early stopping uses the other half.
        level: Wanted coverage of the conformal bands of a sample.
        seed: Seed of weights, data order and split.
        split: Shares of the samples for training, validation and test.
        normalise: Standardise inputs and solutions.
        data_tolerance: Largest relative violation of the constraints by solutions.
    """

    method: str = "probhard-ob"
    score: str | None = None
    epochs: int = 200
    batch_size: int = 20
    lr: float = 1e-3
    warm_up: int = 0
    patience: int | None = 50
    width: int = 32
    layers: int = 4
    modes: list[int] | None = None
    rank: int = 0
    functionals: list[int] | None = None
    functional_weight: float = 0.3
    joint: bool = True
    level: float = 0.9
    seed: int = 0
    split: list[float] | None = None
    normalise: bool = True
    data_tolerance: float = 0.01

    @classmethod
    def read(cls, content: Any) -> tuple[dict[str, Any], Settings]:
        """Parse a configuration.

        Args:
            content: Plain values, such as those of a YAML file.

        Returns:
            The entries of the constraints, and the settings.

        Raises:
            ParameterError: If a name is not known or a value not valid.
        """
        if not isinstance(content, Mapping):
            raise ParameterError(
                f"The configuration is {content!r}.", "It must be a mapping.", "Write 'constraints:', 'epochs:', ..."
            )
        names = [field.name for field in fields(cls)]
        for name in content:
            if name not in (*names, *KEYS):
                raise ParameterError(
                    f"There is no setting {name!r}.", "Nothing is guessed.", closest_name(str(name), (*names, *KEYS))
                )
        values = {name: setting(name, content[name], READERS) for name in names if content.get(name) is not None}
        if "patience" in content and content["patience"] is None:
            values["patience"] = None
        settings = cls(**values)
        settings.step()
        return {name: content[name] for name in KEYS if name in content}, settings

    def step(self) -> Method:
        """The method with the score of the settings; raises ParameterError unless it projects every draw."""
        if self.method not in PROJECTED:
            known = f"{self.method!r} does not project every draw on the entire constraint."
            raise ParameterError(
                known if self.method in METHODS else f"There is no method {self.method!r}.",
                "Predictions come with a certificate for every draw.",
                closest_name(self.method, PROJECTED),
            )
        if min(self.functionals or [1]) < 1:
            raise ParameterError(
                f"functionals={self.functionals}.", "A block has at least one cell.", "Write sizes such as [2, 4, 8]."
            )
        method = METHODS[self.method]
        return method if self.score is None else method.replace(score=self.score)

    def scored(self, cells: Cells) -> Method:
        """The method of ``step`` with the functionals that it scores on these cells."""
        if self.functionals is None:
            return self.step()
        family = block_means(cells, (*self.functionals, "total"))
        return self.step().replace(functionals=family, functional_weight=self.functional_weight)

    def resolved(self, grid: tuple[int, ...]) -> Settings:
        """A copy with modes for every axis of a grid (sizes); raises ParameterError if their number does not fit."""
        if self.modes is None:
            return replace(self, modes=[min(MODES, (size + PADDING) // 2) for size in grid])
        modes = self.modes * len(grid) if len(self.modes) == 1 else self.modes
        if len(modes) != len(grid):
            raise ParameterError(
                f"modes={self.modes} for the grid {grid}.",
                "Every axis has its own.",
                "Write one number, or one each.",
            )
        return replace(self, modes=modes)

    def parts(self, count: int) -> list[np.ndarray]:
        """Split samples at random, by the seed.

        Args:
            count: Number of samples.

        Returns:
            Numbers of the samples for training, validation and test.

        Raises:
            ParameterError: If the shares do not sum to 1, or a part is empty.
        """
        shares = self.split or [0.7, 0.15, 0.15]
        sizes = [round(share * count) for share in shares[1:]]
        if len(shares) != 3 or abs(sum(shares) - 1) > 1e-6 or min(*sizes, count - sum(sizes)) < 1:
            raise ParameterError(
                f"split={shares} of {count} samples.",
                "Training, validation and test each need at least one sample.",
                "Write three shares that sum to 1, such as [0.7, 0.15, 0.15], and bring more samples.",
            )
        order = np.random.default_rng(self.seed).permutation(count)
        validation, test, train = np.split(order, np.cumsum(sizes))
        return [train, validation, test]

    def record(self) -> dict[str, Any]:
        """The settings as plain values, to save."""
        return asdict(self)
