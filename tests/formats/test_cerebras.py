"""Cerebras checkpoints: ours are read by their rules, theirs are read by us, and nothing in a file
is run.
"""

import functools
import io
import json
import pickle
import struct
import sys
import types
import urllib.parse

import h5py
import numpy as np
import pytest
import torch
from contract_format import equal

from ft_ckpt.errors import CorruptError
from ft_ckpt.extensions.tools import load, save
from ft_ckpt.formats.files import OpaqueObject

LEAF = {"type": None, "context": None, "children_spec": []}
TEXT = h5py.string_dtype()


def spec(kind, context, children):
    context = context if isinstance(context, dict) else json.dumps(context)
    return {"type": kind, "context": context, "children_spec": children}


def tree(node):
    return [None, json.dumps([1, node])]


class Maker:
    """A checkpoint of format 0.5 as its own tools write it, leaf by leaf."""

    def __init__(self, path, libver=("v108", "v110"), **dataset):
        self.file, self.dataset = h5py.File(path, "w", libver=libver), dataset
        self.file.attrs["__version__"] = 0.5

    def leaf(self, name, kind, flag="__NONE__", /, **known):
        inner = {"__TYPE__": kind, flag: True, **known}
        outer = {"__spec__": tree(spec("builtins.dict", [name], [LEAF])), "__objects__": [name]}
        self.file.attrs[f"{name}.__metadata__"] = json.dumps(
            outer | {f"{name}.__metadata__": inner}
        )

    def tensor(self, name, array, dtype, path=None, **known):
        known = {
            "__TORCH__": True,
            "shapes": [list(array.shape)],
            "dtypes": [f"torch.{dtype}"],
        } | known
        self.leaf(
            name, "TorchTensorSerializer", "__NUMPY__", **known, **({"key": path} if path else {})
        )
        options = self.dataset if array.shape else {}
        data = self.file.create_dataset(path or name, data=array, **options)
        data.attrs["__NUMPY__"], data.attrs["__TYPE__"] = True, "TorchTensorSerializer"
        data.attrs.create("dtypes", [f"torch.{dtype}"], dtype=TEXT)
        return data

    def pickled(self, name, data):
        self.leaf(name, "ObjectSerializer", "__BYTES__")
        self.file.create_dataset(name, dtype="f4").attrs["__BYTES__"] = np.frombuffer(data, "V1")

    def close(self, node, success=True):
        self.file.attrs["__spec__"] = json.dumps(tree(node))
        if success is not None:
            self.file.attrs["__SUCCESS__"] = success
        self.file.close()


def every_leaf(path, **options):
    """A file with every kind of leaf; what it holds."""
    maker = Maker(path, **options)
    bits = np.arange(600, dtype="i2").reshape(20, 30)
    maker.tensor("model.w", bits, "bfloat16")
    maker.tensor("model.b", np.float32([1.5, 2]), "float32")
    maker.tensor("model.flag", np.array([True, False]), "bool")
    maker.tensor("model.i8", np.int8([-1, 2]), "int8")
    maker.tensor("model.c", np.complex64([1j, 2]), "complex64")
    maker.tensor("model.0d", np.float64(3), "float64")
    maker.tensor("model.empty", np.zeros((0, 3), "f4"), "float32")
    maker.tensor("model.cast", np.uint8([0, 2]), "bool")
    maker.leaf("model.tied", "LinkedObject", key="model.w", __LINKED__=True)
    for name, value in {"int": 2**80, "nan": float("nan"), "yes": True}.items():
        maker.leaf(f"s.{name}", "ScalarSerializer", scalar_value=value)
    maker.leaf("s.text", "StringSerializer", string_value="a\0\ud800")
    maker.leaf("s.none", "NoneSerializer")
    maker.leaf("list.0", "ScalarSerializer", scalar_value=1.5)
    maker.leaf("list.1.0", "DeferredFullTensor", shape=[2, 2], dtype="torch.bfloat16", fill_value=3)
    maker.leaf("np", "NumpyArraySerializer", "__NUMPY__", is_bfloat16=False)
    maker.file.create_dataset("np", data=np.array([1, 2], ">i4"))
    maker.pickled(
        "bytes", pickle.dumps((b"x" * 5, 1j, frozenset({1}), np.float32(2), torch.float8_e5m2), 4)
    )
    maker.leaf("dd.<class 'list'>", "ScalarSerializer", scalar_value=1)
    maker.leaf("dd.['a', 'b']", "ScalarSerializer", scalar_value=2)
    names = ["w", "b", "flag", "i8", "c", "0d", "empty", "cast", "tied"]
    factory = {
        "default_factory_module": "builtins",
        "default_factory_name": "list",
        "dict_context": ["a", "b"],
    }
    maker.close(
        spec(
            "builtins.dict",
            ["model", "s", "list", "np", "bytes", "dd", "set", 5],
            [
                spec("collections.OrderedDict", names, [LEAF] * len(names)),
                spec("builtins.dict", ["int", "nan", "yes", "text", "none"], [LEAF] * 5),
                spec("builtins.list", None, [LEAF, spec("builtins.tuple", None, [LEAF])]),
                LEAF,
                LEAF,
                spec("collections.defaultdict", factory, [LEAF] * 2),
                spec("builtins.set", None, []),
                spec("collections.deque", None, []),
            ],
        )
    )
    return torch.from_numpy(bits).view(torch.bfloat16)


