"""Reads and writes TensorFlow's checkpoints of version 2 ("bundles").

A bundle is an index and data files under one prefix. TensorFlow itself reads and writes it, on the
CPU and a few tensors at a time. Shards are saved one by one. A tensor larger than a shard is saved
in slices of rows, if its dtype allows that. Then the shards are merged, which only changes their
indexes. `tf.train.load_checkpoint` reads the result.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    LoadError,
    SelectionError,
    TargetError,
    damaged_input,
    listing,
    shown,
)
from ft_ckpt.formats import ReadRange, Spec, ceil_div, dtype_of
from ft_ckpt.formats.files import StoredTensor, TensorFile, TensorView
from ft_ckpt.messages import install_hint
from ft_ckpt.storage import Store, is_inside, read_text
from ft_ckpt.storage.local import LocalStore, check_files_inside, check_prefix_inside
from ft_ckpt.storage.places import Place, local_folder

# prefix of the files in a folder that ft_ckpt writes
PREFIX = "model.ckpt"
# suffix of a bundle's index; no other file has it
_INDEX = ".index"
# If ft_ckpt writes several checkpoints into a folder, this file maps each tensor to its prefix.
SHARDS = "shards.json"
# the file by which TensorFlow finds the newest prefix in a folder
STATE = "checkpoint"
SHARD_BYTES = 96 << 20
# bytes of one read from the source of a conversion
_READ_BYTES = 16 << 20
DTYPES = {
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e5m2", "float8_e4m3fn"),
}
# TensorFlow cannot read or write slices of tensors of these dtypes.
_UNSLICED = {"float16", "uint16", "uint32", "uint64", "float8_e5m2", "float8_e4m3fn"}
_NOTHING: tuple[str | None, Tensor] = (None, torch.empty(0, device="cpu"))
# Rows [first, last) of the first dimension. None stands for the whole tensor.
Rows = tuple[int, int] | None


def load_tensorflow() -> Any:
    """Import the tensorflow package with a quiet log.

    Raises ConfigError where it is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        remedy = install_hint("tensorflow")
        raise ConfigError(f"TensorFlow checkpoints need tensorflow ({error}); {remedy}") from error
    return tensorflow


def bundle_prefixes(place: Place) -> list[Place]:
    """Return the prefixes of checkpoints at `place`.

    If `place` is a prefix itself, return it alone. If it is a folder, return the newest prefix in
    it, which its STATE file names. If the file or that prefix is missing, return all prefixes.
    """
    if place.name and place.store.stat(f"{place.name}{_INDEX}") is not None:
        return [place]
    store = place.folder
    names = [stored.name for stored in store.list_folder().objects]
    if STATE in names:
        text = read_text(store, STATE, errors="replace")
        match = re.search(r'^model_checkpoint_path: "(.+)"', text, re.MULTILINE)
        if match and is_inside(match[1]) and store.stat(f"{match[1]}{_INDEX}") is not None:
            return [Place(store, match[1])]
    indexes = [name for name in names if ".ckpt" in name and name.endswith(_INDEX)]
    return [Place(store, name.removesuffix(_INDEX)) for name in indexes]


