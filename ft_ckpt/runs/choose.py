"""Choose the checkpoint of a resume on rank 0, and open it on every rank."""

import os
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from ft_ckpt.checkpoint import (
    MANIFEST_NAME,
    CheckpointInfo,
    Listing,
    Manifest,
    OpenCheckpoint,
    are_transient,
    in_run_order,
    large_files,
    list_checkpoints,
    list_readable,
    load_manifest,
    open_checkpoint,
    read_manifest,
    retry_transient,
)
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    ManifestError,
    NotACheckpointError,
    Problem,
    TargetError,
    UnreadableError,
    damaged_input,
    listing,
)
from ft_ckpt.extensions.foreign import find_accelerate_folder
from ft_ckpt.extensions.transfer import content_identity
from ft_ckpt.messages import LOG, did_you_mean, warn
from ft_ckpt.ranks import Ranks, Values, rank_numbers, try_action
from ft_ckpt.runs.arguments import in_words
from ft_ckpt.runs.node_copies import copy_to_nodes
from ft_ckpt.runs.prune import recover_all
from ft_ckpt.runs.run_places import RunPlaces
from ft_ckpt.runs.state import Document, ResumePoint, open_resume_point
from ft_ckpt.runs.verify_shared import verify_files
from ft_ckpt.storage import LocalStore, Place, open_place

MODES = ("auto", "must", "never")
_AUTO = ("latest", "newest", "last", "True", "true")


def parse_mode(checkpoint: Any) -> str | Place:
    """The argument of `resume` as one of MODES, or the name, path, URL or place of a checkpoint.

    Raises ConfigError.
    """
    if checkpoint is None or checkpoint is True or checkpoint in _AUTO:
        if checkpoint is not None:
            LOG.info(
                "resume(%r) is resume('auto'): the newest checkpoint, or a fresh start", checkpoint
            )
        return "auto"
    if checkpoint is False:
        return "never"
    if isinstance(checkpoint, Place):
        return checkpoint
    if isinstance(checkpoint, (str, Path)) and str(checkpoint):
        return str(checkpoint)
    raise ConfigError(
        f"resume(): {in_words(checkpoint)}, expected {', '.join(map(repr, MODES))}, a checkpoint's "
        "name, its path or its URL; objects of the run go by name, as model=model"
    )


@dataclass(frozen=True)
class Wanted:
    """The checkpoint to resume from: a `mode` of `parse_mode`, looked up in the run's own
    folders.
    """

    mode: str | Place
    places: RunPlaces
    options: Mapping[str, Any] = field(default_factory=dict)  # client options for URLs
    deep: bool = True  # compare all digests

    @property
    def is_named(self) -> bool:
        """True if the user named one checkpoint (name, path, URL or place)."""
        return self.mode not in MODES

    @property
    def place(self) -> Place:
        """The named checkpoint: the run's own of that name, else a path.

        A name with a separator is a path.
        """
        if isinstance(self.mode, Place):
            return self.mode
        if self.places.directory is None or os.sep in self.mode:
            return self.open_path(self.mode)
        own = [Place(each.folder, self.mode) for each in reversed(self.places.folders)]
        return next(
            (each for each in (*own, open_place(self.mode)) if _folder_exists(each)), own[-1]
        )

    def open_path(self, path: str) -> Place:
        """The place at a path or URL.

        Reuses the client of the named checkpoint or the run's directory below these.
        """
        for known in (self.mode, self.places.directory):
            if isinstance(known, Place) and f"{path}/".startswith(f"{known.folder.url}/"):
                below = path[len(known.folder.url) + 1 :]
                return Place(known.folder, below) if below else known
        return open_place(path, **self.options)


# the problems of checkpoints that are known to be damaged, by place
Damage: TypeAlias = Mapping[str, tuple[Problem, ...]]


