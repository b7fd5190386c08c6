"""Conversion between formats: same bits, bounded memory, all or nothing."""

import json
import os
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import models
import pytest
import torch
from contract_format import bytes_of, filled
from hypothesis import given, settings, strategies as st
from launch import run_python
from safetensors.torch import load_file, save_file
from seeds import examples
from transformers import AutoModelForCausalLM

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.cli import run_command
from ft_ckpt.cli.show_file import show_file
from ft_ckpt.errors import ConfigError, CorruptError, LoadError, SelectionError, TargetError
from ft_ckpt.extensions.tools.converting import conversion as convert_room, convert, open_source
from ft_ckpt.formats.safetensors import NAMES
from ft_ckpt.storage.places import open_place

FILES = {"safetensors": "x.safetensors", "dual": "x.safetensors", "h5": "x.h5", "torch": "x.pt"}


def contents(path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Every name in a file or folder, ties included: shape, dtype and bytes."""
    file = open_source(open_place(Path(path)))
    found = {
        name: (spec.shape, spec.dtype, bytes_of(file.read(name)))
        for name, spec in file.specs.items()
    }
    found |= {name: found[kept] for name, kept in file.ties.items()}
    file.close()
    return found


def expected(tensors) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    return {
        n: (tuple(t.shape), str(t.dtype).removeprefix("torch."), bytes_of(t))
        for n, t in tensors.items()
    }


def hidden(folder) -> list[str]:
    return [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]


# Same bits


def every_kind() -> dict[str, torch.Tensor]:
    """All types of safetensors, and shapes and names that are awkward somewhere."""
    tensors = {f"kind.{dtype}": filled((3, 5), dtype) for dtype in NAMES}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "a/b": torch.ones(2),
        "/x": torch.ones(1),
    }
    tensors |= {
        "é.日本": torch.arange(4),
        "a": torch.zeros(1),
        "a.b.c": torch.ones(3),
        "odd name\n": torch.ones(1),
    }
    tensors |= {
        "t": torch.randn(4, 6).t(),
        "strided": torch.randn(9)[::2],
        "big": torch.randn(70_000),
    }
    return tensors


@pytest.mark.sample(10)
@pytest.mark.parametrize("first", FILES)
@pytest.mark.parametrize("second", FILES)
def test_there_and_back_through_every_pair(tmp_path, first, second):
    tensors = every_kind()
    torch.save(tensors, tmp_path / "source.pt")
    one, two = (
        tmp_path / f"1{Path(FILES[first]).suffix}",
        tmp_path / f"2{Path(FILES[second]).suffix}",
    )
    convert(tmp_path / "source.pt", one, format=first, verify=True)
    convert(one, two, format=second)
    assert contents(one) == contents(two) == expected(tensors)
    assert hidden(tmp_path) == []


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(sorted(NAMES)), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    names=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
        min_size=6,
    ),
    formats=st.lists(st.sampled_from(sorted(FILES)), min_size=1, max_size=3),
    slice_bytes=st.sampled_from([8, 24, 1 << 20]),
)
def test_any_tensors_survive_any_road(tmp_path_factory, kinds, names, formats, slice_bytes):
    folder = tmp_path_factory.mktemp("road")
    tensors = {
        name: filled(tuple(shape), dtype)
        for name, (dtype, shape) in zip(names, kinds, strict=False)
    }
    path = folder / "0.pt"
    torch.save(tensors, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ft_ckpt.extensions.tools.converting.copy_check.SLICE_BYTES", slice_bytes)
        for step, kind in enumerate(formats, 1):
            source, path = path, folder / f"{step}{Path(FILES[kind]).suffix}"
            convert(source, path, format=kind, verify=True)
    assert contents(path) == expected(tensors)


@pytest.mark.parametrize("kind", FILES)
def test_ties_are_stored_once_and_stay(tmp_path, kind):
    shared = torch.randn(100, 100)
    torch.save({"one": shared, "two": shared, "alone": torch.ones(1)}, tmp_path / "x.bin")
    target = tmp_path / FILES[kind]
    report = convert(tmp_path / "x.bin", target, format=kind, verify=True)
    assert (report.tensors, target.stat().st_size < 75_000) == (2, True)
    convert(target, tmp_path / "back.pt")
    loaded = torch.load(tmp_path / "back.pt")
    assert loaded["one"].data_ptr() == loaded["two"].data_ptr()


def test_other_libraries_read_the_results(tmp_path):
    tensors = {"a.b": torch.randn(3, 4).bfloat16(), "c": torch.arange(5)}
    torch.save(tensors, tmp_path / "x.pt")
    for name, kind in (("s.safetensors", "safetensors"), ("d.safetensors", "dual")):
        convert(tmp_path / "x.pt", tmp_path / name, format=kind)
        assert {
            n: torch.equal(t, tensors[n])
            for n, t in load_file(tmp_path / name).items()
            if n in tensors
        } == {
            "a.b": True,
            "c": True,
        }
    convert(tmp_path / "x.pt", tmp_path / "x.h5")
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["c"][:].tolist() == [0, 1, 2, 3, 4]


# Types


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_casts_are_torch_own(tmp_path, dtype):
    values = torch.tensor([1.0, -0.0, 1 / 3, 1e-42, 65519.0, 3.4e38, float("inf"), float("nan")])
    doubles = torch.cat([values.double(), torch.tensor([1e300], dtype=torch.float64)])
    tensors = {
        "f": values,
        "d": doubles,
        "h": values.half(),
        "b": values.bfloat16(),
        "i": torch.arange(3),
    }
    tensors |= {
        "f8": values.clamp(-400, 400).to(torch.float8_e4m3fn),
        "c": torch.ones(2, dtype=torch.complex64),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    report = convert(tmp_path / "x.safetensors", tmp_path / "y.h5", dtype=dtype, verify=True)
    wanted = {
        n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for n, t in tensors.items()
    }
    assert contents(tmp_path / "y.h5") == expected(wanted)
    assert sum(report.casts.values()) == 4
    assert any("become infinite" in note for note in report.notes) == (dtype != "float64")


# Names


def test_names_are_changed_by_rule(tmp_path):
    save_file(
        {"model.a": torch.ones(1), "model.b.c": torch.ones(2), "head": torch.ones(3)},
        tmp_path / "x.safetensors",
    )
    (tmp_path / "map.txt").write_text("# old new\nmodel.* *\nmodel.a  first\n\nhead lm_head\n")
    convert(tmp_path / "x.safetensors", tmp_path / "y.pt", map=tmp_path / "map.txt")
    assert set(torch.load(tmp_path / "y.pt")) == {"first", "b.c", "lm_head"}
    (tmp_path / "map.json").write_text(json.dumps({"head": "lm head"}))
    convert(tmp_path / "x.safetensors", tmp_path / "y.pt", map=tmp_path / "map.json")
    assert "lm head" in torch.load(tmp_path / "y.pt")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"b": "a"}, "b and a -> a"),
        ({"a*": "x*"}, None),
        ({"none": "x"}, "none: to be renamed"),
        ({"q*": "*"}, r"q\*"),
    ],
)
def test_renaming_refuses_collisions_and_unknown_names(tmp_path, table, message):
    save_file({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    if message is None:
        convert(tmp_path / "x.safetensors", tmp_path / "y.pt", map=table)
        return
    with pytest.raises(SelectionError, match=message):
        convert(tmp_path / "x.safetensors", tmp_path / "y.pt", map=table)
    assert not (tmp_path / "y.pt").exists()


@pytest.mark.parametrize(
    ("name", "target"),
    [("half \udc9b", "y.safetensors"), ("half \udc9b", "y.h5"), ("nul \0", "y.h5")],
)
def test_a_name_that_the_format_cannot_store_is_refused_until_it_is_renamed(tmp_path, name, target):
    weight = torch.ones(2)
    torch.save({name: weight, "tied": weight}, tmp_path / "x.pt")
    with pytest.raises(SelectionError, match="rename it"):
        convert(tmp_path / "x.pt", tmp_path / target)
    assert not (tmp_path / target).exists()
    convert(tmp_path / "x.pt", tmp_path / target, map={name: "named"})
    assert "named" in ft_ckpt.load(tmp_path / target)


@pytest.mark.parametrize(
    "text",
    ["a b c\n", "a*  b\n", "a b\na c\n", '{"a": "b", "a": "c"}', '{"a": ', '{"a": {"b": "c"}}'],
)
def test_a_map_that_makes_no_sense_is_refused(tmp_path, text):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "map").write_text(text)
    with pytest.raises(ConfigError):
        convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors", map=tmp_path / "map")


def test_a_map_of_other_things_than_names_is_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="'a': expected an old name and a new one, both text"):
        convert(tmp_path / "x.safetensors", tmp_path / "y", map={"a": None})  # type: ignore[dict-item]


@settings(max_examples=examples(100), deadline=None)
@given(
    st.dictionaries(st.text("ab.", min_size=1), st.text("ab.", min_size=1)),
    st.sets(st.text("ab.", min_size=1), min_size=1),
)
def test_renaming_is_one_to_one_or_refused(table, names):
    tensors = {name: torch.tensor(number) for number, name in enumerate(sorted(names))}
    with TemporaryDirectory() as folder:
        source, target = Path(folder, "x.safetensors"), Path(folder, "y.safetensors")
        save_file(tensors, source)
        try:
            convert(source, target, map=table, progress=False)
        except SelectionError:
            assert not target.exists()
            return
        renamed = load_file(target)
    assert sorted(int(tensor) for tensor in renamed.values()) == [*range(len(names))]


# Folders


@pytest.fixture
def llama(tmp_path):
    """A tied model saved by transformers, in shards, with a file of its own beside."""
    model = models.build("llama")
    model.save_pretrained(tmp_path / "hf", max_shard_size=30_000)
    models.tokenizer().save_pretrained(tmp_path / "hf")
    (tmp_path / "hf/notes.md").write_text("kept")
    (tmp_path / "hf/optimizer.pt").write_bytes(b"not weights")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    return model.eval(), tmp_path / "hf"


@pytest.mark.parametrize("kind", ["safetensors", "dual", "torch"])
@pytest.mark.parametrize("size", [None, 30_000])
def test_a_folder_stays_a_model(tmp_path, llama, kind, size):
    model, source = llama
    report = convert(source, tmp_path / "out/", format=kind, max_shard_size=size, verify=True)
    assert ft_ckpt.verify(tmp_path / "out").problems == ()
    assert (tmp_path / "out/notes.md").read_text() == "kept"
    assert not (tmp_path / "out/optimizer.pt").exists()
    assert any("optimizer.pt" in note for note in report.notes)
    if kind != "torch":  # transformers reads pickles only after its own version check
        loaded, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True
        )
        assert info["missing_keys"] == set()
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
    assert contents(tmp_path / "out") == contents(source)


def test_the_config_says_the_new_type(tmp_path, llama):
    _, source = llama
    convert(source, tmp_path / "out/", dtype="bfloat16")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert json.loads((source / "config.json").read_text())["dtype"] == "float32"


def test_a_checkpoint_of_ours_stays_one(tmp_path):
    model = models.build("policy_and_value")
    with CheckpointSaver() as saver:
        saver.save(
            model,
            tmp_path / "ckpt",
            attribute=["policy", "value_head"],
            step=7,
            metrics={"loss": 0.5},
        )
    convert(tmp_path / "ckpt", tmp_path / "half/", dtype="bfloat16", verify=True)
    convert(tmp_path / "half", tmp_path / "again/", verify=True)
    report = ft_ckpt.verify(tmp_path / "again")
    assert report.ok, report.problems
    manifest = read_manifest(open_place(tmp_path / "again"))
    assert (manifest.step, manifest.metrics, len(manifest.parts)) == (7, {"loss": 0.5}, 2)
    convert(tmp_path / "again", tmp_path / "shards", max_shard_size=20_000, verify=True)
    assert (tmp_path / "shards/policy/model.safetensors.index.json").exists()
    assert ft_ckpt.verify(tmp_path / "shards").problems == (), "the index may have tied names"
    loaded = ft_ckpt.load_model(tmp_path / "again", part="policy")
    assert loaded.dtype == torch.bfloat16
    convert(tmp_path / "again", tmp_path / "all.pt")
    names = set(torch.load(tmp_path / "all.pt"))
    assert {"value_head.score.weight", "policy.model.norm.weight"} < names


def test_an_adapter_is_never_split(tmp_path):
    models.build("lora").save_pretrained(tmp_path / "peft")
    convert(tmp_path / "peft", tmp_path / "out/", max_shard_size=100, verify=True)
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
    assert (tmp_path / "out/adapter_config.json").is_file()
    assert ft_ckpt.verify(tmp_path / "out").ok


def test_missing_shards_are_named(tmp_path, llama):
    _, source = llama
    lost = sorted(source.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CorruptError, match=lost.name):
        convert(source, tmp_path / "x.pt")


# What is refused


@pytest.mark.parametrize(
    ("target", "settings", "error"),
    [
        ("y.foo", {}, ConfigError),
        ("y.pt", {"format": "gguf"}, ConfigError),
        ("y.pt", {"dtype": "int8"}, ConfigError),
        ("y.pt", {"max_shard_size": "1GB"}, ConfigError),
        ("out/", {"max_shard_size": 0}, ConfigError),
        ("out/", {"max_shard_size": -1}, ConfigError),
        ("out/", {"max_shard_size": "many"}, ConfigError),
        ("file/", {}, TargetError),
        ("file/deeper/y.pt", {}, TargetError),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, target, settings, error):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "file").write_text("in the way")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error):
        convert(tmp_path / "x.safetensors", f"{tmp_path}/{target}", **settings)
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("hello there, this is no checkpoint")
    (tmp_path / "empty").mkdir()
    for source in ("x.txt", "empty", "absent"):
        with pytest.raises(LoadError, match=source):
            convert(tmp_path / source, tmp_path / "y.pt")


@pytest.mark.parametrize(
    "config", [[], {"architectures": {"a": 1}}, {"architectures": "odd"}, {"architectures": []}]
)
def test_a_config_of_another_form_is_taken_along(tmp_path, config):
    (tmp_path / "odd").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "odd" / "model.safetensors")
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "odd", tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == config
    assert ft_ckpt.verify(tmp_path / "new").ok


def test_a_base_of_another_form_is_not_recorded(tmp_path):
    (tmp_path / "odd").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "odd" / "adapter_model.safetensors")
    (tmp_path / "odd" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": ["odd"]})
    )
    convert(tmp_path / "odd", tmp_path / "new")
    assert ft_ckpt.verify(tmp_path / "new").ok


def test_what_links_lead_to_stays_where_it_is(tmp_path, llama):
    """A link out of the folder could lead to anybody's keys; the links of the Hub's cache lead to
    its own store.
    """
    (tmp_path / "secret").write_text("key")
    _, llama = llama
    (llama / "tokenizer.json").unlink(missing_ok=True)
    (llama / "tokenizer.json").symlink_to(tmp_path / "secret")
    report = convert(llama, tmp_path / "new", format="h5")
    assert not (tmp_path / "new" / "tokenizer.json").exists()
    assert any("tokenizer.json" in note and "link" in note for note in report.notes)
    (tmp_path / "hub" / "blobs").mkdir(parents=True)
    (tmp_path / "hub" / "snapshots").mkdir()
    (tmp_path / "hub" / "blobs" / "1").write_text("words")
    cached = llama.rename(tmp_path / "hub" / "snapshots" / "main")
    (cached / "tokenizer.json").unlink()
    (cached / "tokenizer.json").symlink_to("../../blobs/1")
    convert(cached, tmp_path / "again", format="h5")
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "words"


def test_a_folder_whose_name_is_no_utf_8(tmp_path, llama):
    odd = llama[1].rename(tmp_path / os.fsdecode(b"caf\xe9"))
    convert(odd, tmp_path / "new", format="h5")
    assert "converted from caf" in (tmp_path / "new" / "ft_ckpt.json").read_text()


LIMITED = """
import resource, sys
from ft_ckpt.extensions.tools.converting import convert
from ft_ckpt.errors import TargetError
source, target, format, limit = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit),) * 2)
try:
    convert(source, target, format=format, progress=False)
