"""TensorFlow checkpoints: what TensorFlow's own reader says of what is written, and the way
back.
"""

import shutil

import numpy as np
import pytest
import torch
from buckets import in_bucket
from hypothesis import given, settings, strategies as st
from seeds import examples

import ft_ckpt
from ft_ckpt import cli
from ft_ckpt.errors import CheckpointError, ConfigError, CorruptError, LoadError, SelectionError
from ft_ckpt.extensions.foreign import tensorflow
from ft_ckpt.extensions.tools.converting import convert, open_source
from ft_ckpt.extensions.tools.converting.shard_rules import assign_shards, read_shard_rules
from ft_ckpt.formats import ITEM_BYTES, Spec
from ft_ckpt.storage.places import open_place

DTYPES = sorted(tensorflow.DTYPES)


@pytest.fixture(scope="module")
def tf():
    pytest.importorskip("tensorflow", reason="the [tensorflow] extra is not installed")
    return tensorflow.load_tensorflow()


def filled(dtype, *shape):
    count = torch.Size(shape).numel()
    size = ITEM_BYTES[dtype]
    data = torch.randint(0, 2 if dtype == "bool" else 120, (count * size,), dtype=torch.uint8)
    return data.view(getattr(torch, dtype)).reshape(shape)


def write(folder, tensors, shard_bytes=700):
    folder.mkdir(exist_ok=True)
    specs = [
        Spec(name, tuple(one.shape), str(one.dtype).removeprefix("torch."))
        for name, one in tensors.items()
    ]
    tensorflow.write_tensorflow(
        folder, specs, lambda name, low, high: tensors[name].reshape(-1)[low:high], shard_bytes
    )


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def raw(tensor):
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def test_every_type_is_read_by_tensorflow_and_by_us(tf, tmp_path):
    tensors = {f"layer.{dtype}/é": filled(dtype, 300, 3) for dtype in DTYPES}  # larger than a shard
    tensors |= {f"{dtype}.scalar": filled(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 4), "row": torch.randn(1, 500), "long": torch.randn(1000)}
    write(tmp_path, tensors)
    reader = tf.train.load_checkpoint(str(tmp_path))
    shapes = {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert {name: bits(reader.get_tensor(name)) for name in tensors} == {
        n: raw(t) for n, t in tensors.items()
    }
    file = tensorflow.open_tensorflow(open_place(tmp_path))
    for name, tensor in tensors.items():
        assert file.specs[name] == Spec(
            name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        )
        assert raw(file.read(name)) == raw(tensor), name
        assert raw(file.read(name, 1, 7)) == raw(tensor.reshape(-1)[1:7]), name


@settings(max_examples=examples(15), deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    shard=st.integers(1, 2000),
    data=st.data(),
)
def test_any_shards_hold_the_same(tf, tmp_path_factory, shape, shard, data):
    tensor = filled("float32", *shape)
    folder = tmp_path_factory.mktemp("tf")
    write(folder, {"a": tensor, "b": filled("int64", 5)}, shard)
    low = data.draw(st.integers(0, tensor.numel()))
    high = data.draw(st.integers(low, tensor.numel()))
    assert raw(tensorflow.open_tensorflow(open_place(folder)).read("a", low, high)) == raw(
        tensor.reshape(-1)[low:high]
    )


def test_a_bucket_is_read_through_a_copy_that_goes_with_the_file(tf, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "room"))
    (tmp_path / "room").mkdir()
    tensor = filled("float32", 300, 3)
    write(tmp_path / "out", {"a": tensor})
    file = tensorflow.open_tensorflow(in_bucket(tmp_path / "out"))
    assert raw(file.read("a", 3, 9)) == raw(tensor.reshape(-1)[3:9])
    file.close()
    assert not list((tmp_path / "room").iterdir())


