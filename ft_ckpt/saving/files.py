"""Between selection and files: which tensor goes into which file, and its bytes in the order the file wants them.

The plan is the same on every rank, for all take part in bringing the tensors; the pieces come out on rank 0.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ft_ckpt.devices.accelerators import is_accelerator
from ft_ckpt.devices.copies import host_pieces
from ft_ckpt.distributed.gather import Chunk, gather_tensors, stream_buckets
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.source import Source
from ft_ckpt.errors import IncompleteError, SelectionError, listing
from ft_ckpt.formats.dtypes import dtype_name
from ft_ckpt.formats.layout import Layout, Spec
from ft_ckpt.formats.registry import DEFAULT_FORMAT, TensorFormat, format_named
from ft_ckpt.formats.shard_files import shard_index, split_into_files
from ft_ckpt.formats.write_files import FilePlan
from ft_ckpt.model.entries import Entry, Group, Part
from ft_ckpt.storage.paths import is_utf8
from ft_ckpt.storage.store import Store
from ft_ckpt.storage.writer import Region

_SLICE = 4 << 20  # elements converted at a time
_METADATA = {"format": "pt"}  # transformers refuses files that do not say who wrote them


@dataclass(frozen=True, eq=False)
class PartPlan:
    """One part and the files it becomes; `index` is the text of its shard index, None with one file."""

    part: Part
    format: str
    files: tuple[FilePlan, ...]
    index_path: str
    index: str | None
    apart: frozenset[str] = frozenset()  # stored names that share no file with others

    @property
    def size_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.layout.size_bytes for file in self.files)


def plan_part(
    part: Part, max_shard_bytes: int, format_name: str = DEFAULT_FORMAT, apart: frozenset[str] = frozenset()
) -> PartPlan:
    """Files for `part`, split as transformers splits them: in the model's order, none above `max_shard_bytes`.

    The tensors named in `apart` share no file with the others.

    Raises SelectionError naming tensors of a dtype or a name that the format cannot keep, IncompleteError naming
    those that would have one name in the files.
    """
    known = format_named(format_name)
    suffix = known.suffixes[0]
    _refuse_stored_names(part)
    specs = {entry.name: Spec(entry.name, entry.shape, dtype_name(entry.dtype)) for entry in part.entries}
    folder = f"{part.path}/" if part.path else ""
    index_path = f"{folder}{part.file}{suffix}.index.json"
    shards = {f"{part.file}{suffix}": list(specs)}
    try:
        if part.kind != "adapter":  # PEFT reads one file only
            shards = split_into_files(specs, part.file, suffix, max_shard_bytes, apart)
        laid_out = {name: _lay_out_file([specs[one] for one in some], known, part) for name, some in shards.items()}
    except (SelectionError, KeyError):
        _lay_out_file(list(specs.values()), known, part)  # which names all that cannot be kept
        raise
    files = tuple(FilePlan(folder + name, layout) for name, layout in laid_out.items())
    if len(files) == 1:
        return PartPlan(part, format_name, files, index_path, None, apart)
    total = {"total_parameters": _count_parameters(part), "total_size": sum(spec.size_bytes for spec in specs.values())}
    return PartPlan(part, format_name, files, index_path, shard_index(shards, total), apart)


def _refuse_stored_names(part: Part) -> None:
    """No two tensors have one name, and none a name that files use or cannot have."""
    names = [entry.name for entry in part.entries]
    known = {*names}
    if len(known) < len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        raise IncompleteError(f"{listing(twice, ', ')}: the name of more than one tensor; rename or re-register one")
    if "__metadata__" in known or not is_utf8("".join(names)):  # all at once: they are many, and hardly ever odd
        odd = [repr(name) for name in names if name == "__metadata__" or not is_utf8(name)]
        raise SelectionError(f"{listing(odd, ', ')}: files cannot have a tensor of this name; rename the parameter")


@dataclass(frozen=True, eq=False)
class GatherWay:
    """How tensors come together on the rank `to`, and what looks at their values there."""

    ranks: Ranks
    bucket_bytes: int
    to: int = 0
    check: "FiniteCheck | None" = None


def file_turns(part_plan: PartPlan, file: FilePlan, way: GatherWay) -> Iterator[Iterator[Region]]:
    """The bytes of one planned file's tensors in file order, see `gathered_turns`."""
    entries = {entry.name: entry for entry in part_plan.part.entries}
    layout = file.layout
    places = [(entries[spec.name], at) for spec, at in zip(layout.specs, layout.starts, strict=True) if spec.size_bytes]
    return gathered_turns(places, way)


def gathered_turns(places: Sequence[tuple[Entry, int]], way: GatherWay) -> Iterator[Iterator[Region]]:
    """The bytes of tensors from their places in a file on, in order, on the rank they come to; nothing elsewhere.

    Each turn, an iterator, is what moves at once. Collective: all ranks run through the same turns in the same order.
    """
    starts = {entry.name: start for entry, start in places}

    def regions_of(turn: Iterator[tuple[Entry, Tensor]]) -> Iterator[Region]:
        for entry, data in turn:
            for region in cast_regions(starts[entry.name], entry, data, way.check):
                yield region
                starts[entry.name] += region.size_bytes  # its next elements go on from here

    return map(regions_of, _entry_turns([entry for entry, _ in places], way))


