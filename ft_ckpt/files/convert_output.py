"""Plans and writes a weight file of any format from the tensors of another file."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ft_ckpt.files.rename import read_slices, tensor_runs
from ft_ckpt.formats.layout import Layout, TensorFile
from ft_ckpt.formats.registry import TensorFormat
from ft_ckpt.formats.torch_file import TorchArchive
from ft_ckpt.formats.write_files import FilePlan, write_file
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.progress import track_progress
from ft_ckpt.storage.read_ahead import read_ahead
from ft_ckpt.storage.source_proof import prove_sources
from ft_ckpt.storage.store import Store
from ft_ckpt.storage.writer import Region, Writer, region_of


@dataclass(frozen=True)
class Output:
    """One weight file to be: how it is written, and where its tensors will be."""

    plan: FilePlan
    inner: FilePlan  # the same with one record for each tensor
    file: TensorFile
    archive: TorchArchive | None = None

    def regions(self) -> Iterator[Region]:
        """The file's bytes in order."""
        found = _read_regions(self.file, self.inner.layout)
        return found if self.archive is None else _archive_regions(self.archive, found)


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


def _read_regions(file: TensorFile, layout: Layout) -> Iterator[Region]:
    """Tensors whose bytes are taken as they are come in blocks, all others a slice at a time."""
    starts = {spec.name: start for spec, start in zip(layout.specs, layout.starts, strict=True)}
    stored = {spec.name: tensor_runs(file, spec.name) for spec in layout.specs}

    def place(name: str, address: int, size_bytes: int, keeper: Any) -> Region:
        starts[name] += size_bytes
        return Region(starts[name] - size_bytes, address, size_bytes, keeper)

    for plain, some in groupby(layout.specs, lambda spec: stored[spec.name] is not None):
        if plain:
            for part in read_ahead(run for spec in some for run in stored[spec.name] or ()):
                yield place(part.run.name, part.address, part.size_bytes, part)
        else:
            for spec, data in _prefetch_items(read_slices(file, list(some))):
                yield place(spec.name, data.data_ptr(), data.nbytes, data)


def _prefetch_items(items: Iterable[Any]) -> Iterator[Any]:
    """`items`, the next of which is being made while one is in use: reading and writing overlap."""
    feed, end = iter(items), object()
    with ThreadPoolExecutor(1, "ft_ckpt-read") as reader:
        coming = reader.submit(next, feed, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, feed, end)
            yield item


def _archive_regions(archive: TorchArchive, chunks: Iterator[Region]) -> Iterator[Region]:
    def places() -> Iterator[tuple[int, int]]:
        for region in chunks:  # which stays alive here until the next is asked for
            yield region.address, region.size_bytes

    at = 0
    for part in archive.weave_bytes(places()):
        region = region_of(at, part) if isinstance(part, bytes) else Region(at, *part)
        if region.size_bytes:
            yield region
        at += region.size_bytes


def write_outputs(outputs: list[Output], store: Store, progress: bool) -> list[FileRecord]:
    """Write `outputs` into `store`, durably, with a bar if `progress` and on a terminal.

    Raises CorruptError where they were made of damaged checkpoints; then the last one is not finished.
    """
    total = sum(one.plan.layout.size_bytes for one in outputs)

    def regions_of(one: Output) -> Iterator[Region]:
        yield from track(one.regions())
        if one is outputs[-1]:  # before a file is finished: in a bucket it takes its place then
            prove_sources()

    with Writer() as writer, track_progress(total, "converting", progress) as track:
        return [write_file(one.plan, regions_of(one), store, writer) for one in outputs]