except TargetError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def test_a_full_disk_is_told_as_such(tmp_path):
    save_file({"x": torch.randn(200_000)}, tmp_path / "x.safetensors")
    run = run_python(LIMITED, tmp_path / "x.safetensors", tmp_path / "new", "torch", 100_000)
    assert run.returncode == 1
    assert "NoSpaceError" in run.stderr.splitlines()[-1], run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.safetensors"]


def test_a_folder_is_not_converted_into_itself(tmp_path, llama):
    _, source = llama
    for target in (source, source / "inside/"):
        with pytest.raises(ConfigError, match="outside"):
            convert(source, f"{target}/")


def test_no_checkpoint_is_lost_to_a_part_of_it(tmp_path):
    """The base and the other adapters were replaced by one adapter; a weight file by another than
    its manifest's.
    """
    CheckpointSaver().save(models.build("lora"), tmp_path / "whole", adapter_only=False)
    with pytest.raises(
        ConfigError, match="whole: the checkpoint that default is read from; choose a path outside"
    ):
        convert(tmp_path / "whole" / "adapters" / "default", tmp_path / "whole")
    with pytest.raises(
        ConfigError, match=r"whole: the checkpoint that model\.safetensors is read from"
    ):
        convert(tmp_path / "whole" / "model.safetensors", tmp_path / "whole", format="h5")
    with pytest.raises(
        TargetError,
        match=r"model\.safetensors: a file of the checkpoint .*whole; choose a path outside",
    ):
        convert(tmp_path / "whole", tmp_path / "whole" / "model.safetensors", dtype="bfloat16")
    assert ft_ckpt.verify(tmp_path / "whole").ok


