"""Wrappers of a working store that fail as real stores do; they are passed in, instead of patching calls."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from ft_ckpt.errors import CorruptError, MissingError, NoSpaceError, TargetError, UnreadableError
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.store import Readable, Store, Stored, Writable

READS = ("read", "open", "list", "list_folder", "stat")
WRITES = ("write", "create", "copy", "delete")


class Wrapped:
    """A store that delegates to `inner`; its subclasses change one thing each."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class CountingStore(Wrapped):
    """Records the calls, each as its name and first argument."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in (*READS, *WRITES):
            return found

        def counted(*args: Any, **more: Any) -> Any:
            self.calls.append((name, args[0] if args else None))
            return found(*args, **more)

        return counted


class RefusingStore(Wrapped):
    """Refuses some calls for names with a prefix, as a store without permission does."""

    def __init__(self, inner: Store, calls: Iterable[str], prefix: str = "") -> None:
        super().__init__(inner)
        self.refused, self.prefix = tuple(calls), prefix

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in self.refused:
            return found

        def refuse(place: Any = "", *args: Any, **more: Any) -> Any:
            if not str(place).startswith(self.prefix):
                return found(place, *args, **more)
            kind = TargetError if name in WRITES else UnreadableError
            raise kind(
                f"{self.inner.url}/{place}: refused (permission denied); check credentials and network, or "
                "choose another place"
            )

        return refuse


class SlowStore(Wrapped):
    """Waits before each call."""

    def __init__(self, inner: Store, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in (*READS, *WRITES):
            return found

        def late(*args: Any, **more: Any) -> Any:
            time.sleep(self.seconds)
            return found(*args, **more)

        return late


class FullStore(Wrapped):
    """Has room for `size_bytes` more bytes."""

    def __init__(self, inner: Store, size_bytes: int) -> None:
        super().__init__(inner)
        self.left = size_bytes

    def take(self, name: str, size_bytes: int) -> None:
        if size_bytes > self.left:
            raise NoSpaceError(f"{self.inner.url}/{name}: no room on its device; make room and save again")
        self.left -= size_bytes

    def write(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        self.take(name, len(data))
        self.inner.write(name, data, create_only=create_only)

    def create(self, name: str, size_bytes: int) -> Writable:
        return _FullWriting(self, name, self.inner.create(name, size_bytes))


@dataclass
class _FullWriting:
    store: FullStore
    name: str
    inner: Writable

    def write(self, offset: int, memory: memoryview) -> None:
        self.store.take(self.name, len(memory))
        self.inner.write(offset, memory)

    def finish(self) -> Stored:
        return self.inner.finish()

    def abandon(self) -> None:
        self.inner.abandon()


class TornStore(Wrapped):
    """Objects with a prefix are cut short: `read` returns half of a range, an open file raises CorruptError."""

    def __init__(self, inner: Store, prefix: str = "") -> None:
        super().__init__(inner)
        self.prefix = prefix

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        found = self.inner.read(name, start, stop)
        return found[: len(found) // 2] if name.startswith(self.prefix) else found

    def open(self, name: str) -> Readable:
        found = self.inner.open(name)
        return _TornFile(found, name, found.size_bytes, found.version) if name.startswith(self.prefix) else found


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
        raise CorruptError(f"{self.name}: {len(memory) // 2} bytes came, expected {len(memory)}; it was cut short")

    def map(self) -> None:
        return None

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self.inner.close()


@contextmanager
def unseen_files(prefix: str) -> Iterator[None]:
    """Hide objects with a prefix from reads of local stores in this process, as on a disk that is not shared."""
    real = LocalStore.read

    def read(store: LocalStore, name: str, *part: int) -> bytes:
        if name.startswith(prefix):
            raise MissingError(f"{name}: no such file")
        return real(store, name, *part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "read", read)
        yield
