"""Opens the checkpoint to resume from on every rank, and compares its files with their digests.

A rank sees the files of rank 0, or a copy on another disk, or no checkpoint.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
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
    """An open checkpoint to resume from: manifest, document, tensors; each is read once."""

    checkpoint: OpenCheckpoint
    document: Document
    tensors: StoredTensors
    far_ranks: str = ""  # that do not see the checkpoint and read a copy, as text

    def way_to_read(self, fan_out: str) -> str:
        """Return the way for `choose_filler`, from SaverConfig.fan_out and the checkpoint's store.

        The result is the same on all ranks. Ranks that read a copy on their disk do not request
        small ranges of the bucket from rank 0.
        """
        is_in_bucket = isinstance(self.checkpoint.store, ListedStore) and not self.far_ranks
        return "small" if fan_out == "auto" and is_in_bucket else fan_out


def open_resume_point(checkpoint: OpenCheckpoint, stack: ExitStack) -> ResumePoint:
    """Open the state of an open checkpoint until the stack closes. Raises CorruptError."""
    tensors = StoredTensors(checkpoint)
    stack.callback(tensors.close)
    document = read_document(checkpoint.store, checkpoint.manifest)
    return ResumePoint(checkpoint, document, tensors)


class CheckpointFacts(NamedTuple):
    """The facts by which other ranks recognize rank 0's checkpoint.

    `manifest_stamp` (inode, size, mtime) is the same on all machines that share a disk, and differs
    for a copy; it is empty for a bucket, which is the same on all machines.
    """

    path: str
    identity: str
    manifest_stamp: list[int]


@dataclass(frozen=True, eq=False)
class RankView:
    """Rank 0's checkpoint as this rank sees it; which ranks see it is the same on all ranks."""

    place: Place
    resume_point: ResumePoint | None  # None: this rank does not see it
    sharers: tuple[int, ...]  # the ranks that see the files of rank 0
    far_ranks: str  # the ranks that do not see the checkpoint, as text
    deep: bool  # all digests are compared


def facts_of(checkpoint: OpenCheckpoint) -> CheckpointFacts:
    stamp = _manifest_stamp(checkpoint)
    return CheckpointFacts(str(checkpoint.location), checkpoint.identity, stamp)


def open_on_all_ranks(
    facts: CheckpointFacts,
    resume_point: ResumePoint | None,
    open_path: Callable[[str], Place],
    deep: bool,
    ranks: Ranks,
    stack: ExitStack,
) -> RankView:
    """Open rank 0's checkpoint, `resume_point` there, on all ranks until `stack` closes.

    Collective: call it on every rank. A rank opens the checkpoint itself if it finds the files of
    rank 0's `facts` at the same path or URL, or an intact copy, whose digests it compares if
    `deep`. `open_path` resolves path and URL.
    """
    place = open_path(facts.path)
    shares_files = resume_point is not None
    if resume_point is None:
        with suppress(Exception):  # a rank that cannot open it gets a copy of it
            resume_point, shares_files = _open_copy(facts, place, stack, deep)
    sees = {"sees": resume_point is not None, "shares": shares_files}
    views = ranks.agree("opening the checkpoint of resume()", sees, decide=merge_views).result
    sharers: list[int] = []
    for first, last in views["sharers"]:
        sharers += range(first, last + 1)
    return RankView(place, resume_point, tuple(sharers), views["far"], deep)


def merge_views(answers: Values) -> dict[str, Any]:
    """Combine what the ranks see of the checkpoint.

    "far" names the ranks that do not see it, as text. "sharers" has the ranks that share its
    comparison, as runs [first, last].
    """
    far_ranks = [rank for rank, answer in enumerate(answers) if not answer["sees"]]
    sharers = []
    for shares, group in groupby(range(len(answers)), lambda rank: answers[rank]["shares"]):
        members = list(group)
        if shares:
            sharers.append([members[0], members[-1]])
    return {"far": rank_numbers(far_ranks), "sharers": sharers}


def _open_copy(
    facts: CheckpointFacts, place: Place, stack: ExitStack, deep: bool
) -> tuple[ResumePoint | None, bool]:
    """Open the checkpoint as this rank sees it; also return whether its files are rank 0's.

    Returns None for another checkpoint or a damaged one.
    """
    with ExitStack() as trial:
        checkpoint = trial.enter_context(open_checkpoint(place))
        if checkpoint.identity != facts.identity:
            return None, False
        shares_files = _manifest_stamp(checkpoint) == facts.manifest_stamp
        if not shares_files and checkpoint.find_problems(deep):
            return None, False
        resume_point = open_resume_point(checkpoint, trial)
        stack.push(trial.pop_all())
        return resume_point, shares_files


def _manifest_stamp(checkpoint: OpenCheckpoint) -> list[int]:
    if not checkpoint.place.is_local:
        return []
    with damaged_input(checkpoint.path):
        status = (checkpoint.path / MANIFEST_NAME).stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def verify_files(view: RankView, ranks: Ranks) -> Sequence[Problem]:
    """Return the problems of the checkpoint's large files, the same on all ranks.

    Collective: call it on every rank. Small files were compared when the checkpoint was opened. The
    ranks that see the files of rank 0 divide the work. Without `deep` nothing is read.
    """
    if not view.deep:
        return ()
    checkpoint: OpenCheckpoint | None = None
    files: list[FileRecord] = []
    own_parts: list[ShareDigests] = []
    digesting = Outcome()
    with track_reads(None if ranks.shows else 0, "comparing checkpoints"):
        if view.resume_point is not None:
            checkpoint = view.resume_point.checkpoint
            files = large_files(checkpoint.store, checkpoint.manifest)
            if ranks.size == 1:  # several ranks would each download everything
                checkpoint.fetch_files([file.path for file in files])
        with digesting.deferring_error():
            if checkpoint is not None and ranks.rank in view.sharers:
                number = view.sharers.index(ranks.rank)
                shares = share_files(files, number, len(view.sharers))
                own_parts = _digest_whole(checkpoint.store, shares)

    def compare_all(values: Values) -> list[dict[str, Any]]:
        all_parts: list[ShareDigests] = []
        for value in values:
            all_parts += [as_record(part, ShareDigests) for part in value["parts"]]
        return [asdict(problem) for problem in compare_digests(files, all_parts)]

    digests = {"parts": [asdict(part) for part in own_parts]}
    agreed = ranks.agree(
        "comparing the checkpoint of resume()", digests, digesting.error, decide=compare_all
    )
    return [Problem(**problem) for problem in agreed.result]


def _digest_whole(store: Store, shares: Sequence[FileShare]) -> list[ShareDigests]:
    """Compute the digests of the shares; retry reads that the system refuses for now."""
    return retry_transient(partial(digest_shares, store, shares), _are_transient)


def _are_transient(parts: Sequence[ShareDigests]) -> bool:
    return are_transient([part.problem for part in parts if part.problem is not None])
