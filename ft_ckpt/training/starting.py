"""Where a run begins: which checkpoint `resume` takes, whose others are beside it, and which may be replaced."""

import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.catalog import CheckpointInfo, list_readable, load_manifest
from ft_ckpt.checkpoint.checks import look_again, may_pass
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.checkpoint.run_places import RunPlaces
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    ManifestError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
    listing,
)
from ft_ckpt.messages import LOG, warn
from ft_ckpt.storage.digests import PassingProblem
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.training.accelerate_folder import find_accelerate_folder, is_foreign, open_accelerate_folder
from ft_ckpt.training.state_files import ResumePoint, open_resume_point
from ft_ckpt.transfer.copies import content_identity

MODES = ("auto", "must", "never")
_AUTO = ("latest", "newest", "last", "True", "true")


def parse_mode(checkpoint: Any) -> str | Place:
    """What `resume` was asked for, as one of MODES, or the name, path, URL or place of a checkpoint.

    Raises ConfigError.
    """
    if checkpoint is None or checkpoint is True or checkpoint in _AUTO:
        if checkpoint is not None:
            LOG.info("resume(%r) is resume('auto'): the newest checkpoint, or a fresh start", checkpoint)
        return "auto"
    if checkpoint is False:
        return "never"
    if isinstance(checkpoint, Place):
        return checkpoint
    if isinstance(checkpoint, (str, Path)) and str(checkpoint):
        return str(checkpoint)
    raise ConfigError(
        f"resume({checkpoint!r}): expected {', '.join(map(repr, MODES))}, a checkpoint's name, its path or its URL"
    )


@dataclass(frozen=True)
class Wanted:
    """What a run is asked to resume from: a `mode` as `parse_mode` gives it, in the run's own folders."""

    mode: str | Place
    places: RunPlaces
    options: Mapping[str, Any] = field(default_factory=dict)  # of the client for a URL
    deep: bool = True  # all digests are compared
    late: bool = False  # those of tensor files while these are read, when parts of the run are overwritten already
    damage: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # found so, by the places of checkpoints

    @property
    def is_named(self) -> bool:
        """Whether one checkpoint is asked for, by its name, path, URL or place."""
        return self.mode not in MODES

    @property
    def place(self) -> Place:
        """The checkpoint that is named: the run's own of that name, else a path, as is what has a separator."""
        if isinstance(self.mode, Place):
            return self.mode
        if self.places.directory is None or os.sep in self.mode:
            return self.called(self.mode)
        own = [Place(each.folder, self.mode) for each in reversed(self.places.folders)]
        known = [each for each in (*own, open_place(self.mode)) if _folder_exists(each)]
        return next(iter(known), own[-1])

    def without(self, point: ResumePoint, damage: tuple[str, ...]) -> "Wanted":
        """The same, but for a checkpoint that was found damaged while it was read."""
        return replace(self, damage={**self.damage, _place_key(Place(point.checkpoint.origin)): damage})

    def called(self, path: str) -> Place:
        """The place at a path or URL, by the client that there is where it lies in the run's directory."""
        for known in (self.mode, self.places.directory):
            if isinstance(known, Place) and f"{path}/".startswith(f"{known.folder.url}/"):
                below = path[len(known.folder.url) + 1 :]
                return Place(known.folder, below) if below else known
        return open_place(path, **self.options)


