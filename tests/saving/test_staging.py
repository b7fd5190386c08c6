"""A run in a bucket that commits in a folder of its machine first: in processes that are killed,
and in this one.
"""

import os
import re
import shutil
import signal
import threading
import time
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from bucket_lives import BUCKET_RUN, committed, live
from exact_runs import exact, live_model, same, saver_of, train
from faults import KILLS, Server, try_worlds
from http_server import Fault
from launch import run_and_signal
from on_ranks import RANK, on_ranks
from s3_server import FAST
from training import QUIET, learn, prepared
from wrappers import truth

from ft_ckpt import CheckpointSaver, Every, Keep, latest, verify
from ft_ckpt.checkpoint.catalog import list_checkpoints
from ft_ckpt.checkpoint.leases import pin
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    NameTakenError,
    NoSpaceError,
    NotACheckpointError,
    RankError,
    TargetError,
)
from ft_ckpt.extensions.transfer.sending import uploads
from ft_ckpt.runs.loop import triggers
from ft_ckpt.saving import space
from ft_ckpt.storage.places import open_place

LAST = 5
DOWN = {"status": 503, "code": "SlowDown", "times": 1_000_000}


def names(place) -> list[str]:
    return [info.name for info in list_checkpoints(open_place(place)).checkpoints]


@contextmanager
def saver_at(staging: Path | None, **settings):
    """A saver of a fresh run, in the bucket."""
    run = prepared()
    settings = {"store_options": FAST, "staging": staging, **QUIET, **settings}
    with CheckpointSaver(run.accelerator, BUCKET_RUN, **settings) as saver:
        saver.learn = lambda count=1: [
            (learn(run, batch), saver.step()) for batch in _batches(saver, run, count)
        ]
        yield saver


def _batches(saver, run, count):
    for number, batch in enumerate(saver.remaining(run.loader), 1):
        yield batch[0]
        if number == count:
            return


@contextmanager
def closed_gate(s3, pattern=""):
    """The bucket answers nothing that is asked in these words while the block runs."""
    gate = threading.Event()
    s3.faults.append(
        Fault(lambda asked: re.search(pattern, asked.line) and not gate.wait(60), times=1_000_000)
    )
    try:
        yield
    finally:
        gate.set()


# Processes that end anywhere


class Trials:
    """A run of two steps, its bucket and its folder, put back for each trial; and what it comes to
    undisturbed.
    """

    def __init__(self, s3, folder: Path):
        self.s3, self.folder, self.kept = s3, folder / "nvme", folder / "kept"
        self.expected = live(s3, LAST).losses
        s3.buckets["bucket"] = {}
        assert live(s3, 2, staging=self.folder).error == ""
        self.start = dict(s3.buckets["bucket"])
        shutil.copytree(self.folder, self.kept)

    def trial(self, is_lost: bool, world) -> None:
        """Killed at a request of the third step; then the run goes on, on this machine or on
        another.
        """
        s3, what = self.s3, world.name
        s3.buckets["bucket"] = dict(self.start)
        shutil.rmtree(self.folder)
        shutil.copytree(self.kept, self.folder)
        stopped = world.run(partial(live, staging=self.folder), s3, 3, world)
        assert (stopped.status < 0) == bool(world.fault), what
        assert committed(s3) >= {2}, what
        assert all(verify(self.folder / name).ok for name in names(self.folder)), what
        if is_lost:
            shutil.rmtree(self.folder)
        s3.advance(2 * 86_400)
        again = live(s3, LAST, staging=self.folder)
        assert (again.status, again.error) == (0, ""), what
        for life in (stopped, again):
            assert life.losses.items() <= self.expected.items(), what
        assert max(again.losses) == LAST, what
        if not is_lost:
            assert not again.losses.keys() & stopped.losses.keys() - {3}, (
                "what was saved here is not done again"
            )
        assert committed(s3) >= {LAST - 1, LAST}, what
        assert names(self.folder) == [f"checkpoint-{LAST}"], what
        assert not [name for name in s3.names() if "/.ft_ckpt" in name], what


