"""A script that changes its working directory, as Hydra does, keeps the folders that it named
before.
"""

from pathlib import Path

import lightning_runs
import pytest
import trainers
from training import QUIET, prepared, train

import ft_ckpt
from ft_ckpt import CheckpointSaver, SaverConfig, ServerOptions
from ft_ckpt.storage.places import shown_location


@pytest.fixture
def leave(tmp_path, monkeypatch):
    """Starts in a folder of its own; the function moves to another one."""
    start, other = tmp_path / "start", tmp_path / "other"
    start.mkdir()
    other.mkdir()
    monkeypatch.chdir(start)
    yield lambda: monkeypatch.chdir(other)
    assert not list(other.iterdir())


def checkpoints(tmp_path):
    return sorted(path.name for path in (tmp_path / "start" / "run").iterdir())


def test_saver(tmp_path, leave):
    run = prepared()
    settings = {"every": 6, "keep": 2, "background": True, **QUIET}
    with CheckpointSaver(run.accelerator, "run", **settings) as saver:
        leave()
        assert saver.directory == tmp_path / "start" / "run"
        train(run, saver)
    assert checkpoints(tmp_path) == ["checkpoint-12", "checkpoint-18"]


def test_saver_that_resumes_and_rolls_back(tmp_path, leave):
    run = prepared()
    with CheckpointSaver(run.accelerator, "run", every=6, **QUIET) as saver:
        train(run, saver)
    again = prepared()
    saver = CheckpointSaver(again.accelerator, "run", **QUIET)
    progress = saver.resume("run/checkpoint-12")
    leave()
    assert (
        saver.progress.resumed_from
        == progress.resumed_from
        == tmp_path / "start" / "run" / "checkpoint-12"
    )
    assert saver.resume("must").step == 18
    saver.save_state(path=ft_ckpt.open_place(tmp_path / "start" / "copy"))
    assert saver.resume("checkpoint-6").step == 6


def test_trainer(tmp_path, leave):
    made = trainers.ours(Path("run"), save_steps=4)
    leave()
    trainers.run(made)
    made.save_model()
    folders = [name for name in checkpoints(tmp_path) if name.startswith("checkpoint-")]
    assert folders == ["checkpoint-12", "checkpoint-14", "checkpoint-4", "checkpoint-8"]
    assert ft_ckpt.verify(tmp_path / "start" / "run").ok


def test_lightning(tmp_path, leave):
    own = {"every": 7}
    expected = lightning_runs.run(
        lightning_runs.ours(Path("run"), own=own),
        lightning_runs.module(),
        lightning_runs.loader(),
    )
    again = lightning_runs.ours(Path("run"), own={**own, "resume": "run/checkpoint-7"})
    leave()
    assert (
        lightning_runs.run(again, lightning_runs.module(1), lightning_runs.loader()) == expected[7:]
    )
    assert checkpoints(tmp_path) == ["checkpoint-14", "checkpoint-7"]


def test_settings_of_publish(tmp_path, leave):
    Path("base").mkdir()
    servers = {
        "url": "http://server",
        "stage": "stage",
        "visible_at": {"run": "/data/run"},
        "base": "base",
    }
    chain = SaverConfig(publish={"url": "chain", "delta": True})
    config, named = (
        SaverConfig(publish=servers, staging="nvme"),
        SaverConfig(publish={**servers, "base": "user/base"}),
    )
    leave()
    start = tmp_path / "start"
    options = ServerOptions(**config.publish)
    assert (options.url, options.stage, options.base) == (
        ("http://server",),
        start / "stage",
        str(start / "base"),
    )
    assert options.visible_at == {str(start / "run"): "/data/run"}
    assert ServerOptions(**named.publish).base == "user/base"
    assert ServerOptions(**chain.publish).url == (str(start / "chain"),)
    assert config.staging == str(start / "nvme")


def test_a_working_directory_that_was_deleted_stops_no_message(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert shown_location(gone / "run") == "run"
    gone.rmdir()
    assert shown_location(gone / "run") == str(gone / "run")
    assert shown_location("s3://bucket/run") == "s3://bucket/run"