@pytest.mark.parametrize(
    "options", [{}, {"chunks": True}, {"compression": "gzip"}, {"libver": "earliest"}]
)
def test_every_leaf_is_read(options, tmp_path):
    weight = every_leaf(tmp_path / "x.mdl", **options)
    found = load(tmp_path / "x.mdl")
    model = found["model"]
    assert equal(model["w"], weight)
    assert model["tied"] is model["w"]
    assert equal(model["w"][3:5], weight[3:5])
    assert equal(model["b"], torch.tensor([1.5, 2]))
    assert equal(model["flag"], torch.tensor([True, False]))
    assert equal(model["i8"], torch.tensor([-1, 2], dtype=torch.int8))
    assert equal(model["c"], torch.tensor([1j, 2]))
    assert equal(model["0d"], torch.tensor(3.0, dtype=torch.float64))
    assert model["empty"].shape == (0, 3)
    assert equal(model["cast"], torch.tensor([False, True]))
    assert found["s"]["int"] == 2**80
    assert found["s"]["nan"] != found["s"]["nan"]
    assert (found["s"]["yes"], found["s"]["text"], found["s"]["none"]) == (True, "a\0\ud800", None)
    assert found["list"][0] == 1.5
    assert equal(found["list"][1][0], torch.full((2, 2), 3, dtype=torch.bfloat16))
    assert found["np"].dtype == ">i4"
    assert found["np"].tolist() == [1, 2]
    assert found["bytes"] == (b"xxxxx", 1j, frozenset({1}), np.float32(2), torch.float8_e5m2)
    assert (dict(found["dd"]), found["dd"].default_factory) == ({"a": 1, "b": 2}, list)
    assert (found["set"], len(found[5])) == (set(), 0)


def lz4_frame(data, block):
    frame = struct.pack(">QI", len(data), block)
    for at in range(0, len(data), block):
        part = data[at : at + block]
        frame += struct.pack(">I", len(part)) + part
    return frame


@pytest.mark.parametrize("packed", [False, True])
def test_lz4_chunks_are_read(packed, tmp_path):
    """The shape of their files: chunks under filter 32004, blocks raw where they do not shrink."""
    maker = Maker(tmp_path / "x.h5")
    values = np.arange(35 * 10, dtype="i2").reshape(35, 10)
    space, options = h5py.h5s.create_simple(values.shape), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    options.set_chunk((10, 8))
    options.set_filter(32004, h5py.h5z.FLAG_OPTIONAL, (0,))
    data = h5py.Dataset(h5py.h5d.create(maker.file.id, b"w", h5py.h5t.NATIVE_INT16, space, options))
    for row in range(0, 35, 10):
        for column in range(0, 10, 8):
            chunk = np.zeros((10, 8), "i2")
            part = values[row : row + 10, column : column + 8]
            chunk[: part.shape[0], : part.shape[1]] = part
            frame = lz4_frame(chunk.tobytes(), 64)
            if packed:
                block = bytes((15 << 4, 160 - 15)) + chunk.tobytes()  # a block of literals
                frame = struct.pack(">QII", 160, 160, len(block)) + block
            data.id.write_direct_chunk((row, column), frame)
    data.attrs["__NUMPY__"] = True
    maker.leaf(
        "w",
        "TorchTensorSerializer",
        "__NUMPY__",
        __TORCH__=True,
        shapes=[[35, 10]],
        dtypes=["torch.bfloat16"],
    )
    maker.close(spec("builtins.dict", ["w"], [LEAF]))
    found = load(tmp_path / "x.h5")["w"]
    assert equal(found[12:14], torch.from_numpy(values).view(torch.bfloat16)[12:14])
    assert equal(found, torch.from_numpy(values).view(torch.bfloat16))


