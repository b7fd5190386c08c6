"""Describes the datasets and attributes of an HDF5 file before it is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096
Attribute = str | bool | int | float | bytes | tuple[str, ...] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Dataset:
    """One dataset: path, type, shape, attributes, and where its bytes lie."""

    path: tuple[str, ...]  # name, or group and name
    type: str  # "f4" and its like as numpy names them, "bool", "bf16" or "e5m2"
    shape: tuple[int, ...] | None  # None: no elements and no shape
    attributes: Mapping[str, Any] = field(default_factory=dict)  # values are `Attribute`s
    start: int | None = None  # offset of its bytes from the end of the header; None: not laid out
    alignment: int = 1  # of its first byte, in bytes
    chunk: tuple[int, ...] = ()  # shape of a chunk, compressed by gzip; empty: not compressed