def test_variables_of_keras_are_read(tf, tmp_path):
    variables = {"w": tf.Variable([[1.0, 2.0]]), "h": tf.Variable(tf.constant([3.0], tf.bfloat16))}
    prefix = tf.train.Checkpoint(**variables).write(str(tmp_path / "own"))
    file = tensorflow.open_tensorflow(open_place(prefix))
    assert file.read("w/.ATTRIBUTES/VARIABLE_VALUE").tolist() == [1.0, 2.0]
    assert file.read("h/.ATTRIBUTES/VARIABLE_VALUE").dtype == torch.bfloat16
    assert file.skipped == ["_CHECKPOINTABLE_OBJECT_GRAPH: string"]


def test_there_and_back(tf, tmp_path):
    shared = torch.randn(40, 6).bfloat16()
    torch.save({"a": shared, "b": shared, "n": {"c": torch.arange(5)}}, tmp_path / "x.pt")
    report = convert(
        tmp_path / "x.pt", tmp_path / "tf", format="tensorflow", verify=True, map={"n.*": "m.*"}
    )
    assert report.notes == ("1 tied names stored as tensors of their own",)
    assert set(tf.train.load_checkpoint(str(tmp_path / "tf")).get_variable_to_dtype_map()) == {
        "a",
        "b",
        "m.c",
    }
    convert(tmp_path / "tf", tmp_path / "y.pt", verify=True, dtype="float32")
    loaded = torch.load(tmp_path / "y.pt")
    assert torch.equal(loaded["b"], shared.float())
    assert torch.equal(loaded["m.c"], torch.arange(5))


def test_damage_is_noticed(tf, tmp_path):
    write(tmp_path, {"a": torch.randn(100)}, 10_000)
    data = next(tmp_path.glob("*.data-*"))
    content = bytearray(data.read_bytes())
    content[7] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptError, match="a cannot be read"):
        tensorflow.open_tensorflow(open_place(tmp_path)).read("a")
    next(tmp_path.glob("*.index")).write_bytes(b"no index")
    with pytest.raises(CheckpointError):
        tensorflow.open_tensorflow(open_place(tmp_path))


def test_shards_are_checkpoints_of_their_own(tf, tmp_path):
    tensors = {
        "embed.w": torch.randn(30, 4),
        "layers.0.w": torch.randn(4, 4),
        "layers.1.w": torch.arange(7),
    }
    torch.save(tensors, tmp_path / "x.pt")
    (tmp_path / "rules").write_text(
        "# by name\nembed* table\nlayers.[0] lower\nlayers.0.* lower\n* rest\n"
    )
    with pytest.raises(SelectionError, match=r"layers\.\[0\] lower: a rule for no tensor"):
        convert(tmp_path / "x.pt", tmp_path / "tf", format="tensorflow", shards=tmp_path / "rules")
    (tmp_path / "rules").write_text("embed* table\nlayers.0.* lower\n* rest\n")
    convert(
        tmp_path / "x.pt",
        tmp_path / "tf",
        format="tensorflow",
        shards=tmp_path / "rules",
        verify=True,
    )
    for prefix, names in {
        "table": ["embed.w"],
        "lower": ["layers.0.w"],
        "rest": ["layers.1.w"],
    }.items():
        reader = tf.train.load_checkpoint(str(tmp_path / "tf" / f"{prefix}.ckpt"))
        assert list(reader.get_variable_to_shape_map()) == names
        assert bits(reader.get_tensor(names[0])) == raw(tensors[names[0]])
    convert(tmp_path / "tf", tmp_path / "y.pt", verify=True)
    assert all(
        torch.equal(one, tensors[name]) for name, one in torch.load(tmp_path / "y.pt").items()
    )
    next((tmp_path / "tf").glob("lower.ckpt.index")).unlink()
    with pytest.raises(CheckpointError):
        tensorflow.open_tensorflow(open_place(tmp_path / "tf"))


