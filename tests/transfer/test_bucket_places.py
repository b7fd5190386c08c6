"""Pushes to buckets, and pulls from them into a folder or into the cache."""

import json
import os
import subprocess
import sys
import threading
import time

import models
import pytest
from buckets import new_bucket
from s3_server import FAST
from small_checkpoints import contents, save, save_with_state
from test_copies import FROZEN, save_large

from ft_ckpt import CheckpointSaver, open_place, pull, push, verify
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.leases import pin
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.cli import main
from ft_ckpt.errors import ConfigError, CorruptError, NameTakenError, NotACheckpointError
from ft_ckpt.extensions.transfer.copies import pull_cache
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache's folder."""
    monkeypatch.setenv("FT_CKPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def stored(tmp_path):
    """The folder of a run in a bucket, with two checkpoints that share a large file."""
    bucket = new_bucket()
    for step in (1, 2):
        save_large(tmp_path / "run" / f"checkpoint-{step}", step)
        push(tmp_path / "run" / f"checkpoint-{step}", Place(bucket, f"checkpoint-{step}"))
    return bucket


def test_the_state_stays_here_unless_it_is_asked_for(tmp_path):
    save_with_state(tmp_path / "checkpoint-7", 7)
    bucket = new_bucket()
    report = push(tmp_path / "checkpoint-7", Place(bucket, "weights"))
    assert (report.is_new, report.url, report.repo_id) == (True, bucket.where("weights"), "")
    assert "state/" in report.notes[0]
    assert {part.kind for part in read_manifest(Place(bucket, "weights")).parts} == {"model"}
    assert verify(Place(bucket, "weights")).ok
    assert not push(tmp_path / "checkpoint-7", Place(bucket, "weights")).is_new
    push(tmp_path / "checkpoint-7", Place(bucket, "whole"), state=True)
    assert pull(Place(bucket, "whole"), tmp_path / "back").verified
    assert contents(tmp_path / "back") == contents(tmp_path / "checkpoint-7")
    pending = push(tmp_path / "checkpoint-7", Place(bucket, "later"), background=True)
    assert pending.result(30).is_new


def test_what_only_repositories_have_is_refused(tmp_path):
    save(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="revision, base_id: only for repositories on the Hub"):
        push(tmp_path / "checkpoint", Place(new_bucket(), "a"), revision="main", base_id="org/base")
    with pytest.raises(ConfigError, match="token"):
        pull(Place(new_bucket(), "a"), token="secret")
    with pytest.raises(ConfigError, match="no folder to pull it into"):
        pull("hf://user/name")
    with pytest.raises(ConfigError, match="s4://"):
        push(tmp_path / "checkpoint", "s4://bucket/a")


def test_a_pull_into_the_cache_comes_once(stored, cache):
    first = pull(Place(stored, "checkpoint-1"))
    assert first.path.parent == cache
    assert first.path.name.startswith("checkpoint-1-")
    assert verify(first.path).ok
    second = pull(Place(stored, "checkpoint-2"))
    assert (first.path / FROZEN).samefile(second.path / FROZEN), "a file that both have comes once"
    before = (first.path / "notes" / "own.bin").stat().st_mtime_ns
    assert pull(Place(stored, "checkpoint-1")).path == first.path
    assert (first.path / "notes" / "own.bin").stat().st_mtime_ns == before
    content = (first.path / "notes" / "own.bin").read_bytes()
    (first.path / "notes" / "own.bin").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert pull(Place(stored, "checkpoint-1")).verified
    assert (first.path / "notes" / "own.bin").read_bytes() == content
    (first.path / "config.json").unlink()
    assert pull(Place(stored, "checkpoint-1")).path == first.path
    assert verify(first.path).ok


def test_damage_is_never_pulled(stored, cache):
    content = bytearray(stored.read(f"checkpoint-1/{FROZEN}"))
    content[5] ^= 1
    stored.write(f"checkpoint-1/{FROZEN}", bytes(content))
    with pytest.raises(CorruptError, match=FROZEN):
        pull(Place(stored, "checkpoint-1"))
    assert LocalStore(cache).list_folder().folders == ()
    with pytest.raises(NotACheckpointError):
        pull(Place(stored, "nothing"))


def test_a_folder_that_is_taken_is_left(stored, tmp_path):
    pull(Place(stored, "checkpoint-1"), tmp_path / "folder")
    with pytest.raises(NameTakenError):
        pull(Place(stored, "checkpoint-2"), tmp_path / "folder")
    pull(Place(stored, "checkpoint-2"), tmp_path / "folder", overwrite=True)
    assert read_manifest(open_place(tmp_path / "folder")).step == 2


def test_the_cache_keeps_to_its_size_and_to_what_is_used(cache, tmp_path, monkeypatch):
    bucket = new_bucket()
    for step in range(5):
        save_large(tmp_path / "run" / f"checkpoint-{step}", step, fill=bytes([step]))
        push(tmp_path / "run" / f"checkpoint-{step}", Place(bucket, f"checkpoint-{step}"))
    monkeypatch.setenv("FT_CKPT_CACHE_SIZE", "35MB")  # three of them
    pulled = [pull(Place(bucket, f"checkpoint-{step}")).path for step in range(4)]
    assert all(path.exists() for path in pulled), "all were used within the hour"
    for age, path in enumerate(reversed(pulled)):
        os.utime(path / ".ft_ckpt-used", (time.time() - 7200 - age,) * 2)
    pin(open_place(pulled[0]))
    with open_checkpoint(open_place(pulled[1])):
        last = pull(Place(bucket, "checkpoint-4")).path
    assert [path.exists() for path in (*pulled, last)] == [True, True, False, False, True]
    assert verify(last).ok


def test_of_several_that_pull_the_same_one_fetches(stored, cache, monkeypatch):
    sent = []
    real = pull_cache.copy_open

    def slow(held, goal, *args, **more):
        report = real(held, goal, *args, **more)
        time.sleep(0.3)
        sent.append(report.sent_bytes)
        return report

    monkeypatch.setattr(pull_cache, "copy_open", slow)
    threads = [
        threading.Thread(target=pull, args=(Place(stored, "checkpoint-1"),)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sent) == 4
    assert sorted(sent)[:3] == [0, 0, 0]


def test_what_is_in_a_bucket_goes_to_the_hub_through_the_cache(stored, cache, monkeypatch):
    from ft_ckpt.extensions.transfer.hub import repositories as hub

    seen = []
    monkeypatch.setattr(
        hub.HubEndpoint, "push", lambda _, checkpoint, _options: seen.append(checkpoint.path)
    )
    push(Place(stored, "checkpoint-1"), "user/name")
    assert seen[0].parent == cache


def command(monkeypatch, *words):
    """Run `ft-ckpt`; its exit code."""
    monkeypatch.setattr(sys, "argv", ["ft-ckpt", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def test_commands_copy_push_and_pull(stored, cache, tmp_path, monkeypatch, capsys):
    url, run = stored.where("checkpoint-1"), tmp_path / "run"
    assert command(monkeypatch, "cp", url, f"{tmp_path / 'there'}/") == 0
    assert (
        f"{url} -> {tmp_path / 'there' / 'checkpoint-1'}: 4 files, 11.5 MB"
        in capsys.readouterr().out
    )
    assert (
        command(
            monkeypatch, "cp", run / "checkpoint-2", tmp_path / "there" / "checkpoint-2", "--json"
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["reused"] == [FROZEN]
    assert (
        command(monkeypatch, "cp", run / "checkpoint-2", tmp_path / "there" / "checkpoint-1") == 2
    )
    assert "--force" in capsys.readouterr().err
    assert command(monkeypatch, "push", run / "checkpoint-2", url) == 2
    assert command(monkeypatch, "push", run / "checkpoint-1", url) == 0
    assert "all of it was there" in capsys.readouterr().out
    assert command(monkeypatch, "pull", url) == 0
    assert verify(capsys.readouterr().out.strip()).ok


def test_a_push_after_a_save_goes_by_the_clients_of_the_saver(s3, monkeypatch, tmp_path):
    """Keys that the options alone know open the bucket that is saved to, and the one that is pushed
    to.
    """
    variables = s3.environment()
    for name in variables:
        monkeypatch.delenv(name)
    options = {
        **FAST,
        **{name.lower(): value for name, value in variables.items() if name != "AWS_ALLOW_HTTP"},
    }
    options["client_options"] = {"allow_http": True}
    with CheckpointSaver(None, "s3://bucket/run", store_options=options) as saver:
        report = saver.save(models.build("wide"), step=1, push_to_hub="s3://bucket/shipped")
        pushed = report.push.result()
    assert (pushed.url, pushed.is_new) == ("s3://bucket/shipped", True)
    assert verify(open_place("s3://bucket/shipped", **options)).ok


def test_the_cache_needs_no_home_if_its_folder_is_given(cache, monkeypatch):
    # as it is without a home
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", "~/.cache/huggingface")
    assert pull_cache.cache_folder() == cache
    monkeypatch.delenv("FT_CKPT_CACHE")
    with pytest.raises(
        ConfigError, match="no home folder; set FT_CKPT_CACHE or HF_HOME to a folder"
    ):
        pull_cache.cache_folder()


def test_the_cache_is_below_hf_home(tmp_path):
    """An environment of its own, since huggingface_hub reads HF_HOME when it is imported."""
    module = "ft_ckpt.extensions.transfer.copies.pull_cache"
    code = f"from {module} import cache_folder; print(cache_folder())"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub")}
    environment.pop("FT_CKPT_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{tmp_path / 'hub' / 'ft_ckpt'}\n"
