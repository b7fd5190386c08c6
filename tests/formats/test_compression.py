"""Compressed HDF5 files: what HDF5's own tools see in them, what comes back, and what happens to
damaged ones.
"""

import shutil
import subprocess

import h5py
import numpy as np
import pytest
import torch
from contract_format import equal, state
from launch import run_python
from places import TESTS
from seeds import chosen_seed, examples
from test_hdf5 import FUZZ

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import ConfigError, CorruptError, LoadError
from ft_ckpt.extensions.hdf5 import cerebras_types
from ft_ckpt.extensions.tools import LazyTensor, load, save
from ft_ckpt.formats import ITEM_BYTES

hdf5plugin = pytest.importorskip("hdf5plugin")
SHAPES = [
    (3_000_001,),
    (1, 1),
    (5, 1, 999_983),
    (3, 700, 777),
    (2, 3, 4, 5, 9000),
    (1, 524_289),
    (70_000, 17),
]
FILTERS = {
    "gzip": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf", "fletcher32": True},
    "zstd": hdf5plugin.Zstd(),
    "lz4": hdf5plugin.LZ4(),
    "bitshuffle and lz4": hdf5plugin.Bitshuffle(cname="lz4"),
    "bitshuffle and zstd": hdf5plugin.Bitshuffle(cname="zstd"),
    "blosc": hdf5plugin.Blosc(),
    "blosc2": hdf5plugin.Blosc2(),
}
# as ft_ckpt 0.3 wrote them, with any filter
OLD = sorted((TESTS / "golden/compressed").glob("*.h5"))