def open_chosen(
    wanted: Wanted, infos: Sequence[CheckpointInfo], damage: Damage, stack: ExitStack
) -> ResumePoint | None:
    """Open the checkpoint to resume from until `stack` closes; None to start afresh.

    `infos` are the run's checkpoints.

    Large files are not compared with their digests here. Of several copies of a checkpoint, the
    first whole one from the end of `infos` is taken.

    Modes: "never"; "auto", the newest whole resumable checkpoint, None if there is no checkpoint at
    all; "must", the newest or an error; otherwise the named checkpoint. Raises NotACheckpointError
    if there is none, CorruptError if none is whole, or naming the damaged files of the named
    checkpoint and the newest whole one.
    """
    mode = wanted.mode
    if mode == "never":
        return None
    candidates = _grouped_copies(resumable(reversed(infos)))
    if wanted.is_named:
        named = _named_checkpoint(wanted, infos)
        copies = next(
            (known for known in candidates if any(one.folder == named.folder for one in known)), []
        )
        candidates = [[named, *(one for one in copies if one.folder != named.folder)]]
    for number, copies in enumerate(candidates):
        point, problems = _open_one_of(copies, damage, stack, deep=False)
        if point is not None:
            return point
        if mode != "auto" or are_transient(problems):
            older = _newest_whole(candidates[number + 1 :], wanted.deep, damage)
            advice = (
                f"the newest whole one is {older}"
                if older
                else "there is no older one that is whole"
            )
            kind = UnreadableError if are_transient(problems) else CorruptError
            raise kind(f"{listing(problems)}; {advice}")
        warn(f"{listing(problems)}; damaged, trying an older one", stacklevel=2)
    if candidates:
        raise CorruptError(
            f"{wanted.places.directory}: none of its {len(candidates)} checkpoints is whole (see "
            "the warnings); resume('never') begins afresh, in a folder of its own"
        )
    if mode == "must":
        raise NotACheckpointError(
            f"{wanted.places.directory}: no checkpoint with training state in it; use "
            "resume('auto') to begin"
        )
    return None


def _newest_whole(
    candidates: Sequence[Sequence[Place]], deep: bool, damage: Damage
) -> Place | None:
    for copies in candidates:
        with ExitStack() as trial:
            if _open_one_of(copies, damage, trial, deep)[0] is not None:
                return copies[0]
    return None


def _place_key(place: Place) -> str:
    """The absolute URL: equal for all spellings of a place."""
    return place.absolute.folder.url


