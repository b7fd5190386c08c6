"""Whole checkpoints in a bucket: opened at one moment, verified, loaded as models, converted,
averaged.
"""

import gc
import json
from contextlib import closing

import h5py
import models
import numpy as np
import pytest
import torch
from buckets import in_bucket, new_bucket
from compare import logits
from faulty_stores import Watch
from places import ROOT
from torch import nn
from transformers import AutoModelForCausalLM

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.checks import verify
from ft_ckpt.errors import (
    BaseMismatchError,
    ConfigError,
    CorruptError,
    LoadError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.extensions.buckets.object_store import RemoteObject
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place


@pytest.fixture(scope="module")
def base():
    return models.build("llama").eval()


@pytest.fixture(scope="module")
def sharded(base, tmp_path_factory):
    """A model of several files with its tokenizer."""
    folder = tmp_path_factory.mktemp("sharded") / "checkpoint-1"
    CheckpointSaver(max_shard_size=60_000, tokenizer=models.tokenizer()).save(base, folder)
    return folder


@pytest.fixture
def read_bytes(monkeypatch):
    """The bytes that came out of buckets, range by range."""
    sizes, real = [], RemoteObject.read_into

    def counted(file, memory, start=0):
        sizes.append(len(memory))
        real(file, memory, start)

    monkeypatch.setattr(RemoteObject, "read_into", counted)
    return sizes


def same(one, other):
    tensors, others = one.state_dict(), other.state_dict()
    return tensors.keys() == others.keys() and all(
        torch.equal(tensors[name], others[name]) for name in tensors
    )


def test_a_model_is_loaded_and_says_where_it_is_from(base, sharded, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = in_bucket(sharded)
    model, report = ft_ckpt.load_model(place, verify=True, with_report=True)
    assert same(model, base)
    assert model.name_or_path == model.config._name_or_path == str(place) == report.path
    assert report.zero_copy, "the copy that was compared is mapped"
    assert same(ft_ckpt.load_model(place, mapped=True), base)
    assert not list(tmp_path.iterdir()), "no copy is left"


def test_only_small_files_are_copied_for_libraries(sharded, read_bytes):
    ft_ckpt.load_model(in_bucket(sharded))
    sizes = [file.stat().st_size for file in sharded.iterdir()]
    assert sum(read_bytes) < 2.5 * sum(sizes), (
        "and weights once, after the digests that are always compared"
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_models_that_transformers_makes(name, tmp_path):
    """The one is converted on its way in."""
    model = models.build(name).eval()
    CheckpointSaver(format="h5" if name == "qwen3" else "safetensors").save(model, tmp_path / "out")
    assert torch.equal(logits(ft_ckpt.load_model(in_bucket(tmp_path / "out"))), logits(model))


@pytest.mark.parametrize("form", ["safetensors", "h5"])
def test_adapters_on_the_right_base(base, tmp_path, form):
    adapted = models.trained(models.lora(models.build("llama")), 1).eval()
    CheckpointSaver(format=form).save(adapted, tmp_path / "out", adapter_only=True)
    place = in_bucket(tmp_path / "out")
    assert torch.equal(
        logits(ft_ckpt.load_model(place, base=models.build("llama"))), logits(adapted)
    )
    with pytest.raises(BaseMismatchError):
        ft_ckpt.load_model(place, base=models.build("llama", 7))


def test_parts_by_name_and_by_place(tmp_path):
    model = models.build("policy_and_value").eval()
    CheckpointSaver().save(model, tmp_path / "out", attribute=["policy", "value_head"])
    place = in_bucket(tmp_path / "out")
    loaded = ft_ckpt.load_model(place, into={"value_head": models.ValueHead()})
    assert same(loaded["policy"], model.policy)
    assert same(loaded["value_head"], model.value_head)
    for path, part in ((place, "value_head"), (Place(place.store, "out/value_head"), None)):
        head = ft_ckpt.load_model(path, part=part, into=models.ValueHead())
        assert same(head, model.value_head)
    with pytest.raises(LoadError, match=r"part 'none': not in memory://\w+/team/runs/out"):
        ft_ckpt.load_model(place, part="none")
    with pytest.raises(
        NotACheckpointError, match=r"memory://\w+/team/runs: the folder of a run, which holds out"
    ):
        ft_ckpt.load_model(Place(place.store))


def test_damage_is_found(sharded):
    place = in_bucket(sharded)
    assert verify(place).ok
    with open_checkpoint(open_place(place)) as held:
        assert held.find_problems(deep=True) == ()
        with pytest.raises(
            TargetError, match=r"x: cannot be written, the store is open for reading"
        ):
            held.store.write("x", b"")
        with pytest.raises(ConfigError, match="not on this machine's disks"):
            held.path  # noqa: B018
    shard = sorted(sharded.glob("*.safetensors"))[0].name
    content = place.folder.read(shard)
    place.folder.write(shard, content[:-1] + bytes([content[-1] ^ 1]))
    assert not verify(place).ok
    with pytest.raises(CorruptError, match=rf"{shard}: digest"):
        ft_ckpt.load_model(place, verify=True)
    place.folder.delete([shard])
    with pytest.raises(CorruptError, match=rf"{shard}: missing"):
        ft_ckpt.load_model(place)


def test_readers_see_one_save_or_an_error(tmp_path):
    """Every object is read in the version that was listed with the manifest."""
    for number in (1.0, 2.0):
        model = nn.Linear(40, 40)
        nn.init.constant_(model.weight, number)
        CheckpointSaver().save(model, tmp_path / f"{number}" / "out")
    place = in_bucket(tmp_path / "1.0" / "out")
    with open_checkpoint(open_place(place)) as held:
        in_bucket(tmp_path / "2.0" / "out", place.store)
        with pytest.raises(UnreadableError, match="overwritten while it was read"):
            held.store.read("model.safetensors")
    assert float(ft_ckpt.load_model(place, into=nn.Linear(40, 40)).weight[0, 0]) == 2.0


def test_opening_is_few_requests(sharded):
    bucket = new_bucket()
    in_bucket(sharded, bucket)
    watch = Watch()
    with open_checkpoint(Place(watch.store(bucket.within(sharded.name)))) as held:
        assert len(held.manifest.files) > 5
    assert watch.calls == ["stat", "write", "list", "stat", "open", "delete"], (
        "a lease around it; what is opened is the manifest"
    )


@pytest.mark.parametrize("form", ["safetensors", "h5", "torch"])
def test_converted_from_a_bucket(base, sharded, tmp_path, form):
    report = ft_ckpt.convert(
        in_bucket(sharded), tmp_path / "new", format=form, verify=True, progress=False
    )
    assert report.notes == ()
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (
        sharded / "tokenizer.json"
    ).read_bytes()
    assert verify(tmp_path / "new").ok
    if form != "torch":
        assert same(ft_ckpt.load_model(tmp_path / "new"), base)


def test_folders_of_others(base, tmp_path):
    base.save_pretrained(tmp_path / "theirs", max_shard_size=60_000)
    place = in_bucket(tmp_path / "theirs")
    report = ft_ckpt.convert(place, tmp_path / "new", verify=True, progress=False)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "new")), logits(base))
    assert report.tensors == len(list(open_source(open_place(place)).specs))
    with pytest.raises(LoadError, match=r"memory://\w+/team/runs/absent: no such folder"):
        open_source(Place(place.store, "absent"))


