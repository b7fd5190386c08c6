"""The registry of formats: a new one is a class, in a table or an entry point."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import models
import pytest
import tiny_format
import torch
from places import ROOT
from raw_files import raw_file
from tiny_format import Tiny

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import ConfigError
from ft_ckpt.formats import (
    detect_format,
    format_named,
    register_format,
    registry,
    tensor_formats,
)
from ft_ckpt.storage.places import open_place


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
    manifest = read_manifest(open_place(report.path))
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


IN_A_NEW_PROCESS = """
import sys
import torch
import ft_ckpt
from ft_ckpt.formats import registry

out = sys.argv[1]
tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
ft_ckpt.save(tensors, f"{out}/x.safetensors")
ft_ckpt.CheckpointSaver(format="h5")
assert registry.load_installed_formats.cache_info().misses == 0, "nothing has asked for another"
ft_ckpt.CheckpointSaver(format="tiny").save(torch.nn.Linear(3, 2), f"{out}/model")
assert ft_ckpt.verify(f"{out}/model").ok
into = torch.nn.Linear(3, 2)
ft_ckpt.load_model(f"{out}/model", into=into)
ft_ckpt.convert(f"{out}/x.safetensors", f"{out}/y.tiny", verify=True)
ft_ckpt.convert(f"{out}/y.tiny", f"{out}/z.h5", verify=True)
found = ft_ckpt.load(f"{out}/z.h5", "cpu")
assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
"""


def distribution(folder: Path, value: str, name: str = "tiny") -> dict[str, str]:
    """The environment of a process in which a distribution with the format is installed."""
    shutil.copy(tiny_format.__file__, folder / "tiny_format.py")
    facts = folder / "tiny_format-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-format\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{name} = {value}\n")
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def python(code, env, *args):
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True)


def test_an_installed_distribution_brings_a_format(tmp_path):
    ended = python(IN_A_NEW_PROCESS, distribution(tmp_path, "tiny_format:Tiny"), tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_the_commands_know_an_installed_format(tmp_path):
    ft_ckpt.save({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    env = distribution(tmp_path, "tiny_format:Tiny")
    for source, target in (("x.safetensors", "y.tiny"), ("y.tiny", "z.h5")):
        words = ["-m", "ft_ckpt", "convert", str(tmp_path / source), str(tmp_path / target)]
        subprocess.run([sys.executable, *words], env=env, check=True, capture_output=True)
    assert torch.equal(ft_ckpt.load(tmp_path / "z.h5", "cpu")["a"], torch.ones(3))


DERIVED = "from tiny_format import Tiny\nfrom ft_ckpt.formats import CheckpointFormat\n"
UNFIT = {
    "cannot be imported": ("import not_there", "cannot be imported .*No module named 'not_there'"),
    "other code fails": ("1 / 0", "cannot be imported .ZeroDivisionError"),
    "no such class": ("Tuny = Tiny", "cannot be imported .AttributeError"),
    "another class": ("class Unfit: pass", "Unfit is not derived from TensorFormat"),
    "a function": ("def Unfit(): return Tiny()", "Unfit is not derived from TensorFormat"),
    "no methods": (
        "class Unfit(CheckpointFormat): name = 'tiny'",
        "lacks lay_out, open_indexed, recognises;",
    ),
    "arguments missing": (
        "class Unfit(Tiny):\n def lay_out(self, specs, metadata): pass",
        r"lay_out.self, specs, metadata., expected lay_out.self, specs, metadata, ties.;",
    ),
    "an option by another name": (
        "class Unfit(Tiny):\n def open_indexed(self, file, check=False): pass",
        "open_indexed.self, file, check=False., expected open_indexed.self, file, verify=False.;",
    ),
    "no method": ("class Unfit(Tiny): open = None", "open is a NoneType, expected a method"),
    "with arguments": (
        "class Unfit(Tiny):\n def __init__(self, level): pass",
        "cannot be made without arguments .TypeError",
    ),
    "another name": ("class Unfit(Tiny): name = 'small'", "name='small', expected the name of"),
    "no name": ("class Unfit(Tiny): name = None", "name=None, expected the name of the entry"),
    "suffixes": ("class Unfit(Tiny): suffixes = '.tiny'", "suffixes='.tiny', expected a tuple"),
    "no suffixes": ("class Unfit(Tiny): suffixes = ()", "no suffixes, expected .*'.tiny'"),
}


@pytest.fixture
def install_unfit(tmp_path, monkeypatch):
    """Call it with code: this process then finds a distribution whose format is `Unfit`."""
    registry.load_installed_formats.cache_clear()

    def install(code, name="tiny"):
        distribution(tmp_path, "unfit:Unfit", name)
        (tmp_path / "unfit.py").write_text(f"{DERIVED}{code}\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("unfit", None)
    registry.load_installed_formats.cache_clear()


@pytest.mark.parametrize("name", UNFIT)
def test_a_format_that_does_not_fit_is_named_with_its_distribution(install_unfit, name):
    code, expected = UNFIT[name]
    install_unfit(code)
    with pytest.raises(ConfigError) as caught:
        CheckpointSaver(format="tiny")
    error = str(caught.value)
    start = r"format 'tiny' of tiny-format 1\.0 \(unfit:Unfit\): "
    assert re.match(f"{start}{expected}", error), error
    assert re.search(r"remove (it|tiny-format 1\.0)$", error), error


def test_an_installed_format_does_not_replace_one_of_ft_ckpt(install_unfit):
    install_unfit("class Unfit(Tiny): name = 'safetensors'", "safetensors")
    with pytest.raises(
        ConfigError, match=r"is that of ft_ckpt\.formats\.safetensors\.safetensors_f"
    ):
        CheckpointSaver(format="tiny")


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


def test_a_module_that_is_missing_is_not_taken_for_damage(tiny, tmp_path, monkeypatch):
    ft_ckpt.save({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    ft_ckpt.convert(tmp_path / "x.safetensors", tmp_path / "x.tiny")

    def needs_a_module(self, file, verify=False):
        importlib.import_module("not_there")

    monkeypatch.setattr(Tiny, "open_indexed", needs_a_module)
    with pytest.raises(ConfigError, match=r"x\.tiny: a module .*No module named 'not_there'"):
        ft_ckpt.convert(tmp_path / "x.tiny", tmp_path / "y.h5")
