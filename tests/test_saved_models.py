"""Files of saved models: damaged or foreign ones are rejected, and code in them never runs."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from bad_input import DOUBLE, ROW, Backbone, explained, ones
from probhard import METHODS, ConstrainedModel, DiagonalMetric, Method, ParameterError, Step


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    ConstrainedModel(Backbone(), ROW).save(path)
    return path


def test_a_saved_file_is_read_back(saved):
    assert ConstrainedModel.load(saved, Backbone(), ROW).method == METHODS["probhard-ob"]


def refused(path: Path, *fragments: str) -> None:
    with pytest.raises(ParameterError) as caught:
        ConstrainedModel.load(path, Backbone(), ROW)
    explained(caught.value, [path.name, *fragments])


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 broken archive", bytes(range(256)) * 40])
def test_garbage_is_not_a_model(tmp_path, content):
    path = tmp_path / "garbage.pt"
    path.write_bytes(content)
    refused(path)


def test_a_truncated_file_is_not_a_model(saved):
    saved.write_bytes(saved.read_bytes()[:-200])
    refused(saved)


class Trap:
    """Pickles to a call that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("container", ["torch", "pickle", "inside a model"])
def test_code_in_a_file_is_never_run(tmp_path, container, saved):
    path, mark = tmp_path / "trap.pt", tmp_path / "sprung"
    if container == "torch":
        torch.save(Trap(mark), path)
    elif container == "pickle":
        path.write_bytes(pickle.dumps(Trap(mark), protocol=2))
    else:
        content = torch.load(saved, weights_only=True)
        torch.save({**content, "extra": Trap(mark)}, path)
    refused(path)
    assert not mark.exists()
    if container == "torch":  # the trap works where code is allowed
        torch.load(path, weights_only=False)
        assert mark.exists()


CHANGED = {
    "not a model": lambda content: {"weights": content["state"]},
    "a bare state": lambda content: content["state"],
    "a list": lambda content: [content],
    "another format": lambda content: {**content, "format": "other"},
    "a newer version": lambda content: {**content, "version": 99},
    "a version that is no number": lambda content: {**content, "version": "two"},
    "no state": lambda content: {k: v for k, v in content.items() if k != "state"},
    "no method": lambda content: {k: v for k, v in content.items() if k != "method"},
    "a state of another kind": lambda content: {**content, "state": [1, 2]},
    "a method of another kind": lambda content: {**content, "method": "probhard-ob"},
    "a method with a part missing": lambda content: {**content, "method": {"score": "crps"}},
    "a method with a stranger": lambda content: {
        **content,
        "method": {**content["method"], "training": {**content["method"]["training"], "speed": 3}},
    },
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_file_of_another_content_is_refused(saved, change):
    torch.save(CHANGED[change](torch.load(saved, weights_only=True)), saved)
    refused(saved, *(["99"] if change == "a newer version" else []))


@pytest.mark.parametrize("other", [Backbone(6), nn.Linear(3, 10, dtype=DOUBLE), nn.Sequential(Backbone())])
def test_weights_of_another_architecture_are_refused(saved, other):
    with pytest.raises(ParameterError) as caught:
        ConstrainedModel.load(saved, other, ROW)
    explained(caught.value, [saved.name, "linear."])


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        ConstrainedModel.load(tmp_path / "nowhere.pt", Backbone(), ROW)


def test_a_saved_metric_module_must_be_given_again(tmp_path):
    method = Method(Step(DiagonalMetric(ones(5), learn=True)))
    ConstrainedModel(Backbone(), ROW, method).save(tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "metric")
