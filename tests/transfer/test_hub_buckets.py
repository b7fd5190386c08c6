"""Checkpoints in storage buckets of the Hub: against a server on loopback, with hf_xet's contents on this disk."""

import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch
from http_server import Fault
from hub_bucket_server import Bucket, copy_as_client, serving_buckets, using_buckets
from hub_server import TOKEN
from huggingface_hub import HfApi
from huggingface_hub.utils import _http
from places import python_path
from seeds import chosen_seed
from small_checkpoints import contents, save_with_state
from test_copies import FROZEN, FROZEN_BYTES, save_large

import ft_ckpt
from ft_ckpt import CheckpointSaver, copy, latest, pull, push, sync, verify
from ft_ckpt.checkpoint.catalog import read_manifest
from ft_ckpt.checkpoint.guards import SAVING, pin
from ft_ckpt.checkpoint.leases import LEASE
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.cli import main
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    MissingError,
    NameTakenError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.storage.hub_bucket import HubBucket
from ft_ckpt.storage.place import open_place
from ft_ckpt.transfer import hub_buckets

URL = "hf://buckets/user/ckpts"
GOAL = f"{URL}/run/checkpoint-1"
AT = "run/checkpoint-1/"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_buckets, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: time.sleep(0.001)))  # the library's own retries
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
    return {path.removeprefix(at): content for path, content in found.items() if path.startswith(at)}


def files_of(folder):
    return {name: content for name, content in contents(folder).items() if Path(folder, name).is_file()}


def without_manifest(files):
    return {name: content for name, content in files.items() if name != MANIFEST_NAME}


def is_whole(goal=GOAL):
    """Whether there is a checkpoint; if so it must be whole."""
    try:
        found = verify(goal)
    except (NotACheckpointError, ConfigError):
        return False
    assert found.ok, found.problems
    return True


# There and back


def test_a_checkpoint_goes_there_with_its_manifest_last_and_comes_back_as_it_was(hub, small, tmp_path):
    report = copy(small, f"{URL}/run/")
    assert (report.path, report.source, report.is_new, report.sent_bytes) == (GOAL, small, True, report.bytes)
    assert hub.buckets["user/ckpts"].private
    assert without_manifest(files_there(hub)) == without_manifest(files_of(small))
    added = [path.removeprefix(AT) for kind, path in hub.operations if kind == "addFile"]
    assert added[-1] == MANIFEST_NAME
    assert set(added[:-1]) == {*report.files, SAVING}
    assert verify(GOAL).ok
    assert latest(f"{URL}/run") == GOAL
    fetched = pull(GOAL, tmp_path / "back")
    assert (fetched.verified, fetched.files) == (True, report.files)
    assert without_manifest(files_of(tmp_path / "back")) == without_manifest(files_of(small))
    assert verify(tmp_path / "back").ok
    assert copy(GOAL, tmp_path / "other").bytes == report.bytes
    cached = pull(GOAL)
    assert verify(cached.path).ok


def test_what_is_there_is_not_sent_again(hub, tmp_path):
    run = tmp_path / "run"
    for step in (1, 2):
        save_large(run / f"checkpoint-{step}", step)
    copy(run / "checkpoint-1", f"{URL}/run/")
    hub.operations.clear()
    again = copy(run / "checkpoint-1", f"{URL}/run/")
    assert (again.is_new, again.sent_bytes, hub.operations) == (False, 0, [])
    second = copy(run / "checkpoint-2", f"{URL}/run/")
    assert (second.reused, second.sent_bytes) == ((FROZEN,), second.bytes - FROZEN_BYTES)
    assert ("copyFile", f"run/checkpoint-2/{FROZEN}") in hub.operations
    assert is_whole(f"{URL}/run/checkpoint-2")
    hub.operations.clear()
    there = copy(f"{URL}/run/checkpoint-2", "hf://buckets/user/other/")
    assert (there.path, there.sent_bytes) == ("hf://buckets/user/other/checkpoint-2", 0)
    added = {path for kind, path in hub.operations if kind == "addFile" and LEASE not in path}
    assert added == {f"checkpoint-2/{name}" for name in (SAVING, MANIFEST_NAME)}
    assert is_whole("hf://buckets/user/other/checkpoint-2")


