"""Files of saved models: a format mark, a version, a method and named weights, as plain tensors and values."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from probhard.errors import ParameterError


def read_model(path: str | os.PathLike[str], mark: str, newest: int) -> dict[str, Any]:
    """The checked content of a saved model; code in the file is never run.

    Args:
        path: The file.
        mark: The format that it must name.
        newest: The newest version of the format that is known.

    Raises:
        FileNotFoundError: There is no such file.
        ParameterError: The file is damaged, of another format or of a newer version.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ParameterError(
            f"{path} cannot be read as a saved model ({type(error).__name__}).",
            "It is damaged, or holds more than tensors and plain values.",
            "Save the model again with ConstrainedModel.save.",
        ) from error
    known = isinstance(content, dict) and content.get("format") == mark
    if not known or not isinstance(content.get("version"), int):
        raise ParameterError(
            f"{path} is not a saved probhard model.",
            "Its format mark is missing.",
            "Pass a file written by ConstrainedModel.save.",
        )
    if content["version"] > newest:
        raise ParameterError(
            f"{path} has format version {content['version']}, this library reads up to {newest}.",
            "It was written by a newer probhard.",
            "Upgrade probhard.",
        )
    state = content.get("state")
    if "method" not in content or not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ParameterError(
            f"{path} is damaged.",
            "It does not hold a method and named weights.",
            "Save the model again with ConstrainedModel.save.",
        )
    return content
