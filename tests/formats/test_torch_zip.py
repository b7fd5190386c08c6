"""Torch files: everything torch writes is read without running it, and torch reads what is written
here.
"""

import argparse
import ctypes
import io
import os
import pickle
import zipfile

import pickles
import pytest
import torch
from contract_format import bytes_of, filled
from hypothesis import given, settings, strategies as st
from raw_files import raw_file
from safetensors.torch import save_file
from seeds import examples

from ft_ckpt.errors import CheckpointError, ConfigError, CorruptError, LoadError, SelectionError
from ft_ckpt.extensions.foreign.torch_files import lay_out_torch, named_leaves, open_torch_file
from ft_ckpt.extensions.tools import load
from ft_ckpt.extensions.tools.converting import convert
from ft_ckpt.formats import ITEM_BYTES, Layout, Spec
from ft_ckpt.formats.files import record_span
from ft_ckpt.storage.io import Region

DTYPES = sorted(ITEM_BYTES)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def spec_of(name, tensor) -> Spec:
    return Spec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def write(path, tensors, ties=None, slice_bytes=7) -> Layout:
    layout = lay_out_torch([spec_of(name, tensor) for name, tensor in tensors.items()], ties or {})

    def regions():
        for spec, start in zip(layout.specs, layout.starts, strict=True):
            tensor = tensors[spec.name].contiguous()
            for low in range(0, tensor.nbytes, slice_bytes):
                size = min(slice_bytes, tensor.nbytes - low)
                yield Region(start + low, tensor.data_ptr() + low, size, tensor)

    content = bytearray()
    for region in layout.weave(regions()):
        assert region.start == len(content)
        content += ctypes.string_at(region.address, region.size_bytes)
    assert len(content) == layout.size_bytes
    path.write_bytes(content)
    return layout


views = {
    "whole": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1) if t.dim() > 1 else t,
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "strided": lambda t: t[::2] if t.dim() else t,
    "tail": lambda t: t[1:] if t.dim() and t.shape[0] else t,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}


