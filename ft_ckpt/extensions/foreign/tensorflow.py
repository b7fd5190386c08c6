"""TensorFlow's checkpoints of version 2 ("bundles"): an index and data files under one prefix.

TensorFlow itself writes and reads them, on the CPU and a few tensors at a time: shards are saved
one by one, tensors larger than a shard as slices if their dtype allows, and merged by their indexes
alone. `tf.train.load_checkpoint` reads the result.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ft_ckpt.formats import Spec, TensorFile, read_in_steps
from ft_ckpt.messages import install_extra
from ft_ckpt.storage import (
    LocalStore,
    Place,
    Store,
    check_files_inside,
    check_prefix_inside,
    is_inside,
    local_folder,
    read_text,
)

PREFIX = "model.ckpt"  # of the files in a folder that we write
_INDEX = ".index"  # suffix of a bundle's index; no other file has it
# in a folder of several checkpoints that we write: the prefix of each tensor
SHARDS = "shards.json"
STATE = "checkpoint"  # the file by which TensorFlow finds the newest prefix in a folder
SHARD_BYTES = 96 << 20
DTYPES = {
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *(
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e5m2",
        "float8_e4m3fn",
    ),
}
_UNSLICED = {
    "float16",
    "uint16",
    "uint32",
    "uint64",
    "float8_e5m2",
    "float8_e4m3fn",
}  # TensorFlow reads and writes them whole
Read = Callable[[str, int, int], Tensor]
Rows = tuple[int, int] | None  # of the first dimension, stop exclusive; None: the whole tensor


def load_tensorflow() -> Any:
    """The tensorflow package, its log quiet. Raises ConfigError where it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        remedy = install_extra("tensorflow")
        raise ConfigError(f"TensorFlow checkpoints need tensorflow ({error}); {remedy}") from error
    return tensorflow


def bundle_prefixes(place: Place) -> list[Place]:
    """The prefixes at `place`: itself, the newest by the folder's STATE file, or all in the
    folder.
    """
    if place.name and place.store.stat(f"{place.name}{_INDEX}") is not None:
        return [place]
    store = place.folder
    names = [each.name for each in store.list_folder().objects]
    if STATE in names:
        text = read_text(store, STATE, errors="replace")
        named = re.search(r'^model_checkpoint_path: "(.+)"', text, re.MULTILINE)
        if named and is_inside(named[1]) and store.stat(f"{named[1]}{_INDEX}") is not None:
            return [Place(store, named[1])]
    return [
        Place(store, name.removesuffix(_INDEX))
        for name in names
        if ".ckpt" in name and name.endswith(_INDEX)
    ]


