"""Opens a checkpoint that the caller chooses on all ranks, as a resume opens its own."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ft_ckpt.errors import Problem
from ft_ckpt.ranks import Outcome, Ranks
from ft_ckpt.runs.resume.node_copies import copy_to_nodes
from ft_ckpt.runs.resume.opening import (
    CheckpointId,
    ResumePoint,
    checkpoint_id_of,
    open_on_all_ranks,
    verify_files,
)
from ft_ckpt.storage.places import open_place


def open_for_all(
    open_on_leader: Callable[[], ResumePoint],
    operation: str,
    deep: bool,
    ranks: Ranks,
    stack: ExitStack,
) -> tuple[ResumePoint | None, Sequence[Problem]]:
    """Open one checkpoint on all ranks.

    Collective: call it on every rank. Rank 0 finds the checkpoint with `open_on_leader`, and
    `stack` closes it on every rank. Returns the checkpoint and no problems, or None and the
    problems of damaged files. With `deep` all digests are compared. `operation` names the call in
    errors.
    """
    resume_point: ResumePoint | None = None
    id_fields: dict[str, object] = {}
    opening = Outcome()
    with opening.deferring_error():
        if ranks.is_main:
            resume_point = open_on_leader()
            id_fields = checkpoint_id_of(resume_point.checkpoint)._asdict()

    agreed = ranks.agree(operation, id_fields, opening.error)
    checkpoint_id = CheckpointId(**agreed.result)
    access = open_on_all_ranks(checkpoint_id, resume_point, open_place, deep, ranks, stack)
    problems = verify_files(access, ranks)
    if problems:
        return None, problems
    return copy_to_nodes(access, ranks, stack), ()
