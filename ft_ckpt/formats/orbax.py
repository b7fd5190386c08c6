"""Reads checkpoints of orbax, JAX's: a folder with `_METADATA` and arrays in zarr, most often inside one OCDBT store.

The tree is in the metadata; the arrays are read by tensorstore, a few rows at a time, and only from files below the
folder. Names are the keys joined by dots, as orbax itself names its arrays. Nothing of it is run.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ft_ckpt.errors import ConfigError, CorruptError, damaged_input, listing, shown
from ft_ckpt.formats.layout import ITEM_BYTES, Spec
from ft_ckpt.formats.raw_file import FREE_BYTES
from ft_ckpt.storage.local_copy import check_files_inside, local_folder
from ft_ckpt.storage.paths import is_inside
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.store import read_text

_METADATA, _STORE = "_METADATA", "manifest.ocdbt"
_ARRAYS = ("jax.Array", "np.ndarray")  # types of values that are stored as arrays


def load_tensorstore() -> Any:
    """The tensorstore package. Raises ConfigError where it is not installed."""
    try:
        import tensorstore  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(f"orbax checkpoints need tensorstore ({error}); pip install 'ft_ckpt[orbax]'") from error
    return tensorstore


class OrbaxFile:
    """The arrays of a checkpoint, rows of them read by tensorstore."""

    def __init__(self, source: str, arrays: Mapping[str, Any], skipped: list[str]) -> None:
        self.source, self.skipped, self.room = source, skipped, ExitStack()
        self.arrays: dict[str, Any] = {}
        self.specs: dict[str, Spec] = {}
        for name, array in arrays.items():
            spec = Spec(name, tuple(array.shape), array.dtype.name)
            if spec.dtype not in ITEM_BYTES:
                self.skipped.append(f"{name}: {spec.dtype}, which torch has not")
                continue
            chunk_bytes = math.prod(array.chunk_layout.read_chunk.shape or ()) * ITEM_BYTES[spec.dtype]
            if chunk_bytes > spec.size_bytes + FREE_BYTES:
                raise CorruptError(f"{name}: chunks of {chunk_bytes:,} bytes in a tensor of {spec.size_bytes:,}")
            self.specs[name], self.arrays[name] = spec, array

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name`: 1-D, on the CPU. Raises CorruptError for what is damaged."""
        spec = self.specs[name]
        stop, dtype = spec.numel if stop is None else stop, getattr(torch, spec.dtype)
        if stop <= start:
            return torch.empty(0, dtype=dtype)
        row = math.prod(spec.shape[1:])
        first = start // row
        part = self.arrays[name][first : -(-stop // row)] if spec.shape else self.arrays[name]
        try:
            found = np.ascontiguousarray(part.read().result()).reshape(-1)
        except ValueError as error:
            raise CorruptError(f"{self.source}: {name} cannot be read ({shown(error)}); use another copy") from error
        return torch.from_numpy(found.view(np.uint8).copy()).view(dtype)[start - first * row : stop - first * row]

    def close(self) -> None:
        """Drop what is open of the arrays."""
        self.arrays = {}
        self.room.close()


def orbax_folder(place: Place) -> Place | None:
    """The folder of the tree: `place`, or the one in it where a step has one item; None when there is none."""
    inner = [Place(place.folder, each.name) for each in place.folder.list_folder().folders]
    found = [one for one in (place, *inner) if one.folder.stat(_METADATA) is not None]
    return found[0] if found[:1] == [place] or len(found) == 1 else None


def open_orbax(place: Place) -> OrbaxFile:
    """The arrays of the checkpoint folder `place`; what is no array is named in `skipped`.

    Raises ConfigError where tensorstore is not installed, CorruptError when the checkpoint is damaged.
    """
    tensorstore, store = load_tensorstore(), place.folder
    with damaged_input(f"{place.last_step}: a checkpoint of orbax"), ExitStack() as opening:
        document = json.loads(read_text(store, _METADATA))
        values, skipped = _tree_values(document)
        check_files_inside(store)
        folder = opening.enter_context(local_folder(place))  # tensorstore takes no other bytes
        driver, in_store = "zarr3" if document.get("use_zarr3") else "zarr", store.stat(_STORE) is not None
        has_all = bool(document.get("store_array_data_equal_to_fill_value"))  # else chunks of zeros were left out
        common = {"driver": driver, "fill_missing_data_reads": not has_all}
        coming = {
            name: tensorstore.open({**common, "kvstore": _array_place(folder, name, in_store)}, read=True)
            for name in values
        }
        arrays = {name: future.result() for name, future in coming.items()}
        skipped += _check_chunks(arrays, values, has_all)
        found = OrbaxFile(place.last_step, arrays, skipped)
        found.room = opening.pop_all()
    return found


def _tree_values(document: Any) -> tuple[dict[str, Any], list[str]]:
    """The names of all arrays in the tree, each with the shape that one process wrote or None, and all other values."""
    arrays, skipped = dict[str, Any](), []
    for entry in document["tree_metadata"].values():
        name = ".".join(str(key["key"]) for key in entry["key_metadata"])
        kind = str(entry["value_metadata"]["value_type"])
        if kind not in _ARRAYS:
            skipped.append(f"{name}: {kind}")
        elif not is_inside(name):
            raise CorruptError(f"{name!r:.200}: an array that would lie out of the folder")
        else:
            arrays[name] = entry["value_metadata"].get("write_shape")
    return arrays, skipped


def _check_chunks(arrays: Mapping[str, Any], written: Mapping[str, Any], has_all: bool) -> list[str]:
    """A line for each array without some of its chunks, which read as zeros.

    Raises CorruptError listing arrays whose chunks are not those of their shape; with `has_all`, where any is missing.
    """
    listed = {name: array.kvstore.list() for name, array in arrays.items()}
    wrong, left_out = [], []
    for name, array in arrays.items():
        shape, steps, part = array.shape, array.chunk_layout.write_chunk.shape or (), written[name]
        count = math.prod(-(-size // step) for size, step in zip(shape, steps, strict=True))
        stored = sum(not key.rpartition(b"/")[2].startswith((b".z", b"zarr.json")) for key in listed[name].result())
        if stored > count or (has_all and stored < count):
            wrong.append(f"{name}: {stored} chunks are stored, expected {count} of shape {list(shape)}")
        elif stored < count:
            left_out.append(f"{name}: {count - stored} of {count} chunks not stored, as if zeros, which are read")
        if part is not None and not _fits(shape, part):
            wrong.append(f"{name}: of shape {list(shape)}, written in parts of {part}")
    if wrong:
        raise CorruptError(f"{listing(wrong)}; use another copy")
    return left_out


def _fits(shape: Sequence[int], part: Sequence[int]) -> bool:
    """Whether an array can be made of parts of one shape."""
    same_rank = len(part) == len(shape)
    return same_rank and all(size % max(1, step) == 0 for size, step in zip(shape, part, strict=True))


def _array_place(folder: Path, name: str, in_store: bool) -> dict[str, Any]:
    where = f"{folder.absolute()}/"
    if in_store:
        return {"driver": "ocdbt", "base": {"driver": "file", "path": where}, "path": f"{name}/"}
    return {"driver": "file", "path": f"{where}{name}/"}
