"""Compares the replicas of each tensor during a save by their digests.

The digest is of all bits, so it is a proof. Where ranks have come apart (LocalSGD, statistics of batches, parameters
that a wrapper was told to ignore, replicas of shards) the tensor of the first rank is the checkpoint's, of one that all
have whole rank 0's, and is written by that rank alone; a run keeps those of the other ranks beside it.
"""

import ctypes
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from ft_ckpt.distributed.agreement import Values, rank_numbers
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.replicas import WEIGHTS, own_name, place_of
from ft_ckpt.distributed.sharding import OwnedSharding
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.tensors import of_rank_0
from ft_ckpt.errors import RanksDisagreeError, listing
from ft_ckpt.model.entries import Entry, Part
from ft_ckpt.saving.files import PartPlan
from ft_ckpt.training.state import settings_by_rank

# Tensor, as a run names it -> the ranks whose own is not the first rank's: where theirs lies (see `place_of`), None if
# they have nothing.
Differences = Mapping[str, Mapping[int, str | None]]
_WORDS = 1 << 24  # of 8 bytes, digested at a time on an accelerator
_ODD = (-7046029254386353131, -4417276706812531889, -8663945395140668459)  # odd factors that spread bits, of xxHash


@dataclass(frozen=True)
class ReplicaDigest:
    """What a rank has of one tensor."""

    place: str  # as `place_of` says
    bits: str  # hexadecimal; "" where it has nothing, though others have
    is_stored: bool  # whether this rank writes it


def replicated_tensors(plans: Iterable[PartPlan]) -> dict[str, Source]:
    """What is in the files of `plans` and held by several ranks, each tensor once."""
    found: dict[int, tuple[str, Source]] = {}
    for plan in plans:
        written = {spec.name for file in plan.files for spec in file.layout.specs}
        for entry in plan.part.entries:
            for name, source in _named_sources(plan.part, entry) if entry.name in written else ():
                if source.sharding.is_replicated:
                    found.setdefault(source.key, (name, source))
    return dict(found.values())


def digest_replicas(sources: Mapping[str, Source], rank: int) -> dict[str, ReplicaDigest]:
    """The digest of what this `rank` has of each tensor that it should have something of."""
    shardings = {name: one.sharding for name, one in sources.items()}
    shardings = {name: one for name, one in shardings.items() if one.local_boxes(rank) or not one.is_sharded}
    found = {name: local for name in shardings if (local := sources[name].local) is not None}
    made = {name: _digest_on_host(tensor) for name, tensor in found.items() if tensor.is_cpu}
    elsewhere = {name: tensor for name, tensor in found.items() if not tensor.is_cpu}
    folded = [folded_bits(tensor) for tensor in elsewhere.values()]
    values = (
        torch.stack([value.to(folded[0].device) for value in folded]).tolist() if folded else []
    )  # one wait for all
    made |= {name: f"{value:x}" for name, value in zip(elsewhere, values, strict=True)}
    return {
        name: ReplicaDigest(place_of(sharding, rank), made.get(name, ""), bool(sharding.boxes(rank)))
        for name, sharding in shardings.items()
    }


def digests_by_place(made: Mapping[str, ReplicaDigest]) -> dict[str, str]:
    """What a rank tells the others first: by place, one digest of all that it has there."""
    places: dict[str, list[tuple[str, str]]] = {}
    for name, digest in made.items():
        places.setdefault(digest.place, []).append((name, digest.bits))
    return {place: xxhash.xxh3_128_hexdigest(repr(some).encode()) for place, some in places.items()}


def differing_places(digests: Iterable[Mapping[str, str]]) -> list[str]:
    """The places at which ranks do not all hold the same, from the `digests_by_place` of each."""
    seen: dict[str, set[str]] = {}
    for rank_digests in digests:
        for place, digest in rank_digests.items():
            seen.setdefault(place, set()).add(digest)
    return sorted(place for place, found in seen.items() if len(found) > 1)


def differing_replicas(digests: Mapping[str, ReplicaDigest], places: Sequence[str], ranks: Ranks) -> Differences:
    """The tensors at `places` that differ from the first rank that stores them, from each rank's `digests`.

    Collective unless `places` is empty.
    """
    if not places:
        return {}
    differ = frozenset(places)
    own = {name: [*astuple(digest)] for name, digest in digests.items() if digest.place in differ}
    found = ranks.agree("the comparison of replicas", {"digests": own}, decide=_find_differences).told
    return {name: {int(rank): place for rank, place in differing.items()} for name, differing in found.items()}


def differing_settings(document: Mapping[str, Any]) -> Differences:
    """The settings and numbers of optimizers that the state of a run has for single ranks."""
    found = {
        f"{item}: {what}": odd
        for item, about in document.get("items", {}).items()
        for what, odd in settings_by_rank(about.get("optimizer", {})).items()
    }
    return {what: dict.fromkeys(odd, "") for what, odd in found.items()}


