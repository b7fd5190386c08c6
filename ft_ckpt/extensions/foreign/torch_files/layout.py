"""Lays out torch files of a dict of tensors, which `torch.load` reads.

Source: the layout of `torch.save` archives. Such a file is a zip file without compression:

    archive/data.pkl | archive/data/0 | checksum | archive/data/1 | checksum | ... | directory

`archive/data.pkl` names the tensors and the record of each storage. `archive/data/N` are the
storages, each at a multiple of 64 bytes. torch first writes such a file without the bytes of the
storages. The bytes and their checksums are then added as the file is written.
"""

import ctypes
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from ft_ckpt.errors import SelectionError, TargetError, explained, listing, shown
from ft_ckpt.formats import ITEM_BYTES, Layout, Spec
from ft_ckpt.formats.files import FileStream, RawFile, record_span
from ft_ckpt.storage.io import Region, open_local_file, region_of
from ft_ckpt.storage.local import temporary_store

_ARCHIVE = "archive"  # the folder of all records
# An entry of the directory begins with one of these signatures, and a checksum with the other.
_ENTRY_MAGIC, _SUM_MAGIC = b"PK\1\2", b"PK\7\10"
# The bytes after a record begin with this signature and checksum, unless the record is empty.
_SUM = struct.Struct("<4sI")
# An entry of the directory has its checksum, three lengths and its name at these offsets.
_ENTRY_SUM, _ENTRY_LENGTHS, _ENTRY_NAME = 16, 28, 46


def lay_out_torch(specs: Sequence[Spec], ties: Mapping[str, str]) -> Layout:
    """Lay out a file that `torch.load` reads as a dict of tensors.

    `ties` are further names of a tensor. torch itself writes all but the tensors' bytes and their
    checksums, to a sparse temporary file. Raises SelectionError naming dtypes that torch cannot
    save.
    """
    foreign = [f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in ITEM_BYTES]
    if foreign:
        raise SelectionError(f"{listing(foreign, ', ')}: torch has no such type; convert it first")
    stand_ins = {spec.name: _unset_tensor(spec) for spec in specs}
    for alias, name in ties.items():
        stand_ins[alias] = stand_ins[name]
    total_bytes = sum(spec.size_bytes for spec in specs)
    with temporary_store() as scratch:
        path = scratch.path(f"{_ARCHIVE}.pt")
        _write_outline(path, stand_ins, total_bytes)
        with closing(RawFile(open_local_file(path), mapped=False)) as file:
            archive = _read_outline(file, tuple(specs))
            size_bytes = file.size_bytes

    return Layout(b"", archive.specs, archive.starts, size_bytes, weave=archive.weave)


def _unset_tensor(spec: Spec) -> Tensor:
    """Return a tensor whose memory is reserved and never touched.

    Deterministic algorithms of torch would fill it.
    """
    like = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
    empty = torch.empty(0, dtype=like.dtype, device="cpu")
    return empty.set_(torch.UntypedStorage(spec.size_bytes), 0, spec.shape, like.stride())  # type: ignore[no-untyped-call]


def _write_outline(path: Path, tensors: Mapping[str, Tensor], total_bytes: int) -> None:
    """Write the file of torch without the bytes of its tensors."""
    # torch does not report that a file is too large
    with explained(path), path.open("xb") as sparse:
        sparse.truncate(total_bytes)
    try:
        with torch.serialization.skip_data():
            torch.save(tensors, path)
    except RuntimeError as error:
        raise TargetError(
            f"{path}: torch does not write it ({shown(error)}); set TMPDIR to another folder"
        ) from error


@dataclass(frozen=True)
class _Archive:
    """A torch file without the bytes of its tensors."""

    specs: tuple[Spec, ...]
    starts: tuple[int, ...]
    # the bytes before each tensor, and those between the last one and the directory
    between: tuple[bytes, ...]
    directory: bytes  # of the zip file; the checksums of tensors are missing

    def weave(self, regions: Iterable[Region]) -> Iterator[Region]:
        """Yield the regions of the whole file; `regions` are those of the tensors, in order."""
        feed = iter(regions)
        checksums: list[int] = []
        at = 0
        for before, spec, start in zip(self.between, self.specs, self.starts, strict=False):
            yield from _regions_of_bytes(at, self._with_sum(before, checksums))
            end = start + spec.size_bytes
            checksum = 0
            while start < end:
                region = next(feed)
                data = (ctypes.c_char * region.size_bytes).from_address(region.address)
                checksum = zlib.crc32(data, checksum)
                yield region
                start += region.size_bytes
            checksums.append(checksum)
            at = end

        last = self._with_sum(self.between[-1], checksums)
        yield from _regions_of_bytes(at, last + self._summed_directory(checksums))

    def _with_sum(self, after: bytes, checksums: Sequence[int]) -> bytes:
        """Set the checksum of the last written tensor in the bytes `after` it."""
        if not checksums or not self.specs[len(checksums) - 1].size_bytes:
            return after
        return _SUM.pack(_SUM_MAGIC, checksums[-1]) + after[_SUM.size :]

    def _summed_directory(self, checksums: Sequence[int]) -> bytes:
        """Return the directory with the checksums of the tensors."""
        by_name = {}
        for number, checksum in enumerate(checksums):
            by_name[_record_name(number).encode()] = checksum
        directory = bytearray(self.directory)
        at = 0
        while directory.startswith(_ENTRY_MAGIC, at):
            # lengths of the name, the extra field and the comment
            lengths = struct.unpack_from("<HHH", directory, at + _ENTRY_LENGTHS)
            name_start = at + _ENTRY_NAME
            name = bytes(directory[name_start : name_start + lengths[0]])
            if name in by_name:
                struct.pack_into("<I", directory, at + _ENTRY_SUM, by_name[name])
            at = name_start + sum(lengths)

        return bytes(directory)


def _record_name(number: int) -> str:
    return f"{_ARCHIVE}/data/{number}"


def _regions_of_bytes(start: int, data: bytes) -> Iterator[Region]:
    if data:
        yield region_of(start, data)


def _read_outline(file: RawFile, specs: tuple[Spec, ...]) -> _Archive:
    """Read the bytes in a file of torch that belong to no tensor."""
    with zipfile.ZipFile(FileStream(file)) as archive:
        records = [archive.getinfo(_record_name(number)) for number in range(len(specs))]
        spans = [record_span(file, record) for record in records]
        directory_start = archive.start_dir
    edges = [0, *chain.from_iterable(spans), directory_start]
    between = []
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        between.append(bytes(file.bytes(low, high - low)))
    directory = bytes(file.bytes(directory_start, file.size_bytes - directory_start))
    return _Archive(specs, tuple(start for start, _ in spans), tuple(between), directory)
