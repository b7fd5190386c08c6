"""Checkpoints that earlier versions wrote are verified, loaded, converted, resumed and pruned by this one."""

import shutil
import sys
import warnings

import pytest
import torch
from places import TESTS
from safetensors.torch import load_file

from ft_ckpt import CheckpointSaver, convert, latest, load_model, verify
from ft_ckpt.checkpoint.catalog import read_manifest

sys.path.insert(0, str(TESTS / "golden"))
from make_checkpoints import STEPS, WEIGHTS, Network, batches, fill, lora, optimizer_of, train

GOLDEN = TESTS / "golden" / "checkpoints"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir())
OBJECTS = {"lora": lambda: {"base": lora().unload()}, "module": lambda: {"into": empty(Network())}}
RUNS = ["ddp", "fsdp2", "zero2", "zero3"]


def empty(model):
    """The model with nothing but zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def cases(names):
    return [(version, name) for version in VERSIONS for name in names if (GOLDEN / version / name).exists()]


def test_all_versions_are_here():
    assert VERSIONS == ["0.1.0", "0.2.0"]
    assert len(cases(WEIGHTS)) == 2 * len(WEIGHTS) - 1  # 0.1.0 knew no gzip
    assert len(cases(RUNS)) == 2 * len(RUNS)


@pytest.mark.parametrize(("version", "name"), cases(WEIGHTS))
def test_weights(tmp_path, version, name):
    folder = GOLDEN / version / name
    assert (read_manifest(folder).versions["ft_ckpt"], verify(folder).problems) == (version, ())
    found = load_model(folder, **OBJECTS.get(name, dict)())
    expected = WEIGHTS[name][0]().state_dict()
    assert expected.keys() == found.state_dict().keys()
    assert all(torch.equal(found.state_dict()[key], value) for key, value in expected.items())
    convert(folder, tmp_path / "out", format="safetensors", verify=True)
    for file in (tmp_path / "out").rglob("*.safetensors"):
        stored = load_file(file)
        names = {key: value for key, value in expected.items() if key in stored}
        assert names or name == "lora"
        assert all(torch.equal(stored[key], value) for key, value in names.items())


@pytest.mark.parametrize(("version", "name"), cases(RUNS))
def test_runs(tmp_path, version, name):
    """The run of two ranks goes on in one process, as one that did the same without a stop."""
    shutil.copytree(GOLDEN / version / name, tmp_path / "run")
    assert verify(tmp_path / "run" / "checkpoint-2").problems == ()
    assert latest(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"
    expected, steps = Network(), batches()
    optimizer = optimizer_of(expected)
    train(expected, optimizer, steps[:STEPS])
    model = Network()
    other = optimizer_of(model)
    with CheckpointSaver(None, tmp_path / "run", on_difference="ignore") as saver:
        saver.register(model=model, optimizer=other)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the other number of ranks
            assert saver.resume("must").step == STEPS
        compare(model, other, expected, optimizer)
        train(expected, optimizer, steps[STEPS:])
        train(model, other, steps[STEPS:])
        compare(model, other, expected, optimizer)
        saver.step(step=STEPS + 1)
        saver.save_state()
    assert verify(tmp_path / "run" / "checkpoint-3").problems == ()


def compare(model, optimizer, expected, other):
    for found, wanted in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    for found, wanted in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, atol=1e-6, rtol=1e-5)


def test_fill_is_not_zero():
    """What the golden files are compared with has values of its own everywhere."""
    assert all(parameter.unique().numel() > 1 or parameter.numel() == 1 for parameter in fill(Network()).parameters())
