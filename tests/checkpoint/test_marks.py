"""Pins that outlive everything, and leases that are worth as much as the process that holds
them.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from faults import Disk, in_child, try_worlds
from small_checkpoints import contents, save

from ft_ckpt.checkpoint.checks import verify
from ft_ckpt.checkpoint.leases import (
    SAVING,
    hold_lease,
    lease_reasons,
    leases,
    marks,
    may_live,
    pin,
    pin_reason,
    put_mark,
    read_mark,
    reader_leases,
    unpin,
)
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import NoSpaceError, NotACheckpointError, TargetError
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.local import LocalStore, locks
from ft_ckpt.storage.places import open_place

HOLD = """
import sys, time
from ft_ckpt import open_place
from ft_ckpt.checkpoint.leases.reader_leases import hold_lease
with hold_lease(open_place(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path / "checkpoint-1", step=1, shards=2)
    return tmp_path / "checkpoint-1"


@pytest.fixture
def holder(checkpoint):
    """Another process that reads the checkpoint until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, checkpoint], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_pin_and_unpin(checkpoint, monkeypatch):
    monkeypatch.setenv("LOGNAME", "ann")
    before = contents(checkpoint)
    assert pin_reason(open_place(checkpoint)) is None
    pin(open_place(checkpoint), "the paper's é")
    assert pin_reason(open_place(checkpoint)) == "pinned by ann: the paper's é"
    assert json.loads((checkpoint / marks.PIN).read_text())["time"].endswith("+00:00")
    assert hidden(checkpoint) == [marks.PIN]
    assert verify(checkpoint).ok
    pin(open_place(checkpoint))
    assert pin_reason(open_place(checkpoint)) == "pinned by ann"
    assert (unpin(open_place(checkpoint)), unpin(open_place(checkpoint))) == (True, False)
    assert contents(checkpoint) == before


def test_a_pin_that_is_cut_short_is_a_pin(checkpoint):
    (checkpoint / marks.PIN).write_text('{"reas')
    assert pin_reason(open_place(checkpoint)) == "pinned"


def test_only_checkpoints_are_pinned(tmp_path):
    with pytest.raises(NotACheckpointError, match="an empty folder; no save was completed there"):
        pin(open_place(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_goes_while_it_is_pinned(checkpoint, monkeypatch):
    """Whoever deletes it may have looked for pins before there was one: then there must be none."""
    write = LocalStore.write
    monkeypatch.setattr(
        LocalStore, "write", lambda *what: (write(*what), (checkpoint / MANIFEST_NAME).unlink())
    )
    with pytest.raises(NotACheckpointError):
        pin(open_place(checkpoint))
    assert hidden(checkpoint) == []


@pytest.mark.parametrize("shards", [1, 3])
def test_pins_outlive_an_overwrite(checkpoint, shards):
    pin(open_place(checkpoint), "keep me")
    save(checkpoint, step=1, shards=shards)
    assert "keep me" in pin_reason(open_place(checkpoint))
    assert verify(checkpoint).ok


def test_pinning_is_all_or_nothing(checkpoint):
    def trial(world):
        unpin(open_place(checkpoint))
        world.run(pin, open_place(checkpoint), "why")
        assert (world.is_met and pin_reason(open_place(checkpoint)) is None) or pin_reason(
            open_place(checkpoint)
        ).endswith(": why")

    assert try_worlds(trial, Disk("killed")).calls >= 2
    pin(open_place(checkpoint), "why")
    assert hidden(checkpoint) == [marks.PIN]  # what a dead one drafted is no more


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize("call", ["fsync", "move", "unlink"])
def test_a_pin_that_cannot_be_written(checkpoint, monkeypatch, code, call):
    def refuse(*_args, **_more):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(local_disk, call, refuse)
        with pytest.raises(NoSpaceError if code == errno.ENOSPC else TargetError) as caught:
            pin(open_place(checkpoint), "why")
        assert caught.value.errno == code
    assert pin_reason(open_place(checkpoint)) is None
    assert hidden(checkpoint) == []


def test_a_draft_is_not_written_through_a_link(checkpoint, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (checkpoint / ".ft_ckpt-ft_ckpt-pin.draft").symlink_to(tmp_path / "victim")
    pin(open_place(checkpoint))
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_lease_lasts_as_long_as_its_block(checkpoint):
    with hold_lease(open_place(checkpoint)), hold_lease(open_place(checkpoint)):
        assert (
            lease_reasons(checkpoint)
            == (f"in use by process {os.getpid()} on {os.uname().nodename}",) * 2
        )
        assert verify(checkpoint).ok
    assert (lease_reasons(checkpoint), hidden(checkpoint)) == ((), [])
    with pytest.raises(KeyError), hold_lease(open_place(checkpoint)):
        raise KeyError
    assert hidden(checkpoint) == []


def test_a_dead_holder_holds_nothing(checkpoint, holder):
    assert lease_reasons(checkpoint) == (
        f"in use by process {holder.pid} on {os.uname().nodename}",
    )
    holder.send_signal(signal.SIGKILL)
    while holder.poll() is None or lease_reasons(checkpoint):
        assert holder.returncode is None, "dead and buried, and its lease is believed"
        time.sleep(0.01)
    assert len(hidden(checkpoint)) == 1
    with hold_lease(open_place(checkpoint)):  # who comes next cleans up
        assert len(hidden(checkpoint)) == 1
    assert hidden(checkpoint) == []


def test_a_stopped_holder_holds(checkpoint, holder):
    """A process that was put to sleep will go on reading, however long ago it was heard of."""
    holder.send_signal(signal.SIGSTOP)
    age(checkpoint, 1e6)
    assert len(lease_reasons(checkpoint)) == 1


@pytest.mark.parametrize("change", [{"machine": "another"}, {"machine": None}])
def test_holders_whose_locks_are_not_seen(checkpoint, monkeypatch, change):
    """Of another machine, or on a file system without locks: what counts is when it was last heard
    of, by clocks that may be ten minutes apart.
    """
    monkeypatch.setattr(reader_leases, "lock_descriptor", lambda handle: False)
    with hold_lease(open_place(checkpoint)):
        rewrite(checkpoint, **change)
        assert len(lease_reasons(checkpoint)) == 1
        for apart in (-600, 600, 1200):
            age(checkpoint, apart)
            assert len(lease_reasons(checkpoint)) == 1, apart
        age(checkpoint, 1801)
        assert lease_reasons(checkpoint) == ()


def test_a_lease_that_cannot_be_looked_at_is_believed(checkpoint, monkeypatch):
    """Its server does not answer just now."""

    def refuse(path):
        raise OSError(errno.EIO, "Input/output error")

    with hold_lease(open_place(checkpoint)):
        rewrite(checkpoint, machine="another")
        monkeypatch.setattr(locks, "_age_seconds", refuse)
        assert len(lease_reasons(checkpoint)) == 1


def test_a_lease_goes_where_its_checkpoint_goes(checkpoint, tmp_path):
    """A save moves it for an instant; if it is let go just then, what is moved back holds
    nothing.
    """
    with hold_lease(open_place(checkpoint)):
        checkpoint.rename(tmp_path / "aside")
        assert len(lease_reasons(tmp_path / "aside")) == 1
    (tmp_path / "aside").rename(checkpoint)
    assert (len(hidden(checkpoint)), lease_reasons(checkpoint)) == (1, ())


def test_the_holder_is_heard_of(checkpoint, monkeypatch):
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.01)
    with hold_lease(open_place(checkpoint)):
        age(checkpoint, 1e6)
        deadline = time.monotonic() + 20
        while lease_of(checkpoint).stat().st_mtime < time.time() - 1e5:
            assert time.monotonic() < deadline, "nobody has renewed the lease"
            time.sleep(0.01)


def test_leases_where_there_is_nothing_to_hold(tmp_path, checkpoint):
    with hold_lease(open_place(tmp_path)), hold_lease(open_place(tmp_path / "absent")):
        assert hidden(tmp_path) == []
    assert lease_reasons(tmp_path / "absent") == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write")
def test_a_lease_on_what_cannot_be_written(checkpoint):
    """Reading needs no right to write; what is another's to delete is another's to keep."""

    def read():
        os.setuid(65534)
        with hold_lease(open_place(checkpoint)):
            assert hidden(checkpoint) == []

    for parent in checkpoint.parents:
        if parent.name.startswith(("test_", "popen-", "pytest-")):  # made for the owner alone
            parent.chmod(0o755)
    assert in_child(read) == ""


def lease_of(checkpoint):
    (file,) = checkpoint.glob(".ft_ckpt-lease-*")
    return file


def rewrite(checkpoint, **change):
    file = lease_of(checkpoint)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def age(checkpoint, seconds):
    os.utime(lease_of(checkpoint), (time.time() - seconds,) * 2)


# Marks in buckets


def test_a_mark_counts_no_longer_than_its_process_lives(tmp_path):
    """That can be told on its machine alone, and in its container: a number may be another
    process's elsewhere.
    """
    store = LocalStore(tmp_path)

    def is_alive(**facts):
        store.write(SAVING, json.dumps({**read_mark(store, SAVING), **facts}).encode())
        return may_live(store, store.stat(SAVING), time.time())

    put_mark(store, SAVING)
    assert is_alive()
    assert not is_alive(started="1")  # the number is another process's by now
    assert in_child(lambda: put_mark(store, SAVING)) == ""
    for elsewhere in ("host", "machine", "namespace"):
        gone = read_mark(store, SAVING)
        assert is_alive(**{elsewhere: "another"})
        assert not is_alive(**gone)
    for damaged in (None, "1", -1, 0, 10**30, True):
        is_alive(pid=damaged)
