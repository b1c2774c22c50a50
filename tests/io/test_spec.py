"""Constraints from plain values: every entry against the constraint it names, the order of cells, clear refusals."""

from __future__ import annotations

import builtins
import importlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import probhard as ph
from probhard.errors import MissingExtraError, ParameterError, ShapeError
from probhard.io import spec as module
from probhard.io.cells import Cells
from probhard.io.fields import read_fields, write_npz
from probhard.io.spec import REGISTRY, Data, cells_from, constraint_from, read_spec

RANDOM = np.random.default_rng(0)
NX = 5
ARRAYS = {
    "x": np.array([0.0, 0.1, 0.3, 0.6, 1.0]),
    "total": np.array([1.0, 2.0, 3.0]),
    "low": RANDOM.normal(size=(3, NX)),
    "A": RANDOM.normal(size=(2, NX)),
    "b": RANDOM.normal(size=(3, 2)),
    "edge": np.array([1.0, 0, 0, 0, 1]),
    "ends": RANDOM.normal(size=(3, NX)),
}
WEIGHTS = torch.from_numpy(np.array([0.05, 0.15, 0.25, 0.35, 0.2]))  # trapezoid rule on x, by hand


def tensor(name: str) -> torch.Tensor:
    return torch.tensor(ARRAYS[name])


EXPECTED: dict[str, tuple[dict[str, Any] | None, ph.Constraint]] = {
    "ball": ({"radius": 2, "center": "low"}, ph.Ball(2.0, tensor("low"))),
    "box": ({"lower": "low", "upper": "1e+1"}, ph.Box(tensor("low"), 10.0)),
    "conservation": ({"mass": "total"}, ph.Conservation(WEIGHTS, tensor("total"))),
    "convex": ({"direction": "down"}, ph.Convex("down", tensor("x"))),
    "fixed": (
        {"mask": "edge", "values": "ends"},
        ph.LinearEquality(torch.eye(5, dtype=torch.float64)[[0, 4]], tensor("ends")[:, [0, 4]]),
    ),
    "linear_equality": ({"matrix": "A", "value": "b"}, ph.LinearEquality(tensor("A"), tensor("b"))),
    "linear_inequality": ({"matrix": "A", "bound": [0.5, 2]}, ph.LinearInequality(tensor("A"), torch.tensor([0.5, 2]))),
    "monotone": ({"direction": "decreasing", "axis": "x"}, ph.Monotone("decreasing")),
    "nonnegative": (None, ph.NonNegative()),
    "semicontinuous": ({"least": 0.4}, ph.Semicontinuous(0.4)),
    "simplex": ({"total": "total"}, ph.Simplex(tensor("total"))),
    "total_variation": ({"bound": "total"}, ph.TotalVariation(tensor("total"))),
    "total_variation_diminishing": ({}, ph.TotalVariationDiminishing((3, 5))),
    "total_variation_penalty": ({"weight": 0.1}, ph.TotalVariationPenalty(0.1)),
}


def test_every_entry_is_tested() -> None:
    assert set(EXPECTED) == set(REGISTRY)


@pytest.mark.parametrize("name", EXPECTED)
def test_entries_build_the_constraint_they_name(name: str) -> None:
    options, expected = EXPECTED[name]
    in_time = name == "total_variation_diminishing"
    axes = {"axes": ["time", "x"]} if in_time else {}
    spec = {"constraints": [name if options is None else {name: options}], **axes}
    constraint = constraint_from(spec, Data(cells_from(spec, ARRAYS, (3, NX)), ARRAYS))
    z = torch.randn(1, 15) if in_time else torch.randn(3, NX)
    assert type(constraint) is type(expected)
    torch.testing.assert_close(constraint.residual(z), expected.residual(z), rtol=1e-13, atol=1e-13)
    assert torch.equal(constraint.excess(z), expected.excess(z))
    layer = ph.DPPL("orthogonal")
    values = (layer.project(z, part).value for part in (constraint, expected))
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)


def test_entries_are_joined_and_events_chosen() -> None:
    spec = {"constraints": [{"conservation": {"mass": "total"}}, "nonnegative", {"box": {"upper": "high"}}]}
    high = np.abs(ARRAYS["low"])
    cells = cells_from(spec, ARRAYS, (3, NX))
    constraint = constraint_from(spec, Data(cells, ARRAYS | {"high": high}, np.array([2])))
    u = torch.randn(1, NX)
    own = ph.Conservation(WEIGHTS, torch.tensor([3.0])) & ph.Box(0.0, torch.tensor(high[2:]))
    torch.testing.assert_close(constraint.violation(u), own.violation(u), rtol=1e-13, atol=1e-13)
    assert torch.equal(constraint_from(["nonnegative"], Data(cells)).violation(-u), ph.NonNegative().violation(-u))