class TensorFlowFile(TensorFile):
    """The tensors of a bundle, read by TensorFlow in ranges of rows."""

    def __init__(self, prefix: Place) -> None:
        self.tf, self.source = load_tensorflow(), prefix.basename
        self.folder = ExitStack()
        above, _, last = prefix.name.rpartition("/")
        folder = Place(prefix.store, above)
        check_prefix_inside(prefix.store, prefix.name)

        # TensorFlow needs a path
        copied = local_folder(folder, lambda name: name.startswith(f"{last}."))
        self.prefix = str(self.folder.enter_context(copied) / last)
        try:
            reader = self.tf.train.load_checkpoint(self.prefix)
        except (self.tf.errors.OpError, ValueError) as error:
            self.folder.close()
            raise CorruptError(
                f"{self.source}: TensorFlow cannot read it ({error}); use another copy"
            ) from error

        self.specs: dict[str, Spec] = {}
        self.skipped: list[str] = []
        self._whole = _NOTHING  # the last tensor that was read as a whole
        shapes = reader.get_variable_to_shape_map()
        types = reader.get_variable_to_dtype_map()
        for name in sorted(shapes):
            if types[name].name in DTYPES:
                self.specs[name] = Spec(name, tuple(shapes[name]), types[name].name)
            else:
                self.skipped.append(f"{name}: {types[name].name}")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the flat elements [start, stop) of tensor `name`: 1-D, on the CPU.

        Raises CorruptError when bytes differ.
        """
        spec = self.specs[name]
        stop = spec.numel if stop is None else min(stop, spec.numel)
        if stop <= start:
            return torch.empty(0, dtype=dtype_of(spec.dtype), device="cpu")
        if not spec.shape or spec.dtype in _UNSLICED:
            if self._whole[0] != name:
                self._whole = _NOTHING  # frees the last tensor before the next one is read
                self._whole = (name, self._restore_tensor(spec, ""))
            return self._whole[1][start:stop]

        row = math.prod(spec.shape[1:])
        first = start // row
        last = ceil_div(stop, row)
        rows = self._restore_tensor(spec, _slice_text(spec.shape, first, last))
        return rows[start - first * row : stop - first * row]

    def close(self) -> None:
        self._whole = _NOTHING
        self.folder.close()

    def _restore_tensor(self, spec: Spec, part: str) -> Tensor:
        try:
            with self.tf.device("CPU:0"):
                (restored,) = self.tf.raw_ops.RestoreV2(
                    prefix=self.prefix,
                    tensor_names=[spec.name],
                    shape_and_slices=[part],
                    dtypes=[self.tf.as_dtype(spec.dtype)],
                )
        except self.tf.errors.OpError as error:
            raise CorruptError(
                f"{self.source}: {spec.name} cannot be read ({error}); use another copy"
            ) from error

        data = restored.numpy().copy().reshape(-1)  # TensorFlow's array is read-only
        return torch.from_numpy(data.view("uint8")).view(dtype_of(spec.dtype))


def _open_sharded(store: Store, prefixes: Mapping[str, str]) -> TensorView:
    """Open the tensors of several bundles in one folder.

    `prefixes` maps a tensor to the prefix of its bundle.
    """
    outside = [prefix for prefix in prefixes.values() if not is_inside(prefix)]
    if outside:
        raise CorruptError(
            f"{SHARDS}: {listing(sorted(set(outside)), ', ')}: out of the folder; use another copy"
        )

    files: dict[str, TensorFlowFile] = {}
    for prefix in dict.fromkeys(prefixes.values()):
        files[prefix] = TensorFlowFile(Place(store, prefix))
    missing = [name for name, prefix in prefixes.items() if name not in files[prefix].specs]
    if missing:
        raise CorruptError(
            f"{SHARDS}: {listing(missing, ', ')}: in no shard; the folder is incomplete"
        )

    sources = {name: StoredTensor(files[prefix], name) for name, prefix in prefixes.items()}
    return TensorView(files.values(), sources)


def open_tensorflow(place: Place) -> TensorFile:
    """Open the tensors of a TensorFlow checkpoint.

    `place` is its prefix, or a folder, of which the newest checkpoint or all shards are opened.
    Raises ConfigError where TensorFlow is not installed, LoadError for a folder of several
    checkpoints that does not name the newest, CorruptError when there is no checkpoint or it is
    damaged.
    """
    check_files_inside(place.folder, [SHARDS, STATE])
    if place.folder.stat(SHARDS) is not None:
        with damaged_input(f"{place}: {SHARDS}"):
            table = json.loads(read_text(place.folder, SHARDS))
            return _open_sharded(place.folder, table["weight_map"])

    prefixes = bundle_prefixes(place)
    if not prefixes:
        raise CorruptError(
            f"{place}: no TensorFlow checkpoint there; expected {PREFIX}.index or another prefix's"
        )

    if len(prefixes) > 1:
        names = listing([prefix.basename for prefix in prefixes], ", ")
        raise LoadError(
            f"{place}: holds {names}, and no file {STATE!r} or {SHARDS} that "
            "says which to read; name one"
        )

    return TensorFlowFile(prefixes[0])


def check_tensorflow_types(specs: Iterable[Spec]) -> None:
    """Raise SelectionError naming tensors of dtypes that TensorFlow does not have."""
    foreign = [f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in DTYPES]
    if foreign:
        raise SelectionError(
            f"{listing(foreign, ', ')}: TensorFlow has no such type; convert it with --dtype"
        )


def write_tensorflow(
    folder: Path, specs: Sequence[Spec], read: ReadRange, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `specs` as a bundle into `folder`.

    `read(name, start, stop)` gives the flat elements of a tensor. Needs about twice `shard_bytes`
    of memory (twice a row, or a tensor of a dtype in `_UNSLICED`, if that is more). Raises
    SelectionError as `check_tensorflow_types` does.
    """
    check_tensorflow_types(specs)
    _write_bundle(folder, PREFIX, specs, read, shard_bytes)
    text = f'model_checkpoint_path: "{PREFIX}"\nall_model_checkpoint_paths: "{PREFIX}"\n'
    LocalStore(folder).write(STATE, text.encode())