# The command


@pytest.fixture
def command(capsys):
    """Runs `convert` as the command line does; what it printed."""

    def run(*arguments):
        run_command(["convert", *map(str, arguments)])
        return capsys.readouterr().out

    return run


def test_the_command_says_what_it_did(tmp_path, command):
    torch.save({"a": torch.ones(4), "n": 1}, tmp_path / "x.pt")
    said = command(tmp_path / "x.pt", tmp_path / "y.h5", "--dtype", "bfloat16", "--verify")
    assert "(h5): 1 tensors" in said
    assert "cast 1 x float32->bfloat16, verified" in said
    assert "1 left out: n: int" in said
    found = json.loads(command(tmp_path / "y.h5", tmp_path / "z.safetensors", "--json"))
    assert (found["format"], found["tensors"], found["verified"]) == ("safetensors", 1, False)
    with pytest.raises(ConfigError, match="convert: expected DST"):
        command(tmp_path / "x.pt")


def test_a_file_is_shown_as_a_tree_without_reading_it(tmp_path, capsys, monkeypatch):
    shared = torch.ones(5)
    torch.save(
        {"m": {"l.0": torch.ones(2, 3), "l.1": {"w": shared}}, "tied": shared, "n": 1},
        tmp_path / "x.pt",
    )
    monkeypatch.setattr("ft_ckpt.extensions.foreign.torch_files.tensors.TorchFile.read", None)
    show_file(open_place(tmp_path / "x.pt"), as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    head = next(place for place, line in enumerate(lines) if line[:1] == ["tensor"])
    assert ["2", "tensors,", "44", "B"] in lines[:head]
    assert lines[head + 1 :] == [
        ["m.l"],
        ["0", "2x3", "float32", "24", "B"],
        ["1.w", "5", "float32", "20", "B"],
        ["tied", "=", "m.l.1.w"],
        ["n:", "int"],
    ]
    show_file(open_place(tmp_path / "x.pt"), as_json=True)
    assert json.loads(capsys.readouterr().out)["ties"] == {"tied": "m.l.1.w"}


# All or nothing


@pytest.mark.parametrize("target", ["y.safetensors", "y/"])
def test_verify_finds_what_went_wrong_on_the_way(tmp_path, monkeypatch, target):
    save_file({"a": torch.zeros(1000), "b": torch.ones(1000)}, tmp_path / "x.safetensors")

    real = convert_room.write_outputs

    def write(plans, store, progress):
        records = real(plans, store, progress)
        path = store.path(records[0].path)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return records

    monkeypatch.setattr(convert_room, "write_outputs", write)
    with pytest.raises(CorruptError, match="b: other values"):
        convert(tmp_path / "x.safetensors", f"{tmp_path}/{target}", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])  # read in blocks, and a slice at a time