def test_a_model_is_loaded_from_there(hub, tmp_path):
    model = models.build("llama", 0)
    with CheckpointSaver(tokenizer=models.tokenizer()) as saver:
        saver.save(model, tmp_path / "final", push_to_hub=f"{URL}/final").push.result()
    expected = model.state_dict()
    for loaded in (
        ft_ckpt.load_model(f"{URL}/final", verify=True).state_dict(),
        ft_ckpt.load(f"{URL}/final/model.safetensors", "cpu", verify=True),
    ):
        assert loaded
        assert all(torch.equal(value, expected[name]) for name, value in loaded.items())


def test_a_push_leaves_the_state_here_and_knows_its_options(hub, small, tmp_path):
    report = push(small, "hf://buckets/user/open/model", private=False, token=TOKEN)
    assert report.url == "hf://buckets/user/open/model"
    assert not any(name.startswith("state/") for name in report.files)
    assert not hub.buckets["user/open"].private
    with pytest.raises(TargetError, match="public, and private=True"):
        push(small, "hf://buckets/user/open/other", private=True)
    with pytest.raises(ConfigError, match="revision"):
        push(small, "hf://buckets/user/open/model", revision="v1")
    assert pull(report.url, tmp_path / "back", token=TOKEN).verified
    assert push(small, GOAL, state=True).bytes > report.bytes