def difference_note(apart: Differences, has_state: bool) -> str:
    """What the report says of it."""
    way = ", each rank's own beside it" if has_state else ""
    return f"{describe_differences(apart)}, which is stored{way}"


def describe_differences(apart: Differences) -> str:
    """Which tensors differ, and on which ranks, in words."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, odd in apart.items():
        by_ranks.setdefault(tuple(odd), []).append(name.removeprefix(f"{WEIGHTS}/"))
    some = [f"{listing(names, ', ')} on rank(s) {rank_numbers(list(odd))}" for odd, names in by_ranks.items()]
    is_cut = any(place for odd in apart.values() for place in odd.values())
    return f"{listing(some)}: not as on {'the first rank with the same part' if is_cut else 'rank 0'}"


def refuse_replica_differences(told_apart: str) -> None:
    """Raise RanksDisagreeError for what is `told_apart`: tensors or settings, and the ranks."""
    raise RanksDisagreeError(
        f"{told_apart}, where these ranks should hold the same, and on_difference='raise'; nothing was committed. "
        "Average or broadcast them before the save, or save with on_difference='warn', which takes the first rank's"
    )


def store_differences(parts: Sequence[Part], apart: Differences) -> list[Part]:
    """The parts with the first rank's of what is `apart`, a note of it, and in a training state each other's own."""
    sources = {
        name: s for part in parts for entry in part.entries for name, s in _named_sources(part, entry) if name in apart
    }
    odd = frozenset(source.key for source in sources.values())
    kept = [entry for name, source in sources.items() for entry in _entries_of_others(name, source, apart[name])]
    has_state = any(part.kind == "state" for part in parts)
    changed = []
    for number, part in enumerate(parts):
        entries = [_of_first_rank(entry, odd) for entry in part.entries] + (kept if part.kind == "state" else [])
        notes = part.notes if number else (*part.notes, difference_note(apart, has_state))
        changed.append(replace(part, entries=tuple(entries), notes=notes))
    return changed


def folded_bits(tensor: Tensor) -> Tensor:
    """A digest of all bits of the tensor and their places, one int64, made where the tensor is."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = data.clone() if data.storage_offset() % 8 else data
    whole = data.numel() - data.numel() % 8
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for words, first in ((data[:whole].view(torch.int64), 0), (data[whole:], whole)):
        for low in range(0, words.numel(), _WORDS):
            some = words[low : low + _WORDS].to(torch.int64)
            places = torch.arange(first + low, first + low + some.numel(), device=data.device)
            mixed = _mix_bits(some ^ (places * _ODD[0]), _ODD[1])
            total += _mix_bits(mixed, _ODD[2]).sum()  # which wraps
    return total


def _mix_bits(words: Tensor, factor: int) -> Tensor:
    """Upper bits are spread by the product to none below them: so they are folded down."""
    words = words * factor
    return words ^ ((words >> 32) & 0xFFFFFFFF)


def _digest_on_host(tensor: Tensor) -> str:
    data = tensor.detach().contiguous()
    return xxhash.xxh3_128_hexdigest(
        (ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b""
    )


def _named_sources(part: Part, entry: Entry) -> Iterator[tuple[str, Source]]:
    """The sources of an entry by the names they have in a run."""
    if entry.group is not None:
        yield from ((f"{WEIGHTS}/{source.name}", source) for source in entry.group.sources)
    elif entry.source is not None:
        yield entry.name if part.kind == "state" else f"{WEIGHTS}/{entry.source.name}", entry.source


def _of_first_rank(entry: Entry, odd: frozenset[int]) -> Entry:
    if entry.source is None or entry.source.key not in odd:
        return entry
    return entry._replace(source=of_rank_0(entry.source))


def _find_differences(answers: Values) -> dict[str, dict[str, str | None]]:
    copies: dict[tuple[str, str], list[tuple[int, ReplicaDigest]]] = {}  # tensor and place -> its copies by rank
    for rank, answer in enumerate(answers):
        for name, fields in answer["digests"].items():
            digest = ReplicaDigest(*fields)
            copies.setdefault((name, digest.place), []).append((rank, digest))
    found: dict[str, dict[int, str | None]] = {}
    for (name, place), held in copies.items():
        stored = next((digest for _, digest in held if digest.is_stored), held[0][1])
        odd = {rank: place if digest.bits else None for rank, digest in held if digest.bits != stored.bits}
        found.setdefault(name, {}).update(odd)
    return {name: {str(rank): odd[rank] for rank in sorted(odd)} for name, odd in found.items() if odd}


def _entries_of_others(name: str, source: Source, owners: Mapping[int, str | None]) -> Iterator[Entry]:
    """The entries of what ranks other than the first have of one tensor."""
    for owner, place in owners.items():
        if place is None:
            continue
        sizes: Any = tuple(json.loads(place)[1]) if place else None
        shape, view = (source.shape, source.sharding.view) if sizes is None else (sizes, sizes)
        mine = replace(source, name=own_name(name, owner), shape=shape, sharding=OwnedSharding(view, owner))
        yield Entry(mine.name, shape, source.dtype, source.dtype, mine)
