"""Compares the replicas of each tensor during a save by their digests.

A replica is a copy of a tensor, or of a shard, that several ranks should hold with equal bits.
Replicas may differ after LocalSGD, in batch-norm statistics, in parameters that a wrapper ignores
and in replicated shards. Only the first rank that holds a replica writes it. The others may lose
their values, so they are compared:

1. `digest_replicas` digests all bits of each replica on this rank.
2. `digests_by_box` joins these digests to one for each box: the part of a tensor that a rank holds.
   For example, all tensors that are cut in the same rows have one joined digest. These digests
   are few, so the ranks exchange them at every save.
3. `differing_boxes` compares the joined digests, on rank 0.
4. `differing_replicas` exchanges the digests of single tensors, but only for boxes that differ.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import xxhash

from ft_ckpt.errors import listing
from ft_ckpt.model.tensors import Entry, Part
from ft_ckpt.ranks import Ranks, Values, rank_numbers
from ft_ckpt.ranks.moving import WEIGHTS, box_key, digests_of
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import of_rank_0
from ft_ckpt.saving.planning.files import PartPlan

# The replicas that differ from the first rank's: name of the tensor in a run -> rank -> the box of
# the replica (see `box_key`), or None if the rank should hold elements and has none.
Differences = Mapping[str, Mapping[int, str | None]]


@dataclass(frozen=True)
class ReplicaDigest:
    """The digest of the replica of one tensor on one rank.

    Attributes:
        box: The part of the tensor that the replica is, as `box_key` gives it.
        bits: The digest of all bits in hexadecimal digits; "" if this rank holds no elements.
        is_stored: Whether this rank writes the replica.
    """

    box: str
    bits: str
    is_stored: bool


def replicated_tensors(plans: Iterable[PartPlan]) -> dict[str, Source]:
    """Return the tensors in the files of `plans` that several ranks hold, by name in a run.

    A tensor that has several names is returned once.
    """
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
    """Digest the part of each tensor that this rank should hold.

    `rank` is the rank of this process. Tensors of which it should hold nothing are left out.
    """
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
        digests[name] = ReplicaDigest(box_key(sharding, rank), bits.get(name, ""), is_stored)

    return digests


def digests_by_box(digests: Mapping[str, ReplicaDigest]) -> dict[str, str]:
    """Join the digests of all replicas of this rank that have the same box; return them by box."""
    bits_by_box: dict[str, list[tuple[str, str]]] = {}
    for name, digest in digests.items():
        bits_by_box.setdefault(digest.box, []).append((name, digest.bits))
    joined = {}
    for box, named_bits in bits_by_box.items():
        joined[box] = xxhash.xxh3_128_hexdigest(repr(named_bits).encode())
    return joined


def differing_boxes(digests: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the boxes in which replicas differ.

    `digests` has the result of `digests_by_box` on each rank.
    """
    by_box: dict[str, set[str]] = {}
    for rank_digests in digests:
        for box, digest in rank_digests.items():
            by_box.setdefault(box, set()).add(digest)
    return sorted(box for box, distinct in by_box.items() if len(distinct) > 1)


def differing_replicas(
    digests: Mapping[str, ReplicaDigest], boxes: Sequence[str], ranks: Ranks
) -> Differences:
    """Find the replicas that differ from the replica that is stored.

    Only replicas with one of the `boxes` are compared. `digests` are the digests of this rank.
    Collective unless `boxes` is empty.
    """
    if not boxes:
        return {}
    digests_to_compare = {}
    for name, digest in digests.items():
        if digest.box in boxes:
            digests_to_compare[name] = [*astuple(digest)]

    agreed = ranks.agree(
        "the comparison of replicas", {"digests": digests_to_compare}, decide=_find_differences
    )
    differences = {}
    for name, box_by_rank in agreed.result.items():
        # JSON has made strings of the ranks.
        differences[name] = {int(rank): box for rank, box in box_by_rank.items()}

    return differences


def _find_differences(answers: Values) -> dict[str, dict[str, str | None]]:
    """Compare the digests of all ranks, on rank 0; return `Differences` as JSON."""
    # (tensor, box) -> (rank, digest of its replica), in rank order
    replicas: dict[tuple[str, str], list[tuple[int, ReplicaDigest]]] = {}
    for rank, answer in enumerate(answers):
        for name, fields in answer["digests"].items():
            digest = ReplicaDigest(*fields)
            replicas.setdefault((name, digest.box), []).append((rank, digest))

    differences: dict[str, dict[int, str | None]] = {}
    for (name, box), by_rank in replicas.items():
        _, stored_digest = by_rank[0]
        for _, digest in by_rank:
            if digest.is_stored:
                stored_digest = digest
                break
        for rank, digest in by_rank:
            if digest.bits != stored_digest.bits:
                box_by_rank = differences.setdefault(name, {})
                box_by_rank[rank] = box if digest.bits else None

    as_json = {}
    for name, box_by_rank in differences.items():
        as_json[name] = {str(rank): box_by_rank[rank] for rank in sorted(box_by_rank)}
    return as_json


def difference_note(differing: Differences) -> str:
    """Return the message for the report of a checkpoint whose replicas differ."""
    return f"{describe_differences(differing)}, which is stored"


def describe_differences(differing: Differences) -> str:
    """Return as text which tensors differ, and on which ranks."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, box_by_rank in differing.items():
        by_ranks.setdefault(tuple(box_by_rank), []).append(name.removeprefix(f"{WEIGHTS}/"))
    lines = []
    for ranks, names in by_ranks.items():
        lines.append(f"{listing(names, ', ')} on rank(s) {rank_numbers(list(ranks))}")
    # The box of a whole tensor is "".
    is_sharded = any(any(box_by_rank.values()) for box_by_rank in differing.values())
    first = "the first rank with the same part" if is_sharded else "rank 0"
    return f"{listing(lines)}: not as on {first}"


def take_first_values(parts: Sequence[Part], differing: Differences) -> list[Part]:
    """Return the parts so that the first rank's values of differing tensors are stored.

    The first part gets a message about these tensors for the report.
    """
    keys = set()
    for part in parts:
        for entry in part.entries:
            for name, source in _named_sources(part, entry):
                if name in differing:
                    keys.add(source.key)

    new_parts = []
    for part in parts:
        entries = []
        for entry in part.entries:
            if entry.source is not None and entry.source.key in keys:
                entries.append(entry._replace(source=of_rank_0(entry.source)))
            else:
                entries.append(entry)
        new_parts.append(replace(part, entries=tuple(entries)))

    notes = (*new_parts[0].notes, difference_note(differing))
    new_parts[0] = replace(new_parts[0], notes=notes)
    return new_parts


def _named_sources(part: Part, entry: Entry) -> Iterator[tuple[str, Source]]:
    """Yield the sources of an entry with their names in a run.

    The name of a weight in a run begins with "weights/".
    """
    if entry.group is not None:
        for source in entry.group.sources:
            yield f"{WEIGHTS}/{source.name}", source
    elif entry.source is not None:
        is_state = part.kind == "state"
        yield entry.name if is_state else f"{WEIGHTS}/{entry.source.name}", entry.source
