"""Writes tensor files by their layout."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from ft_ckpt.errors import IncompleteError
from ft_ckpt.formats.layout import Layout, TensorRecord
from ft_ckpt.storage import Writable
from ft_ckpt.storage.digests import FileRecord, whole_digest
from ft_ckpt.storage.io import FileWriter, Region, WriterPool, region_of


@dataclass(frozen=True)
class FilePlan:
    """A weight file to write: its path, relative to the checkpoint, and its layout."""

    path: str
    layout: Layout

    def records(self) -> list[TensorRecord]:
        """Return the record of each tensor, with its offsets."""
        records = []
        for spec, start in zip(self.layout.specs, self.layout.starts, strict=True):
            end = start + spec.size_bytes
            records.append(TensorRecord(spec.name, spec.shape, spec.dtype, self.path, start, end))
        return records


def write_file(
    plan: FilePlan, regions: Iterable[Region], goal: Writable, writer: WriterPool
) -> FileRecord:
    """Write the planned file to `goal`.

    `regions` are the bytes of its tensors in the order of the layout. Raises IncompleteError when a
    region is not the one that the layout expects next, NoSpaceError when the disk is full.
    """
    layout = plan.layout
    feed = iter(regions)
    with writer.fill(goal) as file:
        if layout.weave is not None:
            _put_woven(file, layout, feed)
        else:
            _put_in_order(file, layout, feed)
        surplus = next(feed, None)
        if surplus is not None:
            raise IncompleteError(
                f"{plan.path}: {_describe_region(surplus)} came after the last planned tensor; "
                "nothing is kept"
            )
        digest = file.finish()

    etag = None if file.stored is None else file.stored.etag
    sha256 = None if file.sha256 is None else file.sha256.hexdigest()
    return FileRecord(plan.path, layout.size_bytes, whole_digest(digest), etag=etag, sha256=sha256)


def _put_woven(file: FileWriter, layout: Layout, feed: Iterator[Region]) -> None:
    assert layout.weave is not None, "the caller has looked"
    for region in layout.weave(_expected_regions(layout, feed)):
        file.put_region(region)


def _expected_regions(layout: Layout, feed: Iterator[Region]) -> Iterator[Region]:
    """Yield the regions of all tensors. Raises IncompleteError when other regions arrive."""
    for spec, start in zip(layout.specs, layout.starts, strict=True):
        yield from _regions_of_tensor(spec.name, start, start + spec.size_bytes, feed)


def _put_in_order(file: FileWriter, layout: Layout, feed: Iterator[Region]) -> None:
    """Write the header, the tensors and the trailer, with zeros between them."""
    has_trailer = layout.trailer is not None
    digests = {spec.name: xxhash.xxh3_128() for spec in layout.specs} if has_trailer else {}
    file.put_region(region_of(0, layout.header))
    end = len(layout.header)
    for spec, start in zip(layout.specs, layout.starts, strict=True):
        file.put_zeros(end, start)
        end = start + spec.size_bytes
        for region in _regions_of_tensor(spec.name, start, end, feed):
            file.put_region(region, digests.get(spec.name))

    if layout.trailer is not None and layout.trailer_start is not None:
        file.put_zeros(end, layout.trailer_start)
        file.await_digests()
        trailer = layout.trailer({name: digest.digest() for name, digest in digests.items()})
        file.put_region(region_of(layout.trailer_start, trailer))
        end = layout.trailer_start + len(trailer)

    file.put_zeros(end, layout.size_bytes)


def _regions_of_tensor(name: str, start: int, end: int, feed: Iterator[Region]) -> Iterator[Region]:
    """Yield the regions of one tensor. Raises IncompleteError when other regions arrive."""
    while start < end:
        region = next(feed, None)
        if region is None or region.start != start or region.size_bytes > end - start:
            arrived = "nothing" if region is None else _describe_region(region)
            raise IncompleteError(
                f"{name}: {end - start} bytes missing when {arrived} came; nothing is kept"
            )
        yield region
        start += region.size_bytes


def _describe_region(region: Region) -> str:
    return f"{region.size_bytes} bytes for byte {region.start} of the file"
