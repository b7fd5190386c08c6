"""Compares the replicas of each tensor during a save by their digests.

A digest covers all bits of a replica. Replicas may differ after LocalSGD, in batch-norm statistics,
in parameters that a wrapper ignores and in replicated shards. The value of the first rank that
holds the tensor is stored, and that rank alone writes it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import xxhash

from ft_ckpt.errors import listing
from ft_ckpt.model import Entry, Part
from ft_ckpt.ranks import (
    WEIGHTS,
    Ranks,
    Source,
    Values,
    digests_of,
    of_rank_0,
    place_of,
    rank_numbers,
)
from ft_ckpt.saving.files import PartPlan

# Tensor, as a run names it -> rank whose value differs from the first rank's -> its place (see
# `place_of`), None if the rank holds no elements.
Differences = Mapping[str, Mapping[int, str | None]]


@dataclass(frozen=True)
class ReplicaDigest:
    """The digest of the replica of one tensor on one rank."""

    place: str  # as `place_of` says
    bits: str  # hexadecimal; "" if this rank holds no elements
    is_stored: bool  # whether this rank writes it


def replicated_tensors(plans: Iterable[PartPlan]) -> dict[str, Source]:
    """The tensors in the files of `plans` that several ranks hold, once each, by the names they
    have in a run.
    """
    found: dict[int, tuple[str, Source]] = {}
    for plan in plans:
        written = {spec.name for file in plan.files for spec in file.layout.specs}
        for entry in plan.part.entries:
            for name, source in _named_sources(plan.part, entry) if entry.name in written else ():
                if source.sharding.is_replicated:
                    found.setdefault(source.key, (name, source))
    return dict(found.values())


def digest_replicas(sources: Mapping[str, Source], rank: int) -> dict[str, ReplicaDigest]:
    """The digest of this `rank`'s part of each tensor that it should hold a part of."""
    shardings = {name: one.sharding for name, one in sources.items()}
    shardings = {
        name: one for name, one in shardings.items() if one.local_boxes(rank) or not one.is_sharded
    }
    found = {name: local for name in shardings if (local := sources[name].local) is not None}
    made = digests_of(found)
    return {
        name: ReplicaDigest(
            place_of(sharding, rank), made.get(name, ""), bool(sharding.boxes(rank))
        )
        for name, sharding in shardings.items()
    }


def digests_by_place(made: Mapping[str, ReplicaDigest]) -> dict[str, str]:
    """One digest of all replicas that a rank holds at a place, by place: small enough to exchange
    at every save.
    """
    places: dict[str, list[tuple[str, str]]] = {}
    for name, digest in made.items():
        places.setdefault(digest.place, []).append((name, digest.bits))
    return {place: xxhash.xxh3_128_hexdigest(repr(some).encode()) for place, some in places.items()}


def differing_places(digests: Iterable[Mapping[str, str]]) -> list[str]:
    """The places at which digests differ between ranks, from the `digests_by_place` of each."""
    seen: dict[str, set[str]] = {}
    for rank_digests in digests:
        for place, digest in rank_digests.items():
            seen.setdefault(place, set()).add(digest)
    return sorted(place for place, found in seen.items() if len(found) > 1)


def differing_replicas(
    digests: Mapping[str, ReplicaDigest], places: Sequence[str], ranks: Ranks
) -> Differences:
    """The tensors at `places` that differ from the first rank that stores them, from each rank's
    `digests`.

    Collective unless `places` is empty.
    """
    if not places:
        return {}
    differ = frozenset(places)
    own = {name: [*astuple(digest)] for name, digest in digests.items() if digest.place in differ}
    found = ranks.agree(
        "the comparison of replicas", {"digests": own}, decide=_find_differences
    ).result
    return {
        name: {int(rank): place for rank, place in differing.items()}
        for name, differing in found.items()
    }


def difference_note(differing: Differences) -> str:
    return f"{describe_differences(differing)}, which is stored"


def describe_differences(differing: Differences) -> str:
    """The names of the tensors that differ, with the ranks."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, owners in differing.items():
        by_ranks.setdefault(tuple(owners), []).append(name.removeprefix(f"{WEIGHTS}/"))
    lines = [
        f"{listing(names, ', ')} on rank(s) {rank_numbers(list(owners))}"
        for owners, names in by_ranks.items()
    ]
    is_cut = any(place for owners in differing.values() for place in owners.values())
    return (
        f"{listing(lines)}: not as on {'the first rank with the same part' if is_cut else 'rank 0'}"
    )


def take_first_values(parts: Sequence[Part], differing: Differences) -> list[Part]:
    """The parts with the first rank's value of tensors that differ, and a note in the first
    part.
    """
    keys = set()
    for part in parts:
        for entry in part.entries:
            for name, source in _named_sources(part, entry):
                if name in differing:
                    keys.add(source.key)
    changed = []
    for part in parts:
        entries = []
        for entry in part.entries:
            if entry.source is not None and entry.source.key in keys:
                entries.append(entry._replace(source=of_rank_0(entry.source)))
            else:
                entries.append(entry)
        changed.append(replace(part, entries=tuple(entries)))
    changed[0] = replace(changed[0], notes=(*changed[0].notes, difference_note(differing)))
    return changed


def _named_sources(part: Part, entry: Entry) -> Iterator[tuple[str, Source]]:
    """The sources of an entry with the names they have in a run."""
    if entry.group is not None:
        yield from ((f"{WEIGHTS}/{source.name}", source) for source in entry.group.sources)
    elif entry.source is not None:
        yield entry.name if part.kind == "state" else f"{WEIGHTS}/{entry.source.name}", entry.source


def _find_differences(answers: Values) -> dict[str, dict[str, str | None]]:
    # tensor and place -> its copies by rank
    copies: dict[tuple[str, str], list[tuple[int, ReplicaDigest]]] = {}
    for rank, answer in enumerate(answers):
        for name, fields in answer["digests"].items():
            digest = ReplicaDigest(*fields)
            copies.setdefault((name, digest.place), []).append((rank, digest))
    found: dict[str, dict[int, str | None]] = {}
    for (name, place), held in copies.items():
        stored = next((digest for _, digest in held if digest.is_stored), held[0][1])
        differing = {
            rank: place if digest.bits else None
            for rank, digest in held
            if digest.bits != stored.bits
        }
        found.setdefault(name, {}).update(differing)
    return {
        name: {str(rank): owners[rank] for rank in sorted(owners)}
        for name, owners in found.items()
        if owners
    }
