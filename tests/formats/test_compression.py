"""Compressed HDF5 files: what HDF5's own tools see in them, what comes back, and what happens to damaged ones."""

import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from contract_format import equal, state
from launch import run_python
from opened import raw_file
from seeds import chosen_seed, examples
from test_hdf5 import FUZZ

from ft_ckpt.errors import ConfigError, CorruptError
from ft_ckpt.formats import cerebras, hdf5, hdf5_compressed
from ft_ckpt.formats import hdf5_compressed as hdf5_filters
from ft_ckpt.formats.layout import ITEM_BYTES
from ft_ckpt.model.lazy_tensor import LazyTensor
from ft_ckpt.model.objects import load, save

hdf5plugin = pytest.importorskip("hdf5plugin")
CODECS = [(method, shuffle) for method in hdf5_filters.METHODS for shuffle in hdf5_filters.SHUFFLES]
every_codec = pytest.mark.parametrize(("compression", "shuffle"), CODECS)


def bits(dtype, *shape):
    """A tensor of `dtype` with arbitrary bits, every other run of them zero."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(shape) > 0.5
    data = torch.randint(0, 256, (int(np.prod(shape)) * ITEM_BYTES[dtype],), dtype=torch.uint8)
    data[: len(data) // 2] = 0
    return data.view(kind).view(shape)


def same(found, wanted):
    assert list(found) == list(wanted)
    assert [name for name in wanted if not equal(found[name].values(), wanted[name])] == []


@every_codec
def test_every_type_comes_back(compression, shuffle, tmp_path):
    obj = {dtype: bits(dtype, 700, 23) for dtype in cerebras.DTYPES if hasattr(torch, dtype)}
    save(obj, tmp_path / "x.h5", compression=compression, shuffle=shuffle)
    found = load(tmp_path / "x.h5", verify=True)
    file = hdf5.open_hdf5(raw_file(tmp_path / "x.h5"))
    assert set(file.readers) == set(obj)
    same(found, obj)


@every_codec
def test_a_whole_state_comes_back(compression, shuffle, tmp_path):
    save(state(), tmp_path / "x.h5", compression=compression, shuffle=shuffle)
    same(load(tmp_path / "x.h5"), state())


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    "shape", [(3_000_001,), (1, 1), (5, 1, 999_983), (3, 700, 777), (2, 3, 4, 5, 9000), (1, 524_289), (70_000, 17)]
)
@every_codec
def test_the_hdf5_library_reads_equal_values(shape, compression, shuffle, tmp_path):
    values = torch.arange(int(np.prod(shape))).remainder_(1000).short().view(shape)
    save({"x": values}, tmp_path / "x.h5", compression=compression, shuffle=shuffle)
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x"].shape == shape
        assert np.array_equal(file["x"][()], values.numpy())
    assert torch.equal(load(tmp_path / "x.h5")["x"].values(), values)


def test_trees_of_many_levels(tmp_path, monkeypatch):
    """64 chunks are a node, 4096 two levels."""
    monkeypatch.setattr(hdf5_compressed, "CHUNK_BYTES", 64)
    obj = {"long": torch.arange(40_001), "cut": torch.arange(3 * 1000 * 7).view(3, 1000, 7)}
    save(obj, tmp_path / "x.h5", compression="lz4")
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["long"].id.get_num_chunks() > 4096
        for name, tensor in obj.items():
            assert np.array_equal(file[name][()], tensor.numpy())
            corners = [file[name].id.get_chunk_info(number).chunk_offset for number in (0, 1, 64, 65)]
            assert corners == [
                hdf5_compressed.ChunkGrid.for_shape(tensor.shape, 8).chunk_corner(number) for number in (0, 1, 64, 65)
            ]


def test_small_scalar_and_empty_tensors_stay_as_they_are(tmp_path):
    obj = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 5000),
        "small": torch.ones(10),
        "large": torch.ones(9999),
    }
    save(obj, tmp_path / "x.h5", compression="zstd")
    with h5py.File(tmp_path / "x.h5") as file:
        assert {name: file[name].chunks for name in obj} == dict.fromkeys(obj) | {"large": (9999,)}
    same(load(tmp_path / "x.h5"), obj)


def test_ties_arrays_and_other_leaves(tmp_path):
    shared = torch.randn(300, 400)
    obj = {"a": shared, "b": [shared, (1, None, "x")], "array": np.arange(90_000.0).reshape(300, 300), ("k", 2): 1j}
    save(obj, tmp_path / "x.h5", compression="zstd")
    found = load(tmp_path / "x.h5", map_location="cpu")
    assert found["a"] is found["b"][0]
    assert torch.equal(found["a"], shared)
    assert np.array_equal(found["array"], obj["array"])
    assert found["b"][1] == (1, None, "x")
    assert found["k", 2] == 1j


@pytest.mark.parametrize("span", [(0, 1), (523, 525), (0, 4000), (1000, 3999), (3999, 4000)])
def test_a_slice_reads_only_its_chunks(span, tmp_path, monkeypatch):
    values = torch.arange(4000 * 1000).view(4000, 1000)
    save({"x": values}, tmp_path / "x.h5", compression="lz4")
    found, decoded, real = load(tmp_path / "x.h5")["x"], [], hdf5_compressed.decode_chunk
    monkeypatch.setattr(hdf5_compressed, "decode_chunk", lambda *args: decoded.append(1) or real(*args))
    assert torch.equal(found[slice(*span)], values[slice(*span)])
    assert len(decoded) <= (span[1] - span[0]) // 131 + 2
    assert isinstance(found, LazyTensor)


def test_bfloat16_weights_shrink(tmp_path):
    torch.manual_seed(0)
    weights = torch.randn(2000, 1500).mul(0.02).bfloat16()
    save({"w": weights}, tmp_path / "x.h5", compression="zstd", shuffle="bit")
    assert (tmp_path / "x.h5").stat().st_size < 0.8 * weights.nbytes
    save({"w": weights}, tmp_path / "y.h5", compression="zstd", native_floats=True)
    with h5py.File(tmp_path / "y.h5") as file:
        assert np.array_equal(file["w"][()].astype(np.float32), weights.float().numpy())
    assert torch.equal(load(tmp_path / "y.h5")["w"].values(), weights)


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="hdf5-tools are not installed")
@pytest.mark.parametrize(
    ("compression", "shuffle", "number"),
    [
        *(("zstd", "bit", 32008), ("zstd", "byte", 32015), ("gzip", "bit", 1)),
        *(("lz4", None, 32004), ("blosc2", "bit", 32026)),
    ],
)
def test_h5dump_names_the_filter(compression, shuffle, number, tmp_path):
    save({"x": torch.ones(99, 99)}, tmp_path / "x.h5", compression=compression, shuffle=shuffle)
    shown = subprocess.run(["h5dump", "-pH", "-d", "x", tmp_path / "x.h5"], capture_output=True, text=True, check=True)
    # h5dump knows one filter by name: HDF5's own.
    assert ("COMPRESSION DEFLATE" if number == 1 else f"FILTER_ID {number}") in shown.stdout
    assert ("SHUFFLE" in shown.stdout) == (number in (1, 32015))
    assert "CHUNKED ( 99, 99 )" in shown.stdout


def test_gzip_is_read_without_any_plugin(tmp_path):
    save({"x": torch.arange(99_999)}, tmp_path / "x.h5", compression="gzip")
    assert (tmp_path / "x.h5").stat().st_size < 99_999 * 4
    code = "import h5py, sys; print(h5py.File(sys.argv[1])['x'][()].sum(), 'hdf5plugin' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.h5"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == [str(99_999 * 99_998 // 2), "False"]


@pytest.mark.sample(4)
@every_codec
def test_rewritten_by_the_hdf5_library_it_is_still_read(compression, shuffle, tmp_path):
    """Another program moved the chunks: our tree and types are kept, the library finds the values."""
    obj = {"w": torch.randn(700, 800).bfloat16(), ("k", 1): [torch.arange(99_999)]}
    save(obj, tmp_path / "x.h5", compression=compression, shuffle=shuffle)
    with h5py.File(tmp_path / "x.h5") as old, h5py.File(tmp_path / "y.h5", "w") as new:
        for name in old:
            old.copy(name, new)
        for name, value in old.attrs.items():
            new.attrs[name] = value
    found = load(tmp_path / "y.h5", verify=True)
    assert equal(found["w"].values(), obj["w"])
    assert equal(found["k", 1][0].values(), obj["k", 1][0])


def test_a_damaged_chunk_is_named(tmp_path):
    save({"x": torch.arange(99_999)}, tmp_path / "x.h5", compression="zstd")
    index = hdf5.open_hdf5(raw_file(tmp_path / "x.h5")).index
    with (tmp_path / "x.h5").open("r+b") as file:
        file.seek(index.start("x") + 100)
        file.write(b"damage")
    found = load(tmp_path / "x.h5")
    with pytest.raises(CorruptError, match=r"x\.h5: x is damaged"):
        found["x"].values()


@pytest.mark.parametrize(("compression", "shuffle"), [("zstd", "byte"), ("lz4", None), ("blosc2", "bit")])
def test_mutated_files_give_right_values_or_an_error(compression, shuffle, tmp_path):
    save({"w": torch.randn(90, 100).bfloat16(), "odd": 1}, tmp_path / "x.h5", compression=compression, shuffle=shuffle)
    run = run_python(FUZZ, tmp_path / "x.h5", tmp_path / "y.h5", chosen_seed(), examples(60), 0)
    assert run.returncode == 0, (run.args[1:], run.stderr)
    assert "'same'" in run.stdout


LIMITED = """
import resource, sys, torch
from ft_ckpt.errors import NoSpaceError
from ft_ckpt.model.objects import save
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
torch.manual_seed(0)
try:
    save({"x": torch.randn(1 << 20)}, sys.argv[1], compression="zstd")