def test_averages_of_a_bucket(tmp_path):
    for seed in range(2):
        CheckpointSaver().save(models.build("llama", seed), tmp_path / f"c{seed}")
    paths = [tmp_path / "c0", tmp_path / "c1"]
    ft_ckpt.average(paths, tmp_path / "near", progress=False)
    ft_ckpt.average([in_bucket(path) for path in paths], tmp_path / "far", progress=False)
    assert same(ft_ckpt.load_model(tmp_path / "near"), ft_ckpt.load_model(tmp_path / "far"))


def test_a_row_of_a_tensor_is_read_by_its_bytes(tmp_path, read_bytes):
    ft_ckpt.save(
        {"w": torch.arange(1_000_000.0).view(1000, 1000), "b": torch.ones(10)},
        tmp_path / "x.safetensors",
    )
    found = ft_ckpt.load(in_bucket(tmp_path / "x.safetensors"))
    read_bytes.clear()
    assert found["w"][407].tolist() == list(range(407_000, 408_000))
    assert sum(read_bytes) < 600_000, "two blocks of a file of 4 MB"
    assert float(found["w"].sum()) > 0
    assert max(read_bytes) == 4_000_000


def test_the_table_of_a_torch_file_is_few_requests(tmp_path, read_bytes):
    """A file of many small records, each with a head of its own."""
    torch.save(
        {f"layer.{number}": torch.full((100,), number) for number in range(500)}, tmp_path / "x.pt"
    )
    with closing(open_source(open_place(in_bucket(tmp_path / "x.pt")))) as file:
        assert file.read("layer.7").tolist() == [7] * 100
        assert len(file.specs) == 500
    assert len(read_bytes) < 10


