"""Finds, orders and verifies the checkpoints of a run, and numbers new ones. Read-only; imports no torch."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint.checks import checkpoint_problems, look_again, may_pass, small_problems, stored_bytes
from ft_ckpt.checkpoint.manifest import MANIFEST_LIMIT_BYTES, MANIFEST_NAME, Manifest, check_paths, manifest_from_json
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    ManifestError,
    MissingError,
    NotACheckpointError,
    UnreadableError,
    damaged_input,
    listing,
)
from ft_ckpt.messages import warn
from ft_ckpt.storage.digests import SMALL_BYTES, PassingProblem
from ft_ckpt.storage.frozen_view import hold_listed
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.store import Folder, FolderListing, Store, read_range, read_text

_ASKED_AT_ONCE = 16  # manifests of a run in a bucket


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint and what its manifest says."""

    store: Store
    manifest: Manifest

    @property
    def place(self) -> Place:
        """Where it is, for functions."""
        return Place(self.store)

    @property
    def path(self) -> Path | str:
        """Where it is, for people: its path on this machine, or its URL."""
        return self.place.location

    @property
    def name(self) -> str:
        """What its folder is called."""
        return self.place.last_step


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify`."""

    path: str | Path
    """The checkpoint: its path, or its URL."""
    ok: bool
    """Whether there are no problems."""
    problems: tuple[str, ...]
    """What differs from the manifest, with the file first."""
    files: int
    """Number of files that the manifest lists."""
    bytes: int
    """Their size, in bytes."""


def read_manifest(path: str | os.PathLike[str] | Place) -> Manifest:
    """The manifest of the checkpoint folder `path`, which may be a URL.

    Raises NotACheckpointError when nothing is committed there; ManifestError when the manifest is damaged, from a
    newer ft_ckpt, or names a place outside the folder; UnreadableError when the system would not read it just now.
    """
    return load_manifest(open_place(path).folder)


def load_manifest(store: Store) -> Manifest:
    """The manifest of the checkpoint that `store` holds. Raises as `read_manifest` does."""
    return parse_manifest(manifest_text(store), store.where(MANIFEST_NAME))


def manifest_text(store: Store) -> str:
    """The text of the manifest in `store`. Raises as `read_manifest` does."""
    try:
        return read_text(store, MANIFEST_NAME, MANIFEST_LIMIT_BYTES)
    except MissingError as error:
        raise NotACheckpointError(
            f"{store.url}: no {MANIFEST_NAME} in it, so no save was completed there; use another folder or save again"
        ) from error
    except UnreadableError:
        raise
    except CorruptError as error:
        raise ManifestError(str(error)) from error


def parse_manifest(text: str, where: str) -> Manifest:
    """The manifest that `text` is, all of its paths inside of its folder. Raises ManifestError, naming `where`."""
    manifest = manifest_from_json(text, where)
    check_paths(manifest, where)
    return manifest


def why_no_checkpoint(store: Store) -> str:
    """Why a folder is no checkpoint, and what to do: it is not there, holds checkpoints, or was never completed."""
    path = store.url
    found = store.list_folder()
    if not found.exists:
        return f"{path}: no such folder; `ft-ckpt ls` lists the checkpoints of a run"
    names = [each.name for each in visible_folders(found) if store.within(each.name).stat(MANIFEST_NAME)]
    if names:
        return f"{path}: the folder of a run, which holds {listing(names, ', ')}; name one of them"
    return f"{path}: no {MANIFEST_NAME} in it, so no save was completed there; use another folder or save again"


@dataclass(frozen=True)
class Listing:
    """The checkpoints in a folder, oldest first, and the manifests there that could not be read, with the reasons.

    `damaged` ones will not be read later either; `unreadable` ones may be whole, and count for something.
    """

    found: tuple[CheckpointInfo, ...]
    damaged: Mapping[Path | str, CheckpointError]
    unreadable: Mapping[Path | str, CheckpointError]

    def warn_left_out(self) -> None:
        """Name what could not be read, as warnings."""
        for path, error in {**self.damaged, **self.unreadable}.items():
            warn(f"{path}: left out: {error}", stacklevel=3)

    def require_readable(self) -> None:
        """Raise UnreadableError naming what the system would not read just now: it may be what is looked for."""
        if self.unreadable:
            newest = self.found[-1].path if self.found else "none"
            told = listing([str(error) for error in self.unreadable.values()])
            raise UnreadableError(f"{told}; the newest checkpoint that can be read is {newest}: try again, or name one")


def list_checkpoints(root: str | os.PathLike[str] | Place) -> Listing:
    """The committed checkpoints in `root` and directly below it, as `discover` has them, and what is wrong with others.

    Raises UnreadableError when `root` itself cannot be listed.
    """
    store = open_place(root).folder
    folders = visible_folders(store.list_folder())
    stores = [store, *(store.within(each.name) for each in folders)]
    identities = [store.identity, *(each.identity for each in folders)]
    found: dict[str, CheckpointInfo] = {}
    damaged: dict[Path | str, CheckpointError] = {}
    unreadable: dict[Path | str, CheckpointError] = {}
    for each, identity, result in zip(stores, identities, _read_all(stores), strict=True):
        if isinstance(result, CheckpointInfo):
            found.setdefault(identity, result)  # links come last: one to a sibling is not a second checkpoint
        elif isinstance(result, UnreadableError):
            unreadable[Place(each).location] = result
        elif result is not None:
            damaged[Place(each).location] = result
    return Listing(tuple(in_run_order(found.values())), damaged, unreadable)


def discover(root: str | os.PathLike[str] | Place) -> list[CheckpointInfo]:
    """The committed checkpoints in `root` and directly below it, oldest first.

    Runs come in the order of their newest checkpoints, those of one run by step, before them those without one in the
    order they were saved in. Hidden folders and those without a manifest are left out;
    so are those whose manifest is damaged or cannot be read just now, with a warning that names them. Raises
    UnreadableError when `root` itself cannot be listed.
    """
    listed = list_checkpoints(root)
    listed.warn_left_out()
    return list(listed.found)


def list_readable(root: str | os.PathLike[str] | Place) -> Listing:
    """`list_checkpoints` for a choice among them: warns of damaged ones.

    Raises UnreadableError where one cannot be read, now and a second later: it may be the one to choose.
    """
    listed = look_again(lambda: list_checkpoints(root), lambda found: bool(found.unreadable))
    listed.require_readable()
    listed.warn_left_out()
    return listed


def run_checkpoints(run: str | os.PathLike[str] | Place) -> list[CheckpointInfo]:
    """The committed checkpoints directly below the folder `run`, as `discover` has them."""
    own = open_place(run).folder
    return [info for info in discover(run) if info.store != own]


def latest(directory: str | os.PathLike[str] | Place) -> Path | str | None:
    """The newest checkpoint in `directory` that passes `verify(deep=False)`; None when there is none.

    One that was computed from others (an average, a merged model) is passed over: it is no moment of a run. One that
    does not pass is left out with a warning that says why. It is a path on this machine, or a URL, as `directory` is.
    Raises UnreadableError when a newer one, or any manifest, cannot be read just now: it may be the newest.
    """
    found = find_latest(directory)
    return None if found is None else found.path


def find_latest(directory: str | os.PathLike[str] | Place) -> CheckpointInfo | None:
    """The checkpoint that `latest` names."""
    return _first_valid(reversed(_moments(list_readable(directory).found)), "an older checkpoint")


def best(run: str | os.PathLike[str] | Place, metric: str | tuple[str, str] | None = None) -> Path | str | None:
    """The checkpoint of the newest run in the folder `run` that is the best by a metric; None when none has a number.

    `metric` is (name, "min" or "max"). A name alone, or None where there is one metric, is looked up in what the run's
    `Keep.best` and `Every.best` said. NaN is never the best; of equals the first is. What does not pass
    `verify(deep=False)` is left out with a warning. Raises ConfigError when it is not known which metric is meant, or
    whether less or more of it is better; UnreadableError when one that may be the best cannot be read just now.
    """
    found = find_best(run, metric)
    return None if found is None else found.path


def find_best(
    run: str | os.PathLike[str] | Place, metric: str | tuple[str, str] | None = None
) -> CheckpointInfo | None:
    """The checkpoint that `best` names."""
    infos = _moments(list_readable(run).found)
    infos = [info for info in infos if info.manifest.run_id == infos[-1].manifest.run_id]
    if not infos:
        return None
    name, mode = _wanted_ranking(infos, metric)
    known = [info for info in infos if not math.isnan(info.manifest.metrics.get(name, math.nan))]
    known.sort(key=lambda info: info.manifest.metrics[name] * (1 if mode == "min" else -1))
    return _first_valid(known, "the next best")


def verify(path: str | os.PathLike[str] | Place, *, deep: bool = True) -> VerifyReport:
    """Compare the files of checkpoint `path` with its manifest.

    Always: names, sizes, the tensors in every safetensors header, every index, the digests of files below 1 MiB, and no
    weights left from another save. `deep` also reads every other byte and compares the digests.

    Raises NotACheckpointError, ManifestError or UnreadableError as `read_manifest` does.
    """
    store = open_place(path).folder
    found_at = Place(store).location
    while True:
        before = _manifest_version(store)
        seen = store if before is None else hold_listed(store)
        try:
            manifest = load_manifest(seen)
        except NotACheckpointError:
            raise NotACheckpointError(why_no_checkpoint(store)) from None
        with damaged_input(found_at):
            problems = tuple(dict.fromkeys(checkpoint_problems(seen, manifest, deep=deep)))
        # One save may overwrite the checkpoint while it is read here: what was seen is then half of each. Look again.
        if not problems or _manifest_version(store) == before:
            size_bytes = stored_bytes(seen, manifest)
            return VerifyReport(found_at, not problems, problems, len(manifest.files), size_bytes)


def _moments(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Those that are moments of a run: not computed from others."""
    return [info for info in infos if not info.manifest.made_from]


def check_small_files(
    path: str | os.PathLike[str] | Place, manifest: Manifest, *, below_bytes: int = SMALL_BYTES
) -> None:
    """Compare size and digest of the files of checkpoint `path` that its manifest lists with less than `below_bytes`.

    Reads nothing else: no header, no large file. Raises CorruptError naming every file that differs.
    """
    store = open_place(path).folder
    if problems := small_problems(store, manifest, below_bytes):
        raise CorruptError(f"{store.url}: {listing(problems)}; use an older checkpoint")


def _read_all(stores: Sequence[Store]) -> list[CheckpointInfo | CheckpointError | None]:
    """What `_checkpoint_info` says of each; many are asked at once where each answer takes its time."""
    if isinstance(stores[0], LocalStore):
        return list(map(_checkpoint_info, stores))
    from concurrent.futures import ThreadPoolExecutor  # here, so that listing a disk does not pay for it

    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        return list(pool.map(_checkpoint_info, stores))


def _checkpoint_info(store: Store) -> CheckpointInfo | CheckpointError | None:
    """The checkpoint committed in `store`, or the error of reading it; None when nothing is committed there."""
    try:
        with damaged_input(store.url):
            return CheckpointInfo(store, load_manifest(store))
    except NotACheckpointError:
        return None
    except CheckpointError as error:
        return error


def in_run_order(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Sort oldest first: a run that was begun afresh is newer than one that got further before it.

    Those of the same run, step and time stay in the order they come in.
    """
    infos, newest = list(infos), dict[str | None, str]()
    for info in infos:
        run = info.manifest.run_id
        newest[run] = max(newest.get(run, ""), info.manifest.created)
    return sorted(infos, key=lambda info: (newest[info.manifest.run_id], *_age_order(info)))


def _age_order(info: CheckpointInfo) -> tuple[int, int, str]:
    """The sort key within a run: step, number, time. Clocks may go back, so the number comes before the time."""
    manifest = info.manifest
    return (-1 if manifest.step is None else manifest.step, manifest.number or 0, manifest.created)


def _first_valid(infos: Iterable[CheckpointInfo], instead: str) -> CheckpointInfo | None:
    """The first that passes `verify(deep=False)`; warns of each damaged one before it.

    Raises UnreadableError for one before it that may be whole.
    """
    unread: list[str] = []
    for info in infos:
        try:
            problems = damage_of(info.place)
        except UnreadableError as error:
            unread.append(str(error))
            continue
        except CheckpointError as error:  # deleted or damaged since it was discovered
            problems = (str(error),)
        if not problems and not unread:
            return info
        if not problems:
            raise UnreadableError(f"{unread[0]}; {info.path} can be read: try again, or name it")
        if not unread:
            warn(f"{info.path}: not valid, using {instead}: {'; '.join(problems)}", stacklevel=4)
    if unread:
        raise UnreadableError(f"{unread[0]}; no other can be read: try again")
    return None


def damage_of(place: Place, *, deep: bool = False) -> tuple[str, ...]:
    """The problems that `verify` reports; the checkpoint is looked at again where they may pass.

    Raises as `verify` does, and UnreadableError where files cannot be read just now and nothing else is wrong.
    """

    def look() -> tuple[str, ...]:
        try:
            return verify(place, deep=deep).problems
        except UnreadableError as error:
            return (PassingProblem(error),)

    problems = look_again(look, may_pass)
    if may_pass(problems):
        raise UnreadableError(f"{place}: {listing(list(problems))}; try again")
    return problems


def _wanted_ranking(infos: Sequence[CheckpointInfo], metric: str | tuple[str, str] | None) -> tuple[str, str]:
    """The name of the metric to rank by, and "min" or "max". Raises ConfigError when that cannot be decided."""
    if isinstance(metric, tuple) and len(metric) == 2 and metric[1] in ("min", "max"):
        return metric
    told = {name: mode for info in infos for name, mode in info.manifest.rankings.items()}
    meant = [name for name in told if metric in (None, name)]
    if len(meant) == 1:
        return meant[0], told[meant[0]]
    known = sorted({name for info in infos for name in info.manifest.metrics})
    raise ConfigError(
        f"metric={metric!r}: expected (name, 'min' or 'max'); the run's Keep and Every rank by "
        f"{listing(sorted(told), ', ') or 'none'}, its checkpoints have {listing(known, ', ') or 'no metrics'}"
    )


def visible_folders(found: FolderListing) -> list[Folder]:
    """The folders that may be checkpoints: hidden ones are saves under way, or have another use."""
    return [folder for folder in found.folders if not folder.name.startswith(".")]


def _manifest_version(store: Store) -> str | None:
    try:
        found = store.stat(MANIFEST_NAME)
    except UnreadableError:
        return None
    return None if found is None else found.version


_HEAD_BYTES = 64 << 10  # of a manifest: the fields that are one number or one line


def next_number(target: Store, beside: Store) -> int:
    """The number of a checkpoint without a step that is saved to `target`: one more than the largest `beside` it."""
    numbers = []
    for store in (target, beside):
        below = [store.within(folder.name) for folder in visible_folders(store.list_folder())]
        numbers += [_number_in_head(each) for each in (store, *below)]
    return 1 + max(numbers)


def _number_in_head(store: Store) -> int:
    """The number of the checkpoint in `store`, from the head of its manifest alone; 0 when it has none."""
    try:
        with closing(store.open(MANIFEST_NAME)) as file:
            head = read_range(file, 0, _HEAD_BYTES)
    except CorruptError:
        return 0
    found = re.search(rb'^  "number": (\d{1,18}),$', head, re.MULTILINE)
    return int(found[1]) if found else 0


def is_hub_name(name: str) -> bool:
    """Whether the Hub may have a model of that name, and no folder here has it."""
    from huggingface_hub.errors import HFValidationError  # here, so that listing does not pay for it
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not LocalStore(Path(name)).list_folder().exists
