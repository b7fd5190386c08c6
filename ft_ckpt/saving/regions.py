"""Yields the bytes of a file in file order, from the tensors of the ranks.

Gathers are collective: all ranks run them in the same order.
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

_CAST_ELEMENTS = 4 << 20  # converted at a time
SourceView = Callable[
    [Source], Source
]  # maps a planned source to the one to read: itself, or its copy in a snapshot


def live(source: Source) -> Source:
    """Return the source itself: the save reads the live tensor."""
    return source


@dataclass(frozen=True, eq=False)
class Gathering:
    """How tensors are gathered on the rank `to`."""

    ranks: Ranks
    sources: SourceView
    to: int = 0
    # on `to`, collects the names of tensors with NaN or infinity; None disables the check
    nonfinite: set[str] | None = None


def file_turns(writes: FileWrites, gathering: Gathering) -> Iterator[Iterator[Region]]:
    """Yield the bytes of all tensors of one file in file order, as `gathered_turns` does."""
    layout = writes.file.layout
    places = []
    for entry, spec, start in zip(writes.entries, layout.specs, layout.starts, strict=True):
        if spec.size_bytes:
            places.append((entry, start))
    return gathered_turns(places, gathering)


def gathered_turns(
    places: Sequence[tuple[Entry, int]], gathering: Gathering
) -> Iterator[Iterator[Region]]:
    """Gather tensors in turns, and yield for each turn an iterator over the regions it fills.

    `places` are entries with their offsets in the file. A turn moves one bucket. The iterators are
    empty on ranks other than `gathering.to`. Collective: all ranks take the same turns in the same
    order.
    """
    starts = {entry.name: start for entry, start in places}

    def regions_of(turn: Iterator[tuple[Entry, Tensor]]) -> Iterator[Region]:
        for entry, data in turn:
            for region in cast_regions(starts[entry.name], entry, data, gathering.nonfinite):
                yield region
                starts[entry.name] += region.size_bytes  # where its next elements go

    return map(regions_of, _entry_turns([entry for entry, _ in places], gathering))


def cast_regions(
    start: int, entry: Entry, data: Tensor, nonfinite: set[str] | None = None
) -> Iterator[Region]:
    """Yield flat elements of a tensor as regions of host memory, in the entry's dtype.

    Elements that must be converted come in pieces, to save memory. `start` is the offset of the
    first element in the file, in bytes. If NaN or infinity is stored, the name of the entry is
    added to `nonfinite`, unless that is None.
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
            nonfinite.add(entry.name)  # as stored: a cast may overflow
        yield Region(start, part.data_ptr(), part.nbytes, part)
        start += part.nbytes


def write_own_bytes(
    writes: FileWrites, store: Store, writer: WriterPool, ranks: Ranks, sources: SourceView
) -> str:
    """Write this rank's bytes of one file, and return their digest.

    Collective where tensors are gathered. Raises NoSpaceError as soon as the disk of another rank
    is full, and RankError as soon as another rank has failed otherwise.
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

    Collective where tensors are gathered.
    """
    return digest_regions(
        _while_all_write(_own_regions(writes, ranks, sources), ranks, BLOCK_BYTES)
    )


def _entry_turns(
    ordered: Sequence[Entry], gathering: Gathering
) -> Iterator[Iterator[tuple[Entry, Tensor]]]:
    """Yield for each turn the entries it moves, in order, each with its next flat elements.

    Consecutive entries without a conversion share buckets.
    """
    waiting: list[Entry] = []
    converted: dict[Group, dict[str, Tensor]] = {}
    for entry in ordered:
        if entry.group is None:
            waiting.append(entry)
            continue
        yield from _stream_entries(waiting, gathering)
        waiting = []
        yield _convert_group(entry, entry.group, converted, gathering)
    yield from _stream_entries(waiting, gathering)


def _stream_entries(
    entries: Sequence[Entry], gathering: Gathering
) -> Iterator[Iterator[tuple[Entry, Tensor]]]:
    chosen = [gathering.sources(entry.source) for entry in entries if entry.source is not None]
    position, arrived = 0, 0

    def with_entries(bucket: Iterator[Chunk]) -> Iterator[tuple[Entry, Tensor]]:
        nonlocal position, arrived
        for chunk in bucket:
            yield entries[position], chunk.data
            arrived += chunk.data.numel()
            if arrived == chosen[position].numel:
                position, arrived = position + 1, 0

    return map(with_entries, stream_buckets(chosen, gathering.ranks, gathering.to))


def _convert_group(
    entry: Entry, group: Group, converted: dict[Group, dict[str, Tensor]], gathering: Gathering
) -> Iterator[tuple[Entry, Tensor]]:
    """Yield the entry with its converted tensor, on the rank that gathers.

    The group of the entry is gathered and converted for its first entry; `converted` keeps the
    tensors until each has been yielded.
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
    file, is_writer = writes.file, ranks.rank == writes.writer
    gathering = Gathering(ranks, sources, writes.writer)
    layout = file.layout
    places = zip(writes.entries, writes.cuts, layout.specs, layout.starts, strict=True)
    end = 0  # header and gaps are written up to here
    for is_gathered, group in groupby(places, key=lambda place: place[1] is GATHERED):
        if is_gathered:
            moving = [(entry, start) for entry, _, spec, start in group if spec.size_bytes]
            for region in chain.from_iterable(gathered_turns(moving, gathering)):
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
    """Yield the regions in pieces of at most `max_bytes`, as long as no rank has failed.

    Raises the failure of another rank before the next piece.
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
    """Yield this rank's chunks of one tensor, which follow each other in its memory."""
    if entry.source is None:
        return
    source = sources(entry.source)
    local = source.local
    if local is None:
        return
    item_bytes, flat = entry.dtype.itemsize, local.reshape(-1)
    chunks = []
    for cut in cuts:
        chunk = chunk_of_rank(cut, rank)
        if chunk is not None:
            chunks.append(chunk)
    first = 0  # index in `flat` of the first element of the first chunk
    if chunks and not source.sharding.is_sharded:  # this rank has the whole tensor
        first = (chunks[0][0] - cuts[0].start) // item_bytes
    for start, stop in chunks:
        count = (stop - start) // item_bytes
        yield from cast_regions(start, entry, flat[first : first + count])
        first += count