class TensorFlowFile:
    """The tensors of a bundle, read by TensorFlow in ranges of rows."""

    def __init__(self, prefix: Place) -> None:
        self.tf, self.source, self.room = load_tensorflow(), prefix.basename, ExitStack()
        above, _, last = prefix.name.rpartition("/")
        folder = Place(prefix.store, above)
        check_prefix_inside(prefix.store, prefix.name)
        # TensorFlow needs a path
        copied = local_folder(folder, lambda name: name.startswith(f"{last}."))
        self.prefix = str(self.room.enter_context(copied) / last)
        try:
            reader = self.tf.train.load_checkpoint(self.prefix)
        except (self.tf.errors.OpError, ValueError) as error:
            self.room.close()
            raise CorruptError(
                f"{self.source}: TensorFlow cannot read it ({error}); use another copy"
            ) from error
        self.specs: dict[str, Spec] = {}
        self.ties: dict[str, str] = {}
        self.skipped: list[str] = []
        self.held: tuple[str | None, Tensor] = (None, torch.empty(0, device="cpu"))
        shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        for name in sorted(shapes):
            if types[name].name in DTYPES:
                self.specs[name] = Spec(name, tuple(shapes[name]), types[name].name)
            else:
                self.skipped.append(f"{name}: {types[name].name}")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name`: 1-D, on the CPU.

        Raises CorruptError when bytes differ.
        """
        spec = self.specs[name]
        stop = spec.numel if stop is None else min(stop, spec.numel)
        if stop <= start:
            return torch.empty(0, dtype=getattr(torch, spec.dtype), device="cpu")
        if not spec.shape or spec.dtype in _UNSLICED:
            if self.held[0] != name:
                self.held = (
                    None,
                    torch.empty(0, device="cpu"),
                )  # one at a time: the last is freed before the next is read
                self.held = (name, self._restore_tensor(spec, ""))
            return self.held[1][start:stop]
        row = math.prod(spec.shape[1:])
        first, last = start // row, -(-stop // row)
        return self._restore_tensor(spec, _slice_text(spec.shape, first, last))[
            start - first * row : stop - first * row
        ]

    def close(self) -> None:
        self.held = (None, torch.empty(0, device="cpu"))
        self.room.close()

    def _restore_tensor(self, spec: Spec, part: str) -> Tensor:
        try:
            with self.tf.device("CPU:0"):
                (found,) = self.tf.raw_ops.RestoreV2(
                    prefix=self.prefix,
                    tensor_names=[spec.name],
                    shape_and_slices=[part],
                    dtypes=[self.tf.as_dtype(spec.dtype)],
                )
        except self.tf.errors.OpError as error:
            raise CorruptError(
                f"{self.source}: {spec.name} cannot be read ({error}); use another copy"
            ) from error
        data = found.numpy().copy().reshape(-1)  # TensorFlow's array is read-only
        return torch.from_numpy(data.view("uint8")).view(getattr(torch, spec.dtype))


class _ShardedBundles:
    """The tensors of several bundles in one folder."""

    def __init__(self, store: Store, places: Mapping[str, str]) -> None:
        wrong = sorted({prefix for prefix in places.values() if not is_inside(prefix)})
        if wrong:
            raise CorruptError(
                f"{SHARDS}: {listing(wrong, ', ')}: out of the folder; use another copy"
            )
        files = {
            prefix: TensorFlowFile(Place(store, prefix))
            for prefix in dict.fromkeys(places.values())
        }
        lost = [name for name, prefix in places.items() if name not in files[prefix].specs]
        if lost:
            raise CorruptError(
                f"{SHARDS}: {listing(lost, ', ')}: in no shard; the folder is incomplete"
            )
        self.files = {name: files[prefix] for name, prefix in places.items()}
        self.specs = {name: file.specs[name] for name, file in self.files.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.files[name].read(name, start, stop)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def open_tensorflow(place: Place) -> TensorFile:
    """The tensors of the checkpoint with prefix `place`, or of the newest or of all shards in the
    folder `place`.

    Raises ConfigError where TensorFlow is not installed, LoadError for a folder of several
    checkpoints that does not name the newest, CorruptError when there is no checkpoint or it is
    damaged.
    """
    check_files_inside(place.folder, [SHARDS, STATE])
    if place.folder.stat(SHARDS) is not None:
        with damaged_input(f"{place}: {SHARDS}"):
            return _ShardedBundles(
                place.folder, json.loads(read_text(place.folder, SHARDS))["weight_map"]
            )
    prefixes = bundle_prefixes(place)
    if not prefixes:
        raise CorruptError(
            f"{place}: no TensorFlow checkpoint there; expected {PREFIX}.index or another prefix's"
        )
    if len(prefixes) > 1:
        names = listing([one.basename for one in prefixes], ", ")
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
    folder: Path, specs: Sequence[Spec], read: Read, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `specs` as a bundle into `folder`; `read(name, start, stop)` gives the flat elements of
    a tensor.

    Needs about twice `shard_bytes` of memory (twice a row, or a tensor of a dtype in `_UNSLICED`,
    if that is more). Raises SelectionError as `check_tensorflow_types` does.
    """
    check_tensorflow_types(specs)
    _write_bundle(folder, PREFIX, specs, read, shard_bytes)
    text = f'model_checkpoint_path: "{PREFIX}"\nall_model_checkpoint_paths: "{PREFIX}"\n'
    LocalStore(folder).write(STATE, text.encode())


def write_tensorflow_shards(
    folder: Path, shards: Mapping[str, Sequence[Spec]], read: Read, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the tensors of each shard as a bundle of its own, `NAME.ckpt`, and a table of them all.

    A shard can be loaded by its prefix alone. Needs memory as `write_tensorflow` does.
    """
    places: dict[str, str] = {}
    for name, specs in shards.items():
        check_tensorflow_types(specs)
        _write_bundle(folder, f"{name}.ckpt", specs, read, shard_bytes)
        places |= {spec.name: f"{name}.ckpt" for spec in specs}
    LocalStore(folder).write(SHARDS, f"{json.dumps({'weight_map': places}, indent=2)}\n".encode())


def _write_bundle(
    folder: Path, prefix: str, specs: Sequence[Spec], read: Read, shard_bytes: int
) -> None:
    tf = load_tensorflow()
    try:
        _write_parts(tf, folder, prefix, specs, read, shard_bytes)
    except tf.errors.OpError as error:
        raise TargetError(
            f"{folder}: TensorFlow cannot write it ({shown(error)}); choose another path"
        ) from error


def _write_parts(
    tf: Any, folder: Path, prefix: str, specs: Sequence[Spec], read: Read, shard_bytes: int
) -> None:
    shards: list[str] = []
    for shard in _grouped_parts(specs, shard_bytes):
        shards.append(str(folder / f".shard-{len(shards):05d}" / "part"))
        parts = [_read_array(tf, spec, rows, read) for spec, rows in shard]
        places = ["" if rows is None else _slice_text(spec.shape, *rows) for spec, rows in shard]
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=shards[-1],
                tensor_names=[s.name for s, _ in shard],
                shape_and_slices=places,
                tensors=parts,
            )
        del parts
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=shards,
            destination_prefix=str(folder / prefix),
            delete_old_dirs=True,
        )


def _read_array(tf: Any, spec: Spec, rows: Rows, read: Read) -> Any:
    first, last = rows or (0, spec.shape[0] if spec.shape else 1)
    row = math.prod(spec.shape[1:])
    data = read_in_steps(read, spec.name, first * row, last * row, getattr(torch, spec.dtype))
    shape = (last - first, *spec.shape[1:]) if spec.shape else ()
    array = data.view(torch.uint8).numpy().view(tf.as_dtype(spec.dtype).as_numpy_dtype)
    return tf.constant(array.reshape(shape))


def _grouped_parts(specs: Sequence[Spec], most: int) -> Iterator[list[tuple[Spec, Rows]]]:
    shard: list[tuple[Spec, Rows]] = []
    size = 0
    for spec, rows, part_bytes in _sliced_parts(specs, most):
        if shard and size + part_bytes > most:
            yield shard
            shard, size = [], 0
        shard.append((spec, rows))
        size += part_bytes
    if shard:
        yield shard


def _sliced_parts(specs: Sequence[Spec], most: int) -> Iterator[tuple[Spec, Rows, int]]:
    """Every tensor whole, or as slices of rows none larger than `most` bytes (one row at least)."""
    for spec in specs:
        if (
            spec.size_bytes <= most
            or not spec.shape
            or spec.shape[0] == 1
            or spec.dtype in _UNSLICED
        ):
            yield spec, None, spec.size_bytes
            continue
        row = spec.size_bytes // spec.shape[0]
        step = max(1, most // row)
        for first in range(0, spec.shape[0], step):
            last = min(first + step, spec.shape[0])
            yield spec, (first, last), (last - first) * row


def _slice_text(shape: Sequence[int], first: int, last: int) -> str:
    """TensorFlow's notation for rows [first, last) of a tensor."""
    rest = ":".join(["-"] * (len(shape) - 1))
    return f"{' '.join(map(str, shape))} {first},{last - first}{':' + rest if rest else ''}"
