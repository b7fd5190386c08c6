"""The safetensors format: a header that is known before the first tensor byte.

Source: the format description in the safetensors repository. A file is an 8-byte little-endian header length, a JSON
header padded with spaces to a multiple of 8, and the tensors without gaps. The order is that of the reference writer
(widest type first, then by name), so our files equal its files byte for byte.
"""

import json
from collections.abc import Mapping, Sequence

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.formats.layout import Layout, Spec

NAMES = {  # torch name: name in the file, narrowest first, in the reference writer's order
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
_RANK = {name: index for index, name in enumerate(NAMES)}


def lay_out_safetensors(specs: Sequence[Spec], metadata: Mapping[str, str]) -> Layout:
    """The layout of a file holding `specs`. Raises SelectionError naming dtypes the format cannot keep."""
    foreign = [f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in NAMES]
    if foreign:
        raise SelectionError(
            f"{listing(foreign, ', ')}: safetensors has no such type; convert it, or leave it out of the model's "
            "state dict (persistent=False)"
        )
    ordered = sorted(specs, key=lambda spec: (-_RANK[spec.dtype], spec.name))
    head: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin, offsets = 0, []
    for spec in ordered:
        end = begin + spec.size_bytes
        head[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        offsets.append(begin)
        begin = end
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = tuple(len(header) + offset for offset in offsets)
    return Layout(header, tuple(ordered), starts, len(header) + begin)
