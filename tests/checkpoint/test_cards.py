"""Model cards that the Trainer, PEFT or a person writes again in a committed checkpoint."""

import models
import pytest
from buckets import new_bucket

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.checks import verify
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.cli import run_command
from ft_ckpt.errors import CorruptError
from ft_ckpt.extensions.transfer.sending import copy
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place

CHANGED = ("README.md: the model card was changed after the save",)


@pytest.fixture
def saved(tmp_path):
    """The checkpoint of an adapter, whose card was written again."""
    base = models.llama()
    base.save_pretrained(tmp_path / "base")
    model = models.lora(type(base).from_pretrained(tmp_path / "base"))
    CheckpointSaver().save(model, tmp_path / "adapter", adapter_only=True)
    card = tmp_path / "adapter" / "README.md"
    card.write_text(card.read_text() + "\nTrained on a Thursday.\n")
    return tmp_path / "adapter"


def test_a_changed_card_is_no_damage(saved, capsys):
    report = verify(saved)
    assert (report.ok, report.problems, report.notes) == (True, (), CHANGED)
    assert report.bytes == sum(
        (saved / file.path).stat().st_size for file in read_manifest(open_place(saved)).files
    )
    assert run_command(["verify", str(saved)]) == 0
    assert f"note: {CHANGED[0]}" in capsys.readouterr().out
    assert run_command(["verify", str(saved / "README.md")]) == 0
    assert f"note: {CHANGED[0]}" in capsys.readouterr().out
    assert ft_ckpt.load_model(saved, verify=True).peft_config


def test_a_copy_has_the_card_as_it_is(saved, tmp_path):
    copy(saved, tmp_path / "copy")
    report = verify(tmp_path / "copy")
    assert (report.ok, report.notes) == (True, ())
    assert (tmp_path / "copy" / "README.md").read_text().endswith("Thursday.\n")


def test_a_deleted_card_is_no_damage_either(saved):
    (saved / "README.md").unlink()
    assert verify(saved).notes == ("README.md: the model card was deleted after the save",)
    assert ft_ckpt.load_model(saved, verify=True).peft_config


def test_other_files_are_compared_as_before(saved):
    settings = saved / "adapter_config.json"
    settings.write_text(settings.read_text() + "\n")
    assert not verify(saved).ok
    with pytest.raises(CorruptError, match=r"adapter_config\.json"):
        ft_ckpt.load_model(saved, verify=True)


def test_a_card_in_a_bucket(saved):
    pytest.importorskip("obstore")
    bucket = new_bucket("runs/adapter")
    copy(saved, Place(bucket))
    assert verify(Place(bucket)).notes == ()
    bucket.write("README.md", b"# Written in the bucket\n")
    assert verify(Place(bucket)).notes == CHANGED
    with open_checkpoint(Place(bucket)) as checkpoint:
        assert checkpoint.store.read("README.md") == b"# Written in the bucket\n"
    bucket.write("adapter_config.json", LocalStore(saved).read("adapter_config.json") + b"\n")
    assert not verify(Place(bucket)).ok
