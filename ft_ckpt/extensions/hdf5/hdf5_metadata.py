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

    # a name, or a group and a name
    path: tuple[str, ...]
    # a name of numpy such as "f4", or "bool", "bf16" or "e5m2"
    type: str
    # None for a dataset without elements and shape
    shape: tuple[int, ...] | None
    # values are `Attribute`s
    attributes: Mapping[str, Any] = field(default_factory=dict)
    # offset of the first byte from the end of the header; None if it is not laid out
    start: int | None = None
    # alignment of the first byte in bytes
    alignment: int = 1
    # shape of the chunks that gzip compresses; () if the dataset is not compressed
    chunk: tuple[int, ...] = ()