def resumable(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    return [info for info in infos if has_training_state(info.manifest)]


def accelerate_folder_at(place: Place) -> Path | None:
    """The local folder at `place` if Accelerate's `save_state` wrote it, else None."""
    folder = place.folder.local_folder
    return None if folder is None else find_accelerate_folder(folder)


def _grouped_copies(infos: Iterable[CheckpointInfo]) -> list[list[Place]]:
    """The places of checkpoints in order, copies of one checkpoint grouped."""
    by_content: dict[str, list[Place]] = {}
    for info in infos:
        by_content.setdefault(content_identity(info.manifest), []).append(Place(info.store))
    return list(by_content.values())


def _named_checkpoint(wanted: Wanted, infos: Sequence[CheckpointInfo]) -> Place:
    """The named checkpoint.

    Raises NotACheckpointError if it does not exist or has no training state.
    """
    named = wanted.place
    if not _folder_exists(named):
        names = list(dict.fromkeys(info.name for info in infos))
        question = did_you_mean([named.basename], [*names, *MODES])
        question = f"{question} " if question else ""
        raise NotACheckpointError(
            f"{named}: not found; {question}{wanted.places.directory} has "
            f"{listing(names, ', ') or 'none'}. Expected 'auto', 'must', 'never', the name of one "
            "of these, or a path"
        )
    if not has_training_state(read_manifest(named)):
        raise NotACheckpointError(
            f"{named}: holds weights and no training state; ft_ckpt.load_model reads them"
        )
    return named


def _folder_exists(place: Place) -> bool:
    return place.folder.list_folder().exists


def _open_one_of(
    copies: Sequence[Place], damage: Damage, stack: ExitStack, deep: bool
) -> tuple[ResumePoint | None, list[Problem]]:
    """Open the first whole copy of a checkpoint until `stack` closes; or None and the problems.

    If the system could not read some copies just now, which may be whole, only their problems are
    returned.
    """
    problems: list[Problem] = []
    for place in copies:
        found_before = damage.get(_place_key(place))
        if found_before is not None:
            point, lines = None, found_before
        else:
            look = partial(_open_whole, place, stack, deep)
            point, lines = retry_transient(look, lambda tried: are_transient(tried[1]))
        if point is not None:
            if problems:
                warn(f"{listing(problems)}; damaged, taking its copy {place}", stacklevel=2)
            return point, []
        problems.append(Problem(f"{place}: {listing(lines)}", are_transient(lines)))
    return None, [problem for problem in problems if problem.is_transient] or problems


def _open_whole(
    place: Place, stack: ExitStack, deep: bool
) -> tuple[ResumePoint | None, tuple[Problem, ...]]:
    """Open the checkpoint at `place` until `stack` closes; or None and its problems."""
    with ExitStack() as trial:
        try:
            held = trial.enter_context(open_checkpoint(place))
            problems = held.find_problems(deep)
            if not problems:
                point = open_resume_point(held, trial)
                stack.push(trial.pop_all())
                return point, ()
        except UnreadableError as error:
            return None, (Problem(str(error), is_transient=True),)
        except (ManifestError, CorruptError, OSError) as error:
            return None, (Problem(str(error)),)
    return None, problems


def has_training_state(manifest: Manifest) -> bool:
    return any(part.kind == "state" for part in manifest.parts)


def branch_run_id(
    wanted: Wanted, chosen: OpenCheckpoint, infos: Sequence[CheckpointInfo]
) -> str | None:
    """A new run id if the user named `chosen` and its run has later checkpoints, else None.

    `infos` are the checkpoints in the run's directory.
    """
    if not wanted.is_named:
        return None
    beside, manifest = chosen.place.beside, chosen.manifest
    is_own = any(beside.url == each.absolute.folder.url for each in wanted.places.folders)
    all_beside = infos if is_own else list_readable(Place(beside)).found
    steps = [
        info.manifest.step or 0
        for info in resumable(all_beside)
        if info.manifest.run_id == manifest.run_id
    ]
    return uuid.uuid4().hex if any(step > (manifest.step or 0) for step in steps) else None


def warn_of_others(directory: Place, infos: Sequence[CheckpointInfo], mode: str | Place) -> None:
    """Warn if the checkpoints `infos` of `directory` belong to other runs than the one that starts
    or continues.
    """
    newest: dict[str | None, str] = {}
    for info in resumable(infos):
        newest[info.manifest.run_id] = info.name
    runs = [f"{str(run_id)[:6]} (to {name})" for run_id, name in newest.items()]
    if mode == "never" and runs:
        warn(
            f"{directory}: holds another run, {listing(runs, ', ')}; its checkpoints are not "
            "replaced: use another directory, or delete them",
            stacklevel=4,
        )
    elif mode in MODES and len(runs) > 1:
        warn(
            f"{directory}: holds {len(runs)} runs, oldest first {listing(runs, ', ')}; the newest "
            "goes on. Use a directory for each",
            stacklevel=4,
        )


def refuse_replacing(target: Place, has_state: bool, own_ids: Collection[str] | None) -> None:
    """Raise TargetError if `target` holds a checkpoint that the save must not replace.

    A save without training state does not replace a checkpoint with it. With `own_ids`, the ids of
    a run, a save does not replace a checkpoint of another run. Raises UnreadableError if the
    manifest cannot be read just now.
    """
    try:
        manifest = load_manifest(target.folder)
    except ManifestError:
        return  # nothing committed, or damaged
    if has_training_state(manifest) and not has_state:
        raise TargetError(
            f"{target}: holds training state, which a save of weights alone would delete; save to "
            "another path"
        )
    if own_ids is not None and manifest.run_id is not None and manifest.run_id not in own_ids:
        raise TargetError(
            f"{target}: belongs to another run, {manifest.run_id[:6]}; use another directory, "
            "resume that run, or delete its checkpoints"
        )


def checkpoint_facts(held: OpenCheckpoint) -> Document:
    """The facts by which other ranks recognize the checkpoint: path, identity, and the manifest's
    place on its disk.

    The place (inode, size, mtime) is the same on all machines that share a disk, and differs for a
    copy.
    """
    return {"path": str(held.location), "identity": held.identity, "place": _manifest_place(held)}


def open_to_all(
    point: ResumePoint | None,
    facts: Document,
    open_path: Callable[[str], Place],
    ranks: Ranks,
    stack: ExitStack,
    deep: bool,
) -> tuple[ResumePoint | None, tuple[Problem, ...]]:
    """Open rank 0's checkpoint, `point` there, on all ranks until `stack` closes; or None and its
    problems. Collective.

    A rank opens the checkpoint itself if it finds the files of rank 0's `facts` at the same path or
    URL, or a whole copy; `open_path` resolves these. `deep`: all digests are compared before
    anything is read; ranks that see the files of rank 0 share the work. The nodes of other ranks
    get a copy. Raises as `copy_to_nodes`, and CorruptError if a file was damaged on its way.
    """
    place = open_path(facts["path"])
    local: ResumePoint | None
    opened, _ = try_action(
        lambda: (point, True) if point is not None else _open_copy(facts, place, stack, deep)
    )
    local, sees_files_of_rank_0 = (None, False) if opened is None else opened
    mine = {"sees": local is not None, "shares": sees_files_of_rank_0}
    views = ranks.agree("opening the checkpoint of resume()", mine, decide=_merge_views).result
    sharers = [rank for first, last in views["sharers"] for rank in range(first, last + 1)]
    if deep:
        problems = _verify_large_files(local, ranks, sharers)
        if problems:
            return None, problems
    if views["far"]:
        checkpoint = None if point is None else point.checkpoint
        folder = copy_to_nodes(checkpoint, local is None, ranks, stack)
        received, error = ranks.attempt(lambda: local or _open_received(folder, place, stack, deep))
        ranks.agree("opening the copies of the checkpoint of resume()", error=error)
        local = received and replace(received, far_ranks=views["far"])
    assert local is not None, "every rank sees it, or has a copy"
    return local, ()


def _verify_large_files(
    local: ResumePoint | None, ranks: Ranks, sharers: Sequence[int]
) -> tuple[Problem, ...]:
    if local is None:
        return verify_files(None, (), ranks, sharers)
    checkpoint = local.checkpoint
    files = large_files(checkpoint.store, checkpoint.manifest)
    if ranks.size == 1:  # several ranks would each download everything
        checkpoint.fetch_files([file.path for file in files])
    return verify_files(checkpoint, files, ranks, sharers)


def _merge_views(answers: Values) -> Document:
    """The ranks that do not see the checkpoint, as text, and those that share its comparison, as
    [first, last] runs.
    """
    far = rank_numbers([rank for rank, answer in enumerate(answers) if not answer["sees"]])
    runs = [
        (shares, [*run])
        for shares, run in groupby(range(len(answers)), lambda rank: answers[rank]["shares"])
    ]
    return {"far": far, "sharers": [[run[0], run[-1]] for shares, run in runs if shares]}


def _open_copy(
    facts: Document, place: Place, stack: ExitStack, deep: bool
) -> tuple[ResumePoint, bool] | None:
    """The checkpoint as this rank sees it, and whether its files are rank 0's; None if it is
    another or damaged.
    """
    with ExitStack() as trial:
        local = trial.enter_context(open_checkpoint(place))
        is_rank_0s = _manifest_place(local) == facts["place"]
        if local.identity == facts["identity"] and (is_rank_0s or not local.find_problems(deep)):
            point = open_resume_point(local, trial)
            stack.push(trial.pop_all())
            return point, is_rank_0s
    return None


def _open_received(
    folder: LocalStore | None, place: Place, stack: ExitStack, deep: bool
) -> ResumePoint:
    """The copy of rank 0's checkpoint at `place` that this node has received.

    Raises CorruptError for a damaged one.
    """
    assert folder is not None, "a rank that does not see the checkpoint has asked for a copy"
    received = stack.enter_context(open_checkpoint(Place(folder)))
    problems = received.find_problems(deep)
    if problems:
        raise CorruptError(
            f"{place}: damaged on the way to this node: {listing(problems)}; resume again"
        )
    return open_resume_point(replace(received, place=place), stack)


def _manifest_place(held: OpenCheckpoint) -> list[int]:
    """Inode, size and mtime of the manifest; empty for a bucket, which is the same on all
    machines.
    """
    if not held.place.is_local:
        return []
    with damaged_input(held.path):
        status = (held.path / MANIFEST_NAME).stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


@dataclass(frozen=True)
class Choice:
    """What to resume from: a checkpoint, which is open, or a folder of Accelerate; neither to start
    afresh.
    """

    point: ResumePoint | None = None
    branch: str | None = None  # id of the new run if the resume branches off, see `branch_run_id`
    accelerate_folder: Path | None = None


def choose_checkpoint(wanted: Wanted, ranks: Ranks, stack: ExitStack) -> Choice:
    """Choose a checkpoint on rank 0 and open it on every rank until `stack` closes. Collective.

    All its digests are compared, if `wanted` asks for it: a damaged checkpoint is left out, and the
    next one chosen. Raises what `open_chosen` raises, RankError if another rank failed.
    """
    damage: dict[str, tuple[Problem, ...]] = {}
    while True:
        with ExitStack() as trial:
            choice, facts = _agree_on_choice(wanted, damage, ranks, trial)
            if facts is None:
                stack.push(trial.pop_all())
                return choice
            point, problems = open_to_all(
                choice.point, facts, wanted.open_path, ranks, trial, wanted.deep
            )
            if point is not None:
                stack.push(trial.pop_all())
                return replace(choice, point=point)
        damage[_place_key(wanted.open_path(facts["path"]))] = problems


def _agree_on_choice(
    wanted: Wanted, damage: Damage, ranks: Ranks, stack: ExitStack
) -> tuple[Choice, Document | None]:
    """The choice of rank 0, which alone has the checkpoint open yet, and the facts of the
    checkpoint, if any.
    """
    chosen, error = ranks.attempt(
        lambda: _choose_and_open(wanted, damage, stack) if ranks.is_main else None
    )
    no_choice: tuple[ResumePoint | None, Document] = (None, {})
    point, choice = chosen or no_choice
    choice = ranks.agree(
        "resume()", {"mode": str(wanted.mode), **choice}, error, same=("mode",)
    ).result
    if "accelerate_folder" in choice:
        return Choice(None, choice["branch"], Path(choice["accelerate_folder"])), None
    if "facts" not in choice:
        return Choice(), None
    return Choice(point, choice["branch"]), choice["facts"]


def _choose_and_open(
    wanted: Wanted, damage: Damage, stack: ExitStack
) -> tuple[ResumePoint | None, Document] | None:
    """The open checkpoint, if one is chosen, and what the other ranks need to know; None to start
    afresh.
    """
    accelerate_folder = accelerate_folder_at(wanted.place) if wanted.is_named else None
    if accelerate_folder is not None:
        return None, {"accelerate_folder": str(accelerate_folder), "branch": uuid.uuid4().hex}
    listings: list[Listing] = []
    for folder in wanted.places.folders:
        recover_all(folder)  # leftovers of killed saves
        # the newest can be found only if all manifests are readable
        if wanted.mode in ("auto", "must"):
            listings.append(list_readable(folder))
        else:
            listings.append(list_checkpoints(folder))
            listings[-1].warn_left_out()
    infos = [info for listed in listings for info in listed.found]
    if wanted.places.directory is not None:
        infos = in_run_order(infos)
        warn_of_others(wanted.places.directory, infos, wanted.mode)
    point = open_chosen(wanted, infos, damage, stack)
    if point is None:
        if wanted.mode == "auto":
            _refuse_damaged(listings)
        return None
    branch = branch_run_id(wanted, point.checkpoint, infos)
    return point, {"facts": checkpoint_facts(point.checkpoint), "branch": branch}


def _refuse_damaged(listings: Iterable[Listing]) -> None:
    """Raise ManifestError for damaged manifests: they may belong to this run, which must not start
    afresh then.
    """
    for listed in listings:
        if listed.damaged:
            problems = listing([str(error) for error in listed.damaged.values()])
            raise ManifestError(
                f"{problems}; there is nothing else to resume from: move it away to begin afresh"
            )
