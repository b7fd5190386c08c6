"""`save` and `load`: any state in one file, used like torch.save and torch.load."""

import errno
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ft_ckpt import disk
from ft_ckpt.errors import ConfigError, CorruptError, NoSpaceError, TargetError
from ft_ckpt.formats import Layout, Spec, cerebras, dual, hdf5, safetensors
from ft_ckpt.formats.detect import format_by_name, format_of
from ft_ckpt.lazy import LazyTensor, lazy_tensor
from ft_ckpt.tree import Leaf, flatten, unflatten
from ft_ckpt.write import FilePlan, Piece, Writer, write_files

FORMATS = ("h5", "dual", "safetensors", "torch")


def save(obj: Any, path: str | Path, format: str | None = None, *, native_floats: bool = False) -> None:  # noqa: A002
    """Save `obj` into the file `path`, whole and durable, or raise and leave what was there.

    `obj` is any nesting of dicts, lists, tuples, numbers, strings, bytes, numpy arrays and tensors; see `tree`.
    `format` is "h5", "dual", "safetensors" or "torch"; without it the suffix of `path` decides. `native_floats` gives
    bfloat16 in HDF5 files a type whose values every reader shows. Raises SelectionError naming the place inside `obj`
    of what cannot be kept, TargetError where `path` cannot be written, NoSpaceError when the disk is full.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    kind = _known(format_by_name(target, format))
    if target.is_dir() or not target.parent.is_dir():
        raise TargetError(f"{path}: {'a folder' if target.is_dir() else 'its folder does not exist'}; name a file")
    with _no_collection():
        plan = None if kind == "torch" else _plan(obj, kind, native_floats)
    stage = disk.temporary_name(target)
    try:
        if plan is None:
            _save_torch(obj, target.parent / stage)
        else:
            _write(target.parent, FilePlan(stage, plan[0]), plan[1])
        disk.move(target.parent / stage, target)
        disk.sync(target.parent)
    except BaseException:
        (target.parent / stage).unlink(missing_ok=True)
        raise


def load(
    path: str | Path,
    map_location: str | torch.device | None = None,
    format: str | None = None,  # noqa: A002
    *,
    mapped: bool = True,
    verify: bool = False,
) -> Any:
    """The object in the file `path`. Without `map_location` its tensors are read when they are first used.

    `map_location` reads them now, onto that device. `mapped=False` copies values where they would be mapped (see
    `lazy`); `verify` compares the digest of every tensor that is read. `format` is found from the content. Raises
    CorruptError for a file that is damaged, incomplete or would run code, FileNotFoundError where there is none.
    """
    source = Path(path)
    kind = _known(format or format_of(source))
    if kind == "torch":
        return _load_torch(source, map_location, mapped and map_location is None)
    opener = hdf5.open_file if kind == "h5" else dual.open_file
    with _no_collection():
        file = opener(source, mapped and map_location is None, verify)
        return _object(file, None if map_location is None else torch.device(map_location))


def _known(kind: str) -> str:
    if kind not in FORMATS:
        raise ConfigError(f"format {kind!r}: one of {', '.join(FORMATS)} is expected")
    return kind


def _plan(obj: Any, kind: str, native_floats: bool) -> tuple[Layout, dict[str, Leaf]]:
    """The layout of the file and its leaves by name."""
    dtypes = cerebras.DTYPES if kind == "h5" else tuple(safetensors.NAMES)
    root, leaves = flatten(obj, dtypes)
    specs = [Spec("", leaf.shape, leaf.dtype) for leaf in leaves]
    arrays = [index for index, leaf in enumerate(leaves) if leaf.is_array]
    if kind == "safetensors":
        layout, names = dual.lay_out_object(root, specs, arrays)
    else:
        layout, names = (hdf5 if kind == "h5" else dual).lay_out_tree(root, specs, arrays, native_floats)
    return layout, dict(zip(names, leaves, strict=True))


def _write(folder: Path, plan: FilePlan, leaves: dict[str, Leaf]) -> None:
    with Writer() as writer:
        for _ in write_files([plan], _pieces(plan, leaves), folder, writer):
            pass


def _pieces(plan: FilePlan, leaves: dict[str, Leaf]) -> Iterator[Piece]:
    for spec in plan.layout.specs:
        if spec.size_bytes:
            address, keeper = _memory(leaves[spec.name])
            yield Piece(plan.path, spec.name, address, spec.size_bytes, keeper)


def _memory(leaf: Leaf) -> tuple[int, Any]:
    """Where the values of `leaf` are, one after the other, and what keeps them there."""
    if leaf.is_array:
        array = np.ascontiguousarray(leaf.data)
        return array.ctypes.data, array
    source = leaf.data
    fresh = isinstance(source, LazyTensor) and not source.is_loaded
    tensor = source.values() if isinstance(source, LazyTensor) else source
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if fresh:
        source.release()  # converting a large file must not hold it all
    return tensor.data_ptr(), tensor


def _object(file: hdf5.HDF5File, device: torch.device | None) -> Any:
    index, tensors = file.index, {}

    def tensor(number: int) -> Any:
        if number not in tensors:
            name = index.names[number]
            dtype, shape, *_ = index.rows[name]
            lazy = lazy_tensor(file, name, shape, dtype)
            tensors[number] = lazy if device is None else lazy.values().to(device)
        return tensors[number]

    if index.root is None and device is None:
        return {name: lazy_tensor(file, name, index.rows[name][1], index.rows[name][0]) for name in index.names}
    return unflatten(index.tree, tensor, file.array)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: its walks through 20,000 new tensors take longer than making them, and find nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _save_torch(obj: Any, stage: Path) -> None:
    try:
        with stage.open("xb", buffering=0) as file:  # not by its path: torch would lose the reason of an error
            torch.save(_loaded(obj), file)
        disk.sync(stage)
    except (OSError, RuntimeError) as error:
        reason = error if isinstance(error, OSError) else error.__context__
        if isinstance(reason, OSError) and reason.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoSpaceError(f"{stage}: {reason.strerror}; free space or save elsewhere") from error
        raise


def _loaded(obj: Any) -> Any:
    return torch.utils._pytree.tree_map_only(LazyTensor, LazyTensor.values, obj)


def _load_torch(source: Path, map_location: Any, mapped: bool) -> Any:
    try:
        try:
            return torch.load(source, map_location=map_location, weights_only=True, mmap=mapped)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(source, map_location=map_location, weights_only=True)  # older than torch 1.6
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CorruptError(f"{source.name}: torch cannot read it without running code ({error})") from error
