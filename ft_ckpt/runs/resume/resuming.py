"""Resumes a run: `resume_run` calls the steps in the order in which they happen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ft_ckpt.errors import LoadError, Problem, listing
from ft_ckpt.messages import warn
from ft_ckpt.ranks import Outcome, Ranks
from ft_ckpt.runs.loop import TrainingRun
from ft_ckpt.runs.resume.allowed import HALF_RESTORED, AllowedItems
from ft_ckpt.runs.resume.choose import Choice, Damage, choose_checkpoint, read_foreign_folder
from ft_ckpt.runs.resume.match_run import compare_state, match_items
from ft_ckpt.runs.resume.node_copies import copy_to_nodes
from ft_ckpt.runs.resume.opening import (
    CheckpointFacts,
    ResumePoint,
    facts_of,
    open_on_all_ranks,
    verify_files,
)
from ft_ckpt.runs.resume.request import ResumeRequest
from ft_ckpt.runs.resume.restore_run import restore_state
from ft_ckpt.runs.state import Restored, RestoreReport, agree_on_outcomes
from ft_ckpt.storage.places import open_place


def resume_run(
    run: TrainingRun,
    request: ResumeRequest,
    ranks: Ranks,
    allow: Iterable[str] | bool,
    versions: Mapping[str, str],
) -> None:
    """Restore `run` from the checkpoint that `request` selects.

    Collective: call it on every rank. For a fresh start the run stays as it is. Digests, items and
    settings are compared before anything is overwritten; a damaged checkpoint is left out, and the
    next one chosen. If an item fails afterwards, the run is half restored. `allow` and errors are
    those of `CheckpointSaver.resume`.
    """
    allowed = AllowedItems(allow)
    damage = Damage()
    with ExitStack() as stack:
        while True:
            choice = choose_checkpoint(request, damage, ranks, stack)
            if choice.facts is None:
                _resume_without_checkpoint(run, choice, ranks, allowed)
                return
            view = open_on_all_ranks(
                choice.facts, choice.resume_point, request.open_path, request.deep, ranks, stack
            )
            problems = verify_files(view, ranks)
            if not problems:
                break
            damage.note(view.place, problems)
            stack.close()  # what is open of the damaged checkpoint
        resume_point = copy_to_nodes(view, ranks, stack)
        matched = match_items(run, resume_point, ranks)
        comparison = compare_state(run, matched, resume_point, allowed)
        report = restore_state(run, matched, comparison, resume_point, allowed, versions)
        # the close looks once more whether the checkpoint was replaced, which may fail on one rank
        ranks.run("the end of resume()", stack.close)
        report_resume(run, report)
        run.branch_off(choice.branch)


def report_resume(run: TrainingRun, report: RestoreReport) -> None:
    """Keep the report.

    Differences and notes are warnings with `on_difference="warn"`. Differences raise LoadError with
    `on_difference="raise"`.
    """
    run.note_resumed(report)
    on_difference = run.config.on_difference
    if report.differences and on_difference == "raise":
        raise LoadError(
            f"{report.path}: {listing(report.differences)}; start with the same settings, or "
            "on_difference='warn' to go on"
        )
    lines = [*report.differences, *report.notes]
    if lines and on_difference == "warn":
        warn(f"{report.path}: {listing(lines)}")


def _resume_without_checkpoint(
    run: TrainingRun, choice: Choice, ranks: Ranks, allowed: AllowedItems
) -> None:
    """Let another program restore `run` from its folder, if one was chosen.

    Collective: call it on every rank. Every rank must see the folder.
    """
    path = choice.foreign_folder
    if path is None:
        return
    absent: Sequence[Restored] = ()
    with ranks.deferring_error() as reading:
        folder = read_foreign_folder(path, run, ranks)
        absent = folder.outcomes
    absent, _ = agree_on_outcomes(
        ranks, "reading the folder of resume()", absent, error=reading.error
    )
    names = {item.name for item in run.objects.items()}
    allowed.refuse_unknown(names, absent)
    allowed.refuse_unrestored(path, absent, "nothing was overwritten")
    report = RestoreReport()
    with ranks.deferring_error() as loading:
        report = folder.load(run, str(choice.branch))
    items, _ = agree_on_outcomes(
        ranks, "accelerator.load_state in resume()", report.items, error=loading.error
    )
    allowed.refuse_unrestored(path, items, HALF_RESTORED)
    report_resume(run, replace(report, items=items))


def open_for_all(
    open_on_leader: Callable[[], ResumePoint],
    what: str,
    deep: bool,
    ranks: Ranks,
    stack: ExitStack,
) -> tuple[ResumePoint | None, Sequence[Problem]]:
    """Open on all ranks, until `stack` closes, what `open_on_leader` opens on rank 0.

    Collective: call it on every rank. If the files are damaged, None and their problems are
    returned. `what` names the call in errors. With `deep`, all digests are compared.
    """
    resume_point: ResumePoint | None = None
    facts: dict[str, object] = {}
    opening = Outcome()
    with opening.deferring_error():
        if ranks.is_main:
            resume_point = open_on_leader()
            facts = facts_of(resume_point.checkpoint)._asdict()
    agreed = ranks.agree(what, facts, opening.error).result
    view = open_on_all_ranks(
        CheckpointFacts(**agreed), resume_point, open_place, deep, ranks, stack
    )
    problems = verify_files(view, ranks)
    if problems:
        return None, problems
    return copy_to_nodes(view, ranks, stack), ()
