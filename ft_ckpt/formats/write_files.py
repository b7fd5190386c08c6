"""Writes a planned file from tensors that come in the order of its layout, and digests them on the way."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from ft_ckpt.errors import IncompleteError
from ft_ckpt.formats.layout import Layout, TensorRecord
from ft_ckpt.storage.digests import FileRecord, whole_digest
from ft_ckpt.storage.store import Store
from ft_ckpt.storage.writer import DurableFile, Region, Writer, region_of


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


def write_file(plan: FilePlan, regions: Iterable[Region], store: Store, writer: Writer) -> FileRecord:
    """Write the planned file from `regions`: the bytes of its tensors, in the order of the layout.

    Raises IncompleteError when a region is not the one the layout expects next, NoSpaceError when the disk is full.
    """
    layout, feed = plan.layout, iter(regions)
    with writer.fill(store.create(plan.path, layout.size_bytes)) as file:
        file.put_region(region_of(0, layout.header))
        end = _fill_tensors(file, layout, feed)
        file.put_zeros(end, layout.size_bytes)
        for extra in feed:
            raise IncompleteError(
                f"{plan.path}: {_describe_region(extra)} came after the last planned tensor; nothing is kept"
            )
        digest = file.finish()
    etag = None if file.stored is None else file.stored.etag
    return FileRecord(plan.path, layout.size_bytes, whole_digest(digest), etag=etag)


def _fill_tensors(file: DurableFile, layout: Layout, feed: Iterator[Region]) -> int:
    """Put the tensors and the trailer of a file; returns where they end."""
    digests = {spec.name: xxhash.xxh3_128() for spec in layout.specs} if layout.trailer is not None else {}
    end = len(layout.header)
    for spec, start in zip(layout.specs, layout.starts, strict=True):
        file.put_zeros(end, start)
        end = start + spec.size_bytes
        for region in _next_regions(spec.name, start, end, feed):
            file.put_region(region, digests.get(spec.name))
    if layout.trailer is None or layout.trailer_start is None:
        return end
    file.put_zeros(end, layout.trailer_start)
    file.await_digests()
    trailer = layout.trailer({name: digest.digest() for name, digest in digests.items()})
    file.put_region(region_of(layout.trailer_start, trailer))
    return layout.trailer_start + len(trailer)


def _next_regions(name: str, start: int, end: int, feed: Iterator[Region]) -> Iterator[Region]:
    """The regions of one tensor. Raises IncompleteError when others come."""
    while start < end:
        region = next(feed, None)
        if region is None or region.start != start or region.size_bytes > end - start:
            found = "nothing" if region is None else _describe_region(region)
            raise IncompleteError(f"{name}: {end - start} bytes missing when {found} came; nothing is kept")
        yield region
        start += region.size_bytes


def _describe_region(region: Region) -> str:
    return f"{region.size_bytes} bytes for byte {region.start} of the file"
