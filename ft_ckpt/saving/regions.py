"""Yields the bytes of a file as regions, in file order, from the tensors of the ranks.

A region is a piece of host memory with its offset in the file. There are two ways to write a file:

- `write_own_bytes`: this rank writes the elements that it holds, and other ranks write theirs into
  the same file.
- `file_buckets`: one rank gathers all elements from the other ranks, one bucket at a time.

Gathers are collective, so all ranks call the functions here in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from torch import Tensor

from ft_ckpt.devices import host_pieces, is_accelerator
from ft_ckpt.errors import IncompleteError
from ft_ckpt.formats import FilePlan, all_finite
from ft_ckpt.model.tensors import Entry, Group
from ft_ckpt.ranks import Ranks
from ft_ckpt.ranks.moving import Chunk, gather_tensors, stream_buckets
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.saving.planning import GATHERED, FileWrites
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import Cut, chunk_of_rank
from ft_ckpt.storage.io import BLOCK_BYTES, Region, WriterPool, digest_regions, region_of

# Elements that are converted to another dtype at a time.
_CAST_ELEMENTS = 4 << 20
# Maps the source of a planned tensor to the source to read: itself, or its copy in a snapshot.
SourceView = Callable[[Source], Source]


def live(source: Source) -> Source:
    """Return the source itself, so that the save reads the live tensor."""
    return source


@dataclass(frozen=True, eq=False)
class Gathering:
    """How tensors are gathered on one rank.

    Attributes:
        ranks: The ranks that hold the tensors.
        sources: Maps the source of a planned tensor to the source to read.
        to: The rank that receives all elements.
        nonfinite: Gets the names of tensors with NaN or infinity, on the rank `to`; None if there
            is no check.
    """

    ranks: Ranks
    sources: SourceView
    to: int = 0
    nonfinite: set[str] | None = None


def file_buckets(writes: FileWrites, gathering: Gathering) -> Iterator[Iterator[Region]]:
    """Gather all tensors of one file; yield for each bucket an iterator over its regions.

    See `_gathered_buckets`.
    """
    layout = writes.file.layout
    entries_with_starts = []
    for entry, spec, start in zip(writes.entries, layout.specs, layout.starts, strict=True):
        if spec.size_bytes:
            entries_with_starts.append((entry, start))
    return _gathered_buckets(entries_with_starts, gathering)


def _gathered_buckets(
    entries_with_starts: Sequence[tuple[Entry, int]], gathering: Gathering
) -> Iterator[Iterator[Region]]:
    """Gather tensors in buckets, and yield for each bucket an iterator over its regions.

    `entries_with_starts` are the tensors, each with the offset of its first byte in the file. A
    bucket moves between ranks while its iterator runs. The iterators yield nothing on ranks other
    than `gathering.to`. Collective: all ranks must exhaust the iterators in the same order.
    """
    next_starts = {entry.name: start for entry, start in entries_with_starts}

    def regions_of_bucket(bucket: Iterator[tuple[Entry, Tensor]]) -> Iterator[Region]:
        for entry, data in bucket:
            for region in _cast_regions(next_starts[entry.name], entry, data, gathering.nonfinite):
                yield region
                # The next elements of this tensor may come in a later bucket.
                next_starts[entry.name] += region.size_bytes

    entries = [entry for entry, _ in entries_with_starts]
    return map(regions_of_bucket, _entry_buckets(entries, gathering))


def _cast_regions(
    start: int, entry: Entry, data: Tensor, nonfinite: set[str] | None = None
) -> Iterator[Region]:
    """Yield the regions for consecutive elements of a tensor, in the dtype of the entry.

    `data` has the elements in one dimension. `start` is the offset of the first element in the
    file, in bytes. Elements that must be converted come in pieces, to save memory. If NaN or
    infinity is stored, the name of the entry is added to `nonfinite`, unless that is None.
    """
    if is_accelerator(data.device):
        pieces = host_pieces(data)
    else:
        is_ready = data.dtype == entry.dtype and nonfinite is None
        step = max(1, data.numel() if is_ready else _CAST_ELEMENTS)
        pieces = (data[low : low + step] for low in range(0, data.numel(), step))
    for piece in pieces:
        part = piece.to(dtype=entry.dtype).contiguous()
        if nonfinite is not None and not all_finite(part):
            # Checked after the cast, because a cast may overflow to infinity.
            nonfinite.add(entry.name)
        yield Region(start, part.data_ptr(), part.nbytes, part)
        start += part.nbytes


def write_own_bytes(
    writes: FileWrites, store: Store, writer: WriterPool, ranks: Ranks, sources: SourceView
) -> str:
    """Write the bytes of one file that this rank writes, and return their digest.

    Collective if the file has tensors that are gathered. Raises NoSpaceError as soon as the disk of
    another rank is full, and RankError as soon as another rank has failed otherwise.
    """
    regions = _while_all_write(
        _own_regions(writes, ranks, sources), ranks, writer.tuning.block_bytes
    )
    with writer.fill(store.share(writes.file.path, writes.file.layout.size_bytes)) as file:
        for region in regions:
            file.put_region(region)
        return file.finish()


def digest_own_bytes(writes: FileWrites, ranks: Ranks, sources: SourceView) -> str:
    """Return the digest that `write_own_bytes` would return, without writing.

    Collective if the file has tensors that are gathered.
    """
    return digest_regions(
        _while_all_write(_own_regions(writes, ranks, sources), ranks, BLOCK_BYTES)
    )


def _entry_buckets(
    entries: Sequence[Entry], gathering: Gathering
) -> Iterator[Iterator[tuple[Entry, Tensor]]]:
    """Yield for each bucket an iterator over its entries, each with its next flat elements.

    Consecutive entries without a conversion share buckets. An entry that is converted from a group
    of tensors is a bucket of its own.
    """
    unconverted: list[Entry] = []
    converted: dict[Group, dict[str, Tensor]] = {}
    for entry in entries:
        if entry.group is None:
            unconverted.append(entry)
            continue
        yield from _stream_entries(unconverted, gathering)
        unconverted = []
        yield _convert_group(entry, entry.group, converted, gathering)
    yield from _stream_entries(unconverted, gathering)


def _stream_entries(
    entries: Sequence[Entry], gathering: Gathering
) -> Iterator[Iterator[tuple[Entry, Tensor]]]:
    """Yield what `_entry_buckets` yields, for entries without a conversion."""
    sources = [gathering.sources(entry.source) for entry in entries if entry.source is not None]
    index = 0  # of the entry whose elements arrive
    arrived_numel = 0  # its elements that have arrived

    def with_entries(bucket: Iterator[Chunk]) -> Iterator[tuple[Entry, Tensor]]:
        nonlocal index, arrived_numel
        for chunk in bucket:
            yield entries[index], chunk.data
            arrived_numel += chunk.data.numel()
            if arrived_numel == sources[index].numel:
                index += 1
                arrived_numel = 0

    return map(with_entries, stream_buckets(sources, gathering.ranks, gathering.to))


def _convert_group(
    entry: Entry, group: Group, converted: dict[Group, dict[str, Tensor]], gathering: Gathering
) -> Iterator[tuple[Entry, Tensor]]:
    """Yield the entry with its converted tensor, on the rank that gathers.

    The group of the entry is gathered and converted once, for the first of its entries. `converted`
    keeps the tensors of the other entries until they are yielded.
    """
    is_receiver = gathering.ranks.rank == gathering.to
    if group not in converted:
        sources = [gathering.sources(source) for source in group.sources]
        full = gather_tensors(sources, gathering.ranks, gathering.to)
        converted[group] = group.convert(full) if is_receiver else {}
    if is_receiver:
        tensor = converted[group].pop(entry.name)
        if tuple(tensor.shape) != entry.shape:
            raise IncompleteError(
                f"{entry.name}: converted to shape {tuple(tensor.shape)}, planned {entry.shape}"
            )
        yield entry, tensor.reshape(-1)


def _own_regions(writes: FileWrites, ranks: Ranks, sources: SourceView) -> Iterator[Region]:
    """Yield the bytes of the file that this rank writes, in file order."""
    file = writes.file
    layout = file.layout
    is_writer = ranks.rank == writes.writer
    gathering = Gathering(ranks, sources, writes.writer)
    tensors = zip(writes.entries, writes.cuts, layout.specs, layout.starts, strict=True)
    end = 0  # the end of the last tensor: from here on, the writer fills the gap to the next one
    for is_gathered, group in groupby(tensors, key=lambda tensor: tensor[1] is GATHERED):
        if is_gathered:
            moving = [(entry, start) for entry, _, spec, start in group if spec.size_bytes]
            for region in chain.from_iterable(_gathered_buckets(moving, gathering)):
                yield from _header_regions(file, end, region.start)
                yield region
                end = region.start + region.size_bytes
            continue
        for entry, cuts, spec, start in group:
            if is_writer:
                yield from _header_regions(file, end, start)
            end = start + spec.size_bytes
            yield from _tensor_regions(entry, cuts or (), ranks.rank, sources)

    if is_writer:
        yield from _header_regions(file, end, file.layout.size_bytes)


def _while_all_write(regions: Iterable[Region], ranks: Ranks, max_bytes: int) -> Iterator[Region]:
    """Yield the regions in pieces of at most `max_bytes`.

    If another rank has failed, raises its failure before the next piece.
    """
    for region in regions:
        for low in range(0, region.size_bytes, max_bytes):
            ranks.check_peers()
            size = min(max_bytes, region.size_bytes - low)
            yield Region(region.start + low, region.address + low, size, region.memory_owner)


def _header_regions(file: FilePlan, start: int, stop: int) -> Iterator[Region]:
    """Yield the bytes [start, stop) that belong to no tensor: the header, and gaps as zeros."""
    if start < stop:
        yield region_of(start, file.layout.header[start:stop].ljust(stop - start, b"\0"))


def _tensor_regions(
    entry: Entry, cuts: Sequence[Cut], rank: int, sources: SourceView
) -> Iterator[Region]:
    """Yield the regions of one tensor that this rank writes.

    Each of the `cuts` gives the rank at most one chunk [start, stop) of the file. The elements of
    these chunks follow each other in the memory of the rank.
    """
    if entry.source is None:
        return
    source = sources(entry.source)
    local = source.local
    if local is None:
        return
    item_bytes = entry.dtype.itemsize
    flat = local.reshape(-1)
    chunks = []
    for cut in cuts:
        chunk = chunk_of_rank(cut, rank)
        if chunk is not None:
            chunks.append(chunk)

    first = 0  # index in `flat` of the first element of the next chunk
    if chunks and not source.sharding.is_sharded:
        # This rank has the whole tensor, and its chunk may begin in the middle.
        first_start, _ = chunks[0]
        first = (first_start - cuts[0].start) // item_bytes

    for start, stop in chunks:
        count = (stop - start) // item_bytes
        yield from _cast_regions(start, entry, flat[first : first + count])
        first += count
