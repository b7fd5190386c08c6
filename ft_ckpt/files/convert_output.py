"""Plans and writes a weight file of any format from the tensors of another file."""

import ctypes
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ft_ckpt.files.rename import read_slices, tensor_runs
from ft_ckpt.formats.layout import Layout, Spec, TensorFile
from ft_ckpt.formats.registry import TensorFormat
from ft_ckpt.formats.torch_file import TorchArchive
from ft_ckpt.formats.write_files import FilePlan, Piece, write_files
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.progress import track_progress
from ft_ckpt.storage.read_ahead import read_ahead
from ft_ckpt.storage.writer import Writer


@dataclass(frozen=True)
class Output:
    """One weight file to be: how it is written, and where its tensors will be."""

    plan: FilePlan
    inner: FilePlan  # the same with one record for each tensor
    file: TensorFile
    archive: TorchArchive | None = None

    def pieces(self) -> Iterator[Piece]:
        """The file's bytes in order."""
        chunks = _read_pieces(self.plan.path, self.file, list(self.inner.layout.specs))
        return chunks if self.archive is None else _archive_pieces(self.plan.path, self.archive, chunks)


def plan_output(known: TensorFormat, path: str, file: TensorFile) -> Output:
    """The file `path` of format `known` that will hold what `file` holds.

    Raises SelectionError naming tensors of types that the format cannot keep.
    """
    specs, ties = list(file.specs.values()), dict(getattr(file, "ties", {}))
    metadata = {"format": "pt", **getattr(file, "metadata", {})}  # transformers refuses files that do not say it
    if known.lay_out_archive is not None:
        archive = known.lay_out_archive(specs, metadata, ties)
        inner = Layout(b"", archive.specs, archive.starts, archive.layout.size_bytes)
        return Output(FilePlan(path, archive.layout), FilePlan(path, inner), file, archive)
    plan = FilePlan(path, known.lay_out_file(specs, metadata, ties))
    return Output(plan, plan, file)


def _read_pieces(path: str, file: TensorFile, specs: list[Spec]) -> Iterator[Piece]:
    """Tensors whose bytes are taken as they are come in blocks, all others a slice at a time."""
    stored = {spec.name: tensor_runs(file, spec.name) for spec in specs}
    for plain, some in groupby(specs, lambda spec: stored[spec.name] is not None):
        if plain:
            for part in read_ahead(run for spec in some for run in stored[spec.name] or ()):
                yield Piece(path, part.run.name, part.address, part.size_bytes, part)
        else:
            for spec, data in _prefetch_items(read_slices(file, list(some))):
                yield Piece(path, spec.name, data.data_ptr(), data.nbytes, data)


def _prefetch_items(items: Iterable[Any]) -> Iterator[Any]:
    """`items`, the next of which is being made while one is in use: reading and writing overlap."""
    feed, end = iter(items), object()
    with ThreadPoolExecutor(1, "ft_ckpt-read") as reader:
        coming = reader.submit(next, feed, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, feed, end)
            yield item


def _archive_pieces(path: str, archive: TorchArchive, chunks: Iterator[Piece]) -> Iterator[Piece]:
    def places() -> Iterator[tuple[int, int]]:
        for piece in chunks:  # which stays alive here until the next is asked for
            yield piece.address, piece.size_bytes

    for part in archive.weave_bytes(places()):
        if isinstance(part, tuple):
            yield Piece(path, "archive", *part)
        elif part:
            held = ctypes.create_string_buffer(part, len(part))
            yield Piece(path, "archive", ctypes.addressof(held), len(part), held)


def write_outputs(outputs: list[Output], place: Path, progress: bool) -> list[FileRecord]:
    """Write `outputs` into the folder `place`, durably, with a bar if `progress` and on a terminal."""
    total = sum(one.plan.layout.size_bytes for one in outputs)
    feed = track_progress((piece for one in outputs for piece in one.pieces()), total, "converting", progress)
    with Writer() as writer:
        return list(write_files([one.plan for one in outputs], feed, place, writer))
