"""Reads checkpoints of orbax: folders of zarr arrays, or of an OCDBT store.

The metadata have the tree. tensorstore reads the arrays, a few rows at a time, and only from files
below the folder. Names of arrays are keys, joined with dots as by orbax. Nothing is executed.
"""

import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ft_ckpt.errors import ConfigError, CorruptError, damaged_input, listing, shown
from ft_ckpt.formats import ITEM_BYTES, Spec, ceil_div, dtype_of
from ft_ckpt.formats.files import FREE_BYTES, TensorFile
from ft_ckpt.messages import install_hint
from ft_ckpt.storage import is_inside, read_text
from ft_ckpt.storage.local import check_files_inside
from ft_ckpt.storage.places import Place, local_folder

_METADATA, _STORE = "_METADATA", "manifest.ocdbt"
_ARRAYS = ("jax.Array", "np.ndarray")  # types of values that are stored as arrays


def load_tensorstore() -> Any:
    """Import the tensorstore package. Raises ConfigError where it is not installed."""
    try:
        import tensorstore  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"orbax checkpoints need tensorstore ({error}); {install_hint('orbax')}"
        ) from error
    return tensorstore


class OrbaxFile(TensorFile):
    """The arrays of a checkpoint, read by tensorstore in ranges of rows."""

    def __init__(self, source: str, arrays: Mapping[str, Any], skipped: Sequence[str]) -> None:
        """Describe the `arrays` of tensorstore, by name; `skipped` names other values."""
        self.source = source
        self.folder = ExitStack()  # keeps the folder of the arrays until the file is closed
        self.arrays: dict[str, Any] = {}
        self.specs: dict[str, Spec] = {}
        self.skipped = list(skipped)
        for name, array in arrays.items():
            spec = Spec(name, tuple(array.shape), array.dtype.name)
            if spec.dtype not in ITEM_BYTES:
                self.skipped.append(f"{name}: {spec.dtype}, which torch has not")
                continue
            chunk_shape = array.chunk_layout.read_chunk.shape or ()
            chunk_bytes = math.prod(chunk_shape) * ITEM_BYTES[spec.dtype]
            if chunk_bytes > spec.size_bytes + FREE_BYTES:
                raise CorruptError(
                    f"{name}: chunks of {chunk_bytes:,} bytes in a tensor of {spec.size_bytes:,}"
                )
            self.specs[name], self.arrays[name] = spec, array

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the flat elements [start, stop) of tensor `name`: 1-D, on the CPU.

        Raises CorruptError for a damaged array.
        """
        spec = self.specs[name]
        dtype = dtype_of(spec.dtype)
        if stop is None:
            stop = spec.numel
        if stop <= start:
            return torch.empty(0, dtype=dtype, device="cpu")
        row = math.prod(spec.shape[1:])
        first = start // row
        last = ceil_div(stop, row)
        rows = self.arrays[name][first:last] if spec.shape else self.arrays[name]
        try:
            values = np.ascontiguousarray(rows.read().result()).reshape(-1)
        except ValueError as error:
            raise CorruptError(
                f"{self.source}: {name} cannot be read ({shown(error)}); use another copy"
            ) from error

        tensor = torch.from_numpy(values.view(np.uint8).copy()).view(dtype)
        return tensor[start - first * row : stop - first * row]

    def close(self) -> None:
        self.arrays = {}
        self.folder.close()


def orbax_folder(place: Place) -> Place | None:
    """Return the folder with the tree, or None if there is no such folder.

    It is `place` itself, or the only folder with a tree in it (a step with one item).
    """
    if place.folder.stat(_METADATA) is not None:
        return place
    items = [Place(place.folder, folder.name) for folder in place.folder.list_folder().folders]
    trees = [item for item in items if item.folder.stat(_METADATA) is not None]
    return trees[0] if len(trees) == 1 else None


def open_orbax(place: Place) -> OrbaxFile:
    """Open the arrays of the checkpoint folder `place`; other values are listed in `skipped`.

    Raises ConfigError where tensorstore is not installed, CorruptError when the checkpoint is
    damaged.
    """
    tensorstore = load_tensorstore()
    store = place.folder
    with damaged_input(f"{place.basename}: a checkpoint of orbax"), ExitStack() as stack:
        document = json.loads(read_text(store, _METADATA))
        shapes, skipped = _tree_values(document)
        check_files_inside(store)
        folder = stack.enter_context(local_folder(place))  # tensorstore needs a path
        driver = "zarr3" if document.get("use_zarr3") else "zarr"
        is_one_store = store.stat(_STORE) is not None

        # Without this setting orbax stores no chunks of zeros.
        has_all_chunks = bool(document.get("store_array_data_equal_to_fill_value"))
        futures = {}
        for name in shapes:
            spec = {
                "driver": driver,
                "fill_missing_data_reads": not has_all_chunks,
                "kvstore": _array_place(folder, name, is_one_store),
            }
            futures[name] = tensorstore.open(spec, read=True)

        arrays = {name: future.result() for name, future in futures.items()}
        skipped += _check_chunks(arrays, shapes, has_all_chunks)
        opened = OrbaxFile(place.basename, arrays, skipped)
        opened.folder = stack.pop_all()

    return opened


def _tree_values(document: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the names of all arrays in the tree, and all other values.

    Each array has the shape that one process wrote, or None.
    """
    arrays, skipped = dict[str, Any](), []
    for entry in document["tree_metadata"].values():
        name = ".".join(str(key["key"]) for key in entry["key_metadata"])
        kind = str(entry["value_metadata"]["value_type"])
        if kind not in _ARRAYS:
            skipped.append(f"{name}: {kind}")
        elif not is_inside(name):
            raise CorruptError(f"{name!r:.200}: an array outside of the folder")
        else:
            arrays[name] = entry["value_metadata"].get("write_shape")
    return arrays, skipped