def open_chosen(wanted: Wanted, infos: Sequence[CheckpointInfo], stack: ExitStack) -> ResumePoint | None:
    """The checkpoint to resume from, open until the stack ends; None to start afresh. `infos` are the run's.

    What was compared with its manifest are the open files that are then read. Of several copies the first that is whole
    is taken, from the end of `infos`.

    `wanted`: "never"; "auto", the newest that is whole and resumable, or None where there is none at all; "must", the
    newest, or an error; else one checkpoint. Raises NotACheckpointError when there is none, CorruptError when none is
    whole, or naming the damaged files of the one asked for and the newest whole one.
    """
    mode, wanted = wanted.mode, replace(wanted, late=wanted.late and _hold_the_same(infos))
    if mode == "never":
        return None
    foreign = accelerate_folder_at(wanted.place) if wanted.is_named else None
    if foreign is not None:
        return open_accelerate_folder(foreign, stack)
    known = _grouped_copies(resumable(reversed(infos)))
    candidates = [_copies_of(_named_checkpoint(wanted, infos), known)] if wanted.is_named else known
    for number, copies in enumerate(candidates):
        point, problems = _open_one_of(copies, wanted, stack)
        if point is not None:
            return point
        if mode != "auto" or may_pass(problems):
            early, left = replace(wanted, late=False), candidates[number + 1 :]
            older = next((one[0] for one in left if _open_one_of(one, early, stack)[0]), None)
            advice = f"the newest whole one is {older}" if older else "there is no older one that is whole"
            kind = UnreadableError if may_pass(problems) else CorruptError
            raise kind(f"{listing(problems)}; {advice}{_told_overwritten(wanted)}")
        warn(f"{listing(problems)}; damaged, trying an older one", stacklevel=2)
    if candidates:
        raise CorruptError(
            f"{wanted.places.directory}: none of its {len(candidates)} checkpoints is whole (the warnings say why); "
            f"resume('never') begins afresh, in a folder of its own{_told_overwritten(wanted)}"
        )
    if mode == "must":
        raise NotACheckpointError(
            f"{wanted.places.directory}: no checkpoint with training state in it; use resume('auto') to begin"
        )
    return None


def _hold_the_same(infos: Iterable[CheckpointInfo]) -> bool:
    """Whether any of `infos` overwrites all tensors of a model that another one does."""
    return len({_overwritten_names(info.manifest) for info in resumable(infos)}) < 2


def _overwritten_names(manifest: Manifest) -> frozenset[tuple[str, str]]:
    stored = ((part, tensor.name) for part in manifest.parts for tensor in part.tensors)
    return frozenset((part.path, name) for part, name in stored if part.kind != "state" or name.startswith("weights/"))


def _told_overwritten(wanted: Wanted) -> str:
    return "; the model was partly overwritten before this was found: build it anew" if wanted.damage else ""


def _place_key(place: Place) -> str:
    """Equal for all ways to name a place."""
    return place.absolute.folder.url