except NoSpaceError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.parametrize("full_while", ["compressing", "writing"])
def test_a_full_disk_leaves_the_old_file(full_while, tmp_path):
    """What is compressed is as large as the file, but for its metadata."""
    torch.manual_seed(0)
    save({"x": torch.randn(1 << 20)}, tmp_path / "x.h5", compression="zstd")
    limit = (tmp_path / "x.h5").stat().st_size - 4096 if full_while == "writing" else 100_000
    save({"old": 1}, tmp_path / "x.h5")
    run = run_python(LIMITED, tmp_path / "x.h5", limit)
    assert run.returncode == 1
    assert "refused: " in run.stderr
    assert "x.h5" in run.stderr
    assert load(tmp_path / "x.h5") == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("x.safetensors", {"compression": "zstd"}, "only for HDF5 files"),
        ("x.pt", {"compression": "zstd"}, "only for HDF5 files"),
        ("x.h5", {"compression": "brotli"}, "'zstd', 'lz4', 'blosc2', 'gzip'"),
        ("x.h5", {"compression": "zstd", "shuffle": "nibble"}, "'bit', 'byte', None"),
    ],
)
def test_what_is_not_known_is_refused(name, settings, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        save({"x": torch.ones(9999)}, tmp_path / name, **settings)
    assert not list(tmp_path.iterdir())


def test_without_hdf5plugin(tmp_path, monkeypatch):
    save({"x": torch.ones(9999), "small": torch.ones(3)}, tmp_path / "x.h5", compression="zstd")
    hdf5_filters._plugin_function.cache_clear()
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(ConfigError, match="install the extra compression "):
        save({"x": torch.ones(9999)}, tmp_path / "y.h5", compression="zstd")
    found = load(tmp_path / "x.h5")
    assert found["small"].sum() == 3
    with pytest.raises(CorruptError, match="install the extra compression "):
        found["x"].values()


def test_what_was_loaded_lazily_can_be_compressed(tmp_path):
    values = torch.arange(500_000)
    save({"x": values}, tmp_path / "x.h5")
    found = load(tmp_path / "x.h5")
    save(found, tmp_path / "y.h5", compression="blosc2")
    assert not found["x"].is_loaded
    assert torch.equal(load(tmp_path / "y.h5")["x"].values(), values)


@pytest.mark.parametrize(
    ("filters", "at", "found"),
    [
        ([(32008, (0, 4, 4, 1024, 2))], 0, (1 << 40).to_bytes(8, "big")),  # bytes in all
        ([(32008, (0, 4, 4, 1024, 2))], 8, (1 << 20).to_bytes(4, "big")),  # of a block
        ([(32008, (0, 4, 4, 1024, 2))], 8, bytes(4)),
        ([(32008, (0, 4, 4, 1024, 3, 1))], 12, (1 << 20).to_bytes(4, "big")),  # of the first block, compressed
        ([(32004, (0,))], 0, (1 << 40).to_bytes(8, "big")),
        ([(32004, (0,))], 12, (1 << 31).to_bytes(4, "big")),
        ([(32015, (1,))], 0, bytes(4)),
    ],
)  # fmt: skip
def test_filters_are_not_called_on_heads_that_do_not_fit(filters, at, found, monkeypatch):
    """They believe what stands there, and read beyond the chunk."""
    chunk, mask = hdf5_filters.encode_chunk(filters, bytes(range(256)) * 64)
    assert hdf5_filters.decode_chunk(filters, chunk, mask, 1 << 14, "x") == bytes(range(256)) * 64
    monkeypatch.setattr(hdf5_filters, "_apply_filter", None)
    damaged = chunk[:at] + found + chunk[at + len(found) :]
    with pytest.raises(CorruptError, match="x: "):
        hdf5_filters.decode_chunk(filters, damaged, mask, 1 << 14, "x")
