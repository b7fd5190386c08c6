"""Compares the files of an open checkpoint with their digests on the ranks that see it, before any
rank uses them.
"""

from collections.abc import Sequence
from dataclasses import asdict

from ft_ckpt.checkpoint import OpenCheckpoint, look_again
from ft_ckpt.ranks import Ranks, Values, try_action
from ft_ckpt.storage import (
    FileRecord,
    PartDigests,
    PassingProblem,
    compare_digests,
    digest_shares,
    share_files,
)


def verify_files(
    checkpoint: OpenCheckpoint | None,
    files: Sequence[FileRecord],
    ranks: Ranks,
    sharers: Sequence[int],
) -> tuple[str, ...]:
    """The problems of `files`, a line each; the same on all ranks. Collective.

    The ranks `sharers` see the same files and divide the work. The others may have None as their
    `checkpoint`.
    """
    parts, error = try_action(lambda: _digest_own_share(checkpoint, files, ranks, sharers))
    own = {"parts": [asdict(part) for part in parts or ()]}

    def compare_all(values: Values) -> list[tuple[str, bool]]:
        all_parts = [PartDigests(**part) for value in values for part in value["parts"]]
        problems = compare_digests(files, all_parts)
        return [(str(problem), isinstance(problem, PassingProblem)) for problem in problems]

    agreed = ranks.agree("comparing the checkpoint of resume()", own, error, decide=compare_all)
    return tuple(PassingProblem(text) if is_passing else text for text, is_passing in agreed.result)


def _digest_own_share(
    checkpoint: OpenCheckpoint | None,
    files: Sequence[FileRecord],
    ranks: Ranks,
    sharers: Sequence[int],
) -> list[PartDigests]:
    if checkpoint is None or ranks.rank not in sharers:
        return []
    shares = share_files(files, sharers.index(ranks.rank), len(sharers))
    return look_again(lambda: digest_shares(checkpoint.store, shares), _may_pass)


def _may_pass(parts: Sequence[PartDigests]) -> bool:
    """Whether a second try may succeed: all problems are of files that the system cannot read
    now.
    """
    problems = [part for part in parts if part.problem is not None]
    return bool(problems) and all(part.is_passing for part in problems)
