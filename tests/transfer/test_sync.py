"""The checkpoints of a run brought to another place, again and again, while the run goes on."""

import json

import pytest
from broken_lines import broken_line
from buckets import new_bucket
from small_checkpoints import rewrite_manifest, save_of, save_with_state
from test_bucket_places import command
from test_copies import FROZEN, files_of, save_large

from ft_ckpt import latest, sync, verify
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.catalog import list_checkpoints
from ft_ckpt.checkpoint.commit import delete_checkpoint, delete_state
from ft_ckpt.checkpoint.leases import pin
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, read_manifest
from ft_ckpt.errors import CheckpointError, ConfigError, NotACheckpointError
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place


@pytest.fixture(params=["folder", "bucket"])
def there(request, tmp_path):
    """Where the run goes."""
    return (
        Place(LocalStore(tmp_path / "there" / "sft"))
        if request.param == "folder"
        else Place(new_bucket())
    )


def save_small(run, *steps, **facts):
    for step in steps:
        save_of(
            run / f"checkpoint-{step}",
            step=step,
            run_id="r",
            created=f"2026-01-01T00:00:{step:02}+00:00",
            **facts,
        )


def names(place):
    return [info.name for info in list_checkpoints(open_place(place)).checkpoints]


def test_a_run_goes_there_and_back_newest_first_and_only_what_is_missing(tmp_path, there):
    run = tmp_path / "run"
    for step in (1, 2, 3):
        save_large(run / f"checkpoint-{step}", step)
    first = sync(run, there)
    assert first.missing == ("checkpoint-3", "checkpoint-2", "checkpoint-1")
    assert [each.reused for each in first.copied] == [(), (FROZEN,), (FROZEN,)]
    assert (first.problems, first.dropped, first.present) == ((), (), ())
    save_large(run / "checkpoint-4", 4)
    again = sync(run, there)
    assert (again.missing, again.present) == (
        ("checkpoint-4",),
        ("checkpoint-3", "checkpoint-2", "checkpoint-1"),
    )
    assert again.sent_bytes < 9 << 20
    assert sync(there, tmp_path / "back").problems == ()
    for name in names(run):
        assert verify(tmp_path / "back" / name).ok
        assert files_of(Place(LocalStore(tmp_path / "back"), name)) == files_of(
            Place(LocalStore(run), name)
        )
    assert str(latest(there)).endswith("checkpoint-4")


def test_deletions_follow_the_source_only_if_asked(tmp_path, there):
    run = tmp_path / "run"
    save_small(run, 1, 2, 3, 4)
    save_with_state(run / "checkpoint-5", 5, run_id="r")
    save_of(run / "final", run_id="r", export=True)
    sync(run, there)
    save_of(tmp_path / "other" / "checkpoint-9", step=9, run_id="other")
    sync(tmp_path / "other", there)
    for step in (1, 2, 3):
        delete_checkpoint(run / f"checkpoint-{step}")
    delete_checkpoint(run / "final")
    delete_state(run / "checkpoint-5")
    kept = sync(run, there)
    assert (kept.dropped, kept.stripped, kept.missing) == ((), (), ())
    assert len(names(there)) == 7
    would = sync(run, there, delete=True, dry_run=True)
    assert set(would.dropped) == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
    assert len(names(there)) == 7
    pin(Place(there.folder, "checkpoint-1"))
    with open_checkpoint(Place(there.folder, "checkpoint-2")):
        done = sync(run, there, delete=True)
    assert (done.dropped, done.stripped, done.problems) == (
        ("checkpoint-3",),
        ("checkpoint-5",),
        (),
    )
    assert set(done.kept) == {"checkpoint-1", "checkpoint-2"}
    assert set(names(there)) == {*(f"checkpoint-{step}" for step in (1, 2, 4, 5, 9)), "final"}
    assert {part.kind for part in read_manifest(Place(there.folder, "checkpoint-5")).parts} == {
        "model"
    }
    assert all(verify(Place(there.folder, name)).ok for name in names(there))