def test_names_that_need_a_path_of_their_own(tmp_path):
    maker, names = Maker(tmp_path / "x.h5"), ["a", "a/b", "", ".", "t/"]
    for number, name in enumerate(names):
        maker.tensor(
            name, np.full(3, number, "i4"), "int32", f"grp/{urllib.parse.quote(name, safe='')}_"
        )
    maker.close(spec("builtins.dict", names, [LEAF] * 5))
    assert [int(value[0]) for value in load(tmp_path / "x.h5").values()] == [0, 1, 2, 3, 4]


def test_names_that_begin_with_a_slash(tmp_path):
    maker = Maker(tmp_path / "x.h5")
    maker.tensor("/lead", np.arange(3, dtype="i4"), "int32")
    maker.close(spec("builtins.dict", ["/lead"], [LEAF]))
    assert load(tmp_path / "x.h5")["/lead"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("success", [None, False])
def test_unfinished_files_are_refused(success, tmp_path):
    Maker(tmp_path / "x.h5").close(spec("builtins.dict", [], []), success)
    with pytest.raises(CorruptError, match="never finished"):
        load(tmp_path / "x.h5")


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("DeferredGraphTensor", {}),
        ("DeferredSafeTensor", {"path": "/etc/passwd", "key": "x"}),
        ("DeferredFileTensor", {"filepath": "/etc/passwd"}),
        ("What", {}),
        ("LinkedObject", {"key": "y"}),
        ("LinkedObject", {"key": "x"}),
        ("DeferredFullTensor", {"shape": [1 << 50], "dtype": "torch.int8"}),
        ("DeferredFullTensor", {"shape": [1 << 30], "dtype": "torch.int8"}),
        ("DeferredFullTensor", {"shape": [-1], "dtype": "torch.int8"}),
        ("ScalarSerializer", {"scalar_value": []}),
        ("TorchTensorSerializer", {"dtypes": ["torch.float32"]}),
    ],
)
def test_leaves_that_lead_elsewhere_or_nowhere_are_refused(kind, known, tmp_path):
    maker = Maker(tmp_path / "x.h5")
    maker.leaf("x", kind, **known)
    maker.close(spec("builtins.dict", ["x"], [LEAF]))
    with pytest.raises(CorruptError, match=r"x\.h5: "):
        load(tmp_path / "x.h5")


def test_links_to_other_checkpoints_are_refused(tmp_path):
    maker = Maker(tmp_path / "x.h5")
    maker.file.attrs["x.__metadata__"] = json.dumps(
        {"__objects__": ["x.0", "x.1"], "x.0.__metadata__": {}}
    )
    maker.close(spec("builtins.dict", ["x"], [LEAF]))
    with pytest.raises(CorruptError, match="a link to another checkpoint"):
        load(tmp_path / "x.h5")


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_are_never_run_but_can_be_on_request(tmp_path):
    maker, proof = Maker(tmp_path / "x.h5"), tmp_path / "ran"
    maker.pickled("x", pickle.dumps(Runs(proof), 4))
    maker.close(spec("builtins.dict", ["x"], [LEAF]))
    found = load(tmp_path / "x.h5")["x"]
    assert isinstance(found, OpaqueObject)
    with pytest.raises(CorruptError, match="trust=True"):
        found.unpickle()
    assert not proof.exists()
    found.unpickle(trust=True).close()
    assert proof.exists()


def _load_type(name):
    """Stands for dill's function of that name, by which it writes builtin types."""


def _spec(name, **known):
    """An object that pickles like one of torch's tree specifications."""
    made = type(name, (), {"__module__": "torch.utils._pytree"})()
    vars(made).update(known)
    return made


def legacy_tree(monkeypatch, node):
    """The pickle of a tree as format 0.4 has it, in hexadecimal."""
    modules = {
        name: types.ModuleType(name) for name in ("torch.utils._pytree", "dill", "dill._dill")
    }
    modules["dill._dill"]._load_type = _load_type
    monkeypatch.setattr(_load_type, "__module__", "dill._dill")

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj):
            if obj in (dict, list):
                return _load_type, (obj.__name__,)
            if type(obj).__module__ == "torch.utils._pytree":
                setattr(modules["torch.utils._pytree"], type(obj).__name__, type(obj))
            return NotImplemented

    buffer = io.BytesIO()
    with monkeypatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        Pickler(buffer, 4).dump(node)
    return buffer.getvalue().hex()


