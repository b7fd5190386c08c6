"""The checksums of torch's zip files, which torch itself does not compare."""

import io
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from ft_ckpt.errors import ConfigError, CorruptError, LoadError, damaged_input, listing
from ft_ckpt.formats.files import ZIP_MAGIC, FileStream, RawFile
from ft_ckpt.storage.io import LocalFile

Source = Path | BinaryIO  # what torch and zipfile read
STREAM_BYTES = 8 << 20  # bytes of one read from a bucket
_BLOCK_BYTES = 1 << 20  # bytes of one read from a record


def source_of(file: RawFile) -> Source:
    """Return what torch reads: a local file's path, or a stream for an object in a bucket.

    The path is that of the open descriptor, so that it stays the same file.
    """
    if isinstance(file.file, LocalFile):
        return Path(f"/proc/self/fd/{file.file.descriptor}")
    return io.BufferedReader(FileStream(file), STREAM_BYTES)


def is_zip(file: RawFile) -> bool:
    """Check whether an open file begins as a zip file."""
    return bytes(file.bytes(0, min(len(ZIP_MAGIC), file.size_bytes))) == ZIP_MAGIC


def check_archive(source: Source, name: str) -> None:
    """Compare the checksums of all records but the storages.

    Raises LoadError for a program of TorchScript, CorruptError for what torch never writes.
    """
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            raise LoadError(
                f"{name}: a TorchScript program, expected saved tensors; save "
                "its state_dict() instead"
            )

        compressed = [
            entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED
        ]
        if compressed:
            raise CorruptError(
                f"{name}: {listing(compressed, ', ')}: compressed, which torch never does; zip the "
                "files again with -0"
            )

        if _has_sums(entries):
            small = [entry for entry in entries if "/data/" not in entry.filename]
            _compare_records(archive, small, name)


def compare_archive(source: Source, name: str) -> bool:
    """Compare the checksums of all records; return False if the file has none.

    Raises CorruptError if one differs.
    """
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
        if not _has_sums(entries):
            return False
        _compare_records(archive, entries, name)
        return True


def _has_sums(entries: Sequence[zipfile.ZipInfo]) -> bool:
    return any(entry.CRC for entry in entries)  # torch can omit all of them


def _compare_records(
    archive: zipfile.ZipFile, entries: Iterable[zipfile.ZipInfo], name: str
) -> None:
    """Read records to their end, at which zipfile compares their checksum."""
    for entry in entries:
        record = entry.filename.partition("/")[2]
        try:
            with archive.open(entry) as stream:
                while stream.read(_BLOCK_BYTES):
                    pass
        except zipfile.BadZipFile as error:
            raise CorruptError(
                f"{name}: {record} is damaged (its checksum differs); use another copy of the file"
            ) from error


def compare_sums(file: RawFile) -> bool:
    """Compare the records of a torch file with their checksums; return False if it has none.

    Raises CorruptError if one differs.
    """
    with damaged_input(file.name):
        file.check()
        return is_zip(file) and compare_archive(source_of(file), file.name)


def check_sums(file: RawFile) -> None:
    """Call `compare_sums`, and raise ConfigError for a file without checksums."""
    if not compare_sums(file):
        raise ConfigError(
            f"verify=True: {file.name} has no checksums, as those of torch before 1.6; leave it out"
        )
