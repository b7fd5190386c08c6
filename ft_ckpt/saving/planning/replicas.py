"""Compares the replicas of each tensor during a save by their digests.

A digest covers all bits of a replica. Replicas may differ after LocalSGD, in batch-norm statistics,
in parameters that a wrapper ignores and in replicated shards. The value of the first rank that
holds the tensor is stored, and that rank alone writes it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import xxhash

from ft_ckpt.errors import listing
from ft_ckpt.model.tensors import Entry, Part
from ft_ckpt.ranks import Ranks, Values, rank_numbers
from ft_ckpt.ranks.moving import WEIGHTS, digests_of, place_of
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import of_rank_0
from ft_ckpt.saving.planning.files import PartPlan

# Name of a tensor in a run -> rank whose value differs from the first rank's -> the place of its
# elements (see `place_of`), None if the rank holds no elements.
Differences = Mapping[str, Mapping[int, str | None]]


@dataclass(frozen=True)
class ReplicaDigest:
    """The digest of the replica of one tensor on one rank."""

    place: str  # of the elements in the tensor, see `place_of`
    bits: str  # hexadecimal; "" if this rank holds no elements
    is_stored: bool  # whether this rank writes the replica


def replicated_tensors(plans: Iterable[PartPlan]) -> dict[str, Source]:
    """Return the tensors in the files of `plans` that several ranks hold, by name in a run."""
    by_key: dict[int, tuple[str, Source]] = {}
    for plan in plans:
        written: set[str] = set()
        for file in plan.files:
            written.update(spec.name for spec in file.layout.specs)
        for entry in plan.part.entries:
            if entry.name not in written:
                continue
            for name, source in _named_sources(plan.part, entry):
                if source.sharding.is_replicated:
                    by_key.setdefault(source.key, (name, source))
    return dict(by_key.values())


def digest_replicas(sources: Mapping[str, Source], rank: int) -> dict[str, ReplicaDigest]:
    """Digest the part of each tensor that `rank`, the rank of this process, should hold."""
    shardings = {}
    local_parts = {}
    for name, source in sources.items():
        if source.sharding.is_sharded and not source.sharding.local_boxes(rank):
            continue
        shardings[name] = source.sharding
        local = source.local
        if local is not None:
            local_parts[name] = local
    bits = digests_of(local_parts)
    digests = {}
    for name, sharding in shardings.items():
        is_stored = bool(sharding.boxes(rank))
        digests[name] = ReplicaDigest(place_of(sharding, rank), bits.get(name, ""), is_stored)
    return digests


def digests_by_place(digests: Mapping[str, ReplicaDigest]) -> dict[str, str]:
    """Join the digests of all replicas that a rank holds at one place, by place.

    The joined digests are small enough to exchange at every save.
    """
    places: dict[str, list[tuple[str, str]]] = {}
    for name, digest in digests.items():
        places.setdefault(digest.place, []).append((name, digest.bits))
    joined = {}
    for place, named_bits in places.items():
        joined[place] = xxhash.xxh3_128_hexdigest(repr(named_bits).encode())
    return joined


def differing_places(digests: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the places at which ranks differ, from the `digests_by_place` of each rank."""
    by_place: dict[str, set[str]] = {}
    for rank_digests in digests:
        for place, digest in rank_digests.items():
            by_place.setdefault(place, set()).add(digest)
    return sorted(place for place, distinct in by_place.items() if len(distinct) > 1)


def differing_replicas(
    digests: Mapping[str, ReplicaDigest], places: Sequence[str], ranks: Ranks
) -> Differences:
    """Find the tensors at `places` that differ from the replica of the first rank that stores them.

    `digests` are the digests of this rank. Collective unless `places` is empty.
    """
    if not places:
        return {}
    at_places = {}
    for name, digest in digests.items():
        if digest.place in places:
            at_places[name] = [*astuple(digest)]
    agreed = ranks.agree(
        "the comparison of replicas", {"digests": at_places}, decide=_find_differences
    )
    differences = {}
    for name, place_by_rank in agreed.result.items():
        differences[name] = {int(rank): place for rank, place in place_by_rank.items()}
    return differences


def difference_note(differing: Differences) -> str:
    """Return the note of a checkpoint that stores the first rank's replicas."""
    return f"{describe_differences(differing)}, which is stored"


def describe_differences(differing: Differences) -> str:
    """Return as text which tensors differ, and on which ranks."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, owners in differing.items():
        by_ranks.setdefault(tuple(owners), []).append(name.removeprefix(f"{WEIGHTS}/"))
    lines = []
    for ranks, names in by_ranks.items():
        lines.append(f"{listing(names, ', ')} on rank(s) {rank_numbers(list(ranks))}")
    is_cut = any(any(owners.values()) for owners in differing.values())
    first = "the first rank with the same part" if is_cut else "rank 0"
    return f"{listing(lines)}: not as on {first}"


def take_first_values(parts: Sequence[Part], differing: Differences) -> list[Part]:
    """Return the parts with the first rank's values of differing tensors, and a note on these."""
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
    """Yield the sources of an entry with their names in a run."""
    if entry.group is not None:
        for source in entry.group.sources:
            yield f"{WEIGHTS}/{source.name}", source
    elif entry.source is not None:
        is_state = part.kind == "state"
        yield entry.name if is_state else f"{WEIGHTS}/{entry.source.name}", entry.source


def _find_differences(answers: Values) -> dict[str, dict[str, str | None]]:
    # (tensor, place) -> (rank, digest of its replica), in rank order
    copies: dict[tuple[str, str], list[tuple[int, ReplicaDigest]]] = {}
    for rank, answer in enumerate(answers):
        for name, fields in answer["digests"].items():
            digest = ReplicaDigest(*fields)
            copies.setdefault((name, digest.place), []).append((rank, digest))
    differences: dict[str, dict[int, str | None]] = {}
    for (name, place), by_rank in copies.items():
        stored = next((digest for _, digest in by_rank if digest.is_stored), by_rank[0][1])
        for rank, digest in by_rank:
            if digest.bits != stored.bits:
                owners = differences.setdefault(name, {})
                owners[rank] = place if digest.bits else None
    as_json = {}
    for name, owners in differences.items():
        as_json[name] = {str(rank): owners[rank] for rank in sorted(owners)}
    return as_json
