"""Computes the digests of files: from bytes in memory, open objects, or bytes that arrive.

If one rank wrote a file, its digest is the XXH3-128 of its bytes. If several ranks wrote it, the
bytes of each rank have a digest, and the file's digest is computed from these (`joined_digest`).
"""

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

# Smaller files are hashed whenever a checkpoint is opened: configs, tokenizers, indexes.
SMALL_BYTES = 1 << 20
# Smaller files are read, larger ones are mapped.
_MAP_BYTES = 1 << 20
# So many bytes are hashed in one call.
_STEP_BYTES = 32 << 20
# Prefixes of the digests of files that one rank wrote, and of those that several wrote.
_WHOLE = "xxh3-128:"
_JOINED = "xxh3-128-of-ranks:"

# The next bytes of a file, each with the rank that wrote them.
_Contents: TypeAlias = Iterator[tuple[int, memoryview]]


def new_digest() -> xxhash.xxh3_128:
    """Return the running digest of no bytes."""
    return xxhash.xxh3_128()


def whole_digest(digest: str) -> str:
    """Return the digest of a file that one rank wrote, from the hexadecimal digest of its bytes."""
    return _WHOLE + digest


def joined_digest(digests: Iterable[str]) -> str:
    """Return the digest of a file that several ranks wrote.

    `digests` has the hexadecimal digest of each rank's bytes, in rank order.
    """
    return _JOINED + xxhash.xxh3_128_hexdigest("".join(digests).encode())


def file_digest(digests: Sequence[str]) -> str:
    """Return the digest of a file.

    `digests` has the hexadecimal digest of the bytes of each rank that wrote it, in rank order.
    """
    if len(digests) == 1:
        return whole_digest(digests[0])
    return joined_digest(digests)


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
    """Compute the digest of an open object, which the ranks of `record` wrote.

    Raises CorruptError as `rank_digests` does.
    """
    return file_digest(rank_digests(file, record, range(record.ranks)))


def rank_digests(file: Readable, record: FileRecord, owners: range) -> tuple[str, ...]:
    """Compute the hexadecimal digests of the bytes that each of the ranks `owners` wrote.

    A local file is read through the page cache, because its bytes are used afterwards. Raises
    CorruptError if the object does not have the size of the record, and as reading does.
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
    """Yield the bytes of a local file, in steps, between which Python handles signals.

    A large file is mapped, and each step is read into the page cache first. If the disk fails, that
    read returns an error. An access to the mapping would end the process instead.
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
    """Yield the bytes of a remote object, which are requested before they are needed."""
    from ft_ckpt.storage.io import ByteRun, read_ahead

    runs = (ByteRun(str(owner), file, start, stop - start) for start, stop, owner in parts)
    for part in read_ahead(runs):
        yield int(part.run.name), part.content


class RunningDigest:
    """Computes the digest of a file whose bytes arrive in file order.

    `cuts` and `ranks` are those of its record, and say which rank wrote which bytes.
    """

    def __init__(self, size_bytes: int, cuts: Sequence[Cut] = (), ranks: int = 1) -> None:
        self._states = [new_digest() for _ in range(ranks)]
        self._parts = rank_parts(cuts, size_bytes)
        self._offset = 0  # where the next byte is in the file
        # The end of the part that the next byte is in, and the rank that wrote the part.
        self._part_stop = 0
        self._owner = 0

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