def test_a_source_that_breaks_off_leaves_the_old_target(tmp_path, monkeypatch, dtype):
    save_file({"a": torch.zeros(8_000_000)}, tmp_path / "x.safetensors")
    (tmp_path / "y.pt").write_text("old")
    real, calls = os.preadv, []

    def preadv(descriptor, buffers, at):
        calls.append(at)
        if len(calls) == 5:
            os.truncate(tmp_path / "x.safetensors", 5000)
        return real(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CorruptError, match="changed while it was open"):
        convert(tmp_path / "x.safetensors", tmp_path / "y.pt", dtype=dtype)
    assert (tmp_path / "y.pt").read_text() == "old"
    assert hidden(tmp_path) == []


@pytest.mark.sample("y/")
@pytest.mark.parametrize("target", ["y.pt", "y.h5", "y/"])
def test_killed_at_any_moment_nothing_is_half_done(tmp_path, target):
    """Killed mid-save, the newest file or folder is half-written."""
    save_file({f"l{i}": torch.randn(500_000) for i in range(12)}, tmp_path / "x.safetensors")
    goal = f"{tmp_path}/{target}"
    whole = expected(load_file(tmp_path / "x.safetensors"))
    finished = []
    for delay in (0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08):
        child = os.fork()
        if child == 0:
            convert(tmp_path / "x.safetensors", goal)
            os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        finished.append(Path(goal).exists())
        if finished[-1]:
            assert contents(goal) == whole
    assert not all(finished)
    convert(tmp_path / "x.safetensors", goal)  # and clears up after the dead
    assert contents(goal) == whole
    assert hidden(tmp_path) == []


