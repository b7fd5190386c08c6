"""Resume a run, step by step: choose a checkpoint, open, compare, restore tensors, then objects,
and report.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft_ckpt.config import names_of
from ft_ckpt.errors import ConfigError, LoadError, damaged_input, listing
from ft_ckpt.extensions.deepspeed import zero_optimizer
from ft_ckpt.extensions.foreign import read_accelerate_folder
from ft_ckpt.messages import did_you_mean, warn
from ft_ckpt.ranks import Filler, Ranks, choose_filler
from ft_ckpt.runs.choose import Wanted, choose_checkpoint
from ft_ckpt.runs.items import (
    items_in_saved_order,
    run_items,
    walk_run,
    zero_optimizers,
)
from ft_ckpt.runs.restore import (
    LiveRun,
    Restored,
    RestoreReport,
    agree_on_outcomes,
    compare_adapters,
    compare_base,
    find_misfits,
    note_on_replicas,
    restore_items,
    restore_weights,
)
from ft_ckpt.runs.run import (
    TrainingRun,
    fingerprint_differences,
    read_rank_state,
    restore_rank_state,
)
from ft_ckpt.runs.state import ResumePoint, changed_flags
from ft_ckpt.runs.watched import differing_models
from ft_ckpt.storage import track_reads

_HALF_RESTORED = "parts of the run are overwritten: make its objects again before another resume()"
# items beside a run's objects
_NOT_OBJECTS = ("adapter settings", "base", "data", "gradients", "rng")


def resume_run(
    run: TrainingRun,
    wanted: Wanted,
    ranks: Ranks,
    allow: Iterable[str] | bool,
    versions: Mapping[str, str],
) -> None:
    """Restore `run` from the checkpoint that `wanted` selects; leave it as it is for a fresh start.

    Collective.

    Digests are compared before anything is overwritten. `allow` and errors as for
    `CheckpointSaver.resume`.
    """
    allowed = None if allow is True else _allowed_names(allow)
    with ExitStack() as stack:
        with track_reads(None if ranks.shows else 0, "comparing checkpoints"):
            choice = choose_checkpoint(wanted, ranks, stack)
        if choice.accelerate_folder is not None:
            load_accelerate_folder(
                run, choice.accelerate_folder, str(choice.branch), ranks, allowed
            )
            return
        point = choice.point
        if point is None:
            return
        with track_reads(
            _bytes_to_show(point, ranks), f"resuming {point.checkpoint.place.basename}"
        ):
            restore_run(run, point, ranks, allowed, versions)
        run.branch_off(choice.branch)


def _bytes_to_show(point: ResumePoint, ranks: Ranks) -> int | None:
    """The total for the bar of a resume: a single rank reads all tensors, of several each reads its
    part.
    """
    if not ranks.shows:
        return 0
    if ranks.size > 1:
        return None
    tensors = [tensor for part in point.checkpoint.manifest.parts for tensor in part.tensors]
    return sum(tensor.end - tensor.start for tensor in tensors) or None


def _allowed_names(allow: Iterable[str] | bool) -> frozenset[str]:
    """The names of the items that may stay unrestored. Raises ConfigError for anything else."""
    try:
        return frozenset(names_of(() if allow is False else allow, "resume(allow=...)"))
    except ConfigError as error:
        raise ConfigError(f"{error}, or True for any") from None


def load_accelerate_folder(
    run: TrainingRun, path: Path, run_id: str, ranks: Ranks, allowed: frozenset[str] | None
) -> None:
    """Restore `run` by Accelerate from its folder at `path`, and continue as the run `run_id`.
    Collective.

    Every rank must see the folder. `allowed` as for `restore_run`.
    """
    folder, error = ranks.attempt(lambda: read_accelerate_folder(path, run, ranks))
    absent = () if folder is None else folder.outcomes
    absent, _ = agree_on_outcomes(ranks, "reading the folder of resume()", absent, error=error)
    if allowed is not None:
        _refuse_unknown(
            allowed, {item.name for item in run_items(run.accelerator, run.registered)}, absent
        )
    _refuse_unrestored(path, absent, allowed, "nothing was overwritten")
    assert folder is not None, "the agreement has raised the error"
    loaded, error = ranks.attempt(lambda: folder.load(run, run_id))
    report = RestoreReport() if loaded is None else loaded
    items, _ = agree_on_outcomes(
        ranks, "accelerator.load_state in resume()", report.items, error=error
    )
    report = replace(report, items=items)
    _refuse_unrestored(path, items, allowed, _HALF_RESTORED)
    run.note_resumed(report)
    _settle_differences(report, run.config.on_difference)


def restore_run(
    run: TrainingRun,
    point: ResumePoint,
    ranks: Ranks,
    allowed: frozenset[str] | None,
    versions: Mapping[str, str],
) -> None:
    """Restore `run` from `point`, whose files are compared; items in `allowed` may fail (None:
    all). Collective.

    Everything that can be compared is compared first. If an item fails afterwards, the run is half
    restored.
    """
    path = point.checkpoint.location
    compared, error = ranks.attempt(lambda: _compare_on_rank(run, point, ranks))
    misfits = () if compared is None else compared.misfits
    agreed, _ = agree_on_outcomes(ranks, "checking the state of resume()", misfits, error=error)
    assert compared is not None, "the agreement has raised the error"
    if allowed is not None:
        document = point.document
        names = {
            *document["items"],
            *document.get("let_go", ()),
            *(item.name for item in compared.live.items),
        }
        _refuse_unknown(allowed, names, agreed)
    _refuse_unrestored(path, agreed, allowed, "nothing was overwritten")
    left_out = {outcome.name for outcome in agreed}
    restored, error = ranks.attempt(
        lambda: _restore_on_rank(run, point, compared, left_out, versions)
    )
    report = RestoreReport() if restored is None else restored
    items, requests = agree_on_outcomes(ranks, "resume()", report.items, report.requests, error)
    report = replace(report, items=items, requests=requests)
    _refuse_unrestored(path, items, allowed, _HALF_RESTORED)
    for optimizer in zero_optimizers(run_items(run.accelerator, run.registered)):
        zero_optimizer.refresh_weights(optimizer)
    run.note_resumed(report)
    _settle_differences(report, run.config.on_difference)


@dataclass(frozen=True, eq=False)
class _Compared:
    """This rank's part of the run and what does not fit the checkpoint; nothing is overwritten
    yet.
    """

    live: LiveRun
    trees: Mapping[str, Any]  # this rank's own state, by name
    outcomes: tuple[Restored, ...]

    @property
    def misfits(self) -> tuple[Restored, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status != "restored")


def _compare_on_rank(run: TrainingRun, point: ResumePoint, ranks: Ranks) -> _Compared:
    live = _live_run(run, point, ranks)
    trees, problems = read_rank_state(point.document, point.tensors, ranks)
    outcomes = (*problems, *_compare_state(live, run.config.attribute, point))
    return _Compared(live, trees, outcomes)


def _restore_on_rank(
    run: TrainingRun,
    point: ResumePoint,
    compared: _Compared,
    left_out: Collection[str],
    versions: Mapping[str, str],
) -> RestoreReport:
    """Restore this rank's part of the run without the items `left_out`. Collective."""
    held, ranks = point.checkpoint, compared.live.ranks
    live = replace(
        compared.live, items=[item for item in compared.live.items if item.name not in left_out]
    )
    fill_all = choose_filler(point.way_to_read(run.config.fan_out), ranks)
    outcomes = _restore_tensors(live, point, fill_all, with_weights="weights" not in left_out)
    outcomes += [outcome for outcome in compared.outcomes if outcome.status == "restored"]
    outcomes += restore_items(
        [item for item in live.items if item.kind == "object"], live, point, fill_all
    )
    with damaged_input(f"{held.location}: its training state"):
        notes, of_rank = restore_rank_state(
            run, point.document, point.tensors, ranks, compared.trees
        )
        run.restore_progress(point.document, held.place.folder, held.manifest.created)
    return RestoreReport(
        held.location,
        (*compared.misfits, *outcomes, *of_rank),
        (*_differences(run, live, point, versions), *note_on_replicas(point.document)),
        (*notes, *_note_of_copies(point), *_notes_of_unsaved(point)),
        held.requests,
    )


