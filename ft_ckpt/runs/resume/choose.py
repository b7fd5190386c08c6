"""Chooses the checkpoint of a resume on rank 0: the newest intact one, or the one that is named.

A checkpoint may have copies, for example in the upload folder and in the bucket of a run. All of
them are tried before an older checkpoint. A place is a folder on a disk or a prefix in a bucket.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.checkpoint.catalog import (
    CheckpointInfo,
    Listing,
    in_run_order,
    list_checkpoints,
    list_readable,
)
from ft_ckpt.checkpoint.checks import are_transient, retry_transient
from ft_ckpt.checkpoint.manifest import content_identity, read_manifest
from ft_ckpt.errors import (
    CorruptError,
    ManifestError,
    NotACheckpointError,
    Problem,
    UnreadableError,
    listing,
)
from ft_ckpt.messages import did_you_mean, warn
from ft_ckpt.progress_bars import track_reads
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.folder import has_training_state, recover_all
from ft_ckpt.runs.resume.foreign_folder import find_foreign_folder
from ft_ckpt.runs.resume.opening import (
    CheckpointId,
    ResumePoint,
    checkpoint_id_of,
    open_resume_point,
)
from ft_ckpt.runs.resume.request import MODES, ResumeRequest, folder_exists
from ft_ckpt.storage.places import Place


class DamagedCheckpoints:
    """The checkpoints that this resume has found to be damaged, with their problems.

    `choose_checkpoint` skips them.
    """

    def __init__(self) -> None:
        self._problems_by_url: dict[str, Sequence[Problem]] = {}

    def add(self, place: Place, problems: Sequence[Problem]) -> None:
        """Record that the checkpoint at `place` has these problems."""
        self._problems_by_url[_absolute_url(place)] = problems

    def problems_of(self, place: Place) -> Sequence[Problem] | None:
        """Return the problems of the checkpoint at `place`; None if none were found so far."""
        return self._problems_by_url.get(_absolute_url(place))


def _absolute_url(place: Place) -> str:
    """Return the URL of a place, which is the same for relative and absolute paths to it."""
    return place.absolute.folder.url


@dataclass(frozen=True)
class Choice:
    """What to resume from: a checkpoint, or a folder of another program.

    A fresh start has neither.

    Attributes:
        checkpoint_id: By which other ranks find the checkpoint. None without a checkpoint.
        resume_point: The checkpoint, which is open on rank 0. None on the other ranks.
        new_run_id: The id under which the run continues, or None if it keeps its id. See
            `id_of_branch`.
        foreign_folder: The folder of another program.
    """

    checkpoint_id: CheckpointId | None = None
    resume_point: ResumePoint | None = None
    new_run_id: str | None = None
    foreign_folder: Path | None = None


def choose_checkpoint(
    request: ResumeRequest, damaged: DamagedCheckpoints, ranks: Ranks, stack: ExitStack
) -> Choice:
    """Choose a checkpoint on rank 0, and open it there; `stack` closes it.

    Collective: call it on every rank. The checkpoints in `damaged` are skipped. Raises on rank 0
    what `open_newest` raises, and RankError on the other ranks.
    """
    choice = Choice()
    value: dict[str, object] = {"mode": str(request.mode)}
    with ranks.deferring_error() as choosing:
        if ranks.is_main:
            # None is an unknown total. 0 shows no bar.
            bar_total = None if ranks.shows else 0
            with track_reads(bar_total, "comparing checkpoints"):
                choice = _choose(request, damaged, stack)
            value |= _to_json(choice)
    agreed = ranks.agree("resume()", value, choosing.error, same=("mode",))
    return choice if ranks.is_main else _from_json(agreed.result)


def _to_json(choice: Choice) -> dict[str, object]:
    """Return what the other ranks need of rank 0's choice."""
    checkpoint_id, folder = choice.checkpoint_id, choice.foreign_folder
    return {
        "checkpoint_id": None if checkpoint_id is None else checkpoint_id._asdict(),
        "new_run_id": choice.new_run_id,
        "foreign_folder": None if folder is None else str(folder),
    }


def _from_json(value: Mapping[str, Any]) -> Choice:
    id_fields, folder = value["checkpoint_id"], value["foreign_folder"]
    return Choice(
        checkpoint_id=None if id_fields is None else CheckpointId(**id_fields),
        new_run_id=value["new_run_id"],
        foreign_folder=None if folder is None else Path(folder),
    )


