"""Checkpoints in storage buckets of the Hub: against a server on loopback, with hf_xet's contents
on this disk.
"""

import logging
import multiprocessing
import signal
import tempfile
import time
from contextlib import suppress
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch
from commands import ft_ckpt
from faults import KILLS, Server, try_worlds
from http_server import Fault
from hub_bucket_server import Bucket, copy_as_client, serving_buckets, using_buckets
from hub_server import TOKEN
from huggingface_hub import HfApi
from huggingface_hub.utils import _http
from places import python_path
from small_checkpoints import contents, save_with_state

import ft_ckpt as library
from ft_ckpt import CheckpointSaver, copy, latest, pull, push, sync, verify
from ft_ckpt.checkpoint.checks import SIGNATURE_NAME
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, read_manifest
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    NameTakenError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.extensions.transfer.hub import client as hub_client
from ft_ckpt.storage.places import open_place

URL = "hf://buckets/user/ckpts"
GOAL = f"{URL}/run/checkpoint-1"
AT = "run/checkpoint-1/"
SENDING = ".ft_ckpt-sending"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_client, "PAUSE_SECONDS", 0.01)
    # the library's own retries
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: time.sleep(0.001)))
    monkeypatch.setenv("FT_CKPT_CACHE", str(tmp_path / "cache"))
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with serving_buckets(tmp_path / "cas") as server, using_buckets(server):
        yield server


@pytest.fixture
def small(tmp_path):
    save_with_state(tmp_path / "run" / "checkpoint-1", 1, run_id="r")
    return tmp_path / "run" / "checkpoint-1"


def files_there(hub, at=AT):
    """The files of a checkpoint in the bucket, without its manifest."""
    found = hub.bytes_of("user/ckpts")
    return {
        path.removeprefix(at): content for path, content in found.items() if path.startswith(at)
    }


def files_of(folder):
    return {
        name: content for name, content in contents(folder).items() if Path(folder, name).is_file()
    }


def without_manifest(files):
    return {name: content for name, content in files.items() if name != MANIFEST_NAME}


