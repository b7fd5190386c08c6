"""Saves and loads any state in one file: `save` and `load`, used like torch.save and torch.load."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ft_ckpt.checkpoint.checks import listing_manifest
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.devices import host_pieces, is_accelerator
from ft_ckpt.errors import ConfigError, CorruptError, damaged_input, explained
from ft_ckpt.extensions.tools.lazy_tensor import LazyTensor, lazy_tensor
from ft_ckpt.formats import (
    FilePlan,
    LaidOutObjects,
    Layout,
    LibraryObjects,
    Spec,
    TensorFormat,
    detect_format,
    format_by_suffix,
    format_named,
    tensor_formats,
    write_file,
)
from ft_ckpt.formats.files import DeviceTensors, RawFile
from ft_ckpt.formats.index import IndexedFile
from ft_ckpt.formats.trees import Leaf, flatten, unflatten
from ft_ckpt.messages import expected_one_of
from ft_ckpt.storage import Readable
from ft_ckpt.storage.digests import digest_of_open
from ft_ckpt.storage.io import Region, WriterPool
from ft_ckpt.storage.places import Place, open_place, replaced_object, scratch_file


def save(
    obj: Any,
    path: str | Path | Place,
    format: str | None = None,  # noqa: A002
    *,
    native_floats: bool = False,
    compression: str | None = None,
) -> None:
    """Save `obj` durably to the file `path`, or to an object in a bucket if `path` is a URL.

    After an error the previous file is unchanged. `obj` is any nesting of dicts, lists, tuples,
    numbers, strings, bytes, numpy arrays and tensors. `format` is "h5", "dual", "safetensors" or
    "torch". By default the suffix of `path` decides. `native_floats` stores bfloat16 in HDF5 files
    as a type that every reader understands. `compression="gzip"` compresses HDF5 files, after a
    shuffle of bytes. While it compresses, it needs the space of the uncompressed tensors.

    Raises SelectionError naming the path inside `obj` of a value that cannot be stored, ConfigError
    for unknown settings, TargetError if `path` cannot be written, and NoSpaceError if the disk is
    full.
    """
    target = open_place(path).as_target()
    file_format = _object_format(format or format_by_suffix(str(target)).name)
    _check_compression(file_format, compression)
    objects = file_format.objects
    if isinstance(objects, LibraryObjects):
        objects.check(obj)
        with explained(target), scratch_file(target) as file:
            objects.save(obj, file)
    elif objects is not None and compression is not None:
        with explained(target), scratch_file(target) as file:
            _write_compressed(obj, objects, file, native_floats)
    elif objects is not None:
        with _no_collection():
            layout, leaves = _plan_object(obj, objects, native_floats)
        with explained(target), replaced_object(target) as stage:
            _write_plan(stage, layout, leaves)


def compress_file(place: Place, compression: str) -> None:
    """Replace an HDF5 file of ft_ckpt by a compressed one with the same contents.

    Raises what `load` and `save` raise.
    """
    name = format_by_suffix(str(place)).name
    save(load(place, format=name), place, name, compression=compression)


def load(
    path: str | Path | Place,
    map_location: str | torch.device | None = None,
    format: str | None = None,  # noqa: A002
    *,
    mapped: bool = True,
    verify: bool = False,
) -> Any:
    """Load the object in the file `path`.

    Without `map_location`, tensors are read at their first use. With `map_location`, they are plain
    tensors on that device, and large ones on the CPU are mapped. `mapped=False` copies values
    instead of mapping them. `verify` compares digests. In HDF5 files of ft_ckpt it does so when a
    tensor is read. Other files are compared at once, with the manifest in the same folder or with
    the checksums in a torch file. `format` is detected from the content.

    Raises CorruptError for a file that is damaged, incomplete or would run code, and
    FileNotFoundError if it is absent. Raises ConfigError if `verify` finds no digests, and for a
    device that is not available.
    """
    place = open_place(path)
    _check_device(map_location)
    with _no_collection(), damaged_input(place.basename):
        raw = RawFile(place.open(), mapped or map_location is not None)
        file_format = detect_format(raw) if format is None else _object_format(format)
        if isinstance(file_format.objects, LibraryObjects):
            with closing(raw):
                return file_format.objects.load(raw, map_location, mapped, verify)

        file = file_format.open_indexed(raw, verify)
        if verify and not file.has_digests:
            _compare_with_manifest(raw.file, place)
        if map_location is None:
            return _restore_object(file, None)
        device = torch.device(map_location)
        is_mapped = mapped and file.raw.can_map
        if not file.readers and not is_accelerator(device) and not is_mapped:
            # Several threads read the file, into memory whose pages are not allocated yet.
            file.raw.read_in()

        return _restore_object(file, device)


def _check_device(map_location: str | torch.device | None) -> None:
    """Raise ConfigError unless this machine has the device."""
    try:
        if map_location is not None:
            torch.empty(0, device=torch.device(map_location))
    except (AssertionError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"map_location={map_location!r}: {reason}; give a device of this machine"
        ) from error


def _compare_with_manifest(source: Readable, place: Place) -> None:
    """Compare the digest of a file with the manifest in its folder.

    Raises ConfigError if no manifest lists the file, and CorruptError if the digests differ.
    """
    name = place.basename
    listed = listing_manifest(place)
    if listed is None:
        raise ConfigError(
            f"verify=True: {name} has no digests, and no {MANIFEST_NAME} in its folder lists it; "
            "leave verify out, or save it as HDF5, which has them"
        )
    _, _, record = listed
    if digest_of_open(source, record) != record.digest:
        raise CorruptError(f"{name} is damaged (its digest differs); use another copy of the file")


def _object_format(name: str) -> TensorFormat:
    """Return the format `name`. Raises ConfigError if it is unknown or cannot store objects."""
    names = []
    for file_format in tensor_formats(name):
        objects = file_format.objects
        if isinstance(objects, LaidOutObjects) or (objects is not None and objects.is_written):
            names.append(file_format.name)
    if name not in names:
        raise ConfigError(f"format {name!r}: {expected_one_of(name, names)}")
    return format_named(name)


def _check_compression(file_format: TensorFormat, compression: str | None) -> None:
    """Raise ConfigError unless files of the format can have this compression."""
    if compression is None or compression in file_format.compressions:
        return
    if not file_format.compressions:
        raise ConfigError(
            f"compression {compression!r}: only for HDF5 files, this one is "
            f"{file_format.name!r}; leave it out"
        )
    methods = ", ".join(map(repr, file_format.compressions))
    raise ConfigError(
        f"compression {compression!r}: {file_format.name!r} files are written with {methods} or "
        "None; other filters are read only, use h5repack to write them"
    )


def _plan_object(
    obj: Any, objects: LaidOutObjects, native_floats: bool
) -> tuple[Layout, dict[str, Leaf]]:
    """Return the layout of the file, and the leaves by name.

    A leaf is a tensor or a numpy array in `obj`.
    """
    root, leaves = flatten(obj, objects.dtypes)
    specs, arrays = _describe_leaves(leaves)
    layout, names = objects.lay_out(root, specs, arrays, native_floats)
    return layout, dict(zip(names, leaves, strict=True))


def _describe_leaves(leaves: Sequence[Leaf]) -> tuple[list[Spec], list[int]]:
    """Return the specs of the leaves, without names, and the indices of those that are arrays."""
    specs = [Spec("", leaf.shape, leaf.dtype) for leaf in leaves]
    arrays = [index for index, leaf in enumerate(leaves) if leaf.is_array]
    return specs, arrays


def _write_plan(stage: Place, layout: Layout, leaves: Mapping[str, Leaf]) -> None:
    """Write the file `stage`, which later replaces the target."""
    with WriterPool(local_bytes=layout.size_bytes if stage.is_local else None) as writer:
        plan = FilePlan(stage.name, layout)
        output = stage.store.create(plan.path, layout.size_bytes)
        write_file(plan, _regions_of(layout, leaves), output, writer)


def _regions_of(layout: Layout, leaves: Mapping[str, Leaf]) -> Iterator[Region]:
    for spec, start in zip(layout.specs, layout.starts, strict=True):
        if spec.size_bytes:
            yield from _leaf_regions(start, spec, leaves[spec.name])


def _leaf_regions(start: int, spec: Spec, leaf: Leaf) -> Iterator[Region]:
    if isinstance(leaf.data, torch.Tensor) and is_accelerator(leaf.data.device):
        for piece in host_pieces(_plain_values(leaf.data).reshape(-1)):
            yield Region(start, piece.data_ptr(), piece.nbytes, piece)
            start += piece.nbytes
        return
    values = _contiguous_values(leaf)
    address = values.ctypes.data if isinstance(values, np.ndarray) else values.data_ptr()
    yield Region(start, address, spec.size_bytes, values)


def _write_compressed(obj: Any, objects: LaidOutObjects, path: Path, native_floats: bool) -> None:
    root, leaves = flatten(obj, objects.dtypes)
    specs, arrays = _describe_leaves(leaves)

    def values_of(index: int) -> Any:
        return _leaf_bytes(leaves[index])

    objects.write_compressed(path, root, specs, arrays, native_floats, values_of)


def _leaf_bytes(leaf: Leaf) -> Any:
    """Return the contiguous values of `leaf` as a flat numpy array of bytes."""
    values = _contiguous_values(leaf)
    if isinstance(values, np.ndarray):
        return values.reshape(-1).view(np.uint8)
    return values.reshape(-1).view(torch.uint8).numpy()


def _contiguous_values(leaf: Leaf) -> Any:
    """Return the values of `leaf` as a contiguous numpy array, or contiguous tensor on the CPU."""
    if leaf.is_array:
        return np.ascontiguousarray(leaf.data)
    tensor = leaf.data
    if not isinstance(tensor, LazyTensor):
        return _plain_values(tensor).cpu().contiguous()
    was_loaded = tensor.is_loaded
    values = _plain_values(tensor.values()).cpu().contiguous()
    if not was_loaded:
        # Converting a large file must not keep all of it in memory.
        tensor.release()
    return values


def _plain_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


def _restore_object(file: IndexedFile, device: torch.device | None) -> Any:
    """Return the stored object. Its tensors are lazy if `device` is None."""
    index = file.index
    if index.root is None and device is None:
        return {name: _lazy_of(file, name) for name in index.names}
    on_device = None
    if device is not None and is_accelerator(device):
        on_device = DeviceTensors(file, device)

    # An object may contain a tensor several times, which is then read once.
    tensors: dict[int, Any] = {}

    def tensor_of(number: int) -> Any:
        if number not in tensors:
            name = index.names[number]
            if on_device is not None:
                tensors[number] = on_device.new_tensor(name)
            elif device is not None:
                tensors[number] = _lazy_of(file, name).values().to(device)
            else:
                tensors[number] = _lazy_of(file, name)
        return tensors[number]

    restored = unflatten(index.tree, tensor_of, file.read_array)
    if on_device is not None:
        on_device.read_all()
    return restored


def _lazy_of(file: IndexedFile, name: str) -> LazyTensor:
    dtype, shape, *_ = file.index.rows[name]
    return lazy_tensor(file, name, shape, dtype)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector in the block.

    Scanning 20,000 new tensors takes longer than creating them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