MEMORY = """
import sys
from ft_ckpt.extensions.tools.converting import convert
from peak_memory import peak_memory
convert(sys.argv[1], sys.argv[1] + ".warm.pt", map={"big": "b"})  # what is imported on the way
road = ("x.safetensors", "y.pt", None), ("y.pt", "z.h5", "float32"), ("z.h5", "w.safetensors", None)
with peak_memory() as peak:
    for source, target, dtype in road:
        verify = target == "w.safetensors"
        convert(sys.argv[2] + source, sys.argv[2] + target, dtype=dtype, verify=verify)
print(peak.mib)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    """Out of memory where the whole state is put together."""
    save_file({"big": torch.ones(3)}, tmp_path / "small.safetensors")
    tensors = {
        "embed": torch.zeros(75_000_000, dtype=torch.bfloat16),
        "head": torch.ones(75_000, 1000).bfloat16(),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    del tensors
    result = run_python(MEMORY, tmp_path / "small.safetensors", f"{tmp_path}/", timeout=240)
    assert result.returncode == 0, result.stderr
    peak = float(result.stdout.splitlines()[-1])
    assert 8 < peak < 256, f"{peak} MiB; a slice has 8"


@pytest.mark.parametrize("made", ["dual", "safetensors", "h5"])
@pytest.mark.parametrize("wanted", ["dual", "safetensors", "h5"])
def test_an_object_becomes_its_tensors(made, wanted, tmp_path):
    """The tree of a nested object is not that of the flat dict made of it, in the file after that
    neither.
    """
    ft_ckpt.save(
        {"model": {"w": torch.ones(2)}, "rest": [torch.zeros(3), 7]}, tmp_path / "object", made
    )
    flat = "flat.h5" if wanted == "h5" else "flat.safetensors"
    convert(tmp_path / "object", tmp_path / flat, format=wanted, progress=False)
    convert(tmp_path / flat, tmp_path / "last.safetensors", progress=False)
    for name in (flat, "last.safetensors"):
        found = ft_ckpt.load(tmp_path / name, "cpu")
        assert {key: one.shape for key, one in found.items()} == {"model.w": (2,), "rest.0": (3,)}
