"""DeepVAR with constraints as a GluonTS estimator: ``DeepVAREstimator(...).train(dataset).predict(dataset)``."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from probhard.constraints.base import Constraint
from probhard.constraints.box import Box
from probhard.constraints.hierarchy import Hierarchy
from probhard.errors import MissingExtraError, ParameterError, ShapeError, check_choice
from probhard.forecasting.data.seasons import CYCLES, default_lags, default_time_features, period_frequency
from probhard.forecasting.models.network import DeepVAR
from probhard.forecasting.models.size import check_size
from probhard.forecasting.models.windows import Layout, RandomWindows, Window, Windows, last_windows
from probhard.laws.family import NORMAL, Family
from probhard.method import NOTHING, Method, as_method
from probhard.score import Functionals, Levels

try:
    from gluonts.torch.model.estimator import PyTorchLightningEstimator, TrainOutput
    from gluonts.transform import Identity, Transformation

    from probhard.forecasting.models.predictor import DeepVARPredictor
    from probhard.forecasting.models.training import DeepVARModule
except ImportError as error:
    raise MissingExtraError("gluonts[torch]", "forecast", "DeepVAREstimator") from error

TRAINER = {"max_epochs": 10, "gradient_clip_val": 10.0, "logger": False, "enable_model_summary": False}


class DeepVAREstimator(PyTorchLightningEstimator):
    """Trains a DeepVAR network whose forecasts obey a hierarchy and further constraints at every step.

    Args:
        freq, prediction_length: Pandas alias, and the horizon H in steps.
        hierarchy: A constraint on the n series of a step, or a summation matrix (n, m).
        method, constraint: A name in ``METHODS`` or a ``Method``, and a further constraint in data units.
        context_length: Steps before the horizon; by default 3 H, at least the longest lag.
        lags_seq, time_features: By default those of the frequency; time features are names in ``CYCLES``.
        rank, family: Columns of the covariance's low-rank part (0: diagonal), and ``NORMAL`` or ``student_t(df)``.
        functionals: Family whose CRPS joins the loss, as in ``Method``, or ``"levels"`` for those of the hierarchy.
        scaling: ``"mean"`` (True), ``"centre"`` or ``"none"`` (False), as in ``DeepVAR``.
        num_feat_dynamic_real, seed: Rows of ``feat_dynamic_real``, and the seed of weights, windows and draws.
    The other arguments are those of GluonTS's estimators. Invalid arguments raise ParameterError.
    """

    def __init__(
        self,
        freq: str,
        prediction_length: int,
        hierarchy: Any = None,
        method: str | Method = "probhard-or",
        constraint: Constraint | None = None,
        context_length: int | None = None,
        lags_seq: Sequence[int] | None = None,
        time_features: Sequence[str] | None = None,
        num_layers: int = 2,
        hidden_size: int = 40,
        dropout_rate: float = 0.1,
        rank: int = 0,
        family: Family = NORMAL,
        functionals: str | Functionals | None = None,
        scaling: bool | str = True,
        num_feat_dynamic_real: int = 0,
        lr: float = 1e-3,
        weight_decay: float = 1e-8,
        batch_size: int = 32,
        num_batches_per_epoch: int = 50,
        num_parallel_samples: int = 200,
        trainer_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(trainer_kwargs={})
        self.trainer_kwargs: dict[str, Any] = {**TRAINER, **(trainer_kwargs or {})}
        self._lags_given = lags_seq is not None
        lags = default_lags(freq) if lags_seq is None else tuple(map(int, lags_seq))
        cycles = default_time_features(freq) if time_features is None else tuple(time_features)
        _check(prediction_length, lags, cycles, context_length)
        _check_options(
            {
                "num_layers": num_layers,
                "hidden_size": hidden_size,
                "batch_size": batch_size,
                "num_batches_per_epoch": num_batches_per_epoch,
                "num_parallel_samples": num_parallel_samples,
            },
            {"rank": rank, "num_feat_dynamic_real": num_feat_dynamic_real, "seed": seed},
            {"lr": lr, "weight_decay": weight_decay, "dropout_rate": dropout_rate},
        )
        if not isinstance(family, Family):
            raise ParameterError(
                f"Got family={family!r}.", "It is the distribution of the noise.", "Pass NORMAL or student_t(df)."
            )
        self.prediction_length = prediction_length
        self.layout = Layout(
            period_frequency(freq),
            prediction_length,
            max(3 * prediction_length, *lags) if context_length is None else context_length,
            lags,
            cycles,
            num_feat_dynamic_real,
        )
        self.method = as_method(method)
        self.constraint = _constraint(hierarchy, constraint, self.method)
        if functionals is not None:
            self.method = self.method.replace(functionals=_functionals(functionals, self.constraint))
        self.network_options: dict[str, Any] = {
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "dropout_rate": dropout_rate,
            "rank": rank,
            "family": family,
            "scaling": scaling if isinstance(scaling, str) else "mean" if scaling else "none",
        }
        self.lr, self.weight_decay, self.seed = lr, weight_decay, seed
        self.batch_size, self.num_batches_per_epoch = batch_size, num_batches_per_epoch
        self.num_parallel_samples = num_parallel_samples
        self._windows: Windows | None = None

    def train_model(
        self, training_data: Iterable[Mapping[str, Any]], validation_data: Any = None, **options: Any
    ) -> TrainOutput:
        """Train on random windows and keep the weights of the epoch with the smallest (validation) loss.

        Args:
            training_data: GluonTS entries with targets of shape (n, T).
            validation_data: Entries whose last window is the validation set.
            **options: As in GluonTS.

        Raises:
            ProbhardError: If the entries do not fit each other or the constraint, or are too short.
        """
        check_size(training_data, self.layout, self.batch_size, self.network_options, self._lags_given)
        self._windows = Windows(training_data, self.layout)
        expected = self.constraint.variables
        if expected is not None and expected != self._windows.variables:
            raise ShapeError(
                f"The data have {self._windows.variables} series, the constraint {expected}.",
                "Every series is one variable of the constraint.",
                "Pass all series, aggregates first, in the order of the hierarchy's rows.",
            )
        trainer_kwargs = self.trainer_kwargs
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
            torch.manual_seed(self.seed)
            # a copy, because GluonTS removes the callbacks from it; checkpoints go to the temporary folder
            self.trainer_kwargs = {"default_root_dir": folder, **trainer_kwargs}
            try:
                return super().train_model(training_data, validation_data, **options)
            finally:
                self.trainer_kwargs, self._windows = trainer_kwargs, None

    def create_transformation(self) -> Transformation:
        """Return the identity: windows are cut from tensors."""
        return Identity()

    def create_lightning_module(self) -> DeepVARModule:
        """Build the network with its constraint, scaled by the training data."""
        assert self._windows is not None
        network = DeepVAR(self.layout, self._windows.variables, **self.network_options)
        network.typical.copy_(self._windows.typical())
        return DeepVARModule(network, self.constraint, self.method, self.lr, self.weight_decay)

    def create_training_data_loader(self, data: Any, module: Any, **options: Any) -> RandomWindows:
        """Return batches of random windows of the training data."""
        assert self._windows is not None
        return RandomWindows(self._windows, self.batch_size, self.num_batches_per_epoch, self.seed)

    def create_validation_data_loader(self, data: Any, module: Any, **options: Any) -> DataLoader[Window]:
        """Return batches of the last window of every entry."""
        batches = last_windows(Windows(data, self.layout), self.batch_size)
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # Lightning reads a list as many loaders

    def create_predictor(self, transformation: Transformation, module: Any) -> DeepVARPredictor:
        """Wrap a trained module as a predictor."""
        return DeepVARPredictor(module, self.num_parallel_samples, self.seed)


def _check(length: int, lags: Sequence[int], cycles: Sequence[str], context: int | None) -> None:
    if length < 1 or not lags or min(lags) < 1 or (context is not None and context < 1):
        raise ParameterError(
            f"Got prediction_length={length}, lags_seq={list(lags)}, context_length={context}.",
            "Horizon and context have at least one step, and a lag looks back at least one step.",
            "Pass positive numbers.",
        )
    for name in cycles:
        check_choice("time feature", name, tuple(CYCLES))


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Check that an argument is a whole number.

    Args:
        name: Name of the argument, for the error text.
        value: Its value.
        least: Smallest valid value.

    Raises:
        ParameterError: If it is not a whole number of at least ``least``.
    """
    if not isinstance(value, int | np.integer) or value < least:
        raise ParameterError(f"Got {name}={value!r}.", "It is a whole number.", f"Pass {least} or more.")