def test_what_is_in_an_object_store_comes_through_the_cache(hub, small, tmp_path):
    pytest.importorskip("obstore")
    copy(small, "memory://hub-buckets/run/")
    assert copy("memory://hub-buckets/run/checkpoint-1", GOAL).is_new
    assert copy(GOAL, "memory://hub-buckets/back/").is_new
    assert verify("memory://hub-buckets/back/checkpoint-1").ok
    assert without_manifest(files_there(hub)) == without_manifest(files_of(small))


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["ft-ckpt", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def test_commands_take_such_urls(hub, small, tmp_path, monkeypatch, capsys):
    assert command(monkeypatch, "sync", tmp_path / "run", f"{URL}/run") == 0
    assert "checkpoint-1: 5 files" in capsys.readouterr().out
    assert command(monkeypatch, "ls", f"{URL}/run") == 0
    assert "checkpoint-1" in capsys.readouterr().out
    assert command(monkeypatch, "verify", GOAL) == 0
    assert command(monkeypatch, "show", GOAL) == 0
    assert command(monkeypatch, "diff", GOAL, small) == 0
    assert command(monkeypatch, "push", small, f"{URL}/final") == 0
    assert command(monkeypatch, "cp", small, f"{URL}/final") == 2
    assert "--force" in capsys.readouterr().err
    assert command(monkeypatch, "cp", small, f"{URL}/final", "--force") == 0
    assert command(monkeypatch, "pull", f"{URL}/final", tmp_path / "back") == 0
    assert "verified" in capsys.readouterr().out
    save_with_state(tmp_path / "run" / "checkpoint-2", 2, run_id="r")
    assert command(monkeypatch, "sync", tmp_path / "run", f"{URL}/two") == 0
    assert command(monkeypatch, "prune", f"{URL}/two", "--last", "1") == 0
    assert "checkpoint-1" in capsys.readouterr().out
    assert {path.split("/")[1] for path in hub.bytes_of("user/ckpts") if path.startswith("two/")} == {"checkpoint-2"}
    assert command(monkeypatch, "sync", f"{URL}/run", tmp_path / "runs") == 0
    assert verify(tmp_path / "runs" / "checkpoint-1").ok


# What goes wrong


MOST = [3, pytest.param(1000, marks=pytest.mark.slow)]  # of the requests of a copy, at which something happens
LOST = {"cuts": "after"}
_CONTEXT = multiprocessing.get_context("forkserver")


def each_request(hub, most, begin, *args, **more):
    """Numbers of requests that `begin` makes, the first is 0: all of them, or `most`."""
    hub.requests.clear()
    begin(*args, **more)
    count = len(hub.requests)
    assert count > 8
    return sorted(random.Random(chosen_seed()).sample(range(count), min(most, count)))


class Way:
    """A copy into the bucket, over an older checkpoint there, or from there; each time to another place."""

    def __init__(self, hub, name, new, old, folder):
        self.hub, self.name, self.new, self.old, self.folder = hub, name, str(new), str(old), folder

    def prepare(self, number):
        """Source and destination of a copy."""
        there = f"{URL}/{number}/checkpoint-1"
        if self.name != "up":
            copy(self.new if self.name == "down" else self.old, there)
        return (there, str(self.folder / f"down-{number}")) if self.name == "down" else (self.new, there)

    def finish(self, source, goal):
        """What was done in part is whole after the next call, and there is nothing else."""
        assert not is_whole(goal) or read_manifest(goal).step == 1 or self.name == "over"
        copy(source, goal, overwrite=self.name == "over")
        assert is_whole(goal)
        assert read_manifest(goal).step == 1
        if self.name != "down":
            assert set(files_there(self.hub, goal.removeprefix(f"{URL}/") + "/")) == set(files_of(self.new))


@pytest.fixture
def way(request, hub, small, tmp_path):
    save_with_state(tmp_path / "older" / "checkpoint-1", 2)
    return Way(hub, request.param, small, tmp_path / "older" / "checkpoint-1", tmp_path)


ways = pytest.mark.parametrize("way", ["up", "over", "down"], indirect=True)


@pytest.mark.sample("busy-3")
@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize("fault", [{"status": 503}, LOST], ids=["busy", "answer lost"])
def test_a_copy_outlives_what_passes_at_any_request(hub, small, most, fault):
    copy(small, f"{URL}/earlier/")  # which makes the bucket
    for at in each_request(hub, most, copy, small, f"{URL}/first/"):
        hub.faults = [Fault("", skips=at, **fault)]
        copy(small, f"{URL}/{at}/")
        assert hub.faults[0].matched > at
        assert is_whole(f"{URL}/{at}/checkpoint-1"), at


@pytest.mark.slow
@pytest.mark.parametrize("most", MOST)
@ways
def test_a_copy_that_is_refused_from_any_request_on_is_finished_by_the_next(hub, way, most):
    for at in each_request(hub, most, copy, *way.prepare("first"), overwrite=way.name == "over"):
        source, goal = way.prepare(at)
        hub.faults = [Fault("", 403, skips=at, times=10_000)]
        with suppress(CheckpointError):
            copy(source, goal, overwrite=way.name == "over")
        hub.faults = []
        way.finish(source, goal)


@pytest.mark.sample("up-before-2")
@pytest.mark.parametrize("most", [2, MOST[1]])
@pytest.mark.parametrize("acts_first", [False, True], ids=["before", "after"])
@ways
def test_a_copy_that_is_killed_at_any_request_is_finished_by_the_next(hub, way, monkeypatch, acts_first, most):
    monkeypatch.setenv("PYTHONPATH", python_path())
    _CONTEXT.set_forkserver_preload(["ft_ckpt.transfer.hub_buckets", "hub_bucket_server"])
    ensure_running()
    for at in each_request(hub, most, copy, *way.prepare("first"), overwrite=way.name == "over"):
        source, goal = way.prepare(at)
        process = _CONTEXT.Process(target=copy_as_client, args=(hub.url, source, goal, way.name == "over"))
        fault = Fault("", skips=at, cuts="after" if acts_first else "before")
        fault.then = partial(kill, process)
        hub.faults = [fault]
        process.start()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)  # 0: its last request is one that it does not need
        hub.faults = []
        way.finish(source, goal)


