"""Our HDF5 files: their bytes, what other programs see in them, and what becomes of damaged and foreign ones."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch
from contract_format import equal, state
from golden_files import FILES, HERE
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import run_python
from opened import raw_file
from seeds import chosen_seed, examples

from ft_ckpt.errors import CorruptError, SelectionError
from ft_ckpt.formats import cerebras, hdf5, hdf5_layout, hdf5_probe
from ft_ckpt.formats.hdf5_metadata import TYPES, Dataset, hdf5_header, lookup3
from ft_ckpt.formats.layout import Spec
from ft_ckpt.model.objects import load, save

TOOLS = pytest.mark.skipif(shutil.which("h5dump") is None, reason="hdf5-tools are not installed")


def tool(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", FILES)
def test_golden_files(name, tmp_path):
    obj, options = FILES[name]
    save(obj(), tmp_path / name, **options)
    assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes()


def test_large_tensors_lie_on_pages_and_small_ones_behind_them():
    specs = [Spec("small", (3,), "float32"), Spec("large", (200, 200), "float32"), Spec("more", (200, 200), "bfloat16")]
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
            data = file["/".join(cerebras.dataset_path(name))]
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
    assert "DATASPACE  SIMPLE { ( 40, 50, 60 ) / ( 40, 50, 60 ) }" in tool("h5dump", "-H", tmp_path / "x.h5")
    labels = tool("h5dump", "-a", "model.layers.0.bias/dtypes", tmp_path / "x.h5")
    assert "torch.bfloat16" in labels
    assert "Dataset {40/40, 50/50, 60/60}" in tool("h5ls", "-v", tmp_path / "x.h5")
    assert tool("h5dump", "-d", "flags", tmp_path / "x.h5").count("TRUE,") > 3
    assert tool("h5stat", tmp_path / "x.h5")


@TOOLS
def test_native_floats_show_their_values(tmp_path):
    values = [1.0, 57344.0, -2.0, 0.0]
    obj = {"b": torch.tensor(values, dtype=torch.bfloat16), "e": torch.tensor(values).to(torch.float8_e5m2)}
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


@pytest.mark.parametrize(("attribute", "value"), [("__version__", "x"), ("__version__", 0.2), ("__spec__", "[1"),
                                                  ("__spec__", "[null, 3]"), ("w.__metadata__", "{}")])  # fmt: skip
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
    """The HDF5 library shares what it knows of a file that is still open, even when the file is another by now."""
    kept = []
    for number in (1, 2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file[f"x{number}"] = np.full(3, number)
        (tmp_path / "x.h5").write_bytes((tmp_path / f"{number}.h5").read_bytes())
        kept.append(load(tmp_path / "x.h5"))
    assert kept[1]["x2"].tolist() == [2, 2, 2]
    with pytest.raises(CorruptError, match="changed while it was open"):
        kept[0]["x1"].tolist()


@pytest.mark.sample("interpreter")
@pytest.mark.parametrize("way", ["memory", "interpreter"])
def test_a_file_that_cannot_be_tried_is_not_opened(way, tmp_path, monkeypatch):
    """Under a limit as batch systems set it the guard works; where no process can be started, nothing is guessed."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(3)
    if way == "memory":
        code = "import resource as r; r.setrlimit(r.RLIMIT_AS, (7 << 30, 7 << 30)); import sys, ft_ckpt; "
        code += "print(ft_ckpt.load(sys.argv[1])['x'].tolist())"
        run = subprocess.run([sys.executable, "-c", code, tmp_path / "x.h5"], capture_output=True, text=True)
        assert run.stdout == "[0, 1, 2]\n", run.stderr
        return
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CorruptError, match=r"x\.h5: .*ended with code 1"):
        load(tmp_path / "x.h5")


def test_a_file_on_which_the_library_never_ends():
    """Found by mutation: its attributes go round in circles."""
    begun = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(CorruptError, match=r"endless\.h5: .*ended with signal"):
        load(HERE / "endless.h5")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begun < 3, "a small file is given up soon"


def test_a_file_on_which_the_library_asks_for_memory_without_end():
    """Found by mutation; what the other process was refused is not tried again in ours."""
    with pytest.raises(CorruptError, match=r"hungry\.h5: .*more memory than an intact file needs"):
        load(HERE / "hungry.h5")


def test_as_many_threads_as_a_large_machine_has_ask_for_no_memory(tmp_path, monkeypatch):
    """Each would take room for its stack, in a process that has little."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.ones(1_000_000), chunks=(1_000_000,), **hdf5plugin.Blosc())
    for name in ("BLOSC_NTHREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "200")
    assert load(tmp_path / "x.h5", map_location="cpu")["x"].sum() == 1_000_000


@pytest.mark.slow
def test_many_small_datasets_are_read_within_the_memory_of_a_small_file(tmp_path, monkeypatch):
    """Each takes a hundred times its bytes while it is open."""
    monkeypatch.setattr(hdf5_probe, "__file__", str(tmp_path / "probe.py"))
    text = Path(hdf5.__file__).with_name("hdf5_probe.py").read_text()
    (tmp_path / "probe.py").write_text(
        text.replace("(512 << 20, ", "(64 << 20, ").replace("EXPANSION = 16", "EXPANSION = 1")
    )
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number in range(1000):
            file.create_dataset(f"{number}", data=np.arange(30), chunks=(10,), compression="gzip")
    assert load(tmp_path / "x.h5")["999"].tolist() == list(range(30))


def test_a_filter_that_prints_what_it_thinks_of_a_damaged_chunk(tmp_path, monkeypatch):
    """Found by mutation: that was taken for the length of an answer, which was then waited for."""
    monkeypatch.setattr(hdf5_probe, "_SILENT_SECONDS", 5)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        place = file.create_dataset("x", data=np.arange(1000) % 7, chunks=(1000,), **hdf5plugin.LZ4())
        first = place.id.get_chunk_info(0).byte_offset
    content = bytearray((tmp_path / "x.h5").read_bytes())
    content[first + 16] ^= 0xF0  # of the first word of its only block
    (tmp_path / "x.h5").write_bytes(content)
    with pytest.raises(CorruptError, match=r"x\.h5: x cannot be read .*filter returned failure"):
        load(tmp_path / "x.h5", map_location="cpu")


FUZZ = """
import random, sys
import torch
from ft_ckpt.errors import CheckpointError
from ft_ckpt.model.objects import load
from contract_format import equal

