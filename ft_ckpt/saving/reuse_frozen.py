"""Reuses the files of frozen tensors: a save links a file of an earlier checkpoint.

Frozen tensors do not change during training, and they have files of their own. So a save would
often write a file again that an earlier checkpoint, of any run, already has. It avoids this in four
steps:

1. `frozen_files` lists the planned files that hold only frozen tensors.
2. `link_candidates` searches earlier checkpoints on rank 0. An earlier file is a candidate for a
   planned file if it has the same size and header. It gets a temporary hard link in the staging
   folder; in a bucket, the object store copies it.
3. `find_equal_files` digests, on each rank, the bytes that the rank would write. The ranks exchange
   these digests. A candidate with the same digest has the same bytes.
4. `place_equal_files` links the equal candidates to their final paths on rank 0. Most file systems
   limit the links of a file. At the limit the candidate is copied, and later checkpoints link to
   the copy.

A planned file without an equal candidate is written. Steps 1 and 2 happen when the staging folder
is opened (`saving.stage`), before the ranks have compared their plans. Steps 3 and 4 happen after.

If one rank wrote a file, its digest is of all bytes. If several ranks wrote it, each rank's bytes
have a digest, and these digests are joined to one.
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

# Earlier checkpoints to search, newest first. Several models may be saved in turns.
_MAX_EARLIER = 3
# Prefix of the temporary names of candidates in the staging folder.
_CANDIDATE_PREFIX = ".ft_ckpt-frozen-"


@dataclass(frozen=True)
class Candidates:
    """Files of earlier checkpoints that may have the bytes of one planned file.

    Attributes:
        writer_count: Number of ranks that wrote each of these files.
        digests: The digests of the files.
    """

    writer_count: int
    digests: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ReusedFiles:
    """The planned files of a save that need not be written.

    Attributes:
        digests: The digest of each such file, by its path.
        records: The records of these files on rank 0, which has placed them; () on other ranks.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    records: Sequence[FileRecord] = ()


def frozen_files(plans: Iterable[PartPlan], ranks: int) -> list[FileWrites]:
    """Return the planned files that hold only frozen tensors, each divided among all ranks."""
    frozen_plans = []
    for plan in plans:
        files = []
        for file in plan.files:
            names = [spec.name for spec in file.layout.specs]
            if names and plan.separate.issuperset(names):
                files.append(file)
        if files:
            frozen_plans.append(replace(plan, files=tuple(files)))
    return divide_files(frozen_plans, ranks)


def link_candidates(
    planned_files: Sequence[FileWrites], staging: Staging, ranks: Ranks, gathers: bool
) -> dict[str, Candidates]:
    """Link the candidates for `planned_files` into the staging folder, on rank 0.

    `gathers` says whether tensors may be gathered on rank 0. The digest of a file that one rank
    wrote needs this if the tensors are sharded now. Returns the candidates by the path of the
    planned file. Planned files without candidates are left out.
    """
    if not planned_files:
        return {}
    earlier = list(earlier_checkpoints(staging.beside, _MAX_EARLIER))
    candidates_by_path = {}
    for planned in planned_files:
        linked_records = []
        for checkpoint in earlier:
            for record in checkpoint.files:
                if not _is_comparable(record, planned, ranks, gathers):
                    continue
                if _link_candidate(checkpoint, record, planned, staging.store):
                    linked_records.append(record)

        if not linked_records:
            continue

        # One digest of the new tensors must serve for all candidates of a file. So all candidates
        # have the number of writers of the newest one.
        writer_count = linked_records[0].ranks
        digests = [record.digest for record in linked_records if record.ranks == writer_count]
        distinct = tuple(dict.fromkeys(digests))
        candidates_by_path[planned.file.path] = Candidates(writer_count, distinct)

    return candidates_by_path


def _is_comparable(record: FileRecord, planned: FileWrites, ranks: Ranks, gathers: bool) -> bool:
    """Check whether an earlier file may equal the planned one, and its digest can be computed."""
    if record.size_bytes != planned.file.layout.size_bytes:
        return False
    if record.ranks > 1:
        return record.ranks == ranks.size and record.cuts == planned.all_cuts
    return gathers or ranks.size == 1 or not planned.needs_transfer


