"""Across architectures, our folder and `save_pretrained`'s hold the same tensors, and ours loads to
the same model.
"""

import json

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, inputs, make
from compare import assert_agree, assert_same_tensors, raw, reference, stored
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import LoadError


@torch.no_grad()
def outputs(model: nn.Module, kind: str) -> torch.Tensor:
    out = model.eval()(**inputs(kind))
    return out.logits_per_image if kind == "image_text" else out.logits


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folder_is_the_one_save_pretrained_writes(name, tmp_path):
    """Names, ties and layout of each architecture, on disk and after reload."""
    architecture = ARCHITECTURES[name]
    model = make(architecture)
    before = {key: raw(tensor) for key, tensor in model.state_dict().items()}
    CheckpointSaver().save(model, tmp_path / "ours")
    assert {key: raw(tensor) for key, tensor in model.state_dict().items()} == before
    assert_same_tensors(stored(tmp_path / "ours"), reference(model, tmp_path / "theirs"))
    ours, theirs = (
        json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs")
    )
    assert ours == theirs
    loaded = getattr(transformers, architecture.model).from_pretrained(tmp_path / "ours")
    assert_agree(outputs(loaded, architecture.inputs), outputs(model, architecture.inputs))


@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "t5", "vit", "mamba2"])
def test_load_model_gives_the_same_model(name, tmp_path):
    """A partial load that passes silently."""
    architecture = ARCHITECTURES[name]
    model = make(architecture)
    CheckpointSaver().save(model, tmp_path / "ours")
    loaded, report = ft_ckpt.load_model(tmp_path / "ours", with_report=True)
    assert not report.missing
    assert not report.unexpected
    assert type(loaded) is type(model)
    assert_agree(outputs(loaded, architecture.inputs), outputs(model, architecture.inputs))


@pytest.mark.parametrize("layout", ["safetensors", "h5"])
@pytest.mark.parametrize("name", ["mixtral", "llava"])
def test_a_converted_model_goes_into_one_that_is_there(name, layout, tmp_path):
    """Experts that are stored one by one and fused in memory, other names: in memory of its own, in
    its own types.
    """
    architecture = ARCHITECTURES[name]
    model, into = make(architecture), make(architecture)
    with torch.no_grad():
        for parameter in into.parameters():
            parameter.fill_(7)
    CheckpointSaver().save(model, tmp_path, format=layout)
    places = {name: one.data_ptr() for name, one in into.named_parameters()}
    assert ft_ckpt.load_model(tmp_path, into=torch.compile(into)).training == into.training
    assert {name: one.data_ptr() for name, one in into.named_parameters()} == places
    assert {n: raw(one) for n, one in into.state_dict().items()} == {
        n: raw(one) for n, one in model.state_dict().items()
    }
    ft_ckpt.load_model(tmp_path, into=into.double())
    assert {one.dtype for one in into.parameters()} == {torch.float64}
    smaller = make(architecture)
    del smaller.lm_head
    with pytest.raises(LoadError, match=r"lm_head\.weight: not in the model"):
        ft_ckpt.load_model(tmp_path, into=smaller)


def test_what_the_class_makes_anew_is_not_missing(tmp_path):
    """Tables of sines that transformers leaves out of the file: there after a load, into a module
    of ours too.
    """
    config = transformers.MarianConfig(
        vocab_size=31,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        pad_token_id=2,
        max_position_embeddings=8,
    )
    model = transformers.MarianMTModel(config)
    want = {name: raw(tensor) for name, tensor in model.state_dict().items()}
    CheckpointSaver().save(model, tmp_path)
    assert "model.encoder.embed_positions.weight" not in stored(tmp_path)
    for loaded in (ft_ckpt.load_model(tmp_path), transformers.MarianMTModel(config)):
        ft_ckpt.load_model(tmp_path, into=loaded)
        assert {name: raw(tensor) for name, tensor in loaded.state_dict().items()} == want


@pytest.mark.parametrize("layout", ["safetensors", "h5"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "llava"])
def test_types_that_are_mixed_come_back(name, layout, tmp_path):
    """A model that transformers converts is made in one type, and norms in float32 were rounded to
    it.
    """
    model = make(ARCHITECTURES[name])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16() if parameter.ndim > 1 else parameter.data + 1e-6
    want = {name: (tensor.dtype, raw(tensor)) for name, tensor in model.state_dict().items()}
    report = CheckpointSaver().save(model, tmp_path / "out", format=layout)
    assert any("norm" in note and "config's bfloat16" in note for note in report.notes)
    loaded = ft_ckpt.load_model(tmp_path / "out").state_dict()
    assert {name: (tensor.dtype, raw(tensor)) for name, tensor in loaded.items()} == want
