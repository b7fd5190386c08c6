"""Opens rank 0's checkpoint on every rank: the same files, a copy on another disk, or not at
all.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from ft_ckpt.checkpoint import MANIFEST_NAME, OpenCheckpoint, open_checkpoint
from ft_ckpt.errors import damaged_input
from ft_ckpt.ranks import Ranks, Values, rank_numbers, try_action
from ft_ckpt.runs.resume_point import ResumePoint, open_resume_point
from ft_ckpt.storage import Place


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
    Collective.

    A rank opens the checkpoint itself if it finds the files of rank 0's `facts` at the same path or
    URL, or a whole copy, whose digests it compares if `deep`; `open_path` resolves path and URL.
    """
    place = open_path(facts.path)
    if resume_point is not None:
        shares_files = True
    else:
        opened, _ = try_action(lambda: _open_copy(facts, place, stack, deep))
        resume_point, shares_files = (None, False) if opened is None else opened
    sees = {"sees": resume_point is not None, "shares": shares_files}
    views = ranks.agree("opening the checkpoint of resume()", sees, decide=merge_views).result
    sharers: list[int] = []
    for first, last in views["sharers"]:
        sharers += range(first, last + 1)
    return RankView(place, resume_point, tuple(sharers), views["far"], deep)


def merge_views(answers: Values) -> dict[str, Any]:
    """The ranks that do not see the checkpoint, as text, and those that share its comparison, as
    [first, last] runs.
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
) -> tuple[ResumePoint, bool] | None:
    """The checkpoint as this rank sees it, and whether its files are rank 0's.

    None if it is another or damaged.
    """
    with ExitStack() as trial:
        checkpoint = trial.enter_context(open_checkpoint(place))
        if checkpoint.identity != facts.identity:
            return None
        shares_files = _manifest_stamp(checkpoint) == facts.manifest_stamp
        if not shares_files and checkpoint.find_problems(deep):
            return None
        resume_point = open_resume_point(checkpoint, trial)
        stack.push(trial.pop_all())
        return resume_point, shares_files


def _manifest_stamp(checkpoint: OpenCheckpoint) -> list[int]:
    if not checkpoint.place.is_local:
        return []
    with damaged_input(checkpoint.path):
        status = (checkpoint.path / MANIFEST_NAME).stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]