def write_tensorflow_shards(
    folder: Path,
    shards: Mapping[str, Sequence[Spec]],
    read: ReadRange,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the tensors of each shard as a bundle of its own, `NAME.ckpt`, and the file SHARDS.

    A shard can be loaded by its prefix alone. Needs memory as `write_tensorflow` does.
    """
    prefixes: dict[str, str] = {}  # tensor -> prefix
    for name, specs in shards.items():
        check_tensorflow_types(specs)
        prefix = f"{name}.ckpt"
        _write_bundle(folder, prefix, specs, read, shard_bytes)
        for spec in specs:
            prefixes[spec.name] = prefix
    text = json.dumps({"weight_map": prefixes}, indent=2)
    LocalStore(folder).write(SHARDS, f"{text}\n".encode())


def _write_bundle(
    folder: Path, prefix: str, specs: Sequence[Spec], read: ReadRange, shard_bytes: int
) -> None:
    tf = load_tensorflow()
    try:
        _write_parts(tf, folder, prefix, specs, read, shard_bytes)
    except tf.errors.OpError as error:
        raise TargetError(
            f"{folder}: TensorFlow cannot write it ({shown(error)}); choose another path"
        ) from error


def _write_parts(
    tf: Any, folder: Path, prefix: str, specs: Sequence[Spec], read: ReadRange, shard_bytes: int
) -> None:
    prefixes: list[str] = []
    for shard in _grouped_parts(specs, shard_bytes):
        prefixes.append(str(folder / f".shard-{len(prefixes):05d}" / "part"))
        arrays, slices = [], []
        for spec, rows in shard:
            arrays.append(_read_array(tf, spec, rows, read))
            slices.append("" if rows is None else _slice_text(spec.shape, *rows))
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=prefixes[-1],
                tensor_names=[spec.name for spec, _ in shard],
                shape_and_slices=slices,
                tensors=arrays,
            )
        del arrays  # before those of the next shard are read

    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes,
            destination_prefix=str(folder / prefix),
            delete_old_dirs=True,
        )


def _read_array(tf: Any, spec: Spec, rows: Rows, read: ReadRange) -> Any:
    first, last = rows or (0, spec.shape[0] if spec.shape else 1)
    row = math.prod(spec.shape[1:])
    data = _read_in_steps(read, spec, first * row, last * row)
    shape = (last - first, *spec.shape[1:]) if spec.shape else ()
    array = data.view(torch.uint8).numpy().view(tf.as_dtype(spec.dtype).as_numpy_dtype)
    return tf.constant(array.reshape(shape))


def _read_in_steps(read: ReadRange, spec: Spec, start: int, stop: int) -> Tensor:
    """Read flat elements [start, stop) of a tensor into new memory."""
    dtype = dtype_of(spec.dtype)
    data = torch.empty(stop - start, dtype=dtype, device="cpu")
    step = _READ_BYTES // dtype.itemsize
    for low in range(start, stop, step):
        high = min(low + step, stop)
        data[low - start : high - start] = read(spec.name, low, high)
    return data


def _grouped_parts(specs: Sequence[Spec], max_bytes: int) -> Iterator[list[tuple[Spec, Rows]]]:
    """Yield the tensors and slices of each shard.

    A shard has at most `max_bytes`, unless it has only one tensor or slice.
    """
    shard: list[tuple[Spec, Rows]] = []
    size = 0
    for spec, rows, part_bytes in _sliced_parts(specs, max_bytes):
        if shard and size + part_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append((spec, rows))
        size += part_bytes
    if shard:
        yield shard


def _sliced_parts(specs: Sequence[Spec], max_bytes: int) -> Iterator[tuple[Spec, Rows, int]]:
    """Yield each tensor, or the slices of a tensor that is larger than `max_bytes`, with its size.

    A slice has at most `max_bytes`, or one row. Some tensors cannot be sliced.
    """
    for spec in specs:
        can_slice = bool(spec.shape) and spec.shape[0] != 1 and spec.dtype not in _UNSLICED
        if spec.size_bytes <= max_bytes or not can_slice:
            yield spec, None, spec.size_bytes
            continue
        row = spec.size_bytes // spec.shape[0]
        step = max(1, max_bytes // row)
        for first in range(0, spec.shape[0], step):
            last = min(first + step, spec.shape[0])
            yield spec, (first, last), (last - first) * row


def _slice_text(shape: Sequence[int], first: int, last: int) -> str:
    """Return TensorFlow's notation for rows [first, last) of a tensor.

    For example, rows [2, 5) of a tensor of shape (8, 4) are "8 4 2,3:-".
    """
    rest = ":".join(["-"] * (len(shape) - 1))
    return f"{' '.join(map(str, shape))} {first},{last - first}{':' + rest if rest else ''}"