@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_goes_on_bit_for_bit(s3, tmp_path):
    trials = Trials(s3, tmp_path)
    for is_lost in (False, True):
        try_worlds(partial(trials.trial, is_lost), Server(s3, KILLS), max_worlds=2)


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("name", KILLS)
def test_a_run_that_is_killed_at_any_request_goes_on(s3, tmp_path, name, is_lost):
    trials = Trials(s3, tmp_path)
    try_worlds(partial(trials.trial, is_lost), Server(s3, {name: KILLS[name]}))


@pytest.mark.slow
def test_a_bucket_that_fails_stops_no_training_and_catches_up(s3, tmp_path):
    folder = tmp_path / "nvme"
    expected = live(s3, LAST).losses
    s3.buckets["bucket"] = {}
    begun = live(s3, 1, staging=folder)
    life = live(s3, 4, fault=Fault("PUT .*checkpoint-[234]", **DOWN), staging=folder)
    assert sorted(life.losses) == [2, 3, 4], "training goes on"
    assert life.error.startswith("TargetError")
    assert "checkpoint-4, checkpoint-3" in life.error
    assert f"kept in {folder}, from where the next start uploads it" in life.error
    assert committed(s3) == {1}
    assert names(folder)[-2:] == ["checkpoint-3", "checkpoint-4"], (
        "others are gone, but for one that was being sent"
    )
    again = live(s3, LAST, staging=folder)
    assert again.error == ""
    assert (begun.losses | life.losses | again.losses) == expected
    assert committed(s3) == {4, 5}
    assert names(folder) == ["checkpoint-5"]


STOPPED = """
import sys, warnings
from ft_ckpt import CheckpointSaver, Every
from ft_ckpt.runs.saves import run_saves
from training import QUIET, learn, prepared
from s3_server import FAST

run_saves.MAX_EXIT_SECONDS = float(sys.argv[2])
run = prepared()
with CheckpointSaver(run.accelerator, "s3://bucket/run", staging=sys.argv[1], every=Every(steps=3),
                     store_options=FAST, **QUIET) as saver:
    saver.resume()
    for batch in saver.remaining(run.loader, epochs=10_000):
        learn(run, batch[0])
        saver.step()
        if saver.progress.step == 3:
            print("ready", flush=True)
"""