def test_an_export_does_not_tell_that_a_folder_is_the_runs(tmp_path, there):
    """Somebody's copy of the final weights, synced with delete=True, is no reason to delete the
    run's checkpoints.
    """
    save_small(tmp_path / "run", 1, 2)
    sync(tmp_path / "run", there)
    save_of(tmp_path / "other" / "final", run_id="r", export=True)
    report = sync(tmp_path / "other", there, delete=True)
    assert (report.missing, report.dropped) == (("final",), ())
    assert set(names(there)) == {"checkpoint-1", "checkpoint-2", "final"}


def test_a_step_that_was_saved_anew_is_replaced_and_another_runs_never(tmp_path, there):
    run = tmp_path / "run"
    save_small(run, 1, 2)
    sync(run, there)
    save_of(
        run / "checkpoint-2",
        step=2,
        run_id="r",
        created="2026-01-02T00:00:00+00:00",
        metrics={"loss": 1.0},
    )
    report = sync(run, there)
    assert (report.missing, report.problems) == (("checkpoint-2",), ())
    assert read_manifest(Place(there.folder, "checkpoint-2")).metrics == {"loss": 1.0}
    save_of(tmp_path / "fresh" / "checkpoint-1", step=1, run_id="fresh")
    refused = sync(tmp_path / "fresh", there, delete=True)
    assert "another checkpoint than" in refused.problems[0]
    assert read_manifest(Place(there.folder, "checkpoint-1")).run_id == "r"


def test_bad_checkpoints_are_named_and_the_others_go(tmp_path, there):
    run = tmp_path / "run"
    save_small(run, 1, 2, 3)
    (run / "checkpoint-1" / MANIFEST_NAME).write_text("{}")
    (run / "checkpoint-2" / "model.safetensors").write_bytes(b"short")
    report = sync(run, there, delete=True)
    assert [each.path for each in report.copied] == [Place(there.folder, "checkpoint-3").location]
    assert "checkpoint-1" in report.problems[0]
    assert "checkpoint-2: not copied" in report.problems[1]
    assert names(there) == ["checkpoint-3"]
    with pytest.raises(ConfigError, match="ft-ckpt cp"):
        sync(run / "checkpoint-3", there)
    with pytest.raises(NotACheckpointError):
        sync(tmp_path / "nothing", there)


@pytest.mark.slow
def test_a_sync_that_fails_at_any_request_is_finished_by_the_next(tmp_path):
    run = tmp_path / "run"
    save_small(run, 1, 2)
    for at in range(1, 1000):
        goal = Place(new_bucket())
        with broken_line(at, for_good=at % 2 == 0) as line:
            try:
                report = sync(run, goal)
            except CheckpointError:
                report = None
        if not line.is_broken:
            assert at > 10
            return
        assert all(verify(Place(goal.folder, name)).ok for name in names(goal))
        assert report is None or report.problems or len(names(goal)) == 2
        assert sync(run, goal).problems == ()
        assert names(goal) == ["checkpoint-1", "checkpoint-2"]


def test_the_command_says_what_it_did(tmp_path, there, monkeypatch, capsys):
    save_small(tmp_path / "run", 1, 2)
    goal = there.location
    assert command(monkeypatch, "sync", tmp_path / "run", goal) == 0
    assert "checkpoint-2: 2 files" in capsys.readouterr().out
    delete_checkpoint(tmp_path / "run" / "checkpoint-1")
    assert command(monkeypatch, "sync", tmp_path / "run", goal, "--delete", "--json") == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == ["checkpoint-1"]
    rewrite_manifest(
        tmp_path / "run" / "checkpoint-2", lambda document: document.update(run_id="other")
    )
    assert command(monkeypatch, "sync", tmp_path / "run", goal) == 1
    assert "another checkpoint" in capsys.readouterr().out
