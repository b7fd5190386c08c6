"""Finds records of zip files that are stored without compression, to read them in place."""

import struct
import zipfile

from ft_ckpt.errors import CorruptError
from ft_ckpt.formats.files.raw_file import RawFile

ZIP_MAGIC = b"PK\3\4"
# A record begins with a signature and, after 22 bytes, the lengths of its name and extra field.
_HEAD = struct.Struct("<4s22xHH")


def record_span(file: RawFile, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the bytes [start, stop) of an uncompressed record in an open zip file.

    Raises CorruptError when the record is compressed, or not where the directory of the file says.
    """
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CorruptError(
            f"{entry.filename} is compressed, expected one that is stored; zip "
            "the files again with -0"
        )

    signature, *lengths = _HEAD.unpack(file.bytes(entry.header_offset, _HEAD.size))
    start = entry.header_offset + _HEAD.size + sum(lengths)
    stop = start + entry.file_size
    if signature != ZIP_MAGIC or stop > file.size_bytes:
        raise CorruptError(
            f"{entry.filename}: its offset leads out of the file, or to "
            "something else; is the file whole?"
        )

    return start, stop
