"""Objects in files of torch: written and read by torch itself, which runs nothing that is in them."""

import io
from contextlib import closing
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch

from ft_ckpt.errors import CorruptError, SelectionError, damaged_input, shown, system_error
from ft_ckpt.formats.raw_file import FileStream, RawFile
from ft_ckpt.formats.torch_file import check_sums, check_torch_file, check_torch_written
from ft_ckpt.storage.local_file import LocalFile, open_local_file
from ft_ckpt.storage.paths import is_utf8

_STREAM_BYTES = 8 << 20  # read at a time from afar
_MOST_AT_ONCE = 1 << 30  # bytes written in one call; Linux takes less than 2 GB


class _CountingStream:
    """A file for torch to write into: all it is given is written, or the first error is kept and all others follow it.

    torch's own way of writing neither looks at how much of a block was taken (Linux takes 2 GB at a time) nor at why
    writing failed.
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
            left = view
            while left:
                left = left[self.stream.write(left[:_MOST_AT_ONCE]) or 0 :]
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
            refused = SelectionError(f"{stage.name}: torch does not write it ({error}); save it as HDF5")
            raise file.failure or system_error(error) or refused from error
        if file.failure is not None:
            raise file.failure
    with closing(RawFile(open_local_file(stage))) as written:
        check_torch_written(written, file.size_bytes)


def load_torch_object(raw: RawFile, map_location: Any, mapped: bool, verify: bool) -> Any:
    """The object in an open file, its tensors on `map_location`; mapped from the file, if `mapped` and None.

    `verify` compares checksums. Raises CorruptError where the file is damaged or would run code.
    """
    if verify:
        check_sums(raw)
    check_torch_file(raw)
    source = _torch_source(raw)
    mapped = mapped and map_location is None and isinstance(source, Path)
    with damaged_input(raw.name):
        try:
            return torch.load(source, map_location=map_location, weights_only=True, mmap=mapped)
        except UnpicklingError as error:
            reason = shown(error)
            raise CorruptError(f"{raw.name}: torch cannot read it without running code ({reason})") from error
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(source, map_location=map_location, weights_only=True)  # older than torch 1.6


def _torch_source(raw: RawFile) -> Any:
    """What torch reads the file from: it maps nothing but paths, and of these none that is not UTF-8."""
    if isinstance(raw.file, LocalFile) and is_utf8(str(raw.file.path)):
        return raw.file.path
    return io.BufferedReader(FileStream(raw), _STREAM_BYTES)