def _check_chunks(
    arrays: Mapping[str, Any], written_shapes: Mapping[str, Any], has_all: bool
) -> list[str]:
    """Write a line for each array with missing chunks, which are read as zeros.

    Raises CorruptError listing arrays whose chunks do not match their shape; with `has_all`, also
    for missing chunks.
    """
    listed = {name: array.kvstore.list() for name, array in arrays.items()}
    wrong, missing = [], []
    for name, array in arrays.items():
        shape, steps = array.shape, array.chunk_layout.write_chunk.shape or ()
        grid = tuple(ceil_div(size, step) for size, step in zip(shape, steps, strict=True))
        count = math.prod(grid)
        keys = [key for key in listed[name].result() if not _is_description(key)]
        places = {_chunk_place(key, grid) for key in keys}
        stored = len(places - {None})
        if stored < len(keys):
            wrong.append(f"{name}: {len(keys) - stored} files that are none of its {count} chunks")
        if stored > count or (has_all and stored < count):
            wrong.append(
                f"{name}: {stored} chunks are stored, expected {count} of shape {list(shape)}"
            )
        elif stored < count:
            missing.append(
                f"{name}: {count - stored} of {count} chunks not stored, as if "
                "zeros, which are read"
            )

        written_shape = written_shapes[name]
        if written_shape is not None and not _divides(written_shape, shape):
            wrong.append(f"{name}: of shape {list(shape)}, written in parts of {written_shape}")

    if wrong:
        raise CorruptError(f"{listing(wrong)}; use another copy")
    return missing


def _is_description(key: bytes) -> bool:
    return key.rpartition(b"/")[2].startswith((b".z", b"zarr.json"))


def _divides(part: Sequence[int], shape: Sequence[int]) -> bool:
    """Check whether an array of `shape` consists of parts of the shape `part`."""
    if len(part) != len(shape):
        return False
    return all(size % max(1, step) == 0 for size, step in zip(shape, part, strict=True))


def _chunk_place(key: bytes, grid: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the grid index of the chunk stored under `key` ("0.1", "0/1", "c/0/1").

    Returns None for other keys.
    """
    text = key.decode("utf-8", "replace").removeprefix("c").lstrip("./")
    numbers = re.split(r"[./]", text) if text else []
    if not all(number.isdecimal() and (number == "0" or number[0] != "0") for number in numbers):
        return None
    place = tuple(map(int, numbers)) if grid else ()  # zarr 2 stores a scalar as "0"
    fits = len(place) == len(grid) and all(map(operator.lt, place, grid))
    return place if fits else None


def _array_place(folder: Path, name: str, is_one_store: bool) -> dict[str, Any]:
    where = f"{folder.absolute()}/"
    if is_one_store:
        return {"driver": "ocdbt", "base": {"driver": "file", "path": where}, "path": f"{name}/"}
    return {"driver": "file", "path": f"{where}{name}/"}