def _link_candidate(
    checkpoint: EarlierCheckpoint, record: FileRecord, planned: FileWrites, store: Store
) -> bool:
    """Link an earlier file into the staging folder under its temporary name.

    Returns False if its header differs from the planned one, or if it cannot be linked.
    """
    name = _candidate_name(record.digest)
    header = planned.file.layout.header
    # The earlier checkpoint may be deleted meanwhile, and not every store can link.
    with suppress(OSError, CorruptError):
        if store.stat(name) is not None:  # linked already, for another planned file or checkpoint
            return True
        if checkpoint.link_file(record, store, name):
            if store.read(name, 0, len(header)) == header:
                return True
            store.delete([name])
    return False


def reuse_files(
    plan: SavePlan,
    candidates: Mapping[str, Candidates],
    store: Store | None,
    sources: SourceView,
    ranks: Ranks,
) -> ReusedFiles:
    """Link the planned files that equal one of their `candidates`, instead of writing them.

    `store` is the staging folder on rank 0, None on other ranks. Collective if there are
    candidates.
    """
    if not candidates:
        return ReusedFiles()
    with explained(plan.request.target):
        planned_files = frozen_files(plan.plans, ranks.size)
        digests = find_equal_files(planned_files, candidates, ranks, sources)
        if store is None:
            return ReusedFiles(digests)
        return ReusedFiles(digests, place_equal_files(planned_files, digests, store))


def find_equal_files(
    planned_files: Sequence[FileWrites],
    candidates: Mapping[str, Candidates],
    ranks: Ranks,
    sources: SourceView,
) -> dict[str, str]:
    """Find the planned files that equal a candidate, and return their digests by path.

    If several ranks wrote the candidates of a file, each rank digests the bytes that it would
    write. If one rank wrote them, rank 0 gathers the tensors and digests the whole file.
    Collective: call it on every rank.
    """
    own_digests = {}
    for planned in planned_files:
        path = planned.file.path
        if path not in candidates:
            continue
        divided = planned if candidates[path].writer_count > 1 else planned.by_one(0)
        own_digests[path] = digest_own_bytes(divided, ranks, sources)

    def compare_on_rank_0(digests_of_ranks: Values) -> dict[str, str]:
        equal_digests = {}
        for path, of_file in candidates.items():
            digests = [of_rank[path] for of_rank in digests_of_ranks]
            if of_file.writer_count == 1:
                digest = whole_digest(digests[0])
            else:
                digest = joined_digest(digests)
            if digest in of_file.digests:
                equal_digests[path] = digest
        return equal_digests

    what = "the frozen files of save()"
    return dict(ranks.agree(what, own_digests, decide=compare_on_rank_0).result)


def place_equal_files(
    planned_files: Sequence[FileWrites], digests: Mapping[str, str], store: Store
) -> list[FileRecord]:
    """Link or copy equal candidates to the paths of their planned files, on rank 0.

    `digests` has the digest of each equal file by path. The temporary links of all candidates are
    deleted. Returns the records of the files.
    """
    records = []
    for planned in planned_files:
        path = planned.file.path
        if path not in digests:
            continue
        digest = digests[path]
        is_linked = store.copy(_candidate_name(digest), path)
        if not is_linked:  # the candidate was the last link that the file system allows
            with closing(store.open(_candidate_name(digest))) as candidate:
                copy_object(candidate, store, path)

        written = planned.by_one(0) if _is_whole_digest(digest) else planned
        size_bytes = written.file.layout.size_bytes
        etag = etag_of(store, path)
        records.append(
            FileRecord(path, size_bytes, digest, written.all_cuts, written.ranks, is_linked, etag)
        )

    names = [item.name for item in store.list_folder().objects]
    store.delete([name for name in names if name.startswith(_CANDIDATE_PREFIX)])
    return records


def _is_whole_digest(digest: str) -> bool:
    """Check by its prefix whether a digest is of a whole file, which one rank wrote."""
    prefix = whole_digest("")
    return digest.startswith(prefix)


def _candidate_name(digest: str) -> str:
    """Return the temporary name of the candidate with this digest."""
    return _CANDIDATE_PREFIX + digest.replace(":", "-")
