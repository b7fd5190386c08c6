"""Reuses the files of frozen tensors: the next checkpoint links to those of an earlier one.

Frozen tensors go into files of their own. Before such a file is written, each rank digests the
bytes that it would write. If an earlier checkpoint, of any run, has a file with that digest, it is
hard-linked instead, or copied by the object store. If neither is possible, the file is written.
Most file systems limit the links of a file; at the limit the file is copied by rank 0, and later
checkpoints link to the copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

from ft_ckpt.checkpoint.catalog import EarlierCheckpoint, earlier_checkpoints
from ft_ckpt.checkpoint.commit import Staging
from ft_ckpt.errors import CorruptError, explained
from ft_ckpt.ranks import Ranks, Values
from ft_ckpt.saving.planning import FileWrites, PartPlan, SavePlan, divide_files
from ft_ckpt.saving.regions import SourceView, digest_own_bytes
from ft_ckpt.storage import Store, etag_of
from ft_ckpt.storage.digests import FileRecord, joined_digest, whole_digest
from ft_ckpt.storage.places import copy_object

_MAX_EARLIER = 3  # checkpoints to search, newest first: several models may be saved in turns
_LINK = ".ft_ckpt-frozen-"  # prefix of the names of candidates in the staging


@dataclass(frozen=True)
class Offer:
    """Files of earlier checkpoints that a planned file may equal."""

    ranks: int  # that wrote each of these files; a digest joins the digests of their parts
    digests: tuple[str, ...]


def frozen_files(plans: Iterable[PartPlan], ranks: int) -> list[FileWrites]:
    """Return the planned files that hold frozen tensors only, divided among all ranks."""
    chosen = []
    for plan in plans:
        frozen = []
        for file in plan.files:
            names = [spec.name for spec in file.layout.specs]
            if names and plan.separate.issuperset(names):
                frozen.append(file)
        if frozen:
            chosen.append(replace(plan, files=tuple(frozen)))
    return divide_files(chosen, ranks)


@dataclass(frozen=True, eq=False)
class ReusedFiles:
    """The frozen files of a save that an earlier checkpoint already has."""

    digests: Mapping[str, str] = field(default_factory=dict)  # by path
    records: Sequence[FileRecord] = ()  # on rank 0, which has linked the files


def reuse_files(
    plan: SavePlan,
    offers: Mapping[str, Offer],
    store: Store | None,
    sources: SourceView,
    ranks: Ranks,
) -> ReusedFiles:
    """Link the planned frozen files that equal one of the `offers`, instead of writing them.

    `store` is the staging on rank 0, None on other ranks. Collective if there are offers.
    """
    if not offers:
        return ReusedFiles()
    with explained(plan.request.target):
        frozen = frozen_files(plan.plans, ranks.size)
        equal = equal_files(frozen, offers, ranks, sources)
        records = [] if store is None else place_equal_files(frozen, equal, store)
        return ReusedFiles(equal, records)


def link_candidates(
    frozen: Sequence[FileWrites], staging: Staging, ranks: Ranks, gathers: bool
) -> dict[str, Offer]:
    """Link earlier files that the planned `frozen` files may equal into the staging, on rank 0.

    An earlier file is a candidate if its size and header equal the planned ones and its digest can
    be computed for the new tensors. `gathers` says whether tensors may be gathered on rank 0 for
    that digest. Returns for the path of each planned file the digests of its candidates.
    """
    earlier = list(earlier_checkpoints(staging.beside, _MAX_EARLIER)) if frozen else []
    offers = {}
    for planned in frozen:
        candidates = []
        for checkpoint in earlier:
            for record in checkpoint.files:
                is_comparable = _is_comparable(record, planned, ranks, gathers)
                if is_comparable and _link_candidate(checkpoint, record, planned, staging.store):
                    candidates.append(record)
        if candidates:
            writers = candidates[0].ranks
            digests = [record.digest for record in candidates if record.ranks == writers]
            offers[planned.file.path] = Offer(writers, tuple(dict.fromkeys(digests)))
    return offers


def equal_files(
    frozen: Sequence[FileWrites], offers: Mapping[str, Offer], ranks: Ranks, sources: SourceView
) -> dict[str, str]:
    """Return by path the digests of the planned files that equal one of the `offers`.

    Each rank digests the bytes that it would write. Tensors are gathered on rank 0 if one rank
    wrote the earlier file. Collective: call it on every rank.
    """
    if not offers:
        return {}
    digests = {}
    for planned in frozen:
        offer = offers.get(planned.file.path)
        if offer is not None:
            as_written = planned if offer.ranks > 1 else planned.by_one(0)
            digests[planned.file.path] = digest_own_bytes(as_written, ranks, sources)

    def equal_to_offers(values: Values) -> dict[str, str]:
        equal = {}
        for path, offer in offers.items():
            parts = [value[path] for value in values]
            digest = whole_digest(parts[0]) if offer.ranks == 1 else joined_digest(parts)
            if digest in offer.digests:
                equal[path] = digest
        return equal

    return dict(ranks.agree("the frozen files of save()", digests, decide=equal_to_offers).result)


def place_equal_files(
    frozen: Sequence[FileWrites], equal: Mapping[str, str], store: Store
) -> list[FileRecord]:
    """Link or copy the files in `equal` to their paths, on rank 0, and return their records.

    `equal` has the digest of each such file by path. The other candidates are deleted.
    """
    records = []
    for planned in frozen:
        path = planned.file.path
        if path not in equal:
            continue
        digest = equal[path]
        is_linked = store.copy(_candidate_name(digest), path)
        if not is_linked:  # the candidate was the last link that the file system allows
            with closing(store.open(_candidate_name(digest))) as candidate:
                copy_object(candidate, store, path)
        if _is_of_one_writer(digest):
            planned = planned.by_one(0)
        size_bytes, etag = planned.file.layout.size_bytes, etag_of(store, path)
        records.append(
            FileRecord(path, size_bytes, digest, planned.all_cuts, planned.ranks, is_linked, etag)
        )
    names = [stored.name for stored in store.list_folder().objects]
    store.delete([name for name in names if name.startswith(_LINK)])
    return records


def _is_comparable(record: FileRecord, planned: FileWrites, ranks: Ranks, gathers: bool) -> bool:
    """Check whether the file may equal the planned one and its digest can be computed."""
    if record.size_bytes != planned.file.layout.size_bytes:
        return False
    if record.ranks > 1:
        return record.ranks == ranks.size and record.cuts == planned.all_cuts
    return gathers or ranks.size == 1 or not planned.needs_transfer


def _link_candidate(
    checkpoint: EarlierCheckpoint, record: FileRecord, planned: FileWrites, store: Store
) -> bool:
    """Link the earlier file into the staging; return False if its header is another one."""
    name, header = _candidate_name(record.digest), planned.file.layout.header
    with suppress(OSError, CorruptError):  # deleted meanwhile, or the store cannot link it
        if store.stat(name) is not None:
            return True
        if checkpoint.link_file(record, store, name):
            if store.read(name, 0, len(header)) == header:
                return True
            store.delete([name])
    return False


def _is_of_one_writer(digest: str) -> bool:
    return digest.startswith(whole_digest(""))


def _candidate_name(digest: str) -> str:
    return _LINK + digest.replace(":", "-")
