"""`ft-ckpt verify` of single files, and of runs that it cannot read all of; `report` of what is no
run.
"""

import pytest
from small_checkpoints import save, save_with_state

from ft_ckpt.checkpoint.checks import verification as foreign_files, verify_listed
from ft_ckpt.cli import run_command, verify as verify_command
from ft_ckpt.errors import NotACheckpointError, UnreadableError
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place


def verified(path):
    return run_command(["verify", str(path)])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "policy/model.safetensors"])
def test_a_file_of_a_checkpoint_is_compared_with_its_manifest(name, tmp_path, capsys):
    save(tmp_path / "checkpoint", step=1, parts=("", "policy"))
    file = tmp_path / "checkpoint" / name
    assert verified(file) == 0
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of a value: the header holds together
    file.write_bytes(content)
    assert verified(file) == 1
    assert f"{name}: digest" in capsys.readouterr().out


def test_a_file_that_no_manifest_lists_is_judged_by_its_header(tmp_path, capsys):
    save(tmp_path / "checkpoint", step=1)
    (tmp_path / "checkpoint" / "model.safetensors").rename(
        tmp_path / "checkpoint" / "other.safetensors"
    )
    other = tmp_path / "checkpoint" / "other.safetensors"
    assert verify_listed(open_place(other)) is None
    assert verified(other) == 0
    assert "values were not compared" in capsys.readouterr().out


def test_one_folder_that_is_closed_hides_no_other(tmp_path, capsys, monkeypatch):
    for step in (1, 2):
        save_with_state(tmp_path / f"checkpoint-{step}", step)
    seen, compared = LocalStore.stat, verify_command.verify

    def refuse(folder):
        if folder.name == "checkpoint-1":
            raise UnreadableError(f"{folder}: cannot be read (Permission denied)")

    monkeypatch.setattr(
        LocalStore, "stat", lambda store, name: refuse(store.folder) or seen(store, name)
    )
    monkeypatch.setattr(
        verify_command, "verify", lambda at, **how: refuse(at.folder.folder) or compared(at, **how)
    )
    monkeypatch.setattr(verify_command, "discover", lambda place: [])
    assert verified(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "Permission denied" in printed
    assert f"{tmp_path / 'checkpoint-2'}: ok" in printed


def test_a_report_is_of_a_run(tmp_path):
    save(tmp_path / "checkpoint", step=1)
    with pytest.raises(NotACheckpointError, match="a checkpoint, expected the folder of a run"):
        run_command(["report", str(tmp_path / "checkpoint")])


def test_files_know_the_checkpoint_that_lists_them(tmp_path):
    save(tmp_path / "checkpoint", step=1)
    found = foreign_files.listing_manifest(open_place(tmp_path / "checkpoint" / "config.json"))
    assert found is not None
    assert (found[0].where("x"), found[2].path) == (
        str(tmp_path / "checkpoint" / "x"),
        "config.json",
    )
    assert foreign_files.listing_manifest(open_place(tmp_path / "nothing.json")) is None
