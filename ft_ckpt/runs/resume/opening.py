"""Opens rank 0's checkpoint on every rank, and compares its files with their digests.

A rank finds one of three things at the path of rank 0's checkpoint: the same files (a shared disk
or a bucket), a copy on another disk, or nothing that it can use.

Ranks agree after each step: they exchange their outcomes, and an error of one rank is raised on all
of them. `deferring_error` keeps the error of a block until the ranks agree.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from ft_ckpt.checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.checkpoint.checks import are_transient, large_files, retry_transient
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import Problem, damaged_input
from ft_ckpt.progress_bars import track_reads
from ft_ckpt.ranks import Outcome, Ranks, Values, rank_numbers
from ft_ckpt.runs.state import Document, StoredTensors, read_document
from ft_ckpt.schema import as_record
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import (
    FileRecord,
    FileShare,
    ShareDigests,
    compare_digests,
    digest_shares,
    share_files,
)
from ft_ckpt.storage.places import ListedStore, Place


@dataclass(frozen=True, eq=False)
class ResumePoint:
    """An open checkpoint to resume from: its manifest, its document and its tensors.

    Attributes:
        ranks_without_access: The ranks that do not see the checkpoint and read a copy of it, as
            text such as "2, 3". "" if all ranks see it.
    """

    checkpoint: OpenCheckpoint
    document: Document
    tensors: StoredTensors
    ranks_without_access: str = ""

    def way_to_read(self, fan_out: str) -> str:
        """Return the argument of `choose_filler` for the setting `fan_out` of SaverConfig.

        The result is the same on all ranks. For "auto" it is "small" if the ranks read from a
        bucket: rank 0 then requests small ranges and broadcasts them. Ranks that read a copy on
        their own disk need no broadcast.
        """
        is_in_bucket = isinstance(self.checkpoint.store, ListedStore)
        if fan_out == "auto" and is_in_bucket and not self.ranks_without_access:
            return "small"
        return fan_out


def open_resume_point(checkpoint: OpenCheckpoint, stack: ExitStack) -> ResumePoint:
    """Open the training state of an open checkpoint; `stack` closes it. Raises CorruptError."""
    tensors = StoredTensors(checkpoint)
    stack.callback(tensors.close)
    document = read_document(checkpoint.store, checkpoint.manifest)
    return ResumePoint(checkpoint, document, tensors)


class CheckpointId(NamedTuple):
    """What other ranks need to find rank 0's checkpoint and to recognize it.

    Attributes:
        path: The path or URL on rank 0.
        identity: A digest of the manifest. It is the same for a copy of the checkpoint.
        manifest_stamp: Inode, size and mtime of the manifest's file. They are the same on all
            machines that share a disk, and differ for a copy. The list is empty for a bucket,
            because a bucket is the same on all machines.
    """

    path: str
    identity: str
    manifest_stamp: list[int]


def checkpoint_id_of(checkpoint: OpenCheckpoint) -> CheckpointId:
    stamp = _manifest_stamp(checkpoint)
    return CheckpointId(str(checkpoint.location), checkpoint.identity, stamp)


@dataclass(frozen=True, eq=False)
class RankAccess:
    """How this rank reads rank 0's checkpoint.

    All fields but `resume_point` are equal on all ranks.

    Attributes:
        place: The path or URL of rank 0's checkpoint.
        resume_point: The checkpoint, open on this rank. None if this rank does not see it.
        verifying_ranks: The ranks that see the files of rank 0. They divide the comparison of
            digests. A rank with a copy is not among them, because it compares its copy alone.
        ranks_without_access: The ranks that do not see the checkpoint, as text such as "2, 3".
        deep: Whether all digests are compared.
    """

    place: Place
    resume_point: ResumePoint | None
    verifying_ranks: tuple[int, ...]
    ranks_without_access: str
    deep: bool


def open_on_all_ranks(
    checkpoint_id: CheckpointId,
    resume_point: ResumePoint | None,
    open_path: Callable[[str], Place],
    deep: bool,
    ranks: Ranks,
    stack: ExitStack,
) -> RankAccess:
    """Open rank 0's checkpoint on all ranks; `stack` closes it.

    Collective: call it on every rank. On rank 0 `resume_point` is the checkpoint, which is open
    already. On the other ranks it is None, and the rank opens the path or URL of `checkpoint_id`
    with `open_path`. The rank uses what it finds there if these are the files of rank 0, or an
    intact copy of them. All digests of a copy are compared if `deep`. Otherwise this rank has no
    access, which is no error.
    """
    place = open_path(checkpoint_id.path)
    has_same_files = resume_point is not None
    if resume_point is None:
        with suppress(Exception):  # a rank that cannot open the checkpoint gets a copy of it later
            resume_point, has_same_files = _open_if_equal(checkpoint_id, place, stack, deep)
    answer = {"has_checkpoint": resume_point is not None, "has_same_files": has_same_files}
    what = "opening the checkpoint of resume()"
    access: dict[str, Any] = ranks.agree(what, answer, decide=merge_access).result
    verifying_ranks: list[int] = []
    for first, last in access["same_files"]:
        verifying_ranks += range(first, last + 1)
    return RankAccess(place, resume_point, tuple(verifying_ranks), access["without"], deep)


def merge_access(answers: Values) -> dict[str, Any]:
    """Combine the answers of all ranks whether they have the checkpoint.

    Returns under "without" the ranks that do not have it, as text. Returns under "same_files" the
    ranks that see the files of rank 0, as ranges [first, last]: [[0, 3], [6, 7]] are the ranks 0 to
    3, 6 and 7.
    """
    without = [rank for rank, answer in enumerate(answers) if not answer["has_checkpoint"]]
    same_files: list[list[int]] = []
    for rank, answer in enumerate(answers):
        if not answer["has_same_files"]:
            continue
        if same_files and same_files[-1][1] == rank - 1:
            same_files[-1][1] = rank
        else:
            same_files.append([rank, rank])
    return {"without": rank_numbers(without), "same_files": same_files}


def _open_if_equal(
    checkpoint_id: CheckpointId, place: Place, stack: ExitStack, deep: bool
) -> tuple[ResumePoint | None, bool]:
    """Open the checkpoint at `place` if it is rank 0's or an intact copy of it.

    Returns the open checkpoint or None, and whether its files are those of rank 0.
    """
    with ExitStack() as trial:
        checkpoint = trial.enter_context(open_checkpoint(place))
        if checkpoint.identity != checkpoint_id.identity:
            return None, False
        has_same_files = _manifest_stamp(checkpoint) == checkpoint_id.manifest_stamp
        if not has_same_files and checkpoint.find_problems(deep):
            return None, False
        resume_point = open_resume_point(checkpoint, trial)
        stack.push(trial.pop_all())
        return resume_point, has_same_files


def _manifest_stamp(checkpoint: OpenCheckpoint) -> list[int]:
    if not checkpoint.place.is_local:
        return []
    with damaged_input(checkpoint.path):
        status = (checkpoint.path / MANIFEST_NAME).stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def verify_files(access: RankAccess, ranks: Ranks) -> Sequence[Problem]:
    """Compare the large files with their digests, and return the problems of damaged ones.

    Collective: call it on every rank. The result is the same on all ranks. The ranks that see the
    files of rank 0 divide the work. Without `access.deep` nothing is read, and () is returned.
    Small files are not compared here, because opening the checkpoint has compared them.
    """
    if not access.deep:
        return ()
    checkpoint: OpenCheckpoint | None = None
    files: list[FileRecord] = []
    own_digests: list[ShareDigests] = []
    digesting = Outcome()

    # None is an unknown total. 0 shows no bar.
    bar_total = None if ranks.shows else 0
    with track_reads(bar_total, "comparing checkpoints"):
        if access.resume_point is not None:
            checkpoint = access.resume_point.checkpoint
            files = large_files(checkpoint.store, checkpoint.manifest)
            if ranks.size == 1:  # several ranks would each download everything
                checkpoint.fetch_files([file.path for file in files])
        with digesting.deferring_error():
            if checkpoint is not None and ranks.rank in access.verifying_ranks:
                number = access.verifying_ranks.index(ranks.rank)
                shares = share_files(files, number, len(access.verifying_ranks))
                own_digests = _digest_with_retries(checkpoint.store, shares)

    def compare_all(values: Values) -> list[dict[str, Any]]:
        all_digests: list[ShareDigests] = []
        for value in values:
            all_digests += [as_record(part, ShareDigests) for part in value["parts"]]
        return [asdict(problem) for problem in compare_digests(files, all_digests)]

    digests = {"parts": [asdict(part) for part in own_digests]}
    agreed = ranks.agree(
        "comparing the checkpoint of resume()", digests, digesting.error, decide=compare_all
    )
    return [Problem(**problem) for problem in agreed.result]


def _digest_with_retries(store: Store, shares: Sequence[FileShare]) -> list[ShareDigests]:
    """Compute the digests of the shares, and repeat reads that the system refuses for now."""
    return retry_transient(partial(digest_shares, store, shares), _are_transient)


def _are_transient(parts: Sequence[ShareDigests]) -> bool:
    return are_transient([part.problem for part in parts if part.problem is not None])