def is_whole(goal=GOAL):
    """Whether there is a checkpoint; if so it must be whole."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            pulled = pull(goal, Path(folder, "pulled"))
        except NotACheckpointError:
            return False
        assert pulled.verified
        return True


def step_of(goal=GOAL):
    """The step of the checkpoint in the bucket."""
    with tempfile.TemporaryDirectory() as folder:
        return read_manifest(open_place(pull(goal, Path(folder, "pulled")).path)).step


# There and back


def test_a_checkpoint_goes_there_with_its_manifest_last_and_comes_back_as_it_was(
    hub, small, tmp_path
):
    report = copy(small, f"{URL}/run/")
    assert (report.path, report.source, report.is_new, report.sent_bytes) == (
        GOAL,
        small,
        True,
        report.bytes,
    )
    assert hub.buckets["user/ckpts"].private
    assert files_there(hub) == files_of(small)
    added = [path.removeprefix(AT) for kind, path in hub.operations if kind == "addFile"]
    assert (added[0], added[-1]) == (SENDING, MANIFEST_NAME)
    assert set(added[1:-1]) == set(report.files)
    fetched = pull(GOAL, tmp_path / "back")
    assert (fetched.verified, fetched.files, fetched.url) == (True, report.files, GOAL)
    assert files_of(tmp_path / "back") == files_of(small)
    assert verify(tmp_path / "back").ok
    again = copy(GOAL, f"{tmp_path}/copies/")
    assert (again.path, again.bytes) == (tmp_path / "copies" / "checkpoint-1", report.bytes)
    assert not copy(GOAL, f"{tmp_path}/copies/").is_new


def test_what_is_there_is_not_sent_again(hub, small):
    copy(small, GOAL)
    hub.operations.clear()
    again = copy(small, GOAL)
    assert (again.is_new, again.sent_bytes, hub.operations) == (False, 0, [])
    assert push(small, f"{URL}/weights").is_new
    assert not push(small, f"{URL}/weights").is_new


def test_a_save_is_pushed_there_and_loaded_after_a_pull(hub, tmp_path):
    model = models.build("llama", 0)
    with CheckpointSaver(tokenizer=models.tokenizer()) as saver:
        saver.save(model, tmp_path / "final", push_to_hub=f"{URL}/final").push.result()
    expected = model.state_dict()
    loaded = library.load_model(
        pull(f"{URL}/final", tmp_path / "back").path, verify=True
    ).state_dict()
    assert loaded
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())


def test_a_signature_comes_back_with_its_checkpoint(hub, small, tmp_path):
    """Its bytes are not looked at: the manifest that it covers comes back to the byte."""
    (small / SIGNATURE_NAME).write_text("{}")
    copy(small, GOAL)
    copy(GOAL, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(small)


def test_a_push_leaves_the_state_here_and_knows_its_options(hub, small, tmp_path):
    report = push(small, "hf://buckets/user/open/model", private=False, token=TOKEN)
    assert report.url == "hf://buckets/user/open/model"
    assert not any(name.startswith("state/") for name in report.files)
    assert not hub.buckets["user/open"].private
    with pytest.raises(TargetError, match="public, expected private=True"):
        push(small, "hf://buckets/user/open/other", private=True)
    with pytest.raises(ConfigError, match="revision"):
        push(small, "hf://buckets/user/open/model", revision="v1")
    assert pull(report.url, tmp_path / "back", token=TOKEN).verified
    assert push(small, GOAL, state=True).bytes > report.bytes


def test_what_is_in_an_object_store_comes_through_the_cache(hub, small, tmp_path):
    pytest.importorskip("obstore")
    copy(small, "memory://hub-buckets/run/")
    assert copy("memory://hub-buckets/run/checkpoint-1", GOAL).is_new
    assert without_manifest(files_there(hub)) == without_manifest(files_of(small))
    assert push("memory://hub-buckets/run/checkpoint-1", f"{URL}/weights").is_new
    for goal in ("memory://hub-buckets/back/", f"{URL}/other"):
        with pytest.raises(ConfigError, match="to a disk only"):
            copy(GOAL, goal)
    with pytest.raises(ConfigError, match="no folder to pull it into"):
        pull(GOAL)


def test_commands_take_such_urls(hub, small, tmp_path):
    assert "2 files" in ft_ckpt("push", small, f"{URL}/final").out
    assert "--force" in ft_ckpt("cp", small, f"{URL}/final").err
    assert ft_ckpt("cp", small, f"{URL}/final", "--force").code == 0
    assert "verified" in ft_ckpt("pull", f"{URL}/final", tmp_path / "back").out
    assert ft_ckpt("cp", f"{URL}/final", f"{tmp_path}/copied/").code == 0
    assert verify(tmp_path / "copied" / "final").ok


# What goes wrong


MAX_WORLDS = [3, pytest.param(0, marks=pytest.mark.slow)]  # 0: all requests of a copy
PASSING = {"busy": {"status": 503}, "answer lost": {"cuts": "after"}}
LASTING = {"refused": {"status": 403, "times": 10_000}}
_CONTEXT = multiprocessing.get_context("forkserver")


class Way:
    """A copy into the bucket, over an older checkpoint there, or from there; each time to another
    place.
    """

    def __init__(self, hub, name, new, old, folder):
        self.hub, self.name, self.new, self.old, self.folder = hub, name, str(new), str(old), folder

    def prepare(self, world):
        """Source and destination of a copy."""
        there = f"{URL}/{world.name}/checkpoint-1"
        if self.name != "up":
            copy(self.new if self.name == "down" else self.old, there)
        return (there, str(self.folder / world.name)) if self.name == "down" else (self.new, there)

    def finish(self, source, goal):
        """What was done in part is whole after the next call, and there is nothing else."""
        if self.name == "down":
            assert not Path(goal).exists() or verify(goal).ok
            copy(source, goal)
            assert verify(goal).ok
        else:
            assert not is_whole(goal) or step_of(goal) == 1 or self.name == "over"
            copy(source, goal, overwrite=self.name == "over")
            assert step_of(goal) == 1
            assert set(files_there(self.hub, goal.removeprefix(f"{URL}/") + "/")) == set(
                files_of(self.new)
            )


@pytest.fixture
def way(request, hub, small, tmp_path):
    save_with_state(tmp_path / "older" / "checkpoint-1", 2)
    return Way(hub, request.param, small, tmp_path / "older" / "checkpoint-1", tmp_path)


ways = pytest.mark.parametrize("way", ["up", "over", "down"], indirect=True)


@pytest.mark.sample("busy-3")
@pytest.mark.parametrize("max_worlds", MAX_WORLDS)
@pytest.mark.parametrize("name", PASSING)
def test_a_copy_outlives_what_passes_at_any_request(hub, small, max_worlds, name):
    def trial(world):
        world.run(copy, small, f"{URL}/{world.name}/")
        assert is_whole(f"{URL}/{world.name}/checkpoint-1")

    copy(small, f"{URL}/earlier/")  # which makes the bucket
    report = try_worlds(trial, Server(hub, {name: PASSING[name]}), max_worlds=max_worlds)
    assert report.calls > 5
    assert report.missed == 0


@pytest.mark.slow
@pytest.mark.parametrize("max_worlds", MAX_WORLDS)
@ways
def test_a_copy_that_is_refused_from_any_request_on_is_finished_by_the_next(hub, way, max_worlds):
    def trial(world):
        source, goal = way.prepare(world)
        with suppress(CheckpointError):
            world.run(partial(copy, overwrite=way.name == "over"), source, goal)
        way.finish(source, goal)

    assert try_worlds(trial, Server(hub, LASTING), max_worlds=max_worlds).calls > 5


@pytest.mark.sample("up-killed before-2")
@pytest.mark.parametrize("max_worlds", [2, MAX_WORLDS[1]])
@pytest.mark.parametrize("name", KILLS)
@ways
def test_a_copy_that_is_killed_at_any_request_is_finished_by_the_next(
    hub, way, monkeypatch, name, max_worlds
):
    monkeypatch.setenv("PYTHONPATH", python_path())
    _CONTEXT.set_forkserver_preload(
        ["ft_ckpt.extensions.transfer.hub.buckets", "hub_bucket_server"]
    )
    ensure_running()

    def copied(world, source, goal):
        process = _CONTEXT.Process(
            target=copy_as_client, args=(hub.url, source, goal, way.name == "over")
        )
        process.start()
        world.begin(process.pid)
        process.join()
        return process.exitcode

    def trial(world):
        source, goal = way.prepare(world)
        status = world.run(copied, world, source, goal)
        assert status in (0, -signal.SIGKILL)  # 0: its last request is one that it does not need
        way.finish(source, goal)

    assert try_worlds(trial, Server(hub, {name: KILLS[name]}), max_worlds=max_worlds).calls > 5


def test_damage_is_found_on_both_ways(hub, small, tmp_path):
    copy(small, GOAL)
    weights = (small / "model.safetensors").read_bytes()
    damaged = weights[:-1] + bytes([weights[-1] ^ 1])
    for content in (damaged, weights[:-1]):
        hub.put_file("user/ckpts", f"{AT}model.safetensors", content)
        for call in (lambda: pull(GOAL, tmp_path / "back"), lambda: copy(GOAL, tmp_path / "back")):
            with pytest.raises(CorruptError, match=r"model\.safetensors"):
                call()
        assert not (tmp_path / "back").exists()
    assert copy(small, GOAL).is_new
    assert is_whole()
    (small / "model.safetensors").write_bytes(damaged)
    hub.operations.clear()
    with pytest.raises(CorruptError, match=r"model\.safetensors: digest .* not sent"):
        copy(small, f"{URL}/other")
    assert hub.operations == []


def test_bytes_that_are_damaged_on_the_way_are_refused(hub, small, tmp_path, monkeypatch):
    copy(small, GOAL)

    def download(api, bucket_id, files, **_):
        for remote, path in files:
            content = hub.contents[remote.xet_hash]
            is_manifest = remote.path.endswith(MANIFEST_NAME)
            path.write_bytes(content if is_manifest else content[:-1] + b"?")

    monkeypatch.setattr(HfApi, "download_bucket_files", download)
    with pytest.raises(CorruptError, match="digest"):
        pull(GOAL, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_is_there_stays_unless_it_may_be_replaced(hub, small, tmp_path):
    copy(small, GOAL)
    save_with_state(tmp_path / "new", 2)
    with pytest.raises(NameTakenError, match="--force"):
        copy(tmp_path / "new", GOAL)
    assert step_of() == 1
    hub.put_file("user/ckpts", "mine/config.json", b"mine")
    with pytest.raises(TargetError, match=r"config\.json: files that belong to no checkpoint"):
        copy(small, f"{URL}/mine", overwrite=True)
    assert hub.bytes_of("user/ckpts")["mine/config.json"] == b"mine"
    assert copy(tmp_path / "new", GOAL, overwrite=True).is_new
    assert step_of() == 2
    assert set(files_there(hub)) == set(files_of(tmp_path / "new"))


def test_files_of_another_sender_are_noticed_before_the_manifest(hub, small, monkeypatch):
    """There are no conditional writes: what was replaced with another size is found in the
    listing.
    """
    real = HfApi.batch_bucket_files

    def send(api, bucket_id, *, add, delete):
        real(api, bucket_id, add=add, delete=delete)
        if len(add) > 1:
            hub.put_file("user/ckpts", f"{AT}config.json", b"other")

    monkeypatch.setattr(HfApi, "batch_bucket_files", send)
    with pytest.raises(TargetError, match=r"config\.json: not in the bucket as sent"):
        copy(small, GOAL)
    assert MANIFEST_NAME not in files_there(hub)


# Who may, and what is there


def test_who_may_not_is_told_without_the_token(hub, small, tmp_path, monkeypatch):
    copy(small, GOAL)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    for call in (lambda: pull(GOAL, tmp_path / "back"), lambda: copy(small, f"{URL}/x")):
        with pytest.raises(CheckpointError, match="hf auth login"):
            call()
    assert pull(GOAL, tmp_path / "back", token=TOKEN).verified
    for call in (
        lambda: pull(GOAL, tmp_path / "b", token="hf_wrong"),
        lambda: push(small, GOAL, token="hf_wrong"),
    ):
        with pytest.raises(CheckpointError, match="hf auth login") as found:
            call()
        assert "hf_wrong" not in str(found.value)


def test_a_bucket_that_cannot_be_made_or_is_missing_is_an_error(hub, small, tmp_path):
    with pytest.raises(TargetError, match=r"others/ckpts/x: not written .*403.*hf auth login"):
        copy(small, "hf://buckets/others/ckpts/x")
    with pytest.raises(UnreadableError, match="hf auth login"):
        pull("hf://buckets/user/absent/x", tmp_path / "back")
    assert hub.buckets == {}
    hub.buckets["user/ckpts"] = Bucket(private=True)
    with pytest.raises(NotACheckpointError):
        pull(f"{URL}/absent", tmp_path / "back")
    assert set(hub.buckets) == {"user/ckpts"}


def test_others_may_read_what_is_public(hub, small, tmp_path):
    hub.buckets["user/ckpts"] = Bucket(private=False)
    copy(small, GOAL)
    hub.operations.clear()
    hub.faults = [Fault("xet-write-token", 403, times=99)]
    assert pull(GOAL, tmp_path / "back").verified
    assert hub.operations == []


@pytest.mark.parametrize(
    "url",
    [
        "hf://buckets/user",
        "hf://buckets/",
        "hf://buckets/user/na me/x",
        "hf://buckets/user/name@v1",
        f"{URL}/a/../b",
    ],
)
def test_other_urls_are_refused(small, url):
    with pytest.raises(ConfigError):
        copy(small, url)


def test_secrets_in_urls_are_refused(small):
    with pytest.raises(ConfigError, match="HF_TOKEN") as found:
        copy(small, f"{URL}/x?token=hf_abc")
    assert "hf_abc" not in str(found.value)


def test_a_run_there_goes_through_the_gateway(hub, small, tmp_path):
    calls = [
        lambda: CheckpointSaver(None, f"{URL}/run"),
        lambda: library.convert(small, f"{URL}/out"),
    ]
    calls += [lambda: CheckpointSaver(None, f"{URL}/run", staging=tmp_path / "stage")]
    calls += [lambda: CheckpointSaver().save(models.build("llama", 0), f"{URL}/final")]
    calls += [lambda: library.save({"a": torch.zeros(2)}, f"{URL}/state.safetensors")]
    calls += [lambda: sync(tmp_path / "run", URL), lambda: latest(URL), lambda: verify(GOAL)]
    calls += [lambda: library.load_model(GOAL), lambda: open_place(URL)]
    for call in calls:
        with pytest.raises(
            ConfigError, match=r"s3://NAME/folder .* AWS_ENDPOINT_URL=https://s3\.hf\.co/NAMESPACE"
        ):
            call()
    assert hub.operations == []
