"""`save` and `load`: every kind of object comes back as it was, or is refused by its place, in
every format.
"""

import collections
import errno
import json
import math
import os
import struct

import numpy as np
import pytest
import small_checkpoints
import torch
from contract_format import FormatContract, equal
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from seeds import examples

from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    LoadError,
    NoSpaceError,
    SelectionError,
    TargetError,
)
from ft_ckpt.extensions.foreign.torch_files import saving as torch_save
from ft_ckpt.extensions.hdf5 import cerebras_types
from ft_ckpt.extensions.tools import load, save
from ft_ckpt.extensions.tools.converting import convert
from ft_ckpt.formats.trees import Node, decode_node, encode_node, unflatten
from ft_ckpt.storage import local_disk

# torch, whenever it makes a complex32
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


class TestHDF5(FormatContract):
    kind, suffix = "h5", ".h5"


class TestDual(FormatContract):
    kind, suffix = "dual", ".safetensors"


class TestSafetensors(FormatContract):
    kind, suffix, ordered = "safetensors", ".safetensors", False


class TestTorch(FormatContract):
    kind, suffix, lazy = "torch", ".pt", False


Point = collections.namedtuple("Point", "x y")


def same(one, other):
    """Equal in value, type and order, to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return same(list(one), list(other)) and all(
            same(one[k], other[m]) for k, m in zip(one, other, strict=True)
        )
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(allow_nan=True)
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.sampled_from(["a", "a.b", "b", "", ".", "a/b", "0"]),
)
KEYS = st.one_of(TEXTS, st.integers(), st.tuples(TEXTS, st.integers()))
DTYPES = sorted(cerebras_types.STORABLE_DTYPES)
ARRAYS = hnp.arrays(
    st.one_of(
        hnp.scalar_dtypes(),
        hnp.unicode_string_dtypes(max_len=5),
        hnp.byte_string_dtypes(max_len=5),
        hnp.array_dtypes(subtype_strategy=hnp.scalar_dtypes()),
    ),
    hnp.array_shapes(min_dims=0, max_side=4),
)


@st.composite
def tensors(draw):
    """A tensor of any type, any bits, with or without gaps between its elements."""
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_side=4))
    shape = (*shape, 0) if draw(st.integers(0, 9)) == 0 else shape
    data = draw(
        st.binary(
            min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize
        )
    )
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    tensor = (
        torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


LEAVES = st.one_of(
    NUMBERS,
    TEXTS,
    st.binary(),
    tensors(),
    ARRAYS,
    ARRAYS.map(lambda array: array.reshape(-1)[0] if array.size else 0),
    st.sampled_from(
        [
            torch.float8_e4m3fn,
            torch.device("cuda:1"),
            torch.Size([2, 3]),
            bytearray(b"x"),
            b"y" * 5000,
        ]
    ),
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=5),
        st.dictionaries(TEXTS, inner, max_size=4).map(collections.OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 5)),
    ),
    max_leaves=12,
)


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(obj=OBJECTS)
def test_any_object_comes_back(obj, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.h5"
    save(obj, path)
    assert same(load(path, verify=True), obj)


@settings(max_examples=examples(50), deadline=None)
@given(obj=st.dictionaries(KEYS, st.one_of(NUMBERS, TEXTS, st.lists(NUMBERS))))
def test_any_object_comes_back_from_safetensors(obj, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    save(obj, path)
    assert same(load(path), obj)


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_of_torch(name, tmp_path):
    dtype = getattr(torch, name)
    every = torch.arange(256, dtype=torch.uint8).repeat(16)
    tensor = (every % 2).to(torch.bool) if name == "bool" else every.view(dtype)
    save({"x": tensor}, tmp_path / "x.h5")
    assert equal(load(tmp_path / "x.h5")["x"], tensor)


def test_a_whole_training_state(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": (torch.get_rng_state(), np.random.get_state(), __import__("random").getstate()),
        "step": 2**70,
    }
    save(state, tmp_path / "state.h5")
    found = load(tmp_path / "state.h5")
    assert same(found, state)
    assert found["model"]._metadata == state["model"]._metadata
    optimizer.load_state_dict(found["optimizer"])
    assert model.load_state_dict(found["model"]).missing_keys == []


def test_names_that_collide_lose_nothing(tmp_path):
    obj = {
        "a": {"b": 1, "": 5},
        "a.b": torch.ones(2),
        "a/b": torch.ones(3),
        1: 2,
        "1": 3,
        "a.": 6,
        ("x",): 7,
        "('x',)": 8,
    }
    obj |= {
        "b": {"c": torch.ones(4)},
        "b.c": torch.ones(5),
        "b\0": torch.ones(6),
        "b\u2400": torch.ones(7),
        "..": [9],
    }
    save(obj, tmp_path / "x.h5")
    assert same(load(tmp_path / "x.h5"), obj)


@pytest.mark.parametrize("bare", [torch.ones(3), 5, None, [], "text", b"z" * 10_000])
def test_bare_values(bare, tmp_path):
    save(bare, tmp_path / "x.h5")
    assert same(load(tmp_path / "x.h5"), bare)


@pytest.mark.parametrize("suffix", [".h5", ".safetensors"])
def test_refusals_name_their_places_before_anything_is_written(suffix, tmp_path):
    class Odd(dict):
        pass

    obj = {
        "optimizer": {"foo": [0, 1, 2, lambda: 0]},
        "odd": Odd(),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "objects": np.array([None]),
        "two": Point(1, {object(): 2}),
    }
    with pytest.raises(SelectionError) as caught:
        save(obj, tmp_path / f"x{suffix}")
    for place in (
        'state["optimizer"]["foo"][3]',
        'state["odd"]',
        'state["sparse"]',
        'state["meta"]',
        'state["objects"]',
        'state["two"][1][<object',
    ):
        assert place in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_object_inside_itself_is_refused(tmp_path):
    obj = {"a": []}
    obj["a"].append(obj)
    with pytest.raises(SelectionError, match=r'state\["a"\]\[0\]: contains itself'):
        save(obj, tmp_path / "x.h5")


def test_types_that_safetensors_lacks_are_refused(tmp_path):
    with pytest.raises(SelectionError, match="complex128"):
        save({"x": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "x.safetensors")


def test_unknown_suffixes_and_formats(tmp_path):
    with pytest.raises(ConfigError, match=r"\.xyz"):
        save({}, tmp_path / "state.xyz")
    with pytest.raises(ConfigError, match="'zip'"):
        save({}, tmp_path / "state.h5", "zip")


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    torch.save({"x": tmp_path.exists}, tmp_path / "x.pt")
    with pytest.raises(CorruptError, match="without running code"):
        load(tmp_path / "x.pt")


def test_named_tuples_of_unknown_classes_keep_name_and_fields():
    node = Node(
        "namedtuple",
        ("no.such.module", "Outer.Pair", ("left", "right")),
        (),
        (Node("value", 1),) * 2,
    )
    found = unflatten(decode_node(json.loads(json.dumps(encode_node(node)))), None, None)
    assert (type(found).__name__, found.left, found._fields) == ("Pair", 1, ("left", "right"))


@pytest.mark.parametrize(
    "text",
    [
        '["what", 1]',
        '["tensor"]',
        '["array", 0]',
        '["scalar", "|O", ""]',
        '["int", "x"]',
        '["dict", null, [[1]]]',
        '["dtype", "load"]',
        '["namedtuple", 5]',
    ],
)
def test_damaged_trees_are_refused(text):
    with pytest.raises(CorruptError):
        unflatten(decode_node(json.loads(text)), None, None)


def test_a_file_for_the_owner_alone_stays_so(tmp_path):
    for mode in (0o600, 0o640):
        (tmp_path / "x.safetensors").touch()
        (tmp_path / "x.safetensors").chmod(mode)
        save({"a": torch.ones(2)}, tmp_path / "x.safetensors")
        assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    "ending", [".safetensors", ".h5", ".dual.safetensors", ".pt", ".compressed.h5"]
)
def test_a_file_is_synced_before_it_has_its_name(tmp_path, monkeypatch, ending):
    done, fsync, move = [], local_disk.fsync, local_disk.move
    monkeypatch.setattr(
        local_disk, "fsync", lambda handle: (done.append(os.fstat(handle).st_ino), fsync(handle))
    )
    monkeypatch.setattr(local_disk, "move", lambda one, two: (done.append(two), move(one, two)))
    how = (
        {"compression": "gzip"}
        if "compressed" in ending
        else {"format": "dual"}
        if "dual" in ending
        else {}
    )
    save({"a": torch.ones(2)}, tmp_path / f"x{ending}", **how)
    file = tmp_path / f"x{ending}"
    assert file.stat().st_ino in done[: done.index(file)]
    if not how:
        done.clear()
        convert(file, file.with_stem("y"), progress=False)
        assert file.with_stem("y").stat().st_ino in done[: done.index(file.with_stem("y"))]


@pytest.mark.parametrize("ending", [".safetensors", ".h5", ".pt"])
def test_a_name_as_long_as_names_may_be(tmp_path, ending):
    """255 bytes are allowed, which are 80 letters of some scripts."""
    name = "检" * ((255 - len(ending)) // 3) + ending
    save({"a": torch.ones(2)}, tmp_path / name)
    assert torch.equal(load(tmp_path / name)["a"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "stem", ["back\\slash", "..\\up", "new\nline", ".hidden", "not utf-8 \udcff"]
)
@pytest.mark.parametrize("ending", [".safetensors", ".h5", ".pt"])
def test_any_name_that_a_file_can_have(tmp_path, stem, ending):
    save({"a": torch.ones(2)}, tmp_path / f"{stem}{ending}")
    assert torch.equal(load(tmp_path / f"{stem}{ending}")["a"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == [f"{stem}{ending}"]


class Disk:
    """A file that takes `most` bytes at a time; after `calls` of them it raises `error`, or takes
    no more and lies.
    """

    def __init__(self, stream, most=1 << 40, calls=10**9, error=None):
        self.stream, self.most, self.calls, self.error = stream, most, calls, error

    def write(self, data):
        self.calls -= 1
        if self.calls >= 0:
            return self.stream.write(data[: self.most])
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return len(data)


def on(monkeypatch, **disk):
    real = torch_save._CountingStream
    monkeypatch.setattr(torch_save, "_CountingStream", lambda stream: real(Disk(stream, **disk)))


def test_torch_files_are_whole_whatever_is_taken_at_a_time(monkeypatch, tmp_path):
    on(monkeypatch, most=77)
    save({"x": torch.arange(5000.0)}, tmp_path / "x.pt")
    assert equal(torch.load(tmp_path / "x.pt")["x"], torch.arange(5000.0))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EIO, TargetError),
        (errno.ESTALE, TargetError),
        (None, TargetError),
    ],
)
@pytest.mark.parametrize("calls", [0, 3, 9])
def test_a_disk_that_fails_under_torch_leaves_the_old_file(
    number, kind, calls, monkeypatch, tmp_path
):
    """With None, what is written is lost without a word."""
    save({"old": 1}, tmp_path / "x.pt")
    on(monkeypatch, calls=calls, error=number)
    with pytest.raises(kind, match=r"x\.pt"):
        save({"x": torch.arange(5000.0)}, tmp_path / "x.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
    assert load(tmp_path / "x.pt") == {"old": 1}


@pytest.mark.slow
def test_a_torch_file_of_more_than_one_write_takes(tmp_path):
    """Linux takes 2,147,479,552 bytes at a time."""
    path = tmp_path / "x.pt"
    save({"x": torch.ones((2 << 30) + 7, dtype=torch.uint8)}, path)
    try:
        found = load(path)["x"]
        assert (len(found), int(found[-1])) == ((2 << 30) + 7, 1)
    finally:
        path.unlink()


@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".pt"])
def test_what_is_no_file_is_refused_at_once(suffix, tmp_path):
    os.mkfifo(tmp_path / f"x{suffix}")
    with pytest.raises(LoadError, match="no regular file"):
        load(tmp_path / f"x{suffix}")
    with pytest.raises(FileNotFoundError, match=r"none") as caught:
        load(tmp_path / f"none{suffix}")
    assert isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize(
    "text",
    ['["tensor", -1]', '["tensor", Infinity]', '["tensor", true]', '["blob", 1e999, "bytes"]'],
)
def test_leaves_have_numbers_from_zero_on(text):
    with pytest.raises(CorruptError, match="expected the index"):
        decode_node(json.loads(text))


@pytest.mark.parametrize("kind", ["h5", "dual", "safetensors", "torch"])
def test_verify_verifies_or_says_that_it_cannot(kind, tmp_path):
    path = tmp_path / "x.pt"
    save({"x": torch.arange(1000, dtype=torch.int32)}, path, kind)
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<2i", 500, 501))] ^= 1
    if kind in ("h5", "torch"):
        load(path, verify=True)["x"].clone()
        path.write_bytes(content)
        with pytest.raises(CorruptError, match="damaged"):
            load(path, verify=True)["x"].clone()
    else:
        with pytest.raises(ConfigError, match="has no digests"):
            load(path, verify=True)


def test_verify_goes_by_the_manifest_beside_a_file(tmp_path):
    small_checkpoints.save(tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    load(file, verify=True)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError, match="is damaged"):
        load(file, verify=True)
