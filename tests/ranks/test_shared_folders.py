"""How ranks share files in a folder, with ranks that are threads."""

import errno
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from ft_ckpt.errors import RankError
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving import (
    FolderSharing,
    SharedFolders,
    folder_sharing as shared_folders,
    try_sharing,
)
from ft_ckpt.saving.planning import Mode
from ft_ckpt.storage.io import LocalWriting
from ft_ckpt.storage.local import LocalStore

PAGE = 4096
RANK = threading.local()  # the number of the rank that a thread is


def on_threads(count: int, action: Callable[[Ranks], FolderSharing]) -> list[Future[FolderSharing]]:
    """The outcome of `action` on each rank."""
    store = HashStore()

    def run(rank: int) -> FolderSharing:
        RANK.number = rank
        return action(Ranks(rank, count, store, timeout_seconds=30))

    with ThreadPoolExecutor(count) as pool:
        return [pool.submit(run, rank) for rank in range(count)]


def sharing(folder, count=2):
    outcomes = on_threads(count, lambda ranks: try_sharing(LocalStore(folder), ranks))
    results = [outcome.result() for outcome in outcomes]
    assert len({(each.mode, each.reason, each.clients) for each in results}) == 1
    assert list(folder.iterdir()) == []
    return results[0]


@pytest.fixture
def clients_of(monkeypatch):
    """Call it with a kind of file system: each rank is then another client of it."""
    real = shared_folders._view_of

    def mount(kind, source="server:/data"):
        def view(*arguments):
            mount = {"point": "/mnt", "kind": kind, "source": source}
            return {**real(*arguments), "client": f"client {RANK.number}", "mount": mount}

        monkeypatch.setattr(shared_folders, "_view_of", view)

    return mount


def test_a_rank_that_cannot_look_is_named_on_the_other(tmp_path, monkeypatch):
    read = LocalStore.read

    def refuse(store: LocalStore, name: str) -> bytes:
        if RANK.number:
            raise PermissionError(13, "not for you", name)
        return read(store, name)

    monkeypatch.setattr(LocalStore, "read", refuse)
    first, second = on_threads(2, lambda ranks: try_sharing(LocalStore(tmp_path), ranks))
    with pytest.raises(PermissionError, match="not for you"):
        second.result()
    with pytest.raises(RankError, match=r"rank 1.*not for you"):
        first.result()
    assert list(tmp_path.iterdir()) == []


def test_on_a_disk_of_this_machine_nothing_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folders, "try_ranges", None)
    local = sharing(tmp_path, count=3)
    assert (local.mode, local.clients) == (Mode.SHARED, 1)
    assert [view["sees"] for view in local.views] == [True] * 3


def test_kinds_that_promise_no_ranges_are_not_tried(tmp_path, monkeypatch, clients_of):
    monkeypatch.setattr(shared_folders, "try_ranges", None)
    for kind in ("nfs4", "nfs", "cifs"):
        clients_of(kind)
        assert sharing(tmp_path).mode is Mode.SPREAD
        assert sharing(tmp_path).clients == 2
    clients_of("fuse", "mfs#127.0.0.1:9421")
    assert sharing(tmp_path).mode is Mode.SPREAD
    clients_of("fuse.s3fs")
    assert sharing(tmp_path).mode is Mode.MAIN


@pytest.mark.parametrize("count", [2, 5])
def test_others_are_tried(tmp_path, clients_of, count):
    clients_of("fuse.glusterfs")
    tried = sharing(tmp_path, count)
    assert (tried.mode, tried.clients) == (Mode.SHARED, count)


def write_pages(writing, offset, memory, real):
    """Write whole pages, as a client does whose cache has what was there before."""
    start, end = offset - offset % PAGE, offset + len(memory)
    end += -end % PAGE
    pages = bytearray(min(end, writing.size_bytes) - start)
    pages[offset - start : offset - start + len(memory)] = memory
    real(writing, start, memoryview(pages))


def fail(_writing, _offset, _memory, _real):
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (write_pages, r"rank \d: bytes .* of a file are not those of rank \d"),
        (fail, "rank 1: Input"),
    ],
)
def test_where_ranges_are_lost_each_file_has_one_writer(
    tmp_path, monkeypatch, clients_of, write, reason
):
    clients_of("fuse.other")
    real = LocalWriting.write

    def write_on_rank_1(writing, offset, memory):
        # its blocks are written by threads of their own
        if writing.name.startswith("file-") and writing.of_rank_1:
            write(writing, offset, memory, real)
        else:
            real(writing, offset, memory)

    share = LocalStore.share

    def share_and_mark(store, name, size_bytes):
        writing = share(store, name, size_bytes)
        writing.of_rank_1 = RANK.number == 1
        return writing

    monkeypatch.setattr(LocalWriting, "write", write_on_rank_1)
    monkeypatch.setattr(LocalStore, "share", share_and_mark)
    tried = sharing(tmp_path)
    assert tried.mode is Mode.SPREAD
    assert re.match(reason, tried.reason), tried.reason


def test_what_was_found_is_kept_until_it_is_forgotten(tmp_path):
    folders, store = [SharedFolders(), SharedFolders()], LocalStore(tmp_path)

    def look_twice(ranks):
        shared = folders[ranks.rank]
        assert shared.last_mode(store) is Mode.SHARED
        first = shared.sharing_of(store, ranks)
        assert shared.sharing_of(store, ranks) is first
        shared.forget()
        assert shared.sharing_of(store, ranks) is not first
        return first

    for outcome in on_threads(2, look_twice):
        assert outcome.result().mode is Mode.SHARED
    alone = SharedFolders().sharing_of(store, Ranks(0, 1))
    assert (alone.mode, alone.views) == (Mode.SHARED, ())
