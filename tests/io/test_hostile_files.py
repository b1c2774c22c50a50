"""Files that are not what they seem: bombs, wrong headers, links, encrypted members, endless YAML."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from probhard.errors import ParameterError
from probhard.io import arrays
from probhard.io.fields import read_fields, write_npz
from probhard.io.spec import read_spec


def npy(shape: tuple[int, ...], data: bytes, descr: str = "<f8") -> bytes:
    """The bytes of a .npy file whose header declares any shape."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue() + data


def archive(path: Path, content: bytes, compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("mean.npy", content)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ParameterError) as error:
        read_fields(path)
    return str(error.value)


def test_the_declared_size_counts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(arrays, "available", lambda: 10_000_000)
    small = archive(tmp_path / "small.npz", npy((1000,), bytes(8000)))
    assert read_fields(small)["mean"].shape == (1000,)
    bomb = archive(tmp_path / "bomb.npz", npy((2_000_000,), bytes(16_000_000)))  # 16 kB on disk
    assert bomb.stat().st_size < 100_000
    assert "of memory" in refused(bomb)


@pytest.mark.parametrize("shape", [(10**15,), (1001,), (999,), (10**9, 10**9, 10**9)])
def test_headers_that_lie(tmp_path: Path, shape):
    message = refused(archive(tmp_path / "lie.npz", npy(shape, bytes(8000))))
    assert "of memory" in message or "declares the shape" in message


def test_members_that_cannot_be_read(tmp_path: Path):
    path = archive(tmp_path / "m.npz", npy((3,), bytes(24)), zipfile.ZIP_STORED)
    content = bytearray(path.read_bytes())
    central = content.index(b"PK\x01\x02")
    for offset, value, message in ((8, 1, "encrypted"), (10, 99, "unknown compression")):
        changed = bytearray(content)
        changed[central + offset : central + offset + 2] = struct.pack("<H", value)
        path.write_bytes(bytes(changed))
        assert message in refused(path)
    path.write_bytes(bytes(content[: len(content) // 2]))
    refused(path)
    damaged = bytearray(content)
    damaged[content.index(b"mean.npy") + 8 + 128] ^= 255  # a byte of the data: the checksum is wrong
    path.write_bytes(bytes(damaged))
    refused(path)


def test_pickles_are_not_loaded(tmp_path: Path):
    np.savez(tmp_path / "p.npz", mean=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "pickled" in refused(tmp_path / "p.npz")


def test_an_array_named_file_is_written_and_read(tmp_path: Path):
    written = {"file": np.arange(3.0), "mean": np.ones((2, 2)), "allow_pickle": np.zeros(1)}
    write_npz(tmp_path / "f.npz", written)
    read = read_fields(tmp_path / "f.npz")
    assert set(read) == set(written)
    np.testing.assert_array_equal(read["file"], written["file"])


def test_hdf5_reads_no_other_file(tmp_path: Path, monkeypatch):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["mean"] = np.ones(3)
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["mean"] = h5py.ExternalLink("secret.h5", "/mean")
    assert "link to the file" in refused(tmp_path / "link.h5")
    (tmp_path / "raw.bin").write_bytes(bytes(24))
    with h5py.File(tmp_path / "external.h5", "w") as file:
        file.create_dataset("mean", (3,), "f8", external=[(str(tmp_path / "raw.bin"), 0, 24)])
    assert "another file" in refused(tmp_path / "external.h5")
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "mean", (3,))
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("mean", layout)
    assert "another file" in refused(tmp_path / "virtual.h5")
    with h5py.File(tmp_path / "sparse.h5", "w") as file:  # 8 TB declared, nothing stored
        file.create_dataset("mean", (10**12,), "f8", chunks=(1024,))
    assert "of memory" in refused(tmp_path / "sparse.h5")


def test_zarr_with_wrong_sizes(tmp_path: Path):
    zarr = pytest.importorskip("zarr")
    zarr.open_group(str(tmp_path / "large.zarr"), mode="w").create_array(
        "mean", shape=(10**12,), dtype="f8", chunks=(9,)
    )
    assert "of memory" in refused(tmp_path / "large.zarr")
    group = zarr.open_group(str(tmp_path / "chunks.zarr"), mode="w")
    group.create_array("mean", shape=(3,), dtype="f8", chunks=(10**10,))
    assert "chunks" in refused(tmp_path / "chunks.zarr")
    whole = zarr.open_group(str(tmp_path / "cut.zarr"), mode="w")
    whole.create_array("mean", shape=(100,), dtype="f8", chunks=(100,))[:] = 1.0
    (chunk,) = (file for file in (tmp_path / "cut.zarr" / "mean").rglob("*") if file.is_file() and file.name == "0")
    chunk.write_bytes(chunk.read_bytes()[:7])
    refused(tmp_path / "cut.zarr")


LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "more than 100000 values"),
        ("[" * 5000, "nested deeper"),
        ("{a: " * 31 + "1" + "}" * 31, "nested deeper"),
        ("a: &a [*a]", "contains itself"),
        ("mass: " + "9" * 5000, "a number of 5000 digits"),
        ("when: 2023-02-30", "day"),
        ("x" * 1_000_001, "more than 1000000 bytes"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine"),
        ("a: \x00", "special characters"),
        ("a: [1", "expected"),
        ("epochs: 3\nepochs: 4", "the key 'epochs' is there twice"),
        ("a:\n  - box: {lower: 0, lower: 1}", "the key 'lower' is there twice"),
    ],
)
def test_yaml_beyond_plain_values(tmp_path: Path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ParameterError, match="plain values") as error:
        read_spec(path)
    assert message in str(error.value)


def test_yaml_that_is_not_text(tmp_path: Path):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ParameterError):
        read_spec(tmp_path / "c.yaml")
    with pytest.raises(ParameterError):
        read_spec(tmp_path)


def test_aliases_and_anchors_still_work(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("a: &a [1, 2]\nb: *a\nc: {<<: {d: 1}}\n")
    assert read_spec(tmp_path / "c.yaml")["b"] == [1, 2]
