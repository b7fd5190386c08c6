"""Our HDF5 files: their bytes, what other programs see in them, and what becomes of damaged and
foreign ones.
"""

import shutil
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from contract_format import equal, state
from golden_files import FILES, HERE
from launch import run_python
from raw_files import raw_file
from seeds import chosen_seed, examples

from ft_ckpt.errors import ConfigError, CorruptError, SelectionError
from ft_ckpt.extensions.hdf5 import cerebras_types, hdf5, hdf5_layout
from ft_ckpt.extensions.hdf5.hdf5_metadata import Dataset
from ft_ckpt.extensions.hdf5.hdf5_skeleton import dataset_bytes, hdf5_header
from ft_ckpt.extensions.tools import load, save
from ft_ckpt.formats import Spec

TOOLS = pytest.mark.skipif(shutil.which("h5dump") is None, reason="hdf5-tools are not installed")


def tool(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", FILES)
def test_golden_files_are_read(name):
    expected, found = FILES[name](), load(HERE / name, map_location="cpu")
    assert list(found) == list(expected)
    assert_same(found, expected)


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected)
    elif isinstance(expected, dict):
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected or (found != found and expected != expected)


def test_equal_objects_give_equal_bytes(tmp_path):
    """HDF5 would store the time of a save, in seconds."""
    kinds = {
        "plain.h5": {},
        "packed.h5": {"compression": "gzip"},
        "dual.safetensors": {"format": "dual"},
    }
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name, options in kinds.items():
            save(state() | {"odd": [1, "x", b"y"]}, tmp_path / folder / name, **options)
        time.sleep(1.1)
    for name in kinds:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_large_tensors_lie_on_pages_and_small_ones_behind_them():
    specs = [
        Spec("small", (3,), "float32"),
        Spec("large", (200, 200), "float32"),
        Spec("more", (200, 200), "bfloat16"),
    ]
    layout = hdf5_layout.lay_out_hdf5(specs, {})
    assert [spec.name for spec in layout.specs] == ["large", "more", "small"]
    assert all(start % 4096 == 0 for start in layout.starts[:2])
    assert layout.starts[2] % 64 == 0
    assert layout.trailer_start > layout.starts[2]


def test_the_layout_tells_the_library_where_the_bytes_are(tmp_path):
    save(state(), tmp_path / "x.h5")
    index = hdf5.open_hdf5(raw_file(tmp_path / "x.h5")).index
    with h5py.File(tmp_path / "x.h5") as file:
        for name, spec in index.specs.items():
            data = file["/".join(cerebras_types.dataset_path(name))]
            assert data.shape == spec.shape
            assert data.id.get_offset() == (index.start(name) if spec.size_bytes else None)


def test_metadata_comes_back(tmp_path):
    layout = hdf5_layout.lay_out_hdf5([], {"format": "pt"})
    (tmp_path / "x.h5").write_bytes(
        layout.header + bytes(layout.trailer_start - len(layout.header)) + layout.trailer({})
    )
    assert hdf5.open_hdf5(raw_file(tmp_path / "x.h5")).index.metadata == {"format": "pt"}


def test_types_that_are_not_known_are_refused():
    with pytest.raises(SelectionError, match="x: qint8"):
        hdf5_layout.lay_out_hdf5([Spec("x", (1,), "qint8")], {})


@TOOLS
def test_h5dump_and_h5ls_see_true_shapes_and_labels(tmp_path):
    save(state(), tmp_path / "x.h5")
    assert "DATASPACE  SIMPLE { ( 40, 50, 60 ) / ( 40, 50, 60 ) }" in tool(
        "h5dump", "-H", tmp_path / "x.h5"
    )
    labels = tool("h5dump", "-a", "model.layers.0.bias/dtypes", tmp_path / "x.h5")
    assert "torch.bfloat16" in labels
    assert "Dataset {40/40, 50/50, 60/60}" in tool("h5ls", "-v", tmp_path / "x.h5")
    assert tool("h5dump", "-d", "flags", tmp_path / "x.h5").count("TRUE,") > 3
    assert tool("h5stat", tmp_path / "x.h5")


@TOOLS
def test_native_floats_show_their_values(tmp_path):
    values = [1.0, 57344.0, -2.0, 0.0]
    obj = {
        "b": torch.tensor(values, dtype=torch.bfloat16),
        "e": torch.tensor(values).to(torch.float8_e5m2),
    }
    save(obj, tmp_path / "x.h5", native_floats=True)
    for name, tensor in obj.items():
        assert "1, 57344, -2, 0" in tool("h5dump", "-d", name, tmp_path / "x.h5")
        assert equal(load(tmp_path / "x.h5")[name], tensor)
        with h5py.File(tmp_path / "x.h5") as file:
            assert file[name][()].tolist() == values