def _choose(request: ResumeRequest, damaged: DamagedCheckpoints, stack: ExitStack) -> Choice:
    """Choose what to resume from, on rank 0. `stack` closes the checkpoint."""
    if request.is_named:
        folder = find_foreign_folder(request.place)
        if folder is not None:
            return Choice(new_run_id=uuid.uuid4().hex, foreign_folder=folder)

    listings: list[Listing] = []
    for run_folder in request.places.folders:
        recover_all(run_folder)  # finishes or undoes saves whose process was killed
        # Without all manifests, an older checkpoint could be taken for the newest one.
        if request.mode in ("auto", "must"):
            listings.append(list_readable(run_folder))
        else:
            listings.append(list_checkpoints(run_folder))
            listings[-1].warn_left_out()

    infos: list[CheckpointInfo] = []
    for listed in listings:
        infos += listed.checkpoints
    if request.places.directory is not None:
        infos = in_run_order(infos)
        warn_of_other_runs(request.places.directory, infos, request.mode)

    resume_point = open_newest(request, infos, damaged, stack)
    if resume_point is None:
        if request.mode == "auto":
            _refuse_damaged(listings)
        return Choice()

    checkpoint = resume_point.checkpoint
    return Choice(
        checkpoint_id_of(checkpoint),
        resume_point,
        id_of_branch(request, checkpoint, infos),
    )


def warn_of_other_runs(
    directory: Place, infos: Sequence[CheckpointInfo], mode: str | Place
) -> None:
    """Warn if the checkpoints `infos` in `directory` belong to other runs.

    With the mode "never" these are all runs, else all but the newest.
    """
    newest: dict[str | None, str] = {}
    for info in resumable(infos):
        newest[info.manifest.run_id] = info.name
    runs = [f"{str(run_id)[:6]} (to {name})" for run_id, name in newest.items()]
    if mode == "never" and runs:
        warn(
            f"{directory}: holds another run, {listing(runs, ', ')}; its checkpoints are not "
            "replaced: use another directory, or delete them",
        )
    elif mode in MODES and len(runs) > 1:
        warn(
            f"{directory}: holds {len(runs)} runs, oldest first {listing(runs, ', ')}; the newest "
            "goes on. Use a directory for each",
        )