def test_cells_gather_and_scatter_by_hand() -> None:
    mask = np.array([[True, True, False], [True, True, True]])  # (x, y)
    cells = Cells(("time", "x", "y"), (4, 2, 3), (2,), ("time",), "x", mask)
    assert (cells.order, cells.shape, cells.lead, cells.fields, cells.variables) == (("y", "x"), (3, 2), (2, 4), 8, 5)
    array = RANDOM.normal(size=(7, 2, 4, 2, 3))
    fields = np.array([6, 1])
    events = cells.gather(array, fields)
    for place, (element, time) in enumerate(((1, 2), (0, 1))):
        by_hand = [array[:, element, time, x, y] for y in range(3) for x in range(2) if mask[x, y]]
        np.testing.assert_array_equal(events[:, place], np.stack(by_hand, 1))
    out = np.zeros_like(array)
    cells.scatter(out, np.arange(8), cells.gather(array, np.arange(8)))
    np.testing.assert_array_equal(out, array * mask)
    np.testing.assert_array_equal(cells.each("m", np.arange(8.0).reshape(2, 4), fields), [6.0, 1.0])


def test_rows_follow_the_order_of_the_grid() -> None:
    arrays = {"A": RANDOM.normal(size=(2, 6)), "mask": np.array([[1.0, 1, 0], [1, 1, 1]])}
    spec = {"constraints": [{"linear_equality": {"matrix": "A"}}, {"monotone": {"axis": "x"}}], "axes": ["x", "y"]}
    cells = cells_from(spec, arrays, (2, 3))
    u = RANDOM.normal(size=(2, 3))
    constraint = constraint_from(spec, Data(cells, arrays))
    event = torch.tensor(cells.gather(u, np.arange(1)))
    expected = arrays["A"] @ (u * arrays["mask"]).ravel()
    np.testing.assert_allclose(constraint.residual(event)[0], expected, rtol=1e-13)
    falls = sorted([u[0, 0] - u[1, 0], u[0, 1] - u[1, 1]])  # the pair at y = 2 is cut by the mask
    np.testing.assert_allclose(sorted(constraint.excess(event)[0].tolist()), falls, rtol=1e-13)


def test_profiles_of_a_plane_and_two_directions() -> None:
    spec = {"constraints": [{"monotone": {"axis": "x"}}, {"monotone": {"axis": "y"}}], "axes": ["x", "y"]}
    cells = cells_from(spec, {}, (3, 4))
    constraint = constraint_from(spec, Data(cells))
    u = RANDOM.normal(size=(3, 4))
    event = torch.tensor(cells.gather(u, np.arange(1)))
    rises = np.concatenate([np.diff(u, axis=0).ravel(), np.diff(u, axis=1).ravel()])
    np.testing.assert_allclose(np.sort(constraint.excess(event)[0]), np.sort(-rises), rtol=1e-13)
    nearest = ph.DPPL("orthogonal").project(event, constraint).value
    assert float(constraint.violation(nearest).max()) < 1e-12


def test_known_values_that_differ_between_slices() -> None:
    arrays = {"first": np.stack([np.ones(NX), *np.zeros((2, NX))]), "start": RANDOM.normal(size=(3, NX))}
    spec = {"constraints": [{"fixed": {"mask": "first", "values": "start"}}], "per": "time", "axes": ["time", "x"]}
    cells = cells_from(spec, arrays, (3, NX))
    z = torch.randn(3, NX)
    value = ph.DPPL("orthogonal").project(z, constraint_from(spec, Data(cells, arrays))).value
    assert torch.equal(value[0], torch.tensor(arrays["start"][0]))
    assert torch.equal(value[1:], z[1:])


def test_a_mass_may_be_known_within_something() -> None:
    spec = {"constraints": [{"conservation": {"mass": "total", "within": 0.01}}, "nonnegative"]}
    constraint = constraint_from(spec, Data(cells_from(spec, ARRAYS, (3, NX)), ARRAYS))
    z = torch.tensor([[0.5], [2.005], [7.0]], dtype=torch.float64).expand(3, NX)
    value = ph.DPPL("orthogonal").project(z, constraint).value
    sums = torch.tensor([0.99, 2.005, 3.01], dtype=torch.float64)
    torch.testing.assert_close(value @ WEIGHTS, sums, rtol=1e-12, atol=0)
    torch.testing.assert_close(value[1], z[1], rtol=1e-14, atol=0)  # inside already


