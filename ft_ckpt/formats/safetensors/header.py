"""The safetensors format: lays out headers before tensor bytes are available, and reads them.

Needs no torch.

Source: the format description in the safetensors repository. A file is an 8-byte little-endian
header length, a JSON header padded with spaces to a multiple of 8, and the tensors without gaps.
Tensors are ordered as by the reference writer (widest type first, then by name), so the files equal
its files byte for byte.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from json.encoder import encode_basestring
from operator import attrgetter
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

from ft_ckpt.errors import CorruptError, SelectionError, UnreadableError, listing, shown
from ft_ckpt.formats.layout import ITEM_BYTES, Layout, Spec, checked_sizes
from ft_ckpt.storage import Readable, is_utf8, read_range

# The name of the HDF5 part of a dual file, which is a tensor for safetensors. `from_pretrained`
# silently drops names that contain "rotary_emb.inv_freq" if the model has rotary embeddings, and
# names that end in ".position_ids" if it has position ids. For other models it lists the name as
# unexpected, and ignores it.
HELPER = "__hdf5__.rotary_emb.inv_freq.position_ids"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own bound
# torch's name -> name in the file, narrowest first, in the reference writer's order
NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
_RESERVED = ("__metadata__", HELPER)
Shape = tuple[int, ...]
_NAME = attrgetter("name")
_RANK = {name: index for index, name in enumerate(NAMES)}
_TORCH_NAMES = {stored: name for name, stored in NAMES.items()}


def lay_out_safetensors(
    specs: Sequence[Spec],
    metadata: Mapping[str, str],
    ties: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """Lay out a file that contains `specs`, with `ties` in the metadata.

    Raises SelectionError naming unsupported dtypes, reserved names, and texts that are not Unicode.
    """
    _refuse_texts([*(spec.name for spec in specs), *ties, *metadata, *metadata.values()])
    _refuse_specs(specs)
    ordered = sorted(sorted(specs, key=_NAME), key=lambda spec: -_RANK[spec.dtype])
    header = bytearray(8) + b"{"
    if metadata or ties:
        texts = {**metadata, **ties}
        metadata_text = json.dumps(texts, ensure_ascii=False, separators=(",", ":"))
        header += f'"__metadata__":{metadata_text},'.encode()

    # The entries are put together as text: objects for 100,000 tensors would take more time and
    # memory than the rest. Kinds of tensors are few, even for many tensors.
    kinds: dict[tuple[Shape, str], tuple[str, int]] = {}
    offsets = []
    end = 0
    for spec in ordered:
        kind = (spec.shape, spec.dtype)
        if kind not in kinds:
            kinds[kind] = (_kind_text(spec), spec.size_bytes)
        text, size_bytes = kinds[kind]
        start = end
        end += size_bytes
        offsets.append(start)
        name = encode_basestring(spec.name)
        header += f'{name}:{{{text},"data_offsets":[{start},{end}]}},'.encode()

    if header.endswith(b","):
        header.pop()
    header += b"}"
    header += b" " * (-len(header) % 8)
    header[:8] = (len(header) - 8).to_bytes(8, "little")
    starts = tuple(len(header) + offset for offset in offsets)
    return Layout(bytes(header), tuple(ordered), starts, len(header) + end)


def _kind_text(spec: Spec) -> str:
    return f'"dtype":"{NAMES[spec.dtype]}","shape":[{",".join(map(str, spec.shape))}]'


def _refuse_texts(texts: Sequence[str]) -> None:
    if is_utf8("".join(texts)):  # one check for all
        return
    broken = [repr(text) for text in texts if not is_utf8(text)]
    raise SelectionError(f"{listing(broken, ', ')}: safetensors files take Unicode only; rename it")


def _refuse_specs(specs: Sequence[Spec]) -> None:
    reserved = [spec.name for spec in specs if spec.name in _RESERVED]
    if reserved:
        raise SelectionError(
            f"{listing(reserved, ', ')}: safetensors files keep this name for themselves; rename it"
        )
    foreign = [f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in NAMES]
    if foreign:
        raise SelectionError(
            f"{listing(foreign, ', ')}: safetensors has no such type; convert it, or leave it out "
            "of the model's state dict (persistent=False)"
        )


class HeaderEntry(NamedTuple):
    """A tensor as the header of its file describes it."""

    # torch's name, or the name in the file if torch has no such type
    dtype: str
    shape: tuple[int, ...]
    # The tensor has bytes [start, end) of the file.
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """The header of a file: its tensors by name, in the header's order, and its metadata."""

    tensors: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]


def read_header(file: Readable) -> dict[str, HeaderEntry]:
    """Read the tensors in the header of an open safetensors file.

    Raises CorruptError as `parse_header` does, or if the file cannot be read.
    """
    try:
        header = parse_header(partial(read_range, file), file.size_bytes)
    except UnreadableError:
        raise
    except CorruptError as error:
        raise CorruptError(
            f"{PurePosixPath(file.name).name}: {error}; use an older checkpoint"
        ) from error
    return dict(header.tensors)


def begins_with_header(head: bytes) -> bool:
    """Check whether `head`, at least 9 bytes of a file, begins with a length and a header."""
    return head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= _MAX_HEADER_BYTES


def parse_header(
    read: Callable[[int, int], bytes | bytearray], file_bytes: int
) -> SafetensorsHeader:
    """Parse the header of a file of `file_bytes`, from which `read(start, size)` returns bytes.

    Raises CorruptError when the header is malformed, or its tensors do not fill the file one after
    the other.
    """
    length = int.from_bytes(read(0, 8), "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise CorruptError(f"a header of {length:,} bytes in a file of {file_bytes:,}")
    text = bytes(read(8, length))
    data_start = 8 + length
    try:
        rows = json.loads(text)
        metadata = {str(key): str(value) for key, value in rows.pop("__metadata__", {}).items()}
        tensors = {name: _header_entry(row, data_start) for name, row in rows.items()}
    except (AttributeError, CorruptError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptError(f"malformed header ({shown(error)})") from error

    end = data_start
    for name, entry in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if entry.start != end:
            raise CorruptError(
                f"{name}: bytes {entry.start:,} to {entry.end:,}, the tensor "
                f"before it ends at {end:,}"
            )
        end = entry.end

    if end != file_bytes:
        kind = "truncated" if file_bytes < end else "bytes after its last tensor"
        raise CorruptError(f"{kind}: {file_bytes:,} bytes, but its header describes {end:,}")

    return SafetensorsHeader(tensors, metadata)


def _header_entry(row: Mapping[str, Any], data_start: int) -> HeaderEntry:
    dtype = str(_TORCH_NAMES.get(row["dtype"], row["dtype"]))
    shape = checked_sizes(row["shape"])
    start, end = checked_sizes(row["data_offsets"])
    is_of_size = dtype not in ITEM_BYTES or end - start == Spec("", shape, dtype).size_bytes
    if end < start or not is_of_size:
        raise CorruptError(f"{dtype} {list(shape)} at bytes {start:,} to {end:,}")
    return HeaderEntry(dtype, shape, data_start + start, data_start + end)