source, target, seed, count, moved = *sys.argv[1:3], *map(int, sys.argv[3:])
good, dice = open(source, "rb").read(), random.Random(seed)
truth = {name: tensor.clone() for name, tensor in load(source).items() if isinstance(tensor, torch.Tensor)}
outcomes = {"same": 0, "refused": 0}
for _ in range(count):
    content = bytearray(good)
    for _ in range(dice.choice([1, 1, 2, 8])):
        place = dice.randrange(len(content))
        content[place] = dice.choice([0, 255, dice.randrange(256), content[place] ^ 1 << dice.randrange(8)])
    content = content[: dice.randrange(len(content))] if dice.random() < 0.1 else content
    with open(target, "wb") as file:
        file.write(content + b"x" * moved)
    try:
        found = load(target, verify=True, format="h5")
        values = {name: tensor.clone() for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
    except CheckpointError:
        outcomes["refused"] += 1
        continue
    assert found.keys() - {"odd"} == truth.keys() and all(equal(values[name], truth[name]) for name in truth)
    outcomes["same"] += 1
print(outcomes)
"""


@pytest.mark.sample("as saved")
@pytest.mark.parametrize(("moved", "count"), [(0, examples(200)), (1, 25)], ids=["as saved", "moved"])
def test_mutated_files_give_right_values_or_an_error(moved, count, tmp_path):
    """`moved`: a byte more at the end, so the index is not trusted and the HDF5 library meets the damage."""
    save({"w": torch.randn(30, 20), "b": torch.ones(3).to(torch.bfloat16), "odd": (1, "x", b"y")}, tmp_path / "x.h5")
    result = run_python(FUZZ, tmp_path / "x.h5", tmp_path / "y.h5", chosen_seed(), count, moved)
    assert result.returncode == 0, (result.args[1:], result.stderr)
    assert "'same'" in result.stdout


def jenkins(data):
    """The hash, word by word, as its author describes it."""
    mask, length = 0xFFFFFFFF, len(data)
    a = b = c = (0xDEADBEEF + length) & mask
    turn = lambda value, bits: (value << bits | value >> 32 - bits) & mask  # noqa: E731
    if not data:
        return c
    data += bytes(-length % 12)
    blocks = [[int.from_bytes(data[i + j : i + j + 4], "little") for j in (0, 4, 8)] for i in range(0, len(data), 12)]
    for x, y, z in blocks[:-1]:
        a, b, c = a + x & mask, b + y & mask, c + z & mask
        a = (a - c & mask) ^ turn(c, 4)
        c = c + b & mask
        b = (b - a & mask) ^ turn(a, 6)
        a = a + c & mask
        c = (c - b & mask) ^ turn(b, 8)
        b = b + a & mask
        a = (a - c & mask) ^ turn(c, 16)
        c = c + b & mask
        b = (b - a & mask) ^ turn(a, 19)
        a = a + c & mask
        c = (c - b & mask) ^ turn(b, 4)
        b = b + a & mask
    a, b, c = a + blocks[-1][0] & mask, b + blocks[-1][1] & mask, c + blocks[-1][2] & mask
    c = (c ^ b) - turn(b, 14) & mask
    a = (a ^ c) - turn(c, 11) & mask
    b = (b ^ a) - turn(a, 25) & mask
    c = (c ^ b) - turn(b, 16) & mask
    a = (a ^ c) - turn(c, 4) & mask
    b = (b ^ a) - turn(a, 14) & mask
    return (c ^ b) - turn(b, 24) & mask


@given(st.binary(max_size=60))
@settings(deadline=None)
def test_lookup3(data):
    assert lookup3([data]) == [jenkins(data)]
    assert lookup3([data] * 20) == [jenkins(data)] * 20


@pytest.mark.sample("1", "3000")
@pytest.mark.parametrize("count", [1, 3000, 40_000])
def test_the_library_finds_every_name(count, tmp_path):
    """One leaf of a name index, and more than one."""
    datasets = [Dataset((f"d{i}",), "u1", (), {"n": i} if i % 1000 == 0 else {}, i) for i in range(count)]
    content = hdf5_header(datasets, {f"a{i}": i for i in range(count)}, count) + bytes(i % 256 for i in range(count))
    (tmp_path / "x.h5").write_bytes(content)
    with h5py.File(tmp_path / "x.h5") as file:
        assert len(file) == len(file.attrs) == count
        for number in range(0, count, max(1, count // 500)):
            assert file[f"d{number}"][()] == number % 256
            assert file.attrs[f"a{number}"] == number
        assert "d" not in file


def test_the_library_reads_every_type(tmp_path):
    types = [name for name in TYPES if name not in ("bf16", "e5m2")]
    datasets = [Dataset((name,), name, (2,), {}, 32 * at) for at, name in enumerate(types)]
    (tmp_path / "x.h5").write_bytes(hdf5_header(datasets, {}, 32 * len(types)) + bytes(32 * len(types)))
    with h5py.File(tmp_path / "x.h5") as file:
        assert all(file[name].dtype == np.dtype("?" if name == "bool" else name) for name in types)