@TOOLS
@pytest.mark.parametrize("options", [[], ["-f", "model.layers.0.weight:GZIP=5"]])
def test_rewritten_by_another_tool(options, tmp_path):
    """The index no longer fits, so it is not trusted; the data are found through the library."""
    save(state() | {"pair": (1, "x")}, tmp_path / "x.h5")
    tool("h5repack", *options, tmp_path / "x.h5", tmp_path / "y.h5")
    found = load(tmp_path / "y.h5")
    assert found["pair"] == (1, "x")
    assert all(equal(found[name], value) for name, value in state().items())


def test_changed_by_another_program(tmp_path):
    save(state(), tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["added"] = np.arange(70_000)
        file["number"][()] = 8
        file.attrs["note"] = "x" * 10_000
    found = load(tmp_path / "x.h5")
    assert found["number"] == 8
    assert equal(found["steps"], state()["steps"])
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        del file["number"]
    with pytest.raises(CorruptError, match="number"):
        load(tmp_path / "x.h5")


def test_damaged_values_are_found_by_their_digest(tmp_path):
    save(state(), tmp_path / "x.h5")
    content = bytearray((tmp_path / "x.h5").read_bytes())
    content[hdf5.open_hdf5(raw_file(tmp_path / "x.h5")).index.start("steps")] ^= 1
    (tmp_path / "x.h5").write_bytes(content)
    with pytest.raises(CorruptError, match="steps is damaged"):
        load(tmp_path / "x.h5", verify=True)["steps"].clone()


def test_files_by_others_are_dicts_of_tensors(tmp_path):
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["group/a"] = np.arange(6.0).reshape(2, 3)
        file.create_dataset("group/packed", data=np.arange(1000), chunks=(100,), compression="gzip")
        file["text"], file["words"] = "hello", ["a", "b"]
        file["big_endian"], file["soft"] = np.array([1, 2], ">f4"), h5py.SoftLink("/group/a")
        file["again"] = file["group/a"]
        file.create_group("none")
    found = load(tmp_path / "x.hdf5")
    assert equal(found["group"]["a"], torch.arange(6.0, dtype=torch.float64).view(2, 3))
    assert equal(found["group"]["packed"][150:160], torch.arange(150, 160))
    assert (found["text"], found["words"], found["none"]) == ("hello", ["a", "b"], {})
    assert found["big_endian"].tolist() == [1, 2]
    assert equal(found["soft"], found["again"])


def _external_link(file):
    file["x"] = h5py.ExternalLink("/etc/other.h5", "/x")


def _soft_loop(file):
    file["a"], file["b"] = h5py.SoftLink("/b"), h5py.SoftLink("/a")


def _group_loop(file):
    file.create_group("a")["b"] = file["/"]


def _dangling(file):
    file["a"] = h5py.SoftLink("/nowhere")


def _external_data(file):
    file.create_dataset("x", (10,), "f4", external=[("/etc/passwd", 0, 40)])


def _virtual(file):
    layout = h5py.VirtualLayout((10,), "f4")
    layout[:] = h5py.VirtualSource("/etc/other.h5", "x", (10,))
    file.create_virtual_dataset("x", layout)


def _soft_through_external(file):
    with h5py.File(Path(file.filename).with_name("other.h5"), "w") as other:
        other["value"] = 1
    file["zz"], file["a"] = h5py.ExternalLink("other.h5", "/"), h5py.SoftLink("/zz/value")


def _never_written(file):
    file["filler"] = np.zeros(75_000)
    file.create_dataset("x", (1 << 28,), "f8", chunks=(1 << 16,))


def _groups_of_groups(file):
    place = file
    for _ in range(40):
        below = place.create_group("a")
        place["b"], place = below, below


def _absurd(file):
    file.create_dataset("x", (1 << 40, 1 << 20), "f8", chunks=(1024, 1024))


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "make",
    [
        _external_link,
        _soft_loop,
        _group_loop,
        _dangling,
        _external_data,
        _virtual,
        _absurd,
        _soft_through_external,
        _never_written,
        _groups_of_groups,
    ],
)
def test_files_that_lead_elsewhere_or_lie_are_refused(make, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file)
    with pytest.raises(CorruptError, match=r"x\.h5: "):
        load(tmp_path / "x.h5")


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("__version__", "x"),
        ("__version__", 0.2),
        ("__spec__", "[1"),
        ("__spec__", "[null, 3]"),
        ("w.__metadata__", "{}"),
    ],
)
def test_wrong_attributes_are_refused(attribute, value, tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        del file["__ft_index__"]
        file.attrs[attribute] = value
    with pytest.raises(CorruptError, match=r"x\.h5: "):
        load(tmp_path / "x.h5")


def test_a_file_of_others_that_is_cut_short(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(10_000.0)
    content = (tmp_path / "x.h5").read_bytes()
    (tmp_path / "x.h5").write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptError, match=r"x\.h5: "):
        load(tmp_path / "x.h5")


def test_a_file_of_others_that_is_overwritten_is_read_anew(tmp_path):
    """The HDF5 library shares what it knows of a file that is still open, even when the file is
    another by now.
    """
    kept = []
    for number in (1, 2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file[f"x{number}"] = np.full(3, number)
        (tmp_path / "x.h5").write_bytes((tmp_path / f"{number}.h5").read_bytes())
        kept.append(load(tmp_path / "x.h5"))
    assert kept[1]["x2"].tolist() == [2, 2, 2]
    with pytest.raises(CorruptError, match="changed while it was open"):
        kept[0]["x1"].tolist()


FUZZ = """
import random, sys
import torch
from ft_ckpt.errors import CheckpointError
from ft_ckpt.extensions.tools.objects import load
from contract_format import equal

source, target, seed, count, moved = *sys.argv[1:3], *map(int, sys.argv[3:])
good, dice = open(source, "rb").read(), random.Random(seed)

def tensors(values):
    return {key: each.clone() for key, each in values.items() if isinstance(each, torch.Tensor)}

truth = tensors(load(source))
outcomes = {"same": 0, "refused": 0}
for _ in range(count):
    content = bytearray(good)
    for _ in range(dice.choice([1, 1, 2, 8])):
        place = dice.randrange(len(content))
        flipped = content[place] ^ 1 << dice.randrange(8)
        content[place] = dice.choice([0, 255, dice.randrange(256), flipped])
    content = content[: dice.randrange(len(content))] if dice.random() < 0.1 else content
    with open(target, "wb") as file:
        file.write(content + b"x" * moved)
    try:
        found = load(target, verify=True, format="h5")
        values = tensors(found)
    except CheckpointError:
        outcomes["refused"] += 1
        continue
    assert found.keys() - {"odd"} == truth.keys()
    assert all(equal(values[name], truth[name]) for name in truth)
    outcomes["same"] += 1
print(outcomes)
"""


@pytest.mark.sample("as saved")
@pytest.mark.parametrize(
    ("moved", "count"), [(0, examples(200)), (1, 25)], ids=["as saved", "moved"]
)
def test_mutated_files_give_right_values_or_an_error(moved, count, tmp_path):
    """`moved`: a byte more at the end, so the index is not trusted and the HDF5 library meets the
    damage.
    """
    save(
        {"w": torch.randn(30, 20), "b": torch.ones(3).to(torch.bfloat16), "odd": (1, "x", b"y")},
        tmp_path / "x.h5",
    )
    result = run_python(FUZZ, tmp_path / "x.h5", tmp_path / "y.h5", chosen_seed(), count, moved)
    if moved and result.returncode < 0:
        return  # a damaged file may end the HDF5 library, and with it the process
    assert result.returncode == 0, (result.args[1:], result.stderr)
    assert "'same'" in result.stdout


@pytest.mark.sample("1", "3000")
@pytest.mark.parametrize("count", [1, 3000, 40_000])
def test_the_library_finds_every_name(count, tmp_path):
    """Few names are in the header of a group, many in an index of their own."""
    datasets = []
    for number in range(count):
        attributes = {"n": number} if number % 1000 == 0 else {}
        datasets.append(Dataset((f"d{number}",), "u1", (), attributes, number))
    header = hdf5_header(datasets, {f"a{number}": number for number in range(count)})
    (tmp_path / "x.h5").write_bytes(header + bytes(number % 256 for number in range(count)))
    with h5py.File(tmp_path / "x.h5") as file:
        assert len(file) == len(file.attrs) == count
        for number in range(0, count, max(1, count // 500)):
            assert file[f"d{number}"][()] == number % 256
            assert file.attrs[f"a{number}"] == number
            assert dict(file[f"d{number}"].attrs) == dict(datasets[number].attributes)
        assert "d" not in file


def test_the_library_reads_every_type(tmp_path):
    datasets, end = [], 0
    for name in sorted(
        {
            cerebras_types.stored_type(dtype, native)
            for dtype in cerebras_types.STORABLE_DTYPES
            for native in (False, True)
        }
    ):
        datasets.append(Dataset((name,), name, (2,), {}, end))
        end += dataset_bytes(datasets[-1])
    (tmp_path / "x.h5").write_bytes(hdf5_header(datasets, {}) + bytes(end))
    with h5py.File(tmp_path / "x.h5") as file:
        for dataset in datasets:
            expected = {"bool": "?", "bf16": "f4", "e5m2": "f2"}.get(dataset.type, dataset.type)
            assert file[dataset.type].dtype == np.dtype(expected)
            assert not file[dataset.type][()].any()


@pytest.mark.parametrize(("starts", "alignment"), [((0, 2), 1), ((0, 1), 64)])
def test_a_library_that_places_bytes_otherwise_is_noticed(starts, alignment):
    datasets = [Dataset((f"d{start}",), "u1", (), {}, start, alignment) for start in starts]
    with pytest.raises(ConfigError, match=r"HDF5 file: h5py .* places tensors otherwise"):
        hdf5_header(datasets, {})