def _live_run(run: TrainingRun, point: ResumePoint, ranks: Ranks) -> LiveRun:
    """The items of the run under the names of the checkpoint, and the tensors of its models."""
    items = items_in_saved_order(
        run.accelerator, run.registered, point.document.get("signatures", {})
    )
    items, _, found = walk_run(run.model, items)
    return LiveRun(run.accelerator, run.model, items, found, ranks)


def _compare_state(live: LiveRun, attribute: str | None, point: ResumePoint) -> list[Restored]:
    """Compare the items, the adapter settings and the base with those of the checkpoint; overwrites
    nothing.
    """
    return [
        *find_misfits(live, point),
        *compare_adapters(live, attribute, point),
        *compare_base(live, attribute, point),
    ]


def _differences(
    run: TrainingRun, live: LiveRun, point: ResumePoint, versions: Mapping[str, str]
) -> list[str]:
    """Settings and flags in which the run differs from the one that saved."""
    fingerprint = run.current_fingerprint(live.found, live.ranks, versions)
    changed = fingerprint_differences(point.document["fingerprint"], fingerprint)
    models = differing_models(run.watched, point.document.get("watched", {}))
    return [*changed, *changed_flags(point.document, live.found), *models]


def _note_of_copies(point: ResumePoint) -> list[str]:
    """A note for the report if nodes have got a copy of the checkpoint."""
    if not point.far_ranks:
        return []
    return [
        f"rank(s) {point.far_ranks} do not see the checkpoint: rank 0 has sent it to their nodes"
    ]