def legacy(tmp_path, monkeypatch):
    leaf = _spec("LeafSpec", type=None, context=None, children_specs=[])
    node = functools.partial(_spec, "TreeSpec")
    root = node(
        type=dict,
        context=["model", "l"],
        children_specs=[
            node(type=dict, context=["a/b", "n"], children_specs=[leaf, leaf]),
            node(type=list, context=None, children_specs=[leaf] * 4),
        ],
    )
    with h5py.File(tmp_path / "x.mdl", "w") as file:
        file.attrs["__version__"], file.attrs["__spec__"] = 0.4, legacy_tree(monkeypatch, root)
        weight = file.create_dataset("model.a%2Fb", data=np.int16([16320, 1]), chunks=True)
        weight.attrs["__H5_TYPE__"], weight.attrs["is_bfloat16"] = "TorchTensorH5Type", True
        file.create_dataset("model.n", data=np.arange(3)).attrs["__H5_TYPE__"] = "NumpyArrayH5Type"
        file.create_dataset("l.0", data=2.5).attrs["__H5_TYPE__"] = "ScalarH5Type"
        for name, kind, known in (
            ("l.1", "StringH5Type", ("string_value", "hi")),
            ("l.2", "NoneH5Type", ("x", 0)),
            ("l.3", "ObjectH5Type", ("object_value", pickle.dumps(1j).hex())),
        ):
            data = file.create_dataset(name, dtype="f4")
            data.attrs["__H5_TYPE__"], data.attrs[known[0]] = kind, known[1]


def test_format_0_4_is_read(tmp_path, monkeypatch):
    legacy(tmp_path, monkeypatch)
    found = load(tmp_path / "x.mdl")
    assert equal(
        found["model"]["a/b"], torch.tensor([16320, 1], dtype=torch.int16).view(torch.bfloat16)
    )
    assert found["model"]["n"].tolist() == [0, 1, 2]
    assert found["l"] == [2.5, "hi", None, 1j]


def read_by_their_rules(path):
    """What their loader does with a file, from the description of the format; values by dotted
    name.
    """
    found = {}
    with h5py.File(path) as file:
        assert file.attrs["__version__"] == 0.5
        assert file.attrs["__SUCCESS__"]
        protocol, root = json.loads(json.loads(file.attrs["__spec__"])[1])
        assert protocol == 1
        for name in _leaf_names(root, ()):
            known = json.loads(file.attrs[f"{name}.__metadata__"])[f"{name}.__metadata__"]
            if known["__TYPE__"] == "LinkedObject":
                found[name] = found[known["key"]]
            elif known["__TYPE__"] == "ObjectSerializer":
                found[name] = pickle.loads(
                    file[known.get("key", name)].attrs["__BYTES__"].tobytes()
                )
            elif "__NUMPY__" in known:
                data = file[known.get("key", name)]
                assert data.attrs["__NUMPY__"]
                found[name] = data[()]
                if "__TORCH__" in known:
                    label = data.attrs["dtypes"][0].removeprefix("torch.")
                    tensor = torch.from_numpy(
                        np.array(found[name]).astype({"bfloat16": "i2"}.get(label, label))
                    )
                    found[name] = tensor.view(torch.bfloat16) if label == "bfloat16" else tensor
            else:
                found[name] = known.get("scalar_value", known.get("string_value"))
    return found


def _leaf_names(node, path):
    if node["type"] is None:
        return [".".join(path)]
    context = json.loads(node["context"])
    names = (
        context
        if node["type"] in ("builtins.dict", "collections.OrderedDict")
        else range(len(node["children_spec"]))
    )
    pairs = zip(names, node["children_spec"], strict=True)
    return [leaf for name, child in pairs for leaf in _leaf_names(child, (*path, str(name)))]


def test_ours_is_read_by_their_rules(tmp_path):
    weight = torch.randn(50, 60).to(torch.bfloat16)
    obj = {
        "model": {
            "w": weight,
            "tied": weight,
            "a/b": torch.arange(3),
            "": torch.tensor(2.5),
            "e": torch.zeros(0, 2),
        },
        "list": [1, 2.5, "x", None, True, b"raw", 1j, np.arange(3)],
        "f8": torch.ones(2).to(torch.float8_e4m3fn),
        "a": {"b": 1},
        "a.b": torch.ones(2),
    }
    save(obj, tmp_path / "x.h5")
    found = read_by_their_rules(tmp_path / "x.h5")
    assert equal(found["model.w"], weight)
    assert found["model.tied"] is found["model.w"]
    assert equal(found["model.a/b"], torch.arange(3))
    assert equal(found["model."], torch.tensor(2.5))
    assert found["model.e"].shape == (0, 2)
    assert [found[f"list.{number}"] for number in range(7)] == obj["list"][:7]
    assert equal(found["f8"], obj["f8"].view(torch.uint8))
    assert found["a.b"] == 1
    assert equal(found["a%2Eb"], torch.ones(2))