def resumable(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Those of `infos` that runs can be resumed from."""
    return [info for info in infos if has_training_state(info.manifest)]


def accelerate_folder_at(place: Place) -> Path | None:
    """The folder of Accelerate's `save_state` on this machine that is meant by `place`; None when it is none."""
    store = place.folder
    return find_accelerate_folder(store.folder) if isinstance(store, LocalStore) else None


def _grouped_copies(infos: Iterable[CheckpointInfo]) -> list[list[Place]]:
    """The places of checkpoints in their order, those of copies of one together."""
    found: dict[str, list[Place]] = {}
    for info in infos:
        found.setdefault(content_identity(info.manifest), []).append(Place(info.store))
    return list(found.values())


def _copies_of(named: Place, known: Iterable[list[Place]]) -> list[Place]:
    """The checkpoint `named` first, then its copies among those `known`."""
    beside = next((copies for copies in known if any(one.folder == named.folder for one in copies)), [])
    return [named, *(one for one in beside if one.folder != named.folder)]


def _named_checkpoint(wanted: Wanted, infos: Sequence[CheckpointInfo]) -> Place:
    """The one checkpoint that is asked for, which has training state."""
    named = wanted.place
    if not _folder_exists(named):
        there = list(dict.fromkeys(info.name for info in infos))
        raise NotACheckpointError(
            f"{named}: is not there; {wanted.places.directory} has {listing(there, ', ') or 'none'}. Expected 'auto', "
            "'must', 'never', the name of one of these, or a path"
        )
    if not has_training_state(load_manifest(named.folder)):
        raise NotACheckpointError(f"{named}: holds weights and no training state; ft_ckpt.load_model reads them")
    return named


def _folder_exists(place: Place) -> bool:
    return place.folder.list_folder().exists


def _open_one_of(copies: Sequence[Place], wanted: Wanted, stack: ExitStack) -> tuple[ResumePoint | None, list[str]]:
    """The first of the copies of a checkpoint that is whole, open until the stack ends; or None, and the problems.

    Where one of them may be whole, the problems are those of that one.
    """
    problems: list[str] = []
    for place in copies:
        point, found = look_again(lambda: _open_whole(place, wanted, stack), lambda tried: may_pass(tried[1]))  # noqa: B023 - called at once
        if point is not None:
            if problems:
                warn(f"{listing(problems)}; damaged, taking its copy {place}", stacklevel=2)
            return point, []
        kind = PassingProblem if may_pass(found) else str
        problems.append(kind(f"{place}: {listing(list(found))}"))
    return None, [one for one in problems if isinstance(one, PassingProblem)] or problems


def _open_whole(place: Place, wanted: Wanted, stack: ExitStack) -> tuple[ResumePoint | None, tuple[str, ...]]:
    """The checkpoint at `place`, open until the stack ends; or None, and what is wrong with it."""
    if known := wanted.damage.get(_place_key(place)):
        return None, known
    with ExitStack() as trial:
        try:
            held = trial.enter_context(open_checkpoint(place, compares=False))
            proofs = held.late_proofs() if wanted.deep and wanted.late else []
            late = {proof.record.path for proof in proofs}
            found = held.find_problems(wanted.deep, keep=held.tensor_files, late=late)
            if not found:
                point = open_resume_point(held, trial, proofs)
                stack.push(trial.pop_all())
                return point, ()
        except UnreadableError as error:
            return None, (PassingProblem(error),)
        except (ManifestError, CorruptError, OSError) as error:
            return None, (str(error),)
    return None, found


def has_training_state(manifest: Manifest) -> bool:
    """Whether the checkpoint has training state."""
    return any(part.kind == "state" for part in manifest.parts)


def branch_run_id(wanted: Wanted, chosen: OpenCheckpoint, infos: Sequence[CheckpointInfo]) -> str | None:
    """A name for the run that goes on from `chosen`, if it was asked for by name and its run has got further.

    `infos` are the checkpoints in the run's directory.
    """
    if not wanted.is_named:
        return None
    beside, manifest = Place(chosen.origin).beside, chosen.manifest
    if is_foreign(manifest):
        return uuid.uuid4().hex
    is_own = any(beside.url == each.absolute.folder.url for each in wanted.places.folders)
    all_beside = infos if is_own else list_readable(Place(beside)).found
    steps = [one.manifest.step or 0 for one in resumable(all_beside) if one.manifest.run_id == manifest.run_id]
    return uuid.uuid4().hex if any(step > (manifest.step or 0) for step in steps) else None


def warn_of_others(directory: Place, infos: Sequence[CheckpointInfo], mode: str | Place) -> None:
    """Say that a folder with checkpoints `infos` holds more runs than the one that goes on, or any beside a new one."""
    newest: dict[str | None, str] = {}
    for info in resumable(infos):
        newest[info.manifest.run_id] = info.name
    runs = [f"{str(run_id)[:6]} (to {name})" for run_id, name in newest.items()]
    if mode == "never" and runs:
        warn(
            f"{directory}: holds another run, {listing(runs, ', ')}; its checkpoints are not replaced: use another "
            "directory, or delete them",
            stacklevel=4,
        )
    elif mode in MODES and len(runs) > 1:
        warn(
            f"{directory}: holds {len(runs)} runs, oldest first {listing(runs, ', ')}; the newest goes on. Use a "
            "directory for each",
            stacklevel=4,
        )


def refuse_replacing(target: Place, has_state: bool, own_ids: Collection[str] | None) -> None:
    """Raise TargetError when a checkpoint is there that one with or without state must not replace.

    One with state is not replaced by one without; with `own_ids`, the names of a run, none of another run is. Raises
    UnreadableError when the manifest there cannot be read just now.
    """
    try:
        manifest = load_manifest(target.folder)
    except ManifestError:
        return  # nothing is committed there, or it is damaged
    if has_training_state(manifest) and not has_state:
        raise TargetError(
            f"{target}: holds training state, which a save of weights alone would delete; save to another path"
        )
    if own_ids is not None and manifest.run_id is not None and manifest.run_id not in own_ids:
        raise TargetError(
            f"{target}: of another run, {manifest.run_id[:6]}, which got to this step before; use another directory, "
            "resume that run, or delete its checkpoints"
        )
