"""Contract tests of every store: inherit `StoreContract` and define a fixture `store`."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    IncompleteError,
    MissingError,
    NameTakenError,
)
from ft_ckpt.storage import Store

ODD_NAMES = ["sp ace.txt", "ünïcode/ß.bin", "per%20cent", "plus+and&more=1", ".hidden", "[x]*?"]
ODD_NAMES += ["a" * 200, "deep/" * 20 + "x"]
BAD_NAMES = ["", ".", "..", "../up", "a/../b", "/absolute", "a//b", "a/", "nul\0"]


def put(store: Store, name: str, data: bytes, pieces: int = 3) -> None:
    """Write an object in a few pieces, the last first."""
    writing = store.create(name, len(data))
    step = max(1, -(-len(data) // pieces))
    for start in reversed(range(0, len(data), step)):
        writing.write(start, memoryview(data)[start : start + step])
    writing.finish()


def names(store: Store, prefix: str = "") -> list[str]:
    return [stored.name for stored in store.list(prefix)]


class StoreContract:
    def test_small_objects_come_back(self, store: Store) -> None:
        store.write("a/b.json", b"one")
        assert store.read("a/b.json") == b"one"
        store.write("a/b.json", b"two, which is longer")
        assert store.read("a/b.json") == b"two, which is longer"

    def test_ranges(self, store: Store) -> None:
        data = os.urandom(10_000)
        put(store, "data", data)
        assert store.read("data", 10, 20) == data[10:20]
        assert store.read("data", 9_990) == data[9_990:]
        assert store.read("data", 5, 5) == b""
        with pytest.raises(CorruptError, match=r"data.*10000"):
            store.read("data", 9_990, 10_010)

    def test_open_reads_ranges_into_memory_and_knows_its_version(self, store: Store) -> None:
        data = os.urandom(100_000)
        put(store, "data", data)
        with contextlib.closing(store.open("data")) as file:
            assert (file.name, file.size_bytes) == ("data", len(data))
            stored = store.stat("data")
            assert stored is not None
            assert file.version == stored.version
            memory = bytearray(50_000)

            def read_range(offset: int) -> None:
                file.read_into(memoryview(memory)[offset : offset + 5_000], 20_000 + offset)

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(read_range, range(0, 50_000, 5_000)))
            assert memory == data[20_000:70_000]
            mapped = file.map()
            assert (mapped is not None) == file.can_map
            assert mapped is None or bytes(mapped.memory) == data
            file.check()
            with pytest.raises(CorruptError, match="data"):
                file.read_into(memoryview(bytearray(11)), len(data) - 10)

    def test_a_reader_never_gets_the_bytes_of_a_later_object(self, store: Store) -> None:
        put(store, "data", b"old" * 1000)
        with contextlib.closing(store.open("data")) as file:
            put(store, "data", b"NEW" * 1000)
            memory = bytearray(3000)
            with contextlib.suppress(CorruptError):
                file.read_into(memoryview(memory))
                assert memory == b"old" * 1000

    def test_versions_differ(self, store: Store) -> None:
        versions: set[str] = set()
        for number in range(3):
            store.write("a", f"number {number}, {'longer' * number}".encode())
            versions.update(stored.version for stored in store.list())
        assert len(versions) == 3

    def test_parallel_writes_in_any_order(self, store: Store) -> None:
        data = os.urandom((1 << 20) + 17)
        writing = store.create("a/large", len(data))
        assert store.stat("a/large") is None
        offsets = list(range(0, len(data), 100_000))
        offsets = offsets[1::2] + offsets[::2]

        def write_range(offset: int) -> None:
            writing.write(offset, memoryview(data)[offset : offset + 100_000])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write_range, offsets))
        stored = writing.finish()
        assert (stored.name, stored.size_bytes) == ("a/large", len(data))
        assert store.stat("a/large") == stored
        assert store.read("a/large") == data

    def test_memory_may_be_reused_after_a_write(self, store: Store) -> None:
        writing, memory = store.create("a", 20), bytearray(10)
        for value, offset in ((2, 10), (1, 0)):
            memory[:] = bytes([value]) * 10
            writing.write(offset, memoryview(memory))
        writing.finish()
        assert store.read("a") == bytes([1]) * 10 + bytes([2]) * 10

    def test_an_object_that_one_process_writes_where_several_may(self, store: Store) -> None:
        data = os.urandom(1000)
        store.allocate("folder/a", len(data))
        writing = store.share("folder/a", len(data))
        writing.write(500, memoryview(data)[500:])
        writing.write(0, memoryview(data)[:500])
        writing.finish()
        assert names(store) == ["folder/a"]
        assert store.read("folder/a") == data

    def test_abandoned_writes_leave_nothing(self, store: Store) -> None:
        store.write("kept", b"before")
        for name in ("kept", "new/one"):
            writing = store.create(name, 1000)
            writing.write(0, memoryview(bytes(500)))
            writing.abandon()
            writing.abandon()
        assert names(store) == ["kept"]
        assert store.read("kept") == b"before"

    def test_nothing_is_finished_that_is_not_whole(self, store: Store) -> None:
        writing = store.create("a", 1000)
        writing.write(0, memoryview(bytes(500)))
        with pytest.raises(IncompleteError, match="a: 500 of 1000 bytes"):
            writing.finish()
        assert names(store) == []
        writing = store.create("a", 1000)
        with pytest.raises(IncompleteError, match="a"):
            writing.write(900, memoryview(bytes(101)))
        writing.abandon()

    def test_empty_objects(self, store: Store) -> None:
        store.write("small", b"")
        store.create("large", 0).finish()
        assert [stored.size_bytes for stored in store.list()] == [0, 0]
        assert store.read("small") == store.read("large") == b""
        with contextlib.closing(store.open("large")) as file:
            file.read_into(memoryview(bytearray(0)))
            file.check()

    def test_create_only_has_one_winner(self, store: Store) -> None:
        start, winners = threading.Barrier(8), []

        def race(number: int) -> None:
            start.wait()
            with contextlib.suppress(NameTakenError):
                store.write("lock/one", f"number {number}".encode(), create_only=True)
                winners.append(number)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(race, range(8)))
        assert len(winners) == 1
        assert store.read("lock/one") == f"number {winners[0]}".encode()
        assert names(store) == ["lock/one"]

    def test_list_and_folders(self, store: Store) -> None:
        below = ["run/checkpoint-1/a", "run/checkpoint-1/sub/b", "run/checkpoint-10/a", "run/file"]
        for name in ("top", *below, "runner/x"):
            store.write(name, name.encode())
        assert names(store, "run") == below
        assert {stored.name: stored.size_bytes for stored in store.list()}["runner/x"] == 8
        run = store.list_folder("run")
        assert [folder.name for folder in run.folders] == ["checkpoint-1", "checkpoint-10"]
        assert [stored.name for stored in run.objects] == ["run/file"]
        top = store.list_folder()
        assert [folder.name for folder in top.folders] == ["run", "runner"]
        assert [stored.name for stored in top.objects] == ["top"]
        assert top.folders[0].identity == store.within("run").identity
        absent = store.list_folder("absent")
        assert (absent.exists, absent.folders, absent.objects) == (False, (), ())
        assert names(store, "absent") == []

    def test_within(self, store: Store) -> None:
        store.write("run/checkpoint-1/a", b"x")
        below = store.within("run").within("checkpoint-1")
        below.write("sub/b", b"y")
        put(below, "c", b"large")
        assert names(below) == ["a", "c", "sub/b"]
        assert names(store) == [
            "run/checkpoint-1/a",
            "run/checkpoint-1/c",
            "run/checkpoint-1/sub/b",
        ]
        assert below.copy("a", "d") in (True, False)
        below.delete(["a", "c", "d", "sub/b"])
        assert names(store) == []
        assert below.where("a").endswith("/run/checkpoint-1/a")
        with pytest.raises(MissingError, match="run/checkpoint-1/a"):
            below.read("a")
        for outside in ("..", "run/../../x", "/x", ""):
            with pytest.raises(ConfigError, match="invalid object name"):
                store.within(outside)

    def test_stat(self, store: Store) -> None:
        store.write("a/b", b"12345")
        stored = store.stat("a/b")
        assert stored is not None
        assert (stored.name, stored.size_bytes) == ("a/b", 5)
        assert stored in store.list()
        assert store.stat("a") is None
        assert store.stat("a/c") is None

    def test_copy(self, store: Store) -> None:
        put(store, "a", b"bytes" * 100)
        store.write("b/c", b"to be replaced")
        if store.copy("a", "b/c"):
            store.delete(["a"])
            assert store.read("b/c") == b"bytes" * 100
        with pytest.raises(MissingError, match="absent"):
            store.copy("absent", "d")

    def test_delete_many(self, store: Store) -> None:
        for number in range(30):
            store.write(f"many/{number}", b"x")
        store.write("other", b"x")
        store.delete([f"many/{number}" for number in range(40)])
        store.delete([])
        assert names(store) == ["other"]
        assert store.list_folder().folders == ()

    @pytest.mark.parametrize("call", ["read", "open", "copy"])
    def test_missing_names(self, store: Store, call: str) -> None:
        store.write("there", b"x")
        for name in ("absent", "no/such/folder"):
            arguments = [name, "other"] if call == "copy" else [name]
            with pytest.raises(MissingError, match=name) as caught:
                getattr(store, call)(*arguments)
            assert isinstance(caught.value, FileNotFoundError)
        assert store.stat("absent") is None

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_names(self, store: Store, name: str) -> None:
        data = name.encode()
        put(store, name, data)
        assert names(store) == [name]
        assert store.read(name) == data
        store.delete([name])
        assert names(store) == []

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_names_that_are_none(self, store: Store, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.read(name),
            lambda: store.open(name),
            lambda: store.stat(name),
            lambda: store.write(name, b""),
            lambda: store.create(name, 1),
            lambda: store.delete([name]),
        ]
        for call in calls:
            with pytest.raises(ConfigError):
                call()

    def test_errors_are_ours(self, store: Store) -> None:
        """An object is used as a folder, a folder as an object: no other error is raised."""
        store.write("a/b", b"x")
        calls: list[Callable[[], object]] = [
            lambda: store.read("a"),
            lambda: store.write("a", b""),
            lambda: store.write("a/b/c", b""),
            lambda: store.stat("a/b/c"),
            lambda: store.read("a/b/c"),
            lambda: store.list("a/b"),
            lambda: store.create("a/b/d", 0).finish(),
            lambda: store.copy("a", "e"),
        ]
        for call in calls:
            with contextlib.suppress(CheckpointError):
                call()
        assert store.read("a/b") == b"x"

    def test_free_bytes(self, store: Store) -> None:
        free = store.free_bytes()
        assert free is None or free > 0
