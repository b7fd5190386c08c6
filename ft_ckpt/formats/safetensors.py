"""The safetensors format: a header that is known before the first tensor byte.

Source: the format description in the safetensors repository. A file is an 8-byte little-endian header length, a JSON
header padded with spaces to a multiple of 8, and the tensors without gaps. The order is that of the reference writer
(widest type first, then by name), so our files equal its files byte for byte.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.errors import SelectionError

DTYPES = {  # torch name: (name in the file, bytes per element), narrowest first, in the reference writer's order
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "complex64": ("C64", 8),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
}
_RANK = {name: index for index, name in enumerate(DTYPES)}


@dataclass(frozen=True)
class Spec:
    """What a file will hold under one name."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch."

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Layout:
    """A file before it is written: its header, and the tensors in file order with their byte ranges."""

    header: bytes
    specs: tuple[Spec, ...]
    starts: tuple[int, ...]  # absolute, inclusive
    size_bytes: int


def lay_out(specs: Sequence[Spec], metadata: Mapping[str, str]) -> Layout:
    """The layout of a file holding `specs`. Raises SelectionError naming dtypes the format cannot keep."""
    foreign = [f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in DTYPES]
    if foreign:
        raise SelectionError(
            f"{', '.join(foreign[:5])}: safetensors has no such type; convert the tensor, or leave it out of the "
            "model's state dict (persistent=False)"
        )
    ordered = sorted(specs, key=lambda spec: (-_RANK[spec.dtype], spec.name))
    head: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin, offsets = 0, []
    for spec in ordered:
        end = begin + spec.size_bytes
        head[spec.name] = {"dtype": DTYPES[spec.dtype][0], "shape": list(spec.shape), "data_offsets": [begin, end]}
        offsets.append(begin)
        begin = end
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = tuple(len(header) + offset for offset in offsets)
    return Layout(header, tuple(ordered), starts, len(header) + begin)


def read_specs(path: Path) -> dict[str, Spec]:
    """What a file holds, by name, read with the safetensors library (which checks ranges and the file's size)."""
    from safetensors import safe_open

    names = {stored: name for name, (stored, _) in DTYPES.items()}
    with safe_open(str(path), framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return {
            name: Spec(name, tuple(part.get_shape()), names.get(part.get_dtype(), part.get_dtype()))
            for name, part in slices.items()
        }
