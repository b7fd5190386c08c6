"""The registry of formats: a new one is a file with its functions and one record."""

import ast
import json
import subprocess
import sys

import models
import pytest
import torch
from opened import raw_file
from places import ROOT

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint.catalog import read_manifest
from ft_ckpt.errors import ConfigError
from ft_ckpt.formats import (
    IndexedFile,
    Layout,
    TensorFormat,
    TensorIndex,
    detect_format,
    format_named,
    register_format,
    registry,
    tensor_formats,
)

MAGIC = b"tiny"


class Tiny(TensorFormat):
    """Four letters, the length of a table of the tensors, that table, and the tensors one after the
    other.
    """

    name = "tiny"
    suffixes = (".tiny",)
    serves_checkpoints = is_written = True

    def recognises(self, file):
        return file.bytes(0, 4) == MAGIC

    def lay_out(self, specs, metadata, ties):
        starts, at = [], 0
        for spec in specs:
            starts.append(at)
            at += spec.size_bytes
        table = [
            [spec.name, spec.dtype, spec.shape, start]
            for spec, start in zip(specs, starts, strict=True)
        ]
        text = json.dumps(table).encode()
        header = MAGIC + len(text).to_bytes(8, "little") + text
        return Layout(
            header, tuple(specs), tuple(len(header) + start for start in starts), len(header) + at
        )

    def open_indexed(self, file, verify=False):
        size = int.from_bytes(file.bytes(4, 8), "little")
        table = json.loads(file.bytes(12, size))
        rows = {
            name: [dtype, shape, start, "", leaf]
            for leaf, (name, dtype, shape, start) in enumerate(table)
        }
        return IndexedFile(file, TensorIndex(rows, None, {}, 12 + size), verify)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._formats()))
    register_format(Tiny())


def logits(model):
    with torch.no_grad():
        return model.eval()(**models.batch(0)).logits


@pytest.mark.parametrize(("name", "shard"), [("llama", "50GB"), ("gpt2", 30_000), ("lora", "50GB")])
def test_a_new_format_saves_and_loads_models(tiny, tmp_path, name, shard):
    model = models.build(name)
    report = CheckpointSaver(format="tiny", max_shard_size=shard).save(
        model, tmp_path / "out", adapter_only=False
    )
    manifest = read_manifest(report.path)
    assert {part.format for part in manifest.parts} == {"tiny"}
    files = {tensor.file for tensor in manifest.parts[0].tensors}
    assert (len(files) > 1) == (shard != "50GB")
    assert {detect_format(raw_file(report.path / file)).name for file in files} == {"tiny"}
    assert ft_ckpt.verify(report.path).ok
    torch.testing.assert_close(
        logits(ft_ckpt.load_model(report.path)), logits(model), rtol=0, atol=1e-6
    )


def test_a_new_format_is_converted_from_and_to(tiny, tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    ft_ckpt.save(tensors, tmp_path / "x.safetensors")
    ft_ckpt.convert(tmp_path / "x.safetensors", tmp_path / "y.tiny", verify=True)
    ft_ckpt.convert(tmp_path / "y.tiny", tmp_path / "z.h5", verify=True)
    found = ft_ckpt.load(tmp_path / "z.h5", "cpu")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_format_that_is_not_registered_is_refused():
    with pytest.raises(ConfigError, match="'tiny': expected one of safetensors, h5, dual"):
        CheckpointSaver(format="tiny")
    with pytest.raises(
        ConfigError, match="format 'tiny': expected one of safetensors, h5, dual, torch"
    ):
        ft_ckpt.save({}, "x", "tiny")
    with pytest.raises(
        ConfigError, match="format='tiny': expected one of safetensors, h5, dual, torch, tensor"
    ):
        ft_ckpt.convert("x", "y", format="tiny")
    with pytest.raises(ConfigError, match="format 'torch': its files have no index"):
        format_named("torch").open_indexed(None)


def test_asking_the_records_needs_no_torch():
    code = (
        "import sys, ft_ckpt.formats.registry, ft_ckpt.config; "
        "ft_ckpt.config.SaverConfig(format='h5'); "
    )
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_formats_are_those_of_the_table():
    """They are named by text, which no type checker follows."""
    assert [tensor_format.name for tensor_format in tensor_formats()] == [
        *("safetensors", "h5", "dual", "torch", "keras", "flax"),
        *("tensorflow", "orbax", "dcp", "lightning"),
    ]


def test_nothing_compares_names_of_formats():
    """A comparison with one would be a place that a new format does not reach."""
    names = {known.name for known in tensor_formats()} - {"torch"}  # which is the name of much else
    for path in (ROOT / "ft_ckpt").rglob("*.py"):
        text = path.read_text()
        named = any(f'"{name}"' in text for name in names)  # most modules need not be parsed
        for node in ast.walk(ast.parse(text)) if named else ():
            parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            constants = {
                one.value
                for part in parts
                for one in ast.walk(part)
                if isinstance(one, ast.Constant)
            }
            assert not names & constants, f"{path}:{node.lineno}"
