"""Opens on all ranks the checkpoint that rank 0 has named, whole."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ft_ckpt.errors import Problem
from ft_ckpt.ranks import Ranks, try_action
from ft_ckpt.runs.node_copies import copy_to_nodes
from ft_ckpt.runs.open_on_ranks import CheckpointFacts, facts_of, open_on_all_ranks
from ft_ckpt.runs.resume_point import ResumePoint
from ft_ckpt.runs.verify_shared import verify_files
from ft_ckpt.storage import open_place


def open_for_all(
    open_on_leader: Callable[[], ResumePoint],
    what: str,
    deep: bool,
    ranks: Ranks,
    stack: ExitStack,
) -> tuple[ResumePoint | None, Sequence[Problem]]:
    """Open on all ranks, until `stack` closes, what `open_on_leader` opens on rank 0.

    Or None and the problems of its files. Collective. `what` names the call in errors; `deep`: all
    digests are compared.
    """
    resume_point, error = try_action(lambda: open_on_leader() if ranks.is_main else None)
    facts = {} if resume_point is None else facts_of(resume_point.checkpoint)._asdict()
    agreed = ranks.agree(what, facts, error).result
    view = open_on_all_ranks(
        CheckpointFacts(**agreed), resume_point, open_place, deep, ranks, stack
    )
    problems = verify_files(view, ranks)
    if problems:
        return None, problems
    return copy_to_nodes(view, ranks, stack), ()