def resumable(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    return [info for info in infos if has_training_state(info.manifest)]


def open_newest(
    request: ResumeRequest,
    infos: Sequence[CheckpointInfo],
    damaged: DamagedCheckpoints,
    stack: ExitStack,
) -> ResumePoint | None:
    """Open the checkpoint that `request` asks for; `stack` closes it.

    `infos` are the checkpoints of the run, oldest first. If a checkpoint has several copies, the
    last intact one in `infos` is opened. Large files are not compared with their digests here.

        mode       result
        "never"    None, which is a fresh start
        "auto"     the newest intact checkpoint with a training state; None if there is none at all
        "must"     the newest checkpoint with a training state
        other      the named checkpoint

    Raises NotACheckpointError if there is no such checkpoint. Raises CorruptError if it is damaged
    and the mode is not "auto"; the error names the newest intact one. Raises CorruptError for
    "auto" if all checkpoints are damaged. Raises UnreadableError if the system cannot read it now.
    """
    mode = request.mode
    if mode == "never":
        return None
    candidates = _candidates(request, infos)
    for number, copies in enumerate(candidates):
        resume_point, problems = _open_intact_copy(copies, damaged, stack, deep=False)
        if resume_point is not None:
            return resume_point
        if mode != "auto" or are_transient(problems):
            older = _newest_intact(candidates[number + 1 :], request.deep, damaged)
            advice = "there is no older one that is whole"
            if older is not None:
                advice = f"the newest whole one is {older}"
            kind = UnreadableError if are_transient(problems) else CorruptError
            raise kind(f"{listing(problems)}; {advice}")
        warn(f"{listing(problems)}; damaged, trying an older one")

    if candidates:
        raise CorruptError(
            f"{request.places.directory}: none of its {len(candidates)} checkpoints is whole (see "
            "the warnings); resume('never') begins afresh, in a folder of its own"
        )

    if mode == "must":
        raise NotACheckpointError(
            f"{request.places.directory}: no checkpoint with training state in it; use "
            "resume('auto') to begin"
        )

    return None


def _candidates(request: ResumeRequest, infos: Sequence[CheckpointInfo]) -> list[list[Place]]:
    """Return the checkpoints to try, in this order.

    Each checkpoint is a list of the places of its copies. For a named checkpoint the list has one
    element, in which the named copy comes first.
    """
    by_content: dict[str, list[Place]] = {}
    for info in resumable(reversed(infos)):
        by_content.setdefault(content_identity(info.manifest), []).append(Place(info.store))
    candidates = list(by_content.values())
    if not request.is_named:
        return candidates
    named = _named_checkpoint(request, infos)
    for copies in candidates:
        other_copies = [place for place in copies if place.folder != named.folder]
        if len(other_copies) < len(copies):
            return [[named, *other_copies]]
    return [[named]]


def _named_checkpoint(request: ResumeRequest, infos: Sequence[CheckpointInfo]) -> Place:
    """Return the named checkpoint.

    Raises NotACheckpointError if it does not exist or has no training state.
    """
    place = request.place
    if not folder_exists(place):
        names = list(dict.fromkeys(info.name for info in infos))
        question = did_you_mean([place.basename], [*names, *MODES])
        question = f"{question} " if question else ""
        raise NotACheckpointError(
            f"{place}: not found; {question}{request.places.directory} has "
            f"{listing(names, ', ') or 'none'}. Expected 'auto', 'must', 'never', the name of one "
            "of these, or a path"
        )

    if not has_training_state(read_manifest(place)):
        raise NotACheckpointError(
            f"{place}: holds weights and no training state; ft_ckpt.load_model reads them"
        )

    return place


def _open_intact_copy(
    copies: Sequence[Place], damaged: DamagedCheckpoints, stack: ExitStack, deep: bool
) -> tuple[ResumePoint | None, Sequence[Problem]]:
    """Open the first intact copy of a checkpoint; `stack` closes it.

    Returns the checkpoint and no problems, or None and the problems of the copies. If the system
    cannot read some copies now, only their problems are returned, because these copies may be
    intact.
    """
    problems: list[Problem] = []
    for place in copies:
        resume_point = None
        problems_of_copy = damaged.problems_of(place)
        if problems_of_copy is None:
            open_copy = partial(_open_if_intact, place, stack, deep)
            resume_point, problems_of_copy = retry_transient(open_copy, _is_transient)
        if resume_point is not None:
            if problems:
                warn(f"{listing(problems)}; damaged, taking its copy {place}")
            return resume_point, ()
        text = f"{place}: {listing(problems_of_copy)}"
        problems.append(Problem(text, are_transient(problems_of_copy)))

    transient_problems = [problem for problem in problems if problem.is_transient]
    return None, transient_problems or problems


def _is_transient(opened: tuple[ResumePoint | None, Sequence[Problem]]) -> bool:
    _, problems = opened
    return are_transient(problems)


def _open_if_intact(
    place: Place, stack: ExitStack, deep: bool
) -> tuple[ResumePoint | None, Sequence[Problem]]:
    """Open the checkpoint at `place` if it is intact; `stack` closes it.

    Returns the checkpoint and no problems, or None and its problems.
    """
    with ExitStack() as trial:
        try:
            checkpoint = trial.enter_context(open_checkpoint(place))
            problems = checkpoint.find_problems(deep)
            if problems:
                return None, problems
            resume_point = open_resume_point(checkpoint, trial)
        except UnreadableError as error:
            return None, (Problem(str(error), is_transient=True),)
        except (ManifestError, CorruptError, OSError) as error:
            return None, (Problem(str(error)),)
        stack.push(trial.pop_all())
        return resume_point, ()


def _newest_intact(
    candidates: Sequence[Sequence[Place]], deep: bool, damaged: DamagedCheckpoints
) -> Place | None:
    """Return the first of `candidates` that has an intact copy, for an error message."""
    for copies in candidates:
        with ExitStack() as trial:
            resume_point, _ = _open_intact_copy(copies, damaged, trial, deep)
            if resume_point is not None:
                return copies[0]
    return None


def id_of_branch(
    request: ResumeRequest, checkpoint: OpenCheckpoint, infos: Sequence[CheckpointInfo]
) -> str | None:
    """Return a new run id if the resume goes back to an older checkpoint of its run, else None.

    Only a resume by name can do so. For example, a run was saved at the steps 10, 20 and 30, and
    the user resumes from step 10: the checkpoints of the steps 20 and 30 do not belong to what is
    trained now, so the run continues under a new id. `infos` are the checkpoints in the run's
    directory.
    """
    if not request.is_named:
        return None
    manifest, folder = checkpoint.manifest, checkpoint.place.beside
    run_folders = [place.absolute.folder.url for place in request.places.folders]
    neighbours: Sequence[CheckpointInfo] = infos
    if folder.url not in run_folders:
        neighbours = list_readable(Place(folder)).checkpoints
    for info in resumable(neighbours):
        is_later = (info.manifest.step or 0) > (manifest.step or 0)
        if info.manifest.run_id == manifest.run_id and is_later:
            return uuid.uuid4().hex
    return None


def _refuse_damaged(listings: Iterable[Listing]) -> None:
    """Raise ManifestError if the run's folders have damaged manifests.

    Their checkpoints may belong to this run. If so, it must not start over.
    """
    for listed in listings:
        if listed.damaged:
            problems = listing([str(error) for error in listed.damaged.values()])
            raise ManifestError(
                f"{problems}; there is nothing else to resume from: move it away to begin afresh"
            )
