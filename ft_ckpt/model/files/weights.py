"""Opens and reads the weight files of a part."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.formats import checkpoint_format_of, format_named
from ft_ckpt.formats.files import RawFile, read_onto
from ft_ckpt.formats.index import IndexedFile
from ft_ckpt.formats.trees import load_object
from ft_ckpt.model.files.settings_files import EXTRA_FILE
from ft_ckpt.ranks.moving import readers_here
from ft_ckpt.storage import Store, read_text

# Tensors by name, and whether all of them are mapped.
Weights = tuple[dict[str, Tensor], bool]


def weight_names(record: PartRecord) -> list[str]:
    """Return the names of a part's weight files in its checkpoint."""
    return list(dict.fromkeys(tensor.file for tensor in record.tensors))


def path_in_part(record: PartRecord, file: str) -> str:
    """Return the path, in the checkpoint, of a file in the folder of a part."""
    return f"{record.path}/{file}".lstrip("/")


@contextmanager
def fetching_weights(
    store: Store,
    names: Iterable[str],
    mapped: bool | str = "auto",
    device: torch.device | None = None,
) -> Iterator[Callable[[], Weights]]:
    """Read the tensors of weight files in a thread. Yield a function that waits for them.

    If `device` is given, the tensors are read onto it. Leaving the `with` block ends the read.
    Raises CorruptError for a file with a damaged index.
    """
    files = open_weights(store, names)
    with ThreadPoolExecutor(1, "ft_ckpt-supply") as pool, ExitStack() as stack:
        for file in files:
            stack.callback(file.close)  # closing the file ends its read
        yield pool.submit(_read_files, files, mapped, device).result


def read_weights(store: Store, names: Iterable[str], mapped: bool | str = "auto") -> Weights:
    """Read the tensors of weight files, by name. Also return whether all of them are mapped.

    If `mapped` is "auto", a file is read into memory if that is faster than mapping it, and if no
    other process of the launch on this machine could share the pages. Files that cannot be mapped
    are always read.
    """
    return _read_files(open_weights(store, names), mapped, None)


def open_weights(store: Store, names: Iterable[str]) -> list[IndexedFile]:
    """Open weight files. Raises CorruptError for a file with a damaged index."""
    return [checkpoint_format_of(name).open_file(store.open(name)) for name in names]


def _read_files(
    files: Iterable[IndexedFile], mapped: bool | str, device: torch.device | None
) -> Weights:
    tensors: dict[str, Tensor] = {}
    if device is not None:
        for file in files:
            tensors.update(read_onto(file, device))
        return tensors, False

    are_mapped = True
    for file in files:
        reads = _reads_faster(file) if mapped == "auto" else not mapped
        # Files with readers are compressed. They are decompressed into memory in any case.
        if (reads or not file.raw.can_map) and not file.readers:
            is_in_memory = file.raw.read_in()
            are_mapped &= not is_in_memory
        are_mapped &= file.raw.can_map
        for name, spec in file.specs.items():
            tensors[name] = file.read(name).view(spec.shape)

    return tensors, are_mapped


def _reads_faster(file: IndexedFile) -> bool:
    """Check whether reading `file` into memory is faster than mapping it."""
    return readers_here() == 1 and file.raw.is_cold()


def read_extra_values(store: Store, record: PartRecord) -> dict[str, Any]:
    """Read the non-tensor values of a part's state dict. Raises CorruptError for a damaged file."""
    name = path_in_part(record, EXTRA_FILE)
    if store.stat(name) is None:
        return {}
    values: dict[str, Any] = load_object(read_text(store, name))
    return values


def compare_torch_sums(store: Store, names: Iterable[str]) -> None:
    """Compare torch's files with the checksums in them. Raises CorruptError if they differ.

    torch itself does not compare them.
    """
    torch_format = format_named("torch")
    for name in names:
        if name.endswith(torch_format.suffixes):
            with closing(RawFile(store.open(name))) as raw:
                torch_format.compare_sums(raw)
