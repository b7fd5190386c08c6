"""Files inside a zip file that are stored as they are, so that their bytes can be read in place."""

import struct
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from ft_ckpt.errors import CorruptError, listing
from ft_ckpt.formats.raw_file import FileStream, RawFile

ZIP_MAGIC = b"PK\3\4"
_HEAD = struct.Struct("<4s22xHH")  # of a record: signature, then the lengths of its name and of what follows that
_STEP_BYTES = 8 << 20


@dataclass(eq=False)
class ZipRecord:
    """A stored record, bytes [start, end) of an open file, and the CRC-32 of the bytes that were read so far.

    Bytes are compared as they are read in order. Where a reader leaves the order, and where a tensor ends before the
    record does, the rest of the record is read here.
    """

    file: RawFile
    name: str
    start: int
    end: int
    expected: int | None  # None: the file has no checksums
    _at: int = field(init=False)
    _found: int = 0
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._at = self.start

    def read(self) -> bytes:
        """All bytes. Raises CorruptError when their checksum differs."""
        data = bytes(self.file.bytes(self.start, self.end - self.start))
        self.take(self.end, self.start, data)
        return data

    def compare(self) -> None:
        """Read what was not read yet. Raises CorruptError when the checksum differs."""
        with self._lock:
            self._compare_rest()

    def take(self, stop: int, start: int, data: Any) -> None:
        """Count the bytes `data`, which were read at byte `start` of the file, of a tensor that ends at byte `stop`.

        Raises CorruptError when the record is read to its end and its checksum differs.
        """
        with self._lock:
            if start == self._at < self.end:
                self._found, self._at = zlib.crc32(data, self._found), start + len(data)
                if self._at < min(stop, self.end):
                    return
            self._compare_rest()

    def _compare_rest(self) -> None:
        if self.expected is None:
            return
        while self._at < self.end:
            data = self.file.bytes(self._at, min(_STEP_BYTES, self.end - self._at))
            self._found, self._at = zlib.crc32(data, self._found), self._at + len(data)
        if self._found != self.expected:
            raise CorruptError(
                f"{self.file.name}: {self.name} is damaged (its checksum differs); use another copy of the file"
            )


class ZipRecords:
    """The records of the zip file at [start, start + size_bytes) of an open file.

    Raises CorruptError when two have one name.
    """

    def __init__(self, file: RawFile, start: int = 0, size_bytes: int | None = None) -> None:
        self.file, self.start = file, start
        with zipfile.ZipFile(FileStream(file, start, size_bytes)) as names:
            entries = names.infolist()
        self.records = {entry.filename: entry for entry in entries}
        twice = [name for name, count in Counter(entry.filename for entry in entries).items() if count > 1]
        if twice:
            raise CorruptError(f"several records of one name: {listing(twice, ', ')}")
        self.has_sums = any(entry.CRC for entry in entries)  # torch can leave out all of them

    def record(self, name: str) -> ZipRecord:
        """A record. Raises CorruptError when it is not there as it is."""
        entry = self.records.get(name)
        if entry is None:
            raise CorruptError(f"{name} is missing")
        if entry.compress_type:
            raise CorruptError(f"{name} is compressed, expected one that is stored; zip the files again with -0")
        head = self.start + entry.header_offset
        signature, *lengths = _HEAD.unpack(self.file.bytes(head, _HEAD.size))
        begin = head + _HEAD.size + sum(lengths)
        if signature != ZIP_MAGIC or begin + entry.file_size > self.file.size_bytes:
            raise CorruptError(f"{name} leads out of the file")
        return ZipRecord(self.file, name, begin, begin + entry.file_size, entry.CRC if self.has_sums else None)
