"""Names and dtypes in Cerebras checkpoints, and how they are stored in HDF5."""

from urllib.parse import quote

from ft_ckpt.formats.trees import safe_name

INDEX = "__ft_index__"
# This group has the datasets whose names HDF5 would parse as paths.
ESCAPED_GROUP = "__ft__"
# dtype of torch that HDF5 lacks -> (HDF5 type of its bits, dtype that Cerebras reads)
EMULATED_TYPES = {
    "bfloat16": ("i2", "bfloat16"),
    "complex32": ("u4", "uint32"),
    **dict.fromkeys(
        ("float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz"), ("u1", "uint8")
    ),
    **dict.fromkeys(("float8_e5m2fnuz", "float4_e2m1fn_x2"), ("u1", "uint8")),
}
# HDF5 can describe these floats, so that every reader converts them:
# dtype of torch -> (HDF5 type, dtype that Cerebras reads)
NATIVE_FLOAT_TYPES = {"bfloat16": ("bf16", "float32"), "float8_e5m2": ("e5m2", "float32")}
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
STORABLE_DTYPES = (*PLAIN_TYPES, *EMULATED_TYPES)


def stored_type(dtype: str, native_floats: bool = False) -> str:
    """Return the HDF5 type that stores torch's `dtype`."""
    if dtype in PLAIN_TYPES:
        return PLAIN_TYPES[dtype]
    if native_floats and dtype in NATIVE_FLOAT_TYPES:
        return NATIVE_FLOAT_TYPES[dtype][0]
    return EMULATED_TYPES[dtype][0]


def dataset_path(name: str) -> tuple[str, ...]:
    """Return the path of a leaf's dataset, given the leaf's name in the index."""
    return leaf_path(safe_name(name))


def leaf_path(name: str) -> tuple[str, ...]:
    """Return the path of a leaf's dataset.

    The path is the leaf's name, or an escaped name in ESCAPED_GROUP if HDF5 would parse the name
    as a path.
    """
    if "/" in name or name in ("", ".", "..", INDEX, ESCAPED_GROUP):
        return (ESCAPED_GROUP, "=" + quote(name, safe=""))
    return (name,)