def test_a_mass_may_know_of_a_jump() -> None:
    x, place, fall = ARRAYS["x"], np.array([0.07, 0.35, 0.9]), np.array([1.0, 0.5, 2.0])
    arrays = {"x": x, "place": place, "fall": fall, "mass": place * fall}  # steps from fall to 0
    spec = {"constraints": [{"conservation": {"mass": "mass", "place": "place", "fall": "fall"}}]}
    constraint = constraint_from(spec, Data(cells_from(spec, arrays, (3, NX)), arrays))
    steps = torch.tensor(np.where(x <= place[:, None], fall[:, None], 0.0))
    assert float(constraint.violation(steps).max()) < 1e-15
    plain = constraint_from([{"conservation": {"mass": "mass"}}], Data(cells_from(spec, arrays, (3, NX)), arrays))
    assert float(plain.violation(steps).min()) > 1e-3


def test_least_values_may_be_of_events() -> None:
    spec = {"constraints": [{"semicontinuous": {"least": "total"}}]}
    constraint = constraint_from(spec, Data(cells_from(spec, ARRAYS, (3, NX)), ARRAYS))
    value = ph.DPPL("orthogonal").project(torch.full((3, NX), 0.9, dtype=torch.float64), constraint).value
    torch.testing.assert_close(value, torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64).expand(3, NX))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (["nonnegativ"], "There is no constraint 'nonnegativ'. .* Did you mean 'nonnegative'"),
        ([{"box": {"lowr": 0}}], "option of box 'lowr'. .* Did you mean 'lower'"),
        ([{"conservation": {}}], "conservation lacks mass"),
        ([{"conservation": {"mass": "totl"}}], "mass is 'totl'.* Did you mean 'total'"),
        ([{"conservation": {"mass": None}}], "mass is None"),
        ([{"conservation": {"mass": "A"}}], r"mass has shape \(2, 5\), the fields need \(3,\)"),
        ([{"conservation": {"mass": "total", "within": -0.1}}], "within is -0.1"),
        ([{"conservation": {"mass": "total", "place": 0.5}}], "conservation: It got place=0.5 and fall=None"),
        ([{"conservation": {"mass": 1, "place": 0.5, "fall": 1, "weights": "edge"}}], "leave out the mask, weights"),
        ([{"conservation": {"mass": 1, "place": float("nan"), "fall": 1}}], "The place of a jump has 1 "),
        ([{"semicontinuous": {"least": -1}}], "semicontinuous: .* the least value -1"),
        ([{"linear_equality": {"matrix": "b"}}], r"matrix has shape \(3, 2\)"),
        ([{"box": {"lower": "b"}}], r"lower has shape \(3, 2\), the fields need \(3, 5\)"),
        ([{"total_variation": 2.0}], r"Write '- total_variation: \{bound, axis\}'"),
        ([{"monotone": {"direction": "down"}}], "direction='down' is not known"),
        ([{"monotone": {"axis": "time"}}], "monotone: An event has no axis 'time'"),
        ([{"total_variation_diminishing": {}}], "needs the axis 'time'"),
        ({"constraint": ["nonnegative"]}, "no key 'constraint'. .* Did you mean 'constraints'"),
        ({"constraints": "nonnegative"}, "A list is needed"),
        ({"constraints": ["nonnegative"], "per": "tme", "axes": ["time", "x"]}, "axis 'tme'. .* Did you mean 'time'"),
        ({"constraints": ["nonnegative"], "axes": ["y", "x"], "per": ["x", "y"]}, "at least one of them is left"),
        ({"constraints": ["nonnegative"], "axes": ["x", "y"]}, r"coordinates 'x' have shape \(5,\)"),
    ],
)
def test_bad_specs_are_explained(spec: Any, words: str) -> None:
    with pytest.raises((ParameterError, ShapeError), match=words) as caught:
        constraint_from(spec, Data(cells_from(spec, ARRAYS, (3, NX)), ARRAYS))
    assert caught.value.why
    assert caught.value.fix


