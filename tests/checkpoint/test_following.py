"""`ft_ckpt.follow`: each checkpoint of a run comes once, whole and leased, and the rules follow
what was measured.
"""

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from buckets import in_bucket, new_bucket
from faults import Disk, World, try_worlds
from small_checkpoints import leases_in, save, save_of

import ft_ckpt
from ft_ckpt import Keep
from ft_ckpt.checkpoint.catalog import CheckpointInfo, discover
from ft_ckpt.checkpoint.commit import delete_state
from ft_ckpt.checkpoint.commit.bucket_delete import recover_in_bucket
from ft_ckpt.checkpoint.leases import SIGNED, pin
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    ManifestError,
    NotACheckpointError,
)
from ft_ckpt.runs.folder import prune_run
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place

QUICK: dict[str, Any] = {"idle_seconds": 0, "poll_seconds": 0.02}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save_of(tmp_path / f"run/checkpoint-{step}", step=step, run_id="a")
    return tmp_path / "run"


def names(run: Path | Place, **options: Any) -> list[str]:
    return [checkpoint.name for checkpoint in ft_ckpt.follow(run, **{**QUICK, **options})]


def measure(run: Path | Place) -> list[str]:
    """Store the step, and a half, of each checkpoint that has no score; the names of these."""
    measured = []
    for checkpoint in ft_ckpt.follow(run, **QUICK):
        if "score" not in checkpoint.metrics:
            checkpoint.write_metrics({"score": float(checkpoint.name.rpartition("-")[2]) + 0.5})
            measured.append(checkpoint.name)
    return measured


def scores(run: Path | Place) -> dict[str, float]:
    return {
        info.name: info.metrics["score"]
        for info in discover(open_place(run))
        if "score" in info.metrics
    }


def info_at(path: Path) -> CheckpointInfo:
    return CheckpointInfo(LocalStore(path), read_manifest(open_place(path)))


