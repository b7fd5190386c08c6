"""Computes the digests of files: of bytes, of open objects, of bytes as they arrive."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TypeAlias

import xxhash

from ft_ckpt.errors import CorruptError
from ft_ckpt.progress_bars import note_read
from ft_ckpt.storage.digests.records import (
    Cut,
    FileRecord,
    Part,
    owned_parts,
    rank_parts,
    size_problem,
)
from ft_ckpt.storage.io import LocalFile
from ft_ckpt.storage.store import Readable, Store, read_range

# files below it are hashed whenever a checkpoint is opened: configs, tokenizers, indexes
SMALL_BYTES = 1 << 20
_MAP_BYTES = 1 << 20  # smaller files are read
_STEP_BYTES = 32 << 20  # hashed in one call
_WHOLE, _CUT = "xxh3-128:", "xxh3-128-of-ranks:"

_Contents: TypeAlias = Iterator[tuple[int, memoryview]]  # rank that wrote them, the next bytes


def new_digest() -> xxhash.xxh3_128:
    """Return the state of a digest without any bytes."""
    return xxhash.xxh3_128()


def whole_digest(digest: str) -> str:
    """Return the digest of a file that one rank wrote, from the hexadecimal digest of its bytes."""
    return _WHOLE + digest


def joined_digest(digests: Iterable[str]) -> str:
    """Combine the hexadecimal digests of the parts of a file, in rank order, to its digest."""
    return _CUT + xxhash.xxh3_128_hexdigest("".join(digests).encode())


def file_digest(digests: Sequence[str]) -> str:
    """Return the digest of a file from the hexadecimal digests of its ranks' parts, in rank order.

    A file that one rank wrote has the `whole_digest` of its bytes.
    """
    return whole_digest(digests[0]) if len(digests) == 1 else joined_digest(digests)


def digest_of_bytes(content: bytes) -> str:
    """Compute the digest that a file with this content would have."""
    return whole_digest(xxhash.xxh3_128_hexdigest(content))


def record_of(path: str, content: bytes) -> FileRecord:
    """Make the record of a small file from its bytes."""
    return FileRecord(path, len(content), digest_of_bytes(content))


def read_record(store: Store, path: str) -> FileRecord:
    """Read an object and make its record. Raises as reading does."""
    with closing(store.open(path)) as opened:
        record = FileRecord(path, opened.size_bytes, "")
        return replace(record, digest=digest_of_open(opened, record))


def digest_of_open(file: Readable, record: FileRecord) -> str:
    """Compute the digest of an open object as for `record`.

    Raises CorruptError as `part_digests` does.
    """
    return file_digest(part_digests(file, record, range(record.ranks)))


def part_digests(file: Readable, record: FileRecord, owners: range) -> tuple[str, ...]:
    """Compute the hexadecimal digests of the parts of an open object that the ranks `owners` wrote.

    A local file is read through the page cache, from which it is used afterwards. Raises
    CorruptError for an object of another size than the record's, and as reading does.
    """
    if file.size_bytes != record.size_bytes:
        raise CorruptError(size_problem(file.size_bytes, record.size_bytes))
    states = {owner: new_digest() for owner in owners}
    parts = owned_parts(record.cuts, record.size_bytes, owners)
    read_parts = _mapped_contents if file.can_map else _remote_contents
    for owner, content in read_parts(file, parts):
        states[owner].update(content)
    return tuple(state.hexdigest() for state in states.values())


def _mapped_contents(file: Readable, parts: Iterator[Part]) -> _Contents:
    """Yield the bytes of a local file in its mapping, in steps between which signals are handled.

    Each step is first read into the page cache. A failing disk is an error in that read; in the
    mapping it would end the process.
    """
    mapped = None
    if isinstance(file, LocalFile) and file.size_bytes >= _MAP_BYTES:
        mapped = file.map(in_large_pages=False)
    for part_start, part_stop, owner in parts:
        for start in range(part_start, part_stop, _STEP_BYTES):
            stop = min(start + _STEP_BYTES, part_stop)
            if mapped is not None and mapped.read_in(start, stop):
                yield owner, mapped.memory[start:stop]
            else:
                yield owner, memoryview(read_range(file, start, stop - start))
            note_read(stop - start)
    file.check()


def _remote_contents(file: Readable, parts: Iterator[Part]) -> _Contents:
    from ft_ckpt.storage.io import ByteRun, read_ahead

    runs = (ByteRun(str(owner), file, start, stop - start) for start, stop, owner in parts)
    for part in read_ahead(runs):
        yield int(part.run.name), part.content


class RunningDigest:
    """The digest of a file whose bytes arrive in file order, computed as for its record."""

    def __init__(self, size_bytes: int, cuts: Sequence[Cut] = (), ranks: int = 1) -> None:
        self._states = [new_digest() for _ in range(ranks)]
        self._parts = rank_parts(cuts, size_bytes)
        self._offset = 0  # of the next byte
        self._part_stop, self._owner = 0, 0  # of the part that it is in

    def update(self, content: memoryview) -> None:
        """Take the next bytes of the file."""
        done = 0
        while done < len(content):
            while self._offset == self._part_stop:
                _, self._part_stop, self._owner = next(self._parts)
            count = min(len(content) - done, self._part_stop - self._offset)
            self._states[self._owner].update(content[done : done + count])
            done += count
            self._offset += count

    def text(self) -> str:
        """Return the digest of the bytes so far."""
        return file_digest([state.hexdigest() for state in self._states])