def test_h5_and_back_by_commands_of_their_own(tf, tmp_path, monkeypatch):
    ft_ckpt.save({"a.w": torch.randn(3, 2), "b": torch.arange(4)}, tmp_path / "x.h5")
    (tmp_path / "rules").write_text("a.* first\n* second\n")
    for command, words in [
        (cli.h5_to_tensorflow, ["x.h5", "tf", "--shards", "rules"]),
        (cli.tensorflow_to_h5, ["tf", "y.h5", "--verify"]),
    ]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["command", *words])
        with pytest.raises(SystemExit) as ended:
            command()
        assert not ended.value.code
    one, other = (ft_ckpt.load(tmp_path / name, "cpu") for name in ("x.h5", "y.h5"))
    assert all(torch.equal(one[name], other[name]) for name in one)


# Without TensorFlow too


@pytest.mark.parametrize("rules", ["", "a b c\n", "a ../b\n", "a .hidden\n", "lonely\n"])
def test_odd_rules_are_refused(tmp_path, rules):
    (tmp_path / "rules").write_text(rules)
    with pytest.raises(ConfigError, match="expected a pattern and the name of a shard"):
        read_shard_rules(tmp_path / "rules")


def test_each_tensor_goes_by_the_first_rule_that_its_name_fits():
    specs = [Spec(name, (), "float32") for name in ("a.w", "b.w", "b.v")]
    found = assign_shards(specs, [("a.*", "x"), ("*.w", "y"), ("*", "x")])
    assert {shard: [spec.name for spec in some] for shard, some in found.items()} == {
        "x": ["a.w", "b.v"],
        "y": ["b.w"],
    }
    with pytest.raises(
        SelectionError, match=r"b\.v: in no shard; c lost: a rule for no tensor; end the rules with"
    ):
        assign_shards(specs, [("a.*", "x"), ("*.w", "y"), ("c", "lost")])


def test_formats_without_shards_by_name_refuse_them(tmp_path):
    (tmp_path / "rules").write_text("* all\n")
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="format 'safetensors' has no shards by name"):
        convert(tmp_path / "x.pt", tmp_path / "y.safetensors", shards=tmp_path / "rules")


def test_a_table_of_shards_that_leads_out_is_refused(tmp_path):
    (tmp_path / "shards.json").write_text('{"weight_map": {"a": "../b.ckpt"}}')
    with pytest.raises(CorruptError, match=r"\.\./b\.ckpt: out of the folder"):
        tensorflow.open_tensorflow(open_place(tmp_path))


def test_types_it_has_not_are_refused():
    with pytest.raises(SelectionError, match="w: complex32"):
        tensorflow.check_tensorflow_types([Spec("w", (1,), "complex32")])


def test_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorflow", None)
    (tmp_path / "x.ckpt.index").touch()
    with pytest.raises(ConfigError, match="install the extra tensorflow "):
        tensorflow.open_tensorflow(open_place(tmp_path / "x.ckpt"))


def test_a_folder_of_several_that_names_none_is_not_guessed_at(tf, tmp_path):
    write(tmp_path / "run", {"w": torch.ones(2)})
    for suffix in (".index", ".data-00000-of-00001"):
        shutil.copy(tmp_path / f"run/model.ckpt{suffix}", tmp_path / f"run/other.ckpt{suffix}")
    assert set(open_source(open_place(tmp_path / "run")).specs) == {"w"}
    (tmp_path / "run/checkpoint").unlink()
    with pytest.raises(LoadError, match=r"model\.ckpt, other\.ckpt"):
        open_source(open_place(tmp_path / "run"))
    assert set(open_source(open_place(tmp_path / "run/other.ckpt")).specs) == {"w"}


def test_a_prefix_that_leads_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "elsewhere.index").touch()
    (tmp_path / "run").mkdir()
    for prefix in (str(tmp_path / "elsewhere"), "../elsewhere"):
        (tmp_path / "run" / "checkpoint").write_text(f'model_checkpoint_path: "{prefix}"\n')
        assert tensorflow.bundle_prefixes(open_place(tmp_path / "run")) == []