def cast_regions(start: int, entry: Entry, data: Tensor, check: "FiniteCheck | None" = None) -> Iterator[Region]:
    """Flat elements of a tensor in the entry's dtype, on the host: as they are, or in pieces, which need little memory.

    `start` is their place in the file.
    """
    is_ready = data.dtype == entry.dtype and check is None
    for some in host_pieces(data) if is_accelerator(data.device) else _host_slices(data, is_ready):
        if check is not None:
            check.look_at(entry.name, some)
        part = some.to(dtype=entry.dtype).contiguous()
        yield Region(start, part.data_ptr(), part.nbytes, part)
        start += part.nbytes


def _host_slices(data: Tensor, is_ready: bool) -> Iterator[Tensor]:
    step = max(1, data.numel() if is_ready else _SLICE)
    return (data[low : low + step] for low in range(0, data.numel(), step))


def check_written_files(part_plan: PartPlan, store: Store) -> None:
    """Read the headers of the written files back and compare them with the live model's names, shapes and dtypes.

    Raises IncompleteError naming every difference.
    """
    expected = {entry.name: Spec(entry.name, entry.shape, dtype_name(entry.dtype)) for entry in part_plan.part.entries}
    found: dict[str, Spec] = {}
    for file in part_plan.files:
        with closing(format_named(part_plan.format).open_file(store.open(file.path))) as opened:
            found.update(opened.specs)
    problems = [f"{name}: in the model, not in the file" for name in expected if name not in found]
    problems += [f"{name}: in the file, not in the model" for name in found if name not in expected]
    problems += [
        f"{name}: {found[name].dtype} {found[name].shape} in the file, {spec.dtype} {spec.shape} in the model"
        for name, spec in expected.items()
        if name in found and found[name] != spec
    ]
    if problems:
        raise IncompleteError(f"{listing(problems)}; nothing is committed")


@dataclass
class FiniteCheck:
    """Names of tensors with values that are no numbers."""

    found: set[str] = field(default_factory=set)

    def look_at(self, name: str, data: Tensor) -> None:
        """Look at values of the tensor `name`."""
        if data.dtype.is_floating_point and not bool(torch.isfinite(data).all()):
            self.found.add(name)

    def raise_if_found(self) -> None:
        """Raise IncompleteError naming every tensor that holds NaN or infinity."""
        if self.found:
            raise IncompleteError(
                f"{listing(sorted(self.found), ', ')}: NaN or infinity in {len(self.found)} tensor(s), and "
                "nonfinite='raise'; nothing is committed, the earlier checkpoint is untouched"
            )


def _entry_turns(ordered: Sequence[Entry], way: GatherWay) -> Iterator[Iterator[tuple[Entry, Tensor]]]:
    """(entry, its next flat elements) in order, in the turns of `gathered_turns`.

    Neighbours that need no conversion travel in the same buckets.
    """
    waiting: list[Entry] = []
    made: dict[Group, dict[str, Tensor]] = {}
    for entry in ordered:
        if entry.group is None:
            waiting.append(entry)
            continue
        yield from _stream_entries(waiting, way)
        waiting = []
        yield _convert_group(entry, entry.group, made, way)
    yield from _stream_entries(waiting, way)


def _stream_entries(entries: Sequence[Entry], way: GatherWay) -> Iterator[Iterator[tuple[Entry, Tensor]]]:
    chosen: list[Source] = [entry.source for entry in entries if entry.source is not None]
    position, arrived = 0, 0

    def with_entries(bucket: Iterator[Chunk]) -> Iterator[tuple[Entry, Tensor]]:
        nonlocal position, arrived
        for chunk in bucket:
            yield entries[position], chunk.data
            arrived += chunk.data.numel()
            if arrived == chosen[position].numel:
                position, arrived = position + 1, 0

    return map(with_entries, stream_buckets(chosen, way.ranks, way.bucket_bytes, way.to))


def _convert_group(
    entry: Entry, group: Group, made: dict[Group, dict[str, Tensor]], way: GatherWay
) -> Iterator[tuple[Entry, Tensor]]:
    """The entry's tensor, its group gathered and converted when its first entry is asked for, and freed by its last."""
    if group not in made:
        full = gather_tensors(group.sources, way.ranks, way.bucket_bytes, way.to)
        made[group] = group.convert(full) if way.ranks.rank == way.to else {}
    if way.ranks.rank == way.to:
        tensor = made[group].pop(entry.name)
        if tuple(tensor.shape) != entry.shape:
            raise IncompleteError(f"{entry.name}: converted to shape {tuple(tensor.shape)}, planned {entry.shape}")
        yield entry, tensor.reshape(-1)


def _lay_out_file(specs: list[Spec], known: TensorFormat, part: Part) -> Layout:
    stored = {spec.name for spec in specs} if known.holds_aliases else set()
    ties = {alias: kept for kept, *aliases in part.ties if kept in stored for alias in aliases if alias not in stored}
    return known.lay_out_file(specs, _METADATA, ties)


def _count_parameters(part: Part) -> int:
    return sum(torch.Size(entry.shape).numel() for entry in part.entries)
