"""How Cerebras checkpoints store names and dtypes."""

from urllib.parse import quote

from ft_ckpt.formats.trees import safe_name

INDEX = "__ft_index__"
GROUP = "__ft__"  # of datasets whose names HDF5 would parse as paths
# torch's dtype: (type in the file, label), if HDF5 has no such type
STORED = {
    "bfloat16": ("i2", "bfloat16"),
    "complex32": ("u4", "uint32"),
    **dict.fromkeys(
        ("float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz"), ("u1", "uint8")
    ),
    **dict.fromkeys(("float8_e5m2fnuz", "float4_e2m1fn_x2"), ("u1", "uint8")),
}
# types that every reader converts
NATIVE = {"bfloat16": ("bf16", "float32"), "float8_e5m2": ("e5m2", "float32")}
PLAIN_TYPES = {
    "bool": "bool",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "float16": "f2",
    "float32": "f4",
    "float64": "f8",
    "complex64": "c8",
    "complex128": "c16",
}
DTYPES = (*PLAIN_TYPES, *STORED)  # all that can be stored


def stored_type(dtype: str, native_floats: bool = False) -> str:
    """The HDF5 type that stores torch's `dtype`."""
    if dtype in PLAIN_TYPES:
        return PLAIN_TYPES[dtype]
    if native_floats and dtype in NATIVE:
        return NATIVE[dtype][0]
    return STORED[dtype][0]


def dataset_path(name: str) -> tuple[str, ...]:
    """The path of a leaf's dataset, given the leaf's name in the index."""
    return leaf_path(safe_name(name))


def leaf_path(name: str) -> tuple[str, ...]:
    """The path of a leaf's dataset.

    It is the leaf's name, or an escaped name in GROUP if HDF5 would parse the name as a path.
    """
    if "/" in name or name in ("", ".", "..", INDEX, GROUP):
        return (GROUP, "=" + quote(name, safe=""))
    return (name,)
