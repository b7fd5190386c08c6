"""Wrappers of a working store: requests are counted, refused, stopped or ordered; objects age.

They are passed in, instead of patching calls.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ft_ckpt.errors import CorruptError, MissingError, TargetError, UnreadableError
from ft_ckpt.saving import folder_sharing as shared_folders
from ft_ckpt.storage import FolderListing, Readable, RemoteStore, Store, Stored
from ft_ckpt.storage.local import LocalStore

READS = ("read", "open", "list", "list_folder", "stat")
WRITES = ("write", "create", "copy", "delete")
Hook = Callable[[str, str], object]


class Wrapped(RemoteStore):
    """A store that delegates to `inner`; its subclasses change one thing each."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Stopped(BaseException):
    """Ends a simulated process at a request: nothing catches it."""


class Watch:
    """A hook for the requests to its stores, their names, and the simulated age of objects."""

    def __init__(self, hook: Hook = lambda call, where: None) -> None:
        self.hook = hook
        self.calls: list[str] = []
        # an object as it was listed -> seconds
        self.older: dict[tuple[str, str, float], float] = {}

    def store(self, inner: Store) -> "WatchedStore":
        return WatchedStore(inner, self)

    def age(self, inner: Store, seconds: float) -> None:
        """Make all present objects older by `seconds`."""
        for stored in inner.list():
            key = (inner.where(stored.name), stored.version, stored.modified)
            self.older[key] = self.older.get(key, 0) + seconds


class WatchedStore(Wrapped):
    """Calls the watch's hook before each request, with the name of the call and the URL."""

    def __init__(self, inner: Store, watch: Watch) -> None:
        super().__init__(inner)
        self.watch = watch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WatchedStore) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash(self.inner.url)

    def within(self, folder: str) -> "WatchedStore":
        return WatchedStore(self.inner.within(folder), self.watch)

    @property
    def parent(self) -> "WatchedStore | None":
        above = self.inner.parent
        return None if above is None else WatchedStore(above, self.watch)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        if name not in (*READS, *WRITES):
            return attribute

        def watched(*args: Any, **options: Any) -> Any:
            self.watch.calls.append(name)
            self.watch.hook(name, self._urls_of(args))
            return self._as_of_now(attribute(*args, **options))

        return watched

    def _urls_of(self, args: tuple[Any, ...]) -> str:
        """Return the URLs of the requested objects, or that of the store."""
        names = args[0] if args else []
        if isinstance(names, str):
            names = [names]
        return " ".join(self.inner.where(name) for name in names) or self.inner.url

    def _as_of_now(self, result: Any) -> Any:
        if isinstance(result, Stored):
            key = (self.inner.where(result.name), result.version, result.modified)
            return replace(result, modified=result.modified - self.watch.older.get(key, 0))
        if isinstance(result, list):
            return [self._as_of_now(stored) for stored in result]
        if isinstance(result, FolderListing):
            objects = tuple(self._as_of_now(stored) for stored in result.objects)
            return replace(result, objects=objects)
        if hasattr(result, "read_into"):
            return _WatchedFile(result, self.watch)
        return result


class _WatchedFile:
    def __init__(self, inner: Readable, watch: Watch) -> None:
        self.inner, self.watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        self.watch.hook("read_into", self.inner.where)
        self.inner.read_into(memory, start)


def refusing(calls: Iterable[str], part: str = "") -> Hook:
    """Return a hook that refuses `calls` for URLs that contain `part`, as without permission."""

    def hook(call: str, where: str) -> None:
        if call in calls and part in where:
            kind = TargetError if call in WRITES else UnreadableError
            raise kind(
                f"{where}: refused (permission denied); check credentials and network, or choose "
                "another place"
            )

    return hook