def bits(dtype, *shape):
    """A tensor of `dtype` with arbitrary bits, every other run of them zero."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(shape) > 0.5
    data = torch.randint(0, 256, (int(np.prod(shape)) * ITEM_BYTES[dtype],), dtype=torch.uint8)
    data[: len(data) // 2] = 0
    return data.view(kind).view(shape)


def same(found, expected):
    assert list(found) == list(expected)
    assert [name for name in expected if not equal(found[name].values(), expected[name])] == []


def test_every_type_comes_back(tmp_path):
    obj = {
        dtype: bits(dtype, 700, 23)
        for dtype in cerebras_types.STORABLE_DTYPES
        if hasattr(torch, dtype)
    }
    save(obj, tmp_path / "x.h5", compression="gzip")
    same(load(tmp_path / "x.h5", verify=True), obj)
    with h5py.File(tmp_path / "x.h5") as file:
        assert {file[name].compression for name in obj} == {"gzip"}


def test_a_whole_state_comes_back(tmp_path):
    save(state(), tmp_path / "x.h5", compression="gzip")
    same(load(tmp_path / "x.h5"), state())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_hdf5_library_reads_equal_values(shape, tmp_path):
    values = torch.arange(int(np.prod(shape))).remainder_(1000).short().view(shape)
    save({"x": values}, tmp_path / "x.h5", compression="gzip")
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x"].shape == shape
        assert np.array_equal(file["x"][()], values.numpy())
    assert torch.equal(load(tmp_path / "x.h5")["x"].values(), values)


def test_small_scalar_and_empty_tensors_stay_as_they_are(tmp_path):
    obj = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 5000),
        "small": torch.ones(10),
        "large": torch.ones(9999),
    }
    save(obj, tmp_path / "x.h5", compression="gzip")
    with h5py.File(tmp_path / "x.h5") as file:
        assert {name: file[name].chunks for name in obj} == dict.fromkeys(obj) | {"large": (9999,)}
    same(load(tmp_path / "x.h5"), obj)


def test_ties_arrays_and_other_leaves(tmp_path):
    shared = torch.randn(300, 400)
    obj = {
        "a": shared,
        "b": [shared, (1, None, "x")],
        "array": np.arange(90_000.0).reshape(300, 300),
        ("k", 2): 1j,
    }
    save(obj, tmp_path / "x.h5", compression="gzip")
    found = load(tmp_path / "x.h5", map_location="cpu")
    assert found["a"] is found["b"][0]
    assert torch.equal(found["a"], shared)
    assert np.array_equal(found["array"], obj["array"])
    assert found["b"][1] == (1, None, "x")
    assert found["k", 2] == 1j


def test_a_slice_is_read_without_the_rest(tmp_path):
    """A chunk behind the slice is damaged, and the slice is right."""
    values = torch.arange(4000 * 1000).view(4000, 1000)
    save({"x": values}, tmp_path / "x.h5", compression="gzip")
    damage_last_chunk(tmp_path / "x.h5")
    found = load(tmp_path / "x.h5")["x"]
    assert isinstance(found, LazyTensor)
    for start, stop in ((0, 1), (523, 525), (1000, 3000)):
        assert torch.equal(found[start:stop], values[start:stop])
    with pytest.raises(CorruptError, match=r"x\.h5: x"):
        found[3999:4000].values()


def damage_last_chunk(path):
    with h5py.File(path) as file:
        chunks = file["x"].id
        last = chunks.get_chunk_info(chunks.get_num_chunks() - 1)
    with path.open("r+b") as file:
        file.seek(last.byte_offset + last.size // 2)
        file.write(b"damage")


def test_bfloat16_weights_shrink(tmp_path):
    torch.manual_seed(0)
    weights = torch.randn(2000, 1500).mul(0.02).bfloat16()
    save({"w": weights}, tmp_path / "x.h5", compression="gzip", native_floats=True)
    assert (tmp_path / "x.h5").stat().st_size < 0.8 * weights.nbytes
    with h5py.File(tmp_path / "x.h5") as file:
        assert np.array_equal(file["w"][()].astype(np.float32), weights.float().numpy())
    assert torch.equal(load(tmp_path / "x.h5")["w"].values(), weights)


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="hdf5-tools are not installed")
def test_h5dump_names_the_filter(tmp_path):
    save({"x": torch.ones(99, 99)}, tmp_path / "x.h5", compression="gzip")
    shown = subprocess.run(
        ["h5dump", "-pH", "-d", "x", tmp_path / "x.h5"], capture_output=True, text=True, check=True
    )
    assert "COMPRESSION DEFLATE" in shown.stdout
    assert "SHUFFLE" in shown.stdout
    assert "CHUNKED ( 99, 99 )" in shown.stdout


def test_it_is_read_without_any_plugin(tmp_path):
    save({"x": torch.arange(99_999)}, tmp_path / "x.h5", compression="gzip")
    assert (tmp_path / "x.h5").stat().st_size < 99_999 * 4
    code = (
        "import sys, ft_ckpt; print(int(ft_ckpt.load(sys.argv[1])['x'].sum()), 'hdf5plugin' in "
        "sys.modules)"
    )
    done = run_python(code, tmp_path / "x.h5")
    assert done.stdout.split() == [str(99_999 * 99_998 // 2), "False"], done.stderr


def rewritten(source, target, options):
    """A copy of the file with other filters, as programs on the HDF5 library make it."""
    with h5py.File(source) as old, h5py.File(target, "w") as new:
        for name, dataset in old.items():
            if isinstance(dataset, h5py.Dataset) and dataset.size and name != cerebras_types.INDEX:
                copy = new.create_dataset(name, data=dataset[()], chunks=True, **options)
                for key, value in dataset.attrs.items():
                    copy.attrs[key] = value
            else:
                old.copy(name, new)
        for key, value in old.attrs.items():
            new.attrs[key] = value


@pytest.mark.parametrize("name", FILTERS)
def test_every_filter_is_read(name, tmp_path):
    """In a file of ours that another program has rewritten; our tree and types are kept."""
    obj = {"w": torch.randn(700, 80).bfloat16(), "rest": [torch.arange(99_999), (1, "x")]}
    save(obj, tmp_path / "x.h5")
    rewritten(tmp_path / "x.h5", tmp_path / "y.h5", FILTERS[name])
    found = load(tmp_path / "y.h5", verify=True)
    assert equal(found["w"].values(), obj["w"])
    assert equal(found["rest"][0].values(), obj["rest"][0])
    assert found["rest"][1] == (1, "x")


def test_a_damaged_chunk_is_named(tmp_path):
    save({"x": torch.arange(99_999)}, tmp_path / "x.h5", compression="gzip")
    damage_last_chunk(tmp_path / "x.h5")
    found = load(tmp_path / "x.h5")
    with pytest.raises(CorruptError, match=r"x\.h5: x cannot be read"):
        found["x"].values()


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_compressed_files_of_earlier_versions_are_read(path):
    found = load(path, verify=True)
    assert equal(
        found["w"].values(), (torch.arange(60 * 70.0) % 251).view(60, 70).to(torch.bfloat16)
    )
    assert equal(found["rest"][0][2000:2500], torch.arange(2000, 2500).remainder(7))
    assert equal(found["rest"][1].values(), torch.ones(3))
    assert found["pair"] == (1, "x")


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_damage_in_files_of_earlier_versions_is_found(path, tmp_path):
    """Most of their filters have no checksum: without the digest other values would come back."""
    content, expected, refused = path.read_bytes(), load(path)["w"].values(), 0
    with h5py.File(path) as file:
        first = file["w"].id.get_chunk_info(0)
    for at in range(first.byte_offset + 20, first.byte_offset + first.size, 101):
        damaged = bytearray(content)
        damaged[at] ^= 1
        (tmp_path / "x.h5").write_bytes(damaged)
        try:
            found = load(tmp_path / "x.h5")["w"].values()
        except CorruptError:
            refused += 1
        else:
            assert equal(found, expected)
    assert refused


def test_mutated_files_give_right_values_or_an_error(tmp_path):
    save({"w": torch.randn(90, 100).bfloat16(), "odd": 1}, tmp_path / "x.h5", compression="gzip")
    run = run_python(FUZZ, tmp_path / "x.h5", tmp_path / "y.h5", chosen_seed(), examples(60), 0)
    assert run.returncode <= 0, (run.args[1:], run.stderr)  # below: a signal ended the HDF5 library
    assert run.returncode or "'same'" in run.stdout


LIMITED = """
import resource, sys, torch
from ft_ckpt.errors import NoSpaceError
from ft_ckpt.extensions.tools.objects import save
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
torch.manual_seed(0)
try:
    save({"x": torch.randn(1 << 20)}, sys.argv[1], compression="gzip")
