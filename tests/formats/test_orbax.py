"""Checkpoints of orbax, as orbax wrote them."""

import json
import os
import shutil
import sys

import library_files
import pytest
import torch
from library_files import numbered

import ft_ckpt
from ft_ckpt.errors import CheckpointError, ConfigError, CorruptError
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.storage.places import open_place

GOLDEN = library_files.FOLDER
DENSE = {
    "params.dense.kernel": numbered(0, 3, 4),
    "params.dense.bias": numbered(1, 4, dtype=torch.bfloat16),
}
WHOLE = DENSE | {"list.0": torch.tensor(200, dtype=torch.int32)}


@pytest.fixture
def tensorstore():
    pytest.importorskip("tensorstore", reason="the [orbax] extra is not installed")


def check_folder(path, wanted):
    file = open_source(open_place(path))
    assert set(file.specs) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(file.read(name).view(file.specs[name].shape), tensor), name
        half = tensor.numel() // 2
        assert torch.equal(file.read(name, half, tensor.numel()), tensor.reshape(-1)[half:]), name
    file.close()
    return file


@pytest.mark.parametrize(
    ("name", "wanted"), [("orbax", WHOLE), ("orbax_folders", WHOLE), ("orbax_run/3", DENSE)]
)
def test_arrays_are_read(tensorstore, name, wanted):
    file = check_folder(GOLDEN / name, wanted)
    assert ("rate: scalar" in file.skipped) == (wanted is WHOLE)


def test_convert(tensorstore, tmp_path):
    ft_ckpt.convert(GOLDEN / "orbax", tmp_path / "x.safetensors", verify=True, progress=False)
    assert torch.equal(ft_ckpt.load(tmp_path / "x.safetensors")["list.0"], WHOLE["list.0"])


def test_damage_is_noticed(tensorstore, tmp_path):
    for path in sorted((GOLDEN / "orbax").rglob("*")):
        if (
            path.is_file()
            and path.stat().st_size > 100
            and path.name not in ("_sharding", "_CHECKPOINT_METADATA")
        ):
            shutil.copytree(GOLDEN / "orbax", tmp_path / "x", dirs_exist_ok=True)
            inside = tmp_path / "x" / path.relative_to(GOLDEN / "orbax")
            inside.write_bytes(inside.read_bytes()[:60])
            try:
                check_folder(tmp_path / "x", WHOLE)
            except CheckpointError:
                continue
            assert "process_0" in str(path), f"{path}: needed by nothing?"


@pytest.fixture
def folders(tensorstore, tmp_path):
    """A copy of the checkpoint with a folder for each array; `chunk` is the only one of the
    kernel.
    """
    shutil.copytree(GOLDEN / "orbax_folders", tmp_path / "x")
    return tmp_path / "x"


CHUNK = "params.dense.kernel/0.0"


def test_a_lost_chunk_is_no_zeros(folders):
    (folders / CHUNK).unlink()
    with pytest.raises(CorruptError, match=r"params\.dense\.kernel"):
        check_folder(folders, WHOLE)


def test_a_chunk_that_an_old_writer_left_out_is_named(folders):
    """Before orbax said so in the metadata, it left out chunks of zeros."""
    document = json.loads((folders / "_METADATA").read_text())
    del document["store_array_data_equal_to_fill_value"]
    (folders / "_METADATA").write_text(json.dumps(document))
    assert not [what for what in check_folder(folders, WHOLE).skipped if "chunks" in what]
    (folders / CHUNK).unlink()
    file = check_folder(folders, WHOLE | {"params.dense.kernel": torch.zeros(3, 4)})
    assert [what for what in file.skipped if what.startswith("params.dense.kernel: 1 of 1 chunks")]


@pytest.mark.parametrize("name", ["0.0.part", "0.1", "0", "0.0.0", "00.0"])
def test_a_renamed_chunk_of_an_old_writer_is_no_zeros(folders, name):
    document = json.loads((folders / "_METADATA").read_text())
    del document["store_array_data_equal_to_fill_value"]
    (folders / "_METADATA").write_text(json.dumps(document))
    (folders / CHUNK).rename((folders / CHUNK).with_name(name))
    with pytest.raises(
        CorruptError, match=r"params\.dense\.kernel: 1 files that are none of its 1 chunks"
    ):
        check_folder(folders, WHOLE)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", ["pipe", "device", "out", "dangling", "itself", "folder"])
def test_only_regular_files_inside_the_folder_are_read(folders, way):
    chunk, outside = folders / CHUNK, folders.parent / "outside"
    shutil.copytree(folders / "params.dense.kernel", outside)
    chunk.unlink()
    if way == "pipe":
        os.mkfifo(chunk)
    elif way == "folder":
        shutil.rmtree(chunk.parent)
        chunk.parent.symlink_to(outside)
    else:
        chunk.symlink_to(
            {"device": "/dev/zero", "out": outside / "0.0", "dangling": "none", "itself": "0.0"}[
                way
            ]
        )
    with pytest.raises(CorruptError, match=r"params\.dense\.kernel.*regular file"):
        open_source(open_place(folders))


def test_a_link_inside_of_the_folder_is_read(folders):
    (folders / CHUNK).rename(folders / "moved")
    (folders / CHUNK).symlink_to("../moved")
    check_folder(folders, WHOLE)


def test_names_that_lead_out_of_the_folder_are_refused(tensorstore, tmp_path):
    key = {"key_metadata": [{"key": "/etc"}], "value_metadata": {"value_type": "jax.Array"}}
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": {"x": key}}))
    with pytest.raises(CorruptError, match="outside of the folder"):
        open_source(open_place(tmp_path))


def test_without_tensorstore_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ConfigError, match="install the extra orbax "):
        open_source(open_place(GOLDEN / "orbax"))


@pytest.mark.slow
def test_what_orbax_writes_now_is_read(tensorstore, tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint")
    maker = library_files.file_maker()
    monkeypatch.setattr(maker, "HERE", tmp_path)
    maker.orbax()
    check_folder(tmp_path / "orbax", WHOLE)
    check_folder(tmp_path / "orbax_run/3", DENSE)
