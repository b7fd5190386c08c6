"""Files inside a zip file that are stored as they are, so that their bytes can be read in place."""

import struct
import zipfile

from ft_ckpt.errors import CorruptError
from ft_ckpt.formats.raw_file import FileStream, RawFile

ZIP_MAGIC = b"PK\3\4"
_HEAD = struct.Struct("<4s22xHH")  # of a record: signature, then the lengths of its name and of what follows that


class ZipRecords:
    """The records of the zip file at [start, start + size_bytes) of an open file."""

    def __init__(self, file: RawFile, start: int = 0, size_bytes: int | None = None) -> None:
        self.file, self.start = file, start
        with zipfile.ZipFile(FileStream(file, start, size_bytes)) as names:
            self.records = {entry.filename: entry for entry in names.infolist()}

    def record_place(self, name: str) -> tuple[int, int]:
        """First byte, in the open file, and size of a record. Raises CorruptError when it is not there as it is."""
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
        return begin, entry.file_size

    def read_record(self, name: str) -> bytes:
        """The bytes of a record."""
        return bytes(self.file.bytes(*self.record_place(name)))