def test_each_comes_once_oldest_first_and_rules_follow_its_metric(run: Path) -> None:
    before = {path: read_manifest(open_place(path)) for path in run.iterdir()}
    assert measure(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert scores(run) == {"checkpoint-1": 1.5, "checkpoint-2": 2.5, "checkpoint-3": 3.5}
    assert measure(run) == []
    assert {path: read_manifest(open_place(path)) for path in run.iterdir()} == before
    assert all(ft_ckpt.verify(path).ok for path in run.iterdir())
    assert ft_ckpt.best(run, ("score", "min")) == run / "checkpoint-1"
    report = prune_run(open_place(run), Keep(best=("score", "min")))
    assert report.dropped == (run / "checkpoint-2",)
    assert report.kept[run / "checkpoint-1"] == ("best score",)
    shutil.rmtree(run / "checkpoint-3")
    save_of(run / "checkpoint-4", step=4, run_id="a")
    assert prune_run(open_place(run), Keep(last=1)).dropped == (
        run / "checkpoint-1",
    )  # its marks go with it
    assert not (run / "checkpoint-1").exists()


def test_new_ones_come_while_the_loop_runs(run: Path) -> None:
    steps = iter((4, 5))
    come = []
    for checkpoint in ft_ckpt.follow(run, idle_seconds=0.3, poll_seconds=0.02):
        come.append(checkpoint.name)
        if (step := next(steps, None)) is not None:
            save_of(run / f"checkpoint-{step}", step=step, run_id="a")
    assert come == [f"checkpoint-{step}" for step in (1, 2, 3, 4, 5)]


def test_one_that_is_committed_during_a_long_body_is_waited_for(run: Path) -> None:
    come = []
    for checkpoint in ft_ckpt.follow(run, idle_seconds=0.05, poll_seconds=0.02):
        come.append(checkpoint.name)
        if len(come) == 3:
            save_of(run / "checkpoint-4", step=4, run_id="a")
            time.sleep(0.2)
    assert come[-1] == "checkpoint-4"


def test_the_run_may_begin_later(tmp_path: Path) -> None:
    timer = threading.Timer(0.2, lambda: save(tmp_path / "run/checkpoint-1", step=1))
    timer.start()
    assert names(tmp_path / "run", idle_seconds=2) == ["checkpoint-1"]


def test_an_event_ends_the_loop(run: Path) -> None:
    stop = threading.Event()
    come = []
    for checkpoint in ft_ckpt.follow(run, stop=stop):
        come.append(checkpoint.name)
        stop.set()
    assert come == ["checkpoint-1"]


def test_damaged_ones_are_named_once_and_do_not_come(run: Path) -> None:
    (run / "checkpoint-2/model.safetensors").write_bytes(b"")
    (run / "checkpoint-3/ft_ckpt.json").write_text("{")
    problems: list[CheckpointError] = []
    assert names(run, idle_seconds=0.1, on_problem=problems.append) == ["checkpoint-1"]
    assert [type(problem) for problem in problems] == [ManifestError, CorruptError]
    assert "checkpoint-2: model.safetensors: truncated: 0 bytes" in str(problems[1])
    with pytest.warns(match="truncated: 0 bytes"), pytest.warns(match="not an ft_ckpt manifest"):
        names(run)


def test_it_is_leased_in_the_body_alone(run: Path) -> None:
    come = []
    for checkpoint in ft_ckpt.follow(run, **QUICK):
        come.append(checkpoint.name)
        leased = [path.name for path in run.iterdir() if leases_in(path)]
        assert leased == [checkpoint.name]
        if checkpoint.name == "checkpoint-1":
            kept = prune_run(open_place(run), Keep(last=1)).kept
            assert any("in use by" in why for why in kept[run / "checkpoint-1"])
    assert come == ["checkpoint-1", "checkpoint-3"]  # the second was deleted before its turn
    assert not [path for path in run.iterdir() if leases_in(path)]


def test_an_overwrite_comes_again_and_a_lost_state_does_not(run: Path) -> None:
    measure(run)
    save_of(run / "checkpoint-2", step=2, run_id="a", created="2026-02-02T00:00:00+00:00")
    assert scores(run) == {"checkpoint-1": 1.5, "checkpoint-3": 3.5}
    assert measure(run) == ["checkpoint-2"]
    delete_state(run / "checkpoint-1")
    assert measure(run) == []
    assert len(scores(run)) == 3


def test_a_mark_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    save(path, step=1)
    info = info_at(path)

    def trial(world: World) -> None:
        info.write_metrics({"score": 1.0})
        world.run(info.write_metrics, {"score": 2.0})
        assert scores(tmp_path)["checkpoint-1"] in ((1.0, 2.0) if world.is_met else (2.0,))
        assert ft_ckpt.verify(path).ok

    assert try_worlds(trial, Disk("killed")).calls >= 2
    info.write_metrics({"score": 2.0})
    assert scores(tmp_path) == {"checkpoint-1": 2.0}
    (mark,) = path.glob(".ft_ckpt-metric-*")
    for text in (
        "",
        "{",
        "[]",
        '{"metric": "score"}',
        '{"metric": "score", "value": [], "created": ""}',
    ):
        mark.write_text(text)
        assert scores(tmp_path) == {}


def test_names_of_metrics(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    save(path, step=1)
    metrics = dict(
        zip(["eval/loss", "../up", "é %", ".", "a" * 200], map(float, range(5)), strict=True)
    )
    info_at(path).write_metrics(metrics)
    assert info_at(path).metrics == metrics
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-1"]
    for wrong in ("", "a" * 201, "/" * 70, "\ud800"):
        with pytest.raises(ConfigError, match=r"metric '.*expected"):
            info_at(path).write_metrics({"loss": 1.0, wrong: 1.0})
    with pytest.raises(ConfigError, match="loss is a str"):
        info_at(path).write_metrics({"loss": "low"})  # type: ignore[dict-item]  # what is tried
    assert info_at(path).metrics == metrics


def test_a_checkpoint_that_is_gone_or_was_saved_again_gets_no_metric(run: Path) -> None:
    overwritten, deleted = info_at(run / "checkpoint-1"), info_at(run / "checkpoint-2")
    save_of(run / "checkpoint-1", step=1, run_id="a", created="2026-02-02T00:00:00+00:00")
    shutil.rmtree(run / "checkpoint-2")
    for info in (overwritten, deleted):
        with pytest.raises(NotACheckpointError, match=info.name):
            info.write_metrics({"score": 1.0})
    assert not (run / "checkpoint-2").exists()
    assert scores(run) == {}


def test_a_run_in_a_bucket(tmp_path: Path) -> None:
    bucket = new_bucket("team/run")
    for step in (1, 2):
        save_of(tmp_path / f"checkpoint-{step}", step=step, run_id="a")
        in_bucket(tmp_path / f"checkpoint-{step}", bucket)
    assert measure(Place(bucket)) == ["checkpoint-1", "checkpoint-2"]
    assert scores(Place(bucket)) == {"checkpoint-1": 1.5, "checkpoint-2": 2.5}
    assert prune_run(Place(bucket), Keep(best=("score", "min"))).dropped == ()
    assert measure(Place(bucket)) == []
    assert prune_run(Place(bucket), Keep(last=1)).dropped != ()
    assert not [each.name for each in bucket.list() if "checkpoint-1" in each.name]


def test_marks_in_a_bucket_outlive_the_processes_that_wrote_them(tmp_path: Path) -> None:
    bucket = new_bucket("team/run")
    save(tmp_path / "checkpoint-1", step=1)
    in_bucket(tmp_path / "checkpoint-1", bucket)
    measure(Place(bucket))
    store = bucket.within("checkpoint-1")
    store.write(SIGNED, b"{}")
    pin(Place(store))
    assert (
        recover_in_bucket(store, {each.name: each for each in store.list()}, time.time() + 1e6)
        is None
    )
    assert {".ft_ckpt-pin", SIGNED, ".ft_ckpt-metric-score"} <= {each.name for each in store.list()}