def kill(process):
    os.kill(process.pid, signal.SIGKILL)


def test_an_interrupted_copy_is_continued(hub, tmp_path):
    save_large(tmp_path / "checkpoint-1", 1)
    hub.faults = [Fault("POST .*/batch", 403, skips=3, times=99)]  # after two marks and the files: the manifest
    with pytest.raises(TargetError, match=r"not written .*403"):
        copy(tmp_path / "checkpoint-1", GOAL)
    assert not is_whole()
    assert f"{AT}{FROZEN}" in hub.bytes_of("user/ckpts")
    hub.faults = []
    hub.operations.clear()
    assert copy(tmp_path / "checkpoint-1", GOAL).sent_bytes == 0
    assert [path for kind, path in hub.operations if kind == "addFile" and SAVING not in path] == [AT + MANIFEST_NAME]
    assert is_whole()


def test_damage_is_found_on_both_ways(hub, small, tmp_path):
    copy(small, GOAL)
    weights = (small / "model.safetensors").read_bytes()
    hub.put_file("user/ckpts", f"{AT}model.safetensors", weights[:-1] + bytes([weights[-1] ^ 1]))
    assert not verify(GOAL).ok
    for call in (lambda: pull(GOAL, tmp_path / "back"), lambda: pull(GOAL), lambda: copy(GOAL, tmp_path / "back")):
        with pytest.raises(CorruptError, match=r"model\.safetensors"):
            call()
    assert not (tmp_path / "back").exists()
    assert copy(small, GOAL).sent_bytes == len(weights)
    assert is_whole()
    (small / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    hub.operations.clear()
    with pytest.raises(CorruptError, match=r"model\.safetensors: digest .* nothing was copied"):
        copy(small, f"{URL}/other")
    assert hub.operations == []


def test_bytes_that_are_damaged_on_the_way_are_refused(hub, small, tmp_path, monkeypatch):
    copy(small, GOAL)

    def download(api, bucket_id, files, **_):
        for remote, path in files:
            content = hub.contents[remote.xet_hash]
            path.write_bytes(content[:-1] + b"?")

    monkeypatch.setattr(HfApi, "download_bucket_files", download)
    with pytest.raises(CorruptError, match="its bytes have changed"):
        pull(GOAL, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_is_there_stays_unless_it_may_be_replaced(hub, small, tmp_path):
    copy(small, GOAL)
    save_with_state(tmp_path / "new", 2)
    with pytest.raises(NameTakenError, match="--force"):
        copy(tmp_path / "new", GOAL)
    assert read_manifest(GOAL).step == 1
    hub.put_file("user/ckpts", "mine/config.json", b"mine")
    with pytest.raises(TargetError, match=r"config\.json: files that belong to no checkpoint"):
        copy(small, f"{URL}/mine", overwrite=True)
    assert hub.bytes_of("user/ckpts")["mine/config.json"] == b"mine"
    assert copy(tmp_path / "new", GOAL, overwrite=True).is_new
    assert read_manifest(GOAL).step == 2
    assert is_whole()
    pin(GOAL)
    with pytest.raises(NameTakenError, match="pinned"):
        copy(small, GOAL, overwrite=True)
    assert read_manifest(GOAL).step == 2


def test_two_senders_of_different_checkpoints_make_no_mixture(hub, small, tmp_path, monkeypatch):
    """There are no conditional writes, so this is noticed afterwards: the earlier one fails, or the manifest does."""
    save_with_state(tmp_path / "other", 2)
    real, met = hub_buckets._commit, []

    def commit(*args):
        if not met:
            met.append(True)
            with pytest.raises(TargetError, match=f"process {os.getpid()} .* is saving there"):
                copy(tmp_path / "other", GOAL, overwrite=True)
            bucket = hub.buckets["user/ckpts"]
            bucket.files.pop(AT + SAVING)  # it looked when there was no mark yet
            copy(tmp_path / "other", GOAL, overwrite=True)
        real(*args)

    monkeypatch.setattr(hub_buckets, "_commit", commit)
    with pytest.raises(TargetError, match=r"files that belong to no checkpoint|not in the bucket as sent"):
        copy(small, GOAL)
    assert not is_whole() or read_manifest(GOAL).step == 2


def test_files_that_are_replaced_while_the_manifest_is_written_are_noticed(hub, small, monkeypatch):
    real = HubBucket.write

    def write(store, name, data, **more):
        real(store, name, data, **more)
        if name == MANIFEST_NAME:
            hub.put_file("user/ckpts", f"{AT}config.json", b'{"step": 9}')

    monkeypatch.setattr(HubBucket, "write", write)
    with pytest.raises(TargetError, match="another process writes there"):
        copy(small, GOAL)
    with pytest.raises(CorruptError, match=r"config\.json"), ft_ckpt.checkpoint.open_checkpoint.open_checkpoint(GOAL):
        pass


def test_a_batch_that_is_done_in_part_is_completed(hub, small, tmp_path, monkeypatch):
    save_with_state(tmp_path / "run" / "checkpoint-2", 1)
    copy(small, GOAL)
    real = HubBucket.known_hashes

    def known(store, most):
        found = real(store, most)
        hub.buckets["user/ckpts"].files.pop(AT + "model.safetensors", None)  # deleted since it was listed
        hub.buckets["user/ckpts"].files.pop(AT + "config.json", None)
        return found

    monkeypatch.setattr(HubBucket, "known_hashes", known)
    assert copy(tmp_path / "run" / "checkpoint-2", f"{URL}/run/checkpoint-2").is_new
    assert is_whole(f"{URL}/run/checkpoint-2")
    assert ("copyFile", "run/checkpoint-2/config.json") in hub.operations


# Who may, and what is there


def test_who_may_not_is_told_without_the_token(hub, small, tmp_path, monkeypatch):
    copy(small, GOAL)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    for call in (lambda: pull(GOAL, tmp_path / "back"), lambda: latest(f"{URL}/run"), lambda: copy(small, f"{URL}/x")):
        with pytest.raises(CheckpointError, match="hf auth login"):
            call()
    assert pull(GOAL, tmp_path / "back", token=TOKEN).verified
    for call in (lambda: pull(GOAL, tmp_path / "b", token="hf_wrong"), lambda: push(small, GOAL, token="hf_wrong")):
        with pytest.raises(CheckpointError, match="hf auth login") as found:
            call()
        assert "hf_wrong" not in str(found.value)
    assert "hf_wrong" not in repr(open_place(URL, token="hf_wrong"))


def test_a_bucket_that_cannot_be_made_or_is_missing_is_an_error(hub, small, tmp_path):
    with pytest.raises(TargetError, match=r"others/ckpts/x: not written .*403.*hf auth login"):
        copy(small, "hf://buckets/others/ckpts/x")
    for call in (verify, lambda url: pull(url, tmp_path / "back"), latest, ft_ckpt.load_model):
        with pytest.raises(ConfigError, match="no such bucket, or none that this token may see"):
            call("hf://buckets/user/absent/x")
    assert hub.buckets == {}
    hub.buckets["user/ckpts"] = Bucket(private=True)
    with pytest.raises(NotACheckpointError):
        pull(f"{URL}/absent", tmp_path / "back")
    with pytest.raises(NotACheckpointError):
        sync(f"{URL}/absent", tmp_path / "back")
    with pytest.raises(ConfigError, match="no such bucket"):
        sync(tmp_path / "run", "hf://buckets/user/absent", dry_run=True)
    assert set(hub.buckets) == {"user/ckpts"}


def test_others_may_read_what_is_public_without_a_mark(hub, small, tmp_path):
    hub.buckets["user/ckpts"] = Bucket(private=False)
    copy(small, GOAL)
    hub.operations.clear()
    hub.faults = [Fault("xet-write-token", 403, times=99)]
    assert pull(GOAL, tmp_path / "back").verified
    assert hub.operations == []


@pytest.mark.parametrize(
    "url",
    ["hf://buckets/user", "hf://buckets/", "hf://buckets/user/na me/x", "hf://buckets/user/name@v1", f"{URL}/a/../b"],
)
def test_other_urls_are_refused(small, url):
    with pytest.raises(ConfigError):
        copy(small, url)


def test_secrets_in_urls_and_foreign_options_are_refused(small):
    with pytest.raises(ConfigError, match="HF_TOKEN") as found:
        copy(small, f"{URL}/x?token=hf_abc")
    assert "hf_abc" not in str(found.value)
    with pytest.raises(ConfigError, match="endpoint: not an option"):
        open_place(URL, endpoint="http://localhost")


def test_nothing_is_saved_there_directly(hub, small, tmp_path):
    hub.buckets["user/ckpts"] = Bucket(private=True)
    saves = [lambda: CheckpointSaver(None, f"{URL}/run"), lambda: ft_ckpt.convert(small, f"{URL}/out")]
    saves += [lambda: CheckpointSaver(None, f"{URL}/run", staging=tmp_path / "stage")]
    saves += [lambda: CheckpointSaver().save(models.build("llama", 0), f"{URL}/final")]
    saves += [lambda: ft_ckpt.save({"a": torch.zeros(2)}, f"{URL}/state.safetensors")]
    for save in saves:
        with pytest.raises(CheckpointError, match=r"no conditional writes; save to a disk and `ft-ckpt sync`"):
            save()
    assert hub.operations == []


# The store


def test_the_store_reads_lists_and_writes_marks(hub):
    hub.buckets["user/ckpts"] = Bucket(private=True)
    store = open_place(f"{URL}/top").folder
    data = os.urandom(700_000)
    names = ["a", "big.bin", "sub/b", "sub/deep/c", "sübß/d e"]
    for name in names:
        hub.put_file("user/ckpts", f"top/{name}", data if name == "big.bin" else name.encode())
    for name in ("topper/x", "to", "top"):  # the Hub lists what begins so
        hub.put_file("user/ckpts", name, b"other")
    assert [each.name for each in store.list()] == sorted(names)
    assert [each.name for each in store.list("sub")] == ["sub/b", "sub/deep/c"]
    found = store.list_folder()
    assert ([each.name for each in found.folders], [each.name for each in found.objects]) == (
        ["sub", "sübß"],
        ["a", "big.bin"],
    )
    assert found.folders[0].identity == store.within("sub").identity
    assert (store.list("none"), store.list_folder("none").exists) == ([], False)
    assert store.read("big.bin") == data
    assert store.read("big.bin", 300_000, 300_010) == data[300_000:300_010]
    assert store.read("sübß/d e") == "sübß/d e".encode()
    with pytest.raises(CorruptError, match="big"):
        store.read("big.bin", 699_999, 700_001)
    with pytest.raises(MissingError):
        store.read("none")
    file = store.open("a")
    store.write("a", b"newer")
    with pytest.raises(CorruptError, match="overwritten"):
        file.check()
    store.delete(["a", "none", "sub/b"])
    assert [each.name for each in store.list()] == ["big.bin", "sub/deep/c", "sübß/d e"]
    for call in (lambda: store.write("x", b"", create_only=True), lambda: store.create("x", 1)):
        with pytest.raises(ConfigError, match="conditional"):
            call()
    hub.faults = [Fault("GET /cdn/", 403, times=99)]
    with pytest.raises(UnreadableError, match="403"):
        store.read("big.bin")


def test_the_manifest_names_the_contents_of_the_bucket(hub, small):
    copy(small, GOAL)
    text = json.loads(hub.bytes_of("user/ckpts")[AT + MANIFEST_NAME])
    files = hub.buckets["user/ckpts"].files
    assert {file["path"]: file["etag"] for file in text["files"]} == {
        path.removeprefix(AT): file.hash for path, file in files.items() if not path.endswith(MANIFEST_NAME)
    }