class TornStore(Wrapped):
    """Cuts objects with a prefix short: `read` returns half a range, files raise CorruptError."""

    def __init__(self, inner: Store, prefix: str = "") -> None:
        super().__init__(inner)
        self.prefix = prefix

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self.inner.read(name, start, stop)
        return data[: len(data) // 2] if name.startswith(self.prefix) else data

    def open(self, name: str) -> Readable:
        file = self.inner.open(name)
        if name.startswith(self.prefix):
            return _TornFile(file, name, file.size_bytes, file.version)
        return file


@dataclass
class _TornFile:
    inner: Readable
    name: str
    size_bytes: int
    version: str
    can_map = False

    @property
    def where(self) -> str:
        return self.inner.where

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        raise CorruptError(
            f"{self.name}: {len(memory) // 2} bytes came, expected {len(memory)}; it was cut short"
        )

    def map(self) -> None:
        return None

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self.inner.close()


@contextmanager
def unseen_files(prefix: str) -> Iterator[None]:
    """Hide objects with a prefix from `read` of local stores, as on a disk that is not shared."""
    real = LocalStore.read

    def read(store: LocalStore, name: str, *part: int) -> bytes:
        if name.startswith(prefix):
            raise MissingError(f"{name}: no such file")
        return real(store, name, *part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "read", read)
        yield


def all_interleavings(
    actors: Callable[[], "list[Callable[[Hook], object]]"], check: Callable[[], object]
) -> int:
    """Run the actors in threads, one request at a time, in every order; return how many there are.

    `actors` creates them and their data for each order, after which `check` is called. An actor
    that repeats a listing directly waits for the others.
    """
    runs, prefixes = 0, list[tuple[int, ...]]([()])
    while prefixes:
        order = _Order(prefixes.pop())
        order.run(actors())
        check()
        runs += 1
        prefixes += order.others()
    return runs


class _Order:
    """One order of requests: the actors in `prefix`, by number, then always the first ready one."""

    def __init__(self, prefix: tuple[int, ...]) -> None:
        self.prefix = prefix
        self.turns = list[int]()  # the actor of each request
        self.choices = list[list[int]]()  # the actors that could make it
        self.change = threading.Condition()
        self.waiting, self.alive, self.turn = dict[int, tuple[str, str]](), set[int](), -1
        self.last: tuple[int, tuple[str, str]] | None = None
        self.errors: list[BaseException] = []

    def run(self, actors: list[Callable[[Hook], object]]) -> None:
        self.alive = set(range(len(actors)))
        threads = []
        for number, actor in enumerate(actors):
            threads.append(threading.Thread(target=self._act, args=(number, actor)))
        for thread in threads:
            thread.start()
        self._choose_turns()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def others(self) -> Iterator[tuple[int, ...]]:
        """Yield the prefixes of the orders that differ first after this one's prefix."""
        for place in range(len(self.prefix), len(self.turns)):
            for other in self.choices[place]:
                if other != self.turns[place]:
                    yield (*self.turns[:place], other)

    def _act(self, number: int, actor: Callable[[Hook], object]) -> None:
        try:
            with suppress(Stopped):
                actor(lambda name, where: self._wait(number, (name, where)))
        except BaseException as error:  # raised again by `run`
            self.errors.append(error)
        finally:
            with self.change:
                self.alive.discard(number)
                self.change.notify_all()

    def _wait(self, number: int, request: tuple[str, str]) -> None:
        with self.change:
            self.waiting[number] = request
            self.change.notify_all()
            self.change.wait_for(lambda: self.turn == number)
            self.last = number, self.waiting.pop(number)
            self.turn = -1

    def _choose_turns(self) -> None:
        """Let the actors make one request at a time, until all have ended."""
        with self.change:
            while self.alive:
                self.change.wait_for(lambda: self.turn == -1 and self.waiting.keys() >= self.alive)
                if not self.alive:
                    return
                alive = sorted(self.alive)
                choices = [number for number in alive if not self._polls(number)] or alive
                place = len(self.turns)
                self.turn = self.prefix[place] if place < len(self.prefix) else choices[0]
                self.choices.append(choices)
                self.turns.append(self.turn)
                self.change.notify_all()

    def _polls(self, number: int) -> bool:
        return self.waiting[number][0] == "list" and self.last == (number, self.waiting[number])


@contextmanager
def as_client(kind: str, number: int) -> Iterator[None]:
    """Let saves see folders on a file system of this kind, and this process as its client."""
    real = shared_folders._view_of
    mount = {"point": "/mnt", "kind": kind, "source": "server:/data"}

    def view(*arguments: Any) -> dict[str, Any]:
        return {**real(*arguments), "client": f"client {number}", "mount": mount}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_folders, "_view_of", view)
        yield
