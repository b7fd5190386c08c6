"""The dual file: safetensors and HDF5 at once, the same bytes for both."""

import logging
import shutil
import subprocess

import h5py
import pytest
import torch
from contract_format import equal, state
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_cerebras import read_by_their_rules
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
)

from ft_ckpt.errors import CorruptError, SelectionError
from ft_ckpt.extensions.hdf5 import dual
from ft_ckpt.extensions.tools import load, save
from ft_ckpt.formats import Spec
from ft_ckpt.formats.safetensors import HELPER

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save(state(), path, "dual")
    return path


def test_safetensors_reads_it(path):
    found = load_file(path)
    assert found.keys() == state().keys() | {HELPER}
    assert all(equal(found[name], value) for name, value in state().items())
    with safe_open(path, "pt") as file:
        assert equal(file.get_slice("steps")[2:5], state()["steps"][2:5])


def test_hdf5_reads_it(path):
    with h5py.File(path) as file:
        assert file.userblock_size >= 512
        assert (
            torch.from_numpy(file["model.layers.0.weight"][()]) == state()["model.layers.0.weight"]
        ).all()
    found = read_by_their_rules(path)
    assert all(equal(found[name], value) for name, value in state().items())


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="hdf5-tools are not installed")
def test_h5dump_reads_it(path):
    assert (
        "( 40, 50, 60 )"
        in subprocess.run(["h5dump", "-H", path], capture_output=True, text=True, check=True).stdout
    )


def test_it_opens_under_either_name(path, tmp_path):
    (tmp_path / "model.h5").hardlink_to(path)
    found = load(tmp_path / "model.h5")
    assert all(equal(found[name], value) for name, value in state().items())


def test_an_object_comes_back_through_both(tmp_path):
    obj = {"model": [torch.ones(3), (1, None)], 5: {"x": 2.5}}
    save(obj, tmp_path / "x.safetensors", "dual")
    for kind in ("safetensors", "h5"):
        found = load(tmp_path / "x.safetensors", format=kind)
        assert equal(found["model"][0], torch.ones(3))
        assert (found["model"][1], found[5]) == ((1, None), {"x": 2.5})


def test_saved_again_by_safetensors_it_is_safetensors(path, tmp_path):
    """A helper that describes another file is ignored."""
    save_file(load_file(path), tmp_path / "again.safetensors")
    assert equal(load(tmp_path / "again.safetensors")["steps"], state()["steps"])


def test_tables_that_differ_are_refused(path):
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"steps"', b'"stepz"', 1))
    with pytest.raises(CorruptError, match="two tables"):
        load(path)


def test_there_is_no_way_without_a_helper():
    """Why the helper: HDF5's signature has bytes that no JSON may have, so it cannot lie in
    safetensors' header.
    """
    signature = b"\x89HDF\r\n\x1a\n"
    assert 0x1A in signature  # neither in a string nor between two of them
    # nor at the front: the header would be too long
    assert int.from_bytes(signature, "little") > 100_000_000


@pytest.mark.sample("1", "40")
@pytest.mark.parametrize("count", [1, 40, 3000])
def test_the_superblock_is_where_hdf5_looks(count):
    layout = dual.lay_out_dual(
        [Spec(f"layer.{i}", (3, 5), "bfloat16") for i in range(count)], {"format": "pt"}
    )
    place = int.from_bytes(layout.header[:8], "little") + 8
    assert place & place - 1 == 0
    assert layout.header[place : place + 4] == b"\x89HDF"
    assert layout.starts[0] % 4096 == 0


def test_types_that_safetensors_lacks_are_refused():
    with pytest.raises(SelectionError, match="complex128"):
        dual.lay_out_dual([Spec("x", (1,), "complex128")], {})


@pytest.mark.parametrize(
    ("model", "unexpected"),
    [
        (LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)), set()),
        (BertModel(BertConfig(**SMALL)), set()),
        (GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64)), {HELPER}),
    ],
    ids=["rotary", "position ids", "neither"],
)
def test_from_pretrained(model, unexpected, tmp_path, caplog):
    """Quiet where transformers has a rule for old buffers; elsewhere the helper is listed once, and
    ignored.
    """
    model.save_pretrained(tmp_path)
    save(load(tmp_path / "model.safetensors"), tmp_path / "model.safetensors", "dual")
    with caplog.at_level(logging.WARNING, "transformers"):
        found, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert (report["missing_keys"], report["unexpected_keys"]) == (set(), unexpected)
    assert all(equal(value, found.state_dict()[name]) for name, value in model.state_dict().items())
    assert AutoModel.from_pretrained(tmp_path) is not None
