"""Saves objects by `torch.save`, with the checks that torch leaves out."""

import io
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch

from ft_ckpt.errors import (
    CorruptError,
    SelectionError,
    TargetError,
    damaged_input,
    listing,
    system_error,
)
from ft_ckpt.formats.files import FileStream, RawFile
from ft_ckpt.formats.trees import MAX_LEVELS, PLAIN, SCALARS, quoted_key, vars_of
from ft_ckpt.storage.io import open_local_file

_MAX_BYTES_AT_ONCE = 1 << 30  # bytes written in one call; Linux takes less than 2 GB
_SAVED: tuple[type, ...] = (*SCALARS, torch.Size)
_MAPPINGS, _SEQUENCES = (dict, OrderedDict, Counter), (list, tuple, set)


class _CountingStream:
    """A file that torch writes into: it writes everything, or raises its first error each time.

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
    """Raise TargetError unless the file that torch wrote has `size_bytes` and all its records."""
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


def check_torch_object(obj: Any, root: str = "state", classes: Collection[type] = PLAIN) -> None:
    """Raise SelectionError naming values in `obj` that torch reads back only by running code.

    The error has the paths of the values. `classes` are the allowed tensor classes. Limits that
    types do not show, such as the length of integers, are tested by saving and loading the object
    in memory without its tensors.
    """
    outline = _Outline(frozenset(classes))
    bare = outline.bare_value(obj, root)
    if outline.refused:
        raise SelectionError(
            f"{listing(outline.refused)}. Nothing was written; convert these, leave them out, or "
            "save as HDF5. torch reads back plain containers, numbers, strings, bytes and tensors, "
            "and anything else by running code"
        )

    trial = io.BytesIO()
    torch.save(bare, trial)
    trial.seek(0)
    try:
        torch.load(trial, weights_only=True)
    except UnpicklingError as error:
        raise SelectionError(
            f"{root}: has a value that torch would not read back, such as empty bytes or an "
            "integer of over 255 bytes. Nothing was written; save it as HDF5"
        ) from error


@dataclass
class _Outline:
    """Copies an object without its tensors, and lists the values that are refused."""

    classes: frozenset[type]
    refused: list[str] = field(default_factory=list)
    # containers by identity: shared ones are visited once
    copies: dict[int, Any] = field(default_factory=dict)
    enclosing: list[int] = field(default_factory=list)  # ids of the enclosing containers

    def bare_value(self, value: Any, path: str) -> Any:
        """Return `value` with None, or its extra attributes, for each tensor."""
        if type(value) in _SAVED:
            return value
        if isinstance(value, torch.Tensor):
            return self._bare_tensor(value, path)
        if type(value) not in (*_MAPPINGS, *_SEQUENCES):
            return self._refuse_value(path, f"{type(value).__module__}.{type(value).__qualname__}")
        if id(value) in self.enclosing:
            return self._refuse_value(path, "contains itself")
        if len(self.enclosing) >= MAX_LEVELS:
            return self._refuse_value(path, f"over {MAX_LEVELS} levels deep")
        if id(value) not in self.copies:
            self.enclosing.append(id(value))
            self.copies[id(value)] = self._bare_container(value, path)
            self.enclosing.pop()

        return self.copies[id(value)]

    def _bare_container(self, value: Any, path: str) -> Any:
        if type(value) in _SEQUENCES:
            items = [self.bare_value(item, f"{path}[{at}]") for at, item in enumerate(value)]
            return type(value)(items)

        copy = {}
        for key, item in value.items():
            item_path = f"{path}[{quoted_key(key)}]"
            if type(key) in (*_SAVED, tuple):
                copy[key] = self.bare_value(item, item_path)
            else:
                self._refuse_value(item_path, f"a key of type {type(key).__qualname__}")

        # of an OrderedDict: torch gives a state dict some
        attributes = vars_of(value)
        if not attributes:
            return copy
        return [copy, self.bare_value(dict(attributes), f"{path}.__dict__")]

    def _bare_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if type(tensor) not in self.classes:
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            return self._refuse_value(path, f"{kind}, a tensor with a meaning of its own")
        if tensor.is_quantized:
            return self._refuse_value(path, f"a tensor of {tensor.dtype}")
        attributes = vars(tensor) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else {}
        if not attributes:
            return None
        return self.bare_value(dict(attributes), f"{path}.__dict__")

    def _refuse_value(self, path: str, what: str) -> None:
        self.refused.append(f"{path}: {what}")
