"""Restores a run from a checkpoint, after `match_run` has compared the two.

This is the first step of a resume that overwrites something.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from ft_ckpt.errors import damaged_input, listing
from ft_ckpt.progress_bars import track_reads
from ft_ckpt.ranks import Ranks
from ft_ckpt.ranks.moving import Filler, choose_filler
from ft_ckpt.runs.items import changed_flags, optimizers_among
from ft_ckpt.runs.loop import TrainingRun
from ft_ckpt.runs.resume.allowed import HALF_RESTORED, AllowedItems
from ft_ckpt.runs.resume.match_run import MatchedRun, RunComparison
from ft_ckpt.runs.resume.opening import ResumePoint
from ft_ckpt.runs.resume.restore_items import replica_differences, restore_items, restore_weights
from ft_ckpt.runs.state import (
    Document,
    Restored,
    RestoreReport,
    agree_on_outcomes,
    fingerprint_differences,
    not_restored,
    restore_rank_state,
)


def restore_state(
    run: TrainingRun,
    matched: MatchedRun,
    comparison: RunComparison,
    resume_point: ResumePoint,
    allowed: AllowedItems,
    versions: Mapping[str, str],
) -> RestoreReport:
    """Restore `run`, except for the items that do not fit (`comparison.misfits`).

    Collective: call it on every rank. Weights, optimizers, objects, the state of each rank, and the
    progress are restored. Raises LoadError if an item fails that is not in `allowed`. The run is
    half restored then.
    """
    ranks = matched.ranks
    label = f"resuming {resume_point.checkpoint.place.basename}"
    with track_reads(_bytes_to_show(resume_point, ranks), label):
        report = RestoreReport()
        with ranks.deferring_error() as restoring:
            report = _restore_on_rank(run, matched, comparison, resume_point, versions)
        items, requests = agree_on_outcomes(
            ranks, "resume()", report.items, report.requests, restoring.error
        )
        allowed.refuse_unrestored(resume_point.checkpoint.location, items, HALF_RESTORED)
        for item in run.objects.optimizers():
            item.kind.after_restore(item.optimizer)
    return replace(report, items=items, requests=requests)


def _bytes_to_show(resume_point: ResumePoint, ranks: Ranks) -> int | None:
    """Return the total of the progress bar in bytes; None if unknown, 0 for no bar.

    The total is known for one rank, which reads all tensors. Several ranks read a share each.
    """
    if not ranks.shows:
        return 0
    if ranks.size > 1:
        return None
    total = 0
    for part in resume_point.checkpoint.manifest.parts:
        total += sum(tensor.end - tensor.start for tensor in part.tensors)
    return total or None


def _restore_on_rank(
    run: TrainingRun,
    matched: MatchedRun,
    comparison: RunComparison,
    resume_point: ResumePoint,
    versions: Mapping[str, str],
) -> RestoreReport:
    checkpoint = resume_point.checkpoint
    document = resume_point.document
    misfit_names = {outcome.name for outcome in comparison.misfits}
    filler = choose_filler(resume_point.way_to_read(run.config.fan_out), matched.ranks)
    outcomes = [*not_restored(comparison.outcomes)]
    outcomes += _restore_items(matched, resume_point, filler, misfit_names)
    with damaged_input(f"{checkpoint.location}: its training state"):
        rank_state = restore_rank_state(
            run.accelerator,
            run.objects.models(),
            document,
            resume_point.tensors,
            matched.ranks,
            comparison.rank_trees,
        )
        run.feeds = rank_state.feeds
        run.restore_progress(document, checkpoint.place.folder, checkpoint.manifest.created)

    outcomes += [outcome for outcome in comparison.outcomes if outcome.status == "restored"]
    outcomes += rank_state.outcomes
    return RestoreReport(
        path=checkpoint.location,
        items=tuple(outcomes),
        differences=tuple(_differences(run, matched, document, versions)),
        notes=(*rank_state.notes, *_notes_on(resume_point)),
        requests=checkpoint.requests,
    )


def _restore_items(
    matched: MatchedRun, resume_point: ResumePoint, filler: Filler, misfit_names: Collection[str]
) -> list[Restored]:
    """Restore the weights, then models and optimizers, then other objects.

    The order matters, because an optimizer may depend on weights, and a scheduler on its optimizer.
    """
    sources = matched.sources
    rank = matched.ranks.rank
    items = [item for item in matched.items if item.name not in misfit_names]
    objects = [item for item in items if item.kind == "object"]
    models_and_optimizers = [item for item in items if item.kind != "object"]
    outcomes = []
    if "weights" not in misfit_names:
        outcomes.append(restore_weights(sources, resume_point, filler))
    for item in optimizers_among(items):
        item.kind.before_restore(item.optimizer)
    outcomes += restore_items(models_and_optimizers, sources, resume_point, rank, filler)
    outcomes += restore_items(objects, sources, resume_point, rank, filler)
    return outcomes


def _differences(
    run: TrainingRun,
    matched: MatchedRun,
    document: Document,
    versions: Mapping[str, str],
) -> list[str]:
    """Return a sentence for each way in which this run differs from the one that was saved.

    They are changed settings, changed `requires_grad`, watched models with other values, and what
    differed between the ranks of the saved run.
    """
    fingerprint = run.current_fingerprint(matched.sources, matched.ranks, versions)
    return [
        *fingerprint_differences(document["fingerprint"], fingerprint),
        *changed_flags(document, matched.sources),
        *run.objects.differing_models(document.get("watched", {})),
        *replica_differences(document),
    ]


def _notes_on(resume_point: ResumePoint) -> list[str]:
    """Return the sentences for the user on copies of the checkpoint, and on what it lacks."""
    notes = []
    if resume_point.ranks_without_access:
        notes.append(
            f"rank(s) {resume_point.ranks_without_access} do not see the checkpoint: rank 0 has "
            "sent it to their nodes"
        )
    unsaved = resume_point.document.get("unsaved", ())
    if unsaved:
        names = listing(list(unsaved), ", ")
        notes.append(f"{names}: not in the checkpoint, begins as the script makes it")
    return notes