def _notes_of_unsaved(point: ResumePoint) -> list[str]:
    names = list(point.document.get("unsaved", ()))
    return (
        [f"{listing(names, ', ')}: not in the checkpoint, begins as the script makes it"]
        if names
        else []
    )


def _restore_tensors(
    live: LiveRun, point: ResumePoint, fill_all: Filler, with_weights: bool
) -> list[Restored]:
    outcomes = [restore_weights(live.found, point, fill_all)] if with_weights else []
    for optimizer in zero_optimizers(live.items):
        zero_optimizer.adopt_weights(optimizer)
    return outcomes + restore_items(
        [item for item in live.items if item.kind != "object"], live, point, fill_all
    )


def _refused(outcomes: Sequence[Restored], allowed: Collection[str] | None) -> list[str]:
    """A line for each item that was not restored and must be; none if `allowed` is None."""
    failed = [
        outcome for outcome in outcomes if allowed is not None and outcome.name not in allowed
    ]
    return list(RestoreReport(items=tuple(failed)).problems)


def _refuse_unrestored(
    path: Path | str, outcomes: Sequence[Restored], allowed: Collection[str] | None, effect: str
) -> None:
    """Raise LoadError naming each item that was not restored and must be."""
    refused = _refused(outcomes, allowed)
    if refused:
        raise LoadError(
            f"{path}: {listing(refused)}. Pass the same objects as the saved run, or "
            f"resume(allow=[names]) to go on without; {effect}"
        )


def _refuse_unknown(
    allowed: frozenset[str], names: Collection[str], outcomes: Iterable[Restored]
) -> None:
    """Raise ConfigError for allowed names of no item: `names`, and those of the `outcomes`."""
    known = {*_NOT_OBJECTS, *names, *(outcome.name for outcome in outcomes)} - {"weights"}
    if unknown := sorted(allowed - known):
        names = listing([repr(name) for name in unknown], ", ")
        question = did_you_mean(unknown, known)
        raise ConfigError(
            f"resume(allow=...): {names}: no such item; there are "
            f"{listing(sorted(known), ', ', 20)}{'; ' if question else ''}{question}"
        )


def _settle_differences(report: RestoreReport, on_difference: str) -> None:
    """Warn about differences and notes, or raise LoadError for differences, as the setting says."""
    if report.differences and on_difference == "raise":
        raise LoadError(
            f"{report.path}: {listing(list(report.differences))}; start with the same settings, or "
            "on_difference='warn' to go on"
        )
    if (lines := [*report.differences, *report.notes]) and on_difference == "warn":
        warn(f"{report.path}: {listing(lines)}", stacklevel=4)
