"""What a safetensors file says of its tensors, read without any library."""

import json
import os
from pathlib import Path
from typing import Any

from ft_ckpt.errors import CorruptError
from ft_ckpt.storage import local_disk

HDF5_HALF = "__hdf5__"  # begins the name of the helper tensor in a file that is safetensors and HDF5 at once
_HEADER_LIMIT_BYTES = 100_000_000  # the safetensors format's own bound
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """The tensors of a safetensors file: name to (dtype, shape, first byte, byte after the last), offsets in the file.

    Raises CorruptError when the header does not hold together or its tensors do not fill the file.
    """
    with local_disk.open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_HEADER_LIMIT_BYTES, size - 8):
            raise CorruptError(
                f"{file.name}: a header of {length:,} bytes in a file of {size:,}; use an older checkpoint"
            )
        text = stream.read(length)
    try:
        entries = json.loads(text).items()
        tensors = {name: _header_entry(entry, 8 + length) for name, entry in entries if name != "__metadata__"}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptError(f"{file.name}: malformed header ({error!r}); use an older checkpoint") from error
    end = max((entry[3] for entry in tensors.values()), default=8 + length)
    if end != size:
        raise CorruptError(f"{file.name}: its tensors end at byte {end:,}, it at {size:,}; use an older checkpoint")
    return tensors


def _header_entry(entry: dict[str, Any], data_start: int) -> tuple[str, tuple[int, ...], int, int]:
    start, end = entry["data_offsets"]
    dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
    return dtype, tuple(entry["shape"]), data_start + start, data_start + end
