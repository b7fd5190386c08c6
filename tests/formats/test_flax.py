"""Files of flax: its own, any that MessagePack can say, and damaged ones."""

import json
import shutil

import library_files
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from library_files import numbered
from seeds import examples

import ft_ckpt
from ft_ckpt.errors import CorruptError
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.storage.places import open_place

GOLDEN = library_files.FOLDER
NONE = torch.empty(0, 2, dtype=torch.float16)
ARRAYS = {
    "params/dense/kernel": numbered(0, 3, 4),
    "params/dense/bias": numbered(1, 4, dtype=torch.bfloat16),
    "steps/0": torch.tensor(200, dtype=torch.int32),
    "steps/1": NONE,
    "scale": torch.tensor(400.0, dtype=torch.float64),
}
PIECES = {"w": numbered(0, 5, 7, dtype=torch.float64), "b": numbered(1, 2, dtype=torch.float64)}


def check_file(path, wanted):
    file = open_source(open_place(path))
    assert set(file.specs) == set(wanted)
    for name, tensor in wanted.items():
        found = file.read(name).view(file.specs[name].shape)
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), name
        half = tensor.numel() // 2
        assert torch.equal(file.read(name, half, tensor.numel()), tensor.reshape(-1)[half:]), name
    return file


def test_arrays_have_the_names_of_their_keys():
    file = check_file(GOLDEN / "flax.msgpack", ARRAYS)
    assert list(file.skipped) == ["rate: float", "name: str", "wave: complex", "none: NoneType"]


def test_a_file_can_be_one_array_in_pieces(tmp_path):
    array = b"\x93\x91\x02\xa5uint8\xc4\x02"  # its shape, type and bytes
    pieces = [b"\xc7%c\x01" % (len(array) + 2) + array + data for data in (b"ab", b"cd")]
    content = b"\x83\xb9__msgpack_chunked_array__\xc3\xa5shape\x81\xa10\x04\xa6chunks\x82"
    content += b"\xa10" + pieces[0] + b"\xa11" + pieces[1]
    (tmp_path / "x.msgpack").write_bytes(content)
    file = open_source(open_place(tmp_path / "x.msgpack"))
    assert bytes(file.read("array").tolist()) == b"abcd"


def test_an_array_in_pieces_is_one():
    file = check_file(GOLDEN / "pieces.msgpack", PIECES)
    for low, high in [(0, 9), (7, 8), (6, 33), (30, 35), (4, 4)]:
        assert torch.equal(file.read("w", low, high), PIECES["w"].reshape(-1)[low:high])


@pytest.mark.parametrize("options", [{}, {"map_location": "cpu"}])
def test_load_gives_the_tree(options):
    found = ft_ckpt.load(GOLDEN / "flax.msgpack", **options)
    assert torch.equal(found["params"]["dense"]["kernel"], ARRAYS["params/dense/kernel"])
    assert (found["rate"], found["name"], found["wave"], found["none"]) == (
        0.5,
        "net",
        1 + 2j,
        None,
    )


def test_a_folder_of_shards_is_converted(tmp_path):
    names = {
        "flax_model-00001-of-00002.msgpack": "flax.msgpack",
        "flax_model-00002-of-00002.msgpack": "pieces.msgpack",
    }
    for name, source in names.items():
        shutil.copy(GOLDEN / source, tmp_path / name)
    first, second = names
    places = {"weight_map": dict.fromkeys(ARRAYS, first) | dict.fromkeys(PIECES, second)}
    (tmp_path / "flax_model.msgpack.index.json").write_text(json.dumps(places))
    report = ft_ckpt.convert(
        tmp_path, tmp_path.parent / "flax.safetensors", verify=True, progress=False
    )
    assert report.tensors == len(ARRAYS) + len(PIECES)
    (tmp_path / second).unlink()
    with pytest.raises(CorruptError, match=f"{second}: missing"):
        open_source(open_place(tmp_path))


def packed(value):
    """`value` as flax writes it, by the library that flax writes it with."""
    msgpack = pytest.importorskip("msgpack")

    def extension(one):
        if isinstance(one, complex):
            return msgpack.ExtType(2, msgpack.packb((one.real, one.imag)))
        return msgpack.ExtType(1, msgpack.packb((one.shape, one.dtype.name, one.tobytes())))

    return msgpack.packb(value, default=extension, strict_types=True)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.binary(max_size=40),
    st.complex_numbers(allow_nan=False),
    st.builds(
        lambda shape, kind: np.ones(shape, kind),
        st.lists(st.integers(0, 4), max_size=3),
        st.sampled_from(["int8", "float16", "complex64", "bool", "uint32"]),
    ),
)
keys = st.text(
    st.characters(blacklist_characters="/", blacklist_categories=("Cs",)), min_size=1, max_size=6
)
trees = st.dictionaries(
    keys,
    st.recursive(
        leaves,
        lambda inner: st.dictionaries(keys, inner, max_size=20) | st.lists(inner, max_size=20),
    ),
    min_size=1,
    max_size=20,
)


def plain(value):
    """`value` with what tensors are made of in place of arrays and tensors."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    array = value.numpy() if isinstance(value, torch.Tensor) else value
    return (
        (array.shape, array.dtype.name, array.tobytes())
        if isinstance(array, np.ndarray)
        else (type(value), value)
    )


@settings(max_examples=examples(25), deadline=None)
@given(trees)
@example({"seven_{": None})  # a brace where the header of safetensors begins
def test_any_tree_comes_back(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("flax") / "x.msgpack"
    path.write_bytes(packed(tree))
    assert plain(ft_ckpt.load(path, "cpu")) == plain(tree)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x81\xa1a\xc7\x00\x07", "extension type 7"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "a list of 4,294,967,295"),
        (b"\x81\xa1a" + b"\x91" * 400 + b"\x00", "levels deep"),
        (b"\x82\xa1a\x00\xa1a\x00", "each once"),
        (b"\x81\xa1a\x00\x00", "1 bytes after its end"),
        (b"\x81\xa1a\xc1", "begins no value"),
        (b"\x81\xa1a\xa9b", "ends at byte"),
        (b"\x81\xa1a\xc7\x0a\x01\x93\x91\x04\xa4int8\xc4\x01x", "1 bytes for 'int8'"),
        (b"\x81\xa1a\xc7\x0c\x01\x93\x91\x04\xa6object\xc4\x01x", "1 bytes for 'object'"),
        pytest.param(
            b"\x81\xa1a\xdd\x00\x10\x00\x02" + bytes((1 << 20) + 2),
            "values",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_no_tree_of_arrays_is_refused(tmp_path, data, message):
    (tmp_path / "x.msgpack").write_bytes(data)
    with pytest.raises(CorruptError, match=message):
        open_source(open_place(tmp_path / "x.msgpack"))


@pytest.mark.slow
def test_what_flax_writes_now_is_read(tmp_path, monkeypatch):
    pytest.importorskip("flax")
    maker = library_files.file_maker()
    monkeypatch.setattr(maker, "HERE", tmp_path)
    maker.flax()
    check_file(tmp_path / "flax.msgpack", ARRAYS)
    check_file(tmp_path / "pieces.msgpack", PIECES)
