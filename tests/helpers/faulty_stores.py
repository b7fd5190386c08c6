"""Wrappers of a working store: a watch with a hook at each request, to count, refuse, stop or order
them; damage; time.

They are passed in, instead of patching calls.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
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
    """The hook for the requests of its stores, the names of these requests, and the simulated age
    of their objects.
    """

    def __init__(self, hook: Hook = lambda call, where: None) -> None:
        self.hook = hook
        self.calls: list[str] = []
        # an object as it was listed -> seconds
        self.older: dict[tuple[str, str, float], float] = {}

    def store(self, inner: Store) -> "WatchedStore":
        return WatchedStore(inner, self)

    def age(self, inner: Store, seconds: float) -> None:
        """Let time pass: make all present objects older."""
        for each in inner.list():
            key = (inner.where(each.name), each.version, each.modified)
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
        found = getattr(self.inner, name)
        if name not in (*READS, *WRITES):
            return found

        def told(*args: Any, **more: Any) -> Any:
            self.watch.calls.append(name)
            self.watch.hook(name, self._told_name(args))
            return self._as_of_now(found(*args, **more))

        return told

    def _told_name(self, args: tuple[Any, ...]) -> str:
        names = [args[0]] if args and isinstance(args[0], str) else list(args[0]) if args else []
        return " ".join(self.inner.where(name) for name in names) or self.inner.url

    def _as_of_now(self, result: Any) -> Any:
        if isinstance(result, Stored):
            key = (self.inner.where(result.name), result.version, result.modified)
            return replace(result, modified=result.modified - self.watch.older.get(key, 0))
        if isinstance(result, list):
            return [self._as_of_now(each) for each in result]
        if isinstance(result, FolderListing):
            return replace(result, objects=tuple(self._as_of_now(each) for each in result.objects))
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
    """A hook that refuses those calls for URLs with that part, as a store without permission
    does.
    """

    def hook(call: str, where: str) -> None:
        if call in calls and part in where:
            kind = TargetError if call in WRITES else UnreadableError
            raise kind(
                f"{where}: refused (permission denied); check credentials and network, or choose "
                "another place"
            )

    return hook


class TornStore(Wrapped):
    """Objects with a prefix are cut short: `read` returns half of a range, an open file raises
    CorruptError.
    """

    def __init__(self, inner: Store, prefix: str = "") -> None:
        super().__init__(inner)
        self.prefix = prefix

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        found = self.inner.read(name, start, stop)
        return found[: len(found) // 2] if name.startswith(self.prefix) else found

    def open(self, name: str) -> Readable:
        found = self.inner.open(name)
        return (
            _TornFile(found, name, found.size_bytes, found.version)
            if name.startswith(self.prefix)
            else found
        )


@dataclass
class _TornFile:
    inner: Readable
    name: str
    size_bytes: int
    version: str
    can_map = False
    asked: list[int] = field(default_factory=list)

    @property
    def where(self) -> str:
        return self.inner.where

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        self.asked.append(len(memory))
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
    """Hide objects with a prefix from reads of local stores in this process, as on a disk that is
    not shared.
    """
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
    """Run `actors` in threads, one request at a time, in every order, and `check` after each; the
    number of orders.

    `actors` creates them and their data for each order. An actor that repeats a listing directly
    waits for the others.
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
    """One order of requests: the actors in `prefix`, by number, then always the first that is
    ready.
    """

    def __init__(self, prefix: tuple[int, ...]) -> None:
        self.prefix, self.taken, self.could = prefix, list[int](), list[list[int]]()
        self.change = threading.Condition()
        self.waiting, self.alive, self.turn = dict[int, tuple[str, str]](), set[int](), -1
        self.last: tuple[int, tuple[str, str]] | None = None
        self.errors: list[BaseException] = []

    def run(self, actors: list[Callable[[Hook], object]]) -> None:
        self.alive = set(range(len(actors)))
        threads = [
            threading.Thread(target=self._play, args=(number, each))
            for number, each in enumerate(actors)
        ]
        for thread in threads:
            thread.start()
        self._lead()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def others(self) -> Iterator[tuple[int, ...]]:
        """The prefixes of the orders that differ first after this one's prefix."""
        for at in range(len(self.prefix), len(self.taken)):
            for other in self.could[at]:
                if other != self.taken[at]:
                    yield (*self.taken[:at], other)

    def _play(self, number: int, actor: Callable[[Hook], object]) -> None:
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

    def _lead(self) -> None:
        with self.change:
            while self.alive:
                self.change.wait_for(lambda: self.turn == -1 and self.waiting.keys() >= self.alive)
                if not self.alive:
                    return
                could = [each for each in sorted(self.alive) if not self._polls(each)] or sorted(
                    self.alive
                )
                at = len(self.taken)
                self.turn = self.prefix[at] if at < len(self.prefix) else could[0]
                self.could.append(could)
                self.taken.append(self.turn)
                self.change.notify_all()

    def _polls(self, number: int) -> bool:
        return self.waiting[number][0] == "list" and self.last == (number, self.waiting[number])


@contextmanager
def as_client(kind: str, number: int) -> Iterator[None]:
    """Let a save take folders for a file system of this kind, and this process for its client
    `number`.
    """
    real = shared_folders._view_of
    mount = {"point": "/mnt", "kind": kind, "source": "server:/data"}

    def view(*arguments: Any) -> dict[str, Any]:
        return {**real(*arguments), "client": f"client {number}", "mount": mount}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_folders, "_view_of", view)
        yield
