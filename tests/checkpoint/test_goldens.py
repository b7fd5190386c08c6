"""Checkpoints that earlier versions wrote are verified, loaded, converted, resumed and pruned by
this one.
"""

import json
import shutil
import subprocess
import sys
import warnings
from dataclasses import fields

import pytest
import torch
from places import TESTS
from safetensors.torch import load_file

from ft_ckpt import CheckpointSaver, Writer, convert, latest, load_model, pull, verify
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    manifest_from_json,
    manifest_to_json,
    read_manifest,
)
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import open_place

sys.path.insert(0, str(TESTS / "golden"))
from make_checkpoints import (
    LAST_WRITTEN,
    RANKED,
    SINGLE,
    STEPS,
    WEIGHTS,
    Network,
    PolicyAndValue,
    batches,
    changed_llama,
    classifier_base,
    fill,
    llama,
    lora,
    optimizer_of,
    replay_state,
    train,
)

GOLDEN = TESTS / "golden" / "checkpoints"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir())
OBJECTS = {
    "lora": lambda: {"base": lora().unload()},
    "classifier": lambda: {"base": classifier_base()},
    "module": lambda: {"into": empty(Network())},
}
ONE_MODEL = [name for name in WEIGHTS if name != "composite"]
LATER = {  # kinds that the first version here did not write, and the version that did
    "gzip": "0.2.0",
    "classifier": "0.3.0",
    "composite": "0.3.0",
    "writers": "0.3.0",
    "deltas": "0.3.0",
    "signed": "0.3.0",
}


def empty(model):
    """The model with nothing but zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def cases(names):
    return [
        (version, name)
        for version in VERSIONS
        for name in names
        if (GOLDEN / version / name).exists()
    ]


def test_all_versions_are_here():
    assert VERSIONS == ["0.1.0", "0.2.0", "0.3.0", "0.4.0"]
    for name in [*WEIGHTS, *RANKED, *SINGLE]:
        first = LATER.get(name, VERSIONS[0])
        last = LAST_WRITTEN.get(name, VERSIONS[-1])
        written = [version for version in VERSIONS if first <= version <= last]
        assert cases([name]) == [(version, name) for version in written]


@pytest.mark.parametrize(("version", "name"), cases(ONE_MODEL))
def test_weights(tmp_path, version, name):
    folder = GOLDEN / version / name
    assert (read_manifest(open_place(folder)).versions["ft_ckpt"], verify(folder).problems) == (
        version,
        (),
    )
    found = load_model(folder, **OBJECTS.get(name, dict)())
    expected = WEIGHTS[name][0]().state_dict()
    assert expected.keys() == found.state_dict().keys()
    assert all(torch.equal(found.state_dict()[key], value) for key, value in expected.items())
    convert(folder, tmp_path / "out", format="safetensors", verify=True)
    for file in (tmp_path / "out").rglob("*.safetensors"):
        stored = load_file(file)
        names = {key: value for key, value in expected.items() if key in stored}
        assert names or name in ("lora", "classifier")
        assert all(torch.equal(stored[key], value) for key, value in names.items())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_manifest_that_is_written_again_has_the_same_text(version):
    for path in sorted((GOLDEN / version).rglob(MANIFEST_NAME)):
        manifest = read_manifest(open_place(path.parent))
        again = manifest_from_json(manifest_to_json(manifest))
        assert manifest_to_json(again) == manifest_to_json(manifest), path
        if version == VERSIONS[-1]:  # earlier ones lack fields
            assert manifest_to_json(manifest) == path.read_text(), path


def test_show_prints_the_fields_that_an_early_manifest_lacks():
    path = GOLDEN / VERSIONS[0] / "full"
    command = [sys.executable, "-m", "ft_ckpt", "show", str(path), "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert {declared.name for declared in fields(Manifest)} <= shown.keys()
    assert {declared.name for declared in fields(FileRecord)} == shown["files"][0].keys()


@pytest.mark.parametrize(("version", "name"), cases(["composite"]))
def test_parts_of_a_composite(version, name):
    folder = GOLDEN / version / name
    assert verify(folder).problems == ()
    expected = PolicyAndValue()
    same_weights(load_model(folder, part="policy"), expected.policy)
    value_head = load_model(folder, part="value_head", into=empty(torch.nn.Linear(16, 1)))
    same_weights(value_head, expected.value_head)


@pytest.mark.parametrize(("version", "name"), cases(["deltas"]))
def test_a_chain_of_deltas_is_rebuilt(tmp_path, version, name):
    chain = GOLDEN / version / name
    kinds = [read_manifest(open_place(chain / f"checkpoint-{step}")).kind for step in (1, 2)]
    assert kinds == ["full", "delta"]
    for step in (1, 2):
        assert verify(chain / f"checkpoint-{step}").problems == ()
        rebuilt = tmp_path / f"checkpoint-{step}"
        pull(str(chain / f"checkpoint-{step}"), rebuilt)
        same_weights(load_model(rebuilt), changed_llama(step))


@pytest.mark.parametrize(("version", "name"), cases(["signed"]))
def test_a_signature_holds(version, name):
    folder = GOLDEN / version / name / "checkpoint-2"
    key = folder.parent / "public.pem"
    assert verify(folder, signed_by=key).problems == ()
    same_weights(load_model(folder, require_signature=key), llama())


@pytest.mark.parametrize(("version", "name"), cases(["writers"]))
def test_trainer_and_writer_go_on(tmp_path, version, name):
    shutil.copytree(GOLDEN / version / name, tmp_path / "run")
    assert verify(tmp_path / "run" / "checkpoint-2").problems == ()
    model = Network()
    optimizer = optimizer_of(model)
    expected = Network()
    expected_optimizer = optimizer_of(expected)
    train(expected, expected_optimizer, batches()[:STEPS])
    with CheckpointSaver(None, tmp_path / "run") as saver:
        saver.register(model=model, optimizer=optimizer)
        assert saver.resume("must").step == STEPS
        compare(model, optimizer, expected, expected_optimizer)
        session = saver.invite("replay")
        with Writer(tmp_path / "run", "replay", session=session) as writer:
            state = writer.resume().state
    assert state["cursor"] == replay_state()["cursor"]
    assert torch.equal(state["rewards"], replay_state()["rewards"])


@pytest.mark.parametrize(("version", "name"), cases(RANKED))
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


def same_weights(model, expected):
    stored, original = model.state_dict(), expected.state_dict()
    assert stored.keys() == original.keys()
    for key, value in original.items():
        assert torch.equal(stored[key], value), key


def compare(model, optimizer, expected, other):
    for found, wanted in zip(
        model.state_dict().values(), expected.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    for found, wanted in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, atol=1e-6, rtol=1e-5)


def test_fill_is_not_zero():
    """What the golden files are compared with has values of its own everywhere."""
    assert all(
        parameter.unique().numel() > 1 or parameter.numel() == 1
        for parameter in fill(Network()).parameters()
    )
