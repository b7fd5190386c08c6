"""Writes planned files from tensors that come in the order of their layouts, and digests them on the way."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ft_ckpt.errors import IncompleteError, explained
from ft_ckpt.formats.layout import Layout, Spec, TensorRecord
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.writer import DurableFile, Writer


@dataclass(frozen=True)
class FilePlan:
    """One weight file to be: where it goes, relative to the checkpoint, and its layout."""

    path: str
    layout: Layout

    def records(self) -> list[TensorRecord]:
        """A record of each tensor and its place."""
        return [
            TensorRecord(spec.name, spec.shape, spec.dtype, self.path, start, start + spec.size_bytes)
            for spec, start in zip(self.layout.specs, self.layout.starts, strict=True)
        ]


@dataclass(frozen=True)
class Piece:
    """The next bytes of one tensor: `address` on the host, alive until the piece after it is asked for."""

    path: str
    name: str
    address: int
    size_bytes: int
    keeper: Any = None  # whatever owns the memory


def write_files(
    plans: Sequence[FilePlan], pieces: Iterable[Piece], folder: Path, writer: Writer
) -> Iterator[FileRecord]:
    """Write the planned files below `folder` from `pieces`, which come in the order of the plans.

    Raises IncompleteError when a piece is not the one the layout expects next, NoSpaceError when the disk is full.
    """
    feed = iter(pieces)
    for plan in plans:
        with _created_file(writer, folder / plan.path, plan.layout) as file:
            _write_tensors(file, plan, feed)
            size, digest = file.finish()
        yield FileRecord(plan.path, size, digest)
    for extra in feed:
        raise IncompleteError(f"{extra.name}: arrived after the last planned tensor; nothing is kept")


@contextmanager
def _created_file(writer: Writer, path: Path, layout: Layout) -> Iterator[DurableFile]:
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    file = writer.create(path, layout.size_bytes)
    try:
        file.append_bytes(layout.header)
        yield file
    except BaseException:
        file.abandon()
        raise


def _write_tensors(file: DurableFile, plan: FilePlan, feed: Iterator[Piece]) -> None:
    """Append everything of one file that follows its header."""
    layout = plan.layout
    digests = {spec.name: xxhash.xxh3_128() for spec in layout.specs} if layout.trailer is not None else {}
    for spec, start in zip(layout.specs, layout.starts, strict=True):
        file.skip_to(start)
        file.tensor = digests.get(spec.name)
        _append_pieces(file, plan, spec, feed)
        file.tensor = None
    if layout.trailer is not None and layout.trailer_start is not None:
        file.skip_to(layout.trailer_start)
        file.await_digests()
        file.append_bytes(layout.trailer({name: digest.digest() for name, digest in digests.items()}))
    file.skip_to(layout.size_bytes)


def _append_pieces(file: DurableFile, plan: FilePlan, spec: Spec, feed: Iterator[Piece]) -> None:
    """Append the pieces of one tensor."""
    missing = spec.size_bytes
    while missing:
        piece = next(feed, None)
        if piece is None or (piece.path, piece.name) != (plan.path, spec.name) or piece.size_bytes > missing:
            found = "nothing" if piece is None else f"{piece.size_bytes} bytes of {piece.name}"
            raise IncompleteError(f"{spec.name}: {missing} bytes missing when {found} arrived; nothing is kept")
        file.append(piece.address, piece.size_bytes)
        missing -= piece.size_bytes
