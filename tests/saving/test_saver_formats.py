"""The saver's other formats: HDF5, and one file that is HDF5 and safetensors at once.

Read back by h5py as well.
"""

import h5py
import models
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import ConfigError
from ft_ckpt.storage.places import open_place

FORMATS = ("safetensors", "h5", "dual")


def logits(model):
    with torch.no_grad():
        return model.eval()(**models.batch(0)).logits


def by_h5py(path):
    """Every tensor of an HDF5 file as float64, by a reader that is not ours; bfloat16 lies there as
    its bits.
    """
    with h5py.File(path) as file:
        found = {}
        file.visititems(
            lambda name, item: (
                found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        )
        return found


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["llama", "mixtral", "lora", "gpt2"])
def test_round_trip(tmp_path, form, name):
    model = models.build(name)
    report = CheckpointSaver(format=form).save(model, tmp_path / "out", adapter_only=False)
    assert ft_ckpt.verify(report.path).ok
    assert read_manifest(open_place(report.path)).parts[0].format == form
    torch.testing.assert_close(
        logits(ft_ckpt.load_model(report.path)), logits(model), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("form", ["h5", "dual"])
def test_h5py_reads_the_same_values_under_the_stored_names(tmp_path, form):
    model = models.build("mixtral")
    CheckpointSaver().save(model, tmp_path / "plain")
    CheckpointSaver().save(model, tmp_path / "out", format=form)
    expected, found = (
        load_file(tmp_path / "plain" / "model.safetensors"),
        by_h5py(tmp_path / "out" / "model.h5"),
    )
    assert set(expected) <= set(found)
    assert all(
        torch.equal(torch.from_numpy(found[name]), tensor) for name, tensor in expected.items()
    )


def test_dual_file_is_one_file_under_two_names(tmp_path):
    model = models.build("llama")
    report = CheckpointSaver().save(model, tmp_path / "out", format="dual")
    listed = {
        path.stat().st_ino: path.stat().st_size
        for path in report.path.iterdir()
        if path.name != "ft_ckpt.json"
    }
    assert report.bytes == sum(listed.values())
    one, other = report.path / "model.safetensors", report.path / "model.h5"
    assert one.stat().st_ino == other.stat().st_ino
    loaded, info = AutoModelForCausalLM.from_pretrained(report.path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("form", ["h5", "dual"])
def test_several_files_and_an_index(tmp_path, form):
    model = models.build("gpt2")
    report = CheckpointSaver(max_shard_size=30_000).save(model, tmp_path / "out", format=form)
    files = {tensor.file for tensor in read_manifest(open_place(report.path)).parts[0].tensors}
    assert len(files) > 2
    assert ft_ckpt.verify(report.path).ok
    assert torch.equal(logits(ft_ckpt.load_model(report.path)), logits(model))


@pytest.mark.parametrize("form", ["h5", "dual"])
def test_adapters(tmp_path, form):
    CheckpointSaver().save(models.build("qwen3"), tmp_path / "base")
    model = models.lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    models.fill(model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_B"))
    report = CheckpointSaver(format=form).save(model, tmp_path / "adapter", adapter_only=True)
    loaded = ft_ckpt.load_model(report.path)
    assert set(loaded.peft_config) == {"default", "second"}
    assert loaded.active_adapters == ["default"]
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["h5", "dual"])
def test_attributes(tmp_path, form):
    model = models.build("policy_and_value")
    CheckpointSaver(format=form).save(model, tmp_path / "out", attribute=["policy", "value_head"])
    loaded = ft_ckpt.load_model(tmp_path / "out", into={"value_head": models.ValueHead()})
    for name in ("policy", "value_head"):
        live, again = getattr(model, name).state_dict(), loaded[name].state_dict()
        assert all(torch.equal(again[key], tensor) for key, tensor in live.items())


def test_ties_stand_under_both_names_in_hdf5(tmp_path):
    report = CheckpointSaver(format="h5").save(models.build("llama"), tmp_path / "out")
    loaded = ft_ckpt.load_model(report.path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert read_manifest(open_place(report.path)).parts[0].ties == (
        ("model.embed_tokens.weight", "lm_head.weight"),
    )


@pytest.mark.parametrize("form", ["h5", "dual"])
def test_changed_bytes_are_found(tmp_path, form):
    """A damaged HDF5 file opens as if nothing were wrong."""
    report = CheckpointSaver(format=form).save(models.build("llama"), tmp_path / "out")
    with (report.path / "model.h5").open("r+b") as file:
        file.seek(-40_000, 2)
        byte = file.read(1)
        file.seek(-40_000, 2)
        file.write(bytes([byte[0] ^ 1]))
    (problem,) = ft_ckpt.verify(report.path).problems
    # in a dual checkpoint two names of one file
    changed = "model.safetensors" if form == "dual" else "model.h5"
    assert problem.startswith(f"{changed}: digest")


def test_compressed(tmp_path):
    """Smaller, committed with the digests of what lies there, and the same model again."""
    model = models.build("wide").to(torch.bfloat16)
    plain = CheckpointSaver(format="h5").save(model, tmp_path / "plain")
    report = CheckpointSaver(format="h5", compression="gzip").save(model, tmp_path / "out")
    assert report.bytes < 0.9 * plain.bytes
    assert ft_ckpt.verify(report.path).ok
    loaded, live = ft_ckpt.load_model(report.path).state_dict(), model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in live.items())


def test_compression_is_for_hdf5():
    with pytest.raises(ConfigError, match=r"expected .* with format='h5'"):
        CheckpointSaver(compression="gzip")


def test_files_of_the_caller_leave_the_checkpoint_its_names(tmp_path):
    """A checkpoint was committed whose manifest, or index, was not what it said."""
    model = models.build("llama")
    for name in ("model.safetensors", "../out.txt", "ft_ckpt.json", "model.safetensors.index.json"):
        with pytest.raises(ConfigError, match=rf"extra_files: {name}"):
            CheckpointSaver().save(model, tmp_path / "out", extra_files={name: b"mine"})
    for content in (None, 5):
        with pytest.raises(ConfigError, match=r"extra_files: notes\.txt: expected text or bytes"):
            CheckpointSaver().save(model, tmp_path / "out", extra_files={"notes.txt": content})
    assert not any(tmp_path.iterdir())
