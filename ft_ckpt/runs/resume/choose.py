"""Chooses the checkpoint of a resume on rank 0."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

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
from ft_ckpt.extension_points import load_extension
from ft_ckpt.messages import did_you_mean, warn
from ft_ckpt.progress_bars import track_reads
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.folder import has_training_state, recover_all
from ft_ckpt.runs.resume.opening import CheckpointFacts, ResumePoint, facts_of, open_resume_point
from ft_ckpt.runs.resume.request import MODES, ResumeRequest, folder_exists
from ft_ckpt.runs.state import Restored, RestoreReport
from ft_ckpt.storage.places import Place


class Damage:
    """The problems of the checkpoints that a resume has found to be damaged."""

    def __init__(self) -> None:
        self._by_url: dict[str, Sequence[Problem]] = {}

    def note(self, place: Place, problems: Sequence[Problem]) -> None:
        self._by_url[_absolute_url(place)] = problems

    def at(self, place: Place) -> Sequence[Problem] | None:
        """Return the problems of the checkpoint at `place`, or None if none were found so far."""
        return self._by_url.get(_absolute_url(place))


@dataclass(frozen=True)
class Choice:
    """What to resume from: a checkpoint, or a folder of another program.

    A fresh start has neither.
    """

    facts: CheckpointFacts | None = None
    resume_point: ResumePoint | None = None  # the checkpoint, open on rank 0 alone
    branch: str | None = None  # id of the new run if the resume branches off, see `branch_run_id`
    foreign_folder: Path | None = None


def choose_checkpoint(
    request: ResumeRequest, damage: Damage, ranks: Ranks, stack: ExitStack
) -> Choice:
    """Choose a checkpoint on rank 0, and open it on that rank until `stack` closes.

    Collective: call it on every rank. Checkpoints with `damage` are left out. Raises what
    `open_newest` raises, RankError if another rank failed.
    """
    choice = Choice()
    value: dict[str, object] = {"mode": str(request.mode)}
    with ranks.deferring_error() as choosing:
        if ranks.is_main:
            with track_reads(None if ranks.shows else 0, "comparing checkpoints"):
                choice = _choose(request, damage, stack)
            value |= _to_json(choice)
    agreed = ranks.agree("resume()", value, choosing.error, same=("mode",))
    return choice if ranks.is_main else _from_json(agreed.result)


def _absolute_url(place: Place) -> str:
    return place.absolute.folder.url  # equal for all spellings of a place


def _to_json(choice: Choice) -> dict[str, object]:
    return {
        "facts": None if choice.facts is None else choice.facts._asdict(),
        "branch": choice.branch,
        "foreign_folder": None if choice.foreign_folder is None else str(choice.foreign_folder),
    }


def _from_json(value: Mapping[str, Any]) -> Choice:
    facts, folder = value["facts"], value["foreign_folder"]
    return Choice(
        facts=None if facts is None else CheckpointFacts(**facts),
        branch=value["branch"],
        foreign_folder=None if folder is None else Path(folder),
    )


def _choose(request: ResumeRequest, damage: Damage, stack: ExitStack) -> Choice:
    if request.is_named:
        folder = find_foreign_folder(request.place)
        if folder is not None:
            return Choice(branch=uuid.uuid4().hex, foreign_folder=folder)
    listings: list[Listing] = []
    for run_folder in request.places.folders:
        recover_all(run_folder)  # leftovers of killed saves
        # the newest can be found only if all manifests are readable
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
    resume_point = open_newest(request, infos, damage, stack)
    if resume_point is None:
        if request.mode == "auto":
            _refuse_damaged(listings)
        return Choice()
    return Choice(
        facts_of(resume_point.checkpoint),
        resume_point,
        branch_run_id(request, resume_point.checkpoint, infos),
    )


def open_newest(
    request: ResumeRequest, infos: Sequence[CheckpointInfo], damage: Damage, stack: ExitStack
) -> ResumePoint | None:
    """Open the checkpoint to resume from until `stack` closes; return None for a fresh start.

    `infos` are the run's checkpoints. Of several copies of a checkpoint, the last intact one in
    `infos` is opened. Large files are not compared with their digests.

    The modes are "never"; "auto", the newest intact resumable checkpoint, or None if there is no
    checkpoint at all; "must", the newest or an error; otherwise the named checkpoint. Raises
    NotACheckpointError if there is no checkpoint, CorruptError if none is intact, or naming the
    damaged files of the named checkpoint and the newest intact one.
    """
    mode = request.mode
    if mode == "never":
        return None
    candidates = _candidates(request, infos)
    for number, copies in enumerate(candidates):
        resume_point, problems = _open_whole_copy(copies, damage, stack, deep=False)
        if resume_point is not None:
            return resume_point
        if mode != "auto" or are_transient(problems):
            older = _newest_whole(candidates[number + 1 :], request.deep, damage)
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
    """Return the checkpoints to try in this order, each as the places of its copies."""
    by_content: dict[str, list[Place]] = {}
    for info in resumable(reversed(infos)):
        by_content.setdefault(content_identity(info.manifest), []).append(Place(info.store))
    candidates = list(by_content.values())
    if not request.is_named:
        return candidates
    named = _named_checkpoint(request, infos)
    for copies in candidates:
        further = [place for place in copies if place.folder != named.folder]
        if len(further) < len(copies):
            return [[named, *further]]
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


def _open_whole_copy(
    copies: Sequence[Place], damage: Damage, stack: ExitStack, deep: bool
) -> tuple[ResumePoint | None, Sequence[Problem]]:
    """Open the first whole copy of a checkpoint until `stack` closes; or None and the problems.

    If the system could not read some copies just now, which may be whole, only their problems are
    returned.
    """
    problems: list[Problem] = []
    for place in copies:
        resume_point = None
        problems_of_copy = damage.at(place)
        if problems_of_copy is None:
            open_copy = partial(_open_whole, place, stack, deep)
            resume_point, problems_of_copy = retry_transient(open_copy, _is_transient)
        if resume_point is not None:
            if problems:
                warn(f"{listing(problems)}; damaged, taking its copy {place}")
            return resume_point, ()
        text = f"{place}: {listing(problems_of_copy)}"
        problems.append(Problem(text, are_transient(problems_of_copy)))
    return None, [problem for problem in problems if problem.is_transient] or problems


def _is_transient(opened: tuple[ResumePoint | None, Sequence[Problem]]) -> bool:
    _, problems = opened
    return are_transient(problems)


def _open_whole(
    place: Place, stack: ExitStack, deep: bool
) -> tuple[ResumePoint | None, Sequence[Problem]]:
    """Open the checkpoint at `place` until `stack` closes; or None and its problems."""
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


def _newest_whole(
    candidates: Sequence[Sequence[Place]], deep: bool, damage: Damage
) -> Place | None:
    for copies in candidates:
        with ExitStack() as trial:
            resume_point, _ = _open_whole_copy(copies, damage, trial, deep)
            if resume_point is not None:
                return copies[0]
    return None


def resumable(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    return [info for info in infos if has_training_state(info.manifest)]


def branch_run_id(
    request: ResumeRequest, checkpoint: OpenCheckpoint, infos: Sequence[CheckpointInfo]
) -> str | None:
    """Return a new run id if the user named `checkpoint` and its run has later ones, else None.

    `infos` are the checkpoints in the run's directory.
    """
    if not request.is_named:
        return None
    manifest, around = checkpoint.manifest, checkpoint.place.beside
    folders = [place.absolute.folder.url for place in request.places.folders]
    all_infos = infos if around.url in folders else list_readable(Place(around)).checkpoints
    for info in resumable(all_infos):
        is_later = (info.manifest.step or 0) > (manifest.step or 0)
        if info.manifest.run_id == manifest.run_id and is_later:
            return uuid.uuid4().hex
    return None


def warn_of_other_runs(
    directory: Place, infos: Sequence[CheckpointInfo], mode: str | Place
) -> None:
    """Warn if `directory` has checkpoints (`infos`) of other runs than the one that starts."""
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


def _refuse_damaged(listings: Iterable[Listing]) -> None:
    """Raise ManifestError for damaged manifests.

    Their checkpoints may belong to this run, which must not start over then.
    """
    for listed in listings:
        if listed.damaged:
            problems = listing([str(error) for error in listed.damaged.values()])
            raise ManifestError(
                f"{problems}; there is nothing else to resume from: move it away to begin afresh"
            )


_FIND_ACCELERATE_FOLDER = "ft_ckpt.extensions.foreign.accelerate_folder:find_accelerate_folder"
_READ_ACCELERATE_FOLDER = "ft_ckpt.extensions.foreign.accelerate_folder:read_accelerate_folder"


class ForeignFolder(Protocol):
    """A folder that was read on this rank and fits the run."""

    @property
    def outcomes(self) -> tuple[Restored, ...]:
        """The outcomes of items that the folder lacks."""

    def load(self, run: Any, run_id: str) -> RestoreReport:
        """Restore `run`, and continue as the run `run_id`. Raises LoadError."""


def find_foreign_folder(place: Place) -> Path | None:
    """Return the local folder, at `place` or in it, that another program saved a run in.

    Returns None if there is no such folder.
    """
    local_folder = place.folder.local_folder
    if local_folder is None:
        return None
    folder: Path | None = load_extension(_FIND_ACCELERATE_FOLDER)(local_folder)
    return folder


def read_foreign_folder(folder: Path, run: Any, ranks: Ranks) -> ForeignFolder:
    """Read a folder of `find_foreign_folder` and compare it with `run`; changes nothing.

    Raises LoadError naming files that are damaged or that Accelerate would unpickle, and what does
    not fit the run.
    """
    read: ForeignFolder = load_extension(_READ_ACCELERATE_FOLDER)(folder, run, ranks)
    return read
