"""Keeps large files in the memory in which they were digested, so that each is read from the disk once.

A file in the page cache is digested in a mapping that is used afterwards; any other is read past the cache into private
memory, if there is enough. Nothing is handed out before all digests are compared.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from ft_ckpt.storage.digests import FileRecord, RunningDigest, digest_of_open
from ft_ckpt.storage.local_file import LocalFile, MappedBytes
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.proofs import SourceFolder
from ft_ckpt.storage.read_ahead import LEAST_WHOLE_BYTES, available_bytes, is_cached, read_whole
from ft_ckpt.storage.store import Readable

_STEP_BYTES = 32 << 20  # digested in one call; signals are handled between calls


@dataclass(eq=False)
class KeptBytes:
    """The bytes of one version of a file in memory, until they are handed over."""

    version: str
    memory: MappedBytes | None

    def give(self) -> MappedBytes | None:
        """Hand over the memory to a caller that may write to it; None if it is not private or was given before."""
        memory = self.memory
        if memory is None or not memory.is_own:
            return None
        self.memory = None
        return memory


class KeptFile:
    """The open file `inner`, read from memory while its bytes are kept."""

    can_map = True

    def __init__(self, inner: LocalFile, kept: KeptBytes) -> None:
        self.inner, self.kept = inner, kept
        self.name, self.size_bytes, self.version = inner.name, inner.size_bytes, inner.version

    @property
    def where(self) -> str:
        return self.inner.where

    @property
    def is_own(self) -> bool:
        """Whether its bytes are in private memory, available through `kept.give`."""
        return self.kept.memory is not None and self.kept.memory.is_own

    def view(self, start: int, size_bytes: int) -> memoryview | None:
        """These bytes without a copy, read-only; None when they are not all in memory."""
        memory = self.kept.memory
        within = start >= 0 and start + size_bytes <= self.size_bytes
        return memory.memory[start : start + size_bytes] if memory is not None and within else None

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        found = self.view(start, len(memory))
        if found is None:
            self.inner.read_into(memory, start)
            return
        memory[:] = found
        self.check()

    def map(self) -> MappedBytes | None:
        """A new mapping of the file; None while its bytes are in private memory, which they are copied from."""
        return None if self.is_own else self.inner.map()

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class KeptStore(SourceFolder):
    """A folder that keeps in memory the files that `keeping_digest` has read."""

    kept: dict[str, KeptBytes] = field(default_factory=dict)

    def within(self, folder: str) -> LocalStore:
        return SourceFolder(self.folder / folder, proof=self.proof)

    def open(self, name: str) -> Readable:
        file, kept = super().open(name), self.kept.get(name)
        if isinstance(file, LocalFile) and kept is not None and kept.version == file.version:
            return KeptFile(file, kept)
        return file


def keeping_digest(store: KeptStore, names: frozenset[str], own: bool) -> Callable[[Readable, FileRecord], str]:
    """A function that digests an open file of `store` and keeps its bytes there, if it is large and one of `names`.

    With `own`, a file that is not in the page cache is kept too, in at most half of the memory that is free now.
    Thread-safe.
    """
    room, lock = [available_bytes() // 2 if own and names else 0], Lock()

    def take_room(size_bytes: int) -> bool:
        with lock:
            is_there = size_bytes <= room[0]
            room[0] -= size_bytes if is_there else 0
            return is_there

    def digest(file: Readable, record: FileRecord) -> str:
        if not isinstance(file, LocalFile) or record.path not in names or file.size_bytes < LEAST_WHOLE_BYTES:
            return digest_of_open(file, record)
        running = RunningDigest(file.size_bytes, record.cuts, record.ranks)
        if is_cached(file.descriptor, 0, file.size_bytes):
            memory = _digest_mapped(file, running)
        else:
            memory = read_whole(file, each=running.update) if take_room(file.size_bytes) else None
        if memory is None:
            return digest_of_open(file, record)
        store.kept[record.path] = KeptBytes(file.version, memory)
        return running.text()

    return digest


def _digest_mapped(file: LocalFile, running: RunningDigest) -> MappedBytes | None:
    mapped = file.map()
    if mapped is not None:
        for start in range(0, file.size_bytes, _STEP_BYTES):
            running.update(mapped.memory[start : start + _STEP_BYTES])
        file.check()
    return mapped