except NoSpaceError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.parametrize("full_at", ["the first chunk", "a chunk", "the last metadata"])
def test_a_full_disk_leaves_the_old_file(full_at, tmp_path):
    """The HDF5 library ends the process when it cannot write a chunk, so it is not told."""
    torch.manual_seed(0)
    save({"x": torch.randn(1 << 20)}, tmp_path / "x.h5", compression="gzip")
    size_bytes = (tmp_path / "x.h5").stat().st_size
    limit = {
        "the first chunk": 20_000,
        "a chunk": size_bytes // 2,
        "the last metadata": size_bytes - 64,
    }[full_at]
    save({"old": 1}, tmp_path / "x.h5")
    run = run_python(LIMITED, tmp_path / "x.h5", limit)
    assert run.returncode == 1, run.stderr
    assert "refused: " in run.stderr
    assert "x.h5" in run.stderr
    assert load(tmp_path / "x.h5") == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


@pytest.mark.parametrize(
    ("name", "compression", "words"),
    [
        ("x.safetensors", "gzip", "only for HDF5 files"),
        ("x.pt", "gzip", "only for HDF5 files"),
        ("x.h5", "brotli", "written with 'gzip' or None"),
        ("x.h5", "zstd", "written with 'gzip' or None; other filters are read only, use h5repack"),
    ],
)
def test_other_compressions_are_refused(name, compression, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        save({"x": torch.ones(9999)}, tmp_path / name, compression=compression)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["zstd", "lz4", "blosc2", "bitshuffle"])
def test_a_saver_says_what_to_use_instead(method):
    with pytest.raises(
        ConfigError, match=f"compression='{method}': expected 'gzip' with format='h5'"
    ):
        CheckpointSaver(format="h5", compression=method)


def test_without_hdf5plugin(tmp_path):
    """A process of its own: the filters of hdf5plugin stay with the HDF5 library once they are
    loaded.
    """
    save({"x": torch.arange(9999), "small": torch.ones(3)}, tmp_path / "x.h5")
    rewritten(tmp_path / "x.h5", tmp_path / "y.h5", FILTERS["zstd"])
    code = (
        "import sys; sys.modules['hdf5plugin'] = None; import ft_ckpt; "
        "ft_ckpt.load(sys.argv[1])['x'].values()"
    )
    run = run_python(code, tmp_path / "y.h5")
    assert (
        f"{LoadError.__name__}: y.h5: x is compressed by a filter that is not installed"
        in run.stderr
    )
    assert "install the extra compression " in run.stderr


def test_what_was_loaded_lazily_can_be_compressed(tmp_path):
    values = torch.arange(500_000)
    save({"x": values}, tmp_path / "x.h5")
    found = load(tmp_path / "x.h5")
    save(found, tmp_path / "y.h5", compression="gzip")
    assert not found["x"].is_loaded
    assert torch.equal(load(tmp_path / "y.h5")["x"].values(), values)