@pytest.mark.parametrize("golden", ["native.h5", "nested.h5", "flat.h5"])
def test_files_of_ours_of_any_age(golden):
    place = in_bucket(ROOT / "tests" / "golden" / golden)
    near, far = (
        ft_ckpt.load(ROOT / "tests" / "golden" / golden, "cpu"),
        ft_ckpt.load(place, "cpu", verify=True),
    )
    assert repr(near) == repr(far)


def test_hdf5_files_of_others_are_read_from_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "room"))
    (tmp_path / "room").mkdir()
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["plain"] = np.arange(6.0)
        file.create_dataset("packed", data=np.arange(1000), chunks=(100,), compression="gzip")
    found = ft_ckpt.load(in_bucket(tmp_path / "x.h5"))
    assert found["plain"].tolist() == list(range(6))
    assert found["packed"][990:].tolist() == list(range(990, 1000))
    assert list((tmp_path / "room").iterdir())
    del found
    gc.collect()
    assert not list((tmp_path / "room").iterdir())


def test_a_file_is_compared_with_the_manifest_beside_it(sharded):
    place = in_bucket(sharded)
    shard = sorted(sharded.glob("*.safetensors"))[0].name
    inside = Place(place.store, f"{place.name}/{shard}")
    assert ft_ckpt.load(inside, verify=True)
    listed = json.loads(place.folder.read("ft_ckpt.json"))
    assert {file["path"] for file in listed["files"]} >= {shard}
    content = place.folder.read(shard)
    place.folder.write(shard, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptError, match="its digest differs"):
        ft_ckpt.load(inside, verify=True)


@pytest.mark.parametrize("has_room", [True, False])
def test_each_object_is_downloaded_once_to_be_compared_and_read(
    tmp_path, s3, monkeypatch, has_room
):
    """Without room for it in the temporary folder it is compared, and downloaded again if it is
    large.
    """
    CheckpointSaver().save(models.build("llama"), tmp_path / "out")
    ft_ckpt.copy(tmp_path / "out", "s3://bucket/out")
    real = LocalStore.free_bytes
    if not has_room:
        monkeypatch.setattr(
            LocalStore,
            "free_bytes",
            lambda store: 0 if "ft_ckpt-copy-" in store.url else real(store),
        )
    before = len(s3.requests_like("GET .*model.safetensors"))
    ft_ckpt.convert("s3://bucket/out", tmp_path / "new.h5", progress=False)
    after = len(s3.requests_like("GET .*model.safetensors"))
    assert after - before == 1 or not has_room
    ft_ckpt.load_model("s3://bucket/out", verify=True)
    assert len(s3.requests_like("GET .*model.safetensors")) - after == 1 or not has_room
    s3.put("out/model.safetensors", s3.content("out/model.safetensors")[:-1] + b"!")
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        ft_ckpt.convert("s3://bucket/out", tmp_path / "damaged.h5", progress=False)
    assert not (tmp_path / "damaged.h5").exists()
