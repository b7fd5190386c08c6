"""Resumes a run: chooses a checkpoint, verifies its files, restores the run and reports.

Ranks agree after each step: they exchange their outcomes, and an error of one rank is raised on all
of them. `ranks.deferring_error` keeps the error of a block until the ranks agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ft_ckpt.errors import LoadError, listing
from ft_ckpt.messages import warn
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.loop import TrainingRun
from ft_ckpt.runs.resume.allowed import HALF_RESTORED, AllowedItems
from ft_ckpt.runs.resume.choose import Choice, DamagedCheckpoints, choose_checkpoint
from ft_ckpt.runs.resume.foreign_folder import read_foreign_folder
from ft_ckpt.runs.resume.match_run import compare_state, match_items
from ft_ckpt.runs.resume.node_copies import copy_to_nodes
from ft_ckpt.runs.resume.opening import open_on_all_ranks, verify_files
from ft_ckpt.runs.resume.request import ResumeRequest
from ft_ckpt.runs.resume.restore_run import restore_state
from ft_ckpt.runs.state import Restored, RestoreReport, agree_on_outcomes


def resume_run(
    run: TrainingRun,
    request: ResumeRequest,
    ranks: Ranks,
    allow: Iterable[str] | bool,
    versions: Mapping[str, str],
) -> None:
    """Restore `run` from the checkpoint that `request` selects.

    Collective: call it on every rank. For a fresh start the run stays as it is.

    Digests, items and settings are compared before anything is overwritten. If a file is damaged,
    the checkpoint is skipped and another one is chosen. If restoring an item fails after the
    comparison, the run is half restored. `versions` has the version of each library by name.
    `allow` and the errors are those of `CheckpointSaver.resume`.
    """
    allowed = AllowedItems(allow)
    damaged = DamagedCheckpoints()
    with ExitStack() as stack:
        while True:
            choice = choose_checkpoint(request, damaged, ranks, stack)
            if choice.checkpoint_id is None:
                _resume_without_checkpoint(run, choice, ranks, allowed)
                return

            access = open_on_all_ranks(
                choice.checkpoint_id,
                choice.resume_point,
                request.open_path,
                request.deep,
                ranks,
                stack,
            )
            problems = verify_files(access, ranks)
            if not problems:
                break

            # The loop ends, because the next call of `choose_checkpoint` skips this checkpoint. It
            # raises CorruptError if there is no other, or if the user asked for this one.
            damaged.add(access.place, problems)
            stack.close()  # this closes the damaged checkpoint

        resume_point = copy_to_nodes(access, ranks, stack)
        matched = match_items(run, resume_point, ranks)
        comparison = compare_state(run, matched, resume_point, allowed)
        report = restore_state(run, matched, comparison, resume_point, allowed, versions)

        # Closing the checkpoint checks again that it was not replaced, which may fail on one rank.
        ranks.run("the end of resume()", stack.close)
        report_resume(run, report)
        run.branch_off(choice.new_run_id)


def _resume_without_checkpoint(
    run: TrainingRun, choice: Choice, ranks: Ranks, allowed: AllowedItems
) -> None:
    """Restore `run` from the folder of another program if one was chosen; else do nothing.

    Collective: call it on every rank. Every rank must see the folder. Raises LoadError for items
    that the folder lacks and that are not in `allowed`.
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
        report = folder.load(run, str(choice.new_run_id))
    items, _ = agree_on_outcomes(
        ranks, "accelerator.load_state in resume()", report.items, error=loading.error
    )
    allowed.refuse_unrestored(path, items, HALF_RESTORED)
    report_resume(run, replace(report, items=items))


def report_resume(run: TrainingRun, report: RestoreReport) -> None:
    """Store the report in the run, and report its differences and notes to the user.

    With `on_difference="warn"` both are warnings. With `on_difference="raise"` differences raise
    LoadError. The run is restored in both cases.
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