def test_grids_without_names_and_masks_that_differ() -> None:
    with pytest.raises(ParameterError, match="--grid-dims"):
        cells_from(["nonnegative"], {}, (3, 4))
    assert cells_from(["nonnegative"], {}, (6,)).axes == ("x",)
    assert cells_from(["nonnegative"], {}, (9, 3, 4), dims=2).batch == (9,)
    spec = {"constraints": ["nonnegative"], "per": "time"}
    assert cells_from(spec, {}, (9, 3, 4, 5), dims=2).axes == ("time", "x", "y")
    mask = np.array([[1.0, 1], [1, 0]])
    with pytest.raises(ParameterError, match="between 1 and 2 of them"):
        Cells(("time", "x"), (2, 2), per=("time",), mask=mask).index  # noqa: B018
    spec = {"constraints": [{"total_variation": {"bound": 1}}], "axes": ["x", "y"]}
    with pytest.raises(ParameterError, match="cut by a mask"):
        constraint_from(spec, Data(cells_from(spec, {"mask": mask}, (2, 2))))
    with pytest.raises(ParameterError, match="no weights"):
        constraint_from([{"conservation": {"mass": 1}}], Data(Cells(("x",), (3,))))


def test_yaml_is_plain_values_only(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("constraints:\n  - box: {lower: 0, upper: .inf}\nper: time\n")
    assert read_spec(path) == {"constraints": [{"box": {"lower": 0, "upper": float("inf")}}], "per": "time"}
    path.write_text("!!python/object/apply:os.getcwd []")
    with pytest.raises(ParameterError, match="cannot be read"):
        read_spec(path)
    with pytest.raises(ParameterError, match="No such file"):
        read_spec(tmp_path / "none.yaml")


def test_files_of_fields(tmp_path: Path) -> None:
    arrays = {"mean": RANDOM.normal(size=(2, 3)).astype(np.float32), "mask": np.array([True, False, True])}
    write_npz(tmp_path / "a.npz", arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    for name, array in arrays.items():
        group.create_array(name, data=array)
    for name in ("a.npz", "a.h5", "a.zarr"):
        read = read_fields(tmp_path / name)
        assert set(read) == set(arrays)
        for key, array in read.items():
            assert array.dtype == np.float64
            np.testing.assert_array_equal(array, arrays[key].astype(float))


class Trap:
    """Leaves a mark if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return builtins.open, (str(self.path), "w")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    np.savez(tmp_path / "object.npz", mean=np.array([Trap(mark)], dtype=object))
    (tmp_path / "bare.npz").write_bytes(pickle.dumps(Trap(mark)))
    for name in ("object.npz", "bare.npz"):
        with pytest.raises(ParameterError, match="pickled objects are never loaded"):
            read_fields(tmp_path / name)
    zarr, numcodecs = pytest.importorskip("zarr"), pytest.importorskip("numcodecs")
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=2)
    group.create_array("mean", shape=(1,), chunks=(1,), dtype="f8", filters=[numcodecs.Pickle()], compressors=None)
    (tmp_path / "a.zarr" / "mean" / "0").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(ParameterError, match="pickled objects"):
        read_fields(tmp_path / "a.zarr")
    assert not mark.exists()
    pickle.loads((tmp_path / "bare.npz").read_bytes()).close()
    assert mark.exists()  # the trap is a real one


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in (("none.npz", "There is no file"), ("mean.csv", "does not end in .npz")):
        with pytest.raises(ParameterError, match=words):
            read_fields(tmp_path / name)
    np.savez(tmp_path / "text.npz", mean=np.array(["a"]))
    with pytest.raises(ParameterError, match=r"'mean' of .* holds <U1"):
        read_fields(tmp_path / "text.npz")
    np.save(tmp_path / "single.npy", np.ones(3))
    (tmp_path / "single.npy").rename(tmp_path / "single.npz")
    (tmp_path / "broken.h5").write_bytes(b"nothing")
    for name in ("single.npz", "broken.h5"):
        with pytest.raises(ParameterError, match="cannot be read"):
            read_fields(tmp_path / name)
    genuine = importlib.import_module

    def without(name: str) -> Any:
        if name == "h5py":
            raise ImportError(name)
        return genuine(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(MissingExtraError, match=r'pip install "probhard\[fields\]"'):
        read_fields(tmp_path / "broken.h5")


def test_an_entry_is_all_that_a_new_constraint_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.REGISTRY, "above", lambda data, level: ph.Box(data.everywhere("level", level), None))
    constraint = constraint_from([{"above": {"level": 2}}], Data(Cells(("x",), (3,))))
    assert float(constraint.violation(torch.zeros(3))) == 2.0
