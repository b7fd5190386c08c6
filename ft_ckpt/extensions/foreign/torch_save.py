"""Saves objects by `torch.save`, with the checks that torch leaves out."""

import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ft_ckpt.errors import (
    CorruptError,
    SelectionError,
    TargetError,
    damaged_input,
    system_error,
)
from ft_ckpt.formats.files import FileStream, RawFile
from ft_ckpt.storage.io import open_local_file

_MAX_BYTES_AT_ONCE = 1 << 30  # bytes written in one call; Linux takes less than 2 GB


class _CountingStream:
    """A file that torch writes into: writes everything, or keeps the first error and raises it
    again.

    torch's own writer checks neither how many bytes a call has written (Linux writes at most 2 GB)
    nor why it failed.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.size_bytes = stream, 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`. Raises OSError."""
        view = memoryview(data).cast("B")
        try:
            if self.failure is not None:
                raise self.failure
            remaining = view
            while remaining:
                count = self.stream.write(remaining[:_MAX_BYTES_AT_ONCE]) or 0
                remaining = remaining[count:]
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.size_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def save_torch_object(obj: Any, stage: Path) -> None:
    """Write `obj` into the new file `stage`.

    Raises TargetError, OSError, and SelectionError for tensors that share memory as several types.
    """
    with stage.open("xb", buffering=0) as stream:
        file: Any = _CountingStream(stream)
        try:
            torch.save(obj, file)
        except RuntimeError as error:
            refused = SelectionError(
                f"{stage.name}: torch does not write it ({error}); save it as HDF5"
            )
            raise file.failure or system_error(error) or refused from error
        if file.failure is not None:
            raise file.failure
    with closing(RawFile(open_local_file(stage))) as written:
        check_torch_written(written, file.size_bytes)


def check_torch_written(file: RawFile, size_bytes: int) -> None:
    """Raise TargetError unless the file that torch wrote has `size_bytes` and contains all its
    records.
    """
    where = file.file.where
    if file.size_bytes != size_bytes:
        raise TargetError(
            f"{where}: {file.size_bytes:,} bytes, torch wrote {size_bytes:,}; nothing is kept, "
            "check the disk"
        )
    try:
        with damaged_input(file.name), zipfile.ZipFile(FileStream(file)) as archive:
            for entry in archive.infolist():
                archive.open(entry).close()  # compares the entry with the head of its record
    except CorruptError as error:
        raise TargetError(
            f"{where}: what torch wrote is not whole ({error}); nothing is kept"
        ) from error