def test_a_signal_waits_for_the_upload(s3, tmp_path):
    done = run_and_signal(
        STOPPED, tmp_path / "nvme", 600, until=lambda said: said.readline(), number=signal.SIGTERM
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    newest = names(tmp_path / "nvme")[-1]
    assert latest(BUCKET_RUN) == f"{BUCKET_RUN}/{newest}"
    assert int(newest.rpartition("-")[2]) >= 3
    assert "not uploaded" not in done.stderr


def test_a_signal_waits_no_longer_than_it_may(s3, tmp_path):
    s3.faults.append(Fault("PUT .*checkpoint-.*safetensors", seconds=3, times=100))
    begun = time.monotonic()
    done = run_and_signal(
        STOPPED, tmp_path / "nvme", 0.5, until=lambda said: said.readline(), number=signal.SIGTERM
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    broken_off = re.search(
        r"checkpoint-(\d+): not uploaded: .*broken off, as the process ends.*kept in", done.stderr
    )
    assert broken_off, done.stderr
    assert time.monotonic() - begun < 40
    assert int(broken_off[1]) not in committed(s3)


# What goes where


def test_the_folder_keeps_the_newest_and_the_bucket_what_the_rules_say(s3, tmp_path):
    with saver_at(tmp_path, keep=Keep(last=2)) as saver:
        assert saver.directory == BUCKET_RUN
        reports = [saver.learn() and saver.save_state() for _ in range(4)]
        assert reports[0].path == tmp_path / "checkpoint-1"
        assert reports[0].upload.url == f"{BUCKET_RUN}/checkpoint-1"
        sent = reports[-1].upload.result(60)
        assert (sent.url, sent.path, sent.is_new) == (
            f"{BUCKET_RUN}/checkpoint-4",
            tmp_path / "checkpoint-4",
            True,
        )
        pin(open_place(f"{BUCKET_RUN}/checkpoint-4"))
    assert names(BUCKET_RUN) == ["checkpoint-3", "checkpoint-4"]
    assert names(tmp_path) == ["checkpoint-4"]
    shutil.rmtree(tmp_path)
    with saver_at(tmp_path, keep=Keep(last=1)) as saver:
        assert str(saver.resume("must").resumed_from) == f"{BUCKET_RUN}/checkpoint-4"
        for _ in range(2):
            saver.learn()
            saver.save_state()
    assert names(BUCKET_RUN) == ["checkpoint-4", "checkpoint-6"], "the pin holds"


def test_training_waits_for_the_disk_only_and_the_newest_goes_first(s3, tmp_path):
    with saver_at(tmp_path, keep=Keep(last=2), background=True) as saver:
        saver.learn()
        first = saver.save_state().result().upload
        first.result(60)
        with closed_gate(s3):
            reports = []
            for _ in range(5):
                saver.learn()
                reports.append(saver.save_state().result())
            assert not any(report.upload.done for report in reports)
            assert {"checkpoint-5", "checkpoint-6"} <= set(names(tmp_path))
    puts = [line.split("/")[3].split("?")[0] for line in s3.requests_like("PUT .*/ft_ckpt.json")]
    assert puts.index("checkpoint-6") < puts.index("checkpoint-5"), puts
    assert "checkpoint-4" not in puts
    with pytest.raises(
        NotACheckpointError, match="deleted here, as `keep` says, before it was uploaded"
    ):
        reports[2].upload.result()
    assert names(BUCKET_RUN) == ["checkpoint-5", "checkpoint-6"]
    assert names(tmp_path) == ["checkpoint-6"]


@pytest.mark.slow
def test_what_is_sent_although_the_rules_drop_it_goes_from_the_bucket(s3, tmp_path):
    """The rules find it in use here, as it is being uploaded, while newer ones are saved."""
    with saver_at(tmp_path, keep=Keep(last=1)) as saver:
        with closed_gate(s3, "PUT .*checkpoint-1/ft_ckpt.json"):
            for _ in range(3):
                saver.learn()
                saver.save_state()
        saver._saves.follow_ups.uploads.finish()
        assert s3.requests_like("PUT .*checkpoint-1/ft_ckpt.json")
        assert names(BUCKET_RUN) == names(tmp_path) == ["checkpoint-3"]


def test_a_full_disk_makes_room_by_uploads(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(space, "POLL_SECONDS", 0.02)
    real, waits = space.check_target, []

    def has_room_for_two(target, needed_bytes):
        if needed_bytes and len(names(tmp_path)) > 1:
            waits.append(target.name)
            raise NoSpaceError("full")
        real(target, needed_bytes)

    monkeypatch.setattr(space, "check_target", has_room_for_two)
    with saver_at(tmp_path, when_full="wait") as saver:
        s3.faults.append(Fault("PUT .*safetensors", seconds=0.2, times=99))
        for _ in range(4):
            saver.learn()
            saver.save_state()
    assert {"checkpoint-3", "checkpoint-4"} <= set(waits)
    assert names(BUCKET_RUN) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    assert names(tmp_path) == ["checkpoint-4"]


def test_what_is_missing_at_the_end_is_warned_of_where_failures_are(s3, tmp_path):
    with saver_at(tmp_path, on_failure="warn") as saver:
        saver.learn()
        s3.faults.append(Fault("PUT .*checkpoint-", **DOWN))
        saver.save_state()
        with pytest.warns(
            UserWarning, match="checkpoint-1: not uploaded: .*from where the next start uploads it"
        ):
            saver.close()
    assert names(tmp_path) == ["checkpoint-1"]
    s3.faults = []
    with saver_at(tmp_path) as saver:
        assert saver.resume("must").step == 1
    assert names(BUCKET_RUN) == ["checkpoint-1"], "the next start has uploaded it"


def test_a_bucket_that_is_gone_for_a_while_gets_what_it_missed(s3, tmp_path):
    with saver_at(tmp_path) as saver:
        saver.learn()
        saver.save_state().upload.result(60)
        bucket = s3.buckets.pop("bucket")
        for _ in range(2):
            saver.learn()
            upload = saver.save_state().upload
            with pytest.warns(UserWarning, match=r"not uploaded: .*no such bucket.*tried again"):
                assert upload.wait(60)
        # checkpoint-1 is in the bucket, and deleted here if the sweep after its upload sees
        # checkpoint-2 already
        assert names(tmp_path)[-2:] == ["checkpoint-2", "checkpoint-3"]
        s3.buckets["bucket"] = bucket
        saver.learn()
        saver.save_state().upload.result(60)
    assert names(BUCKET_RUN) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-4"]
    assert names(tmp_path) == ["checkpoint-4"]


def test_a_rehearsal_stays_on_its_disk(s3, tmp_path, monkeypatch):
    told = triggers.Rehearsal(str(tmp_path / "rehearsed"), str(tmp_path / "record"), steps=2)
    monkeypatch.setenv(triggers.VARIABLE, told.to_json())
    assert (
        CheckpointSaver(None, BUCKET_RUN, staging=tmp_path / "nvme").directory
        == tmp_path / "rehearsed"
    )
    assert not (tmp_path / "nvme").exists()


def test_a_save_of_weights_goes_the_same_way_and_a_path_does_not(s3, tmp_path):
    with saver_at(tmp_path / "nvme") as saver:
        saver.learn()
        model = saver.accelerator._models[0]
        assert saver.save(model, step=9).upload.result(60).is_new
        assert saver.save(model, tmp_path / "elsewhere").upload is None
    assert names(BUCKET_RUN) == ["checkpoint-9"]
    assert names(tmp_path / "nvme") == ["checkpoint-9"], "weights stay"


def test_a_step_that_is_saved_anew_is_replaced(s3, tmp_path):
    with saver_at(tmp_path) as saver:
        saver.learn()
        saver.save_state()
        # the first upload may have found and uploaded this save already
        saver.save_state(metrics={"loss": 1.0}).upload.result(60)
    assert list_checkpoints(open_place(BUCKET_RUN)).checkpoints[0].manifest.metrics == {"loss": 1.0}


def test_another_runs_checkpoint_is_not_replaced(s3, tmp_path):
    with saver_at(None) as saver:
        saver.learn()
        saver.save_state()
        own = list_checkpoints(open_place(BUCKET_RUN)).checkpoints[0].manifest.run_id
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = prepared()
        saver = CheckpointSaver(
            run.accelerator, BUCKET_RUN, staging=tmp_path, store_options=FAST, **QUIET
        )
        saver.step(step=1)
        with pytest.raises(NameTakenError):
            saver.save_state().upload.result(60)
        with pytest.raises(TargetError, match=r"checkpoint-1: not uploaded: .*to another run"):
            saver.close()
    assert any("tried again with the next save" in str(each.message) for each in told), told
    assert list_checkpoints(open_place(BUCKET_RUN)).checkpoints[0].manifest.run_id == own
    assert names(tmp_path) == ["checkpoint-1"]


@pytest.mark.slow
def test_what_was_uploaded_elsewhere_meanwhile_is_left_alone(s3, tmp_path):
    """A folder that stayed behind on a machine, while the run went on on another from the
    bucket.
    """
    with saver_at(tmp_path / "one") as saver:
        saver.learn(2)
        saver.save_state()
        saver.learn(1)
        s3.faults = [Fault("PUT", **DOWN)]
        upload = saver.save_state().upload
        with pytest.warns(UserWarning, match="not uploaded"):
            upload.wait(60)
        shutil.copytree(tmp_path / "one", tmp_path / "left")
        s3.faults = []
    shutil.rmtree(tmp_path / "one")
    for name in s3.names("run/checkpoint-3/"):
        del s3.buckets["bucket"][name]
    with saver_at(tmp_path / "two") as saver:
        assert saver.resume("must").step == 2
        saver.learn(1)
        saver.save_state()
        saver.learn(1)
        saver.save_state()
    found = {
        info.name: info.manifest.created
        for info in list_checkpoints(open_place(BUCKET_RUN)).checkpoints
    }
    with saver_at(tmp_path / "left") as saver:
        assert str(saver.resume("must").resumed_from) == f"{BUCKET_RUN}/checkpoint-4"
    assert {
        info.name: info.manifest.created
        for info in list_checkpoints(open_place(BUCKET_RUN)).checkpoints
    } == found


def test_a_damaged_checkpoint_here_is_taken_from_the_bucket(s3, tmp_path):
    with saver_at(tmp_path) as saver:
        saver.learn(2)
        saver.save_state()
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    for mode in ("auto", "must", "checkpoint-2"):
        with (
            saver_at(tmp_path) as saver,
            pytest.warns(UserWarning, match="damaged, taking its copy s3://"),
        ):
            assert str(saver.resume(mode).resumed_from) == f"{BUCKET_RUN}/checkpoint-2"


def test_damaged_checkpoints_here_stop_no_run(s3, tmp_path):
    """They are in no bucket, and nothing is saved over them."""
    with warnings.catch_warnings(), saver_at(tmp_path, on_failure="warn") as saver:
        warnings.simplefilter("ignore")
        s3.faults.append(Fault("PUT .*checkpoint-", **DOWN))
        for _ in range(4):
            saver.learn()
            saver.save_state()
        saver.close()
    files = [tmp_path / f"checkpoint-{step}" / "model.safetensors" for step in (1, 2, 3)]
    content = bytearray(files[0].read_bytes())
    content[-5] ^= 1
    files[0].write_bytes(content)
    files[1].write_bytes(content[:-1])
    files[2].unlink()
    s3.faults = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with saver_at(tmp_path) as saver:
            assert saver.resume().step == 4
            saver.learn()
            saver.save_state().upload.result(60)
    found = {path.name.split(".")[1]: path for path in tmp_path.glob(".*.damaged-*")}
    assert found.keys() == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
    assert all((path / "ft_ckpt.json").exists() for path in found.values()), (
        "nothing that is whole is lost"
    )
    for name, path in found.items():
        assert any(
            f"{name}: damaged and not uploaded" in str(one.message)
            and str(path) in str(one.message)
            for one in told
        ), name
    assert names(BUCKET_RUN) == ["checkpoint-4", "checkpoint-5"]
    assert names(tmp_path) == ["checkpoint-5"]


def test_what_is_damaged_before_its_upload_is_told_by_its_handle(s3, tmp_path):
    with saver_at(tmp_path) as saver:
        saver.resume()  # takes the lease of the run, in the bucket
        saver.learn()
        with closed_gate(s3):
            upload = saver.save_state().upload
            (tmp_path / "checkpoint-1" / "model.safetensors").write_bytes(b"")
        with pytest.warns(UserWarning, match="checkpoint-1: damaged and not uploaded"):
            assert upload.wait(60)
        with pytest.raises(CorruptError):
            upload.result()
    assert names(tmp_path) == names(BUCKET_RUN) == []


@pytest.mark.slow
def test_a_run_taken_back_replaces_what_it_went_back_in(s3, tmp_path):
    with saver_at(tmp_path) as saver:
        for _ in range(3):
            saver.learn()
            saver.save_state()
    with saver_at(tmp_path) as saver:
        assert saver.resume("checkpoint-1").step == 1
        saver.learn()
        saver.save_state()
    found = list_checkpoints(open_place(BUCKET_RUN)).checkpoints
    assert [info.name for info in found] == ["checkpoint-1", "checkpoint-3", "checkpoint-2"]
    assert found[1].manifest.run_id != found[2].manifest.run_id


# What is refused


def test_what_cannot_be_staged_is_refused_at_the_start(s3, tmp_path):
    with pytest.raises(ConfigError, match="is on a disk itself; leave staging out"):
        CheckpointSaver(None, tmp_path / "run", staging=tmp_path / "nvme")
    with pytest.raises(ConfigError, match="for a run in a bucket; give the saver its directory"):
        CheckpointSaver(staging=tmp_path / "nvme")
    with pytest.raises(ConfigError, match="expected a folder of this machine"):
        CheckpointSaver(None, BUCKET_RUN, staging="s3://bucket/staging")
    (tmp_path / "file").touch()
    with pytest.raises(TargetError, match="a file, expected a folder"):
        CheckpointSaver(None, BUCKET_RUN, staging=tmp_path / "file")


def test_a_folder_is_of_one_run(s3, tmp_path):
    CheckpointSaver(None, BUCKET_RUN, staging=tmp_path / "nvme")
    CheckpointSaver(None, BUCKET_RUN, staging=tmp_path / "nvme")
    with pytest.raises(
        ConfigError, match=f"for {BUCKET_RUN}, expected s3://bucket/other; give each run"
    ):
        CheckpointSaver(None, "s3://bucket/other", staging=tmp_path / "nvme")
    run = prepared()
    with CheckpointSaver(run.accelerator, tmp_path / "local") as saver:
        saver.save_state(path=tmp_path / "local" / "checkpoint-1")
    with pytest.raises(ConfigError, match="holds checkpoints that were not staged there"):
        CheckpointSaver(None, BUCKET_RUN, staging=tmp_path / "local")


# Several ranks


on_two = on_ranks(2, launch="staged")
HERE = Path("/proc/self/cwd")


def go_on_from_both(run, staging, disk):
    """Resume exactly from the folder and, once that is lost, from the bucket."""
    exact("fsdp2", "llama", run, staging=staging)
    assert verify(f"{run}/checkpoint-2").ok
    live = live_model("fsdp2", "llama")
    with saver_of(live, run, staging=staging) as saver:
        assert saver.resume("must").resumed_from == staging / "checkpoint-2"
        train(live, saver, 2, 1)
        report = saver.save_state()
        assert (report.upload is None) == bool(RANK)
        before = truth(live)
    assert latest(run) == f"{run}/checkpoint-3"
    dist.barrier()
    shutil.rmtree(disk, ignore_errors=True)
    dist.barrier()
    fresh = live_model("fsdp2", "llama", seed=1)
    with saver_of(fresh, run, staging=staging) as saver:
        assert saver.resume("must").resumed_from == f"{run}/checkpoint-3"
        same(before, truth(fresh))


@on_two
def share_a_folder(folder):
    go_on_from_both(BUCKET_RUN, folder / "nvme", folder / "nvme")


def test_two_ranks_that_share_a_folder(s3, tmp_path):
    share_a_folder(tmp_path)


@on_two
def have_a_folder_each(folder):
    """By one path: rank 0 has the checkpoints, and reads them for the other."""
    disk, home = folder / f"disk-{RANK}", Path.cwd()
    disk.mkdir()
    os.chdir(disk)
    try:
        go_on_from_both(BUCKET_RUN, HERE / "nvme", disk / "nvme")
        assert not list(disk.glob("nvme/checkpoint-*"))
    finally:
        os.chdir(home)


@pytest.mark.slow
def test_two_ranks_with_a_folder_each(s3, tmp_path):
    have_a_folder_each(tmp_path)


@on_two
def fail_to_upload(folder):
    live = live_model("ddp", "llama")
    saver = saver_of(live, BUCKET_RUN, staging=folder / "nvme")
    refused = TargetError("the bucket is full")
    with patch.object(uploads, "copy_open", side_effect=refused):
        train(live, saver, 0, 2)
        saver.save_state()
        error = RankError if RANK else TargetError
        with pytest.raises(error, match="checkpoint-2: not uploaded: the bucket is full"):
            saver.close()
    fresh = live_model("ddp", "llama", seed=1)
    with saver_of(fresh, BUCKET_RUN, staging=folder / "nvme") as saver:
        assert saver.resume("must").step == 2
    assert verify(f"{BUCKET_RUN}/checkpoint-2").ok


def test_a_failed_upload_is_raised_on_both_ranks_at_the_end(s3, tmp_path):
    fail_to_upload(tmp_path)


@on_two
def be_signalled(folder):
    real = uploads.copy_open

    def copy_slowly(*arguments, **settings):
        time.sleep(1.5)
        return real(*arguments, **settings)

    live = live_model("ddp", "llama")
    every = Every(steps=10_000)
    with (
        patch.object(uploads, "copy_open", copy_slowly),
        saver_of(live, BUCKET_RUN, staging=folder / "nvme", every=every) as saver,
    ):
        train(live, saver, 0, 2)
        if RANK:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            train(live, saver, 2, 10_000)
        assert latest(BUCKET_RUN) == f"{BUCKET_RUN}/checkpoint-{saver.progress.step}"


@pytest.mark.slow
def test_both_ranks_end_after_the_upload_by_rank_0(s3, tmp_path):
    be_signalled(tmp_path)
