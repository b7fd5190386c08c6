"""Opens weight files for a model that is loaded: mapped, read into memory, or straight onto a device."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.distributed.read_shards import readers_here
from ft_ckpt.formats.pytree_json import load_object
from ft_ckpt.formats.read_files import read_onto
from ft_ckpt.formats.registry import checkpoint_format_of
from ft_ckpt.formats.tensor_file import IndexedFile
from ft_ckpt.model.settings import EXTRA_FILE
from ft_ckpt.storage.store import Store, read_text

Weights = tuple[dict[str, Tensor], bool]  # by name, and whether they are their files, mapped


def read_tensors(store: Store, name: str) -> dict[str, Tensor]:
    """The tensors of a weight file by name, mapped from it where that can be."""
    return _file_tensors(_open_weight_file(store, name))


def weight_names(record: PartRecord) -> list[str]:
    """The names of a part's weight files in its checkpoint."""
    return list(dict.fromkeys(tensor.file for tensor in record.tensors))


@contextmanager
def fetching_weights(
    store: Store, names: Iterable[str], mapped: bool | str = "auto", device: torch.device | None = None
) -> Iterator[Callable[[], Weights]]:
    """Fetch the tensors of weight files in a thread; the block gets a function that waits for them.

    With a `device` the tensors are read onto it. A block that ends without them ends the reading too. Raises
    CorruptError for a file whose table is not sound.
    """
    opened = open_weights(store, names)
    with ThreadPoolExecutor(1, "ft_ckpt-supply") as pool, ExitStack() as stack:
        for file in opened:
            stack.callback(file.close)  # each read of a closed file is its last
        yield pool.submit(_read_files, opened, mapped, device).result


def read_weights(store: Store, names: Iterable[str], mapped: bool | str = "auto") -> Weights:
    """The tensors of weight files by name, and whether they are the files themselves, mapped.

    `mapped`="auto" reads a file into memory when that is faster than touching it page by page, and no other process of
    the launch on this machine may want the same pages. What cannot be mapped is always read.
    """
    return _read_files(open_weights(store, names), mapped, None)


def _read_files(files: Iterable[IndexedFile], mapped: bool | str, device: torch.device | None) -> Weights:
    tensors: dict[str, Tensor] = {}
    are_mapped = device is None
    for file in files:
        if device is not None:
            tensors.update(read_onto(file, device))
            continue
        wanted = mapped is False or (mapped == "auto" and readers_here() == 1 and file.raw.is_cold())
        if (wanted or not file.raw.can_map) and not file.readers:  # what is compressed goes through memory anyway
            are_mapped = not file.raw.read_in() and are_mapped
        are_mapped &= file.raw.can_map
        tensors.update(_file_tensors(file))
    return tensors, are_mapped


def open_weights(store: Store, names: Iterable[str]) -> list[IndexedFile]:
    """The open weight files. Raises CorruptError for one whose table is not sound."""
    return [_open_weight_file(store, name) for name in names]


def _open_weight_file(store: Store, name: str) -> IndexedFile:
    """The open weight file; its suffix tells the format."""
    return checkpoint_format_of(name).open_file(store.open(name))


def _file_tensors(file: IndexedFile) -> dict[str, Tensor]:
    return {name: file.read(name).view(spec.shape) for name, spec in file.specs.items()}


def extra_beside(store: Store, record: PartRecord) -> dict[str, Any]:
    """The values of a part's state dict that are no tensors. Raises CorruptError for a damaged file."""
    name = beside_weights(record, EXTRA_FILE)
    return load_object(read_text(store, name)) if store.stat(name) is not None else {}


def beside_weights(record: PartRecord, file: str) -> str:
    """The name in the checkpoint of a file in the folder of a part."""
    return f"{record.path}/{file}".lstrip("/")