def _check_options(sizes: Mapping[str, Any], counts: Mapping[str, Any], rates: Mapping[str, Any]) -> None:
    """Raise for sizes below 1, counts below 0 and rates out of range."""
    for least, group in ((1, sizes), (0, counts)):
        for name, value in group.items():
            check_count(name, value, least)
    for name, value in rates.items():
        fits = isinstance(value, float | int | np.floating) and 0 <= value < (1 if name == "dropout_rate" else math.inf)
        if not fits or (name == "lr" and value == 0):
            raise ParameterError(
                f"Got {name}={value!r}.",
                "lr is positive, weight_decay is not negative, dropout_rate is from 0 to below 1.",
                "Pass a number in that range, for instance lr=1e-3.",
            )


def _functionals(functionals: str | Functionals, constraint: Constraint) -> Functionals:
    """The family of a name: the levels of the hierarchy among the parts of the constraint."""
    if not isinstance(functionals, str):
        return functionals
    check_choice("functionals", functionals, ("levels",))
    for part in constraint.parts():
        if isinstance(part, Hierarchy):
            return Levels(part)
    raise ParameterError(
        "DeepVAREstimator got functionals='levels' without a hierarchy.",
        "The levels are those of its tree.",
        "Pass hierarchy=S, or a family such as Directions(matrix).",
    )


def _constraint(hierarchy: Any, constraint: Constraint | None, method: Method) -> Constraint:
    """Combine the hierarchy and the further constraint on a time step."""
    parts = [] if hierarchy is None else [hierarchy if isinstance(hierarchy, Constraint) else Hierarchy(hierarchy)]
    parts += [] if constraint is None else [constraint]
    if not parts:
        if method.training != NOTHING or method.inference != NOTHING or method.penalty:
            raise ParameterError(
                "DeepVAREstimator got neither a hierarchy nor a constraint.",
                "The method projects onto them.",
                "Pass hierarchy=S, or method='base'.",
            )
        return Box()
    return parts[0] if len(parts) == 1 else parts[0] & parts[1]
