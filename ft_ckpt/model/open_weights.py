"""Opens weight files for a model that is loaded: mapped, read into memory, or straight onto a device."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.distributed.read_shards import readers_here
from ft_ckpt.formats.pytree_json import load_object
from ft_ckpt.formats.read_files import read_onto
from ft_ckpt.formats.registry import checkpoint_format_of
from ft_ckpt.formats.tensor_file import IndexedFile
from ft_ckpt.model.entries import EXTRA_FILE

Weights = tuple[dict[str, Tensor], bool]  # by name, and whether they are their files, mapped


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a weight file by name, mapped from it."""
    return _file_tensors(_open_weight_file(file))


@contextmanager
def fetching_weights(
    files: Iterable[Path], mapped: bool | str = "auto", device: torch.device | None = None
) -> Iterator[Callable[[], Weights]]:
    """Fetch the tensors of `files` in a thread; the block gets a function that waits for them.

    With a `device` the tensors are read onto it. A block that ends without them ends the reading too. Raises
    CorruptError for a file whose table is not sound.
    """
    opened = [_open_weight_file(path) for path in files]
    with ThreadPoolExecutor(1, "ft_ckpt-supply") as pool, ExitStack() as stack:
        for file in opened:
            stack.callback(file.close)  # each read of a closed file is its last
        yield pool.submit(_read_files, opened, mapped, device).result


def read_weights(files: Iterable[Path], mapped: bool | str = "auto") -> Weights:
    """The tensors of `files` by name, and whether they are the files themselves, mapped.

    `mapped`="auto" reads a file into memory when that is faster than touching it page by page, and no other process of
    the launch on this machine may want the same pages.
    """
    return _read_files([_open_weight_file(path) for path in files], mapped, None)


def _read_files(files: Iterable[IndexedFile], mapped: bool | str, device: torch.device | None) -> Weights:
    tensors: dict[str, Tensor] = {}
    are_mapped = device is None
    for file in files:
        if device is not None:
            tensors.update(read_onto(file, device))
            continue
        wanted = mapped is False or (mapped == "auto" and readers_here() == 1 and file.raw.is_cold())
        if wanted and not file.readers:  # what is compressed goes through memory anyway
            are_mapped = not file.raw.read_in() and are_mapped
        tensors.update(_file_tensors(file))
    return tensors, are_mapped


def _open_weight_file(file: Path) -> IndexedFile:
    """The open weight file; its suffix tells the format."""
    return checkpoint_format_of(file).open_file(file)


def _file_tensors(file: IndexedFile) -> dict[str, Tensor]:
    return {name: file.read(name).view(spec.shape) for name, spec in file.specs.items()}


def extra_beside(folder: Path) -> dict[str, Any]:
    """The values of the model's state dict in `folder` that are no tensors. Raises CorruptError for a damaged file."""
    file = folder / EXTRA_FILE
    return load_object(file.read_text(encoding="utf-8")) if file.is_file() else {}
