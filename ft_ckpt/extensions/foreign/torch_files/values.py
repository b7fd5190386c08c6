"""Loads the values in torch files (.pt, .bin, .pth), zip and legacy.

`torch.load(weights_only=True)` reads them: it maps zip files, and reads those of torch before 1.6
as a whole. Objects of classes that are not imported become stand-ins; nothing in a pickle is run.
The checksums of the small records of a zip file are compared first (`sums`).
"""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from threading import Lock
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ft_ckpt.errors import CorruptError, LoadError, damaged_input, listing, shown
from ft_ckpt.extensions.foreign.torch_files.stand_ins import (
    is_stand_in,
    kind_of_leaf,
    peculiarity_of,
)
from ft_ckpt.extensions.foreign.torch_files.sums import (
    STREAM_BYTES,
    Source,
    check_archive,
    check_sums,
    compare_archive,
    is_zip,
    source_of,
)
from ft_ckpt.formats.files import PLAIN_VALUES, ZIP_MAGIC, FileStream, RawFile, StandIn, stand_in

# Objects of these packages become stand-ins, because they are common in training checkpoints and
# not needed for the tensors.
_HARMLESS = frozenset(
    (
        *("argparse", "deepspeed", "enum", "numpy", "omegaconf", "pathlib"),
        *("peft", "torch", "transformers"),
    )
)
_make_array = np.empty(0).__reduce__()[0]
# Classes and functions that torch does not accept by itself, and that only make plain values.
_VALUES: Mapping[str, Any] = {
    **PLAIN_VALUES,
    **{f"builtins.{kind.__name__}": kind for kind in (int, float, str, dict, list, tuple)},
    "numpy.core.multiarray._reconstruct": _make_array,
    "numpy._core.multiarray._reconstruct": _make_array,
    "numpy.ndarray": np.ndarray,
}
_NUMPY_TYPES = tuple({type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"})
# Legacy files begin with _LEGACY, and pickles that torch.save did not write with one of _BARE.
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_BARE = (b"\x80\x02}", b"\x80\x02c")
# One thread at a time sets the classes that torch accepts, because all threads share them.
_ACCEPTED = Lock()


def is_harmless(full_name: str) -> bool:
    """Check whether a stand-in may take the place of this class or function in any torch file."""
    return full_name.partition(".")[0] in _HARMLESS


def load_torch_value(
    file: RawFile, admits: Callable[[str], bool] = is_harmless, *, mapped: bool = True
) -> Any:
    """Load the value in a torch file, with its tensors on the CPU.

    Tensors are mapped from a local zip file. Those of other files are in memory. Objects whose
    classes are not imported become stand-ins if `admits` returns True for the full name of the
    class. Raises LoadError naming all other classes; CorruptError for a damaged file.
    """
    with damaged_input(f"{file.name}: saved by torch"):
        file.check()
        head = bytes(file.bytes(0, min(16, file.size_bytes)))
        if head.startswith(_BARE):
            raise LoadError(
                f"{file.name}: a pickle, but none that torch.save wrote; save "
                "its tensors with torch.save"
            )
        if head.startswith(_LEGACY):
            return _load_legacy(file)
        source = source_of(file)
        check_archive(source, file.name)
        return _load_zip(source, file.name, admits, mmap=mapped and isinstance(source, Path))


def load_torch_part(file: RawFile, start: int, size_bytes: int) -> Any:
    """Load the value in the torch zip file at [start, start + size_bytes) of `file`, in memory.

    The checksums of that file are compared. Raises as `load_torch_value` does.
    """
    with damaged_input(f"{file.name}: saved by torch"):
        part = io.BufferedReader(FileStream(file, start, size_bytes), STREAM_BYTES)
        check_archive(part, file.name)
        compare_archive(part, file.name)
        return _load_zip(part, file.name, is_harmless, mmap=False)


def _load_legacy(file: RawFile) -> Any:
    stream = io.BufferedReader(FileStream(file), STREAM_BYTES)
    value = _load_safely(stream, file.name, (), mmap=False)
    rest_bytes = file.size_bytes - stream.tell()
    if rest_bytes:
        raise CorruptError(
            f"{rest_bytes:,} bytes after its last storage; use another copy of the file"
        )
    return value


def _load_zip(source: Source, name: str, admits: Callable[[str], bool], *, mmap: bool) -> Any:
    _rewind(source)
    unknown = get_unsafe_globals_in_checkpoint(source)
    refused = []
    for full_name in unknown:
        if full_name not in _VALUES and not admits(full_name):
            refused.append(full_name)
    if refused:
        raise LoadError(
            f"{name}: refers to {listing(sorted(refused), ', ')}; expected tensors and plain data. "
            "Nothing of it was run; save a state dict alone, or load it yourself if you trust it"
        )
    return _load_safely(source, name, unknown, mmap=mmap)


def _load_safely(source: Source, name: str, unknown: Iterable[str], *, mmap: bool) -> Any:
    """Load the value that torch reads without running code.

    `unknown` are names that become values or stand-ins.
    """
    accepted: list[Any] = [(kind, f"{kind.__module__}.{kind.__name__}") for kind in _NUMPY_TYPES]
    for full_name in unknown:
        value = _VALUES[full_name] if full_name in _VALUES else stand_in(full_name)
        accepted.append((value, full_name))
    _rewind(source)
    try:
        with _ACCEPTED, safe_globals(accepted):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except UnpicklingError as error:
        raise LoadError(
            f"{name}: torch does not read it without running code ({_reason_of(error)}); save a "
            "state dict alone"
        ) from error


def _reason_of(error: UnpicklingError) -> str:
    """Return the error of torch's reader, without its advice to trust the file."""
    cause = error.__context__ or error  # torch puts its own message around that of its reader
    return shown(cause).partition(" Please use")[0]


def _rewind(source: Source) -> None:
    if not isinstance(source, Path):
        source.seek(0)


def is_torch_file(file: RawFile) -> bool:
    """Check whether the file begins as torch's do: with a zip record or a pickle."""
    head = bytes(file.bytes(0, min(16, file.size_bytes)))
    # A safetensors file may begin with the same byte as a pickle, but its byte 8 is "{".
    return head.startswith(ZIP_MAGIC) or (head[:1] == b"\x80" and head[8:9] != b"{")


def load_torch_object(raw: RawFile, map_location: Any, mapped: bool, verify: bool) -> Any:
    """Load the object in an open file, with its tensors on `map_location`.

    If `map_location` is None and `mapped`, tensors are mapped from the file. `verify` compares
    checksums. Raises CorruptError where the file is damaged or would run code.
    """
    if verify:
        check_sums(raw)
    with damaged_input(raw.name):
        source = source_of(raw)
        can_map = is_zip(raw) and isinstance(source, Path)
        if is_zip(raw):
            check_archive(source, raw.name)
        _rewind(source)
        mmap = mapped and can_map and map_location is None
        try:
            return torch.load(source, map_location=map_location, weights_only=True, mmap=mmap)
        except UnpicklingError as error:
            reason = _reason_of(error)
            raise CorruptError(
                f"{raw.name}: torch cannot read it without running code ({reason})"
            ) from error


def load_torch_values(
    file: RawFile, objects: Mapping[str, Callable[[StandIn], Any]] = MappingProxyType({})
) -> Any:
    """Load the object in an open file, with its tensors mapped from it.

    `objects` maps the full names of classes to functions that give the values of their stand-ins.
    Raises LoadError naming other values that are neither tensors nor plain data, CorruptError when
    the file is damaged.
    """
    return _real_value(load_torch_value(file), file.name, objects)


def _real_value(value: Any, path: str, objects: Mapping[str, Callable[[StandIn], Any]]) -> Any:
    """Return `value`, at `path`, without stand-ins."""
    if isinstance(value, dict):
        items = {}
        for key, item in value.items():
            items[key] = _real_value(item, f"{path}: {key}", objects)
        return OrderedDict(items) if isinstance(value, OrderedDict) else items

    if type(value) in (list, tuple):
        return type(value)(
            _real_value(item, f"{path}: {number}", objects) for number, item in enumerate(value)
        )

    if isinstance(value, StandIn) and value.kind in objects:
        return objects[value.kind](value)
    peculiarity = peculiarity_of(value) if isinstance(value, Tensor) else ""
    if is_stand_in(value) or peculiarity:
        raise LoadError(
            f"{path}: a {peculiarity or kind_of_leaf(value)}, expected tensors and plain data; "
            "nothing of it was run"
        )

    return value
