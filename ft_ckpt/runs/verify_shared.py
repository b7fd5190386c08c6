"""Compares the files of an open checkpoint with their digests on the ranks that see it, before any
rank uses them.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ft_ckpt.checkpoint import OpenCheckpoint, are_transient, large_files, retry_transient
from ft_ckpt.errors import Problem
from ft_ckpt.ranks import Ranks, Values, try_action
from ft_ckpt.runs.open_on_ranks import RankView
from ft_ckpt.schema import as_record
from ft_ckpt.storage import (
    FileRecord,
    PartDigests,
    compare_digests,
    digest_shares,
    share_files,
    track_reads,
)


def verify_files(view: RankView, ranks: Ranks) -> Sequence[Problem]:
    """The problems of the checkpoint's large files; the same on all ranks. Collective.

    Small files were compared when it was opened. The ranks that see the files of rank 0 divide the
    work. Nothing is read unless all digests are to be compared.
    """
    if not view.deep:
        return ()
    checkpoint: OpenCheckpoint | None = None
    files: list[FileRecord] = []
    with track_reads(None if ranks.shows else 0, "comparing checkpoints"):
        if view.resume_point is not None:
            checkpoint = view.resume_point.checkpoint
            files = large_files(checkpoint.store, checkpoint.manifest)
            if ranks.size == 1:  # several ranks would each download everything
                checkpoint.fetch_files([file.path for file in files])
        parts, error = try_action(lambda: _digest_own_share(checkpoint, files, ranks, view.sharers))

    def compare_all(values: Values) -> list[dict[str, Any]]:
        all_parts: list[PartDigests] = []
        for value in values:
            all_parts += [as_record(part, PartDigests) for part in value["parts"]]
        return [asdict(problem) for problem in compare_digests(files, all_parts)]

    digests = {"parts": [asdict(part) for part in parts or ()]}
    agreed = ranks.agree("comparing the checkpoint of resume()", digests, error, decide=compare_all)
    return [Problem(**problem) for problem in agreed.result]


def _digest_own_share(
    checkpoint: OpenCheckpoint | None,
    files: Sequence[FileRecord],
    ranks: Ranks,
    sharers: Sequence[int],
) -> list[PartDigests]:
    if checkpoint is None or ranks.rank not in sharers:
        return []
    shares = share_files(files, sharers.index(ranks.rank), len(sharers))
    return retry_transient(lambda: digest_shares(checkpoint.store, shares), _are_transient)


def _are_transient(parts: Sequence[PartDigests]) -> bool:
    return are_transient([part.problem for part in parts if part.problem is not None])