@settings(max_examples=examples(80), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=shapes,
    view=st.sampled_from(sorted(views)),
    cut=st.integers(0, 40),
)
def test_every_tensor_torch_saves_is_read(tmp_path_factory, dtype, shape, view, cut):
    path = tmp_path_factory.mktemp("read") / "x.pt"
    tensor = views[view](filled(shape, dtype))
    torch.save({"a": {"é/b.c": tensor}}, path)
    file = open_torch_file(raw_file(path))
    assert file.specs == {"a.é/b.c": spec_of("a.é/b.c", tensor)}
    assert bytes_of(file.read("a.é/b.c")) == bytes_of(tensor)
    assert bytes_of(file.read("a.é/b.c", cut // 2, cut)) == bytes_of(
        tensor.reshape(-1)[cut // 2 : cut]
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=6))
def test_torch_and_zip_tools_read_what_is_written(tmp_path_factory, kinds):
    path = tmp_path_factory.mktemp("write") / "x.pt"
    tensors = {f"layer.{i}/é": filled(shape, dtype) for i, (dtype, shape) in enumerate(kinds)}
    write(path, tensors)
    assert zipfile.ZipFile(path).testzip() is None  # checksums
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert [(n, t.dtype, t.shape, bytes_of(t)) for n, t in loaded.items()] == [
        (n, t.dtype, t.shape, bytes_of(t)) for n, t in tensors.items()
    ]


def test_the_bytes_are_those_torch_writes(tmp_path):
    tensors = {
        "b": filled((3, 5), "bfloat16"),
        "u": filled((4,), "uint16"),
        "s": filled((), "float64"),
    }
    tensors |= {"e": filled((2, 0, 3), "float32"), "f8": filled((9, 2), "float8_e4m3fn")}
    write(tmp_path / "ours.pt", tensors, {"tied": "b"})
    theirs = io.BytesIO()
    torch.save({**tensors, "tied": tensors["b"]}, theirs)
    # a hash of no use to readers
    end = zipfile.ZipFile(theirs).getinfo("archive/.data/serialization_id").header_offset
    assert (tmp_path / "ours.pt").read_bytes()[:end] == theirs.getvalue()[:end]


def test_beyond_4_gib_every_place_is_where_torch_has_it(tmp_path):
    sizes = [5, 5 << 30, 100, 7, 0, 64]
    # pages never touched
    tensors = {f"t{i}": torch.empty(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    with torch.serialization.skip_data():
        torch.save(tensors, tmp_path / "sparse.pt")
    file = raw_file(tmp_path / "sparse.pt")
    with zipfile.ZipFile(tmp_path / "sparse.pt") as theirs:
        spans = [
            record_span(file, theirs.getinfo(f"sparse/data/{index}")) for index in range(len(sizes))
        ]
    archive = lay_out_torch([spec_of(name, tensor) for name, tensor in tensors.items()], {})
    assert [stop - start for start, stop in spans] == sizes
    assert list(archive.starts) == [start for start, _ in spans]


def test_tied_tensors_are_found_and_written_once(tmp_path):
    shared = torch.randn(4, 4)
    torch.save(
        {"one": shared, "view": shared[1:], "two": shared, "other": shared.t()}, tmp_path / "x.pt"
    )
    file = open_torch_file(raw_file(tmp_path / "x.pt"))
    assert (list(file.specs), file.ties) == (["one", "view", "other"], {"two": "one"})
    write(tmp_path / "y.pt", {"one": shared}, {"two": "one"})
    loaded = torch.load(tmp_path / "y.pt")
    assert loaded["one"].data_ptr() == loaded["two"].data_ptr()


def test_what_is_no_tensor_is_named(tmp_path):
    state = {
        "w": torch.ones(1),
        "step": 7,
        "lr": [0.1, None],
        "names": ("a", b"b", b""),
        "size": torch.Size([2]),
    }
    torch.save(state, tmp_path / "x.pt")
    file = open_torch_file(raw_file(tmp_path / "x.pt"))
    assert list(file.specs) == ["w"]
    assert file.skipped == (
        "step: int",
        "lr.0: float",
        "lr.1: NoneType",
        "names.0: str",
        "names.1: bytes",
        "names.2: bytes",
        "size.0: int",
    )


def test_names_that_flatten_alike_are_refused(tmp_path):
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(LoadError, match=r"a\.b: names of several tensors"):
        open_torch_file(raw_file(tmp_path / "x.pt"))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.empty(2, device="meta"),
    ],
    ids=["sparse", "conjugate", "meta"],
)
def test_tensors_that_are_more_than_bytes_are_refused_by_name(tmp_path, tensor):
    torch.save({"fine": torch.ones(1), "odd": tensor}, tmp_path / "x.pt")
    with pytest.raises(LoadError, match="odd"):
        open_torch_file(raw_file(tmp_path / "x.pt"))


def test_a_file_from_before_torch_1_6_is_read(tmp_path):
    tensors = {"a": torch.randn(3, 2), "b": {"c": torch.arange(4)}}
    torch.save(tensors, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    file = open_torch_file(raw_file(tmp_path / "old.bin"))
    assert torch.equal(file.read("a"), tensors["a"].reshape(-1))
    assert torch.equal(file.read("b.c", 1, 3), torch.tensor([1, 2]))


def test_a_program_is_no_state_dict(tmp_path):
    (tmp_path / "x.pt").write_bytes(
        pickles.archive(pickles.dump({}), {"constants.pkl": pickles.dump(())})
    )
    with pytest.raises(LoadError, match="a TorchScript program"):
        open_torch_file(raw_file(tmp_path / "x.pt"))


# Hostile and damaged files


def test_a_storage_that_is_larger_than_its_file_is_refused(tmp_path):
    torch.save(
        {"w": torch.zeros(700, 100)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False
    )
    content = (tmp_path / "old.pt").read_bytes()
    told, larger = (b"J" + number.to_bytes(4, "little") for number in (70_000, 1 << 30))
    assert content.count(told) == 1
    (tmp_path / "old.pt").write_bytes(content.replace(told, larger))
    for read in (lambda path: open_torch_file(raw_file(path)), load):
        with pytest.raises(CorruptError, match=r"old\.pt"):
            read(tmp_path / "old.pt")


@pytest.mark.parametrize("way", sorted(pickles.malicious("")))
@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_pickle_is_run(tmp_path, way, legacy):
    mark = tmp_path / "mark"
    value = {"w": torch.ones(2), "bad": pickles.malicious(mark)[way]}
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(LoadError, match=r"x\.pt"):
        open_torch_file(raw_file(tmp_path / "x.pt"))
    assert not mark.exists()
    if way != "getattr" and not legacy and way != "import":
        torch.load(tmp_path / "x.pt", weights_only=False)
        assert mark.exists(), "the pickle would have done nothing anyway"


@pytest.mark.parametrize("way", sorted(pickles.TAMPER))
def test_a_pickle_cannot_change_its_reader(tmp_path, way):
    (tmp_path / "x.pt").write_bytes(pickles.archive(pickles.TAMPER[way]))
    with pytest.raises(CheckpointError):
        open_torch_file(raw_file(tmp_path / "x.pt"))
    torch.save({"w": torch.ones(3)}, tmp_path / "y.pt")
    assert open_torch_file(raw_file(tmp_path / "y.pt")).read("w").tolist() == [1, 1, 1]


def test_every_foreign_name_is_in_the_error(tmp_path):
    (tmp_path / "x.pt").write_bytes(
        pickles.archive(pickles.dump([pickles.Call(os.getpid), pickles.Call(os.getcwd)]))
    )
    with pytest.raises(LoadError, match=r"posix\.getcwd, posix\.getpid"):
        open_torch_file(raw_file(tmp_path / "x.pt"))


def test_a_structure_that_holds_itself_ends(tmp_path):
    loop: list[object] = []
    loop.append(loop)
    (tmp_path / "x.pt").write_bytes(pickles.archive(pickle.dumps(loop, 2)))
    with pytest.raises(CorruptError, match=r"contains itself|recursion"):
        open_torch_file(raw_file(tmp_path / "x.pt"))


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_a_damaged_file_gives_an_error_or_whole_tensors(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damage")
    torch.save({"a": torch.randn(6, 4).t(), "b": {"c": torch.arange(9)}}, folder / "x.pt")
    content = bytearray((folder / "x.pt").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "x.pt").write_bytes(
        content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    )
    try:
        file = open_torch_file(raw_file(folder / "x.pt"))
        for spec in file.specs.values():
            assert file.read(spec.name).nbytes == spec.size_bytes
    except CheckpointError:
        pass


@pytest.mark.parametrize("name", [".storage_alignment", ".data/serialization_id", "version"])
def test_small_records_are_as_long_as_they_say(tmp_path, name):
    """Torch's own reader makes room for them first: two gigabytes, for a damaged number."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(10)}, path)
    content = path.read_bytes()
    # of its entry in the directory; the two sizes are 20 bytes on
    at = content.rindex(f"x/{name}".encode()) - 46
    assert content[at : at + 4] == b"PK\1\2"
    path.write_bytes(content[: at + 20] + b"\xff\xff\xff\x7f" * 2 + content[at + 28 :])
    for read in (lambda path: open_torch_file(raw_file(path)), load):
        with pytest.raises(CorruptError, match=r"x\.pt"):
            read(path)


def flip(path, pattern, offset=0, bit=1):
    """Flip a bit at `offset` from the only place of `pattern`."""
    content = bytearray(path.read_bytes())
    at = content.index(pattern)
    content[at + offset] ^= bit
    path.write_bytes(content)


VIEWS = torch.arange(3000.0)
SUMMED = {
    "one": {"w": VIEWS.clone()},
    "views": {"b": VIEWS[2000:], "a": VIEWS[:1000]},
    "part": {"w": VIEWS[:10]},
    "turned": {"w": VIEWS.view(30, 100).t()},
}


@pytest.mark.parametrize("kind", SUMMED)
@pytest.mark.parametrize("element", [5, 2500])
@pytest.mark.parametrize("options", [{}, {"dtype": "float64"}], ids=["copied", "cast"])
def test_a_flipped_bit_of_a_storage_is_noticed(tmp_path, kind, element, options):
    """Wherever it is in the storage, whichever part of that the tensors are, and however they are
    read.
    """
    torch.save(SUMMED[kind], tmp_path / "x.pt")
    convert(
        tmp_path / "x.pt", tmp_path / "whole.safetensors", verify=True, progress=False, **options
    )
    flip(tmp_path / "x.pt", VIEWS[element : element + 4].numpy().tobytes())
    with pytest.raises(CorruptError, match=r"x\.pt: data/0 is damaged"):
        convert(tmp_path / "x.pt", tmp_path / "y.safetensors", progress=False, **options)
    assert not (tmp_path / "y.safetensors").exists()


@pytest.mark.parametrize("pattern", [b"_rebuild_tensor_v2", b"weight", b"FloatStorage", b"little"])
@pytest.mark.parametrize("read", [convert, lambda source, _: load(source)], ids=["convert", "load"])
def test_a_flipped_bit_of_what_names_the_tensors_is_noticed(tmp_path, pattern, read):
    torch.save({"weight": torch.ones(3)}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", pattern, offset=3)
    with pytest.raises(CorruptError, match=r"x\.pt.*is damaged"):
        read(tmp_path / "x.pt", tmp_path / "y.h5")
    assert not (tmp_path / "y.h5").exists()


def test_a_file_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(9.0)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert open_torch_file(raw_file(tmp_path / "x.pt")).read("w").tolist() == list(range(9))
    with pytest.raises(ConfigError, match="no checksums"):
        load(tmp_path / "x.pt", verify=True)


@pytest.mark.parametrize(
    "value",
    {
        "module": torch.nn.Linear(2, 2),
        "inside": {"w": torch.ones(2), "layer": torch.nn.Linear(2, 2)},
        "unknown function": b"",
        "call": pickles.Call(torch.fx.immutable_collections.immutable_list, [torch.ones(2)]),
    }.items(),
    ids=lambda item: item[0],
)
def test_tensors_inside_of_unknown_objects_are_not_left_out(tmp_path, value):
    """What is left out is named in the report; weights are none of that."""
    if isinstance(value[1], bytes):
        torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
        with zipfile.ZipFile(tmp_path / "x.pt") as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
            for name, data in records.items():
                archive.writestr(name, data.replace(b"_rebuild_tensor_v2", b"_sebuild_tensor_v2"))
    else:
        torch.save(value[1], tmp_path / "x.pt")
    with pytest.raises(LoadError, match="tensors in an object"):
        convert(tmp_path / "x.pt", tmp_path / "y.h5", progress=False)
    assert not (tmp_path / "y.h5").exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"step": 7, "args": argparse.Namespace()}, "only step: int"),
        ({}, "give a file or folder that has some"),
    ],
)
def test_a_conversion_of_no_tensor_is_refused(tmp_path, value, reason):
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(LoadError, match=rf"x\.pt: no tensors in it.*{reason}"):
        convert(tmp_path / "x.pt", tmp_path / "y.h5", progress=False)
    assert not (tmp_path / "y.h5").exists()


def test_an_empty_safetensors_file_is_not_converted(tmp_path):
    save_file({}, tmp_path / "x.safetensors")
    with pytest.raises(LoadError, match=r"x\.safetensors: no tensors in it"):
        convert(tmp_path / "x.safetensors", tmp_path / "y.h5", progress=False)
    assert not (tmp_path / "y.h5").exists()


@pytest.mark.filterwarnings("ignore:quantize_per")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
@pytest.mark.parametrize("is_zip", [True, False])
def test_quantized_tensors_of_torch_are_refused_by_name(tmp_path, dtype, is_zip):
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, dtype)
    torch.save({"w": quantized}, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(LoadError, match=r"x\.pt: w \(quantized\).*dequantize"):
        convert(tmp_path / "x.pt", tmp_path / "y.h5", progress=False)
    assert torch.equal(load(tmp_path / "x.pt")["w"].dequantize(), torch.ones(4))


@pytest.mark.parametrize("suffix", ["h5", "safetensors"])
def test_an_empty_name_stays_empty(tmp_path, suffix):
    torch.save({"": torch.ones(2), "tensor": torch.zeros(2)}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / f"y.{suffix}", progress=False)
    converted = load(tmp_path / f"y.{suffix}")
    assert converted[""].tolist() == [1, 1]
    assert converted["tensor"].tolist() == [0, 0]


@pytest.mark.parametrize("place", ["inside", "behind"])
@pytest.mark.parametrize("count", [1, 8, 64])
def test_an_old_file_ends_with_its_last_storage(tmp_path, place, count):
    torch.save({"w": torch.arange(9.0)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "x.pt").read_bytes()
    at = len(content) - (20 if place == "inside" else 0)
    (tmp_path / "x.pt").write_bytes(content[:at] + bytes(count) + content[at:])
    with pytest.raises(CorruptError, match=r"x\.pt.*after its last storage"):
        open_torch_file(raw_file(tmp_path / "x.pt"))


@pytest.mark.parametrize("change", [-1, 1])
def test_storages_of_an_old_file_have_as_many_elements_as_its_tensors_say(tmp_path, change):
    torch.save({"w": torch.arange(9.0)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "x.pt").read_bytes()
    at, data = len(content) - 9 * 4 - 8, content[-9 * 4 :]
    data = data[:-4] if change < 0 else bytes(4) + data
    (tmp_path / "x.pt").write_bytes(content[:at] + (9 + change).to_bytes(8, "little") + data)
    for read in (lambda path: open_torch_file(raw_file(path)), load):
        with pytest.raises(CorruptError, match=r"x\.pt.*storage has wrong byte size"):
            read(tmp_path / "x.pt")


def test_a_file_that_changes_while_open_is_noticed(tmp_path):
    torch.save({"a": torch.zeros(100_000)}, tmp_path / "x.pt")
    file = open_torch_file(raw_file(tmp_path / "x.pt"))
    os.truncate(tmp_path / "x.pt", 2000)
    with pytest.raises(CorruptError, match="changed while it was open"):
        file.read("a")


def test_objects_of_harmless_classes_are_left_out_by_name(tmp_path):
    torch.save({"w": torch.ones(10), "args": argparse.Namespace(lr=1)}, tmp_path / "x.pt")
    file = open_torch_file(raw_file(tmp_path / "x.pt"))
    assert (list(file.specs), file.skipped) == (["w"], ("args: argparse.Namespace",))
    with pytest.raises(CorruptError, match=r"x\.pt: torch cannot read it .*argparse\.Namespace"):
        load(tmp_path / "x.pt")


def test_stand_ins_are_gone_after_a_file_was_read(tmp_path):
    """What torch accepts is the same for the whole process."""
    before = set(map(str, torch.serialization.get_safe_globals()))
    torch.save({"w": torch.ones(10), "args": argparse.Namespace(lr=1)}, tmp_path / "x.pt")
    open_torch_file(raw_file(tmp_path / "x.pt"))
    assert set(map(str, torch.serialization.get_safe_globals())) == before


def test_a_record_that_is_shorter_than_its_tensor_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data[:8] if name.endswith("data/0") else data)
    with pytest.raises(CorruptError, match=r"x\.pt"):
        open_torch_file(raw_file(path))


def test_types_torch_has_not_are_refused():
    with pytest.raises(SelectionError, match="w: float3"):
        lay_out_torch([Spec("w", (1,), "float3")], {})


def test_leaves_come_in_order():
    value = {"b": [1, {"c": 2}], "a": (3,)}
    assert list(named_leaves(value)) == [("b.0", 1), ("b.1.c", 2), ("a.0", 3)]


def test_elements_that_are_one_are_not_made_many(tmp_path):
    torch.save({"x": torch.ones(1).expand(1 << 33)}, tmp_path / "x.pt")
    with pytest.raises(CorruptError, match="x takes"):
        open_torch_file(raw_file(tmp_path / "x.pt"))
    assert load(tmp_path / "x.pt")["x"].shape == (1 << 33,)  # as torch has it, without memory


def test_an_old_file_is_not_believed_how_large_its_tensors_are(tmp_path):
    torch.save({"x": torch.ones(64)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "x.pt").read_bytes()
    at = content.rindex((64).to_bytes(8, "little"), 0, len(content) - 256)
    (tmp_path / "x.pt").write_bytes(
        content[:at] + (1 << 40).to_bytes(8, "little") + content[at + 8 :]
    )
    for read in (lambda path: open_torch_file(raw_file(path)), load):
        with pytest.raises(CorruptError, match=r"x\.pt"):
            read(tmp_path / "x.pt")
